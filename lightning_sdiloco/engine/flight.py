"""A fragment in flight: lines 7 to 11 of Algorithm 2, between its launch and its landing, while
training goes on.

A launch reads all that a flight carries. `Synchronizer.fly` runs in the background and owns all
that it writes to. What it returns, an `Arrival`, is committed when the fragment lands, and not
before.

Work in the background is a generator: what lies between two ``yield`` is a stage. Each stage takes
work in the order in which it was started, so one fragment is encoded while another one is on its
way and a third one makes its outer step.
"""

import itertools
import logging
import math
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from statistics import median
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.gossip import Brought, Taken, bring, take
from lightning_sdiloco.algorithm.merge import LandingRule, Mix
from lightning_sdiloco.algorithm.reduce import AllReduce, all_reduce_for
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES, Control, Count, combined, plain
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.exchange import Exchange, Unanswered, VaryingExchange
from lightning_sdiloco.comm.topology import STAGES, Topology
from lightning_sdiloco.compression import Compression, resolve
from lightning_sdiloco.engine.fragments import (
    Arrival,
    Diagnostics,
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

Result = TypeVar("Result")
Work = Generator[None, None, Result]

# A thread that ends at the same time as the interpreter may end the process.
_MOMENT = 0.5

# How many inner steps, and how many flights, are remembered for what is measured of them.
_REMEMBERED = 16
_FLIGHTS = 3

# Below so many values the control vector goes along in the message of the payload: another message
# would cost more than a copy. In one flight of so many it goes ahead all the same, which shows how
# long the payload is on the link.
_SHORT = 1 << 16
_AHEAD = 7

# The number of an engine times this goes into every digest: an odd number of 64 bits keeps all
# digests apart.
_ENGINE_DIGEST = 0x9E3779B97F4A7C15

_log = logging.getLogger(__name__)

# The stages of the background, each with its own communicator.
_SEND, _AVERAGE, _STEP = range(3)


class Synchronizer:
    """Flies fragments, with what is the same for all flights of a model that is cut in one way.

    Attributes:
        diagnoses: Whether flights measure how far the groups agree.
    """

    def __init__(
        self,
        fragments: Sequence[FragmentState],
        topology: Topology,
        settings: Settings,
        diagnoses: bool,
    ) -> None:
        self._fragments = fragments
        self._topology = topology
        self.diagnoses = diagnoses
        groups = topology.num_groups
        codec = settings.codec
        self._merge = settings.landing
        # In a leg each group sends its partners whole fragments.
        in_rounds = settings.exchange if settings.shares else "gather"
        self._rounded = all_reduce_for(in_rounds, groups, codec, self._merge.kept)
        self._exact = all_reduce_for(settings.exchange, groups, resolve("fp32"), self._merge.kept)
        self._weighing = settings.aggregation
        self._momentum = settings.routing.momentum(groups)
        self._exchange: Exchange[Any] = topology.exchange
        if codec.traits.varies:
            self._exchange = VaryingExchange(topology.control, topology.exchange)
        # It always goes ahead where messages wait until all are known to have launched, or their
        # lengths go ahead.
        self._short = _SHORT if topology.exchange.learns_sizes and not codec.traits.varies else 0
        self._flights = itertools.count()
        # If no group waits for a second hop, and no link is measured by when messages are waited
        # for, the outer step is made where the mean was taken: a thread that hands over to another
        # one takes as long as both. So is it where both hops have one exchange, which one thread
        # may use.
        relays = any(one.hops > 1 for one in (self._rounded, self._exact))
        relays = relays or any(fragment.untrained.outer for fragment in fragments)
        self._hands_over = codec.traits.varies or (
            relays and topology.second_hop is not topology.exchange
        )
        # For errors, where a process has more than one.
        self._of_engine = f" of engine {topology.engine}" if topology.engine > 1 else ""

    def fly(self, launch: Launch) -> Work[Arrival]:
        """Flies a fragment, in up to three stages. In-group collective, in the order of the
        launches on all ranks.
        """
        fragment = self._fragments[launch.fragment]
        topology = self._topology
        spans = dict[str, Span]()
        is_round = launch.purpose is Purpose.ROUND
        device = launch.gradient.device
        # Other means than an outer step make up for no earlier loss: they use no memory, and leave
        # none.
        memory, tuning = (
            (fragment.load(fragment.memory), fragment.load(fragment.tuning))
            if is_round
            else (None, None)
        )

        # Line 7: compress the outer gradient and send it.
        began = time.perf_counter()
        # Groups that are at unlike points count their flights alike, and learn from each other's
        # words where they are.
        word = self._control(launch, fragment)
        is_ahead = next(self._flights) % _AHEAD == 0 or launch.leg
        is_along = launch.gradient.numel() < self._short and not is_ahead
        words: Any = None if is_along else topology.control.post([word] * topology.num_groups)
        all_reduce = self._all_reduce(launch)
        brought = self._bring(launch, fragment) if launch.leg else None
        values = launch.gradient if brought is None else brought.values
        encoded = all_reduce.encode(values, memory, tuning)
        head = [word.to(device)] if is_along else []
        messages: Any = _messages(head, encoded.payloads, launch.leg)
        posted_at = time.perf_counter()
        posted: Any = self._exchange.post(
            messages, [one.numel() for one in messages] if launch.leg else None
        )
        spans["encode"] = span_from(began, device)
        measures = self.diagnoses and is_round
        loss = (
            _squares([all_reduce.decode_own(encoded.payloads, values) - values, values])
            if measures
            else None
        )
        memory = encoded.memory
        tuning = encoded.tuning
        del encoded, messages, head, values
        if not is_round:
            # Only a round that is saved in flight needs it again.
            launch = launch.without_values()
        yield

        # Line 8: take the mean of what the groups sent; with two hops the mean of a part, which
        # goes to all of them.
        began = time.perf_counter()
        posts = [] if is_along else [(topology.control, words)]
        posts.append((self._exchange, posted))
        (*others, messages), sent, received, arrived = self._collect(posts, launch, _AVERAGE)
        spans["transfer"] = span_from(began, device)
        parts = [one.tensor_split([CONTROL_BYTES if is_along else 0]) for one in messages]
        along, payloads = ([one[at] for one in parts] for at in range(2))
        on_link_s = math.nan
        if not is_along:
            (along,), encoding = others, spans["encode"][1] - spans["encode"][0]
            on_link_s = on_link(posted_at, began, arrived[0], arrived[1], encoding)
        controls = [Control.unpacked(one.cpu().numpy().data) for one in along]
        self._check(controls, launch)
        count = self._count(controls, launch)
        began = time.perf_counter()
        # If groups exchange only with some, the mean is over these.
        partners = launch.leg or range(topology.num_groups)
        counted = (
            count
            if not launch.leg
            else Count({at: 1.0 for at, g in enumerate(partners) if g in count.factors})
        )
        mean = all_reduce.mean(
            [payloads[g] for g in partners], counted, launch.gradient, topology.group_index
        )
        hop = all_reduce.second_hop(mean, fragment.load(fragment.residual) if is_round else None)
        # By now all know what has changed: constants do not travel.
        changed = reduce(or_, [own.changed for own in controls])
        travelling = fragment.untrained.travelling(changed) if launch.leg or count.factors else []
        posted_at = time.perf_counter()
        posts = []
        if travelling and topology.group_rank == 0:
            # Only one rank of a group sends buffers.
            posts.append((topology.second_hop, self._post_untrained(travelling, launch)))
        if hop is not None:
            sizes = all_reduce.second_hops(launch.gradient.numel())
            posts.append(
                (
                    topology.second_hop,
                    topology.second_hop.post([hop.payload] * topology.num_groups, sizes),
                )
            )
        agreed = None if loss is None else _agreement(payloads, all_reduce.compression, mean)
        twin = fragment.twin
        if brought is not None and count.factors:
            mean, twin = self._take(launch, fragment, brought, all_reduce, payloads, mean, count)
        # A part comes back as all groups decode it.
        mean = mean if hop is None else mean.new_empty(0)
        spans["decode"] = span_from(began, device)
        del words, others, along, messages, posted, payloads, parts, brought
        if self._hands_over:
            yield

        # Line 11: make the outer step with the mean of the whole shard.
        began = time.perf_counter()
        in_group = topology.stages[_STEP]
        residual = None
        untrained = NOTHING
        if hop is not None or travelling:
            received_messages, sent_on, received_on, arrived = self._collect(posts, launch, _STEP)
            spans["relay"] = span_from(began, device)
            if hop is None:
                # A message that short tells nothing of the link: it is taken to be as fast as the
                # payload.
                on_link_s *= 1 + max(sent_on, received_on) / max(1, sent, received)
            sent = sent + sent_on
            received = received + received_on
            if hop is not None:
                on_link_s += on_link(posted_at, began, posted_at, arrived[-1], 0.0)
                mean = all_reduce.assemble(received_messages.pop(), like=launch.gradient)
                residual = hop.residual
            if travelling:
                untrained = self._untrained(received_messages, travelling, launch, count)
            # Received messages are freed before the outer step makes new tensors.
            del received_messages, hop
            posts.clear()
        # The outer step takes the mean.
        norm = whole_norm(fragment.norm(launch.purpose, mean), in_group)
        began = time.perf_counter()
        step = partial(outer_step, fragment, fragment.outer, launch.outer, mean, in_group)
        outer = step(counts=bool(count.factors), final=not is_round, is_dense=launch.is_dense)
        rule: LandingRule = Mix(0.0)
        if (
            is_round
            and controls[topology.group_index].finite
            and topology.group_index not in count.outlying
        ):
            # Where no group has trained, nothing moves.
            rule = self._merge if count.factors else Mix(1.0)
        rows = rule.gathered(launch.gradient, launch.outer, outer.values)
        gathered = [fragment.layout.all_gather(row, in_group) for row in rows]
        spans["outer_step"] = span_from(began, device)
        report = reported(launch.fragment, launch.step, controls, count, outer, norm, spans)
        report = report._replace(bytes_sent=sent, bytes_received=received, on_link_s=on_link_s)
        if loss is not None and agreed is not None:
            report = report._replace(
                diagnostics=_diagnosed(loss, agreed, launch, outer.state, in_group)
            )
        changes: dict[str, Any] = {"outer": outer.moved(fragment.storage.store)}
        if is_round:
            changes["twin"] = fragment.store(twin)
            if not launch.leg:  # A leg holds no mean of all groups, by which they could be weighed.
                changes["weighing"] = self._weighing.heard(controls, fragment.weighing)
            if topology.group_index in count.factors:
                changes |= {"memory": fragment.store(memory), "tuning": fragment.store(tuning)}
            if count.factors and residual is not None:
                changes["residual"] = fragment.store(residual)
        weights = [own.weight for own in controls]
        return Arrival(
            changes,
            rule,
            gathered,
            untrained,
            changed,
            weights,
            report,
            self._exchange.sends_bytes_per_s,
        )

    def _all_reduce(self, launch: Launch) -> AllReduce:
        if launch.purpose is Purpose.ROUND:
            return self._rounded.at(launch.step, launch.choice)
        return self._exact

    def _control(self, launch: Launch, fragment: FragmentState) -> Tensor:
        """Returns the control vector of this group, as bytes. In-group collective."""
        norm = float(fragment.norm(launch.purpose, launch.gradient)) ** 2
        own = Control(
            fragment=launch.fragment,
            step=launch.step,
            requests=launch.requests,
            # A norm that is not finite does not decide: it may overflow where every value is
            # finite.
            finite=math.isfinite(norm) or bool(launch.gradient.isfinite().all()),
            weight=launch.weight,
            digest=combined([fragment.digest(launch), _ENGINE_DIGEST * self._topology.engine]),
            norm_squared=norm,
            changed=self._changed(launch, fragment),
            step_time=launch.step_time,
        )
        word = torch.frombuffer(own.packed(), dtype=torch.uint8)
        if self._topology.group_size == 1:
            return word
        ranks = [
            Control.unpacked(rank.numpy().data)
            for rank in self._topology.stages[_SEND].all_gather(word)
        ]
        return torch.frombuffer(Control.merged(ranks).packed(), dtype=torch.uint8)

    def _changed(self, launch: Launch, fragment: FragmentState) -> int:
        # Groups with unlike outer values cannot say what has changed.
        is_unlike = launch.purpose is Purpose.START or not fragment.shares
        return fragment.untrained.changed(launch.buffers, everything=is_unlike)

    def _count(self, controls: Sequence[Control], launch: Launch) -> Count:
        if launch.leg:
            # Where groups are has a mean, whether they have trained or not.
            return Count({group: 1.0 for group in launch.leg if controls[group].finite})
        if launch.purpose is Purpose.ROUND:
            return self._weighing.count(controls, self._fragments[launch.fragment].weighing)
        return plain(controls)

    def _post_untrained(self, travelling: Sequence[int], launch: Launch) -> Any:
        """Starts to send the untrained state that travels."""
        exchange = self._topology.second_hop
        message = torch.cat([to_bytes(launch.buffers[index]) for index in travelling]).to(
            exchange.device
        )
        partners = launch.leg or range(self._topology.num_groups)
        sizes = [
            message.numel() if group in partners else 0
            for group in range(self._topology.num_groups)
        ]
        return exchange.post([message[:size] for size in sizes], sizes)

    def _untrained(
        self,
        messages: Sequence[Sequence[Tensor]],
        travelling: Sequence[int],
        launch: Launch,
        count: Count,
    ) -> Arrived:
        """Returns what becomes of the untrained state that travels, given what groups sent.
        In-group collective.
        """
        if not count.factors:
            return NOTHING
        state = self._fragments[launch.fragment].untrained
        size = arrived_bytes(state, travelling)
        flat = torch.empty(size, dtype=torch.uint8, device=launch.gradient.device)
        if self._topology.group_rank == 0:
            (of_groups,) = messages
            # Where rounds start, each group has its own values for the outer ones.
            keeps_outer = launch.purpose is not Purpose.START
            speaks = self._topology.group_index == min(launch.leg, default=0)
            sizes = [state.nbytes(index) for index in travelling]
            pieces = {
                f"worker group {group}": of_groups[group].to(flat.device).split(sizes)
                for group in count.factors
            }
            sent = {
                index: {who: of_group[position] for who, of_group in pieces.items()}
                for position, index in enumerate(travelling)
            }
            flat.copy_(agreed(state, sent, keeps_outer=keeps_outer, speaks=speaks))
        self._topology.stages[_STEP].broadcast(flat)
        return arrived(state, travelling, flat, launch.buffers)

    # A route that does not share; see [Note: gossip]

    def _bring(self, launch: Launch, fragment: FragmentState) -> Brought:
        anchor = fragment.load(fragment.anchor)
        twin = fragment.load(fragment.twin)
        assert anchor is not None, "groups hold their own outer parameters"
        return bring(launch.outer, launch.gradient, anchor, twin, self._momentum)

    def _take(
        self,
        launch: Launch,
        fragment: FragmentState,
        brought: Brought,
        all_reduce: AllReduce,
        payloads: Sequence[Tensor],
        mean: Tensor,
        count: Count,
    ) -> Taken:
        group = self._topology.group_index
        anchor = fragment.load(fragment.anchor)
        assert anchor is not None, "groups hold their own outer parameters"
        own = all_reduce.decode_own([payloads[group]], launch.gradient)
        return take(
            brought, own, mean, launch.outer, anchor, group in count.factors, self._momentum
        )

    # What comes, and what does not

    def _collect(
        self, posts: Sequence[tuple[Exchange[Any], Any]], launch: Launch, stage: int
    ) -> tuple[list[list[Tensor]], int, int, list[float]]:
        """Waits for messages; returns them, the bytes sent and received, and when each exchange
        had its own.
        """
        exchanges = list(dict.fromkeys(exchange for exchange, _ in posts))
        before = [(exchange.bytes_sent, exchange.bytes_received) for exchange in exchanges]
        messages = list[list[Tensor]]()
        arrived = list[float]()
        missing: Unanswered | None = None
        try:
            for exchange, posted in posts:
                messages.append(exchange.collect(posted, launch.deadline))
                arrived.append(time.perf_counter())
        except Unanswered as error:
            missing = error
        if self._topology.group_size > 1:
            missing = self._told(missing, stage)
        if missing is not None:
            raise ExchangeError(
                f"{missing} while fragment {launch.fragment}, launched after inner step"
                f" {launch.step}, was in flight."
                " The run cannot continue without it. Find out why that group stopped or is"
                " unreachable; if it was only"
                " slow, raise timeout."
            ) from missing
        sent = sum(
            [
                exchange.bytes_sent - was
                for exchange, (was, _) in zip(exchanges, before, strict=True)
            ]
        )
        received = sum(
            [
                exchange.bytes_received - was
                for exchange, (_, was) in zip(exchanges, before, strict=True)
            ]
        )
        return messages, sent, received, arrived

    def _told(self, missing: Unanswered | None, stage: int) -> Unanswered | None:
        """Shares with the ranks of this group what this one misses; returns that, or what another
        one misses.
        """
        # A number for which group it is: -1 for none, the number of groups where it is not known.
        groups = self._topology.num_groups
        size = self._topology.group_size
        code = -1 if missing is None else groups if missing.group is None else missing.group
        codes = torch.cat(self._topology.stages[stage].all_gather(torch.tensor([code]))).tolist()
        if missing is not None or max(codes) < 0:
            return missing
        shard = codes.index(max(codes))
        code = max(codes)
        own, other = (size * of + shard for of in (self._topology.group_index, code))
        if code == groups:
            return Unanswered(None, f"did not answer rank {own} of this group")
        return Unanswered(
            code, f"did not answer rank {own} of this group (rank {other} should have)"
        )

    def _check(self, controls: Sequence[Control], launch: Launch) -> None:
        """Raises an `AgreementError` unless all groups are at one point with one outer model, and
        one is finite.
        """
        own = controls[self._topology.group_index]
        leg = launch.leg or range(len(controls))
        values: dict[int, Any] = {
            group: one[:2] for group, one in enumerate(controls)
        }  # fragment and step
        what = "are not at the same point"
        if len(set(values.values())) == 1:
            values = {group: controls[group].digest for group in leg}
            differs = "did not begin from" if launch.leg else "do not hold"
            has_buffers = bool(self._fragments[launch.fragment].untrained.names) and not launch.leg
            alike = "outer parameters and buffers" if has_buffers else "outer parameters"
            what = f"{differs} the same {alike}"
        if len(set(values.values())) > 1:
            told = ", ".join(f"group {group}: {value}" for group, value in values.items())
            raise AgreementError(
                f"The worker groups {what} at the launch of fragment"
                f" {own.fragment}{self._of_engine} after inner step"
                f" {own.step} ({told}). If training went on, they would drift apart unnoticed."
                " Resume all groups from"
                " one checkpoint."
            )
        # In a leg without finite values, each group goes back to its own outer parameters.
        if not any(control.finite for control in controls):
            raise AgreementError(
                f"The outer gradient of fragment {launch.fragment}, launched after inner step"
                f" {launch.step}, is not"
                " finite in any worker group"
                f" ({', '.join(f'group {g}' for g in range(len(controls)))}). Training has"
                " diverged: resume from an earlier checkpoint with a lower learning rate or with"
                " gradient clipping."
            )


def _messages(
    head: Sequence[Tensor], payloads: Sequence[Tensor], leg: Sequence[int]
) -> list[Tensor]:
    """Makes the messages to all groups, one for those that share a payload: what goes along, and
    the payload.
    """
    messages = {id(one): one for one in payloads}
    if head:
        for one in messages.values():
            parts = [*head, one]
            whole = new_vector(sum(part.numel() for part in parts), one.device, torch.uint8)
            messages[id(one)] = torch.cat(parts, out=whole)
    # Groups that are not partners exchange nothing.
    return [
        messages[id(one)][: 0 if leg and group not in leg else None]
        for group, one in enumerate(payloads)
    ]


# Arithmetic that worker groups which are launched together share with the sites of a federation


def outer_step(
    fragment: FragmentState,
    before: OuterState,
    values: Tensor,
    gradient: Tensor,
    group: Communicator,
    *,
    counts: bool,
    final: bool,
    is_dense: bool,
) -> OuterState:
    """Returns the outer state after a landing; its values are on the device of the gradient, which
    it takes.

    In-group collective.
    """
    if not final and counts:
        norm = math.nan
        if fragment.matrices.stacks:
            fragment.matrices.direct(gradient, group)
            norm = whole_norm(torch.linalg.vector_norm(gradient), group)
        after = fragment.optimizer.step(fragment.index, before, values, gradient, is_dense=is_dense)
        return after._replace(direction_norm=norm)
    return before._replace(
        values=torch.sub(values, gradient, out=gradient) if final else values,
        lr=0.0,
        direction_norm=math.nan,
    )


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
        direction_norm=outer.direction_norm,
    )


