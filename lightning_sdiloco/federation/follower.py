"""The follower, which applies the rules on a site. The follower decides when the site launches and
lands fragments, and what happens to the site's own training.

The follower does not access tensors. The engine, which owns the follower, provides the digests of
the outer parameters and applies each `MergeAction` to the values.

[Note: the weight of a site] Every inner step adds to the training that a site *holds* for each
fragment. Held training consists of steps and samples, and the number of samples is the weight. A
launch moves all held training into the flight. A landing determines what happens to the flight and
to the training since the launch, as described in `MergeAction`. Every sample is therefore in
exactly one place: held, in flight, counted in one record, or dropped for a reason given by the
landing. No sample counts twice, and no sample that was sent is lost.

[Note: what an earlier incarnation has launched] The checkpoint of an incarnation may contain
training that an earlier, killed incarnation has already launched, along with later training. If
that launch was counted, the new incarnation replaces its local values with the outer values before
its first step. A launch *stands* if its round is still open. If a launch stands, the new
incarnation restarts from the outer values before its first step. All training that the site holds
after the restart is *apart* from the standing launch. The standing launch therefore lands like a
contribution from another site. The local parameters move by the same amount as the outer
parameters, and all training since the restart is kept. The checkpoint stores the standing launch so
that no later incarnation restarts again. The hub accepts no second launch from the site for that
round, so the site does not launch again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import get_type_hints

from lightning_sdiloco.algorithm.guard import AGAINST, JUDGED, Direction
from lightning_sdiloco.errors import AgreementError, ExchangeError, Refused
from lightning_sdiloco.federation.codec import Digest, Json, RoundNumber, plain, read
from lightning_sdiloco.federation.messages import (
    Call,
    Contribution,
    Heartbeat,
    Hello,
    LaunchId,
    LeftOut,
    Position,
    Record,
    RoundId,
    StateHeader,
    StepCounts,
    Welcome,
)
from lightning_sdiloco.federation.run_config import RETENTION, Terms


class MergeAction(Enum):
    MIX = "mix"
    DROP = "drop"
    CARRY = "carry"
    TAKE = "take"
    REFUSE = "refuse"

    @property
    def mixes(self) -> bool:
        """True if the local and outer parameters are mixed according to the run's settings."""
        return self in (MergeAction.MIX, MergeAction.DROP)


@dataclass
class InFlight:
    """A flight with its contribution, the inner step of its launch, and the number of inner steps
    that it contains.
    """

    own: Contribution
    launched_at: int
    steps: int
    waits_since: float | None = field(default=None, init=False)


