"""judge_parity on made-up studies: what it concludes, what it leaves out, and that it says so."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.analysis.load import Run, Study
from pipeline.analysis.parity import judge_parity
from pipeline.analysis.results import ParityResult

MakeRun = Callable[..., Run]
MakeStudy = Callable[..., Study]
Pao = Callable[..., Study]

LEVELS = {
    "critic/rewards/mean": 0.4,
    "actor/ppo_kl": 0.005,
    "actor/pg_clipfrac": 0.08,
    "actor/grad_norm": 1.2,
    "actor/entropy": 1.5,
    "response_length/mean": 4.0,
}
STEPS = 6


def _values(seed: int, arm: int, noise: float, shift: dict[str, float] | None = None) -> dict[str, Any]:
    """Levels times (1 + noise), plus a shift in the metric's unit; arms and seeds draw different noise."""
    random = np.random.default_rng([seed, arm])
    return {
        name: level * (1 + noise * random.standard_normal(STEPS)) + (shift or {}).get(name, 0.0)
        for name, level in LEVELS.items()
    }


@pytest.fixture
def pao_study(make_run: MakeRun, make_study: MakeStudy) -> Pao:
    """`seeds` pairs of baseline and pao, and A/A pairs (noisy ones unless `deterministic`)."""

    def make(
        seeds: int,
        *,
        noise: float = 0.02,
        shift: dict[str, float] | None = None,
        deterministic: bool = False,
        changes: dict[int, dict[str, Any]] | None = None,
        **settings: Any,
    ) -> Study:
        runs: list[Run] = []
        for seed in range(1, seeds + 1):
            baseline = _values(seed, 0, noise)
            treatment = {**_values(seed, 1, noise, shift), **(changes or {}).get(seed, {})}
            repeat = dict(baseline) if deterministic else _values(seed, 2, noise)
            runs += [
                make_run("baseline", seed, baseline, **settings),
                make_run("pao", seed, treatment, **settings),
                make_run("baseline_repeat", seed, {**repeat, "timing_s/step": [seed] * STEPS}, **settings),
            ]
        return make_study(runs)

    return make


def _judge(study: Study) -> ParityResult:
    return judge_parity(study, study.pairs, "pao")


def test_same_training_is_equivalent(pao_study: Pao) -> None:
    result = _judge(pao_study(5))
    assert result.outcome == "equivalent"
    assert result.mode == "statistical"
    assert [row.name for row in result.metrics] == list(LEVELS)
    assert {row.outcome for row in result.metrics} == {"equivalent"}
    assert result.sentence.startswith("pao trains as the baseline does: all 6 gated metrics are equivalent")
    assert result.notes == ["not recorded by both arms, so not judged: val-core/*/mean@*"]
    assert result.pairs_to_decide is None


def test_the_rows_hold_the_numbers_of_the_last_half(pao_study: Pao) -> None:
    study = pao_study(5)
    (reward, *_) = _judge(study).metrics
    pairs = study.pairs_of("pao")
    name = "critic/rewards/mean"
    baseline = np.array([pair.baseline.metric(name) for pair in pairs])
    treatment = np.array([pair.treatment.metric(name) for pair in pairs])
    assert reward.mean_difference == pytest.approx((treatment - baseline)[:, 3:].mean())
    assert reward.max_difference == pytest.approx(np.abs(treatment - baseline).max())
    assert reward.baseline_mean == pytest.approx(baseline[:, 3:].mean())
    assert reward.margin == 0.05
    assert (reward.unit, reward.better, reward.n_pairs) == ("reward", "higher", 5)


def test_a_worse_reward_is_different_and_called_worse(pao_study: Pao) -> None:
    result = _judge(pao_study(5, shift={"critic/rewards/mean": -0.2}))
    assert result.outcome == "different"
    assert "critic/rewards/mean is 0.196" in result.sentence
    assert "reward lower (worse), margin 0.05" in result.sentence
    assert "(better)" in _judge(pao_study(5, shift={"critic/rewards/mean": 0.2})).sentence


def test_a_dead_policy_is_different(pao_study: Pao) -> None:
    dead = {seed: {"actor/ppo_kl": np.zeros(STEPS), "actor/pg_clipfrac": np.zeros(STEPS)} for seed in range(1, 4)}
    result = _judge(pao_study(3, changes=dead))
    assert result.outcome == "different"
    assert {row.name for row in result.metrics if row.outcome == "different"} >= {"actor/ppo_kl", "actor/pg_clipfrac"}


