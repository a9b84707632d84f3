"""Predicts the bytes that a method sends between groups, and its waiting time and memory. `play`
simulates a run.

Wire bytes, messages, fragments and schedule come from the code that the engine uses. Only time is
modelled. The model follows the engine: a fragment is read after an inner step, flights pass through
the background stages and the link in launch order, and a landing waits for its flight.
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

# Bytes of memory traffic for each value: reading a fragment, compressing it, decoding the message
# of one group and adding it, the outer step, and mixing a fragment into the model. The mean sent on
# the second hop is compressed like an outer gradient.
_LAUNCH = 12
_ENCODE = 32
_DECODE = 20
_OUTER_STEP = 48
_LAND = 12

_DDP_BUCKET = 25 * 2**20

# The number of rounds to run. The second half is measured; by then, all rounds take equally long.
_ROUNDS = 8


class Memory(NamedTuple):
    """The memory in bytes that Streaming DiLoCo needs on each rank in addition to ordinary
    training.
    """

    device_bytes: int
    host_bytes: int
    evaluation_bytes: int


class DataParallel:
    """`DistributedDataParallel` over all groups, with gradients ring-reduced in buckets during the
    backward pass.
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
        bucket_time = on_link / self._buckets + self.groups.others * link.round_trip
        step_time = self.groups.step_time
        backward_after_the_first = (1 - 1 / self._buckets) * step_time * 2 / 3
        not_hidden = self._buckets * bucket_time - backward_after_the_first
        return step_time / (step_time + max(bucket_time, not_hidden))


class _Fragment(NamedTuple):
    """The number of values in a fragment, in a shard of it, and in the part that a rank averages,
    and the bytes of a message in the first and second hop.
    """

    numel: int
    shard: int
    part: int
    message: int
    second_hop: int

    @property
    def error(self) -> int:
        """The bytes of the second rounding error that two shots store."""
        return FLOAT32 * self.part if self.second_hop else 0

    @property
    def working(self) -> int:
        """The memory that a flight needs in the background, in bytes: an unsent payload, two
        vectors for decoding and summing payloads, and, with two shots, the mean of the whole shard
        and the current error of the second rounding.
        """
        nbytes = self.message + 2 * FLOAT32 * self.part
        if self.error:
            nbytes += FLOAT32 * self.shard + self.error
        return nbytes


