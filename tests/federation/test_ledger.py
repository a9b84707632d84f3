"""The hub's side of the rules, each with a known answer."""

from dataclasses import replace

import pytest

from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.federation import (
    ANCHOR_EVERY,
    RETENTION,
    Answer,
    Call,
    Charter,
    Contribution,
    Founding,
    Hello,
    Ledger,
    Position,
    Record,
    Refused,
    Standing,
    StateHeader,
)
from tests.federation.told import CHARTER, DIGEST, TERMS, beat, chain, close, come, life, own


def ledger(*sites: str, **changes: object) -> Ledger:
    made = Ledger(replace(TERMS, **changes), CHARTER, 0.0)
    come(made, *sites)
    return made


def offer(made: Ledger, *contributions: Contribution, now: float = 1.0) -> list[Answer]:
    """Offers contributions that rest on what is closed."""
    return [made.contribute(based(made, each), each.life, now) for each in contributions]


def based(made: Ledger, each: Contribution) -> Contribution:
    return replace(each, previous=made.closed[each.fragment].key)


def sites_of(record: Record) -> list[str]:
    return [each.site for each in record.counted]


def test_a_round_is_open_once_and_late_afterwards_and_its_record_goes_by_the_names() -> None:
    made = ledger("a", "b")
    assert offer(made, own("b"), own("b"), own("a")) == [Answer.OPEN, Answer.KNOWN, Answer.OPEN]
    assert made.due(1.0) == made.due(1.0) != [], "asking changes nothing"
    assert made.closed == [Position(0, CHARTER)]
    (first,) = close(made, 1.0)
    assert sites_of(first) == ["a", "b"]
    assert offer(made, own("a")) == [Answer.LATE]
    with pytest.raises(Refused, match="rests on records that are not here"):
        offer(made, own("a", round=3))


def test_a_round_closes_when_all_are_there_or_the_grace_is_over() -> None:
    made = ledger("a", "b")
    offer(made, own("a"), now=1.0)
    assert close(made, 2.99) == []
    assert made.next_due(1.5) == 3.0
    assert [sites_of(each) for each in close(made, 3.0)] == [["a"]]


def test_no_round_closes_below_the_quorum_of_those_who_are_there_whether_they_count_or_not() -> None:
    made = ledger("a", "b", quorum=2)
    offer(made, own("a"))
    assert close(made, 100.0) == []
    come(made, "b", now=100.0)
    offer(made, replace(own("b"), finite=False), now=100.0)
    assert sites_of(close(made, 100.0)[0]) == ["a"]


def test_a_beat_and_nothing_else_keeps_a_site_awaited() -> None:
    made = ledger("a", "b")
    beat(made, "a", 9.0)
    offer(made, own("a"), now=11.0)
    # The lease of b, which has not beaten, was over at 10.
    assert sites_of(close(made, 11.0)[0]) == ["a"]
    assert made.present(11.0) == ["a"]


def test_a_site_that_needs_a_state_or_is_far_behind_is_not_awaited() -> None:
    made = ledger("a", "b")
    with pytest.raises(Refused, match="another history"):
        made.contribute(own("a", previous="11" * 32), life(), 1.0)
    for record in chain(*[(own("a", round),) for round in range(1, RETENTION + 2)]):
        made.append(record)
    beat(made, "a", 1.0)
    beat(made, "b", 1.0, applied=0)
    offer(made, own("a", RETENTION + 2))
    assert len(close(made, 1.0)) == 1
    assert made.source("b", 1.0) is None or made.source("b", 1.0) == "a"


def test_a_site_that_skips_is_not_waited_for() -> None:
    made = ledger("a", "b")
    offer(made, own("a"))
    assert made.calls() == [Call(0, 1)]
    assert close(made, 1.0) == []
    made.skip("b", life(), Call(0, 1), 1.1)
    assert sites_of(close(made, 1.1)[0]) == ["a"]


@pytest.mark.parametrize("sender", [1, 2])
def test_a_site_is_awaited_from_its_first_launch_on_but_not_for_a_flight_of_an_earlier_life(sender: int) -> None:
    made = ledger("a")
    # It has not beaten since.
    made.hello(Hello("run", "b", life(sender), CHARTER, tuple(made.closed)), 0.0)
    made.contribute(own("b", born=1), life(sender), 1.0)
    offer(made, own("a"))
    assert sites_of(close(made, 1.0)[0]) == ["a", "b"]
    offer(made, own("a", round=2), now=1.1)
    assert len(close(made, 1.2)) == (0 if sender == 1 else 1)


def test_the_largest_camp_counts_and_the_others_are_left_out() -> None:
    made = ledger("a", "b", "c")
    offer(made, own("a"), own("b", digest=8), own("c"))
    (record,) = close(made, 1.0)
    assert sites_of(record) == ["a", "c"]
    assert record.left_out == (("b", "other outer parameters"),)
    assert record.digest == DIGEST


