"""Lets the first epoch after a resume go on, or begin, as it would have in a run that was not interrupted.

[Note: epochs after a resume] Lightning asks loaders for a new iterator at the start of every epoch but the first. After
a resume it has one already, asked for before the random state of the checkpoint was restored, and perhaps in the middle
of the data, where the loader was saved. A loader of torch takes a random number for each iterator: without it, whatever
is random afterwards, such as dropout, would differ. And where the last batch of an epoch is resumed, Lightning goes on
with the next without counting it or calling `on_train_epoch_start`, which finetuning callbacks need.

[Note: validation after a resume] A checkpoint that `every_n_train_steps` saves after a batch comes before the
validation that is due there. Lightning leaves that validation out when it resumes. It may draw random numbers, as a
loader of torch does, and early stopping, learning rates and checkpoints may rest on it. So here the resumed run begins
with it, as Lightning does where a run stopped within the first batch of a validation.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_sdiloco.replacing import replace
from lightning_sdiloco.signals import stop_before_first_batch


def begin_epochs_alike(trainer: Any, undo: ExitStack) -> None:
    """Makes the replacements; see [Note: epochs after a resume] and [Note: validation after a resume].

    Args:
        trainer: The trainer that is about to fit.
        undo: Takes up what ends them.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    replace(undo, fit_loop, "reset", partial(_take_up, fit_loop, fit_loop.reset))
    replace(undo, fit_loop, "on_advance_start", partial(_start_epoch, fit_loop, fit_loop.on_advance_start))
    replace(undo, epoch_loop, "reset", partial(_reset, trainer, epoch_loop.reset))


def _take_up(fit_loop: Any, original: Callable[[], None]) -> None:
    """As Lightning does, and goes on with the validation that was due where the checkpoint was saved."""
    epoch_loop = fit_loop.epoch_loop
    if _saved_after_a_batch(epoch_loop) and epoch_loop._should_check_val_fx(fit_loop._data_fetcher):
        epoch_loop.batch_progress.increment_completed()
        stop_before_first_batch(epoch_loop.val_loop)
    original()


def _saved_after_a_batch(epoch_loop: Any) -> bool:
    """Whether a hook at the end of a batch saved what is resumed: Lightning has then counted all but its completion."""
    count = epoch_loop.batch_progress.total
    return bool(
        epoch_loop.restarting
        and hasattr(epoch_loop, "restarted_on_train_batch_end")
        and count.ready == count.started == count.processed == count.completed + 1
    )


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
