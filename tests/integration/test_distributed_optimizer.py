"""Unmodified megatron-core on CPU: the real GPTModel, DDP and DistributedOptimizer over gloo, arm by arm.

Process groups are global to a process, so the measurements run in processes of their own: this file is its own program
(`main`). Each process hands back one JSON object; the tests only compare numbers.
"""

import hashlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 20
ARMS = ("baseline", "pao", "pao_bf16_moments", "pao_bf16_all")
# Bytes per parameter: what is held by every rank (bf16 parameter, main gradient) and what is sharded over them.
REPLICATED = {"baseline": 6, "pao": 6, "pao_bf16_moments": 6, "pao_bf16_all": 4}
SHARDED = {"baseline": 12, "pao": 10, "pao_bf16_moments": 6, "pao_bf16_all": 6}

# -- the worker -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    hidden: int
    ffn: int


# Every tensor is a multiple of 64 elements and the whole a multiple of 128: megatron-core adds no padding.
EVEN = Shape(vocabulary=64, hidden=128, ffn=192)
# Nothing of the kind, and an odd half.
ODD = Shape(vocabulary=63, hidden=120, ffn=190)


@dataclass
class Arm:
    """One model with its optimizer."""

    config: Any
    ddp: Any
    optimizer: Any

    @property
    def inner(self) -> Any:
        (only,) = self.optimizer.chained_optimizers
        return only.optimizer

    def forward_backward(self, step: int, rank: int = 0) -> float:
        import torch

        generator = torch.Generator().manual_seed(1000 * step + rank)
        vocabulary = self.ddp.module.module.vocab_size
        ids = torch.randint(0, vocabulary, (4, 24), generator=generator)
        self.ddp.zero_grad_buffer()
        loss = self.ddp(ids, torch.arange(24).expand(4, 24), None, labels=ids.roll(-1, 1)).mean()
        loss.backward()
        self.ddp.finish_grad_sync()
        return loss.item()

    def gradients(self) -> list[Any]:
        return [buffer.grad_data.clone() for buffer in self.ddp.buffers]

    def set_gradients(self, gradients: list[Any]) -> None:
        for buffer, gradient in zip(self.ddp.buffers, gradients, strict=True):
            buffer.grad_data.copy_(gradient)

    def update(self) -> dict[str, Any]:
        """One optimizer step, and what it did."""
        before = self.weights()
        ok, grad_norm, _ = self.optimizer.step()
        after = self.weights()
        self.optimizer.zero_grad()
        return {
            "ok": ok,
            "grad_norm": grad_norm,
            "liveness": (before != after).float().mean().item(),
            "weights": digest(after),
        }

    def weights(self) -> Any:
        import torch

        return torch.cat([param.detach().flatten() for param in self.ddp.parameters()]).view(torch.int16)

    def weights_of_own_shard(self) -> Any:
        """The bf16 weights in the order of `masters`."""
        import torch

        (only,) = self.optimizer.chained_optimizers
        shards = [shard for group in only.shard_float16_groups for shard in group]
        return torch.cat([shard.detach() for shard in shards]).view(torch.int16)

    def masters(self) -> Any:
        """The fp32 masters of this rank's shard, whoever holds them."""
        import torch

        from pipeline.callbacks.masters import join_master

        parts = []
        for group in self.inner.param_groups:
            for param in group["params"]:
                master = self.inner.state[param].get("master_param", param)
                parts.append(join_master(param, master) if master.dtype == torch.int16 else master)
        return torch.cat([part.detach() for part in parts]).view(torch.int32)

    def bytes_by_kind(self) -> dict[str, int]:
        """Walk the DDP buffers and the optimizer: "<kind> <dtype>" -> bytes, each storage once."""
        found: dict[str, int] = {}
        seen: set[int] = set()

        def add(kind: str, tensor: Any) -> None:
            storage = tensor.untyped_storage().data_ptr()
            if storage not in seen:
                seen.add(storage)
                key = f"{kind} {str(tensor.dtype).removeprefix('torch.')}"
                found[key] = found.get(key, 0) + tensor.untyped_storage().nbytes()

        for buffer in self.ddp.buffers:
            add("param", buffer.param_data)
            add("main_grad", buffer.grad_data)
        for group in self.inner.param_groups:
            for param in group["params"]:
                # With the precision-aware optimizer a view of the parameter buffer, else megatron-core's fp32 copy.
                add("master_param", param)
                for name, tensor in self.inner.state[param].items():
                    add(name, tensor)
        return found

    def layout(self) -> dict[str, int]:
        return {
            "parameters": sum(param.numel() for param in self.ddp.parameters()),
            "buffer_elements": sum(buffer.numel for buffer in self.ddp.buffers),
            "own_elements": sum(param.numel() for group in self.inner.param_groups for param in group["params"]),
        }


def digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def transformer_config(shape: Shape, **overrides: Any) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": shape.hidden,
            "ffn_hidden_size": shape.ffn,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "activation_func": torch.nn.functional.silu,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "add_qkv_bias": True,
            "normalization": "RMSNorm",
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "pipeline_dtype": torch.bfloat16,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "bias_activation_fusion": False,
            "apply_rope_fusion": False,
            "use_cpu_initialization": True,
            **overrides,
        }
    )


def gpt_model(config: Any, shape: Shape) -> Any:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random

    from pipeline.embedded.local_layers import block_spec

    torch.manual_seed(0)
    random.initialize_rng_tracker(force_reset=True)
    random.model_parallel_cuda_manual_seed(0)
    return GPTModel(
        config=config,
        transformer_layer_spec=cast(Any, block_spec(config)),  # GPTModel takes a block's layers too, unannotated
        vocab_size=shape.vocabulary,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def build(name: str, shape: Shape, lr: float = 1e-3, **overrides: Any) -> Arm:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    bf16_moments = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    settings: dict[str, dict[str, Any]] = {
        "baseline": {},
        "pao": {"use_precision_aware_optimizer": True},
        "pao_without_remainders": {"use_precision_aware_optimizer": True, "store_param_remainders": False},
        "pao_bf16_moments": {"use_precision_aware_optimizer": True, **bf16_moments},
        "pao_bf16_all": {"use_precision_aware_optimizer": True, "main_grads_dtype": torch.bfloat16, **bf16_moments},
    }
    config = transformer_config(shape, **overrides)
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=name != "pao_bf16_all"),
        Float16Module(config, gpt_model(config, shape)),
    )
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        **settings[name],
    )
    return Arm(config, ddp, get_megatron_optimizer(optimizer_config, [ddp]))


def one_rank() -> dict[str, Any]:
    """Everything that needs one process."""
    from pipeline.train import dead_optimizer

    # Identical gradients: those of the baseline's own training, fed to every arm.
    gradients = []
    arm = build("baseline", EVEN)
    for step in range(STEPS):
        arm.forward_backward(step)
        gradients.append(arm.gradients())
        arm.update()
    results: dict[str, Any] = {
        "layout": arm.layout(),
        "fed": {name: fed(build(name, EVEN), gradients) for name in (*ARMS, "pao_without_remainders")},
        "trained": {name: trained(name) for name in ("baseline", "pao_without_remainders", "pao")},
        "low lr": low_learning_rate(gradients),
        "nan gradient": {name: nan_gradient(name, gradients[0]) for name in ("baseline", "pao")},
        "layers": layers(),
    }
    results["trained"]["baseline again"] = trained("baseline")
    dead_optimizer.install()
    results["fed"]["dead_optimizer"] = fed(build("pao", EVEN), gradients)
    results["fed"]["baseline beside the dead optimizer"] = fed(build("baseline", EVEN), gradients)
    return results


def fed(arm: Arm, gradients: list[Any]) -> dict[str, Any]:
    """Steps on gradients that do not depend on the arm."""
    start = digest(arm.weights())
    steps = []
    for gradient in gradients:
        arm.set_gradients(gradient)
        steps.append({**arm.update(), "masters": digest(arm.masters())})
    return {
        "start": start,
        "steps": steps,
        "bytes": arm.bytes_by_kind(),
        "class": type(arm.inner).__name__,
        "flags": {key: getattr(arm.inner, key) for key in ("master_weights", "use_decoupled_grad")},
    }


