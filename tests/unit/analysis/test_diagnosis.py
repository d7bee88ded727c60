"""Each candidate of the diagnosis table gets exactly its name, and ppo_kl alone decides nothing."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.analysis.diagnosis import Diagnosis, diagnose
from pipeline.analysis.library_versions import has_dead_pao
from pipeline.analysis.load import Study

MakeStudy = Callable[..., Study]
Row = dict[str, Any]


def of(made_up: MakeStudy, **run: Any) -> Diagnosis:
    return diagnose(made_up(run).runs[0])


def test_healthy(made_up: MakeStudy) -> None:
    found = of(made_up, arm="pao")
    assert found.outcome == "healthy"
    assert "exactly 0 in the first mini-batch" in found.evidence
    assert [finding.candidate for finding in found.findings if finding.holds] == ["healthy"]
    assert all(finding.evidence for finding in found.findings)


def test_on_policy_by_design(made_up: MakeStudy) -> None:
    found = of(made_up, updates_per_step=1)
    assert found.outcome == "on-policy by design"
    assert "ppo_kl = 0 is expected" in found.evidence


def test_the_dead_optimizer_can_be_found_from_its_diagnosis(made_up: MakeStudy) -> None:
    found = of(made_up, arm="dead_optimizer")
    assert found.outcome == "dead optimizer"
    assert "not" not in found.outcome
    told = " ".join([found.evidence, *found.traces])
    for fact in (
        "none of 32 optimizer steps changed a single bit of the 128,000",
        "grad_norm",
        "ppo_kl is exactly 0 in all 4 mini-batches",
        "no master weights: 2.00 bytes",
        "use_decoupled_grad=False",
        ".decoupled_grad",
        "megatron-core 0.16.1 is not one of the releases with this bug",
        "0.13.0rc0 to 0.13.1",
    ):
        assert fact in told
    assert "injected on purpose (dead_optimizer)" in found.note


def still(row: Row) -> None:
    row.update(liveness=0.0, elements_changed=0, tensors_still=row["tensors"])


def test_a_dead_baseline_is_dead_too(made_up: MakeStudy) -> None:
    found = of(made_up, edit_update=still)
    assert found.outcome == "dead optimizer"
    assert not found.note


def test_one_dead_rank_is_named(made_up: MakeStudy) -> None:
    found = of(made_up, dp=2, edit_update=lambda row: still(row) if row["rank"] == 1 else None)
    assert found.outcome == "dead optimizer"
    assert "on rank 1" in found.evidence


def test_on_a_gpu_a_still_sample_is_not_death_while_checksums_move(made_up: MakeStudy) -> None:
    def sample(row: Row) -> None:
        row.update(liveness=0.0, elements_changed=0, tensors_still=3, liveness_method="checksums")

    found = of(made_up, platform="cuda", lr=1e-9, edit_update=sample)
    assert found.outcome == "healthy"
    assert "checksums" in found.evidence


def test_some_still_updates_are_counted_not_condemned(made_up: MakeStudy) -> None:
    found = of(made_up, edit_update=lambda row: still(row) if row["update"] < 4 else None)
    assert found.outcome == "healthy"
    assert any("3 of 32 changed nothing" in finding.evidence for finding in found.findings)


def test_lr_still_zero_is_not_a_dead_optimizer(made_up: MakeStudy) -> None:
    def warm_up(row: Row) -> None:
        still(row)
        row.update(lr=0.0)

    assert of(made_up, lr=0.0, edit_update=warm_up).outcome == "lr still zero"


def test_a_warm_up_that_has_ended_is_judged_by_what_came_after(made_up: MakeStudy) -> None:
    def warm_up(row: Row) -> None:
        if row["update"] <= 8:
            still(row)
            row.update(lr=0.0)

    found = of(made_up, edit_update=warm_up)
    assert found.outcome == "healthy"
    assert any("0 in 8 of 32" in finding.evidence for finding in found.findings)


def test_a_constant_reward_is_no_learning_signal_even_if_weight_decay_moves(made_up: MakeStudy) -> None:
    found = of(made_up, edit_step=lambda row: row.update({"rewards/within_group_std_mean": 0.0}))
    assert found.outcome == "no learning signal"


def test_gradients_that_are_all_zero_are_no_learning_signal(made_up: MakeStudy) -> None:
    def no_gradient(row: Row) -> None:
        still(row)
        row.update(grad_norm=0.0)

    edit = {"edit_step": lambda row: row.pop("rewards/within_group_std_mean")}
    assert of(made_up, edit_update=no_gradient, **edit).outcome == "no learning signal"


def test_weights_not_reaching_the_rollout(made_up: MakeStudy) -> None:
    def drifting(row: Row) -> None:
        row["training/rollout_probs_diff_mean"] = 6e-4 + 0.02 * (row["step"] - 1)

    assert of(made_up, edit_step=drifting).outcome == "weights not reaching the rollout"


def test_a_rollout_that_rounds_otherwise_is_no_alarm(made_up: MakeStudy) -> None:
    coarse = {"training/rollout_probs_diff_mean": 0.02}
    assert of(made_up, edit_step=lambda row: row.update(coarse)).outcome == "healthy"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_names_step_and_metric(made_up: MakeStudy, value: float) -> None:
    found = of(made_up, edit_update=lambda row: row.update(grad_norm=value) if row["step"] >= 3 else None)
    assert found.outcome == "non-finite"
    assert "step 3" in found.evidence
    assert "grad_norm" in found.evidence


def test_a_nan_throughput_is_not_training(made_up: MakeStudy) -> None:
    assert of(made_up, edit_step=lambda row: row.update({"perf/mfu/actor": math.nan})).outcome == "healthy"


def test_ppo_kl_alone_decides_nothing(made_up: MakeStudy) -> None:
    flat = {
        "edit_update": lambda row: row.update(ppo_kl=0.0),
        "edit_step": lambda row: row.update({"actor/ppo_kl": 0.0}),
    }
    assert of(made_up, **flat).outcome == "healthy"


def test_without_liveness_nothing_is_called_healthy(made_up: MakeStudy) -> None:
    def unmeasured(row: Row) -> None:
        for name in ("liveness", "elements_changed", "tensors", "tensors_still"):
            del row[name]

    assert of(made_up, edit_update=unmeasured).outcome == "not enough data"


@pytest.mark.parametrize(
    ("version", "dead"),
    [
        ("0.12.3", False),
        ("0.13.0rc0", True),
        ("0.13.0", True),
        ("0.13.1", True),
        ("0.14.0rc7", True),
        ("0.14.0", False),
        ("0.15.0rc2", True),
        ("0.15.0rc3", False),
        ("0.16.1", False),
        ("core_r0.13", None),
    ],
)
def test_affected_releases(version: str, dead: bool | None) -> None:
    assert has_dead_pao(version) is dead
