"""Which chunks of a blob are to be sent, and which have arrived: blobs travel over several connections at once."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lightning_sdiloco.comm.mailbox.base import Bytes
from lightning_sdiloco.comm.mailbox.frames import CHUNK
from lightning_sdiloco.errors import Malformed

Runs = list[list[int]]
"""Numbers of chunks, as pairs of the first and the one after the last."""

MAX_RUNS = 2000


def count(size: int) -> int:
    """Returns of how many chunks a blob consists."""
    return -(-size // CHUNK)


def bounds(index: int, size: int) -> tuple[int, int]:
    """Returns where a chunk begins and ends in its blob."""
    return index * CHUNK, min((index + 1) * CHUNK, size)


def checked_runs(runs: Any, size: int) -> Runs:
    """Returns numbers of chunks that somebody asks for."""
    if not isinstance(runs, list) or len(runs) > MAX_RUNS:
        raise Malformed("chunks are asked for in a list of pairs.")
    end = 0
    for run in runs:
        if not isinstance(run, list) or len(run) != 2 or not all(type(number) is int for number in run):
            raise Malformed("chunks are asked for in pairs of numbers.")
        if not end <= run[0] < run[1] <= count(size):
            raise Malformed(f"chunks {run[0]} to {run[1]} are none of a blob of {size:,} bytes, or not in order.")
        end = run[1]
    return runs


class Dispenser:
    """Deals out the chunks that are to be sent: a connection that is faster takes more of them."""

    def __init__(self, runs: Runs) -> None:
        self._lock = threading.Lock()
        self._numbers = (number for first, end in runs for number in range(first, end))

    def __iter__(self) -> Iterator[int]:
        while True:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            yield number


class Arrivals:
    """Keeps count of the chunks that have arrived, and digests them as far as they are without a gap."""

    def __init__(self, size: int, write: Callable[[int, Bytes], None], read: Callable[[int, int], Bytes]) -> None:
        self.size = size
        self._write, self._read = write, read
        self._lock, self._hashing = threading.Lock(), threading.Lock()
        self._taken = bytearray(count(size))  # 0: not yet, 1: being written, 2: there
        self._there = 0
        self._hashed = 0
        self._hash = hashlib.sha256()

    @property
    def complete(self) -> bool:
        """Whether all chunks are there."""
        return self._there == len(self._taken)

    def take(self, index: int, data: Bytes) -> bool:
        """Writes a chunk that has arrived."""
        if index >= len(self._taken):
            raise Malformed(f"chunk {index} is none of a blob of {self.size:,} bytes.")
        start, end = bounds(index, self.size)
        if len(data) != end - start:
            raise Malformed(f"chunk {index} has {end - start:,} bytes, and not {len(data):,}.")
        with self._lock:
            if self._taken[index]:
                return False
            self._taken[index] = 1
        try:
            self._write(start, data)
        except BaseException:
            self._taken[index] = 0
            raise
        with self._lock:
            self._taken[index] = 2
            self._there += 1
            last = self.complete
        self._digest_on(wait=False)
        return last

    def missing(self) -> Runs:
        """Returns what has not arrived: at most `MAX_RUNS` runs of it."""
        runs: Runs = []
        for index in (index for index, state in enumerate(self._taken) if state != 2):
            if runs and runs[-1][1] == index:
                runs[-1][1] += 1
            elif len(runs) == MAX_RUNS:
                break
            else:
                runs.append([index, index + 1])
        return runs

    def digest(self) -> str:
        """Returns the digest of the blob, once it is complete."""
        assert self.complete, "a digest of what has gaps"
        self._digest_on(wait=True)
        return self._hash.hexdigest()

    def _digest_on(self, wait: bool) -> None:
        # One thread digests; the others go on receiving. Whoever comes last digests the rest.
        if not self._hashing.acquire(blocking=wait):
            return
        try:
            while self._hashed < len(self._taken) and self._taken[self._hashed] == 2:
                self._hash.update(self._read(*bounds(self._hashed, self.size)))
                self._hashed += 1
        finally:
            self._hashing.release()
