"""Quorums: whom a round waits for, how that stands in the charter, and what holds whatever happens."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.backup_workers import BACKUP, Case, Play
from lightning_sdiloco import DynamicBackup, Federation
from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation import (
    RETENTION,
    All,
    Answer,
    Charter,
    ChosenQuorum,
    InProcessHub,
    Ledger,
    Record,
    Timing,
    chosen,
    quorum_of,
)
from lightning_sdiloco.federation.journal import History, Quorums
from tests.federation.told import CHARTER, TERMS, close, come, life, own, record
from tests.own_quorum import Core

STEPS, SECONDS = 30, 1.0
CORE = ChosenQuorum("tests.own_quorum.Core", {"core": ["a", "b"]})


def history(rounds: int = RETENTION, last: int = 20, **late: float) -> list[Record]:
    """Rounds of 30 s, in which each site is always as late."""
    found = []
    for number in range(last - rounds + 1, last + 1):
        counted = [replace(own(site, number), steps=STEPS) for site, own_late in late.items() if own_late == 0.0]
        timings = [Timing(site, number, own_late, SECONDS) for site, own_late in late.items()]
        found.append(replace(record(number, *counted), timings=tuple(timings)))
    return found


# Dynamic backup workers


def test_one_site_is_left_out_if_it_is_later_than_the_round_over_the_others() -> None:
    for sites in (3, 4, 8):
        names, threshold = [f"s{site}" for site in range(sites)], STEPS * SECONDS / (sites - 1)
        for late, awaited in ((threshold - 0.01, names), (threshold + 0.01, names[:-1])):
            past = history(**dict.fromkeys(names[:-1], 0.0), **{names[-1]: late})
            assert DynamicBackup(least=0.1).awaited(past, names) == awaited


def test_who_does_not_come_is_a_backup_worker_and_so_many_are_waited_for_as_least_says() -> None:
    past = history(a=0.0, b=0.0, c=20.0)
    # Once, long ago.
    past[0] = replace(past[0], timings=(*past[0].timings, Timing("d", past[0].round, 0.0)))
    assert DynamicBackup(0.5).awaited(past, ["d", "c", "b", "a"]) == ["a", "b"]
    assert DynamicBackup(0.75).awaited(past, "abcd") == ["a", "b", "c"]
    assert [DynamicBackup(0.5).fewest(sites) for sites in (1, 2, 3, 8)] == [1, 1, 2, 4]
    assert DynamicBackup(0.1).fewest(30) == 3


def test_a_stall_now_and_then_leaves_nobody_out() -> None:
    past = history(a=0.0, b=0.0, c=0.0)
    missed = [replace(one, timings=one.timings[:2]) if one.round % 3 == 0 else one for one in past]
    assert DynamicBackup().awaited(missed, "abc") == ["a", "b", "c"]


def test_all_are_waited_for_where_little_is_known_and_every_eighth_round() -> None:
    late = {"a": 0.0, "b": 0.0, "c": 20.0}
    assert DynamicBackup().awaited(history(**late), "abc") == ["a", "b"]
    assert DynamicBackup().awaited(history(RETENTION - 1, **late), "abc") == ["a", "b", "c"]
    assert DynamicBackup().awaited(history(last=23, **late), "abc") == ["a", "b", "c"]
    assert DynamicBackup().awaited(history(**late), "abn") == ["a", "b", "n"], "n has just come"
    old = [replace(one, timings=()) for one in history(**late)]
    assert DynamicBackup().awaited(old, "abc") == ["a", "b", "c"], "the ledger is older than timings are"


# What the hub measures


def test_a_record_tells_how_late_each_contribution_came_and_the_seconds_of_a_step() -> None:
    made = Ledger(replace(TERMS, grace=2.0), CHARTER, 0.0)
    come(made, "a", "b", "c")

    def offer(site: str, round: int, now: float) -> Answer:
        sent = replace(own(site, round), previous=made.closed[0].key, steps=20)
        return made.contribute(sent, sent.life, now)

    offer("a", 1, 5.0)
    offer("b", 1, 5.5)
    (first,) = close(made, 7.0)
    assert first.timings == (Timing("a", 1, 0.0), Timing("b", 1, 0.5))
    assert offer("c", 1, 9.0) is Answer.LATE
    assert offer("b", 1, 9.0) is Answer.LATE, "it was heard before, and counted"
    offer("a", 2, 15.0)
    (second,) = close(made, 17.0)
    # A step of a took half a second: 10 s for 20 of them.
    assert second.timings == (Timing("a", 2, 0.0, 0.5), Timing("c", 1, 4.0))
    assert Record.from_bytes(second.to_bytes()) == second


def test_of_what_came_to_an_earlier_start_of_the_hub_no_time_is_told() -> None:
    before = replace(own("a"), steps=20)
    made = Ledger(TERMS, CHARTER, 1000.0, contributions=[before])
    come(made, "a", "b", now=1000.0)
    made.contribute(replace(own("b"), steps=20), life(), 1001.0)
    (first,) = close(made, 1001.0)
    assert len(first.counted) == 2
    assert first.timings == ()


# In the charter


def charter_of(quorum: int | ChosenQuorum) -> Charter:
    return Charter("run", replace(TERMS, quorum=quorum), {"mixing": "0.5"}, ((("w", "(2,)"),),), ((),), {}, "5f")


def test_a_quorum_stands_in_the_charter_with_its_arguments() -> None:
    assert chosen(DynamicBackup(0.25)) == ChosenQuorum("lightning_sdiloco.DynamicBackup", {"least": 0.25})
    charter = charter_of(chosen(DynamicBackup(0.25)))
    read = Charter.from_bytes(charter.to_bytes())
    assert read == charter
    assert quorum_of(read.terms.quorum) == DynamicBackup(0.25)
    assert charter.differences(charter_of(2)) == [
        "terms.quorum.class_path is lightning_sdiloco.DynamicBackup here and missing there",
        "terms.quorum.init_args.least is 0.25 here and missing there",
        "terms.quorum is missing here and 2 there",
    ]
    # A number is written as it always was.
    assert json.loads(charter_of(2).to_bytes())["terms"]["quorum"] == 2
    assert quorum_of(2) == All(2)


@dataclass(frozen=True)
class WithATensor(Core):
    core: Any = object()


def test_a_quorum_that_no_charter_can_hold_is_refused() -> None:
    text = json.loads(charter_of(1).to_bytes())
    values = ["DynamicBackup", {"class_path": "os"}, {"class_path": "a b.c", "init_args": {}}, {"class_path": "a.b"}]
    for value in (0, *values):
        text["terms"]["quorum"] = value
        with pytest.raises(Malformed, match="quorum"):
            Charter.from_bytes(json.dumps(text).encode())
    made: Any = type("Made", (Core,), {"__module__": "__main__"})
    for quorum, words in (
        (0, "quorum=0 is out of range: it must be at least 1"),
        (0.5, "neither a number of sites nor a Quorum"),
        (WithATensor(), "arguments that cannot stand in the charter"),
        (made(), "of a class that the hub cannot import: __main__.Made"),
    ):
        with pytest.raises(ValueError, match=words):
            Federation("hub:1", "run", "a", insecure=True, quorum=quorum)
    with pytest.raises(ValueError, match=r"least=1\.5 is out of range"):
        DynamicBackup(1.5)


# At the hub


def test_a_hub_imports_no_quorum_that_its_operator_has_not_named() -> None:
    hub = InProcessHub("run", 1)
    careful = type(hub.coordinator)("run", History(hub.journal, hub.store), 1)
    with pytest.raises(Refused, match=r"tests\.own_quorum\.Core\(core=\['a', 'b'\]\).* sdiloco hub --quorum tests"):
        careful.agree("a", charter_of(CORE))
    with pytest.raises(Refused, match="cannot be had here"):
        careful.agree("a", charter_of(replace(CORE, class_path="os.system")))
    with pytest.raises(Refused, match="least=2.0 is out of range"):
        careful.agree("a", charter_of(ChosenQuorum("lightning_sdiloco.DynamicBackup", {"least": 2.0})))
    assert careful.agree("a", charter_of(BACKUP)) == charter_of(BACKUP)
    allowed = type(hub.coordinator)("run", History(hub.journal, hub.store, Quorums(CORE.class_path)), 1)
    assert allowed.agree("a", charter_of(CORE)) == charter_of(CORE)


def test_what_an_operator_names_must_be_a_quorum_that_can_be_imported() -> None:
    for path, words in (("nowhere.Core", "cannot be imported"), ("Core", "dotted"), ("json.JSONDecoder", "no Quorum")):
        with pytest.raises(ValueError, match=words):
            Quorums(path)


def test_every_start_of_a_hub_has_the_quorum_of_the_charter() -> None:
    hub = InProcessHub("run", 1)
    found = Quorums(CORE.class_path)
    for named, quorum in ((BACKUP, DynamicBackup(0.5)), (CORE, Core(["a", "b"]))):
        hub.journal.note({"charter": charter_of(named).to_bytes()})
        first, second = (History(hub.journal, hub.store, found).ledger(now) for now in (0.0, 5.0))
        assert first.quorum == second.quorum == quorum
    with pytest.raises(ValueError, match="cannot be had here"):
        History(hub.journal, hub.store).ledger(0.0)


def test_a_round_closes_without_those_who_are_not_waited_for() -> None:
    made = Ledger(TERMS, CHARTER, 0.0, quorum=Core(["a", "b"]))
    come(made, "a", "b", "c")
    for site in "ab":
        made.contribute(own(site), life(), 1.0)
    assert [each.site for each in close(made, 1.0)[0].counted] == ["a", "b"]
    strict = Ledger(replace(TERMS, grace=2.0), CHARTER, 0.0, quorum=DynamicBackup(0.75))
    come(strict, "a", "b", "c", "d")
    strict.contribute(own("a"), life(), 1.0)
    strict.contribute(own("b"), life(), 1.0)
    assert close(strict, 9.0) == [], "two of four are fewer than three"
    strict.contribute(own("c"), life(), 9.0)
    assert len(close(strict, 9.0)) == 1, "the grace is over"


# Whatever happens

QUORUMS = st.sampled_from([1, 2, BACKUP, ChosenQuorum(BACKUP.class_path, {"least": 0.2})])


@st.composite
def cases(draw: Any) -> Case:
    sites = draw(st.integers(1, 4))
    each = st.lists(st.floats(0.3, 1.0), min_size=sites, max_size=sites)
    return Case(
        sites=sites,
        sync_every=draw(st.integers(4, 8)),
        overlap_steps=draw(st.integers(0, 3)),
        stall=draw(st.floats(0.5, 40.0)),
        share=draw(st.sampled_from([0.0, 0.1, 0.4])),
        rounds=12,
        quorum=draw(QUORUMS),
        grace=draw(st.sampled_from([0.0, 1.0, 5.0])),
        speeds=tuple(draw(each)),
        delays=tuple(4 * one for one in draw(each)),
        idles=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=25, deadline=None)
@given(cases())
def test_what_was_counted_and_what_is_pending_is_what_was_trained_and_all_hold_the_same(case: Case) -> None:
    play = Play(case).run()
    for site in play.sites:
        # What a record has counted is still in flight at a site where it has not landed.
        landed = play.counted(site.name, site.follower.fragments[0].applied.round)
        assert landed + site.pending == site.trained
    assert [len(found) for found in play.histories.values()] == [1] * len(play.histories)
    fewest = quorum_of(case.quorum).fewest(1)
    assert all(len(one.counted) >= fewest for one in play.records)


def test_the_same_records_decide_alike_at_every_hub() -> None:
    play = Play(Case(sites=4, rounds=20, share=0.2, quorum=BACKUP, delays=(0.0, 0.0, 1.0, 12.0), grace=15.0)).run()
    names = [site.name for site in play.sites]
    for end in range(RETENTION, len(play.records)):
        past = play.records[end - RETENTION : end]
        read = [Record.from_bytes(one.to_bytes()) for one in past]
        awaited = DynamicBackup().awaited(past, names)
        assert awaited == DynamicBackup().awaited(read, names[::-1])
    assert awaited == names[:3] or play.records[-1].round % RETENTION == RETENTION - 1
