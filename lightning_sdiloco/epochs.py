"""Lets the first epoch after a resume begin as it would have in a run that was not interrupted.

[Note: epochs after a resume] Lightning asks loaders for a new iterator at the start of every epoch but the first. After
a resume it has one already, asked for before the random state of the checkpoint was restored, and perhaps in the middle
of the data, where the loader was saved. A loader of torch takes a random number for each iterator: without it, whatever
is random afterwards, such as dropout, would differ.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_sdiloco.replacing import replace


def begin_epochs_alike(trainer: Any, undo: ExitStack) -> None:
    """Makes the replacement; see [Note: epochs after a resume].

    Args:
        trainer: The trainer that is about to fit.
        undo: Takes up what ends it.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    replace(undo, epoch_loop, "reset", partial(_reset, trainer, epoch_loop.reset))


def _reset(trainer: Any, original: Callable[[], None]) -> None:
    """As Lightning does, and starts the next epoch where a checkpoint of the last batch of one is resumed.

    Lightning does so only if that batch was the last by its number.
    """
    loop = trainer.fit_loop.epoch_loop
    ended = getattr(loop, "restarted_on_train_batch_end", False) and loop.batch_progress.is_last_batch
    original()
    if ended and loop.batch_progress.is_last_batch:
        for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
            progress.reset_on_run()
        loop.val_loop.batch_progress.total.reset()
    resumed = getattr(trainer.fit_loop, "is_resuming", False) or loop.restarting
    if resumed and trainer.current_epoch > 0 and loop.batch_progress.current.ready == 0:
        iter(trainer.fit_loop._data_fetcher)
