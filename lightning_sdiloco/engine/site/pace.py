"""The pace of a site: when its fragments launch and land is what the rules of the federation say.

The training thread owns the follower and talks to the connection; see [Note: one site, many followers]. Encoding and
averaging run in the background, and are looked after once in every inner step. A site never waits for what is not
there, except where the follower says so.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdiloco.algorithm import combined, digest
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine.background import Pending, Stages
from lightning_sdiloco.engine.flight import Flight, LaunchSnapshot, Purpose
from lightning_sdiloco.engine.flight import Landing as LandingReport
from lightning_sdiloco.engine.measurements import Span
from lightning_sdiloco.engine.parameters.sharding import reshard
from lightning_sdiloco.engine.recovery import recover
from lightning_sdiloco.engine.requests import Mailbox
from lightning_sdiloco.engine.rounds import Means, Rounds
from lightning_sdiloco.engine.site.arithmetic import Bytes, Encoded, SiteArithmetic, Stepped
from lightning_sdiloco.engine.site.shared import SharedConnection
from lightning_sdiloco.engine.site.states import Arrived, from_part, to_part
from lightning_sdiloco.federation import Contribution, Follower, Landing, Record, Refused, StateHeader
from lightning_sdiloco.hub import (
    Called,
    Lost,
    Recorded,
    StateArrived,
    StateWanted,
    Waiting,
    Welcomed,
)

_log = logging.getLogger(__name__)

# How long a site listens at a time while it waits, in seconds.
_MOMENT = 0.05


@dataclass
class _Launched:
    """Holds a launch that is being encoded, or has been sent."""

    flight: Flight
    begun: Contribution
    pending: Pending[Encoded]
    encoded: Encoded | None = None


@dataclass
class _Applied:
    """Holds a record that is being applied."""

    record: Record
    pending: Pending[Stepped]


class SitePace:
    """Launches and lands as the records of a federation say; see [Note: how a site uses its connection].

    Args:
        model: The model.
        rounds: Its fragments.
        topology: The ranks of this site.
        means: What the engine has for all rounds.
        connection: The connection to the hub.
        follower: The rules.
        arithmetic: What encodes and applies.
        waits: Whether training ever waits for a landing.
    """

    def __init__(
        self,
        model: nn.Module,
        rounds: Rounds,
        topology: Topology,
        means: Means,
        connection: SharedConnection,
        follower: Follower,
        arithmetic: SiteArithmetic,
        waits: bool = True,
    ) -> None:
        self._model, self._rounds, self._topology, self._means = model, rounds, topology, means
        self._connection, self.follower, self._arithmetic, self._waits = connection, follower, arithmetic, waits
        self._launched: dict[int, _Launched] = {}
        self._applied: dict[int, _Applied] = {}
        self._blobs: dict[str, Mapping[str, Bytes]] = {}
        self._refused: list[str] = []
        self._now = time.monotonic()
        self._has_left = False
        connection.hello(follower)
        self.hear()

    # Training

    @property
    def is_over(self) -> bool:
        """Whether the last round of every fragment has landed."""
        return all(own.ended for own in self.follower.fragments)

    def join(self, step: int) -> None:
        """Waits until the hub has let this site in, it has a state, and all records so far have landed.

        Raises:
            ExchangeError: If the hub cannot be reached for longer than patience.
        """
        while not self._has_joined():
            self._connection.wait(_MOMENT)
            self.hear()
            for _ in self._land_ready(step):
                pass
            self._look_after()

    def _has_joined(self) -> bool:
        follower = self.follower
        # A flight lands in its time.
        landed = all(own.flight or own.applied.round >= own.closed for own in follower.fragments)
        return follower.reachable and follower.follows and landed

    def trained(self, samples: int) -> None:
        """Counts an inner step of so many samples."""
        self.follower.trained(samples * self._topology.group_size)

    @torch.no_grad()
    def launch_due(self, step: int, mailbox: Mailbox) -> int:
        """Launches what is due; see `Pace.launch_due`."""
        self.hear()
        for call in self.follower.skips():
            self._connection.skip(call)
        due = self.follower.launches(step)
        if due:
            self._rounds.require_coverage()
        for index in due:
            self._launch(index, step, mailbox.take())
        self._send()
        return len(due)

    def land_due(self, step: int) -> Iterator[LandingReport]:
        """Lands what is due, and waits where the rules say so; see `Pace.land_due`."""
        yield from self._land_ready(step)
        began = time.perf_counter()
        while self._waits and self.follower.waits(step, self._now):
            self._connection.wait(_MOMENT)
            self.hear()
            yield from self._land_ready(step, (began, time.perf_counter()))
        self._look_after()

    @torch.no_grad()
    def land_all(self, step: int) -> Iterator[LandingReport]:
        """Launches all that the site holds, follows until it is recorded, and leaves."""
        self.follower.finish()
        while not self.follower.finished and not self._has_left:
            self.launch_due(step, Mailbox())
            yield from self._land_ready(step)
            self._look_after()
            if not self.follower.finished:
                self._connection.wait(_MOMENT)
        self.close()

    def launch_final(self, step: int, mailbox: Mailbox) -> None:
        """Does nothing: a site that ends takes no mean of its own, and the others go on."""

    def close(self) -> None:
        """Leaves the federation: nobody waits for this site any more."""
        if not self._has_left:
            self._has_left = True
            self._connection.beat(self.follower)
            self._connection.close()

    def _look_after(self) -> None:
        self._send()
        if self.follower.reachable and self.follower.wants_state:
            self._connection.ask(self._refused)
        self._connection.beat(self.follower)

    # Launching

    def _launch(self, index: int, step: int, requests: int) -> None:
        began = time.perf_counter()
        begun = self.follower.begin(index, step)
        fragment = self._rounds.fragments[index]
        # Nobody tells a site in advance which buffers others have changed, so all of them travel.
        snapshot = fragment.launch(step, float("inf"), Purpose.MEAN, requests)._replace(purpose=Purpose.ROUND)
        self._start(snapshot, begun, (began, time.perf_counter()))

    def _start(self, snapshot: LaunchSnapshot, begun: Contribution, launch: Span) -> None:
        pending = self._in_background(lambda: self._arithmetic.encode(snapshot, begun.round))
        flight = Flight(snapshot, pending, launch)
        self._launched[snapshot.fragment] = _Launched(flight, begun, pending)
        self._rounds.flights.append(flight)

    def _in_background(self, work: Callable[[], Any]) -> Pending[Any]:
        return self._means.background.start(Stages(work, _same, _same))

    def _send(self, wait: bool = False) -> None:
        """Sends what has been encoded."""
        encoding = {index: one.pending for index, one in self._launched.items() if one.encoded is None}
        for index in encoding if wait else self._connection.ready(encoding):
            launched = self._launched[index]
            if launched.encoded is None:
                launched.encoded = encoded = launched.pending.result()
                sent = replace(
                    launched.begun,
                    digest=encoded.digest,
                    payloads=encoded.payloads,
                    finite=encoded.finite,
                    norm_squared=encoded.norm_squared,
                )
                own = self.follower.fragments[index].flight
                if own is not None and own.own == sent:
                    # It was launched before the checkpoint, which has it whole.
                    self._connection.contribute(sent, encoded.blobs)
                elif (complete := self.follower.complete(sent)) is not None:
                    self._connection.contribute(complete, encoded.blobs)
                self._drop_flights()

    def _drop_flights(self) -> None:
        """Forgets launches that the follower no longer has in flight."""
        for index in [i for i in self._launched if self.follower.fragments[i].flight is None]:
            self._rounds.flights.remove(self._launched.pop(index).flight)

    # Landing

    def _apply_known(self) -> None:
        """Begins to apply the records that land next, if what they name is here."""
        for own in self.follower.fragments:
            record = own.records.get(own.next_round)
            if record is None or own.digest is None or record.key not in self._blobs:
                continue
            applied = self._applied.get(own.fragment)
            launched = self._launched.get(own.fragment)
            if applied is None or applied.record.key != record.key:
                blobs, before = self._blobs[record.key], self._rounds.fragments[own.fragment].outer
                memory = launched.encoded.memory if launched and launched.encoded else None
                work = _bound(self._arithmetic.apply, record, blobs, before, memory)
                self._applied[own.fragment] = _Applied(record, self._in_background(work))

    @torch.no_grad()
    def _land_ready(self, step: int, wait: Span | None = None) -> Iterator[LandingReport]:
        landed = True
        while landed:
            landed = False
            self._apply_known()
            due = {}
            for record in self.follower.due(step):
                applied = self._applied.get(record.fragment)
                if applied is not None and applied.record.key == record.key:
                    due[record.fragment] = applied
            # Who is far behind waits for the arithmetic, not for an inner step per round.
            behind = [i for i in due if self.follower.fragments[i].closed > due[i].record.round]
            waiting = {index: one.pending for index, one in due.items() if index not in behind}
            for index in (*behind, *self._connection.ready(waiting)):
                report = self._land(due[index], step, wait)
                landed = True
                if report is not None:
                    yield report

    def _land(self, applied: _Applied, step: int, wait: Span | None) -> LandingReport | None:
        record, stepped = applied.record, applied.pending.result()
        arrived = time.perf_counter()
        fragment, launched = self._rounds.fragments[record.fragment], self._launched.get(record.fragment)
        was_finite = launched is None or launched.encoded is None or launched.encoded.finite
        landing = self.follower.land(record, stepped.before, stepped.after)
        del self._applied[record.fragment]
        self._blobs.pop(record.key, None)
        if landing is Landing.REFUSE:
            _log.warning(
                "Round %d of fragment %d was measured against other outer parameters than this site holds: it fetches a"
                " state.",
                record.round,
                record.fragment,
            )
            self._drop_flights()
            return None
        reshard(self._model)
        own = next((i for i, one in enumerate(record.counted) if one.site == self.follower.site), -1)
        if landing is Landing.CARRY:
            fragment.carry(stepped.result, stepped.moved)
        else:
            mixing = self._rounds.mixing if landing is Landing.MIX else 0.0
            fragment.land(stepped.result, mixing, own if landing is Landing.MIX else -1, record.final)
        if landing is Landing.TAKE:
            fragment.memory = None
        if not was_finite:
            optimizers, in_group = self._means.inner_optimizers, self._topology.in_group
            recover(self._model, self._rounds.fragments, fragment.index, optimizers, in_group)
        self._drop_flights()
        sent = launched.encoded.blobs.values() if launched and launched.encoded else ()
        result = stepped.result._replace(
            left_out=() if was_finite else (0,),
            # Rank 0 sends and receives for all.
            bytes_sent=0 if self._topology.group_rank else sum(map(len, sent)),
            bytes_received=0 if self._topology.group_rank else stepped.result.bytes_received,
        )
        wait = wait or (arrived, arrived)
        launch = (wait[0], wait[0]) if launched is None else launched.flight.launch
        launched_at = step if launched is None else launched.flight.snapshot.step
        seconds = max(0.0, arrived - launch[1])
        report = LandingReport.of(record.fragment, launched_at, launch, result, step, (wait[0], arrived), seconds)
        # What the ranks of this site ask is no business of others: it comes back with their own flight.
        return report._replace(requests=launched.encoded.requests if launched and launched.encoded else 0)

    # What is heard

    def hear(self) -> None:
        """Takes what the connection has heard since the last time."""
        events, self._now = self._connection.heard()
        self._send()
        for event in events:
            match event:
                case Welcomed():
                    self.follower.welcome(event.welcome)
                    self._begin_as_founded(event.anchor)
                case Called():
                    self.follower.hear(event.call)
                case Recorded():
                    self.follower.learn(event.record)
                    own = self.follower.fragments[event.record.fragment]
                    if event.blobs is not None and event.record.round > own.applied.round:
                        self._blobs[event.record.key] = event.blobs
                case StateWanted():
                    self._give(event)
                case StateArrived():
                    self._adopt(event)
                case Lost():
                    if self.follower.reachable:
                        _log.warning(
                            "%s The site trains on without it, and sends later what it has trained.", event.why
                        )
                    self.follower.lose(self._now)
                case Waiting():
                    _log.info("%s", event.why)

    def _digests(self) -> list[int]:
        return self._combined([own.outer.values for own in self._rounds.fragments])

    def _combined(self, values: Sequence[Tensor]) -> list[int]:
        """Returns the digests of fragments, of which this rank holds its shards. In-group collective."""
        own = [digest(one, of.layout.start) for one, of in zip(values, self._rounds.fragments, strict=True)]
        ranks = self._topology.in_group.all_gather_object(own)
        return [combined(list(shards)) for shards in zip(*ranks, strict=True)]

    def _begin_as_founded(self, anchor: StateHeader | None) -> None:
        """Begins at round 0 with what this site has, where the run was founded on the same values."""
        if anchor is None or any(position.round for position in anchor.applied):
            return
        if any(own.digest is not None for own in self.follower.fragments):
            return
        digests = self._digests()
        if list(anchor.digests) == digests:
            self.follower.found(digests)

    def _give(self, wanted: StateWanted) -> None:
        if wanted.founding:
            positions = tuple(own.applied for own in self.follower.fragments)
            header = StateHeader(positions, tuple(self._digests()))
        elif self.follower.follows:
            header = self.follower.header()
            if list(header.digests) != self._digests():
                return
        else:
            return
        gather = self._topology.in_group.all_gather_object
        parts = [to_part(own, gather(own.outer.state_dict())) for own in self._rounds.fragments]
        self._connection.give(wanted.request, header, parts)

    @torch.no_grad()
    def _adopt(self, state: StateArrived) -> None:
        """Takes over a state that came, as far as it is newer than what this site has."""
        if not self.follower.wants_state:
            return
        try:
            fragments = self._rounds.fragments
            if len(state.parts) != len(fragments):
                raise Refused(f"the state has {len(state.parts)} parts, and there are {len(fragments)} fragments")
            came = [from_part(own, part) for own, part in zip(fragments, state.parts, strict=True)]
            digests = self._combined([own.outer.values for own in came])
            landings = self.follower.adopt(state.header, digests)
        except ValueError as error:
            _log.warning("A state that %s gave was refused: %s.", state.source, error)
            self._refused.append(state.source)
            return
        self._refused.clear()
        reshard(self._model)
        for index, landing in landings.items():
            self._take_over(index, came[index], landing)
        self._drop_flights()
        self._connection.hello(self.follower)

    def _take_over(self, index: int, came: Arrived, landing: Landing) -> None:
        fragment, in_group = self._rounds.fragments[index], self._topology.in_group
        self._applied.pop(index, None)
        before = fragment.gathered(in_group)
        fragment.start_from(came.outer, came.buffers)
        after = fragment.gathered(in_group)
        if landing is Landing.CARRY:
            fragment.layout.shift(after - before)
            return
        fragment.layout.write(after, self._rounds.mixing if landing is Landing.MIX else 0.0)
        fragment.buffers.write()
        fragment.memory = None

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns what the site knows of the federation, and what is in flight, once that is encoded."""
        self._send(wait=True)
        return {
            "flights": [flight.snapshot.state_dict() for flight in self._rounds.flights],
            "federation": {"site": self.follower.site, **self.follower.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another life of this site was.

        Raises:
            ValueError: If it is the state of another site or of no site, or was damaged.
        """
        saved = state.get("federation", {"site": None})
        if saved["site"] != self.follower.site:
            raise ValueError(
                f"This is the state of site {saved['site']!r}, and this is {self.follower.site!r}: each site resumes"
                " from its own. Give its checkpoint, or start without one: the site then fetches a state."
            )
        self.follower.load_state_dict(saved, self._digests())
        self._rounds.flights.clear()
        self._launched.clear()
        self._applied.clear()
        for flight in state["flights"]:
            own = self.follower.fragments[flight["fragment"]].flight
            if own is not None:
                began = time.perf_counter()
                outer = self._rounds.fragments[flight["fragment"]].load_outer()
                self._start(LaunchSnapshot.of(flight, outer, float("inf")), own.own, (began, time.perf_counter()))
        self._send(wait=True)
        self._connection.hello(self.follower)
        self.hear()


def _same(value: Any) -> Any:
    return value


def _bound(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)
