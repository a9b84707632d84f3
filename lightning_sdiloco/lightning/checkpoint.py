"""How a fit saves and resumes: an ordinary checkpoint of the outer model, and a folder with what each rank holds.

A checkpoint file takes its place in one step, and only then are the folders of earlier saves removed.

[Note: late writers] `AsyncCheckpointIO` hands a checkpoint to a thread and returns. Until the thread has written it,
the file in its place is an older one, which needs its own folder. So what follows the writing is done by the
CheckpointIO that really writes, in whatever thread that is.

[Note: epochs after a resume] Lightning asks loaders for a new iterator at the start of every epoch but the first. After
a resume it has one already, which was made before the random state of the checkpoint was restored, and may stand in the
middle of the data, where the loader was saved. A loader of torch draws a random number for each iterator; without that
draw, whatever is random afterwards, such as dropout, would differ. And where a run resumes from the last batch of an
epoch, Lightning goes on with the next epoch without counting it and without calling `on_train_epoch_start`, which
finetuning callbacks need.

[Note: the rest of a batch] A checkpoint that `every_n_train_steps` saves after a batch precedes whatever else is due
there: a validation, a learning rate that depends on metrics, the end of the epoch. When Lightning resumes, it skips
these. They may draw random numbers, as a loader of torch does, and early stopping and other checkpoints may depend on
them. So the resumed run begins with them, unless the checkpoint was saved because of a signal, which happens after
them. The same goes for learning rates after a checkpoint that was saved at the end of an epoch, as `ModelCheckpoint`
does by default. With ``max_steps`` Lightning would make such an epoch once more.

[Note: metrics after a resume] Lightning saves no metrics. A mean over an epoch that was resumed would cover only the
batches since then. Early stopping, checkpoints and learning rates that depend on a metric would decide differently, or
fail where nothing has been logged since. So every rank saves its own metrics: what callbacks see, and what the epoch
has accumulated.
"""

import builtins
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sdiloco.algorithm.config import AUTO, Settings
from lightning_sdiloco.engine import checkpoint as files
from lightning_sdiloco.engine.checkpoint import Restart, restart_from, write_common_file, write_ranks
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.shards import clean_name
from lightning_sdiloco.lightning.evaluation import Averaging
from lightning_sdiloco.lightning.fit_state import SIGNALLED, FitState
from lightning_sdiloco.lightning.host.patching import replace
from lightning_sdiloco.lightning.model_format import Checkpoint, Load

_log = logging.getLogger(__name__)

Write = Callable[[Checkpoint, Any], None]


