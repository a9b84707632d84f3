"""Makes the first epoch after a resume go on, or begin, as it would have in a run that was not interrupted.

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
them. See also [Note: metrics after a resume]. The same goes for learning rates after a checkpoint that was saved at the
end of an epoch, as `ModelCheckpoint` does by default.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_sdiloco.lightning.host.patching import replace


def begin_epochs_alike(trainer: Any, undo: ExitStack) -> None:
    """Patches the loops of a trainer; see [Note: epochs after a resume] and [Note: the rest of a batch]."""
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    replace(undo, fit_loop, "reset", partial(_reset_fit, trainer, undo, fit_loop.reset))
    replace(undo, fit_loop, "on_advance_start", partial(_start_epoch, fit_loop, fit_loop.on_advance_start))
    replace(undo, epoch_loop, "reset", partial(_reset_epoch, trainer, epoch_loop.reset))


def _reset_fit(trainer: Any, undo: ExitStack, original: Callable[[], None]) -> None:
    """Resets the fit loop; a run that was saved after a batch or an epoch then begins with the rest of that."""
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
    """Replaces the first batch, once, so that Lightning goes on as after any batch."""
    once.close()
    trainer.fit_loop.epoch_loop.val_loop.restarting = False
    for callback in trainer.callbacks:
        if hasattr(callback, "finish_with_last_batch"):
            callback.finish_with_last_batch(trainer)


def _end_epoch(trainer: Any, original: Callable[[], None]) -> None:
    """Ends an epoch as in a run that was not resumed: learning rates that depend on metrics are updated."""
    trainer.fit_loop._restarting = False
    original()


def _end_epoch_and_start(trainer: Any, once: ExitStack, original: Callable[[], None]) -> None:
    """Catches up, once, on what follows the hooks at the end of an epoch, and starts the next epoch."""
    once.close()
    trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    original()


def _saved_after_an_epoch(fit_loop: Any) -> bool:
    """Returns whether a hook at the end of an epoch saved the checkpoint: only its completion is then not counted."""
    count = fit_loop.epoch_progress.total
    return bool(count.ready == count.started == count.processed == count.completed + 1)


def _saved_after_a_batch(epoch_loop: Any) -> bool:
    """Returns whether a hook at the end of a batch saved the checkpoint: only its completion is then not counted."""
    progress = epoch_loop.batch_progress
    return bool(
        epoch_loop.restarting
        and all(
            count.ready == count.started == count.processed == count.completed + 1
            for count in (progress.total, progress.current)
        )
    )


def _start_epoch(fit_loop: Any, original: Callable[[], None]) -> None:
    """Starts an epoch, and a new one if a run resumes from the last batch of one."""
    if fit_loop.restarted_mid_epoch and _is_at_last_batch(fit_loop.epoch_loop):
        fit_loop.reset_restart_stage()
    original()


def _is_at_last_batch(epoch_loop: Any) -> bool:
    return bool(epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch)


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
