"""Whole matrices of a fragment, each on one rank of the group: where the outer step sees more than
single values.

Every rank holds a shard of the mean outer gradient. The matrices of a fragment are dealt to the
ranks, so that all have about as much to compute and none holds the whole fragment. Each rank sends
the others what it holds of theirs, maps its own, and sends back what became of them. The bits do
not depend on who maps what.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.direction import Direction, directed_by
from lightning_sdiloco.algorithm.partition import Fragment, Stack, stack_of
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.outer import OuterState
from lightning_sdiloco.engine.shards import (
    FragmentLayout,
    ShardSpec,
    clean_name,
    digest,
    to_parameters,
    to_shards,
    trainable,
)

_log = logging.getLogger(__name__)

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

MOST_VALUES = 10_000_000
"""The most trainable values of a model whose matrices are mapped by default where float64 is not
fast."""

FEWEST_ROUNDS = 5
"""The fewest rounds in which matrices are mapped by default: with less, the plain mean did
better."""

# The compute capabilities of P100, V100, A100, H100 and H200, and B200. Other GPUs have a 32nd or a
# 64th of that rate.
_FAST_FLOAT64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))


def stacks_of(model: nn.Module, patterns: Mapping[str, int]) -> dict[str, Stack]:
    """Returns the trainable parameters that are matrices, by name, as `stack_of` says and patterns
    override.

    Raises:
        ValueError: If a pattern names no trainable parameter, or one without so many parts.
    """
    stacks = dict[str, Stack]()
    unused = set(patterns)
    groups = _groups_of_convolutions(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = clean_name(name)
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        unused.difference_update(matching)
        parts = patterns[matching[-1]] if matching else None
        try:
            stack = stack_of(parameter.shape, groups.get(_module_of(name)), parts)
        except ValueError as error:
            raise ValueError(
                f"matrices={{{matching[-1]!r}: {parts}}} does not suit the parameter {name!r}:"
                f" {error}. Give another"
                " number, or 0 for a parameter of which every value is by itself."
            ) from None
        if stack is not None:
            stacks[name] = stack
    if unused:
        raise ValueError(
            f"matrices has the pattern {sorted(unused)[0]!r}, which names no trainable parameter."
            " Correct it: names are those of named_parameters(), and patterns are shell-style,"
            " such as '*.qkv.weight'."
        )
    return stacks


def with_direction(
    settings: Settings,
    model: nn.Module,
    topology: Topology,
    rounds: float = math.inf,
    *,
    says: bool = True,
) -> Settings:
    """Returns the settings with a direction that suits them, the model and so many rounds. All
    ranks must call it.
    """
    reasons = topology.world.all_gather_object(reason_against(model))
    reason = next(filter(None, reasons), None)
    chosen = settings.directed(may_direct=reason is None and rounds >= FEWEST_ROUNDS)
    if says and reason is not None and chosen != settings.directed() and topology.rank == 0:
        _log.warning(
            "The outer step treats every value by itself: %s. Give"
            " outer_optimizer=OuterOptimizer(direction='equalised') to map matrices all the same.",
            reason,
        )
    return chosen


def reason_against(model: nn.Module) -> str | None:
    """Returns why the matrices of a model are not mapped by default, as this rank sees it; None if
    they are.
    """
    parameters = trainable(model).values()
    if any(map(is_lazy, parameters)):
        # Such models are refused where they are cut.
        return None
    values = sum(parameter.numel() for parameter in parameters)
    frozen = sum(
        parameter.numel() for parameter in model.parameters() if not parameter.requires_grad
    )
    if frozen > values:
        return "most of the model is frozen, as with LoRA, where that did better"
    if values > MOST_VALUES and not all(
        has_fast_float64(parameter.device) for parameter in parameters
    ):
        return (
            f"to map the matrices of more than {MOST_VALUES:,} values takes long beside training"
            " where float64 is slow, as on CPUs and on GPUs for graphics"
        )
    return None


def has_fast_float64(device: torch.device) -> bool:
    """Returns whether a device is known to multiply float64 at no less than half the rate of
    float32.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) in _FAST_FLOAT64


def _groups_of_convolutions(model: nn.Module) -> dict[str, int]:
    """Returns the groups of all convolutions, by name."""
    return {
        clean_name(f"{name}.")[:-1]: module.groups
        for name, module in model.named_modules()
        if isinstance(module, _CONVOLUTIONS)
    }


def _module_of(name: str) -> str:
    """Returns the name of the module that a parameter belongs to, parametrized or not."""
    return (
        name.split(".parametrizations.")[0]
        if ".parametrizations." in name
        else name.rpartition(".")[0]
    )


def proofs(
    fragments: Sequence[Fragment], direction: Direction | None, device: torch.device
) -> dict[str, str]:
    """Returns digests of what a direction makes of known matrices, one for each shape that the
    fragments have.

    Raises:
        ValueError: If it returns anything but matrices of the shape and dtype that it was given.
    """
    shapes = {
        (stack.rows, stack.columns)
        for fragment in fragments
        for stack in fragment.stacks
        if stack is not None
    }
    found = dict[str, str]()
    for rows, columns in sorted(shapes):
        assert direction is not None, "without a direction no parameter is a matrix"
        name = f"the direction of {rows} x {columns} matrices"
        # No random numbers: torch's differ between processors.
        numbers = torch.arange(rows * columns, dtype=torch.int32, device=device).remainder_(10007)
        numbers.mul_(7919).remainder_(10007).sub_(5003)
        given = {name: numbers.to(torch.float32).view(1, rows, columns).div_(4096)}
        values = directed_by(direction, given)[name]
        if values.shape != given[name].shape or values.dtype != torch.float32:
            raise ValueError(
                f"direction={direction!r} returned values of shape {tuple(values.shape)} and"
                f" {values.dtype} for float32 matrices of shape {tuple(given[name].shape)}. It"
                " must return matrices of the shape and dtype that it is given. Correct it, or"
                " choose 'equalised' or 'elementwise'."
            )
        found[name] = f"{digest(values) & 0xFFFFFFFFFFFFFFFF:016x}"
    return found


