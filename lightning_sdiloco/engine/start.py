"""The start of an engine, before its first step, and of rounds that restart.

An engine determines its place among the ranks, makes sure that all ranks start from the same
settings and model, and divides the model into fragments. Outer state is carried over by name when a
model is divided again (see `recut`), or when an earlier run is resumed.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_sdiloco.algorithm.config import AN_OUTER_OPTIMIZER, DEFAULT_TIMEOUT, Settings
from lightning_sdiloco.algorithm.gossip import check_legs
from lightning_sdiloco.algorithm.partition import Fragment, Partition, partition
from lightning_sdiloco.algorithm.reduce import kind_and_backend
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.exchange import DeviceBackend, nccl_on
from lightning_sdiloco.comm.topology import (
    GroupLayout,
    Topology,
    checked_worker_groups,
    is_connected,
    ranks_in,
    world,
)
from lightning_sdiloco.compression import FP4
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.matrices import stacks_of
from lightning_sdiloco.engine.outer import OuterState, ShardOptimizer, nesterov_step
from lightning_sdiloco.engine.shards import (
    OuterParameter,
    ShardedLayout,
    aliases,
    clean_name,
    described,
    described_sharding,
    digest,
    is_sharded,
    local,
    ranks_of,
    reshard,
    to_parameters,
    trainable,
)
from lightning_sdiloco.engine.weight_copies import WeightCopies, copies_in, parts_of
from lightning_sdiloco.launch.rendezvous import launched_processes

_log = logging.getLogger(__name__)

LEAST_USUAL_RATE = 0.05
"""An outer optimizer with a lower rate gets a warning."""

# The name of this setting in error messages.
_NUMBER = "the number of this engine in its process"


class WorkerGroups:
    """Divides the ranks of ``torch.distributed`` into worker groups before there is a model.

    Create it in all processes once ``torch.distributed`` is initialised. If groups have several
    ranks, wrap the model with its `process_group`. Pass the object to the engine as
    ``worker_groups``.

    Args:
        worker_groups: The number of worker groups; consecutive ranks form a group. ``"auto"`` makes
            one per process.
        timeout: The longest time that a fragment may be in flight.

    Attributes:
        topology: The topology of the ranks, for ``StreamingDiLoCo(topology=...)``.

    Raises:
        ValueError: If ``worker_groups`` is not a number of groups, differs between ranks, or does
            not divide the ranks.

    Examples:
        >>> groups = WorkerGroups()
        >>> groups.num_groups, groups.group_index, groups.group_size, groups.group_rank
        (1, 0, 1, 0)
    """

    def __init__(
        self, worker_groups: int | str = "auto", timeout: timedelta = DEFAULT_TIMEOUT
    ) -> None:
        self.topology = default_topology(worker_groups, timeout)

    @property
    def process_group(self) -> Any:
        """The ranks of this group, for ``DistributedDataParallel(model, process_group=...)``; None
        if the group has one rank.
        """
        return self.topology.in_group.process_group

    @property
    def num_groups(self) -> int:
        """The number of worker groups."""
        return self.topology.num_groups

    @property
    def group_index(self) -> int:
        """The worker group of this rank."""
        return self.topology.group_index

    @property
    def group_size(self) -> int:
        """The number of ranks in a group."""
        return self.topology.group_size

    @property
    def group_rank(self) -> int:
        """The number of this rank in its group."""
        return self.topology.group_rank


def topology_for(
    model: nn.Module,
    settings: Settings,
    worker_groups: int | str | WorkerGroups,
    topology: Topology | None,
) -> Topology:
    """Returns the worker groups of an engine: those that the caller passed, or new ones."""
    over_nccl = kind_and_backend(settings.exchange)[1] == "nccl"
    if topology is None and not isinstance(worker_groups, WorkerGroups):
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        on_device = nccl_on(device) if over_nccl else None
        return default_topology(worker_groups, settings.timeout, on_device)
    existing = topology or worker_groups.topology  # type: ignore[union-attr]
    if over_nccl and existing.num_groups > 1 and existing.exchange.device.type == "cpu":
        raise ValueError(
            f"exchange={settings.exchange!r} was given with existing worker groups, which exchange"
            " over gloo. Leave ':nccl' out, or give their number as worker_groups."
        )
    return existing


def default_topology(
    worker_groups: int | str, timeout: timedelta, on_device: DeviceBackend | None = None
) -> Topology:
    """Divides the default process group into worker groups; without a process group, there is one.
    All ranks must call it.
    """
    groups = checked_worker_groups(worker_groups)
    world_size = 1
    if is_connected():
        # This comes first, because ranks that create different process groups would wait for each
        # other.
        require_same_settings({"worker_groups": str(groups)}, world())
        world_size = world().size
    elif launched_processes() > 1:
        raise ValueError(
            f"WORLD_SIZE={launched_processes()} says that a launcher started {launched_processes()}"
            " processes, but torch.distributed is not initialised: each would train separately. Call"
            " torch.distributed.init_process_group() in all of them first, or remove WORLD_SIZE from"
            " the environment of a single process."
        )
    if isinstance(groups, str):
        groups = world_size
    layout = GroupLayout(world_size, groups)
    return Topology.of_world(layout, timeout, on_device=on_device) if is_connected() else Topology()


@torch.no_grad()
def agreed_fragments(
    model: nn.Module,
    settings: Settings,
    topology: Topology,
    copies: WeightCopies,
    *,
    is_site: bool = False,
) -> tuple[tuple[Fragment, ...], torch.device]:
    """Makes sure that all ranks start from the same settings and model, and divides it into
    fragments. All ranks must call it.
    """
    require_same_settings({**settings.described(), _NUMBER: str(topology.engine)}, topology.world)
    check_legs(settings.routing, topology.num_groups)
    require_same_model(model, topology.world)
    partition = cut(model, settings)
    device = next(iter(trainable(model).values())).device
    _say_what_is_unusual(partition, settings, topology, is_site)
    copies.watch(trainable(model))
    if align_model(model, topology):
        copies.align(topology)
    return partition.fragments, device


def cut(model: nn.Module, settings: Settings) -> Partition:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{clean_name(name)!r} has no shape yet: lazy modules get their shapes from the"
                " first batch, but the model is cut into fragments before it. Run a batch through"
                " the model before trainer.fit, for example at the end of its __init__."
            )
    parameters = trainable(model)
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ValueError(
                f"The trainable parameter {name!r} is {parameter.dtype}, which has no float32 outer"
                " value. Only real floating-point parameters can be exchanged. Store complex values"
                " as two real parameters, or freeze it."
            )
    frozen = [clean_name(name) for name, p in model.named_parameters() if not p.requires_grad]
    cut_by_size = partition(described(parameters), settings.fragments, aliases(model), frozen)
    if settings.outer.map is None:
        return cut_by_size
    stacks = stacks_of(model, settings.outer.matrices or {})
    fragments = list[Fragment]()
    for fragment in cut_by_size.fragments:
        fragments.append(replace(fragment, stacks=tuple(map(stacks.get, fragment.names))))
    return cut_by_size._replace(fragments=tuple(fragments))


@torch.no_grad()
def align_ranks(model: nn.Module, fragments: Sequence[FragmentState], topology: Topology) -> None:
    """Makes sharded parameters bit-identical on ranks that have the same values. In-group
    collective.
    """
    reshard(model)
    for fragment in fragments:
        # Ranks with whole parameters already have the same ones.
        if isinstance(fragment.layout, ShardedLayout):
            fragment.layout.write(fragment.gathered(topology.in_group))


def _say_what_is_unusual(
    partition: Partition, settings: Settings, topology: Topology, is_site: bool
) -> None:
    if topology.group_index or topology.group_rank:
        return
    if topology.num_groups == 1 and not is_site:
        _log.warning(
            "There is one worker group: this is plain training with an outer step. Nothing is sent,"
            " but compression still applies; compression='fp32' changes no value."
        )
    if partition.fell_back:
        _log.warning(
            "fragments=%r: the model has no repeated blocks, so its tensors are divided into %d"
            " balanced fragments. Give patterns to choose the fragments yourself.",
            settings.fragments,
            len(partition.fragments),
        )
    suits = settings.better_for_sparse(topology.num_groups)
    if suits:
        _log.warning(
            "outer_lr=%g and outer_momentum=%g are known not to suit compression=%r: unsent values"
            " add up until they are sent, so training is slow or diverges unless outer_lr / (1 -"
            " outer_momentum) is between %g and %g. Leave both out to get outer_lr=%g and"
            " outer_momentum=%g.",
            settings.outer_lr,
            settings.outer_momentum,
            settings.compression,
            *settings.gains_for_sparse,
            *suits.values(),
        )


def say_what_averages_twice(
    optimizers: Sequence[Optimizer], settings: Settings, topology: Topology
) -> None:
    """Warns once, on one rank, of an inner optimizer that averages its steps together with outer
    momentum.
    """
    averaging = list[str]()
    for optimizer in optimizers:
        parts = parts_of(optimizer)
        switched = [part for part in parts if hasattr(part, "train") and hasattr(part, "eval")]
        if not switched:
            continue
        innermost = switched[-1]
        # An optimizer that wraps another may only forward the calls, as accelerate's does. Then
        # nothing keeps a copy of the weights.
        if len(parts_of(innermost)) == 1 or copies_in(innermost):
            averaging.append(type(innermost).__name__)
    momentum = settings.numbers.get("outer_momentum", 0.0)
    if averaging and momentum > 0 and settings.outer.make is None and not topology.rank:
        _log.warning(
            "%s averages its steps, as schedule-free optimizers and GPA do, and outer_momentum=%g"
            " averages them once more. Give outer_lr=1 and outer_momentum=0 to leave it to the"
            " inner optimizer.",
            averaging[0],
            momentum,
        )


def say_what_trains_little(optimizer: ShardOptimizer, topology: Topology) -> None:
    """Warns once, on one rank, of an outer rate that suits gradients of batches but not of
    rounds.
    """
    if optimizer.highest_rate < LEAST_USUAL_RATE and not topology.rank:
        _log.warning(
            "The outer optimizer is %s. A rate of %g suits gradients of batches, but an outer step"
            " covers a whole round of training, so with rates below %g the outer model hardly"
            " follows the groups. Give outer_optimizer=%s, or leave outer_optimizer and outer_lr"
            " out.",
            optimizer.summary,
            optimizer.highest_rate,
            LEAST_USUAL_RATE,
            AN_OUTER_OPTIMIZER,
        )


# Settings and model must be the same on all ranks


def require_same_settings(settings: Mapping[str, str], world: Communicator) -> None:
    """Refuses settings that differ between ranks. All ranks must call it."""
    differences = _differences(world.all_gather_object(dict(settings)))
    if differences:
        raise ValueError(
            f"The settings of the strategy differ between ranks: {'; '.join(differences)}. All"
            " ranks must use the same. Start them with the same script and configuration."
        )


def require_same_start(start: str, world: Communicator) -> None:
    """Refuses ranks that start from different checkpoints, given a description of each start. All
    ranks must call it.
    """
    differences = _differences(world.all_gather_object({"the start": start}))
    if differences:
        raise ValueError(
            f"The ranks do not start from one checkpoint: {differences[0]}. Give all ranks the same"
            " one. If machines have separate disks, copy the file and the folder next to it to each"
            " of them."
        )


def require_same_model(model: nn.Module, world: Communicator) -> None:
    """Refuses models whose parameters differ in name, shape, dtype or order between ranks. All
    ranks must call it.
    """
    require_same_signatures(world.all_gather_object(signature(model)))
    is_on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    digest_of_known_values = rounding() if is_on_host else ""
    differences = _differences(
        world.all_gather_object({"what known values give": digest_of_known_values})
    )
    if differences:
        raise ValueError(
            f"The processors of these ranks round differently: {differences[0]}. Worker groups"
            " would drift apart. Train on machines whose processors have the same instructions, or"
            " set ATEN_CPU_CAPABILITY=default on all ranks to use only what every processor has."
        )


@cache
def rounding() -> str:
    """Returns a digest of the results that this processor computes from known values, with the
    arithmetic that must be bit-identical in all groups.
    """
    # Not random numbers, because torch's differ between processors.
    numbers = (torch.arange(3 * 4099, device="cpu") * 7919 % 2003 - 1001).to(torch.float32) / 997
    values, gradient, momentum = numbers.view(3, -1).clone().unbind()
    codec = FP4()
    mean = torch.empty_like(gradient)
    codec.mean([(codec.encode(gradient), 1 / 3), (codec.encode(momentum), 1.7)], mean)
    nesterov_step(values, mean, momentum, lr=0.7, factor=0.9)
    return f"{digest(mean) % 2**64:x}"


def require_own_group(model: nn.Module, topology: Topology) -> None:
    """Refuses a model that is also trained by ranks outside its worker group."""
    group_ranks = list(topology.ranks)
    for name, parameter in model.named_parameters():
        outside = sorted(set(ranks_of(parameter)) - set(group_ranks))
        if outside:
            raise ValueError(
                f"The parameter {name!r} is sharded over ranks of several worker groups:"
                f" {_listed(outside)} are outside this rank's. Shard the model over a mesh of"
                f" {_listed(group_ranks)}."
            )
    for name, module in model.named_modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ValueError(
                f"{_module(name)} is wrapped in FullyShardedDataParallel, whose flat parameters the"
                " worker groups cannot exchange by name. Use fully_shard over the ranks of the"
                " worker group."
            )
        if not isinstance(module, DistributedDataParallel):
            continue
        ranks = ranks_in(module.process_group)
        # The only rank of a group, such as a simulated worker group, may have any number.
        if ranks != group_ranks and max(len(ranks), topology.group_size) > 1:
            raise ValueError(
                f"{_module(name)} is wrapped in DistributedDataParallel over {_listed(ranks)}, but"
                f" this rank's worker group is {_listed(group_ranks)}: gradients must be averaged"
                " inside the group only, or all groups train in step. If groups have one rank, give"
                " the model unwrapped; otherwise wrap it with DistributedDataParallel(model,"
                f" process_group=WorkerGroups({topology.num_groups}).process_group). Fabric does so"
                " with strategy='streaming_diloco'."
            )


def _module(name: str) -> str:
    # The outermost module of a wrapper is the model itself, whatever its name there.
    inner_name = ".".join(
        word for word in name.split(".") if word not in ("_orig_mod", "_forward_module")
    )
    return f"The module {inner_name!r} of the model" if inner_name else "The model"


def _listed(ranks: list[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def align_model(model: nn.Module, topology: Topology) -> bool:
    """Gives all groups the parameters and buffers of the first group, and returns whether they
    differed. All ranks must call it.
    """
    ranks = _digests(model, topology)
    differed = not _are_alike(ranks, topology.group_size)
    if differed:
        _warn_of_exchanged_models([hash(rank) for rank in ranks], topology)
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(tensor, topology)
    return differed


def _warn_of_exchanged_models(ranks: list[int], topology: Topology) -> None:
    """Warns of ranks that passed an earlier engine the model that group 0 passes this one, and vice
    versa.

    Args:
        ranks: The hash of each rank's model.
        topology: The topology, which stores the hashes for later engines.
    """
    for earlier in topology.starts:
        exchanged = list[int]()
        for rank, model_hash in enumerate(ranks):
            same_shard = rank % topology.group_size  # The rank of the first group.
            was_swapped = model_hash == earlier[same_shard] and earlier[rank] == ranks[same_shard]
            if was_swapped and model_hash != ranks[same_shard]:
                exchanged.append(rank)
        if exchanged and not topology.rank:
            _log.warning(
                "Two models of one shape were exchanged: %s gave an earlier engine what rank 0"
                " gives this one, and vice versa. They now have rank 0's values under the other's"
                " name. Make engines in the same order on all ranks; sets, for example,"
                " have another order in each process.",
                _listed(exchanged),
            )
    topology.starts.append(ranks)


def align_at_end(model: nn.Module, topology: Topology) -> list[str]:
    """Gives all ranks the parameters and buffers of the first group where theirs differ. All ranks
    must call it.

    Returns the names of those that differed. Buffers that belong to a single rank, those with
    ``persistent=False``, are not changed, nor are tensors of different shapes or types.
    """
    reshard(model)
    tensors = _tensors_of_groups(model)
    held: dict[str, tuple[str, bool, int]] = {}
    for name, tensor in tensors.items():
        held[name] = _kind(tensor), is_sharded(tensor), digest(local(tensor))
    ranks = topology.world.all_gather_object(held)
    differing = list[str]()
    for name in dict.fromkeys(chain.from_iterable(ranks)):
        by_rank = [rank.get(name, (None, False, 0)) for rank in ranks]
        # Ranks have parts of a sharded tensor: each part is compared with the same part in the
        # first group.
        size = topology.group_size if by_rank[0][1] else 1
        if by_rank == [by_rank[rank % size] for rank in range(len(ranks))]:
            continue
        differing.append(name)
        if len({kind for kind, *_ in by_rank}) == 1:
            broadcast(tensors[name], topology)
    return differing


def _tensors_of_groups(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by name, without the buffers that belong to a single rank."""
    left_out = set[str]()
    for prefix, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            left_out.add(f"{prefix}.{key}" if prefix else key)
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {clean_name(name): tensor for name, tensor in tensors if name not in left_out}


