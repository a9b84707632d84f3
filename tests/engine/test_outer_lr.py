"""The outer learning rate by rounds: the same for all fragments of a round, for any optimizer and any scheduler."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from lightning_sdiloco import Landing, OuterOptimizer, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.engine.outer import optimizer as shard_optimizer
from lightning_sdiloco.engine.outer.optimizer import OuterState, ShardOptimizer
from tests.ranks import run_ranks
from tests.training import LAYERS, inner_optimizer, mlp, train_step

Schedule = Callable[[Optimizer], LRScheduler]


def warm_up_and_cosine(optimizer: Optimizer) -> LRScheduler:
    """Up for three rounds, then down for ten."""
    parts = [LinearLR(optimizer, 0.25, total_iters=3), CosineAnnealingLR(optimizer, T_max=10)]
    return SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES: dict[str, Schedule] = {
    "cosine": partial(CosineAnnealingLR, T_max=5),
    "warm-up": partial(LinearLR, start_factor=0.1, total_iters=4),
    "both": warm_up_and_cosine,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda number: 0.5**number),
    "exponential": partial(ExponentialLR, gamma=0.8),
    "restarts": partial(CosineAnnealingWarmRestarts, T_0=3),
    "one cycle": partial(OneCycleLR, max_lr=0.7, total_steps=20),
}
ALL_SCHEDULES = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "nesterov": partial(torch.optim.SGD, lr=0.4, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.3),
    "adam with a tensor": lambda shards: torch.optim.Adam(shards, lr=torch.tensor(0.3)),
}
ALL_OPTIMIZERS = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Stepped:
    """A shard optimizer, and the outer state of its fragments."""

    def __init__(self, shards: list[torch.Tensor], make: Any, schedule: Any = None) -> None:
        self.optimizer = ShardOptimizer(shards, make, schedule)
        self.states = self.optimizer.take_initial()

    def step(self, fragment: int, gradient: torch.Tensor) -> OuterState:
        before = self.states[fragment]
        return self.optimizer.step(fragment, before, before.values, gradient)


@ALL_OPTIMIZERS
def test_a_long_shard_is_stepped_in_stretches_with_the_same_bits(
    make: Callable[[Any], Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    numel, ended = 10_003, []
    for stretch in (numel, 2048):
        monkeypatch.setattr(shard_optimizer, "_STRETCH", stretch)
        generator = torch.Generator().manual_seed(0)
        outer = Stepped([torch.randn(numel, generator=generator)], make)
        for _ in range(3):
            kept = [tensor.clone() for tensor in _tensors(outer.states[0])]
            after = outer.step(0, torch.randn(numel, generator=generator))
            assert all(map(torch.equal, kept, _tensors(outer.states[0])))
            outer.states[0] = after
        ended.append(_tensors(after))
    assert len(shard_optimizer.stretches(numel, torch.device("cpu"))) == 5
    assert all(map(torch.equal, *ended))


def _tensors(state: OuterState) -> list[torch.Tensor]:
    return [state.values, *(kept for kept in state.state.values() if isinstance(kept, torch.Tensor))]


@ALL_SCHEDULES
@ALL_OPTIMIZERS
def test_every_outer_step_is_that_of_torch_with_the_same_schedule(
    make: Callable[[Any], Optimizer], schedule: Schedule
) -> None:
    torch.manual_seed(0)
    gradients = torch.randn(9, 2, 37)
    values = torch.randn(2, 37)
    outer = Stepped([value.clone() for value in values], make, schedule)
    for fragment in range(2):
        parameter = nn.Parameter(values[fragment].clone())
        optimizer = make([parameter])
        scheduler = schedule(optimizer)
        for number in range(9):
            parameter.grad = gradients[number, fragment].clone()
            step = outer.step(fragment, gradients[number, fragment].clone())
            assert step.lr == float(optimizer.param_groups[0]["lr"])
            outer.states[fragment] = step
            optimizer.step()
            scheduler.step()
            assert torch.equal(outer.states[fragment].values, parameter.detach())
    assert [state.rounds for state in outer.states] == [9, 9]


class Scaled(torch.optim.SGD):
    """Keeps something in an attribute, and counts there."""

    def __init__(self, shards: Any, scale: float) -> None:
        super().__init__(shards, lr=1.0, momentum=0.5)
        self.scale, self.steps = scale, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad * self.scale * self.steps
        super().step()


def test_hooks_and_attributes_of_the_users_optimizer_take_part_in_every_step_and_keep_no_state() -> None:
    """torch's copies of an optimizer have neither, so it must not be copied; and checkpoints do not hold them."""
    made, hooked = [], []

    def make(shards: Any) -> Optimizer:
        made.append(Scaled(shards, scale=0.25))
        made[-1].register_step_post_hook(lambda optimizer, *given: hooked.append(optimizer))
        return made[-1]

    outer = Stepped([torch.zeros(3), torch.zeros(3)], make)
    calls, hooked[:] = len(made), []
    before = outer.states[0]
    outer.states[0] = outer.step(0, torch.ones(3))
    assert torch.equal(outer.states[0].values, torch.full((3,), -0.25))
    assert torch.equal(before.values, torch.zeros(3))
    assert before.state == {}, "a step works on copies"
    assert torch.equal(outer.step(1, torch.ones(3)).values, torch.full((3,), -0.25)), "fragments do not mix"
    assert torch.equal(outer.step(0, torch.ones(3)).values, torch.full((3,), -0.25 - 0.25 - 0.125))
    assert torch.equal(outer.states[0].state["momentum_buffer"], torch.full((3,), 0.25))
    assert {id(optimizer) for optimizer in hooked} == {id(made[-1])}
    assert len(made) == calls, "the factory is called at the start only"


