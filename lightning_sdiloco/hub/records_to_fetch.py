"""Records that were told, on their way to training: for which of them payloads are fetched, and when. Nothing waits."""

import threading
from collections.abc import Callable, Mapping, Sequence

from lightning_sdiloco.federation import Contribution, Follower, Payload, Record
from lightning_sdiloco.hub.connection import Recorded
from lightning_sdiloco.hub.fetching import Fetching, each_once
from lightning_sdiloco.hub.history import Bytes
from lightning_sdiloco.hub.inbox import Inbox
from lightning_sdiloco.hub.outbox import Outbox

_UNREAD = 32  # records whose payloads are here, and not read yet, before no more are fetched: they take memory


class RecordsToFetch:
    """Takes records from the network, and puts them into the inbox: at once where their payloads are of no use."""

    def __init__(
        self,
        fetching: Fetching,
        inbox: Inbox,
        outbox: Outbox,
        wanted: Callable[[Contribution], Sequence[Payload]],
    ) -> None:
        self._fetching, self._inbox, self._outbox, self._wanted = fetching, inbox, outbox, wanted
        self._lock = threading.Lock()
        self._kept: Sequence[int] = ()
        self._applied: Sequence[int | None] = ()
        self._waiting: list[Record] = []
        self._coming: set[str] = set()

    def begin(self, kept: Sequence[int]) -> None:
        """Begins anew on a new connection: what waits is told again."""
        with self._lock:
            self._kept = kept
            self._waiting.clear()

    def lose(self) -> None:
        """Hears that the connection is lost: what is being fetched may not come."""
        with self._lock:
            self._coming.clear()

    def follow(self, follower: Follower) -> None:
        """Copies how far the site is; some records may be of use now."""
        applied = [None if own.digest is None else own.applied.round for own in follower.fragments]
        with self._lock:
            if applied == self._applied:
                return
            self._applied = applied
        self.go_on()

    def hear(self, record: Record) -> None:
        """Takes a record that the hub told."""
        with self._lock:
            told_before = record.key in self._coming
            dropped = bool(self._kept) and record.round < self._kept[record.fragment]
            useful = self._is_useful(record)
            if not (told_before or dropped or self._is_applied(record)):
                self._waiting.append(record)
        if dropped:
            self._outbox.hear(record)
        if dropped or not useful:
            self._inbox.put(Recorded(record, None))
        self.go_on()

    def go_on(self) -> None:
        """Fetches for the records that wait, as far as there is room."""
        with self._lock:
            room = max(0, _UNREAD - self._inbox.payloads - len(self._coming))
            left = [record for record in self._waiting if not self._is_applied(record)]
            begun = [record for record in left if self._is_useful(record)][:room]
            self._coming.update(record.key for record in begun)
            self._waiting = [record for record in left if record.key not in self._coming]
        for record in begun:
            self._fetch(record)

    def _is_applied(self, record: Record) -> bool:
        applied = self._applied[record.fragment] if self._applied else None
        return applied is not None and record.round <= applied

    def _is_useful(self, record: Record) -> bool:
        """Whether a record can be applied when those before it are, without a state."""
        if not self._kept or not self._applied:
            return True
        applied = self._applied[record.fragment]
        return applied is not None and self._kept[record.fragment] <= applied + 1 <= record.round

    def _fetch(self, record: Record) -> None:
        payloads = each_once([payload for one in record.counted for payload in self._wanted(one)])

        def there(blobs: Mapping[str, Bytes] | None) -> None:
            self._outbox.hear(record)
            self._fetching.forget(record.fragment, record.round)
            # Before it leaves those that are coming, or there would seem to be room.
            self._inbox.put(Recorded(record, blobs))
            with self._lock:
                self._coming.discard(record.key)

        self._fetching.fetch(payloads, self._outbox.all_blobs(), there)
