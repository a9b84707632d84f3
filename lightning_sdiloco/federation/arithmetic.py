"""A site's arithmetic, which encodes outer gradients and computes new outer parameters from the
contributions counted in a record.

Sites process contributions in the order of the record, with the same compression, weights, mean and
outer step as groups that are launched together. If no site is ever late, the results of a
federation are bit-identical to the results of such groups. In the last round, sites send float32
values, which are averaged without weights, as in the final exchange of fixed groups. See [Note: the
last round].
"""

import ctypes
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.guard import Direction, direction_in_mean
from lightning_sdiloco.algorithm.merge import LandingRule
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.reduce import AllReduce, all_reduce_for
from lightning_sdiloco.algorithm.weighting import (
    Aggregation,
    Control,
    Count,
    Weighing,
    combined,
    plain,
)
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import resolve, weighted_mean
from lightning_sdiloco.engine.flight import (
    moved_by,
    norm_squared,
    outer_step,
    reported,
    span_from,
    unchanged,
    whole_norm,
)
from lightning_sdiloco.engine.fragments import Arrival, Commit, FragmentState, Landing, Launch, Span
from lightning_sdiloco.engine.matrices import proofs
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
from lightning_sdiloco.federation.codec import Bytes, RoundNumber, key_of
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
    """The effect of a record on the outer parameters.

    Attributes:
        before: The digest of the outer parameters before the record.
        after: The digest of the outer parameters after the record.
        outer: The new outer parameters, gathered from all ranks.
        moved: The change in the outer parameters, gathered from all ranks.
        arrival: The arrival to land, which is used only if this site has a flight in the record's
            round.
        direction: The direction of this site's contribution relative to all other contributions, or
            None if this site did not contribute.
    """

    before: int
    after: int
    outer: Tensor
    moved: Tensor
    arrival: Arrival
    direction: Direction | None


class Fetch(NamedTuple):
    """A payload for a rank to fetch, with the index of its source in the record and the rank that
    sent the payload.
    """

    source: int
    place: int
    payload: Payload


class _Source(NamedTuple):
    """The payloads of a site or of the hub, keyed by rank, with their decoder."""

    ranks: int
    is_exact: bool
    all_reduce: AllReduce
    payloads: dict[int, Tensor]


@dataclass(frozen=True)
class _Average:
    """The mean of a record, together with its inputs.

    Attributes:
        values: The outer parameters to update.
        mean: The mean, which the outer step overwrites.
        norm: The norm of the mean over all ranks.
        controls: The control vectors of the contributions, in the order of the record.
        count: The contributions that count, together with their factors.
        sources: The payloads that were averaged.
        span: The time spent averaging.
    """

    values: Tensor
    mean: Tensor
    norm: float
    controls: list[Control]
    count: Count
    sources: list[_Source]
    span: Span

    @property
    def trained(self) -> list[int]:
        return [control.weight for control in self.controls]

    def share(self, index: int) -> float:
        """Returns the weight of an outer gradient in the mean."""
        return self.count.factors.get(index, 0.0) / len(self.count.factors)

    def landing_of(self, record: Record, outer: OuterState, outer_step_span: Span) -> Landing:
        spans = {"decode": self.span, "outer_step": outer_step_span}
        return reported(
            record.fragment, record.round, self.controls, self.count, outer, self.norm, spans
        )


