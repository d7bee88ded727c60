"""The command on a real Ray cluster, with trivial jobs in place of training."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pipeline.launch.cluster import ClusterSettings, LocalCluster
from pipeline.launch.jobs import ENDED, JobSpec, JobState, RayJobs
from pipeline.study import json_lines
from pipeline.study.paths import PROJECT
from pipeline.study.records import Status
from pipeline.study.run_folder import RunFolder

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("sweep_of_trivial_jobs.py")
PREFIX = "grpo-tiny-1n1g-tp1pp1"
# A start takes ten seconds on an idle machine.
PATIENCE_S = 400


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_sweep(results: Path, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), f"results_dir={results}", "study_name=trivial", *overrides],
        cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT), **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def sweep(results: Path, *overrides: str, **environment: str) -> tuple[int, str]:
    process = start_sweep(results, *overrides, **environment)
    output, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output


def status_of(results: Path, run: str) -> Status:
    status = RunFolder(results / "trivial" / "runs" / f"{PREFIX}-{run}").read_status()
    assert status is not None
    return status


def job_log(results: Path, run: str) -> str:
    return (results / "trivial" / "runs" / f"{PREFIX}-{run}" / "job.log").read_text()


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """The output's lines up to the one with `text`."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"never said {text!r}:\n{''.join(lines)}")


def members(session: int) -> list[str]:
    """Processes of a cluster's session: what a sweep must not leave behind."""
    return [f"{one.pid} {one.info['name']}" for one in psutil.process_iter(["name"]) if session_of(one.pid) == session]


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def head_node_of(process: subprocess.Popen[str]) -> int:
    (head,) = [child for child in psutil.Process(process.pid).children() if "head_node.py" in " ".join(child.cmdline())]
    return head.pid


