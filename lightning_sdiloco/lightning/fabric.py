"""Implements the Fabric strategy without its base class."""

import logging
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sdiloco.comm.watch import WorldWatch
from lightning_sdiloco.engine import checkpoint as files
from lightning_sdiloco.engine.checkpoint import (
    read_own,
    take_up_training,
    write_common_file,
    write_own,
)
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.fragments import Landing
from lightning_sdiloco.engine.shards import unwrapped
from lightning_sdiloco.engine.start import align_model, require_same_model
from lightning_sdiloco.engine.weight_copies import WeightCopies
from lightning_sdiloco.lightning.arguments import Argument
from lightning_sdiloco.lightning.evaluation import ShownModel
from lightning_sdiloco.lightning.fit import samples_in
from lightning_sdiloco.lightning.host import FABRIC, Forwarded, State, check_without_trainer, wrap
from lightning_sdiloco.lightning.model_format import (
    Load,
    WholeModel,
    check_ddp_kwargs,
    fix_bucket_order,
    may_fix_bucket_order,
    reader_of,
)
from lightning_sdiloco.lightning.monitor import Announcement
from lightning_sdiloco.lightning.strategy import GroupStrategy

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as _Base
else:
    _Base = object

_log = logging.getLogger(__name__)

_ADVICE = (
    "Pass group=fabric.strategy.topology.in_group.process_group to collectives. Use Fabric's own"
    " collectives, which span all ranks, only where you validate or save."
)


