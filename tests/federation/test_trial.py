"""The trial: 10,000 faults, and not one silent divergence; and where a rule is taken out, it
notices.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.federation import follower
from lightning_sdiloco.federation.follower import Follower, MergeAction, Progress
from lightning_sdiloco.federation.ledger import Ledger
from lightning_sdiloco.federation.messages import Event, Record
from lightning_sdiloco.federation.quorum import All
from tests.federation.trial import Durable, Site, World

SEEDS = range(200)


def play(seeds: Sequence[int], faults: int) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        judge = World(seed, faults).run()
        assert judge.violations == [], f"seed {seed}"
        counts += judge.counts
    assert (
        sum(count for name, count in counts.items() if name.startswith("fault"))
        == len(seeds) * faults
    )
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


# A rule is taken out of the real ledger or follower, of the site or the hub. What is changed, as it
# is:
land = Follower.land
launches = Progress.launches
load = Follower.load_state_dict
landing = Progress.landing
call = Ledger._call
durable = Durable.append


def hasty(self: Durable, seq: int, record: bytes, notes: Any = None) -> None:
    hub = self.hub
    if not hub or hub.world.random.random() < 0.9:
        durable(self, seq, record, notes)
        return
    hub.tell(Event("record", {}, record))
    hub.world.judge.disks.setdefault(Record.from_bytes(record).key, hub.disk)
    hub.alive = False
    hub.world.after(0.5, hub.world.hub_starts, hub)
    raise AgreementError("it dies before the record is written")


def dropping(self: Progress, record: Record, site: str) -> MergeAction:
    found = landing(self, record, site)
    return MergeAction.MIX if found is MergeAction.CARRY else found


def own_first(self: Site, record: Record) -> list[int]:
    return sorted(
        range(len(record.counted)), key=lambda index: record.counted[index].site != self.name
    )


def waits(self: Follower, step: int, now: float) -> float:
    return float(any(own.flight and step >= own.flight.launched_at + 7 for own in self.fragments))


def eager(self: Progress, step: int, terms: Any, finishing: bool) -> bool:
    always: Any = SimpleNamespace(least_steps=lambda round: 1, steps_before=terms.steps_before)
    return launches(self, step, always, finishing)


def learn(self: Progress, record: Record) -> None:
    self.closed = max(self.closed, record.round)
    if record.round > self.applied.round:
        self.records[record.round] = record


def finished(self: Follower) -> bool:
    over = all(own.ended for own in self.fragments)
    return over or (
        self._finishing and not any(own.steps for own in self.fragments if not own.ended)
    )


# Each with a seed whose world notices it. Where the worlds change another one may: look among the
# first thirty.
MUTANTS: list[tuple[str, int, Any, str, Any]] = [
    ("a record is told before it is durable", 2, Durable, "append", hasty),
    (
        "rounds wait for all, without a grace",
        0,
        Ledger,
        "_closes",
        lambda _, p, at, sites, now: {*sites} <= {*at.contributions},
    ),
    ("rounds close with fewer than the quorum", 1, All, "fewest", lambda self, sites: 1),
    ("a site adds up its own first", 0, Site, "in_order", own_first),
    ("what does not count is mixed and dropped", 1, Progress, "landing", dropping),
    ("training waits until its flight has landed", 1, Follower, "waits", waits),
    (
        "a state carries all that is held",
        4,
        Progress,
        "passed",
        lambda self, round, site: MergeAction.CARRY,
    ),
    ("a new incarnation hears of no launch", 230, Progress, "meet", lambda self, standing: False),
    ("what is not held is taken", 37, Progress, "_is_apart", lambda self, mine: False),
    ("nobody answers a call", 1, Follower, "hear", lambda self, call: None),
    ("a site launches with a single step", 1, Progress, "launches", eager),
    (
        "a site does not look at its values",
        0,
        Follower,
        "land",
        lambda f, own, _, after: land(f, own, own.digest, after),
    ),
    ("a state is not verified", 5, follower, "_require_sound", lambda *arguments: None),
    (
        "a flight in a checkpoint is forgotten",
        0,
        Follower,
        "load_state_dict",
        lambda f, state, digests: load(
            f, {"fragments": [{**own, "flight": None} for own in state["fragments"]]}, digests
        ),
    ),
    ("a site believes any hub", 19, Progress, "learn", learn),
    ("a site leaves as soon as it has launched", 2, Follower, "finished", property(finished)),
    ("a last round is like any other", 4, Ledger, "end", lambda self: None),
    (
        "a last round takes what was rounded",
        0,
        Ledger,
        "_call",
        lambda f, p: replace(call(f, p), final=f._ending),
    ),
    (
        "a site that has come is there for ever",
        2,
        Ledger,
        "present",
        lambda self, now: sorted(self.members),
    ),
]


@pytest.mark.parametrize(
    ("seed", "owner", "name", "change"),
    [own[1:] for own in MUTANTS],
    ids=[own[0] for own in MUTANTS],
)
def test_the_trial_notices(
    seed: int, owner: Any, name: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, change)
    assert World(seed, 15).run().violations
