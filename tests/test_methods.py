"""Methods of examples run, are short and in the docs, and follow their equations; and so does
DropCompute.
"""

import logging
import runpy
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from math import floor, inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor, nn

from benchmarks.drop_compute import Case, closed_form
from lightning_sdiloco import DropCompute, Landing, OuterOptimizer, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.engine.drop_compute import DroppingLoader, best_drop
from tests import fits
from tests.engine.groups import copied, grouped, unlike
from tests.methods import (
    FOLDER,
    GPA,
    SNOO,
    DelayedNesterov,
    EagerGroups,
    EagerUpdates,
    Paced,
    Stay,
    fedglomo,
)
from tests.ranks import run_ranks
from tests.training import batch, inner_optimizer, mlp, train_step

SHARED = ("side_by_side.py", "local_momentum.py")
"""Files that several examples import."""
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name not in SHARED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), str(FOLDER.parent), *sys.path])
    import side_by_side

    train = side_by_side.train

    def train_shortly(groups: Any, steps: int, *settings: Any) -> Any:
        return train(groups, min(steps, 31), *settings)

    monkeypatch.setattr(side_by_side, "train", train_shortly)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


# Names of examples, each with the argument of the strategy that takes it, and its file.
ARGUMENTS = [
    ("ByMedian", "weighing", "edit"),
    ("ByNorm", "weighing", "edit"),
    ("ZScore", "weighing", "edit"),
    ("Eager", "mixing", "eager_updates"),
    ("DelayedNesterov", "outer_optimizer", "delayed_nesterov"),
    ("FastestPairs", "route", "saps_psgd"),
]


def test_every_example_is_short_and_in_the_docs() -> None:
    docs = (FOLDER.parents[1] / "docs" / "methods.md").read_text()
    assert [path.name for path in EXAMPLES if f"examples/methods/{path.name}" not in docs] == []
    assert [path.name for path in EXAMPLES if len(path.read_text().splitlines()) > 170] == []


@pytest.mark.parametrize(("name", "argument", "file"), [*ARGUMENTS, ("Paced", "", "dylu")])
def test_errors_refer_to_the_file_of_an_example(name: str, argument: str, file: str) -> None:
    """In an import, and as a class path of a YAML file."""
    assert FOLDER / f"{file}.py" in EXAMPLES
    for kind in (ImportError, ValueError):
        with pytest.raises(kind, match=rf"does not contain {name}, .*examples/methods/{file}\.py"):
            exec(f"from lightning_sdiloco import {name}")
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "trainer")
    strategy = "--trainer.strategy"
    ours = f"{strategy}=lightning_sdiloco.StreamingDiLoCoStrategy"
    if argument:
        with pytest.raises(Exception, match=rf"examples/methods/{file}\.py"):
            parser.parse_args([ours, f"{strategy}.{argument}=lightning_sdiloco.{name}"])


def test_the_error_of_an_unknown_name_is_pythons() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Nobody'"):
        exec("from lightning_sdiloco import Nobody")


@given(
    interval=st.integers(1, 4),
    spread=st.floats(0, 1),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    gradients=st.lists(st.floats(-10, 10), min_size=1, max_size=12),
)
def test_delayed_nesterov_is_its_equations(
    interval: int, spread: float, momentum: float, gradients: list[float]
) -> None:
    spread /= interval
    value = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = DelayedNesterov([value], lr=0.3, momentum=momentum, every=interval, spread=spread)
    theta = m = total = 0.0
    for number, gradient in enumerate(gradients, 1):
        value.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        total += gradient
        share = spread
        if number % interval == 0:
            m = momentum * m + total / interval
            total = 0.0
            share = 1 - spread * interval + spread
        theta -= 0.3 * (share * momentum * m + gradient / interval)
        assert value.item() == pytest.approx(theta, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.37])
