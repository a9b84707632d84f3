"""A mailbox in memory, for the sites of one process: tests, and simulations."""

import threading
from collections.abc import Iterator

from lightning_sdiloco.comm.mailbox.base import (
    MAX_BLOB,
    MAX_RECORD,
    Bytes,
    Missing,
    checked_blob,
    checked_key,
    checked_size,
    key_of,
)
from lightning_sdiloco.errors import Refused


class InProcessMailbox:
    """Keeps blobs and records as long as it is there itself."""

    def __init__(self, max_blob: int = MAX_BLOB) -> None:
        self.max_blob = max_blob
        self._blobs: dict[str, bytes] = {}
        self._records: list[bytes] = []
        self._changed = threading.Condition()
        self._closed = False

    def put(self, blob: Bytes) -> str:
        checked_size(memoryview(blob).nbytes, self.max_blob, "blob")
        self._blobs[key := key_of(blob)] = bytes(blob)
        return key

    def get(self, key: str) -> bytes:
        blob = self._blobs.get(checked_key(key))
        if blob is None:
            raise Missing(f"there is no blob {key}.")
        return checked_blob(key, blob, "the mailbox")

    def append(self, seq: int, record: Bytes) -> bool:
        checked_size(len(record), MAX_RECORD, "record")
        with self._changed:
            if not 0 <= seq <= len(self._records):
                raise Refused(f"record {seq} does not follow: there are {len(self._records)}.")
            if seq == len(self._records):
                self._records.append(bytes(record))
                self._changed.notify_all()
            return self._records[seq] == bytes(record)

    def watch(self, after: int) -> Iterator[tuple[int, bytes]]:
        while True:
            after += 1
            with self._changed:
                while not self._closed and after >= len(self._records):
                    self._changed.wait()
                if after >= len(self._records):
                    return
                record = self._records[after]
            yield after, record

    def close(self) -> None:
        """Ends every `watch`, once it has yielded what is there."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
