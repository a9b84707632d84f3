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

_AT_ONCE = 8


class Fetching:
    """Fetches blobs in threads of its own.

    Args:
        get: Returns the blob under a key, verified.
    """

    def __init__(self, get: Callable[[str], Bytes]) -> None:
        self._get = get
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="hub-fetching")
        self._lock = threading.RLock()
        self._early: dict[str, tuple[int, int, Future[Bytes]]] = {}

    def prefetch(self, own: Contribution, keys: Sequence[str]) -> None:
        """Begins to fetch payloads that will be needed if they count."""
        with self._lock:
            for key in keys:
                if key not in self._early:
                    self._early[key] = own.fragment, own.round, self._pool.submit(self._get, key)

    def fetch(self, keys: Sequence[str], here: Mapping[str, Bytes], done: Done) -> None:
        """Gets blobs, and then calls.

        Args:
            keys: Which.
            here: Those that need not be fetched, and may be others.
            done: Called with all of them under their keys, in whatever thread; with None if some cannot be had any
                more; not at all if the hub is gone.
        """
        found = {key: here[key] for key in keys if key in here}
        futures = {key: self._future(key) for key in keys if key not in here}
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

    def _future(self, key: str) -> "Future[Bytes]":
        with self._lock:
            early = self._early.get(key)
            failed = early is not None and early[2].done() and early[2].exception() is not None
            return self._pool.submit(self._get, key) if early is None or failed else early[2]

    def _finish(self, found: dict[str, Bytes], futures: Mapping[str, "Future[Bytes]"], done: Done) -> None:
        errors = [error for future in futures.values() if not future.cancelled() and (error := future.exception())]
        if any(future.cancelled() for future in futures.values()) or any(isinstance(e, HubUnreachable) for e in errors):
            return
        for error in errors:
            log.warning("a payload cannot be had: %s", error)
        done(None if errors else found | {key: future.result() for key, future in futures.items()})


def keys_of(payloads: Sequence[Payload]) -> list[str]:
    """Returns the keys of payloads, each once."""
    return list(dict.fromkeys(payload.key for payload in payloads))
