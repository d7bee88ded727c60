"""The 8-GPU recipe's layout without its GPUs: every rank's real shards against the prediction, both arms."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.analysis.columns import Table
from pipeline.analysis.ledger import RunLedger, predict_and_compare
from pipeline.analysis.load import Run
from pipeline.study import json_lines
from pipeline.study.paths import PROJECT
from pipeline.study.records import FoundOptimizer, Ledger, RankLedger, RunConfig
from pipeline.study.run_folder import RunFolder
from pipeline.train.by_hand import compose_sweep

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("eight_ranks.py")
BYTES = {"baseline": 18, "pao": 16}


def run_of(arm: str) -> Run:
    """What a run of the recipe would leave: its configuration, and a ledger of all eight ranks."""
    composed = compose_sweep([f"arm={arm}", "recipe=qwen2_7b_sgl_megatron", "cluster=node_8gpu"])
    recipe = composed["recipe"]
    assert (recipe["n_workers"], recipe["tp"], recipe["pp"], recipe["vpp"]) == (8, 4, 2, 2)
    optim = {"lr": 1e-6, "weight_decay": 0.01, "clip_grad": 1.0}
    optim |= composed["arm"].get("verl", {}).get("actor_rollout_ref", {}).get("actor", {}).get("optim", {})
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json_lines.dumps(optim).decode()],
        cwd=PROJECT, env={"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = [RankLedger.model_validate(json_lines.loads(line)) for line in done.stdout.splitlines()]
    flags: dict[str, Any] = {"use_distributed_optimizer": True}
    optimizer = FoundOptimizer(megatron_class="", inner_class="", flags=flags)
    ledger = Ledger(
        optimizer=optimizer, tensor_parallel=4, pipeline_parallel=2, virtual_pipeline=2, data_parallel=1, ranks=ranks
    )
    config = RunConfig(
        study_name="layout", run_id=arm, pair="s1", seed=1, swept={}, arm=composed["arm"], recipe=recipe, cluster={},
        tracking={}, gates={}, gates_hash="",
    )  # fmt: skip
    empty = Table({"step": np.empty(0)})
    return Run(RunFolder(Path(arm)), config, None, None, ledger, [], empty, empty)


@pytest.mark.parametrize("arm", BYTES)
def test_each_rank_holds_what_is_predicted(arm: str) -> None:
    run = run_of(arm)
    ledger = predict_and_compare(run)
    assert ledger is not None
    assert ledger.predicted == BYTES[arm]
    for rank in range(8):
        assert ledger.gib("found", rank) == pytest.approx(ledger.gib("predicted", rank), rel=0.01)
        assert ledger.gib("unexplained", rank) == pytest.approx(0, abs=1e-12)
    if arm == "baseline":
        check_layout(run, ledger)


def check_layout(run: Run, ledger: RunLedger) -> None:
    assert run.ledger is not None
    places = [(rank.tensor_parallel_rank, rank.pipeline_parallel_rank) for rank in run.ledger.ranks]
    assert places == [(rank % 4, rank // 4) for rank in range(8)]
    first, last = (run.ledger.ranks[rank].trainable_elements for rank in (0, 4))
    # The last stage has the final norm (224 elements) beside the output layer, which is as large as the embedding.
    assert last - first == 224
    assert ledger.ranks == 8
