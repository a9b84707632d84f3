"""What the training loop does where data ends before a known length: it waits, follows other groups, or ends the epoch.

See [Note: uneven data] and [Note: the end of an epoch].

[Note: late ends] Lightning fetches a batch ahead to know the last one. Here nobody does, because a loader's saved state
and random numbers would be a batch ahead of training. So an epoch turns out to be over after its last batch, and what
belongs to the last batch is done then. Before a batch whose treatment depends on it, the next one is fetched all the
same: inside an accumulation of gradients, which the last batch ends, and where the fit ends by its number of steps.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine import random_state, set_random_state
from lightning_sdiloco.lightning.epoch_ends import EpochEnds
from lightning_sdiloco.lightning.inner_steps import InnerSteps
from lightning_sdiloco.lightning.requests import Request, Requests

_log = logging.getLogger(__name__)

YIELDED_NONE = "train_dataloader yielded None. If this was on purpose, ignore this warning..."
_LOADERS = "combined_loader"


class Epochs(NamedTuple):
    """What it takes to end an epoch together."""

    trainer: Any
    topology: Topology
    requests: Requests
    steps: InnerSteps
    ends: EpochEnds
    meet: Callable[[], None]
    counts: Callable[[], bool]


class Fetcher:
    """Hands out what a data fetcher of Lightning does, and None where only other groups have data left."""

    def __init__(self, fetcher: Any, length: int | None, epochs: Epochs) -> None:
        self._fetcher = fetcher
        # See [Note: late ends].
        self._ahead, fetcher.batches, fetcher.prefetch_batches = fetcher.batches, [], 0
        self._length = length
        self._epochs = epochs
        self._start_profiler = fetcher._start_profiler
        self._stop_profiler = fetcher._stop_profiler
        self._begin()

    def _begin(self) -> None:
        self.fetched = 0
        self.done = False
        self._is_open = False
        # How far other groups are known to be, and the last batch of the epoch once all data has ended.
        self._reached = 0
        self._last: int | None = None
        self.loaders: Any = None

    def __iter__(self) -> "Fetcher":
        iter(self._fetcher)
        self._ahead = []
        self._begin()
        return self

    def __next__(self) -> tuple[Any, int, int]:
        self._fetcher._start_profiler, self._fetcher._stop_profiler = self._start_profiler, self._stop_profiler
        if not self._is_open and self._epochs.counts():
            self._is_open = True
            self._epochs.ends.open(self.fetched)
        number, item = self.fetched + 1, self._take()
        depends = self._length is None and self._is_open and self._depends_on_the_end(number)
        if item is None:
            item = self._idle()
        elif depends:
            self._look_ahead(number)
        if item[0] is None:
            self._forget_what_was_logged()
        self.fetched = number
        self.done = number == self._length or (depends and number == self._last)
        return item

    @property
    def is_over(self) -> bool:
        """Whether the epoch turned out to be over after its last batch."""
        return self._last == self.fetched and not self.done

    def _take(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._fetcher, None)

    def _depends_on_the_end(self, number: int) -> bool:
        """Returns whether it must be known before this batch whether it is the last; all groups return the same."""
        trainer = self._epochs.trainer
        if number % trainer.accumulate_grad_batches:
            return True
        return self._is_final(number)

    def _is_final(self, number: int) -> bool:
        """Returns whether the fit has made its number of steps after this batch."""
        trainer, steps = self._epochs.trainer, 1
        if trainer.max_steps in (-1, None) or number % trainer.accumulate_grad_batches:
            return False
        if not trainer.lightning_module.automatic_optimization:
            steps = self._epochs.steps.optimizer_steps_per_batch(len(trainer.optimizers))
        return bool(trainer.global_step + steps >= trainer.max_steps)

    def _look_ahead(self, number: int) -> None:
        """Fetches the next batch, and waits for the other groups if there is none."""
        if self._is_final(number):
            # A longer fit that is resumed from here goes on as if nobody had looked.
            self.loaders, random = self._epochs.trainer.fit_loop.on_save_checkpoint().get(_LOADERS), random_state()
            ahead = self._take()
            set_random_state(random)
        else:
            ahead = self._take()
        if ahead is None:
            self._wait(number)
        else:
            self._ahead.append(ahead)

    def _wait(self, last: int) -> None:
        """Waits until another group is known to be beyond the last batch of this one, or all data has ended."""
        if self._last is None and self._reached <= self.fetched:
            self._epochs.requests.ask(Request.END_EPOCH)
            engine = self._epochs.steps.engine
            place = self._epochs.ends.end(last, engine.inner_steps if engine is not None else 0)
            if place.is_end:
                self._last = place.batch
            else:
                self._reached = place.batch

    def _idle(self) -> tuple[Any, int, int]:
        """Returns an idle batch. Raises `StopIteration` if the epoch is over."""
        if not self._is_open:
            # A tuner removed the callback that counts, and trains a fixed number of steps on each rank, so the data
            # starts again.
            iter(self._fetcher)
            ahead: tuple[Any, int, int] = next(self._fetcher)
            return ahead
        self._wait(self.fetched)
        if self._last == self.fetched:
            raise StopIteration
        _say_that_it_follows(self._epochs.trainer, self._epochs.topology, self.fetched)
        return None, self.fetched, 0

    def _forget_what_was_logged(self) -> None:
        """Keeps what the last batch logged from being logged again for one that is idle."""
        for logged in self._epochs.trainer.fit_loop.epoch_loop._results.values():
            logged._forward_cache = None

    def teardown(self) -> None:
        """Ends the workers of the loaders."""
        self._fetcher.teardown()


def _say_that_it_follows(trainer: Any, topology: Topology, batches: int) -> None:
    said = trainer.fit_loop.epoch_loop._warning_cache
    if YIELDED_NONE in said:
        return
    # Lightning would warn of a batch that is None.
    said.add(YIELDED_NONE)
    if topology.group_rank == 0:
        _log.warning(
            "Worker group %d has no more batches in epoch %d after %d, and others have. It follows them with idle"
            " batches, in which it does not train, until all end the epoch together: when the data of all has ended, or"
            " after the landing of its next launch. A loader with a length, or limit_train_batches as a number of"
            " batches, avoids them. This is said once.",
            topology.group_index,
            trainer.current_epoch,
            batches,
        )


def run_epoch(epochs: Epochs, original: Callable[[Any], None], fetcher: Any) -> None:
    """Runs an epoch as Lightning does, and what belongs to the last batch where it turned out later to be the last."""
    original(fetcher)
    if not isinstance(fetcher, Fetcher) or not fetcher.is_over:
        return
    epochs.requests.settle(Request.END_EPOCH)
    if fetcher.fetched:
        _end_late(epochs.trainer, fetcher)


def _end_late(trainer: Any, fetcher: Fetcher) -> None:
    """Does what Lightning does in the last batch where it knows it, in the same order; see [Note: late ends]."""
    loop = trainer.fit_loop.epoch_loop
    has_validated = loop._should_check_val_fx(fetcher)
    loop.batch_progress.is_last_batch = True
    loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    for callback in trainer.callbacks:
        if hasattr(callback, "finish_with_last_batch"):
            callback.finish_with_last_batch(trainer)
    if loop._should_check_val_fx(fetcher) and not has_validated:
        _validate(trainer)


def _validate(trainer: Any) -> None:
    """Runs the validation at the end of a batch, before the batch counts for the loggers."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    loop._batches_that_stepped -= 1
    trainer.validating = True
    first = connector._first_loop_iter
    trainer.lightning_module.on_validation_model_zero_grad()
    loop.val_loop.run()
    trainer.training = True
    connector._first_loop_iter = first
    loop._batches_that_stepped += 1


def saved_loop(fetcher: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of a fit loop, with that of its loaders as if nobody had looked ahead."""
    loaders = getattr(fetcher, "loaders", None)
    return state if loaders is None else {**state, _LOADERS: loaders}
