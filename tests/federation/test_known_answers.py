"""Known answers of a hub, a quorum and a site: words and times, where the trial and its mutants
show the rules.
"""

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from lightning_sdiloco import DynamicBackup, Federation
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
    Standing,
    StateHeader,
    Timing,
    Welcome,
)
from lightning_sdiloco.federation.quorum import All, built_in, chosen, imported
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


def own(
    site: str = "a",
    round: int = 1,
    *,
    weight: int = 100,
    digest: int = DIGEST,
    born: int = 1,
    **other: Any,
) -> Contribution:
    payload = Payload(f"{ord(site[0]):02x}{round:02x}{born:02x}" + "0" * 58, 8)
    return Contribution(
        0, round, site, incarnation(born), RUN_CONFIG, weight, digest, (payload,), **other
    )


def record(
    round: int, *counted: Contribution, previous: str = RUN_CONFIG, final: bool = False
) -> Record:
    counted = tuple(replace(each, previous=previous) for each in counted)
    return Record(round - 1, 0, round, previous, counted, final=final)


def snapshot(*records: Record, digest: int = DIGEST) -> StateHeader:
    return StateHeader((records[-1].position if records else Position(0, RUN_CONFIG),), (digest,))


RECORDS: list[Record] = []
for number in range(1, 31):
    RECORDS.append(
        record(number, own("b", number), previous=RECORDS[-1].key if RECORDS else RUN_CONFIG)
    )

# A hub


def hello(made: Ledger, site: str, born: int = 1, now: float = 0.0) -> Welcome:
    return made.hello(Hello("run", site, incarnation(born), RUN_CONFIG, tuple(made.closed)), now)


def heartbeat(
    made: Ledger, site: str, now: float, born: int = 1, applied: int | None = None
) -> None:
    rounds = tuple(closed.round if applied is None else applied for closed in made.closed)
    made.heartbeat(Heartbeat(site, incarnation(born), True, rounds), now)


def come(made: Ledger, sites: str, now: float = 0.0, born: int = 1) -> None:
    for site in sites:
        hello(made, site, born, now)
        heartbeat(made, site, now, born)


def ledger(sites: str, quorum: Any = None, **changes: Any) -> Ledger:
    made = Ledger(
        replace(TERMS, **changes), RUN_CONFIG, 0.0, **({"quorum": quorum} if quorum else {})
    )
    come(made, sites)
    return made


def offer(made: Ledger, *contributions: Contribution, now: float = 1.0) -> list[Answer]:
    """Offers contributions that rest on what is closed."""
    previous = made.closed[0].key
    return [
        made.contribute(replace(each, previous=previous), each.incarnation, now)
        for each in contributions
    ]


def close(made: Ledger, now: float = 1.0) -> list[str]:
    """Closes what is due; returns the names that count in each round."""
    records = made.due(now)
    for each in records:
        made.append(each)
    return ["".join(one.site for one in each.counted) for each in records]


NOT_FINITE = {"finite": False}


@pytest.mark.parametrize(
    ("quorum", "sites", "sent", "at", "counted"),
    [
        (All(1), "ab", ((1.0, own("b")),), 2.99, []),  # a is waited for,
        (All(1), "ab", ((1.0, own("b")),), 3.0, ["b"]),  # until the grace is over,
        (All(1), "ab", ((1.0, own("b")), (2.0, own("a"))), 2.0, ["ab"]),  # and counts by its name
        (All(2), "ab", ((1.0, own("a")),), 9.0, []),
        # It makes the quorum all the same.
        (All(2), "ab", ((1.0, own("a")), (9.0, own("b", **NOT_FINITE))), 9.0, ["a"]),
        (Core(["a", "b"]), "abc", ((1.0, own("a")), (1.0, own("b"))), 1.0, ["ab"]),
        (DynamicBackup(0.75), "abcd", ((1.0, own("a")), (1.0, own("b"))), 9.0, []),
        (
            DynamicBackup(0.75),
            "abcd",
            ((1.0, own("a")), (1.0, own("b")), (9.0, own("c"))),
            9.0,
            ["abc"],
        ),
        (All(1), "abc", ((1.0, own("a")), (1.0, own("b", digest=8)), (1.0, own("c"))), 1.0, ["ac"]),
        (
            All(1),
            "ab",
            ((1.0, own("a")), (1.0, own("b", digest=8))),
            5.0,
            [],
        ),  # a tie: it waits for a witness
        (
            All(1),
            "abc",
            ((1.0, own("a")), (5.0, own("b", digest=8)), (6.0, own("c", digest=8))),
            6.0,
            ["bc"],
        ),
    ],
)
def test_a_round_closes_with_the_quorum_of_awaited_sites_and_with_the_majority(
    quorum: Any, sites: str, sent: Any, at: float, counted: list[str]
) -> None:
    made = ledger(sites, quorum=quorum)
    for time, each in sent:
        assert offer(made, each, now=time) == [Answer.OPEN]
    assert made.due(at) == made.due(at), "asking changes nothing"
    assert close(made, at) == counted


