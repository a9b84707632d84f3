"""Policies: when fragments launch, how much groups count, how they land and with whom; and choices that are refused.

That an engine follows them, `test_reference` and `test_every_way` show, of routes plain loops and closed forms here.
"""

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, inf
from statistics import mean, pvariance
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from lightning_sdiloco import (
    AgreementError,
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
from lightning_sdiloco.compression import ByLink, ErrorFeedback, Int2, Int8, RandomK, Threshold, TopK
from lightning_sdiloco.engine.checkpoint import restart_from
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming, play
from lightning_sdiloco.planning.workload import Groups as Hosts
from lightning_sdiloco.planning.workload import Model
from tests.algorithm.test_aggregation import said
from tests.engine.groups import outer_state
from tests.fits import refusal
from tests.methods import ByMedian, ByNorm, ZScore
from tests.ranks import run_ranks
from tests.training import LAYERS, inner_optimizer, mlp, train_step

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


def launches(rule: LaunchSchedule, schedule: Schedule, steps: int) -> list[tuple[int, int]]:
    """What is launched where two groups train with the same rate at every step."""
    state, last, launched = rule.start(schedule), dict.fromkeys(range(schedule.fragments), 0), []
    for step in range(1, steps + 1):
        for fragment in rule.due(state, step):
            trained = step - last[fragment]
            state = json.loads(json.dumps(state))  # as in a checkpoint
            state = rule.heard(state, Heard(fragment, step, (0, 1), (trained,) * 2, (trained,) * 2))
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
    models, steps = [nn.Linear(4, 1, bias=False) for _ in range(2)], []
    choices: dict[str, Any] = {"sync_every": 10, "overlap_steps": 0, "mixing": 0.0, "compression": "fp32"}
    choices |= {"outer_lr": 1.0, "outer_momentum": 0.0, "warmup_steps": 5, "schedule": Selective(threshold=0.3, most=4)}
    groups = SimulatedGroups(models, **choices)
    for step in range(-4, 300):
        # By what a group moves in a step that it trains: one rests in half of the steps of every second round.
        idle = [1] if step // 10 % 2 and step % 2 else []
        for group, model in enumerate(models):
            model.weight.data += (1.0 if step <= 120 else 2.0) * (group not in idle)
        groups.average_gradients()
        steps += [step for _ in groups.step(idle=idle)[0] if step > 0]
    assert steps[0] == 10, "counted from the end of the warm-up"
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
    controls = [said(), said(weight=0), said(finite=False), said(norm=2.0)]
    assert sorted(weighing.count(controls, state).factors) == [0, 3]
    assert weighing.count([said(weight=0)] * 4, state).factors == {}
    # A norm may overflow where every value is finite.
    for overflown in ([said(norm=inf)] * 2 + controls[:1] * 2, [said(norm=inf)] * 4):
        assert all(factor >= 0 for factor in weighing.count(overflown, state).factors.values())


def test_weighings_are_their_formulas_and_z_scores_leave_out_what_is_unusual_and_accept_what_lasts() -> None:
    norms, trained = (0.1, 0.5, 0.3), (3, 1, 2)
    raw = [steps * exp(-norm / 0.2) for norm, steps in zip(norms, trained, strict=True)]
    by_norm, by_median = [own / sum(raw) for own in raw], [3 / 6, 1 / 6 * 0.3 / 0.5, 2 / 6]
    for formula, expected in ((ByNorm(temperature=0.2), by_norm), (ByMedian(), by_median)):
        count = formula.count([said(*own) for own in zip(trained, norms, strict=True)], formula.start(3))
        assert [factor / 3 for factor in count.factors.values()] == pytest.approx(expected)
    usual = [1.0, 1.2, 0.8, 1.1, 0.9] * 4
    scores: Any = ZScore(alpha=0.0).start(1)
    for norm in usual:
        scores = ZScore(alpha=0.0).heard([said(norm=norm)], scores)
    assert scores[0] == pytest.approx([20, mean(usual), pvariance(usual)])
    for norms in ([*usual, 100.0, *usual], [*usual, *[3.0] * 60]):
        weighing, out = ZScore(threshold=3.0, alpha=0.1, warmup=10), []
        state: Any = weighing.start(2)
        for norm in norms:
            controls = [said(), said(norm=norm)]
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


def test_the_state_of_other_fragments_or_outer_optimizers_is_refused() -> None:
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


# Routes: groups that average with partners hold outer parameters of their own

OUTER: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5}
PURE: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "mixing": 0.0}
SPEEDS = (5.0, 1.0, 3.0, 3.0, 1.0, 2.0, 5.0)


