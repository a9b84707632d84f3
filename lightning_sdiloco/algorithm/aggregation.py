"""How much each worker group counts in a mean, and which groups are absent: arithmetic, the same in all groups."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_sdiloco.algorithm.control import Control
from lightning_sdiloco.errors import AgreementError

# The guard compares a norm with up to eight earlier ones, and does not act on fewer than four.
_REMEMBERED, _ENOUGH = 8, 4

# A group that is left out this many times in a row will not recover.
_MOST_LEFT_OUT = 3

Norms = Sequence[Sequence[float]]
"""The last norms of the outer gradients of a fragment, by group: at most eight each, the oldest first."""


class Count(NamedTuple):
    """Tells how much each group counts in one mean.

    Attributes:
        factors: The groups that count, in their order, each with the factor of its outer gradient. The mean is the sum
            of the products divided by the number of these groups, so that a factor of 1 changes no bit.
        outlying: The groups that the guard leaves out.
    """

    factors: dict[int, float]
    outlying: tuple[int, ...] = ()


def plain(controls: Sequence[Control]) -> Count:
    """Counts once every group whose values are finite."""
    return Count({group: 1.0 for group, control in enumerate(controls) if control.finite})


def trained(controls: Sequence[Control]) -> Count:
    """Counts once every group that trained, whether its values are finite or not."""
    return Count({group: 1.0 for group, control in enumerate(controls) if control.weight})


class Weighing(ABC):
    """Decides how much each group counts in the mean of a fragment.

    It decides from what the groups sent, never from what a group computes for itself: the same numbers give the same
    bits everywhere. Make it a frozen dataclass: its ``repr`` is compared between ranks, and with that of a checkpoint.
    Its state, of each fragment, is plain JSON, and changes only when a flight lands.
    """

    def start(self, groups: int) -> Any:
        """Returns the state of a fragment before its first launch; by default there is none.

        Args:
            groups: Number of worker groups.
        """
        return None

    @abstractmethod
    def count(self, controls: Sequence[Control], state: Any) -> Count:
        """Decides how much each group counts.

        Args:
            controls: What every group said at the launch. One that is not finite, or whose weight is 0, must not count.
            state: The state of the fragment.
        """

    def heard(self, controls: Sequence[Control], state: Any) -> Any:
        """Returns the state once the flight has landed; by default that of before; see `count`."""
        return state


@dataclass(frozen=True)
class Aggregation(Weighing):
    """Weighs the groups of a mean by what they trained, clips and guards them.

    Args:
        clip_norm: Longer outer gradients are scaled down to this norm; with None, none is.
        guard: A group is left out when its norm is more than this many times the median of its last ones; with None,
            none is.

    Examples:
        >>> long = Control(0, 100, 0, weight=100, digest=0, norm_squared=16.0, changed=0, finite=True)
        >>> late = long._replace(weight=50, norm_squared=1.0)
        >>> idle = long._replace(weight=0)
        >>> Aggregation().count([long, long, idle]).factors
        {0: 1.0, 1: 1.0}
        >>> Aggregation(clip_norm=3.0).count([long, late, late]).factors
        {0: 1.125, 1: 0.75, 2: 0.75}
        >>> norms = [[4.0] * 4] * 2
        >>> Aggregation(guard=5.0).count([long, long._replace(norm_squared=900.0)], norms)
        Count(factors={0: 1.0}, outlying=(1,))
    """

    clip_norm: float | None = None
    guard: float | None = None

    @override
    def start(self, groups: int) -> list[list[float]]:
        return [[] for _ in range(groups)]

    @override
    def count(self, controls: Sequence[Control], state: Norms = ()) -> Count:
        candidates = may_count(controls)
        outlying = self._outlying(controls, state, candidates)
        counted = [group for group in candidates if group not in outlying]
        weights = by_training(controls, counted)
        return Count({group: weight * self._clip(controls[group]) for group, weight in weights.items()}, outlying)

    @override
    def heard(self, controls: Sequence[Control], state: Norms) -> list[list[float]]:
        return remembered(state, controls)

    def _outlying(self, controls: Sequence[Control], norms: Norms, candidates: Sequence[int]) -> tuple[int, ...]:
        if self.guard is None:
            return ()
        far = tuple(group for group in candidates if self._is_far(controls[group].norm, norms[group]))
        # If everyone is far off, the training has changed, and no group is at fault.
        return far if len(far) < len(candidates) else ()

    def _is_far(self, norm: float, before: Sequence[float]) -> bool:
        return self.guard is not None and len(before) >= _ENOUGH and norm > self.guard * median(before) > 0

    def _clip(self, control: Control) -> float:
        norm = control.norm
        return 1.0 if self.clip_norm is None or norm <= self.clip_norm else self.clip_norm / norm


def may_count(controls: Sequence[Control]) -> list[int]:
    """Returns the groups that trained and whose values are finite."""
    return [group for group, control in enumerate(controls) if _may_count(control)]


def by_training(controls: Sequence[Control], counted: Sequence[int]) -> dict[int, float]:
    """Returns the factors of groups that count by the inner steps that they trained."""
    total = sum(controls[group].weight for group in counted)
    # In this order, a whole number over a whole number: exactly 1 where the weights are equal.
    return {group: len(counted) * controls[group].weight / total for group in counted}


def remembered(norms: Norms, controls: Sequence[Control]) -> list[list[float]]:
    """Returns the norms to remember once a flight has landed."""
    return [
        [*last, control.norm][-_REMEMBERED:] if _may_count(control) else list(last)
        for last, control in zip(norms, controls, strict=True)
    ]


def _may_count(control: Control) -> bool:
    return control.finite and control.weight > 0


class Absences:
    """Counts how often in a row every group was left out because its values were not finite.

    Args:
        groups: Number of worker groups.

    Examples:
        >>> absences = Absences(groups=2)
        >>> for step in (100, 150, 200):
        ...     absences.count(launched_at=step, landed_at=step + 5, left_out=(1,))
        Traceback (most recent call last):
        ...
        lightning_sdiloco.errors.AgreementError: The outer gradient of worker group 1 was not finite 3 times ...
    """

    def __init__(self, groups: int) -> None:
        self._in_a_row = [0] * groups
        self._recovered_at = [0] * groups

    def count(self, launched_at: int, landed_at: int, left_out: Sequence[int]) -> None:
        """Counts the absences of one landing."""
        for group in range(len(self._in_a_row)):
            if group not in left_out:
                self._in_a_row[group] = 0
            elif launched_at > self._recovered_at[group]:
                # A fragment that was launched before the group recovered reports the same event again. Launches come
                # first in an inner step, so those of the step of the recovery do, too.
                self._in_a_row[group] += 1
                self._recovered_at[group] = landed_at
        lost = [group for group, count in enumerate(self._in_a_row) if count >= _MOST_LEFT_OUT]
        if lost:
            raise AgreementError(
                f"The outer gradient of worker group {', '.join(map(str, lost))} was not finite {_MOST_LEFT_OUT} times"
                " in a row, so that the other groups train without it. Look at that group's data and learning rate,"
                " and resume from a checkpoint, for example with gradient clipping."
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts."""
        return {"left_out_in_a_row": list(self._in_a_row), "recovered_at": list(self._recovered_at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._in_a_row = list(state["left_out_in_a_row"])
        self._recovered_at = list(state["recovered_at"])
