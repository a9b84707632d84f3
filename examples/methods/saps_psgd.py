"""Pairs of groups that average over fast links (SAPS-PSGD, arXiv 2002.09692), as a `Route`.

    python examples/methods/saps_psgd.py

With a Trainer, use `StreamingDiLoCoStrategy(route=FastestPairs(speeds=...), outer_lr=1,
outer_momentum=0, compression="int8")`, with this file next to your script.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations
from random import Random

from side_by_side import compare

from lightning_sdiloco import Route
from lightning_sdiloco.compression import Int8, RandomK

Leg = tuple[int, ...]


@dataclass(frozen=True)
class FastestPairs(Route):
    """Pairs groups over fast links and connects all groups every `window` rounds.

    `window` rounds are planned together. All except the last use the fastest pairs that these
    rounds have not used yet, compared by their slowest pair first. The last one connects the parts
    that are still separate, over the fastest possible links. `seed` decides between links of equal
    speed. `speeds` has a number for each group, of which a pair gets the lower one, or a row for
    each group's links; () if all are equal.
    """

    speeds: tuple[float, ...] | tuple[tuple[float, ...], ...] = ()
    window: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"window={self.window!r} must be at least 2.")
        # YAML provides lists. Their repr is compared between ranks.
        rows = tuple(tuple(row) if isinstance(row, Sequence) else row for row in self.speeds)
        lengths = {len(row) if isinstance(row, tuple) else 0 for row in rows}
        object.__setattr__(self, "speeds", rows)
        fit = lengths in (set(), {0}, {len(rows)})
        if not fit or not all(self.speed(pair) > 0 for pair in combinations(range(len(rows)), 2)):
            raise ValueError(f"speeds={rows!r} must be a number above 0, or a row, for each group.")

    def legs(self, number: int, groups: int) -> Sequence[Leg]:
        rows = len(self.speeds)
        if rows not in (0, groups):
            raise ValueError(f"{self!r} has the speeds of {rows} groups, but there are {groups}.")
        block, place = divmod(number, self.window)
        return planned(self, block, groups)[place]

    def speed(self, pair: Leg) -> float:
        """Returns the speed of the link between two groups, which is that of its slower
        direction.
        """
        if not self.speeds:
            return 1.0
        ways = zip([self.speeds[group] for group in pair], reversed(pair), strict=True)
        return min(row[to] if isinstance(row, tuple) else row for row, to in ways)

    def pairs(self, links: Sequence[Leg], used: set[Leg]) -> list[Leg]:
        """Returns the fastest pairs: greedily, then with exchanges of partners, because greed
        leaves slow pairs.
        """
        pairs = disjoint(links, [])
        while improved := self.exchanged(pairs, used):
            pairs = improved
        return pairs

    def exchanged(self, pairs: Sequence[Leg], used: set[Leg]) -> list[Leg] | None:
        """Returns the pairs with partners exchanged so that the slower of two becomes faster, if
        possible.
        """
        for old in combinations(pairs, 2):
            (a, b), (c, d) = old
            for new in (((a, c), (b, d)), ((a, d), (b, c))):
                fresh = [(min(pair), max(pair)) for pair in new]
                is_faster = min(map(self.speed, fresh)) > min(map(self.speed, old))
                if is_faster and used.isdisjoint(fresh):
                    return [*fresh, *(pair for pair in pairs if pair not in old)]
        return None


@lru_cache(maxsize=64)
def planned(route: FastestPairs, block: int, groups: int) -> list[list[Leg]]:
    """Returns the legs of the rounds that are planned together."""
    rounds: list[list[Leg]] = []
    first = block * route.window
    for number in range(first, first + route.window):
        order = list(range(groups))
        Random(f"{route.seed}, {number}").shuffle(order)  # strings seed alike on all machines
        legs = list(chain.from_iterable(rounds))
        used: set[Leg] = {pair for leg in legs for pair in combinations(leg, 2)}
        links = [(min(pair), max(pair)) for pair in combinations(order, 2)]
        links.sort(key=lambda pair: (pair not in used, route.speed(pair)), reverse=True)
        joining = joined(legs, groups, links) if number == first + route.window - 1 else []
        pairs = disjoint(links, joining) if joining else route.pairs(links, used)
        for third in set(order).difference(*pairs):
            pairs = with_third(route, pairs, third)
        rounds.append(sorted(tuple(sorted(pair)) for pair in pairs))
    return rounds


def with_third(route: FastestPairs, pairs: Sequence[Leg], third: int) -> list[Leg]:
    """Returns the pairs; the pair with the fastest links to a group without a partner takes it
    in.
    """
    speeds = {pair: min(route.speed((group, third)) for group in pair) for pair in pairs}
    fastest: Leg = max(speeds, key=speeds.__getitem__, default=())
    return [(*fastest, third), *(pair for pair in pairs if pair != fastest)]


def disjoint(links: Sequence[Leg], pairs: list[Leg]) -> list[Leg]:
    """Returns the pairs and the first links that share no group with them or with each other."""
    for link in links:
        if all(set(pair).isdisjoint(link) for pair in pairs):
            pairs = [*pairs, link]
    return pairs


def joined(legs: Sequence[Leg], groups: int, links: Sequence[Leg]) -> list[Leg]:
    """Returns the first links without a common group that connect parts that the legs leave
    separate.
    """
    parts = [{group} for group in range(groups)]
    for leg in legs:
        parts = merged(parts, leg)
    pairs: list[Leg] = []
    while len(parts) > 1:
        pair = next(link for link in links if joins(link, parts, set[int]().union(*pairs)))
        pairs.append(pair)
        parts = merged(parts, pair)
    return pairs


def merged(parts: Sequence[set[int]], leg: Leg) -> list[set[int]]:
    """Returns the parts after merging those that a leg connects into the last one."""
    apart = [part for part in parts if part.isdisjoint(leg)]
    return [*apart, set[int]().union(*(part for part in parts if part not in apart))]


def joins(link: Leg, parts: Sequence[set[int]], busy: set[int]) -> bool:
    """Returns whether a link between free groups connects two parts and leaves two groups free for
    others.
    """
    after = merged(parts, link)
    has_room = len(parts) == 2 or len(after[-1] - busy) > 3
    return len(after) < len(parts) and busy.isdisjoint(link) and has_room


MEAN = {"outer_lr": 1.0, "outer_momentum": 0.0}
# Groups 0 and 1 are at one site and 2 and 3 at another, with a slow link between them.
ROUTE = FastestPairs(speeds=((1, 10, 1, 1), (10, 1, 1, 1), (1, 1, 1, 10), (1, 1, 10, 1)), window=3)
METHODS = {
    "FastestPairs": {"route": ROUTE, "compression": "int8", **MEAN},
    "... one value of 4": {"route": ROUTE, "compression": RandomK(4, Int8()), **MEAN},
    "... links alike": {"route": FastestPairs(), "compression": "int8", **MEAN},
}

if __name__ == "__main__":
    compare(METHODS, groups=4, steps=200, sync_every=10, overlap_steps=2)
