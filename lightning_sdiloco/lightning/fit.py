"""One fit: everything that begins with it and ends with it."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

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
from lightning_sdiloco.lightning.auto_settings import tell
from lightning_sdiloco.lightning.checkpoint.checkpointer import Checkpointer
from lightning_sdiloco.lightning.collectives import BatchWatch
from lightning_sdiloco.lightning.evaluation import Evaluation
from lightning_sdiloco.lightning.host.batches import keep_batches_silent
from lightning_sdiloco.lightning.host.epochs import Epochs, end_epochs_together
from lightning_sdiloco.lightning.host.paced_data import follow_engine
from lightning_sdiloco.lightning.host.patching import check_names, replace
from lightning_sdiloco.lightning.host.refusals import refuse_what_cannot_work
from lightning_sdiloco.lightning.host.resumed import begin_epochs_alike
from lightning_sdiloco.lightning.inner_steps import InnerSteps
from lightning_sdiloco.lightning.model_format.base import ModelFormat
from lightning_sdiloco.lightning.monitor import asks_for_diagnostics, shown
from lightning_sdiloco.lightning.options import CurrentOptions, Options
from lightning_sdiloco.lightning.requests import Requests
from lightning_sdiloco.lightning.results import Results
from lightning_sdiloco.lightning.signal_latency import SignalLatency
from lightning_sdiloco.lightning.signals import Signals
from lightning_sdiloco.lightning.weight_averaging import Averaging
from lightning_sdiloco.lightning.worker_groups import ConnectedGroups

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


class Parts(NamedTuple):
    """The parts of a strategy that outlive a fit."""

    options: Options
    groups: ConnectedGroups
    model_format: ModelFormat
    results: Results
    termination: type[BaseException]


class Fit:
    """A fit of a trainer. Every fit has an object of its own, so nothing is reset."""

    def __init__(self, trainer: Any, parts: Parts) -> None:
        self._trainer = trainer
        self._parts = parts
        self.options = CurrentOptions(parts.options)
        self.requests = Requests()
        self.steps = InnerSteps()
        self.checkpointer = Checkpointer(trainer, parts.groups, self.options, parts.model_format, self.requests)
        self.evaluation = Evaluation(
            trainer,
            self.steps,
            parts.groups,
            parts.model_format,
            parts.options.evaluate,
            lambda: self._signals is not None and self._signals.is_ending,
        )
        self.watch = BatchWatch(parts.groups, _ADVICE)
        self._patches = ExitStack()
        self._signals: Signals | None = None
        self._epochs: Epochs | None = None
        self._averaging: Averaging | None = None
        self._signal_latency: SignalLatency | None = None
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
        trainer, groups = self._trainer, self._parts.groups
        self._parts.results.begin(self.options)
        check_names(trainer)
        refuse_what_cannot_work(trainer, self.options.settings.shares)
        termination = self._parts.termination
        self._signals = Signals(trainer, self.requests, groups.topology.world, termination, self._leave)
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
        self._averaging = Averaging(self._trainer, self.steps, self._parts.groups.topology, self._patches)

    def prepare(self, model: nn.Module) -> None:
        """Refuses models that cannot be trained, and makes all ranks start from the same model."""
        topology = self._parts.groups.topology
        self.checkpointer.make_trainable(model)
        require_same_model(model, topology.world)
        self._parts.results.cut(cut(model, self.options.settings).fragments)
        align_model(model, topology)

    def start(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Makes the engine. The weights are final only now: checkpoints are restored, and user hooks have run."""
        engine = StreamingDiLoCo(
            module,
            topology=self._parts.groups.topology,
            inner_optimizers=optimizers,
            federation=self._parts.options.federation,
            **vars(self.options.settings),
        )
        engine.diagnose(asks_for_diagnostics(self._trainer))
        self._parts.results.read(engine)
        self.steps.start(engine)
        self.requests.connect(engine)
        self.options.options.auto.start()
        self._watch_signals(engine)
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer):  # Lightning takes anything that has its methods.
                # In manual optimization they may be stepped without Lightning's wrapper.
                optimizer.register_step_post_hook(self.steps.note_step)
        self.checkpointer.resume(engine, self._averaging)
        engine.join()
        self._announce(engine)

    def _announce(self, engine: StreamingDiLoCo) -> None:
        if self._parts.options.federation is not None:
            return
        # What is left to the planner is told once it has chosen.
        if self._trainer.is_global_zero and not self.options.options.auto.names:
            warn_of_few_rounds(engine.schedule, inner_steps_of(self._trainer))
            self._announcement = Announcement(engine, self._trainer.lightning_module)

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
        self._parts.results.cut(engine.fragments)
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
        if self._signal_latency is not None:
            self._signal_latency.step()
        if self._announcement is not None:
            self._announcement.step()
        if self.options.options.auto.step(self.options.settings.sync_every - engine.steps_in_rounds):
            self._choose(engine)
        return landings

    def _choose(self, engine: StreamingDiLoCo) -> None:
        """Chooses the ``"auto"`` settings; see [Note: what is chosen when]."""
        self.meet()
        trainer, auto, topology = self._trainer, self.options.options.auto, self._parts.groups.topology
        chosen = auto.choose(self.options.settings, trainer.lightning_module, topology)
        self.options.choose(chosen)
        engine.choose(chosen)
        self._parts.results.cut(engine.fragments)
        self._watch_signals(engine)
        self._announce(engine)
        if trainer.is_global_zero and auto.planned:
            tell(engine.settings, len(engine.fragments), auto, trainer.loggers, trainer.global_step)

    def _watch_signals(self, engine: StreamingDiLoCo) -> None:
        # The ranks of a site need no launch to agree.
        waits = not self.options.options.auto.names and self._parts.options.federation is None
        watches = self._trainer.is_global_zero and waits
        environment = self._trainer.strategy.cluster_environment
        self._signal_latency = SignalLatency(engine.longest_wait, environment) if watches else None

    def all_gather(self, tensor: Tensor, sync_grads: bool, gather: Callable[..., Tensor]) -> Tensor:
        """Returns the tensors of all ranks of the worker group, stacked, and says once that it is only those."""
        topology = self._parts.groups.topology
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
        if self.steps.engine is None or self._parts.groups.failed:
            return []
        self.meet()
        landings = self.steps.engine.finish()
        if self._epochs is not None:
            self._epochs.collect()
        return landings

    def end(self, model: nn.Module | None) -> None:
        """Makes sure that all ranks hold the same model after training, and obeys late signals."""
        topology = self._parts.groups.topology
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
        return ended and isinstance(exception, self._parts.termination)

    def _leave(self) -> None:
        """Ends a fit that has been saved and goes on in another process."""
        if self.steps.engine is not None and self._parts.options.federation is not None:
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
