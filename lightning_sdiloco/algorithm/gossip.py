"""Routes, which decide which groups exchange in a round, and the arithmetic for groups that
exchange only with partners.

[Note: gossip] On a route that is not shared, each group has its own outer parameters. In a round,
the two or three groups of a *leg* send each other their local parameters. A group's outer gradient
is its outer parameters minus the mean of the leg's local parameters. The mean of these outer
gradients over all groups is the same as if all groups had exchanged with each other. With an outer
optimizer that is linear in its gradients, such as SGD with momentum, the mean of the outer
parameters therefore moves in the same way, and the groups approach each other. With ``outer_lr=1``
and no momentum, the outer step gives exactly the mean of the leg.

A group sends its local parameters minus an *anchor*, which contains the values at the start of the
rounds and is the same in all groups. The compression error remains in the group, so every
compression preserves the mean over the groups.
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

# The number of rounds that are checked before training.
_TRIED = 8

# A compression that loses more than this share of its input would drive the groups apart, because a
# group sends its distance from the anchor, which is many times longer than its progress in a round.
_MOST_LOST = 0.01

Leg = tuple[int, ...]
"""Groups that exchange with each other in a round, in ascending order."""


class Momentum(NamedTuple):
    """The parameters of A2CiD2's momentum, for which each group keeps a second vector."""

    rate: float
    pull: float


class Route(ABC):
    """Decides which groups exchange with each other in a round.

    Make a route a frozen dataclass, because its ``repr`` is compared between ranks and with the
    checkpoint. All groups must make the same decision, based only on the round number.

    Attributes:
        shared: True if all groups have the same outer parameters, which requires a single leg of
            all groups. Otherwise, each group has its own outer parameters; see [Note: gossip].

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
        """Returns the legs of a round. Each group must be in exactly one leg.

        Args:
            number: The fragment's round, counted from 0.
            groups: The number of worker groups.
        """

    def momentum(self, groups: int) -> Momentum | None:
        """Returns the momentum that is applied between rounds, or None. The default is None."""
        return None


@dataclass(frozen=True)
class Everyone(Route):
    """A route on which all groups exchange with each other, as they do without a route."""

    shared = True

    @override
    def legs(self, number: int, groups: int) -> Sequence[Leg]:
        return (tuple(range(groups)),)


@dataclass(frozen=True)
class RandomPairs(Route):
    """A route that pairs groups at random in each round, as in NoLoCo (arXiv 2506.10911).

    Args:
        seed: The seed for the random pairs.

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
    """A route on which each group alternates between two neighbours, with A2CiD2's momentum.

    The continuous momentum is from arXiv 2306.08289, with a round as the unit of time. The momentum
    replaces the outer step, so ``outer_lr`` is 1 and ``outer_momentum`` is 0.

    Args:
        accelerated: True to use the momentum, which requires at least four groups; see `Momentum`.

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
                f"route={self!r} was given, but there are only {groups} worker groups. On a ring of"
                " fewer than 4 groups, all groups are neighbours, so there is nothing to"
                " accelerate. Choose Ring(accelerated=False), or leave route out."
            )
        # These values describe the Laplacian of the ring, whose edges are used in every other
        # round: the inverse of its smallest positive eigenvalue, and half of the largest resistance
        # of an edge.
        slowness = 1 / (1 - cos(2 * pi / groups))
        resistance = (groups - 1) / groups
        return Momentum(
            rate=0.5 / sqrt(slowness * resistance), pull=0.5 * sqrt(slowness / resistance)
        )


def in_pairs(order: Sequence[int]) -> Sequence[Leg]:
    """Returns legs of two consecutive groups. If the number of groups is odd, the last leg has
    three groups.
    """
    starts = range(0, max(1, len(order) - 1), 2)
    legs = [tuple(order[start : start + 2]) for start in starts]
    legs[-1] = tuple(order[starts[-1] :])
    return _rising(legs)


def check_legs(route: Route, groups: int) -> None:
    """Refuses a route that does not assign each group to exactly one leg in the first rounds."""
    for number in range(_TRIED):
        legs = route.legs(number, groups)
        if sorted(group for leg in legs for group in leg) != list(range(groups)):
            raise ValueError(
                f"route={route!r} has the legs {tuple(legs)} in round {number}, but there are"
                f" {groups} worker groups, each of which must be in exactly one leg. Correct the"
                " method legs()."
            )
        if route.shared and len(legs) > 1:
            raise ValueError(
                f"route={route!r} has shared=True, so all groups must have the same outer"
                f" parameters. However, groups in different legs would drift apart, and round"
                f" {number} has the legs {tuple(legs)}. Set shared to False."
            )
    route.momentum(groups)


def _shuffled(groups: Sequence[int], seed: int, number: int) -> list[int]:
    order = list(groups)
    # Strings give the same seed on every machine.
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
    """Returns a group's contribution to its leg without modifying the tensors."""
    local = outer - gradient
    if momentum is None:
        return Brought(local - anchor, gradient, None)
    # The inner steps moved both vectors equally. Now, the vectors approach each other for one
    # round.
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
    """Returns a group's outer gradient and second vector, given the mean of its leg and the group's
    contribution as decoded by its partners.
    """
    if not finite:
        twin = None
        if momentum is not None:
            twin = anchor + mean
        return Taken((outer - anchor).sub_(mean), twin)
    # The compression error remains in the group, because neither term contains it.
    difference = decoded - mean
    gradient = brought.gradient + difference
    if momentum is None or brought.twin is None:
        return Taken(gradient, None)
    # In a pair, the distance to the mean is half the difference.
    return Taken(gradient, brought.twin - 2 * momentum.pull * difference)


def check_compression(compression: str | Compression) -> None:
    """Refuses a compression that does not work if each group has its own outer parameters."""
    codec = resolve(compression)
    advice = "Choose 'int8', 'bf16', 'fp32' or RandomK(every, Int8()) so that all groups send the same values."
    traits = codec.traits
    if traits.remembers or traits.share < 1 or traits.varies:
        raise ValueError(
            f"compression={compression!r} does not work with this route. Partners must send each"
            " other the same values, without error feedback, but this compression lets each group"
            f" choose values or uses error feedback. {advice}"
        )
    dense = traits.values or codec
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    decoded = torch.empty_like(values)
    dense.decode(dense.encode(values), decoded)
    lost = float((decoded - values).norm() / values.norm())
    if lost > _MOST_LOST:
        raise ValueError(
            f"compression={compression!r} loses {lost:.0%} of the values that it encodes. On this"
            " route, groups send their distance from the start of the rounds, and the loss must not"
            f" exceed {_MOST_LOST:.0%}. {advice}"
        )
