"""What happens to a fragment in flight, in the background: compress, exchange, average, outer step.

There is a method for each stage of the background. The first encodes and sends, the second averages what the groups
sent, and the third makes the outer step. With two hops a group averages a part of the shard only: the second stage
sends its mean on, and the third puts the parts together.
"""

import time
from collections.abc import Sequence
from functools import reduce
from math import isfinite
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm import (
    HOST_BYTES,
    AllReduce,
    Brought,
    Control,
    Count,
    LandingRule,
    Mix,
    SecondHop,
    Settings,
    all_reduce_for,
    plain,
    trained,
)
from lightning_sdiloco.comm import Exchange, Topology, Unanswered, VaryingExchange
from lightning_sdiloco.compression import Kernels, resolve
from lightning_sdiloco.engine.arithmetic import mean_of_buffers, norm_squared, outer_step, span_from, whole_norm
from lightning_sdiloco.engine.flight import LaunchSnapshot, Purpose, SyncResult
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.gossip import Gossip
from lightning_sdiloco.engine.measurements import Diagnostics, Span, agreement, diagnosed, distance, lost, on_link
from lightning_sdiloco.engine.messages import Received, put_together, take_apart
from lightning_sdiloco.engine.outer.optimizer import OuterState
from lightning_sdiloco.errors import AgreementError, ExchangeError

_SEND, _AVERAGE, _STEP = range(3)


class _Kept(NamedTuple):
    """Holds what a rank keeps for itself from stage to stage."""

    all_reduce: AllReduce
    memory: Tensor | None
    tuning: Tensor | None
    spans: dict[str, Span]
    lost: Tensor | None
    brought: Brought | None


class _Sent(NamedTuple):
    """Holds what follows the first stage: the messages are on their way to the other groups."""

    kept: _Kept
    words: Any
    payloads: Any
    tail_bytes: int
    posted_at: float


class _Onward(NamedTuple):
    """Holds a part of the mean that is on its way to the other groups."""

    hop: SecondHop
    posted: Any
    posted_at: float


class _Averaged(NamedTuple):
    """Holds what follows the second stage: the mean of what all groups sent to this one, or a part that is sent on."""

    kept: _Kept
    mean: Tensor | None
    onward: _Onward | None
    on_link_s: float
    buffers: dict[int, Tensor]
    weighing: Any
    controls: list[Control]
    counted: Count
    traffic: "_Traffic"
    agreement: Tensor | None
    twin: Tensor | None


class _Traffic(NamedTuple):
    """Counts bytes between groups, and tells when the messages of each exchange were there."""

    sent: int
    received: int
    arrived: tuple[float, ...] = ()


