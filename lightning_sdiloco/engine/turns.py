"""Lets an engine's methods pause while other groups in the same process run.

A group waits until all other groups have launched. Groups in separate processes run in parallel. In
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
    """Converts a generator method into a method that runs without pauses, for use with one group
    per process. `turns_of` still returns the generator.
    """

    @wraps(verb)
    def without_pauses(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return in_turns([verb(*args, **kwargs)])[0]

    return without_pauses


def turns_of(
    verb: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Turns[Result]:
    """Returns the generator of a method that takes turns, such as ``engine.step``. The generator
    pauses after launches and returns the method's result.
    """
    assert isinstance(verb, MethodType)
    turns: Turns[Result] = vars(verb.__func__)["__wrapped__"](verb.__self__, *args, **kwargs)
    return turns


def in_turns(groups: Sequence[Turns[Result]]) -> list[Result]:
    """Runs each group of this process in turn until its next pause, and returns the groups'
    results.
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
