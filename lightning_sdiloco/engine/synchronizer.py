"""Lines 7 to 11 of Algorithm 2: what happens to a fragment between its launch and its landing.

`Synchronizer.fly` runs in the background and owns all that it writes to. What it returns is committed when the fragment
lands, and not before.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from lightning_sdiloco.algorithm import (
    CONTROL_BYTES,
    HOST_BYTES,
    AllReduce,
    Brought,
    Control,
    Count,
    LandingRule,
    Mix,
    Settings,
    Taken,
    all_reduce_for,
    bring,
    plain,
    take,
    trained,
)
from lightning_sdiloco.comm import Communicator, Exchange, Topology, Unanswered, VaryingExchange
from lightning_sdiloco.compression import resolve
from lightning_sdiloco.engine.background import Work
from lightning_sdiloco.engine.flight import Arrival, Landing, Launch, Purpose
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.measurements import Span, agreement, diagnosed, distance, lost, on_link
from lightning_sdiloco.engine.outer.optimizer import OuterState
from lightning_sdiloco.errors import AgreementError, ExchangeError
from lightning_sdiloco.memory import new_vector

_log = logging.getLogger(__name__)

# The stages of the background, each with a communicator of its own.
_SEND, _AVERAGE, _STEP = range(3)

_HEAD_BYTES = CONTROL_BYTES - HOST_BYTES
# What stands for the device's part of a control vector of a group that is no partner.
_UNKNOWN = Control(0, 0, 0, 0, 0, norm_squared=math.nan, changed=0, finite=True).packed()[HOST_BYTES:]


class Synchronizer:
    """Flies fragments, with what is the same for all flights of a model that is cut in one way."""

    def __init__(
        self,
        fragments: Sequence[FragmentState],
        topology: Topology,
        settings: Settings,
        diagnoses: bool,
    ) -> None:
        self._fragments, self._topology, self._diagnoses = fragments, topology, diagnoses
        groups, codec, self._merge = topology.num_groups, settings.codec, settings.landing
        self._rounded = all_reduce_for(settings.exchange_in_rounds, groups, codec, self._merge.kept)
        self._exact = all_reduce_for(settings.exchange, groups, resolve("fp32"), self._merge.kept)
        self._weighing, self._momentum = settings.aggregation, settings.routing.momentum(groups)
        self._exchange: Exchange[Any] = topology.exchange
        if codec.varies():
            self._exchange = VaryingExchange(topology.control, topology.exchange)

    def fly(self, launch: Launch) -> Work[Arrival]:
        """Flies a fragment, in three stages. In-group collective, in the order of the launches on all ranks."""
        fragment, topology, spans = self._fragments[launch.fragment], self._topology, dict[str, Span]()
        is_round, device = launch.purpose is Purpose.ROUND, launch.gradient.device
        # What is no outer step makes up for no earlier loss: it takes no memory along, and leaves none.
        memory, tuning = (fragment.load(fragment.memory), fragment.load(fragment.tuning)) if is_round else (None, None)

        # Line 7: compress the outer gradient and send it, behind what goes with it.
        began = time.perf_counter()
        tail, control = self._tail(launch), self._control(launch, fragment)
        words: Any = topology.control.post([control[:HOST_BYTES]] * topology.num_groups)
        all_reduce = self._rounded.at(launch.step, launch.choice) if is_round else self._exact
        brought = self._bring(launch, fragment) if launch.leg else None
        values = launch.gradient if brought is None else brought.values
        encoded = all_reduce.encode(values, memory, tuning)
        messages: Any = _messages(control[HOST_BYTES:].to(device), encoded.payloads, tail, launch.leg)
        posted_at = time.perf_counter()
        posted: Any = self._exchange.post(messages, [one.numel() for one in messages] if launch.leg else None)
        spans["encode"] = span_from(began, device)
        measures = self._diagnoses and is_round
        loss = lost(values, all_reduce.decode_own(encoded.payloads, values)) if measures else None
        memory, tuning, tail_bytes = encoded.memory, encoded.tuning, sum(part.numel() for part in tail)
        del encoded, messages, tail, values
        yield

        # Line 8: take the mean of what the groups sent; with two hops that of a part, which goes on to all of them.
        began, posts = time.perf_counter(), [(topology.control, words), (self._exchange, posted)]
        (words, messages), sent, received, arrived = self._collect(posts, launch, _AVERAGE)
        spans["transfer"] = span_from(began, device)
        on_link_s = on_link(posted_at, began, arrived[0], arrived[1], spans["encode"][1] - spans["encode"][0])
        controls, payloads, tails = _taken_apart(words, messages, tail_bytes)
        self._check(controls, launch)
        count, began = self._count(controls, launch), time.perf_counter()
        mean = self._mean(all_reduce, payloads, count, launch)
        hop = all_reduce.second_hop(mean, fragment.load(fragment.residual) if is_round else None)
        posted_at, posts = time.perf_counter(), []
        if hop is not None:
            sizes = all_reduce.second_hops(launch.gradient.numel())
            posts = [(topology.second_hop, topology.second_hop.post([hop.payload] * topology.num_groups, sizes))]
        agreed = None if loss is None else agreement(payloads, all_reduce.compression, mean)
        twin = fragment.twin
        if brought is not None and count.factors:
            mean, twin = self._take(launch, fragment, brought, all_reduce, payloads, mean, count)
        # A part comes back as all groups decode it.
        mean = mean if hop is None else mean.new_empty(0)
        spans["decode"] = span_from(began, device)
        buffers = self._mean_buffers(tails, count, launch)
        del words, messages, posted, payloads, tails, brought
        yield

        # Line 11: make the outer step with the mean of the whole shard.
        began, in_group = time.perf_counter(), topology.stages[_STEP]
        if hop is not None:
            (payloads,), sent_on, received_on, arrived = self._collect(posts, launch, _STEP)
            spans["relay"] = span_from(began, device)
            on_link_s += on_link(posted_at, began, posted_at, arrived[0], 0.0)
            sent, received = sent + sent_on, received + received_on
            mean = all_reduce.assemble(payloads, like=launch.gradient)
            del payloads
        # The outer step takes the mean.
        norm = whole_norm(fragment.change(launch.purpose, mean), in_group)
        began = time.perf_counter()
        outer = outer_step(fragment, fragment.outer, launch.outer, mean, counts=bool(count.factors), final=not is_round)
        rule = self._rule(controls[topology.group_index], count, is_round)
        rows = rule.gathered(launch.gradient, launch.outer, outer.values)
        gathered = [fragment.layout.all_gather(row, in_group) for row in rows]
        spans["outer_step"] = span_from(began, device)
        report = reported(launch.fragment, launch.step, controls, count, outer.lr, norm, spans)
        report = report._replace(bytes_sent=sent, bytes_received=received, on_link_s=on_link_s)
        if loss is not None and agreed is not None:
            moved = distance(launch.gradient, launch.outer, outer.state)
            report = report._replace(diagnostics=diagnosed(loss, agreed, moved, in_group))
        changes: dict[str, Any] = {"outer": outer.moved(fragment.storage.store)}
        if is_round:
            changes["twin"] = fragment.store(twin)
            if not launch.leg:  # A leg holds no mean of all groups, by which they could be weighed.
                changes["weighing"] = self._weighing.heard(controls, fragment.weighing)
            if topology.group_index in count.factors:
                changes |= {"memory": fragment.store(memory), "tuning": fragment.store(tuning)}
            if count.factors and hop is not None:
                changes["residual"] = fragment.store(hop.residual)
        weights, changed = [own.weight for own in controls], reduce(or_, (own.changed for own in controls))
        return Arrival(changes, rule, gathered, buffers, changed, weights, report, self._exchange.sends_bytes_per_s)

    def _control(self, launch: Launch, fragment: FragmentState) -> Tensor:
        """Returns the control vector of this group, as bytes. In-group collective."""
        norm = norm_squared(fragment.change(launch.purpose, launch.gradient))
        is_gradient = launch.purpose is Purpose.GRADIENT
        own = Control(
            fragment=launch.fragment,
            step=launch.step,
            requests=launch.requests,
            # A norm that is not finite does not decide: it may overflow where every value is finite. Gradients that
            # are not finite make the inner optimizers of all groups skip the step, if there is a GradScaler.
            finite=is_gradient or math.isfinite(norm) or bool(launch.gradient.isfinite().all()),
            weight=launch.weight,
            digest=fragment.digest(launch),
            norm_squared=norm,
            changed=0 if is_gradient else fragment.buffers.changed(launch.buffers),
            step_time=launch.step_time,
        )
        if self._topology.group_size == 1:
            return own.packed()
        ranks = self._topology.stages[_SEND].all_gather(own.packed())
        return Control.merged(list(map(Control.unpacked, ranks))).packed()

    def _tail(self, launch: Launch) -> list[Tensor]:
        """Returns the buffers at the end of the message, as bytes. Only one rank of a group sends them."""
        if self._topology.group_rank != 0:
            return []
        return [launch.buffers[index].reshape(-1).view(torch.uint8) for index in launch.travelling]

    # The mean

    def _count(self, controls: Sequence[Control], launch: Launch) -> Count:
        """Returns how much each group counts."""
        if launch.leg:
            # Where groups are has a mean, whether they have trained or not.
            return Count({group: 1.0 for group in launch.leg if controls[group].finite})
        if launch.purpose is Purpose.ROUND:
            return self._weighing.count(controls, self._fragments[launch.fragment].weighing)
        return trained(controls) if launch.purpose is Purpose.GRADIENT else plain(controls)

    def _mean(self, all_reduce: AllReduce, payloads: Sequence[Tensor], count: Count, launch: Launch) -> Tensor:
        """Returns the mean of what the groups sent that count, or of those of them that are in the leg."""
        if launch.leg:
            payloads = [payloads[group] for group in launch.leg]
            count = Count({at: 1.0 for at, group in enumerate(launch.leg) if group in count.factors})
        return all_reduce.mean(payloads, count, launch.gradient, self._topology.group_index)

    def _mean_buffers(self, tails: Sequence[Tensor], count: Count, launch: Launch) -> dict[int, Tensor]:
        """Returns the plain mean of the buffers that travel, over the groups that count. In-group collective."""
        if not launch.travelling or not count.factors:
            return {}
        own = [launch.buffers[index] for index in launch.travelling]
        flat = torch.cat([buffer.reshape(-1) for buffer in own])
        if self._topology.group_rank == 0:
            buffers = self._fragments[launch.fragment].buffers
            outer = {buffers.names[index]: buffers.outer[index] for index in launch.travelling}
            # Where rounds start, each group has its own buffers for the outer ones.
            keeps = launch.purpose is not Purpose.START
            counted = {f"worker group {group}": tails[group] for group in count.factors}
            speaks = self._topology.group_index == min(launch.leg, default=0)
            flat = mean_of_buffers(counted, outer, keeps=keeps, says=speaks)
        self._topology.stages[_AVERAGE].broadcast(flat)
        parts = zip(launch.travelling, flat.split([buffer.numel() for buffer in own]), own, strict=True)
        return {index: part.view_as(buffer) for index, part, buffer in parts}

    def _rule(self, own: Control, count: Count, is_round: bool) -> LandingRule:
        """Returns how this group takes the result in."""
        if not is_round or not own.finite or self._topology.group_index in count.outlying:
            return Mix(0.0)
        # Where no group has trained, nothing moves.
        return self._merge if count.factors else Mix(1.0)

    # A route that does not share; see [Note: gossip]

    def _bring(self, launch: Launch, fragment: FragmentState) -> Brought:
        anchor, twin = fragment.load(fragment.anchor), fragment.load(fragment.twin)
        assert anchor is not None, "groups hold outer parameters of their own"
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
        group, anchor = self._topology.group_index, fragment.load(fragment.anchor)
        assert anchor is not None, "groups hold outer parameters of their own"
        own = all_reduce.decode_own([payloads[group]], launch.gradient)
        return take(brought, own, mean, launch.outer, anchor, group in count.factors, self._momentum)

    # What comes, and what does not

    def _collect(
        self, posts: Sequence[tuple[Exchange[Any], Any]], launch: Launch, stage: int
    ) -> tuple[list[list[Tensor]], int, int, list[float]]:
        """Waits for messages; returns them, the bytes sent and received, and when each exchange had its own."""
        sent, received = (-sum(of) for of in zip(*((e.bytes_sent, e.bytes_received) for e, _ in posts), strict=True))
        messages, arrived = list[list[Tensor]](), list[float]()
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
                f"{missing} while fragment {launch.fragment}, launched after inner step {launch.step}, was in"
                " flight. The run cannot go on without it. See why that group stopped or is unreachable; if it was only"
                " slow, raise timeout."
            ) from missing
        sent += sum(exchange.bytes_sent for exchange, _ in posts)
        received += sum(exchange.bytes_received for exchange, _ in posts)
        return messages, sent, received, arrived

    def _told(self, missing: Unanswered | None, stage: int) -> Unanswered | None:
        """Tells the ranks of this group what this one misses; returns that, or else what another one misses."""
        # A number for which group it is: -1 for none, the number of groups where it is not known.
        groups, size = self._topology.num_groups, self._topology.group_size
        code = -1 if missing is None else groups if missing.group is None else missing.group
        codes = torch.cat(self._topology.stages[stage].all_gather(torch.tensor([code]))).tolist()
        if missing is not None or max(codes) < 0:
            return missing
        shard, code = codes.index(max(codes)), max(codes)
        own, other = (size * of + shard for of in (self._topology.group_index, code))
        if code == groups:
            return Unanswered(None, f"did not answer rank {own} of this group")
        return Unanswered(code, f"did not answer rank {own} of this group (rank {other} should have)")

    def _check(self, controls: Sequence[Control], launch: Launch) -> None:
        """Raises an `AgreementError` unless all groups are at one point with one outer model, and one is finite."""
        own, leg = controls[self._topology.group_index], launch.leg or range(len(controls))
        differs = "did not begin from" if launch.leg else "do not hold"
        has_buffers = bool(self._fragments[launch.fragment].buffers.names) and not launch.leg
        alike = "outer parameters and buffers" if has_buffers else "outer parameters"
        alike = "outer optimizer state" if launch.purpose is Purpose.START else alike
        for what, values in (
            ("are not at the same point", {group: (one.fragment, one.step) for group, one in enumerate(controls)}),
            (f"{differs} the same {alike}", {group: controls[group].digest for group in leg}),
        ):
            if len(set(values.values())) > 1:
                told = ", ".join(f"group {group}: {value}" for group, value in values.items())
                raise AgreementError(
                    f"The worker groups {what} at the launch of fragment {own.fragment} after inner step {own.step}"
                    f" ({told}). Training on would let them drift apart unseen. Resume all groups from one checkpoint."
                )
        # Of a leg without finite values, each group goes back to its own outer parameters.
        if not any(control.finite for control in controls):
            raise AgreementError(
                f"The outer gradient of fragment {launch.fragment}, launched after inner step {launch.step}, is not"
                f" finite in any worker group ({', '.join(f'group {g}' for g in range(len(controls)))}). Training has"
                " diverged: resume from an earlier checkpoint with a lower learning rate or with gradient clipping."
            )


# Messages: the device's part of the control vector, the payload, and the buffers behind it. The words, which the host
# knows, go ahead over a group of their own.


def _messages(head: Tensor, payloads: Sequence[Tensor], tail: Sequence[Tensor], leg: Sequence[int]) -> list[Tensor]:
    """Makes the messages to all groups, one for those that follow each other with the same payload."""
    messages: list[Tensor] = []
    for group, payload in enumerate(payloads):
        if group and payload is payloads[group - 1]:
            messages.append(messages[-1])
        else:
            parts = [head, payload, *tail]
            whole = new_vector(sum(part.numel() for part in parts), head.device, torch.uint8)
            messages.append(torch.cat(parts, out=whole))
    # Nothing goes to those who are no partners, and nothing comes from them.
    return [one if not leg or group in leg else head[:0] for group, one in enumerate(messages)]


def _taken_apart(
    words: Sequence[Tensor], messages: Sequence[Tensor], tail_bytes: int
) -> tuple[list[Control], list[Tensor], list[Tensor]]:
    """Returns the control vectors, payloads and tails of all groups. Words come from all, the rest from partners."""
    heads = [
        message[:_HEAD_BYTES].to(word.device) if message.numel() else _UNKNOWN
        for word, message in zip(words, messages, strict=True)
    ]
    ends = [message.numel() - tail_bytes for message in messages]
    return (
        [Control.unpacked(torch.cat(parts)) for parts in zip(words, heads, strict=True)],
        [message[_HEAD_BYTES:end] for message, end in zip(messages, ends, strict=True)],
        [message[end:] for message, end in zip(messages, ends, strict=True)],
    )


# Arithmetic that worker groups which are launched together share with the sites of a federation


def outer_step(
    fragment: FragmentState, before: OuterState, values: Tensor, gradient: Tensor, *, counts: bool, final: bool
) -> OuterState:
    """Returns the outer state after a landing; its values are on the device of the gradient, which it takes."""
    if not final and counts:
        return fragment.optimizer.step(fragment.index, before, values, gradient)
    return before._replace(values=torch.sub(values, gradient, out=gradient) if final else values, lr=0.0)


def reported(
    fragment: int,
    step: int,
    controls: Sequence[Control],
    count: Count,
    outer_lr: float,
    norm: float,
    spans: Mapping[str, Span],
) -> Landing:
    """Returns what can be told of a flight before it has landed."""
    return Landing(
        fragment=fragment,
        launched_at=step,
        requests=reduce(or_, (control.requests for control in controls)),
        left_out=tuple(group for group, control in enumerate(controls) if not control.finite),
        outlying=count.outlying,
        outer_lr=outer_lr,
        outer_grad_norm=norm,
        bytes_sent=0,
        exposed_wait_s=0.0,
        in_flight_s=0.0,
        landed_at=step,
        bytes_received=0,
        counted=tuple(count.factors),
        group_norms=tuple(control.norm for control in controls),
        spans=spans,
        diagnostics=None,
        step_times=tuple(control.step_time for control in controls),
    )


def mean_of_buffers(
    tails: Mapping[str, Tensor], outer: Mapping[str, Tensor], *, keeps: bool = True, says: bool = True
) -> Tensor:
    """Returns the plain mean of buffers, flat; see `finite_mean`."""
    rows = torch.stack([tail.clone().view(torch.float32) for tail in tails.values()])
    if bool(rows.isfinite().all()):
        return rows.mean(dim=0)
    means, left_out, sizes = list[Tensor](), dict[str, str](), [one.numel() for one in outer.values()]
    for own, (name, before) in zip(rows.split(sizes, dim=1), outer.items(), strict=True):
        finite = _are_finite(own)
        # What is infinite by design, as a mask may be, is so everywhere.
        if any(finite) or bool(before.isfinite().all()):
            left_out |= {who: name for who, is_finite in zip(tails, finite, strict=True) if not is_finite}
        means.append(finite_mean(own, before.flatten() if keeps else None))
    if left_out and says:
        _log.warning(
            "Buffers that are not finite are left out of the mean, and the outer ones take their place: %s.",
            ", ".join(f"{name!r} of {who}" for who, name in left_out.items()),
        )
    return torch.cat(means)


def finite_mean(rows: Tensor, outer: Tensor | None) -> Tensor:
    """Returns the plain mean of a buffer over the groups in which all of it is finite."""
    finite = _are_finite(rows)
    return rows[finite].mean(dim=0) if any(finite) else rows.mean(dim=0) if outer is None else outer


def _are_finite(rows: Tensor) -> list[bool]:
    return [bool(row.isfinite().all()) for row in rows]


def norm_squared(gradient: Tensor) -> float:
    """Returns the squared norm of a shard of an outer gradient, as control vectors carry it."""
    return float(torch.linalg.vector_norm(gradient)) ** 2


def whole_norm(gradient: Tensor, group: Communicator) -> float:
    """Returns the norm of the mean outer gradient of the whole fragment. In-group collective."""
    norm = torch.linalg.vector_norm(gradient).reshape(1)
    if group.size > 1:
        norm = torch.cat(group.all_gather(norm))
    return float(torch.linalg.vector_norm(norm))


def span_from(began: float, device: torch.device) -> Span:
    """Ends a part of a flight: waits for the stream of the background, so that the part holds what it started."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
    return began, time.perf_counter()
