"""`python -m pipeline.train.probe_worker`: the optimizer steps of one arm, in a process of their own.

Reads config.yaml of PIPELINE_RUN_FOLDER and writes what a training run writes. A training step is what it is in GRPO,
without the sampling: log-probabilities of fixed tokens by the policy as it is, then several mini-batches, each a
clipped policy-gradient loss with fixed advantages, backward, and an optimizer step. Tokens and advantages depend on
seed, step and mini-batch alone, so every arm gets the same; gradients are the same as long as the weights are.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pipeline.callbacks.engine_observer import EngineObserver
from pipeline.callbacks.failure import recording_failure
from pipeline.callbacks.ledger import find_entries
from pipeline.callbacks.memory import GIB
from pipeline.study import json_lines
from pipeline.study.records import LedgerEntry
from pipeline.study.run_folder import RUN_FOLDER_VARIABLE, RunFolder, write_atomically
from pipeline.train.bare_megatron import BareEngine, build, one_rank
from pipeline.train.environment import find_environment
from pipeline.train.probe_shapes import SHAPES

_log = logging.getLogger(__name__)
BANDWIDTH_FILE = "bandwidth.json"
OVERHEAD_FILE = "probe_overhead.json"
_CLIP_RATIO = 0.2  # verl's default, clip_ratio
_COPY_BYTES = {"cuda": 4 * GIB, "cpu": 2**26}  # much larger than any cache
_COPY_REPEATS = 10
_OVERHEAD_PAIRS = 4


class ProbeObserver(EngineObserver):
    """The observer, given policy drift as numbers: verl's own metric objects would need verl."""

    def end_probe_update(self, drift: dict[str, float], succeeded: bool, last_of_step: bool) -> None:
        self._row.update(drift, optimizer_step_succeeded=succeeded)
        self.end_update({}, last_of_step)


@dataclass(frozen=True)
class MiniBatch:
    """Tokens int64 [sequence, position]; advantages fp32 [sequence, 1]."""

    tokens: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True)
class Task:
    """The fixed data of a run (recipe keys of pipeline.train.optimizer_probe)."""

    seed: int
    vocabulary: int
    mini_batches: int
    sequences: int
    positions: int
    device: str

    def of_step(self, step: int) -> list[MiniBatch]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        shape = (self.mini_batches, self.sequences, self.positions)
        tokens = torch.randint(0, self.vocabulary, shape, generator=generator)
        advantages = torch.randn((self.mini_batches, self.sequences, 1), generator=generator)
        return [
            MiniBatch(mine.to(self.device), theirs.to(self.device))
            for mine, theirs in zip(tokens, advantages, strict=True)
        ]


def policy_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """PPO's clipped loss, averaged over tokens, and the drift as verl defines it (core_algos.compute_policy_loss)."""
    difference = log_probs - old_log_probs
    ratio = difference.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - _CLIP_RATIO, 1 + _CLIP_RATIO)
    loss = torch.maximum(plain, clipped).mean()
    drift = {
        "ppo_kl": float(-difference.detach().mean()),
        "pg_clipfrac": float((clipped > plain).float().mean()),
        "pg_loss": float(loss.detach()),
    }
    return loss, drift


def forward_backward(
    engine: BareEngine, batch: MiniBatch, old_log_probs: torch.Tensor, times: int = 1
) -> dict[str, float]:
    """Gradients of the mini-batch, added up `times` times: as long as so many micro-batches take. The last drift."""
    engine.zero_gradients()
    for _ in range(times):
        loss, drift = policy_loss(-engine.token_losses(batch.tokens), old_log_probs, batch.advantages)
        loss.backward()
    engine.chunk.finish_grad_sync()
    return drift


def old_log_probabilities(engine: BareEngine, batches: list[MiniBatch]) -> list[torch.Tensor]:
    """By the policy as it is. With gradients enabled, so that the kernels are those of the update, bit for bit."""
    return [-engine.token_losses(batch.tokens).detach() for batch in batches]


def observed_update(
    engine: BareEngine, observer: ProbeObserver, batch: MiniBatch, old: torch.Tensor, last: bool, times: int = 1
) -> dict[str, float]:
    """One optimizer step with everything that a training run observes. Returns the update's metrics."""
    observer.begin_update()
    drift = forward_backward(engine, batch, old, times)
    observer.begin_optimizer_step()
    succeeded, grad_norm = engine.optimizer_step()
    observer.end_optimizer_step(grad_norm)
    observer.end_probe_update(drift, succeeded, last)
    return {**drift, "grad_norm": grad_norm}


