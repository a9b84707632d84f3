"""A site's side of the rules, each with a known answer."""

from dataclasses import replace

import pytest

from lightning_sdiloco.errors import AgreementError, ExchangeError
from lightning_sdiloco.federation import (
    RETENTION,
    Call,
    Contribution,
    Follower,
    MergeAction,
    Position,
    Record,
    Refused,
    Standing,
    StateHeader,
    Welcome,
)
from tests.federation.told import CHARTER, DIGEST, TERMS, chain, follower, life, own, record, trained


def launched(made: Follower, steps: int = 20) -> Contribution:
    trained(made, steps)
    sent = made.launch(0, steps, DIGEST, own().payloads)
    assert sent is not None
    return sent


def held(made: Follower) -> tuple[int, int]:
    return made.fragments[0].steps, made.fragments[0].samples


def test_fragments_launch_in_turn_once_in_sync_every_steps() -> None:
    made = follower(terms=replace(TERMS, fragments=2))
    trained(made, 20)
    assert [made.launches(step) for step in (19, 20, 29, 30)] == [[], [0], [0], [0, 1]]


def test_a_flight_lands_overlap_steps_after_its_launch_or_when_its_record_is_there() -> None:
    made = follower()
    sent = launched(made)
    assert made.due(23) == []
    made.learn(record(1, sent))
    assert made.due(22) == []
    assert made.due(23) == [record(1, sent)]
    other = follower()
    trained(other, 3)
    other.learn(record(1, own("b")))
    assert other.due(3) == [record(1, own("b"))], "without a flight it lands at once"
    assert other.land(record(1, own("b")), DIGEST, 8) is MergeAction.CARRY
    assert held(other) == (3, 15)


def test_a_flight_that_counts_is_mixed_and_what_was_trained_since_stays_held() -> None:
    made = follower()
    sent = launched(made)
    trained(made, 3)
    assert sent.weight == 100
    assert made.land(record(1, sent), DIGEST, 8) is MergeAction.MIX
    assert held(made) == (3, 15)
    assert made.fragments[0].applied == record(1, sent).position


def test_a_flight_that_came_too_late_is_dropped_where_the_site_says_so() -> None:
    made = follower(late=MergeAction.DROP)
    launched(made)
    trained(made, 3)
    made.load_state_dict(made.state_dict(), [DIGEST])
    assert made.land(record(1, own("b")), DIGEST, 8) is MergeAction.DROP
    assert held(made) == (3, 15)
    trained(made, 2)
    second = replace(record(2, own("b", digest=8)), previous=made.fragments[0].applied.key)
    assert made.land(second, 8, 9) is MergeAction.CARRY
    assert held(made) == (5, 25), "what was not sent yet is carried"
    trained(made, 15)
    assert made.launch(0, 40, 9, own().payloads) is not None
    again = Follower(TERMS, CHARTER, "a", life(), late=MergeAction.DROP)
    again.load_state_dict(made.state_dict(), [9])
    third = replace(record(3, own("b", digest=9)), previous=made.fragments[0].applied.key)
    assert {one.land(third, 9, 10) for one in (made, again)} == {MergeAction.CARRY}, "not twice in a row"


def test_a_flight_that_does_not_count_is_carried_with_its_weight() -> None:
    made = follower()
    launched(made)
    trained(made, 3)
    assert made.land(record(1, own("b")), DIGEST, 8) is MergeAction.CARRY
    assert held(made) == (23, 115)
    assert made.launches(39) == []
    again = made.launch(0, 40, 8, own().payloads)
    assert again is not None
    assert (again.round, again.weight) == (2, 115)


def test_what_an_earlier_life_had_counted_is_taken_and_not_counted_again() -> None:
    made = follower(born=2)
    launched(made)
    trained(made, 3)
    assert made.land(record(1, own("a", born=1)), DIGEST, 8) is MergeAction.TAKE
    assert held(made) == (0, 0)


def welcomed(made: Follower, *standing: Standing) -> list[int]:
    return made.welcome(Welcome((made.fragments[0].applied,), (1,), standing))


