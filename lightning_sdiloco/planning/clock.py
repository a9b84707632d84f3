"""Plays a run in virtual time: when every group has made each inner step, with unequal speeds and absences."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from lightning_sdiloco.planning.link import Link, require
from lightning_sdiloco.planning.methods import Streaming


class Absence(NamedTuple):
    """A time in which a group does nothing. The others wait for it at their next landing.

    Attributes:
        group: The group.
        start: When it begins, in seconds since the start of the run.
        end: When it ends, likewise.
    """

    group: int
    start: float
    end: float


class Times(NamedTuple):
    """When a group did what.

    Attributes:
        steps: When each inner step was done, landings included, in seconds since the start of the run.
        end: When the run was over, the final exchange included, likewise.
        waited: Seconds for which training waited for fragments.
        longest_flight: The most seconds from a launch of this group until the messages of all groups were there.
    """

    steps: list[float]
    end: float
    waited: float
    longest_flight: float


def play(
    method: Streaming,
    link: Link,
    steps: int,
    speeds: Sequence[float],
    absences: Iterable[Absence] = (),
    idle: Sequence[Collection[int]] = (),
) -> list[Times]:
    """Plays training thread and background of every group, as `Streaming.utilisation` does where all are alike.

    A flight is over when the message of the last group has come.

    Args:
        method: The model, settings and groups.
        link: The way from a group to the others.
        steps: Inner steps of the run.
        speeds: How fast each group trains: 0.5 takes twice the step time of the groups.
        absences: When which group is away.
        idle: The inner steps, from 1, in which each group does not train, by group: they take no time.

    Returns:
        The times of each group.

    Raises:
        ValueError: If there is not one speed for each group, or a number is out of its range.

    Examples:
        >>> from lightning_sdiloco.planning.workload import Groups, Model
        >>> from lightning_sdiloco.algorithm.settings import Settings
        >>> settings = Settings(sync_every=10, overlap_steps=2, compression="fp32")
        >>> method = Streaming(Model.of_size(10**6, layers=3), settings, Groups(step_time=1.0))
        >>> fast, slow = play(method, Link(gbit_s=1.0), steps=20, speeds=[1.0, 0.5])
        >>> round(fast.waited), round(slow.waited), round(fast.end) == round(slow.end)
        (20, 0, True)
        >>> fast, slow = play(method, Link(gbit_s=1.0), 20, [1.0, 0.5], idle=[(), range(1, 20, 2)])
        >>> round(fast.waited), round(fast.end)
        (0, 20)
    """
    return _Play(method, link, speeds, list(absences), idle or [()] * len(speeds)).times(steps)


def step_end(begins: float, step_time: float, absences: Iterable[Absence]) -> float:
    """Returns when an inner step is done, which goes on after an absence that interrupts it.

    Args:
        begins: When it begins, in seconds.
        step_time: How long it takes.
        absences: Those of its group, in order.

    Examples:
        >>> step_end(1.0, 0.5, [Absence(0, 1.25, 3.0)])
        3.25
    """
    left = step_time
    for absence in absences:
        if begins + left > absence.start and begins < absence.end:
            left -= max(0.0, absence.start - begins)
            begins = absence.end
    return begins + left


class _Group:
    """The clocks of one group: training thread and background."""

    def __init__(self, step_time: float, absences: list[Absence], idle: Collection[int]) -> None:
        self._step_time, self._idle = step_time, frozenset(idle)
        self._absences = sorted(absences, key=lambda absence: absence.start)
        self.clock = self.waited = self.longest_flight = 0.0
        # When each stage of the background was done with its last flight.
        self.encoded = self.averaged = self.stepped = 0.0
        self.landings: list[float] = []
        self.steps: list[float] = []

    def step(self, number: int) -> None:
        """Makes an inner step."""
        if number not in self._idle:
            self.clock = step_end(self.clock, self._step_time, self._absences)


class _Play:
    def __init__(
        self,
        method: Streaming,
        link: Link,
        speeds: Sequence[float],
        absences: list[Absence],
        idle: Sequence[Collection[int]],
    ) -> None:
        groups = method.groups
        for name, each in (("speeds", speeds), ("lists of idle steps", idle)):
            if len(each) != groups.groups:
                raise ValueError(
                    f"There are {len(each)} {name} for {groups.groups} worker groups. Give one for each group."
                )
        for speed in speeds:
            require(speed > 0, "speed", speed, "positive: 0.5 is half as fast as the others")
        for absence in absences:
            require(0 <= absence.group < groups.groups, "group", absence.group, "the number of a group, from 0")
            require(0 <= absence.start <= absence.end, "absence", absence.start, "a start before the end")
        self._method = method
        self._link = link
        self._link_free = 0.0
        self._groups = [
            _Group(groups.step_time / speed, [absence for absence in absences if absence.group == group], idle[group])
            for group, speed in enumerate(speeds)
        ]

    def times(self, steps: int) -> list[Times]:
        schedule = self._method.schedule
        in_flight: list[int] = []
        for step in range(1, steps + 1):
            for group in self._groups:
                group.step(step)
            for fragment in schedule.launches(step):
                self._launch(fragment)
                in_flight.append(fragment)
            for _ in schedule.landings(step):
                self._land(in_flight.pop(0))
            for group in self._groups:
                group.steps.append(group.clock)
        self._end(in_flight)
        return [Times(group.steps, group.clock, group.waited, group.longest_flight) for group in self._groups]

    def _end(self, in_flight: list[int]) -> None:
        for fragment in in_flight:
            self._land(fragment)
        final = range(len(self._method.numels)) if self._method.settings.final_sync else ()
        for fragment in final:
            self._launch(fragment)
        for fragment in final:
            self._land(fragment)

    def _launch(self, fragment: int) -> None:
        cost = self._method.costs(fragment, self._link)
        launched = []
        for group in self._groups:
            launched.append(group.clock)
            group.clock += cost.launch
            group.encoded = max(group.clock, group.encoded) + cost.encode
        posted, round_trip = max(group.encoded for group in self._groups), self._link.round_trip
        warm = self._link.is_warm_after(posted - self._link_free - round_trip)
        self._link_free = max(posted, self._link_free) + (cost.warm if warm else cost.cold)
        arrived = self._link_free + round_trip
        for group in self._groups:
            group.averaged = max(group.averaged, arrived) + cost.average
        if cost.second_hop:
            arrived = max(group.averaged for group in self._groups) + cost.second_hop + round_trip
            self._link_free += cost.second_hop
        for group, at in zip(self._groups, launched, strict=True):
            group.longest_flight = max(group.longest_flight, arrived - at)
            group.stepped = max(group.stepped, group.averaged, arrived) + cost.step
            group.landings.append(group.stepped)

    def _land(self, fragment: int) -> None:
        cost = self._method.costs(fragment, self._link)
        for group in self._groups:
            arrived = group.landings.pop(0)
            group.waited += max(0.0, arrived - group.clock)
            group.clock = max(group.clock, arrived) + cost.land
