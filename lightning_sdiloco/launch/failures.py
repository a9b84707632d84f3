"""Which rank failed first: a rank that fails leaves word, and one that has lost contact reports the
word it finds.

[Note: word of a failure] When a process ends, those that wait for it learn only that a connection
broke. So a rank that fails writes its number and its error into the store of the default process
group before it ends, unless another rank has done so. Nothing here waits for long, and nothing here
may hide the error itself.
"""

import itertools
import logging
import threading
import time
from typing import Any

from lightning_sdiloco.errors import ExchangeError

_log = logging.getLogger(__name__)

# How long one look into the store may take.
_SECONDS = 3.0

# How long rank 0 waits for the others to look. Longer would not help: some notice only when rank 0
# itself ends.
_READING_SECONDS = 2.0

# All ranks of a program run the same fits one after the other; each fit has its own entry.
_runs = itertools.count()


class Failures:
    def __init__(self, store: Any, rank: int, group: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._who = f"Rank {rank} (worker group {group})"
        self._key = f"streaming_diloco/failure/{next(_runs)}"

    def leave(self, exception: BaseException) -> None:
        """Leaves word of this rank's failure, and reports which rank failed first if it was
        another one.
        """
        if self._store is None:
            return
        lost = _lost_contact(exception)
        readers = f"{self._key}/readers"
        error = f"{type(exception).__name__}: {exception}".removesuffix(": ")
        word = f"{self._who} {'lost contact' if lost else 'failed'} first: {error}"
        words: list[
            str
        ] = []  # The first that any rank left, which is this rank's own if there was none.
        looked = threading.Event()
        deadline = time.monotonic() + _SECONDS + _READING_SECONDS

        def look() -> None:
            try:
                words.append(self._store.compare_set(self._key, "", word).decode())
                self._store.add(readers, 1)
                looked.set()
                # Until all ranks have looked into the store, which often ends with rank 0.
                while lost and self._rank == 0 and words != [word] and time.monotonic() < deadline:
                    if self._store.add(readers, 0) >= self._world_size:
                        break
                    time.sleep(0.05)
            except Exception as error:
                # The store ends with the process that keeps it.
                _log.debug("The store of the default process group did not answer: %s", error)
            finally:
                looked.set()

        thread = threading.Thread(target=look, name="sdiloco-failure", daemon=True)
        thread.start()
        looked.wait(_SECONDS)
        if isinstance(exception, KeyboardInterrupt) or not lost:
            return
        if words == [word]:
            told = (
                f"{self._who} has lost contact with another rank, but none has reported a failure:"
                " a process was killed, or a machine or the network failed."
            )
        elif not words and self._rank != 0:
            told = "Rank 0, which records which rank failed first, has ended. Its output names the cause."
        else:
            told = "".join(words)
        if told:
            _log.error(told)
            if hasattr(exception, "add_note"):
                exception.add_note(told)
        if words:
            thread.join(_READING_SECONDS)


def _lost_contact(error: BaseException | None) -> bool:
    """Returns whether an error says no more than that another rank is gone or late."""
    while error is not None:
        texts = ("gloo", "NCCL", "Connection", "connection", "Timed out", "timed out")
        if isinstance(error, ExchangeError) or (
            isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
        ):
            return True
        error = error.__cause__
    return False