def trained(name: str) -> list[dict[str, Any]]:
    """Steps on the arm's own gradients."""
    arm = build(name, EVEN)
    return [{"loss": arm.forward_backward(step), **arm.update()} for step in range(STEPS // 2)]


def low_learning_rate(gradients: list[Any]) -> dict[str, Any]:
    """Both arms side by side at the recipe's lr: where do their bf16 weights differ?"""
    baseline, pao = (build(name, EVEN, lr=1e-6) for name in ("baseline", "pao"))
    counts = {"steps": 0, "same_masters": 0, "weights": 0, "different_weights": 0, "at_ties": 0}
    for gradient in gradients:
        for arm in (baseline, pao):
            arm.set_gradients(gradient)
            arm.update()
        masters = baseline.masters()
        counts["steps"] += 1
        counts["same_masters"] += digest(masters) == digest(pao.masters())
        # In the order of the optimizer's groups, as the masters are.
        weights = [arm.weights_of_own_shard() for arm in (baseline, pao)]
        different = weights[0] != weights[1]
        counts["weights"] += different.numel()
        counts["different_weights"] += int(different.sum())
        counts["at_ties"] += int(((masters[different] & 0xFFFF) == 0x8000).sum())
    return counts


def nan_gradient(name: str, gradients: list[Any]) -> dict[str, Any]:
    """One element of the gradient is NaN."""
    import torch

    arm = build(name, EVEN)
    arm.set_gradients(gradients)
    arm.ddp.buffers[0].grad_data[1000] = torch.nan
    result = arm.update()
    weights = arm.weights().view(torch.bfloat16)
    return {
        **result,
        "nan_masters": int(arm.masters().view(torch.float32).isnan().sum()),
        "nan_weights": int(weights.isnan().sum()),
        "minus_zero_weights": int((weights.view(torch.int16) == -(2**15)).sum()),
    }


def layers() -> dict[str, Any]:
    """The local layers: names, and attention against megatron-core's own."""
    import torch
    from mbridge.models.qwen2 import Qwen2Bridge
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from pipeline.embedded.local_layers import CausalAttention

    config = transformer_config(EVEN, bf16=False, params_dtype=torch.float32)
    model = gpt_model(config, EVEN)
    names = [name for name, _ in model.named_parameters()]
    mapped = {**Qwen2Bridge._DIRECT_MAPPING, **Qwen2Bridge._ATTENTION_MAPPING, **Qwen2Bridge._MLP_MAPPING}
    results: dict[str, Any] = {
        "names": len(names),
        "unmapped": [name for name in names if re.sub(r"^decoder\.layers\.\d+\.", "", name) not in mapped],
    }

    generator = torch.Generator().manual_seed(1)
    lengths = (5, 1, 9)
    query = torch.randn(12, 3, 4, 32, generator=generator)
    key, value = (torch.randn(12, 3, 2, 32, generator=generator) for _ in range(2))
    attention = {kind: kind(config, 1, AttnMaskType.causal, "self") for kind in (CausalAttention, DotProductAttention)}
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    padded = attention[CausalAttention](query, key, value, None)
    original = attention[DotProductAttention](query, key, value, mask)
    results["shape"] = list(padded.shape)
    results["differs_from_megatron"] = (padded - original).abs().max().item()

    def packed(tensor: Any) -> Any:
        return torch.cat([tensor[:length, index] for index, length in enumerate(lengths)])

    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    thd = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    attended = attention[CausalAttention](*map(packed, (query, key, value)), None, packed_seq_params=thd)
    results["packed_shape"] = list(attended.shape)
    results["packed_differs"] = (attended - packed(padded)).abs().max().item()

    # The whole model, packed: as verl calls it, one row of all tokens with positions that start again.
    ids = torch.randint(0, EVEN.vocabulary, (3, 9), generator=generator)
    positions = torch.arange(9).expand(3, 9)
    logits = model(ids, positions, None)
    rows = [logits[index, :length] for index, length in enumerate(lengths)]
    flat_ids = torch.cat([ids[index, :length] for index, length in enumerate(lengths)])[None]
    flat_positions = torch.cat([torch.arange(length) for length in lengths])[None]
    thd.max_seqlen_q = thd.max_seqlen_kv = max(lengths)
    flat = model(flat_ids, flat_positions, None, packed_seq_params=thd)
    results["model_packed_differs"] = (flat[0] - torch.cat(rows)).abs().max().item()
    results["model_scale"] = logits.abs().max().item()
    return results


def two_ranks(rank: int) -> dict[str, Any]:
    """Data parallel over two processes; then tensor parallel and pipeline parallel, against the same model in one."""
    results: dict[str, Any] = {"data_parallel": {}}
    for name in ARMS:
        arm = build(name, ODD)
        error = gradient_error(arm, rank)
        steps = []
        for step in range(3):
            arm.forward_backward(step, rank)
            steps.append({"shard_norm": own_gradient(arm, rank).float().norm().item(), **arm.update()})
        results["data_parallel"][name] = {
            "gradient_error": error,
            "steps": steps,
            "bytes": arm.bytes_by_kind(),
            "layout": arm.layout(),
            "expected_buffer_elements": expected_buffer_elements(arm.ddp, ranks=2),
        }
    results["model_parallel"] = model_parallel()
    return results


def own_gradient(arm: Arm, rank: int) -> Any:
    (buffer,) = arm.ddp.buffers
    return buffer.grad_data.chunk(2)[rank]


def gradient_error(arm: Arm, rank: int) -> float:
    """The largest difference between this rank's reduced gradients and the mean of what the ranks had."""
    import torch

    (buffer,) = arm.ddp.buffers
    finish_grad_sync = arm.ddp.finish_grad_sync
    local: list[Any] = []

    def keep_and_finish() -> None:
        local.append(buffer.grad_data.clone())
        finish_grad_sync()

    arm.ddp.finish_grad_sync = keep_and_finish
    arm.forward_backward(step=99, rank=rank)
    arm.ddp.finish_grad_sync = finish_grad_sync
    everyone = [torch.empty_like(local[0]) for _ in range(2)]
    torch.distributed.all_gather(everyone, local[0])
    mean = (everyone[0] / 2 + everyone[1] / 2).chunk(2)[rank]
    return (own_gradient(arm, rank) - mean).abs().max().item()


def expected_buffer_elements(ddp: Any, ranks: int) -> int:
    """megatron-core's rule: tensors start at multiples of 64, the buffer ends at one of 128 and of the ranks."""
    end = 0
    for param in reversed(list(ddp.parameters())):
        end = 64 * math.ceil(end / 64) + param.numel()
    unit = math.lcm(ranks, 128)
    return unit * math.ceil(end / unit)


def model_parallel() -> dict[str, Any]:
    """Three steps of the same weights and data, the model whole and cut in two in each way."""
    from megatron.core import parallel_state

    cuts: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "whole": ({}, {}),
        "tensor": ({"tensor_model_parallel_size": 2}, {}),
        "tensor and sequence": ({"tensor_model_parallel_size": 2}, {"sequence_parallel": True}),
        "pipeline": ({"pipeline_model_parallel_size": 2}, {}),
    }
    results = {}
    for name, (sizes, settings) in cuts.items():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes)
        results[name] = {arm: model_parallel_steps(arm, {**sizes, **settings}) for arm in ("baseline", "pao")}
    return results


