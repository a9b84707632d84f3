"""Policies: when fragments launch, how much groups count, how they land and with whom; and choices
that are refused.

That an engine follows them, `test_reference` and `test_every_way` show, of routes plain loops and
closed forms here. Then what is chosen for ``"auto"``, what suits ``"sparse"``, that a checkpoint
has the last word, and the schedule against the paper's rule, for many (H, P, tau).
"""

import copy
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, inf
from pathlib import Path
from statistics import mean, pvariance
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from lightning_sdiloco import (
    Federation,
    OuterOptimizer,
    SimulatedGroups,
    StreamingDiLoCo,
    StreamingDiLoCoStrategy,
)
from lightning_sdiloco.algorithm.config import SPARSE_GAINS, OuterStep, Settings, recommended
from lightning_sdiloco.algorithm.gossip import RandomPairs, Ring, Route
from lightning_sdiloco.algorithm.merge import Carry, LandingRule
from lightning_sdiloco.algorithm.reduce import TwoShot
from lightning_sdiloco.algorithm.schedule import Every, Heard, LaunchSchedule, Schedule, Selective
from lightning_sdiloco.algorithm.weighting import Aggregation, Control, Count, Weighing
from lightning_sdiloco.comm.exchange import InProcessExchange
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import (
    FP4,
    ByLink,
    ErrorFeedback,
    Float32,
    Int2,
    Int8,
    RandomK,
    Threshold,
    TopK,
)
from lightning_sdiloco.engine.restart import restart_from
from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming, play
from lightning_sdiloco.planning.workload import Groups as Hosts
from lightning_sdiloco.planning.workload import Model
from tests.algorithm.test_aggregation import said
from tests.engine.groups import MEAN, Groups, outer_state, unlike, with_statistics
from tests.fits import SHORT, refusal
from tests.methods import ByMedian, ByNorm, FastestPairs, ZScore
from tests.ranks import run_ranks
from tests.reference import is_launched
from tests.training import LAYERS, inner_optimizer, mlp, train_step

# Policies of a user


@dataclass(frozen=True)
class Rarer(LaunchSchedule):
    """Launches less and less often."""

    by: int = 2

    def start(self, schedule: Schedule) -> dict[str, Any]:
        return {
            "next": [schedule.sync_every + schedule.offset(p) for p in range(schedule.fragments)],
            "gap": 4,
        }

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
        able = [
            group for group, control in enumerate(controls) if control.finite and control.weight
        ]
        return Count(
            {max(able, key=lambda group: (controls[group].norm, -state[group])): 1.0}
            if able
            else {}
        )

    def heard(self, controls: Sequence[Control], state: Any) -> list[int]:
        return [
            seen + (group in self.count(controls, state).factors)
            for group, seen in enumerate(state)
        ]


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


SCHEDULES = st.builds(Schedule, st.integers(2, 12), st.just(0), st.integers(1, 5))


def launches(rule: LaunchSchedule, schedule: Schedule, steps: int) -> list[tuple[int, int]]:
    """What is launched where two groups train with the same rate at every step."""
    state = rule.start(schedule)
    last = dict.fromkeys(range(schedule.fragments), 0)
    launched = []
    for step in range(1, steps + 1):
        for fragment in rule.due(state, step):
            trained = step - last[fragment]
            state = json.loads(json.dumps(state))  # as in a checkpoint
            state = rule.heard(state, Heard(fragment, step, (0, 1), (trained,) * 2, (trained,) * 2))
            launched.append((step, fragment))
            last[fragment] = step
    return launched


@given(schedule=SCHEDULES, most=st.integers(1, 5), since=st.integers(0, 40))
def test_policies_that_skip_nothing_follow_the_schedule_and_requests_wait_in_bounds(
    schedule: Schedule, most: int, since: int
) -> None:
    expected = [(step, fragment) for step in range(1, 60) for fragment in schedule.launches(step)]
    assert [
        launches(rule, schedule, 59)
        for rule in (Every(), Selective(threshold=0), Selective(most=1))
    ] == [expected] * 3
    rule = Selective(most=most)
    first = next(step for step, _ in launches(rule, schedule, 200) if step > since)
    assert first - since <= rule.longest_wait(schedule, since)