class SiteArithmetic:
    """Encodes a site's outer gradients and applies records. All methods run in the background and
    leave the state of the fragments unchanged.
    """

    def __init__(self, rounds: Rounds, topology: Topology) -> None:
        self._fragments = rounds.fragmented_model.fragments
        self._schedule = rounds.timetable.schedule
        settings = rounds.settings
        # All work is done in the first background stage, which owns this communicator.
        self._site = topology.stages[0]
        self._rank = topology.group_rank
        self._ranks = topology.group_size
        kept_share = settings.landing.kept
        self._all_reduce = all_reduce_for(
            settings.exchange, topology.num_groups, settings.codec, kept_share
        )
        self._exact_all_reduce = all_reduce_for(
            settings.exchange, topology.num_groups, resolve("fp32"), kept_share
        )
        self._weighing = weighing_of(settings)
        self._landing = settings.landing

    # Line 7: the outer gradient becomes payloads

    def encode(self, launch: Launch, begun: Contribution) -> Encoded:
        """Encodes the outer gradient of a launch. An exact payload has no rounding error and leaves
        the error memory unchanged.
        """
        fragment = self._fragments[launch.fragment]
        memory = fragment.load(fragment.memory)
        tuning = fragment.load(fragment.tuning)
        if begun.exact:
            encoded = self._exact_all_reduce.encode(launch.gradient, None)
            encoded = encoded._replace(memory=memory, tuning=tuning)
        else:
            all_reduce = self._rounding(launch.fragment, begun.round, launch.choice)
            encoded = all_reduce.encode(launch.gradient, memory, tuning)
        blob = to_bytes(encoded.payloads[0])
        if self._rank == 0:
            # Rank 0 sends the untrained state for all ranks.
            blob += sent_untrained(fragment.untrained, launch, begun.exact)
        payload = Payload(key_of(blob), len(blob))
        begun = replace(begun, buffers=fragment.untrained.size(launch.buffers, launch.travelling))
        sent = self._described(launch, begun, payload)
        return Encoded(sent, {payload.key: blob}, encoded.memory, encoded.tuning, launch.buffers)

    def _described(self, launch: Launch, begun: Contribution, payload: Payload) -> Contribution:
        """Completes a contribution with the payloads of all ranks and the values that the hub and
        the sites check. In-group collective.
        """
        norm = norm_squared(launch.gradient)
        # A non-finite norm is not decisive, because it may overflow even if every value is finite.
        is_finite = isfinite(norm) or bool(launch.gradient.isfinite().all())
        shard_digest = digest(launch.outer, start=self._fragments[launch.fragment].layout.start)
        # A norm that overflows is reported to the guard as the largest number.
        shard_norm = min(norm, _LARGEST) if is_finite else 0.0
        shards = self._site.all_gather_object(
            (payload, shard_digest, is_finite, shard_norm, begun.buffers)
        )
        payloads, digests, are_finite, norms, buffers = zip(*shards, strict=True)
        return replace(
            begun,
            digest=combined(list(digests)),
            payloads=tuple(Payload(*fields) for fields in payloads),
            finite=all(are_finite),
            norm_squared=min(sum(norms), _LARGEST),
            # Rank 0 sends the buffers.
            buffers=buffers[0],
        )

    # Lines 8 to 11: the mean and the outer step

    def apply(
        self,
        record: Record,
        blobs: Mapping[str, Bytes],
        before: OuterState,
        launch: Launch | None,
        encoded: Encoded | None,
    ) -> Stepped:
        """Applies a record to an outer state. Pass this site's launch in the record's round as
        ``launch`` and the payload of that launch as ``encoded``.
        """
        fragment = self._fragments[record.fragment]
        average = self._average(record, blobs, before)
        direction = self._direction(record, average, launch, encoded)
        began = time.perf_counter()
        if record.final:
            outer = moved_by(average.mean, before, average.values)
        elif not average.count.factors:
            outer = unchanged(before, average.values)
        else:
            outer = outer_step(
                fragment,
                before,
                average.values,
                average.mean,
                self._site,
                is_dense=self._schedule.is_dense_round(record.round),
            )
        gathered = fragment.layout.all_gather(outer.values, self._site)
        rows = [gathered]
        if launch is not None:
            rows = landed_rows(fragment, launch, outer.values, gathered, self._landing, self._site)
        untrained = self._untrained(fragment, record, average.sources, encoded)
        span = span_from(began, average.values.device)
        arrival = Arrival(
            commit=_commit(fragment, outer, encoded),
            rule=self._landing,
            gathered=rows,
            untrained=untrained,
            changed=0,
            trained=average.trained,
            landing=average.landing_of(record, outer, span),
        )
        moved = gathered - fragment.layout.all_gather(average.values, self._site)
        digests = digests_of(
            [average.values, outer.values], [fragment.layout.start] * 2, self._site
        )
        return Stepped(digests[0], digests[1], gathered, moved, arrival, direction)

    def _direction(
        self,
        record: Record,
        average: _Average,
        launch: Launch | None,
        encoded: Encoded | None,
    ) -> Direction | None:
        """Returns the direction of this site's contribution relative to all other counted
        contributions. In-group collective.
        """
        if launch is None or encoded is None or record.final:
            return None
        index = record.index_of(encoded.sent.site)
        if encoded.sent not in record.counted or index not in average.count.factors:
            return None
        part = average.share(index) * self._decoded(launch, encoded, average.values)
        products = [part.dot(part), part.dot(average.mean), average.mean.dot(average.mean)]
        of_ranks = torch.stack(self._site.all_gather(torch.stack(products)))
        part_squared, product, mean_squared = of_ranks.sum(dim=0).tolist()
        norms = [average.share(place) * c.norm for place, c in enumerate(average.controls)]
        return direction_in_mean(part_squared, product, mean_squared, norms.pop(index), norms)

    def _decoded(self, launch: Launch, encoded: Encoded, like: Tensor) -> Tensor:
        """Decodes this rank's payload in the same way as all other sites do."""
        all_reduce = self._exact_all_reduce
        if not encoded.sent.exact:
            all_reduce = self._rounding(launch.fragment, encoded.sent.round, launch.choice)
        (blob,) = encoded.blobs.values()
        end = all_reduce.payload_bytes(like.numel())
        payload = torch.frombuffer(bytearray(memoryview(blob)[:end]), dtype=torch.uint8)
        return all_reduce.decode_own([payload.to(like.device)], like)

    def _average(self, record: Record, blobs: Mapping[str, Bytes], before: OuterState) -> _Average:
        """Decodes the payloads of a record and averages them (line 8). In-group collective."""
        began = time.perf_counter()
        fragment = self._fragments[record.fragment]
        values = fragment.storage.load(before.values)
        controls = [_control_of(contribution) for contribution in record.counted]
        count = plain(controls) if record.final else self._weighing.count(controls, None)
        sources = self._received(record, blobs)
        # The hub's mean is one payload, which is used unchanged.
        mean_count = Count({0: 1.0}) if record.mean else count
        mean = self._mean(fragment.layout, sources, mean_count, values)
        span = span_from(began, values.device)
        # The outer step overwrites the mean, so its norm is computed now.
        norm = whole_norm(torch.linalg.vector_norm(mean), self._site)
        return _Average(values, mean, norm, controls, count, sources, span)

    def _rounding(self, fragment: int, round: RoundNumber, choice: int | None = None) -> AllReduce:
        return self._all_reduce.at(self._schedule.launch_of(fragment, round), choice)

    def _received(self, record: Record, blobs: Mapping[str, Bytes]) -> list[_Source]:
        """Collects the payloads that this rank needs. From a site with the same number of ranks,
        only the payload of the same rank is needed. From any other site, all payloads are needed.
        In-group collective.
        """
        sources = self._sources(record)
        for source, place, payload in fetched_by(self._rank, self._ranks, record):
            blob = bytearray(blobs[payload.key])
            sources[source].payloads[place] = torch.frombuffer(blob, dtype=torch.uint8)
        passed_on = []
        for rank in range(self._ranks):
            fetches = fetched_by(rank, self._ranks, record)
            passed_on.append([f for f in fetches if sources[f.source].ranks != self._ranks])
        if any(passed_on):
            self._pass_on(sources, passed_on)
        return sources

    def _sources(self, record: Record) -> list[_Source]:
        """Returns the sources of a record without their payloads."""
        are_exact = [contribution.exact for contribution in record.counted]
        if record.mean:
            # The hub's mean replaces all contributions.
            are_exact = [record.final]
        rounding = self._rounding(record.fragment, record.round)
        sources = []
        for payloads, is_exact in zip(record.sources, are_exact, strict=True):
            all_reduce = self._exact_all_reduce if is_exact else rounding
            sources.append(_Source(len(payloads), is_exact, all_reduce, {}))
        return sources

    def _pass_on(self, sources: Sequence[_Source], fetches: Sequence[Sequence[Fetch]]) -> None:
        """Distributes the fetched payloads to all ranks. In-group collective."""
        flat = torch.zeros(max(map(_nbytes, fetches)), dtype=torch.uint8)
        fetched = [sources[source].payloads[place] for source, place, _ in fetches[self._rank]]
        if fetched:
            flat[: _nbytes(fetches[self._rank])] = torch.cat(fetched)
        for fetches_of_rank, gathered in zip(fetches, self._site.all_gather(flat), strict=True):
            position = 0
            for source, place, payload in fetches_of_rank:
                end = position + payload.size
                sources[source].payloads.setdefault(place, gathered[position:end])
                position = end

    def _mean(
        self, layout: FragmentLayout, sources: Sequence[_Source], count: Count, like: Tensor
    ) -> Tensor:
        all_reduce = sources[0].all_reduce
        is_uniform = all(
            source.ranks == self._ranks and source.all_reduce is all_reduce for source in sources
        )
        if not is_uniform:
            return self._mean_of_unlike(layout, sources, count, like)
        end = all_reduce.payload_bytes(layout.length)
        payloads = [source.payloads[self._rank][:end].to(like.device) for source in sources]
        return all_reduce.mean(payloads, count, like=like)

    def _mean_of_unlike(
        self, layout: FragmentLayout, sources: Sequence[_Source], count: Count, like: Tensor
    ) -> Tensor:
        """Averages contributions from sites with different codes or numbers of ranks."""
        codes = [source.all_reduce.compression for source in sources]
        decoded = [
            self._stretch(layout, source, code.decode, like)
            for source, code in zip(sources, codes, strict=True)
        ]
        senders = None
        if any(code.traits.counts_senders for code in codes):
            senders = torch.zeros_like(like)
            for index in count.factors:
                senders += self._stretch(layout, sources[index], codes[index].places, like)
        weighted = ((decoded[index], factor) for index, factor in count.factors.items())
        return weighted_mean(weighted, like, senders)

    def _stretch(
        self,
        layout: FragmentLayout,
        source: _Source,
        read: Callable[[Tensor, Tensor], None],
        like: Tensor,
    ) -> Tensor:
        """Returns the values of this rank's shard, which ``read`` extracts from shards of different
        sizes.
        """
        stretch = torch.zeros_like(like)
        position = 0
        for place, length in enumerate(layout.shard_lengths(source.ranks)):
            first = max(position, layout.start)
            last = min(position + length, layout.start + layout.length)
            if first < last:
                values = like.new_empty(length)
                payload = source.payloads[place][: source.all_reduce.payload_bytes(length)]
                read(payload.to(like.device), values)
                overlap = values[first - position : last - position]
                stretch[first - layout.start : last - layout.start] = overlap
            position += length
        return stretch

    # Untrained state, which follows rank 0's values in the payload

    def _untrained(
        self,
        fragment: FragmentState,
        record: Record,
        sources: Sequence[_Source],
        encoded: Encoded | None,
    ) -> Arrived:
        """Computes the new untrained state of a fragment from the bytes sent by the counted sites.
        In-group collective.
        """
        state = fragment.untrained
        travels = len(state.outer)
        if not travels and not state.own.places:
            return NOTHING
        sent = self._sent(fragment, record, sources) if self._rank == 0 else {}
        is_sent = torch.zeros(
            travels + len(state.own.places), dtype=torch.uint8, device=fragment.storage.device
        )
        is_sent[list(sent)] = 1
        self._site.broadcast(is_sent)
        indices = is_sent.nonzero().flatten().tolist()
        travelling = [index for index in indices if index < travels]
        arrived_state = NOTHING
        if travelling:
            arrived_state = self._arrived(fragment, travelling, sent, encoded)
        of_sites = dict[str, Tensor]()
        for index in indices[len(travelling) :]:
            place = state.own.places[index - travels]
            # If a tensor is shared by a site's ranks, the site keeps its own values.
            if not is_sharded(place.tensor):
                of_sites[place.name] = self._first(state.own.new_empty(place), sent.get(index, {}))
        return arrived_state._replace(own=of_sites)

    def _arrived(
        self,
        fragment: FragmentState,
        travelling: Sequence[int],
        sent: Mapping[int, dict[str, Tensor]],
        encoded: Encoded | None,
    ) -> Arrived:
        """Computes the agreed values of the travelling tensors on rank 0 and broadcasts them.
        In-group collective.
        """
        state = fragment.untrained
        nbytes = arrived_bytes(state, travelling)
        flat = torch.empty(nbytes, dtype=torch.uint8, device=fragment.storage.device)
        if self._rank == 0:
            flat.copy_(agreed(state, {index: sent[index] for index in travelling}))
        self._site.broadcast(flat)
        local = state.outer if encoded is None else encoded.untrained
        return arrived(state, travelling, flat, local)

    def _sent(
        self, fragment: FragmentState, record: Record, sources: Sequence[_Source]
    ) -> dict[int, dict[str, Tensor]]:
        """Returns the bytes of the untrained state sent by the counted sites or the hub, keyed by
        tensor and sender.
        """
        travels = len(fragment.untrained.outer)
        sent = dict[int, dict[str, Tensor]]()
        # The hub left these out of its mean.
        without_buffers = set[str]() if record.mean else record.without_buffers
        for contribution, source in zip(record.counted, sources, strict=False):
            if contribution.site in without_buffers:
                continue
            for index, values in self._changed_by(fragment, source).items():
                # Sites use their own values of tensors that they keep until all sites have sent
                # theirs.
                if index < travels or record.final:
                    flat = torch.frombuffer(bytearray(values), dtype=torch.uint8)
                    senders = sent.setdefault(index, {})
                    senders[f"site {contribution.site!r}"] = flat.to(fragment.storage.device)
        return sent

    def _first(self, like: Tensor, of_sites: Mapping[str, Tensor]) -> Tensor:
        """Returns the first site's tensor, given the bytes from all sites on rank 0. In-group
        collective.
        """
        if self._rank == 0:
            tensors = {
                site: from_bytes(flat.to(like.device), like=like) for site, flat in of_sites.items()
            }
            like, _ = new_outer(Kind.FIRST, tensors, like, keeps_outer=False)
        flat = untrained_bytes(like)
        self._site.broadcast(flat)
        return from_bytes(flat, like=like)

    def _changed_by(self, fragment: FragmentState, source: _Source) -> dict[int, bytes]:
        """Returns the bytes of the tensors that a site or the hub marks as changed."""
        start = source.all_reduce.payload_bytes(fragment.layout.shard_lengths(source.ranks)[0])
        sizes = sizes_of(fragment.untrained).sent(source.is_exact)
        return unpacked(to_bytes(source.payloads[0][start:]), sizes)