def test_a_contribution_is_taken_once_and_late_afterwards_and_a_call_may_be_skipped() -> None:
    made = ledger("ab")
    assert offer(made, own("a"), own("a")) == [Answer.OPEN, Answer.KNOWN]
    assert (made.calls(), close(made), made.next_due(1.5)) == ([Call(0, 1)], [], 3.0)
    made.skip("b", incarnation(), Call(0, 1), 1.1)
    assert close(made, 1.1) == ["a"]
    assert offer(made, own("b")) == [Answer.LATE]
    with pytest.raises(Refused, match="builds on records that are not here"):
        offer(made, own("a", round=3))
    with pytest.raises(Refused, match="another history"):
        made.contribute(replace(own("a", 2), previous="11" * 32), incarnation(), 1.0)
    # Who has sent no heartbeat since its hello is awaited from its own launch on.
    for sender, closed in ((1, 0), (2, 1)):
        made = ledger("a")
        hello(made, "b", sender)
        made.contribute(own("b"), incarnation(sender), 1.0)
        offer(made, own("a"))
        assert close(made) == ["ab"]
        offer(made, own("a", round=2), now=1.1)
        assert len(close(made, 1.2)) == closed


def test_lasting_ties_and_non_finite_values_are_errors_and_evicted_sites_stay_out() -> None:
    made = ledger("abc")
    offer(made, own("a"), own("b", digest=8), own("c"))
    assert [each.left_out for each in made.due(1.0)] == [(("b", "other outer parameters", 0.0),)]
    made = ledger("ab")
    offer(made, own("a"), own("b", digest=8))
    assert close(made, 5.0) == []
    with pytest.raises(AgreementError, match="a hold 0000000000000007; b hold 0000000000000008"):
        close(made, 15.0)
    made.evict("b")
    assert close(made, 15.0) == ["a"]
    with pytest.raises(Refused, match="evicted"):
        come(made, "b", now=15.0)
    come(made, "b", now=15.0, born=2)
    made.leave("b", incarnation(2))
    offer(made, own("a", 2, **NOT_FINITE), now=15.0)
    with pytest.raises(AgreementError, match="No site has finite values in fragment 0: a"):
        close(made, 50.0)


def test_a_name_is_in_use_while_its_process_lives_and_is_told_its_launches() -> None:
    made = ledger("a")
    with pytest.raises(Refused, match="in use by a running process"):
        come(made, "a", now=5.0, born=2)
    made.leave("a", incarnation(1))
    come(made, "a", now=5.0, born=2)
    for refused in (lambda: heartbeat(made, "a", 6.0, born=1), lambda: offer(made, own("x"))):
        with pytest.raises(Refused, match="has not said hello"):
            refused()
    made.leave("a", incarnation(1))
    assert made.present(6.0) == ["a"]
    assert made.contribute(own("a", born=1), incarnation(2), 6.0) is Answer.OPEN, (
        "a flight of the incarnation before"
    )
    assert made.contribute(own("a", born=2), incarnation(2), 6.0) is Answer.KNOWN
    come(made, "a", now=16.0, born=3)  # after the lease of the one before
    before = ledger("ab")
    offer(before, own("a"), own("b", **NOT_FINITE))
    for each in (before, Ledger(TERMS, RUN_CONFIG, 100.0, [], [own("a")])):
        each.leave("a", incarnation(1))
        assert hello(each, "a", 2, 101.0).standing == (Standing(0, incarnation(1)),)
        assert hello(each, "b", 1, 101.0).standing == (), "it cannot count"


