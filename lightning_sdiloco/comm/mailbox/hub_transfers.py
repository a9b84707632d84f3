"""Blobs on their way to and from a hub, each over several connections at the same time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_sdiloco.comm.mailbox.access import Peer
from lightning_sdiloco.comm.mailbox.base import NoSpace
from lightning_sdiloco.comm.mailbox.blobs import BlobStore, Upload
from lightning_sdiloco.comm.mailbox.chunks import Dispenser, Runs
from lightning_sdiloco.errors import Malformed

MAX_UPLOADS = 64
"""Blobs that one holder may be sending at the same time."""

_GIVEN_UP = 600.0  # seconds without a connection after which what has arrived of a blob is dropped


@dataclass
class _Arriving:
    upload: Upload
    used: float = field(default_factory=time.monotonic)


class Uploads:
    """Blobs that arrive. What has arrived stays for a while if connections break, and is not sent again."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._arriving: dict[tuple[str, str, str], _Arriving] = {}

    def of(self, peer: Peer, key: str, size: int) -> Upload:
        """Returns the upload that a connection belongs to."""
        place = (peer.role, peer.name, key)
        with self._lock:
            self._drop_unused()
            if place not in self._arriving:
                if sum(other[:2] == place[:2] for other in self._arriving) >= MAX_UPLOADS:
                    raise NoSpace(f"{peer.name!r} is sending {MAX_UPLOADS} blobs already.")
                self._arriving[place] = _Arriving(self._store.begin(key, size))
            arriving = self._arriving[place]
            arriving.used = time.monotonic()
        if arriving.upload.size != size:
            raise Malformed(f"blob {key} has {arriving.upload.size:,} bytes on another connection, and here {size:,}.")
        return arriving.upload

    def commit(self, peer: Peer, upload: Upload) -> None:
        """Stores a blob that is complete, as `Upload.commit` does; whatever comes of it, its upload is over."""
        try:
            upload.commit()
        finally:
            with self._lock:
                self._arriving.pop((peer.role, peer.name, upload.key), None)

    def _drop_unused(self) -> None:
        late = time.monotonic() - _GIVEN_UP
        for place in [place for place, arriving in self._arriving.items() if arriving.used < late]:
            self._arriving.pop(place).upload.discard()


class Downloads:
    """Blobs that are fetched. The connections of one transfer take chunks from the same dispenser."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leaving: dict[tuple[str, str, str], Dispenser] = {}

    @contextmanager
    def joined(self, peer: Peer, transfer: str, runs: Runs, first: bool) -> Iterator[Iterator[int]]:
        """Yields the chunks that a connection sends."""
        place = (peer.name, peer.life, transfer)
        with self._lock:
            if first:
                self._leaving[place] = Dispenser(runs)
            dispenser = self._leaving.get(place, Dispenser([]))
        try:
            yield iter(dispenser)
        finally:
            if first:
                with self._lock:
                    self._leaving.pop(place, None)
