"""How far a run is, read from its run folder while it grows."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pipeline.launch.growing_file import GrowingFile
from pipeline.study import json_lines
from pipeline.study.run_folder import RunFolder

REWARD, PPO_KL, CLIP_FRACTION = "critic/rewards/mean", "actor/ppo_kl", "actor/pg_clipfrac"
_STEP_SECONDS = ("perf/time_per_step", "timing_s/step")
_STEPS_AVERAGED = 5


def new_rows(file: GrowingFile) -> list[dict[str, Any]]:
    """Complete rows added since the last call. A damaged line is passed over: the analysis reports it."""
    rows = []
    for line in file.new_lines():
        try:
            row = json_lines.loads(line)
        except ValueError:
            row = None
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
    reward: float | None = None
    ppo_kl: float | None = None
    clip_fraction: float | None = None
    peak_gib: float | None = None
    """The highest peak of any rank and phase so far."""
    memory_source: str = ""
    """"allocated" (torch's allocator) or "rss" (process)."""
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_AVERAGED))

    def __post_init__(self) -> None:
        self._steps_file = GrowingFile(self.folder.steps_file)
        self._updates_file = GrowingFile(self.folder.updates_file)

    def refresh(self) -> bool:
        """Read what is new; True when a training step ended."""
        before = self.step
        for row in new_rows(self._updates_file):
            self._take_memory(row)
        for row in new_rows(self._steps_file):
            self._take_step(row)
        return self.step > before

    def _take_step(self, row: dict[str, Any]) -> None:
        self.step = int(row["step"])
        self.reward = row.get(REWARD, self.reward)
        self.ppo_kl = row.get(PPO_KL, self.ppo_kl)
        self.clip_fraction = row.get(CLIP_FRACTION, self.clip_fraction)
        seconds = next((row[name] for name in _STEP_SECONDS if name in row), None)
        if seconds is not None:
            self._step_seconds.append(float(seconds))

    def _take_memory(self, row: dict[str, Any]) -> None:
        for source in ("allocated", "rss"):
            peaks = [float(value) for name, value in row.items() if name.startswith(f"{source}_peak_")]
            if peaks:
                self.memory_source, self.peak_gib = source, max(*peaks, self.peak_gib or 0.0)

    @property
    def step_s(self) -> float | None:
        """Seconds per step, mean of the last five."""
        return sum(self._step_seconds) / len(self._step_seconds) if self._step_seconds else None

    def left_s(self) -> float | None:
        """Seconds until the last step ends; None while unknown."""
        if self.steps is None or self.step_s is None:
            return None
        return max(self.steps - self.step, 0) * self.step_s
