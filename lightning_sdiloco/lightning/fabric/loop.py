"""The training loop of a user of Fabric as the strategy sees it: a model, its optimizers, and the engine."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_sdiloco.engine import (
    GroupMean,
    Landing,
    Saved,
    StreamingDiLoCo,
    align_model,
    read_own,
    require_same_model,
    unwrapped,
    write_own,
)
from lightning_sdiloco.lightning.announcement import Announcement
from lightning_sdiloco.lightning.inner_steps import samples_in
from lightning_sdiloco.lightning.options import Options
from lightning_sdiloco.lightning.results import Results
from lightning_sdiloco.lightning.worker_groups import ConnectedGroups

_log = logging.getLogger(__name__)


class Loop:
    """Makes an inner step of every step of an optimizer."""

    def __init__(self, options: Options, groups: ConnectedGroups, results: Results) -> None:
        self._settings = options.settings
        self._federation = options.federation
        self._groups = groups
        self._results = results
        self._nets: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self.landings: list[Landing] = []
        self._samples, self.trained = 0, 1
        self._unfinished = _Unfinished()
        self._announcement: Announcement | None = None
        # What was exchanged since the last inner step, for all who evaluate and save before the next one.
        self._mean: GroupMean | None = None

    @property
    def engine(self) -> StreamingDiLoCo | None:
        """The engine; None before the first step of an optimizer."""
        return self._results.engine

    # Setup

    def add_module(self, module: nn.Module) -> None:
        """Makes all ranks start from the same values of a module that Fabric sets up."""
        if self.engine is not None and self.engine.is_finished:
            # Whoever sets up a model after the end begins to train anew.
            self._nets, self._optimizers = [], []
            self._results.forget()
        topology = self._groups.topology
        for name, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm) and part.process_group is None and topology.num_groups > 1:
                raise ValueError(
                    f"{name!r} is a SyncBatchNorm over all ranks, so that all worker groups would wait for each other"
                    " in every step. Convert the model with nn.SyncBatchNorm.convert_sync_batchnorm(model,"
                    " fabric.strategy.topology.in_group.process_group)."
                )
        require_same_model(module, topology.world)
        align_model(module, topology)
        self._nets.append(module)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Notes an optimizer that Fabric sets up."""
        self._optimizers.append(optimizer)

    def trains(self, module: Any) -> bool:
        """Tells whether the engine trains a module, so that groups hold different values of it."""
        return self.engine is not None and self.engine.is_training(unwrapped(module))

    # Inner steps

    def note_samples(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes on how many samples a model is about to be trained; a hook before its forward pass."""
        if module.training and torch.is_grad_enabled():
            self._samples += samples_in([*args, *kwargs.values()]) or 1

    @contextmanager
    def inner_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Makes an inner step after its ``with`` block, in which an optimizer steps."""
        if not any(optimizer is one for one in self._optimizers):
            # It was not set up with this strategy, so it is none of ours.
            yield
            return
        engine = self._begun()
        # What a fixed world sends is not what a site does.
        if self._announcement is None and engine.site is None:
            self._announcement = Announcement(engine, self._trained())
        if engine.is_finished:
            raise RuntimeError(
                "An optimizer was stepped after fabric.strategy.finish(): the worker groups have joined. Call finish()"
                " once, after the last step; to train on, set up the model and its optimizer again."
            )
        yield
        if optimizer is self._optimizers[-1]:
            self._step(engine, trained=self.trained, samples=max(1, self._samples))
            if self._announcement is not None:
                self._announcement.step()

    def idle_step(self) -> list[Landing]:
        """Makes an inner step in which this group does not train. Returns what landed."""
        self._step(self._begun(), idle=True)
        return self.landings

    def _step(self, engine: StreamingDiLoCo, **trained: Any) -> None:
        self._mean = None
        self.landings = engine.step(**trained)
        self._samples, self.trained = 0, 1
        self._unfinished.inner_steps = engine.inner_steps

    def average_gradients(self) -> None:
        """Takes the mean of the gradients over the groups in the warm-up, once an optimizer is set up."""
        # One that was resumed may still be in the warm-up that it had.
        engine = self._begun() if self._settings.warmup_steps and self._optimizers else self.engine
        if engine is not None and engine.is_warming_up:
            engine.average_gradients()

    def _begun(self) -> StreamingDiLoCo:
        engine = self.engine
        if engine is None:
            engine = self._begin()
            engine.join()
        return engine

    def _begin(self) -> StreamingDiLoCo:
        engine = StreamingDiLoCo(
            self._trained(),
            topology=self._groups.topology,
            inner_optimizers=self._optimizers,
            federation=self._federation,
            **vars(self._settings),
        )
        if self.engine is None and engine.topology.rank == 0:
            # Called when the loop is dropped, or at the end of the process.
            weakref.finalize(self, self._unfinished.warn)
        self._results.read(engine)
        self._announcement = self._mean = None
        return engine

    def _trained(self) -> nn.Module:
        """Returns the module that has the parameters of all optimizers."""
        stepped = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        for module in self._nets:
            if stepped <= {id(parameter) for parameter in module.parameters()}:
                return module
        raise ValueError(
            f"No module that fabric.setup was given has all parameters of the {len(self._optimizers)} optimizers. One"
            " strategy trains one model: put the networks into one nn.Module, set that up, and then its optimizers."
        )

    def finish(self) -> list[Landing]:
        """Ends training; see `StreamingDiLoCo.finish`. Returns what landed."""
        if self.engine is None:
            _log.warning(
                "fabric.strategy.finish() was called, and no optimizer that was set up with fabric.setup has stepped:"
                " the worker groups have exchanged nothing."
            )
            return []
        self.landings = self.engine.finish()
        self._unfinished.inner_steps = 0
        return self.landings

    # What is evaluated and saved

    def mean_shown(self, engine: StreamingDiLoCo) -> GroupMean | None:
        """Returns the mean of the groups where it stands for the outer model. Then all ranks must call it."""
        if self._mean is None and not (engine.has_landed and engine.settings.shares):
            self._mean = engine.group_mean()
        return self._mean

    def shown_in_file(self, with_all: bool) -> AbstractContextManager[None]:
        """Shows the model that a checkpoint holds, inside a ``with`` block, and says what it lacks."""
        engine = self.engine
        assert engine is not None, "before training the model is what it is"
        step = engine.inner_steps
        if with_all and not (engine.has_landed and engine.settings.shares):
            rank_zero_info(
                f"The checkpoint after inner step {step} holds the mean of the worker groups, for which these exchanged"
                " all fragments in float32: what fabric.strategy.finish() would end with."
            )
            return engine.evaluate(self.mean_shown(engine))
        if not engine.has_landed:
            _log.warning(
                "A state_dict of worker group %d is taken after inner step %d, before every fragment has landed once."
                " It holds the local values of this group: in an exception handler, or for one rank alone, the groups"
                " do not exchange. fabric.save, called on all ranks, saves the mean of the groups.",
                self._groups.topology.group_index,
                step,
            )
            return nullcontext()
        rank_zero_info(
            f"The checkpoint after inner step {step} holds the outer model, without what the worker groups trained"
            f" since the launches that landed last, of which each fragment has one in"
            f" {engine.settings.sync_every} steps. Before you save the last one call fabric.strategy.finish(), in all"
            " processes: it lands what is in flight, and takes the last mean."
        )
        return engine.evaluate()

    def is_saved_with(self, state: Any) -> bool:
        """Tells whether what a user saves or loads is this loop: an optimizer that was set up is part of it."""
        return isinstance(state, dict) and any(value is one for value in state.values() for one in self._optimizers)

    def save(self, path: str, precision: dict[str, Any]) -> Saved:
        """Writes the files of all ranks; see `write_ranks`."""
        engine = self.engine
        assert engine is not None, "there is nothing to save beside a checkpoint before training"
        topology, state = self._groups.topology, engine.state_dict()
        return write_own(path, topology, engine.settings, state, self._optimizers, precision=precision)

    def resume(self, path: str, header: dict[str, Any]) -> dict[str, Any]:
        """Goes on where this rank was when a checkpoint was saved. All ranks must call it."""
        if self.engine is not None:
            self.engine.close()
        # Before the random numbers are restored, because it may draw some.
        engine = self._begin()
        own = read_own(path, lambda: header, self._groups.topology, self._settings, self._optimizers)
        engine.load_state_dict(own["engine"])
        engine.join()
        return dict(own["precision"])


@dataclass
class _Unfinished:
    """Remembers whether training was finished, beyond the loop."""

    inner_steps: int = 0

    def warn(self) -> None:
        """Warns if it has not been."""
        if self.inner_steps:
            _log.warning(
                "Training ended after %d inner steps without fabric.strategy.finish(): what was in flight is lost, and"
                " each worker group ended with a model of its own. Call it in all processes after the last step.",
                self.inner_steps,
            )
