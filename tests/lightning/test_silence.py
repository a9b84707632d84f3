"""Between launches no group waits for another, and decisions on time are made by all at the same
inner step.
"""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torchmetrics import MeanMetric

from lightning_sdiloco import DenseBeginning
from tests import fits
from tests.fits import LIGHTNING, OTHER, callbacks_of, fit, said_by, saving
from tests.lightning.test_fabric import fabric_of, train
from tests.ranks import agreed, in_ranks
from tests.training import batch, inner_optimizer, mlp

STALLED_AT = 30
STALL_SECONDS = 2.0
Batch = tuple[Tensor, Tensor]


def log_and_stall(self: Any, parts: Batch, index: int) -> Tensor:
    """Gathers, computes and logs all that a batch may; once, the second group stalls."""
    rank = self.global_rank
    if index + 1 == STALLED_AT and rank >= 2:
        time.sleep(STALL_SECONDS)
    self.started[index + 1] = time.monotonic()
    self.computed.update(float(rank))
    gathered = self.all_gather(torch.tensor(float(rank))).tolist()
    self.seen = [*gathered, float(self.computed.compute()), float(self.logged(float(rank)))]
    self.log("metric", self.logged, on_step=False, on_epoch=True)
    loss: Tensor = self.loss(parts)
    self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
    self.log("rank", float(rank), sync_dist=True)
    return loss


def log_after_batch(self: Any, *args: Any) -> None:
    self.log("after", 1.0, sync_dist=True)
    self.per_batch = float(self.trainer.callback_metrics["rank"])


def stalling_module(*args: Any, **kwargs: Any) -> Any:
    hooks = {"training_step": log_and_stall, "on_train_batch_end": log_after_batch}
    module = fits.module(*args, **kwargs, **hooks, started={})
    module.computed = MeanMetric()
    module.logged = MeanMetric(dist_sync_on_step=True)
    return module


def inspect(trainer: Any, module: Any) -> tuple[Any, list[float]]:
    """The module, and what is logged of the epoch."""
    replaced = {"_check_time_remaining", "on_advance_end", "get_metrics"}
    for callback in trainer.callbacks:
        assert not replaced & set(vars(callback)), "undone after the fit"
    assert module.computed.dist_sync_fn is None
    return module, [float(trainer.callback_metrics[name]) for name in ("metric", "loss_epoch")]


