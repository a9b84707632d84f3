"""Replaces attributes of Lightning's objects for a time."""

from contextlib import ExitStack
from typing import Any


def replace(undo: ExitStack, target: Any, name: str, value: Any) -> None:
    """Replaces an attribute of one object.

    Args:
        undo: What puts the object back as it was, with ``close()``.
        target: The object.
        name: The attribute; it may be one of the class.
        value: What it is from now on.
    """
    if name in vars(target):
        undo.callback(setattr, target, name, vars(target)[name])
    else:
        undo.callback(vars(target).pop, name, None)
    setattr(target, name, value)
