"""Implements ``sdiloco simulate``, which simulates runs and presents the results.

The runs of a sweep or a methods file are simulated one after the other. With multiple seeds, each
run is compared with the first one. If a link is specified, each run's duration is predicted.
Results are presented as text, JSON and a picture.
"""

import inspect
import json as json_format
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_sdiloco.lightning.strategy import GroupStrategy
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Absence, DataParallel, Streaming, Times, play
from lightning_sdiloco.planning.units import STUDENT_T, counted, half_width, readable, readable_rate
from lightning_sdiloco.planning.workload import Groups
from lightning_sdiloco.tools.output import (
    Numbers,
    StyleValue,
    percent,
    plain,
    require_drawable,
    save_picture,
    table,
)
from lightning_sdiloco.tools.simulate.groups import (
    LAST,
    Configuration,
    Group,
    Run,
    check,
    class_at,
    run,
)
from lightning_sdiloco.tools.simulate.sites import FederatedRun, Places, Site, play_sites

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    """Simulate multiple worker groups with a LightningCLI configuration in this process, and
    predict how long the run would take on a link.

    Args:
        config: Configuration file of a LightningCLI. Repeat the option for multiple files. Later
            files override earlier ones.
        set: Additional argument of the LightningCLI, such as trainer.max_steps=100. Repeat the
            option for more arguments.
        cli: Class path of the LightningCLI, if the training script defines one.
        model: Class path of the model, if the script passes a model class to the LightningCLI.
        data: Class path of the data module, if the script passes a data module class to the
            LightningCLI.
        groups: Number of worker groups, with one rank each.
        sites: Number of sites in a federation, with one rank each, as an alternative to --groups.
        sweep: Argument to vary and its values, such as sync_every=10,20. The argument can be groups
            or any of the strategy's arguments. Repeat the option to vary more arguments.
        methods: YAML file of runs to compare, as an alternative to --sweep. The file maps names to
            the strategy's arguments.
        seeds: Seeds, such as 0,1,2, for each combination of the sweep or the methods. Every
            combination is compared with the first one.
        bandwidth: Bandwidth between a group and all other groups, or between a site and its hub,
            for predicting times.
        round_trip: Round-trip time to another group.
        loss: Share of packets that are lost. For example, 0.001 means 0.1 %.
        step_time: Duration of an inner step on the simulated machines. By default, the duration is
            measured on this machine. Required with --sites.
        speeds: Relative speed of each group, such as 1,1,0.5, where 1 corresponds to the step time.
        delays: Delay of each site's contributions in seconds, such as 0,0,12. This option requires
            --sites.
        absence: Period during which a group is absent, in predicted seconds, such as 1:30-90 for
            group 1. Repeat the option for more absences.
        memory_rate: Memory bandwidth of a device in GB/s. Typical values are 1000 for a GPU and 10
            for a CPU core.
        picture: File (.svg or .png) for a plot of the losses.
        json: File for all numbers.

    Examples:
        $ sdiloco simulate --config train.yaml --groups 4 --bandwidth 100Mbit --round-trip 50ms
        $ sdiloco simulate --config train.yaml --groups 2 --sweep sync_every=10,40 --sweep
        compression=fp32,fp4
    """
    if not config:
        raise ValueError("--config is missing. Pass the configuration file of a LightningCLI.")
    if picture is not None:
        require_drawable(picture)
    paths = {"cli": cli, "model": model, "data": data}
    classes = {name: _imported(name, path) for name, path in paths.items() if path is not None}
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
                "--sweep, --methods and --seeds do not work with --sites. Simulate one run of a"
                " federation at a time."
            )
        return _federation(configuration, sites, places, picture, json)
    if delays is not None:
        raise ValueError("--delays applies only to the sites of a federation. Also pass --sites.")
    if bandwidth is None:
        _refuse_without_link(round_trip, loss, step_time, speeds, absence)
    if methods is None:
        runs = combinations(sweep, groups)
    elif sweep:
        raise ValueError("--sweep and --methods cannot be combined. Pass only one of them.")
    else:
        runs = _methods_of(methods, groups)
    return _worker_groups(configuration, runs, _seeds(seeds, len(runs)), places, picture, json)


