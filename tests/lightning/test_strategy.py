"""The strategy in a real Trainer: both distributions, the values and messages that users read,
counts and saved models.
"""

import gc
import importlib
import inspect
import pickle
import pydoc
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, NamedTuple

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
    "in_flight_s",
    "outer_lr",
    "outer_momentum",
    "mixing",
}


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
        topology = strategy.topology
        return topology.num_groups, topology.group_index, strategy.report()["inner_steps"]

    of_first = 2, 0, 3
    of_second = 2, 1, 3
    assert run_processes(run, 2, 1) == [of_first, of_second]
    nodes = run_processes(run, 4, 2, ranks_per_node=2)
    assert nodes == [of_first, of_first, of_second, of_second]


class Read(NamedTuple):
    """The schedule and the fragments of a strategy."""

    schedule: str
    names: list[tuple[str, ...]]
    sizes: list[int]


def read(strategy: Any) -> Read:
    fragments = list(strategy.fragments)
    names = [fragment.names for fragment in fragments]
    return Read(str(strategy.schedule), names, [fragment.nbytes for fragment in fragments])


class Reader:
    """Reads a strategy at the start and at the end of a fit."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.ends: list[tuple[Read, dict[str, Tensor]]] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        assert len(self.strategy.fragments) == 2
        assert self.strategy.schedule.sync_every == 4

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.ends.append((read(self.strategy), self.strategy.outer_state_dict()))


def net_with_buffers(rank: int) -> nn.Sequential:
    """A net with buffers that change, that stay, and that are not saved."""
    net = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.BatchNorm1d(3, affine=False)
    )
    net.register_buffer("constant", torch.full((4,), float(rank)))
    net.register_buffer("unsaved", torch.full((4,), float(rank)), persistent=False)
    return net


@in_ranks(4)
def test_fragments_schedule_report_and_outer_model_can_be_read_after_a_fit(
    rank: int, distribution: str
) -> None:
    strategy = fits.strategy(distribution, **{**SHORT, "worker_groups": 2})
    reader = Reader(strategy)
    message = refusal(read, strategy, kind=RuntimeError)
    assert "no results yet. The fragments and the schedule are available" in message
    seen: list[int] = []

    def training_step(self: Any, parts: list[Tensor], index: int) -> Tensor:
        seen.extend(parts[2].tolist())
        return self.loss(parts)  # type: ignore[no-any-return]

    torch.manual_seed(rank)
    model = fits.module(distribution, net=net_with_buffers(rank), training_step=training_step)
    hooks = {"on_fit_start": reader.on_fit_start, "on_fit_end": reader.on_fit_end}
    callbacks = [fits.on(distribution, **hooks)]
    trainer = fits.trainer(
        distribution, strategy=strategy, devices=4, max_epochs=1, callbacks=callbacks
    )
    samples = TensorDataset(torch.randn(224, 5), torch.randn(224, 3), torch.arange(224))
    trainer.fit(model, DataLoader(samples, batch_size=4, shuffle=True))
    assert_seen_once(seen, len(samples))
    assert set(strategy.report()) == REPORT
    assert_read(read(strategy))
    outer = strategy.outer_state_dict()
    ((read_at_end, outer_at_end),) = reader.ends
    assert read_at_end == read(strategy)
    assert same(outer_at_end, outer)
    assert list(outer) == [name for name, _ in model.named_parameters()]
    assert same(dict(model.named_parameters()), outer)
    assert agreed(model.net.state_dict()), "its buffers, too"
    assert not torch.equal(model.net[1].running_mean, torch.zeros(8))
    # Another model is aligned before it is evaluated.
    evaluated = fits.module(distribution, seed=7 + rank, test_step=lambda self, parts, index: None)
    trainer.test(evaluated, samples, verbose=False)
    assert agreed(dict(evaluated.named_parameters()))


def assert_seen_once(seen: list[int], samples: int) -> None:
    """The ranks have seen each sample once, together."""
    ranks: list[Any] = [None] * 4
    torch.distributed.all_gather_object(ranks, seen)
    assert sorted(sum(ranks, [])) == list(range(samples))


def assert_read(values: Read) -> None:
    header = values.schedule.splitlines()[0]
    assert header.split() == ["step", "launches", "lands"]
    assert values.names == [
        ("net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"),
        ("net.2.weight", "net.2.bias"),
    ]
    assert values.sizes == [4 * (5 * 8 + 8 + 8 + 8), 4 * (8 * 3 + 3)]


def test_help_and_command_line_show_every_argument_with_its_description(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("StreamingDiLoCoStrategy", "StreamingDiLoCoModelParallelStrategy")
    for face, name in product(("lightning_pytorch", "pytorch_lightning"), names):
        kind = getattr(importlib.import_module(f"lightning_sdiloco.{face}"), name)
        arguments = inspect.signature(kind).parameters
        help_text = pydoc.render_doc(kind, renderer=pydoc.plaintext)
        described = help_text.partition("Args:")[2].partition("Raises:")[0]
        assert [argument for argument in arguments if f"{argument}: " not in described] == []
        assert described.count("mixing: The share") == 1
        print_help(f"lightning_sdiloco.{face}.{name}", base_of_lightning(kind))
        shown = " ".join(capsys.readouterr().out.split())
        assert [argument for argument in arguments if f"--strategy.{argument} " not in shown] == []
        assert "share of the local parameters that is kept on landing" in shown
        assert "static_graph" not in shown, "an argument of DistributedDataParallel"
        unpickled = pickle.loads(pickle.dumps(kind(mixing=0.25)))
        assert unpickled.strategy_name.startswith("streaming_diloco")


def base_of_lightning(kind: type) -> type:
    """The general strategy of Lightning that a strategy of ours extends."""
    bases = [base for base in kind.__mro__ if not base.__module__.startswith("lightning_sdiloco")]
    return bases[0].__mro__[2]


def print_help(class_path: str, base: type) -> None:
    parser = ArgumentParser()
    parser.add_argument("--strategy", type=base)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--strategy.help={class_path}"])


def rounds_that_fit(schedule: Schedule, steps: int) -> int:
    landed = [fragment for step in range(1, steps + 1) for fragment in schedule.landings(step)]
    return min(landed.count(fragment) for fragment in range(schedule.fragments))


class Length(NamedTuple):
    """A fit of a length, and whether it is warned of few rounds."""

    sync_every: int
    choices: dict[str, Any]
    warns: bool


LENGTHS = (
    Length(5, {"max_steps": 16}, True),
    Length(2, {"max_steps": 21}, False),  # ten rounds
    Length(2, {"max_epochs": 2}, True),
    Length(2, {"max_epochs": 4, "accumulate_grad_batches": 4}, True),
    Length(100, {"fast_dev_run": True}, False),
    Length(100, {"max_steps": -1, "max_epochs": -1, "max_time": "00:00:00:00"}, False),
)


@in_ranks(2)
def test_rank_0_says_how_many_rounds_fit_and_the_most_steps_that_give_ten(
    rank: int, distribution: str
) -> None:
    messages = fits.said_by("lightning_sdiloco")
    for sync_every, choices, warns in LENGTHS:
        messages.clear()
        settings = {"fragments": [["*"]], "overlap_steps": 1, "sync_every": sync_every}
        strategy = fits.strategy(distribution, **settings)
        trainer = fits.trainer(distribution, strategy=strategy, devices=2, **choices)
        trainer.fit(fits.module(distribution), fits.SomeBatches(rank, 8))
        warnings = [message for message in messages if "rounds fit" in message]
        assert len(warnings) == (warns and rank == 0), choices
        if warnings and "max_steps" in choices:
            assert warnings == [
                "With sync_every=5, only 3 rounds fit into the 16 inner steps of this fit. The"
                " worker groups benefit little from each other, and the final loss will be a few"
                " percent higher than with DDP. Choose sync_every=1 and overlap_steps=0 to get 10"
                " rounds."
            ]


def test_the_advised_steps_give_ten_rounds_and_no_more_steps_do() -> None:
    messages = fits.said_by("lightning_sdiloco")
    for steps, overlap, fragments in product((3, 40, 300), (0, 5, 90), (1, 8)):
        messages.clear()
        warn_of_few_rounds(Schedule(100, overlap, fragments), steps)
        (warning,) = messages
        enough = []
        for sync_every in range(1, 100):
            schedule = Schedule(sync_every, min(overlap, sync_every // 4), fragments)
            if rounds_that_fit(schedule, steps) >= 10:
                enough.append(sync_every)
        expected = "To get 10 rounds, train for more inner steps"
        if enough:
            expected = f"Choose sync_every={max(enough)} "
        advice = warning.partition(" with DDP. ")[2]
        assert advice.startswith(expected)


@in_ranks(1)
def test_fits_in_two_threads_of_a_single_process_train_as_each_does_alone(rank: int) -> None:
    choices = {"sync_every": 4, "overlap_steps": 2, "fragments": 2}

    def fit(net: nn.Module) -> Any:
        # The net exists before, because threads share random numbers.
        return fits.fit(0, 1, 1, 40, choices, make=lambda *_, **__: fits.module(net=net))

    alone = [fit(mlp(seed)) for seed in (1, 2)]
    nets = [mlp(seed) for seed in (1, 2)]
    with ThreadPoolExecutor() as threads:
        together = list(threads.map(fit, nets))
    for actual, expected in zip(together, alone, strict=True):
        fits.assert_same(actual["outer"], expected["outer"])
