"""Algorithm 2 in plain loops against answers that are known without it; the engine against those
loops and torch.
"""

from functools import partial
from typing import Any, NamedTuple

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
    names = []
    for patterns in fragments:
        layers = [pattern[0] for pattern in patterns]
        names.append([f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")])
    choices |= {"fragments": names, "steps": steps}
    return run(models, optimizers, batch, nn.functional.mse_loss, **choices)


def assert_same(actual: Values, expected: Values, outer_steps: int) -> None:
    """Compares up to what rounding explains: in each outer step of a fragment two units in the last
    place.

    Engine and loops write the same arithmetic in different ways, and round the outer gradient,
    mean, step and mix.
    """
    assert sorted(actual) == sorted(expected)
    relative = 1e-6 + 2 * torch.finfo(torch.float32).eps * outer_steps
    for name, values in expected.items():
        largest = float(values.detach().abs().max())
        torch.testing.assert_close(actual[name], values, rtol=1e-6, atol=relative * largest)


Choices = dict[str, Any]

# Answers that are known, for the loops

PLAIN = {**MEAN, "overlap_steps": 0}


def alone(inner: str, group: int, steps: int) -> list[Values]:
    """The parameters after every step of training without any exchange."""
    model = mlp()
    trajectory = []
    optimizer = inner_optimizer(inner, model)
    for step in range(1, steps + 1):
        train_step(model, optimizer, group, step)
        trajectory.append(copied(model.named_parameters()))
    return trajectory


def data_parallel(groups: int, steps: int) -> list[Values]:
    """The parameters after every step of SGD on the mean loss of all groups."""
    model = mlp()
    optimizer = inner_optimizer("sgd", model)
    trajectory = []
    for step in range(1, steps + 1):
        batches = [batch(group, step) for group in range(groups)]
        losses = [nn.functional.mse_loss(model(x), y) for x, y in batches]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        trajectory.append(copied(model.named_parameters()))
    return trajectory


def test_exchanging_every_step_is_data_parallel_sgd_and_never_independent_training() -> None:
    for groups in (1, 3):
        loops = by_loops("sgd", groups, 6, grouped(2), sync_every=1, **PLAIN)
        expected = data_parallel(groups, 6)
        assert_near(loops.outers, expected, rtol=0)
        for group in range(groups):
            assert_near([values[group] for values in loops.locals], expected, rtol=0)
    keeping = {"sync_every": 4, "overlap_steps": 1, "mixing": 1.0}
    for inner in ("sgd", "adamw"):
        loops = by_loops(inner, 2, 12, grouped(2), outer_lr=0.7, outer_momentum=0.9, **keeping)
        for group in range(2):
            expected = alone(inner, group, 12)
            for values, expected_values in zip(loops.locals, expected, strict=True):
                assert unlike(values[group], expected_values) == []
        loops = by_loops(inner, 1, 11, grouped(4), sync_every=4, **PLAIN)
        assert_near([values for (values,) in loops.locals], alone(inner, 0, 11), rtol=1e-5)


def assert_near(actual: list[Values], expected: list[Values], rtol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6)


class Slope(nn.Module):
    """One weight w, and w * x, so that x is the gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(10.0, dtype=dtype))

    def forward(self, x: float) -> Tensor:
        return self.w * x


STREAMING = {
    "sync_every": 4,
    "overlap_steps": 2,
    "mixing": 0.5,
    "outer_lr": 0.5,
    "outer_momentum": 0.5,
}


def walk(group: int, step: int) -> tuple[float, None]:
    return 1.0 + 2.0 * group, None


def first_argument(output: Any, target: None) -> Any:
    return output


def slopes(steps: int, dtype: torch.dtype = torch.float32, **choices: Any) -> Result:
    """M = 2, P = 1, H = 2, tau = 1, alpha = 0.5, outer lr 0.5, momentum 0.5; the groups walk by -1
    and -3 per step.
    """
    models = [Slope(dtype), Slope(dtype)]
    optimizers = [SGD(model.parameters(), lr=1.0) for model in models]
    choices = {**STREAMING, "sync_every": 2, "overlap_steps": 1, **choices}
    trajectory = run(
        models, optimizers, walk, first_argument, fragments=[["w"]], steps=steps, **choices
    )
    final = trajectory.outer["w"].to(dtype).item()
    assert all(model.w.item() == final for model in models)
    return trajectory


# Worked out by hand; every number is a dyadic fraction, hence exact in float32.
#
# t    local            what else                                                        outer
# 1    9, 7             nothing                                                          10
# 2    8, 4             launch 10 - (8, 4) = (2, 6)                                      10
# 3    7, 1             land: mean 4; buffer 4; d = 4 + 0.5 * 4 = 6
#                       outer 10 - 0.5 * 6; local (7 + 7) / 2, (1 + 7) / 2               7
#      7, 4
# 4    6, 1             launch 7 - (6, 1) = (1, 6)                                       7
# 5    5, -2            land: mean 3.5; buffer 0.5 * 4 + 3.5 = 5.5
#                       d = 3.5 + 0.5 * 5.5 = 6.25; outer 7 - 3.125
#                       local (5 + 3.875) / 2, (-2 + 3.875) / 2                          3.875
#      4.4375, 0.9375
# 6    3.4375, -2.0625  launch 3.875 - (3.4375, -2.0625) = (0.4375, 5.9375)              3.875
# end                   land: mean 3.1875; buffer 0.5 * 5.5 + 3.1875 = 5.9375
#                       d = 3.1875 + 0.5 * 5.9375 = 6.15625; outer 3.875 - 3.078125
#                       local (3.4375 + 0.796875) / 2, (-2.0625 + 0.796875) / 2          0.796875
#      2.1171875, -0.6328125
# last mean             of the local parameters                                          0.7421875
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
    trajectory = slopes(6)
    assert [outer["w"].item() for outer in trajectory.outers] == OUTER_BY_HAND
    local = [[values["w"].item() for values in groups] for groups in trajectory.locals]
    assert local == LOCAL_BY_HAND
    assert trajectory.launches == [(2, 0), (4, 0), (6, 0)]
    assert trajectory.landings == [(3, 0), (5, 0), (6, 0)]
    assert trajectory.outer["w"].item() == 0.7421875
    # The last mean ignores learning rate and momentum: after step 5 nothing is in flight, after 1
    # nothing was.
    assert slopes(5).outer["w"].item() == 2.6875
    assert slopes(1).outer["w"].item() == 8.0


def test_outer_parameters_of_the_loops_are_float32_whatever_the_model() -> None:
    """Deltas are 1 and 3, and bfloat16 has no 10 - 0.3 * 2."""
    trajectory = slopes(1, torch.bfloat16, **{**PLAIN, "sync_every": 1, "outer_lr": 0.3})
    assert trajectory.outers[0]["w"].item() == pytest.approx(9.4, abs=1e-6)
    assert [values["w"].item() for values in trajectory.locals[0]] == [9.375] * 2


def test_the_last_two_of_more_fragments_than_steps_land_at_the_end() -> None:
    choices = {**PLAIN, "overlap_steps": 1}
    trajectory = by_loops("sgd", 2, 5, grouped(4), sync_every=2, **choices)
    launches = [(2, 0), (2, 1), (3, 2), (3, 3), (4, 0), (4, 1), (5, 2), (5, 3)]
    assert trajectory.launches == launches
    assert trajectory.landings[:6] == [(step + 1, fragment) for step, fragment in launches[:6]]
    assert trajectory.landings[6:] == [(5, 2), (5, 3)], "one step early"


# The engine, bit for bit where all sums are exact


SIZES = (5, 3, 7)


class Walk(nn.Module):
    """Walks by small whole numbers: x is the gradient. With dyadic settings no operation rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.arange(float(size)) for size in SIZES])

    def forward(self, x: list[Tensor]) -> Tensor:
        products = [(part * step).sum() for part, step in zip(self.parts, x, strict=True)]
        return torch.stack(products).sum()


