"""Runs ``sdiloco simulate``: turns options into simulated runs, and these into text, JSON and a picture.

Runs of a sweep, or of a file of methods, are made one after the other; with several seeds each is compared with the
first. On a link, how long each would take is predicted.
"""

import inspect
import json as json_format
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.lightning.strategy import WorkerGroupStrategy
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Absence, DataParallel, Streaming, Times, play
from lightning_sdiloco.planning.units import STUDENT_T, half_width, readable, readable_rate
from lightning_sdiloco.planning.workload import Groups, Model
from lightning_sdiloco.tools.output import LIGHT, percent, plain, require_drawable, save_picture, table
from lightning_sdiloco.tools.simulate.groups import LAST, Configuration, Run, check, class_at, run
from lightning_sdiloco.tools.simulate.sites import FederatedRun, Places, play_sites

# What is run


Choices = dict[str, Any]

_GROUPS = "groups"
METHOD = "method"
"""What varies where runs have names."""


class Planned(NamedTuple):
    groups: int
    choices: Choices
    name: str = ""
    seed: int | None = None


def combinations(sweeps: Sequence[str], groups: int) -> list[Planned]:
    """Lists all runs of a sweep.

    Examples:
        >>> [tuple(run[:2]) for run in combinations(["groups=2,4", "compression=fp4"], groups=2)]
        [(2, {'compression': 'fp4'}), (4, {'compression': 'fp4'})]
    """
    varied = dict(_parsed(sweep) for sweep in sweeps)
    if len(varied) < len(sweeps):
        raise ValueError(f"sweep={list(sweeps)!r} names something twice. Give all values of it together: H=10,20.")
    runs = (dict(zip(varied, values, strict=True)) for values in product(*varied.values()))
    return [Planned(run.pop(_GROUPS, groups), run) for run in runs]


def runs_of(file: str, groups: int) -> list[Planned]:
    """Reads runs to compare from a YAML file: from a name to arguments of the strategy, or groups."""
    read = yaml.safe_load(Path(file).read_text()) if Path(file).is_file() else None
    if not isinstance(read, dict) or not all(isinstance(own, dict) or own is None for own in read.values()):
        raise ValueError(
            f"methods={file!r} is no YAML file that maps names to arguments of the strategy. Write for example"
            " 'rarer: {sync_every: 200}'."
        )
    for name, own in read.items():
        unknown = [argument for argument in own or {} if argument not in _known()]
        if unknown:
            raise ValueError(
                f"The method {name!r} in {file} has the argument {unknown[0]!r}, which is unknown. Choose among"
                f" {', '.join(_known())}."
            )
    runs = [(str(name), dict(own or {})) for name, own in read.items()]
    return [Planned(own.pop(_GROUPS, groups), own, name) for name, own in runs]


def _known() -> list[str]:
    arguments = list(inspect.signature(WorkerGroupStrategy.__init__).parameters)[1:]
    return [_GROUPS, *(one for one in arguments if one not in ("worker_groups", "of_format"))]


def _parsed(sweep: str) -> tuple[str, list[Any]]:
    name, _, text = sweep.partition("=")
    known = _known()
    if name not in known:
        raise ValueError(f"sweep={sweep!r} varies {name!r}, which is unknown. Choose among {', '.join(known)}.")
    values = [yaml.safe_load(part) for part in text.split(",") if part]
    if not values:
        raise ValueError(f"sweep={sweep!r} has no values. Give them behind the name: {name}=10,20")
    if name == _GROUPS and not all(type(value) is int and value >= 1 for value in values):
        raise ValueError(f"sweep={sweep!r} has a number of groups that is not a whole number of at least 1.")
    return name, values


@dataclass(frozen=True)
class Circumstances:
    link: Link
    step_time: float | None = None
    memory_rate: float = 1e12
    speeds: tuple[float, ...] | None = None
    absences: tuple[Absence, ...] = ()

    def check(self, groups: int) -> None:
        if groups > 1:
            method = Streaming(Model.of_size(1, layers=1), Settings(), Groups(self.step_time or 1.0, groups))
            play(method, self.link, 1, self.speeds or (1.0,) * groups, self.absences)


