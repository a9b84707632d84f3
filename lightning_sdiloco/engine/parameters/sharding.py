"""How the values of a parameter are sharded over the ranks of a group: the only file that knows DTensors.

FSDP2 and tensor parallelism make them. They are recognised by their attributes, so that nothing is imported where there
are none.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sdiloco.comm import Communicator

Runs = list[tuple[int, int]]
"""Positions along one dimension, as half-open ranges ``(start, end)``."""


class ShardSpec(NamedTuple):
    """Describes which values of a parameter a rank holds, and which of these it exchanges.

    Attributes:
        shape: Shape of the whole parameter.
        runs: What the rank holds: for each dimension the positions, in the order in which it holds them.
        first: Position of the first value that it exchanges, among those that it holds.
        length: Number of values that it exchanges. Ranks that hold the same values share them out.
        holders: The ranks of the group that hold the same values, in their order.

    Examples:
        >>> spec = ShardSpec((4, 2), [[(2, 4)], [(0, 2)]], first=0, length=4, holders=[1])
        >>> spec.extract(torch.arange(8.0)).tolist()
        [4.0, 5.0, 6.0, 7.0]
    """

    shape: tuple[int, ...]
    runs: list[Runs]
    first: int
    length: int
    holders: list[int]

    def extract(self, whole: Tensor) -> Tensor:
        """Returns the values that the rank exchanges, out of the flat whole parameter."""
        return self._held(whole)[self.first : self.first + self.length]

    def insert(self, whole: Tensor, values: Tensor) -> None:
        """Writes the values that the rank exchanges into the flat whole parameter."""
        if self.length:
            held = self._held(whole).clone()
            held[self.first : self.first + self.length] = values
            boxes = [_length(along) for along in self.runs]
            whole.view(self.shape)[self._indices()] = held.view(boxes)

    def _held(self, whole: Tensor) -> Tensor:
        return whole.view(self.shape)[self._indices()].reshape(-1)

    def _indices(self) -> tuple[Tensor, ...]:
        """Returns the positions along every dimension, in shapes that torch broadcasts."""
        indices = []
        for dimension, runs in enumerate(self.runs):
            along = torch.cat([torch.arange(start, end) for start, end in runs] or [torch.arange(0)])
            indices.append(along.view([-1 if other == dimension else 1 for other in range(len(self.runs))]))
        return tuple(indices)


def is_sharded(tensor: Tensor) -> bool:
    """Tells whether a tensor is a DTensor, of which this rank holds a part."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor, without autograd. Writing to it writes to the tensor."""
    sharded: Any = tensor.detach()
    return sharded.to_local() if is_sharded(sharded) else sharded


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Returns what this rank holds of the gradient of a parameter, dense and sharded like it; None if it has none."""
    gradient: Any = parameter.grad
    if gradient is None:
        return None
    sharded: Any = parameter
    if is_sharded(gradient) and gradient.placements != sharded.placements:
        # Tensor parallelism leaves sums that are still to be made.
        parameter.grad = gradient = gradient.redistribute(placements=sharded.placements)
    return local(gradient.to_dense() if gradient.is_sparse else gradient)


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Makes a tensor that is sharded like another one, and of which this rank holds the given values."""
    made = torch.empty_like(tensor.detach(), dtype=values.dtype)
    local(made).copy_(values)
    return made


def described(tensor: Tensor) -> str:
    """Describes how a tensor is sharded; empty if it is not."""
    sharded: Any = tensor
    return f" as {sharded.placements} on {tuple(sharded.device_mesh.shape)} ranks" if is_sharded(sharded) else ""


