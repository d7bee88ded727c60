"""What a run's settings demand of its optimizer: the dtype of every kind of tensor."""

from dataclasses import dataclass
from typing import Any

from pipeline.analysis.load import Run, nested

KINDS = ("param", "main_grad", "master_param", "exp_avg", "exp_avg_sq")
"""The kinds of tensors that an optimizer step needs (TensorKind without "other")."""

SHARDED_KINDS = ("master_param", "exp_avg", "exp_avg_sq")
"""The kinds that the distributed optimizer shards over its ranks; the others are whole on each rank."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "float64": 8, "uint8": 1, "int8": 1}

_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class DeclaredOptimizer:
    """The arm's optimizer, as verl 0.9.1 derives it from `actor_rollout_ref.actor.optim`.

    Sources: verl/utils/megatron/optimizer.py (PAO and the moments' dtypes), verl/workers/engine/megatron (gradient
    buffers follow main_grads_dtype), megatron-core's OptimizerConfig (remainders are on by default with PAO).
    """

    precision_aware: bool
    remainders: bool
    """int16 remainders in place of fp32 master weights."""
    dtypes: dict[str, str]
    """Kind of tensor -> dtype, torch's name without the prefix."""


def dtype_name(value: Any) -> str:
    """`bf16`, `torch.bfloat16` and `bfloat16` -> "bfloat16"."""
    name = str(value).removeprefix("torch.")
    return _DTYPE_NAMES.get(name, name)


def declared_optimizer(run: Run) -> DeclaredOptimizer:
    """The optimizer that this run's recipe and arm ask for."""
    overrides: Any = run.optimizer_setting("override_optimizer_config") or {}
    verls_own = bool(run.optimizer_setting("use_precision_aware_optimizer"))
    precision_aware = bool(overrides.get("use_precision_aware_optimizer", verls_own))
    remainders = precision_aware and bool(overrides.get("store_param_remainders", True))

    def moment(name: str) -> str:
        setting = overrides.get(name, run.optimizer_setting(name) if verls_own else None)
        return dtype_name(setting) if precision_aware and setting is not None else "float32"

    return DeclaredOptimizer(
        precision_aware,
        remainders,
        {
            "param": "bfloat16",
            "main_grad": _gradient_dtype(run, verls_own),
            "master_param": "int16" if remainders else "float32",
            "exp_avg": moment("exp_avg_dtype"),
            "exp_avg_sq": moment("exp_avg_sq_dtype"),
        },
    )


def _gradient_dtype(run: Run, precision_aware: bool) -> str:
    ddp = ("verl", "actor_rollout_ref", "actor", "megatron", "override_ddp_config", "grad_reduce_in_fp32")
    for group in (run.config.arm, run.config.recipe):
        explicit = nested(group, ddp)
        if explicit is not None:  # wins over what verl derives
            return "float32" if explicit else "bfloat16"
    setting = run.optimizer_setting("main_grads_dtype")
    return dtype_name(setting) if precision_aware and setting is not None else "float32"
