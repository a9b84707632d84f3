"""Lets worker groups train without waiting for each other in a batch, and end every epoch after the
same one.

[Note: uneven data] Where lengths are known, all ranks agree on the smallest when Lightning loads
the data. Where they are not, or a loader ends before the length that it announced, a group without
data follows the others with idle batches: Lightning gets None, which it takes for a batch without
training. They count as inner steps and as global steps like a training group's. The group asks for
the end of the epoch with its next launch; the batch in which that lands is the last in all groups.
Where the data of all has ended, the epoch is over at once.

[Note: where the others are] A group without data cannot know how far the others get, and must not
stop them. So every group says in which batch it is before a launch, and before whatever else makes
all ranks wait for each other, and goes on. A group without data says so at once, and waits to hear
the others. If the data of all has ended, the last batch that any of them has is the last of the
epoch. If not, the group follows the others to the batch in which they meet, takes part, and waits
again: in every batch through which it follows another one trains.

[Note: a batch ahead] Where no length is known, the next batch is fetched before one is trained, as
Lightning does, to know the last one. A checkpoint holds the state that loaders had before that, so
a resumed fit fetches it again.

[Note: silence between launches] Lightning broadcasts to all ranks before every batch whether rank 0
was terminated, and after every batch whether a time limit or a checkpoint's time interval has
passed. Here these decisions travel in the control vector of the next launch instead, and all ranks
act on them after the same inner step, when that launch lands.

[Note: nothing in users' objects] What metrics and synchronised BatchNorm gather is kept in the
group by replacing it in their libraries, not in the objects of users, which may be copied or
pickled: a process group cannot.
"""

import importlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdiloco.comm.exchange import Unanswered
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.drop_compute import DroppingLoader
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.errors import ExchangeError
from lightning_sdiloco.lightning.fit_state import MOST_CHECKPOINTS, FitState, Request
from lightning_sdiloco.lightning.groups import ConnectedGroups, in_batch
from lightning_sdiloco.lightning.host import wrap
from lightning_sdiloco.lightning.monitor import progress

_log = logging.getLogger(__name__)

_YIELDED_NONE = "train_dataloader yielded None. If this was on purpose, ignore this warning..."
_LOADED = "train_dataloader()"  # What Lightning calls the barrier before it compares lengths.
_LOADERS = "combined_loader"