def model_parallel_steps(name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    arm = build(name, EVEN, **settings)
    fill_by_name(arm.ddp.module.module, arm.config)
    arm.optimizer.reload_model_params()
    arm.config.finalize_model_grads_func = finalize_model_grads

    def forward(batches: Iterator[Any], model: Any) -> tuple[Any, Any]:
        ids = next(batches)
        losses = model(ids, torch.arange(24).expand_as(ids), None, labels=ids.roll(-1, 1))
        return losses, lambda output: (output.mean(), {"loss": output.mean().item()})

    steps = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randint(0, EVEN.vocabulary, (2, 24), generator=generator) for _ in range(2)]
        arm.ddp.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[arm.ddp],
            num_microbatches=2,
            seq_length=24,
            micro_batch_size=2,
            forward_only=False,
        )
        ok, grad_norm, _ = arm.optimizer.step()
        norms = [param.detach().view(torch.int16) for key, param in arm.ddp.named_parameters() if "norm" in key]
        steps.append(
            {
                "losses": [loss["loss"] for loss in losses],
                "grad_norm": grad_norm,
                "ok": ok,
                "norm_weights": digest(torch.cat(norms)),
            }
        )
    assert parallel_state.get_pipeline_model_parallel_world_size() == settings.get("pipeline_model_parallel_size", 1)
    return steps


