"""The follower: a site's side of the rules. When it launches and lands, and what becomes of its own
training.

It touches no tensor. Its owner, the engine, gives it the digests of the outer parameters, and does
to the values what a `MergeAction` says.

[Note: the weight of a site] Every inner step adds to what a site *holds* of every fragment: steps,
and samples as the weight. A launch puts all of it into the flight. A landing decides what becomes
of the flight, and of what was trained since; see `MergeAction`. So every sample is in exactly one
place: held, in flight, counted in one record, or dropped for a reason that the landing names. None
counts twice, and none is lost that was sent.

[Note: what an earlier incarnation has launched] An incarnation that was killed may have launched
what the checkpoint of the next one holds, and more. Where that has been counted, it is taken before
the first step. Where it *stands* in a round that is open, the next incarnation begins again from
the outer values, before its first step too. From then on what it holds is *apart* from that launch,
which therefore lands like what others have contributed: the local parameters move by as much as the
outer ones, and all that was trained since is kept. A checkpoint says so as well, so that one more
incarnation does not begin again. No other launch is taken for that round, so none is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, get_type_hints

from lightning_sdiloco.errors import AgreementError, ExchangeError, Refused
from lightning_sdiloco.federation.codec import Digest, plain, read
from lightning_sdiloco.federation.messages import (
    Call,
    Contribution,
    Heartbeat,
    Hello,
    LaunchId,
    Position,
    Record,
    StateHeader,
    Welcome,
)
from lightning_sdiloco.federation.run_config import RETENTION, Terms


class MergeAction(Enum):
    MIX = "mix"
    DROP = "drop"
    CARRY = "carry"
    TAKE = "take"
    REFUSE = "refuse"


@dataclass
class InFlight:
    own: Contribution
    launched_at: int
    steps: int
    waits_since: float | None = field(default=None, init=False)


@dataclass
class Progress:
    fragment: int
    applied: Position
    launched_at: int
    digest: Digest | None = None
    steps: int = 0
    samples: int = 0
    flight: InFlight | None = None
    call: Call | None = None
    skipped: int = 0
    ended: bool = False
    records: dict[int, Record] = field(default_factory=dict)
    closed: int = 0
    kept: int = 1
    refused: int = 0
    late: MergeAction = MergeAction.CARRY
    dropped: bool = False
    too_long: int = 0
    is_fresh: bool = False
    apart: LaunchId | None = None
    standing: LaunchId | None = None

    @property
    def next_round(self) -> int:
        return self.applied.round + 1

    @property
    def has_joined(self) -> bool:
        """Whether all closed rounds have landed, except a flight, which lands in its time, and
        later ones.
        """
        if self.flight is None or self.is_overtaken:
            return self.applied.round >= self.closed
        return all(round in self.records for round in range(self.next_round, self.closed + 1))

    @property
    def called(self) -> Call | None:
        return self.call if self.call and self.call.round == self.next_round else None

    def is_last(self, terms: Terms) -> bool:
        """Returns whether the round that lands next is the last, as far as is known: by the run
        config, or a call.
        """
        return terms.is_last(self.next_round) or (self.called is not None and self.called.final)

    @property
    def stands(self) -> bool:
        """Whether the round that lands next has a launch of this site already, and takes no
        other.
        """
        return self.standing is not None and self.standing.round == self.next_round

    @property
    def is_overtaken(self) -> bool:
        """Whether a record counts what an earlier incarnation launched after the flight, or in its
        place.
        """
        if self.flight is None:
            return False
        own = self.flight.own
        counted = [
            record.of(own.site) for record in self.records.values() if record.round >= own.round
        ]
        return any(mine and mine != own and not self._is_apart(mine) for mine in counted)

    def _is_apart(self, mine: Contribution) -> bool:
        """Returns whether nothing that this site has launched is held outside a flight."""
        return self.is_fresh or mine.launch == self.apart

    def meet(self, standing: LaunchId | None) -> bool:
        """Notes which launch of this site is in the hub's open round."""
        self.standing = standing
        known = self.flight.own.launch if self.flight else None
        if standing is None or standing in (known, self.apart):
            return False
        self.apart = standing
        if self.digest is None:
            return False
        self.begin_again()
        return True

    def begin_again(self) -> None:
        """Notes that the local parameters become the outer ones, whatever was launched before."""
        self.flight = None
        self.is_fresh = True
        self.drop()

    def drop(self) -> None:
        self.steps = self.samples = 0

    def forget(self) -> None:
        """Finds that the outer parameters are wrong: what was measured against them is worth
        nothing.
        """
        self.digest = self.flight = None
        self.drop()

    # Launching

    def launches(self, step: int, terms: Terms, finishing: bool) -> bool:
        # If the round is closed already, a launch would be late.
        if self.flight or self.ended or self.stands or self.closed > self.applied.round:
            return False
        called = self.called
        if called and called.final:
            return True
        if finishing:
            return self.steps > 0
        on_time = step - self.launched_at >= terms.steps_before(self.fragment, self.next_round)
        answers = called is not None and self.skipped != called.round
        return self.steps >= terms.least_steps(self.next_round) and (on_time or answers)

    # Landing

    def learn(self, record: Record) -> None:
        self.closed = max(self.closed, record.round)
        if record.round < self.applied.round or record.position == self.applied:
            return
        before = self.records.get(record.round - 1)
        known = (
            self.applied.key
            if record.round == self.next_round
            else before.key
            if before
            else record.previous
        )
        after = self.records.get(record.round + 1)
        other = (
            record.round == self.applied.round
            or self.records.get(record.round, record).key != record.key
        )
        if other or record.previous != known or (after and after.previous != record.key):
            raise self.parted(record.round)
        self.records[record.round] = record

    def parted(self, round: int) -> AgreementError:
        """Returns the error for a round that is another one at the hub than here."""
        return AgreementError(
            f"Round {round} of fragment {self.fragment} differs between the hub and this site:"
            " their histories have"
            " parted. Resume this site from an earlier checkpoint, or restore the hub's ledger."
        )

    def landing(self, record: Record, site: str) -> MergeAction:
        """Returns what a record does to what the site has in flight and holds."""
        mine = record.of(site)
        flight = self.flight if self.flight and self.flight.own.round == record.round else None
        if record.final or (flight and not flight.own.finite):
            return MergeAction.TAKE
        if mine is None:
            without = record.without(site)
            if flight and without and without.reason == "too long":
                return MergeAction.TAKE
            return self.late if flight and not self.dropped else MergeAction.CARRY
        if flight and flight.own == mine:
            return MergeAction.MIX
        # Else what an earlier incarnation had counted is in the local parameters, inseparable from
        # the rest.
        holds = self.steps > 0 or self.flight is not None
        return MergeAction.CARRY if holds and self._is_apart(mine) else MergeAction.TAKE

    def land(self, landing: MergeAction, applied: Position, digest: int) -> None:
        if self.flight and self.flight.own.round <= applied.round:
            if landing is MergeAction.CARRY:
                self.steps += self.flight.steps
                self.samples += self.flight.own.weight
            self.flight = None
        if landing is not MergeAction.CARRY:
            self.dropped = landing is MergeAction.DROP
        if landing is MergeAction.TAKE:
            self.drop()
        record = self.records.get(applied.round)
        self.ended = record is not None and record.final
        self.applied = applied
        self.digest = digest
        self.closed = max(self.closed, applied.round)
        if self.apart and self.apart.round <= applied.round:
            self.apart = None
        self.records = {round: own for round, own in self.records.items() if round > applied.round}

    def passed(self, round: int, site: str) -> MergeAction:
        """Returns what the records up to a round, none landed yet, amount to together."""
        found = set()
        for number in range(self.next_round, round + 1):
            record = self.records.get(number)
            if record is None:
                # It is unknown whether an earlier incarnation counted. It must not count twice.
                return MergeAction.TAKE
            found.add(self.landing(record, site))
        return next(
            one
            for one in (MergeAction.TAKE, MergeAction.MIX, MergeAction.DROP, MergeAction.CARRY)
            if one in found
        )


