"""`python -m pipeline.dashboard sync` with the real wandb client and API, against a stand-in of the W&B server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from study_folders import append_step, append_update, assert_same_rows, end_run, make_run, until
from wandb_stand_in import API_KEY, WandbStandIn

from pipeline.callbacks.wandb_monitor import WandbMonitor
from pipeline.study.paths import PROJECT
from pipeline.study.run_folder import RunFolder
from pipeline.tracking.rows import all_rows

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[WandbStandIn]:
    with WandbStandIn() as running:
        yield running


def sync(study: Path, server: WandbStandIn, **environment: str) -> "subprocess.CompletedProcess[str]":
    variables = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(study.parent),
        "COLUMNS": "200",
        **server.environment,
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-m", "pipeline.dashboard", "sync", str(study)],
        cwd=PROJECT, env=variables, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def finished_run(study: Path, arm: str = "baseline", steps: int = 3, mode: str = "offline") -> RunFolder:
    folder = make_run(study, arm, mode)
    for step in range(1, steps + 1):
        append_step(folder, step)
    end_run(folder, steps=steps)
    return folder


def assert_complete(server: WandbStandIn, folder: RunFolder) -> None:
    run = server.runs[folder.path.name]
    assert_same_rows(run.history, all_rows(folder))
    assert run.summary["rows_sent"] == len(run.history)


def requests_of_upload(server: WandbStandIn) -> list[str]:
    return [line for line in server.requests if "file_stream" in line]


def test_offline_runs_are_uploaded_once(server: WandbStandIn, tmp_path: Path) -> None:
    study = tmp_path / "study"
    folders = [finished_run(study), finished_run(study, arm="pao")]
    done = sync(study, server)
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in folders:
        assert_complete(server, folder)
        assert (server.runs[folder.path.name].state, server.runs[folder.path.name].exit_code) == ("finished", 0)
    assert done.stdout.count("9 : 9") == 2
    before, kept = len(requests_of_upload(server)), json.dumps([run.history for run in server.runs.values()])
    again = sync(study, server)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(requests_of_upload(server)) == before, "the second time nothing is uploaded"
    assert json.dumps([run.history for run in server.runs.values()]) == kept
    assert not (folders[0].path / "wandb").exists(), "nothing is left in the run folder"


@pytest.mark.parametrize(("state", "in_wandb", "exit_code"), [("failed", "failed", 1), ("stopped", "killed", 255)])
def test_a_run_that_failed_is_uploaded_as_such(
    server: WandbStandIn, tmp_path: Path, state: str, in_wandb: str, exit_code: int
) -> None:
    folder = make_run(tmp_path / "study")
    append_step(folder, 1)
    append_update(folder, step=2, mini_batch=0)
    end_run(folder, state, steps=1)
    done = sync(tmp_path / "study", server)
    assert done.returncode == 0, done.stdout + done.stderr
    run = server.runs[folder.path.name]
    assert (run.state, run.exit_code, len(run.history)) == (in_wandb, exit_code, 4)


def test_a_gap_of_a_live_run_is_filled(server: WandbStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    folder = make_run(tmp_path / "study")
    monitor = WandbMonitor(folder, finish_timeout_s=4.0)
    monitor.begin()
    append_step(folder, 1)
    until(lambda: server.runs and server.runs[folder.path.name].history)
    server.disturb("", status=503)
    for step in (2, 3):
        append_step(folder, step)
    monitor.finish(0)
    end_run(folder)
    run = server.runs[folder.path.name]
    assert (len(run.history), run.state) == (3, "running")
    server.calm()
    done = sync(tmp_path / "study", server)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_complete(server, folder)
    assert (run.state, run.exit_code) == ("finished", 0)
    assert run.summary["update/liveness"] == {"min": 0.51}, "over all rows, not those that were added"
    assert len(server.runs) == 1
    assert not folder.tracking_error_file.exists()


def test_an_earlier_attempts_rows_are_replaced(server: WandbStandIn, tmp_path: Path) -> None:
    first = finished_run(tmp_path / "first" / "study", steps=4)
    assert sync(tmp_path / "first" / "study", server).returncode == 0
    second = finished_run(tmp_path / "second" / "study", steps=2)
    assert first.path.name == second.path.name
    done = sync(tmp_path / "second" / "study", server)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_complete(server, second)


@pytest.mark.parametrize(
    ("matches", "how"),
    [
        ("file_stream", {"status": 500, "times": 2}),
        ("file_stream", {"status": 429, "times": 2}),
        ("file_stream", {"cut": True, "times": 2}),
        ("graphql", {"status": 500, "times": 3}),
        ("", {"delay_s": 0.2}),
    ],
)
def test_trouble_that_passes_costs_nothing(
    server: WandbStandIn, tmp_path: Path, matches: str, how: dict[str, Any]
) -> None:
    folder = finished_run(tmp_path / "study")
    server.disturb(matches, **how)
    done = sync(tmp_path / "study", server)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_complete(server, folder)


def test_what_w_and_b_does_not_take_is_missing(server: WandbStandIn, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "study")
    server.disturb("file_stream", status=403)  # the client does not try again
    done = sync(tmp_path / "study", server)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{folder.path.name}: 0 of 9 rows" in done.stderr
    server.calm()
    assert sync(tmp_path / "study", server).returncode == 0
    assert_complete(server, folder)


def test_an_outage_that_stays_is_told_without_a_traceback(server: WandbStandIn, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "study")
    server.disturb("graphql Run", status=404)  # the first question after the log-in; the client does not ask again
    done = sync(tmp_path / "study", server)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"missing: {folder.path.name}: W&B failed" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_configuration_is_told_in_one_line(server: WandbStandIn, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "study")
    folder.config_file.write_text("study_name: [")
    done = sync(tmp_path / "study", server)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"error: {folder.path} cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


def analysed(study: Path, run_id: str) -> None:
    """What the analysis leaves, as far as W&B gets it."""
    summary = {
        "one_line": "pao: saves 2.00 bytes per parameter; updates: healthy",
        "runs": [{"id": run_id, "arm": "pao", "diagnosis": "healthy"}],
        "arms": {"pao": {"bytes_per_param": {"found": 16.0}}},
        "verdicts": {
            "pao": {
                "treatment": "in effect", "updates": "healthy", "savings": "as predicted", "parity": "not established",
                "sentences": {"trade": "pao: saves 2.00 bytes per parameter"},
                "saved_bytes_per_param": {"found": 2.0},
                "saved_gib_per_rank": [{"rank": 0, "found": 0.5}, {"rank": 1, "found": 0.25}],
            }
        },
    }  # fmt: skip
    (study / "summary.json").write_text(json.dumps(summary))
    (study / "report.md").write_text("# Report")
    (study / "figures").mkdir(exist_ok=True)
    (study / "figures" / "ledger.png").write_bytes(b"picture")


@pytest.mark.parametrize("when", ["before the upload", "after the upload"])
def test_the_verdict_and_the_report_arrive(server: WandbStandIn, tmp_path: Path, when: str) -> None:
    study = tmp_path / "study"
    folder = finished_run(study, arm="pao")
    if when == "after the upload":
        assert sync(study, server).returncode == 0
    analysed(study, folder.path.name)
    done = sync(study, server)
    assert done.returncode == 0, done.stdout + done.stderr
    run = server.runs[folder.path.name]
    assert run.summary["study/verdict"] == "pao: saves 2.00 bytes per parameter"
    assert run.summary["study/diagnosis"] == "healthy"
    assert (run.summary["study/bytes_per_param"], run.summary["study/saved_bytes_per_param"]) == (16.0, 2.0)
    assert run.summary["study/saved_gib_on_the_fullest_rank"] == 0.5
    assert run.summary["update/liveness"] == {"min": 0.51}, "the run's own values stay"
    (artifact,) = server.versions("study")
    assert artifact.type == "study"
    assert artifact.files["report.md"] == b"# Report"
    assert artifact.files["figures/ledger.png"] == b"picture"
    assert f"ledgers/{folder.path.name}.json" in artifact.files
    assert sync(study, server).returncode == 0
    assert len(server.versions("study")) == 1, "the same content makes no second version"
    (study / "report.md").write_text("# Another report")
    assert sync(study, server).returncode == 0
    assert len(server.versions("study")) == 2


def test_wrong_input_is_told_in_one_line(server: WandbStandIn, tmp_path: Path) -> None:
    nothing = sync(tmp_path / "nothing", server)
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert nothing.stderr.startswith("error: ")
    assert nothing.stderr.count("\n") == 1
    finished_run(tmp_path / "study")
    for key, words in (("", "no W&B API key"), ("0" * 40, "does not take the API key")):
        done = sync(tmp_path / "study", server, WANDB_API_KEY=key)
        assert done.returncode == 2, done.stdout + done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        assert API_KEY not in done.stdout + done.stderr


def test_a_server_that_nobody_reaches(server: WandbStandIn, tmp_path: Path) -> None:
    finished_run(tmp_path / "study")
    done = sync(tmp_path / "study", server, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
