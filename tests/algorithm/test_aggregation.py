"""How much each group counts in a mean: by the steps it trained, clipped, and guarded against outliers."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from functools import partial
from math import inf, isclose, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR

from lightning_sdiloco import AgreementError, Landing, OuterOptimizer, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm.weighting import Aggregation, Control, Count, plain, remembered
from lightning_sdiloco.comm.topology import GroupLayout, Topology
from tests.ranks import run_ranks
from tests.training import LAYERS, batch, inner_optimizer, mlp, train_step


def said(weight: int = 100, norm: float = 1.0, finite: bool = True) -> Control:
    """What a group says at the launch of fragment 0."""
    return Control(0, 100, 0, weight=weight, digest=0, norm_squared=norm**2, changed=0, finite=finite)


class Counting:
    """An aggregation, and what is remembered of a fragment."""

    def __init__(self, groups: int = 2, clip_norm: float | None = None, guard: float | None = None) -> None:
        self.aggregation = Aggregation(clip_norm, guard)
        self.norms: list[list[float]] = [[] for _ in range(groups)]

    def count(self, controls: Sequence[Control]) -> Count:
        return self.aggregation.count(controls, self.norms)

    def commit(self, controls: Sequence[Control]) -> None:
        self.norms = remembered(self.norms, controls)


# Arithmetic

CONTROLS = st.lists(
    st.builds(said, st.integers(0, 2**32 - 1), st.floats(0, 1e30), st.booleans()), min_size=1, max_size=9
)


@given(weight=st.integers(1, 2**32 - 1), groups=st.integers(1, 50))
def test_groups_of_equal_weight_have_the_factor_one(weight: int, groups: int) -> None:
    assert Counting(groups).count([said(weight)] * groups).factors == dict.fromkeys(range(groups), 1.0)


@given(controls=CONTROLS)
def test_the_factors_are_the_weights(controls: list[Control]) -> None:
    factors = Counting(len(controls)).count(controls).factors
    counted = [group for group, control in enumerate(controls) if control.finite and control.weight]
    assert list(factors) == counted
    total = sum(controls[group].weight for group in counted)
    for group, factor in factors.items():
        assert isclose(factor / len(counted), Fraction(controls[group].weight, total), rel_tol=1e-15)


@given(controls=CONTROLS)
def test_the_final_exchange_is_plain(controls: list[Control]) -> None:
    assert plain(controls) == Count({group: 1.0 for group, control in enumerate(controls) if control.finite})


@given(controls=CONTROLS, clip_norm=st.floats(1e-6, 1e6))
def test_what_is_clipped_has_the_norm_and_its_weight(controls: list[Control], clip_norm: float) -> None:
    weights = Counting(len(controls)).count(controls).factors
    clipped = Counting(len(controls), clip_norm).count(controls).factors
    assert list(clipped) == list(weights)
    for group, factor in clipped.items():
        norm = sqrt(controls[group].norm_squared)
        if norm <= clip_norm:
            assert factor == weights[group]
        else:
            assert isclose(norm * factor, clip_norm * weights[group], rel_tol=1e-12)


def test_a_norm_that_overflows_is_clipped_to_nothing_and_still_counts() -> None:
    assert Counting(2, clip_norm=1.0).count([said(norm=inf), said()]).factors == {0: 0.0, 1: 1.0}


@settings(max_examples=200)
@given(
    guard=st.floats(1.01, 100),
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e6), st.booleans()), min_size=3, max_size=3)),
)
def test_the_guard_never_leaves_out_all_and_only_who_is_far(
    guard: float, rounds: list[list[tuple[int, float, bool]]]
) -> None:
    with_guard, without = Counting(3, guard=guard), Counting(3)
    norms: list[list[float]] = [[], [], []]
    for values in rounds:
        controls = [said(*value) for value in values]
        count, all_of_them = with_guard.count(controls), without.count(controls)
        assert bool(count.factors) == bool(all_of_them.factors)
        assert sorted([*count.factors, *count.outlying]) == list(all_of_them.factors)
        for group in count.outlying:
            last = sorted(norms[group][-8:])
            assert len(last) >= 4
            middle = (last[(len(last) - 1) // 2] + last[len(last) // 2]) / 2
            assert sqrt(controls[group].norm_squared) > guard * middle > 0
        if not count.outlying:
            assert count == all_of_them
        with_guard.commit(controls)
        for group in all_of_them.factors:
            norms[group].append(sqrt(controls[group].norm_squared))


def test_a_lasting_change_is_accepted_after_some_rounds() -> None:
    guarded = Counting(2, guard=5.0)
    seen = []
    for number in range(12):
        controls = [said(), said(norm=1.0 if number < 5 else 30.0)]
        seen.append(guarded.count(controls).outlying)
        guarded.commit(controls)
    # The median of the last eight is above a fifth of the norm from the fourth of the new ones on.
    assert seen == [()] * 5 + [(1,)] * 4 + [()] * 3


def test_what_is_far_for_all_is_no_outlier() -> None:
    guarded = Counting(2, guard=5.0)
    for _ in range(4):
        guarded.commit([said(), said()])
    assert guarded.count([said(norm=30.0), said(norm=40.0)]).outlying == ()
    assert guarded.count([said(norm=30.0), said(norm=4.0)]).outlying == (0,)
    assert guarded.count([said(norm=30.0), said(norm=4.0, weight=0)]).outlying == (), "the other did not train"


def test_a_group_that_never_moved_is_not_compared_with_that() -> None:
    guarded = Counting(2, guard=5.0)
    for _ in range(4):
        guarded.commit([said(norm=0.0), said()])
    assert guarded.count([said(norm=1e-3), said()]).outlying == ()


def test_only_norms_of_training_are_remembered() -> None:
    guarded = Counting(2, guard=5.0)
    for _ in range(4):
        guarded.commit([said(), said()])
    for _ in range(8):
        guarded.commit([said(norm=30.0, weight=0), said(norm=30.0, finite=False)])
    assert guarded.count([said(norm=30.0), said()]).outlying == (0,)
    assert guarded.count([said(), said(norm=30.0)]).outlying == (1,)
    assert guarded.norms == [[1.0] * 4] * 2


def test_the_norms_of_every_fragment_are_remembered_apart() -> None:
    models = [nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)) for _ in range(2)]
    choices = {**PLAIN, "fragments": [["0.*"], ["1.*"]], "outer_optimizer": OuterOptimizer(outlier_guard=5.0)}
    groups = SimulatedGroups(models, sync_every=2, overlap_steps=0, **choices)

    @torch.no_grad()
    def outlying(*lengths: float) -> dict[int, tuple[int, ...]]:
        """Moves the first fragment of each group by a length, and the second one always by 30."""
        for model, length in zip(models, lengths, strict=True):
            model[0].weight += length / 2
            model[1].weight += 15.0
        landings = [landing for _ in range(2) for landing in groups.step()[0]]
        return {landing.fragment: landing.outlying for landing in landings}

    for _ in range(5):
        outlying(1.0, 1.0)
    assert outlying(30.0, 1.0) == {0: (0,), 1: ()}


def test_a_control_vector_carries_the_weight_and_a_group_trained_when_all_its_ranks_did() -> None:
    control = said(weight=2**32 - 1)
    assert Control.unpacked(control.packed()) == control
    assert Control.merged([said(weight=7), said(weight=9)]).weight == 16
    assert Control.merged([said(weight=7), said(weight=0)]).weight == 0
    assert not Control.merged([said(), said(finite=False)]).finite


# Simulated groups whose parameters are moved by hand

PLAIN: dict[str, Any] = {
    "fragments": [["*"]],
    "compression": "fp32",
    "mixing": 0.0,
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
}


class Pushed:
    """Groups of which each moves its parameters by a step of a given length, and launches after every one."""

    def __init__(self, groups: int, **choices: Any) -> None:
        self.models = [nn.Linear(4, 1, bias=False) for _ in range(groups)]
        with torch.no_grad():
            self.models[0].weight.zero_()
        self.groups = SimulatedGroups(self.models, **{**PLAIN, "sync_every": 1, "overlap_steps": 0, **choices})

    @torch.no_grad()
    def push(self, *lengths: float, idle: Sequence[int] = ()) -> Landing:
        """Moves all values of a group by half of the length, which is then the norm of its outer gradient."""
        for model, length in zip(self.models, lengths, strict=True):
            model.weight += length / 2
        (landing,), *others = self.groups.step(idle=idle)
        seen = [(other.outlying, other.left_out, other.outer_lr) for (other,) in others]
        assert seen == [(landing.outlying, landing.left_out, landing.outer_lr)] * len(others)
        return landing

    @property
    def outer(self) -> float:
        (values,) = self.groups.outer_state_dict().values()
        assert len(set(values.flatten().tolist())) == 1
        return float(values[0, 0])

    @property
    def local(self) -> list[float]:
        return [float(model.weight[0, 0].detach()) for model in self.models]


def test_every_group_counts_by_the_steps_that_it_trained() -> None:
    models = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    groups = SimulatedGroups(models, sync_every=4, overlap_steps=0, **PLAIN)
    before = groups.outer_state_dict()["weight"]
    for group, model in enumerate(models):
        with torch.no_grad():
            model.weight += 1.0 + 3 * group
    for step in range(4):
        groups.step(idle=[1] if step >= 2 else [])
    # (4 * 1 + 2 * 4) / 6
    torch.testing.assert_close(groups.outer_state_dict()["weight"], before + 2.0)


def test_steps_count_from_the_groups_own_last_launch_of_the_fragment() -> None:
    models = [mlp(), mlp()]
    groups = SimulatedGroups(models, sync_every=8, overlap_steps=3, fragments=LAYERS)
    weights: list[tuple[int, int, list[int]]] = []
    for step in range(1, 25):
        groups.step(idle=[1] if step in (7, 8, 9, 20) else [])
        weights += [
            (
                step,
                flight.launch.fragment,
                [engine.rounds.flights[-1].launch.weight for engine in groups.engines],
            )
            for flight in groups.engines[0].rounds.flights[-1:]
            if flight.launch.step == step
        ]
    assert weights == [
        (8, 0, [8, 6]),
        (10, 1, [10, 7]),
        (12, 2, [12, 9]),
        (14, 3, [14, 11]),
        (16, 0, [8, 7]),
        (18, 1, [8, 8]),
        (20, 2, [8, 7]),
        (22, 3, [8, 7]),
        (24, 0, [8, 7]),
    ]


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_a_group_that_did_not_train_does_not_count_and_mixes_as_usual(mixing: float) -> None:
    run = Pushed(2, mixing=mixing)
    landing = run.push(2.0, 8.0, idle=[1])
    assert (landing.left_out, landing.outlying, landing.outer_lr) == ((), (), 1.0)
    assert run.outer == 1.0
    assert run.local == [1.0, 1.0 + 3.0 * mixing]


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_where_no_group_has_trained_nothing_moves(mixing: float) -> None:
    run = Pushed(2, mixing=mixing, outer_momentum=0.9)
    run.push(2.0, 2.0)
    before = run.outer, run.local
    engine = run.groups.engines[0]
    momentum = engine.rounds.fragments[0].outer.state["momentum_buffer"].clone()
    for _ in range(5):
        landing = run.push(0.0, 0.0, idle=[0, 1])
        assert (landing.outer_lr, landing.outer_grad_norm, landing.left_out) == (0.0, 0.0, ())
    assert (run.outer, run.local) == before
    assert torch.equal(engine.rounds.fragments[0].outer.state["momentum_buffer"], momentum)
    assert engine.report()["landings"] == 6


def test_where_no_group_has_trained_local_progress_of_before_is_kept() -> None:
    run = Pushed(2, mixing=0.5)
    run.push(2.0, 8.0, idle=[0, 1])
    assert (run.outer, run.local) == (0.0, [1.0, 4.0])
    run.groups.finish()
    assert run.local == [2.5, 2.5], "the final exchange takes the plain mean of all"


def test_where_no_group_has_trained_the_digest_is_checked_still() -> None:
    run = Pushed(2)
    run.groups.engines[1].rounds.fragments[0].outer.values[2] += 1e-7
    with pytest.raises(AgreementError, match="do not hold the same outer parameters"):
        run.push(0.0, 0.0, idle=[0, 1])


def test_a_group_that_is_not_finite_recovers_where_the_others_have_not_trained() -> None:
    run = Pushed(2, mixing=0.5)
    run.push(2.0, 2.0)
    landing = run.push(float("nan"), 4.0, idle=[1])
    assert landing.left_out == (0,)
    assert landing.outer_lr == 0.0
    assert (run.outer, run.local) == (1.0, [1.0, 3.0])


def test_buffers_take_the_mean_over_the_groups_that_count() -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3)]
    groups = SimulatedGroups(models, sync_every=2, overlap_steps=0, mixing=0.0)
    for group, model in enumerate(models):
        model[1].running_mean.fill_(float(group))
    groups.step()
    groups.step(idle=[0])
    assert [model[1].running_mean.tolist() for model in models] == [[1.0, 1.0]] * 3, "the plain mean of 0, 1 and 2"
    for group, model in enumerate(models):
        model[1].running_mean.fill_(float(group))
    for _ in range(2):
        groups.step(idle=[0])
    assert [model[1].running_mean.tolist() for model in models] == [[1.5, 1.5]] * 3
    for group, model in enumerate(models):
        model[1].running_mean.fill_(float(group))
    for _ in range(2):
        groups.step(idle=[0, 1, 2])
    assert [model[1].running_mean.tolist() for model in models] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


def test_the_outer_gradient_of_every_group_is_scaled_down_to_the_norm() -> None:
    run = Pushed(3, outer_optimizer=OuterOptimizer(clip_norm=3.0))
    landing = run.push(2.0, 3.0, -30.0)
    assert run.outer == pytest.approx((1.0 + 1.5 - 1.5) / 3)
    assert landing.outer_grad_norm == pytest.approx(2 / 3)
    assert run.push(4.0, 4.0, 4.0).outer_grad_norm == pytest.approx(3.0)


def test_an_outlier_is_left_out_by_all_takes_the_outer_values_and_is_no_error() -> None:
    run = Pushed(3, outer_optimizer=OuterOptimizer(outlier_guard=5.0), mixing=0.5)
    for _ in range(4):
        assert run.push(1.0, 1.0, 1.4).outlying == ()
    for _ in range(4):
        before = run.outer
        landing = run.push(1.0, 100.0, 1.4)
        assert (landing.outlying, landing.left_out) == ((1,), ())
        assert run.local[1] == run.outer, "without mixing"
        assert run.local[0] < run.outer < run.local[2], "with it"
        assert before < run.outer < before + 2.0
    # Four times in a row and no error; by now it is what the group does.
    before = run.outer
    assert run.push(1.0, 100.0, 1.4).outlying == ()
    assert run.outer > before + 10.0


@pytest.mark.parametrize(("length", "outlying"), [(3.5, ()), (4.5, (1,))])
def test_the_guard_compares_with_the_mean_of_the_two_in_the_middle_where_the_norms_are_even_in_number(
    length: float, outlying: tuple[int, ...]
) -> None:
    run = Pushed(2, outer_optimizer=OuterOptimizer(outlier_guard=2.0))
    for before in (3.0, 1.0, 3.0, 1.0):
        assert run.push(1.0, before).outlying == ()
    assert run.push(1.0, length).outlying == outlying, "twice the median is 4"


def test_without_a_guard_nobody_is_left_out() -> None:
    run = Pushed(2)
    for length in (1.0, 1.0, 1.0, 1.0, 1e6):
        assert run.push(1.0, length).outlying == ()


def test_a_single_group_is_never_left_out() -> None:
    run = Pushed(1, outer_optimizer=OuterOptimizer(outlier_guard=2.0))
    for length in (1.0, 1.0, 1.0, 1.0, 1e6):
        assert run.push(length).outlying == ()


def test_the_final_exchange_is_neither_weighted_nor_clipped_nor_guarded() -> None:
    run = Pushed(2, outer_optimizer=OuterOptimizer(clip_norm=3.0, outlier_guard=2.0))
    for _ in range(5):
        run.push(1.0, 1.0)
    before = run.outer
    with torch.no_grad():
        run.models[0].weight += 1000.0
    run.groups.finish()
    assert run.local == [before + 500.0] * 2


# Training


def trained(steps: int, groups: int, idle: frozenset[int] = frozenset(), **choices: Any) -> list[Tensor]:
    """Local and outer values of every group after every step, where all groups are idle in some steps."""
    models = [mlp(seed) for seed in range(groups)]
    optimizers = [inner_optimizer("adamw", model) for model in models]
    simulated = SimulatedGroups(models, **choices)
    seen: list[Tensor] = []
    for step in range(1, steps + 1):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, group, step)
        simulated.step(idle=range(groups) if step in idle else ())
        seen += [p.detach().clone() for model in models for p in model.parameters()]
        seen += simulated.outer_state_dict().values()
    simulated.finish()
    return [*seen, *simulated.outer_state_dict().values()]


OFF: dict[str, dict[str, Any]] = {
    "clip": {"outer_optimizer": OuterOptimizer(clip_norm=1e30)},
    "infinite clip": {"outer_optimizer": OuterOptimizer(clip_norm=inf)},
    "guard": {"outer_optimizer": OuterOptimizer(outlier_guard=1e30)},
    "schedule": {"outer_optimizer": OuterOptimizer(lr_schedule=partial(ConstantLR, factor=1.0))},
    "equal weights": {"idle": frozenset({3, 4, 9, 15, 16})},
}


@pytest.mark.parametrize("off", OFF.values(), ids=OFF)
@settings(max_examples=8, deadline=None)
@given(
    groups=st.integers(1, 4),
    compression=st.sampled_from(["fp32", "bf16", "fp4"]),
    mixing=st.sampled_from([0.0, 0.5]),
    times=st.sampled_from([(3, 0), (6, 4), (7, 6)]),
)
def test_what_has_no_effect_changes_no_bit(
    off: dict[str, Any], groups: int, compression: str, mixing: float, times: tuple[int, int]
) -> None:
    choices = {"compression": compression, "mixing": mixing, "sync_every": times[0], "overlap_steps": times[1]}
    plain_run = trained(20, groups, fragments=LAYERS, **choices)
    for one, other in zip(trained(20, groups, fragments=LAYERS, **choices, **off), plain_run, strict=True):
        assert torch.equal(one, other)


EVERYTHING: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "fragments": LAYERS,
    "outer_optimizer": OuterOptimizer(
        lr_schedule=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=7), clip_norm=0.2, outlier_guard=1.3
    ),
}


def is_idle(group: int, step: int) -> bool:
    return step % 20 > 12 + 2 * group or (group == 1 and step in (6, 7, 8, 9, 10))


def test_real_processes_give_the_same_bits_as_the_simulation() -> None:
    def run(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
        model = mlp(seed=rank)
        optimizer = inner_optimizer("adamw", model)
        engine = StreamingDiLoCo(model, **EVERYTHING)
        landings = []
        for step in range(1, 61):
            if not is_idle(rank, step):
                train_step(model, optimizer, rank, step)
            landings += engine.step(idle=is_idle(rank, step))
        engine.finish()
        return engine.outer_state_dict(), [landing.outlying for landing in landings]

    models = [mlp(seed) for seed in range(3)]
    optimizers = [inner_optimizer("adamw", model) for model in models]
    simulated = SimulatedGroups(models, **EVERYTHING)
    outlying = []
    for step in range(1, 61):
        idle = [group for group in range(3) if is_idle(group, step)]
        for group in set(range(3)) - set(idle):
            train_step(models[group], optimizers[group], group, step)
        outlying += [landing.outlying for landing in simulated.step(idle=idle)[0]]
    simulated.finish()
    assert () in outlying
    assert any(outlying), "the guard acted"
    for outer, seen in run_ranks(run, 3):
        assert seen == outlying
        assert all(torch.equal(outer[name], values) for name, values in simulated.outer_state_dict().items())


def test_the_ranks_of_a_group_decide_alike_by_the_norm_of_the_whole_fragment() -> None:
    # Without compression, which changes norms by some percent.
    outer = replace(EVERYTHING["outer_optimizer"], clip_norm=0.02, outlier_guard=1.05)
    choices = {**EVERYTHING, "outer_optimizer": outer, "compression": "fp32"}

    def run(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[tuple[tuple[int, ...], float]]]:
        group, part = divmod(rank, 2)
        topology = Topology.of_world(GroupLayout(world_size, 2), timedelta(seconds=60))
        model = mlp(seed=rank)
        engine = StreamingDiLoCo(model, topology=topology, **choices)
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=topology.in_group.process_group)
        optimizer = inner_optimizer("adamw", model)
        landings = []
        for step in range(1, 41):
            if not is_idle(group, step):
                x, y = batch(group, step)
                optimizer.zero_grad()
                nn.functional.mse_loss(wrapped(x.chunk(2)[part]), y.chunk(2)[part]).backward()
                optimizer.step()
            landings += engine.step(idle=is_idle(group, step))
        engine.finish()
        return engine.outer_state_dict(), [(landing.outlying, landing.outer_grad_norm) for landing in landings]

    first, *others = run_ranks(run, 4)
    assert any(outlying for outlying, _ in first[1])
    assert max(norm for _, norm in first[1]) == pytest.approx(0.02, rel=1e-4)
    for other in others:
        assert other[1] == first[1]
        assert all(torch.equal(other[0][name], values) for name, values in first[0].items())
