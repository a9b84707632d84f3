"""Checks and sets up an engine before its first step, and starts rounds from existing outer state.

An engine assigns its ranks to worker groups, ensures that all ranks start with the same settings
and model, and divides the model into fragments. When a model is divided again (see `recut`) or an
earlier run is resumed, outer state is transferred by name.
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
"""The outer learning rate below which a warning is logged."""

# The name of this setting in error messages.
_NUMBER = "the number of this engine in its process"


class WorkerGroups:
    """Divides the ``torch.distributed`` ranks into worker groups before the model is created.

    Create this object in all processes after ``torch.distributed`` is initialised. If groups have
    more than one rank, wrap the model using `process_group`. Then pass the object to the engine as
    ``worker_groups``.

    Args:
        worker_groups: The number of worker groups. Consecutive ranks form a group. With ``"auto"``,
            each process is a group.
        timeout: The maximum time that a fragment may be in flight.

    Attributes:
        topology: The topology of the ranks, which can be passed as
            ``StreamingDiLoCo(topology=...)``.

    Raises:
        ValueError: If ``worker_groups`` is not a valid number, differs between ranks, or does not
            divide the number of ranks evenly.

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
        """This worker group's process group for ``DistributedDataParallel``, or None if there is
        only one rank.
        """
        return self.topology.in_group.process_group

    @property
    def num_groups(self) -> int:
        """The number of worker groups."""
        return self.topology.num_groups

    @property
    def group_index(self) -> int:
        """The index of this rank's worker group."""
        return self.topology.group_index

    @property
    def group_size(self) -> int:
        """The number of ranks in each worker group."""
        return self.topology.group_size

    @property
    def group_rank(self) -> int:
        """The index of this rank in its worker group."""
        return self.topology.group_rank


def topology_for(
    model: nn.Module,
    settings: Settings,
    worker_groups: int | str | WorkerGroups,
    topology: Topology | None,
) -> Topology:
    """Returns the worker groups that the caller passed, or creates new ones."""
    over_nccl = kind_and_backend(settings.exchange)[1] == "nccl"
    if topology is None and not isinstance(worker_groups, WorkerGroups):
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        on_device = nccl_on(device) if over_nccl else None
        return default_topology(worker_groups, settings.timeout, on_device)
    existing = topology or worker_groups.topology  # type: ignore[union-attr]
    if over_nccl and existing.num_groups > 1 and existing.exchange.device.type == "cpu":
        raise ValueError(
            f"exchange={settings.exchange!r} cannot be used with existing worker groups, which"
            " exchange over gloo. Remove ':nccl', or pass the number of groups as worker_groups."
        )
    return existing


