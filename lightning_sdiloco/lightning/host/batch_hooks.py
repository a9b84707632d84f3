"""Replaces, for the time of a fit, what Lightning itself does over the whole world on every batch.

[Note: silence between launches] Lightning broadcasts over all ranks before every batch whether rank 0 was terminated,
and after every batch whether a time limit or a checkpoint's time interval has passed. Each would make every worker
group wait for the slowest at every step. Here these decisions travel in the control vector of the next launch instead,
and all ranks act on them after the same inner step, when that launch lands.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_sdiloco.lightning.host.patching import replace
from lightning_sdiloco.lightning.requests import MOST_CHECKPOINTS, Request
from lightning_sdiloco.lightning.signals import listen_without_fit

if TYPE_CHECKING:
    from lightning_sdiloco.lightning.groups import GroupsMixin


def silence(trainer: Any, strategy: "GroupsMixin") -> ExitStack:
    """Makes the replacements; see [Note: silence between launches].

    Args:
        trainer: The trainer that is about to fit.
        strategy: Its strategy.

    Returns:
        What undoes them, with ``close()``.

    Raises:
        ValueError: If there are more checkpoint callbacks with a time interval than a control vector has bits.
    """
    checkpoints = _checkpoints_by_time(trainer)
    undo = ExitStack()
    strategy.signals.listen(partial(replace, undo))
    if hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
        replace(undo, trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
    for timer in _those_with(trainer, "_check_time_remaining"):
        original = timer._check_time_remaining
        replace(undo, timer, "_check_time_remaining", partial(_check_time, timer, original, strategy))
    for index, checkpoint in enumerate(checkpoints):
        hook = partial(strategy.decide_checkpoint, index, checkpoint.on_train_batch_end)
        replace(undo, checkpoint, "on_train_batch_end", hook)
    loop = trainer.fit_loop.epoch_loop
    replace(undo, loop, "_get_monitor_value", partial(_mean_monitored, loop._get_monitor_value, strategy, trainer))
    for saver in _those_with(trainer, "_monitor_candidates"):
        replace(undo, saver, "_monitor_candidates", partial(_mean_candidates, saver._monitor_candidates, strategy))
    for saver in _those_with(trainer, "_save_last_checkpoint"):
        replace(undo, saver, "_save_last_checkpoint", partial(_save_last, saver._save_last_checkpoint, strategy))
    for metric in (part for part in trainer.lightning_module.modules() if isinstance(part, Metric)):
        if metric.dist_sync_fn is None and metric.process_group is None:
            replace(undo, metric, "dist_sync_fn", _GatherMetric(strategy))
    if trainer.progress_bar_callback is not None:
        bar = trainer.progress_bar_callback
        replace(undo, bar, "get_metrics", partial(_progress, bar.get_metrics, strategy))
    return undo


def silence_without_fit(trainer: Any) -> ExitStack:
    """Makes the one replacement that validation, testing and prediction need: that of the signal handlers.

    Args:
        trainer: The trainer that is about to validate, test or predict.

    Returns:
        What undoes it, with ``close()``.
    """
    undo = ExitStack()
    listen_without_fit(trainer, partial(replace, undo))
    return undo


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


def _check_time(timer: Any, original: Callable[[Any], None], strategy: "GroupsMixin", trainer: Any) -> None:
    if not strategy.in_batch:
        original(trainer)
    elif timer.time_elapsed() >= timer._duration:
        strategy.ask(Request.TIME_LIMIT)


def _mean_monitored(original: Callable[[str], Any], strategy: "GroupsMixin", trainer: Any, key: str) -> Any:
    """What reduces a learning rate on a plateau at the end of an epoch: what is not the same becomes a mean of all."""
    value = original(key)
    if any(config.monitor == key and config.interval == "step" for config in trainer.lr_scheduler_configs):
        return value
    mean = strategy.mean_over_all({key: float(value)} if value is not None else {})
    return mean.get(key, value)


def _mean_candidates(
    original: Callable[[Any], dict[str, Any]], strategy: "GroupsMixin", trainer: Any
) -> dict[str, Any]:
    """What a checkpoint callback chooses by and puts into names: what was logged per group becomes a mean of all."""
    candidates = original(trainer)
    numbers = {name: float(value) for name, value in candidates.items() if isinstance(value, Tensor)}
    means = strategy.mean_over_all(numbers)
    return {
        name: value.new_tensor(means[name]) if name in means and value.is_floating_point() else value
        for name, value in candidates.items()
    }


def _save_last(original: Callable[..., None], strategy: "GroupsMixin", *args: Any) -> None:
    # After an exception no checkpoint was written that the last one could be a link to.
    if not strategy.is_alone:
        original(*args)


class _GatherMetric:
    """Gathers a state of a torchmetrics metric: over the worker group inside a batch, over all ranks otherwise."""

    def __init__(self, strategy: "GroupsMixin") -> None:
        self._strategy = strategy

    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        if group is None and self._strategy.in_batch:
            group = self._strategy.topology.in_group.process_group
        return list(gather_all_tensors(value, group))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_GatherMetric":
        # A copy of the module must not copy the strategy.
        return self


def _progress(original: Callable[..., dict[str, Any]], strategy: "GroupsMixin", *args: Any) -> dict[str, Any]:
    """The metrics of a progress bar, with the outer step and the fragments in flight."""
    return {**original(*args), **strategy.progress()}
