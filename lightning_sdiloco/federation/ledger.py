"""The ledger: which sites are there, what they contributed, and which rounds close. Time comes in,
records go out.

[Note: durable before visible] The ledger does no input or output. Its owner, the hub, asks first
(`examine`, `due`: neither changes anything), makes durable what is to be, says that it is
(`contribute`, `append`), and only then tells anybody, of the `calls` too. No other call comes
between ``due`` and the last ``append``.

[Note: the last round] What comes of a last round replaces the parameters of all sites, and no later
round makes up for
what rounding loses of it: it takes what was sent in float32 alone. By the run config all know the
last round when they launch. An operator ends a run at any time, and then something may be open, or
on its way, that was not: its round closes as any other, with an outer step, and the next one is
called as the last, though no site has launched for it.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lightning_sdiloco.algorithm.weighting import outlying
from lightning_sdiloco.errors import AgreementError, Refused
from lightning_sdiloco.federation.messages import (
    Call,
    Contribution,
    Heartbeat,
    Hello,
    LeftOut,
    Position,
    Record,
    Standing,
    StateHeader,
    Timing,
    Welcome,
)
from lightning_sdiloco.federation.quorum import Quorum, built_in, quorum_of
from lightning_sdiloco.federation.run_config import RETENTION, SNAPSHOT_EVERY, RunConfig, Terms


class Founding:
    """Gathers sites until there are enough to found a run, on the run config of all and the state
    of the founder.
    """

    def __init__(
        self, sites: int, find: Callable[[str], type[Any]] = built_in, again: bool = False
    ) -> None:
        self._sites = sites
        self._find = find
        self.again = again
        self._proposed: dict[str, RunConfig] = {}
        self._brought: dict[str, tuple[Hello, RunConfig]] = {}
        self._founder: str | None = None

    def propose(self, site: str, run_config: RunConfig) -> RunConfig:
        """Returns the run config of the first who came; a site that was the first may change its
        mind.
        """
        self._require_quorum(run_config)
        others = (own for other, own in self._proposed.items() if other != site)
        self._proposed[site] = next(others, run_config)
        return self._proposed[site]

    def hello(self, hello: Hello, run_config: RunConfig) -> None:
        self._require_quorum(run_config)
        for other in (own for site, (_, own) in self._brought.items() if site != hello.site):
            run_config.require_same(other)
        self._brought[hello.site] = hello, run_config

    def _require_quorum(self, run_config: RunConfig) -> None:
        try:
            quorum_of(run_config.terms.quorum, self._find)
        except ValueError as error:
            raise Refused(str(error)) from None

    def gone(self, site: str) -> bool:
        """Forgets a site; returns whether it was there."""
        self._proposed.pop(site, None)
        self._founder = None if site == self._founder else self._founder
        return self._brought.pop(site, None) is not None

    @property
    def hellos(self) -> dict[str, Hello]:
        return {site: hello for site, (hello, _) in self._brought.items()}

    @property
    def missing(self) -> int:
        return max(0, self._sites - len(self._brought))

    @property
    def run_config(self) -> RunConfig:
        return next(run_config for _, run_config in self._brought.values())

    @property
    def base(self) -> tuple[Position, ...]:
        """Where a refounded run continues: for each fragment the position that most sites hold."""
        held = zip(*(hello.applied for hello, _ in self._brought.values()), strict=True)
        counted = (Counter(own) for own in held)
        return tuple(
            max((number, at.round, at) for at, number in own.items())[-1] for own in counted
        )

    @property
    def founder(self) -> str:
        """The site that brings the outer parameters of round 0: the first by name."""
        self._founder = self._founder or min(self._brought)
        return self._founder


class Answer(Enum):
    OPEN = "open"
    KNOWN = "known"
    LATE = "late"


@dataclass
class Member:
    incarnation: str
    until: float
    follows: bool
    applied: tuple[int, ...]
    connected: bool = True


@dataclass
class OpenRound:
    opened: float | None = None
    here: dict[str, Contribution] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    undecided_since: float | None = None


class Ledger:
    """Decides what counts; see [Note: durable before visible]."""

    def __init__(
        self,
        terms: Terms,
        run_config: str,
        now: float,
        records: Iterable[Record] = (),
        contributions: Iterable[Contribution] = (),
        snapshots: Iterable[StateHeader] = (),
        quorum: Quorum | None = None,
        evicted: Iterable[tuple[str, str]] = (),
        base: Sequence[Position] = (),
    ) -> None:
        self.terms = terms
        self.seq = 0
        self.base = list(base) or [Position(0, run_config)] * terms.fragments
        self.closed = list(self.base)
        self.members: dict[str, Member] = {}
        self.open: dict[int, OpenRound] = {}
        # Records that are decided, and wait for the mean of the hub.
        self.closing: dict[int, Record] = {}
        self.snapshots = Snapshots(snapshots)
        self.quorum = quorum or quorum_of(terms.quorum)
        self.history: list[deque[Record]] = [
            deque(maxlen=RETENTION) for _ in range(terms.fragments)
        ]
        self.evicted = set(evicted)
        self._timings = Timings()
        self._ending = False
        for record in records:
            self.append(record)
        for own in contributions:
            if Position(own.round - 1, own.previous) == self.closed[own.fragment]:
                self._take(own, now, None)
        # Those that were there before this start are waited for: they may not have found the hub
        # yet.
        last = (
            own
            for history in self.history
            for record in list(history)[-1:]
            for own in record.counted
        )
        opened = (own for round in self.open.values() for own in round.here.values())
        applied = tuple(position.round for position in self.closed)
        for own in (*last, *opened):
            self.members[own.site] = Member(
                own.incarnation, now + terms.lease, True, applied, connected=False
            )

    # Sites

    def hello(self, hello: Hello, now: float) -> Welcome:
        member = self.members.get(hello.site)
        if (hello.site, hello.incarnation) in self.evicted:
            raise Refused(f"{hello.site} was evicted from the run: ask its operator")
        if (
            member
            and member.incarnation != hello.incarnation
            and member.connected
            and member.until > now
        ):
            raise Refused(
                f"the name {hello.site} is in use by a running process: stop it first, or wait"
                f" {member.until - now:.1f}"
                " s if it is dead"
            )
        applied = tuple(position.round for position in hello.applied)
        follows = bool(
            member
            and member.connected
            and member.incarnation == hello.incarnation
            and member.follows
        )
        self.members[hello.site] = Member(
            hello.incarnation, now + self.terms.lease, follows, applied
        )
        own = [
            (p, round.here[hello.site])
            for p, round in sorted(self.open.items())
            if hello.site in round.here
        ]
        standing = tuple(Standing(p, one.incarnation) for p, one in own if not one.reason)
        return Welcome(tuple(self.closed), self.kept, standing)

    def heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        member = self._member(heartbeat.site, heartbeat.incarnation)
        member.until = now + self.terms.lease
        member.follows = heartbeat.follows
        member.applied = heartbeat.applied

    def leave(self, site: str, incarnation: str) -> bool:
        """Waits no longer for a site: it has left, or its connection has ended. Tells whether it
        was there.
        """
        member = self.members.get(site)
        was_there = member is not None and member.incarnation == incarnation
        if was_there:
            del self.members[site]
        return was_there

    def evict(self, site: str) -> None:
        """Throws a site out, by the word of an operator, with what it contributed to open
        rounds.
        """
        member = self.members.pop(site, None)
        if member:
            self.evicted.add((site, member.incarnation))
        for round in self.open.values():
            round.here.pop(site, None)
            round.arrived.pop(site, None)
            round.undecided_since = None
        self.open = {fragment: round for fragment, round in self.open.items() if round.here}
        self.closing.clear()

    def _member(self, site: str, incarnation: str) -> Member:
        member = self.members.get(site)
        if member is None or member.incarnation != incarnation or not member.connected:
            raise Refused(f"incarnation {incarnation} of {site} has not said hello")
        return member

    def present(self, now: float) -> list[str]:
        return sorted(site for site, member in self.members.items() if member.until > now)

    def behind(self, site: str) -> int:
        """Returns how many rounds a site is behind, in the fragment where it is worst."""
        applied = self.members[site].applied
        return max(closed.round - own for closed, own in zip(self.closed, applied, strict=True))

    def _contributors(self, now: float) -> list[str]:
        """Returns the sites that could contribute: leases that are valid, and what they lack can
        be had.
        """
        return [
            site
            for site in self.present(now)
            if self.members[site].follows and self.behind(site) <= RETENTION
        ]

    # Contributions

    def examine(self, own: Contribution, incarnation: str) -> Answer:
        """Returns the answer to a contribution, and changes nothing."""
        self._member(own.site, incarnation)
        if not 0 <= own.fragment < self.terms.fragments:
            raise Refused(f"there is no fragment {own.fragment}, only {self.terms.fragments}")
        closed = self.closed[own.fragment].round
        if own.round > closed + 1:
            raise Refused(
                f"round {own.round} of fragment {own.fragment} builds on records that are not"
                f" here: {closed}"
            )
        if own.round <= closed or own.fragment in self.closing or self.has_ended(own.fragment):
            return Answer.LATE
        if own.previous != self.closed[own.fragment].key:
            raise Refused(
                f"round {own.round} of fragment {own.fragment} builds on another history than"
                " this hub's"
            )
        round = self.open.get(own.fragment)
        return Answer.KNOWN if round and own.site in round.here else Answer.OPEN

    def contribute(self, own: Contribution, incarnation: str, now: float) -> Answer:
        """Takes a contribution that is durable; with `OPEN` as the answer, all sites get the
        `call`.
        """
        answer = self.examine(own, incarnation)
        if answer is Answer.OPEN:
            self._take(own, now, now)
            # A new launch shows that its site follows, a moment before its next heartbeat says so.
            member = self.members[own.site]
            member.follows = member.follows or own.incarnation == incarnation
            self._timings.arrives(own, now, self.open[own.fragment].opened)
        elif answer is Answer.LATE:
            self._timings.arrives_late(own, now)
        return answer

    def _take(self, own: Contribution, now: float, opened: float | None) -> None:
        round = self.open.setdefault(own.fragment, OpenRound(opened))
        round.here[own.site] = own
        round.arrived[own.site] = now

    def skip(self, site: str, incarnation: str, call: Call, now: float) -> None:
        """Notes that a site will not answer a call: it has trained too little. The round does not
        wait for it.
        """
        self._member(site, incarnation)
        round = self.open.get(call.fragment)
        if round and call == self._call(call.fragment):
            round.arrived.setdefault(site, now)

    def calls(self) -> list[Call]:
        """Returns the rounds for which to launch: those that are open, and all that are the last
        by an operator.
        """
        waiting = range(self.terms.fragments) if self._ending else ()
        last = [p for p in waiting if p not in self.open and not self.has_ended(p)]
        return [self._call(fragment) for fragment in (*self.open, *last)]

    def _call(self, fragment: int) -> Call:
        number = self.closed[fragment].round + 1
        round = self.open.get(fragment, OpenRound())
        is_exact = all(own.exact for own in round.here.values() if not own.reason)
        return Call(fragment, number, is_exact and (self._ending or self.terms.is_last(number)))

    # What counts

    def due(self, now: float) -> list[Record]:
        """Returns the records of the rounds that close now. They count once they are appended."""
        records: list[Record] = []
        undecided: list[AgreementError] = []
        sites = self._contributors(now)
        for fragment in sorted(self.open.keys() - self.closing.keys()):
            round = self.open[fragment]
            # Sites that are there but do not count still answer: otherwise a round might never
            # close.
            if len(round.here) < self.quorum.fewest(len(sites)) or not self._closes(
                fragment, round, sites, now
            ):
                continue
            try:
                majority = self._majority(fragment, round, now)
            except AgreementError as error:
                undecided.append(error)
                continue
            if not majority:
                continue
            call = self._call(fragment)
            too_long = self._too_long(fragment, majority)
            counted = tuple(own for own in majority if own.site not in too_long)
            held = {own.site for own in majority}
            left_out = tuple(
                LeftOut(site, "too long", float(f"{too_long[site]:.4g}"))
                if site in too_long
                else LeftOut(site, own.reason or "other outer parameters")
                for site, own in sorted(round.here.items())
                if site in too_long or site not in held
            )
            timings = tuple(
                own for _, own in sorted(self._timings.untold.get(fragment, {}).items())
            )
            seq = self.seq + len(records)
            previous = self.closed[fragment].key
            records.append(
                Record(seq, fragment, call.round, previous, counted, left_out, call.final, timings)
            )
        if undecided and not records:
            raise undecided[0]
        return records

    def _closes(self, fragment: int, round: OpenRound, sites: list[str], now: float) -> bool:
        if self._call(fragment).final:
            # No site can count later, so all that are alive are waited for.
            return all(site in round.arrived for site in sites)
        awaited = self.quorum.awaited(tuple(self.history[fragment]), sites)
        return (
            self.quorum.closes(round.arrived, awaited, now)
            or now >= min(round.arrived.values()) + self.terms.grace
        )

    def _majority(self, fragment: int, round: OpenRound, now: float) -> list[Contribution]:
        """Returns the contributions that count: those measured against the outer parameters that
        most sites hold.
        """
        majorities: dict[int, list[Contribution]] = {}
        for _, own in sorted(round.here.items()):
            if not own.reason:
                majorities.setdefault(own.digest, []).append(own)
        if not majorities:
            if any(not own.finite for own in round.here.values()):
                raise AgreementError(
                    f"No site has finite values in fragment {fragment}:"
                    f" {', '.join(sorted(round.here))}. Resume from an"
                    " earlier checkpoint, for example with gradient clipping or a smaller"
                    " learning rate."
                )
            return []
        largest, *others = sorted(majorities.values(), key=len, reverse=True)
        if not others or len(largest) > len(others[0]):
            return largest
        # A tie: the round is held until another witness comes, for as long as a lease lasts.
        if round.undecided_since is None:
            round.undecided_since = now
        if now < round.undecided_since + self.terms.lease:
            return []
        sides = "; ".join(
            f"{', '.join(own.site for own in side)} hold {side[0].digest:016x}"
            for side in (largest, *others)
        )
        raise AgreementError(
            f"The sites hold different outer parameters of fragment {fragment} after round"
            f" {self.closed[fragment].round}, without a majority: {sides}. Evict the sites that"
            " are wrong (sdiloco hub"
            " evict), so that they fetch a state from the others."
        )

    def _too_long(self, fragment: int, majority: Sequence[Contribution]) -> dict[str, float]:
        """Returns the sites whose outer gradients the guard leaves out, each with how many times
        too long it is.
        """
        if self.terms.guard is None:
            return {}
        past = defaultdict[str, list[float]](list)
        for own in (own for record in self.history[fragment] for own in record.counted):
            past[own.site].append(self._length(own))
        return outlying({own.site: self._length(own) for own in majority}, past, self.terms.guard)

    def _length(self, own: Contribution) -> float:
        """Returns the norm for each inner step: some have trained more than others, for instance
        without the hub.
        """
        return math.sqrt(own.norm_squared) / max(own.steps, self.terms.least_steps(own.round))

    def append(self, record: Record) -> None:
        closed = self.closed[record.fragment]
        if (record.seq, record.round, record.previous) != (self.seq, closed.round + 1, closed.key):
            raise AgreementError(
                f"Record {record.seq}, of round {record.round} of fragment {record.fragment},"
                " does not follow on"
                f" {self.seq} records and round {closed.round}: the ledger was damaged. Restore"
                " it, or roll back."
            )
        self.seq += 1
        self.closed[record.fragment] = record.position
        self.history[record.fragment].append(record)
        self.closing.pop(record.fragment, None)
        round = self.open.pop(record.fragment, None)
        self._timings.closes(record, round.opened if round else None)
        self.snapshots.check(record)

    def next_due(self, now: float) -> float:
        """Returns when to ask `due` again if nothing happens before: the first end of a grace, a
        lease or a tie.
        """
        times = [
            time + self.terms.grace
            for round in self.open.values()
            for time in round.arrived.values()
        ]
        times += [member.until for member in self.members.values()]
        times += [
            round.undecided_since + self.terms.lease
            for round in self.open.values()
            if round.undecided_since
        ]
        return min((time for time in times if time > now), default=now + self.terms.lease)

    # The end

    def end(self) -> None:
        self._ending = True

    def amend(self, terms: Terms, quorum: Quorum) -> None:
        """Takes other terms from here on. A round that is open, and was to be the last, closes as
        any other.
        """
        self.terms = terms
        self.quorum = quorum
        self.closing.clear()

    def has_ended(self, fragment: int) -> bool:
        return any(record.final for record in self.history[fragment])

    # States

    def source(
        self, site: str, now: float, without: Collection[str] = ()
    ) -> str | StateHeader | None:
        """Returns where a site gets a state: from a donor, by name, or from the snapshot."""
        donors = [
            other for other in self._contributors(now) if other != site and other not in without
        ]
        donors = [other for other in donors if self.members[other].connected]
        if donors:
            return max(
                donors, key=lambda other: (-self.behind(other), sum(self.members[other].applied))
            )
        return self.snapshots.best

    @property
    def kept(self) -> tuple[int, ...]:
        """The first round of every fragment whose payloads are kept: the last rounds, and all
        since the snapshot.
        """
        best = self.snapshots.best
        from_snapshots = (
            [position.round for position in best.applied]
            if best
            else [position.round for position in self.closed]
        )
        rounds = zip(self.closed, from_snapshots, self.base, strict=True)
        return tuple(
            max(base.round, min(closed.round - RETENTION, own)) + 1 for closed, own, base in rounds
        )


class Snapshots:
    """Knows which states at the hub can be trusted, and when it is time for a new one."""

    def __init__(self, headers: Iterable[StateHeader] = ()) -> None:
        self._states: list[tuple[StateHeader, set[int]]] = [(header, set()) for header in headers]

    @property
    def headers(self) -> list[StateHeader]:
        return [header for header, _ in self._states]

    @property
    def best(self) -> StateHeader | None:
        """The state to begin from if no site has one."""
        return self._states[0][0] if self._states else None

    def add(self, header: StateHeader) -> None:
        self._states.append((header, set()))

    def check(self, record: Record) -> None:
        """Compares the states with a record, and drops those that are wrong or no longer needed."""
        sound = []
        for header, verified in self._states:
            position = header.applied[record.fragment]
            if position.round == record.round - 1:
                if (position.key, header.digests[record.fragment]) != (
                    record.previous,
                    record.digest,
                ):
                    continue
                verified.add(record.fragment)
            sound.append((header, verified))
        last = max(
            (i for i, (header, ok) in enumerate(sound) if len(ok) == len(header.applied)), default=0
        )
        self._states = sound[last:]

    def is_due(self, rounds: Iterable[int], every: int | None = None) -> bool:
        if not self._states:
            return True
        newest = self._states[-1][0].applied
        every = SNAPSHOT_EVERY if every is None else every
        return any(closed - own.round >= every for closed, own in zip(rounds, newest, strict=True))


class Timings:
    def __init__(self) -> None:
        # By fragment: the last round that was closed, and when it was opened.
        self._closed: dict[int, tuple[int, float | None]] = {}
        # By fragment and site: when it came for a round, and in which incarnation it was counted
        # when.
        self._came: dict[tuple[int, str], tuple[int, float]] = {}
        self._counted: dict[tuple[int, str], tuple[str, float]] = {}
        self.untold: dict[int, dict[tuple[str, int], Timing]] = {}

    def arrives(self, own: Contribution, now: float, opened: float | None) -> None:
        self._came[own.fragment, own.site] = own.round, now
        if opened is not None:
            # The seconds for each of the inner steps, which are those since the site was last
            # counted.
            incarnation, since = self._counted.get((own.fragment, own.site), ("", now))
            step = (
                float(f"{(now - since) / own.steps:.4g}")
                if incarnation == own.incarnation and own.steps
                else None
            )
            timing = Timing(own.site, own.round, round(now - opened, 3), step)
            self.untold.setdefault(own.fragment, {})[own.site, own.round] = timing

    def arrives_late(self, own: Contribution, now: float) -> None:
        """Notes a contribution to a closed round: once, and only if it was the last one."""
        closed, opened = self._closed.get(own.fragment, (0, None))
        came, _ = self._came.get((own.fragment, own.site), (0, 0.0))
        if own.round == closed and came < closed:
            self.arrives(own, now, opened)

    def closes(self, record: Record, opened: float | None) -> None:
        """Marks a record as reported."""
        fragment = record.fragment
        self._closed[fragment] = record.round, opened
        self.untold.pop(fragment, None)
        for own in record.counted:
            came, time = self._came.get((fragment, own.site), (0, 0.0))
            if came == record.round:
                self._counted[fragment, own.site] = own.incarnation, time