def test_fragments_may_have_rates_of_their_own() -> None:
    def apart(shards: Any) -> Optimizer:
        return torch.optim.SGD([{"params": [shard], "lr": 0.1 * (i + 1)} for i, shard in enumerate(shards)], lr=1.0)

    outer = Stepped([torch.zeros(3), torch.zeros(3)], apart, partial(StepLR, step_size=1, gamma=0.5))
    rates = []
    for _ in range(3):
        outer.states = [outer.step(fragment, torch.ones(3)) for fragment in range(2)]
        rates.append([state.lr for state in outer.states])
    assert rates == [[0.1, 0.2], [0.05, 0.1], [0.025, 0.05]]


def test_a_step_that_is_not_committed_is_no_round() -> None:
    outer = Stepped([torch.zeros(3)], OPTIMIZERS["nesterov"], partial(ExponentialLR, gamma=0.5))
    assert [outer.step(0, torch.ones(3)).lr for _ in range(3)] == [0.4] * 3
    assert outer.states[0].rounds == 0


@ALL_SCHEDULES
def test_no_scheduler_complains(schedule: Schedule) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer = Stepped([torch.zeros(3)], OPTIMIZERS["nesterov"], schedule)
        for _ in range(12):
            outer.states[0] = outer.step(0, torch.ones(3))


def simulate(steps: int, **choices: Any) -> tuple[SimulatedGroups, list[Landing]]:
    models = [mlp(seed) for seed in range(2)]
    optimizers = [inner_optimizer("sgd", model) for model in models]
    groups = SimulatedGroups(models, fragments=LAYERS, compression="fp32", **{"outer_lr": 0.4, **choices})
    landings = []
    for step in range(1, steps + 1):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, group, step)
        landings += groups.step()[0]
    return groups, landings


@pytest.mark.parametrize("overlap_steps", [0, 3, 7])
def test_all_fragments_of_a_round_see_the_same_rate(overlap_steps: int) -> None:
    schedule = partial(LinearLR, start_factor=0.25, total_iters=3)
    groups, landings = simulate(
        48, sync_every=8, overlap_steps=overlap_steps, outer_optimizer=OuterOptimizer(lr_schedule=schedule)
    )
    expected = [0.1, pytest.approx(0.2), pytest.approx(0.3), 0.4, 0.4, 0.4]
    for fragment in range(4):
        rates = [landing.outer_lr for landing in landings if landing.fragment == fragment]
        assert rates == expected[: len(rates)]
        assert len(rates) >= 4
    if overlap_steps == 7:
        assert len({landing.outer_lr for landing in landings[1:8]}) == 2, "fragments of two rounds were in flight"
    groups.finish()


def test_the_final_exchange_has_no_rate() -> None:
    off = partial(LambdaLR, lr_lambda=lambda number: 0.0)
    groups, landings = simulate(11, sync_every=8, overlap_steps=1, outer_optimizer=OuterOptimizer(lr_schedule=off))
    assert [landing.outer_lr for landing in landings] == [0.0, 0.0]
    local = [dict(engine.model.named_parameters()) for engine in groups.engines]
    mean = {name: (local[0][name] + local[1][name]).detach() / 2 for name in local[0]}
    groups.finish()
    for name, values in groups.outer_state_dict().items():
        torch.testing.assert_close(values, mean[name])


# What cannot be a schedule


class Halving(StepLR):
    """Needs to be told something at every step."""

    def step(self, loss: float | None = None) -> None:  # type: ignore[override]
        if loss is None and self._step_count:
            raise TypeError("tell the loss")
        super().step()


def of_another(optimizer: Optimizer) -> LRScheduler:
    return StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 3)


