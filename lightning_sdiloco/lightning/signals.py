"""What one rank asks for and all do after the same inner step: signals that end a fit, time limits, checkpoints.

A request travels in the control vector of a launch, and counts when that lands.

[Note: signals wait for a step boundary] A handler may run between any two lines of Python. So it only takes note; the
request travels with the next launch. When that has landed, on every rank after the same inner step, all save together
and end. A second signal changes nothing, neither before nor after that.

[Note: where a fit ends] There are two places at the end of a batch from which Lightning resumes exactly. If a
validation is due, it is the place before the first validation batch: the resumed fit starts with that validation.
Otherwise it is the place after everything else. After the last batch of an epoch Lightning resumes with the next epoch,
so the end of the epoch runs before the fit ends.
"""

import logging
import os
from collections.abc import Callable, Iterable
from enum import IntFlag
from functools import partial
from typing import Any, NoReturn

from lightning_sdiloco.comm import Communicator
from lightning_sdiloco.engine import Landing, StreamingDiLoCo

_log = logging.getLogger(__name__)

Replace = Callable[[Any, str, Callable[..., Any]], None]


class Request(IntFlag):
    """What can be asked for. From ``CHECKPOINT`` on, each bit stands for one periodic checkpoint."""

    TERMINATE = 1
    TIME_LIMIT = 2
    REQUEUE = 4
    END_EPOCH = 8
    CHECKPOINT = 16


SIGNALLED = (Request.TERMINATE, Request.REQUEUE)
"""What signals ask for."""

_BITS = 16  # of the control vector

# As many bits are left.
MOST_CHECKPOINTS = _BITS - int(Request.CHECKPOINT).bit_length() + 1


class Requests:
    """Keeps what this rank asks for until all groups do it."""

    def __init__(self, engine: StreamingDiLoCo | None = None) -> None:
        self._engine = engine
        self._done_at: dict[int, int] = {}
        self._agreed = 0
        self._deciding: int | None = None

    def connect(self, engine: StreamingDiLoCo) -> None:
        """Connects the requests with the engine whose launches carry them."""
        self._engine = engine
        self._done_at = {}
        self._agreed = 0

    @property
    def are_open(self) -> bool:
        """Whether there are launches to come that could carry a request."""
        return self._engine is not None and not self._engine.is_finished

    def ask(self, bit: int) -> None:
        """Asks all groups for something. Asking again before it is done changes nothing."""
        if self._engine is not None:
            # A plain number: it is saved with the engine.
            self._engine.request(int(bit))

    def settle(self, bit: int) -> None:
        """Marks what was asked for up to now as done. All ranks do so after the same inner step."""
        if self._engine is not None:
            self._done_at[int(bit)] = self._engine.inner_steps
            self._engine.withdraw(int(bit))

    def begin_batch(self) -> None:
        """Forgets what was agreed on after the last inner step: it has been done."""
        self._agreed = 0

    def land(self, landings: Iterable[Landing], own: int = 0) -> int:
        """Takes in the requests that came with landings: all ranks now agree on them, after the same inner step."""
        self._agreed = own
        for landing in landings:
            for bit in _bits_in(landing.requests):
                if landing.launched_at > self._done_at.get(bit, 0):
                    self._agreed |= bit
        for bit in _bits_in(self._agreed):
            self.settle(bit)
        return self._agreed

    def agreed(self, bit: int) -> bool:
        """Returns whether all ranks do what a bit stands for after this inner step."""
        return bool(self._agreed & int(bit))

    # Checkpoints by the clock

    def decide_checkpoint(self, index: int, hook: Callable[..., None], *args: Any) -> None:
        """Runs the hook of a checkpoint callback whose time interval all ranks decide together."""
        self._deciding = index
        try:
            hook(*args)
        finally:
            self._deciding = None

    def vote(self, skip: Any) -> bool | None:
        """Answers whether all ranks skip the save that the hook of `decide_checkpoint` asks for."""
        if self._deciding is None or not isinstance(skip, bool):
            return None
        bit = int(Request.CHECKPOINT) << self._deciding
        self._deciding = None
        if not skip:
            self.ask(bit)
        return not self.agreed(bit)

    # Checkpoints of requests

    def state_dict(self) -> dict[int, int]:
        """Returns, for each request, after which inner step it was last done."""
        return dict(self._done_at)

    def load_state_dict(self, state: dict[int, int]) -> None:
        """Restores what `state_dict` returned."""
        self._done_at = dict(state)
        for bit in SIGNALLED:
            self.settle(bit)


def _bits_in(requests: int) -> list[int]:
    """Returns the bits that are set, each by itself. There are seldom any, and this is asked after every step."""
    return [1 << index for index in range(_BITS) if requests >> index & 1] if requests else []


