"""Turns: verbs of the engine that pause where groups in one process let each other work.

A group waits for what the others have launched. In processes of their own groups do that side by
side. In one process each is a generator that pauses after what it launches, and no group goes on
until all have paused.
"""

from collections.abc import Callable, Generator, Sequence
from functools import wraps
from types import MethodType
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
Turns = Generator[None, None, Result]


def takes_turns(verb: Callable[Arguments, Turns[Result]]) -> Callable[Arguments, Result]:
    """Makes a generator a verb that does all the work of a group whose others are in other
    processes; `turns_of` still pauses.
    """

    @wraps(verb)
    def without_pauses(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return in_turns([verb(*args, **kwargs)])[0]

    return without_pauses


def turns_of(
    verb: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Turns[Result]:
    """Begins a verb that takes turns, such as ``engine.step``: returns a generator that pauses
    after what it launches, and at the end returns what the verb does.
    """
    assert isinstance(verb, MethodType)
    turns: Turns[Result] = vars(verb.__func__)["__wrapped__"](verb.__self__, *args, **kwargs)
    return turns


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
