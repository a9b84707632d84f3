"""The simulation: no history of faults breaks a promise; and where a rule is taken out, or a fault
is planted, it finds a history that shows it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from lightning_sdiloco.federation import coordinator, follower
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.follower import Follower, MergeAction, Progress
from lightning_sdiloco.federation.ledger import Answer, Ledger, OpenRound
from lightning_sdiloco.federation.lost_payloads import LostPayloads
from lightning_sdiloco.federation.messages import (
    Call,
    Contribution,
    Event,
    Heartbeat,
    Position,
    Record,
    Welcome,
)
from lightning_sdiloco.federation.quorum import All
from lightning_sdiloco.federation.remote import RecordQueue
from lightning_sdiloco.federation.room import Room
from tests.federation.simulate import failing, main, played, shortest
from tests.federation.simulated_disk import SimulatedDisk, SimulatedJournal, SimulatedStore
from tests.federation.trial import RETENTION, Site, World

# Histories in which a planted fault must be found.
ENOUGH = 10_000
# Seeds beyond the first ones that have broken a promise.
FOUND = (33137, 37298, 38901, 39038, 55291, 73304, 88367)


def play(seeds: Sequence[int]) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        judge = played(seed)
        assert judge.violations == [], (
            f"python -m tests.federation.simulate --seeds 1 --from {seed}"
        )
        counts += judge.counts
    # Nearly all runs come to their end; the others stop with an error that says what an operator
    # can do.
    assert counts["the run waits for an operator"] <= len(seeds) // 20


def test_nothing_diverges_in_silence_and_nothing_counts_twice() -> None:
    play([*range(200), *FOUND])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_nothing_diverges_in_a_thousand_histories(part: int) -> None:
    play(range(200 + 250 * part, 450 + 250 * part))


# These are the rules as they are:
append = SimulatedJournal.append
note = SimulatedJournal.note
source = Ledger.source
call = Ledger._call
close = Coordinator._close
close_due = Coordinator._close_due
due = Follower.due
examine = Ledger.examine
heartbeat = Ledger.heartbeat
needed = Room.needed
summation_order = Site.summation_order
waits = Follower.waits
land = Follower.land
meet_hub = Progress.meet_hub
start_over = RecordQueue.welcome
landing = Progress.landing
launches = Progress.launches
load_state_dict = Follower.load_state_dict


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


def learn_anything(self: Progress, record: Record, has_payloads: bool) -> None:
    self.closed = max(self.closed, record.round)
    if record.round > self.applied.round:
        self.records[record.round] = record


def meet_and_keep(self: Progress, closed: Position, kept_from: int) -> None:
    """Keeps the records that were heard of the hub before."""
    records = self.records
    meet_hub(self, closed, kept_from)
    self.records = records


def meet_as_before(self: Progress, closed: Position, kept_from: int) -> None:
    """Remembers which calls it has declined before."""
    skipped = self.skipped
    meet_hub(self, closed, kept_from)
    self.skipped = skipped


class Everything(set[Any]):
    """A set that contains what it does not hold."""

    def __contains__(self, element: object) -> bool:
        return True


def fetch_on(self: RecordQueue, welcome: Welcome) -> None:
    """Fetches what was rolled back."""
    fetching = dict(self.fetching)
    start_over(self, welcome)
    self.fetching = fetching


def finished_when_launched(self: Follower) -> bool:
    running = [progress for progress in self.fragments if not progress.ended]
    return not running or (self._finishing and not any(progress.steps for progress in running))


def call_as_ever(self: Ledger, fragment: int) -> Call:
    return replace(call(self, fragment), final=self._ending)


def everybody(self: Ledger, now: float) -> list[str]:
    return sorted(self.members)


# The hub


def tell_first(self: Coordinator, record: Record, notes: Any = None) -> None:
    self._notify(Event("record", {}, record.to_bytes()))
    close(self, record, notes)


def note_later(self: SimulatedJournal, seq: int, record: Any, notes: Any = None) -> None:
    """Writes a record and what changes with it one after the other."""
    append(self, seq, record)
    self.note(notes or {})


def forget_what_is_open(self: SimulatedJournal, notes: Mapping[str, Any]) -> None:
    note(self, {name: value for name, value in notes.items() if not name.startswith("open/")})


def answer_as_if_known(self: Ledger, contribution: Contribution, incarnation: str) -> Any:
    """Takes only the first contribution of a round."""
    answer = examine(self, contribution, incarnation)
    opened = self.open.get(contribution.fragment)
    return Answer.LATE if answer is Answer.OPEN and opened else answer


def heartbeat_without_lease(self: Ledger, sent: Heartbeat, now: float) -> None:
    until = self._member(sent.site, sent.incarnation).until
    heartbeat(self, sent, now)
    self.members[sent.site].until = until


def kept_without_snapshot(self: Ledger) -> tuple[int, ...]:
    return tuple(max(0, closed.round - RETENTION) + 1 for closed in self.closed)


def source_of_any(self: Ledger, site: str, now: float, without: Any = (), beyond: Any = ()) -> Any:
    """Names donors that have not applied what the site lacks."""
    return source(self, site, now, without)


def despair(self: Coordinator, now: float) -> str | None:
    """Does not try again once there was no room."""
    if self.trouble and "no space" in self.trouble:
        return self.trouble
    return close_due(self, now)


def needed_without_open(self: Room) -> set[str]:
    """Forgets the payloads of open rounds when it tidies the store."""
    notes = self._journal.notes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            self._journal, "notes", lambda prefix: {} if prefix == "open/" else notes(prefix)
        )
        return needed(self)


# The sites


def due_newest_first(self: Follower, step: int) -> list[Record]:
    """Lands the newest record, whether those before it have landed or not."""
    for progress in self.fragments:
        if len(progress.records) > 1 and progress.digest is not None:
            return [progress.records[max(progress.records)]]
    return due(self, step)


def wait_anew(self: Follower, step: int, now: float) -> float:
    """Waits as long as promised, and then again."""
    for progress in self.fragments:
        if progress.flight:
            progress.flight.waits_since = None
    return waits(self, step, now)


def judge_alone(self: Site, record: Record) -> list[int]:
    """Leaves out what is too long by a guard of its own."""
    order = summation_order(self, record)
    if self.name != "s0":
        return order
    return [index for index in order if record.counted[index].norm_squared < 1e4]


def always(answer: Any) -> Any:
    """A rule that decides nothing."""
    return lambda *arguments: answer


Change = tuple[Any, str, Any]


class Planted(NamedTuple):
    """A fault in the code, and the first seed whose history shows it."""

    name: str
    seed: int
    changes: Sequence[Change]


# If the worlds change, later seeds show it.
PLANTED = [
    Planted("a record is told before it is durable", 0, [(Coordinator, "_close", tell_first)]),
    Planted(
        "a contribution counts again after a restart of the hub",
        3,
        [(SimulatedJournal, "append", note_later), (Contribution, "builds_on", always(True))],
    ),
    Planted(
        "an accepted contribution is in memory only",
        0,
        [(SimulatedJournal, "note", forget_what_is_open)],
    ),
    Planted("a late contribution is lost", 0, [(Progress, "landing", mix_what_is_carried)]),
    Planted("a round takes only one contribution", 0, [(Ledger, "examine", answer_as_if_known)]),
    Planted("the dead belong to the quorum", 661, [(Ledger, "present", everybody)]),
    Planted("a heartbeat extends no lease", 0, [(Ledger, "heartbeat", heartbeat_without_lease)]),
    Planted(
        "two hubs have the ledger after a takeover",
        2,
        [
            (SimulatedDisk, "lock", always(None)),
            (SimulatedJournal, "_require_new", always(None)),
        ],
    ),
    Planted(
        "a torn blob is accepted",
        0,
        [(SimulatedStore, "_sync_content", always(None)), (Site, "is_sound", always(True))],
    ),
    Planted(
        "a blob is stored before its name is", 0, [(SimulatedStore, "_sync_name", always(None))]
    ),
    Planted(
        "bytes are stored that were not announced",
        31,
        [(SimulatedStore, "_require_announced", always(None)), (Site, "is_sound", always(True))],
    ),
    Planted(
        "payloads after a snapshot are dropped",
        102,
        [(Ledger, "kept_from", property(kept_without_snapshot))],
    ),
    Planted("a hub without room never tries again", 68, [(Coordinator, "_close_due", despair)]),
    Planted("the status hides who is silent", 0, [(coordinator, "_state_of", always("follows"))]),
    Planted("a record lands out of order", 0, [(Follower, "due", due_newest_first)]),
    Planted("a site waits longer than promised", 52, [(Follower, "waits", wait_anew)]),
    Planted("a site has a guard of its own", 29, [(Site, "summation_order", judge_alone)]),
    Planted("rounds wait for all, without a grace", 19, [(Ledger, "_closes", closes_with_all)]),
    Planted("rounds close with fewer than the quorum", 5, [(All, "fewest", always(1))]),
    Planted("a site adds up its own first", 1, [(Site, "summation_order", local_first)]),
    Planted(
        "training waits until its flight has landed", 22, [(Follower, "waits", waits_for_landing)]
    ),
    Planted(
        "a state carries all that is held", 33, [(Progress, "passed", always(MergeAction.CARRY))]
    ),
    Planted("a new incarnation hears of no launch", 843, [(Progress, "meet", always(False))]),
    Planted("what is not held is taken", 81, [(Progress, "_is_apart", always(False))]),
    Planted("nobody answers a call", 0, [(Follower, "hear", always(None))]),
    Planted("a site launches with a single step", 7, [(Progress, "launches", launches_early)]),
    Planted("a site does not look at its values", 5, [(Follower, "land", land_unseen)]),
    Planted("a state is not verified", 54, [(follower, "_require_sound", always(None))]),
    Planted(
        "a flight in a checkpoint is forgotten",
        5,
        [(Follower, "load_state_dict", load_without_flights)],
    ),
    Planted("a site believes any hub", 33, [(Progress, "learn", learn_anything)]),
    Planted(
        "a site leaves as soon as it has launched",
        0,
        [(Follower, "finished", property(finished_when_launched))],
    ),
    Planted(
        "a site waits for payloads that the hub has lost",
        33,
        [(Progress, "lacks_payloads", property(always(False)))],
    ),
    Planted("a donor lacks the same payloads", 12504, [(Ledger, "source", source_of_any)]),
    Planted(
        "the hub says nothing of lost payloads", 231, [(LostPayloads, "trouble", always(None))]
    ),
    Planted("an altered payload stays in the store", 112, [(SimulatedStore, "drop", always(None))]),
    Planted("records of another hub are kept", 112, [(Progress, "meet_hub", meet_and_keep)]),
    Planted("what was rolled back is fetched on", 33137, [(RecordQueue, "welcome", fetch_on)]),
    Planted(
        "calls declined before are declined for ever", 30, [(Progress, "meet_hub", meet_as_before)]
    ),
    Planted(
        "payloads of skipped records are kept",
        0,
        [(Follower, "record_keys", property(always(Everything())))],
    ),
    Planted("a last round is like any other", 0, [(Ledger, "end", always(None))]),
    Planted("a last round takes what was rounded", 0, [(Ledger, "_call", call_as_ever)]),
]


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.name for planted in PLANTED])
def test_a_planted_fault_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in planted.changes:
        monkeypatch.setattr(*change)
    assert next(failing(range(planted.seed, planted.seed + ENOUGH)), None) is not None


def test_payloads_of_an_open_round_that_a_hub_drops_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Room, "needed", needed_without_open)
    assert not [*failing(range(60, 80))]


def history_of(seed: int) -> list[str]:
    world = World(seed)
    world.history = []
    world.run()
    return [*world.history, str(world.now)]


def test_a_seed_is_one_history() -> None:
    histories = [history_of(seed) for seed in range(4)]
    assert histories == [history_of(seed) for seed in range(4)]
    assert len({tuple(history) for history in histories}) == 4


def test_a_failing_seed_prints_its_shortest_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SimulatedJournal, "note", forget_what_is_open)
    failures = map(shortest, failing(range(ENOUGH)))
    failure = next(
        failure
        for failure in failures
        if len(failure.faults) == 1 and len(World(failure.seed).faults.faults) > 2
    )
    seed = failure.seed
    (fault,) = failure.faults
    assert "has lost what" in failure.violation
    assert played(seed, [fault]).violations
    assert not played(seed, []).violations
    monkeypatch.setattr("sys.argv", ["simulate", "--seeds", "1", "--from", str(seed)])
    assert main() == 1
    printed = capsys.readouterr().out
    assert str(fault) in printed
    assert f"FAULT {fault.kind}" in printed
    assert "1 seeds" in printed
