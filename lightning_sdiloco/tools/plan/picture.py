"""Draws the compute utilisation over the bandwidth, like Figure 4 of the paper."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning_sdiloco.tools.figures import require_drawable, save

Curve = Callable[[float], float]
"""Maps a bandwidth in Gbit/s to the compute utilisation."""

Panels = Mapping[str, Mapping[str, Curve]]
"""The panels of a picture by title, each with its curves by method."""

# Label, color and line of each method.
_LINES: Mapping[str, tuple[str, str, str]] = {
    "ddp": ("DDP", "#757575", "-"),
    "diloco": ("DiLoCo", "#8e24aa", "-"),
    "streaming": ("Streaming DiLoCo", "#1e88e5", "--"),
    "streaming_overlap": ("Streaming with overlap", "#2e9e50", "-"),
    "streaming_overlap_fp4": ("Streaming with overlap, FP4", "#e53935", "-"),
}
_INK, _QUIET, _GRID = "#263238", "#607d8b", "#cfd8dc"
_POINTS_PER_DECADE = 40


def draw(path: str, panels: Panels, first: int, last: int, mark: float | None = None) -> None:
    """Writes the picture to a file."""
    require_drawable(path)
    save(_figure(panels, first, last, mark), path)


def _figure(panels: Panels, first: int, last: int, mark: float | None) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(8.4, 4.1), facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1))
    for number, (title, curves) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), number)
        _draw_panel(axes, title, curves, first, last)
        if number == 1:
            axes.set_ylabel("compute utilisation", color=_INK)
        else:
            axes.tick_params(labelleft=False)
        if mark is not None:
            axes.axvline(mark, color=_QUIET, linewidth=2, linestyle=":", label=f"this link: {mark:g} Gbit/s")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=_INK, fontsize=10)
    return figure


def _draw_panel(axes: Any, title: str, curves: Mapping[str, Curve], first: int, last: int) -> None:
    points = [10 ** (first + i / _POINTS_PER_DECADE) for i in range((last - first) * _POINTS_PER_DECADE + 1)]
    for name, curve in curves.items():
        label, color, line = _LINES[name]
        axes.plot(points, [curve(point) for point in points], color=color, linestyle=line, linewidth=2, label=label)
    axes.set_xscale("log")
    axes.set_xlim(points[0], points[-1])
    axes.set_ylim(0, 1.02)
    axes.set_title(title, color=_INK, fontsize=11)
    axes.set_xlabel("Gbit/s between groups", color=_INK)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95], ["0 %", "25 %", "50 %", "75 %", "95 %"])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(color=_GRID, linewidth=0.7)
    axes.tick_params(colors=_INK, which="both", length=0, pad=6)
    for side in axes.spines.values():
        side.set_visible(False)
