"""The reference FusedAdam, by itself: remainder split, arithmetic, state."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.callbacks.masters import join_master
from pipeline.embedded.fused_adam import FusedAdam, _fused_multiply_add, adam_update, split_master

FP32_BITS = st.integers(-(2**31), 2**31 - 1)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ALL_HALVES = torch.arange(-(2**15), 2**15, dtype=torch.int32)
GPU_NAN = 0x7FFFFFFF


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({4: torch.int32, 2: torch.int16}[values.element_size()])


def from_bits(patterns: Any) -> torch.Tensor:
    return torch.as_tensor(patterns, dtype=torch.int32).view(torch.float32)


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.dtype == right.dtype
    assert torch.equal(bits(left), bits(right))


def from_halves(high: torch.Tensor, low: int) -> torch.Tensor:
    return ((high << 16) | low).view(torch.float32)


# -- the remainder split ----------------------------------------------------------------------------------------------


@given(st.lists(FP32_BITS, min_size=1, max_size=200))
def test_split_and_join_give_back_every_bit_pattern(patterns: list[int]) -> None:
    master = from_bits(patterns)
    assert_same_bits(join_master(*split_master(master)), master)


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_split_and_join_give_back_every_high_half(low: int) -> None:
    """All signs, exponents and leading mantissa bits (subnormal, infinite and NaN too) at the edges of rounding."""
    master = from_halves(ALL_HALVES, low)
    assert_same_bits(join_master(*split_master(master)), master)


@pytest.mark.parametrize("high", [0x0000, 0x007F, 0x3F80, 0x3FFF, 0x7F7F, 0x7FFF])
def test_split_and_join_give_back_every_low_half(high: int) -> None:
    for sign in (0, -0x8000):
        master = (((high + sign) << 16) | (ALL_HALVES & 0xFFFF)).view(torch.float32)
        assert_same_bits(join_master(*split_master(master)), master)


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_split_differs_from_round_to_even_at_ties_on_even_halves_only(low: int) -> None:
    master = from_halves(ALL_HALVES, low)
    master = master[master.isfinite()]
    high_is_even = (bits(master) >> 16) % 2 == 0
    expected = high_is_even if low == 0x8000 else torch.zeros_like(high_is_even)
    differs = bits(split_master(master)[0]) != bits(master.bfloat16())
    assert torch.equal(differs, expected)


def test_split_rounds_ties_away_from_zero() -> None:
    for sign in (1.0, -1.0):
        tie = torch.tensor([sign * (1 + 2**-8)])  # halfway between 1 and bf16's next number
        assert split_master(tie)[0].item() == sign * (1 + 2**-7)
        assert tie.bfloat16().item() == sign


def test_rounding_carries_into_the_exponent_and_into_infinity() -> None:
    nearly_two, nearly_infinite = from_bits([0x3FFFFFFF]), from_bits([0x7F7F8000])
    assert split_master(nearly_two)[0].item() == 2.0
    assert split_master(nearly_infinite)[0].item() == torch.inf
    for master in (nearly_two, nearly_infinite):
        assert_same_bits(join_master(*split_master(master)), master)


def test_a_gpu_nan_is_hidden_behind_a_weight_of_minus_zero() -> None:
    """TransformerEngine's split does this: the bf16 weight looks healthy, the master weight is NaN."""
    weight, remainder = split_master(from_bits([GPU_NAN]))
    assert_same_bits(weight, torch.tensor([-0.0]).bfloat16())
    assert remainder.item() == -1
    assert join_master(weight, remainder).isnan().all()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_split_keeps_the_shape(shape: tuple[int, ...]) -> None:
    weight, remainder = split_master(torch.ones(shape))
    assert (weight.shape, weight.dtype) == (shape, torch.bfloat16)
    assert (remainder.shape, remainder.dtype) == (shape, torch.int16)


# -- the arithmetic ---------------------------------------------------------------------------------------------------


