"""A run's ledger, which tracks the sites and their contributions and decides which rounds close.
Methods take the time as an argument and return closed rounds as records.

[Note: durable before visible] The ledger performs no input or output. The hub makes each change in
four steps. The hub first queries the ledger with `examine` or `due`, which change nothing. The hub
then stores the change durably and reports the change to the ledger with `contribute` or `append`.
Finally, the hub informs the sites, for example of new `calls`. The hub makes no other call to the
ledger between ``due`` and the last ``append``.

[Note: the last round] The result of the last round replaces the parameters of all sites. No later
round corrects rounding errors, so only float32 contributions count. If the run config sets the
number of rounds, all sites recognize the last round when they launch. An operator may end a run at
any time, even while an inexact round is open or an inexact contribution is in transit. The open
round then closes as usual, with an outer step. The hub then calls the following round as the last
round, even though no site has launched for it.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from lightning_sdiloco.algorithm.guard import (
    NOT_FINITE,
    Length,
    Past,
    TooLong,
    outlying,
    remembered,
    remembered_sizes,
    with_large_buffers,
)
from lightning_sdiloco.errors import AgreementError, Refused
from lightning_sdiloco.federation.messages import (
    Call,
    Contribution,
    Heartbeat,
    Hello,
    LeftOut,
    Position,
    Record,
    RoundId,
    Standing,
    StateHeader,
    Timing,
    Welcome,
)
from lightning_sdiloco.federation.quorum import Quorum, built_in, quorum_of
from lightning_sdiloco.federation.run_config import RETENTION, SNAPSHOT_EVERY, RunConfig, Terms


class Founding:
    """Collects sites until there are enough to found a run with a common run config and the
    founder's state.
    """

    def __init__(
        self, sites: int, find: Callable[[str], type[Quorum]] = built_in, again: bool = False
    ) -> None:
        self._sites = sites
        self._find = find
        self.again = again
        self._proposals: dict[str, RunConfig] = {}
        self._run_configs: dict[str, RunConfig] = {}
        self.hellos: dict[str, Hello] = {}
        self._founder: str | None = None

    def propose(self, site: str, run_config: RunConfig) -> RunConfig:
        """Returns the run config of the first site to propose one. Only that site may replace its
        proposal.
        """
        self._require_quorum(run_config)
        for proposer, proposal in self._proposals.items():
            if proposer != site:
                run_config = proposal
                break
        self._proposals[site] = run_config
        return run_config

    def hello(self, hello: Hello, run_config: RunConfig) -> None:
        self._require_quorum(run_config)
        for site, agreed in self._run_configs.items():
            if site != hello.site:
                run_config.require_same(agreed)
        self._run_configs[hello.site] = run_config
        self.hellos[hello.site] = hello

    def _require_quorum(self, run_config: RunConfig) -> None:
        try:
            quorum_of(run_config.terms.quorum, self._find)
        except ValueError as error:
            raise Refused(str(error)) from None

    def gone(self, site: str) -> bool:
        """Removes a site and returns whether the site had sent a hello."""
        self._proposals.pop(site, None)
        self._run_configs.pop(site, None)
        if site == self._founder:
            self._founder = None
        return self.hellos.pop(site, None) is not None

    @property
    def missing(self) -> int:
        return max(0, self._sites - len(self.hellos))

    @property
    def run_config(self) -> RunConfig:
        return next(iter(self._run_configs.values()))

    @property
    def base(self) -> tuple[Position, ...]:
        """The position in each fragment that most sites share, from which a refounded run
        continues.
        """
        positions = []
        for held in zip(*(hello.applied for hello in self.hellos.values()), strict=True):
            votes = Counter(held)
            positions.append(
                max(votes, key=lambda position: (votes[position], position.round, position))
            )
        return tuple(positions)

    @property
    def founder(self) -> str:
        """The first site by name, which provides the outer parameters of round 0."""
        self._founder = self._founder or min(self.hellos)
        return self._founder


class Answer(Enum):
    OPEN = "open"
    KNOWN = "known"
    LATE = "late"


@dataclass
class Member:
    """A site with a lease that ends at ``until``. A member ``follows`` if its state is recent
    enough to contribute. ``followed_at`` is the time at which the member first reported that it
    follows.
    """

    incarnation: str
    until: float
    follows: bool
    applied: tuple[int, ...]
    connected: bool = True
    followed_at: float = 0.0

    def follow(self, follows: bool, now: float) -> None:
        if follows and not self.follows:
            self.followed_at = now
        self.follows = follows


@dataclass
class OpenRound:
    """An open round.

    Attributes:
        opened: The arrival time of the first contribution, or None if it arrived before the hub's
            last start.
        contributions: The contributions by site.
        arrived: The time of each site's contribution or refusal.
        undecided_since: The time at which a tie between different outer parameters was detected.
    """

    opened: float | None = None
    contributions: dict[str, Contribution] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    undecided_since: float | None = None


class Ledger:
    """Decides which contributions count. The hub calls the methods in the order described in [Note:
    durable before visible].
    """

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
        self.base = list(base) or [Position.start(run_config)] * terms.fragments
        self.closed = list(self.base)
        self.members: dict[str, Member] = {}
        self.open: dict[int, OpenRound] = {}
        # Decided records that wait for the hub's mean.
        self.closing: dict[int, Record] = {}
        self.snapshots = Snapshots(snapshots)
        self.quorum = quorum or quorum_of(terms.quorum)
        self.history: list[deque[Record]] = [
            deque(maxlen=RETENTION) for _ in range(terms.fragments)
        ]
        self.evicted = set(evicted)
        # By fragment and site: the lengths that the guard compares, and the sizes of buffers.
        self._pasts: list[dict[str, Past]] = [{} for _ in range(terms.fragments)]
        self._sizes: list[dict[str, Past]] = [{} for _ in range(terms.fragments)]
        self._timings = Timings()
        self._ending = False
        for record in records:
            self.append(record)
        for contribution in contributions:
            if contribution.builds_on(self.closed[contribution.fragment]):
                self._take(contribution, now, None)
        # Until this time, the hub also waits for sites whose connections break.
        self._expects_until = -math.inf
        self._expect_earlier_sites(now)

    def resume(self, now: float) -> None:
        """Extends the leases of all sites after the hub was paused, because the hub has missed
        heartbeats and may have lost connections.
        """
        self._expects_until = now + self.terms.lease
        for member in self.members.values():
            member.until = max(member.until, self._expects_until)
        self._expect_earlier_sites(now)

    def _expect_earlier_sites(self, now: float) -> None:
        """Waits for earlier sites for the length of one lease after the hub has started or was
        paused, because these sites may not have reconnected yet.
        """
        contributions = list[Contribution]()
        for history in self.history:
            if history:
                contributions += history[-1].counted
        for round in self.open.values():
            contributions += round.contributions.values()
        applied = tuple(position.round for position in self.closed)
        until = now + self.terms.lease
        for contribution in contributions:
            member = Member(contribution.incarnation, until, True, applied, connected=False)
            self.members.setdefault(contribution.site, member)

    # Sites

    def hello(self, hello: Hello, now: float) -> Welcome:
        self.require_not_evicted(hello.site, hello.incarnation)
        conflict = self.conflict_of(hello, now)
        if conflict:
            raise Refused(conflict)
        applied = tuple(position.round for position in hello.applied)
        follows = self.has_joined(hello) and self.members[hello.site].follows
        until = now + self.terms.lease
        self.members[hello.site] = Member(hello.incarnation, until, follows, applied)
        standing = []
        for fragment, round in sorted(self.open.items()):
            contribution = round.contributions.get(hello.site)
            if contribution is not None and not contribution.reason:
                standing.append(Standing(fragment, contribution.incarnation))
        return Welcome(tuple(self.closed), self.kept_from, tuple(standing))

    def has_joined(self, hello: Hello) -> bool:
        """Returns whether the incarnation in a hello is already a connected member."""
        member = self.members.get(hello.site)
        return bool(member and member.connected and member.incarnation == hello.incarnation)

    def conflict_of(self, hello: Hello, now: float) -> str | None:
        """Returns an error text if another incarnation is connected under the same site name."""
        member = self.members.get(hello.site)
        if member is None or member.incarnation == hello.incarnation:
            return None
        if not member.connected or member.until <= now:
            return None
        return (
            f"the name {hello.site} is in use by a running process. Stop that process first, or"
            f" wait {member.until - now:.1f} s if it has died"
        )

    def heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        member = self._member(heartbeat.site, heartbeat.incarnation)
        member.until = now + self.terms.lease
        member.follow(heartbeat.follows, now)
        member.applied = heartbeat.applied

    def leave(self, site: str, incarnation: str, now: float) -> bool:
        """Stops waiting for a site that has left or lost its connection, unless the hub was paused
        recently. Returns whether the site was a member.
        """
        member = self.members.get(site)
        if member is None or member.incarnation != incarnation:
            return False
        if now < self._expects_until:
            member.connected = False
        else:
            del self.members[site]
        return True

    def evict(self, site: str) -> None:
        """Evicts a site at an operator's request and discards its contributions to open rounds."""
        member = self.members.pop(site, None)
        if member:
            self.evicted.add((site, member.incarnation))
        for round in self.open.values():
            round.contributions.pop(site, None)
            round.arrived.pop(site, None)
            round.undecided_since = None
        self.open = {
            fragment: round for fragment, round in self.open.items() if round.contributions
        }
        self.closing.clear()

    def require_not_evicted(self, site: str, incarnation: str) -> None:
        if (site, incarnation) in self.evicted:
            raise Refused(f"{site} was evicted from the run. Ask the operator to readmit the site")

    def _member(self, site: str, incarnation: str) -> Member:
        member = self.members.get(site)
        if member is None or member.incarnation != incarnation or not member.connected:
            self.require_not_evicted(site, incarnation)
            raise Refused(f"incarnation {incarnation} of {site} has not said hello")
        return member

    def present(self, now: float) -> list[str]:
        return sorted([site for site, member in self.members.items() if member.until > now])

    def behind(self, site: str) -> int:
        """Returns the number of rounds by which a site lags in its slowest fragment."""
        rounds = zip(self.closed, self.members[site].applied, strict=True)
        return max([closed.round - applied for closed, applied in rounds])

    def can_contribute(self, site: str) -> bool:
        return self.members[site].follows and self.behind(site) <= RETENTION

    def _contributors(self, now: float) -> list[str]:
        """Lists the sites that can contribute. A site can contribute if it has a valid lease and
        all records that it has not applied are still available.
        """
        return [site for site in self.present(now) if self.can_contribute(site)]

    def lost_quorum(self, now: float) -> str | None:
        """Describes the missing sites if there are too few sites for any round to close. Returns
        None if there are enough sites or if no site is waiting.
        """
        present = self.present(now)
        fewest = self.quorum.fewest(len(present))
        if not present or len(present) >= fewest:
            return None
        if all(map(self.has_ended, range(self.terms.fragments))):
            return None
        missing = []
        for site in sorted(self._known_sites().difference(present)):
            missing.append(f"{site} ({'silent' if site in self.members else 'gone'})")
        return (
            f"rounds need {fewest} sites (quorum), but only these are present:"
            f" {', '.join(present)}. Missing:"
            f" {', '.join(missing) or 'sites that have never contributed'}. Restart the missing"
            f" sites or lower the quorum: sdiloco hub amend --quorum {len(present)}"
        )

    def older_than_sites(self, now: float) -> str | None:
        """Returns advice for the operator if a connected site has applied records that this ledger
        lacks.
        """
        for site in self.present(now):
            for fragment, applied in enumerate(self.members[site].applied):
                closed = self.closed[fragment].round
                if applied > closed:
                    return (
                        f"{site} has applied {applied} rounds of fragment {fragment}, but this"
                        f" ledger has only {closed}, so it is an older copy. Start the hub with the"
                        " run's newest ledger. If that ledger is lost, create a new one from the"
                        " sites' states: sdiloco hub --refound"
                    )
        return None

    def _known_sites(self) -> set[str]:
        """Returns all connected sites and the contributors to recent and open rounds."""
        sites = set(self.members)
        for history in self.history:
            for record in history:
                sites.update(contribution.site for contribution in record.counted)
        for round in self.open.values():
            sites.update(round.contributions)
        return sites

    # Contributions

    def examine(self, contribution: Contribution, incarnation: str) -> Answer:
        """Returns the answer to a contribution without changing the ledger."""
        self._member(contribution.site, incarnation)
        fragment = contribution.fragment
        if not 0 <= fragment < self.terms.fragments:
            raise Refused(
                f"fragment {fragment} does not exist in a run of {self.terms.fragments} fragments"
            )
        closed = self.closed[fragment]
        if contribution.round > closed.round + 1:
            raise Refused(
                f"round {contribution.round} of fragment {fragment} builds on records that this hub"
                f" lacks: its last round is {closed.round}"
            )
        is_late = contribution.round <= closed.round
        if is_late or fragment in self.closing or self.has_ended(fragment):
            return Answer.LATE
        if contribution.previous != closed.key:
            raise Refused(
                f"round {contribution.round} of fragment {fragment} builds on a different history"
                " than the hub's"
            )
        round = self.open.get(fragment)
        is_known = round is not None and contribution.site in round.contributions
        return Answer.KNOWN if is_known else Answer.OPEN

    def contribute(self, contribution: Contribution, incarnation: str, now: float) -> Answer:
        """Adds a durable contribution. If the answer is `OPEN`, the hub sends the call to all
        sites.
        """
        answer = self.examine(contribution, incarnation)
        if answer is Answer.OPEN:
            round = self._take(contribution, now, now)
            # A new launch shows that its site follows even before the next heartbeat.
            member = self.members[contribution.site]
            member.follow(member.follows or contribution.incarnation == incarnation, now)
            self._timings.arrives(contribution, now, round.opened)
        elif answer is Answer.LATE:
            self._timings.arrives_late(contribution, now)
        return answer

    def has_counted(self, contribution: Contribution) -> bool:
        """Returns whether a contribution is counted in a recent record."""
        for record in self.history[contribution.fragment]:
            if record.round == contribution.round:
                return contribution in record.counted
        return False

    def _take(self, contribution: Contribution, now: float, opened: float | None) -> OpenRound:
        round = self.open.setdefault(contribution.fragment, OpenRound(opened))
        round.contributions[contribution.site] = contribution
        round.arrived[contribution.site] = now
        return round

    def skip(self, site: str, incarnation: str, call: Call, now: float) -> None:
        """Registers that a site has declined a call because it has trained too little. The round
        does not wait for that site.
        """
        self._member(site, incarnation)
        round = self.open.get(call.fragment)
        if round and call == self._call(call.fragment):
            round.arrived.setdefault(site, now)

    def calls(self) -> list[Call]:
        """Lists the rounds that sites should launch for. The list contains all open rounds and, if
        an operator has ended the run, the last round of every fragment.
        """
        fragments = list(self.open)
        if self._ending:
            for fragment in range(self.terms.fragments):
                if fragment not in self.open and not self.has_ended(fragment):
                    fragments.append(fragment)
        return [self._call(fragment) for fragment in fragments]

    def _call(self, fragment: int) -> Call:
        number = self.closed[fragment].next_round
        is_last = self._ending or self.terms.is_last(number)
        return Call(fragment, number, is_last and self._is_exact(fragment))

    def _is_exact(self, fragment: int) -> bool:
        """Returns whether the open round contains only exact contributions, as required in [Note:
        the last round].
        """
        if fragment not in self.open:
            return True
        contributions = self.open[fragment].contributions.values()
        return all(launched.exact for launched in contributions if not launched.reason)

    # Rounds

    def due(self, now: float) -> list[Record]:
        """Returns records for the rounds that can close now. A record takes effect when it is
        appended.
        """
        records = list[Record]()
        undecided = list[AgreementError]()
        sites = self._contributors(now)
        for fragment in sorted(self.open.keys() - self.closing.keys()):
            round = self.open[fragment]
            # Present sites that do not count must answer as well. Otherwise, a round might never
            # close.
            is_enough = len(round.contributions) >= self.quorum.fewest(len(sites))
            if not is_enough or not self._closes(fragment, round, sites, now):
                continue
            try:
                majority = self._majority(fragment, round, now)
                if majority:
                    records.append(self._record(fragment, majority, self.seq + len(records)))
            except AgreementError as error:
                undecided.append(error)
        if undecided and not records:
            raise undecided[0]
        return records

    def _record(self, fragment: int, majority: Sequence[Contribution], seq: int) -> Record:
        """Creates the record of a closing round, with a reason for each site whose contribution
        does not count.
        """
        too_long = self._too_long(fragment, majority)
        counted = tuple(launched for launched in majority if launched.site not in too_long)
        if not counted:
            raise AgreementError(
                f"Every contribution to round {self.closed[fragment].next_round} of fragment"
                f" {fragment} is far too long: {', '.join(sorted(too_long))}. The round is waiting"
                " for another site. Evict the sites with wrong values (sdiloco hub evict) and"
                " restart them without their checkpoints."
            )
        counted_sites = {launched.site for launched in counted}
        left_out = self._wrong_buffers(fragment, counted)
        for site, launched in sorted(self.open[fragment].contributions.items()):
            if site in too_long:
                left_out.append(_left_out(site, too_long[site]))
            elif site not in counted_sites:
                left_out.append(LeftOut(site, launched.reason or "other outer parameters"))
        timings = sorted(self._timings.unrecorded.get(fragment, {}).items())
        call = self._call(fragment)
        return Record(
            seq,
            fragment,
            call.round,
            self.closed[fragment].key,
            counted,
            tuple(left_out),
            call.final,
            tuple(timing for _, timing in timings),
        )

    def _closes(self, fragment: int, round: OpenRound, sites: list[str], now: float) -> bool:
        begun = min(round.arrived.values())
        if self._is_first(fragment):
            # The first contributions can only be judged against each other, so all founders must
            # take part.
            present = self.present(now)
            if not {*present} <= {*sites, *round.arrived}:
                return False
            begun = max([begun, *(self.members[site].followed_at for site in present)])
        if self._call(fragment).final:
            # No later round can count a missing site, so the last round waits for all live sites.
            return all(site in round.arrived for site in sites)
        awaited = self.quorum.awaited(tuple(self.history[fragment]), sites)
        if self.quorum.closes(round.arrived, awaited, now):
            return True
        return now >= begun + self.terms.grace

    def _is_first(self, fragment: int) -> bool:
        return self.closed[fragment] == self.base[fragment]

    def _majority(self, fragment: int, round: OpenRound, now: float) -> list[Contribution]:
        """Returns the contributions that were measured against the outer parameters of most sites.
        The list is empty while a tie is undecided.
        """
        camps = dict[int, list[Contribution]]()
        for _, contribution in sorted(round.contributions.items()):
            if not contribution.reason:
                camps.setdefault(contribution.digest, []).append(contribution)
        if not camps:
            if any(not launched.finite for launched in round.contributions.values()):
                raise AgreementError(
                    f"No site has finite values in fragment {fragment}:"
                    f" {', '.join(sorted(round.contributions))}. Resume from an earlier checkpoint,"
                    " and consider gradient clipping or a smaller learning rate."
                )
            return []
        by_size = sorted(camps.values(), key=len, reverse=True)
        if len(by_size) == 1 or len(by_size[0]) > len(by_size[1]):
            return by_size[0]
        # In a tie, the round remains open until another contribution decides it, for at most one
        # lease.
        if round.undecided_since is None:
            round.undecided_since = now
        if now < round.undecided_since + self.terms.lease:
            return []
        sides = []
        for camp in by_size:
            names = ", ".join([launched.site for launched in camp])
            sides.append(f"{names} with digest {camp[0].digest:016x}")
        raise AgreementError(
            f"The sites have different outer parameters of fragment {fragment} after round"
            f" {self.closed[fragment].round}, and no value has a majority: {'; '.join(sides)}."
            " Evict the sites with wrong values (sdiloco hub evict). Those sites will then fetch"
            " the state of another site."
        )

    def _too_long(self, fragment: int, majority: Sequence[Contribution]) -> dict[str, TooLong]:
        """Returns the sites whose outer gradients the guard rejects, with the reasons."""
        if self.terms.guard is None:
            return {}
        return outlying(self._lengths(majority), self._pasts[fragment], self.terms.guard)

    def _lengths(self, contributions: Iterable[Contribution]) -> dict[str, Length]:
        lengths = dict[str, Length]()
        for launched in contributions:
            norm = math.sqrt(launched.norm_squared)
            steps = max(launched.steps, self.terms.least_steps(launched.round))
            lengths[launched.site] = Length(norm, steps, launched.path)
        return lengths

    def _wrong_buffers(self, fragment: int, counted: Iterable[Contribution]) -> list[LeftOut]:
        """Returns the sites whose buffers do not count, with the reasons."""
        sizes = {launched.site: launched.buffers for launched in counted}
        too_large = dict[str, float]()
        if self.terms.guard is not None:
            too_large = with_large_buffers(sizes, self._sizes[fragment])
        left_out = list[LeftOut]()
        for site, size in sizes.items():
            if size >= NOT_FINITE:
                left_out.append(LeftOut(site, "buffers not finite"))
            elif site in too_large:
                left_out.append(LeftOut(site, "buffers too large", _rounded(too_large[site])))
        return left_out

    def append(self, record: Record) -> None:
        closed = self.closed[record.fragment]
        if (record.seq, record.round, record.previous) != (self.seq, closed.round + 1, closed.key):
            raise AgreementError(
                f"Record {record.seq} of round {record.round} of fragment {record.fragment} does"
                f" not follow {self.seq} records and round {closed.round}, so the ledger is"
                " damaged. Restore the ledger or roll back."
            )
        self.seq += 1
        self.closed[record.fragment] = record.position
        self.history[record.fragment].append(record)
        by_guard = [left_out.site for left_out in record.left_out if left_out.is_by_guard]
        self._pasts[record.fragment] = remembered(
            self._lengths(record.counted), by_guard, self._pasts[record.fragment]
        )
        sizes = {launched.site: launched.buffers for launched in record.counted}
        self._sizes[record.fragment] = remembered_sizes(
            sizes, record.without_buffers, self._sizes[record.fragment]
        )
        self.closing.pop(record.fragment, None)
        round = self.open.pop(record.fragment, None)
        self._timings.closes(record, round.opened if round else None)
        self.snapshots.check(record)

    def next_due(self, now: float) -> float:
        """Returns the time at which to call `due` again if nothing happens earlier. The result is
        the time at which the next grace period, lease or tie ends.
        """
        deadlines = [member.until for member in self.members.values()]
        for fragment, round in self.open.items():
            begun = [*round.arrived.values()]
            if self._is_first(fragment):
                followed = [member.followed_at for member in self.members.values()]
                begun.append(max([min(begun), *followed]))
            deadlines += [time + self.terms.grace for time in begun]
            if round.undecided_since:
                deadlines.append(round.undecided_since + self.terms.lease)
        return min((time for time in deadlines if time > now), default=now + self.terms.lease)

    # The end

    def end(self) -> None:
        self._ending = True

    def amend(self, terms: Terms, quorum: Quorum) -> None:
        """Replaces the terms of the run. An open round that would have been the last round now
        closes like any other round.
        """
        self.terms = terms
        self.quorum = quorum
        self.closing.clear()

    def has_ended(self, fragment: int) -> bool:
        history = self.history[fragment]
        return bool(history) and history[-1].final

    # States

    def source(
        self,
        site: str,
        now: float,
        without: Collection[str] = (),
        beyond: Collection[RoundId] = (),
    ) -> str | StateHeader | None:
        """Returns the name of a donor whose state includes the given rounds, or a snapshot if there
        is no donor.
        """
        donors = []
        for donor in self._contributors(now):
            is_other = donor != site and donor not in without
            if is_other and self.members[donor].connected and self.has_applied(donor, beyond):
                donors.append(donor)
        if not donors:
            best = self.snapshots.best
            has_rounds = best is not None and all(
                best.applied[lacked.fragment].round >= lacked.round for lacked in beyond
            )
            return best if has_rounds else None
        return max(donors, key=lambda name: (-self.behind(name), sum(self.members[name].applied)))

    def has_applied(self, site: str, rounds: Iterable[RoundId]) -> bool:
        """Returns whether a site is a member and has applied the given rounds."""
        member = self.members.get(site)
        return member is not None and all(
            member.applied[fragment] >= round for fragment, round in rounds
        )

    @property
    def kept_from(self) -> tuple[int, ...]:
        """The first round of each fragment whose payloads are kept. The hub keeps the payloads of
        the most recent rounds and of all rounds since the snapshot.
        """
        snapshot = self.snapshots.best
        in_snapshot = snapshot.applied if snapshot else self.closed
        rounds = []
        for closed, saved, base in zip(self.closed, in_snapshot, self.base, strict=True):
            rounds.append(max(base.round, min(closed.round - RETENTION, saved.round)) + 1)
        return tuple(rounds)

    def fetched_from(self, now: float) -> tuple[int, ...]:
        """Returns the first round of each fragment whose payloads are kept or still being fetched.
        A site that follows the run fetches the rounds that it has not applied. A site that falls
        too far behind needs a state instead.
        """
        rounds = list(self.kept_from)
        for site in self.present(now):
            member = self.members[site]
            if not member.follows:
                continue
            for fragment, applied in enumerate(member.applied):
                earliest = max(applied, self.closed[fragment].round - 2 * RETENTION)
                rounds[fragment] = min(rounds[fragment], earliest + 1)
        return tuple(rounds)


