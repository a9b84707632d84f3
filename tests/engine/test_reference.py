"""Algorithm 2 in plain loops against answers that are known without it; the engine against those
loops and torch.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from lightning_sdiloco import (
    Carry,
    DenseBeginning,
    Landing,
    OuterOptimizer,
    StreamingDiLoCo,
    WorkerGroups,
)
from tests.bits import BIG, same_bits
from tests.engine.groups import MEAN, Groups, Values, copied, grouped, outer_state, unlike
from tests.ranks import run_ranks
from tests.reference import Result, run
from tests.training import LAYERS, batch, inner_optimizer, mlp, train_step


def by_loops(
    inner: str, groups: int, steps: int, fragments: list[list[str]], **choices: Any
) -> Result:
    """Trains the small model by the plain loops."""
    models = [mlp() for _ in range(groups)]
    optimizers = [inner_optimizer(inner, model) for model in models]
    names = [
        [f"{pattern[0]}.{kind}" for pattern in group for kind in ("weight", "bias")]
        for group in fragments
    ]
    return run(
        models, optimizers, batch, nn.functional.mse_loss, fragments=names, steps=steps, **choices
    )


def assert_same(actual: Values, expected: Values, outer_steps: int) -> None:
    """Compares up to what rounding explains: in each outer step of a fragment two units in the last
    place.

    Engine and loops write the same arithmetic in other ways, and round the outer gradient, mean,
    step and mix.
    """
    assert sorted(actual) == sorted(expected)
    for name, values in expected.items():
        atol = (1e-6 + 2 * torch.finfo(torch.float32).eps * outer_steps) * float(
            values.detach().abs().max()
        )
        torch.testing.assert_close(actual[name], values, rtol=1e-6, atol=atol)


# Answers that are known, for the loops

PLAIN: dict[str, Any] = {**MEAN, "overlap_steps": 0}


def alone(inner: str, group: int, steps: int) -> list[Values]:
    """The parameters after every step of training without any exchange."""
    model = mlp()
    seen = []
    optimizer = inner_optimizer(inner, model)
    for step in range(1, steps + 1):
        train_step(model, optimizer, group, step)
        seen.append(copied(model.named_parameters()))
    return seen


def test_exchanging_every_step_is_data_parallel_sgd_and_never_independent_training() -> None:
    for groups in (1, 3):
        loops = by_loops("sgd", groups, 6, grouped(2), sync_every=1, **PLAIN)
        model = mlp()
        optimizer = inner_optimizer("sgd", model)
        for step in range(1, 7):
            losses = [
                nn.functional.mse_loss(model(x), y)
                for x, y in (batch(m, step) for m in range(groups))
            ]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            for seen in (loops.outers[step - 1], *loops.locals[step - 1]):
                torch.testing.assert_close(
                    seen, copied(model.named_parameters()), rtol=0, atol=1e-6
                )
    keeping = {
        "sync_every": 4,
        "overlap_steps": 1,
        "mixing": 1.0,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
    }
    for inner in ("sgd", "adamw"):
        loops = by_loops(inner, 2, 12, grouped(2), **keeping)
        for group in range(2):
            pairs = zip(loops.locals, alone(inner, group, 12), strict=True)
            assert [unlike(one[group], own) for one, own in pairs] == [[]] * 12
        loops = by_loops(inner, 1, 11, grouped(4), sync_every=4, **PLAIN)
        torch.testing.assert_close(
            [own for (own,) in loops.locals], alone(inner, 0, 11), rtol=1e-5, atol=1e-6
        )


class Slope(nn.Module):
    """One weight w, and w * x, so that x is the gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(10.0, dtype=dtype))

    def forward(self, x: float) -> Tensor:
        return self.w * x