def test_calm_phases_double_the_stride_and_a_jump_ends_them() -> None:
    models = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    steps = []
    choices: dict[str, Any] = {"sync_every": 10, "overlap_steps": 0, "compression": "fp32", **MEAN}
    choices["schedule"] = Selective(threshold=0.3, most=4)
    groups = SimulatedGroups(models, **choices)
    for step in range(1, 300):
        # By what a group moves in a step that it trains: one rests in half of the steps of every
        # second round.
        idle = [1] if step // 10 % 2 and step % 2 else []
        for group, model in enumerate(models):
            model.weight.data += (1.0 if step <= 120 else 2.0) * (group not in idle)
        steps += [step for _ in groups.step(idle=idle)[0]]
    assert steps[0] == 10
    assert [(b - a) // 10 for a, b in zip(steps, steps[1:], strict=False)] == [
        1,
        2,
        4,
        4,
        4,
        1,
        2,
        4,
        4,
    ]
    # By the rates of before, who counts, norms and steps trained: one group that changes is enough,
    # one that is absent is not asked, and one that did not move has changed once it does.
    for rate, counted, norms, trained, stride in (
        (1.0, (0, 1), (10.0, 20.0), (10, 10), 1),
        (1.0, (0,), (10.0, 20.0), (10, 10), 2),
        (1.0, (0, 1), (20.0, 10.0), (20, 10), 2),
        (0.0, (0, 1), (10.0, 20.0), (10, 10), 1),
        (0.0, (0, 1), (10.0, 0.0), (10, 10), 2),
    ):
        state = {"sync_every": 10, "next": [20], "stride": [1], "rates": [[1.0, rate]]}
        assert Selective().heard(state, Heard(0, 20, counted, norms, trained))["stride"] == [stride]


@pytest.mark.parametrize("weighing", [ByNorm(), ByMedian(), ZScore(warmup=1), Aggregation()])
def test_no_weighing_counts_a_group_that_did_not_train_or_is_not_finite(weighing: Weighing) -> None:
    state = weighing.start(4)
    controls = [said(), said(weight=0), said(finite=False), said(norm=2.0)]
    assert sorted(weighing.count(controls, state).factors) == [0, 3]
    assert weighing.count([said(weight=0)] * 4, state).factors == {}
    # A norm may overflow where every value is finite.
    for overflown in ([said(norm=inf)] * 2 + controls[:1] * 2, [said(norm=inf)] * 4):
        assert all(factor >= 0 for factor in weighing.count(overflown, state).factors.values())


def test_weighings_match_their_formulas_and_z_scores_reject_only_brief_outliers() -> None:
    norms = (0.1, 0.5, 0.3)
    trained = (3, 1, 2)
    raw = [steps * exp(-norm / 0.2) for norm, steps in zip(norms, trained, strict=True)]
    by_norm = [own / sum(raw) for own in raw]
    by_median = [3 / 6, 1 / 6 * 0.3 / 0.5, 2 / 6]
    for formula, expected in ((ByNorm(temperature=0.2), by_norm), (ByMedian(), by_median)):
        count = formula.count(
            [said(*own) for own in zip(trained, norms, strict=True)], formula.start(3)
        )
        assert [factor / 3 for factor in count.factors.values()] == pytest.approx(expected)
    usual = [1.0, 1.2, 0.8, 1.1, 0.9] * 4
    scores: Any = ZScore(alpha=0.0).start(1)
    for norm in usual:
        scores = ZScore(alpha=0.0).heard([said(norm=norm)], scores)
    assert scores[0] == pytest.approx([20, mean(usual), pvariance(usual)])
    for norms in ([*usual, 100.0, *usual], [*usual, *[3.0] * 60]):
        weighing = ZScore(threshold=3.0, alpha=0.1, warmup=10)
        out = []
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