def training_steps(engine: BareEngine, observer: ProbeObserver, task: Task, steps: int) -> Iterator[dict[str, float]]:
    """Yield verl's metrics of each training step, under verl's names."""
    for step in range(1, steps + 1):
        started = time.perf_counter()
        batches = task.of_step(step)
        olds = old_log_probabilities(engine, batches)
        updates = [
            observed_update(engine, observer, batch, old, last=number == len(batches))
            for number, (batch, old) in enumerate(zip(batches, olds, strict=True), start=1)
        ]
        _synchronize(task.device)
        yield {
            **{f"actor/{name}": sum(update[name] for update in updates) / len(updates) for name in updates[0]},
            "actor/lr": float(engine.optimizer.param_groups[0]["lr"]),
            "timing_s/step": time.perf_counter() - started,
            **_lifetime_peaks(task.device),
        }


def _lifetime_peaks(device: str) -> dict[str, float]:
    if device == "cpu":
        return {}
    return {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / GIB,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved() / GIB,
    }


# -- bandwidth --------------------------------------------------------------------------------------------------------


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a device-to-device copy, bytes read and bytes written counted; median of repeats."""
    source = torch.ones(_COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(_COPY_REPEATS + 1):
        _synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * source.numel() / median(times[1:])


def step_bytes_per_parameter(entries: list[LedgerEntry]) -> dict[str, dict[str, int]]:
    """The fewest bytes per parameter that a step must read and write, from the tensors that were found.

    Read: the gradient twice (its norm must be known before it is used), both moments, and the master weight: fp32, or
    the bf16 weight with its int16 remainder. Written: moments, master weight (or remainder), bf16 weight. Not counted,
    so part of what a measured step takes longer: Megatron's passes of its own (scaling the gradient to clip it, copying
    masters to weights) and TransformerEngine's fp32 copies of bf16 moments.
    """
    size = {entry.kind: entry.bytes // entry.elements for entry in entries if entry.elements}
    master, moments = size.get("master_param", 0), {kind: size.get(kind, 0) for kind in ("exp_avg", "exp_avg_sq")}
    master_is_whole = master == 4
    return {
        "read": {
            "main_grad": 2 * size["main_grad"],
            "master_param": master,
            "param": 0 if master_is_whole else size["param"],
            **moments,
        },
        "written": {"master_param": master, "param": size["param"], **moments},
    }


def write_bandwidth(folder: RunFolder, engine: BareEngine, bandwidth: float, parameters: int) -> None:
    rows = [row for row in json_lines.read_rows(folder.updates_file) if isinstance(row, dict)]
    times = [row["time_optimizer_step_s"] for row in rows[1:]]  # the first allocates moments and loads kernels
    per_parameter = step_bytes_per_parameter(find_entries(engine.module, engine.optimizer))
    total = sum(sum(kinds.values()) for kinds in per_parameter.values())
    floor = total * parameters / bandwidth
    content = {
        "parameters": parameters,
        "copy_bandwidth_bytes_per_s": bandwidth,
        "bytes_per_parameter": per_parameter,
        "bytes_per_parameter_total": total,
        "floor_s": floor,
        "optimizer_step_s": {"median": median(times), "lowest": min(times), "highest": max(times), "n": len(times)},
        "ratio": median(times) / floor,
    }
    write_atomically(folder.path / BANDWIDTH_FILE, json_lines.dumps(content, indent=True))


# -- what observing costs ---------------------------------------------------------------------------------------------


def write_overhead(folder: RunFolder, engine: BareEngine, task: Task, micro_batches: int) -> None:
    """Updates with and without the observer, in turn, on one mini-batch; the observer writes to a folder of its own.

    Observing takes the same time however large the mini-batch is, so its share says something only beside the size:
    each update goes `micro_batches` times through the mini-batch. Memory: what the observer keeps, and the most that it
    has, while it compares. (On a GPU; RSS is too coarse.)
    """
    batch, *_ = task.of_step(0)
    (old,) = old_log_probabilities(engine, [batch])
    with tempfile.TemporaryDirectory(prefix="overhead-") as scratch:
        before = _allocated(task.device)
        observer = ProbeObserver(engine, RunFolder(Path(scratch)))
        kept = _allocated(task.device) - before
        observed_update(engine, observer, batch, old, last=False)  # the first writes the ledger
        on_top = _peak_while_comparing(engine, observer, batch, old, task.device)

        def observed() -> None:
            observed_update(engine, observer, batch, old, last=False, times=micro_batches)

        def bare() -> None:
            forward_backward(engine, batch, old, micro_batches)
            engine.optimizer_step()

        pairs = [(_timed(task.device, observed), _timed(task.device, bare)) for _ in range(_OVERHEAD_PAIRS)]
    with_observer, without = (list(times) for times in zip(*pairs, strict=True))
    content = {
        "tokens_per_update": micro_batches * batch.tokens.numel(),
        "update_with_observer_s": median(with_observer),
        "update_without_s": median(without),
        "overhead_per_update_s": median(seen - unseen for seen, unseen in pairs),
        "pairs": len(pairs),
        "with_observer_s": with_observer,
        "without_s": without,
    }
    if task.device == "cuda":
        content |= {"memory_kept_mib": kept / 2**20, "memory_at_most_mib": (kept + on_top) / 2**20}
    write_atomically(folder.path / OVERHEAD_FILE, json_lines.dumps(content, indent=True))


def _timed(device: str, action: Any) -> float:
    _synchronize(device)
    started = time.perf_counter()
    action()
    _synchronize(device)
    return time.perf_counter() - started


def _peak_while_comparing(
    engine: BareEngine, observer: ProbeObserver, batch: MiniBatch, old: torch.Tensor, device: str
) -> int:
    """The observer resets the allocator's peak right before it compares, and again when the next update begins."""
    observed_update(engine, observer, batch, old, last=False)
    if device == "cpu":
        return 0
    return int(torch.cuda.memory_stats()["allocated_bytes.all.peak"]) - torch.cuda.memory_allocated()


