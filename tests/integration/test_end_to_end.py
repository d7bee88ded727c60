"""The main job for real: the sweep command, Ray, verl's trainer, Megatron's optimizer, W&B's client, the report."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.study import json_lines
from pipeline.study.paths import PROJECT
from pipeline.study.run_folder import RunFolder

pytestmark = pytest.mark.slow

BYTES_PER_PARAMETER = {"baseline": 18.0, "pao": 16.0, "pao_bf16_moments": 12.0, "pao_bf16_all": 10.0}
_TIMES_AND_MEMORY = ("time", "timing", "perf/", "actor/perf/", "rss_", "wall_time")


def _sweep(results: Path, port: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.sweep", "+study=quick", f"results_dir={results}"]
    return subprocess.run(
        [*command, f"cluster.dashboard_port={port}", *overrides],
        cwd=PROJECT, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json_lines.loads(line) for line in file.read_text().splitlines()]


def _what_training_did(folder: RunFolder) -> list[dict[str, Any]]:
    """Every row of a run, without what a clock or the operating system decides."""
    rows = _rows(folder.steps_file) + _rows(folder.updates_file)
    return [{key: row[key] for key in row if not key.startswith(_TIMES_AND_MEMORY)} for row in rows]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sweep over all arms, two steps each."""
    results = tmp_path_factory.mktemp("results")
    arms = ",".join([*BYTES_PER_PARAMETER, "baseline_repeat", "dead_optimizer"])
    swept = _sweep(results, 8291, f"arm={arms}", "recipe.steps=2")
    assert swept.returncode == 0, swept.stdout + swept.stderr
    return results / "quick"


@pytest.fixture(scope="module")
def runs(study: Path) -> dict[str, RunFolder]:
    folders = [RunFolder(path) for path in (study / "runs").iterdir()]
    return {folder.read_config().arm["name"]: folder for folder in folders}


@pytest.mark.parametrize("arm", BYTES_PER_PARAMETER)
def test_every_arm_holds_exactly_its_bytes_and_lives(study: Path, arm: str) -> None:
    found = json.loads((study / "summary.json").read_text())["arms"][arm]
    assert found["bytes_per_param"]["found"] == BYTES_PER_PARAMETER[arm]
    assert found["bytes_per_param"]["predicted"] == BYTES_PER_PARAMETER[arm]
    assert found["liveness"]["min"] > 0


@pytest.mark.parametrize("arm", BYTES_PER_PARAMETER)
def test_ppo_kl_is_exactly_zero_in_the_first_mini_batch_only(runs: dict[str, RunFolder], arm: str) -> None:
    rows = _rows(runs[arm].updates_file)
    assert [row["mini_batch"] for row in rows] == [0, 1, 2, 3] * 2
    assert all((row["ppo_kl"] == 0) == (row["mini_batch"] == 0) for row in rows)


def test_two_baseline_runs_are_identical_in_all_but_times_and_memory(runs: dict[str, RunFolder]) -> None:
    assert _what_training_did(runs["baseline"]) == _what_training_did(runs["baseline_repeat"])


def test_the_dead_optimizer_is_found_dead(study: Path) -> None:
    summary = json.loads((study / "summary.json").read_text())
    assert summary["arms"]["dead_optimizer"]["liveness"]["median"] == 0
    assert summary["verdicts"]["dead_optimizer"]["updates"] == "dead optimizer"
    assert summary["verdicts"]["pao"]["updates"] == "healthy"


def test_each_run_left_an_offline_wandb_run_under_its_own_name(runs: dict[str, RunFolder]) -> None:
    for folder in runs.values():
        (run,) = (folder.path / "wandb").glob("offline-run-*")
        assert run.name.endswith(folder.path.name)
        assert not (folder.path / "tracking_error.json").exists()


def test_the_report_names_the_stand_ins(study: Path) -> None:
    report = (study / "report.md").read_text()
    assert "reference of TransformerEngine's FusedAdam" in report
    assert "equivalent" not in report.splitlines()[1]