def _kind(tensor: Tensor) -> str:
    """Describes shape, type and sharding of a parameter or buffer."""
    if is_lazy(tensor):
        return "without a shape"
    return f"{tuple(tensor.shape)} {tensor.dtype}{described_sharding(tensor)}"


def broadcast(tensor: Tensor, topology: Topology) -> None:
    """Gives all ranks a tensor of rank 0, or for a sharded tensor, the part of the corresponding
    rank in the first group.
    """
    ranks = topology.peers if is_sharded(tensor) else topology.world
    ranks.broadcast(local(tensor))


def is_aligned(model: nn.Module, topology: Topology) -> bool:
    """Returns whether the parameters and buffers of all groups are bit-identical. All ranks must
    call it.
    """
    return _are_alike(_digests(model, topology), topology.group_size)


class _Digests(NamedTuple):
    """The digests of the tensors that a rank has whole, and of those that it has in part."""

    full: tuple[int, ...]
    parts: tuple[int, ...]


def _digests(model: nn.Module, topology: Topology) -> list[_Digests]:
    """Returns the digests of all ranks."""
    reshard(model)
    tensors = [*model.parameters(), *model.buffers()]
    full = [digest(local(tensor)) for tensor in tensors if not is_sharded(tensor)]
    parts = [digest(local(tensor)) for tensor in tensors if is_sharded(tensor)]
    ranks = topology.world.all_gather_object((full, parts))
    return [_Digests(tuple(full), tuple(parts)) for full, parts in ranks]