class Vector(nn.Module):
    """A model that is one vector, drawn to a target of its group."""

    def __init__(self, numel: int = 64) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(numel))

    @torch.no_grad()
    def train_to(self, target: Tensor) -> None:
        self.values += 0.1 * (target - self.values)


def vectors(groups: int, numel: int = 64, **choices: Any) -> tuple[list[Any], SimulatedGroups]:
    models = [Vector(numel) for _ in range(groups)]
    return models, SimulatedGroups(models, **{"sync_every": 4, "overlap_steps": 0, "compression": "fp32", **choices})


def stacked(models: Sequence[Any]) -> Tensor:
    return torch.stack([model.values.detach().double() for model in models])


def begin(models: Sequence[Any], seed: int) -> Tensor:
    """Gives every group values of its own."""
    start = torch.randn(len(models), models[0].values.numel(), generator=torch.Generator().manual_seed(seed))
    for model, values in zip(models, start, strict=True):
        model.values.data.copy_(values)
    return start.double()


def own_outer(groups: SimulatedGroups) -> Tensor:
    return torch.stack([torch.cat([own["outer"] for own in outer_state(engine)]).double() for engine in groups.engines])


def ring_numbers(groups: int) -> tuple[float, float]:
    """Rate and pull of A2CiD2 by numpy: from the Laplacian of the ring."""
    laplacian = np.eye(groups) - (np.roll(np.eye(groups), 1, 0) + np.roll(np.eye(groups), -1, 0)) / 2
    slow = 1 / np.sort(np.linalg.eigvalsh(laplacian))[1]
    edge = np.eye(groups)[0] - np.eye(groups)[1]
    resistance = edge @ np.linalg.pinv(laplacian) @ edge / 2
    return 0.5 / np.sqrt(slow * resistance), 0.5 * np.sqrt(slow / resistance)


@dataclass(frozen=True)
class Neighbours(Route):
    """A user's own: neighbours in a row, from the left and from the right in turn; who is left over joins the last."""

    def legs(self, number: int, groups: int) -> Sequence[tuple[int, ...]]:
        row = list(range(groups)) if number % 2 == 0 else [*range(1, groups), 0]
        pairs = [tuple(sorted(row[at : at + 2])) for at in range(0, groups - 1, 2)]
        return [*pairs[:-1], tuple(sorted((*pairs[-1], row[-1])))] if groups % 2 else pairs


