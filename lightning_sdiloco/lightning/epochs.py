"""Lets worker groups train without waiting for each other, but makes them end epochs together.

[Note: uneven data] If all loaders have a length, all ranks agree on the smallest length when
Lightning loads the data. If some lengths are unknown, or if a loader ends before its stated length,
a group that has run out of data follows the other groups with idle batches. For an idle batch,
Lightning receives None, which it treats as a batch without training. Idle batches count as inner
steps and as global steps, just like trained batches. The group requests the end of the epoch with
its next launch. The batch in which that launch lands is the last batch for all groups. Once all
groups are out of data, the epoch ends immediately.

[Note: where the others are] A group without data does not know how many batches the other groups
still have, and must not stop them. Therefore, every group announces its current batch before a
launch, and before any other point where all ranks wait for each other. A group that runs out of
data announces this immediately and waits for the other groups' announcements. If all groups are out
of data, the epoch ends with the last batch of any group. Otherwise, the group follows the other
groups to the batch in which all ranks meet, takes part, and waits again. In every batch in which a
group follows the others, at least one other group trains.

[Note: a batch ahead] If no length is known, the next batch is fetched before training on the
current batch. Lightning relies on this prefetch to detect the last batch. A checkpoint contains the
loaders' state from before that fetch, so a resumed fit fetches the batch again.

[Note: silence between launches] Before every batch, Lightning broadcasts to all ranks whether rank
0 has received a termination signal. After every batch, it broadcasts whether a time limit or a
checkpoint interval has expired. In worker groups, these decisions are sent in the control vector of
the next launch instead, and all ranks act on them after the inner step in which that launch lands.

[Note: nothing in users' objects] To make metrics and synchronised BatchNorm gather within the
group, functions in torchmetrics and torch are replaced. User objects are left unchanged, because
they may be copied or pickled, which is impossible with process groups.
"""

import importlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from lightning_sdiloco.comm.exchange import Unanswered
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.drop_compute import DroppingLoader
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.errors import ExchangeError
from lightning_sdiloco.lightning.fit_state import MOST_CHECKPOINTS, FitState, Request
from lightning_sdiloco.lightning.groups import ConnectedGroups, in_batch
from lightning_sdiloco.lightning.host import (
    Batch,
    Forwarded,
    Function,
    Internal,
    State,
    Trainer,
    wrap,
)
from lightning_sdiloco.lightning.monitor import progress

_log = logging.getLogger(__name__)

_YIELDED_NONE = "train_dataloader yielded None. If this was on purpose, ignore this warning..."
_LOADED = "train_dataloader()"  # Lightning's name for the barrier before comparing lengths.
_LOADERS = "combined_loader"


class GroupPlaces:
    """The positions of the worker groups in the epoch; see [Note: where the others are]."""

    def __init__(self, fit: FitState) -> None:
        self._fit = fit
        # The announcements in transit, each with the inner step after which it was posted.
        self._posted: deque[tuple[int, object]] = deque()
        # The latest batch that any group is known to have reached.
        self._last = 0
        # The last batch of the epoch, once known.
        self._end: int | None = None

    def begin_epoch(self, fetched: int) -> None:
        """Begins an epoch, or continues one after the batches fetched so far."""
        self._last = fetched
        self._end = None

    def announce_wait_in(self, batch: int) -> None:
        """Announces, once per batch, that this group is about to wait for all other groups."""
        # Lightning counts an idle batch only after this group has waited in it.
        if self._end is None and batch > self._last:
            self._last = batch
            self._announce(batch, data_has_ended=False)

    def end_after(self, last_own: int, batch: int) -> int | None:
        """Returns the last batch of the epoch, or None if another group continues with ``batch``.

        This group's data ended after batch ``last_own``. The method waits for the other groups'
        announcements and requests the end of the epoch.
        """
        if self._end is None and self._last < batch:
            self._announce(last_own, data_has_ended=True)
            while self._posted:
                places = self._receive()
            continuing = [batch for batch, data_has_ended in places if not data_has_ended]
            if continuing:
                self._last = max(continuing)
                self._fit.requests.ask(Request.END_EPOCH)
            else:
                self._last = max(batch for batch, _ in places)
                self._end = self._last
        return self._end

    def collect(self, until: float = float("inf")) -> None:
        """Receives the announcements that were posted up to and including a given inner step."""
        while self._posted and self._posted[0][0] <= until:
            self._receive()

    def _announce(self, batch: int, data_has_ended: bool) -> None:
        """Announces this group's current batch or the batch after which its data ended."""
        engine = self._fit.engine
        exchange = self._fit.groups.topology.progress
        message = torch.tensor([batch, data_has_ended], dtype=torch.int64).view(torch.uint8)
        posted = exchange.post([message] * exchange.num_groups)
        self._posted.append((engine.inner_steps if engine is not None else 0, posted))

    def _receive(self) -> list[list[int]]:
        """Receives all groups' announcements from the earliest pending exchange."""
        topology = self._fit.groups.topology
        timeout = self._fit.options.settings.timeout
        _, posted = self._posted.popleft()
        try:
            deadline = time.monotonic() + timeout.total_seconds()
            messages = topology.progress.collect(posted, deadline)
        except Unanswered as error:
            raise ExchangeError(
                f"{error} while worker group {topology.group_index}, after batch {self._last} of"
                " the epoch, was waiting for the positions of the other groups. The run cannot"
                " continue without these positions. Find out why that group stopped or is"
                " unreachable. If the group was merely slow, increase timeout."
            ) from error
        return [message.clone().view(torch.int64).tolist() for message in messages]