class Place(NamedTuple):
    """Where a matrix parameter is.

    Attributes:
        name: Its name.
        stack: Its matrices.
        owner: The rank of the group that maps them.
        specs: What each rank of the group exchanges of it.
        starts: Where that begins in the shard of each rank.
    """

    name: str
    stack: Stack
    owner: int
    specs: Sequence[ShardSpec]
    starts: Sequence[int]

    def of_shard(self, shard: Tensor, rank: int) -> Tensor:
        """Returns a view of what the shard of a rank has of the parameter."""
        return shard.narrow(0, self.starts[rank], self.specs[rank].length)


def places_of(layout: FragmentLayout, stacks: Mapping[str, Stack], ranks: int) -> list[Place]:
    """Deals the matrix parameters of a fragment to ranks: the costliest first, to whom has least
    to compute by then.
    """
    costs = [0.0] * ranks
    owners = dict[str, int]()
    names = [name for name in layout.names if name in stacks]
    for name in sorted(names, key=lambda name: -stacks[name].multiplications):
        owners[name] = costs.index(min(costs))
        costs[owners[name]] += stacks[name].multiplications
    places = list[Place]()
    starts = [0] * ranks
    for name, specs in zip(layout.names, layout.specs(ranks), strict=True):
        if name in stacks:
            places.append(Place(name, stacks[name], owners[name], specs, starts))
        starts = [start + spec.length for start, spec in zip(starts, specs, strict=True)]
    return places


class Matrices:
    """Maps the matrices of a fragment, of which every rank of the group holds a shard.

    Attributes:
        stacks: The parameters that are matrices, by name.
    """

    def __init__(
        self,
        fragment: Fragment,
        layout: FragmentLayout,
        direction: Direction | None,
        topology: Topology,
    ) -> None:
        stacks = dict(zip(fragment.names, fragment.stacks, strict=False))
        self.stacks = {name: stack for name, stack in stacks.items() if stack is not None}
        self._direction = direction
        self._ranks = range(topology.group_size)
        self._rank = topology.group_rank
        places = places_of(layout, self.stacks, topology.group_size)
        self._dealt = [[place for place in places if place.owner == owner] for owner in self._ranks]

    def state_dict(self) -> dict[str, Any]:
        """Returns what must be known to map flights in another run, as plain values."""
        return (
            {"stacks": {name: tuple(stack) for name, stack in self.stacks.items()}}
            if self.stacks
            else {}
        )

    def direct(self, gradient: Tensor, group: Communicator) -> None:
        """Makes the shard of a mean outer gradient that of its direction, in place. In-group
        collective.
        """
        assert self._direction is not None, "without a direction no parameter is a matrix"
        nothing = gradient.new_empty(0)
        sent = [
            [place.of_shard(gradient, self._rank) for place in places] for places in self._dealt
        ]
        owned = self._dealt[self._rank]
        received = _exchanged(
            sent,
            [[place.specs[rank].length for place in owned] for rank in self._ranks],
            nothing,
            group,
        )
        matrices = dict[str, Tensor]()
        for index, place in enumerate(owned):
            whole = gradient.new_empty(math.prod(place.stack))
            for rank in self._ranks:
                place.specs[rank].insert(whole, received[rank][index])
            matrices[place.name] = whole.view(place.stack)
        directed = directed_by(self._direction, matrices)
        answers = [
            [place.specs[rank].extract(directed[place.name].reshape(-1)) for place in owned]
            for rank in self._ranks
        ]
        results = _exchanged(
            answers, [[part.numel() for part in parts] for parts in sent], nothing, group
        )
        for parts, of_owner in zip(sent, results, strict=True):
            for part, result in zip(parts, of_owner, strict=True):
                part.copy_(result)


def direct_shards(
    fragment: Mapping[str, Any], shards: Sequence[OuterState], direction: Direction | None
) -> list[Tensor]:
    """Returns what a direction makes of a mean outer gradient, given all its shards and the saved
    fragment.
    """
    gradients = [shard.values for shard in shards]
    stacks = fragment.get("stacks", {})
    if direction is None or not stacks:
        return gradients
    whole = {name: parameter.values for name, parameter in to_parameters(fragment, shards).items()}
    matrices = {name: whole[name].view(stack) for name, stack in stacks.items()}
    for name, directed in directed_by(direction, matrices).items():
        whole[name] = directed.reshape(-1)
    return to_shards(fragment, whole, [len(gradient) for gradient in gradients])


def _exchanged(
    sent: Sequence[Sequence[Tensor]],
    sizes: Sequence[Sequence[int]],
    nothing: Tensor,
    group: Communicator,
) -> list[list[Tensor]]:
    """Sends every rank its vectors, ``nothing`` where there are none; returns what came from each,
    of these sizes.

    In-group collective.
    """
    if group.size == 1:
        return [list(vectors) for vectors in sent]
    messages = [torch.cat([nothing, *vectors]) for vectors in sent]
    received = group.all_to_all_vectors(messages, [sum(of_rank) for of_rank in sizes])
    return [
        list(message.split(list(of_rank))) for message, of_rank in zip(received, sizes, strict=True)
    ]
