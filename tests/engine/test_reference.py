"""Tests of the executable specification itself, against answers that are known without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import reference
from tests.reference import is_launched, outer_step, run

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
INNER_LR = 0.1


def make_models(count: int) -> list[nn.Module]:
    """Equal two-layer networks."""
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(count)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    return models


def make_batch(group: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * group + step)
    return torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(
    groups: int,
    inner: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **settings: Any,
) -> tuple[reference.Result, list[nn.Module]]:
    """The networks trained by the specification."""
    models = make_models(groups)
    optimizers = [inner(model.parameters(), lr=INNER_LR) for model in models]
    result = run(models, optimizers, make_batch, nn.functional.mse_loss, **settings)
    return result, models


def train_alone(group: int, steps: int, inner: Callable[..., torch.optim.Optimizer]) -> list[dict[str, Tensor]]:
    """The parameters after every step of training without any exchange."""
    model = make_models(1)[0]
    optimizer = inner(model.parameters(), lr=INNER_LR)
    trajectory = []
    for step in range(1, steps + 1):
        x, y = make_batch(group, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        trajectory.append(parameters(model))
    return trajectory


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=1e-6)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("num_fragments", [1, 2])
def test_an_exchange_in_every_step_is_data_parallel_sgd(groups: int, num_fragments: int) -> None:
    fragments = [NAMES] if num_fragments == 1 else [NAMES[:1], NAMES[1:]]
    result, _ = train(
        groups,
        fragments=fragments,
        steps=6,
        sync_every=1,
        overlap_steps=0,
        mixing=0.0,
        outer_lr=1.0,
        outer_momentum=0.0,
    )
    model = make_models(1)[0]
    for step in range(1, 7):
        losses = [nn.functional.mse_loss(model(x), y) for x, y in (make_batch(m, step) for m in range(groups))]
        model.zero_grad()
        torch.stack(losses).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(INNER_LR * p.grad)
        assert_close(result.outers[step - 1], parameters(model))
        for group in result.locals[step - 1]:
            assert_close(group, parameters(model))
    assert_close(result.outer, parameters(model))


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam])
def test_mixing_one_is_independent_training_while_running(inner: Callable[..., torch.optim.Optimizer]) -> None:
    result, _ = train(
        2,
        inner,
        fragments=[NAMES[:2], NAMES[2:]],
        steps=12,
        sync_every=4,
        overlap_steps=1,
        mixing=1.0,
        outer_lr=0.7,
        outer_momentum=0.9,
    )
    assert len(result.landings) == 5
    for group in range(2):
        for step, expected in enumerate(train_alone(group, 12, inner), start=1):
            assert_equal(result.locals[step - 1][group], expected)


def test_one_group_that_takes_its_own_parameters_is_plain_training() -> None:
    result, models = train(
        1,
        torch.optim.Adam,
        fragments=[[name] for name in NAMES],
        steps=11,
        sync_every=4,
        overlap_steps=0,
        mixing=0.0,
        outer_lr=1.0,
        outer_momentum=0.0,
    )
    for step, expected in enumerate(train_alone(0, 11, torch.optim.Adam), start=1):
        assert_close(result.locals[step - 1][0], expected)
    assert_close(parameters(models[0]), expected)


def test_the_launches_of_the_example_in_the_paper() -> None:
    steps = range(1, 401)
    assert [t for t in steps if is_launched(t, 0, 2, 100)] == [100, 200, 300, 400]
    assert [t for t in steps if is_launched(t, 1, 2, 100)] == [150, 250, 350]


def test_offsets_are_rounded_down() -> None:
    # t_p = floor(p * 5 / 3) = 0, 1, 3.
    first = [next(t for t in range(1, 20) if is_launched(t, p, 3, 5)) for p in range(3)]
    assert first == [5, 6, 8]


def test_more_fragments_than_steps_share_their_launches() -> None:
    # t_p = floor(p * 2 / 4) = 0, 0, 1, 1.
    result, _ = train(
        2,
        fragments=[[name] for name in NAMES],
        steps=5,
        sync_every=2,
        overlap_steps=1,
        mixing=0.0,
        outer_lr=0.7,
        outer_momentum=0.9,
    )
    assert result.launches == [(2, 0), (2, 1), (3, 2), (3, 3), (4, 0), (4, 1), (5, 2), (5, 3)]
    # The last two land at the end, one step early.
    assert result.landings == [(3, 0), (3, 1), (4, 2), (4, 3), (5, 0), (5, 1), (5, 2), (5, 3)]


def test_only_a_landing_changes_the_outer_parameters() -> None:
    result, _ = train(
        2,
        fragments=[NAMES[:2], NAMES[2:]],
        steps=16,
        sync_every=4,
        overlap_steps=3,
        mixing=0.5,
        outer_lr=0.7,
        outer_momentum=0.9,
    )
    # Launches at 4, 8, ... and 6, 10, ...; two flights at a time.
    first, second = {7, 11, 15}, {9, 13}
    before = parameters(make_models(1)[0])
    for step, after in enumerate(result.outers, start=1):
        changed = {name for name in NAMES if not torch.equal(after[name], before[name])}
        assert changed == set(NAMES[:2] if step in first else NAMES[2:] if step in second else [])
        before = after


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_step_is_sgd_with_nesterov_momentum(momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    outer, buffer = torch.randn(7, generator=generator), None
    parameter = nn.Parameter(outer.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.4, momentum=momentum, nesterov=momentum > 0)
    for _ in range(5):
        gradient = torch.randn(7, generator=generator)
        outer, buffer = outer_step(outer, buffer, gradient, 0.4, momentum)
        parameter.grad = gradient
        optimizer.step()
        torch.testing.assert_close(outer, parameter.detach(), rtol=0, atol=1e-6)


def test_the_mean_is_a_sum_in_group_order_and_one_division() -> None:
    # 2**24 + 1 rounds to 2**24 in float32, 2**24 + 2 does not: the order shows.
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert reference.mean([big, one, one]).item() == 2.0**24 / torch.tensor(3.0)
    assert reference.mean([one, one, big]).item() == (2.0**24 + 2) / torch.tensor(3.0)


class Slope(nn.Module):
    """One weight w, and w * x, so that x is the gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(10.0, dtype=dtype))

    def forward(self, x: float) -> Tensor:
        return self.w * x


