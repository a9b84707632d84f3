"""The arithmetic of a site: its outer gradient becomes bytes, and what a record counts becomes new
outer parameters.

It is the fixed world's: the same compression, weights, mean and outer step, in the order of the
record. So a federation in which no site is ever late has the bits of the fixed world. What is sent
for a last round is float32, and its record takes the plain mean, as the final exchange does there;
see [Note: the last round].
"""

import ctypes
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.reduce import AllReduce, all_reduce_for
from lightning_sdiloco.algorithm.weighting import Aggregation, Control, Count, combined, plain
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import resolve, weighted_mean
from lightning_sdiloco.engine.flight import (
    moved_by,
    norm_squared,
    outer_step,
    reported,
    unchanged,
    whole_norm,
)
from lightning_sdiloco.engine.fragments import Arrival, FragmentState, Launch
from lightning_sdiloco.engine.matrices import proofs
from lightning_sdiloco.engine.measure import span_from
from lightning_sdiloco.engine.outer import OuterState, outer_optimizer_for
from lightning_sdiloco.engine.rounds import Rounds
from lightning_sdiloco.engine.shards import FragmentLayout, digest, is_sharded
from lightning_sdiloco.engine.untrained import (
    NOTHING,
    Arrived,
    Kind,
    UntrainedState,
    agreed,
    arrived,
    arrived_bytes,
    from_bytes,
    new_outer,
)
from lightning_sdiloco.engine.untrained import to_bytes as untrained_bytes
from lightning_sdiloco.federation.codec import Bytes, key_of
from lightning_sdiloco.federation.messages import Contribution, Payload, Record
from lightning_sdiloco.federation.remote import places_of
from lightning_sdiloco.federation.untrained import Sizes, packed, unpacked

_LARGEST = sys.float_info.max


class Encoded(NamedTuple):
    sent: Contribution
    blobs: dict[str, Bytes]
    memory: Tensor | None
    tuning: Tensor | None
    untrained: Sequence[Tensor]


class Stepped(NamedTuple):
    before: int
    after: int
    moved: Tensor
    arrival: Arrival


class _Site(NamedTuple):
    """Holds what came of a site: how many ranks it has, how it encodes, and their payloads by
    rank, on the host.
    """

    ranks: int
    all_reduce: AllReduce
    payloads: dict[int, Tensor]


