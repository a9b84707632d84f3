"""The strategy in a real Trainer: both distributions, what users read and are told, what is
counted and saved.
"""

import gc
import importlib
import inspect
import pickle
import pydoc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.lightning.monitor import warn_of_few_rounds
from tests import fits
from tests.bits import same
from tests.fits import SHORT, batches, refusal
from tests.ranks import agreed, in_ranks, run_processes
from tests.training import mlp

REPORT = {
    "inner_steps",
    "launches",
    "landings",
    "flights_dropped",
    "bytes_sent",
    "bytes_received",
    "exposed_wait_s",
}
REPORT |= {"in_flight_s", "outer_lr", "outer_momentum", "mixing"}


@in_ranks(1)
def test_an_engine_that_is_dropped_takes_its_threads_along(rank: int) -> None:
    engine = StreamingDiLoCo(mlp(), sync_every=2, overlap_steps=1, fragments=[["*"]])
    for _ in range(6):
        engine.step()
    threads = [thread for thread in threading.enumerate() if thread.name == "sdiloco-background"]
    assert len(threads) == 3, "one for each stage"
    del engine
    gc.collect()
    for thread in threads:
        thread.join(5 / 3)
    assert not any(thread.is_alive() for thread in threads)


def test_the_name_is_enough_for_a_group_of_each_rank_or_of_each_of_several_nodes(
    distribution: str,
) -> None:
    def run(rank: int, world_size: int, nodes: int) -> Any:
        sizes = {"devices": world_size // nodes, "num_nodes": nodes, "max_steps": 3}
        trainer = fits.trainer(distribution, strategy="streaming_diloco", **sizes)
        trainer.fit(fits.module(distribution), batches(rank))
        strategy = trainer.strategy
        assert type(strategy).__module__ == f"lightning_sdiloco.{distribution.replace('.', '_')}"
        return (
            strategy.topology.num_groups,
            strategy.topology.group_index,
            strategy.report()["inner_steps"],
        )

    assert run_processes(run, 2, 1) == [(2, 0, 3), (2, 1, 3)]
    assert run_processes(run, 4, 2, ranks_per_node=2) == [
        (2, 0, 3),
        (2, 0, 3),
        (2, 1, 3),
        (2, 1, 3),
    ]


@in_ranks(4)
def test_fragments_schedule_report_and_outer_model_can_be_read_after_a_fit(
    rank: int, distribution: str
) -> None:

    def everything() -> Any:
        fragments = list(strategy.fragments)
        return str(strategy.schedule), [f.names for f in fragments], [f.nbytes for f in fragments]

    class Reader(importlib.import_module(distribution).Callback):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            assert (len(strategy.fragments), strategy.schedule.sync_every) == (2, 4)

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            at_end.append((everything(), strategy.outer_state_dict()))

    def training_step(self: Any, parts: list[Tensor], index: int) -> Tensor:
        seen.extend(parts[2].tolist())
        return self.loss(parts)  # type: ignore[no-any-return]

    seen = []
    at_end = []
    torch.manual_seed(rank)
    # With buffers that change, that stay, and that are not saved.
    net = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.BatchNorm1d(3, affine=False)
    )
    net.register_buffer("constant", torch.full((4,), float(rank)))
    net.register_buffer("own", torch.full((4,), float(rank)), persistent=False)
    model = fits.module(distribution, net=net, training_step=training_step)
    strategy = fits.strategy(distribution, **{**SHORT, "worker_groups": 2})
    assert "nothing to read yet: fragments and schedule are known" in refusal(
        everything, kind=RuntimeError
    )
    trainer = fits.trainer(
        distribution, strategy=strategy, devices=4, max_epochs=1, callbacks=[Reader()]
    )
    data = TensorDataset(torch.randn(224, 5), torch.randn(224, 3), torch.arange(224))
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
    ranks: list[Any] = [None] * 4
    torch.distributed.all_gather_object(ranks, seen)
    assert sorted(sum(ranks, [])) == list(range(224))
    (table, names, sizes), outer = everything(), strategy.outer_state_dict()
    assert table.splitlines()[0].split() == ["step", "launches", "lands"]
    assert names == [
        ("net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"),
        ("net.2.weight", "net.2.bias"),
    ]
    assert sizes == [4 * (5 * 8 + 8 + 8 + 8), 4 * (8 * 3 + 3)]
    assert (at_end[0][0], set(strategy.report())) == (everything(), REPORT)
    assert same(at_end[0][1], outer)
    assert list(outer) == list(dict(model.named_parameters()))
    assert same(dict(model.named_parameters()), outer)
    assert agreed(net.state_dict()), "its buffers, too"
    assert not torch.equal(net[1].running_mean, torch.zeros(8))
    # Another model is aligned before it is evaluated.
    other = fits.module(distribution, seed=7 + rank, test_step=lambda self, parts, index: None)
    trainer.test(other, data, verbose=False)
    assert agreed(dict(other.named_parameters()))


