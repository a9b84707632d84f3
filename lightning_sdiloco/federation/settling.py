"""Settings that are left open, settled before a run is founded: who has measured what, and what was chosen from it.

[Note: settled once] Sites that leave settings open train their first inner steps each for itself, and tell the hub how
long one took and how far it is. When as many are there as found the run, all measure the way to the hub at the same
time, so that they share its link as they will in training. When the last has told, one of them chooses, and the hub
keeps the first choice. Who brings a charter meanwhile has chosen for all. After the founding it is in the charter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_sdiloco.federation.codec import Message, Name

HEARD_FOR = 60.0
"""Seconds after which the numbers of a site do not count any more that it has not told again."""


@dataclass(frozen=True)
class Measurement:
    """Holds what a site has measured."""

    step_time: float
    round_trip: float
    to_hub: float = 0.0
    from_hub: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether the way to the hub has been measured."""
        return self.to_hub > 0 and self.from_hub > 0

    def __post_init__(self) -> None:
        if not self.step_time:
            raise ValueError("measurement.step_time is 0")


@dataclass(frozen=True)
class Known(Message):
    """Holds what a hub knows of settings that a site has left open."""

    settings: Mapping[str, str] | None
    measured: Mapping[Name, Measurement] = field(default_factory=dict)
    missing: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all is known from which to choose."""
        return not self.missing and all(own.is_whole for own in self.measured.values())


class Settling:
    """Gathers what sites have measured until one of them can choose; see [Note: settled once]. Times are in seconds.

    Args:
        sites: How many found the run.

    Examples:
        >>> settling, there = Settling(2), Measurement(0.1, 0.02, 1e8, 1e8)
        >>> settling.hear("a", there, now=0.0).missing, settling.hear("b", there, now=1.0).is_whole
        (1, True)
        >>> settling.choose({"sync_every": "30"}), settling.choose({"sync_every": "50"})
        (None, None)
        >>> settling.known(now=2.0).settings
        {'sync_every': '30'}
    """

    def __init__(self, sites: int) -> None:
        self._sites = sites
        self._told: dict[str, tuple[Measurement, float]] = {}
        self._chosen: Mapping[str, str] | None = None

    def hear(self, site: str, own: Measurement, now: float) -> Known:
        """Takes what a site has measured; it tells it again as long as it waits."""
        self._forget(now)
        self._told[site] = own, now
        return self.known(now)

    def choose(self, settings: Mapping[str, str]) -> None:
        """Takes what a site has chosen, if nobody was first."""
        self._chosen = self._chosen or settings

    def known(self, now: float) -> Known:
        """Returns what is known."""
        self._forget(now)
        measured = {site: own for site, (own, _) in sorted(self._told.items())}
        return Known(self._chosen, measured, max(0, self._sites - len(measured)))

    def _forget(self, now: float) -> None:
        """Forgets who does not tell any more, and a choice of which nobody is left."""
        self._told = {site: told for site, told in self._told.items() if now - told[1] <= HEARD_FOR}
        if not self._told:
            self._chosen = None
