"""Mutants: a rule is taken out of the real ledger, follower, site or hub, and the trial has to notice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_sdiloco.federation import (
    All,
    Contribution,
    DynamicBackup,
    Follower,
    Landing,
    Ledger,
    Progress,
    Record,
    messages,
)
from lightning_sdiloco.federation import follower as follower_module
from tests.federation.hub import SimulatedHub
from tests.federation.site import SimulatedSite, Values
from tests.federation.world import World

Patch = Callable[[Any, str, Any], None]
MOST_SEEDS = 30
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(name: str) -> Callable[[Callable[[Patch], None]], None]:
    def add(change: Callable[[Patch], None]) -> None:
        MUTANTS[name] = change

    return add


@mutant("no digest is compared")
def _(patch: Patch) -> None:
    def all_of_them(self: Ledger, fragment: int, round: Any, now: float) -> list[Contribution]:
        return [round.here[site] for site in sorted(round.here) if not round.here[site].reason]

    patch(Ledger, "_largest_camp", all_of_them)
    patch(messages, "_require_one_round", lambda record: None)
    blind(patch)


def blind(patch: Patch) -> None:
    land, launch = Follower.land, Follower.launch
    patch(Follower, "land", lambda self, record, before, after: land(self, record, record.digest, after))
    patch(
        Follower,
        "launch",
        lambda self, p, step, digest, *rest: launch(self, p, step, self.fragments[p].digest, *rest),
    )


@mutant("nobody asks whether an earlier life was counted")
def _(patch: Patch) -> None:
    landing = Progress.landing

    def careless(self: Progress, record: Record, site: str) -> Landing:
        mine = record.of(site)
        other = mine is not None and not (self.flight and self.flight.own == mine)
        return Landing.CARRY if other and not record.final else landing(self, record, site)

    patch(Progress, "landing", careless)


@mutant("a record is told before it is durable")
def _(patch: Patch) -> None:
    durable = SimulatedHub.record

    def hasty(self: SimulatedHub, record: Record) -> bool:
        if self.world.random.random() < 0.9:
            return durable(self, record)
        # It is told, and the hub dies before it is written.
        self.tell("record", record, self.payloads(record))
        self.world.judge.disks.setdefault(record.key, self.disk)
        self.dead = True
        self.world.after(0.5, self.world.hub_starts, self.disk, self)
        return True

    patch(SimulatedHub, "record", hasty)


@mutant("rule 1: what is late counts in the next round")
def _(patch: Patch) -> None:
    contribute, examine = Ledger.contribute, Ledger.examine

    def lenient(own: Contribution, ledger: Ledger) -> Contribution:
        closed = ledger.closed[own.fragment]
        return replace(own, round=closed.round + 1, previous=closed.key) if own.round <= closed.round else own

    patch(Ledger, "examine", lambda self, own, life: examine(self, lenient(own, self), life))
    patch(Ledger, "contribute", lambda self, own, life, now: contribute(self, lenient(own, self), life, now))


@mutant("rule 2: rounds wait for all, without a grace")
def _(patch: Patch) -> None:
    patch(Ledger, "_closes", lambda self, fragment, round, sites, now: all(site in round.arrived for site in sites))


@mutant("rule 2: rounds do not wait for anybody")
def _(patch: Patch) -> None:
    patch(All, "closes", lambda self, arrived, awaited, now: True)
    patch(DynamicBackup, "closes", lambda self, arrived, awaited, now: True)


@mutant("rule 2: rounds close with fewer than the quorum")
def _(patch: Patch) -> None:
    patch(All, "fewest", lambda self, sites: 1)
    patch(DynamicBackup, "fewest", lambda self, sites: 1)


@mutant("rule 3: every site adds up from its own contribution on")
def _(patch: Patch) -> None:
    def own_first(self: SimulatedSite, record: Record) -> list[int]:
        return sorted(range(len(record.counted)), key=lambda index: record.counted[index].site != self.name)

    patch(SimulatedSite, "in_order", own_first)


@mutant("rule 4: what does not count is mixed and dropped")
def _(patch: Patch) -> None:
    landing = Progress.landing

    def dropping(self: Progress, record: Record, site: str) -> Landing:
        found = landing(self, record, site)
        return Landing.MIX if found is Landing.CARRY else found

    patch(Progress, "landing", dropping)


@mutant("rule 4: training waits until its flight has landed")
def _(patch: Patch) -> None:
    def waits(self: Follower, step: int, now: float) -> bool:
        flights = [own.flight for own in self.fragments if own.flight]
        return any(step >= flight.launched_at + self.terms.sync_every - 1 for flight in flights)

    patch(Follower, "waits", waits)


@mutant("rule 5: who takes over a state carries all that it holds")
def _(patch: Patch) -> None:
    patch(Progress, "passed", lambda self, round, site: Landing.CARRY)


@mutant("rule 5: who is started again does not hear what it has launched")
def _(patch: Patch) -> None:
    patch(Progress, "meet", lambda self, standing: False)


@mutant("rule 5: what was launched before is taken, though nothing of it is held")
def _(patch: Patch) -> None:
    patch(Progress, "_is_apart", lambda self, mine: False)


@mutant("rule 6: nobody answers the call of a round")
def _(patch: Patch) -> None:
    patch(Follower, "hear", lambda self, call: None)


@mutant("rule 6: a site launches with a single step")
def _(patch: Patch) -> None:
    launches = Progress.launches
    patch(
        Progress,
        "launches",
        lambda self, step, terms, finishing: launches(self, step, Eager(terms), finishing),
    )


class Eager:
    """Terms that ask for a single step."""

    least_steps = 1

    def __init__(self, terms: Any) -> None:
        self.sync_every = terms.sync_every


@mutant("rule 7: a site does not look at its own values")
def _(patch: Patch) -> None:
    blind(patch)


@mutant("rule 8: a state is not verified")
def _(patch: Patch) -> None:
    patch(follower_module, "_require_sound", lambda own, position, said, digest: None)


@mutant("rule 9: a flight in a checkpoint is forgotten")
def _(patch: Patch) -> None:
    restored = Progress.restored
    patch(
        Progress,
        "restored",
        staticmethod(lambda fragment, saved, late: restored(fragment, {**saved, "flight": None})),
    )


@mutant("rule 10: a site believes any hub")
def _(patch: Patch) -> None:
    def welcome(self: Follower, welcome: Any) -> list[int]:
        for own, closed, kept in zip(self.fragments, welcome.closed, welcome.kept, strict=True):
            own.closed, own.kept = closed.round, kept
        self.reachable, self._alone_since = True, None
        return []

    def learn(self: Progress, record: Record) -> None:
        self.closed = max(self.closed, record.round)
        if record.round > self.applied.round:
            self.records[record.round] = record

    patch(Follower, "welcome", welcome)
    patch(Progress, "learn", learn)


@mutant("rule 11: who finds no state begins afresh")
def _(patch: Patch) -> None:
    source = Ledger.source

    def no_anchor(self: Ledger, *arguments: Any) -> Any:
        found = source(self, *arguments)
        return found if isinstance(found, str) or not self.seq else None

    def afresh(self: SimulatedSite, records: int) -> None:
        for p, own in enumerate(self.follower.fragments):
            if own.digest is None:
                self.values[p] = Values(*self.world.first_values(p), f"afresh {self.life}")
                self.held[p] = []
                own.drop()
                own.applied = self.world.hub.ledger.closed[p]
                own.digest = self.values[p].digest()

    patch(Ledger, "source", no_anchor)
    patch(SimulatedSite, "on_nobody", afresh)


@mutant("rule 12: a site leaves as soon as it has launched")
def _(patch: Patch) -> None:
    def finished(self: Follower) -> bool:
        over = all(own.ended for own in self.fragments)
        return over or (self._finishing and not any(own.steps for own in self.fragments if not own.ended))

    patch(Follower, "finished", property(finished))


@mutant("rule 12: a last round is like any other")
def _(patch: Patch) -> None:
    patch(Ledger, "end", lambda self: None)


@mutant("rule 12: a last round takes what was rounded")
def _(patch: Patch) -> None:
    call = Ledger._call
    patch(Ledger, "_call", lambda self, p: replace(call(self, p), final=self._ending))


@mutant("rule 13: a checkpoint does not say which flight it holds")
def _(patch: Patch) -> None:
    load = Follower.load_state_dict

    def anonymous(self: Follower, state: Any, digests: Any) -> None:
        load(self, state, digests)
        for own in self.fragments:
            if own.flight:
                own.flight.own = replace(own.flight.own, life=self.life)

    patch(Follower, "load_state_dict", anonymous)


@mutant("rule 14: a site that has come is there for ever")
def _(patch: Patch) -> None:
    patch(Ledger, "present", lambda self, now: sorted(self.members))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_trial_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch.setattr)
    assert any(World(seed).run().violations for seed in range(MOST_SEEDS)), f"nobody noticed: {name}"