@given(FINITE, FINITE, FINITE)
@settings(max_examples=200)
def test_fused_multiply_add_gives_the_nearest_number(factor: float, scalar: float, summand: float) -> None:
    """The nearest but for double rounding, which takes the other neighbour of a point that is all but halfway."""
    result = _fused_multiply_add(torch.tensor([factor]), scalar, torch.tensor([summand]))[0].numpy()
    exact = Fraction(factor) * Fraction(scalar) + Fraction(summand)
    if abs(exact) < Fraction(2) ** -126:
        assert abs(result) in (0, np.finfo(np.float32).tiny)
    elif np.isinf(result):
        assert abs(exact) >= Fraction(float(np.finfo(np.float32).max))
    else:
        with np.errstate(over="ignore"):
            neighbours = [np.nextafter(result, np.float32(direction)) for direction in (np.inf, -np.inf)]
        for other in neighbours:
            if not np.isinf(other):
                error, other_error = (abs(exact - Fraction(float(value))) for value in (result, other))
                assert error <= other_error * (1 + Fraction(1, 2**27))


def test_the_product_inside_is_not_rounded() -> None:
    factor = 1 + 2.0**-12
    result = _fused_multiply_add(torch.tensor([factor]), factor, torch.tensor([-(1 + 2.0**-11)]))
    assert result.item() == 2.0**-24  # rounding the product would leave 0


def gradients(count: int, seed: int, elements: int) -> list[torch.Tensor]:
    """Gradients whose size varies by element (six decades) and by step."""
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.empty(elements).uniform_(-6, 0, generator=generator)
    return [torch.randn(elements, generator=generator) * size for _ in range(count)]


def stepped(
    optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, grads: list[torch.Tensor], attribute: str = "grad"
) -> torch.Tensor:
    for grad in grads:
        setattr(param, attribute, grad.clone())
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [1e-6, 1e-2])
@pytest.mark.parametrize(
    ("torch_class", "adam_w_mode"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)], ids=["AdamW", "Adam"]
)
def test_agrees_with_torch(torch_class: Callable[..., Any], adam_w_mode: bool, lr: float, weight_decay: float) -> None:
    """Both against torch's own in fp64: the reference is as close to the truth as torch's fp32 is, within a factor."""
    start = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    grads = gradients(50, 2, 2000)
    kwargs: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}

    reference = torch.nn.Parameter(start.clone())
    stepped(FusedAdam([reference], adam_w_mode=adam_w_mode, **kwargs), reference, grads)
    single = torch.nn.Parameter(start.clone())
    stepped(torch_class([single], **kwargs), single, grads)
    double = torch.nn.Parameter(start.double())
    stepped(torch_class([double], **kwargs), double, [grad.double() for grad in grads])

    error = (reference.double() - double).abs().max()
    assert error <= 4 * (single.double() - double).abs().max()
    # 50 steps move a weight by at most about 50 lr: the error is a ten-thousandth of that, or 50 roundings at 4.
    assert error <= max(50 * lr * 1e-4, 50 * 2**-23)
    assert (reference - start).abs().max() > 10 * lr


def test_without_bias_correction_the_first_step_is_longer() -> None:
    """m / sqrt(v) of a first gradient: (1 - beta1) / sqrt(1 - beta2) without the correction, 1 with it."""
    moved = {}
    for corrected in (True, False):
        param = torch.nn.Parameter(torch.zeros(1))
        optimizer = FusedAdam([param], lr=1.0, betas=(0.9, 0.999), bias_correction=corrected)
        moved[corrected] = -stepped(optimizer, param, [torch.ones(1)]).item()
    assert moved[True] == pytest.approx(1.0, rel=1e-6)
    assert moved[False] == pytest.approx(0.1 / 0.001**0.5, rel=1e-3)


def test_subnormal_numbers_count_as_zero_and_keep_their_sign() -> None:
    subnormal = 2.0**-127
    param, exp_avg, exp_avg_sq = adam_update(
        torch.tensor([subnormal, -subnormal, 0.0, 0.0]),
        torch.tensor([1.0, 1.0, subnormal, -subnormal]),
        torch.zeros(4),
        torch.zeros(4),
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        corrections=(1.0, 1.0),
        adam_w_mode=True,
    )
    assert_same_bits(param, torch.tensor([1.0, 1.0, 0.0, -0.0]))
    assert not exp_avg.any()
    assert not exp_avg_sq.any()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("remainders", [False, True])
