"""A fragment's flight from launch to landing (lines 7 to 11 of Algorithm 2).

A `Flight` has three methods. `Flight.send` encodes the outer gradient and posts it (line 7).
`Flight.average` receives and averages the outer gradients of all groups (line 8). `Flight.step`
takes the outer step (line 11). All three methods run in the background while training continues.
They read the fragment's record and write only to tensors that the flight created. The `Arrival`
that `Flight.step` returns is not committed until the fragment lands.

A flight is composed of parts. Its kind is a round, a plain mean or a leg of a route (`_Round`,
`_PlainMean`, `_Leg`). The control vector is sent either before the payload or together with it
(`_WordsAhead`, `_WordsAlong`). Optional parts are the exchange of untrained state
(`_UntrainedMessages`), a second hop and diagnostics.
"""

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.gossip import Brought, bring, take
from lightning_sdiloco.algorithm.merge import LandingRule, Mix
from lightning_sdiloco.algorithm.reduce import AllReduce, SecondHop, all_reduce_for
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES, Control, Count, combined, plain
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.exchange import Exchange, Unanswered, VaryingExchange
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import resolve
from lightning_sdiloco.engine.background import Work
from lightning_sdiloco.engine.diagnosis import Diagnosis
from lightning_sdiloco.engine.fragments import (
    Arrival,
    Commit,
    FragmentState,
    Landing,
    Launch,
    Purpose,
    Span,
)
from lightning_sdiloco.engine.outer import OuterState
from lightning_sdiloco.engine.untrained import (
    NOTHING,
    Arrived,
    agreed,
    arrived,
    arrived_bytes,
    to_bytes,
)
from lightning_sdiloco.errors import AgreementError, ExchangeError
from lightning_sdiloco.memory import new_vector

# For fragments with fewer values, the control vector travels in the same message as the payload,
# because a separate message would cost more than a copy. One in seven such flights still sends the
# vector ahead, in order to measure how long the payload is on the link.
_FEW_VALUES = 1 << 16
_FLIGHTS_PER_WORD_AHEAD = 7

# Every digest includes the engine's number multiplied by this factor. Because the factor is an odd
# 64-bit number, the digests of different engines differ.
_ENGINE_DIGEST = 0x9E3779B97F4A7C15

# The stages of the background, each with its own communicator.
_SEND, _AVERAGE, _STEP = range(3)


class Collected(NamedTuple):
    """The received messages by exchange and group, the traffic in bytes, and the time at which each
    exchange finished.
    """

    messages: list[list[Tensor]]
    bytes_sent: int
    bytes_received: int
    arrival_times: list[float]


