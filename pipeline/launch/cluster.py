"""The Ray cluster of a sweep: one that is named, or one that is started here and stopped again."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import pydantic
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from pipeline.launch.dashboard_port import claim_port
from pipeline.launch.errors import ClusterError
from pipeline.launch.ray_dashboard import RayDashboard

# They would send our requests, or the new cluster's, to somebody else's cluster.
_HIJACKING = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
# RAY_AUTH_TOKEN would win over the token file; the other is this process's own setting.
_NOT_INHERITED = ("RAY_AUTH_TOKEN", "HYDRA_FULL_ERROR")
_HEAD_NODE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Idle workers, started beforehand: jobs cannot use them, because each job has an environment of its own.
    "RAY_prestart_worker_first_driver": "0",
    # When the head node is asked to end, the jobs have ended or are to end at once.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


class ClusterSettings(pydantic.BaseModel):
    """conf/cluster/*.yaml; conf/cluster/base.yaml says what the fields mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    address: str | None
    dashboard_port: Annotated[int, Field(ge=1024, le=65535)]
    worker_resource: str
    num_cpus: PositiveInt | None
    # Ray refuses less.
    object_store_memory_mb: Annotated[int, Field(ge=75)]
    start_timeout_s: PositiveFloat
    free_timeout_s: PositiveFloat
    stop_timeout_s: PositiveFloat
    env: dict[str, str | int | float]

    @classmethod
    def from_config(cls, cluster: Mapping[str, Any]) -> "ClusterSettings":
        """cluster: the composed group, resolved. Raises pydantic.ValidationError."""
        return cls.model_validate(cluster)


def forget_other_clusters() -> None:
    """Take variables that redirect Ray's clients out of this process's environment."""
    for name in _HIJACKING:
        os.environ.pop(name, None)


class LocalCluster:
    """A head node on this machine with its dashboard on 127.0.0.1 and token authentication.

    The token lies in a file that only this user can read; processes learn the file's name, never the token itself.
    """

    def __init__(self, settings: ClusterSettings, workers: int) -> None:
        """workers: how many of `worker_resource` the node offers (counted by Ray itself where that is GPU).

        Raises BadInput where another sweep has claimed the dashboard's port; `stop` gives it back.
        """
        self._claim = claim_port(settings.dashboard_port)
        self._settings = settings
        self._workers = workers
        self._process: subprocess.Popen[bytes] | None = None
        self._starts_left = 1
        self._at_stop: list[psutil.Process] = []
        # Short, because Ray puts Unix sockets below it and their path may have 107 bytes at most.
        self.folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
        self.token_file = self.folder / "token"
        self.dashboard = RayDashboard(f"http://127.0.0.1:{settings.dashboard_port}", secrets.token_hex(32))

    def start(self) -> None:
        """Start the head node; returns at once. Ask `is_ready` until it is."""
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.dashboard.token)
        # Ray notes its address there, and takes for granted that somebody made the folder.
        (self.folder / "ray").mkdir()
        # In this process too, so that Ray's own tools find the cluster when they are started from here.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(self.token_file), RAY_TMPDIR=str(self.folder))
        # The cluster and its workers inherit this environment (among it WANDB_API_KEY, which so reaches them unseen).
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        environment.update(_HEAD_NODE)
        self._start_process(environment)

    def _start_process(self, environment: dict[str, str]) -> None:
        self._environment = environment
        with self._output_file.open("ab") as output:
            # Of its own session, so that Ctrl-C at the terminal reaches this process only and the jobs end in order.
            self._process = subprocess.Popen(
                self._command(), env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    @property
    def _output_file(self) -> Path:
        return self.folder / "head_node.log"

    def _command(self) -> list[str]:
        gpu = self._settings.worker_resource == "GPU"
        arguments = {
            "include_dashboard": True,
            "dashboard_host": "127.0.0.1",
            "dashboard_port": self._settings.dashboard_port,
            # A free one: a host may hold several clusters.
            "dashboard_agent_listen_port": 0,
            "no_monitor": True,
            "num_cpus": self._settings.num_cpus,
            "num_gpus": None if gpu else 0,
            "resources": {} if gpu else {self._settings.worker_resource: self._workers},
            "object_store_memory": self._settings.object_store_memory_mb * 10**6,
        }
        return [sys.executable, str(Path(__file__).with_name("head_node.py")), json.dumps(arguments)]

    def is_ready(self) -> bool:
        """True once the dashboard takes jobs. Raises ClusterError when the head node has ended, twice."""
        assert self._process is not None
        if self._process.poll() is not None:
            if self._starts_left:
                # Ray gives up after 30 s, which a busy machine may need at first. What it leaves behind would answer in
                # the new cluster's place: a dashboard whose cluster is gone.
                self._starts_left -= 1
                _kill_all(self.processes())
                self._start_process(self._environment)
                return False
            raise ClusterError(f"Ray did not start (exit status {self._process.returncode}):\n{self.output_tail()}")
        return self.dashboard.answers()

    def output_tail(self) -> str:
        return "\n".join(self._output_file.read_text(errors="replace").splitlines()[-20:])

    def processes(self) -> list[psutil.Process]:
        """Every living process of this cluster: those of the head node's session, and all that they started (jobs)."""
        if self._process is None:
            return []
        living = {process.pid: process for process in psutil.process_iter(["ppid"])}
        found = {pid for pid in living if _session(pid) == self._process.pid}
        while more := {pid for pid, process in living.items() if process.info["ppid"] in found} - found:
            found |= more
        return [living[pid] for pid in found]

    def begin_stop(self) -> None:
        """Ask the cluster to end; returns at once. `stop` makes sure."""
        # Now, while it shows who started whom.
        self._at_stop = self.processes()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, grace_s: float = 10.0) -> None:
        """End every process of the cluster, politely and then not; remove its folder."""
        if not self._at_stop:
            self.begin_stop()
        if self._process is not None:
            try:
                self._process.wait(timeout=grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            _, left = psutil.wait_procs(self._at_stop, timeout=2.0)
            _kill_all([*left, *self.processes()])
        shutil.rmtree(self.folder, ignore_errors=True)
        self._claim.close()

    def keep_logs(self, folder: Path) -> None:
        """Copy Ray's own logs, which explain a node that died, to `folder`."""
        sessions = [path for path in (self.folder / "ray").glob("session_*") if not path.is_symlink()]
        for session in sessions:
            shutil.copytree(session / "logs", folder / session.name, dirs_exist_ok=True)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5.0)
