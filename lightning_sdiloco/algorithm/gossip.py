"""Routes: the groups with which each group exchanges in a round, and what they send if these are
not all others.

[Note: gossip] On a route that does not share, each group holds its own outer parameters. In a round
the groups of a *leg*, two or three, tell each other where they are, and each makes its outer step
with its outer parameters minus the mean of that as its outer gradient. Over all groups these outer
gradients have the mean that they have when all exchange, so the mean of the outer parameters moves
as there, for an outer optimizer that is linear in its gradients, as SGD with momentum is; and the
groups draw near to each other. With ``outer_lr=1`` and no momentum, the outer step is the mean of
the leg itself.

A group sends where it is, less an *anchor*: the values with which the rounds began, the same in all
groups. The loss of the compression stays with the group. So the mean over the groups is kept,
whatever the compression.
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

# How many rounds of a route are tried before training.
_TRIED = 8

# A compression that loses more than this share of what it encodes would part the groups: what is
# sent, how far a group is from where the rounds began, is many times as long as what it trained in
# a round.
_MOST_LOST = 0.01

Leg = tuple[int, ...]
"""Groups that exchange with each other in a round, rising."""


class Momentum(NamedTuple):
    """Numbers of the momentum of A2CiD2 between rounds: each group keeps a second vector beside
    its values.
    """

    rate: float
    pull: float


class Route(ABC):
    """Decides whom each group exchanges with in a round.

    Make it a frozen dataclass: its ``repr`` is compared between ranks, and with the checkpoint's.
    All groups must decide alike, from the number of the round alone.

    Attributes:
        shared: True if all groups hold the same outer parameters, which takes one leg of all
            groups. If not, each has its own; see [Note: gossip].

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
        """Returns the legs of a round. Each group is in one of them.

        Args:
            number: The round of a fragment, from 0.
            groups: Number of worker groups.
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
    """Pairs groups at random in each round, as NoLoCo does (arXiv 2506.10911).

    Args:
        seed: Other seeds make other pairs.

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
    """Each group exchanges with its two neighbours in turn, with the continuous momentum of A2CiD2.

    The momentum is from arXiv 2306.08289, with a round as its unit of time. It replaces the outer
    step: ``outer_lr`` is 1 and ``outer_momentum`` is 0.

    Args:
        accelerated: True for a momentum, which needs four groups; see `Momentum`.

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
        # For the Laplacian of the ring, whose edges are used in every other round: 1 over its least
        # eigenvalue above 0, and half of the largest resistance of an edge.
        slowness = 1 / (1 - cos(2 * pi / groups))
        resistance = (groups - 1) / groups
        return Momentum(
            rate=0.5 / sqrt(slowness * resistance), pull=0.5 * sqrt(slowness / resistance)
        )


def in_pairs(order: Sequence[int]) -> Sequence[Leg]:
    """Returns legs of groups that follow each other: pairs, and a third in the last if one group
    is left over.
    """
    starts = range(0, max(1, len(order) - 1), 2)
    legs = [tuple(order[start : start + 2]) for start in starts]
    legs[-1] = tuple(order[starts[-1] :])
    return _rising(legs)


def check_legs(route: Route, groups: int) -> None:
    """Refuses a route that does not bring each group into one leg of each of its first rounds."""
    for number in range(_TRIED):
        legs = route.legs(number, groups)
        if sorted(group for leg in legs for group in leg) != list(range(groups)):
            raise ValueError(
                f"route={route!r} has the legs {tuple(legs)} in round {number}, but there are"
                f" {groups} worker groups: each must be in exactly one leg. Correct its legs()."
            )
        if route.shared and len(legs) > 1:
            raise ValueError(
                f"route={route!r} says that all groups hold the same outer parameters (shared), but"
                f" has the legs {tuple(legs)} in round {number}: groups of different legs would"
                " drift apart. Set shared to False."
            )
    route.momentum(groups)


def _shuffled(groups: Sequence[int], seed: int, number: int) -> list[int]:
    order = list(groups)
    # A text is hashed in the same way everywhere.
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
    """Returns what a group brings to its leg. Writes to none of the tensors."""
    local = outer - gradient
    if momentum is None:
        return Brought(local - anchor, gradient, None)
    # The inner steps moved both alike. Then they draw near to each other for a round.
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
    """Returns what a group takes from the mean of its leg; `decoded` is what it sent, as its
    partners decode it.
    """
    if not finite:
        twin = None
        if momentum is not None:
            twin = anchor + mean
        return Taken((outer - anchor).sub_(mean), twin)
    # The loss of the compression stays with the group: it is in neither term.
    difference = decoded - mean
    gradient = brought.gradient + difference
    if momentum is None or brought.twin is None:
        return Taken(gradient, None)
    # In a pair, the mean is half of the difference away.
    return Taken(gradient, brought.twin - 2 * momentum.pull * difference)


def check_compression(compression: str | Compression) -> None:
    """Refuses a compression that does not suit a route on which groups hold their own outer
    parameters.
    """
    codec = resolve(compression)
    advice = "Choose 'int8', 'bf16' or 'fp32', or RandomK(every, Int8()), with which all send the same values."
    traits = codec.traits
    if traits.remembers or traits.share < 1 or traits.varies:
        raise ValueError(
            f"compression={compression!r} does not work with this route: partners must send each"
            " other the same values, whole, but this one lets each group choose, or remembers."
            f" {advice}"
        )
    dense = traits.values or codec
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    decoded = torch.empty_like(values)
    dense.decode(dense.encode(values), decoded)
    lost = float((decoded - values).norm() / values.norm())
    if lost > _MOST_LOST:
        raise ValueError(
            f"compression={compression!r} loses {lost:.0%} of what it encodes, but on this route"
            " groups send how far they are from where the rounds began, which may lose"
            f" {_MOST_LOST:.0%} at most. {advice}"
        )