class SiteArithmetic:
    """Encodes for a site, and applies records. Everything here runs in the background, and writes
    to no record.
    """

    def __init__(self, rounds: Rounds, topology: Topology) -> None:
        self._fragments = rounds.fragments
        self._schedule = rounds.schedule
        settings = rounds.settings
        # All is done in the first stage of the background, whose communicator this is.
        self._site = topology.stages[0]
        self._rank = topology.group_rank
        self._ranks = topology.group_size
        self._all_reduce, self._exact_all_reduce = (
            all_reduce_for(settings.exchange, topology.num_groups, codec, settings.landing.kept)
            for codec in (settings.codec, resolve("fp32"))
        )
        self._aggregation = Aggregation(settings.outer.clip_norm)
        self._landing = settings.landing

    def encode(self, launch: Launch, begun: Contribution) -> Encoded:
        """Encodes what a launch has read. What is exact leaves nothing out, and what was left out
        before stays so.
        """
        fragment = self._fragments[launch.fragment]
        gradient = launch.gradient
        memory = fragment.load(fragment.memory)
        tuning = fragment.load(fragment.tuning)
        if begun.exact:
            encoded = self._exact_all_reduce.encode(gradient, None)._replace(
                memory=memory, tuning=tuning
            )
        else:
            encoded = self._at(launch.fragment, begun.round, launch.choice).encode(
                gradient, memory, tuning
            )
        blob = to_bytes(encoded.payloads[0])
        if self._rank == 0:
            # Rank 0 speaks for the untrained state.
            blob += sent_untrained(fragment.untrained, launch, begun.exact)
        payload = Payload(key_of(blob), len(blob))
        norm = norm_squared(gradient)
        # A norm that is not finite does not decide: it may overflow where every value is finite.
        finite = isfinite(norm) or bool(gradient.isfinite().all())
        outer = digest(launch.outer, start=fragment.layout.start)
        # One that overflows is reported as the largest number, for the guard.
        own = payload, outer, finite, min(norm, _LARGEST) if finite else 0.0
        payloads, digests, finites, norms = zip(*self._site.all_gather_object(own), strict=True)
        sent = replace(
            begun,
            digest=combined(list(digests)),
            payloads=tuple(Payload(*one) for one in payloads),
            finite=all(finites),
            norm_squared=min(sum(norms), _LARGEST),
        )
        return Encoded(sent, {payload.key: blob}, encoded.memory, encoded.tuning, launch.buffers)

    def apply(
        self, record: Record, blobs: Mapping[str, Bytes], before: OuterState, own: Encoded | None
    ) -> Stepped:
        began = time.perf_counter()
        fragment = self._fragments[record.fragment]
        memory, tuning = (None, None) if own is None else (own.memory, own.tuning)
        values = fragment.storage.load(before.values)
        controls = [
            Control(
                own.fragment,
                own.round,
                0,
                own.weight,
                own.digest,
                own.norm_squared,
                changed=0,
                finite=own.finite,
            )
            for own in record.counted
        ]
        count = plain(controls) if record.final else self._aggregation.count(controls)
        sites = self._received(record, blobs)
        mean = self._mean(fragment, sites, Count({0: 1.0}) if record.mean else count, values)
        decoded = span_from(began, values.device)
        # The outer step takes the mean.
        norm = whole_norm(torch.linalg.vector_norm(mean), self._site)
        began = time.perf_counter()
        if record.final:
            outer = moved_by(mean, before, values)
        elif not count.factors:
            outer = unchanged(before, values)
        else:
            is_dense = self._schedule.is_dense_round(record.round)
            outer = outer_step(fragment, before, values, mean, self._site, is_dense=is_dense)
        gathered = fragment.layout.all_gather(outer.values, self._site)
        untrained = self._untrained(fragment, record, sites, own)
        spans = {"decode": decoded, "outer_step": span_from(began, values.device)}
        arrival = Arrival(
            commit=fragment.committed()._replace(
                outer=outer.moved(fragment.storage.store),
                memory=fragment.store(memory),
                tuning=fragment.store(tuning),
            ),
            rule=self._landing,
            gathered=[gathered],
            untrained=untrained,
            changed=0,
            trained=[control.weight for control in controls],
            landing=reported(record.fragment, record.round, controls, count, outer, norm, spans),
        )
        moved = gathered - fragment.layout.all_gather(values, self._site)
        digests = digests_of([values, outer.values], [fragment.layout.start] * 2, self._site)
        return Stepped(digests[0], digests[1], moved, arrival)

    def _at(self, fragment: int, round: int, choice: int | None = None) -> AllReduce:
        return self._all_reduce.at(self._schedule.launch_of(fragment, round), choice)

    def _received(self, record: Record, blobs: Mapping[str, Bytes]) -> list[_Site]:
        """Returns what came of sites, or the hub: of one of as many ranks what this rank needs, of
        others all.
        """
        of_ranks = [fetched_by(rank, self._ranks, record) for rank in range(self._ranks)]
        rounded = self._at(record.fragment, record.round)
        exact = [record.final] if record.mean else [own.exact for own in record.counted]
        encoded_by = [self._exact_all_reduce if own else rounded for own in exact]
        sites = [
            _Site(len(payloads), by, {})
            for payloads, by in zip(record.sources, encoded_by, strict=True)
        ]
        for site, place, payload in of_ranks[self._rank]:
            sites[site].payloads[place] = torch.frombuffer(
                bytearray(blobs[payload.key]), dtype=torch.uint8
            )
        # What came of sites of another number of ranks all need, whichever has fetched it.
        passed = [[one for one in own if sites[one[0]].ranks != self._ranks] for own in of_ranks]
        sizes = [[payload.size for *_, payload in own] for own in passed]
        if any(passed):
            flat = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8)
            if passed[self._rank]:
                here = [sites[site].payloads[place] for site, place, _ in passed[self._rank]]
                flat[: sum(sizes[self._rank])] = torch.cat(here)
            for own, lengths, came in zip(passed, sizes, self._site.all_gather(flat), strict=True):
                parts = came[: sum(lengths)].split(lengths) if lengths else ()
                for (site, place, _), part in zip(own, parts, strict=True):
                    sites[site].payloads.setdefault(place, part)
        return sites

    def _mean(
        self, fragment: FragmentState, sites: Sequence[_Site], count: Count, like: Tensor
    ) -> Tensor:
        layout = fragment.layout
        all_reduce = sites[0].all_reduce
        if all(site.ranks == self._ranks and site.all_reduce is all_reduce for site in sites):
            end = all_reduce.payload_bytes(layout.length)
            return all_reduce.mean(
                [site.payloads[self._rank][:end].to(like.device) for site in sites],
                count,
                like=like,
            )
        codes = [site.all_reduce.compression for site in sites]
        factors = count.factors.items()
        decoded = [
            self._stretch(layout, site, code.decode, like)
            for site, code in zip(sites, codes, strict=True)
        ]
        senders = (
            torch.zeros_like(like) if any(code.traits.counts_senders for code in codes) else None
        )
        if senders is not None:
            for index in count.factors:
                senders += self._stretch(layout, sites[index], codes[index].places, like)
        return weighted_mean(((decoded[index], factor) for index, factor in factors), like, senders)

    def _stretch(
        self,
        layout: FragmentLayout,
        site: _Site,
        read: Callable[[Tensor, Tensor], None],
        like: Tensor,
    ) -> Tensor:
        stretch = torch.zeros_like(like)
        position = 0
        for place, length in enumerate(layout.shard_lengths(site.ranks)):
            first = max(position, layout.start)
            last = min(position + length, layout.start + layout.length)
            if first < last:
                values = like.new_empty(length)
                payload = site.payloads[place][: site.all_reduce.payload_bytes(length)].to(
                    like.device
                )
                read(payload, values)
                stretch[first - layout.start : last - layout.start] = values[
                    first - position : last - position
                ]
            position += length
        return stretch

    def _untrained(
        self, fragment: FragmentState, record: Record, sites: Sequence[_Site], own: Encoded | None
    ) -> Arrived:
        """Returns what becomes of the untrained state of a fragment, given what the sites that
        count sent.
        """
        state = fragment.untrained
        travels = len(state.outer)
        if not travels and not state.own.places:
            return NOTHING
        sent = self._sent(fragment, record, sites) if self._rank == 0 else {}
        is_sent = torch.zeros(
            travels + len(state.own.places), dtype=torch.uint8, device=fragment.storage.device
        )
        is_sent[list(sent)] = 1
        self._site.broadcast(is_sent)
        indices = is_sent.nonzero().flatten().tolist()
        travelling = [index for index in indices if index < travels]
        result = NOTHING
        if travelling:
            flat = torch.empty(
                arrived_bytes(state, travelling), dtype=torch.uint8, device=is_sent.device
            )
            if self._rank == 0:
                flat.copy_(agreed(state, {index: sent[index] for index in travelling}))
            self._site.broadcast(flat)
            result = arrived(state, travelling, flat, state.outer if own is None else own.untrained)
        kept = dict[str, Tensor]()
        for index in indices[len(travelling) :]:
            place = state.own.places[index - travels]
            # A site whose ranks share a tensor keeps its own.
            if not is_sharded(place.tensor):
                kept[place.name] = self._first(state.own.new_empty(place), sent.get(index, {}))
        return result._replace(own=kept)

    def _sent(
        self, fragment: FragmentState, record: Record, sites: Sequence[_Site]
    ) -> dict[int, dict[str, Tensor]]:
        """Returns the bytes that counted sites, or the hub, sent of untrained state, by tensor and
        sender.
        """
        device = fragment.storage.device
        travels = len(fragment.untrained.outer)
        sent = dict[int, dict[str, Tensor]]()
        for contribution, site in zip(record.counted, sites, strict=False):
            is_exact = record.final if record.mean else contribution.exact
            for index, values in self._untrained_of(fragment, site, is_exact).items():
                # What sites keep is theirs until all have sent it.
                if index < travels or record.final:
                    piece = torch.frombuffer(bytearray(values), dtype=torch.uint8).to(device)
                    sent.setdefault(index, {})[f"site {contribution.site!r}"] = piece
        return sent

    def _first(self, like: Tensor, of_sites: Mapping[str, Tensor]) -> Tensor:
        """Returns what the first site keeps, given the bytes of all sites at the first rank.
        In-group collective.
        """
        if self._rank == 0:
            sent = {
                who: from_bytes(flat.to(like.device), like=like) for who, flat in of_sites.items()
            }
            like, _ = new_outer(Kind.FIRST, sent, like, keeps_outer=False)
        flat = untrained_bytes(like)
        self._site.broadcast(flat)
        return from_bytes(flat, like=like)

    def _untrained_of(
        self, fragment: FragmentState, site: _Site, is_exact: bool
    ) -> dict[int, bytes]:
        """Returns the bytes of what a site, or the hub, says has changed."""
        values = site.all_reduce.payload_bytes(fragment.layout.shard_lengths(site.ranks)[0])
        return unpacked(
            to_bytes(site.payloads[0][values:]), sizes_of(fragment.untrained).sent(is_exact)
        )


