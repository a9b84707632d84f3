"""Implements the strategy without its base class.

No other module overrides methods of Lightning's strategies.

Every distribution of Lightning has its own base classes. A strategy for a distribution inherits
from this class and from a base class, and adds only a name; see ``lightning_pytorch.py``.

[Note: parts of a strategy] A strategy has no state except its parts. `Options` holds the user's
settings. `ConnectedGroups` holds the connected ranks for as long as the strategy exists. A `Fit`
begins and ends with each fit. A model format, `WholeModel` or `ShardedModel`, determines how ranks
store the model. `Results` holds the values that users can read during and after a fit.
"""

import gc
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sdiloco.algorithm.config import DEFAULT_TIMEOUT, OuterOptimizer
from lightning_sdiloco.algorithm.gossip import Route
from lightning_sdiloco.algorithm.merge import LandingRule
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.reduce import TwoShot
from lightning_sdiloco.algorithm.schedule import DenseBeginning, LaunchSchedule, Schedule
from lightning_sdiloco.algorithm.weighting import Weighing
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine.checkpoint import own_state
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.shards import local
from lightning_sdiloco.engine.start import align_model
from lightning_sdiloco.federation.config import Federation
from lightning_sdiloco.lightning.arguments import (
    Argument,
    arguments_of,
    docstring_of,
    take_arguments,
)
from lightning_sdiloco.lightning.epochs import process_wrapped
from lightning_sdiloco.lightning.evaluation import Averaging
from lightning_sdiloco.lightning.fit import Distribution, Fit
from lightning_sdiloco.lightning.fit_state import listen_without_fit
from lightning_sdiloco.lightning.groups import ConnectedGroups, stays_in_group
from lightning_sdiloco.lightning.host import (
    Batch,
    Forwarded,
    Function,
    Internal,
    LightningModule,
    State,
    Trainer,
    advise_on_unused,
    refuse_in_notebook,
    refuse_unsupported,
    wrap,
)
from lightning_sdiloco.lightning.model_format import WholeModel, release_gradients, require_sharded
from lightning_sdiloco.lightning.options import Measured, Options
from lightning_sdiloco.lightning.own_hosts import give_own_folders, make_site_of_host
from lightning_sdiloco.lightning.results import Results

if TYPE_CHECKING:
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


_log = logging.getLogger(__name__)


