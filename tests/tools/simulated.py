"""Modules and data for LightningCLI configurations, as a user would have them, for tests of the
simulator.
"""

from typing import Any

import lightning.pytorch as pl
import pytorch_lightning as other_pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.methods import Paced


class _Net:
    """Two layers with dropout, so that random numbers count, for the module of a distribution."""

    log: Any
    optimizers: Any
    manual_backward: Any
    parameters: Any
    global_rank: int
    global_step: int

    def __init__(
        self, width: int = 8, lr: float = 0.05, fails_in_group: int = -1, by_hand: bool = False
    ) -> None:
        super().__init__()
        self.lr = lr
        self.fails_in_group = fails_in_group
        self.automatic_optimization = not by_hand
        self.net = nn.Sequential(
            nn.Linear(4, width),
            nn.BatchNorm1d(width),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(width, 2),
        )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == self.fails_in_group and self.global_step == 7:
            raise RuntimeError("the data of this group is broken")
        loss = self.loss(batch)
        self.log("train_loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        every_step = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": every_step}


class _Data:
    """A regression that shuffles, and is cut into one part for each rank."""

    def __init__(self, length: int = 120, batch_size: int = 5, paced: bool = False) -> None:
        super().__init__()
        self.length = length
        self.batch_size = batch_size
        self.paced = paced

    def samples(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.length, 4, generator=generator)
        return TensorDataset(x, x[:, :2] * x[:, 2:])

    def train_dataloader(self) -> Any:
        loader = DataLoader(self.samples(), batch_size=self.batch_size, shuffle=True)
        return Paced(loader) if self.paced else loader

    def val_dataloader(self) -> Any:
        return DataLoader(self.samples(), batch_size=16)


class Net(_Net, pl.LightningModule): ...


class Data(_Data, pl.LightningDataModule): ...


class OtherNet(_Net, other_pl.LightningModule): ...


class OtherData(_Data, other_pl.LightningDataModule): ...
