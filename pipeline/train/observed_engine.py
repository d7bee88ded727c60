"""The observed Megatron engine: verl's class with an observer at each optimizer step."""

from collections.abc import Callable
from typing import Any

import torch
from verl.utils import tensordict_utils as tu

from pipeline.callbacks.engine_observer import EngineObserver
from pipeline.callbacks.failure import recording_failure
from pipeline.study import faults
from pipeline.study.run_folder import RunFolder


def observed(engine_class: type[Any]) -> type[Any]:
    """A subclass of verl's MegatronEngine that writes what happens to the run folder; it computes nothing else."""

    class ObservedEngine(engine_class):  # type: ignore[misc]
        _observer: EngineObserver

        def initialize(self) -> None:
            with self._recording_failure():
                super().initialize()
                if self.optimizer is not None:
                    folder = RunFolder.from_environment()
                    if folder is None:
                        raise RuntimeError("the observed engine needs PIPELINE_RUN_FOLDER")
                    self._observer = EngineObserver(self, folder)

        def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
            with self._recording_failure():
                self._observer.begin_update()
                outputs = super().train_batch(data, loss_function)
                last_of_step = bool(tu.get(data, "update_lr_scheduler", default=False))
                self._observer.end_update(outputs.get("metrics", {}), last_of_step)
                return outputs

        def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
            with self._recording_failure():
                return super().forward_backward_batch(*args, **kwargs)

        def optimizer_step(self) -> Any:
            at = (self._observer.step, self._observer.mini_batch)
            if faults.active() == "nan_gradient" and at == (faults.NAN_GRADIENT_STEP, 0):
                self.module[0].buffers[0].grad_data[0] = torch.nan
            self._observer.begin_optimizer_step()
            grad_norm = super().optimizer_step()
            self._observer.end_optimizer_step(grad_norm)
            return grad_norm

        def _recording_failure(self) -> Any:
            rank = torch.distributed.get_rank()
            return recording_failure(f"rank {rank}", rank)

    return ObservedEngine