def weighing_of(settings: Settings) -> Weighing:
    """Returns the weighing for contributions that have passed the hub's guard. The weighing has no
    state.
    """
    return settings.weighing or Aggregation(settings.outer.clip_norm)


def landed_rows(
    fragment: FragmentState,
    launch: Launch,
    after: Tensor,
    gathered: Tensor,
    rule: LandingRule,
    ranks: Communicator,
) -> list[Tensor]:
    """Gathers the values that a landing rule requests. The values come either from the launch or
    from the outer parameters ``after`` the record, which are already available as ``gathered``.
    In-group collective.
    """
    rows = []
    for row in rule.gathered(launch.gradient, launch.outer, after):
        rows.append(gathered if row is after else fragment.layout.all_gather(row, ranks))
    return rows


def _control_of(contribution: Contribution) -> Control:
    return Control(
        contribution.fragment,
        contribution.round,
        requests=0,
        weight=contribution.weight,
        digest=contribution.digest,
        norm_squared=contribution.norm_squared,
        changed=0,
        finite=contribution.finite,
    )


def _commit(fragment: FragmentState, outer: OuterState, encoded: Encoded | None) -> Commit:
    """Builds a fragment's state after a landing."""
    commit = fragment.committed()._replace(outer=outer, memory=None, tuning=None)
    if encoded is not None:
        commit = commit._replace(memory=encoded.memory, tuning=encoded.tuning)
    return fragment.stored(commit)