def _imported(name: str, path: str) -> type:
    """Imports the class for an option."""
    try:
        return class_at(path)
    except ValueError as error:
        raise ValueError(
            f"{name}={path!r} cannot be imported: {error}. Pass the path of a class in the form"
            " module.Class"
        ) from error


def _refuse_without_link(
    round_trip: float, loss: float, step_time: float | None, speeds: str | None, absence: list[str]
) -> None:
    """Refuses options that would have no effect without a link."""
    options = {
        "--round-trip": round_trip,
        "--loss": loss,
        "--step-time": step_time,
        "--speeds": speeds,
        "--absence": absence,
    }
    for name, value in options.items():
        if value:
            raise ValueError(
                f"{name} is used only to predict the time of a run on a link. Also pass the"
                " --bandwidth of the link."
            )


# Running


_GROUPS = "groups"
_METHOD = "method"


class Planned(NamedTuple):
    """A run to simulate, identified by the varied arguments or by a method's name."""

    varied: Numbers
    groups: int
    choices: Numbers

    @property
    def label(self) -> str:
        parts = [
            str(value) if name == _METHOD else f"{name}={value}"
            for name, value in self.varied.items()
        ]
        return ", ".join(parts)


def combinations(sweeps: Sequence[str], groups: int) -> list[Planned]:
    """Lists all runs of a sweep.

    Examples:
        >>> [tuple(run[1:]) for run in combinations(["groups=2,4", "compression=fp4"], groups=2)]
        [(2, {'compression': 'fp4'}), (4, {'compression': 'fp4'})]
    """
    arguments = _arguments()
    values = dict[str, list[object]]()
    for sweep in sweeps:
        name, _, text = sweep.partition("=")
        if name not in arguments:
            raise ValueError(
                f"sweep={sweep!r} varies {name!r}, which is unknown. Choose among"
                f" {', '.join(arguments)}."
            )
        if name in values:
            raise ValueError(
                f"sweep={sweeps!r} contains the same argument twice. Pass all values of an argument"
                " together, as in H=10,20."
            )
        values[name] = _values_of(sweep, name, text)
    combined = [dict(zip(values, choices, strict=True)) for choices in product(*values.values())]
    return [_planned(varied, varied, groups) for varied in combined]


def _values_of(sweep: str, name: str, text: str) -> list[object]:
    """Reads an argument's values in a sweep."""
    values = [yaml.safe_load(part) for part in text.split(",") if part]
    if not values:
        raise ValueError(
            f"sweep={sweep!r} has no values. Pass the values after the name, as in {name}=10,20"
        )
    if name == _GROUPS and not all(type(value) is int and value >= 1 for value in values):
        raise ValueError(
            f"sweep={sweep!r} contains an invalid number of groups. Each number must be a whole"
            " number of at least 1."
        )
    return values


def _planned(varied: Numbers, arguments: Numbers, groups: int) -> Planned:
    choices = dict(arguments)
    return Planned(varied, choices.pop(_GROUPS, groups), choices)


def _methods_of(file: str, groups: int) -> list[Planned]:
    """Reads the runs to compare from a YAML file that maps names to arguments."""
    methods = yaml.safe_load(Path(file).read_text()) if Path(file).is_file() else None
    if not isinstance(methods, dict) or not all(
        isinstance(choices, dict | None) for choices in methods.values()
    ):
        raise ValueError(
            f"methods={file!r} is not a YAML file that maps names to arguments of the strategy. An"
            " example of an entry is 'rarer: {sync_every: 200}'."
        )
    arguments = _arguments()
    runs = []
    for name, choices in methods.items():
        for argument in choices or {}:
            if argument not in arguments:
                raise ValueError(
                    f"The method {name!r} in {file} has the argument {argument!r}, which is"
                    f" unknown. Choose among {', '.join(arguments)}."
                )
        runs.append(_planned({_METHOD: str(name)}, choices or {}, groups))
    return runs


def _arguments() -> list[str]:
    """Lists the arguments that can vary between runs."""
    arguments = list(inspect.signature(GroupStrategy.__init__).parameters)[1:]
    return [_GROUPS, *(name for name in arguments if name not in ("worker_groups", "of_format"))]


