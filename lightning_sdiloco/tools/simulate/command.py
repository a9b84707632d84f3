"""Runs ``sdiloco simulate``: turns options into simulated runs, and these into text, JSON and a
picture.

Runs of a sweep, or of a file of methods, are made one after the other; with several seeds each is
compared with the first. On a link, how long each would take is predicted.
"""

import inspect
import json as json_format
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_sdiloco.lightning.strategy import GroupStrategy
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Absence, DataParallel, Streaming, Times, play
from lightning_sdiloco.planning.units import STUDENT_T, half_width, readable, readable_rate
from lightning_sdiloco.planning.workload import Groups
from lightning_sdiloco.tools.output import percent, plain, require_drawable, save_picture, table
from lightning_sdiloco.tools.simulate.groups import LAST, Configuration, Run, check, class_at, run
from lightning_sdiloco.tools.simulate.sites import FederatedRun, Places, play_sites


def simulate(
    config: list[str] = [],  # noqa: B006
    set: list[str] = [],  # noqa: B006
    cli: str | None = None,
    model: str | None = None,
    data: str | None = None,
    groups: int = 2,
    sites: int | None = None,
    sweep: list[str] = [],  # noqa: B006
    methods: str | None = None,
    seeds: str | None = None,
    bandwidth: float | None = None,
    round_trip: float = 0.0,
    loss: float = 0.0,
    step_time: float | None = None,
    speeds: str | None = None,
    delays: str | None = None,
    absence: list[str] = [],  # noqa: B006
    memory_rate: float = 1000.0,
    picture: str | None = None,
    json: str | None = None,
) -> str:
    """Run a LightningCLI configuration as several worker groups in this process, and predict its
    time on a link.

    Args:
        config: Configuration file of a LightningCLI. Repeat for several; later ones override.
        set: Another argument of the LightningCLI, such as trainer.max_steps=100. Repeat for more.
        cli: Class path of the LightningCLI, if the training script has its own.
        model: Class path of the model, if the script gives it to its LightningCLI.
        data: Class path of the data module, if the script gives it to its LightningCLI.
        groups: Number of worker groups, of one rank each.
        sites: Number of sites of a federation, of one rank each, instead of groups.
        sweep: What to vary: an argument of the strategy, or groups, as sync_every=10,20. Repeat for
            more.
        methods: YAML file of runs to compare, instead of a sweep: it maps names to arguments of the
            strategy.
        seeds: Run each combination of the sweep or methods with each of these seeds, as 0,1,2, and
            compare it with the first.
        bandwidth: Bandwidth between a group and all others, or a site and its hub, such as 100Mbit,
            to predict the time.
        round_trip: Seconds to another group and back: 50 ms is 0.05.
        loss: Share of packets lost: 0.1 % is 0.001.
        step_time: Seconds of an inner step there; by default as long as here. Required with
            --sites.
        speeds: How fast each group is, as 1,1,0.5; 1 is the step time.
        delays: Seconds by which each site's contributions are late, as 0,0,12; with --sites.
        absence: When a group is away, in predicted seconds, as 1:30-90 for group 1. Repeat for
            more.
        memory_rate: GB/s at which a device reads and writes its memory: about 1000 for a GPU, 10
            for a CPU core.
        picture: File (.svg or .png) for a plot of the losses.
        json: File for all numbers.

    Examples:
        $ sdiloco simulate --config train.yaml --groups 4 --bandwidth 100Mbit --round-trip 50ms
        $ sdiloco simulate --config train.yaml --groups 2 --sweep sync_every=10,40 --sweep
        compression=fp32,fp4
    """
    if not config:
        raise ValueError("--config must be given: the configuration file of a LightningCLI.")
    if picture is not None:
        require_drawable(picture)
    classes: dict[str, type] = {}
    for name, path in (("cli", cli), ("model", model), ("data", data)):
        try:
            classes |= {name: class_at(path)} if path is not None else {}
        except ValueError as error:
            raise ValueError(
                f"{name}={path!r} cannot be imported: {error}. Give the path of a class:"
                " module.Class"
            ) from error
    configuration = Configuration(tuple(config), tuple(set), **classes)
    places = Places(
        link=None if bandwidth is None else Link(bandwidth, round_trip, loss),
        step_time=step_time,
        speeds=_numbers(speeds, "speeds"),
        delays=_numbers(delays, "delays"),
        absences=tuple(map(_absence, absence)),
        memory_rate=memory_rate * 1e9,
    )
    if sites is not None:
        if sweep or methods or seeds:
            raise ValueError(
                "--sweep, --methods and --seeds do not work with --sites. Give one run of a"
                " federation at a time."
            )
        if step_time is None:
            raise ValueError(
                "--sites needs --step-time: which sites are late depends on the time of an inner"
                " step."
            )
        return _federation(configuration, sites, places, picture, json)
    if delays is not None:
        raise ValueError("--delays is about the sites of a federation. Give --sites too.")
    of_links = {
        "round-trip": round_trip,
        "loss": loss,
        "step-time": step_time,
        "speeds": speeds,
        "absence": absence,
    }
    given = [f"--{name}" for name, value in of_links.items() if value]
    if bandwidth is None and given:
        raise ValueError(
            f"{given[0]} is for predicting the time of a run on a link. Give its --bandwidth too."
        )
    if sweep and methods is not None:
        raise ValueError("--sweep and --methods both say what varies. Give one of them.")
    runs = combinations(sweep, groups) if methods is None else _methods_of(methods, groups)
    each = _seeds(seeds)
    if each and len(runs) < 2:
        raise ValueError(
            "--seeds compares runs, but there is only one. Say with --sweep or --methods what"
            " varies."
        )
    return _worker_groups(configuration, runs, each, places, picture, json)


