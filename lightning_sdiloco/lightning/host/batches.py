"""Replaces, for the time of a fit, what Lightning and torchmetrics do over all ranks at every batch.

[Note: silence between launches] Lightning broadcasts to all ranks before every batch whether rank 0 was terminated, and
after every batch whether a time limit or a checkpoint's time interval has passed. Each broadcast would make every
worker group wait for the slowest one at every step. Here these decisions travel in the control vector of the next
launch instead, and all ranks act on them after the same inner step, when that launch lands.

[Note: nothing in users' objects] What metrics and synchronised BatchNorm gather is kept in the group by replacing it in
their libraries, not in the objects of users: a process group in a metric or in a layer would be found by whoever copies
or pickles it, such as a checkpoint whose hyperparameters hold a metric.
"""

import importlib
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_sdiloco.lightning.fit_state import MOST_CHECKPOINTS, FitState, Request
from lightning_sdiloco.lightning.groups import ConnectedGroups, in_batch
from lightning_sdiloco.lightning.host.patching import replace
from lightning_sdiloco.lightning.monitor import progress

# Columns that a bar of Rich takes for all but the metrics.
_BESIDE_METRICS = 66


def keep_batches_silent(undo: ExitStack, fit: FitState) -> None:
    """Replaces what would wait for all ranks at every batch; see [Note: silence between launches]."""
    trainer = fit.trainer

    def check(timer: Any, original: Callable[[Any], None], trainer: Any) -> None:
        if not in_batch(trainer.lightning_module):
            original(trainer)
        elif timer.time_elapsed() >= timer._duration:
            fit.requests.ask(Request.TIME_LIMIT)

    replace(undo, trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
    for timer in trainer.callbacks:
        if hasattr(timer, "_check_time_remaining"):
            replace(undo, timer, "_check_time_remaining", partial(check, timer, timer._check_time_remaining))
    by_time = [saver for saver in trainer.callbacks if getattr(saver, "_train_time_interval", None) is not None]
    if len(by_time) > MOST_CHECKPOINTS:
        raise ValueError(
            f"{len(by_time)} ModelCheckpoint callbacks have a train_time_interval; worker groups can agree on at"
            f" most {MOST_CHECKPOINTS}. Use every_n_train_steps in some of them."
        )

    def decide(index: int, hook: Callable[..., None], *args: Any) -> None:
        fit.requests.decide_checkpoint(index, hook, *args)

    for index, saver in enumerate(by_time):
        replace(undo, saver, "on_train_batch_end", partial(decide, index, saver.on_train_batch_end))
    _monitor_means(undo, trainer, fit.groups)
    _keep_in_group(undo, trainer, fit.groups.topology.in_group.process_group)
    if (bar := trainer.progress_bar_callback) is not None:
        metrics = bar.get_metrics

        def metrics_shown(*args: Any) -> dict[str, Any]:
            console = getattr(getattr(bar, "progress", None), "console", None)
            columns = math.inf if console is None else console.width - _BESIDE_METRICS
            return {**metrics(*args), **(progress(fit.engine, columns) if fit.engine is not None else {})}

        replace(undo, bar, "get_metrics", metrics_shown)


def _monitor_means(undo: ExitStack, trainer: Any, groups: ConnectedGroups) -> None:
    """Lets what is saved or scheduled by a metric that groups logged go by its mean over all ranks."""

    def monitored(original: Callable[[str], Any], key: str) -> Any:
        value = original(key)
        if any(config.monitor == key and config.interval == "step" for config in trainer.lr_scheduler_configs):
            return value
        return groups.mean_over_all({key: float(value)} if value is not None else {}).get(key, value)

    def candidates(original: Callable[[Any], dict[str, Any]], trainer: Any) -> dict[str, Any]:
        found = original(trainer)
        means = groups.mean_over_all({name: float(of) for name, of in found.items() if isinstance(of, Tensor)})
        return {
            name: value.new_tensor(means[name]) if name in means and value.is_floating_point() else value
            for name, value in found.items()
        }

    def save_last(original: Callable[..., None], *args: Any) -> None:
        # After an exception no checkpoint was written, so there is none to which the last one could be a link.
        if not groups.is_alone:
            original(*args)

    loop = trainer.fit_loop.epoch_loop
    replace(undo, loop, "_get_monitor_value", partial(monitored, loop._get_monitor_value))
    for saver in trainer.callbacks:
        if hasattr(saver, "_monitor_candidates"):
            replace(undo, saver, "_monitor_candidates", partial(candidates, saver._monitor_candidates))
        if hasattr(saver, "_save_last_checkpoint"):
            replace(undo, saver, "_save_last_checkpoint", partial(save_last, saver._save_last_checkpoint))


def _keep_in_group(undo: ExitStack, trainer: Any, own: Any) -> None:
    """Keeps metrics and synchronised BatchNorm in the worker group; see [Note: nothing in users' objects]."""
    if own is None:
        return
    # Each metric without a `dist_sync_fn` of its own looks it up there, whether it is part of the module or not.
    metrics: Any = importlib.import_module("torchmetrics.metric")
    gather_all, normalise = metrics.gather_all_tensors, nn.SyncBatchNorm.forward

    def gather(result: Tensor, group: Any = None) -> Any:
        return gather_all(result, own if group is None and in_batch(trainer.lightning_module) else group)

    def forward(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        before, layer.process_group = layer.process_group, own
        try:
            return normalise(layer, x)
        finally:
            layer.process_group = before

    replace(undo, metrics, "gather_all_tensors", gather)
    replace(undo, nn.SyncBatchNorm, "forward", forward)
