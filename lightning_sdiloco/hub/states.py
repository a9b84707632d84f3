"""States on their way from those who have them to those who want them, by way of the hub's store."""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from lightning_sdiloco.federation import Payload, StateHeader

PATIENCE = 60.0
"""Seconds after which somebody else is asked for a state, if the first one has not begun to send it."""

SENDING = 3600.0
"""Seconds that it may take to send a state."""

_HANDED = 3600.0  # for how long a state that was handed on can be fetched


@dataclass
class StateRequest:
    """A state that was asked for."""

    name: str
    donor: str
    until: float
    askers: dict[str, frozenset[str]] = field(default_factory=dict)
    for_anchor: bool = False
    founding: bool = False
    given: tuple[StateHeader, tuple[Payload, ...]] | None = None


class States:
    """Keeps what was asked for. One answer serves all who asked the same donor meanwhile."""

    def __init__(self) -> None:
        self.requests: dict[str, StateRequest] = {}
        self._handed: list[tuple[float, tuple[Payload, ...]]] = []

    def begin(self, donor: str, now: float, founding: bool = False) -> StateRequest:
        """Returns a new request to a donor, who has to be told."""
        request = StateRequest(secrets.token_hex(8), donor, now + PATIENCE, founding=founding)
        self.requests[request.name] = request
        return request

    def of(self, asker: str) -> StateRequest | None:
        """Returns the request in which somebody has a share."""
        return next((request for request in self.requests.values() if asker in request.askers), None)

    def to(self, asker: str, without: Collection[str]) -> StateRequest | None:
        """Returns a request that somebody may join."""
        open_to_all = (request for request in self.requests.values() if not request.founding and not request.given)
        return next((request for request in open_to_all if request.donor not in {asker, *without}), None)

    def sends(self, donor: str, now: float) -> None:
        """Hears that a donor has begun to send."""
        for request in self.requests.values():
            if request.donor == donor:
                request.until = max(request.until, now + SENDING)

    def take(self, name: str, donor: str) -> StateRequest | None:
        """Returns the request to which somebody answers, if it is theirs."""
        request = self.requests.get(name)
        return request if request and request.donor == donor else None

    def handed(self, parts: Sequence[Payload], now: float) -> None:
        """Notes that a state was told to those who wanted it, and is to be fetched."""
        self._handed.append((now + _HANDED, tuple(parts)))

    def needed(self, now: float) -> set[str]:
        """Returns the keys of blobs that are still to be fetched."""
        self._handed = [own for own in self._handed if own[0] > now]
        given = [request.given[1] for request in self.requests.values() if request.given]
        return {part.key for parts in (*given, *(own[1] for own in self._handed)) for part in parts}

    def overdue(self, now: float, gone: Callable[[str], bool]) -> list[StateRequest]:
        """Takes out the requests whose donor does not answer, or has gone."""
        late = [request for request in self.requests.values() if request.until <= now or gone(request.donor)]
        for request in late:
            del self.requests[request.name]
        return late
