"""The register of what this package uses of Lightning beside its public API, and the one way to patch Lightning.

[Note: the register] Some promises to users rest on names that Lightning may change in any release: private ones, and
methods that are replaced for the time of a fit. Each stands in `REGISTER`, with what would happen without it.
`check_names` looks for all of them before a fit begins, so that no promise ends without a word, and `replace` replaces
nothing that is not in the register. A test compares the register with the source; another misses one at each place.
"""

import importlib
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial, reduce
from types import ModuleType
from typing import Any, Literal

_log = logging.getLogger(__name__)

OLDEST, NEWEST = "2.5.0", "2.6.6"
"""The first and the last version of Lightning that the tests have passed with."""

Use = Literal["used", "patched", "overridden", "set"]


@dataclass(frozen=True)
class HostName:
    place: str
    name: str
    use: Use
    without: str
    optional: bool = False
    first: str = OLDEST

    def __str__(self) -> str:
        return f"{self.place}.{self.name}"

    def is_expected_in(self, version: str) -> bool:
        """Returns whether a version should have it: one that is newer than all that were tried should."""
        own, first = (tuple(map(int, re.findall(r"\d+", text)[:3])) for text in (version, self.first))
        return own >= first


# What several names have in common.
_SIGNALS = "a signal ends one rank while the others wait for it"
_SAME_END = "the ranks do not end a fit at the same point after a signal, and it cannot be resumed exactly"
_UNEVEN = "worker groups with unequal numbers of batches wait for each other in vain"
_IDLE = "a worker group that waits for the others with idle batches does not count them as the others do"
_PACED = "all worker groups train on the same data where a loader yields None on purpose"
_EPOCHS = "the first epoch after a resume is not the one of a fit that was never interrupted"
_METRICS = "an epoch that is resumed ends with the metrics of its last batches alone"
_TIME = "a Timer makes all worker groups wait for each other after every batch"
_AVERAGES = "every worker group ends with an average of its own local weights"
_GROUPS = "DistributedDataParallel reduces gradients over all worker groups"
_MESH = "configure_model gets no device mesh of its worker group"
_STARTED = "processes are started in another way than start_method says"
_SIMULATED = "sdiloco simulate does not run"
_BY_CLOCK = "validation that goes by the clock is not refused, and worker groups wait for each other in it"
_VALIDATED = "worker groups do not validate after the same batch"
_SHOWN = "validation sees the local model of each worker group, and callbacks that swap weights in it break training"
_COMPUTED = "a metric that is computed in a batch waits for all worker groups"
_BROADCAST = "all worker groups may wait for each other before every batch"
_SAVED_BY_TIME = "a train_time_interval of a checkpoint makes all worker groups wait for each other after every batch"

_CONNECTOR = "trainer._signal_connector"
_FIT_LOOP = "trainer.fit_loop"
_EPOCH_LOOP = "trainer.fit_loop.epoch_loop"
_MODULE = "trainer.lightning_module"
_STRATEGY = "trainer.strategy"
_RESULT = "lightning.pytorch.trainer.connectors.logger_connector.result"

FABRIC = "Fabric's DDPStrategy"
"""Stands for the base class of Fabric's strategy, which has the name of another class."""

_TOPS = ("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics")


def _at(place: str, use: Use, without: str, *names: str, optional: bool = False, first: str = OLDEST) -> list[HostName]:
    return [HostName(place, name, use, without, optional, first) for name in names]