def default_topology(
    worker_groups: int | str, timeout: timedelta, on_device: DeviceBackend | None = None
) -> Topology:
    """Divides the ranks of ``torch.distributed``, if initialised, into worker groups. All ranks
    must call this function.
    """
    groups = checked_worker_groups(worker_groups)
    world_size = 1
    if is_connected():
        # This check comes first, because ranks that create different process groups would wait for
        # each other forever.
        require_same_settings({"worker_groups": str(groups)}, world())
        world_size = world().size
    elif launched_processes() > 1:
        raise ValueError(
            f"A launcher started {launched_processes()} processes"
            f" (WORLD_SIZE={launched_processes()}), but torch.distributed is not initialised, so"
            " each process would train separately. Call torch.distributed.init_process_group()"
            " in all processes first. If there is only one process, remove WORLD_SIZE from its"
            " environment."
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
    """Ensures that all ranks start with the same settings and model, and divides the model into
    fragments. All ranks must call this function.
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
                f"{clean_name(name)!r} has no shape yet, because lazy modules infer their shapes"
                " from the first batch, but the model is divided into fragments before then."
                " Run a batch through the model before trainer.fit, for example at the end of its"
                " __init__."
            )
    parameters = trainable(model)
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ValueError(
                f"The trainable parameter {name!r} has dtype {parameter.dtype}, which cannot be"
                " converted to float32. Only real floating-point parameters can be exchanged."
                " Store complex values as two real parameters, or freeze the parameter."
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
    """Makes sharded parameters bit-identical on ranks that share values. In-group collective."""
    reshard(model)
    for fragment in fragments:
        # Whole parameters are already bit-identical on all ranks.
        if isinstance(fragment.layout, ShardedLayout):
            fragment.layout.write(fragment.gathered(topology.in_group))


def _say_what_is_unusual(
    partition: Partition, settings: Settings, topology: Topology, is_site: bool
) -> None:
    if topology.group_index or topology.group_rank:
        return
    if topology.num_groups == 1 and not is_site:
        _log.warning(
            "There is only one worker group, so this is plain training with an outer step."
            " Nothing is sent, but outer gradients are still compressed. With compression='fp32',"
            " the values are not changed."
        )
    if partition.fell_back:
        _log.warning(
            "fragments=%r requires repeated blocks, which this model does not have. The model's"
            " tensors are divided into %d balanced fragments instead. Pass patterns to choose the"
            " fragments yourself.",
            settings.fragments,
            len(partition.fragments),
        )
    suits = settings.better_for_sparse(topology.num_groups)
    if suits:
        _log.warning(
            "outer_lr=%g and outer_momentum=%g are not suitable for compression=%r. Unsent"
            " values accumulate until they are sent, so training is slow or diverges unless"
            " outer_lr / (1 - outer_momentum) is between %g and %g. Omit both options to use"
            " outer_lr=%g and outer_momentum=%g.",
            settings.outer_lr,
            settings.outer_momentum,
            settings.compression,
            *settings.gains_for_sparse,
            *suits.values(),
        )


def say_what_averages_twice(
    optimizers: Sequence[Optimizer], settings: Settings, topology: Topology
) -> None:
    """Warns about combining outer momentum with an inner optimizer that averages its steps."""
    averaging = list[str]()
    for optimizer in optimizers:
        parts = parts_of(optimizer)
        switched = [part for part in parts if hasattr(part, "train") and hasattr(part, "eval")]
        if not switched:
            continue
        innermost = switched[-1]
        # A wrapper may merely forward calls, as accelerate's optimizer does. In this case, there is
        # no copy of the weights.
        if len(parts_of(innermost)) == 1 or copies_in(innermost):
            averaging.append(type(innermost).__name__)
    momentum = settings.numbers.get("outer_momentum", 0.0)
    if averaging and momentum > 0 and settings.outer.make is None and not topology.rank:
        _log.warning(
            "Like schedule-free optimizers and GPA, %s averages its steps, and outer_momentum=%g"
            " averages them again. Set outer_lr=1 and outer_momentum=0 to leave the averaging to"
            " the inner optimizer.",
            averaging[0],
            momentum,
        )


def say_what_trains_little(optimizer: ShardOptimizer, topology: Topology) -> None:
    """Warns about a learning rate that is too low for outer steps."""
    if optimizer.highest_rate < LEAST_USUAL_RATE and not topology.rank:
        _log.warning(
            "The outer optimizer is %s. A learning rate of %g is suitable for the gradient of a"
            " batch, but an outer step covers a whole round of training. With learning rates"
            " below %g, the outer model hardly follows the groups. Pass outer_optimizer=%s, or"
            " omit outer_optimizer and outer_lr.",
            optimizer.summary,
            optimizer.highest_rate,
            LEAST_USUAL_RATE,
            AN_OUTER_OPTIMIZER,
        )


# Settings and model must be the same on all ranks


def require_same_settings(settings: Mapping[str, str], world: Communicator) -> None:
    """Refuses settings that differ between ranks. All ranks must call this function."""
    differences = _differences(world.all_gather_object(dict(settings)))
    if differences:
        raise ValueError(
            f"The settings of the strategy differ between ranks: {'; '.join(differences)}. Start"
            " all ranks with the same script and configuration."
        )


def require_same_start(start: str, world: Communicator) -> None:
    """Refuses ranks that start from different checkpoints. All ranks must call this function."""
    differences = _differences(world.all_gather_object({"the start": start}))
    if differences:
        raise ValueError(
            f"The ranks do not start from the same checkpoint: {differences[0]}. Pass the same"
            " checkpoint to all ranks. If machines have separate disks, copy the checkpoint file"
            " and the folder next to it to each machine."
        )


def require_same_model(model: nn.Module, world: Communicator) -> None:
    """Refuses models that differ between ranks, and processors that round differently. All ranks
    must call this function.
    """
    require_same_signatures(world.all_gather_object(signature(model)))
    is_on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    digest_of_known_values = rounding() if is_on_host else ""
    differences = _differences(
        world.all_gather_object({"the digest of a test calculation": digest_of_known_values})
    )
    if differences:
        raise ValueError(
            f"The processors of these ranks round differently: {differences[0]}. The worker"
            " groups would drift apart. Use machines whose processors have the same instruction"
            " set, or set ATEN_CPU_CAPABILITY=default on all ranks to use only instructions that"
            " every processor supports."
        )


@cache
def rounding() -> str:
    """Returns a digest of a test calculation that covers all arithmetic that must be bit-identical
    in all groups.
    """
    # The numbers are not random, because torch's random numbers differ between processors.
    numbers = (torch.arange(3 * 4099, device="cpu") * 7919 % 2003 - 1001).to(torch.float32) / 997
    values, gradient, momentum = numbers.view(3, -1).clone().unbind()
    codec = FP4()
    mean = torch.empty_like(gradient)
    codec.mean([(codec.encode(gradient), 1 / 3), (codec.encode(momentum), 1.7)], mean)
    nesterov_step(values, mean, momentum, lr=0.7, factor=0.9)
    return f"{digest(mean) % 2**64:x}"


def require_own_group(model: nn.Module, topology: Topology) -> None:
    """Refuses a model that ranks outside its worker group also train."""
    group_ranks = list(topology.ranks)
    for name, parameter in model.named_parameters():
        outside = sorted(set(ranks_of(parameter)) - set(group_ranks))
        if outside:
            raise ValueError(
                f"The parameter {name!r} is sharded over multiple worker groups, including"
                f" {_listed(outside)} outside this rank's group. Shard the model over a mesh of"
                f" {_listed(group_ranks)}."
            )
    for name, module in model.named_modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ValueError(
                f"{_module(name)} is wrapped in FullyShardedDataParallel, whose flat parameters"
                " cannot be exchanged by name. Use fully_shard over the ranks of the worker group."
            )
        if not isinstance(module, DistributedDataParallel):
            continue
        ranks = ranks_in(module.process_group)
        # If a group has only one rank, its number does not matter, as in simulated worker groups.
        if ranks != group_ranks and max(len(ranks), topology.group_size) > 1:
            raise ValueError(
                f"{_module(name)} is wrapped in DistributedDataParallel over {_listed(ranks)}, but"
                f" this rank's worker group is {_listed(group_ranks)}. Gradients must be averaged"
                " only inside a worker group. If groups have one rank, pass the model without a"
                " wrapper. Otherwise, wrap the model with DistributedDataParallel(model,"
                f" process_group=WorkerGroups({topology.num_groups}).process_group). With"
                " strategy='streaming_diloco', Fabric wraps the model in this way."
            )


def _module(name: str) -> str:
    # The outermost module inside a wrapper is the model itself, regardless of its name.
    inner_name = ".".join(
        word for word in name.split(".") if word not in ("_orig_mod", "_forward_module")
    )
    return f"The module {inner_name!r} of the model" if inner_name else "The model"


def _listed(ranks: list[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def align_model(model: nn.Module, topology: Topology) -> bool:
    """Copies the parameters and buffers of the first group to all groups and returns whether they
    differed. All ranks must call this function.
    """
    ranks = _digests(model, topology)
    differed = not _are_alike(ranks, topology.group_size)
    if differed:
        _warn_of_exchanged_models([hash(rank) for rank in ranks], topology)
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(tensor, topology)
    return differed


def _warn_of_exchanged_models(ranks: list[int], topology: Topology) -> None:
    """Warns about ranks that passed two models to their engines in a different order than group 0
    did.

    Args:
        ranks: A hash of each rank's model.
        topology: The worker groups, which store the hashes for later engines.
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
                "Two models with the same shapes were swapped. The model that rank 0 passes to"
                " this engine was passed to an earlier engine by %s, and vice versa. Each model"
                " now has the other model's values. Create engines in the same order on all ranks."
                " The order of a set, for example, differs between processes.",
                _listed(exchanged),
            )
    topology.starts.append(ranks)


