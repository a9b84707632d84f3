"""Registers the Lightning internals that this package uses, and patches them.

[Note: the register] Some promises to users depend on names that Lightning may change in any
release, such as private names and methods that are replaced during a fit. All these names are in
`REGISTER`. Before a fit begins, `check_names` looks up all registered names so that no promise is
broken silently. `wrap` refuses to replace a name that is not in the register. One test compares the
register with the source code, and another removes a name at each place.

[Note: recognised by name] Callbacks are recognised by the names of Lightning's classes rather than
with `isinstance`. The two distributions have different classes, only one distribution may be
installed, and older versions lack some classes.
"""

import importlib
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial, reduce
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_sdiloco.registration import variants

_log = logging.getLogger(__name__)

Function = Callable[..., Any]
"""A function from Lightning or from the user that takes any arguments."""

State = dict[str, Any]
"""The saved state of an object."""

Forwarded = Any
"""An argument from Lightning that is passed on unchanged."""

Batch = Any
"""The items that a user's data loader yields."""

Host = Any
"""A strategy of this package with its Lightning base class."""

Internal = Any
"""A Lightning object whose class depends on the version or distribution."""

Trainer = Any
"""A Trainer of either distribution. Lightning declares few attributes, not even callbacks."""

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as LightningModule
else:
    # From either distribution; neither may be imported here.
    LightningModule = object

_RESULT = "lightning.pytorch.trainer.connectors.logger_connector.result"

OLDEST = "2.5.0"
NEWEST = "2.6.6"
"""The newest version of Lightning with which the tests have passed."""

FABRIC = "Fabric's DDPStrategy"
"""A label for the Fabric strategy's base class, whose own name also belongs to another class."""


class HostName(NamedTuple):
    place: str
    name: str
    first: str = OLDEST
    without: str = ""
    """What happens if an optional name is missing, or an empty string for a required name."""

    def __str__(self) -> str:
        return f"{self.place}.{self.name}"

    def is_expected_in(self, version: str) -> bool:
        """Returns whether a version of Lightning should have the name."""
        return _numbers_of(version) >= _numbers_of(self.first)


