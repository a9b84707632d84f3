"""What happens to a fragment in flight, in the background lane: compress, exchange, average, outer step.

A function for each stage of the lane. The first encodes and sends, the second averages what the groups sent, and the
third makes the outer step. With two shots a group averages a part only: the second stage sends the mean on, and the
third puts the parts together.
"""

from collections.abc import Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.aggregation import Aggregation, Count, plain
from lightning_sdiloco.algorithm.control import CONTROL_BYTES, HOST_BYTES, Control
from lightning_sdiloco.algorithm.digest import digest
from lightning_sdiloco.algorithm.reduction import AllReduce, SecondHop
from lightning_sdiloco.algorithm.settings import Settings
from lightning_sdiloco.comm.exchange import Exchange, Unanswered
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression.kernels import Kernels
from lightning_sdiloco.engine.background import Stages
from lightning_sdiloco.engine.flight import LaunchSnapshot, SyncResult
from lightning_sdiloco.engine.measurements import Stopwatch, agreement, diagnosed, distance, lost
from lightning_sdiloco.engine.offload import Home
from lightning_sdiloco.engine.outer.optimizer import Outer, Stepped
from lightning_sdiloco.engine.parameters.layouts import BufferLayout, FragmentLayout
from lightning_sdiloco.errors import AgreementError, ExchangeError

_SEND, _AVERAGE, _STEP = range(3)


class _Sent(NamedTuple):
    """After the first stage: the messages are on their way to the other groups."""

    words: Any
    posted: Any
    memory: Tensor | None
    stopwatch: Stopwatch
    lost: Tensor | None


class _Averaged(NamedTuple):
    """After the second stage: the mean of what all groups sent to this one, which is relayed if it is a part."""

    mean: Tensor
    relay: SecondHop | None
    posted: Any
    memory: Tensor | None
    buffers: dict[int, Tensor]
    controls: list[Control]
    counted: Count
    sent: int
    received: int
    stopwatch: Stopwatch
    lost: Tensor | None
    agreement: Tensor | None