GUARD, CLIP = (
    {"outer_optimizer": OuterOptimizer(**{key: 5.0})} for key in ("outlier_guard", "clip_norm")
)
KEPT = Threshold(1 / 16, Int2(), every=3)
TWO_SHOT = {"exchange": "two_shot"}
SCHEDULE = "^outer_optimizer.lr_schedule .*"
CHOICES: list[tuple[dict[str, Any], str]] = [
    ({"schedule": 3}, "schedule=3 is not a LaunchSchedule"),
    ({"weighing": "by_norm"}, "weighing='by_norm' is not a Weighing"),
    ({"schedule": NoDataclass()}, "frozen dataclass"),
    ({"weighing": ByNorm(), **CLIP}, "together with clip_norm"),
    ({"weighing": ZScore(), **GUARD}, "together with outlier_guard"),
    (scheduled(ReduceLROnPlateau), SCHEDULE + "made a ReduceLROnPlateau, which needs a metric"),
    (
        scheduled(partial(Halving, step_size=3)),
        SCHEDULE + "a Halving, which cannot be stepped by counting rounds: tell",
    ),
    (
        scheduled(lambda optimizer: 0.5),
        SCHEDULE + "made a float, which is not a torch.optim.lr_scheduler.LRScheduler",
    ),
    (
        scheduled(lambda _: StepLR(SGD([torch.zeros(1)], lr=0.1), 3)),
        SCHEDULE + "a StepLR, which schedules another opt",
    ),
    (
        scheduled(CosineAnnealingLR),
        SCHEDULE + "could not make a scheduler .*T_max.*functools.partial",
    ),
    (
        scheduled(lambda _: {}["rounds"]),
        SCHEDULE + "could not make a scheduler of the outer optimizer: 'rounds'",
    ),
    (
        {"compression": ByLink(), **TWO_SHOT},
        "exchange='two_shot' was given with compression=ByLink.*differ in length",
    ),
    (
        {"compression": ErrorFeedback(KEPT), **TWO_SHOT},
        "exchange='two_shot' was given with compression=ErrorFeedback",
    ),
    (
        {"compression": ErrorFeedback(TopK(1 / 16, Int2(), over="senders")), **TWO_SHOT},
        "'two_shot' .*=ErrorFeedback",
    ),
]
FOR_ROUTES: list[tuple[dict[str, Any], str]] = [
    ({"route": 3}, "route=3 is not a Route"),
    ({"route": Halves()}, "frozen dataclass"),
    (TWO_SHOT, "exchange='two_shot' does not work with route"),
    ({"schedule": Selective()}, "schedule=.* does not work with route"),
    ({"weighing": ByNorm()}, "weighing=.* does not work with route"),
    (GUARD, "outlier_guard=5.0 does not work with route"),
    (CLIP, "clip_norm=5.0 does not work with route"),
    ({"compression": "fp4"}, "loses"),
    ({"compression": "sparse"}, "must send each other the same values"),
    ({"route": Ring(), "outer_lr": 0.4}, "momentum replaces the outer step"),
    ({"route": FastestPairs(speeds=(1, 2, 3))}, "speeds of 3 groups, but there are 5"),
]
FOR_SITES: dict[str, list[Any]] = {
    "schedule": [Selective(), Rarer()],
    "mixing": [Carry(), DelayCompensation()],
}
FOR_SITES |= {"weighing": [ByNorm(), ZScore(), ByMedian(), Loudest()]}
FOR_SITES |= {"exchange": [TwoShot([1.0])], "route": [RandomPairs()]}
ALONE: list[tuple[Callable[..., Any], str, Any]] = [
    *(
        (FastestPairs, *own)
        for own in (("window", 1), ("speeds", (1.0, 0.0)), ("speeds", ((1.0, 2.0), (1.0,))))
    ),
    *(
        (ByLink, *own)
        for own in (("menu", ()), ("menu", "fp4"), ("within", 0.0), ("within", "launch"))
    ),
    *((Selective, *own) for own in (("threshold", -1), ("most", 0), ("most", 1.5))),
]


def test_impossible_and_incompatible_choices_are_refused_by_name() -> None:
    of_group = partial(refusal, SimulatedGroups, [mlp() for _ in range(5)])
    found = [(words, of_group(**choices)) for choices, words in CHOICES]
    found += [
        (words, of_group(**{"route": RandomPairs(), "compression": "fp32", **own}))
        for own, words in FOR_ROUTES
    ]
    found.append(
        (
            "fewer than 4",
            refusal(SimulatedGroups, [mlp(), mlp(), mlp()], route=Ring(), compression="fp32"),
        )
    )
    federation = Federation(hub="localhost:1", run="r", site="a", insecure=True)
    for name, every in FOR_SITES.items():
        for one in every:
            said = refusal(
                StreamingDiLoCo, mlp(), federation=federation, **{"compression": "fp32", name: one}
            )
            found.append((f"{name}=.* does not work with a federation", said))
    for make, name, value in ALONE:
        found.append(
            (
                re.escape(f"{name}=") if make is not FastestPairs else name,
                refusal(make, **{name: value}),
            )
        )
    found.append(("payloads of varying length", refusal(ByLink, [KEPT])))
    found.append(("payloads of varying length", refusal(ByLink, ["fp4", "threshold"])))
    found.append(("compression='fp5' is unknown", refusal(ByLink, ["fp5"])))
    auto = refusal(
        StreamingDiLoCoStrategy, route=RandomPairs(), sync_every="auto", compression="fp32"
    )
    found.append(("route=.* does not work with sync_every='auto'", auto))
    auto = refusal(StreamingDiLoCoStrategy, schedule=Selective(), overlap_steps="auto")
    found.append(("schedule=Selective.* does not work with overlap_steps='auto'", auto))
    for code in (ByLink(), "threshold+memory"):
        with patch.object(InProcessExchange, "learns_sizes", False):
            said = refusal(StreamingDiLoCo, mlp(), topology=Topology(), compression=code)
        found.append((r"exchange='\.\.\.:nccl'", said))
    assert [(words, said) for words, said in found if not re.search(words, said)] == []