def norm_squared(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient)) ** 2


def whole_norm(norm: Tensor, group: Communicator) -> float:
    """Returns the norm of a whole fragment, given that of this rank's shard. In-group
    collective.
    """
    if group.size > 1:
        norm = torch.linalg.vector_norm(torch.cat(group.all_gather(norm.reshape(1))))
    return float(norm)


def span_from(began: float, device: torch.device) -> Span:
    """Ends a part of a flight: waits for the stream of the background, so that the part holds what
    it started.
    """
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
    return began, time.perf_counter()


# The background: where flights are worked on


class Pending(Generic[Result]):
    def __init__(self, work: Work[Result], ready: Any = None) -> None:
        self._work: Work[Result] | None = work
        self._result: Any = None
        self._failure: BaseException | None = None
        self._is_running = threading.Lock()
        self._is_running.acquire()
        self._started = self._ended = time.perf_counter()
        self.ready = ready

    def advance(self, settle: Callable[[], None] | None = None) -> bool:
        """Runs the next stage, and returns whether there is another one. Gradients must not be
        recorded.
        """
        assert self._work is not None, "work that has ended does not go on"
        try:
            next(self._work)
            return True
        except StopIteration as ended:
            self._result = ended.value
        except BaseException as error:  # it is raised again where the result is asked for
            self._failure = error
        # The frame of the work is gone, and with it all that it held: once the result is out, the
        # interpreter may end, and a thread that frees a tensor meanwhile ends the process.
        self._work = None
        try:
            if settle is not None and self._failure is None:
                settle()
        except BaseException as error:
            self._failure = error
        self._ended = time.perf_counter()
        self._is_running.release()
        return False

    def result(self) -> Result:
        """Waits for the result and returns it, or raises the exception with which the work
        ended.
        """
        with self._is_running:
            pass
        if self._failure is not None:
            raise self._failure
        return cast(Result, self._result)

    @property
    def is_ready(self) -> bool:
        return not self._is_running.locked()

    @property
    def seconds(self) -> float:
        return self._ended - self._started