def _seeds(seeds: str | None, runs: int) -> list[int]:
    """Reads the seeds and refuses seeds that cannot be compared."""
    if seeds is None:
        return []
    texts = seeds.split(",")
    if not all(text.strip().isdecimal() for text in texts) or len({*texts}) < len(texts):
        raise ValueError(
            f"seeds={seeds!r} are not distinct whole numbers of at least 0. Pass the seeds in the"
            " form 0,1,2."
        )
    if not 2 <= len(texts) <= max(STUDENT_T):
        raise ValueError(
            f"seeds={seeds!r} contains {len(texts)} seeds, but a comparison requires 2 to"
            f" {max(STUDENT_T)}. To use a single seed, pass --set seed_everything=0."
        )
    if runs < 2:
        raise ValueError(
            "--seeds compares runs, but there is only one run. Use --sweep or --methods to define"
            " several runs."
        )
    return list(map(int, texts))


def _numbers(text: str | None, name: str) -> tuple[float, ...] | None:
    if not text:
        return None
    return tuple(_number(number, name, "1,1,0.5") for number in text.split(","))


def _absence(text: str) -> Absence:
    """Reads an absence in the form of a group and seconds, such as 1:30-90."""
    group, _, span = text.partition(":")
    start, _, end = span.partition("-")
    first, last, number = (_number(part, "absence", "1:30-90") for part in (start, end, group))
    return Absence(int(number), first, last)


def _number(text: str, name: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{name} has {text!r} where a number is expected. Pass a value in the form {example}."
        ) from None


# Outcomes


class Prediction(NamedTuple):
    """The predicted duration of a run on a link, for all groups and for DDP."""

    step_time: float
    seconds: float
    utilisation: float
    ddp_seconds: float
    longest_flight: float
    times: list[Times]


def predict(run: Run, places: Places) -> Prediction | None:
    """Predicts a run's duration, or returns None if there is no link or nothing was sent."""
    step_time = places.step_time or run.step_seconds
    if places.link is None or len(run.groups) < 2 or step_time is None:
        return None
    steps = max(group.inner_steps for group in run.groups)
    speeds = places.speeds or (1.0,) * len(run.groups)
    groups = Groups(step_time, len(run.groups), memory_rate=places.memory_rate)
    method = Streaming(run.model, run.settings, groups)
    # A launch schedule may decide during the run, but all groups launch in the same way.
    launches = run.groups[0].launches if run.settings.schedule else None
    idle = [group.idle for group in run.groups]
    times = play(method, places.link, steps, speeds, places.absences, idle, launches=launches)
    seconds = max(group_times.end for group_times in times)
    return Prediction(
        step_time=step_time,
        seconds=seconds,
        utilisation=1 - min(group_times.waited for group_times in times) / seconds,
        ddp_seconds=_ddp_seconds(run, groups, steps, places),
        longest_flight=max(group_times.longest_flight for group_times in times),
        times=times,
    )


def _ddp_seconds(run: Run, groups: Groups, steps: int, places: Places) -> float:
    """Predicts how long a run would take with DDP.

    Each step takes as long as in the slowest group, and all groups wait while a group is absent.
    """
    slowest = replace(groups, step_time=groups.step_time / min(places.speeds or (1.0,)))
    away = max((absence.end - absence.start for absence in places.absences), default=0.0)
    assert places.link is not None
    utilisation = DataParallel(run.model, slowest).utilisation(places.link)
    return steps * slowest.step_time / utilisation + away


class Outcome(NamedTuple):
    """A simulated run, with its predicted duration if there is a link."""

    planned: Planned
    seed: int | None
    run: Run
    prediction: Prediction | None

    @property
    def loss(self) -> float | None:
        """The loss of the outer model in the last validation, or else on the last batches."""
        losses = [v.loss for v in self.run.validations if v.loss is not None]
        if losses:
            return losses[-1]
        return self.run.outer_loss

    @property
    def inner_steps(self) -> int:
        return max(group.inner_steps for group in self.run.groups)


Begin = Callable[[int, Numbers], Callable[[], None]]
"""A function that is called with the groups and choices when a run begins.

The function returns another function, which must be called after every inner step.
"""


