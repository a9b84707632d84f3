"""What happens to a fragment in flight, in the background lane: compress, exchange, average, outer step."""

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.compression import Compression
from lightning_sdiloco.control import CONTROL_BYTES, Control
from lightning_sdiloco.counting import Count, Counting, plain
from lightning_sdiloco.digest import digest
from lightning_sdiloco.errors import AgreementError, ExchangeError
from lightning_sdiloco.exchange import Unanswered
from lightning_sdiloco.flight import Arrival, Cargo
from lightning_sdiloco.fragments import BufferLayout, FragmentLayout
from lightning_sdiloco.measuring import Stopwatch, agreement, diagnosed, distance, lost
from lightning_sdiloco.outer import Outer, Stepped
from lightning_sdiloco.passes import Passes
from lightning_sdiloco.settings import Settings
from lightning_sdiloco.topology import Topology


class Sent(NamedTuple):
    """A launch whose message is on its way to the other groups."""

    cargo: Cargo
    posted: Any
    memory: Tensor | None
    stopwatch: Stopwatch
    lost: Tensor | None


class Transfer:
    """Sends what a launch took along and receives what a landing applies.

    Everything here runs in the lane. It reads the outer state and never changes it.

    Args:
        topology: The ranks of this group and the way to the others.
        settings: How outer gradients are encoded, and how much of its own a group keeps on landing.
        outer: Outer parameters and outer optimizer of this rank's shards.
        memories: What the compression remembers of every fragment's shard. Only a landing changes it.
        layouts: The shards of every fragment, and how they are gathered.
        buffers: The buffers of every fragment.
        counting: How much each group counts in a mean.
        passes: What encodes and takes the means.
        diagnoses: Whether to measure how far the groups agree.
    """

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        outer: Outer,
        memories: Sequence[Tensor | None],
        layouts: Sequence[FragmentLayout],
        buffers: Sequence[BufferLayout],
        counting: Counting,
        passes: Passes,
        diagnoses: bool,
    ) -> None:
        self._topology = topology
        self._settings = settings
        self._outer = outer
        self._memories = memories
        self._layouts = layouts
        self._buffers = buffers
        self._counting = counting
        self._passes = passes
        self._diagnoses = diagnoses

    def send(self, cargo: Cargo) -> Sent:
        """Encodes the outer gradient of the shard and starts to send it, behind the control vector of the group."""
        stopwatch, compression = Stopwatch(cargo.gradient.device), self._compression(cargo)
        with stopwatch.part("encode"):
            # The final exchange is a mean of local parameters, not an outer step: no memory goes into it.
            memory = None if cargo.final else self._memories[cargo.fragment]
            payload, memory = encoded(cargo.gradient, memory, compression, self._settings.mixing, self._passes)
            control = self._merged(self._control(cargo))
            message = torch.cat([control.packed().to(payload.device), payload, *self._tail(cargo)])
            posted = self._topology.exchange.post(message)
        return Sent(cargo, posted, memory, stopwatch, self._lost(cargo, payload) if self._diagnoses else None)

    def receive(self, sent: Sent) -> Arrival:
        """Waits for all groups, averages what they sent and makes the outer step."""
        cargo, exchange, compression = sent.cargo, self._topology.exchange, self._compression(sent.cargo)
        stopwatch = sent.stopwatch
        sent_before, received_before = exchange.bytes_sent, exchange.bytes_received
        with stopwatch.part("transfer"):
            messages = self._collected(sent.posted, cargo)
        controls = [Control.unpacked(message[:CONTROL_BYTES]) for message in messages]
        self._check(controls, cargo)
        end = CONTROL_BYTES + compression.wire_bytes(cargo.gradient.numel())
        count = plain(controls) if cargo.final else self._counting.count(controls)
        payloads = [message[CONTROL_BYTES:end] for message in messages]
        with stopwatch.part("decode"):
            gradient = self._passes.mean(payloads, count, compression, like=cargo.gradient)
        with stopwatch.part("outer_step"):
            outer = self._step(cargo, gradient, count)
            gathered = self._layouts[cargo.fragment].gathered(outer.values, self._topology.lane)
        diagnostics = None
        if sent.lost is not None:
            agreed = agreement(payloads, compression, gradient)
            moved = distance(cargo.gradient, self._outer.values[cargo.fragment], outer.state)
            diagnostics = diagnosed(sent.lost, agreed, moved, self._topology.lane)
        return Arrival(
            outer=outer,
            memory=sent.memory,
            gathered=gathered,
            buffers=self._mean_buffers([message[end:] for message in messages], count, cargo),
            controls=controls,
            counted=count,
            gradient_norm=self._norm(gradient),
            bytes_sent=exchange.bytes_sent - sent_before,
            bytes_received=exchange.bytes_received - received_before,
            spans=stopwatch.spans,
            diagnostics=diagnostics,
        )

    def _lost(self, cargo: Cargo, payload: Tensor) -> Tensor:
        decoded = torch.empty_like(cargo.gradient)
        self._compression(cargo).decode(payload, decoded)
        return lost(cargo.gradient, decoded)

    def _compression(self, cargo: Cargo) -> Compression:
        return self._settings.codec.dense() if cargo.final else self._settings.codec.at(cargo.step)

    def _tail(self, cargo: Cargo) -> list[Tensor]:
        """The buffers at the end of the message, as bytes. Only one rank of a group sends them."""
        if self._topology.shard != 0:
            return []
        return [cargo.buffers[index].reshape(-1).view(torch.uint8) for index in cargo.travelling]

    def _control(self, cargo: Cargo) -> Control:
        values = self._outer.values[cargo.fragment]
        norm = norm_squared(cargo.gradient)
        return Control(
            fragment=cargo.fragment,
            step=cargo.step,
            requests=cargo.requests,
            # A norm that is not finite does not decide: it may overflow where every value is finite.
            finite=isfinite(norm) or bool(cargo.gradient.isfinite().all()),
            weight=cargo.weight,
            digest=digest(values, start=self._layouts[cargo.fragment].start),
            norm_squared=norm,
            changed=self._buffers[cargo.fragment].changed(cargo.buffers),
        )

    def _merged(self, control: Control) -> Control:
        return Control.merged([Control.unpacked(rank) for rank in self._topology.lane.gather(control.packed())])

    def _collected(self, posted: Any, cargo: Cargo) -> list[Tensor]:
        """The messages of all groups. A rank that misses one tells its group, so that all its ranks end alike."""
        try:
            messages, missing = self._topology.exchange.collect(posted, cargo.deadline), None
        except Unanswered as error:
            messages, missing = [], error
        groups = torch.tensor([-1 if missing is None else missing.group])
        reported = [int(group) for group in self._topology.lane.gather(groups)]
        if missing is None and max(reported) >= 0:
            group, shard = max(reported), reported.index(max(reported))
            own, other = (self._topology.shards * of + shard for of in (self._topology.group, group))
            missing = Unanswered(group, f"did not answer rank {own} of this group (rank {other} should have)")
        if missing is not None:
            raise ExchangeError(
                f"{missing} while fragment {cargo.fragment}, launched after inner step {cargo.step}, was in flight."
                " The run cannot go on without it. See why that group stopped or is unreachable; if it was only slow,"
                " raise timeout."
            ) from missing
        return messages

    def _check(self, controls: Sequence[Control], cargo: Cargo) -> None:
        own = controls[self._topology.group]
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

    def _step(self, cargo: Cargo, gradient: Tensor, count: Count) -> Stepped:
        if cargo.final:
            return self._outer.moved(cargo.fragment, gradient)
        if not count.factors:
            return self._outer.kept(cargo.fragment)
        return self._outer.stepped(cargo.fragment, gradient)

    def _mean_buffers(self, tails: Sequence[Tensor], count: Count, cargo: Cargo) -> dict[int, Tensor]:
        """The plain mean of the buffers that travel, over the groups that count; rank 0 of a group speaks for it."""
        if not cargo.travelling or not count.factors:
            return {}
        flat = torch.cat([cargo.buffers[index].reshape(-1) for index in cargo.travelling])
        if self._topology.shard == 0:
            flat = torch.stack([tails[group].clone().view(torch.float32) for group in count.factors]).mean(dim=0)
        self._topology.lane.broadcast(flat)
        parts = flat.split([cargo.buffers[index].numel() for index in cargo.travelling])
        return {index: part.view_as(cargo.buffers[index]) for index, part in zip(cargo.travelling, parts, strict=True)}

    def _norm(self, gradient: Tensor) -> float:
        norm = torch.linalg.vector_norm(gradient).reshape(1)
        return float(torch.linalg.vector_norm(torch.cat(self._topology.lane.gather(norm))))


def encoded(
    gradient: Tensor, memory: Tensor | None, compression: Compression, mixing: float, passes: Passes
) -> tuple[Tensor, Tensor | None]:
    """The payload of an outer gradient, and what is to be remembered if it counts.

    Args:
        gradient: The outer gradient of a shard.
        memory: What was remembered before.
        compression: How to encode it.
        mixing: Share of the local parameters that is kept on landing.
        passes: What encodes.
    """
    payload = passes.encode(gradient if memory is None else gradient + memory, compression)
    return payload, compression.remembered(gradient, memory, payload, mixing)


def norm_squared(gradient: Tensor) -> float:
    """The squared norm of a shard of an outer gradient, as control vectors carry it."""
    return float(torch.linalg.vector_norm(gradient)) ** 2
