"""Turns: verbs of the engine that pause where groups in one process let each other work.

A group waits for what the others have launched. In processes of their own groups do that side by
side. In one process each is a generator that pauses after what it launches, and no group goes on
until all have paused.
"""

from collections.abc import Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Turns = Generator[None, None, Result]


def alone(turns: Turns[Result]) -> Result:
    """Does all the work of a group whose others are in other processes."""
    return in_turns([turns])[0]


def in_turns(groups: Sequence[Turns[Result]]) -> list[Result]:
    """Does the work of all groups of this process, one after the other from pause to pause. Returns
    the result of each.
    """
    results: dict[int, Result] = {}
    while len(results) < len(groups):
        for group, turns in enumerate(groups):
            if group in results:
                continue
            try:
                next(turns)
            except StopIteration as end:
                results[group] = end.value
    return [results[group] for group in range(len(groups))]
