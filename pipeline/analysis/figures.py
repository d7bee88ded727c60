"""The pictures of a study: deterministic PNG files, legible at the width of a GitHub comment (900 pixels)."""

# matplotlib annotates its keyword arguments as Unknown, which strict mode would report at every call.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from pipeline.analysis.arm_styles import ArmStyle, arm_style
from pipeline.analysis.bar_figures import ledger_figure, memory_figure, mini_batch_figure
from pipeline.analysis.columns import FloatArray
from pipeline.analysis.conclusions import Conclusions
from pipeline.analysis.curves import (
    CLIP_FRACTION,
    GRAD_NORM,
    LIVENESS,
    MEMORY,
    PPO_KL,
    REWARD,
    Curve,
    Series,
    aligned,
)
from pipeline.analysis.figure_style import DPI, STYLE, new_figure
from pipeline.analysis.load import Pair
from pipeline.analysis.words import counted

CURVES = {
    "reward": REWARD,
    "ppo_kl": PPO_KL,
    "clip_fraction": CLIP_FRACTION,
    "grad_norm": GRAD_NORM,
    "memory": MEMORY,
    "liveness": LIVENESS,
}
"""By the name of the picture's file."""


@dataclass(frozen=True)
class Picture:
    """A written file, with the words that stand in for it where it cannot be seen."""

    file: str
    alt: str


def draw(conclusions: Conclusions, folder: Path) -> list[Picture]:
    """Write every figure that the study has data for; returns them in the order of the report."""
    folder.mkdir(exist_ok=True)
    drawn: list[tuple[str, str, Figure | None]] = []
    with mpl.rc_context(STYLE):
        drawn.append(
            ("ledger", "Bytes per parameter by kind of tensor, predicted beside found", ledger_figure(conclusions))
        )
        drawn.extend((name, f"{curve.title} by arm, paired difference below", _curve(conclusions, curve))
                     for name, curve in CURVES.items())  # fmt: skip
        drawn.append(("memory_by_phase", "Memory by phase, and treatment minus baseline", memory_figure(conclusions)))
        drawn.append(("ppo_kl_by_mini_batch", "ppo_kl by mini-batch within a step", mini_batch_figure(conclusions)))
        for path in folder.glob("*.png"):
            path.unlink()  # a picture of an older analysis must not stay
        pictures: list[Picture] = []
        for name, alt, figure in drawn:
            if figure is not None:
                # Without the metadata's software version the bytes depend on the data alone.
                figure.savefig(folder / f"{name}.png", dpi=DPI, metadata={"Software": None})
                pictures.append(Picture(f"figures/{name}.png", alt))
    return pictures


def _curve(conclusions: Conclusions, curve: Curve) -> Figure | None:
    study = conclusions.study
    series = {run.id: curve.read(run) for run in study.runs}
    by_arm = {arm: aligned([series[run.id] for run in study.runs_of(arm)]) for arm in study.arms}
    if not any(np.isfinite(rows).any() for _, rows in by_arm.values()):
        return None
    styles = {arm: arm_style(study.arms, arm) for arm in study.arms}
    labels = [f"{arm} ({counted(len(study.runs_of(arm)), 'run')})" for arm in study.arms]
    handles = [Line2D([], [], color=colour, linestyle=dashes) for colour, dashes in styles.values()]
    figure = new_figure(5.2, handles, labels)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for arm, (x, rows) in by_arm.items():
        _line(top, x, rows, styles[arm])
    if curve.from_zero:
        top.set_ylim(bottom=-0.03 * top.get_ylim()[1])  # a curve at zero stays apart from the axis
    top.set_ylabel(curve.unit)
    top.set_title(curve.title, loc="left")
    below.set_title(
        f"Paired difference ({'; '.join(_differences(conclusions, below, series))})", loc="left", fontsize=8.5
    )
    below.set_ylabel(f"treatment − baseline\n({curve.unit})")
    below.set_xlabel(curve.x_label)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _line(axes: Axes, x: FloatArray, rows: FloatArray, style: ArmStyle, label: str | None = None) -> None:
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


def _differences(conclusions: Conclusions, axes: Axes, series: dict[str, Series]) -> list[str]:
    """Draw the paired differences over the A/A band; returns what was drawn, in words."""
    study = conclusions.study
    axes.axhline(0, color="#000000", linewidth=0.8)
    told: list[str] = []
    for arm, verdict in conclusions.verdicts.items():
        pairs = verdict.valid_pairs or verdict.pairs
        x, rows = _paired(pairs, series)
        if len(x):
            _line(axes, x, rows, arm_style(study.arms, arm))
            told.append(f"{arm}: {counted(len(pairs), 'pair')}{'' if verdict.valid_pairs else ', not valid'}")
    x, rows = _paired([pair for pair in study.pairs if pair.is_noise_floor and pair.valid], series)
    if len(x):
        known = np.isfinite(rows).any(axis=0)
        low, high = np.nanmin(rows[:, known], axis=0), np.nanmax(rows[:, known], axis=0)
        axes.fill_between(x[known], low, high, color="#999999", alpha=0.45, linewidth=1.5)
        told.append("A/A: no difference at all" if not (low.any() or high.any()) else "grey: all A/A pairs")
    return told or ["no pair"]


def _paired(pairs: Sequence[Pair], series: dict[str, Series]) -> tuple[FloatArray, FloatArray]:
    x, treatment = aligned([series[pair.treatment.id] for pair in pairs])
    other, baseline = aligned([series[pair.baseline.id] for pair in pairs])
    common, left, right = np.intersect1d(x, other, return_indices=True)
    rows = treatment[:, left] - baseline[:, right] if len(common) else np.empty((0, 0))
    return (common, rows) if np.isfinite(rows).any() else (np.empty(0), np.empty((0, 0)))
