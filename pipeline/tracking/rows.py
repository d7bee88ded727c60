"""From a run folder's files to W&B's rows: for each training step its optimizer steps, then the step itself.

The live mirror and the later sync both read the files through here, so they send the same rows in the same order.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.study import json_lines
from pipeline.study.run_folder import RunFolder

STEP = "training/global_step"
UPDATE = "update/index"
TIMESTAMP = "_timestamp"
"""W&B's own name for a row's Unix time; W&B keeps a given one."""

_RANKS_SHOWN = 16  # one curve per rank up to here, minimum, mean and maximum beyond


class GrowingRows:
    """The rows of a JSON Lines file that is being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.damaged = 0
        """Lines so far that are not JSON."""

    def new(self) -> list[dict[str, Any]]:
        """The rows that were completed since the last call; a half-written last line is left for later."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = [_row(line) for line in whole.splitlines()]
        self.damaged += rows.count(None)
        return [row for row in rows if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        return json_lines.loads(line)
    except ValueError:
        return None


class RunRows:
    """The W&B rows of one run, as they come about."""

    def __init__(self, folder: RunFolder) -> None:
        self._steps = GrowingRows(folder.steps_file)
        self._updates = GrowingRows(folder.updates_file)
        self._waiting: dict[int, list[dict[str, Any]]] = {}
        self._last_time: dict[str, float] = {}

    @property
    def damaged(self) -> int:
        """Lines so far that could not be read and are in no row."""
        return self._steps.damaged + self._updates.damaged

    def new(self) -> list[dict[str, Any]]:
        """The rows of the training steps that ended since the last call."""
        # Steps first: what ranks wrote for a step is in their file before the step's own row is.
        steps = self._steps.new()
        for row in self._updates.new():
            self._waiting.setdefault(row["update"], []).append(row)
        rows: list[dict[str, Any]] = []
        for step in steps:
            self._last_time = {TIMESTAMP: step["wall_time"]}
            rows += self._take(index for index, ranks in self._waiting.items() if ranks[0]["step"] <= step["step"])
            rows.append(_step_row(step))
        return rows

    def rest(self) -> list[dict[str, Any]]:
        """The optimizer steps of a training step that never ended. Call it last, when nothing is written any more."""
        return self._take(self._waiting)

    def _take(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Ranks note no time of day: an optimizer step gets that of the training step which just ended."""
        return [{**update_row(self._waiting.pop(index)), **self._last_time} for index in sorted(indices)]


def all_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """Every W&B row of a run that has ended."""
    rows = RunRows(folder)
    return [*rows.new(), *rows.rest()]


def _step_row(step: dict[str, Any]) -> dict[str, Any]:
    metrics = {name: value for name, value in step.items() if name not in ("step", "wall_time")}
    return {**metrics, STEP: step["step"], TIMESTAMP: step["wall_time"]}


def update_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One optimizer step out of its ranks' rows: the smallest liveness, means of the drift, every rank's memory."""
    rows = sorted(rows, key=lambda row: row["rank"])
    result: dict[str, Any] = {
        UPDATE: rows[0]["update"],
        STEP: rows[0]["step"],
        "update/mini_batch": rows[0]["mini_batch"],
        "update/liveness": min(row["liveness"] for row in rows),
        "update/grad_norm": rows[0]["grad_norm"],
        "update/lr": rows[0]["lr"],
        "update/time_optimizer_step_s": max(row["time_optimizer_step_s"] for row in rows),
    }
    for name in ("ppo_kl", "pg_clipfrac"):
        values = [row[name] for row in rows if name in row]
        if values:
            result[f"update/{name}"] = sum(values) / len(values)
    for name in (name for name in rows[0] if name.endswith("_gib")):
        result |= _memory(name, rows)
    return result


def _memory(name: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    if len(rows) <= _RANKS_SHOWN:
        return {f"memory/{name}/rank{row['rank']}": row[name] for row in rows}
    values = [row[name] for row in rows]
    return {
        f"memory/{name}/min": min(values),
        f"memory/{name}/mean": sum(values) / len(values),
        f"memory/{name}/max": max(values),
    }