def train_slopes(steps: int, final_sync: bool) -> tuple[reference.Result, list[Slope]]:
    """M = 2, P = 1, H = 2, tau = 1, alpha = 0.5, outer lr 0.5, momentum 0.5; the groups walk by -1 and -3 per step."""
    models = [Slope(), Slope()]
    result = run(
        models,
        [torch.optim.SGD(model.parameters(), lr=1.0) for model in models],
        lambda group, step: (1.0 + 2.0 * group, None),
        lambda prediction, _: prediction,
        fragments=[["w"]],
        steps=steps,
        sync_every=2,
        overlap_steps=1,
        mixing=0.5,
        outer_lr=0.5,
        outer_momentum=0.5,
        final_sync=final_sync,
    )
    return result, models


# Worked out by hand; every number is a dyadic fraction, hence exact in float32.
#
# t  inner step         what else                                                              outer     local
# 1  9, 7               nothing                                                                10        9, 7
# 2  8, 4               launch 10 - (8, 4) = (2, 6)                                            10        8, 4
# 3  7, 1               land: mean 4; buf 4; d = 4 + 0.5 * 4 = 6; outer 10 - 0.5 * 6 = 7;      7         7, 4
#                       local (7 + 7) / 2, (1 + 7) / 2
# 4  6, 1               launch 7 - (6, 1) = (1, 6)                                             7         6, 1
# 5  5, -2              land: mean 3.5; buf 0.5 * 4 + 3.5 = 5.5; d = 3.5 + 0.5 * 5.5 = 6.25;   3.875     4.4375, 0.9375
#                       outer 7 - 3.125 = 3.875; local (5 + 3.875) / 2, (-2 + 3.875) / 2
# 6  3.4375, -2.0625    launch 3.875 - (3.4375, -2.0625) = (0.4375, 5.9375)                    3.875     as left
# end                   land: mean 3.1875; buf 0.5 * 5.5 + 3.1875 = 5.9375;
#                       d = 3.1875 + 0.5 * 5.9375 = 6.15625; outer 3.875 - 3.078125            0.796875
#                       local (3.4375 + 0.796875) / 2, (-2.0625 + 0.796875) / 2                2.1171875, -0.6328125
# final sync            mean of the local parameters                                           0.7421875
OUTER_BY_HAND = [10.0, 10.0, 7.0, 7.0, 3.875, 3.875]
LOCAL_BY_HAND = [[9.0, 7.0], [8.0, 4.0], [7.0, 4.0], [6.0, 1.0], [4.4375, 0.9375], [3.4375, -2.0625]]


@pytest.mark.parametrize(("final_sync", "finished"), [(True, 0.7421875), (False, 0.796875)])
def test_an_example_worked_out_by_hand(final_sync: bool, finished: float) -> None:
    result, models = train_slopes(6, final_sync)
    assert [outer["w"].item() for outer in result.outers] == OUTER_BY_HAND
    assert [[group["w"].item() for group in groups] for groups in result.locals] == LOCAL_BY_HAND
    assert result.launches == [(2, 0), (4, 0), (6, 0)]
    assert result.landings == [(3, 0), (5, 0), (6, 0)]
    assert result.outer["w"].item() == finished
    assert [model.w.item() for model in models] == [finished, finished]


def test_the_final_sync_ignores_the_outer_learning_rate_and_momentum() -> None:
    # After step 5 nothing is in flight: the mean of 4.4375 and 0.9375.
    result, _ = train_slopes(5, final_sync=True)
    assert result.outer["w"].item() == 2.6875


def test_a_run_shorter_than_the_first_round_still_ends_in_the_mean() -> None:
    result, _ = train_slopes(1, final_sync=True)
    assert result.launches == []
    assert result.outer["w"].item() == 8.0


def test_outer_parameters_are_float32_whatever_the_model() -> None:
    models = [Slope(torch.bfloat16), Slope(torch.bfloat16)]
    result = run(
        models,
        [torch.optim.SGD(model.parameters(), lr=1.0) for model in models],
        lambda group, step: (1.0 + group, None),
        lambda prediction, _: prediction,
        fragments=[["w"]],
        steps=1,
        sync_every=1,
        overlap_steps=0,
        mixing=0.0,
        outer_lr=0.3,
        outer_momentum=0.0,
    )
    # The deltas are 1 and 2; 10 - 0.3 * 1.5 = 9.55 exists in float32 only, bfloat16 has 9.5625.
    assert result.outers[0]["w"].item() == pytest.approx(9.55, abs=1e-6)
    assert result.locals[0][0]["w"].dtype == torch.bfloat16
    assert result.locals[0][1]["w"].item() == 9.5625


@pytest.mark.parametrize("names", [NAMES[:3], [*NAMES, NAMES[0]]])
def test_a_parameter_outside_or_in_two_fragments_is_refused(names: list[str]) -> None:
    with pytest.raises(AssertionError, match="each name in one fragment"):
        train(
            2,
            fragments=[names],
            steps=1,
            sync_every=1,
            overlap_steps=0,
            mixing=0.0,
            outer_lr=1.0,
            outer_momentum=0.0,
        )