def test_schedules_that_differ_between_ranks_are_refused() -> None:
    def times(factor: float) -> Any:
        return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: factor)

    differing: list[tuple[list[Any], str]] = [
        (
            [None, partial(StepLR, step_size=3)],
            "differ between ranks: outer_optimizer.lr_schedule is None on rank 0",
        ),
        (
            [partial(StepLR, step_size=step) for step in (300, 301)],
            r"lr_schedule is StepLR \(0.4, 0.4, ",
        ),
        (
            [times(0.5), times(0.25)],
            r"lr_schedule is LambdaLR \(0.2, 0.2, 0.2, 0.2, ...; 1000 rounds: ",
        ),
    ]
    at_different_addresses = [times(0.5), times(0.5)]

    def refusals(rank: int, world_size: int) -> list[str]:
        StreamingDiLoCo(mlp(), **scheduled(at_different_addresses[rank]))
        return [
            refusal(StreamingDiLoCo, mlp(), outer_lr=0.4, **scheduled(own[rank]))
            for own, _ in differing
        ]

    for texts in run_ranks(refusals, 2):
        assert [
            text
            for text, (_, told) in zip(texts, differing, strict=True)
            if not re.search(told, text)
        ] == []


def test_state_of_other_fragments_or_optimizers_and_shared_state_are_refused() -> None:
    was = "another outer_optimizer.lr_schedule: it was CosineAnnealingLR"
    cosine = {rounds: scheduled(partial(CosineAnnealingLR, T_max=rounds)) for rounds in (50, 60)}
    sgd: dict[float, Any] = {
        lr: {"outer_optimizer": partial(SGD, lr=lr)} for lr in (0.1, 0.2)
    }  # of one name
    made: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"fragments": [["*"]]}, {}, "other fragments"),
        (
            sgd[0.1],
            sgd[0.2],
            "another outer_optimizer: it was SGD.*'lr': 0.1.*now it is SGD.*'lr': 0.2",
        ),
        (cosine[50], cosine[60], was),
        (cosine[50], scheduled(None), was),
    ]
    state = StreamingDiLoCo(mlp(), fragments=LAYERS, **cosine[50]).state_dict()
    StreamingDiLoCo(
        mlp(), fragments=LAYERS, **scheduled(partial(CosineAnnealingLR, T_max=50))
    ).load_state_dict(state)
    for before, now, told in made:
        state = StreamingDiLoCo(mlp(), **{"fragments": LAYERS, **before}).state_dict()
        assert re.search(
            told,
            refusal(StreamingDiLoCo(mlp(), **{"fragments": LAYERS, **now}).load_state_dict, state),
        )
    # What `load_state_dict` is given it keeps, so that optimizers that load one state share its
    # tensors.
    models = [mlp() for _ in range(2)]
    optimizers = [inner_optimizer("adamw", model) for model in models]
    train_step(models[0], optimizers[0], 0, 1)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    inner: list[list[torch.optim.Optimizer]] = [[one] for one in optimizers]
    assert "groups 0 and 1 share tensors of their state" in refusal(SimulatedGroups, models, inner)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    SimulatedGroups(models, inner)


def test_simulated_groups_that_would_train_the_same_parameters_are_refused() -> None:
    model = mlp()
    shared = nn.Linear(5, 5)
    told = refusal(SimulatedGroups, [model] * 2)
    assert told.startswith(
        "The models of groups 0 and 1 share the parameter '0.weight', so each would train"
    )
    assert "copy.deepcopy(model)" in told
    models = [nn.Sequential(part, nn.Linear(5, 3)) for part in (nn.Linear(5, 5), shared, shared)]
    assert "groups 1 and 2 share the parameter '0.weight'" in refusal(SimulatedGroups, models)
    # What is frozen is read only, and may be large.
    SimulatedGroups(
        [nn.Sequential(shared.requires_grad_(False), nn.Linear(5, 3)) for _ in range(2)]
    )


# Routes: groups that average with partners hold outer parameters of their own

OUTER: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5}
SPEEDS = (5.0, 1.0, 3.0, 3.0, 1.0, 2.0, 5.0)


def vectors(groups: int, numel: int = 64, **choices: Any) -> tuple[list[Any], SimulatedGroups]:
    """Groups whose model is one vector."""
    models = [nn.ParameterList([torch.zeros(numel)]) for _ in range(groups)]
    return models, SimulatedGroups(
        models, **{"sync_every": 4, "overlap_steps": 0, "compression": "fp32", **choices}
    )


