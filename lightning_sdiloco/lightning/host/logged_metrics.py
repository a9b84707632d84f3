"""What was logged before a checkpoint, so that a resumed epoch ends with the metrics of all of its batches.

[Note: metrics after a resume] Lightning saves no metrics. A mean over an epoch that was resumed would be one over the
batches since then, and early stopping, checkpoints and learning rates that rest on a metric would go other ways, or
fail where nothing was logged since. So every rank saves its own: what callbacks see, and what is added up in the epoch.
"""

import builtins
import sys
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

# What `self.log` was called with: it must be the same in the next call.
_ARGUMENTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    "metric_attribute",
)
_SUMS = ("value", "cumulated_batch_size", "_forward_cache")


def logged(trainer: Any) -> dict[str, Any]:
    """What this rank has logged, as plain values and tensors.

    All ranks must call it together, unless one has failed: a metric of the epoch that ends is reduced over all.

    Args:
        trainer: The trainer that fits.
    """
    seen = trainer._logger_connector._callback_metrics if trainer.strategy.is_alone else trainer.callback_metrics
    epoch = trainer.fit_loop.epoch_progress.current
    goes_on = epoch.processed < epoch.started
    results = trainer.fit_loop.epoch_loop._results
    return {
        "seen": _tensors(seen),
        "epoch": {key: _saved(result) for key, result in results.items() if goes_on and _can_be_saved(result)},
    }


def take_up(trainer: Any, state: dict[str, Any]) -> None:
    """Takes back what `logged` returned.

    Args:
        trainer: The trainer whose fit resumes.
        state: What `logged` returned.
    """
    connector = trainer._logger_connector
    connector._callback_metrics.update(state["seen"])
    results = trainer.fit_loop.epoch_loop._results
    for key, saved in state["epoch"].items():
        results[key] = _loaded(trainer, saved).to(trainer.strategy.root_device)
    if state["epoch"]:
        # Or the first batch would begin with empty metrics, as that of an epoch does.
        connector._first_loop_iter = False


def _tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items() if isinstance(value, Tensor)}


def _can_be_saved(result: Any) -> bool:
    # Neither a process group nor a metric that is no part of the module can be found again.
    can_be_found = result.is_tensor or result.meta.metric_attribute is not None
    return can_be_found and not result.has_reset and result.meta.sync.group is None


def _saved(result: Any) -> dict[str, Any]:
    meta = result.meta
    reduction = meta.reduce_fx.__name__
    return {
        "arguments": {name: getattr(meta, name) for name in _ARGUMENTS},
        "reduction": reduction,
        "of_torch": meta.reduce_fx is getattr(torch, reduction, None),
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "sums": _tensors({name: getattr(result, name, None) for name in _SUMS}),
        "metrics": None if result.is_tensor else {name: _state(metric) for name, metric in _parts(result.value)},
    }


def _loaded(trainer: Any, saved: dict[str, Any]) -> Any:
    classes: Any = sys.modules[type(trainer.fit_loop.epoch_loop._results).__module__]
    reduction = getattr(torch if saved["of_torch"] else builtins, saved["reduction"])
    meta = classes._Metadata(**saved["arguments"], reduce_fx=reduction)
    meta.sync = classes._Sync(fn=trainer.strategy.reduce, **saved["sync"])
    result = classes._ResultMetric(meta, is_tensor=saved["metrics"] is None)
    if saved["metrics"] is not None:
        result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        for name, metric in _parts(result.value):
            _set_state(metric, saved["metrics"][name])
    for name, value in saved["sums"].items():
        setattr(result, name, value)
    result._update_count = 1
    return result


def _parts(metric: Metric) -> list[tuple[str, Metric]]:
    """A metric and those that it wraps."""
    return [(name, part) for name, part in metric.named_modules() if isinstance(part, Metric)]


def _state(metric: Metric) -> dict[str, Any]:
    return {"updates": metric._update_count, "values": {name: getattr(metric, name) for name in metric._defaults}}


def _set_state(metric: Metric, state: dict[str, Any]) -> None:
    metric._update_count = state["updates"]
    for name, value in state["values"].items():
        setattr(metric, name, _to(value, metric.device))


def _to(value: Any, device: torch.device) -> Any:
    return [part.to(device) for part in value] if isinstance(value, list) else value.to(device)
