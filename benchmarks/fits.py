"""Timed fits with a real Trainer in this process, optionally with a virtual accelerator."""

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from benchmarks.models import next_byte_loss
from benchmarks.stamps import Stamps

Batch = tuple[Tensor, Tensor]


class Endless(IterableDataset[Batch]):
    """Batches that never end."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    @override
    def __iter__(self) -> Iterator[Batch]:
        return self._batches


class Timed(LightningModule):
    """Trains a network on batches of bytes."""

    def __init__(
        self,
        net: nn.Module,
        stamps: Stamps,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        meet: Callable[[int], object] = lambda step: None,
    ) -> None:
        super().__init__()
        self.net = net
        self._stamps = stamps
        self._optimizer = optimizer
        self._meet = meet

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._meet(batch_idx)
        self._stamps.begin()
        return next_byte_loss(self.net, *batch)

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._stamps.pad()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer(self.parameters())


def fit(module: LightningModule, batches: Iterator[Batch], steps: int, **choices: Any) -> Trainer:
    """Fits quietly, on the CPU unless ``accelerator`` is given, and returns the trainer."""
    logging.disable(logging.WARNING)
    # This keeps Lightning from looking for other environments, such as MPI.
    choices = {"plugins": [LightningEnvironment()], **choices}
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(max_steps=steps, **{"accelerator": "cpu", **quiet, **choices})
        trainer.fit(module, DataLoader(Endless(batches), batch_size=None))
    return trainer
