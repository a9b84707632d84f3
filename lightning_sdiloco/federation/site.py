"""The world of a site: when its fragments launch and land is what the rules of the federation say.

The training thread owns the follower and talks to the connection; see [Note: how a site uses its
connection]. Encoding and averaging run in the background, and are looked after once in every inner
step. A site never waits for what is not there, except where the follower says so.

[Note: one site, many followers] Every rank has its own follower. The first rank speaks with the hub
for all, each rank moves its own payloads, and all hear the same events, of the same time, after the
same inner step. So all decide the same, and nothing has to be agreed on but what is heard. A record
is heard when every rank has what it needs of its payloads.
"""

import io
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.merge import Mix
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.background import Pending, Work
from lightning_sdiloco.engine.flight import PendingFlight, completed
from lightning_sdiloco.engine.fragments import FragmentState, Landing, Launch, Purpose, Span
from lightning_sdiloco.engine.outer import OuterState
from lightning_sdiloco.engine.rounds import Rounds
from lightning_sdiloco.engine.shards import OuterParameter, to_parameters
from lightning_sdiloco.errors import AgreementError, ExchangeError, Refused
from lightning_sdiloco.federation.arithmetic import (
    Encoded,
    SiteArithmetic,
    Stepped,
    digests_of,
    fetched_by,
)
from lightning_sdiloco.federation.codec import Bytes, plain, read
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.messages import (
    TOLD,
    Amended,
    Called,
    Contribution,
    Lost,
    Record,
    Recorded,
    StateArrived,
    StateHeader,
    StateWanted,
    Told,
    Waiting,
    Welcome,
    Welcomed,
)
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.run_config import RunConfig, Terms

_log = logging.getLogger(__name__)

# How long a site listens at a time while it waits, in seconds.
_MOMENT = 0.05
_ERRORS = {own.__name__: own for own in (AgreementError, ExchangeError, Refused, ValueError)}


class SharedConnection:
    """The connections of a rank; see [Note: one site, many followers] and [Note: a site of several
    ranks].
    """

    def __init__(
        self, topology: Topology, connect: Callable[[int, int, str], HubConnection]
    ) -> None:
        self._ranks = topology.in_site
        rank = topology.group_rank
        self._leads = rank == 0
        self._payloads: dict[str, Mapping[str, Bytes]] = {}
        self._coming: dict[str, tuple[Record, set[int]]] = {}
        made = list[HubConnection]()
        incarnation = self._ranks.all_gather_object(secrets.token_hex(8))[0]

        def connects() -> None:
            made.append(connect(rank, topology.group_size, incarnation))
            if rank:
                made[0].reach()

        try:
            self.all_say(connects)
        except Exception:
            for connection in made:
                connection.close()
            raise
        (self.own,) = made

    def all_say(self, ask: Callable[[], Any]) -> list[Any]:
        """Returns what all ranks say. An error of one is raised on all, so that none waits for the
        others.
        """
        every = self._ranks.attempt(ask)
        for outcome in every:
            if outcome.failure:
                kinds = (_ERRORS[name] for name in outcome.failure if name in _ERRORS)
                raise outcome.raised or next(kinds, RuntimeError)(outcome.text)
        return [outcome.value for outcome in every]

    def agree(self, run_config: RunConfig) -> tuple[RunConfig, Terms]:
        """Returns the run config of the run, and its terms of now."""

        def ask() -> Any:
            return self._leads and [self.own.agree(run_config).to_bytes(), plain(self.own.amended)]

        text, amended = self.all_say(ask)[0]
        founded = RunConfig.from_bytes(text)
        return founded, founded.terms if amended is None else read(Terms, amended, "terms")

    def heard(self, requests: int = 0, samples: int = 0) -> tuple[list[Told], float, int, int]:
        """Returns what was heard since the last time, the time, and what all ranks request and
        have trained.
        """
        if self._ranks.size == 1:
            return self.own.events(), self.own.now(), requests, samples
        every = self.all_say(lambda: (*self._listen(), requests, samples))
        told = list[Told]()
        for kind, said in every[0][0]:
            one: Told = read(TOLD[kind], said, kind.lower())
            if isinstance(one, Called) and one.own and not self._leads:
                self.own.prefetch(one.own)
            if not isinstance(one, Recorded):
                told.append(one)
            elif one.record.key not in self._coming:
                # It is handed out once all ranks have what they need of it.
                self._coming[one.record.key] = one.record, set()
                if not self._leads:
                    self.own.fetch(one.record)
        for rank, (_, fetched, _, asked, _) in enumerate(every):
            requests |= asked
            for key, is_there in fetched.items():
                if key not in self._coming:
                    # It was fetched twice.
                    self._payloads.pop(key, None)
                    continue
                record, there = self._coming[key]
                there.add(rank)
                if not is_there or len(there) == self._ranks.size:
                    del self._coming[key]
                    blobs = self._payloads.pop(key, None)
                    told.append(Recorded(record, blobs if is_there else None))
        return told, every[0][2], requests, sum(samples for *_, samples in every)

    def _listen(self) -> tuple[list[Any], dict[str, bool], float]:
        """Returns what this rank has heard: events at the first one, and which records it has
        fetched payloads for.
        """
        told = list[Any]()
        fetched = dict[str, bool]()
        for one in self.own.events():
            if isinstance(one, Recorded):
                fetched[one.record.key] = one.blobs is not None
                if one.blobs is not None:
                    self._payloads[one.record.key] = one.blobs
                one = Recorded(one.record, None)
            told.append((type(one).__name__, plain(one)))
        return told, fetched, self.own.now()

    def ready(self, pending: Mapping[int, Pending[Any]]) -> Collection[int]:
        """Returns the background work that is ready at rank 0: the others wait a moment for
        theirs.
        """
        if not pending:
            return ()
        return set(self.all_say(lambda: {key for key, one in pending.items() if one.is_ready})[0])


