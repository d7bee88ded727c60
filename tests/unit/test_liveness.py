"""Both probes see exactly what changed, and the GPU's takes little memory."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from pipeline.callbacks.liveness import ChecksumsAndSample, EveryElement

SIZES = [3, 70_000, 131_071]


def _parameters() -> list[torch.Tensor]:
    """Views of one buffer, as Megatron makes them; the second begins between two 32-bit words."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(sum(SIZES), generator=generator).to(torch.bfloat16).split(SIZES))


@pytest.mark.parametrize("probe_class", [EveryElement, ChecksumsAndSample])
def test_nothing_changed_is_zero(probe_class: type) -> None:
    parameters = _parameters()
    probe = probe_class(parameters)
    probe.before_step()
    found = probe.after_step()
    assert (found.elements_changed, found.tensors_still, found.tensors) == (0, 3, 3)


@settings(deadline=None, max_examples=30)
@given(tensor=st.integers(0, 2), position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 15))
def test_one_flipped_bit_moves_its_tensor_and_no_other(tensor: int, position: float, bit: int) -> None:
    for probe_class in (EveryElement, ChecksumsAndSample):
        parameters = _parameters()
        probe = probe_class(parameters)
        probe.before_step()
        index = int(position * SIZES[tensor])
        raw = parameters[tensor].view(torch.int16)
        raw[index] = int(raw[index]) ^ (1 << bit if bit < 15 else -(1 << 15))
        found = probe.after_step()
        assert found.tensors_still == 2
        assert probe_class is ChecksumsAndSample or found.elements_changed == 1


def test_swapped_neighbours_do_not_hide_in_a_sum() -> None:
    parameters = [torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)]
    probe = ChecksumsAndSample(parameters)
    parameters[0].copy_(torch.tensor([2.0, 1.0, 3.0]))
    assert probe.after_step().tensors_still == 0


def test_negative_zero_is_a_change_and_a_kept_nan_is_none() -> None:
    parameters = [torch.tensor([0.0, torch.nan], dtype=torch.bfloat16)]
    probe = EveryElement(parameters)
    probe.before_step()
    parameters[0][0] = -0.0
    assert probe.after_step().elements_changed == 1


def test_each_step_is_compared_with_the_one_before() -> None:
    parameters = _parameters()
    probe = ChecksumsAndSample(parameters)
    parameters[0].add_(1.0)
    assert probe.after_step().tensors_still == 2
    assert probe.after_step().tensors_still == 3


def test_share_of_the_sample_is_exact_where_all_elements_fit_into_it() -> None:
    parameters = _parameters()
    probe = ChecksumsAndSample(parameters)
    parameters[1][:1000].neg_()
    assert probe.after_step().elements_changed == 1000


def test_the_gpu_probe_takes_less_than_64_mib_at_any_size() -> None:
    """On the host, where torch sums with the same copies as on a GPU: sizes from where buffers stop growing."""
    parameters = [torch.zeros(2**22 - 7, dtype=torch.bfloat16), torch.zeros(2**23 + 7, dtype=torch.bfloat16)]
    probe = ChecksumsAndSample(parameters)
    held = [value for value in vars(probe).values() if isinstance(value, torch.Tensor)]
    kept = sum(tensor.nbytes for tensor in held) / 2**20
    assert kept == pytest.approx(40, abs=0.1)
    assert kept + peak_mib(probe.after_step) < 56


def peak_mib(action: Callable[[], object]) -> float:
    """The most that `action` holds of torch's host memory."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        action()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events: list[Any] = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes)) / 2**20