def gone(session: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while members(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def pid_of_job(results: Path, run: str) -> int:
    return int((results / "trivial" / "runs" / f"{PREFIX}-{run}" / "pid").read_text())


def test_a_sweep_on_a_cluster_of_its_own(tmp_path: Path) -> None:
    process = start_sweep(
        tmp_path,
        f"cluster.dashboard_port={free_port()}",
        "arm=pao",
        "recipe.steps=3",
        "+recipe.trivial=succeeds,fails,remote_error",
        # Somebody else's cluster, which must not be asked.
        RAY_ADDRESS="http://127.0.0.1:9",
        RAY_AUTH_TOKEN="not ours",
        WANDB_API_KEY="a-secret-key",
    )
    said = read_until(process, "job submitted")
    session = head_node_of(process)
    token_file = Path("".join(said).split("its token is in ")[1].split()[0])
    token = token_file.read_text()
    rest, _ = process.communicate(timeout=PATIENCE_S)
    output = "".join(said) + rest

    assert process.returncode == 1, output
    succeeded = status_of(tmp_path, "pao-s1-trivialsucceeds")
    failed = status_of(tmp_path, "pao-s1-trivialfails")
    remote = status_of(tmp_path, "pao-s1-trivialremote_error")
    assert (succeeded.state, succeeded.steps_done, succeeded.reason) == ("succeeded", 3, "")
    assert (failed.state, failed.steps_done, failed.reason) == ("failed", 2, "ValueError: the second step went wrong")
    assert (remote.state, remote.reason) == ("failed", "RuntimeError: rank 0 ran out of luck")
    assert failed.failure is not None
    assert "trivial_job.py" in failed.failure.traceback
    assert "trivial job: done" in job_log(tmp_path, "pao-s1-trivialsucceeds")
    assert "the second step went wrong" in job_log(tmp_path, "pao-s1-trivialfails").splitlines()[-1]

    assert "pao-s1-trivialsucceeds: step 3 of 3" in output
    assert "pao-s1-trivialfails: failed: ValueError: the second step went wrong" in output
    assert f"report: {tmp_path}/trivial/report.md" in output
    assert "ran out of luck" in (tmp_path / "trivial" / "report.md").read_text()
    assert {path.name for path in (tmp_path / "trivial").iterdir()} >= {"runs", "launcher", "report.md", "summary.json"}
    assert any((tmp_path / "trivial" / "launcher" / "ray_logs").iterdir())

    # The cluster has the key by inheritance; it stands nowhere, and neither does the cluster's token.
    assert "its cluster has a key" in job_log(tmp_path, "pao-s1-trivialsucceeds")
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        content = file.read_bytes()
        assert b"a-secret-key" not in content, file
        assert token.encode() not in content, file
    assert "a-secret-key" not in output
    assert token not in output

    assert gone(session, 1), members(session)
    assert not token_file.parent.exists()


def test_ctrl_c_stops_the_job_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start_sweep(
        tmp_path,
        f"cluster.dashboard_port={free_port()}",
        "arm=baseline,pao",
        "recipe.steps=5000",
        "+recipe.step_s=0.5",
        "+recipe.trivial=succeeds",
    )
    read_until(process, ": step ")
    session, job = head_node_of(process), pid_of_job(tmp_path, "baseline-s1")
    assert alive(job)
    # As a terminal does it: to every process of the foreground group.
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 130, output
    status = status_of(tmp_path, "baseline-s1")
    assert (status.state, status.reason) == ("stopped", "stopped by Ctrl-C (SIGINT)")
    assert status.steps_done >= 1
    assert "pao-s1: stopped: not started, the sweep was stopped by Ctrl-C (SIGINT)" in output
    assert not (tmp_path / "trivial" / "runs" / f"{PREFIX}-pao-s1").exists()
    assert (tmp_path / "trivial" / "report.md").exists()
    assert "Traceback" not in output
    assert not alive(job)
    assert gone(session, 1), members(session)


def test_a_killed_sweep_leaves_no_cluster(tmp_path: Path) -> None:
    process = start_sweep(
        tmp_path, f"cluster.dashboard_port={free_port()}", "arm=pao", "recipe.steps=5000", "+recipe.step_s=0.5",
        "+recipe.trivial=succeeds",
    )  # fmt: skip
    read_until(process, ": step ")
    session, job = head_node_of(process), pid_of_job(tmp_path, "pao-s1")
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert gone(session, 30), members(session)
    assert not alive(job)


def new_cluster() -> LocalCluster:
    with initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
        settings = OmegaConf.to_container(compose("sweep").cluster, resolve=True)
    assert isinstance(settings, dict)
    mine = {**{str(name): value for name, value in settings.items()}, "dashboard_port": free_port()}
    return LocalCluster(ClusterSettings.from_config(mine), workers=1)


def wait_until_ready(cluster: LocalCluster) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not cluster.is_ready():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def running() -> Iterator[LocalCluster]:
    """A cluster that is there already, and stays; this process's environment has its token."""
    cluster = new_cluster()
    cluster.start()
    try:
        wait_until_ready(cluster)
        yield cluster
    finally:
        cluster.stop()


def how_a_job_that_connects_ends(cluster: LocalCluster, folder: Path) -> JobState:
    jobs = RayJobs(cluster.dashboard)
    entrypoint = [sys.executable, "-c", "import ray; ray.init()"]
    jobs.submit(JobSpec("connects", run_folder=folder, env={}, metadata={}, entrypoint=entrypoint))
    deadline = time.monotonic() + PATIENCE_S
    while (state := jobs.state("connects")[0]) not in ENDED:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return state


def test_a_second_start_is_not_answered_by_what_the_first_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A dashboard that outlives its head node would take jobs for a cluster that is gone."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"):
        monkeypatch.setenv(name, "set by start()")  # and taken back after the test
    cluster = new_cluster()
    cluster.start()
    try:
        wait_until_ready(cluster)
        first = cluster.processes()
        (head,) = (process for process in first if "head_node.py" in " ".join(process.cmdline()))
        head.kill()
        psutil.wait_procs([head], timeout=10)
        assert not cluster.is_ready()
        assert not [process for process in first if alive(process.pid)]
        wait_until_ready(cluster)
        assert how_a_job_that_connects_ends(cluster, tmp_path) == "succeeded"
    finally:
        cluster.stop()


def test_a_running_cluster_is_used_and_left_running_and_what_succeeded_is_kept(
    running: LocalCluster, tmp_path: Path
) -> None:
    address = f"cluster.address={running.dashboard.address}"
    status, output = sweep(tmp_path, address, "arm=pao,baseline", "recipe.steps=2", "+recipe.trivial=succeeds")
    assert status == 0, output
    first = status_of(tmp_path, "pao-s1")
    assert output.index("pao-s1: succeeded") < output.index("baseline-s1: starting")

    baseline = RunFolder(tmp_path / "trivial" / "runs" / f"{PREFIX}-baseline-s1")
    baseline.write_status(status_of(tmp_path, "baseline-s1").model_copy(update={"state": "failed"}))
    status, output = sweep(tmp_path, address, "arm=pao,baseline", "recipe.steps=2", "+recipe.trivial=succeeds")
    assert status == 0, output
    assert "pao-s1: kept: already succeeded, kept" in output
    assert status_of(tmp_path, "pao-s1") == first
    assert status_of(tmp_path, "baseline-s1").attempt == 2
    assert (tmp_path / "trivial" / "attempts" / f"{PREFIX}-baseline-s1-a1" / "steps.jsonl").exists()
    rows = [json_lines.loads(line) for line in baseline.steps_file.read_bytes().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]

    status, output = sweep(tmp_path, address, "arm=pao", "recipe.steps=3", "+recipe.trivial=succeeds")
    assert status == 2
    assert "recipe.steps: 2 then, 3 now" in output
    assert running.is_ready()


def test_a_job_that_is_stopped_from_outside_is_a_stopped_run(running: LocalCluster, tmp_path: Path) -> None:
    from ray.job_submission import JobSubmissionClient

    address = running.dashboard.address
    process = start_sweep(
        tmp_path, f"cluster.address={address}", "arm=pao", "recipe.steps=5000", "+recipe.step_s=0.5",
        "+recipe.trivial=succeeds",
    )  # fmt: skip
    read_until(process, ": step ")
    client = JobSubmissionClient(address, headers=running.dashboard.headers)
    (job,) = [job for job in client.list_jobs() if job.submission_id and job.status == "RUNNING"]
    assert job.metadata == {"study": "trivial", "arm": "pao", "seed": "1", "pair": f"{PREFIX}-s1"}
    assert job.submission_id is not None
    client.stop_job(job.submission_id)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, output
    status = status_of(tmp_path, "pao-s1")
    assert status.state == "stopped"
    assert status.reason.startswith("stopped from outside")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.dashboard_port={port}", "cluster.dashboard_port={port} is in use on this machine"),
        ("cluster.address=http://127.0.0.1:{port} recipe.n_workers=2", "has too little verl_slot (its nodes offer 1)"),
    ],
)
def test_what_cannot_work_beside_or_on_a_running_cluster(
    running: LocalCluster, tmp_path: Path, override: str, words: str
) -> None:
    port = running.dashboard.address.rpartition(":")[2]
    overrides = override.format(port=port).split()
    status, output = sweep(tmp_path, *overrides, "recipe.micro_batch_size=4", "+recipe.trivial=succeeds")
    assert status == 2, output
    assert words.format(port=port) in output
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_with_another_token_is_told(running: LocalCluster, tmp_path: Path) -> None:
    other = tmp_path / "token"
    other.write_text("0" * 64)
    address = f"cluster.address={running.dashboard.address}"
    status, output = sweep(tmp_path / "results", address, "+recipe.trivial=succeeds", RAY_AUTH_TOKEN_PATH=str(other))
    assert status == 2, output
    assert "asks for another token" in output