@dataclass(frozen=True)
class Prediction:
    times: list[Times]
    step_time: float
    ddp_seconds: float

    @property
    def seconds(self) -> float:
        return max(times.end for times in self.times)

    @property
    def utilisation(self) -> float:
        """Returns the share of the time in which the slowest group does not wait."""
        return 1 - min(times.waited for times in self.times) / self.seconds

    @property
    def longest_flight(self) -> float:
        """Returns the most seconds from a launch until all messages are there."""
        return max(times.longest_flight for times in self.times)


def predict(run: Run, where: Circumstances) -> Prediction | None:
    """Predicts how long a run would take; None if nothing travels, or no step was made."""
    step_time = where.step_time or run.step_seconds
    if len(run.groups) < 2 or step_time is None:
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
    ddp = steps * slowest.step_time / DataParallel(run.model, slowest).utilisation(where.link) + away
    return Prediction(times, step_time, ddp)


class Outcome(NamedTuple):
    """A run that was made, and how long it would take on a link, if there is one."""

    planned: Planned
    run: Run
    prediction: Prediction | None

    def varied(self, name: str) -> Any:
        own = {METHOD: self.planned.name, _GROUPS: self.planned.groups}
        return own[name] if name in own else self.planned.choices[name]

    def told(self, names: Sequence[str]) -> str:
        return ", ".join(str(self.varied(name)) if name == METHOD else f"{name}={self.varied(name)}" for name in names)

    @property
    def loss(self) -> float | None:
        """The loss of the outer model: that which the last validation logged, else that on the last batches."""
        logged = [one.loss for one in self.run.validations if one.loss is not None]
        return logged[-1] if logged else self.run.outer_loss

    @property
    def inner_steps(self) -> int:
        return max(group.inner_steps for group in self.run.groups)

    def curve(self) -> list[float]:
        losses = zip(*(group.losses for group in self.run.groups), strict=False)
        return [sum(batch) / len(batch) for batch in losses]


def names_of(sweeps: Sequence[str]) -> list[str]:
    return [sweep.partition("=")[0] for sweep in sweeps]


# Several seeds


def parsed_seeds(seeds: str | None) -> list[int]:
    texts = [] if seeds is None else seeds.split(",")
    if not all(text.strip().isdecimal() for text in texts) or len(set(texts)) < len(texts):
        raise ValueError(f"seeds={seeds!r} are not different whole numbers from 0 on. Give them as 0,1,2.")
    if seeds is not None and not 2 <= len(texts) <= max(STUDENT_T):
        raise ValueError(
            f"seeds={seeds!r} are {len(texts)}: a comparison takes 2 to {max(STUDENT_T)}. For one, give"
            " --set seed_everything=0."
        )
    return [int(text) for text in texts]


def each_with(planned: Sequence[Planned], seeds: Sequence[int]) -> list[Planned]:
    if seeds and len(planned) < 2:
        raise ValueError("--seeds compares runs, and there is one. Say with --sweep or --methods what varies.")
    return [one._replace(seed=seed) for one in planned for seed in seeds] if seeds else list(planned)


class Compared(NamedTuple):
    """A run that was made with several seeds: means over these, and how it differs from the first of the comparison."""

    outcomes: Sequence[Outcome]
    is_first: bool
    loss: float | None
    percent: list[float]  # by how much the loss is higher than that of the first, by seed
    bytes_sent: float
    seconds: float | None

    def difference(self) -> str:
        """Formats the mean difference from the first in percent, with half its 95 % interval."""
        if self.is_first or not self.percent:
            return "-"
        half = half_width(self.percent)
        return f"{mean(self.percent):+.1f}" + ("" if half is None else f" ± {half:.1f}")


def compared(outcomes: Sequence[Outcome], seeds: int) -> list[Compared]:
    each = [outcomes[start : start + seeds] for start in range(0, len(outcomes), seeds)]
    rows = []
    for number, own in enumerate(each):
        losses = [one.loss for one in own if one.loss is not None]
        seconds = [one.prediction.seconds for one in own if one.prediction is not None]
        pairs = [(one.loss, first.loss) for one, first in zip(own, each[0], strict=True)]
        rows.append(
            Compared(
                outcomes=own,
                is_first=number == 0,
                loss=mean(losses) if losses else None,
                percent=[100 * (loss / first - 1) for loss, first in pairs if loss is not None and first],
                bytes_sent=mean(one.run.groups[0].bytes_sent for one in own),
                seconds=mean(seconds) if seconds else None,
            )
        )
    return rows