def stacked(models: Sequence[Any]) -> Tensor:
    return torch.stack([model[0].detach().double() for model in models])


def begin(models: Sequence[Any], seed: int) -> Tensor:
    """Gives every group values of its own."""
    start = torch.randn(
        len(models), models[0][0].numel(), generator=torch.Generator().manual_seed(seed)
    )
    for model, values in zip(models, start, strict=True):
        model[0].data.copy_(values)
    return start.double()


def ring_numbers(groups: int) -> tuple[float, float]:
    """Rate and pull of A2CiD2 by numpy: from the Laplacian of the ring."""
    laplacian = (
        np.eye(groups) - (np.roll(np.eye(groups), 1, 0) + np.roll(np.eye(groups), -1, 0)) / 2
    )
    slow = 1 / np.sort(np.linalg.eigvalsh(laplacian))[1]
    edge = np.eye(groups)[0] - np.eye(groups)[1]
    resistance = edge @ np.linalg.pinv(laplacian) @ edge / 2
    return 0.5 / np.sqrt(slow * resistance), 0.5 * np.sqrt(slow / resistance)


@dataclass(frozen=True)
class Neighbours(Route):
    """A user's own: neighbours in a row, from the left and from the right in turn; who is left
    over joins the last.
    """

    def legs(self, number: int, groups: int) -> Sequence[tuple[int, ...]]:
        row = list(range(groups)) if number % 2 == 0 else [*range(1, groups), 0]
        pairs = [tuple(sorted(row[at : at + 2])) for at in range(0, groups - 1, 2)]
        return [*pairs[:-1], tuple(sorted((*pairs[-1], row[-1])))] if groups % 2 else pairs