@in_ranks(4)
def test_a_group_that_stalls_between_launches_keeps_none_waiting(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    """With everything on that Lightning would broadcast at every batch."""
    messages = said_by("lightning_sdiloco")
    arguments = {
        "max_time": "00:01:00:00",
        "callbacks": saving(distribution, tmp_path, train_time_interval=timedelta(hours=1)),
        "enable_checkpointing": True,
    }
    trained = fit(
        rank,
        4,
        2,
        45,
        {"sync_every": 20, "overlap_steps": 5, "fragments": [["*"]]},
        distribution,
        inspect=inspect,
        trainer_choices=arguments,
        make=stalling_module,
    )
    module, of_epoch = trained["inspected"]
    # In a batch all numbers are of the group, and those of an epoch of the world.
    first = rank // 2 * 2.0
    mean = first + 0.5
    assert [*module.seen, module.per_batch] == [first, first + 1, mean, mean, mean]
    assert of_epoch[0] == 1.5
    assert agreed(of_epoch)
    assert not [text for text in messages if "in a row" in text], "no gather is over all ranks"
    # One launch landed at 25, the next is at 40: in between group 0 must not wait. And it does
    # wait, at the landing after inner step 45 at the latest, or the test would show nothing.
    started: list[Any] = [None] * 4
    dist.all_gather_object(started, module.started)
    assert started[0][39] < started[3][STALLED_AT]
    assert len(started[0]) == len(started[3]) == 45


@in_ranks(2)
def test_time_limits_and_saves_by_time_are_those_of_all_ranks(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    saved: list[int] = []

    def train_slowly(self: Any, parts: Batch, index: int) -> Any:
        time.sleep(0.02)
        return self.loss(parts)

    def note(self: Any, checkpoint: Any) -> None:
        saved.append(self.trainer.global_step)

    # The ranks' own clocks would make them save after different steps.
    interval = timedelta(seconds=0.3 + 0.2 * rank)
    arguments = {
        "callbacks": saving(distribution, tmp_path, train_time_interval=interval),
        "enable_checkpointing": True,
        "max_time": {"seconds": 2},
    }
    choices = {"sync_every": 10, "overlap_steps": 3, "fragments": [["*"]]}
    make = partial(fits.module, training_step=train_slowly, on_save_checkpoint=note)
    trained = fit(rank, 2, 2, 10_000, choices, distribution, trainer_choices=arguments, make=make)
    steps = trained["report"]["inner_steps"]
    assert agreed([steps, saved])
    assert steps < 10_000
    assert len({*saved}) == len(saved) == len(list(tmp_path.glob("*.ckpt"))) >= 2
    assert {step % 10 for step in (steps, *saved)} == {3}, "decisions are read at a landing"


# Collectives of your own over all ranks


CHOICES = {
    "sync_every": 4,
    "overlap_steps": 1,
    "dense_beginning": DenseBeginning(2, 2),
}


def gathered(tensor: Tensor) -> Tensor:
    return torch.stack(all_gather(tensor))


def gather_and_log(self: Any, parts: Batch, index: int) -> Tensor:
    seen = self.net(parts[0])
    if index % self.interval == 0:
        seen = gathered(seen)
    loss = seen.square().mean()
    self.mean.update(loss)
    self.log("mean", self.mean)
    self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
    if not self.automatic_optimization:
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()
    return loss


def log_score(self: Any, parts: Batch, index: int) -> None:
    self.log("score", self.net(parts[0]).mean(), sync_dist=True)


class Gathering(NamedTuple):
    """A fit that gathers over all ranks in intervals of batches."""

    groups: int
    interval: int
    distribution: str = LIGHTNING
    is_manual: bool = False


def fit_gathering(rank: int, folder: Path, case: Gathering) -> None:
    """Fits normalise, measure and log over all ranks, validate, save and may stop."""
    module = fits.module(
        case.distribution,
        "adamw",
        net=nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.Linear(3, 3)),
        training_step=gather_and_log,
        validation_step=log_score,
        interval=case.interval,
    )
    module.mean = MeanMetric()
    module.automatic_optimization = not case.is_manual
    callbacks = callbacks_of(case.distribution)
    checkpoint = callbacks.ModelCheckpoint(folder, every_n_train_steps=1, monitor="loss")
    arguments = {
        "callbacks": [checkpoint, callbacks.EarlyStopping("score", patience=100)],
        "enable_checkpointing": True,
        "max_epochs": 2,
        "max_time": "00:01:00:00",
        "val_check_interval": 2,
        "limit_val_batches": 1,
    }
    loader = fits.SomeBatches(rank, 6)
    trained = fit(
        rank,
        2,
        case.groups,
        -1,
        CHOICES,
        case.distribution,
        trainer_choices=arguments,
        make=lambda *_, **__: module,
        loader=loader,
        validation=loader,
    )
    assert trained["report"]["inner_steps"] == 12


def loop_gathering(rank: int, groups: int, gathers: bool) -> None:
    fabric = fabric_of(2, worker_groups=groups, fragments="strided", **CHOICES)
    net = mlp(rank)
    model, optimizer = fabric.setup(net, inner_optimizer("adamw", net))
    for step in range(9):
        x, _ = batch(rank, step)
        seen = model(x)
        if gathers:
            seen = gathered(seen)
        train(fabric, optimizer, seen.square().mean())
        with fabric.strategy.evaluate(), torch.no_grad():
            fabric.all_reduce(model(x).mean())
        fabric.barrier()
    fabric.strategy.finish()


@in_ranks(2)
def test_a_gather_over_all_ranks_in_every_batch_is_reported_once(rank: int, tmp_path: Path) -> None:
    messages = said_by("lightning_sdiloco")

    def warnings() -> list[str]:
        in_a_row = [text for text in messages if "in a row" in text]
        messages.clear()
        return in_a_row

    for case in (Gathering(2, 1), Gathering(2, 1, OTHER, is_manual=True)):
        fit_gathering(rank, tmp_path, case)
        in_a_row = warnings()
        assert len(in_a_row) == (rank == 0), case
        for text in in_a_row:
            assert "group=trainer.strategy.topology.in_group.process_group" in text
            assert "self.all_gather" in text
    loop_gathering(rank, 2, gathers=True)
    in_a_row = warnings()
    assert len(in_a_row) == (rank == 0)
    for text in in_a_row:
        assert "group=fabric.strategy.topology.in_group.process_group" in text
    # One group, batches now and then, or no gather.
    for case in (Gathering(1, 1), Gathering(2, 3)):
        fit_gathering(rank, tmp_path, case)
        assert warnings() == [], case
    for groups, gathers in ((2, False), (1, True)):
        loop_gathering(rank, groups, gathers)
        assert warnings() == [], (groups, gathers)
