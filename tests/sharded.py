"""Fits of sharded models, with FSDP2 and tensor parallelism inside the worker groups, for several
test files.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.test_checkpoint import run_fit, traced
from tests.training import tanh_network

PLAN = {
    "0": ColwiseParallel(),
    "2": RowwiseParallel(),
    "4": ColwiseParallel(),
    "6": RowwiseParallel(),
}


def even(seed: int) -> nn.Sequential:
    """Four layers whose sizes tensor parallelism can halve where it must, and FSDP2 cannot."""
    torch.manual_seed(seed)
    return tanh_network(5, 12, 7, 10, 3)


def plain(
    distribution: str = LIGHTNING,
    seed: int = 0,
    inner: str = "sgd",
    net: Callable[[int], nn.Module] = even,
    **members: Any,
) -> Any:
    """The same model as `sharded`, for the first strategy."""
    return traced(distribution, seed, inner, partial(net, seed), **members)


def sharded(
    distribution: str = LIGHTNING,
    seed: int = 0,
    inner: str = "sgd",
    net: Callable[[int], nn.Module] = even,
) -> Any:
    """A module that shards itself as a user would write it, for whatever mesh it gets."""

    def configure_model(self: Any) -> None:
        if any(hasattr(p, "placements") for p in self.parameters()):
            return
        data_mesh = self.device_mesh["data_parallel"]
        tensor_mesh = self.device_mesh["tensor_parallel"]
        if tensor_mesh.size() > 1:
            parallelize_module(self.net, tensor_mesh, PLAN)
        if data_mesh.size() > 1 or tensor_mesh.size() == 1:
            fully_shard(self.net[2], mesh=data_mesh)
            fully_shard(self.net, mesh=data_mesh)

    def validation_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.log("seen", self.loss(parts), sync_dist=True)

    def val_dataloader(self: Any) -> Any:
        return fits.batches(9)

    hooks = (configure_model, validation_step, val_dataloader)
    return plain(distribution, seed, inner, net, **{hook.__name__: hook for hook in hooks})


def fit(
    rank: int,
    world_size: int,
    groups: int,
    sizes: tuple[int, int],
    inner: str = "sgd",
    net: Callable[[int], nn.Module] = even,
    **choices: Any,
) -> dict[str, Any]:
    """Fits a sharded model, with a seed for each group, and returns the values to compare."""
    data_ranks, tensor_ranks = sizes
    group, rank_in_group = divmod(rank, data_ranks * tensor_ranks)
    # FSDP2 takes from every rank its part of the model that the rank has made.
    make = partial(sharded, seed=group, inner=inner, net=net)
    return run_fit(
        rank,
        world_size,
        make=lambda name, _: make(name),
        place=(group, rank_in_group // tensor_ranks, data_ranks),
        data_parallel_size=data_ranks,
        tensor_parallel_size=tensor_ranks,
        groups=groups,
        **choices,
    )
