"""Runs a LightningCLI configuration as multiple worker groups, each with a separate Trainer."""

import inspect
import logging
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
import yaml
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_sdiloco.algorithm.config import AUTO, Settings
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.checkpoint import random_state, set_random_state
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.rounds import StepClock
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.federation.config import Federation
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.lightning.groups import ConnectedGroups, in_batch
from lightning_sdiloco.lightning.host import (
    Batch,
    Forwarded,
    Function,
    Internal,
    LightningModule,
    Trainer,
    check_without_trainer,
    wrap,
)
from lightning_sdiloco.lightning.options import Options
from lightning_sdiloco.lightning.strategy import WorkerGroupStrategy
from lightning_sdiloco.planning.link import require
from lightning_sdiloco.planning.workload import Model
from lightning_sdiloco.registration import variants
from lightning_sdiloco.tools.output import Numbers
from lightning_sdiloco.tools.simulate.threads import Turns, simulated_topologies


@dataclass(frozen=True)
class SimulatedFederation(Federation):
    """The federation of a simulated site that is already connected."""

    connection: HubConnection | None = field(default=None, repr=False, compare=False)

    def connect(self, rank: int = 0, ranks: int = 1, incarnation: str = "") -> HubConnection:
        assert self.connection is not None, "a simulated site has its connection"
        return self.connection


def site_name(number: int) -> str:
    return f"site-{number}"


if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class SimulatedRank(NamedTuple):
    """The rank that a thread simulates, which forms a worker group by itself."""

    topology: Topology
    clock: Callable[[], float]  # stopped while other groups run
    site: int | None = None
    sites: int = 1
    begins: Callable[[], None] = lambda: None  # called before every inner step
    # The seconds per inner step that the group announces, or 0 for the time measured here.
    step_time: float = 0.0
    connection: HubConnection | None = None  # only for a site

    @property
    def rank(self) -> int:
        """The index of this rank among all training ranks, which share the data."""
        return self.topology.group_index if self.site is None else self.site

    @property
    def ranks(self) -> int:
        return self.topology.num_groups if self.site is None else self.sites


class SimulatedProcessesMixin(_Base):
    """Replaces DDPStrategy's process handling with simulated ranks.

    This class must come after the strategy in the list of base classes. Call `play` before you
    create the Trainer.
    """

    simulated_rank: SimulatedRank
    _groups: ConnectedGroups
    _launcher: Internal
    _options: Options
    reset_seed: Callable[[], None]

    def play(self, rank: SimulatedRank) -> None:
        self.simulated_rank = rank
        federation = self._options.federation
        if federation is not None:
            # This happens only now, because jsonargparse cannot create a subclass of a dataclass.
            simulated = SimulatedFederation(**vars(federation), connection=rank.connection)
            self._options = replace(self._options, federation=simulated)

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[0]

    num_processes = world_size = property(lambda self: self.simulated_rank.ranks)
    global_rank = local_rank = property(lambda self: self.simulated_rank.rank)
    node_rank = property(lambda self: 0)

    @override
    def set_world_ranks(self) -> None: ...

    @override
    def _configure_launcher(self) -> None:
        self._launcher = None

    @override
    def setup_environment(self) -> None:
        self.reset_seed()
        self._groups.use(self.simulated_rank.topology)
        module = self.lightning_module
        world = self.simulated_rank.topology.world
        assert module is not None

        # This is a function because it refers to the strategy, and copying the module does not copy
        # functions.
        def gather(state: Tensor, group: Forwarded = None) -> list[Tensor]:
            # The states are gathered as objects, because their shapes may differ.
            return [state] if in_batch(module) else list(world.all_gather_object(state))

        for metric in (part for part in module.modules() if isinstance(part, Metric)):
            if metric.dist_sync_fn is None and metric.process_group is None:
                metric.distributed_available_fn = lambda: True
                metric.dist_sync_fn = gather

    @override
    def _setup_model(self, model: nn.Module) -> Internal:
        # A group of one rank has nothing for DistributedDataParallel to reduce.
        return model

    @override
    def _register_ddp_hooks(self) -> None: ...

    @override
    def barrier(self, *args: Forwarded, **kwargs: Forwarded) -> None:
        self.simulated_rank.topology.world.all_gather_object(args)

    @override
    def broadcast(self, obj: Forwarded, src: int = 0) -> Forwarded:
        return self.simulated_rank.topology.world.all_gather_object(obj)[src]

    @override
    def reduce(
        self, tensor: Forwarded, group: Forwarded = None, reduce_op: Forwarded = "mean"
    ) -> Forwarded:
        if not isinstance(tensor, Tensor):
            return tensor
        reduction = _REDUCTIONS.get(str(reduce_op).rpartition(".")[2].lower())
        if reduction is None:
            raise ValueError(
                f"reduce_op={reduce_op!r} cannot be simulated. Use mean, sum, max or min."
            )
        tensors = self.simulated_rank.topology.world.all_gather(tensor)
        return reduction(torch.stack(tensors)).to(tensor.dtype)

    @override
    def all_gather(
        self, tensor: Tensor, group: Forwarded = None, sync_grads: bool = False
    ) -> Tensor:
        if in_batch(self.lightning_module):
            return torch.stack([tensor])
        return torch.stack(self.simulated_rank.topology.world.all_gather(tensor))


