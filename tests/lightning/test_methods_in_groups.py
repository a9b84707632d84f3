"""Methods do what the simulation does: in Trainers, in loops of Fabric, and where ranks of a group
share one model.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import (
    Carry,
    DenseBeginning,
    DropCompute,
    OuterOptimizer,
    RandomPairs,
    Ring,
    Selective,
    StreamingDiLoCo,
    StreamingDiLoCoMonitor,
    TwoShot,
)
from lightning_sdiloco.compression import ByLink, ErrorFeedback, Int2, Threshold, TopK
from lightning_sdiloco.lightning import options as options_module
from lightning_sdiloco.lightning.options import Options
from lightning_sdiloco.planning.link import Link
from tests import fits, sharded
from tests.engine.groups import Groups, regression
from tests.fits import said_by, whole
from tests.lightning.test_checkpoint import assert_resumed, saving, unequal
from tests.lightning.test_fabric import fabric_of, train
from tests.methods import ByMedian, ByNorm, DelayedNesterov, FastestPairs, Paced, ZScore
from tests.ranks import agreed, in_ranks, run_processes
from tests.training import inner_optimizer, mlp

GROUPS = 4
STEPS = 16
CUT = [["*0.*", "*2.*"], ["*4.*", "*6.*"]]
CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 1,
    "mixing": 0.25,
    "fragments": CUT,
    "compression": "fp32",
}
# By itself a Trainer steps elementwise in so few rounds, and the engine does not know how many
# there are.
EQUALISED = {"outer_optimizer": OuterOptimizer(direction="equalised")}
PAIRS: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5}
ROUTES: dict[str, dict[str, Any]] = {
    "random": {"route": RandomPairs(), **PAIRS},
    "fastest": {"route": FastestPairs(speeds=(1.0, 3.0, 1.0, 2.0)), **PAIRS},
    "ring": {"route": Ring()},
}
METHODS: dict[str, dict[str, Any]] = {
    **ROUTES,
    "selective, z-score, carry": {
        "schedule": Selective(0.4),
        "weighing": ZScore(warmup=1),
        "mixing": Carry(),
        **EQUALISED,
    },
    "by norm": {"weighing": ByNorm(0.5), **EQUALISED},
    "by median": {"weighing": ByMedian(), **EQUALISED},
}


def held_by(models: Sequence[nn.Module], finish: Callable[[], Any]) -> list[list[Tensor]]:
    """What each model holds before the end and after it."""
    before = [[whole(parameter) for parameter in model.parameters()] for model in models]
    finish()
    return [
        [*held, *map(whole, model.parameters())] for held, model in zip(before, models, strict=True)
    ]


def simulated(
    net: Callable[[], nn.Module],
    inner: str,
    groups: int,
    paced: bool = False,
    micro_batches: int = 1,
    **choices: Any,
) -> list[list[Tensor]]:
    """What each group holds before the end and after it; a paced one is idle in every other
    step.
    """

    def loss(model: nn.Module, group: int, step: int, *place: int) -> Tensor:
        last = micro_batches * (step // 2 if paced and group else step)
        losses = [
            regression(model, group, last - earlier, *place) for earlier in range(micro_batches)
        ]
        return torch.stack(losses).mean()

    def idle(group: int, step: int) -> bool:
        return paced and group == 1 and step % 2 == 1

    run = Groups(
        groups, inner, lambda _: net(), (), idle, lambda *_: micro_batches, loss=loss, **choices
    )
    run.until(STEPS)
    return held_by(run.models, run.groups.finish)


def in_simulation(make: Callable[[int], nn.Module]) -> dict[str, list[list[Tensor]]]:
    return {
        name: simulated(partial(make, 0), "sgd", GROUPS, **{**CHOICES, **METHODS[name]})
        for name in METHODS
    }


def test_sharded_groups_match_the_simulation_and_save_the_mean_on_a_route(
    tmp_path: Path,
) -> None:
    expected = in_simulation(sharded.even)

    def play(rank: int, world_size: int) -> None:
        path = tmp_path / "step=6.ckpt"
        more = {"save_distributed_checkpoint": False, "steps": STEPS}
        for name, choices in METHODS.items():
            fit = partial(
                sharded.fit, rank, world_size, GROUPS, (2, 1), **more, **{**CHOICES, **choices}
            )
            plain = fit(
                callbacks=saving(fits.LIGHTNING, tmp_path, every_n_train_steps=6)
                if name == "random"
                else []
            )
            own = plain["model"].values()
            # The ranks of a group add up in another order.
            assert all(
                map(partial(torch.allclose, atol=1e-6), own, expected[name][rank // 2][len(own) :])
            ), name
            if name != "random":
                continue
            every: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(every, plain["trace"][6])
            for key, values in torch.load(path, weights_only=True)["state_dict"].items():
                assert torch.equal(values, every[0][f"outer {key}"])
                # The ranks of a group hold it in parts, the first of them by rows.
                of_groups = [
                    torch.cat([every[2 * group][key], every[2 * group + 1][key]])
                    for group in range(GROUPS)
                ]
                assert torch.allclose(values, torch.stack(of_groups).mean(0), atol=1e-6), key
            assert_resumed(fit(path=path), plain, 6)

    run_processes(play, 2 * GROUPS)


def test_loops_of_fabric_match_the_simulation(tmp_path: Path) -> None:
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
                    assert (
                        unequal(
                            torch.load(tmp_path / name, weights_only=True)["model"],
                            net.state_dict(),
                        )
                        == []
                    )
            assert all(
                map(torch.equal, held_by([net], fabric.strategy.finish)[0], expected[name][rank])
            ), name

    run_processes(play, GROUPS)


# Trainers, with more than 100,000 parameters

SHARED: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "fragments": "strided:2",
    "exchange": "gather",
}
SHARED |= EQUALISED
POLICIES: dict[str, dict[str, Any]] = {
    **{name: choices for name, choices in METHODS.items() if name not in ROUTES},
    "delayed nesterov": {
        "outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=2)
    },
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
    return nn.Sequential(
        nn.Linear(5, 256), nn.Tanh(), nn.Linear(256, 400), nn.Tanh(), nn.Linear(400, 3)
    )


def test_a_trainer_matches_the_simulation_with_every_policy(tmp_path: Path) -> None:
    expected = {
        name: simulated(
            net, "adamw", 2, name == "paced", 1 + (name == "drop compute"), **{**SHARED, **choices}
        )
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
                more |= {
                    "accumulate_grad_batches": 2,
                    "callbacks": [StreamingDiLoCoMonitor(folder=str(tmp_path))],
                }
            given = {"make": make, "inner": "adamw", "loader": loader, "trainer_choices": more}
            own = fits.fit(rank, 2, 2, STEPS, {**SHARED, **choices}, **given)["model"].values()
            assert all(map(torch.equal, own, expected[name][rank][len(own) :])), name

    run_processes(play, 2)
    assert list(tmp_path.rglob("*.jsonl")), "the monitor has written its records"


@in_ranks(4)
def test_many_groups_begin_with_dense_rounds_as_short_as_the_link_hides(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_by("lightning_sdiloco.lightning.options")
    # Eight groups take too long here.
    monkeypatch.setattr("lightning_sdiloco.algorithm.config._FEWEST_FOR_DENSE", 4)
    monkeypatch.setattr("lightning_sdiloco.algorithm.config._DENSE_SHARE", 0.1)
    # An inner step of a second, and links of which each rank measures another one.
    links = [Link(gbit_s=1.0, round_trip=0.001)]
    monkeypatch.setattr(
        options_module, "measure_link", lambda *_: links[0] if rank == 0 else Link(1e-9, 0.1)
    )
    monkeypatch.setattr(Options, "step_time", lambda options: 1.0)
    chosen_at = list[int]()
    choose = StreamingDiLoCo.choose

    def noted(engine: StreamingDiLoCo, settings: Any) -> None:
        chosen_at.append(engine.inner_steps)
        choose(engine, settings)

    monkeypatch.setattr(StreamingDiLoCo, "choose", noted)

    def fit(
        path: Path | None = None, save: Path | None = None, steps: int = 240, **choices: Any
    ) -> tuple[DenseBeginning | None, list[Tensor]]:
        """Returns the dense beginning of a fit, and what was learnt."""
        strategy = fits.strategy(**{"sync_every": 20, **choices})
        trainer = fits.trainer(strategy=strategy, devices=4, max_steps=steps)
        model = fits.module()
        trainer.fit(model, fits.batches(rank), ckpt_path=path)
        if save is not None:
            trainer.save_checkpoint(save)
        return strategy.schedule.dense, [
            parameter.detach().clone() for parameter in model.parameters()
        ]

    chosen, values = fit(save=tmp_path / "dense.ckpt")
    assert chosen_at == [3], "before the first launch would be due"
    told = r"DenseBeginning\(rounds=6.*first 24 of the 240 inner steps .* 10 %.* 4 groups exchange every 4 .* 1 Gbit/s"
    assert rank or re.search(told, said[0])
    asked, expected = fit(dense_beginning=DenseBeginning(6))
    assert (chosen, asked) == (DenseBeginning(6), DenseBeginning(6))
    assert all(map(torch.equal, values, expected))
    # A run that goes on has what its checkpoint has, whatever the length of the fit; a short one
    # begins without.
    assert fit(tmp_path / "dense.ckpt", steps=260)[0] == chosen
    assert fit(save=tmp_path / "short.ckpt", steps=80)[0] is None
    assert fit(tmp_path / "short.ckpt", steps=260)[0] is None
    assert len(said) == (rank == 0)
    # A slower link gets longer rounds, and one that is too slow for them none.
    links[0] = Link(gbit_s=1e-6, round_trip=0.001)
    chosen, values = fit()
    assert (chosen, agreed({str(index): value for index, value in enumerate(values)})) == (
        DenseBeginning(3, 8),
        True,
    )
    links[0] = Link(gbit_s=3e-7, round_trip=0.001)
    chosen, values = fit()
    _, expected = fit(dense_beginning=None)
    assert chosen is None
    assert all(map(torch.equal, values, expected))
    assert (
        rank or "Chosen: dense_beginning=None, because training would wait for the link" in said[-1]
    )
    # What the planner chooses comes first, after more inner steps.
    links[0] = Link(gbit_s=1.0, round_trip=0.001)
    for planned in ({"compression": "auto", "sync_every": 50}, {"sync_every": "auto"}):
        chosen, _ = fit(steps=600, **planned)
        assert chosen_at[-1] == 8
        assert chosen == (DenseBeginning(3, 16) if planned["sync_every"] == 50 else None), (
            "rounds of 30 are too short"
        )
