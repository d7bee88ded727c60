"""Liveness: the share of trainable elements whose bits an optimizer step changed.

On the host the weights are copied before the step and compared after it, every element of them. A GPU has no room for
a second copy: there every chunk of every tensor is summed up before and after, and a fixed sample is compared exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Liveness:
    """Counts over one rank's trainable elements."""

    elements: int
    """Elements that were compared."""
    elements_changed: int
    tensors: int
    tensors_still: int
    """Tensors in which nothing changed, not one element."""
    method: str

    @property
    def share(self) -> float:
        return self.elements_changed / self.elements


class LivenessProbe(Protocol):
    """Looks at the weights before and after an optimizer step."""

    def before_step(self) -> None: ...

    def after_step(self) -> Liveness: ...


def probe_for(parameters: Sequence[torch.Tensor]) -> LivenessProbe:
    """The probe for where the parameters lie: every element on the host, checksums and a sample on a GPU."""
    return EveryElement(parameters) if parameters[0].device.type == "cpu" else ChecksumsAndSample(parameters)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers of the same width: -0.0 differs from 0.0, and a NaN equals itself."""
    return tensor.detach().view(_SAME_SIZE_INTEGER[tensor.element_size()])


class EveryElement:
    """Compares all elements with a copy taken before the step. Needs a second copy of the weights."""

    method = "every element"

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._before = [torch.empty_like(parameter) for parameter in self._parameters]

    def before_step(self) -> None:
        with torch.no_grad():
            for copy, parameter in zip(self._before, self._parameters, strict=True):
                copy.copy_(parameter)

    def after_step(self) -> Liveness:
        changed = [
            int(torch.count_nonzero(bits(copy) != bits(parameter)))
            for copy, parameter in zip(self._before, self._parameters, strict=True)
        ]
        return Liveness(
            elements=sum(parameter.numel() for parameter in self._parameters),
            elements_changed=sum(changed),
            tensors=len(changed),
            tensors_still=changed.count(0),
            method=self.method,
        )


class ChecksumsAndSample:
    """A checksum of every chunk of every tensor, and the exact share of changed elements on a fixed sample.

    A checksum is the sum over the chunk's 32-bit words (two bf16 elements each) of (word x odd random factor), wrapping
    at 32 bits. A change of one word is always seen. Changes of several cancel with probability 2^-31; where nothing but
    the upper elements of words changes, which takes 16 bits away, with 2^-15. Memory at 7 B parameters: 32 MiB of
    factors and scratch and 8 MiB of sample are kept, another sample is made to compare with. What sums up says in which
    type: by default torch copies integers and truth values to int64 first.
    """

    method = "checksums of every chunk, exact share on a fixed sample"
    # Words that are multiplied in one go: 16 MiB of scratch, as much of factors. A launch takes as long as the work.
    _BLOCK = 2**22
    _CHUNK = 2**15
    _SAMPLE = 2**22
    _PIECE = 2**19  # elements of the sample that are compared in one go

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        device = self._parameters[0].device
        block = min(self._BLOCK, max(-(-parameter.nbytes // 4) for parameter in self._parameters))
        generator = torch.Generator().manual_seed(0)
        factors = torch.randint(-(2**30), 2**30, (block,), generator=generator, dtype=torch.int32) * 2 + 1
        self._factors = factors.to(device)
        self._scratch = torch.empty(block, dtype=torch.int32, device=device)
        total = sum(parameter.numel() for parameter in self._parameters)
        # One stride for all tensors; a tensor shorter than the stride gives its first element.
        self._stride = max(1, -(-total // self._SAMPLE))
        self._sums, self._sample = self._checksums(), self._sampled()

    def before_step(self) -> None:
        """Nothing to do: the state after the step before is the state before this one."""

    def after_step(self) -> Liveness:
        sums, sample = self._checksums(), self._sampled()
        still = sum(torch.equal(old, new) for old, new in zip(self._sums, sums, strict=True))
        changed = self._differing(sample)
        self._sums, self._sample = sums, sample
        return Liveness(
            elements=sample.numel(),
            elements_changed=changed,
            tensors=len(sums),
            tensors_still=still,
            method=self.method,
        )

    def _differing(self, sample: torch.Tensor) -> int:
        pieces = zip(self._sample.split(self._PIECE), sample.split(self._PIECE), strict=True)
        return int(torch.stack([(old != new).sum(dtype=torch.int32) for old, new in pieces]).sum())

    def _checksums(self) -> tuple[torch.Tensor, ...]:
        """int32 [chunks] for each tensor, on the host: one transfer for all of them."""
        sums = [list(self._block_sums(tensor)) for tensor in self._flat()]
        chunks = [sum(block.numel() for block in blocks) for blocks in sums]
        return torch.cat(list(chain.from_iterable(sums))).cpu().split(chunks)

    def _flat(self) -> Iterator[torch.Tensor]:
        """Views made anew each time: Megatron may move a parameter's storage."""
        return (bits(parameter).flatten() for parameter in self._parameters)

    def _block_sums(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        before, words, after = _aligned(tensor)
        for block in words.split(self._BLOCK):
            products = torch.mul(block, self._factors[: block.numel()], out=self._scratch[: block.numel()])
            whole = block.numel() - block.numel() % self._CHUNK
            if whole:
                yield products[:whole].view(-1, self._CHUNK).sum(1, dtype=torch.int32)
            if whole < block.numel():
                yield products[whole:].sum(dtype=torch.int32)[None]
        for rest in (before, after):
            if rest.numel():
                yield rest.int()

    def _sampled(self) -> torch.Tensor:
        return torch.cat([tensor[:: self._stride] for tensor in self._flat()])


def _aligned(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensor's 32-bit words as int32, between the elements before and after them (of bf16 at most one each)."""
    size = tensor.element_size()
    first = min(-tensor.storage_offset() * size % 4 // size, tensor.numel())
    last = first + (tensor.numel() - first) * size // 4 * 4 // size
    return tensor[:first], tensor[first:last].view(torch.int32), tensor[last:]
