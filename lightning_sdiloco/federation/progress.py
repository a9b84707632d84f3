"""What a site remembers of a fragment: how far it is, what it holds, what is in flight.

[Note: the weight of a site] Every inner step adds to what a site *holds* of every fragment: steps, and samples as the
weight. A launch puts all of it into the flight. A landing decides what becomes of the flight, and of what was trained
since; see `Landing`. So every sample is in exactly one place: held, in flight, counted in one record, or dropped for a
reason that the landing names. None counts twice, and none is lost that was sent.

[Note: what an earlier life has launched] A life that was killed may have launched what the checkpoint of the next one
holds, and more. Where that has been counted, it is taken before the first step. Where it *stands* in a round that is
open, the next life begins again from the outer values, before its first step too. From then on what it holds is
*apart* from that launch, which therefore lands like what others have contributed: the local parameters move by as much
as the outer ones, and all that was trained since is kept. A checkpoint says so as well, so that one more life does not
begin again. No other launch is taken for that round, so none is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.federation.messages import Call
from lightning_sdiloco.federation.records import Contribution, Launch, Position, Record, contribution
from lightning_sdiloco.federation.terms import Terms


class Landing(Enum):
    """What a landing does to the local parameters and to what is held."""

    MIX = "mix"
    DROP = "drop"
    CARRY = "carry"
    TAKE = "take"
    REFUSE = "refuse"


@dataclass
class Flight:
    """Holds what a site has launched and not landed."""

    own: Contribution
    launched_at: int
    steps: int
    waits_since: float | None = None

    def waits(self, step: int, now: float, terms: Terms) -> float:
        """Returns for how many seconds more training waits for it; see `Follower.waits`."""
        if step < self.launched_at + terms.sync_every - 1:
            return 0.0
        if self.waits_since is None:
            self.waits_since = now
        return max(0.0, self.waits_since + terms.longest_wait - now)


@dataclass
class Progress:
    """Holds all that a site remembers of a fragment."""

    fragment: int
    applied: Position
    launched_at: int
    digest: int | None = None
    steps: int = 0
    samples: int = 0
    flight: Flight | None = None
    call: Call | None = None
    skipped: int = 0
    ended: bool = False
    records: dict[int, Record] = field(default_factory=dict)
    closed: int = 0
    kept: int = 1
    refused: int = 0
    late: Landing = Landing.CARRY
    dropped: bool = False
    is_fresh: bool = False
    apart: Launch | None = None
    standing: Launch | None = None

    @property
    def next_round(self) -> int:
        """The round that lands next."""
        return self.applied.round + 1

    @property
    def is_sound(self) -> bool:
        """Whether there are outer parameters that are right, or that records can bring up to date."""
        return self.digest is not None and (self.next_round >= self.kept or self.applied.round >= self.closed)

    @property
    def has_joined(self) -> bool:
        """Whether all that is closed has landed, but for a flight, which lands in its time, and what comes after it."""
        if self.flight is None or self.is_overtaken:
            return self.applied.round >= self.closed
        return all(round in self.records for round in range(self.next_round, self.closed + 1))

    @property
    def called(self) -> Call | None:
        """The call of the round that lands next, if it was heard."""
        return self.call if self.call and self.call.round == self.next_round else None

    def is_last(self, terms: Terms) -> bool:
        """Tells whether the round that lands next is the last, as far as the site knows: by the charter, or a call."""
        return terms.is_last(self.next_round) or (self.called is not None and self.called.final)

    @property
    def stands(self) -> bool:
        """Whether the round that lands next has a launch of this site already, and takes no other."""
        return self.standing is not None and self.standing.round == self.next_round

    @property
    def is_overtaken(self) -> bool:
        """Whether a record counts what an earlier life launched after the flight, or in its place."""
        if self.flight is None:
            return False
        own = self.flight.own
        counted = [record.of(own.site) for record in self.records.values() if record.round >= own.round]
        return any(mine and mine != own and not self._is_apart(mine) for mine in counted)

    def _is_apart(self, mine: Contribution) -> bool:
        """Tells whether nothing is held of what this site has launched, and does not have in flight."""
        return self.is_fresh or mine.launch == self.apart

    def meet(self, standing: Launch | None) -> bool:
        """Hears which launch of this site stands in the round that is open at the hub."""
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
        """Hears that the local parameters become the outer ones, whatever was launched before."""
        self.flight, self.is_fresh = None, True
        self.drop()

    def drop(self) -> None:
        """Holds nothing any more."""
        self.steps = self.samples = 0

    def forget(self) -> None:
        """Finds that the outer parameters are wrong: what was measured against them is worth nothing."""
        self.digest = self.flight = None
        self.drop()

    def refuse(self, round: int) -> None:
        """Refuses a round, whose record was measured against other outer parameters than those here."""
        self.forget()
        if self.refused == round:
            raise AgreementError(
                f"Round {round} of fragment {self.fragment} was measured against outer parameters that cannot be made"
                " again: with another state this site came to others too. Its arithmetic is not that of the others, or"
                " those who held them are gone. Roll the run back to a round before (sdiloco hub rollback)."
            )
        self.refused = round

    # Launching

    def launches(self, step: int, terms: Terms, finishing: bool) -> bool:
        """Tells whether the fragment launches after an inner step."""
        # If the round is closed already, a launch would be late.
        if self.flight or self.ended or self.stands or self.closed > self.applied.round:
            return False
        called = self.called
        if called and called.final:
            return True
        if finishing:
            return self.steps > 0
        on_time = step - self.launched_at >= terms.sync_every
        answers = called is not None and self.skipped != called.round
        return self.steps >= terms.least_steps and (on_time or answers)

    def skips(self, terms: Terms) -> Call | None:
        """Returns the call that will not be answered, because the site has trained too little; once."""
        called = self.called
        if not called or called.final or self.flight or self.stands or self.skipped == called.round or self.ended:
            return None
        if self.steps >= terms.least_steps:
            return None
        self.skipped = called.round
        return called

    def launch(self, sent: Contribution, step: int) -> None:
        """Puts all that is held into a flight."""
        self.flight = Flight(sent, step, self.steps)
        self.launched_at = step
        self.drop()

    # Landing

    def learn(self, record: Record) -> None:
        """Takes a record; see `Follower.learn`."""
        self.closed = max(self.closed, record.round)
        if record.round < self.applied.round or record.position == self.applied:
            return
        before = self.records.get(record.round - 1)
        known = self.applied.key if record.round == self.next_round else before.key if before else record.previous
        after = self.records.get(record.round + 1)
        other = record.round == self.applied.round or self.records.get(record.round, record).key != record.key
        if other or record.previous != known or (after and after.previous != record.key):
            raise self.parted(record.round)
        self.records[record.round] = record

    def parted(self, round: int) -> AgreementError:
        """Returns the error for a round that is another one at the hub than here."""
        return AgreementError(
            f"Round {round} of fragment {self.fragment} is another one at the hub than this site knows. Their histories"
            " have parted: resume this site from a checkpoint of before, or restore the ledger of the hub."
        )

    def due(self, step: int, overlap_steps: int) -> Record | None:
        """Returns the record that lands after an inner step, if one does."""
        early = self.flight is not None and step < self.flight.launched_at + overlap_steps and not self.is_overtaken
        return None if early or self.digest is None else self.records.get(self.next_round)

    def landing(self, record: Record, site: str) -> Landing:
        """Says what a record does to what the site has in flight and holds."""
        mine = record.of(site)
        flight = self.flight if self.flight and self.flight.own.round == record.round else None
        if record.final or (flight and not flight.own.finite):
            return Landing.TAKE
        if mine is None:
            return self.late if flight and not self.dropped else Landing.CARRY
        if flight and flight.own == mine:
            return Landing.MIX
        # Else what an earlier life had counted is in the local parameters, and cannot be told from the rest.
        holds = self.steps > 0 or self.flight is not None
        return Landing.CARRY if holds and self._is_apart(mine) else Landing.TAKE

    def land(self, landing: Landing, applied: Position, digest: int) -> None:
        """Does to what is held what a landing says, and moves on."""
        if self.flight and self.flight.own.round <= applied.round:
            if landing is Landing.CARRY:
                self.steps += self.flight.steps
                self.samples += self.flight.own.weight
            self.flight = None
        if landing is not Landing.CARRY:
            self.dropped = landing is Landing.DROP
        if landing is Landing.TAKE:
            self.drop()
        record = self.records.get(applied.round)
        self.ended = record is not None and record.final
        self.applied, self.digest = applied, digest
        self.closed = max(self.closed, applied.round)
        if self.apart and self.apart.round <= applied.round:
            self.apart = None
        self.records = {round: own for round, own in self.records.items() if round > applied.round}

    def passed(self, round: int, site: str) -> Landing:
        """Says what the records up to a round, none of which has landed, come to together."""
        found = set()
        for number in range(self.next_round, round + 1):
            record = self.records.get(number)
            if record is None:
                # Nobody knows whether it counted an earlier life. It must not count twice.
                return Landing.TAKE
            found.add(self.landing(record, site))
        return next(one for one in (Landing.TAKE, Landing.MIX, Landing.DROP, Landing.CARRY) if one in found)

    # Checkpoints

    def described(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of it, as plain numbers and texts."""
        flight = self.flight
        return {
            "applied": list(self.applied),
            "launched_at": self.launched_at,
            "digest": self.digest,
            "steps": self.steps,
            "samples": self.samples,
            "ended": self.ended,
            "dropped": self.dropped,
            "apart": self.apart and list(self.apart),
            "flight": flight and [flight.own.described(), flight.launched_at, flight.steps],
        }

    @staticmethod
    def restored(fragment: int, saved: Mapping[str, Any], late: Landing = Landing.CARRY) -> "Progress":
        """Returns what was `described`."""
        numbers = {name: saved[name] for name in ("launched_at", "digest", "steps", "samples", "ended")}
        applied = Position(*saved["applied"])
        own = Progress(fragment, applied, **numbers, closed=applied.round, late=late)
        own.dropped = saved.get("dropped", False)  # earlier versions dropped nothing
        if saved.get("apart"):  # nor did they tell launches of earlier lives apart
            own.apart = Launch(*saved["apart"])
        if saved["flight"]:
            sent, launched_at, steps = saved["flight"]
            own.flight = Flight(contribution(sent), launched_at, steps)
        return own