def align_at_end(model: nn.Module, topology: Topology) -> list[str]:
    """Copies differing parameters and buffers from the first group to all ranks. All ranks must
    call this function.

    Returns the names of all tensors that differed. Tensors with different shapes or dtypes are not
    changed. Non-persistent buffers are ignored, because they belong to a single rank.
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
        # Each part of a sharded tensor is compared with the same part in the first group.
        size = topology.group_size if by_rank[0][1] else 1
        if by_rank == [by_rank[rank % size] for rank in range(len(ranks))]:
            continue
        differing.append(name)
        if len({kind for kind, *_ in by_rank}) == 1:
            broadcast(tensors[name], topology)
    return differing


def _tensors_of_groups(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name."""
    left_out = set[str]()
    for prefix, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            left_out.add(f"{prefix}.{key}" if prefix else key)
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {clean_name(name): tensor for name, tensor in tensors if name not in left_out}


def _kind(tensor: Tensor) -> str:
    """Describes the shape, dtype and sharding of a parameter or buffer."""
    if is_lazy(tensor):
        return "without a shape"
    return f"{tuple(tensor.shape)} {tensor.dtype}{described_sharding(tensor)}"


def broadcast(tensor: Tensor, topology: Topology) -> None:
    """Broadcasts rank 0's tensor to all ranks. Parts of a sharded tensor are sent by the
    corresponding ranks of the first group.
    """
    ranks = topology.peers if is_sharded(tensor) else topology.world
    ranks.broadcast(local(tensor))


