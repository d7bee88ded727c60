"""The pictures of a study: deterministic PNG files, legible at the width of a GitHub comment (900 pixels).

Colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart; line styles differ as well.
"""

# matplotlib annotates its keyword arguments as Unknown, which strict mode would report at every call.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, MultipleLocator

from pipeline.analysis.columns import FloatArray
from pipeline.analysis.conclusions import Conclusions
from pipeline.analysis.declared import KINDS
from pipeline.analysis.ledger import RunLedger
from pipeline.analysis.load import BASELINE, BASELINE_REPEAT, Pair, Run
from pipeline.analysis.memory import PHASE_WORDS, PHASES, SOURCE_WORDS
from pipeline.analysis.treatment import kind_words

_DPI = 150
_WIDTH = 8.0  # inches
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
_ARM_STYLE = {
    BASELINE: ("#000000", "-"),
    BASELINE_REPEAT: ("#999999", ":"),
    "pao": ("#0072B2", "--"),
    "pao_bf16_moments": ("#E69F00", "-."),
    "pao_bf16_all": ("#009E73", (0, (5, 1, 1, 1, 1, 1))),
    "dead_optimizer": ("#D55E00", "--"),
}
_OTHER_STYLES = (("#CC79A7", "--"), ("#56B4E9", "-."), ("#D55E00", ":"), ("#0072B2", "-."))
_KIND_COLOURS = dict(zip(KINDS, ("#56B4E9", "#E69F00", "#0072B2", "#009E73", "#CC79A7"), strict=True))

Series = tuple[FloatArray, FloatArray]
"""x and y of one run."""


@dataclass(frozen=True)
class Curve:
    """One metric that is drawn over steps or updates."""

    file: str
    title: str
    unit: str
    x_label: str
    read: Callable[[Run], Series]
    from_zero: bool = False


@dataclass(frozen=True)
class Picture:
    """A written file, with the words that stand in for it where it cannot be seen."""

    file: str
    alt: str


def _step_metric(name: str) -> Callable[[Run], Series]:
    return lambda run: (run.steps.column("step"), run.metric(name))


def _per_update(names: Sequence[str], reduce: "np.ufunc") -> Callable[[Run], Series]:
    """The first of `names` that the run has, reduced over ranks."""

    def read(run: Run) -> Series:
        updates = run.updates.column("update")
        order, position = np.unique(updates, return_inverse=True)
        values = next((run.updates.column(name) for name in names if name in run.updates), run.updates.column(names[0]))
        reduced = np.full(len(order), np.nan)
        known = ~np.isnan(values)
        start = np.full(len(order), -np.inf if reduce is np.maximum else np.inf)
        reduce.at(start, position[known], values[known])
        reduced[np.isfinite(start)] = start[np.isfinite(start)]
        return order, reduced

    return read


CURVES = (
    Curve("reward", "Reward (critic/rewards/mean)", "reward", "step", _step_metric("critic/rewards/mean")),
    Curve("ppo_kl", "Policy drift (actor/ppo_kl)", "nats per token", "step", _step_metric("actor/ppo_kl")),
    Curve("clip_fraction", "Clip fraction (actor/pg_clipfrac)", "share of tokens", "step",
          _step_metric("actor/pg_clipfrac")),
    Curve("grad_norm", "Gradient norm (actor/grad_norm)", "L2 norm", "step", _step_metric("actor/grad_norm")),
    Curve("memory", "Memory after each optimizer step, largest rank", "GiB", "optimizer step",
          _per_update(("allocated_after_update_gib", "rss_after_update_gib"), np.maximum)),
    Curve("liveness", "Liveness: elements whose bits an optimizer step changed, lowest rank", "share of elements",
          "optimizer step", _per_update(("liveness",), np.minimum), from_zero=True),
)  # fmt: skip


def draw(conclusions: Conclusions, folder: Path) -> list[Picture]:
    """Write every figure that the study has data for; returns them in the order of the report."""
    folder.mkdir(exist_ok=True)
    drawn: list[tuple[str, str, Figure | None]] = []
    with mpl.rc_context(_STYLE):
        drawn.append(("ledger", "Bytes per parameter by kind of tensor, predicted beside found", _ledger(conclusions)))
        drawn.extend((curve.file, f"{curve.title} by arm, paired difference below", _curve(conclusions, curve))
                     for curve in CURVES)  # fmt: skip
        drawn.append(("memory_by_phase", "Memory by phase, and treatment minus baseline", _memory(conclusions)))
        drawn.append(("ppo_kl_by_mini_batch", "ppo_kl by mini-batch within a step", _mini_batches(conclusions)))
        for path in folder.glob("*.png"):
            path.unlink()  # a picture of an older analysis must not stay
        pictures: list[Picture] = []
        for name, alt, figure in drawn:
            if figure is not None:
                # Without the metadata's software version the bytes depend on the data alone.
                figure.savefig(folder / f"{name}.png", dpi=_DPI, metadata={"Software": None})
                pictures.append(Picture(f"figures/{name}.png", alt))
    return pictures