class Phase(Enum):
    """The phases of a `GroupFetcher` in an epoch."""

    UNCOUNTED = "no epoch has begun, or a tuner is training without the callback that counts epochs"
    TRAINING = "this group has data beyond the last fetched batch"
    FOLLOWING = "this group's data ends with that batch, or has ended: it follows the others"


class GroupFetcher:
    """Fetches this group's batches, followed by idle batches if the group runs out of data.

    With multiple worker groups, this fetcher wraps Lightning's data fetcher.

    Args:
        fit: The fit.
        places: The positions of the groups.
        fetcher: Lightning's data fetcher, which may already have read a batch.
        length: The number of batches in an epoch, or None if unknown.
        loop_state: A function that returns the state that Lightning's loop saves for itself and its
            loaders.
    """

    def __init__(
        self,
        fit: FitState,
        places: GroupPlaces,
        fetcher: Internal,
        length: int | None,
        loop_state: Function,
    ) -> None:
        self._fit = fit
        self._places = places
        self._fetcher = fetcher
        self._length = length
        self._loop_state = loop_state
        # Lightning sets these.
        self._start_profiler = fetcher._start_profiler
        self._stop_profiler = fetcher._stop_profiler
        # See [Note: a batch ahead].
        self._ahead = next(iter(fetcher.batches), None)
        fetcher.batches = []
        fetcher.prefetch_batches = 0
        self.loaders: object = None
        """The loaders' state from before a batch was read ahead, or None if none was read ahead."""
        self.phase = Phase.UNCOUNTED
        # Lightning reads both: the number of batches so far in this epoch, and whether the last
        # batch is among them.
        self.fetched = 0
        self.done = False

    def __iter__(self) -> "GroupFetcher":
        iter(self._fetcher)
        self._ahead = None
        self.phase = Phase.UNCOUNTED
        self.fetched = 0
        self.done = False
        return self

    def __next__(self) -> tuple[Batch, int, int]:
        fit = self._fit
        batch = self.fetched + 1
        if self.phase is Phase.UNCOUNTED and fit in fit.trainer.callbacks:
            self.phase = Phase.TRAINING
            self._places.begin_epoch(self.fetched)
        fetched = self._fetch()
        if self.phase is Phase.FOLLOWING:
            last_own = self.fetched if fetched is None else batch
            end = self._places.end_after(last_own, batch)
            if end == self.fetched:
                fit.requests.settle(Request.END_EPOCH)
                raise StopIteration
            self.done = batch == end
        self.done = self.done or batch == self._length
        if fetched is None:
            self._warn_of_idle_batches()
            fetched = None, self.fetched, 0
        if fetched[0] is None:
            # An idle batch must not log the previous batch's values again.
            for logged in fit.trainer.fit_loop.epoch_loop._results.values():
                logged._forward_cache = None
        self.fetched = batch
        return fetched

    def _fetch(self) -> tuple[Batch, int, int] | None:
        """Returns this group's next batch, or None after the last batch."""
        self._fetcher._start_profiler = self._start_profiler
        self._fetcher._stop_profiler = self._stop_profiler
        fetched = self._ahead or next(self._fetcher, None)
        self._ahead = None
        if fetched is None and self.phase is Phase.UNCOUNTED:
            # A tuner trains for a fixed number of steps, so the data starts over.
            iter(self._fetcher)
            fetched = next(self._fetcher)
        data_has_ended = fetched is None
        if self._length is None and not data_has_ended and self.phase is not Phase.FOLLOWING:
            self.loaders = self._loop_state().get(_LOADERS)
            self._ahead = next(self._fetcher, None)
            data_has_ended = self._ahead is None
        if data_has_ended and self.phase is Phase.TRAINING:
            self.phase = Phase.FOLLOWING
        return fetched

    def _warn_of_idle_batches(self) -> None:
        trainer = self._fit.trainer
        topology = self._fit.groups.topology
        warned = trainer.fit_loop.epoch_loop._warning_cache
        if _YIELDED_NONE not in warned and topology.group_rank == 0:
            _log.warning(
                "Worker group %d has no more data in epoch %d after %d batches, but other groups"
                " do. The group continues with idle batches, in which it does not train. All groups"
                " end the epoch together when all of them have run out of data or when the group's"
                " next launch has landed. To avoid idle batches, use a loader with a length, or set"
                " limit_train_batches to a number of batches. Shown once.",
                topology.group_index,
                trainer.current_epoch,
                self.fetched,
            )
        # Lightning would warn of a batch that is None.
        warned.add(_YIELDED_NONE)

    def teardown(self) -> None:
        self._fetcher.teardown()


