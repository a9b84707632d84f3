"""Reports of the first failure: the failing rank records it, and all other ranks report it.

[Note: the first failure] When a process ends, the processes that wait for it detect only a broken
connection. Therefore, a failing rank writes its number and its error to the store of the default
process group before it ends, unless another rank has already done so. The code in this module never
waits long and never hides the original error.
"""

import itertools
import logging
import threading
import time
from typing import Any

from typing_extensions import override

from lightning_sdiloco.errors import ExchangeError

_log = logging.getLogger(__name__)

# The time limit for one query to the store.
_SECONDS = 3.0

# The time that rank 0 waits for all other ranks to read the record. A longer wait would not help,
# because some ranks notice the failure only when rank 0 ends.
_READING_SECONDS = 2.0

# All ranks of a program run the same fits in the same order, and each fit has a separate entry.
_runs = itertools.count()


class Failures:
    def __init__(self, store: Any, rank: int, group: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._name = f"Rank {rank} (worker group {group})"
        self._key = f"streaming_diloco/failure/{next(_runs)}"

    def leave(self, exception: BaseException) -> None:
        """Records this rank's failure, or reports which other rank failed first."""
        if self._store is None:
            return
        has_lost_contact = _has_lost_contact(exception)
        error = f"{type(exception).__name__}: {exception}".removesuffix(": ")
        kind = "lost contact" if has_lost_contact else "failed"
        look = _Look(
            self._store,
            self._key,
            word=f"{self._name} {kind} first: {error}",
            # The store often ends with rank 0.
            readers=self._world_size if has_lost_contact and self._rank == 0 else 0,
        )
        look.start()
        look.done.wait(_SECONDS)
        if isinstance(exception, KeyboardInterrupt) or not has_lost_contact:
            return
        report = look.first_word
        if report == look.word:
            report = (
                f"{self._name} has lost contact with another rank, but no rank has reported a"
                " failure. Either a process was killed, or a machine or the network failed."
            )
        elif report is None and self._rank != 0:
            report = (
                "Rank 0, which records the first failure, has ended. See the output of rank 0 for"
                " the cause."
            )
        if report:
            _log.error(report)
            if hasattr(exception, "add_note"):
                exception.add_note(report)
        if look.first_word is not None:
            look.join(_READING_SECONDS)


class _Look(threading.Thread):
    """A thread that reads the record of the first failure from the store, which may not respond.

    Attributes:
        word: This rank's record, which is stored if no other rank has stored one.
        first_word: The first record of any rank, or None until the store has responded.
        done: Set once the store has responded or failed.
    """

    def __init__(self, store: Any, key: str, word: str, readers: int) -> None:
        super().__init__(name="sdiloco-failure", daemon=True)
        self.word = word
        self.first_word: str | None = None
        self.done = threading.Event()
        self._store = store
        self._key = key
        # The number of ranks that must have read the record before the thread ends.
        self._readers = readers
        self._deadline = time.monotonic() + _SECONDS + _READING_SECONDS

    @override
    def run(self) -> None:
        readers = f"{self._key}/readers"
        try:
            self.first_word = self._store.compare_set(self._key, "", self.word).decode()
            self._store.add(readers, 1)
            self.done.set()
            if self.first_word == self.word:
                return
            while self._readers and time.monotonic() < self._deadline:
                if self._store.add(readers, 0) >= self._readers:
                    break
                time.sleep(0.05)
        except Exception as error:
            # The store ends with the process that hosts it.
            _log.debug("The store of the default process group did not answer: %s", error)
        finally:
            self.done.set()


def _has_lost_contact(error: BaseException | None) -> bool:
    """Returns whether an error only shows that another rank is gone or late."""
    texts = ("gloo", "NCCL", "Connection", "connection", "Timed out", "timed out")
    while error is not None:
        if isinstance(error, ExchangeError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in texts):
            return True
        error = error.__cause__
    return False
