"""The statistics of parity: arrays in, verdicts out.

The unit of replication is the seed pair, treatment minus baseline of one seed; steps of one run are not independent and
count only through the run's mean over a window fixed beforehand. The rule, per metric:

* difference test: two-sided paired t test; p-values adjusted by Holm over all metrics of the study, so that the
  chance of finding any difference where there is none is at most alpha, whatever the correlation of the metrics;
* equivalence test: two one-sided paired t tests (TOST; Schuirmann 1987) against the margin. It passes exactly when the
  1 - 2 alpha interval lies inside the margin; where the margin is a share of the baseline, that is the interval of the
  ratio, for the margin is then no better known than the baseline (Sasabuchi 1988);
* maximum gate: the largest difference in a single step against `max_ratio` times the largest between two baselines, or
  times the margin where that is larger (a stricter bound on one step than on the mean would make the margin idle).

    equivalent    the equivalence test passes and the maximum gate holds. A difference that is detectable but smaller
                  than the margin is equivalent: it exists and does not matter.
    different     the adjusted difference test rejects, and the difference matters: its mean is beyond the margin, or
                  the maximum gate is broken.
    inconclusive  anything else.

A study is `different` when any metric is (that is what Holm guards), and `equivalent` when every metric is: a
conclusion that holds only if all tests pass needs no correction (intersection-union; Berger 1982).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from scipy import stats

# statsmodels has no type stubs.
from statsmodels.stats.power import TTestPower  # pyright: ignore[reportMissingTypeStubs]
from statsmodels.stats.weightstats import DescrStatsW  # pyright: ignore[reportMissingTypeStubs]

from pipeline.analysis.gates import FloatArray, Gates, Margin, window_slice

BoolArray = npt.NDArray[np.bool_]
Outcome = Literal["equivalent", "different", "inconclusive"]

MOST_PAIRS = 1000
"""Where the search for a deciding number of seeds ends."""

# Differences closer than this share of the values are one value: rounding of the window mean, not spread.
_SAME = 1e-12


@dataclass(frozen=True)
class Curves:
    """One metric of all pairs, (pairs, steps), in the metric's unit. NaN: not measured at that step."""

    baseline: FloatArray
    treatment: FloatArray
    noise: FloatArray
    """Differences between runs that should not differ (see `noise_between`), (comparisons, steps); may have no rows."""


@dataclass(frozen=True)
class PairedTest:
    """Tests of one metric's paired differences d, treatment minus baseline.

    Without two pairs, or where all d are one value other than zero (a coarse metric: its spread is unknown, not nil),
    there is neither interval nor p-value.
    """

    differences: FloatArray
    mean: float
    spread: float | None
    """Standard deviation of d."""
    interval: tuple[float, float] | None
    """1 - 2 alpha confidence interval of the mean."""
    p_equivalence: float | None
    p_difference: float | None
    """Not adjusted for the number of metrics."""


@dataclass(frozen=True)
class MetricVerdict:
    """What the rule above makes of one metric."""

    test: PairedTest
    baseline_mean: float
    margin: float
    """Half-width of the equivalence interval."""
    max_difference: float
    """Largest absolute difference in one step of one pair."""
    max_at: tuple[int, int]
    """(pair, step) of it, counted from 0."""
    max_limit: float | None
    """What it may be; None where there are no two baselines to compare with."""
    outcome: Outcome = "inconclusive"
    p_holm: float | None = None

    @property
    def n_pairs(self) -> int:
        return len(self.test.differences)

    @property
    def beyond_margin(self) -> bool:
        return abs(self.test.mean) > self.margin

    @property
    def breaks_max_gate(self) -> bool:
        return self.max_limit is not None and self.max_difference > self.max_limit


def paired_tests(baseline: FloatArray, treatment: FloatArray, margins: FloatArray, alpha: float) -> list[PairedTest]:
    """Difference and equivalence tests of window means, one test per column.

    All arrays are (pairs, metrics); margins: `Margin.of_pairs`. Where a metric's margin is the same for all pairs, its
    equivalence test is statsmodels' ttost_paired, which takes one margin only.
    """
    differences = treatment - baseline
    means = differences.mean(axis=0)
    if len(differences) < 2:
        return [PairedTest(differences[:, i], float(mean), None, None, None, None) for i, mean in enumerate(means)]
    described, above_lower, below_upper = (
        cast(Any, DescrStatsW(values)) for values in (differences, differences + margins, differences - margins)
    )
    with np.errstate(divide="ignore", invalid="ignore"):  # no spread: told apart below
        lows, highs = described.tconfint_mean(alpha=2 * alpha)
        p_difference = described.ttest_mean(0.0)[1]
        p_equivalence = np.maximum(
            above_lower.ttest_mean(0.0, alternative="larger")[1], below_upper.ttest_mean(0.0, alternative="smaller")[1]
        )
    spreads = differences.std(axis=0, ddof=1)
    one_value = _SAME * np.maximum(np.abs(baseline), np.abs(treatment)).max(axis=0)
    tests: list[PairedTest] = []
    for i in range(differences.shape[1]):
        column: FloatArray = differences[:, i]
        if np.abs(column).max() <= one_value[i]:
            test = PairedTest(column, 0.0, 0.0, (0.0, 0.0), 0.0, 1.0)
        elif np.ptp(column) <= one_value[i]:
            test = PairedTest(column, float(means[i]), None, None, None, None)
        else:
            interval = (float(lows[i]), float(highs[i]))
            p_values = float(p_equivalence[i]), float(p_difference[i])
            test = PairedTest(column, float(means[i]), float(spreads[i]), interval, *p_values)
        tests.append(test)
    return tests


