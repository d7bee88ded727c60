"""The live mirror with the real wandb client, against a stand-in of the W&B server on this machine."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from offline_run import history_of
from study_folders import append_step, assert_same_rows, end_run, make_run, until
from wandb_stand_in import API_KEY, WandbStandIn, dead_address

from pipeline.callbacks.wandb_monitor import WandbMonitor
from pipeline.study.run_folder import RunFolder
from pipeline.tracking import mirror
from pipeline.tracking.rows import all_rows

pytestmark = pytest.mark.slow


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbStandIn]:
    with WandbStandIn() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


def train(folder: RunFolder, steps: int = 3, finish_timeout_s: float = 20.0) -> float:
    """Write the rows of a run under a monitor; returns the longest time that the monitor took of a step, seconds."""
    monitor = WandbMonitor(folder, finish_timeout_s)
    monitor.begin()
    longest = 0.0
    for step in range(1, steps + 1):
        append_step(folder, step)
        started = time.perf_counter()
        monitor.log(step, {})
        longest = max(longest, time.perf_counter() - started)
        time.sleep(0.2)
    monitor.finish(0)
    return longest


def tracking_error(folder: RunFolder) -> dict[str, object]:
    return json.loads(folder.tracking_error_file.read_text())


def test_a_run_arrives_complete(server: WandbStandIn, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "my_study", arm="pao")
    train(folder)
    assert not folder.tracking_error_file.exists()
    (run,) = server.runs.values()
    assert run.name == run.display_name == folder.path.name == "grpo-tiny-pao-s1"
    assert (run.project, run.group, run.job_type) == ("test-project", "my_study/grpo-tiny-s1", "pao")
    assert run.tags == ["tiny_cpu", "embedded", "pao", "seed1"]
    assert (run.state, run.exit_code) == ("finished", 0)
    assert run.values("recipe") == {"name": "tiny_cpu", "steps": 3, "lr": 0.001}
    assert run.values("environment")["packages"] == {"verl": "0.9.1"}
    assert run.values("environment")["git"] == {"commit": "abc", "dirty": False}
    assert run.summary["rows_sent"] == len(run.history) == len(all_rows(folder)) == 9
    assert_same_rows(run.history, all_rows(folder))


def test_summaries_keep_what_fits(server: WandbStandIn, tmp_path: Path) -> None:
    train(make_run(tmp_path / "study"))
    (run,) = server.runs.values()
    assert run.summary["update/liveness"] == {"min": 0.51}
    assert run.summary["memory/rss_after_update_gib/rank0"] == {"max": 1.3}
    assert run.summary["critic/rewards/mean"] == pytest.approx(0.3)
    assert run.summary["ledger"] == {"tensor_parallel": 1}
    defined = run.config["_wandb"]["value"]["m"]  # 1: name, 5: number of its step metric in this list, from 1
    step_metric = {metric["1"]: defined[metric["5"] - 1]["1"] for metric in defined if "5" in metric}
    assert step_metric["update/liveness"] == step_metric["memory/rss_after_update_gib/rank0"] == "update/index"
    assert step_metric["critic/rewards/mean"] == "training/global_step"


def test_a_new_attempt_replaces_the_former_under_the_same_id(server: WandbStandIn, tmp_path: Path) -> None:
    train(make_run(tmp_path / "first" / "study"))
    again = make_run(tmp_path / "again" / "study")
    train(again, steps=2)
    (run,) = server.runs.values()
    assert len(run.history) == len(all_rows(again)) == 6
    assert run.state == "finished"


def test_offline_needs_no_server_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    folder = make_run(tmp_path / "study", mode="offline")
    train(folder)
    assert not folder.tracking_error_file.exists()
    (file,) = folder.path.glob("wandb/offline-run-*/run-*.wandb")
    assert_same_rows(history_of(file), all_rows(folder))


TRAINER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from offline_run import history_of
from study_folders import append_step, append_update
from pipeline.callbacks.wandb_monitor import WandbMonitor
from pipeline.study.run_folder import RunFolder

folder = RunFolder(Path(sys.argv[1]))
monitor = WandbMonitor(folder)
monitor.begin()
append_step(folder, 1)
append_update(folder, 2, 0)
print("stepped", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("status", "state", "exit_code"), [("stopped", "killed", 255), ("failed", "failed", 1), (None, "killed", 255)]
)
def test_a_killed_trainer_still_ends_its_run_as_it_ended(
    server: WandbStandIn, tmp_path: Path, status: str | None, state: str, exit_code: int
) -> None:
    folder = make_run(tmp_path / "study")
    support = Path(__file__).parents[1] / "support"
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder.path), str(support)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"stepped\n"
    until(lambda: server.runs)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    if status is not None:
        end_run(folder, status, steps=1)
    until(lambda: server.runs[folder.path.name].state != "running")
    run = server.runs[folder.path.name]
    assert (run.state, run.exit_code) == (state, exit_code)
    assert len(run.history) == 4, "two optimizer steps, their step, and one of a step that never ended"
    until(lambda: not mirror.is_followed(folder))


@pytest.mark.parametrize(
    ("matches", "how"),
    [
        ("UpsertBucket", {"status": 500, "times": 2}),
        ("UpsertBucket", {"status": 429, "times": 2}),
        ("file_stream", {"status": 500, "times": 2}),
        ("file_stream", {"status": 429, "times": 2}),
        ("file_stream", {"cut": True, "times": 2}),
        ("", {"delay_s": 0.3}),
    ],
)
def test_trouble_that_passes_costs_nothing(
    server: WandbStandIn, tmp_path: Path, matches: str, how: dict[str, object]
) -> None:
    server.disturb(matches, **how)
    folder = make_run(tmp_path / "study")
    assert train(folder) < 0.01
    assert not folder.tracking_error_file.exists()
    (run,) = server.runs.values()
    assert [row["_step"] for row in run.history] == list(range(9)), "each row once"
    assert (run.state, run.exit_code) == ("finished", 0)


@pytest.fixture(params=["refused", "silent"])
def dead_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that nobody reaches: its port is closed, or takes connections and never says a word."""
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    with dead_address() as address:
        monkeypatch.setenv("WANDB_BASE_URL", address if request.param == "silent" else "http://127.0.0.1:9")
        yield


