"""A hub in memory and connections to it without a network: for simulations and tests, in real or virtual time.

[Note: whose turn it is] It is always the turn of the site whose clock is furthest behind, and its clock is the time.
What is on its way arrives before a later turn begins. So nothing depends on the speed of this machine.
"""

import heapq
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from typing_extensions import override

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.charter import Charter
from lightning_sdiloco.federation.codec import Bytes
from lightning_sdiloco.federation.connection import (
    Fetched,
    Lost,
    Recorded,
    Said,
    StateArrived,
    StateOffered,
    Told,
    Waiting,
    Wanted,
    said_in,
)
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.follower import Follower
from lightning_sdiloco.federation.journal import MEMORY, History, SQLiteLedger, imported
from lightning_sdiloco.federation.messages import Beat, Call, Contribution, Hello, Payload, Record, StateHeader
from lightning_sdiloco.federation.remote import HubConnection, HubShards, Outbox, all_payloads
from lightning_sdiloco.federation.store import InMemoryStore
from lightning_sdiloco.federation.wire import Busy, Event, HubError, Missing


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
        self.coordinator = self._started()

    def connect(self, site: str, wanted: Wanted = all_payloads) -> "InProcessConnection":
        return InProcessConnection(self, site, wanted)

    def connect_shards(self, site: str, wanted: Wanted) -> "InProcessShards":
        return InProcessShards(self, site, wanted)

    def payloads(self, record: Record, wanted: Wanted) -> dict[str, Bytes] | None:
        """Returns what a rank needs of the payloads that count; None if some of it is gone."""
        try:
            return {payload.key: self.store.get(payload.key) for own in record.counted for payload in wanted(own)}
        except Missing:
            return None

    def restart(self) -> None:
        """Dies, and starts again from what is durable; all connections are lost meanwhile, and made again."""
        for connection in list(self.connections.values()):
            connection.lose("the hub has died")
        self.coordinator = self._started()

    def _started(self) -> Coordinator:
        # Its sites are in this process too, so what they name is their own.
        coordinator = Coordinator(self.run, History(self.journal, self.store, imported), self._sites, self.clock)
        coordinator.start(self._tell, lambda: None)
        return coordinator

    def _tell(self, event: Event, to: Collection[str] | None = None) -> None:
        for site, connection in list(self.connections.items()):
            if to is None or site in to:
                connection.hear(event)