def _are_alike(ranks: Sequence[_Digests], group_size: int) -> bool:
    for rank, digests in enumerate(ranks):
        if digests.full != ranks[0].full or digests.parts != ranks[rank % group_size].parts:
            return False
    return True


def require_same_signatures(signatures: list[dict[str, str]]) -> None:
    # Tensors are paired by order, so the order must also be the same.
    places = list[dict[str, str]]()
    for names in signatures:
        places.append({name: f"in place {place}" for place, name in enumerate(names)})
    differences = _differences(signatures) or _differences(places)
    if differences:
        shown = "; ".join(differences[:5])
        if len(differences) > 5:
            shown += f"; and {len(differences) - 5} more"
        raise ValueError(
            f"The model differs between ranks: {shown}. All ranks must build the same model, with"
            " the same names, shapes and dtypes. Do not let its construction depend on the rank. If"
            " a process trains several models, all ranks must make their engines in the same order."
        )


def signature(model: nn.Module) -> dict[str, str]:
    """Describes the properties of every parameter and buffer that must not differ between ranks, in
    order.
    """
    kinds = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        kinds[clean_name(name)] = _kind(tensor) + (" (frozen)" if is_frozen else "")
    return kinds


def _differences(ranks: list[dict[str, str]]) -> list[str]:
    """Returns a sentence for every key whose text is not the same on all ranks."""
    differences = []
    for name in dict.fromkeys(chain.from_iterable(ranks)):
        by_text: dict[str, list[int]] = {}
        for rank, texts in enumerate(ranks):
            by_text.setdefault(texts.get(name, "missing"), []).append(rank)
        if len(by_text) > 1:
            values = [f"{text} on {_some(holders)}" for text, holders in by_text.items()]
            differences.append(f"{name} is {', '.join(values)}")
    return differences


