"""Upload a study to W&B from its files, or fill the gaps of live copies; then compare W&B with the files.

A complete copy is left alone, missing rows are added, a copy of something else (an earlier attempt) is replaced: doing
it twice changes nothing. After the analysis, each run's summary gets the verdict, and report, figures and ledgers
become an artifact. Needs an API key (wandb login, or WANDB_API_KEY) and, for a server of your own, WANDB_BASE_URL.

Exit status: 0 when W&B has everything, 1 when something is missing, 2 when the folder is no study or there is no key.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tenacity
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from pipeline.study.records import RunConfig
from pipeline.study.run_folder import RunFolder
from pipeline.tracking import mirror, study_results
from pipeline.tracking.copy_of_run import (
    Rows,
    find_run,
    gaps,
    indices,
    indices_in_wandb,
    is_beginning,
    last_step,
    last_update,
)
from pipeline.tracking.rows import RunRows
from pipeline.tracking.wandb_run import WandbRun, exit_code_of, summaries_of

_SETTLE_S = 20.0  # W&B shows what it has received some seconds later
_ARTIFACT_TIMEOUT_S = 300
# W&B's client tries for days by default; a person waits here, and the command can be given again.
_PATIENCE: dict[str, Any] = {
    "init_timeout": 60,
    **{f"x_{part}_retry_max": 8 for part in ("file_stream", "graphql", "file_transfer")},
    **{f"x_{part}_retry_wait_max_seconds": 5 for part in ("file_stream", "graphql", "file_transfer")},
}


class BadInput(Exception):  # noqa: N818 - it is the user's input that is at fault, not the program
    """The message says what is wrong and what to do."""


class NoKey(BadInput):
    """There is no API key at all."""


@dataclass
class SyncedRun:
    """One run: what its files hold, what W&B holds, and what is missing there."""

    folder: RunFolder
    rows: list[dict[str, Any]] = field(repr=False)
    config: RunConfig
    exit_code: int
    damaged: int
    """Lines of its files that are no rows."""
    found: Rows | None = None
    """W&B's rows; None: W&B has no such run."""
    missing: list[str] = field(default_factory=list)
    done: str = ""

    @property
    def files(self) -> Rows:
        return indices(self.rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, help="the study's folder, for example results/embedded")


def run(arguments: argparse.Namespace) -> int:
    """The command; returns its exit status."""
    study: Path = arguments.study.absolute()
    try:
        folders = run_folders(study)
        runs, failed = Sync(study, folders, connect()).run()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ConnectionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    Console().print(_table(runs))
    for text in failed:
        print(f"missing: {text}", file=sys.stderr)
    return int(bool(failed))


def read_run(folder: RunFolder) -> SyncedRun:
    """Raises BadInput when its configuration or its status cannot be read."""
    reader = RunRows(folder)
    rows = [*reader.new(), *reader.rest()]
    try:
        config, status = folder.read_config(), folder.read_status()
    except (ValueError, yaml.YAMLError) as error:  # pydantic's errors among them
        raise BadInput(f"{folder.path} cannot be read ({_first_line(error)})") from error
    return SyncedRun(folder, rows, config, exit_code_of(status), reader.damaged)


def run_folders(study: Path) -> list[RunFolder]:
    """The study's runs. Raises BadInput where there are none."""
    folders = [RunFolder(file.parent) for file in sorted(study.glob("runs/*/config.yaml"))]
    if not folders:
        raise BadInput(f"{study} is no study's folder: it has no runs/<run id>/config.yaml")
    return folders


def connect() -> Any:
    """wandb.Api. Raises BadInput without a key that the server takes (NoKey without any), ConnectionError where no
    server answers.
    """
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    try:
        return wandb.Api()
    except UsageError as error:
        raise NoKey("there is no W&B API key: give one with `wandb login` or in WANDB_API_KEY") from error
    except AuthenticationError as error:
        response = getattr(error.__cause__, "response", None)
        if response is not None and response.http_status in (401, 403):
            raise BadInput(f"W&B does not take the API key ({response.http_status})") from error
        raise ConnectionError(f"W&B does not answer: {error}") from error


