"""The callback that the strategy attaches: it ends every batch with an inner step, and logs what landed."""

import logging
from typing import TYPE_CHECKING, Any

from lightning_sdiloco.engine import Landing
from lightning_sdiloco.lightning.fit import Fit
from lightning_sdiloco.lightning.host.epochs import count_idle_batch, drop_what_not_all_logged, end_epoch
from lightning_sdiloco.lightning.monitor import Interval, lay_out, monitors_of, scalars_of
from lightning_sdiloco.lightning.requests import Request
from lightning_sdiloco.lightning.worker_groups import ConnectedGroups

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object


_log = logging.getLogger(__name__)


class InnerStepHooks(_Base):
    """Gives a fit the hooks that strategies do not have. It holds no state that a checkpoint would need.

    Args:
        fit: The fit whose inner steps it makes.
        groups: The ranks.
    """

    def __init__(self, fit: Fit, groups: ConnectedGroups) -> None:
        self.fit = fit
        self._groups = groups
        self._interval: Interval | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Tells TensorBoard which scalars belong together."""
        lay_out(trainer)
        self._interval = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Tells the fit that an epoch begins, for which it may have to cut the model anew."""
        self.fit.begin_epoch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Makes the inner step, logs what landed, and ends a fit with its last batch."""
        self.fit.steps.note_batch(batch)
        self._write(trainer, self.fit.end_batch(self._is_idle_step(trainer, batch)))
        if self.fit.requests.agreed(Request.TIME_LIMIT):
            trainer.should_stop = True
        if self.fit.steps.engine is not None and self.fit.steps.engine.is_over:
            trainer.should_stop = True
        if self.fit.requests.agreed(Request.END_EPOCH):
            end_epoch(trainer)
        if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            # Requests that are still on their way concern this epoch, not the next.
            self.fit.requests.settle(Request.END_EPOCH)
        self.finish_with_last_batch(trainer)

    def finish_with_last_batch(self, trainer: Any) -> None:
        """Ends the fit if its last batch is over."""
        if _is_last(trainer):
            # Here and not in on_train_end, because the last validation and the last checkpoint come before that.
            self._write(trainer, self.fit.finish())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Drops metrics that cannot be reduced, and warns once if no batch has counted as an inner step."""
        if self._groups.topology.num_groups > 1:
            self.fit.meet()
            drop_what_not_all_logged(trainer, self._groups.topology)
        if trainer.current_epoch == 0 and not self.fit.steps.made_any:
            _log.warning(
                "The first epoch ended without an inner step: no optimizer of configure_optimizers stepped, so the"
                " worker groups train apart. Return the optimizers there, and step those of self.optimizers()."
            )

    def _is_idle_step(self, trainer: Any, batch: Any) -> bool:
        """Returns whether the other groups make an inner step in this batch while this one had no data for it."""
        steps = self.fit.steps
        idle = batch is None and not steps.optimizer_steps and self._groups.topology.num_groups > 1
        return idle and count_idle_batch(trainer, steps.optimizer_steps_per_batch(len(trainer.optimizers)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends a fit that was stopped early, before other callbacks look at the model."""
        self._write(trainer, self.fit.finish())

    def _write(self, trainer: Any, landings: list[Landing]) -> None:
        """Logs landings, and hands them to the monitors."""
        for landing in landings:
            metrics = scalars_of(landing) | self._scalars_of_interval(landing)
            # Not through self.log: every landing counts, whatever log_every_n_steps is.
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        for monitor in monitors_of(trainer):
            monitor.note(landings)

    def _scalars_of_interval(self, landing: Landing) -> dict[str, float]:
        engine = self.fit.steps.engine
        if self._interval is None and engine is not None:
            # The interval begins with the first landing: before it there was nothing to wait for.
            self._interval = Interval(engine.settings.sync_every, landing.landed_at)
            return {}
        return self._interval.scalars_with(landing) if self._interval is not None else {}

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tells the other ranks of an exception, before another callback saves a checkpoint."""
        if not self.fit.was_ended_by(exception):
            self._groups.fail(exception)


def _is_last(trainer: Any) -> bool:
    if trainer.max_steps not in (-1, None) and trainer.global_step >= trainer.max_steps:
        return True
    limited = trainer.max_epochs not in (-1, None)
    last_batch = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
    return bool(limited and last_batch and trainer.current_epoch + 1 >= trainer.max_epochs)


def put_first(hooks: InnerStepHooks, trainer: Any) -> None:
    """Puts the hooks of a fit in front of the trainer's callbacks, in place of those of an earlier one."""
    trainer.callbacks[:] = [hooks, *(one for one in trainer.callbacks if not isinstance(one, InnerStepHooks))]
