"""Bytes per parameter: predicted from the arm alone, found in the workers; a saving that is too good is an alarm."""

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.analysis.conclusions import conclude
from pipeline.analysis.ledger import RunLedger, predict_and_compare
from pipeline.analysis.load import Study
from pipeline.analysis.treatment import check_treatment

MakeStudy = Callable[..., Study]
BYTES = {"baseline": (6, 12), "pao": (6, 10), "pao_bf16_moments": (6, 6), "pao_bf16_all": (4, 6)}


def ledger_of(study: Study, arm: str) -> RunLedger:
    ledger = predict_and_compare(study.runs_of(arm)[0])
    assert ledger is not None
    return ledger


def drop(kind: str) -> Callable[[dict[str, Any]], None]:
    """An edit that takes all tensors of a kind out of every rank."""

    def edit(ledger: dict[str, Any]) -> None:
        for rank in ledger["ranks"]:
            rank["entries"] = [entry for entry in rank["entries"] if entry["kind"] != kind]

    return edit


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("arm", BYTES)
def test_the_formula_of_each_arm(made_up: MakeStudy, arm: str, dp: int) -> None:
    ledger = ledger_of(made_up({"arm": arm, "dp": dp, "pp": 2}), arm)
    whole, sharded = BYTES[arm]
    assert ledger.distributed_optimizer_degree == dp
    assert ledger.predicted == pytest.approx(whole + sharded / dp, abs=1e-12)
    assert ledger.found == pytest.approx(ledger.predicted, abs=1e-12)
    assert ledger.per_parameter("unexplained") == pytest.approx(0, abs=1e-12)


def test_exactly_18_16_12_and_10_at_d_1(made_up: MakeStudy) -> None:
    study = made_up(*({"arm": arm} for arm in BYTES))
    assert [ledger_of(study, arm).found for arm in BYTES] == [18, 16, 12, 10]


def test_the_prediction_does_not_look_at_what_was_found(made_up: MakeStudy) -> None:
    def inflate(ledger: dict[str, Any]) -> None:
        for entry in ledger["ranks"][0]["entries"]:
            entry["bytes"] *= 3

    ledger = ledger_of(made_up({"arm": "pao", "edit_ledger": inflate}), "pao")
    assert ledger.predicted == 16
    assert ledger.per_parameter("unexplained") > 15


def test_padding_is_named_and_belongs_to_no_parameter(made_up: MakeStudy) -> None:
    ledger = ledger_of(made_up({"trainable": 1000, "padding": 24}), "baseline")
    assert ledger.found == 18
    assert ledger.per_parameter("padding") == pytest.approx(24 * 6 / 1000)
    assert ledger.per_parameter("unexplained") == pytest.approx(0, abs=1e-12)


def test_uneven_shards_sum_to_zero(made_up: MakeStudy) -> None:
    def uneven(ledger: dict[str, Any]) -> None:
        for rank, shift in zip(ledger["ranks"], (100, -100), strict=True):
            rank["optimizer_elements"] += shift
            for entry in rank["entries"]:
                if entry["kind"] in ("master_param", "exp_avg", "exp_avg_sq"):
                    entry["elements"] += shift
                    entry["bytes"] = 4 * entry["elements"]

    ledger = ledger_of(made_up({"dp": 2, "edit_ledger": uneven}), "baseline")
    assert {row.uneven_bytes for row in ledger.rows} == {0, 400, -400}
    assert all(row.unexplained_bytes == 0 for row in ledger.rows)
    assert ledger.found == pytest.approx(12)


def test_other_tensors_are_unexplained(made_up: MakeStudy) -> None:
    def extra(ledger: dict[str, Any]) -> None:
        ledger["ranks"][0]["entries"].append(
            {"kind": "other", "dtype": "float32", "elements": 32_000, "bytes": 128_000}
        )

    assert ledger_of(made_up({"edit_ledger": extra}), "baseline").per_parameter("unexplained") == 1


@pytest.mark.parametrize("arm", BYTES)
def test_the_treatment_is_in_effect(made_up: MakeStudy, arm: str) -> None:
    assert check_treatment(made_up({"arm": arm}).runs[0]).outcome == "in effect"


