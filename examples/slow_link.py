"""What runs that were measured here would take on a slow link, from the clock of the planner; and a picture of it.

Losses are measured. Times on the link are computed: from the step time measured here, the bytes of each method, and a
link of 100 Mbit/s with a round trip of 50 ms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.planning import DataParallel, Groups, Link, Model, Streaming, play

LINK = Link(gbit_s=0.1, round_trip=0.05)
LINK_NAME = "100 Mbit/s with a round trip of 50 ms"
MEMORY_RATE = 10e9
"""Bytes per second that a core of a CPU reads and writes."""

THEMES = {
    "demo": {"paper": "#ffffff", "ink": "#1f2933", "quiet": "#5f6c7b", "grid": "#d9dfe6"},
    "demo-dark": {"paper": "#171c22", "ink": "#e6ebf0", "quiet": "#9fb0c0", "grid": "#34404c"},
}
COLORS = {
    "demo": {"ddp": "#5f6c7b", "diloco": "#d9541e", "streaming_fp4": "#1f6fd6"},
    "demo-dark": {"ddp": "#b0bec5", "diloco": "#ff9b63", "streaming_fp4": "#6fb1ff"},
}


def seconds_on_link(result: dict[str, Any], configuration: Path) -> dict[str, float]:
    """Returns when a run on the link would be where it was validated here: seconds since its start, by step.

    Args:
        result: What the run wrote down, with ``link_step_seconds``: how long a step takes without an exchange.
        configuration: The file of its strategy.
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
    """Returns a time in minutes, or in seconds if it is shorter than one.

    >>> short(184.2), short(26.3)
    ('3.1 min', '26 s')
    """
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def draw(folder: Path, results: dict[str, dict[str, Any]], names: dict[str, str]) -> list[Path]:
    """Draws the loss over the time on the link, for light and for dark pages.

    Args:
        folder: Where the pictures go.
        results: What each run wrote down, with its ``link_seconds``.
        names: How the runs are called.

    Returns:
        The files.
    """
    import matplotlib as mpl

    # With a salt of its own, and without a date, the same numbers give the same file.
    mpl.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "demo"})
    paths = []
    for stem in THEMES:
        paths.append(folder / f"{stem}.svg")
        figure(stem, results, names).savefig(paths[-1], metadata={"Date": None})
    return paths


def figure(stem: str, results: dict[str, dict[str, Any]], names: dict[str, str]) -> Any:
    """Draws the picture in one theme."""
    from matplotlib.figure import Figure

    theme = THEMES[stem]
    drawn = Figure(figsize=(8.4, 3.6), facecolor=theme["paper"], layout="constrained")
    axes = drawn.add_subplot(facecolor=theme["paper"])
    for setting, result in results.items():
        losses, minutes = list(result["val_losses"].values()), [at / 60 for at in result["link_seconds"].values()]
        label = f"{names[setting]}: loss {losses[-1]:.3f} after {short(60 * minutes[-1])}"
        axes.plot(minutes, losses, "o-", color=COLORS[stem][setting], markersize=4, label=label)
    axes.set_xlabel(f"minutes on a link of {LINK_NAME}, computed", color=theme["ink"])
    axes.set_ylabel("validation loss, measured", color=theme["ink"])
    axes.set_xlim(left=0)
    axes.grid(color=theme["grid"], linewidth=0.7)
    axes.tick_params(colors=theme["quiet"], length=0, pad=6)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.legend(facecolor=theme["paper"], edgecolor="none", framealpha=1, labelcolor=theme["ink"])
    return drawn
