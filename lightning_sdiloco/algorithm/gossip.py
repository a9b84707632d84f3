"""Routes decide which groups exchange in a round, and how they do so if not all groups exchange
together.

[Note: gossip] On a route that is not shared, each group has its own outer parameters. In a round,
the two or three groups of a *leg* send each other their local parameters, and each takes its outer
step with its outer parameters minus the mean of these as its outer gradient. Over all groups, these
outer gradients have the same mean as if all groups exchanged. So if the outer optimizer is linear
in its gradients, as SGD with momentum is, the mean of the outer parameters moves in the same way,
and the groups approach each other. With ``outer_lr=1`` and no momentum, the outer step gives
exactly the mean of the leg.

A group sends its local parameters minus an *anchor*: the values at the start of the rounds, which
are the same in all groups. The compression error remains in the group, so every compression
preserves the mean over the groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, exp, pi, sqrt
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.compression import Compression, resolve

# The number of rounds of a route that are checked before training.
_TRIED = 8

# A compression that loses more than this share of what it encodes would drive the groups apart: a
# group sends its distance from the anchor, which is many times as long as its progress in a round.
_MOST_LOST = 0.01

Leg = tuple[int, ...]
"""Groups that exchange with each other in a round, in ascending order."""


class Momentum(NamedTuple):
    """The numbers of A2CiD2's momentum between rounds, for which each group keeps a second
    vector.
    """

    rate: float
    pull: float


class Route(ABC):
    """Decides with which groups each group exchanges in a round.

    Make it a frozen dataclass: its ``repr`` is compared between ranks, and with the checkpoint's.
    All groups must make the same decision, based only on the number of the round.

    Attributes:
        shared: True if all groups have the same outer parameters, which requires one leg of all
            groups. Otherwise, each has its own; see [Note: gossip].

    Examples:
        >>> @dataclass(frozen=True)
        ... class Shifted(Route):
        ...     def legs(self, number, groups):
        ...         order = [(group + number) % groups for group in range(groups)]
        ...         return [tuple(order[start : start + 2]) for start in range(0, groups, 2)]
        >>> Shifted().legs(0, 4), Shifted().legs(1, 4)
        ([(0, 1), (2, 3)], [(1, 2), (3, 0)])
    """

    shared: bool = False

    @abstractmethod
    def legs(self, number: int, groups: int) -> Sequence[Leg]:
        """Returns the legs of a round. Each group is in exactly one of them.

        Args:
            number: The round of a fragment, counted from 0.
            groups: The number of worker groups.
        """

    def momentum(self, groups: int) -> Momentum | None:
        """Returns the momentum between rounds; by default there is none."""
        return None


@dataclass(frozen=True)
class Everyone(Route):
    """All groups exchange with all others, as without a route."""

    shared = True

    @override
    def legs(self, number: int, groups: int) -> Sequence[Leg]:
        return (tuple(range(groups)),)


@dataclass(frozen=True)
class RandomPairs(Route):
    """Pairs groups at random in each round, as in NoLoCo (arXiv 2506.10911).

    Args:
        seed: The seed of the random pairs.

    Examples:
        >>> RandomPairs(seed=0).legs(0, groups=5)
        ((0, 1, 4), (2, 3))
    """

    seed: int = 0

    @override
    def legs(self, number: int, groups: int) -> Sequence[Leg]:
        return in_pairs(_shuffled(range(groups), self.seed, number))


@dataclass(frozen=True)
class Ring(Route):
    """Each group alternates between its two neighbours, with the continuous momentum of A2CiD2.

    The momentum is from arXiv 2306.08289, with a round as its unit of time. It replaces the outer
    step: ``outer_lr`` is 1 and ``outer_momentum`` is 0.

    Args:
        accelerated: True for the momentum, which needs at least four groups; see `Momentum`.

    Examples:
        >>> Ring().legs(0, groups=6), Ring().legs(1, groups=6)
        (((0, 1), (2, 3), (4, 5)), ((0, 5), (1, 2), (3, 4)))
    """

    accelerated: bool = True

    @override
    def legs(self, number: int, groups: int) -> Sequence[Leg]:
        return in_pairs([(group + number) % groups for group in range(groups)])

    @override
    def momentum(self, groups: int) -> Momentum | None:
        if not self.accelerated:
            return None
        if groups < 4:
            raise ValueError(
                f"route={self!r} was given, but there are {groups} worker groups: on a ring of"
                " fewer than 4 each group is a neighbour of all others, and there is nothing to"
                " accelerate. Choose Ring(accelerated=False), or leave route out."
            )
        # For the Laplacian of the ring, whose edges are used in every other round: 1 over its
        # smallest positive eigenvalue, and half of the largest resistance of an edge.
        slowness = 1 / (1 - cos(2 * pi / groups))
        resistance = (groups - 1) / groups
        return Momentum(
            rate=0.5 / sqrt(slowness * resistance), pull=0.5 * sqrt(slowness / resistance)
        )


def in_pairs(order: Sequence[int]) -> Sequence[Leg]:
    """Returns legs of consecutive groups: pairs, and three groups in the last leg if one is left
    over.
    """
    starts = range(0, max(1, len(order) - 1), 2)
    legs = [tuple(order[start : start + 2]) for start in starts]
    legs[-1] = tuple(order[starts[-1] :])
    return _rising(legs)


def check_legs(route: Route, groups: int) -> None:
    """Refuses a route that does not put each group into one leg in each of its first rounds."""
    for number in range(_TRIED):
        legs = route.legs(number, groups)
        if sorted(group for leg in legs for group in leg) != list(range(groups)):
            raise ValueError(
                f"route={route!r} has the legs {tuple(legs)} in round {number}, but there are"
                f" {groups} worker groups: each must be in exactly one leg. Correct its legs()."
            )
        if route.shared and len(legs) > 1:
            raise ValueError(
                f"route={route!r} says that all groups have the same outer parameters (shared), but"
                f" has the legs {tuple(legs)} in round {number}: groups of different legs would"
                " drift apart. Set shared to False."
            )
    route.momentum(groups)


def _shuffled(groups: Sequence[int], seed: int, number: int) -> list[int]:
    order = list(groups)
    # Strings are hashed in the same way everywhere.
    Random(f"{seed}, {number}").shuffle(order)
    return order


def _rising(legs: Sequence[Leg]) -> Sequence[Leg]:
    return tuple(sorted(tuple(sorted(leg)) for leg in legs))


class Brought(NamedTuple):
    values: Tensor
    gradient: Tensor
    twin: Tensor | None


class Taken(NamedTuple):
    gradient: Tensor
    twin: Tensor | None


def bring(
    outer: Tensor,
    gradient: Tensor,
    anchor: Tensor,
    twin: Tensor | None = None,
    momentum: Momentum | None = None,
) -> Brought:
    """Returns a group's contribution to its leg. Does not modify the tensors."""
    local = outer - gradient
    if momentum is None:
        return Brought(local - anchor, gradient, None)
    # The inner steps moved both vectors equally. Now they approach each other for a round.
    second = local
    if twin is not None:
        second = twin - gradient
    approach = (second - local).mul_((1 - exp(-2 * momentum.rate)) / 2)
    local = local + approach
    second = second - approach
    return Brought(local - anchor, outer - local, second)