@dataclass
class Progress:
    """A site's progress on one fragment.

    Attributes:
        fragment: The index of the fragment.
        applied: The position of the last round that has landed.
        launched_at: The inner step of the last launch.
        digest: The digest of the outer parameters, or None if the site does not have correct outer
            parameters.
        steps: The number of inner steps that the site holds, as defined in [Note: the weight of a
            site].
        samples: The number of samples that the site holds.
        path: The sum of the learning rates of these inner steps, or 0 if it is unknown.
        flight: The flight whose round has not landed.
        call: The last round that the hub has called.
        skipped: The last round whose call the site has declined.
        ended: True if the last round of the run has landed.
        records: The records of rounds that have not landed, by round.
        lacking: The rounds of these records whose payloads the hub has lost.
        closed: The last round known to be closed.
        kept_from: The first round whose payloads the hub keeps.
        refused: The key of the last record that was measured against different outer parameters.
        late: The action for a contribution that arrives too late.
        dropped: True if the last contribution was dropped because it was late.
        too_long: One bit for each recent contribution that either counted or was left out by the
            guard. The lowest bit represents the latest contribution, and a value of 1 means left
            out.
        is_fresh: True if the held training contains nothing that this site has already launched.
        lost_steps: The number of inner steps in launches dropped since the start of this
            incarnation.
        apart: The launch in an open round that is apart from the held training.
        standing: This site's launch in the hub's open round.
    """

    fragment: int
    applied: Position
    launched_at: int
    digest: Digest | None = None
    steps: int = 0
    samples: int = 0
    path: float = 0.0
    flight: InFlight | None = None
    call: Call | None = None
    skipped: int = 0
    ended: bool = False
    records: dict[int, Record] = field(default_factory=dict)
    lacking: set[int] = field(default_factory=set)
    closed: int = 0
    kept_from: int = 1
    refused: str = ""
    late: MergeAction = MergeAction.CARRY
    dropped: bool = False
    too_long: int = 0
    is_fresh: bool = False
    lost_steps: int = 0
    apart: LaunchId | None = None
    standing: LaunchId | None = None

    @property
    def next_round(self) -> RoundNumber:
        return RoundNumber(self.applied.round + 1)

    @property
    def has_joined(self) -> bool:
        """True if all closed rounds have landed, except for the round of a flight that is not yet
        due and any later rounds.
        """
        if self.flight is None or self.is_overtaken:
            return self.applied.round >= self.closed
        return all(round in self.records for round in range(self.next_round, self.closed + 1))

    @property
    def lag(self) -> int:
        """The number of closed rounds that have not landed."""
        return self.closed - self.applied.round

    @property
    def wants_state(self) -> bool:
        """True if the state is wrong or outdated and cannot soon be updated from records."""
        if self.digest is None or self.lag > RETENTION:
            return True
        return self.lag > 0 and (not self.can_fetch or self.lacks_payloads)

    @property
    def can_fetch(self) -> bool:
        """True if the hub still keeps the payloads of all rounds that have not landed here."""
        return self.lag <= 0 or self.next_round >= self.kept_from

    @property
    def lacks_payloads(self) -> bool:
        """True if the hub has lost payloads of the next round to land."""
        return self.digest is not None and self.next_round in self.lacking

    @property
    def called(self) -> Call | None:
        return self.call if self.call and self.call.round == self.next_round else None

    def is_last(self, terms: Terms) -> bool:
        """Returns whether the next round to land is the last, according to the terms or a call."""
        return terms.is_last(self.next_round) or (self.called is not None and self.called.final)

    @property
    def stands(self) -> bool:
        """True if the next round to land already has a launch from this site and accepts no second
        launch.
        """
        return self.standing is not None and self.standing.round == self.next_round

    @property
    def can_launch(self) -> bool:
        return not (self.flight or self.ended or self.stands)

    @property
    def is_overtaken(self) -> bool:
        """True if a record counts a launch that an earlier incarnation made after or instead of the
        flight.
        """
        if self.flight is None:
            return False
        launched = self.flight.own
        for record in self.records.values():
            if record.round >= launched.round:
                counted = record.of(launched.site)
                if counted and counted != launched and not self._is_apart(counted):
                    return True
        return False

    def _is_apart(self, counted: Contribution) -> bool:
        """Returns whether the held training contains no part of a counted launch."""
        return self.is_fresh or counted.launch == self.apart

    def meet(self, standing: LaunchId | None) -> bool:
        """Stores this site's launch in the hub's open round. Returns whether the site restarts from
        the outer values.
        """
        self.standing = standing
        in_flight = self.flight.own.launch if self.flight else None
        if standing is None or standing in (in_flight, self.apart):
            return False
        self.apart = standing
        if self.digest is None:
            return False
        self.begin_again()
        return True

    def begin_again(self) -> None:
        """Resets the progress when the local parameters are replaced by the outer parameters."""
        self.flight = None
        self.is_fresh = True
        self.drop()

    def drop(self) -> None:
        """Drops the held training."""
        self.steps = 0
        self.samples = 0
        self.path = 0.0

    def forget(self) -> None:
        """Discards the digest and all training, because the outer parameters are wrong."""
        self.digest = None
        self.flight = None
        self.drop()

    def found_again(self, closed: Position, start: Position) -> None:
        """Continues in a run that has been refounded at some round."""
        # A minority of sites may have applied rounds that do not exist in the refounded run. These
        # sites take the state of another site.
        if self.applied.round >= closed.round and self.applied != closed:
            self.forget()
            self.applied = start

    def meet_hub(self, closed: Position, kept_from: int) -> None:
        """Updates the progress with the hub's position. The hub resends its call and all records
        that have not landed. Calls and records received earlier may not exist in the hub's run if
        they came from another hub or were rolled back.
        """
        self.call = None
        self.skipped = 0
        last_record = self.records.get(closed.round)
        if last_record is None or last_record.position != closed:
            self.records = {}
        for dropped_round in [round for round in self.records if round > closed.round]:
            del self.records[dropped_round]
        self.lacking = set()
        self.closed = max(self.applied.round, closed.round)
        self.kept_from = kept_from

    # Launching

    def launches(self, step: int, terms: Terms, finishing: bool) -> bool:
        # If the round is already closed, a launch would be late.
        if not self.can_launch or self.lag > 0:
            return False
        called = self.called
        if called and called.final:
            return True
        if finishing:
            return self.steps > 0
        if self.steps < terms.least_steps(self.next_round):
            return False
        if called is not None and self.skipped != called.round:
            return True
        return step - self.launched_at >= terms.steps_before(self.fragment, self.next_round)

    # Landing

    def learn(self, record: Record, has_payloads: bool) -> None:
        self.closed = max(self.closed, record.round)
        if record.round < self.applied.round or record.position == self.applied:
            return
        if not self._continues(record):
            raise self.parted(record.round)
        self.records[record.round] = record
        if has_payloads:
            self.lacking.discard(record.round)
        elif self.digest is not None and self.can_fetch:
            self.lacking.add(record.round)

    def _continues(self, record: Record) -> bool:
        """Returns whether a record fits in this site's chain of records."""
        same_round = self.records.get(record.round, record)
        before = self.records.get(record.round - 1)
        after = self.records.get(record.round + 1)
        if record.round == self.applied.round or same_round.key != record.key:
            return False
        if after and after.previous != record.key:
            return False
        if record.round == self.next_round:
            return record.previous == self.applied.key
        return before is None or record.previous == before.key

    def parted(self, round: RoundNumber) -> AgreementError:
        """Returns the error for a round whose record at the hub differs from this site's record."""
        return AgreementError(
            f"Round {round} of fragment {self.fragment} differs between the hub and this site, so"
            " their histories have diverged. Resume this site from an earlier checkpoint or restore"
            " the hub's ledger."
        )

    def landing(self, record: Record, site: str) -> MergeAction:
        """Returns the effect of a record on the site's flight and held training."""
        flight = self.flight
        if flight and flight.own.round != record.round:
            flight = None
        if record.final or (flight and not flight.own.finite):
            return MergeAction.TAKE
        counted = record.of(site)
        if counted is None:
            return self._landing_uncounted(flight, record.without(site))
        if flight and flight.own == counted:
            return MergeAction.MIX
        # Otherwise, the local parameters contain training that was counted for an earlier
        # incarnation and cannot be separated from the rest.
        holds = self.steps > 0 or self.flight is not None
        return MergeAction.CARRY if holds and self._is_apart(counted) else MergeAction.TAKE

    def _landing_uncounted(self, flight: InFlight | None, left_out: LeftOut | None) -> MergeAction:
        if flight and left_out and left_out.is_by_guard:
            return MergeAction.TAKE
        return self.late if flight and not self.dropped else MergeAction.CARRY

    def land(self, landing: MergeAction, applied: Position, digest: int) -> None:
        if self.flight and self.flight.own.round <= applied.round:
            if landing is MergeAction.CARRY:
                self.steps += self.flight.steps
                self.samples += self.flight.own.weight
                self.path += self.flight.own.path
            if landing is MergeAction.DROP:
                self.lost_steps += self.flight.steps
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
        self.records = {
            round: later for round, later in self.records.items() if round > applied.round
        }
        self.lacking = {round for round in self.lacking if round > applied.round}

    def passed(self, round: RoundNumber, site: str) -> MergeAction:
        """Returns the combined effect of all records up to the given round that have not yet
        landed.
        """
        actions = set()
        for number in range(self.next_round, round + 1):
            record = self.records.get(number)
            if record is None:
                # An earlier incarnation may have been counted, and its training must not count
                # twice.
                return MergeAction.TAKE
            actions.add(self.landing(record, site))
        strongest_first = (
            MergeAction.TAKE,
            MergeAction.MIX,
            MergeAction.DROP,
            MergeAction.CARRY,
        )
        return next(action for action in strongest_first if action in actions)


