"""Ray jobs: one per run, through Ray's Job Submission API."""

import asyncio
import contextlib
import logging
import os
import shlex
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import requests
import tenacity

from pipeline.launch.ray_dashboard import RayDashboard
from pipeline.study.paths import PROJECT
from pipeline.study.run_folder import RUN_FOLDER_VARIABLE, write_atomically

JobState = Literal["pending", "running", "succeeded", "failed", "stopped"]
ENDED: frozenset[JobState] = frozenset({"succeeded", "failed", "stopped"})

TRAIN: tuple[str, ...] = (sys.executable, "-m", "pipeline.train")
"""What a job runs."""
PLUGIN = "pipeline.train.plugin"
"""What verl imports in every process of a job."""

log = logging.getLogger(__name__)

CLUSTER_TROUBLE = (requests.RequestException, RuntimeError)
"""What asking a cluster can raise: it does not answer, or (Ray's client) answers with anything but status 200."""


# The dashboard of a busy machine answers late now and then: that is no reason to give a run up.
def _patiently(seconds: float) -> tenacity.Retrying:
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(CLUSTER_TROUBLE),
        wait=tenacity.wait_exponential(multiplier=0.5, max=5),
        stop=tenacity.stop_after_delay(seconds),
        reraise=True,
    )


@dataclass(frozen=True)
class JobSpec:
    """What to submit for one run."""

    submission_id: str
    run_folder: Path
    env: Mapping[str, str]
    metadata: Mapping[str, str]
    entrypoint: Sequence[str] = field(default=TRAIN)

    def command(self) -> str:
        return shlex.join(self.entrypoint)

    def env_vars(self) -> dict[str, str]:
        """Workers inherit the raylet's environment, not ours: all that a job needs to know is here. No secrets."""
        variables = {**self.env, RUN_FOLDER_VARIABLE: str(self.run_folder), "VERL_USE_EXTERNAL_MODULES": PLUGIN}
        if PROJECT.name != "site-packages":
            # The job's value replaces the cluster's: packages that lie on PYTHONPATH (docs/gpu.md) must stay there.
            ours = os.environ.get("PYTHONPATH")
            variables["PYTHONPATH"] = f"{PROJECT}{os.pathsep}{ours}" if ours else str(PROJECT)
        return variables


class RayJobs:
    """The jobs of one cluster. Every method raises one of CLUSTER_TROUBLE when the cluster is in trouble for long."""

    def __init__(self, dashboard: RayDashboard) -> None:
        from ray.job_submission import JobSubmissionClient

        # It tells whenever a log has been followed to its end.
        logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)
        self._client = JobSubmissionClient(dashboard.address, headers=dashboard.headers)

    def submit(self, spec: JobSpec) -> None:
        answer_lost = False
        for attempt in _patiently(20):
            with attempt:
                # Then the job may be there already, and Ray would refuse its id.
                if answer_lost and self._exists(spec.submission_id):
                    return
                try:
                    self._submit(spec)
                except requests.RequestException:
                    answer_lost = True
                    raise

    def _submit(self, spec: JobSpec) -> None:
        self._client.submit_job(
            entrypoint=spec.command(),
            submission_id=spec.submission_id,
            runtime_env={"env_vars": spec.env_vars()},
            metadata=dict(spec.metadata),
            # Reserved apart from what the trainer's actors take: the job's own process needs none.
            entrypoint_num_gpus=0,
        )

    def _exists(self, submission_id: str) -> bool:
        return any(job.submission_id == submission_id for job in self._client.list_jobs())

    def state(self, submission_id: str) -> tuple[JobState, str]:
        """The job's state, which is the authority on how it is going, and Ray's message."""
        job = _patiently(60)(self._client.get_job_info, submission_id)
        state: Any = job.status.value.lower()
        return state, job.message or ""

    def stop(self, submission_id: str) -> None:
        """Ask the job to end; it ends later (Ray kills it after 3 s)."""
        _patiently(10)(self._client.stop_job, submission_id)

    def driver_job_id(self, submission_id: str) -> str | None:
        """Ray's own id of the job's driver (for its actors); None when it never connected to Ray."""
        return _patiently(10)(self._client.get_job_info, submission_id).job_id

    def whole_log(self, submission_id: str) -> str:
        return _patiently(10)(self._client.get_job_logs, submission_id)

    def tail(self, submission_id: str) -> AsyncIterator[str]:
        """The log from its start, as it grows."""
        return self._client.tail_job_logs(submission_id)


class JobLog:
    """Streams a job's log into job.log while the job runs, and makes the file complete at the end.

    Following a log can end while its job is running, so it starts again where it left off until `finish`.
    """

    def __init__(self, jobs: RayJobs, submission_id: str, file: Path) -> None:
        self._jobs = jobs
        self._submission_id = submission_id
        self._file = file
        self._written = 0
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"log of {submission_id}", daemon=True)

    def start(self) -> None:
        self._file.touch()
        self._thread.start()

    def _follow(self) -> None:
        import aiohttp  # with ray: half a second

        while not self._finishing.is_set():
            try:
                asyncio.run(self._follow_until_finishing())
            except (RuntimeError, OSError, aiohttp.ClientError) as error:
                # The job's state is asked for elsewhere, and `finish` fetches what is missing here.
                log.debug("following the log of %s ended: %r", self._submission_id, error)
            self._finishing.wait(1.0)

    async def _follow_until_finishing(self) -> None:
        """Ray goes on for seconds after a job's last line: not waited for, `finish` has the whole log anyway."""
        following = asyncio.create_task(self._follow_once())
        while not following.done() and not self._finishing.is_set():
            await asyncio.wait({following}, timeout=0.1)
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following

    async def _follow_once(self) -> None:
        """Ray sends the whole log from its start: skip what is written already."""
        seen = 0
        with self._file.open("a", encoding="utf-8", errors="replace") as file:
            async for lines in self._jobs.tail(self._submission_id):
                fresh = lines[max(self._written - seen, 0) :]
                seen += len(lines)
                if fresh:
                    file.write(fresh)
                    file.flush()
                    self._written += len(fresh)

    def finish(self) -> None:
        """Call after the job ended."""
        self._finishing.set()
        self._thread.join(timeout=5.0)
        whole = self._jobs.whole_log(self._submission_id).encode(errors="replace")
        if whole != self._file.read_bytes():
            write_atomically(self._file, whole)
