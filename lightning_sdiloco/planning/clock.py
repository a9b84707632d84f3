"""Plays a run in virtual time: when every group has made each inner step, with unequal speeds and absences."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_sdiloco.planning.link import Line, Link, require
from lightning_sdiloco.planning.methods import Costs, Streaming


class Absence(NamedTuple):
    """A time in which a group does nothing. The others wait for it at their next landing."""

    group: int
    start: float
    end: float


class Times(NamedTuple):
    """When a group did what."""

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
    links: Sequence[Link | Line] = (),
    launches: Mapping[int, Sequence[int]] | None = None,
) -> list[Times]:
    """Plays training thread and background of every group, as `Streaming.utilisation` does where all are alike.

    A flight is over when the message of the last group has come; on a route in pairs, that of the last partner, and the
    word of the last group that it has launched.

    Args:
        method: The model, settings and groups.
        link: The way from a group to the others.
        steps: Inner steps of the run.
        speeds: How fast each group trains: 0.5 takes twice the step time of the groups.
        absences: When which group is away.
        idle: The inner steps, from 1, in which each group does not train, by group: they take no time.
        links: The link of each group, in place of one that is the same for all; its connections are at speed. Where the
            compression chooses by the link of its sender, it knows that link from the third flight on.
        launches: The fragments that are launched after each inner step, where that is not what the schedule says.

    Returns:
        The times of each group.

    Raises:
        ValueError: If there is not one speed for each group, or a number is out of its range.

    Examples:
        >>> from lightning_sdiloco.planning.workload import Groups, Model
        >>> from lightning_sdiloco.algorithm.config import Settings
        >>> settings = Settings(sync_every=10, overlap_steps=2, compression="fp32")
        >>> method = Streaming(Model.of_size(10**6, layers=3), settings, Groups(step_time=1.0))
        >>> fast, slow = play(method, Link(gbit_s=1.0), steps=20, speeds=[1.0, 0.5])
        >>> round(fast.waited), round(slow.waited), round(fast.end) == round(slow.end)
        (20, 0, True)
        >>> fast, slow = play(method, Link(gbit_s=1.0), 20, [1.0, 0.5], idle=[(), range(1, 20, 2)])
        >>> round(fast.waited), round(fast.end)
        (0, 20)
    """
    each = [Line.of(one) for one in links or [link] * len(speeds)]
    played = _Play(method, each, speeds, list(absences), idle or [()] * len(speeds), differ=bool(links))
    return played.times(steps, launches)


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
        lines: Sequence[Line],
        speeds: Sequence[float],
        absences: list[Absence],
        idle: Sequence[Collection[int]],
        differ: bool,
    ) -> None:
        groups = method.groups
        for name, each in (("speeds", speeds), ("lists of idle steps", idle), ("links", lines)):
            if len(each) != groups.groups:
                raise ValueError(
                    f"There are {len(each)} {name} for {groups.groups} worker groups. Give one for each group."
                )
        for speed in speeds:
            require(speed > 0, "speed", speed, "positive: 0.5 is half as fast as the others")
        for absence in absences:
            require(0 <= absence.group < groups.groups, "group", absence.group, "the number of a group, from 0")
            require(0 <= absence.start <= absence.end, "absence", absence.start, "a start before the end")
        self._lines, self._link = lines, _slowest(lines)
        # Where links differ and all groups wait for all, both directions of each are busy with what it carries.
        self._differ = differ and method.settings.shares
        self._use(method)
        self._flights, self._rounds = 0, [0] * len(method.numels)
        # Until when the link of each group is busy, or each of its directions.
        self._up, self._down = [0.0] * len(lines), [0.0] * len(lines)
        self._groups = [
            _Group(groups.step_time / speed, [absence for absence in absences if absence.group == group], idle[group])
            for group, speed in enumerate(speeds)
        ]

    def _use(self, method: Streaming) -> None:
        """Sets how fragments travel from now on."""
        self._method, each = method, range(len(method.numels))
        if self._differ:
            self._busy = [[method.busy(fragment, self._lines, known) for known in (False, True)] for fragment in each]

    def times(self, steps: int, launches: Mapping[int, Sequence[int]] | None = None) -> list[Times]:
        schedule = self._method.schedule
        in_flight: list[int] = []
        lands = {at + schedule.overlap_steps: list(own) for at, own in (launches or {}).items()}
        for step in range(1, steps + 1):
            for group in self._groups:
                group.step(step)
            for fragment in schedule.launches(step) if launches is None else launches.get(step, ()):
                self._launch(fragment)
                in_flight.append(fragment)
            for _ in schedule.landings(step) if launches is None else lands.get(step, ()):
                self._land(in_flight.pop(0))
            for group in self._groups:
                group.steps.append(group.clock)
        self._end(in_flight)
        return [Times(group.steps, group.clock, group.waited, group.longest_flight) for group in self._groups]

    def _end(self, in_flight: list[int]) -> None:
        for fragment in in_flight:
            self._land(fragment)
        self._use(self._method.final)
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
        arrived = self._over_lines(fragment, cost) if self._differ else self._over_legs(fragment, cost)
        for group, at, there in zip(self._groups, launched, arrived, strict=True):
            group.longest_flight = max(group.longest_flight, there - at)
            group.stepped = max(group.stepped, group.averaged, there) + cost.step
            group.landings.append(group.stepped)

    def _over_legs(self, fragment: int, cost: Costs) -> list[float]:
        """Returns when the last message of a flight is there, by group, and lets all groups average in between.

        Groups exchange with the partners of their leg, which is all groups but on a route of pairs, at the speed of the
        slowest link among them.
        """
        number, self._rounds[fragment] = self._rounds[fragment], self._rounds[fragment] + 1
        settings, everyone = self._method.settings, tuple(range(len(self._groups)))
        legs = [everyone] if settings.shares else settings.routing.legs(number, len(self._groups))
        launched, arrived = max(group.encoded for group in self._groups), [0.0] * len(self._groups)
        for leg in legs:
            slowest = _slowest(self._lines[group] for group in leg)
            own, round_trip = self._method.costs(fragment, slowest), slowest.round_trip
            posted = max(self._groups[group].encoded for group in leg)
            before = max(self._up[group] for group in leg)
            warm = slowest.is_warm_after(posted - before - round_trip)
            free = max(posted, before) + (own.warm if warm else own.cold)
            for group in leg:
                self._up[group], arrived[group] = free + own.second_hop, max(free, launched) + round_trip
                clocks = self._groups[group]
                clocks.averaged = max(clocks.averaged, arrived[group]) + own.average
        return self._again(arrived, cost.second_hop, self._link.round_trip)

    def _over_lines(self, fragment: int, cost: Costs) -> list[float]:
        """Returns the same where links differ."""
        self._flights += 1
        # What its first message took, a group is told with the second one.
        busy, round_trip = self._busy[fragment][self._flights > 2], max(line.round_trip for line in self._lines)
        posted = max(group.encoded for group in self._groups)
        for index, one in enumerate(busy):
            self._up[index] = max(posted, self._up[index]) + one.up
            self._down[index] = max(posted, self._down[index]) + one.down
        arrived = max(*self._up, *self._down) + round_trip
        for group, one, index in zip(self._groups, busy, range(len(busy)), strict=True):
            group.averaged = max(group.averaged, arrived) + cost.average
            self._up[index] += one.up_again
            self._down[index] += one.down_again
        again = max(max(one.up_again, one.down_again) for one in busy)
        return self._again([arrived] * len(busy), again, round_trip)

    def _again(self, arrived: list[float], second_hop: float, round_trip: float) -> list[float]:
        """Returns when the means of a second hop are there."""
        if not second_hop:
            return arrived
        return [max(group.averaged for group in self._groups) + second_hop + round_trip] * len(arrived)

    def _land(self, fragment: int) -> None:
        cost = self._method.costs(fragment, self._link)
        for group in self._groups:
            arrived = group.landings.pop(0)
            group.waited += max(0.0, arrived - group.clock)
            group.clock = max(group.clock, arrived) + cost.land


def _slowest(lines: Iterable[Line]) -> Link:
    """Returns the direction with the least bandwidth."""
    return min((line.slower for line in lines), key=lambda link: link.gbit_s)