class InProcessConnection:
    """A site's connection to a hub in this process: nothing is lost, and nothing is late."""

    def __init__(self, hub: InProcessHub, site: str, wanted: Wanted = all_payloads) -> None:
        self.site, self.life = site, secrets.token_hex(8)
        self._hub, self._wanted = hub, wanted
        self._outbox = Outbox()
        self._lock = threading.Lock()
        self._told: list[Told] = []
        self._error: Exception | None = None
        self._hello: Hello | None = None
        self._beat: Beat | None = None
        self._asked_at = -1.0
        self.sends_bytes_per_s = 0.0

    def agree(self, charter: Charter) -> Charter:
        self._hub.store.put(charter.to_bytes())
        return self._hub.coordinator.agree(self.site, charter)

    def hello(self, follower: Follower) -> None:
        self._hello = follower.hello(self._hub.run)
        self._connect()
        self.beat(follower)

    def beat(self, follower: Follower) -> None:
        self._hello, self._beat = follower.hello(self._hub.run), follower.beat()
        self._outbox.only(follower.outstanding())
        if self.is_connected:
            try:
                self._hub.coordinator.beat(self._beat)
            except HubError:
                self._connect()
            except Refused as error:
                self._fail(error)
        self._hub.coordinator.tick()

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        self._outbox.put(own, dict(blobs))
        self._send(own)

    def skip(self, call: Call) -> None:
        if self.is_connected:
            self._say(lambda hub: hub.skip(self.site, self.life, call))

    def ask(self, without: Collection[str] = ()) -> None:
        now = self._hub.clock()
        if self.is_connected and (self._asked_at < 0 or now >= self._asked_at + 1.0):
            self._asked_at = now
            self._say(lambda hub: hub.ask(self.site, without))

    def give(self, request: str, header: StateHeader, parts: Sequence[Bytes]) -> None:
        named = [Payload(self._hub.store.put(part), len(part)) for part in parts]
        self._say(lambda hub: hub.give(self.site, request, header, named))

    def now(self) -> float:
        return self._hub.clock()

    def events(self) -> list[Told]:
        self._hub.coordinator.tick()
        with self._lock:
            told, self._told = self._told, []
        if not told and self._error:
            raise self._error
        return told

    def wait(self, timeout: float) -> bool:
        end = self._hub.clock() + timeout
        while True:
            self._hub.coordinator.tick()
            if self._told or self._error:
                return True
            left = end - self._hub.clock()
            if left <= 0:
                return False
            self._hub.sleep(min(left, 0.01))

    def leave(self) -> None:
        if self.is_connected:
            self.lose("this site has left")
            self._told.clear()

    def close(self, timeout: float = 5.0) -> None:
        self.leave()

    # Faults

    @property
    def is_connected(self) -> bool:
        return self._hub.connections.get(self.site) is self

    def lose(self, why: str) -> None:
        """Breaks off; `hello` connects again. What was told before is there to be heard."""
        if self._hub.connections.get(self.site) is self:
            del self._hub.connections[self.site]
            self._hub.coordinator.gone(self.site, self.life)
        self._told.append(Lost(why))

    def hear(self, event: Event) -> None:
        told = self._read(said_in(event))
        with self._lock:
            self._told.append(told)

    # What happens within

    def _connect(self) -> None:
        hello = self._hello
        assert hello is not None, "hello comes first"
        before = self._hub.connections.get(self.site)
        self._hub.connections[self.site] = self
        try:
            hub = self._hub.coordinator
            for event in hub.hello(hello, lambda: Charter.from_bytes(self._hub.store.get(hello.charter))):
                self.hear(event)
        except (Refused, Busy) as error:
            if before is None or before is self:
                del self._hub.connections[self.site]
            else:
                self._hub.connections[self.site] = before
            self._fail(error)
            return
        self._asked_at = -1.0
        for own in self._outbox.outstanding():
            self._send(own)

    def _send(self, own: Contribution) -> None:
        blobs = self._outbox.blobs(own)
        if self.is_connected and blobs is not None:
            for blob in blobs.values():
                self._hub.store.put(blob)
            self._say(lambda hub: hub.contribute(own, self.life))

    def _say(self, say: Callable[[Coordinator], object]) -> None:
        try:
            say(self._hub.coordinator)
        except (Refused, HubError) as error:
            self._told.append(Waiting(str(error)))
        self._hub.coordinator.tick()

    def _fail(self, error: Exception) -> None:
        if self._hub.connections.get(self.site) is self:
            del self._hub.connections[self.site]
        self._error = error if isinstance(error, Refused) else Refused(str(error))

    def _read(self, said: Said | None) -> Told:
        assert said is not None, "the hub is of this version"
        if isinstance(said, Recorded):
            self._outbox.hear(said.record)
            return Recorded(said.record, self._hub.payloads(said.record, self._wanted))
        if isinstance(said, StateOffered):
            self._asked_at = -1.0
            parts = tuple(self._hub.store.get(part.key) for part in said.parts)
            return StateArrived(said.header, parts, said.source)
        return said


class InProcessShards:
    """Moves payloads to and from a hub in this process."""

    def __init__(self, hub: InProcessHub, site: str, wanted: Wanted) -> None:
        self._hub, self._site, self._wanted = hub, site, wanted
        self.sends_bytes_per_s = 0.0
        self._fetched: dict[str, Mapping[str, Bytes] | None] = {}

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        for key, blob in blobs.items():
            self._hub.store.put(blob)
            self._hub.coordinator.stored(self._site, key, len(blob))

    def keep(self, outstanding: Collection[Contribution]) -> None:
        pass

    def prefetch(self, own: Contribution) -> None:
        pass

    def fetch(self, record: Record) -> None:
        self._fetched[record.key] = self._hub.payloads(record, self._wanted)

    def fetched(self) -> Fetched:
        fetched, self._fetched = self._fetched, {}
        return fetched

    def close(self) -> None:
        pass


Connection = HubConnection | InProcessConnection
"""Connects one site with the hub of its run; see [Note: how a site uses its connection]."""

Shards = HubShards | InProcessShards
"""Moves the payloads of a rank that is not the first of its site; see [Note: a site of several ranks]."""

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
            with suppress(HubError, Refused):
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
        said, hears = said_in(event), super().hear
        counted = said.record.counted if isinstance(said, Recorded) else ()
        payloads = [payload for own in counted if own.site != self.site for payload in own.payloads]
        parts = said.parts if isinstance(said, StateOffered) else ()
        nbytes = sum(payload.size for payload in (*payloads, *parts))
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
