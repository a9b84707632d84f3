"""Policies: what decides when fragments launch, how much groups count, and how they land; and choices that are refused.

That an engine follows them, `test_reference` and `test_every_way` show.
"""

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from lightning_sdiloco import (
    Carry,
    Control,
    Count,
    FastestPairs,
    Federation,
    Heard,
    LandingRule,
    LaunchSchedule,
    OuterOptimizer,
    RandomPairs,
    Ring,
    Route,
    Schedule,
    Selective,
    SimulatedGroups,
    StreamingDiLoCo,
    StreamingDiLoCoStrategy,
    TwoShot,
    Weighing,
)
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.schedule import Every
from lightning_sdiloco.algorithm.weighting import Aggregation
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import ByLink, ErrorFeedback, Int2, Threshold, TopK
from tests.fits import refusal
from tests.methods import ByMedian, ByNorm, ZScore
from tests.ranks import run_ranks
from tests.training import LAYERS, inner_optimizer, mlp, train_step


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


class Halves(Route):
    def legs(self, number: int, groups: int) -> Sequence[tuple[int, ...]]:
        return ((0,),)


class Halving(StepLR):
    """Needs to be told something at every step."""

    def step(self, loss: float | None = None) -> None:  # type: ignore[override]
        if loss is None and self._step_count:
            raise TypeError("tell the loss")
        super().step()


def scheduled(schedule: Any) -> dict[str, Any]:
    return {"outer_optimizer": OuterOptimizer(lr_schedule=schedule)}


GUARD, CLIP = ({"outer_optimizer": OuterOptimizer(**{key: 5.0})} for key in ("outlier_guard", "clip_norm"))
KEPT = Threshold(1 / 16, Int2(), every=3)
TWO_SHOT = {"exchange": "two_shot"}
SCHEDULE = "^outer_optimizer.lr_schedule .*"
CHOICES: list[tuple[dict[str, Any], str]] = [
    ({"schedule": 3}, "schedule=3 is no LaunchSchedule"),
    ({"weighing": "by_norm"}, "weighing='by_norm' is no Weighing"),
    ({"schedule": NoDataclass()}, "frozen dataclass"),
    ({"weighing": ByNorm(), **CLIP}, "together with clip_norm"),
    ({"weighing": ZScore(), **GUARD}, "together with outlier_guard"),
    (scheduled(ReduceLROnPlateau), SCHEDULE + "made a ReduceLROnPlateau, which needs a metric"),
    (scheduled(partial(Halving, step_size=3)), SCHEDULE + "a Halving, which cannot be stepped by the count .*: tell"),
    (scheduled(lambda optimizer: 0.5), SCHEDULE + "made a float, which is no torch.optim.lr_scheduler.LRScheduler"),
    (scheduled(lambda _: StepLR(SGD([torch.zeros(1)], lr=0.1), 3)), SCHEDULE + "a StepLR, which schedules another opt"),
    (scheduled(CosineAnnealingLR), SCHEDULE + "could not make a scheduler .*T_max.*functools.partial"),
    (scheduled(lambda _: {}["rounds"]), SCHEDULE + "could not make a scheduler of the outer optimizer: 'rounds'"),
    ({"compression": ByLink(), **TWO_SHOT}, "exchange='two_shot' was given with compression=ByLink.*differ in length"),
    ({"compression": ByLink(["fp5"])}, "compression='fp5' is not known"),
    ({"compression": ByLink(["fp4", "threshold"])}, "lengths that are not known beforehand"),
    ({"compression": ErrorFeedback(KEPT), **TWO_SHOT}, "exchange='two_shot' was given with compression=ErrorFeedback"),
    ({"compression": ErrorFeedback(TopK(1 / 16, Int2(), over="senders")), **TWO_SHOT}, "'two_shot' .*=ErrorFeedback"),
]
FOR_ROUTES: list[tuple[dict[str, Any], str]] = [
    ({"route": 3}, "route=3 is no Route"),
    ({"route": Halves()}, "frozen dataclass"),
    (TWO_SHOT, "exchange='two_shot' does not go with route"),
    ({"schedule": Selective()}, "schedule=.* does not go with route"),
    ({"weighing": ByNorm()}, "weighing=.* does not go with route"),
    (GUARD, "outlier_guard=5.0 does not go with route"),
    (CLIP, "clip_norm=5.0 does not go with route"),
    ({"compression": "fp4"}, "loses"),
    ({"compression": "sparse"}, "must send each other the same values"),
    ({"route": Ring(), "outer_lr": 0.4}, "momentum takes the place of an outer step"),
    ({"route": FastestPairs(speeds=(1, 2, 3))}, "speeds of 3 groups, and there are 5"),
]
FOR_SITES: list[tuple[str, Any]] = [
    *(("schedule", one) for one in (Selective(), Rarer())),
    *(("weighing", one) for one in (ByNorm(), ZScore(), ByMedian(), Loudest())),
    *(("mixing", one) for one in (Carry(), DelayCompensation())),
    ("exchange", TwoShot([1.0])),
    ("route", RandomPairs()),
]
ALONE: list[tuple[Callable[..., Any], str, Any]] = [
    *((FastestPairs, *own) for own in (("window", 1), ("speeds", (1.0, 0.0)), ("speeds", ((1.0, 2.0), (1.0,))))),
    *((ByLink, *own) for own in (("menu", ()), ("menu", "fp4"), ("within", 0.0), ("within", "launch"))),
    *((Selective, *own) for own in (("threshold", -1), ("most", 0), ("most", 1.5))),
]