class Checkpointer:
    averaging: Averaging | None = None
    """The averages of the fit, once there are any."""

    def __init__(self, fit: FitState) -> None:
        self._fit, self._trainer, self._groups = fit, fit.trainer, fit.groups
        self._options, self._format = fit.options, fit.format
        self._resumed: dict[str, Any] | None = None
        self._restart: Restart | None = None
        self._random_state: dict[str, Any] | None = None
        # The checkpoints of this run that still exist, and whether it saved each itself.
        self._standing: dict[str, bool] = {}
        self._placing: Placing | None = None

    # Resume

    @property
    def resumes_exactly(self) -> bool:
        """Whether the fit that is about to run resumes exactly where its checkpoint was saved."""
        return self._resumed is not None

    def load(self, path: Any, load: Load, *args: Any, **kwargs: Any) -> Checkpoint:
        checkpoint = self._format.read(self._trainer.strategy, path, load, *args, **kwargs)
        header = checkpoint.get(files.KEY)
        if header is None or self._trainer.state.fn != "fit":
            return checkpoint
        if self._options.restarts or header["layout"] != self._layout():
            self._load_for_restart(checkpoint, str(path), header)
        else:
            self._require_the_settings_of(header)
            self._resumed = files.read_rank(str(path), header, self._trainer.global_rank)
            self._standing[str(path)] = False
            self._take_up(checkpoint, self._resumed)
        return checkpoint

    def resume(self, engine: StreamingDiLoCo) -> None:
        if self._restart is not None:
            engine.restart(self._restart)
        if self._resumed is not None:
            engine.load_state_dict(self._resumed["engine"])
            self._fit.requests.done_at = dict(self._resumed["requests"])
            for bit in SIGNALLED:
                # It was done by saving the checkpoint.
                self._fit.requests.settle(bit)
            self._random_state = self._resumed["random"]
            load_metrics_state_dict(self._trainer, self._resumed["metrics"])
            if self.averaging is not None:
                self.averaging.load_state_dict(self._resumed["averaging"])
        if self._random_state is not None:
            files.set_random_state(self._random_state)
        self.forget()

    def forget(self) -> None:
        self._resumed = self._restart = self._random_state = None

    def make_trainable(self, model: nn.Module) -> None:
        """Makes those parameters trainable that were when the checkpoint was saved; callbacks do not do so."""
        if self._resumed is not None:
            trainable = {name for fragment in self._resumed["engine"]["fragments"] for name in fragment["names"]}
        elif self._restart is not None and not self._options.restarts:
            trainable = set(self._restart.parameters)
        else:
            return
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(clean_name(name) in trainable)

    def _take_up(self, checkpoint: Checkpoint, own: dict[str, Any]) -> None:
        """Puts what this rank saved in place of what rank 0 saved."""
        precision = type(self._trainer.strategy.precision_plugin).__qualname__
        if own["loader"] is not None:
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = own["loader"]
        if own["precision"] is not None:
            checkpoint[precision] = own["precision"]
        self._format.take_up_optimizers(checkpoint, self._trainer.strategy.optimizers, own["optimizer_states"])

    def _require_the_settings_of(self, header: dict[str, Any]) -> None:
        saved = header["settings"]
        self._options.restore(saved)
        if other := Settings.differences(saved, self._settings()):
            raise ValueError(
                f"The checkpoint cannot be resumed exactly with other settings: {'; '.join(other)}. Resume with those"
                " it was saved with, or start the rounds anew from its outer parameters with resume='restart'."
            )

    def _load_for_restart(self, checkpoint: Checkpoint, path: str, header: dict[str, Any]) -> None:
        """Restores the outer state of all groups, and inner optimizer and random state of those that have a file."""
        if not self._options.restarts:
            self._require_the_settings_of(header)
        self._restart = self._as_rank_zero_reads(path, header)
        topology, layout = self._groups.topology, header["layout"]
        size, own = layout["group_size"], None
        # This rank reads the file of its group and shard, if there is one, or of the group's first.
        mesh = {name: of for name, of in layout.items() if name not in ("worker_groups", "group_size")}
        if mesh == self._format.mesh and topology.group_index < layout["worker_groups"]:
            rank = topology.group_index * size + (topology.group_rank if topology.group_rank < size else 0)
            own = files.read_rank(path, header, rank) if files.has_rank(path, header, rank) else None
        if own is None:
            # Without state, but with the learning rates from which schedulers go on.
            states = [{"state": {}, "param_groups": of} for of in header.get("param_groups", [])]
            states = states or [{**state, "state": {}} for state in checkpoint.get("optimizer_states", [])]
            self._format.take_up_optimizers(checkpoint, self._trainer.strategy.optimizers, states)
        else:
            self._take_up(checkpoint, own if layout == self._layout() else {**own, "loader": None})
            if topology.group_rank < size:
                self._random_state = own["random"]
        found = topology.world.all_gather_object(own is not None)
        fresh = sorted({rank // topology.group_size for rank, there in enumerate(found) if not there})
        if self._trainer.is_global_zero:
            _log.warning(
                "The checkpoint is not resumed exactly: it was saved with %s, now there are %s%s. Every group starts"
                " from its outer parameters and outer momentum, and the rounds begin anew. Flights lost so far: %d."
                " Worker groups that begin with a fresh inner optimizer: %s.",
                layout,
                self._layout(),
                "".join(f"; {other}" for other in Settings.differences(header["settings"], self._settings())),
                self._restart.counts["flights_dropped"],
                ", ".join(map(str, fresh)) or "none",
            )

    def _as_rank_zero_reads(self, path: str, header: dict[str, Any]) -> Restart:
        """Returns what rank 0 reads, or raises its error on all ranks: they may see different files."""
        restart, refusal = Restart({}, {}, {}), ""
        if self._trainer.is_global_zero:
            # What is in flight lands as it would have landed.
            settings = self._options.settings.taken_from(header["settings"])
            same_optimizer = header["settings"].get("outer_optimizer") == settings.described()["outer_optimizer"]
            try:
                states = files.read_groups(path, header)
                restart = restart_from(states, settings if same_optimizer else None)
            except Exception as error:
                # Of any error, because the other ranks are waiting to hear of it.
                refusal = str(error) if isinstance(error, ValueError) else f"{path} cannot be read: {error!r}"
        restart, refusal = self._groups.topology.world.all_gather_object((restart, refusal))[0]
        if refusal:
            raise ValueError(refusal)
        return Restart.of(restart)

    # Save

    def save(self, engine: StreamingDiLoCo, checkpoint: Checkpoint, path: Any, write: Write) -> None:
        """Saves what all groups have in common, and what each rank holds beside it. All ranks must call it.

        See [Note: the order of a save].
        """
        topology, path = self._groups.topology, str(path)
        host, averaging = self._trainer.strategy, self.averaging
        state = {
            "engine": engine.state_dict(),
            "requests": dict(self._fit.requests.done_at),
            "averaging": averaging.state_dict() if averaging is not None else None,
            "random": files.random_state(),
            "optimizer_states": self._format.optimizer_states(checkpoint, host.optimizers),
            "metrics": metrics_state_dict(self._trainer),
            "precision": checkpoint.get(type(host.precision_plugin).__qualname__),
            "loader": checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader"),
        }
        if self._groups.is_alone:
            self._save_alone(state, path)
            return
        with self._groups.waiting(("trainer.save_checkpoint, which all ranks must call",), engine):
            saved = write_ranks(path, topology, state, self._layout(), self._settings(), self._advice)
        path = saved.path
        replaced = [other for other, own in self._standing.items() if own and other != path]

        def remove_older() -> None:
            files.remove_saves(path, saved.older)
            for other in replaced if self._options.resume.endswith(":newest") else ():
                files.remove_folder(other)

        def write_common() -> None:
            if self._trainer.is_global_zero and not self._format.in_folders:
                self._placing = self._placing or Placing(host.checkpoint_io)
                self._placing.afterwards[saved.header["save"]] = remove_older
            write({**checkpoint, files.KEY: saved.header}, path)

        write_common_file(saved, topology, write_common, self._advice)
        if self._trainer.is_global_zero and self._format.in_folders:
            remove_older()
        self._standing.pop(path, None)
        self._standing[path] = True

    @property
    def _advice(self) -> str:
        return (
            f"Resume from {self._last_standing}. Make room on the disk, or keep fewer checkpoints: save_top_k of"
            " ModelCheckpoint, and resume='exact:newest' of the strategy."
        )

    def _save_alone(self, state: dict[str, Any], path: str) -> None:
        try:
            kept = files.write_rank(path, "exception", self._trainer.global_rank, state).name
        except OSError as error:
            files.discard(path, "exception")
            _log.warning(
                "After an exception this rank cannot keep its state: %s. Resume from %s.", error, self._last_standing
            )
            return
        _log.warning(
            "After an exception this rank kept its own state in %s beside %s, which cannot be resumed: other ranks may"
            " be at another step. Resume from %s.",
            kept,
            path,
            self._last_standing,
        )

    @property
    def _last_standing(self) -> str:
        return next(reversed(self._standing), "an earlier run's checkpoint: this run had saved none")

    def remove(self, path: Any, remove: Callable[[Any], None]) -> None:
        self._standing.pop(str(path), None)
        if not self._trainer.is_global_zero:
            return
        if self._placing is not None:
            self._placing.remove(str(path), remove)
        else:
            remove(path)
            files.remove_folder(str(path))

    def close(self) -> None:
        if self._placing is not None:
            self._placing.undo.close()
            self._placing = None

    # What is compared

    def _settings(self) -> dict[str, str]:
        auto, settings = self._options.auto, self._options.settings
        # What suits sync_every is known once the planner has chosen that.
        chosen = settings if auto else settings.chosen_for(self._groups.topology.num_groups)
        return {**chosen.fixed_by_a_checkpoint(), **dict.fromkeys(auto, repr(AUTO))}

    def _layout(self) -> dict[str, int]:
        return self._format.saved_layout(self._groups.topology)


class Placing:
    """Replaces the saving of a strategy's innermost CheckpointIO until it is closed; see [Note: late writers]."""

    def __init__(self, io: Any) -> None:
        while getattr(io, "checkpoint_io", None) is not None:
            io = io.checkpoint_io
        self._io = io
        self._write: Callable[..., None] = io.save_checkpoint
        self.afterwards: dict[str, Callable[[], None]] = {}
        """What is to be done when the checkpoint of a save is in its place."""
        self._lock = Lock()
        self._removals: dict[str, list[Callable[[], None]]] = {}  # Of files that are just being written.
        self.undo = ExitStack()
        replace(self.undo, io, "save_checkpoint", self._save)

    def remove(self, path: str, remove: Callable[[str], None]) -> None:
        """Removes a checkpoint file and its folder; if a thread is just writing them, as soon as they are written."""
        with self._lock:
            if path in self._removals:
                self._removals[path].append(partial(self.remove, path, remove))
            else:
                remove(path)
                files.remove_folder(path)

    def _save(self, checkpoint: dict[str, Any], path: Any, *args: Any, **kwargs: Any) -> None:
        save = checkpoint.get(files.KEY, {}).get("save")
        if save not in self.afterwards:
            self._write(checkpoint, path, *args, **kwargs)
            return
        afterwards = self.afterwards.pop(save)
        with self._lock:
            if not files.is_whole(path, save):
                return  # It was removed before its turn came.
            self._removals[path] = []
        before = files.fingerprint(path)
        # Lightning's own CheckpointIO moves the file from the system's temporary folder. If that is on another file
        # system, this copies over the old file, which is then neither the old nor the new one for a while.
        part = files.beside(path, save) if type(self._io).__name__ == "TorchCheckpointIO" else None
        try:
            self._write(checkpoint, part or path, *args, **kwargs)
            if part is not None:
                files.take_place(part, path)
        finally:
            with self._lock:
                removals = self._removals.pop(path)
        if files.fingerprint(path) != before:
            afterwards()
        for removal in removals:
            removal()


# Epochs


def begin_epochs_alike(trainer: Any, undo: ExitStack) -> None:
    """Patches the loops of a trainer; see [Note: epochs after a resume] and [Note: the rest of a batch]."""
    loop = trainer.fit_loop
    start, reset_epoch = loop.on_advance_start, loop.epoch_loop.reset

    def start_epoch() -> None:
        if loop.restarted_mid_epoch and _is_at_last_batch(loop.epoch_loop):
            loop.reset_restart_stage()
        start()

    replace(undo, loop, "reset", partial(_reset_fit, trainer, undo, loop.reset))
    replace(undo, loop, "on_advance_start", start_epoch)
    replace(undo, loop.epoch_loop, "reset", partial(_reset_epoch, trainer, reset_epoch))


def _is_at_last_batch(epoch_loop: Any) -> bool:
    return bool(epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch)


def _reset_fit(trainer: Any, undo: ExitStack, original: Callable[[], None]) -> None:
    """Resets the fit loop; a run that was saved after a batch or an epoch then begins with the rest of that."""
    loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    once = undo.enter_context(ExitStack())
    start, end = loop.on_advance_start, loop.on_advance_end

    def end_batch(data_fetcher: Any) -> None:
        # In the place of the first batch, so that Lightning goes on as after any batch.
        once.close()
        loop.epoch_loop.val_loop.restarting = False
        trainer.strategy.fit.finish_with_last_batch()

    def end_epoch_and_start() -> None:
        once.close()
        loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        start()

    def end_epoch() -> None:
        # As in a run that was not resumed: learning rates that depend on metrics are updated.
        loop._restarting = False
        end()

    def was_saved_in_a_hook_at_the_end(count: Any) -> bool:
        # The completion of the batch or the epoch is not counted yet.
        return bool(count.ready == count.started == count.processed == count.completed + 1)

    if trainer.strategy.fit.checkpointer.resumes_exactly:
        replace(undo, loop, "on_advance_end", end_epoch)
        if was_saved_in_a_hook_at_the_end(loop.epoch_progress.total):
            replace(once, loop, "on_advance_start", end_epoch_and_start)
            # The epoch is over: Lightning sees that where epochs bound the run, and not where steps do.
            loop._restarting = loop.epoch_loop.restarting = False
        ends = map(was_saved_in_a_hook_at_the_end, (progress.total, progress.current))
        if loop.epoch_loop.restarting and all(ends):
            progress.increment_completed()
            replace(once, loop.epoch_loop, "advance", end_batch)
    original()


def _reset_epoch(trainer: Any, original: Callable[[], None]) -> None:
    """Resets the epoch loop, and starts the next epoch if a run resumes from the last batch of one."""
    loop = trainer.fit_loop.epoch_loop
    ended = _is_at_last_batch(loop)
    original()
    if ended and loop.batch_progress.is_last_batch:
        for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
            progress.reset_on_run()
        loop.val_loop.batch_progress.total.reset()
    # Lightning has is_resuming from 2.5.3 on.
    resumed = getattr(trainer.fit_loop, "is_resuming", False) or loop.restarting
    if resumed and trainer.current_epoch > 0 and loop.batch_progress.current.ready == 0:
        iter(trainer.fit_loop._data_fetcher)


# Metrics

# The arguments of `self.log`: Lightning insists that they are the same in the next call.
_ARGUMENTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    "metric_attribute",
)
_SUMS = ("value", "cumulated_batch_size", "_forward_cache")


def metrics_state_dict(trainer: Any) -> dict[str, Any]:
    seen = trainer._logger_connector._callback_metrics if trainer.strategy.is_alone else trainer.callback_metrics
    epoch = trainer.fit_loop.epoch_progress.current
    results = trainer.fit_loop.epoch_loop._results if epoch.processed < epoch.started else {}
    return {
        "seen": _tensors(seen),
        "epoch": {key: _result_state(result) for key, result in results.items() if _is_restorable(result)},
    }


def load_metrics_state_dict(trainer: Any, state: dict[str, Any]) -> None:
    connector = trainer._logger_connector
    connector._callback_metrics.update(state["seen"])
    results = trainer.fit_loop.epoch_loop._results
    for key, saved in state["epoch"].items():
        results[key] = _restored_result(trainer, saved).to(trainer.strategy.root_device)
    if state["epoch"]:
        # Otherwise the next batch would clear the metrics, as the first batch of an epoch does.
        connector._first_loop_iter = False


def _tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items() if isinstance(value, Tensor)}