# Running


_GROUPS = "groups"
_METHOD = "method"


class Planned(NamedTuple):
    """A run, by what varies: values by the names of arguments, or the name of a method."""

    varied: dict[str, Any]
    groups: int
    choices: dict[str, Any]

    def told(self) -> str:
        return ", ".join(
            str(own) if name == _METHOD else f"{name}={own}" for name, own in self.varied.items()
        )


def combinations(sweeps: Sequence[str], groups: int) -> list[Planned]:
    """Lists all runs of a sweep.

    Examples:
        >>> [tuple(run[1:]) for run in combinations(["groups=2,4", "compression=fp4"], groups=2)]
        [(2, {'compression': 'fp4'}), (4, {'compression': 'fp4'})]
    """
    known = _known()
    varied = dict[str, list[Any]]()
    for sweep in sweeps:
        name, _, text = sweep.partition("=")
        if name not in known:
            raise ValueError(
                f"sweep={sweep!r} varies {name!r}, which is unknown. Choose among"
                f" {', '.join(known)}."
            )
        if name in varied:
            raise ValueError(
                f"sweep={sweeps!r} names something twice. Give all its values together: H=10,20."
            )
        varied[name] = values = [yaml.safe_load(part) for part in text.split(",") if part]
        if not values:
            raise ValueError(
                f"sweep={sweep!r} has no values. Give them after the name: {name}=10,20"
            )
        if name == _GROUPS and not all(type(value) is int and value >= 1 for value in values):
            raise ValueError(
                f"sweep={sweep!r} has a number of groups that is not a whole number of at least 1."
            )
    runs = [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]
    return [_planned(own, own, groups) for own in runs]


def _planned(varied: dict[str, Any], arguments: Mapping[str, Any], groups: int) -> Planned:
    choices = dict(arguments)
    return Planned(varied, choices.pop(_GROUPS, groups), choices)


def _methods_of(file: str, groups: int) -> list[Planned]:
    """Reads runs to compare from a YAML file: from a name to arguments of the strategy, or
    groups.
    """
    read = yaml.safe_load(Path(file).read_text()) if Path(file).is_file() else None
    if not isinstance(read, dict) or not all(
        isinstance(own, dict) or own is None for own in read.values()
    ):
        raise ValueError(
            f"methods={file!r} is not a YAML file that maps names to arguments of the strategy."
            " Write for example"
            " 'rarer: {sync_every: 200}'."
        )
    known = _known()
    for name, own in read.items():
        unknown = [argument for argument in own or {} if argument not in known]
        if unknown:
            raise ValueError(
                f"The method {name!r} in {file} has the argument {unknown[0]!r}, which is"
                " unknown. Choose among"
                f" {', '.join(known)}."
            )
    return [_planned({_METHOD: str(name)}, own or {}, groups) for name, own in read.items()]


