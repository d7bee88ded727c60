"""What all of matplotlib's pictures share."""

# matplotlib annotates its keyword arguments as Unknown, which strict mode would report at every call.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure

DPI = 120
WIDTH = 8.0  # inches
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-2, 4),  # 2.75 under "1e-3" in place of 0.00275: the left margin is fixed
    "legend.frameon": False,
}


def new_figure(height: float, handles: Sequence[Artist], labels: Iterable[str]) -> Figure:
    """An empty figure with its legend above the axes. height: inches.

    The margins are fixed: matplotlib's layout engines would draw everything twice to find them.
    """
    columns = 3
    legend = 0.1 + 0.22 * -(-len(handles) // columns)
    height += legend
    figure = Figure(figsize=(WIDTH, height))
    figure.subplots_adjust(
        left=1.0 / WIDTH, right=1 - 0.12 / WIDTH, bottom=0.6 / height, top=1 - (0.3 + legend) / height, hspace=0.25
    )
    figure.legend(handles, labels, loc="upper left", ncols=columns, borderaxespad=0.3)
    return figure
