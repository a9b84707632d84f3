"""One fit: everything that begins with it and ends with it, and the callback whose hooks drive it."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdiloco.engine import (
    Landing,
    StreamingDiLoCo,
    align_model,
    cut,
    is_aligned,
    require_same_model,
)
from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.lightning.announcement import Announcement, inner_steps_of, warn_of_few_rounds
from lightning_sdiloco.lightning.checkpoint import Checkpointer
from lightning_sdiloco.lightning.evaluation import Evaluation
from lightning_sdiloco.lightning.groups import BatchWatch, ConnectedGroups
from lightning_sdiloco.lightning.host.batches import keep_batches_silent
from lightning_sdiloco.lightning.host.epochs import (
    Epochs,
    count_idle_batch,
    drop_what_not_all_logged,
    end_epoch,
    end_epochs_together,
)
from lightning_sdiloco.lightning.host.paced_data import follow_engine
from lightning_sdiloco.lightning.host.patching import check_names, replace
from lightning_sdiloco.lightning.host.refusals import refuse_what_cannot_work
from lightning_sdiloco.lightning.host.resumed import begin_epochs_alike
from lightning_sdiloco.lightning.inner_steps import InnerSteps
from lightning_sdiloco.lightning.model_format import WholeModel
from lightning_sdiloco.lightning.monitor import (
    Interval,
    asks_for_diagnostics,
    lay_out,
    monitors_of,
    scalars_of,
    shown,
)
from lightning_sdiloco.lightning.options import Options, tell
from lightning_sdiloco.lightning.results import Results
from lightning_sdiloco.lightning.signals import Request, Requests, Signals
from lightning_sdiloco.lightning.weight_averaging import Averaging

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object

_log = logging.getLogger(__name__)

_ADVICE = (
    "Gather with self.all_gather(..., sync_grads=True) of the LightningModule, which stays in the worker group, or give"
    " collectives group=trainer.strategy.topology.in_group.process_group."
)


class Distribution(NamedTuple):
    """What a distribution of Lightning brings, beside the base classes of strategies."""

    callback: type[Any]
    launcher: type[Any]
    termination: type[BaseException]


class Fit:
    """A fit of a trainer. Every fit has an object of its own, so nothing is reset."""

    def __init__(
        self,
        trainer: Any,
        options: Options,
        groups: ConnectedGroups,
        model_format: WholeModel,
        results: Results,
        termination: type[BaseException],
    ) -> None:
        self._trainer, self._groups, self._results = trainer, groups, results
        self.options, self._termination = options, termination
        self.requests = Requests()
        self.steps = InnerSteps()
        self.checkpointer = Checkpointer(trainer, groups, options, model_format, self.requests)
        self.evaluation = Evaluation(
            trainer, self.steps, groups, options.evaluate, lambda: self._signals is not None and self._signals.is_ending
        )
        self.watch = BatchWatch(groups, _ADVICE)
        self._patches = ExitStack()
        self._signals: Signals | None = None
        self._epochs: Epochs | None = None
        self._averaging: Averaging | None = None
        self._announcement: Announcement | None = None
        self._epoch_begins = False
        self._has_gathered = False
        self._is_closed = False

    # Start

    def is_made_for(self, trainer: Any) -> bool:
        """Returns whether this is the fit that a trainer is about to run."""
        return trainer is self._trainer and not self._is_closed

    def begin(self) -> None:
        """Refuses what cannot work, and replaces what Lightning does over all ranks."""
        trainer, groups = self._trainer, self._groups
        self._results.forget()
        self._results.options = self.options
        check_names(trainer)
        refuse_what_cannot_work(trainer, self.options.settings.shares)
        self._signals = Signals(trainer, self.requests, groups.topology.world, self._termination, self._leave)
        self._signals.listen(partial(replace, self._patches))
        keep_batches_silent(self._patches, trainer, groups, self.requests, self.progress)
        self._epochs = Epochs(
            trainer,
            groups.topology,
            self.requests,
            self.steps,
            self.options.settings.timeout,
            is_counted=lambda: any(getattr(callback, "fit", None) is self for callback in trainer.callbacks),
        )
        end_epochs_together(self._patches, self._epochs)
        groups.announce_meetings(self.meet)
        self._patches.callback(groups.announce_meetings, None)
        begin_epochs_alike(trainer, self._patches)
        self.evaluation.begin(self._patches)

    def take_averages(self) -> None:
        """Makes callbacks that average weights average the outer parameters."""
        self._averaging = Averaging(self._trainer, self.steps, self._groups.topology, self._patches)

    def prepare(self, model: nn.Module) -> None:
        """Refuses models that cannot be trained, and makes all ranks start from the same model."""
        topology = self._groups.topology
        self.checkpointer.make_trainable(model)
        require_same_model(model, topology.world)
        self._results.fragments = cut(model, self.options.settings).fragments
        align_model(model, topology)

    def start(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Makes the engine. The weights are final only now: checkpoints are restored, and user hooks have run."""
        engine = StreamingDiLoCo(
            module,
            topology=self._groups.topology,
            inner_optimizers=optimizers,
            federation=self.options.federation,
            **vars(self.options.settings),
        )
        engine.diagnose(asks_for_diagnostics(self._trainer))
        self._results.engine = engine
        self.steps.start(engine)
        self.requests.connect(engine)
        self.options.auto.start()
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer):  # Lightning takes anything that has its methods.
                # In manual optimization they may be stepped without Lightning's wrapper.
                optimizer.register_step_post_hook(self.steps.note_step)
        self.checkpointer.resume(engine, self._averaging)
        engine.join()
        self._announce(engine)

    def _announce(self, engine: StreamingDiLoCo) -> None:
        if self.options.federation is not None:
            return
        # What is left to the planner is told once it has chosen.
        if self._trainer.is_global_zero and not self.options.auto.names:
            warn_of_few_rounds(engine.schedule, inner_steps_of(self._trainer))
            environment = self._trainer.strategy.cluster_environment
            self._announcement = Announcement(engine, self._trainer.lightning_module, environment)

    # Batches

    def begin_epoch(self) -> None:
        """Makes the first batch of the epoch check whether other parameters are trainable now."""
        self._epoch_begins = True
        follow_engine(self._trainer, self.steps)

    def recut(self) -> bool:
        """Cuts the model anew where an epoch begins with other trainable parameters."""
        begins, self._epoch_begins = self._epoch_begins, False
        engine = self.steps.engine
        if not begins or engine is None or not engine.has_other_parameters():
            return False
        self.meet()
        before = {name for fragment in engine.fragments for name in fragment.names}
        self.evaluation.forget()
        # What other groups asked for with these launches is decided, and logged, at the next inner step.
        self.steps.keep(engine.recut())
        self._results.fragments = engine.fragments
        now = {name for fragment in engine.fragments for name in fragment.names}
        if self._trainer.is_global_zero:
            _log.warning(
                "%d parameters became trainable and %d were frozen since the last epoch: the model is cut into %d"
                " fragments anew, and the rounds begin again.",
                len(now - before),
                len(before - now),
                len(engine.fragments),
            )
        return True

    def average_gradients(self, model: nn.Module | None) -> None:
        """Takes the mean of the gradients over the groups in the warm-up, unless DDP still adds some up."""
        engine = self.steps.engine
        if engine is not None and engine.is_warming_up and getattr(model, "require_backward_grad_sync", True):
            # Groups that wait for this one must take part.
            self.meet()
            engine.average_gradients()

    def end_batch(self, idle: bool = False) -> list[Landing]:
        """Makes the inner step of a batch in which an optimizer stepped, or would have."""
        self.watch.end()
        self.requests.begin_batch()
        if not self.steps.is_due(idle) or self.steps.engine is None:
            return []
        engine = self.steps.engine
        if self._signals is not None:
            self.requests.ask(self._signals.received)
        if engine.launches_next:
            # Before the launch: groups that wait for this one must make it too, and this one waits for its landing.
            self.meet()
        landings = self.steps.make(idle)
        self.evaluation.forget()
        self.requests.land(landings, engine.requested)
        if landings and self._epochs is not None:
            self._epochs.collect(landings[-1].launched_at)
        if self._announcement is not None:
            self._announcement.step()
        if self.options.auto.step(self.options.settings.sync_every - engine.steps_in_rounds):
            self._choose(engine)
        return landings

    def _choose(self, engine: StreamingDiLoCo) -> None:
        """Chooses the ``"auto"`` settings; see [Note: what is chosen when]."""
        self.meet()
        trainer, auto = self._trainer, self.options.auto
        chosen = auto.choose(self.options.settings, trainer.lightning_module, self._groups.topology)
        self.options.settings = chosen
        engine.choose(chosen)
        self._results.fragments = engine.fragments
        self._announce(engine)
        if trainer.is_global_zero and auto.planned:
            tell(engine.settings, len(engine.fragments), auto, trainer.loggers, trainer.global_step)

    def all_gather(self, tensor: Tensor, sync_grads: bool, gather: Callable[..., Tensor]) -> Tensor:
        """Returns the tensors of all ranks of the worker group, stacked, and says once that it is only those."""
        topology = self._groups.topology
        if not self._has_gathered and topology.num_groups > 1 and self._trainer.is_global_zero:
            _log.warning(
                "all_gather in a training batch gathers over the ranks of the worker group (here %d), not over all"
                " ranks: groups do not wait for each other between launches. The negatives of a contrastive loss, for"
                " instance, are those of the group. This is said once.",
                topology.group_size,
            )
        self._has_gathered = True
        if sync_grads:
            return topology.in_group.all_gather_with_gradients(tensor)
        return gather(tensor, topology.in_group.process_group)

    def progress(self) -> dict[str, str]:
        """Returns what a progress bar shows."""
        engine = self.steps.engine
        if engine is None:
            return {}
        flights = list(map(str, engine.in_flight))
        in_flight = ", ".join(flights[:3] if len(flights) <= 3 else [*flights[:2], f"+{len(flights) - 2}"]) or "-"
        return {"outer_step": str(engine.round), "in_flight": in_flight, **shown(engine.last_landing)}

    def meet(self) -> None:
        """Announces to groups that wait for the end of the epoch that this one is about to wait for all."""
        if self._epochs is not None:
            self._epochs.meet()

    # Ends

    def finish(self) -> list[Landing]:
        """Ends a fit that ran to its end, with the outer parameters in the module, and returns what landed."""
        if self.steps.engine is None or self._groups.failed:
            return []
        self.meet()
        landings = self.steps.engine.finish()
        if self._epochs is not None:
            self._epochs.collect()
        return landings

    def end(self, model: nn.Module | None) -> None:
        """Makes sure that all ranks hold the same model after training, and obeys late signals."""
        topology = self._groups.topology
        if model is not None and not is_aligned(model, topology, with_buffers=False):
            raise AgreementError(
                "After training the model differs between ranks: a hook or callback changed it in on_train_end. What it"
                " put there is no model that the worker groups agree on. The outer model is in"
                " strategy.outer_state_dict() and in the last checkpoint; take the callback out."
            )
        if self._signals is not None:
            self._signals.end_if_any_received()

    def was_ended_by(self, exception: BaseException) -> bool:
        """Returns whether all ranks end with this exception, after the same inner step."""
        ended = self._signals is not None and self._signals.ended
        return ended and isinstance(exception, self._termination)

    def _leave(self) -> None:
        """Ends a fit that has been saved and goes on in another process."""
        if self.steps.engine is not None and self.options.federation is not None:
            self.steps.engine.leave()

    def save(self, checkpoint: dict[str, Any], path: Any, write: Any) -> None:
        """Saves the fit; see `Checkpointer.save`."""
        assert self.steps.engine is not None, "there is nothing to save beside a checkpoint before training"
        self.checkpointer.save(self.steps.engine, self._averaging, checkpoint, path, write)

    def close(self) -> None:
        """Undoes what was replaced in Lightning, and ends the engine's work in the background."""
        self._is_closed = True
        self._patches.close()
        if self.steps.engine is not None:
            self.steps.engine.close()


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