# What is printed

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
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 3600:.3g} h"


# Pictures: the loss over inner steps, and over what it costs


_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def draw(outcomes: Sequence[Outcome], names: Sequence[str], figure: Any) -> None:
    """Draws a run or a sweep: losses over inner steps, and over the time or the bytes of a group."""
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


def draw_compared(rows: Sequence[Compared], names: Sequence[str], figure: Any) -> None:
    """Draws a comparison over several seeds: differences with their intervals, and bytes or time."""
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


def draw_sites(run: FederatedRun, figure: Any) -> None:
    """Draws a federation: the loss of every site over inner steps, and over virtual time."""
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


# The command


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
    """Run a LightningCLI configuration as several worker groups in this process, and predict its time on a link.

    Args:
        config: Configuration file of a LightningCLI. Again for several; later ones override.
        set: Another argument of the LightningCLI, such as trainer.max_steps=100. Again for more.
        cli: Class path of the LightningCLI, if the training script has its own.
        model: Class path of the model, if the script gives it to its LightningCLI.
        data: Class path of the data module, if the script gives it to its LightningCLI.
        groups: Number of worker groups, of one rank each.
        sites: Number of sites of a federation, of one rank each, in place of groups.
        sweep: What to vary: an argument of the strategy, or groups, as sync_every=10,20. Again for more.
        methods: YAML file of runs to compare: from a name to arguments of the strategy, in place of sweep.
        seeds: Make each run of sweep or methods with each of these seeds, as 0,1,2, and compare it with the first.
        bandwidth: Gbit/s between a group and all others, or a site and its hub, to predict the time.
        round_trip: Seconds to another group and back: 50 ms is 0.05.
        loss: Share of the packets that get lost: 0.1 % is 0.001.
        step_time: Seconds of an inner step there. By default what it takes here; with --sites it must be given.
        speeds: How fast each group is, with 1 for the step time, as 1,1,0.5.
        delays: Seconds by which what each site sends comes later, as 0,0,12; with --sites.
        absence: When a group is away, in predicted seconds, as 1:30-90 for group 1. Again for more.
        memory_rate: GB/s at which a device reads and writes its memory: about 1000 for a GPU, 10 for a CPU core.
        picture: File (.svg or .png) for a picture of the losses.
        json: File for all numbers.
    """
    if not config:
        raise ValueError("--config must be given: the configuration file of a LightningCLI.")
    if picture is not None:
        require_drawable(picture)
    classes = [_class_at(name, path) for name, path in (("cli", cli), ("model", model), ("data", data))]
    configuration = Configuration(tuple(config), tuple(set), *classes)
    link = None if bandwidth is None else Link(bandwidth, round_trip, loss)
    each, late, away = _numbers(speeds, "speeds"), _numbers(delays, "delays"), tuple(map(_absence, absence))
    if sites is not None:
        if sweep or methods or seeds:
            raise ValueError(
                "--sweep, --methods and --seeds do not go with --sites. Give one run of a federation at a time."
            )
        if step_time is None:
            raise ValueError("--sites needs --step-time: who is late depends on how long an inner step takes.")
        return _federation(configuration, Places(sites, step_time, link, each, late, away), picture, json)
    if delays is not None:
        raise ValueError("--delays is about the sites of a federation. Give --sites too.")
    of_links = {"round-trip": round_trip, "loss": loss, "step-time": step_time, "speeds": speeds, "absence": absence}
    given = [f"--{name}" for name, value in of_links.items() if value]
    if link is None and given:
        raise ValueError(f"{given[0]} tells how long a run takes on a link. Give its --bandwidth too.")
    where = None if link is None else Circumstances(link, step_time, memory_rate * 1e9, each, away)
    if sweep and methods is not None:
        raise ValueError("--sweep and --methods both say what varies. Give one of them.")
    runs = combinations(sweep, groups) if methods is None else runs_of(methods, groups)
    names = names_of(sweep) if methods is None else [METHOD]
    return _worker_groups(configuration, each_with(runs, parsed_seeds(seeds)), names, where, picture, json)


