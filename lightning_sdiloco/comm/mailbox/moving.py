"""Moves blobs between a site and its hub over several connections, and begins again where a connection broke."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning_sdiloco.comm.mailbox.base import Altered, Bytes, Failure, HubUnreachable, checked_size
from lightning_sdiloco.comm.mailbox.chunks import Arrivals, Dispenser, Runs, bounds, checked_runs, count
from lightning_sdiloco.comm.mailbox.frames import Header, pack, pack_chunk, unpack, unpack_chunk
from lightning_sdiloco.comm.mailbox.link import Link
from lightning_sdiloco.errors import Malformed

LEAST_RATE = 64 << 10
"""Bytes per second below which a blob is given up in the end: half of 1 Mbit/s."""

PATIENCE = 30.0
"""Seconds without any progress after which a connection is given up."""

_PAUSE = 0.2  # seconds before another attempt, twice as long each time that nothing moved
_STUCK = 4


class _Attempts:
    """How often something is tried again: until the deadline, and only while errors are of the network."""

    def __init__(self, link: Link, deadline: float) -> None:
        self._link, self._deadline = link, deadline
        self._ever, self._stuck = False, 0

    def left(self) -> float:
        """Returns the seconds that are left."""
        self._link.require()
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise HubUnreachable(f"hub {self._link.hub}: the blob did not get through in time.")
        return left

    def after(self, errors: list[Failure], moved: bool) -> None:
        """Raises what ends the attempts, and waits a little otherwise."""
        for error in errors:
            if not isinstance(error, HubUnreachable):
                raise error
        # Where a connection was there and broke, the next is there in some seconds, or the hub is gone.
        self._ever, self._stuck = self._ever or moved, 0 if moved else self._stuck + 1
        if errors and (not self._ever or self._stuck > _STUCK):
            raise errors[0]
        if errors or self._stuck:
            self._link.closed.wait(_PAUSE * 2**self._stuck)


def upload(link: Link, header: Header, blob: Bytes, timeout: float | None) -> Header:
    """Sends a blob."""
    size = len(blob)
    attempts = _Attempts(link, time.monotonic() + (timeout or PATIENCE + size / LEAST_RATE))
    runs: Runs = [[0, count(size)]] if size else []
    while True:
        outgoing = _Outgoing(header, memoryview(blob), runs)
        channels = link.data[: max(1, min(len(link.data), sum(end - start for start, end in runs)))]
        with link.cancelled_at_the_end() as take:
            calls = [
                take(link.method("stream_unary", "put", channel).future(outgoing.messages(), timeout=attempts.left()))
                for channel in channels
            ]
            tasks: list[Callable[[], None]] = [partial(outgoing.wait_for, call) for call in calls]
            errors = link.errors_of(tasks, lambda: outgoing.progress, PATIENCE)  # noqa: B023
        if outgoing.answer is not None:
            return outgoing.answer
        attempts.after(errors, moved=outgoing.progress > len(channels))
        # Without chunks, the call asks what has arrived; with those of others on their way, the answer was of no use.
        runs = [] if runs else outgoing.missing


class _Outgoing:
    """A blob that is being sent, and what the hub said."""

    def __init__(self, header: Header, blob: memoryview, runs: Runs) -> None:
        self._first, self._blob = pack(header), blob
        self._dispenser = Dispenser(runs)
        self.progress = 0
        self.answer: Header | None = None
        self.missing: Runs = runs

    def messages(self) -> Iterator[bytes]:
        """Yields the messages of one connection."""
        yield self._first
        for number in self._dispenser:
            self.progress += 1
            start, end = bounds(number, len(self._blob))
            yield pack_chunk(number, self._blob[start:end])

    def wait_for(self, call: Any) -> None:
        """Takes the answer on one connection."""
        answer, _ = unpack(call.result())
        self.progress += 1
        if answer.get("stored") is True:
            self.answer = dict(answer.get("answer", {}))
        else:
            self.missing = checked_runs(answer.get("missing"), len(self._blob))


def download(link: Link, header: Header, key: str, max_blob: int, timeout: float | None) -> bytearray:
    """Fetches a blob and verifies it."""
    attempts = _Attempts(link, time.monotonic() + (timeout or PATIENCE + max_blob / LEAST_RATE))
    incoming = _Incoming(max_blob)
    while True:
        asked = header | {"key": key, "transfer": secrets.token_hex(8)} | incoming.still_missing()
        before = incoming.progress
        with link.cancelled_at_the_end() as take:

            def call(channel: Any, first: bool, asked: Header = asked, take: Callable[[Any], Any] = take) -> Any:
                method = link.method("unary_stream", "get", channel)
                return take(method(pack(asked | {"first": first}), timeout=attempts.left()))

            try:
                # The first answer says how large the blob is, and with that whether more connections are of use.
                leading = call(link.data[0], True)
                incoming.begin(leading)
                others = [call(channel, False) for channel in link.data[1 : incoming.chunks_left]]
                tasks: list[Callable[[], None]] = [partial(incoming.take_all, leading)]
                tasks += [partial(incoming.begin_and_take_all, other) for other in others]
                errors = link.errors_of(tasks, lambda: incoming.progress, PATIENCE)
            except Exception as error:
                errors = [link.error(error)]
        if incoming.complete:
            return incoming.verified(key)
        attempts.after(errors, moved=incoming.progress > before)


class _Incoming:
    """A blob that is being fetched."""

    def __init__(self, max_blob: int) -> None:
        self._max_blob = max_blob
        self._lock = threading.Lock()
        self._blob = bytearray()
        self._arrivals: Arrivals | None = None
        self.progress = 0

    @property
    def complete(self) -> bool:
        return self._arrivals is not None and self._arrivals.complete

    @property
    def chunks_left(self) -> int:
        return sum(end - start for start, end in self._arrivals.missing()) if self._arrivals else 0

    def still_missing(self) -> Header:
        """Returns the field of a call that asks for a part only."""
        return {} if self._arrivals is None or self.complete else {"chunks": self._arrivals.missing()}

    def begin(self, call: Any) -> None:
        """Takes the first message on a connection: the size."""
        message = next(iter(call), None)
        size = checked_size(unpack(message or b"")[0].get("size"), self._max_blob, "blob")
        with self._lock:
            if self._arrivals is None:
                self._blob = bytearray(size)
                view = memoryview(self._blob)
                self._arrivals = Arrivals(size, self._write, lambda start, end: view[start:end])
            elif self._arrivals.size != size:
                raise Malformed("the hub gives a blob two sizes.")

    def take_all(self, call: Any) -> None:
        """Takes the chunks on a connection."""
        assert self._arrivals is not None, "begin comes first"
        for message in call:
            self._arrivals.take(*unpack_chunk(message))
            self.progress += 1

    def begin_and_take_all(self, call: Any) -> None:
        """Takes all that comes on a connection."""
        self.begin(call)
        self.take_all(call)

    def verified(self, key: str) -> bytearray:
        """Returns the blob, if it is the one that was asked for."""
        assert self._arrivals is not None, "complete comes first"
        if self._arrivals.digest() != key:
            raise Altered(f"the hub sent other bytes than those whose digest is {key}.")
        return self._blob

    def _write(self, offset: int, data: Bytes) -> None:
        self._blob[offset : offset + len(data)] = data
