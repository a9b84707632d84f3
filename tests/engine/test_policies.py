"""Policies: what decides when fragments launch, how much groups count, and how they land; their rules and refusals.

That an engine follows them, `test_reference` and `test_every_way` show.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import pstdev
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from torch import Tensor, nn

from lightning_sdiloco import (
    Carry,
    Control,
    Count,
    Federation,
    Heard,
    LandingRule,
    LaunchSchedule,
    OuterOptimizer,
    Schedule,
    Selective,
    StreamingDiLoCo,
    StreamingDiLoCoStrategy,
    TwoShot,
    Weighing,
)
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.schedule import Every
from lightning_sdiloco.algorithm.weighting import Aggregation
from tests.methods import ByMedian, ByNorm, ZScore


def said(norm: float = 1.0, weight: int = 100, finite: bool = True) -> Control:
    """What a group says at the launch of fragment 0."""
    return Control(0, 100, 0, weight=weight, digest=0, norm_squared=norm**2, changed=0, finite=finite)


# Policies of a user


@dataclass(frozen=True)
class Rarer(LaunchSchedule):
    """Launches less and less often."""

    by: int = 2

    def start(self, schedule: Schedule) -> dict[str, Any]:
        return {"next": [schedule.sync_every + schedule.offset(p) for p in range(schedule.fragments)], "gap": 4}

    def due(self, state: Any, step: int) -> tuple[int, ...]:
        return tuple(p for p, at in enumerate(state["next"]) if at == step)

    def heard(self, state: Any, landing: Heard) -> dict[str, Any]:
        at = [*state["next"]]
        at[landing.fragment] = landing.launched_at + state["gap"]
        return {"next": at, "gap": state["gap"] + self.by}


@dataclass(frozen=True)
class Loudest(Weighing):
    """Listens to the longest outer gradient alone."""

    def start(self, groups: int) -> list[int]:
        return [0] * groups

    def count(self, controls: Sequence[Control], state: Any) -> Count:
        able = [group for group, control in enumerate(controls) if control.finite and control.weight]
        return Count({max(able, key=lambda group: (controls[group].norm, -state[group])): 1.0} if able else {})

    def heard(self, controls: Sequence[Control], state: Any) -> list[int]:
        return [seen + (group in self.count(controls, state).factors) for group, seen in enumerate(state)]


@dataclass(frozen=True)
class DelayCompensation(LandingRule):
    """Corrects what was trained in flight for where it should have been trained."""

    strength: float = 0.5
    kept: float = 0.0

    def gathered(self, gradient: Tensor, before: Tensor, after: Tensor) -> Sequence[Tensor]:
        return before - gradient, after

    def merge(self, local: Tensor, gathered: Sequence[Tensor], steps: int) -> None:
        sent, after = gathered
        step = (local - sent) / max(1, steps)
        local.copy_(after + steps * (step + self.strength * step * step * (after - sent)))


# When fragments launch

SCHEDULES = st.builds(Schedule, st.integers(2, 12), st.just(0), st.integers(1, 5))


def launches(
    rule: LaunchSchedule, schedule: Schedule, steps: int, rates: Sequence[float] = ()
) -> list[tuple[int, int]]:
    """What is launched where two groups train with a rate that may change from step to step."""
    state, last, launched = rule.start(schedule), dict.fromkeys(range(schedule.fragments), 0), []
    for step in range(1, steps + 1):
        for fragment in rule.due(state, step):
            trained = step - last[fragment]
            rate = rates[step - 1] if rates else 1.0
            state = json.loads(json.dumps(state))  # as in a checkpoint
            state = rule.heard(state, Heard(fragment, step, (0, 1), (rate * trained,) * 2, (trained,) * 2))
            launched.append((step, fragment))
            last[fragment] = step
    return launched


@given(schedule=SCHEDULES, most=st.integers(1, 5), since=st.integers(0, 40))
def test_who_never_launches_less_often_follows_the_schedule_and_no_request_waits_longer_than_is_said(
    schedule: Schedule, most: int, since: int
) -> None:
    expected = [(step, fragment) for step in range(1, 60) for fragment in schedule.launches(step)]
    assert [launches(rule, schedule, 59) for rule in (Every(), Selective(threshold=0), Selective(most=1))] == [
        expected
    ] * 3
    rule = Selective(most=most)
    first = next(step for step, _ in launches(rule, schedule, 200) if step > since)
    assert first - since <= rule.longest_wait(schedule, since)


def test_calm_phases_double_the_stride_and_a_jump_ends_them() -> None:
    rates = [1.0 if step <= 150 else 2.0 for step in range(1, 300)]
    steps = [step for step, _ in launches(Selective(threshold=0.3, most=4), Schedule(10, 0, 1), 299, rates)]
    assert [(b - a) // 10 for a, b in zip(steps, steps[1:], strict=False)] == [1, 2, 4, 4, 4, 1, 2, 4, 4]
    # By the rates of before, who counts, norms and steps trained: one group that changes is enough, one that is absent
    # is not asked, and one that did not move has changed once it does.
    for rate, counted, norms, trained, stride in (
        (1.0, (0, 1), (10.0, 20.0), (10, 10), 1),
        (1.0, (0,), (10.0, 20.0), (10, 10), 2),
        (1.0, (0, 1), (20.0, 10.0), (20, 10), 2),
        (0.0, (0, 1), (10.0, 20.0), (10, 10), 1),
        (0.0, (0, 1), (10.0, 0.0), (10, 10), 2),
    ):
        state = {"sync_every": 10, "next": [20], "stride": [1], "rates": [[1.0, rate]]}
        assert Selective().heard(state, Heard(0, 20, counted, norms, trained))["stride"] == [stride]
    for wrong in ({"threshold": -1}, {"most": 0}, {"most": 1.5}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{name}={value}"):
            Selective(**wrong)  # type: ignore[arg-type]


# How much groups count


@pytest.mark.parametrize("weighing", [ByNorm(), ByMedian(), ZScore(warmup=1), Aggregation()])
def test_no_weighing_counts_who_did_not_train_or_is_not_finite(weighing: Weighing) -> None:
    state = weighing.start(4)
    controls = [said(), said(weight=0), said(finite=False), said(2.0)]
    assert sorted(weighing.count(controls, state).factors) == [0, 3]
    assert weighing.count([said(weight=0)] * 4, state).factors == {}
    # A norm may overflow where every value is finite.
    for overflown in ([said(inf)] * 2 + controls[:1] * 2, [said(inf)] * 4):
        assert all(factor >= 0 for factor in weighing.count(overflown, state).factors.values())


@given(norms=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=30))
def test_until_its_warmup_a_z_score_knows_the_plain_mean_and_deviation(norms: list[float]) -> None:
    weighing, state = ZScore(alpha=1e-6, warmup=1000), [[0, 0.0, 0.0]]
    for norm in norms:
        state = weighing.heard([said(norm)], state)
    count, mean, variance = state[0]
    assert (count, mean) == (len(norms), pytest.approx(sum(norms) / len(norms)))
    assert sqrt(max(0.0, variance)) == pytest.approx(pstdev(norms), rel=1e-6, abs=1e-6)


def test_z_scores_leave_out_what_is_unusual_and_accept_what_lasts() -> None:
    usual = [1.0, 1.2, 0.8, 1.1, 0.9] * 4
    for norms in ([*usual, 100.0, *usual], [*usual, *[3.0] * 60]):
        weighing, out = ZScore(threshold=3.0, alpha=0.1, warmup=10), []
        state: Any = weighing.start(2)
        for norm in norms:
            controls = [said(), said(norm)]
            out.append(1 in weighing.count(controls, state).outlying)
            state = json.loads(json.dumps(weighing.heard(controls, state)))
        assert out[20]
        assert not any(out[:20] + out[-20:])


class NoDataclass(LaunchSchedule):
    start = due = heard = lambda self, *told: ()  # type: ignore[assignment]


def test_what_does_not_go_together_is_refused() -> None:
    for choices, told in (
        ({"schedule": 3}, "schedule=3 is no LaunchSchedule"),
        ({"weighing": "by_norm"}, "weighing='by_norm' is no Weighing"),
        ({"schedule": NoDataclass()}, "frozen dataclass"),
        ({"weighing": ByNorm(), "outer_optimizer": OuterOptimizer(clip_norm=1.0)}, "together with clip_norm"),
        ({"weighing": ZScore(), "outer_optimizer": OuterOptimizer(outlier_guard=5.0)}, "together with outlier_guard"),
    ):
        with pytest.raises(ValueError, match=told):
            StreamingDiLoCo(nn.Linear(2, 2), **choices)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"schedule=Selective.* does not go with overlap_steps='auto'"):
        StreamingDiLoCoStrategy(schedule=Selective(), overlap_steps="auto")


def test_a_federation_refuses_them_by_name() -> None:
    federation = Federation(hub="localhost:1", run="r", site="a", insecure=True)
    policies: list[tuple[str, Any]] = [
        *(("schedule", one) for one in (Selective(), Rarer())),
        *(("weighing", one) for one in (ByNorm(), ZScore(), ByMedian(), Loudest())),
        *(("mixing", one) for one in (Carry(), DelayCompensation())),
        ("exchange", TwoShot([1.0])),
    ]
    for name, policy in policies:
        with pytest.raises(ValueError, match=rf"{name}=.* does not go with a federation"):
            StreamingDiLoCo(nn.Linear(2, 2), federation=federation, **{name: policy})


def test_a_checkpoint_with_a_policy_is_refused_without_it_and_the_other_way_round() -> None:
    plain, selective = Settings().chosen_for(2), Settings(schedule=Selective(), mixing=Carry()).chosen_for(2)
    saved, now = selective.fixed_by_a_checkpoint(), plain.fixed_by_a_checkpoint()
    assert "schedule was Selective" in " ".join(Settings.differences(saved, now))
    assert "schedule was None" in " ".join(Settings.differences(now, saved))
    assert not Settings.differences(saved, saved)
    assert "mixing was Carry()" in " ".join(Settings.differences(saved, Settings().taken_from(saved).described()))