REGISTER = (
    # Trainer and LightningModule
    *_at("trainer", "used", _SIGNALS, "_signal_connector"),
    *_at("trainer", "used", _METRICS, "_logger_connector"),
    *_at("trainer", "used", _PACED, "_data_connector"),
    *_at("trainer._data_connector", "used", _PACED, "_prepare_dataloader"),
    *_at("trainer", "used", "sdiloco simulate tells no validation", "_results", optional=True),
    *_at("trainer", "used", _BY_CLOCK, "_val_check_time_interval", optional=True, first="2.6.0"),
    *_at("trainer", "patched", "a checkpoint before the first landing holds one group's values", "save_checkpoint"),
    *_at(_MODULE, "used", "the strategy cannot attach its callback, which makes the inner steps", "_trainer"),
    *_at(_MODULE, "used", "what is logged in a batch is reduced over all worker groups", "_current_fx_name"),
    *_at(_MODULE, "set", _MESH, "_device_mesh"),
    *_at(_MODULE, "patched", "a resumed fit adds the gradients of its first step in another order", "forward"),
    *_at(_MODULE, "patched", _SIMULATED, "log", "log_dict"),
    # Signals
    *_at(_CONNECTOR, "patched", _SIGNALS, "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"),
    *_at(_EPOCH_LOOP, "patched", _BROADCAST, "_broadcast_sigterm_tensor", optional=True, first="2.5.2"),
    *_at(_EPOCH_LOOP, "patched", _SAME_END, "on_advance_end"),
    *_at(_EPOCH_LOOP, "used", _SAME_END, "_is_training_done"),
    *_at(_FIT_LOOP, "patched", _SAME_END, "on_advance_end"),
    # Batches and epochs
    *_at(_FIT_LOOP, "patched", _UNEVEN, "setup_data"),
    *_at(_FIT_LOOP, "patched", "the state of a loader is saved a batch ahead of training", "on_save_checkpoint"),
    *_at(_FIT_LOOP, "used", _UNEVEN, "_data_fetcher", "_combined_loader"),
    *_at("lightning.pytorch.loops.fetchers", "used", _UNEVEN, "_DataLoaderIterDataFetcher"),
    *_at("lightning.pytorch.loops.fetchers._PrefetchDataFetcher", "used", _UNEVEN, "_start_profiler", "_stop_profiler"),
    *_at(_STRATEGY, "patched", _UNEVEN, "reduce", "barrier"),
    *_at(_EPOCH_LOOP, "used", "worker groups do not end an epoch together", "_num_ready_batches_reached"),
    *_at(_EPOCH_LOOP, "patched", _VALIDATED, "_should_check_val_fx"),
    *_at(_EPOCH_LOOP, "used", _VALIDATED, "_should_check_val_epoch"),
    *_at(_EPOCH_LOOP, "used", _IDLE, "_should_accumulate", "_warning_cache"),
    *_at(f"{_EPOCH_LOOP}.val_loop", "patched", _SHOWN, "run", "on_run_start"),
    *_at("trainer.validate_loop", "patched", _SHOWN, "run", "on_run_start"),
    *_at("trainer.test_loop", "patched", _SHOWN, "run", "on_run_start"),
    *_at("trainer.predict_loop", "patched", _SHOWN, "run", "on_run_start"),
    *_at(_FIT_LOOP, "patched", _EPOCHS, "reset", "on_advance_start"),
    *_at(_FIT_LOOP, "used", _EPOCHS, "_restarting", "restarted_mid_epoch", "reset_restart_stage"),
    *_at(_FIT_LOOP, "used", _EPOCHS, "is_resuming", optional=True, first="2.5.3"),
    *_at(_EPOCH_LOOP, "patched", _EPOCHS, "reset", "advance"),
    *_at(_EPOCH_LOOP, "used", _EPOCHS, "restarted_on_train_batch_end"),
    # Metrics
    *_at(_EPOCH_LOOP, "used", "landings are logged at other steps than the user's own", "_batches_that_stepped"),
    *_at(_EPOCH_LOOP, "used", _METRICS, "_results"),
    *_at(_EPOCH_LOOP, "patched", "learning rates on a plateau differ between worker groups", "_get_monitor_value"),
    *_at("trainer._logger_connector", "used", _METRICS, "_callback_metrics", "_first_loop_iter"),
    *_at(_RESULT, "used", _METRICS, "_Metadata", "_ResultMetric", "_Sync"),
    *_at(f"{_RESULT}._Sync", "used", _METRICS, "_should"),
    *_at("torchmetrics.SumMetric", "used", _METRICS, "_forward_cache", "_update_count", "_defaults"),
    *_at("torchmetrics.metric", "patched", _COMPUTED, "gather_all_tensors"),
    # Callbacks
    *_at("ModelCheckpoint", "patched", "worker groups save at different steps", "on_train_batch_end"),
    *_at("ModelCheckpoint", "used", _SAVED_BY_TIME, "_train_time_interval"),
    *_at("ModelCheckpoint", "patched", "every rank keeps other checkpoints as the best", "_monitor_candidates"),
    *_at("ModelCheckpoint", "patched", "a rank that fails links to a file that is not", "_save_last_checkpoint"),
    *_at("Timer", "patched", _TIME, "_check_time_remaining"),
    *_at("Timer", "used", _TIME, "_duration"),
    *_at("ProgressBar", "patched", "the progress bar shows no outer step", "get_metrics", optional=True),
    *_at("WeightAveraging", "used", _AVERAGES, "_average_model", "_latest_update_step", first="2.6.0"),
    *_at("WeightAveraging", "patched", _AVERAGES, "should_update", "on_train_batch_end", first="2.6.0"),
    *_at("WeightAveraging", "patched", _AVERAGES, "on_train_epoch_end", "on_train_end", first="2.6.0"),
    *_at("WeightAveraging", "patched", "checkpoints hold untrained weights", "on_save_checkpoint", first="2.6.0"),
    *_at("StochasticWeightAveraging", "used", _AVERAGES, "_average_model"),
    *_at("StochasticWeightAveraging", "patched", _AVERAGES, "on_train_epoch_start"),
    # Strategies and launchers
    *_at(_STRATEGY, "overridden", "worker groups of unequal size are not refused at once", "_configure_launcher"),
    *_at(_STRATEGY, "set", _STARTED, "_launcher"),
    *_at("CheckpointIO", "patched", "folders beside checkpoints are removed too early", "save_checkpoint"),
    *_at("DDPStrategy", "overridden", _GROUPS, "_setup_model"),
    *_at("DDPStrategy", "overridden", _SIMULATED, "_register_ddp_hooks", optional=True),
    *_at("DDPStrategy", "used", _GROUPS, "_ddp_kwargs", "_ddp_comm_hook", "_ddp_comm_state"),
    *_at("DDPStrategy", "used", _STARTED, "_start_method"),
    *_at("ModelParallelStrategy", "used", "the processes are not connected", "_setup_distributed"),
    *_at("ModelParallelStrategy", "set", _MESH, "_device_mesh"),
    *_at("lightning.pytorch.strategies.launchers", "used", _STARTED, "_MultiProcessingLauncher"),
    *_at("_MultiProcessingLauncher", "overridden", "a terminated process goes unnoticed", "_wrapping_function"),
    *_at("_MultiProcessingLauncher", "used", "processes of a forkserver share their parameters", "_start_method"),
    *_at("_MultiProcessingLauncher", "used", "a terminated process goes unnoticed", "_strategy"),
    *_at(FABRIC, "overridden", "worker groups of unequal size are not refused at once", "_configure_launcher"),
    *_at(FABRIC, "used", _GROUPS, "_ddp_kwargs"),
    *_at(FABRIC, "used", "ranks of several nodes cannot meet before they are connected", "_set_world_ranks"),
    # The command line, which `sdiloco simulate` uses
    *_at("LightningCLI", "used", _SIMULATED, "_get"),
    *_at("LightningCLI", "overridden", "sdiloco simulate trains where it should only read", "_run_subcommand"),
)