def whole_steps(group: int, step: int) -> tuple[list[Tensor], None]:
    generator = torch.Generator().manual_seed(100 * group + step)
    steps = [torch.randint(-1, 2, (size,), generator=generator) for size in SIZES]
    return [values.float() for values in steps], None


def walked(model: nn.Module, group: int, step: int, place: int, size: int) -> Tensor:
    """The loss of a rank, which is that of its whole group."""
    x, _ = whole_steps(group, step)
    return model(x)


# By the number of groups. The sums are powers of two, also without the last group.
MICRO_BATCHES = {1: [1], 2: [1, 3], 4: [1, 1, 2, 4]}
HALVES = OuterOptimizer(lr_schedule=partial(LambdaLR, lr_lambda=lambda number: 0.5**number))


def halved(number: int) -> float:
    return 0.5 ** (1 + number)


CUTS = {
    1: [["parts.0", "parts.1", "parts.2"]],
    2: [["parts.0", "parts.2"], ["parts.1"]],
    3: [["parts.0"], ["parts.1"], ["parts.2"]],
}


class Exact(NamedTuple):
    """A case without rounding: settings of both, and those that loops and engine call otherwise."""

    fragments: int
    settings: Choices
    loops: Choices = {}
    engine: Choices = {}


DENSE = DenseBeginning(2, 3, 2)
EXACT = {
    "in every step": Exact(1, {**PLAIN, "sync_every": 1}),
    "diloco": Exact(1, {**STREAMING, "mixing": 0.0, "overlap_steps": 0}),
    "streaming": Exact(3, STREAMING),
    "two in flight": Exact(2, {**STREAMING, "sync_every": 5, "overlap_steps": 4, "mixing": 0.25}),
    "independent": Exact(2, {**STREAMING, "mixing": 1.0}),
    "carry": Exact(3, STREAMING, {"carries": True}, {"mixing": Carry()}),
    "dense": Exact(2, STREAMING, {"dense": (2, 2, 1)}, {"dense_beginning": DenseBeginning(2, 2)}),
    "dense, with a rate that halves": Exact(
        3,
        {**STREAMING, "sync_every": 6},
        {"dense": (2, 3, 2), "outer_lr": halved},
        {"dense_beginning": DENSE, "outer_optimizer": HALVES},
    ),
    "a rate that halves": Exact(3, STREAMING, {"outer_lr": halved}, {"outer_optimizer": HALVES}),
    "idle": Exact(1, STREAMING),
}


