"""Replaces, for the time of a fit, what Lightning itself does over all ranks at every batch.

[Note: silence between launches] Lightning broadcasts to all ranks before every batch whether rank 0 was terminated, and
after every batch whether a time limit or a checkpoint's time interval has passed. Each broadcast would make every
worker group wait for the slowest one at every step. Here these decisions travel in the control vector of the next
launch instead, and all ranks act on them after the same inner step, when that launch lands.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from lightning_sdiloco.lightning.collectives import in_batch
from lightning_sdiloco.lightning.host.group_collectives import keep_in_group
from lightning_sdiloco.lightning.host.patching import replace
from lightning_sdiloco.lightning.monitor import fitting
from lightning_sdiloco.lightning.requests import MOST_CHECKPOINTS, Request, Requests
from lightning_sdiloco.lightning.signals import Signals, listen_without_fit
from lightning_sdiloco.lightning.worker_groups import ConnectedGroups

# Columns that a bar of Rich takes for all but the metrics.
_BESIDE_METRICS = 66


def replace_batch_hooks(
    undo: ExitStack,
    trainer: Any,
    groups: ConnectedGroups,
    requests: Requests,
    signals: Signals,
    progress: Callable[[], dict[str, str]],
) -> None:
    """Replaces what would wait for all ranks at every batch; see [Note: silence between launches]."""
    checkpoints = _checkpoints_by_time(trainer)
    signals.listen(partial(replace, undo))
    if hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
        replace(undo, trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
    for timer in _those_with(trainer, "_check_time_remaining"):
        original = timer._check_time_remaining
        replace(undo, timer, "_check_time_remaining", partial(_check_time, timer, original, requests))
    for index, checkpoint in enumerate(checkpoints):
        hook = partial(requests.decide_checkpoint, index, checkpoint.on_train_batch_end)
        replace(undo, checkpoint, "on_train_batch_end", hook)
    loop = trainer.fit_loop.epoch_loop
    replace(undo, loop, "_get_monitor_value", partial(_mean_monitored, loop._get_monitor_value, groups, trainer))
    for saver in _those_with(trainer, "_monitor_candidates"):
        replace(undo, saver, "_monitor_candidates", partial(_mean_candidates, saver._monitor_candidates, groups))
    for saver in _those_with(trainer, "_save_last_checkpoint"):
        replace(undo, saver, "_save_last_checkpoint", partial(_save_last, saver._save_last_checkpoint, groups))
    keep_in_group(undo, trainer, groups.topology)
    if trainer.progress_bar_callback is not None:
        bar = trainer.progress_bar_callback
        replace(undo, bar, "get_metrics", partial(_progress, bar, bar.get_metrics, progress))


def replace_signal_handlers(undo: ExitStack, trainer: Any) -> None:
    """Replaces the signal handlers, which is all that validation, testing and prediction need."""
    listen_without_fit(trainer, partial(replace, undo))


def _checkpoints_by_time(trainer: Any) -> list[Any]:
    checkpoints = [c for c in _those_with(trainer, "_train_time_interval") if c._train_time_interval is not None]
    if len(checkpoints) > MOST_CHECKPOINTS:
        raise ValueError(
            f"{len(checkpoints)} ModelCheckpoint callbacks have a train_time_interval; worker groups can agree on at"
            f" most {MOST_CHECKPOINTS}. Use every_n_train_steps in some of them."
        )
    return checkpoints


def _those_with(trainer: Any, name: str) -> list[Any]:
    return [callback for callback in trainer.callbacks if hasattr(callback, name)]


def _check_time(timer: Any, original: Callable[[Any], None], requests: Requests, trainer: Any) -> None:
    if not in_batch(trainer.lightning_module):
        original(trainer)
    elif timer.time_elapsed() >= timer._duration:
        requests.ask(Request.TIME_LIMIT)


def _mean_monitored(original: Callable[[str], Any], groups: ConnectedGroups, trainer: Any, key: str) -> Any:
    """Returns what a plateau scheduler goes by; at the end of an epoch, the mean over all ranks."""
    value = original(key)
    if any(config.monitor == key and config.interval == "step" for config in trainer.lr_scheduler_configs):
        return value
    mean = groups.mean_over_all({key: float(value)} if value is not None else {})
    return mean.get(key, value)


def _mean_candidates(
    original: Callable[[Any], dict[str, Any]], groups: ConnectedGroups, trainer: Any
) -> dict[str, Any]:
    """Returns what a checkpoint callback chooses by and puts into names: means over all ranks of what groups logged."""
    candidates = original(trainer)
    numbers = {name: float(value) for name, value in candidates.items() if isinstance(value, Tensor)}
    means = groups.mean_over_all(numbers)
    return {
        name: value.new_tensor(means[name]) if name in means and value.is_floating_point() else value
        for name, value in candidates.items()
    }


def _save_last(original: Callable[..., None], groups: ConnectedGroups, *args: Any) -> None:
    # After an exception no checkpoint was written, so there is none to which the last one could be a link.
    if not groups.is_alone:
        original(*args)


def _progress(
    bar: Any, original: Callable[..., dict[str, Any]], progress: Callable[[], dict[str, str]], *args: Any
) -> dict[str, Any]:
    """Returns the metrics of a progress bar, with the outer step and the fragments in flight."""
    console = getattr(getattr(bar, "progress", None), "console", None)
    entries = progress()
    return {**original(*args), **(entries if console is None else fitting(entries, console.width - _BESIDE_METRICS))}
