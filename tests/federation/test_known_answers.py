"""Known answers of a hub, a quorum and a site: messages and times. The simulation
shows that the rules keep their promises together.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from lightning_sdiloco import DynamicBackup, Federation
from lightning_sdiloco.algorithm.guard import NOT_FINITE
from lightning_sdiloco.errors import AgreementError, ExchangeError, Malformed, Refused
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.ledger import Answer, Founding, Ledger
from lightning_sdiloco.federation.memory import InProcessHub
from lightning_sdiloco.federation.messages import (
    Call,
    Contribution,
    Heartbeat,
    Hello,
    LeftOut,
    Payload,
    Position,
    Record,
    RoundId,
    Standing,
    StateHeader,
    Timing,
    Welcome,
)
from lightning_sdiloco.federation.quorum import All, built_in, chosen, imported
from lightning_sdiloco.federation.remote import RecordQueue
from lightning_sdiloco.federation.run_config import (
    RETENTION,
    SNAPSHOT_EVERY,
    ChosenQuorum,
    RunConfig,
    Terms,
)
from tests.own_quorum import Core

TERMS = Terms(fragments=1, sync_every=20, overlap_steps=3, grace=2.0, lease=10.0)
RUN_CONFIG = "00" * 32
DIGEST = 7
STEPS = 30
BACKUP = ChosenQuorum("lightning_sdiloco.DynamicBackup", {"least": 0.5})
CORE = ChosenQuorum("tests.own_quorum.Core", {"core": ["a", "b"]})


def incarnation(number: int = 1) -> str:
    return f"{number:016x}"


def contribution(
    site: str = "a",
    round: int = 1,
    *,
    weight: int = 100,
    digest: int = DIGEST,
    born: int = 1,
    **fields: Any,
) -> Contribution:
    """A contribution of the incarnation with the number `born`."""
    payload = Payload(f"{ord(site[0]):02x}{round:02x}{born:02x}" + "0" * 58, 8)
    return Contribution(
        0, round, site, incarnation(born), RUN_CONFIG, weight, digest, (payload,), **fields
    )


A = contribution("a")
B = contribution("b")
C = contribution("c")
# Other outer parameters, and values that are not finite.
OTHER_B = contribution("b", digest=8)
OTHER_C = contribution("c", digest=8)
INFINITE_B = contribution("b", finite=False)


def record(
    round: int, *counted: Contribution, previous: str = RUN_CONFIG, final: bool = False
) -> Record:
    counted = tuple(replace(sent, previous=previous) for sent in counted)
    return Record(round - 1, 0, round, previous, counted, final=final)


def snapshot(*records: Record, digest: int = DIGEST) -> StateHeader:
    position = records[-1].position if records else Position(0, RUN_CONFIG)
    return StateHeader((position,), (digest,))


def chain(length: int) -> list[Record]:
    records: list[Record] = []
    previous = RUN_CONFIG
    for number in range(1, length + 1):
        records.append(record(number, contribution("b", number), previous=previous))
        previous = records[-1].key
    return records


RECORDS = chain(30)

# A hub


def hello(ledger: Ledger, site: str, born: int = 1, now: float = 0.0) -> Welcome:
    message = Hello("run", site, incarnation(born), RUN_CONFIG, tuple(ledger.closed))
    return ledger.hello(message, now)


def heartbeat(
    ledger: Ledger, site: str, now: float, born: int = 1, applied: int | None = None
) -> None:
    rounds = tuple(closed.round if applied is None else applied for closed in ledger.closed)
    ledger.heartbeat(Heartbeat(site, incarnation(born), True, rounds), now)


def join(ledger: Ledger, sites: str, now: float = 0.0, born: int = 1) -> None:
    for site in sites:
        hello(ledger, site, born, now)
        heartbeat(ledger, site, now, born)


def ledger_of(sites: str, quorum: Any = None, **changes: Any) -> Ledger:
    choice = {} if quorum is None else {"quorum": quorum}
    ledger = Ledger(replace(TERMS, **changes), RUN_CONFIG, 0.0, **choice)
    join(ledger, sites)
    return ledger


def started(records: Sequence[Record] = (), now: float = 0.0, **durable: Any) -> Ledger:
    """A ledger of a hub that was started again."""
    return Ledger(TERMS, RUN_CONFIG, now, records, **durable)


def offer(ledger: Ledger, *contributions: Contribution, now: float = 1.0) -> list[Answer]:
    """Offers contributions that rest on what is closed."""
    answers = []
    for sent in contributions:
        based = replace(sent, previous=ledger.closed[0].key)
        answers.append(ledger.contribute(based, sent.incarnation, now))
    return answers


def append(ledger: Ledger, records: Iterable[Record]) -> None:
    for closed in records:
        ledger.append(closed)


def close(ledger: Ledger, now: float = 1.0) -> list[str]:
    """Closes what is due; returns the names that count in each round."""
    records = ledger.due(now)
    append(ledger, records)
    return list(map(names_in, records))


def names_in(closed: Record) -> str:
    return "".join(sent.site for sent in closed.counted)


@pytest.mark.parametrize(
    ("quorum", "sites", "arrivals", "time", "counted"),
    [
        (All(1), "ab", ((1.0, B),), 2.99, []),  # a is waited for,
        (All(1), "ab", ((1.0, B),), 3.0, ["b"]),  # until the grace is over,
        (All(1), "ab", ((1.0, B), (2.0, A)), 2.0, ["ab"]),  # and counts by its name
        (All(2), "ab", ((1.0, A),), 9.0, []),
        # It makes the quorum all the same.
        (All(2), "ab", ((1.0, A), (9.0, INFINITE_B)), 9.0, ["a"]),
        (Core(["a", "b"]), "abc", ((1.0, A), (1.0, B)), 1.0, ["ab"]),
        (DynamicBackup(0.75), "abcd", ((1.0, A), (1.0, B)), 9.0, []),
        (DynamicBackup(0.75), "abcd", ((1.0, A), (1.0, B), (9.0, C)), 9.0, ["abc"]),
        (All(1), "abc", ((1.0, A), (1.0, OTHER_B), (1.0, C)), 1.0, ["ac"]),
        # A tie: it waits for a witness.
        (All(1), "ab", ((1.0, A), (1.0, OTHER_B)), 5.0, []),
        (All(1), "abc", ((1.0, A), (5.0, OTHER_B), (6.0, OTHER_C)), 6.0, ["bc"]),
    ],
)
def test_a_round_closes_with_the_quorum_of_awaited_sites_and_with_the_majority(
    quorum: Any, sites: str, arrivals: Any, time: float, counted: list[str]
) -> None:
    ledger = ledger_of(sites, quorum=quorum)
    for now, sent in arrivals:
        assert offer(ledger, sent, now=now) == [Answer.OPEN]
    assert ledger.due(time) == ledger.due(time), "asking changes nothing"
    assert close(ledger, time) == counted


def test_a_contribution_is_taken_once_and_late_afterwards_and_a_call_may_be_skipped() -> None:
    ledger = ledger_of("ab")
    assert offer(ledger, A, A) == [Answer.OPEN, Answer.KNOWN]
    assert ledger.calls() == [Call(0, 1)]
    assert close(ledger) == []
    assert ledger.next_due(1.5) == 3.0
    ledger.skip("b", incarnation(), Call(0, 1), 1.1)
    assert close(ledger, 1.1) == ["a"]
    assert offer(ledger, B) == [Answer.LATE]
    with pytest.raises(Refused, match="builds on records that this hub lacks"):
        offer(ledger, contribution("a", round=3))
    with pytest.raises(Refused, match="different history"):
        ledger.contribute(replace(contribution("a", 2), previous="11" * 32), incarnation(), 1.0)


@pytest.mark.parametrize(("sender", "closed"), [(1, 0), (2, 1)])
def test_a_site_without_a_heartbeat_since_its_hello_is_awaited_from_its_launch_on(
    sender: int, closed: int
) -> None:
    ledger = ledger_of("a")
    hello(ledger, "b", sender)
    ledger.contribute(B, incarnation(sender), 1.0)
    offer(ledger, A)
    assert close(ledger) == ["ab"]
    offer(ledger, contribution("a", round=2), now=1.1)
    assert len(close(ledger, 1.2)) == closed


def test_lasting_ties_and_non_finite_values_are_errors_and_evicted_sites_stay_out() -> None:
    ledger = ledger_of("abc")
    offer(ledger, A, OTHER_B, C)
    (majority,) = ledger.due(1.0)
    assert majority.left_out == (("b", "other outer parameters", 0.0),)
    ledger = ledger_of("ab")
    offer(ledger, A, OTHER_B)
    assert close(ledger, 5.0) == []
    with pytest.raises(
        AgreementError, match="a with digest 0000000000000007; b with digest 0000000000000008"
    ):
        close(ledger, 15.0)
    ledger.evict("b")
    with pytest.raises(Refused, match="b was evicted from the run. Ask the operator"):
        heartbeat(ledger, "b", 15.0)
    assert close(ledger, 15.0) == ["a"]
    with pytest.raises(Refused, match="evicted"):
        join(ledger, "b", now=15.0)
    join(ledger, "b", now=15.0, born=2)
    ledger.leave("b", incarnation(2), 1.0)
    offer(ledger, contribution("a", 2, finite=False), now=15.0)
    with pytest.raises(AgreementError, match="No site has finite values in fragment 0: a"):
        close(ledger, 50.0)


def test_a_name_is_in_use_while_its_process_lives_and_is_told_its_launches() -> None:
    ledger = ledger_of("a")
    with pytest.raises(Refused, match="in use by a running process"):
        join(ledger, "a", now=5.0, born=2)
    ledger.leave("a", incarnation(1), 1.0)
    join(ledger, "a", now=5.0, born=2)
    with pytest.raises(Refused, match="has not said hello"):
        heartbeat(ledger, "a", 6.0, born=1)
    with pytest.raises(Refused, match="has not said hello"):
        offer(ledger, contribution("x"))
    ledger.leave("a", incarnation(1), 1.0)
    assert ledger.present(6.0) == ["a"]
    assert ledger.contribute(A, incarnation(2), 6.0) is Answer.OPEN, (
        "a flight of the incarnation before"
    )
    second = contribution("a", born=2)
    assert ledger.contribute(second, incarnation(2), 6.0) is Answer.KNOWN
    join(ledger, "a", now=16.0, born=3)  # after the lease of the one before
    running = ledger_of("ab")
    offer(running, A, INFINITE_B)
    for ledger in (running, started(now=100.0, contributions=[A])):
        ledger.leave("a", incarnation(1), 1.0)
        assert hello(ledger, "a", 2, 101.0).standing == (Standing(0, incarnation(1)),)
        assert hello(ledger, "b", 1, 101.0).standing == (), "it cannot count"


def test_a_hub_that_comes_back_goes_on_where_it_was_and_refuses_a_damaged_ledger() -> None:
    before = ledger_of("ab")
    offer(before, A, B)
    records = before.due(1.0)
    close(before)
    open_launch = replace(contribution("a", 2), previous=before.closed[0].key)
    after = started(records, 100.0, contributions=[open_launch])
    assert after.seq == 1
    assert after.closed == before.closed
    assert close(after, 101.9) == []
    join(after, "b", now=101.0)
    offer(after, contribution("b", 2), now=101.9)
    assert close(after, 101.9) == ["ab"]
    first, second, *_ = RECORDS
    for damaged in ([second], [first, replace(second, previous=RUN_CONFIG)], [first, first]):
        with pytest.raises(AgreementError, match="does not follow"):
            started(damaged)


def test_after_a_pause_of_the_hub_sites_from_before_it_are_awaited_for_a_lease() -> None:
    ledger = ledger_of("abc")
    offer(ledger, A, B)
    append(ledger, ledger.due(3.0))
    ledger.evict("c")
    ledger.leave("b", incarnation(), 90.0)  # its connection broke during the pause
    ledger.resume(100.0)
    assert ledger.present(100.0) == ["a", "b"]
    # Or breaks now, as that of any site that has waited for an answer.
    ledger.leave("a", incarnation(), 100.1)
    join(ledger, "a", now=100.2)
    offer(ledger, contribution("a", 2), now=100.3)
    assert close(ledger, 100.3) == []
    join(ledger, "b", now=101.0)
    offer(ledger, contribution("b", 2), now=101.1)
    assert close(ledger, 101.1) == ["ab"]
    ledger.leave("b", incarnation(), 120.0)
    assert ledger.present(105.0) == ["a"], "the while is over"


def test_a_lost_quorum_names_the_sites_that_are_missing_and_what_to_do() -> None:
    ledger = ledger_of("ab", quorum=All(2))
    offer(ledger, A, B)
    close(ledger)
    assert ledger.lost_quorum(1.0) is None
    heartbeat(ledger, "a", 5.0)
    lost = ledger.lost_quorum(11.0)
    assert lost is not None
    assert "only these are present: a. Missing: b (silent)" in lost
    assert "--quorum" in lost
    assert ledger.lost_quorum(99.0) is None, "nobody is there that waits"
    assert ledger_of("a", quorum=DynamicBackup(1.0)).lost_quorum(1.0) is None


def test_a_joiner_gets_the_most_advanced_state_or_a_snapshot_and_never_begins_afresh() -> None:
    ledger = ledger_of("abc")
    append(ledger, RECORDS[:2])
    for site, applied in (("a", 1), ("b", 2), ("c", 0)):
        heartbeat(ledger, site, 1.0, applied=applied)
    assert ledger.source("joiner", 2.0) == "b"
    assert ledger.source("joiner", 2.0, without=["b"]) == "a"
    assert ledger.source("joiner", 50.0) is None
    first = snapshot()
    tenth = snapshot(*RECORDS[:10])
    ledger = started(RECORDS[:10], snapshots=[first])
    assert ledger.source("joiner", 50.0) == first
    assert ledger.kept_from == (1,)
    ledger.snapshots.add(tenth)
    assert ledger.source("joiner", 50.0) == first, "nobody has said yet that the new one is right"
    append(ledger, RECORDS[10:])
    assert ledger.snapshots.headers == [tenth]
    assert ledger.kept_from == (11,), "payloads since are kept"
    ledger = started(RECORDS[:1], snapshots=[first, snapshot(*RECORDS[:1], digest=8)])
    ledger.append(RECORDS[1])
    assert ledger.snapshots.headers == [first], "the wrong one is dropped"
    assert not ledger.snapshots.is_due([SNAPSHOT_EVERY - 1])
    assert ledger.snapshots.is_due([SNAPSHOT_EVERY])


EXACT_A = contribution("a", exact=True)
IDLE_A = contribution("a", exact=True, weight=0)
IDLE_B = contribution("b", exact=True, weight=0)


@pytest.mark.parametrize(
    ("ends", "contributions", "counted", "is_final"),
    [
        (True, (EXACT_A, B), "ab", False),
        (True, (B, EXACT_A), "ab", False),
        (True, (EXACT_A, INFINITE_B), "a", True),
        # Sites that have trained nothing since are in it, too.
        (True, (IDLE_A, IDLE_B), "ab", True),
        (False, (EXACT_A, IDLE_B), "ab", False),
    ],
)
def test_a_round_is_the_last_where_it_is_to_be_and_all_that_may_count_in_it_is_exact(
    ends: bool, contributions: Any, counted: str, is_final: bool
) -> None:
    ledger = ledger_of("ab")
    if ends:
        ledger.end()
    offer(ledger, *contributions)
    assert [closed.final for closed in ledger.due(1.0)] == [is_final]
    assert close(ledger) == [counted]
    expects_last_round = ends and not is_final
    assert ledger.calls() == ([Call(0, 2, final=True)] if expects_last_round else [])


def offer_norms(
    ledger: Ledger, round: int, norms: dict[str, float], rate: float = 0.0, **steps: int
) -> None:
    """Offers outer gradients of these norms, of sites that have trained 8 steps, or so many."""
    for site, norm in norms.items():
        count = steps.get(site, 8)
        path = rate * count
        offer(ledger, contribution(site, round, norm_squared=norm**2, steps=count, path=path))


def after_four_rounds(norms: dict[str, float], **changes: Any) -> tuple[Ledger, list[Record]]:
    """A ledger whose sites have counted in four rounds with outer gradients of these norms, and
    its records.
    """
    ledger = ledger_of("".join(norms), **changes)
    records = list[Record]()
    for number in range(1, 5):
        offer_norms(ledger, number, norms)
        records += ledger.due(1.0)
        ledger.append(records[-1])
    return ledger, records


def test_a_site_too_long_for_its_own_past_is_left_out_even_by_a_restarted_hub() -> None:
    # Unequal data: a site that is always longer than the others counts from the first round.
    before, records = after_four_rounds({"a": 1.0, "b": 50.0, "c": 2.0})
    assert [closed.left_out for closed in records] == [()] * 4
    offer_norms(before, 5, {"a": 1.0, "b": 1250.0, "c": 2.0})
    records += before.due(1.0)
    assert records[-1].left_out == (LeftOut("b", "too long", 25.0),)
    before.append(records[-1])
    for ledger in (before, started(records)):
        join(ledger, "ac")
        # Two are compared with their own past; a single one is so only by far more.
        offer_norms(ledger, 6, {"a": 1.0, "c": 22.0})
        assert close(ledger, 9.0) == ["a"]
        offer_norms(ledger, 7, {"c": 22.0})
        assert close(ledger, 9.0) == ["c"]


def offer_buffers(ledger: Ledger, round: int, **sizes: float) -> Record:
    """Closes a round of sites with buffers of these sizes; returns its record."""
    for site, size in sizes.items():
        sent = contribution(site, round, norm_squared=1.0, steps=8)
        offer(ledger, replace(sent, buffers=size))
    (closed,) = ledger.due(1.0)
    ledger.append(closed)
    return closed


def test_buffers_too_large_for_their_own_past_are_left_out_even_by_a_restarted_hub() -> None:
    before = ledger_of("ab")
    records = [offer_buffers(before, number, a=1.0, b=30.0) for number in range(1, 5)]
    assert [closed.left_out for closed in records] == [()] * 4
    for ledger in (before, started(records)):
        join(ledger, "ab")
        closed = offer_buffers(ledger, 5, a=1.0, b=6000.0)
        assert closed.left_out == (LeftOut("b", "buffers too large", 200.0),)
        assert names_in(closed) == "ab"
        assert closed.without_buffers == {"b"}
        closed = offer_buffers(ledger, 6, a=NOT_FINITE, b=30.0)
        assert closed.left_out == (LeftOut("a", "buffers not finite"),)
        assert closed.without_buffers == set()


@pytest.mark.parametrize(
    ("guard", "norms", "steps", "counted"),
    [
        (5.0, {"a": 1.0, "b": 40.0, "c": 1.0}, 80, "abc"),
        (5.0, {"a": 1.0, "b": 60.0, "c": 1.0}, 80, "ac"),
        (5.0, {"a": 1.0, "b": 6.0, "c": 1.0}, 8, "ac"),
        (None, {"a": 1.0, "b": 6.0, "c": 1.0}, 8, "abc"),
        (5.0, {"a": 9.0, "b": 40.0, "c": 30.0}, 8, "abc"),
    ],
)
def test_a_site_that_trained_longer_may_be_longer_and_nobody_is_left_out_if_all_are(
    guard: float | None, norms: dict[str, float], steps: int, counted: str
) -> None:
    """Nor when the guard is off."""
    ledger, _ = after_four_rounds(dict.fromkeys("abc", 1.0), guard=guard)
    offer_norms(ledger, 5, norms, b=steps)
    assert close(ledger) == [counted]


def test_a_restart_of_the_learning_rate_at_one_site_leaves_nobody_out() -> None:
    ledger = ledger_of("ab")
    for number in range(1, 9):
        offer_norms(ledger, number, {"a": 0.01, "b": 0.01}, rate=1e-4)
        assert close(ledger) == ["ab"]
    offer_norms(ledger, 9, {"a": 0.44}, rate=1e-2)
    offer_norms(ledger, 9, {"b": 0.01}, rate=1e-4)
    assert close(ledger) == ["ab"]


def test_a_round_of_contributions_that_are_far_too_long_waits_for_another_site() -> None:
    ledger, _ = after_four_rounds({"a": 1.0, "b": 1.0})
    offer_norms(ledger, 5, {"b": 1e5})
    with pytest.raises(
        AgreementError, match=r"round 5 of fragment 0 is far too long: b\. .* evict"
    ):
        ledger.due(9.0)
    offer_norms(ledger, 5, {"a": 1.0})
    assert close(ledger, 9.0) == ["a"]


def test_the_first_round_waits_for_all_founders_and_for_the_grace_after_that() -> None:
    ledger = ledger_of("a")
    hello(ledger, "b")
    offer(ledger, A)
    assert ledger.due(2.9) == []
    assert ledger.due(9.0) == [], "b fetches a state"
    join(ledger, "ab", 9.0)
    assert ledger.next_due(9.0) == 9.0 + TERMS.grace
    assert ledger.due(9.0 + TERMS.grace - 0.1) == []
    assert close(ledger, 9.0 + TERMS.grace) == ["a"]
    hello(ledger, "c", now=11.0)
    offer_norms(ledger, 2, {"a": 1.0, "b": 1.0})
    assert close(ledger, 11.0) == ["ab"], "later rounds wait for no site that does not follow"


def test_the_first_round_does_not_wait_for_a_founder_whose_lease_has_ended() -> None:
    ledger = ledger_of("a")
    hello(ledger, "b")
    offer(ledger, A)
    heartbeat(ledger, "a", TERMS.lease)
    assert close(ledger, TERMS.lease + 0.1) == ["a"]


def test_a_run_is_founded_once_by_sites_with_one_run_config() -> None:
    run_config = run_config_of(1)
    founding = Founding(2)
    first = Hello("run", "b", incarnation(), run_config.key, ())
    second = replace(first, site="a")
    founding.hello(first, run_config)
    with pytest.raises(ValueError, match=r"settings\.mixing is 0\.6 here and 0\.5 there"):
        founding.hello(second, replace(run_config, settings={"mixing": "0.6"}))
    assert (founding.missing, founding.founder) == (1, "b")
    founding.hello(second, run_config)
    # A site that comes later founds nothing.
    assert (founding.missing, founding.founder, founding.run_config) == (0, "b", run_config)
    founding.gone("b")
    assert (founding.missing, founding.founder) == (1, "a")


# A quorum


def history(rounds: int = RETENTION, last: int = 20, **late: float) -> list[Record]:
    """Rounds of 30 s, in which each site is always as late."""
    in_time = [site for site, seconds in late.items() if seconds == 0.0]
    records = []
    for number in range(last - rounds + 1, last + 1):
        counted = [contribution(site, number, steps=STEPS) for site in in_time]
        timings = tuple(Timing(site, number, seconds, 1.0) for site, seconds in late.items())
        records.append(replace(record(number, *counted), timings=timings))
    return records


@pytest.mark.parametrize("sites", [3, 4, 8])
def test_dynamic_backup_leaves_out_sites_later_than_the_round_over_the_others(sites: int) -> None:
    *in_time, last = names = [f"s{site}" for site in range(sites)]
    threshold = STEPS / (sites - 1)
    for late, awaited in ((threshold - 0.01, names), (threshold + 0.01, in_time)):
        past = history(**dict.fromkeys(in_time, 0.0), **{last: late})
        assert DynamicBackup(least=0.1).awaited(past, names) == awaited


def test_dynamic_backup_awaits_its_share_of_the_sites_at_least() -> None:
    past = history(a=0.0, b=0.0, c=20.0)
    long_ago = Timing("d", past[0].round, 0.0)
    past[0] = replace(past[0], timings=(*past[0].timings, long_ago))
    assert DynamicBackup(0.5).awaited(past, "dcba") == ["a", "b"]
    assert DynamicBackup(0.75).awaited(past, "abcd") == ["a", "b", "c"]
    assert [DynamicBackup(0.5).fewest(sites) for sites in (1, 2, 3, 8)] == [1, 1, 2, 4]
    assert DynamicBackup(0.1).fewest(30) == 3


LATE = {"a": 0.0, "b": 0.0, "c": 20.0}


def rarely_late() -> list[Record]:
    """Rounds of which every third one lacks c."""
    records = history(a=0.0, b=0.0, c=0.0)
    for index, closed in enumerate(records):
        if closed.round % 3 == 0:
            records[index] = replace(closed, timings=closed.timings[:2])
    return records


def without_timings() -> list[Record]:
    return [replace(closed, timings=()) for closed in history(**LATE)]


@pytest.mark.parametrize(
    ("past", "sites", "awaited"),
    [
        pytest.param(rarely_late(), "abc", "abc", id="a stall now and then leaves nobody out"),
        pytest.param(history(**LATE), "abc", "ab", id="c is late"),
        pytest.param(history(RETENTION - 1, **LATE), "abc", "abc", id="little is known"),
        pytest.param(history(last=23, **LATE), "abc", "abc", id="every eighth round waits for all"),
        pytest.param(history(**LATE), "abn", "abn", id="n has just come"),
        pytest.param(without_timings(), "abc", "abc", id="older than timings are"),
    ],
)
def test_dynamic_backup_awaits_all_sites_unless_it_knows_that_one_is_late(
    past: list[Record], sites: str, awaited: str
) -> None:
    assert "".join(DynamicBackup().awaited(past, sites)) == awaited


def test_a_record_states_the_delay_of_each_contribution_and_the_seconds_of_a_step() -> None:
    launch_a = contribution("a", steps=20)
    launch_b = contribution("b", steps=20)
    launch_c = contribution("c", steps=20)
    ledger = ledger_of("abc")
    assert offer(ledger, launch_a, now=5.0) == [Answer.OPEN]
    assert offer(ledger, launch_b, now=5.5) == [Answer.OPEN]
    (first,) = ledger.due(7.0)
    close(ledger, 7.0)
    assert first.timings == (Timing("a", 1, 0.0), Timing("b", 1, 0.5))
    # That of b was heard before, and counted.
    assert offer(ledger, launch_c, launch_b, now=9.0) == [Answer.LATE] * 2
    offer(ledger, contribution("a", 2, steps=20), now=15.0)
    (second,) = ledger.due(17.0)
    # A step of a took half a second: 10 s for 20 of them.
    assert second.timings == (Timing("a", 2, 0.0, 0.5), Timing("c", 1, 4.0))
    assert Record.from_bytes(second.to_bytes()) == second
    restarted = started(now=1000.0, contributions=[launch_a])
    join(restarted, "ab", now=1000.0)
    offer(restarted, launch_b, now=1001.0)
    (first,) = restarted.due(1001.0)
    assert len(first.counted) == 2
    assert first.timings == (), "one came to an earlier start of the hub"


def run_config_of(quorum: int | ChosenQuorum) -> RunConfig:
    terms = replace(TERMS, quorum=quorum)
    fragments = ((("w", "(2,)"),),)
    return RunConfig("run", terms, {"mixing": "0.5"}, fragments, ((),), {}, "5f")


@dataclass(frozen=True)
class WithATensor(Core):
    core: Any = object()


NO_QUORUMS = [
    0,
    "DynamicBackup",
    {"class_path": "os"},
    {"class_path": "a b.c", "init_args": {}},
    {"class_path": "a.b"},
]


def test_a_quorum_stands_in_the_run_config_with_its_arguments_or_is_refused() -> None:
    backup = chosen(DynamicBackup(0.25))
    assert backup == ChosenQuorum("lightning_sdiloco.DynamicBackup", {"least": 0.25})
    run_config = run_config_of(backup)
    assert RunConfig.from_bytes(run_config.to_bytes()) == run_config
    difference = "terms.quorum.init_args.least is 0.25 here and missing there"
    assert difference in run_config.differences(run_config_of(2))
    text = json.loads(run_config_of(2).to_bytes())
    for quorum in NO_QUORUMS:
        text["terms"]["quorum"] = quorum
        with pytest.raises(Malformed, match="quorum"):
            RunConfig.from_bytes(json.dumps(text).encode())
    of_main: Any = type("Made", (Core,), {"__module__": "__main__"})
    for make, message in (
        (lambda: 0, "quorum=0 is out of range: it must be at least 1"),
        (lambda: 0.5, "neither a number of sites nor a Quorum"),
        (WithATensor, "arguments that the run config cannot store"),
        (of_main, "has a class that the hub cannot import: __main__.Made"),
        (lambda: DynamicBackup(1.5), r"least=1\.5 is out of range"),
    ):
        with pytest.raises(ValueError, match=message):
            Federation("run", "hub:1", "a", insecure=True, quorum=make())


def test_a_hub_imports_only_a_quorum_named_by_its_operator_and_starts_with_the_runs() -> None:
    hub = InProcessHub("run", 1)
    allows_core = partial(built_in, named=CORE.class_path)
    careful = Coordinator("run", hub.journal, hub.store, 1, find_quorum=built_in)
    allowing = Coordinator("run", hub.journal, hub.store, 1, find_quorum=allows_core)
    for quorum, message in (
        (CORE, r"tests\.own_quorum\.Core\(core=\['a', 'b'\]\).* sdiloco hub --quorum tests"),
        (replace(CORE, class_path="os.system"), "is not available here"),
        (replace(BACKUP, init_args={"least": 2.0}), "least=2.0 is out of range"),
    ):
        with pytest.raises(Refused, match=message):
            careful.agree("a", run_config_of(quorum))
    for path, message in (
        ("nowhere.Core", "cannot be imported"),
        ("Core", "dotted"),
        ("json.JSONDecoder", "not a Quorum"),
    ):
        with pytest.raises(ValueError, match=message):
            imported(path)
    for coordinator, find, quorum, expected in (
        (careful, built_in, BACKUP, DynamicBackup()),
        (allowing, allows_core, BACKUP, DynamicBackup()),
        (allowing, allows_core, CORE, Core(["a", "b"])),
    ):
        run_config = run_config_of(quorum)
        assert coordinator.agree("a", run_config) == run_config
        hub.journal.note({"run_config": run_config.to_bytes()})
        restarted = Coordinator("run", hub.journal, hub.store, find_quorum=find)
        assert restarted.ledger.quorum == expected
    with pytest.raises(ValueError, match="is not available here"):
        Coordinator("run", hub.journal, hub.store)


# A site


def newcomer(born: int = 1) -> Follower:
    return Follower(TERMS, RUN_CONFIG, "a", incarnation(born))


def follower_of(steps: int = 0, flies: bool = False) -> Follower:
    """One that has founded a run, reaches the hub, has trained, and may have launched that and
    trained on.
    """
    follower = newcomer()
    follower.found([DIGEST])
    follower.reachable = True
    train(follower, steps)
    if flies:
        assert launched(follower, steps) is not None
        train(follower, 3)
    return follower


def train(follower: Follower, steps: int) -> None:
    for _ in range(steps):
        follower.trained(5)


def launched(
    follower: Follower, step: int, digest: int = DIGEST, **fields: Any
) -> Contribution | None:
    begun = follower.begin(0, step)
    return follower.complete(replace(begun, digest=digest, payloads=A.payloads, **fields))


def learn_and_land(follower: Follower, records: Iterable[Record], after: int = DIGEST) -> None:
    for closed in records:
        follower.learn(closed)
        follower.land(closed, DIGEST, after)


def welcome(follower: Follower, closed: Record, **fields: Any) -> None:
    follower.welcome(Welcome((closed.position,), (1,), **fields))


def test_wrong_values_are_found_at_the_launch_at_the_landing_and_in_a_checkpoint() -> None:
    state = follower_of().state_dict()
    with pytest.raises(ValueError, match="checkpoint is damaged"):
        newcomer(2).load_state_dict(state, [DIGEST + 1])
    follower = follower_of(20)
    sent = launched(follower, 20, finite=False, norm_squared=float("nan"))
    assert sent is not None
    assert sent.norm_squared == 0
    action = follower.land(RECORDS[0], DIGEST, 8)
    assert action is MergeAction.TAKE, "a flight that is not finite"
    follower = follower_of(20)
    assert launched(follower, 20, digest=DIGEST + 1) is None
    assert not follower.follows
    assert follower.fragments[0].steps == 0
    follower = follower_of(20, flies=True)
    wrong = record(1, OTHER_B)
    assert follower.land(wrong, DIGEST, 9) is MergeAction.REFUSE
    assert follower.wants_state
    assert follower.fragments[0].applied.round == 0
    follower.found([DIGEST])
    with pytest.raises(AgreementError, match="cannot be restored"):
        follower.land(wrong, DIGEST, 9)


def test_a_call_is_answered_with_a_quarter_of_the_steps_and_skipped_below() -> None:
    follower = follower_of(4)
    follower.hear(Call(0, 1))
    assert follower.launches(4) == []
    assert follower.skips() == [Call(0, 1)]
    assert follower.skips() == []
    train(follower, 4)
    assert follower.launches(8) == [], "it stays skipped"
    learn_and_land(follower, RECORDS[:1], after=8)
    follower.hear(Call(0, 2))
    assert follower.skips() == []
    assert follower.launches(8) == [0]
    follower.learn(RECORDS[1])
    assert follower.launches(8) == [], "the round is known to be closed"


def test_training_waits_within_the_grace_for_a_long_flight_and_never_without_a_hub() -> None:
    """The flight takes nearly `sync_every` steps."""
    follower = follower_of(20, flies=True)
    assert follower.waits(38, 0.0) == 0.0
    assert follower.waits(39, 100.0) == 3.0
    assert follower.waits(39, 102.5) == 0.5
    assert follower.waits(39, 103.0) == 0.0
    assert not follower.waits(45, 200.0), "it has waited once"
    follower = follower_of(20, flies=True)
    follower.lose(100.0)
    assert not follower.waits(60, 101.0)
    follower.lose(3700.0)
    with pytest.raises(ExchangeError, match="patience=3600 s"):
        follower.lose(3700.1)


def test_a_hub_with_fewer_or_other_records_is_refused_and_records_come_in_any_order() -> None:
    first, second, third, *_ = RECORDS
    follower = follower_of()
    for closed in (second, first, second):
        follower.learn(closed)
    assert follower.due(0) == [first]
    for parted in (replace(third, previous=RUN_CONFIG), replace(second, final=True)):
        with pytest.raises(AgreementError, match="histories have diverged"):
            follower.learn(parted)
    learn_and_land(follower, (first, second, third))
    welcome(follower, third)
    with pytest.raises(AgreementError, match="has 2 rounds of fragment 0, but a has applied 3"):
        welcome(follower, second)
    with pytest.raises(AgreementError, match="histories have diverged"):
        welcome(follower, replace(third, final=True))
    behind = follower_of()
    welcome(behind, RECORDS[RETENTION - 1])
    assert behind.follows
    welcome(behind, RECORDS[RETENTION])
    assert behind.wants_state
    for closed in RECORDS[: RETENTION + 1]:
        behind.learn(closed)
    assert behind.due(0) == [first], "it follows records meanwhile"


def test_a_site_forgets_records_when_its_run_is_founded_again_without_them() -> None:
    first, second, *_ = RECORDS
    follower = follower_of()
    learn_and_land(follower, [first])
    follower.learn(second)  # and its payloads never came
    welcome(follower, first, founded_again=True)
    assert follower.lag == 0
    assert follower.follows
    assert follower.due(0) == []
    new_second = record(2, B, previous=first.key)
    follower.learn(new_second)
    assert follower.due(0) == [new_second]


def test_records_of_another_hub_that_have_not_landed_are_forgotten() -> None:
    first, second, *_ = RECORDS
    follower = follower_of()
    learn_and_land(follower, [first])
    other_second = record(2, B, previous=first.key)
    follower.learn(other_second)
    welcome(follower, second)
    assert follower.due(0) == []
    follower.learn(second)
    assert follower.due(0) == [second]
    welcome(follower, second)
    assert follower.due(0) == [second], "this hub has it"
    welcome(follower, first)
    assert follower.lag == 0, "this hub has no second round"


def test_only_the_records_that_a_rollback_has_dropped_are_forgotten() -> None:
    first, second, third, *_ = RECORDS
    follower = follower_of()
    for closed in (first, second, third):
        follower.learn(closed)
    welcome(follower, second, rolled_back=True)
    learn_and_land(follower, [first])
    assert follower.due(0) == [second]
    learn_and_land(follower, [second])
    assert follower.due(0) == [], "the third round is open again"
    new_third = record(3, B, previous=second.key)
    follower.learn(new_third)
    assert follower.due(0) == [new_third]


def test_fetches_go_on_through_a_welcome_except_of_records_that_were_rolled_back() -> None:
    first, second, *_ = RECORDS
    queue = RecordQueue()
    for closed in (first, second):
        queue.add(closed)
    assert queue.take(room=2) == [first, second]
    queue.welcome(Welcome((first.position,), (1,), rolled_back=True))
    assert queue.fetching.keys() == {first.key}
    new_second = record(2, B, previous=first.key)
    for closed in (first, new_second):
        queue.add(closed)
    assert queue.take(room=2) == [new_second]


def test_a_call_is_answered_although_a_later_round_was_called_before_a_rollback() -> None:
    first, *_ = RECORDS
    follower = follower_of(8)
    learn_and_land(follower, [first])
    follower.hear(Call(0, 4))
    welcome(follower, first, rolled_back=True)
    follower.hear(Call(0, 2))
    assert follower.launches(8) == [0]


def test_a_call_that_was_declined_before_a_rollback_is_answered_again() -> None:
    follower = follower_of(4)
    follower.hear(Call(0, 1))
    assert follower.skips() == [Call(0, 1)]
    follower.welcome(Welcome((Position.start(RUN_CONFIG),), (1,), rolled_back=True))
    assert follower.skips() == [], "no round is called yet"
    follower.hear(Call(0, 1))
    assert follower.skips() == [Call(0, 1)]
    train(follower, 4)
    follower.welcome(Welcome((Position.start(RUN_CONFIG),), (1,), rolled_back=True))
    follower.hear(Call(0, 1))
    assert follower.launches(8) == [0]


def test_a_last_round_that_was_called_before_a_rollback_is_forgotten() -> None:
    first, *_ = RECORDS
    follower = follower_of()
    follower.hear(Call(0, 2, final=True))
    welcome(follower, first, rolled_back=True)
    learn_and_land(follower, [first])
    assert follower.launches(0) == []


def test_a_round_refused_before_a_rollback_may_be_refused_once_more_after_it() -> None:
    follower = follower_of()
    wrong = record(1, OTHER_B)
    assert follower.land(wrong, DIGEST, 9) is MergeAction.REFUSE
    follower.welcome(Welcome((Position.start(RUN_CONFIG),), (1,), rolled_back=True))
    follower.found([DIGEST])
    assert follower.land(replace(wrong, final=True), DIGEST, 9) is MergeAction.REFUSE


def test_a_site_whose_hub_has_lost_payloads_asks_for_a_state_and_gives_its_own_again() -> None:
    first, second, *_ = RECORDS
    follower = follower_of(20, flies=True)
    welcome(follower, second)
    follower.learn(second, has_payloads=False)
    assert follower.follows, "the first round lands before"
    follower.learn(first, has_payloads=False)
    assert follower.wants_state
    assert follower.lacked_rounds == [RoundId(0, 1)]
    assert [sent.round for sent in follower.outstanding()] == [1]
    follower.learn(first)
    assert follower.follows
    assert follower.outstanding() == []
    follower.land(first, DIGEST, DIGEST)
    assert follower.lacked_rounds == [RoundId(0, 2)]
    # A state of before that round is of no use.
    snapshots = [snapshot(first), snapshot(first, second)]
    ledgers = [Ledger(TERMS, RUN_CONFIG, 0.0, RECORDS, snapshots=[header]) for header in snapshots]
    sources = [ledger.source("a", 0.0, beyond=follower.lacked_rounds) for ledger in ledgers]
    assert sources == [None, snapshots[1]]


def test_a_state_is_verified_against_the_records() -> None:
    follower = newcomer()
    follower.welcome(Welcome((RECORDS[11].position,), (5,)))
    for closed in RECORDS[:12]:
        follower.learn(closed)
    tenth = snapshot(*RECORDS[:10])
    for offered, digest, message in (
        (tenth, 8, "damaged"),
        (snapshot(*RECORDS[:10], digest=8), 8, "differs from the other sites"),
        (snapshot(*RECORDS[:3]), DIGEST, "later records are no longer available"),
        (StateHeader((Position(10, RUN_CONFIG),), (DIGEST,)), DIGEST, "different history"),
    ):
        with pytest.raises(Refused, match=message):
            follower.adopt(offered, [digest])
    assert follower.adopt(tenth, [DIGEST]) == {0: MergeAction.TAKE}
    assert follower.due(0) == [RECORDS[10]]
