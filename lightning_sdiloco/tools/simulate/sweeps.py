"""Lists the runs of a sweep, predicts how long each would take on a link, and compares them over several seeds."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import yaml

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.lightning import WorkerGroupStrategy
from lightning_sdiloco.planning import Absence, DataParallel, Groups, Link, Model, Streaming, Times, play
from lightning_sdiloco.tools.simulate.groups import Run

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

    Args:
        sweeps: What varies, such as ``"sync_every=10,20"``.
        groups: The number of groups, unless that varies.

    Raises:
        ValueError: If something is no argument of the strategy, or has no values, or occurs twice.

    Examples:
        >>> [tuple(run[:2]) for run in combinations(["groups=2,4", "compression=fp4"], groups=2)]
        [(2, {'compression': 'fp4'}), (4, {'compression': 'fp4'})]
    """
    varied = dict(_parsed(sweep) for sweep in sweeps)
    if len(varied) < len(sweeps):
        raise ValueError(f"sweep={list(sweeps)!r} names something twice. Give all values of it together: H=10,20.")
    runs = (dict(zip(varied, values, strict=True)) for values in product(*varied.values()))
    return [Planned(run.pop(_GROUPS, groups), run) for run in runs]


def methods(file: str, groups: int) -> list[Planned]:
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
    """Where a simulated run would take place."""

    link: Link
    step_time: float | None = None
    memory_rate: float = 1e12
    speeds: tuple[float, ...] | None = None
    absences: tuple[Absence, ...] = ()

    def check(self, groups: int) -> None:
        """Refuses numbers that do not fit the number of groups."""
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
        """Returns the seconds until the last group has ended."""
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
        """Returns the value of something that a sweep varied."""
        own = {METHOD: self.planned.name, _GROUPS: self.planned.groups}
        return own[name] if name in own else self.planned.choices[name]

    def told(self, names: Sequence[str]) -> str:
        """Tells what a sweep varied; a name alone, where runs have names."""
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
        """Returns the mean loss of the groups for each batch that all of them had."""
        losses = zip(*(group.losses for group in self.run.groups), strict=False)
        return [sum(batch) / len(batch) for batch in losses]


def names_of(sweeps: Sequence[str]) -> list[str]:
    return [sweep.partition("=")[0] for sweep in sweeps]


# Several seeds


# Half the width of a 95 % interval of the mean, in standard errors, by the number of values (Student's t).
_HALF_WIDTH = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def half_width(values: Sequence[float]) -> float | None:
    """Returns half the width of the 95 % interval of the mean; None for a single value.

    Args:
        values: Two to ten of them.

    Examples:
        >>> round(half_width([1.0, 2.0, 3.0]), 3)
        2.484
    """
    return _HALF_WIDTH[len(values)] * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def parsed(seeds: str | None) -> list[int]:
    texts = [] if seeds is None else seeds.split(",")
    if not all(text.strip().isdecimal() for text in texts) or len(set(texts)) < len(texts):
        raise ValueError(f"seeds={seeds!r} are not different whole numbers from 0 on. Give them as 0,1,2.")
    if seeds is not None and not 2 <= len(texts) <= max(_HALF_WIDTH):
        raise ValueError(
            f"seeds={seeds!r} are {len(texts)}: a comparison takes 2 to {max(_HALF_WIDTH)}. For one, give"
            " --set seed_everything=0."
        )
    return [int(text) for text in texts]


def each_with(planned: Sequence[Planned], seeds: Sequence[int]) -> list[Planned]:
    """Returns runs, each with each of some seeds."""
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
    """Joins the runs of a sweep that differ in the seed alone."""
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
