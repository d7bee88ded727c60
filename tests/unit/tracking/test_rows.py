"""From a run folder's files to W&B's rows."""

import math
from pathlib import Path
from typing import Any

import pytest
from study_folders import append_step, append_update, make_run

from pipeline.study import json_lines
from pipeline.tracking.copy_of_run import RowIndex, gaps, indices, is_beginning
from pipeline.tracking.rows import STEP, TIMESTAMP, UPDATE, GrowingRows, RunRows, all_rows, update_row
from pipeline.tracking.wandb_run import axis_of, summaries_of, summary_of


def _update_row(update: int, rank: int, **more: Any) -> dict[str, Any]:
    return {
        "step": 1, "update": update, "mini_batch": 0, "rank": rank, "liveness": 0.5 - rank / 100, "grad_norm": 1.0,
        "lr": 1e-3, "time_optimizer_step_s": 0.1 + rank, "rss_after_update_gib": 1.0 + rank, **more,
    }  # fmt: skip


def test_an_optimizer_step_is_one_row_with_every_rank() -> None:
    row = update_row([_update_row(1, 1, ppo_kl=0.4), _update_row(1, 0, ppo_kl=0.2)])
    assert row["update/liveness"] == 0.49
    assert row["update/ppo_kl"] == pytest.approx(0.3)
    assert row["update/time_optimizer_step_s"] == 1.1
    assert (row["memory/rss_after_update_gib/rank0"], row["memory/rss_after_update_gib/rank1"]) == (1.0, 2.0)
    assert "update/ppo_kl" not in update_row([_update_row(2, 0)])


def test_beyond_sixteen_ranks_there_are_minimum_mean_and_maximum() -> None:
    row = update_row([_update_row(1, rank) for rank in range(17)])
    memory = {name.rpartition("/")[2]: value for name, value in row.items() if name.startswith("memory/")}
    assert memory == {"min": 1.0, "mean": 9.0, "max": 17.0}


def test_a_half_written_line_is_left_for_later_and_a_damaged_one_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = GrowingRows(file)
    assert rows.new() == []
    file.write_bytes(b'{"update":1}\nnot json\n{"upd')
    assert rows.new() == [{"update": 1}]
    assert rows.damaged == 1
    with file.open("ab") as more:
        more.write(b'ate":2}\n')
    assert rows.new() == [{"update": 2}]


def test_a_steps_optimizer_steps_come_before_it_and_with_its_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "study")
    rows = RunRows(folder)
    assert rows.new() == []
    append_update(folder, step=1, mini_batch=0)
    assert rows.new() == [], "the step has not ended"
    append_update(folder, step=1, mini_batch=1)
    json_lines.append_row(folder.steps_file, {"step": 1, "wall_time": 5.0, "reward": math.nan})
    first, second, step = rows.new()
    assert [row.get(UPDATE) for row in (first, second, step)] == [1, 2, None]
    assert {row[TIMESTAMP] for row in (first, second, step)} == {5.0}
    assert step[STEP] == 1
    assert math.isnan(step["reward"])


def test_the_optimizer_steps_of_an_unfinished_step_come_last(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "study")
    append_step(folder, 1)
    append_update(folder, step=2, mini_batch=0)
    rows = RunRows(folder)
    assert len(rows.new()) == 3
    (last,) = rows.rest()
    assert (last[STEP], last[UPDATE]) == (2, 3)
    assert rows.rest() == []


def test_rows_read_bit_by_bit_are_those_read_at_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "study")
    rows, live = RunRows(folder), []
    for step in (1, 2, 3):
        append_step(folder, step, ranks=2)
        live += rows.new()
    assert json_lines.dumps(live) == json_lines.dumps(all_rows(folder))  # NaN is no equal of itself
    assert len(live) == 9


@pytest.mark.parametrize(
    ("name", "axis", "summary"),
    [
        ("update/liveness", UPDATE, "min"),
        ("memory/rss_after_update_gib/rank0", UPDATE, "max"),
        ("perf/max_memory_allocated_gb", STEP, "max"),
        ("critic/rewards/mean", STEP, None),
    ],
)
def test_axes_and_summaries(name: str, axis: str, summary: str | None) -> None:
    assert (axis_of(name), summary_of(name)) == (axis, summary)


FILES = [RowIndex(step, update, 10.0 * step) for step in (1, 2, 3) for update in (step, None)]


def test_gaps_name_what_is_missing() -> None:
    assert gaps(FILES, FILES, 0, "finished") == []
    assert gaps(FILES, None, 0, "") == ["no such run in W&B"]
    assert gaps(FILES, FILES[:4], 0, "running") == [
        "4 of 6 rows",
        "last training step 2, not 3",
        "last optimizer step 2, not 3",
        "state running, not finished",
    ]
    assert gaps(FILES, FILES, 255, "crashed") == ["state crashed, not killed"]
    other = [RowIndex(row.step, row.update, 99.0) for row in FILES]
    assert gaps(FILES, other, 0, "finished") == ["rows of another attempt or study"]


def test_a_beginning_has_the_first_rows_and_no_others() -> None:
    assert is_beginning([], FILES)
    assert is_beginning(FILES[:3], FILES)
    assert not is_beginning(FILES[1:3], FILES)
    assert not is_beginning([*FILES, FILES[-1]], FILES)


def test_indices_of_files(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "study")
    append_step(folder, 1)
    append_update(folder, step=2, mini_batch=0)
    assert [(row.step, row.update) for row in indices(all_rows(folder))] == [(1, 1), (1, 2), (1, None), (2, 3)]


def test_summaries_of_all_rows() -> None:
    rows = [{"update/liveness": 0.5, "memory/x": 1.0, "other": 3.0}, {"update/liveness": 0.4, "memory/x": 2.0}]
    assert summaries_of(rows) == {"update/liveness": {"min": 0.4}, "memory/x": {"max": 2.0}}
