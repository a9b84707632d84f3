"""Keeps the collectives of torchmetrics and of synchronised BatchNorm inside the worker group, for the time of a fit.

[Note: nothing in users' objects] Both are replaced in their libraries, not in the objects of users: a process group in
a metric or in a layer would be found by whoever copies or pickles it, such as a checkpoint whose hyperparameters hold
a metric.
"""

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from lightning_sdiloco.comm import Topology
from lightning_sdiloco.lightning.collectives import in_batch
from lightning_sdiloco.lightning.host.patching import replace


def keep_in_group(undo: ExitStack, trainer: Any, topology: Topology) -> None:
    """Replaces what would gather over all ranks at every batch; see [Note: nothing in users' objects]."""
    group = topology.in_group.process_group
    if group is not None:
        # Each metric without a `dist_sync_fn` of its own looks it up there, whether it is part of the module or not.
        metrics: Any = importlib.import_module("torchmetrics.metric")
        gather = _gather_metric(metrics.gather_all_tensors, trainer, group)
        replace(undo, metrics, "gather_all_tensors", gather)
        replace(undo, nn.SyncBatchNorm, "forward", _normalise(nn.SyncBatchNorm.forward, group))


def _gather_metric(original: Callable[..., list[Tensor]], trainer: Any, own: Any) -> Callable[..., list[Tensor]]:
    """Returns what gathers a state of a metric: over the worker group inside a batch, over all ranks otherwise."""

    def gather(result: Tensor, group: Any = None) -> list[Tensor]:
        return original(result, own if group is None and in_batch(trainer.lightning_module) else group)

    return gather


def _normalise(original: Callable[[Any, Tensor], Tensor], group: Any) -> Callable[[Any, Tensor], Tensor]:
    """Returns a forward pass of synchronised BatchNorm with the statistics of the worker group."""

    def forward(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        before, layer.process_group = layer.process_group, group
        try:
            return original(layer, x)
        finally:
            layer.process_group = before

    return forward
