"""Saves and restores what was logged, so that a resumed epoch ends with the metrics of all its batches.

[Note: metrics after a resume] Lightning saves no metrics. A mean over an epoch that was resumed would cover only the
batches since then. Early stopping, checkpoints and learning rates that depend on a metric would decide differently, or
fail where nothing has been logged since. So every rank saves its own metrics: what callbacks see, and what the epoch
has accumulated.
"""

import builtins
import sys
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

# The arguments of `self.log`: Lightning insists that they are the same in the next call.
_ARGUMENTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    "metric_attribute",
)
_SUMS = ("value", "cumulated_batch_size", "_forward_cache")


def metrics_state_dict(trainer: Any) -> dict[str, Any]:
    """Returns what this rank has logged, as plain values and tensors."""
    seen = trainer._logger_connector._callback_metrics if trainer.strategy.is_alone else trainer.callback_metrics
    epoch = trainer.fit_loop.epoch_progress.current
    goes_on = epoch.processed < epoch.started
    results = trainer.fit_loop.epoch_loop._results
    return {
        "seen": _tensors(seen),
        "epoch": {key: _result_state(result) for key, result in results.items() if goes_on and _is_restorable(result)},
    }


def load_metrics_state_dict(trainer: Any, state: dict[str, Any]) -> None:
    """Restores what `metrics_state_dict` returned."""
    connector = trainer._logger_connector
    connector._callback_metrics.update(state["seen"])
    results = trainer.fit_loop.epoch_loop._results
    for key, saved in state["epoch"].items():
        results[key] = _restored_result(trainer, saved).to(trainer.strategy.root_device)
    if state["epoch"]:
        # Otherwise the next batch would clear the metrics, as the first batch of an epoch does.
        connector._first_loop_iter = False


def _tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items() if isinstance(value, Tensor)}


def _is_restorable(result: Any) -> bool:
    # A process group cannot be found again, nor can a metric that is not part of the module.
    can_be_found = result.is_tensor or result.meta.metric_attribute is not None
    return can_be_found and not result.has_reset and result.meta.sync.group is None


def _result_state(result: Any) -> dict[str, Any]:
    meta = result.meta
    reduction = meta.reduce_fx.__name__
    return {
        "arguments": {name: getattr(meta, name) for name in _ARGUMENTS},
        "reduction": reduction,
        "of_torch": meta.reduce_fx is getattr(torch, reduction, None),
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "sums": _tensors({name: getattr(result, name, None) for name in _SUMS}),
        "metrics": None if result.is_tensor else {name: _metric_state(metric) for name, metric in _parts(result.value)},
    }


def _restored_result(trainer: Any, saved: dict[str, Any]) -> Any:
    classes: Any = sys.modules[type(trainer.fit_loop.epoch_loop._results).__module__]
    reduction = getattr(torch if saved["of_torch"] else builtins, saved["reduction"])
    meta = classes._Metadata(**saved["arguments"], reduce_fx=reduction)
    meta.sync = classes._Sync(fn=trainer.strategy.reduce, **saved["sync"])
    result = classes._ResultMetric(meta, is_tensor=saved["metrics"] is None)
    if saved["metrics"] is not None:
        result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        for name, metric in _parts(result.value):
            _load_metric_state(metric, saved["metrics"][name])
    for name, value in saved["sums"].items():
        setattr(result, name, value)
    result._update_count = 1
    return result


def _parts(metric: Metric) -> list[tuple[str, Metric]]:
    """Returns a metric and the metrics that it wraps, with their names."""
    return [(name, part) for name, part in metric.named_modules() if isinstance(part, Metric)]


def _metric_state(metric: Metric) -> dict[str, Any]:
    return {"updates": metric._update_count, "values": {name: getattr(metric, name) for name in metric._defaults}}


def _load_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    metric._update_count = state["updates"]
    for name, value in state["values"].items():
        setattr(metric, name, _to(value, metric.device))


def _to(value: Any, device: torch.device) -> Any:
    return [part.to(device) for part in value] if isinstance(value, list) else value.to(device)
