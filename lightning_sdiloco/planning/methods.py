"""Predicts what a method sends between groups, how long training waits for it, and what memory it takes.

Wire bytes, messages, fragments and schedule are the engine's own; only time is a model. It follows the engine: a
fragment is read after an inner step, flights pass through the stages of the background and over the link in the order
of their launch, and a landing waits for its flight.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from typing_extensions import override

from lightning_sdiloco.algorithm import (
    CONTROL_BYTES,
    HOST_BYTES,
    Schedule,
    Settings,
    TwoShot,
    all_reduce_for,
)
from lightning_sdiloco.compression import resolve
from lightning_sdiloco.planning.link import Line, Link
from lightning_sdiloco.planning.workload import FLOAT32, Groups, Model

# Bytes of memory that are read and written for each value: reading a fragment, compressing it, decoding the message of
# one group and adding it, the outer step, mixing a fragment into the model. The mean that goes out on the second hop is
# compressed like an outer gradient.
_LAUNCH, _ENCODE, _DECODE, _OUTER_STEP, _LAND = 12, 32, 20, 48, 12

_DDP_BUCKET = 25 * 2**20

# Of so many rounds the last half is measured; by then every round takes as long as the one before.
_ROUNDS = 8


class Memory(NamedTuple):
    """Bytes that Streaming DiLoCo takes on each rank, on top of ordinary training."""

    device_bytes: int
    host_bytes: int
    evaluation_bytes: int


class Method(ABC):
    """A way to train one model in several groups."""

    @property
    @abstractmethod
    def bytes_per_step(self) -> float:
        """Returns the bytes that a group sends to other groups per inner step, in the long run."""

    @abstractmethod
    def bytes_in(self, steps: int) -> float:
        """Returns the bytes that a group sends to other groups in a run of so many inner steps."""

    @property
    @abstractmethod
    def peak_gbit_s(self) -> float:
        """Returns the Gbit/s at the busiest moment if everything is sent evenly over the time that it may take."""

    @abstractmethod
    def utilisation(self, link: Link) -> float:
        """Returns the share of the wall time in which training does not wait, in the long run."""


class DataParallel(Method):
    """`DistributedDataParallel` over all groups: gradients in buckets, during backward, in a ring of the groups."""

    def __init__(self, model: Model, groups: Groups) -> None:
        self.groups = groups
        self._bytes = 2 * groups.others / groups.groups * model.nbytes
        self._buckets = max(1, math.ceil(model.nbytes / _DDP_BUCKET))

    @property
    @override
    def bytes_per_step(self) -> float:
        return self._bytes

    @override
    def bytes_in(self, steps: int) -> float:
        return self._bytes * steps

    @property
    @override
    def peak_gbit_s(self) -> float:
        return self._bytes * 8 / self.groups.step_time / 1e9

    @override
    def utilisation(self, link: Link) -> float:
        on_link = self._bytes * 8 / (link.gbit_s_of(self.groups.group_size) * 1e9)
        each = on_link / self._buckets + self.groups.others * link.round_trip
        step_time = self.groups.step_time
        backward_after_the_first = (1 - 1 / self._buckets) * step_time * 2 / 3
        return step_time / (step_time + max(each, self._buckets * each - backward_after_the_first))


class Streaming(Method):
    """The engine with these settings. DiLoCo is the engine with one fragment that does not overlap with training."""

    def __init__(self, model: Model, settings: Settings, groups: Groups) -> None:
        self.groups = groups
        self._model = model
        self.settings = settings
        self.numels = model.fragments(settings)
        self.schedule = Schedule(settings.sync_every, settings.overlap_steps, len(self.numels), settings.warmup_steps)
        self._shards = [-(-numel // groups.group_size) for numel in self.numels]
        mixing = settings.chosen_for(groups.groups).landing.kept
        # On a route that does not share, a group sends to its partners whole fragments, and 16 bytes to all.
        self._partners = groups.others if settings.shares else _partners(groups.groups)
        self._connections = self._partners * groups.group_size
        words = HOST_BYTES * (groups.others - self._partners) * groups.group_size
        # Parts that suit the links change what each group sends, and not what all of them send together.
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
        exactly = [exact.payload_bytes(shard) + exact.second_hop_bytes(shard) for shard in self._shards]
        self._exact = sum(groups.connections * (CONTROL_BYTES + both) for both in exactly)

    @property
    @override
    def bytes_per_step(self) -> float:
        return sum(self._sent) / self.settings.sync_every

    @override
    def bytes_in(self, steps: int) -> float:
        """Returns the bytes that a group sends in a run, the final exchange included; exact but for buffers."""
        warmup_steps = min(steps, self.settings.warmup_steps)
        launched = sum(self._launches(p, steps - warmup_steps) * sent for p, sent in enumerate(self._sent))
        # In a warm-up there are the gradients of each step, and after the last one the parameters; a run that ends in
        # it has no other mean at its end.
        ends_in_it = 0 < steps < self.settings.warmup_steps
        exact = warmup_steps + (warmup_steps > 0) + (self.settings.final_sync and not ends_in_it)
        return launched + exact * self._exact

    @cached_property
    def final(self) -> "Streaming":
        """Returns how the final exchange is made, as a method of its own: in float32."""
        return Streaming(self._model, replace(self.settings, compression="fp32"), self.groups)

    def _launches(self, fragment: int, steps: int) -> int:
        return max(0, (steps - self.schedule.offset(fragment)) // self.settings.sync_every)

    @property
    @override
    def peak_gbit_s(self) -> float:
        span = max(1, self.settings.overlap_steps)
        most = max(sum(self._sent[p] for p in together) for together in self._together(span))
        return most * 8 / (span * self.groups.step_time) / 1e9

    def _together(self, span: int) -> Iterator[list[int]]:
        """Yields for each fragment those that are launched in the ``span`` inner steps that end with its own launch."""
        offsets = [self.schedule.offset(fragment) for fragment in range(len(self.numels))]
        for own in offsets:
            yield [p for p, other in enumerate(offsets) if (own - other) % self.settings.sync_every < span]

    @override
    def utilisation(self, link: Link) -> float:
        trained = (_ROUNDS - _ROUNDS // 2) * self.settings.sync_every * self.groups.step_time
        rounds = list(self._rounds(link))
        return trained / (rounds[-1] - rounds[_ROUNDS // 2 - 1])

    def _rounds(self, link: Link) -> Iterator[float]:
        """Plays training thread and background, and yields the time at which fragment 0 has landed in each round."""
        clock, encoded, link_free, averaged, stepped, step = 0.0, 0.0, 0.0, 0.0, 0.0, 0
        landings: list[float] = []
        costs = [self.costs(p, link) for p in range(len(self.numels))]
        for at, is_landing, fragment in _timetable(self.schedule):
            clock, step, cost = clock + (at - step) * self.groups.step_time, at, costs[fragment]
            if is_landing:
                clock = max(clock, landings.pop(0)) + cost.land
                if fragment == 0:
                    yield clock
            else:
                clock += cost.launch
                encoded = max(clock, encoded) + cost.encode
                warm = link.is_warm_after(encoded - link_free - link.round_trip)
                link_free = max(encoded, link_free) + (cost.warm if warm else cost.cold)
                averaged = max(averaged, link_free + link.round_trip) + cost.average
                there = averaged + (cost.second_hop + link.round_trip if cost.second_hop else 0.0)
                # What is launched later has the link while the others average, and not while they send their means.
                link_free += cost.second_hop
                stepped = max(stepped, there) + cost.step
                landings.append(stepped)

    def costs(self, fragment: int, link: Link) -> "Costs":
        per_value, shard, part = 1 / self.groups.memory_rate, self._shards[fragment], self._parts[fragment]
        connections, hops_again = max(1, round(self._connections)), self._second_hops[fragment] > 0
        first, again = connections * self._messages[fragment], connections * self._second_hops[fragment]
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
        """Returns the bytes of a message to another group; the compression may choose by its sender's link."""
        codec, shard = self.settings.codec, self._shards[fragment]
        choice = codec.choice(shard, bytes_per_s, self.settings.overlap_steps * self.groups.step_time)
        most = self._messages[fragment] - codec.wire_bytes(shard)
        return most + codec.choice_bytes(shard, choice)

    def busy(self, fragment: int, lines: Sequence[Line], are_known: bool = True) -> "list[Busy]":
        """Returns how long each group's link is busy with a flight of a fragment, in both hops and directions."""
        groups, shard, ranks = self.groups, self._shards[fragment], self.groups.group_size
        all_reduce = all_reduce_for(self.settings.exchange, groups.groups, self.settings.codec, 0.0).at(0)
        to = [CONTROL_BYTES + all_reduce.payload_bytes(shard, group) for group in range(groups.groups)]
        again = [all_reduce.second_hop_bytes(shard, group) for group in range(groups.groups)]
        spared = [self._spared_bytes(fragment, line.up, are_known) for line in lines]

        def seconds(link: Link, nbytes: int) -> float:
            return link.seconds(ranks * nbytes, groups.connections) - link.round_trip if nbytes else 0.0

        return [
            Busy(
                up=seconds(line.up, sum(to) - to[group] - groups.others * spared[group]),
                down=seconds(line.down, groups.others * to[group] - (sum(spared) - spared[group])),
                up_again=seconds(line.up, groups.others * again[group]),
                down_again=seconds(line.down, sum(again) - again[group]),
            )
            for group, line in enumerate(lines)
        ]

    def _spared_bytes(self, fragment: int, up: Link, is_known: bool) -> int:
        """Returns by how much a message over a link is shorter than the longest one."""
        connections = self.groups.connections
        rate = up.gbit_s_of(connections) * 1e9 / 8 / connections
        return self._messages[fragment] - self.message_bytes(fragment, is_known * rate)

    def background_seconds(self, fragment: int) -> float:
        """Returns how long a flight of a fragment keeps the background busy, without the time on the link."""
        cost = self.costs(fragment, Link(gbit_s=1.0))
        return cost.encode + cost.average + cost.step

    @cached_property
    def memory(self) -> Memory:
        """Returns what a rank needs on top of ordinary training."""
        gathered = FLOAT32 if self.groups.group_size > 1 else 0
        of_part = [FLOAT32 * part * (again > 0) for part, again in zip(self._parts, self._second_hops, strict=True)]
        # Outer parameters, momentum; with two shots what the second rounding has lost; on a route that does not share
        # the anchor, and the second vector of its momentum.
        own = 0 if self.settings.shares else 1 + bool(self.settings.routing.momentum(self.groups.groups))
        held = sum((2 + own) * FLOAT32 * shard + part for shard, part in zip(self._shards, of_part, strict=True))
        # The outer gradient and both after the outer step; with several ranks also the fragment that they gathered.
        flying = [3 * FLOAT32 * s + gathered * n for s, n in zip(self._shards, self.numels, strict=True)]
        messages = [self.groups.groups * sum(both) for both in zip(self._messages, self._second_hops, strict=True)]
        # A fragment that lands after the step of a launch does so behind it.
        together = list(self._together(self.settings.overlap_steps + 1))
        most = max(sum(flying[p] + messages[p] for p in fragments) for fragments in together)
        # A payload before it becomes a message, two vectors in which others are decoded and added up, and with two
        # shots the mean of the whole shard and what the second rounding has lost now.
        working = [
            message + 2 * FLOAT32 * part + (FLOAT32 * shard + lost if lost else 0)
            for message, part, shard, lost in zip(self._messages, self._parts, self._shards, of_part, strict=True)
        ]
        on_their_way = max(sum(messages[p] for p in fragments) for fragments in together)
        # Where outer state rests on the host, outer parameters come to the device at the launch and one step before,
        # and the momentum for the outer step; both leave it again before the landing.
        visiting = 2 * FLOAT32 * max(self._shards) if self.offloads else held
        resting = held + 2 * FLOAT32 * max(sum(self._shards[p] for p in fragments) for fragments in together)
        return Memory(
            device_bytes=visiting + most + max(working),
            host_bytes=on_their_way + (resting if self.offloads else 0),
            evaluation_bytes=self._model.nbytes + gathered * max(self.numels),
        )

    @property
    def offloads(self) -> bool:
        """Tells whether outer state rests on the host; ``"auto"`` means what it means on CUDA."""
        return self.settings.offload is not False


class Costs(NamedTuple):
    """Seconds that a flight takes: launch and landing in the training thread, the rest in the background."""

    launch: float
    encode: float
    warm: float
    cold: float
    average: float
    second_hop: float
    step: float
    land: float


def _partners(groups: int) -> float:
    """Returns how many partners a group has in a round of pairs, of which one has a third where a group is over."""
    return min(1, groups - 1) if groups % 2 == 0 or groups == 1 else (groups + 3) / groups


class Busy(NamedTuple):
    """Seconds for which the link of a group is busy with a flight: sending and receiving, and again in a second hop."""

    up: float
    down: float
    up_again: float
    down_again: float


@lru_cache(maxsize=16)
def _timetable(schedule: Schedule) -> list[tuple[int, bool, int]]:
    """Lists launches and landings of some rounds in the engine's order: inner step, whether it lands, what."""
    launches = [
        (number * schedule.sync_every + schedule.offset(fragment), False, fragment)
        for number in range(1, _ROUNDS + 1)
        for fragment in range(schedule.fragments)
    ]
    return sorted(launches + [(at + schedule.overlap_steps, True, fragment) for at, _, fragment in launches])
