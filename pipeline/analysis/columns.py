"""JSON Lines as columns of numbers: exact, quick, and open about what could not be read.

A study may hold millions of rows, so rows of one shape are converted together; only rows that do not fit are looked at
value by value. Nothing is repaired: what is left out is told in `Table.notes`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.analysis.words import counted

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

_NON_FINITE = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
_CHUNK_BYTES = 1 << 20  # small enough that the rows stay in the processor's cache


@dataclass(frozen=True)
class NonFinite:
    """Values of one metric that were measured and are NaN or infinite."""

    metric: str
    first_step: int
    count: int


@dataclass
class Table:
    """Rows as columns. NaN stands for "not measured", unless `non_finite` lists the metric."""

    columns: dict[str, FloatArray]
    labels: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The different texts found in the text fields asked for."""
    non_finite: list[NonFinite] = field(default_factory=list[NonFinite])
    duplicates: list[int] = field(default_factory=list[int])
    """Steps with more than one row for the same key; the first row is kept."""
    notes: list[str] = field(default_factory=list[str])

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def step(self) -> IntArray:
        return self.columns["step"].astype(np.int64)

    def column(self, name: str) -> FloatArray:
        """The values in row order, all NaN when no row has this field."""
        found = self.columns.get(name)
        return np.full(len(self), np.nan) if found is None else found

    def where(self, keep: BoolArray) -> "Table":
        """The rows marked in `keep`."""
        return Table({name: values[keep] for name, values in self.columns.items()}, self.labels, self.non_finite)


def read_table(
    path: Path, keys: tuple[str, ...], wanted: Collection[str] | None = None, texts: Collection[str] = ()
) -> Table:
    """Read rows that `keys` (whole numbers, "step" first) identify, sorted by them.

    wanted: the fields to keep besides the keys; None keeps every number. texts: text fields whose values are listed.
    A missing or empty file gives an empty table and a note.
    """
    reader = _Reader(keys, wanted, texts)
    if path.exists():
        with path.open("rb") as file:
            while lines := file.readlines(_CHUNK_BYTES):
                reader.add(lines)
    return reader.table(path)


