"""How much each worker group counts in a mean: arithmetic on control vectors, the same in all groups."""

from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lightning_sdiloco.algorithm.control import Control

# The guard compares a norm with so many before it, and does not act on fewer than that.
_REMEMBERED, _ENOUGH = 8, 4


class Count(NamedTuple):
    """How much each group counts in one mean.

    Attributes:
        factors: The groups that count, in their order, each with the factor of its outer gradient. The mean is the sum
            of the products divided by the number of these groups, so that a factor of 1 changes no bit.
        outlying: The groups that the guard leaves out.
    """

    factors: dict[int, float]
    outlying: tuple[int, ...] = ()


def plain(controls: Sequence["Control"]) -> Count:
    """The plain mean over the groups whose values are finite."""
    return Count({group: 1.0 for group, control in enumerate(controls) if control.finite})


class Aggregation:
    """Weighs, clips and guards the groups of every mean.

    It decides from what the groups sent, never from what a group computes for itself: the same numbers give the same
    bits everywhere. What it remembers changes only when a landing is committed.

    Args:
        groups: Number of worker groups.
        fragments: Number of fragments.
        clip_norm: Longer outer gradients are scaled down to this norm; None: none is.
        guard: A group whose norm is more than so many times the median of its last ones is left out; None: none is.

    Examples:
        >>> from lightning_sdiloco.algorithm.control import Control
        >>> long = Control(0, 100, 0, weight=100, digest=0, norm_squared=16.0, changed=0, finite=True)
        >>> late = long._replace(weight=50, norm_squared=1.0)
        >>> idle = long._replace(weight=0)
        >>> Aggregation(groups=3, fragments=1, clip_norm=None, guard=None).count([long, long, idle]).factors
        {0: 1.0, 1: 1.0}
        >>> Aggregation(groups=3, fragments=1, clip_norm=3.0, guard=None).count([long, late, late]).factors
        {0: 1.125, 1: 0.75, 2: 0.75}
    """

    def __init__(self, groups: int, fragments: int, clip_norm: float | None, guard: float | None) -> None:
        self._clip_norm = clip_norm
        self._guard = guard
        self._norms: list[list[list[float]]] = [[[] for _ in range(groups)] for _ in range(fragments)]

    def count(self, controls: Sequence["Control"]) -> Count:
        """How much each group counts in the mean of the fragment that all of them launched."""
        candidates = [group for group, control in enumerate(controls) if _may_count(control)]
        outlying = self._outlying(controls, candidates)
        counted = [group for group in candidates if group not in outlying]
        total = sum(controls[group].weight for group in counted)
        # In this order, a whole number over a whole number: exactly 1 where the weights are equal.
        weights = {group: len(counted) * controls[group].weight / total for group in counted}
        return Count({group: weight * self._clip(controls[group]) for group, weight in weights.items()}, outlying)

    def commit(self, controls: Sequence["Control"]) -> None:
        """Remembers the norms of a flight that landed, also those of groups that were left out.

        So a lasting change is accepted after some rounds.
        """
        norms = self._norms[controls[0].fragment]
        for group, control in enumerate(controls):
            if _may_count(control):
                norms[group] = [*norms[group], _norm(control)][-_REMEMBERED:]

    def saved(self, fragment: int) -> list[list[float]]:
        """The norms that are remembered of a fragment, by group."""
        return list(self._norms[fragment])

    def load(self, fragment: int, norms: Sequence[Sequence[float]]) -> None:
        """Takes back what `saved` returned."""
        self._norms[fragment] = [list(group) for group in norms]

    def _outlying(self, controls: Sequence["Control"], candidates: Sequence[int]) -> tuple[int, ...]:
        far = tuple(group for group in candidates if self._is_far(group, controls[group]))
        # What is far for everyone is a change of the training, and nobody's fault.
        return far if len(far) < len(candidates) else ()

    def _is_far(self, group: int, control: "Control") -> bool:
        before = self._norms[control.fragment][group]
        if self._guard is None or len(before) < _ENOUGH:
            return False
        return _norm(control) > self._guard * median(before) > 0

    def _clip(self, control: "Control") -> float:
        norm = _norm(control)
        return 1.0 if self._clip_norm is None or norm <= self._clip_norm else self._clip_norm / norm


def _may_count(control: "Control") -> bool:
    return control.finite and control.weight > 0


def _norm(control: "Control") -> float:
    return sqrt(control.norm_squared)