def sizes_of(state: UntrainedState) -> Sizes:
    """Returns the sizes of the untrained state of a fragment."""
    untrained = tuple(state.nbytes(index) for index in range(len(state.outer)))
    return Sizes(numel=0, untrained=untrained, own=tuple(state.own.nbytes()))


def sent_untrained(state: UntrainedState, launch: Launch, is_exact: bool) -> bytes:
    """Returns what a launch sends of the untrained state, as bytes."""
    changed = {
        index: to_bytes(untrained_bytes(launch.buffers[index])) for index in launch.travelling
    }
    return packed(changed, sizes_of(state).sent(is_exact))


def fetched_by(rank: int, ranks: int, record: Record) -> list[tuple[int, int, Payload]]:
    """Returns the payloads that a rank fetches: source in the record, rank there, and name."""
    return [
        (source, place, payloads[place])
        for source, payloads in enumerate(record.sources)
        for place in places_of(rank, ranks, len(payloads))
    ]


def digests_of(values: Sequence[Tensor], starts: Sequence[int], ranks: Communicator) -> list[int]:
    """Returns the digests of fragments from each rank's shards and where they start. In-group
    collective.
    """
    shards = ranks.all_gather_object(
        [digest(own, start) for own, start in zip(values, starts, strict=True)]
    )
    return [combined(list(own)) for own in zip(*shards, strict=True)]