class Sync:
    """Brings W&B's copy of a study up to date."""

    def __init__(self, study: Path, folders: list[RunFolder], api: Any) -> None:
        self._study = study
        self._folders = folders
        self._api = api
        try:
            self._results = study_results.read_results(study)
        except ValueError as error:
            raise BadInput(
                f"summary.json cannot be read ({_first_line(error)}): python -m pipeline.analyze {study} makes it again"
            ) from error
        self._failed: list[str] = []

    def run(self) -> tuple[list[SyncedRun], list[str]]:
        """Returns the runs, and what is missing in W&B after all, in words."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        runs: list[SyncedRun] = []
        with Progress(*columns, console=Console(stderr=True)) as progress:
            everything = progress.add_task("runs", total=len(self._folders))
            for folder in self._folders:
                if mirror.is_followed(folder):
                    self._failed.append(f"{folder.path.name}: has not ended, its own mirror is at work")
                else:
                    runs.append(self._one(folder, progress))
                progress.advance(everything)
            if self._results is not None and runs:
                self._artifact(runs[0].config, self._results, progress)
        return runs, self._failed

    def _one(self, folder: RunFolder, progress: Progress) -> SyncedRun:
        import wandb
        from wandb.sdk.lib.service.service_connection import WandbApiFailedError

        synced = read_run(folder)
        task = progress.add_task(synced.config.run_id, total=len(synced.rows))
        try:
            if self._compare(synced):
                self._upload(synced, progress, task)
                self._compare_patiently(synced)
            else:
                synced.done = "was complete"
                self._update_summary(synced)
        except (wandb.Error, WandbApiFailedError, TimeoutError) as error:
            synced.missing = [f"W&B failed ({_first_line(error)})"]
        if not synced.missing:
            folder.tracking_error_file.unlink(missing_ok=True)  # it told what the live mirror missed
        progress.update(task, completed=len(synced.rows))
        self._failed += [f"{synced.config.run_id}: {gap}" for gap in synced.missing]
        return synced

    def _compare(self, synced: SyncedRun) -> list[str]:
        found = find_run(self._api, synced.config)
        synced.found = None if found is None else indices_in_wandb(found)
        state = "" if found is None else found.state
        synced.missing = gaps(synced.files, synced.found, synced.exit_code, state)
        return synced.missing

    def _compare_patiently(self, synced: SyncedRun) -> None:
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_delay(_SETTLE_S),
            wait=tenacity.wait_fixed(2),
            retry=tenacity.retry_if_result(bool),
            retry_error_callback=lambda _: None,
        )
        retrying(self._compare, synced)

    def _upload(self, synced: SyncedRun, progress: Progress, task: TaskID) -> None:
        """Add what is missing; from the start where W&B has nothing or something else."""
        there = len(synced.found) if synced.found and is_beginning(synced.found, synced.files) else 0
        progress.update(task, completed=there)
        with tempfile.TemporaryDirectory(prefix="wandb-sync-") as scratch:
            resume = "must" if there else None
            run = WandbRun(synced.folder, "online", Path(scratch), resume, **_PATIENCE)
            for row in synced.rows[there:]:
                run.send(row)
                progress.advance(task)
            summary = {**summaries_of(synced.rows), **self._results_of(synced), "rows_sent": len(synced.rows)}
            run.finish(synced.exit_code, summary)
        synced.done = "completed" if there else "replaced" if synced.found else "uploaded"

    def _results_of(self, synced: SyncedRun) -> dict[str, Any]:
        return {} if self._results is None else study_results.of_run(self._results, synced.config.run_id)

    def _update_summary(self, synced: SyncedRun) -> None:
        summary = find_run(self._api, synced.config).summary
        wanted = self._results_of(synced)
        if any(summary.get(name) != value for name, value in wanted.items()):
            summary.update(wanted)
            synced.done = "summary updated"

    def _artifact(self, config: RunConfig, results: dict[str, Any], progress: Progress) -> None:
        import wandb

        task = progress.add_task("report, figures, ledgers", total=1)
        name = f"{self._study.name}-study"
        try:
            with tempfile.TemporaryDirectory(prefix="wandb-sync-") as scratch:
                run = wandb.init(
                    entity=config.tracking.get("entity"), project=config.tracking["project"], id=name, name=name,
                    group=self._study.name, job_type=study_results.JOB_TYPE, notes=results["one_line"], dir=scratch,
                    settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, **_PATIENCE),
                )  # fmt: skip
                run.log_artifact(study_results.artifact_of(self._study, results)).wait(_ARTIFACT_TIMEOUT_S)
                run.finish(exit_code=0)
        except (wandb.Error, TimeoutError, ValueError) as error:
            self._failed.append(f"the artifact of the study: {_first_line(error)}")
        progress.advance(task)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _table(runs: list[SyncedRun]) -> Table:
    table = Table("run", "rows", "last step", "last optimizer step", "", title="W&B : files")
    for run in runs:
        found = run.found or []
        table.add_row(
            run.config.run_id,
            f"{len(found)} : {len(run.files)}",
            f"{last_step(found)} : {last_step(run.files)}",
            f"{last_update(found)} : {last_update(run.files)}",
            "; ".join(run.missing) or run.done + (f", {run.damaged} damaged lines left out" if run.damaged else ""),
        )
    return table
