"""From the parameters of a fragment to one flat float32 vector and back: the shard that a rank exchanges."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_sdiloco.algorithm import Fragment, LandingRule
from lightning_sdiloco.comm import Communicator, Topology
from lightning_sdiloco.engine.outer.optimizer import OuterState
from lightning_sdiloco.engine.parameters.resharding import (
    OuterParameter,
    to_parameters,
    to_parameters_by_spec,
    to_shard,
    to_shard_by_spec,
)
from lightning_sdiloco.engine.parameters.sharding import (
    ShardSpec,
    is_sharded,
    like,
    local,
    local_gradient,
    shard_specs,
)
from lightning_sdiloco.memory import new_vector


class FragmentLayout(ABC):
    """Lays out the parameters of a fragment as flat vectors: the shard of this rank is what it exchanges of them."""

    length: int
    start: int

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        self.names = tuple(names)
        self.parameters = list(parameters)

    @property
    @abstractmethod
    def held(self) -> list[Tensor]:
        """What this rank holds of each parameter. Looked up every time, because others may rebind ``.data``."""

    @abstractmethod
    def _pieces(self, held: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Yields what of each parameter belongs to the shard, flat, and where it lies in the shard."""

    @abstractmethod
    def all_gather(self, shard: Tensor, group: Communicator) -> Tensor:
        """Gathers all that this rank holds of the fragment from the shards of its group. In-group collective."""

    @abstractmethod
    def shard_lengths(self, ranks: int) -> list[int]:
        """Returns the numbers of values in the shards of a group of so many ranks."""

    @abstractmethod
    def named(self, gathered: Tensor, shard: Tensor, group: Communicator) -> dict[str, Tensor]:
        """Returns the whole parameters by name, on the host. In-group collective where ranks hold parts of them."""

    @abstractmethod
    def align_ranks(self, shard: Tensor, group: Communicator) -> None:
        """Gives ranks of the group that hold the same values the same bits of them. In-group collective."""

    @abstractmethod
    def to_parameters(self, shards: Sequence[OuterState]) -> dict[str, OuterParameter]:
        """Returns the outer state of every parameter, whole, from all shards of the fragment."""

    @abstractmethod
    def to_shard(self, parameters: Sequence[OuterParameter]) -> OuterState:
        """Returns the outer state of this rank's shard, from that of all parameters in their order."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns what must be known to read shards of the fragment in a later run, as plain values."""

    def read(self) -> Tensor:
        """Copies the shard out of the parameters."""
        shard = new_vector(self.length, self.held[0].device).zero_()
        for where, values in self._pieces(self.held):
            shard[where] = values
        return shard

    def outer_gradient(self, outer: Tensor) -> Tensor:
        """Returns the outer gradient, outer parameters minus local ones, in one pass over both."""
        return self._minus(outer, self.held)

    def negated_gradients(self, zeros: Tensor) -> Tensor:
        """Returns zeros minus the gradients of the shard; what has no gradient has zeros, too."""
        gradients = zip(self.held, map(local_gradient, self.parameters), strict=True)
        return self._minus(zeros, [torch.zeros_like(own) if of is None else of for own, of in gradients])

    def _minus(self, outer: Tensor, held: Sequence[Tensor]) -> Tensor:
        difference = new_vector(outer.numel(), outer.device)
        end = 0
        for where, values in self._pieces(held):
            # Longer types are rounded first, as they are where the shard is read.
            exact = torch.promote_types(values.dtype, torch.float32) == torch.float32
            torch.sub(outer[where], values if exact else values.to(torch.float32), out=difference[where])
            end = where.stop
        difference[end:] = 0
        return difference

    def shard_of(self, gathered: Tensor) -> Tensor:
        """Returns the shard of this rank of what `all_gather` returned."""
        shard = gathered.new_zeros(self.length)
        for place, values in self._pieces(self.split(gathered)):
            shard[place] = values
        return shard

    def split(self, gathered: Tensor) -> list[Tensor]:
        """Returns views of what `all_gather` returned, one per parameter, in the shape of what this rank holds."""
        held = self.held
        sizes = [parameter.numel() for parameter in held]
        parts = gathered[: sum(sizes)].split(sizes)
        return [part.view(parameter.shape) for part, parameter in zip(parts, held, strict=True)]

    def write(self, gathered: Tensor) -> None:
        """Overwrites the parameters."""
        for parameter, values in zip(self.held, self.split(gathered), strict=True):
            parameter.copy_(values)

    def land(self, rule: LandingRule, gathered: Sequence[Tensor], steps: int) -> None:
        """Overwrites the parameters as a landing rule says."""
        for parameter, *values in zip(self.held, *map(self.split, gathered), strict=True):
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            if parameter.dtype == dtype:
                rule.merge(parameter, values, steps)
            else:
                merged = parameter.to(dtype)
                rule.merge(merged, values, steps)
                parameter.copy_(merged)

    def write_gradients(self, gathered: Tensor) -> None:
        """Overwrites the gradients. A parameter without one gets one unless that is zero."""
        for parameter, values in zip(self.parameters, self.split(gathered), strict=True):
            own = parameter.grad
            if own is not None and own.is_sparse:
                parameter.grad = values.to(own.dtype).to_sparse(own.sparse_dim())
            elif own is not None:
                local(own).copy_(values)
            elif values.any():
                parameter.grad = like(parameter, values.to(parameter.dtype))

    def shift(self, moved: Tensor) -> None:
        """Moves the parameters."""
        for parameter, by in zip(self.held, self.split(moved), strict=True):
            if parameter.dtype == by.dtype:
                parameter.add_(by)
            else:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                parameter.copy_(parameter.to(dtype) + by.to(dtype))

    def write_named(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites some parameters with flat vectors, by name. Not for sharded parameters."""
        for name, parameter in zip(self.names, self.held, strict=True):
            if name in values:
                parameter.copy_(values[name].view(parameter.shape))

    def is_finite(self) -> bool:
        """Tells whether everything that this rank holds is finite."""
        return all(bool(parameter.isfinite().all()) for parameter in self.held)


class WholeLayout(FragmentLayout):
    """Lays out a fragment that every rank of the group holds whole: one vector, cut into one shard per rank."""

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], shard: int = 0, shards: int = 1) -> None:
        super().__init__(names, parameters)
        self.length = -(-sum(parameter.numel() for parameter in parameters) // shards)
        self.start = shard * self.length

    @property
    @override
    def held(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.parameters]

    @override
    def _pieces(self, held: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        position, start, end = 0, self.start, self.start + self.length
        for parameter in held:
            first, last = max(position, start), min(position + parameter.numel(), end)
            if first < last:
                values = parameter.reshape(-1)[first - position : last - position]
                yield slice(first - start, last - start), values
            position += parameter.numel()

    @override
    def all_gather(self, shard: Tensor, group: Communicator) -> Tensor:
        return shard if group.size == 1 else torch.cat(group.all_gather(shard))

    @override
    def shard_lengths(self, ranks: int) -> list[int]:
        return [-(-sum(self._sizes.values()) // ranks)] * ranks

    @override
    def named(self, gathered: Tensor, shard: Tensor, group: Communicator) -> dict[str, Tensor]:
        values = zip(self.names, self.split(gathered), strict=True)
        return {name: value.to("cpu", copy=True) for name, value in values}

    @override
    def align_ranks(self, shard: Tensor, group: Communicator) -> None:
        """Does nothing: ranks that hold whole parameters start from the same ones."""

    @override
    def to_parameters(self, shards: Sequence[OuterState]) -> dict[str, OuterParameter]:
        return to_parameters(self._sizes, shards)

    @override
    def to_shard(self, parameters: Sequence[OuterParameter]) -> OuterState:
        return to_shard(parameters, self.start, self.length)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self.names), "sizes": list(self._sizes.values())}

    @property
    def _sizes(self) -> dict[str, int]:
        """Number of values of each parameter, by name."""
        return {name: parameter.numel() for name, parameter in zip(self.names, self.parameters, strict=True)}


class ShardedLayout(FragmentLayout):
    """Lays out a fragment of which every rank of the group holds a part: the shard is what it holds."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], specs: Sequence[Sequence[ShardSpec]], shard: int
    ) -> None:
        super().__init__(names, parameters)
        self._specs = specs
        self._own = [ranks[shard] for ranks in specs]
        # Without a single value there would be nothing to encode.
        lengths = [max(1, sum(of)) for of in zip(*([s.length for s in ranks] for ranks in specs), strict=True)]
        self.lengths = lengths
        self.length = lengths[shard]
        self._longest = max(lengths)
        self.start = sum(lengths[:shard])
        self._in_common = [any(len(spec.holders) > 1 for spec in ranks) for ranks in specs]

    @property
    @override
    def held(self) -> list[Tensor]:
        return [local(parameter) for parameter in self.parameters]

    @override
    def _pieces(self, held: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        position = 0
        for parameter, spec in zip(held, self._own, strict=True):
            values = parameter.reshape(-1)[spec.first : spec.first + spec.length]
            yield slice(position, position + spec.length), values
            position += spec.length

    @override
    def all_gather(self, shard: Tensor, group: Communicator) -> Tensor:
        if not any(self._in_common):
            return shard
        own = list(shard[: sum(spec.length for spec in self._own)].split([spec.length for spec in self._own]))
        common = torch.cat([part for part, in_common in zip(own, self._in_common, strict=True) if in_common])
        parts = group.all_gather(_padded(common, max(self._common_lengths())))
        starts = [0] * len(parts)
        for index, ranks in enumerate(self._specs):
            if self._in_common[index]:
                of_holders = [(parts[h], starts[h], ranks[h].length) for h in self._own[index].holders]
                own[index] = torch.cat([part[start : start + length] for part, start, length in of_holders])
                starts = [start + spec.length for start, spec in zip(starts, ranks, strict=True)]
        return torch.cat(own)

    @override
    def shard_lengths(self, ranks: int) -> list[int]:
        if ranks != len(self.lengths):
            raise ValueError(f"a fragment that is sharded over {len(self.lengths)} ranks came from {ranks}")
        return self.lengths

    @override
    def named(self, gathered: Tensor, shard: Tensor, group: Communicator) -> dict[str, Tensor]:
        shards = group.all_gather(_padded(shard, self._longest))
        whole = self.to_parameters([OuterState(values.to("cpu"), {}, 0) for values in shards])
        shapes = [ranks[0].shape for ranks in self._specs]
        return {name: whole[name].values.view(shape) for name, shape in zip(self.names, shapes, strict=True)}

    @override
    def align_ranks(self, shard: Tensor, group: Communicator) -> None:
        self.write(self.all_gather(shard, group))

    @override
    def to_parameters(self, shards: Sequence[OuterState]) -> dict[str, OuterParameter]:
        return to_parameters_by_spec(dict(zip(self.names, self._specs, strict=True)), shards)

    @override
    def to_shard(self, parameters: Sequence[OuterParameter]) -> OuterState:
        return to_shard_by_spec(parameters, self._own, self.length)

    @override
    def state_dict(self) -> dict[str, Any]:
        sizes = [prod(ranks[0].shape) for ranks in self._specs]
        return {
            "names": list(self.names),
            "sizes": sizes,
            "places": [[list(spec) for spec in ranks] for ranks in self._specs],
        }

    def _common_lengths(self) -> list[int]:
        """Returns how much every rank exchanges of the parameters of which several ranks hold the same."""
        common = [ranks for ranks, in_common in zip(self._specs, self._in_common, strict=True) if in_common]
        return [sum(spec.length for spec in of_rank) for of_rank in zip(*common, strict=True)]


def layouts_of(
    fragments: Sequence[Fragment], parameters: Mapping[str, Tensor], topology: Topology
) -> list[FragmentLayout]:
    """Lays out all fragments. In-group collective where parameters are sharded."""
    shard, shards = topology.group_rank, topology.group_size
    if not any(map(is_sharded, parameters.values())):
        return [WholeLayout(f.names, [parameters[name] for name in f.names], shard, shards) for f in fragments]
    specs = shard_specs(parameters, topology.in_group, topology.ranks)
    return [
        ShardedLayout(f.names, [parameters[n] for n in f.names], [specs[n] for n in f.names], shard) for f in fragments
    ]


def _padded(values: Tensor, length: int) -> Tensor:
    return nn.functional.pad(values, (0, length - values.numel()))
