"""Runs a planned sweep on a cluster, one run after the other, and records how each ended."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.launch import jobs as ray_jobs
from pipeline.launch.capacity import Capacity
from pipeline.launch.cluster import ClusterSettings, LocalCluster, forget_other_clusters
from pipeline.launch.display import Display, RunView, display_for
from pipeline.launch.errors import ClusterError
from pipeline.launch.interrupts import Interrupts
from pipeline.launch.jobs import RayJobs
from pipeline.launch.kept_runs import LaunchableRun, StudyFolder, prepare_folder
from pipeline.launch.one_run import OneRun, Place
from pipeline.launch.progress import Progress
from pipeline.launch.ray_dashboard import RayDashboard, users_token


@dataclass(frozen=True)
class RunOutcome:
    """How one run ended."""

    run_id: str
    state: Literal["succeeded", "failed", "stopped"]
    reason: str = ""


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

    def __post_init__(self) -> None:
        self._settings = ClusterSettings.from_config(self.cluster_config)
        self._views = {run.run_id: _view(run) for run in self.runs}
        self._outcomes: dict[str, RunOutcome] = {}
        self._ending: LocalCluster | None = None

    def run(self) -> SweepOutcome:
        """Run what is to be run.

        Before any run folder changes it raises ClusterError when there is no cluster, and BadInput when the cluster
        cannot take the runs or another sweep is starting one in its place.
        """
        title = f"study {self.study.path.name}, results in {self.study.path}"
        with Interrupts() as interrupts, display_for(list(self._views.values()), title) as display:
            to_run = [run for run in self.runs if not self._is_kept(run, display)]
            if to_run:
                self._run_on_a_cluster(to_run, interrupts, display)
            signal = interrupts.signal
        return SweepOutcome(self.study, [self._outcomes[run.run_id] for run in self.runs], signal, self._ending)

    def _is_kept(self, run: LaunchableRun, display: Display) -> bool:
        if run.kept:
            view = self._views[run.run_id]
            view.progress.refresh()
            view.enter("kept", "already succeeded, kept")
            display.changed(view)
            self._outcomes[run.run_id] = RunOutcome(run.run_id, "succeeded")
        return run.kept

    def _run_on_a_cluster(self, runs: Sequence[LaunchableRun], interrupts: Interrupts, display: Display) -> None:
        forget_other_clusters()
        if self._settings.address is not None:
            display.say(f"using the Ray cluster at {self._settings.address}")
            dashboard = RayDashboard(self._settings.address.rstrip("/"), users_token())
            self._run_all(runs, dashboard, interrupts, display)
            return
        local = LocalCluster(self._settings, workers=max(run.planned.config.recipe["n_workers"] for run in runs))
        try:
            self._start(local, interrupts, display)
            self._run_all(runs, local.dashboard, interrupts, display)
            if any(outcome.state == "failed" for outcome in self._outcomes.values()):
                kept = self.study.launcher / "ray_logs"
                local.keep_logs(kept)
                display.say(f"Ray's own logs are kept in {kept}")
        except BaseException:
            local.stop()
            raise
        local.begin_stop()
        self._ending = local

    def _start(self, local: LocalCluster, interrupts: Interrupts, display: Display) -> None:
        """Returns once the cluster is ready, or a signal came."""
        display.say(f"starting a Ray cluster on this machine, dashboard {local.dashboard.address}")
        began = time.monotonic()
        local.start()
        import ray.job_submission  # noqa: F401 - takes a second, while the cluster starts anyway

        limit = self._settings.start_timeout_s
        while not interrupts.asked:
            if local.is_ready():
                display.say(f"Ray is ready after {time.monotonic() - began:.1f} s; its token is in {local.token_file}")
                return
            if time.monotonic() - began > limit:
                raise ClusterError(
                    f"Ray did not answer within cluster.start_timeout_s={limit:g} s:\n{local.output_tail()}"
                )
            interrupts.pause(0.2)
            display.tick()

    def _run_all(
        self, runs: Sequence[LaunchableRun], dashboard: RayDashboard, interrupts: Interrupts, display: Display
    ) -> None:
        place = None if interrupts.asked else self._place(runs, dashboard, interrupts, display)
        for run in runs:
            if place is None or interrupts.asked:
                # What never ran gets no status; a folder of an earlier sweep stays as it is.
                self._end(run, "stopped", f"not started, the sweep was {interrupts.reason}", display)
                continue
            prepare_folder(run, self.study)
            status = OneRun(run, self._views[run.run_id], place).to_its_end()
            run.folder.write_status(status)
            if run.folder.tracking_error_file.exists():
                label, what_to_do = (
                    self._views[run.run_id].label,
                    f"python -m pipeline.dashboard sync {self.study.path}",
                )
                display.say(f"{label}: W&B has not received everything; later: {what_to_do}")
            self._views[run.run_id].took_s = status.ended_at - status.started_at
            self._end(run, status.state, status.reason, display)

    def _place(
        self, runs: Sequence[LaunchableRun], dashboard: RayDashboard, interrupts: Interrupts, display: Display
    ) -> Place:
        capacity = Capacity(dashboard, self._settings.worker_resource, shared=self._settings.address is not None)
        try:
            jobs = RayJobs(dashboard)
            capacity.check(runs)
        except (OSError, RuntimeError) as error:
            raise ClusterError(f"the Ray cluster at {dashboard.address} does not do its work: {error}") from error
        return Place(jobs, capacity, self._settings, self.entrypoint, interrupts, display)

    def _end(
        self, run: LaunchableRun, state: Literal["succeeded", "failed", "stopped"], reason: str, display: Display
    ) -> None:
        self._views[run.run_id].enter(state, reason)
        self._outcomes[run.run_id] = RunOutcome(run.run_id, state, reason)
        display.changed(self._views[run.run_id])


def _view(run: LaunchableRun) -> RunView:
    recipe = run.planned.config.recipe
    label = run.run_id.removeprefix(f"{recipe['run_prefix']}-")
    return RunView(label, Progress(run.folder, recipe["steps"]))
