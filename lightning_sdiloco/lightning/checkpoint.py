"""How a fit saves and resumes: an ordinary checkpoint of the outer model, and a folder with what
each rank holds.

A checkpoint file takes its place in one step, and only then are the folders of earlier saves
removed.

[Note: late writers] `AsyncCheckpointIO` hands a checkpoint to a thread and returns. Until the
thread has written it, the file in its place is an older one, which needs its own folder. So what
follows the writing is done by the CheckpointIO that really writes, in whatever thread that is.

[Note: epochs after a resume] Lightning asks loaders for a new iterator at the start of every epoch
but the first. After a resume it has one already, which was made before the random state of the
checkpoint was restored, and may stand in the middle of the data, where the loader was saved. A
loader of torch draws a random number for each iterator; without that draw, whatever is random
afterwards, such as dropout, would differ. And where a run resumes from the last batch of an epoch,
Lightning goes on with the next epoch without counting it and without calling
`on_train_epoch_start`, which finetuning callbacks need.

[Note: the rest of a batch] A checkpoint that `every_n_train_steps` saves after a batch precedes
whatever else is due there: a validation, a learning rate that depends on metrics, the end of the
epoch. When Lightning resumes, it skips these. They may draw random numbers, as a loader of torch
does, and early stopping and other checkpoints may depend on them. So the resumed run begins with
them, unless the checkpoint was saved because of a signal, which happens after them. The same goes
for learning rates after a checkpoint that was saved at the end of an epoch, as `ModelCheckpoint`
does by default. With ``max_steps`` Lightning would make such an epoch once more.

[Note: metrics after a resume] Lightning saves no metrics. A mean over an epoch that was resumed
would cover only the batches since then. Early stopping, checkpoints and learning rates that depend
on a metric would decide differently, or fail where nothing has been logged since. So every rank
saves its own metrics: what callbacks see, and what the epoch has accumulated.

[Note: what a rank gets back] Lightning writes what rank 0 holds. Schedulers that watch a metric,
callbacks, loops, loaders, data modules and whatever a hook puts into a checkpoint may differ
between ranks, so each rank gets back the entries in which it differs; see [Note: entries of a
rank]. That includes the best models that `ModelCheckpoint` knows. They are the same on all ranks
where what it monitors is, and otherwise the resumed run decides as one that was never stopped.
Hyperparameters are not among the entries: they are what the script gives, and no fit restores them.
When rounds restart, a rank gets the entries of a rank in its place, but the model is the one in the
file, and with other groups or ranks the loops are, too.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pkgutil import resolve_name
from threading import Lock
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sdiloco.algorithm.config import AUTO, Settings
from lightning_sdiloco.engine import checkpoint as files
from lightning_sdiloco.engine.checkpoint import (
    Restart,
    own_state,
    restart_from,
    take_up_entries,
    take_up_state,
    with_entries,
    write_common_file,
    write_ranks,
)
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.per_rank import Read
from lightning_sdiloco.engine.shards import clean_name
from lightning_sdiloco.lightning.evaluation import Averaging
from lightning_sdiloco.lightning.fit_state import SIGNALLED, FitState
from lightning_sdiloco.lightning.host import wrap
from lightning_sdiloco.lightning.model_format import Checkpoint, Load, reader_of

_log = logging.getLogger(__name__)

Write = Callable[[Checkpoint, Any], None]


class Checkpointer:
    averaging: Averaging | None = None
    """The averages of the fit, once there are any."""

    def __init__(self, fit: FitState) -> None:
        self._fit = fit
        self._trainer = fit.trainer
        self._groups = fit.groups
        self._options = fit.options
        self._format = fit.format
        self.resumed: dict[str, Any] | None = None
        """What this rank saved, of a fit that is about to resume exactly."""
        self.start = "a new run"
        """Where the fit starts, in words."""
        self._restart: Restart | None = None
        self._random_state: dict[str, Any] | None = None
        # The checkpoints of this run that still exist, and whether it saved each itself.
        self._standing: dict[str, bool] = {}
        # See [Note: late writers]: the CheckpointIO that really writes, what follows when the file
        # of a save is in its place, and the removals of files that are just being written.
        self._io: Any = None
        self._undo = ExitStack()
        self._afterwards: dict[str, Callable[[], None]] = {}
        self._lock = Lock()
        self._removals: dict[str, list[Callable[[], None]]] = {}

    # Resume

    def load(self, path: Any, load: Load, *args: Any, **kwargs: Any) -> Checkpoint:
        checkpoint = self._format.read(self._trainer.strategy, path, load, *args, **kwargs)
        header = checkpoint.get(files.KEY)
        if self._trainer.state.fn != "fit":
            return checkpoint
        if header is None:
            self.start = (
                f"step {checkpoint.get('global_step')} of a checkpoint without worker groups"
            )
            return checkpoint
        given = inspect.signature(load).bind(path, *args, **kwargs)
        given.apply_defaults()
        # Before 2.6 Lightning knows no such argument.
        choices = {name: value for name, value in given.arguments.items() if name == "weights_only"}
        read = reader_of(self._trainer.strategy.checkpoint_io.load_checkpoint, **choices)
        if self._options.restarts or header["layout"] != self._layout():
            self._load_for_restart(checkpoint, str(path), header, read)
        else:
            self._require_the_settings_of(header)
            self.resumed = files.read_rank(str(path), header, self._trainer.global_rank)
            self.start = files.start_of(header, self.resumed)
            self._standing[str(path)] = False
            self.resumed["engine"] = self._take_up(checkpoint, self.resumed, read)
        return checkpoint

    def resume(self, engine: StreamingDiLoCo) -> None:
        if self._restart is not None:
            engine.restart(self._restart)
        if self.resumed is not None:
            engine.load_state_dict(self.resumed["engine"])
            self._fit.requests.done_at = dict(self.resumed["requests"])
            for bit in SIGNALLED:
                # It was done by saving the checkpoint.
                self._fit.requests.settle(bit)
            self._random_state = self.resumed["random"]
            load_metrics_state_dict(self._trainer, self.resumed["metrics"])
            if self.averaging is not None:
                self.averaging.load_state_dict(self.resumed["averaging"])
        if self._random_state is not None:
            files.set_random_state(self._random_state)
        self.forget()

    def forget(self) -> None:
        self.resumed = self._restart = self._random_state = None

    def make_trainable(self, model: nn.Module) -> None:
        """Makes those parameters trainable that were when the checkpoint was saved; callbacks do
        not do so.
        """
        if self.resumed is not None:
            trainable = {
                name
                for fragment in self.resumed["engine"]["fragments"]
                for name in fragment["names"]
            }
        elif self._restart is not None and not self._options.restarts:
            trainable = set(self._restart.parameters)
        else:
            return
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(clean_name(name) in trainable)

    def _take_up(
        self, checkpoint: Checkpoint, own: dict[str, Any], read: Read, without: Collection[str] = ()
    ) -> dict[str, Any]:
        """Puts what this rank saved in place of what rank 0 saved, and returns the state of the
        engine.
        """
        self._take_up_optimizers(checkpoint, own["optimizer_states"])
        return take_up_entries(own, checkpoint, read, without)

    def _take_up_optimizers(self, checkpoint: Checkpoint, states: list[Any]) -> None:
        checkpoint["optimizer_states"] = states
        if self._format.is_sharded:  # Lightning restores these when it loads the file.
            for optimizer, state in zip(self._trainer.strategy.optimizers, states, strict=True):
                take_up_state(optimizer, state)

    def _require_the_settings_of(self, header: dict[str, Any]) -> None:
        saved = header["settings"]
        self._options.restore(saved)
        other = Settings.differences(saved, self._settings())
        if other:
            raise ValueError(
                f"The checkpoint cannot be resumed exactly with other settings: {'; '.join(other)}."
                " Resume with the settings it was saved with, or restart the rounds from its outer"
                " parameters with resume='restart'."
            )

    def _load_for_restart(
        self, checkpoint: Checkpoint, path: str, header: dict[str, Any], read_packed: Read
    ) -> None:
        """Restores the outer state of all groups, and inner optimizer and random state of those
        that have a file.
        """
        if not self._options.restarts:
            self._require_the_settings_of(header)
        # Rounds that restart are no beginning.
        self._options.chooses_dense = False
        topology = self._groups.topology
        layout = header["layout"]
        settings = self._options.settings

        def read() -> Restart | None:
            """Reads on rank 0, for all: they may see different files."""
            if topology.rank:
                return None
            # Flights land as they would have landed.
            before = settings.taken_from(header["settings"])
            same_optimizer = (
                header["settings"].get("outer_optimizer") == before.described()["outer_optimizer"]
            )
            return restart_from(files.read_groups(path, header), before if same_optimizer else None)

        first = topology.world.attempt(read)[0]
        if first.failure:
            is_told = "ValueError" in first.failure
            raise ValueError(
                first.text
                if is_told
                else f"{path} cannot be read: {first.failure[0]}: {first.text}"
            )
        self._restart = Restart.of(first.value)
        self.start = "outer parameters of another run"
        size = layout["group_size"]
        own = None
        # This rank reads the file of its group and shard, if there is one, or of the group's first.
        mesh = {
            name: of for name, of in layout.items() if name not in ("worker_groups", "group_size")
        }
        if mesh == self._format.mesh and topology.group_index < layout["worker_groups"]:
            rank = topology.group_index * size + (
                topology.group_rank if topology.group_rank < size else 0
            )
            own = (
                files.read_rank(path, header, rank) if files.has_rank(path, header, rank) else None
            )
        if own is None:
            # Without state, but with the learning rates from which schedulers go on.
            states = [{"state": {}, "param_groups": of} for of in header.get("param_groups", [])]
            states = states or [
                {**state, "state": {}} for state in checkpoint.get("optimizer_states", [])
            ]
            self._take_up_optimizers(checkpoint, states)
        else:
            without = ["state_dict"] if layout == self._layout() else ["state_dict", "loops"]
            self._take_up(checkpoint, own, read_packed, without)
            if topology.group_rank < size:
                self._random_state = own["random"]
        found = topology.world.all_gather_object(own is not None)
        fresh = sorted(
            {rank // topology.group_size for rank, there in enumerate(found) if not there}
        )
        if self._trainer.is_global_zero:
            _log.warning(
                "The checkpoint is not resumed exactly: it was saved with %s, now there are %s%s."
                " Every group starts from its outer parameters and outer momentum, and rounds"
                " restart. Flights lost so far: %d. Worker groups that start with a fresh inner"
                " optimizer: %s.",
                layout,
                self._layout(),
                "".join(
                    f"; {other}"
                    for other in Settings.differences(header["settings"], self._settings())
                ),
                self._restart.counts["flights_dropped"],
                ", ".join(map(str, fresh)) or "none",
            )

    # Save

    def save(
        self, engine: StreamingDiLoCo, checkpoint: Checkpoint, path: Any, write: Write
    ) -> None:
        """Saves what all groups have in common, and what each rank holds beside it.

        All ranks must call it.

        See [Note: the order of a save].
        """
        topology = self._groups.topology
        path = str(path)
        host = self._trainer.strategy
        averaging = self.averaging
        state: dict[str, Any] = {
            "engine": engine.state_dict(),
            "requests": dict(self._fit.requests.done_at),
            "averaging": averaging.state_dict() if averaging is not None else None,
            "random": files.random_state(),
            "optimizer_states": [own_state(optimizer) for optimizer in host.optimizers]
            if self._format.is_sharded
            else list(checkpoint["optimizer_states"]),
            "metrics": metrics_state_dict(self._trainer),
        }
        if self._groups.is_alone:
            self._save_alone({**state, "engine": {**state["engine"], "extra_state": {}}}, path)
            return
        with self._groups.waiting(("trainer.save_checkpoint, which all ranks must call",), engine):
            state = with_entries(state, self._of_ranks(checkpoint), topology)
            saved = write_ranks(
                path, topology, state, self._layout(), self._settings(), self._advice
            )
        path = saved.path
        replaced = [other for other, own in self._standing.items() if own and other != path]

        def remove_older() -> None:
            files.remove_saves(path, saved.older)
            for other in replaced if self._options.resume.endswith(":newest") else ():
                files.remove_folder(other)

        def write_common() -> None:
            if self._trainer.is_global_zero and not self._format.in_folders:
                if self._io is None:
                    self._io = host.checkpoint_io
                    while getattr(self._io, "checkpoint_io", None) is not None:
                        self._io = self._io.checkpoint_io
                    wrap(self._undo, self._io, "save_checkpoint", self._place)
                self._afterwards[saved.header["save"]] = remove_older
            write({**checkpoint, files.KEY: saved.header}, path)

        write_common_file(saved, topology, write_common, self._advice)
        if self._trainer.is_global_zero and self._format.in_folders:
            remove_older()
        self._standing.pop(path, None)
        self._standing[path] = True

    def _of_ranks(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns what may differ between ranks in a checkpoint; see [Note: what a rank gets back]."""
        left_out = {"optimizer_states"}
        if self._format.is_sharded:
            left_out.add("state_dict")
        for source in (self._trainer.lightning_module, self._trainer.datamodule):
            if source is not None:
                left_out.add(source.CHECKPOINT_HYPER_PARAMS_NAME)
                left_out.add(source.CHECKPOINT_HYPER_PARAMS_KEY)
                left_out.add(source.CHECKPOINT_HYPER_PARAMS_TYPE)
        return {key: value for key, value in checkpoint.items() if key not in left_out}

    @property
    def _advice(self) -> str:
        return (
            f"Resume from {self._last_standing}. Make room on the disk, or keep fewer checkpoints:"
            " set ModelCheckpoint's save_top_k, and resume='exact:newest' in the strategy."
        )

    def _save_alone(self, state: dict[str, Any], path: str) -> None:
        try:
            kept = files.write_rank(path, "exception", self._trainer.global_rank, state).name
        except OSError as error:
            files.discard(path, "exception")
            _log.warning(
                "After an exception this rank could not save its state: %s. Resume from %s.",
                error,
                self._last_standing,
            )
            return
        _log.warning(
            "After an exception this rank saved its own state in %s, beside %s. It cannot be"
            " resumed: other ranks may be at another step. Resume from %s.",
            kept,
            path,
            self._last_standing,
        )

    @property
    def _last_standing(self) -> str:
        return next(reversed(self._standing), "an earlier run's checkpoint: this run saved none")

    def remove(self, path: Any, remove: Callable[[Any], None]) -> None:
        """Removes a checkpoint and its folder; if a thread is just writing the file, as soon as it
        is written.
        """
        self._standing.pop(str(path), None)
        if not self._trainer.is_global_zero:
            return
        with self._lock:
            if str(path) in self._removals:
                self._removals[str(path)].append(partial(self.remove, path, remove))
            else:
                remove(path)
                files.remove_folder(str(path))

    def _place(
        self,
        write: Callable[..., None],
        checkpoint: Checkpoint,
        path: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Writes the file of a checkpoint, in whatever thread, and then does what follows."""
        save = checkpoint.get(files.KEY, {}).get("save")
        if save not in self._afterwards:
            write(checkpoint, path, *args, **kwargs)
            return
        afterwards = self._afterwards.pop(save)
        with self._lock:
            if not files.is_whole(path, save):
                return  # It was removed before its turn came.
            self._removals[path] = []
        before = files.fingerprint(path)
        # Lightning's own CheckpointIO moves the file from the system's temporary folder. If that is
        # on another file system, this copies over the old file, which is then neither the old nor
        # the new one for a while.
        part = files.beside(path, save) if type(self._io).__name__ == "TorchCheckpointIO" else None
        try:
            write(checkpoint, part or path, *args, **kwargs)
            if part is not None:
                files.take_place(part, path)
        finally:
            with self._lock:
                removals = self._removals.pop(path)
        if files.fingerprint(path) != before:
            afterwards()
        for removal in removals:
            removal()

    def close(self) -> None:
        self._undo.close()
        self._io = None

    # What is compared

    def _settings(self) -> dict[str, str]:
        is_open = self._options.open
        settings = self._options.settings
        # What suits the rounds is known once these are chosen.
        chosen = settings if is_open else settings.chosen_for(self._groups.topology.num_groups)
        return {**chosen.fixed_by_a_checkpoint(), **dict.fromkeys(is_open, repr(AUTO))}

    def _layout(self) -> dict[str, int]:
        topology = self._groups.topology
        return {
            "worker_groups": topology.num_groups,
            "group_size": topology.group_size,
            **self._format.mesh,
        }


# Epochs


def begin_epochs_alike(trainer: Any, undo: ExitStack) -> None:
    """Patches the loops of a trainer; see [Note: epochs after a resume] and [Note: the rest of a
    batch].
    """
    loop = trainer.fit_loop
    epoch_loop = trainer.fit_loop.epoch_loop
    progress = epoch_loop.batch_progress
    once = undo.enter_context(ExitStack())

    def is_at_last_batch() -> bool:
        return bool(epoch_loop.restarted_on_train_batch_end and progress.is_last_batch)

    def was_saved_in_a_hook_at_the_end(count: Any) -> bool:
        # The completion of the batch or the epoch is not counted yet.
        return bool(count.ready == count.started == count.processed == count.completed + 1)

    def end_batch(advance: Any, data_fetcher: Any) -> None:
        # In the place of the first batch, so that Lightning goes on as after any batch.
        once.close()
        epoch_loop.val_loop.restarting = False
        trainer.strategy.fit.finish_with_last_batch()

    def end_epoch_and_start(start: Callable[[], None]) -> None:
        once.close()
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        start()

    def end_epoch(end: Callable[[], None]) -> None:
        # As in a run that was not resumed: learning rates that depend on metrics are updated.
        loop._restarting = False
        end()

    def reset_fit(reset: Callable[[], None]) -> None:
        """A run that was saved after a batch or an epoch begins with the rest of that."""
        if trainer.strategy.fit.checkpointer.resumed is not None:
            wrap(undo, loop, "on_advance_end", end_epoch)
            if was_saved_in_a_hook_at_the_end(loop.epoch_progress.total):
                wrap(once, loop, "on_advance_start", end_epoch_and_start)
                # The epoch is over: Lightning sees that where epochs bound the run, and not where
                # steps do.
                loop._restarting = epoch_loop.restarting = False
            ends = map(was_saved_in_a_hook_at_the_end, (progress.total, progress.current))
            if epoch_loop.restarting and all(ends):
                progress.increment_completed()
                wrap(once, epoch_loop, "advance", end_batch)
        reset()

    def start_epoch(start: Callable[[], None]) -> None:
        if loop.restarted_mid_epoch and is_at_last_batch():
            loop.reset_restart_stage()
        start()

    def reset_epoch(reset: Callable[[], None]) -> None:
        """Starts the next epoch if a run resumes from the last batch of one."""
        ended = is_at_last_batch()
        reset()
        if ended and progress.is_last_batch:
            for each in (
                progress,
                epoch_loop.scheduler_progress,
                epoch_loop.automatic_optimization.optim_progress,
            ):
                each.reset_on_run()
            epoch_loop.val_loop.batch_progress.total.reset()
        # Lightning has is_resuming from 2.5.3 on.
        resumed = getattr(loop, "is_resuming", False) or epoch_loop.restarting
        if resumed and trainer.current_epoch > 0 and progress.current.ready == 0:
            iter(loop._data_fetcher)

    wrap(undo, loop, "reset", reset_fit)
    wrap(undo, loop, "on_advance_start", start_epoch)
    wrap(undo, epoch_loop, "reset", reset_epoch)


# Metrics

# What a metric has apart from its own states.
_BESIDE = ("_update_count", "_forward_cache")


def metrics_state_dict(trainer: Any) -> dict[str, Any]:
    seen = (
        trainer._logger_connector._callback_metrics
        if trainer.strategy.is_alone
        else trainer.callback_metrics
    )
    epoch = trainer.fit_loop.epoch_progress.current
    results = trainer.fit_loop.epoch_loop._results if epoch.processed < epoch.started else {}
    saved = {}
    for key, result in results.items():
        meta = result.meta
        reduction = result.meta.reduce_fx.__name__
        # A process group cannot be found again, nor can a metric that is not part of the module.
        if (
            result.has_reset
            or meta.sync.group is not None
            or not (result.is_tensor or meta.metric_attribute)
        ):
            continue
        saved[key] = {
            # The arguments of `self.log`: Lightning insists that they are the same in the next
            # call.
            "arguments": {
                name: told
                for name, told in vars(meta).items()
                if isinstance(told, (str, bool, NoneType))
            },
            "reduction": f"{'torch' if meta.reduce_fx is getattr(torch, reduction, None) else 'builtins'}:{reduction}",
            "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
            "is_tensor": result.is_tensor,
            "parts": {
                name: {state: _plain(getattr(part, state)) for state in (*part._defaults, *_BESIDE)}
                for name, part in _parts(result).items()
            },
        }
    return {
        "seen": {name: _plain(value) for name, value in seen.items() if isinstance(value, Tensor)},
        "epoch": saved,
    }


def load_metrics_state_dict(trainer: Any, state: dict[str, Any]) -> None:
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    classes: Any = sys.modules[type(results).__module__]
    connector._callback_metrics.update(state["seen"])
    for key, saved in state["epoch"].items():
        meta = classes._Metadata(**saved["arguments"], reduce_fx=resolve_name(saved["reduction"]))
        meta.sync = classes._Sync(fn=trainer.strategy.reduce, **saved["sync"])
        result = results[key] = classes._ResultMetric(meta, is_tensor=saved["is_tensor"])
        if not result.is_tensor:
            result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        for name, part in _parts(result).items():
            for each, value in saved["parts"][name].items():
                setattr(part, each, value)
            part.to(trainer.strategy.root_device)
    if state["epoch"]:
        # Otherwise the next batch would clear the metrics, as the first batch of an epoch does.
        connector._first_loop_iter = False


def _parts(result: Any) -> dict[str, Metric]:
    """Returns what Lightning keeps of a logged value, the metric that it is, and those that this
    one wraps.
    """
    inside = () if result.is_tensor else result.value.named_modules(prefix="value")
    return {"": result, **{name: part for name, part in inside if isinstance(part, Metric)}}


def _plain(value: Any) -> Any:
    """Returns what can be saved of a state: tensors and numbers, alone or in a list."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return (
        value.detach().clone()
        if isinstance(value, Tensor)
        else value
        if isinstance(value, int)
        else None
    )