_SAVED = (
    "applied",
    "launched_at",
    "digest",
    "steps",
    "samples",
    "path",
    "ended",
    "dropped",
    "too_long",
    "apart",
    "flight",
)

# A site will not recover if the guard has left out this many of its last contributions.
_MOST_LEFT_OUT = 8


class Follower:
    """Follows a run's records on behalf of one site. Times are in seconds on a monotonic clock."""

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
        self._start = Position.start(run_config)
        self._patience = patience
        self._late = late
        self._alone_since: float | None = None
        self._finishing = False
        # The inner steps of this incarnation.
        self._trained_steps = 0
        # The inner learning rate at the last launch, if the owner has provided it.
        self.inner_lr: float | None = None
        # The inner steps that the owner has trained and plans.
        self.step_counts = StepCounts()
        # The direction of the last counted contribution in percent, and a bit for each recent
        # contribution. The bit is 1 if the contribution pointed against the other sites.
        self._cosine = 0
        self._directions = 0
        offsets = [terms.schedule.launch_of(fragment, 0) for fragment in range(terms.fragments)]
        self.fragments = [
            Progress(fragment, self._start, offset, late=late)
            for fragment, offset in enumerate(offsets)
        ]

    # The hub

    def found(self, digests: Sequence[int]) -> None:
        """Starts at round 0 with this site's outer parameters. Only the founder calls this method,
        and only once.
        """
        for progress, digest in zip(self.fragments, digests, strict=True):
            progress.digest = digest

    def hello(self, run: str) -> Hello:
        """Returns the site's hello. The hub answers with all records that the site has not
        applied.
        """
        applied = tuple(progress.applied for progress in self.fragments)
        return Hello(run, self.site, self.incarnation, self._run_config, applied)

    def welcome(self, welcome: Welcome) -> list[int]:
        """Updates the progress with the hub's position. Returns the fragments whose local
        parameters must be replaced by the outer parameters.
        """
        if welcome.founded_again:
            for progress, closed in zip(self.fragments, welcome.closed, strict=True):
                progress.found_again(closed, self._start)
        for progress, closed in zip(self.fragments, welcome.closed, strict=True):
            if progress.digest is not None:
                self._require_same_history(progress, closed)
        for progress, closed, kept_from in zip(
            self.fragments, welcome.closed, welcome.kept, strict=True
        ):
            progress.meet_hub(closed, kept_from)
        self.reachable = True
        self._alone_since = None
        self.terms = welcome.terms or self.terms
        incarnations = dict(welcome.standing)
        beginning_again = []
        for progress, closed in zip(self.fragments, welcome.closed, strict=True):
            standing = None
            if progress.fragment in incarnations:
                standing = LaunchId(closed.next_round, incarnations[progress.fragment])
            if progress.meet(standing):
                beginning_again.append(progress.fragment)
        return beginning_again

    def _require_same_history(self, progress: Progress, closed: Position) -> None:
        """Raises AgreementError if the hub's records differ from this site's records, or if the hub
        has fewer records than this site has applied.
        """
        if closed.round < progress.applied.round:
            raise AgreementError(
                f"The hub has {closed.round} rounds of fragment {progress.fragment}, but"
                f" {self.site} has applied {progress.applied.round}. After `sdiloco hub rollback`,"
                " restart the site from an earlier checkpoint or without a checkpoint. If there was"
                " no rollback, the hub has lost records or serves a different run. In that case,"
                " restore its ledger or refound the run from the sites: sdiloco hub --refound."
            )
        if closed.round == progress.applied.round and closed != progress.applied:
            raise progress.parted(closed.round)

    def lose(self, now: float, why: str = "") -> None:
        """Handles a failed attempt to reach the hub. Training continues until the hub has been
        unreachable for ``patience`` seconds.
        """
        self.reachable = False
        if self._alone_since is None:
            self._alone_since = now
        seconds = now - self._alone_since
        if seconds > self._patience:
            raise ExchangeError(
                f"{self.site} has not reached the hub for {seconds:.0f} s, which exceeds"
                f" patience={self._patience:.0f} s. The site's training is saved in its checkpoint."
                f" Restart the site when the hub is back. {why}".rstrip()
            )

    @property
    def lag(self) -> int:
        """The number of rounds by which this site's slowest fragment is behind."""
        return max([progress.lag for progress in self.fragments])

    @property
    def wants_state(self) -> bool:
        """True if the site must request a state because at least one fragment has no usable
        state.
        """
        return any(progress.wants_state for progress in self.fragments)

    @property
    def lacked_rounds(self) -> list[RoundId]:
        """The next rounds to land for which the hub has lost payloads."""
        return [
            RoundId(progress.fragment, progress.next_round)
            for progress in self.fragments
            if progress.lacks_payloads
        ]

    @property
    def record_keys(self) -> set[str]:
        """The keys of the records that have not landed."""
        return {record.key for progress in self.fragments for record in progress.records.values()}

    @property
    def follows(self) -> bool:
        """True if this site can contribute and provide a state to other sites."""
        return not self.wants_state

    def heartbeat(self) -> Heartbeat:
        applied = tuple(progress.applied.round for progress in self.fragments)
        lost_steps = sum(progress.lost_steps for progress in self.fragments)
        trained_steps = self._trained_steps * len(self.fragments)
        return Heartbeat(
            self.site,
            self.incarnation,
            self.follows,
            applied,
            trained_steps,
            lost_steps,
            self.inner_lr,
            self._cosine,
            self.against,
        )

    def hear(self, call: Call) -> None:
        self.fragments[call.fragment].call = call

    def learn(self, record: Record, has_payloads: bool = True) -> None:
        """Adds a record that arrived with or without its payloads."""
        self.fragments[record.fragment].learn(record, has_payloads)

    # Training

    def trained(self, samples: int, steps: int = 1, rate: float = 0.0) -> None:
        """Counts inner steps with their samples and learning rate. A joining site counts all
        earlier steps in one call.
        """
        self._trained_steps += steps
        for progress in self.fragments:
            progress.steps += steps
            progress.samples += samples
            progress.path += steps * rate

    def finish(self) -> None:
        self._finishing = True

    @property
    def finished(self) -> bool:
        """True if the site may leave because the run is over, or because the site is finishing and
        all of its training has been counted.
        """
        unsettled = [progress for progress in self.fragments if not progress.ended]
        if not unsettled:
            return True
        return self._finishing and not any(
            progress.flight or progress.steps for progress in unsettled
        )

    # Launching

    def launches(self, step: int) -> list[int]:
        due = []
        for progress in self.fragments:
            if progress.launches(step, self.terms, self._finishing):
                due.append(progress.fragment)
        return due if due and self.follows else []

    def skips(self) -> list[Call]:
        """Returns the calls that this site declines because it has trained too little. Each call is
        returned only once.
        """
        if self._finishing:
            return []
        calls = []
        for progress in self.fragments:
            called = progress.called
            if called is None or called.final or progress.skipped == called.round:
                continue
            if progress.can_launch and progress.steps < self.terms.least_steps(called.round):
                progress.skipped = called.round
                calls.append(called)
        return calls

    def begin(self, fragment: int, step: int) -> Contribution:
        """Launches a fragment. The contribution is encoded while training continues and is finished
        by `complete`.
        """
        progress = self.fragments[fragment]
        assert progress.digest is not None, "a fragment without outer parameters cannot launch"
        begun = Contribution(
            fragment,
            progress.next_round,
            self.site,
            self.incarnation,
            progress.applied.key,
            progress.samples,
            progress.digest,
            payloads=(),
            steps=progress.steps,
            exact=progress.is_last(self.terms),
            path=progress.path,
        )
        progress.flight = InFlight(begun, step, progress.steps)
        progress.launched_at = step
        progress.drop()
        return begun

    def complete(self, encoded: Contribution) -> Contribution | None:
        """Adds the encoded contribution with its payloads to the flight. Returns the contribution
        if it can be sent.
        """
        progress = self.fragments[encoded.fragment]
        flight = progress.flight
        if flight is None or flight.own.payloads or flight.own.round != encoded.round:
            return None
        if encoded.digest != progress.digest:
            progress.forget()
            return None
        flight.own = encoded if encoded.finite else replace(encoded, norm_squared=0.0)
        return flight.own

    def outstanding(self) -> list[Contribution]:
        """Returns the contributions to resend after a hello. The contributions belong to flights
        whose round is not known to be closed or whose payloads the hub has lost.
        """
        contributions = []
        for progress in self.fragments:
            flight = progress.flight
            if flight is None or not flight.own.payloads:
                continue
            if flight.own.round > progress.closed or progress.lacks_payloads:
                contributions.append(flight.own)
        return contributions

    # Landing

    def due(self, step: int) -> list[Record]:
        due = []
        for progress in self.fragments:
            record = progress.records.get(progress.next_round)
            if record is None or progress.digest is None:
                continue
            if not self._overlaps(progress, step):
                due.append(record)
        return due

    def _overlaps(self, progress: Progress, step: int) -> bool:
        """Returns whether a flight still overlaps training."""
        if progress.flight is None or progress.is_overtaken:
            return False
        # A site that no longer trains has nothing to overlap.
        overlap = 0
        if not self._finishing:
            overlap = self.terms.schedule.overlap_of_round(progress.next_round)
        return step < progress.flight.launched_at + overlap

    def waits(self, step: int, now: float) -> float:
        """Returns how many seconds training must still wait for a landing. The result is 0 while
        the hub is unreachable.
        """
        longest_wait = 0.0
        if not self.reachable:
            return longest_wait
        # All flights are checked, so that all of their waits begin together.
        for progress in self.fragments:
            flight = progress.flight
            if flight is None:
                continue
            steps = self.terms.steps_before(progress.fragment, RoundNumber(flight.own.round + 1))
            if step >= flight.launched_at + steps - 1:
                if flight.waits_since is None:
                    flight.waits_since = now
                wait = flight.waits_since + self.terms.longest_wait - now
                longest_wait = max(longest_wait, wait)
        return longest_wait

    def land(self, record: Record, before: int, after: int) -> MergeAction:
        """Lands a record. Pass the digests of this site's outer parameters before and after
        applying the record.
        """
        progress = self.fragments[record.fragment]
        if before != record.digest:
            progress.forget()
            if progress.refused == record.key:
                raise AgreementError(
                    f"Round {record.round} of fragment {record.fragment} was measured against outer"
                    " parameters that cannot be restored. This site computed different parameters,"
                    " even from another site's state. Either this site's arithmetic differs from"
                    " that of the other sites, or the sites that had these parameters are gone."
                    " Roll the run back to an earlier round (sdiloco hub rollback)."
                )
            progress.refused = record.key
            return MergeAction.REFUSE
        action = progress.landing(record, self.site)
        progress.land(action, record.position, after)
        self._judge(progress, record)
        return action

    def _judge(self, progress: Progress, record: Record) -> None:
        """Counts how often the guard has left this site out and raises AgreementError if the limit
        is reached.
        """
        left_out = record.without(self.site)
        is_out = left_out is not None and left_out.is_by_guard
        if is_out or record.of(self.site) is not None:
            progress.too_long = (progress.too_long << 1 | is_out) % (1 << JUDGED)
        count = progress.too_long.bit_count()
        if is_out and count >= _MOST_LEFT_OUT:
            raise AgreementError(
                f"{count} of the last {JUDGED} contributions of {self.site} to fragment"
                f" {record.fragment} were left out, most recently because {record.why(self.site)}."
                " This site leaves the run, and all other sites continue. Check the site's data,"
                " learning rate and machine. If restarted without a checkpoint, the site starts"
                " from another site's state."
            )

    @property
    def against(self) -> int:
        """The number of recent contributions that pointed against the mean of the other sites."""
        return self._directions.bit_count()

    def judge_direction(self, direction: Direction) -> bool:
        """Stores the direction of a contribution. Returns whether this site's contributions have
        just started to point against the mean of the other sites.
        """
        pointed_against = self.against >= AGAINST
        self._cosine = round(100 * direction.cosine)
        self._directions = (self._directions << 1 | direction.is_against) % (1 << JUDGED)
        return self.against >= AGAINST and not pointed_against

    # States

    def header(self) -> StateHeader:
        """Returns the header of the state that this site provides as a donor. Call this method only
        between landings.
        """
        digests = tuple(
            progress.digest for progress in self.fragments if progress.digest is not None
        )
        assert len(digests) == len(self.fragments), "a site that needs a state cannot give one"
        return StateHeader(tuple(progress.applied for progress in self.fragments), digests)

    def adopt(self, state: StateHeader, digests: Sequence[int]) -> dict[int, MergeAction]:
        """Adopts the state of a donor or a snapshot. The site then sends another hello to receive
        all later records.
        """
        for progress, position, expected, digest in zip(
            self.fragments, state.applied, state.digests, digests, strict=True
        ):
            _require_sound(progress, position, expected, digest)
        actions = {}
        for progress, position, digest in zip(self.fragments, state.applied, digests, strict=True):
            if progress.digest is None:
                # Training against wrong or missing values cannot be carried.
                action = MergeAction.TAKE
                progress.begin_again()
            elif position.round > progress.applied.round:
                action = progress.passed(position.round, self.site)
            else:
                continue
            progress.land(action, position, digest)
            actions[progress.fragment] = action
        return actions

    # Checkpoints

    def state_dict(self) -> dict[str, Json]:
        return {"fragments": [_saved(progress) for progress in self.fragments]}

    def load_state_dict(self, state: Mapping[str, Json], digests: Sequence[int]) -> None:
        """Restores the state that `state_dict` returned. This incarnation continues where the saved
        incarnation stopped.
        """
        hints = get_type_hints(Progress, include_extras=True)
        loaded = list[Progress]()
        for fragment, (saved, digest) in enumerate(zip(state["fragments"], digests, strict=True)):
            # Values that earlier versions did not save keep their defaults.
            names = [name for name in _SAVED if name in saved]
            fields = {name: read(hints[name], saved[name], name) for name in names}
            closed = fields["applied"].round
            progress = Progress(fragment, late=self._late, closed=closed, **fields)
            loaded.append(progress)
            if progress.digest not in (digest, None):
                raise ValueError(
                    f"The checkpoint is damaged: the outer parameters of fragment {fragment} differ"
                    " from the saved ones. Resume from a different checkpoint, or start without one"
                    " to fetch the state of another site."
                )
        self.fragments = loaded


def _saved(progress: Progress) -> dict[str, Json]:
    return {name: plain(getattr(progress, name)) for name in _SAVED}


def _require_sound(progress: Progress, position: Position, expected: int, digest: int) -> None:
    """Raises Refused if a state is damaged, is too old, or differs from the records."""
    fragment = progress.fragment
    if expected != digest:
        raise Refused(
            f"the state is damaged: fragment {fragment} has the digest {digest:x} instead of"
            f" {expected:x}"
        )
    if position.round + 1 < progress.kept_from:
        raise Refused(
            f"the state is at round {position.round} of fragment {fragment}, and later records are"
            " no longer available"
        )
    record = progress.records.get(position.round)
    after = progress.records.get(position.round + 1)
    known_position = position
    if progress.applied.round == position.round:
        known_position = progress.applied
    elif record:
        known_position = record.position
    if position != known_position or (after and after.previous != position.key):
        raise Refused(f"the state has a different history of fragment {fragment} than the records")
    if after and after.digest != digest:
        raise Refused(
            f"the state differs from the other sites in fragment {fragment} after round"
            f" {position.round}"
        )
