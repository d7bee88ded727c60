#!/usr/bin/env python
"""Write a made-up study of any size, to measure the analysis with and to test it on. No number in it was measured.

python scripts/generate_large_study.py /tmp/large                       64 runs x 1,000 steps x 8 ranks
python scripts/generate_large_study.py /tmp/half --seeds 8              half the runs
/usr/bin/time -v python -m pipeline.analyze /tmp/large
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import yaml

from pipeline.study import json_lines
from pipeline.study.gates_hash import gates_hash
from pipeline.study.naming import pair_id, run_id
from pipeline.study.records import Environment, Ledger, Status

PROJECT = Path(__file__).resolve().parents[1]
GIB = 1024**3
BYTES = {"float32": 4, "bfloat16": 2, "int16": 2}
Edit = Callable[[dict[str, Any]], Any]


def _unchanged(row: dict[str, Any]) -> None:
    """Leave a row as it was made."""


@dataclass
class MadeUpRun:
    """What a made-up run looks like; `edit_*` change rows or the ledger in place before they are written."""

    arm: str = "baseline"
    seed: int = 1
    steps: int = 8
    updates_per_step: int = 4
    tp: int = 1
    pp: int = 1
    dp: int = 1
    platform: str = "cpu"
    lr: float = 1e-3
    trainable: int = 128_000
    padding: int = 0
    frozen: int = 0
    drift: float = 1e-3
    """How far a treatment arm's metrics drift from the baseline's, relative, per step."""
    swept: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    edit_step: Edit = _unchanged
    edit_update: Edit = _unchanged
    edit_ledger: Edit = _unchanged

    @property
    def prefix(self) -> str:
        return f"grpo-made_up-1n{self.ranks}w-tp{self.tp}pp{self.pp}"

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def id(self) -> str:
        return run_id(self.prefix, self.arm, self.seed, self.swept)


def arm_config(name: str) -> dict[str, Any]:
    return yaml.safe_load((PROJECT / "conf" / "arm" / f"{name}.yaml").read_text())


def write_run(study: Path, run: MadeUpRun) -> Path:
    """Write one run folder below `study`/runs; returns it."""
    folder = study / "runs" / run.id
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(_config(study.name, run), sort_keys=False))
    (folder / "overrides.yaml").write_text(yaml.safe_dump([f"arm={run.arm}", f"seed={run.seed}"]))
    (folder / "env.json").write_bytes(json_lines.dumps(_environment(run).model_dump(), indent=True))
    ledger = _ledger(run)
    run.edit_ledger(ledger)
    (folder / "ledger.json").write_bytes(json_lines.dumps(Ledger.model_validate(ledger).model_dump(), indent=True))
    _write_rows(folder / "steps.jsonl", step_rows(run), run.edit_step)
    _write_rows(folder / "updates.jsonl", update_rows(run), run.edit_update)
    status = Status(state="succeeded", steps_done=run.steps, started_at=1.7e9, ended_at=1.7e9 + 10 * run.steps)
    (folder / "status.json").write_bytes(json_lines.dumps(status.model_dump(), indent=True))
    return folder


def _write_rows(path: Path, rows: Iterator[dict[str, Any]], edit: Edit) -> None:
    with path.open("wb") as file:
        for row in rows:
            edit(row)
            # json_lines keeps a NaN that an edit put in; plain orjson is several times as fast.
            file.write((orjson.dumps if edit is _unchanged else json_lines.dumps)(row) + b"\n")


def _config(study: str, run: MadeUpRun) -> dict[str, Any]:
    gates = yaml.safe_load((PROJECT / "conf" / "gates" / "default.yaml").read_text())
    recipe = {
        "name": "made_up",
        "steps": run.steps,
        "train_batch_size": 16 * run.updates_per_step,
        "mini_batch_size": 16,
        "lr": run.lr,
        "verl": {"actor_rollout_ref": {"actor": {"optim": {"lr": run.lr}}}, "trainer": {"resume_mode": "disable"}},
    }
    return {
        "study_name": study,
        "run_id": run.id,
        "pair": pair_id(run.prefix, run.seed, run.swept),
        "seed": run.seed,
        "swept": run.swept,
        "arm": arm_config(run.arm),
        "recipe": {**recipe, **run.recipe},
        "cluster": {"name": "made_up"},
        "tracking": {"mode": "offline", "project": "made-up", "entity": None},
        "gates": gates,
        "gates_hash": gates_hash(gates),
    }


def _environment(run: MadeUpRun) -> Environment:
    gpus = [{"name": "Made-up GPU", "memory_gib": 140.0}] * run.ranks if run.platform == "cuda" else []
    return Environment(
        platform="cuda" if run.platform == "cuda" else "cpu",
        python="3.11.7",
        packages={"torch": "2.11.0", "verl": "0.9.1", "megatron-core": "0.16.1", "transformer-engine": "2.12.0"},
        git={"commit": "0" * 40, "dirty": False},
        hardware={"processor": "made up", "cores": 16, "memory_gib": 128.0, "gpus": gpus},
        stand_ins=[] if run.platform == "cuda" else ["a made-up optimizer in place of FusedAdam"],
    )


def _state_dtypes(arm: str) -> dict[str, str]:
    pao, moments = arm.startswith("pao"), "bfloat16" if "bf16" in arm else "float32"
    dtypes = {
        "param": "bfloat16",
        "main_grad": "bfloat16" if arm == "pao_bf16_all" else "float32",
        "master_param": "int16" if pao else "float32",
        "exp_avg": moments,
        "exp_avg_sq": moments,
    }
    if arm == "dead_optimizer":
        del dtypes["master_param"]
    return dtypes


def _rank_elements(run: MadeUpRun, pipeline_rank: int) -> int:
    return run.trainable if pipeline_rank == 0 else run.trainable - run.trainable // 8  # uneven stages


def _ledger(run: MadeUpRun) -> dict[str, Any]:
    dtypes = _state_dtypes(run.arm)
    pao = run.arm not in ("baseline", "baseline_repeat")
    ranks: list[dict[str, Any]] = []
    for rank in range(run.ranks):
        pipeline_rank, data_rank = rank // (run.tp * run.dp), rank // run.tp % run.dp
        trainable = _rank_elements(run, pipeline_rank)
        shard = trainable // run.dp
        entries = [
            {"kind": kind, "dtype": dtype, "elements": count, "bytes": count * BYTES[dtype]}
            for kind, dtype in dtypes.items()
            for count in [trainable + run.padding if kind in ("param", "main_grad") else shard]
        ]
        held = sum(int(entry["bytes"]) for entry in entries) / GIB
        ranks.append(
            {
                "rank": rank,
                "tensor_parallel_rank": rank % run.tp,
                "pipeline_parallel_rank": pipeline_rank,
                "data_parallel_rank": data_rank,
                "trainable_elements": trainable,
                "frozen_elements": run.frozen,
                "buffer_elements": trainable + run.padding,
                "optimizer_elements": shard,
                "entries": entries,
                "memory": {
                    "source": "allocated" if run.platform == "cuda" else "rss",
                    "after_load_gib": 1.0,
                    "after_first_update_gib": 1.0 + held,
                    "device_total_gib": 140.0,
                },
            }
        )
    dead = run.arm == "dead_optimizer"
    return {
        "optimizer": {
            "megatron_class": "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
            "inner_class": "made_up.FusedAdam",
            "flags": {
                "use_precision_aware_optimizer": pao,
                "store_param_remainders": True,
                "main_grads_dtype": dtypes["main_grad"],
                "main_params_dtype": "float32",
                "exp_avg_dtype": dtypes["exp_avg"],
                "exp_avg_sq_dtype": dtypes["exp_avg_sq"],
                "use_distributed_optimizer": True,
                "master_weights": pao and not dead,
                "use_decoupled_grad": pao and not dead,
            },
        },
        "tensor_parallel": run.tp,
        "pipeline_parallel": run.pp,
        "virtual_pipeline": 1,
        "data_parallel": run.dp,
        "ranks": ranks,
    }


def _series(run: MadeUpRun, count: int, salt: int) -> list[float]:
    """Noise that both arms of a pair share, and a drift of the treatment's own."""
    shared = np.random.default_rng([run.seed, salt]).normal(size=count)
    if run.arm in ("baseline", "baseline_repeat"):
        return shared.tolist()
    own = np.random.default_rng([run.seed, salt, sum(map(ord, run.arm))]).normal(size=count)
    return (shared + run.drift * np.arange(count) / max(count, 1) * 50 * own).tolist()


