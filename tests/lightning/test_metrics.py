"""Metrics of an epoch that was resumed are those of all its batches, and what rests on them goes on."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, MinMaxMetric

from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.test_checkpoint import StatefulBatches, assert_same, traced
from tests.ranks import run_processes

EPOCHS, LENGTH = 3, 6


class EveryEpoch(StatefulBatches):
    """The same batches in every epoch. Lightning does not restore a loader after the end of one."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.step == self.length:
            self.step = 0
        yield from super().__iter__()


PLATEAUS: list[dict[str, Any]] = [
    {"monitor": "loss_epoch"},
    {"monitor": "loss", "interval": "step"},
    {"monitor": "val"},
]


def logging(distribution: str, seed: int) -> Any:
    """A module that logs in all ways, and whose learning rate depends on what it logged."""
    base = type(traced(distribution, seed))

    class Logging(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.range = MeanMetric(), MinMaxMetric(MeanMetric())
            self.many = MetricCollection([MeanMetric(), MaxMetric()])

        def training_step(self, parts: Any, index: int) -> Any:
            loss = super().training_step(parts, index)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log_dict({"most": loss, "all": loss, "here": loss}, on_epoch=True, on_step=False, reduce_fx="max")
            self.log("sum", loss, reduce_fx=sum, on_epoch=True, on_step=False, sync_dist=True)
            self.mean.update(loss.detach())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            self.many.update(loss.detach())
            self.log_dict(self.many, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, parts: Any, index: int) -> None:
            loss = nn.functional.mse_loss(self.net(parts[0]), parts[1])
            self.log("val", loss + torch.rand(()), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            values = {name: value.clone() for name, value in self.trainer.callback_metrics.items()}
            self.ended.append((self.trainer.current_epoch, values))

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            # Nothing is good enough for them.
            none_is = {"patience": 0, "threshold": 10.0, "factor": 0.9}
            return [optimizer], [{"scheduler": ReduceLROnPlateau(optimizer, **none_is), **by} for by in PLATEAUS]

    model = Logging()
    model.trace, model.ended = {}, []
    return model


def run(rank: int, world_size: int, distribution: str, folder: Path, resume: str | None) -> dict[str, Any]:
    model = logging(distribution, rank)
    callbacks = importlib.import_module(distribution).callbacks
    stopping = callbacks.EarlyStopping("loss_epoch", patience=9)
    best = callbacks.ModelCheckpoint(folder / "best", monitor="loss", mode="max")
    saving = [
        callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        callbacks.ModelCheckpoint(folder, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1),
    ]
    trainer = fits.trainer(
        distribution,
        strategy=fits.strategy(distribution, worker_groups=2, sync_every=4, overlap_steps=1, fragments="strided:1"),
        devices=world_size,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[stopping, best, *([] if resume else saving)],
    )
    torch.manual_seed(100 + rank)
    seen = DataLoader([(torch.ones(1, 5), torch.ones(1, 3))], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(model, EveryEpoch(rank, 0, 1, LENGTH), seen, ckpt_path=resume and str(folder / f"{resume}.ckpt"))
    stopped = stopping.state_dict()
    return {
        "trace": model.trace,
        "ended": model.ended,
        "learning rate": trainer.optimizers[0].param_groups[0]["lr"],
        "callbacks": (stopped["wait_count"], stopped["best_score"], best.best_model_score),
    }


@pytest.mark.parametrize("distribution", [LIGHTNING, "pytorch_lightning"])
def test_what_rests_on_metrics_goes_on_after_a_resume(distribution: str, tmp_path: Path) -> None:
    # 2: within an epoch; 6: after its last batch, before validation and end; then after the end; 13: in the last epoch.
    saves = {"step=2": 0, "step=6": 0, "epoch=0": 1, "step=13": 2}

    def all_fits(rank: int, world_size: int) -> Any:
        return [run(rank, world_size, distribution, tmp_path, resume) for resume in (None, *saves)]

    for plain, *all_resumed in run_processes(all_fits, 2, timeout=120.0):
        assert plain["learning rate"] < 0.01
        for (saved, ended), resumed in zip(saves.items(), all_resumed, strict=True):
            assert [epoch for epoch, _ in resumed["ended"]] == list(range(ended, EPOCHS)), saved
            for (_, values), (_, expected) in zip(resumed["ended"], plain["ended"][ended:], strict=True):
                assert_same(values, expected)
            for at, held in resumed["trace"].items():
                assert_same(held, plain["trace"][at])
            assert resumed["learning rate"] == plain["learning rate"]
            assert resumed["callbacks"] == plain["callbacks"]
