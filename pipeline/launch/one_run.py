"""One run: from waiting for its workers to how it ended."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.launch.capacity import Capacity
from pipeline.launch.cluster import ClusterSettings
from pipeline.launch.display import Display, RunView
from pipeline.launch.failure_reason import failure_of
from pipeline.launch.interrupts import Interrupts
from pipeline.launch.jobs import CLUSTER_TROUBLE, ENDED, JobLog, JobSpec, JobState, RayJobs
from pipeline.launch.kept_runs import LaunchableRun
from pipeline.launch.stages import StageReader
from pipeline.study.records import Failure, Status

_POLL_S = 1.0


@dataclass(frozen=True)
class Place:
    """Where runs take place and who looks on."""

    jobs: RayJobs
    capacity: Capacity
    settings: ClusterSettings
    entrypoint: Sequence[str]
    interrupts: Interrupts
    display: Display


class OneRun:
    """A run on a cluster. Its folder holds config.yaml already; the caller writes status.json."""

    def __init__(self, run: LaunchableRun, view: RunView, place: Place) -> None:
        self._run = run
        self._view = view
        self._place = place
        self._submission_id: str | None = None
        self._started_at = time.time()
        self._stages = StageReader(run.folder.job_log_file)

    def to_its_end(self) -> Status:
        """Returns how it ended; whatever goes wrong with the job or the cluster is a failed run, not an exception."""
        self._view.started_at = time.monotonic()
        self._stage("asking the cluster")
        try:
            blocked_by = self._wait_for_workers()
            if self._place.interrupts.asked:
                return self._status("stopped", self._place.interrupts.reason)
            if blocked_by:
                limit = self._place.settings.free_timeout_s
                return self._failed(f"{blocked_by}, still after cluster.free_timeout_s={limit:g} s")
            return self._run_job()
        except CLUSTER_TROUBLE as error:
            return self._failed(f"the Ray cluster does not do what it is asked: {error}")

    def _wait_for_workers(self) -> str:
        """What is still in the way after cluster.free_timeout_s; empty when nothing is."""
        deadline = time.monotonic() + self._place.settings.free_timeout_s
        while (blocked_by := self._place.capacity.blocked_by(self._run)) and not self._place.interrupts.asked:
            if time.monotonic() > deadline:
                return blocked_by
            self._stage(f"waiting: {blocked_by}")
            self._place.interrupts.pause(_POLL_S)
            self._place.display.tick()
        return ""

    def _run_job(self) -> Status:
        spec = self._spec()
        self._place.jobs.submit(spec)
        self._submission_id = spec.submission_id
        self._stage("job submitted")
        log = JobLog(self._place.jobs, spec.submission_id, self._run.folder.job_log_file)
        log.start()
        try:
            state, message = self._until_ended(spec.submission_id)
        finally:
            log.finish()
        self._place.capacity.remember(self._place.jobs.driver_job_id(spec.submission_id))
        self._show_progress()
        if state == "failed":
            failure = failure_of(self._run.folder, message)
            return self._status("failed", failure.error, failure)
        if state == "succeeded":
            return self._status("succeeded")
        return self._status("stopped", self._place.interrupts.reason or f"stopped from outside: {message}")

    def _spec(self) -> JobSpec:
        config = self._run.planned.config
        return JobSpec(
            # Ray refuses an id twice in a cluster's life, and a cluster may outlive results/: hence the time.
            submission_id=f"{self._run.run_id}-a{self._run.attempt}-{int(self._started_at)}",
            run_folder=self._run.folder.path,
            env={name: str(value) for name, value in self._place.settings.env.items()},
            metadata={
                "study": config.study_name,
                "arm": self._run.planned.arm,
                "seed": str(config.seed),
                "pair": config.pair,
            },
            entrypoint=self._place.entrypoint,
        )

    def _until_ended(self, submission_id: str) -> tuple[JobState, str]:
        """The job's state at its end, and Ray's message; asks it to stop when a signal came."""
        while True:
            state, message = self._place.jobs.state(submission_id)
            if state in ENDED:
                return state, message
            if self._place.interrupts.asked:
                return self._stop_job(submission_id), ""
            self._show_progress()
            self._place.display.tick()
            self._place.interrupts.pause(_POLL_S)

    def _stop_job(self, submission_id: str) -> JobState:
        display, limit = self._place.display, self._place.settings.stop_timeout_s
        display.say(f"{self._view.label}: stopping the job")
        self._place.jobs.stop(submission_id)
        deadline = time.monotonic() + limit
        while (state := self._place.jobs.state(submission_id)[0]) not in ENDED:
            if time.monotonic() > deadline:
                display.say(f"{self._view.label}: the job has not ended within cluster.stop_timeout_s={limit:g} s")
                break
            time.sleep(0.5)
        # It may have come to its end by itself while we asked.
        return "succeeded" if state == "succeeded" else "stopped"

    def _show_progress(self) -> None:
        view = self._view
        if view.progress.refresh():
            if view.state == "starting":
                assert view.started_at is not None
                view.start_up_s = time.monotonic() - view.started_at - (view.progress.step_s or 0.0)
                view.enter("running")
            self._place.display.stepped(view)
        elif view.state == "starting" and (stage := self._stages.read()):
            self._stage(stage)

    def _stage(self, stage: str) -> None:
        if (self._view.state, self._view.stage) != ("starting", stage):
            self._view.enter("starting", stage)
            self._place.display.changed(self._view)

    def _failed(self, reason: str) -> Status:
        """The launcher itself found out."""
        return self._status("failed", reason, Failure(error=reason, where="launcher", time=time.time()))

    def _status(self, state: Any, reason: str = "", failure: Failure | None = None) -> Status:
        return Status(
            state=state,
            reason=reason,
            failure=failure,
            attempt=self._run.attempt,
            submission_id=self._submission_id,
            steps_done=self._view.progress.step,
            started_at=self._started_at,
            ended_at=time.time(),
        )
