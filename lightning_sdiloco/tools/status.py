"""Runs ``sdiloco status``, which shows a live table of sites, their progress and open rounds."""

import io
import json as codec
import sys
import time
from contextlib import closing

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from lightning_sdiloco.federation.coordinator import Status
from lightning_sdiloco.planning.units import readable
from lightning_sdiloco.tools.hub import STATES, HubOptions, status_of

_EVERY = 1.0  # seconds between updates


def status(options: HubOptions, json: bool = False) -> str:
    """Show a run's sites and fragments. On a terminal, the table is updated until Ctrl-C is
    pressed.

    Args:
        options: Options for the connection to the hub. A reader or any other role with keys may view the status.
        json: Print JSON once instead of a table.

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


def as_table(status: Status) -> Group:
    """Shows the run in two tables, or the missing sites if the run has not been founded yet."""
    if not status["founded"]:
        return Group(Text(f"run {status['run']}: being founded, {missing_sites(status)}"))
    parts: list[Text | Table] = [Text(f"run {status['run']}: {status['records']} records")]
    if status["trouble"]:
        parts.append(Text(status["trouble"], style="bold red"))
    return Group(*parts, _table_of_sites(status["sites"]), _table_of_fragments(status["fragments"]))


def missing_sites(status: Status) -> str:
    """Describes the sites of a run that has not been founded yet."""
    sites = ", ".join(status["here"]) or "none"
    return f"sites still missing: {status['missing']}; here: {sites}"


def _table_of_sites(sites: dict[str, Status]) -> Table:
    table = Table("site", Column("state", min_width=8), title="sites", title_justify="left")
    for name in (
        "last heartbeat",
        "behind",
        "share",
        "late",
        "lost",
        "steps, inner lr",
        "cosine, against",
        "not finite",
        "too long, buffers",
        "refused states",
        "incarnations",
        "sent",
        "rate",
    ):
        table.add_column(name, justify="right")
    for name, site in sites.items():
        heartbeat = site["last_heartbeat"]
        behind = site["rounds_behind"]
        table.add_row(
            name,
            Text(site["state"], style=STATES[site["state"]]),
            "-" if heartbeat is None else f"{heartbeat:.1f} s",
            "-" if behind is None else str(behind),
            f"{site['share']:.0%}",
            str(site["late"]),
            f"{site['lost_steps']:g} steps, {site['lost_share']:.1%}",
            f"{_steps_of(site)}, {_rate_of(site)}",
            f"{site['cosine']:.2f}, {site['against']}",
            str(site["not_finite"]),
            f"{site['too_long']}, {site['wrong_buffers']}",
            str(site["refused_states"]),
            str(site["incarnations"]),
            readable(site["bytes"]),
            f"{readable(site['bytes_per_second'])}/s",
        )
    return table


def _rate_of(site: Status) -> str:
    rate = site["inner_lr"]
    return "-" if rate is None else f"{rate:.3g}"


def _steps_of(site: Status) -> str:
    """Returns the trained and planned inner steps of a site. A hub of an earlier version does not
    report them.
    """
    trained = site.get("inner_steps")
    planned = site.get("planned_steps")
    if trained is None:
        return "-"
    if planned is None:
        return f"{trained:,}"
    return f"{trained:,} of {planned:,}"


def _table_of_fragments(fragments: list[Status]) -> Table:
    table = Table(title="fragments", title_justify="left")
    table.add_column("fragment", justify="right", overflow="fold")
    table.add_column("round", justify="right", overflow="fold")
    table.add_column("here for the next", justify="left", overflow="fold")
    table.add_column("missing", justify="left", overflow="fold")
    for number, fragment in enumerate(fragments):
        arrived = ", ".join(fragment["here"]) or "-"
        missing = ", ".join(fragment["missing"]) or "-"
        if fragment["ended"]:
            missing = "over"
        table.add_row(str(number), str(fragment["round"]), arrived, missing)
    return table


def printed(status: Status) -> str:
    """Renders the tables as text for output that is not a terminal."""
    text = io.StringIO()
    Console(file=text, width=140, highlight=False).print(as_table(status))
    return text.getvalue().rstrip("\n")
