"""The world of a site: when its fragments launch and land is what the rules of the federation say.

The training thread owns the follower and talks to the connection; see [Note: one site, many followers]. Encoding and
averaging run in the background, and are looked after once in every inner step. A site never waits for what is not
there, except where the follower says so.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_sdiloco.algorithm import Mix
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine.background import Pending
from lightning_sdiloco.engine.flight import Landing as LandingReport
from lightning_sdiloco.engine.measurements import Span
from lightning_sdiloco.engine.parameters.sharding import reshard
from lightning_sdiloco.engine.recovery import recover
from lightning_sdiloco.engine.requests import Mailbox
from lightning_sdiloco.engine.rounds import Means, Rounds
from lightning_sdiloco.engine.site.arithmetic import Bytes, SiteArithmetic, Stepped
from lightning_sdiloco.engine.site.launches import Launched, Launches, in_background
from lightning_sdiloco.engine.site.shared import SharedConnection
from lightning_sdiloco.engine.site.states import StateTransfer
from lightning_sdiloco.federation import Follower, Landing, Record
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
class _Applied:
    """Holds a record that is being applied."""

    record: Record
    pending: Pending[Stepped]


class FederatedWorld:
    """Launches and lands as the records of a federation say; see [Note: how a site uses its connection]."""

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
        self._launches = Launches(rounds, means.background, connection, follower, arithmetic, means.link)
        self._applied: dict[int, _Applied] = {}
        self._blobs: dict[str, Mapping[str, Bytes]] = {}
        self._states = StateTransfer(model, rounds, topology, connection, follower)
        self._now = time.monotonic()
        self._has_said_hello = self._has_left = self._has_told_of_drop = self._is_alone = False
        self._waits_for = ""
        self.requested = 0
        self._step_time, self._samples, self._has_trained = 0.0, 0, False

    # Training

    @property
    def is_over(self) -> bool:
        """Whether the last round of every fragment has landed."""
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
    def launch_due(self, step: int, mailbox: Mailbox) -> int:
        """Launches what is due; see `World.launch_due`. What a rank requests all ranks hear at once."""
        self.requested = self.hear(mailbox.take())
        self._step_time = mailbox.step_time or self._step_time
        for call in self.follower.skips():
            self._connection.skip(call)
        due = self.follower.launches(step)
        if due:
            self._rounds.require_coverage()
        for index in due:
            self._launches.launch(index, step, self._step_time)
        self._launches.send()
        return len(due)

    def land_due(self, step: int) -> Iterator[LandingReport]:
        """Lands what is due, and waits where the rules say so; see `World.land_due`."""
        yield from self._land_ready(step)
        began = time.perf_counter()
        while self._waits and (longest := self.follower.waits(step, self._now)) > 0.0:
            self._connection.wait(min(_MOMENT, longest))
            self.hear()
            yield from self._land_ready(step, (began, time.perf_counter()))
        self._look_after()

    def land_all(self, step: int) -> Iterator[LandingReport]:
        """Launches all that the site holds, follows until it is recorded, and leaves."""
        yield from self._end(step, lambda: True)

    def leave(self, step: int) -> Iterator[LandingReport]:
        """Does the same, and waits for the hub as long as for a landing: who is told to end has little time."""
        until = self._now + self.follower.terms.longest_wait
        yield from self._end(step, lambda: self.follower.reachable and self._now < until)

    @torch.no_grad()
    def _end(self, step: int, goes_on: Callable[[], bool]) -> Iterator[LandingReport]:
        self.follower.finish()
        while not self.follower.finished and not self._has_left and goes_on():
            self.launch_due(step, Mailbox())
            yield from self._land_ready(step)
            self._look_after()
            if not self.follower.finished:
                self._connection.wait(_MOMENT)
        self.close()

    def final_exchange(self, step: int, mailbox: Mailbox) -> Iterator[LandingReport | None]:
        """Does nothing: a site that ends takes no mean of its own, and the others go on."""
        return iter(())

    def close(self) -> None:
        """Leaves the federation: nobody waits for this site any more."""
        if not self._has_left:
            self._has_left = True
            self._connection.beat(self.follower)
            self._connection.close()

    def _look_after(self) -> None:
        self._launches.send()
        if self.follower.reachable and self.follower.wants_state:
            self._connection.ask(self._states.refused)
        self._connection.beat(self.follower)

    # Landing

    def _apply_known(self) -> None:
        """Begins to apply the records that land next, if what they name is here."""
        for own in self.follower.fragments:
            record = own.records.get(own.next_round)
            if record is None or own.digest is None or record.key not in self._blobs:
                continue
            applied = self._applied.get(own.fragment)
            launched = self._launches.of(own.fragment)
            if applied is None or applied.record.key != record.key:
                blobs, before = self._blobs[record.key], self._rounds.fragments[own.fragment].outer
                encoded = launched.encoded if launched else None
                work = partial(self._arithmetic.apply, record, blobs, before, encoded)
                self._applied[own.fragment] = _Applied(record, in_background(self._means.background, work))

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
        fragment, launched = self._rounds.fragments[record.fragment], self._launches.of(record.fragment)
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
            self._launches.drop_landed()
            return None
        reshard(self._model)
        own = next((i for i, one in enumerate(record.counted) if one.site == self.follower.site), -1)
        if landing is Landing.DROP:
            self._tell_of_drop(record)
        if landing is Landing.CARRY:
            fragment.carry(stepped.result, stepped.moved)
        else:
            mixes = landing in (Landing.MIX, Landing.DROP)
            rule = stepped.result.rule if mixes else Mix(0.0)
            fragment.land(stepped.result, rule, 0, own if mixes else -1, record.final)
        if landing is Landing.TAKE and not record.final:
            fragment.memory = fragment.tuning = None
        if not was_finite:
            optimizers, in_group = self._means.inner_optimizers, self._topology.in_group
            recover(self._model, self._rounds.fragments, fragment.index, optimizers, in_group)
        self._launches.drop_landed()
        return self._report(record, stepped, launched, step, wait or (arrived, arrived), was_finite)

    def _tell_of_drop(self, record: Record) -> None:
        """Says once that this site comes too late."""
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
    ) -> LandingReport:
        """Tells what landed, and what this rank sent and fetched for it."""
        sent = launched.encoded.blobs.values() if launched and launched.encoded else ()
        result = stepped.result._replace(
            left_out=() if was_finite else (0,),
            bytes_sent=sum(map(len, sent)),
            bytes_received=self._arithmetic.bytes_fetched(record, self.follower.site),
        )
        launch = (wait[0], wait[0]) if launched is None else launched.flight.launch
        launched_at = step if launched is None else launched.flight.snapshot.step
        seconds = max(0.0, wait[1] - launch[1])
        report = LandingReport.of(record.fragment, launched_at, launch, result, step, wait, seconds)
        return report._replace(sites=tuple(one.site for one in record.counted))

    # What is heard

    def hear(self, requests: int = 0) -> int:
        """Takes what the connection has heard since the last time; says hello before."""
        if not self._has_said_hello:
            self._has_said_hello = True
            self._connection.hello(self.follower)
        told, self._now, requests, samples = self._connection.heard(requests, self._samples)
        if self._has_trained:
            self.follower.trained(samples)
            self._has_trained, self._samples = False, 0
        self._launches.send()
        for event in told:
            match event:
                case Welcomed():
                    self._states.begin_again(self.follower.welcome(event.welcome))
                    self._launches.drop_landed()
                    self._tell_of_return()
                    self._states.begin_as_founded(event.anchor)
                case Called():
                    self.follower.hear(event.call)
                case Recorded():
                    self._learn(event)
                case StateWanted():
                    self._states.give(event)
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
                    self._tell_of_wait(event.why)
        return requests

    def _tell_of_wait(self, why: str) -> None:
        """Says why training does not begin, once for each reason: nothing else would show."""
        if why != self._waits_for:
            self._waits_for = why
            _log.warning("Site %s waits: %s", self.follower.site, why)

    def _tell_of_return(self) -> None:
        self._waits_for = ""
        if self._is_alone:
            self._is_alone = False
            _log.warning("The hub is back: site %s sends what it has trained.", self.follower.site)

    def _learn(self, event: Recorded) -> None:
        self.follower.learn(event.record)
        own = self.follower.fragments[event.record.fragment]
        if event.blobs is not None and event.record.round > own.applied.round:
            self._blobs[event.record.key] = event.blobs

    def _adopt(self, state: StateArrived) -> None:
        """Takes over a state that came, as far as it is newer than what this site has."""
        for index in self._states.adopt(state):
            self._applied.pop(index, None)
        self._launches.drop_landed()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns what the site knows of the federation, and what is in flight, once that is encoded."""
        return {
            "flights": self._launches.state_dict(),
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
        self._launches.load_state_dict(state["flights"])
        self._has_said_hello = False
        self.hear()
