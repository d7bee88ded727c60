"""The run folder: the contract between training and analysis. Append-only; the status is written last."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.study import json_lines
from pipeline.study.records import Ledger, RunConfig, Status

# Workers learn where their run folder is from this variable (set in the Ray job's runtime environment).
RUN_FOLDER_VARIABLE = "PIPELINE_RUN_FOLDER"


@dataclass(frozen=True)
class RunFolder:
    """`results/<study>/runs/<run id>/`, by the names of its files."""

    path: Path

    @classmethod
    def from_environment(cls) -> "RunFolder | None":
        """The folder named by PIPELINE_RUN_FOLDER; None where a process belongs to no run."""
        value = os.environ.get(RUN_FOLDER_VARIABLE)
        return cls(Path(value)) if value else None

    @property
    def config_file(self) -> Path:
        """The resolved pipeline configuration (RunConfig)."""
        return self.path / "config.yaml"

    @property
    def overrides_file(self) -> Path:
        """A YAML list: the Hydra overrides that made this run."""
        return self.path / "overrides.yaml"

    @property
    def verl_config_file(self) -> Path:
        """verl's whole resolved configuration, written by the trainer."""
        return self.path / "verl_config.yaml"

    @property
    def environment_file(self) -> Path:
        """Versions, git state, hardware, stand-ins (Environment)."""
        return self.path / "env.json"

    @property
    def steps_file(self) -> Path:
        """One row per training step: verl's metrics under verl's names."""
        return self.path / "steps.jsonl"

    @property
    def updates_file(self) -> Path:
        """One row per optimizer step and rank."""
        return self.path / "updates.jsonl"

    @property
    def ledger_file(self) -> Path:
        """Bytes by tensor kind, dtype and rank; what optimizer was found (Ledger)."""
        return self.path / "ledger.json"

    @property
    def failure_file(self) -> Path:
        """The first failing process's own account of the error (Failure); absent when nothing failed."""
        return self.path / "failure.json"

    @property
    def tracking_error_file(self) -> Path:
        """What W&B has not received of the run, and why; absent while nothing is known to be missing there."""
        return self.path / "tracking_error.json"

    @property
    def status_file(self) -> Path:
        """The terminal marker (Status), written last."""
        return self.path / "status.json"

    @property
    def job_log_file(self) -> Path:
        return self.path / "job.log"

    def read_config(self) -> RunConfig:
        """Raises FileNotFoundError or pydantic.ValidationError."""
        return RunConfig.model_validate(yaml.safe_load(self.config_file.read_text()))

    def read_status(self) -> Status | None:
        """None while the run has not ended (or was killed before anybody could write)."""
        return _read(self.status_file, Status)

    def read_ledger(self) -> Ledger | None:
        return _read(self.ledger_file, Ledger)

    def write_status(self, status: Status) -> None:
        write_atomically(self.status_file, json_lines.dumps(status.model_dump(mode="json"), indent=True))


def _read(path: Path, model: Any) -> Any:
    return model.model_validate(json_lines.loads(path.read_bytes())) if path.exists() else None


def write_atomically(path: Path, content: bytes) -> None:
    """Write so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
