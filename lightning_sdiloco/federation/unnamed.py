"""Blobs that no message has named yet. A site sends a blob first and then the message that names
the blob.

The coordinator owns the `UnnamedBlobs` of its run and holds its lock during every call.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_sdiloco.federation.keys import Peer
from lightning_sdiloco.federation.messages import Payload

# Seconds after which no message will name a blob, even if its sender is still connected.
_LONGEST = 3600.0


@dataclass
class _Unnamed:
    """A blob that is kept until its sender's lease ends, but never beyond ``latest``."""

    until: float
    latest: float


class UnnamedBlobs:
    """Blobs whose senders have a lease and may still name these blobs."""

    def __init__(self) -> None:
        # By sender: the sender's blobs by key.
        self._blobs: defaultdict[Peer, dict[str, _Unnamed]] = defaultdict(dict)

    def add(self, key: str, sender: Peer, now: float, lease: float) -> None:
        """Adds a blob that is arriving or has arrived. The blob is kept for at least one lease."""
        self._blobs[sender][key] = _Unnamed(now + lease, now + _LONGEST)

    def renew(self, sender: Peer, until: float) -> None:
        """Extends the lease of a sender."""
        for unnamed in self._blobs.get(sender, {}).values():
            unnamed.until = max(unnamed.until, until)

    def discard(self, payloads: Iterable[Payload], sender: Peer) -> None:
        """Removes blobs that no further message from the sender will name."""
        for payload in payloads:
            self._blobs.get(sender, {}).pop(payload.key, None)

    def keys(self, now: float) -> set[str]:
        """Returns the keys of all blobs that may still be named."""
        keys = set[str]()
        for sender, blobs in list(self._blobs.items()):
            for key, unnamed in list(blobs.items()):
                if min(unnamed.until, unnamed.latest) > now:
                    keys.add(key)
                else:
                    del blobs[key]
            if not blobs:
                del self._blobs[sender]
        return keys