class Background(ABC):
    @abstractmethod
    def start(self, work: Work[Result]) -> Pending[Result]:
        """Starts work. Every stage takes work in the order of its start."""

    @abstractmethod
    def close(self) -> None: ...


class ThreadBackground(Background):
    """Runs every stage in its own worker thread, on an accelerator in a side stream."""

    def __init__(self, device: torch.device) -> None:
        queues = [_Queue() for _ in range(STAGES)]
        self._first = queues[0]
        self._streams = _Streams(device) if device.type != "cpu" else None
        # The threads know the queues and not this object, so that they end even if it is never
        # closed.
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(own, after, self._streams),
                name="sdiloco-background",
                daemon=True,
            )
            for own, after in zip(queues, [*queues[1:], None], strict=True)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, self._first.put, None)

    def start(self, work: Work[Result]) -> Pending[Result]:
        pending = Pending(work, self._streams and self._streams.mark())
        self._first.put(pending)
        return pending

    def close(self) -> None:
        """Ends the worker threads once their queues are empty, and waits a moment for that."""
        self._first.put(None)
        deadline = time.monotonic() + _MOMENT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


_Queue = queue.SimpleQueue["Pending[Any] | None"]


def _serve(own: _Queue, following: _Queue | None, streams: "_Streams | None") -> None:
    torch.set_grad_enabled(False)
    while (pending := own.get()) is not None:
        goes_on = pending.advance() if streams is None else streams.advance(pending)
        if goes_on and following is not None:
            following.put(pending)
        del pending
    if following is not None:
        following.put(None)


