"""The gathering of sites before a run is founded: who is here, and with which charter."""

from collections.abc import Callable
from typing import Any

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation import Charter, Founding, Hello, quorum_of


class Gathering:
    """Gathers sites at the hub until there are enough."""

    def __init__(self, sites: int, quorums: Callable[[str], type[Any]]) -> None:
        self._sites, self._quorums = sites, quorums
        self._founding = Founding(sites)
        self._proposed: dict[str, Charter] = {}
        self._founder: str | None = None
        self.hellos: dict[str, Hello] = {}

    def propose(self, site: str, charter: Charter) -> Charter:
        """Returns the charter of the first who came; a site that was the first may change its mind."""
        self._require_quorum(charter)
        others = (own for other, own in self._proposed.items() if other != site)
        self._proposed[site] = next(others, charter)
        return self._proposed[site]

    def hello(self, hello: Hello, charter: Charter) -> None:
        """Takes a site in."""
        self._require_quorum(charter)
        try:
            self._founding.hello(hello.site, charter)
        except ValueError as error:
            raise Refused(str(error)) from None
        self.hellos[hello.site] = hello

    def _require_quorum(self, charter: Charter) -> None:
        try:
            quorum_of(charter.terms.quorum, self._quorums)
        except ValueError as error:
            raise Refused(str(error)) from None

    def gone(self, site: str) -> None:
        """Takes back a site that went away."""
        self._founding.gone(site)
        self.hellos.pop(site, None)
        self._proposed.pop(site, None)
        if site == self._founder:
            self._founder = None

    @property
    def missing(self) -> int:
        """How many sites there are too few."""
        return self._founding.missing

    @property
    def charter(self) -> Charter:
        """The charter that all have brought."""
        return self._founding.charter

    @property
    def founder(self) -> str:
        """The site whose parameters are those of round 0; who comes later does not change it."""
        self._founder = self._founder or self._founding.founder
        return self._founder


def require_same(brought: Charter, founded: Charter) -> None:
    """Refuses a charter that is not that of the run."""
    try:
        brought.require_same(founded)
    except ValueError as error:
        raise Refused(str(error)) from None