class GroupStrategy:
    """Trains one model on multiple worker groups.

    Args:
        worker_groups: The number of worker groups (M in the paper). Consecutive ranks form a group.
            ``"auto"`` means one group per node if there are multiple nodes, and one group per
            device otherwise.
        sync_every: The number of inner steps between two launches of the same fragment (H in the
            paper). If None, the number is between 10 and 100, depending on the length of the fit,
            or 100 if the length is unknown; see docs/choosing.md. If ``"auto"``, the planner
            chooses the number after it has measured the first inner steps and the link between
            groups.
        overlap_steps: The number of inner steps between the launch of a fragment and its landing
            (tau in the paper). The number must be less than ``sync_every``. If None, the overlap is
            five steps, or fewer in short rounds. If ``"auto"``, the planner chooses the number.
        mixing: The share of the local parameters that is kept on landing (alpha in the paper), from
            0 to 1, or a ``LandingRule`` such as ``Carry()``. For ``mixing``, ``outer_lr`` and
            ``outer_momentum``, ``"auto"`` chooses a value based on the number of groups,
            ``sync_every`` and the compression. A resumed fit restores the chosen values from its
            checkpoint.
        fragments: How the model is divided into fragments. ``"strided:3"`` and ``"sequential:3"``
            put three repeated blocks into each fragment. Without a number, a fragment contains an
            eighth of the blocks, but at least one and at most three, or more if there would
            otherwise be more than 32 fragments. ``"balanced"`` makes as many fragments as
            ``"strided"``, but of equal size. An integer sets the number of fragments, which are
            then equal in size. A list of lists of shell-style patterns for parameter names defines
            one fragment per list. ``"auto"`` is ``"strided"`` with a number of blocks that suits
            the link.
        compression: How outer gradients are encoded. Pass a name from
            ``lightning_sdiloco.compression.COMPRESSIONS``, such as ``"fp4"``, or a
            ``lightning_sdiloco.compression.Compression``. ``"auto"`` chooses the most precise of
            ``"fp32"``, ``"bf16"`` and ``"fp4"`` for which the link is fast enough.
        outer_lr: The learning rate of the outer Nesterov SGD, or ``"auto"``.
        outer_momentum: The momentum of the outer Nesterov SGD, as defined by torch, or ``"auto"``.
        evaluate: The model that is validated during a fit. ``"outer"`` validates the outer model
            or, until every fragment has landed once, the mean of the groups. ``"mean"`` validates
            the mean of the groups, which is exchanged for every validation. ``"local"`` validates
            each group's own model. Checkpoints contain the outer model. Until every fragment has
            landed once, and right after a validation of the mean, they contain the mean instead.
        federation: The `Federation` that these separately launched ranks join as a site. If None,
            all worker groups are launched together.
        outer_optimizer: A replacement for the outer Nesterov SGD. Pass a function that takes the
            flat float32 shards, one per fragment, and returns a torch optimizer that works
            elementwise. A ``lightning_sdiloco.OuterOptimizer`` can also set a learning rate
            schedule, clipping, a guard against outliers, and the device that stores the outer
            state.
        exchange: How groups average encoded outer gradients: ``"gather"``, ``"two_shot"``,
            ``"auto"`` to choose based on the number of groups and the compression, or a
            ``lightning_sdiloco.TwoShot``, which gives each group a share that suits its link. With
            the suffix ``":nccl"``, as in ``"auto:nccl"``, outer gradients are sent directly between
            CUDA devices. Otherwise, they are sent with gloo.
        resume: ``"exact"`` refuses a checkpoint with different settings. ``"restart"`` restarts the
            rounds from the outer parameters and outer momentum of any checkpoint. With the suffix
            ``":newest"``, only the newest checkpoint keeps the folder that a fit resumes from.
        dense_beginning: A ``lightning_sdiloco.DenseBeginning``, which makes groups exchange more
            often at the start of training. ``"auto"`` uses a dense beginning for the first fifth of
            all steps if there are at least eight groups and the length of the fit is known; see
            docs/choosing.md. If None, there is no dense beginning.
        schedule: When fragments are launched: a ``LaunchSchedule`` such as ``Selective()``, which
            launches fragments less often while their outer gradients hardly change. If None, each
            fragment is launched every ``sync_every`` inner steps.
        weighing: How groups are weighted in a mean: a ``Weighing``. If None, each group is weighted
            by the number of inner steps that it trained.
        route: The groups that each group exchanges with in a round: a ``Route`` such as
            ``RandomPairs()`` or ``Ring()``. On such routes, groups have different outer parameters,
            and validation and checkpoints use the mean of all groups. If None, every group
            exchanges with all other groups.
        untrained: How buffers and frozen parameters are treated, by name pattern, as in
            ``{"*.queue": "own"}``. ``"mean"`` averages the values over the groups, ``"first"``
            copies the values of the first group, and ``"own"`` keeps each group's own values. If
            None, the statistics of normalization layers are averaged, other small buffers are
            copied from the first group, and each group keeps its own large buffers and frozen
            parameters; see docs/untrained-state.md.
        timeout: The time limit for a fragment in flight, and the timeout of Lightning's own process
            groups.

    Raises:
        ValueError: If an argument is out of range. The message names the argument.
        TypeError: If an argument does not exist.
    """

    strategy_name: ClassVar[str]
    summary: ClassVar[str] = ""
    model_format: ClassVar[type[WholeModel]]

    def __init_subclass__(cls, **kwargs: Forwarded) -> None:
        super().__init_subclass__(**kwargs)
        if "strategy_name" in vars(cls):
            arguments = cls._arguments()
            raises = inspect.cleandoc(GroupStrategy.__doc__ or "").partition("Raises:\n")[2]
            summary = cls.summary or cls.model_format.summary
            cls.__doc__ = docstring_of(summary, arguments, raises)
            take_arguments(cls, arguments.values())

    @classmethod
    def _arguments(cls) -> dict[str, Argument]:
        """Returns this strategy's arguments with their descriptions."""
        base_arguments = cls.model_format.base_arguments
        return {
            **arguments_of(GroupStrategy.__init__, GroupStrategy.__doc__),
            **arguments_of(base_arguments, base_arguments.__doc__),
        }

    def __init__(
        self,
        worker_groups: int | Literal["auto"] = "auto",
        *,
        sync_every: int | Literal["auto"] | None = None,
        overlap_steps: int | Literal["auto"] | None = None,
        mixing: float | Literal["auto"] | LandingRule = "auto",
        fragments: int | str | list[list[str]] = "strided",
        compression: str | Compression = "fp4",
        outer_lr: float | Literal["auto"] = "auto",
        outer_momentum: float | Literal["auto"] = "auto",
        evaluate: Literal["outer", "mean", "local"] = "outer",
        federation: Federation | None = None,
        outer_optimizer: OuterOptimizer | Callable[[Iterable[Tensor]], Optimizer] | None = None,
        exchange: str | TwoShot = "auto",
        resume: Literal["exact", "restart", "exact:newest", "restart:newest"] = "exact",
        dense_beginning: DenseBeginning | Literal["auto"] | None = "auto",
        schedule: LaunchSchedule | None = None,
        weighing: Weighing | None = None,
        route: Route | None = None,
        untrained: dict[str, Literal["mean", "first", "own"]] | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **of_format: Forwarded,
    ) -> None:
        # Nothing is started here, because strategies are pickled.
        self._options = Options.from_arguments(locals())
        arguments = self.base_arguments(of_format)
        self._format = self.model_format(arguments)
        self._groups = ConnectedGroups()
        self.results = Results(self._options)
        super().__init__(timeout=timeout, **arguments)  # type: ignore[call-arg]

    def base_arguments(self, of_format: State) -> State:
        return self.model_format.base_arguments(**of_format)

    def _configure_launcher(self) -> None:
        # This runs inside Trainer() or Fabric(), before any process starts.
        federation = self._options.federation
        if federation is not None and federation.starts_hub:
            located = make_site_of_host(self, federation)
            self._options = replace(self._options, federation=located)
        self._groups.check(self, self._options, self._format)
        super()._configure_launcher()  # type: ignore[misc]

    def setup_environment(self) -> None:
        self._groups.connect(self, self._options, self._format, super().setup_environment)  # type: ignore[misc]

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or []  # type: ignore[attr-defined]
        if len(devices) == 1 and self.world_size > self.num_nodes:  # type: ignore[attr-defined]
            # Each process sees only its own device in this environment.
            return devices[0]
        return super().root_device  # type: ignore[misc]

    @property
    def schedule(self) -> Schedule:
        """The schedule of launches and landings, which prints as a table.

        The schedule is available from ``on_fit_start`` on, and in Fabric from the first optimizer
        step on. If ``sync_every`` is omitted, the schedule is available once a value has been
        chosen: when training starts or, as for ``"auto"`` settings, after the first inner steps.
        """
        if self.results.summary is not None:
            return self.results.summary.schedule
        settings = self.results.options.settings
        return settings.schedule_of(len(self.fragments))

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments, with their parameter names and their sizes in bytes.

        Fragments are available as soon as `schedule` is.
        """
        results = self.results
        has_trained = results.engine is not None or results.summary is not None
        if results.fragments and not has_trained:
            return results.fragments
        return results.source.fragments

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Returns the outer parameters by name, as full float32 tensors on the host.

        The names are those of the model's ``named_parameters()``, and the values are the same on
        every rank. During training, all ranks of a worker group must call this method together.
        """
        return self.results.source.outer_state_dict()

    def set_outer(self) -> None:
        """Sets the outer model of all groups to rank 0's current model.

        Call this method on all ranks after you overwrite weights during training. For details, see
        `StreamingDiLoCo.set_outer`.
        """
        assert self.engine is not None, "weights are overwritten in training"
        self.engine.set_outer()

    def report(self) -> dict[str, float]:
        """Returns the same step, byte and time counts as `StreamingDiLoCo.report`."""
        return self.results.source.report()

    @property
    def engine(self) -> StreamingDiLoCo | None:
        """The engine of the current or last fit, or None before the first fit in this process."""
        return self.results.engine

    @property
    def topology(self) -> Topology:
        """The worker groups and their connections, available once processes are connected."""
        return self._groups.topology


