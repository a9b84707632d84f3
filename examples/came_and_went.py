"""Describes, from the records of sites, how one was killed and returned: in two sentences, and as a
picture of the timeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_sdiloco.tools.output import save_picture
from lightning_sdiloco.tools.run_files import Rank, Run

COLORS = ("C0", "C2", "C4")
PAUSE = 1.0
"""The seconds without an inner step from which on a pause is drawn."""


def slowest_step(rank: Rank, began: float, ended: float) -> float:
    """Returns the longest time, in seconds, between the ends of two inner steps in a time span."""
    done = [step.done for step in rank.steps if began <= step.done <= ended]
    return max((after - before for before, after in pairwise(done)), default=0.0)


def sentences(
    runs: Mapping[str, Run],
    results: Mapping[str, Mapping[str, Any]],
    at: Mapping[str, float],
    killed: str,
) -> list[str]:
    """Describes how the death of a site affected the others, and what happened to it afterwards.

    ``at`` contains the times at which the run was ``founded`` and the site was ``killed``,
    ``started`` again and ``back``, and the number of rounds for which the others were ``alone``.
    """
    survivors = [run.heads[0] for name, run in runs.items() if name != killed]
    before = max(slowest_step(rank, at["founded"], at["killed"]) for rank in survivors)
    after = max(slowest_step(rank, at["killed"], at["started"]) for rank in survivors)
    first = runs[killed].heads[0].starts
    losses = [site_result["val_loss"] for site_result in results.values()]
    same = len({site_result["sha256"] for site_result in results.values()}) == 1
    ends = (
        f"all {len(results)} sites ended with the same parameters, bit for bit, at {losses[0]:.3f}"
        " nats per byte"
        if same
        else "the sites DID NOT end with the same parameters, which is a bug: please report it"
    )
    return [
        f"{killed} was killed with -9 after {at['killed'] - at['founded']:.0f} s, and the others"
        f" trained on: until it was started again, {at['alone']:.0f} rounds later, their slowest"
        f" inner step took {1000 * after:.0f} ms, and before its death {1000 * before:.0f} ms.",
        f"It went on from inner step {first[-1][1]:,} of its own checkpoint, counted again"
        f" {at['back'] - at['started']:.1f} s after its process was started, and {ends}.",
    ]


def training(rank: Rank) -> list[tuple[float, float]]:
    """Returns the time spans in which a site trained, without the pauses between them."""
    spans: list[tuple[float, float]] = []
    for step in rank.steps:
        if spans and step.span[0] - spans[-1][1] < PAUSE and step.done - step.span[0] < PAUSE:
            spans[-1] = spans[-1][0], step.done
        else:
            # Before a step that took this long, the site did not train.
            spans.append((max(step.span[0], step.done - PAUSE), step.done))
    return spans


def draw(folder: Path, runs: Mapping[str, Run], at: Mapping[str, float], killed: str) -> list[Path]:
    """Draws when each site trained and counted, and its loss, for light and dark pages; returns the
    files.
    """
    seconds = {moment: at[moment] - at["founded"] for moment in ("killed", "started", "back")}
    survivor = next(run.heads[0] for name, run in runs.items() if name != killed)

    def drawn(figure: Any) -> None:
        rows, losses = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
        for row, (name, run) in enumerate(runs.items()):
            color = COLORS[row % len(COLORS)]
            rank = run.heads[0]
            draw_row(rows, row, rank, at["founded"])
            landed = landings(survivor, name, at["founded"])
            rows.plot(landed, [row] * len(landed), "|", color=color, markersize=13)
            losses.plot(*smooth(rank, at["founded"]), color=color, linewidth=1.4, label=name)
        for axes in (rows, losses):
            axes.grid(visible=False, axis="y")
            for second in seconds.values():
                axes.axvline(second, color="C1", linewidth=1, linestyle=":")
        bottom = len(runs) - 0.5
        style = {"color": "C1", "va": "top", "fontsize": 8, "annotation_clip": False}
        rows.annotate(f"{killed}: kill -9", (seconds["killed"], bottom), ha="right", **style)
        rows.annotate("started again", (seconds["started"], bottom), ha="left", **style)
        rows.annotate("counts again", (seconds["back"], bottom + 0.3), ha="left", **style)
        rows.set_yticks(range(len(runs)), list(runs))
        rows.set_ylim(len(runs) + 0.1, -0.5)
        rows.set_title("grey: trains; a mark: counts in a round", fontsize=9, loc="left")
        losses.set_xlabel("seconds since the run was founded")
        losses.set_ylabel("training loss")
        losses.legend(loc="upper right")

    return save_picture(str(folder / "federation.svg"), drawn, (8.4, 4.2))


def draw_row(axes: Any, row: int, rank: Rank, zero: float) -> None:
    """Draws when a site trained."""
    bars = [(began - zero, ended - began) for began, ended in training(rank)]
    axes.broken_barh(bars, (row - 0.3, 0.6), color="C9", alpha=0.4, linewidth=0)


def landings(rank: Rank, site: str, zero: float) -> list[float]:
    """Returns when a rank landed rounds in which a site counts."""
    counting = [landing for landing in rank.landings if site in landing.sites]
    return [landing.spans["land"][1] - zero for landing in counting]


def smooth(rank: Rank, zero: float) -> tuple[list[float], list[float]]:
    """Returns the training loss over time as means of neighbours, with gaps where a site was
    absent.
    """
    done = {step.step: step.done for step in rank.steps}
    points = sorted(
        (done[int(step)] - zero, loss) for step, loss in rank.losses if int(step) in done
    )
    width = max(1, len(points) // 40)
    moments = list[float]()
    means = list[float]()
    part = list[float]()
    for number, (moment, loss) in enumerate(points, 1):
        part.append(loss)
        is_end = number == len(points) or points[number][0] - moment > 5 * PAUSE
        if len(part) == width or is_end:
            moments.append(moment)
            means.append(sum(part) / len(part))
            part.clear()
        if is_end:
            moments.append(moment)
            means.append(float("nan"))
    return moments, means