def set_flag(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda ledger: ledger["optimizer"]["flags"].update({name: value})


def set_inner(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda ledger: ledger["optimizer"].update(inner_class=name)


def recast(kind: str, dtype: str) -> Callable[[dict[str, Any]], None]:
    def edit(ledger: dict[str, Any]) -> None:
        next(entry for entry in ledger["ranks"][0]["entries"] if entry["kind"] == kind)["dtype"] = dtype

    return edit


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (set_flag("use_precision_aware_optimizer", False), "use_precision_aware_optimizer is False"),
        (set_flag("exp_avg_dtype", "bfloat16"), "exp_avg_dtype is bfloat16"),
        (set_flag("store_param_remainders", False), "store_param_remainders is False"),
        (set_flag("use_decoupled_grad", False), "use_decoupled_grad is False"),
        (set_inner("torch.optim.adamw.AdamW"), "PAO needs FusedAdam"),
        (recast("master_param", "float32"), "master weights are float32"),
        (recast("exp_avg_sq", "uint8"), "second moments are uint8"),
        (drop("master_param"), "master weights are missing"),
    ],
)
def test_a_treatment_that_is_not_in_effect(made_up: MakeStudy, edit: Callable[..., None], told: str) -> None:
    check = check_treatment(made_up({"arm": "pao", "edit_ledger": edit}).runs[0])
    assert check.outcome == "not in effect"
    assert told in check.sentence


def test_a_baseline_with_pao_is_not_a_baseline(made_up: MakeStudy) -> None:
    edit = set_flag("use_precision_aware_optimizer", True)
    assert check_treatment(made_up({"arm": "baseline", "edit_ledger": edit}).runs[0]).outcome == "not in effect"


def savings(study: Study, arm: str = "pao") -> Any:
    return conclude(study).verdicts[arm].savings


def test_a_saving_as_predicted(made_up: MakeStudy) -> None:
    found = savings(made_up({"arm": "baseline"}, {"arm": "pao"}))
    assert (found.outcome, found.explained, found.found) == ("as predicted", 2, 2)
    assert found.gib_per_rank == [(0, 2 * 128_000 / 2**30, 2 * 128_000 / 2**30)]


def test_four_bytes_where_two_are_possible_is_an_alarm(made_up: MakeStudy) -> None:
    found = savings(made_up({"arm": "baseline"}, {"arm": "dead_optimizer"}), "dead_optimizer")
    assert (found.outcome, found.explained, found.found) == ("alarm", 2, 4)
    assert "master weights" in found.sentence


def test_one_run_with_missing_masters_is_enough_for_the_alarm(made_up: MakeStudy) -> None:
    runs = [{"arm": arm, "seed": seed} for seed in (1, 2, 3) for arm in ("baseline", "pao")]
    runs[3] |= {"edit_ledger": drop("master_param")}
    assert savings(made_up(*runs)).outcome == "alarm"


def test_a_saving_without_the_matching_dtypes_is_an_alarm(made_up: MakeStudy) -> None:
    """Two bytes saved, as PAO does, but because the first moments are bf16 where fp32 was asked for."""

    def swapped(ledger: dict[str, Any]) -> None:
        for kind, dtype, size in (("master_param", "float32", 4), ("exp_avg", "bfloat16", 2)):
            entry = next(entry for entry in ledger["ranks"][0]["entries"] if entry["kind"] == kind)
            entry.update(dtype=dtype, bytes=size * entry["elements"])

    found = savings(made_up({"arm": "baseline"}, {"arm": "pao", "edit_ledger": swapped}))
    assert (found.outcome, found.found) == ("alarm", 2)
    assert "not what the arm demands" in found.sentence


def test_less_than_predicted(made_up: MakeStudy) -> None:
    def fat(ledger: dict[str, Any]) -> None:
        ledger["ranks"][0]["entries"].append(
            {"kind": "other", "dtype": "float32", "elements": 32_000, "bytes": 128_000}
        )

    assert savings(made_up({"arm": "baseline"}, {"arm": "pao", "edit_ledger": fat})).outcome == "less than predicted"


def test_the_allocator_must_not_save_more_than_the_tensors(made_up: MakeStudy) -> None:
    def less(row: dict[str, Any]) -> None:
        row["allocated_after_update_gib"] -= 2.0

    gpu = {"platform": "cuda", "trainable": 950_000_000}
    honest = made_up({"arm": "baseline", **gpu}, {"arm": "pao", **gpu})
    assert savings(honest).outcome == "as predicted"
    assert (
        savings(made_up({"arm": "pao", "seed": 2, **gpu, "edit_update": less}, {"seed": 2, **gpu})).outcome == "alarm"
    )


def test_no_ledger_no_verdict(made_up: MakeStudy, write_study: Any) -> None:
    study = made_up({"arm": "baseline"}, {"arm": "pao"})
    study.runs_of("pao")[0].ledger = None
    assert savings(study).outcome == "not measured"
