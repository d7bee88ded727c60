"""The dashboard's plots over categories: the ledger, memory by phase and rank, drift by mini-batch, time ratios."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.analysis.bar_figures import ledger_parts, trainers_own_source
from pipeline.analysis.conclusions import Conclusions, Verdict
from pipeline.analysis.dashboard_curves import Plot
from pipeline.analysis.load import Run
from pipeline.analysis.memory import PHASE_WORDS, PHASES, SOURCE_WORDS, RunMemory

Point = tuple[float, float, float] | None
"""Value, and the lowest and highest that its whisker spans; None: not measured."""


def ledger_plot(conclusions: Conclusions) -> Plot | None:
    """Bytes per parameter of each arm by kind of tensor, predicted beside found."""
    ledgers = conclusions.ledgers
    if not ledgers:
        return None
    columns = [
        {
            "arm": arm,
            "setting": setting,
            **{what: {name: size for name, _, size in ledger_parts(ledger, what)} for what in ("predicted", "found")},
        }
        for (arm, setting), ledger in ledgers.items()
    ]
    colours = {
        name: colour
        for ledger in ledgers.values()
        for what in ("predicted", "found")
        for name, colour, _ in ledger_parts(ledger, what)
    }
    degrees = sorted({ledger.distributed_optimizer_degree for ledger in ledgers.values()})
    note = f"Predicted from the settings, beside found in the workers. {_over(degrees)}"
    data = {"unit": "bytes per trainable parameter", "columns": columns, "kinds": colours}
    return Plot("ledger", "Ledger: bytes by kind of tensor", note, data)


def _over(degrees: list[int]) -> str:
    listed = ", ".join(map(str, degrees))
    return f"Distributed optimizer over d = {listed} {'rank' if degrees == [1] else 'ranks'}."


def phases_plot(conclusions: Conclusions) -> Plot | None:
    """The trainer's own memory by phase, largest rank."""
    source = trainers_own_source(conclusions)
    if source is None:
        return None
    memory = conclusions.memory
    phases = [phase for phase in PHASES if any(_by_rank(own, source, [phase]) for own in memory.values())]

    def of_arm(arm: str) -> list[Point]:
        runs = conclusions.arms[arm].runs
        by_phase = [[_by_rank(memory[run.id], source, [phase]).values() for run in runs] for phase in phases]
        return [_point([max(ranks) for ranks in by_run if ranks]) for by_run in by_phase]

    def difference(arm: str) -> list[Point]:
        items = {item.phase: item for item in conclusions.verdicts[arm].memory if item.source == source}
        found = [items.get(phase) for phase in phases]
        return [None if item is None else (item.difference, item.lowest, item.highest) for item in found]

    note = f"{_sentence(SOURCE_WORDS[source])}. Largest rank; whiskers: all runs (as differences: all pairs and ranks)."
    return _categories(
        conclusions,
        "Memory by phase",
        note,
        [PHASE_WORDS[phase] for phase in phases],
        {"unit": "GiB", "style": "bar"},
        of_arm,
        difference,
    )


def ranks_plot(conclusions: Conclusions) -> Plot | None:
    """The trainer's own memory by rank: steady state, and the highest peak."""
    source = trainers_own_source(conclusions)
    if source is None:
        return None
    ranks = sorted({key[2] for own in conclusions.memory.values() for key in own.readings if key[0] == source})
    peaks = [phase for phase in PHASES if phase.startswith("peak")]
    layers: dict[str, Any] = {}
    for marker, words, phases in (("circle", "steady state", ["after_update"]), ("triangle", "highest peak", peaks)):
        by_run = {run: _by_rank(memory, source, phases) for run, memory in conclusions.memory.items()}
        layers[marker] = {
            "name": words,
            "values": {
                arm: _rank_points([by_run[run.id] for run in found.runs], ranks)
                for arm, found in conclusions.arms.items()
            },
            "differences": {
                arm: _rank_points(_differences(by_run, verdict), ranks) for arm, verdict in conclusions.verdicts.items()
            },
        }
    note = f"{_sentence(SOURCE_WORDS[source])}. Circles: steady state; triangles: highest peak; whiskers: all runs."
    data = {"unit": "GiB", "style": "dot", "xLabel": "rank", "labels": list(map(str, ranks)), "layers": layers}
    return Plot("categories", "Memory by rank", note, data)


