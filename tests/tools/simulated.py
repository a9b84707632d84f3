"""Modules and data for LightningCLI configurations, as a user would have them, for tests of the
simulator.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.methods import Paced


def _made(distribution: str) -> tuple[Any, Any]:
    package = importlib.import_module(distribution)

    class Net(package.LightningModule):
        """Two layers with dropout, so that random numbers count."""

        def __init__(
            self, width: int = 8, lr: float = 0.05, fails_in_group: int = -1, by_hand: bool = False
        ) -> None:
            super().__init__()
            self.lr = lr
            self.fails_in_group = fails_in_group
            self.automatic_optimization = not by_hand
            layers = (
                nn.Linear(4, width),
                nn.BatchNorm1d(width),
                nn.Tanh(),
                nn.Dropout(0.2),
                nn.Linear(width, 2),
            )
            self.net = nn.Sequential(*layers)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            if self.global_rank == self.fails_in_group and self.global_step == 7:
                raise RuntimeError("the data of this group is broken")
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            if not self.automatic_optimization:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss.detach() if not self.automatic_optimization else loss

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            self.log(
                "val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True
            )

        def configure_optimizers(self) -> dict[str, object]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    class Data(package.LightningDataModule):
        """A regression that shuffles, and is cut into one part for each rank."""

        def __init__(self, length: int = 120, batch_size: int = 5, paced: bool = False) -> None:
            super().__init__()
            self.length = length
            self.batch_size = batch_size
            self.paced = paced

        def setup(self, stage: str) -> None:
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(self.length, 4, generator=generator)
            self.data = TensorDataset(x, x[:, :2] * x[:, 2:])

        def train_dataloader(self) -> Any:
            loader = DataLoader(self.data, batch_size=self.batch_size, shuffle=True)
            return Paced(loader) if self.paced else loader

        def val_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=16)

    return Net, Data


Net, Data = _made("lightning.pytorch")
OtherNet, OtherData = _made("pytorch_lightning")