def test_what_an_earlier_life_has_launched_for_an_open_round_is_dropped_and_what_comes_after_it_is_kept() -> None:
    made = follower(born=2)
    trained(made, 3)
    assert welcomed(made, Standing(0, life(1))) == [0]
    assert held(made) == (0, 0)
    trained(made, 22)
    made.hear(Call(0, 1))
    assert made.launches(22) == [], "no other launch is taken for that round"
    assert made.skips() == []
    assert welcomed(made, Standing(0, life(1))) == [], "once"
    # One more life goes on from a checkpoint of this one.
    again = Follower(TERMS, CHARTER, "a", life(3))
    again.load_state_dict(made.state_dict(), [DIGEST])
    assert welcomed(again, Standing(0, life(1))) == []
    for each in (made, again):
        assert each.land(record(1, own("a", born=1)), DIGEST, 8) is MergeAction.CARRY
        assert held(each) == (22, 110)
        assert each.launches(22) == [0]


def test_a_checkpoint_that_does_not_hold_what_was_launched_after_it_is_dropped() -> None:
    made = follower(born=2)
    welcomed(made, Standing(0, life(1)))
    trained(made, 4)
    again = Follower(TERMS, CHARTER, "a", life(4))
    again.load_state_dict(made.state_dict(), [DIGEST])
    assert welcomed(again, Standing(0, life(3))) == [0]
    assert held(again) == (0, 0)


def test_a_flight_that_stands_is_that_of_the_checkpoint_or_of_this_life() -> None:
    made = follower()
    launched(made)
    assert welcomed(made, Standing(0, life())) == []
    again = Follower(TERMS, CHARTER, "a", life(2))
    again.load_state_dict(made.state_dict(), [DIGEST])
    assert welcomed(again, Standing(0, life())) == []
    assert welcomed(again, Standing(0, life(3))) == [0]
    assert not again.outstanding()


def test_where_a_launch_no_longer_stands_another_one_is_made() -> None:
    made = follower(born=2)
    welcomed(made, Standing(0, life(1)))
    trained(made, 20)
    welcomed(made)
    assert made.launches(20) == [0]
    assert made.land(record(1, own("b")), DIGEST, 8) is MergeAction.CARRY
    assert held(made) == (20, 100)


def test_a_flight_lands_at_once_where_an_earlier_life_counts_after_it() -> None:
    made = follower()
    sent = launched(made)
    again = Follower(TERMS, CHARTER, "a", life(3))
    again.load_state_dict(made.state_dict(), [DIGEST])
    first, second = chain((sent,), (own("a", 2, born=2),))
    again.learn(first)
    assert again.due(20) == []
    again.learn(second)
    assert not again.fragments[0].has_joined
    assert again.due(20) == [first]


def test_a_flight_that_is_not_finite_takes_the_outer_values() -> None:
    made = follower()
    trained(made, 20)
    sent = made.launch(0, 20, DIGEST, own().payloads, finite=False, norm_squared=float("nan"))
    assert sent is not None
    assert sent.norm_squared == 0
    assert made.land(record(1, own("b")), DIGEST, 8) is MergeAction.TAKE


def test_the_last_round_takes_the_outer_values_and_ends_the_run() -> None:
    made = follower()
    sent = launched(made)
    final = record(1, sent, final=True)
    made.learn(final)
    assert made.land(final, DIGEST, 8) is MergeAction.TAKE
    trained(made, 50)
    assert made.launches(90) == []
    assert made.finished


def test_a_last_round_is_launched_exactly_by_the_charter_or_by_a_call_of_that_round() -> None:
    made = follower(terms=replace(TERMS, rounds=2))
    sent = launched(made)
    assert not sent.exact
    made.land(record(1, sent), DIGEST, 8)
    trained(made, 20)
    assert made.begin(0, 40).exact
    called = follower()
    called.hear(Call(0, 1, final=True))
    assert called.launches(0) == [0]
    last = called.launch(0, 0, DIGEST, own().payloads)
    assert last is not None
    assert (last.exact, last.weight, last.reason) == (True, 0, "")
    again = follower()
    again.load_state_dict(called.state_dict(), [DIGEST])
    assert again.outstanding() == [last]


