"""Fits of sharded models, with FSDP2 and tensor parallelism inside the worker groups, for several test files."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.test_checkpoint import StatefulBatches, held_by

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}


def even(seed: int) -> nn.Sequential:
    """Four layers whose sizes tensor parallelism can halve where it must, and FSDP2 cannot."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 3)
    )


def plain(
    distribution: str = LIGHTNING, inner: str = "sgd", seed: int = 0, net: Callable[[int], nn.Module] = even
) -> Any:
    """The same model as `sharded`, for the first strategy."""
    return fits.module(distribution, inner, seed, net(seed))


def sharded(
    distribution: str = LIGHTNING, inner: str = "sgd", seed: int = 0, net: Callable[[int], nn.Module] = even
) -> Any:
    """A module that shards itself as a user would write it, for whatever mesh it gets."""
    model = plain(distribution, inner, seed, net)

    class Sharded(type(model)):  # type: ignore[misc]
        def configure_model(self) -> None:
            if any(hasattr(p, "placements") for p in self.parameters()):
                return
            data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
            if tensor.size() > 1:
                parallelize_module(self.net, tensor, PLAN)
            if data.size() > 1 or tensor.size() == 1:
                fully_shard(self.net[2], mesh=data)
                fully_shard(self.net, mesh=data)

        def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
            self.log("seen", nn.functional.mse_loss(self.net(parts[0]), parts[1]), sync_dist=True)

        def on_train_batch_start(self, *args: Any) -> None:
            self.trace[self.trainer.global_step] = held_by(self)

    model.__class__ = Sharded
    model.trace = {}
    return model


def fit(
    rank: int,
    world_size: int,
    groups: int,
    sizes: tuple[int, int],
    steps: int,
    distribution: str = LIGHTNING,
    inner: str = "sgd",
    callbacks: list[Any] | None = None,
    resume: str | None = None,
    validation: int = 0,
    trainer_choices: dict[str, Any] | None = None,
    net: Callable[[int], nn.Module] = even,
    **choices: Any,
) -> dict[str, Any]:
    """Fits a sharded model, with a seed for each group, and returns what is worth comparing."""
    data, tensor = sizes
    size = data * tensor

    def inspect(trainer: Any, module: Any) -> dict[str, Any]:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return {"settings": trainer.strategy.engine.settings, "trace": module.trace, "logged": logged}

    quiet = {"callbacks": callbacks or [], "enable_checkpointing": bool(callbacks)}
    quiet |= {"val_check_interval": validation or None, "limit_val_batches": 1 if validation else 0}
    found = fits.fit(
        rank,
        world_size,
        groups,
        steps,
        {"data_parallel_size": data, "tensor_parallel_size": tensor, **choices},
        distribution,
        inner,
        inspect,
        {**quiet, **(trainer_choices or {})},
        make=partial(sharded, net=net),
        seed=rank // size,  # FSDP2 takes from every rank its part of what that rank has made
        loader=StatefulBatches(rank // size, rank % size // tensor, data, length=100),
        validation=DataLoader(fits.Batches(9, 0, 1), batch_size=None) if validation else None,
        resume=resume,
    )
    return found | found.pop("inspected")


def callbacks_of(distribution: str = LIGHTNING) -> Any:
    """The callbacks of one distribution."""
    return importlib.import_module(distribution).callbacks
