"""Saves a fit's checkpoints and resumes fits from them.

A checkpoint consists of an ordinary file with the outer model and a folder with each rank's state.

A checkpoint file is replaced atomically. The folders of earlier saves are removed afterwards.

[Note: late writers] `AsyncCheckpointIO` passes a checkpoint to a thread and returns immediately.
Until the thread has written the file, the path still holds an older file, whose folder must be
kept. Therefore, the CheckpointIO that writes the file also does all subsequent work, in the same
thread.

[Note: epochs after a resume] Lightning requests a new iterator from the loaders at the start of
every epoch except the first. After a resume, Lightning already has an iterator. This iterator was
created before the random state was restored from the checkpoint, and may start in the middle of the
data, where the loader was when it was saved. A torch loader draws a random number for each
iterator. Without this draw, all later random numbers, for example in dropout, would differ. In
addition, if a run resumes from the last batch of an epoch, Lightning continues with the next epoch
without counting it and without calling `on_train_epoch_start`, which finetuning callbacks need.

[Note: the rest of a batch] With `every_n_train_steps`, a checkpoint is saved after a batch but
before any other work that is due at that point, such as a validation, a metric-based learning rate
update, or the end of the epoch. Lightning skips this work when it resumes. However, the work may
draw random numbers, and early stopping and other checkpoints may depend on its results. Therefore,
a resumed run does this work first. Checkpoints that are saved in response to a signal are an
exception, because they are saved after the work. Learning rate updates are also repeated when a run
resumes from a checkpoint that was saved at the end of an epoch, which is the default for
`ModelCheckpoint`. With ``max_steps``, Lightning would train such an epoch again.

[Note: metrics after a resume] Lightning does not save metrics. As a result, the mean over a resumed
epoch would cover only the batches after the resume. Early stopping, checkpoints and learning rates
that depend on a metric would behave differently, or would fail if no value had been logged since
the resume. Therefore, every rank saves its own metrics: the values that callbacks read, and the
sums accumulated so far in the epoch.

[Note: what a rank gets back] Lightning saves only rank 0's states. However, ranks may differ in
schedulers that monitor a metric, callbacks, loops, loaders, data modules, and anything that a hook
adds to a checkpoint. Therefore, each rank also saves and restores the entries in which it differs
from rank 0; see [Note: entries of a rank]. These entries include the best models that
`ModelCheckpoint` has recorded, so a resumed run makes the same decisions as an uninterrupted run,
even if the monitored metric differs between ranks. Hyperparameters are not restored, because the
script defines them. When rounds restart, a rank gets the entries that the rank in the same position
saved, but the model comes from the file. If the number of groups or ranks has changed, the loops
are restored from the file as well.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from threading import Lock
from types import NoneType

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sdiloco.algorithm.config import Settings, read_settings
from lightning_sdiloco.engine import checkpoint as files
from lightning_sdiloco.engine.checkpoint import (
    own_state,
    take_up_entries,
    take_up_state,
    with_entries,
    write_common_file,
    write_ranks,
)
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.per_rank import Read
from lightning_sdiloco.engine.restart import Restart, restart_from
from lightning_sdiloco.engine.shards import clean_name
from lightning_sdiloco.lightning.evaluation import Averaging
from lightning_sdiloco.lightning.fit_state import SIGNALLED, FitState
from lightning_sdiloco.lightning.host import Forwarded, Function, Internal, State, Trainer, wrap
from lightning_sdiloco.lightning.model_format import Checkpoint, Load, reader_of

_log = logging.getLogger(__name__)

Write = Callable[[Checkpoint, str | Path], None]


class Checkpointer:
    def __init__(self, fit: FitState) -> None:
        self._fit = fit
        self._trainer = fit.trainer
        self._groups = fit.groups
        self._options = fit.options
        self._format = fit.format
        self.averaging: Averaging | None = None
        """The fit's weight averaging, once it has been set up."""
        self.resumed: State | None = None
        """The state that this rank saved, if the fit will resume exactly."""
        self.start = "a new run"
        """A description of the state from which the fit starts."""
        self._restart: Restart | None = None
        self._random_state: State | None = None
        # The checkpoints of this run that still exist, and whether the run itself saved each one.
        self._standing: dict[str, bool] = {}
        # See [Note: late writers]: the CheckpointIO that does the writing, the work that follows
        # once a saved file is in place, and pending removals of files that are still being written.
        self._io: Internal = None
        self._undo = ExitStack()
        self._afterwards: dict[str, Function] = {}
        self._lock = Lock()
        self._removals: dict[str, list[Function]] = {}

    # Resume

    def load(
        self, path: str | Path, load: Load, *args: Forwarded, **kwargs: Forwarded
    ) -> Checkpoint:
        checkpoint = self._format.read(self._trainer.strategy, path, load, *args, **kwargs)
        header = checkpoint.get(files.KEY)
        if self._trainer.state.fn != "fit":
            return checkpoint
        if header is None:
            self.start = (
                f"step {checkpoint.get('global_step')} of a checkpoint without worker groups"
            )
            return checkpoint
        arguments = inspect.signature(load).bind(path, *args, **kwargs)
        arguments.apply_defaults()
        # Lightning did not have this argument before 2.6.
        choices = {}
        if "weights_only" in arguments.arguments:
            choices["weights_only"] = arguments.arguments["weights_only"]
        read = reader_of(self._trainer.strategy.checkpoint_io.load_checkpoint, **choices)
        if self._options.restarts or header["layout"] != self._layout():
            self._load_for_restart(checkpoint, str(path), header, read)
        else:
            self._require_same_settings(header)
            self.resumed = files.read_rank(str(path), header, self._trainer.global_rank)
            self.start = files.start_of(header, self.resumed)
            self._standing[str(path)] = False
            self.resumed["engine"] = self._take_up(checkpoint, self.resumed, read)
        return checkpoint

    def resume(self, engine: StreamingDiLoCo) -> None:
        if self._restart is not None:
            self._restart.begin(engine.rounds, engine.history)
        if self.resumed is not None:
            engine.load_state_dict(self.resumed["engine"])
            self._fit.requests.done_at = dict(self.resumed["requests"])
            for bit in SIGNALLED:
                # Saving the checkpoint fulfilled the request.
                self._fit.requests.settle(bit)
            self._random_state = self.resumed["random"]
            load_metrics_state_dict(self._trainer, self.resumed["metrics"])
            if self.averaging is not None:
                self.averaging.load_state_dict(self.resumed["averaging"])
        if self._random_state is not None:
            files.set_random_state(self._random_state)
        self.forget()

    def forget(self) -> None:
        self.resumed = None
        self._restart = None
        self._random_state = None

    def make_trainable(self, model: nn.Module) -> None:
        """Unfreezes only the parameters that were trainable when the checkpoint was saved."""
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
        self,
        checkpoint: Checkpoint,
        saved: State,
        read: Read,
        without: Collection[str] = (),
    ) -> State:
        """Replaces rank 0's entries with those that this rank saved. Returns the engine's state."""
        self._take_up_optimizers(checkpoint, saved["optimizer_states"])
        return take_up_entries(saved, checkpoint, read, without)

    def _take_up_optimizers(self, checkpoint: Checkpoint, states: list[State]) -> None:
        checkpoint["optimizer_states"] = states
        if self._format.is_sharded:
            # Lightning restores these when it loads the file.
            for optimizer, state in zip(self._trainer.strategy.optimizers, states, strict=True):
                take_up_state(optimizer, state)

    def _require_same_settings(self, header: State) -> None:
        saved = header["settings"]
        self._options.restore(saved)
        differences = self._chosen().differences(saved, self._options.open)
        if differences:
            raise ValueError(
                "The checkpoint cannot be resumed exactly with different settings:"
                f" {'; '.join(differences)}. Resume with the settings of the checkpoint, or set"
                " resume='restart' to restart the rounds from its outer parameters."
            )

    def _load_for_restart(
        self, checkpoint: Checkpoint, path: str, header: State, read: Read
    ) -> None:
        """Restores the outer state, and the inner optimizer and random state if a file has them."""
        if not self._options.restarts:
            self._require_same_settings(header)
        # Restarted rounds are not the start of a run.
        self._options.chooses_dense = False
        self._restart = self._read_restart(path, header)
        self.start = "outer parameters of another run"
        layout = header["layout"]
        saved = self._read_place(path, header)
        if saved is None:
            # The optimizer has no state, but it has the learning rates from which schedulers
            # continue.
            groups = header.get("param_groups", [])
            states = [{"state": {}, "param_groups": group} for group in groups]
            if not states:
                states = [
                    {**state, "state": {}} for state in checkpoint.get("optimizer_states", [])
                ]
            self._take_up_optimizers(checkpoint, states)
        else:
            without = ["state_dict"]
            if layout != self._layout():
                without.append("loops")
            self._take_up(checkpoint, saved, read, without)
            if self._groups.topology.group_rank < layout["group_size"]:
                self._random_state = saved["random"]
        self._announce_restart(self._restart, header, is_fresh=saved is None)

    def _read_restart(self, path: str, header: State) -> Restart:
        """Reads the outer state on rank 0 for all groups, because ranks may see different files."""
        topology = self._groups.topology

        def read() -> Restart | None:
            if topology.rank:
                return None
            # Flights land as they would have in the saved run.
            saved = read_settings(header["settings"])
            settings = self._options.settings.taken_from(header["settings"])
            optimizer = settings.outer.described()["outer_optimizer"]
            is_same = saved.get("outer_optimizer") == optimizer
            return restart_from(files.read_groups(path, header), settings if is_same else None)

        first = topology.world.attempt(read)[0]
        if first.failure:
            if "ValueError" in first.failure:
                raise ValueError(first.text)
            raise ValueError(f"{path} cannot be read: {first.failure[0]}: {first.text}")
        return Restart.of(first.value)

    def _read_place(self, path: str, header: State) -> State | None:
        """Reads the state saved for this rank's position, or returns None if there is none."""
        topology = self._groups.topology
        mesh = dict(header["layout"])
        num_groups = mesh.pop("worker_groups")
        group_size = mesh.pop("group_size")
        if mesh != self._format.mesh or topology.group_index >= num_groups:
            return None
        shard = topology.group_rank if topology.group_rank < group_size else 0
        rank = topology.group_index * group_size + shard
        return files.read_rank(path, header, rank) if files.has_rank(path, header, rank) else None

    def _announce_restart(self, restart: Restart, header: State, is_fresh: bool) -> None:
        """Logs, on rank 0, how this run differs from the one that saved the checkpoint.

        All ranks must call this method.
        """
        topology = self._groups.topology
        fresh_ranks = topology.world.all_gather_object(is_fresh)
        fresh_groups = sorted(
            {rank // topology.group_size for rank, is_fresh in enumerate(fresh_ranks) if is_fresh}
        )
        differences = self._chosen().differences(header["settings"], self._options.open)
        if self._trainer.is_global_zero:
            _log.warning(
                "The checkpoint cannot be resumed exactly, because it was saved with %s, but this"
                " run has %s%s. Every group starts from the outer parameters and outer momentum of"
                " the checkpoint, and rounds restart. Number of flights lost so far: %d. Worker"
                " groups that start with a fresh inner optimizer: %s.",
                header["layout"],
                self._layout(),
                "".join(f"; {difference}" for difference in differences),
                restart.counts["flights_dropped"],
                ", ".join(map(str, fresh_groups)) or "none",
            )

    # Save

    def save(
        self, engine: StreamingDiLoCo, checkpoint: Checkpoint, path: str | Path, write: Write
    ) -> None:
        """Saves the state that all groups share, together with each rank's own state.

        All ranks must call this method.

        The steps are described in [Note: the order of a save].
        """
        topology = self._groups.topology
        path = str(path)
        state = self._state_of_rank(engine, checkpoint)
        if self._groups.is_alone:
            self._save_alone({**state, "engine": {**state["engine"], "extra_state": {}}}, path)
            return
        with self._groups.waiting(("trainer.save_checkpoint, which all ranks must call",), engine):
            state = with_entries(state, self._of_ranks(checkpoint), topology)
            saved = write_ranks(
                path, topology, state, self._layout(), self._settings(), self._advice
            )
        path = saved.path
        replaced: list[str] = []
        if self._options.resume.endswith(":newest"):
            replaced = [
                standing
                for standing, is_own in self._standing.items()
                if is_own and standing != path
            ]
        writes_single_file = self._trainer.is_global_zero and not self._format.in_folders

        def remove_older() -> None:
            files.remove_saves(path, saved.older)
            for replaced_path in replaced:
                files.remove_folder(replaced_path)

        def write_common() -> None:
            if writes_single_file:
                self._follow_writes()
                self._afterwards[saved.header["save"]] = remove_older
            write({**checkpoint, files.KEY: saved.header}, path)

        write_common_file(saved, topology, write_common, self._advice)
        if self._trainer.is_global_zero and self._format.in_folders:
            remove_older()
        self._standing.pop(path, None)
        self._standing[path] = True

    def _state_of_rank(self, engine: StreamingDiLoCo, checkpoint: Checkpoint) -> State:
        """Returns the state that this rank saves in a separate file."""
        optimizer_states = checkpoint["optimizer_states"]
        if self._format.is_sharded:
            optimizer_states = map(own_state, self._trainer.strategy.optimizers)
        return {
            "engine": engine.state_dict(),
            "requests": dict(self._fit.requests.done_at),
            "averaging": None if self.averaging is None else self.averaging.state_dict(),
            "random": files.random_state(),
            "optimizer_states": list(optimizer_states),
            "metrics": metrics_state_dict(self._trainer),
        }

    def _follow_writes(self) -> None:
        """Finds and patches the CheckpointIO that writes files; see [Note: late writers]."""
        if self._io is None:
            self._io = self._trainer.strategy.checkpoint_io
            while getattr(self._io, "checkpoint_io", None) is not None:
                self._io = self._io.checkpoint_io
            wrap(self._undo, self._io, "save_checkpoint", self._place)

    def _of_ranks(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the entries that may differ between ranks; see [Note: what a rank gets back]."""
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
            f"Resume from {self._last_standing}. Free some disk space, or keep fewer checkpoints by"
            " setting save_top_k in ModelCheckpoint and resume='exact:newest' in the strategy."
        )

    def _save_alone(self, state: State, path: str) -> None:
        try:
            name = files.write_rank(path, "exception", self._trainer.global_rank, state).name
        except OSError as error:
            files.discard(path, "exception")
            _log.warning(
                "After an exception, this rank could not save its state: %s. Resume from %s.",
                error,
                self._last_standing,
            )
            return
        _log.warning(
            "After an exception, this rank saved its own state in %s, next to %s. Training cannot"
            " resume from this state, because other ranks may be at a different step. Resume from"
            " %s.",
            name,
            path,
            self._last_standing,
        )

    @property
    def _last_standing(self) -> str:
        return next(
            reversed(self._standing), "a checkpoint of an earlier run, because this run saved none"
        )

    def remove(self, path: str | Path, remove: Function) -> None:
        """Removes a checkpoint and its folder once any pending write of the file has finished."""
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
        write: Function,
        checkpoint: Checkpoint,
        path: str | Path,
        *args: Forwarded,
        **kwargs: Forwarded,
    ) -> None:
        """Writes a checkpoint file, in any thread, and then does the rest of the save's work."""
        save = checkpoint.get(files.KEY, {}).get("save")
        if save not in self._afterwards:
            write(checkpoint, path, *args, **kwargs)
            return
        afterwards = self._afterwards.pop(save)
        place = str(path)
        with self._lock:
            if not files.is_whole(place, save):
                return  # The checkpoint was removed before it could be written.
            self._removals[place] = []
        before = files.fingerprint(place)
        # Lightning's own CheckpointIO moves the file from the system's temporary folder. If that
        # folder is on a different file system, the move becomes a copy over the old file, and the
        # file is incomplete for a while.
        part = files.beside(place, save) if type(self._io).__name__ == "TorchCheckpointIO" else None
        try:
            write(checkpoint, part or path, *args, **kwargs)
            if part is not None:
                files.take_place(part, place)
        finally:
            with self._lock:
                removals = self._removals.pop(place)
        if files.fingerprint(place) != before:
            afterwards()
        for removal in removals:
            removal()

    def close(self) -> None:
        self._undo.close()
        self._io = None

    # Settings and layout, which are compared

    def _settings(self) -> State:
        return self._chosen().saved(self._options.open)

    def _chosen(self) -> Settings:
        settings = self._options.settings
        # Settings that depend on the rounds are known once the rounds have been chosen.
        is_open = self._options.open
        return settings if is_open else settings.chosen_for(self._groups.topology.num_groups)

    def _layout(self) -> dict[str, int]:
        topology = self._groups.topology
        return {
            "worker_groups": topology.num_groups,
            "group_size": topology.group_size,
            **self._format.mesh,
        }


# Epochs


class ResumedLoops:
    """Makes a resumed trainer's loops run as they would in an uninterrupted run.

    The details are described in [Note: epochs after a resume] and [Note: the rest of a batch].
    """

    def __init__(self, trainer: Trainer, undo: ExitStack) -> None:
        self._trainer = trainer
        self._fit_loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._progress = trainer.fit_loop.epoch_loop.batch_progress
        self._undo = undo
        # Replacements that last until the rest of a batch or epoch has run.
        self._once = undo.enter_context(ExitStack())
        wrap(undo, self._fit_loop, "reset", self._reset_fit)
        wrap(undo, self._fit_loop, "on_advance_start", self._start_epoch)
        wrap(undo, self._epoch_loop, "reset", self._reset_epoch)

    def _reset_fit(self, reset: Function) -> None:
        """Starts a resumed run with the rest of the batch or epoch in which it was saved."""
        fit_loop = self._fit_loop
        progress = self._progress
        if self._trainer.strategy.fit.checkpointer.resumed is not None:
            wrap(self._undo, fit_loop, "on_advance_end", self._end_epoch)
            if _was_saved_before_completion(fit_loop.epoch_progress.total):
                wrap(self._once, fit_loop, "on_advance_start", self._end_epoch_and_start)
                # The epoch is over. Lightning notices this if the run is limited by epochs, but not
                # if it is limited by steps.
                fit_loop._restarting = False
                self._epoch_loop.restarting = False
            counts = (progress.total, progress.current)
            was_saved_after_batch = all(map(_was_saved_before_completion, counts))
            if self._epoch_loop.restarting and was_saved_after_batch:
                progress.increment_completed()
                wrap(self._once, self._epoch_loop, "advance", self._end_batch)
        reset()

    def _end_batch(self, advance: object, data_fetcher: object) -> None:
        # This replaces the first batch so that Lightning continues as it does after any other
        # batch.
        self._once.close()
        self._epoch_loop.val_loop.restarting = False
        self._trainer.strategy.fit.finish_with_last_batch()

    def _end_epoch_and_start(self, start: Function) -> None:
        self._once.close()
        self._epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        start()

    def _end_epoch(self, end: Function) -> None:
        # Learning rates that depend on metrics are updated, as they are in an uninterrupted run.
        self._fit_loop._restarting = False
        end()

    def _start_epoch(self, start: Function) -> None:
        if self._fit_loop.restarted_mid_epoch and self._is_at_last_batch():
            self._fit_loop.reset_restart_stage()
        start()

    def _reset_epoch(self, reset: Function) -> None:
        """Starts the next epoch if a run resumes after the last batch of an epoch."""
        epoch_loop = self._epoch_loop
        was_at_last_batch = self._is_at_last_batch()
        reset()
        if was_at_last_batch and self._progress.is_last_batch:
            self._progress.reset_on_run()
            epoch_loop.scheduler_progress.reset_on_run()
            epoch_loop.automatic_optimization.optim_progress.reset_on_run()
            epoch_loop.val_loop.batch_progress.total.reset()
        # Lightning has had is_resuming since 2.5.3.
        is_resuming = getattr(self._fit_loop, "is_resuming", False) or epoch_loop.restarting
        if is_resuming and self._trainer.current_epoch > 0 and self._progress.current.ready == 0:
            iter(self._fit_loop._data_fetcher)

    def _is_at_last_batch(self) -> bool:
        is_after_batch = self._epoch_loop.restarted_on_train_batch_end
        return bool(is_after_batch and self._progress.is_last_batch)


def _was_saved_before_completion(count: Internal) -> bool:
    """Returns whether a count was saved by a hook at the end of a batch or epoch."""
    return bool(count.ready == count.started == count.processed == count.completed + 1)


# Metrics

# Metric attributes that are saved even though they are not states.
_NOT_STATES = ("_update_count", "_forward_cache")


def metrics_state_dict(trainer: Trainer) -> State:
    """Returns the metrics that callbacks read and the sums accumulated in an unfinished epoch."""
    metrics = trainer._logger_connector._callback_metrics
    if not trainer.strategy.is_alone:
        metrics = trainer.callback_metrics
    epoch = trainer.fit_loop.epoch_progress.current
    logged = trainer.fit_loop.epoch_loop._results if epoch.processed < epoch.started else {}
    return {
        "seen": {
            name: _plain(metric) for name, metric in metrics.items() if isinstance(metric, Tensor)
        },
        "epoch": {key: _saved(metric) for key, metric in logged.items() if _can_be_saved(metric)},
    }


def _can_be_saved(logged: Internal) -> bool:
    """Returns whether a logged value can be saved and restored in a resumed fit."""
    # A resumed fit can find neither a process group nor a metric outside the module.
    is_found_again = logged.is_tensor or logged.meta.metric_attribute
    return not logged.has_reset and logged.meta.sync.group is None and bool(is_found_again)


def _saved(logged: Internal) -> State:
    """Converts an accumulated value to the form in which it is saved."""
    meta = logged.meta
    reduction = meta.reduce_fx.__name__
    module = "torch" if meta.reduce_fx is getattr(torch, reduction, None) else "builtins"
    parts = {}
    for name, part in _parts(logged).items():
        states = (*part._defaults, *_NOT_STATES)
        parts[name] = {state: _plain(getattr(part, state)) for state in states}
    return {
        # The arguments of `self.log`, which Lightning requires to be the same in the next call.
        "arguments": {
            name: argument
            for name, argument in vars(meta).items()
            if isinstance(argument, (str, bool, NoneType))
        },
        "reduction": f"{module}:{reduction}",
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": logged.is_tensor,
        "parts": parts,
    }


def load_metrics_state_dict(trainer: Trainer, state: State) -> None:
    """Restores metrics from a state that `metrics_state_dict` returned."""
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    classes = sys.modules[type(results).__module__]
    connector._callback_metrics.update(state["seen"])
    for key, saved in state["epoch"].items():
        meta = classes._Metadata(**saved["arguments"], reduce_fx=resolve_name(saved["reduction"]))
        meta.sync = classes._Sync(fn=trainer.strategy.reduce, **saved["sync"])
        logged = classes._ResultMetric(meta, is_tensor=saved["is_tensor"])
        results[key] = logged
        if not logged.is_tensor:
            logged.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        for name, part in _parts(logged).items():
            for state_name, value in saved["parts"][name].items():
                setattr(part, state_name, value)
            part.to(trainer.strategy.root_device)
    if state["epoch"]:
        # Otherwise, the next batch would clear the metrics, as the first batch of an epoch does.
        connector._first_loop_iter = False


def _parts(logged: Internal) -> dict[str, Metric]:
    """Returns Lightning's metric for a logged value, and any metrics that it wraps."""
    parts = {"": logged}
    if not logged.is_tensor:
        for name, module in logged.value.named_modules(prefix="value"):
            if isinstance(module, Metric):
                parts[name] = module
    return parts


def _plain(state: object) -> object:
    """Returns the savable part of a state: tensors, numbers, and lists of these."""
    if isinstance(state, list):
        return [_plain(part) for part in state]
    if isinstance(state, Tensor):
        return state.detach().clone()
    return state if isinstance(state, int) else None
