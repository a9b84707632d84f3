"""Lets the first epoch after a resume go on, or begin, as it would have in a run that was not interrupted.

[Note: epochs after a resume] Lightning asks loaders for a new iterator at the start of every epoch but the first. After
a resume it has one already, asked for before the random state of the checkpoint was restored, and perhaps in the middle
of the data, where the loader was saved. A loader of torch takes a random number for each iterator: without it, whatever
is random afterwards, such as dropout, would differ. And where the last batch of an epoch is resumed, Lightning goes on
with the next without counting it or calling `on_train_epoch_start`, which finetuning callbacks need.

[Note: the rest of a batch] A checkpoint that `every_n_train_steps` saves after a batch comes before what else is due
there: a validation, a learning rate that depends on metrics, the end of the epoch. Lightning leaves these out when it
resumes. They may draw random numbers, as a loader of torch does, and early stopping and other checkpoints may rest on
them. So here the resumed run begins with them, unless a signal ended the fit, which was after them. See also
[Note: metrics after a resume]. The same holds for learning rates after a checkpoint that was saved at the end of an
epoch, as `ModelCheckpoint` does by default.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_sdiloco.lightning.host.patching import replace


def begin_epochs_alike(trainer: Any, undo: ExitStack) -> None:
    """Makes the replacements; see [Note: epochs after a resume] and [Note: the rest of a batch].

    Args:
        trainer: The trainer that is about to fit.
        undo: Takes up what ends them.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    replace(undo, fit_loop, "reset", partial(_take_up, trainer, undo, fit_loop.reset))
    replace(undo, fit_loop, "on_advance_start", partial(_start_epoch, fit_loop, fit_loop.on_advance_start))
    replace(undo, epoch_loop, "reset", partial(_reset, trainer, epoch_loop.reset))


def _take_up(trainer: Any, undo: ExitStack, original: Callable[[], None]) -> None:
    """As Lightning does, and lets a run that was saved after a batch begin with the rest of it."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if trainer.strategy.fit.checkpointer.resumes_exactly:
        replace(undo, trainer.fit_loop, "on_advance_end", partial(_end_epoch, trainer, trainer.fit_loop.on_advance_end))
        if _saved_after_an_epoch(trainer.fit_loop):
            once = undo.enter_context(ExitStack())
            start = partial(_end_epoch_and_start, trainer, once, trainer.fit_loop.on_advance_start)
            replace(once, trainer.fit_loop, "on_advance_start", start)
        if _saved_after_a_batch(epoch_loop):
            epoch_loop.batch_progress.increment_completed()
            once = undo.enter_context(ExitStack())
            replace(once, epoch_loop, "advance", partial(_end_batch, trainer, once))
    original()


def _end_batch(trainer: Any, once: ExitStack, data_fetcher: Any) -> None:
    """In place of the first batch: Lightning then goes on as after any."""
    once.close()
    trainer.fit_loop.epoch_loop.val_loop.restarting = False
    for callback in trainer.callbacks:
        if hasattr(callback, "finish_with_last_batch"):
            callback.finish_with_last_batch(trainer)


def _end_epoch(trainer: Any, original: Callable[[], None]) -> None:
    """As Lightning does in a run that was not resumed, where it also updates learning rates that depend on metrics."""
    trainer.fit_loop._restarting = False
    original()


def _end_epoch_and_start(trainer: Any, once: ExitStack, original: Callable[[], None]) -> None:
    """As Lightning does after the hooks at the end of an epoch."""
    once.close()
    trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    original()


def _saved_after_an_epoch(fit_loop: Any) -> bool:
    """Whether a hook at the end of an epoch saved what is resumed: all but its completion has then been counted."""
    count = fit_loop.epoch_progress.total
    return bool(count.ready == count.started == count.processed == count.completed + 1)


def _saved_after_a_batch(epoch_loop: Any) -> bool:
    """Whether a hook at the end of a batch saved what is resumed: Lightning has then counted all but its completion."""
    progress = epoch_loop.batch_progress
    return bool(
        epoch_loop.restarting
        and hasattr(epoch_loop, "restarted_on_train_batch_end")
        and all(
            count.ready == count.started == count.processed == count.completed + 1
            for count in (progress.total, progress.current)
        )
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