def failing(optimizer: Optimizer) -> LRScheduler:
    raise KeyError("rounds")


NO_SCHEDULES: list[tuple[Any, tuple[str, ...]]] = [
    (ReduceLROnPlateau, ("made a ReduceLROnPlateau, which needs a metric",)),
    (
        partial(Halving, step_size=3),
        ("made a Halving, which cannot be stepped by the count of rounds alone: tell",),
    ),
    (lambda optimizer: 0.5, ("made a float, which is no torch.optim.lr_scheduler.LRScheduler",)),
    (of_another, ("made a StepLR, which schedules another optimizer",)),
    (CosineAnnealingLR, ("could not make a scheduler", "T_max", "functools.partial")),
    (failing, ("could not make a scheduler of the outer optimizer: 'rounds'",)),
]


@pytest.mark.parametrize(("schedule", "parts"), NO_SCHEDULES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_no_schedule_is_refused_at_the_start(schedule: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="^outer_optimizer.lr_schedule ") as caught:
        StreamingDiLoCo(mlp(), outer_optimizer=OuterOptimizer(lr_schedule=schedule))
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_a_schedule_that_ends_before_the_training_is_an_error_that_says_so() -> None:
    ending = partial(OneCycleLR, max_lr=0.7, total_steps=3)
    with pytest.raises(ValueError, match=r"no rate for round 4, counted from 0: .* as many rounds as the training has"):
        simulate(48, sync_every=8, overlap_steps=3, outer_optimizer=OuterOptimizer(lr_schedule=ending))


def refusals(schedules: list[Schedule | None]) -> list[str]:
    """The messages with which engines are refused whose schedules differ."""

    def run(rank: int, world_size: int) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the callers read all of it
            StreamingDiLoCo(mlp(), outer_lr=0.4, outer_optimizer=OuterOptimizer(lr_schedule=schedules[rank]))
        return str(caught.value)

    return list(run_ranks(run, 2))


def times(factor: float) -> Schedule:
    return lambda optimizer: LambdaLR(optimizer, lambda number: factor)


@pytest.mark.parametrize(
    ("schedules", "told"),
    [
        ([None, partial(StepLR, step_size=3)], "outer_optimizer.lr_schedule is None on rank 0"),
        (
            [partial(StepLR, step_size=3), partial(StepLR, step_size=2)],
            "outer_optimizer.lr_schedule is StepLR (0.4, 0.4, 0.4, ",
        ),
        (
            [partial(StepLR, step_size=300), partial(StepLR, step_size=301)],
            "outer_optimizer.lr_schedule is StepLR (0.4, 0.4, ",
        ),
        ([times(0.5), times(0.25)], "outer_optimizer.lr_schedule is LambdaLR (0.2, 0.2, 0.2, 0.2, ...; 1000 rounds: "),
    ],
)
def test_schedules_that_differ_between_ranks_are_refused(schedules: list[Schedule | None], told: str) -> None:
    for message in refusals(schedules):
        assert "The settings of the strategy differ between ranks: " in message
        assert told in message


def test_equal_schedules_at_different_addresses_are_no_difference() -> None:
    schedules = [times(0.5), times(0.5)]

    def run(rank: int, world_size: int) -> list[str]:
        return list(
            StreamingDiLoCo(mlp(), outer_optimizer=OuterOptimizer(lr_schedule=schedules[rank])).outer_state_dict()
        )

    assert len(set(map(tuple, run_ranks(run, 2)))) == 1


def test_the_state_of_another_schedule_is_refused() -> None:
    def engine(schedule: Schedule | None) -> StreamingDiLoCo:
        return StreamingDiLoCo(mlp(), fragments=LAYERS, outer_optimizer=OuterOptimizer(lr_schedule=schedule))

    state = engine(partial(CosineAnnealingLR, T_max=50)).state_dict()
    engine(partial(CosineAnnealingLR, T_max=50)).load_state_dict(state)
    for other in (partial(CosineAnnealingLR, T_max=60), None):
        with pytest.raises(ValueError, match="another outer_optimizer.lr_schedule: it was CosineAnnealingLR"):
            engine(other).load_state_dict(state)


def test_the_state_holds_the_rounds_of_every_fragment() -> None:
    groups, _ = simulate(
        20, sync_every=8, overlap_steps=3, outer_optimizer=OuterOptimizer(lr_schedule=SCHEDULES["both"])
    )
    state = groups.engines[0].state_dict()
    # Fragment 0 launched at 8 and 16, the others at 10, 12, 14 and 18, 20; those from 18 on are in flight.
    assert [fragment["rounds"] for fragment in state["fragments"]] == [2, 1, 1, 1]
    assert [flight["fragment"] for flight in state["flights"]] == [1, 2]
