"""A hub without rules: a ledger and a store that are served as a mailbox, to a second hub or a test."""

import threading
from collections.abc import Iterator

from lightning_sdiloco.comm.mailbox.access import Peer
from lightning_sdiloco.comm.mailbox.channels import Event, record_event
from lightning_sdiloco.comm.mailbox.frames import Header
from lightning_sdiloco.comm.mailbox.hub_server import Push
from lightning_sdiloco.comm.mailbox.ledger import SQLiteLedger
from lightning_sdiloco.errors import Malformed, Refused


class LedgerHandler:
    """Gives numbers to records as they come, and tells everybody who watches."""

    def __init__(self, ledger: SQLiteLedger) -> None:
        self.ledger = ledger
        self._lock = threading.Lock()
        self._push: Push | None = None

    def start(self, push: Push) -> None:
        self._push = push

    def hello(self, peer: Peer, about: Header) -> Iterator[Event]:
        """Returns the records after the number ``after``; see `Handler.hello`."""
        after = about.get("after")
        if type(after) is not int:
            raise Malformed("who watches says after which record.")
        if after > self.ledger.last:
            raise Refused(f"the hub has records up to {self.ledger.last}, and {peer.name!r} has seen {after}.")
        return (record_event(seq, record) for seq, record in self.ledger.read(after))

    def beat(self, peer: Peer, about: Header) -> None:
        """See `Handler.beat`."""

    def gone(self, peer: Peer) -> None:
        """See `Handler.gone`."""

    def admit(self, peer: Peer, about: Header, key: str, size: int) -> None:
        """See `Handler.admit`."""

    def stored(self, peer: Peer, about: Header, key: str, size: int) -> Header:
        return {}

    def call(self, peer: Peer, name: str, about: Header, body: bytes) -> tuple[Header, bytes]:
        """Answers ``append``; see `Handler.call`."""
        if name != "append":
            raise Refused(f"this hub keeps records only, and does not answer {name}.")
        seq = about.get("seq")
        if type(seq) is not int:
            raise Malformed("a record has a number.")
        # Told in the order of their numbers, and after they are on the disk.
        with self._lock:
            last = self.ledger.last
            given = self.ledger.append(seq, body)
            if self.ledger.last > last and self._push is not None:
                self._push(record_event(seq, body))
        return {"given": given}, b""