class Snapshots:
    """The snapshots at the hub, with the rules for trusting snapshots and requesting new ones."""

    def __init__(self, headers: Iterable[StateHeader] = ()) -> None:
        # The states, oldest first, each with the fragments that a record has verified.
        self._states: list[tuple[StateHeader, set[int]]] = [(header, set()) for header in headers]

    @property
    def headers(self) -> list[StateHeader]:
        return [header for header, _ in self._states]

    @property
    def best(self) -> StateHeader | None:
        """The state from which to start if no site has a state."""
        return self._states[0][0] if self._states else None

    def add(self, header: StateHeader) -> None:
        self._states.append((header, set()))

    def check(self, record: Record) -> None:
        """Compares the states with a record and drops those that are wrong or no longer needed."""
        sound = list[tuple[StateHeader, set[int]]]()
        newest_verified = 0
        for header, verified in self._states:
            position = header.applied[record.fragment]
            if position.round == record.round - 1:
                digest = header.digests[record.fragment]
                if (position.key, digest) != (record.previous, record.digest):
                    continue
                verified.add(record.fragment)
            if len(verified) == len(header.applied):
                newest_verified = len(sound)
            sound.append((header, verified))
        self._states = sound[newest_verified:]

    def drop(self, header: StateHeader) -> None:
        """Drops a state that was damaged at the hub."""
        self._states = [state for state in self._states if state[0] != header]

    def is_due(self, rounds: Iterable[int], interval: int | None = None) -> bool:
        if not self._states:
            return True
        if interval is None:
            interval = SNAPSHOT_EVERY
        newest = self._states[-1][0].applied
        return any(
            closed - position.round >= interval
            for closed, position in zip(rounds, newest, strict=True)
        )


