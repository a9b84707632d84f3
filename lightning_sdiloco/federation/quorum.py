"""When a round closes: a small policy, asked by the ledger."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_sdiloco.federation.records import Record


class Quorum(Protocol):
    """Decides which sites a round waits for, and when it closes. Only the hub asks, on its own monotonic clock.

    Attributes:
        least: With fewer contributions no round closes, whatever `closes` says.
    """

    least: int

    def awaited(self, history: Sequence[Record], sites: Collection[str]) -> Collection[str]:
        """Returns the sites that a round waits for.

        Args:
            history: The last records of the fragment, the oldest first.
            sites: The sites that could contribute: those with a lease, near enough to the last record.
        """
        ...

    def closes(self, arrived: Mapping[str, float], awaited: Collection[str], now: float) -> bool:
        """Tells whether a round closes.

        Args:
            arrived: The sites that have contributed, or have said that they will not, each with the time.
            awaited: What `awaited` returned.
            now: The time, in seconds.
        """
        ...


@dataclass(frozen=True)
class Grace:
    """Waits for all; from the first contribution on at most for the grace.

    Args:
        grace: Seconds.
        least: The least number of sites that make a round.

    Examples:
        >>> quorum = Grace(2.0)
        >>> quorum.closes({"a": 10.0}, ["a", "b"], now=11.0), quorum.closes({"a": 10.0}, ["a", "b"], now=12.0)
        (False, True)
        >>> quorum.closes({"a": 10.0, "b": 10.5}, ["a", "b"], now=10.5)
        True
    """

    grace: float
    least: int = 1

    def awaited(self, history: Sequence[Record], sites: Collection[str]) -> Collection[str]:
        """Returns all sites."""
        return sites

    def closes(self, arrived: Mapping[str, float], awaited: Collection[str], now: float) -> bool:
        """Tells whether all have answered, or the grace has passed."""
        return all(site in arrived for site in awaited) or now >= min(arrived.values()) + self.grace