def test_what_is_launched_before_the_last_call_stays_what_it_is_and_the_next_launch_is_exact() -> None:
    made = follower()
    sent = launched(made)
    made.hear(Call(0, 1, final=True))
    assert made.outstanding() == [sent]
    assert not sent.exact
    made.hear(Call(0, 2, final=True))
    first = record(1, sent)
    made.learn(first)
    assert made.land(first, DIGEST, 8) is MergeAction.MIX
    assert made.launches(23) == [0]
    assert made.begin(0, 23).exact


def test_a_call_is_answered_with_a_quarter_of_the_steps_and_skipped_below() -> None:
    made = follower()
    trained(made, 4)
    made.hear(Call(0, 1))
    assert made.launches(4) == []
    assert [made.skips(), made.skips()] == [[Call(0, 1)], []]
    trained(made, 4)
    assert made.launches(8) == [], "it stays skipped"
    made.learn(record(1, own("b")))
    made.land(record(1, own("b")), DIGEST, 8)
    made.hear(Call(0, 2))
    assert (made.skips(), made.launches(8)) == ([], [0])
    made.learn(replace(record(2, own("b")), previous=made.fragments[0].applied.key))
    assert made.launches(8) == [], "the round is known to be closed"


def test_training_waits_only_for_a_flight_of_nearly_sync_every_steps_and_not_beyond_the_grace() -> None:
    made = follower()
    launched(made)
    assert not made.waits(38, now=0.0)
    assert made.waits(39, now=100.0) == 3.0
    assert made.waits(39, now=102.5) == 0.5
    assert not made.waits(39, now=103.0)
    assert not made.waits(45, now=200.0), "it has waited once"


def test_without_the_hub_training_never_waits_until_patience_is_over() -> None:
    made = follower()
    launched(made)
    made.lose(100.0)
    assert not made.waits(60, now=101.0)
    made.lose(3700.0)
    with pytest.raises(ExchangeError, match="patience=3600 s"):
        made.lose(3700.1)


def test_values_that_changed_since_the_landing_are_found_at_the_launch() -> None:
    made = follower()
    trained(made, 20)
    assert made.launch(0, 20, DIGEST + 1, own().payloads) is None
    assert not made.follows
    assert held(made) == (0, 0)


def test_a_record_measured_against_other_values_does_not_land_and_twice_is_an_error() -> None:
    made, wrong = follower(), record(1, own("b", digest=8))
    launched(made)
    assert made.land(wrong, DIGEST, 9) is MergeAction.REFUSE
    assert made.wants_state
    assert made.fragments[0].applied.round == 0
    made.found([DIGEST])
    with pytest.raises(AgreementError, match="cannot be made again"):
        made.land(wrong, DIGEST, 9)


def follow(records: list[Record], made: Follower) -> Follower:
    for each in records:
        made.learn(each)
        made.land(each, DIGEST, DIGEST)
    return made


RECORDS = chain(*[(own("b", round),) for round in range(1, 20)])


def test_a_hub_that_knows_less_or_something_else_is_refused() -> None:
    made = follow(RECORDS[:3], follower())
    made.welcome(Welcome((RECORDS[2].position,), (1,)))
    with pytest.raises(AgreementError, match="knows 2 rounds of fragment 0, and a has applied 3"):
        made.welcome(Welcome((RECORDS[1].position,), (1,)))
    other = replace(RECORDS[2], final=True)
    with pytest.raises(AgreementError, match="histories have parted"):
        made.welcome(Welcome((other.position,), (1,)))
    with pytest.raises(AgreementError, match="histories have parted"):
        made.learn(other)


def test_records_come_in_any_order_and_those_of_another_history_are_refused() -> None:
    made = follower()
    for each in (RECORDS[1], RECORDS[0], RECORDS[1]):
        made.learn(each)
    assert made.due(0) == [RECORDS[0]]
    for other in (replace(RECORDS[2], previous=CHARTER), replace(RECORDS[1], final=True)):
        with pytest.raises(AgreementError, match="histories have parted"):
            made.learn(other)


def test_a_site_that_is_far_behind_asks_for_a_state_and_follows_records_meanwhile() -> None:
    made = follower()
    made.welcome(Welcome((RECORDS[RETENTION - 1].position,), (1,)))
    assert made.follows
    made.welcome(Welcome((RECORDS[RETENTION].position,), (1,)))
    assert made.wants_state
    for each in RECORDS[: RETENTION + 1]:
        made.learn(each)
    assert made.due(0) == [RECORDS[0]]