def _known() -> list[str]:
    arguments = list(inspect.signature(GroupStrategy.__init__).parameters)[1:]
    return [_GROUPS, *(one for one in arguments if one not in ("worker_groups", "of_format"))]


def _seeds(seeds: str | None) -> list[int]:
    texts = [] if seeds is None else seeds.split(",")
    if not all(text.strip().isdecimal() for text in texts) or len({*texts}) < len(texts):
        raise ValueError(
            f"seeds={seeds!r} are not different whole numbers of at least 0. Give them as 0,1,2."
        )
    if seeds is not None and not 2 <= len(texts) <= max(STUDENT_T):
        raise ValueError(
            f"seeds={seeds!r} are {len(texts)}: a comparison takes 2 to {max(STUDENT_T)}. For"
            " one, give --set"
            " seed_everything=0."
        )
    return [int(text) for text in texts]


def _numbers(text: str | None, name: str) -> tuple[float, ...] | None:
    return tuple(_number(number, name, "1,1,0.5") for number in text.split(",")) if text else None


def _absence(text: str) -> Absence:
    group, _, span = text.partition(":")
    first, last, number = (
        _number(one, "absence", "1:30-90") for one in (*span.partition("-")[::2], group)
    )
    return Absence(int(number), first, last)


def _number(text: str, name: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{name} has {text!r} where a number should be. Give it as {example}."
        ) from None


# What comes of it


class Prediction(NamedTuple):
    """How long a run takes on a link: of the slowest group; of every group; and of DDP."""

    step_time: float
    seconds: float
    utilisation: float
    ddp_seconds: float
    longest_flight: float
    times: list[Times]


def predict(run: Run, where: Places) -> Prediction | None:
    """Predicts how long a run would take; None without a link, if nothing travels, or no step was
    made.
    """
    step_time = where.step_time or run.step_seconds
    if where.link is None or len(run.groups) < 2 or step_time is None:
        return None
    steps = max(group.inner_steps for group in run.groups)
    speeds = where.speeds or (1.0,) * len(run.groups)
    groups = Groups(step_time, len(run.groups), memory_rate=where.memory_rate)
    idle = [group.idle for group in run.groups]
    method = Streaming(run.model, run.settings, groups)
    # A pace decides as the run goes on; all groups launch alike.
    launches = run.groups[0].launches if run.settings.schedule else None
    times = play(method, where.link, steps, speeds, where.absences, idle, launches=launches)
    slowest = replace(groups, step_time=step_time / min(speeds))
    away = max((absence.end - absence.start for absence in where.absences), default=0.0)
    seconds = max(own.end for own in times)
    return Prediction(
        step_time=step_time,
        seconds=seconds,
        utilisation=1 - min(own.waited for own in times) / seconds,
        ddp_seconds=steps
        * slowest.step_time
        / DataParallel(run.model, slowest).utilisation(where.link)
        + away,
        longest_flight=max(own.longest_flight for own in times),
        times=times,
    )


class Outcome(NamedTuple):
    """A run that was made, and how long it would take on a link, if there is one."""

    planned: Planned
    seed: int | None
    run: Run
    prediction: Prediction | None

    @property
    def loss(self) -> float | None:
        """The loss of the outer model: that which the last validation logged, else that on the
        last batches.
        """
        logged = [one.loss for one in self.run.validations if one.loss is not None]
        return logged[-1] if logged else self.run.outer_loss

    @property
    def inner_steps(self) -> int:
        return max(group.inner_steps for group in self.run.groups)