class Synchronizer:
    """The state that all flights of a model share, and the method that runs a flight.

    Attributes:
        diagnoses: Whether flights measure how closely the groups agree with each other.
    """

    def __init__(
        self,
        fragments: Sequence[FragmentState],
        topology: Topology,
        settings: Settings,
        diagnoses: bool,
    ) -> None:
        groups = topology.num_groups
        codec = settings.codec
        self.fragments = fragments
        self.topology = topology
        self.diagnoses = diagnoses
        self.landing_rule = settings.landing
        self.weighing = settings.aggregation
        self.route_momentum = settings.routing.momentum(groups)
        # In a leg, each group sends whole fragments to its partners.
        round_exchange = settings.exchange if settings.shares else "gather"
        kept_share = self.landing_rule.kept
        self.rounded = all_reduce_for(round_exchange, groups, codec, kept_share)
        self.exact = all_reduce_for(settings.exchange, groups, resolve("fp32"), kept_share)
        self.exchange: Exchange[Any] = topology.exchange
        if codec.traits.varies:
            self.exchange = VaryingExchange(topology.control, topology.exchange)
        # Control vectors must travel ahead of the payload if messages are held back until all
        # groups have launched, or if message lengths are sent first.
        self._may_send_words_along = topology.exchange.learns_sizes and not codec.traits.varies
        self._flight_numbers = itertools.count()
        has_untrained = any(fragment.untrained.outer for fragment in fragments)
        has_second_hop = self.rounded.hops > 1 or self.exact.hops > 1 or has_untrained
        has_own_exchange = topology.second_hop is not topology.exchange
        # The outer step runs in the thread that computed the mean if no group waits for a second
        # hop and if no link measurement depends on when the wait for messages begins. Handing over
        # to another thread would take as long as the mean and the step together. The outer step
        # also stays in that thread if both hops share one exchange, which only one thread may use.
        self._hands_over = codec.traits.varies or (has_second_hop and has_own_exchange)

    def fly(self, launch: Launch) -> Work[Arrival]:
        """Runs a fragment's flight in up to three stages. All ranks must call this in-group
        collective in launch order.
        """
        flight = Flight(self, launch)
        del launch  # so that its values can be freed during the flight
        flight.send()
        yield
        flight.average()
        if self._hands_over:
            yield
        return flight.step()

    def sends_words_ahead(self, launch: Launch) -> bool:
        """Returns whether the control vector of the next flight travels ahead of its payload.

        All groups count flights in the same way, even if control vectors later reveal that the
        groups are at different points.
        """
        is_chosen = next(self._flight_numbers) % _FLIGHTS_PER_WORD_AHEAD == 0
        is_short = self._may_send_words_along and launch.gradient.numel() < _FEW_VALUES
        return is_chosen or bool(launch.leg) or not is_short

    def collect(
        self, posts: Sequence[tuple[Exchange[Any], Any]], launch: Launch, stage: int
    ) -> Collected:
        """Waits for a flight's messages and returns them. In-group collective."""
        exchanges = list(dict.fromkeys(exchange for exchange, _ in posts))
        sent_before = sum([exchange.bytes_sent for exchange in exchanges])
        received_before = sum([exchange.bytes_received for exchange in exchanges])
        messages: list[list[Tensor]] = []
        arrival_times: list[float] = []
        missing: Unanswered | None = None
        try:
            for exchange, posted in posts:
                messages.append(exchange.collect(posted, launch.deadline))
                arrival_times.append(time.perf_counter())
        except Unanswered as error:
            missing = error
        if self.topology.group_size > 1:
            missing = self._missing_in_group(missing, stage)
        if missing is not None:
            raise ExchangeError(
                f"{missing} while fragment {launch.fragment}, launched after inner step"
                f" {launch.step}, was in flight. The run cannot continue without that group. Find"
                " out why the group stopped or is unreachable. If the group was merely slow,"
                " increase timeout."
            ) from missing
        sent_after = sum([exchange.bytes_sent for exchange in exchanges])
        received_after = sum([exchange.bytes_received for exchange in exchanges])
        return Collected(
            messages, sent_after - sent_before, received_after - received_before, arrival_times
        )

    def _missing_in_group(self, missing: Unanswered | None, stage: int) -> Unanswered | None:
        """Returns an error if this rank or another rank in its group is missing a message. In-group
        collective.
        """
        topology = self.topology
        nobody = -1
        unknown = topology.num_groups
        missing_group = nobody
        if missing is not None:
            missing_group = unknown if missing.group is None else missing.group
        of_ranks = topology.stages[stage].all_gather(torch.tensor([missing_group]))
        missing_groups = torch.cat(of_ranks).tolist()
        group = max(missing_groups)
        if missing is not None or group == nobody:
            return missing
        shard = missing_groups.index(group)
        receiver = topology.group_size * topology.group_index + shard
        reason = f"did not answer rank {receiver} of this group"
        if group == unknown:
            return Unanswered(None, reason)
        sender = topology.group_size * group + shard
        return Unanswered(group, f"{reason} (rank {sender} should have)")


