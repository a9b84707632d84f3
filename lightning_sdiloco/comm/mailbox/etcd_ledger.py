"""The ledger of several hubs in etcd: one of them is the active one, and nobody else writes.

[Note: the fence] Two keys keep hubs apart. ``holder`` names the active hub, and goes with a lease that it renews: a hub
that is gone, stopped or cut off loses it, and another one takes it. ``turn`` holds the token of the active hub and the
number of its last write. Every write compares both, and changes them with what it writes, in one transaction. So a hub
that was held up for however long writes nothing after another has taken over, not even with a request that was still on
its way; and a write whose answer was lost is known by the number to have been done.
"""

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping

from lightning_sdiloco.comm.mailbox.base import (
    EVERYTHING,
    MAX_RECORD,
    Bytes,
    MailboxError,
    NotActive,
    checked_size,
)
from lightning_sdiloco.comm.mailbox.etcd import (
    Etcd,
    EtcdUnreachable,
    EtcdUrl,
    Json,
    absent,
    after,
    delete,
    equals,
    found,
    put,
    read,
    transaction,
)
from lightning_sdiloco.comm.mailbox.ledger import LedgerError, chained
from lightning_sdiloco.errors import Refused

log = logging.getLogger(__name__)

MAX_NOTE = 1 << 20
"""Bytes of the largest note: etcd takes 1.5 MB in one request, if it was not told otherwise."""

_PAGE = 256  # records that are read at once
_CHAIN = hashlib.sha256().digest_size


class EtcdSeat:
    """The place of the active hub, which one of several hubs takes at a time; see [Note: the fence]."""

    def __init__(self, url: str, name: str, insecure: bool = False) -> None:
        self.url = EtcdUrl.parse(url, insecure)
        self.name = name
        self.etcd = Etcd(self.url)
        self.holder = ""

    def take(self) -> "EtcdLedger | None":
        """Takes the place if it is free; the ledger is this hub's then, until it is lost."""
        prefix, token, patience = self.url.prefix, secrets.token_hex(8), float(self.url.ttl)
        taken = self._holder()
        if taken:
            self.holder = taken
            return None
        began = time.monotonic()
        granted = self.etcd.ask("lease/grant", {"TTL": str(self.url.ttl)}, patience)
        lease, ttl = str(granted["ID"]), float(granted["TTL"])
        mine = json.dumps({"hub": self.name, "token": token}).encode()
        take = transaction(
            [absent(f"{prefix}holder")],
            [put(f"{prefix}holder", mine, lease), put(f"{prefix}turn", f"{token}:0".encode())],
            [read(f"{prefix}holder")],
        )
        answer = self.etcd.ask("kv/txn", take, patience)
        if not answer.get("succeeded") and dict(found(answer)).get(f"{prefix}holder") != mine:
            self.etcd.ask("lease/revoke", {"ID": lease}, patience)
            self.holder = self._holder()
            return None
        return EtcdLedger(self.etcd, prefix, mine, token, lease, ttl, began)

    def _holder(self) -> str:
        key = f"{self.url.prefix}holder"
        pairs = found(self.etcd.ask("kv/txn", transaction([], [read(key)]), float(self.url.ttl)))
        return str(json.loads(pairs[0][1]).get("hub")) if pairs else ""