def _worker_groups(
    configuration: Configuration,
    runs: list[Planned],
    seeds: list[int],
    where: Places,
    picture: str | None,
    json: str | None,
) -> str:
    for planned in runs:
        check(configuration, planned.groups, planned.choices)
        if planned.groups > 1:
            where.check(planned.groups, "worker groups")
    each = [(planned, seed) for planned in runs for seed in (seeds or (None,))]
    outcomes = []
    with _progress(len(each)) as begin:
        for planned, seed in each:
            seeded = () if seed is None else (f"seed_everything={seed}",)
            own = replace(configuration, arguments=(*configuration.arguments, *seeded))
            stepped = begin(planned.groups, planned.choices)
            done = run(own, planned.groups, planned.choices, stepped, where.speeds)
            outcomes.append(Outcome(planned, seed, done, predict(done, where)))
    if json is not None:
        _write(
            json,
            {"circumstances": where if where.link else None, "runs": list(map(_as_json, outcomes))},
        )
    if picture is not None:
        save_picture(picture, partial(draw, outcomes))
    if seeds:
        return compared_as_text(
            [outcomes[start : start + len(seeds)] for start in range(0, len(outcomes), len(seeds))],
            where,
        )
    return sweep_as_text(outcomes, where) if runs[0].varied else run_as_text(outcomes[0], where)


def _federation(
    configuration: Configuration, count: int, places: Places, picture: str | None, json: str | None
) -> str:
    places.check(count, "sites")
    check(configuration, count, {}, site=0)
    with _progress(1) as begin:
        played = play_sites(configuration, count, places, {}, begin(count, {}))
    if picture is not None:
        save_picture(picture, partial(draw_sites, played))
    if json is not None:
        names = ("ended", "counted", "late", "missed", "weights")
        sites = [
            {
                **{
                    name: getattr(site.group, name)
                    for name in ("losses", "outer_loss", "bytes_sent")
                },
                "steps_done_at": site.times,
                **{name: getattr(site, name) for name in names},
            }
            for site in played.sites
        ]
        _write(json, {"places": {"sites": count, **vars(places)}, "sites": sites})
    return sites_as_text(played, places)


