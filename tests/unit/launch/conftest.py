"""Runs and studies for the tests of `pipeline.launch`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.launch.kept_runs import StudyFolder
from pipeline.study.planning import PlannedRun, planned_run

RECIPE: dict[str, Any] = {
    "name": "tiny_cpu",
    "run_prefix": "grpo-tiny-1n1g-tp1pp1",
    "steps": 8,
    "epochs": 1000,
    "train_batch_size": 16,
    "mini_batch_size": 4,
    "micro_batch_size": 4,
    "samples_per_prompt": 4,
    "max_prompt_length": 32,
    "max_response_length": 4,
    "lr": 1e-3,
    "n_nodes": 1,
    "n_workers": 1,
    "tp": 1,
    "pp": 1,
    "vpp": None,
    "rollout_tp": 1,
    "test_freq": -1,
    "make_assets": True,
    "assets_dir": "/project/.cache/tiny_cpu",
    "model_path": "/project/.cache/tiny_cpu/model",
    "train_files": ["/project/.cache/tiny_cpu/train.parquet"],
    "val_files": ["/project/.cache/tiny_cpu/test.parquet"],
    "verl": {"data": {"seed": 1}},
}
CLUSTER: dict[str, Any] = {
    "name": "embedded",
    "address": None,
    "dashboard_port": 8265,
    "worker_resource": "verl_slot",
    "num_cpus": 16,
    "object_store_memory_mb": 500,
    "start_timeout_s": 120,
    "free_timeout_s": 1800,
    "stop_timeout_s": 30,
    "env": {"VERL_PLATFORM": "cpu"},
}


@pytest.fixture
def recipe() -> dict[str, Any]:
    return copy.deepcopy(RECIPE)


@pytest.fixture
def cluster() -> dict[str, Any]:
    return copy.deepcopy(CLUSTER)


@pytest.fixture(scope="session")
def planned() -> Callable[..., PlannedRun]:
    """Makes a run of study "study" from arm, seed, swept values and recipe settings."""
    return _planned


def _planned(arm: str = "baseline", seed: int = 1, swept: dict[str, Any] | None = None, **recipe: Any) -> PlannedRun:
    composed = {
        "study_name": "study",
        "seed": seed,
        "arm": {"name": arm, "verl": {}},
        "recipe": {**copy.deepcopy(RECIPE), **recipe},
        "cluster": copy.deepcopy(CLUSTER),
        "tracking": {"mode": "offline"},
        "gates": {"name": "default", "alpha": 0.05},
    }
    return planned_run(composed, swept or {}, [f"arm={arm}", f"seed={seed}"])


@pytest.fixture
def study(tmp_path: Path) -> StudyFolder:
    """The folder of study "study", empty."""
    study = StudyFolder(tmp_path / "results" / "study")
    study.path.mkdir(parents=True)
    return study
