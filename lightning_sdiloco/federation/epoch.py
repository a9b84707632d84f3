"""The epoch of a hub, which is a number stored next to the ledger. The epoch increases each time
the run's hub starts.

[Note: two hubs] A ledger is locked while a hub serves it. The lock is not enough if a file system
drops the locks of a lost host and a second hub starts while the first one is still running. Each
hub therefore writes its epoch to a file next to the ledger. Before each write to the ledger and
before dropping blobs, the hub checks that this file is unchanged. If two hubs are running, only the
hub that started later writes. Every answer from a hub contains the epoch, and a site ignores a hub
whose epoch is earlier than an epoch that the site has already seen. An epoch is no lower than the
start time of the hub in seconds, so a hub that starts on a new or copied ledger also gets a later
epoch.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from lightning_sdiloco.federation.keys import wall_clock
from lightning_sdiloco.federation.wire import HubUnreachable

_LENGTH = 64  # bytes: a fixed length, so that the epoch fits even on a full disk


class Epoch:
    """The epoch of this hub.

    Attributes:
        number: The epoch.
        is_over: True if another hub has started a later epoch.
    """

    def __init__(self, ledger: Path) -> None:
        self._path = ledger.with_suffix(".epoch")
        earlier_number = 0
        # A partly written file is treated as missing.
        with suppress(OSError, ValueError, IndexError):
            earlier_number = int(self._path.read_bytes().split()[0])
        self.number = max(earlier_number + 1, int(wall_clock()))
        self.is_over = False
        self._content = f"{self.number} {secrets.token_hex(8)}".ljust(_LENGTH).encode()
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(handle, self._content, 0)
            os.fsync(handle)
        finally:
            os.close(handle)

    def require(self) -> None:
        """Raises an error if another hub now serves the run."""
        with suppress(OSError):
            # An unreadable file is no evidence: the ledger is in the same folder.
            self.is_over = self.is_over or self._path.read_bytes() != self._content
        if self.is_over:
            raise HubUnreachable(
                "another hub has started on this run's ledger, so this hub no longer writes to it."
            )