def rests(groups: int) -> Choices:
    """In the second round the last group does not train, in the third one no group does."""

    def idle(group: int, step: int) -> bool:
        last_rests = group == groups - 1 > 0 and 4 < step <= 8
        return last_rests or 8 < step <= 12

    return {"idle": idle, "micro_batches": lambda group, step: MICRO_BATCHES[groups][group]}


def assert_like_loops(name: str, joined: WorkerGroups, groups: int) -> None:
    """Plays a case by the loops and in this rank."""
    case = EXACT[name]
    choices = {**case.settings, "fragments": CUTS[case.fragments]}
    if name == "idle":
        choices |= rests(groups)
    expected = walk_by_loops(groups, {**choices, **case.loops})
    of_engine = {"compression": "fp32", **choices, **case.engine, "joined": joined}
    trained = Groups(inner="whole", net=lambda seed: Walk(), loss=walked, **of_engine)
    (engine,) = trained.engines
    for local, outer in zip(expected.locals, expected.outers, strict=True):
        trained.step()
        assert_values(trained, local[joined.group_index], name)
        assert unlike(engine.outer_state_dict(), outer) == [], name
    engine.finish()
    assert_values(trained, expected.outer, name)
    assert engine.report()["landings"] == len(expected.landings)


def walk_by_loops(groups: int, choices: Choices) -> Result:
    models = [Walk() for _ in range(groups)]
    optimizers = [inner_optimizer("whole", model) for model in models]
    return run(models, optimizers, whole_steps, first_argument, steps=14, **choices)


def assert_values(trained: Groups, expected: Values, name: str) -> None:
    place = f"{name} after step {trained.steps}"
    assert unlike(copied(trained.models[0].named_parameters()), expected) == [], place


def test_real_ranks_match_the_plain_loops_bit_for_bit() -> None:
    """Ranks of a group of several own a shard each, of fragments whose sizes are odd."""

    def play(rank: int, world_size: int) -> None:
        for groups in (4, 2, 1):
            joined = WorkerGroups(groups)
            for name in EXACT:
                assert_like_loops(name, joined, groups)

    run_ranks(play, 4)