class Epochs:
    """Ends each epoch after the same batch in all worker groups; see [Note: uneven data]."""

    def __init__(self, fit: FitState) -> None:
        self.fit = fit
        self.places = GroupPlaces(fit)
        self._fetcher: GroupFetcher | None = None
        self._loop_state: Function = dict

    def end_together(self, undo: ExitStack) -> None:
        """Replaces Lightning's code that ends epochs, unless there is only one worker group."""
        trainer = self.fit.trainer
        loop = trainer.fit_loop
        epoch_loop = loop.epoch_loop
        self._loop_state = loop.on_save_checkpoint

        def saved_state(loop_state: Function) -> State:
            # The loaders' state is saved as if nothing had been read ahead.
            fetcher = self._fetcher
            if fetcher is None or loop._data_fetcher is not fetcher or fetcher.loaders is None:
                return loop_state()
            return {**loop_state(), _LOADERS: fetcher.loaders}

        def should_validate(validates: Function, fetcher: object) -> bool:
            # An epoch with fewer batches than announced also ends with a validation if one is due.
            progress = epoch_loop.batch_progress
            is_early = (
                progress.is_last_batch and progress.current.ready < trainer.num_training_batches
            )
            by_share = isinstance(trainer.val_check_interval, float)
            is_due = validates(fetcher)
            is_due = is_due or (is_early and by_share and epoch_loop._should_check_val_epoch())
            if is_due:
                self.fit.groups.meet()
            return bool(is_due)

        if self.fit.groups.topology.num_groups > 1:
            wrap(undo, loop, "setup_data", self._setup_data)
            wrap(undo, loop, "on_save_checkpoint", saved_state)
            wrap(undo, epoch_loop, "_should_check_val_fx", should_validate)

    def meet(self) -> None:
        """Announces that this group is about to wait for all other groups."""
        fetcher = self._fetcher
        if fetcher is None or fetcher.phase is Phase.UNCOUNTED:
            return
        if self.fit.is_training:
            self.places.announce_wait_in(fetcher.fetched)

    # The lengths of the groups

    def _setup_data(self, original: Function) -> None:
        """Sets up the loaders and replaces Lightning's data fetcher with a `GroupFetcher`."""
        loop = self.fit.trainer.fit_loop
        fetcher_before = loop._data_fetcher
        failure = self._load(original)
        fetcher = loop._data_fetcher
        if failure is None and fetcher is fetcher_before:
            return
        length = self._agreed_length(failure)
        if length == 0:
            return
        if type(fetcher).__name__ != "_DataLoaderIterDataFetcher":
            self._fetcher = GroupFetcher(self.fit, self.places, fetcher, length, self._loop_state)
            loop._data_fetcher = self._fetcher
        elif length is not None:
            # This fetcher passes its iterator to training_step, which takes batches from it. The
            # iterator can end early but cannot yield None.
            limits = loop._combined_loader.limits
            loop._combined_loader.limits = [min(limit, length) for limit in limits]
            fetcher.length = length

    def _load(self, set_up: Function) -> Exception | None:
        """Sets up this rank's loaders. Returns any exception that occurred after loading."""
        strategy = self.fit.trainer.strategy
        is_loaded = False
        undo = ExitStack()

        def barrier(
            wait: Function, name: object = None, *args: Forwarded, **kwargs: Forwarded
        ) -> None:
            nonlocal is_loaded
            wait(name, *args, **kwargs)
            if name == _LOADED:
                is_loaded = True
                # Lightning sums lengths over all ranks, which hangs if only some loaders have a
                # length.
                wrap(undo, strategy, "reduce", lambda _, tensor, *args, **kwargs: tensor)

        with undo:
            wrap(undo, strategy, "barrier", barrier)
            try:
                set_up()
            except Exception as error:
                if not is_loaded:
                    raise
                return error
        return None

    def _agreed_length(self, failure: Exception | None) -> int | None:
        """Returns the agreed number of batches in an epoch, or None if no rank knows it.

        Raises an error on all ranks if any rank has no batches or cannot load them.
        """
        trainer = self.fit.trainer
        topology = self.fit.groups.topology
        own_length = self._own_length() if failure is None else None
        error = repr(failure) if failure else ""
        ranks = topology.world.all_gather_object((topology.group_index, own_length, error))
        if failure is not None:
            raise failure
        for group, _, error in ranks:
            if error:
                raise ValueError(f"Worker group {group} cannot load its training data: {error}.")
        lengths = {length for _, length, _ in ranks}
        agreed = min((length for length in lengths if length is not None), default=None)
        if agreed is None or len(lengths) == 1:
            return agreed
        text = _length_of_each_group(ranks)
        if agreed == 0:
            raise ValueError(
                f"Some worker groups have no batches to train on: {text}. All groups end each epoch"
                " together, so no group would train. Provide data for every group, or train with"
                " fewer worker groups."
            )
        trainer.fit_loop.max_batches = agreed
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(agreed * trainer.val_check_interval))
        if trainer.is_global_zero:
            _log.warning(
                "Worker groups have unequal numbers of batches: %s. In all groups, every epoch ends"
                " after %d batches.",
                text,
                agreed,
            )
        return agreed

    def _own_length(self) -> int | None:
        """Returns the number of batches in this rank's epoch, or None if it is unknown."""
        trainer = self.fit.trainer
        loop = trainer.fit_loop
        if loop.max_batches != float("inf"):
            return int(loop.max_batches)
        # A restored loader may be at its end, and groups may have no data in a later epoch.
        is_resuming = loop.restarting or getattr(
            loop, "is_resuming", trainer.strategy.fit.checkpointer.resumed
        )
        return 0 if loop._data_fetcher.done and not is_resuming else None


