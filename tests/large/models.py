"""Models of real sizes: 100,000 parameters and more, 1,000 tensors with long names, more than 64
buffers.
"""

from collections import OrderedDict
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tests.fits import Announced, whole

FEATURES = 16
TARGETS = 4


class Block(nn.Module):
    """A layer with a long name; without its residual a batch of BatchNorm would make rounding grow
    with depth.
    """

    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.position_wise_feed_forward_projection = nn.Linear(width, width)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.tanh(self.norm(self.position_wise_feed_forward_projection(x)))


def perceptron(*widths: int) -> nn.Module:
    layers = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers.append(nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh()))
    return nn.Sequential(*layers)


def wide() -> nn.Module:
    """220,000 parameters in eight tensors: 0.9 MB."""
    return perceptron(FEATURES, 256, 512, 160, TARGETS)


def big() -> nn.Module:
    """5,000,000 parameters in six tensors: 20 MB."""
    return perceptron(FEATURES, 2048, 2400, TARGETS)


def deep() -> nn.Module:
    """136,000 parameters in 1,002 tensors with long names, in modules inside modules."""
    blocks = nn.Sequential(*(Block(16, nn.Identity()) for _ in range(500)))
    encoder = nn.Sequential(OrderedDict(residual_layers_of_the_encoder=blocks))
    return nn.Sequential(encoder, nn.Linear(16, TARGETS))


def normed() -> nn.Module:
    """166,000 parameters, and 160 buffers that travel: statistics of BatchNorm."""
    blocks = (Block(44, nn.BatchNorm1d(44)) for _ in range(80))
    return nn.Sequential(nn.Linear(FEATURES, 44), *blocks, nn.Linear(44, TARGETS))


MODELS = {"wide": wide, "big": big, "deep": deep, "normed": normed}


def model_of(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind]()


def batch(group: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch of a group, of a task that can be learnt; those of group -1 are held out."""
    generator = torch.Generator().manual_seed(10_000 * (group + 1) + step)
    x = torch.randn(64, FEATURES, generator=generator)
    return x, x[:, :TARGETS] + x[:, TARGETS : 2 * TARGETS]


class Batches(Announced):
    """Batches of a group, of which a rank sees its part."""

    draw = staticmethod(batch)

    def __init__(self, rank: int, size: int = 1) -> None:
        super().__init__((rank // size, rank % size, size), 1_000)


class Large(pl.LightningModule):
    """Trains one of the models, and logs many metrics if told to."""

    def __init__(self, kind: str = "wide", metrics: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.metrics = metrics
        self.net = model_of(kind, seed)

    def loss(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        x, y = parts
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self.loss(parts)
        self.log("loss", loss)
        for number in range(self.metrics):
            self.log(f"metric of a name that is not short {number}", loss + number)
        return loss

    def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.loss(parts), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def sharded(self: Any) -> None:
    """The hook `configure_model` of a module whose parameters are sharded over the ranks of a
    group.
    """
    if not any(hasattr(p, "placements") for p in self.parameters()):
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net[0], mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Data(pl.LightningDataModule):
    """A regression; Lightning gives every rank its part."""

    def samples(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(256, FEATURES, generator=generator)
        return TensorDataset(x, x[:, :TARGETS] * x[:, TARGETS : 2 * TARGETS])

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples(), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.samples(), batch_size=64)


def copied_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, as torch gathers them where they are sharded."""
    return {name: whole(values) for name, values in module.named_parameters()}
