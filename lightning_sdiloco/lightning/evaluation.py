"""Provides the models that are validated, saved in checkpoints, and averaged by callbacks.

[Note: the model that validation sees] The model to validate is put into the module before any
validation hook runs, and the local model is restored after the last hook. Callbacks and modules
that swap weights during a validation, as weight averaging does, therefore restore the validated
model. A strategy's hooks would not suffice, because Lightning always runs them after the hooks of
callbacks and modules.

[Note: the first round] Until every fragment has landed once, the outer model contains untrained
values. During this time, validation and checkpoints use the mean of the groups, which requires an
exchange. A group that validates on its own must not wait for other groups. The exchange therefore
takes place only if Lightning's loop has decided to validate, which happens after the same batch in
all groups, and if every rank has validation data. All ranks call ``trainer.save_checkpoint``, but a
rank that ends with an exception does not wait for other ranks, and after a signal, there is no time
for an exchange. In these cases, and whenever a single rank requests a ``state_dict``, the result is
the group's own model, and a warning is logged. The mean is used until the next inner step, so the
model that is saved as the best model is the one that was validated. The state from which a fit
resumes is saved separately and is not affected. On routes where groups have different outer
parameters, every validation and every checkpoint uses the mean of the groups.

[Note: averages of outer parameters] Lightning's callbacks read the module when a batch or an epoch
ends, but at that point the module contains local parameters. The callbacks are therefore given the
outer parameters instead, which change only at landings. An update that is requested between two
landings is made at the second landing. All groups land after the same inner steps, so their
averages are bit-identical. At the end of a fit, all fragments land, but a longer fit resumes from
the state before these landings. For this reason, a checkpoint contains the average from before the
end, together with the number of updates that a longer fit would have made after it. A resumed fit
repeats these updates.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

from torch import Tensor

from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.outer_view import GroupMean
from lightning_sdiloco.engine.start import is_aligned
from lightning_sdiloco.lightning.fit_state import FitState
from lightning_sdiloco.lightning.groups import ConnectedGroups
from lightning_sdiloco.lightning.host import (
    Forwarded,
    Function,
    Internal,
    LightningModule,
    State,
    Trainer,
    class_names,
    user_hooks,
    wrap,
)

_log = logging.getLogger(__name__)

_BUFFERS_ARE_DUE = "require_forward_param_sync"


class ShownModel:
    """The model that is validated and saved instead of the local model.

    Args:
        groups: The worker groups.
        save: The name of the method that saves a checkpoint on all ranks, for use in messages.
        warns: Whether to warn about the first round. The Fabric strategy logs a message about every
            file instead.
    """

    def __init__(self, groups: ConnectedGroups, save: str, warns: bool = True) -> None:
        self._groups = groups
        self._save = save
        self._warns = warns
        self.mean: GroupMean | None = None
        """The groups' mean if one has been exchanged since the last inner step, otherwise None."""
        # The first group's untrained state, if it has been sent.
        self._first_own: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Discards the exchanged state when training continues."""
        self.mean = None
        self._first_own = {}

    def take_first_own(self, engine: StreamingDiLoCo) -> None:
        """Receives the first group's untrained state for validation.

        All ranks must call this method.
        """
        self._groups.meet()
        self._first_own = engine.fragmented_model.view.first_own()

    @staticmethod
    def is_outer(engine: StreamingDiLoCo) -> bool:
        """Returns whether the whole outer model has been trained; see [Note: the first round]."""
        return engine.has_landed and engine.rounds.settings.shares

    def exchange(self, engine: StreamingDiLoCo) -> None:
        """Computes the mean of the groups and uses it as the shown model.

        All ranks must call this method.
        """
        self._groups.meet()
        if self._warns and not engine.has_landed and self._groups.topology.rank == 0:
            _log.warning(
                "Validation and checkpoints use the mean of the worker groups, exchanged in"
                " float32, until every fragment has landed once, after inner step %d. Until then,"
                " the outer model contains untrained values. Shown once.",
                engine.rounds.timetable.began_at + engine.rounds.timetable.schedule.first_round,
            )
        self._warns = False
        self.mean = engine.group_mean()

    @contextmanager
    def showing(
        self, engine: StreamingDiLoCo, models: Sequence[object], *, watches: bool = False
    ) -> Iterator[None]:
        """Puts the exchanged model or the outer model into the module for a ``with`` block."""
        # After a forward pass without gradients, DistributedDataParallel would assume that the
        # buffers of the next training step, which will have been restored by then, are already
        # synchronised.
        are_due = {
            model: getattr(model, _BUFFERS_ARE_DUE)
            for model in models
            if getattr(model, _BUFFERS_ARE_DUE, None) is not None
        }
        try:
            view = engine.fragmented_model.view
            with view.shown(self.mean, self._first_own, watches=watches):
                yield
        finally:
            for model, is_due in are_due.items():
                setattr(model, _BUFFERS_ARE_DUE, is_due)

    def state_dict(
        self,
        engine: StreamingDiLoCo,
        with_all: bool,
        local: Function,
        is_shown: bool = False,
    ) -> State:
        """Returns the model for a file, after an exchange if one is needed and all ranks save."""
        if self.mean is not None or is_shown:
            return self._values(engine.evaluate(self.mean), local)
        if with_all and not self.is_outer(engine):
            self.exchange(engine)
        elif not engine.has_landed:
            _log.warning(
                "This state_dict of worker group %d was taken after inner step %d, before every"
                " fragment had landed once. The state_dict contains this group's local values,"
                " because groups do not exchange values after an exception or a signal, or if only"
                " one rank saves. To save the mean of the groups, call %s on all ranks.",
                self._groups.topology.group_index,
                engine.inner_steps,
                self._save,
            )
            return self._values(nullcontext(), local)
        return self._values(engine.evaluate(self.mean), local)

    @staticmethod
    def _values(shown: AbstractContextManager[None], local: Function) -> State:
        """Copies the module's state while a model is shown."""
        with shown:
            return {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in local().items()
            }