def _worker_groups(
    configuration: Configuration,
    runs: list[Planned],
    names: list[str],
    where: Circumstances | None,
    picture: str | None,
    json: str | None,
) -> str:
    for planned in runs:
        check(configuration, planned.groups, planned.choices)
        if where is not None:
            where.check(planned.groups)
    outcomes = []
    with _progress(len(runs)) as begin:
        for planned in runs:
            own = configuration if planned.seed is None else configuration.with_seed(planned.seed)
            stepped = begin(planned.groups, planned.choices)
            done = run(own, planned.groups, planned.choices, stepped, where.speeds if where else None)
            outcomes.append(Outcome(planned, done, predict(done, where) if where else None))
    if json is not None:
        _write(json, {"circumstances": where, "runs": [_as_json(outcome) for outcome in outcomes]})
    seeds = len({planned.seed for planned in runs})
    if seeds > 1:
        rows = compared(outcomes, seeds)
        if picture is not None:
            save_picture(picture, partial(draw_compared, rows, names), size=(8.4, 1.4 + 0.3 * len(rows)))
        return compared_as_text(rows, names, where)
    if picture is not None:
        save_picture(picture, partial(draw, outcomes, names))
    return sweep_as_text(outcomes, names, where) if names else run_as_text(outcomes[0], where)


def _federation(configuration: Configuration, places: Places, picture: str | None, json: str | None) -> str:
    check(configuration, places.sites, {}, site=0)
    with _progress(1) as begin:
        played = play_sites(configuration, places, {}, begin(places.sites, {}))
    if picture is not None:
        save_picture(picture, partial(draw_sites, played))
    if json is not None:
        names = ("ended", "counted", "late", "missed", "weights")
        sites = [
            {
                **{name: getattr(site.group, name) for name in ("losses", "outer_loss", "bytes_sent")},
                "steps_done_at": site.times,
                **{name: getattr(site, name) for name in names},
            }
            for site in played.sites
        ]
        _write(json, {"places": places, "sites": sites})
    return sites_as_text(played, places)


def _numbers(text: str | None, name: str) -> tuple[float, ...] | None:
    return tuple(_number(number, name, "1,1,0.5") for number in text.split(",")) if text else None


def _absence(text: str) -> Absence:
    group, _, span = text.partition(":")
    start, _, end = span.partition("-")
    first, last = (_number(number, "absence", "1:30-90") for number in (start, end))
    return Absence(int(_number(group, "absence", "1:30-90")), first, last)


def _number(text: str, name: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} has {text!r} where a number should be. Give it as {example}.") from None


def _class_at(name: str, path: str | None) -> type | None:
    try:
        return None if path is None else class_at(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name}={path!r} cannot be imported: {error}. Give the path of a class: module.Class"
        ) from error


@contextmanager
def _progress(runs: int) -> Iterator[Callable[[int, dict[str, Any]], Callable[[], None]]]:
    """Shows bars on stderr, so that what is printed can be piped: for the runs, and for the inner steps of this one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        every = progress.add_task("runs", total=runs, visible=runs > 1)
        bar = progress.add_task("inner steps of all groups", total=None)
        begun: list[dict[str, Any]] = []

        def begin(groups: int, choices: dict[str, Any]) -> Callable[[], None]:
            progress.update(every, completed=len(begun))
            begun.append(choices)
            told = ", ".join(f"{name}={value}" for name, value in {"groups": groups, **choices}.items())
            progress.reset(bar, description=f"inner steps, {told}")
            return lambda: progress.advance(bar)

        yield begin


def _write(path: str, told: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json_format.dumps(plain(told), indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"json={path!r} cannot be written ({error}). Give another file.") from error


def _as_json(outcome: Outcome) -> dict[str, Any]:
    planned, run, prediction = outcome
    return {
        "name": planned.name,
        "seed": planned.seed,
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
        "prediction": None
        if prediction is None
        else {
            "step_time": prediction.step_time,
            "seconds": prediction.seconds,
            "utilisation": prediction.utilisation,
            "ddp_seconds": prediction.ddp_seconds,
            "waited": [times.waited for times in prediction.times],
            "steps_done_at": [times.steps for times in prediction.times],
        },
    }
