"""Between launches no group waits for another, and decisions on time are made by all at the same
inner step.
"""

import importlib
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torchmetrics import MeanMetric

from lightning_sdiloco import DenseBeginning
from tests import fits
from tests.fits import LIGHTNING, fit, said_by
from tests.lightning.test_checkpoint import saving
from tests.lightning.test_fabric import fabric_of, train
from tests.ranks import agreed, in_ranks
from tests.training import batch, inner_optimizer, mlp

STALLED_AT = 30
STALL_SECONDS = 2.0


@in_ranks(4)
def test_a_group_that_stalls_between_launches_keeps_none_waiting(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    """With everything on that Lightning would broadcast at every batch, and all that a batch may
    gather.
    """

    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        if index + 1 == STALLED_AT and rank >= 2:
            time.sleep(STALL_SECONDS)
        self.started[index + 1] = time.monotonic()
        self.computed.update(float(rank))
        self.seen = [*self.all_gather(torch.tensor(float(rank))).tolist()]
        self.seen += [float(self.computed.compute()), float(self.logged(float(rank)))]
        self.log("metric", self.logged, on_step=False, on_epoch=True)
        loss = self.loss(parts)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("rank", float(rank), sync_dist=True)
        return loss

    def on_train_batch_end(self: Any, *args: Any) -> None:
        self.log("after", 1.0, sync_dist=True)
        self.per_batch = float(self.trainer.callback_metrics["rank"])

    def make(*args: Any, **kwargs: Any) -> Any:
        hooks = {"training_step": training_step, "on_train_batch_end": on_train_batch_end}
        model = fits.module(*args, **kwargs, **hooks, started={})
        model.computed = MeanMetric()
        model.logged = MeanMetric(dist_sync_on_step=True)
        return model

    def inspect(trainer: Any, module: Any) -> Any:
        replaced = {"_check_time_remaining", "on_advance_end", "get_metrics"}
        assert not any(replaced & set(vars(callback)) for callback in trainer.callbacks), (
            "undone after the fit"
        )
        assert module.computed.dist_sync_fn is None
        return module, [float(trainer.callback_metrics[name]) for name in ("metric", "loss_epoch")]

    callbacks = saving(distribution, tmp_path, train_time_interval=timedelta(hours=1))
    more = {"max_time": "00:01:00:00", "callbacks": callbacks, "enable_checkpointing": True}
    choices = {"sync_every": 20, "overlap_steps": 5, "fragments": [["*"]]}
    said = said_by("lightning_sdiloco")
    own: dict[str, Any] = {"inspect": inspect, "trainer_choices": more, "make": make}
    model, per_epoch = fit(rank, 4, 2, 45, choices, distribution, **own)["inspected"]
    # What is gathered, computed or logged in a batch is of the group, and what is logged of an
    # epoch of the world.
    first = rank // 2 * 2.0
    assert [*model.seen, model.per_batch] == [
        first,
        first + 1,
        first + 0.5,
        first + 0.5,
        first + 0.5,
    ]
    assert per_epoch[0] == 1.5
    assert agreed(per_epoch)
    assert [text for text in said if "in a row" in text] == [], "nothing is gathered over all ranks"
    # One launch landed at 25, the next is at 40: in between group 0 must not wait. And it does
    # wait, at the landing after inner step 45 at the latest, or the test would show nothing.
    started: list[Any] = [None] * 4
    dist.all_gather_object(started, model.started)
    assert started[0][39] < started[3][STALLED_AT]
    assert len(started[0]) == len(started[3]) == 45


@in_ranks(2)
def test_time_limits_and_saves_by_time_are_those_of_all_ranks(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    def slow(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
        time.sleep(0.02)
        return self.loss(parts)

    saved: list[int] = []
    # The ranks' own clocks would make them save after different steps.
    interval = timedelta(seconds=0.3 + 0.2 * rank)
    callbacks = saving(distribution, tmp_path, train_time_interval=interval)
    more = {"callbacks": callbacks, "enable_checkpointing": True, "max_time": {"seconds": 2}}
    choices = {"sync_every": 10, "overlap_steps": 3, "fragments": [["*"]]}
    hooks = {
        "training_step": slow,
        "on_save_checkpoint": lambda self, _: saved.append(self.trainer.global_step),
    }
    make = partial(fits.module, **hooks)
    steps = fit(rank, 2, 2, 10_000, choices, distribution, trainer_choices=more, make=make)[
        "report"
    ]["inner_steps"]
    assert agreed([steps, saved])
    assert steps < 10_000
    assert len({*saved}) == len(saved) == len(list(tmp_path.glob("*.ckpt"))) >= 2
    assert {step % 10 for step in (steps, *saved)} == {3}, "decisions are read at a landing"


def gathered(tensor: Tensor) -> Tensor:
    return torch.stack(all_gather(tensor))


@in_ranks(2)
def test_a_gather_over_all_ranks_in_every_batch_is_reported_once(rank: int, tmp_path: Path) -> None:
    """In fits that normalise, measure and log over all ranks, validate, save and may stop; and in
    loops of Fabric.
    """
    said = said_by("lightning_sdiloco")
    chosen: dict[str, Any] = {
        "sync_every": 4,
        "overlap_steps": 1,
        "dense_beginning": DenseBeginning(2, 2),
    }

    def of_trainer(distribution: str, groups: int, every: int, manual: bool) -> None:
        def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            seen = self.net(parts[0])
            loss = (gathered(seen) if every == 1 or index % every else seen).square().mean()
            self.mean.update(loss)
            self.log("mean", self.mean)
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            if manual:
                self.manual_backward(loss)
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss

        net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.Linear(3, 3))
        scored = lambda self, parts, index: self.log(  # noqa: E731
            "score", self.net(parts[0]).mean(), sync_dist=True
        )
        model = fits.module(
            distribution, "adamw", net=net, training_step=training_step, validation_step=scored
        )
        model.mean = MeanMetric()
        model.automatic_optimization = not manual
        callbacks = importlib.import_module(distribution).callbacks
        checkpoint = callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, monitor="loss")
        more = {
            "callbacks": [checkpoint, callbacks.EarlyStopping("score", patience=100)],
            "enable_checkpointing": True,
        }
        more |= {
            "max_epochs": 2,
            "max_time": "00:01:00:00",
            "val_check_interval": 2,
            "limit_val_batches": 1,
        }
        own: dict[str, Any] = {"make": lambda *_, **__: model, "loader": fits.SomeBatches(rank, 6)}
        own |= {"validation": own["loader"], "trainer_choices": more}
        assert fit(rank, 2, groups, -1, chosen, distribution, **own)["report"]["inner_steps"] == 12

    def of_fabric(groups: int, in_batches: bool) -> None:
        fabric = fabric_of(2, worker_groups=groups, fragments="strided", **chosen)
        model, optimizer = fabric.setup(net := mlp(rank), inner_optimizer("adamw", net))
        for step in range(9):
            x, _ = batch(rank, step)
            seen = model(x)
            train(fabric, optimizer, (gathered(seen) if in_batches else seen).square().mean())
            with fabric.strategy.evaluate(), torch.no_grad():
                fabric.all_reduce(model(x).mean())
            fabric.barrier()
        fabric.strategy.finish()

    for play, advised, times in (
        (partial(of_trainer, LIGHTNING, 2, 1, False), "trainer", 1),
        (partial(of_trainer, "pytorch_lightning", 2, 1, True), "trainer", 1),
        (partial(of_trainer, LIGHTNING, 1, 1, False), "", 0),
        (partial(of_trainer, LIGHTNING, 2, 3, False), "", 0),  # now and then
        (partial(of_fabric, 2, True), "fabric", 1),
        (partial(of_fabric, 2, False), "", 0),
        (partial(of_fabric, 1, True), "", 0),
    ):
        said.clear()
        play()
        told = [text for text in said if "in a row" in text]
        assert len(told) == (times if rank == 0 else 0), play
        assert all(
            f"group={advised}.strategy.topology.in_group.process_group" in text for text in told
        )
        assert all("self.all_gather" in text for text in told if advised == "trainer")
