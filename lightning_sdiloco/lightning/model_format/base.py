"""The interface behind which a worker group either holds the model whole on every rank, or shares it among its ranks.

All that depends on this stands behind the interface: the arguments of Lightning's strategy, the shape of a group, and
the model and the inner optimizers in a checkpoint.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from lightning_sdiloco.comm import GroupLayout, Topology
from lightning_sdiloco.lightning.checkpoint.placement import Placing

Checkpoint = dict[str, Any]
Save = Callable[[Checkpoint, Any, Any], None]
Load = Callable[..., Checkpoint]


class ModelFormat(ABC):
    """What differs between groups that hold the model whole and groups that share it."""

    summary: ClassVar[str]

    @abstractmethod
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Takes what `base_arguments` returned."""

    @staticmethod
    @abstractmethod
    def base_arguments() -> dict[str, Any]:
        """Checks the arguments that only this format has, and returns those of Lightning's strategy."""

    # The shape of a group

    @abstractmethod
    def layout(self, worker_groups: int | Literal["auto"], num_nodes: int, num_processes: int) -> GroupLayout:
        """Returns which ranks form a worker group."""

    @abstractmethod
    def described(self) -> dict[str, str]:
        """Returns the arguments of this format as text, which must be the same on all ranks."""

    @abstractmethod
    def saved_layout(self, topology: Topology) -> dict[str, int]:
        """Returns what must be the same if ranks are to read their own files of a checkpoint."""

    @abstractmethod
    def connect_processes(self, host: Any, set_up: Callable[[], None]) -> None:
        """Connects the processes as Lightning does."""

    @abstractmethod
    def join(self, host: Any, topology: Topology, layout: GroupLayout, timeout: timedelta) -> None:
        """Prepares the ranks of a group for the model, as soon as all processes are connected."""

    @abstractmethod
    def sampler_kwargs(self, topology: Topology) -> dict[str, Any]:
        """Returns the number of ranks over which data is divided, and which of them this one is."""

    # The model

    @abstractmethod
    def refuse(self, trainer: Any, precision: Any) -> None:
        """Raises a `ValueError` if the trainer has something that cannot work with this format."""

    @abstractmethod
    def set_up_without_fit(self, host: Any, set_up: Callable[[Any], None], trainer: Any, align: bool) -> None:
        """Sets up validation, testing or prediction."""

    def before_optimizers(self, module: nn.Module, topology: Topology) -> bool:
        """Checks a model that is about to get its optimizers."""
        return False

    def wrap(self, host: Any, module: nn.Module, topology: Topology, wrap: Callable[[nn.Module], Any]) -> Any:
        """Wraps a model for training inside its group."""
        return wrap(module)

    @abstractmethod
    def wrap_anew(self, host: Any, topology: Topology, wrap: Callable[[nn.Module], Any]) -> None:
        """Wraps the model again, when other parameters are trainable than before; see `wrap`."""

    @abstractmethod
    def begin_validation(self, model: Any) -> None:
        """Notes what validation on other parameters must not change."""

    @abstractmethod
    def end_validation(self, model: Any) -> None:
        """Restores what `begin_validation` noted."""

    # Checkpoints

    @abstractmethod
    def local_state_dict(self, module: nn.Module, state_dict: Callable[[], Checkpoint]) -> Checkpoint:
        """Returns the local parameters without waiting for another rank."""

    @abstractmethod
    def optimizer_state(self, optimizer: Optimizer, state_of: Callable[[Optimizer], Any], is_alone: bool) -> Any:
        """Returns the state of an inner optimizer for the part of a checkpoint that all groups share."""

    @abstractmethod
    def optimizer_states(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer]) -> list[Any]:
        """Returns the states of the inner optimizers as this rank holds them."""

    @abstractmethod
    def holds_the_same(self, saved: Mapping[str, int], own: Mapping[str, int]) -> bool:
        """Returns whether, by their layouts, a saved rank held the same part of the inner optimizers as one here."""

    @abstractmethod
    def write(
        self, host: Any, topology: Topology, checkpoint: Checkpoint, path: Any, storage_options: Any, save: Save
    ) -> None:
        """Writes what all groups have in common. All ranks must call it."""

    @abstractmethod
    def after_write(self, checkpoint: Checkpoint, path: Any, topology: Topology, placing: Placing | None) -> None:
        """Removes what a checkpoint replaces, if no CheckpointIO wrote the checkpoint."""

    @abstractmethod
    def read(self, host: Any, path: Any, load: Load, *args: Any, **kwargs: Any) -> Checkpoint:
        """Reads what all groups have in common. All ranks must call it."""

    @abstractmethod
    def take_up_optimizers(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer], states: list[Any]) -> None:
        """Puts what this rank saved of its inner optimizers in place of what rank 0 saved."""

    @abstractmethod
    def start_optimizers_afresh(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer]) -> None:
        """Drops the state of the inner optimizers, except the learning rates from which schedulers go on."""


def by_node_or_device(worker_groups: int | Literal["auto"], num_nodes: int, num_processes: int) -> GroupLayout:
    """Returns the layout for ``worker_groups``; ``"auto"`` is a group per node, or per device of a single node."""
    world_size = num_nodes * num_processes
    automatic = num_nodes if num_nodes > 1 else world_size
    return GroupLayout(world_size, automatic if isinstance(worker_groups, str) else worker_groups)