# The engine, up to rounding in numbers as they come


def drawn_choices(draw: Any) -> Choices:
    sync_every = draw(st.integers(1, 9))
    return {
        "sync_every": sync_every,
        "overlap_steps": draw(st.integers(0, sync_every - 1)),
        "mixing": draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
        "fragments": grouped(draw(st.integers(1, 4))),
        "outer_momentum": draw(st.sampled_from([0.0, 0.9])),
    }


def unequal_data(batches: list[int], warm_up: int) -> Choices:
    """Epochs of as many inner steps as the group with the most batches; groups train unequal
    micro-batches.
    """
    steps = max(1, *batches)
    return {
        "idle": lambda group, step: (step - 1) % steps >= batches[group],
        "micro_batches": lambda group, step: 1 + (group + step * warm_up) % 3,
    }


def drawn_dense(draw: Any, sync_every: int) -> tuple[int, int, int] | None:
    """Rounds of a dense beginning, and their H and tau."""
    if sync_every == 1 or not draw(st.booleans()):
        return None
    dense_every = draw(st.integers(1, sync_every // 2))
    return draw(st.integers(1, 4)), dense_every, draw(st.integers(0, dense_every - 1))


@settings(max_examples=25, deadline=None)
@given(
    draws=st.data(),
    batches=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    warm_up=st.integers(0, 5),
    base_lr=st.sampled_from([0.4, 0.7, 1.0]),
    inner=st.sampled_from(["sgd", "adamw"]),
)
def test_groups_that_run_dry_and_a_schedule_follow_the_loops(
    draws: Any, batches: list[int], warm_up: int, base_lr: float, inner: str
) -> None:
    def factor(number: int) -> float:
        return min(1.0, (number + 1) / (warm_up + 1))

    choices = {**drawn_choices(draws.draw), **unequal_data(batches, warm_up)}
    dense = drawn_dense(draws.draw, choices["sync_every"])
    of_loops = {"outer_lr": lambda number: base_lr * factor(number), "dense": dense}
    expected = by_loops(inner, len(batches), 25, **choices, **of_loops)
    schedule = OuterOptimizer(
        lr_schedule=partial(LambdaLR, lr_lambda=factor), direction="elementwise"
    )
    trained = Groups(
        len(batches),
        inner,
        outer_lr=base_lr,
        outer_optimizer=schedule,
        compression="fp32",
        dense_beginning=DenseBeginning(*dense) if dense else None,
        **choices,
    )
    most_steps = 1 + (dense[0] if dense else 0) + 25 // choices["sync_every"]
    for outer in expected.outers:
        trained.step()
        assert_same(trained.groups.outer_state_dict(), outer, most_steps)
    trained.groups.finish()
    assert_same(trained.groups.outer_state_dict(), expected.outer, most_steps)
    for model in trained.models:
        assert_same(dict(model.named_parameters()), expected.outer, most_steps)


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
OPTIMIZERS = {
    "default": NESTEROV,
    "nesterov": NESTEROV,
    "adamw": partial(torch.optim.AdamW, lr=0.3),
    "adam with a tensor": lambda shards: torch.optim.Adam(shards, lr=torch.tensor(0.3)),
}


class Stepped:
    """An engine that applies an outer step to both fragments in every inner step, on gradients
    that a test chooses.
    """

    def __init__(self, *values: Tensor, **choices: Any) -> None:
        self.model = nn.ParameterList([shard.clone() for shard in values])
        self.values = list(values)
        self.engine = StreamingDiLoCo(
            self.model,
            fragments=[["0"], ["1"]],
            sync_every=1,
            overlap_steps=0,
            mixing=0.0,
            compression="fp32",
            **choices,
        )

    @torch.no_grad()
    def step(self, *moves: Tensor) -> tuple[list[Tensor], list[Landing]]:
        """Moves the parameters; returns the outer gradients after rounding, and the landings."""
        for parameter, move in zip(self.model.parameters(), moves, strict=True):
            parameter.sub_(move)
        pairs = zip(self.values, self.model.parameters(), strict=True)
        gradients = [outer - local for outer, local in pairs]
        landings = self.engine.step()
        self.values = [parameter.detach().clone() for parameter in self.model.parameters()]
        return gradients, landings


def drawn(numel: int, seed: int) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    # Subnormal and large ones too, and of a size that no vector of a processor divides.
    values[:5] = torch.tensor([0.0, 1e-45, -1e-39, BIG / 1e9, -BIG / 1e9])
    return values


class Separate:
    """torch's optimizers and schedulers of some shards."""

    def __init__(self, values: list[Tensor], make: Any, schedule: Any) -> None:
        self.parameters = [nn.Parameter(shard.clone()) for shard in values]
        self.optimizers = [make([parameter]) for parameter in self.parameters]
        self.schedulers = [schedule(optimizer) for optimizer in self.optimizers if schedule]

    def rates(self) -> list[float]:
        return [float(optimizer.param_groups[0]["lr"]) for optimizer in self.optimizers]

    def step(self, gradients: list[Tensor]) -> list[Tensor]:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for stepped in (*self.optimizers, *self.schedulers):
            stepped.step()
        return [parameter.detach() for parameter in self.parameters]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("error")
def test_every_outer_step_is_that_of_torch_with_the_same_schedule(name: str, schedule: Any) -> None:
    # The engine steps the long shard in stretches.
    numels = (37, 140_003) if schedule is None else (37, 7)
    choices = {"outer_optimizer": OuterOptimizer(OPTIMIZERS[name], lr_schedule=schedule)}
    if name == "default":
        outer_optimizer = OuterOptimizer(lr_schedule=schedule)
        choices = {"outer_optimizer": outer_optimizer, "outer_lr": 0.4, "outer_momentum": 0.9}
    outer = Stepped(*map(drawn, numels, (0, 1)), **choices)
    separate = Separate(outer.values, OPTIMIZERS[name], schedule)
    for number in range(9):
        rates = separate.rates()
        moves = [drawn(numel, 10 + number) for numel in numels]
        gradients, landings = outer.step(*moves)
        assert [landing.outer_lr for landing in landings] == rates
        expected = separate.step(gradients)
        assert all(map(same_bits, outer.values, expected)), number


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
    optimizers = []
    hooked = []

    def make(shards: Any) -> Optimizer:
        optimizer = Scaled(shards, scale=0.25)
        optimizer.register_step_post_hook(lambda stepped, *arguments: hooked.append(stepped))
        optimizers.append(optimizer)
        return optimizer

    outer = Stepped(torch.zeros(3), torch.zeros(3), outer_optimizer=make)
    ones = torch.ones(3)
    calls = len(optimizers)
    hooked.clear()
    before = outer_state(outer.engine)
    for expected in (-0.25, -0.25 - 0.25 - 0.125):
        outer.step(ones, ones)
        assert [values.tolist() for values in outer.values] == [[expected] * 3] * 2
    for fragment in before:
        assert fragment["outer"].tolist() == [0.0] * 3, "a step works on copies"
    assert {id(optimizer) for optimizer in hooked} == {id(optimizers[-1])}
    assert len(optimizers) == calls, "the factory is called at the start only"


def test_fragments_may_have_different_rates() -> None:
    def with_rates(shards: Any) -> Optimizer:
        groups = [{"params": [shard], "lr": 0.1 * (i + 1)} for i, shard in enumerate(shards)]
        return SGD(groups, lr=1.0)

    halving = OuterOptimizer(with_rates, lr_schedule=HALVES.lr_schedule)
    outer = Stepped(torch.zeros(3), torch.zeros(3), outer_optimizer=halving)
    ones = torch.ones(3)
    for expected in ([0.1, 0.2], [0.05, 0.1], [0.025, 0.05]):
        _, landings = outer.step(ones, ones)
        assert [landing.outer_lr for landing in landings] == expected


def test_a_schedule_that_ends_before_training_is_refused() -> None:
    ended = OuterOptimizer(lr_schedule=partial(OneCycleLR, max_lr=0.7, total_steps=3))
    groups = Groups(
        inner="sgd", sync_every=8, fragments=LAYERS, overlap_steps=3, outer_optimizer=ended
    )
    words = r"no learning rate for round 4, counting from 0: .* for the full number of rounds"
    with pytest.raises(ValueError, match=words):
        groups.until(48)
