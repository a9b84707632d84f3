"""The status of a run as tables."""

import io
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

STATES = {"follows": "green", "joining": "yellow", "expected": "yellow", "silent": "red", "gone": "dim"}
"""The states of a site, each with its color."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


def as_table(status: dict[str, Any]) -> Group:
    """Returns sites and fragments, and above them what is wrong or waited for."""
    if not status["founded"]:
        here = ", ".join(status["here"]) or "none"
        return Group(
            Text(f"run {status['run']}: being founded, {status['missing']} more sites are needed; here: {here}")
        )
    head = Text(f"run {status['run']}: {status['records']} records")
    trouble = [Text(status["trouble"], style="bold red")] if status["trouble"] else []
    return Group(head, *trouble, _sites(status["sites"]), _fragments(status["fragments"]))


def printed(status: dict[str, Any]) -> str:
    """Returns the tables as text, for where there is no terminal."""
    text = io.StringIO()
    Console(file=text, width=120, highlight=False).print(as_table(status))
    return text.getvalue().rstrip("\n")


def _sites(sites: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="sites", title_justify="left")
    for name in ("site", "state", "last beat", "behind", "share", "late", "lives", "sent", "rate"):
        table.add_column(name, justify="left" if name in ("site", "state") else "right")
    for name, own in sites.items():
        table.add_row(
            name,
            Text(own["state"], style=STATES[own["state"]]),
            "-" if own["last_beat"] is None else f"{own['last_beat']:.1f} s",
            "-" if own["rounds_behind"] is None else str(own["rounds_behind"]),
            f"{own['share']:.0%}",
            str(own["late"]),
            str(own["lives"]),
            in_bytes(own["bytes"]),
            f"{in_bytes(own['bytes_per_second'])}/s",
        )
    return table


def _fragments(fragments: list[dict[str, Any]]) -> Table:
    table = Table(title="fragments", title_justify="left")
    for name in ("fragment", "round", "here for the next", "missing"):
        table.add_column(name, justify="right" if name in ("fragment", "round") else "left", overflow="fold")
    for number, own in enumerate(fragments):
        missing = "over" if own["ended"] else ", ".join(own["missing"]) or "-"
        table.add_row(str(number), str(own["round"]), ", ".join(own["here"]) or "-", missing)
    return table


def in_bytes(number: float) -> str:
    """Returns a number of bytes for people.

    Examples:
        >>> in_bytes(999), in_bytes(1_250_000)
        ('999 B', '1.2 MB')
    """
    unit = 0
    while number >= 1000 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.0f} {_UNITS[unit]}" if unit == 0 else f"{number:.1f} {_UNITS[unit]}"
