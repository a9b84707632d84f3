"""DropCompute: the rule on a table, what is left out when, and the last micro-batch that always runs."""

from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.drop_compute import Case, closed_form
from lightning_sdiloco import DropCompute, StreamingDiLoCo
from lightning_sdiloco.engine.drop_compute import DroppingLoader, best_drop
from tests.engine.groups import unlike
from tests.methods import Paced
from tests.training import batch, inner_optimizer, mlp


def by_hand(times: np.ndarray, rest: float, most_dropped: float) -> tuple[float, float, float]:
    """The rule in plain loops over ranks, steps and micro-batches."""
    ranks, steps, parts = times.shape
    done = times.cumsum(axis=2)
    whole = np.mean([max(done[rank, step, -1] for rank in range(ranks)) for step in range(steps)]) + rest
    best = (inf, 0.0, 0.0)
    for budget in np.linspace(done[:, :, 0].min(), done[:, :, -1].max(), 200):
        kept, lasts = 0, []
        for step in range(steps):
            slowest = 0.0
            for rank in range(ranks):
                ran = [k in (0, parts - 1) or done[rank, step, k - 1] <= budget for k in range(parts)]
                kept += sum(ran)
                slowest = max(slowest, sum(t for t, runs in zip(times[rank, step], ran, strict=True) if runs))
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
        assert best_drop(times.tolist(), rest, most) == pytest.approx(by_hand(times, rest, most), rel=1e-9)
    assert best_drop([[[1.0] * 6] * 9] * 4, 0.1, 0.5) == (inf, 0.0, 0.0), "without jitter nothing is dropped"
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


def played(loader: DroppingLoader, clock: Clock, seconds: list[float]) -> list[tuple[Any, int, bool]]:
    seen = []
    for given, takes in zip(loader, seconds, strict=False):
        seen.append((given, loader.trained, loader.is_last))
        clock.now += takes if given is not None else 0.0
    return seen


def test_what_is_late_is_left_out_but_for_the_last() -> None:
    clock = Clock()
    loader = DroppingLoader(DropCompute(4, budget=2.5), range(10), clock)
    seen = played(loader, clock, [1.0] * 4 + [2.0, 1.0, 0.0, 0.0, 9.0, 0.0])
    assert [batch for batch, *_ in seen] == [0, 1, 2, 3, 4, 5, None, 7, 8, 9]
    assert [trained for _, trained, _ in seen] == [1, 2, 3, 4, 1, 2, 2, 3, 1, 2]
    assert [index for index, (*_, last) in enumerate(seen) if last] == [3, 7, 9]
    assert loader.dropped == 1
    paced = DropCompute(2, budget=0.0)(Paced(range(8), speed=0.5, micro_batches=2))
    assert list(paced) == [None, None, 0, 1, None, None, 2, 3]


def test_auto_chooses_after_fifty_steps_from_what_all_ranks_say_and_goes_on_after_a_resume() -> None:
    other = [[1.0, 2.0, 3.0, 4.2]] * 49 + [[3.0, 6.0, 9.0, 10.2]]
    in_group = SimpleNamespace(all_gather_object=lambda table: [table, other])
    engine: Any = SimpleNamespace(topology=SimpleNamespace(group_size=1, in_group=in_group))
    clocks = [Clock() for _ in range(3)]
    whole, first, second = (DroppingLoader(DropCompute(4), range(220), clock).follow(engine) for clock in clocks)
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


def test_what_cannot_be_is_refused() -> None:
    topology = SimpleNamespace(group_size=2, in_group=SimpleNamespace(all_gather_object=list))
    engine: Any = SimpleNamespace(topology=topology, model=nn.SyncBatchNorm(4))
    for make, words in (
        (lambda: DropCompute(1), "leaves nothing to drop"),
        (lambda: DropCompute(2, budget=-1.0), "budget=-1.0 is out of range"),
        (lambda: DropCompute(2, most_dropped=1.0), "most_dropped=1.0 is out of range"),
        (lambda: DropCompute(2)(iter([1])), "needs a loader with a length"),
        (lambda: DropCompute(2)([1]).follow(engine), "does not go with SyncBatchNorm"),
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
    plain, auto, drops = (run(loader) for loader in (data, DropCompute(4)(data), DropCompute(4, budget=0.0)(data)))
    assert unlike(plain, auto) == []
    assert unlike(plain, drops) != []
