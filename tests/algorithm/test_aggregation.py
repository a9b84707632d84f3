"""How much each group counts in a mean: by the steps it trained, clipped, and guarded against outliers."""

from collections.abc import Sequence
from fractions import Fraction
from math import inf, isclose, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_sdiloco import AgreementError, Landing, OuterOptimizer, SimulatedGroups
from lightning_sdiloco.algorithm.weighting import Aggregation, Control, Count, plain, remembered
from tests.engine.groups import Groups
from tests.training import LAYERS


def said(weight: int = 100, norm: float = 1.0, finite: bool = True) -> Control:
    """What a group says at the launch of fragment 0."""
    return Control(0, 100, 0, weight=weight, digest=0, norm_squared=norm**2, changed=0, finite=finite)


# Arithmetic

CONTROLS = st.lists(
    st.builds(said, st.integers(0, 2**32 - 1), st.floats(0, 1e30), st.booleans()), min_size=1, max_size=9
)


@given(controls=CONTROLS, clip_norm=st.floats(1e-6, 1e6), weight=st.integers(1, 2**32 - 1))
def test_factors_are_the_weights_times_what_clipping_leaves(
    controls: list[Control], clip_norm: float, weight: int
) -> None:
    groups = range(len(controls))
    norms: list[list[float]] = [[] for _ in groups]
    assert Aggregation().count([said(weight)] * len(controls), norms).factors == dict.fromkeys(groups, 1.0)
    assert plain(controls) == Count({group: 1.0 for group, control in enumerate(controls) if control.finite})
    weights, clipped = (Aggregation(clip, None).count(controls, norms).factors for clip in (None, clip_norm))
    counted = [group for group, control in enumerate(controls) if control.finite and control.weight]
    assert list(weights) == list(clipped) == counted
    total = sum(controls[group].weight for group in counted)
    for group, factor in weights.items():
        assert isclose(factor / len(counted), Fraction(controls[group].weight, total), rel_tol=1e-15)
        norm = sqrt(controls[group].norm_squared)
        assert isclose(norm * clipped[group], min(norm, clip_norm) * factor, rel_tol=1e-12)
        assert norm > clip_norm or clipped[group] == factor


def test_a_norm_that_overflows_is_clipped_to_nothing_and_what_a_control_vector_carries() -> None:
    assert Aggregation(1.0, None).count([said(norm=inf), said()], [[], []]).factors == {0: 0.0, 1: 1.0}
    control = said(weight=2**32 - 1)
    assert Control.unpacked(control.packed()) == control
    # A group trained where all its ranks did.
    assert [Control.merged([said(weight=7), said(weight=other)]).weight for other in (9, 0)] == [16, 0]
    assert not Control.merged([said(), said(finite=False)]).finite


