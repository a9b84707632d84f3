"""A mailbox in memory, which survives the hubs that write to it: blobs, records, and what else a hub keeps durably."""

from collections import Counter, defaultdict
from functools import lru_cache

import numpy as np

from lightning_sdiloco.federation import Contribution, Record, StateHeader
from lightning_sdiloco.federation.codec import key_of

read = lru_cache(maxsize=1 << 14)(Record.from_bytes)


class Disk:
    """What is durable: the four methods of a mailbox, open contributions, and the anchor."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.blobs: dict[str, bytes] = {}
        self.contributions: dict[tuple[int, str], Contribution] = {}
        self.anchors: list[tuple[StateHeader, list[tuple[np.ndarray, np.ndarray]], list[str]]] = []
        self.chains: dict[int, list[Record]] = defaultdict(list)
        self.dropped: dict[int, int] = defaultdict(int)
        self.named: Counter[str] = Counter()
        self.ending = False
        self.is_real = True
        # For the judge: the trained steps that records have counted, each with its round, by site and fragment.
        self.counted: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)

    def put(self, blob: bytes) -> str:
        key = key_of(blob)
        self.blobs[key] = blob
        return key

    def get(self, key: str) -> bytes:
        return self.blobs[key]

    def append(self, seq: int, record: bytes) -> bool:
        if seq < len(self.records):
            return self.records[seq] == record
        assert seq == len(self.records), "a record without the one before it"
        self.records.append(record)
        self.chains[read(record).fragment].append(read(record))
        self.named.update(payload.key for own in read(record).counted for payload in own.payloads)
        return True

    def all_records(self) -> list[Record]:
        return list(map(read, self.records))

    def tidy(self, record: Record) -> None:
        """Drops what nobody needs any more once a record is durable."""
        for key in [key for key in self.contributions if key[0] == record.fragment]:
            del self.contributions[key]

    def drop_payloads(self, kept: tuple[int, ...]) -> None:
        """Drops the payloads of rounds that are no longer kept, if nobody else has sent the same bytes since."""
        open_ones = {payload.key for own in self.contributions.values() for payload in own.payloads}
        for p, first in enumerate(kept):
            for record in self.chains[p][self.dropped[p] : first - 1]:
                for own in record.counted:
                    for payload in own.payloads:
                        self.named[payload.key] -= 1
                        if not self.named[payload.key] and payload.key not in open_ones:
                            self.blobs.pop(payload.key, None)
            self.dropped[p] = max(self.dropped[p], first - 1)

    def without_the_last(self, count: int, steps: dict[Contribution, list[int]]) -> "Disk":
        """What a backup of a while ago holds."""
        backup = Disk()
        backup.is_real = False
        for data in self.records[: len(self.records) - count]:
            backup.append(len(backup.records), data)
        backup.blobs = dict(self.blobs)
        backup.anchors = self.anchors[:1]
        for record in backup.all_records():
            for own in record.counted:
                backup.counted[own.site, own.fragment].update(dict.fromkeys(steps[own], own.round))
        return backup
