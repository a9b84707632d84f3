"""How the pictures of the benchmarks look: like those of the documentation, readable on light and dark pages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

INK, QUIET, GRID = "#263238", "#607d8b", "#cfd8dc"
BLUE, RED, GREEN, PURPLE, GREY, ORANGE, TEAL = (
    "#1e88e5",
    "#e53935",
    "#2e9e50",
    "#8e24aa",
    "#757575",
    "#fb8c00",
    "#00897b",
)


def figure(columns: int = 1, height: float = 3.6, widths: Sequence[float] | None = None) -> tuple[Figure, list[Any]]:
    """An empty picture.

    Args:
        columns: Panels beside each other.
        height: In inches; the width fits a page.
        widths: Of the panels, relative to each other.

    Returns:
        The picture and its panels.
    """
    # Text without dates and random names, so that the same numbers give the same file.
    mpl.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "benchmarks"})
    # White behind everything: the ink would not be seen on a dark page.
    drawn = Figure(figsize=(8.4, height), facecolor="white", layout="constrained")
    panels = drawn.subplots(1, columns, squeeze=False, gridspec_kw={"width_ratios": widths or [1] * columns})[0]
    for axes in panels:
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, which="both", length=0, pad=6)
        for part in (axes.xaxis.label, axes.yaxis.label, axes.title):
            part.set_color(INK)
        axes.title.set_fontsize(11)
        for side in axes.spines.values():
            side.set_visible(False)
    return drawn, list(panels)


def save(drawn: Figure, path: Path) -> None:
    """Writes a picture as its suffix says, the same bytes for the same numbers."""
    drawn.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