def _length_of_each_group(ranks: list[tuple[int, int | None, str]]) -> str:
    """Formats the number of batches of each group, and of each rank if ranks differ."""
    lengths: dict[int, list[str]] = {}
    for group, length, _ in ranks:
        text = "an unknown number" if length is None else str(length)
        texts = lengths.setdefault(group, [])
        if text not in texts:
            texts.append(text)
    return ", ".join(f"group {group} has {' and '.join(texts)}" for group, texts in lengths.items())


# Lightning's counters and metrics


def count_idle_batch(trainer: Trainer, optimizer_steps: int) -> bool:
    """Counts an idle batch in the same way as Lightning counts a trained batch."""
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


def drop_metrics_of_some_ranks(trainer: Trainer, topology: Topology) -> None:
    """Drops metrics that some ranks did not log, because their reduction would never finish."""
    results = trainer.fit_loop.epoch_loop._results
    logged = [
        key
        for key, metric in results.items()
        if metric.meta.on_epoch and not metric.has_reset and _is_reduced(metric)
    ]
    common = set.intersection(*map(set, topology.world.all_gather_object(logged)))
    dropped = [key for key in logged if key not in common]
    for key in dropped:
        del results[key]
    if dropped and topology.group_rank == 0:
        _log.warning(
            "Not every rank logged %s in epoch %d, and the reduction would have waited for the"
            " missing ranks, so the value was dropped. Log the value on every rank, or without"
            " sync_dist. A worker group that has no batch in an epoch logs nothing.",
            ", ".join(dropped),
            trainer.current_epoch,
        )