def check_names(trainer: Any) -> None:
    """Looks for all names of the register that a fit of this trainer may need; see [Note: the register]."""
    version = str(importlib.import_module(_distribution_of(trainer)).__version__)
    expected = [entry for entry in REGISTER if entry.is_expected_in(version)]
    missing = [entry for entry in expected if not all(_has(host, entry) for host in _hosts(entry.place, trainer))]
    _require(missing, f", {version},", warns=trainer.is_global_zero)


def check_without_trainer(host: Any, place: str = "") -> None:
    """Looks for the names of the register in a class, or in an object that stands for a place."""
    places = {place} if place else class_names(host)
    _require([entry for entry in REGISTER if entry.place in places and not _has(host, entry)])


def _require(missing: list[HostName], version: str = "", warns: bool = False) -> None:
    needed = [entry for entry in missing if not entry.optional]
    told = (
        f"This version of Lightning{version} lacks what worker groups rest on:"
        f" {'; '.join(f'without {entry} {entry.without}' for entry in needed or missing)}. lightning-sdiloco was tried"
        f" with Lightning {OLDEST} to {NEWEST}."
    )
    if needed:
        raise ValueError(f"{told} Install one of these, or a newer version of lightning-sdiloco.")
    if missing and warns:
        _log.warning("%s Training goes on without.", told)