def test_help_and_command_line_show_every_argument_with_its_description(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("StreamingDiLoCoStrategy", "StreamingDiLoCoModelParallelStrategy")
    for face, name in product(("lightning_pytorch", "pytorch_lightning"), names):
        kind = getattr(importlib.import_module(f"lightning_sdiloco.{face}"), name)
        arguments = inspect.signature(kind).parameters
        text = (
            pydoc.render_doc(kind, renderer=pydoc.plaintext)
            .partition("Args:")[2]
            .partition("Raises:")[0]
        )
        assert [argument for argument in arguments if f"{argument}: " not in text] == []
        assert text.count("mixing: Share") == 1
        parser = ArgumentParser()
        base = next(
            base for base in kind.__mro__ if not base.__module__.startswith("lightning_sdiloco")
        )
        parser.add_argument("--strategy", type=base.__mro__[2])
        with pytest.raises(SystemExit):
            parser.parse_args([f"--strategy.help=lightning_sdiloco.{face}.{name}"])
        shown = " ".join(capsys.readouterr().out.split())
        assert [argument for argument in arguments if f"--strategy.{argument} " not in shown] == []
        assert "Share of the local parameters kept on landing" in shown
        assert "static_graph" not in shown, "an argument of DistributedDataParallel"
        assert pickle.loads(pickle.dumps(kind(mixing=0.25))).strategy_name.startswith(
            "streaming_diloco"
        )


@in_ranks(2)
def test_rank_0_says_how_many_rounds_fit_and_the_most_steps_that_give_ten(
    rank: int, distribution: str
) -> None:
    def rounds(schedule: Schedule, steps: int) -> int:
        landed = [fragment for step in range(1, steps + 1) for fragment in schedule.landings(step)]
        return min(map(landed.count, range(schedule.fragments)))

    cases: list[tuple[int, dict[str, Any], bool]] = [
        (5, {"max_steps": 16}, True),
        (2, {"max_steps": 21}, False),  # ten rounds
        (2, {"max_epochs": 2}, True),
        (2, {"max_epochs": 4, "accumulate_grad_batches": 4}, True),
        (100, {"fast_dev_run": True}, False),
        (100, {"max_steps": -1, "max_epochs": -1, "max_time": "00:00:00:00"}, False),
    ]
    said = fits.said_by("lightning_sdiloco")
    for sync_every, trained, warns in cases:
        said.clear()
        strategy = fits.strategy(
            distribution, fragments=[["*"]], overlap_steps=1, sync_every=sync_every
        )
        trainer = fits.trainer(distribution, strategy=strategy, devices=2, **trained)
        trainer.fit(fits.module(distribution), fits.SomeBatches(rank, 8))
        told = [text for text in said if "rounds fit" in text]
        assert len(told) == (warns and rank == 0), trained
        if told and "max_steps" in trained:
            assert told == [
                "With sync_every=5 only 3 rounds fit into the 16 inner steps of this fit: the"
                " worker groups learn little from each other, and the loss ends some percent above"
                " DDP's. Choose sync_every=1 and overlap_steps=0 for 10 rounds."
            ]

    # What is named gives ten rounds, and no larger one does.
    for steps, overlap, fragments in product((3, 40, 300), (0, 5, 90), (1, 8)):
        said.clear()
        warn_of_few_rounds(Schedule(100, overlap, fragments), steps)
        (told,) = said
        schedules = {
            every: Schedule(every, min(overlap, every // 4), fragments) for every in range(1, 100)
        }
        enough = [every for every, schedule in schedules.items() if rounds(schedule, steps) >= 10]
        advice = told.partition(" DDP's. ")[2]
        many = (
            f"Choose sync_every={max(enough)} "
            if enough
            else "For 10 rounds train for more inner steps"
        )
        assert advice.startswith(many)


@in_ranks(1)
def test_fits_in_two_threads_of_a_single_process_train_as_each_does_alone(rank: int) -> None:
    choices = {"sync_every": 4, "overlap_steps": 2, "fragments": 2}

    def fit(net: nn.Module) -> Any:
        # Made beforehand, because threads share random numbers.
        make = partial(fits.module, net=net)
        return fits.fit(0, 1, 1, 40, choices, make=lambda *_, **__: make())

    alone = [fit(mlp(seed)) for seed in (1, 2)]
    nets = [mlp(seed) for seed in (1, 2)]
    with ThreadPoolExecutor() as threads:
        together = list(threads.map(fit, nets))
    for one, other in zip(together, alone, strict=True):
        fits.assert_same(one["outer"], other["outer"])
