"""The fp32 master weights after an optimizer step, whoever holds them: what deterministic runs are compared by.

On identical gradients the masters of a baseline and of PAO with fp32 moments agree bit for bit, and the bf16 weights
do not: PAO's remainder split rounds exact ties away from zero, a conversion to bf16 rounds them to even.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from pipeline.callbacks.ledger import megatron_optimizers

# Digests are read as 64-bit floats by the analysis, which hold whole numbers up to here exactly.
_DIGEST_BITS = 53
_TIE = 0x8000  # the low half of an fp32 number that lies halfway between two bf16 numbers


def join_master(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master weights of bf16 weights and int16 remainders of the same shape (TransformerEngine's format).

    The remainder is the low half of the master's bits; the weight is the high half, plus one where the remainder is
    negative.
    """
    high = weight.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def observe_masters(optimizer: Any) -> dict[str, int]:
    """Fields of this rank's update row; call after an optimizer step. Empty where the optimizer holds no masters.

    masters: how many fp32 masters this rank holds. masters_digest: 53 bits of a hash over them, in the optimizer's
    order. With remainders also weights_off_nearest: how many bf16 weights are not their master rounded to nearest, ties
    to even; and weights_off_at_ties: how many of these are at an exact tie.

    Every master is read and, with remainders, rebuilt in host memory: for models that are small.
    """
    digest = hashlib.blake2b(digest_size=8)
    held, off, at_ties, remainders = 0, 0, 0, False
    for weight, kept in _weights_and_masters(optimizer):
        master = kept
        if kept.dtype == torch.int16:
            remainders = True
            master = join_master(weight, kept)
            differs = weight.view(torch.int16) != master.bfloat16().view(torch.int16)
            off += int(differs.sum())
            at_ties += int(((master.view(torch.int32)[differs] & 0xFFFF) == _TIE).sum())
        held += master.numel()
        digest.update(master.detach().contiguous().view(torch.int32).numpy().tobytes())
    if not held:
        return {}
    row = {"masters": held, "masters_digest": int.from_bytes(digest.digest(), "big") >> (64 - _DIGEST_BITS)}
    return {**row, "weights_off_nearest": off, "weights_off_at_ties": at_ties} if remainders else row


def _weights_and_masters(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(weight, its master or its remainder) for each parameter that has one; fp32 parameters are their own masters."""
    for part in megatron_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                master = part.optimizer.state[parameter].get("master_param")
                if master is not None:
                    yield parameter.detach(), master
                elif parameter.dtype == torch.float32:
                    yield parameter.detach(), parameter.detach()
