"""What is submitted for a run, and how its log arrives complete."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import requests

from pipeline.launch import jobs as ray_jobs
from pipeline.launch.cluster import ClusterSettings, LocalCluster
from pipeline.launch.jobs import JobLog, JobSpec, RayJobs
from pipeline.launch.jobs import _patiently as patiently
from pipeline.study.paths import PROJECT


def spec(**changed: Any) -> JobSpec:
    given: dict[str, Any] = {
        "submission_id": "run-a1-1",
        "run_folder": Path("/results/run"),
        "env": {"VERL_PLATFORM": "cpu"},
        "metadata": {"arm": "pao"},
    }
    return JobSpec(**{**given, **changed})


def test_a_job_s_environment_says_all_that_workers_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert spec().env_vars() == {
        "VERL_PLATFORM": "cpu",
        "PIPELINE_RUN_FOLDER": "/results/run",
        "VERL_USE_EXTERNAL_MODULES": "pipeline.train.plugin",
        "PYTHONPATH": str(PROJECT),
    }


def test_secrets_of_this_process_stay_out_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert "secret" not in repr(spec())
    assert "secret" not in str(spec().env_vars())


def test_the_command_is_quoted() -> None:
    assert spec(entrypoint=("/a b/python", "-m", "pipeline.train")).command() == "'/a b/python' -m pipeline.train"


class Client:
    """Ray's client, as far as submitting goes. `lose`: so many answers get lost after the job was taken."""

    def __init__(self, lose: int = 0) -> None:
        self.taken: list[str] = []
        self._lose = lose

    def submit_job(self, submission_id: str, **_: Any) -> str:
        if submission_id in self.taken:
            raise RuntimeError("submission_id has been used already")
        self.taken.append(submission_id)
        if self._lose:
            self._lose -= 1
            raise requests.ConnectionError("answer lost")
        return submission_id

    def list_jobs(self) -> list[Any]:
        return [type("Job", (), {"submission_id": one}) for one in self.taken]


def jobs_of(client: Client, monkeypatch: pytest.MonkeyPatch) -> RayJobs:
    monkeypatch.setattr(ray_jobs, "_patiently", lambda _: patiently(0.05))
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)
    jobs = RayJobs.__new__(RayJobs)
    monkeypatch.setattr(jobs, "_client", client, raising=False)
    return jobs


def test_a_lost_answer_does_not_submit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(lose=1)
    jobs_of(client, monkeypatch).submit(spec())
    assert client.taken == ["run-a1-1"]


def test_somebody_else_s_job_with_our_id_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    client.taken.append("run-a1-1")
    with pytest.raises(RuntimeError, match="has been used already"):
        jobs_of(client, monkeypatch).submit(spec())


class LogSource:
    """Jobs whose log ends too early when it is followed: each time, `pieces` more arrive. The whole is more still."""

    def __init__(self, whole: str, ends_at: list[int]) -> None:
        self.whole, self.ends_at, self.followed = whole, ends_at, 0
        self.all_followed = threading.Event()

    async def tail(self, _: str) -> AsyncIterator[str]:
        end = self.ends_at[min(self.followed, len(self.ends_at) - 1)]
        self.followed += 1
        for start in range(0, end, 7):
            yield self.whole[start : min(start + 7, end)]
        if self.followed >= len(self.ends_at):
            self.all_followed.set()
        if self.followed == 2:
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def whole_log(self, _: str) -> str:
        return self.whole


def test_a_log_is_followed_on_where_it_broke_off_and_completed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = "".join(f"line {number} – ü\n" for number in range(20)) + "progress 50%\rprogress 100%\n"
    source = LogSource(whole, [20, 45, 90])
    log = JobLog(source, "run", tmp_path / "job.log")  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(log._finishing, "wait", lambda _: None)
    log.start()
    assert source.all_followed.wait(10)
    log.finish()
    assert (tmp_path / "job.log").read_bytes() == whole.encode()


def test_what_was_followed_is_written_as_it_comes(tmp_path: Path) -> None:
    source = LogSource("x" * 70 + "\n", [30])
    log = JobLog(source, "run", tmp_path / "job.log")  # pyright: ignore[reportArgumentType]
    log.start()
    assert source.all_followed.wait(10)
    assert (tmp_path / "job.log").read_text() == "x" * 30
    log.finish()


def test_the_cluster_s_token_is_in_a_private_file_and_nowhere_else(cluster: dict[str, Any]) -> None:
    local = LocalCluster(ClusterSettings.from_config(cluster), workers=2)
    try:
        token = local.dashboard.token
        assert len(token) == 64
        assert not local.token_file.exists()
        assert token not in str(local._command())
        assert token not in repr(local.dashboard)
        # Ray's sockets lie below; their path may have 107 bytes, of which Ray itself needs about 75.
        assert len(str(local.folder)) < 25
        assert local.folder.stat().st_mode & 0o077 == 0
    finally:
        local.stop()
    assert not local.folder.exists()
