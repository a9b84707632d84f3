"""Stands in for the processes of a strategy: every rank is a thread of this process."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_sdiloco.comm import Topology
from lightning_sdiloco.lightning import ConnectedGroups, in_batch
from lightning_sdiloco.tools.simulate.site import SimulatedFederation

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


def _nothing() -> None:
    pass


class SimulatedRank(NamedTuple):
    """The rank that a thread plays. It is a worker group of its own."""

    topology: Topology
    clock: Callable[[], float]
    site: int | None = None
    sites: int = 1
    begins: Callable[[], None] = _nothing
    step_time: float = 0.0

    @property
    def rank(self) -> int:
        """Its number among all ranks that train, each on its part of the data."""
        return self.topology.group_index if self.site is None else self.site

    @property
    def ranks(self) -> int:
        """How many ranks train."""
        return self.topology.num_groups if self.site is None else self.sites


class SimulatedProcessesMixin(_Base):
    """Replaces, below a strategy, what DDPStrategy does with processes. Call `play` before the Trainer is made."""

    simulated_rank: SimulatedRank
    _groups: ConnectedGroups
    _options: Any
    reset_seed: Callable[[], None]

    def play(self, rank: SimulatedRank) -> None:
        """Sets the rank that this strategy plays."""
        self.simulated_rank = rank
        federation = self._options.federation
        if federation is not None:
            # Only now: jsonargparse makes no subclass of a dataclass.
            self._options = replace(self._options, federation=SimulatedFederation(**vars(federation)))

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[0]

    @property
    @override
    def num_processes(self) -> int:
        return self.simulated_rank.ranks

    @property
    @override
    def world_size(self) -> int:
        return self.simulated_rank.ranks

    @property
    @override
    def global_rank(self) -> int:
        return self.simulated_rank.rank

    @property
    @override
    def local_rank(self) -> int:
        return self.simulated_rank.rank

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @override
    def set_world_ranks(self) -> None:
        """Does nothing: the thread has its rank from the start."""

    @override
    def _configure_launcher(self) -> None:
        self._launcher = None

    @override
    def setup_environment(self) -> None:
        self.reset_seed()
        self._groups.use(self.simulated_rank.topology)
        assert self.lightning_module is not None
        for metric in (part for part in self.lightning_module.modules() if isinstance(part, Metric)):
            if metric.dist_sync_fn is None and metric.process_group is None:
                metric.distributed_available_fn = _always
                metric.dist_sync_fn = _GatherSimulatedMetric(self)

    @override
    def _setup_model(self, model: nn.Module) -> Any:
        # One rank alone: there is nothing for DistributedDataParallel to reduce.
        return model

    @override
    def _register_ddp_hooks(self) -> None:
        """Does nothing: see `_setup_model`."""

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.simulated_rank.topology.world.all_gather_object(args)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.simulated_rank.topology.world.all_gather_object(obj)[src]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return _reduced(torch.stack(self.simulated_rank.topology.world.all_gather(tensor)), reduce_op).to(tensor.dtype)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return torch.stack(
            [tensor] if in_batch(self.lightning_module) else self.simulated_rank.topology.world.all_gather(tensor)
        )


def _reduced(ranks: Tensor, reduce_op: Any) -> Tensor:
    name = str(reduce_op).rpartition(".")[2].lower()
    if name in ("mean", "avg"):
        return ranks.sum(dim=0) / len(ranks)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda ranks: ranks.sum(dim=0),
        "max": lambda ranks: ranks.amax(dim=0),
        "min": lambda ranks: ranks.amin(dim=0),
        "product": lambda ranks: ranks.prod(dim=0),
    }
    if name not in functions:
        raise ValueError(f"reduce_op={reduce_op!r} cannot be simulated. Use mean, sum, max or min.")
    return functions[name](ranks)


class _GatherSimulatedMetric:
    """Gathers a state of a torchmetrics metric among threads: of this group inside a batch, of all groups otherwise."""

    def __init__(self, strategy: SimulatedProcessesMixin) -> None:
        self._strategy = strategy

    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        if in_batch(self._strategy.lightning_module):
            return [value]
        # As objects: the shapes may differ.
        return list(self._strategy.simulated_rank.topology.world.all_gather_object(value))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_GatherSimulatedMetric":
        # A copy of the module must not copy the strategy.
        return self


def _always() -> bool:
    return True
