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


def logging(distribution: str, seed: int, plateau: dict[str, Any]) -> Any:
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
            # Nothing is good enough for it.
            scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **plateau}}

    model = Logging()
    model.trace, model.ended = {}, []
    return model


def run(
    rank: int, world_size: int, distribution: str, folder: Path, plateau: dict[str, Any], resume: str | None
) -> dict[str, Any]:
    model = logging(distribution, rank, plateau)
    callbacks = importlib.import_module(distribution).callbacks
    stopping = callbacks.EarlyStopping("loss_epoch", patience=9)
    best = callbacks.ModelCheckpoint(folder / "best", monitor="loss", mode="max")
    saving = [
        callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        callbacks.ModelCheckpoint(folder, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1),
    ]
    trainer = fits.trainer(
        distribution,
        strategy=fits.strategy(distribution, worker_groups=2, sync_every=4, overlap_steps=1, layers_per_fragment=1),
        devices=world_size,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[stopping, best, *([] if resume else saving)],
    )
    torch.manual_seed(100 + rank)
    seen = DataLoader([(torch.ones(1, 5), torch.ones(1, 3))], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(model, EveryEpoch(rank, 0, 1, LENGTH), seen, ckpt_path=resume)
    stopped = stopping.state_dict()
    return {
        "trace": model.trace,
        "ended": model.ended,
        "learning rate": trainer.optimizers[0].param_groups[0]["lr"],
        "callbacks": (stopped["wait_count"], stopped["best_score"], best.best_model_score),
    }


@pytest.mark.parametrize(
    ("distribution", "plateau"),
    [
        (LIGHTNING, {"monitor": "loss_epoch"}),
        (LIGHTNING, {"monitor": "loss", "interval": "step"}),
        ("pytorch_lightning", {"monitor": "val"}),
    ],
)
def test_what_rests_on_metrics_goes_on_after_a_resume(
    distribution: str, plateau: dict[str, Any], tmp_path: Path
) -> None:
    def fit(resume: str | None = None) -> Any:
        return run_processes(run, 2, distribution, tmp_path, plateau, resume)

    plain = fit()
    assert plain[0]["learning rate"] < 0.01
    # 2: within an epoch; 6: after its last batch, before validation and end; then after the end; 13: in the last epoch.
    for saved, ended in (("step=2", 0), ("step=6", 0), ("epoch=0", 1), ("step=13", 2)):
        resumed = fit(str(tmp_path / f"{saved}.ckpt"))
        for one, other in zip(resumed, plain, strict=True):
            assert [epoch for epoch, _ in one["ended"]] == list(range(ended, EPOCHS)), saved
            for (_, values), (_, expected) in zip(reversed(one["ended"]), reversed(other["ended"]), strict=False):
                assert_same(values, expected)
            for at, held in one["trace"].items():
                assert_same(held, other["trace"][at])
            assert one["learning rate"] == other["learning rate"]
            assert one["callbacks"] == other["callbacks"]
