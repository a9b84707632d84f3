"""What simulated runs come to, as tables and as pictures."""

import math
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from statistics import mean, median
from typing import Any

from lightning_sdiloco.planning import Link, readable, readable_rate
from lightning_sdiloco.tools.output import new_table, percent, rendered, require_drawable, save
from lightning_sdiloco.tools.simulate.groups import LAST, Run, Validation
from lightning_sdiloco.tools.simulate.sites import FederatedRun, Places
from lightning_sdiloco.tools.simulate.sweeps import METHOD, Circumstances, Compared, Outcome, Prediction, half_width

# Tables


_WIDTH = 110
_MOST_VALIDATIONS = 10


def run_as_text(outcome: Outcome, where: Circumstances | None) -> str:
    run = outcome.run
    steps = max(group.inner_steps for group in run.groups)
    parts = [
        f"{len(run.groups)} worker group{'s' if len(run.groups) > 1 else ''}, {steps:,} inner steps each,"
        f" {_settings(run)}",
        _groups(run, outcome.prediction),
        *_validations(run),
    ]
    if where is not None and outcome.prediction is not None:
        parts.append(_predicted(outcome, where))
    return "\n\n".join(parts)


def sites_as_text(run: FederatedRun, places: Places) -> str:
    first = run.first
    parts = [
        f"{len(run.sites)} site{'s' if len(run.sites) > 1 else ''}, {_settings(first)}\n{run.terms}",
        _sites(run),
        *_validations(first),
        f"In virtual time, {_link(places)}{places.step_time:g} s per inner step.",
    ]
    return "\n\n".join(parts)


def _sites(run: FederatedRun) -> str:
    columns = ["site", "inner\nsteps", f"loss, first\n{LAST} batches", f"loss, last\n{LAST} batches"]
    columns += [
        "outer model,\nsame batches",
        "rounds\ncounted",
        "came\nlate",
        "rounds\nmissed",
        "bytes\nsent",
        "ended\nafter",
    ]
    table = new_table(columns, left=1)
    for index, site in enumerate(run.sites):
        group = site.group
        assert group is not None, "the site has lived"
        losses = [_loss(group.first_loss), _loss(group.last_loss), _loss(group.outer_loss)]
        rounds = [str(site.counted), str(site.late), str(site.missed)]
        table.add_row(
            str(index), f"{len(site.times):,}", *losses, *rounds, readable(group.bytes_sent), _duration(site.ended)
        )
    return rendered(table, _WIDTH)


def _link(places: Places) -> str:
    return f"{_described(places.link)}, " if places.link else ""


def sweep_as_text(outcomes: Sequence[Outcome], names: Sequence[str], where: Circumstances | None) -> str:
    """Formats the runs of a sweep as a table, one line for each."""
    metrics = list(outcomes[0].run.validations[-1].metrics) if outcomes[0].run.validations else []
    columns = [*names, f"loss, last\n{LAST} batches", "outer\nmodel", *metrics, "bytes sent\nper group"]
    timed = [outcome.prediction for outcome in outcomes]
    if any(timed):
        columns += ["predicted\ntime", "compute\nutilisation"]
    table = new_table(columns, left=len(names))
    for outcome, prediction in zip(outcomes, timed, strict=True):
        run = outcome.run
        losses = [group.last_loss for group in run.groups if group.last_loss is not None]
        last = run.validations[-1].metrics if run.validations else {}
        row = [_loss(sum(losses) / len(losses) if losses else None), _loss(run.outer_loss)]
        row += [_loss(last.get(metric)) for metric in metrics]
        row += [readable(run.groups[0].bytes_sent)]
        if any(timed):
            row += [_duration(prediction.seconds), percent(prediction.utilisation)] if prediction else ["-", "-"]
        table.add_row(*map(str, outcome.varied(names)), *row)
    text = rendered(table, _WIDTH)
    notes = [] if where is None else [_circumstances(where)]
    return "\n\n".join([text, *notes])