class Transfer:
    """Sends what a launch took along and receives what a landing applies.

    Everything here runs in the lane. It reads the outer state and never changes it.

    Args:
        topology: The ranks of this group and the way to the others.
        settings: How outer gradients are encoded, and how much of its own a group keeps on landing.
        outer: Outer parameters and outer optimizer of this rank's shards.
        memories: What the compression remembers of every fragment's shard. Only a landing changes it.
        residuals: What the second rounding lost of this group's part of every shard. Only a landing changes it.
        layouts: The shards of every fragment, and how they are gathered.
        buffers: The buffers of every fragment.
        aggregation: How much each group counts in a mean.
        passes: What encodes and takes the means.
        home: Where what is remembered rests.
        diagnoses: Whether to measure how far the groups agree.
    """

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        outer: Outer,
        memories: Sequence[Tensor | None],
        residuals: Sequence[Tensor | None],
        layouts: Sequence[FragmentLayout],
        buffers: Sequence[BufferLayout],
        aggregation: Aggregation,
        passes: Kernels,
        home: Home,
        diagnoses: bool,
    ) -> None:
        self._topology = topology
        self._settings = settings
        self._outer = outer
        self._memories = memories
        self._residuals = residuals
        self._layouts = layouts
        self._buffers = buffers
        self._aggregation = aggregation
        self._passes = passes
        self._home = home
        self._diagnoses = diagnoses

    def stages(self, cargo: LaunchSnapshot) -> Stages[Any, Any, SyncResult]:
        """What the lane does with a launch."""
        return Stages(partial(self._send, cargo), partial(self._average, cargo), partial(self._receive, cargo))

    def _send(self, cargo: LaunchSnapshot) -> _Sent:
        """Encodes the outer gradient of the shard and starts to send it, behind what goes with it."""
        stopwatch, shots = Stopwatch(cargo.gradient.device), self._shots(cargo)
        with stopwatch.part("encode"):
            control = self._merged(self._control(cargo)).packed()
            words = self._topology.control.post([control[:HOST_BYTES]] * self._topology.num_groups)
            # The final exchange is a mean of local parameters, not an outer step: no memory goes into it.
            memory = None if cargo.final else self._fetched(self._memories[cargo.fragment])
            encoded = shots.encode(cargo.gradient, memory)
            head, tail = control[HOST_BYTES:].to(cargo.gradient.device), self._tail(cargo)
            # A payload that goes to all groups becomes one message.
            messages = {id(payload): payload for payload in encoded.payloads}
            messages = {key: torch.cat([head, payload, *tail]) for key, payload in messages.items()}
            posted = self._topology.exchange.post([messages[id(payload)] for payload in encoded.payloads])
        loss = lost(cargo.gradient, shots.decode_own(encoded.payloads, cargo.gradient)) if self._diagnoses else None
        return _Sent(words, posted, encoded.memory, stopwatch, loss)

    def _average(self, cargo: LaunchSnapshot, sent: _Sent) -> _Averaged:
        """Waits for all groups and averages what they sent to this one."""
        topology, shots = self._topology, self._shots(cargo)
        sent_before, received_before = self._bytes(topology.control, topology.exchange)
        with sent.stopwatch.part("transfer"):
            words = self._collected(topology.control, sent.words, cargo, _AVERAGE)
            messages = self._collected(topology.exchange, sent.posted, cargo, _AVERAGE)
        head, end = CONTROL_BYTES - HOST_BYTES, CONTROL_BYTES - HOST_BYTES + shots.payload_bytes(cargo.gradient.numel())
        pairs = zip(words, messages, strict=True)
        controls = [Control.unpacked(torch.cat([word, message[:head].to(word.device)])) for word, message in pairs]
        self._check(controls, cargo)
        count = plain(controls) if cargo.final else self._aggregation.count(controls)
        payloads = [message[head:end] for message in messages]
        with sent.stopwatch.part("decode"):
            mean = shots.mean(payloads, count, like=cargo.gradient)
            relay = shots.second_hop(mean, self._fetched(self._residuals[cargo.fragment]))
            posted = None if relay is None else topology.second_hop.post([relay.payload] * topology.num_groups)
        sent_after, received_after = self._bytes(topology.control, topology.exchange)
        return _Averaged(
            mean=mean,
            relay=relay,
            posted=posted,
            memory=sent.memory,
            buffers=self._mean_buffers([message[end:] for message in messages], count, cargo),
            controls=controls,
            counted=count,
            sent=sent_after - sent_before,
            received=received_after - received_before,
            stopwatch=sent.stopwatch,
            lost=sent.lost,
            agreement=agreement(payloads, shots.compression, mean) if self._diagnoses else None,
        )

    def _receive(self, cargo: LaunchSnapshot, averaged: _Averaged) -> SyncResult:
        """Puts the mean of the whole shard together and makes the outer step."""
        relays, gradient, residual = self._topology.second_hop, averaged.mean, self._residuals[cargo.fragment]
        stopwatch, lane = averaged.stopwatch, self._topology.stages[_STEP]
        sent_before, received_before = self._bytes(relays)
        if averaged.relay is not None:
            with stopwatch.part("relay"):
                payloads = self._collected(relays, averaged.posted, cargo, _STEP)
            gradient, residual = self._shots(cargo).assemble(payloads, like=cargo.gradient), averaged.relay.residual
        sent_after, received_after = self._bytes(relays)
        with stopwatch.part("outer_step"):
            outer = self._step(cargo, gradient, averaged.counted)
            gathered = self._layouts[cargo.fragment].gathered(outer.values, lane)
        diagnostics = None
        if averaged.lost is not None and averaged.agreement is not None:
            moved = distance(cargo.gradient, cargo.outer, outer.state)
            diagnostics = diagnosed(averaged.lost, averaged.agreement, moved, lane)
        return SyncResult(
            outer=self._outer.at_home(outer),
            memory=self._kept(averaged.memory),
            residual=self._kept(residual),
            gathered=gathered,
            buffers=averaged.buffers,
            controls=averaged.controls,
            counted=averaged.counted,
            gradient_norm=self._norm(gradient),
            bytes_sent=averaged.sent + sent_after - sent_before,
            bytes_received=averaged.received + received_after - received_before,
            spans=stopwatch.spans,
            diagnostics=diagnostics,
        )

    def _fetched(self, kept: Tensor | None) -> Tensor | None:
        return None if kept is None else self._home.fetched(kept)

    def _kept(self, values: Tensor | None) -> Tensor | None:
        return None if values is None else self._home.kept(values)

    def _shots(self, cargo: LaunchSnapshot) -> AllReduce:
        if cargo.final:
            return self._settings.make_final_all_reduce(self._topology.num_groups, self._passes)
        return self._settings.make_all_reduce(self._topology.num_groups, cargo.step, self._passes)

    @staticmethod
    def _bytes(*exchanges: Exchange[Any]) -> tuple[int, int]:
        return sum(e.bytes_sent for e in exchanges), sum(e.bytes_received for e in exchanges)

    def _tail(self, cargo: LaunchSnapshot) -> list[Tensor]:
        """The buffers at the end of the message, as bytes. Only one rank of a group sends them."""
        if self._topology.group_rank != 0:
            return []
        return [cargo.buffers[index].reshape(-1).view(torch.uint8) for index in cargo.travelling]

    def _control(self, cargo: LaunchSnapshot) -> Control:
        norm = norm_squared(cargo.gradient)
        return Control(
            fragment=cargo.fragment,
            step=cargo.step,
            requests=cargo.requests,
            # A norm that is not finite does not decide: it may overflow where every value is finite.
            finite=isfinite(norm) or bool(cargo.gradient.isfinite().all()),
            weight=cargo.weight,
            digest=digest(cargo.outer, start=self._layouts[cargo.fragment].start),
            norm_squared=norm,
            changed=self._buffers[cargo.fragment].changed(cargo.buffers),
        )

    def _merged(self, control: Control) -> Control:
        ranks = self._topology.stages[_SEND].all_gather(control.packed())
        return Control.merged([Control.unpacked(rank) for rank in ranks])

    def _collected(self, exchange: Exchange[Any], posted: Any, cargo: LaunchSnapshot, stage: int) -> list[Tensor]:
        """The messages of all groups. A rank that misses one tells its group, so that all its ranks end alike."""
        try:
            messages, missing = exchange.collect(posted, cargo.deadline), None
        except Unanswered as error:
            messages, missing = [], error
        reported = [int(code) for code in self._topology.stages[stage].all_gather(torch.tensor([self._coded(missing)]))]
        if missing is None and max(reported) >= 0:
            missing = self._missed_by(reported.index(max(reported)), max(reported))
        if missing is not None:
            raise ExchangeError(
                f"{missing} while fragment {cargo.fragment}, launched after inner step {cargo.step}, was in flight."
                " The run cannot go on without it. See why that group stopped or is unreachable; if it was only slow,"
                " raise timeout."
            ) from missing
        return messages

    def _coded(self, missing: Unanswered | None) -> int:
        """Which group is missing, as a number for the ranks of this group: -1 for none, their number for any."""
        if missing is None:
            return -1
        return self._topology.num_groups if missing.group is None else missing.group

    def _missed_by(self, shard: int, code: int) -> Unanswered:
        """What another rank of this group misses."""
        own, other = (self._topology.group_size * of + shard for of in (self._topology.group_index, code))
        if code == self._topology.num_groups:
            return Unanswered(None, f"did not answer rank {own} of this group")
        return Unanswered(code, f"did not answer rank {own} of this group (rank {other} should have)")

    def _check(self, controls: Sequence[Control], cargo: LaunchSnapshot) -> None:
        own = controls[self._topology.group_index]
        for what, values in (
            ("are not at the same point", [(control.fragment, control.step) for control in controls]),
            ("do not hold the same outer parameters", [control.digest for control in controls]),
        ):
            if len(set(values)) > 1:
                told = ", ".join(f"group {group}: {value}" for group, value in enumerate(values))
                raise AgreementError(
                    f"The worker groups {what} at the launch of fragment {own.fragment} after inner step {own.step}"
                    f" ({told}). Training on would let them drift apart unseen. Resume all groups from one checkpoint."
                )
        if not any(control.finite for control in controls):
            raise AgreementError(
                f"The outer gradient of fragment {cargo.fragment}, launched after inner step {cargo.step}, is not"
                f" finite in any worker group ({', '.join(f'group {g}' for g in range(len(controls)))}). Training has"
                " diverged: resume from an earlier checkpoint with a lower learning rate or with gradient clipping."
            )

    def _step(self, cargo: LaunchSnapshot, gradient: Tensor, count: Count) -> Stepped:
        """The outer state after a landing; its values are on the device of the gradient."""
        if not cargo.final and count.factors:
            return self._outer.stepped(cargo.fragment, cargo.outer, gradient)
        # No group has trained, or it is the end: then it moves without learning rate and momentum.
        values = cargo.outer - gradient if cargo.final else cargo.outer
        return self._outer.kept(cargo.fragment)._replace(values=values)

    def _mean_buffers(self, tails: Sequence[Tensor], count: Count, cargo: LaunchSnapshot) -> dict[int, Tensor]:
        """The plain mean of the buffers that travel, over the groups that count; rank 0 of a group speaks for it."""
        if not cargo.travelling or not count.factors:
            return {}
        flat = torch.cat([cargo.buffers[index].reshape(-1) for index in cargo.travelling])
        if self._topology.group_rank == 0:
            flat = torch.stack([tails[group].clone().view(torch.float32) for group in count.factors]).mean(dim=0)
        self._topology.stages[_AVERAGE].broadcast(flat)
        parts = flat.split([cargo.buffers[index].numel() for index in cargo.travelling])
        return {index: part.view_as(cargo.buffers[index]) for index, part in zip(cargo.travelling, parts, strict=True)}

    def _norm(self, gradient: Tensor) -> float:
        norm = torch.linalg.vector_norm(gradient).reshape(1)
        return float(torch.linalg.vector_norm(torch.cat(self._topology.stages[_STEP].all_gather(norm))))


def norm_squared(gradient: Tensor) -> float:
    """The squared norm of a shard of an outer gradient, as control vectors carry it."""
    return float(torch.linalg.vector_norm(gradient)) ** 2
