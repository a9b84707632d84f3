"""Predicts what a method sends between groups, how long training waits for it, and what memory it
takes; plays a run.

Wire bytes, messages, fragments and schedule are the engine's own; only time is a model. It follows
the engine: a fragment is read after an inner step, flights pass through the stages of the
background and over the link in the order of their launch, and a landing waits for its flight.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.reduce import TwoShot, all_reduce_for
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES
from lightning_sdiloco.compression import resolve
from lightning_sdiloco.planning.link import Line, Link, require
from lightning_sdiloco.planning.workload import FLOAT32, Groups, Model

# Bytes of memory that are read and written for each value: reading a fragment, compressing it,
# decoding the message of one group and adding it, the outer step, mixing a fragment into the model.
# The mean that goes out on the second hop is compressed like an outer gradient.
_LAUNCH = 12
_ENCODE = 32
_DECODE = 20
_OUTER_STEP = 48
_LAND = 12

_DDP_BUCKET = 25 * 2**20

# Rounds to run, of which the last half is measured; by then every round takes as long as the one
# before.
_ROUNDS = 8


class Memory(NamedTuple):
    """Bytes that Streaming DiLoCo takes on each rank, on top of ordinary training."""

    device_bytes: int
    host_bytes: int
    evaluation_bytes: int


class DataParallel:
    """`DistributedDataParallel` over all groups: gradients in buckets, during backward, in a ring
    of the groups.
    """

    def __init__(self, model: Model, groups: Groups) -> None:
        self.groups = groups
        self.bytes_per_step = 2 * groups.others / groups.groups * model.nbytes
        self.peak_gbit_s = self.bytes_per_step * 8 / groups.step_time / 1e9
        self._buckets = max(1, math.ceil(model.nbytes / _DDP_BUCKET))

    def bytes_in(self, steps: int) -> float:
        return self.bytes_per_step * steps

    def utilisation(self, link: Link) -> float:
        on_link = self.bytes_per_step * 8 / (link.gbit_s_of(self.groups.group_size) * 1e9)
        each = on_link / self._buckets + self.groups.others * link.round_trip
        step_time = self.groups.step_time
        backward_after_the_first = (1 - 1 / self._buckets) * step_time * 2 / 3
        return step_time / (step_time + max(each, self._buckets * each - backward_after_the_first))


class Streaming:
    """The engine with these settings. DiLoCo is the engine with one fragment that does not overlap
    with training.

    ``bytes_per_step`` is what a group sends to other groups per inner step, in the long run.
    """

    def __init__(self, model: Model, settings: Settings, groups: Groups) -> None:
        self.model = model
        self.settings = settings
        self.groups = groups
        self.numels = model.fragments(settings)
        self.schedule = settings.schedule_of(len(self.numels))
        self._shards = [-(-numel // groups.group_size) for numel in self.numels]
        mixing = settings.chosen_for(groups.groups).landing.kept
        # On a route that does not share, a group sends to its partners whole fragments, and its
        # control vector to all: in a round of pairs to one, and where a group is over that one has
        # a third.
        in_pairs = 1 if groups.groups % 2 == 0 else (groups.groups + 3) / groups.groups
        self._partners = groups.others if settings.shares else in_pairs
        self._connections = self._partners * groups.group_size
        words = CONTROL_BYTES * (groups.others - self._partners) * groups.group_size
        # Parts that suit the links change what each group sends, and not what all of them send
        # together.
        exchange = "two_shot" if isinstance(settings.exchange, TwoShot) else settings.exchange
        in_rounds = exchange if settings.shares else "gather"
        all_reduce = all_reduce_for(in_rounds, groups.groups, settings.codec, mixing).at(0)
        self._parts = [all_reduce.part_numel(shard) for shard in self._shards]
        self._messages = [CONTROL_BYTES + all_reduce.payload_bytes(shard) for shard in self._shards]
        self._second_hops = [all_reduce.second_hop_bytes(shard) for shard in self._shards]
        both_hops = zip(self._messages, self._second_hops, strict=True)
        self._sent = [self._connections * sum(both) + words for both in both_hops]
        # What replaces parameters without a round that could make up for a loss.
        exact = all_reduce_for(exchange, groups.groups, resolve("fp32"), mixing)
        self._exact = groups.connections * sum(
            CONTROL_BYTES + exact.payload_bytes(shard) + exact.second_hop_bytes(shard)
            for shard in self._shards
        )
        self.bytes_per_step = sum(self._sent) / settings.sync_every

    def bytes_in(self, steps: int) -> float:
        """Returns the bytes that a group sends in a run, the final exchange included; exact except
        for buffers.
        """
        launches = [
            sum(self.schedule.launches_in(fragment, steps)) for fragment in range(len(self.numels))
        ]
        return (
            sum(count * sent for count, sent in zip(launches, self._sent, strict=True))
            + self._exact
        )

    @property
    def dense_bytes(self) -> float:
        """What a group sends in the dense beginning."""
        return self.schedule.dense_rounds * sum(self._sent)

    @property
    def _phases(self) -> list[tuple[int, int]]:
        """Inner steps between two launches of a fragment, and from a launch to its landing: after
        and in the start.
        """
        phases = [(self.settings.sync_every, self.settings.overlap_steps)]
        if self.schedule.dense is not None:
            phases.append((self.schedule.dense.sync_every, self.schedule.overlap_of_round(1)))
        return phases

    @property
    def peak_gbit_s(self) -> float:
        """Returns the Gbit/s at the busiest moment if everything is sent evenly over the time that
        it may take.
        """
        rates = list[float]()
        for sync_every, overlap_steps in self._phases:
            span = max(1, overlap_steps)
            for launched in _launched_together(len(self.numels), sync_every, span):
                rates.append(sum(self._sent[fragment] for fragment in launched) / span)
        return max(rates) * 8 / self.groups.step_time / 1e9

    def utilisation(self, link: Link) -> float:
        """Returns the share of the wall time in which training does not wait, in the long run."""
        played = _Play(self, [Line.of(link)], [1.0])
        schedule = replace(self.schedule, dense=None)
        played.follow(_timetable(schedule, _ROUNDS * schedule.sync_every + schedule.overlap_steps))
        trained = (_ROUNDS - _ROUNDS // 2) * schedule.sync_every * self.groups.step_time
        return trained / (played.landed[_ROUNDS - 1] - played.landed[_ROUNDS // 2 - 1])

    def costs(self, fragment: int, link: Link) -> "Costs":
        per_value = 1 / self.groups.memory_rate
        shard = self._shards[fragment]
        part = self._parts[fragment]
        connections = max(1, round(self._connections))
        hops_again = self._second_hops[fragment] > 0
        first = connections * self._messages[fragment]
        again = connections * self._second_hops[fragment]
        return Costs(
            launch=_LAUNCH * shard * per_value,
            encode=_ENCODE * shard * per_value,
            warm=link.seconds(first, connections) - link.round_trip,
            cold=link.seconds(first, connections, warm=False) - link.round_trip,
            average=((self._partners + 1) * _DECODE + hops_again * _ENCODE) * part * per_value,
            second_hop=link.seconds(again, connections) - link.round_trip,
            step=(hops_again * _DECODE + _OUTER_STEP) * shard * per_value,
            land=_LAND * self.numels[fragment] * per_value,
        )

    def message_bytes(self, fragment: int, bytes_per_s: float) -> int:
        """Returns the bytes of a message to another group; the compression may choose by its
        sender's link.
        """
        codec = self.settings.codec
        shard = self._shards[fragment]
        choice = codec.choice(
            shard, bytes_per_s, self.settings.overlap_steps * self.groups.step_time
        )
        most = self._messages[fragment] - codec.wire_bytes(shard)
        return most + codec.at(0, choice).wire_bytes(shard)

    def busy(self, fragment: int, lines: Sequence[Line], are_known: bool) -> "list[Busy]":
        """Returns how long each group's link is busy with a flight of a fragment, in both hops and
        directions.
        """
        groups = self.groups
        shard = self._shards[fragment]
        connections = self.groups.connections
        all_reduce = all_reduce_for(
            self.settings.exchange, groups.groups, self.settings.codec, 0.0
        ).at(0)
        to = [
            CONTROL_BYTES + all_reduce.payload_bytes(shard, group) for group in range(groups.groups)
        ]
        again = [all_reduce.second_hop_bytes(shard, group) for group in range(groups.groups)]
        # By how much a message over a link is shorter than the longest one.
        rates = [
            are_known * line.up.gbit_s_of(connections) * 1e9 / 8 / connections for line in lines
        ]
        spared = [self._messages[fragment] - self.message_bytes(fragment, rate) for rate in rates]

        def seconds(link: Link, nbytes: int) -> float:
            return (
                link.seconds(groups.group_size * nbytes, connections) - link.round_trip
                if nbytes
                else 0.0
            )

        return [
            Busy(
                up=seconds(line.up, sum(to) - to[group] - groups.others * spared[group]),
                down=seconds(line.down, groups.others * to[group] - (sum(spared) - spared[group])),
                up_again=seconds(line.up, groups.others * again[group]),
                down_again=seconds(line.down, sum(again) - again[group]),
            )
            for group, line in enumerate(lines)
        ]

    @cached_property
    def memory(self) -> Memory:
        """The memory it takes; ``offload="auto"`` means the same as on CUDA."""
        gathered = FLOAT32 if self.groups.group_size > 1 else 0
        offloads = self.settings.outer.offload is not False
        of_part = [
            FLOAT32 * part * (again > 0)
            for part, again in zip(self._parts, self._second_hops, strict=True)
        ]
        # Outer parameters, momentum; with two shots what the second rounding has lost; on a route
        # that does not share the anchor, and the second vector of its momentum.
        own = (
            0
            if self.settings.shares
            else 1 + bool(self.settings.routing.momentum(self.groups.groups))
        )
        held = sum(
            (2 + own) * FLOAT32 * shard + part
            for shard, part in zip(self._shards, of_part, strict=True)
        )
        # The outer gradient and both after the outer step; with several ranks also the fragment
        # that they gathered.
        flying = [
            3 * FLOAT32 * s + gathered * n for s, n in zip(self._shards, self.numels, strict=True)
        ]
        messages = [
            self.groups.groups * sum(both)
            for both in zip(self._messages, self._second_hops, strict=True)
        ]
        # A fragment that lands after the step of a launch does so behind it.
        together = list[list[int]]()
        for sync_every, overlap_steps in self._phases:
            together += _launched_together(len(self.numels), sync_every, overlap_steps + 1)
        most = max(sum(flying[p] + messages[p] for p in fragments) for fragments in together)
        # A payload before it becomes a message, two vectors in which others are decoded and added
        # up, and with two shots the mean of the whole shard and what the second rounding has lost
        # now.
        working = [
            message + 2 * FLOAT32 * part + (FLOAT32 * shard + lost if lost else 0)
            for message, part, shard, lost in zip(
                self._messages, self._parts, self._shards, of_part, strict=True
            )
        ]
        on_their_way = max(sum(messages[p] for p in fragments) for fragments in together)
        # Where outer state rests on the host, outer parameters come to the device at the launch and
        # one step before, and the momentum for the outer step; both leave it again before the
        # landing.
        visiting = 2 * FLOAT32 * max(self._shards) if offloads else held
        resting = held + 2 * FLOAT32 * max(
            sum(self._shards[p] for p in fragments) for fragments in together
        )
        return Memory(
            device_bytes=visiting + most + max(working),
            host_bytes=on_their_way + (resting if offloads else 0),
            evaluation_bytes=self.model.nbytes + gathered * max(self.numels),
        )


Method = DataParallel | Streaming


class Costs(NamedTuple):
    """Seconds that a flight takes: launch and landing in the training thread, the rest in the
    background.
    """

    launch: float
    encode: float
    warm: float
    cold: float
    average: float
    second_hop: float
    step: float
    land: float

    @property
    def background(self) -> float:
        return self.encode + self.average + self.step


class Busy(NamedTuple):
    """Seconds for which the link of a group is busy with a flight: sending and receiving, and
    again in a second hop.
    """

    up: float
    down: float
    up_again: float
    down_again: float


@lru_cache(maxsize=16)
def _timetable(schedule: Schedule, steps: int) -> list[tuple[int, bool, int]]:
    """Lists launches and landings in the engine's order: inner step, whether it lands, what."""
    events = list[tuple[int, bool, int]]()
    for fragment in range(schedule.fragments):
        for number in range(1, 1 + sum(schedule.launches_in(fragment, steps))):
            launch = schedule.launch_of(fragment, number)
            events.append((launch, False, fragment))
            landing = launch + schedule.overlap_of_round(number)
            if landing <= steps:
                events.append((landing, True, fragment))
    return sorted(events)


