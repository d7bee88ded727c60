"""Where rows go. A monitor has three methods: begin, log, finish. The run folder is the truth, W&B its mirror."""

import time
from typing import Any, Protocol

import numpy as np

from pipeline.study import json_lines
from pipeline.study.run_folder import RunFolder


class Monitor(Protocol):
    """Receives each training step's metrics and the update rows that belong to it."""

    def begin(self) -> None: ...

    def log(self, step: int, metrics: dict[str, float], updates: list[dict[str, Any]]) -> None: ...

    def finish(self, exit_code: int) -> None: ...


class FileMonitor:
    """Appends steps.jsonl: verl's metrics under verl's names. (Ranks append updates.jsonl themselves.)"""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def begin(self) -> None: ...

    def log(self, step: int, metrics: dict[str, float], updates: list[dict[str, Any]]) -> None:
        json_lines.append_row(self._folder.steps_file, {"step": step, "wall_time": time.time(), **metrics})

    def finish(self, exit_code: int) -> None: ...


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """verl's metrics as plain numbers, names untouched; what is no number (texts, tables) is left out."""
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in metrics.items()
        if isinstance(value, int | float | np.number)
    }


class UpdateRows:
    """Reads the rows that the ranks appended to updates.jsonl since the last call."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.updates_file
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json_lines.loads(line) for line in whole.splitlines()]
