"""The callback that the strategy attaches: it ends every batch with an inner step, and logs what landed."""

import logging
from typing import TYPE_CHECKING, Any

from lightning_sdiloco.flight import Landing
from lightning_sdiloco.requests import Request
from lightning_sdiloco.uneven import count_idle_batch, drop_what_not_all_logged, end_epoch

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base

    from lightning_sdiloco.groups import GroupsMixin
else:
    _Base = object


_log = logging.getLogger(__name__)


class StreamingDiLoCoCallbackMixin(_Base):
    """Gives the strategy the hooks that strategies do not have. It holds no state of its own.

    Args:
        strategy: The strategy that attaches it.
    """

    def __init__(self, strategy: "GroupsMixin") -> None:
        self._strategy = strategy

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Tells the strategy, which may have to cut the model anew."""
        self._strategy.begin_epoch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Makes the inner step, logs what landed, and ends a fit with its last batch."""
        _write(trainer, self._strategy.end_batch(self._is_idle_step(trainer, batch)))
        if self._strategy.agreed(Request.TIME_LIMIT):
            trainer.should_stop = True
        if self._strategy.agreed(Request.END_EPOCH):
            end_epoch(trainer)
        if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            # What is still on its way was asked for this epoch, not for the next.
            self._strategy.settle(Request.END_EPOCH)
        self.finish_with_last_batch(trainer)

    def finish_with_last_batch(self, trainer: Any) -> None:
        """Ends a fit whose last batch is over."""
        if _is_last(trainer):
            # Now, and not in on_train_end: the last validation and the last checkpoint come before that.
            _write(trainer, self._strategy.finish())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Drops what cannot be reduced, and says once if no batch counts as an inner step."""
        if self._strategy.topology.groups > 1:
            drop_what_not_all_logged(trainer, self._strategy)
        if trainer.current_epoch == 0 and not self._strategy.made_inner_steps:
            _log.warning(
                "The first epoch ended without an inner step: no optimizer of configure_optimizers stepped, so the"
                " worker groups train apart. Return the optimizers there, and step those of self.optimizers()."
            )

    def _is_idle_step(self, trainer: Any, batch: Any) -> bool:
        """Whether the other groups make an inner step in this batch, while this one had None to train on."""
        idle = batch is None and not self._strategy.optimizer_steps and self._strategy.topology.groups > 1
        return idle and count_idle_batch(trainer, self._strategy.optimizer_steps_per_batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends a fit that was stopped early, before other callbacks look at the model."""
        _write(trainer, self._strategy.finish())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tells the strategy first, before another callback saves a checkpoint."""
        self._strategy.fail(exception)


def _is_last(trainer: Any) -> bool:
    if trainer.max_steps not in (-1, None) and trainer.global_step >= trainer.max_steps:
        return True
    limited = trainer.max_epochs not in (-1, None)
    last_batch = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
    return bool(limited and last_batch and trainer.current_epoch + 1 >= trainer.max_epochs)


def _write(trainer: Any, landings: list[Landing]) -> None:
    for landing in landings:
        metrics = {
            "sdiloco/bytes_sent": landing.bytes_sent,
            "sdiloco/exposed_wait_ms": 1000 * landing.exposed_wait_s,
            "sdiloco/outer_grad_norm": landing.outer_grad_norm,
            "sdiloco/outer_lr": landing.outer_lr,
            "sdiloco/groups_left_out": len(landing.left_out),
            "sdiloco/groups_outlying": len(landing.outlying),
        }
        # Not through self.log: every landing counts, whatever log_every_n_steps is.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
