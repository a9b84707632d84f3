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


def outlying(norms: Mapping[Who, float], past: Mapping[Who, Sequence[float]], guard: float) -> dict[Who, float]:
    """Returns whose norms are out, each with how many times as long as usual it is.

    What is usual is the median of the last norms of the same, if there are four, or that of the others of the round, if
    there are two: the longer one, where there are both. If all are that far off, the training has changed, and none is
    at fault.

    Args:
        norms: The norms of those that could count in a round.
        past: The last norms of each, at most eight.
        guard: How many times as long as usual is too long.

    Examples:
        >>> outlying({"a": 1.0, "b": 40.0, "c": 1.2}, {}, guard=10.0)
        {'b': 36.36363636363637}
        >>> outlying({"a": 1.0, "b": 40.0, "c": 1.2}, {"b": [50.0] * 4}, guard=10.0)
        {}
    """
    far = {}
    for who, norm in norms.items():
        own, others = past.get(who, ()), [length for other, length in norms.items() if other != who]
        usual = max(median(own) if len(own) >= _ENOUGH else 0.0, median_high(others) if len(others) >= _OTHERS else 0.0)
        if norm > guard * usual > 0:
            far[who] = norm / usual
    return far if len(far) < len(norms) else {}