class FabricWorkerGroupStrategy(GroupStrategy, _Base):
    """Trains one model on multiple worker groups in a loop that calls ``optimizer.step()``.

    The strategy takes the same arguments as the Trainer's strategy, except those that require a
    Trainer.
    """

    summary = """Trains one model on multiple worker groups joined by slow links, in a Fabric loop.

    Each optimizer step is an inner step. With multiple optimizers, each batch in which at least one
    optimizer steps is an inner step. Call ``fabric.strategy.finish()`` to end training.

    Examples:
        >>> strategy = StreamingDiLoCoFabricStrategy(worker_groups=2, sync_every=50)
        >>> fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)  # doctest: +SKIP"""

    model_format = WholeModel

    @classmethod
    @override
    def _arguments(cls) -> dict[str, Argument]:
        arguments = super()._arguments()
        # Only a Trainer validates and resumes automatically.
        del arguments["evaluate"]
        del arguments["resume"]
        # Fabric has a shorter name for the plugin.
        parameter, text = arguments.pop("precision_plugin")
        arguments["precision"] = Argument(parameter.replace(name="precision"), text)
        return arguments

    @override
    def base_arguments(self, of_format: State) -> State:
        check_ddp_kwargs(of_format.get("ddp_kwargs"))
        precision = of_format.pop("precision", None)
        arguments = WholeModel.base_arguments(**of_format)
        del arguments["precision_plugin"]
        return {**arguments, "precision": precision}

    def __init__(self, *args: Forwarded, **arguments: Forwarded) -> None:
        super().__init__(*args, **arguments)
        if self._options.auto:
            raise ValueError(
                f"{self._options.auto[0]}='auto' works only with the Trainer's strategy, where the"
                " planner measures the first inner steps. Run `sdiloco plan` to get a recommended"
                " value for your link."
            )
        self._nets: list[nn.Module] = []
        self._wrapped: list[DistributedDataParallel] = []
        self._inner_optimizers: list[Optimizer] = []
        # True while the model being trained is set up again.
        self._is_set_up_again = False
        self._landings: list[Landing] = []
        # The samples and micro-batches trained since the last inner step.
        self._samples = 0
        self._trained = 1
        # The numbers of the optimizers that have stepped in the batch that has not been counted
        # yet.
        self._stepped = set[int]()
        self._saves_with_all = False
        # Whether a save without all ranks has just ended.
        self._saved_alone = False
        # The number of inner steps, for a warning at the end; empty once training is finished.
        self._unfinished: list[int] = []
        self._announcement: Announcement | None = None
        self._shown = ShownModel(self._groups, "fabric.save", warns=False)
        self._watch = WorldWatch(_ADVICE)
        check_without_trainer(self, FABRIC)

    # For users

    def finish(self) -> list[Landing]:
        """Ends training. Afterwards, the model contains the outer parameters.

        Call this method after the last step, in all processes. First, all fragments in flight land.
        Then every fragment is set to the plain mean of the groups' local parameters. The method
        returns the landings.
        """
        if self.engine is None:
            _log.warning(
                "fabric.strategy.finish() was called, but no optimizer from fabric.setup has"
                " stepped, so the worker groups have not exchanged anything."
            )
            return []
        if self._stepped:
            self._count_batch(self.engine)
        self._landings = self.engine.finish()
        self._unfinished.clear()
        return self._landings

    def idle_step(self) -> list[Landing]:
        """Takes an inner step without training.

        Call this method when this group's loader yields None.

        Returns the landings.
        """
        engine = self._begun()
        if self._stepped:
            self._count_batch(engine)
        self._step(engine, idle=True)
        return self._landings

    def note_trained(self, micro_batches: int) -> None:
        """Sets the number of micro-batches in the next inner step; see `StreamingDiLoCo.step`."""
        self._trained = micro_batches

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Provides the outer model inside a ``with`` block and restores the local model afterwards.

        The outer model is the same in all groups. Until every fragment has landed once, and on
        routes where groups have different outer parameters, the mean of the groups is used instead.
        All ranks must call this method.
        """
        engine = self.engine
        if engine is None or engine.is_finished:
            yield
            return
        if self._shown.mean is None and not self._shown.is_outer(engine):
            self._shown.exchange(engine)
        elif self._shown.mean is None and engine.fragmented_model.view.own_moved:
            self._shown.take_first_own(engine)
        with self._shown.showing(engine, self._wrapped):
            yield

    @property
    def landings(self) -> list[Landing]:
        """The landings of the last inner step."""
        return self._landings

    # Start

    @property
    @override
    def distributed_sampler_kwargs(self) -> State:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        if self.engine is not None and self.engine.is_finished:
            # Setting up a model after the end starts a new training run.
            self._nets = []
            self._inner_optimizers = []
            self._stepped.clear()
            self.results.engine = None
        self._refuse_batch_norm_over_all(module)
        if self._is_training(module):
            if not self._is_set_up_again:
                raise ValueError(
                    "This model is already being trained. Set up the model again together with its"
                    " optimizers, in all processes: model, optimizer = fabric.setup(model,"
                    " optimizer)."
                )
        else:
            require_same_model(module, self.topology.world)
            align_model(module, self.topology)
            self._nets.append(module)
        self._ddp_kwargs["process_group"] = self.topology.in_group.process_group
        wrapped = super().setup_module(module)
        if self.topology.group_size > 2 and may_fix_bucket_order(wrapped):
            fix_bucket_order(wrapped)
        wrapped.register_forward_pre_hook(self._begin_batch, with_kwargs=True)
        self._wrapped.append(wrapped)
        return wrapped

    def _refuse_batch_norm_over_all(self, module: nn.Module) -> None:
        """Refuses a SyncBatchNorm layer that gathers statistics over all worker groups."""
        if self.topology.num_groups == 1:
            return
        for name, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm) and part.process_group is None:
                raise ValueError(
                    f"{name!r} is a SyncBatchNorm layer over all ranks, so all worker groups would"
                    " wait for each other in every step. Convert the model with"
                    " nn.SyncBatchNorm.convert_sync_batchnorm(model,"
                    " fabric.strategy.topology.in_group.process_group)."
                )

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], *schedulers: Forwarded
    ) -> Forwarded:
        set_up = super().setup_module_and_optimizers
        engine = self.engine
        if engine is None or not self._is_training(module):
            return set_up(module, optimizers, *schedulers)
        # The model being trained now has different parameters or optimizers, which replace the
        # earlier ones.
        self._wrapped = [
            wrapped for wrapped in self._wrapped if unwrapped(wrapped) is not unwrapped(module)
        ]
        self._inner_optimizers = []
        self._stepped.clear()
        self._is_set_up_again = True
        try:
            results = set_up(module, optimizers, *schedulers)
        finally:
            self._is_set_up_again = False
        self._shown.forget()
        is_same = engine.fragmented_model.cut_model.is_same()
        if not all(self.topology.world.all_gather_object(is_same)):
            self._landings = engine.recut(self._inner_optimizers)
        else:
            engine.fragmented_model.use_optimizers(self._inner_optimizers)
        return results

    def _begin_batch(self, module: nn.Module, args: tuple[object, ...], kwargs: State) -> None:
        if module.training and torch.is_grad_enabled():
            if self._options.federation is not None:
                self._samples += samples_in([*args, *kwargs.values()]) or 1
            if not torch.compiler.is_compiling():
                self._watch.begin(self.topology)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._inner_optimizers.append(optimizer)
        if self._is_set_up_again:
            return super().setup_optimizer(optimizer)
        # An optimizer that was created before the model took rank 0's values may contain copies of
        # other values.
        copies = WeightCopies([optimizer])
        parameters = _parameters_of(optimizer)
        copies.watch({str(index): parameter for index, parameter in enumerate(parameters)})
        copies.align(self.topology)
        return super().setup_optimizer(optimizer)

    # Training

    @override
    def backward(
        self, tensor: Tensor, module: nn.Module | None, *args: Forwarded, **kwargs: Forwarded
    ) -> None:
        super().backward(tensor, module, *args, **kwargs)
        self._watch.end()

    @override
    def optimizer_step(self, optimizer: Forwarded, **kwargs: Forwarded) -> object:
        number = self._number_of(optimizer)
        if number is None:
            # This optimizer was not set up with this strategy.
            return super().optimizer_step(optimizer, **kwargs)
        engine = self._begun()
        # Groups that are launched together do not send the samples that a site sends.
        if self._announcement is None and engine.site is None:
            self._announcement = Announcement(engine)
        if engine.is_finished:
            raise RuntimeError(
                "An optimizer was stepped after fabric.strategy.finish(), when the worker groups"
                " had already merged their models. Call finish() once, after the last step. To"
                " continue training, set up the model and its optimizer again."
            )
        if number in self._stepped:
            # The previous batch ended without a step by the last optimizer.
            self._count_batch(engine)
        output = super().optimizer_step(optimizer, **kwargs)
        self._stepped.add(number)
        if number == len(self._inner_optimizers) - 1:
            self._count_batch(engine)
        return output

    def _number_of(self, optimizer: Optimizer) -> int | None:
        """Returns the number of an inner optimizer, or None for any other object."""
        numbers = {id(inner): number for number, inner in enumerate(self._inner_optimizers)}
        return numbers.get(id(optimizer))

    def _count_batch(self, engine: StreamingDiLoCo) -> None:
        self._step(engine, trained=self._trained, samples=max(1, self._samples))
        if self._announcement is not None:
            self._announcement.step()

    def _step(self, engine: StreamingDiLoCo, **trained: Forwarded) -> None:
        self._shown.forget()
        self._landings = engine.step(**trained)
        self._samples = 0
        self._trained = 1
        self._stepped.clear()
        self._unfinished[:] = [engine.inner_steps]

    def _begun(self) -> StreamingDiLoCo:
        engine = self.engine
        if engine is None:
            engine = self._begin()
            engine.join()
        return engine

    def _begin(self) -> StreamingDiLoCo:
        engine = StreamingDiLoCo(
            self._trained_net(),
            topology=self.topology,
            inner_optimizers=self._inner_optimizers,
            federation=self._options.federation,
            **vars(self._options.settings),
        )
        # Users validate and save between two inner steps, so batches are watched instead.
        if engine.watch is not None:
            engine.watch.stop()
        if self.engine is None and engine.topology.rank == 0:
            # Called when the strategy is garbage-collected, or at the end of the process.
            weakref.finalize(self, _warn_of_unfinished, self._unfinished)
        self.results.engine = engine
        self._announcement = None
        self._shown.forget()
        return engine

    def _trained_net(self) -> nn.Module:
        """Finds the module that contains the parameters of all inner optimizers."""
        trained = set[int]()
        for optimizer in self._inner_optimizers:
            trained.update(map(id, _parameters_of(optimizer)))
        for net in self._nets:
            if trained <= set(map(id, net.parameters())):
                return net
        raise ValueError(
            "No module that was passed to fabric.setup contains all parameters of the"
            f" {len(self._inner_optimizers)} optimizers. A strategy trains a single model. Combine"
            " the networks into one nn.Module, and set up this module before its optimizers."
        )

    @override
    def barrier(self, *args: Forwarded, **kwargs: Forwarded) -> None:
        # Fabric waits after each save.
        saved_alone = self._saved_alone
        self._saved_alone = False
        if saved_alone and self._is_alone:
            return
        with self._groups.waiting(args, self.engine):
            super().barrier(*args, **kwargs)

    # Checkpoints contain the outer model, with a file for each rank next to it

    @override
    def get_module_state_dict(self, module: nn.Module) -> State:
        engine = self.engine
        if engine is None or not self._is_training(module):
            return super().get_module_state_dict(module)
        local = partial(super().get_module_state_dict, module)
        state = self._shown.state_dict(engine, self._saves_with_all, local)
        if self._saves_with_all and self._shown.mean is not None:
            rank_zero_info(
                f"The checkpoint after inner step {engine.inner_steps} contains the mean of the"
                " worker groups, exchanged in float32. fabric.strategy.finish() would produce the"
                " same model."
            )
        elif engine.has_landed:
            rank_zero_info(
                f"The checkpoint after inner step {engine.inner_steps} contains the outer model."
                " This model does not include any training after the launches that landed last, and"
                f" each fragment is launched every {engine.rounds.settings.sync_every} steps."
                " Before you save the last checkpoint, call fabric.strategy.finish() in all"
                " processes to land the fragments in flight and compute the final mean."
            )
        return state

    @override
    def save_checkpoint(
        self, path: str | Path, state: State, *args: Forwarded, **kwargs: Forwarded
    ) -> None:
        save = super().save_checkpoint
        if self._is_alone:
            save(path, state, *args, **kwargs)
            self._saved_alone = True
            return
        self._saves_with_all = True
        try:
            if self.engine is None or not self._holds_optimizer(state):
                save(path, state, *args, **kwargs)
                return
            saved = write_own(
                str(path),
                self.topology,
                self.engine.rounds.settings,
                self.engine.state_dict(),
                self._inner_optimizers,
                self._of_ranks(state, *args, **kwargs),
                precision=self.precision.state_dict(),
                stepped=sorted(self._stepped),
            )
            state = {**state, files.KEY: saved.header}
            write_common_file(
                saved, self.topology, partial(save, saved.path, state, *args, **kwargs)
            )
            if self.is_global_zero:
                files.remove_saves(saved.path, saved.older)
        finally:
            self._saves_with_all = False

    def _of_ranks(
        self,
        state: State,
        storage_options: object = None,
        filter: State | None = None,
    ) -> State:
        """Returns the entries of a user's checkpoint that the engine does not train."""
        entries = State()
        for name, value in state.items():
            if self._number_of(value) is not None or self._is_training(value):
                continue
            entry = value
            if isinstance(value, nn.Module):
                entry = self.get_module_state_dict(value)
            elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                entry = value.state_dict()
            is_kept = (filter or {}).get(name)
            if is_kept is not None and isinstance(entry, dict):
                entry = {key: part for key, part in entry.items() if is_kept(key, part)}
            entries[name] = entry
        return entries

    def _is_training(self, module: object) -> bool:
        """Returns whether an object is the model that the engine is training."""
        if self.engine is None or not isinstance(module, nn.Module):
            return False
        return self.engine.model is unwrapped(module) and not self.engine.is_finished

    @property
    def _is_alone(self) -> bool:
        """Whether this rank is handling an exception and must not wait for other ranks."""
        exception = sys.exc_info()[1]
        return exception is not None and not isinstance(exception, StopIteration)

    def _holds_optimizer(self, state: object) -> bool:
        """Returns whether the user's state includes an inner optimizer."""
        if not isinstance(state, dict):
            return False
        return any(self._number_of(value) is not None for value in state.values())

    @override
    def load_checkpoint(
        self, path: str | Path, state: Forwarded = None, *args: Forwarded, **kwargs: Forwarded
    ) -> State:
        load = super().load_checkpoint
        if not self._holds_optimizer(state):
            remainder = load(path, state, *args, **kwargs)
            if state:
                remainder.pop(files.KEY, None)
            return remainder
        saved = State()

        def read(load_file: Load, *file: Forwarded, **how: Forwarded) -> State:
            """Reads rank 0's file and replaces its entries with this rank's saved entries."""
            checkpoint: State = load_file(*file, **how)
            if files.KEY in checkpoint:
                saved.update(
                    read_own(
                        str(path),
                        lambda: checkpoint,
                        self.topology,
                        self._options.settings,
                        len(self._inner_optimizers),
                        reader_of(load_file, **how),
                    )
                )
                del checkpoint[files.KEY]
            return checkpoint

        with ExitStack() as undo:
            wrap(undo, self.checkpoint_io, "load_checkpoint", read)
            remainder = load(path, state, *args, **kwargs)
        if saved:
            self._resume(saved)
        return remainder

    def _resume(self, saved: State) -> None:
        """Creates an engine that continues from the state that this rank saved."""
        if self.engine is not None:
            self.engine.close()
        # This must happen before the random state is restored, because it may draw random numbers.
        engine = self._begin()
        take_up_training(saved, self._inner_optimizers)
        engine.load_state_dict(saved["engine"])
        engine.join()
        self.precision.load_state_dict(dict(saved["precision"]))
        self._stepped = set(saved["stepped"])


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _warn_of_unfinished(inner_steps: list[int]) -> None:
    if inner_steps:
        _log.warning(
            "Training ended after %d inner steps without a call to fabric.strategy.finish()."
            " Fragments in flight are lost, and each worker group ended with a different model."
            " Call fabric.strategy.finish() in all processes after the last step.",
            inner_steps[0],
        )
