"""Formats simulated runs as tables for a terminal."""

from collections.abc import Sequence
from itertools import islice

from lightning_sdiloco.planning import Link, readable, readable_rate
from lightning_sdiloco.tools.output import new_table, percent, rendered
from lightning_sdiloco.tools.simulate.federated import FederatedRun, Places
from lightning_sdiloco.tools.simulate.recording import LAST
from lightning_sdiloco.tools.simulate.running import Run
from lightning_sdiloco.tools.simulate.seeds import Compared
from lightning_sdiloco.tools.simulate.sweeping import Circumstances, Outcome, Prediction

_WIDTH = 110
_MOST_VALIDATIONS = 10


def run_as_text(outcome: Outcome, where: Circumstances | None) -> str:
    """Formats one run."""
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
    """Formats a federation."""
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
