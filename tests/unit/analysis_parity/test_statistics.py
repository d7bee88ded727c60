"""The parity rule against scipy, statsmodels and worked examples."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests  # type: ignore[import-untyped]
from statsmodels.stats.weightstats import ttost_paired  # type: ignore[import-untyped]

from pipeline.analysis.gates import Gates, Margin
from pipeline.analysis.statistics import (
    MOST_PAIRS,
    Curves,
    MetricVerdict,
    difference_power,
    equivalence_power,
    judge_metrics,
    judge_study,
    noise_between,
    paired_tests,
    pairs_to_decide,
)

Array = npt.NDArray[np.float64]
BASELINE = np.array([0.20, 0.22, 0.18, 0.21, 0.19])
TREATMENT = np.array([0.21, 0.20, 0.19, 0.22, 0.21])


def _constant_curves(baseline: Any, treatment: Any, noise: float = 1.0) -> Curves:
    """Runs of 4 steps that stay at one value; A/A runs differ by `noise` in each step."""
    return Curves(np.tile(baseline[:, None], 4), np.tile(treatment[:, None], 4), np.full((1, 4), noise))


def _judge(differences: Any, gates: Gates, margin: float = 0.05, noise: float = 1.0) -> MetricVerdict:
    baseline = 0.2 + 0.01 * np.arange(len(differences))
    curves = _constant_curves(baseline, baseline + np.array(differences), noise)
    return judge_metrics([(curves, Margin(absolute=margin))], gates)[0]


def test_one_margin_for_all_pairs_is_scipys_and_statsmodels_answer() -> None:
    margin = np.full(5, 0.02)
    (test,) = paired_tests(BASELINE[:, None], TREATMENT[:, None], margin[:, None], 0.05)
    assert test.mean == pytest.approx(0.006)
    assert test.p_difference == pytest.approx(stats.ttest_rel(TREATMENT, BASELINE).pvalue)
    assert test.p_equivalence == pytest.approx(ttost_paired(TREATMENT, BASELINE, -0.02, 0.02)[0])
    assert test.interval == pytest.approx(tuple(stats.ttest_rel(TREATMENT, BASELINE).confidence_interval(0.90)))


def test_a_share_of_the_baseline_is_a_test_of_the_ratio() -> None:
    margin = Margin(share=0.1).of_pairs(BASELINE)
    (test,) = paired_tests(BASELINE[:, None], TREATMENT[:, None], margin[:, None], 0.05)
    above = stats.ttest_rel(TREATMENT, 0.9 * BASELINE, alternative="greater").pvalue
    below = stats.ttest_rel(TREATMENT, 1.1 * BASELINE, alternative="less").pvalue
    assert test.p_equivalence == pytest.approx(max(above, below))


def test_metrics_tested_together_are_tested_as_if_alone(gates: Gates) -> None:
    curves = [_constant_curves(BASELINE, TREATMENT), _constant_curves(BASELINE[:3], TREATMENT[:3] + 0.1)]
    together = judge_metrics([(c, Margin(absolute=0.02)) for c in curves], gates)
    for verdict, alone in zip(together, curves, strict=True):
        (expected,) = judge_metrics([(alone, Margin(absolute=0.02))], gates)
        assert verdict.test.p_difference == pytest.approx(expected.test.p_difference)
        assert verdict.test.p_equivalence == pytest.approx(expected.test.p_equivalence)
        assert verdict.n_pairs == expected.n_pairs


def test_holm_is_statsmodels_answer(gates: Gates) -> None:
    treatments = [BASELINE + 0.01 * np.array([1, 2, 3, 2, shift]) for shift in (-6, 2, 2, -1)]
    verdicts = judge_metrics([(_constant_curves(BASELINE, t), Margin(absolute=1)) for t in treatments], gates)
    raw = [stats.ttest_rel(t, BASELINE).pvalue for t in treatments]
    expected: Any = multipletests(raw, method="holm")
    assert [verdict.p_holm for verdict in verdicts] == pytest.approx(list(expected[1]))
    assert verdicts[1].p_holm == pytest.approx(4 * raw[1])  # the smallest, times their number


def test_small_differences_are_equivalent(gates: Gates) -> None:
    assert _judge([0.01, -0.01, 0.005, -0.005, 0.0], gates).outcome == "equivalent"


def test_a_detectable_trifle_is_equivalent(gates: Gates) -> None:
    verdict = _judge([0.010, 0.011, 0.009, 0.010, 0.011], gates)
    assert verdict.p_holm is not None
    assert verdict.p_holm < 0.001
    assert verdict.outcome == "equivalent"


def test_a_large_difference_is_different(gates: Gates) -> None:
    assert _judge([0.10, 0.12, 0.09, 0.11, 0.10], gates).outcome == "different"


def test_a_detected_difference_whose_size_is_open_is_inconclusive(gates: Gates) -> None:
    verdict = _judge([0.030, 0.055, 0.040, 0.060, 0.045], gates)
    assert verdict.p_holm is not None
    assert verdict.p_holm < 0.05
    assert not verdict.beyond_margin
    assert verdict.outcome == "inconclusive"


def test_noise_is_inconclusive(gates: Gates) -> None:
    assert _judge([0.10, -0.12, 0.09, -0.11, 0.02], gates).outcome == "inconclusive"


def test_a_spike_beyond_the_noise_forbids_equivalence(gates: Gates) -> None:
    curves = _constant_curves(BASELINE, BASELINE + 0.001 * np.array([1, -1, 2, -2, 0]), noise=0.1)
    curves.treatment[2, 0] += 0.3  # in a step outside the mean window
    (verdict,) = judge_metrics([(curves, Margin(absolute=0.05))], gates)
    assert verdict.max_limit == pytest.approx(0.2)
    assert verdict.max_difference == pytest.approx(0.302)
    assert verdict.max_at == (2, 0)
    assert verdict.outcome == "inconclusive"
    quiet = replace(curves, noise=np.full((1, 4), 0.2))
    assert judge_metrics([(quiet, Margin(absolute=0.05))], gates)[0].outcome == "equivalent"


def test_a_detected_difference_with_spikes_beyond_the_noise_is_different(gates: Gates) -> None:
    curves = _constant_curves(BASELINE, BASELINE + np.array([0.010, 0.011, 0.009, 0.010, 0.011]), noise=0.1)
    curves.treatment[2, 0] += 0.3
    (verdict,) = judge_metrics([(curves, Margin(absolute=0.05))], gates)
    assert not verdict.beyond_margin
    assert verdict.outcome == "different"


def test_one_difference_in_every_pair_proves_nothing(gates: Gates) -> None:
    """A score over 64 prompts: three equal differences are coarseness, not certainty."""
    verdict = _judge([6 / 64, 6 / 64, 6 / 64], gates)
    assert verdict.test.p_difference is None
    assert verdict.outcome == "inconclusive"


def test_identical_runs_are_equivalent_at_any_margin(gates: Gates) -> None:
    curves = _constant_curves(np.zeros(3), np.zeros(3), noise=0.0)
    assert judge_metrics([(curves, Margin(share=0.1))], gates)[0].outcome == "equivalent"


@pytest.mark.parametrize("pairs", [1, 2])
def test_fewer_pairs_than_the_gates_ask_for_establish_nothing(gates: Gates, pairs: int) -> None:
    assert _judge([0.0] * pairs, gates).outcome == "inconclusive"
    assert _judge([0.5, 0.5001][:pairs], gates).outcome == "inconclusive"


def test_the_study_is_different_when_one_metric_is_and_equivalent_when_all_are(gates: Gates) -> None:
    same = _judge([0.01, -0.01, 0.005, -0.005, 0.0], gates)
    unclear = _judge([0.10, -0.12, 0.09, -0.11, 0.02], gates)
    different = _judge([0.10, 0.12, 0.09, 0.11, 0.10], gates)
    assert judge_study([same, same]) == "equivalent"
    assert judge_study([same, unclear]) == "inconclusive"
    assert judge_study([same, unclear, different]) == "different"


def test_only_steps_that_both_arms_measured_count(gates: Gates) -> None:
    baseline = np.array([[9.0, 9.0, 1.0, 3.0], [9.0, 9.0, 1.0, np.nan], [9.0, 9.0, np.nan, np.nan]])
    treatment = np.array([[9.0, 9.0, 2.0, np.nan], [9.0, 9.0, 3.0, 5.0], [9.0, 9.0, 1.0, 1.0]])
    (verdict,) = judge_metrics([(Curves(baseline, treatment, np.empty((0, 4))), Margin(absolute=1))], gates)
    assert verdict.test.differences.tolist() == [1.0, 2.0]
    assert verdict.baseline_mean == 1.0
    assert verdict.max_limit is None


def test_noise_is_that_of_the_repeats_unless_they_agree_bit_for_bit() -> None:
    baseline = np.array([[1.0, 2.0], [1.5, 2.5], [1.0, np.nan]])
    repeated = np.array([[0.0, 0.1]])
    np.testing.assert_array_equal(noise_between(repeated, baseline), repeated)
    between_seeds = np.array([[0.5, 0.5], [0.0, np.nan], [-0.5, np.nan]])
    np.testing.assert_array_equal(noise_between(np.array([[0.0, np.nan]]), baseline), between_seeds)
    np.testing.assert_array_equal(noise_between(np.empty((0, 2)), baseline), between_seeds)


def test_a_share_is_one_of_the_baselines_size_where_its_signs_cancel(gates: Gates) -> None:
    """ppo_kl of a healthy run: positive and negative steps, near zero on average."""
    baseline = np.array([[0.0, 0.0, 0.02, -0.02], [0.0, 0.0, 0.03, -0.01], [0.0, 0.0, -0.02, 0.02]])
    curves = Curves(baseline, baseline + 0.001 * np.array([[1], [-1], [0.5]]), np.empty((0, 4)))
    (verdict,) = judge_metrics([(curves, Margin(share=0.25))], gates)
    assert verdict.margin == pytest.approx(0.25 * 0.02)
    assert verdict.baseline_mean == pytest.approx(0.01 / 3)
    assert verdict.outcome == "equivalent"


@pytest.mark.parametrize(("pairs", "margin"), [(3, 3.0), (5, 1.5), (12, 1.0)])
def test_equivalence_power_is_what_simulation_finds(pairs: int, margin: float) -> None:
    differences = np.random.default_rng(7).standard_normal((40_000, pairs))
    reach = stats.t.isf(0.05, pairs - 1) * differences.std(axis=1, ddof=1) / np.sqrt(pairs)
    found = float((np.abs(differences.mean(axis=1)) + reach < margin).mean())
    assert equivalence_power(pairs, margin, 0.05) == pytest.approx(found, abs=0.008)  # 3 standard errors


def test_pairs_to_decide_equivalence_is_the_fewest_with_the_power(gates: Gates) -> None:
    verdict = _judge([0.10, -0.12, 0.09, -0.11, 0.02], gates, margin=0.1)
    needed = pairs_to_decide([verdict, verdict], gates)
    assert needed is not None
    assert verdict.test.spread is not None
    effect = 0.1 / verdict.test.spread
    assert equivalence_power(needed, effect, 0.05) >= 0.9 > equivalence_power(needed - 1, effect, 0.05)


def test_pairs_to_decide_a_difference_is_the_fewest_with_the_power(gates: Gates) -> None:
    verdict = _judge([0.30, -0.02, 0.25, 0.00, 0.10], gates, margin=0.1)
    assert verdict.beyond_margin
    assert verdict.outcome == "inconclusive"
    needed = pairs_to_decide([verdict, _judge([0.10, -0.12, 0.09, -0.11, 0.02], gates)], gates)
    assert needed is not None
    assert verdict.test.spread is not None
    effect = verdict.test.mean / verdict.test.spread
    assert difference_power(needed, effect, 0.025) >= 0.8 > difference_power(needed - 1, effect, 0.025)


def test_no_number_of_pairs_is_named_where_none_is_known(gates: Gates) -> None:
    assert pairs_to_decide([_judge([0.01], gates)], gates) is None
    hopeless = _judge([1.0, -1.0, 1.0, -1.0], gates, margin=0.001)
    assert equivalence_power(MOST_PAIRS, 0.001, 0.05) < 0.8
    assert pairs_to_decide([hopeless], gates) is None


_VALUES = st.lists(st.integers(-50, 50), min_size=3, max_size=8)


@given(_VALUES, st.integers(-6, 6), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_units_and_order_do_not_matter(values: list[int], exponent: int, seed: int) -> None:
    differences = np.array(values) / 1000
    baseline = 0.2 + 0.01 * np.arange(len(values))
    factor, order = 2.0**exponent, np.random.default_rng(seed).permutation(len(values))
    for margin, scaled_margin in (
        (Margin(absolute=0.03), Margin(absolute=0.03 * factor)),
        (Margin(share=0.1), Margin(share=0.1)),
    ):
        (verdict,) = judge_metrics([(_constant_curves(baseline, baseline + differences), margin)], GATES)
        curves = _constant_curves(factor * baseline[order], factor * (baseline + differences)[order], noise=factor)
        (scaled,) = judge_metrics([(curves, scaled_margin)], GATES)
        assert scaled.outcome == verdict.outcome
        assert scaled.p_holm == pytest.approx(verdict.p_holm)
        assert scaled.test.p_equivalence == pytest.approx(verdict.test.p_equivalence)
        assert scaled.test.mean == pytest.approx(factor * verdict.test.mean, abs=1e-12)


@given(_VALUES)
@settings(deadline=None, max_examples=30)
def test_swapping_the_arms_swaps_the_sign_only(values: list[int]) -> None:
    baseline = 0.2 + 0.01 * np.arange(len(values))
    treatment = baseline + np.array(values) / 1000
    margin = Margin(absolute=0.03)
    (verdict,) = judge_metrics([(_constant_curves(baseline, treatment), margin)], GATES)
    (swapped,) = judge_metrics([(_constant_curves(treatment, baseline), margin)], GATES)
    assert swapped.outcome == verdict.outcome
    assert swapped.test.mean == pytest.approx(-verdict.test.mean, abs=1e-15)
    assert swapped.p_holm == pytest.approx(verdict.p_holm)
    assert swapped.test.p_equivalence == pytest.approx(verdict.test.p_equivalence)


GATES = Gates.model_validate(
    {
        "name": "made-up",
        "alpha": 0.05,
        "min_pairs": 3,
        "power": 0.8,
        "mean_window": (0.5, 1.0),
        "max_window": (0.0, 1.0),
        "max_ratio": 2.0,
        "metrics": {"any": {"column": "any", "unit": "any", "better": "neither", "margin": {"absolute": 1.0}}},
    }
)