def test_a_non_finite_gradient_spoils_its_element_only(bad: float, remainders: bool) -> None:
    param = torch.nn.Parameter(torch.ones(3).bfloat16())
    optimizer = FusedAdam(
        [param], lr=1e-2, master_weights=True, use_decoupled_grad=True, store_param_remainders=remainders
    )
    grads = [torch.tensor([1.0, bad, 1.0]), torch.ones(3)]
    stepped(optimizer, param, grads, "decoupled_grad")
    state = optimizer.state[param]
    master = join_master(param.detach(), state["master_param"]) if remainders else state["master_param"]
    assert master.isnan().tolist() == [False, True, False]
    assert (~state["exp_avg"].isfinite()).tolist() == [False, True, False]
    if remainders:
        # The weight itself gives nothing away: NaN became minus zero.
        assert param.isfinite().all()
        assert_same_bits(param.detach()[1], torch.tensor(-0.0).bfloat16())
    else:
        assert param.isnan().tolist() == [False, True, False]
    assert master[0].item() == pytest.approx(0.98, rel=1e-3)


# -- precision of masters and moments ---------------------------------------------------------------------------------

MASTER: dict[str, Any] = {"master_weights": True, "use_decoupled_grad": True}


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [1e-6, 1e-3])
def test_remainders_equal_fp32_masters_bit_for_bit(
    lr: float, moment_dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    start = torch.randn(4000, generator=torch.Generator().manual_seed(3)).bfloat16()
    params = {name: torch.nn.Parameter(start.clone()) for name in ("masters", "remainders")}
    kwargs = {**MASTER, "lr": lr, "weight_decay": 0.01, "exp_avg_dtype": moment_dtype, "exp_avg_sq_dtype": moment_dtype}
    optimizers = {
        name: FusedAdam([param], store_param_remainders=name == "remainders", **kwargs)
        for name, param in params.items()
    }
    for grad in gradients(50, 4, 4000):
        for name, param in params.items():
            stepped(optimizers[name], param, [grad.to(grad_dtype)], "decoupled_grad")
        masters = optimizers["masters"].state[params["masters"]]
        remainders = optimizers["remainders"].state[params["remainders"]]
        assert remainders["master_param"].dtype == torch.int16
        rebuilt = join_master(params["remainders"].detach(), remainders["master_param"])
        assert_same_bits(rebuilt, masters["master_param"])
        for moment in ("exp_avg", "exp_avg_sq"):
            assert remainders[moment].dtype == moment_dtype
            assert_same_bits(remainders[moment], masters[moment])
        differs = bits(params["remainders"].detach()) != bits(params["masters"].detach())
        assert ((bits(rebuilt)[differs] & 0xFFFF) == 0x8000).all()
    assert (params["remainders"] != start).any()


def test_fp32_masters_give_the_weights_that_fp32_parameters_round_to() -> None:
    """megatron-core's baseline holds the masters itself; TransformerEngine's master_weights must be the same thing."""
    start = torch.randn(1000, generator=torch.Generator().manual_seed(5)).bfloat16()
    grads = gradients(20, 6, 1000)
    weights, masters = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    optimizer = FusedAdam([weights], lr=1e-3, **MASTER)
    stepped(optimizer, weights, grads, "decoupled_grad")
    stepped(FusedAdam([masters], lr=1e-3), masters, grads)
    assert_same_bits(optimizer.state[weights]["master_param"], masters.detach())
    assert_same_bits(weights.detach(), masters.detach().bfloat16())


def test_fp32_parameters_ignore_the_master_copy() -> None:
    """TransformerEngine makes a master copy of an fp32 parameter too (4 bytes) and never touches it again."""
    grads = gradients(5, 7, 100)
    with_copy, without = (torch.nn.Parameter(torch.ones(100)) for _ in range(2))
    optimizer = FusedAdam([with_copy], lr=1e-2, **MASTER, store_param_remainders=True)
    stepped(optimizer, with_copy, grads, "decoupled_grad")
    stepped(FusedAdam([without], lr=1e-2), without, grads)
    assert_same_bits(with_copy.detach(), without.detach())
    assert_same_bits(optimizer.state[with_copy]["master_param"], torch.ones(100))


def test_bf16_weights_without_masters_lose_small_updates() -> None:
    """Why masters exist: at lr 1e-6 a bf16 weight of 1 never moves."""
    param = torch.nn.Parameter(torch.ones(10).bfloat16())
    stepped(FusedAdam([param], lr=1e-6), param, [torch.ones(10).bfloat16()] * 50)
    assert (param == 1).all()


def test_bf16_moments_are_the_rounded_fp32_moments_of_each_step() -> None:
    param = torch.nn.Parameter(torch.randn(500, generator=torch.Generator().manual_seed(8)).bfloat16())
    optimizer = FusedAdam([param], lr=1e-3, **MASTER, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
    exp_avg, exp_avg_sq = torch.zeros(500), torch.zeros(500)
    for grad in gradients(10, 9, 500):
        stepped(optimizer, param, [grad], "decoupled_grad")
        exp_avg = (0.9 * exp_avg.double() + (1 - 0.9) * grad.double()).float().bfloat16().float()
        exp_avg_sq = (0.999 * exp_avg_sq.double() + (1 - 0.999) * grad.double() ** 2).float().bfloat16().float()
        state = optimizer.state[param]
        # At most one bf16 rounding apart: the kernel takes beta and 1 - beta in fp32.
        torch.testing.assert_close(state["exp_avg"].float(), exp_avg, rtol=2**-7, atol=1e-12)
        torch.testing.assert_close(state["exp_avg_sq"].float(), exp_avg_sq, rtol=2**-7, atol=1e-18)


def test_fp16_moments_are_scaled_to_half_of_the_range() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedAdam([param], exp_avg_sq_dtype=torch.float16)
    stepped(optimizer, param, [torch.tensor([1e-9, 1e-7, 0.0])])
    stored = optimizer.state[param]["exp_avg_sq"]
    assert stored.dtype == torch.float16
    assert stored.max().item() == pytest.approx(torch.finfo(torch.float16).max / 2, rel=1e-3)
    unscaled = optimizer.get_unscaled_state(param, "exp_avg_sq")
    assert unscaled.tolist() == pytest.approx([1e-21, 1e-17, 0.0], rel=1e-3)


def test_fp16_moments_of_zero_gradients_stay_zero() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param], exp_avg_dtype=torch.float16)
    stepped(optimizer, param, [torch.zeros(3)] * 2)
    assert not optimizer.get_unscaled_state(param, "exp_avg").any()
    assert (param == 1).all()


