"""Methods do what the simulation does: in Trainers, in loops of Fabric, and where ranks of a group share one model."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import (
    Carry,
    DropCompute,
    FastestPairs,
    RandomPairs,
    Ring,
    Selective,
    StreamingDiLoCo,
    StreamingDiLoCoMonitor,
    TwoShot,
)
from lightning_sdiloco.compression import ByLink, ErrorFeedback, Int2, Threshold, TopK
from lightning_sdiloco.engine.flight import Pending
from lightning_sdiloco.lightning import fit as fit_module
from tests import fits, sharded
from tests.engine.groups import Groups, regression
from tests.fits import said_by, whole
from tests.lightning.test_checkpoint import assert_resumed, saving, unequal
from tests.lightning.test_fabric import fabric_of, train
from tests.methods import ByMedian, ByNorm, DelayedNesterov, Paced, ZScore
from tests.ranks import agreed, in_ranks, run_processes
from tests.training import inner_optimizer, mlp

GROUPS, STEPS = 4, 16
CUT = [["*0.*", "*2.*"], ["*4.*", "*6.*"]]
CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 1, "mixing": 0.25, "fragments": CUT, "compression": "fp32"}
PAIRS: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5}
ROUTES: dict[str, dict[str, Any]] = {
    "random": {"route": RandomPairs(), **PAIRS},
    "fastest": {"route": FastestPairs(speeds=(1.0, 3.0, 1.0, 2.0)), **PAIRS},
    "ring": {"route": Ring()},
}
METHODS: dict[str, dict[str, Any]] = {
    **ROUTES,
    "selective, z-score, carry": {"schedule": Selective(0.4), "weighing": ZScore(warmup=1), "mixing": Carry()},
    "by norm": {"weighing": ByNorm(0.5)},
    "by median": {"weighing": ByMedian()},
}


def held_by(models: Sequence[nn.Module], finish: Callable[[], Any]) -> list[list[Tensor]]:
    """What each model holds before the end and after it."""
    before = [[whole(parameter) for parameter in model.parameters()] for model in models]
    finish()
    return [[*held, *map(whole, model.parameters())] for held, model in zip(before, models, strict=True)]


def simulated(
    net: Callable[[], nn.Module], inner: str, groups: int, paced: bool = False, micro_batches: int = 1, **choices: Any
) -> list[list[Tensor]]:
    """What each group holds before the end and after it; a paced one is idle in every other step."""

    def loss(model: nn.Module, group: int, step: int, *place: int) -> Tensor:
        last = micro_batches * (step // 2 if paced and group else step)
        losses = [regression(model, group, last - earlier, *place) for earlier in range(micro_batches)]
        return torch.stack(losses).mean()

    def idle(group: int, step: int) -> bool:
        return paced and group == 1 and step % 2 == 1

    run = Groups(groups, inner, lambda _: net(), (), idle, lambda *_: micro_batches, loss=loss, **choices)
    run.until(STEPS)
    return held_by(run.models, run.groups.finish)


def in_simulation(make: Callable[[int], nn.Module]) -> dict[str, list[list[Tensor]]]:
    return {name: simulated(partial(make, 0), "sgd", GROUPS, **{**CHOICES, **METHODS[name]}) for name in METHODS}


def test_sharded_groups_do_what_the_simulation_does_and_on_a_route_save_the_mean(tmp_path: Path) -> None:
    expected = in_simulation(sharded.even)

    def play(rank: int, world_size: int) -> None:
        path, more = tmp_path / "step=6.ckpt", {"save_distributed_checkpoint": False, "steps": STEPS}
        for name, choices in METHODS.items():
            fit = partial(sharded.fit, rank, world_size, GROUPS, (2, 1), **more, **{**CHOICES, **choices})
            plain = fit(callbacks=saving(fits.LIGHTNING, tmp_path, every_n_train_steps=6) if name == "random" else [])
            own = plain["model"].values()
            # The ranks of a group add up in another order.
            assert all(map(partial(torch.allclose, atol=1e-6), own, expected[name][rank // 2][len(own) :])), name
            if name != "random":
                continue
            every: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(every, plain["trace"][6])
            for key, values in torch.load(path, weights_only=True)["state_dict"].items():
                assert torch.equal(values, every[0][f"outer {key}"])
                # The ranks of a group hold it in parts, the first of them by rows.
                of_groups = [torch.cat([every[2 * group][key], every[2 * group + 1][key]]) for group in range(GROUPS)]
                assert torch.allclose(values, torch.stack(of_groups).mean(0), atol=1e-6), key
            assert_resumed(fit(path=path), plain, 6)

    run_processes(play, 2 * GROUPS)


def test_loops_of_fabric_do_what_the_simulation_does(tmp_path: Path) -> None:
    expected = in_simulation(mlp)

    def play(rank: int, world_size: int) -> None:
        for name, choices in METHODS.items():
            fabric = fabric_of(GROUPS, worker_groups=GROUPS, **CHOICES | choices)
            model, optimizer = fabric.setup(net := mlp(0), inner_optimizer("sgd", net))
            for step in range(1, STEPS + 1):
                train(fabric, optimizer, regression(model, rank, step, 0, 1))
            if name in ROUTES:
                # A checkpoint holds what evaluation shows, and neither moves anything.
                fabric.save(tmp_path / name, {"model": model, "optimizer": optimizer})
                with fabric.strategy.evaluate():
                    assert unequal(torch.load(tmp_path / name, weights_only=True)["model"], net.state_dict()) == []
            assert all(map(torch.equal, held_by([net], fabric.strategy.finish)[0], expected[name][rank])), name

    run_processes(play, GROUPS)


# Trainers, with more than 100,000 parameters

SHARED: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": "strided:2", "exchange": "gather"}
POLICIES: dict[str, dict[str, Any]] = {
    **{name: choices for name, choices in METHODS.items() if name not in ROUTES},
    "delayed nesterov": {"outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=2)},
    "random-k": {"compression": "random_k+memory"},
    "random block": {"compression": "random_block"},
    "two shots": {"exchange": TwoShot([0.75, 0.25])},
    "threshold": {"compression": ErrorFeedback(Threshold(1 / 16, Int2(), every=2))},
    "senders": {"compression": ErrorFeedback(TopK(1 / 16, Int2(), over="senders"))},
    # On this machine every link carries the first code in time.
    "by link": {"compression": ByLink(["fp4+memory", "sparse"], within=1000.0)},
    "paced": {"schedule": Selective(0.4)},
    "drop compute": {"compression": "sparse"},
}


def net() -> nn.Module:
    """106,000 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 256), nn.Tanh(), nn.Linear(256, 400), nn.Tanh(), nn.Linear(400, 3))


