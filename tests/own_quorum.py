"""A quorum of a user's own: all of it, from outside the package."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_sdiloco import Quorum
from lightning_sdiloco.federation.messages import Record


@dataclass(frozen=True)
class Core(Quorum):
    """Waits for the sites of the core alone; the others count if they are there by then."""

    core: Sequence[str] = ()

    def fewest(self, sites: int) -> int:
        return 1

    def awaited(self, history: Sequence[Record], sites: Collection[str]) -> Collection[str]:
        return [site for site in sites if site in self.core] or sites

    def closes(self, arrived: Mapping[str, float], awaited: Collection[str], now: float) -> bool:
        return all(site in arrived for site in awaited)