class Streaming:
    """The engine with the given settings. DiLoCo is the special case of one fragment without
    overlap.

    ``bytes_per_step`` is the average number of bytes that a group sends per inner step in a long
    run.
    """

    def __init__(self, model: Model, settings: Settings, groups: Groups) -> None:
        self.model = model
        self.settings = settings
        self.groups = groups
        self.numels = model.fragments(settings)
        self.schedule = settings.schedule_of(len(self.numels))
        self._partners = _partners(settings, groups)
        self._connections = self._partners * groups.group_size
        # Parts by bandwidth change how much each group sends, but not the total over all groups.
        exchange = "two_shot" if isinstance(settings.exchange, TwoShot) else settings.exchange
        mixing = settings.chosen_for(groups.groups).landing.kept
        in_rounds = exchange if settings.shares else "gather"
        all_reduce = all_reduce_for(in_rounds, groups.groups, settings.codec, mixing).at(0)
        # The final exchange is in float32: it replaces parameters, and no later round could correct
        # a rounding error.
        exact = all_reduce_for(exchange, groups.groups, resolve("fp32"), mixing)
        self._fragments: list[_Fragment] = []
        exact_bytes = 0
        for numel in self.numels:
            shard = -(-numel // groups.group_size)
            fragment = _Fragment(
                numel,
                shard,
                part=all_reduce.part_numel(shard),
                message=CONTROL_BYTES + all_reduce.payload_bytes(shard),
                second_hop=all_reduce.second_hop_bytes(shard),
            )
            self._fragments.append(fragment)
            exact_bytes += CONTROL_BYTES + exact.payload_bytes(shard)
            exact_bytes += exact.second_hop_bytes(shard)
        self._exact = groups.connections * exact_bytes
        # On a route without sharing, the control vector is sent to all groups.
        words = CONTROL_BYTES * (groups.others - self._partners) * groups.group_size
        self._sent = [
            self._connections * (fragment.message + fragment.second_hop) + words
            for fragment in self._fragments
        ]
        self.bytes_per_step = sum(self._sent) / settings.sync_every

    def bytes_in(self, steps: int) -> float:
        """Returns the bytes that a group sends in a run, including the final exchange but not
        buffers.
        """
        in_rounds = sum(
            sum(self.schedule.launches_in(fragment, steps)) * sent
            for fragment, sent in enumerate(self._sent)
        )
        return in_rounds + self._exact

    @property
    def dense_bytes(self) -> float:
        """The bytes that a group sends during the dense beginning."""
        return self.schedule.dense_rounds * sum(self._sent)

    @property
    def _phases(self) -> list[tuple[int, int]]:
        """The values of ``sync_every`` and ``overlap_steps`` after the dense beginning, followed by
        those during it.
        """
        phases = [(self.settings.sync_every, self.settings.overlap_steps)]
        if self.schedule.dense is not None:
            phases.append((self.schedule.dense.sync_every, self.schedule.overlap_of_round(1)))
        return phases

    @property
    def peak_gbit_s(self) -> float:
        """Returns the peak rate in Gbit/s if each transfer is spread evenly over its overlap."""
        rates = list[float]()
        for sync_every, overlap_steps in self._phases:
            span = max(1, overlap_steps)
            for launched in _launched_together(len(self.numels), sync_every, span):
                rates.append(sum(self._sent[fragment] for fragment in launched) / span)
        return max(rates) * 8 / self.groups.step_time / 1e9

    def utilisation(self, link: Link) -> float:
        """Returns the share of a long run that training does not spend waiting."""
        played = _Play(self, [Line.of(link)], [1.0], idle=[()])
        schedule = replace(self.schedule, dense=None)
        played.follow(_timetable(schedule, _ROUNDS * schedule.sync_every + schedule.overlap_steps))
        trained = (_ROUNDS - _ROUNDS // 2) * schedule.sync_every * self.groups.step_time
        return trained / (played.landed[_ROUNDS - 1] - played.landed[_ROUNDS // 2 - 1])

    def costs(self, fragment: int, link: Link) -> "Costs":
        """Returns the seconds that each stage of a flight takes on a link."""
        per_value = 1 / self.groups.memory_rate
        numel, shard, part, message, second_hop = self._fragments[fragment]
        connections = max(1, round(self._connections))
        first = connections * message
        again = connections * second_hop
        two_shots = second_hop > 0
        return Costs(
            launch=_LAUNCH * shard * per_value,
            encode=_ENCODE * shard * per_value,
            warm=link.seconds(first, connections) - link.round_trip,
            cold=link.seconds(first, connections, warm=False) - link.round_trip,
            average=((self._partners + 1) * _DECODE + two_shots * _ENCODE) * part * per_value,
            second_hop=link.seconds(again, connections) - link.round_trip,
            step=(two_shots * _DECODE + _OUTER_STEP) * shard * per_value,
            land=_LAND * numel * per_value,
        )

    def message_bytes(self, fragment: int, bytes_per_s: float) -> int:
        """Returns the bytes of a message to another group if the sender's link has a given rate."""
        codec = self.settings.codec
        shard = self._fragments[fragment].shard
        seconds = self.settings.overlap_steps * self.groups.step_time
        choice = codec.choice(shard, bytes_per_s, seconds)
        longest = self._fragments[fragment].message
        chosen_bytes = codec.at(0, choice).wire_bytes(shard)
        return longest - codec.wire_bytes(shard) + chosen_bytes

    def busy(self, fragment: int, lines: Sequence[Line], are_known: bool) -> "list[Busy]":
        """Returns how long a flight keeps each group's link busy, for both hops and directions."""
        groups = self.groups
        shard = self._fragments[fragment].shard
        exchange = self.settings.exchange
        all_reduce = all_reduce_for(exchange, groups.groups, self.settings.codec, 0.0).at(0)
        # The bytes of a message to each group, in both hops, and how much shorter a message from
        # that group is.
        to = []
        again = []
        spared = []
        for group, line in enumerate(lines):
            to.append(CONTROL_BYTES + all_reduce.payload_bytes(shard, group))
            again.append(all_reduce.second_hop_bytes(shard, group))
            spared.append(self._spared_bytes(fragment, line.up if are_known else None))
        return [
            Busy(
                up=_seconds(line.up, sum(to) - to[group] - groups.others * spared[group], groups),
                down=_seconds(
                    line.down, groups.others * to[group] - (sum(spared) - spared[group]), groups
                ),
                up_again=_seconds(line.up, groups.others * again[group], groups),
                down_again=_seconds(line.down, sum(again) - again[group], groups),
            )
            for group, line in enumerate(lines)
        ]

    def _spared_bytes(self, fragment: int, link: Link | None) -> int:
        """Returns how many bytes shorter a message over a link is than the longest message."""
        rate = 0.0
        if link is not None:
            connections = self.groups.connections
            rate = link.gbit_s_of(connections) * 1e9 / 8 / connections
        return self._fragments[fragment].message - self.message_bytes(fragment, rate)

    @cached_property
    def memory(self) -> Memory:
        """The memory that the method needs, with ``offload="auto"`` interpreted as on CUDA."""
        gathered = FLOAT32 if self.groups.group_size > 1 else 0
        outer_vectors = self._outer_vectors
        outer = sum(f.shard * FLOAT32 * outer_vectors + f.error for f in self._fragments)
        # The outer gradient, and the outer parameters and momentum after the outer step; with
        # several ranks, also the gathered fragment.
        flying = [3 * FLOAT32 * f.shard + gathered * f.numel for f in self._fragments]
        messages = [self.groups.groups * (f.message + f.second_hop) for f in self._fragments]
        shards = [FLOAT32 * f.shard for f in self._fragments]
        in_flight = self._most_in_flight(
            [vectors + payloads for vectors, payloads in zip(flying, messages, strict=True)]
        )
        on_device = in_flight + max(f.working for f in self._fragments)
        host = self._most_in_flight(messages)
        if self.settings.outer.offload is False:
            on_device += outer
        else:
            # Outer parameters are moved to the device at the launch and one step before, and the
            # momentum for the outer step; both are moved back before the landing.
            on_device += 2 * max(shards)
            host += outer + 2 * self._most_in_flight(shards)
        evaluation = self.model.nbytes + gathered * max(self.numels)
        return Memory(on_device, host, evaluation)

    @property
    def _outer_vectors(self) -> int:
        """The number of vectors in the outer state. The outer state consists of the outer
        parameters and momentum. On a route without sharing, it also includes the anchor and the
        second momentum vector.
        """
        if self.settings.shares:
            return 2
        return 3 + bool(self.settings.routing.momentum(self.groups.groups))

    def _most_in_flight(self, nbytes: Sequence[int]) -> int:
        """Returns the maximum number of bytes that are in flight at the same time."""
        sums = []
        for sync_every, overlap_steps in self._phases:
            # A fragment that lands after the same step as a launch lands after that launch.
            for fragments in _launched_together(len(nbytes), sync_every, overlap_steps + 1):
                sums.append(sum(nbytes[fragment] for fragment in fragments))
        return max(sums)


Method = DataParallel | Streaming


def _partners(settings: Settings, groups: Groups) -> float:
    """Returns the average number of groups to which a group sends whole fragments in a round.

    On a route of pairs, each group sends to one other group. If the number of groups is odd, the
    last group joins a pair.
    """
    if settings.shares:
        return groups.others
    if groups.groups % 2 == 0:
        return 1
    return (groups.groups + 3) / groups.groups


def _seconds(link: Link, nbytes: int, groups: Groups) -> float:
    """Returns how long a link is busy if each rank of a group sends the given number of bytes."""
    if nbytes == 0:
        return 0.0
    return link.seconds(groups.group_size * nbytes, groups.connections) - link.round_trip


class Costs(NamedTuple):
    """The seconds that the stages of a flight take. The launch and the landing run in the training
    thread, and all other stages run in the background.
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
    """The seconds for which a flight keeps a group's link busy, by hop and direction."""

    up: float
    down: float
    up_again: float
    down_again: float


@lru_cache(maxsize=16)
def _timetable(schedule: Schedule, steps: int) -> list[tuple[int, bool, int]]:
    """Lists launches and landings in the engine's order, each as ``(inner step, is landing,
    fragment)``.
    """
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
    """Lists, for each fragment, the fragments that are launched in the ``span`` inner steps up to
    its launch.
    """
    schedule = Schedule(sync_every, overlap_steps=0, fragments=fragments)
    offsets = [schedule.offset(fragment) for fragment in range(fragments)]
    together = []
    for last in offsets:
        launched = [p for p, offset in enumerate(offsets) if (last - offset) % sync_every < span]
        together.append(launched)
    return together


def _timetable_of(
    launches: Mapping[int, Sequence[int]], schedule: Schedule, steps: int
) -> list[tuple[int, bool, int]]:
    """Lists launches and landings like `_timetable`, given the fragments that are launched after
    each inner step.
    """
    events = []
    for step, fragments in launches.items():
        landing = step + schedule.overlap_of(step)
        for number, fragment in enumerate(fragments):
            events.append((step, False, number, fragment))
            events.append((landing, True, number, fragment))
    return [
        (step, is_landing, fragment)
        for step, is_landing, _, fragment in sorted(events)
        if step <= steps
    ]


# A run in virtual time: when every group completes each inner step, given unequal speeds and
# absences


@dataclass(frozen=True, order=True)
class Absence:
    """An interval in which a group is idle. All other groups wait for it at their next landing."""

    group: int
    start: float
    end: float

    def __post_init__(self) -> None:
        require(0 <= self.start <= self.end, "absence", self.start, "a start before the end")


class Times(NamedTuple):
    """The times at which a group completed its inner steps, and the time that it spent waiting."""

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
    """Simulates the training thread and the background of every group.

    A flight ends when the messages of all groups have arrived. On a route of pairs, it ends when
    the messages of all partners and the control vectors of all groups have arrived.

    Args:
        method: The model, settings and groups.
        link: The link from each group to the others.
        steps: The number of inner steps.
        speeds: The relative speed of each group. At 0.5, a step takes twice the step time.
        absences: The intervals in which groups are absent.
        idle: For each group, the inner steps, counted from 1, in which it does not train. These
            steps take no time.
        links: The link of each group, if links differ. In this case, connections are assumed to be
            at full speed. A compression that depends on the sender's link uses this link from the
            third flight on.
        launches: The fragments that are launched after each inner step, if they differ from the
            schedule.

    Examples:
        >>> settings = Settings(sync_every=10, overlap_steps=2, compression="fp32")
        >>> method = Streaming(Model.of_size(10**6, layers=3), settings, Groups(step_time=1.0))
        >>> fast, slow = play(method, Link(gbit_s=1.0), steps=20, speeds=[1.0, 0.5])
        >>> round(fast.waited), round(slow.waited), round(fast.end) == round(slow.end)
        (20, 0, True)
    """
    groups = method.groups.groups
    absences = sorted(absences)
    idle = idle or [()] * groups
    lines = list(map(Line.of, links or [link] * groups))
    _require_one_each(groups, {"speeds": speeds, "lists of idle steps": idle, "links": lines})
    for speed in speeds:
        require(speed > 0, "speed", speed, "positive: 0.5 is half as fast as the others")
    for absence in absences:
        is_group = 0 <= absence.group < groups
        require(is_group, "group", absence.group, "the number of a group, from 0")
    events = _timetable(method.schedule, steps)
    if launches is not None:
        events = _timetable_of(launches, method.schedule, steps)
    played = _Play(method, lines, speeds, idle, absences, bool(links) and method.settings.shares)
    played.follow(events)
    return played.ended(steps)


def _require_one_each(groups: int, sequences: Mapping[str, Sequence[object]]) -> None:
    """Raises a ValueError if a sequence does not have one element for each group."""
    for name, sequence in sequences.items():
        if len(sequence) != groups:
            raise ValueError(
                f"There are {len(sequence)} {name} for {groups} worker groups. Give one for each"
                " group."
            )


def step_end(begins: float, step_time: float, absences: Iterable[Absence]) -> float:
    """Returns the time at which an inner step is completed, given its group's absences in order."""
    left = step_time
    for absence in absences:
        if begins + left > absence.start and begins < absence.end:
            left -= max(0.0, absence.start - begins)
            begins = absence.end
    return begins + left


class _Group:
    """A group's clocks for its training thread and its background."""

    def __init__(
        self, step_time: float, absences: Sequence[Absence], idle: Collection[int]
    ) -> None:
        self._step_time = step_time
        self._absences = absences
        self._idle = frozenset(idle)
        self.clock = 0.0
        self.waited = 0.0
        self.longest_flight = 0.0
        # The time at which each stage of the background finished its last flight.
        self.encoded = 0.0
        self.averaged = 0.0
        self.stepped = 0.0
        # The time until which its link, or each direction of it, is busy.
        self.up = 0.0
        self.down = 0.0
        # The time at which each flight can land, and the time at which each inner step was
        # completed, including the launches and landings after it.
        self.landings: list[float] = []
        self.steps: list[float] = []

    def train(self, until: int) -> None:
        """Takes inner steps up to a given number, skipping idle steps and pausing during
        absences.
        """
        first = len(self.steps) + 1
        if until >= first > 1:
            self.steps[-1] = self.clock
        if not self._idle and not self._absences:
            began = self.clock
            steps = until - first + 1
            self.clock = self.clock + max(0, steps) * self._step_time
            self.steps += [began + (number + 1) * self._step_time for number in range(steps)]
            return
        for number in range(first, until + 1):
            if number not in self._idle:
                self.clock = step_end(self.clock, self._step_time, self._absences)
            self.steps.append(self.clock)


class _Play:
    """Simulates groups with their links and speeds, or a single group if all groups are equal."""

    def __init__(
        self,
        method: Streaming,
        lines: Sequence[Line],
        speeds: Sequence[float],
        idle: Sequence[Collection[int]],
        absences: Sequence[Absence] = (),
        differ: bool = False,
    ) -> None:
        self._lines = lines
        self._link = _slowest(lines)
        # If links differ and all groups wait for each other, each direction of a link is busy for
        # the time of its own messages.
        self._differ = differ
        self._method = method
        self._costs: list[Costs] = []
        # For each fragment, the times before and after groups know their links.
        self._busy: list[tuple[list[Busy], list[Busy]]] = []
        self._use(method)
        self._flights = [0] * len(method.numels)
        self._groups = []
        for group, speed in enumerate(speeds):
            away = [absence for absence in absences if absence.group == group]
            self._groups.append(_Group(method.groups.step_time / speed, away, idle[group]))
        self._in_flight: list[int] = []
        self.landed: list[float] = []  # when fragment 0 landed in the first group

    def _use(self, method: Streaming) -> None:
        """Sets the method for all following exchanges."""
        self._method = method
        fragments = range(len(method.numels))
        self._costs = [method.costs(fragment, self._link) for fragment in fragments]
        if self._differ:
            self._busy = [
                (method.busy(p, self._lines, False), method.busy(p, self._lines, True))
                for p in fragments
            ]

    def follow(self, events: Iterable[tuple[int, bool, int]]) -> None:
        """Trains, launching and landing fragments as the events specify."""
        for step, is_landing, fragment in events:
            for group in self._groups:
                group.train(step)
            if is_landing:
                self._land(self._in_flight.pop(0))
            else:
                self._launch(fragment)
                self._in_flight.append(fragment)

    def ended(self, steps: int) -> list[Times]:
        """Trains to the end, lands fragments in flight, and runs the final exchange in float32."""
        for group in self._groups:
            group.train(steps)
            group.steps[-1:] = [group.clock] * (steps > 0)
        for fragment in self._in_flight:
            self._land(fragment)
        method = self._method
        exact = replace(method.settings, compression="fp32")
        self._use(Streaming(method.model, exact, method.groups))
        for fragment in range(len(method.numels)):
            self._launch(fragment)
        for fragment in range(len(method.numels)):
            self._land(fragment)
        return [
            Times(group.steps, group.clock, group.waited, group.longest_flight)
            for group in self._groups
        ]

    def _launch(self, fragment: int) -> None:
        """Launches a fragment in all groups: reads, encodes and sends it."""
        cost = self._costs[fragment]
        launched = list[float]()
        for group in self._groups:
            launched.append(group.clock)
            group.clock += cost.launch
            group.encoded = max(group.clock, group.encoded) + cost.encode
        arrived = self._over_lines(fragment) if self._differ else self._over_legs(fragment)
        for group, launch, arrival in zip(self._groups, launched, arrived, strict=True):
            group.longest_flight = max(group.longest_flight, arrival - launch)
            group.stepped = max(group.stepped, group.averaged, arrival) + cost.step
            group.landings.append(group.stepped)
        self._flights[fragment] += 1

    def _land(self, fragment: int) -> None:
        """Lands the oldest flight in all groups, and makes each group wait until the flight has
        arrived.
        """
        for group in self._groups:
            arrived = group.landings.pop(0)
            group.waited += max(0.0, arrived - group.clock)
            group.clock = max(group.clock, arrived) + self._costs[fragment].land
        if fragment == 0:
            self.landed.append(self._groups[0].clock)

    def _over_legs(self, fragment: int) -> list[float]:
        """Averages a fragment and returns the time at which each group has received the last
        message.

        Each group exchanges with all partners in its leg, at the speed of their slowest link. On a
        route of pairs, a leg is a pair. Otherwise, a leg contains all groups.
        """
        settings = self._method.settings
        count = len(self._groups)
        legs: Sequence[Sequence[int]] = [range(count)]
        if not settings.shares and count > 1:
            legs = settings.routing.legs(self._flights[fragment], count)
        launched = max(group.encoded for group in self._groups)
        arrived = [0.0] * count
        for leg in legs:
            arrival = self._over_leg(fragment, leg, launched)
            for group in leg:
                arrived[group] = arrival
        second_hop = self._costs[fragment].second_hop
        if second_hop:
            averaged = max(group.averaged for group in self._groups)
            arrived = [averaged + second_hop + self._link.round_trip] * count
        return arrived

    def _over_leg(self, fragment: int, leg: Sequence[int], launched: float) -> float:
        """Averages the groups of a leg and returns the time at which the messages of the first hop
        arrive.
        """
        link = self._link
        if len(leg) < len(self._groups):
            link = _slowest([self._lines[group] for group in leg])
        partners = [self._groups[group] for group in leg]
        cost = self._costs[fragment]
        if link != self._link:
            cost = self._method.costs(fragment, link)
        posted = max(group.encoded for group in partners)
        before = max(group.up for group in partners)
        is_warm = link.is_warm_after(posted - before - link.round_trip)
        sent = max(posted, before) + (cost.warm if is_warm else cost.cold)
        arrival = max(sent, launched) + link.round_trip
        for group in partners:
            group.up = sent + cost.second_hop
            group.averaged = max(group.averaged, arrival) + cost.average
        return arrival

    def _over_lines(self, fragment: int) -> list[float]:
        """Averages all groups on different links and returns the time at which each group receives
        the last message.
        """
        # A group learns from the second message how long its first one took.
        busy = self._busy[fragment][sum(self._flights) > 1]
        round_trip = max(line.round_trip for line in self._lines)
        posted = max(group.encoded for group in self._groups)
        for group, times in zip(self._groups, busy, strict=True):
            group.up = max(posted, group.up) + times.up
            group.down = max(posted, group.down) + times.down
        arrival = max(max(group.up, group.down) for group in self._groups) + round_trip
        for group, times in zip(self._groups, busy, strict=True):
            group.averaged = max(group.averaged, arrival) + self._costs[fragment].average
            group.up += times.up_again
            group.down += times.down_again
        second_hop = max(max(times.up_again, times.down_again) for times in busy)
        if second_hop:
            averaged = max(group.averaged for group in self._groups)
            arrival = averaged + second_hop + round_trip
        return [arrival] * len(busy)


def _slowest(lines: Sequence[Line]) -> Link:
    return min((line.slower for line in lines), key=lambda link: link.gbit_s)