def _numbers_of(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


_TOPS = ("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics")

# Names that are used, patched, overridden or set, by place, with the features that need them.
_NEEDED = {
    # Starting and saving a fit, its loaders, and the hook that is running.
    "trainer": (
        "_signal_connector _logger_connector _data_connector save_checkpoint _default_root_dir"
    ),
    "trainer.lightning_module": "_trainer _current_fx_name _device_mesh forward log log_dict",
    "trainer._data_connector": "_prepare_dataloader",
    # After a signal, all ranks end at the same point, from which the fit resumes exactly.
    "trainer._signal_connector": "_sigterm_notifier_fn _slurm_sigusr_handler_fn",
    # Epochs of unequal lengths end together, even after a resume, and all groups validate after the
    # same batch.
    "trainer.fit_loop": (
        "setup_data reset on_advance_start on_advance_end on_save_checkpoint _data_fetcher"
        " _combined_loader _restarting restarted_mid_epoch reset_restart_stage"
    ),
    "trainer.fit_loop.epoch_loop": (
        "reset advance on_advance_end restarted_on_train_batch_end _is_training_done _warning_cache"
        " _num_ready_batches_reached _should_accumulate _should_check_val_fx"
        " _should_check_val_epoch _batches_that_stepped _results _get_monitor_value"
    ),
    "lightning.pytorch.loops.fetchers": "_DataLoaderIterDataFetcher",
    "lightning.pytorch.loops.fetchers._PrefetchDataFetcher": "_start_profiler _stop_profiler",
    # Validation sees the chosen model.
    "trainer.fit_loop.epoch_loop.val_loop": "run",
    "trainer.validate_loop": "run",
    "trainer.test_loop": "run",
    "trainer.predict_loop": "run",
    # A resumed epoch includes its first batches' metrics, and computing a metric in a batch does
    # not wait for other groups.
    "trainer._logger_connector": "_callback_metrics _first_loop_iter log_metrics",
    _RESULT: "_Metadata _ResultMetric _Sync",
    f"{_RESULT}._Sync": "_should",
    "torchmetrics.SumMetric": "_forward_cache _update_count _defaults",
    "torchmetrics.metric": "gather_all_tensors",
    # All groups save and stop together, and no batch waits for other groups.
    "ModelCheckpoint": (
        "on_train_batch_end _train_time_interval _monitor_candidates _save_last_checkpoint"
    ),
    "Timer": "_check_time_remaining _duration",
    "CheckpointIO": "save_checkpoint load_checkpoint",
    # Averages use outer parameters.
    "StochasticWeightAveraging": "_average_model on_train_epoch_start",
    # The ranks start, connect, and reduce gradients within their worker group.
    "trainer.strategy": "_configure_launcher _launcher reduce barrier",
    "DDPStrategy": "_setup_model _ddp_kwargs _ddp_comm_hook _ddp_comm_state _start_method",
    "ModelParallelStrategy": "_setup_distributed _device_mesh",
    "trainer.strategy.launcher": "launch",
    "lightning.pytorch.strategies.launchers": "_MultiProcessingLauncher",
    "_MultiProcessingLauncher": "_wrapping_function _start_method _strategy",
    FABRIC: "_configure_launcher _ddp_kwargs _set_world_ranks",
    # `sdiloco simulate` reads a command line's configuration.
    "LightningCLI": "_get _run_subcommand",
}

_SET = ("_launcher", "_device_mesh")
"""Names that this package itself sets, so they always exist.

The corresponding public names show whether Lightning uses them.
"""

_WEIGHT_AVERAGING = (
    "_average_model _latest_update_step should_update on_train_batch_end on_train_epoch_end"
    " on_train_end on_save_checkpoint"
)

_OWN_LOGS = "hosts that are sites write into the same log folder"

REGISTER = (
    *(HostName(place, name) for place, names in _NEEDED.items() for name in names.split()),
    *(HostName("WeightAveraging", name, "2.6.0") for name in _WEIGHT_AVERAGING.split()),
    HostName("trainer", "_results", without="sdiloco simulate shows no validation"),
    HostName(
        "trainer", "_val_check_time_interval", "2.6.0", "validation by the clock is not refused"
    ),
    HostName(
        "trainer.fit_loop", "is_resuming", "2.5.3", "the epoch after a resume may not be exact"
    ),
    HostName(
        "trainer.fit_loop.epoch_loop",
        "_broadcast_sigterm_tensor",
        "2.5.2",
        "worker groups may wait in batches",
    ),
    HostName("CSVLogger", "_root_dir", without=_OWN_LOGS),
    HostName("CSVLogger", "_save_dir", without=_OWN_LOGS),
    HostName("ProgressBar", "get_metrics", without="the progress bar shows no outer step"),
    HostName("DDPStrategy", "_register_ddp_hooks", without="sdiloco simulate does not run"),
)


def check_names(trainer: Trainer) -> None:
    """Checks all registered names that a fit may need; see [Note: the register]."""
    version = str(importlib.import_module(_distribution_of(trainer)).__version__)
    expected = [entry for entry in REGISTER if entry.is_expected_in(version)]
    missing = [
        entry
        for entry in expected
        if not all(_has(host, entry) for host in _hosts(entry.place, trainer))
    ]
    _require(missing, f", {version},", warns=trainer.is_global_zero)


def check_without_trainer(host: Internal, place: str = "") -> None:
    """Checks the registered names of a class or of an object that represents a place."""
    places = {place} if place else class_names(host)
    _require([entry for entry in REGISTER if entry.place in places and not _has(host, entry)])


def _require(missing: list[HostName], version: str = "", warns: bool = False) -> None:
    needed = [str(entry) for entry in missing if not entry.without]
    lacks = needed or [f"{entry}, without which {entry.without}" for entry in missing]
    text = (
        f"This version of Lightning{version} lacks names that worker groups need:"
        f" {'; '.join(lacks)}. lightning-sdiloco was tested with Lightning {OLDEST} to {NEWEST}."
    )
    if needed:
        raise ValueError(
            f"{text} Install one of these versions, or a newer version of lightning-sdiloco."
        )
    if missing and warns:
        _log.warning("%s Training continues without.", text)


def wrap(undo: ExitStack, target: object, name: str, around: Function) -> None:
    """Replaces a Lightning function with a function whose first argument is the original."""
    entry = next((entry for entry in REGISTER if entry.name == name), None)
    assert entry is not None, f"{name} is not in the register of {__name__}"
    if not hasattr(target, name):
        _require([entry])
        return
    original = getattr(target, name)
    attributes = vars(target)
    if name in attributes:
        undo.callback(setattr, target, name, attributes[name])
    else:
        undo.callback(attributes.pop, name, None)
    if isinstance(target, (type, ModuleType)):
        setattr(target, name, lambda *args, **kwargs: around(original, *args, **kwargs))
    else:
        setattr(target, name, _Replacement(target, name, around, original))


class _Replacement(partial[object]):
    """A replacement for a method. Copies and pickles of the object do not include it."""

    replaced: tuple[object, str]

    def __new__(
        cls, target: object, name: str, around: Function, original: Function
    ) -> "_Replacement":
        replacement = super().__new__(cls, around, original)
        replacement.replaced = target, name
        return replacement

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        # The same as for a bound method. The copy has no attributes yet when this is called for it.
        return getattr, self.replaced


# The objects in which names are looked up


def _hosts(place: str, trainer: Trainer) -> Iterator[object]:
    """Yields the trainer's objects at a registered place."""
    top, *path = place.split(".")
    if top == "trainer":
        # The private names along the path are themselves in the register.
        with suppress(AttributeError):
            host = reduce(getattr, path, trainer)
            # Simulated processes have no launcher.
            if host is not None:
                yield host
    elif path:
        yield _imported(place.replace("lightning.pytorch", _distribution_of(trainer)))
    else:
        strategy = trainer.strategy
        parts = [*trainer.callbacks, *trainer.loggers, strategy, strategy.launcher]
        parts.append(strategy.checkpoint_io)
        yield from (host for host in parts if place in class_names(type(host)))


@cache
def _imported(place: str) -> object:
    """Returns a module or an instance of a class, or None if neither exists."""
    module, _, name = place.rpartition(".")
    try:
        host = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return host() if isinstance(host, type) else host


def _distribution_of(trainer: Trainer) -> str:
    modules = [kind.__module__ for kind in type(trainer).__mro__]
    return next(module for module in modules if is_of_lightning(module)).removesuffix(
        ".trainer.trainer"
    )


def _has(host: Internal, entry: HostName) -> bool:
    """Returns whether Lightning itself, and not only our subclass, defines a name."""
    name = entry.name
    is_class = isinstance(host, type)
    attributes: Mapping[str, object] = {} if is_class else getattr(host, "__dict__", {})
    if name in _SET:
        attribute = attributes.get(name)
        return attribute is None or getattr(host, name.removeprefix("_"), None) is attribute
    kinds = (host if is_class else type(host)).__mro__
    return name in attributes or any(
        name in vars(kind) for kind in kinds if is_of_lightning(kind.__module__)
    )


def is_of_lightning(module: str) -> bool:
    """Returns whether a module name belongs to Lightning."""
    return module.partition(".")[0] in _TOPS


def class_names(kind: type) -> set[str]:
    """Returns the names of the Lightning classes that a class inherits from.

    Other classes may have the same names.
    """
    return {base.__name__ for base in kind.__mro__ if is_of_lightning(base.__module__)}


_OURS = __name__.partition(".")[0]


def user_hooks(trainer: Trainer, names: Collection[str]) -> list[str]:
    """Returns the hooks that the user's module and callbacks define, as ``Class.hook``."""
    hooks = dict[str, None]()
    for owner in (trainer.lightning_module, *trainer.callbacks):
        # A LambdaCallback stores its hooks as attributes of the object.
        members = set(vars(owner))
        for kind in type(owner).__mro__:
            if not is_of_lightning(kind.__module__) and not kind.__module__.startswith(_OURS):
                members |= vars(kind).keys()
        hooks |= {f"{type(owner).__name__}.{name}": None for name in names if name in members}
    return list(hooks)


# Refused trainers: those that would leave worker groups with different models or waiting for each
# other forever

_UNUSED = "Expected to have finished reduction in the prior iteration"
# The precisions of Lightning's ModelParallelStrategy.
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")

_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
# The reasons why a callback cannot work, by class.
_WITH_GROUPS = {
    "ModelPruning": (
        "prunes weights based on each worker group's local values, so every group would prune"
        " different weights. Prune the outer model after training with torch.nn.utils.prune."
    ),
    "SpikeDetection": (
        "checks for spikes on all ranks after every batch, so every worker group would wait for the"
        " slowest group in every step. Remove the callback. Groups with non-finite values are"
        " excluded from the mean anyway."
    ),
}
_WITH_SHARDS = {
    **dict.fromkeys(
        _AVERAGING,
        "copies the whole model, but every rank has only a part of the model. Remove the callback."
        " The outer model, which is used for validation and checkpoints, is already an average.",
    ),
    "BaseFinetuning": (
        "unfreezes layers between epochs, which does not work with sharded parameters. Freeze the"
        " layers in configure_model instead, and split training into multiple fits."
    ),
}
_ON_A_ROUTE = dict.fromkeys(
    _AVERAGING,
    "averages outer parameters over time, but on this route each worker group has different outer"
    " parameters, so every group would end up with a different average. Remove the callback, or"
    " omit route.",
)


def refuse_unsupported(trainer: Trainer, shares: bool, is_sharded: bool) -> None:
    """Refuses setups that do not work with worker groups, a route, or a sharded model."""
    precision = trainer.strategy.precision_plugin.precision
    if is_sharded and precision not in _PRECISIONS:
        raise ValueError(
            f"precision={precision!r} does not work with sharded models in Lightning. Choose one of"
            f" {', '.join(map(repr, _PRECISIONS))}."
        )
    # Lightning did not have this kind of validation before 2.6.
    seconds = getattr(trainer, "_val_check_time_interval", None)
    if seconds is not None:
        raise ValueError(
            f"val_check_interval is a time ({seconds:g} s). Each rank would use its own clock,"
            " validate after a different batch, and wait for the other ranks. Set"
            " val_check_interval to a number of batches, or to a fraction of the epoch."
        )
    averaging = _averaging_callbacks(trainer)
    if len(averaging) > 1:
        names = ", ".join(type(callback).__name__ for callback in averaging)
        raise ValueError(
            f"Several callbacks average weights: {names}. A checkpoint and the final module can"
            " each contain only one average. Keep only one of the callbacks."
        )
    reasons = dict(_WITH_GROUPS)
    if not shares:
        reasons |= _ON_A_ROUTE
    if is_sharded:
        reasons |= _WITH_SHARDS
    for callback in trainer.callbacks:
        for name in class_names(type(callback)) & reasons.keys():
            raise ValueError(f"{type(callback).__name__} {reasons[name]}")
    for callback in averaging:
        _refuse_batch_norm(callback, trainer)


def _averaging_callbacks(trainer: Trainer) -> list[object]:
    return [
        callback
        for callback in trainer.callbacks
        if class_names(type(callback)).intersection(_AVERAGING)
    ]


def _refuse_batch_norm(averaging: object, trainer: Trainer) -> None:
    """Refuses StochasticWeightAveraging for a model with BatchNorm."""
    contains_batch_norm = getattr(averaging, "pl_module_contains_batch_norm", None)
    if contains_batch_norm is None or trainer.max_epochs == -1:
        return
    if contains_batch_norm(trainer.lightning_module):
        raise ValueError(
            f"{type(averaging).__name__} does not work with a model that has BatchNorm layers. The"
            " callback adds an epoch in which every worker group recomputes the statistics from its"
            " own data alone, so every group would end up with a different model. Use"
            " WeightAveraging or EMAWeightAveraging, which also average the statistics."
        )


def may_write_at_end(trainer: Trainer) -> bool:
    """Returns whether a hook or an averaging callback may change the model at the end."""
    return bool(_averaging_callbacks(trainer) or user_hooks(trainer, ["on_train_end"]))


def refuse_in_notebook(host: Host) -> None:
    """Refuses to start processes in a notebook by rerunning a script.

    Otherwise, Lightning would recommend DDP.
    """
    # Lightning decides in the same way.
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    launcher = host.launcher
    if not is_interactive or launcher is None or launcher.is_interactive_compatible:
        return
    advice = "Run your code as a script."
    name = "_".join((host.strategy_name, "notebook"))
    if name in variants(host.strategy_name):
        advice = f"Set strategy={name!r}, or pass start_method='fork' to the strategy."
    raise ValueError(
        f"strategy={host.strategy_name!r} cannot start its processes from a notebook or an"
        f" interactive interpreter, which has no script to run. {advice}"
    )


def advise_on_unused(exception: BaseException, name: str) -> None:
    """Replaces torch's message about unused parameters before Lightning recommends DDP."""
    advice = (
        "It looks like your LightningModule has parameters that were not used in producing the loss"
        " returned by training_step. If this is intentional, make DistributedDataParallel look for"
        f" unused parameters in every step: set strategy='{name}_find_unused_parameters_true', or"
        " pass the strategy ddp_kwargs={'find_unused_parameters': True}}."
    )
    exception.args = tuple(advice if _UNUSED in str(part) else part for part in exception.args)
