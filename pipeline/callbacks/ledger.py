"""The ledger: bytes by tensor kind and dtype on this rank, found by walking the real tensors.

Parameters and main gradients are read off Megatron's DDP buffers, master weights and moments off the optimizer's
state. Storage is counted once, however many views share it.
"""

from collections.abc import Iterator
from typing import Any

import torch

from pipeline.study.records import FoundOptimizer, LedgerEntry, RankLedger, RankMemory, TensorKind

# FusedAdam's names for its state (TransformerEngine), which are also the ledger's kinds.
_STATE_KINDS: tuple[TensorKind, ...] = ("master_param", "exp_avg", "exp_avg_sq")

_CONFIG_FLAGS = (
    "use_precision_aware_optimizer",
    "store_param_remainders",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "use_distributed_optimizer",
)
_INNER_FLAGS = ("master_weights", "use_decoupled_grad")


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def megatron_optimizers(optimizer: Any) -> list[Any]:
    """The DistributedOptimizers inside Megatron's (chained) optimizer."""
    return list(getattr(optimizer, "chained_optimizers", None) or [optimizer])


def find_entries(model_chunks: list[Any], optimizer: Any) -> list[LedgerEntry]:
    """Walk DDP buffers and optimizer state of this rank. `model_chunks`: Megatron DDP modules, one per VPP stage."""
    found: dict[tuple[TensorKind, str], tuple[int, int]] = {}
    seen: set[int] = set()
    for kind, tensor in _tensors(model_chunks, optimizer):
        if tensor.numel() == 0 or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        elements, size = found.get((kind, dtype_name(tensor.dtype)), (0, 0))
        found[kind, dtype_name(tensor.dtype)] = (
            elements + tensor.numel(),
            size + tensor.numel() * tensor.element_size(),
        )
    return [
        LedgerEntry(kind=kind, dtype=dtype, elements=elements, bytes=size)
        for (kind, dtype), (elements, size) in sorted(found.items())
    ]


def _tensors(model_chunks: list[Any], optimizer: Any) -> Iterator[tuple[TensorKind, torch.Tensor]]:
    buffer_storages: set[int] = set()
    for buffer in ddp_buffers(model_chunks):
        buffer_storages.add(buffer.param_data.untyped_storage().data_ptr())
        yield "param", buffer.param_data
        yield "main_grad", buffer.grad_data
    for part in megatron_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                # Without PAO Megatron hands FusedAdam fp32 copies of its shard: those are the master weights. With PAO
                # (and for parameters that are fp32 anyway) it hands views of the parameter buffer.
                if parameter.untyped_storage().data_ptr() not in buffer_storages:
                    yield "master_param", parameter
                for name, tensor in part.optimizer.state[parameter].items():
                    if isinstance(tensor, torch.Tensor):
                        yield (name if name in _STATE_KINDS else "other"), tensor


def ddp_buffers(model_chunks: list[Any]) -> list[Any]:
    """Megatron's parameter-and-gradient buffers of all chunks."""
    return [buffer for chunk in model_chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]


def optimizer_elements(optimizer: Any) -> int:
    """Elements whose optimizer state lives on this rank."""
    return sum(
        parameter.numel()
        for part in megatron_optimizers(optimizer)
        for group in part.optimizer.param_groups
        for parameter in group["params"]
    )


def rank_ledger(rank: int, chunks: list[Any], optimizer: Any, memory: RankMemory) -> RankLedger:
    """What this rank holds and where it stands in Megatron's parallel layout."""
    from megatron.core import parallel_state

    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    return RankLedger(
        rank=rank,
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_parallel_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        trainable_elements=sum(p.numel() for p in parameters if p.requires_grad),
        frozen_elements=sum(p.numel() for p in parameters if not p.requires_grad),
        buffer_elements=sum(buffer.param_data.numel() for buffer in ddp_buffers(chunks)),
        optimizer_elements=optimizer_elements(optimizer),
        entries=find_entries(chunks, optimizer),
        memory=memory,
    )


def find_optimizer(optimizer: Any) -> FoundOptimizer:
    """Classes and flags as they are inside this worker."""
    part = megatron_optimizers(optimizer)[0]
    flags = {name: getattr(part.config, name) for name in _CONFIG_FLAGS if hasattr(part.config, name)}
    flags.update({name: getattr(part.optimizer, name) for name in _INNER_FLAGS if hasattr(part.optimizer, name)})
    return FoundOptimizer(
        megatron_class=_qualified_name(part),
        inner_class=_qualified_name(part.optimizer),
        flags={name: dtype_name(value) if isinstance(value, torch.dtype) else value for name, value in flags.items()},
    )


def _qualified_name(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"
