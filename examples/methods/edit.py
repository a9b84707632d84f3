"""EDiT's weighings of groups (arXiv 2412.07210), and SparseLoCo's (arXiv 2508.15706), as subclasses
of `Weighing`.

    python examples/methods/edit.py

With a Trainer, use `StreamingDiLoCoStrategy(weighing=ByNorm(temperature=1.0))`, with this file next
to your script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, sqrt
from statistics import median
from typing import Any

from side_by_side import compare

from lightning_sdiloco import Control, Count, Weighing


def candidates(controls: Sequence[Control]) -> list[int]:
    """Returns the groups that may count: those that trained and whose outer gradient is finite."""
    return [
        group for group, control in enumerate(controls) if control.finite and control.weight > 0
    ]


def by_training(controls: Sequence[Control], groups: Sequence[int]) -> dict[int, float]:
    """Returns factors in proportion to the training of each group, with a mean of 1."""
    total = sum(controls[group].weight for group in groups)
    return {group: len(groups) * controls[group].weight / total for group in groups}


@dataclass(frozen=True)
class ByNorm(Weighing):
    """EDiT: a group is weighted by its training times `exp(-norm / temperature)`, where the norm is
    that of one fragment.
    """

    temperature: float = 1.0

    def count(self, controls: Sequence[Control], state: Any) -> Count:
        weights = by_training(controls, candidates(controls))
        # Measured relative to the shortest, so that at least one factor is not 0.
        shortest = min((controls[group].norm for group in weights), default=inf)
        if shortest == inf:
            return Count(weights)
        shares = {
            group: weight * exp((shortest - controls[group].norm) / self.temperature)
            for group, weight in weights.items()
        }
        total = sum(shares.values())
        return Count({group: len(shares) * share / total for group, share in shares.items()})


@dataclass(frozen=True)
class ByMedian(Weighing):
    """SparseLoCo: scales outer gradients that are longer than the median of all groups down to that
    length.
    """

    def count(self, controls: Sequence[Control], state: Any) -> Count:
        weights = by_training(controls, candidates(controls))
        middle = median([controls[group].norm for group in weights]) if weights else 0.0
        norms = {group: controls[group].norm for group in weights}
        for group, norm in norms.items():
            if norm > middle:
                weights[group] *= middle / norm
        return Count(weights)


@dataclass(frozen=True)
class ZScore(Weighing):
    """EDiT: leaves out a group whose norm is `threshold` standard deviations above the mean of its
    own previous norms.

    `alpha` is the weight of a new norm in mean and variance. Norms are judged after the first
    `warmup` ones. A norm that was left out enters the mean as the longest that would have counted,
    so that a lasting change is eventually accepted.
    """

    threshold: float = 3.0
    alpha: float = 0.02
    warmup: int = 120

    def start(self, groups: int) -> list[list[float]]:
        return [[0, 0.0, 0.0] for _ in range(groups)]  # number of norms, mean, variance

    def count(self, controls: Sequence[Control], state: Any) -> Count:
        groups = candidates(controls)
        outlying = tuple(
            group for group in groups if controls[group].norm > self.longest(state[group])
        )
        return Count(
            by_training(controls, [group for group in groups if group not in outlying]), outlying
        )

    def heard(self, controls: Sequence[Control], state: Any, count: Count) -> list[list[float]]:
        trained = candidates(controls)
        return [
            self.added(seen, min(controls[group].norm, self.longest(seen)))
            if group in trained
            else list(seen)
            for group, seen in enumerate(state)
        ]

    def longest(self, seen: Sequence[float]) -> float:
        count, mean, variance = seen
        return mean + self.threshold * sqrt(variance) if count >= self.warmup else inf

    def added(self, seen: Sequence[float], norm: float) -> list[float]:
        count, mean, variance = seen
        if not isfinite(norm):
            return list(seen)
        # The first norms have equal weights. Otherwise, the very first one would dominate for a
        # long time.
        share = max(self.alpha, 1 / (count + 1))
        off = norm - mean
        return [count + 1, mean + share * off, (1 - share) * (variance + share * off * off)]


if __name__ == "__main__":
    compare(
        {
            "by the steps trained": {},
            "ByNorm(temperature=1.0)": {"weighing": ByNorm(temperature=1.0)},
            "ZScore(warmup=5)": {"weighing": ZScore(warmup=5)},
            "ByMedian()": {"weighing": ByMedian()},
        },
        groups=3,
        steps=300,
        sync_every=20,
        overlap_steps=2,
    )
