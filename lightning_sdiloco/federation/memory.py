"""A hub in memory, in real or virtual time, for simulations and tests.

[Note: whose turn it is] It is always the turn of the site whose clock is furthest behind, and its
clock defines the time. Messages on their way arrive before a later turn begins. So nothing depends
on the speed of this machine.
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
    """The clocks of several sites. ``until`` gives the other sites their turns; see [Note: whose
    turn it is].
    """

    def __init__(self, sites: int, until: Callable[[Callable[[], bool]], None]) -> None:
        self.now = 0.0
        self._clocks = [0.0] * sites
        self._until = until
        self._coming: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def schedule(self, time: float, act: Callable[[], object]) -> None:
        """Schedules an action. Actions that are due at the same time run in the order of the
        calls.
        """
        heapq.heappush(self._coming, (max(time, self.now), next(self._numbers), act))

    def passes(self, site: int, seconds: float) -> None:
        """Advances the clock of the site whose turn it is; the others have their turns
        meanwhile.
        """
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
    """The link of a site, on which payloads and states take time. A wait lasts for at least a
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
    """A hub in the memory of this process. It does work that is due whenever a connection is
    used.
    """

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
        # Its sites are also in this process, so the quorums that they name may be imported.
        self.coordinator = Coordinator(run, self.journal, self.store, sites, clock, imported)
        self.coordinator.start(self.notify)

    def connect(self, site: str, link: VirtualLink | None = None) -> HubConnection:
        return HubConnection(InProcessClient(self, site, link))

    def notify(self, event: Event, to: Collection[str] | None = None) -> None:
        for site, client in list(self.clients.items()):
            if to is None or site in to:
                client.hear(event)
