"""JSON that keeps non-finite numbers.

JSON has no NaN. A row must never lie, so NaN and the infinities are written as the strings "NaN", "Infinity" and
"-Infinity" (the convention of Protocol Buffers' JSON mapping) and come back as floats.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

_TO_FLOAT = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _encodable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(key): _encodable(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in cast("list[Any] | tuple[Any, ...]", value)]
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return _TO_FLOAT.get(value, value)
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_decoded(item) for item in cast("list[Any]", value)]
    return value


def dumps(value: Any, *, indent: bool = False) -> bytes:
    """Encode to JSON; NaN and infinities survive as strings. Raises TypeError for what JSON cannot hold."""
    options = orjson.OPT_SERIALIZE_NUMPY | (orjson.OPT_INDENT_2 if indent else 0)
    return orjson.dumps(_encodable(value), option=options)


def loads(text: bytes | str) -> Any:
    """Decode JSON written by `dumps`. Raises ValueError (orjson.JSONDecodeError) for anything else."""
    return _decoded(orjson.loads(text))


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one row in one write, so that rows of several processes on one host never interleave."""
    line = dumps(row) + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class DamagedLine:
    """A line that could not be read: its 1-based number and why."""

    number: int
    reason: str


def read_rows(path: Path) -> Iterator[dict[str, Any] | DamagedLine]:
    """Yield each row of a JSON Lines file, or a DamagedLine in its place; nothing is repaired or skipped silently.

    A missing file has no rows.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                yield DamagedLine(number, "empty line")
                continue
            try:
                row = loads(line)
            except ValueError as error:
                yield DamagedLine(number, f"not JSON ({error})")
                continue
            if isinstance(row, dict):
                yield row
            else:
                yield DamagedLine(number, f"a JSON {type(row).__name__}, not an object")
