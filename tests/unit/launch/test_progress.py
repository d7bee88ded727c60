"""What the user sees of a run: read from files that grow, shown as lines or as a table."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.launch.display import LiveDisplay, PlainDisplay, RunView, clock, display_for, runs_table, sweep_left_s
from pipeline.launch.growing_file import GrowingFile
from pipeline.launch.progress import Progress
from pipeline.launch.stages import StageReader
from pipeline.study import json_lines
from pipeline.study.run_folder import RunFolder


def write_step(folder: RunFolder, step: int, seconds: float = 5.0, **more: Any) -> None:
    row = {
        "step": step,
        "critic/rewards/mean": 0.1 * step,
        "actor/ppo_kl": 0.005,
        "actor/pg_clipfrac": 0.12,
        "perf/time_per_step": seconds,
        **more,
    }
    json_lines.append_row(folder.steps_file, row)


def view(folder: Path, steps: int | None = 8, label: str = "pao-s1") -> RunView:
    folder.mkdir(exist_ok=True, parents=True)
    return RunView(label, Progress(RunFolder(folder), steps))


def test_a_growing_file_gives_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = GrowingFile(path)
    assert file.new_lines() == []
    path.write_bytes(b"one\ntw")
    assert file.new_lines() == [b"one"]
    assert file.new_lines() == []
    with path.open("ab") as more:
        more.write(b"o\nthree\n")
    assert file.new_lines() == [b"two", b"three"]


def test_progress_follows_the_rows(tmp_path: Path) -> None:
    progress = view(tmp_path).progress
    assert not progress.refresh()
    assert (progress.step, progress.step_s, progress.left_s(), progress.reward) == (0, None, None, None)
    write_step(progress.folder, 1, 9.0)
    write_step(progress.folder, 2, 5.0)
    assert progress.refresh()
    assert (progress.step, progress.step_s) == (2, 7.0)
    assert progress.left_s() == 6 * 7.0
    assert progress.reward == pytest.approx(0.2)
    assert not progress.refresh()


def test_the_time_per_step_is_that_of_the_last_five(tmp_path: Path) -> None:
    progress = view(tmp_path).progress
    for step in range(1, 8):
        write_step(progress.folder, step, 100.0 if step <= 2 else 5.0)
    progress.refresh()
    assert progress.step_s == 5.0


def test_without_a_number_of_steps_nothing_is_known_to_be_left(tmp_path: Path) -> None:
    progress = view(tmp_path, steps=None).progress
    write_step(progress.folder, 1)
    progress.refresh()
    assert progress.left_s() is None


def test_what_was_not_measured_stays_unknown_and_nan_is_shown(tmp_path: Path) -> None:
    shown = view(tmp_path)
    json_lines.append_row(shown.progress.folder.steps_file, {"step": 1, "actor/ppo_kl": math.nan})
    shown.progress.refresh()
    line = lines_of([shown], lambda display: display.stepped(shown))[0]
    assert "step 1 of 8, - s per step, reward -, ppo_kl nan, clip -" in line


def test_memory_is_the_highest_peak_of_any_rank_and_phase(tmp_path: Path) -> None:
    progress = view(tmp_path).progress
    rows = [
        {
            "rank": 0,
            "rss_peak_forward_backward_gib": 0.9,
            "rss_peak_optimizer_step_gib": 0.7,
            "rss_after_update_gib": 2.0,
        },
        {"rank": 1, "rss_peak_forward_backward_gib": 0.5},
    ]
    for row in rows:
        json_lines.append_row(progress.folder.updates_file, row)
    progress.refresh()
    assert (progress.peak_gib, progress.memory_source) == (0.9, "rss")


def test_a_damaged_row_does_not_stop_the_display(tmp_path: Path) -> None:
    progress = view(tmp_path).progress
    progress.folder.steps_file.write_text('{"step": 1\n')
    write_step(progress.folder, 2)
    assert progress.refresh()
    assert progress.step == 2


LOG = """\
2026-12-01 04:35:52,985\tINFO job_manager.py:581 -- Runtime env is setting up.
Running entrypoint for job grpo-a1: python -m pipeline.train
(TaskRunnerV1 pid=1) Using dataset class: RLHFDataset
(TaskRunnerV1 pid=1) INFO:2026-12-01 04:37:41,473:worker group kwargs: {'device_name': 'cpu'}
(TaskRunnerV1 pid=1) INFO:2026-12-01 04:38:27,492:all initialize finished, ready to fit
(AgentLoopWorkerTQ pid=2) Using dataset class: RLHFDataset
"""


def test_stages_follow_the_log_and_never_go_back(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    stages = StageReader(log)
    seen = [stages.read()]
    for line in LOG.splitlines(keepends=True):
        with log.open("a") as file:
            file.write(line)
        seen.append(stages.read())
    assert seen == [
        "",
        "setting up the job",
        "importing the training code",
        "loading the data",
        "starting the workers",
        "first step",
        "",
    ]


def lines_of(views: list[RunView], act: Any) -> list[str]:
    text = io.StringIO()
    with PlainDisplay(views, Console(file=text, width=60)) as display:
        act(display)
    return text.getvalue().splitlines()


def test_plain_lines_are_one_per_event_and_never_wrapped(tmp_path: Path) -> None:
    shown = view(tmp_path, label="pao-s1-" + "x" * 100)
    shown.enter("failed", "ValueError: [red]no markup[/red]")
    lines = lines_of([shown], lambda display: display.changed(shown))
    assert lines == [f"[0:00] {shown.label}: failed: ValueError: [red]no markup[/red]"]


def test_a_step_s_line_has_all_that_the_table_has(tmp_path: Path) -> None:
    shown = view(tmp_path)
    write_step(shown.progress.folder, 3, 5.21)
    json_lines.append_row(shown.progress.folder.updates_file, {"allocated_peak_optimizer_step_gib": 12.345})
    shown.progress.refresh()
    shown.enter("running")
    (line,) = lines_of([shown], lambda display: display.stepped(shown))
    assert line == (
        "[0:00] pao-s1: step 3 of 8, 5.21 s per step, 0:26 left (sweep 0:26), reward 0.3, ppo_kl 0.005, clip 0.12, "
        "peak 12.35 GiB (allocated)"
    )


def test_a_long_start_is_reported_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = view(tmp_path)
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    text = io.StringIO()
    with PlainDisplay([shown], Console(file=text, width=200)) as display:
        shown.started_at = now[0]
        shown.enter("starting", "loading the data")
        display.tick()
        now[0] += 30
        display.tick()
        display.tick()
    assert text.getvalue().splitlines() == ["[0:30] pao-s1: still starting after 0:30: loading the data"]


def test_time_left_of_the_sweep_counts_the_start_up_of_waiting_runs(tmp_path: Path) -> None:
    first, second = view(tmp_path / "a"), view(tmp_path / "b")
    assert sweep_left_s([first, second]) is None
    for step in (1, 2):
        write_step(first.progress.folder, step, 5.0)
    first.progress.refresh()
    first.enter("running")
    first.start_up_s = 60.0
    assert sweep_left_s([first, second]) == 6 * 5.0 + 60.0 + 8 * 5.0
    first.enter("succeeded")
    assert sweep_left_s([first, second]) == 60.0 + 8 * 5.0
    second.enter("kept")
    assert sweep_left_s([first, second]) == 0


def test_the_table_fits_a_terminal_of_100_columns(tmp_path: Path) -> None:
    shown = view(tmp_path, label="pao_bf16_moments-s1")
    write_step(shown.progress.folder, 3, 5.21)
    shown.progress.refresh()
    shown.enter("running")
    text = io.StringIO()
    Console(file=text, width=100).print(runs_table([shown, view(tmp_path / "other", label="baseline-s1")], "study"))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    row = next(line for line in lines if "pao_bf16_moments-s1" in line)
    assert all(cell in row for cell in ("running", "3/8", "5.21", "0:26", "0.3", "0.005", "0.12"))
    assert any("baseline-s1" in line and "waiting" in line for line in lines)


def test_the_display_suits_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(display_for([view(tmp_path)], "study"), PlainDisplay)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert isinstance(display_for([view(tmp_path)], "study"), LiveDisplay)


def test_the_live_display_shows_failures_above_the_table(tmp_path: Path) -> None:
    text = io.StringIO()
    shown = view(tmp_path)
    other = view(tmp_path / "other", label="baseline-s1")
    other.started_at = 0.0
    other.enter("starting", "loading the data")
    with LiveDisplay([shown, other], Console(file=text, force_terminal=True, width=100), "study x") as display:
        shown.enter("failed", "ValueError: no")
        display.changed(shown)
    assert "pao-s1 failed: ValueError: no" in text.getvalue()
    assert "study x" in text.getvalue()
    assert "baseline-s1: loading the data" in text.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65.9, "1:05"), (3725, "1:02:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
