"""Methods of examples run, are short and in the docs, and do what their equations say; and so does
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
from typing import Any

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
"""What several examples import."""
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name not in SHARED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), str(FOLDER.parent), *sys.path])
    import side_by_side

    whole = side_by_side.train
    monkeypatch.setattr(
        side_by_side, "train", lambda groups, steps, *how: whole(groups, min(steps, 45), *how)
    )
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_every_example_is_short_and_in_the_docs_and_errors_refer_to_its_file() -> None:
    """In an import, and as a class path of a YAML file."""
    docs = (FOLDER.parents[1] / "docs" / "methods.md").read_text()
    assert [path.name for path in EXAMPLES if f"examples/methods/{path.name}" not in docs] == []
    assert [path.name for path in EXAMPLES if len(path.read_text().splitlines()) > 170] == []
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "trainer")
    ours = "--trainer.strategy=lightning_sdiloco.StreamingDiLoCoStrategy"
    for name, argument, file in (
        ("ByMedian", "weighing", "edit"),
        ("ByNorm", "weighing", "edit"),
        ("ZScore", "weighing", "edit"),
        ("Eager", "mixing", "eager_updates"),
        ("DelayedNesterov", "outer_optimizer", "delayed_nesterov"),
        ("Paced", "", "dylu"),
        ("FastestPairs", "route", "saps_psgd"),
    ):
        assert FOLDER / f"{file}.py" in EXAMPLES
        for kind in (ImportError, ValueError):
            with pytest.raises(kind, match=rf"has no {name}: .*examples/methods/{file}\.py"):
                exec(f"from lightning_sdiloco import {name}")
        if argument:
            with pytest.raises(Exception, match=rf"examples/methods/{file}\.py"):
                parser.parse_args([ours, f"--trainer.strategy.{argument}=lightning_sdiloco.{name}"])
    with pytest.raises(ImportError, match="cannot import name 'Nobody'"):
        exec("from lightning_sdiloco import Nobody")


@given(
    every=st.integers(1, 4),
    spread=st.floats(0, 1),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    gradients=st.lists(st.floats(-10, 10), min_size=1, max_size=12),
)
def test_delayed_nesterov_is_its_equations(
    every: int, spread: float, momentum: float, gradients: list[float]
) -> None:
    spread /= every
    value = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = DelayedNesterov([value], lr=0.3, momentum=momentum, every=every, spread=spread)
    theta = m = summed = 0.0
    for number, gradient in enumerate(gradients, 1):
        value.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        summed += gradient
        if number % every:
            theta -= 0.3 * (spread * momentum * m + gradient / every)
        else:
            m = momentum * m + summed / every
            summed = 0.0
            theta -= 0.3 * ((1 - spread * every + spread) * momentum * m + gradient / every)
        assert value.item() == pytest.approx(theta, rel=1e-9, abs=1e-9)


def test_snoo_and_lookahead_are_ten_lines_of_a_plain_loop() -> None:
    for momentum in (0.0, 0.37):
        model = mlp()
        plain = mlp()
        engine = StreamingDiLoCo(
            model, worker_groups=1, **{**SNOO, "sync_every": 7, "outer_momentum": momentum}
        )
        optimizer = inner_optimizer("adamw", model)
        inner = inner_optimizer("adamw", plain)
        slow = [parameter.detach().clone() for parameter in plain.parameters()]
        outer = torch.optim.SGD(slow, lr=0.68, momentum=momentum, nesterov=momentum > 0)
        for step in range(1, 36):
            train_step(model, optimizer, 0, step)
            engine.step()
            train_step(plain, inner, 0, step)
            if step % 7 == 0:
                for kept, fast in zip(slow, plain.parameters(), strict=True):
                    kept.grad = kept - fast.detach()
                outer.step()
                for kept, fast in zip(slow, plain.parameters(), strict=True):
                    fast.data.copy_(kept)
            assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_fedglomo_is_its_equations() -> None:
    """In a plain loop over all parameters as one vector."""

    def gradient(weights: Tensor, group: int, step: int) -> Tensor:
        model, (x, y) = mlp(), batch(group, step)
        nn.utils.vector_to_parameters(weights, model.parameters())
        nn.functional.mse_loss(model(x), y).backward()
        return nn.utils.parameters_to_vector(
            own.grad for own in model.parameters() if own.grad is not None
        )

    def moved(start: Tensor, steps: range) -> Tensor:
        """The mean over the clients of start minus end of their local steps, each with its local
        momentum.
        """
        every = []
        for group in range(3):
            now = before = start
            v = torch.zeros_like(start)
            for step in steps:
                own = gradient(now, group, step)
                v = own if step == steps[0] else own + v - gradient(before, group, step)
                before = now
                now = now - 0.05 * v
            every.append(start - now)
        return torch.stack(every).mean(0)

    for beta in (1.0, 0.4):
        models = [mlp() for _ in range(3)]
        fedglomo.train(models, batch, rounds=5, steps=4, lr=0.05, beta=beta)
        w = last = u = nn.utils.parameters_to_vector(mlp().parameters()).detach()
        for number in range(5):
            steps = range(number * 4 + 1, number * 4 + 5)
            d = moved(w, steps)
            u = d if number == 0 else beta * d + (1 - beta) * (u + d - moved(last, steps))
            last = w
            w = w - u
        for model in models:
            torch.testing.assert_close(
                nn.utils.parameters_to_vector(model.parameters()), w, rtol=1e-4, atol=1e-5
            )


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


def test_inner_averaging_with_an_outer_momentum_gets_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for momentum, warns in ((0.9, True), (0.0, False)):
        model = mlp()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            SimulatedGroups(
                [model], [[GPA(model.parameters(), lr=0.1)]], outer_lr=1.0, outer_momentum=momentum
            )
        assert ("GPA averages its steps" in caplog.text) is warns


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
    with caplog.at_level(logging.WARNING):
        SimulatedGroups(
            [model], [[HandsOn(kind(model.parameters(), lr=0.1))]], outer_lr=1.0, outer_momentum=0.9
        )
    assert ("GPA averages its steps" in caplog.text) is warns
    assert ("averages its steps" in caplog.text) is warns


# Eager updates

EAGER: dict[str, Any] = {
    "sync_every": 5,
    "overlap_steps": 4,
    "fragments": grouped(2),
    "compression": "fp32",
}
EAGER |= {
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "outer_optimizer": OuterOptimizer(direction="elementwise"),
}


def eager_loops(
    groups: int, steps: int, lr: float, momentum: float, every: int, fragments: int
) -> Iterator[Any]:
    """Algorithm 3 of arXiv 2502.12996: every group has outer parameters and a Nesterov momentum of
    its own.
    """
    models = [mlp() for _ in range(groups)]
    optimizers = [inner_optimizer("sgd", model) for model in models]
    outer = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]
    buffers, before = (
        [[torch.zeros_like(own) for own in outer[0]] for _ in models] for _ in range(2)
    )
    mean = [torch.zeros_like(own) for own in outer[0]]
    for step in range(1, steps + 1):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, group, step)
        # Weight and bias of a layer, and those of every second one, travel together.
        for p in range(len(mean)):
            offset = p // 2 % fragments * every // fragments
            if step <= offset or (step - offset) % every:
                continue
            local = [list(model.parameters())[p] for model in models]
            gradients = [own[p] - values.detach() for own, values in zip(outer, local, strict=True)]
            for m, values in enumerate(local):
                eager = mean[p] + (gradients[m] - before[m][p]) / groups
                buffers[m][p] = momentum * buffers[m][p] + eager
                outer[m][p] = outer[m][p] - lr * (eager + momentum * buffers[m][p])
                values.data.copy_(outer[m][p])
                before[m][p] = gradients[m]
            mean[p] = sum(gradients) / groups
        yield [parameter.detach() for model in models for parameter in model.parameters()]


class Trained(EagerGroups):
    """Eager groups with models and optimizers of their own."""

    def __init__(self, groups: int, **choices: Any) -> None:
        self.models = [mlp() for _ in range(groups)]
        self.optimizers = [inner_optimizer("sgd", model) for model in self.models]
        super().__init__(self.models, **{**EAGER, **choices})

    def train(self, number: int) -> list[Landing]:
        for group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train_step(model, optimizer, group, number)
        return self.step()[0]


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(0, 6),
    st.sampled_from([0.0, 0.9]),
    st.integers(1, 2),
)
def test_groups_follow_the_paper(
    groups: int, every: int, overlap: int, momentum: float, fragments: int
) -> None:
    """Whenever the mean comes: nothing of it is taken in before the next launch."""
    choices = {
        "sync_every": every,
        "overlap_steps": min(overlap, every - 1),
        "outer_momentum": momentum,
    }
    run = Trained(groups, **choices, fragments=grouped(fragments))
    for number, expected in enumerate(eager_loops(groups, 22, 0.7, momentum, every, fragments), 1):
        run.train(number)
        seen = [parameter.detach() for model in run.models for parameter in model.parameters()]
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=2e-5)


def test_processes_make_the_eager_updates_of_the_simulation() -> None:
    def in_process(rank: int, world_size: int) -> tuple[list[Tensor], float]:
        model = mlp()
        engine = StreamingDiLoCo(
            model, worker_groups=2, **{**EAGER, "mixing": Stay(), "compression": "fp4"}
        )
        optimizer = inner_optimizer("sgd", model)
        eager = EagerUpdates(engine, model)
        for step in range(1, 32):
            train_step(model, optimizer, rank, step)
            eager.before_step()
            engine.step()
            eager.after_step()
        apart = float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())
        eager.finish()
        return [parameter.detach() for parameter in model.parameters()], apart

    run = Trained(2, compression="fp4")
    for number in range(1, 32):
        run.train(number)
    run.finish()
    told = run_ranks(in_process, 2)
    for held, _ in told:
        assert all(map(torch.equal, held, run.models[0].parameters()))
    assert len({apart for _, apart in told}) == 2, "groups train from parameters of their own"


def test_the_last_mean_covers_all_progress_and_a_non_finite_group_recovers() -> None:
    """What was trained since the last launch counts once, and so does what a landing has brought
    meanwhile.
    """
    run = Trained(2, fragments=grouped(1), sync_every=6, overlap_steps=2)
    for number in range(1, 10):
        run.train(number)
        if number == 6:
            began = [copied(model.named_parameters()) for model in run.models]
    expected = run.outer_state_dict()
    for model, start in zip(run.models, began, strict=True):
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
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_paced_groups_train_as_many_steps_as_time_allows_with_all_micro_batches() -> None:
    for speed in (0.1, 0.3, 0.5, 2 / 3, 0.99, 1.0):
        batches = list(Paced(range(1000), speed=speed))
        trained = list(accumulate(batch is not None for batch in batches))
        assert trained == [floor(speed * step + 1e-6) for step in range(1, 1001)]
        # What is left of the time is not lost at the end of an epoch.
        short = Paced(range(7), speed=speed)
        assert sum(batch is not None for _ in range(100) for batch in short) == floor(
            speed * 700 + 1e-6
        )
    assert list(Paced(range(10), speed=0.5, micro_batches=4)) == [
        None,
        None,
        None,
        None,
        0,
        1,
        2,
        3,
        None,
        None,
    ]
    assert list(Paced(iter(range(3)), speed=0.5)) == [None, 0, None, 1, None, 2, None], (
        "without a length"
    )


class Numbers(fits.Announced):
    draw = staticmethod(lambda group, step: [torch.tensor([step])] * 2)


def heard(*times: float) -> Any:
    """What of an engine tells the speeds, for the second group."""
    topology = SimpleNamespace(group_index=1)
    landing = SimpleNamespace(step_times=times)
    return SimpleNamespace(site=None, topology=topology, last_landing=landing)


def test_a_paced_loader_resumes_and_auto_is_the_share_of_the_fastest_known_speed() -> None:
    for stop in range(1, 9):
        first = Paced(Numbers((0, 0, 1), 9), micro_batches=2).follow(heard(1.0, 1.6))
        items = iter(first)
        for _ in range(stop):
            next(items)
        second = Paced(Numbers((0, 0, 1), 9), micro_batches=2).follow(heard(0.0, 0.0))
        second.load_state_dict(first.state_dict())
        assert second.speed == first.speed == 1.0 / 1.6
        assert list(second) == list(items)
    cases = (((1, 2, 4), 0.5), ((1, 1.04), 1.0), ((3, 2), 1.0), ((0, 2, 1.5), 0.75), ((1, 0), 1.0))
    for times, speed in cases:
        paced = Paced(range(4)).follow(heard(*times))
        next(iter(paced))
        assert paced.speed == speed


def test_paced_loaders_refuse_federations_and_steps_refuse_bad_micro_batch_numbers() -> None:
    with pytest.raises(ValueError, match="does not work with a federation"):
        Paced([]).follow(SimpleNamespace(site="berlin"))
    for micro_batches in (-1, 1.5):
        with pytest.raises(ValueError, match=r"trained=.* is not a number of micro-batches"):
            StreamingDiLoCo(torch.nn.Linear(2, 2)).step(trained=micro_batches)


STEP = 0.05


def test_real_processes_do_not_wait_for_a_paced_group() -> None:
    """The last of four groups is half as fast; all others go on at their own speed once it has
    been heard.
    """

    def run(rank: int, world_size: int) -> tuple[float, int, float]:
        model = torch.nn.Linear(4, 4)
        engine = StreamingDiLoCo(
            model, sync_every=8, overlap_steps=2, fragments=[["*"]], compression="fp32"
        )
        paced = Paced(range(58)).follow(engine)
        done = 0
        began = 0.0
        for step, item in enumerate(paced, start=1):
            if item is not None:
                time.sleep(STEP * (2 if rank == 3 else 1))
                done += step > 18
            engine.step(idle=item is None)
            if step == 18:
                began = time.perf_counter()
        seconds = time.perf_counter() - began
        engine.finish()
        return seconds, done, paced.speed

    ranks = run_ranks(run, 4)
    assert ranks[3][2] == pytest.approx(0.5, rel=0.1)
    assert all(done >= 36 for _, done, _ in ranks[:3])
    # By the clock of planning: one slow inner step more than the fast groups need, in place of
    # twice the time.
    assert max(seconds for seconds, *_ in ranks) == pytest.approx(41 * STEP, rel=0.05)


# DropCompute


def by_hand(times: np.ndarray, rest: float, most_dropped: float) -> tuple[float, float, float]:
    """The rule in plain loops over ranks, steps and micro-batches."""
    ranks, steps, parts = times.shape
    done = times.cumsum(axis=2)
    whole = (
        np.mean([max(done[rank, step, -1] for rank in range(ranks)) for step in range(steps)])
        + rest
    )
    best = (inf, 0.0, 0.0)
    for budget in np.linspace(done[:, :, 0].min(), done[:, :, -1].max(), 200):
        kept = 0
        lasts = []
        for step in range(steps):
            slowest = 0.0
            for rank in range(ranks):
                ran = [
                    k in (0, parts - 1) or done[rank, step, k - 1] <= budget for k in range(parts)
                ]
                kept += sum(ran)
                slowest = max(
                    slowest, sum(t for t, runs in zip(times[rank, step], ran, strict=True) if runs)
                )
            lasts.append(slowest)
        dropped = 1 - kept / times.size
        shorter = 1 - (np.mean(lasts) + rest) / whole
        gain = (1 - dropped) / (1 - shorter) - 1
        if dropped <= most_dropped and gain > best[2] + 1e-9:
            best = (float(budget), dropped, float(gain))
    return best


def test_the_rule_is_that_of_plain_loops_and_the_bound_holds() -> None:
    for sigma, rest, most in ((0.2, 0.0, 0.1), (0.6, 0.5, 0.3), (0.6, 0.0, 0.05)):
        times = np.random.default_rng(0).lognormal(0.0, sigma, size=(3, 5, 6))
        assert best_drop(times.tolist(), rest, most) == pytest.approx(
            by_hand(times, rest, most), rel=1e-9
        )
    assert best_drop([[[1.0] * 6] * 9] * 4, 0.1, 0.5) == (inf, 0.0, 0.0), (
        "without jitter nothing is dropped"
    )
    wild = np.random.default_rng(1).lognormal(0.0, 0.6, size=(2, 40, 12))
    # Unbounded it would drop most of what there is.
    assert best_drop(wild.tolist(), 0.0, 0.99).dropped > 0.2
    assert 0 < best_drop(wild.tolist(), 0.0, 0.1).dropped <= 0.1
    # The closed form where the last micro-batch always runs.
    drop = closed_form(Case(), steps=1000)
    assert (drop.gain, drop.dropped) == pytest.approx((0.033, 0.07), abs=0.01)


class Clock:
    """A clock that a loop moves on."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def played(
    loader: DroppingLoader, clock: Clock, seconds: list[float]
) -> list[tuple[Any, int, bool]]:
    seen = []
    for item, takes in zip(loader, seconds, strict=False):
        seen.append((item, loader.trained, loader.is_last))
        clock.now += takes if item is not None else 0.0
    return seen


