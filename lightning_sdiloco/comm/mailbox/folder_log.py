"""The log of a run in a folder: entries that are created once, in their order, and pages in the place of old ones.

[Note: the fence in a folder] All that one who keeps the run makes durable is an entry of one log, `log/N`, whose file
is created only if nobody has created it. Who begins to keep the run creates an entry too, its *turn*. So whoever kept
it before, and was held up for however long, finds the turn where its own next entry would be, and has written its last.

Old entries go, or a folder would grow with every message. Every so many entries a *page*, `page/K`, is created once as
well: with the records that came since the page before, and the notes as they are then. After that the entries before it
are deleted, but for turns: these stay for good, since a turn is where somebody may still try to write. A page says what
the entries say, and those never change: so it does not matter who creates it.

Who reads the log goes by names, and never by a listing, which may be of several moments: pages until there is none,
then entries until there is none, and then it looks whether there is another page, before which entries may have gone.
The same look tells who takes a turn that the name was free because it had never been used, and not because its entry
had been deleted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from lightning_sdiloco.comm.mailbox.base import Altered, Bytes, Missing
from lightning_sdiloco.comm.mailbox.files import Files
from lightning_sdiloco.comm.mailbox.frames import Header
from lightning_sdiloco.comm.mailbox.sealed import digest_of, seal, unseal
from lightning_sdiloco.errors import Malformed

MAX_ENTRY = 96 << 20
"""Bytes of the largest entry: a charter may stand in it."""

_AT_ONCE = 16


def entry_name(number: int) -> str:
    """Returns the name of an entry."""
    return f"log/{number:012d}"


def page_name(number: int) -> str:
    """Returns the name of a page."""
    return f"page/{number:012d}"


def notes_name(key: str) -> str:
    """Returns the name of the file with the notes of a page."""
    return f"notes/{key}"


class Span(NamedTuple):
    """Some records of a page."""

    start: int
    length: int
    page: int


class Log:
    """The log as it has been read: what stands in it, and where it ends."""

    def __init__(self) -> None:
        self.next = self.pages = self.first = 0
        self.previous = self.token = self.noted = ""
        self.turns: list[int] = []
        self.spans: list[Span] = []
        self.recent: list[bytes] = []
        self.notes: dict[str, bytes] = {}

    @property
    def base(self) -> int:
        """How many records stand in pages."""
        return self.spans[-1].start + self.spans[-1].length if self.spans else 0

    @property
    def count(self) -> int:
        """How many records there are."""
        return self.base + len(self.recent)

    @property
    def turn(self) -> int:
        """The number of the last turn; -1 if there is none."""
        return self.turns[-1] if self.turns else -1

    # What entries and pages say

    def apply(self, data: bytes) -> None:
        """Takes the next entry."""
        header, blobs = unseal(data, entry_name(self.next))
        if header.get("previous") != self.previous:
            raise Altered(f"{entry_name(self.next)} does not follow on the entry before it.")
        kind = header.get("kind")
        if kind == "turn":
            self.turns.append(self.next)
            self.token = str(header.get("token"))
        elif kind == "record":
            self.recent.append(blobs.pop(0))
        elif kind == "cut":
            self.cut(int(header["count"]))
        elif kind != "notes":
            raise Malformed(f"{entry_name(self.next)} is of a kind that is not known here.")
        self._note(header, blobs)
        self.next, self.previous = self.next + 1, digest_of(data)

    def _note(self, header: Header, blobs: Sequence[bytes]) -> None:
        names, gone = header.get("names", []), header.get("gone", [])
        for name in gone:
            self.notes.pop(name, None)
        self.notes.update(zip(names, blobs, strict=True))

    def cut(self, count: int) -> None:
        """Drops all but the first records."""
        del self.recent[max(0, count - self.base) :]
        self.spans = [
            Span(span.start, min(span.length, count - span.start), span.page)
            for span in self.spans
            if span.start < count
        ]

    def entry(self, kind: str, notes: Mapping[str, Bytes | None], first: Sequence[Bytes] = (), **more: Any) -> bytes:
        """Returns the bytes of the entry that would be the next one."""
        kept = {name: value for name, value in notes.items() if value is not None}
        gone = [name for name, value in notes.items() if value is None]
        header = {"kind": kind, "previous": self.previous, "names": list(kept), "gone": gone, **more}
        return seal(header, [*first, *kept.values()])

    # Pages

    def page(self, key: str) -> bytes:
        """Returns the page that would be the next one."""
        says = {"base": self.base, "entry": self.next, "previous": self.previous, "turns": self.turns}
        return seal({**says, "token": self.token, "notes": key}, self.recent)

    def noted_now(self) -> bytes:
        """Returns the file with the notes as they are."""
        return seal({"names": list(self.notes)}, list(self.notes.values()))

    def turn_over(self, data: bytes) -> None:
        """Takes a page: what stands in it, and not in entries any more."""
        header, records = unseal(data, page_name(self.pages))
        self.cut(int(header["base"]))
        self.recent.clear()
        if self.base != header["base"]:
            raise Altered(f"{page_name(self.pages)} does not follow on the page before it.")
        if records:
            self.spans.append(Span(self.base, len(records), self.pages))
        self.next = self.first = int(header["entry"])
        self.previous, self.token = str(header["previous"]), str(header["token"])
        self.turns = [int(turn) for turn in header["turns"]]
        self.noted = notes_name(str(header["notes"]))
        self.pages += 1

    def take_notes(self, data: bytes) -> None:
        """Takes the notes of the last page."""
        header, blobs = unseal(data, self.noted)
        self.notes = dict(zip(header["names"], blobs, strict=True))


def read_log(files: Files) -> Log:
    """Reads the log as it is; see [Note: the fence in a folder]."""
    while True:
        log = Log()
        for page in _each(files, page_name, 0):
            log.turn_over(page)
        try:
            if log.noted:
                log.take_notes(files.read(log.noted, 0, MAX_ENTRY + 1))
            for entry in _each(files, entry_name, log.first):
                log.apply(entry)
        except (Missing, Altered):
            if not has_page(files, log.pages):
                raise
        if not has_page(files, log.pages):
            return log


def has_page(files: Files, number: int) -> bool:
    """Tells whether there is a page of a number."""
    try:
        files.size(page_name(number))
    except Missing:
        return False
    return True


def _each(files: Files, name: Callable[[int], str], first: int) -> Iterator[bytes]:
    """Yields the files of numbers that follow one another, until there is none."""

    def read(number: int) -> bytes | None:
        try:
            return files.read(name(number), 0, MAX_ENTRY + 1)
        except Missing:
            return None

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="folder-log") as pool:
        while True:
            for data in pool.map(read, range(first, first + _AT_ONCE)):
                if data is None:
                    return
                yield data
            first += _AT_ONCE
