"""Stands in for the federation of a simulated site: its hub is in this process."""

import threading
from dataclasses import dataclass

from lightning_sdiloco.engine import Federation
from lightning_sdiloco.hub import Connection


class _Here(threading.local):
    connection: Connection | None = None


_here = _Here()


@dataclass(frozen=True)
class SimulatedFederation(Federation):
    """The federation of the site that this thread plays."""

    def connect(self, ranks: int = 1) -> Connection:
        """Returns the connection that `use` was given."""
        assert _here.connection is not None, "a simulated site is given its connection first"
        return _here.connection


def use(connection: Connection) -> None:
    """Gives the site that this thread plays its connection."""
    _here.connection = connection


def site_name(number: int) -> str:
    """Names a simulated site."""
    return f"site-{number}"