def test_late_micro_batches_are_left_out_except_the_last() -> None:
    clock = Clock()
    loader = DroppingLoader(DropCompute(4, budget=2.5), range(10), clock)
    seen = played(loader, clock, [1.0] * 4 + [2.0, 1.0, 0.0, 0.0, 9.0, 0.0])
    assert [batch for batch, *_ in seen] == [0, 1, 2, 3, 4, 5, None, 7, 8, 9]
    assert [trained for _, trained, _ in seen] == [1, 2, 3, 4, 1, 2, 2, 3, 1, 2]
    assert [index for index, (*_, last) in enumerate(seen) if last] == [3, 7, 9]
    assert loader.dropped == 1
    paced = DropCompute(2, budget=0.0)(Paced(range(8), speed=0.5, micro_batches=2))
    assert list(paced) == [None, None, 0, 1, None, None, 2, 3]


def test_auto_chooses_after_fifty_steps_from_the_numbers_of_all_ranks_and_resumes() -> None:
    other = [[1.0, 2.0, 3.0, 4.2]] * 49 + [[3.0, 6.0, 9.0, 10.2]]
    in_group = SimpleNamespace(all_gather_object=lambda table: [table, other])
    engine: Any = SimpleNamespace(topology=SimpleNamespace(group_size=1, in_group=in_group))
    clocks = [Clock() for _ in range(3)]
    whole, first, second = (
        DroppingLoader(DropCompute(4), range(220), clock).follow(engine) for clock in clocks
    )
    seen = played(whole, clocks[0], [1.0] * 216 + [9.0] * 4)
    assert whole.budget < 9.0
    assert [batch for batch, *_ in seen[-4:]] == [216, None, None, 219]
    played(first, clocks[1], [1.0] * 130)
    state = first.state_dict()
    second.load_state_dict(state)
    assert state["table"]
    played(second, clocks[2], [1.0] * 80)
    # The step in which it was stopped is not measured.
    assert second.budget == pytest.approx(whole.budget, rel=0.1)


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


def test_without_jitter_a_run_is_bit_for_bit_the_one_without_it() -> None:
    def run(loader: Any) -> dict[str, torch.Tensor]:
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

    data = [batch(0, step) for step in range(48)]
    plain, auto, drops = (
        run(loader) for loader in (data, DropCompute(4)(data), DropCompute(4, budget=0.0)(data))
    )
    assert unlike(plain, auto) == []
    assert unlike(plain, drops) != []