def to_part(fragment: FragmentState, shards: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the part of an outer state for a fragment: outer parameters, outer optimizer and
    untrained state.
    """
    parameters = to_parameters(
        fragment.layout.state_dict(), [OuterState.of(shard) for shard in shards]
    )
    untrained = {name: values.to("cpu") for name, values in fragment.untrained.named().items()}
    file = io.BytesIO()
    state = {
        "parameters": {name: tuple(parameter) for name, parameter in parameters.items()},
        "buffers": untrained,
        "own": {name: values.to("cpu") for name, values in fragment.untrained.own.of_first.items()},
    }
    torch.save(state, file)
    return file.getvalue()


class Part(NamedTuple):
    """What arrives of the outer state of a fragment, and after the last round what the first site
    kept.
    """

    outer: OuterState
    untrained: Mapping[str, Tensor]
    own: Mapping[str, Tensor]


def from_part(fragment: FragmentState, part: Bytes) -> Part:
    """Reads the part that this rank holds, perhaps at a site with another number of ranks.
    Executes nothing.
    """
    try:
        state = torch.load(io.BytesIO(part), map_location="cpu", weights_only=True)
        parameters = {name: OuterParameter(*own) for name, own in state["parameters"].items()}
        outer = fragment.layout.to_shard([parameters[name] for name in fragment.layout.names])
        untrained = {name: state["buffers"][name] for name in fragment.untrained.names}
        own = fragment.untrained.own.fitting(state["own"])
    except Exception as error:  # whatever is wrong with what a stranger may have made
        raise ValueError(
            f"what arrived is not a state of fragment {fragment.index}: {error}"
        ) from error
    if outer.values.shape != fragment.outer.values.shape or outer.values.dtype != torch.float32:
        raise ValueError(
            f"the state of fragment {fragment.index} that arrived has"
            f" {tuple(outer.values.shape)} values"
        )
    return Part(outer, untrained, own)


@dataclass
class Launched:
    flight: PendingFlight
    encoded: Encoded | None = None


class FederatedWorld:
    """Launches and lands as the records of a federation say; see [Note: how a site uses its
    connection].
    """

    def __init__(
        self,
        rounds: Rounds,
        topology: Topology,
        connection: SharedConnection,
        follower: Follower,
        waits: bool,
    ) -> None:
        self._rounds = rounds
        self._topology = topology
        self._arithmetic = SiteArithmetic(rounds, topology)
        self._connection = connection
        self.follower = follower
        self._waits = waits
        self._launched: dict[int, Launched] = {}
        # Records that are being applied, and the payloads of those that came.
        self._applied: dict[int, tuple[Record, Pending[Stepped]]] = {}
        self._blobs: dict[str, Mapping[str, Bytes]] = {}
        self._refused: list[str] = []
        self._now = time.monotonic()
        self._has_said_hello = self._has_left = self._has_told_of_drop = self._is_alone = False
        self._has_parted = False
        self._waits_for = ""
        self.requested = 0
        self._samples = 0
        self._has_trained = False

    # Training

    @property
    def is_over(self) -> bool:
        return all(own.ended for own in self.follower.fragments)

    def join(self, step: int) -> None:
        """Waits until the hub has let this site in, it has a state, and all records so far have
        landed.
        """
        self.hear()
        follower = self.follower
        while not (
            follower.reachable
            and follower.follows
            and all(own.has_joined for own in follower.fragments)
        ):
            # One at a time: where there are many, a state is the shorter way, and comes meanwhile.
            landed = next(self._land_ready(step), None)
            self._look_after()
            if landed is None:
                self._connection.own.wait(_MOMENT)
            self.hear()

    def trained(self, micro_batches: int, samples: int) -> None:
        """Counts an inner step by its samples, which may differ between ranks: `hear` adds them
        up.
        """
        self._has_trained = True
        self._samples = self._samples + samples

    @torch.no_grad()
    def launch_due(self, step: int) -> int:
        """Launches what is due. What a rank requests all ranks hear at once."""
        self.requested = self.hear(self._rounds.take_requests())
        for call in self.follower.skips():
            self._connection.own.skip(call)
        due = self.follower.launches(step)
        if due:
            self._rounds.require_coverage()
        for index in due:
            began = time.perf_counter()
            fragment = self._rounds.fragments[index]
            begun = self.follower.begin(index, step)
            launch = fragment.launch(step, float("inf"), Purpose.ROUND, 0)
            buffers = launch.buffers
            if begun.exact:
                buffers = [*buffers, *fragment.untrained.own.copies()]
            # A site cannot know what others have changed: it sends what it has changed itself.
            launch = launch._replace(
                buffers=buffers,
                is_dense=self._rounds.schedule.is_dense_round(begun.round),
                travelling=tuple(fragment.untrained.changed_since(buffers)),
                step_time=self._rounds.step_clock.seconds,
            )
            self._rounds.link.note(self._connection.own.sends_bytes_per_s)
            self._launch(self._rounds.chosen(launch), begun, (began, time.perf_counter()))
        self._send()
        return len(due)

    def _launch(self, launch: Launch, begun: Contribution, launched: Span) -> None:
        pending = self._in_background(lambda: self._arithmetic.encode(launch, begun))
        self._launched[launch.fragment] = Launched(PendingFlight(launch, pending, launched))
        self._rounds.flights.append(self._launched[launch.fragment].flight)

    def _in_background(self, work: Callable[[], Any]) -> Pending[Any]:
        def in_one_stage() -> Work[Any]:
            yield from ()
            return work()

        return self._rounds.background.start(in_one_stage())

    def _send(self, wait: bool = False) -> None:
        encoding: dict[int, Pending[Any]] = {
            index: one.flight.pending
            for index, one in self._launched.items()
            if one.encoded is None
        }
        for index in encoding if wait else self._connection.ready(encoding):
            self._launched[index].encoded = encoded = encoding[index].result()
            own = self.follower.fragments[index].flight
            sent = encoded.sent
            # A launch of before the checkpoint is complete already.
            complete = sent if own is not None and own.own == sent else self.follower.complete(sent)
            if complete is not None:
                self._connection.own.contribute(complete, encoded.blobs)
        self._drop_landed()

    def _drop_landed(self) -> None:
        for index in [i for i in self._launched if self.follower.fragments[i].flight is None]:
            self._rounds.flights.remove(self._launched.pop(index).flight)

    def land_due(self, step: int) -> Iterator[Landing]:
        """Lands what is due, and waits where the rules say so."""
        yield from self._land_ready(step)
        began = time.perf_counter()
        while self._waits and (longest := self.follower.waits(step, self._now)) > 0.0:
            self._connection.own.wait(min(_MOMENT, longest))
            self.hear()
            yield from self._land_ready(step, (began, time.perf_counter()))
        self._look_after()

    def land_all(self, step: int) -> Iterator[Landing]:
        """Launches all that the site holds, follows until it is recorded, and leaves."""
        yield from self._end(step, lambda: True)

    def leave(self, step: int) -> Iterator[Landing]:
        """Does the same, and waits for the hub as long as for a landing: a site that must end has
        little time.
        """
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
                self._connection.own.wait(_MOMENT)
        self.close()

    def final_exchange(self, step: int) -> Iterator[Landing | None]:
        """Does nothing: a site that ends takes no final mean, and the others continue."""
        return iter(())

    def close(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._connection.own.heartbeat(self.follower)
            self._connection.own.leave()
            self._connection.own.close()

    def _look_after(self) -> None:
        self._send()
        if self.follower.reachable and self.follower.wants_state:
            self._connection.own.ask(self._refused)
        self._connection.own.heartbeat(self.follower)

    # Landing

    @torch.no_grad()
    def _land_ready(self, step: int, wait: Span | None = None) -> Iterator[Landing]:
        """Applies in the background the records that land next, if what they name is here, and
        lands those due.
        """
        landed = True
        while landed:
            landed = False
            for own in self.follower.fragments:
                record = own.records.get(own.next_round)
                if record is None or own.digest is None or record.key not in self._blobs:
                    continue
                applied = self._applied.get(own.fragment)
                launched = self._launched.get(own.fragment)
                if applied is None or applied[0].key != record.key:
                    blobs = self._blobs[record.key]
                    before = self._rounds.fragments[own.fragment].outer
                    encoded = launched.encoded if launched else None
                    work = partial(self._arithmetic.apply, record, blobs, before, encoded)
                    self._applied[own.fragment] = record, self._in_background(work)
            due = {}
            for record in self.follower.due(step):
                applied = self._applied.get(record.fragment)
                if applied is not None and applied[0].key == record.key:
                    due[record.fragment] = applied
            # A site far behind waits for the arithmetic, not for an inner step per round.
            behind = [i for i in due if self.follower.fragments[i].closed > due[i][0].round]
            waiting = {index: pending for index, (_, pending) in due.items() if index not in behind}
            for index in (*behind, *self._connection.ready(waiting)):
                report = self._land(due[index][0], due[index][1].result(), step, wait)
                landed = True
                if report is not None:
                    yield report

    def _land(
        self, record: Record, stepped: Stepped, step: int, wait: Span | None
    ) -> Landing | None:
        arrived = time.perf_counter()
        fragment = self._rounds.fragments[record.fragment]
        launched = self._launched.get(record.fragment)
        was_finite = launched is None or launched.encoded is None or launched.encoded.sent.finite
        landing = self.follower.land(record, stepped.before, stepped.after)
        del self._applied[record.fragment]
        self._blobs.pop(record.key, None)
        if landing is MergeAction.REFUSE:
            _log.warning(
                "Round %d of fragment %d was measured against other outer parameters than this"
                " site holds: it fetches a"
                " state.",
                record.round,
                record.fragment,
            )
            self._drop_landed()
            return None
        self._rounds.reshard()
        own = next(
            (i for i, one in enumerate(record.counted) if one.site == self.follower.site), -1
        )
        without = record.without(self.follower.site)
        outlying = tuple[int, ...]()
        if without and without.reason in ("too long", "not finite"):
            why = "it was not finite"
            if without.reason == "too long":
                why = f"{without.times:.4g} times as long as usual"
                outlying = (0,)
            _log.warning(
                "This site's contribution to round %d of fragment %d was left out: %s. It takes"
                " the outer parameters of"
                " that fragment.",
                record.round,
                record.fragment,
                why,
            )
        if landing is MergeAction.DROP and not self._has_told_of_drop:
            self._has_told_of_drop = True
            _log.warning(
                "Round %d of fragment %d closed before this site's contribution arrived: it"
                " counts nowhere. If the next"
                " one is late too, it is carried. sdiloco status shows how often that happens."
                " If it is often, raise"
                " grace or overlap_steps, or let the site send less.",
                record.round,
                record.fragment,
            )
        if landing is MergeAction.CARRY:
            fragment.carry(stepped.arrival, stepped.moved)
        else:
            mixes = landing in (MergeAction.MIX, MergeAction.DROP)
            # A site that counts has sent what its compression remembers; the others keep it.
            arrival = stepped.arrival
            if not mixes or own not in arrival.landing.counted:
                commit = fragment.committed()._replace(outer=arrival.commit.outer)
                arrival = arrival._replace(commit=commit)
            fragment.land(arrival, arrival.rule if mixes else Mix(0.0), 0, final=record.final)
        if landing is MergeAction.TAKE and not record.final:
            fragment.memory = fragment.tuning = None
        if not was_finite:
            self._rounds.recover(fragment.index)
        self._drop_landed()
        sent = launched.encoded.blobs.values() if launched and launched.encoded else ()
        wait = wait or (arrived, arrived)
        group = self._topology
        told = stepped.arrival.landing._replace(
            launched_at=step if launched is None else launched.flight.launch.step,
            left_out=() if was_finite else (0,),
            outlying=outlying,
            bytes_sent=sum(map(len, sent)),
            bytes_received=sum(
                payload.size
                for index, _, payload in fetched_by(group.group_rank, group.group_size, record)
                if record.mean or index != own
            ),
            sites=tuple(one.site for one in record.counted),
        )
        launch = (wait[0], wait[0]) if launched is None else launched.flight.launch_span
        return completed(told, launch, wait, max(0.0, wait[1] - launch[1]), step)

    # Incoming events

    def hear(self, requests: int = 0) -> int:
        """Takes what the connection has heard since the last time; says hello before."""
        if not self._has_said_hello:
            self._has_said_hello = True
            self._connection.own.hello(self.follower)
        told, self._now, requests, samples = self._connection.heard(requests, self._samples)
        if self._has_trained:
            self.follower.trained(samples)
            self._has_trained = False
            self._samples = 0
        self._send()
        for event in told:
            match event:
                case Welcomed():
                    if not self._is_welcome(event.welcome):
                        continue
                    self._drop_landed()
                    if self._is_alone:
                        _log.warning(
                            "The hub is back: site %s sends what it has trained.",
                            self.follower.site,
                        )
                    self._is_alone = False
                    self._waits_for = ""
                    snapshot = event.snapshot
                    fragments = self.follower.fragments
                    begins = all(own.digest is None for own in fragments)
                    if (
                        begins
                        and snapshot
                        and not any(position.round for position in snapshot.applied)
                    ):
                        # At round 0 it has what the run was founded on, where its values are the
                        # same.
                        digests = self.digests()
                        if list(snapshot.digests) == digests:
                            self.follower.found(digests)
                case Called():
                    self.follower.hear(event.call)
                case Amended():
                    _log.warning("An operator has amended the terms of the run: %s", event.terms)
                    self.follower.terms = event.terms
                case Recorded():
                    if self._waits_for and self.follower.follows:
                        self._waits_for = ""
                        _log.warning("Rounds close again.")
                    self.follower.learn(event.record)
                    own = self.follower.fragments[event.record.fragment]
                    if event.blobs is not None and event.record.round > own.applied.round:
                        self._blobs[event.record.key] = event.blobs
                case StateWanted():
                    given = self._given(event.founding)
                    if given:
                        self._connection.own.give(event.request, *given)
                case StateArrived():
                    self._adopt(event)
                case Lost():
                    if self.follower.reachable:
                        self._is_alone = True
                        _log.warning(
                            "%s The site trains on without it, and sends what it trains when it"
                            " is back.",
                            event.why,
                        )
                    self.follower.lose(self._now)
                case Waiting():
                    # Once for each reason: nothing else would show why training does not begin.
                    if event.why != self._waits_for:
                        self._waits_for = event.why
                        goes_on = (
                            "trains on while no rounds close" if self.follower.follows else "waits"
                        )
                        _log.warning("Site %s %s: %s", self.follower.site, goes_on, event.why)
        return requests

    def _is_welcome(self, welcome: Welcome) -> bool:
        """Takes in what the hub has. A hub that has less, or something else, counts as gone: it
        may come back.
        """
        try:
            self._begin_again(self.follower.welcome(welcome))
        except AgreementError as error:
            if welcome.rolled_back:
                raise
            if not self._has_parted:
                _log.warning(
                    "%s The site trains on without that hub, for as long as patience allows.", error
                )
            self._is_alone = self._has_parted = True
            self.follower.lose(self._now, str(error))
            return False
        self._has_parted = False
        return True

    # Outer states on their way between sites; in-group collectives, between landings

    def digests(self, values: Sequence[Tensor] | None = None) -> list[int]:
        fragments = self._rounds.fragments
        values = [own.outer.values for own in fragments] if values is None else values
        return digests_of(values, [own.layout.start for own in fragments], self._topology.in_site)

    def _given(self, founding: bool) -> tuple[StateHeader, list[bytes]] | None:
        """Returns the state of this site, if it follows, or founds the run."""
        digests = self.digests()
        if founding:
            header = StateHeader(
                tuple(own.applied for own in self.follower.fragments), tuple(digests)
            )
        elif (
            not self.follower.follows or list((header := self.follower.header()).digests) != digests
        ):
            return None
        gather = self._topology.in_site.all_gather_object
        return header, [
            to_part(own, gather(own.outer.state_dict())) for own in self._rounds.fragments
        ]

    @torch.no_grad()
    def _begin_again(self, fragments: Sequence[int]) -> None:
        """Begins again from the outer values of fragments; see [Note: what an earlier incarnation
        has launched].
        """
        if not fragments:
            return
        _log.info(
            "This site's launches from before its restart are in open rounds, of fragments %s."
            " It trains on from their"
            " outer parameters.",
            ", ".join(map(str, fragments)),
        )
        self._rounds.reshard()
        for index in fragments:
            fragment = self._rounds.fragments[index]
            fragment.write_outer(self._topology.in_group, stays=True)
            # What the compression remembers is of launches of another incarnation, or of none.
            fragment.memory = fragment.tuning = None

    @torch.no_grad()
    def _adopt(self, state: StateArrived) -> None:
        """Takes over a state that came, as far as it is newer than what this site has."""
        if not self.follower.wants_state:
            return
        fragments = self._rounds.fragments
        parts = state.parts
        try:
            if len(parts) != len(fragments):
                raise Refused(
                    f"the state has {len(parts)} parts, but there are {len(fragments)} fragments"
                )
            came = [from_part(own, part) for own, part in zip(fragments, parts, strict=True)]
            landings = self.follower.adopt(
                state.header, self.digests([part.outer.values for part in came])
            )
        except ValueError as error:
            _log.warning("A state from %s was refused: %s.", state.source, error)
            self._refused.append(state.source)
            return
        self._rounds.reshard()
        for index, landing in landings.items():
            fragment = fragments[index]
            in_group = self._topology.in_group
            before = fragment.gathered(in_group)
            fragment.start_from(came[index].outer, came[index].untrained)
            fragment.untrained.own.of_first.update(came[index].own)
            after = fragment.gathered(in_group)
            self._applied.pop(index, None)
            if landing is MergeAction.CARRY:
                fragment.layout.shift(after - before)
                continue
            rule = (
                self._rounds.settings.landing
                if landing in (MergeAction.MIX, MergeAction.DROP)
                else Mix(0.0)
            )
            fragment.layout.land(rule, [after], 0)
            fragment.untrained.write()
            fragment.memory = fragment.tuning = None
        self._refused.clear()
        self._connection.own.hello(self.follower)
        self._drop_landed()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns what the site knows of the federation, and what is in flight, once that is
        encoded.
        """
        self._send(wait=True)
        return {
            "flights": [flight.launch.state_dict() for flight in self._rounds.flights],
            "federation": {"site": self.follower.site, **self.follower.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another incarnation of this site was."""
        saved = state.get("federation", {"site": None})
        if saved["site"] != self.follower.site:
            raise ValueError(
                f"This is the state of site {saved['site']!r}, but this is"
                f" {self.follower.site!r}: each site resumes"
                " from its own. Give its checkpoint, or start without one: the site then fetches"
                " a state."
            )
        self.follower.load_state_dict(saved, self.digests())
        self._applied.clear()
        self._rounds.flights.clear()
        self._launched.clear()
        for flight in state["flights"]:
            own = self.follower.fragments[flight["fragment"]].flight
            if own is not None:
                began = time.perf_counter()
                outer = self._rounds.fragments[flight["fragment"]].load_outer()
                launch = Launch.of(flight, outer, float("inf"))
                self._launch(launch, own.own, (began, time.perf_counter()))
        self._send(wait=True)
        self._has_said_hello = False
        self.hear()
