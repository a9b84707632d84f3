"""Who watches a hub, and what each of them is still to be told."""

import threading
from collections import deque
from collections.abc import Collection, Iterator

from lightning_sdiloco.comm.mailbox.access import Peer
from lightning_sdiloco.comm.mailbox.base import Busy, Failure, NoSpace
from lightning_sdiloco.comm.mailbox.channels import Event
from lightning_sdiloco.errors import Refused

MAX_EVENTS = 1024
"""Events that wait for somebody who does not read them. With one more it is sent away, and begins anew."""

MAX_WATCHING = 16
"""How often a holder that is no site may watch at the same time."""

BEAT = Event("beat", {})


class Session:
    """One who watches."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.admitted = False
        self._changed = threading.Condition()
        self._waiting: deque[Event] = deque()
        self._ended = False
        self._error: Failure | None = None

    def push(self, event: Event) -> None:
        """Adds an event to what is to be told."""
        with self._changed:
            if len(self._waiting) >= MAX_EVENTS:
                self._ended, self._error = True, NoSpace(f"{self.peer.name!r} does not read what it is told.")
                self._waiting.clear()
            elif not self._ended:
                self._waiting.append(event)
            self._changed.notify_all()

    def end(self, error: Failure | None = None) -> None:
        """Ends it, after all that waits has been told; the first reason stays."""
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
            self._changed.notify_all()

    def events(self, first: Iterator[Event], beat: float) -> Iterator[Event]:
        """Yields what is to be told, and a beat where there is nothing."""
        yield from first
        while True:
            with self._changed:
                if not self._waiting and not self._ended:
                    self._changed.wait(beat)
                event = self._waiting.popleft() if self._waiting else None
                if event is None and self._ended:
                    break
            yield event or BEAT
        if self._error is not None:
            raise self._error


class Sessions:
    """All who watch. A site does so once; it is one life of it, and a new one takes the place of the old."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Session] = []
        self._of_site: dict[str, Session] = {}

    def opened(self, peer: Peer) -> Session:
        """Returns a session, to which all that is pushed from now on is added."""
        session = Session(peer)
        with self._lock:
            if sum(other.peer.name == peer.name for other in self._all) >= MAX_WATCHING:
                raise NoSpace(f"{peer.name!r} watches {MAX_WATCHING} times already.")
            self._all.append(session)
        return session

    def admitted(self, session: Session) -> None:
        """Notes that a session has been let in. An earlier one of the same site ends."""
        session.admitted = True
        if session.peer.role != "site":
            return
        with self._lock:
            before = self._of_site.get(session.peer.name)
            self._of_site[session.peer.name] = session
        if before is not None:
            before.end(Refused(f"site {session.peer.name!r} watches from elsewhere."))

    def closed(self, session: Session) -> bool:
        """Forgets a session; tells whether it had been let in, and nobody has taken its place."""
        session.end()
        with self._lock:
            self._all.remove(session)
            current = self._of_site.get(session.peer.name)
            if session.peer.role != "site":
                return session.admitted
            if current is session:
                del self._of_site[session.peer.name]
            return current is session

    def check_life(self, peer: Peer) -> None:
        """Refuses the call of another life of a site than that which watches now, before or after it."""
        with self._lock:
            current = self._of_site.get(peer.name)
        if peer.role == "site" and current is not None and current.peer.life != peer.life:
            raise Busy(
                f"the name {peer.name} is in use by a living process: life {peer.life!r} is not the one that watches."
            )

    def push(self, event: Event, to: Collection[str] | None) -> None:
        """Adds an event to all sessions, or to those of some sites."""
        with self._lock:
            told = [session for session in self._all if to is None or session.peer.name in to]
        for session in told:
            session.push(event)

    def end_all(self) -> None:
        """Ends all sessions."""
        with self._lock:
            ended = list(self._all)
        for session in ended:
            session.end()
