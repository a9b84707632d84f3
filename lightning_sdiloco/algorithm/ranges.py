"""Refuses a setting that is out of its range: what was given, what holds, and what to do."""

import math
from collections.abc import Callable
from datetime import timedelta
from numbers import Number
from typing import Any

_WHOLE = ("sync_every", "overlap_steps", "layers_per_fragment", "warmup_steps")

NUMBERS = (*_WHOLE, "mixing", "outer_lr", "outer_momentum", "outer_clip_norm", "outlier_guard")
"""The settings that are numbers."""

_TYPES: dict[str, tuple[type, ...]] = {
    "timeout": (timedelta,),
    "final_sync": (bool,),
    "offload": (bool, str),
    "outer_lr_schedule": (Callable,),  # type: ignore[dict-item]
}
"""The types of others."""


def plain(value: Any) -> Any:
    """Returns a scalar of numpy as the number of Python that it is, and anything else as it is."""
    return value.item() if isinstance(value, Number) and hasattr(value, "item") else value


def is_number(value: Any) -> bool:
    """Tells whether a value is a finite number."""
    return is_real(value) and math.isfinite(value)


def is_real(value: Any) -> bool:
    """Tells whether a value is a number, finite or not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Tells whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_whole(name: str, value: Any, least: int, advice: str) -> None:
    """Refuses what is no whole number from ``least``; see `require`."""
    require(is_whole(value) and value >= least, name, value, f"it must be a whole number of at least {least}", advice)


def require(holds: bool, name: str, value: Any, rule: str, advice: str) -> None:
    """Refuses a setting unless it is in its range."""
    if not holds:
        raise ValueError(f"{name}={value!r} is {_fault(name, value)}: {rule}. Choose another {name}; {advice}.")


def _fault(name: str, value: Any) -> str:
    """Returns what is wrong with a value, as the end of a sentence."""
    if name in _TYPES and not isinstance(value, _TYPES[name]):
        return f"of type {type(value).__name__}, not {' or '.join(one.__name__ for one in _TYPES[name])}"
    return fault_of(value, name in _WHOLE) if name in NUMBERS else "out of range"


def fault_of(value: Any, must_be_whole: bool) -> str:
    """Returns what is wrong with a value that is no number of the wanted kind, or out of its range."""
    if not is_real(value):
        return f"of type {type(value).__name__}, not a number"
    if not math.isfinite(value):
        return "not finite"
    if must_be_whole and not is_whole(value):
        return "no whole number" if value % 1 else "of type float, not a whole number"
    return "out of range"