def _style(arms: Sequence[str], arm: str) -> tuple[str, object]:
    if arm in _ARM_STYLE:
        return _ARM_STYLE[arm]
    others = [name for name in arms if name not in _ARM_STYLE]
    return _OTHER_STYLES[others.index(arm) % len(_OTHER_STYLES)]


def _aligned(series: Sequence[Series]) -> tuple[FloatArray, FloatArray]:
    """The union of all x, and one row of y per run; NaN where a run has no value."""
    x = np.unique(np.concatenate([run_x for run_x, _ in series])) if series else np.empty(0)
    rows = np.full((len(series), len(x)), np.nan)
    for row, (run_x, run_y) in zip(rows, series, strict=True):
        row[np.searchsorted(x, run_x)] = run_y
    rows[~np.isfinite(rows)] = np.nan
    return x, rows


def _curve(conclusions: Conclusions, curve: Curve) -> Figure | None:
    study = conclusions.study
    series = {run.id: curve.read(run) for run in study.runs}
    by_arm = {arm: _aligned([series[run.id] for run in study.runs_of(arm)]) for arm in study.arms}
    if not any(np.isfinite(rows).any() for _, rows in by_arm.values()):
        return None
    figure = Figure(figsize=(_WIDTH, 5.4), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for arm, (x, rows) in by_arm.items():
        _line(top, x, rows, _style(study.arms, arm), f"{arm} ({len(rows)} run{'s' if len(rows) != 1 else ''})")
    if curve.from_zero:
        top.set_ylim(bottom=0)
    top.set_ylabel(curve.unit)
    top.set_title(curve.title, loc="left")
    _differences(conclusions, below, series)
    below.set_ylabel(f"treatment − baseline\n({curve.unit})")
    below.set_xlabel(curve.x_label)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper left", ncols=3)
    if below.get_legend_handles_labels()[0]:
        below.legend(loc="best", fontsize=8, ncols=2)
    return figure


def _line(axes: Axes, x: FloatArray, rows: FloatArray, style: tuple[str, object], label: str) -> None:
    """Mean over runs, with the range from the lowest to the highest run."""
    known = np.isfinite(rows).any(axis=0)
    if not known.any():
        return
    x, rows = x[known], rows[:, known]
    colour, dashes = style
    marker = "o" if len(x) <= 16 else ""
    axes.plot(x, np.nanmean(rows, axis=0), color=colour, linestyle=dashes, marker=marker, markersize=3.5, label=label)
    if len(rows) > 1:
        axes.fill_between(x, np.nanmin(rows, axis=0), np.nanmax(rows, axis=0), color=colour, alpha=0.1, linewidth=0)


def _differences(conclusions: Conclusions, axes: Axes, series: dict[str, Series]) -> None:
    study = conclusions.study
    axes.axhline(0, color="#000000", linewidth=0.8)
    repeats = _paired([pair for pair in study.pairs if pair.is_noise_floor and pair.valid], series)
    if len(repeats[0]):
        x, rows = repeats
        known = np.isfinite(rows).any(axis=0)
        low, high = np.nanmin(rows[:, known], axis=0), np.nanmax(rows[:, known], axis=0)
        label = "A/A: no difference at all" if not (low.any() or high.any()) else "A/A: lowest to highest pair"
        axes.fill_between(x[known], low, high, color="#999999", alpha=0.45, linewidth=1.5, label=label)
    for arm, verdict in conclusions.verdicts.items():
        pairs = verdict.valid_pairs or verdict.pairs
        x, rows = _paired(pairs, series)
        if len(x):
            valid = "" if verdict.valid_pairs else ", not valid"
            label = f"{arm} ({len(pairs)} pair{'s' if len(pairs) != 1 else ''}{valid})"
            _line(axes, x, rows, _style(study.arms, arm), label)


def _paired(pairs: Sequence[Pair], series: dict[str, Series]) -> tuple[FloatArray, FloatArray]:
    x, treatment = _aligned([series[pair.treatment.id] for pair in pairs])
    other, baseline = _aligned([series[pair.baseline.id] for pair in pairs])
    common, left, right = np.intersect1d(x, other, return_indices=True)
    rows = treatment[:, left] - baseline[:, right] if len(common) else np.empty((0, 0))
    return (common, rows) if np.isfinite(rows).any() else (np.empty(0), np.empty((0, 0)))


def _ledger(conclusions: Conclusions) -> Figure | None:
    arms = {arm: found for arm, found in conclusions.arms.items() if arm != BASELINE_REPEAT}
    ledgers = {arm: found.ledger for arm, found in arms.items() if found.ledger is not None}
    if not ledgers:
        return None
    figure = Figure(figsize=(_WIDTH, 4.8), layout="constrained")
    axes = figure.subplots()
    colours: dict[str, str] = {}
    highest = 0.0
    for i, ledger in enumerate(ledgers.values()):
        for offset, what in ((-0.21, "predicted"), (0.21, "found")):
            height = 0.0
            for name, colour, size in _parts(ledger, what):
                colours[name] = colour
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
    axes.set_ylabel("bytes per trainable parameter")
    degrees = {ledger.distributed_optimizer_degree for ledger in ledgers.values()}
    d = f"distributed optimizer over d = {', '.join(map(str, sorted(degrees)))}"
    axes.set_title(f"Ledger: predicted (hatched) beside found, {d}", loc="left")
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_locator(MultipleLocator(2))
    figure.legend([Patch(color=colour) for colour in colours.values()], colours, loc="outside lower center", ncols=4)
    return figure


def _parts(ledger: RunLedger, what: str) -> list[tuple[str, str, float]]:
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


def _memory(conclusions: Conclusions) -> Figure | None:
    """The trainer's own reading: the allocator's on a GPU, the process's on the host."""
    own = [run.readings for run in conclusions.memory.values()]
    source = next((name for name in ("allocated", "rss") if any(key[0] == name for keys in own for key in keys)), None)
    if source is None:
        return None
    phases = [phase for phase in PHASES if any(key[:2] == (source, phase) for keys in own for key in keys)]
    arms = [arm for arm in conclusions.study.arms if arm != BASELINE_REPEAT]
    figure = Figure(figsize=(_WIDTH, 5.8), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    width = 0.8 / max(len(arms), 1)
    for i, arm in enumerate(arms):
        runs = [conclusions.memory[run.id].readings for run in conclusions.study.runs_of(arm)]
        colour, _ = _style(conclusions.study.arms, arm)
        for j, phase in enumerate(phases):
            peaks = [max(values) for run in runs if (values := _of(run, source, phase))]
            if peaks:
                at = j - 0.4 + (i + 0.5) * width
                mean = sum(peaks) / len(peaks)
                top.bar(at, mean, width * 0.92, color=colour, label=arm if j == 0 else None)
                top.text(at, mean, f"{mean:.3g}", ha="center", va="bottom", fontsize=8)
    _memory_differences(conclusions, below, source, phases, width, arms)
    top.set_ylabel("GiB, largest rank")
    top.set_title(f"Memory by phase: {SOURCE_WORDS[source]}", loc="left")
    below.set_xticks(
        range(len(phases)),
        [PHASE_WORDS[phase].replace(" in ", " in\n").replace("first ", "first\n") for phase in phases],
    )
    below.set_ylabel("treatment − baseline\n(GiB; bars: all ranks, pairs)")
    for axes in (top, below):
        axes.grid(visible=False, axis="x")
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper left", ncols=4)
    return figure


def _of(readings: dict[tuple[str, str, int], float], source: str, phase: str) -> list[float]:
    return [value for key, value in readings.items() if key[:2] == (source, phase)]


def _memory_differences(
    conclusions: Conclusions, axes: Axes, source: str, phases: list[str], width: float, arms: list[str]
) -> None:
    axes.axhline(0, color="#000000", linewidth=0.8)
    for arm, verdict in conclusions.verdicts.items():
        colour, _ = _style(conclusions.study.arms, arm)
        for item in verdict.memory:
            if item.source == source and item.phase in phases:
                at = phases.index(item.phase) - 0.4 + (arms.index(arm) + 0.5) * width
                error = [[item.difference - item.lowest], [item.highest - item.difference]]
                axes.errorbar(at, item.difference, _bars(error), fmt="D", color=colour, capsize=3, markersize=5)


def _in_two_lines(words: str) -> str:
    return words.replace(" in ", " in\n").replace("first ", "first\n")


def _bars(error: list[list[float]]) -> FloatArray:
    """Down and up, never negative for rounding's sake."""
    return np.maximum(np.array(error), 0)


def _mini_batches(conclusions: Conclusions) -> Figure | None:
    """Median and the middle 80 % over steps, by mini-batch: the first is 0, the later ones are not."""
    study = conclusions.study
    figure = Figure(figsize=(_WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    arms = [arm for arm in study.arms if arm != BASELINE_REPEAT]
    drawn = False
    for i, arm in enumerate(arms):
        kl = np.concatenate([run.updates.column("ppo_kl") for run in study.runs_of(arm)])
        batch = np.concatenate([run.updates.column("mini_batch") for run in study.runs_of(arm)])
        known = np.isfinite(kl) & np.isfinite(batch)
        colour, _ = _style(study.arms, arm)
        for j in np.unique(batch[known]):
            values = kl[known & (batch == j)]
            low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
            at = j + 1 + (i - (len(arms) - 1) / 2) * 0.12
            axes.errorbar(at, middle, _bars([[middle - low], [high - middle]]), fmt="o", color=colour, capsize=3,
                          label=None if drawn and j else arm)  # fmt: skip
            drawn = True
    if not drawn:
        return None
    axes.axhline(0, color="#000000", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("mini-batch (optimizer step) within a training step")
    axes.set_ylabel("ppo_kl (nats per token)")
    axes.set_title("ppo_kl by mini-batch: median and middle 80 % over steps and seeds", loc="left")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=4)
    return figure
