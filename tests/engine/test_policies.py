"""Policies: when fragments launch, how much groups count, how they land and with whom; and choices
that are refused.

`test_reference` and `test_every_way` show that an engine follows them; routes are compared with
plain loops and closed forms here. The file also tests the numbers that are chosen for ``"auto"`` and
for ``"sparse"``, that a checkpoint has the last word, and the schedule against the paper's rule, for
many (H, P, tau).
"""

import copy
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, inf, nan
from pathlib import Path
from statistics import mean, pvariance
from typing import Any, NamedTuple
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR

from lightning_sdiloco import (
    Federation,
    OuterOptimizer,
    SimulatedGroups,
    StreamingDiLoCo,
    StreamingDiLoCoStrategy,
)
from lightning_sdiloco.algorithm.config import SPARSE_GAINS, OuterStep, Settings, recommended
from lightning_sdiloco.algorithm.gossip import RandomPairs, Ring, Route
from lightning_sdiloco.algorithm.merge import LandingRule
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

Fragments = tuple[int, ...]
Legs = Sequence[tuple[int, ...]]

# Policies of a user


@dataclass(frozen=True)
class Rarer(LaunchSchedule):
    """Launches less and less often."""

    growth: int = 2

    def start(self, schedule: Schedule) -> dict[str, Any]:
        fragments = range(schedule.fragments)
        first_launches = [schedule.sync_every + schedule.offset(p) for p in fragments]
        return {"next": first_launches, "gap": 4}

    def due(self, state: Any, step: int) -> Fragments:
        return tuple(p for p, launch in enumerate(state["next"]) if launch == step)

    def heard(self, state: Any, landing: Heard) -> dict[str, Any]:
        gap = state["gap"]
        next_launches = list(state["next"])
        next_launches[landing.fragment] = landing.launched_at + gap
        return {"next": next_launches, "gap": gap + self.growth}


@dataclass(frozen=True)
class Loudest(Weighing):
    """Listens to the longest outer gradient alone."""

    def start(self, groups: int) -> list[int]:
        return [0] * groups

    def count(self, controls: Sequence[Control], state: Any) -> Count:
        def loudness(group: int) -> tuple[float, int]:
            return controls[group].norm, -state[group]

        pairs = enumerate(controls)
        groups = [group for group, control in pairs if control.finite and control.weight]
        return Count({max(groups, key=loudness): 1.0}) if groups else Count({})

    def heard(self, controls: Sequence[Control], state: Any, count: Count) -> list[int]:
        return [rounds + (group in count.factors) for group, rounds in enumerate(state)]


@dataclass(frozen=True)
class DelayCompensation(LandingRule):
    """Corrects the progress in flight for the parameters at which it should have been trained."""

    strength: float = 0.5
    kept: float = 0.0

    def gathered(self, gradient: Tensor, before: Tensor, after: Tensor) -> Sequence[Tensor]:
        return before - gradient, after

    def merge(self, local: Tensor, gathered: Sequence[Tensor], steps: int) -> None:
        sent, after = gathered
        step = (local - sent) / max(1, steps)
        correction = self.strength * step * step * (after - sent)
        local.copy_(after + steps * (step + correction))


def as_in_checkpoint(state: Any) -> Any:
    return json.loads(json.dumps(state))


# Schedules and weighings

SCHEDULES = st.builds(Schedule, st.integers(2, 12), st.just(0), st.integers(1, 5))


def launches(rule: LaunchSchedule, schedule: Schedule, steps: int) -> list[tuple[int, int]]:
    """The launches, (step, fragment), of two groups that train with the same rate at every step."""
    state = rule.start(schedule)
    last_launch = dict.fromkeys(range(schedule.fragments), 0)
    launched = []
    for step in range(1, steps + 1):
        for fragment in rule.due(state, step):
            trained = (step - last_launch[fragment],) * 2
            landing = Heard(fragment, step, (0, 1), trained, trained)
            state = rule.heard(as_in_checkpoint(state), landing)
            launched.append((step, fragment))
            last_launch[fragment] = step
    return launched


@given(schedule=SCHEDULES, most=st.integers(1, 5), since=st.integers(0, 40))
def test_policies_that_skip_nothing_follow_the_schedule_and_requests_wait_in_bounds(
    schedule: Schedule, most: int, since: int
) -> None:
    expected = [(step, fragment) for step in range(1, 60) for fragment in schedule.launches(step)]
    for rule in (Every(), Selective(threshold=0), Selective(most=1)):
        assert launches(rule, schedule, 59) == expected
    rule = Selective(most=most)
    later_launches = [step for step, _ in launches(rule, schedule, 200) if step > since]
    assert later_launches[0] - since <= rule.longest_wait(schedule, since)


