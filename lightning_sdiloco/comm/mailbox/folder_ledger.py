"""The ledger of a run in a folder: one of the sites keeps it at a time, and nobody else writes."""

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from lightning_sdiloco.comm.mailbox.base import (
    EVERYTHING,
    MAX_RECORD,
    Bytes,
    MailboxError,
    Missing,
    NoSpace,
    NotActive,
    checked_size,
    key_of,
)
from lightning_sdiloco.comm.mailbox.files import Files
from lightning_sdiloco.comm.mailbox.folder_log import (
    MAX_ENTRY,
    Log,
    entry_name,
    has_page,
    notes_name,
    page_name,
    read_log,
)
from lightning_sdiloco.comm.mailbox.pulse import PulseWatch
from lightning_sdiloco.comm.mailbox.sealed import unseal
from lightning_sdiloco.comm.mailbox.shared_files import Sweeper
from lightning_sdiloco.errors import Refused

log = logging.getLogger(__name__)

PAGE = 512
"""Entries after which a page takes their place."""

_AGAIN = 64  # entries after which a page is tried again


class FolderSeat:
    """The place of the site that keeps the run: one at a time; see [Note: the fence in a folder]."""

    def __init__(self, files: Files, name: str, ttl: float, clock: Callable[[], float]) -> None:
        self.name, self.ttl = name, ttl
        self.holder = ""
        self._files, self._clock = files, clock
        self._watch = PulseWatch(files, clock)

    def take(self) -> "FolderLedger | None":
        """Takes the place if it is free."""
        pulse = self._watch.look()
        self.holder = pulse.name if pulse else ""
        silent = self._watch.silent_for >= self.ttl or (pulse is not None and pulse.over)
        known = read_log(self._files) if silent or pulse is None else None
        if known is None or not (silent or not known.turns):
            return None
        if pulse is not None and known.turn > pulse.turn and self._watch.silent_for < self.ttl:
            # Who ended has been followed already.
            return None
        token = secrets.token_hex(16)
        began = self._clock()
        mine = known.entry("turn", {}, token=token, name=self.name)
        created = self._files.create(entry_name(known.next), mine)
        if created and has_page(self._files, known.pages):
            # The name may have been free since the entry was deleted: only the log as it is now can tell.
            fresh = read_log(self._files)
            if fresh.token != token:
                self._files.delete(entry_name(known.next))
            known, created = fresh, fresh.token == token
        elif created:
            known.apply(mine)
        self._watch.begin()
        return FolderLedger(self._files, known, self.ttl, began, self._clock) if created else None


class Found(NamedTuple):
    """A record that was read last, with those of its page."""

    page: int
    records: list[bytes]