def to_bytes(values: Tensor) -> bytes:
    on_host = values.to("cpu").contiguous()
    return ctypes.string_at(on_host.data_ptr(), on_host.numel()) if on_host.numel() else b""


# Values of the self-test: no multiple of a block, so that padding is tested too.
_TESTED = 4099


def self_test(settings: Settings, fragments: Sequence[Fragment], device: torch.device) -> str:
    """Returns what the arithmetic of this site makes of known values: compression, weights, mean
    and outer step.
    """
    # No random numbers: torch's differ between processors.
    numbers = (
        torch.arange(_TESTED, dtype=torch.int64) * 7919 * (2 * seed + 1) % 2003 - 1001
        for seed in range(4)
    )
    outer, *gradients = ((one.to(torch.float32) / 997).to(device) for one in numbers)
    all_reduce = all_reduce_for(settings.exchange, 1, settings.codec, settings.landing.kept).at(1)
    payloads = [all_reduce.encode(gradient, None).payloads[0] for gradient in gradients]
    controls = [
        Control(
            0,
            1,
            0,
            weight=3 + group,
            digest=0,
            norm_squared=norm_squared(own),
            changed=0,
            finite=True,
        )
        for group, own in enumerate(gradients)
    ]
    optimizer = outer_optimizer_for(settings, [outer])
    state = optimizer.take_initial()[0]
    seal = hashlib.sha256(repr(proofs(fragments, settings.outer.map, device)).encode())
    for _ in range(2):
        mean = all_reduce.mean(
            payloads, Aggregation(settings.outer.clip_norm).count(controls), like=outer
        )
        state = optimizer.step(0, state, state.values, mean)
        seal.update(to_bytes(state.values.view(torch.uint8)))
    return seal.hexdigest()
