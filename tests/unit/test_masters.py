"""What an update row tells of the fp32 masters."""

from types import SimpleNamespace
from typing import Any

import torch

from pipeline.callbacks.masters import observe_masters
from pipeline.embedded.fused_adam import split_master


def optimizer(*parameters: tuple[torch.Tensor, torch.Tensor | None]) -> Any:
    """As Megatron's, as far as it is walked: a parameter of FusedAdam and its master, if it keeps one."""
    state = {weight: {} if master is None else {"master_param": master} for weight, master in parameters}
    inner = SimpleNamespace(param_groups=[{"params": [weight for weight, _ in parameters]}], state=state)
    return SimpleNamespace(optimizer=inner)


def test_the_digest_is_of_the_masters_however_they_are_kept() -> None:
    master = torch.randn(1000)
    baseline = observe_masters(optimizer((master.clone(), None)))
    pao = observe_masters(optimizer(split_master(master)))
    fp32_state = observe_masters(optimizer((master.bfloat16(), master.clone())))
    assert baseline["masters"] == pao["masters"] == 1000
    assert baseline["masters_digest"] == pao["masters_digest"] == fp32_state["masters_digest"] < 2**53
    assert "weights_off_nearest" not in baseline


def test_a_single_bit_changes_the_digest() -> None:
    master = torch.randn(1000)
    before = observe_masters(optimizer((master, None)))
    master.view(torch.int32)[500] ^= 1
    assert observe_masters(optimizer((master, None)))["masters_digest"] != before["masters_digest"]


def test_weights_that_rounding_to_nearest_even_would_not_give_are_counted() -> None:
    even, odd = 0x3F80_0000, 0x3F81_0000  # high halves; a tie above the even one is rounded differently
    bits = [even | 0x8000, odd | 0x8000, even | 0x8001, even | 0x7FFF, even]
    weight, remainder = split_master(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
    found = observe_masters(optimizer((weight, remainder)))
    assert (found["weights_off_nearest"], found["weights_off_at_ties"]) == (1, 1)
    weight.view(torch.int16)[3] += 1  # a weight that is wrong for another reason
    remainder[3] = 0
    assert observe_masters(optimizer((weight, remainder)))["weights_off_at_ties"] == 1


def test_an_optimizer_without_masters_has_nothing_to_tell() -> None:
    assert observe_masters(optimizer((torch.ones(3, dtype=torch.bfloat16), None))) == {}