_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("mean", "avg"), lambda ranks: ranks.sum(dim=0) / len(ranks)),
    "sum": lambda ranks: ranks.sum(dim=0),
    "max": lambda ranks: ranks.amax(dim=0),
    "min": lambda ranks: ranks.amin(dim=0),
    "product": lambda ranks: ranks.prod(dim=0),
}


# The history of a group


if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Callback
else:
    _Callback = object

LAST = 10
"""The number of batches over which losses are averaged at the beginning and end of a run.

The outer model is evaluated on the final batches.
"""


class Validation(NamedTuple):
    """A validation's metrics and the inner step after which it took place."""

    step: int
    metrics: dict[str, float]

    @property
    def loss(self) -> float | None:
        return next((metric for name, metric in self.metrics.items() if "loss" in name), None)


@dataclass
class Group:
    """A worker group's history."""

    losses: list[float] = field(default_factory=list)
    outer_loss: float | None = None
    bytes_sent: int = 0
    inner_steps: int = 0
    # The time at which each inner step was completed, on the clock of the group.
    times: list[float] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    launches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    validations: list[Validation] = field(default_factory=list)

    @property
    def first_loss(self) -> float | None:
        return _mean(self.losses[:LAST])

    @property
    def last_loss(self) -> float | None:
        return _mean(self.losses[-LAST:])


class RecorderMixin(_Callback):
    """Records a simulated group's history and calls ``stepped`` after every inner step."""

    def __init__(self, rank: SimulatedRank, stepped: Callable[[], None]) -> None:
        self._rank = rank
        self._stepped = stepped
        self.group = Group()
        self._batches: deque[tuple[Batch, int]] = deque(maxlen=LAST)
        self._begun = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the group's speed on the real machines."""
        if self._rank.step_time:
            trainer.strategy.engine.rounds.step_clock = StepClock(self._rank.step_time)
        self._note_launches(trainer.strategy.engine)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Announces a new inner step before the step's first batch."""
        if self._begun <= self.group.inner_steps:
            self._begun = self.group.inner_steps + 1
            self._rank.begins()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Forwarded,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Records the loss and, if the batch completed an inner step, the step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.group.losses.append(float(loss))
            self._batches.append((batch, batch_idx))
        if trainer.strategy.engine.inner_steps > self.group.inner_steps:
            self.group.inner_steps = trainer.strategy.engine.inner_steps
            if batch is None:
                self.group.idle.append(self.group.inner_steps)
            self.group.times.append(self._rank.clock())
            self._note_launches(trainer.strategy.engine)
            self._stepped()

    def _note_launches(self, engine: StreamingDiLoCo) -> None:
        """Records the launches after the next inner step, because schedules may be adaptive."""
        next_step = engine.inner_steps + 1
        due = engine.rounds.timetable.due(next_step)
        if due:
            self.group.launches[next_step] = due

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            metrics = trainer._results.metrics(on_step=False)["callback"]
            numbers = {name: float(metric) for name, metric in metrics.items()}
            self.group.validations.append(Validation(trainer.strategy.engine.inner_steps, numbers))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluates the outer model in the module on the group's last batches."""
        parameters = inspect.signature(pl_module.training_step).parameters
        can_repeat = pl_module.automatic_optimization and "dataloader_iter" not in parameters
        if can_repeat and self._batches:
            losses = []
            with _quietly(pl_module), trainer.precision_plugin.train_step_context():
                for batch_and_index in self._batches:
                    output: Internal = pl_module.training_step(*batch_and_index[: len(parameters)])
                    losses.append(output["loss"] if isinstance(output, dict) else output)
            self.group.outer_loss = _mean(list(map(float, losses)))
        self._batches.clear()