class Epochs:
    """The epochs of a fit: what fetches the batches of this group, and knows where the other groups
    are.

    See [Note: where the others are]. With several worker groups it replaces Lightning's data
    fetcher.
    """

    # A tuner removes the callback that counts: each rank is then alone, and epochs are not open.
    done = _is_open = _is_over = False
    fetched = 0
    # The last batch in which this group or another is known to be, and the last of the epoch once
    # that is known.
    _last = 0
    _end: int | None = None

    def __init__(self, fit: FitState) -> None:
        self.fit = fit
        self._told: deque[tuple[int, Any]] = deque()  # After which inner step, and what was posted.

    def end_together(self, undo: ExitStack) -> None:
        """Replaces what ends epochs in Lightning; see [Note: uneven data].

        One worker group alone needs nothing.
        """
        trainer = self.fit.trainer
        loop = self.fit.trainer.fit_loop
        self._states: Callable[[], dict[str, Any]] = loop.on_save_checkpoint

        def saved_state(states: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            # With that of its loaders as if they had not been read ahead.
            loaders = self._loaders if loop._data_fetcher is self else None
            return states() if loaders is None else {**states(), _LOADERS: loaders}

        def should_validate(validates: Callable[[Any], bool], fetcher: Any) -> bool:
            # Also after an epoch with fewer batches than were announced.
            progress = loop.epoch_loop.batch_progress
            early = progress.is_last_batch and progress.current.ready < trainer.num_training_batches
            due = validates(fetcher)
            by_share = isinstance(trainer.val_check_interval, float)
            due = due or (early and by_share and loop.epoch_loop._should_check_val_epoch())
            if due:
                self.fit.groups.meet()
            return bool(due)

        if self.fit.groups.topology.num_groups > 1:
            wrap(undo, loop, "setup_data", self._setup_data)
            wrap(undo, loop, "on_save_checkpoint", saved_state)
            wrap(undo, loop.epoch_loop, "_should_check_val_fx", should_validate)

    # Where the others are

    def meet(self) -> None:
        """Announces, once for each batch, that this group is about to wait for all others."""
        is_within_epoch = self._is_open and self._end is None and self.fit.is_training
        # Lightning counts an idle batch only after this one has waited in it.
        if is_within_epoch and self.fetched > self._last:
            self._last = self.fetched
            self._tell(self.fetched, is_end=False)

    def collect(self, until: float = float("inf")) -> None:
        while self._told and self._told[0][0] <= until:
            self._hear()

    def _end_after(self, own: int, batch: int) -> int | None:
        """Returns the last batch of the epoch, or None if another group goes on after ``batch``, or
        in it.

        Waits for the others, and asks for the end of the epoch, because the data of this group
        ended after ``own``.
        """
        if self._end is None and self._last < batch:
            self._tell(own, is_end=True)
            while self._told:
                places = self._hear()
            going_on = [batch for batch, is_end in places if not is_end]
            self._last = max(going_on or [batch for batch, _ in places])
            if going_on:
                self.fit.requests.ask(Request.END_EPOCH)
            else:
                self._end = self._last
        return self._end

    def _tell(self, batch: int, is_end: bool) -> None:
        """Announces in which batch this group is, or after which its data ended."""
        engine = self.fit.engine
        exchange = self.fit.groups.topology.progress
        word = torch.tensor([batch, is_end], dtype=torch.int64).view(torch.uint8)
        posted = exchange.post([word] * exchange.num_groups)
        self._told.append((engine.inner_steps if engine is not None else 0, posted))

    def _hear(self) -> list[list[int]]:
        """Returns what all groups said in the meeting that was posted first."""
        topology = self.fit.groups.topology
        timeout = self.fit.options.settings.timeout
        try:
            deadline = time.monotonic() + timeout.total_seconds()
            words = topology.progress.collect(self._told.popleft()[1], deadline)
        except Unanswered as error:
            raise ExchangeError(
                f"{error} while worker group {topology.group_index}, after batch {self._last} of"
                " the epoch, waited to hear where the others are. The run cannot continue without"
                " it. Find out why that group stopped or is unreachable; if it was only slow, raise"
                " timeout."
            ) from error
        return [word.clone().view(torch.int64).tolist() for word in words]

    # The lengths of the groups

    def _setup_data(self, original: Callable[[], None]) -> None:
        loop = self.fit.trainer.fit_loop
        strategy = self.fit.trainer.strategy
        before = loop._data_fetcher
        failure = None
        loaded = False

        def barrier(wait: Callable[..., None], name: Any = None, *args: Any, **kwargs: Any) -> None:
            nonlocal loaded
            wait(name, *args, **kwargs)
            if name == _LOADED:
                loaded = True
                # Lightning sums lengths over all ranks, which hangs if only some loaders have one.
                wrap(undo, strategy, "reduce", lambda _, tensor, *args, **kwargs: tensor)

        with ExitStack() as undo:
            wrap(undo, strategy, "barrier", barrier)
            try:
                original()
            except Exception as error:
                if not loaded:
                    raise
                failure = error
        if failure is None and loop._data_fetcher is before:
            return
        length = self._agreed_length(failure)
        if length == 0:
            return
        if type(loop._data_fetcher).__name__ != "_DataLoaderIterDataFetcher":
            # See [Note: a batch ahead].
            fetcher = loop._data_fetcher
            self._length = length
            self._loaders = None
            self._start_profiler = fetcher._start_profiler
            self._stop_profiler = fetcher._stop_profiler
            self._ahead = fetcher.batches
            fetcher.batches = []
            fetcher.prefetch_batches = 0
            self.done = self._is_open = self._is_over = False
            self._fetcher = fetcher
            self.fetched = 0
            loop._data_fetcher = self
        elif length is not None:
            # It passes its iterator to training_step, which takes the batches: it can be shortened,
            # but not yield None.
            loop._combined_loader.limits = [
                min(limit, length) for limit in loop._combined_loader.limits
            ]
            loop._data_fetcher.length = length

    def _agreed_length(self, failure: Exception | None) -> int | None:
        """Agrees with all ranks on the batches of an epoch.

        Raises on all of them if one has none, or cannot load.
        """
        trainer = self.fit.trainer
        topology = self.fit.groups.topology
        loop = trainer.fit_loop
        own = None
        if failure is None:
            # A restored loader may be at its end, and groups may have no data in a later epoch.
            resumed = loop.restarting or getattr(
                loop, "is_resuming", trainer.strategy.fit.checkpointer.resumed
            )
            is_empty = loop._data_fetcher.done and not resumed
            own = (
                (0 if is_empty else None)
                if loop.max_batches == float("inf")
                else int(loop.max_batches)
            )
        ranks = topology.world.all_gather_object(
            (topology.group_index, own, repr(failure) if failure else "")
        )
        if failure is not None:
            raise failure
        for group, _, error in ranks:
            if error:
                raise ValueError(f"Worker group {group} cannot train with its data: {error}.")
        lengths = {length for _, length, _ in ranks}
        agreed: int | None = min(lengths - {None}, default=None)
        if agreed is None or len(lengths) == 1:
            return agreed
        told: dict[int, dict[str, None]] = {}
        for group, length, _ in ranks:
            told.setdefault(group, {})["an unknown number" if length is None else str(length)] = (
                None
            )
        text = ", ".join(
            f"group {group} has {' and '.join(numbers)}" for group, numbers in told.items()
        )
        if agreed == 0:
            raise ValueError(
                f"Some worker groups have no batch to train on: {text}. Epochs end together, so no"
                " group would train. Give every group data, or train with fewer worker groups."
            )
        loop.max_batches = agreed
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(agreed * trainer.val_check_interval))
        if trainer.is_global_zero:
            _log.warning(
                "Worker groups have unequal numbers of batches: %s. Every epoch ends after %d in"
                " all of them.",
                text,
                agreed,
            )
        return agreed

    # In the place of Lightning's data fetcher

    def __iter__(self) -> "Epochs":
        iter(self._fetcher)
        self._ahead = []
        self.fetched = 0
        self.done = self._is_open = self._is_over = False
        return self

    def __next__(self) -> tuple[Any, int, int]:
        self._fetcher._start_profiler = self._start_profiler
        self._fetcher._stop_profiler = self._stop_profiler
        trainer = self.fit.trainer
        topology = self.fit.groups.topology
        batch = self.fetched + 1
        said = trainer.fit_loop.epoch_loop._warning_cache
        if not self._is_open and self.fit in trainer.callbacks:
            # An epoch begins, or goes on.
            self._is_open = True
            self._last = self.fetched
            self._end = None
        item = self._ahead.pop() if self._ahead else next(self._fetcher, None)
        if item is None and not self._is_open:
            # A tuner trains a fixed number of steps, so the data starts again.
            iter(self._fetcher)
            self._is_over = False
            item = next(self._fetcher)
        self._is_over = self._is_over or item is None
        if self._length is None and not self._is_over:
            self._loaders = self._states().get(_LOADERS)
            self._ahead = [ahead for ahead in [next(self._fetcher, None)] if ahead is not None]
            self._is_over = not self._ahead
        if self._is_over and self._is_open:
            end = self._end_after(self.fetched if item is None else batch, batch)
            if end == self.fetched:
                self.fit.requests.settle(Request.END_EPOCH)
                raise StopIteration
            self.done = batch == end
        self.done = self.done or batch == self._length
        if item is None:
            if _YIELDED_NONE not in said and topology.group_rank == 0:
                _log.warning(
                    "Worker group %d has no more batches in epoch %d after %d, but others have. It"
                    " follows them with idle batches, in which it does not train, until all groups"
                    " end the epoch together: when all data has ended, or when its next launch has"
                    " landed. To avoid them use a loader with a length, or limit_train_batches as a"
                    " number of batches. Shown once.",
                    topology.group_index,
                    trainer.current_epoch,
                    self.fetched,
                )
            # Lightning would warn of a batch that is None.
            said.add(_YIELDED_NONE)
            item = None, self.fetched, 0
        if item[0] is None:
            # What the last batch logged is not logged again for one that is idle.
            for logged in trainer.fit_loop.epoch_loop._results.values():
                logged._forward_cache = None
        self.fetched = batch
        return item

    def teardown(self) -> None:
        self._fetcher.teardown()