class Flight:
    """The flight of one fragment, from its outer gradient to its new outer state."""

    def __init__(self, shared: Synchronizer, launch: Launch) -> None:
        self._shared = shared
        self._topology = shared.topology
        self._launch = launch
        self._device = launch.gradient.device
        self._fragment = shared.fragments[launch.fragment]
        self._kind = _kind_of(shared, self._fragment, launch)
        self._spans: dict[str, Span] = {}
        self._bytes_sent = 0
        self._bytes_received = 0
        self._on_link_s = math.nan
        is_diagnosed = shared.diagnoses and launch.purpose is Purpose.ROUND
        self._diagnosis = Diagnosis() if is_diagnosed else None
        # Set by `send`, for `average`.
        self._words: _Words = _WordsAlong()
        self._posted: Any = None
        self._posted_at = 0.0
        # Set by `average`, for `step`.
        self._controls: list[Control] = []
        self._count = Count({})
        self._mean = torch.empty(0)
        self._changed = 0
        self._untrained: _UntrainedMessages | None = None
        self._second_hop: SecondHop | None = None
        self._second_hop_posts: list[tuple[Exchange[Any], Any]] = []

    def send(self) -> None:
        """Compresses the outer gradient and sends it to the other groups (line 7)."""
        began = time.perf_counter()
        launch = self._launch
        word = self._control_word()
        if self._shared.sends_words_ahead(launch):
            self._words = _WordsAhead(self._topology)
        self._words.announce(word)
        values = self._kind.outgoing()
        payloads = self._kind.encode(values)
        messages = self._words.joined_to(payloads)
        sizes = None
        if launch.leg:
            # Groups that are not partners send each other empty messages.
            messages = [
                message if group in launch.leg else message[:0]
                for group, message in enumerate(messages)
            ]
            sizes = [message.numel() for message in messages]
        self._posted_at = time.perf_counter()
        self._posted = self._shared.exchange.post(messages, sizes)
        self._spans["encode"] = span_from(began, self._device)
        if self._diagnosis is not None:
            decoded = self._kind.all_reduce.decode_own(payloads, values)
            self._diagnosis.measure_encoding(decoded, values)
        if launch.purpose is not Purpose.ROUND:
            # The gradient is needed again only if a checkpoint is saved while a round is in flight.
            self._launch = launch.without_values()
            self._kind.launch = self._launch

    def average(self) -> None:
        """Averages the outer gradients of all groups (line 8). With a second hop, each group
        averages only one part of the values and then sends the result to all groups.
        """
        began = time.perf_counter()
        posts = [*self._words.posts, (self._shared.exchange, self._posted)]
        collected = self._shared.collect(posts, self._launch, _AVERAGE)
        self._spans["transfer"] = span_from(began, self._device)
        self._bytes_sent = collected.bytes_sent
        self._bytes_received = collected.bytes_received
        self._on_link_s = self._words.on_link(
            self._posted_at, began, self._spans["encode"], collected.arrival_times
        )
        words, payloads = self._words.parted_from(collected.messages)
        del collected, posts
        self._controls = [Control.unpacked(word.cpu().numpy().data) for word in words]
        _require_agreement(self._controls, self._launch, self._fragment, self._topology)
        self._count = self._kind.count(self._controls)
        began = time.perf_counter()
        mean = self._kind.mean(payloads, self._count)
        if self._kind.all_reduce.hops > 1:
            self._second_hop = self._kind.second_hop(mean)
        self._post_second_hop()
        if self._diagnosis is not None:
            compression = self._kind.all_reduce.compression
            self._diagnosis.measure_mean(payloads, compression, mean)
        mean = self._kind.gradient_from(payloads, mean, self._count)
        # With a second hop, the mean of this part also arrives in the messages, in the form that
        # all groups decode. The mean is freed before the payloads, whose pages cannot be reused for
        # the vectors that follow.
        self._mean = mean if self._second_hop is None else mean.new_empty(0)
        del mean
        self._spans["decode"] = span_from(began, self._device)
        self._posted = None
        self._words.posts.clear()

    def step(self) -> Arrival:
        """Takes the outer step with the mean of the whole shard (line 11)."""
        launch = self._launch
        fragment = self._fragment
        in_group = self._topology.stages[_STEP]
        untrained = self._receive_second_hop()
        norm = whole_norm(fragment.norm(launch.purpose, self._mean), in_group)
        began = time.perf_counter()
        # The outer step may overwrite the mean.
        outer = self._kind.outer_step(self._mean, self._count, in_group)
        rule = self._kind.landing_rule(self._controls, self._count)
        gathered: list[Tensor] = []
        for row in rule.gathered(launch.gradient, launch.outer, outer.values):
            gathered.append(fragment.layout.all_gather(row, in_group))
        self._spans["outer_step"] = span_from(began, self._device)
        report = reported(
            launch.fragment, launch.step, self._controls, self._count, outer, norm, self._spans
        )
        diagnostics = None
        if self._diagnosis is not None:
            diagnostics = self._diagnosis.result(launch, outer.state, in_group)
        commit = self._kind.commit(outer, self._controls, self._count)
        return Arrival(
            commit=fragment.stored(commit),
            rule=rule,
            gathered=gathered,
            untrained=untrained,
            changed=self._changed,
            trained=[control.weight for control in self._controls],
            landing=report._replace(
                bytes_sent=self._bytes_sent,
                bytes_received=self._bytes_received,
                on_link_s=self._on_link_s,
                diagnostics=diagnostics,
            ),
            sends_bytes_per_s=self._shared.exchange.sends_bytes_per_s,
        )

    def _control_word(self) -> Tensor:
        """Returns this group's control vector as bytes. In-group collective."""
        launch = self._launch
        fragment = self._fragment
        topology = self._topology
        is_unlike = launch.purpose is Purpose.START or not fragment.shares
        untrained = fragment.untrained.changes(launch.buffers, is_unlike=is_unlike)
        norm_squared = float(fragment.norm(launch.purpose, launch.gradient)) ** 2
        control = Control(
            fragment=launch.fragment,
            step=launch.step,
            requests=launch.requests,
            # A norm may overflow even if every value is finite.
            finite=math.isfinite(norm_squared) or bool(launch.gradient.isfinite().all()),
            weight=launch.weight,
            digest=combined([fragment.digest(launch), _ENGINE_DIGEST * topology.engine]),
            norm_squared=norm_squared,
            changed=untrained.bits,
            step_time=launch.step_time,
            buffers=untrained.size,
        )
        word = torch.frombuffer(control.packed(), dtype=torch.uint8)
        if topology.group_size == 1:
            return word
        words = topology.stages[_SEND].all_gather(word)
        of_ranks = [Control.unpacked(rank_word.numpy().data) for rank_word in words]
        return torch.frombuffer(Control.merged(of_ranks).packed(), dtype=torch.uint8)

    def _post_second_hop(self) -> None:
        """Posts this group's part of the mean and the untrained state to be exchanged."""
        # The control vectors indicate which untrained state has changed. Constants are not
        # exchanged.
        self._changed = reduce(or_, [control.changed for control in self._controls])
        posts = self._second_hop_posts
        exchange = self._topology.second_hop
        launch = self._launch
        self._posted_at = time.perf_counter()
        if self._changed and (launch.leg or self._count.factors):
            travelling = self._fragment.untrained.travelling(self._changed)
            if travelling:
                self._untrained = _UntrainedMessages(
                    self._fragment, launch, travelling, self._topology
                )
                if self._topology.group_rank == 0:
                    # Only one rank of a group sends buffers.
                    posts.append((exchange, self._untrained.post()))
        if self._second_hop is not None:
            sizes = self._kind.all_reduce.second_hops(launch.gradient.numel())
            payloads = [self._second_hop.payload] * self._topology.num_groups
            posts.append((exchange, exchange.post(payloads, sizes)))

    def _receive_second_hop(self) -> Arrived:
        """Receives the parts of the mean and the untrained state that were sent in the second hop.

        In-group collective. Returns the untrained state that was received.
        """
        if self._second_hop is None and self._untrained is None:
            return NOTHING
        began = time.perf_counter()
        collected = self._shared.collect(self._second_hop_posts, self._launch, _STEP)
        self._spans["relay"] = span_from(began, self._device)
        messages = collected.messages
        if self._second_hop is None:
            # These messages are too short to measure the link, so they are assumed to travel as
            # fast as the payload.
            longest_relayed = max(collected.bytes_sent, collected.bytes_received)
            longest_payload = max(1, self._bytes_sent, self._bytes_received)
            self._on_link_s *= 1 + longest_relayed / longest_payload
        else:
            arrived_at = collected.arrival_times[-1]
            self._on_link_s += on_link(self._posted_at, began, self._posted_at, arrived_at, 0.0)
            parts = messages.pop()
            self._mean = self._kind.all_reduce.assemble(parts, like=self._launch.gradient)
            self._second_hop = None
            del parts
        self._bytes_sent += collected.bytes_sent
        self._bytes_received += collected.bytes_received
        # Messages are freed before the outer step creates new tensors.
        self._second_hop_posts.clear()
        if self._untrained is None:
            return NOTHING
        return self._untrained.agreed_from(messages, self._count)