class _Reader:
    def __init__(self, keys: tuple[str, ...], wanted: Collection[str] | None, texts: Collection[str]) -> None:
        self._keys, self._wanted, self._texts = keys, wanted, texts
        self._parts: list[tuple[IntArray, dict[str, FloatArray]]] = []  # row numbers and their values
        self._labels: dict[str, set[str]] = {name: set() for name in texts}
        self._lines = 0
        self._trouble: dict[str, list[int]] = {}  # what -> line numbers
        self._unknown: set[str] = set()
        self._left_out: dict[str, set[int]] = {}  # metric -> lines whose value is no number
        self._non_finite_lines: dict[str, list[int]] = {}  # metric -> lines with a measured NaN or infinity

    def add(self, lines: list[bytes]) -> None:
        first = self._lines
        self._lines += len(lines)
        try:
            parsed: list[Any] = [orjson.loads(line) for line in lines]
            numbers = list(range(first, first + len(lines)))
        except orjson.JSONDecodeError:
            numbers, parsed = self._readable(first, lines)
        if set(map(type, parsed)) - {dict}:
            numbers, parsed = self._objects(numbers, parsed)
        by_length: dict[int, tuple[list[int], list[dict[str, Any]]]] = {}
        for number, row in zip(numbers, parsed, strict=True):
            if (group := by_length.get(len(row))) is None:
                group = by_length[len(row)] = ([], [])
            group[0].append(number)
            group[1].append(row)
        for alike_numbers, alike in by_length.values():
            self._add_alike(alike_numbers, alike)

    def _add_alike(self, numbers: list[int], rows: list[dict[str, Any]]) -> None:
        """Add rows with the same number of fields: one shape, unless a row lacks a field of the first one."""
        first = rows[0]
        if all(map(first.keys().__eq__, map(dict[str, Any].keys, rows))):
            self._add_shape(tuple(first), numbers, rows)
            return
        shapes: dict[tuple[str, ...], tuple[list[int], list[dict[str, Any]]]] = {}
        for number, row in zip(numbers, rows, strict=True):
            group = shapes.setdefault(tuple(row), ([], []))
            group[0].append(number)
            group[1].append(row)
        for shape, (alike_numbers, alike) in shapes.items():
            self._add_shape(shape, alike_numbers, alike)

    def _readable(self, first: int, lines: list[bytes]) -> tuple[list[int], list[Any]]:
        numbers: list[int] = []
        parsed: list[Any] = []
        for number, line in enumerate(lines, start=first):
            row = _parsed(line)
            if isinstance(row, orjson.JSONDecodeError):
                cut_off = bool(line.strip()) and not line.endswith(b"\n")
                what = "cut off (the last line has no end)" if cut_off else "not JSON" if line.strip() else "empty"
                self._trouble.setdefault(what, []).append(number)
            else:
                parsed.append(row)
                numbers.append(number)
        return numbers, parsed

    def _objects(self, numbers: list[int], parsed: list[Any]) -> tuple[list[int], list[Any]]:
        is_object = [isinstance(row, dict) for row in parsed]
        odd = [number for number, kept in zip(numbers, is_object, strict=True) if not kept]
        self._trouble.setdefault("not a JSON object", []).extend(odd)
        return list(compress(numbers, is_object)), list(compress(parsed, is_object))

    def _add_shape(self, shape: tuple[str, ...], numbers: list[int], rows: list[dict[str, Any]]) -> None:
        for name in self._texts:
            if name in shape:
                self._labels[name].update(map(str, map(itemgetter(name), rows)))
        if self._wanted is None:
            names = [name for name in shape if name not in self._texts]
        else:
            names = [name for name in shape if name in self._wanted or name in self._keys]
            self._unknown.update(set(shape) - set(names) - set(self._texts))
        if not set(self._keys) <= set(names):
            missing = ", ".join(sorted(set(self._keys) - set(names)))
            self._trouble.setdefault(f"without {missing}", []).extend(numbers)
            return
        get: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(*names, names[0])  # always a tuple
        flat = list(chain.from_iterable(map(get, rows)))
        if {float, int}.issuperset(map(type, flat)):
            values, width = np.array(flat, dtype=np.float64), len(names) + 1
            columns = {name: values[i::width] for i, name in enumerate(names)}
        else:
            columns = {name: self._numbers(name, numbers, [row[name] for row in rows]) for name in names}
        row_numbers = np.array(numbers, dtype=np.int64)
        self._parts.append((row_numbers, columns))
        for name, column in columns.items():
            finite = np.isfinite(column)
            if not finite.all():
                not_measured = self._left_out.get(name, set())
                odd = [number for number in row_numbers[~finite].tolist() if number not in not_measured]
                self._non_finite_lines.setdefault(name, []).extend(odd)

    def _numbers(self, name: str, numbers: list[int], values: list[Any]) -> FloatArray:
        """Values of any JSON type: what is no number becomes "not measured", with a note."""
        found = np.full(len(values), np.nan)
        for i, value in enumerate(values):
            if isinstance(value, int | float):
                found[i] = value
            elif isinstance(value, str) and value in _NON_FINITE:
                found[i] = _NON_FINITE[value]
            else:
                what = "null" if value is None else "something that is no number"
                self._trouble.setdefault(f"with {what} for {name} (taken as not measured)", []).append(numbers[i])
                self._left_out.setdefault(name, set()).add(numbers[i])
        return found

    def table(self, path: Path) -> Table:
        columns, lines = self._joined()
        columns, lines, duplicates = self._sorted_by_key(columns, lines)
        non_finite: list[NonFinite] = []
        for name, at in sorted(self._non_finite_lines.items()):
            steps = columns["step"][np.isin(lines, at)]
            if len(steps):
                non_finite.append(NonFinite(name, int(steps.min()), len(steps)))
        return Table(
            columns,
            {name: sorted(found) for name, found in self._labels.items()},
            non_finite,
            duplicates,
            [f"{path.name}: {note}" for note in self._notes(path, duplicates, len(lines))],
        )

    def _joined(self) -> tuple[dict[str, FloatArray], IntArray]:
        lines = np.concatenate([numbers for numbers, _ in self._parts]) if self._parts else np.empty(0, dtype=np.int64)
        names = list(dict.fromkeys([*self._keys, *(name for _, values in self._parts for name in values)]))
        columns: dict[str, FloatArray] = {name: np.full(len(lines), np.nan) for name in names}
        start = 0
        for numbers, values in self._parts:
            for name, part in values.items():
                columns[name][start : start + len(numbers)] = part
            start += len(numbers)
        self._parts = []
        return columns, lines

    def _sorted_by_key(
        self, columns: dict[str, FloatArray], lines: IntArray
    ) -> tuple[dict[str, FloatArray], IntArray, list[int]]:
        whole = np.ones(len(lines), dtype=np.bool_)
        for key in self._keys:
            whole &= np.isfinite(columns[key]) & (columns[key] == np.floor(columns[key])) & (columns[key] >= 0)
        if not whole.all():
            what = f"without whole numbers in {', '.join(self._keys)}"
            self._trouble.setdefault(what, []).extend(lines[~whole].tolist())
        order = np.lexsort((lines, *(columns[key] for key in reversed(self._keys))))
        order = order[whole[order]]
        same = np.ones(max(len(order) - 1, 0), dtype=np.bool_)
        for key in self._keys:
            same &= np.diff(columns[key][order]) == 0
        repeated = np.concatenate([np.zeros(min(len(order), 1), dtype=np.bool_), same])
        duplicates = sorted({int(step) for step in columns["step"][order[repeated]]})
        order = order[~repeated]
        return {name: values[order] for name, values in columns.items()}, lines[order], duplicates

    def _notes(self, path: Path, duplicates: list[int], rows: int) -> list[str]:
        notes: list[str] = []
        if not path.exists():
            notes.append("missing")
        elif rows == 0:
            notes.append("holds no row that can be read")
        for what, numbers in self._trouble.items():
            notes.append(f"{counted(len(numbers), 'line')} {what}: {_listed([number + 1 for number in numbers])}")
        if duplicates:
            notes.append(f"more than one row (the first is used) for step {_listed(duplicates)}")
        if self._unknown:
            notes.append(f"fields that this version does not know: {', '.join(sorted(self._unknown))}")
        return notes


def _parsed(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return error


def _listed(numbers: list[int]) -> str:
    """`[3, 4, 9]` -> "3, 4, 9", shortened after five."""
    shown = sorted(set(numbers))
    return ", ".join(map(str, shown[:5])) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