# What Lightning counts and logs in them


def count_idle_batch(trainer: Any, optimizer_steps: int) -> bool:
    """Counts a batch without training as Lightning counts one with training."""
    loop = trainer.fit_loop.epoch_loop
    steps = 1
    loop.batch_progress.increment_started()
    if loop._should_accumulate():
        return False
    progress = loop.automatic_optimization.optim_progress.optimizer.step
    if not trainer.lightning_module.automatic_optimization:
        progress = loop.manual_optimization.optim_step_progress
        steps = optimizer_steps
    for _ in range(steps):
        progress.increment_ready()
        progress.increment_completed()
    return True


def drop_what_not_all_logged(trainer: Any, topology: Topology) -> None:
    """Drops metrics of the epoch whose reduction over all ranks would wait forever for ranks that
    did not log them.
    """
    results = trainer.fit_loop.epoch_loop._results

    # A metric gathers its own states.
    logged = [
        key
        for key, result in results.items()
        if result.meta.on_epoch and not result.has_reset
        if (
            result.meta.sync.should and not result.meta.sync.rank_zero_only
            if result.is_tensor
            else getattr(result.value, "sync_on_compute", True)
        )
    ]
    common = set.intersection(*map(set, topology.world.all_gather_object(logged)))
    dropped = [key for key in logged if key not in common]
    for key in dropped:
        del results[key]
    if dropped and topology.group_rank == 0:
        _log.warning(
            "Not every rank logged %s in epoch %d, and a reduction would wait for those that did"
            " not: dropped. Log it on every rank, or on one without sync_dist. A worker group"
            " without a batch in an epoch logs nothing.",
            ", ".join(dropped),
            trainer.current_epoch,
        )


