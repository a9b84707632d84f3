"""The trial: 10,000 faults, and not one silent divergence; and where a rule is taken out, it
notices.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.federation import follower
from lightning_sdiloco.federation.follower import Follower, MergeAction, Progress
from lightning_sdiloco.federation.ledger import Ledger, OpenRound
from lightning_sdiloco.federation.messages import Call, Event, Record
from lightning_sdiloco.federation.quorum import All
from tests.federation.trial import Durable, Site, World

SEEDS = range(200)


def play(seeds: Sequence[int], faults: int) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        judge = World(seed, faults).run()
        assert judge.violations == [], f"seed {seed}"
        counts += judge.counts
    faults_played = sum(number for name, number in counts.items() if name.startswith("fault"))
    assert faults_played == len(seeds) * faults
    # Nearly all runs come to their end; the others stop with an error that says what an operator
    # can do.
    assert counts["the run waits for an operator"] <= len(seeds) // 20


def test_nothing_diverges_in_silence_and_nothing_counts_twice() -> None:
    # Every kind of world: its quorum, what becomes of late contributions, and who may train early.
    play((1, *SEEDS[6::13]), 20)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_nothing_diverges_in_any_of_the_worlds(part: int) -> None:
    play(SEEDS[part::8], 50)


# Mutants: a rule is taken out of the real ledger or follower, of the site or the hub. These are the
# rules as they are:
append = Durable.append
call = Ledger._call
land = Follower.land
landing = Progress.landing
launches = Progress.launches
load_state_dict = Follower.load_state_dict


def append_too_late(self: Durable, seq: int, record: bytes, notes: Any = None) -> None:
    hub = self.hub
    if not hub or hub.world.random.random() < 0.9:
        append(self, seq, record, notes)
        return
    hub.tell(Event("record", {}, record))
    hub.world.judge.disks.setdefault(Record.from_bytes(record).key, hub.disk)
    hub.alive = False
    hub.world.after(0.5, hub.world.restart_hub, hub)
    raise AgreementError("it dies before the record is written")


def closes_with_all(self: Ledger, fragment: int, round: OpenRound, sites: Any, now: float) -> bool:
    return set(sites) <= set(round.contributions)


def local_first(self: Site, record: Record) -> list[int]:
    sites = [contribution.site for contribution in record.counted]
    return sorted(range(len(sites)), key=lambda index: sites[index] != self.name)


def mix_what_is_carried(self: Progress, record: Record, site: str) -> MergeAction:
    action = landing(self, record, site)
    return MergeAction.MIX if action is MergeAction.CARRY else action


def waits_for_landing(self: Follower, step: int, now: float) -> float:
    flights = [progress.flight for progress in self.fragments if progress.flight]
    return float(any(step >= flight.launched_at + 7 for flight in flights))


def launches_early(self: Progress, step: int, terms: Any, finishing: bool) -> bool:
    eager: Any = SimpleNamespace(least_steps=lambda round: 1, steps_before=terms.steps_before)
    return launches(self, step, eager, finishing)


def land_unseen(self: Follower, record: Record, before: int, after: int) -> MergeAction:
    return land(self, record, record.digest, after)


def load_without_flights(self: Follower, state: Any, digests: Sequence[int]) -> None:
    fragments = [{**saved, "flight": None} for saved in state["fragments"]]
    load_state_dict(self, {"fragments": fragments}, digests)


def learn_anything(self: Progress, record: Record) -> None:
    self.closed = max(self.closed, record.round)
    if record.round > self.applied.round:
        self.records[record.round] = record


def finished_when_launched(self: Follower) -> bool:
    running = [progress for progress in self.fragments if not progress.ended]
    return not running or (self._finishing and not any(progress.steps for progress in running))


def call_as_ever(self: Ledger, fragment: int) -> Call:
    return replace(call(self, fragment), final=self._ending)


def always(answer: Any) -> Any:
    """A rule that decides nothing."""
    return lambda *arguments: answer


class Mutant(NamedTuple):
    """A change of a rule, and a seed whose world notices it."""

    name: str
    seed: int
    owner: Any
    attribute: str
    change: Any


# If the worlds change, another seed may notice: look among the first thirty.
MUTANTS = [
    Mutant("a record is told before it is durable", 2, Durable, "append", append_too_late),
    Mutant("rounds wait for all, without a grace", 0, Ledger, "_closes", closes_with_all),
    Mutant("rounds close with fewer than the quorum", 1, All, "fewest", always(1)),
    Mutant("a site adds up its own first", 0, Site, "summation_order", local_first),
    Mutant("what does not count is mixed and dropped", 1, Progress, "landing", mix_what_is_carried),
    Mutant("training waits until its flight has landed", 1, Follower, "waits", waits_for_landing),
    Mutant("a state carries all that is held", 4, Progress, "passed", always(MergeAction.CARRY)),
    Mutant("a new incarnation hears of no launch", 230, Progress, "meet", always(False)),
    Mutant("what is not held is taken", 37, Progress, "_is_apart", always(False)),
    Mutant("nobody answers a call", 1, Follower, "hear", always(None)),
    Mutant("a site launches with a single step", 1, Progress, "launches", launches_early),
    Mutant("a site does not look at its values", 0, Follower, "land", land_unseen),
    Mutant("a state is not verified", 5, follower, "_require_sound", always(None)),
    Mutant(
        "a flight in a checkpoint is forgotten",
        0,
        Follower,
        "load_state_dict",
        load_without_flights,
    ),
    Mutant("a site believes any hub", 19, Progress, "learn", learn_anything),
    Mutant(
        "a site leaves as soon as it has launched",
        8,
        Follower,
        "finished",
        property(finished_when_launched),
    ),
    Mutant("a last round is like any other", 4, Ledger, "end", always(None)),
    Mutant("a last round takes what was rounded", 0, Ledger, "_call", call_as_ever),
    Mutant(
        "a site that has come is there for ever",
        0,
        Ledger,
        "present",
        lambda self, now: sorted(self.members),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_trial_notices(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.change)
    assert World(mutant.seed, 15).run().violations