class WorkerGroupStrategy(GroupStrategy, _Base):
    """Overrides the Trainer strategy methods that would communicate across all ranks."""

    distribution: ClassVar[Distribution]
    _options: Options

    def __init__(self, *args: Forwarded, **arguments: Forwarded) -> None:
        super().__init__(*args, **arguments)
        self._fit: Fit | None = None
        # The accelerator is not stored in Lightning's attribute, because Lightning would mistake it
        # for the user's.
        self._accelerator_of_trainer: Accelerator | None = None
        # Replacements in Lightning outside a fit.
        self._patches = ExitStack()

    # For users

    @property
    def measured(self) -> Measured | None:
        """The measurements behind the planner's choice of ``"auto"`` settings, or None."""
        return self.results.options.measured

    # For the launcher, checkpoints and loops

    @property
    def fit(self) -> Fit:
        assert self._fit is not None, "there is none before trainer.fit"
        return self._fit

    @property
    def is_alone(self) -> bool:
        """Whether this rank is ending with an exception and must not wait for other ranks."""
        return self._groups.is_alone

    @property
    @override
    def world_size(self) -> int:
        """The number of ranks in all worker groups. Gradients are averaged over
        ``topology.group_size`` ranks.
        """
        if self._fit is not None and self._groups.is_connected:
            self._fit.scale_watch.read(self.lightning_module, self.topology)
        return int(super().world_size)

    # Start

    @property
    @override
    def accelerator(self) -> "Accelerator | None":
        return self._accelerator_of_trainer or super().accelerator

    @accelerator.setter
    @override
    def accelerator(self, accelerator: "Accelerator") -> None:
        # Every Trainer sets this once, before anything starts.
        if self._accelerator_of_trainer is not None:
            raise ValueError(
                "This strategy object belongs to another Trainer. Create a strategy for each"
                " Trainer, or use one Trainer for all fits."
            )
        self._accelerator_of_trainer = accelerator

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._groups.failed = False
        if self._fit is not None:
            # The planner's choice is kept. Rounds that depend on the fit's length are chosen again,
            # as are the outer learning rate, momentum and mixing.
            last_options = self._fit.options
            first_settings = self._options.settings
            settings = replace(
                last_options.settings,
                outer_lr=first_settings.outer_lr,
                outer_momentum=first_settings.outer_momentum,
                mixing=first_settings.mixing,
                dense_beginning=first_settings.dense_beginning,
            )
            self._options = replace(
                last_options,
                settings=settings,
                follows_length=self._options.follows_length,
                chooses_rounds=self._options.chooses_rounds,
                chooses_dense=self._options.chooses_dense,
            )
            self._fit.checkpointer.forget()
        # Some code connects a model that does not have a trainer yet, or never gets one.
        if model._trainer is not None and model._trainer.state.fn == "fit":
            self._begin(model._trainer)

    def _begin(self, trainer: Trainer) -> None:
        # This comes before callbacks are set up, because some of them copy the model. The model's
        # own callbacks come later.
        refuse_unsupported(trainer, self._options.settings.shares, self._format.is_sharded)
        if self._fit is not None:
            self._fit.close()
        self._fit = self.distribution.callback(
            trainer,
            replace(self._options),
            self._groups,
            self._format,
            self.results,
            self.distribution.termination,
        )
        callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, Fit)]
        trainer.callbacks[:] = [self._fit, *callbacks]

    @override
    def setup_environment(self) -> None:
        self._groups.enter()
        super().setup_environment()

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        start_method = getattr(self, "_start_method", "popen")
        if start_method != "popen":
            self._launcher = self.distribution.launcher(self, start_method=start_method)
        refuse_in_notebook(self)
        federation = self._options.federation
        if federation is not None and federation.starts_hub:
            wrap(self._patches, self._launcher, "launch", self._launch)

    def _launch(self, launch: Function, *args: Forwarded, **kwargs: Forwarded) -> object:
        # This comes before Lightning looks for the newest checkpoint.
        federation = self._options.federation
        trainer = kwargs.get("trainer")
        if federation is not None and trainer is not None:
            located = give_own_folders(trainer, federation)
            self._options = replace(self._options, federation=located)
        return launch(*args, **kwargs)

    @property
    @override
    def distributed_sampler_kwargs(self) -> State:
        """The number of ranks that share the data, and this rank's position among them."""
        if not self._groups.is_connected:
            return super().distributed_sampler_kwargs
        # Every group and every data-parallel rank has its own data; tensor-parallel ranks share the
        # same data.
        topology = self.topology
        tensor_parallel = self._format.mesh.get("tensor_parallel", 1)
        data_parallel = topology.group_size // tensor_parallel
        rank = topology.group_index * data_parallel + topology.group_rank // tensor_parallel
        return {"num_replicas": topology.num_groups * data_parallel, "rank": rank}

    @override
    def setup(self, trainer: Trainer) -> None:
        self._patches.close()
        if trainer.state.fn != "fit":
            self._setup_without_fit(trainer)
            return
        if self._fit is None or self._fit.is_closed or self._fit.trainer is not trainer:
            self._begin(trainer)
        self.fit.begin()
        super().setup(trainer)
        self.fit.checkpointer.averaging = Averaging(self.fit, self.fit.patches)

    def _setup_without_fit(self, trainer: Trainer) -> None:
        """Sets up validation, testing or prediction."""
        listen_without_fit(trainer, self._patches)
        # After an interrupted fit, groups have different models.
        is_in_training = (
            self.engine is not None
            and self.model is not None
            and self.engine.model is self.model
            and not self.engine.is_finished
        )
        if self._format.is_sharded:
            super().setup(trainer)
        else:
            # The same as in DDPStrategy, which would also overwrite all weights with rank 0's.
            assert self.accelerator is not None
            assert self.model is not None
            self.accelerator.setup(trainer)
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
            self.setup_precision_plugin()
        if not is_in_training and self.model is not None:
            align_model(self.model, self.topology)

    @override
    def _setup_model(self, model: nn.Module) -> Internal:
        # This comes first so that our refusals precede DistributedDataParallel's.
        self.fit.prepare(model)
        return self._format.wrap(self, model, self.topology, super()._setup_model)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        if self._format.is_sharded:
            require_sharded(trainer.lightning_module, self.topology, self._format.mesh)
            self.fit.prepare(trainer.lightning_module)
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if hasattr(optimizer, "consolidate_state_dict"):
                raise ValueError(
                    f"{type(optimizer).__name__} divides its state among all processes and sends"
                    " parameters between worker groups, which must train separately. In"
                    " configure_optimizers, return the wrapped optimizer instead."
                )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        return super().process_dataloader(
            process_wrapped(self.lightning_module.trainer, dataloader)
        )

    # Training

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        self.fit.start(self.lightning_module, self.optimizers)

    @override
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        nbytes = sum(fragment.nbytes for fragment in self.fragments)
        release_gradients(self.fit.trainer, self.optimizers, batch_idx, nbytes)
        self._follow_trainable_parameters()
        # Nothing comes between this hook and the training step.
        self.fit.watch.begin(self.topology)

    @override
    def batch_to_device(
        self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> object:
        if batch is None:
            # Lightning does not call on_train_batch_start for an idle batch, but the other groups
            # may be in this hook. User hooks that move batches do not have to handle idle ones.
            self._follow_trainable_parameters()
            return None
        return super().batch_to_device(batch, device, dataloader_idx)

    def _follow_trainable_parameters(self) -> None:
        if self.fit.follow_model() and isinstance(self.model, DistributedDataParallel):
            # The old wrapper only has the parameters that were trainable when it was created. Its
            # parameter hooks exist as long as the wrapper, which is part of a reference cycle, so
            # the garbage collector must run.
            assert self.lightning_module is not None
            self.model = None
            gc.collect()
            self.model = self._format.wrap(
                self, self.lightning_module, self.topology, super()._setup_model
            )

    @override
    def optimizer_step(self, *args: Forwarded, **kwargs: Forwarded) -> object:
        output = super().optimizer_step(*args, **kwargs)
        self.fit.counts.optimizer_steps += 1
        self.fit.counts.stepped = True
        return output

    @override
    def on_train_end(self) -> None:
        self.fit.finish()
        super().on_train_end()
        self.fit.align()
        self.fit.signals.end_if_any_received()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._fit is None:
            self._groups.fail(exception)
        else:
            self._fit.on_exception(None, None, exception)
        advise_on_unused(exception, self.strategy_name)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._patches.close()
        try:
            if self._fit is not None:
                self._fit.close()
            # This waits for a thread that is still writing.
            super().teardown()
        finally:
            self._groups.leave()
            if self._fit is not None:
                self._fit.checkpointer.close()

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> State:
        state_dict = super().lightning_module_state_dict
        if self._groups.failed:
            # Gathering shards would wait for ranks that may be gone.
            state_dict = self._local_state_dict
        if self.engine is None or self.engine.is_finished:
            return state_dict()
        return self.fit.evaluation.state_dict(self.engine, state_dict)

    def _local_state_dict(self) -> State:
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        return {
            name: local(value) if isinstance(value, Tensor) else value
            for name, value in state.items()
        }

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Forwarded]) -> None:
        states = []
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if saved.get("state") == {}:
                # A group that starts with a fresh optimizer keeps the state with which it was
                # created.
                saved = {**saved, "state": optimizer.state_dict()["state"]}
            states.append(saved)
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    @override
    def optimizer_state(self, optimizer: Optimizer) -> State:
        if not self._format.is_sharded:
            return dict(super().optimizer_state(optimizer))
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if self.is_alone:
            return own_state(optimizer)
        # torch steps an optimizer without state to create one. This is not an inner step, and its
        # effect must not be kept.
        stepped_before = self.fit.counts.stepped
        had_state = bool(optimizer.state)
        try:
            return dict(super().optimizer_state(optimizer))
        finally:
            self.fit.counts.stepped = stepped_before
            if not had_state:
                optimizer.state.clear()

    @override
    def save_checkpoint(
        self, checkpoint: State, filepath: str | Path, storage_options: object = None
    ) -> None:
        save = super().save_checkpoint
        self._groups.meet()

        def write(checkpoint: State, path: str | Path) -> None:
            self._format.write(self, self.topology, checkpoint, path, storage_options, save)

        if not self._groups.is_connected:
            save(checkpoint, filepath, storage_options)
        elif self._fit is None or self._fit.engine is None or "optimizer_states" not in checkpoint:
            write(checkpoint, filepath)
        else:
            self._fit.checkpointer.save(self._fit.engine, checkpoint, filepath, write)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, *args: Forwarded, **kwargs: Forwarded
    ) -> State:
        load = super().load_checkpoint
        if self._fit is None:
            return self._format.read(self, checkpoint_path, load, *args, **kwargs)
        return self._fit.checkpointer.load(checkpoint_path, load, *args, **kwargs)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self._fit is None:
            super().remove_checkpoint(filepath)
        else:
            self._fit.checkpointer.remove(filepath, super().remove_checkpoint)

    # Collectives

    @override
    def reduce(
        self, tensor: Tensor, group: Forwarded = None, reduce_op: Forwarded = "mean"
    ) -> Tensor:
        """Reduces per-batch values over the worker group and all other values over all ranks."""
        if group is None and stays_in_group(self.lightning_module, self._groups):
            if self.topology.in_group.size == 1:
                return tensor
            group = self.topology.in_group.process_group
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Forwarded = None, sync_grads: bool = False
    ) -> Tensor:
        """Gathers over the worker group during a training batch and over all ranks otherwise."""
        # LightningModule.all_gather passes the world if the user specified no group.
        if group in (None, self.topology.world.process_group) and stays_in_group(
            self.lightning_module, self._groups
        ):
            fit = self.fit
            topology = self.topology
            if not fit.has_gathered and topology.num_groups > 1 and fit.trainer.is_global_zero:
                _log.warning(
                    "During a training batch, all_gather gathers over the %d ranks of the worker"
                    " group, not over all ranks, because groups do not wait for each other between"
                    " launches. For example, the negatives of a contrastive loss come only from the"
                    " group. Shown once.",
                    topology.group_size,
                )
            fit.has_gathered = True
            if sync_grads:
                return topology.in_group.all_gather_with_gradients(tensor)
            group = topology.in_group.process_group
        return super().all_gather(tensor, group, sync_grads)

    @override
    def barrier(self, *args: Forwarded, **kwargs: Forwarded) -> None:
        """Waits for all ranks, except after an exception, and explains why ranks may be missing."""
        if self.is_alone:
            return
        with self._groups.waiting(args, self.engine):
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Forwarded, src: int = 0) -> Forwarded:
        if self.is_alone:
            return obj
        # In every batch, ModelCheckpoint asks whether to skip a save by time interval.
        vote = None if self._fit is None else self._fit.requests.vote(obj)
        if vote is not None:
            return vote
        self._groups.meet()
        return super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Makes a joint decision in any hook, because all ranks must stop or save together."""
        return self._groups.decide(decision, all, self.root_device)
