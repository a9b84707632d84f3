"""The outer step is that of torch, for any optimizer and any schedule, with one learning rate for a round."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from lightning_sdiloco import Landing, OuterOptimizer, StreamingDiLoCo
from tests.bits import BIG, same_bits
from tests.engine.groups import Groups, outer_state
from tests.training import LAYERS

Schedule = Callable[[Optimizer], LRScheduler]


def warm_up_and_cosine(optimizer: Optimizer) -> LRScheduler:
    """Up for three rounds, then down for ten."""
    parts = [LinearLR(optimizer, 0.25, total_iters=3), CosineAnnealingLR(optimizer, T_max=10)]
    return SequentialLR(optimizer, parts, milestones=[3])


class Decaying(LRScheduler):
    """Keeps the rate, and lets another hyperparameter grow."""

    def get_lr(self) -> list[Any]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01 * self.last_epoch
        return self.base_lrs


SCHEDULES: list[Schedule | None] = [
    None,
    warm_up_and_cosine,
    lambda optimizer: LambdaLR(optimizer, lambda number: 0.5**number),
    partial(OneCycleLR, max_lr=0.7, total_steps=20),
    Decaying,
]
NESTEROV = partial(SGD, lr=0.4, momentum=0.9, nesterov=True)
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "default": NESTEROV,
    "nesterov": NESTEROV,
    "adamw": partial(torch.optim.AdamW, lr=0.3),
    "adam with a tensor": lambda shards: torch.optim.Adam(shards, lr=torch.tensor(0.3)),
}


class Stepped:
    """An engine that makes an outer step of both fragments in every inner step, on gradients of one's own."""

    def __init__(self, *values: Tensor, **choices: Any) -> None:
        self.model, self.values = nn.ParameterList([own.clone() for own in values]), list(values)
        always: dict[str, Any] = {"sync_every": 1, "overlap_steps": 0, "mixing": 0.0, "compression": "fp32"}
        self.engine = StreamingDiLoCo(self.model, fragments=[["0"], ["1"]], **always, **choices)

    @torch.no_grad()
    def step(self, *moves: Tensor) -> tuple[list[Tensor], list[Landing]]:
        """Moves the parameters; returns the outer gradients, as they are after rounding, and what landed."""
        for parameter, move in zip(self.model.parameters(), moves, strict=True):
            parameter.sub_(move)
        gradients = [old - own for old, own in zip(self.values, self.model.parameters(), strict=True)]
        landed = self.engine.step()
        self.values = [own.detach().clone() for own in self.model.parameters()]
        return gradients, landed


def drawn(numel: int, seed: int) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    # Subnormal and large ones too, and of a size that no vector of a processor divides.
    values[:5] = torch.tensor([0.0, 1e-45, -1e-39, BIG / 1e9, -BIG / 1e9])
    return values


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_outer_step_is_that_of_torch_with_the_same_schedule(name: str) -> None:
    make = OPTIMIZERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for schedule in SCHEDULES:
            # The long one is stepped in stretches.
            numels = (37, 140_003) if schedule is None else (37, 7)
            numbers: Any = {"outer_lr": 0.4, "outer_momentum": 0.9} if name == "default" else {}
            choices = {"outer_optimizer": OuterOptimizer(None if numbers else make, lr_schedule=schedule), **numbers}
            outer = Stepped(*map(drawn, numels, (0, 1)), **choices)
            parameters = [nn.Parameter(values.clone()) for values in outer.values]
            optimizers = [make([parameter]) for parameter in parameters]
            schedulers = [schedule(own) for own in optimizers] if schedule else []
            for number in range(9):
                rates = [float(own.param_groups[0]["lr"]) for own in optimizers]
                gradients, landed = outer.step(*(drawn(numel, 10 + number) for numel in numels))
                assert [landing.outer_lr for landing in landed] == rates, schedule
                for parameter, gradient, own in zip(parameters, gradients, optimizers, strict=True):
                    parameter.grad = gradient
                    own.step()
                for own in schedulers:
                    own.step()
                assert all(map(same_bits, outer.values, (own.detach() for own in parameters))), (schedule, number)


class Scaled(SGD):
    """Keeps something in an attribute, and counts there."""

    def __init__(self, shards: Any, scale: float) -> None:
        super().__init__(shards, lr=1.0, momentum=0.5)
        self.scale, self.steps = scale, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * self.scale * self.steps
        super().step()


def test_hooks_and_attributes_of_the_users_optimizer_take_part_in_every_step_and_fragments_do_not_mix() -> None:
    """torch's copies of an optimizer have neither, so it must not be copied; and checkpoints do not hold them."""
    made, hooked = [], []

    def make(shards: Any) -> Optimizer:
        made.append(Scaled(shards, scale=0.25))
        made[-1].register_step_post_hook(lambda optimizer, *given: hooked.append(optimizer))
        return made[-1]

    outer, ones = Stepped(torch.zeros(3), torch.zeros(3), outer_optimizer=make), torch.ones(3)
    calls, hooked[:] = len(made), []
    before = outer_state(outer.engine)
    for expected in (-0.25, -0.25 - 0.25 - 0.125):
        outer.step(ones, ones)
        assert [values.tolist() for values in outer.values] == [[expected] * 3] * 2
    assert [own["outer"].tolist() for own in before] == [[0.0] * 3] * 2, "a step works on copies"
    assert {id(optimizer) for optimizer in hooked} == {id(made[-1])}
    assert len(made) == calls, "the factory is called at the start only"


def test_fragments_may_have_rates_of_their_own() -> None:
    def apart(shards: Any) -> Optimizer:
        return SGD([{"params": [shard], "lr": 0.1 * (i + 1)} for i, shard in enumerate(shards)], lr=1.0)

    schedule = partial(StepLR, step_size=1, gamma=0.5)
    outer = Stepped(torch.zeros(3), torch.zeros(3), outer_optimizer=OuterOptimizer(apart, lr_schedule=schedule))
    rates = [[landing.outer_lr for landing in outer.step(torch.ones(3), torch.ones(3))[1]] for _ in range(3)]
    assert rates == [[0.1, 0.2], [0.05, 0.1], [0.025, 0.05]]


def test_all_fragments_of_a_round_see_the_same_rate() -> None:
    def run(schedule: Schedule, overlap_steps: int) -> Groups:
        choices = {"fragments": LAYERS, "compression": "fp32", "outer_lr": 0.4, "sync_every": 8}
        own = OuterOptimizer(lr_schedule=schedule)
        return Groups(2, "sgd", **choices, overlap_steps=overlap_steps, outer_optimizer=own)

    expected = [0.1, pytest.approx(0.2), pytest.approx(0.3), 0.4, 0.4, 0.4]
    for overlap_steps in (0, 7):
        trained = run(partial(LinearLR, start_factor=0.25, total_iters=3), overlap_steps)
        trained.until(48)
        for fragment in range(4):
            rates = [landing.outer_lr for landing in trained.landings if landing.fragment == fragment]
            assert rates == expected[: len(rates)]
            assert len(rates) >= 4
    assert len({landing.outer_lr for landing in trained.landings[1:8]}) == 2, "fragments of two rounds were in flight"
    # One that ends before the training.
    with pytest.raises(ValueError, match=r"no rate for round 4, counted from 0: .* as many rounds as the training has"):
        run(partial(OneCycleLR, max_lr=0.7, total_steps=3), 3).until(48)