@pytest.mark.parametrize(
    "route", [RandomPairs(seed=3), FastestPairs(speeds=SPEEDS), Ring(), Neighbours()], ids=lambda r: type(r).__name__
)
def test_routes_follow_plain_loops(route: Route) -> None:
    m, h, overlap, mixing, lr, mu = 7, 4, 2, 0.25, 0.7, 0.5
    accelerated = isinstance(route, Ring)
    outer_step = {} if accelerated else {"outer_optimizer": partial(torch.optim.SGD, lr=lr, momentum=mu)}
    models, groups = vectors(m, overlap_steps=overlap, mixing=mixing, route=route, sync_every=h, **outer_step)
    targets = torch.randn(m, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    local, outer, twin = (torch.zeros(m, 64, dtype=torch.float64) for _ in range(3))
    velocity, rate, pull = torch.zeros_like(local), *ring_numbers(m)
    sent, s = local, np.exp(-2 * rate)
    for step in range(1, 43):
        for model, target in zip(models, targets, strict=True):
            model.train_to(target.float())
        groups.step()
        local = local + 0.1 * (targets - local)
        if step % h == 0:
            sent = local
        if step > h - 1 and step % h == overlap:
            number, values, second = step // h - 1, sent, twin + sent - outer
            if accelerated:
                more, less = (1 + s) / 2, (1 - s) / 2
                values, second = more * values + less * second, less * values + more * second
            mean = torch.empty_like(values)
            for leg in route.legs(number, m):
                mean[list(leg)] = values[list(leg)].mean(0)
            twin = second + 2 * pull * (mean - values)
            velocity = mu * velocity + outer - mean
            outer = mean if accelerated else outer - lr * velocity
            local = mixing * local + (1 - mixing) * outer
        assert torch.allclose(own_outer(groups), outer, atol=2e-6)
        assert torch.allclose(stacked(models), local, atol=2e-6)
    shown = groups.outer_state_dict()["values"]
    assert torch.allclose(shown.double(), local.mean(0), atol=2e-6)
    groups.finish()
    assert all(torch.equal(model.values, models[0].values) for model in models)
    assert torch.allclose(models[0].values.double(), local.mean(0), atol=2e-6)


def test_pure_mixing_keeps_the_mean_counts_rounds_from_the_end_of_the_warm_up_and_sends_to_partners_alone() -> None:
    for route in (RandomPairs(), FastestPairs(), Ring()):
        choices = PURE if not isinstance(route, Ring) else {"mixing": 0.0}
        for compression in ("fp32", "bf16", "int8", RandomK(4, Int8())):
            models, groups = vectors(5, 256, route=route, **{**choices, "compression": compression})
            mean, variance = (start := begin(models, 1)).mean(0), start.var(0).mean()
            for _ in range(40):
                groups.step(idle=range(5))
                assert torch.allclose(stacked(models).mean(0), mean, atol=1e-6), (route, compression)
            assert stacked(models).var(0).mean() < 0.5 * variance
    models, groups = vectors(6, route=Neighbours(), warmup_steps=1, **{**PURE, "sync_every": 1})
    groups.average_gradients()
    groups.step()
    expected = begin(models, 2)
    for number in range(9):
        groups.step()
        for leg in Neighbours().legs(number, 6):
            expected[list(leg)] = expected[list(leg)].mean(0)
        assert torch.allclose(stacked(models), expected, atol=1e-5)
    choices = {"sync_every": 4, "overlap_steps": 0, "mixing": 0.0, "compression": "fp32", **OUTER}
    choices["route"] = FastestPairs(speeds=SPEEDS[:6])
    _, groups = vectors(6, **choices)
    for _ in range(12):
        groups.step()
    method = Streaming(Model.of_size(64, layers=1), Settings(**choices), Hosts(groups=6, step_time=1.0))
    assert method.bytes_per_step * 12 == groups.engines[0].report()["bytes_sent"]


def test_digests_are_checked_between_partners_and_who_is_not_finite_takes_the_values_of_its_partner() -> None:
    _, groups = vectors(4, route=RandomPairs(), **OUTER)
    state = groups.engines[1].state_dict()
    state["fragments"][0] = {**state["fragments"][0], "anchor": torch.ones(64)}
    groups.engines[1].load_state_dict(state)
    for _ in range(3):
        groups.step()
    with pytest.raises(AgreementError, match="did not begin from the same outer parameters"):
        groups.step()
    models, groups = vectors(4, route=RandomPairs(), **PURE)
    for group, model in enumerate(models):
        model.values.data.fill_(float(group) if group else float("nan"))
    for _ in range(3):
        groups.step()
    assert [landing.left_out for landed in groups.step() for landing in landed] == [(0,)] * 4, "all know"
    partner = sum(next(leg for leg in RandomPairs().legs(0, 4) if 0 in leg))
    assert stacked(models)[:, 0].tolist()[0] == stacked(models)[partner, 0] == partner


def test_rounds_start_anew_from_the_mean() -> None:
    models: list[Any] = [Vector() for _ in range(4)]
    for model in models:
        model.register_buffer("seen", torch.zeros(2))
    choices: dict[str, Any] = {"sync_every": 4, "overlap_steps": 1, "mixing": 0.0, "compression": "fp32", **OUTER}
    groups = SimulatedGroups(models, **choices, route=RandomPairs())
    for _ in range(9):
        for group, model in enumerate(models):
            model.train_to(torch.full((64,), float(group)))
            model.seen += group
        groups.step()
    states = [engine.state_dict() for engine in groups.engines]
    restart: Any = restart_from([[state] for state in states], Settings())
    found = restart.parameters["values"]
    assert torch.allclose(found.values.double(), own_outer(groups).mean(0))
    own = [state["fragments"][0] for state in states]
    for joined, parts in (
        (found.state["momentum_buffer"], [of["state"]["momentum_buffer"] for of in own]),
        (restart.buffers["seen"], [of["buffers"][0] for of in own]),
    ):
        assert torch.allclose(joined, torch.stack(parts).mean(0))
        assert not torch.allclose(joined, parts[0])


def test_the_fastest_pairs_are_those_that_any_could_make_and_the_pairs_of_a_window_connect_all() -> None:
    # By trying them all; what is slowest counts first.
    for seed in range(6):
        drawn = np.random.default_rng(seed).permutation(16).reshape(4, 4) + 1.0
        speeds = tuple(tuple(float(value) for value in row) for row in np.minimum(drawn, drawn.T))
        ways = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)), FastestPairs(speeds=speeds).legs(0, 4)]
        *possible, chosen = (sorted(speeds[one][other] for one, other in pairs) for pairs in ways)
        assert chosen == max(possible)
    for groups in (1, 2, 3, 7, 16):
        line = tuple(float(1 + (7 * group) % 5) for group in range(groups))
        table = tuple(tuple(1.0 + (3 * a * a + 3 * b * b + a * b) % 11 for b in range(groups)) for a in range(groups))
        for route in (FastestPairs(window=2), FastestPairs(speeds=line), FastestPairs(speeds=table, window=4)):
            for block in (0, 3):
                parts = {group: {group} for group in range(groups)}
                for number in range(block * route.window, (block + 1) * route.window):
                    legs = route.legs(number, groups)
                    assert sorted(group for leg in legs for group in leg) == list(range(groups))
                    assert all(2 <= len(leg) <= 3 for leg in legs) or groups == 1
                    for leg in legs:
                        joined = set().union(*(parts[group] for group in leg))
                        parts.update(dict.fromkeys(joined, joined))
                assert len(parts[0]) == groups


def test_the_clock_knows_unequal_links_and_pairs() -> None:
    """Two fast groups and two slow ones: who pairs by speed lets the fast ones wait for one round less."""
    links = [Link(gbit_s=speed) for speed in (1.0, 1.0, 0.1, 0.1)]
    hosts = Hosts(groups=4, step_time=1.0, memory_rate=1e15)
    pairs = FastestPairs(speeds=(10, 10, 1, 1))
    # In multiples of what a payload takes on a slow link, whose later launch the second landing awaits.
    for route, steps, rounds in ((pairs, 10, 0.1), (pairs, 20, 2.0), (None, 20, 3.0)):
        settings = Settings(sync_every=10, overlap_steps=0, compression="fp32", route=route, mixing=0.0)
        method = Streaming(Model.of_size(10**7, layers=1), settings, hosts)
        end = play(method, links[0], steps, [1.0] * 4, links=links)[0].steps[-1]
        assert end == pytest.approx(steps + rounds * 3.2, rel=0.01)
