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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

# Every process of a cluster that we start carries this variable: it is how all of them are found again, and no others.
_MARK = "PIPELINE_CLUSTER_MARK"
# They would send our requests, or the new cluster's, to somebody else's cluster.
_HIJACKING = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS")


class ClusterError(RuntimeError):
    """The cluster did not start or does not answer."""


@dataclass(frozen=True)
class ClusterSettings:
    """conf/cluster/*.yaml without the environment of the jobs."""

    address: str | None
    dashboard_port: int
    worker_resource: str
    num_cpus: int | None
    object_store_memory_mb: int | None
    start_timeout_s: float
    free_timeout_s: float
    stop_timeout_s: float

    @classmethod
    def from_config(cls, cluster: dict[str, Any]) -> "ClusterSettings":
        return cls(**{name: cluster[name] for name in cls.__dataclass_fields__})


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
        self.address = f"http://127.0.0.1:{settings.dashboard_port}"

    def start(self) -> None:
        """Start the head node; returns at once. `wait_until_ready` follows."""
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        # Ray reads these when it is first imported: here for our own requests, in the child for the cluster.
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(self.token_file))
        environment = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
        environment.update({_MARK: self._mark, "RAY_USAGE_STATS_ENABLED": "0"})
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
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
            "--port=0", f"--ray-client-server-port={_free_port()}", f"--temp-dir={self.folder / 'ray'}",
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
        return ask(f"{self.address}/api/version", timeout=2.0) is not None and bool(alive_nodes(self.address))

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


def token_headers() -> dict[str, str]:
    """The HTTP header that Ray's token authentication asks for; empty where the user has no token."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    token = os.environ.get("RAY_AUTH_TOKEN") or (file.read_text().strip() if file.is_file() else "")
    return {"Authorization": f"Bearer {token}"} if token else {}


def ask(url: str, timeout: float = 10.0) -> dict[str, Any] | None:
    """GET a JSON document of the dashboard; None where nobody listens or the server is not ready yet."""
    try:
        response = requests.get(url, headers=token_headers(), timeout=timeout)
    except (requests.ConnectionError, requests.Timeout):
        return None
    return response.json() if response.ok else None


def alive_nodes(address: str) -> list[dict[str, Any]]:
    """The cluster's nodes by Ray's state API, each with `resources_total`."""
    return listed(address, "nodes?detail=1&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE")


def actors_not_dead(address: str) -> list[dict[str, Any]]:
    """The cluster's actors by Ray's state API, each with `job_id`, `name` and `state`."""
    return listed(address, "actors?limit=10000&filter_keys=state&filter_predicates=!%3D&filter_values=DEAD")


def listed(address: str, what: str) -> list[dict[str, Any]]:
    answer = ask(f"{address}/api/v0/{what}")
    return [] if answer is None else answer["data"]["result"]["result"]