def _is_restorable(result: Any) -> bool:
    # A process group cannot be found again, nor can a metric that is not part of the module.
    can_be_found = result.is_tensor or result.meta.metric_attribute is not None
    return can_be_found and not result.has_reset and result.meta.sync.group is None


def _result_state(result: Any) -> dict[str, Any]:
    meta, reduction = result.meta, result.meta.reduce_fx.__name__
    return {
        "arguments": {name: getattr(meta, name) for name in _ARGUMENTS},
        "reduction": reduction,
        "of_torch": meta.reduce_fx is getattr(torch, reduction, None),
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "sums": _tensors({name: getattr(result, name, None) for name in _SUMS}),
        "metrics": None
        if result.is_tensor
        else {
            name: {"updates": part._update_count, "values": {key: getattr(part, key) for key in part._defaults}}
            for name, part in _parts(result.value)
        },
    }


def _restored_result(trainer: Any, saved: dict[str, Any]) -> Any:
    classes: Any = sys.modules[type(trainer.fit_loop.epoch_loop._results).__module__]
    reduction = getattr(torch if saved["of_torch"] else builtins, saved["reduction"])
    meta = classes._Metadata(**saved["arguments"], reduce_fx=reduction)
    meta.sync = classes._Sync(fn=trainer.strategy.reduce, **saved["sync"])
    result = classes._ResultMetric(meta, is_tensor=saved["metrics"] is None)
    if saved["metrics"] is not None:
        result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        for name, part in _parts(result.value):
            part._update_count = saved["metrics"][name]["updates"]
            for key, value in saved["metrics"][name]["values"].items():
                there = [each.to(part.device) for each in value] if isinstance(value, list) else value.to(part.device)
                setattr(part, key, there)
    for name, value in saved["sums"].items():
        setattr(result, name, value)
    result._update_count = 1
    return result


def _parts(metric: Metric) -> list[tuple[str, Metric]]:
    """Returns a metric and the metrics that it wraps, with their names."""
    return [(name, part) for name, part in metric.named_modules() if isinstance(part, Metric)]