def test_a_hub_that_comes_back_goes_on_where_it_was_and_refuses_a_damaged_ledger() -> None:
    before = ledger("ab")
    offer(before, own("a"), own("b"))
    records = before.due(1.0)
    close(before)
    after = Ledger(
        TERMS, RUN_CONFIG, 100.0, records, [replace(own("a", 2), previous=before.closed[0].key)]
    )
    assert (after.seq, after.closed, close(after, 101.9)) == (1, before.closed, [])
    come(after, "b", now=101.0)
    offer(after, own("b", 2), now=101.9)
    assert close(after, 101.9) == ["ab"]
    first, second, *_ = RECORDS
    for damaged in ([second], [first, replace(second, previous=RUN_CONFIG)], [first, first]):
        with pytest.raises(AgreementError, match="does not follow on"):
            Ledger(TERMS, RUN_CONFIG, 0.0, damaged)


def test_a_joiner_gets_the_most_advanced_state_or_a_snapshot_and_never_begins_afresh() -> None:
    made = ledger("abc")
    for each in RECORDS[:2]:
        made.append(each)
    for site, applied in (("a", 1), ("b", 2), ("c", 0)):
        heartbeat(made, site, 1.0, applied=applied)
    assert made.source("joiner", 2.0) == "b"
    assert made.source("joiner", 2.0, without=["b"]) == "a"
    assert made.source("joiner", 50.0) is None
    made = Ledger(TERMS, RUN_CONFIG, 0.0, RECORDS[:10], snapshots=[snapshot()])
    assert (made.source("joiner", 50.0), made.kept_from) == (snapshot(), (1,))
    made.snapshots.add(snapshot(*RECORDS[:10]))
    assert made.source("joiner", 50.0) == snapshot(), (
        "nobody has said yet that the new one is right"
    )
    for each in RECORDS[10:]:
        made.append(each)
    assert made.snapshots.headers == [snapshot(*RECORDS[:10])]
    assert made.kept_from == (11,), "payloads since are kept"
    made = Ledger(
        TERMS,
        RUN_CONFIG,
        0.0,
        RECORDS[:1],
        snapshots=[snapshot(), snapshot(*RECORDS[:1], digest=8)],
    )
    made.append(RECORDS[1])
    assert made.snapshots.headers == [snapshot()], "the wrong one is dropped"
    assert [made.snapshots.is_due([SNAPSHOT_EVERY - before]) for before in (1, 0)] == [False, True]


def test_a_round_is_the_last_where_it_is_to_be_and_all_that_may_count_in_it_is_exact() -> None:
    exact = own("a", exact=True)
    idle = own("b", exact=True, weight=0)
    for ends, sent, counted, final in (
        (True, (exact, own("b")), "ab", False),
        (True, (own("b"), exact), "ab", False),
        (True, (exact, own("b", **NOT_FINITE)), "a", True),
        (
            True,
            (replace(exact, weight=0), idle),
            "ab",
            True,
        ),  # who has trained nothing since is in it too
        (False, (exact, idle), "ab", False),
    ):
        made = ledger("ab")
        if ends:
            made.end()
        offer(made, *sent)
        assert [each.final for each in made.due(1.0)] == [final]
        assert close(made) == [counted]
        assert made.calls() == ([Call(0, 2, final=True)] if ends and not final else [])


def long(site: str, norm: float, **changes: object) -> object:
    return replace(own(site), norm_squared=norm**2, steps=8, **changes)


def after_four_rounds(norms: dict[str, float], **changes: Any) -> tuple[Ledger, list[Record]]:
    """A ledger whose sites have counted in four rounds with outer gradients of these norms, and
    its records.
    """
    made = ledger("".join(norms), **changes)
    records = list[Record]()
    for number in range(1, 5):
        offer(made, *(replace(long(site, norm), round=number) for site, norm in norms.items()))
        records += made.due(1.0)
        made.append(records[-1])
    return made, records


