"""Reference of TransformerEngine 2.12's FusedAdam in plain PyTorch, for devices where TransformerEngine does not run.

The constructor, state names, dtypes, scales and remainder split are those of transformer_engine.pytorch.optimizers.
The arithmetic is that of the kernel as the released library has it for the H200 (read from its machine code): fp32,
with fused multiply-add where the compiler put it, subnormal numbers flushed to zero, products with reciprocals in place
of quotients. Two things cannot be repeated on a CPU: the GPU's approximate reciprocal and square root. They touch the
parameters in their last places and the moments never; tests/unit/test_fused_adam_vectors.py states by how much.

Not carried over: `capturable` (CUDA graphs), fp8 parameters and fp8 moments.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import chain
from typing import Any

import numpy as np
import torch

from pipeline.callbacks.masters import join_master

_LARGEST_SUBNORMAL = 2.0**-126 - 2.0**-149
# The GPU's arithmetic gives this NaN, whatever NaN went in (PTX ISA: canonical NaN). Its low half is negative as
# int16, so the remainder split turns a NaN master weight into the bf16 weight -0.0 and the remainder -1.
_GPU_NAN_BITS = 0x7FFFFFFF
_STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 master weights into bf16 weights and int16 remainders, exactly.

    The remainder is the low half of the bits. The bf16 weight is the high half, plus one where the remainder is
    negative: rounding to nearest with ties away from zero (`.bfloat16()` rounds ties to even).

    Args:
        master: fp32, any shape.

    Returns:
        Weights (bf16) and remainders (int16), shaped as `master`; `join_master` gives back every bit pattern.
    """
    bits = master.view(torch.int32)
    remainder = _low_half(bits)
    weight = _low_half((bits >> 16) + (remainder < 0).to(torch.int32))
    return weight.view(torch.bfloat16), remainder


def _low_half(bits: torch.Tensor) -> torch.Tensor:
    """The low 16 bits of int32, as int16 (the shifts wrap; a plain conversion need not)."""
    return (bits << 16 >> 16).to(torch.int16)


def _single(value: float) -> float:
    """`value` rounded to fp32, as an argument of the kernel is."""
    return float(np.float32(value))


def _flushed(values: torch.Tensor) -> torch.Tensor:
    """Subnormal numbers become zero and keep their sign (the kernel's instructions have the suffix .FTZ)."""
    return torch.nn.functional.hardshrink(values, _LARGEST_SUBNORMAL).copysign_(values)


def _fused_multiply_add(factor: torch.Tensor, scalar: float, summand: torch.Tensor) -> torch.Tensor:
    """fp32 `factor * scalar + summand`, rounded once.

    In fp64 the product of two fp32 numbers is exact; what is left is a double rounding about once in 2^29.
    """
    return _flushed(torch.add(summand.double(), factor.double(), alpha=scalar).float())


def bias_correction(beta: float, step: int) -> float:
    """1 - beta^step as the kernel gets it: beta in fp32, the power in fp64, the result in fp32."""
    return _single(1.0 - math.pow(_single(beta), step))


