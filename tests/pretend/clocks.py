"""What happened before what: vector clocks of streams, events, and what the host has learned by waiting.

Every operation is a tick of its stream. A stream knows of another one the tick up to which everything there is
finished before its own next operation begins. The host learns by waiting only, and what one thread has learned all
know: how threads tell each other cannot be seen from here.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Clock = dict[int, int]
"""Stream to the tick of its last operation that is known to be finished."""


class Race(RuntimeError):
    """Two operations touch the same memory, and nothing says which comes first."""


class Synchronisation(NamedTuple):
    """A host thread waited for the device.

    Attributes:
        thread: Name of the thread.
        kind: What made it wait.
        waited: Whether there was something that it did not know to be finished.
    """

    thread: str
    kind: str
    waited: bool


lock = threading.RLock()
"""Held by whoever changes anything here, and while an operation is computed."""

known: Clock = {}
"""What the host knows to be finished."""

on_learning: list[Callable[[], None]] = []
"""Called whenever the host has waited."""

_logs: list[list[Synchronisation]] = []
_streams: "list[Stream]" = []
_current = threading.local()


def join(clock: Clock, other: Clock) -> None:
    """Lets a clock know what another one knows."""
    for stream, tick in other.items():
        clock[stream] = max(tick, clock.get(stream, 0))


def covers(clock: Clock, stream: int, tick: int) -> bool:
    """Whether an operation is finished for whom this clock belongs to."""
    return clock.get(stream, 0) >= tick


def learn(clock: Clock, kind: str) -> None:
    """The host waits until everything that a clock knows is finished."""
    with lock:
        waited = any(not covers(known, stream, tick) for stream, tick in clock.items())
        entry = Synchronisation(threading.current_thread().name, kind, waited)
        for log in _logs:
            log.append(entry)
        join(known, clock)
        for call in on_learning:
            call()


@contextmanager
def synchronisations() -> Iterator[list[Synchronisation]]:
    """Notes who waits for the device inside a ``with`` block, of all threads."""
    log: list[Synchronisation] = []
    with lock:
        _logs.append(log)
    try:
        yield log
    finally:
        with lock:
            _logs[:] = [other for other in _logs if other is not log]


class Stream:
    """A stream: operations on it run one after the other, and beside those of other streams."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.clock: Clock = {}
        with lock:
            self.number = len(_streams)
            _streams.append(self)

    def __repr__(self) -> str:
        return f"stream {self.number}" if self.number else "the default stream"

    @property
    def device(self) -> torch.device:
        """The device of the stream."""
        return torch.device("pretend", 0)

    def tick(self) -> int:
        """Enqueues an operation: it begins after all that the host knows to be finished."""
        join(self.clock, known)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def synchronize(self) -> None:
        """The host waits for all that was enqueued."""
        learn(self.clock, "stream.synchronize")

    def query(self) -> bool:
        """Whether all that was enqueued is known to be finished; asking a second time finds that it is."""
        return self.record_event().query()

    def wait_event(self, event: "Event") -> None:
        """What is enqueued from now on begins after an event."""
        with lock:
            join(self.clock, event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        """What is enqueued from now on begins after all that another stream has been given so far."""
        with lock:
            join(self.clock, stream.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Marks this point of the stream."""
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A point of a stream. One that was never recorded is over."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.clock: Clock = {}
        self._asked = False

    def record(self, stream: Stream | None = None) -> None:
        """Marks this point of a stream."""
        with lock:
            self.clock, self._asked = dict((stream or current_stream()).clock), False

    def wait(self, stream: Stream | None = None) -> None:
        """Lets a stream wait for this event."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for the event."""
        learn(self.clock, "event.synchronize")

    def query(self) -> bool:
        """Whether the event is over. It is not when first asked, unless the host knows better, and then it is."""
        with lock:
            asked, self._asked = self._asked, True
            if asked:
                join(known, self.clock)
                for call in on_learning:
                    call()
            return all(covers(known, stream, tick) for stream, tick in self.clock.items())


default = Stream()


def current_stream(device: Any = None) -> Stream:
    """The stream to which the operations of this thread go."""
    return getattr(_current, "stream", default)


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Lets the operations of this thread go to a stream inside a ``with`` block."""
    before = current_stream()
    _current.stream = stream or before
    try:
        yield
    finally:
        _current.stream = before


def synchronize(device: Any = None) -> None:
    """The host waits for all streams."""
    everything: Clock = {}
    with lock:
        for each in _streams:
            join(everything, each.clock)
        learn(everything, "synchronize")