@pytest.mark.usefixtures("dead_server")
def test_a_dead_network_slows_no_step_and_ends_no_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "study")
    started = time.monotonic()
    assert train(folder, finish_timeout_s=3.0) < 0.01
    assert time.monotonic() - started < 8.0, "3 s of patience at the end, and the steps themselves"
    error = tracking_error(folder)
    assert (error["rows_written"], error["rows_sent"]) == (9, 0)
    assert error["what_to_do"] == f"python -m pipeline.dashboard sync {tmp_path / 'study'}"
    assert len(all_rows(folder)) == 9
    until(lambda: not mirror.is_followed(folder))


def test_a_network_that_dies_later_is_told(server: WandbStandIn, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "study")
    monitor = WandbMonitor(folder, finish_timeout_s=3.0)
    monitor.begin()
    append_step(folder, 1)
    until(lambda: server.runs)
    server.disturb("", status=503)
    append_step(folder, 2)
    monitor.finish(0)
    assert "3 s after the run's end" in str(tracking_error(folder)["error"])
    assert tracking_error(folder)["rows_written"] == 6


def test_rows_that_w_and_b_refuses_are_told(server: WandbStandIn, tmp_path: Path) -> None:
    server.disturb("file_stream", status=403)  # the client stops sending, and its finish is a success
    folder = make_run(tmp_path / "study")
    train(folder)
    assert "0 of 9 rows" in str(tracking_error(folder)["error"])


def test_an_outage_at_the_start_is_made_up_for(server: WandbStandIn, tmp_path: Path) -> None:
    server.disturb("UpsertBucket", status=503)
    folder = make_run(tmp_path / "study")
    monitor = WandbMonitor(folder)
    monitor.begin()
    append_step(folder, 1)
    until(lambda: any("503" in line for line in server.requests))
    append_step(folder, 2)
    server.calm()
    monitor.finish(0)
    assert len(server.runs[folder.path.name].history) == 6


@pytest.mark.parametrize("key", ["0" * 40, "too short", None])
def test_a_wrong_key_is_told_at_once(
    server: WandbStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    if key is None:
        monkeypatch.delenv("WANDB_API_KEY")
    else:
        monkeypatch.setenv("WANDB_API_KEY", key)
    folder = make_run(tmp_path / "study")
    assert train(folder) < 0.01
    assert not server.runs
    assert (tracking_error(folder)["rows_written"], tracking_error(folder)["rows_sent"]) == (9, 0)
    assert str(key) not in json.dumps(tracking_error(folder)) or key is None
