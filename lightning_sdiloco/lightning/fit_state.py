"""Defines a fit's shared state and the requests that ranks send each other.

A request, for example after a signal, is sent in a launch's control vector. All ranks agree on the
request when the launch lands.

[Note: signals wait for a step boundary] A signal handler may run between any two lines of Python.
The handler therefore only records the signal, and the request is sent with the next launch. That
launch lands after the same inner step on every rank, after which all ranks save together and end
the fit. A second signal has no effect.

[Note: where a fit ends] At the end of a batch, there are two points from which Lightning can resume
exactly. If a validation is due, the fit ends before the first validation batch, and the resumed fit
starts with that validation. Otherwise, the fit ends after all other work that is due. After the
last batch of an epoch, Lightning resumes with the next epoch, so the end of the epoch runs before
the fit ends.
"""

import logging
import os
from collections.abc import Iterable
from contextlib import ExitStack
from enum import IntFlag
from functools import reduce
from operator import or_
from types import FrameType
from typing import NoReturn

from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.fragments import Landing
from lightning_sdiloco.lightning.groups import ConnectedGroups
from lightning_sdiloco.lightning.host import Function, Trainer, wrap
from lightning_sdiloco.lightning.model_format import WholeModel
from lightning_sdiloco.lightning.options import Options

_log = logging.getLogger(__name__)


class Request(IntFlag):
    """The kinds of requests. Each bit from ``CHECKPOINT`` on represents one periodic checkpoint."""

    TERMINATE = 1
    TIME_LIMIT = 2
    REQUEUE = 4
    END_EPOCH = 8
    CHECKPOINT = 16


SIGNALLED = (Request.TERMINATE, Request.REQUEUE)

_BITS = [1 << index for index in range(16)]  # the request bits of the control vector

MOST_CHECKPOINTS = sum(bit >= Request.CHECKPOINT for bit in _BITS)


class Requests:
    def __init__(self, engine: StreamingDiLoCo | None = None) -> None:
        # The engine's launches carry the requests.
        self._engine = engine
        # The inner step after which each request was last fulfilled.
        self.done_at: dict[int, int] = {}
        self.agreed_now = 0
        # The index of the periodic checkpoint that a callback is currently asking about.
        self.deciding: int | None = None

    def ask(self, bit: int) -> None:
        """Sends a request to all groups. Repeating a pending request has no effect."""
        if self._engine is not None:
            # A plain number, because it is saved with the engine.
            self._engine.rounds.requests.ask(int(bit))

    def settle(self, bit: int) -> None:
        """Marks all pending requests of a kind as done, after the same inner step on all ranks."""
        if self._engine is not None:
            self.done_at[int(bit)] = self._engine.inner_steps
            self._engine.rounds.requests.withdraw(int(bit))

    def land(self, landings: Iterable[Landing], requested: int) -> None:
        """Handles the requests that all ranks agree on now that their launches have landed.

        Args:
            landings: The landings of this inner step.
            requested: The requests from a site's own ranks in this inner step.
        """
        self.agreed_now = requested
        for landing in landings:
            for bit in _BITS:
                if landing.requests & bit and landing.launched_at > self.done_at.get(bit, 0):
                    self.agreed_now |= bit
        for bit in filter(self.agreed, _BITS):
            self.settle(bit)

    def agreed(self, bit: int) -> bool:
        return bool(self.agreed_now & int(bit))

    def vote(self, skip: object) -> bool | None:
        """Returns whether all ranks skip a time-based save, or None if no callback requests one."""
        if self.deciding is None or not isinstance(skip, bool):
            return None
        bit = int(Request.CHECKPOINT) << self.deciding
        self.deciding = None
        if not skip:
            self.ask(bit)
        return not self.agreed(bit)


class FitState:
    """The state that a fit's parts share. Every fit creates a new object."""

    trainer: Trainer
    options: Options
    groups: ConnectedGroups
    format: WholeModel
    termination: type[BaseException]
    requests: Requests
    engine: StreamingDiLoCo | None
    landed: bool
    """Whether a fragment landed after the most recent inner step."""
    is_ending: bool
    """Whether a signal is ending the fit on all ranks."""
    ended: bool
    """Whether a signal has ended the fit and a checkpoint has been saved."""

    @property
    def is_training(self) -> bool:
        return self.engine is not None and not self.engine.is_finished