def _is_reduced(metric: Internal) -> bool:
    """Returns whether Lightning reduces a logged value over all ranks."""
    if metric.is_tensor:
        return bool(metric.meta.sync.should and not metric.meta.sync.rank_zero_only)
    # A metric gathers its own states.
    return bool(getattr(metric.value, "sync_on_compute", True))


# Loaders that yield None on purpose wrap another loader as `loader` and have a method
# `follow(engine)`. `DropCompute` makes such loaders, and users may write their own, as in
# ``examples/methods/dylu.py``.


def process_wrapped(trainer: Trainer, dataloader: object) -> object:
    """Divides a wrapped loader's data among all ranks, as Lightning does for plain loaders."""
    stage = trainer.state.stage
    for wrapper in _wrappers(dataloader):
        wrapper.loader = trainer._data_connector._prepare_dataloader(
            wrapper.loader, shuffle=True, mode=stage
        )
        if isinstance(wrapper, DroppingLoader):
            wrapper.length = len(wrapper.loader)
    return dataloader


def _wrappers(loader: Internal) -> Iterator[Internal]:
    if hasattr(loader, "loader") and hasattr(loader, "follow"):
        yield from _wrappers(loader.loader)
        yield loader


def follow_engine(trainer: Trainer, engine: StreamingDiLoCo) -> bool:
    """Passes the engine to the loaders. Returns whether any loader may skip micro-batches."""
    leaves_out = False
    for loader in trainer.fit_loop._combined_loader.flattened:
        for wrapper in _wrappers(loader):
            # Lightning would warn of a batch that is None.
            trainer.fit_loop.epoch_loop._warning_cache.add(_YIELDED_NONE)
            if isinstance(wrapper, DroppingLoader):
                if not trainer.lightning_module.automatic_optimization:
                    raise ValueError(
                        "DropCompute does not work with manual optimization, in which only the"
                        " module determines when gradients are synchronised. Use automatic"
                        " optimization, or skip batches that are None in your own loop."
                    )
                if trainer.accumulate_grad_batches != wrapper.drop.micro_batches:
                    raise ValueError(
                        f"DropCompute(micro_batches={wrapper.drop.micro_batches}) and"
                        f" accumulate_grad_batches={trainer.accumulate_grad_batches} differ. Set"
                        " both arguments to the same number."
                    )
                # Lightning steps after its last batch, which may come earlier because of the
                # trainer's limits or other groups.
                wrapper.length = min(wrapper.length, int(trainer.num_training_batches))
                leaves_out = True
            wrapper.follow(engine)
    return leaves_out


# Columns that a Rich progress bar uses for everything except the metrics.
_BESIDE_METRICS = 66


def keep_batches_silent(undo: ExitStack, fit: FitState) -> None:
    """Replaces code that would wait for all ranks in every batch.

    See [Note: silence between launches].
    """
    trainer = fit.trainer

    def check(timer: Internal, original: Function, trainer: Trainer) -> None:
        if not in_batch(trainer.lightning_module):
            original(trainer)
        elif timer.time_elapsed() >= timer._duration:
            fit.requests.ask(Request.TIME_LIMIT)

    def metrics_shown(metrics: Function, *args: Forwarded) -> State:
        if fit.engine is None:
            return metrics(*args)
        console = getattr(getattr(trainer.progress_bar_callback, "progress", None), "console", None)
        columns = math.inf if console is None else console.width - _BESIDE_METRICS
        return {**metrics(*args), **progress(fit.engine, columns)}

    wrap(undo, trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda _: None)
    for timer in trainer.callbacks:
        if hasattr(timer, "_check_time_remaining"):
            wrap(undo, timer, "_check_time_remaining", partial(check, timer))
    _save_together(undo, fit)
    _monitor_means(undo, trainer, fit.groups)
    _keep_in_group(undo, trainer, fit.groups.topology.in_group.process_group)
    if trainer.progress_bar_callback is not None:
        wrap(undo, trainer.progress_bar_callback, "get_metrics", metrics_shown)


