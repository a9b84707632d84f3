"""Policies: what decides when fragments launch, how much groups count, and how they land; the rules by themselves."""

import json
from collections.abc import Sequence
from math import exp, inf, isclose, sqrt
from statistics import median, pstdev
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdiloco import Carry, Control, Heard, LaunchSchedule, Mix, Schedule, Selective, Weighing
from lightning_sdiloco.algorithm import Aggregation, Every
from tests.methods import ByMedian, ByNorm, ZScore


def said(norm: float = 1.0, weight: int = 100, finite: bool = True) -> Control:
    return Control(0, 100, 0, weight=weight, digest=0, norm_squared=norm**2, changed=0, finite=finite)


SCHEDULES = st.builds(Schedule, st.integers(2, 12), st.just(0), st.integers(1, 5))


def launches(
    launching: LaunchSchedule, schedule: Schedule, steps: int, rates: Sequence[float] = ()
) -> list[tuple[int, int]]:
    """What is launched where two groups train with a rate that may change from step to step."""
    state, last, launched = launching.start(schedule), dict.fromkeys(range(schedule.fragments), 0), []
    for step in range(1, steps + 1):
        for fragment in launching.due(state, step):
            trained = step - last[fragment]
            rate = rates[step - 1] if rates else 1.0
            # Saved and loaded, as in a checkpoint.
            state = json.loads(json.dumps(state))
            state = launching.heard(state, Heard(fragment, step, (0, 1), (rate * trained,) * 2, (trained,) * 2))
            launched.append((step, fragment))
            last[fragment] = step
    return launched


@given(schedule=SCHEDULES, launching=st.sampled_from([Every(), Selective(threshold=0), Selective(most=1)]))
def test_what_never_launches_less_often_follows_the_schedule(schedule: Schedule, launching: LaunchSchedule) -> None:
    expected = [(step, fragment) for step in range(1, 60) for fragment in schedule.launches(step)]
    assert launches(launching, schedule, 59) == expected


def test_calm_phases_double_the_stride_and_a_jump_ends_them() -> None:
    rates = [1.0 if step <= 150 else 2.0 for step in range(1, 300)]
    steps = [step for step, _ in launches(Selective(threshold=0.3, most=4), Schedule(10, 0, 1), 299, rates)]
    strides = [(b - a) // 10 for a, b in zip(steps, steps[1:], strict=False)]
    assert strides == [1, 2, 4, 4, 4, 1, 2, 4, 4]


def test_one_group_that_changes_is_enough_and_one_that_is_absent_is_not_asked() -> None:
    launching, state = Selective(), {"sync_every": 10, "next": [20], "stride": [1], "rates": [[1.0, 1.0]]}
    assert launching.heard(state, Heard(0, 20, (0, 1), (10.0, 20.0), (10, 10)))["stride"] == [1]
    assert launching.heard(state, Heard(0, 20, (0,), (10.0, 20.0), (10, 10)))["stride"] == [2]
    # Twice the steps with twice the norm is the same rate.
    assert launching.heard(state, Heard(0, 20, (0, 1), (20.0, 10.0), (20, 10)))["stride"] == [2]


@given(schedule=SCHEDULES, most=st.integers(1, 5), since=st.integers(0, 40))
def test_a_request_waits_no_longer_than_is_said(schedule: Schedule, most: int, since: int) -> None:
    launching = Selective(most=most)
    first = next(step for step, _ in launches(launching, schedule, 200) if step > since)
    assert first - since <= launching.longest_wait(schedule, since)


def test_a_group_that_did_not_move_before_has_changed_once_it_does() -> None:
    launching, state = Selective(), {"sync_every": 10, "next": [20], "stride": [1], "rates": [[1.0, 0.0]]}
    assert launching.heard(state, Heard(0, 20, (0, 1), (10.0, 20.0), (10, 10)))["stride"] == [1]
    assert launching.heard(state, Heard(0, 20, (0, 1), (10.0, 0.0), (10, 10)))["stride"] == [2]


NORMS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)


