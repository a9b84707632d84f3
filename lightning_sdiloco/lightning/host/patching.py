"""Replaces methods of Lightning's objects for a time, and puts them back."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def replace(undo: ExitStack, target: Any, name: str, value: Callable[..., Any]) -> None:
    """Replaces a method of one object.

    Args:
        undo: Takes up what puts the method back.
        target: The object.
        name: Name of the method.
        value: What is called instead.
    """
    if name in vars(target):
        undo.callback(setattr, target, name, vars(target)[name])
    else:
        undo.callback(vars(target).pop, name, None)
    setattr(target, name, value)