class FolderLedger:
    """Records and notes in a folder, for as long as this site keeps the run; see `SQLiteLedger` for what it does."""

    def __init__(self, files: Files, known: Log, ttl: float, began: float, clock: Callable[[], float]) -> None:
        self.turn = known.turn
        self._files, self._log, self._ttl, self._clock = files, known, ttl, clock
        self._lock = threading.RLock()
        self._lost = ""
        self._until = began + ttl
        self._page_at = known.first + PAGE
        self._found = Found(-1, [])
        self._sweeper = Sweeper(files)
        self._sweep()

    @property
    def held(self) -> bool:
        """Whether nobody else writes, as far as is known without asking."""
        return not self._lost and self._clock() < self._until

    @property
    def last(self) -> int:
        """The number of the last record, or `EVERYTHING` if there is none."""
        return self._log.count + EVERYTHING

    def renew(self, began: float) -> None:
        """Hears that this site gives a sign of life now, which others see."""
        if began >= self._until:
            self.require()
        self._until = began + self._ttl

    def require(self) -> None:
        """Looks whether another site has taken the place."""
        with self._lock:
            if not self._lost:
                try:
                    self._files.size(entry_name(self._log.next))
                    self._lose("another site keeps the run now")
                except Missing:
                    return
            raise NotActive(self._lost)

    def append(self, seq: int, record: Bytes, notes: Mapping[str, Bytes | None] | None = None) -> bool:
        checked_size(len(record), MAX_RECORD, "record")
        with self._lock:
            if not 0 <= seq <= self._log.count:
                raise Refused(f"record {seq} does not follow: the ledger has {self._log.count}.")
            if seq < self._log.count:
                return self._record(seq) == bytes(record)
            self._write("record", notes or {}, [bytes(record)])
            return True

    def read(self, after: int = EVERYTHING) -> Iterator[tuple[int, bytes]]:
        """Yields the records after a number, with theirs."""
        while True:
            after += 1
            with self._lock:
                if after >= self._log.count:
                    return
                record = self._record(after)
            yield after, record

    def note(self, notes: Mapping[str, Bytes | None]) -> None:
        with self._lock:
            self._write("notes", notes)

    def notes(self, prefix: str = "") -> dict[str, bytes]:
        """Returns the notes whose names begin with a prefix."""
        with self._lock:
            return {name: self._log.notes[name] for name in sorted(self._log.notes) if name.startswith(prefix)}

    def cut(self, count: int, notes: Mapping[str, Bytes | None]) -> None:
        with self._lock:
            self._write("cut", notes, count=count)
            self._found = Found(-1, [])

    def close(self) -> None:
        """Writes nothing more."""
        with self._lock:
            self._lost = self._lost or "this site does not keep the run any more"
        self._sweeper.close()

    # What happens within

    def _lose(self, why: str) -> None:
        self._lost = f"{why}: nothing new is taken here."

    def _write(
        self, kind: str, notes: Mapping[str, Bytes | None], first: list[bytes] | None = None, **says: int
    ) -> None:
        if self._lost:
            raise NotActive(self._lost)
        data, name = self._log.entry(kind, notes, first or (), **says), entry_name(self._log.next)
        checked_size(len(data), MAX_ENTRY, "entry")
        try:
            # What a service did and was asked again is there, and our own.
            created = self._files.create(name, data) or self._files.read(name, 0, MAX_ENTRY + 1) == data
        except NoSpace:
            raise
        except MailboxError as error:
            self._lose(f"it is not known whether an entry was written ({error})")
            raise NotActive(self._lost) from error
        if not created:
            self._lose("another site keeps the run now")
            raise NotActive(self._lost)
        self._log.apply(data)
        if self._log.next >= self._page_at:
            self._turn_over()

    def _turn_over(self) -> None:
        """Puts a page in the place of the entries so far; if that fails, later."""
        self._page_at = self._log.next + _AGAIN
        before = self._log.noted
        try:
            noted = self._log.noted_now()
            key = key_of(noted)
            self._files.create(notes_name(key), noted)
            page, number = self._log.page(key), self._log.pages
            if not (
                self._files.create(page_name(number), page)
                or self._files.read(page_name(number), 0, len(page) + 1) == page
            ):
                self._lose("another site keeps the run now")
                return
        except MailboxError as error:
            log.warning("the entries of the log stay for now: %s", error)
            return
        notes = self._log.notes
        self._log.turn_over(page)
        self._log.notes = notes
        self._page_at = self._log.first + PAGE
        self._sweep(also=[before] if before and before != self._log.noted else [])

    def _sweep(self, also: list[str] | None = None) -> None:
        """Deletes the entries that stand in pages, but for turns."""
        if not self._log.pages:
            return
        try:
            there = self._files.names("log")
        except MailboxError as error:
            log.warning("old entries of the log stay for now: %s", error)
            return
        kept = {f"{turn:012d}" for turn in self._log.turns}
        old = [f"log/{name}" for name in there if name < f"{self._log.first:012d}" and name not in kept]
        self._sweeper.delete([*old, *(also or [])])

    def _record(self, seq: int) -> bytes:
        if seq >= self._log.base:
            return self._log.recent[seq - self._log.base]
        span = next(span for span in reversed(self._log.spans) if span.start <= seq)
        if self._found.page != span.page:
            name = page_name(span.page)
            self._found = Found(span.page, unseal(self._files.read(name, 0, MAX_ENTRY + 1), name)[1])
        return self._found.records[seq - span.start]
