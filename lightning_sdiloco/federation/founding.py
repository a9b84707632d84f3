"""The founding of a run: it happens once, when as many sites as were announced bring the same charter."""

from lightning_sdiloco.federation.charter import Charter


class Founding:
    """Gathers sites until there are enough to found a run.

    The hub writes the charter durably before it tells anybody, and asks the founder for its state: the anchor at round
    0, from which all others begin. From then on there is a run, and no founding any more.

    Args:
        sites: How many it takes.

    Examples:
        >>> from lightning_sdiloco.federation import Terms
        >>> terms = Terms(fragments=1, sync_every=100, overlap_steps=5, grace=2.0)
        >>> charter = Charter("llm", terms, {}, ({"weight": "(2, 2)"},), ((),), {}, "5f")
        >>> founding = Founding(2)
        >>> founding.hello("b", charter), founding.hello("b", charter), founding.hello("a", charter)
        (False, False, True)
        >>> founding.founder
        'a'
    """

    def __init__(self, sites: int) -> None:
        self._sites = sites
        self._charters: dict[str, Charter] = {}

    def hello(self, site: str, charter: Charter) -> bool:
        """Takes a site in; returns whether there are enough now."""
        for other in (own for name, own in self._charters.items() if name != site):
            charter.require_same(other)
        self._charters[site] = charter
        return len(self._charters) >= self._sites

    def gone(self, site: str) -> None:
        """Takes back a site that went away before there were enough."""
        self._charters.pop(site, None)

    @property
    def charter(self) -> Charter:
        """The charter that all brought."""
        return next(iter(self._charters.values()))

    @property
    def missing(self) -> int:
        """How many sites there are too few."""
        return max(0, self._sites - len(self._charters))

    @property
    def founder(self) -> str:
        """The site whose outer parameters are those of round 0: the first by name."""
        return min(self._charters)