@pytest.mark.parametrize(
    "route",
    [RandomPairs(seed=3), FastestPairs(speeds=SPEEDS), Ring(), Neighbours()],
    ids=lambda r: type(r).__name__,
)
def test_routes_follow_plain_loops(route: Route) -> None:
    m = 7
    h = 4
    overlap = 2
    mixing = 0.25
    lr = 0.7
    mu = 0.5
    accelerated = isinstance(route, Ring)
    outer_step = (
        {} if accelerated else {"outer_optimizer": partial(torch.optim.SGD, lr=lr, momentum=mu)}
    )
    models, groups = vectors(
        m, overlap_steps=overlap, mixing=mixing, route=route, sync_every=h, **outer_step
    )
    targets = torch.randn(m, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    local, outer, twin = (torch.zeros(m, 64, dtype=torch.float64) for _ in range(3))
    velocity, rate, pull = torch.zeros_like(local), *ring_numbers(m)
    sent = local
    s = np.exp(-2 * rate)
    for step in range(1, 43):
        for model, target in zip(models, targets, strict=True):
            model[0].data += 0.1 * (target.float() - model[0].data)
        groups.step()
        local = local + 0.1 * (targets - local)
        if step % h == 0:
            sent = local
        if step > h - 1 and step % h == overlap:
            number = step // h - 1
            values = sent
            second = twin + sent - outer
            if accelerated:
                more = (1 + s) / 2
                less = (1 - s) / 2
                values, second = more * values + less * second, less * values + more * second
            mean = torch.empty_like(values)
            for leg in route.legs(number, m):
                mean[list(leg)] = values[list(leg)].mean(0)
            twin = second + 2 * pull * (mean - values)
            velocity = mu * velocity + outer - mean
            outer = mean if accelerated else outer - lr * velocity
            local = mixing * local + (1 - mixing) * outer
        held = [
            torch.cat([own["outer"] for own in outer_state(engine)]).double()
            for engine in groups.engines
        ]
        assert torch.allclose(torch.stack(held), outer, atol=2e-6)
        assert torch.allclose(stacked(models), local, atol=2e-6)
    shown = groups.outer_state_dict()["0"]
    assert torch.allclose(shown.double(), local.mean(0), atol=2e-6)
    groups.finish()
    assert all(torch.equal(model[0], models[0][0]) for model in models)
    assert torch.allclose(models[0][0].double(), local.mean(0), atol=2e-6)


def test_pure_mixing_keeps_the_mean_and_sends_to_partners_only() -> None:
    """Rounds are counted from the start of training."""
    for route in (RandomPairs(), FastestPairs(), Ring()):
        choices = MEAN if not isinstance(route, Ring) else {"mixing": 0.0}
        for compression in ("fp32", "bf16", "int8", RandomK(4, Int8())):
            models, groups = vectors(5, 256, route=route, **{**choices, "compression": compression})
            mean, variance = (start := begin(models, 1)).mean(0), start.var(0).mean()
            for _ in range(40):
                groups.step(idle=range(5))
                assert torch.allclose(stacked(models).mean(0), mean, atol=1e-6), (
                    route,
                    compression,
                )
            assert stacked(models).var(0).mean() < 0.5 * variance
    models, groups = vectors(6, route=Neighbours(), **{**MEAN, "sync_every": 1})
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
    method = Streaming(
        Model.of_size(64, layers=1), Settings(**choices), Hosts(groups=6, step_time=1.0)
    )
    assert method.bytes_per_step * 12 == groups.engines[0].report()["bytes_sent"]


def test_partners_check_digests_and_a_group_that_is_not_finite_takes_their_values() -> None:
    _, groups = vectors(4, route=RandomPairs(), **OUTER)
    state = groups.engines[1].state_dict()
    state["fragments"][0] = {**state["fragments"][0], "anchor": torch.ones(64)}
    groups.engines[1].load_state_dict(state)
    for _ in range(3):
        groups.step()
    with pytest.raises(AgreementError, match="did not begin from the same outer parameters"):
        groups.step()
    models, groups = vectors(4, route=RandomPairs(), **MEAN)
    for group, model in enumerate(models):
        model[0].data.fill_(float(group) if group else float("nan"))
    for _ in range(3):
        groups.step()
    assert [landing.left_out for landed in groups.step() for landing in landed] == [(0,)] * 4, (
        "all know"
    )
    partner = sum(next(leg for leg in RandomPairs().legs(0, 4) if 0 in leg))
    assert stacked(models)[:, 0].tolist()[0] == stacked(models)[partner, 0] == partner


def test_rounds_restart_from_the_mean() -> None:
    choices: dict[str, Any] = {
        "sync_every": 4,
        "overlap_steps": 1,
        "mixing": 0.0,
        "compression": "fp32",
        **OUTER,
    }
    run = Groups(4, "sgd", with_statistics, fragments=[["*"]], route=RandomPairs(), **choices)
    run.until(9)
    restart = restart_from([[engine.state_dict()] for engine in run.engines], Settings())
    found = restart.parameters.values()
    own = [outer_state(engine)[0] for engine in run.engines]
    for joined, parts in (
        (torch.cat([one.values for one in found]), [of["outer"] for of in own]),
        (
            torch.cat([one.state["momentum_buffer"] for one in found]),
            [of["state"]["momentum_buffer"] for of in own],
        ),
        (restart.untrained["7.running_mean"], [of["buffers"][0] for of in own]),
    ):
        assert torch.allclose(joined, torch.stack(parts).mean(0))
        assert not torch.allclose(joined, parts[0])


def test_the_fastest_pairs_are_optimal_and_the_pairs_of_a_window_connect_all_groups() -> None:
    # By trying them all; what is slowest counts first.
    for seed in range(6):
        drawn = np.random.default_rng(seed).permutation(16).reshape(4, 4) + 1.0
        speeds = tuple(tuple(float(value) for value in row) for row in np.minimum(drawn, drawn.T))
        ways = [
            ((0, 1), (2, 3)),
            ((0, 2), (1, 3)),
            ((0, 3), (1, 2)),
            FastestPairs(speeds=speeds).legs(0, 4),
        ]
        *possible, chosen = (sorted(speeds[one][other] for one, other in pairs) for pairs in ways)
        assert chosen == max(possible)
    for groups in (1, 2, 3, 7, 16):
        line = tuple(float(1 + (7 * group) % 5) for group in range(groups))
        table = tuple(
            tuple(1.0 + (3 * a * a + 3 * b * b + a * b) % 11 for b in range(groups))
            for a in range(groups)
        )
        for route in (
            FastestPairs(window=2),
            FastestPairs(speeds=line),
            FastestPairs(speeds=table, window=4),
        ):
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
    """Two fast groups and two slow ones: who pairs by speed lets the fast ones wait for one round
    less.
    """
    links = [Link(gbit_s=speed) for speed in (1.0, 1.0, 0.1, 0.1)]
    hosts = Hosts(groups=4, step_time=1.0, memory_rate=1e15)
    pairs = FastestPairs(speeds=(10, 10, 1, 1))
    # In multiples of what a payload takes on a slow link, whose later launch the second landing
    # awaits.
    for route, steps, rounds in ((pairs, 10, 0.1), (pairs, 20, 2.0), (None, 20, 3.0)):
        settings = Settings(
            sync_every=10, overlap_steps=0, compression="fp32", route=route, mixing=0.0
        )
        method = Streaming(Model.of_size(10**7, layers=1), settings, hosts)
        end = play(method, links[0], steps, [1.0] * 4, links=links)[0].steps[-1]
        assert end == pytest.approx(steps + rounds * 3.2, rel=0.01)


# Numbers and schedules

SENDERS = ErrorFeedback(TopK(1 / 64, Int2(), over="senders"), decay=0.95)


def test_a_sparse_memory_acts_as_momentum_and_unsuitable_numbers_get_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kinds: dict[Any, bool] = {
        "sparse": True,
        ErrorFeedback(Threshold(1 / 64, Float32(), least=1.5)): True,
        "fp4": False,
        ErrorFeedback(FP4()): False,
        ErrorFeedback(TopK(0.5, Int2())): False,  # most values do not wait
        TopK(1 / 64, Int2()): False,  # without a memory, momentum is worth what it is elsewhere
        ErrorFeedback(RandomK(64, FP4())): False,  # all groups send the same values
    }
    few = (TopK(1 / 64, Int2()), ErrorFeedback(RandomK(64, FP4())))
    for compression, is_sparse in kinds.items():
        chosen = Settings(compression=compression).chosen_for(2)
        direction = chosen.outer.direction
        assert OuterStep(**chosen.numbers) == recommended(is_sparse, direction=direction)
        assert (direction == "elementwise") == (is_sparse or compression in few)
        assert (chosen.outer_momentum == 0) == is_sparse
    sparse = recommended(is_sparse=True)
    assert SPARSE_GAINS[0] < sparse.outer_lr / (1 - sparse.outer_momentum) < SPARSE_GAINS[1]
    assert (
        Settings(compression="sparse", outer_momentum=0.0).chosen_for(2).outer_lr == sparse.outer_lr
    )
    # A momentum that was given does not get the rate of none.
    assert Settings(compression="sparse", outer_momentum=0.9).chosen_for(2).outer_lr == 0.7
    assert Settings(compression=SENDERS).chosen_for(4).outer_lr == 1.0 < sparse.outer_lr
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"outer_momentum": 0.9}, True),
        ({"outer_lr": 4.0}, True),
        ({}, False),
        ({"outer_lr": 1.0, "outer_momentum": 0.5}, False),
        ({"outer_lr": 0.4, "outer_momentum": 0.9, "compression": "fp4"}, False),
        ({"outer_optimizer": partial(torch.optim.SGD, lr=0.1)}, False),
        *(
            ({"outer_lr": rate, "outer_momentum": 0.0, "compression": SENDERS}, is_bad)
            for rate, is_bad in ((0.1, True), (1.0, False), (3.2, True))
        ),
    ]
    for choices, is_bad in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            SimulatedGroups([mlp() for _ in range(4)], **{"compression": "sparse", **choices})
        told = [
            record.getMessage()
            for record in caplog.records
            if "known not to suit" in record.getMessage()
        ]
        assert len(told) == is_bad, choices
        suits = recommended(is_sparse=True)._replace(
            **({"outer_lr": 1.0} if choices.get("compression") else {})
        )
        for message in told:
            assert (
                f"to get outer_lr={suits.outer_lr:g} and outer_momentum={suits.outer_momentum:g}"
                in message
            )