def test_a_site_too_long_for_its_own_past_is_left_out_even_by_a_restarted_hub() -> None:
    # Unequal data: who is always longer than the others counts from the first round.
    made, records = after_four_rounds({"a": 1.0, "b": 50.0, "c": 2.0})
    assert [record.left_out for record in records] == [()] * 4
    offer(
        made,
        *(
            replace(long(site, norm), round=5)
            for site, norm in (("a", 1.0), ("b", 1250.0), ("c", 2.0))
        ),
    )
    records += made.due(1.0)
    assert records[-1].left_out == (LeftOut("b", "too long", 25.0),)
    made.append(records[-1])
    again = Ledger(TERMS, RUN_CONFIG, 0.0, records)
    for one in (made, again):
        come(one, "ac")
        # Of two by their own past; of one alone nothing is known.
        offer(
            one, *(replace(long(site, norm), round=6) for site, norm in (("a", 1.0), ("c", 22.0)))
        )
        assert close(one, 9.0) == ["a"]
        offer(one, replace(long("c", 22.0), round=7))
        assert close(one, 9.0) == ["c"]


def test_a_site_that_trained_longer_may_be_longer_and_nobody_is_left_out_if_all_are() -> None:
    """Nor when the guard is off."""
    for guard, norms, steps, counted in (
        (10.0, (1.0, 40.0, 1.0), 80, "abc"),
        (10.0, (1.0, 40.0, 1.0), 8, "ac"),
        (None, (1.0, 40.0, 1.0), 8, "abc"),
        (10.0, (9.0, 40.0, 30.0), 8, "abc"),
    ):
        made, _ = after_four_rounds(dict.fromkeys("abc", 1.0), guard=guard)
        sent = [replace(long(site, norm), round=5) for site, norm in zip("abc", norms, strict=True)]
        offer(made, sent[0], replace(sent[1], steps=steps), sent[2])
        assert close(made) == [counted]


def test_a_run_is_founded_once_by_sites_with_one_run_config() -> None:
    run_config = run_config_of(1)
    founding = Founding(2)
    first = Hello("run", "b", incarnation(), run_config.key, ())
    founding.hello(first, run_config)
    with pytest.raises(ValueError, match=r"settings\.mixing is 0\.6 here and 0\.5 there"):
        founding.hello(replace(first, site="a"), replace(run_config, settings={"mixing": "0.6"}))
    assert (founding.missing, founding.founder) == (1, "b")
    founding.hello(replace(first, site="a"), run_config)
    # Who comes later founds nothing.
    assert (founding.missing, founding.founder, founding.run_config) == (0, "b", run_config)
    founding.gone("b")
    assert (founding.missing, founding.founder) == (1, "a")


# A quorum


def history(rounds: int = RETENTION, last: int = 20, **late: float) -> list[Record]:
    """Rounds of 30 s, in which each site is always as late."""
    found = []
    for number in range(last - rounds + 1, last + 1):
        counted = [
            replace(own(site, number), steps=STEPS)
            for site, own_late in late.items()
            if own_late == 0.0
        ]
        timings = tuple(Timing(site, number, own_late, 1.0) for site, own_late in late.items())
        found.append(replace(record(number, *counted), timings=timings))
    return found