def test_noise_is_inconclusive_and_names_the_seeds_that_would_decide(pao_study: Pao) -> None:
    result = _judge(pao_study(4, noise=0.3))
    assert result.outcome == "inconclusive"
    assert result.pairs_to_decide is not None
    assert result.pairs_to_decide > 4
    assert f"about {result.pairs_to_decide} seeds would decide it (power 80%)" in result.sentence


def test_one_pair_establishes_nothing(pao_study: Pao) -> None:
    result = _judge(pao_study(1))
    assert result.outcome == "no difference seen; equivalence not established"
    assert result.mode == "single pair"
    assert all(row.p_difference is None and row.ci_low is None for row in result.metrics)
    assert "No difference between pao and the baseline is seen in one seed" in result.sentence

    far = _judge(pao_study(1, shift={"critic/rewards/mean": -0.3}))
    assert far.outcome == "inconclusive"
    assert "undecided: critic/rewards/mean; run at least 3 seeds" in far.sentence


def test_identical_runs_in_one_pair_establish_nothing_either(pao_study: Pao) -> None:
    result = _judge(pao_study(1, noise=0.0, deterministic=True))
    assert result.outcome == "no difference seen; equivalence not established"
    assert result.mode == "exact"


def test_invalid_pairs_are_left_out_and_listed(pao_study: Pao) -> None:
    study = pao_study(5, shift={"critic/rewards/mean": 0.0})
    study.pairs = [
        replace(pair, reasons=["the treatment run failed"]) if pair.treatment.id == "pao-s2" else pair
        for pair in study.pairs
    ]
    result = _judge(study)
    assert result.excluded == ["s2: the treatment run failed"]
    assert {row.n_pairs for row in result.metrics} == {4}


def test_without_a_valid_pair_there_is_no_verdict(pao_study: Pao) -> None:
    study = pao_study(3)
    study.pairs = [replace(pair, reasons=["resumed"]) for pair in study.pairs]
    result = _judge(study)
    assert result.outcome == "no valid pair"
    assert result.metrics == []
    assert len(result.excluded) == 3
    assert judge_parity(study, [], "pao").outcome == "no valid pair"


def test_a_treatment_that_becomes_nan_is_left_out_but_never_equivalent(pao_study: Pao) -> None:
    broken = np.array([1.2, 1.2, np.nan, np.nan, np.nan, np.nan])
    result = _judge(pao_study(6, changes={3: {"actor/grad_norm": broken}}))
    assert result.excluded == ["s3: NaN or infinite in pao: actor/grad_norm"]
    assert {row.outcome for row in result.metrics} == {"equivalent"}
    assert result.outcome == "inconclusive"
    assert "the treatment became NaN or infinite where its baseline did not: pao-s3" in result.sentence


def test_a_failed_treatment_is_told(make_run: MakeRun, make_study: MakeStudy) -> None:
    runs = [make_run("baseline", 1, _values(1, 0, 0.02)), make_run("pao", 1, _values(1, 1, 0.02), state="failed")]
    result = _judge(make_study(runs, {"pao-s1": ["pao failed"]}))
    assert "the treatment failed where its baseline succeeded: pao-s1" in result.notes


def test_a_gated_metric_that_nobody_recorded_forbids_equivalence(pao_study: Pao) -> None:
    study = pao_study(5)
    for run in study.runs:
        del run.steps.columns["actor/entropy"]
    result = _judge(study)
    assert result.outcome == "inconclusive"
    assert "not recorded by both arms, so not judged: actor/entropy" in result.notes


def test_every_column_that_matches_a_pattern_is_a_metric(pao_study: Pao) -> None:
    score = [np.nan, np.nan, np.nan, np.nan, np.nan, 0.5]
    study = pao_study(3)
    for run in study.runs:
        run.steps.columns["val-core/gsm8k/acc/mean@1"] = np.array(score)
        run.steps.columns["val-core/math/acc/mean@1"] = np.array(score)
        run.steps.columns["val-core/math/acc/best@4/mean"] = np.array(score)
    names = [row.name for row in _judge(study).metrics]
    assert names[1:3] == ["val-core/gsm8k/acc/mean@1", "val-core/math/acc/mean@1"]
    assert "val-core/math/acc/best@4/mean" not in names


def test_settings_are_not_replicates_of_each_other(make_run: MakeRun, make_study: MakeStudy) -> None:
    runs = [
        make_run(arm, seed, _values(seed, number, 0.02), swept={"recipe.lr": lr})
        for lr in (0.001, 0.0001)
        for seed in (1, 2)
        for number, arm in enumerate(("baseline", "pao"))
    ]
    result = _judge(make_study(runs))
    assert {row.n_pairs for row in result.metrics} == {2}
    assert [row.name for row in result.metrics if "rewards" in row.name] == [
        "critic/rewards/mean (recipe.lr=0.0001)",
        "critic/rewards/mean (recipe.lr=0.001)",
    ]
    assert result.outcome == "inconclusive"


