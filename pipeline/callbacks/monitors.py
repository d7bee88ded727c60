"""Where rows go. A monitor has three methods: begin, log, finish. The run folder is the truth, W&B its mirror."""

import time
from typing import Any, Protocol

import numpy as np

from pipeline.study import json_lines
from pipeline.study.run_folder import RunFolder


class Monitor(Protocol):
    """Receives each training step's metrics, and in the end the exit code: 0, 1 failed, 255 stopped."""

    def begin(self) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def finish(self, exit_code: int) -> None: ...


class FileMonitor:
    """Appends steps.jsonl: verl's metrics under verl's names. (Ranks append updates.jsonl themselves.)"""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def begin(self) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        json_lines.append_row(self._folder.steps_file, {"step": step, "wall_time": time.time(), **metrics})

    def finish(self, exit_code: int) -> None: ...


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """verl's metrics as plain numbers, names untouched; what is no number (texts, tables) is left out."""
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in metrics.items()
        if isinstance(value, int | float | np.number)
    }