def adam_update(
    grad: torch.Tensor,
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
    adam_w_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One Adam step of the kernel on fp32 tensors of one shape; no argument is changed.

    Args:
        grad: the gradient.
        param: the master weight.
        exp_avg: the first moment.
        exp_avg_sq: the second moment.
        lr: the parameter group's learning rate; so are the next three.
        betas: decay of the two moments per step.
        eps: added to the root of the second moment.
        weight_decay: times the parameter.
        corrections: `bias_correction` of both betas, or ones.
        adam_w_mode: True for decoupled weight decay, False for L2 regularisation.

    Returns:
        The new param, exp_avg and exp_avg_sq.
    """
    lr, eps, weight_decay = _single(lr), _single(eps), _single(weight_decay)
    beta1, beta2 = map(_single, betas)
    grad, param = _flushed(grad), _flushed(param)
    if not adam_w_mode:
        grad = _fused_multiply_add(param, weight_decay, grad)
    exp_avg = _fused_multiply_add(_flushed(exp_avg), beta1, _flushed(grad * _single(1 - beta1)))
    squared = _flushed(_flushed(grad * _single(1 - beta2)) * grad)
    exp_avg_sq = _fused_multiply_add(_flushed(exp_avg_sq), beta2, squared)

    first = _flushed(exp_avg * _single(1 / corrections[0]))
    second = _flushed(exp_avg_sq * _single(1 / corrections[1]))
    update = _flushed(first * (second.sqrt() + eps).reciprocal())
    if adam_w_mode:
        update = _fused_multiply_add(param, weight_decay, update)
    param = _fused_multiply_add(update, -lr, param)
    gpu_nan = torch.tensor(_GPU_NAN_BITS, dtype=torch.int32, device=param.device).view(torch.float32)
    return torch.where(param.isnan(), gpu_nan, param), exp_avg, exp_avg_sq


class FusedAdam(torch.optim.Optimizer):
    """Drop-in for TransformerEngine 2.12's FusedAdam: see there for the arguments.

    A parameter whose gradient is None is skipped without a word, as TransformerEngine does: its state is made, its
    weight never moves. `step` counts in `param_groups`, one count for a whole group.

    Raises:
        RuntimeError: what TransformerEngine refuses, in its words (amsgrad, dtypes, mixed fp16 and bf16, sparse).
        NotImplementedError: what this reference does not have (capturable, fp8 moments).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise RuntimeError("FusedAdam only supports fp32/fp16 master weights.")
        if capturable:
            raise NotImplementedError("the reference FusedAdam has no capturable mode: CUDA graphs need a GPU")
        for name, dtype in (("exp_avg", exp_avg_dtype), ("exp_avg_sq", exp_avg_sq_dtype)):
            if dtype == torch.uint8:
                raise NotImplementedError(f"the reference FusedAdam has no fp8 {name}: use fp32, fp16 or bf16")
            if dtype not in _STATE_DTYPES:
                raise RuntimeError(f"FusedAdam only supports fp32/fp16/bf16/fp8 {name}.")
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none kwarg in FusedAdam constructor is deprecated. "
                "Use set_to_none kwarg in zero_grad instead.",
                DeprecationWarning,
                stacklevel=2,
            )
        super().__init__(
            params,
            {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        self.master_weight_dtype = master_weight_dtype
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self.set_grad_none = set_grad_none
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients (default) or fill them with zeros: `.decoupled_grad` or `.grad`, whichever is read."""
        if self.set_grad_none is not None:
            if set_to_none is not None and set_to_none != self.set_grad_none:
                raise ValueError(
                    f"Called zero_grad with set_to_none={set_to_none}, "
                    f"but FusedAdam was initialized with set_grad_none={self.set_grad_none}"
                )
            set_to_none = self.set_grad_none
        set_to_none = True if set_to_none is None else set_to_none
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=set_to_none)
            return
        for param in self._params():
            if set_to_none:
                param.decoupled_grad = None
            else:
                param.decoupled_grad.zero_()

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """The state `exp_avg`, `exp_avg_sq` or `master_param` of a parameter, in fp32 (remainders stay int16)."""
        stored = self.state[param][state_name]
        if self.name_to_dtype_map[state_name] == torch.float32:
            return stored
        unscaled = stored.float()
        if stored.dtype == torch.float16:
            unscaled.mul_(self._scales[param][state_name])
        return unscaled

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Store `unscaled_state` (fp32; int16 for remainders) in the state's dtype, and its scale where it has one."""
        remainders = state_name == "master_param" and self._has_remainders(param)
        expected = torch.int16 if remainders else torch.float32
        if unscaled_state.dtype != expected:
            raise RuntimeError(f"{state_name} must be set from {expected}, not from {unscaled_state.dtype}")
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name, remainders)
        stored = self.state[param][state_name]
        if stored.dtype == torch.float16:
            # One scale for the tensor puts its largest value at half of fp16's range.
            scale = self._scales[param][state_name]
            lowest, highest = torch.aminmax(unscaled_state)
            torch.div(torch.maximum(-lowest, highest), torch.finfo(torch.float16).max / 2, out=scale[0])
            stored.copy_(unscaled_state * torch.where(scale > 0, scale.reciprocal(), 0.0))
        else:
            stored.copy_(unscaled_state)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """Make a parameter's state: zero moments, and with master weights a copy of the weight, or zero remainders."""
        self._initialize_state(param, "exp_avg")
        self._initialize_state(param, "exp_avg_sq")
        if self.master_weights:
            self._initialize_state(param, "master_param", store_param_remainders)
            if not store_param_remainders:
                self.set_scaled_state(param, "master_param", param.detach().float())

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with every state but remainders in fp32."""
        state_dict = super().state_dict()
        params = self._params_by_id(state_dict)
        for key, state in state_dict["state"].items():
            if key in params:
                state_dict["state"][key] = {name: self.get_unscaled_state(params[key], name) for name in state}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; states take this optimizer's dtypes (torch alone would take the parameters')."""
        super().load_state_dict(state_dict)
        params = self._params_by_id(state_dict)
        for key, state in state_dict["state"].items():
            if key not in params:
                continue
            param = params[key]
            self.state[param] = {}
            for name, value in state.items():
                if value is None:
                    continue
                remainders = name == "master_param" and self._has_remainders(param)
                self.set_scaled_state(param, name, value if remainders else value.float())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """One step over all groups. `grad_scaler` is read in capturable mode only, in TransformerEngine too."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            if {param.dtype for param in group["params"]}.issuperset(_HALF_DTYPES):
                raise RuntimeError("FusedAdam does not support a mix of float16 and bfloat16 model weights.")
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self._step_param(group, param)
        return loss

    def _step_param(self, group: dict[str, Any], param: torch.Tensor) -> None:
        state = self.state[param]
        remainders = self._has_remainders(param)
        if not state:
            self.initialize_state(param, remainders)
        grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
        if grad is None:
            return
        if grad.is_sparse:
            raise RuntimeError("FusedAdam does not support sparse gradients.")
        # fp32 parameters are their own master weights, even where the state holds a (never used) copy.
        has_master = self.master_weights and param.dtype != torch.float32
        if remainders:
            master = join_master(param, state["master_param"])
        elif has_master:
            master = self.get_unscaled_state(param, "master_param")
        else:
            master = param.float()
        beta1, beta2 = group["betas"]
        corrections = (1.0, 1.0)
        if group["bias_correction"]:
            corrections = (bias_correction(beta1, group["step"]), bias_correction(beta2, group["step"]))
        master, exp_avg, exp_avg_sq = adam_update(
            grad.float(),
            master,
            self.get_unscaled_state(param, "exp_avg"),
            self.get_unscaled_state(param, "exp_avg_sq"),
            lr=group["lr"],
            betas=(beta1, beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            corrections=corrections,
            adam_w_mode=bool(self.adam_w_mode),
        )
        self.set_scaled_state(param, "exp_avg", exp_avg)
        self.set_scaled_state(param, "exp_avg_sq", exp_avg_sq)
        if remainders:
            weight, remainder = split_master(master)
            param.copy_(weight)
            state["master_param"].copy_(remainder)
        else:
            if has_master:
                self.set_scaled_state(param, "master_param", master)
            param.copy_(master)

    def _initialize_state(self, param: torch.Tensor, state_name: str, remainders: bool = False) -> None:
        dtype = self.name_to_dtype_map[state_name]
        self.state[param][state_name] = torch.zeros_like(param, dtype=torch.int16 if remainders else dtype)
        if dtype != torch.float32:
            self._scales.setdefault(param, {})[state_name] = torch.ones(1, dtype=torch.float32, device=param.device)

    def _has_remainders(self, param: torch.Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def _params(self) -> Iterable[Any]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _params_by_id(self, state_dict: dict[str, Any]) -> dict[int, torch.Tensor]:
        saved = deepcopy(state_dict["param_groups"])
        return dict(zip(chain.from_iterable(group["params"] for group in saved), self._params(), strict=True))
