"""The weight of each group in a mean, by training, clipping and a guard; and the digest of the
outer parameters.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import inf, isclose, nan
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_sdiloco import AgreementError, Landing, OuterOptimizer, SimulatedGroups
from lightning_sdiloco.algorithm.weighting import (
    Aggregation,
    Control,
    Count,
    combined,
    plain,
)
from lightning_sdiloco.engine.shards import digest
from tests.bits import SPECIAL, vector
from tests.engine.groups import MEAN, held, unlike


def said(weight: int = 100, norm: float = 1.0, finite: bool = True) -> Control:
    """The control vector of a group at the launch of fragment 0."""
    norm_squared = norm**2
    return Control(0, 100, 0, weight, 0, norm_squared, changed=0, finite=finite)


CONTROLS = st.lists(
    st.builds(said, st.integers(0, 2**32 - 1), st.floats(0, 1e30), st.booleans()),
    min_size=1,
    max_size=9,
)


def factors(
    controls: list[Control], clip_norm: float | None = None, guard: float | None = None
) -> dict[int, float]:
    """The factors of groups of which no earlier norms are known."""
    return Aggregation(clip_norm, guard).count(controls).factors


@given(controls=CONTROLS, clip_norm=st.floats(1e-6, 1e6), weight=st.integers(1, 2**32 - 1))
def test_factors_are_the_weights_times_the_clipped_share(
    controls: list[Control], clip_norm: float, weight: int
) -> None:
    groups = range(len(controls))
    equal = Aggregation().count([said(weight)] * len(controls))
    assert equal.factors == dict.fromkeys(groups, 1.0)
    finite = [group for group in groups if controls[group].finite]
    assert plain(controls) == Count(dict.fromkeys(finite, 1.0))
    weighted = factors(controls)
    clipped = factors(controls, clip_norm)
    counted = [group for group in finite if controls[group].weight]
    assert list(weighted) == list(clipped) == counted
    total = sum(controls[group].weight for group in counted)
    for group, factor in weighted.items():
        share = Fraction(controls[group].weight, total)
        assert isclose(factor / len(counted), share, rel_tol=1e-15)
        norm = controls[group].norm
        assert isclose(norm * clipped[group], min(norm, clip_norm) * factor, rel_tol=1e-12)
        assert norm > clip_norm or clipped[group] == factor


def test_an_overflowing_norm_is_clipped_to_zero_and_control_vectors_merge() -> None:
    overflowing = Aggregation(1.0, None).count([said(norm=inf), said()])
    assert overflowing.factors == {0: 0.0, 1: 1.0}
    control = said(weight=2**32 - 1)
    assert Control.unpacked(control.packed()) == control
    # A group trained where all its ranks did.
    assert Control.merged([said(weight=7), said(weight=9)]).weight == 16
    assert Control.merged([said(weight=7), said(weight=0)]).weight == 0
    assert not Control.merged([said(), said(finite=False)]).finite


PLAIN: dict[str, Any] = {"fragments": [["*"]], "compression": "fp32", **MEAN}


class Pushed:
    """Groups that move their parameters by steps of chosen lengths, and launch after each step."""

    def __init__(self, groups: int, **choices: Any) -> None:
        self.models = [nn.Linear(4, 1, bias=False) for _ in range(groups)]
        nn.init.zeros_(self.models[0].weight)
        self.groups = SimulatedGroups(
            self.models, **{**PLAIN, "sync_every": 1, "overlap_steps": 0, **choices}
        )

    @torch.no_grad()
    def push(self, *lengths: float, idle: Sequence[int] = ()) -> Landing:
        """Moves all values of a group by half of the length, which is then the norm of its outer
        gradient.
        """
        for model, length in zip(self.models, lengths, strict=True):
            model.weight += length / 2
        landings = [landing for (landing,) in self.groups.step(idle=idle)]
        for landing in landings:
            assert landing.outlying == landings[0].outlying
            assert landing.left_out == landings[0].left_out
            assert landing.outer_lr == landings[0].outer_lr
        return landings[0]

    @property
    def outer(self) -> float:
        (values,) = self.groups.outer_state_dict().values()
        assert len(set(values.flatten().tolist())) == 1
        return float(values[0, 0])

    @property
    def local(self) -> list[float]:
        return [float(model.weight[0, 0].detach()) for model in self.models]


def everything_held(run: Pushed) -> dict[str, torch.Tensor]:
    return held(run.groups.engines[0], run.models[0])


def test_nothing_moves_when_no_group_trained_but_non_finite_groups_recover() -> None:
    run = Pushed(2, outer_momentum=0.9)
    run.push(2.0, 2.0)
    before = everything_held(run)
    for _ in range(5):
        landing = run.push(0.0, 0.0, idle=[0, 1])
        assert landing.outer_lr == landing.outer_grad_norm == 0.0
        assert landing.left_out == ()
    assert unlike(everything_held(run), before) == []
    run = Pushed(2, mixing=0.5)
    run.push(2.0, 8.0, idle=[0, 1])
    assert run.outer == 0.0
    assert run.local == [1.0, 4.0], "progress is kept"
    landing = run.push(nan, 0.0, idle=[1])
    assert landing.left_out == (0,)
    assert run.outer == 0.0
    assert run.local == [0.0, 4.0], "a group that is not finite recovers"
    run.groups.finish()
    assert run.local == [2.0, 2.0], "the final exchange takes the plain mean of all"


def test_digests_are_checked_even_when_no_group_trained() -> None:
    run = Pushed(2)
    state = run.groups.engines[1].state_dict()
    state["fragments"][0] = {**state["fragments"][0], "outer": torch.full((4,), 1e-7)}
    run.groups.engines[1].load_state_dict(state)
    with pytest.raises(AgreementError, match="do not hold the same outer parameters"):
        run.push(0.0, 0.0, idle=[0, 1])


def test_buffers_take_the_mean_over_the_groups_that_count() -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3)]
    groups = SimulatedGroups(models, sync_every=2, overlap_steps=0, mixing=0.0)

    def means_after(*idle_of_step: Sequence[int]) -> list[list[float]]:
        for group, model in enumerate(models):
            model[1].running_mean.fill_(float(group))
        for idle in idle_of_step:
            groups.step(idle=idle)
        return [model[1].running_mean.tolist() for model in models]

    assert means_after([], [0]) == [[1.0] * 2] * 3, "the plain mean of 0, 1 and 2"
    assert means_after([0], [0]) == [[1.5] * 2] * 3
    assert means_after([0, 1, 2], [0, 1, 2]) == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


def test_the_outer_gradient_of_every_group_is_scaled_down_to_the_norm() -> None:
    run = Pushed(3, outer_optimizer=OuterOptimizer(clip_norm=3.0))
    assert run.push(2.0, 3.0, -30.0).outer_grad_norm == pytest.approx(2 / 3)
    assert run.outer == pytest.approx((1.0 + 1.5 - 1.5) / 3)
    assert run.push(4.0, 4.0, 4.0).outer_grad_norm == pytest.approx(3.0)


def test_an_outlier_is_left_out_by_all_takes_the_outer_values_and_is_no_error() -> None:
    run = Pushed(3, outer_optimizer=OuterOptimizer(outlier_guard=5.0), mixing=0.5)
    for _ in range(4):
        assert run.push(1.0, 1.0, 1.4).outlying == ()
    for _ in range(4):
        before = run.outer
        landing = run.push(1.0, 100.0, 1.4)
        assert landing.outlying == (1,)
        assert landing.left_out == ()
        assert run.local[1] == run.outer, "without mixing"
        assert run.local[0] < run.outer < run.local[2], "with it"
        assert before < run.outer < before + 2.0
    # As often as it comes, and without an error: it never becomes usual.
    for _ in range(20):
        assert run.push(1.0, 100.0, 1.4).outlying == (1,)
    assert run.push(1.0, 1.0, 1.4).outlying == ()


GUARDED: dict[str, Any] = {"outer_optimizer": OuterOptimizer(clip_norm=3.0, outlier_guard=2.0)}


def test_the_guard_is_idle_when_off_or_alone_and_in_the_final_exchange() -> None:
    unguarded = Pushed(2, outer_optimizer=OuterOptimizer(outlier_guard=None))
    alone = Pushed(1, **GUARDED)
    for length in (1.0, 1.0, 1.0, 1.0, 1e6):
        assert unguarded.push(1.0, length).outlying == ()
        assert alone.push(length).outlying == ()
    run = Pushed(2, **GUARDED)
    for _ in range(5):
        run.push(1.0, 1.0)
    before = run.outer
    run.models[0].weight.data += 1000.0
    run.groups.finish()
    assert run.local == [before + 500.0] * 2, "neither weighed nor clipped nor guarded"


def test_the_guard_judges_each_fragment_apart() -> None:
    """The first fragment moves by a length, the second one always by 30."""
    models = []
    for _ in range(2):
        layers = [nn.Linear(4, 1, bias=False) for _ in range(2)]
        models.append(nn.Sequential(*layers))
    choices = {**PLAIN, **GUARDED, "fragments": [["0.*"], ["1.*"]]}
    groups = SimulatedGroups(models, sync_every=2, overlap_steps=0, **choices)
    outlying = {}
    for length in (1.0, 1.0, 1.0, 1.0, 1.0, 30.0):
        models[0][0].weight.data += length / 2
        models[1][0].weight.data += 0.5
        for model in models:
            model[1].weight.data += 15.0
        for landing in [*groups.step()[0], *groups.step()[0]]:
            outlying[landing.fragment] = landing.outlying
    assert outlying == {0: (0,), 1: ()}


def defined(words: list[int], start: int) -> int:
    """The definition, in whole numbers: an odd position is the upper half of a number of 64
    bits.
    """
    total = 0
    for place, word in enumerate(words, start):
        total += word % 2**32 * 2 ** (place % 2 * 32) * (place // 2 * 2 + 1)
    return (total + 2**63) % 2**64 - 2**63


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    numel=st.integers(1, 300),
    offset=st.integers(0, 3),
    start=st.integers(0, 2**40),
)
@example(values=SPECIAL, numel=300, offset=1, start=2**40 + 1)
@settings(max_examples=150, deadline=None)
def test_the_digest_is_its_definition(
    values: list[float], numel: int, offset: int, start: int
) -> None:
    # At an address that is no multiple of a vector register's.
    shifted = vector(values, numel + offset)[offset:]
    assert digest(shifted, start) == defined(shifted.view(torch.int32).tolist(), start)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8]
)
def test_digests_of_shards_of_any_kind_and_cut_add_up(dtype: torch.dtype) -> None:
    words = dtype.itemsize // 4 or 1
    for numel in (0, 1, 131_071, 131_072, 131_073, 400_003):
        values = torch.randn(numel).mul(100).to(dtype)
        expected = digest(values, 7)
        assert digest(values.expand(3, -1).t()[:, 1], 7) == expected
        for cut in (0, numel // 3, numel // 2 + 1):
            first = digest(values[:cut], 7)
            second = digest(values[cut:], 7 + words * min(cut, numel))
            assert combined([first, second]) == expected
    values = torch.arange(1000).to(dtype)
    assert digest(values) != digest(values.roll(1))


def test_the_digest_of_a_long_shard_is_its_definition() -> None:
    words = torch.full((200_001,), -(2**31), dtype=torch.int32)
    assert digest(words, 2**62 + 1) == defined(words.tolist(), 2**62 + 1)
