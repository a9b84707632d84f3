"""The hub's end of a folder, at the site that keeps the run: it reads what sites have left, and leaves them answers.

It does for a `Handler` what `Hub` does over gRPC, in one thread that looks again and again. Payloads do not pass
through it: sites write them to the folder and read them there.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from lightning_sdiloco.comm.mailbox.access import LOOKING, Access, Peer
from lightning_sdiloco.comm.mailbox.base import (
    Altered,
    Busy,
    Failure,
    MailboxError,
    Missing,
    NoSpace,
    NotActive,
    checked_key,
    checked_size,
)
from lightning_sdiloco.comm.mailbox.channels import CODES, Event
from lightning_sdiloco.comm.mailbox.folder_messages import (
    IN,
    MAX_IN,
    OUT,
    Address,
    Item,
    filled,
    out_name,
    packed,
    split,
)
from lightning_sdiloco.comm.mailbox.frames import Header
from lightning_sdiloco.comm.mailbox.hub_server import Handler
from lightning_sdiloco.comm.mailbox.pulse import Pulses
from lightning_sdiloco.comm.mailbox.sealed import unseal
from lightning_sdiloco.comm.mailbox.shared_files import SharedBlobs, SharedFiles, Sweeper
from lightning_sdiloco.errors import Malformed, Refused

log = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Items that wait for somebody who does not read them. With one more it is sent away, and begins anew."""

MAX_SESSIONS = 512
"""Who may speak with this site at the same time; a site has one session for each of its ranks."""

_UNREAD = 16  # files that somebody has not read yet, before it gets no more

_MAY_AS = {"stored": "put", "beat": "watch", "bye": "ping"}


class _Session:
    """One who speaks with this site: what it is still to be told, and what it has read."""

    def __init__(self, address: Address, now: float) -> None:
        self.peer = Peer(address.role, address.name, address.life, address.text)
        self.watches = False
        self.heard_at = now
        self.number = self.read = 0
        self.taken = -1
        self.unsent = b""
        self.first: Iterator[Event] = iter(())
        self._waiting: deque[Item] = deque()

    def open(self) -> None:
        """Begins to tell it what is told; what waits for it was for what it had said before."""
        self.watches = True
        self._waiting = deque(item for item in self._waiting if "answer" in item.header)

    def tell(self, item: Item) -> bool:
        """Adds an item; tells whether there was room."""
        self._waiting.append(item)
        return len(self._waiting) <= MAX_WAITING

    def items(self) -> Iterator[Item]:
        """Yields what is to be told, the first words before all else."""
        for event in self.first:
            yield _of_event(event)
        while self._waiting:
            yield self._waiting.popleft()