class Timings:
    """Measurements of how late contributions arrive and how long inner steps take at each site."""

    def __init__(self) -> None:
        # By fragment: the last closed round, and when it was opened.
        self._closed: dict[int, tuple[int, float | None]] = {}
        # By fragment and site: the last round to which the site contributed, and when.
        self._arrived: dict[tuple[int, str], tuple[int, float]] = {}
        # By fragment and site: the incarnation that was counted last, and when its contribution
        # arrived.
        self._counted: dict[tuple[int, str], tuple[str, float]] = {}
        # By fragment: the timings that the next record will contain.
        self.unrecorded: dict[int, dict[tuple[str, int], Timing]] = {}

    def arrives(self, contribution: Contribution, now: float, opened: float | None) -> None:
        fragment = contribution.fragment
        site = contribution.site
        self._arrived[fragment, site] = contribution.round, now
        if opened is None:
            return
        # A contribution contains the inner steps since the site was last counted.
        incarnation, counted_at = self._counted.get((fragment, site), ("", now))
        step_time = None
        if incarnation == contribution.incarnation and contribution.steps:
            step_time = _rounded((now - counted_at) / contribution.steps)
        timing = Timing(site, contribution.round, round(now - opened, 3), step_time)
        self.unrecorded.setdefault(fragment, {})[site, contribution.round] = timing

    def arrives_late(self, contribution: Contribution, now: float) -> None:
        """Stores the timing of a late contribution once, provided that its round was the last to
        close.
        """
        fragment = contribution.fragment
        closed, opened = self._closed.get(fragment, (0, None))
        arrived, _ = self._arrived.get((fragment, contribution.site), (0, 0.0))
        if contribution.round == closed and arrived < closed:
            self.arrives(contribution, now, opened)

    def closes(self, record: Record, opened: float | None) -> None:
        """Marks the timings in a record as recorded."""
        fragment = record.fragment
        self._closed[fragment] = record.round, opened
        self.unrecorded.pop(fragment, None)
        for contribution in record.counted:
            site = contribution.site
            arrived, time = self._arrived.get((fragment, site), (0, 0.0))
            if arrived == record.round:
                self._counted[fragment, site] = contribution.incarnation, time


def _left_out(site: str, too_long: TooLong) -> LeftOut:
    times = _rounded(too_long.times)
    if too_long.is_beside_others:
        return LeftOut(site, "too long beside the others", times)
    return LeftOut(site, "too long", times)


def _rounded(number: float) -> float:
    """Rounds a number to four significant digits."""
    return float(f"{number:.4g}")