class Pipeline:
    """Sends what a launch read and receives what a landing applies."""

    def __init__(
        self,
        fragments: Sequence[FragmentState],
        topology: Topology,
        settings: Settings,
        kernels: Kernels,
        diagnoses: bool = False,
    ) -> None:
        self._fragments = fragments
        self._topology = topology
        groups, codec, mixing = topology.num_groups, settings.codec, settings.landing.kept
        self._all_reduce = all_reduce_for(settings.exchange_in_rounds, groups, codec, mixing, kernels)
        self._gossip = Gossip(settings, topology)
        self._exact_all_reduce = all_reduce_for(settings.exchange, groups, resolve("fp32"), mixing, kernels)
        self._aggregation, self._landing = settings.aggregation, settings.landing
        self._diagnoses = diagnoses
        self._exchange: Exchange[Any] = topology.exchange
        if codec.varies():
            self._exchange = VaryingExchange(topology.control, topology.exchange)

    def send(self, snapshot: LaunchSnapshot) -> "_Sent":
        """Does the first stage: encodes the outer gradient and starts to send it, behind what goes with it."""
        began, gradient, fragment = time.perf_counter(), snapshot.gradient, self._fragments[snapshot.fragment]
        tail, control = self._tail(snapshot), self._control(snapshot, fragment)
        words = self._topology.control.post([control[:HOST_BYTES]] * self._topology.num_groups)
        # What is no outer step makes up for none: no memory goes into it.
        is_round = snapshot.purpose is Purpose.ROUND
        memory = fragment.storage.load(fragment.memory) if fragment.memory is not None and is_round else None
        all_reduce = self._all_reduce_of(snapshot)
        tuning = fragment.storage.load(fragment.tuning) if fragment.tuning is not None and is_round else None
        brought = self._gossip.bring(snapshot, fragment) if snapshot.leg else None
        values = gradient if brought is None else brought.values
        encoded = all_reduce.encode(values, memory, tuning)
        head = control[HOST_BYTES:].to(gradient.device)
        messages, sizes = put_together(head, encoded.payloads, tail), None
        if snapshot.leg:
            # Nothing goes to those who are no partners, and nothing comes from them.
            messages = [message if group in snapshot.leg else head[:0] for group, message in enumerate(messages)]
            sizes = [message.numel() for message in messages]
        posted_at = time.perf_counter()
        posted = self._exchange.post(messages, sizes)
        spans = {"encode": span_from(began, gradient.device)}
        measures = self._diagnoses and snapshot.purpose is Purpose.ROUND
        loss = lost(values, all_reduce.decode_own(encoded.payloads, values)) if measures else None
        kept = _Kept(all_reduce, encoded.memory, encoded.tuning, spans, loss, brought)
        return _Sent(kept, words, posted, sum(part.numel() for part in tail), posted_at)

    def average(self, snapshot: LaunchSnapshot, sent: "_Sent") -> "_Averaged":
        """Does the second stage: waits for all groups and averages what they sent to this one."""
        kept, all_reduce, fragment = sent.kept, sent.kept.all_reduce, self._fragments[snapshot.fragment]
        (controls, payloads, tails), traffic, on_link_s = self._received(snapshot, sent)
        self._check(controls, snapshot)
        count = self._count(controls, snapshot)
        began = time.perf_counter()
        mean = self._mean(all_reduce, payloads, count, snapshot)
        onward = self._send_on(snapshot, all_reduce, mean)
        measured = None if kept.lost is None else agreement(payloads, all_reduce.compression, mean)
        twin = fragment.twin
        if kept.brought is not None and count.factors:
            taken = self._gossip.take(snapshot, fragment, kept.brought, all_reduce, payloads, mean, count)
            mean, twin = taken.gradient, taken.twin
        kept.spans["decode"] = span_from(began, snapshot.gradient.device)
        return _Averaged(
            kept=kept,
            # A part is sent on, and comes back as all groups decode it.
            mean=mean if onward is None else None,
            onward=onward,
            on_link_s=on_link_s,
            buffers=self._mean_buffers(tails, count, snapshot),
            weighing=self._heard(controls, fragment, snapshot),
            controls=controls,
            counted=count,
            traffic=traffic,
            agreement=measured,
            twin=twin,
        )

    def _received(self, snapshot: LaunchSnapshot, sent: "_Sent") -> tuple[Received, "_Traffic", float]:
        """Waits for what all groups sent; returns it, its bytes, and its seconds on the link. In-group collective."""
        began, spans = time.perf_counter(), sent.kept.spans
        posted = [(self._topology.control, sent.words), (self._exchange, sent.payloads)]
        (words, messages), traffic = self._collect(posted, snapshot, _AVERAGE)
        spans["transfer"] = span_from(began, snapshot.gradient.device)
        encoding = spans["encode"][1] - spans["encode"][0]
        on_link_s = on_link(sent.posted_at, began, traffic.arrived[0], traffic.arrived[1], encoding)
        # Words come from all groups, and the rest from partners alone.
        return take_apart(words, messages, sent.tail_bytes), traffic, on_link_s

    def _send_on(self, snapshot: LaunchSnapshot, all_reduce: AllReduce, mean: Tensor) -> _Onward | None:
        """Sends the mean to all groups, if this one averaged a part of the shard."""
        fragment, is_round = self._fragments[snapshot.fragment], snapshot.purpose is Purpose.ROUND
        residual = fragment.storage.load(fragment.residual) if fragment.residual is not None and is_round else None
        hop = all_reduce.second_hop(mean, residual)
        posted_at = time.perf_counter()
        if hop is None:
            return None
        sizes, exchange = all_reduce.second_hops(snapshot.gradient.numel()), self._topology.second_hop
        return _Onward(hop, exchange.post([hop.payload] * self._topology.num_groups, sizes), posted_at)

    def _heard(self, controls: Sequence[Control], fragment: FragmentState, snapshot: LaunchSnapshot) -> Any:
        """Returns what the weighing remembers of a round: nothing new of a leg, in which there is none."""
        if snapshot.purpose is not Purpose.ROUND:
            return None
        return fragment.weighing if snapshot.leg else self._aggregation.heard(controls, fragment.weighing)

    def _mean(
        self, all_reduce: AllReduce, payloads: Sequence[Tensor], count: Count, snapshot: LaunchSnapshot
    ) -> Tensor:
        """Returns the mean of what the groups sent that count, or of those of them that are in the leg."""
        if snapshot.leg:
            payloads = [payloads[group] for group in snapshot.leg]
            count = Count({at: 1.0 for at, group in enumerate(snapshot.leg) if group in count.factors})
        return all_reduce.mean(payloads, count, snapshot.gradient, self._topology.group_index)

    def receive(self, snapshot: LaunchSnapshot, averaged: "_Averaged") -> SyncResult:
        """Does the third stage: puts the mean of the whole shard together and makes the outer step."""
        kept, fragment, group = averaged.kept, self._fragments[snapshot.fragment], self._topology.stages[_STEP]
        gradient, residual, onward, on_link_s = self._assembled(snapshot, averaged)
        # The outer step takes the gradient.
        gradient_norm = whole_norm(fragment.change(snapshot.purpose, gradient), group)
        began, storage = time.perf_counter(), fragment.storage
        counts, final = bool(averaged.counted.factors), snapshot.purpose is not Purpose.ROUND
        outer = outer_step(fragment, fragment.outer, snapshot.outer, gradient, counts=counts, final=final)
        rule = self._rule(snapshot, averaged)
        rows = rule.gathered(snapshot.gradient, snapshot.outer, outer.values)
        gathered = [fragment.layout.all_gather(row, group) for row in rows]
        kept.spans["outer_step"] = span_from(began, gradient.device)
        controls = averaged.controls
        left_out = tuple(group for group, control in enumerate(controls) if not control.finite)
        changed = reduce(or_, (control.changed for control in controls))
        diagnostics = self._diagnosed(snapshot, averaged, outer)
        return SyncResult(
            outer=outer.moved(storage.store),
            memory=None if kept.memory is None else storage.store(kept.memory),
            tuning=None if kept.tuning is None else storage.store(kept.tuning),
            residual=fragment.residual if residual is None else storage.store(residual),
            rule=rule,
            gathered=gathered,
            buffers=averaged.buffers,
            weighing=averaged.weighing,
            controls=controls,
            left_out=left_out,
            changed=changed,
            counted=averaged.counted,
            gradient_norm=gradient_norm,
            bytes_sent=averaged.traffic.sent + onward.sent,
            bytes_received=averaged.traffic.received + onward.received,
            on_link_s=on_link_s,
            spans=kept.spans,
            diagnostics=diagnostics,
            sends_bytes_per_s=self._exchange.sends_bytes_per_s,
            twin=None if averaged.twin is None else storage.store(averaged.twin),
        )

    def _diagnosed(self, snapshot: LaunchSnapshot, averaged: "_Averaged", outer: OuterState) -> Diagnostics | None:
        """Returns how far the groups agree, if that is measured. In-group collective."""
        if averaged.kept.lost is None or averaged.agreement is None:
            return None
        moved = distance(snapshot.gradient, snapshot.outer, outer.state)
        return diagnosed(averaged.kept.lost, averaged.agreement, moved, self._topology.stages[_STEP])

    def _rule(self, snapshot: LaunchSnapshot, averaged: "_Averaged") -> LandingRule:
        """Returns how this group takes the result in."""
        own, counted = self._topology.group_index, averaged.counted
        is_left_out = not averaged.controls[own].finite or own in counted.outlying
        if snapshot.purpose is not Purpose.ROUND or is_left_out:
            return Mix(0.0)
        # Where no group has trained, nothing moves.
        return self._landing if counted.factors else Mix(1.0)

    def _assembled(
        self, snapshot: LaunchSnapshot, averaged: "_Averaged"
    ) -> tuple[Tensor, Tensor | None, "_Traffic", float]:
        """Puts the mean of the whole shard together, if this group averaged a part of it."""
        sent = averaged.onward
        if sent is None:
            assert averaged.mean is not None, "what is not sent on is the mean"
            return averaged.mean, None, _Traffic(0, 0), averaged.on_link_s
        began = time.perf_counter()
        (payloads,), onward = self._collect([(self._topology.second_hop, sent.posted)], snapshot, _STEP)
        averaged.kept.spans["relay"] = span_from(began, snapshot.gradient.device)
        again_s = on_link(sent.posted_at, began, sent.posted_at, onward.arrived[0], 0.0)
        gradient = averaged.kept.all_reduce.assemble(payloads, like=snapshot.gradient)
        return gradient, sent.hop.residual, onward, averaged.on_link_s + again_s

    def _all_reduce_of(self, snapshot: LaunchSnapshot) -> AllReduce:
        if snapshot.purpose.is_exact:
            return self._exact_all_reduce
        return self._all_reduce.at(snapshot.step, snapshot.choice)

    def _count(self, controls: Sequence[Control], snapshot: LaunchSnapshot) -> Count:
        if snapshot.leg:
            # Where groups are has a mean, whether they have trained or not.
            return Count({group: 1.0 for group in snapshot.leg if controls[group].finite})
        if snapshot.purpose is Purpose.ROUND:
            return self._aggregation.count(controls, self._fragments[snapshot.fragment].weighing)
        return trained(controls) if snapshot.purpose is Purpose.GRADIENT else plain(controls)

    def _tail(self, snapshot: LaunchSnapshot) -> list[Tensor]:
        """Returns the buffers at the end of the message, as bytes. Only one rank of a group sends them."""
        if self._topology.group_rank != 0:
            return []
        return [snapshot.buffers[index].reshape(-1).view(torch.uint8) for index in snapshot.travelling]

    def _control(self, snapshot: LaunchSnapshot, fragment: FragmentState) -> Tensor:
        """Returns the control vector of this group, as bytes. In-group collective."""
        norm = norm_squared(fragment.change(snapshot.purpose, snapshot.gradient))
        is_gradient = snapshot.purpose is Purpose.GRADIENT
        own = Control(
            fragment=snapshot.fragment,
            step=snapshot.step,
            requests=snapshot.requests,
            # A norm that is not finite does not decide: it may overflow where every value is finite. Gradients that
            # are not finite make the inner optimizers of all groups skip the step, if there is a GradScaler.
            finite=is_gradient or isfinite(norm) or bool(snapshot.gradient.isfinite().all()),
            weight=snapshot.weight,
            digest=fragment.digest(snapshot),
            norm_squared=norm,
            changed=0 if is_gradient else fragment.buffers.changed(snapshot.buffers),
            step_time=snapshot.step_time,
        )
        if self._topology.group_size == 1:
            return own.packed()
        ranks = self._topology.stages[_SEND].all_gather(own.packed())
        return Control.merged(list(map(Control.unpacked, ranks))).packed()

    def _collect(
        self, posted: Sequence[tuple[Exchange[Any], Any]], snapshot: LaunchSnapshot, stage: int
    ) -> tuple[list[list[Tensor]], _Traffic]:
        """Waits for the messages of all groups."""
        before = [(exchange.bytes_sent, exchange.bytes_received) for exchange, _ in posted]
        messages, arrived = list[list[Tensor]](), list[float]()
        missing: Unanswered | None = None
        try:
            for exchange, sent in posted:
                messages.append(exchange.collect(sent, snapshot.deadline))
                arrived.append(time.perf_counter())
        except Unanswered as error:
            missing = error
        if self._topology.group_size > 1:
            missing = self._told(missing, stage)
        if missing is not None:
            raise ExchangeError(
                f"{missing} while fragment {snapshot.fragment}, launched after inner step {snapshot.step}, was in"
                " flight. The run cannot go on without it. See why that group stopped or is unreachable; if it was only"
                " slow, raise timeout."
            ) from missing
        gone = sum(exchange.bytes_sent for exchange, _ in posted) - sum(sent for sent, _ in before)
        come = sum(exchange.bytes_received for exchange, _ in posted) - sum(received for _, received in before)
        return messages, _Traffic(gone, come, tuple(arrived))

    def _told(self, missing: Unanswered | None, stage: int) -> Unanswered | None:
        """Tells the ranks of this group what this one misses; returns that, or else what another one misses."""
        # A number for which group it is: -1 for none, the number of groups where it is not known.
        code = -1 if missing is None else self._topology.num_groups if missing.group is None else missing.group
        codes = torch.cat(self._topology.stages[stage].all_gather(torch.tensor([code]))).tolist()
        return self._missed_by(codes.index(max(codes)), max(codes)) if missing is None and max(codes) >= 0 else missing

    def _missed_by(self, shard: int, code: int) -> Unanswered:
        """Says what another rank of this group misses."""
        own, other = (self._topology.group_size * of + shard for of in (self._topology.group_index, code))
        if code == self._topology.num_groups:
            return Unanswered(None, f"did not answer rank {own} of this group")
        return Unanswered(code, f"did not answer rank {own} of this group (rank {other} should have)")

    def _check(self, controls: Sequence[Control], snapshot: LaunchSnapshot) -> None:
        """Raises an `AgreementError` unless all groups are at one point with one outer model, and one is finite."""
        own, leg = controls[self._topology.group_index], snapshot.leg or range(len(controls))
        differs = "did not begin from" if snapshot.leg else "do not hold"
        has_buffers = bool(self._fragments[snapshot.fragment].buffers.names) and not snapshot.leg
        alike = "outer parameters and buffers" if has_buffers else "outer parameters"
        alike = "outer optimizer state" if snapshot.purpose is Purpose.START else alike
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
                f"The outer gradient of fragment {snapshot.fragment}, launched after inner step {snapshot.step}, is not"
                f" finite in any worker group ({', '.join(f'group {g}' for g in range(len(controls)))}). Training has"
                " diverged: resume from an earlier checkpoint with a lower learning rate or with gradient clipping."
            )

    def _mean_buffers(self, tails: Sequence[Tensor], count: Count, snapshot: LaunchSnapshot) -> dict[int, Tensor]:
        """Returns the plain mean of the buffers that travel, over the groups that count. In-group collective."""
        if not snapshot.travelling or not count.factors:
            return {}
        own = [snapshot.buffers[index] for index in snapshot.travelling]
        flat = torch.cat([buffer.reshape(-1) for buffer in own])
        if self._topology.group_rank == 0:
            buffers = self._fragments[snapshot.fragment].buffers
            outer = {buffers.names[index]: buffers.outer[index] for index in snapshot.travelling}
            # Where rounds start, each group has its own buffers for the outer ones.
            keeps = snapshot.purpose is not Purpose.START
            counted = {f"worker group {group}": tails[group] for group in count.factors}
            flat = mean_of_buffers(
                counted, outer, keeps=keeps, says=self._topology.group_index == min(snapshot.leg, default=0)
            )
        self._topology.stages[_AVERAGE].broadcast(flat)
        parts = zip(snapshot.travelling, flat.split([buffer.numel() for buffer in own]), own, strict=True)
        return {index: part.view_as(buffer) for index, part, buffer in parts}