def step_rows(run: MadeUpRun) -> Iterator[dict[str, Any]]:
    noise = [_series(run, run.steps, salt) for salt in range(6)]
    slower = 1.0 if run.arm.startswith("baseline") else 1.04
    for i in range(run.steps):
        reward = 0.05 + 0.75 * (1 - math.exp(-3 * i / run.steps)) + 0.01 * noise[0][i]
        row: dict[str, Any] = {
            "step": i + 1,
            "wall_time": 1.7e9 + 10.0 * i,
            "actor/ppo_kl": 2e-3 * abs(1 + 0.2 * noise[1][i]) if run.updates_per_step > 1 else 0.0,
            "actor/pg_clipfrac": 0.02 * abs(1 + 0.2 * noise[2][i]),
            "actor/grad_norm": abs(1.5 + 0.2 * noise[3][i]),
            "actor/entropy": 2.0 - i / run.steps + 0.01 * noise[4][i],
            "actor/lr": run.lr,
            "critic/rewards/mean": reward,
            "critic/score/mean": reward,
            "response_length/mean": 200.0 + 10 * noise[5][i],
            "training/rollout_probs_diff_mean": 1e-3 + 1e-4 * abs(noise[4][i]),
            "training/global_step": i + 1,
            "rewards/within_group_std_mean": 0.3 + 0.02 * noise[0][i],
            "timing_s/step": slower * (10 + 0.2 * noise[0][i]),
            "timing_s/gen": 4.0,
            "timing_s/update_actor": slower * 3.0,
            "actor/perf/max_memory_allocated_gb": 40.0 if run.platform == "cuda" else 0.0,
        }
        row.update({f"perf/made_up_{j}": float(j + i) for j in range(40)})
        if (i + 1) % 5 == 0:
            row["val-core/made_up/acc/mean@1"] = reward
        yield row


