"""conf/ and the command around it: what composes, what a pair differs in, what a user sees of mistakes and of help."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pipeline.launch import checks
from pipeline.launch.errors import BadInput
from pipeline.launch.sweep_plan import plan, study_folder
from pipeline.study.paths import PROJECT
from pipeline.study.planning import flattened

CONF = PROJECT / "conf"
ARMS = sorted(file.stem for file in (CONF / "arm").glob("*.yaml"))
CLUSTERS = sorted(file.stem for file in (CONF / "cluster").glob("*.yaml") if file.stem != "base")
RECIPES = sorted(file.stem for file in (CONF / "recipe").glob("*.yaml") if file.stem != "base")


def composed(*overrides: str) -> dict[str, Any]:
    """The resolved configuration of one job, without Hydra's own part."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("sweep", overrides=list(overrides))
    resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def declared(arm: str) -> dict[str, Any]:
    """The arm's file as it is written."""
    return dict(flattened({"arm": yaml.safe_load((CONF / "arm" / f"{arm}.yaml").read_text())}))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "baseline"])
def test_the_runs_of_a_pair_differ_in_what_the_arm_s_file_declares_and_nothing_else(arm: str, recipe: str) -> None:
    one = dict(flattened(composed(f"recipe={recipe}", "seed=3")))
    other = dict(flattened(composed(f"recipe={recipe}", "seed=3", f"arm={arm}")))
    baseline = declared("baseline")
    differing = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    expected = declared(arm)
    assert differing == {name for name in baseline.keys() | expected.keys() if baseline.get(name) != expected.get(name)}
    assert {name: other[name] for name in expected} == expected


def test_an_arm_s_file_holds_its_delta_only() -> None:
    for arm in ARMS:
        lines = [
            line
            for line in (CONF / "arm" / f"{arm}.yaml").read_text().splitlines()
            if line and not line.startswith("#")
        ]
        assert 2 <= len(lines) <= 4, arm


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_passes_the_checks_but_for_files_to_be_prepared(recipe: str, tmp_path: Path) -> None:
    settings = composed(f"recipe={recipe}")["recipe"]
    if not settings.get("make_assets"):
        (tmp_path / "data").touch()
        settings |= {"train_files": [str(tmp_path / "data")], "val_files": [str(tmp_path / "data")]}
    checks.check_recipe(settings)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_cluster_has_the_settings_that_the_launcher_needs_and_no_secrets(cluster: str) -> None:
    settings = checks.validated(checks.ClusterSettings, composed(f"cluster={cluster}")["cluster"], "cluster")
    assert not [name for name in settings.env if "KEY" in name or "TOKEN" in name.removeprefix("TOKENIZERS")]
    assert ("VERL_PLATFORM" in settings.env) == (cluster == "embedded")


@pytest.mark.parametrize("study", sorted(file.stem for file in (CONF / "study").glob("*.yaml")))
def test_every_study_preset_composes_under_its_own_name(study: str) -> None:
    assert composed(f"+study={study}")["study_name"] == study


def planned_runs(tmp_path: Path, *jobs: list[str]) -> list[str]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        always = [f"results_dir={tmp_path}", "cluster.dashboard_port=54321"]
        master = compose("sweep", overrides=always, return_hydra_config=True)
        study = study_folder(master)
        configs = [compose("sweep", overrides=[*job, *always], return_hydra_config=True) for job in jobs]
    return [run.run_id for run in plan(configs, [[*job, *always] for job in jobs], study, rerun=False).runs]


def test_composed_jobs_become_runs_in_their_order(tmp_path: Path) -> None:
    jobs = [[f"arm={arm}", f"seed={seed}"] for arm in ("baseline", "pao") for seed in (1, 2)]
    assert planned_runs(tmp_path, *jobs) == [
        "grpo-tiny-1n1g-tp1pp1-baseline-s1",
        "grpo-tiny-1n1g-tp1pp1-pao-s1",
        "grpo-tiny-1n1g-tp1pp1-pao-s2",
        "grpo-tiny-1n1g-tp1pp1-baseline-s2",
    ]


def test_the_plan_writes_nothing_but_the_study_s_folder(tmp_path: Path) -> None:
    planned_runs(tmp_path, ["arm=pao"])
    assert [path.name for path in tmp_path.rglob("*")] == ["first"]


def test_the_plan_asks_for_the_api_key_of_online_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "tooshort")
    with pytest.raises(BadInput, match="tracking=online"):
        planned_runs(tmp_path, ["arm=pao", "tracking=online"])


def sweep(*overrides: str, cwd: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    """The command itself, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pipeline.sweep", *overrides],
        cwd=cwd, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("arm=baselin,pao", "arm=baselin is unknown. Did you mean baseline"),
        ("recipe=qwen2_7b_sgl", "recipe=qwen2_7b_sgl is unknown. Did you mean qwen2_7b_sgl_megatron"),
        ("seed=abc", "seed=abc: a seed is a whole number"),
        ("seed=1,1.5", "seed=1.5: a seed is a whole number"),
        ("recipe.model_path=/nowhere/model", "recipe.model_path=/nowhere/model: there is no such folder"),
        ("cluster.address=http://127.0.0.1:9", "cluster.address=http://127.0.0.1:9: no Ray dashboard answers there"),
        ("results_dir=/proc/nowhere", "results_dir=/proc/nowhere: cannot write"),
        ("study_name=a/b", "study_name='a/b' cannot name a folder"),
        ("recipe.train_batch_size=15", "recipe.train_batch_size=15 is not divisible by recipe.mini_batch_size=4"),
        ("hydra.mode=RUN", "hydra.mode=RUN: leave hydra.mode out"),
        ("hydra.sweeper.max_batch_size=2", "hydra.sweeper.max_batch_size has no use here"),
        ("recipe.lr=interval(1,2)", "ranges of numbers cannot be swept"),
    ],
)
def test_bad_input_is_one_message_and_exit_status_2(tmp_path: Path, override: str, words: str) -> None:
    done = sweep(f"results_dir={tmp_path / 'results'}", override)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {words}")
    assert len(done.stderr.splitlines()) == 1
    assert not list((tmp_path / "results").glob("*")), "bad input left a study behind"


@pytest.mark.slow
def test_help_is_quick_and_says_what_can_be_chosen() -> None:
    began = time.monotonic()
    done = sweep("--help")
    assert done.returncode == 0
    assert time.monotonic() - began < 30
    text = done.stdout
    assert "python -m pipeline.sweep +study=quick" in text
    assert all(arm in text for arm in ARMS)
    assert "cluster.address" in text
    assert "Exit status" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.slow
def test_the_configuration_can_be_looked_at_without_a_trace(tmp_path: Path) -> None:
    shown = sweep("--cfg", "job", "--resolve", f"results_dir={tmp_path}", "arm=pao")
    assert shown.returncode == 0
    assert yaml.safe_load(shown.stdout)["arm"]["name"] == "pao"
    assert sweep("--info", "defaults-tree").returncode == 0
    assert list(tmp_path.iterdir()) == []
