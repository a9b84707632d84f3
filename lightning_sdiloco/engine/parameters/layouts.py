"""Between a model and flat float32 vectors: the one place that touches parameters and buffers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sdiloco.algorithm.partition import Fragment, Parameter
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.outer.optimizer import Stepped
from lightning_sdiloco.engine.parameters.resharding import (
    OuterParameter,
    put_together,
    put_together_by_place,
    taken_apart,
    taken_apart_by_place,
)
from lightning_sdiloco.engine.parameters.sharding import Place, is_sharded, local, places_of, reshard


class FragmentLayout(ABC):
    """The parameters of a fragment, and the shard of this rank: the values of them that it exchanges.

    Args:
        names: Names of the parameters.
        parameters: The parameters, on one device, of any floating dtype.

    Attributes:
        length: Number of values of the shard.
        start: Position of its first value among those of all ranks of the group, for the digest.
    """

    length: int
    start: int

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        self.names = tuple(names)
        self.keys = list(parameters)

    @property
    def parameters(self) -> list[Tensor]:
        """What this rank holds of the parameters. Not kept, because others may rebind ``.data``."""
        return [local(parameter) for parameter in self.keys]

    @property
    def held(self) -> int:
        """Number of values that this rank holds."""
        return sum(parameter.numel() for parameter in self.parameters)

    @abstractmethod
    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """What of each parameter belongs to the shard, flat, and where it lies in it."""

    def read(self) -> Tensor:
        """Copies the shard out of the parameters.

        Returns:
            A new float32 tensor of shape ``(length,)``.
        """
        shard = self.parameters[0].new_zeros(self.length, dtype=torch.float32)
        for where, values in self._pieces():
            shard[where] = values
        return shard

    def subtracted_from(self, outer: Tensor) -> Tensor:
        """The outer gradient: outer values minus those of the shard, in one pass over both.

        Args:
            outer: float32 tensor of shape ``(length,)``.

        Returns:
            A new float32 tensor of shape ``(length,)``.
        """
        gradient = torch.empty_like(outer)
        end = 0
        for where, values in self._pieces():
            # Longer types are rounded first, as they are where the shard is read.
            exact = torch.promote_types(values.dtype, torch.float32) == torch.float32
            torch.sub(outer[where], values if exact else values.to(torch.float32), out=gradient[where])
            end = where.stop
        gradient[end:] = 0
        return gradient

    @abstractmethod
    def gathered(self, shard: Tensor, group: Communicator) -> Tensor:
        """All that this rank holds of the fragment, flat, from the shards of the ranks. In-group collective.

        Args:
            shard: Values of the shard of this rank.
            group: The ranks of the group.
        """

    @abstractmethod
    def whole(self, gathered: Tensor, shard: Tensor, group: Communicator) -> dict[str, Tensor]:
        """The parameters by name, whole, on the host. In-group collective where ranks hold parts of them.

        Args:
            gathered: What `gathered` made of the shard.
            shard: Values of the shard of this rank.
            group: The ranks of the group.
        """

    @abstractmethod
    def taken_apart(self, shards: Sequence[Stepped]) -> dict[str, OuterParameter]:
        """The outer state by name, whole, from all shards."""

    @abstractmethod
    def put_together(self, parameters: Sequence[OuterParameter]) -> Stepped:
        """The shard of this rank, from the outer state of all parameters in their order."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """What must be known to take shards apart later, as plain values."""

    def split(self, gathered: Tensor) -> list[Tensor]:
        """All that this rank holds as one view per parameter, in the shape of what it holds of it."""
        parameters = self.parameters
        parts = gathered[: self.held].split([parameter.numel() for parameter in parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]

    def write(self, gathered: Tensor, mixing: float = 0.0) -> None:
        """Mixes values into the parameters: ``mixing * local + (1 - mixing) * gathered``.

        With ``mixing=0`` the local values are not even read, so that they may be anything.

        Args:
            gathered: float32 tensor with all that this rank holds, or more.
            mixing: Share of the local parameters that is kept.
        """
        for parameter, values in zip(self.parameters, self.split(gathered), strict=True):
            mix(parameter, values, mixing)

    def write_some(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites some parameters by name with flat vectors of their own. Not for sharded ones."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if name in values:
                parameter.copy_(values[name].view(parameter.shape))

    def is_finite(self) -> bool:
        """Whether all that this rank holds is finite."""
        return all(bool(parameter.isfinite().all()) for parameter in self.parameters)


class WholeLayout(FragmentLayout):
    """A fragment that every rank of the group holds whole: one flat vector, cut into as many shards as there are ranks.

    All shards have the same length; zeros fill up the last.

    Args:
        names: Names of the parameters.
        parameters: The parameters.
        shard: The shard of this rank.
        shards: Number of ranks in the group.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], shard: int = 0, shards: int = 1) -> None:
        super().__init__(names, parameters)
        self.length = -(-self.held // shards)
        self.start = shard * self.length

    @override
    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        position, start, end = 0, self.start, self.start + self.length
        for parameter in self.parameters:
            first, last = max(position, start), min(position + parameter.numel(), end)
            if first < last:
                values = parameter.reshape(-1)[first - position : last - position]
                yield slice(first - start, last - start), values
            position += parameter.numel()

    @override
    def gathered(self, shard: Tensor, group: Communicator) -> Tensor:
        shards = group.all_gather(shard)
        return shards[0] if len(shards) == 1 else torch.cat(shards)

    @override
    def whole(self, gathered: Tensor, shard: Tensor, group: Communicator) -> dict[str, Tensor]:
        values = zip(self.names, self.split(gathered), strict=True)
        return {name: value.to("cpu", copy=True) for name, value in values}

    @override
    def taken_apart(self, shards: Sequence[Stepped]) -> dict[str, OuterParameter]:
        return taken_apart(self._sizes, shards)

    @override
    def put_together(self, parameters: Sequence[OuterParameter]) -> Stepped:
        return put_together(parameters, self.start, self.length)

    @override
    def described(self) -> dict[str, Any]:
        return {"names": list(self.names), "sizes": list(self._sizes.values())}

    @property
    def _sizes(self) -> dict[str, int]:
        """Number of values of each parameter, by name."""
        return {name: parameter.numel() for name, parameter in zip(self.names, self.keys, strict=True)}


class ShardedLayout(FragmentLayout):
    """A fragment of which every rank of the group holds a part: the shard is what it holds.

    Where several ranks hold the same, its values are divided among them, so that each is exchanged once.

    Args:
        names: Names of the parameters.
        parameters: The parameters.
        places: Where the values of each parameter lie, on every rank of the group.
        shard: The shard of this rank.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], places: Sequence[Sequence[Place]], shard: int
    ) -> None:
        super().__init__(names, parameters)
        self._places = places
        self._own = [ranks[shard] for ranks in places]
        # Without a single value there would be nothing to encode.
        lengths = [max(1, sum(of)) for of in zip(*([p.length for p in ranks] for ranks in places), strict=True)]
        self.length = lengths[shard]
        self._longest = max(lengths)
        self.start = sum(lengths[:shard])
        self._in_common = [any(len(place.holders) > 1 for place in ranks) for ranks in places]

    @override
    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        position = 0
        for parameter, place in zip(self.parameters, self._own, strict=True):
            values = parameter.reshape(-1)[place.first : place.first + place.length]
            yield slice(position, position + place.length), values
            position += place.length

    @override
    def gathered(self, shard: Tensor, group: Communicator) -> Tensor:
        if not any(self._in_common):
            return shard
        own = list(shard[: sum(place.length for place in self._own)].split([place.length for place in self._own]))
        common = torch.cat([part for part, in_common in zip(own, self._in_common, strict=True) if in_common])
        parts = group.all_gather(_filled_up(common, max(self._common_lengths())))
        starts = [0] * len(parts)
        for index, ranks in enumerate(self._places):
            if self._in_common[index]:
                of_holders = [(parts[h], starts[h], ranks[h].length) for h in self._own[index].holders]
                own[index] = torch.cat([part[start : start + length] for part, start, length in of_holders])
                starts = [start + place.length for start, place in zip(starts, ranks, strict=True)]
        return torch.cat(own)

    @override
    def whole(self, gathered: Tensor, shard: Tensor, group: Communicator) -> dict[str, Tensor]:
        parts = [Stepped(part.to("cpu"), {}, 0) for part in self._of_all(shard, group)]
        shapes = [ranks[0].shape for ranks in self._places]
        apart = self.taken_apart(parts)
        return {name: apart[name].values.view(shape) for name, shape in zip(self.names, shapes, strict=True)}

    @override
    def taken_apart(self, shards: Sequence[Stepped]) -> dict[str, OuterParameter]:
        return taken_apart_by_place(dict(zip(self.names, self._places, strict=True)), shards)

    @override
    def put_together(self, parameters: Sequence[OuterParameter]) -> Stepped:
        return put_together_by_place(parameters, self._own, self.length)

    @override
    def described(self) -> dict[str, Any]:
        sizes = [prod(ranks[0].shape) for ranks in self._places]
        return {
            "names": list(self.names),
            "sizes": sizes,
            "places": [[list(place) for place in ranks] for ranks in self._places],
        }

    def _of_all(self, shard: Tensor, group: Communicator) -> list[Tensor]:
        """The shards of all ranks, filled up to the length of the longest."""
        return group.all_gather(_filled_up(shard, self._longest))

    def _common_lengths(self) -> list[int]:
        """How much every rank exchanges of the parameters of which several ranks hold the same."""
        common = [ranks for ranks, in_common in zip(self._places, self._in_common, strict=True) if in_common]
        return [sum(place.length for place in of_rank) for of_rank in zip(*common, strict=True)]


def _filled_up(values: Tensor, length: int) -> Tensor:
    return nn.functional.pad(values, (0, length - values.numel()))


def layouts_of(
    fragments: Sequence[Fragment], parameters: Mapping[str, Tensor], topology: Topology
) -> list[FragmentLayout]:
    """The layouts of all fragments. In-group collective where parameters are sharded.

    Args:
        fragments: The fragments.
        parameters: The trainable parameters by name.
        topology: The ranks of this group.

    Raises:
        ValueError: If a parameter is divided in a way that is not known here.
    """
    shard, shards = topology.group_rank, topology.group_size
    if not any(map(is_sharded, parameters.values())):
        return [WholeLayout(f.names, [parameters[name] for name in f.names], shard, shards) for f in fragments]
    places = places_of(parameters, topology.in_group, topology.ranks)
    return [
        ShardedLayout(f.names, [parameters[n] for n in f.names], [places[n] for n in f.names], shard) for f in fragments
    ]


class BufferLayout:
    """The persistent floating-point buffers that belong to a fragment, such as the statistics of BatchNorm.

    Those that changed in some group by the last launch travel with the next one; at the first launch, when nothing is
    known yet, and in the last exchange, which none follows, all do. So all groups know the size of a message before
    they get it.

    Args:
        buffers: The buffers by name. They are read and written in place.
    """

    # One bit for each buffer says whether it changed; further ones share the last bit.
    _BITS = 64

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.names = tuple(buffers)
        self.buffers = list(buffers.values())
        self.outer = self.snapshot()
        self._travelling = -1

    def snapshot(self) -> list[Tensor]:
        """Copies of the local buffers, as float32."""
        return [buffer.detach().to(torch.float32, copy=True) for buffer in self.buffers]

    def changed(self, snapshot: list[Tensor]) -> int:
        """Which buffers of a snapshot differ from the outer ones, one bit each."""
        bits = 0
        for index, (values, outer) in enumerate(zip(snapshot, self.outer, strict=True)):
            if not torch.equal(values, outer):
                bits |= 1 << min(index, self._BITS - 1)
        return bits

    def all(self) -> list[int]:
        """Indices of all buffers."""
        return list(range(len(self.buffers)))

    def travelling(self) -> list[int]:
        """Indices of the buffers that travel with the next launch."""
        return [i for i in range(len(self.buffers)) if self._travelling >> min(i, self._BITS - 1) & 1]

    def commit(self, outer: dict[int, Tensor], changed: int) -> None:
        """Takes new outer values by index, and which buffers changed in some group."""
        for index, values in outer.items():
            self.outer[index] = values
        self._travelling = changed

    def saved(self) -> dict[str, Any]:
        """The outer buffers, and which travel with the next launch."""
        return {
            "buffer_names": list(self.names),
            "buffers": [buffer.to("cpu") for buffer in self.outer],
            "travelling": self._travelling,
        }

    def load(self, buffers: Sequence[Tensor], travelling: int) -> None:
        """Takes back what `saved` returned."""
        self.outer = [saved.to(own.device, copy=True) for saved, own in zip(buffers, self.outer, strict=True)]
        self._travelling = travelling

    def by_name(self) -> dict[str, Tensor]:
        """The outer buffers by name."""
        return dict(zip(self.names, self.outer, strict=True))

    def start_from(self, outer: Mapping[str, Tensor]) -> None:
        """Takes outer values by name; a buffer without one keeps what it has. All travel with the next launch."""
        self.load([outer.get(name, own) for name, own in self.by_name().items()], travelling=-1)

    def mix(self, mixing: float, indices: Iterable[int]) -> None:
        """Mixes some outer buffers into the local ones.

        A buffer that did not travel keeps its local value: it may have changed, and travel next time.
        """
        for index in indices:
            mix(self.buffers[index], self.outer[index], mixing)


def mix(local: Tensor, outer: Tensor, mixing: float) -> None:
    """Overwrites ``local`` with ``mixing * local + (1 - mixing) * outer``, computed in at least float32."""
    if mixing == 0:
        local.copy_(outer)
    elif mixing != 1 and local.dtype == outer.dtype:
        torch.lerp(outer, local, mixing, out=local)
    elif mixing != 1:
        dtype = torch.promote_types(local.dtype, torch.float32)
        local.copy_(torch.lerp(outer.to(dtype), local.to(dtype), mixing))


def on_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of tensors in the memory of the host."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that the user wrote, inside DistributedDataParallel and torch.compile."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def clean_name(name: str) -> str:
    """The name of a parameter without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name, tied ones once, in the order of ``named_parameters()``."""
    reshard(model)
    return {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def described(parameters: dict[str, Tensor]) -> list[Parameter]:
    """What the partition has to know of parameters."""
    return [Parameter(name, p.numel() * p.element_size(), p.ndim) for name, p in parameters.items()]


def aliases(model: nn.Module) -> dict[str, str]:
    """The further names of tied trainable parameters, each with the first name of the same parameter."""
    first: dict[int, str] = {}
    further = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), clean_name(name))
        if parameter.requires_grad and known != clean_name(name):
            further[clean_name(name)] = known
    return further


def buffers_of(model: nn.Module, fragments: Sequence[Fragment]) -> list[dict[str, Tensor]]:
    """The buffers that travel with each fragment: those of modules whose parameters it holds, or the nearest ones."""
    fragment_of = {name: index for index, fragment in enumerate(fragments) for name in fragment.names}
    chosen: list[dict[str, Tensor]] = [{} for _ in fragments]
    for name, buffer in _persistent_floating_buffers(model):
        if is_sharded(buffer):
            raise ValueError(
                f"The buffer {name!r} is sharded. Buffers travel whole, from one rank of a group: keep it as a plain"
                " tensor, or register it with persistent=False."
            )
        nearest = max(fragment_of, key=lambda parameter: _common_depth(name, parameter))
        chosen[fragment_of[nearest]][name] = buffer
    return chosen


def _persistent_floating_buffers(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    seen = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            local_name = name[len(prefix) + 1 :] if prefix else name
            persistent = local_name not in module._non_persistent_buffers_set
            if persistent and buffer.is_floating_point() and id(buffer) not in seen:
                seen.add(id(buffer))
                yield clean_name(name), buffer


def _common_depth(one: str, other: str) -> int:
    depth = 0
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        depth += 1
    return depth


def with_finite_state(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> list[bool]:
    """Whether what this rank holds of the inner optimizer state of each parameter is finite."""
    return [
        all(
            bool(local(value).isfinite().all())
            for optimizer in optimizers
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor)
        )
        for parameter in parameters
    ]


def drop_state(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> None:
    """Drops the inner optimizer state of parameters, so that it starts afresh."""
    for optimizer in optimizers:
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
