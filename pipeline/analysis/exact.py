"""Deterministic runs: exact comparison of two arms, step by step and metric by metric.

Where a run repeats bit for bit, any difference between the arms is the treatment's doing, and the first of them tells
what kind it is: PAO starts with rounding ties, a relative difference near 2^-17 that the closed loop (new weights, new
samples, new gradients) then amplifies. So a difference as such is no verdict; how large it becomes over seeds is.
"""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from pipeline.analysis.columns import FloatArray, IntArray
from pipeline.analysis.load import Pair, steps_in_common
from pipeline.analysis.master_weights import compare_masters_of
from pipeline.analysis.results import ExactComparison

# Readings of clocks and of memory differ between any two runs.
_TIME_OR_MEMORY = re.compile(r"(^|/)(timing_s|timing_per_token_ms|perf|memory|wall_time)(/|$)|_(s|ms|gb|gib)$")
_GROWTH_STEPS = 8


def repeats_exactly(repeats: Sequence[Pair]) -> bool:
    """Whether every A/A pair (there is at least one) agrees bit for bit in all metrics but time and memory."""
    return bool(repeats) and all(_identical(pair) for pair in repeats)


def _identical(pair: Pair) -> bool:
    same_steps = np.array_equal(pair.baseline.steps.step, pair.treatment.steps.step)
    return same_steps and len(pair.baseline.steps) > 0 and _first_difference(pair, compared_columns(pair)) is None


def compared_columns(pair: Pair) -> list[str]:
    """The metrics of either run that are neither a time nor a memory reading."""
    names = {*pair.baseline.steps.columns, *pair.treatment.steps.columns} - {"step"}
    return sorted(name for name in names if not _TIME_OR_MEMORY.search(name))


def compare_exactly(pairs: Sequence[Pair], gated: Iterable[str]) -> ExactComparison:
    """Where the arms part first, in any pair, and how far apart the `gated` columns are at a few steps from there."""
    masters = compare_masters_of(pairs)
    parted = [found for pair in pairs if (found := _first_difference(pair, compared_columns(pair))) is not None]
    if not parted:
        return ExactComparison(first_step=None, first_metric=None, first_difference=None, masters=masters)
    step, size, metric = min(parted, key=lambda found: (found[0], -found[1], found[2]))
    return ExactComparison(step, metric, size, growth=_growth(pairs, list(gated), step), masters=masters)


def _first_difference(pair: Pair, columns: Sequence[str]) -> tuple[int, float, str] | None:
    """(step, relative difference, metric): at the first step that differs, the metric that differs most."""
    parted: list[tuple[int, float, str]] = []
    for column in columns:
        steps, sizes = _relative_differences(pair, column)
        at = np.flatnonzero(sizes)
        if at.size:
            parted.append((int(steps[at[0]]), float(sizes[at[0]]), column))
    return min(parted, key=lambda found: (found[0], -found[1], found[2]), default=None)


def _relative_differences(pair: Pair, column: str) -> tuple[IntArray, FloatArray]:
    """Steps in common, and |t - b| / max(|t|, |b|) at each; infinite where one arm alone has a finite value."""
    steps, left, right = steps_in_common(pair.baseline, pair.treatment)
    baseline, treatment = pair.baseline.metric(column)[left], pair.treatment.metric(column)[right]
    apart = ~((baseline == treatment) | (np.isnan(baseline) & np.isnan(treatment)))
    sizes = np.zeros(len(steps))
    largest = np.maximum(np.abs(baseline), np.abs(treatment))[apart]
    with np.errstate(invalid="ignore"):
        sizes[apart] = np.nan_to_num(np.abs(treatment - baseline)[apart] / largest, nan=np.inf)
    return steps, sizes


def _growth(pairs: Sequence[Pair], gated: Sequence[str], first_step: int) -> list[tuple[int, float]]:
    """(step, largest relative difference of any pair and column) at evenly spaced steps from `first_step` on."""
    found = [_relative_differences(pair, column) for pair in pairs for column in gated]
    if not found:
        return []
    steps, sizes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    kept = (steps >= first_step) & np.isfinite(sizes)
    names, position = np.unique(steps[kept], return_inverse=True)
    largest = np.zeros(len(names))
    np.maximum.at(largest, position, sizes[kept])
    if not len(names):
        return []
    chosen = np.unique(np.linspace(0, len(names) - 1, _GROWTH_STEPS, dtype=np.int64))
    return [(int(names[i]), float(largest[i])) for i in chosen]