def test_what_cannot_be_or_does_not_go_together_is_refused_by_name() -> None:
    of_group = partial(refusal, SimulatedGroups, [mlp() for _ in range(5)])
    found = [(words, of_group(**choices)) for choices, words in CHOICES]
    found += [(words, of_group(**{"route": RandomPairs(), "compression": "fp32", **own})) for own, words in FOR_ROUTES]
    found.append(("fewer than 4", refusal(SimulatedGroups, [mlp()] * 3, route=Ring(), compression="fp32")))
    federation = Federation(hub="localhost:1", run="r", site="a", insecure=True)
    for name, one in FOR_SITES:
        said = refusal(StreamingDiLoCo, mlp(), federation=federation, **{"compression": "fp32", name: one})
        found.append((f"{name}=.* does not go with a federation", said))
    for make, name, value in ALONE:
        found.append((re.escape(f"{name}=") if make is not FastestPairs else name, refusal(make, **{name: value})))
    found.append(("lengths that are not known beforehand", refusal(ByLink, [KEPT])))
    auto = refusal(StreamingDiLoCoStrategy, route=RandomPairs(), sync_every="auto", compression="fp32")
    found.append(("route=.* does not go with sync_every='auto'", auto))
    auto = refusal(StreamingDiLoCoStrategy, schedule=Selective(), overlap_steps="auto")
    found.append(("schedule=Selective.* does not go with overlap_steps='auto'", auto))
    topology = Topology()
    topology.exchange.learns_sizes = False
    for code in (ByLink(), "threshold+memory"):
        said = refusal(StreamingDiLoCo, mlp(), topology=replace(topology), compression=code)
        found.append((r"exchange='\.\.\.:nccl'", said))
    assert [(words, said) for words, said in found if not re.search(words, said)] == []


def test_schedules_that_differ_between_ranks_are_refused() -> None:
    def times(factor: float) -> Any:
        return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: factor)

    differing: list[tuple[list[Any], str]] = [
        ([None, partial(StepLR, step_size=3)], "differ between ranks: outer_optimizer.lr_schedule is None on rank 0"),
        ([partial(StepLR, step_size=step) for step in (300, 301)], r"lr_schedule is StepLR \(0.4, 0.4, "),
        ([times(0.5), times(0.25)], r"lr_schedule is LambdaLR \(0.2, 0.2, 0.2, 0.2, ...; 1000 rounds: "),
    ]
    at_different_addresses = [times(0.5), times(0.5)]

    def refusals(rank: int, world_size: int) -> list[str]:
        StreamingDiLoCo(mlp(), **scheduled(at_different_addresses[rank]))
        return [refusal(StreamingDiLoCo, mlp(), outer_lr=0.4, **scheduled(own[rank])) for own, _ in differing]

    for texts in run_ranks(refusals, 2):
        assert [text for text, (_, told) in zip(texts, differing, strict=True) if not re.search(told, text)] == []


def test_the_state_of_other_fragments_policies_or_outer_optimizers_is_refused() -> None:
    was = "another outer_optimizer.lr_schedule: it was CosineAnnealingLR"
    cosine = {rounds: scheduled(partial(CosineAnnealingLR, T_max=rounds)) for rounds in (50, 60)}
    sgd: dict[float, Any] = {lr: {"outer_optimizer": partial(SGD, lr=lr)} for lr in (0.1, 0.2)}  # of one name
    made: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"fragments": [["*"]]}, {}, "other fragments"),
        (sgd[0.1], sgd[0.2], "another outer_optimizer: it was SGD.*'lr': 0.1.*now it is SGD.*'lr': 0.2"),
        (cosine[50], cosine[60], was),
        (cosine[50], scheduled(None), was),
    ]
    state = StreamingDiLoCo(mlp(), fragments=LAYERS, **cosine[50]).state_dict()
    StreamingDiLoCo(mlp(), fragments=LAYERS, **scheduled(partial(CosineAnnealingLR, T_max=50))).load_state_dict(state)
    for before, now, told in made:
        state = StreamingDiLoCo(mlp(), **{"fragments": LAYERS, **before}).state_dict()
        assert re.search(told, refusal(StreamingDiLoCo(mlp(), **{"fragments": LAYERS, **now}).load_state_dict, state))
    plain, selective = Settings().chosen_for(2), Settings(schedule=Selective(), mixing=Carry()).chosen_for(2)
    saved, now_ = selective.fixed_by_a_checkpoint(), plain.fixed_by_a_checkpoint()
    assert "schedule was Selective" in " ".join(Settings.differences(saved, now_))
    assert "schedule was None" in " ".join(Settings.differences(now_, saved))
    assert not Settings.differences(saved, saved)
    assert "mixing was Carry()" in " ".join(Settings.differences(saved, Settings().taken_from(saved).described()))


def test_simulated_groups_whose_optimizers_share_their_state_are_refused() -> None:
    """What `load_state_dict` is given it keeps, so that optimizers that load one state share its tensors."""
    models = [mlp() for _ in range(2)]
    optimizers = [inner_optimizer("adamw", model) for model in models]
    train_step(models[0], optimizers[0], 0, 1)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    inner: list[list[torch.optim.Optimizer]] = [[one] for one in optimizers]
    assert "groups 0 and 1 share tensors of their state" in refusal(SimulatedGroups, models, inner)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    SimulatedGroups(models, inner)