# Loaders that yield None on purpose have another one as `loader`, and `follow(engine)`:
# `DropCompute` makes them, and so may users, as in ``examples/methods/dylu.py``.


def process_wrapped(trainer: Any, dataloader: Any) -> Any:
    """Divides the data of a loader that is wrapped among all ranks, as Lightning does where it is
    not.
    """
    stage = trainer.state.stage
    for wrapper in _wrappers(dataloader):
        wrapper.loader = trainer._data_connector._prepare_dataloader(
            wrapper.loader, shuffle=True, mode=stage
        )
        if isinstance(wrapper, DroppingLoader):
            wrapper.length = len(wrapper.loader)
    return dataloader


def _wrappers(loader: Any) -> Iterator[Any]:
    if hasattr(loader, "loader") and hasattr(loader, "follow"):
        yield from _wrappers(loader.loader)
        yield loader


def follow_engine(trainer: Any, engine: StreamingDiLoCo) -> bool:
    """Makes the loaders of an epoch know the engine; returns whether some may leave micro-batches
    out, which count.
    """
    leaves_out = False
    for loader in trainer.fit_loop._combined_loader.flattened:
        for wrapper in _wrappers(loader):
            # Lightning would warn of a batch that is None.
            trainer.fit_loop.epoch_loop._warning_cache.add(_YIELDED_NONE)
            if isinstance(wrapper, DroppingLoader):
                if not trainer.lightning_module.automatic_optimization:
                    raise ValueError(
                        "DropCompute does not work with manual optimization: only the module knows"
                        " when gradients are synchronised. Use automatic optimization, or skip the"
                        " batches that are None in your own loop."
                    )
                if trainer.accumulate_grad_batches != wrapper.drop.micro_batches:
                    raise ValueError(
                        f"DropCompute(micro_batches={wrapper.drop.micro_batches}) and"
                        f" accumulate_grad_batches={trainer.accumulate_grad_batches} differ. Set"
                        " both to the same number."
                    )
                # Lightning steps after its last batch, which limits of the trainer or of other
                # groups may put earlier.
                wrapper.length = min(wrapper.length, int(trainer.num_training_batches))
                leaves_out = True
            wrapper.follow(engine)
    return leaves_out


# Columns that a bar of Rich takes for all but the metrics.
_BESIDE_METRICS = 66


