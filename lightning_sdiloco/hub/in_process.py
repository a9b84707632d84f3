"""A hub in memory and connections to it without a network: for simulations and tests, in real or virtual time."""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from lightning_sdiloco.comm import EVERYTHING, Busy, Event, MailboxError, Missing, key_of
from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation import (
    Beat,
    Call,
    Charter,
    Contribution,
    Follower,
    Hello,
    Payload,
    Record,
    StateHeader,
)
from lightning_sdiloco.hub.connection import (
    Called,
    Lost,
    Recorded,
    StateArrived,
    StateWanted,
    Told,
    Waiting,
    Welcomed,
)
from lightning_sdiloco.hub.coordinator import Coordinator
from lightning_sdiloco.hub.events import Heard, heard
from lightning_sdiloco.hub.history import Bytes, History
from lightning_sdiloco.hub.outbox import Outbox
from lightning_sdiloco.hub.quorums import imported
from lightning_sdiloco.hub.shards import Fetched, Wanted, all_payloads


class InMemoryJournal:
    """Records and notes in memory; see `Journal`."""

    def __init__(self) -> None:
        self._records: list[bytes] = []
        self._notes: dict[str, bytes] = {}

    def append(self, seq: int, record: Bytes, notes: Mapping[str, Bytes | None] | None = None) -> bool:
        if seq < len(self._records):
            return self._records[seq] == bytes(record)
        assert seq == len(self._records), "a record follows on the last one"
        self._records.append(bytes(record))
        self.note(notes or {})
        return True

    def read(self, after: int = EVERYTHING) -> Iterator[tuple[int, bytes]]:
        yield from enumerate(self._records[after + 1 :], after + 1)

    def note(self, notes: Mapping[str, Bytes | None]) -> None:
        for name, value in notes.items():
            if value is None:
                self._notes.pop(name, None)
            else:
                self._notes[name] = bytes(value)

    def notes(self, prefix: str = "") -> dict[str, bytes]:
        return {name: self._notes[name] for name in sorted(self._notes) if name.startswith(prefix)}

    def cut(self, count: int, notes: Mapping[str, Bytes | None]) -> None:
        del self._records[count:]
        self.note(notes)


class InMemoryStore:
    """Blobs in memory; see `Store`."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def put(self, blob: Bytes) -> str:
        """Keeps a blob; returns its key."""
        self._blobs[key := key_of(blob)] = bytes(blob)
        return key

    def get(self, key: str) -> bytes:
        if key not in self._blobs:
            raise Missing(f"there is no blob {key}.")
        return self._blobs[key]

    def size(self, key: str) -> int:
        return len(self.get(key))

    def payloads(self, record: Record, wanted: Wanted) -> dict[str, Bytes] | None:
        """Returns what a rank needs of the payloads that count; None if some of it is gone."""
        try:
            return {payload.key: self.get(payload.key) for own in record.counted for payload in wanted(own)}
        except Missing:
            return None

    def retain(self, keys: Collection[str], age: float = 0.0) -> int:
        before = len(self._blobs)
        self._blobs = {key: blob for key, blob in self._blobs.items() if key in keys}
        return before - len(self._blobs)


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
        self.journal, self.store = InMemoryJournal(), InMemoryStore()
        self.connections: dict[str, InProcessConnection] = {}
        self._sites = sites
        self.coordinator = self._started()

    def connect(self, site: str, wanted: Wanted = all_payloads) -> "InProcessConnection":
        """Returns the connection of a site that has just been started."""
        return InProcessConnection(self, site, wanted)

    def connect_shards(self, site: str, wanted: Wanted) -> "InProcessShards":
        """Returns what moves the payloads of another rank of a site."""
        return InProcessShards(self, site, wanted)

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
            except MailboxError:
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
        """Whether the hub hears this site."""
        return self._hub.connections.get(self.site) is self

    def lose(self, why: str) -> None:
        """Breaks off; `hello` connects again. What was told before is there to be heard."""
        if self._hub.connections.get(self.site) is self:
            del self._hub.connections[self.site]
            self._hub.coordinator.gone(self.site, self.life)
        self._told.append(Lost(why))

    def hear(self, event: Event) -> None:
        """Takes what the hub tells."""
        told = self._read(heard(event))
        with self._lock:
            self._told += told

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
        except (Refused, MailboxError) as error:
            self._told.append(Waiting(str(error)))
        self._hub.coordinator.tick()

    def _fail(self, error: Exception) -> None:
        if self._hub.connections.get(self.site) is self:
            del self._hub.connections[self.site]
        self._error = error if isinstance(error, Refused) else Refused(str(error))

    def _read(self, said: Heard) -> list[Told]:
        if said.record:
            self._outbox.hear(said.record)
            return [Recorded(said.record, self._payloads(said))]
        if said.welcome:
            return [Welcomed(said.welcome, said.header)]
        if said.call:
            return [Called(said.call, said.own)]
        if said.kind == "wanted":
            return [StateWanted(said.text, said.flag)]
        if said.kind == "state" and said.header:
            self._asked_at = -1.0
            return [StateArrived(said.header, tuple(self._hub.store.get(part.key) for part in said.parts), said.text)]
        return [Waiting(said.text)]

    def _payloads(self, said: Heard) -> dict[str, Bytes] | None:
        assert said.record is not None, "the event is a record"
        return self._hub.store.payloads(said.record, self._wanted)


class InProcessShards:
    """Moves payloads to and from a hub in this process; see `Shards`."""

    def __init__(self, hub: InProcessHub, site: str, wanted: Wanted) -> None:
        self._hub, self._site, self._wanted = hub, site, wanted
        self.sends_bytes_per_s = 0.0
        self._fetched: dict[str, Mapping[str, Bytes] | None] = {}

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        for key, blob in blobs.items():
            self._hub.store.put(blob)
            self._hub.coordinator.stored(self._site, key, len(blob))

    def keep(self, outstanding: Collection[Contribution]) -> None:
        """See `Shards`."""

    def prefetch(self, own: Contribution) -> None:
        """See `Shards`."""

    def fetch(self, record: Record) -> None:
        self._fetched[record.key] = self._hub.store.payloads(record, self._wanted)

    def fetched(self) -> Fetched:
        fetched, self._fetched = self._fetched, {}
        return fetched

    def close(self) -> None:
        """See `Shards`."""
