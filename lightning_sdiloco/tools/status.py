"""Runs ``sdiloco status``: the sites, how far each is, and what is awaited, as a live table."""

import io
import json as codec
import sys
import time
from contextlib import closing
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightning_sdiloco.planning.units import readable
from lightning_sdiloco.tools.hub import STATES, HubOptions, status_of

_EVERY = 1.0  # seconds between two looks


def status(options: HubOptions, json: bool = False) -> str:
    """Show the sites and fragments of a run: on a terminal as a live table, until Ctrl-C; otherwise
    once.

    Args:
        options: Which hub to ask, and as whom: a reader, or any other role with keys.
        json: Print JSON once, instead of a table.

    Examples:
        $ sdiloco status --hub a.example:29400 --keys reader.bundle
    """
    with closing(options.mailbox("reader")) as mailbox:
        first = status_of(mailbox)
        if json:
            return codec.dumps(first, indent=2)
        if not sys.stdout.isatty():
            return printed(first)
        with Live(as_table(first), console=Console(), auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(_EVERY)
                    live.update(as_table(status_of(mailbox)), refresh=True)
            except KeyboardInterrupt:
                return ""


def as_table(status: dict[str, Any]) -> Group:
    if not status["founded"]:
        here = ", ".join(status["here"]) or "none"
        return Group(
            Text(
                f"run {status['run']}: being founded, {status['missing']} more sites are needed;"
                f" here: {here}"
            )
        )
    head = Text(f"run {status['run']}: {status['records']} records")
    trouble = [Text(status["trouble"], style="bold red")] if status["trouble"] else []
    sites = Table("site", "state", title="sites", title_justify="left")
    for name in (
        "last heartbeat",
        "behind",
        "share",
        "late",
        "not finite",
        "too long",
        "incarnations",
        "sent",
        "rate",
    ):
        sites.add_column(name, justify="right")
    for name, own in status["sites"].items():
        sites.add_row(
            name,
            Text(own["state"], style=STATES[own["state"]]),
            "-" if own["last_heartbeat"] is None else f"{own['last_heartbeat']:.1f} s",
            "-" if own["rounds_behind"] is None else str(own["rounds_behind"]),
            f"{own['share']:.0%}",
            str(own["late"]),
            str(own["not_finite"]),
            str(own["too_long"]),
            str(own["incarnations"]),
            readable(own["bytes"]),
            f"{readable(own['bytes_per_second'])}/s",
        )
    fragments = Table(title="fragments", title_justify="left")
    for name, side in (
        ("fragment", "right"),
        ("round", "right"),
        ("here for the next", "left"),
        ("missing", "left"),
    ):
        fragments.add_column(name, justify=side, overflow="fold")  # type: ignore[arg-type]
    for number, own in enumerate(status["fragments"]):
        missing = "over" if own["ended"] else ", ".join(own["missing"]) or "-"
        fragments.add_row(str(number), str(own["round"]), ", ".join(own["here"]) or "-", missing)
    return Group(head, *trouble, sites, fragments)


def printed(status: dict[str, Any]) -> str:
    text = io.StringIO()
    Console(file=text, width=120, highlight=False).print(as_table(status))
    return text.getvalue().rstrip("\n")