def _save_together(undo: ExitStack, fit: FitState) -> None:
    """Makes all ranks decide together on time-based checkpoints when a launch lands."""
    savers = [
        callback
        for callback in fit.trainer.callbacks
        if getattr(callback, "_train_time_interval", None) is not None
    ]
    if len(savers) > MOST_CHECKPOINTS:
        raise ValueError(
            f"{len(savers)} ModelCheckpoint callbacks have a train_time_interval, but worker groups"
            f" support at most {MOST_CHECKPOINTS}. Use every_n_train_steps in some of the"
            " callbacks."
        )

    def decide(index: int, hook: Function, *args: Forwarded) -> None:
        # The hook asks all ranks through a broadcast.
        fit.requests.deciding = index
        try:
            hook(*args)
        finally:
            fit.requests.deciding = None

    for index, saver in enumerate(savers):
        wrap(undo, saver, "on_train_batch_end", partial(decide, index))


def _monitor_means(undo: ExitStack, trainer: Trainer, groups: ConnectedGroups) -> None:
    """Makes checkpoints and schedules use a monitored metric's mean over all ranks."""
    replacements: dict[str, Function] = {
        "_monitor_candidates": partial(_mean_candidates, groups),
        "_save_last_checkpoint": partial(_save_last, groups),
    }
    monitored = partial(_mean_of_monitored, trainer, groups)
    wrap(undo, trainer.fit_loop.epoch_loop, "_get_monitor_value", monitored)
    for saver in trainer.callbacks:
        for name, around in replacements.items():
            if hasattr(saver, name):
                wrap(undo, saver, name, around)


def _mean_of_monitored(
    trainer: Trainer, groups: ConnectedGroups, original: Function, key: str
) -> object:
    """Returns the value of the metric that a learning rate schedule monitors."""
    metric = original(key)
    for config in trainer.lr_scheduler_configs:
        if config.monitor == key and config.interval == "step":
            return metric
    numbers = {} if metric is None else {key: float(metric)}
    return groups.mean_over_all(numbers).get(key, metric)


def _mean_candidates(groups: ConnectedGroups, original: Function, trainer: Trainer) -> State:
    """Returns the metrics that determine which checkpoints are saved, and under which names."""
    metrics = dict(original(trainer))
    tensors = {name: metric for name, metric in metrics.items() if isinstance(metric, Tensor)}
    means = groups.mean_over_all({name: float(metric) for name, metric in tensors.items()})
    for name, mean in means.items():
        if tensors[name].is_floating_point():
            metrics[name] = tensors[name].new_tensor(mean)
    return metrics


def _save_last(groups: ConnectedGroups, original: Function, *args: Forwarded) -> None:
    """Updates the last checkpoint as Lightning would, except after an exception."""
    # After an exception, no checkpoint was written, so there is nothing to link to.
    if not groups.is_alone:
        original(*args)


def _keep_in_group(undo: ExitStack, trainer: Trainer, in_group: object) -> None:
    """Keeps metrics and synchronised BatchNorm within the worker group.

    See [Note: nothing in users' objects].
    """
    if in_group is None:
        return

    def gather(gather_all: Function, result: Tensor, group: Forwarded = None) -> object:
        if group is None and in_batch(trainer.lightning_module):
            group = in_group
        return gather_all(result, group)

    def forward(normalise: Function, layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        group_before = layer.process_group
        layer.process_group = in_group
        try:
            return normalise(layer, x)
        finally:
            layer.process_group = group_before

    # Each metric without a `dist_sync_fn` looks this function up there, whether or not the metric
    # is part of the module.
    wrap(undo, importlib.import_module("torchmetrics.metric"), "gather_all_tensors", gather)
    wrap(undo, nn.SyncBatchNorm, "forward", forward)