def _nbytes(fetches: Sequence[Fetch]) -> int:
    return sum(fetch.payload.size for fetch in fetches)


def sizes_of(state: UntrainedState) -> Sizes:
    """Returns the sizes of the tensors in a fragment's untrained state."""
    untrained = tuple(state.nbytes(index) for index in range(len(state.outer)))
    return Sizes(numel=0, untrained=untrained, own=tuple(state.own.nbytes()))


def sent_untrained(state: UntrainedState, launch: Launch, is_exact: bool) -> bytes:
    """Packs the untrained state for the payload of a launch."""
    changed = {
        index: to_bytes(untrained_bytes(launch.buffers[index])) for index in launch.travelling
    }
    return packed(changed, sizes_of(state).sent(is_exact))


def fetched_by(rank: int, ranks: int, record: Record) -> list[Fetch]:
    """Lists the payloads that a rank must fetch for a record."""
    fetches = []
    for source, payloads in enumerate(record.sources):
        for place in places_of(rank, ranks, len(payloads)):
            fetches.append(Fetch(source, place, payloads[place]))
    return fetches


def digests_of(values: Sequence[Tensor], starts: Sequence[int], ranks: Communicator) -> list[int]:
    """Returns the digest of each fragment, given this rank's shards and their start positions.
    In-group collective.
    """
    of_this_rank = [digest(shard, start) for shard, start in zip(values, starts, strict=True)]
    by_rank = ranks.all_gather_object(of_this_rank)
    return [combined(list(of_fragment)) for of_fragment in zip(*by_rank, strict=True)]