class FolderHub:
    """Serves sites over a folder, for one turn of this site."""

    def __init__(
        self,
        handler: Handler,
        store: SharedBlobs,
        files: SharedFiles,
        sweeper: Sweeper,
        pulses: Pulses,
        turn: int,
        run: str,
        silence: float,
        beat: float,
        clock: Callable[[], float],
        alive: Callable[[float], None],
        require: Callable[[], None],
    ) -> None:
        self._handler, self._store, self._files, self._sweeper = handler, store, files, sweeper
        self._pulses, self._turn, self._silence, self._beat = pulses, turn, silence, beat
        self._clock, self._alive, self._require = clock, alive, require
        self._access = Access(run, certified=False)
        self._sessions: dict[str, _Session] = {}
        self._beat_at = clock()
        self._done: dict[str, None] = {}

    def start(self) -> None:
        """Begins to serve."""
        self._handler.start(self.push)
        self._pulses.begin()
        earlier = [name for name in self._files.names(OUT) if name < f"{self._turn:012d}"]
        self._sweeper.delete([f"{OUT}/{name}" for name in earlier])
        self._show_life()

    def push(self, event: Event, to: Collection[str] | None = None) -> None:
        """Tells something to all who watch, or to some of them; see `Hub.push`."""
        for session in list(self._sessions.values()):
            if session.watches and (to is None or session.peer.name in to):
                self._tell(session, _of_event(event))

    def serve(self) -> None:
        """Reads all that has been left, and leaves what is to be told."""
        names = self._files.names(IN)
        self._done = {name: None for name in names if name in self._done}
        for name in names:
            if name not in self._done:
                self._take(name)
                self._done[name] = None
                self._sweeper.delete([f"{IN}/{name}"])
            self._show_life_if_due()
        now = self._clock()
        for session in list(self._sessions.values()):
            if now > session.heard_at + self._silence:
                self._drop(session)
        self.flush()
        self._show_life_if_due()

    def flush(self) -> None:
        """Leaves what is to be told."""
        for session in list(self._sessions.values()):
            while session.number - session.read < _UNREAD and (data := self._packed(session)):
                name = out_name(self._turn, session.peer.address, session.number)
                self._files.create(f"{OUT}/{name}", data)
                session.number, session.unsent = session.number + 1, b""
                self._show_life_if_due()

    def _packed(self, session: _Session) -> bytes:
        if session.unsent:
            return session.unsent  # it is not known whether it is there: the name is given once
        try:
            items = filled(session.items())
        except NotActive:
            raise
        except MailboxError as error:
            log.warning("%s cannot be told all: %s", session.peer.name, error)
            self._end(session, error)
            return b""
        session.unsent = packed(items) if items else b""
        return session.unsent

    def close(self) -> None:
        """Says that this site keeps the run no longer, and that somebody else may."""
        with contextlib.suppress(MailboxError):
            self._pulses.beat([], over=True)

    # Signs of life

    def _show_life_if_due(self) -> None:
        if self._clock() >= self._beat_at:
            self._show_life()

    def _show_life(self) -> None:
        began = self._clock()
        self._alive(began)
        self._pulses.beat([address for address, session in self._sessions.items() if session.watches])
        self._beat_at = began + self._beat

    # What arrives

    def _take(self, name: str) -> None:
        try:
            address, number = split(name)
            header, (body, *_) = unseal(self._files.read(f"{IN}/{name}", 0, MAX_IN + 1), name)
            turn = header.get("turn")
            if type(turn) is int and turn > self._turn:
                self._require()
            if turn == self._turn:
                self._hear(Address.of(address), number, header, body)
        except NotActive:
            raise
        except (Altered, Malformed, Refused, Missing, ValueError) as error:
            log.info("a message was dropped: %s", error)

    def _hear(self, address: Address, number: int, header: Header, body: bytes) -> None:
        session = self._session(address)
        if number <= session.taken:
            return
        session.taken, session.heard_at = number, self._clock()
        read = header.get("read")
        session.read = min(read, session.number) if type(read) is int and read > session.read else session.read
        call = str(header.get("call"))[:80]
        try:
            peer = self._access.peer(_MAY_AS.get(call, call), header, _Caller(address.text))
            if (peer.role, peer.name, peer.life) != address[:3]:
                raise Malformed("a message in a folder is from another than its name says.")
            if call not in LOOKING:
                self._check_life(peer)
            self._answer(session, call, header, body)
        except NotActive:
            raise
        except (MailboxError, Refused) as error:
            if isinstance(error, NoSpace):
                log.error("%s: %s", session.peer.name, error)
            self._fail(session, call, header, error)

    def _session(self, address: Address) -> _Session:
        session = self._sessions.get(address.text)
        if session is None:
            if len(self._sessions) >= MAX_SESSIONS:
                raise Refused(f"{MAX_SESSIONS} speak with this site already.")
            session = self._sessions[address.text] = _Session(address, self._clock())
        return session

    def _answer(self, session: _Session, call: str, header: Header, body: bytes) -> None:
        about, peer = header.get("about", {}), session.peer
        if call == "watch":
            self._watch(session, about)
        elif call == "beat":
            self._handler.beat(peer, about)
        elif call == "bye":
            self._drop(session)
        else:
            said, more = self._stored(peer, about) if call == "stored" else self._handler.call(peer, call, about, body)
            self._tell(session, Item({"answer": header.get("id"), "about": said}, more))

    def _watch(self, session: _Session, about: Header) -> None:
        # What the same start of it was told elsewhere and has not read is lost, as with a connection that breaks.
        self._drop_others(session, of_same_life=True)
        session.open()  # what is told from now on comes after its first words
        try:
            session.first = iter(self._handler.hello(session.peer, about))
        except BaseException:
            session.watches = False
            raise
        self._drop_others(session, of_same_life=False)

    def _drop_others(self, session: _Session, of_same_life: bool) -> None:
        """Drops other sessions of a site: of a start that speaks elsewhere now, or of one that has been followed."""
        own = session.peer
        for other in list(self._sessions.values()):
            same = other is not session and other.watches and other.peer.name == own.name
            if same and (other.peer.life == own.life) is of_same_life:
                self._drop(other)

    def _stored(self, peer: Peer, about: Header) -> tuple[Header, bytes]:
        key = checked_key(about.get("key"))
        size = checked_size(about.get("size"), self._store.max_blob, "blob")
        self._handler.admit(peer, about, key, size)
        if self._store.size(key) != size:
            raise Malformed("a blob has another size than its sender says.")
        return self._handler.stored(peer, about, key, size), b""

    def _fail(self, session: _Session, call: str, header: Header, error: Failure) -> None:
        if call in ("watch", "beat"):
            self._end(session, error)
        else:
            item = _of_error(error)
            self._tell(session, Item({**item.header, "answer": header.get("id")}))

    def _check_life(self, peer: Peer) -> None:
        for other in self._sessions.values():
            own = other.peer
            if peer.role == "site" and other.watches and own.name == peer.name and own.life != peer.life:
                raise Busy(
                    f"the name {peer.name} is in use by a living process: life {peer.life!r} is not the one that is"
                    " heard."
                )

    def _tell(self, session: _Session, item: Item) -> None:
        if not session.tell(item):
            log.warning("%s does not read what it is told", session.peer.name)
            self._drop(session)

    def _end(self, session: _Session, error: Failure) -> None:
        """Sends one who watches away, with a reason; it may come again."""
        watched, session.watches = session.watches, False
        self._tell(session, _of_error(error))
        if watched:
            self._handler.gone(session.peer)

    def _drop(self, session: _Session) -> None:
        self._sessions.pop(session.peer.address, None)
        names = (out_name(self._turn, session.peer.address, number) for number in range(session.read, session.number))
        self._sweeper.delete([f"{OUT}/{name}" for name in names])
        if session.watches:
            session.watches = False
            self._handler.gone(session.peer)


class _Caller:
    """What `Access` asks of a call for who makes it."""

    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> Any:
        return self._address


def _of_event(event: Event) -> Item:
    return Item({"event": event.kind, "about": event.header}, event.body)


def _of_error(error: Failure) -> Item:
    return Item({"error": CODES.get(type(error), "INTERNAL"), "why": str(error)[:1000]})
