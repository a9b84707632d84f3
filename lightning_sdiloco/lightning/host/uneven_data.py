"""Makes worker groups with unequal numbers of batches end every epoch together, for the time of a fit.

[Note: uneven data] Where lengths are known, all ranks agree on the smallest when Lightning loads the data. Where they
are not, or a loader ends before the length that it announced, a group that runs out of batches waits for the others.
Where all have run out, the epoch is over. If not, it asks for the end of the epoch, and the request travels with its
next launch; it follows the others with idle batches: Lightning gets None, which it takes for a batch without training.
Idle batches count like those of the group that trains in them, as inner steps and as global steps, so that whatever
happens every so many steps happens in all groups after the same one. The batch in which the launch lands becomes the
last of the epoch in all groups. See also [Note: the end of an epoch].
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from lightning_sdiloco.comm import Topology
from lightning_sdiloco.lightning.host.ended_data import Epochs, Fetcher, run_epoch, saved_loop
from lightning_sdiloco.lightning.host.patching import replace

_log = logging.getLogger(__name__)

# What Lightning calls the barrier before all comparisons of loaders.
_LOADED = "train_dataloader()"


def end_epochs_together(undo: ExitStack, epochs: Epochs) -> None:
    """Replaces what ends epochs in Lightning; see [Note: uneven data]. One worker group alone needs nothing."""
    if epochs.topology.num_groups > 1:
        loop = epochs.trainer.fit_loop
        replace(undo, loop, "setup_data", partial(_setup_data, epochs, loop.setup_data))
        save = loop.on_save_checkpoint
        replace(undo, loop, "on_save_checkpoint", lambda: saved_loop(loop._data_fetcher, save()))
        epoch_loop = loop.epoch_loop
        should_validate = partial(_should_validate, epochs, epoch_loop._should_check_val_fx)
        replace(undo, epoch_loop, "_should_check_val_fx", should_validate)
        replace(undo, epoch_loop, "run", partial(run_epoch, epochs, epoch_loop.run))


# Idle batches, and the end of an epoch


def count_idle_batch(trainer: Any, optimizer_steps: int) -> bool:
    """Counts a batch without training as Lightning counts one with training."""
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.increment_started()
    if loop._should_accumulate():
        return False
    if trainer.lightning_module.automatic_optimization:
        progress, steps = loop.automatic_optimization.optim_progress.optimizer.step, 1
    else:
        progress, steps = loop.manual_optimization.optim_step_progress, optimizer_steps
    for _ in range(steps):
        progress.increment_ready()
        progress.increment_completed()
    return True


def end_epoch(trainer: Any) -> None:
    """Makes the batch that ends now the last of the epoch."""
    loop = trainer.fit_loop.epoch_loop
    if not loop._num_ready_batches_reached():
        loop.batch_progress.is_last_batch = True
        # Where Lightning knows the last batch, it does this before the hooks at the end of the batch.
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def drop_what_not_all_logged(trainer: Any, topology: Topology) -> None:
    """Drops metrics of the epoch whose reduction over all ranks would wait in vain for ranks that did not log them."""
    results = trainer.fit_loop.epoch_loop._results
    logged = [key for key, result in results.items() if _is_reduced_by_epoch(result)]
    common = set.intersection(*map(set, topology.world.all_gather_object(logged)))
    dropped = [key for key in logged if key not in common]
    for key in dropped:
        del results[key]
    if dropped and topology.group_rank == 0:
        _log.warning(
            "Not every rank logged %s in epoch %d, where a reduction would wait for those without: dropped. Log it on"
            " every rank, or without sync_dist on one. A worker group without a batch in an epoch logs nothing.",
            ", ".join(dropped),
            trainer.current_epoch,
        )


def _is_reduced_by_epoch(result: Any) -> bool:
    if not result.meta.on_epoch or result.has_reset:
        return False
    if result.is_tensor:
        return bool(result.meta.sync.should and not result.meta.sync.rank_zero_only)
    # A metric gathers its own states.
    return bool(getattr(result.value, "sync_on_compute", True))


def _should_validate(epochs: Epochs, original: Callable[[Any], bool], fetcher: Any) -> bool:
    """Decides as Lightning does, and also validates after an epoch with fewer batches than were announced."""
    trainer, loop = epochs.trainer, epochs.trainer.fit_loop.epoch_loop
    early = loop.batch_progress.is_last_batch and loop.batch_progress.current.ready < trainer.num_training_batches
    due = original(fetcher) or (early and _validates_by_share(trainer) and loop._should_check_val_epoch())
    if due:
        epochs.meet()
    return bool(due)


def _validates_by_share(trainer: Any) -> bool:
    by_time = getattr(trainer, "_val_check_time_interval", None) is not None
    return isinstance(trainer.val_check_interval, float) and not by_time


# Known lengths


class _Announced(NamedTuple):
    """What a rank says of its training data: the number of batches in an epoch, if known, or what went wrong."""

    group: int
    batches: int | None
    error: str


def _setup_data(epochs: Epochs, original: Callable[[], None]) -> None:
    loop = epochs.trainer.fit_loop
    before, failure = loop._data_fetcher, None
    with ExitStack() as undo:
        loaded = _compare_no_lengths(undo, epochs.trainer.strategy)
        try:
            original()
        except Exception as error:
            if not loaded:
                raise
            failure = error
    if failure is not None or loop._data_fetcher is not before:
        _agree(epochs, failure)


def _compare_no_lengths(undo: ExitStack, strategy: Any) -> list[str]:
    """Keeps Lightning from summing lengths over all ranks, which hangs if only some loaders have a length."""
    passed: list[str] = []
    wait = strategy.barrier

    def barrier(name: Any = None, *args: Any, **kwargs: Any) -> None:
        wait(name, *args, **kwargs)
        if name == _LOADED:
            passed.append(name)
            replace(undo, strategy, "reduce", lambda tensor, *args, **kwargs: tensor)

    replace(undo, strategy, "barrier", barrier)
    return passed


def _agree(epochs: Epochs, failure: Exception | None) -> None:
    """Agrees with all ranks on the batches of an epoch. Raises on all of them if one has none, or could not load."""
    trainer, topology = epochs.trainer, epochs.topology
    batches = _batches(trainer) if failure is None else None
    own = _Announced(topology.group_index, batches, "" if failure is None else repr(failure))
    ranks = [_Announced(*rank) for rank in topology.world.all_gather_object(own)]
    if failure is not None:
        raise failure
    _require_data(ranks)
    known = [rank.batches for rank in ranks if rank.batches is not None]
    agreed = min(known) if known else None
    if agreed is not None and any(rank.batches != agreed for rank in ranks):
        _shorten(trainer, agreed)
        if trainer.is_global_zero:
            _log.warning(
                "Worker groups have unequal numbers of batches: %s. Every epoch ends after %d in all of them.",
                _told(ranks),
                agreed,
            )
    if agreed != 0:
        _end_after(epochs, agreed)


def _batches(trainer: Any) -> int | None:
    """Returns how many batches an epoch has, if that is known."""
    loop = trainer.fit_loop
    if loop.max_batches != float("inf"):
        return int(loop.max_batches)
    # A restored loader may be at its end, and groups may have no data in a later epoch.
    resumed = loop.restarting or getattr(loop, "is_resuming", trainer.strategy.fit.checkpointer.resumes_exactly)
    return 0 if loop._data_fetcher.done and not resumed else None


def _require_data(ranks: list[_Announced]) -> None:
    for rank in ranks:
        if rank.error:
            raise ValueError(f"Worker group {rank.group} cannot train with its data: {rank.error}.")
    if any(rank.batches == 0 for rank in ranks) and not all(rank.batches == 0 for rank in ranks):
        raise ValueError(
            f"Some worker groups have no batch to train on: {_told(ranks)}. Epochs end together, so nobody would train."
            " Give every group data, or train with fewer worker groups."
        )


def _told(ranks: list[_Announced]) -> str:
    """Returns the numbers of batches of all groups, as text for people."""
    groups: dict[int, list[str]] = {}
    for rank in ranks:
        groups.setdefault(rank.group, []).append("an unknown number" if rank.batches is None else str(rank.batches))
    return ", ".join(f"group {group} has {' and '.join(dict.fromkeys(told))}" for group, told in groups.items())


def _shorten(trainer: Any, agreed: int) -> None:
    trainer.fit_loop.max_batches = agreed
    if _validates_by_share(trainer):
        trainer.val_check_batch = max(1, int(agreed * trainer.val_check_interval))


def _end_after(epochs: Epochs, agreed: int | None) -> None:
    loop = epochs.trainer.fit_loop
    if type(loop._data_fetcher).__name__ != "_DataLoaderIterDataFetcher":
        loop._data_fetcher = Fetcher(loop._data_fetcher, agreed, epochs)
    elif agreed is not None:
        # It passes its iterator to training_step, which takes the batches: it can be shortened, but not yield None.
        loop._combined_loader.limits = [min(limit, agreed) for limit in loop._combined_loader.limits]
        loop._data_fetcher.length = agreed