def test_given_numbers_are_kept_the_others_are_chosen_and_a_checkpoint_decides_last(
    tmp_path: Path,
) -> None:
    given = {"outer_lr": 0.4, "outer_momentum": 0.9, "mixing": 0.5}
    for compression in ("fp4", "sparse"):
        assert Settings(**given, compression=compression).chosen_for(4).numbers == given
    for engine in SimulatedGroups([mlp(), mlp()], outer_momentum=0.5).engines:
        assert engine.settings.numbers == {
            **recommended(direction="elementwise")._asdict(),
            "outer_momentum": 0.5,
        }
        assert engine.settings.numbers.items() <= engine.report().items()
    own = Settings(outer_optimizer=partial(torch.optim.SGD, lr=0.1)).chosen_for(2)
    assert own.numbers == {"mixing": recommended().mixing}, "an outer optimizer has its own rate"
    assert not {"outer_lr", "outer_momentum"} & own.saved().keys()
    # What a checkpoint has is not chosen anew.
    saved = Settings(outer_lr=1, mixing=0.3).chosen_for(2).saved()
    taken = Settings(outer_momentum=0.25).taken_from(saved)
    assert taken.numbers == {"outer_lr": 1, "outer_momentum": 0.25, "mixing": 0.3}
    assert {**taken.saved(), "outer_momentum": saved["outer_momentum"]} == saved
    assert Settings().taken_from(Settings().saved()) == Settings(), "saved before the choice"
    settings = StreamingDiLoCo(mlp(), **SHORT).state_dict()["settings"]
    assert settings["outer_lr"] == recommended(direction="elementwise").outer_lr
    numbers = {"outer_lr": 0.625, "outer_momentum": 0.5, "mixing": 0.375}
    whole = Groups(**SHORT, **numbers)
    resumed = Groups(**SHORT)
    whole.until(9)
    resumed.load(whole.saved())
    for run in (whole, resumed):
        run.until(15)
    assert unlike(whole.seen(), resumed.seen()) == []
    assert resumed.engines[0].state_dict()["settings"]["mixing"] == 0.375
    path = tmp_path / "a.ckpt"
    StreamingDiLoCo(mlp(), **SHORT, **numbers).save(path)
    engine = StreamingDiLoCo(mlp(), **SHORT)
    engine.load(path)
    assert engine.settings.numbers == numbers
    with pytest.raises(ValueError, match=r"outer_lr was 0.625, now it is 0.5\."):
        StreamingDiLoCo(mlp(), **SHORT, outer_lr=0.5).load(path)


