"""What one rank observes of its Megatron engine, written to the run folder as it happens.

One row per optimizer step (liveness, grad_norm, lr, policy drift, times, memory by phase, what observing took) and,
after the first one, this rank's part of the ledger.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.callbacks import ledger as ledger_walk
from pipeline.callbacks.liveness import probe_for
from pipeline.callbacks.masters import observe_masters
from pipeline.callbacks.memory import GIB, PhaseMemory, reader_for
from pipeline.callbacks.policy_drift import mini_batch_drift
from pipeline.study import json_lines
from pipeline.study.records import Ledger, RankLedger, RankMemory
from pipeline.study.run_folder import RunFolder, write_atomically


class EngineObserver:
    """Observes one rank of a Megatron engine (verl's MegatronEngine, initialised, with an optimizer)."""

    def __init__(self, engine: Any, folder: RunFolder) -> None:
        self._engine = engine
        self._folder = folder
        self._rank = torch.distributed.get_rank()
        self._device = next(iter(self._parameters())).device.type
        self._reader = reader_for(self._device)
        self._memory = PhaseMemory(self._reader)
        self._after_load_gib = self._reader.now_bytes() / GIB
        self._liveness = probe_for(self._parameters())
        self._update = 0
        self._step = 1
        self._mini_batch = 0
        self._row: dict[str, Any] = {}
        self._own_s = 0.0  # what observing took since the last row

    @property
    def step(self) -> int:
        """The training step that the next update belongs to, 1-based."""
        return self._step

    @property
    def mini_batch(self) -> int:
        """The mini-batch of the present or next update within its training step, 0-based."""
        return self._mini_batch

    def begin_update(self) -> None:
        self._update += 1
        with self._own_time():
            self._memory.begin_update()
            self._row = {
                "step": self._step,
                "update": self._update,
                "mini_batch": self._mini_batch,
                "rank": self._rank,
                "lr": float(self._engine.optimizer.param_groups[0]["lr"]),
            }
        self._started = self._now()

    def begin_optimizer_step(self) -> None:
        self._row["time_forward_backward_s"] = self._now() - self._started
        with self._own_time():
            self._memory.begin_optimizer_step()
            self._liveness.before_step()
        self._started = self._now()

    def end_optimizer_step(self, grad_norm: Any) -> None:
        self._row["time_optimizer_step_s"] = self._now() - self._started
        with self._own_time():
            self._observe_step(grad_norm)

    def _observe_step(self, grad_norm: Any) -> None:
        # Before the comparison below, which needs memory of its own.
        self._row.update(self._memory.end_optimizer_step())
        found = self._liveness.after_step()
        self._row.update(
            liveness=found.share,
            elements_changed=found.elements_changed,
            elements=found.elements,
            tensors=found.tensors,
            tensors_still=found.tensors_still,
            liveness_method=found.method,
            grad_norm=float(grad_norm),
        )
        if self._device == "cpu":
            # Runs on a GPU do not repeat bit for bit, and a large model's masters are too many to read at every step.
            self._row.update(observe_masters(self._engine.optimizer))

    def end_update(self, metrics: dict[str, Any], last_of_step: bool) -> None:
        """Write the row. `metrics` is what verl's engine returned (empty on ranks without outputs)."""
        # Writing this row counts to the next one.
        self._row["time_observer_s"], self._own_s = self._own_s, 0.0
        with self._own_time():
            self._row.update(mini_batch_drift(metrics))
            json_lines.append_row(self._folder.updates_file, self._row)
            if self._update == 1:
                self._write_ledger()
        self._mini_batch = 0 if last_of_step else self._mini_batch + 1
        self._step += int(last_of_step)

    @contextmanager
    def _own_time(self) -> Iterator[None]:
        started = self._now()
        yield
        self._own_s += self._now() - started

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self._engine.module for p in chunk.parameters() if p.requires_grad]

    def _write_ledger(self) -> None:
        """Gather every rank's ledger; rank 0 writes the file. Collective, once per run."""
        mine = self._rank_ledger().model_dump()
        everybody: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everybody, mine)
        if self._rank != 0:
            return
        from megatron.core import parallel_state

        found = Ledger(
            optimizer=ledger_walk.find_optimizer(self._engine.optimizer),
            tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_parallel=parallel_state.get_pipeline_model_parallel_world_size(),
            virtual_pipeline=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            data_parallel=parallel_state.get_data_parallel_world_size(),
            ranks=[RankLedger.model_validate(entry) for entry in everybody],
        )
        write_atomically(self._folder.ledger_file, json_lines.dumps(found.model_dump(), indent=True))

    def _rank_ledger(self) -> RankLedger:
        memory = RankMemory(
            source=self._reader.source,
            after_load_gib=self._after_load_gib,
            after_first_update_gib=self._row[f"{self._reader.source}_after_update_gib"],
            device_total_gib=self._reader.total_bytes() / GIB,
        )
        return ledger_walk.rank_ledger(self._rank, self._engine.module, self._engine.optimizer, memory)