def update_rows(run: MadeUpRun) -> Iterator[dict[str, Any]]:
    count = run.steps * run.updates_per_step
    noise = [_series(run, count, 10 + salt) for salt in range(3)]
    dead = run.arm == "dead_optimizer"
    per_parameter = sum(BYTES[dtype] for dtype in _state_dtypes(run.arm).values())
    source = "allocated" if run.platform == "cuda" else "rss"
    slower = 1.0 if run.arm.startswith("baseline") else 1.2
    for update in range(count):
        mini_batch = update % run.updates_per_step
        kl = 0.0 if mini_batch == 0 or dead else 1e-3 * mini_batch * abs(1 + 0.2 * noise[0][update])
        share = 0.0 if dead else min(0.9, abs(0.4 + 0.05 * noise[1][update]))
        grad_norm = abs(1.5 + 0.2 * noise[2][update])
        for rank in range(run.ranks):
            pipeline_rank = rank // (run.tp * run.dp)
            elements = _rank_elements(run, pipeline_rank)
            held = 1.0 + per_parameter * elements / GIB
            row: dict[str, Any] = {
                "step": update // run.updates_per_step + 1,
                "update": update + 1,
                "mini_batch": mini_batch,
                "rank": rank,
                "lr": run.lr,
                "time_forward_backward_s": 0.5,
                "time_observer_s": 0.01,
                "time_optimizer_step_s": slower * (0.01 + 0.0005 * abs(noise[0][update])),
                f"{source}_peak_before_update_gib": held + 0.1,
                f"{source}_peak_forward_backward_gib": held + 0.8,
                f"{source}_peak_optimizer_step_gib": held + 0.3,
                f"{source}_after_update_gib": held,
                "liveness": share,
                "elements_changed": int(share * elements),
                "elements": elements,
                "tensors": 17,
                "tensors_still": 17 if dead else 0,
                "liveness_method": "every element",
                "grad_norm": grad_norm,
            }
            if run.platform == "cuda":
                row.update(reserved_after_update_gib=held + 1.0, device_after_update_gib=held + 80.0)
            if rank % run.tp == 0 and pipeline_rank == run.pp - 1:
                row.update(ppo_kl=kl, pg_clipfrac=0.1 * kl, pg_loss=0.01 * noise[0][update], kl_loss=kl / 2)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="the study's folder; must not exist yet")
    parser.add_argument("--arms", default="baseline,baseline_repeat,pao,pao_bf16_all", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=16, help="seeds per arm (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--updates-per-step", type=int, default=4)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=1)
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} exists")
    for seed in range(1, options.seeds + 1):
        for arm in options.arms.split(","):
            run = MadeUpRun(
                arm=arm,
                seed=seed,
                steps=options.steps,
                updates_per_step=options.updates_per_step,
                tp=options.tp,
                pp=options.pp,
                dp=options.dp,
                platform="cuda",
                lr=1e-6,
                trainable=950_000_000,
                drift=1e-5,
            )
            print(write_run(options.folder, run), flush=True)


if __name__ == "__main__":
    main()