# Kinds of flights


def _kind_of(shared: Synchronizer, fragment: FragmentState, launch: Launch) -> "_Kind":
    if launch.purpose is not Purpose.ROUND:
        return _PlainMean(shared, fragment, launch)
    if launch.leg:
        return _Leg(shared, fragment, launch)
    return _Round(shared, fragment, launch)


class _Kind(ABC):
    """The kind of a flight. It determines the sent values, each group's weight and the result."""

    def __init__(
        self, shared: Synchronizer, fragment: FragmentState, launch: Launch, all_reduce: AllReduce
    ) -> None:
        self.launch = launch
        self.all_reduce = all_reduce
        self._shared = shared
        self._fragment = fragment
        self._group = shared.topology.group_index

    def outgoing(self) -> Tensor:
        """Returns the values that this group sends."""
        return self.launch.gradient

    @abstractmethod
    def encode(self, values: Tensor) -> Sequence[Tensor]:
        """Returns the payload for each group."""

    @abstractmethod
    def count(self, controls: Sequence[Control]) -> Count:
        """Returns each group's weight in the mean."""

    def mean(self, payloads: Sequence[Tensor], count: Count) -> Tensor:
        """Averages this group's part of the values."""
        return self.all_reduce.mean(payloads, count, self.launch.gradient, self._group)

    def second_hop(self, mean: Tensor) -> SecondHop:
        """Returns this group's message for the second hop, which contains the mean of its part."""
        return self.all_reduce.second_hop(mean, None)

    def gradient_from(self, payloads: Sequence[Tensor], mean: Tensor, count: Count) -> Tensor:
        """Returns the mean outer gradient, computed from the mean of the values that the groups
        sent.
        """
        return mean

    @abstractmethod
    def outer_step(self, mean: Tensor, count: Count, in_group: Communicator) -> OuterState:
        """Returns the outer state after the flight. May overwrite the mean. In-group collective."""

    @abstractmethod
    def landing_rule(self, controls: Sequence[Control], count: Count) -> LandingRule: ...

    def commit(self, outer: OuterState, controls: Sequence[Control], count: Count) -> Commit:
        """Returns the changes that the landing applies to the fragment's record."""
        return self._fragment.committed()._replace(outer=outer)


