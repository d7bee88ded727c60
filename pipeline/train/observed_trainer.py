"""The observed trainer: verl's synchronous PPO trainer, each step's metrics passed on to the monitors."""

from collections import defaultdict
from typing import Any

import torch
import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from pipeline.callbacks.failure import recording_failure
from pipeline.callbacks.monitors import FileMonitor, Monitor, numbers
from pipeline.callbacks.wandb_monitor import WandbMonitor
from pipeline.study.run_folder import RunFolder
from pipeline.tracking.wandb_run import KILLED


class MonitorBackend:
    """A backend of verl's Tracking: verl calls `log` once per step (and for a validation before training)."""

    def __init__(self, monitors: list[Monitor]) -> None:
        self._monitors = monitors

    def log(self, data: dict[str, Any], step: int) -> None:
        metrics = numbers(data)
        for monitor in self._monitors:
            monitor.log(step, metrics)


class ObservedTrainer(PPOTrainerSync):
    """Takes the place of verl's "sync" trainer in its registry. Nothing that is computed changes."""

    def __init__(self, config: Any) -> None:
        folder = RunFolder.from_environment()
        if folder is None:
            raise RuntimeError("the observed trainer needs PIPELINE_RUN_FOLDER")
        self._monitors: list[Monitor] = [FileMonitor(folder)]
        if folder.read_config().tracking["mode"] != "disabled":
            self._monitors.append(WandbMonitor(folder))
        for monitor in self._monitors:
            monitor.begin()
        with recording_failure("trainer"):
            super().__init__(config)

    def init(self) -> None:
        with recording_failure("trainer"):
            super().init()

    def fit(self, agent_loop_manager: Any) -> None:
        exit_code = KILLED
        try:
            with recording_failure("trainer"):
                super().fit(agent_loop_manager)
            exit_code = 0
        except Exception:
            exit_code = 1
            raise
        finally:
            for monitor in self._monitors:
                monitor.finish(exit_code)

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._attach_monitors()

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        self._attach_monitors()

    def _attach_monitors(self) -> None:
        self.logger.logger.setdefault("pipeline", MonitorBackend(self._monitors))

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        metrics["rewards/within_group_std_mean"] = within_group_std(batch)
        return super()._compute_advantage(batch, metrics)


def within_group_std(batch: Any) -> float:
    """Mean over prompts of the standard deviation of the rewards of a prompt's samples: GRPO's learning signal.

    batch: verl's KVBatchMeta; its keys are "<prompt uid>_<session>_<index>". Zero means that no group has a preference.
    """
    scores = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["rm_scores"])
    groups: dict[str, list[float]] = defaultdict(list)
    for key, sample in zip(batch.keys, scores["rm_scores"].unbind(), strict=True):
        groups[key.split("_")[0]].append(float(sample.sum()))
    return float(torch.stack([torch.tensor(group).std(correction=0) for group in groups.values()]).mean())
