"""A site's end of a folder: it speaks with the site that keeps the run as with a hub, by files; see `HubMailbox`."""

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as TookTooLong

from lightning_sdiloco.comm.mailbox.base import (
    MAX_BLOB,
    Altered,
    Bytes,
    Failure,
    HubUnreachable,
    MailboxError,
    key_of,
)
from lightning_sdiloco.comm.mailbox.blobs import BlobStore
from lightning_sdiloco.comm.mailbox.channels import ERRORS, Event
from lightning_sdiloco.comm.mailbox.folder_messages import (
    IN,
    MAX_OUT,
    OUT,
    Address,
    Item,
    in_name,
    message,
    out_name,
    unpacked,
)
from lightning_sdiloco.comm.mailbox.frames import PROTOCOL, Header
from lightning_sdiloco.comm.mailbox.keys import Role
from lightning_sdiloco.comm.mailbox.pulse import Pulse, PulseWatch
from lightning_sdiloco.comm.mailbox.shared_files import SharedFiles
from lightning_sdiloco.errors import Refused

log = logging.getLogger(__name__)

_PAUSE = 0.2  # seconds before another hello
_IDLE = 0.5  # seconds after which one who only asks now and then begins anew

_UNMEASURED = "In a folder nobody measures what the way to the others carries."