class _Streams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._side = self._module.Stream(device=device)

    def mark(self) -> Any:
        """Records an event behind everything that the training stream has been given so far."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def advance(self, pending: Pending[Any]) -> bool:
        with self._module.device(self._device), self._module.stream(self._side):
            self._side.wait_event(pending.ready)
            # Waiting here, in a worker thread, lets the training thread use the result without an
            # event.
            return pending.advance(settle=self._side.synchronize)


class InlineBackground(Background):
    """Runs without threads: the first stage when work starts, the others when its result is asked
    for.
    """

    def __init__(self, started: "dict[int, list[_Inline[Any]]]", groups: int) -> None:
        self._all = started
        self._groups = groups
        self._count = 0

    @staticmethod
    def connect(groups: int) -> "list[Callable[[torch.device], InlineBackground]]":
        """Returns what makes the backgrounds of several groups in this process, in their order."""
        started: dict[int, list[_Inline[Any]]] = defaultdict(list)
        return [lambda device: InlineBackground(started, groups) for _ in range(groups)]

    def start(self, work: Work[Result]) -> Pending[Result]:
        together = self._all[self._count]
        pending = _Inline(work, together)
        together.append(pending)
        if len(together) == self._groups:
            del self._all[self._count]
        self._count += 1
        return pending

    def close(self) -> None: ...


class _Inline(Pending[Result]):
    is_ready = True
    seconds = 0.0

    def __init__(self, work: Work[Result], together: "list[_Inline[Any]]") -> None:
        super().__init__(work)
        with torch.no_grad():
            self._together, self._is_first = together, self.advance()

    @torch.no_grad()
    def result(self) -> Result:
        # Others need what a group averages before they go on.
        for pending in self._together:
            if pending._is_first:
                pending._is_first = False
                pending.advance()
        while self._work is not None:
            self.advance()
        return super().result()


@dataclass(frozen=True)
class Flight:
    launch: Launch
    pending: Pending[Arrival]
    launched: Span


def completed(told: Landing, launch: Span, wait: Span, seconds: float, step: int) -> Landing:
    """Completes a flight's report, in the training thread; ``seconds`` is how long the flight
    took.
    """
    launched, (began, arrived) = launch[1], wait
    ended = max([launched + seconds, *[ended for _, ended in told.spans.values()]])
    spans = {
        "launch": launch,
        "flight": (launched, min(ended, arrived)),
        **told.spans,
        "wait": wait,
    }
    return told._replace(
        exposed_wait_s=arrived - began,
        in_flight_s=seconds,
        landed_at=step,
        spans={**spans, "land": (arrived, time.perf_counter())},
    )


# Measurements


class StepClock:
    """Measures how long this rank trains for an inner step, from the end of one call of the engine
    to the next.

    What the engine itself waits for is left out. Pauses, as for a validation, are too, by a median.

    Args:
        seconds: What it says in place of what it measures.

    Examples:
        >>> clock = StepClock()
        >>> for ended, began in ((0.0, 4.0), (1.0, 1.5), (2.0, 2.25), (3.0, 9.0)):
        ...     clock.note(ended, began)
        >>> clock.seconds
        0.5
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._last: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, ended: float, began: float) -> None:
        """Notes an inner step: when the last call of the engine ended, or 0 if there was none, and
        this one began.
        """
        if ended:
            self._last.append(began - ended)

    @property
    def seconds(self) -> float:
        return self._seconds or (median(self._last) if self._last else 0.0)


