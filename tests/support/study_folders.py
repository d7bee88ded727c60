"""Run folders for tests that need no training: configuration, environment, ledger, and rows that a test appends."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.study import json_lines
from pipeline.study.records import Environment, RunConfig, Status
from pipeline.study.run_folder import RunFolder, write_atomically

UPDATES_PER_STEP = 2


def make_run(study: Path, arm: str = "baseline", mode: str = "online") -> RunFolder:
    """A run folder as the launcher and the trainer leave it before the first step."""
    config = RunConfig(
        study_name=study.name,
        run_id=f"grpo-tiny-{arm}-s1",
        pair="grpo-tiny-s1",
        seed=1,
        arm={"name": arm, "verl": {}},
        recipe={"name": "tiny_cpu", "steps": 3, "lr": 0.001},
        cluster={"name": "embedded"},
        tracking={"mode": mode, "project": "test-project", "entity": None},
        gates={},
        gates_hash="0",
    )
    folder = RunFolder(study / "runs" / config.run_id)
    folder.path.mkdir(parents=True)
    folder.config_file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    environment = Environment(
        platform="cpu", python="3.11", packages={"verl": "0.9.1"}, git={"commit": "abc", "dirty": False},
        hardware={"cores": 2}, stand_ins=[],
    )  # fmt: skip
    write_atomically(folder.environment_file, json_lines.dumps(environment.model_dump()))
    write_atomically(folder.ledger_file, json_lines.dumps({"tensor_parallel": 1}))
    return folder


def append_step(folder: RunFolder, step: int, ranks: int = 1, **metrics: float) -> None:
    """What the ranks and the trainer append for one training step. Step 2 has a NaN and an infinity."""
    for mini_batch in range(UPDATES_PER_STEP):
        append_update(folder, step, mini_batch, ranks)
    row: dict[str, Any] = {
        "step": step,
        "wall_time": time.time(),
        "critic/rewards/mean": 0.1 * step,
        "actor/ppo_kl": math.nan if step == 2 else 0.01 * step,
        "actor/grad_norm": math.inf if step == 2 else 1.0,
        **metrics,
    }
    json_lines.append_row(folder.steps_file, row)


def append_update(folder: RunFolder, step: int, mini_batch: int, ranks: int = 1) -> None:
    update = (step - 1) * UPDATES_PER_STEP + mini_batch + 1
    for rank in range(ranks):
        row = {
            "step": step, "update": update, "mini_batch": mini_batch, "rank": rank, "liveness": 0.5 + 0.01 * update,
            "grad_norm": float(update), "lr": 1e-3, "time_optimizer_step_s": 0.1, "ppo_kl": 0.001 * update,
            "rss_after_update_gib": 1.0 + rank + 0.1 * (update % 4),
        }  # fmt: skip
        json_lines.append_row(folder.updates_file, row)


def end_run(folder: RunFolder, state: Any = "succeeded", steps: int = 3) -> None:
    folder.write_status(Status(state=state, steps_done=steps, started_at=1.0, ended_at=2.0))


def assert_same_rows(sent: Sequence[dict[str, Any]], written: Sequence[dict[str, Any]]) -> None:
    """Every row once, in order, with every key and value (NaN and infinities too) that was written."""
    assert [row["_step"] for row in sent] == list(range(len(written)))
    for one, other in zip(sent, written, strict=True):
        for name, value in other.items():
            assert one[name] == value or (math.isnan(one[name]) and math.isnan(value)), name


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)