class _PlainMean(_Kind):
    """A plain float32 mean of the local values.

    A plain mean does not compensate for earlier compression errors, because it neither uses nor
    changes the error feedback.
    """

    def __init__(self, shared: Synchronizer, fragment: FragmentState, launch: Launch) -> None:
        super().__init__(shared, fragment, launch, shared.exact)

    @override
    def encode(self, values: Tensor) -> Sequence[Tensor]:
        return self.all_reduce.encode(values, None, None).payloads

    @override
    def count(self, controls: Sequence[Control]) -> Count:
        return plain(controls)

    @override
    def outer_step(self, mean: Tensor, count: Count, in_group: Communicator) -> OuterState:
        return moved_by(mean, self._fragment.outer, self.launch.outer)

    @override
    def landing_rule(self, controls: Sequence[Control], count: Count) -> LandingRule:
        return Mix(0.0)


class _Round(_Kind):
    """A compressed round of all groups, with error feedback and an outer step."""

    def __init__(self, shared: Synchronizer, fragment: FragmentState, launch: Launch) -> None:
        all_reduce = shared.rounded.at(launch.step, launch.choice)
        super().__init__(shared, fragment, launch, all_reduce)
        # Set by `encode`.
        self._memory: Tensor | None = None
        self._tuning: Tensor | None = None
        # Set by `second_hop`.
        self._residual: Tensor | None = None

    @override
    def encode(self, values: Tensor) -> Sequence[Tensor]:
        fragment = self._fragment
        memory = fragment.load(fragment.memory)
        encoded = self.all_reduce.encode(values, memory, fragment.load(fragment.tuning))
        self._memory = encoded.memory
        self._tuning = encoded.tuning
        return encoded.payloads

    @override
    def count(self, controls: Sequence[Control]) -> Count:
        return self._shared.weighing.count(controls, self._fragment.weighing)

    @override
    def second_hop(self, mean: Tensor) -> SecondHop:
        residual = self._fragment.load(self._fragment.residual)
        second_hop = self.all_reduce.second_hop(mean, residual)
        self._residual = second_hop.residual
        return second_hop

    @override
    def outer_step(self, mean: Tensor, count: Count, in_group: Communicator) -> OuterState:
        fragment = self._fragment
        launch = self.launch
        if not count.factors:
            return unchanged(fragment.outer, launch.outer)
        return outer_step(
            fragment, fragment.outer, launch.outer, mean, in_group, is_dense=launch.is_dense
        )

    @override
    def landing_rule(self, controls: Sequence[Control], count: Count) -> LandingRule:
        if not controls[self._group].finite or self._group in count.outlying:
            return Mix(0.0)
        # If no group has trained, the local parameters do not change.
        return self._shared.landing_rule if count.factors else Mix(1.0)

    def weighing(self, controls: Sequence[Control], count: Count) -> Any:
        """Returns the state of the weighing after this round."""
        return self._shared.weighing.heard(controls, self._fragment.weighing, count)

    @override
    def commit(self, outer: OuterState, controls: Sequence[Control], count: Count) -> Commit:
        weighing = self.weighing(controls, count)
        commit = super().commit(outer, controls, count)._replace(weighing=weighing)
        if self._group in count.factors:
            commit = commit._replace(memory=self._memory, tuning=self._tuning)
        if count.factors and self._residual is not None:
            commit = commit._replace(residual=self._residual)
        return commit