def _allocated(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.memory_allocated()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# -- the run ----------------------------------------------------------------------------------------------------------


def run(folder: RunFolder) -> None:
    """Run the arm of config.yaml. The run folder gets all but status.json, which the parent writes."""
    config = folder.read_config()
    recipe = config.recipe
    on_cpu = config.cluster["worker_resource"] != "GPU"
    device = "cpu" if on_cpu else "cuda"
    environment = find_environment(device, optimizer_alone=True)
    write_atomically(folder.environment_file, json_lines.dumps(environment.model_dump(), indent=True))
    if config.arm.get("fault") == "dead_optimizer":
        from pipeline.train import dead_optimizer

        dead_optimizer.install()
    shape = SHAPES[recipe["model_name"]]
    optim: dict[str, Any] = {
        **recipe["verl"]["actor_rollout_ref"]["actor"]["optim"],
        **config.arm["verl"].get("actor_rollout_ref", {}).get("actor", {}).get("optim", {}),
    }
    task = Task(
        config.seed, shape.vocabulary, recipe["mini_batches"], recipe["mini_batch_size"], recipe["sequence_length"],
        device,
    )  # fmt: skip
    with one_rank(on_cpu):
        bandwidth = copy_bandwidth(device)
        if not on_cpu:
            torch.cuda.empty_cache()
        engine = build(shape, optim, on_cpu)
        found = sum(parameter.numel() for parameter in engine.chunk.parameters())
        assert found == shape.parameters, f"{found} parameters were built, {shape.parameters} belong to the shape"
        observer = ProbeObserver(engine, folder)
        for step, metrics in enumerate(training_steps(engine, observer, task, recipe["steps"]), start=1):
            json_lines.append_row(folder.steps_file, {"step": step, "wall_time": time.time(), **metrics})
            _log.info("step %d: %s", step, metrics)
        write_bandwidth(folder, engine, bandwidth, shape.parameters)
        del observer  # its memory: the next one's is measured
        write_overhead(folder, engine, task, recipe["overhead_micro_batches"])


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder = RunFolder.from_environment()
    if folder is None:
        _log.error("pipeline.train.optimizer_probe starts this and sets %s", RUN_FOLDER_VARIABLE)
        return 2
    with recording_failure("rank 0", 0):
        run(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
