"""A hub in virtual time: sites in one process that take turns, each with a clock of its own, and links that take time.

[Note: whose turn it is] It is always the turn of the site whose clock is furthest behind, and its clock is the time.
What is on its way arrives before a later turn begins. So nothing depends on the speed of this machine.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from typing_extensions import override

from lightning_sdiloco.comm import Event, MailboxError
from lightning_sdiloco.federation import Contribution, Follower, Refused, StateHeader
from lightning_sdiloco.hub.events import heard
from lightning_sdiloco.hub.history import Bytes
from lightning_sdiloco.hub.in_process import InProcessConnection, InProcessHub

_BEATS = 4  # signs of life in a lease


class VirtualTime:
    """The clocks of some sites; see [Note: whose turn it is].

    Args:
        sites: How many sites there are.
        until: Lets the others have their turns until a condition holds.

    Attributes:
        now: The time in seconds.

    Examples:
        >>> time, told = VirtualTime(1, lambda ready: None), []
        >>> time.at(2.5, lambda: told.append(time.now))
        >>> time.passes(0, 4.0)
        >>> time.now, told
        (4.0, [2.5])
    """

    def __init__(self, sites: int, until: Callable[[Callable[[], bool]], None]) -> None:
        self.now = 0.0
        self._clocks = [0.0] * sites
        self._until = until
        self._coming: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def at(self, time: float, do: Callable[[], object]) -> None:
        """Does something at a time; what is due at the same time comes in the order in which it was said."""
        heapq.heappush(self._coming, (max(time, self.now), next(self._numbers), do))

    def passes(self, site: int, seconds: float) -> None:
        """Lets seconds pass for the site whose turn it is, and the others have theirs meanwhile."""
        own = self._clocks[site] = self.now + seconds
        self._until(lambda: min((clock, other) for other, clock in enumerate(self._clocks)) == (own, site))
        while self._coming and self._coming[0][0] <= own:
            self.now, _, do = heapq.heappop(self._coming)
            do()
        self.now = own

    def ends(self, site: int) -> None:
        """Gives a site no turn any more."""
        self._clocks[site] = math.inf


@dataclass(frozen=True)
class VirtualLink:
    """The way between a site and its hub."""

    latency: float = 0.0
    seconds_per_byte: float = 0.0
    delay: float = 0.0
    is_away: Callable[[float], bool] = lambda time: False


class VirtualHub(InProcessHub):
    """A hub in memory whose time is that of its sites."""

    def __init__(self, run: str, sites: int, time: VirtualTime) -> None:
        self.time = time
        super().__init__(run, sites, clock=lambda: time.now)

    def connect_over(self, site: str, number: int, link: VirtualLink, moment: float) -> "VirtualConnection":
        """Returns the connection of a site."""
        return VirtualConnection(self, site, number, link, moment)


class VirtualConnection(InProcessConnection):
    """A connection on which messages take time. What one side sends arrives in order."""

    def __init__(self, hub: VirtualHub, site: str, number: int, link: VirtualLink, moment: float) -> None:
        super().__init__(hub, site)
        self.follower: Follower | None = None
        self._time, self._number, self._link, self._moment = hub.time, number, link, moment
        self._up = self._down = 0.0
        self._has_left = False

    @override
    def hello(self, follower: Follower) -> None:
        is_first, self.follower = self.follower is None, follower
        super().hello(follower)
        if is_first:
            self._live(follower.terms.lease / _BEATS)

    def _live(self, every: float) -> None:
        """Gives a sign of life now and again, as the network's threads of a site do while training is busy."""
        if self._has_left:
            return
        if self._beat is not None and self.is_connected and not self._link.is_away(self._time.now):
            # Who is refused hears it at its next step.
            with suppress(MailboxError, Refused):
                self._hub.coordinator.beat(self._beat)
        self._hub.coordinator.tick()
        self._time.at(self._time.now + every, lambda: self._live(every))

    @override
    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        kept = dict(blobs)
        self._outbox.put(own, kept)
        self._sends(sum(map(len, kept.values())), lambda: self._arrives(own, kept))
        self.sends_bytes_per_s = 1 / self._link.seconds_per_byte if self._link.seconds_per_byte else 0.0

    def _arrives(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        if self.is_connected:
            for blob in blobs.values():
                self._hub.store.put(blob)
            self._say(lambda hub: hub.contribute(own, self.life))

    @override
    def give(self, request: str, header: StateHeader, parts: Sequence[Bytes]) -> None:
        given = super().give
        self._sends(sum(map(len, parts)), lambda: given(request, header, parts))

    def _sends(self, nbytes: int, arrives: Callable[[], object]) -> None:
        self._up = max(self._up, self._time.now) + nbytes * self._link.seconds_per_byte
        self._time.at(self._up + self._link.latency + self._link.delay, arrives)

    @override
    def hear(self, event: Event) -> None:
        said, hears = heard(event), super().hear
        counted = said.record.counted if said.record else ()
        payloads = [payload for own in counted if own.site != self.site for payload in own.payloads]
        nbytes = sum(payload.size for payload in (*payloads, *said.parts))
        self._down = max(self._down, self._time.now) + nbytes * self._link.seconds_per_byte
        self._time.at(self._down + self._link.latency, lambda: hears(event))

    @override
    def wait(self, timeout: float) -> bool:
        self._hub.coordinator.tick()
        if not self._told and not self._error:
            self._time.passes(self._number, max(timeout, self._moment))
        return bool(self._told or self._error)

    @override
    def leave(self) -> None:
        self._has_left = True
        super().leave()