def test_snoo_and_lookahead_are_ten_lines_of_a_plain_loop(momentum: float) -> None:
    model = mlp()
    plain = mlp()
    choices = {**SNOO, "sync_every": 7, "outer_momentum": momentum}
    engine = StreamingDiLoCo(model, worker_groups=1, **choices)
    optimizer = inner_optimizer("adamw", model)
    inner = inner_optimizer("adamw", plain)
    slow = [parameter.detach().clone() for parameter in plain.parameters()]
    outer = torch.optim.SGD(slow, lr=0.68, momentum=momentum, nesterov=momentum > 0)
    for step in range(1, 36):
        train_step(model, optimizer, 0, step)
        engine.step()
        train_step(plain, inner, 0, step)
        if step % 7 == 0:
            for slow_values, fast_values in zip(slow, plain.parameters(), strict=True):
                slow_values.grad = slow_values - fast_values.detach()
            outer.step()
            for slow_values, fast_values in zip(slow, plain.parameters(), strict=True):
                fast_values.data.copy_(slow_values)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def gradient_at(weights: Tensor, group: int, step: int) -> Tensor:
    model = mlp()
    x, y = batch(group, step)
    nn.utils.vector_to_parameters(weights, model.parameters())
    loss = nn.functional.mse_loss(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return nn.utils.parameters_to_vector(gradients)


def local_progress(start: Tensor, steps: range) -> Tensor:
    """The mean over the clients of start minus end of their local steps, each with its local
    momentum.
    """
    movements = []
    for group in range(3):
        weights = previous = start
        v = torch.zeros_like(start)
        for step in steps:
            gradient = gradient_at(weights, group, step)
            v = gradient if step == steps[0] else gradient + v - gradient_at(previous, group, step)
            previous = weights
            weights = weights - 0.05 * v
        movements.append(start - weights)
    return torch.stack(movements).mean(0)


@pytest.mark.parametrize("beta", [1.0, 0.4])
def test_fedglomo_is_its_equations(beta: float) -> None:
    """In a plain loop over all parameters as one vector."""
    models = [mlp() for _ in range(3)]
    fedglomo.train(models, batch, rounds=5, steps=4, lr=0.05, beta=beta)
    w = previous = u = nn.utils.parameters_to_vector(mlp().parameters()).detach()
    for number in range(5):
        steps = range(number * 4 + 1, number * 4 + 5)
        d = local_progress(w, steps)
        u = d if number == 0 else beta * d + (1 - beta) * (u + d - local_progress(previous, steps))
        previous = w
        w = w - u
    for model in models:
        weights = nn.utils.parameters_to_vector(model.parameters())
        torch.testing.assert_close(weights, w, rtol=1e-4, atol=1e-5)


@given(
    mx=st.floats(0, 0.999),
    my=st.floats(0.3, 1),
    gradients=st.lists(st.floats(-3, 3), min_size=1, max_size=8),
)
def test_gpa_is_its_equations(mx: float, my: float, gradients: list[float]) -> None:
    value = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = GPA([value], lr=0.1, mx=mx, my=my, betas=(0.9, 0.95), weight_decay=0.2)
    x = y = z = 1.0
    first = second = 0.0
    for number, gradient in enumerate(gradients, 1):
        value.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        update = (first / (1 - 0.9**number)) / ((second / (1 - 0.95**number)) ** 0.5 + 1e-8)
        z = z * (1 - 0.1 * 0.2) - 0.1 * update
        x = mx * x + (1 - mx) * z
        y = my * x + (1 - my) * z
        assert value.item() == pytest.approx(y, rel=1e-9, abs=1e-9)
    optimizer.eval()
    assert value.item() == pytest.approx(x, rel=1e-8, abs=1e-8)
    optimizer.train()
    assert value.item() == pytest.approx(y, rel=1e-8, abs=1e-8)


def warnings_of(
    optimizer: Any, model: nn.Module, momentum: float, caplog: pytest.LogCaptureFixture
) -> str:
    """The warnings of a group whose inner optimizer is this one."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        SimulatedGroups([model], [[optimizer]], outer_lr=1.0, outer_momentum=momentum)
    return caplog.text


@pytest.mark.parametrize(("momentum", "warns"), [(0.9, True), (0.0, False)])
def test_inner_averaging_with_an_outer_momentum_gets_a_warning(
    momentum: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    optimizer = GPA(model.parameters(), lr=0.1)
    warnings = warnings_of(optimizer, model, momentum, caplog)
    assert ("GPA averages its steps" in warnings) is warns


class HandsOn(torch.optim.Optimizer):
    """Wraps an optimizer, and switches it if it can be switched, as accelerate's does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.defaults = optimizer.defaults

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)

    def train(self) -> None:
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()


