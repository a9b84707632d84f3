"""What an engine does before its first step: it finds its place among the ranks, and cuts the model into fragments."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_sdiloco.algorithm import (
    DEFAULT_TIMEOUT,
    Fragment,
    Partition,
    Settings,
    check_legs,
    kind_and_backend,
    partition,
)
from lightning_sdiloco.comm import (
    DeviceBackend,
    GroupLayout,
    Topology,
    checked_worker_groups,
    is_connected,
    nccl_on,
    world,
)
from lightning_sdiloco.engine.agreement import align_model, require_same_model, require_same_settings
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.shards import ShardedLayout, aliases, clean_name, described, reshard, trainable

_log = logging.getLogger(__name__)


class WorkerGroups:
    """Divides the ranks of ``torch.distributed`` into worker groups, before there is a model.

    Make it in all processes, once ``torch.distributed`` is initialised. Where a group has several ranks, the model is
    wrapped with its `process_group`, and the engine takes the object as its ``worker_groups``.

    Args:
        worker_groups: Number of worker groups, of consecutive ranks. ``"auto"``: one per process.
        timeout: How long a fragment may be in flight.

    Attributes:
        topology: The ranks, for ``StreamingDiLoCo(topology=...)``.

    Raises:
        ValueError: If it is no number of groups, differs between ranks, or does not divide the ranks.

    Examples:
        >>> groups = WorkerGroups()
        >>> groups.num_groups, groups.group_index, groups.group_size, groups.group_rank
        (1, 0, 1, 0)
    """

    def __init__(self, worker_groups: int | str = "auto", timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self.topology = default_topology(worker_groups, timeout)

    @property
    def process_group(self) -> Any:
        """The ranks of this group, for ``DistributedDataParallel(model, process_group=...)``; None if it is alone."""
        return self.topology.in_group.process_group

    @property
    def num_groups(self) -> int:
        """Number of worker groups."""
        return self.topology.num_groups

    @property
    def group_index(self) -> int:
        """The worker group of this rank."""
        return self.topology.group_index

    @property
    def group_size(self) -> int:
        """Number of ranks in a group."""
        return self.topology.group_size

    @property
    def group_rank(self) -> int:
        """The number of this rank in its group."""
        return self.topology.group_rank


def topology_for(
    model: nn.Module, settings: Settings, worker_groups: int | str | WorkerGroups, topology: Topology | None
) -> Topology:
    """Returns the worker groups of an engine: those that were given, or those that it makes."""
    over_nccl = kind_and_backend(settings.exchange)[1] == "nccl"
    if topology is None and not isinstance(worker_groups, WorkerGroups):
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return default_topology(worker_groups, settings.timeout, nccl_on(device) if over_nccl else None)
    made = topology or worker_groups.topology  # type: ignore[union-attr]
    if over_nccl and made.num_groups > 1 and made.exchange.device.type == "cpu":
        raise ValueError(
            f"exchange={settings.exchange!r} was given with worker groups that were made before, and exchange over"
            " gloo. Leave ':nccl' out, or give their number as worker_groups."
        )
    return made


def default_topology(worker_groups: int | str, timeout: timedelta, on_device: DeviceBackend | None = None) -> Topology:
    """Divides the default process group into worker groups; one group where there is none. All ranks must call it."""
    groups = checked_worker_groups(worker_groups)
    if is_connected():
        # Before the process groups are made: ranks that make different ones would wait for each other.
        require_same_settings({"worker_groups": str(groups)}, world())
    world_size = world().size if is_connected() else 1
    layout = GroupLayout(world_size, world_size if isinstance(groups, str) else groups)
    return Topology.of_world(layout, timeout, on_device=on_device) if is_connected() else Topology()


@torch.no_grad()
def agreed_fragments(
    model: nn.Module, settings: Settings, topology: Topology, *, is_site: bool = False
) -> tuple[tuple[Fragment, ...], torch.device]:
    """Makes sure that all ranks start from the same settings and model, and cuts it. All ranks must call it."""
    require_same_settings(settings.described(), topology.world)
    check_legs(settings.routing, topology.num_groups)
    require_same_model(model, topology.world)
    partition = cut(model, settings)
    device = next(iter(trainable(model).values())).device
    _say_what_is_unusual(partition, settings, topology, is_site)
    align_model(model, topology)
    return partition.fragments, device


def cut(model: nn.Module, settings: Settings) -> Partition:
    """Cuts a model into fragments."""
    _require_initialised(model)
    parameters = trainable(model)
    _require_real(parameters)
    frozen = [clean_name(name) for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return partition(described(parameters), settings.fragments, aliases(model), frozen)


@torch.no_grad()
def align_ranks(model: nn.Module, fragments: Sequence[FragmentState], topology: Topology) -> None:
    """Gives ranks that hold the same values of sharded parameters the same bits of them. In-group collective."""
    reshard(model)
    for fragment in fragments:
        # Ranks that hold whole parameters have the same ones.
        if isinstance(fragment.layout, ShardedLayout):
            fragment.layout.write(fragment.gathered(topology.in_group))


def _say_what_is_unusual(partition: Partition, settings: Settings, topology: Topology, is_site: bool) -> None:
    """Warns once, on one rank, of what a user may not expect."""
    if topology.group_index or topology.group_rank:
        return
    if topology.num_groups == 1 and not is_site:
        _log.warning(
            "There is one worker group: this is plain training with an outer step. Nothing travels, but compression"
            " still applies; compression='fp32' changes no value."
        )
    if partition.fell_back:
        _log.warning(
            "fragments=%r: no repeated blocks were found in the model, so its tensors are distributed over %d"
            " balanced fragments. Give patterns to choose the fragments yourself.",
            settings.fragments,
            len(partition.fragments),
        )
    _say_what_does_not_suit(settings, topology.num_groups)


def _say_what_does_not_suit(settings: Settings, num_groups: int) -> None:
    if suits := settings.better_for_sparse(num_groups):
        _log.warning(
            "outer_lr=%g and outer_momentum=%g are known not to suit compression=%r: what is not sent adds up until it"
            " is, so that training is slow or diverges where outer_lr / (1 - outer_momentum) is not between %g and %g."
            " Leave both out, which chooses outer_lr=%g and outer_momentum=%g.",
            settings.outer_lr,
            settings.outer_momentum,
            settings.compression,
            *settings.gains_for_sparse,
            *suits.values(),
        )


def say_what_averages_twice(optimizers: Sequence[Optimizer], settings: Settings, topology: Topology) -> None:
    """Warns once, on one rank, of an inner optimizer that averages its steps under an outer momentum."""
    averaging = [type(one).__name__ for one in optimizers if hasattr(one, "train") and hasattr(one, "eval")]
    momentum = settings.numbers.get("outer_momentum", 0.0)
    if averaging and momentum > 0 and settings.outer.make is None and not topology.rank:
        _log.warning(
            "%s averages the steps that it makes, as schedule-free optimizers and GPA do, and outer_momentum=%g"
            " averages them once more. outer_lr=1 and outer_momentum=0 leave it to the inner optimizer.",
            averaging[0],
            momentum,
        )


def _require_initialised(model: nn.Module) -> None:
    tensors = chain(model.named_parameters(), model.named_buffers())
    lazy = [clean_name(name) for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{lazy[0]!r} has no shape yet: lazy modules get their shapes from the first batch, and the model is cut"
            " into fragments before it. Run a batch through the model before trainer.fit, for example at the end of"
            " its __init__."
        )


def _require_real(parameters: dict[str, Tensor]) -> None:
    other = [name for name, parameter in parameters.items() if not parameter.is_floating_point()]
    if other:
        raise ValueError(
            f"The trainable parameter {other[0]!r} is {parameters[other[0]].dtype}, which has no float32 outer value."
            " Only real floating-point parameters can be synchronised. Store complex values as two real parameters, or"
            " freeze it."
        )