def _worker_groups(
    configuration: Configuration,
    runs: list[Planned],
    seeds: list[int],
    places: Places,
    picture: str | None,
    json: str | None,
) -> str:
    """Checks all runs, simulates them, and returns the text to print."""
    for planned in runs:
        check(configuration, planned.groups, planned.choices)
        if planned.groups > 1:
            places.check(planned.groups, "worker groups")
    outcomes = []
    with _progress(len(runs) * max(1, len(seeds))) as begin:
        for planned in runs:
            for seed in seeds or (None,):
                outcomes.append(_simulated(configuration, planned, seed, places, begin))
    if json is not None:
        circumstances = places if places.link else None
        _write(json, {"circumstances": circumstances, "runs": list(map(_as_json, outcomes))})
    if picture is not None:
        save_picture(picture, partial(draw, outcomes))
    if seeds:
        starts = range(0, len(outcomes), len(seeds))
        return compared_as_text([outcomes[start : start + len(seeds)] for start in starts], places)
    if runs[0].varied:
        return sweep_as_text(outcomes, places)
    return run_as_text(outcomes[0], places)


def _simulated(
    configuration: Configuration, planned: Planned, seed: int | None, places: Places, begin: Begin
) -> Outcome:
    """Simulates a run with one seed and predicts how long it would take on the link."""
    if seed is not None:
        arguments = (*configuration.arguments, f"seed_everything={seed}")
        configuration = replace(configuration, arguments=arguments)
    stepped = begin(planned.groups, planned.choices)
    simulated_run = run(configuration, planned.groups, planned.choices, stepped, places.speeds)
    return Outcome(planned, seed, simulated_run, predict(simulated_run, places))


def _federation(
    configuration: Configuration, count: int, places: Places, picture: str | None, json: str | None
) -> str:
    """Simulates a federation's sites and returns the text to print."""
    if places.step_time is None:
        raise ValueError(
            "--sites requires --step-time, because the duration of an inner step determines which"
            " sites are late."
        )
    places.check(count, "sites")
    check(configuration, count, {}, site=0)
    with _progress(1) as begin:
        federated_run = play_sites(configuration, count, places, {}, begin(count, {}))
    if picture is not None:
        save_picture(picture, partial(draw_sites, federated_run))
    if json is not None:
        sites = list(map(_site_as_json, federated_run.sites))
        _write(json, {"places": {"sites": count, **vars(places)}, "sites": sites})
    return sites_as_text(federated_run, places)


@contextmanager
def _progress(runs: int) -> Iterator[Begin]:
    """Shows progress bars for runs and inner steps on stderr so that stdout can be piped."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        all_runs = progress.add_task("runs", total=runs, visible=runs > 1, completed=-1)
        bar = progress.add_task("inner steps of all groups", total=None)

        def begin(groups: int, choices: Numbers) -> Callable[[], None]:
            progress.advance(all_runs)
            settings = {_GROUPS: groups, **choices}.items()
            description = ", ".join(f"{name}={value}" for name, value in settings)
            progress.reset(bar, description=f"inner steps, {description}")
            return lambda: progress.advance(bar)

        yield begin


def _write(path: str, numbers: Numbers) -> None:
    try:
        Path(path).write_text(json_format.dumps(plain(numbers), indent=1) + "\n")
    except OSError as error:
        raise ValueError(
            f"json={path!r} cannot be written ({error}). Choose a different file."
        ) from error


def _as_json(outcome: Outcome) -> Numbers:
    """Returns a run's numbers, keyed by their names in the JSON file."""
    planned, seed, run, prediction = outcome
    numbers = {
        "name": planned.varied.get(_METHOD, ""),
        "seed": seed,
        "groups": planned.groups,
        "choices": planned.choices,
        "settings": run.settings.described(),
        "parameters": run.model.numel,
        "losses": [group.losses for group in run.groups],
        "outer_losses": [group.outer_loss for group in run.groups],
        "outer_loss": run.outer_loss,
        "validations": [{"step": v.step, **v.metrics} for v in run.validations],
        "bytes_sent": [group.bytes_sent for group in run.groups],
        "inner_steps": [group.inner_steps for group in run.groups],
        "prediction": None,
    }
    if prediction is not None:
        numbers["prediction"] = {
            "step_time": prediction.step_time,
            "seconds": prediction.seconds,
            "utilisation": prediction.utilisation,
            "ddp_seconds": prediction.ddp_seconds,
            "waited": [times.waited for times in prediction.times],
            "steps_done_at": [times.steps for times in prediction.times],
        }
    return numbers


