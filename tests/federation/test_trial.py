"""The trial: 10,000 faults, and not one silent divergence; and where a rule is taken out, it notices."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_sdiloco.federation import follower, messages
from lightning_sdiloco.federation.follower import Follower, MergeAction, Progress
from lightning_sdiloco.federation.ledger import Ledger
from lightning_sdiloco.federation.messages import Contribution, Record
from lightning_sdiloco.federation.quorum import All, DynamicBackup
from tests.federation.trial import Hub, Part, Site, World, first_values

SEEDS, FAULTS = range(200), 50


def play(seeds: Sequence[int]) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        judge = World(seed, FAULTS).run()
        assert judge.violations == [], f"seed {seed}"
        counts += judge.counts
    assert sum(count for name, count in counts.items() if name.startswith("fault")) == len(seeds) * FAULTS
    # Nearly all runs come to their end; the others stop with an error that says what an operator can do.
    assert counts["the run waits for an operator"] <= len(seeds) // 20


def test_nothing_diverges_in_silence_and_nothing_counts_twice() -> None:
    # Every kind of world: its quorum, what becomes of late contributions, and who may train early.
    play((1, *SEEDS[6::13]))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_nothing_diverges_in_any_of_the_worlds(part: int) -> None:
    play(SEEDS[part::8])


# Mutants: a rule is taken out of the real ledger or follower, or of the site or hub. What is changed, as it is:
land, launch, load = Follower.land, Follower.launch, Follower.load_state_dict
landing, launches, restored = Progress.landing, Progress.launches, Progress.restored
contribute, examine, source, call = Ledger.contribute, Ledger.examine, Ledger.source, Ledger._call
durable = Hub.record


def all_of_them(self: Ledger, fragment: int, round: Any, now: float) -> list[Contribution]:
    return [round.here[site] for site in sorted(round.here) if not round.here[site].reason]


BLIND = [
    (Follower, "land", lambda self, record, before, after: land(self, record, record.digest, after)),
    (
        Follower,
        "launch",
        lambda self, p, step, digest, *rest: launch(self, p, step, self.fragments[p].digest, *rest),
    ),
]


def careless(self: Progress, record: Record, site: str) -> MergeAction:
    mine = record.of(site)
    other = mine is not None and not (self.flight and self.flight.own == mine)
    return MergeAction.CARRY if other and not record.final else landing(self, record, site)


def hasty(self: Hub, record: Record) -> bool:
    if self.world.random.random() < 0.9:
        return durable(self, record)
    # It is told, and the hub dies before it is written.
    self.tell("record", record, self.payloads(record))
    self.world.judge.disks.setdefault(record.key, self.disk)
    self.dead = True
    self.world.after(0.5, self.world.hub_starts, self.disk, self)
    return True


def lenient(own: Contribution, ledger: Ledger) -> Contribution:
    closed = ledger.closed[own.fragment]
    return replace(own, round=closed.round + 1, previous=closed.key) if own.round <= closed.round else own


def own_first(self: Site, record: Record) -> list[int]:
    return sorted(range(len(record.counted)), key=lambda index: record.counted[index].site != self.name)


def dropping(self: Progress, record: Record, site: str) -> MergeAction:
    found = landing(self, record, site)
    return MergeAction.MIX if found is MergeAction.CARRY else found


def waits(self: Follower, step: int, now: float) -> bool:
    flights = [own.flight for own in self.fragments if own.flight]
    return any(step >= flight.launched_at + self.terms.sync_every - 1 for flight in flights)


def eager(self: Progress, step: int, terms: Any, finishing: bool) -> bool:
    single: Any = SimpleNamespace(least_steps=1, sync_every=terms.sync_every)
    return launches(self, step, single, finishing)


def welcome(self: Follower, welcome: Any) -> list[int]:
    for own, closed, kept in zip(self.fragments, welcome.closed, welcome.kept, strict=True):
        own.closed, own.kept = closed.round, kept
    self.reachable, self._alone_since = True, None
    return []


def learn(self: Progress, record: Record) -> None:
    self.closed = max(self.closed, record.round)
    if record.round > self.applied.round:
        self.records[record.round] = record


def no_anchor(self: Ledger, *arguments: Any) -> Any:
    found = source(self, *arguments)
    return found if isinstance(found, str) or not self.seq else None


def afresh(self: Site, records: int) -> None:
    for p, own in enumerate(self.follower.fragments):
        if own.digest is None:
            self.parts[p] = Part(first_values(p, f"afresh {self.life}"))
            own.drop()
            own.applied = self.world.hub.ledger.closed[p]
            own.digest = self.parts[p].values.digest


def finished(self: Follower) -> bool:
    over = all(own.ended for own in self.fragments)
    return over or (self._finishing and not any(own.steps for own in self.fragments if not own.ended))


def anonymous(self: Follower, state: Any, digests: Any) -> None:
    load(self, state, digests)
    for own in self.fragments:
        if own.flight:
            own.flight.own = replace(own.flight.own, life=self.life)


# Each with a seed whose world notices it. Where the worlds change another one may: look among the first thirty.
MUTANTS: dict[str, tuple[int, list[tuple[Any, str, Any]]]] = {
    "no digest is compared": (
        2,
        [(Ledger, "_largest_camp", all_of_them), (messages, "_require_one_round", lambda record: None), *BLIND],
    ),
    "nobody asks whether an earlier life was counted": (0, [(Progress, "landing", careless)]),
    "a record is told before it is durable": (2, [(Hub, "record", hasty)]),
    "rule 1: what is late counts in the next round": (
        1,
        [
            (Ledger, "examine", lambda self, own, life: examine(self, lenient(own, self), life)),
            (Ledger, "contribute", lambda self, own, life, now: contribute(self, lenient(own, self), life, now)),
        ],
    ),
    "rule 2: rounds wait for all, without a grace": (
        0,
        [(Ledger, "_closes", lambda self, fragment, round, sites, now: all(site in round.arrived for site in sites))],
    ),
    "rule 2: rounds do not wait for anybody": (
        6,
        [(kind, "closes", lambda self, arrived, awaited, now: True) for kind in (All, DynamicBackup)],
    ),
    "rule 2: rounds close with fewer than the quorum": (
        1,
        [(kind, "fewest", lambda self, sites: 1) for kind in (All, DynamicBackup)],
    ),
    "rule 3: every site adds up from its own contribution on": (0, [(Site, "in_order", own_first)]),
    "rule 4: what does not count is mixed and dropped": (1, [(Progress, "landing", dropping)]),
    "rule 4: training waits until its flight has landed": (1, [(Follower, "waits", waits)]),
    "rule 5: who takes over a state carries all that it holds": (
        0,
        [(Progress, "passed", lambda self, round, site: MergeAction.CARRY)],
    ),
    "rule 5: who is started again does not hear what it has launched": (
        19,
        [(Progress, "meet", lambda self, standing: False)],
    ),
    "rule 5: what was launched before is taken, though nothing of it is held": (
        19,
        [(Progress, "_is_apart", lambda self, mine: False)],
    ),
    "rule 6: nobody answers the call of a round": (1, [(Follower, "hear", lambda self, call: None)]),
    "rule 6: a site launches with a single step": (0, [(Progress, "launches", eager)]),
    "rule 7: a site does not look at its own values": (2, BLIND),
    "rule 8: a state is not verified": (6, [(follower, "_require_sound", lambda *arguments: None)]),
    "rule 9: a flight in a checkpoint is forgotten": (
        0,
        [
            (
                Progress,
                "restored",
                staticmethod(lambda fragment, saved, late: restored(fragment, {**saved, "flight": None}, late)),
            )
        ],
    ),
    "rule 10: a site believes any hub": (19, [(Follower, "welcome", welcome), (Progress, "learn", learn)]),
    "rule 11: who finds no state begins afresh": (
        1,
        [(Ledger, "source", no_anchor), (Site, "on_nobody", afresh)],
    ),
    "rule 12: a site leaves as soon as it has launched": (39, [(Follower, "finished", property(finished))]),
    "rule 12: a last round is like any other": (4, [(Ledger, "end", lambda self: None)]),
    "rule 12: a last round takes what was rounded": (
        9,
        [(Ledger, "_call", lambda self, p: replace(call(self, p), final=self._ending))],
    ),
    "rule 13: a checkpoint does not say which flight it holds": (0, [(Follower, "load_state_dict", anonymous)]),
    "rule 14: a site that has come is there for ever": (
        2,
        [(Ledger, "present", lambda self, now: sorted(self.members))],
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_trial_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, changes = MUTANTS[name]
    for owner, attribute, change in changes:
        monkeypatch.setattr(owner, attribute, change)
    assert World(seed, 15).run().violations, f"nobody noticed: {name}"