def reshard(model: nn.Module) -> None:
    """Makes FSDP2 drop the unsharded parameters that it keeps after a forward."""
    reshard_modules(sharded_modules(model))


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model that FSDP2 has sharded. It takes long: a model may have thousands."""
    # By name, because a module may have attributes of any name.
    return [one for one in model.modules() if any(kind.__name__ == "FSDPModule" for kind in type(one).__mro__)]


def reshard_modules(modules: Iterable[nn.Module]) -> None:
    """Does the same where the modules are known; see `reshard`."""
    for module in modules:
        sharded: Any = module
        sharded.reshard()


def part_of(tensor: Tensor, whole: Tensor) -> Tensor:
    """Returns what this rank holds of a sharded tensor, cut out of the whole one."""
    runs = held_runs(tensor)
    spec = ShardSpec(tuple(tensor.shape), runs, first=0, length=_numel(runs), holders=[])
    return spec.extract(whole.reshape(-1)).view(local(tensor).shape)


def held_runs(tensor: Tensor) -> list[Runs]:
    """Returns the positions that this rank holds of a tensor, for each dimension."""
    sharded: Any = tensor
    positions = [list(range(size)) for size in tensor.shape]
    if is_sharded(sharded):
        ways = zip(sharded.placements, sharded.device_mesh.shape, sharded.device_mesh.get_coordinate(), strict=True)
        for placement, ranks, rank in ways:
            if placement.is_replicate():
                continue
            if not hasattr(placement, "dim"):
                raise ValueError(f"its placement {placement} has no whole values on any rank")
            pieces = _chunks(positions[placement.dim], getattr(placement, "split_factor", 1))
            parts = [_chunks(piece, ranks) for piece in pieces]
            positions[placement.dim] = [one for chunks in parts if rank < len(chunks) for one in chunks[rank]]
        if tuple(map(len, positions)) != tuple(local(tensor).shape):
            raise ValueError(
                f"torch says that it is divided{described(tensor)}, but this rank holds {tuple(local(tensor).shape)}"
                f" of {tuple(tensor.shape)} where that would be {tuple(map(len, positions))}"
            )
    return [_runs(along) for along in positions]


def divided(shape: Iterable[int], ranks: Sequence[list[Runs]]) -> list[ShardSpec]:
    """Divides a parameter so that every value is exchanged by exactly one rank, also where several hold it.

    Args:
        shape: Shape of the whole parameter.
        ranks: What every rank of a group holds.

    Returns:
        One spec per rank.

    Raises:
        ValueError: If the ranks together do not hold the whole parameter.

    Examples:
        >>> [spec.length for spec in divided([5], [[[(0, 3)]], [[(3, 5)]]])]
        [3, 2]
        >>> [(spec.first, spec.length) for spec in divided([5], [[[(0, 5)]], [[(0, 5)]]])]
        [(0, 3), (3, 2)]
    """
    shape, specs = tuple(shape), []
    for rank, runs in enumerate(ranks):
        holders = [other for other, others in enumerate(ranks) if others == runs]
        numel = _numel(runs)
        length = -(-numel // len(holders))
        first = min(holders.index(rank) * length, numel)
        specs.append(ShardSpec(shape, runs, first, min(length, numel - first), holders))
    exchanged = sum(spec.length for spec in specs)
    if exchanged != prod(shape):
        raise ValueError(
            f"its ranks hold {exchanged} values where it has {prod(shape)}, so that some"
            " are missing or are held in several ways"
        )
    return specs


def shard_specs(parameters: Mapping[str, Tensor], group: Communicator, members: range) -> dict[str, list[ShardSpec]]:
    """Finds out what every rank of a group holds and exchanges of each parameter. In-group collective."""
    own: dict[str, list[Runs] | str] = {}
    for name, parameter in parameters.items():
        try:
            _require_own(parameter, members)
            own[name] = held_runs(parameter)
        except ValueError as error:
            own[name] = str(error)
    ranks, specs = group.all_gather_object(own), {}
    for name, parameter in parameters.items():
        try:
            specs[name] = divided(parameter.shape, [_known(rank[name]) for rank in ranks])
        except ValueError as error:
            raise ValueError(
                f"The parameter {name!r} cannot be exchanged: {error}. Shard it with fully_shard or parallelize_module"
                " over the mesh that configure_model gets as self.device_mesh."
            ) from error
    return specs


def ranks_of(tensor: Tensor) -> list[int]:
    """Returns the ranks, as the world counts them, over which a tensor is sharded; none if it is not."""
    sharded: Any = tensor
    return [int(rank) for rank in sharded.device_mesh.mesh.flatten()] if is_sharded(tensor) else []


def _require_own(tensor: Tensor, members: range) -> None:
    others = sorted(set(ranks_of(tensor)) - set(members))
    if others:
        raise ValueError(f"it is divided among ranks of several worker groups: ranks {others} belong to others")
    sharded: Any = tensor
    if is_sharded(tensor) and local(tensor).device.type != sharded.device_mesh.device_type:
        raise ValueError(f"it lies on {local(tensor).device.type!r}, its mesh on {sharded.device_mesh.device_type!r}")


def _known(runs: list[Runs] | str) -> list[Runs]:
    if isinstance(runs, str):
        raise ValueError(runs)
    return runs


def _numel(runs: list[Runs]) -> int:
    return prod(map(_length, runs))


def _length(along: Runs) -> int:
    return sum(end - start for start, end in along)


def _chunks(positions: list[int], count: int) -> list[list[int]]:
    """Cuts positions as ``torch.chunk`` cuts a tensor: the last chunks are smaller, or missing."""
    length = max(1, -(-len(positions) // count))
    return [positions[start : start + length] for start in range(0, len(positions), length)]


def _runs(positions: list[int]) -> Runs:
    if not positions:
        return []
    breaks = [0, *(at for at, (one, other) in enumerate(pairwise(positions), 1) if other != one + 1), len(positions)]
    return [(positions[start], positions[end - 1] + 1) for start, end in pairwise(breaks)]