# Hooks in which users may overwrite weights. If the user defines none of these hooks, groups need
# not compare their weights.
VALIDATION_HOOKS = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_validation_model_train",
)


class Rewritten:
    """Handles weights that hooks have overwritten.

    The weights become the new outer model if they are the same on all ranks.
    """

    def __init__(self, groups: ConnectedGroups) -> None:
        self._groups = groups
        self._has_warned = False

    def take(
        self,
        engine: StreamingDiLoCo,
        digests: Mapping[str, int],
        hooks: Sequence[str],
        *,
        with_all: bool,
    ) -> None:
        """Makes overwritten parameters the outer parameters, or warns once if ranks differ.

        Args:
            engine: The engine.
            digests: The digests of the parameters that were overwritten on this rank, keyed by
                name.
            hooks: The hooks that may have overwritten the parameters.
            with_all: Whether all ranks are calling this method and can compare their values.
        """
        topology = self._groups.topology
        ranks = [dict(digests)]
        is_alike = with_all
        if with_all:
            ranks = topology.world.all_gather_object(dict(digests))
            # Ranks of a group may hold different parts of a parameter.
            is_alike = all(
                held == ranks[rank % topology.group_size] for rank, held in enumerate(ranks)
            )
        names = sorted(set().union(*ranks))
        if not names:
            return
        if is_alike:
            engine.set_outer(names)
            if topology.rank == 0:
                _log.warning(
                    "%s overwrote %s with the same values on all ranks. The outer model now"
                    " contains these values. Fragments in flight and the outer momentum are"
                    " discarded.",
                    " or ".join(hooks),
                    _some(names),
                )
        elif not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s overwrote %s with different values on different ranks. These values do not"
                " become the outer model, and the next landings average them out. Compute the same"
                " values on all ranks, or call strategy.set_outer() in the hook on all ranks to"
                " use rank 0's weights. Shown once.",
                " or ".join(hooks),
                _some(names),
            )