class Signals:
    """Records the signals received during a fit and ends the fit when all ranks agree."""

    def __init__(self, fit: FitState) -> None:
        self._fit = fit
        self._trainer = fit.trainer
        self._received: set[Request] = set()
        self._requeue: Function | None = None
        self._requeued_by: int | None = None

    def listen(self, undo: ExitStack) -> None:
        connector = self._trainer._signal_connector
        loop = self._trainer.fit_loop
        self._requeue = connector._slurm_sigusr_handler_fn
        wrap(
            undo,
            connector,
            "_sigterm_notifier_fn",
            lambda _, *args: self._note(Request.TERMINATE, *args),
        )
        wrap(
            undo,
            connector,
            "_slurm_sigusr_handler_fn",
            lambda _, *args: self._note(Request.REQUEUE, *args),
        )
        wrap(undo, loop.epoch_loop, "on_advance_end", self._after_batch)
        wrap(undo, loop, "on_advance_end", self._after_epoch)

    @property
    def received(self) -> int:
        # This iterates over a copy, because another signal may arrive meanwhile.
        return sum(self._received.copy())

    def end_if_any_received(self) -> None:
        """Ends the fit if a signal arrived too late for a launch to send the request.

        All ranks must call this method.
        """
        received = reduce(or_, self._fit.groups.topology.world.all_gather_object(self.received))
        if received:
            self._end(received)

    def _note(self, request: Request, signum: int, frame: FrameType | None) -> None:
        # See [Note: signals wait for a step boundary]. Adding to a set is atomic, so nested
        # handlers lose nothing.
        self._received.add(request)
        if request == Request.REQUEUE:
            self._requeued_by = signum

    def _after_batch(self, original: Function, data_fetcher: object) -> None:
        """Ends a batch and, if all ranks agree, the fit; see [Note: where a fit ends]."""
        loop = self._trainer.fit_loop.epoch_loop
        agreed = self._agreed()
        if agreed and loop._should_check_val_fx(data_fetcher):
            # To Lightning, this looks as if a validation had stopped in its first batch, so it
            # restarts from there.
            loop.val_loop.batch_progress.reset_on_run()
            loop.val_loop.batch_progress.increment_ready()
            loop.val_loop.batch_progress.increment_started()
            self._end(agreed)
        original(data_fetcher)
        if agreed and not loop._is_training_done:
            self._end(agreed)

    def _after_epoch(self, original: Function) -> None:
        agreed = self._agreed()
        original()
        if agreed:
            # This looks as if the fit had stopped in the last batch of an epoch, because Lightning
            # restores no loader after an epoch. The hooks at the end of the epoch have run and are
            # not repeated, as the current count shows; see [Note: the rest of a batch].
            loop = self._trainer.fit_loop
            for count in (loop.epoch_progress.total, loop.epoch_progress.current):
                count.processed -= 1
                count.completed -= 1
            loop.epoch_loop.batch_progress.total.completed -= 1
            loop.epoch_loop._batches_that_stepped -= 1
            self._end(agreed)

    def _agreed(self) -> int:
        """Returns the signals that all ranks have now agreed on."""
        if not self._fit.is_training:
            return 0  # After its last step, a fit runs to its end.
        return sum(filter(self._fit.requests.agreed, SIGNALLED))

    def _end(self, agreed: int) -> NoReturn:
        self._fit.is_ending = True
        if agreed & Request.REQUEUE and self._requeue is not None:
            # Lightning's own handler saves and requeues the job, which then resumes automatically.
            self._requeue(self._requeued_by or agreed, None)
        else:
            self._save()
        self._fit.ended = True
        if self._fit.engine is not None and self._fit.options.federation is not None:
            # The site continues in another process.
            self._fit.engine.leave()
        self._trainer._signal_connector.received_sigterm = True
        raise self._fit.termination

    def _save(self) -> None:
        trainer = self._trainer
        step = self._trainer.global_step
        if trainer.checkpoint_callbacks and not trainer.fast_dev_run:
            folder = trainer.default_root_dir
            for callback in reversed(trainer.checkpoint_callbacks):
                folder = getattr(callback, "dirpath", None) or folder
            # Lightning does not look for files with this name. Otherwise, it would resume a later
            # job from this file without being asked.
            path = os.path.join(str(folder), f"terminated-step={step}.ckpt")
            trainer.save_checkpoint(path)
            advice = f"To continue from this checkpoint, call trainer.fit(..., ckpt_path={path!r})."
        else:
            advice = (
                "No checkpoint was saved, because the trainer's settings do not allow it"
                " (enable_checkpointing, fast_dev_run, barebones)."
            )
        if trainer.is_global_zero:
            _log.warning(
                "A termination signal ended the fit on all ranks after global step %s. %s",
                step,
                advice,
            )


def listen_without_fit(trainer: Trainer, undo: ExitStack) -> None:
    """Replaces Lightning's signal handlers outside a fit, because they wait for all ranks."""
    connector = trainer._signal_connector

    def terminate(_: object, signum: int, frame: FrameType | None) -> None:
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        connector.received_sigterm = True

    def refuse(_: object, signum: int, frame: FrameType | None) -> None:
        _log.warning(
            "Signal %s requests that the job be requeued, but there is no state to save outside"
            " trainer.fit.",
            signum,
        )

    wrap(undo, connector, "_sigterm_notifier_fn", terminate)
    wrap(undo, connector, "_slurm_sigusr_handler_fn", refuse)