def to_bytes(values: Tensor) -> bytes:
    on_host = values.to("cpu").contiguous()
    return ctypes.string_at(on_host.data_ptr(), on_host.numel()) if on_host.numel() else b""


# The number of values in the self-test: not a multiple of a block, so that padding is also tested.
_TESTED = 4099


def _tested_values(seed: int) -> Tensor:
    # These are not random numbers, because torch's differ between processors.
    numbers = torch.arange(_TESTED, dtype=torch.int64) * 7919 * (2 * seed + 1) % 2003 - 1001
    return numbers.to(torch.float32) / 997


def self_test(settings: Settings, fragments: Sequence[Fragment], device: torch.device) -> str:
    """Applies this site's compression, weights, mean and outer step to known values and returns a
    digest of the results.
    """
    outer = _tested_values(0).to(device)
    all_reduce = all_reduce_for(settings.exchange, 1, settings.codec, settings.landing.kept).at(1)
    payloads = []
    controls = []
    for group in range(3):
        gradient = _tested_values(1 + group).to(device)
        payloads.append(all_reduce.encode(gradient, None).payloads[0])
        controls.append(
            Control(0, 1, 0, 3 + group, 0, norm_squared(gradient), changed=0, finite=True)
        )
    count = weighing_of(settings).count(controls, None)
    optimizer = outer_optimizer_for(settings, [outer])
    state = optimizer.take_initial()[0]
    seal = hashlib.sha256(repr(proofs(fragments, settings.outer.map, device)).encode())
    for _ in range(2):
        mean = all_reduce.mean(payloads, count, like=outer)
        state = optimizer.step(0, state, state.values, mean)
        seal.update(to_bytes(state.values.view(torch.uint8)))
    return seal.hexdigest()
