"""The payloads of a site's ranks: each rank sends and fetches its own, while the first one alone speaks with the hub.

[Note: a site of several ranks] The first rank has the `Connection` of the site: it says hello, contributes, and hears.
Every other rank has `Shards`, under the same name and life, which move payloads and nothing else. A contribution names
the payloads of all ranks, and the hub takes it when the last of them is in its store: one rank's alone never counts.
So what a site sends does not grow with its ranks, and neither does what it fetches: `places_of` gives every payload of
another site to one rank.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

from lightning_sdiloco.comm import HubMailbox, HubUnreachable, MailboxError
from lightning_sdiloco.errors import ExchangeError
from lightning_sdiloco.federation import Contribution, Payload, Record
from lightning_sdiloco.hub.fetching import Fetching, each_once
from lightning_sdiloco.hub.history import Bytes
from lightning_sdiloco.hub.outbox import Outbox

log = logging.getLogger(__name__)

Wanted = Callable[[Contribution], Sequence[Payload]]
Fetched = Mapping[str, Mapping[str, Bytes] | None]

_AGAIN = 1.0  # seconds after which something is tried again that did not succeed


def all_payloads(own: Contribution) -> Sequence[Payload]:
    """Returns all payloads of a contribution."""
    return own.payloads


def places_of(rank: int, ranks: int, payloads: int) -> list[int]:
    """Returns which of a contribution's payloads a rank fetches: each is fetched by one rank of a site.

    Args:
        rank: The rank.
        ranks: How many there are. From a site of as many, each fetches the payload of its own number.
        payloads: How many payloads there are.

    Examples:
        >>> [places_of(rank, 2, payloads=4) for rank in range(2)], [places_of(rank, 4, payloads=2) for rank in range(4)]
        ([[0, 1], [2, 3]], [[0], [], [1], []])
    """
    return [place for place in range(payloads) if place * ranks // payloads == rank]


def payloads_of(rank: int, ranks: int) -> Wanted:
    """Returns what tells which payloads of a contribution a rank fetches; see `places_of`."""
    return lambda own: [own.payloads[place] for place in places_of(rank, ranks, len(own.payloads))]


class Shards(Protocol):
    """Moves the payloads of a rank that is not the first of its site; see [Note: a site of several ranks]."""

    sends_bytes_per_s: float

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        """Sends the payloads of this rank, and sends them again until they are there or overtaken."""

    def keep(self, outstanding: Collection[Contribution]) -> None:
        """Stops sending what does not belong to one of these."""

    def prefetch(self, own: Contribution) -> None:
        """Begins to fetch what this rank needs of a contribution if it counts."""

    def fetch(self, record: Record) -> None:
        """Fetches what this rank needs of a record."""

    def fetched(self) -> Fetched:
        """Returns what was fetched since the last call: payloads by the key of their record, None if some are gone."""

    def close(self) -> None:
        """Ends it."""


class HubShards:
    """Moves payloads to and from a hub over gRPC; see `Shards`. It has threads of its own."""

    def __init__(
        self,
        hub: str,
        run: str,
        site: str,
        life: str,
        keys: str | Path | None = None,
        insecure: bool = False,
        wanted: Wanted = all_payloads,
        patience: float = 3600.0,
        channels: int = 8,
    ) -> None:
        self._mailbox = HubMailbox(hub, run, site, keys, insecure, channels=channels, life=life)
        self._site, self._wanted, self._patience = site, wanted, patience
        self._outbox, self._fetching = Outbox(), Fetching(self._get)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="hub-shards")
        self._lock = threading.Lock()
        self._sending: dict[Contribution, Future[None]] = {}
        self._fetched: dict[str, Mapping[str, Bytes] | None] = {}
        self._away_since: float | None = None
        self.sends_bytes_per_s = 0.0
        self._closed = threading.Event()

    def reach(self, timeout: float = 60.0) -> None:
        """Waits until this rank has reached the hub."""
        until = time.monotonic() + timeout
        while True:
            try:
                self._mailbox.call("ping")
                return
            except MailboxError as error:
                if time.monotonic() > until:
                    raise ExchangeError(
                        f"A rank of {self._site} has not reached the hub: {error} Every rank of a site speaks with the"
                        " hub itself: its machine needs the way there, and the keys."
                    ) from error
                self._closed.wait(_AGAIN)

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        self._outbox.put(own, dict(blobs))
        with self._lock:
            if own not in self._sending and not self._closed.is_set():
                self._sending[own] = self._pool.submit(self._send, own)

    def keep(self, outstanding: Collection[Contribution]) -> None:
        self._outbox.only(outstanding)

    def prefetch(self, own: Contribution) -> None:
        if own.site != self._site:
            self._fetching.prefetch(own, each_once(self._wanted(own)))

    def fetch(self, record: Record) -> None:
        def there(blobs: Mapping[str, Bytes] | None) -> None:
            self._fetching.forget(record.fragment, record.round)
            with self._lock:
                self._fetched[record.key] = blobs

        payloads = each_once([payload for own in record.counted for payload in self._wanted(own)])
        self._fetching.fetch(payloads, self._outbox.all_blobs(), there)

    def fetched(self) -> Fetched:
        away = self._away_since
        if away is not None and time.monotonic() - away > self._patience:
            raise ExchangeError(
                f"A rank of {self._site} has not reached the hub for more than patience={self._patience:.0f} s. The"
                " checkpoint of the site holds what it trained: start it again when the hub can be reached."
            )
        with self._lock:
            fetched, self._fetched = self._fetched, {}
        return fetched

    def close(self) -> None:
        with self._lock:
            sending = set(self._sending.values())
        wait(sending, timeout=2 * _AGAIN)
        self._closed.set()
        self._mailbox.close()
        self._fetching.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # In the background

    def _send(self, own: Contribution) -> None:
        while not self._closed.is_set() and (blobs := self._outbox.blobs(own)) is not None:
            is_first = self._outbox.begins(own)
            try:
                for key, blob in blobs.items():
                    began = time.monotonic()
                    self._mailbox.send(blob, {"site": self._site, "kind": "payload"}, key=key)
                    if is_first:
                        self.sends_bytes_per_s = len(blob) / max(time.monotonic() - began, 1e-6)
                self._away_since = None
                break
            except MailboxError as error:
                # The first rank of the site may have to say hello first.
                self._missed(error)
        with self._lock:
            self._sending.pop(own, None)

    def _get(self, key: str) -> Bytes:
        while not self._closed.is_set():
            try:
                blob = self._mailbox.get(key)
                self._away_since = None
                return blob
            except HubUnreachable as error:
                self._missed(error)
        raise HubUnreachable("this rank has ended")

    def _missed(self, error: MailboxError) -> None:
        if isinstance(error, HubUnreachable) and self._away_since is None:
            self._away_since = time.monotonic()
        log.info("%s: %s", self._site, error)
        self._closed.wait(_AGAIN)
