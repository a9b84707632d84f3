"""Fetching payloads: each once, several at the same time, and some before their round is closed."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lightning_sdiloco.comm import HubUnreachable
from lightning_sdiloco.federation import Contribution, Payload
from lightning_sdiloco.hub.history import Bytes

log = logging.getLogger(__name__)

Done = Callable[[Mapping[str, Bytes] | None], None]

_AT_ONCE = 32
_LARGE_AT_ONCE = 8
_SMALL = 256 << 10  # bytes that travel over one connection


class Fetching:
    """Fetches blobs in threads of its own: many small ones at the same time, each of which waits for a round trip."""

    def __init__(self, get: Callable[[str], Bytes]) -> None:
        self._get = get
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="hub-fetching")
        self._large = threading.BoundedSemaphore(_LARGE_AT_ONCE)
        self._lock = threading.RLock()
        self._early: dict[str, tuple[int, int, Future[Bytes]]] = {}

    def prefetch(self, own: Contribution, payloads: Sequence[Payload]) -> None:
        """Begins to fetch payloads that will be needed if they count."""
        with self._lock:
            for payload in payloads:
                if payload.key not in self._early:
                    self._early[payload.key] = own.fragment, own.round, self._begin(payload)

    def fetch(self, payloads: Sequence[Payload], here: Mapping[str, Bytes], done: Done) -> None:
        """Gets blobs, and then calls."""
        found = {key: here[key] for key, _ in payloads if key in here}
        futures = {payload.key: self._future(payload) for payload in payloads if payload.key not in here}
        if not futures:
            done(found)
            return
        left = [len(futures)]

        def one_is_there(_: object) -> None:
            with self._lock:
                left[0] -= 1
                if left[0]:
                    return
            self._finish(found, futures, done)

        for future in futures.values():
            future.add_done_callback(one_is_there)

    def forget(self, fragment: int, round: int) -> None:
        """Drops what was fetched early for a round, or one before it, and did not count."""
        with self._lock:
            self._early = {key: early for key, early in self._early.items() if early[0] != fragment or early[1] > round}

    def close(self) -> None:
        """Fetches nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _future(self, payload: Payload) -> "Future[Bytes]":
        with self._lock:
            early = self._early.get(payload.key)
            failed = early is not None and early[2].done() and early[2].exception() is not None
            return self._begin(payload) if early is None or failed else early[2]

    def _begin(self, payload: Payload) -> "Future[Bytes]":
        if payload.size <= _SMALL:
            return self._pool.submit(self._get, payload.key)

        def get() -> Bytes:
            with self._large:
                return self._get(payload.key)

        return self._pool.submit(get)

    def _finish(self, found: dict[str, Bytes], futures: Mapping[str, "Future[Bytes]"], done: Done) -> None:
        errors = [error for future in futures.values() if not future.cancelled() and (error := future.exception())]
        if any(future.cancelled() for future in futures.values()) or any(isinstance(e, HubUnreachable) for e in errors):
            return
        for error in errors:
            log.warning("a payload cannot be had: %s", error)
        done(None if errors else found | {key: future.result() for key, future in futures.items()})


def each_once(payloads: Sequence[Payload]) -> list[Payload]:
    """Returns payloads, each once."""
    return list(dict.fromkeys(payloads))
