"""The W&B run of a run folder: named by the run id, grouped by study and pair, typed by arm."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import yaml

from pipeline.study import json_lines
from pipeline.study.records import RunConfig, Status
from pipeline.study.run_folder import RunFolder
from pipeline.tracking.rows import STEP, TIMESTAMP, UPDATE

KILLED = 255
"""W&B shows a run with this exit code as killed (its client gives it for Ctrl-C); 0 is finished, others are failed."""
_SUMMARIES = {
    "update/liveness": "min",  # one optimizer step that moved nothing is the finding
    "update/grad_norm": "max",
    "update/ppo_kl": "max",
    "update/pg_clipfrac": "max",
    "update/time_optimizer_step_s": "mean",
    "memory/": "max",
    "perf/max_memory_": "max",
    "timing_s/": "mean",
}
"""Beginning of a metric's name -> what its summary keeps."""
_SUMMARISE = {"min": min, "max": max, "mean": mean}

EXIT_CODES = {"succeeded": 0, "failed": 1, "stopped": KILLED}


def exit_code_of(status: Status | None) -> int:
    """A run without a status was killed before anybody could write one."""
    return KILLED if status is None else EXIT_CODES[status.state]


def run_settings(config: RunConfig) -> dict[str, Any]:
    """The arguments of `wandb.init` that make this run findable and comparable."""
    return {
        "entity": config.tracking.get("entity"),
        "project": config.tracking["project"],
        "id": config.run_id,
        "name": config.run_id,
        "group": f"{config.study_name}/{config.pair}",
        "job_type": config.arm["name"],
        "tags": [config.recipe["name"], config.cluster["name"], config.arm["name"], f"seed{config.seed}"],
    }


class WandbRun:
    """The W&B run of a run folder. Its methods raise what the wandb client raises.

    A run starts empty, and what W&B has under its id is replaced (so W&B documents an init without `resume`): a new
    attempt begins again at step 1, and behind the former one's rows its curves would run backwards. To add rows to
    those of the same attempt, resume.
    """

    def __init__(
        self, folder: RunFolder, mode: str, files_in: Path, resume: Literal["must"] | None = None, **settings: Any
    ) -> None:
        """files_in: where W&B keeps its own files. settings: of wandb.Settings."""
        import wandb

        self._folder = folder
        self._defined: set[str] = set()
        self._run = wandb.init(
            **run_settings(folder.read_config()),
            mode=mode,  # pyright: ignore[reportArgumentType] - the launcher has checked it
            resume=resume,
            dir=str(files_in),
            config=run_config(folder),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, **settings),
        )
        for axis in (STEP, UPDATE):
            self._run.define_metric(axis, hidden=True)
        self.sent = 0
        """Rows so far."""

    def send(self, row: dict[str, Any]) -> None:
        for name in row.keys() - self._defined:
            self._define(name)
        self._run.log(row)
        self.sent += 1

    def _define(self, name: str) -> None:
        """By full names: of overlapping globs ("*", "memory/*") W&B takes any."""
        self._defined.add(name)
        if name not in (STEP, UPDATE, TIMESTAMP):
            self._run.define_metric(name, step_metric=axis_of(name), summary=summary_of(name))

    def finish(self, exit_code: int, results: dict[str, Any] | None = None) -> None:
        """End the run as it ended. results: further values of its summary. Returns when W&B has received everything."""
        if self._folder.ledger_file.exists():
            self._run.summary["ledger"] = json_lines.loads(self._folder.ledger_file.read_bytes())
        self._run.summary["rows_sent"] = self.sent
        self._run.summary.update(results or {})
        self._run.finish(exit_code=exit_code)


def axis_of(name: str) -> str:
    """What a series runs over: the optimizer step or verl's training step."""
    return UPDATE if name.startswith(("update/", "memory/")) else STEP


def summary_of(name: str) -> str | None:
    """What the run's summary keeps of a series; None: the last value, W&B's default."""
    return next((summary for start, summary in _SUMMARIES.items() if name.startswith(start)), None)


def summaries_of(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What `summary_of` promises, of all rows: the client itself counts from where a run was resumed."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if summary_of(name) is not None:
                columns.setdefault(name, []).append(value)
    return {name: {kind: _SUMMARISE[kind](values)} for name, values in columns.items() if (kind := summary_of(name))}


def run_config(folder: RunFolder) -> dict[str, Any]:
    """The resolved configuration; under `environment` versions, git state and hardware, once they are known."""
    config = yaml.safe_load(folder.config_file.read_text())
    if folder.environment_file.exists():
        config["environment"] = json_lines.loads(folder.environment_file.read_bytes())
    return config