def _differences(by_run: dict[str, dict[int, float]], verdict: Verdict) -> list[dict[int, float]]:
    sides = [(by_run[pair.baseline.id], by_run[pair.treatment.id]) for pair in verdict.valid_pairs or verdict.pairs]
    return [{rank: right[rank] - left[rank] for rank in left.keys() & right.keys()} for left, right in sides]


def _rank_points(by_rank: list[dict[int, float]], ranks: list[int]) -> list[Point]:
    return [_point([found[rank] for found in by_rank if rank in found]) for rank in ranks]


def mini_batch_plot(conclusions: Conclusions, field: str, title: str, unit: str) -> Plot | None:
    """A field of updates.jsonl by mini-batch within a step."""
    runs = conclusions.study.runs
    if not any(np.isfinite(run.updates.column(field)).any() for run in runs):
        return None
    batches = sorted({float(batch) for run in runs for batch in np.unique(_known_batches(run, field))})

    def of_arm(arm: str) -> list[Point]:
        values = np.concatenate([run.updates.column(field) for run in conclusions.study.runs_of(arm)])
        batch = np.concatenate([run.updates.column("mini_batch") for run in conclusions.study.runs_of(arm)])
        return [_middle(values[np.isfinite(values) & (batch == one)]) for one in batches]

    return _categories(
        conclusions,
        title,
        "Median and, as whiskers, the middle 80 % over steps, ranks and seeds. The first mini-batch is on-policy.",
        [f"{batch + 1:.0f}" for batch in batches],
        {"unit": unit, "style": "dot", "xLabel": "mini-batch (optimizer step) within a training step"},
        of_arm,
        None,
    )


def _known_batches(run: Run, field: str) -> Any:
    batch = run.updates.column("mini_batch")
    return batch[np.isfinite(batch) & np.isfinite(run.updates.column(field))]


def _middle(values: Any) -> Point:
    if not len(values):
        return None
    low, middle, high = (float(value) for value in np.quantile(values, [0.1, 0.5, 0.9]))
    return middle, low, high


def time_ratio_plot(conclusions: Conclusions) -> Plot | None:
    """What the saving costs in time."""
    verdicts = conclusions.verdicts
    if not any(verdict.optimizer_step or verdict.step for verdict in verdicts.values()):
        return None

    def of_arm(arm: str) -> list[Point]:
        if arm not in verdicts:
            return [None, None]
        found = (verdicts[arm].optimizer_step, verdicts[arm].step)
        return [None if ratio is None else (ratio.ratio, ratio.low, ratio.high) for ratio in found]

    bases = dict.fromkeys(
        ratio.basis for verdict in verdicts.values() for ratio in (verdict.optimizer_step, verdict.step) if ratio
    )
    return _categories(
        conclusions,
        "Time, treatment over baseline",
        f"Ratio of medians; 1 is as fast as the baseline. Whiskers: {'; '.join(bases)}.",
        ["optimizer step", "whole step"],
        {"unit": "ratio of times", "style": "dot", "line": 1},
        of_arm,
        None,
    )


def _categories(
    conclusions: Conclusions,
    title: str,
    note: str,
    labels: list[str],
    data: dict[str, Any],
    of_arm: Callable[[str], list[Point]],
    difference: Callable[[str], list[Point]] | None,
) -> Plot:
    layer = {
        "name": "",
        "values": {arm: of_arm(arm) for arm in conclusions.study.arms},
        "differences": None if difference is None else {arm: difference(arm) for arm in conclusions.verdicts},
    }
    return Plot("categories", title, note, {"xLabel": "", "labels": labels, "layers": {"circle": layer}, **data})


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _by_rank(memory: RunMemory, source: str, phases: Sequence[str]) -> dict[int, float]:
    """The highest of the readings in these phases."""
    highest: dict[int, float] = {}
    for (its_source, phase, rank), value in memory.readings.items():
        if its_source == source and phase in phases:
            highest[rank] = max(value, highest.get(rank, value))
    return highest


def _point(values: list[float]) -> Point:
    return (sum(values) / len(values), min(values), max(values)) if values else None
