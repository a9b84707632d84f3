"""The world of a site: when its fragments launch and land is what the rules of the federation say.

The training thread owns the follower and talks to the connection; see [Note: how a site uses its connection]. Encoding
and averaging run in the background, and are looked after once in every inner step. A site never waits for what is not
there, except where the follower says so.

[Note: one site, many followers] Every rank has a follower of its own. The first rank speaks with the hub for all, each
rank moves its own payloads, and all hear the same events, of the same time, after the same inner step. So all decide
the same, and nothing has to be agreed on but what is heard. A record is heard when every rank has what it needs of its
payloads.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_sdiloco.algorithm import Mix
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine import (
    Background,
    Flight,
    Landing,
    Launch,
    Pending,
    Purpose,
    Rounds,
    Span,
    Work,
    completed,
)
from lightning_sdiloco.federation.arithmetic import Encoded, SiteArithmetic, Stepped
from lightning_sdiloco.federation.codec import Bytes
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.messages import (
    Called,
    Contribution,
    Lost,
    Record,
    Recorded,
    StateArrived,
    StateWanted,
    Waiting,
    Welcomed,
)
from lightning_sdiloco.federation.ranks import SharedConnection
from lightning_sdiloco.federation.states import OuterStates

_log = logging.getLogger(__name__)

# How long a site listens at a time while it waits, in seconds.
_MOMENT = 0.05


@dataclass
class Launched:
    """Holds a launch that is being encoded, or has been sent, until it has landed."""

    flight: Flight
    begun: Contribution
    pending: Pending[Encoded]
    encoded: Encoded | None = None


class _Applied(NamedTuple):
    """Holds a record that is being applied."""

    record: Record
    pending: Pending[Stepped]


class FederatedWorld:
    """Launches and lands as the records of a federation say; see [Note: how a site uses its connection]."""

    def __init__(
        self,
        rounds: Rounds,
        topology: Topology,
        connection: SharedConnection,
        follower: Follower,
        arithmetic: SiteArithmetic,
        waits: bool = True,
    ) -> None:
        self._rounds, self._topology = rounds, topology
        self._connection, self.follower, self._arithmetic, self._waits = connection, follower, arithmetic, waits
        self._launched: dict[int, Launched] = {}
        self._applied: dict[int, _Applied] = {}
        self._blobs: dict[str, Mapping[str, Bytes]] = {}
        self._states = OuterStates(rounds, topology, follower)
        self._refused: list[str] = []
        self._now = time.monotonic()
        self._has_said_hello = self._has_left = self._has_told_of_drop = self._is_alone = False
        self._waits_for = ""
        self.requested = 0
        self._samples, self._has_trained = 0, False

    # Training

    @property
    def is_over(self) -> bool:
        return all(own.ended for own in self.follower.fragments)

    def join(self, step: int) -> None:
        """Waits until the hub has let this site in, it has a state, and all records so far have landed."""
        self.hear()
        while not self._has_joined():
            # One at a time: where there are many, a state is the shorter way, and comes meanwhile.
            landed = next(self._land_ready(step), None)
            self._look_after()
            if landed is None:
                self._connection.wait(_MOMENT)
            self.hear()

    def _has_joined(self) -> bool:
        follower = self.follower
        landed = all(own.has_joined for own in follower.fragments)
        return follower.reachable and follower.follows and landed

    def trained(self, micro_batches: int, samples: int) -> None:
        """Counts an inner step by its samples, of which ranks may have trained unequal numbers: `hear` adds them up."""
        self._has_trained, self._samples = True, self._samples + samples

    @torch.no_grad()
    def launch_due(self, step: int) -> int:
        """Launches what is due. What a rank requests all ranks hear at once."""
        self.requested = self.hear(self._rounds.take_requests())
        for call in self.follower.skips():
            if self._connection.hub:
                self._connection.hub.skip(call)
        due = self.follower.launches(step)
        if due:
            self._rounds.require_coverage()
        for index in due:
            began, fragment = time.perf_counter(), self._rounds.fragments[index]
            begun = self.follower.begin(index, step)
            launch = fragment.launch(step, float("inf"), Purpose.ROUND, 0)
            # Nobody tells a site in advance which buffers others have changed, so all of them travel.
            launch = launch._replace(
                travelling=fragment.buffers.travelling(True), step_time=self._rounds.step_clock.seconds
            )
            self._rounds.link.note(self._connection.sends_bytes_per_s)
            self._launch(self._rounds.chosen(launch), begun, (began, time.perf_counter()))
        self._send()
        return len(due)

    def _launch(self, launch: Launch, begun: Contribution, launched: Span) -> None:
        pending = _in_background(self._rounds.background, lambda: self._arithmetic.encode(launch, begun))
        flight = Flight(launch, pending, launched)
        self._launched[launch.fragment] = Launched(flight, begun, pending)
        self._rounds.flights.append(flight)

    def _send(self, wait: bool = False) -> None:
        encoding = {index: one.pending for index, one in self._launched.items() if one.encoded is None}
        for index in encoding if wait else self._connection.ready(encoding):
            launched = self._launched[index]
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
        self._drop_landed()

    def _drop_landed(self) -> None:
        """Forgets what the follower no longer has in flight."""
        for index in [i for i in self._launched if self.follower.fragments[i].flight is None]:
            self._rounds.flights.remove(self._launched.pop(index).flight)

    def land_due(self, step: int) -> Iterator[Landing]:
        """Lands what is due, and waits where the rules say so."""
        yield from self._land_ready(step)
        began = time.perf_counter()
        while self._waits and (longest := self.follower.waits(step, self._now)) > 0.0:
            self._connection.wait(min(_MOMENT, longest))
            self.hear()
            yield from self._land_ready(step, (began, time.perf_counter()))
        self._look_after()

    def land_all(self, step: int) -> Iterator[Landing]:
        """Launches all that the site holds, follows until it is recorded, and leaves."""
        yield from self._end(step, lambda: True)

    def leave(self, step: int) -> Iterator[Landing]:
        """Does the same, and waits for the hub as long as for a landing: who is told to end has little time."""
        until = self._now + self.follower.terms.longest_wait
        yield from self._end(step, lambda: self.follower.reachable and self._now < until)

    @torch.no_grad()
    def _end(self, step: int, goes_on: Callable[[], bool]) -> Iterator[Landing]:
        self.follower.finish()
        while not self.follower.finished and not self._has_left and goes_on():
            self.launch_due(step)
            yield from self._land_ready(step)
            self._look_after()
            if not self.follower.finished:
                self._connection.wait(_MOMENT)
        self.close()

    def final_exchange(self, step: int) -> Iterator[Landing | None]:
        """Does nothing: a site that ends takes no mean of its own, and the others go on."""
        return iter(())

    def close(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._connection.beat(self.follower)
            self._connection.close()

    def _look_after(self) -> None:
        self._send()
        if self._connection.hub and self.follower.reachable and self.follower.wants_state:
            self._connection.hub.ask(self._refused)
        self._connection.beat(self.follower)

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
                encoded = launched.encoded if launched else None
                work = partial(self._arithmetic.apply, record, blobs, before, encoded)
                self._applied[own.fragment] = _Applied(record, _in_background(self._rounds.background, work))

    @torch.no_grad()
    def _land_ready(self, step: int, wait: Span | None = None) -> Iterator[Landing]:
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

    def _land(self, applied: _Applied, step: int, wait: Span | None) -> Landing | None:
        record, stepped = applied.record, applied.pending.result()
        arrived = time.perf_counter()
        fragment, launched = self._rounds.fragments[record.fragment], self._launched.get(record.fragment)
        was_finite = launched is None or launched.encoded is None or launched.encoded.finite
        landing = self.follower.land(record, stepped.before, stepped.after)
        del self._applied[record.fragment]
        self._blobs.pop(record.key, None)
        if landing is MergeAction.REFUSE:
            _log.warning(
                "Round %d of fragment %d was measured against other outer parameters than this site holds: it fetches a"
                " state.",
                record.round,
                record.fragment,
            )
            self._drop_landed()
            return None
        self._rounds.reshard()
        own = next((i for i, one in enumerate(record.counted) if one.site == self.follower.site), -1)
        if landing is MergeAction.DROP:
            self._tell_of_drop(record)
        if landing is MergeAction.CARRY:
            fragment.carry(stepped.arrival, stepped.moved)
        else:
            mixes = landing in (MergeAction.MIX, MergeAction.DROP)
            # Who counts has sent what its compression remembers.
            arrival = stepped.arrival if mixes and own in stepped.arrival.landing.counted else stepped.forgotten()
            fragment.land(arrival, arrival.rule if mixes else Mix(0.0), 0, final=record.final)
        if landing is MergeAction.TAKE and not record.final:
            fragment.memory = fragment.tuning = None
        if not was_finite:
            self._rounds.recover(fragment.index)
        self._drop_landed()
        return self._report(record, stepped, launched, step, wait or (arrived, arrived), was_finite)

    def _tell_of_drop(self, record: Record) -> None:
        if not self._has_told_of_drop:
            self._has_told_of_drop = True
            _log.warning(
                "Round %d of fragment %d closed before this site's contribution was there: it counts nowhere. If the"
                " next one is late too, that is carried. sdiloco status tells how often it happens. Where it is often,"
                " raise grace or overlap_steps, or let the site send less.",
                record.round,
                record.fragment,
            )

    def _report(
        self, record: Record, stepped: Stepped, launched: Launched | None, step: int, wait: Span, was_finite: bool
    ) -> Landing:
        sent = launched.encoded.blobs.values() if launched and launched.encoded else ()
        told = stepped.arrival.landing._replace(
            launched_at=step if launched is None else launched.flight.launch.step,
            left_out=() if was_finite else (0,),
            bytes_sent=sum(map(len, sent)),
            bytes_received=self._arithmetic.bytes_fetched(record, self.follower.site),
            sites=tuple(one.site for one in record.counted),
        )
        launch = (wait[0], wait[0]) if launched is None else launched.flight.launched
        return completed(told, launch, wait, max(0.0, wait[1] - launch[1]), step)

    # What is heard

    def hear(self, requests: int = 0) -> int:
        """Takes what the connection has heard since the last time; says hello before."""
        if not self._has_said_hello:
            self._say_hello()
        told, self._now, requests, samples = self._connection.heard(requests, self._samples)
        if self._has_trained:
            self.follower.trained(samples)
            self._has_trained, self._samples = False, 0
        self._send()
        for event in told:
            match event:
                case Welcomed():
                    self._states.begin_again(self.follower.welcome(event.welcome))
                    self._drop_landed()
                    if self._is_alone:
                        _log.warning("The hub is back: site %s sends what it has trained.", self.follower.site)
                    self._is_alone, self._waits_for = False, ""
                    self._states.begin_as_founded(event.anchor)
                case Called():
                    self.follower.hear(event.call)
                case Recorded():
                    self.follower.learn(event.record)
                    own = self.follower.fragments[event.record.fragment]
                    if event.blobs is not None and event.record.round > own.applied.round:
                        self._blobs[event.record.key] = event.blobs
                case StateWanted():
                    given = self._states.given(event.founding)
                    if given and self._connection.hub:
                        self._connection.hub.give(event.request, *given)
                case StateArrived():
                    self._adopt(event)
                case Lost():
                    if self.follower.reachable:
                        self._is_alone = True
                        _log.warning(
                            "%s The site trains on without it, and sends what it trains when it is back.", event.why
                        )
                    self.follower.lose(self._now)
                case Waiting():
                    # Once for each reason: nothing else would show why training does not begin.
                    if event.why != self._waits_for:
                        self._waits_for = event.why
                        _log.warning("Site %s waits: %s", self.follower.site, event.why)
        return requests

    def _adopt(self, state: StateArrived) -> None:
        """Takes over a state that came, as far as it is newer than what this site has."""
        if not self.follower.wants_state:
            return
        try:
            adopted = self._states.adopt(state.header, state.parts)
        except ValueError as error:
            _log.warning("A state that %s gave was refused: %s.", state.source, error)
            self._refused.append(state.source)
            return
        self._refused.clear()
        self._say_hello()
        for index in adopted:
            self._applied.pop(index, None)
        self._drop_landed()

    def _say_hello(self) -> None:
        self._has_said_hello = True
        if self._connection.hub:
            self._connection.hub.hello(self.follower)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns what the site knows of the federation, and what is in flight, once that is encoded."""
        self._send(wait=True)
        return {
            "flights": [flight.launch.state_dict() for flight in self._rounds.flights],
            "federation": {"site": self.follower.site, **self.follower.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another life of this site was."""
        saved = state.get("federation", {"site": None})
        if saved["site"] != self.follower.site:
            raise ValueError(
                f"This is the state of site {saved['site']!r}, and this is {self.follower.site!r}: each site resumes"
                " from its own. Give its checkpoint, or start without one: the site then fetches a state."
            )
        self.follower.load_state_dict(saved, self._states.digests())
        self._applied.clear()
        self._rounds.flights.clear()
        self._launched.clear()
        for flight in state["flights"]:
            own = self.follower.fragments[flight["fragment"]].flight
            if own is not None:
                began, outer = time.perf_counter(), self._rounds.fragments[flight["fragment"]].load_outer()
                launch = Launch.of(flight, outer, float("inf"))
                self._launch(launch, own.own, (began, time.perf_counter()))
        self._send(wait=True)
        self._has_said_hello = False
        self.hear()


def _in_background(background: Background, work: Callable[[], Any]) -> Pending[Any]:

    def in_one_stage() -> Work[Any]:
        yield from ()
        return work()

    return background.start(in_one_stage())
