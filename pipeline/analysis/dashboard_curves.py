"""The dashboard's curves: every run's series on one grid, thinned so that the page stays small."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.analysis.columns import FloatArray, IntArray, Table
from pipeline.analysis.curves import Curve, aligned
from pipeline.analysis.load import Run, Study
from pipeline.analysis.words import alike, counted, short_list

_MOST_POINTS = 500  # of one series: about one per pixel of a plot
_MOST_NUMBERS = 300_000  # of all curves together: 3.2 MB in base64


@dataclass(frozen=True)
class Plot:
    """One plot of the page: its words, and the data as the page's script wants it."""

    kind: str
    title: str
    note: str
    data: dict[str, Any]


def curve_plots(study: Study, curves: list[Curve]) -> dict[str, Plot]:
    """By title; a curve that no run measured is left out."""
    grids: dict[Curve, tuple[FloatArray, FloatArray]] = {}
    for curve in curves:
        x, rows = aligned([curve.read(run) for run in study.runs])
        known = np.isfinite(rows).any(axis=0)
        if known.any():
            grids[curve] = x[known], rows[:, known]
    most = min(_MOST_POINTS, max(20, _MOST_NUMBERS // max(1, len(grids) * len(study.runs))))
    return {curve.title: _plot(study, curve, x, rows, most) for curve, (x, rows) in grids.items()}


def _plot(study: Study, curve: Curve, x: FloatArray, rows: FloatArray, most: int) -> Plot:
    chosen, size = thinned(rows, most)
    notes: list[str] = []
    if size > 1:
        kept = f"{len(chosen)} of {len(x):,} {curve.x_label}s"
        notes.append(f"{kept}: of every {size} the two where some run is highest and lowest")
    notes.extend(_non_finite(study, curve))
    data = {
        "unit": curve.unit,
        "xLabel": curve.x_label,
        "x": in_base64(x[chosen]),
        "y": in_base64(rows[:, chosen]),
    }
    return Plot("curve", curve.title, ". ".join(notes), data)


def thinned(rows: FloatArray, most: int) -> tuple[IntArray, int]:
    """Which columns to keep, the same for every row so that rows can be subtracted; and of how many each time two.

    Of every so many columns two stay: where some row is farthest above its own mean there, and where one is farthest
    below. No outlier is lost, and what is shown was measured. The first and the last column stay as well.
    """
    width = int(rows.shape[1])
    if width <= most:
        return np.arange(width), 1
    buckets = max(1, (most - 2) // 2)
    size = -(-width // buckets)
    buckets = -(-width // size)
    padded = np.full((len(rows), buckets * size), np.nan)
    padded[:, :width] = rows
    parts: FloatArray = np.reshape(padded, (len(rows), buckets, size))
    known = np.isfinite(parts)
    mean = np.where(known, parts, 0).sum(axis=2) / np.maximum(known.sum(axis=2), 1)
    above = np.where(known, parts - mean[:, :, None], 0)
    first = np.arange(buckets) * size
    highest, lowest = above.max(axis=0).argmax(axis=1) + first, above.min(axis=0).argmin(axis=1) + first
    return np.unique(np.concatenate([[0, width - 1], highest, lowest])), size


def in_base64(numbers: FloatArray) -> str:
    """Little-endian float64, row after row."""
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f8").tobytes()).decode()


def _non_finite(study: Study, curve: Curve) -> Iterator[str]:
    """A curve has a gap where a value was NaN or infinite; that it was measured must be told."""
    notes: list[tuple[str, str]] = []
    for run in study.runs:
        for found in _table(run, curve).non_finite:
            if found.metric in curve.names:
                count = counted(found.count, "value")
                notes.append((run.id, f"NaN or infinite from step {found.first_step} on ({count})"))
    yield from short_list(alike(notes), 3)


def _table(run: Run, curve: Curve) -> Table:
    return run.steps if curve.over_ranks is None else run.updates