@given(norms=NORMS, weights=st.lists(st.integers(1, 100), min_size=8, max_size=8))
def test_by_norm_is_a_softmax(norms: list[float], weights: list[int]) -> None:
    factors = ByNorm(temperature=2.0).count([said(*own) for own in zip(norms, weights, strict=False)], None).factors
    total = sum(weight * exp(-norm / 2 + min(norms) / 2) for norm, weight in zip(norms, weights, strict=False))
    for group, factor in factors.items():
        share = weights[group] * exp(-norms[group] / 2 + min(norms) / 2) / total
        assert isclose(factor / len(norms), share, rel_tol=1e-9, abs_tol=1e-300)
    assert isclose(sum(factors.values()), len(norms), rel_tol=1e-9)


@given(norms=NORMS)
def test_a_high_temperature_is_the_plain_mean(norms: list[float]) -> None:
    factors = ByNorm(temperature=1e12).count([said(norm) for norm in norms], None).factors
    assert all(isclose(factor, 1, rel_tol=1e-6) for factor in factors.values())


@given(norms=NORMS)
def test_by_median_bounds_what_a_group_adds(norms: list[float]) -> None:
    for group, factor in ByMedian().count([said(norm) for norm in norms], None).factors.items():
        assert isclose(norms[group] * factor, min(norms[group], median(norms)), rel_tol=1e-9)


@pytest.mark.parametrize("weighing", [ByNorm(), ByMedian(), ZScore(warmup=1), Aggregation()])
def test_no_weighing_counts_who_did_not_train_or_is_not_finite(weighing: Weighing) -> None:
    state = weighing.start(4)
    controls = [said(), said(weight=0), said(finite=False), said(2.0)]
    assert sorted(weighing.count(controls, state).factors) == [0, 3]
    assert weighing.count([said(weight=0)] * 4, state).factors == {}
    # A norm may overflow where every value is finite.
    assert all(factor >= 0 for factor in weighing.count([said(inf)] * 2 + controls[:1] * 2, state).factors.values())
    assert all(factor >= 0 for factor in weighing.count([said(inf)] * 4, state).factors.values())


def judged(norms: Sequence[float], weighing: ZScore) -> list[bool]:
    """Whether each norm of a group is left out, beside a group that is always the same."""
    state: Any = weighing.start(2)
    out = []
    for norm in norms:
        controls = [said(), said(norm)]
        out.append(1 in weighing.count(controls, state).outlying)
        state = json.loads(json.dumps(weighing.heard(controls, state)))
    return out


def test_z_scores_leave_out_what_is_unusual_and_accept_what_lasts() -> None:
    usual = [1.0, 1.2, 0.8, 1.1, 0.9] * 4
    weighing = ZScore(threshold=3.0, alpha=0.1, warmup=10)
    assert judged([*usual, 100.0, *usual], weighing) == [False] * 20 + [True] + [False] * 20
    lasting = judged([*usual, *[3.0] * 60], weighing)
    assert lasting[20]
    assert not lasting[-1]


@given(norms=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=30))
def test_until_its_warmup_a_z_score_knows_the_plain_mean_and_deviation(norms: list[float]) -> None:
    weighing, state = ZScore(alpha=1e-6, warmup=1000), [[0, 0.0, 0.0]]
    for norm in norms:
        state = weighing.heard([said(norm)], state)
    count, mean, variance = state[0]
    assert count == len(norms)
    assert isclose(mean, sum(norms) / len(norms), rel_tol=1e-9)
    assert isclose(sqrt(max(0.0, variance)), pstdev(norms), rel_tol=1e-6, abs_tol=1e-6)


def test_carry_keeps_what_was_trained_in_flight() -> None:
    sent, before, after, in_flight = torch.randn(4, 50).unbind()
    local = sent + in_flight
    Carry().merge(local, Carry().gathered(before - sent, before, after), steps=5)
    torch.testing.assert_close(local, after + in_flight)
    for rule in (Mix(0.0), Carry()):
        local = sent.clone()
        rule.merge(local, rule.gathered(before - sent, before, after), steps=0)
        torch.testing.assert_close(local, after)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Selective(threshold=-1), "threshold=-1"),
        (lambda: Selective(most=0), "most=0"),
        (lambda: Selective(most=1.5), "most=1.5"),
    ],
)
def test_arguments_out_of_range_are_refused(make: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