class FolderHubMailbox:
    """Speaks with the site that keeps a run in a folder, and moves blobs to and from the folder."""

    def __init__(
        self,
        files: SharedFiles,
        run: str,
        name: str,
        role: Role = "site",
        life: str | None = None,
        silence: float = 10.0,
        beat: float = 1.0,
        poll: float = 0.05,
        timeout: float = 10.0,
        max_blob: int = MAX_BLOB,
    ) -> None:
        self.life, self.max_blob = life or secrets.token_hex(8), max_blob
        self._files, self._run, self._name, self._role = files, run, name, role
        self._who = {"run": run, "role": role, "name": name, "life": self.life, "protocol": PROTOCOL}
        self._silence, self._beat, self._poll, self._timeout = silence, beat, poll, timeout
        self._store = BlobStore(files.url, max_blob, files)
        self._watch = PulseWatch(files, time.monotonic)
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._turn = -1  # of who kept the run when it was last heard
        self._sent = self._read = 0
        self._address = ""
        self._posted_at = -float("inf")
        self._refused: Failure | None = None
        self._watching = False
        self._answers: dict[int, Future[Item]] = {}
        self._told: queue.Queue[Item | Failure] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._look_at = 0.0

    # Blobs

    def send(self, blob: Bytes, about: Header | None = None, *, key: str | None = None) -> Header:
        """Leaves a blob, and says what it is; see `HubMailbox.send`."""
        return self.call("stored", self._put(blob, about, key))[0]

    def leave(self, blob: Bytes, about: Header | None = None, *, key: str | None = None) -> None:
        """Leaves a blob ahead of a call that names it: what it is comes before that call, and nobody waits for it."""
        self._post("stored", self._put(blob, about, key))

    def _put(self, blob: Bytes, about: Header | None, key: str | None) -> Header:
        view = memoryview(blob).cast("B")
        return {**(about or {}), "key": self._stored(view, key or key_of(view)), "size": len(view)}

    def _stored(self, view: memoryview, key: str) -> str:
        with contextlib.suppress(MailboxError):
            if self._store.size(key) == len(view):
                return key
        return self._store.put(view)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    # Calls

    def call(self, name: str, about: Header | None = None, body: bytes = b"") -> tuple[Header, bytes]:
        """Asks the site that keeps the run something; see `HubMailbox.call`."""
        if name == "ping":
            self._files.names(IN)
            return {}, b""
        until = time.monotonic() + self._timeout
        self._start()
        answer: Future[Item] = Future()
        while self._turn < 0:
            if self._refused:
                raise self._refused
            if time.monotonic() > until or self._closed.wait(self._poll):
                raise HubUnreachable(f"no site keeps run {self._run!r} in {self._files.url} now.")
        number = self._post(name, about or {}, body, answer)
        try:
            item = answer.result(max(0.0, until - time.monotonic()))
        except TookTooLong:
            raise HubUnreachable(f"the site that keeps the run in {self._files.url} does not answer.") from None
        finally:
            self._answers.pop(number, None)
        if "error" in item.header:
            raise _error(item)
        return dict(item.header.get("about") or {}), item.body

    def _post(self, call: str, about: Header, body: Bytes = b"", answer: "Future[Item] | None" = None) -> int:
        with self._sending:
            if self._may_be_forgotten():
                self._begin_anew()
            self._posted_at = time.monotonic()
            number, self._sent = self._sent, self._sent + 1
            if answer is not None:
                self._answers[number] = answer
            header = {"from": self._who, "turn": self._turn, "call": call, "id": number, "read": self._read}
            self._files.create(f"{IN}/{in_name(self._address, number)}", message({**header, "about": about}, body))
            return number

    def _may_be_forgotten(self) -> bool:
        """Whether nothing was said for so long that who keeps the run may take this one for gone."""
        idle = time.monotonic() - self._posted_at
        return idle > self._silence if self._watching else idle > _IDLE and not self._answers

    def _begin_anew(self) -> None:
        """Takes another address: what was left at the old one, or is forgotten there, belongs to nobody."""
        self._address = Address(self._role, self._name, self.life, secrets.token_hex(4)).text
        self._read = 0

    # Listening

    def events(self, hello: Callable[[], Header], beat: Callable[[], Header] = dict) -> Iterator[Event]:
        """Yields what the site that keeps the run tells; see `HubMailbox.events`."""
        self._start()
        self._watching = True
        while not self._closed.is_set():
            try:
                yield from self._connection(hello, beat)
                return
            except (Refused, Altered):
                raise
            except MailboxError as error:
                why, kind = str(error), type(error).__name__
            if self._closed.is_set():
                return
            yield Event("lost", {"why": why, "kind": kind})
            self._closed.wait(_PAUSE)

    def _connection(self, hello: Callable[[], Header], beat: Callable[[], Header]) -> Iterator[Event]:
        """Yields what comes, for as long as one site keeps the run."""
        turn, began = self._await_turn(), time.monotonic()
        with self._sending:
            self._begin_anew()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._told.get_nowait()
            self._posted_at = began
        self._fail(HubUnreachable("the connection was made anew."))
        self._post("watch", hello())
        beat_at, admitted_at = began + self._beat, -1
        while not self._closed.is_set():
            try:
                told = self._told.get(timeout=max(0.01, min(self._beat, beat_at - time.monotonic())))
            except queue.Empty:
                told = None
            if self._refused:
                raise self._refused
            self._require(turn, began, admitted_at)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + self._beat
                self._post("beat", beat())
            if told is None:
                continue
            if not isinstance(told, Item):
                raise told
            if "error" in told.header:
                raise _error(told)
            if admitted_at < 0 and self._watch.last:
                admitted_at = self._watch.last.number
            yield Event(str(told.header.get("event")), dict(told.header.get("about") or {}), told.body)

    def _await_turn(self) -> int:
        until = time.monotonic() + self._silence
        while (pulse := self._watch.last) is None or pulse.over or self._watch.silent_for >= self._silence:
            if self._refused:
                raise self._refused
            if time.monotonic() > until or self._closed.wait(self._poll):
                raise HubUnreachable(f"no site keeps run {self._run!r} in {self._files.url} now.")
        return pulse.turn

    def _require(self, turn: int, began: float, admitted_at: int) -> None:
        """Looks whether the site that keeps the run is still there, and hears this one."""
        pulse = self._watch.last
        if pulse is None or pulse.turn != turn or pulse.over:
            raise HubUnreachable(f"another site keeps run {self._run!r} now, or will.")
        if self._watch.silent_for >= self._silence:
            raise HubUnreachable(
                f"{pulse.name}, which keeps run {self._run!r}, has been silent for {self._silence:g} s."
            )
        if admitted_at < 0 and time.monotonic() > began + self._silence:
            raise HubUnreachable(f"{pulse.name}, which keeps run {self._run!r}, does not answer.")
        if 0 <= admitted_at < pulse.number - 1 and self._address not in pulse.here:
            raise HubUnreachable(f"{pulse.name}, which keeps run {self._run!r}, does not hear this site any more.")

    # The thread that looks

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run_looks, name="folder-mailbox", daemon=True)
                self._thread.start()

    def _run_looks(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except (Refused, Altered) as error:
                self._refused = error
                self._fail(error)
            except MailboxError as error:
                log.info("%s", error)
            except Exception as error:
                log.exception("looking for what was left failed")
                self._told.put(MailboxError(str(error)))
            self._closed.wait(self._poll)

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self._look_at or self._turn < 0:
            self._look_at = now + self._beat / 2
            self._look_for_life(self._watch.look())
        if self._turn < 0:
            return
        there = set(self._files.names(OUT))
        while (name := out_name(self._turn, address := self._address, self._read)) in there:
            items = unpacked(self._files.read(f"{OUT}/{name}", 0, MAX_OUT + 1), name)
            with self._sending:
                if self._address != address:
                    return
                self._read += 1
                for item in items:
                    self._take(item)
            self._files.delete(f"{OUT}/{name}")

    def _look_for_life(self, pulse: Pulse | None) -> None:
        if pulse is None or pulse.turn == self._turn:
            return
        if pulse.run != self._run:
            raise Refused(f"{self._files.url} is the place of run {pulse.run!r}, and not of {self._run!r}.")
        if self._turn >= 0:
            self._fail(HubUnreachable("another site keeps the run now."))
        with self._sending:
            self._turn = pulse.turn
            self._begin_anew()

    def _take(self, item: Item) -> None:
        number = item.header.get("answer")
        if number is None:
            self._told.put(item)
        elif isinstance(number, int) and (answer := self._answers.get(number)):
            with contextlib.suppress(InvalidStateError):
                answer.set_result(item)

    def _fail(self, error: Failure) -> None:
        for answer in list(self._answers.values()):
            with contextlib.suppress(InvalidStateError):
                answer.set_exception(error)

    def round_trip(self) -> float:
        """Refuses: in a folder nobody measures the way to the others."""
        raise Refused(_UNMEASURED)

    def bandwidth(self, up: bool, seconds: float) -> float:
        """Refuses: in a folder nobody measures the way to the others."""
        raise Refused(_UNMEASURED)

    def close(self) -> None:
        """Says that nobody is to be heard here any more."""
        if self._closed.is_set():
            return
        with contextlib.suppress(MailboxError):
            if self._turn >= 0:
                self._post("bye", {})
        self._closed.set()
        self._fail(HubUnreachable("this mailbox was closed."))
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join(2 * self._poll + 1.0)


def _error(item: Item) -> Failure:
    error: Failure = ERRORS.get(str(item.header.get("error")), MailboxError)(str(item.header.get("why"))[:1000])
    return error
