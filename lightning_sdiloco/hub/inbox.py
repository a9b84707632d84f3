"""What a site has heard and not read yet: filled by the threads of the network, read by that of training."""

import threading

from lightning_sdiloco.hub.connection import Recorded, Told


class Inbox:
    """A queue with a last word: the error that ends the connection."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._told: list[Told] = []
        self._error: Exception | None = None

    def put(self, told: Told) -> None:
        """Adds what was heard."""
        with self._changed:
            self._told.append(told)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Adds the last word; the first one stays."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self) -> list[Told]:
        """Returns what was heard, or raises the last word when there is nothing else."""
        with self._changed:
            told, self._told = self._told, []
            self._changed.notify_all()
            if not told and self._error:
                raise self._error
            return told

    def wait(self, timeout: float) -> bool:
        """Waits until there is something to take."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._told or self._error), timeout)

    @property
    def payloads(self) -> int:
        """How many records are there to be read that have payloads, which take memory."""
        with self._changed:
            return sum(isinstance(told, Recorded) and told.blobs is not None for told in self._told)
