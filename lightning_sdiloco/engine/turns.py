"""Turns: methods of the engine that pause to let other groups in the same process work.

A group waits for the launches of the others. In separate processes, groups do this in parallel. In
one process, each group is a generator that pauses after its launches, and no group continues until
all have paused.
"""

from collections.abc import Callable, Generator, Sequence
from functools import wraps
from types import MethodType
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
Turns = Generator[None, None, Result]


def takes_turns(verb: Callable[Arguments, Turns[Result]]) -> Callable[Arguments, Result]:
    """Turns a generator into a method that does all the work of a group in one call, for other
    groups in other processes; `turns_of` still pauses.
    """

    @wraps(verb)
    def without_pauses(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return in_turns([verb(*args, **kwargs)])[0]

    return without_pauses


def turns_of(
    verb: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Turns[Result]:
    """Begins a method that takes turns, such as ``engine.step``. Returns a generator that pauses
    after launches, and finally returns the method's result.
    """
    assert isinstance(verb, MethodType)
    turns: Turns[Result] = vars(verb.__func__)["__wrapped__"](verb.__self__, *args, **kwargs)
    return turns


def in_turns(groups: Sequence[Turns[Result]]) -> list[Result]:
    """Runs all groups of this process in turn, each until its next pause. Returns the result of
    each.
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
