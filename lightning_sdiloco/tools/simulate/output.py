"""What simulated runs come to, as tables and as pictures."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise
from statistics import mean, median
from typing import Any

from lightning_sdiloco.planning import Link, readable, readable_rate
from lightning_sdiloco.tools.output import LIGHT, percent, save_picture, table
from lightning_sdiloco.tools.simulate.groups import LAST, Run
from lightning_sdiloco.tools.simulate.sites import FederatedRun, Places
from lightning_sdiloco.tools.simulate.sweeps import Circumstances, Compared, Outcome, half_width

_WIDTH = 110
_MOST_VALIDATIONS = 10
_FIRST, _LAST = f"loss, first\n{LAST} batches", f"loss, last\n{LAST} batches"

# Tables


def run_as_text(outcome: Outcome, where: Circumstances | None) -> str:
    run, prediction = outcome.run, outcome.prediction
    columns = {
        "group": range(len(run.groups)),
        _FIRST: [_loss(group.first_loss) for group in run.groups],
        _LAST: [_loss(group.last_loss) for group in run.groups],
        "outer model,\nsame batches": [_loss(group.outer_loss) for group in run.groups],
        "bytes\nsent": [readable(group.bytes_sent) for group in run.groups],
    }
    if prediction is not None:
        columns["predicted\nwait"] = [_duration(times.waited) for times in prediction.times]
    parts = [
        f"{len(run.groups)} worker group{'s' if len(run.groups) > 1 else ''}, {outcome.inner_steps:,} inner steps each,"
        f" {_settings(run)}",
        table(columns, width=_WIDTH),
        *([f"Outer model: loss {_loss(run.outer_loss)}"] if run.outer_loss else []),
        *_validations(run),
    ]
    if where is not None and prediction is not None:
        parts.append(_predicted(outcome, where))
    return "\n\n".join(parts)


def sites_as_text(run: FederatedRun, places: Places) -> str:
    sites, groups = run.sites, [site.group for site in run.sites]
    columns = {
        "site": range(len(sites)),
        "inner\nsteps": [f"{len(site.times):,}" for site in sites],
        _FIRST: [_loss(group.first_loss) for group in groups],
        _LAST: [_loss(group.last_loss) for group in groups],
        "outer model,\nsame batches": [_loss(group.outer_loss) for group in groups],
        "rounds\ncounted": [site.counted for site in sites],
        "came\nlate": [site.late for site in sites],
        "rounds\nmissed": [site.missed for site in sites],
        "bytes\nsent": [readable(group.bytes_sent) for group in groups],
        "ended\nafter": [_duration(site.ended) for site in sites],
    }
    link = f"{_described(places.link)}, " if places.link else ""
    parts = [
        f"{len(sites)} site{'s' if len(sites) > 1 else ''}, {_settings(run.first)}\n{run.terms}",
        table(columns, width=_WIDTH),
        *_validations(run.first),
        f"In virtual time, {link}{places.step_time:g} s per inner step.",
    ]
    return "\n\n".join(parts)


def sweep_as_text(outcomes: Sequence[Outcome], names: Sequence[str], where: Circumstances | None) -> str:
    """Formats the runs of a sweep as a table, one line for each."""
    runs, predictions = [outcome.run for outcome in outcomes], [outcome.prediction for outcome in outcomes]
    last = [run.validations[-1].metrics if run.validations else {} for run in runs]
    columns = {
        **_varied(outcomes, names),
        _LAST: [_loss(run.last_loss) for run in runs],
        "outer\nmodel": [_loss(run.outer_loss) for run in runs],
        **{metric: [_loss(own.get(metric)) for own in last] for metric in last[0]},
        "bytes sent\nper group": [readable(run.groups[0].bytes_sent) for run in runs],
    }
    if any(predictions):
        columns["predicted\ntime"] = [_duration(own.seconds) if own else "-" for own in predictions]
        columns["compute\nutilisation"] = [percent(own.utilisation) if own else "-" for own in predictions]
    return "\n\n".join([table(columns, len(names), _WIDTH), *([] if where is None else [_described(where.link)])])


def compared_as_text(rows: Sequence[Compared], names: Sequence[str], where: Circumstances | None) -> str:
    """Formats runs that were made with several seeds as a table, one line for each."""
    columns = {
        **_varied([row.outcomes[0] for row in rows], names),
        "loss of the\nouter model": [_loss(row.loss) for row in rows],
        "minus that of\nthe first, %": [row.difference() for row in rows],
        "bytes sent\nper group": [readable(row.bytes_sent) for row in rows],
    }
    if any(row.seconds for row in rows):
        columns["predicted\ntime"] = [_duration(row.seconds) if row.seconds else "-" for row in rows]
    note = f"Means over {len(rows[0].outcomes)} seeds; differences with their 95 % interval."
    return "\n\n".join([table(columns, len(names), _WIDTH), note, *([] if where is None else [_described(where.link)])])


def _varied(outcomes: Sequence[Outcome], names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: [outcome.varied(name) for outcome in outcomes] for name in names}


def _settings(run: Run) -> str:
    settings = run.settings
    numbers = settings.numbers_and_policies
    return (
        f"{run.model.numel:,} parameters in {len(run.model.fragments(settings))} fragments\n"
        f"sync_every={settings.sync_every}, overlap_steps={settings.overlap_steps}, mixing={numbers.pop('mixing')},"
        f" compression={settings.compression!r}{''.join(f', {name}={value}' for name, value in numbers.items())}"
    )


def _validations(run: Run) -> list[str]:
    if not run.validations:
        return []
    # The last is told in any case.
    every = -(-len(run.validations) // _MOST_VALIDATIONS)
    shown = list(islice(reversed(run.validations), None, None, every))[::-1]
    columns = {"after inner step": [validation.step for validation in shown]} | {
        name: [_loss(validation.metrics.get(name)) for validation in shown] for name in run.validations[-1].metrics
    }
    return ["Validation:\n\n" + table(columns, 0, _WIDTH)]


def _predicted(outcome: Outcome, where: Circumstances) -> str:
    prediction, timeout = outcome.prediction, outcome.run.settings.timeout
    assert prediction is not None
    measured = "" if where.step_time else ", as measured here"
    lines = [
        f"Predicted on {_described(where.link)}, {prediction.step_time:.3g} s per inner step{measured}:",
        f"  {_duration(prediction.seconds)}, compute utilisation {percent(prediction.utilisation)};"
        f" DDP over all groups {_duration(prediction.ddp_seconds)}",
    ]
    if prediction.longest_flight > timeout.total_seconds():
        lines.append(
            f"  A fragment would be in flight for {_duration(prediction.longest_flight)}, longer than timeout: a real"
            " run would end with an ExchangeError. Raise timeout."
        )
    return "\n".join(lines)


def _described(link: Link) -> str:
    told = f"{readable_rate(link.gbit_s)} in each direction, {link.round_trip * 1000:g} ms round trip"
    return told + (f", {link.loss:.3g} of the packets lost" if link.loss else "")


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    """Formats seconds for people.

    Examples:
        >>> _duration(3.21), _duration(3900), _duration(200_000)
        ('3.2 s', '1.08 h', '55.6 h')
    """
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 3600:.3g} h"


# Pictures: the loss over inner steps, and over what it costs


_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def draw(path: str, outcomes: Sequence[Outcome], names: Sequence[str]) -> None:
    """Writes the picture of a run or a sweep: losses over inner steps, and over the time or the bytes of a group."""
    save_picture(path, partial(_draw, outcomes, names))


def _draw(outcomes: Sequence[Outcome], names: Sequence[str], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    cost, label = _cost(outcomes)
    for index, outcome in enumerate(outcomes):
        color = LIGHT.line(index)
        for group in outcome.run.groups if len(outcomes) == 1 else ():
            left.plot(*_smooth(group.losses), color=color, linewidth=0.8, alpha=0.35)
        batches, losses = _smooth(outcome.curve())
        scale = outcome.inner_steps / len(outcome.curve())
        steps = [batch * scale for batch in batches]
        left.plot(steps, losses, color=color, label=outcome.told(names) or "mean of the groups")
        right.plot([cost(outcome, step) for step in steps], losses, color=color)
        validated = [(one.step, one.loss) for one in outcome.run.validations if one.loss is not None]
        for step, loss in validated:
            left.plot(step, loss, "o", color=color, markersize=5, mec="white")
            right.plot(cost(outcome, step), loss, "o", color=color, markersize=5, mec="white")
        if validated and index == 0:
            left.plot([], [], "o", color=LIGHT.ink, markersize=5, label="outer model, validation")
    _finish(figure, left, right, label)


def draw_compared(path: str, rows: Sequence[Compared], names: Sequence[str]) -> None:
    """Writes the picture of a comparison over several seeds: differences with their intervals, and bytes or time."""
    save_picture(path, partial(_draw_compared, rows, names), size=(8.4, 1.4 + 0.3 * len(rows)))


def _draw_compared(rows: Sequence[Compared], names: Sequence[str], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    timed = all(row.seconds is not None for row in rows)
    unit, name = _unit(max(row.seconds or 0.0 for row in rows)) if timed else (1e6, "MB sent by a group")
    better, worse, same = LIGHT.line(0), LIGHT.line(1), LIGHT.line(-1)
    for position, row in enumerate(rows):
        half, more = half_width(row.percent), mean(row.percent) if row.percent else 0.0
        color = same if row.is_first or half is None or abs(more) <= half else better if more < 0 else worse
        left.errorbar(more, -position, xerr=None if row.is_first else half, fmt="o", color=color, capsize=3)
        right.barh(-position, (row.bytes_sent if row.seconds is None else row.seconds) / unit, 0.6, color=better)
    left.set_xlabel("loss above that of the first, %, with its 95 % interval")
    right.set_xlabel(f"{name}, predicted" if timed else name)
    left.axvline(0, color=same, linewidth=1)
    left.set_yticks([-at for at in range(len(rows))], [row.outcomes[0].told(names) for row in rows], fontsize=8)
    right.set_yticks([])


def draw_sites(path: str, run: FederatedRun) -> None:
    """Writes the picture of a federation: the loss of every site over inner steps, and over virtual time."""
    save_picture(path, partial(_draw_sites, run))


def _draw_sites(run: FederatedRun, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    unit, name = _unit(max(site.ended for site in run.sites))
    for index, site in enumerate(run.sites):
        batches, losses = _smooth(site.group.losses)
        scale = len(site.times) / max(1, len(site.group.losses))
        steps = [max(1, math.ceil(batch * scale)) for batch in batches]
        left.plot(steps, losses, color=LIGHT.line(index), label=f"site {index}")
        right.plot(*with_gaps([site.times[step - 1] / unit for step in steps], losses), color=LIGHT.line(index))
    _finish(figure, left, right, f"{name}, virtual")


def _finish(figure: Any, left: Any, right: Any, label: str) -> None:
    left.set_xlabel("inner steps")
    right.set_xlabel(label)
    left.set_ylabel("loss")
    right.set_ylim(left.get_ylim())
    right.tick_params(labelleft=False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _unit(seconds: float) -> tuple[float, str]:
    return next((unit, name) for unit, name in _UNITS if seconds >= unit or unit == 1)


def _smooth(losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Averages over windows of a fiftieth of the run, and puts each mean at the end of its window."""
    width = max(1, len(losses) // 50)
    ends = list(range(width, len(losses) + 1))
    return ends, [sum(losses[end - width : end]) / width for end in ends]


def with_gaps(times: Sequence[float], losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Leaves a gap wherever a site trained nothing for long: it was away, or waited for its last landing."""
    usual = median(later - earlier for earlier, later in pairwise(times)) if len(times) > 1 else 0.0
    points = list(zip(times, losses, strict=True))
    for index in reversed([i for i, (earlier, later) in enumerate(pairwise(times), 1) if later - earlier > 5 * usual]):
        points.insert(index, (math.nan, math.nan))
    return [time for time, _ in points], [loss for _, loss in points]


def _cost(outcomes: Sequence[Outcome]) -> tuple[Callable[[Outcome, float], float], str]:
    """Returns what the run has cost after an inner step, in time or in bytes, and the name of that."""
    seconds = [outcome.prediction.seconds for outcome in outcomes if outcome.prediction is not None]
    if len(seconds) < len(outcomes):
        return lambda outcome, step: outcome.run.groups[0].bytes_sent / 1e6 * step / outcome.inner_steps, (
            "MB sent by a group"
        )
    unit, name = _unit(max(seconds))

    def at(outcome: Outcome, step: float) -> float:
        assert outcome.prediction is not None
        slowest = max(outcome.prediction.times, key=lambda times: times.end)
        return slowest.steps[max(0, math.ceil(step) - 1)] / unit

    return at, f"{name}, predicted"