class _Leg(_Round):
    """A round in which partners on a route exchange their local parameters; see [Note: gossip]."""

    def __init__(self, shared: Synchronizer, fragment: FragmentState, launch: Launch) -> None:
        super().__init__(shared, fragment, launch)
        self._twin = fragment.load(fragment.twin)
        self._brought: Brought | None = None

    @override
    def outgoing(self) -> Tensor:
        launch = self.launch
        momentum = self._shared.route_momentum
        self._brought = bring(launch.outer, launch.gradient, self._anchor(), self._twin, momentum)
        return self._brought.values

    @override
    def count(self, controls: Sequence[Control]) -> Count:
        # Local parameters are averaged whether or not the groups have trained.
        return Count({group: 1.0 for group in self.launch.leg if controls[group].finite})

    @override
    def mean(self, payloads: Sequence[Tensor], count: Count) -> Tensor:
        partners = self.launch.leg
        positions = [position for position, group in enumerate(partners) if group in count.factors]
        of_partners = [payloads[group] for group in partners]
        return super().mean(of_partners, Count(dict.fromkeys(positions, 1.0)))

    @override
    def gradient_from(self, payloads: Sequence[Tensor], mean: Tensor, count: Count) -> Tensor:
        brought = self._brought
        self._brought = None
        assert brought is not None, "a leg brings values before it takes any"
        if not count.factors:
            return mean
        launch = self.launch
        sent = self.all_reduce.decode_own([payloads[self._group]], launch.gradient)
        is_counted = self._group in count.factors
        momentum = self._shared.route_momentum
        gradient, self._twin = take(
            brought, sent, mean, launch.outer, self._anchor(), is_counted, momentum
        )
        return gradient

    @override
    def weighing(self, controls: Sequence[Control], count: Count) -> Any:
        # A leg has no mean of all groups that could be used for weighting.
        return self._fragment.weighing

    @override
    def commit(self, outer: OuterState, controls: Sequence[Control], count: Count) -> Commit:
        return super().commit(outer, controls, count)._replace(twin=self._twin)

    def _anchor(self) -> Tensor:
        anchor = self._fragment.load(self._fragment.anchor)
        assert anchor is not None, "groups hold their own outer parameters"
        return anchor


# How the control vector travels


