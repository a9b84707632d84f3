"""The arithmetic of a site: its outer gradient becomes bytes, and what a record counts becomes new outer parameters.

It is that of the fixed world: the same compression, weights, mean and outer step, in the order of the record. So a
federation in which nobody is ever late has the bits of the fixed world.
"""

import ctypes
import time
from collections.abc import Mapping, Sequence
from functools import reduce
from math import isfinite
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm import (
    Aggregation,
    AllReduce,
    Control,
    Count,
    Schedule,
    Settings,
    all_reduce_for,
    combined,
    digest,
)
from lightning_sdiloco.comm import Topology, key_of
from lightning_sdiloco.compression import Kernels, weighted_mean
from lightning_sdiloco.engine.arithmetic import mean_of_buffers, norm_squared, outer_step, span_from, whole_norm
from lightning_sdiloco.engine.flight import LaunchSnapshot, SyncResult
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.outer.optimizer import OuterState
from lightning_sdiloco.engine.parameters.layouts import FragmentLayout
from lightning_sdiloco.federation import Contribution, Payload, Record

Bytes = bytes | bytearray | memoryview


class Encoded(NamedTuple):
    """Holds an outer gradient as it is sent.

    Attributes:
        payloads: The names of the payloads, one of each rank of the site.
        blobs: The payloads by their keys.
        memory: What the compression remembers if it counts.
        digest: Digest of the outer parameters against which it is measured.
        finite: Whether it is.
        norm_squared: Its squared norm.
        requests: What the ranks of the site ask of each other, one bit each.
    """

    payloads: tuple[Payload, ...]
    blobs: dict[str, Bytes]
    memory: Tensor | None
    digest: int
    finite: bool
    norm_squared: float
    requests: int


class Stepped(NamedTuple):
    """Holds what a record makes of a fragment.

    Attributes:
        before: Digest of the outer parameters to which it was applied.
        after: Digest of those that came of it.
        moved: By how much the outer parameters moved, as far as this rank holds the fragment.
        result: What a landing takes up.
    """

    before: int
    after: int
    moved: Tensor
    result: SyncResult


