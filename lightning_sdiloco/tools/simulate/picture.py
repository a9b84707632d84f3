"""Draws simulated runs: loss over inner steps, and over time or bytes."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

from lightning_sdiloco.tools.output import require_drawable, save
from lightning_sdiloco.tools.simulate.federated import FederatedRun
from lightning_sdiloco.tools.simulate.recording import Validation
from lightning_sdiloco.tools.simulate.seeds import Compared, half_width
from lightning_sdiloco.tools.simulate.sweeping import METHOD, Outcome

_INK, _GRID = "#263238", "#cfd8dc"
_COLORS = ("#1e88e5", "#e53935", "#2e9e50", "#8e24aa", "#fb8c00", "#00897b", "#6d4c41", "#d81b60", "#3949ab", "#757575")
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def draw(path: str, outcomes: Sequence[Outcome], names: Sequence[str]) -> None:
    """Writes the picture to a file."""
    require_drawable(path)
    save(_figure(outcomes, names), path)


def draw_compared(path: str, rows: Sequence[Compared], names: Sequence[str]) -> None:
    """Writes the picture of a comparison over several seeds: differences with their intervals, and bytes or time."""
    require_drawable(path)
    figure, left, right = _panels(height=1.4 + 0.3 * len(rows))
    timed = all(row.seconds is not None for row in rows)
    unit, name = _unit(max(row.seconds or 0.0 for row in rows)) if timed else (1e6, "MB sent by a group")
    for position, row in enumerate(rows):
        half, more = half_width(row.percent), mean(row.percent) if row.percent else 0.0
        color = _COLORS[-1] if row.is_first or half is None or abs(more) <= half else _COLORS[0 if more < 0 else 1]
        left.errorbar(more, -position, xerr=None if row.is_first else half, fmt="o", color=color, capsize=3)
        right.barh(
            -position, (row.bytes_sent if row.seconds is None else row.seconds) / unit, height=0.6, color=_COLORS[0]
        )
    _style(left, "loss above that of the first, %, with its 95 % interval")
    _style(right, f"{name}, predicted" if timed else name)
    left.axvline(0, color=_COLORS[-1], linewidth=1)
    left.set_yticks([-at for at in range(len(rows))], [_told(row.outcomes[0], names) for row in rows], fontsize=8)
    right.set_yticks([])
    save(figure, path)


def draw_sites(path: str, run: FederatedRun) -> None:
    """Writes the picture of a federation to a file: the loss of every site over inner steps, and over virtual time."""
    require_drawable(path)
    figure, left, right = _panels()
    unit, name = _unit(max(site.ended for site in run.sites))
    for index, site in enumerate(run.sites):
        color = _COLORS[index % len(_COLORS)]
        assert site.group is not None, "the site has lived"
        batches, losses = _smooth(site.group.losses)
        scale = len(site.times) / max(1, len(site.group.losses))
        steps = [max(1, math.ceil(batch * scale)) for batch in batches]
        left.plot(steps, losses, color=color, label=f"site {index}")
        right.plot(*with_gaps([site.times[step - 1] / unit for step in steps], losses), color=color)
    _finish(figure, left, right, f"{name}, virtual")
    save(figure, path)


def _panels(height: float = 4.3) -> tuple[Any, Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # White in a dark page too: the colors are chosen for it.
    figure = Figure(figsize=(8.4, height), facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1))
    return figure, figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)


def _finish(figure: Any, left: Any, right: Any, label: str) -> None:
    _style(left, "inner steps")
    _style(right, label)
    left.set_ylabel("loss", color=_INK)
    right.set_ylim(left.get_ylim())
    right.tick_params(labelleft=False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=_INK, fontsize=9)


def _unit(seconds: float) -> tuple[float, str]:
    return next((unit, name) for unit, name in _UNITS if seconds >= unit or unit == 1)


def _figure(outcomes: Sequence[Outcome], names: Sequence[str]) -> Any:
    figure, left, right = _panels()
    cost, label = _cost(outcomes)
    for index, outcome in enumerate(outcomes):
        color = _COLORS[index % len(_COLORS)]
        for group in outcome.run.groups if len(outcomes) == 1 else ():
            left.plot(*_smooth(group.losses), color=color, linewidth=0.8, alpha=0.35)
        told = _told(outcome, names)
        steps, losses = _smooth(outcome.curve())
        scale = outcome.inner_steps / len(outcome.curve())
        left.plot([step * scale for step in steps], losses, color=color, label=told or "mean of the groups")
        right.plot([cost(outcome, step * scale) for step in steps], losses, color=color)
        validated = [(validation.step, loss) for validation, loss in _validated(outcome)]
        for axes, at in ((left, lambda step: step), (right, lambda step, own=outcome: cost(own, step))):
            points = [(at(step), loss) for step, loss in validated]
            axes.plot(*zip(*points, strict=True), "o", color=color, markersize=5, mec="white") if points else None
    if any(_validated(outcomes[0])):
        left.plot([], [], "o", color=_INK, markersize=5, label="outer model, validation")
    _finish(figure, left, right, label)
    return figure


def _told(outcome: Outcome, names: Sequence[str]) -> str:
    """Tells what varied; a name alone, where runs have names."""
    values = zip(names, outcome.varied(names), strict=True)
    return ", ".join(str(value) if name == METHOD else f"{name}={value}" for name, value in values)


def _smooth(losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Averages over windows of a fiftieth of the run, and puts each mean at the end of its window."""
    width = max(1, len(losses) // 50)
    ends = list(range(width, len(losses) + 1))
    return ends, [sum(losses[end - width : end]) / width for end in ends]


def with_gaps(times: Sequence[float], losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Leaves a gap wherever a site trained nothing for long: it was away, or waited for its last landing."""
    usual = median(later - earlier for earlier, later in pairwise(times)) if len(times) > 1 else 0.0
    points = [(time, loss) for time, loss in zip(times, losses, strict=True)]
    for index in reversed([i for i, (earlier, later) in enumerate(pairwise(times), 1) if later - earlier > 5 * usual]):
        points.insert(index, (math.nan, math.nan))
    return [time for time, _ in points], [loss for _, loss in points]


def _validated(outcome: Outcome) -> list[tuple[Validation, float]]:
    """Returns the validations, each with the first loss that it logged."""
    return [(each, loss) for each in outcome.run.validations if (loss := each.loss) is not None]


def _cost(outcomes: Sequence[Outcome]) -> tuple[Callable[[Outcome, float], float], str]:
    """Returns what the run has cost after an inner step, in time or in bytes, and the name of that."""
    predictions = [outcome.prediction for outcome in outcomes]
    if None in predictions:
        return lambda outcome, step: outcome.run.groups[0].bytes_sent / 1e6 * step / outcome.inner_steps, (
            "MB sent by a group"
        )
    longest = max(prediction.seconds for prediction in predictions if prediction is not None)
    unit, name = _unit(longest)

    def seconds(outcome: Outcome, step: float) -> float:
        assert outcome.prediction is not None
        slowest = max(outcome.prediction.times, key=lambda times: times.end)
        return slowest.steps[max(0, math.ceil(step) - 1)] / unit

    return seconds, f"{name}, predicted"


def _style(axes: Any, label: str) -> None:
    axes.set_xlabel(label, color=_INK)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, which="both", length=0, pad=6)
    for side in axes.spines.values():
        side.set_visible(False)
