"""Runs ``sdiloco status``: who is there, how far each is, and what is waited for, as a table that stays up to date."""

import json as codec
import sys
import time

from rich.console import Console
from rich.live import Live

from lightning_sdiloco.tools.hub.asking import Asking, HubOptions
from lightning_sdiloco.tools.hub.table import as_table, printed

_EVERY = 1.0


def status(options: HubOptions, json: bool = False) -> str:
    """Show the sites and fragments of a run: on a terminal as a live table, until Ctrl-C; elsewhere once."""
    with Asking(options, "reader") as asking:
        _, text = asking.ask("status")
        if json:
            return codec.dumps(codec.loads(text), indent=2)
        if not sys.stdout.isatty():
            return printed(codec.loads(text))
        with Live(as_table(codec.loads(text)), console=Console(), auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(_EVERY)
                    live.update(as_table(codec.loads(asking.ask("status")[1])), refresh=True)
            except KeyboardInterrupt:
                return ""
