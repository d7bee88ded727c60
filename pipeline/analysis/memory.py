"""Memory by phase and rank, GiB. Each source stands apart, named: a rank's own reading is never mixed with another's.

Sources: "rss" is a worker process on the host; "allocated" and "reserved" are torch's allocator in the trainer's
process; "device" is the whole GPU as NVML sees it, which holds the rollout engine's pool too and is never taken for the
trainer's memory.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.analysis.columns import BoolArray, FloatArray, Table
from pipeline.analysis.load import MEMORY_PHASES, MEMORY_SOURCES, Pair, Run

AFTER_LOAD, AFTER_FIRST_UPDATE = "after_load", "after_first_update"
PHASES = (AFTER_LOAD, AFTER_FIRST_UPDATE, *MEMORY_PHASES)
PHASE_WORDS = {
    AFTER_LOAD: "after load",
    AFTER_FIRST_UPDATE: "after first optimizer step",
    "after_update": "steady state",
    "peak_forward_backward": "peak in forward/backward",
    "peak_optimizer_step": "peak in optimizer step",
    "peak_before_update": "peak between updates",
}
SOURCE_WORDS = {
    "rss": "resident memory of the worker process",
    "allocated": "torch's allocator, trainer process",
    "reserved": "torch's allocator with its cache, trainer process",
    "device": "whole device by NVML",
}
_ALLOCATOR_TOLERANCE = 0.10  # share of the expected saving; the allocator rounds block sizes up
_ALLOCATOR_FLOOR_GIB = 0.05
_LIFETIME_PEAKS = (
    "actor/perf/max_memory_allocated_gb",
    "actor/perf/max_memory_reserved_gb",
    "perf/max_memory_allocated_gb",
    "perf/max_memory_reserved_gb",
)

Reading = tuple[str, str, int]
"""Source, phase, rank."""


@dataclass(frozen=True)
class RunMemory:
    """One number per source, phase and rank: the median after updates, the largest of the peaks. GiB."""

    readings: dict[Reading, float]
    device_gib: float | None
    """The device's size; the host's on CPU."""
    notes: list[str]
    """Rows that were left out, and why."""


@dataclass(frozen=True)
class MemoryDifference:
    """Treatment minus baseline in one phase, over ranks and pairs. GiB."""

    source: str
    phase: str
    baseline: float
    treatment: float
    """Largest rank, averaged over pairs: what must fit."""
    difference: float
    """Mean over pairs and ranks, each rank against the same rank of its baseline."""
    lowest: float
    highest: float


def source_words(source: str, *, rollout: bool) -> str:
    """rollout: whether a rollout engine shared the device with the trainer."""
    return f"{SOURCE_WORDS[source]}{', rollout engine included' if rollout and source == 'device' else ''}"


def allocator_rounding_gib(expected: float) -> float:
    """What the allocator's reading of a difference may be off by, for no fault of the arm."""
    return max(_ALLOCATOR_TOLERANCE * abs(expected), _ALLOCATOR_FLOOR_GIB)


def run_memory(run: Run) -> RunMemory:
    """Readings that can be true; the others are noted."""
    device = _device_gib(run)
    notes: list[str] = []
    readings: dict[Reading, float] = {}
    ranks = run.updates.column("rank")
    for source in MEMORY_SOURCES:
        for phase in MEMORY_PHASES:
            values = _plausible(run.updates, f"{source}_{phase}_gib", device, notes)
            for rank in np.unique(ranks[~np.isnan(values)]):
                own = values[(ranks == rank) & ~np.isnan(values)]
                settled = own[1:] if len(own) > 1 else own  # moments are allocated in the first optimizer step
                summary = np.median(settled) if phase == "after_update" else np.max(settled)
                readings[source, phase, int(rank)] = float(summary)
    for rank in run.ledger.ranks if run.ledger else []:
        for phase, value in (
            (AFTER_LOAD, rank.memory.after_load_gib),
            (AFTER_FIRST_UPDATE, rank.memory.after_first_update_gib),
        ):
            if _possible(np.array([value]), device).all():
                readings[rank.memory.source, phase, rank.rank] = value
            else:
                notes.append(f"ledger.json: rank {rank.rank} {phase}_gib {value:g} is impossible: left out")
    notes.extend(_lifetime_peak_notes(run.steps, device))
    return RunMemory(readings, device, notes)


def _device_gib(run: Run) -> float | None:
    sizes = [rank.memory.device_total_gib for rank in run.ledger.ranks] if run.ledger else []
    known = [size for size in sizes if size]
    return max(known) if known else None


def _possible(values: FloatArray, device: float | None) -> BoolArray:
    return np.isfinite(values) & (values >= 0) & (values <= (np.inf if device is None else device))


def _plausible(table: Table, name: str, device: float | None, notes: list[str]) -> FloatArray:
    values = np.array(table.column(name), dtype=np.float64)
    impossible = ~np.isnan(values) & ~_possible(values, device)
    if impossible.any():
        first = int(np.flatnonzero(impossible)[0])
        limit = "" if device is None else f" (the device has {device:.1f} GiB)"
        notes.append(
            f"updates.jsonl: {int(impossible.sum())} readings of {name} are negative, infinite or above the device's "
            f"size{limit}, the first {values[first]:g} at step {table.step[first]}: left out"
        )
        values[impossible] = np.nan
    return values


def _lifetime_peak_notes(steps: Table, device: float | None) -> list[str]:
    """verl's lifetime peaks can only grow; where they do not, the rows are invalid."""
    notes: list[str] = []
    for name in _LIFETIME_PEAKS:
        values = _plausible(steps, name, device, notes)
        measured = np.flatnonzero(~np.isnan(values))
        falls = measured[1:][np.diff(values[measured]) < 0]
        if len(falls):
            at = steps.step[falls]
            notes.append(
                f"steps.jsonl: {name} is a lifetime peak and yet falls at step {', '.join(map(str, at[:5]))}: these "
                "rows are invalid"
            )
    return notes


def lifetime_peak_gib(run: Run) -> float | None:
    """verl's own largest reading, over the ranks that report metrics; on the host the stand-in reads its process."""
    found = [run.metric(name) for name in _LIFETIME_PEAKS if name.endswith("allocated_gb")]
    values = np.concatenate(found)
    known = values[_possible(values, _device_gib(run)) & (values > 0)]
    return float(known.max()) if len(known) else None


def memory_differences(pairs: list[Pair], memory: dict[str, RunMemory]) -> list[MemoryDifference]:
    """Every source and phase that both runs of at least one pair measured on the same ranks. memory: by run id."""
    found: list[MemoryDifference] = []
    both = [(memory[pair.baseline.id].readings, memory[pair.treatment.id].readings) for pair in pairs]
    for source in MEMORY_SOURCES:
        for phase in PHASES:
            largest: list[tuple[float, float]] = []
            differences: list[float] = []
            for left, right in both:
                keys = [key for key in left if key[:2] == (source, phase) and key in right]
                if keys:
                    largest.append((max(left[key] for key in keys), max(right[key] for key in keys)))
                    differences.extend(right[key] - left[key] for key in keys)
            if differences:
                baseline, treatment = (sum(side) / len(largest) for side in zip(*largest, strict=True))
                mean = sum(differences) / len(differences)
                found.append(
                    MemoryDifference(source, phase, baseline, treatment, mean, min(differences), max(differences))
                )
    return found
