"""Liveness: the share of trainable elements whose bits an optimizer step changed.

On the host the weights are copied before the step and compared after it, every element of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Liveness:
    """Counts over one rank's trainable elements."""

    elements: int
    elements_changed: int
    method: str

    @property
    def share(self) -> float:
        return self.elements_changed / self.elements


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
        changed = sum(
            int(torch.count_nonzero(bits(copy) != bits(parameter)))
            for copy, parameter in zip(self._before, self._parameters, strict=True)
        )
        return Liveness(sum(parameter.numel() for parameter in self._parameters), changed, self.method)