class _Words(ABC):
    """A way to send this group's control vector (the *word*) and to receive the words of all
    groups.

    Attributes:
        posts: The messages that `Flight` collects before it collects the payloads.
    """

    def __init__(self) -> None:
        self.posts: list[tuple[Exchange[Any], Any]] = []

    @abstractmethod
    def announce(self, word: Tensor) -> None:
        """Sends or stores this group's word before its payload is ready."""

    @abstractmethod
    def joined_to(self, payloads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the message to send to each group, including that group's payload."""

    @abstractmethod
    def parted_from(
        self, messages: Sequence[Sequence[Tensor]]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Splits the messages of each exchange into the words and payloads of all groups."""

    def on_link(
        self, posted_at: float, began: float, encode: Span, arrival_times: Sequence[float]
    ) -> float:
        """Returns the time in seconds that the payloads were on the link, or NaN if no message was
        sent ahead of them.
        """
        return math.nan


class _WordsAlong(_Words):
    """Sends each word at the start of the message that contains the payload."""

    def __init__(self) -> None:
        super().__init__()
        self._word = torch.empty(0, dtype=torch.uint8)

    @override
    def announce(self, word: Tensor) -> None:
        self._word = word

    @override
    def joined_to(self, payloads: Sequence[Tensor]) -> Sequence[Tensor]:
        # Groups that receive the same payload receive the same message.
        messages: dict[int, Tensor] = {}
        for payload in payloads:
            if id(payload) not in messages:
                length = self._word.numel() + payload.numel()
                message = new_vector(length, payload.device, torch.uint8)
                torch.cat([self._word.to(payload.device), payload], out=message)
                messages[id(payload)] = message
        return [messages[id(payload)] for payload in payloads]

    @override
    def parted_from(
        self, messages: Sequence[Sequence[Tensor]]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        (of_groups,) = messages
        words = [message[:CONTROL_BYTES] for message in of_groups]
        payloads = [message[CONTROL_BYTES:] for message in of_groups]
        return words, payloads


class _WordsAhead(_Words):
    """Sends each word in a separate message before the payload is sent."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self._topology = topology

    @override
    def announce(self, word: Tensor) -> None:
        exchange = self._topology.control
        self.posts.append((exchange, exchange.post([word] * self._topology.num_groups)))

    @override
    def joined_to(self, payloads: Sequence[Tensor]) -> Sequence[Tensor]:
        return payloads

    @override
    def parted_from(
        self, messages: Sequence[Sequence[Tensor]]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        words, payloads = messages
        return words, payloads

    @override
    def on_link(
        self, posted_at: float, began: float, encode: Span, arrival_times: Sequence[float]
    ) -> float:
        launched_at, arrived_at = arrival_times
        return on_link(posted_at, began, launched_at, arrived_at, encode[1] - encode[0])


def on_link(posted: float, began: float, launched: float, ended: float, encoding: float) -> float:
    """Returns how many seconds the other groups' messages were on the link.

    A message is sent once its receiver has posted its own messages, so the time starts once every
    message could be sent. The receiver can measure the arrival of a message only while waiting for
    it. The result is NaN if the messages arrived before the wait began. The result is also NaN if
    they arrived together with the notice that their groups had launched, because that notice is
    sent before encoding.

    Args:
        posted: The time when this rank posted its messages.
        began: The time when this rank began to wait for the other groups' messages.
        launched: The time when this rank was notified that all groups had launched.
        ended: The time when all messages had arrived.
        encoding: The time in seconds that this rank spent encoding its messages.

    Examples:
        >>> on_link(posted=1.0, began=1.0, launched=0.0, ended=3.0, encoding=0.5)
        2.0
        >>> on_link(posted=1.0, began=2.9, launched=0.0, ended=3.0, encoding=0.5)
        nan
        >>> on_link(posted=1.0, began=1.0, launched=2.9, ended=3.0, encoding=0.5)
        nan
    """
    since = max(posted, launched)
    was_there = ended - max(began, launched) < (ended - since) / 2
    came_together = launched > posted and ended - launched < encoding
    return math.nan if was_there or came_together else ended - since


class _UntrainedMessages:
    """The exchange of a fragment's untrained state in the second hop of a flight."""

    def __init__(
        self,
        fragment: FragmentState,
        launch: Launch,
        travelling: Sequence[int],
        topology: Topology,
    ) -> None:
        self._state = fragment.untrained
        self._launch = launch
        self._travelling = travelling
        self._topology = topology

    def post(self) -> Any:
        """Starts sending this group's untrained state."""
        topology = self._topology
        exchange = topology.second_hop
        pieces = [to_bytes(self._launch.buffers[index]) for index in self._travelling]
        message = torch.cat(pieces).to(exchange.device)
        partners = self._launch.leg or range(topology.num_groups)
        groups = range(topology.num_groups)
        sizes = [message.numel() if group in partners else 0 for group in groups]
        return exchange.post([message[:size] for size in sizes], sizes)

    def agreed_from(self, messages: Sequence[Sequence[Tensor]], count: Count) -> Arrived:
        """Combines the messages of all groups into the new untrained state. In-group collective."""
        if not count.factors:
            return NOTHING
        state = self._state
        size = arrived_bytes(state, self._travelling)
        flat = torch.empty(size, dtype=torch.uint8, device=self._launch.gradient.device)
        if self._topology.group_rank == 0:
            (of_groups,) = messages
            # With `Purpose.START`, each group has different outer values.
            keeps_outer = self._launch.purpose is not Purpose.START
            speaks = self._topology.group_index == min(self._launch.leg, default=0)
            pieces = self._pieces(of_groups, count, flat.device)
            flat.copy_(agreed(state, pieces, keeps_outer=keeps_outer, speaks=speaks))
        self._topology.stages[_STEP].broadcast(flat)
        return arrived(state, self._travelling, flat, self._launch.buffers)

    def _pieces(
        self, of_groups: Sequence[Tensor], count: Count, device: torch.device
    ) -> dict[int, dict[str, Tensor]]:
        """Returns the received bytes by tensor and by the name of the sending group."""
        sizes = [self._state.nbytes(index) for index in self._travelling]
        pieces: dict[int, dict[str, Tensor]] = {index: {} for index in self._travelling}
        for group in count.factors:
            if group in count.wrong_buffers:
                continue
            of_group = of_groups[group].to(device).split(sizes)
            for index, piece in zip(self._travelling, of_group, strict=True):
                pieces[index][f"worker group {group}"] = piece
        return pieces


def _require_agreement(
    controls: Sequence[Control], launch: Launch, fragment: FragmentState, topology: Topology
) -> None:
    """Checks that all groups are at the same point with the same outer model, and that at least one
    group has a finite outer gradient.
    """
    points = {group: control[:2] for group, control in enumerate(controls)}
    digests = {group: controls[group].digest for group in launch.leg or range(len(controls))}
    if len(set(points.values())) > 1:
        raise _disagreement("are not at the same point", points, controls, topology)
    if len(set(digests.values())) > 1:
        verb = "did not begin from" if launch.leg else "do not hold"
        has_buffers = bool(fragment.untrained.names) and not launch.leg
        state = "outer parameters and buffers" if has_buffers else "outer parameters"
        raise _disagreement(f"{verb} the same {state}", digests, controls, topology)
    # In a leg without finite values, each group returns to its own outer parameters.
    if not any(control.finite for control in controls):
        groups = ", ".join(f"group {group}" for group in range(len(controls)))
        raise AgreementError(
            f"The outer gradient of fragment {launch.fragment}, launched after inner step"
            f" {launch.step}, is not finite in any worker group ({groups}). Training has diverged."
            " Resume from an earlier checkpoint and lower the learning rate or clip gradients."
        )


def _disagreement(
    difference: str, values: Mapping[int, object], controls: Sequence[Control], topology: Topology
) -> AgreementError:
    control = controls[topology.group_index]
    # The engine's number matters only in processes with more than one engine.
    of_engine = f" of engine {topology.engine}" if topology.engine > 1 else ""
    by_group = ", ".join(f"group {group}: {value}" for group, value in values.items())
    return AgreementError(
        f"The worker groups {difference} at the launch of fragment {control.fragment}{of_engine}"
        f" after inner step {control.step} ({by_group}). If training continued, the groups would"
        " drift apart unnoticed. Resume all groups from the same checkpoint."
    )


# Arithmetic for worker groups that are launched together and for the sites of a federation


def outer_step(
    fragment: FragmentState,
    before: OuterState,
    values: Tensor,
    gradient: Tensor,
    group: Communicator,
    *,
    is_dense: bool,
) -> OuterState:
    """Takes the outer step with a mean outer gradient. The step may overwrite the gradient.

    Args:
        fragment: The fragment's record, which is not modified.
        before: The outer state before the step.
        values: The outer values on the gradient's device. The returned values are on the same
            device.
        gradient: The mean outer gradient.
        group: This group's communicator. This call is an in-group collective.
        is_dense: Whether the round is part of the dense beginning.
    """
    direction_norm = math.nan
    if fragment.matrices.stacks:
        fragment.matrices.direct(gradient, group)
        direction_norm = whole_norm(torch.linalg.vector_norm(gradient), group)
    after = fragment.optimizer.step(fragment.index, before, values, gradient, is_dense=is_dense)
    return after._replace(direction_norm=direction_norm)


def moved_by(mean: Tensor, before: OuterState, values: Tensor) -> OuterState:
    """Applies a plain mean to the outer state without an outer step, and overwrites the mean."""
    return unchanged(before, torch.sub(values, mean, out=mean))


def unchanged(before: OuterState, values: Tensor) -> OuterState:
    """Returns the outer state with new values but without an outer step."""
    return before._replace(values=values, lr=0.0, direction_norm=math.nan)


def span_from(began: float, device: torch.device) -> Span:
    """Waits for the device and returns the span from ``began`` until now."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
    return began, time.perf_counter()


def reported(
    fragment: int,
    step: int,
    controls: Sequence[Control],
    count: Count,
    outer: OuterState,
    norm: float,
    spans: Mapping[str, Span],
) -> Landing:
    return Landing(
        fragment=fragment,
        launched_at=step,
        requests=reduce(or_, [control.requests for control in controls]),
        left_out=tuple([group for group, control in enumerate(controls) if not control.finite]),
        outlying=count.outlying,
        outer_lr=outer.lr,
        outer_grad_norm=norm,
        bytes_sent=0,
        exposed_wait_s=0.0,
        in_flight_s=0.0,
        landed_at=step,
        bytes_received=0,
        counted=tuple(count.factors),
        group_norms=tuple([control.norm for control in controls]),
        spans=spans,
        diagnostics=None,
        step_times=tuple([control.step_time for control in controls]),
        wrong_buffers=count.wrong_buffers,
        direction_norm=outer.direction_norm,
    )


def norm_squared(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient)) ** 2


def whole_norm(norm: Tensor, group: Communicator) -> float:
    """Computes the norm of a whole fragment from the norms of its shards. In-group collective."""
    if group.size > 1:
        norm = torch.linalg.vector_norm(torch.cat(group.all_gather(norm.reshape(1))))
    return float(norm)