def test_a_tie_holds_the_round_until_a_third_witness_comes_and_then_is_an_error_that_names_the_sides() -> None:
    held = ledger("a", "b")
    offer(held, own("a"), own("b", digest=8))
    assert close(held, 5.0) == []
    come(held, "c", now=6.0)
    offer(held, own("c", digest=8), now=6.0)
    assert sites_of(close(held, 6.0)[0]) == ["b", "c"]
    made = ledger("a", "b")
    offer(made, own("a"), own("b", digest=8))
    assert close(made, 5.0) == []
    with pytest.raises(AgreementError, match="a hold 0000000000000007; b hold 0000000000000008"):
        close(made, 15.0)
    made.evict("b")
    assert sites_of(close(made, 15.0)[0]) == ["a"]
    with pytest.raises(Refused, match="evicted"):
        come(made, "b", now=15.0)
    come(made, "b", now=15.0, born=2)


def test_what_is_not_finite_is_left_out_and_nothing_else_is_an_error() -> None:
    made = ledger("a", "b")
    offer(made, replace(own("a"), finite=False), own("b"))
    (record,) = close(made, 1.0)
    assert record.left_out == (("a", "not finite"),)
    offer(made, replace(own("a", 2), finite=False))
    with pytest.raises(AgreementError, match="No site has finite values in fragment 0: a"):
        close(made, 50.0)


def test_a_name_is_in_use_as_long_as_its_process_lives() -> None:
    made = ledger("a")
    with pytest.raises(Refused, match="in use by a living process"):
        come(made, "a", now=5.0, born=2)
    made.leave("a", life(1))
    come(made, "a", now=5.0, born=2)
    with pytest.raises(Refused, match="has not said hello"):
        beat(made, "a", 6.0, born=1)
    made.leave("a", life(1))
    assert made.present(6.0) == ["a"]
    come(made, "a", now=16.0, born=3)  # after the lease of the one before
    with pytest.raises(Refused, match="has not said hello"):
        made.contribute(own("a"), life(2), 17.0)


def test_a_flight_of_an_earlier_life_is_taken_from_the_next_one() -> None:
    made = ledger("a")
    made.leave("a", life(1))
    come(made, "a", born=2)
    assert made.contribute(own("a", born=1), life(2), 1.0) is Answer.OPEN
    assert made.contribute(own("a", born=2), life(2), 1.0) is Answer.KNOWN
    assert close(made, 1.0)[0].counted == (own("a", born=1),)


def test_who_is_welcomed_hears_what_it_has_launched_and_may_count_in_open_rounds() -> None:
    made = ledger("a", "b")
    offer(made, own("a"), replace(own("b"), finite=False))
    again = Ledger(TERMS, CHARTER, 100.0, [], [own("a")])
    for each in (made, again):
        each.leave("a", life(1))
        come_again = Hello("run", "a", life(2), CHARTER, tuple(each.closed))
        assert each.hello(come_again, 101.0).standing == (Standing(0, life(1)),)
        come_again = Hello("run", "b", life(1), CHARTER, tuple(each.closed))
        assert each.hello(come_again, 101.0).standing == (), "it cannot count"


def test_a_hub_that_comes_back_goes_on_where_it_was_and_waits_for_those_before() -> None:
    before = ledger("a", "b")
    offer(before, own("a"), own("b"))
    (first,) = close(before, 1.0)
    offer(before, own("a", 2))
    after = Ledger(TERMS, CHARTER, 100.0, [first], [based(before, own("a", 2))])
    assert (after.seq, after.closed) == (1, before.closed)
    assert close(after, 101.9) == []
    come(after, "b", now=101.0)
    offer(after, own("b", 2), now=101.9)
    assert sites_of(close(after, 101.9)[0]) == ["a", "b"]


def test_a_damaged_ledger_is_refused() -> None:
    first, second = chain((own("a"),), (own("a", 2),))
    for records in ([second], [first, replace(second, previous=CHARTER)], [first, first]):
        with pytest.raises(AgreementError, match="does not follow on"):
            Ledger(TERMS, CHARTER, 0.0, records)


def test_a_joiner_gets_the_state_of_the_site_that_has_applied_most() -> None:
    made = ledger("a", "b", "c")
    for record in chain((own("a"),), (own("a", 2),)):
        made.append(record)
    for site, applied in (("a", 1), ("b", 2), ("c", 0)):
        beat(made, site, 1.0, applied=applied)
    assert made.source("joiner", 2.0) == "b"
    assert made.source("joiner", 2.0, without=["b"]) == "a"
    assert made.source("joiner", 50.0) is None


def anchor(*records: Record, digest: int = DIGEST) -> StateHeader:
    position = records[-1].position if records else Position(0, CHARTER)
    return StateHeader((position,), (digest,))


