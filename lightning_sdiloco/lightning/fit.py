"""Runs a fit, driven by a callback's hooks."""

import logging
import math
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_sdiloco.comm.watch import WorldWatch
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.fragments import Landing
from lightning_sdiloco.engine.inner_optimizers import is_in_backward
from lightning_sdiloco.engine.matrices import with_direction
from lightning_sdiloco.engine.start import (
    align_at_end,
    align_model,
    cut,
    require_same_model,
    require_same_start,
)
from lightning_sdiloco.lightning.checkpoint import Checkpointer, ResumedLoops
from lightning_sdiloco.lightning.epochs import (
    Epochs,
    count_idle_batch,
    drop_metrics_of_some_ranks,
    follow_engine,
    keep_batches_silent,
)
from lightning_sdiloco.lightning.evaluation import Evaluation
from lightning_sdiloco.lightning.fit_state import FitState, Request, Requests, Signals
from lightning_sdiloco.lightning.groups import ConnectedGroups, ScaleWatch
from lightning_sdiloco.lightning.host import (
    Batch,
    Forwarded,
    Function,
    LightningModule,
    State,
    Trainer,
    check_names,
    may_write_at_end,
    refuse_unsupported,
    user_hooks,
    wrap,
)
from lightning_sdiloco.lightning.model_format import WholeModel
from lightning_sdiloco.lightning.monitor import (
    Announcement,
    Interval,
    add_to_row,
    lay_out,
    monitors_of,
    scalars_of,
    warn_of_few_rounds,
)
from lightning_sdiloco.lightning.options import Options, announce_choice
from lightning_sdiloco.lightning.results import Results

_log = logging.getLogger(__name__)

# Hooks between two epochs in which users may overwrite weights.
EPOCH_HOOKS = ("on_train_epoch_start", "on_train_epoch_end")

# The number of tensor names that a warning lists.
_SHOWN = 5

_ADVICE = (
    "To gather within the worker group, call self.all_gather(..., sync_grads=True) in the"
    " LightningModule, or pass group=trainer.strategy.topology.in_group.process_group to"
    " collectives."
)


class Distribution(NamedTuple):
    """The classes that a fit needs from a distribution of Lightning."""

    callback: "type[Fit]"
    launcher: Function
    termination: type[BaseException]


@dataclass
class BatchCounts:
    """The amount of training since the last inner step, to be reported by the next one."""

    samples: int = 0
    micro_batches: int = 0
    optimizer_steps: int = 0
    """The number of steps taken through Lightning's wrapper."""
    stepped: bool = False
    """Whether any optimizer of this fit has stepped."""