def replace(undo: ExitStack, target: Any, name: str, value: Any) -> None:
    """Replaces an attribute of one of Lightning's objects."""
    entry = next((entry for entry in REGISTER if entry.name == name and entry.use == "patched"), None)
    assert entry is not None, f"{name} is not in the register of {__name__} as patched"
    if not hasattr(target, name):
        _require([entry])
        return
    if name in vars(target):
        undo.callback(setattr, target, name, vars(target)[name])
    else:
        undo.callback(vars(target).pop, name, None)
    setattr(target, name, value if isinstance(target, (type, ModuleType)) else _Replacement(target, name, value))


class _Replacement(partial[Any]):
    """A function in the place of a method, of which copies and pickles of the object have the method itself."""

    replaced: tuple[Any, str]

    def __new__(cls, target: Any, name: str, value: Any) -> "_Replacement":
        replacement = super().__new__(cls, value)
        replacement.replaced = target, name
        return replacement

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        # As for a bound method. The copy has no attributes of its own yet when this is called for it.
        return getattr, self.replaced


# Where names are looked for


def _hosts(place: str, trainer: Any) -> Iterator[Any]:
    """Yields the objects at a place: none where the trainer has nothing of the kind."""
    top, *path = place.split(".")
    if top == "trainer":
        # The private names on the way are in the register themselves.
        with suppress(AttributeError):
            yield reduce(getattr, path, trainer)
    elif path:
        yield _imported(place.replace("lightning.pytorch", _distribution_of(trainer)))
    else:
        strategy = trainer.strategy
        parts = *trainer.callbacks, strategy, strategy.launcher, strategy.checkpoint_io
        yield from (host for host in parts if place in class_names(type(host)))


@cache
def _imported(place: str) -> Any:
    """Returns a module, or an object of a class, as ``__init__`` makes it; None if there is no such class."""
    module, _, name = place.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found() if isinstance(found, type) else found


def _distribution_of(trainer: Any) -> str:
    return next(
        kind.__module__.removesuffix(".trainer.trainer") for kind in type(trainer).__mro__ if _is_of_lightning(kind)
    )


def _has(host: Any, entry: HostName) -> bool:
    """Returns whether an object of Lightning has a name by itself, and not because a subclass of ours has it."""
    name, is_class = entry.name, isinstance(host, type)
    own: Mapping[str, Any] = {} if is_class else getattr(host, "__dict__", {})
    if entry.use == "set":
        # Whatever is set is there. What counts is that Lightning shows it.
        return own.get(name) is None or getattr(host, name.removeprefix("_"), None) is own[name]
    kinds = (host if is_class else type(host)).__mro__
    return name in own or any(name in vars(kind) for kind in kinds if _is_of_lightning(kind))


def _is_of_lightning(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _TOPS


def class_names(kind: type) -> set[str]:
    """Returns the names of the classes of Lightning that a class inherits from. Others may have the same names."""
    return {base.__name__ for base in kind.__mro__ if _is_of_lightning(base)}
