"""Formats numbers for output, with three digits and a suitable unit."""

import math
from collections.abc import Sequence
from statistics import stdev


def short(number: float) -> str:
    return f"{float(f'{number:.3g}'):f}".rstrip("0").rstrip(".")


def counted(number: int, noun: str) -> str:
    """Formats a number with a noun in the singular or plural.

    Examples:
        >>> counted(1, "rank"), counted(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{number} {noun}s" if number > 1 else f"{number} {noun}"


def readable(size: float) -> str:
    """Formats a number of bytes with three digits and a decimal unit.

    Examples:
        >>> readable(5_156_253.28), readable(40)
        ('5.16 MB', '40 bytes')
    """
    return _scaled(size, ("bytes", "kB", "MB", "GB", "TB", "PB"))


def readable_rate(gbit_s: float) -> str:
    """Formats a rate, given in Gbit/s, with three digits and a decimal unit.

    Examples:
        >>> readable_rate(0.000254), readable_rate(1), readable_rate(0.0999999)
        ('254 kbit/s', '1 Gbit/s', '100 Mbit/s')
    """
    return _scaled(1e9 * gbit_s, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def _scaled(number: float, units: Sequence[str]) -> str:
    """Divides a number by 1000 until it fits a unit, and formats it with this unit."""
    power = 0
    while float(f"{number:.3g}") >= 1000 and power < len(units) - 1:
        number = number / 1000
        power = power + 1
    return f"{short(number)} {units[power]}"


# Half the width of a 95 % confidence interval of the mean, in standard errors, by the number of
# values (Student's t).
STUDENT_T = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
}


def half_width(values: Sequence[float]) -> float | None:
    """Returns half the width of the 95 % interval of the mean of two to ten values, or None for one
    value.

    Examples:
        >>> round(half_width([1.0, 2.0, 3.0]), 3)
        2.484
    """
    if len(values) < 2:
        return None
    return STUDENT_T[len(values)] * stdev(values) / math.sqrt(len(values))