class Fit(FitState):
    """A trainer's fit, which is also a callback, but has no state to save in a checkpoint."""

    def __init__(
        self,
        trainer: Trainer,
        options: Options,
        groups: ConnectedGroups,
        model_format: WholeModel,
        results: Results,
        termination: type[BaseException],
    ) -> None:
        self.trainer = trainer
        self.options = options
        self.groups = groups
        self.format = model_format
        self.termination = termination
        self.engine: StreamingDiLoCo | None = None
        self.landed = False
        self.is_ending = False
        self.ended = False
        self.is_closed = False
        self.requests = Requests()
        self.signals = Signals(self)
        self.epochs = Epochs(self)
        self.checkpointer = Checkpointer(self)
        self.evaluation = Evaluation(self)
        self.watch = WorldWatch(_ADVICE)
        self.scale_watch = ScaleWatch()
        self.patches = ExitStack()
        self._results = results
        self._thread = threading.get_ident()
        self.counts = BatchCounts()
        # The number of optimizer steps in the last trained batch. An idle batch counts as many
        # steps.
        self._steps_per_batch = 0
        # Whether a loader may skip micro-batches, in which case the trained ones are counted.
        self._counts_micro_batches = False
        # None until a batch of the epoch has ended.
        self._epoch_has_stepped: bool | None = None
        # Whether the warning about an all_gather within the group has come due.
        self.has_gathered = False
        # Whether hooks may change which parameters are trainable, and whether they have done so
        # since the model was wrapped.
        self._is_between_epochs = False
        self._must_wrap = False
        # Digests of the model from before the epoch hooks, and the user's epoch hooks.
        self._epoch_digests: dict[str, int] | None = None
        self._epoch_hooks: list[str] = []
        # Landings between two inner steps, which the next inner step reports.
        self._early: list[Landing] = []
        self._announcement: Announcement | None = None
        self._interval: Interval | None = None
        # This strategy's part of the loggers' next row.
        self._row: dict[str, float] = {}

    # Start

    def begin(self) -> None:
        """Refuses unsupported setups and replaces Lightning's collectives over all ranks."""
        trainer = self.trainer
        groups = self.groups
        patches = self.patches
        results = self._results
        results.options = self.options
        results.engine = None
        results.fragments = ()
        results.summary = None
        check_names(trainer)
        refuse_unsupported(trainer, self.options.settings.shares, self.format.is_sharded)
        self.signals.listen(patches)
        keep_batches_silent(patches, self)
        self.epochs.end_together(patches)
        wrap(patches, trainer._logger_connector, "log_metrics", self._log)
        groups.announce = self.epochs.meet
        patches.callback(setattr, groups, "announce", None)
        ResumedLoops(trainer, patches)
        self.evaluation.begin(patches)
        wrap(patches, trainer, "save_checkpoint", self._save)
        # In manual optimization, an optimizer may step without Lightning's wrapper, and may be
        # created at any time.
        patches.callback(register_optimizer_step_post_hook(self._note_step).remove)

    def prepare(self, model: nn.Module) -> None:
        """Refuses models that cannot be trained and makes all ranks start from the same model."""
        topology = self.groups.topology
        self.checkpointer.make_trainable(model)
        require_same_model(model, topology.world)
        settings = with_direction(self.options.settings, model, topology, says=False)
        self._results.fragments = cut(model, settings).fragments
        align_model(model, topology)

    def start(self, module: LightningModule, optimizers: list[Optimizer]) -> None:
        """Creates the engine.

        The initial weights are final at this point, because checkpoints have been restored and user
        hooks have run.
        """
        require_same_start(self.checkpointer.start, self.groups.topology.world)
        steps = self._known_steps
        self.options.choose_for_length(module, self.groups.topology, steps)
        engine = StreamingDiLoCo(
            module,
            topology=self.groups.topology,
            inner_optimizers=optimizers,
            federation=self.options.federation,
            **vars(self.options.settings),
        )
        diagnoses = any(monitor.diagnostics for monitor in monitors_of(self.trainer))
        engine.rounds.diagnose(diagnoses)
        self.engine = engine
        self._results.engine = engine
        # Lightning validates and saves on all ranks between two inner steps, so the fit watches
        # batches instead.
        if engine.watch is not None:
            engine.watch.stop()
        # A learning rate finder has already trained in this fit.
        self.landed = False
        self.counts = BatchCounts()
        self._steps_per_batch = 0
        self._counts_micro_batches = False
        self.requests = Requests(engine)
        self.scale_watch.look_at(module, self.groups.topology)
        self.options.start()
        self._epoch_has_stepped = None
        self.checkpointer.resume(engine)
        engine.join(None if steps == math.inf else int(steps))
        self._announce(engine)
        self._note_before_hooks()

    def _note_step(self, optimizer: Optimizer, *_: Forwarded) -> None:
        """Marks the batch as an inner step if the optimizer that has stepped belongs to this fit.

        torch calls this hook for every optimizer in the process, and other fits may run in other
        threads.
        """
        is_in_fit = threading.get_ident() == self._thread or is_in_backward()
        if self.engine is None or not is_in_fit:
            return
        cut_model = self.engine.fragmented_model.cut_model
        if optimizer in self.trainer.optimizers or cut_model.has_parameters_of(optimizer):
            self.counts.stepped = True

    @property
    def _known_steps(self) -> float:
        """The number of inner steps in this fit, or infinity if unknown."""
        # Lightning reports -1 if loaders have no length and nothing else ends the fit.
        steps = math.inf if self.trainer.fast_dev_run else self.trainer.estimated_stepping_batches
        return steps if steps >= 0 else math.inf

    def _announce(self, engine: StreamingDiLoCo) -> None:
        # Open settings are announced once they have been chosen.
        is_due = self.options.federation is None and not self.options.open
        if is_due and self.trainer.is_global_zero:
            steps = self._known_steps
            if steps < math.inf:
                warn_of_few_rounds(engine.rounds.timetable.schedule, int(steps))
            environment = self.trainer.strategy.cluster_environment
            self._announcement = Announcement(engine, environment, self.options.why_rounds)

    # Batches

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        lay_out(trainer)
        self._interval = None
        self._row = {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_between_epochs = True
        self._epoch_has_stepped = None
        if self.engine is not None:
            may_leave_out = follow_engine(self.trainer, self.engine)
            self._counts_micro_batches = may_leave_out or self._counts_micro_batches

    def _take_rewritten(self) -> None:
        """Handles weights that epoch hooks have overwritten since the last batch."""
        digests_before = self._epoch_digests
        self._epoch_digests = None
        if self.engine is not None and digests_before is not None:
            digests = self.engine.fragmented_model.local_digests()
            rewritten = {
                name: digest
                for name, digest in digests.items()
                if digest != digests_before.get(name)
            }
            self.evaluation.rewritten.take(self.engine, rewritten, self._epoch_hooks, with_all=True)

    def _note_before_hooks(self) -> None:
        """Records digests of the model before any of the user's epoch hooks run."""
        self._epoch_hooks = user_hooks(self.trainer, EPOCH_HOOKS)
        if self._epoch_hooks and self.engine is not None and not self.engine.is_finished:
            self._epoch_digests = self.engine.fragmented_model.local_digests()

    def follow_model(self) -> bool:
        """Adapts the engine to changes made by hooks. Returns whether to wrap the model again."""
        if self._is_between_epochs and self.engine is not None:
            is_same = self.engine.fragmented_model.cut_model.is_same()
            must_recut = self._any_rank(not is_same)
            self._recut_or_take(self.engine, must_recut)
        self._is_between_epochs = False
        must_wrap = self._must_wrap
        self._must_wrap = False
        return must_wrap

    def _any_rank(self, holds: bool) -> bool:
        return self.groups.decide(holds, all=False, device=self.trainer.strategy.root_device)

    def _recut_or_take(self, engine: StreamingDiLoCo, must_recut: bool) -> None:
        """Handles overwritten weights and, if necessary, divides the model into fragments again.

        All ranks must call this method.
        """
        if not must_recut:
            self._take_rewritten()
            return
        # The fragments do not match parameters that hooks have reshaped.
        for fragment in engine.fragmented_model.fragments:
            fragment.let_go()
        self._take_rewritten()
        self.evaluation.shown.forget()
        # At the next inner step, requests that came with these launches are decided and the
        # landings are logged.
        self._early += engine.recut(self.trainer.strategy.optimizers)
        self._must_wrap = True

    def _save(self, save: Function, *args: Forwarded, **kwargs: Forwarded) -> None:
        """Makes a checkpoint between two epochs include the parameters that hooks have replaced."""
        engine = self.engine
        waits = not (self.groups.failed or self.is_ending)
        if engine is None or engine.is_finished:
            save(*args, **kwargs)
            return
        if self._is_between_epochs and waits and not engine.fragmented_model.view.is_shown:
            if self._any_rank(not engine.fragmented_model.cut_model.is_same()):
                self._recut_or_take(engine, must_recut=True)
                self._note_before_hooks()
        elif engine.fragmented_model.cut_model.new():
            _log.warning(
                "This checkpoint was saved after parameters were replaced but before the model was"
                " divided into fragments again. A fit that resumes from this checkpoint therefore"
                " starts with the old parameters. Replace parameters in on_train_epoch_start or"
                " on_train_epoch_end."
            )
        save(*args, **kwargs)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        self._note(self.end_batch(batch))
        run_is_over = self.engine is not None and self.engine.is_over
        if self.requests.agreed(Request.TIME_LIMIT) or run_is_over:
            trainer.should_stop = True
        loop = trainer.fit_loop.epoch_loop
        if self.requests.agreed(Request.END_EPOCH) and not loop._num_ready_batches_reached():
            loop.batch_progress.is_last_batch = True
            # If Lightning knows which batch is the last, this happens before the hooks at the end
            # of the batch.
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            # Requests still in transit concern this epoch, not the next.
            self.requests.settle(Request.END_EPOCH)
        self.finish_with_last_batch()

    def end_batch(self, batch: Batch) -> list[Landing]:
        """Takes an inner step if an optimizer stepped in the batch or if the batch was idle.

        Returns the landings.
        """
        self.watch.end()
        # Everything that was agreed on after the last inner step has now been done.
        self.requests.agreed_now = 0
        self.landed = False
        if batch is not None:
            self.counts.samples += samples_in(batch) or 1
            self.counts.micro_batches += 1
        is_idle = self._is_idle_step(batch)
        if self.engine is None or not (self.counts.stepped or is_idle):
            self._epoch_has_stepped = bool(self._epoch_has_stepped)
            return []
        self._epoch_has_stepped = True
        landings = self._step(self.engine, is_idle)
        if self._announcement is not None:
            self._announcement.step()
        self._choose_if_due(self.engine)
        return landings

    def _is_idle_step(self, batch: Batch) -> bool:
        """Returns whether other groups may take an inner step in this idle batch."""
        is_alone = self.groups.topology.num_groups == 1
        if batch is not None or self.counts.optimizer_steps or is_alone:
            return False
        steps = self._steps_per_batch or len(self.trainer.optimizers)
        return count_idle_batch(self.trainer, steps)

    def _step(self, engine: StreamingDiLoCo, is_idle: bool) -> list[Landing]:
        """Takes an inner step and handles the requests that arrived with the landings."""
        if engine.is_finished:
            raise RuntimeError(
                "Training cannot continue after its last batch, because max_epochs or max_steps was"
                " increased after the worker groups had merged their models. Set both arguments"
                " before trainer.fit, or call trainer.fit again."
            )
        self.requests.ask(self.signals.received)
        if engine.rounds.timetable.due(engine.inner_steps + 1):
            # This comes before the launch, because groups that wait for this one must make the same
            # launch, and this group waits for its landing.
            self.groups.meet()
        counts = self.counts
        self.counts = BatchCounts()
        self._steps_per_batch = counts.optimizer_steps or self._steps_per_batch
        trained = counts.micro_batches if self._counts_micro_batches else 1
        landings = engine.step(trained=trained, idle=is_idle, samples=max(1, counts.samples))
        landings = [*self._early, *landings]
        self._early = []
        self.landed = bool(landings)
        self.evaluation.shown.forget()
        self.requests.land(landings, engine.loop.requested)
        if landings:
            self.epochs.places.collect(landings[-1].launched_at)
        return landings

    def _choose_if_due(self, engine: StreamingDiLoCo) -> None:
        """Chooses the open settings after enough inner steps have been timed."""
        options = self.options
        rounds = engine.rounds
        first_launch = rounds.timetable.began_at + rounds.timetable.schedule.first_launch
        launch_in = first_launch - engine.inner_steps
        waited = engine.report()["exposed_wait_s"] if options.open else 0.0
        if not options.step(launch_in, waited):
            return
        self.groups.meet()
        is_planned = options.is_planned
        options.choose(self.trainer.lightning_module, self.groups.topology)
        rounds.choose(options.settings, engine.inner_steps)
        self._announce(engine)
        if self.trainer.is_global_zero and is_planned:
            self._row |= announce_choice(rounds.settings, len(engine.fragments), options.measured)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drops metrics that cannot be reduced and warns if the epoch had no inner step."""
        self._is_between_epochs = True
        self._note_before_hooks()
        if self.groups.topology.num_groups > 1:
            self.groups.meet()
            drop_metrics_of_some_ranks(trainer, self.groups.topology)
        if self._epoch_has_stepped is False and self.groups.topology.group_rank == 0:
            _log.warning(
                "Epoch %d ended without an inner step. No optimizer has updated this model's"
                " parameters, so the worker groups have not exchanged anything. Train with"
                " optimizers from torch.optim, or with the optimizers that self.optimizers()"
                " returns.",
                trainer.current_epoch,
            )

    def _note(self, landings: list[Landing]) -> None:
        for landing in landings:
            metrics = scalars_of(landing)
            if self._interval is not None:
                metrics |= self._interval.scalars_with(landing)
            elif self.engine is not None:
                # The interval begins with the first landing, because there was nothing to wait for
                # before it.
                self._interval = Interval(self.engine.rounds.settings.sync_every, landing.landed_at)
            add_to_row(self._row, metrics)
        for monitor in monitors_of(self.trainer):
            monitor.note(landings)

    def _log(self, log_metrics: Function, metrics: State, step: int | None = None) -> None:
        """Adds the landings to Lightning's training row, or to a new row if there is none."""
        # self.log would repeat values when nothing has landed, and lose values between two logged
        # steps.
        is_step = self.trainer._logger_connector._first_loop_iter is not None
        if self.trainer.training and step is None and (metrics or is_step):
            metrics = {**metrics, **_as_metrics(self._row)}
            self._row = {}
        log_metrics(metrics, step)

    def _log_last_row(self) -> None:
        """At the end of a fit, logs the landings since the last row."""
        last = max(0, self.trainer.fit_loop.epoch_loop._batches_that_stepped - 1)
        self.trainer._logger_connector.log_metrics(_as_metrics(self._row), step=last)
        self._row = {}

    # Ends

    def finish_with_last_batch(self) -> None:
        trainer = self.trainer
        is_last = trainer.max_steps not in (-1, None) and trainer.global_step >= trainer.max_steps
        if (
            trainer.max_epochs not in (-1, None)
            and trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        ):
            is_last = is_last or trainer.current_epoch + 1 >= trainer.max_epochs
        if is_last:
            # This is not in on_train_end, because the last validation and the last checkpoint come
            # before it.
            self._note(self.finish())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(self.finish())
        self._log_last_row()
        if self.engine is not None and self.engine.is_finished and may_write_at_end(trainer):
            self.engine.fragmented_model.view.keep_outer()

    def finish(self) -> list[Landing]:
        """Puts the outer parameters into the module at the end of a fit. Returns the landings."""
        if self.engine is None or self.groups.failed:
            return []
        self.groups.meet()
        # Hooks at the end of the last epoch may have replaced parameters, and all groups end alike.
        cut_model = self.engine.fragmented_model.cut_model
        if not self.engine.is_finished and self._any_rank(bool(cut_model.new())):
            self._recut_or_take(self.engine, must_recut=True)
        landings = [*self._early, *self.engine.finish()]
        self._early = []
        self.epochs.places.collect()
        return landings

    def align(self) -> None:
        """Copies the first group's model to all ranks after the final callbacks and hooks."""
        if self.groups.is_alone:
            return
        self.groups.meet()
        unlike = align_at_end(self.trainer.lightning_module, self.groups.topology)
        if unlike and self.trainer.is_global_zero:
            _log.warning(
                "After training, %d tensors of the model differ between ranks: %s%s. After the last"
                " step, a hook or callback wrote different values on different ranks. All ranks now"
                " have rank 0's values. The outer model is in strategy.outer_state_dict() and in"
                " the last checkpoint. To keep the values that the hook writes, write the same"
                " values on all ranks.",
                len(unlike),
                ", ".join(map(repr, unlike[:_SHOWN])),
                ", ..." if len(unlike) > _SHOWN else "",
            )

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule | None, exception: BaseException
    ) -> None:
        """Reports an exception to the other ranks before a callback saves a checkpoint."""
        # After a signal, all ranks end with this exception, after the same inner step.
        if self.ended and isinstance(exception, self.termination):
            self._log_last_row()
        else:
            self.groups.fail(exception)

    def close(self) -> None:
        self.is_closed = True
        self.patches.close()
        if self.engine is not None:
            self.engine.close()


def _as_metrics(row: Mapping[str, float]) -> dict[str, Tensor]:
    """Converts scalars to float64 tensors, which can represent any number of bytes exactly."""
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in row.items()}


def samples_in(batch: Batch) -> int:
    """Returns the length of a batch's first tensor, or 0 if there is no tensor."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, (list, tuple)):
        return 0
    for part in batch:
        samples = samples_in(part)
        if samples:
            return samples
    return 0
