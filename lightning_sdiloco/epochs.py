"""Lets the first epoch after a resume begin as it would have in a run that was not interrupted.

[Note: epochs after a resume] Lightning asks loaders for a new iterator at the start of every epoch but the first. After
a resume it has one already, asked for before the random state of the checkpoint was restored, and perhaps in the middle
of the data, where the loader was saved. A loader of torch takes a random number for each iterator: without it, whatever
is random afterwards, such as dropout, would differ. And where the last batch of an epoch is resumed, Lightning goes on
with the next without counting it or calling `on_train_epoch_start`, which finetuning callbacks need.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_sdiloco.replacing import replace


def begin_epochs_alike(trainer: Any, undo: ExitStack) -> None:
    """Makes the replacements; see [Note: epochs after a resume].

    Args:
        trainer: The trainer that is about to fit.
        undo: Takes up what ends them.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    replace(undo, fit_loop, "on_advance_start", partial(_start_epoch, fit_loop, fit_loop.on_advance_start))
    replace(undo, epoch_loop, "reset", partial(_reset, trainer, epoch_loop.reset))


def _start_epoch(fit_loop: Any, original: Callable[[], None]) -> None:
    """As Lightning does, also where the last batch of an epoch is resumed, so that another one begins."""
    if getattr(fit_loop, "restarted_mid_epoch", False) and _is_at_last_batch(fit_loop.epoch_loop):
        fit_loop.reset_restart_stage()
    original()


def _is_at_last_batch(epoch_loop: Any) -> bool:
    at_its_end = getattr(epoch_loop, "restarted_on_train_batch_end", False)
    return bool(at_its_end and epoch_loop.batch_progress.is_last_batch)


def _reset(trainer: Any, original: Callable[[], None]) -> None:
    """As Lightning does, and starts the next epoch where a checkpoint of the last batch of one is resumed.

    Lightning does so only if that batch was the last by its number.
    """
    loop = trainer.fit_loop.epoch_loop
    ended = _is_at_last_batch(loop)
    original()
    if ended and loop.batch_progress.is_last_batch:
        for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
            progress.reset_on_run()
        loop.val_loop.batch_progress.total.reset()
    resumed = getattr(trainer.fit_loop, "is_resuming", False) or loop.restarting
    if resumed and trainer.current_epoch > 0 and loop.batch_progress.current.ready == 0:
        iter(trainer.fit_loop._data_fetcher)
