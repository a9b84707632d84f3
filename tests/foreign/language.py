"""A language model of any library in a LightningModule, and text to train it on."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WINDOW = 32


class Language(pl.LightningModule):
    """Trains a causal language model of transformers' interface.

    Args:
        net: Takes ``input_ids`` and ``labels``; returns an object with a ``loss`` and ``logits``.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[0], labels=batch[0]).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", self.net(input_ids=batch[0], labels=batch[0]).loss, sync_dist=True)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        best: Tensor = self.net(input_ids=batch[0]).logits.argmax(-1)
        return best

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-3)


def batches(seed: int) -> DataLoader[Any]:
    """Returns windows of counting bytes, which a model learns soon."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(256, (160 if seed == 0 else 32, 1), generator=generator)
    steps = torch.randint(1, 4, (len(starts), 1), generator=generator)
    return DataLoader(TensorDataset((starts + steps * torch.arange(WINDOW)) % 256), batch_size=4, shuffle=seed == 0)