class Signals:
    """Notes the signals that this rank gets in a fit, and ends the fit when all ranks have agreed to."""

    def __init__(
        self,
        trainer: Any,
        requests: Requests,
        world: Communicator,
        termination: type[BaseException],
        leave: Callable[[], object],
    ) -> None:
        self._trainer = trainer
        self._requests = requests
        self._world = world
        self._termination, self._leave = termination, leave
        self._received: set[Request] = set()
        self._requeue = trainer._signal_connector._slurm_sigusr_handler_fn
        self._requeued_by: int | None = None
        self.is_ending = self.ended = False

    def listen(self, replace: Replace) -> None:
        """Replaces Lightning's signal handlers, and the methods that end a batch and an epoch."""
        connector, fit_loop = self._trainer._signal_connector, self._trainer.fit_loop
        replace(connector, "_sigterm_notifier_fn", partial(self._note, Request.TERMINATE))
        replace(connector, "_slurm_sigusr_handler_fn", partial(self._note, Request.REQUEUE))
        replace(fit_loop.epoch_loop, "on_advance_end", partial(self._after_batch, fit_loop.epoch_loop.on_advance_end))
        replace(fit_loop, "on_advance_end", partial(self._after_epoch, fit_loop.on_advance_end))

    @property
    def received(self) -> int:
        """What the signals so far ask all ranks to do."""
        return sum(self._received.copy())

    def end_if_any_received(self) -> None:
        """Ends a fit that has finished before a launch could carry the request. All ranks must call it."""
        received = 0
        for rank in self._world.all_gather_object(self.received):
            received |= rank
        if received:
            self._end(received)

    def _note(self, request: Request, signum: int, frame: Any) -> None:
        # See [Note: signals wait for a step boundary]. Adding to a set is one step, so nested handlers lose nothing.
        self._received.add(request)
        if request == Request.REQUEUE:
            self._requeued_by = signum

    def _after_batch(self, original: Callable[[Any], None], data_fetcher: Any) -> None:
        """Ends a batch, and the fit if all agreed to; see [Note: where a fit ends]."""
        loop, agreed = self._trainer.fit_loop.epoch_loop, self._agreed()
        if agreed and loop._should_check_val_fx(data_fetcher):
            _stop_before_first_batch(loop.val_loop)
            self._end(agreed)
        original(data_fetcher)
        if agreed and not loop._is_training_done:
            self._end(agreed)

    def _after_epoch(self, original: Callable[[], None]) -> None:
        agreed = self._agreed()
        original()
        if agreed:
            _stop_with_last_batch(self._trainer.fit_loop)
            self._end(agreed)

    def _agreed(self) -> int:
        # A fit that finished with this very step goes on to its end.
        return sum(bit for bit in SIGNALLED if self._requests.are_open and self._requests.agreed(bit))

    def _end(self, agreed: int) -> NoReturn:
        self.is_ending = True
        if agreed & Request.REQUEUE:
            # Lightning's own handler: it saves and requeues the job, which resumes by itself.
            self._requeue(self._requeued_by or agreed, None)
        else:
            self._save()
        self.ended = True
        self._leave()
        self._trainer._signal_connector.received_sigterm = True
        raise self._termination

    def _save(self) -> None:
        path = terminated_path(self._trainer)
        if path is not None:
            self._trainer.save_checkpoint(path)
        if self._trainer.is_global_zero:
            step = self._trainer.global_step
            _log.warning("A termination signal ended the fit on all ranks after global step %s. %s", step, _told(path))


def terminated_path(trainer: Any) -> str | None:
    """Returns where to save a terminated fit: beside the trainer's first checkpoints; None if it saves none."""
    if not trainer.checkpoint_callbacks or trainer.fast_dev_run:
        return None
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    folder = next(filter(None, folders), trainer.default_root_dir)
    # Not a name that Lightning looks for: it would resume a later job from this file unasked.
    return os.path.join(str(folder), f"terminated-step={trainer.global_step}.ckpt")


def _told(path: str | None) -> str:
    if path is None:
        return (
            "No checkpoint was saved, because the trainer saves none (enable_checkpointing, fast_dev_run, barebones)."
        )
    return f"To go on from there: trainer.fit(..., ckpt_path={path!r})."


def _stop_before_first_batch(val_loop: Any) -> None:
    """Counts as Lightning does when a validation stops in its first batch, with which it then starts again."""
    val_loop.batch_progress.reset_on_run()
    val_loop.batch_progress.increment_ready()
    val_loop.batch_progress.increment_started()


def _stop_with_last_batch(fit_loop: Any) -> None:
    """Counts as Lightning does when a fit stops in the last batch of an epoch; after the epoch it restores no loader.

    What happens at the end of the epoch has happened, and is not repeated: the current count says so; see
    [Note: the rest of a batch].
    """
    for count in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        count.processed -= 1
        count.completed -= 1
    fit_loop.epoch_loop.batch_progress.total.completed -= 1
    fit_loop.epoch_loop._batches_that_stepped -= 1


def listen_without_fit(trainer: Any, replace: Replace) -> None:
    """Replaces Lightning's signal handlers outside a fit, which wait for all ranks in the middle of whatever runs."""
    connector = trainer._signal_connector
    replace(connector, "_sigterm_notifier_fn", partial(_terminate, connector))
    replace(connector, "_slurm_sigusr_handler_fn", _refuse_requeue)


def _terminate(connector: Any, signum: int, frame: Any) -> None:
    if not connector.received_sigterm and connector.trainer.strategy.launcher is not None:
        connector.trainer.strategy.launcher.kill(signum)
    connector.received_sigterm = True


def _refuse_requeue(signum: int, frame: Any) -> None:
    _log.warning("Signal %s asks to requeue the job. Outside trainer.fit there is no state to requeue it with.", signum)
