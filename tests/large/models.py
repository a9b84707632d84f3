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
    layers = [
        nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(widths, widths[1:], strict=False)
    ]
    return nn.Sequential(*layers)


def wide() -> nn.Module:
    """220,000 parameters in eight tensors: 0.9 MB."""
    return perceptron(FEATURES, 256, 512, 160, TARGETS)


def big() -> nn.Module:
    """5,000,000 parameters in six tensors: 20 MB."""
    return perceptron(FEATURES, 2048, 2400, TARGETS)


def deep() -> nn.Module:
    """136,000 parameters in 1,002 tensors with long names, in modules inside modules."""
    encoder = OrderedDict(
        residual_layers_of_the_encoder=nn.Sequential(
            *(Block(16, nn.Identity()) for _ in range(500))
        )
    )
    return nn.Sequential(nn.Sequential(encoder), nn.Linear(16, TARGETS))


def normed() -> nn.Module:
    """166,000 parameters, and 160 buffers that travel: statistics of BatchNorm."""
    blocks = (Block(44, nn.BatchNorm1d(44)) for _ in range(80))
    return nn.Sequential(nn.Linear(FEATURES, 44), *blocks, nn.Linear(44, TARGETS))


MODELS = {"wide": wide, "big": big, "deep": deep, "normed": normed}


def made(kind: str, seed: int = 0) -> nn.Module:
    """A model by name."""
    torch.manual_seed(seed)
    return MODELS[kind]()


def batch(group: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch of a group, of a task that can be learnt; group -1 has those that nobody trains
    on.
    """
    x = torch.randn(
        64, FEATURES, generator=torch.Generator().manual_seed(10_000 * (group + 1) + step)
    )
    return x, x[:, :TARGETS] + x[:, TARGETS : 2 * TARGETS]


class Batches(Announced):
    """Batches of a group, of which a rank sees its part."""

    draw = staticmethod(batch)

    def __init__(self, rank: int, size: int = 1) -> None:
        super().__init__((rank // size, rank % size, size), 1_000)


class Large(pl.LightningModule):
    """Trains one of the models; logs many metrics where it is asked to."""

    def __init__(self, kind: str = "wide", metrics: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.metrics = metrics
        self.net = made(kind, seed)

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(parts[0]), parts[1])
        self.log("loss", loss)
        self.log_dict(
            {
                f"metric of a name that is not short {number}": loss + number
                for number in range(self.metrics)
            }
        )
        return loss

    def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(parts[0]), parts[1]), sync_dist=True)

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

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(256, FEATURES, generator=generator)
        self.data = TensorDataset(x, x[:, :TARGETS] * x[:, TARGETS : 2 * TARGETS])

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=64)


def held(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, as torch gathers them where they are sharded."""
    return {name: whole(values) for name, values in module.named_parameters()}
