"""Findings as a table, and as JSON."""

import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_sdiloco.tools.doctor.checks import Examined, Finding

_STYLES = {"ok": "green", "slow": "yellow", "wrong": "bold red"}


def as_table(found: Sequence[Finding]) -> str:
    """Returns the findings as a table, with colours on a terminal."""
    table = Table(title="sdiloco doctor", title_justify="left")
    for name in ("", "what", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for finding in found:
        table.add_row(f"[{_STYLES[finding.state]}]{finding.state}[/]", finding.check, finding.found, finding.fix)
    terminal = sys.stdout.isatty()
    printed = io.StringIO()
    # Logs of launchers have no width of their own.
    console = Console(file=printed, force_terminal=terminal, width=None if terminal else 140, highlight=False)
    console.print(table)
    return printed.getvalue().rstrip("\n")


def as_json(found: Sequence[Finding], told: Mapping[str, Any]) -> str:
    """Returns the findings, and everything that was seen, as JSON."""
    well = all(finding.state != "wrong" for finding in found)
    return json.dumps({"ok": well, "findings": [finding._asdict() for finding in found], **told}, indent=2)


def described(seen: Examined) -> dict[str, Any]:
    """Returns everything that was seen of machines and links, as values of JSON."""
    ranks = [
        {"rank": rank, "host": one.host, "worker_group": one.group, "exchange": one.exchange[0], **machine}
        for rank, (one, machine) in enumerate(zip(seen.endpoints, seen.machines, strict=True))
    ]
    return {
        "ranks": ranks,
        "unreachable": [connection._asdict() for connection in seen.broken],
        "links": [link._asdict() for link in seen.links],
    }