@pytest.mark.parametrize(("kind", "warns"), [(GPA, True), (torch.optim.AdamW, False)])
def test_a_wrapper_averages_only_if_its_inner_optimizer_does(
    kind: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    optimizer = HandsOn(kind(model.parameters(), lr=0.1))
    warnings = warnings_of(optimizer, model, 0.9, caplog)
    assert ("GPA averages its steps" in warnings) is warns
    assert ("averages its steps" in warnings) is warns


# Eager updates

EAGER: dict[str, Any] = {
    "sync_every": 5,
    "overlap_steps": 4,
    "fragments": grouped(2),
    "compression": "fp32",
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "outer_optimizer": OuterOptimizer(direction="elementwise"),
}


class Eager:
    """Algorithm 3 of arXiv 2502.12996 for a parameter: every group has outer parameters and a
    Nesterov momentum of its own.
    """

    def __init__(self, initial: Tensor, groups: int) -> None:
        zeros = torch.zeros_like(initial)
        self.outer = [initial.detach().clone() for _ in range(groups)]
        self.buffers = [zeros] * groups
        self.gradients = [zeros] * groups
        self.mean = zeros

    def exchange(self, local: list[Tensor], lr: float, momentum: float) -> None:
        groups = len(local)
        gradients = [outer - values for outer, values in zip(self.outer, local, strict=True)]
        for m in range(groups):
            eager = self.mean + (gradients[m] - self.gradients[m]) / groups
            self.buffers[m] = momentum * self.buffers[m] + eager
            self.outer[m] = self.outer[m] - lr * (eager + momentum * self.buffers[m])
            local[m].copy_(self.outer[m])
        self.gradients = gradients
        self.mean = sum(gradients) / groups


def all_parameters(models: list[nn.Module]) -> list[Tensor]:
    return [parameter.detach() for model in models for parameter in model.parameters()]


def eager_loops(
    groups: int, momentum: float, sync_every: int, fragments: int
) -> Iterator[list[Tensor]]:
    """The parameters of all groups after each of 22 steps."""
    models = [mlp() for _ in range(groups)]
    optimizers = [inner_optimizer("sgd", model) for model in models]
    states = [Eager(parameter, groups) for parameter in models[0].parameters()]
    for step in range(1, 23):
        for m, model in enumerate(models):
            train_step(model, optimizers[m], m, step)
        # Weight and bias of a layer, and those of every second one, travel together.
        for p, state in enumerate(states):
            since = step - p // 2 % fragments * sync_every // fragments
            if since > 0 and since % sync_every == 0:
                local = [list(model.parameters())[p].detach() for model in models]
                state.exchange(local, 0.7, momentum)
        yield all_parameters(models)


class Trained(EagerGroups):
    """Eager groups with models and optimizers of their own."""

    def __init__(self, groups: int, **choices: Any) -> None:
        self.models = [mlp() for _ in range(groups)]
        self.optimizers = [inner_optimizer("sgd", model) for model in self.models]
        super().__init__(self.models, **{**EAGER, **choices})

    def train(self, number: int) -> list[Landing]:
        for group, model in enumerate(self.models):
            train_step(model, self.optimizers[group], group, number)
        return self.step()[0]


@settings(max_examples=15, deadline=None)
@given(
    groups=st.integers(1, 4),
    sync_every=st.integers(1, 7),
    overlap=st.integers(0, 6),
    momentum=st.sampled_from([0.0, 0.9]),
    fragments=st.integers(1, 2),
)
def test_groups_follow_the_paper(
    groups: int, sync_every: int, overlap: int, momentum: float, fragments: int
) -> None:
    """Whenever the mean arrives: groups take in none of it before the next launch."""
    run = Trained(
        groups,
        sync_every=sync_every,
        overlap_steps=min(overlap, sync_every - 1),
        outer_momentum=momentum,
        fragments=grouped(fragments),
    )
    loops = eager_loops(groups, momentum, sync_every, fragments)
    for number, expected in enumerate(loops, start=1):
        run.train(number)
        torch.testing.assert_close(all_parameters(run.models), expected, rtol=1e-4, atol=2e-5)


def eager_process(rank: int, world_size: int) -> tuple[list[Tensor], float]:
    """The parameters of a group in the end, and their norm before the last exchange."""
    model = mlp()
    choices = {**EAGER, "mixing": Stay(), "compression": "fp4"}
    engine = StreamingDiLoCo(model, worker_groups=2, **choices)
    optimizer = inner_optimizer("sgd", model)
    eager = EagerUpdates(engine, model)
    for step in range(1, 32):
        train_step(model, optimizer, rank, step)
        eager.before_step()
        engine.step()
        eager.after_step()
    norm = float(torch.cat([values.flatten() for values in all_parameters([model])]).norm())
    eager.finish()
    return all_parameters([model]), norm


def test_processes_make_the_eager_updates_of_the_simulation() -> None:
    run = Trained(2, compression="fp4")
    for number in range(1, 32):
        run.train(number)
    run.finish()
    norms = set()
    for parameters, norm in run_ranks(eager_process, 2):
        assert all(map(torch.equal, parameters, run.models[0].parameters()))
        norms.add(norm)
    assert len(norms) == 2, "groups train from parameters of their own"


def test_the_last_mean_covers_all_progress_and_a_non_finite_group_recovers() -> None:
    """Progress since the last launch counts once, and so does what a landing has brought
    meanwhile.
    """
    run = Trained(2, fragments=grouped(1), sync_every=6, overlap_steps=2)
    for number in range(1, 7):
        run.train(number)
    at_launch = [copied(model.named_parameters()) for model in run.models]
    for number in range(7, 10):
        run.train(number)
    expected = run.outer_state_dict()
    for model, start in zip(run.models, at_launch, strict=True):
        for name, values in model.named_parameters():
            expected[name] = expected[name] + (values.detach() - start[name]) / 2
    run.finish()
    torch.testing.assert_close(run.outer_state_dict(), expected, rtol=1e-5, atol=1e-6)

    run = Trained(3)
    left_out = set()
    for number in range(1, 31):
        if number == 9:
            nn.init.constant_(run.models[1][0].weight, nan)
        left_out |= {landing.left_out for landing in run.train(number)}
    assert left_out == {(), (1,)}
    run.finish()
    for model in run.models:
        assert all(map(torch.equal, model.parameters(), run.models[0].parameters()))
        assert all(values.isfinite().all() for values in model.parameters())


@pytest.mark.parametrize("speed", [0.1, 0.3, 0.5, 2 / 3, 0.99, 1.0])
def test_paced_groups_train_as_many_steps_as_time_allows(speed: float) -> None:
    trained = list(accumulate(batch is not None for batch in Paced(range(1000), speed=speed)))
    assert trained == [floor(speed * step + 1e-6) for step in range(1, 1001)]
    # The rest of the time is not lost at the end of an epoch.
    short = Paced(range(7), speed=speed)
    epochs = [list(short) for _ in range(100)]
    batches = sum(batch is not None for epoch in epochs for batch in epoch)
    assert batches == floor(speed * 700 + 1e-6)


def test_a_paced_loader_gives_all_micro_batches_and_needs_no_length() -> None:
    idle = [None] * 4
    paced = Paced(range(10), speed=0.5, micro_batches=4)
    assert list(paced) == [*idle, 0, 1, 2, 3, None, None]
    without_length = Paced(iter(range(3)), speed=0.5)
    assert list(without_length) == [None, 0, None, 1, None, 2, None]


class Numbers(fits.Announced):
    draw = staticmethod(lambda group, step: [torch.tensor([step])] * 2)


def engine_with(*step_times: float) -> Any:
    """The attributes of an engine that tell the speeds of the groups; it is in the second one."""
    topology = SimpleNamespace(group_index=1)
    landing = SimpleNamespace(step_times=step_times)
    return SimpleNamespace(
        site=None, topology=topology, history=SimpleNamespace(last_landing=landing)
    )


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_paced_loader_resumes_with_the_same_batches_and_speed(stop: int) -> None:
    def paced(*step_times: float) -> Any:
        return Paced(Numbers((0, 0, 1), 9), micro_batches=2).follow(engine_with(*step_times))

    stopped = paced(1.0, 1.6)
    batches = iter(stopped)
    for _ in range(stop):
        next(batches)
    resumed = paced(0.0, 0.0)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.speed == stopped.speed == 1.0 / 1.6
    assert list(resumed) == list(batches)


@pytest.mark.parametrize(
    ("step_times", "speed"),
    [((1, 2, 4), 0.5), ((1, 1.04), 1.0), ((3, 2), 1.0), ((0, 2, 1.5), 0.75), ((1, 0), 1.0)],
)
def test_the_speed_of_a_group_is_its_share_of_the_fastest_known_one(
    step_times: tuple[float, ...], speed: float
) -> None:
    paced = Paced(range(4)).follow(engine_with(*step_times))
    next(iter(paced))
    assert paced.speed == speed


def test_paced_loaders_refuse_federations_and_steps_refuse_bad_micro_batch_numbers() -> None:
    with pytest.raises(ValueError, match="does not work with a federation"):
        Paced([]).follow(SimpleNamespace(site="berlin"))
    for micro_batches in (-1, 1.5):
        with pytest.raises(ValueError, match=r"trained=.* is not a number of micro-batches"):
            StreamingDiLoCo(torch.nn.Linear(2, 2)).step(trained=micro_batches)


STEP = 0.05


class Timing(NamedTuple):
    seconds: float
    trained: int
    speed: float


def paced_process(rank: int, world_size: int) -> Timing:
    """Times the 40 steps after the first 18; the last rank is half as fast."""
    model = torch.nn.Linear(4, 4)
    engine = StreamingDiLoCo(
        model, sync_every=8, overlap_steps=2, fragments=[["*"]], compression="fp32"
    )
    paced = Paced(range(58)).follow(engine)
    trained = 0
    start = 0.0
    for step, batch_number in enumerate(paced, start=1):
        if batch_number is not None:
            time.sleep(STEP * (2 if rank == 3 else 1))
            trained += step > 18
        engine.step(idle=batch_number is None)
        if step == 18:
            start = time.perf_counter()
    seconds = time.perf_counter() - start
    engine.finish()
    return Timing(seconds, trained, paced.speed)


def test_real_processes_do_not_wait_for_a_paced_group() -> None:
    """The last of four groups is half as fast; all others train at their own speed once it is
    known.
    """
    timings = run_ranks(paced_process, 4)
    assert timings[3].speed == pytest.approx(0.5, rel=0.1)
    assert all(timing.trained >= 36 for timing in timings[:3])
    # By the clock of planning: one slow inner step more than the fast groups need, in place of
    # twice the time.
    slowest = max(timing.seconds for timing in timings)
    assert slowest == pytest.approx(41 * STEP, rel=0.05)


# DropCompute


def by_hand(times: np.ndarray, pause: float, most_dropped: float) -> tuple[float, float, float]:
    """The rule in plain loops over budgets, ranks, steps and micro-batches."""
    ends = times.cumsum(axis=2)
    full_time = np.mean(ends[:, :, -1].max(axis=0)) + pause
    best = (inf, 0.0, 0.0)
    for budget in np.linspace(ends[:, :, 0].min(), ends[:, :, -1].max(), 200):
        step_times, trained = with_budget(times, budget)
        dropped = 1 - trained / times.size
        shorter = 1 - (np.mean(step_times) + pause) / full_time
        gain = (1 - dropped) / (1 - shorter) - 1
        if dropped <= most_dropped and gain > best[2] + 1e-9:
            best = (float(budget), dropped, float(gain))
    return best


def with_budget(times: np.ndarray, budget: float) -> tuple[list[float], int]:
    """The times of the steps, which the slowest rank decides, and the micro-batches that run."""
    ranks, steps, parts = times.shape
    step_times = []
    trained = 0
    for step in range(steps):
        rank_times = []
        for rank in range(ranks):
            end = 0.0
            rank_time = 0.0
            for part, seconds in enumerate(times[rank, step]):
                if part in (0, parts - 1) or end <= budget:
                    rank_time += seconds
                    trained += 1
                end += seconds
            rank_times.append(rank_time)
        step_times.append(max(rank_times))
    return step_times, trained


def test_the_rule_is_that_of_plain_loops_and_the_bound_holds() -> None:
    for sigma, pause, most in ((0.2, 0.0, 0.1), (0.6, 0.5, 0.3), (0.6, 0.0, 0.05)):
        times = np.random.default_rng(0).lognormal(0.0, sigma, size=(3, 5, 6))
        drop = best_drop(times.tolist(), pause, most)
        assert drop == pytest.approx(by_hand(times, pause, most), rel=1e-9)
    without_jitter = [[[1.0] * 6] * 9] * 4
    assert best_drop(without_jitter, 0.1, 0.5) == (inf, 0.0, 0.0), "nothing is dropped"
    wild = np.random.default_rng(1).lognormal(0.0, 0.6, size=(2, 40, 12)).tolist()
    # Unbounded it would drop most micro-batches.
    assert best_drop(wild, 0.0, 0.99).dropped > 0.2
    assert 0 < best_drop(wild, 0.0, 0.1).dropped <= 0.1
    # The closed form where the last micro-batch always runs.
    drop = closed_form(Case(), steps=1000)
    assert drop.gain == pytest.approx(0.033, abs=0.01)
    assert drop.dropped == pytest.approx(0.07, abs=0.01)


class Clock:
    """A clock that a loop advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Turn(NamedTuple):
    """A turn of a loop over a loader; a batch is None if it was left out."""

    batch: Any
    trained: int
    is_last: bool


def turns(loader: DroppingLoader, clock: Clock, seconds: list[float]) -> list[Turn]:
    """Loops over a loader; a batch that is not left out takes so many seconds."""
    turns = []
    for micro_batch, duration in zip(loader, seconds, strict=False):
        turns.append(Turn(micro_batch, loader.trained, loader.is_last))
        if micro_batch is not None:
            clock.now += duration
    return turns


def test_late_micro_batches_are_left_out_except_the_last() -> None:
    clock = Clock()
    loader = DroppingLoader(DropCompute(4, budget=2.5), range(10), clock)
    played = turns(loader, clock, [1.0] * 4 + [2.0, 1.0, 0.0, 0.0, 9.0, 0.0])
    assert [turn.batch for turn in played] == [0, 1, 2, 3, 4, 5, None, 7, 8, 9]
    assert [turn.trained for turn in played] == [1, 2, 3, 4, 1, 2, 2, 3, 1, 2]
    assert [index for index, turn in enumerate(played) if turn.is_last] == [3, 7, 9]
    assert loader.dropped == 1
    paced = DropCompute(2, budget=0.0)(Paced(range(8), speed=0.5, micro_batches=2))
    assert list(paced) == [None, None, 0, 1, None, None, 2, 3]


def test_auto_chooses_after_fifty_steps_from_the_numbers_of_all_ranks_and_resumes() -> None:
    table_of_peer = [[1.0, 2.0, 3.0, 4.2]] * 49 + [[3.0, 6.0, 9.0, 10.2]]
    in_group = SimpleNamespace(all_gather_object=lambda table: [table, table_of_peer])
    engine: Any = SimpleNamespace(topology=SimpleNamespace(group_size=1, in_group=in_group))

    def loader_with(clock: Clock) -> DroppingLoader:
        return DroppingLoader(DropCompute(4), range(220), clock).follow(engine)

    clock = Clock()
    unbroken = loader_with(clock)
    played = turns(unbroken, clock, [1.0] * 216 + [9.0] * 4)
    assert unbroken.budget < 9.0
    assert [turn.batch for turn in played[-4:]] == [216, None, None, 219]
    clock = Clock()
    stopped = loader_with(clock)
    turns(stopped, clock, [1.0] * 130)
    state = stopped.state_dict()
    assert state["table"]
    clock = Clock()
    resumed = loader_with(clock)
    resumed.load_state_dict(state)
    turns(resumed, clock, [1.0] * 80)
    # The step in which it was stopped is not measured.
    assert resumed.budget == pytest.approx(unbroken.budget, rel=0.1)


def test_drop_compute_refuses_impossible_numbers() -> None:
    topology = SimpleNamespace(group_size=2, in_group=SimpleNamespace(all_gather_object=list))
    engine: Any = SimpleNamespace(topology=topology, model=nn.SyncBatchNorm(4))
    for make, words in (
        (lambda: DropCompute(1), "leaves nothing to drop"),
        (lambda: DropCompute(2, budget=-1.0), "budget=-1.0 is out of range"),
        (lambda: DropCompute(2, most_dropped=1.0), "most_dropped=1.0 is out of range"),
        (lambda: DropCompute(2)(iter([1])), "needs a loader with a length"),
        (lambda: DropCompute(2)([1]).follow(engine), "does not work with SyncBatchNorm"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def outer_parameters(loader: Any) -> dict[str, Tensor]:
    """Those of a run with four micro-batches a step."""
    model = mlp()
    optimizer = inner_optimizer("adamw", model)
    engine = StreamingDiLoCo(model, sync_every=3, overlap_steps=1, fragments=[["*"]])
    for index, parts in enumerate(loader, start=1):
        if parts is not None:
            (nn.functional.mse_loss(model(parts[0]), parts[1]) / 4).backward()
        if index % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            engine.step(trained=getattr(loader, "trained", 1))
    engine.finish()
    return engine.outer_state_dict()


def test_without_jitter_a_run_is_bit_for_bit_the_one_without_it() -> None:
    batches = [batch(0, step) for step in range(48)]
    plain = outer_parameters(batches)
    assert unlike(plain, outer_parameters(DropCompute(4)(batches))) == []
    assert unlike(plain, outer_parameters(DropCompute(4, budget=0.0)(batches))) != []
