"""Megatron's GPTModel, DDP and DistributedOptimizer on one rank, without verl: what the optimizer probe measures.

Works with megatron-core 0.13 to 0.16: the local layer specification and the constructors used here did not change.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.train.probe_shapes import Shape

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
_LONGEST_SEQUENCE = 512


@dataclass
class BareEngine:
    """What an engine is to the observer: model chunks and their optimizer."""

    module: list[Any]
    optimizer: Any

    @property
    def chunk(self) -> Any:
        """The only model chunk: a DistributedDataParallel."""
        (only,) = self.module
        return only

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.chunk.zero_grad_buffer()

    def token_losses(self, tokens: torch.Tensor) -> torch.Tensor:
        """Cross entropy of each next token, fp32. tokens: int64 [sequence, position]; the losses have its shape."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.chunk(tokens, positions, None, labels=tokens.roll(-1, 1))

    def optimizer_step(self) -> tuple[bool, float]:
        """Whether Megatron calls the step a success, and the gradient's norm before clipping."""
        succeeded, grad_norm, _ = self.optimizer.step()
        return bool(succeeded), float(grad_norm)


@contextlib.contextmanager
def one_rank(on_cpu: bool) -> Iterator[None]:
    """A process group of this process alone, and Megatron's parallel state on it."""
    with contextlib.ExitStack() as stack:
        if on_cpu:
            from pipeline.train.plugin import megatron_on_host

            stack.enter_context(megatron_on_host())
        else:
            torch.cuda.set_device(0)
            # Megatron's overlap of communication needs one queue; asserted for sequence parallelism.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="probe-"))
        torch.distributed.init_process_group(
            "gloo" if on_cpu else "nccl", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1
        )
        stack.callback(torch.distributed.destroy_process_group)
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel()
        torch.manual_seed(0)
        model_parallel_cuda_manual_seed(0)
        yield


def build(shape: Shape, optim: dict[str, Any], on_cpu: bool) -> BareEngine:
    """A model with random bf16 weights (the same for every arm) and the arm's optimizer.

    optim: verl's settings `actor_rollout_ref.actor.optim` of recipe and arm together; `lr` must be there.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config = transformer_config(shape, on_cpu)
    model: Any = _model(config, shape)
    if not on_cpu:
        model = model.cuda()  # norms are made on the host; all else lies on the device already, in bf16
    gradients = _DTYPES[optim.get("main_grads_dtype", "fp32")]
    ddp = DistributedDataParallel(
        config,
        # As verl derives it from main_grads_dtype.
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=gradients == torch.float32),
        Float16Module(config, model),
    )
    del model
    optimizer = get_megatron_optimizer(optimizer_config(optim), [ddp])
    if not on_cpu:
        torch.cuda.empty_cache()  # DDP moved the weights to its buffer: give back where they were
    return BareEngine([ddp], optimizer)


def transformer_config(shape: Shape, on_cpu: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        normalization="RMSNorm",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,  # kernels that neither megatron-core's package nor TransformerEngine brings
        persist_layer_norm=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=on_cpu,
    )


def _model(config: Any, shape: Shape) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=shape.vocabulary,
        max_sequence_length=_LONGEST_SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def optimizer_config(optim: dict[str, Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    precision_aware = bool(optim.get("use_precision_aware_optimizer"))
    names = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    dtypes: dict[str, Any] = {name: _DTYPES[optim[name]] for name in names if name in optim} if precision_aware else {}
    return OptimizerConfig(
        optimizer="adam",
        lr=optim["lr"],
        min_lr=optim["lr"],
        weight_decay=optim["weight_decay"],
        clip_grad=optim["clip_grad"],
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=precision_aware,
        **dtypes,
    )
