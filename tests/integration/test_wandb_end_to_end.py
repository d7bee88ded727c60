"""`pipeline.sweep tracking=online` against the stand-in: what arrives, how a stopped run ends, and where the key is."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from study_folders import assert_same_rows, until
from wandb_stand_in import API_KEY, WandbStandIn

from pipeline.study.paths import PROJECT
from pipeline.study.run_folder import RunFolder
from pipeline.tracking.rows import all_rows

pytestmark = pytest.mark.slow

PORT = 8297


@pytest.fixture
def server() -> Iterator[WandbStandIn]:
    with WandbStandIn() as running:
        yield running


class Sweep:
    """A sweep of one run with `tracking=online`, in a process of its own."""

    def __init__(self, results: Path, server: WandbStandIn, steps: int) -> None:
        self.study = results / "quick"
        self.output = results / "sweep.log"
        command = [
            sys.executable, "-m", "pipeline.sweep", "+study=quick", "arm=baseline", f"recipe.steps={steps}",
            "tracking=online", f"results_dir={results}", f"cluster.dashboard_port={PORT}",
        ]  # fmt: skip
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=PROJECT, env={**os.environ, **server.environment}, stdout=output, stderr=output
            )

    @property
    def folder(self) -> RunFolder:
        (path,) = (self.study / "runs").iterdir()
        return RunFolder(path)

    def until_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return (self.study / "runs").exists() and len(all_rows(self.folder)) >= 5 * step

        until(reached, seconds=180)

    def jobs_as_ray_tells_them(self) -> str:
        found = re.search(r"its token is in (\S+)", self.output.read_text())
        assert found, self.output.read_text()
        headers = {"Authorization": f"Bearer {Path(found[1]).read_text()}"}
        answer = requests.get(f"http://127.0.0.1:{PORT}/api/jobs/", headers=headers, timeout=10)
        answer.raise_for_status()
        return answer.text

    def ray_folder(self) -> Path:
        found = re.search(r"its token is in (\S+)", self.output.read_text())
        assert found
        return Path(found[1]).parent


def files_with_the_key(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    return [path for path in files if API_KEY.encode() in path.read_bytes()]


def test_an_online_sweep_arrives_and_leaves_the_key_nowhere(server: WandbStandIn, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, server, steps=2)
    sweep.until_step(1)
    jobs = sweep.jobs_as_ray_tells_them()
    assert "runtime_env" in jobs
    assert API_KEY not in jobs
    assert files_with_the_key(sweep.ray_folder()) == []
    assert sweep.process.wait(timeout=180) == 0, sweep.output.read_text()
    run = server.runs[sweep.folder.path.name]
    assert (run.state, run.exit_code, run.group) == ("finished", 0, "quick/grpo-tiny-1n1g-tp1pp1-s1")
    assert_same_rows(run.history, all_rows(sweep.folder))
    assert len(run.history) == 2 * (4 + 1)
    assert run.values("environment")["packages"]["verl"] == "0.9.1"
    assert not sweep.folder.tracking_error_file.exists()
    assert files_with_the_key(tmp_path) == []
    assert all(API_KEY.encode() not in content for run in server.runs.values() for content in run.files.values())


def test_a_sweep_stopped_by_ctrl_c_ends_its_run_as_killed(server: WandbStandIn, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, server, steps=50)
    sweep.until_step(1)
    sweep.process.send_signal(signal.SIGINT)
    assert sweep.process.wait(timeout=120) == 130, sweep.output.read_text()
    run = server.runs[sweep.folder.path.name]
    until(lambda: run.state != "running")
    assert (run.state, run.exit_code) == ("killed", 255)
    assert_same_rows(run.history, all_rows(sweep.folder))
