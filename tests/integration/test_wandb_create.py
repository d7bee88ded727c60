"""`python -m pipeline.dashboard create` with the real wandb client, against a stand-in of the W&B server."""

import base64
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb_stand_in import API_KEY, ENTITY
from wandb_views_stand_in import WandbWithViews

from pipeline.analysis.arm_styles import arm_style
from pipeline.analyze import analyze
from pipeline.study.paths import PROJECT
from pipeline.study.run_folder import RunFolder
from pipeline.tracking.rows import all_rows

pytestmark = pytest.mark.slow

SECTIONS = ["Memory", "Policy drift", "Liveness", "Reward and validation", "Cost"]
ARMS = ("baseline", "baseline_repeat", "pao")
NOBODY = {"WANDB_BASE_URL": "http://127.0.0.1:9"}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs with A/A runs, analysed."""
    folder = tmp_path_factory.mktemp("results") / "made_up"
    write_runs(folder, *({"arm": arm, "seed": seed, "tp": 2} for seed in (2, 1) for arm in ARMS))
    analyze(folder)
    return folder


def write_runs(folder: Path, *runs: dict[str, Any]) -> None:
    generator = runpy.run_path(str(PROJECT / "scripts" / "generate_large_study.py"))
    for run in runs:
        generator["write_run"](folder, generator["MadeUpRun"](platform="cuda", **run))


@pytest.fixture
def server() -> Iterator[WandbWithViews]:
    running = WandbWithViews()
    with running:
        yield running


def create(study: Path, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pipeline.dashboard", "create", str(study)],
        cwd=PROJECT, env={"PATH": "/usr/bin:/bin", "HOME": str(study.parent), **environment},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def only_view(server: WandbWithViews, view_type: str) -> Any:
    (view,) = server.views_of(view_type)
    return view


def panels_of(spec: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """By section."""
    bank = spec["section"]["panelBankConfig"]["sections"]
    return {section["name"]: [panel["config"] for panel in section["panels"]] for section in bank}


def test_a_view_and_a_report_are_built_and_the_second_call_updates_them(study: Path, server: WandbWithViews) -> None:
    first = create(study, server.environment)
    assert first.returncode == 0, first.stderr
    assert re.fullmatch(r"workspace: http://\S+\nreport: http://\S+\n", first.stdout)
    specs = {view.id: view.spec for view in server.views.values()}
    second = create(study, server.environment)
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    assert len(server.views) == 2
    assert {view.saved for view in server.views.values()} == {2}
    assert {view.id: view.spec for view in server.views.values()} == specs
    assert only_view(server, "project-view").name in json.dumps(
        json.loads((study / "wandb_dashboard.json").read_text())
    )
    assert API_KEY not in "".join(path.read_text() for path in study.glob("*.json"))


def test_the_view_shows_the_runs_of_this_study_by_pair_and_arm(study: Path, server: WandbWithViews) -> None:
    assert create(study, server.environment).returncode == 0
    view = only_view(server, "project-view")
    assert (view.display_name, view.project) == ("Study made_up", "made-up")
    runs = view.spec["section"]["runSets"][0]
    assert [key["name"] for key in runs["grouping"]] == ["group", "jobType"]
    assert "study_name" in json.dumps(runs["filters"])
    assert "made_up" in json.dumps(runs["filters"])
    folders = sorted((study / "runs").iterdir())
    colours = view.spec["section"]["customRunColors"]
    for folder in folders:
        arm = RunFolder(folder).read_config().arm["name"]
        assert colours[folder.name] == arm_style(ARMS, arm)[0]
    groups = [name for name in colours if name not in {folder.name for folder in folders}]
    assert len(groups) == len(folders)
    baseline = base64.b64decode(runs["baselineRunId"]).decode()
    assert re.fullmatch(rf"Run:v1:\S+-baseline-s1:made-up:{ENTITY}", baseline)
    assert len(runs["pinnedRunIds"]) == 2


def test_every_panel_shows_what_runs_log(study: Path, server: WandbWithViews) -> None:
    assert create(study, server.environment).returncode == 0
    panels = panels_of(only_view(server, "project-view").spec)
    assert list(panels) == SECTIONS
    logged = {name for folder in (study / "runs").iterdir() for row in all_rows(RunFolder(folder)) for name in row}
    lines = [panel for section in panels.values() for panel in section if "xAxis" in panel]
    assert len(lines) > 15
    for panel in lines:
        assert set(panel["metrics"]) <= logged
        assert panel["yAxisTitle"]
        of_updates = panel["metrics"][0].startswith(("update/", "memory/"))
        assert panel["xAxis"] == ("update/index" if of_updates else "training/global_step")
    shown = {name for panel in lines for name in panel["metrics"]}
    assert {
        "memory/allocated_after_update_gib/rank0", "memory/allocated_after_update_gib/rank1", "update/ppo_kl",
        "update/pg_clipfrac", "actor/entropy", "update/liveness", "critic/rewards/mean",
        "val-core/made_up/acc/mean@1", "timing_s/step", "update/time_optimizer_step_s",
    } <= shown  # fmt: skip


def test_the_report_has_the_studys_text_and_figures(study: Path, server: WandbWithViews) -> None:
    assert create(study, server.environment).returncode == 0
    report = only_view(server, "runs")
    text = (study / "report.md").read_text()
    assert f"# {report.display_name}\n" in text
    blocks = report.spec["blocks"]
    written = "\n".join(block["content"] for block in blocks if block["type"] == "markdown-block")
    assert re.findall("^## .*", written, re.MULTILINE) == re.findall("^## .*", text, re.MULTILINE)
    assert "<details>" not in written
    keys = re.findall(r'"mediaKeys": \["(.*?)"\]', json.dumps(blocks))
    figures = re.findall(r"\]\((figures/.*?)\.png\)", text)
    assert keys == figures
    run = server.runs["made_up-figures"]
    assert run.state == "finished"
    pictures = [content for name, content in run.files.items() if name.endswith(".png")]
    assert sorted(pictures) == sorted(path.read_bytes() for path in (study / "figures").iterdir())


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        pytest.param({}, "there is no W&B API key", id="no key"),
        pytest.param({**NOBODY, "WANDB_API_KEY": API_KEY}, "W&B does not answer", id="no server"),
    ],
)
def test_without_wandb_the_specifications_are_files(study: Path, environment: dict[str, str], told: str) -> None:
    done = create(study, environment)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout
    view = json.loads((study / "wandb_workspace.json").read_text())
    assert list(panels_of(view["spec"])) == SECTIONS
    report = json.loads((study / "wandb_report.json").read_text())
    assert report["displayName"].startswith("made_up")
    assert done.stdout.splitlines()[-2:] == [str(study / f"wandb_{name}.json") for name in ("workspace", "report")]
    kept = (study / "wandb_workspace.json").read_bytes()
    assert create(study, environment).returncode == 0
    assert (study / "wandb_workspace.json").read_bytes() == kept


def test_a_failing_server_is_one_message_and_status_1(study: Path, server: WandbWithViews) -> None:
    server.disturb("UpsertView2", status=400)
    done = create(study, server.environment)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error: W&B failed" in done.stderr


def test_wrong_input_is_one_message_and_status_2(tmp_path: Path) -> None:
    no_study = create(tmp_path, {})
    write_runs(tmp_path / "fresh", {"arm": "baseline"})
    not_analysed = create(tmp_path / "fresh", {})
    for done, told in ((no_study, "is no study's folder"), (not_analysed, "python -m pipeline.analyze")):
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert told in done.stderr
        assert "Traceback" not in done.stderr
