"""Weighings other than by training alone: what a group's outer gradient looks like decides how much it counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, sqrt
from statistics import median
from typing import Any

from typing_extensions import override

from lightning_sdiloco.algorithm.aggregation import Count, Weighing, by_training, may_count
from lightning_sdiloco.algorithm.control import Control


@dataclass(frozen=True)
class ByNorm(Weighing):
    """Lets groups count the less the longer their outer gradient is, as EDiT does (arXiv 2412.07210).

    The factor of a group is ``exp(-norm / temperature)``, times what it trained, over the sum of all groups'. It is
    taken for each fragment by itself.

    Args:
        temperature: Above 0. The larger, the nearer to a mean by training alone; EDiT has 1.

    Raises:
        ValueError: If it is not.

    Examples:
        >>> long = Control(0, 100, 0, weight=100, digest=0, norm_squared=4.0, changed=0, finite=True)
        >>> factors = ByNorm().count([long, long._replace(norm_squared=1.0)], None).factors
        >>> [round(factor, 3) for factor in factors.values()]
        [0.538, 1.462]
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        _require_above(0, temperature=self.temperature)

    @override
    def count(self, controls: Sequence[Control], state: Any) -> Count:
        weights = by_training(controls, may_count(controls))
        # Measured from the shortest, so that one of them is never 0.
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
    """Scales outer gradients down that are longer than the median of all groups, to that length.

    As SparseLoCo does in production (arXiv 2508.15706). Groups count by what they trained.

    Examples:
        >>> short = Control(0, 100, 0, weight=100, digest=0, norm_squared=1.0, changed=0, finite=True)
        >>> ByMedian().count([short, short, short._replace(norm_squared=16.0)], None).factors
        {0: 1.0, 1: 1.0, 2: 0.25}
    """

    @override
    def count(self, controls: Sequence[Control], state: Any) -> Count:
        weights = by_training(controls, may_count(controls))
        middle = median([controls[group].norm for group in weights]) if weights else 0.0
        return Count({group: weight * _scale(controls[group].norm, middle) for group, weight in weights.items()})


@dataclass(frozen=True)
class ZScore(Weighing):
    """Leaves a group out whose outer gradient is unusually long for it, as EDiT does (arXiv 2412.07210).

    Unusual is what lies more than ``threshold`` standard deviations above the mean of its norms so far, in which later
    ones count more. What was left out enters that mean as the longest that would have counted, so that a lasting
    change is accepted in time. Where all groups are unusual, none counts: all go back to the outer parameters.

    Args:
        threshold: Above 0, in standard deviations; EDiT has 3.
        alpha: How much a new norm counts in mean and variance, above 0 and at most 1; EDiT has 0.02.
        warmup: So many norms of a group come before the first that is judged; EDiT has 120.

    Raises:
        ValueError: If one is out of its range.
    """

    threshold: float = 3.0
    alpha: float = 0.02
    warmup: int = 120

    def __post_init__(self) -> None:
        _require_above(0, threshold=self.threshold, alpha=self.alpha)
        if self.alpha > 1 or isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or self.warmup < 1:
            raise ValueError(
                f"alpha={self.alpha!r} and warmup={self.warmup!r}: alpha must be at most 1, and warmup a whole number"
                " of at least 1. The defaults are EDiT's."
            )

    @override
    def start(self, groups: int) -> list[list[float]]:
        # Of each group: how many norms, their mean, their variance.
        return [[0, 0.0, 0.0] for _ in range(groups)]

    @override
    def count(self, controls: Sequence[Control], state: Any) -> Count:
        candidates = may_count(controls)
        outlying = tuple(group for group in candidates if controls[group].norm > self._longest(state[group]))
        return Count(by_training(controls, [group for group in candidates if group not in outlying]), outlying)

    @override
    def heard(self, controls: Sequence[Control], state: Any) -> list[list[float]]:
        candidates = may_count(controls)
        return [
            self._added(seen, min(controls[group].norm, self._longest(seen))) if group in candidates else list(seen)
            for group, seen in enumerate(state)
        ]

    def _longest(self, seen: Sequence[float]) -> float:
        count, mean, variance = seen
        return mean + self.threshold * sqrt(variance) if count >= self.warmup else inf

    def _added(self, seen: Sequence[float], norm: float) -> list[float]:
        count, mean, variance = seen
        if not isfinite(norm):
            return list(seen)
        # The first norms count alike, or the very first one would count most for long.
        share = max(self.alpha, 1 / (count + 1))
        off = norm - mean
        return [count + 1, mean + share * off, (1 - share) * (variance + share * off * off)]


def _scale(norm: float, longest: float) -> float:
    return 1.0 if norm <= longest else longest / norm


def _require_above(least: float, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least < value < inf:
            raise ValueError(
                f"{name}={value!r} is out of range: it must be a number above {least}. Choose another one."
            )
