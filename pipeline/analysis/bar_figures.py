"""The pictures that are not curves: the ledger, memory by phase, ppo_kl by mini-batch."""

# matplotlib annotates its keyword arguments as Unknown, which strict mode would report at every call.
# pyright: reportUnknownMemberType=false

from textwrap import wrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, MultipleLocator

from pipeline.analysis.arm_styles import arm_style
from pipeline.analysis.columns import FloatArray
from pipeline.analysis.conclusions import Conclusions
from pipeline.analysis.declared import KINDS
from pipeline.analysis.figure_style import new_figure
from pipeline.analysis.ledger import RunLedger
from pipeline.analysis.load import BASELINE_REPEAT
from pipeline.analysis.memory import PHASE_WORDS, PHASES, SOURCE_WORDS
from pipeline.analysis.treatment import kind_words
from pipeline.analysis.words import gib, in_setting

_KIND_COLOURS = dict(zip(KINDS, ("#56B4E9", "#E69F00", "#0072B2", "#009E73", "#CC79A7"), strict=True))


def ledger_figure(conclusions: Conclusions) -> Figure | None:
    """Bytes per parameter of each arm by kind of tensor, predicted beside found."""
    ledgers = {
        in_setting(arm, setting).replace(" (", "\n("): ledger
        for (arm, setting), ledger in conclusions.ledgers.items()
        if arm != BASELINE_REPEAT
    }
    if not ledgers:
        return None
    segments = {
        (arm, what): ledger_parts(ledger, what) for arm, ledger in ledgers.items() for what in ("predicted", "found")
    }
    colours = {name: colour for parts in segments.values() for name, colour, _ in parts}
    figure = new_figure(4.4, [Patch(color=colour) for colour in colours.values()], colours)
    axes = figure.subplots()
    highest = 0.0
    for i, arm in enumerate(ledgers):
        for offset, what in ((-0.21, "predicted"), (0.21, "found")):
            height = 0.0
            for _, colour, size in segments[arm, what]:
                axes.bar(i + offset, size, 0.38, bottom=height, color=colour, edgecolor="white",
                         hatch="///" if what == "predicted" else None, linewidth=0.6)  # fmt: skip
                if size >= 1:
                    axes.text(i + offset, height + size / 2, f"{size:.3g}", ha="center", va="center", fontsize=8.5,
                              bbox={"facecolor": "white", "alpha": 0.75, "pad": 1, "linewidth": 0})  # fmt: skip
                height += size
            axes.text(i + offset, height + 0.15, f"{height:.2f}\n{what}", ha="center", va="bottom", fontsize=8.5)
            highest = max(highest, height)
    axes.set_xticks(range(len(ledgers)), list(ledgers))
    axes.set_ylim(0, highest * 1.13)
    axes.set_xlabel("arm")
    axes.set_ylabel("bytes per trainable parameter")
    degrees = {ledger.distributed_optimizer_degree for ledger in ledgers.values()}
    d = f"distributed optimizer over d = {', '.join(map(str, sorted(degrees)))}"
    axes.set_title(f"Ledger: predicted (hatched) beside found, {d}", loc="left")
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_locator(MultipleLocator(2))
    return figure


def ledger_parts(ledger: RunLedger, what: str) -> list[tuple[str, str, float]]:
    """(name, colour, bytes per parameter) of the segments that are not empty."""
    padding = 0.0
    parts: list[tuple[str, str, float]] = []
    for kind in KINDS:
        size = ledger.per_parameter(what, kind)
        if what == "found":
            padding += (extra := ledger.per_parameter("padding", kind))
            size -= extra
        parts.append((kind_words(kind), _KIND_COLOURS[kind], size))
    if what == "found":
        parts += [
            ("buffer padding", "#999999", padding),
            ("other tensors", "#F0E442", ledger.per_parameter("found", "other")),
        ]
    return [part for part in parts if part[2] > 0]


def trainers_own_source(conclusions: Conclusions) -> str | None:
    """The memory source that is the trainer's alone; None when nothing was read."""
    own = {key[0] for memory in conclusions.memory.values() for key in memory.readings}
    return next((name for name in ("allocated", "rss") if name in own), None)


_ARMS_WITH_LEVEL_LABELS = 2  # with more, labels side by side overlap