def test_dynamic_backup_leaves_out_sites_later_than_the_round_over_the_others() -> None:
    for sites in (3, 4, 8):
        names = [f"s{site}" for site in range(sites)]
        threshold = STEPS / (sites - 1)
        for late, awaited in ((threshold - 0.01, names), (threshold + 0.01, names[:-1])):
            past = history(**dict.fromkeys(names[:-1], 0.0), **{names[-1]: late})
            assert DynamicBackup(least=0.1).awaited(past, names) == awaited
    past = history(a=0.0, b=0.0, c=20.0)
    past[0] = replace(
        past[0], timings=(*past[0].timings, Timing("d", past[0].round, 0.0))
    )  # once, long ago
    assert DynamicBackup(0.5).awaited(past, "dcba") == ["a", "b"]
    assert DynamicBackup(0.75).awaited(past, "abcd") == ["a", "b", "c"]
    assert [DynamicBackup(0.5).fewest(sites) for sites in (1, 2, 3, 8)] == [1, 1, 2, 4]
    assert DynamicBackup(0.1).fewest(30) == 3
    rarely = history(a=0.0, b=0.0, c=0.0)
    rarely = [
        replace(one, timings=one.timings[:2]) if one.round % 3 == 0 else one for one in rarely
    ]
    late = {"a": 0.0, "b": 0.0, "c": 20.0}
    for why, known, sites, awaited in (
        ("a stall now and then leaves nobody out", rarely, "abc", "abc"),
        ("c is late", history(**late), "abc", "ab"),
        ("little is known", history(RETENTION - 1, **late), "abc", "abc"),
        ("every eighth round waits for all", history(last=23, **late), "abc", "abc"),
        ("n has just come", history(**late), "abn", "abn"),
        (
            "older than timings are",
            [replace(one, timings=()) for one in history(**late)],
            "abc",
            "abc",
        ),
    ):
        assert "".join(DynamicBackup().awaited(known, sites)) == awaited, why


def test_a_record_states_the_delay_of_each_contribution_and_the_seconds_of_a_step() -> None:
    made = ledger("abc")
    assert (
        offer(made, own("a", steps=20), now=5.0)
        == offer(made, own("b", steps=20), now=5.5)
        == [Answer.OPEN]
    )
    (first,) = made.due(7.0)
    close(made, 7.0)
    assert first.timings == (Timing("a", 1, 0.0), Timing("b", 1, 0.5))
    # That of b was heard before, and counted.
    assert offer(made, own("c", steps=20), own("b", steps=20), now=9.0) == [Answer.LATE] * 2
    offer(made, own("a", 2, steps=20), now=15.0)
    (second,) = made.due(17.0)
    # A step of a took half a second: 10 s for 20 of them.
    assert second.timings == (Timing("a", 2, 0.0, 0.5), Timing("c", 1, 4.0))
    assert Record.from_bytes(second.to_bytes()) == second
    again = Ledger(TERMS, RUN_CONFIG, 1000.0, contributions=[own("a", steps=20)])
    come(again, "ab", now=1000.0)
    offer(again, own("b", steps=20), now=1001.0)
    (first,) = again.due(1001.0)
    assert (len(first.counted), first.timings) == (2, ()), "one came to an earlier start of the hub"


def run_config_of(quorum: int | ChosenQuorum) -> RunConfig:
    return RunConfig(
        "run",
        replace(TERMS, quorum=quorum),
        {"mixing": "0.5"},
        ((("w", "(2,)"),),),
        ((),),
        {},
        "5f",
    )


@dataclass(frozen=True)
class WithATensor(Core):
    core: Any = object()


def test_a_quorum_stands_in_the_run_config_with_its_arguments_or_is_refused() -> None:
    assert chosen(DynamicBackup(0.25)) == ChosenQuorum(
        "lightning_sdiloco.DynamicBackup", {"least": 0.25}
    )
    run_config = run_config_of(chosen(DynamicBackup(0.25)))
    assert RunConfig.from_bytes(run_config.to_bytes()) == run_config
    assert "terms.quorum.init_args.least is 0.25 here and missing there" in run_config.differences(
        run_config_of(2)
    )
    text = json.loads(run_config_of(2).to_bytes())
    values = [
        "DynamicBackup",
        {"class_path": "os"},
        {"class_path": "a b.c", "init_args": {}},
        {"class_path": "a.b"},
    ]
    for value in (0, *values):
        text["terms"]["quorum"] = value
        with pytest.raises(Malformed, match="quorum"):
            RunConfig.from_bytes(json.dumps(text).encode())
    made: Any = type("Made", (Core,), {"__module__": "__main__"})
    for quorum, words in (
        (lambda: 0, "quorum=0 is out of range: it must be at least 1"),
        (lambda: 0.5, "neither a number of sites nor a Quorum"),
        (WithATensor, "arguments that do not fit into the run config"),
        (made, "of a class that the hub cannot import: __main__.Made"),
        (lambda: DynamicBackup(1.5), r"least=1\.5 is out of range"),
    ):
        with pytest.raises(ValueError, match=words):
            Federation("hub:1", "run", "a", insecure=True, quorum=quorum())


