"""Series over steps or optimizer steps, as the figures and the dashboard draw them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.analysis.columns import FloatArray
from pipeline.analysis.load import Run

Series = tuple[FloatArray, FloatArray]
"""x and y of one run."""

OverRanks = Literal["largest", "lowest", "mean"]


@dataclass(frozen=True)
class Curve:
    """One metric that is drawn over steps, or over optimizer steps where ranks are reduced to one value."""

    title: str
    unit: str
    names: tuple[str, ...]
    """A step metric of verl's, or fields of updates.jsonl of which the first that the run has is read."""
    over_ranks: OverRanks | None = None
    """None: a step metric."""
    from_zero: bool = False

    @property
    def x_label(self) -> str:
        return "step" if self.over_ranks is None else "optimizer step"

    def read(self, run: Run) -> Series:
        """NaN where there is no finite value."""
        if self.over_ranks is None:
            return run.steps.column("step"), run.metric(self.names[0])
        name = next((name for name in self.names if name in run.updates), self.names[0])
        return _per_update(run.updates.column("update"), run.updates.column(name), self.over_ranks)


REWARD = Curve("Reward (critic/rewards/mean)", "reward", ("critic/rewards/mean",))
PPO_KL = Curve("Policy drift (actor/ppo_kl)", "nats per token", ("actor/ppo_kl",))
CLIP_FRACTION = Curve("Clip fraction (actor/pg_clipfrac)", "share of tokens", ("actor/pg_clipfrac",))
GRAD_NORM = Curve("Gradient norm (actor/grad_norm)", "L2 norm", ("actor/grad_norm",))
MEMORY = Curve(
    "Memory after each optimizer step, largest rank", "GiB",
    ("allocated_after_update_gib", "rss_after_update_gib"), "largest",
)  # fmt: skip
LIVENESS = Curve(
    "Liveness: elements whose bits an optimizer step changed, lowest rank", "share of elements",
    ("liveness",), "lowest", from_zero=True,
)  # fmt: skip


def _per_update(updates: FloatArray, values: FloatArray, over_ranks: OverRanks) -> Series:
    if not len(updates):
        return updates, values
    order = np.argsort(updates, kind="stable")
    updates, values = updates[order], values[order]
    first = np.flatnonzero(np.diff(updates, prepend=np.nan) != 0)
    known = np.isfinite(values)
    if over_ranks == "mean":
        count = np.add.reduceat(known.astype(np.float64), first)
        total = np.add.reduceat(np.where(known, values, 0.0), first)
        return updates[first], np.divide(total, count, out=np.full(len(first), np.nan), where=count > 0)
    values = np.where(known, values, np.nan)
    reduce = np.fmax if over_ranks == "largest" else np.fmin  # which pass over NaN
    return updates[first], reduce.reduceat(values, first)


def aligned(series: Sequence[Series]) -> tuple[FloatArray, FloatArray]:
    """The union of all x, and one row of y per run; NaN where a run has no value."""
    x = np.unique(np.concatenate([run_x for run_x, _ in series])) if series else np.empty(0)
    rows = np.full((len(series), len(x)), np.nan)
    for row, (run_x, run_y) in zip(rows, series, strict=True):
        row[np.searchsorted(x, run_x)] = run_y
    rows[~np.isfinite(rows)] = np.nan
    return x, rows