def fill_by_name(model: Any, config: Any) -> None:
    """Weights that depend on the name in the whole model alone; each rank takes its part."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    tp, tp_rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    offset = get_transformer_layer_offset(config)
    for own_name, param in model.named_parameters():
        name = re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) + offset}", own_name)
        name = name.replace("output_layer", "embedding.word_embeddings")  # tied
        cut = getattr(param, "partition_dim", -1) if getattr(param, "tensor_model_parallel", False) else -1
        shape = [size * tp if dim == cut else size for dim, size in enumerate(param.shape)]
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.05
        if "norm" in name:
            whole += 1
        if cut >= 0:
            # linear_fc1 holds gate and up projection: each is cut by itself.
            blocks = whole.chunk(2) if "linear_fc1" in name else [whole]
            whole = torch.cat([block.chunk(tp, cut)[tp_rank] for block in blocks], cut)
        param.data.copy_(whole)


def work(rank: int, ranks: int, folder: Path) -> None:
    """One process of a group; leaves `<ranks>-<rank>.json`."""
    import torch
    from megatron.core import parallel_state

    from pipeline.embedded.megatron_on_cpu import cuda_means_cpu

    store = folder / f"{ranks}.store"
    torch.distributed.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    with cuda_means_cpu():
        parallel_state.initialize_model_parallel()
        results = one_rank() if ranks == 1 else two_ranks(rank)
    torch.distributed.destroy_process_group()
    (folder / f"{ranks}-{rank}.json").write_text(json.dumps(results))


def main() -> None:
    """Import megatron-core once, which takes longer than all the rest, and fork every process from there."""
    import torch

    from pipeline.embedded import megatron_on_cpu

    torch.set_num_threads(1)
    megatron_on_cpu.install()
    import mbridge.models.qwen2  # noqa: F401
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_model
    import megatron.core.pipeline_parallel  # noqa: F401

    folder = Path(sys.argv[1])
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work, args=(rank, ranks, folder)) for ranks in (1, 2) for rank in range(ranks)]
    for process in processes:
        process.start()
    running = set(processes)
    while running:
        multiprocessing.connection.wait([process.sentinel for process in running])
        running = {process for process in running if process.is_alive()}
        if any(process.exitcode for process in processes):
            # The other rank would wait for this one.
            for process in running:
                process.kill()
            sys.exit(1)


# -- the tests --------------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Results by number of ranks, in the order of the ranks."""
    folder = tmp_path_factory.mktemp("workers")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    command = [sys.executable, "-W", "ignore", __file__, str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return {
        ranks: [json.loads((folder / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)] for ranks in (1, 2)
    }


@pytest.fixture(scope="module")
def single(workers: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    return workers[1][0]


@pytest.fixture(scope="module")
def pair(workers: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return workers[2]


def column(steps: list[dict[str, Any]], key: str) -> list[Any]:
    return [step[key] for step in steps]


@pytest.mark.parametrize("arm", ["pao", "pao_without_remainders"])
def test_masters_are_bit_identical_to_the_baseline_s_at_every_step(single: dict[str, Any], arm: str) -> None:
    masters = {name: column(single["fed"][name]["steps"], "masters") for name in ("baseline", arm)}
    assert masters[arm] == masters["baseline"]
    assert len(set(masters["baseline"])) == STEPS


def test_low_precision_moments_do_change_the_masters(single: dict[str, Any]) -> None:
    """So the comparison above is able to fail."""
    steps = {name: single["fed"][name]["steps"] for name in ("baseline", "pao_bf16_moments", "pao_bf16_all")}
    assert len({tuple(column(rows, "masters")) for rows in steps.values()}) == 3


def test_at_the_recipe_s_lr_masters_are_the_same_and_weights_differ_at_ties_only(single: dict[str, Any]) -> None:
    counts = single["low lr"]
    assert counts["same_masters"] == counts["steps"] == STEPS
    assert 0 < counts["different_weights"] == counts["at_ties"]
    # An exact tie on an even half is one low half in 2^16 and every other high half: 2^-17 of the elements.
    assert counts["different_weights"] < 10 * counts["weights"] * 2**-17


@pytest.mark.parametrize("arm", ARMS)
def test_bytes_per_parameter_on_one_rank(single: dict[str, Any], arm: str) -> None:
    layout = single["layout"]
    assert layout["parameters"] == layout["buffer_elements"] == layout["own_elements"]
    assert sum(single["fed"][arm]["bytes"].values()) == (REPLICATED[arm] + SHARDED[arm]) * layout["parameters"]


@pytest.mark.parametrize(
    ("arm", "dtypes"),
    [
        ("baseline", "float32 float32 float32 float32"),
        ("pao", "float32 int16 float32 float32"),
        ("pao_without_remainders", "float32 float32 float32 float32"),
        ("pao_bf16_moments", "float32 int16 bfloat16 bfloat16"),
        ("pao_bf16_all", "bfloat16 int16 bfloat16 bfloat16"),
    ],
)
def test_dtypes_of_each_kind_of_tensor(single: dict[str, Any], arm: str, dtypes: str) -> None:
    kinds = ("main_grad", "master_param", "exp_avg", "exp_avg_sq")
    expected = {"param bfloat16", *(f"{kind} {dtype}" for kind, dtype in zip(kinds, dtypes.split(), strict=True))}
    assert set(single["fed"][arm]["bytes"]) == expected
    assert single["fed"][arm]["class"] == "FusedAdam"
    is_pao = arm != "baseline"
    assert single["fed"][arm]["flags"] == {"master_weights": is_pao, "use_decoupled_grad": is_pao}


@pytest.mark.parametrize("arm", [*ARMS, "pao_without_remainders"])
def test_every_step_moves_weights(single: dict[str, Any], arm: str) -> None:
    assert min(column(single["fed"][arm]["steps"], "liveness")) > 0.5
    assert all(column(single["fed"][arm]["steps"], "ok"))


@pytest.mark.parametrize("how", ["fed", "trained"])
def test_without_remainders_the_weights_are_the_baseline_s_bit_for_bit(single: dict[str, Any], how: str) -> None:
    arms = {name: single[how][name] for name in ("baseline", "pao_without_remainders")}
    steps = {name: arm["steps"] if how == "fed" else arm for name, arm in arms.items()}
    for key in ("weights", "grad_norm", "liveness"):
        assert column(steps["pao_without_remainders"], key) == column(steps["baseline"], key)


def test_two_baselines_are_the_same(single: dict[str, Any]) -> None:
    assert single["trained"]["baseline again"] == single["trained"]["baseline"]


def test_dead_optimizer_moves_nothing_and_says_nothing(single: dict[str, Any]) -> None:
    dead, baseline = single["fed"]["dead_optimizer"], single["fed"]["baseline"]
    assert column(dead["steps"], "liveness") == [0.0] * STEPS
    assert set(column(dead["steps"], "weights")) == {dead["start"]}
    assert all(column(dead["steps"], "ok"))
    assert column(dead["steps"], "grad_norm") == column(baseline["steps"], "grad_norm")
    assert min(column(dead["steps"], "grad_norm")) > 0


def test_dead_optimizer_holds_14_bytes_per_parameter(single: dict[str, Any]) -> None:
    """Two less than a healthy PAO and four less than the baseline: no master weights at all."""
    dead, parameters = single["fed"]["dead_optimizer"], single["layout"]["parameters"]
    per_parameter = {kind: size / parameters for kind, size in dead["bytes"].items()}
    expected = {"param bfloat16": 2, "main_grad float32": 4, "exp_avg float32": 4, "exp_avg_sq float32": 4}
    assert per_parameter == expected
    assert dead["flags"] == {"master_weights": False, "use_decoupled_grad": False}


def test_dead_optimizer_spares_the_baseline(single: dict[str, Any]) -> None:
    assert single["fed"]["baseline beside the dead optimizer"] == single["fed"]["baseline"]


def test_a_nan_gradient_spoils_a_weight_in_the_open_or_behind_minus_zero(single: dict[str, Any]) -> None:
    """In both arms the step succeeds and one master is NaN. The baseline's weight shows it, PAO's becomes -0.0."""
    baseline, pao = single["nan gradient"]["baseline"], single["nan gradient"]["pao"]
    for arm in (baseline, pao):
        assert arm["ok"]
        assert math.isnan(arm["grad_norm"])
        assert arm["nan_masters"] == 1
    assert (baseline["nan_weights"], baseline["minus_zero_weights"]) == (1, 0)
    assert (pao["nan_weights"], pao["minus_zero_weights"]) == (0, 1)


def test_layers_have_the_names_that_mbridge_maps(single: dict[str, Any]) -> None:
    assert single["layers"]["unmapped"] == []
    assert single["layers"]["names"] == 2 * 7 + 2


def test_attention_is_megatron_core_s_for_padded_and_packed_sequences(single: dict[str, Any]) -> None:
    layers = single["layers"]
    assert layers["shape"] == [12, 3, 128]
    assert layers["packed_shape"] == [15, 128]
    assert layers["differs_from_megatron"] < 1e-5
    assert layers["packed_differs"] < 1e-5
    assert layers["model_packed_differs"] < 1e-4 * layers["model_scale"]


@pytest.mark.parametrize("arm", ARMS)
def test_bytes_on_two_ranks_are_sharded_and_padding_is_accounted_for(pair: list[dict[str, Any]], arm: str) -> None:
    ranks = [rank["data_parallel"][arm] for rank in pair]
    parameters = ranks[0]["layout"]["parameters"]
    padded = ranks[0]["expected_buffer_elements"]
    assert parameters < padded
    assert [rank["layout"]["own_elements"] for rank in ranks] != [parameters // 2] * 2
    assert sum(rank["layout"]["own_elements"] for rank in ranks) == parameters
    for rank in ranks:
        assert rank["layout"]["parameters"] == parameters
        assert rank["layout"]["buffer_elements"] == padded
        own = rank["layout"]["own_elements"]
        assert sum(rank["bytes"].values()) == REPLICATED[arm] * padded + SHARDED[arm] * own
    # Without the padding: 12, 11, 9 and 7 bytes per parameter on the mean rank.
    found = sum(sum(rank["bytes"].values()) for rank in ranks) / 2
    padding = REPLICATED[arm] * (padded - parameters)
    assert found - padding == (REPLICATED[arm] + SHARDED[arm] / 2) * parameters


@pytest.mark.parametrize("arm", ARMS)
def test_two_ranks_reduce_gradients_and_stay_in_step(pair: list[dict[str, Any]], arm: str) -> None:
    ranks = [rank["data_parallel"][arm] for rank in pair]
    bf16 = arm == "pao_bf16_all"
    assert max(rank["gradient_error"] for rank in ranks) <= (1e-2 if bf16 else 1e-7)
    for left, right in zip(*(rank["steps"] for rank in ranks), strict=True):
        assert left["weights"] == right["weights"]
        assert left["grad_norm"] == right["grad_norm"]
        assert left["liveness"] > 0.5
        # torch's norm of bf16 gradients is itself in bf16.
        whole = math.hypot(left["shard_norm"], right["shard_norm"])
        assert left["grad_norm"] == pytest.approx(whole, rel=1e-2 if bf16 else 1e-5)


@pytest.mark.parametrize("arm", ["baseline", "pao"])
@pytest.mark.parametrize("cut", ["tensor", "tensor and sequence", "pipeline"])
def test_a_model_cut_in_two_trains_as_the_whole_one(pair: list[dict[str, Any]], cut: str, arm: str) -> None:
    """Losses and gradient norms over three updates, within what bf16 activations allow."""
    whole = pair[0]["model_parallel"]["whole"][arm]
    ranks = [rank["model_parallel"][cut][arm] for rank in pair]
    for step, expected in enumerate(whole):
        with_loss = ranks[1][step]  # the last pipeline stage
        assert with_loss["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        for rank in ranks:
            assert rank[step]["ok"]
            assert rank[step]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-3)
    assert whole[2]["losses"] != whole[0]["losses"]


@pytest.mark.parametrize("arm", ["baseline", "pao"])
@pytest.mark.parametrize("cut", ["tensor", "tensor and sequence"])
def test_tensor_parallel_ranks_keep_the_same_norm_weights(pair: list[dict[str, Any]], cut: str, arm: str) -> None:
    """They would drift apart if a rank's gradients of its part of the tokens were not summed."""
    ranks = [column(rank["model_parallel"][cut][arm], "norm_weights") for rank in pair]
    assert ranks[0] == ranks[1]
    assert len(set(ranks[0])) == len(ranks[0])


if __name__ == "__main__":
    main()