def test_a_hub_imports_only_a_quorum_named_by_its_operator_and_starts_with_the_runs() -> None:
    hub = InProcessHub("run", 1)
    named = partial(built_in, named=CORE.class_path)
    careful, allowed = (
        Coordinator("run", hub.journal, hub.store, 1, find_quorum=find)
        for find in (built_in, named)
    )
    for quorum, words in (
        (CORE, r"tests\.own_quorum\.Core\(core=\['a', 'b'\]\).* sdiloco hub --quorum tests"),
        (replace(CORE, class_path="os.system"), "is not available here"),
        (
            ChosenQuorum("lightning_sdiloco.DynamicBackup", {"least": 2.0}),
            "least=2.0 is out of range",
        ),
    ):
        with pytest.raises(Refused, match=words):
            careful.agree("a", run_config_of(quorum))
    for path, words in (
        ("nowhere.Core", "cannot be imported"),
        ("Core", "dotted"),
        ("json.JSONDecoder", "not a Quorum"),
    ):
        with pytest.raises(ValueError, match=words):
            imported(path)
    backup = DynamicBackup()
    core = Core(["a", "b"])
    for own, quorum, made in (
        (careful, BACKUP, backup),
        (allowed, BACKUP, backup),
        (allowed, CORE, core),
    ):
        assert own.agree("a", run_config_of(quorum)) == run_config_of(quorum)
        hub.journal.note({"run_config": run_config_of(quorum).to_bytes()})
        assert (
            Coordinator("run", hub.journal, hub.store, find_quorum=own._find_quorum).ledger.quorum
            == made
        )
    with pytest.raises(ValueError, match="is not available here"):
        Coordinator("run", hub.journal, hub.store)


# A site


def launched(made: Follower, step: int, digest: int = DIGEST, **about: Any) -> Contribution | None:
    return made.complete(
        replace(made.begin(0, step), digest=digest, payloads=own().payloads, **about)
    )


def follower(steps: int = 0, flies: bool = False) -> Follower:
    """One that has founded a run, reaches the hub, has trained, and may have launched that and
    trained on.
    """
    made = Follower(TERMS, RUN_CONFIG, "a", incarnation())
    made.found([DIGEST])
    made.reachable = True
    train(made, steps)
    if flies:
        assert launched(made, steps) is not None
        train(made, 3)
    return made


def train(made: Follower, steps: int) -> None:
    for _ in range(steps):
        made.trained(5)


def test_wrong_values_are_found_at_the_launch_at_the_landing_and_in_a_checkpoint() -> None:
    with pytest.raises(ValueError, match="checkpoint was damaged"):
        Follower(TERMS, RUN_CONFIG, "a", incarnation(2)).load_state_dict(
            follower().state_dict(), [DIGEST + 1]
        )
    made = follower(20)
    sent = launched(made, 20, finite=False, norm_squared=float("nan"))
    assert sent is not None
    assert sent.norm_squared == 0
    assert made.land(RECORDS[0], DIGEST, 8) is MergeAction.TAKE, "a flight that is not finite"
    made = follower(20)
    assert launched(made, 20, digest=DIGEST + 1) is None
    assert (made.follows, made.fragments[0].steps) == (False, 0)
    made = follower(20, flies=True)
    wrong = record(1, own("b", digest=8))
    assert made.land(wrong, DIGEST, 9) is MergeAction.REFUSE
    assert (made.wants_state, made.fragments[0].applied.round) == (True, 0)
    made.found([DIGEST])
    with pytest.raises(AgreementError, match="cannot be restored"):
        made.land(wrong, DIGEST, 9)