class EtcdLedger:
    """Records and notes in etcd, for as long as this hub is the active one; see `SQLiteLedger` for what it does."""

    def __init__(
        self, etcd: Etcd, prefix: str, holder: bytes, token: str, lease: str, ttl: float, began: float
    ) -> None:
        self._etcd, self._prefix = etcd, prefix
        self._holder, self._token, self._lease, self._ttl = holder, token, lease, ttl
        self._lock = threading.Lock()
        self._turn = 0
        self._until = began + ttl
        self._lost = ""
        self._closed = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="etcd-lease", daemon=True)
        self._renewing.start()
        try:
            self._notes = self._noted()
            self._count, self._chain = self._verified()
        except BaseException:
            self.close()
            raise

    @property
    def held(self) -> bool:
        """Whether this hub is the active one, as far as it knows without asking."""
        if not self._lost and time.monotonic() >= self._until:
            self._lose(f"etcd has not renewed its lease of {self._ttl:g} s in time")
        return not self._lost

    @property
    def last(self) -> int:
        """The number of the last record, or `EVERYTHING` if there is none."""
        return self._count + EVERYTHING

    def append(self, seq: int, record: Bytes, notes: Mapping[str, Bytes | None] | None = None) -> bool:
        """Gives a number to a record, and notes what changes with it, both or neither; see `SQLiteLedger.append`."""
        checked_size(len(record), MAX_RECORD, "record")
        with self._lock:
            if not 0 <= seq <= self._count:
                raise Refused(f"record {seq} does not follow: the ledger has {self._count}.")
            if seq < self._count:
                return next(self._page(seq, 1))[1] == bytes(record)
            chain = chained(self._chain, seq, record)
            self._write([put(self._record(seq), chain + bytes(record)), *self._changes(notes or {})])
            self._count, self._chain = seq + 1, chain
            self._remember(notes or {})
            return True

    def read(self, after: int = EVERYTHING) -> Iterator[tuple[int, bytes]]:
        """Yields the records after a number, with theirs."""
        while True:
            page = list(self._page(after + 1, _PAGE))
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1][0]

    def note(self, notes: Mapping[str, Bytes | None]) -> None:
        """Notes values under names, durably: all of them or none. A value of None deletes the note."""
        with self._lock:
            self._write(self._changes(notes))
            self._remember(notes)

    def notes(self, prefix: str = "") -> dict[str, bytes]:
        """Returns the notes whose names begin with a prefix. Nobody else writes any, so they are kept here."""
        with self._lock:
            return {name: self._notes[name] for name in sorted(self._notes) if name.startswith(prefix)}

    def cut(self, count: int, notes: Mapping[str, Bytes | None]) -> None:
        """Drops all but the first records for good, and notes what changes with it, both or neither."""
        with self._lock:
            gone = delete(self._record(count), after(f"{self._prefix}records/"))
            self._write([gone, *self._changes(notes)])
            self._remember(notes)
            self._count, self._chain = self._verified()

    def close(self) -> None:
        """Gives the place back: another hub need not wait for the lease to end."""
        self._closed.set()
        if self._renewing is not threading.current_thread():
            self._renewing.join()
        if not self._lost:
            self._lose("it has ended")
            try:
                self._etcd.ask("lease/revoke", {"ID": self._lease}, 0.0)
            except MailboxError as error:
                log.info("the lease ends by itself: %s", error)

    # Writing

    def _write(self, changes: list[Json]) -> None:
        """Makes changes in one transaction; see [Note: the fence]."""
        holder, turn = f"{self._prefix}holder", f"{self._prefix}turn"
        now, next_turn = (f"{self._token}:{number}".encode() for number in (self._turn, self._turn + 1))
        asked = transaction(
            [equals(holder, self._holder), equals(turn, now)],
            [put(turn, next_turn), *changes],
            [read(turn)],
        )
        answer = self._ask(asked)
        if not answer.get("succeeded") and dict(found(answer)).get(turn) != next_turn:
            self._lose("another hub has taken over, or its lease has ended")
            raise NotActive(self._lost)
        self._turn += 1

    def _ask(self, asked: Json) -> Json:
        if not self.held:
            raise NotActive(self._lost)
        try:
            return self._etcd.ask("kv/txn", asked, max(0.0, self._until - time.monotonic()))
        except EtcdUnreachable as error:
            # Nobody knows whether it was written: what is there now is read by who takes over.
            self._lose(str(error))
            raise NotActive(self._lost) from error

    def _changes(self, notes: Mapping[str, Bytes | None]) -> list[Json]:
        for name, value in notes.items():
            if value is not None:
                checked_size(len(value), MAX_NOTE, f"note {name!r} in etcd")
        names = {name: f"{self._prefix}notes/{name}" for name in notes}
        return [delete(names[name]) if value is None else put(names[name], value) for name, value in notes.items()]

    def _remember(self, notes: Mapping[str, Bytes | None]) -> None:
        gone = {name for name, value in notes.items() if value is None}
        new = {name: bytes(value) for name, value in notes.items() if value is not None}
        self._notes = {name: value for name, value in (self._notes | new).items() if name not in gone}

    # Reading

    def _record(self, seq: int) -> str:
        return f"{self._prefix}records/{seq:012d}"

    def _page(self, first: int, most: int) -> Iterator[tuple[int, bytes]]:
        for seq, value in self._values(first, most):
            yield seq, value[_CHAIN:]

    def _values(self, first: int, most: int) -> list[tuple[int, bytes]]:
        folder = f"{self._prefix}records/"
        pairs = found(self._ask(transaction([], [read(self._record(first), after(folder), most)])))
        return [(int(key[len(folder) :]), value) for key, value in pairs]

    def _noted(self) -> dict[str, bytes]:
        folder = f"{self._prefix}notes/"
        pairs = found(self._ask(transaction([], [read(folder, after(folder))])))
        return {key[len(folder) :]: value for key, value in pairs}

    def _verified(self) -> tuple[int, bytes]:
        count, chain = 0, b""
        while page := self._values(count, _PAGE):
            for seq, value in page:
                chain = chained(chain, seq, value[_CHAIN:])
                if seq != count or chain != value[:_CHAIN]:
                    raise LedgerError(
                        f"The ledger {self._prefix} in etcd cannot be used: record {count} has been altered, or is"
                        " missing. Nothing of it was changed. Restore a snapshot of etcd that is whole."
                    )
                count += 1
        return count, chain

    # The lease

    def _renew(self) -> None:
        while not self._closed.wait(self._ttl / 3):
            began = time.monotonic()
            if began >= self._until or self._lost:
                return
            try:
                answer = self._etcd.ask("lease/keepalive", {"ID": self._lease}, 0.0)
            except MailboxError as error:
                log.warning("the lease of the active hub was not renewed: %s", error)
                continue
            if int(answer.get("result", {}).get("TTL", 0)) <= 0:
                self._lose("its lease has ended")
                return
            self._until = began + self._ttl

    def _lose(self, why: str) -> None:
        self._lost = self._lost or f"this hub is not the active one any more: {why}."