@contextmanager
def _quietly(module: nn.Module) -> Iterator[None]:
    """Puts a module into evaluation mode and turns off its logging inside a ``with`` block.

    The random state and the mode of every submodule are restored afterwards.
    """
    modes = [(part, part.training) for part in module.modules()]
    state = random_state()
    module.eval()
    try:
        with torch.no_grad(), ExitStack() as undo:
            wrap(undo, module, "log", lambda *args, **kwargs: None)
            wrap(undo, module, "log_dict", lambda *args, **kwargs: None)
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        set_random_state(state)


# The configuration


# For each distribution, our module with its strategy, and the packages of its Trainer and its
# Fabric.
_OURS = {
    "lightning": ("lightning_pytorch", "lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "pytorch_lightning", "lightning_fabric"),
}


class SimulatedClasses(NamedTuple):
    """The classes that a simulation needs for a distribution of Lightning."""

    strategy: Function
    recorder: Function
    cli: Function


@cache
def simulated_classes(distribution: str) -> SimulatedClasses:
    """Creates a simulated worker group's classes for a distribution of Lightning."""
    ours, trainer, fabric = _OURS[distribution]
    strategy = import_module(f"lightning_sdiloco.{ours}").StreamingDiLoCoStrategy
    host = import_module(f"{trainer}.strategies").DDPStrategy
    reset_seed = staticmethod(import_module(f"{fabric}.utilities.seed").reset_seed)
    name = f"SimulatedStrategyOf_{distribution}"
    namespace = {"__module__": __name__, "reset_seed": reset_seed}
    simulated = type(name, (strategy, SimulatedProcessesMixin, host), namespace)
    # LightningCLI imports it by its path.
    globals()[name] = simulated
    recorder = type("Recorder", (RecorderMixin, import_module(f"{trainer}.callbacks").Callback), {})
    return SimulatedClasses(simulated, recorder, import_module(f"{trainer}.cli").LightningCLI)


@dataclass(frozen=True)
class Configuration:
    """A training run's configuration files and the classes that its script would pass."""

    files: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    cli: type | None = None
    model: type | None = None
    data: type | None = None

    def __post_init__(self) -> None:
        missing = [file for file in self.files if not Path(file).is_file()]
        if missing:
            raise ValueError(
                f"config={missing[0]!r} is not a file. Pass the configuration file of a"
                " LightningCLI."
            )
        for file in self.files:
            try:
                arguments = yaml.safe_load(Path(file).read_text())
            except (yaml.YAMLError, UnicodeDecodeError):
                arguments = ()
            if not isinstance(arguments, Mapping | None):
                raise ValueError(
                    f"config={file!r} is not a YAML file of arguments. Pass the configuration file"
                    " of a LightningCLI."
                )

    @property
    def classes(self) -> SimulatedClasses:
        """Returns the classes for the distribution of Lightning that the configuration uses."""
        classes = [self.cli, self.model, self.data]
        for file in self.files:
            model = (yaml.safe_load(Path(file).read_text()) or {}).get("model")
            if isinstance(model, Mapping):
                classes.append(_class_named(model.get("class_path")))
        for cls in classes:
            for base in cls.__mro__ if cls is not None else ():
                distribution = base.__module__.partition(".")[0]
                if distribution in _OURS:
                    return simulated_classes(distribution)
        return simulated_classes("lightning")

    def fit(
        self, rank: SimulatedRank, choices: Mapping[str, object], callback: "RecorderMixin | None"
    ) -> Internal:
        """Parses the files and, if there is a callback, fits the model as one group.

        Returns the LightningCLI.
        """
        ours = self.classes.strategy
        name = f"{ours.__module__}.{ours.__qualname__}"
        base = self.cli or self.classes.cli
        check_without_trainer(base)

        class SimulatedCLI(base):  # type: ignore[misc, valid-type]
            def before_instantiate_classes(self) -> None:
                super().before_instantiate_classes()
                trainer = self.config[self.subcommand].trainer
                trainer.strategy = {
                    "class_path": name,
                    "init_args": _arguments_of(trainer, choices, rank),
                }

            def instantiate_classes(self) -> None:
                if callback is not None:
                    super().instantiate_classes()

            def instantiate_trainer(self, **kwargs: Forwarded) -> Trainer:
                trainer = self._get(self.config_init, "trainer")
                trainer["strategy"].play(rank)
                callbacks = [*_without_bars(trainer["callbacks"] or []), callback]
                return super().instantiate_trainer(**kwargs, **_ONE_DEVICE, callbacks=callbacks)

            def _run_subcommand(self, subcommand: str) -> None:
                if callback is not None:
                    super()._run_subcommand(subcommand)

        return SimulatedCLI(**self._cli_arguments(), save_config_callback=None)

    def _cli_arguments(self) -> Numbers:
        """Returns the command line and the classes as arguments for the LightningCLI."""
        files = [f"--config={file}" for file in self.files]
        options = [f"--{argument}" for argument in self.arguments]
        arguments: Numbers = {"args": ["fit", *files, *options]}
        if self.model is not None:
            arguments["model_class"] = self.model
        if self.data is not None:
            arguments["datamodule_class"] = self.data
        return arguments


_ONE_DEVICE = {
    "devices": 1,
    "num_nodes": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def _without_bars(callbacks: Internal) -> list[Internal]:
    """Returns all callbacks except progress bars, which every group would show."""
    if not isinstance(callbacks, list):
        callbacks = [callbacks]
    return [callback for callback in callbacks if not _is_bar(callback)]


def _is_bar(callback: object) -> bool:
    return any(cls.__name__ == "ProgressBar" for cls in type(callback).__mro__)


def _arguments_of(trainer: Trainer, choices: Mapping[str, object], rank: SimulatedRank) -> Numbers:
    """Returns the simulated strategy's arguments from the files and the choices."""
    arguments = {**_configured_arguments(trainer), **choices}
    for name in ("sync_every", "overlap_steps", "fragments", "compression"):
        if arguments.get(name) == "auto":
            raise ValueError(
                f"{name}='auto' cannot be simulated, because the value is chosen for a measured"
                f" link. Vary {name} with --sweep, or use a value that sdiloco plan recommends."
            )
    federation = arguments.get("federation")
    if rank.site is not None:
        arguments["federation"] = _federation_in_memory(federation or {}, rank.site)
    elif federation is not None:
        raise ValueError(
            "The configuration is for a site of a federation. Pass the number of sites with --sites"
            " instead of using --groups."
        )
    return {**arguments, "worker_groups": rank.topology.num_groups, "start_method": "popen"}


def _configured_arguments(trainer: Trainer) -> Numbers:
    """Returns the strategy's arguments from the files, if the strategy can be simulated."""
    strategy = trainer.strategy
    if isinstance(strategy, str) and strategy in ("auto", *variants("streaming_diloco")):
        return {}
    path = getattr(strategy, "class_path", None)
    cls = _class_named(path)
    if cls is None or not issubclass(cls, WorkerGroupStrategy):
        raise ValueError(
            f"trainer.strategy={path or strategy!r} cannot be simulated. Only"
            " StreamingDiLoCoStrategy can be simulated. Select this strategy in the configuration,"
            " or pass --set trainer.strategy=streaming_diloco."
        )
    # Not dict(), which flattens nested values of a Namespace, such as a federation.
    arguments: Numbers = strategy.init_args.as_dict()
    processes = _number(trainer.devices) * _number(trainer.num_nodes)
    groups = _number(arguments["worker_groups"])
    if 0 < groups < processes:
        raise ValueError(
            f"The configuration has {groups} worker groups for {processes} processes. A simulated"
            " group has only one rank. With --set, change the batch size to that of a whole"
            " group, and set trainer.devices to the number of groups."
        )
    return arguments


def _number(argument: object) -> int:
    """Returns an argument as a number, or 0 for text such as "auto"."""
    return int(str(argument)) if str(argument).isdecimal() else 0


def _federation_in_memory(federation: Numbers, site: int) -> Numbers:
    """Creates a federation with the terms from the files and a hub in memory."""
    configured = federation.get("init_args", federation)
    names = ("lease", "grace", "quorum", "late", "rounds")
    terms = {name: configured[name] for name in names if name in configured}
    in_memory = {"hub": "memory:1", "run": "simulated", "site": site_name(site), "insecure": True}
    return {**terms, **in_memory}


def class_at(path: str) -> type:
    """Imports a class.

    Raises:
        ValueError: If there is no such class.
    """
    try:
        cls = resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(cls, type):
        raise ValueError("it is not a class")
    return cls


def _class_named(path: str | None) -> type | None:
    """Imports a class, or returns None if the path does not exist."""
    try:
        return class_at(path) if path else None
    except ValueError:
        return None


# Runs


_LOGGERS = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")


@dataclass(frozen=True)
class Run:
    """A run's outcome, with its groups and the outer model that they share."""

    groups: list[Group]
    validations: list[Validation]
    outer: dict[str, Tensor]
    model: Model
    settings: Settings

    @property
    def outer_loss(self) -> float | None:
        """The mean loss of the outer model on the last batches of all groups."""
        return _mean([group.outer_loss for group in self.groups if group.outer_loss is not None])

    @property
    def last_loss(self) -> float | None:
        return _mean([group.last_loss for group in self.groups if group.last_loss is not None])

    @property
    def step_seconds(self) -> float | None:
        """The measured duration of an inner step in the median group, or None if unknown."""
        medians = []
        for group in self.groups:
            steps = [later - earlier for earlier, later in pairwise(group.times)]
            if steps:
                medians.append(median(steps))
        if not medians:
            return None
        return sorted(medians)[len(medians) // 2]


def run(
    configuration: Configuration,
    groups: int,
    choices: Mapping[str, object] | None = None,
    stepped: Callable[[], None] = lambda: None,
    speeds: Sequence[float] | None = None,
) -> Run:
    """Runs a configuration as multiple worker groups of one rank each, in alternating threads."""
    turns: Turns[tuple[Group, Run | None]] = Turns(groups)
    lives = []
    for group, topology in enumerate(simulated_topologies(groups, turns.until)):
        step_time = 1 / speeds[group] if speeds else 0.0
        rank = SimulatedRank(topology, turns.seconds, step_time=step_time)
        lives.append(partial(live, configuration, rank, choices or {}, stepped))
    with quiet():
        outcomes = turns.run(lives)
    first = outcomes[0][1]
    assert first is not None
    return replace(first, groups=[group for group, _ in outcomes])


def check(
    configuration: Configuration,
    groups: int,
    choices: Mapping[str, object],
    site: int | None = None,
) -> Numbers:
    """Refuses configurations that the strategy would refuse, without creating a model or data."""
    require(groups >= 1, "groups", groups, "at least 1")
    turns: Turns[Internal] = Turns(1)
    rank = SimulatedRank(simulated_topologies(1, turns.until)[0], turns.seconds, site, groups)
    with quiet():
        (cli,) = turns.run([partial(configuration.fit, rank, choices, None)])
    arguments = dict(cli.config[cli.subcommand].trainer.strategy["init_args"])
    # Objects given by class paths have not been created yet, and "auto" settings are chosen in the
    # run.
    plain_arguments: Numbers = {}
    for name, argument in arguments.items():
        if isinstance(argument, str | int | float | list | None) and argument != AUTO:
            plain_arguments[name] = argument
    Settings.among(plain_arguments)
    return arguments


def live(
    configuration: Configuration,
    rank: SimulatedRank,
    choices: Mapping[str, object],
    stepped: Callable[[], None],
) -> tuple[Group, Run | None]:
    """Runs one group to completion in its thread.

    Only the first group returns the results that all groups share.
    """
    recorder = configuration.classes.recorder(rank, stepped)
    trainer = configuration.fit(rank, choices, recorder).trainer
    strategy = trainer.strategy
    if strategy.engine is None:
        raise ValueError(
            "No training took place with this configuration. Make sure that max_steps and"
            " max_epochs are not 0."
        )
    group = recorder.group
    report = strategy.report()
    group.bytes_sent = int(report["bytes_sent"])
    group.inner_steps = int(report["inner_steps"])
    if rank.rank:
        return group, None
    model = Model.of_parameters(trainable(trainer.lightning_module))
    outer = strategy.outer_state_dict()
    return group, Run([], group.validations, outer, model, strategy.engine.rounds.settings)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the messages that every Trainer logs and restores the environment afterwards."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    environment = dict(os.environ)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        os.environ.clear()
        os.environ.update(environment)


def _mean(numbers: list[float]) -> float | None:
    if not numbers:
        return None
    return sum(numbers) / len(numbers)