def memory_figure(conclusions: Conclusions) -> Figure | None:
    """The trainer's own reading: the allocator's on a GPU, the process's on the host."""
    source = trainers_own_source(conclusions)
    if source is None:
        return None
    own = [run.readings for run in conclusions.memory.values()]
    phases = [phase for phase in PHASES if any(key[:2] == (source, phase) for keys in own for key in keys)]
    arms = [arm for arm in conclusions.study.arms if arm != BASELINE_REPEAT]
    figure = new_figure(5.4, *_arm_legend(conclusions, arms))
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    width = 0.8 / max(len(arms), 1)
    upright = len(arms) > _ARMS_WITH_LEVEL_LABELS
    for i, arm in enumerate(arms):
        runs = [conclusions.memory[run.id].readings for run in conclusions.study.runs_of(arm)]
        colour, _ = arm_style(conclusions.study.arms, arm)
        for j, phase in enumerate(phases):
            peaks = [max(values) for run in runs if (values := _of(run, source, phase))]
            if peaks:
                at = j - 0.4 + (i + 0.5) * width
                mean = sum(peaks) / len(peaks)
                top.bar(at, mean, width * 0.92, color=colour)
                top.annotate(
                    gib(mean), (at, mean), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=8,
                    rotation=90 if upright else 0,
                )  # fmt: skip
    top.margins(y=0.28 if upright else 0.15)  # room for the labels
    _memory_differences(conclusions, below, source, phases, width, arms)
    top.set_ylabel("GiB, largest rank")
    top.set_title(f"Memory by phase: {SOURCE_WORDS[source]}", loc="left")
    below.set_xticks(range(len(phases)), [_narrow(PHASE_WORDS[phase]) for phase in phases], fontsize=8.5)
    below.set_ylabel("treatment − baseline\n(GiB; bars: all ranks, pairs)")
    for axes in (top, below):
        axes.grid(visible=False, axis="x")
    return figure


def _of(readings: dict[tuple[str, str, int], float], source: str, phase: str) -> list[float]:
    return [value for key, value in readings.items() if key[:2] == (source, phase)]


def _memory_differences(
    conclusions: Conclusions, axes: Axes, source: str, phases: list[str], width: float, arms: list[str]
) -> None:
    axes.axhline(0, color="#000000", linewidth=0.8)
    for arm, verdict in conclusions.verdicts.items():
        colour, _ = arm_style(conclusions.study.arms, arm)
        for item in verdict.memory:
            if item.source == source and item.phase in phases:
                at = phases.index(item.phase) - 0.4 + (arms.index(arm) + 0.5) * width
                error = [[item.difference - item.lowest], [item.highest - item.difference]]
                axes.errorbar(at, item.difference, _bars(error), fmt="D", color=colour, capsize=3, markersize=5)


def _narrow(words: str) -> str:
    return "\n".join(wrap(words.replace("/", "/ "), 13))


def _bars(error: list[list[float]]) -> FloatArray:
    """Down and up, never negative for rounding's sake."""
    return np.maximum(np.array(error), 0)


def mini_batch_figure(conclusions: Conclusions) -> Figure | None:
    """Median and the middle 80 % over steps, by mini-batch: the first is 0, the later ones are not."""
    study = conclusions.study
    if not any(np.isfinite(run.updates.column("ppo_kl")).any() for run in study.runs):
        return None
    arms = [arm for arm in study.arms if arm != BASELINE_REPEAT]
    figure = new_figure(3.6, *_arm_legend(conclusions, arms))
    axes = figure.subplots()
    for i, arm in enumerate(arms):
        kl = np.concatenate([run.updates.column("ppo_kl") for run in study.runs_of(arm)])
        batch = np.concatenate([run.updates.column("mini_batch") for run in study.runs_of(arm)])
        known = np.isfinite(kl) & np.isfinite(batch)
        colour, _ = arm_style(study.arms, arm)
        for j in np.unique(batch[known]):
            values = kl[known & (batch == j)]
            low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
            at = j + 1 + (i - (len(arms) - 1) / 2) * 0.12
            axes.errorbar(at, middle, _bars([[middle - low], [high - middle]]), fmt="o", color=colour, capsize=3)
    axes.axhline(0, color="#000000", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("mini-batch (optimizer step) within a training step")
    axes.set_ylabel("ppo_kl (nats per token)")
    axes.set_title("ppo_kl by mini-batch: median and middle 80 % over steps and seeds", loc="left")
    return figure


def _arm_legend(conclusions: Conclusions, arms: list[str]) -> tuple[list[Patch], list[str]]:
    return [Patch(color=arm_style(conclusions.study.arms, arm)[0]) for arm in arms], arms
