"""What the hub counts of every site, for those who look: it decides nothing."""

from collections import Counter, deque
from dataclasses import dataclass, field

from lightning_sdiloco.federation import Record

_RECENT = 8  # rounds over which shares are told
_MOST_BEGUN = 128  # blobs of a site whose beginning is remembered


@dataclass
class SiteStatistics:
    """Holds what is counted of a site since the hub was started."""

    heard_at: float
    life: str = ""
    lives: int = 0
    late: int = 0
    bytes: int = 0
    rate: float = 0.0
    began: dict[str, float] = field(default_factory=dict)


class Statistics:
    """Counts."""

    def __init__(self) -> None:
        self.sites: dict[str, SiteStatistics] = {}
        self.rounds = 0
        self._recent: dict[int, deque[Record]] = {}

    def of(self, site: str, now: float = 0.0) -> SiteStatistics:
        """Returns what is counted of a site."""
        return self.sites.setdefault(site, SiteStatistics(now))

    def joined(self, site: str, now: float, life: str) -> None:
        """Counts a hello."""
        own = self.of(site, now)
        own.heard_at, own.lives, own.life = now, own.lives + (life != own.life), life

    def beat(self, site: str, now: float) -> None:
        """Counts a sign of life."""
        self.of(site, now).heard_at = now

    def late(self, site: str) -> None:
        """Counts a contribution that came too late."""
        self.of(site).late += 1

    def begins(self, site: str, key: str, now: float) -> None:
        """Hears that a blob begins to come, or another connection for it."""
        began = self.of(site, now).began
        if len(began) < _MOST_BEGUN:
            began.setdefault(key, now)

    def arrived(self, site: str, key: str, size: int, now: float) -> None:
        """Counts a blob."""
        own = self.of(site, now)
        began = own.began.pop(key, now)
        own.bytes += size
        own.rate = size / (now - began) if now > began else own.rate

    def record(self, record: Record) -> None:
        """Counts a record."""
        self.rounds += 1
        self._recent.setdefault(record.fragment, deque(maxlen=_RECENT)).append(record)

    def shares(self) -> dict[str, float]:
        """Returns the share of each site in the weight of the last rounds."""
        weights: Counter[str] = Counter()
        for own in (own for records in self._recent.values() for record in records for own in record.counted):
            weights[own.site] += own.weight
        return {site: weight / weights.total() for site, weight in weights.items()}
