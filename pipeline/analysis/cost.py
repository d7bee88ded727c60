"""What a saving costs in time: ratios of medians, treatment over baseline, of the same pair; what observing costs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.analysis.columns import FloatArray
from pipeline.analysis.load import Pair, Run

_CONFIDENCE = 0.90
_RESAMPLES = 1000


@dataclass(frozen=True)
class TimeRatio:
    """Treatment over baseline; 1.05 is 5 % slower."""

    ratio: float
    low: float
    high: float
    baseline_s: float
    treatment_s: float
    pairs: int

    @property
    def basis(self) -> str:
        """What the interval stands on."""
        percent = round(100 * _CONFIDENCE)
        if self.pairs == 1:
            return f"{percent} % bootstrap over the steps of one pair: says nothing about other runs"
        return f"{percent} % t-interval over {self.pairs} pairs"

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


def on_two_machines(pair: Pair) -> bool:
    """Known to be so: such a pair's times say more of the machines than of the arm, so they are left out."""
    one, other = (
        None if run.environment is None else run.environment.hardware.get("machine")
        for run in (pair.baseline, pair.treatment)
    )
    return None not in (one, other) and one != other


def optimizer_step_ratio(pairs: list[Pair]) -> TimeRatio | None:
    """Time of the optimizer step, the slowest rank of each. None when no pair has it on both sides."""
    return _ratio(pairs, _optimizer_seconds)


def step_ratio(pairs: list[Pair]) -> TimeRatio | None:
    """Time of the whole training step (verl's timing_s/step)."""
    return _ratio(pairs, _step_seconds)


@dataclass(frozen=True)
class ObserverTime:
    """What the observers took by their own clock, on the slowest rank, the first step left out."""

    per_update_s: float
    """Median over the optimizer steps of all runs."""
    share: float
    """Of the training steps' whole time."""


def observer_time(runs: list[Run]) -> ObserverTime | None:
    """None where no run recorded it and the time of its steps."""
    measured = [(_slowest(run, "time_observer_s"), _step_seconds(run)) for run in runs]
    measured = [(own, whole) for own, whole in measured if len(own) and len(whole)]
    if not measured:
        return None
    own, whole = (np.concatenate(side) for side in zip(*measured, strict=True))
    return ObserverTime(per_update_s=float(np.median(own)), share=float(own.sum() / whole.sum()))


def _optimizer_seconds(run: Run) -> FloatArray:
    return _slowest(run, "time_optimizer_step_s")


def _slowest(run: Run, column: str) -> FloatArray:
    """Seconds of each update on its slowest rank; the first step allocates and warms up, so it is left out."""
    times = run.updates.column(column)
    kept = np.isfinite(times) & (run.updates.step > 1)
    updates = run.updates.column("update")[kept]
    order, position = np.unique(updates, return_inverse=True)
    slowest = np.zeros(len(order))
    np.maximum.at(slowest, position, times[kept])
    return slowest[slowest > 0]


def _step_seconds(run: Run) -> FloatArray:
    times = run.metric("timing_s/step")
    return times[np.isfinite(times) & (times > 0) & (run.steps.step > 1)]


def _ratio(pairs: list[Pair], seconds: Callable[[Run], FloatArray]) -> TimeRatio | None:
    sides = [(seconds(pair.baseline), seconds(pair.treatment)) for pair in pairs if not on_two_machines(pair)]
    measured = [(left, right) for left, right in sides if len(left) and len(right)]
    if not measured:
        return None
    logs = np.array([np.log(np.median(right) / np.median(left)) for left, right in measured])
    low, high = _over_steps(*measured[0]) if len(measured) == 1 else _over_pairs(logs)
    return TimeRatio(
        ratio=float(np.exp(logs.mean())),
        low=float(np.exp(low)),
        high=float(np.exp(high)),
        baseline_s=float(np.mean([np.median(left) for left, _ in measured])),
        treatment_s=float(np.mean([np.median(right) for _, right in measured])),
        pairs=len(measured),
    )


def _over_pairs(logs: FloatArray) -> tuple[float, float]:
    from scipy.stats import t

    half = float(t.ppf(0.5 + _CONFIDENCE / 2, len(logs) - 1)) * float(logs.std(ddof=1)) / np.sqrt(len(logs))
    return float(logs.mean() - half), float(logs.mean() + half)


def _over_steps(left: FloatArray, right: FloatArray) -> tuple[float, float]:
    random = np.random.default_rng(0)
    medians = [np.median(random.choice(side, size=(_RESAMPLES, len(side))), axis=1) for side in (left, right)]
    low, high = np.quantile(np.log(medians[1] / medians[0]), [0.5 - _CONFIDENCE / 2, 0.5 + _CONFIDENCE / 2])
    return float(low), float(high)
