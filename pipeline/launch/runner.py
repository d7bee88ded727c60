"""Runs a planned sweep: one Ray job after the other, followed to its end, recorded in its run folder."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.launch import jobs as ray_jobs
from pipeline.launch.capacity import Capacity
from pipeline.launch.cluster import ClusterSettings, LocalCluster, forget_other_clusters
from pipeline.launch.display import Display, RunView, display_for
from pipeline.launch.errors import ClusterError
from pipeline.launch.failure_reason import failure_of
from pipeline.launch.interrupts import Interrupts
from pipeline.launch.jobs import CLUSTER_TROUBLE, ENDED, JobLog, JobSpec, JobState, RayJobs
from pipeline.launch.kept_runs import LaunchableRun, StudyFolder, prepare_folder
from pipeline.launch.progress import Progress
from pipeline.launch.ray_dashboard import RayDashboard, users_token
from pipeline.launch.stages import StageReader
from pipeline.study.records import Failure, Status

_POLL_S = 0.5


@dataclass(frozen=True)
class RunOutcome:
    """How one run ended."""

    run_id: str
    state: Literal["succeeded", "failed", "stopped"]
    reason: str = ""
    kept: bool = False


@dataclass(frozen=True)
class SweepOutcome:
    """How a sweep ended."""

    study: StudyFolder
    runs: Sequence[RunOutcome]
    signal: int | None = None
    """The signal that stopped it."""
    ending: LocalCluster | None = None
    """The cluster that was started for it, on its way out: call its `stop`, after the report (it takes seconds)."""

    @property
    def exit_status(self) -> int:
        """0: every run succeeded. 1: a run failed or was stopped. 128 + n: signal n stopped the sweep."""
        if self.signal is not None:
            return 128 + self.signal
        return int(any(run.state != "succeeded" for run in self.runs))


@dataclass
class Sweep:
    """The runs of one study on one cluster."""

    study: StudyFolder
    runs: Sequence[LaunchableRun]
    cluster_config: Mapping[str, Any]
    entrypoint: Sequence[str] = field(default_factory=lambda: ray_jobs.TRAIN)
    _outcomes: dict[str, RunOutcome] = field(default_factory=dict)
    _ending: LocalCluster | None = None

    def __post_init__(self) -> None:
        self._settings = ClusterSettings.from_config(self.cluster_config)
        self._views = {run.run_id: _view(run) for run in self.runs}

    def run(self) -> SweepOutcome:
        """Run what is to be run. Raises ClusterError when there is no cluster to run on, before any folder changes."""
        title = f"study {self.study.path.name}, results in {self.study.path}"
        with Interrupts() as interrupts, display_for(list(self._views.values()), title) as display:
            for run in self.runs:
                if run.kept:
                    self._keep(run, display)
            if any(not run.kept for run in self.runs):
                self._run_all(interrupts, display)
            signal = interrupts.signal
        return SweepOutcome(self.study, [self._outcomes[run.run_id] for run in self.runs], signal, self._ending)

    def _keep(self, run: LaunchableRun, display: Display) -> None:
        view = self._views[run.run_id]
        view.progress.refresh()
        view.enter("kept", "already succeeded, kept")
        display.changed(view)
        self._outcomes[run.run_id] = RunOutcome(run.run_id, "succeeded", kept=True)

    def _run_all(self, interrupts: Interrupts, display: Display) -> None:
        forget_other_clusters()
        to_run = [run for run in self.runs if not run.kept]
        if self._settings.address is not None:
            dashboard = RayDashboard(self._settings.address.rstrip("/"), users_token())
            self._run_on(dashboard, to_run, interrupts, display)
            return
        local = LocalCluster(self._settings, _most_workers(to_run))
        try:
            self._start(local, interrupts, display)
            self._run_on(local.dashboard, to_run, interrupts, display)
            self._begin_stop(local, display)
        except BaseException:
            local.stop()
            raise

    def _run_on(
        self, dashboard: RayDashboard, runs: Sequence[LaunchableRun], interrupts: Interrupts, display: Display
    ) -> None:
        if not interrupts.asked:
            capacity = Capacity(dashboard, self._settings.worker_resource, shared=self._settings.address is not None)
            try:
                jobs = RayJobs(dashboard)
                capacity.check(runs)
            except (OSError, RuntimeError) as error:
                raise ClusterError(f"the Ray cluster at {dashboard.address} does not do its work: {error}") from error
            runs = self._one_after_the_other(runs, jobs, capacity, interrupts, display)
        self._do_not_start(runs, interrupts.reason, display)

    def _start(self, local: LocalCluster, interrupts: Interrupts, display: Display) -> None:
        display.say(f"starting a Ray cluster on this machine, dashboard {local.dashboard.address}")
        began = time.monotonic()
        local.start()
        import ray.job_submission  # noqa: F401 - takes a second, while the cluster starts anyway

        while not local.is_ready() and not interrupts.asked:
            if time.monotonic() - began > self._settings.start_timeout_s:
                raise ClusterError(
                    f"Ray did not answer within cluster.start_timeout_s={self._settings.start_timeout_s} s:\n"
                    f"{local.output_tail()}"
                )
            interrupts.pause(0.2)
            display.tick()
        if not interrupts.asked:
            display.say(f"Ray is ready after {time.monotonic() - began:.1f} s; its token is in {local.token_file}")

    def _begin_stop(self, local: LocalCluster, display: Display) -> None:
        failed = any(outcome.state == "failed" for outcome in self._outcomes.values())
        if failed:
            local.keep_logs(self.study.launcher / "ray_logs")
            display.say(f"Ray's own logs are kept in {self.study.launcher / 'ray_logs'}")
        local.begin_stop()
        self._ending = local

    def _one_after_the_other(
        self, runs: Sequence[LaunchableRun], jobs: RayJobs, capacity: Capacity, interrupts: Interrupts, display: Display
    ) -> Sequence[LaunchableRun]:
        """Returns the runs that were not started, because a signal came."""
        for number, run in enumerate(runs):
            if interrupts.asked:
                return runs[number:]
            prepare_folder(run, self.study)
            _OneRun(run, self._views[run.run_id], self, jobs, capacity, interrupts, display).to_its_end()
        return ()

    def _do_not_start(self, runs: Sequence[LaunchableRun], reason: str, display: Display) -> None:
        """What never ran has no status; a folder of an earlier sweep stays as it is."""
        for run in runs:
            self._show_end(RunOutcome(run.run_id, "stopped", f"not started, the sweep was {reason}"), display)

    def record(self, run: LaunchableRun, status: Status, display: Display) -> None:
        """Write the terminal marker and show how the run ended."""
        run.folder.write_status(status)
        self._views[run.run_id].took_s = status.ended_at - status.started_at
        self._show_end(RunOutcome(run.run_id, status.state, status.reason), display)

    def _show_end(self, outcome: RunOutcome, display: Display) -> None:
        view = self._views[outcome.run_id]
        view.enter(outcome.state, outcome.reason)
        self._outcomes[outcome.run_id] = outcome
        display.changed(view)

    @property
    def settings(self) -> ClusterSettings:
        return self._settings


def _view(run: LaunchableRun) -> RunView:
    recipe = run.planned.config.recipe
    label = run.run_id.removeprefix(f"{recipe['run_prefix']}-")
    return RunView(label, Progress(run.folder, recipe.get("steps")))


def _most_workers(runs: Sequence[LaunchableRun]) -> int:
    return max(run.planned.config.recipe["n_workers"] for run in runs)


class _OneRun:
    """A run from waiting for its resources to its terminal marker."""

    def __init__(
        self,
        run: LaunchableRun,
        view: RunView,
        sweep: Sweep,
        jobs: RayJobs,
        capacity: Capacity,
        interrupts: Interrupts,
        display: Display,
    ) -> None:
        self._run = run
        self._view = view
        self._sweep = sweep
        self._jobs = jobs
        self._capacity = capacity
        self._interrupts = interrupts
        self._display = display
        self._submission_id: str | None = None
        self._started_at = time.time()
        self._stages = StageReader(run.folder.job_log_file)

    def to_its_end(self) -> None:
        self._view.started_at = time.monotonic()
        self._stage("asking the cluster")
        try:
            blocked_by = self._wait_for_resources()
            if self._interrupts.asked:
                self._end("stopped", self._interrupts.reason)
            elif blocked_by:
                limit = self._sweep.settings.free_timeout_s
                self._end("failed", *_launcher_failure(f"{blocked_by}, still after cluster.free_timeout_s={limit:g} s"))
            else:
                self._run_job()
        except CLUSTER_TROUBLE as error:
            self._end("failed", *_launcher_failure(f"the Ray cluster does not do what it is asked: {error}"))

    def _wait_for_resources(self) -> str:
        """What is still in the way after cluster.free_timeout_s; empty when nothing is."""
        deadline = time.monotonic() + self._sweep.settings.free_timeout_s
        while (blocked_by := self._capacity.blocked_by(self._run)) and not self._interrupts.asked:
            if time.monotonic() > deadline:
                return blocked_by
            self._stage(f"waiting: {blocked_by}")
            self._interrupts.pause(1.0)
            self._display.tick()
        return ""

    def _run_job(self) -> None:
        spec = self._spec()
        self._jobs.submit(spec)
        self._submission_id = spec.submission_id
        self._stage("job submitted")
        log = JobLog(self._jobs, spec.submission_id, self._run.folder.job_log_file)
        log.start()
        try:
            state, message = self._until_ended(spec.submission_id)
        finally:
            log.finish()
        self._capacity.remember(self._jobs.driver_job_id(spec.submission_id))
        self._progress()
        if state == "failed":
            failure = failure_of(self._run.folder, message)
            self._end("failed", failure.error, failure)
        elif state == "succeeded":
            self._end("succeeded")
        else:
            self._end("stopped", self._interrupts.reason or f"stopped from outside: {message}")

    def _spec(self) -> JobSpec:
        config = self._run.planned.config
        return JobSpec(
            # Ray refuses an id twice in a cluster's life, and a cluster may outlive results/: hence the time.
            submission_id=f"{self._run.run_id}-a{self._run.attempt}-{int(self._started_at)}",
            run_folder=self._run.folder.path,
            env={name: str(value) for name, value in config.cluster["env"].items()},
            metadata={
                "study": config.study_name,
                "arm": self._run.planned.arm,
                "seed": str(config.seed),
                "pair": config.pair,
            },
            entrypoint=self._sweep.entrypoint,
        )

    def _until_ended(self, submission_id: str) -> tuple[JobState, str]:
        while True:
            state, message = self._jobs.state(submission_id)
            if state in ENDED:
                return state, message
            if self._interrupts.asked:
                return self._stop_job(submission_id)
            self._progress()
            self._display.tick()
            self._interrupts.pause(_POLL_S)

    def _stop_job(self, submission_id: str) -> tuple[JobState, str]:
        self._display.say(f"{self._view.label}: stopping the job")
        self._jobs.stop(submission_id)
        limit = self._sweep.settings.stop_timeout_s
        state = ray_jobs.wait_until_ended(self._jobs, submission_id, limit)
        if state not in ENDED:
            self._display.say(f"{self._view.label}: the job has not ended within cluster.stop_timeout_s={limit:g} s")
        return (state if state == "succeeded" else "stopped"), ""

    def _progress(self) -> None:
        view = self._view
        stepped = view.progress.refresh()
        if stepped:
            if view.state == "starting":
                assert view.started_at is not None
                view.start_up_s = time.monotonic() - view.started_at - (view.progress.step_s or 0.0)
                view.enter("running")
            self._display.stepped(view)
        elif view.state == "starting" and (stage := self._stages.read()):
            self._stage(stage)

    def _stage(self, stage: str) -> None:
        if (self._view.state, self._view.stage) != ("starting", stage):
            self._view.enter("starting", stage)
            self._display.changed(self._view)

    def _end(self, state: Any, reason: str = "", failure: Failure | None = None) -> None:
        self._sweep.record(
            self._run,
            Status(
                state=state, reason=reason, failure=failure, attempt=self._run.attempt,
                submission_id=self._submission_id, steps_done=self._view.progress.step,
                started_at=self._started_at, ended_at=time.time(),
            ),
            self._display,
        )  # fmt: skip


def _launcher_failure(reason: str) -> tuple[str, Failure]:
    return reason, Failure(error=reason, where="launcher", time=time.time())