def _site_as_json(site: Site) -> Numbers:
    """Returns a site's numbers, keyed by their names in the JSON file."""
    return {
        "losses": site.group.losses,
        "outer_loss": site.group.outer_loss,
        "bytes_sent": site.group.bytes_sent,
        "steps_done_at": site.times,
        "ended": site.ended,
        "counted": site.counted,
        "late": site.late,
        "missed": site.missed,
        "weights": site.weights,
    }


# Printing

_WIDTH = 110
_MOST_VALIDATIONS = 10
_LAST = f"loss, last\n{LAST} batches"


def run_as_text(outcome: Outcome, places: Places) -> str:
    """Formats a single run with a row for each group, the validations and the prediction."""
    run = outcome.run
    columns = {"group": range(len(run.groups)), **_loss_columns(run.groups)}
    columns["bytes\nsent"] = [readable(group.bytes_sent) for group in run.groups]
    if outcome.prediction is not None:
        waits = [_duration(times.waited) for times in outcome.prediction.times]
        columns["predicted\nwait"] = waits
    parts = [
        f"{counted(len(run.groups), 'worker group')}, {outcome.inner_steps:,} inner steps each,"
        f" {_settings(run)}",
        table(columns, width=_WIDTH),
    ]
    if run.outer_loss:
        parts.append(f"Outer model: loss {_loss(run.outer_loss)}")
    parts += _validations(run)
    if outcome.prediction is not None:
        parts.append(_prediction_as_text(outcome.prediction, run.settings.timeout, places))
    return "\n\n".join(parts)


def _prediction_as_text(prediction: Prediction, timeout: timedelta, places: Places) -> str:
    """Formats the predicted time and warns about flights that exceed the timeout."""
    assert places.link is not None
    measured = "" if places.step_time else ", as measured here"
    text = (
        f"Predicted on {_described(places.link)}, {prediction.step_time:.3g} s per inner"
        f" step{measured}:\n  {_duration(prediction.seconds)}, compute utilisation"
        f" {percent(prediction.utilisation)}; DDP over all groups"
        f" {_duration(prediction.ddp_seconds)}"
    )
    if prediction.longest_flight > timeout.total_seconds():
        text += (
            f"\n  A fragment would be in flight for {_duration(prediction.longest_flight)}, which"
            " is longer than the timeout. A real run would end with an ExchangeError. Increase"
            " timeout."
        )
    return text


def sites_as_text(run: FederatedRun, places: Places) -> str:
    """Formats a federation with a row for each site and the first site's validations."""
    sites = run.sites
    columns = {
        "site": range(len(sites)),
        "inner\nsteps": [f"{len(site.times):,}" for site in sites],
        **_loss_columns([site.group for site in sites]),
        "rounds\ncounted": [site.counted for site in sites],
        "came\nlate": [site.late for site in sites],
        "rounds\nmissed": [site.missed for site in sites],
        "bytes\nsent": [readable(site.group.bytes_sent) for site in sites],
        "ended\nafter": [_duration(site.ended) for site in sites],
    }
    link = ""
    if places.link is not None:
        link = f"{_described(places.link)}, "
    parts = [
        f"{counted(len(sites), 'site')}, {_settings(run.first)}\n{run.terms}",
        table(columns, width=_WIDTH),
        *_validations(run.first),
        f"Times are virtual and assume {link}{places.step_time:g} s per inner step.",
    ]
    return "\n\n".join(parts)


def _loss_columns(groups: Sequence[Group]) -> dict[str, list[str]]:
    return {
        f"loss, first\n{LAST} batches": [_loss(group.first_loss) for group in groups],
        _LAST: [_loss(group.last_loss) for group in groups],
        "outer model,\nsame batches": [_loss(group.outer_loss) for group in groups],
    }


def sweep_as_text(outcomes: Sequence[Outcome], places: Places) -> str:
    """Formats a table with one row for each run of a sweep or a methods file."""
    runs = [outcome.run for outcome in outcomes]
    last = [run.validations[-1].metrics if run.validations else {} for run in runs]
    columns = {
        _LAST: [_loss(run.last_loss) for run in runs],
        "outer\nmodel": [_loss(run.outer_loss) for run in runs],
    }
    for name in last[0]:
        columns[name] = [_loss(metrics.get(name)) for metrics in last]
    columns["bytes sent\nper group"] = [readable(run.groups[0].bytes_sent) for run in runs]
    if any(outcome.prediction for outcome in outcomes):
        columns |= _prediction_columns(outcomes)
    return _by_choices([outcome.planned for outcome in outcomes], columns, "", places)


