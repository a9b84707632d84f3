"""Where ranks meet before there are process groups: a store, over which they tell each other small things."""

import errno
import json
import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_log = logging.getLogger(__name__)

# How long an address may be without any answer. One that refuses is there, and its program starts later.
SECONDS_UNREACHABLE = 30.0

# How often waiting is told.
_SECONDS_BETWEEN_WORDS = 60.0

# How long rank 0 waits for the others to read. All have told already, so this is a matter of round trips.
_SECONDS_OF_READING = 5.0

# What one attempt may take.
_SECONDS_OF_ATTEMPT = 5.0


class Rendezvous:
    """Ranks that have come to one store.

    Args:
        store: The store. All keys begin with ``sdiloco/``.
        rank: This rank.
        world_size: How many ranks are expected.
        place: Address and port of the store, for messages.
        timeout: How long to wait for the others.
    """

    def __init__(self, store: Any, rank: int, world_size: int, place: str, timeout: timedelta) -> None:
        self.rank = rank
        self.world_size = world_size
        self.place = place
        self._store = store
        self._timeout = timeout

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """What every rank tells under a name, in the order of the ranks. All must call it.

        Args:
            name: Of what is told; each name only once.
            value: What this rank tells; it must be expressible as JSON.

        Raises:
            ValueError: If ranks do not come in time. The message names them.
        """
        keys = [f"sdiloco/{name}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps(value))
        self._wait_for_all(name, keys)
        told = [json.loads(told) for told in self._store.multi_get(keys)]
        self._let_others_read(f"sdiloco/{name}/readers")
        return told

    def _let_others_read(self, key: str) -> None:
        """The store often ends with rank 0, which may end because of what it has just read."""
        readers = self._store.add(key, 1)
        deadline = time.monotonic() + _SECONDS_OF_READING
        while self.rank == 0 and readers < self.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            readers = self._store.add(key, 0)

    def _wait_for_all(self, name: str, keys: list[str]) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._store.wait(keys, timedelta(seconds=min(left, _SECONDS_BETWEEN_WORDS)))
                return
            except RuntimeError:
                if self.rank == 0:
                    _log.warning(
                        "Still waiting for %s at %s. A rank that cannot reach this address says so in its own output.",
                        self._missing(keys),
                        self.place,
                    )
        raise ValueError(
            f"{self._missing(keys)} did not come to {self.place} within {self._timeout.total_seconds():g} s ({name})."
            f" {self.world_size} ranks are expected. Start as many, give all of them the same address and port, and see"
            " in their output why they ended."
        )

    def _missing(self, keys: list[str]) -> str:
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return f"Rank{'s' if len(missing) > 1 else ''} {shown}"


def wait_until_reachable(
    host: str, port: int, rank: int, timeout: timedelta, seconds_unreachable: float = SECONDS_UNREACHABLE
) -> None:
    """Waits until somebody listens at an address.

    Args:
        host: Name or address of the machine of rank 0.
        port: The port on which rank 0 keeps the store.
        rank: This rank, for messages.
        timeout: How long to wait for a machine that is there but on which nobody listens yet.
        seconds_unreachable: How long to try an address that does not answer at all.

    Raises:
        ValueError: If the address is unknown, does not answer, or nobody listens there in time.
    """
    who = f"Rank {rank} on {socket.gethostname()} cannot reach rank 0 at {host}:{port}"
    started = time.monotonic()
    unanswered_since, told = started, started
    while True:
        error = try_to_connect(host, port)
        now = time.monotonic()
        if error is None:
            return
        if isinstance(error, ConnectionRefusedError):
            unanswered_since = now
            if now - started > timeout.total_seconds():
                raise ValueError(
                    f"{who}: nobody listened there within {timeout.total_seconds():g} s. Start rank 0 on {host}, and"
                    " give all ranks its address and port (MASTER_ADDR, MASTER_PORT)."
                ) from error
        elif now - unanswered_since > seconds_unreachable:
            raise ValueError(
                f"{who}: {reason(error)}. The way from this machine to {host} is closed, or the address is wrong. Set"
                " MASTER_ADDR to an address of rank 0's machine that all others reach, and open the port for TCP."
            ) from error
        if now - told > _SECONDS_BETWEEN_WORDS:
            told = now
            _log.warning("%s yet: %s. Still trying.", who, reason(error))
        time.sleep(0.2)


def try_to_connect(
    host: str, port: int, seconds: float = _SECONDS_OF_ATTEMPT, talk: Callable[[socket.socket], None] | None = None
) -> OSError | None:
    """Connects to an address and says what went wrong, if anything.

    Args:
        host: Name or address.
        port: The port.
        seconds: What connecting, and each part of talking, may take.
        talk: What to do with the connection; an `OSError` in it is returned as well.
    """
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            if talk is not None:
                talk(connection)
    except OSError as error:
        return error
    return None


def reason(error: OSError) -> str:
    """An error of a connection in words."""
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer"
    if isinstance(error, socket.gaierror):
        return f"the name is unknown ({error.strerror})"
    return (error.strerror or str(error) or type(error).__name__).lower()
