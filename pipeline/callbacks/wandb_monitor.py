"""The W&B mirror of a run: grouped by pair, typed by arm, named by the run id, resumable."""

import logging
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from pipeline.study import json_lines
from pipeline.study.records import RunConfig
from pipeline.study.run_folder import RunFolder, write_atomically

_log = logging.getLogger(__name__)
_RANKS_SHOWN = 16  # one curve per rank up to here, minimum, mean and maximum beyond


def run_settings(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """The arguments of `wandb.init` for this run: everything that makes it findable and comparable."""
    return {
        "entity": config.tracking.get("entity"),
        "project": config.tracking["project"],
        "id": config.run_id,
        "name": config.run_id,
        "group": f"{config.study_name}/{config.pair}",
        "job_type": config.arm["name"],
        "tags": [config.recipe["name"], config.cluster["name"], config.arm["name"], f"seed{config.seed}"],
        "mode": config.tracking["mode"],
        "dir": str(folder.path),
        "resume": "allow",
    }


def define_axes(run: Any) -> None:
    """Per-step series run over verl's step, per-update series over the optimizer step; summaries keep what fits."""
    run.define_metric("training/global_step", hidden=True)
    run.define_metric("*", step_metric="training/global_step")
    run.define_metric("update/index", hidden=True)
    run.define_metric("update/*", step_metric="update/index")
    run.define_metric("update/liveness", step_metric="update/index", summary="min")
    run.define_metric("memory/*", step_metric="update/index", summary="max")
    for name in ("critic/rewards/mean", "actor/ppo_kl", "actor/pg_clipfrac"):
        run.define_metric(name, step_metric="training/global_step", summary="last")


class WandbMonitor:
    """Streams rows to W&B. A failure of W&B is written to tracking_error.json and ends the mirror, never the run."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self._folder = folder
        self._config = config
        self._run: Any = None
        self._rows = 0
        self._failed = False
        # Starting W&B's service takes seconds; verl starts its workers meanwhile.
        self._starting = threading.Thread(target=self._guarded, args=(self._start,), daemon=True)

    def begin(self) -> None:
        self._starting.start()

    def log(self, step: int, metrics: dict[str, float], updates: list[dict[str, Any]]) -> None:
        self._guarded(self._send, step, metrics, updates)

    def finish(self, exit_code: int) -> None:
        self._guarded(self._end, exit_code)

    def _start(self) -> None:
        import wandb

        settings = run_settings(self._config, self._folder)
        config = yaml.safe_load(self._folder.config_file.read_text())
        environment = json_lines.loads(self._folder.environment_file.read_bytes())
        self._run = wandb.init(
            **settings,
            config={**config, "environment": environment},
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, init_timeout=60),
        )
        define_axes(self._run)

    def _send(self, step: int, metrics: dict[str, float], updates: list[dict[str, Any]]) -> None:
        self._starting.join()
        if self._failed:
            return
        for row in update_rows_by_index(updates):
            self._run.log(row)
            self._rows += 1
        self._run.log({"training/global_step": step, **metrics})
        self._rows += 1

    def _end(self, exit_code: int) -> None:
        self._starting.join()
        if self._failed:
            return
        if self._folder.ledger_file.exists():
            self._run.summary["ledger"] = json_lines.loads(self._folder.ledger_file.read_bytes())
        self._run.summary["rows_sent"] = self._rows
        self._run.finish(exit_code=exit_code)
        # Ray kills this process's children before its exit handlers run: W&B's own would fail noisily then.
        import wandb

        wandb.teardown(exit_code)

    def _guarded(self, action: Any, *arguments: Any) -> None:
        if self._failed:
            return
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001  whatever W&B raises, training goes on
            self._failed = True
            path = Path(self._folder.path) / "tracking_error.json"
            note = {"error": f"{type(error).__name__}: {error}", "rows_sent": self._rows}
            write_atomically(path, json_lines.dumps(note, indent=True))
            _log.warning("W&B tracking failed and is off for the rest of the run (%s): %s", path.name, error)


def update_rows_by_index(updates: list[dict[str, Any]]) -> list[dict[str, float]]:
    """One W&B row per optimizer step out of the ranks' rows: per-rank memory, the smallest liveness, drift means."""
    by_index: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in updates:
        by_index[row["update"]].append(row)
    return [_wandb_row(index, sorted(rows, key=lambda row: row["rank"])) for index, rows in sorted(by_index.items())]


def _wandb_row(index: int, rows: list[dict[str, Any]]) -> dict[str, float]:
    result: dict[str, float] = {
        "update/index": index,
        "training/global_step": rows[0]["step"],
        "update/liveness": min(row["liveness"] for row in rows),
        "update/grad_norm": rows[0]["grad_norm"],
        "update/lr": rows[0]["lr"],
        "update/time_optimizer_step_s": max(row["time_optimizer_step_s"] for row in rows),
    }
    for name in ("ppo_kl", "pg_clipfrac"):
        values = [row[name] for row in rows if name in row]
        if values:
            result[f"update/{name}"] = sum(values) / len(values)
    for name in (name for name in rows[0] if name.endswith("_gib")):
        values = [row[name] for row in rows]
        if len(rows) <= _RANKS_SHOWN:
            result.update({f"memory/{name}/rank{row['rank']}": row[name] for row in rows})
        else:
            result.update(
                {
                    f"memory/{name}/min": min(values),
                    f"memory/{name}/mean": sum(values) / len(values),
                    f"memory/{name}/max": max(values),
                }
            )
    return result