def judge_metrics(metrics: Sequence[tuple[Curves, Margin]], gates: Gates) -> list[MetricVerdict]:
    """Apply the rule to every metric of one study; Holm's family is the whole list.

    Each metric needs at least one pair with a value of both arms inside the mean window (`values_in_both`).
    """
    means = [_window_means(curves, margin, gates) for curves, margin in metrics]
    tests: dict[int, PairedTest] = {}
    for n_pairs in {len(mean.baseline) for mean in means}:
        alike = [i for i, mean in enumerate(means) if len(mean.baseline) == n_pairs]
        baseline = np.column_stack([means[i].baseline for i in alike])
        treatment = np.column_stack([means[i].treatment for i in alike])
        margins = np.column_stack([means[i].margins for i in alike])
        tests.update(zip(alike, paired_tests(baseline, treatment, margins, gates.alpha), strict=True))
    measured = [
        _with_maximum(curves, mean, tests[i], gates)
        for i, ((curves, _), mean) in enumerate(zip(metrics, means, strict=True))
    ]
    adjusted = _holm({i: test for i, test in tests.items() if len(test.differences) >= gates.min_pairs})
    return [_decide(verdict, adjusted.get(i), gates) for i, verdict in enumerate(measured)]


def judge_study(verdicts: Sequence[MetricVerdict]) -> Outcome:
    """The study's outcome from its metrics' (at least one)."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if "different" in outcomes:
        return "different"
    return "equivalent" if outcomes == {"equivalent"} else "inconclusive"


def values_in_both(curves: Curves, gates: Gates) -> BoolArray:
    """Where both arms have a value inside the mean window, (pairs, steps)."""
    in_both = np.isfinite(curves.treatment - curves.baseline)
    window = window_slice(gates.mean_window, in_both.shape[1])
    in_both[:, : window.start] = False
    in_both[:, window.stop :] = False
    return in_both


def noise_between(repeated: FloatArray, baseline: FloatArray) -> FloatArray:
    """Differences between runs that should not differ, (comparisons, steps): what the maximum gate compares with.

    repeated: baseline_repeat minus baseline of one seed, (A/A pairs, steps); baseline: (seeds, steps). NaN is no value.
    Where repeated runs agree bit for bit there is no such noise, and yet in a closed loop the smallest change makes a
    new sample of the same training. Then, and without A/A pairs, two baselines of different seeds stand in.
    """
    if np.any(np.nan_to_num(repeated)):
        return repeated
    first, second = np.triu_indices(len(baseline), k=1)
    return baseline[second] - baseline[first]


@dataclass(frozen=True)
class _WindowMeans:
    """Per pair, over the steps of the mean window that both arms have; pairs without such a step are left out."""

    baseline: FloatArray
    treatment: FloatArray
    margins: FloatArray


def _window_means(curves: Curves, margin: Margin, gates: Gates) -> _WindowMeans:
    values = values_in_both(curves, gates)
    kept = values.any(axis=1)
    baseline, treatment, sizes = (
        np.mean(curve[kept], axis=1, where=values[kept])
        for curve in (curves.baseline, curves.treatment, np.abs(curves.baseline))
    )
    return _WindowMeans(baseline, treatment, margin.of_pairs(sizes))


def _with_maximum(curves: Curves, means: _WindowMeans, test: PairedTest, gates: Gates) -> MetricVerdict:
    half_width = float(means.margins.mean())
    window = window_slice(gates.max_window, curves.baseline.shape[1])
    sizes = np.nan_to_num(np.abs(curves.treatment - curves.baseline)[:, window], nan=-1.0)
    pair, step = np.unravel_index(int(sizes.argmax()), sizes.shape)
    noise = np.abs(curves.noise[:, window])
    noise = noise[np.isfinite(noise)]
    return MetricVerdict(
        test,
        float(means.baseline.mean()),
        half_width,
        max_difference=max(float(sizes.max()), 0.0),
        max_at=(int(pair), int(step) + window.start),
        max_limit=gates.max_ratio * max(float(noise.max()), half_width) if noise.size else None,
    )


def _holm(tests: dict[int, PairedTest]) -> dict[int, float]:
    """Holm's adjusted p-values, as of statsmodels' multipletests, which collects garbage at each call (0.1 s)."""
    raw = {i: test.p_difference for i, test in tests.items() if test.p_difference is not None}
    smallest_first = sorted(raw, key=lambda i: raw[i])
    adjusted: dict[int, float] = {}
    largest = 0.0
    for rank, i in enumerate(smallest_first):
        largest = max(largest, min((len(raw) - rank) * raw[i], 1.0))
        adjusted[i] = largest
    return adjusted


def _decide(verdict: MetricVerdict, p_holm: float | None, gates: Gates) -> MetricVerdict:
    outcome: Outcome = "inconclusive"
    if verdict.n_pairs >= gates.min_pairs:
        p_equivalence = verdict.test.p_equivalence
        if p_equivalence is not None and p_equivalence < gates.alpha and not verdict.breaks_max_gate:
            outcome = "equivalent"
        elif p_holm is not None and p_holm < gates.alpha and (verdict.beyond_margin or verdict.breaks_max_gate):
            outcome = "different"
    return replace(verdict, outcome=outcome, p_holm=p_holm)


def pairs_to_decide(verdicts: Sequence[MetricVerdict], gates: Gates) -> int | None:
    """Pairs that would decide an inconclusive study with probability `gates.power`, from the observed spreads.

    The rule. Where a mean is beyond its margin: pairs at which the difference test, at Holm's strictest level
    alpha / metrics, rejects if the true difference is the observed one; the metric that needs fewest decides the study.
    Otherwise: pairs at which the equivalence test passes if the true difference is zero; the metric that needs most
    counts, each with power 1 - (1 - power) / metrics, so that all pass together with `power` (Bonferroni).
    None where no number is known: no spread yet, more than MOST_PAIRS, or a maximum gate that more pairs do not mend.
    """
    undecided = [verdict for verdict in verdicts if verdict.outcome == "inconclusive"]
    leaning = [verdict for verdict in undecided if verdict.beyond_margin]
    needed = [_pairs_for(verdict, len(verdicts), gates) for verdict in leaning or undecided]
    known = [number for number in needed if number is not None]
    if leaning:
        return min(known, default=None)
    return max(known) if known and len(known) == len(needed) else None


def _pairs_for(verdict: MetricVerdict, metrics: int, gates: Gates) -> int | None:
    spread = verdict.test.spread
    if not spread:
        return None
    if verdict.beyond_margin:
        effect = abs(verdict.test.mean) / spread
        number = _fewest(lambda n: difference_power(n, effect, gates.alpha / metrics), gates.power)
    elif verdict.breaks_max_gate:
        return None
    else:
        target = 1 - (1 - gates.power) / metrics
        number = _fewest(lambda n: equivalence_power(n, verdict.margin / spread, gates.alpha), target)
    return None if number is None else max(number, verdict.n_pairs + 1, gates.min_pairs)


def difference_power(pairs: int, effect: float, alpha: float) -> float:
    """Power of the two-sided paired t test; `effect` is the true mean over the standard deviation of differences."""
    return float(cast(Any, TTestPower()).power(effect, pairs, alpha))


def equivalence_power(pairs: int, margin: float, alpha: float) -> float:
    """Power of the TOST when the true difference is zero; `margin` in standard deviations of the differences.

    The mean (normal) lies within margin - t s / sqrt(n); the average over s (chi-squared) is taken at 500 quantiles.
    """
    df = pairs - 1
    quantiles: FloatArray = stats.chi2.ppf((np.arange(500) + 0.5) / 500, df)
    room = margin * math.sqrt(pairs) - float(stats.t.isf(alpha, df)) * np.sqrt(quantiles / df)
    inside: FloatArray = 2 * stats.norm.cdf(room) - 1
    return float(np.maximum(inside, 0).mean())


def _fewest(power: Callable[[int], float], target: float) -> int | None:
    """Smallest number of pairs, 2 to MOST_PAIRS, at which `power` (growing) reaches the target."""
    low, high = 1, 2  # up from below: statsmodels gives NaN for powers that are nearly one
    while power(high) < target:
        if high == MOST_PAIRS:
            return None
        low, high = high, min(2 * high, MOST_PAIRS)
    while high - low > 1:  # power(low) < target <= power(high)
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= target else (middle, high)
    return high