def test_a_trainer_does_what_the_simulation_does_with_every_policy(tmp_path: Path) -> None:
    expected = {
        name: simulated(net, "adamw", 2, name == "paced", 1 + (name == "drop compute"), **{**SHARED, **choices})
        for name, choices in POLICIES.items()
    }

    def make(distribution: str, inner: str, seed: int) -> Any:
        return fits.module(distribution, inner, net=net())

    def play(rank: int, world_size: int) -> None:
        for name, choices in POLICIES.items():
            loader: Any = fits.Announced((rank, 0, 1), 2 * STEPS)
            more: dict[str, Any] = {"use_distributed_sampler": False}
            if name == "paced":
                loader = Paced(loader, speed=0.5 if rank else 1.0)
            if name == "drop compute":
                loader = DropCompute(2, budget=inf)(loader)
                more |= {"accumulate_grad_batches": 2, "callbacks": [StreamingDiLoCoMonitor(folder=str(tmp_path))]}
            given = {"make": make, "inner": "adamw", "loader": loader, "trainer_choices": more}
            own = fits.fit(rank, 2, 2, STEPS, {**SHARED, **choices}, **given)["model"].values()
            assert all(map(torch.equal, own, expected[name][rank][len(own) :])), name

    run_processes(play, 2)
    assert list(tmp_path.rglob("*.jsonl")), "the monitor has written its records"


@in_ranks(4)
def test_four_groups_begin_with_the_mean_of_their_gradients_where_the_length_of_the_fit_is_known(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_by("lightning_sdiloco.lightning.options", "lightning_sdiloco.lightning.fit")

    def fit(steps: int, path: Path | None = None, save: Path | None = None, **choices: Any) -> tuple[int, list[Tensor]]:
        """Returns how long the warm-up was, and what was learnt."""
        strategy = fits.strategy(**{"sync_every": 20, **choices})
        trainer = fits.trainer(strategy=strategy, devices=4, max_steps=steps)
        model = fits.module()
        trainer.fit(model, fits.batches(rank), ckpt_path=path)
        if save is not None:
            trainer.save_checkpoint(save)
        return strategy.schedule.warmup_steps, [parameter.detach().clone() for parameter in model.parameters()]

    planned, choose = list[int](), StreamingDiLoCo.choose

    def noted(engine: StreamingDiLoCo, settings: Any) -> None:
        planned.append(engine.inner_steps)
        choose(engine, settings)

    monkeypatch.setattr(StreamingDiLoCo, "choose", noted)
    # A machine with other work may be as slow as a link.
    monkeypatch.setattr(fit_module, "_MOST_WAITED", 1.0)
    chosen, values = fit(220, save=tmp_path / "warm.ckpt")
    asked, expected = fit(220, warmup_steps=22)
    assert (chosen, asked) == (22, 22)
    assert all(map(torch.equal, values, expected))
    assert rank or re.search("warmup_steps=22, 10 % of the 220 inner steps .* 4 groups .*: each sends", said[0])
    # A run that goes on keeps the one that it had, and none begins in its midst; a few steps have none.
    assert fit(240, tmp_path / "warm.ckpt")[0] == 22
    assert fit(90, save=tmp_path / "cold.ckpt")[0] == fit(240, tmp_path / "cold.ckpt")[0] == 0
    assert len(said) == (rank == 0)
    # What is measured in its first steps, and chosen then, goes together with it.
    for choices, steps in (({"sync_every": "auto"}, 22), ({"compression": "auto", "warmup_steps": 12}, 12)):
        warmup, values = fit(220, **choices)
        assert planned.pop() < warmup == steps, "the planner has chosen, in the warm-up"
        assert agreed({str(index): value for index, value in enumerate(values)})
    # Where the link is too slow for gradients, it ends soon.
    monkeypatch.undo()
    result = Pending.result
    monkeypatch.setattr(Pending, "result", lambda pending: (sleep(0.02), result(pending))[1])
    assert fit(220)[0] == 9
    assert rank or "ends after 9 inner steps, not after 22: training waits for gradients" in said[-1]