def _some(names: Sequence[str]) -> str:
    """Formats the first few names."""
    shown = ", ".join(map(repr, names[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


class Evaluation:
    """Provides the model for validation; see [Note: the model that validation sees]."""

    def __init__(self, fit: FitState) -> None:
        self._fit = fit
        self._groups = fit.groups
        self._shows = fit.options.evaluate
        self.shown = ShownModel(fit.groups, "trainer.save_checkpoint")
        self.rewritten = Rewritten(fit.groups)
        # The user's hooks that may overwrite weights.
        self._hooks: list[str] = []
        # Whether all ranks are saving a checkpoint, whether a validation is due, and whether one is
        # running.
        self._saves_with_all = False
        self._is_due = False
        self._is_showing = False

    def begin(self, undo: ExitStack) -> None:
        self._hooks = user_hooks(self._fit.trainer, VALIDATION_HOOKS)
        trainer = self._fit.trainer
        epoch_loop = self._fit.trainer.fit_loop.epoch_loop
        wrap(undo, trainer, "save_checkpoint", self._save)
        if self._shows == "local":
            return

        def should_validate(decide: Function, fetcher: object) -> bool:
            self._is_due = decide(fetcher)
            return self._is_due

        wrap(undo, epoch_loop, "_should_check_val_fx", should_validate)
        # A callback may run a test or a prediction during a fit.
        for loop in (
            epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            wrap(undo, loop, "run", partial(self._run, loop))

    def state_dict(self, engine: StreamingDiLoCo, local: Function) -> State:
        """Returns the model for a checkpoint."""
        if self._groups.failed and self._groups.topology.group_size > 1:
            _log.warning(
                "This state_dict was taken after an exception. The state_dict contains this rank's"
                " local parameters, because gathering the outer parameters would mean waiting for"
                " ranks that may no longer exist. Resume from an earlier checkpoint."
            )
            return local()
        return self.shown.state_dict(engine, self._saves_with_all, local, self._is_showing)

    def _save(self, original: Function, *args: Forwarded, **kwargs: Forwarded) -> None:
        self._saves_with_all = not self._groups.failed and not self._fit.is_ending
        try:
            original(*args, **kwargs)
        finally:
            self._saves_with_all = False

    def _run(self, loop: Internal, original: Function) -> object:
        is_due = self._is_due
        self._is_due = False
        engine = self._fit.engine
        # Before and after training, and when one loop runs inside another, the model is already
        # shown.
        if engine is None or engine.is_finished or self._is_showing:
            return original()
        self.shown.forget()
        loop.setup_data()
        if is_due:
            self._exchange(engine, validates=not loop.skip)
        if loop.skip:
            return original()
        model = self._fit.trainer.strategy.model
        self._is_showing = True
        try:
            with self.shown.showing(engine, [model], watches=bool(self._hooks)):
                metrics = original()
                if self._hooks:
                    if is_due:
                        self._groups.meet()
                    self.rewritten.take(
                        engine,
                        engine.fragmented_model.view.rewritten(),
                        self._hooks,
                        with_all=is_due,
                    )
                return metrics
        finally:
            self._is_showing = False

    def _exchange(self, engine: StreamingDiLoCo, validates: bool) -> None:
        """Exchanges the model to validate if all ranks validate; see [Note: the first round]."""
        takes_mean = self._shows == "mean" or not self.shown.is_outer(engine)
        if not takes_mean and not engine.fragmented_model.view.own_moved:
            return
        device = self._fit.trainer.strategy.root_device
        if self._groups.decide(validates, True, device):
            if takes_mean:
                self.shown.exchange(engine)
            else:
                self.shown.take_first_own(engine)


class Averaging:
    """Updates weight-averaging callbacks at landings; see [Note: averages of outer parameters]."""

    def __init__(self, fit: FitState, undo: ExitStack) -> None:
        self._fit = fit
        self._module = fit.trainer.lightning_module
        # The WeightAveraging callback; there is at most one.
        self._callback: Internal = None
        # Whether an update is due at the next landing.
        self._wanted = False
        # The average from before the end of the fit; see [Note: averages of outer parameters].
        self._unfinished: State | None = None
        for callback in fit.trainer.callbacks:
            kinds = class_names(type(callback))
            if kinds & {"WeightAveraging", "StochasticWeightAveraging"}:
                # The average was created before all ranks shared one model.
                average = callback._average_model
                if not is_aligned(average, fit.groups.topology):
                    inner = average.module if hasattr(average, "n_averaged") else average
                    inner.load_state_dict(self._module.state_dict())
            if "StochasticWeightAveraging" in kinds:
                wrap(undo, callback, "on_train_epoch_start", self._in_outer)
            elif "WeightAveraging" in kinds:
                self._callback = callback
                self._should_update = callback.should_update
                self._update = callback.on_train_batch_end
                wrap(undo, callback, "should_update", self._answer)
                wrap(undo, callback, "on_train_batch_end", self._end_batch)
                wrap(undo, callback, "on_train_epoch_end", self._end_epoch)
                wrap(undo, callback, "on_train_end", self._end_fit)
                wrap(undo, callback, "on_save_checkpoint", self._save)

    def _in_outer(self, function: Function, *args: Forwarded) -> None:
        assert self._fit.engine is not None, "averages are updated in training"
        with self._fit.engine.evaluate():
            function(*args)

    def _answer(
        self, original: Function, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        if step_idx is not None:
            return self._wanted
        return bool(self._should_update(epoch_idx=epoch_idx))

    def _end_batch(
        self, original: Function, trainer: Trainer, module: LightningModule, *args: Forwarded
    ) -> None:
        if trainer.global_step > self._callback._latest_update_step:
            is_due = bool(self._should_update(step_idx=trainer.global_step - 1))
            self._wanted = is_due or self._wanted
        if not self._fit.is_training:
            self._keep_unfinished(landed=self._fit.landed)
        if self._wanted and (self._fit.landed or not self._fit.is_training):
            self._in_outer(self._update, trainer, module, *args)
            self._wanted = False

    def _end_epoch(self, original: Function, trainer: Trainer, module: LightningModule) -> None:
        updates_before = self._updates
        self._in_outer(original, trainer, module)
        # If max_steps ends the fit inside an epoch, a longer fit would not yet have reached the end
        # of the epoch.
        has_ended = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        if self._unfinished is not None and has_ended:
            self._unfinished["updates"] += self._updates - updates_before

    def _end_fit(self, original: Function, trainer: Trainer, module: LightningModule) -> None:
        # A fit that was stopped early has just been finished.
        self._keep_unfinished(landed=False)
        if self._wanted:
            self._update(trainer, module, None, None, 0)
            self._wanted = False
        original(trainer, module)

    def _save(
        self, original: Function, trainer: Trainer, module: LightningModule, checkpoint: State
    ) -> None:
        original(trainer, module, checkpoint)
        if self._callback._average_model is not None and not self._updates:
            # Before the first landing, nothing has been averaged. The first update copies the
            # model.
            checkpoint["state_dict"] = dict(checkpoint["current_model_state"])

    @property
    def _updates(self) -> int:
        return int(self._callback._average_model.n_averaged)

    def _keep_unfinished(self, landed: bool) -> None:
        if self._unfinished is None:
            average = self._callback._average_model.state_dict()
            self._unfinished = {
                "average": {key: value.to("cpu", copy=True) for key, value in average.items()},
                "wanted": self._wanted and not landed,
                "updates": int(self._wanted and landed),
            }

    def state_dict(self) -> State | None:
        """Returns the averaging state that callbacks do not save themselves, or None."""
        if self._callback is None:
            return None
        # The checkpoint contains rank 0's average. Other ranks' averages differ from it only in
        # their buffers.
        buffers = [
            buffer.to("cpu", copy=True) for buffer in self._callback._average_model.buffers()
        ]
        return {"wanted": self._wanted, "unfinished": self._unfinished, "buffers": buffers}

    def load_state_dict(self, state: State | None) -> None:
        """Restores a state that `state_dict` returned.

        Restore the engine's state from the same checkpoint before you call this method.
        """
        if self._callback is None or state is None:
            return
        average = self._callback._average_model
        self._wanted = state["wanted"]
        for buffer, saved_buffer in zip(average.buffers(), state["buffers"], strict=True):
            buffer.copy_(saved_buffer)
        unfinished = state["unfinished"]
        if unfinished is not None:
            self._wanted = unfinished["wanted"]
            average.load_state_dict(unfinished["average"])
            for _ in range(unfinished["updates"]):
                self._in_outer(average.update_parameters, self._module)
