"""Faults that a control injects on purpose, named by `fault` in the arm or the recipe of the run's configuration.

A control must get exactly its diagnosis from the analysis; a study with a fault says so in its report.
"""

from functools import cache

from pipeline.study.run_folder import RunFolder

# fault -> what it does
FAULTS = {
    "dead_optimizer": "FusedAdam is built without decoupled gradients and master weights, as megatron-core 0.13.1 did",
    "stale_rollout": "the rollout server keeps its first weights and ignores every later weight update",
    "nan_gradient": "one gradient element is set to NaN before the first optimizer step of training step 3",
}
NAN_GRADIENT_STEP = 3


@cache
def active() -> str | None:
    """The fault of the run that this process belongs to; None without one. Raises ValueError for an unknown name."""
    folder = RunFolder.from_environment()
    if folder is None:
        return None
    config = folder.read_config()
    name = config.arm.get("fault") or config.recipe.get("fault")
    if name is not None and name not in FAULTS:
        raise ValueError(f"unknown fault {name!r}: known are {', '.join(FAULTS)}")
    return name
