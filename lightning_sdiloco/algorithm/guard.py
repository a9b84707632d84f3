"""Whose outer gradient is too long to count: judged against its own past, and against the others of its round."""

from collections.abc import Mapping, Sequence
from statistics import median, median_high
from typing import TypeVar

Who = TypeVar("Who")

GUARD = 10.0
"""How many times as long is too long, where nobody says otherwise."""

REMEMBERED = 8
"""With how many of its last norms a new one is compared, at most."""

_ENOUGH, _OTHERS = 4, 2


def usual(who: Who, norms: Mapping[Who, float], past: Mapping[Who, Sequence[float]]) -> float:
    """Returns how long an outer gradient usually is; 0 where that is not known.

    It is the median of the last norms of the same, if there are four, or that of the others in the round, if there are
    two: the longer one, where there are both.

    Args:
        who: Whose outer gradient.
        norms: The norms of those that could count in a round.
        past: The last norms of each, at most eight.
    """
    own, others = past.get(who, ()), [norm for other, norm in norms.items() if other != who]
    of_the_past = median(own) if len(own) >= _ENOUGH else 0.0
    return max(of_the_past, median_high(others)) if len(others) >= _OTHERS else of_the_past


def outlying(norms: Mapping[Who, float], past: Mapping[Who, Sequence[float]], guard: float) -> dict[Who, float]:
    """Returns who is out, each with how many times as long as usual it is.

    If all are that far off, the training has changed, and none is at fault.

    Examples:
        >>> outlying({"a": 1.0, "b": 40.0, "c": 1.0}, {}, guard=10.0)
        {'b': 40.0}
        >>> outlying({"a": 1.0, "b": 40.0, "c": 1.0}, {"b": [50.0] * 4}, guard=10.0)
        {}
    """
    times = {who: norm / own for who, norm in norms.items() if (own := usual(who, norms, past)) > 0}
    far = {who: longer for who, longer in times.items() if longer > guard}
    return far if len(far) < len(norms) else {}
