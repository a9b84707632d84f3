"""Numbers for people: three digits, and a unit that suits."""


def short(number: float) -> str:
    """Formats a number with three digits, without an exponent."""
    return f"{float(f'{number:.3g}'):f}".rstrip("0").rstrip(".")


def readable(size: float) -> str:
    """Formats a number of bytes with three digits and a decimal unit.

    Examples:
        >>> readable(5_156_253.28), readable(40)
        ('5.16 MB', '40 bytes')
    """
    units = ["bytes", "kB", "MB", "GB", "TB", "PB"]
    power = 0
    while float(f"{size:.3g}") >= 1000 and power < len(units) - 1:
        size, power = size / 1000, power + 1
    return f"{short(size)} {units[power]}"
