"""The Ray cluster of a sweep: one that is named, or one that is started here and stopped again."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Annotated

import psutil
import pydantic
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from pipeline.launch.errors import ClusterError
from pipeline.launch.ray_dashboard import RayDashboard

# Every process of a cluster that we start carries this variable: it is how all of them are found again, and no others.
_MARK = "PIPELINE_CLUSTER_MARK"
# They would send our requests, or the new cluster's, to somebody else's cluster.
_HIJACKING = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
# RAY_AUTH_TOKEN would win over the token file; the other is this process's own setting.
_NOT_INHERITED = ("RAY_AUTH_TOKEN", "HYDRA_FULL_ERROR")


class ClusterSettings(pydantic.BaseModel):
    """conf/cluster/*.yaml; conf/cluster/base.yaml says what the fields mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    address: str | None
    dashboard_port: Annotated[int, Field(ge=1024, le=65535)]
    worker_resource: str
    num_cpus: PositiveInt | None
    # Ray refuses less.
    object_store_memory_mb: Annotated[int, Field(ge=75)] | None
    start_timeout_s: PositiveFloat
    free_timeout_s: PositiveFloat
    stop_timeout_s: PositiveFloat
    env: dict[str, str | int | float]


def forget_other_clusters() -> None:
    """Take variables that redirect Ray's clients out of this process's environment."""
    for name in _HIJACKING:
        os.environ.pop(name, None)


class LocalCluster:
    """A head node on this machine with its dashboard on 127.0.0.1 and token authentication.

    The token lies in a file that only this user can read; processes learn the file's name, never the token itself.
    """

    def __init__(self, settings: ClusterSettings, workers: int) -> None:
        """workers: how many of `worker_resource` the node offers (counted by Ray itself where that is GPU)."""
        self._settings = settings
        self._workers = workers
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        # Short, because Ray puts Unix sockets below it and their path may have 107 bytes at most.
        self.folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
        self.token_file = self.folder / "token"
        self.dashboard = RayDashboard(f"http://127.0.0.1:{settings.dashboard_port}", secrets.token_hex(32))

    def start(self) -> None:
        """Start the head node; returns at once. `wait_until_ready` follows."""
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.dashboard.token)
        # The cluster and its workers inherit this environment (among it WANDB_API_KEY, which so reaches them unseen).
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        environment.update(
            {
                _MARK: self._mark,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(self.token_file),
                "RAY_USAGE_STATS_ENABLED": "0",
            }
        )
        with self._output_file.open("wb") as output:
            # Of its own session, so that Ctrl-C at the terminal reaches this process only and the jobs end in order.
            self._process = subprocess.Popen(
                self._command(), env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    @property
    def _output_file(self) -> Path:
        return self.folder / "ray_start.log"

    def _command(self) -> list[str]:
        settings = self._settings
        command = [
            sys.executable, str(Path(__file__).with_name("dying_with_parent.py")),
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
            "--port=0", f"--ray-client-server-port={_free_port()}", f"--temp-dir={self.folder / 'ray'}",
            # No cluster to scale: without its monitor a head node starts faster.
            "--no-monitor",
            "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={settings.dashboard_port}",
        ]  # fmt: skip
        if settings.num_cpus is not None:
            command.append(f"--num-cpus={settings.num_cpus}")
        if settings.object_store_memory_mb is not None:
            command.append(f"--object-store-memory={settings.object_store_memory_mb * 10**6}")
        if settings.worker_resource != "GPU":
            command.append(f"--resources={json.dumps({settings.worker_resource: self._workers})}")
        return command

    def is_ready(self) -> bool:
        """True once the dashboard takes jobs. Raises ClusterError when the cluster has ended or takes too long."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise ClusterError(f"Ray did not start (exit status {self._process.returncode}):\n{self.output_tail()}")
        return self.dashboard.answers()

    def output_tail(self) -> str:
        return "\n".join(self._output_file.read_text(errors="replace").splitlines()[-20:])

    def processes(self) -> list[psutil.Process]:
        """Every living process of this cluster, workers and jobs included."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == self._mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            # Ended meanwhile, or another user's.
            return False

    def stop(self, grace_s: float = 10.0) -> None:
        """End every process of the cluster, politely and then not; remove its folder."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                try:
                    self._process.wait(timeout=grace_s)
                except subprocess.TimeoutExpired:
                    self._process.kill()
            left = self.processes()
            for process in left:
                _send(process, signal.SIGTERM)
            _, alive = psutil.wait_procs(left, timeout=2.0)
            for process in alive:
                _send(process, signal.SIGKILL)
            psutil.wait_procs(alive, timeout=5.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def keep_logs(self, folder: Path) -> None:
        """Copy Ray's own logs, which explain a node that died, to `folder`."""
        sessions = [path for path in (self.folder / "ray").glob("session_*") if not path.is_symlink()]
        for session in sessions:
            shutil.copytree(session / "logs", folder / session.name, dirs_exist_ok=True)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
