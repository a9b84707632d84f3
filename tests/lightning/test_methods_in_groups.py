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
    StreamingDiLoCoMonitor,
    TwoShot,
)
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import ByLink, ErrorFeedback, Int2, Threshold, TopK
from lightning_sdiloco.engine.rounds import Rounds
from lightning_sdiloco.lightning import options as options_module
from lightning_sdiloco.lightning.options import Options
from lightning_sdiloco.planning.link import Link
from tests import fits, sharded
from tests.engine.groups import Groups, regression
from tests.fits import at, said_by, whole
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
# By default a Trainer steps elementwise in so few rounds, and the engine does not know their number.
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
    """The parameters of each model before the end and after it."""
    held = [parameters_of(model) for model in models]
    finish()
    for parameters, model in zip(held, models, strict=True):
        parameters += parameters_of(model)
    return held


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [whole(parameter) for parameter in model.parameters()]


def same_end(model: Sequence[Tensor], simulated: Sequence[Tensor]) -> bool:
    """Tells whether parameters are bit-identical to those of a simulated model after its end."""
    return all(map(torch.equal, model, simulated[len(model) :]))


def simulated(
    net: Callable[[], nn.Module],
    inner: str,
    groups: int,
    paced: bool = False,
    micro_batches: int = 1,
    **choices: Any,
) -> list[list[Tensor]]:
    """The parameters of each group before the end and after it; a paced group is idle in every
    other step.
    """

    def loss(model: nn.Module, group: int, step: int, *place: int) -> Tensor:
        trained_steps = step // 2 if paced and group else step
        last = micro_batches * trained_steps
        numbers = [last - earlier for earlier in range(micro_batches)]
        return torch.stack([regression(model, group, n, *place) for n in numbers]).mean()

    def idle(group: int, step: int) -> bool:
        return paced and group == 1 and step % 2 == 1

    run = Groups(
        groups, inner, lambda _: net(), (), idle, lambda *_: micro_batches, loss=loss, **choices
    )
    run.until(STEPS)
    return held_by(run.models, run.groups.finish)


def in_simulation(make: Callable[[int], nn.Module]) -> dict[str, list[list[Tensor]]]:
    return {
        name: simulated(partial(make, 0), "sgd", GROUPS, **{**CHOICES, **choices})
        for name, choices in METHODS.items()
    }


@pytest.mark.slow
def test_sharded_groups_match_the_simulation_and_save_the_mean_on_a_route(
    tmp_path: Path,
) -> None:
    expected = in_simulation(sharded.even)
    path = tmp_path / "step=6.ckpt"
    callbacks = saving(fits.LIGHTNING, tmp_path, every_n_train_steps=6)

    def play(rank: int, world_size: int) -> None:
        for name, method in METHODS.items():
            choices = {**CHOICES, **method, "save_distributed_checkpoint": False, "steps": STEPS}
            fit = partial(sharded.fit, rank, world_size, GROUPS, (2, 1), **choices)
            saves = name == "random"
            plain = fit(callbacks=callbacks if saves else [])
            model = list(plain["model"].values())
            in_simulation = expected[name][rank // 2][len(model) :]
            # The ranks of a group add up in another order, which a weighing may amplify.
            assert all(map(partial(torch.allclose, atol=1e-5), model, in_simulation)), name
            if saves:
                assert_holds_the_mean(path, plain["trace"][6])
                assert_resumed(fit(path=path), plain, 6)

    run_processes(play, 2 * GROUPS)


def assert_holds_the_mean(path: Path, held: dict[str, Tensor]) -> None:
    """A file holds the mean of the groups, whose two ranks each hold a part, by rows."""
    ranks: list[Any] = [None] * (2 * GROUPS)
    torch.distributed.all_gather_object(ranks, held)
    for key, values in torch.load(path, weights_only=True)["state_dict"].items():
        assert torch.equal(values, ranks[0][f"outer {key}"])
        parts = [rank[key] for rank in ranks]
        groups = [torch.cat(parts[first : first + 2]) for first in range(0, 2 * GROUPS, 2)]
        assert torch.allclose(values, torch.stack(groups).mean(0), atol=1e-6), key


def test_loops_of_fabric_match_the_simulation(tmp_path: Path) -> None:
    expected = in_simulation(mlp)

    def play(rank: int, world_size: int) -> None:
        for name, method in METHODS.items():
            fabric = fabric_of(GROUPS, worker_groups=GROUPS, **CHOICES | method)
            net = mlp(0)
            model, optimizer = fabric.setup(net, inner_optimizer("sgd", net))
            for step in range(1, STEPS + 1):
                train(fabric, optimizer, regression(model, rank, step, 0, 1))
            if name in ROUTES:
                # A checkpoint holds what evaluation shows, and neither moves anything.
                fabric.save(tmp_path / name, {"model": model, "optimizer": optimizer})
                with fabric.strategy.evaluate():
                    saved = torch.load(tmp_path / name, weights_only=True)["model"]
                    assert unequal(saved, net.state_dict()) == []
            (parameters,) = held_by([net], fabric.strategy.finish)
            assert all(map(torch.equal, parameters, expected[name][rank])), name

    run_processes(play, GROUPS)


# Trainers, with more than 100,000 parameters

SHARED: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "fragments": "strided:2",
    "exchange": "gather",
    **EQUALISED,
}
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