def compared_as_text(rows: Sequence[Compared], names: Sequence[str], where: Circumstances | None) -> str:
    """Formats runs that were made with several seeds as a table, one line for each."""
    timed = [row.seconds for row in rows]
    columns = [*names, "loss of the\nouter model", "minus that of\nthe first, %", "bytes sent\nper group"]
    table = new_table([*columns, *(["predicted\ntime"] if any(timed) else [])], left=len(names))
    for row, seconds in zip(rows, timed, strict=True):
        cells = [_loss(row.loss), row.difference(), readable(row.bytes_sent)]
        cells += [_duration(seconds) if seconds else "-"] if any(timed) else []
        table.add_row(*map(str, row.outcomes[0].varied(names)), *cells)
    note = f"Means over {len(rows[0].outcomes)} seeds; differences with their 95 % interval."
    return "\n\n".join([rendered(table, _WIDTH), note, *([] if where is None else [_circumstances(where)])])


def _settings(run: Run) -> str:
    settings = run.settings
    numbers = settings.numbers_and_policies
    return (
        f"{run.model.numel:,} parameters in {len(run.model.fragments(settings))} fragments\n"
        f"sync_every={settings.sync_every}, overlap_steps={settings.overlap_steps}, mixing={numbers.pop('mixing')},"
        f" compression={settings.compression!r}{''.join(f', {name}={value}' for name, value in numbers.items())}"
    )


def _groups(run: Run, prediction: Prediction | None) -> str:
    columns = ["group", f"loss, first\n{LAST} batches", f"loss, last\n{LAST} batches", "outer model,\nsame batches"]
    columns += ["bytes\nsent"] + (["predicted\nwait"] if prediction else [])
    table = new_table(columns, left=1)
    for index, group in enumerate(run.groups):
        row = [_loss(group.first_loss), _loss(group.last_loss), _loss(group.outer_loss)]
        row += [readable(group.bytes_sent)]
        table.add_row(str(index), *row, *([_duration(prediction.times[index].waited)] if prediction else []))
    return rendered(table, _WIDTH) + (f"\n\nOuter model: loss {_loss(run.outer_loss)}" if run.outer_loss else "")


def _validations(run: Run) -> list[str]:
    if not run.validations:
        return []
    names = list(run.validations[-1].metrics)
    table = new_table(["after inner step", *names], left=0)
    # The last is told in any case.
    every = -(-len(run.validations) // _MOST_VALIDATIONS)
    shown = list(islice(reversed(run.validations), None, None, every))[::-1]
    for validation in shown:
        table.add_row(str(validation.step), *(_loss(validation.metrics.get(name)) for name in names))
    return ["Validation:\n\n" + rendered(table, _WIDTH)]


def _predicted(outcome: Outcome, where: Circumstances) -> str:
    prediction, run = outcome.prediction, outcome.run
    assert prediction is not None
    lines = [
        f"Predicted on {_circumstances(where)}, {_step(prediction, where)}:",
        f"  {_duration(prediction.seconds)}, compute utilisation {percent(prediction.utilisation)};"
        f" DDP over all groups {_duration(prediction.ddp_seconds)}",
    ]
    if prediction.longest_flight > run.settings.timeout.total_seconds():
        lines.append(
            f"  A fragment would be in flight for {_duration(prediction.longest_flight)}, longer than timeout: a real"
            " run would end with an ExchangeError. Raise timeout."
        )
    return "\n".join(lines)


def _circumstances(where: Circumstances) -> str:
    return _described(where.link)


def _described(link: Link) -> str:
    told = f"{readable_rate(link.gbit_s)} in each direction, {link.round_trip * 1000:g} ms round trip"
    return told + (f", {link.loss:.3g} of the packets lost" if link.loss else "")


def _step(prediction: Prediction, where: Circumstances) -> str:
    measured = "" if where.step_time else ", as measured here"
    return f"{prediction.step_time:.3g} s per inner step{measured}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    """Formats seconds for people.

    Examples:
        >>> _duration(3.21), _duration(3900), _duration(200_000)
        ('3.2 s', '1.08 h', '55.6 h')
    """
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 3600:.3g} h"


# Pictures


_INK, _GRID = "#263238", "#cfd8dc"
_COLORS = ("#1e88e5", "#e53935", "#2e9e50", "#8e24aa", "#fb8c00", "#00897b", "#6d4c41", "#d81b60", "#3949ab", "#757575")
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def draw(path: str, outcomes: Sequence[Outcome], names: Sequence[str]) -> None:
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
