"""An in-memory hub for simulations and tests, in real or virtual time.

[Note: whose turn it is] The site whose clock is furthest behind always takes the next turn, and its
clock defines the current time. Messages in transit arrive before any later turn starts. Results
therefore do not depend on the speed of the machine.
"""

import heapq
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count

from lightning_sdiloco.federation.client import InProcessClient
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.messages import Event
from lightning_sdiloco.federation.quorum import imported
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.store import MEMORY, InMemoryStore, SQLiteLedger


class VirtualTime:
    """The clocks of multiple sites. ``until`` runs the turns of the other sites, as described in
    [Note: whose turn it is].
    """

    def __init__(self, sites: int, until: Callable[[Callable[[], bool]], None]) -> None:
        self.now = 0.0
        self._clocks = [0.0] * sites
        self._until = until
        self._coming: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def schedule(self, time: float, act: Callable[[], object]) -> None:
        """Schedules an action. Actions scheduled for the same time run in the order in which they
        were scheduled.
        """
        heapq.heappush(self._coming, (max(time, self.now), next(self._numbers), act))

    def passes(self, site: int, seconds: float) -> None:
        """Advances the current site's clock. The other sites take their turns in the meantime."""
        end = self.now + seconds
        self._clocks[site] = end
        self._until(
            lambda: min((clock, index) for index, clock in enumerate(self._clocks)) == (end, site)
        )
        while self._coming and self._coming[0][0] <= end:
            self.now, _, act = heapq.heappop(self._coming)
            act()
        self.now = end

    def ends(self, site: int) -> None:
        self._clocks[site] = math.inf


@dataclass(frozen=True)
class VirtualLink:
    """A site's link, which delays payloads and states. The minimum length of a wait is
    ``moment``.
    """

    time: VirtualTime
    site: int
    moment: float
    latency: float = 0.0
    seconds_per_byte: float = 0.0
    delay: float = 0.0
    is_away: Callable[[float], bool] = lambda time: False


class InProcessHub:
    """A hub in this process. Due work runs whenever a connection is used."""

    def __init__(
        self,
        run: str,
        sites: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run = run
        self.clock = clock
        self.sleep = sleep
        self.journal = SQLiteLedger(MEMORY)
        self.store = InMemoryStore()
        self.clients: dict[str, InProcessClient] = {}
        # The sites are also in this process, so their quorums may be imported.
        self.coordinator = Coordinator(run, self.journal, self.store, sites, clock, imported)
        self.coordinator.start(self.notify)

    def connect(self, site: str, link: VirtualLink | None = None) -> HubConnection:
        return HubConnection(InProcessClient(self, site, link))

    def notify(self, event: Event, to: Collection[str] | None = None) -> None:
        for site, client in list(self.clients.items()):
            if to is None or site in to:
                client.hear(event)