@contextmanager
def _progress(runs: int) -> Iterator[Callable[[int, dict[str, Any]], Callable[[], None]]]:
    """Shows bars on stderr, so that what is printed can be piped: for the runs, and for the inner
    steps of this one.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        every = progress.add_task("runs", total=runs, visible=runs > 1, completed=-1)
        bar = progress.add_task("inner steps of all groups", total=None)

        def begin(groups: int, choices: dict[str, Any]) -> Callable[[], None]:
            progress.advance(every)
            told = ", ".join(
                f"{name}={value}" for name, value in {_GROUPS: groups, **choices}.items()
            )
            progress.reset(bar, description=f"inner steps, {told}")
            return lambda: progress.advance(bar)

        yield begin


def _write(path: str, told: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json_format.dumps(plain(told), indent=1) + "\n")
    except OSError as error:
        raise ValueError(
            f"json={path!r} cannot be written ({error}). Give another file."
        ) from error


def _as_json(outcome: Outcome) -> dict[str, Any]:
    planned, seed, run, prediction = outcome
    told = {
        "name": planned.varied.get(_METHOD, ""),
        "seed": seed,
        "groups": planned.groups,
        "choices": planned.choices,
        "settings": run.settings.described(),
        "parameters": run.model.numel,
        "losses": [group.losses for group in run.groups],
        "outer_losses": [group.outer_loss for group in run.groups],
        "outer_loss": run.outer_loss,
        "validations": [{"step": one.step, **one.metrics} for one in run.validations],
        "bytes_sent": [group.bytes_sent for group in run.groups],
        "inner_steps": [group.inner_steps for group in run.groups],
        "prediction": None,
    }
    if prediction is not None:
        numbers = {
            name: getattr(prediction, name)
            for name in ("step_time", "seconds", "utilisation", "ddp_seconds")
        }
        waited = [own.waited for own in prediction.times]
        steps = [own.steps for own in prediction.times]
        told["prediction"] = {**numbers, "waited": waited, "steps_done_at": steps}
    return told


# Printing

_WIDTH = 110
_MOST_VALIDATIONS = 10
_FIRST = f"loss, first\n{LAST} batches"
_LAST = f"loss, last\n{LAST} batches"


def run_as_text(outcome: Outcome, where: Places) -> str:
    run = outcome.run
    prediction = outcome.prediction
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
        f"{len(run.groups)} worker group{'s' if len(run.groups) > 1 else ''},"
        f" {outcome.inner_steps:,} inner steps each,"
        f" {_settings(run)}",
        table(columns, width=_WIDTH),
        *([f"Outer model: loss {_loss(run.outer_loss)}"] if run.outer_loss else []),
        *_validations(run),
    ]
    if prediction is not None and where.link is not None:
        measured = "" if where.step_time else ", as measured here"
        parts.append(
            f"Predicted on {_described(where.link)}, {prediction.step_time:.3g} s per inner"
            f" step{measured}:\n"
            f"  {_duration(prediction.seconds)}, compute utilisation"
            f" {percent(prediction.utilisation)};"
            f" DDP over all groups {_duration(prediction.ddp_seconds)}"
        )
        if prediction.longest_flight > run.settings.timeout.total_seconds():
            parts[-1] += (
                f"\n  A fragment would be in flight for {_duration(prediction.longest_flight)},"
                " longer than timeout: a"
                " real run would end with an ExchangeError. Raise timeout."
            )
    return "\n\n".join(parts)


def sites_as_text(run: FederatedRun, places: Places) -> str:
    sites = run.sites
    groups = [site.group for site in run.sites]
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


def sweep_as_text(outcomes: Sequence[Outcome], where: Places) -> str:
    runs = [outcome.run for outcome in outcomes]
    predictions = [outcome.prediction for outcome in outcomes]
    last = [run.validations[-1].metrics if run.validations else {} for run in runs]
    columns = {
        _LAST: [_loss(run.last_loss) for run in runs],
        "outer\nmodel": [_loss(run.outer_loss) for run in runs],
        **{metric: [_loss(own.get(metric)) for own in last] for metric in last[0]},
        "bytes sent\nper group": [readable(run.groups[0].bytes_sent) for run in runs],
    }
    if any(predictions):
        columns["predicted\ntime"] = [_duration(own.seconds) if own else "-" for own in predictions]
        columns["compute\nutilisation"] = [
            percent(own.utilisation) if own else "-" for own in predictions
        ]
    return _by_what_varies([outcome.planned for outcome in outcomes], columns, "", where)


def compared_as_text(rows: Sequence[Sequence[Outcome]], where: Places) -> str:
    """Formats runs with several seeds each: means over these, and how far each run is from the
    first, seed by seed.
    """
    differences = ["-"]
    for row in rows[1:]:
        pairs = [(one.loss, first.loss) for one, first in zip(row, rows[0], strict=True)]
        more = [100 * (loss / first - 1) for loss, first in pairs if loss is not None and first]
        half = half_width(more)
        interval = "" if half is None else f" ± {half:.1f}"
        differences.append(f"{mean(more):+.1f}{interval}" if more else "-")
    losses = [[one.loss for one in row if one.loss is not None] for row in rows]
    seconds = [
        [one.prediction.seconds for one in row if one.prediction is not None] for row in rows
    ]
    columns = {
        "loss of the\nouter model": [_loss(mean(own) if own else None) for own in losses],
        "minus that of\nthe first, %": differences,
        "bytes sent\nper group": [
            readable(mean(one.run.groups[0].bytes_sent for one in row)) for row in rows
        ],
    }
    if any(seconds):
        columns["predicted\ntime"] = [_duration(mean(own)) if own else "-" for own in seconds]
    note = f"Means over {len(rows[0])} seeds; differences with their 95 % interval."
    return _by_what_varies([row[0].planned for row in rows], columns, note, where)


def _by_what_varies(
    each: Sequence[Planned], columns: Mapping[str, list[str]], note: str, where: Places
) -> str:
    names = list(each[0].varied)
    varied = {name: [planned.varied[name] for planned in each] for name in names}
    notes = [note] if note else []
    notes += [_described(where.link)] if where.link else []
    return "\n\n".join([table({**varied, **columns}, len(names), _WIDTH), *notes])


def _settings(run: Run) -> str:
    settings = run.settings
    numbers = settings.numbers_and_policies
    return (
        f"{run.model.numel:,} parameters in {len(run.model.fragments(settings))} fragments\n"
        f"sync_every={settings.sync_every}, overlap_steps={settings.overlap_steps},"
        f" mixing={numbers.pop('mixing')},"
        f" compression={settings.compression!r}{''.join(f', {name}={value}' for name, value in numbers.items())}"
    )


def _validations(run: Run) -> list[str]:
    if not run.validations:
        return []
    # The last is shown in any case.
    every = -(-len(run.validations) // _MOST_VALIDATIONS)
    shown = list(islice(reversed(run.validations), None, None, every))[::-1]
    columns = {"after inner step": [validation.step for validation in shown]} | {
        name: [_loss(validation.metrics.get(name)) for validation in shown]
        for name in run.validations[-1].metrics
    }
    return ["Validation:\n\n" + table(columns, 0, _WIDTH)]


def _described(link: Link) -> str:
    told = (
        f"{readable_rate(link.gbit_s)} in each direction, {link.round_trip * 1000:g} ms round trip"
    )
    return told + (f", {link.loss:.3g} of the packets lost" if link.loss else "")


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 3600:.3g} h"


# Pictures: the loss over inner steps, and over what it costs


_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_IN_BYTES = "MB sent by a group"


def draw(outcomes: Sequence[Outcome], figure: Any) -> None:
    """Draws a run or a sweep: losses over inner steps, and over the predicted time or else the
    bytes of a group.
    """
    left, right = figure.subplots(1, 2)
    seconds = [outcome.prediction.seconds for outcome in outcomes if outcome.prediction is not None]
    unit, name = _unit(max(seconds)) if len(seconds) == len(outcomes) else (1e6, _IN_BYTES)
    colors: dict[str, str] = {}
    for index, outcome in enumerate(outcomes):
        run = outcome.run
        inner_steps = outcome.inner_steps
        label = outcome.planned.told()
        if label in colors:
            label, color = (
                "_another seed of it",
                colors[label],
            )  # an underscore keeps it out of the legend
        else:
            color = colors[label] = f"C{len(colors) % 10}"
        if outcome.prediction is not None and name != _IN_BYTES:
            spent = max(outcome.prediction.times, key=lambda times: times.end).steps
        else:
            spent = [
                run.groups[0].bytes_sent * step / inner_steps for step in range(1, inner_steps + 1)
            ]
        for group in run.groups if len(outcomes) == 1 else ():
            left.plot(*_smooth(group.losses), color=color, linewidth=0.8, alpha=0.35)
        curve = [
            mean(batch) for batch in zip(*(group.losses for group in run.groups), strict=False)
        ]
        batches, losses = _smooth(curve)
        steps = [batch * inner_steps / len(curve) for batch in batches]
        left.plot(steps, losses, color=color, label=label or "mean of the groups")
        right.plot([spent[math.ceil(step) - 1] / unit for step in steps], losses, color=color)
        validated = [(one.step, one.loss) for one in run.validations if one.loss is not None]
        for step, loss in validated:
            left.plot(step, loss, "o", color=color, markersize=5, mec=figure.get_facecolor())
            right.plot(
                spent[max(0, step - 1)] / unit,
                loss,
                "o",
                color=color,
                markersize=5,
                mec=figure.get_facecolor(),
            )
        if validated and index == 0:
            left.plot([], [], "o", color="C9", markersize=5, label="outer model, validation")
    _finish(figure, left, right, name if name == _IN_BYTES else f"{name}, predicted")


def draw_sites(run: FederatedRun, figure: Any) -> None:
    """Draws a federation: the loss of every site over inner steps, and over virtual time."""
    left, right = figure.subplots(1, 2)
    unit, name = _unit(max(site.ended for site in run.sites))
    for index, site in enumerate(run.sites):
        batches, losses = _smooth(site.group.losses)
        scale = len(site.times) / max(1, len(site.group.losses))
        steps = [max(1, math.ceil(batch * scale)) for batch in batches]
        left.plot(steps, losses, color=f"C{index % 10}", label=f"site {index}")
        right.plot([site.times[step - 1] / unit for step in steps], losses, color=f"C{index % 10}")
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
    """Averages over windows of a fiftieth of the run, and puts each mean at the end of its
    window.
    """
    width = max(1, len(losses) // 50)
    ends = list(range(width, len(losses) + 1))
    return ends, [sum(losses[end - width : end]) / width for end in ends]