class LinkRate:
    """Remembers what the link of this rank carried: the most in its last flights, since one may
    have stalled.

    Attributes:
        last: What it was told, the last few.
        fixed: What it says in place of that, in bytes per second, for simulations.

    Examples:
        >>> link = LinkRate()
        >>> for rate in (1e6, 2e6, 1e3, 0.0, 5e5, 4e5):
        ...     link.note(rate)
        >>> link.bytes_per_s
        500000.0
    """

    def __init__(self) -> None:
        self.last: list[float] = []
        self.fixed = 0.0

    def note(self, bytes_per_s: float) -> None:
        """Notes what it carried to each receiver in a flight; 0 if that is not known."""
        if bytes_per_s > 0:
            self.last = [*self.last, bytes_per_s][-_FLIGHTS:]

    @property
    def bytes_per_s(self) -> float:
        return self.fixed or max(self.last, default=0.0)


def on_link(posted: float, began: float, launched: float, ended: float, encoding: float) -> float:
    """Returns for how many seconds the messages of the other groups were on the link, from when all
    could travel.

    A message travels once its receiver has posted its own. Who waits for it learns when it came,
    but not if it was there already when the wait began, or with the word that its group has
    launched: an encoding lies between the two. Then it is NaN.

    Args:
        posted: When this rank posted its own messages.
        began: When it began to wait for the others' messages.
        launched: When it learned that all groups have launched.
        ended: When their messages were there.
        encoding: How long this rank encoded its own.

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


def _squares(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(
        [torch.linalg.vector_norm(vector, dtype=torch.float64).square() for vector in vectors]
    )


def _agreement(payloads: Sequence[Tensor], compression: Compression, mean: Tensor) -> Tensor:
    """Returns the squared norm of a mean; then, by group, that of what it sent and its inner
    product with the mean.
    """
    sums = [_squares([mean])]
    decoded = torch.empty_like(mean)
    for payload in payloads:
        if not payload.numel():  # Nothing came from this group.
            sums.append(torch.full((2,), math.nan, dtype=torch.float64, device=mean.device))
            continue
        compression.decode(payload, decoded)
        sums += [_squares([decoded]), torch.dot(decoded, mean).double().reshape(1)]
    return torch.cat(sums)


def _diagnosed(
    loss: Tensor,
    agreement: Tensor,
    launch: Launch,
    state: Mapping[str, Any],
    in_group: Communicator,
) -> Diagnostics:
    """Returns how far the groups agree, after the outer step made this state. In-group
    collective.
    """
    # What torch's optimizers call the running mean of their gradients.
    kept = next(
        (
            state[name]
            for name in ("momentum_buffer", "exp_avg")
            if isinstance(state.get(name), Tensor)
        ),
        None,
    )
    moved = [launch.gradient, launch.outer] + (
        [] if kept is None else [kept.to(launch.outer.device)]
    )
    unknown = torch.full(
        (3 - len(moved),), math.nan, dtype=torch.float64, device=launch.outer.device
    )
    ranks = in_group.all_gather(torch.cat([loss, agreement, _squares(moved), unknown]).cpu())
    error, gradient, mean, *groups, local, outer, momentum = torch.stack(ranks).sum(dim=0).tolist()

    def ratio(value: float, of: float) -> float:
        return value / of if of > 0 else math.nan

    return Diagnostics(
        cosines=tuple(
            ratio(by, math.sqrt(mean * own))
            for own, by in zip(groups[::2], groups[1::2], strict=True)
        ),
        local_distance=math.sqrt(ratio(local, outer)),
        outer_momentum_norm=math.sqrt(momentum),
        compression_error=math.sqrt(ratio(error, gradient)),
    )
