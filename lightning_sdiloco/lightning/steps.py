"""The inner steps of a strategy: what happens at the end of a batch, what ranks ask of each other, and how fits end."""

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from typing_extensions import override

from lightning_sdiloco.engine.agreement import is_aligned
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.flight import Landing
from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.launch.failures import Failures
from lightning_sdiloco.lightning.auto_settings import tell
from lightning_sdiloco.lightning.collectives import CollectivesMixin
from lightning_sdiloco.lightning.monitor.scalars import shown
from lightning_sdiloco.lightning.promptness import Promptness
from lightning_sdiloco.lightning.reading import ReadingMixin
from lightning_sdiloco.lightning.requests import Request
from lightning_sdiloco.lightning.signals import Signals

_log = logging.getLogger(__name__)


class StepsMixin(ReadingMixin, CollectivesMixin):
    """The inner steps of a strategy. It counts them and hands them to the engine."""

    termination: type[BaseException]
    _signals: Signals | None
    _failures: Failures | None
    _promptness: Promptness | None
    _noise: ExitStack
    _early: list[Landing]
    _epoch_begins: bool
    landed: bool
    _stepped: bool
    _optimizer_steps: int
    _steps_per_batch: int
    _deciding: int | None
    _agreed: int

    # Training

    def begin_epoch(self) -> None:
        """Looks at the first batch of the epoch whether other parameters are trainable now."""
        self._epoch_begins = True

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._recut_where_an_epoch_begins()

    def _recut_where_an_epoch_begins(self) -> None:
        # With its first batch all hooks have run that may freeze or unfreeze something at the start of an epoch.
        if self._epoch_begins and self._engine is not None and self._engine.has_other_parameters():
            self._recut(self._engine)
        self._epoch_begins = False

    def _recut(self, engine: StreamingDiLoCo) -> None:
        before = {name for fragment in engine.fragments for name in fragment.names}
        # What other groups asked with these launches is decided, and logged, with the next inner step.
        self._early += engine.recut()
        self._fragments = engine.fragments
        now = {name for fragment in engine.fragments for name in fragment.names}
        if self.is_global_zero:
            _log.warning(
                "%d parameters became trainable and %d were frozen since the last epoch: the model is cut into %d"
                " fragments anew, and the rounds begin again.",
                len(now - before),
                len(before - now),
                len(engine.fragments),
            )
        self._wrap_anew()

    def _wrap_anew(self) -> None:
        """Does what the wrapping of the model needs when other parameters have become trainable."""

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if batch is None:
            # Lightning calls no on_train_batch_start for an idle batch, and the other groups may be there. The user's
            # hooks that move a batch need not know of idle ones.
            self._recut_where_an_epoch_begins()
            return None
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        # Inner steps are batches in which an optimizer stepped, however many there are; one that a GradScaler skipped
        # counts, because a skip happens in one group alone.
        self._optimizer_steps += 1
        self._note_step()
        return output

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    @property
    def optimizer_steps(self) -> int:
        """How often optimizers have stepped in this batch."""
        return self._optimizer_steps

    @property
    def optimizer_steps_per_batch(self) -> int:
        """How often they did in the last batch in which one did; before, once each."""
        return self._steps_per_batch or len(self.optimizers)

    def end_batch(self, idle: bool = False) -> list[Landing]:
        """Makes the inner step of a batch in which an optimizer stepped, or would have. Returns what landed.

        Args:
            idle: Whether the other groups make an inner step in this batch while this one has nothing to train on.
        """
        self._agreed = 0
        self.landed = False
        if not (self._stepped or idle) or self._engine is None or self._requests is None:
            return []
        if self._engine.is_finished:
            raise RuntimeError(
                "Training goes on after its last batch: max_epochs or max_steps was raised when the worker groups had"
                " joined already. Set them before trainer.fit, or fit again."
            )
        self._steps_per_batch = self._optimizer_steps or self._steps_per_batch
        self._optimizer_steps = 0
        self._stepped = False
        self._requests.ask(self.signals.received)
        landings = [*self._early, *self._engine.step(idle=idle)]
        self._early = []
        self.landed = bool(landings)
        self._agreed = self._requests.agreed(landings)
        if self._promptness is not None:
            self._promptness.step(self._engine.inner_steps)
        if self._choosing.step(self._settings.sync_every - self._engine.steps_in_rounds):
            self._choose(self._engine)
        return landings

    def _choose(self, engine: StreamingDiLoCo) -> None:
        """See [Note: what is chosen when]."""
        assert self.lightning_module is not None
        self._settings = self._choosing.choose(self._settings, self.lightning_module, self.topology)
        engine.choose(self._settings)
        self._fragments = engine.fragments
        self._watch_signals()
        if self.is_global_zero:
            trainer = self.lightning_module.trainer
            tell(self._settings, len(engine.fragments), self._choosing.measured, trainer.loggers, trainer.global_step)

    def _watch_signals(self) -> None:
        assert self._engine is not None
        is_chosen = not self._choosing.names
        self._promptness = Promptness(self._engine.schedule) if self.is_global_zero and is_chosen else None

    def finish(self) -> list[Landing]:
        """Ends a fit that ran to its end: the module is left with the outer parameters. Returns what landed."""
        return self._engine.finish() if self._engine is not None and not self._failed else []

    @override
    def on_train_end(self) -> None:
        self.finish()
        super().on_train_end()
        # Callbacks have run: one that put another model in place did so in every rank for itself.
        if self.model is not None and not is_aligned(self.model, self.topology, with_buffers=False):
            raise AgreementError(
                "After training the model differs between ranks: a hook or callback changed it in on_train_end. What it"
                " put there is no model that the worker groups agree on. The outer model is in"
                " strategy.outer_state_dict() and in the last checkpoint; take the callback out."
            )
        self.signals.end_if_any_received()

    @property
    def made_inner_steps(self) -> bool:
        """Whether any batch has counted as an inner step."""
        return self._engine is not None and self._engine.inner_steps > 0

    @property
    def is_training(self) -> bool:
        """Whether a fit has started and not finished."""
        return self._engine is not None and not self._engine.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether a fit has finished: the outer parameters change no more."""
        return self._engine is not None and self._engine.is_finished

    def progress(self) -> dict[str, str]:
        """What a progress bar shows."""
        if self._engine is None:
            return {}
        in_flight = ", ".join(map(str, self._engine.in_flight)) or "-"
        outer_step = str(self.schedule.round(self._engine.inner_steps))
        return {"outer_step": outer_step, "in_flight": in_flight, **shown(self._engine.last_landing)}

    # What one rank asks and all do

    def ask(self, request: int) -> None:
        """Asks all ranks for something. They do it after the same inner step, when a launch has landed."""
        if self._requests is not None:
            self._requests.ask(request)

    @property
    def signals(self) -> Signals:
        """The signals that this rank gets in the fit that runs."""
        assert self._signals is not None, "signals are listened to from setup on"
        return self._signals

    def agreed(self, request: int) -> bool:
        """Whether all ranks do what was asked after this inner step."""
        return bool(self._agreed & request)

    def settle(self, request: int) -> None:
        """Takes what was asked up to now as done. All ranks do so after the same inner step."""
        if self._requests is not None:
            self._requests.settle(request)

    def decide_checkpoint(self, index: int, hook: Callable[..., None], *args: Any) -> None:
        """Runs a hook of a checkpoint callback whose time interval all ranks decide together."""
        self._deciding = index
        try:
            hook(*args)
        finally:
            self._deciding = None

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.is_alone:
            return obj
        if self._deciding is None or not isinstance(obj, bool):
            return super().broadcast(obj, src)
        # ModelCheckpoint asks at every batch whether to skip the save that its time interval may call for.
        bit = int(Request.CHECKPOINT) << self._deciding
        self._deciding = None
        if not obj:
            self.ask(bit)
        return not self.agreed(bit)

    # Ends

    def fail(self, exception: BaseException) -> None:
        """Tells that this rank ends with an exception: from now on it must not wait for others."""
        if isinstance(exception, self.termination) and self._signals is not None and self._signals.ended:
            # All ranks end with it, after the same inner step.
            return
        self._failed = True
        failures, self._failures = self._failures, None
        if failures is not None:
            with suppress(Exception):
                failures.leave(exception)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.fail(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._noise.close()
        if self._engine is not None:
            self._engine.close()
        super().teardown()
