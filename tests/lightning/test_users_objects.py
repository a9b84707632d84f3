"""What a fit replaces in users' objects is seen neither by pickle nor by deepcopy, and is gone after the fit."""

import copy
import importlib
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection

from tests import fits
from tests.fits import LIGHTNING
from tests.ranks import run_processes


def measuring(distribution: str, metrics: MetricCollection) -> Any:
    """A module that has its metrics as an argument, as a hyperparameter and in a list."""
    base = type(fits.module(distribution))

    class Measuring(base):  # type: ignore[misc, valid-type]
        def __init__(self, metrics: MetricCollection) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.metrics, self.hidden, self.seen = metrics, [MeanMetric()], []

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            rank = float(self.global_rank)
            self.metrics.update(rank)
            copies = [self.metrics["mean"].clone(), copy.deepcopy(self).metrics["mean"]]
            copies += [self.metrics.clone()["mean"], pickle.loads(pickle.dumps(self.metrics["mean"]))]
            copies += [*self.hidden, MeanMetric()]
            for metric in copies[-2:]:
                metric.update(rank)
            self.seen = [float(metric.compute()) for metric in copies]
            self.log_dict(self.metrics, on_step=False, on_epoch=True)
            return super().training_step(parts, index)

    return Measuring(metrics)


def held_by(metric: Metric) -> dict[str, Any]:
    """The attributes of a metric that are no state of it."""
    return {name: value for name, value in vars(metric).items() if name in ("dist_sync_fn", "process_group")}


def test_a_metric_among_the_hyperparameters_is_saved_copied_and_computed_in_the_group(
    distribution: str, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> Any:
        gather = vars(torchmetrics.metric)["gather_all_tensors"]
        model = measuring(distribution, MetricCollection({"mean": MeanMetric(), "most": torchmetrics.MaxMetric()}))
        before = {name: set(vars(metric)) for name, metric in model.metrics.items(copy_state=False)}
        saving = importlib.import_module(distribution).callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
        trainer = fits.trainer(
            distribution,
            strategy=fits.strategy(distribution, worker_groups=2, sync_every=2, overlap_steps=1),
            devices=world_size,
            max_steps=3,
            enable_checkpointing=True,
            callbacks=[saving],
        )
        trainer.fit(model, DataLoader(fits.Batches(rank, 0, 1), batch_size=None))
        after = {name: set(vars(metric)) for name, metric in model.metrics.items(copy_state=False)}
        assert vars(torchmetrics.metric)["gather_all_tensors"] is gather
        assert {name: after[name] - before[name] for name in after} == {name: set() for name in after}
        saved = torch.load(saving.best_model_path, weights_only=False)["hyper_parameters"]["metrics"]["mean"]
        return model.seen, held_by(saved), float(trainer.callback_metrics["mean"])

    clean = {"dist_sync_fn": None, "process_group": None}
    for rank, (seen, held, logged) in enumerate(run_processes(run, 2)):
        assert seen == [float(rank)] * 6, "every group computes in a batch what is its own"
        assert held == clean
        assert logged == 0.5


def test_callbacks_are_copied_and_pickled_within_a_fit_as_with_ddp(tmp_path: Path) -> None:
    host = importlib.import_module(LIGHTNING)

    class Copying(host.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            for callback in trainer.callbacks:
                if type(callback).__name__ in ("ModelCheckpoint", "Timer", "WeightAveraging"):
                    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
                        assert "lightning_sdiloco" not in str(vars(copied))
                        assert copied.on_train_batch_end.__self__ is copied
            self.copied = True

    def run(rank: int, world_size: int) -> Any:
        saving = host.callbacks.ModelCheckpoint(tmp_path, train_time_interval=timedelta(days=1))
        callbacks = [saving, host.callbacks.Timer(timedelta(days=1)), Copying()]
        trainer = fits.trainer(
            strategy=fits.strategy(worker_groups=2),
            devices=world_size,
            max_steps=2,
            enable_checkpointing=True,
            callbacks=callbacks,
        )
        trainer.fit(BoringModel())
        return callbacks[-1].copied, [name for name in vars(saving) if name.startswith("on_")]

    assert run_processes(run, 2) == [(True, [])] * 2


class Normalised(nn.Module):
    """Two kinds of BatchNorm: Lightning makes the second one synchronise too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def test_synchronised_batch_norm_stays_in_the_group_and_is_copied_and_pickled_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch refuses it on the CPU, so the test looks only at the process group with which it would be called."""
    groups: list[Any] = []

    def forward(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        groups.append(layer.process_group)
        return x

    monkeypatch.setattr(nn.SyncBatchNorm, "forward", forward)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *args: None)

    def run(rank: int, world_size: int) -> Any:
        base = type(fits.module())

        class Copying(base):  # type: ignore[misc, valid-type]
            def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
                for copied in (copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))):
                    assert [layer.process_group for layer in copied.layers[1:3]] == [None, None]
                    copied(parts[0])
                return super().training_step(parts, index)

        module = Copying()
        module.net = Normalised()
        strategy = fits.strategy(worker_groups=2)
        trainer = fits.trainer(
            strategy=strategy,
            devices=world_size,
            max_steps=1,
            sync_batchnorm=True,
        )
        trainer.fit(module, DataLoader(fits.Batches(rank // 2, rank % 2, 2), batch_size=None))
        inside = [group is strategy.topology.in_group.process_group for group in groups]
        return inside, nn.SyncBatchNorm.forward is forward

    assert run_processes(run, 4) == [([True] * 6, True)] * 4
