"""The headline: what a reader who stops there takes away must be true."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