def is_aligned(model: nn.Module, topology: Topology) -> bool:
    """Returns whether the parameters and buffers of all groups are bit-identical. All ranks must
    call this function.
    """
    return _are_alike(_digests(model, topology), topology.group_size)


class _Digests(NamedTuple):
    """The digests of a rank's whole tensors and of its parts of sharded tensors."""

    full: tuple[int, ...]
    parts: tuple[int, ...]


def _digests(model: nn.Module, topology: Topology) -> list[_Digests]:
    """Returns the digests of every rank's tensors."""
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
    # Tensors are matched by order, so their order must also be the same.
    places = list[dict[str, str]]()
    for names in signatures:
        places.append({name: f"in place {place}" for place, name in enumerate(names)})
    differences = _differences(signatures) or _differences(places)
    if differences:
        shown = "; ".join(differences[:5])
        if len(differences) > 5:
            shown += f"; and {len(differences) - 5} more"
        raise ValueError(
            f"The model differs between ranks: {shown}. All ranks must build the same model with"
            " the same names, shapes and dtypes. The code that builds the model must not depend"
            " on the rank. If a process trains several models, all ranks must create their"
            " engines in the same order."
        )


def signature(model: nn.Module) -> dict[str, str]:
    """Describes the properties of each parameter and buffer that must not differ between ranks."""
    kinds = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        kinds[clean_name(name)] = _kind(tensor) + (" (frozen)" if is_frozen else "")
    return kinds


def _differences(ranks: list[dict[str, str]]) -> list[str]:
    """Returns a sentence for each key whose text differs between ranks."""
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
    """Formats a list of up to eight ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = ", ..." if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more}"


# Rounds that restart


class NamedOuter(NamedTuple):
    """The outer state of all fragments by name, and the minimum number of outer steps so far."""

    parameters: Mapping[str, OuterParameter]
    untrained: Mapping[str, Tensor]
    rounds: int = 0


def named_outer(fragments: Sequence[FragmentState], in_group: Communicator) -> NamedOuter:
    """Returns the outer state of all fragments by name. In-group collective."""
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
    """Loads outer state by name. Parameters without outer state keep their local values and start
    without momentum.
    """
    # All fragments of a round, including new fragments, have the same learning rate.
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
            "The fragments of the saved state differ from the fragments of this model"
            f" ({len(saved)} saved, {len(names)} in this model). Resume with the same model and"
            " the same fragments."
        )