Event = tuple[int, tuple[int, ...], tuple[int, ...]]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any valid (H, P, tau); more fragments than steps included."""
    sync_every = draw(st.integers(1, 40))
    return Schedule(sync_every, draw(st.integers(0, sync_every - 1)), draw(st.integers(1, 60)))


def happens(schedule: Schedule, first: int, last: int) -> list[Event]:
    """The steps of a range in which fragments launch or land, by line 6 of the algorithm."""

    def due(step: int) -> tuple[int, ...]:
        every = range(schedule.fragments)
        return tuple(
            p for p in every if is_launched(step, p, schedule.fragments, schedule.sync_every)
        )

    events = [
        (step, due(step), due(step - schedule.overlap_steps)) for step in range(first, last + 1)
    ]
    return [event for event in events if event[1] or event[2]]


def parsed(table: str) -> list[Event]:
    """The lines of a table below its header, read back."""
    header, *lines = [re.split(" {2,}", line.strip()) for line in table.split("\n")]
    assert header == ["step", "launches", "lands"]
    cells = [
        [() if cell == "-" else tuple(map(int, cell.split(","))) for cell in line[1:]]
        for line in lines
    ]
    return [(int(line[0]), own[0], own[1]) for line, own in zip(lines, cells, strict=True)]


@settings(max_examples=60, deadline=None)
@example(Schedule(100, 5, fragments=3), 1, 100, 10**9)  # no fragment is missed by rounding
@example(Schedule(2, 1, fragments=5), 1, 100, 10**9)  # and many share a step
@given(schedules(), st.integers(1, 200), st.integers(0, 100), st.integers(10**9, 10**12))
def test_launches_and_landings_are_those_of_the_paper(
    schedule: Schedule, since: int, length: int, far: int
) -> None:
    h = schedule.sync_every
    fragments = range(schedule.fragments)
    expected = happens(schedule, -h, 5 * h)
    every = [
        (step, schedule.launches(step), schedule.landings(step)) for step in range(-h, 5 * h + 1)
    ]
    assert [one for one in every if one[1] or one[2]] == expected
    in_flight = list[int]()
    for _, launched, landed in expected:
        # Flights land in the order of their launch, and never are there two of one fragment.
        in_flight += launched
        assert len(in_flight) == len(set(in_flight))
        assert [in_flight.pop(0) for _ in landed] == list(landed)
    assert [p for step, launched, _ in expected for p in launched if 3 * h <= step < 4 * h] == list(
        fragments
    )
    assert [min(step for step, own, _ in expected if p in own) - h for p in fragments] == [
        schedule.offset(p) for p in fragments
    ]
    assert schedule.launches(far) == schedule.launches(2 * h + far % h)
    # The longest wait is that of the worst step to ask at.
    launches = [step for step, own, _ in happens(schedule, since, since + 5 * h) if own]
    waits = [
        min(t for t in launches if t > at) + schedule.overlap_steps - at
        for at in range(since, since + 3 * h)
    ]
    assert schedule.longest_wait(since) == max(waits)
    # The table shows what happens; by default it ends when every fragment has landed twice.
    assert parsed(schedule.table(since, since + length)) == happens(schedule, since, since + length)
    by_default = parsed(schedule.table())
    assert by_default == happens(schedule, 1, by_default[-1][0])
    assert min([p for *_, landed in by_default for p in landed].count(p) for p in fragments) >= 2
    assert str(schedule) == schedule.table()
    header, first, *_ = str(Schedule(2, 1, 2)).split("\n")
    assert header.index("lands") == first.rindex("-")