def test_without_sites_the_anchor_is_where_the_run_goes_on_and_payloads_since_are_kept() -> None:
    records = chain(*[(own("a", round),) for round in range(1, 31)])
    made = Ledger(TERMS, CHARTER, 0.0, records[:10], anchors=[anchor()])
    assert made.source("joiner", 50.0) == anchor()
    assert made.kept == (1,)
    made.anchors.add(anchor(*records[:10]))
    assert made.source("joiner", 50.0) == anchor(), "nobody has said yet that the new one is right"
    for record in records[10:]:
        made.append(record)
    assert made.anchors.headers == [anchor(*records[:10])]
    assert made.kept == (11,)


def test_a_wrong_anchor_is_dropped() -> None:
    records = chain((own("a"),), (own("a", 2),))
    made = Ledger(TERMS, CHARTER, 0.0, records[:1], anchors=[anchor(), anchor(*records[:1], digest=8)])
    made.append(records[1])
    assert made.anchors.headers == [anchor()]
    assert not made.anchors.is_due([ANCHOR_EVERY - 1])
    assert made.anchors.is_due([ANCHOR_EVERY])


def test_the_last_round_waits_for_all_who_live_and_then_it_is_over() -> None:
    made = ledger("a", "b", rounds=1)
    offer(made, own("a", exact=True))
    assert made.calls() == [Call(0, 1, final=True)]
    assert close(made, 9.0) == []
    beat(made, "a", 9.0)
    (record,) = close(made, 10.0)
    assert record.final
    assert offer(made, own("a", 2), now=10.0) == [Answer.LATE]


def test_an_operator_ends_a_run_with_the_next_round() -> None:
    made = ledger("a")
    made.end()
    assert made.calls() == [Call(0, 1, final=True)]
    offer(made, own("a", exact=True))
    assert close(made, 1.0)[0].final
    assert made.has_ended(0)
    assert made.calls() == []


def test_what_is_open_when_an_operator_ends_a_run_closes_as_any_other_and_the_next_round_is_the_last() -> None:
    made = ledger("a", "b")
    offer(made, own("a"), now=1.0)
    made.end()
    assert made.calls() == [Call(0, 1)]
    assert close(made, 2.99) == []
    (first,) = close(made, 3.0)
    assert not first.final
    assert made.calls() == [Call(0, 2, final=True)]
    made.skip("b", life(), Call(0, 2, final=True), 3.1)
    offer(made, own("b", 2, exact=True), now=3.1)
    assert close(made, 9.0) == []
    offer(made, own("a", 2, exact=True), now=9.0)
    (last,) = close(made, 9.0)
    assert (sites_of(last), last.final) == (["a", "b"], True)


def test_a_round_is_the_last_where_it_is_to_be_and_all_that_may_count_in_it_is_exact() -> None:
    exact, idle = own("a", exact=True), own("b", exact=True, weight=0)
    for ends, sent, counted, final in (
        (True, (exact, own("b")), ["a", "b"], False),
        (True, (own("b"), exact), ["a", "b"], False),
        (True, (exact, replace(own("b"), finite=False)), ["a"], True),
        (True, (replace(exact, weight=0), idle), ["a", "b"], True),  # who has trained nothing since is in it too
        (False, (exact, idle), ["a", "b"], False),
    ):
        made = ledger("a", "b")
        if ends:
            made.end()
        offer(made, *sent)
        (record,) = close(made, 1.0)
        assert (sites_of(record), record.final) == (counted, final)
        assert made.calls() == ([Call(0, 2, final=True)] if ends and not final else [])


def test_a_run_is_founded_once_by_sites_with_one_charter() -> None:
    charter = Charter("llm", TERMS, {"mixing": "0.5"}, ((("w", "(2,)"),),), ((),), {}, "5f")
    founding, hello = Founding(2), Hello("run", "b", life(), charter.key, ())
    founding.hello(hello, charter)
    with pytest.raises(ValueError, match=r"settings\.mixing is 0\.6 here and 0\.5 there"):
        founding.hello(replace(hello, site="a"), replace(charter, settings={"mixing": "0.6"}))
    assert (founding.missing, founding.founder) == (1, "b")
    founding.hello(replace(hello, site="a"), charter)
    assert (founding.missing, founding.founder, founding.charter) == (0, "b", charter), "who comes later founds nothing"
    founding.gone("b")
    assert (founding.missing, founding.founder) == (1, "a")


def test_a_founded_run_never_begins_afresh() -> None:
    made = Ledger(TERMS, CHARTER, 0.0, chain((own("a"),)))
    made.hello(Hello("run", "new", life(), CHARTER, (Position(0, CHARTER),)), 20.0)
    assert made.source("new", 20.0) is None
    with pytest.raises(Refused, match="has not said hello"):
        made.contribute(own("other", 2), life(), 20.0)