def test_a_call_is_answered_with_a_quarter_of_the_steps_and_skipped_below() -> None:
    made = follower(4)
    made.hear(Call(0, 1))
    assert (made.launches(4), made.skips(), made.skips()) == ([], [Call(0, 1)], [])
    train(made, 4)
    assert made.launches(8) == [], "it stays skipped"
    made.learn(RECORDS[0])
    made.land(RECORDS[0], DIGEST, 8)
    made.hear(Call(0, 2))
    assert (made.skips(), made.launches(8)) == ([], [0])
    made.learn(RECORDS[1])
    assert made.launches(8) == [], "the round is known to be closed"


def test_training_waits_within_the_grace_for_a_long_flight_and_never_without_a_hub() -> None:
    """The flight takes nearly `sync_every` steps."""
    made = follower(20, flies=True)
    assert [made.waits(*at) for at in ((38, 0.0), (39, 100.0), (39, 102.5), (39, 103.0))] == [
        0.0,
        3.0,
        0.5,
        0.0,
    ]
    assert not made.waits(45, 200.0), "it has waited once"
    made = follower(20, flies=True)
    made.lose(100.0)
    assert not made.waits(60, 101.0)
    made.lose(3700.0)
    with pytest.raises(ExchangeError, match="patience=3600 s"):
        made.lose(3700.1)


def test_a_hub_with_fewer_or_other_records_is_refused_and_records_come_in_any_order() -> None:
    made = follower()
    for each in (RECORDS[1], RECORDS[0], RECORDS[1]):
        made.learn(each)
    assert made.due(0) == [RECORDS[0]]
    for other in (replace(RECORDS[2], previous=RUN_CONFIG), replace(RECORDS[1], final=True)):
        with pytest.raises(AgreementError, match="histories have parted"):
            made.learn(other)
    for each in RECORDS[:3]:
        made.learn(each)
        made.land(each, DIGEST, DIGEST)
    made.welcome(Welcome((RECORDS[2].position,), (1,)))
    with pytest.raises(AgreementError, match="knows 2 rounds of fragment 0, but a has applied 3"):
        made.welcome(Welcome((RECORDS[1].position,), (1,)))
    with pytest.raises(AgreementError, match="histories have parted"):
        made.welcome(Welcome((replace(RECORDS[2], final=True).position,), (1,)))
    behind = follower()
    behind.welcome(Welcome((RECORDS[RETENTION - 1].position,), (1,)))
    assert behind.follows
    behind.welcome(Welcome((RECORDS[RETENTION].position,), (1,)))
    assert behind.wants_state
    for each in RECORDS[: RETENTION + 1]:
        behind.learn(each)
    assert behind.due(0) == [RECORDS[0]], "it follows records meanwhile"


def test_a_site_forgets_records_when_its_run_is_founded_again_without_them() -> None:
    made = follower()
    made.learn(RECORDS[0])
    made.land(RECORDS[0], DIGEST, DIGEST)
    made.learn(RECORDS[1])  # and its payloads never came
    made.welcome(Welcome((RECORDS[0].position,), (1,), founded_again=True))
    assert (made.lag, made.follows, made.due(0)) == (0, True, [])
    other = record(2, own("b"), previous=RECORDS[0].key)
    made.learn(other)
    assert made.due(0) == [other]


def test_a_state_is_verified_against_the_records() -> None:
    made = Follower(TERMS, RUN_CONFIG, "a", incarnation())
    made.welcome(Welcome((RECORDS[11].position,), (5,)))
    for each in RECORDS[:12]:
        made.learn(each)
    for offered, came, why in (
        (snapshot(*RECORDS[:10]), 8, "damaged"),
        (snapshot(*RECORDS[:10], digest=8), 8, "differs from the others'"),
        (snapshot(*RECORDS[:3]), DIGEST, "later records are gone"),
        (StateHeader((Position(10, RUN_CONFIG),), (DIGEST,)), DIGEST, "another history"),
    ):
        with pytest.raises(Refused, match=why):
            made.adopt(offered, [came])
    assert made.adopt(snapshot(*RECORDS[:10]), [DIGEST]) == {0: MergeAction.TAKE}
    assert made.due(0) == [RECORDS[10]]