def _prediction_columns(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """Formats the predicted times and utilisations of all runs."""
    seconds = []
    utilisations = []
    for outcome in outcomes:
        if outcome.prediction is None:
            seconds.append("-")
            utilisations.append("-")
        else:
            seconds.append(_duration(outcome.prediction.seconds))
            utilisations.append(percent(outcome.prediction.utilisation))
    return {"predicted\ntime": seconds, "compute\nutilisation": utilisations}


def compared_as_text(rows: Sequence[Sequence[Outcome]], places: Places) -> str:
    """Formats the means over multiple seeds and the differences from the first run."""
    losses = []
    sent = []
    seconds = []
    for row in rows:
        row_losses = [outcome.loss for outcome in row if outcome.loss is not None]
        losses.append(_loss(mean(row_losses)) if row_losses else "-")
        sent.append(readable(mean(outcome.run.groups[0].bytes_sent for outcome in row)))
        predicted = [o.prediction.seconds for o in row if o.prediction is not None]
        seconds.append(_duration(mean(predicted)) if predicted else "-")
    columns = {
        "loss of the\nouter model": losses,
        "minus that of\nthe first, %": ["-", *(_difference(row, rows[0]) for row in rows[1:])],
        "bytes sent\nper group": sent,
    }
    if any(text != "-" for text in seconds):
        columns["predicted\ntime"] = seconds
    note = (
        f"Losses are means over {len(rows[0])} seeds, and differences are given with 95 %"
        " intervals."
    )
    return _by_choices([row[0].planned for row in rows], columns, note, places)


def _difference(row: Sequence[Outcome], first_row: Sequence[Outcome]) -> str:
    """Formats the difference in loss from the first run as a percentage, with its interval."""
    percents = []
    for outcome, first in zip(row, first_row, strict=True):
        if outcome.loss is not None and first.loss:
            percents.append(100 * (outcome.loss / first.loss - 1))
    if not percents:
        return "-"
    half = half_width(percents)
    interval = "" if half is None else f" ± {half:.1f}"
    return f"{mean(percents):+.1f}{interval}"


def _by_choices(
    runs: Sequence[Planned], columns: Mapping[str, list[str]], note: str, places: Places
) -> str:
    """Formats a table with one row for each run, beginning with the varied arguments."""
    names = list(runs[0].varied)
    varied = {name: [planned.varied[name] for planned in runs] for name in names}
    parts = [table({**varied, **columns}, len(names), _WIDTH)]
    if note:
        parts.append(note)
    if places.link is not None:
        parts.append(_described(places.link))
    return "\n\n".join(parts)


def _settings(run: Run) -> str:
    """Describes a run's model and settings."""
    settings = run.settings
    numbers = settings.numbers_and_policies
    mixing = numbers.pop("mixing")
    policies = "".join(f", {name}={value}" for name, value in numbers.items())
    return (
        f"{run.model.numel:,} parameters in {len(run.model.fragments(settings))}"
        f" fragments\nsync_every={settings.sync_every}, overlap_steps={settings.overlap_steps},"
        f" mixing={mixing}, compression={settings.compression!r}{policies}"
    )


def _validations(run: Run) -> list[str]:
    """Formats the validations, if any, as a table with at most ten rows."""
    if not run.validations:
        return []
    # The last one is always shown.
    interval = -(-len(run.validations) // _MOST_VALIDATIONS)
    shown = run.validations[::-interval][::-1]
    columns: dict[str, list[object]] = {"after inner step": [v.step for v in shown]}
    for name in run.validations[-1].metrics:
        columns[name] = [_loss(v.metrics.get(name)) for v in shown]
    return ["Validation:\n\n" + table(columns, 0, _WIDTH)]


def _described(link: Link) -> str:
    rate = readable_rate(link.gbit_s)
    loss = f", {link.loss:.3g} of the packets lost" if link.loss else ""
    return f"{rate} in each direction, {link.round_trip * 1000:g} ms round trip{loss}"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4g}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 3600:.3g} h"


# Pictures: the loss over inner steps and over costs