def simulated_policy(name: str) -> list[list[Tensor]]:
    micro_batches = 2 if name == "drop compute" else 1
    choices = {**SHARED, **POLICIES[name]}
    return simulated(net, "adamw", 2, name == "paced", micro_batches, **choices)


def fit_policy(rank: int, name: str, folder: Path) -> list[Tensor]:
    """Fits in a Trainer; returns the parameters."""
    trainer_choices: dict[str, Any] = {"use_distributed_sampler": False}
    loader: Any = fits.Announced((rank, 0, 1), 2 * STEPS)
    if name == "paced":
        loader = Paced(loader, speed=0.5 if rank else 1.0)
    if name == "drop compute":
        loader = DropCompute(2, budget=inf)(loader)
        trainer_choices["accumulate_grad_batches"] = 2
        trainer_choices["callbacks"] = [StreamingDiLoCoMonitor(folder=str(folder))]
    fitted = fits.fit(
        rank,
        2,
        2,
        STEPS,
        {**SHARED, **POLICIES[name]},
        inner="adamw",
        make=lambda distribution, inner, seed: fits.module(distribution, inner, net=net()),
        loader=loader,
        trainer_choices=trainer_choices,
    )
    return list(fitted["model"].values())


def test_a_trainer_matches_the_simulation_with_every_policy(tmp_path: Path) -> None:
    expected = {name: simulated_policy(name) for name in POLICIES}

    def play(rank: int, world_size: int) -> None:
        for name in POLICIES:
            assert same_end(fit_policy(rank, name, tmp_path), expected[name][rank]), name

    run_processes(play, 2)
    assert list(tmp_path.rglob("*.jsonl")), "the monitor has written its records"


class Pretended:
    """The link that rank 0 measures, the inner steps at which settings were chosen, and the last
    of these settings.
    """

    def __init__(self) -> None:
        self.link = Link(gbit_s=1.0, round_trip=0.001)
        self.chosen_at: list[int] = []
        self.settings = Settings()

    def measure_link(self, *_: Any) -> Link:
        """Each rank measures another link; that of rank 0 counts."""
        return self.link if torch.distributed.get_rank() == 0 else Link(1e-9, 0.1)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """Inner steps of a second, links, and four groups where a dense beginning needs eight."""
    pretended = Pretended()
    choose = Rounds.choose

    def choose_and_note(rounds: Rounds, settings: Any, step: int) -> None:
        pretended.chosen_at.append(step)
        pretended.settings = settings
        choose(rounds, settings, step)

    monkeypatch.setattr("lightning_sdiloco.algorithm.config._FEWEST_FOR_DENSE", 4)
    monkeypatch.setattr("lightning_sdiloco.algorithm.config._DENSE_SHARE", 0.1)
    monkeypatch.setattr(options_module, "measure_link", pretended.measure_link)
    monkeypatch.setattr(Options, "step_time", lambda options: 1.0)
    monkeypatch.setattr(Rounds, "choose", choose_and_note)
    return pretended


def stop_training(trainer: Any) -> None:
    trainer.should_stop = True


