"""The strategy of Fabric without its base class: the one place that overrides methods of it.

[Note: parts of a strategy] says what it is made of; a `Loop` stands in the place of a fit.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sdiloco.algorithm import Fragment, Schedule
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine import Landing, StreamingDiLoCo, files, write_common_file
from lightning_sdiloco.lightning.arguments import document, refuse_unknown
from lightning_sdiloco.lightning.collectives import BatchWatch, waiting_for_all
from lightning_sdiloco.lightning.fabric.loop import Loop
from lightning_sdiloco.lightning.host.ddp import fix_bucket_order
from lightning_sdiloco.lightning.host.patching import check_fabric
from lightning_sdiloco.lightning.model_format.whole_model import WholeModel, check_ddp_kwargs
from lightning_sdiloco.lightning.options import Options
from lightning_sdiloco.lightning.results import Results
from lightning_sdiloco.lightning.strategy import WorkerGroupStrategy
from lightning_sdiloco.lightning.worker_groups import ConnectedGroups, only_device

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as _Base
else:
    _Base = object

_ADVICE = (
    "Give collectives group=fabric.strategy.topology.in_group.process_group, and use those of Fabric, which go over all"
    " ranks, where you validate or save."
)

# Arguments of a Trainer's strategy that say what a Trainer does.
_OF_TRAINER = ("evaluate", "on_resume", "resumable_checkpoints")


class FabricWorkerGroupStrategy(_Base):
    """Trains one model on several worker groups, in a loop that calls ``optimizer.step()``.

    Its arguments are those of the Trainer's strategy, but for what only a Trainer does.
    """

    strategy_name: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Documents a strategy: its arguments are those of the Trainer's, and of Fabric's own."""
        super().__init_subclass__(**kwargs)
        document(cls, WorkerGroupStrategy, cls, without=_OF_TRAINER)

    summary = """Trains one model on several worker groups joined by slow links, in a loop of Fabric.

    Each step of the optimizer that was set up last is an inner step. ``fabric.strategy.finish()`` ends training."""

    @staticmethod
    def base_arguments(
        *,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ddp_kwargs: dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
    ) -> dict[str, Any]:
        """Checks the arguments that only Fabric's strategy has, and returns those of its base class."""
        check_ddp_kwargs(ddp_kwargs)
        arguments = WholeModel.base_arguments(
            start_method=start_method,
            ddp_kwargs=ddp_kwargs,
            process_group_backend=process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
        )
        # Fabric calls the plugin by a shorter name.
        del arguments["precision_plugin"]
        return {**arguments, "precision": precision}

    def __init__(self, worker_groups: int | Literal["auto"] = "auto", **given: Any) -> None:
        shared = {
            name: parameter.default
            for name, parameter in inspect.signature(WorkerGroupStrategy.__init__).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        own = {name: value for name, value in given.items() if name not in shared or name in _OF_TRAINER}
        refuse_unknown(type(self), own)
        options = Options.of(worker_groups, **{**shared, **{n: v for n, v in given.items() if n not in own}})
        if options.auto.names:
            raise ValueError(
                f"{options.auto.names[0]}='auto' is for the Trainer's strategy, where the planner measures the first"
                " inner steps. Give a number; `sdiloco plan` says which suits a link."
            )
        # Nothing is started here: strategies are pickled.
        arguments = self.base_arguments(**own)
        self._options = options
        self._format = WholeModel(arguments)
        self._groups = ConnectedGroups()
        self._results = Results(options)
        self._wrapped: list[DistributedDataParallel] = []
        self._saves_with_all = self._saved_alone = False
        self._loop = Loop(options, self._groups, self._results)
        self._watch = BatchWatch(self._groups, _ADVICE)
        super().__init__(timeout=options.settings.timeout, **arguments)

    # What users call and read

    def finish(self) -> list[Landing]:
        """Ends training, after the last step and in all processes: the model is left with the outer parameters.

        Fragments in flight land, and with ``final_sync`` each then takes the plain mean of the groups' local
        parameters. Returns what landed.
        """
        return self._loop.finish()

    def idle_step(self) -> list[Landing]:
        """Makes an inner step in which this group does not train, where its loader yields None. Returns what landed."""
        return self._loop.idle_step()

    def note_trained(self, micro_batches: int) -> None:
        """Says how many micro-batches are trained in the inner step that comes next; see `StreamingDiLoCo.step`."""
        self._loop.trained = micro_batches

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Shows the outer model inside a ``with`` block, the same in all groups, and then the local one again.

        Until every fragment has landed once it shows the mean of the groups, because nobody has trained the outer model
        by then, and so it does on a route that does not share. So all ranks must call it.
        """
        engine = self.engine
        if engine is None or engine.is_finished:
            yield
            return
        mean = self._loop.mean_shown(engine)
        # A forward pass without gradients makes DistributedDataParallel skip the buffers of the next training step.
        due = [wrapped.require_forward_param_sync for wrapped in self._wrapped]
        try:
            with engine.evaluate(mean):
                yield
        finally:
            for wrapped, is_due in zip(self._wrapped, due, strict=True):
                wrapped.require_forward_param_sync = is_due

    @property
    def landings(self) -> list[Landing]:
        """What landed with the last inner step."""
        return self._loop.landings

    @property
    def engine(self) -> StreamingDiLoCo | None:
        """The engine; None before the first step of an optimizer."""
        return self._results.engine

    @property
    def topology(self) -> Topology:
        """Worker groups and the connections between them; known once processes are connected."""
        return self._groups.topology

    @property
    def schedule(self) -> Schedule:
        """When fragments launch and land. Known from the first step of an optimizer on."""
        return self._results.schedule

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments. Known from the first step of an optimizer on."""
        return self._results.fragments

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Returns the outer parameters; see `StreamingDiLoCo.outer_state_dict`."""
        return self._results.outer_state_dict()

    def report(self) -> dict[str, float]:
        """Returns what happened so far; see `StreamingDiLoCo.report`."""
        return self._results.report()

    # Start

    @override
    def _configure_launcher(self) -> None:
        # Inside Fabric(), before any process starts.
        check_fabric(self)
        self._groups.check(self, self._options, self._format)
        super()._configure_launcher()

    def set_world_ranks(self) -> None:
        """Tells the environment of processes which rank this is, as Fabric does."""
        self._set_world_ranks()

    @override
    def setup_environment(self) -> None:
        self._groups.connect(self, self._options, self._format, super().setup_environment)

    @property
    @override
    def root_device(self) -> torch.device:
        return only_device(self) or super().root_device

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def setup_module(self, module: nn.Module) -> Any:
        self._loop.add_module(module)
        self._ddp_kwargs["process_group"] = self.topology.in_group.process_group
        wrapped = super().setup_module(module)
        if self.topology.group_size > 2 and not (wrapped.static_graph or wrapped.find_unused_parameters):
            fix_bucket_order(wrapped)
        if self._options.federation is not None:
            wrapped.register_forward_pre_hook(self._loop.note_samples, with_kwargs=True)
        wrapped.register_forward_pre_hook(self._begin_batch)
        self._wrapped.append(wrapped)
        return wrapped

    def _begin_batch(self, module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._watch.begin()

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._loop.add_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    # Training

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, module, *args, **kwargs)
        self._watch.end()
        # Not where DistributedDataParallel still adds gradients up.
        if all(wrapped.require_backward_grad_sync for wrapped in self._wrapped):
            self._loop.average_gradients()

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        with self._loop.inner_step(optimizer):
            return super().optimizer_step(optimizer, **kwargs)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks, and explains what may be wrong if they do not come."""
        # Fabric waits after each save.
        saved_alone, self._saved_alone = self._saved_alone, False
        if saved_alone and self._is_alone:
            return
        with waiting_for_all(self._groups, args, self.engine):
            super().barrier(*args, **kwargs)

    # Checkpoints hold the outer model, and beside it a file per rank

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        engine = self.engine
        if engine is None or not self._loop.trains(module):
            return super().get_module_state_dict(module)
        with self._loop.shown_in_file(self._saves_with_all):
            state = super().get_module_state_dict(module)
            return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        save = super().save_checkpoint
        if self._is_alone:
            save(path, state, *args, **kwargs)
            self._saved_alone = True
            return
        self._saves_with_all = True
        try:
            if self.engine is None or not self._loop.is_saved_with(state):
                save(path, state, *args, **kwargs)
                return
            saved = self._loop.save(str(path), self.precision.state_dict())
            state = {**state, files.KEY: saved.header}
            write_common_file(saved, self.topology, partial(save, saved.path, state, *args, **kwargs))
            if self.is_global_zero:
                files.remove_saves(saved.path, saved.older)
        finally:
            self._saves_with_all = False

    @property
    def _is_alone(self) -> bool:
        """Whether this rank deals with an exception, and so must not wait for others, which may know of none."""
        exception = sys.exc_info()[1]
        return exception is not None and not isinstance(exception, StopIteration)

    @override
    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        is_own = self._loop.is_saved_with(state)
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        header = remainder.pop(files.KEY, None) if state else None
        if is_own and header is not None:
            self.precision.load_state_dict(self._loop.resume(str(path), {files.KEY: header}))
        return remainder
