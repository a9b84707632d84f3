"""What a site has sent and its hub may not have: kept, to be sent again."""

import threading
from collections.abc import Collection, Mapping

from lightning_sdiloco.federation import Contribution, Record
from lightning_sdiloco.hub.history import Bytes


class Outbox:
    """Keeps contributions with their payloads, the last of each fragment, until they are overtaken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[Contribution, Mapping[str, Bytes]]] = {}
        self._begun: set[Contribution] = set()

    def begins(self, own: Contribution) -> bool:
        """Tells, once, that a contribution is sent for the first time: later some of it may be there already."""
        with self._lock:
            is_first = own not in self._begun
            self._begun = {own, *(one for one, _ in self._kept.values() if one in self._begun)}
            return is_first

    def put(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        """Keeps a contribution in place of an earlier one."""
        with self._lock:
            self._kept[own.fragment] = own, blobs

    def blobs(self, own: Contribution) -> Mapping[str, Bytes] | None:
        """Returns the payloads of a contribution; None if it has been overtaken."""
        kept = self._kept.get(own.fragment)
        return kept[1] if kept and kept[0] == own else None

    def all_blobs(self) -> dict[str, Bytes]:
        """Returns all payloads that are kept, under their keys."""
        with self._lock:
            return {key: blob for _, blobs in self._kept.values() for key, blob in blobs.items()}

    def outstanding(self) -> list[Contribution]:
        """Returns what is kept."""
        with self._lock:
            return [own for own, _ in self._kept.values()]

    def hear(self, record: Record) -> None:
        """Drops what a record has overtaken."""
        with self._lock:
            kept = self._kept.get(record.fragment)
            if kept and kept[0].round <= record.round:
                del self._kept[record.fragment]

    def only(self, owns: Collection[Contribution]) -> None:
        """Drops all but these."""
        with self._lock:
            self._kept = {fragment: kept for fragment, kept in self._kept.items() if kept[0] in owns}