# -- gradients, groups, state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("read", "written"), [(False, "decoupled_grad"), (True, "grad")])
def test_gradients_in_the_other_place_are_not_seen(read: bool, written: str) -> None:
    """The dead optimizer: state is made, steps are counted, nothing is said, and the weight never moves."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], lr=1.0, use_decoupled_grad=read)
    stepped(optimizer, param, [torch.ones(4)] * 3, written)
    assert (param == 1).all()
    assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}
    assert not optimizer.state[param]["exp_avg"].any()
    assert optimizer.param_groups[0]["step"] == 3


def test_a_parameter_without_gradient_is_skipped_and_its_neighbour_is_not() -> None:
    idle, busy = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([idle, busy], lr=0.1)
    busy.grad = torch.ones(2)
    optimizer.step()
    assert (idle == 1).all()
    assert (busy != 1).all()


def test_steps_are_counted_per_group_and_not_for_empty_groups() -> None:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([{"params": [param], "lr": 0.5}, {"params": []}])
    stepped(optimizer, param, [torch.ones(1)] * 2)
    assert [group.get("step") for group in optimizer.param_groups] == [2, None]
    assert param.item() == pytest.approx(0.0, abs=1e-6)


def test_step_returns_the_closure_s_loss() -> None:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([param], lr=0.1)

    def closure() -> torch.Tensor:
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert param.item() == pytest.approx(0.9)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("set_to_none", [None, True, False])
def test_zero_grad(decoupled: bool, set_to_none: bool | None) -> None:
    attribute = "decoupled_grad" if decoupled else "grad"
    param = torch.nn.Parameter(torch.ones(2))
    setattr(param, attribute, torch.ones(2))
    FusedAdam([param], use_decoupled_grad=decoupled).zero_grad(set_to_none)
    grad = getattr(param, attribute)
    assert grad.tolist() == [0, 0] if set_to_none is False else grad is None


def test_the_deprecated_argument_of_the_constructor_still_counts() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.warns(DeprecationWarning, match="set_grad_none"):
        optimizer = FusedAdam([param], set_grad_none=False)
    param.grad = torch.ones(2)
    optimizer.zero_grad()
    assert param.grad is not None
    assert not param.grad.any()
    with pytest.raises(ValueError, match="set_to_none=True"):
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("remainders", [False, True])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_dict_round_trip_continues_where_it_stopped(moment_dtype: torch.dtype, remainders: bool) -> None:
    kwargs: dict[str, Any] = {
        **MASTER,
        "lr": 1e-2,
        "store_param_remainders": remainders,
        "exp_avg_dtype": moment_dtype,
        "exp_avg_sq_dtype": moment_dtype,
    }
    grads = gradients(6, 10, 300)
    param = torch.nn.Parameter(torch.randn(300, generator=torch.Generator().manual_seed(11)).bfloat16())
    optimizer = FusedAdam([param], **kwargs)
    stepped(optimizer, param, grads[:3], "decoupled_grad")

    saved = optimizer.state_dict()
    state = saved["state"][0]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    assert state["master_param"].dtype == (torch.int16 if remainders else torch.float32)
    assert saved["param_groups"][0]["step"] == 3

    copy = torch.nn.Parameter(param.detach().clone())
    resumed = FusedAdam([copy], **kwargs)
    resumed.load_state_dict(saved)
    assert resumed.state[copy]["exp_avg"].dtype == moment_dtype
    stepped(optimizer, param, grads[3:], "decoupled_grad")
    stepped(resumed, copy, grads[3:], "decoupled_grad")
    assert_same_bits(copy.detach(), param.detach())
    for name, value in optimizer.state[param].items():
        assert_same_bits(resumed.state[copy][name], value)


def test_loading_copies_the_state() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param])
    stepped(optimizer, param, [torch.ones(2)])
    copy = torch.nn.Parameter(torch.ones(2))
    resumed = FusedAdam([copy])
    resumed.load_state_dict(optimizer.state_dict())
    before = resumed.state[copy]["exp_avg"].clone()
    stepped(optimizer, param, [torch.ones(2)])
    assert_same_bits(resumed.state[copy]["exp_avg"], before)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"amsgrad": True}, RuntimeError, "AMSGrad"),
        ({"master_weights": True, "master_weight_dtype": torch.bfloat16}, RuntimeError, "master weights"),
        ({"exp_avg_dtype": torch.float64}, RuntimeError, "exp_avg"),
        ({"exp_avg_sq_dtype": torch.int8}, RuntimeError, "exp_avg_sq"),
        ({"exp_avg_dtype": torch.uint8}, NotImplementedError, "fp8"),
        ({"capturable": True}, NotImplementedError, "capturable"),
    ],
)
def test_what_it_cannot_do_is_refused(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], **kwargs)


def test_mixed_half_precision_is_refused() -> None:
    params = [torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16)]
    with pytest.raises(RuntimeError, match="mix of float16 and bfloat16"):
        FusedAdam(params).step()


def test_remainders_need_masters_in_fp32() -> None:
    """As in TransformerEngine, the setting has no effect without them."""
    param = torch.nn.Parameter(torch.ones(1).bfloat16())
    assert not FusedAdam([param], store_param_remainders=True).store_param_remainders
    half = FusedAdam([param], store_param_remainders=True, master_weights=True, master_weight_dtype=torch.float16)
    assert not half.store_param_remainders


def test_remainders_are_set_from_int16_only() -> None:
    param = torch.nn.Parameter(torch.ones(1).bfloat16())
    optimizer = FusedAdam([param], **MASTER, store_param_remainders=True)
    with pytest.raises(RuntimeError, match="int16"):
        optimizer.set_scaled_state(param, "master_param", torch.ones(1))


def test_constructor_and_methods_have_the_names_that_megatron_core_looks_for() -> None:
    import inspect

    arguments = inspect.signature(FusedAdam).parameters
    assert {"master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "use_decoupled_grad"} <= set(arguments)
    assert list(inspect.signature(FusedAdam.initialize_state).parameters) == ["self", "param", "store_param_remainders"]
