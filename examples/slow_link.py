"""What runs that were measured here would take on a slow link, from the clock of the planner; and a picture of it.

Losses are measured. Times on the link are computed: from the step time measured here, the bytes of each method, and a
link of 100 Mbit/s with a round trip of 50 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import DataParallel, Streaming, play
from lightning_sdiloco.planning.workload import Groups, Model

LINK = Link(gbit_s=0.1, round_trip=0.05)
LINK_NAME = "100 Mbit/s with a round trip of 50 ms"
MEMORY_RATE = 10e9
"""Bytes per second that a core of a CPU reads and writes."""

THEMES = {
    "": {
        **{"paper": "#ffffff", "ink": "#1f2933", "quiet": "#5f6c7b", "grid": "#d9dfe6", "bar": "#c4cfda"},
        **{"grey": "#5f6c7b", "blue": "#1f6fd6", "green": "#1d8f5a", "orange": "#d9541e", "red": "#d32f2f"},
    },
    "-dark": {
        **{"paper": "#171c22", "ink": "#e6ebf0", "quiet": "#9fb0c0", "grid": "#34404c", "bar": "#4a5866"},
        **{"grey": "#b0bec5", "blue": "#6fb1ff", "green": "#5fd49b", "orange": "#ff9b63", "red": "#ff6b6b"},
    },
}
"""Colors for light and for dark pages."""

COLORS = {"ddp": "grey", "diloco": "orange", "streaming_fp4": "blue"}


def seconds_on_link(result: dict[str, Any], configuration: Path) -> dict[str, float]:
    """Returns when a run on the link would be where it was validated here: seconds since its start, by step.

    What the run wrote down has ``link_step_seconds``: how long a step takes without an exchange.
    """
    strategy = yaml.safe_load(configuration.read_text(encoding="utf-8"))["trainer"]["strategy"]
    model = Model.of_parameters({name: torch.empty(shape, device="meta") for name, shape in result["shapes"].items()})
    groups = Groups(result["link_step_seconds"], result["ranks"], memory_rate=MEMORY_RATE)
    if strategy == "ddp":
        each = groups.step_time / DataParallel(model, groups).utilisation(LINK)
        return {step: int(step) * each for step in result["val_losses"]}
    method = Streaming(model, Settings(**strategy["init_args"]), groups)
    times = play(method, LINK, result["steps"], speeds=[1.0] * result["ranks"])[0]
    # The last validation comes after the final exchange.
    done = [*times.steps[:-1], times.end]
    return {step: done[int(step) - 1] for step in result["val_losses"]}


def short(seconds: float) -> str:
    """Returns a time in minutes, or in seconds if it is shorter than one."""
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def draw(folder: Path, results: dict[str, dict[str, Any]], names: dict[str, str]) -> list[Path]:
    """Draws the loss over the time on the link, and returns the files."""
    return in_themes(folder, "demo", lambda theme: figure(theme, results, names))


def in_themes(folder: Path, name: str, figure: Callable[[dict[str, str]], Any]) -> list[Path]:
    """Draws a picture for light and for dark pages, and returns the files."""
    import matplotlib as mpl

    # With a salt of its own, and without a date, the same numbers give the same file.
    mpl.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": name})
    paths = []
    for suffix, theme in THEMES.items():
        paths.append(folder / f"{name}{suffix}.svg")
        figure(theme).savefig(paths[-1], metadata={"Date": None})
    return paths


def dress(axes: Any, theme: dict[str, str], grid: Literal["x", "both"] = "both") -> None:
    """Gives axes the colors of a theme."""
    axes.set_facecolor(theme["paper"])
    axes.grid(color=theme["grid"], linewidth=0.7, axis=grid)
    axes.tick_params(colors=theme["quiet"], length=0, pad=6)
    for side in axes.spines.values():
        side.set_visible(False)


def figure(theme: dict[str, str], results: dict[str, dict[str, Any]], names: dict[str, str]) -> Any:
    """Draws the picture in one theme."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.4, 3.6), facecolor=theme["paper"], layout="constrained")
    axes = drawn.add_subplot()
    dress(axes, theme)
    for setting, result in results.items():
        losses, minutes = list(result["val_losses"].values()), [at / 60 for at in result["link_seconds"].values()]
        label = f"{names[setting]}: loss {losses[-1]:.3f} after {short(60 * minutes[-1])}"
        axes.plot(minutes, losses, "o-", color=theme[COLORS[setting]], markersize=4, label=label)
    axes.set_xlabel(f"minutes on a link of {LINK_NAME}, computed", color=theme["ink"])
    axes.set_ylabel("validation loss, measured", color=theme["ink"])
    axes.set_xlim(left=0)
    axes.legend(facecolor=theme["paper"], edgecolor="none", framealpha=1, labelcolor=theme["ink"])
    return drawn
