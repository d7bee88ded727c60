"""How far a run is, read from its run folder while it grows."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.study import json_lines
from pipeline.study.run_folder import RunFolder

REWARD, PPO_KL, CLIP_FRACTION = "critic/rewards/mean", "actor/ppo_kl", "actor/pg_clipfrac"


class GrowingRows:
    """The complete new rows of a JSON Lines file since the last call, without reading the old ones again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """A last line without its end is left for the next call; a damaged line is left to the analysis to report."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        rows = []
        for line in complete.splitlines():
            try:
                row = json_lines.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows


@dataclass
class Progress:
    """What the display shows of a run. Values that were not measured are None."""

    folder: RunFolder
    steps: int | None
    """Training steps in all, where the recipe says so."""
    step: int = 0
    step_s: float | None = None
    """Seconds per step: mean of the steps seen."""
    reward: float | None = None
    ppo_kl: float | None = None
    clip_fraction: float | None = None
    memory_gib: float | None = None
    memory_source: str = ""
    first_step_at: float | None = None
    _arrivals: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._step_rows = GrowingRows(self.folder.steps_file)
        self._update_rows = GrowingRows(self.folder.updates_file)

    def refresh(self) -> bool:
        """Read what is new; True when a training step ended."""
        rows = self._step_rows.read()
        for row in rows:
            self._take_step(row)
        for row in self._update_rows.read():
            self._take_memory(row)
        return bool(rows)

    def _take_step(self, row: dict[str, Any]) -> None:
        self.step = int(row.get("step", self.step + 1))
        self.reward = row.get(REWARD, self.reward)
        self.ppo_kl = row.get(PPO_KL, self.ppo_kl)
        self.clip_fraction = row.get(CLIP_FRACTION, self.clip_fraction)
        self._arrivals.append(time.monotonic())
        timed = row.get("timing_s/step", row.get("perf/time_per_step"))
        if timed is not None:
            done = len(self._arrivals)
            self.step_s = float(timed) if self.step_s is None else self.step_s + (float(timed) - self.step_s) / done

    def _take_memory(self, row: dict[str, Any]) -> None:
        for source in ("allocated", "rss"):
            peaks = [value for name, value in row.items() if name.startswith(f"{source}_peak_") and value is not None]
            if peaks:
                self.memory_gib, self.memory_source = max(peaks), source

    def left_s(self) -> float | None:
        """Seconds until the last step, from the time per step; None while unknown."""
        if self.steps is None or self.step_s is None:
            return None
        return max(self.steps - self.step, 0) * self.step_s
