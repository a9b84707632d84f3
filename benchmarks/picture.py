"""How the pictures of the benchmarks look: like those of the documentation, each for light and for dark pages."""

import re
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

ON_DARK = {
    "#ffffff": "#171c22",
    INK: "#e6ebf0",
    QUIET: "#9fb0c0",
    GRID: "#34404c",
    "#b0bec5": "#546069",
    BLUE: "#6fb1ff",
    RED: "#ff8a80",
    GREEN: "#7ddc97",
    PURPLE: "#d69be8",
    GREY: "#b0bec5",
    ORANGE: "#ffb866",
    TEAL: "#5fd0c3",
}
"""The colours of a picture for a dark page, by those of the one for a light page."""


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
    """Writes a picture as its suffix says, the same bytes for the same numbers; an SVG for a dark page, too."""
    is_svg = path.suffix == ".svg"
    drawn.savefig(path, dpi=150, metadata={"Date": None} if is_svg else {"Software": None})
    if is_svg:
        for_dark_pages(path)


def for_dark_pages(path: Path) -> Path:
    """Writes the picture for a dark page beside an SVG for a light one, and returns its path."""
    dark = path.with_stem(f"{path.stem}-dark")
    drawn = re.sub("#[0-9a-f]{6}", lambda color: ON_DARK.get(color[0], color[0]), path.read_text())
    # What has no colour of its own, as the text of a legend, is black.
    dark.write_text(drawn.replace("<svg ", f'<svg fill="{ON_DARK[INK]}" ', 1))
    return dark