def test_a_wrong_reward_function_is_named_and_the_sweep_goes_on(tmp_path: Path) -> None:
    """verl's agent loops log such an error and go on without the sample; what then fails is only a consequence."""
    name = "recipe.verl.reward.custom_reward_function.name"
    swept = _sweep(tmp_path, 8292, "arm=baseline", f"{name}=no_such_function,compute_score", "recipe.steps=1")
    assert swept.returncode == 1, swept.stdout + swept.stderr
    folders = [RunFolder(path) for path in sorted((tmp_path / "quick" / "runs").iterdir())]
    found = {folder.read_config().swept[name]: folder.read_status() for folder in folders}
    failed, succeeded = found["no_such_function"], found["compute_score"]
    assert failed is not None
    assert succeeded is not None
    assert (failed.state, succeeded.state) == ("failed", "succeeded")
    assert "no_such_function" in failed.reason
    report = (tmp_path / "quick" / "report.md").read_text()
    assert failed.reason[:60] in report


def test_two_workers_share_the_optimizer_and_write_their_own_rows(tmp_path: Path) -> None:
    swept = _sweep(tmp_path, 8293, "arm=pao", "recipe.n_workers=2", "recipe.steps=1")
    assert swept.returncode == 0, swept.stdout + swept.stderr
    (path,) = (tmp_path / "quick" / "runs").iterdir()
    folder = RunFolder(path)
    rows = _rows(folder.updates_file)
    assert sorted((row["update"], row["rank"]) for row in rows) == [(u, r) for u in (1, 2, 3, 4) for r in (0, 1)]
    assert all(row["liveness"] > 0 for row in rows)
    ledger = folder.read_ledger()
    assert ledger is not None
    assert (ledger.data_parallel, len(ledger.ranks)) == (2, 2)
    for rank in ledger.ranks:
        assert 2 * rank.optimizer_elements == rank.buffer_elements
        # parameters 2, main gradients 4; half of 2 + 4 + 4 for remainder and moments
        assert sum(entry.bytes for entry in rank.entries) == 11 * rank.buffer_elements


def test_eight_ranks_of_the_7b_recipes_layout_hold_what_is_predicted(tmp_path: Path) -> None:
    """Tensor, pipeline and virtual pipeline parallel at once; the stages are uneven."""
    swept = _sweep(tmp_path, 8294, "recipe=qwen2_7b_narrow_cpu", "arm=pao", "recipe.steps=1")
    assert swept.returncode == 0, swept.stdout + swept.stderr
    found = json.loads((tmp_path / "quick" / "summary.json").read_text())["arms"]["pao"]
    assert found["diagnosis"]["outcome"] == "healthy"
    assert found["treatment"]["outcome"] == "in effect"
    (path,) = (tmp_path / "quick" / "runs").iterdir()
    ledger = RunFolder(path).read_ledger()
    assert ledger is not None
    assert (ledger.tensor_parallel, ledger.pipeline_parallel, ledger.virtual_pipeline) == (4, 2, 2)
    assert sorted(rank.rank for rank in ledger.ranks) == list(range(8))
    of_stage: dict[int, set[int]] = {0: set(), 1: set()}
    for rank in ledger.ranks:
        # parameters 2, main gradients 4; remainder and moments, which have no padding, 2 + 4 + 4
        expected = 6 * rank.buffer_elements + 10 * rank.optimizer_elements
        assert sum(entry.bytes for entry in rank.entries) == expected, rank.rank
        of_stage[rank.pipeline_parallel_rank].add(rank.trainable_elements)
    (first,), (last,) = of_stage.values()
    assert last - first == 224  # the final norm
    rows = _rows(RunFolder(path).updates_file)
    assert sorted((row["mini_batch"], row["rank"]) for row in rows) == [(m, r) for m in range(4) for r in range(8)]
    assert all(row["liveness"] > 0 for row in rows)
    told = [row for row in rows if "ppo_kl" in row]
    assert all(row["ppo_kl"] == 0 for row in told if row["mini_batch"] == 0)
    assert any(row["ppo_kl"] != 0 for row in told)
