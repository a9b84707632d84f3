"""Makes a fit that resumes go on as one that was not interrupted: its first epoch, and the metrics of that epoch.

[Note: epochs after a resume] Lightning asks loaders for a new iterator at the start of every epoch but the first. After
a resume it has one already, which was made before the random state of the checkpoint was restored, and may stand in the
middle of the data, where the loader was saved. A loader of torch draws a random number for each iterator; without that
draw, whatever is random afterwards, such as dropout, would differ. And where a run resumes from the last batch of an
epoch, Lightning goes on with the next epoch without counting it and without calling `on_train_epoch_start`, which
finetuning callbacks need.

[Note: the rest of a batch] A checkpoint that `every_n_train_steps` saves after a batch precedes whatever else is due
there: a validation, a learning rate that depends on metrics, the end of the epoch. When Lightning resumes, it skips
these. They may draw random numbers, as a loader of torch does, and early stopping and other checkpoints may depend on
them. So the resumed run begins with them, unless the checkpoint was saved because of a signal, which happens after
them. The same goes for learning rates after a checkpoint that was saved at the end of an epoch, as `ModelCheckpoint`
does by default.

[Note: metrics after a resume] Lightning saves no metrics. A mean over an epoch that was resumed would cover only the
batches since then. Early stopping, checkpoints and learning rates that depend on a metric would decide differently, or
fail where nothing has been logged since. So every rank saves its own metrics: what callbacks see, and what the epoch
has accumulated.
"""

import builtins
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_sdiloco.lightning.host.patching import replace

# Epochs


def begin_epochs_alike(trainer: Any, undo: ExitStack) -> None:
    """Patches the loops of a trainer; see [Note: epochs after a resume] and [Note: the rest of a batch]."""
    loop = trainer.fit_loop
    start, reset_epoch = loop.on_advance_start, loop.epoch_loop.reset

    def start_epoch() -> None:
        if loop.restarted_mid_epoch and _is_at_last_batch(loop.epoch_loop):
            loop.reset_restart_stage()
        start()

    replace(undo, loop, "reset", partial(_reset_fit, trainer, undo, loop.reset))
    replace(undo, loop, "on_advance_start", start_epoch)
    replace(undo, loop.epoch_loop, "reset", partial(_reset_epoch, trainer, reset_epoch))


def _is_at_last_batch(epoch_loop: Any) -> bool:
    return bool(epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch)


def _reset_fit(trainer: Any, undo: ExitStack, original: Callable[[], None]) -> None:
    """Resets the fit loop; a run that was saved after a batch or an epoch then begins with the rest of that."""
    loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    once = undo.enter_context(ExitStack())
    start, end = loop.on_advance_start, loop.on_advance_end

    def end_batch(data_fetcher: Any) -> None:
        # In the place of the first batch, so that Lightning goes on as after any batch.
        once.close()
        loop.epoch_loop.val_loop.restarting = False
        trainer.strategy.fit.finish_with_last_batch()

    def end_epoch_and_start() -> None:
        once.close()
        loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        start()

    def end_epoch() -> None:
        # As in a run that was not resumed: learning rates that depend on metrics are updated.
        loop._restarting = False
        end()

    def was_saved_in_a_hook_at_the_end(count: Any) -> bool:
        # The completion of the batch or the epoch is not counted yet.
        return bool(count.ready == count.started == count.processed == count.completed + 1)

    if trainer.strategy.fit.checkpointer.resumes_exactly:
        replace(undo, loop, "on_advance_end", end_epoch)
        if was_saved_in_a_hook_at_the_end(loop.epoch_progress.total):
            replace(once, loop, "on_advance_start", end_epoch_and_start)
        ends = map(was_saved_in_a_hook_at_the_end, (progress.total, progress.current))
        if loop.epoch_loop.restarting and all(ends):
            progress.increment_completed()
            replace(once, loop.epoch_loop, "advance", end_batch)
    original()


def _reset_epoch(trainer: Any, original: Callable[[], None]) -> None:
    """Resets the epoch loop, and starts the next epoch if a run resumes from the last batch of one."""
    loop = trainer.fit_loop.epoch_loop
    ended = _is_at_last_batch(loop)
    original()
    if ended and loop.batch_progress.is_last_batch:
        for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
            progress.reset_on_run()
        loop.val_loop.batch_progress.total.reset()
    # Lightning has is_resuming from 2.5.3 on.
    resumed = getattr(trainer.fit_loop, "is_resuming", False) or loop.restarting
    if resumed and trainer.current_epoch > 0 and loop.batch_progress.current.ready == 0:
        iter(trainer.fit_loop._data_fetcher)


# Metrics

# The arguments of `self.log`: Lightning insists that they are the same in the next call.
_ARGUMENTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    "metric_attribute",
)
_SUMS = ("value", "cumulated_batch_size", "_forward_cache")


def metrics_state_dict(trainer: Any) -> dict[str, Any]:
    seen = trainer._logger_connector._callback_metrics if trainer.strategy.is_alone else trainer.callback_metrics
    epoch = trainer.fit_loop.epoch_progress.current
    results = trainer.fit_loop.epoch_loop._results if epoch.processed < epoch.started else {}
    return {
        "seen": _tensors(seen),
        "epoch": {key: _result_state(result) for key, result in results.items() if _is_restorable(result)},
    }


def load_metrics_state_dict(trainer: Any, state: dict[str, Any]) -> None:
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
    meta, reduction = result.meta, result.meta.reduce_fx.__name__
    return {
        "arguments": {name: getattr(meta, name) for name in _ARGUMENTS},
        "reduction": reduction,
        "of_torch": meta.reduce_fx is getattr(torch, reduction, None),
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "sums": _tensors({name: getattr(result, name, None) for name in _SUMS}),
        "metrics": None
        if result.is_tensor
        else {
            name: {"updates": part._update_count, "values": {key: getattr(part, key) for key in part._defaults}}
            for name, part in _parts(result.value)
        },
    }


def _restored_result(trainer: Any, saved: dict[str, Any]) -> Any:
    classes: Any = sys.modules[type(trainer.fit_loop.epoch_loop._results).__module__]
    reduction = getattr(torch if saved["of_torch"] else builtins, saved["reduction"])
    meta = classes._Metadata(**saved["arguments"], reduce_fx=reduction)
    meta.sync = classes._Sync(fn=trainer.strategy.reduce, **saved["sync"])
    result = classes._ResultMetric(meta, is_tensor=saved["metrics"] is None)
    if saved["metrics"] is not None:
        result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        for name, part in _parts(result.value):
            part._update_count = saved["metrics"][name]["updates"]
            for key, value in saved["metrics"][name]["values"].items():
                there = [each.to(part.device) for each in value] if isinstance(value, list) else value.to(part.device)
                setattr(part, key, there)
    for name, value in saved["sums"].items():
        setattr(result, name, value)
    result._update_count = 1
    return result


def _parts(metric: Metric) -> list[tuple[str, Metric]]:
    """Returns a metric and the metrics that it wraps, with their names."""
    return [(name, part) for name, part in metric.named_modules() if isinstance(part, Metric)]
