"""A mailbox without a server: a folder that all sites see, or a bucket behind fsspec."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

from lightning_sdiloco.comm.mailbox.base import MAX_BLOB, MAX_RECORD, Altered, Bytes, Missing, checked_size
from lightning_sdiloco.comm.mailbox.blobs import BlobStore
from lightning_sdiloco.comm.mailbox.files import Files, files_at
from lightning_sdiloco.errors import Refused

_FOLDER = "records"
_DIGEST = hashlib.sha256().digest_size


class FolderMailbox:
    """Blobs and records as files. Several processes and machines may use one at the same time."""

    def __init__(self, url: str | Path, max_blob: int = MAX_BLOB, poll: float = 0.2) -> None:
        self.store = BlobStore(url, max_blob)
        self._files: Files = files_at(str(url))
        self._poll = poll
        self._closed = threading.Event()
        self._known = -1  # the last record that is known to be there

    def put(self, blob: Bytes) -> str:
        return self.store.put(blob)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def append(self, seq: int, record: Bytes) -> bool:
        checked_size(len(record), MAX_RECORD, "record")
        if seq < 0 or (seq - 1 > self._known and self._record(seq - 1) is None):
            raise Refused(f"record {seq} does not follow: there is none before it.")
        created = self._files.create(_name(seq), hashlib.sha256(record).digest() + bytes(record))
        self._known = max(self._known, seq)
        return created or self._record(seq) == bytes(record)

    def watch(self, after: int) -> Iterator[tuple[int, bytes]]:
        while True:
            record = self._record(after + 1)
            if record is not None:
                after += 1
                yield after, record
            elif self._closed.wait(self._poll):
                return

    def close(self) -> None:
        """Ends every `watch`, once it has yielded what is there."""
        self._closed.set()

    def _record(self, seq: int) -> bytes | None:
        if seq < 0:
            return b""
        try:
            # One byte more than the largest, so that a file that is too large does not verify.
            data = self._files.read(_name(seq), 0, _DIGEST + MAX_RECORD + 1)
        except Missing:
            return None
        if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
            raise Altered(f"record {seq} in {self.store.url} has been altered.")
        return data[_DIGEST:]


def _name(seq: int) -> str:
    return f"{_FOLDER}/{seq:012d}"
