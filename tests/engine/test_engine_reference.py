"""The engine against the plain-loop reference of Algorithm 2, over many settings, simulated and with real processes."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from tests.fits import LIGHTNING, fit
from tests.ranks import run_processes, run_ranks
from tests.reference import Result
from tests.reference import run as run_reference
from tests.training import LAYERS, backward, batch, inner_optimizer, mlp, train_step


def grouped(fragments: int) -> list[list[str]]:
    """The layers of the model distributed over some fragments."""
    return [sum(LAYERS[index::fragments], []) for index in range(fragments)]


def named(fragments: list[list[str]]) -> list[list[str]]:
    """The fragments with names in place of patterns."""
    return [[f"{pattern[0]}.{kind}" for pattern in group for kind in ("weight", "bias")] for group in fragments]


def reference(inner: str, groups: int, steps: int, fragments: list[list[str]], **choices: Any) -> Result:
    models = [mlp() for _ in range(groups)]
    optimizers = [inner_optimizer(inner, model) for model in models]
    return run_reference(
        models, optimizers, batch, nn.functional.mse_loss, fragments=named(fragments), steps=steps, **choices
    )


def never(group: int, step: int) -> bool:
    return False


def once(group: int, step: int) -> int:
    return 1


def simulate(
    inner: str,
    groups: int,
    steps: int,
    idle: Callable[[int, int], bool] = never,
    micro_batches: Callable[[int, int], int] = once,
    **choices: Any,
) -> tuple[list[dict[str, Tensor]], list[nn.Sequential]]:
    models = [mlp(seed) for seed in range(groups)]
    optimizers = [inner_optimizer(inner, model) for model in models]
    simulated = SimulatedGroups(models, compression="fp32", **choices)
    trajectory = []
    for step in range(1, steps + 1):
        resting = [group for group in range(groups) if idle(group, step)]
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if group not in resting:
                backward(model, optimizer, group, step)
        simulated.average_gradients(idle=resting)
        for group, optimizer in enumerate(optimizers):
            if group not in resting:
                optimizer.step()
        simulated.step(trained=[micro_batches(group, step) for group in range(groups)], idle=resting)
        trajectory.append(simulated.outer_state_dict())
    simulated.finish()
    return [*trajectory, simulated.outer_state_dict()], models


EPSILON = torch.finfo(torch.float32).eps


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], outer_steps: int) -> None:
    """Compares outer parameters up to what rounding explains after so many outer steps of a fragment.

    Engine and reference write the same arithmetic in other ways: the engine multiplies by a weight where the reference
    divides by a sum, mixes by ``lerp``, and steps in place. In each outer step they round the outer gradient, the mean,
    the step and the mix, each to within half a unit in the last place of the largest value: two units together. Local
    parameters start from what landed, so these errors stay, and at worst add up.
    """
    assert sorted(actual) == sorted(expected)
    for name, values in expected.items():
        atol = (1e-6 + 2 * EPSILON * outer_steps) * float(values.abs().max())
        torch.testing.assert_close(actual[name], values, rtol=1e-6, atol=atol)


def assert_same_trajectory(
    trajectory: list[dict[str, Tensor]],
    models: list[nn.Sequential],
    expected: Result,
    choices: dict[str, Any],
) -> None:
    """Compares the outer parameters after every inner step and at the end, which the models hold too."""
    sync_every, before = choices["sync_every"], 1 + choices["warmup_steps"]
    for step, (actual, outer) in enumerate(zip(trajectory, [*expected.outers, expected.outer], strict=True), 1):
        assert_same(actual, outer, before + step // sync_every)
    for model in models:
        assert_same(dict(model.named_parameters()), expected.outer, before + len(trajectory) // sync_every)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    sync_every = draw(st.integers(1, 9))
    return {
        "sync_every": sync_every,
        "overlap_steps": draw(st.integers(0, sync_every - 1)),
        "mixing": draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
        "fragments": grouped(draw(st.integers(1, 4))),
        "outer_lr": draw(st.sampled_from([0.4, 0.7, 1.0])),
        "outer_momentum": draw(st.sampled_from([0.0, 0.9])),
        "warmup_steps": draw(st.sampled_from([0, 0, 1, 6])),
        "final_sync": draw(st.booleans()),
    }


@settings(max_examples=40, deadline=None)
@given(choices=choices(), groups=st.integers(1, 4), inner=st.sampled_from(["sgd", "adamw"]))
def test_simulated_groups_follow_the_reference(choices: dict[str, Any], groups: int, inner: str) -> None:
    expected = reference(inner, groups, steps=25, **choices)
    trajectory, models = simulate(inner, groups, steps=25, **choices)
    assert_same_trajectory(trajectory, models, expected, choices)


@settings(max_examples=40, deadline=None)
@given(
    choices=choices(),
    batches=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    warm_up=st.integers(0, 5),
    inner=st.sampled_from(["sgd", "adamw"]),
)
def test_groups_that_run_dry_and_a_schedule_follow_the_reference(
    choices: dict[str, Any], batches: list[int], warm_up: int, inner: str
) -> None:
    """Epochs of as many inner steps as the group with the most batches; the others are idle at the end of each.

    In an inner step, groups train unequal numbers of micro-batches.
    """

    def idle(group: int, step: int) -> bool:
        return (step - 1) % max(1, *batches) >= batches[group]

    def rate(number: int) -> float:
        return min(1.0, (number + 1) / (warm_up + 1))

    def micro_batches(group: int, step: int) -> int:
        return 1 + (group + step * warm_up) % 3

    base = choices.pop("outer_lr")
    counts = {"idle": idle, "micro_batches": micro_batches}
    expected = reference(inner, len(batches), 25, outer_lr=lambda number: base * rate(number), **counts, **choices)
    schedule = partial(LambdaLR, lr_lambda=rate)
    own = {**choices, "outer_lr": base, "outer_lr_schedule": schedule}
    trajectory, models = simulate(inner, len(batches), 25, **counts, **own)
    assert_same_trajectory(trajectory, models, expected, choices)


CHOICES = {
    "sync_every": 6,
    "overlap_steps": 4,
    "mixing": 0.5,
    "fragments": grouped(3),
    "outer_lr": 0.4,
    "outer_momentum": 0.9,
    "final_sync": True,
}


def plain_loop(rank: int, world_size: int, inner: str, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = mlp(seed=rank)
    optimizer = inner_optimizer(inner, model)
    engine = StreamingDiLoCo(model, compression="fp32", **CHOICES)
    for step in range(1, steps + 1):
        train_step(model, optimizer, rank, step)
        engine.step()
    engine.finish()
    return engine.outer_state_dict(), {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_real_processes_give_the_same_bits_as_the_simulation(inner: str) -> None:
    trajectory, _ = simulate(inner, 3, steps=30, **CHOICES)
    for outer, model in run_ranks(plain_loop, 3, inner, 30):
        for name, values in trajectory[-1].items():
            assert torch.equal(outer[name], values)
            assert torch.equal(model[name], values)


def fragments_of_module(fragments: list[list[str]]) -> list[list[str]]:
    return [[f"net.{pattern}" for pattern in group] for group in fragments]


@pytest.mark.parametrize(
    ("groups", "world_size", "sync_every", "overlap_steps", "mixing", "fragments"),
    [
        (2, 2, 6, 4, 0.5, 3),
        (2, 2, 1, 0, 0.0, 1),
        (2, 2, 5, 0, 0.25, 2),
        (3, 3, 4, 3, 0.5, 4),
        (2, 4, 6, 2, 0.5, 2),
        (1, 2, 4, 1, 0.5, 2),
        (1, 1, 4, 1, 0.0, 2),
    ],
)
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_a_trainer_follows_the_reference(
    groups: int, world_size: int, sync_every: int, overlap_steps: int, mixing: float, fragments: int, inner: str
) -> None:
    choices = {**CHOICES, "sync_every": sync_every, "overlap_steps": overlap_steps, "mixing": mixing}
    expected = reference(inner, groups, 30, **{**choices, "fragments": grouped(fragments)})
    own = {**choices, "fragments": fragments_of_module(grouped(fragments)), "compression": "fp32"}
    for trained in run_processes(fit, world_size, groups, 30, own, LIGHTNING, inner):
        assert_same(trained["outer"], expected.outer, 1 + 30 // sync_every)
        assert_same(trained["model"], expected.outer, 1 + 30 // sync_every)
        assert trained["report"]["landings"] == len(expected.landings)
        assert trained["report"]["inner_steps"] == 30


def test_simulated_groups_whose_optimizers_share_their_state_are_refused() -> None:
    """What `load_state_dict` is given it keeps, so that optimizers that load one state share its tensors."""
    models = [mlp() for _ in range(2)]
    optimizers = [inner_optimizer("adamw", model) for model in models]
    train_step(models[0], optimizers[0], 0, 1)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    with pytest.raises(ValueError, match="groups 0 and 1 share tensors of their state"):
        SimulatedGroups(models, [[one] for one in optimizers])
    optimizers[1].load_state_dict(deepcopy(optimizers[0].state_dict()))
    SimulatedGroups(models, [[one] for one in optimizers])