def test_gates_changed_after_the_runs_are_seen(pao_study: Pao, raw_gates: dict[str, Any]) -> None:
    study = pao_study(3, stored_hash="of other gates")
    assert _judge(study).notes[0].startswith("GATES CHANGED AFTER THE LAUNCH")

    lenient = copy.deepcopy(raw_gates)
    lenient["metrics"]["reward"]["margin"] = {"absolute": 0.5}
    study = pao_study(3)
    odd = pao_study(3, run_gates=lenient)
    study.runs[4] = odd.runs[4]
    (note, *_) = _judge(study).notes
    assert note == "GATES DIFFER between runs: judged by those of baseline-s1, unlike those of pao-s2"


def test_unreadable_gates_give_no_verdict_and_say_why(pao_study: Pao, raw_gates: dict[str, Any]) -> None:
    del raw_gates["alpha"]
    result = _judge(pao_study(3, run_gates=raw_gates))
    assert result.outcome == "inconclusive"
    assert result.sentence == "No verdict on parity: gates.alpha: Field required."


def test_gates_are_printed_with_units_and_direction(pao_study: Pao) -> None:
    lines = _judge(pao_study(3)).gates
    assert "critic/rewards/mean: ± 0.05 reward; higher is better" in lines
    assert "actor/ppo_kl: ± 25 % of the baseline's mean size, at least 0.0001 nats per token" in lines
    assert any("90% intervals" in line and "Holm" in line for line in lines)


def test_exact_mode_finds_where_the_arms_part(pao_study: Pao) -> None:
    def nearly(seed: int) -> dict[str, Any]:
        """The baseline, off by 2^-17 in step 2, then ten times more at each step."""
        values = _values(seed, 0, 0.02)
        growth = np.array([0, 1, 10, 100, 1000, 1000]) * 2.0**-17
        return {**values, "actor/ppo_kl": values["actor/ppo_kl"] * (1 + growth), "timing_s/step": np.arange(6.0)}

    result = _judge(pao_study(5, deterministic=True, changes={seed: nearly(seed) for seed in range(1, 6)}))
    assert result.mode == "exact"
    assert result.outcome == "equivalent"
    assert result.exact is not None
    assert (result.exact.first_step, result.exact.first_metric) == (2, "actor/ppo_kl")
    assert result.exact.first_difference == pytest.approx(2.0**-17, rel=1e-3)
    assert [step for step, _ in result.exact.growth] == [2, 3, 4, 5, 6]
    sizes = [size * 2**17 for _, size in result.exact.growth]
    assert sizes == pytest.approx([1, 10, 100, 1000, 1000], rel=1e-2)
    assert result.exact.masters is None
    assert "parts from the baseline at step 2, first in actor/ppo_kl (relative difference 7.6e-06)" in result.sentence
    assert result.notes[-1].startswith("not recorded in the run folders: whether the fp32 masters agree")


def test_identical_arms_are_equivalent_in_exact_mode(pao_study: Pao) -> None:
    same = {seed: _values(seed, 0, 0.02) for seed in (1, 2, 3)}
    result = _judge(pao_study(3, deterministic=True, changes=same))
    assert result.outcome == "equivalent"
    assert result.exact is not None
    assert result.exact.first_step is None
    assert result.exact.growth == []
    assert "agrees with the baseline bit for bit in every metric and step" in result.sentence


def test_a_difference_in_exact_mode_is_judged_over_seeds(pao_study: Pao) -> None:
    """Deterministic runs: A/A noise is zero, and yet a difference as such is no verdict."""
    assert _judge(pao_study(5, deterministic=True)).outcome == "equivalent"
    assert _judge(pao_study(5, deterministic=True, shift={"critic/rewards/mean": -0.2})).outcome == "different"


def test_a_single_repeat_that_is_off_by_one_bit_ends_exact_mode(pao_study: Pao) -> None:
    study = pao_study(3, deterministic=True)
    reward = study.pairs_of("baseline_repeat")[1].treatment.steps.columns["critic/rewards/mean"].copy()
    reward[4] = np.nextafter(reward[4], 1)
    study.pairs_of("baseline_repeat")[1].treatment.steps.columns["critic/rewards/mean"] = reward
    result = _judge(study)
    assert (result.mode, result.exact) == ("statistical", None)


@given(st.permutations(range(6)))
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_order_of_pairs_does_not_matter(pao_study: Pao, order: Sequence[int]) -> None:
    study = pao_study(3)
    assert judge_parity(study, [study.pairs[i] for i in order], "pao") == _judge(study)