def test_calm_phases_double_the_stride_and_a_jump_ends_them() -> None:
    models = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    schedule = Selective(threshold=0.3, most=4)
    groups = SimulatedGroups(
        models, sync_every=10, overlap_steps=0, compression="fp32", schedule=schedule, **MEAN
    )
    landed_at = []
    for step in range(1, 300):
        # Group 1 rests in half of the steps of every second round: a group counts by what it moves
        # in a step that it trains.
        idle = [1] if step // 10 % 2 and step % 2 else []
        speed = 1.0 if step <= 120 else 2.0
        for group, model in enumerate(models):
            model.weight.data += speed * (group not in idle)
        landings = groups.step(idle=idle)[0]
        landed_at += [step] * len(landings)
    assert landed_at[0] == 10
    strides = [(b - a) // 10 for a, b in zip(landed_at, landed_at[1:], strict=False)]
    assert strides == [1, 2, 4, 4, 4, 1, 2, 4, 4]


def stride_after(
    rate: float, present: tuple[int, ...], norms: tuple[float, ...], trained: tuple[int, ...]
) -> int:
    """The stride after a landing, of two groups that moved by 1 and by a rate a step before it."""
    state = {"sync_every": 10, "next": [20], "stride": [1], "rates": [[1.0, rate]]}
    (stride,) = Selective().heard(state, Heard(0, 20, present, norms, trained))["stride"]
    return stride


def test_a_stride_doubles_unless_the_rate_of_a_present_group_changes() -> None:
    # One group that changes is enough, and an absent one is not asked.
    assert stride_after(1.0, (0, 1), (10.0, 20.0), (10, 10)) == 1
    assert stride_after(1.0, (0,), (10.0, 20.0), (10, 10)) == 2
    assert stride_after(1.0, (0, 1), (20.0, 10.0), (20, 10)) == 2
    # A group that did not move has changed once it does.
    assert stride_after(0.0, (0, 1), (10.0, 20.0), (10, 10)) == 1
    assert stride_after(0.0, (0, 1), (10.0, 0.0), (10, 10)) == 2


@pytest.mark.parametrize("weighing", [ByNorm(), ByMedian(), ZScore(warmup=1), Aggregation()])
def test_no_weighing_counts_a_group_that_did_not_train_or_is_not_finite(weighing: Weighing) -> None:
    state = weighing.start(4)

    def factors(*controls: Control) -> dict[int, float]:
        return dict(weighing.count(controls, state).factors)

    trained = said()
    idle = said(weight=0)
    assert sorted(factors(trained, idle, said(finite=False), said(norm=2.0))) == [0, 3]
    assert factors(idle, idle, idle, idle) == {}
    # A norm may overflow where every value is finite.
    overflown = said(norm=inf)
    for controls in ([overflown, overflown, trained, trained], [overflown] * 4):
        assert all(factor >= 0 for factor in factors(*controls).values())


def test_weighings_by_norm_and_by_median_match_their_formulas() -> None:
    norms = (0.1, 0.5, 0.3)
    trained = (3, 1, 2)
    controls = [said(weight, norm) for weight, norm in zip(trained, norms, strict=True)]

    def shares(weighing: Weighing) -> list[float]:
        count = weighing.count(controls, weighing.start(3))
        return [factor / 3 for factor in count.factors.values()]

    softmax = [steps * exp(-norm / 0.2) for norm, steps in zip(norms, trained, strict=True)]
    by_norm = [weight / sum(softmax) for weight in softmax]
    assert shares(ByNorm(temperature=0.2)) == pytest.approx(by_norm)
    assert shares(ByMedian()) == pytest.approx([3 / 6, 1 / 6 * 0.3 / 0.5, 2 / 6])


USUAL_NORMS = [1.0, 1.2, 0.8, 1.1, 0.9] * 4


def test_z_scores_match_their_formulas() -> None:
    weighing = ZScore(alpha=0.0)
    scores = weighing.start(1)
    for norm in USUAL_NORMS:
        controls = [said(norm=norm)]
        scores = weighing.heard(controls, scores, weighing.count(controls, scores))
    assert scores[0] == pytest.approx([20, mean(USUAL_NORMS), pvariance(USUAL_NORMS)])


@pytest.mark.parametrize("later_norms", [[100.0, *USUAL_NORMS], [3.0] * 60])
def test_z_scores_reject_only_brief_outliers(later_norms: list[float]) -> None:
    weighing = ZScore(threshold=3.0, alpha=0.1, warmup=10)
    is_outlying = []
    state = weighing.start(2)
    for norm in [*USUAL_NORMS, *later_norms]:
        controls = [said(), said(norm=norm)]
        count = weighing.count(controls, state)
        is_outlying.append(1 in count.outlying)
        state = as_in_checkpoint(weighing.heard(controls, state, count))
    assert is_outlying[20]
    assert not any(is_outlying[:20])
    assert not any(is_outlying[-20:])


# Refusals


class NoDataclass(LaunchSchedule):
    start = due = heard = lambda self, *arguments: ()  # type: ignore[assignment]


class Halves(Route):
    def legs(self, number: int, groups: int) -> Legs:
        return ((0,),)


class Halving(StepLR):
    """Needs to be told something at every step."""

    def step(self, loss: float | None = None) -> None:  # type: ignore[override]
        if loss is None and self._step_count:
            raise TypeError("tell the loss")
        super().step()


def scheduled(schedule: Any) -> dict[str, Any]:
    return {"outer_optimizer": OuterOptimizer(lr_schedule=schedule)}


GUARD = OuterOptimizer(outlier_guard=5.0)
CLIP = OuterOptimizer(clip_norm=5.0)
OF_VARYING_LENGTH = Threshold(1 / 16, Int2(), every=3)
OVER_SENDERS = TopK(1 / 16, Int2(), over="senders")


def assert_refused(pattern: str, call: Callable[..., Any], *arguments: Any, **choices: Any) -> None:
    message = refusal(call, *arguments, **choices)
    assert re.search(pattern, message), message


def assert_groups_refuse(pattern: str, **choices: Any) -> None:
    assert_refused(pattern, SimulatedGroups, [mlp() for _ in range(5)], **choices)


def assert_routed_groups_refuse(pattern: str, **choices: Any) -> None:
    routed = {"route": RandomPairs(), "compression": "fp32"}
    assert_groups_refuse(pattern, **{**routed, **choices})


def assert_sites_refuse(setting: str, *policies: Any, mean: Any = "sites") -> None:
    federation = Federation(hub="localhost:1", run="r", site="a", insecure=True, mean=mean)
    for policy in policies:
        choices = {"compression": "fp32", setting: policy}
        pattern = f"{setting}=.* does not work with a federation"
        assert_refused(pattern, StreamingDiLoCo, mlp(), federation=federation, **choices)


def test_impossible_and_incompatible_choices_are_refused_by_name() -> None:
    assert_groups_refuse("schedule=3 is not a LaunchSchedule", schedule=3)
    assert_groups_refuse("weighing='by_norm' is not a Weighing", weighing="by_norm")
    assert_groups_refuse("frozen dataclass", schedule=NoDataclass())
    assert_groups_refuse("together with clip_norm", weighing=ByNorm(), outer_optimizer=CLIP)
    assert_groups_refuse("together with outlier_guard", weighing=ZScore(), outer_optimizer=GUARD)
    words = "exchange='two_shot' does not work with compression="
    two_shots = {"exchange": "two_shot", "compression": ByLink()}
    assert_groups_refuse(f"{words}ByLink.*differ in length", **two_shots)
    for code in (OF_VARYING_LENGTH, OVER_SENDERS):
        two_shots["compression"] = ErrorFeedback(code)
        assert_groups_refuse(f"{words}ErrorFeedback", **two_shots)
    assert_sites_refuse("schedule", Selective(), Rarer())
    assert_sites_refuse("weighing", ZScore(), Loudest())
    assert_sites_refuse("weighing", ByNorm(), ByMedian(), mean="hub")
    assert_sites_refuse("exchange", TwoShot([1.0]))
    assert_sites_refuse("route", RandomPairs())
    words = "route=.* does not work with sync_every='auto'"
    choices = {"route": RandomPairs(), "compression": "fp32"}
    assert_refused(words, StreamingDiLoCoStrategy, sync_every="auto", **choices)
    words = "schedule=Selective.* does not work with overlap_steps='auto'"
    choices = {"schedule": Selective(), "overlap_steps": "auto"}
    assert_refused(words, StreamingDiLoCoStrategy, **choices)


def test_choices_that_do_not_work_with_a_route_are_refused_by_name() -> None:
    assert_routed_groups_refuse("route=3 is not a Route", route=3)
    assert_routed_groups_refuse("frozen dataclass", route=Halves())
    assert_routed_groups_refuse("exchange='two_shot' does not work with route", exchange="two_shot")
    assert_routed_groups_refuse("schedule=.* does not work with route", schedule=Selective())
    assert_routed_groups_refuse("weighing=.* does not work with route", weighing=ByNorm())
    pattern = "outlier_guard=5.0 does not work with route"
    assert_routed_groups_refuse(pattern, outer_optimizer=GUARD)
    assert_routed_groups_refuse("clip_norm=5.0 does not work with route", outer_optimizer=CLIP)
    assert_routed_groups_refuse("loses", compression="fp4")
    assert_routed_groups_refuse("must send each other the same values", compression="sparse")
    assert_routed_groups_refuse("momentum replaces the outer step", route=Ring(), outer_lr=0.4)
    fast_pairs = FastestPairs(speeds=(1, 2, 3))
    assert_routed_groups_refuse("speeds of 3 groups, but there are 5", route=fast_pairs)
    three_models = [mlp(), mlp(), mlp()]
    choices = {"route": Ring(), "compression": "fp32"}
    assert_refused("fewer than 4", SimulatedGroups, three_models, **choices)


def assert_schedule_refused(pattern: str, schedule: Any) -> None:
    assert_groups_refuse(f"^outer_optimizer.lr_schedule .*{pattern}", **scheduled(schedule))


def test_schedules_that_cannot_be_stepped_by_counting_rounds_are_refused() -> None:
    words = "returned a ReduceLROnPlateau, which needs a metric"
    assert_schedule_refused(words, ReduceLROnPlateau)
    words = "a Halving, which cannot be stepped by counting rounds: tell"
    assert_schedule_refused(words, partial(Halving, step_size=3))
    words = "returned a float, which is not a torch.optim.lr_scheduler.LRScheduler"
    assert_schedule_refused(words, lambda optimizer: 0.5)
    schedule = StepLR(SGD([torch.zeros(1)], lr=0.1), 3)
    assert_schedule_refused("a StepLR, which schedules a different opt", lambda optimizer: schedule)
    words = "could not create a scheduler .*T_max.*functools.partial"
    assert_schedule_refused(words, CosineAnnealingLR)
    words = "could not create a scheduler for the outer optimizer: 'rounds'"
    assert_schedule_refused(words, lambda optimizer: {}["rounds"])


def test_arguments_of_policies_that_are_out_of_range_are_refused_by_name() -> None:
    assert_refused("window", FastestPairs, window=1)
    assert_refused("speeds", FastestPairs, speeds=(1.0, 0.0))
    assert_refused("speeds", FastestPairs, speeds=((1.0, 2.0), (1.0,)))
    assert_refused("menu=", ByLink, menu=())
    assert_refused("menu=", ByLink, menu="fp4")
    assert_refused("within=", ByLink, within=0.0)
    assert_refused("within=", ByLink, within="launch")
    assert_refused("threshold=", Selective, threshold=-1)
    assert_refused("most=", Selective, most=0)
    assert_refused("most=", Selective, most=1.5)
    assert_refused("payloads of varying length", ByLink, [OF_VARYING_LENGTH])
    assert_refused("payloads of varying length", ByLink, ["fp4", "threshold"])
    assert_refused("compression='fp5' is unknown", ByLink, ["fp5"])


@pytest.mark.parametrize("compression", [ByLink(), "threshold+memory"])
def test_payloads_of_varying_length_are_refused_where_no_exchange_learns_sizes(
    compression: Any,
) -> None:
    choices = {"topology": Topology(), "compression": compression}
    with patch.object(InProcessExchange, "learns_sizes", False):
        assert_refused(r"exchange='\.\.\.:nccl'", StreamingDiLoCo, mlp(), **choices)


def constant_rate(factor: float) -> Any:
    """A schedule that differs from another one of the same rate in its address."""
    return lambda optimizer: LambdaLR(optimizer, lambda number: factor)


def test_schedules_that_differ_between_ranks_are_refused() -> None:
    def check(rank: int, world_size: int) -> None:
        def assert_differs(pattern: str, *schedules: Any) -> None:
            choices = scheduled(schedules[rank])
            assert_refused(pattern, StreamingDiLoCo, mlp(), outer_lr=0.4, **choices)

        StreamingDiLoCo(mlp(), **scheduled(constant_rate(0.5)))
        words = "differ between ranks: outer_optimizer.lr_schedule is None on rank 0"
        assert_differs(words, None, partial(StepLR, step_size=3))
        late = [partial(StepLR, step_size=step) for step in (300, 301)]
        assert_differs(r"lr_schedule is StepLR \(0.4, 0.4, ", *late)
        words = r"lr_schedule is LambdaLR \(0.2, 0.2, 0.2, 0.2, ...; 1000 rounds: "
        assert_differs(words, constant_rate(0.5), constant_rate(0.25))

    run_ranks(check, 2)


def layered(outer_optimizer: Any) -> StreamingDiLoCo:
    return StreamingDiLoCo(mlp(), fragments=LAYERS, outer_optimizer=outer_optimizer)


def cosine(rounds: int) -> OuterOptimizer:
    return OuterOptimizer(lr_schedule=partial(CosineAnnealingLR, T_max=rounds))


def test_state_of_other_fragments_optimizers_or_schedules_is_refused() -> None:
    state = StreamingDiLoCo(mlp(), fragments=[["*"]]).state_dict()
    engine = StreamingDiLoCo(mlp(), fragments=LAYERS)
    assert_refused("fragments of the saved state differ", engine.load_state_dict, state)
    state = layered(partial(SGD, lr=0.1)).state_dict()
    words = "different outer_optimizer. It was SGD.*'lr': 0.1.*is now SGD.*'lr': 0.2"
    assert_refused(words, layered(partial(SGD, lr=0.2)).load_state_dict, state)
    state = layered(cosine(50)).state_dict()
    layered(cosine(50)).load_state_dict(state)
    words = "different outer_optimizer.lr_schedule. It was CosineAnnealingLR"
    assert_refused(words, layered(cosine(60)).load_state_dict, state)
    assert_refused(words, layered(OuterOptimizer()).load_state_dict, state)


def test_inner_optimizers_that_share_tensors_of_their_state_are_refused() -> None:
    models = [mlp() for _ in range(2)]
    optimizers = [inner_optimizer("adamw", model) for model in models]
    train_step(models[0], optimizers[0], 0, 1)
    state = optimizers[0].state_dict()
    inner = [[optimizer] for optimizer in optimizers]
    # Optimizers that load one state share its tensors: `load_state_dict` keeps them.
    optimizers[1].load_state_dict(state)
    pattern = "groups 0 and 1 share tensors of their state"
    assert_refused(pattern, SimulatedGroups, models, inner)
    optimizers[1].load_state_dict(copy.deepcopy(state))
    SimulatedGroups(models, inner)


def test_simulated_groups_that_would_train_the_same_parameters_are_refused() -> None:
    model = mlp()
    shared = nn.Linear(5, 5)
    message = refusal(SimulatedGroups, [model] * 2)
    assert message.startswith(
        "The models of groups 0 and 1 share the parameter '0.weight', so each group would train"
    )
    assert "copy.deepcopy(model)" in message
    models = [nn.Sequential(part, nn.Linear(5, 3)) for part in (nn.Linear(5, 5), shared, shared)]
    assert_refused("groups 1 and 2 share the parameter '0.weight'", SimulatedGroups, models)
    # Frozen parameters are only read, and may be large.
    shared.requires_grad_(False)
    SimulatedGroups([nn.Sequential(shared, nn.Linear(5, 3)) for _ in range(2)])


def test_simulated_groups_with_unlike_models_are_refused() -> None:
    message = refusal(SimulatedGroups, [nn.Linear(2, 2), nn.Linear(2, 3)])
    shapes = "weight is (2, 2) torch.float32 on rank 0, (3, 2) torch.float32 on rank 1"
    assert message.startswith(f"The model differs between ranks: {shapes}")


# Routes: groups that average with partners, each with its own outer parameters

OUTER = {"outer_lr": 0.7, "outer_momentum": 0.5}
SPEEDS = (5.0, 1.0, 3.0, 3.0, 1.0, 2.0, 5.0)


def vectors(groups: int, numel: int = 64, **choices: Any) -> tuple[list[Any], SimulatedGroups]:
    """Groups whose model is one vector."""
    models = [nn.ParameterList([torch.zeros(numel)]) for _ in range(groups)]
    defaults = {"sync_every": 4, "overlap_steps": 0, "compression": "fp32"}
    return models, SimulatedGroups(models, **{**defaults, **choices})


def stacked(models: Sequence[Any]) -> Tensor:
    return torch.stack([model[0].detach().double() for model in models])


def outer_rows(groups: SimulatedGroups) -> Tensor:
    rows = [outer_state(engine)[0]["outer"] for engine in groups.engines]
    return torch.stack(rows).double()


def begin(models: Sequence[Any], seed: int) -> Tensor:
    """Gives every group different values, and returns them."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(len(models), models[0][0].numel(), generator=generator)
    for model, values in zip(models, start, strict=True):
        model[0].data.copy_(values)
    return start.double()


def ring_numbers(groups: int) -> tuple[float, float]:
    """Rate and pull of A2CiD2 by numpy: from the Laplacian of the ring."""
    identity = np.eye(groups)
    neighbours = (np.roll(identity, 1, 0) + np.roll(identity, -1, 0)) / 2
    laplacian = identity - neighbours
    slow = 1 / np.sort(np.linalg.eigvalsh(laplacian))[1]
    edge = identity[0] - identity[1]
    resistance = edge @ np.linalg.pinv(laplacian) @ edge / 2
    return 0.5 / np.sqrt(slow * resistance), 0.5 * np.sqrt(slow / resistance)


@dataclass(frozen=True)
class Neighbours(Route):
    """A user's route: neighbours in a row, from the left and from the right in turn.

    A group that is left over joins the last pair.
    """

    def legs(self, number: int, groups: int) -> Legs:
        row = list(range(groups)) if number % 2 == 0 else [*range(1, groups), 0]
        pairs = [tuple(sorted(row[place : place + 2])) for place in range(0, groups - 1, 2)]
        if groups % 2 == 0:
            return pairs
        three = tuple(sorted((*pairs[-1], row[-1])))
        return [*pairs[:-1], three]


def mean_of_partners(values: Tensor, legs: Legs) -> Tensor:
    """The rows of groups, each replaced by the mean over its partners."""
    means = torch.empty_like(values)
    for leg in legs:
        partners = list(leg)
        means[partners] = values[partners].mean(0)
    return means


class PlainLoops:
    """Groups that average with partners, in float64: every group is a row of each matrix."""

    def __init__(self, route: Route, groups: int, mixing: float) -> None:
        self.route = route
        self.groups = groups
        self.mixing = mixing
        start = torch.zeros(groups, 64, dtype=torch.float64)
        self.local = self.sent = self.outer = self.velocity = self.twin = start

    def land(self, number: int) -> None:
        legs = self.route.legs(number, self.groups)
        if isinstance(self.route, Ring):
            self.outer = self._accelerated(legs)
        else:
            means = mean_of_partners(self.sent, legs)
            self.velocity = OUTER["outer_momentum"] * self.velocity + self.outer - means
            self.outer = self.outer - OUTER["outer_lr"] * self.velocity
        self.local = self.mixing * self.local + (1 - self.mixing) * self.outer

    def _accelerated(self, legs: Legs) -> Tensor:
        """The continuous momentum of A2CiD2: the twin is mixed in, and pulled to the mean."""
        rate, pull = ring_numbers(self.groups)
        decay = np.exp(-2 * rate)
        larger_share = (1 + decay) / 2
        smaller_share = (1 - decay) / 2
        moved_twin = self.twin + self.sent - self.outer
        values = larger_share * self.sent + smaller_share * moved_twin
        means = mean_of_partners(values, legs)
        mixed_twin = smaller_share * self.sent + larger_share * moved_twin
        self.twin = mixed_twin + 2 * pull * (means - values)
        return means


@pytest.mark.parametrize(
    "route",
    [RandomPairs(seed=3), FastestPairs(speeds=SPEEDS), Ring(), Neighbours()],
    ids=str,
)
def test_routes_follow_plain_loops(route: Route) -> None:
    momentum_sgd = partial(SGD, lr=OUTER["outer_lr"], momentum=OUTER["outer_momentum"])
    outer_step = {} if isinstance(route, Ring) else {"outer_optimizer": momentum_sgd}
    models, groups = vectors(7, overlap_steps=2, mixing=0.25, route=route, **outer_step)
    loops = PlainLoops(route, mixing=0.25, groups=7)
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(7, 64, dtype=torch.float64, generator=generator)
    for step in range(1, 43):
        for model, target in zip(models, targets, strict=True):
            model[0].data += 0.1 * (target.float() - model[0].data)
        groups.step()
        loops.local = loops.local + 0.1 * (targets - loops.local)
        if step % 4 == 0:
            loops.sent = loops.local
        if step >= 4 and step % 4 == 2:
            loops.land(step // 4 - 1)
        assert torch.allclose(outer_rows(groups), loops.outer, atol=2e-6)
        assert torch.allclose(stacked(models), loops.local, atol=2e-6)
    expected_mean = loops.local.mean(0)
    shown_mean = groups.outer_state_dict()["0"]
    assert torch.allclose(shown_mean.double(), expected_mean, atol=2e-6)
    groups.finish()
    assert all(torch.equal(model[0], models[0][0]) for model in models)
    assert torch.allclose(models[0][0].double(), expected_mean, atol=2e-6)


@pytest.mark.parametrize("compression", ["fp32", "bf16", "int8", RandomK(4, Int8())], ids=str)
@pytest.mark.parametrize("route", [RandomPairs(), FastestPairs(), Ring()], ids=str)
def test_pure_mixing_keeps_the_mean(route: Route, compression: Any) -> None:
    choices = {"mixing": 0.0} if isinstance(route, Ring) else MEAN
    models, groups = vectors(5, 256, route=route, compression=compression, **choices)
    start = begin(models, 1)
    expected_mean = start.mean(0)
    for _ in range(40):
        groups.step(idle=range(5))
        assert torch.allclose(stacked(models).mean(0), expected_mean, atol=1e-6)
    assert stacked(models).var(0).mean() < 0.5 * start.var(0).mean()


def test_rounds_of_a_route_are_counted_from_the_start_of_training() -> None:
    route = Neighbours()
    models, groups = vectors(6, route=route, **{**MEAN, "sync_every": 1})
    expected = begin(models, 2)
    for number in range(9):
        groups.step()
        expected = mean_of_partners(expected, route.legs(number, 6))
        assert torch.allclose(stacked(models), expected, atol=1e-5)


def test_a_group_sends_to_its_partners_only() -> None:
    route = FastestPairs(speeds=SPEEDS[:6])
    choices = {"sync_every": 4, "overlap_steps": 0, "mixing": 0.0, "compression": "fp32", **OUTER}
    _, groups = vectors(6, route=route, **choices)
    for _ in range(12):
        groups.step()
    model = Model.of_size(64, layers=1)
    hosts = Hosts(groups=6, step_time=1.0)
    planned = Streaming(model, Settings(route=route, **choices), hosts)
    assert planned.bytes_per_step * 12 == groups.engines[0].report()["bytes_sent"]


def test_partners_that_began_from_other_outer_parameters_are_an_error() -> None:
    _, groups = vectors(4, route=RandomPairs(), **OUTER)
    state = groups.engines[1].state_dict()
    state["fragments"][0] = {**state["fragments"][0], "anchor": torch.ones(64)}
    groups.engines[1].load_state_dict(state)
    for _ in range(3):
        groups.step()
    with pytest.raises(AgreementError, match="did not begin from the same outer parameters"):
        groups.step()


def test_a_group_that_is_not_finite_takes_the_values_of_its_partner() -> None:
    route = RandomPairs()
    models, groups = vectors(4, route=route, **MEAN)
    for group, model in enumerate(models):
        model[0].data.fill_(float(group) if group else nan)
    for _ in range(3):
        groups.step()
    landings = [landing for landed in groups.step() for landing in landed]
    assert [landing.left_out for landing in landings] == [(0,)] * 4, "all know"
    (leg,) = (leg for leg in route.legs(0, 4) if 0 in leg)
    partner = sum(leg)
    values = stacked(models)[:, 0].tolist()
    assert values[0] == values[partner] == partner


def test_rounds_restart_from_the_mean() -> None:
    choices = {"sync_every": 4, "overlap_steps": 1, "mixing": 0.0, "compression": "fp32", **OUTER}
    run = Groups(4, "sgd", with_statistics, fragments=[["*"]], route=RandomPairs(), **choices)
    run.until(9)
    restart = restart_from([[engine.state_dict()] for engine in run.engines], Settings())
    parameters = restart.parameters.values()
    fragments = [outer_state(engine)[0] for engine in run.engines]

    def assert_mean(joined: Tensor, parts: list[Tensor]) -> None:
        assert torch.allclose(joined, torch.stack(parts).mean(0))
        assert not torch.allclose(joined, parts[0])

    outer = torch.cat([parameter.values for parameter in parameters])
    momentum = torch.cat([parameter.state["momentum_buffer"] for parameter in parameters])
    running_mean = restart.untrained["7.running_mean"]
    assert_mean(outer, [fragment["outer"] for fragment in fragments])
    assert_mean(momentum, [fragment["state"]["momentum_buffer"] for fragment in fragments])
    assert_mean(running_mean, [fragment["buffers"][0] for fragment in fragments])


ALL_PAIRS_OF_FOUR = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]


@pytest.mark.parametrize("seed", range(6))
def test_the_fastest_pairs_are_optimal(seed: int) -> None:
    drawn = np.random.default_rng(seed).permutation(16).reshape(4, 4) + 1.0
    symmetric = np.minimum(drawn, drawn.T).tolist()
    speeds = tuple(tuple(row) for row in symmetric)

    def sorted_speeds(pairs: Legs) -> list[float]:
        """The slowest pair is compared first."""
        return sorted(speeds[group][partner] for group, partner in pairs)

    chosen = FastestPairs(speeds=speeds).legs(0, 4)
    assert sorted_speeds(chosen) == max(map(sorted_speeds, ALL_PAIRS_OF_FOUR))


def assert_connected(route: FastestPairs, block: int, groups: int) -> None:
    """In every round of a block each group has a leg, and together the rounds join all groups."""
    joined = {group: {group} for group in range(groups)}
    for number in range(block * route.window, (block + 1) * route.window):
        legs = route.legs(number, groups)
        assert sorted(group for leg in legs for group in leg) == list(range(groups))
        assert groups == 1 or all(2 <= len(leg) <= 3 for leg in legs)
        for leg in legs:
            union = set().union(*(joined[group] for group in leg))
            joined.update(dict.fromkeys(union, union))
    assert len(joined[0]) == groups


def link_speed(a: int, b: int) -> float:
    """Of a symmetric table with some equal entries."""
    return 1.0 + (3 * a * a + 3 * b * b + a * b) % 11


@pytest.mark.parametrize("block", [0, 3])
@pytest.mark.parametrize("groups", [1, 2, 3, 7, 16])
def test_the_fastest_pairs_of_a_window_connect_all_groups(groups: int, block: int) -> None:
    by_group = tuple(1.0 + (7 * group) % 5 for group in range(groups))
    by_link = tuple(tuple(link_speed(a, b) for b in range(groups)) for a in range(groups))
    assert_connected(FastestPairs(window=2), block, groups)
    assert_connected(FastestPairs(speeds=by_group), block, groups)
    assert_connected(FastestPairs(speeds=by_link, window=4), block, groups)


def play_time(route: Route | None, steps: int) -> float:
    """The predicted seconds of some steps of two fast groups and two slow ones."""
    links = [Link(gbit_s=speed) for speed in (1.0, 1.0, 0.1, 0.1)]
    hosts = Hosts(groups=4, step_time=1.0, memory_rate=1e15)
    choices = Settings(sync_every=10, overlap_steps=0, compression="fp32", route=route, mixing=0.0)
    method = Streaming(Model.of_size(10**7, layers=1), choices, hosts)
    trace = play(method, links[0], steps, [1.0] * 4, links=links)[0]
    return trace.steps[-1]


def test_the_clock_knows_unequal_links_and_pairs() -> None:
    """Pairs by speed let the fast groups wait for one round less."""
    pairs = FastestPairs(speeds=(10, 10, 1, 1))
    # A payload takes 3.2 seconds on a slow link, whose later launch the second landing awaits.
    assert play_time(pairs, 10) == pytest.approx(10 + 0.1 * 3.2, rel=0.01)
    assert play_time(pairs, 20) == pytest.approx(20 + 2.0 * 3.2, rel=0.01)
    assert play_time(None, 20) == pytest.approx(20 + 3.0 * 3.2, rel=0.01)


# Numbers and schedules

SENDERS = ErrorFeedback(TopK(1 / 64, Int2(), over="senders"), decay=0.95)
SPARSE = recommended(is_sparse=True)


def assert_numbers(compression: Any, is_sparse: bool, is_elementwise: bool) -> None:
    chosen = Settings(compression=compression).chosen_for(2)
    direction = chosen.outer.direction
    assert OuterStep(**chosen.numbers) == recommended(is_sparse, direction=direction)
    assert (direction == "elementwise") == is_elementwise
    assert (chosen.outer_momentum == 0) == is_sparse


def test_the_numbers_of_a_compression_replace_momentum_by_a_sparse_memory() -> None:
    sparse = TopK(1 / 64, Int2())
    threshold = Threshold(1 / 64, Float32(), least=1.5)
    assert_numbers("sparse", is_sparse=True, is_elementwise=True)
    assert_numbers(ErrorFeedback(threshold), is_sparse=True, is_elementwise=True)
    assert_numbers("fp4", is_sparse=False, is_elementwise=False)
    assert_numbers(ErrorFeedback(FP4()), is_sparse=False, is_elementwise=False)
    # Most values do not wait.
    half = TopK(0.5, Int2())
    assert_numbers(ErrorFeedback(half), is_sparse=False, is_elementwise=False)
    # Without a memory, momentum is worth as much as elsewhere.
    assert_numbers(sparse, is_sparse=False, is_elementwise=True)
    # All groups send the same values.
    same_values = RandomK(64, FP4())
    assert_numbers(ErrorFeedback(same_values), is_sparse=False, is_elementwise=True)


def test_a_sparse_memory_acts_as_momentum() -> None:
    gain = SPARSE.outer_lr / (1 - SPARSE.outer_momentum)
    assert SPARSE_GAINS[0] < gain < SPARSE_GAINS[1]
    plain = Settings(compression="sparse", outer_momentum=0.0).chosen_for(2)
    assert plain.outer_lr == SPARSE.outer_lr
    # A momentum of the user does not get the rate of none.
    heavy = Settings(compression="sparse", outer_momentum=0.9).chosen_for(2)
    assert heavy.outer_lr == 0.7
    over_senders = Settings(compression=SENDERS).chosen_for(4)
    assert over_senders.outer_lr == 1.0 < SPARSE.outer_lr


def warnings_of(log: pytest.LogCaptureFixture, **choices: Any) -> list[str]:
    log.clear()
    with log.at_level(logging.WARNING):
        SimulatedGroups([mlp() for _ in range(4)], **{"compression": "sparse", **choices})
    return [text for text in log.messages if "not suitable for compression" in text]


def test_unsuitable_numbers_get_one_warning_that_names_suitable_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def assert_warned(suitable_lr: float, **choices: Any) -> None:
        (warning,) = warnings_of(caplog, **choices)
        suitable_momentum = f"outer_momentum={SPARSE.outer_momentum:g}"
        assert f"to use outer_lr={suitable_lr:g} and {suitable_momentum}" in warning

    plain = {"outer_momentum": 0.0, "compression": SENDERS}
    assert_warned(SPARSE.outer_lr, outer_momentum=0.9)
    assert_warned(SPARSE.outer_lr, outer_lr=4.0)
    assert_warned(1.0, outer_lr=0.1, **plain)
    assert_warned(1.0, outer_lr=3.2, **plain)
    for suitable in (
        {},
        {"outer_lr": 1.0, "outer_momentum": 0.5},
        {"outer_lr": 0.4, "outer_momentum": 0.9, "compression": "fp4"},
        {"outer_optimizer": partial(SGD, lr=0.1)},
        {"outer_lr": 1.0, **plain},
    ):
        assert warnings_of(caplog, **suitable) == []


def test_given_numbers_are_kept_and_the_others_are_chosen() -> None:
    users = {"outer_lr": 0.4, "outer_momentum": 0.9, "mixing": 0.5}
    for compression in ("fp4", "sparse"):
        assert Settings(**users, compression=compression).chosen_for(4).numbers == users
    recommendation = recommended(direction="elementwise")
    expected = recommendation._replace(outer_momentum=0.5)._asdict()
    for engine in SimulatedGroups([mlp(), mlp()], outer_momentum=0.5).engines:
        assert engine.rounds.settings.numbers == expected
        assert expected.items() <= engine.report().items()
    with_optimizer = Settings(outer_optimizer=partial(SGD, lr=0.1)).chosen_for(2)
    expected_mixing = {"mixing": recommended().mixing}
    assert with_optimizer.numbers == expected_mixing, "an outer optimizer has its own rate"
    assert not {"outer_lr", "outer_momentum"} & with_optimizer.saved().keys()


def test_numbers_that_a_checkpoint_holds_are_not_chosen_again() -> None:
    saved = Settings(outer_lr=1, mixing=0.3).chosen_for(2).saved()
    resumed = Settings(outer_momentum=0.25).taken_from(saved)
    assert resumed.numbers == {"outer_lr": 1, "outer_momentum": 0.25, "mixing": 0.3}
    assert {**resumed.saved(), "outer_momentum": saved["outer_momentum"]} == saved
    assert Settings().taken_from(Settings().saved()) == Settings(), "saved before the choice"


def test_an_engine_takes_its_numbers_from_a_checkpoint_and_refuses_others(tmp_path: Path) -> None:
    settings = StreamingDiLoCo(mlp(), **SHORT).state_dict()["settings"]
    assert settings["outer_lr"] == recommended(direction="elementwise").outer_lr
    users = {"outer_lr": 0.625, "outer_momentum": 0.5, "mixing": 0.375}
    uninterrupted = Groups(**SHORT, **users)
    resumed = Groups(**SHORT)
    uninterrupted.until(9)
    resumed.load(uninterrupted.saved())
    for run in (uninterrupted, resumed):
        run.until(15)
    assert unlike(uninterrupted.seen(), resumed.seen()) == []
    assert resumed.engines[0].state_dict()["settings"]["mixing"] == 0.375
    path = tmp_path / "a.ckpt"
    StreamingDiLoCo(mlp(), **SHORT, **users).save(path)
    engine = StreamingDiLoCo(mlp(), **SHORT)
    engine.load(path)
    assert engine.rounds.settings.numbers == users
    slower = StreamingDiLoCo(mlp(), **SHORT, outer_lr=0.5)
    assert_refused(r"outer_lr was 0.625, now it is 0.5\.", slower.load, path)


class Event(NamedTuple):
    """The fragments that launch and land in an inner step."""

    step: int
    launches: Fragments
    landings: Fragments


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any valid (H, P, tau); more fragments than steps included."""
    sync_every = draw(st.integers(1, 40))
    return Schedule(sync_every, draw(st.integers(0, sync_every - 1)), draw(st.integers(1, 60)))


def busy(events: Sequence[Event]) -> list[Event]:
    """Without the steps in which nothing launches or lands."""
    return [event for event in events if event.launches or event.landings]


def by_the_paper(schedule: Schedule, first: int, last: int) -> list[Event]:
    """The steps of a range in which fragments launch or land, by line 6 of the algorithm."""
    number = schedule.fragments

    def due(step: int) -> Fragments:
        fragments = range(number)
        return tuple(p for p in fragments if is_launched(step, p, number, schedule.sync_every))

    steps = range(first, last + 1)
    return busy([Event(step, due(step), due(step - schedule.overlap_steps)) for step in steps])


def parsed_fragments(cell: str) -> Fragments:
    return () if cell == "-" else tuple(map(int, cell.split(",")))


def parsed(table: str) -> list[Event]:
    """The lines of a table below its header, read back."""
    header, *lines = [re.split(" {2,}", line.strip()) for line in table.split("\n")]
    assert header == ["step", "launches", "lands"]
    return [
        Event(int(step), parsed_fragments(launched), parsed_fragments(landed))
        for step, launched, landed in lines
    ]


@settings(max_examples=60, deadline=None)
@example(Schedule(100, 5, fragments=3), 1, 100, 10**9)  # no fragment is missed by rounding
@example(Schedule(2, 1, fragments=5), 1, 100, 10**9)  # many fragments share a step
@given(schedules(), st.integers(1, 200), st.integers(0, 100), st.integers(10**9, 10**12))
def test_launches_and_landings_are_those_of_the_paper(
    schedule: Schedule, since: int, length: int, far: int
) -> None:
    sync_every = schedule.sync_every
    last = 5 * sync_every
    steps = range(-sync_every, last + 1)
    expected = by_the_paper(schedule, -sync_every, last)
    events = [Event(step, schedule.launches(step), schedule.landings(step)) for step in steps]
    assert busy(events) == expected
    assert schedule.launches(far) == schedule.launches(2 * sync_every + far % sync_every)
    assert_rounds_are_regular(schedule, expected)
    assert_longest_wait(schedule, since)
    assert_table(schedule, since, since + length)


def assert_rounds_are_regular(schedule: Schedule, events: Sequence[Event]) -> None:
    """Flights land in the order of their launch, and a round launches every fragment once."""
    fragments = range(schedule.fragments)
    sync_every = schedule.sync_every
    in_flight = []
    for event in events:
        in_flight += event.launches
        assert len(in_flight) == len(set(in_flight)), "no fragment has two flights"
        assert [in_flight.pop(0) for _ in event.landings] == list(event.landings)
    launched = [(event.step, p) for event in events for p in event.launches]
    third_round = range(3 * sync_every, 4 * sync_every)
    assert [p for step, p in launched if step in third_round] == list(fragments)
    for p in fragments:
        first_launch = min(event.step for event in events if p in event.launches)
        assert first_launch - sync_every == schedule.offset(p)


def assert_longest_wait(schedule: Schedule, since: int) -> None:
    """The longest wait is that of the worst step of a request."""
    events = by_the_paper(schedule, since, since + 5 * schedule.sync_every)
    launched_at = [event.step for event in events if event.launches]
    waits = []
    for requested_at in range(since, since + 3 * schedule.sync_every):
        launch = min(step for step in launched_at if step > requested_at)
        waits.append(launch + schedule.overlap_steps - requested_at)
    assert schedule.longest_wait(since) == max(waits)


def assert_table(schedule: Schedule, first: int, last: int) -> None:
    """By default the table ends when every fragment has landed twice."""
    table = schedule.table(first, last)
    assert parsed(table) == by_the_paper(schedule, first, last)
    default_table = parsed(schedule.table())
    assert default_table == by_the_paper(schedule, 1, default_table[-1].step)
    landed = [p for event in default_table for p in event.landings]
    assert min(landed.count(p) for p in range(schedule.fragments)) >= 2
    assert str(schedule) == schedule.table()


def test_columns_of_the_table_of_a_schedule_are_aligned() -> None:
    header, first_line, *_ = str(Schedule(2, 1, 2)).split("\n")
    assert header.index("lands") == first_line.rindex("-")