def fit_dense(
    rank: int,
    path: Path | None = None,
    save: Path | None = None,
    steps: int = 240,
    stop: int = 60,
    **choices: Any,
) -> tuple[DenseBeginning | None, list[Tensor]]:
    """Returns the dense beginning of a fit, and the parameters that it has trained.

    The fit, of so many steps, is stopped soon after its dense beginning.
    """
    strategy = fits.strategy(**{"sync_every": 20, **choices})
    stopping = at({stop: stop_training})
    trainer = fits.trainer(strategy=strategy, devices=4, max_steps=steps, callbacks=[stopping])
    model = fits.module()
    trainer.fit(model, fits.batches(rank), ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    return strategy.schedule.dense, parameters_of(model)


CHOSEN_DENSE = (
    r"DenseBeginning\(rounds=6.*first 24 of the 240 inner steps .*10 %.*"
    r" 4 groups exchange every 4 .* 1 Gbit/s"
)


@in_ranks(4)
def test_many_groups_begin_with_dense_rounds_as_short_as_the_link_hides(
    rank: int, tmp_path: Path, pretended: Pretended
) -> None:
    messages = said_by("lightning_sdiloco.lightning.options")
    fit = partial(fit_dense, rank)
    dense_path = tmp_path / "dense.ckpt"
    short_path = tmp_path / "short.ckpt"
    by_default, parameters = fit(save=dense_path)
    assert pretended.chosen_at == [3], "before the first launch would be due"
    assert rank or re.search(CHOSEN_DENSE, messages[0])
    by_choice, expected = fit(dense_beginning=DenseBeginning(6))
    assert by_default == DenseBeginning(6)
    assert by_choice == DenseBeginning(6)
    assert all(map(torch.equal, parameters, expected))
    # A resumed run has the dense beginning of its checkpoint, whatever the length of the fit; a
    # short fit begins without.
    resumed, _ = fit(dense_path, steps=260, stop=64)
    short, _ = fit(save=short_path, steps=80)
    resumed_short, _ = fit(short_path, steps=260, stop=64)
    assert resumed == by_default
    assert short is None
    assert resumed_short is None
    assert len(messages) == (rank == 0)


@in_ranks(4)
def test_a_slower_link_gets_longer_dense_rounds_and_one_that_is_too_slow_none(
    rank: int, pretended: Pretended
) -> None:
    messages = said_by("lightning_sdiloco.lightning.options")
    pretended.link = Link(gbit_s=1e-6, round_trip=0.001)
    dense, parameters = fit_dense(rank)
    assert dense == DenseBeginning(3, 8)
    assert agreed({str(index): values for index, values in enumerate(parameters)})
    pretended.link = Link(gbit_s=3e-7, round_trip=0.001)
    dense, parameters = fit_dense(rank)
    _, expected = fit_dense(rank, dense_beginning=None)
    assert dense is None
    assert all(map(torch.equal, parameters, expected))
    warning = "Chosen: dense_beginning=None, because training would wait for the link"
    assert rank or warning in messages[-1]


@in_ranks(4)
def test_the_planner_chooses_before_the_dense_beginning_after_more_inner_steps(
    rank: int, pretended: Pretended
) -> None:
    dense, _ = fit_dense(rank, steps=600, compression="auto", sync_every=50)
    assert pretended.chosen_at[-1] == 8
    assert dense == DenseBeginning(3, 16)
    dense, _ = fit_dense(rank, steps=600, sync_every="auto")
    assert pretended.chosen_at[-1] == 8
    assert dense is None, "rounds of 30 are too short"


@in_ranks(4)
def test_rounds_that_follow_the_length_are_chosen_with_the_dense_beginning(
    rank: int, pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options_module, "_LEAST_BYTES", 0)
    dense, _ = fit_dense(rank, steps=600, sync_every=None)
    assert pretended.chosen_at == [3]
    assert pretended.settings.sync_every == 10
    assert dense == DenseBeginning(15)
    pretended.link = Link(gbit_s=3e-7, round_trip=0.001)
    dense, _ = fit_dense(rank, steps=600, sync_every=None)
    assert pretended.settings.sync_every == 54
    assert dense is None
