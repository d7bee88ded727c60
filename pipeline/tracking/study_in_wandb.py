"""What a study's dashboards in W&B are built from: its runs, the names of their series, and what the analysis found."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from pipeline.analysis.load import BASELINE, arm_order
from pipeline.study import json_lines
from pipeline.study.records import RunConfig
from pipeline.study.run_folder import RunFolder
from pipeline.tracking.rows import update_row


@dataclass(frozen=True)
class StudyInWandb:
    """A study that was analysed, and where in W&B it belongs."""

    folder: Path
    runs: list[RunFolder]
    results: dict[str, Any]
    """summary.json."""
    entity: str
    project: str

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def configs(self) -> list[RunConfig]:
        return [run.read_config() for run in self.runs]

    @cached_property
    def arms(self) -> list[str]:
        return sorted({arm_of(config) for config in self.configs}, key=arm_order)

    @property
    def baselines(self) -> list[str]:
        """The baseline runs' ids; that of the first pair first."""
        found = [config for config in self.configs if arm_of(config) == BASELINE]
        return [config.run_id for config in sorted(found, key=lambda config: (config.seed, config.run_id))]

    @cached_property
    def series(self) -> set[str]:
        """The names under which runs log."""
        return {name for run in self.runs for row in _rows_with_every_name(run) for name in row}


def arm_of(config: RunConfig) -> str:
    return str(config.arm["name"])


def group_of(config: RunConfig) -> str:
    """W&B's group: study and pair."""
    return f"{config.study_name}/{config.pair}"


def _rows_with_every_name(run: RunFolder) -> Iterator[dict[str, Any]]:
    """All steps, for validation is not in each; of the optimizer steps the first, for all have the same names."""
    yield from _intact(run.steps_file)
    updates = _intact(run.updates_file)
    if first := next(updates, None):
        same_step = takewhile(lambda row: row["step"] == first["step"], updates)
        yield update_row([first, *(row for row in same_step if row["update"] == first["update"])])


def _intact(file: Path) -> Iterator[dict[str, Any]]:
    return (row for row in json_lines.read_rows(file) if isinstance(row, dict))
