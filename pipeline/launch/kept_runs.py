"""What to do with run folders that an earlier sweep of the same study left behind."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pydantic
import yaml

from pipeline.launch.errors import BadInput
from pipeline.study.planning import PlannedRun, success_in_the_way
from pipeline.study.run_folder import RunFolder


@dataclass(frozen=True)
class StudyFolder:
    """`results/<study>/`, by the names of its parts."""

    path: Path

    def run(self, run_id: str) -> RunFolder:
        return RunFolder(self.path / "runs" / run_id)

    @property
    def has_runs(self) -> bool:
        return (self.path / "runs").exists()

    @property
    def attempts(self) -> Path:
        """Former attempts of runs that were started again."""
        return self.path / "attempts"

    @property
    def launcher(self) -> Path:
        """Hydra's and Ray's own files; not part of the results."""
        return self.path / "launcher"

    def remove_if_unused(self) -> None:
        """Take away the folders that were made for a sweep which did not start: they hold no run and no result."""
        if {path.name for path in self.path.iterdir()} <= {self.launcher.name}:
            (self.launcher / "multirun.yaml").unlink(missing_ok=True)
            for folder in (self.launcher, self.path):
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()

    def next_attempt(self, run_id: str) -> int:
        """1 for a new run; one more than the highest attempt that was moved away."""
        former = self.attempts.glob(f"{run_id}-a*") if self.attempts.exists() else ()
        numbers = [int(number) for folder in former if (number := folder.name.removeprefix(f"{run_id}-a")).isdigit()]
        return max(numbers, default=0) + 1


@dataclass(frozen=True)
class LaunchableRun:
    """A planned run with its folder: to be started, or kept because it already succeeded."""

    planned: PlannedRun
    folder: RunFolder
    kept: bool
    attempt: int

    @property
    def run_id(self) -> str:
        return self.planned.run_id


def decide(runs: Iterable[PlannedRun], study: StudyFolder, rerun: bool) -> list[LaunchableRun]:
    """Say for every run whether it is kept or started, without touching a file.

    Raises BadInput where a succeeded run has the same id and another configuration.
    """
    return [_decide(run, study, rerun) for run in runs]


def _decide(run: PlannedRun, study: StudyFolder, rerun: bool) -> LaunchableRun:
    folder = study.run(run.run_id)
    kept = not rerun and _succeeded(folder)
    if kept:
        _check_same_configuration(run, folder)
        status = folder.read_status()
        assert status is not None
        return LaunchableRun(run, folder, kept=True, attempt=status.attempt)
    attempt = study.next_attempt(run.run_id) + int(folder.path.exists())
    return LaunchableRun(run, folder, kept=False, attempt=attempt)


def _succeeded(folder: RunFolder) -> bool:
    try:
        status = folder.read_status()
    except (ValueError, pydantic.ValidationError) as error:
        raise BadInput(
            f"{folder.status_file} cannot be read ({_first_line(error)}). Move the folder away, or give rerun=true"
        ) from error
    return status is not None and status.state == "succeeded"


def _check_same_configuration(run: PlannedRun, folder: RunFolder) -> None:
    try:
        former = folder.read_config()
    except (FileNotFoundError, yaml.YAMLError, pydantic.ValidationError) as error:
        raise BadInput(
            f"{folder.config_file} cannot be read ({_first_line(error)}). Move the folder away, or give rerun=true"
        ) from error
    if told := success_in_the_way(former, run.config):
        raise BadInput(
            f"study_name={run.config.study_name}: {run.run_id} {told}\n"
            "Choose another study_name, or give rerun=true to run it again (the old folder moves to attempts/)"
        )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def prepare_folder(run: LaunchableRun, study: StudyFolder) -> None:
    """Move an earlier attempt away and write config.yaml and overrides.yaml of the new one."""
    folder = run.folder
    if folder.path.exists():
        study.attempts.mkdir(parents=True, exist_ok=True)
        shutil.move(folder.path, study.attempts / f"{run.run_id}-a{run.attempt - 1}")
    folder.path.mkdir(parents=True)
    folder.config_file.write_text(yaml.safe_dump(run.planned.config.model_dump(mode="json"), sort_keys=False))
    folder.overrides_file.write_text(yaml.safe_dump(list(run.planned.overrides)))