_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def draw(outcomes: Sequence[Outcome], figure: "Figure") -> None:
    """Plots losses against inner steps, and against the predicted time or a group's bytes."""
    left, right = figure.subplots(1, 2)
    predictions = [outcome.prediction for outcome in outcomes if outcome.prediction is not None]
    costs, label = _costs_in_bytes(outcomes)
    if len(predictions) == len(outcomes):
        costs, label = _costs_in_time(predictions)
    if len(outcomes) == 1:
        for group in outcomes[0].run.groups:
            left.plot(*_smooth(group.losses), color="C0", linewidth=0.8, alpha=0.35)
    colors: dict[str, str] = {}
    for outcome, spent in zip(outcomes, costs, strict=True):
        name = outcome.planned.label
        curve_label = name or "mean of the groups"
        if name in colors:
            curve_label = "_another seed of it"  # an underscore keeps it out of the legend
        color = colors.setdefault(name, f"C{len(colors) % 10}")
        has_validations = _draw_outcome(left, right, outcome, spent, color, curve_label)
        if has_validations and outcome is outcomes[0]:
            left.plot([], [], "o", color="C9", markersize=5, label="outer model, validation")
    _finish(figure, left, right, label)


def _draw_outcome(
    left: "Axes", right: "Axes", outcome: Outcome, spent: list[float], color: str, label: str
) -> bool:
    """Plots losses against inner steps and costs. Returns whether there were validations."""
    steps, losses = _mean_curve(outcome)
    left.plot(steps, losses, color=color, label=label)
    right.plot([spent[math.ceil(step) - 1] for step in steps], losses, color=color)
    edge = left.figure.get_facecolor()
    dots: dict[str, StyleValue] = {"color": color, "markersize": 5, "mec": edge}
    validations = [(v.step, v.loss) for v in outcome.run.validations if v.loss is not None]
    for step, loss in validations:
        left.plot(step, loss, "o", **dots)
        right.plot(spent[max(0, step - 1)], loss, "o", **dots)
    return bool(validations)


def _costs_in_time(predictions: Sequence[Prediction]) -> tuple[list[list[float]], str]:
    """Returns the times at which the slowest group of each run completed its inner steps."""
    unit, name = _unit(max(prediction.seconds for prediction in predictions))
    costs = []
    for prediction in predictions:
        slowest = max(prediction.times, key=lambda times: times.end)
        costs.append([seconds / unit for seconds in slowest.steps])
    return costs, f"{name}, predicted"


def _costs_in_bytes(outcomes: Sequence[Outcome]) -> tuple[list[list[float]], str]:
    """Returns the megabytes that a group of each run had sent after each inner step."""
    costs = []
    for outcome in outcomes:
        sent = outcome.run.groups[0].bytes_sent
        steps = outcome.inner_steps
        costs.append([sent * step / steps / 1e6 for step in range(1, steps + 1)])
    return costs, "MB sent by a group"


def _mean_curve(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Returns inner steps and the groups' smoothed mean loss at these steps."""
    batches_of_groups = zip(*(group.losses for group in outcome.run.groups), strict=False)
    curve = list(map(mean, batches_of_groups))
    batches, losses = _smooth(curve)
    return [batch * outcome.inner_steps / len(curve) for batch in batches], losses


def draw_sites(run: FederatedRun, figure: "Figure") -> None:
    """Plots every site's loss against inner steps and against virtual time."""
    left, right = figure.subplots(1, 2)
    unit, name = _unit(max(site.ended for site in run.sites))
    for index, site in enumerate(run.sites):
        color = f"C{index % 10}"
        batches, losses = _smooth(site.group.losses)
        scale = len(site.times) / max(1, len(site.group.losses))
        steps = [max(1, math.ceil(batch * scale)) for batch in batches]
        left.plot(steps, losses, color=color, label=f"site {index}")
        right.plot([site.times[step - 1] / unit for step in steps], losses, color=color)
    _finish(figure, left, right, f"{name}, virtual")


def _finish(figure: "Figure", left: "Axes", right: "Axes", label: str) -> None:
    """Labels a picture's axes, shares the loss axis, and adds a legend."""
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
    """Averages over windows of a fiftieth of the run and puts each mean at its window's end."""
    width = max(1, len(losses) // 50)
    ends = list(range(width, len(losses) + 1))
    return ends, [sum(losses[end - width : end]) / width for end in ends]