def _launched_together(fragments: int, sync_every: int, span: int) -> list[list[int]]:
    """Returns for each fragment those launched in the ``span`` inner steps that end with its own
    launch.
    """
    offsets = [fragment * sync_every // fragments for fragment in range(fragments)]
    return [
        [p for p, other in enumerate(offsets) if (own - other) % sync_every < span]
        for own in offsets
    ]


# A run in virtual time: when every group has made each inner step, with unequal speeds and absences


@dataclass(frozen=True, order=True)
class Absence:
    """A time in which a group does nothing. The others wait for it at their next landing."""

    group: int
    start: float
    end: float

    def __post_init__(self) -> None:
        require(0 <= self.start <= self.end, "absence", self.start, "a start before the end")


class Times(NamedTuple):
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
    """Plays training thread and background of every group.

    A flight is over when the last group's message has come; on a route in pairs, the last
    partner's, and the word of the last group that it has launched.

    Args:
        method: The model, settings and groups.
        link: The way from a group to the others.
        steps: Inner steps of the run.
        speeds: How fast each group trains: 0.5 takes twice the step time of the groups.
        absences: When which group is away.
        idle: The inner steps, from 1, in which each group does not train, by group: they take no
            time.
        links: The link of each group, in place of one that is the same for all; its connections are
            at speed. Where the compression chooses by the link of its sender, it knows that link
            from the third flight on.
        launches: The fragments that are launched after each inner step, where that is not what the
            schedule says.

    Examples:
        >>> settings = Settings(sync_every=10, overlap_steps=2, compression="fp32")
        >>> method = Streaming(Model.of_size(10**6, layers=3), settings, Groups(step_time=1.0))
        >>> fast, slow = play(method, Link(gbit_s=1.0), steps=20, speeds=[1.0, 0.5])
        >>> round(fast.waited), round(slow.waited), round(fast.end) == round(slow.end)
        (20, 0, True)
    """
    groups = method.groups.groups
    absences = sorted(absences)
    each = [Line.of(one) for one in links or [link] * groups]
    for name, own in (
        ("speeds", speeds),
        ("lists of idle steps", idle or [()] * groups),
        ("links", each),
    ):
        if len(own) != groups:
            raise ValueError(
                f"There are {len(own)} {name} for {groups} worker groups. Give one for each group."
            )
    for speed in speeds:
        require(speed > 0, "speed", speed, "positive: 0.5 is half as fast as the others")
    for absence in absences:
        require(
            0 <= absence.group < groups, "group", absence.group, "the number of a group, from 0"
        )
    played = _Play(
        method, each, speeds, absences, idle, differ=bool(links) and method.settings.shares
    )
    if launches is None:
        events = _timetable(method.schedule, steps)
    else:
        both = [
            (at + is_landing * method.schedule.overlap_of(at), is_landing, number, fragment)
            for at, together in launches.items()
            for number, fragment in enumerate(together)
            for is_landing in (False, True)
        ]
        events = [
            (at, is_landing, fragment)
            for at, is_landing, _, fragment in sorted(both)
            if at <= steps
        ]
    played.follow(events)
    return played.ended(steps)


def step_end(begins: float, step_time: float, absences: Iterable[Absence]) -> float:
    """Returns when an inner step is done, which goes on after absences of its group, in order,
    that interrupt it.
    """
    left = step_time
    for absence in absences:
        if begins + left > absence.start and begins < absence.end:
            left -= max(0.0, absence.start - begins)
            begins = absence.end
    return begins + left


class _Group:
    """The clocks of one group: training thread and background."""

    def __init__(
        self, step_time: float, absences: Sequence[Absence], idle: Collection[int]
    ) -> None:
        self._step_time = step_time
        self._absences = absences
        self._idle = frozenset(idle)
        self.clock = self.waited = self.longest_flight = 0.0
        # When each stage of the background was done with its last flight.
        self.encoded = self.averaged = self.stepped = 0.0
        # Until when its link is busy, or each of its directions.
        self.up = self.down = 0.0
        self.landings: list[float] = []
        self.steps: list[
            float
        ] = []  # when each inner step was done, and what launched and landed after it

    def train(self, until: int) -> None:
        first = len(self.steps) + 1
        if until >= first > 1:
            self.steps[-1] = self.clock
        if not self._idle and not self._absences:
            begun = self.clock
            self.clock = self.clock + max(0, until - first + 1) * self._step_time
            self.steps += [
                begun + (number + 1) * self._step_time for number in range(until - first + 1)
            ]
            return
        for number in range(first, until + 1):
            if number not in self._idle:
                self.clock = step_end(self.clock, self._step_time, self._absences)
            self.steps.append(self.clock)


class _Play:
    """Plays groups, each with its link and speed; a single one where all are alike."""

    def __init__(
        self,
        method: Streaming,
        lines: Sequence[Line],
        speeds: Sequence[float],
        absences: Sequence[Absence] = (),
        idle: Sequence[Collection[int]] = (),
        differ: bool = False,
    ) -> None:
        self._lines = lines
        self._link = _slowest(lines)
        # Where links differ and all groups wait for all, both directions of each are busy with what
        # it carries.
        self._differ = differ
        self._use(method)
        self._flights = [0] * len(method.numels)
        self._groups = [
            _Group(
                method.groups.step_time / speed,
                [absence for absence in absences if absence.group == group],
                idle[group] if idle else (),
            )
            for group, speed in enumerate(speeds)
        ]
        self._in_flight: list[int] = []
        self.landed: list[float] = []  # when fragment 0 has landed in the first group

    def _use(self, method: Streaming) -> None:
        """Sets how fragments travel from now on."""
        self._method = method
        each = range(len(method.numels))
        self._costs = [method.costs(fragment, self._link) for fragment in each]
        if self._differ:
            self._busy = [
                [method.busy(fragment, self._lines, known) for known in (False, True)]
                for fragment in each
            ]

    def follow(self, events: Iterable[tuple[int, bool, int]]) -> None:
        """Trains, and launches and lands after the inner steps that are told."""
        for at, is_landing, fragment in events:
            for group in self._groups:
                group.train(at)
            if is_landing:
                self._land(self._in_flight.pop(0))
            else:
                self._launch(fragment)
                self._in_flight.append(fragment)

    def ended(self, steps: int) -> list[Times]:
        """Trains to the end, lands what is in flight, and makes the final exchange, in float32."""
        for group in self._groups:
            group.train(steps)
            group.steps[-1:] = [group.clock] * (steps > 0)
        for fragment in self._in_flight:
            self._land(fragment)
        method = self._method
        self._use(
            Streaming(method.model, replace(method.settings, compression="fp32"), method.groups)
        )
        for move in (self._launch, self._land):
            for fragment in range(len(method.numels)):
                move(fragment)
        return [
            Times(group.steps, group.clock, group.waited, group.longest_flight)
            for group in self._groups
        ]

    def _launch(self, fragment: int) -> None:
        cost = self._costs[fragment]
        launched = list[float]()
        for group in self._groups:
            launched.append(group.clock)
            group.clock += cost.launch
            group.encoded = max(group.clock, group.encoded) + cost.encode
        arrived, second_hop, round_trip = (self._over_lines if self._differ else self._over_legs)(
            fragment
        )
        if second_hop:
            arrived = [
                max(group.averaged for group in self._groups) + second_hop + round_trip
            ] * len(arrived)
        for group, at, there in zip(self._groups, launched, arrived, strict=True):
            group.longest_flight = max(group.longest_flight, there - at)
            group.stepped = max(group.stepped, group.averaged, there) + cost.step
            group.landings.append(group.stepped)
        self._flights[fragment] += 1

    def _land(self, fragment: int) -> None:
        for group in self._groups:
            arrived = group.landings.pop(0)
            group.waited += max(0.0, arrived - group.clock)
            group.clock = max(group.clock, arrived) + self._costs[fragment].land
        if fragment == 0:
            self.landed.append(self._groups[0].clock)

    def _over_legs(self, fragment: int) -> tuple[list[float], float, float]:
        """Averages all groups; returns when each has the messages, and what a second hop and its
        way take.

        Groups exchange with the partners of their leg, which is all groups but on a route of pairs,
        at the speed of the slowest link among them.
        """
        settings = self._method.settings
        everyone = tuple(range(len(self._groups)))
        is_one = settings.shares or len(everyone) == 1
        legs = (
            [everyone] if is_one else settings.routing.legs(self._flights[fragment], len(everyone))
        )
        launched = max(group.encoded for group in self._groups)
        arrived = [0.0] * len(self._groups)
        for leg in legs:
            slowest = _slowest([self._lines[group] for group in leg])
            together = [self._groups[group] for group in leg]
            cost = (
                self._costs[fragment]
                if slowest == self._link
                else self._method.costs(fragment, slowest)
            )
            posted = max(group.encoded for group in together)
            before = max(group.up for group in together)
            warm = slowest.is_warm_after(posted - before - slowest.round_trip)
            free = max(posted, before) + (cost.warm if warm else cost.cold)
            for index, group in zip(leg, together, strict=True):
                group.up, arrived[index] = (
                    free + cost.second_hop,
                    max(free, launched) + slowest.round_trip,
                )
                group.averaged = max(group.averaged, arrived[index]) + cost.average
        return arrived, self._costs[fragment].second_hop, self._link.round_trip

    def _over_lines(self, fragment: int) -> tuple[list[float], float, float]:
        """Returns the same where links differ."""
        # A group learns with the second message what its first one took.
        busy = self._busy[fragment][sum(self._flights) > 1]
        round_trip = max(line.round_trip for line in self._lines)
        posted = max(group.encoded for group in self._groups)
        for group, one in zip(self._groups, busy, strict=True):
            group.up = max(posted, group.up) + one.up
            group.down = max(posted, group.down) + one.down
        arrived = max(max(group.up, group.down) for group in self._groups) + round_trip
        for group, one in zip(self._groups, busy, strict=True):
            group.averaged = max(group.averaged, arrived) + self._costs[fragment].average
            group.up += one.up_again
            group.down += one.down_again
        return (
            [arrived] * len(busy),
            max(max(one.up_again, one.down_again) for one in busy),
            round_trip,
        )


def _slowest(lines: Sequence[Line]) -> Link:
    return min((line.slower for line in lines), key=lambda link: link.gbit_s)