_SAVED = (
    "applied",
    "launched_at",
    "digest",
    "steps",
    "samples",
    "ended",
    "dropped",
    "too_long",
    "apart",
    "flight",
)

# A site whose contributions are too long this many times in a row will not recover.
_MOST_TOO_LONG = 3


class Follower:
    """Follows the records of a run for one site. Times are in seconds, on any clock that never
    goes back.
    """

    def __init__(
        self,
        terms: Terms,
        run_config: str,
        site: str,
        incarnation: str,
        patience: float = 3600.0,
        late: MergeAction = MergeAction.CARRY,
    ) -> None:
        self.terms = terms
        self.site = site
        self.incarnation = incarnation
        self.reachable = False
        self._run_config = run_config
        self._patience = patience
        self._late = late
        self._alone_since: float | None = None
        self._finishing = False
        offsets = [terms.schedule.launch_of(fragment, 0) for fragment in range(terms.fragments)]
        self.fragments = [
            Progress(fragment, Position(0, run_config), offset, late=late)
            for fragment, offset in enumerate(offsets)
        ]

    # The hub

    def found(self, digests: Sequence[int]) -> None:
        """Begins at round 0 with the outer parameters that this site has: only the founder does,
        and only once.
        """
        for own, digest in zip(self.fragments, digests, strict=True):
            own.digest = digest

    def hello(self, run: str) -> Hello:
        """Returns the site's greeting. The hub sends all records after those that it has
        applied.
        """
        return Hello(
            run,
            self.site,
            self.incarnation,
            self._run_config,
            tuple(own.applied for own in self.fragments),
        )

    def welcome(self, welcome: Welcome) -> list[int]:
        """Takes in what the hub has; returns the fragments whose local parameters become the outer
        ones.
        """
        for own, closed in (
            zip(self.fragments, welcome.closed, strict=True) if welcome.founded_again else ()
        ):
            # What few have applied did not happen in the run that was founded again: they take the
            # state of the others.
            if own.applied.round >= closed.round and own.applied != closed:
                own.forget()
                own.applied = Position(0, self._run_config)
                own.records = {}
            # Nor did what was heard of later rounds, and never landed.
            own.records = {
                round: one for round, one in own.records.items() if round <= closed.round
            }
            own.closed = own.applied.round
        for own, closed in zip(self.fragments, welcome.closed, strict=True):
            if own.digest is not None and closed.round < own.applied.round:
                raise AgreementError(
                    f"The hub knows {closed.round} rounds of fragment {own.fragment}, but"
                    f" {self.site} has applied"
                    f" {own.applied.round}. After `sdiloco hub rollback`, restart the site from"
                    " an earlier checkpoint,"
                    " or without one. Otherwise the hub has lost records, or serves another run:"
                    " restore its ledger."
                )
            if (
                own.digest is not None
                and closed.round == own.applied.round
                and closed != own.applied
            ):
                raise own.parted(closed.round)
        for own, closed, kept in zip(self.fragments, welcome.closed, welcome.kept, strict=True):
            own.closed = max(own.closed, closed.round)
            own.kept = kept
        self.reachable = True
        self._alone_since = None
        self.terms = welcome.terms or self.terms
        known = dict(welcome.standing)
        standing = [
            LaunchId(at.round + 1, known[p]) if p in known else None
            for p, at in enumerate(welcome.closed)
        ]
        return [
            own.fragment
            for own, launch in zip(self.fragments, standing, strict=True)
            if own.meet(launch)
        ]

    def lose(self, now: float, why: str = "") -> None:
        """Notes that the hub cannot be reached, again after each failed try. Training goes on."""
        self.reachable = False
        self._alone_since = now if self._alone_since is None else self._alone_since
        if now - self._alone_since > self._patience:
            raise ExchangeError(
                f"{self.site} has not reached the hub for {now - self._alone_since:.0f} s,"
                " longer than"
                f" patience={self._patience:.0f} s. Its checkpoint holds what it trained:"
                " restart it when the hub is"
                f" back. {why}".rstrip()
            )

    @property
    def lag(self) -> int:
        """How many rounds this site is behind, in the fragment where it is worst."""
        return max(own.closed - own.applied.round for own in self.fragments)

    @property
    def wants_state(self) -> bool:
        """Whether to ask for a state: there is none that is right, or that records can bring up to
        date soon.
        """
        is_sound = (
            own.digest is not None
            and (own.next_round >= own.kept or own.applied.round >= own.closed)
            for own in self.fragments
        )
        return self.lag > RETENTION or not all(is_sound)

    @property
    def follows(self) -> bool:
        """Whether this site can contribute, and give others a state."""
        return not self.wants_state

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            self.site,
            self.incarnation,
            self.follows,
            tuple(own.applied.round for own in self.fragments),
        )

    def hear(self, call: Call) -> None:
        own = self.fragments[call.fragment]
        if own.call is None or call.round >= own.call.round:
            own.call = call

    def learn(self, record: Record) -> None:
        self.fragments[record.fragment].learn(record)

    # Training

    def trained(self, samples: int, steps: int = 1) -> None:
        """Counts an inner step, or those that were made before the site joined."""
        for own in self.fragments:
            own.steps += steps
            own.samples += samples

    def finish(self) -> None:
        self._finishing = True

    @property
    def finished(self) -> bool:
        """Whether the site may leave: the run is over, or the site is, and all that it trained is
        counted.
        """
        unsettled = [own for own in self.fragments if not own.ended]
        return not unsettled or (
            self._finishing and not any(own.flight or own.steps for own in unsettled)
        )

    # Launching

    def launches(self, step: int) -> list[int]:
        if not self.follows:
            return []
        return [
            own.fragment
            for own in self.fragments
            if own.launches(step, self.terms, self._finishing)
        ]

    def skips(self) -> list[Call]:
        """Returns the calls that will not be answered, each once, because the site has trained too
        little.
        """
        calls = []
        for own in () if self._finishing else self.fragments:
            called = own.called
            busy = own.flight or own.stands or own.ended
            answers = busy or own.steps >= self.terms.least_steps(own.next_round)
            if called and not called.final and own.skipped != called.round and not answers:
                own.skipped = called.round
                calls.append(called)
        return calls

    def begin(self, fragment: int, step: int) -> Contribution:
        """Launches; what is encoded while training goes on `complete` sends."""
        own = self.fragments[fragment]
        assert own.digest is not None, "what has no outer parameters cannot launch"
        sent = Contribution(
            fragment,
            own.next_round,
            self.site,
            self.incarnation,
            own.applied.key,
            own.samples,
            own.digest,
            payloads=(),
            steps=own.steps,
            exact=own.is_last(self.terms),
        )
        own.flight = InFlight(sent, step, own.steps)
        own.launched_at = step
        own.drop()
        return sent

    def complete(self, sent: Contribution) -> Contribution | None:
        own = self.fragments[sent.fragment]
        if own.flight is None or own.flight.own.payloads or own.flight.own.round != sent.round:
            return None
        if sent.digest != own.digest:
            own.forget()
            return None
        own.flight.own = sent if sent.finite else replace(sent, norm_squared=0.0)
        return own.flight.own

    def outstanding(self) -> list[Contribution]:
        """Returns what to send again after a hello: flights whose round is not known to be
        closed.
        """
        flights = [
            own.flight.own for own in self.fragments if own.flight and own.flight.own.payloads
        ]
        return [own for own in flights if own.round > self.fragments[own.fragment].closed]

    # Landing

    def due(self, step: int) -> list[Record]:
        # A site that trains no more has nothing to overlap with.
        due = list[Record]()
        for own in self.fragments:
            overlap = 0 if self._finishing else self.terms.schedule.overlap_of_round(own.next_round)
            early = (
                own.flight is not None
                and step < own.flight.launched_at + overlap
                and not own.is_overtaken
            )
            record = own.records.get(own.next_round)
            if record is not None and own.digest is not None and not early:
                due.append(record)
        return due

    def waits(self, step: int, now: float) -> float:
        """Returns for how many seconds training waits for a landing; 0 while the hub cannot be
        reached.
        """
        longest = 0.0
        # Every flight is asked, so that all their waits begin together.
        for own in self.fragments if self.reachable else ():
            flight = own.flight
            if flight is None:
                continue
            if (
                step
                >= flight.launched_at
                + self.terms.steps_before(own.fragment, flight.own.round + 1)
                - 1
            ):
                flight.waits_since = now if flight.waits_since is None else flight.waits_since
                longest = max(longest, flight.waits_since + self.terms.longest_wait - now)
        return longest

    def land(self, record: Record, before: int, after: int) -> MergeAction:
        own = self.fragments[record.fragment]
        if before != record.digest:
            own.forget()
            if own.refused == record.round:
                raise AgreementError(
                    f"Round {record.round} of fragment {own.fragment} was measured against outer"
                    " parameters that cannot"
                    " be restored: with another state this site computed others, too. Its"
                    " arithmetic differs from the"
                    " other sites', or the sites that held them are gone. Roll the run back to"
                    " an earlier round"
                    " (sdiloco hub rollback)."
                )
            own.refused = record.round
            return MergeAction.REFUSE
        landing = own.landing(record, self.site)
        without = record.without(self.site)
        own.land(landing, record.position, after)
        own.too_long = own.too_long + 1 if without and without.reason == "too long" else 0
        if own.too_long >= _MOST_TOO_LONG:
            raise AgreementError(
                f"{self.site}'s contributions to fragment {own.fragment} were left out"
                f" {own.too_long} times in a row:"
                " they were too long compared with its earlier ones and the other sites'. This"
                " site leaves, and the"
                " others continue. Look at its data, its learning rate and its machine;"
                " restarted without a checkpoint,"
                " it begins from the others' state."
            )
        return landing

    # States

    def header(self) -> StateHeader:
        """Describes the state of this site, for a donor. It must be asked between landings."""
        digests = tuple(own.digest for own in self.fragments if own.digest is not None)
        assert len(digests) == len(self.fragments), "a site that needs a state cannot give one"
        return StateHeader(tuple(own.applied for own in self.fragments), digests)

    def adopt(self, state: StateHeader, digests: Sequence[int]) -> dict[int, MergeAction]:
        """Takes over the state of a donor, or a snapshot. Then the site says hello again, for the
        records after it.
        """
        for own, position, said, digest in zip(
            self.fragments, state.applied, state.digests, digests, strict=True
        ):
            _require_sound(own, position, said, digest)
        landings = {}
        for own, position, digest in zip(self.fragments, state.applied, digests, strict=True):
            if own.digest is None or position.round > own.applied.round:
                # Values that are wrong, or none, make nothing that could be carried.
                landing = (
                    MergeAction.TAKE
                    if own.digest is None
                    else own.passed(position.round, self.site)
                )
                if own.digest is None:
                    own.begin_again()
                own.land(landing, position, digest)
                landings[own.fragment] = landing
        return landings

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "fragments": [
                {name: plain(getattr(own, name)) for name in _SAVED} for own in self.fragments
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any], digests: Sequence[int]) -> None:
        """Restores what `state_dict` returned. This incarnation goes on where the other one was."""
        hints = get_type_hints(Progress, include_extras=True)
        loaded = list[Progress]()
        for fragment, (saved, digest) in enumerate(zip(state["fragments"], digests, strict=True)):
            known = {name: read(hints[name], saved[name], name) for name in _SAVED}
            loaded.append(
                own := Progress(fragment, late=self._late, closed=known["applied"].round, **known)
            )
            if own.digest not in (digest, None):
                raise ValueError(
                    f"The checkpoint was damaged: fragment {own.fragment} has other outer"
                    " parameters than were saved."
                    " Resume from another one, or start without: the site then fetches a state."
                )
        self.fragments = loaded


def _require_sound(own: Progress, position: Position, said: int, digest: int) -> None:
    if said != digest:
        raise Refused(
            f"the state was damaged: fragment {own.fragment} has the digest {digest:x}, not"
            f" {said:x}"
        )
    if position.round + 1 < own.kept:
        raise Refused(
            f"the state is at round {position.round} of fragment {own.fragment}; later records"
            " are gone"
        )
    at = own.records.get(position.round)
    after = own.records.get(position.round + 1)
    known = own.applied if own.applied.round == position.round else at.position if at else position
    if position != known or (after and after.previous != position.key):
        raise Refused(f"the state has another history of fragment {own.fragment} than the records")
    if after and after.digest != digest:
        raise Refused(
            f"the state differs from the others' in fragment {own.fragment} after round"
            f" {position.round}"
        )
