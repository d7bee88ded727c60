"""The headline: what a reader who stops there takes away must be true."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.analysis.conclusions import Conclusions, conclude
from pipeline.analysis.dashboard_page import render_dashboard
from pipeline.analysis.headline import one_line
from pipeline.analysis.pairs import load_study
from pipeline.analysis.report import render_pr_comment, render_report
from pipeline.analysis.summary import summarise
from pipeline.study import json_lines

WriteStudy = Callable[..., Path]
RUN = "grpo-made_up-1n1w-tp1pp1-{}"


def concluded(folder: Path) -> Conclusions:
    return conclude(load_study(folder))


def end(folder: Path, run: str, state: str, **status: Any) -> None:
    file = folder / "runs" / RUN.format(run) / "status.json"
    file.write_bytes(json_lines.dumps({**json_lines.loads(file.read_bytes()), "state": state, **status}))


def test_pairs_that_are_not_valid_give_no_numbers(write_study: WriteStudy) -> None:
    folder = write_study({"arm": "baseline"}, {"arm": "pao"})
    end(folder, "pao-s1", "stopped", reason="Ctrl-C")
    conclusions = concluded(folder)
    wanted = "pao: no valid pair: pao stopped (Ctrl-C); updates: healthy"
    assert one_line(conclusions) == wanted
    assert render_report(conclusions, []).split("\n")[1] == f"**{wanted}**"
    assert render_pr_comment(conclusions, []).split("\n")[2] == f"**{wanted}**"
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", render_dashboard(conclusions).split("<nav>")[0]))
    assert "pao no valid pair: pao stopped (Ctrl-C) updates: healthy 0 of 1 pairs valid" in page.replace(
        "Stands on: ", ""
    )
    verdict = summarise(conclusions)["verdicts"]["pao"]
    assert verdict["sentences"]["trade"] == wanted
    assert verdict["savings"] == "not measured"
    assert verdict["saved_bytes_per_param"]["found"] is None
    assert "| phase (resident memory of the worker process) | baseline | pao − baseline (not valid) |" in render_report(
        conclusions, []
    )


def test_the_numbers_are_those_of_the_valid_pairs_and_the_others_are_named(write_study: WriteStudy) -> None:
    def fat(ledger: dict[str, Any]) -> None:
        entry = {"kind": "other", "dtype": "float32", "elements": 32_000, "bytes": 128_000}
        ledger["ranks"][0]["entries"].append(entry)

    def slow(row: dict[str, Any]) -> None:
        row["timing_s/step"] *= 10

    runs: list[dict[str, Any]] = [{"arm": arm, "seed": seed} for seed in (1, 2, 3) for arm in ("baseline", "pao")]
    runs[3] |= {"edit_ledger": fat, "edit_step": slow}
    folder = write_study(*runs)
    end(folder, "pao-s2", "failed", failure={"error": "OutOfMemoryError: no room. And so on.", "where": "rank 0"})
    end(folder, "baseline-s3", "stopped", reason="Ctrl-C")
    (folder / "runs" / RUN.format("pao-s3") / "updates.jsonl").unlink()
    end(folder, "pao-s3", "stopped", reason="Ctrl-C")
    told = one_line(concluded(folder))
    assert "2.00 bytes per parameter; updates: healthy; time: optimizer step 1.20 x, whole step 1.04 x;" in told
    lost = "seed 2: pao failed (rank 0: OutOfMemoryError: no room), seed 3: baseline stopped (Ctrl-C)"
    assert told.endswith(f"; 2 of 3 pairs left out: {lost}")


def test_an_arm_without_effect_has_its_alarm_and_no_times(write_study: WriteStudy) -> None:
    told = one_line(concluded(write_study({"arm": "baseline"}, {"arm": "dead_optimizer"})))
    alarm = "ALARM: 4.00 bytes per parameter gone where this arm can save 2.00"
    lost = "no valid pair: dead_optimizer's treatment not in effect"
    assert told == f"dead_optimizer: {alarm}; {lost}; DEAD OPTIMIZER"


def test_a_treatment_without_a_baseline_is_no_pair(write_study: WriteStudy) -> None:
    told = one_line(concluded(write_study({"arm": "pao"})))
    assert told == "pao: no valid pair: no baseline run to compare with; updates: healthy"


GPU = {"platform": "cuda", "trainable": 3_800_000_000}  # 8 bytes per parameter are 28.31 GiB


def with_peaks(optimizer_step: float, forward_backward: float = 3.0) -> dict[str, Any]:
    """An arm whose peaks lie so many GiB above what it holds (in the made-up baseline 0.3 and 0.8)."""

    def edit(row: dict[str, Any]) -> None:
        held = row["allocated_after_update_gib"]
        row["allocated_peak_optimizer_step_gib"] = held + optimizer_step
        row["allocated_peak_forward_backward_gib"] = held + forward_backward

    return {**GPU, "edit_update": edit}


def test_a_peak_above_the_baselines_is_told_beside_the_saving(write_study: WriteStudy) -> None:
    folder = write_study({"arm": "baseline", **GPU}, {"arm": "pao_bf16_all", **with_peaks(28.31 + 0.3 + 1.0)})
    told = one_line(concluded(folder))
    peak = "its peak in the optimizer step is 1.00 GiB above the baseline's, so its highest peak does not fall"
    assert f"saves 28.31 GiB per GPU (20 % of 140 GiB) in steady state, 8.00 bytes per parameter, but {peak};" in told


def test_what_can_be_used_is_how_far_the_highest_peak_falls(write_study: WriteStudy) -> None:
    folder = write_study({"arm": "baseline", **with_peaks(0.3, 3.0)}, {"arm": "pao_bf16_all", **with_peaks(28.0)})
    conclusions = concluded(folder)
    peak = "its peak in the optimizer step is 0.61 GiB below the baseline's, so its highest peak falls by 3.31 GiB only"
    assert peak in one_line(conclusions)
    assert (
        "- pao_bf16_all: of the 28.31 GiB that the trainer holds less in steady state, 3.31 GiB can be used: the "
        "highest of the arm's peaks is 64.39 GiB (peak in optimizer step), of the baseline's 67.70 GiB (peak in "
        "forward/backward)"
    ) in render_report(conclusions, [])


@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(with_peaks(3.0, 3.0), id="within the allocator's rounding"),
        pytest.param(with_peaks(0.3, 20.0), id="long responses"),
    ],
)
def test_a_saving_that_can_be_used_stands_alone(write_study: WriteStudy, arm: dict[str, Any]) -> None:
    told = one_line(concluded(write_study({"arm": "baseline", **GPU}, {"arm": "pao_bf16_all", **arm})))
    assert "saves 28.31 GiB per GPU (20 % of 140 GiB), 8.00 bytes per parameter; updates" in told


def in_settings(*settings: str, **dead: Any) -> list[dict[str, Any]]:
    """Both arms in each setting; `dead` says what else holds for pao in the first of them."""
    runs: list[dict[str, Any]] = [
        {"arm": arm, "swept": {"core": setting}} for setting in settings for arm in ("baseline", "pao")
    ]
    runs[1] |= dead
    return runs


def without_masters(ledger: dict[str, Any]) -> None:
    for rank in ledger["ranks"]:
        rank["entries"] = [entry for entry in rank["entries"] if entry["kind"] != "master_param"]


def still(row: dict[str, Any]) -> None:
    row.update(liveness=0.0, elements_changed=0, tensors_still=row["tensors"])


def test_settings_that_come_out_differently_are_told_by_name(write_study: WriteStudy) -> None:
    folder = write_study(*in_settings("0.13", "0.16", "0.17", edit_ledger=without_masters, edit_update=still))
    conclusions = concluded(folder)
    report = render_report(conclusions, [])
    dead, *alive = report.split("\n")[1].split("<br>")
    alarm = "ALARM: 4.00 bytes per parameter gone where this arm can save 2.00"
    assert dead == f"**pao (core=0.13): {alarm}; no valid pair: pao's treatment not in effect; DEAD OPTIMIZER**"
    for setting, line in zip(("0.16", "0.17"), alive, strict=True):
        assert line.startswith(
            f"**pao (core={setting}): saves 0.00024 GiB per worker (0.00017 % of 140 GiB host memory), "
        )
        assert "updates: healthy; time: optimizer step 1.20 x" in line
        assert line.endswith("equivalence not established (all settings together)**")
    assert "> **pao (core=0.13): the saving is an alarm, not a success" in report
    assert "> **pao: " not in report
    assert "<h2>pao (core=0.16)</h2>" in render_dashboard(conclusions)


def test_tables_tell_apart_the_settings_that_hold_different_bytes(write_study: WriteStudy) -> None:
    folder = write_study(*in_settings("0.13", "0.16", edit_ledger=without_masters, edit_update=still))
    conclusions = concluded(folder)
    assert list(conclusions.ledgers) == [("baseline", ""), ("pao", "core=0.13"), ("pao", "core=0.16")]
    report = render_report(conclusions, [])
    for row in (
        "| baseline | in effect | 18.00 | 18.00 |",
        "| pao (core=0.13) | not in effect | 16.00 | 14.00 |",
        "| pao (core=0.16) | in effect | 16.00 | 16.00 |",
        "| baseline | pao (core=0.16) − baseline |",
        "| pao (core=0.16) | whole step |",
    ):
        assert row in report
    assert "ledgers of runs of the same setting differ" not in report


def test_runs_of_one_setting_that_hold_different_bytes_are_told_of(write_study: WriteStudy) -> None:
    runs = [{"arm": arm, "seed": seed} for seed in (1, 2) for arm in ("baseline", "pao")]
    folder = write_study(*runs[:-1], {**runs[-1], "edit_ledger": without_masters})
    report = render_report(concluded(folder), [])
    assert "pao: the ledgers of runs of the same setting differ; the first one is shown" in report


def test_settings_that_come_out_alike_are_told_together(write_study: WriteStudy) -> None:
    folder = write_study(*in_settings("0.16", "0.17"))
    assert one_line(concluded(folder)).startswith("pao: saves 0.00024 GiB")
    folder = write_study(*in_settings("0.13", "0.14", "0.15"), name="three")
    end(folder, "pao-s1-core0.13", "stopped")
    end(folder, "pao-s1-core0.14", "stopped")
    end(folder, "baseline-s1-core0.15", "stopped")
    lost = "seed 1 with core=0.13, seed 1 with core=0.14: pao stopped, seed 1 with core=0.15: baseline stopped"
    assert one_line(concluded(folder)) == f"pao: no valid pair: {lost}; updates: healthy"
