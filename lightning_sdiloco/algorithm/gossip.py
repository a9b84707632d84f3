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
from functools import lru_cache
from itertools import combinations
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


@dataclass(frozen=True)
class FastestPairs(Route):
    """Pairs groups over fast links, connecting all of them every ``window`` rounds, as SAPS-PSGD
    does.

    See arXiv 2002.09692. ``window`` rounds are planned together. All but the last take the fastest
    pairs that these rounds have not had yet, judged by the slowest pair first; the last one joins
    what is not connected, over the fastest links that do so. Chance decides between links of equal
    speed.

    Args:
        speeds: Speed of each group's link, in any unit; a pair has the slower one's. Or, for each
            group, the speeds of its links to all groups. Without it all links are alike.
            ``sdiloco doctor`` measures links.
        window: Rounds that are planned together, at least 2.
        seed: Decides between links of equal speed.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> route = FastestPairs(speeds=(10, 10, 1, 1), window=2)
        >>> route.legs(0, groups=4), route.legs(1, groups=4)
        (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """

    speeds: tuple[float, ...] | tuple[tuple[float, ...], ...] = ()
    window: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 2:
            raise ValueError(
                f"window={self.window!r} is out of range: it must be a whole number of at least 2,"
                " since one round of pairs connects only the pairs. 3 is the default."
            )
        # From YAML they come as lists. Their repr is compared.
        rows = tuple(tuple(row) if isinstance(row, Sequence) else row for row in self.speeds)
        if {len(row) if isinstance(row, tuple) else 0 for row in rows} not in (
            set(),
            {0},
            {len(rows)},
        ):
            raise ValueError(
                f"speeds={self.speeds!r} has neither one number per group, nor one row per group"
                " with a number for each. Give one of these."
            )
        object.__setattr__(self, "speeds", rows)
        if not all(self.speed(*pair) > 0 for pair in combinations(range(len(rows)), 2)):
            raise ValueError(f"speeds={self.speeds!r} must be numbers above 0. Give others.")

    @override
    def legs(self, number: int, groups: int) -> Sequence[Leg]:
        if self.speeds and len(self.speeds) != groups:
            raise ValueError(
                f"route={self!r} has the speeds of {len(self.speeds)} groups, but there are"
                f" {groups}. Give the speeds of all, in their order."
            )
        block, place = divmod(number, self.window)
        return _planned(self, block, groups)[place]

    def plan(self, block: int, groups: int) -> list[Sequence[Leg]]:
        """Returns the legs of ``window`` rounds that are planned together."""
        planned: list[Sequence[Leg]] = []
        for at in range(self.window):
            order = _shuffled(range(groups), self.seed, block * self.window + at)
            used: set[Leg] = {
                pair for legs in planned for leg in legs for pair in combinations(leg, 2)
            }
            links = [(min(pair), max(pair)) for pair in combinations(order, 2)]
            links.sort(key=lambda pair: (pair not in used, self.speed(*pair)), reverse=True)
            joining = _joining(planned, groups, links) if at == self.window - 1 else []
            pairs = list(joining)
            busy = {group for pair in joining for group in pair}
            for pair in links:
                if busy.isdisjoint(pair):
                    busy.update(pair)
                    pairs.append(pair)
            while not joining and (better := self._exchanged(pairs, used)):
                pairs = better
            for third in set(order) - busy:
                # It joins the pair for which it is fastest.
                own = max(
                    pairs, key=lambda pair: min(self.speed(third, one) for one in pair), default=()
                )
                pairs = [(*own, third), *(pair for pair in pairs if pair != own)]
            planned.append(_rising(pairs))
        return planned

    def speed(self, one: int, other: int) -> float:
        """Returns the speed of the link between two groups."""
        if not self.speeds:
            return 1.0
        there = self.speeds[one]
        back = self.speeds[other]
        return min(
            there[other] if isinstance(there, tuple) else there,
            back[one] if isinstance(back, tuple) else back,
        )

    def _exchanged(self, pairs: list[Leg], used: set[Leg]) -> list[Leg] | None:
        """Exchanges partners where the slower of two pairs becomes faster by it: greed leaves the
        slowest over.
        """
        for before in combinations(pairs, 2):
            (a, b), (c, d) = before
            for new in (((a, c), (b, d)), ((a, d), (b, c))):
                fresh = [(min(pair), max(pair)) for pair in new]
                slowest, was = (min(self.speed(*pair) for pair in both) for both in (fresh, before))
                if used.isdisjoint(fresh) and slowest > was:
                    return [*fresh, *(pair for pair in pairs if pair not in before)]
        return None


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
                f"route={route!r} says that all groups hold the same outer parameters (shared),"
                f" but has the legs {tuple(legs)} in round {number}: groups of different legs"
                " would drift apart. Set shared to False."
            )
    route.momentum(groups)


@lru_cache(maxsize=64)
def _planned(route: FastestPairs, block: int, groups: int) -> list[Sequence[Leg]]:
    return route.plan(block, groups)


def _shuffled(groups: Sequence[int], seed: int, number: int) -> list[int]:
    order = list(groups)
    # A text is hashed in the same way everywhere.
    Random(f"{seed}, {number}").shuffle(order)
    return order


def _rising(legs: Sequence[Leg]) -> Sequence[Leg]:
    return tuple(sorted(tuple(sorted(leg)) for leg in legs))


def _joining(planned: Sequence[Sequence[Leg]], groups: int, links: Sequence[Leg]) -> list[Leg]:
    """Returns links, the first ones first, that join what is not connected and have no group in
    common.
    """
    parts = [{group} for group in range(groups)]
    for leg in (leg for legs in planned for leg in legs):
        own = [part for part in parts if not part.isdisjoint(leg)]
        parts = [part for part in parts if part not in own] + [set[int]().union(*own)]
    pairs = list[Leg]()
    busy = set[int]()
    while len(parts) > 1:
        for pair in links:
            one, other = (next(part for part in parts if group in part) for group in pair)
            # Two groups of a part that others wait for must be left: a part of two or more always
            # has them.
            is_last = len(parts) == 2
            if (
                one is not other
                and busy.isdisjoint(pair)
                and (is_last or len((one | other) - busy) > 3)
            ):
                break
        pairs.append(pair)
        busy.update(pair)
        parts = [part for part in parts if part is not one and part is not other] + [one | other]
    return pairs


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
    if codec.remembers() or codec.chosen_share() < 1 or codec.varies():
        raise ValueError(
            f"compression={compression!r} does not work with this route: partners must send each"
            " other the same values,"
            f" whole, but this one lets each group choose, or remembers. {advice}"
        )
    dense = codec.dense()
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