def state(records: list[Record], digest: int = DIGEST) -> StateHeader:
    return StateHeader((records[-1].position,), (digest,))


@pytest.mark.parametrize(
    ("offered", "came", "why"),
    [
        (state(RECORDS[:10]), 8, "damaged"),
        (state(RECORDS[:10], 8), 8, "not what the others hold"),
        (state(RECORDS[:3]), DIGEST, "what follows is gone"),
        (StateHeader((Position(10, CHARTER),), (DIGEST,)), DIGEST, "another history"),
    ],
)
def test_a_state_is_verified_against_the_records(offered: StateHeader, came: int, why: str) -> None:
    made = Follower(TERMS, CHARTER, "a", life())
    made.welcome(Welcome((RECORDS[11].position,), (5,)))
    for each in RECORDS[:12]:
        made.learn(each)
    with pytest.raises(Refused, match=why):
        made.adopt(offered, [came])
    assert made.adopt(state(RECORDS[:10]), [DIGEST]) == {0: MergeAction.TAKE}
    assert made.due(0) == [RECORDS[10]]


@pytest.mark.parametrize(
    ("counted", "landing", "steps"),
    [("nothing", MergeAction.CARRY, 23), ("an earlier life", MergeAction.TAKE, 0), ("the flight", MergeAction.MIX, 3)],
)
def test_a_state_carries_what_the_records_between_have_not_counted(
    counted: str, landing: MergeAction, steps: int
) -> None:
    made = follower(born=2)
    sent = launched(made)
    trained(made, 3)
    first = sent if counted == "the flight" else own("b")
    second = own("a" if counted == "an earlier life" else "b", 2)
    records = chain((first,), (second,), (own("b", 3),))
    for each in records:
        made.learn(each)
    assert made.adopt(state(records), [DIGEST]) == {0: landing}
    assert made.fragments[0].steps == steps


def test_what_nobody_knows_about_is_not_counted_twice() -> None:
    made = follower()
    trained(made, 20)
    assert made.adopt(state(RECORDS[:4]), [DIGEST]) == {0: MergeAction.TAKE}
    assert held(made) == (0, 0)


def test_a_checkpoint_brings_flight_and_weight_to_the_next_life() -> None:
    before = follower(born=1)
    sent = launched(before)
    trained(before, 3)
    after = Follower(TERMS, CHARTER, "a", life(2))
    after.load_state_dict(before.state_dict(), [DIGEST])
    assert after.outstanding() == [sent]
    assert after.hello("run").applied == (Position(0, CHARTER),)
    assert held(after) == (3, 15)
    assert after.land(record(1, sent), DIGEST, 8) is MergeAction.MIX
    late = Follower(TERMS, CHARTER, "a", life(3))
    late.load_state_dict(before.state_dict(), [DIGEST])
    assert late.land(record(1, own("b")), DIGEST, 8) is MergeAction.CARRY
    assert held(late) == (23, 115)


def test_a_damaged_checkpoint_is_refused() -> None:
    after = Follower(TERMS, CHARTER, "a", life(2))
    with pytest.raises(ValueError, match="checkpoint was damaged"):
        after.load_state_dict(follower().state_dict(), [DIGEST + 1])


def test_a_site_at_its_end_launches_all_and_leaves_when_it_is_counted() -> None:
    made = follower()
    trained(made, 2)
    made.finish()
    assert made.launches(2) == [0]
    sent = made.launch(0, 2, DIGEST, own().payloads)
    assert sent is not None
    assert not made.finished
    made.learn(record(1, own("b")))
    assert made.due(2) == [record(1, own("b"))], "no step will come any more"
    made.land(record(1, own("b")), DIGEST, 8)
    assert not made.finished, "it was late, and launches again"
    assert made.launches(2) == [0]
    again = made.launch(0, 2, 8, own().payloads)
    assert again is not None
    made.land(Record(1, 0, 2, made.fragments[0].applied.key, (again,)), 8, 9)
    assert made.finished
