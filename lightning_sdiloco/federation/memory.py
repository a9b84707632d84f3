"""A hub in memory and connections to it without a network: for simulations and tests, in real or virtual time.

[Note: whose turn it is] It is always the turn of the site whose clock is furthest behind, and its clock is the time.
What is on its way arrives before a later turn begins. So nothing depends on the speed of this machine.
"""

import heapq
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from typing_extensions import override

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.client import InProcessClient
from lightning_sdiloco.federation.codec import Bytes
from lightning_sdiloco.federation.coordinator import Calls, Coordinator
from lightning_sdiloco.federation.follower import Follower
from lightning_sdiloco.federation.journal import MEMORY, History, SQLiteLedger, imported
from lightning_sdiloco.federation.messages import Event, Recorded, StateOffered, Wanted, said_in
from lightning_sdiloco.federation.remote import ALL_PAYLOADS, HubConnection, HubShards
from lightning_sdiloco.federation.store import InMemoryStore
from lightning_sdiloco.federation.wire import Busy, Header, HubError


class InProcessHub:
    """A hub in the memory of this process. It does what is due whenever a connection is used."""

    def __init__(
        self,
        run: str,
        sites: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run = run
        self.clock, self.sleep = clock, sleep
        self.journal, self.store = SQLiteLedger(MEMORY), InMemoryStore()
        self.connections: dict[str, InProcessConnection] = {}
        self._sites = sites
        self._start()

    def connect(self, site: str, wanted: Wanted = ALL_PAYLOADS) -> "InProcessConnection":
        return InProcessConnection(InProcessClient(self, site), wanted)

    def connect_shards(self, site: str, wanted: Wanted) -> HubShards:
        return HubShards(InProcessClient(self, site), wanted)

    def restart(self) -> None:
        """Dies, and starts again from what is durable; all connections are lost meanwhile, and made again."""
        for connection in list(self.connections.values()):
            connection.lose("the hub has died")
        self._start()

    def _start(self) -> None:
        # Its sites are in this process too, so what they name is their own.
        self.coordinator = Coordinator(self.run, History(self.journal, self.store, imported), self._sites, self.clock)
        self.coordinator.start(self._tell, lambda: None)
        self.calls = Calls(self.coordinator, self.store)
        self.calls.start(self._tell)

    def _tell(self, event: Event, to: Collection[str] | None = None) -> None:
        for site, connection in list(self.connections.items()):
            if to is None or site in to:
                connection.hear(event)


class InProcessConnection(HubConnection):
    """A site's connection to a hub in this process. `hello` makes it anew when it was lost."""

    def __init__(self, client: InProcessClient, wanted: Wanted = ALL_PAYLOADS) -> None:
        super().__init__(client, wanted)
        self._hub, self._peer = client.hub, client.peer

    @property
    def is_connected(self) -> bool:
        return self._hub.connections.get(self.site) is self

    @override
    def hello(self, follower: Follower) -> None:
        super().beat(follower)
        self._connect()
        self.beat(follower)

    @override
    def beat(self, follower: Follower) -> None:
        super().beat(follower)
        if self.is_connected:
            try:
                self._hub.calls.beat(self._peer, self._beat)
            except HubError:
                self._connect()
            except Refused as error:
                self._fail(error)
        self._hub.coordinator.tick()

    @override
    def events(self) -> list[Any]:
        self._hub.coordinator.tick()
        return super().events()

    @override
    def wait(self, timeout: float) -> bool:
        end = self.now() + timeout
        while True:
            self._hub.coordinator.tick()
            if self._told or self._error:
                return True
            left = end - self.now()
            if left <= 0:
                return False
            self._hub.sleep(min(left, 0.01))

    @override
    def leave(self) -> None:
        if self.is_connected:
            self.lose("this site has left")
            self._told.clear()

    @override
    def close(self, timeout: float = 0.0) -> None:
        self.leave()

    def lose(self, why: str) -> None:
        """Breaks off; `hello` connects again. What was told before is there to be heard."""
        if self.is_connected:
            del self._hub.connections[self.site]
            self._hub.coordinator.gone(self.site, self.life)
        super().hear(Event("lost", {"why": why}))

    def _connect(self) -> None:
        before = self._hub.connections.get(self.site)
        self._hub.connections[self.site] = self
        try:
            for event in self._client.events(lambda: self._hello):
                self.hear(event)
        except (Refused, Busy) as error:
            if before is not None:
                self._hub.connections[self.site] = before
            self._fail(error if isinstance(error, Refused) else Refused(str(error)))

    @override
    def _fail(self, error: Exception) -> None:
        if self.is_connected:
            del self._hub.connections[self.site]
        super()._fail(error)


class VirtualTime:
    """The clocks of some sites, of which ``until`` lets the others have turns; see [Note: whose turn it is]."""

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
        self._clocks[site] = math.inf


@dataclass(frozen=True)
class VirtualLink:
    latency: float = 0.0
    seconds_per_byte: float = 0.0
    delay: float = 0.0
    is_away: Callable[[float], bool] = lambda time: False


class VirtualHub(InProcessHub):
    def __init__(self, run: str, sites: int, time: VirtualTime) -> None:
        self.time = time
        super().__init__(run, sites, clock=lambda: time.now)

    def connect_over(self, site: str, number: int, link: VirtualLink, moment: float) -> "VirtualConnection":
        return VirtualConnection(VirtualClient(self, site, link), self.time, number, link, moment)


class VirtualClient(InProcessClient):
    """A way on which payloads and states take time, and what names them comes after them."""

    def __init__(self, hub: VirtualHub, site: str, link: VirtualLink) -> None:
        super().__init__(hub, site)
        self._time, self._link, self._free_at = hub.time, link, 0.0

    @override
    def call(self, name: str, about: Header | None = None, body: bytes = b"") -> tuple[Header, bytes]:
        call = super().call
        if name not in ("contribute", "give"):
            return call(name, about, body)
        self._later(0, lambda: call(name, about, body))
        return {}, b""

    @override
    def send(self, blob: Bytes, about: Header | None = None, key: str | None = None) -> Header:
        send = super().send
        if about and about.get("kind") == "charter":
            return send(blob, about, key)
        self._later(memoryview(blob).nbytes, lambda: send(blob, about, key))
        return {}

    def _later(self, nbytes: int, do: Callable[[], object]) -> None:
        def arrives() -> None:
            # It is sent again when the site is back.
            with suppress(HubError, Refused):
                do()

        self._free_at = max(self._free_at, self._time.now) + nbytes * self._link.seconds_per_byte
        self._time.at(self._free_at + self._link.latency + self._link.delay, arrives)


class VirtualConnection(InProcessConnection):
    """A connection on which messages take time. What one side sends arrives in order."""

    def __init__(self, client: VirtualClient, time: VirtualTime, number: int, link: VirtualLink, moment: float) -> None:
        super().__init__(client)
        self.follower: Follower | None = None
        self._time, self._number, self._link, self._moment = time, number, link, moment
        self._free_at, self._has_left = 0.0, False

    @override
    def hello(self, follower: Follower) -> None:
        is_first, self.follower = self.follower is None, follower
        super().hello(follower)
        if is_first:
            self._live(follower.terms.lease / 4)

    def _live(self, every: float) -> None:
        """Gives a sign of life now and again, as the network's threads of a site do while training is busy."""
        if self._has_left:
            return
        if self.is_connected and not self._link.is_away(self._time.now):
            # Who is refused hears it at its next step.
            with suppress(HubError, Refused):
                self._hub.calls.beat(self._peer, self._beat)
        self._hub.coordinator.tick()
        self._time.at(self._time.now + every, lambda: self._live(every))

    @override
    def _send_blobs(self, own: Any, blobs: Mapping[str, Bytes]) -> None:
        super()._send_blobs(own, blobs)
        self.sends_bytes_per_s = 1 / self._link.seconds_per_byte if self._link.seconds_per_byte else 0.0

    @override
    def hear(self, event: Event) -> None:
        said, hears = said_in(event), super().hear
        counted = said.record.counted if isinstance(said, Recorded) else ()
        payloads = [payload for own in counted if own.site != self.site for payload in own.payloads]
        parts = said.parts if isinstance(said, StateOffered) else ()
        nbytes = sum(payload.size for payload in (*payloads, *parts))
        self._free_at = max(self._free_at, self._time.now) + nbytes * self._link.seconds_per_byte
        self._time.at(self._free_at + self._link.latency, lambda: hears(event))

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