def keep_batches_silent(undo: ExitStack, fit: FitState) -> None:
    """Replaces what would wait for all ranks at every batch; see [Note: silence between launches]."""
    trainer = fit.trainer

    def check(timer: Any, original: Callable[[Any], None], trainer: Any) -> None:
        if not in_batch(trainer.lightning_module):
            original(trainer)
        elif timer.time_elapsed() >= timer._duration:
            fit.requests.ask(Request.TIME_LIMIT)

    wrap(undo, trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda _: None)
    for timer in trainer.callbacks:
        if hasattr(timer, "_check_time_remaining"):
            wrap(undo, timer, "_check_time_remaining", partial(check, timer))
    by_time = [
        saver
        for saver in trainer.callbacks
        if getattr(saver, "_train_time_interval", None) is not None
    ]
    if len(by_time) > MOST_CHECKPOINTS:
        raise ValueError(
            f"{len(by_time)} ModelCheckpoint callbacks have a train_time_interval; worker groups"
            f" can agree on at most {MOST_CHECKPOINTS}. Use every_n_train_steps in some of them."
        )

    def decide(index: int, hook: Callable[..., None], *args: Any) -> None:
        # The time interval of a checkpoint is decided by all ranks together: the hook asks by a
        # broadcast.
        fit.requests.deciding = index
        try:
            hook(*args)
        finally:
            fit.requests.deciding = None

    for index, saver in enumerate(by_time):
        wrap(undo, saver, "on_train_batch_end", partial(decide, index))
    _monitor_means(undo, trainer, fit.groups)
    _keep_in_group(undo, trainer, fit.groups.topology.in_group.process_group)

    def metrics_shown(metrics: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        console = getattr(getattr(trainer.progress_bar_callback, "progress", None), "console", None)
        columns = math.inf if console is None else console.width - _BESIDE_METRICS
        return {
            **metrics(*args),
            **(progress(fit.engine, columns) if fit.engine is not None else {}),
        }

    if trainer.progress_bar_callback is not None:
        wrap(undo, trainer.progress_bar_callback, "get_metrics", metrics_shown)


def _monitor_means(undo: ExitStack, trainer: Any, groups: ConnectedGroups) -> None:
    """Makes saving and scheduling by a metric that groups logged go by its mean over all ranks."""

    def monitored(original: Callable[[str], Any], key: str) -> Any:
        value = original(key)
        if any(
            config.monitor == key and config.interval == "step"
            for config in trainer.lr_scheduler_configs
        ):
            return value
        return groups.mean_over_all({key: float(value)} if value is not None else {}).get(
            key, value
        )

    def candidates(original: Callable[[Any], dict[str, Any]], trainer: Any) -> dict[str, Any]:
        found = original(trainer)
        means = groups.mean_over_all(
            {name: float(of) for name, of in found.items() if isinstance(of, Tensor)}
        )
        return {
            name: value.new_tensor(means[name])
            if name in means and value.is_floating_point()
            else value
            for name, value in found.items()
        }

    def save_last(original: Callable[..., None], *args: Any) -> None:
        # After an exception no checkpoint was written, so there is none to which the last one could
        # be a link.
        if not groups.is_alone:
            original(*args)

    wrap(undo, trainer.fit_loop.epoch_loop, "_get_monitor_value", monitored)
    for saver in trainer.callbacks:
        for name, around in (
            ("_monitor_candidates", candidates),
            ("_save_last_checkpoint", save_last),
        ):
            if hasattr(saver, name):
                wrap(undo, saver, name, around)


def _keep_in_group(undo: ExitStack, trainer: Any, own: Any) -> None:
    """Keeps metrics and synchronised BatchNorm in the worker group; see [Note: nothing in users'
    objects].
    """
    if own is None:
        return

    def gather(gather_all: Callable[..., Any], result: Tensor, group: Any = None) -> Any:
        return gather_all(
            result, own if group is None and in_batch(trainer.lightning_module) else group
        )

    def forward(normalise: Callable[..., Tensor], layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        before = layer.process_group
        layer.process_group = own
        try:
            return normalise(layer, x)
        finally:
            layer.process_group = before

    # Each metric without a `dist_sync_fn` of its own looks it up there, whether it is part of the
    # module or not.
    wrap(undo, importlib.import_module("torchmetrics.metric"), "gather_all_tensors", gather)
    wrap(undo, nn.SyncBatchNorm, "forward", forward)