class SiteArithmetic:
    """Encodes for a site, and applies records. Everything here runs in the background, and writes to no record.

    Args:
        fragments: The records of the fragments.
        topology: The ranks of this site.
        settings: How outer gradients are encoded and weighed.
        schedule: What the fixed world would do: chance picks the same values in the same round.
        kernels: What encodes and takes the means.
    """

    def __init__(
        self,
        fragments: Sequence[FragmentState],
        topology: Topology,
        settings: Settings,
        schedule: Schedule,
        kernels: Kernels,
    ) -> None:
        self._fragments = fragments
        self._in_group, self._rank, self._ranks = topology.stages, topology.group_rank, topology.group_size
        self._schedule = schedule
        self._all_reduce = all_reduce_for(
            settings.exchange, topology.num_groups, settings.codec, settings.numbers["mixing"], kernels
        )
        self._aggregation = Aggregation(settings.outer_clip_norm)

    def encode(self, snapshot: LaunchSnapshot, round: int) -> Encoded:
        """Encodes what a launch has read."""
        fragment, gradient = self._fragments[snapshot.fragment], snapshot.gradient
        memory = None if fragment.memory is None else fragment.storage.load(fragment.memory)
        encoded = self._at(snapshot.fragment, round).encode(gradient, memory)
        buffers = [buffer.reshape(-1).view(torch.uint8) for buffer in snapshot.buffers]
        # Rank 0 speaks for the buffers.
        blob = to_bytes(torch.cat([encoded.payloads[0], *(buffers if self._rank == 0 else ())]))
        norm = norm_squared(gradient)
        # A norm that is not finite does not decide: it may overflow where every value is finite.
        finite = isfinite(norm) or bool(gradient.isfinite().all())
        outer = digest(snapshot.outer, start=fragment.layout.start)
        own = blob, outer, finite, norm if isfinite(norm) else 0.0, snapshot.requests
        blobs, digests, finites, norms, requests = zip(*self._in_group[0].all_gather_object(own), strict=True)
        payloads = tuple(Payload(key_of(one), len(one)) for one in blobs)
        return Encoded(
            payloads=payloads,
            blobs={payload.key: one for payload, one in zip(payloads, blobs, strict=True)},
            memory=encoded.memory,
            digest=combined(list(digests)),
            finite=all(finites),
            norm_squared=sum(norms),
            requests=reduce(or_, requests),
        )

    def apply(self, record: Record, blobs: Mapping[str, Bytes], before: OuterState, memory: Tensor | None) -> Stepped:
        """Applies a record.

        Args:
            record: The record.
            blobs: The payloads that it names, by their keys.
            before: The outer state of the fragment.
            memory: What the compression remembers if the own flight counts.
        """
        began, fragment = time.perf_counter(), self._fragments[record.fragment]
        values = fragment.storage.load(before.values)
        count = self._aggregation.count([_control(own) for own in record.counted])
        all_reduce = self._at(record.fragment, record.round)
        sites = [[to_tensor(blobs[payload.key], values.device) for payload in own.payloads] for own in record.counted]
        mean = self._mean(fragment, all_reduce, sites, count, values)
        decoded = span_from(began, values.device)
        began = time.perf_counter()
        outer = outer_step(fragment, before, values, mean, counts=True, final=record.final)
        gathered = fragment.layout.all_gather(outer.values, self._in_group[2])
        buffers = self._mean_buffers(fragment, sites)
        start, device = fragment.layout.start, values.device
        result = SyncResult(
            outer=outer.moved(fragment.storage.store),
            memory=None if memory is None else fragment.storage.store(memory),
            residual=None,
            gathered=gathered,
            buffers=buffers,
            norms=fragment.norms,
            controls=[_control(own) for own in record.counted],
            left_out=(),
            changed=-1,
            counted=count,
            gradient_norm=whole_norm(mean, self._in_group[2]),
            bytes_sent=0,
            bytes_received=sum(map(len, blobs.values())),
            on_link_s=float("nan"),
            spans={"decode": decoded, "outer_step": span_from(began, device)},
            diagnostics=None,
        )
        moved = gathered - fragment.layout.all_gather(values, self._in_group[2])
        digests = self._in_group[2].all_gather_object((digest(values, start), digest(outer.values, start)))
        before_it, after_it = (combined(list(ranks)) for ranks in zip(*digests, strict=True))
        return Stepped(before_it, after_it, moved, result)

    def _at(self, fragment: int, round: int) -> AllReduce:
        return self._all_reduce.at(round * self._schedule.sync_every + self._schedule.offset(fragment))

    def _mean(
        self,
        fragment: FragmentState,
        all_reduce: AllReduce,
        sites: Sequence[Sequence[Tensor]],
        count: Count,
        like: Tensor,
    ) -> Tensor:
        """Returns the mean of what sites sent, each a payload from each of its ranks: that of this rank's shard."""
        layout = fragment.layout
        if all(len(payloads) == self._ranks for payloads in sites):
            end = all_reduce.payload_bytes(layout.length)
            return all_reduce.mean([payloads[self._rank][:end] for payloads in sites], count, like=like)
        decoded = [self._stretch(layout, all_reduce, payloads, like) for payloads in sites]
        return weighted_mean(((decoded[index], factor) for index, factor in count.factors.items()), like)

    def _stretch(
        self, layout: FragmentLayout, all_reduce: AllReduce, payloads: Sequence[Tensor], like: Tensor
    ) -> Tensor:
        """Decodes what of a site's payloads belongs to the shard of this rank."""
        stretch, position = torch.zeros_like(like), 0
        for payload, length in zip(payloads, layout.shard_lengths(len(payloads)), strict=True):
            first, last = max(position, layout.start), min(position + length, layout.start + layout.length)
            if first < last:
                values = like.new_empty(length)
                all_reduce.compression.decode(payload[: all_reduce.payload_bytes(length)], values)
                stretch[first - layout.start : last - layout.start] = values[first - position : last - position]
            position += length
        return stretch

    def _mean_buffers(self, fragment: FragmentState, sites: Sequence[Sequence[Tensor]]) -> dict[int, Tensor]:
        """Returns the plain mean of the buffers over the sites that count; what is the same everywhere stays so."""
        outer = fragment.buffers.outer
        if not outer:
            return {}
        nbytes = 4 * sum(buffer.numel() for buffer in outer)
        tails = [payloads[0][payloads[0].numel() - nbytes :] for payloads in sites]
        same = all(torch.equal(tail, tails[0]) for tail in tails)
        flat = mean_of_buffers(tails[:1] if same else tails)
        parts = flat.split([buffer.numel() for buffer in outer])
        return {index: part.view_as(own) for index, (part, own) in enumerate(zip(parts, outer, strict=True))}


def _control(own: Contribution) -> Control:
    """Returns what a contribution says, as a control vector does in the fixed world."""
    return Control(
        fragment=own.fragment,
        step=own.round,
        requests=0,
        weight=own.weight,
        digest=own.digest,
        norm_squared=own.norm_squared,
        changed=0,
        finite=own.finite,
    )


def to_bytes(values: Tensor) -> bytes:
    """Copies a uint8 tensor to bytes."""
    on_host = values.to("cpu").contiguous()
    return ctypes.string_at(on_host.data_ptr(), on_host.numel()) if on_host.numel() else b""


def to_tensor(data: Bytes, device: torch.device) -> Tensor:
    """Copies bytes to a uint8 tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