@settings(max_examples=200)
@given(
    guard=st.floats(1.01, 100),
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e6), st.booleans()), min_size=3, max_size=3)),
)
def test_the_guard_never_leaves_out_all_and_only_who_is_far(
    guard: float, rounds: list[list[tuple[int, float, bool]]]
) -> None:
    remembers: list[list[float]] = [[], [], []]
    norms: list[list[float]] = [[], [], []]
    for values in rounds:
        controls = [said(*value) for value in values]
        count, all_of_them = (Aggregation(None, of).count(controls, remembers) for of in (guard, None))
        assert bool(count.factors) == bool(all_of_them.factors)
        assert sorted([*count.factors, *count.outlying]) == list(all_of_them.factors)
        for group in count.outlying:
            last = sorted(norms[group][-8:])
            assert len(last) >= 4
            middle = (last[(len(last) - 1) // 2] + last[len(last) // 2]) / 2
            assert sqrt(controls[group].norm_squared) > guard * middle > 0
        assert count.outlying or count == all_of_them
        remembers = remembered(remembers, controls)
        for group in all_of_them.factors:
            norms[group].append(sqrt(controls[group].norm_squared))


def test_the_guard_accepts_what_lasts_and_what_is_far_for_all_and_remembers_only_norms_of_training() -> None:
    def after(*rounds: list[Control], last: list[Control]) -> tuple[int, ...]:
        norms: list[list[float]] = [[], []]
        for controls in rounds:
            norms = remembered(norms, controls)
        return Aggregation(None, 5.0).count(last, norms).outlying

    calm, jump = [said(), said()], [said(), said(norm=30.0)]
    # The median of the last eight is above a fifth of the norm from the fourth of the new ones on.
    seen = [after(*[calm] * min(n, 5), *[jump] * (n - 5), last=jump if n >= 5 else calm) for n in range(12)]
    assert seen == [()] * 5 + [(1,)] * 4 + [()] * 3
    for last, outlying in (
        ([said(norm=30.0), said(norm=40.0)], ()),
        ([said(norm=30.0), said(norm=4.0)], (0,)),
        ([said(norm=30.0), said(norm=4.0, weight=0)], ()),  # the other did not train
    ):
        assert after(*[calm] * 4, last=last) == outlying
    # Who never moved is not compared with that.
    assert after(*[[said(norm=0.0), said()]] * 4, last=[said(norm=1e-3), said()]) == ()
    idle = [said(norm=30.0, weight=0), said(norm=30.0, finite=False)]
    assert after(*[calm] * 4, *[idle] * 8, last=[said(norm=30.0), said()]) == (0,)
    assert after(*[calm] * 4, *[idle] * 8, last=jump) == (1,)


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
    def momentum(self) -> list[float]:
        return self.groups.engines[0].state_dict()["fragments"][0]["state"]["momentum_buffer"].tolist()  # type: ignore[no-any-return]

    @property
    def local(self) -> list[float]:
        return [float(model.weight[0, 0].detach()) for model in self.models]


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
        return {landing.fragment: landing.outlying for _ in range(2) for landing in groups.step()[0]}

    for _ in range(5):
        outlying(1.0, 1.0)
    assert outlying(30.0, 1.0) == {0: (0,), 1: ()}


def test_every_group_counts_by_the_steps_that_it_trained_since_its_own_last_launch_of_the_fragment() -> None:
    models = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    groups = SimulatedGroups(models, sync_every=4, overlap_steps=0, **PLAIN)
    before = groups.outer_state_dict()["weight"]
    for group, model in enumerate(models):
        model.weight.data += 1.0 + 3 * group
    for step in range(4):
        groups.step(idle=[1] if step >= 2 else [])
    # (4 * 1 + 2 * 4) / 6
    torch.testing.assert_close(groups.outer_state_dict()["weight"], before + 2.0)
    run = Groups(sync_every=8, overlap_steps=3, fragments=LAYERS)
    weights: list[tuple[int, int, list[int]]] = []
    for step in range(1, 25):
        run.step(idle=[1] if step in (7, 8, 9, 20) else [])
        flights = [engine.state_dict()["flights"][-1:] for engine in run.engines]
        if step >= 8 and step % 2 == 0:
            weights.append((step, flights[0][0]["fragment"], [of[0]["weight"] for of in flights]))
    expected = [[8, 6], [10, 7], [12, 9], [14, 11], [8, 7], [8, 8], [8, 7], [8, 7], [8, 7]]
    assert weights == [(8 + 2 * n, n % 4, own) for n, own in enumerate(expected)]


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_a_group_that_did_not_train_does_not_count_and_where_none_has_nothing_moves(mixing: float) -> None:
    run = Pushed(2, mixing=mixing)
    landing = run.push(2.0, 8.0, idle=[1])
    assert (landing.left_out, landing.outlying, landing.outer_lr) == ((), (), 1.0)
    assert (run.outer, run.local) == (1.0, [1.0, 1.0 + 3.0 * mixing])
    run = Pushed(2, mixing=mixing, outer_momentum=0.9)
    run.push(2.0, 2.0)
    before = run.outer, run.local, run.momentum
    for _ in range(5):
        landing = run.push(0.0, 0.0, idle=[0, 1])
        assert (landing.outer_lr, landing.outer_grad_norm, landing.left_out) == (0.0, 0.0, ())
    assert (run.outer, run.local, run.momentum) == before
    assert run.groups.engines[0].report()["landings"] == 6


def test_where_no_group_has_trained_progress_is_kept_digests_are_checked_and_who_is_not_finite_recovers() -> None:
    run = Pushed(2, mixing=0.5)
    run.push(2.0, 8.0, idle=[0, 1])
    assert (run.outer, run.local) == (0.0, [1.0, 4.0])
    run.groups.finish()
    assert run.local == [2.5, 2.5], "the final exchange takes the plain mean of all"
    run = Pushed(2, mixing=0.5)
    run.push(2.0, 2.0)
    landing = run.push(float("nan"), 4.0, idle=[1])
    assert (landing.left_out, landing.outer_lr) == ((0,), 0.0)
    assert (run.outer, run.local) == (1.0, [1.0, 3.0])
    run = Pushed(2)
    state = run.groups.engines[1].state_dict()
    state["fragments"][0] = {**state["fragments"][0], "outer": torch.full((4,), 1e-7)}
    run.groups.engines[1].load_state_dict(state)
    with pytest.raises(AgreementError, match="do not hold the same outer parameters"):
        run.push(0.0, 0.0, idle=[0, 1])


def test_buffers_take_the_mean_over_the_groups_that_count() -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3)]
    groups = SimulatedGroups(models, sync_every=2, overlap_steps=0, mixing=0.0)
    for idle, means in (
        ([(), (0,)], [1.0] * 3),  # the plain mean of 0, 1 and 2
        ([(0,), (0,)], [1.5] * 3),
        ([(0, 1, 2)] * 2, [0.0, 1.0, 2.0]),
    ):
        for group, model in enumerate(models):
            model[1].running_mean.fill_(float(group))
        for away in idle:
            groups.step(idle=away)
        assert [model[1].running_mean.tolist() for model in models] == [[mean] * 2 for mean in means]


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


def test_the_guard_compares_with_the_middle_and_leaves_out_nobody_where_it_is_off_or_alone_or_at_the_end() -> None:
    for length, outlying in ((3.5, ()), (4.5, (1,))):  # twice the mean of the two in the middle is 4
        run = Pushed(2, outer_optimizer=OuterOptimizer(outlier_guard=2.0))
        for before in (3.0, 1.0, 3.0, 1.0):
            assert run.push(1.0, before).outlying == ()
        assert run.push(1.0, length).outlying == outlying
    for run in (Pushed(2), Pushed(1, outer_optimizer=OuterOptimizer(outlier_guard=2.0))):
        for length in (1.0, 1.0, 1.0, 1.0, 1e6):
            assert run.push(*[1.0, length][-len(run.models) :]).outlying == ()
    run = Pushed(2, outer_optimizer=OuterOptimizer(clip_norm=3.0, outlier_guard=2.0))
    for _ in range(5):
        run.push(1.0, 1.0)
    before = run.outer
    run.models[0].weight.data += 1000.0
    run.groups.finish()
    assert run.local == [before + 500.0] * 2, "neither weighed nor clipped nor guarded"