def slopes(steps: int, dtype: torch.dtype = torch.float32, **choices: Any) -> Result:
    """M = 2, P = 1, H = 2, tau = 1, alpha = 0.5, outer lr 0.5, momentum 0.5; the groups walk by -1
    and -3 per step.
    """
    models = [Slope(dtype), Slope(dtype)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    numbers = {
        "sync_every": 2,
        "overlap_steps": 1,
        "mixing": 0.5,
        "outer_lr": 0.5,
        "outer_momentum": 0.5,
        **choices,
    }
    walk = lambda group, step: (1.0 + 2.0 * group, None)  # noqa: E731
    result = run(
        models, optimizers, walk, lambda y, _: y, fragments=[["w"]], steps=steps, **numbers
    )
    assert all(model.w.item() == result.outer["w"].to(dtype).item() for model in models)
    return result


# Worked out by hand; every number is a dyadic fraction, hence exact in float32.
#
# t  inner step         what else                                                              outer
#     local 1  9, 7               nothing
#     10        9, 7 2  8, 4               launch 10 - (8, 4) = (2, 6)
#              10        8, 4 3  7, 1               land: mean 4; buf 4; d = 4 + 0.5 * 4 = 6; outer
# 10 - 0.5 * 6 = 7;      7         7, 4
#                       local (7 + 7) / 2, (1 + 7) / 2
# 4  6, 1               launch 7 - (6, 1) = (1, 6)                                             7
#     6, 1 5  5, -2              land: mean 3.5; buf 0.5 * 4 + 3.5 = 5.5; d = 3.5 + 0.5 * 5.5 =
# 6.25;   3.875     4.4375, 0.9375
#                       outer 7 - 3.125 = 3.875; local (5 + 3.875) / 2, (-2 + 3.875) / 2
# 6  3.4375, -2.0625    launch 3.875 - (3.4375, -2.0625) = (0.4375, 5.9375)                    3.875
#     as left end                   land: mean 3.1875; buf 0.5 * 5.5 + 3.1875 = 5.9375;
#                       d = 3.1875 + 0.5 * 5.9375 = 6.15625; outer 3.875 - 3.078125
# 0.796875
#                       local (3.4375 + 0.796875) / 2, (-2.0625 + 0.796875) / 2
# 2.1171875, -0.6328125 then                  mean of the local parameters
#                 0.7421875
OUTER_BY_HAND = [10.0, 10.0, 7.0, 7.0, 3.875, 3.875]
LOCAL_BY_HAND = [
    [9.0, 7.0],
    [8.0, 4.0],
    [7.0, 4.0],
    [6.0, 1.0],
    [4.4375, 0.9375],
    [3.4375, -2.0625],
]


def test_an_example_worked_out_by_hand() -> None:
    result = slopes(6)
    assert [outer["w"].item() for outer in result.outers] == OUTER_BY_HAND
    assert [[group["w"].item() for group in groups] for groups in result.locals] == LOCAL_BY_HAND
    assert result.launches == [(2, 0), (4, 0), (6, 0)]
    assert result.landings == [(3, 0), (5, 0), (6, 0)]
    assert result.outer["w"].item() == 0.7421875
    # The last mean ignores learning rate and momentum: after step 5 nothing is in flight, after 1
    # nothing was.
    assert slopes(5).outer["w"].item() == 2.6875
    assert slopes(1).outer["w"].item() == 8.0
    # Outer parameters are float32 whatever the model: deltas are 1 and 3, and bfloat16 has no 10 -
    # 0.3 * 2.
    result = slopes(1, torch.bfloat16, **{**PLAIN, "sync_every": 1, "outer_lr": 0.3})
    assert result.outers[0]["w"].item() == pytest.approx(9.4, abs=1e-6)
    assert [own["w"].item() for own in result.locals[0]] == [9.375] * 2
    # Of more fragments than steps the last two land at the end, one step early.
    result = by_loops("sgd", 2, 5, grouped(4), sync_every=2, **{**PLAIN, "overlap_steps": 1})
    assert result.launches == [(2, 0), (2, 1), (3, 2), (3, 3), (4, 0), (4, 1), (5, 2), (5, 3)]
    assert result.landings == [(3, 0), (3, 1), (4, 2), (4, 3), (5, 0), (5, 1), (5, 2), (5, 3)]


# The engine, bit for bit where all sums are exact


class Walk(nn.Module):
    """Walks by small whole numbers: x is the gradient. With dyadic settings no operation rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.arange(float(size)) for size in (5, 3, 7)])

    def forward(self, x: list[Tensor]) -> Tensor:
        return torch.stack(
            [(part * own).sum() for part, own in zip(self.parts, x, strict=True)]
        ).sum()

    @staticmethod
    def batch(group: int, step: int) -> tuple[list[Tensor], None]:
        generator = torch.Generator().manual_seed(100 * group + step)
        return [
            torch.randint(-1, 2, (size,), generator=generator).float() for size in (5, 3, 7)
        ], None


MICRO_BATCHES = {
    1: [1],
    2: [1, 3],
    4: [1, 1, 2, 4],
}  # their sums are powers of two, without the last one too
STREAMING: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "mixing": 0.5,
    "outer_lr": 0.5,
    "outer_momentum": 0.5,
}
HALVES = OuterOptimizer(lr_schedule=partial(LambdaLR, lr_lambda=lambda number: 0.5**number))
# Fragments, what both are told, and what the loops and the engine are told for themselves.
EXACT: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "in every step": (1, {**PLAIN, "sync_every": 1}, {}, {}),
    "diloco": (1, {**STREAMING, "mixing": 0.0, "overlap_steps": 0}, {}, {}),
    "streaming": (3, STREAMING, {}, {}),
    "two in flight": (
        2,
        {**STREAMING, "sync_every": 5, "overlap_steps": 4, "mixing": 0.25},
        {},
        {},
    ),
    "independent": (2, {**STREAMING, "mixing": 1.0}, {}, {}),
    "carry": (3, STREAMING, {"carries": True}, {"mixing": Carry()}),
    "dense": (2, STREAMING, {"dense": (2, 2, 1)}, {"dense_beginning": DenseBeginning(2, 2)}),
    "dense, with a rate that halves": (
        3,
        {**STREAMING, "sync_every": 6},
        {"dense": (2, 3, 2), "outer_lr": lambda number: 0.5 ** (1 + number)},
        {"dense_beginning": DenseBeginning(2, 3, 2), "outer_optimizer": HALVES},
    ),
    "a rate that halves": (
        3,
        STREAMING,
        {"outer_lr": lambda number: 0.5 ** (1 + number)},
        {"outer_optimizer": HALVES},
    ),
    "idle": (1, STREAMING, {}, {}),
}


def differences(rank: int, world_size: int) -> dict[str, Any]:
    """Plays all cases with each number of groups, and returns where this rank is not at the bits
    of the loops.
    """
    wrong: dict[str, Any] = {}
    for groups in (4, 2, 1):
        joined = WorkerGroups(groups)

        def idle(group: int, step: int, groups: int = groups) -> bool:
            """In the second round the last group does not train, in the third one nobody."""
            return 4 < step <= 8 and group == groups - 1 > 0 or 8 < step <= 12

        counts = {
            "idle": idle,
            "micro_batches": lambda group, step, groups=groups: MICRO_BATCHES[groups][group],
        }
        for case, (fragments, both, loops, own) in EXACT.items():
            cut = [
                [f"parts.{part}" for part in range(index, 3, fragments)]
                for index in range(fragments)
            ]
            choices = {**both, **(counts if case == "idle" else {}), "fragments": cut}
            models: list[nn.Module] = [Walk() for _ in range(groups)]
            optimizers = [inner_optimizer("whole", model) for model in models]
            expected = run(
                models, optimizers, Walk.batch, lambda y, _: y, **{"steps": 14, **choices, **loops}
            )
            choices |= {"compression": "fp32", **own, "net": lambda _: Walk(), "joined": joined}
            here = Groups(
                inner="whole",
                loss=lambda model, *place: model(Walk.batch(*place[:2])[0]),
                **choices,
            )
            (model,), (engine,) = here.models, here.engines
            for local, outer in zip(expected.locals, expected.outers, strict=True):
                here.step()
                off = unlike(copied(model.named_parameters()), local[joined.group_index])
                if off or unlike(engine.outer_state_dict(), outer):
                    wrong.setdefault(f"{groups} groups, {case}", (here.steps, off))
            engine.finish()
            off = unlike(copied(model.named_parameters()), expected.outer)
            if off:
                wrong[f"{groups} groups, {case}: at the end"] = off
            if engine.report()["landings"] != len(expected.landings):
                wrong[f"{groups} groups, {case}: landings"] = engine.report()["landings"]
    return wrong


def test_real_ranks_match_the_plain_loops_bit_for_bit() -> None:
    """Ranks of a group of several own a shard each, of fragments whose sizes are odd."""
    assert run_ranks(differences, 4) == [{}] * 4


# The engine, up to rounding in numbers as they come


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    batches=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    warm_up=st.integers(0, 5),
)
def test_groups_that_run_dry_and_a_schedule_follow_the_loops(
    data: Any, batches: list[int], warm_up: int
) -> None:
    """Epochs of as many inner steps as the group with the most batches; groups train unequal
    micro-batches.
    """
    sync_every = data.draw(st.integers(1, 9))
    base = data.draw(st.sampled_from([0.4, 0.7, 1.0]))
    dense = dense_beginning = None
    if sync_every > 1 and data.draw(st.booleans()):
        dense_every = data.draw(st.integers(1, sync_every // 2))
        dense = (
            data.draw(st.integers(1, 4)),
            dense_every,
            data.draw(st.integers(0, dense_every - 1)),
        )
        dense_beginning = DenseBeginning(*dense)
    choices = {
        "sync_every": sync_every,
        "overlap_steps": data.draw(st.integers(0, sync_every - 1)),
        "mixing": data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
        "fragments": grouped(data.draw(st.integers(1, 4))),
        "outer_momentum": data.draw(st.sampled_from([0.0, 0.9])),
        "idle": lambda group, step: (step - 1) % max(1, *batches) >= batches[group],
        "micro_batches": lambda group, step: 1 + (group + step * warm_up) % 3,
    }
    rate = lambda number: min(1.0, (number + 1) / (warm_up + 1))  # noqa: E731
    schedule = OuterOptimizer(
        lr_schedule=partial(LambdaLR, lr_lambda=rate), direction="elementwise"
    )
    loops = {**choices, "outer_lr": lambda number: base * rate(number), "dense": dense}
    own = {**choices, "outer_lr": base, "outer_optimizer": schedule, "compression": "fp32"}
    own["dense_beginning"] = dense_beginning
    inner = data.draw(st.sampled_from(["sgd", "adamw"]))
    expected = by_loops(inner, len(batches), 25, **loops)
    trained = Groups(len(batches), inner, **own)
    most = 1 + (dense[0] if dense else 0) + 25 // sync_every
    for outer in expected.outers:
        trained.step()
        assert_same(trained.groups.outer_state_dict(), outer, most)
    trained.groups.finish()
    for values in (
        trained.groups.outer_state_dict(),
        *(dict(model.named_parameters()) for model in trained.models),
    ):
        assert_same(values, expected.outer, most)


# The outer step, for any optimizer and any schedule


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


SCHEDULES = [
    None,
    warm_up_and_cosine,
    HALVES.lr_schedule,
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
    """An engine that makes an outer step of both fragments in every inner step, on gradients of
    one's own.
    """

    def __init__(self, *values: Tensor, **choices: Any) -> None:
        self.model = nn.ParameterList([own.clone() for own in values])
        self.values = list(values)
        always: dict[str, Any] = {
            "sync_every": 1,
            "overlap_steps": 0,
            "mixing": 0.0,
            "compression": "fp32",
        }
        self.engine = StreamingDiLoCo(self.model, fragments=[["0"], ["1"]], **always, **choices)

    @torch.no_grad()
    def step(self, *moves: Tensor) -> tuple[list[Tensor], list[Landing]]:
        """Moves the parameters; returns the outer gradients, as they are after rounding, and what
        landed.
        """
        for parameter, move in zip(self.model.parameters(), moves, strict=True):
            parameter.sub_(move)
        gradients = [
            old - own for old, own in zip(self.values, self.model.parameters(), strict=True)
        ]
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
            choices = {
                "outer_optimizer": OuterOptimizer(None if numbers else make, lr_schedule=schedule),
                **numbers,
            }
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
                assert all(map(same_bits, outer.values, (own.detach() for own in parameters))), (
                    schedule,
                    number,
                )


class Scaled(SGD):
    """Keeps something in an attribute, and counts there."""

    def __init__(self, shards: Any, scale: float) -> None:
        super().__init__(shards, lr=1.0, momentum=0.5)
        self.scale = scale
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * self.scale * self.steps
        super().step()


def test_hooks_and_attributes_of_the_users_optimizer_act_within_each_fragment() -> None:
    """torch's copies of an optimizer have neither, so it must not be copied; and checkpoints do
    not hold them.
    """
    made = []
    hooked = []

    def make(shards: Any) -> Optimizer:
        made.append(Scaled(shards, scale=0.25))
        made[-1].register_step_post_hook(lambda optimizer, *given: hooked.append(optimizer))
        return made[-1]

    outer = Stepped(torch.zeros(3), torch.zeros(3), outer_optimizer=make)
    ones = torch.ones(3)
    calls, hooked[:] = len(made), []
    before = outer_state(outer.engine)
    for expected in (-0.25, -0.25 - 0.25 - 0.125):
        outer.step(ones, ones)
        assert [values.tolist() for values in outer.values] == [[expected] * 3] * 2
    assert [own["outer"].tolist() for own in before] == [[0.0] * 3] * 2, "a step works on copies"
    assert {id(optimizer) for optimizer in hooked} == {id(made[-1])}
    assert len(made) == calls, "the factory is called at the start only"


def test_fragments_may_have_their_own_rates_and_too_short_a_schedule_is_refused() -> None:
    def apart(shards: Any) -> Optimizer:
        return SGD(
            [{"params": [shard], "lr": 0.1 * (i + 1)} for i, shard in enumerate(shards)], lr=1.0
        )

    halving = OuterOptimizer(apart, lr_schedule=HALVES.lr_schedule)
    outer = Stepped(torch.zeros(3), torch.zeros(3), outer_optimizer=halving)
    rates = [
        [landing.outer_lr for landing in outer.step(torch.ones(3), torch.ones(3))[1]]
        for _ in range(3)
    ]
    assert rates == [[0.1, 0.2], [0.05, 0.1], [0.025, 0.05]]
    ended = OuterOptimizer(lr_schedule=partial(OneCycleLR, max_lr=0.7, total_steps=3))
    with pytest.raises(
        ValueError, match=r"no rate for round 4, counted from 0: .* as many rounds as you train"
    ):
        Groups(
            inner="sgd", sync_every=8, fragments=LAYERS, overlap_steps=3, outer_optimizer=ended
        ).until(48)
