"""JSON Lines as columns: what is read is exact, what cannot be read is told, nothing crashes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.analysis.columns import Table, read_table
from pipeline.study import json_lines

ON_DISK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def read(path: Path, content: bytes | list[dict[str, Any]], **options: Any) -> Table:
    file = path / "rows.jsonl"
    lines = content if isinstance(content, bytes) else b"".join(json_lines.dumps(row) + b"\n" for row in content)
    file.write_bytes(lines)
    return read_table(file, options.pop("keys", ("step",)), **options)


def test_numbers_come_back_exactly_and_absent_is_not_zero(tmp_path: Path) -> None:
    table = read(tmp_path, [{"step": 2, "a": 0.1, "b": 3}, {"step": 1, "a": 1e-300}])
    assert table.step.tolist() == [1, 2]
    assert table.column("a").tolist() == [1e-300, 0.1]
    assert math.isnan(table.column("b")[0])
    assert table.column("b")[1] == 3
    assert np.isnan(table.column("never written")).all()
    assert not table.notes
    assert not table.non_finite


def test_nan_is_a_measured_value_and_null_is_not(tmp_path: Path) -> None:
    table = read(tmp_path, [{"step": 1, "a": math.nan, "b": 1.0}, {"step": 2, "a": -math.inf, "b": None}])
    assert [(item.metric, item.first_step, item.count) for item in table.non_finite] == [("a", 1, 2)]
    assert table.column("a")[1] == -math.inf
    assert any("null for b" in note and "2" in note for note in table.notes)


@pytest.mark.parametrize(
    ("content", "steps", "told"),
    [
        (b'{"step":1}\n{"step":2,"a":', [1], "1 line cut off (the last line has no end): 2"),
        (b'{"step":1}\n{"step"\n{"step":3}\n', [1, 3], "1 line not JSON: 2"),
        (b'{"step":1}\n\n{"step":2}\n', [1, 2], "1 line empty: 2"),
        (b'{"step":1}\n[1]\n7\n', [1], "2 lines not a JSON object: 2, 3"),
        (b'{"step":1}\n{"a":1}\n', [1], "1 line without step: 2"),
        (b'{"step":1}\n{"step":1.5}\n', [1], "1 line without whole numbers in step: 2"),
        (b'{"step":1}\n{"step":2,"a":"12"}\n', [1, 2], "1 line with something that is no number for a"),
        (b'{"step":1}\n{"step":1}\n', [1], "more than one row (the first is used) for step 1"),
        (b"", [], "holds no row that can be read"),
    ],
)
def test_damage_is_told_with_its_line(tmp_path: Path, content: bytes, steps: list[int], told: str) -> None:
    table = read(tmp_path, content)
    assert any(told in note for note in table.notes), table.notes
    assert table.step.tolist() == steps


def test_a_missing_file_is_an_empty_table(tmp_path: Path) -> None:
    table = read_table(tmp_path / "steps.jsonl", ("step",))
    assert len(table) == 0
    assert table.notes == ["steps.jsonl: missing"]


def test_the_first_of_two_rows_is_kept_and_the_step_named(tmp_path: Path) -> None:
    table = read(tmp_path, [{"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 2, "a": 9}])
    assert table.column("a").tolist() == [1, 2]
    assert table.duplicates == [2]


def test_only_wanted_fields_are_kept_and_the_unknown_are_named(tmp_path: Path) -> None:
    rows = [{"step": 1, "rank": 0, "a": 1.0, "how": "all", "new": {"x": 1}}]
    table = read(tmp_path, rows, keys=("step", "rank"), wanted={"a"}, texts=("how",))
    assert set(table.columns) == {"step", "rank", "a"}
    assert table.labels == {"how": ["all"]}
    assert any("does not know: new" in note for note in table.notes)


def test_rows_of_different_shapes_with_the_same_length_are_told_apart(tmp_path: Path) -> None:
    table = read(tmp_path, [{"step": 1, "a": 1.0}, {"step": 2, "b": 2.0}, {"b": 3.0, "step": 3}])
    assert np.nan_to_num(table.column("a"), nan=-1).tolist() == [1, -1, -1]
    assert np.nan_to_num(table.column("b"), nan=-1).tolist() == [-1, 2, 3]


values = st.one_of(st.floats(), st.integers(-(2**63), 2**64 - 1), st.none(), st.text(max_size=4), st.booleans())
rows = st.dictionaries(st.sampled_from(["a", "b", "c"]), values)


@ON_DISK
@given(content=st.lists(rows, max_size=12))
def test_every_number_is_read_as_written(tmp_path: Path, content: list[dict[str, Any]]) -> None:
    table = read(tmp_path, [{"step": i, **row} for i, row in enumerate(content)])
    assert len(table) == len(content)
    for name in ("a", "b", "c"):
        for row, found in zip(content, table.column(name), strict=True):
            value = row.get(name)
            if isinstance(value, str):  # "NaN" as a text is how json_lines writes NaN
                value = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
            assert found == value or (math.isnan(found) and (value is None or math.isnan(value)))


@ON_DISK
@given(content=st.lists(st.one_of(st.binary(max_size=30), st.just(b'{"step":1,"a":2}')), max_size=8))
def test_no_bytes_crash_the_reader(tmp_path: Path, content: list[bytes]) -> None:
    table = read(tmp_path, b"\n".join(content))
    assert len(table) <= 1 or table.step.tolist() == sorted(set(table.step.tolist()))


@ON_DISK
@given(cut=st.integers(0, 200))
def test_a_cut_file_gives_a_prefix_of_the_rows(tmp_path: Path, cut: int) -> None:
    whole = b"".join(json_lines.dumps({"step": i, "a": i / 7}) + b"\n" for i in range(8))
    table = read(tmp_path, whole[:cut])
    assert table.step.tolist() == list(range(len(table)))
    assert table.column("a").tolist() == [i / 7 for i in range(len(table))]
    assert len(table) >= whole[:cut].count(b"\n")