def take(
    brought: Brought,
    decoded: Tensor,
    mean: Tensor,
    outer: Tensor,
    anchor: Tensor,
    finite: bool,
    momentum: Momentum | None,
) -> Taken:
    """Returns what a group takes from the mean of its leg; `decoded` is its contribution as its
    partners decode it.
    """
    if not finite:
        twin = None
        if momentum is not None:
            twin = anchor + mean
        return Taken((outer - anchor).sub_(mean), twin)
    # The compression error remains in the group: neither term contains it.
    difference = decoded - mean
    gradient = brought.gradient + difference
    if momentum is None or brought.twin is None:
        return Taken(gradient, None)
    # In a pair, the mean is half of the difference away.
    return Taken(gradient, brought.twin - 2 * momentum.pull * difference)


def check_compression(compression: str | Compression) -> None:
    """Refuses a compression that does not suit a route on which groups have their own outer
    parameters.
    """
    codec = resolve(compression)
    advice = "Choose 'int8', 'bf16' or 'fp32', or RandomK(every, Int8()), with which all send the same values."
    traits = codec.traits
    if traits.remembers or traits.share < 1 or traits.varies:
        raise ValueError(
            f"compression={compression!r} does not work with this route: partners must send each"
            " other the same values in full, but this one lets each group choose values, or has"
            f" error feedback. {advice}"
        )
    dense = traits.values or codec
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    decoded = torch.empty_like(values)
    dense.decode(dense.encode(values), decoded)
    lost = float((decoded - values).norm() / values.norm())
    if lost > _MOST_LOST:
        raise ValueError(
            f"compression={compression!r} loses {lost:.0%} of what it encodes, but on this route"
            " groups send their distance from the start of the rounds, which may lose at most"
            f" {_MOST_LOST:.0%}. {advice}"
        )