def _some(ranks: list[int]) -> str:
    """Lists up to eight ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = ", ..." if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more}"


# Rounds that restart


class NamedOuter(NamedTuple):
    """The whole outer state of all fragments, by name; ``rounds`` is the smallest number of outer
    steps so far.
    """

    parameters: Mapping[str, OuterParameter]
    untrained: Mapping[str, Tensor]
    rounds: int = 0


def named_outer(fragments: Sequence[FragmentState], in_group: Communicator) -> NamedOuter:
    """Joins the outer state of all fragments by name. In-group collective."""
    parameters: dict[str, OuterParameter] = {}
    untrained: dict[str, Tensor] = {}
    for fragment in fragments:
        shards = map(OuterState.of, in_group.all_gather_object(fragment.outer.state_dict()))
        parameters |= to_parameters(fragment.layout.state_dict(), list(shards))
        untrained |= fragment.untrained.named()
    return NamedOuter(parameters, untrained)


@torch.no_grad()
def start_from(
    fragments: Sequence[FragmentState], outer: NamedOuter, in_group: Communicator
) -> None:
    """Takes outer state by name. A parameter without outer state keeps its local value and starts
    without momentum.
    """
    # All fragments of a round have the same learning rate, including new ones.
    rounds = max([outer.rounds, *(parameter.rounds for parameter in outer.parameters.values())])
    for fragment in fragments:
        layout = fragment.layout
        parameters = dict(outer.parameters)
        if not parameters.keys() >= set(layout.names):
            shard = layout.read()
            local_values = layout.named(layout.all_gather(shard, in_group), shard, in_group)
            for name, values in local_values.items():
                parameters.setdefault(name, OuterParameter(values.flatten(), {}, rounds))
        outer_state = layout.to_shard([parameters[name] for name in layout.names])
        fragment.start_from(outer_state, outer.untrained)


def require_same_fragments(
    fragments: Sequence[FragmentState], saved: Sequence[Mapping[str, object]]
) -> None:
    names = [list(fragment.layout.names) for fragment in fragments]
    if [fragment["names"] for fragment in saved] != names:
        raise ValueError(
            f"The state has other fragments: {len(saved)} instead of {len(names)}, or with other"
            " parameters. Resume with the same model and the same fragments."
        )
