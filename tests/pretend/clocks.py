"""What happened before what, who touches which bytes, and when what was copied is really there.

Every operation is a tick of its stream. A stream knows of another one the tick up to which everything there is
finished before its own next operation begins. The host learns by waiting only, and what one thread has learned all
know: how threads tell each other cannot be seen from here.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

Clock = dict[int, int]
"""Stream to the tick of its last operation that is known to be finished."""


class Race(RuntimeError):
    """Two operations touch the same memory, and nothing says which comes first."""


class Synchronisation(NamedTuple):
    """A host thread waited for the device."""

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


# Memory


class Access(NamedTuple):
    """An operation that touches the bytes from `first` to before `last` of some memory."""

    op: str
    stream: Stream
    thread: str
    tick: int
    writes: bool
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.op} on {self.stream} (thread {self.thread})"

    def is_before(self, stream: Stream) -> bool:
        """Whether it is finished when the last operation of a stream begins."""
        return covers(stream.clock, self.stream.number, self.tick)

    def overlaps(self, other: "Access") -> bool:
        return self.first < other.last and other.first < self.last

    def covers(self, other: "Access") -> bool:
        """Whether it touches all the bytes of another one."""
        return self.first <= other.first and other.last <= self.last


class Operation(NamedTuple):
    """An operation that has just been enqueued."""

    name: str
    stream: Stream
    tick: int

    @staticmethod
    def begun(name: str) -> "Operation":
        """Enqueues one on the stream of this thread."""
        stream = current_stream()
        return Operation(name, stream, stream.tick())

    def access(self, tensor: Tensor, writes: bool) -> Access:
        """What the operation does to the bytes of a tensor, which lies on the host really."""
        first = int(tensor.storage_offset()) * tensor.element_size()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        last = first + (reach * tensor.element_size() if tensor.numel() else 0)
        return Access(self.name, self.stream, threading.current_thread().name, self.tick, writes, first, last)


class Memory:
    """A stretch of memory of the device, or of pinned memory of the host."""

    def __init__(self, owner: Stream | None, nbytes: int = 0) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self._accesses: list[Access] = []
        self._recorded: set[int] = set()

    def touch(self, access: Access) -> None:
        """Notes an access, and raises a `Race` where another one may be under way."""
        if access.first == access.last:
            return
        for other in self._accesses:
            if access.overlaps(other) and (access.writes or other.writes) and not other.is_before(access.stream):
                raise Race(
                    f"{access} {'overwrites' if access.writes else 'reads'} what {other}"
                    f" {'writes' if other.writes else 'reads'}, and nothing says that this is over by then"
                )
        self._accesses = [other for other in self._accesses if not _replaces(access, other)] + [access]

    def record_stream(self, stream: Stream) -> None:
        """The memory is not given away before what a stream has been given by the time of freeing is over."""
        self._recorded.add(stream.number)

    def __del__(self) -> None:
        with suppress(Exception), lock:  # the interpreter may be ending
            statistics.held -= self.nbytes
            if self.owner is not None:
                others = [a for a in self._accesses if a.stream.number not in (self.owner.number, *self._recorded)]
                _freed.setdefault(self.owner.number, []).extend(others)


_freed: dict[int, list[Access]] = {}


class Statistics:
    """Bytes that are held on the device now, and at most since the last reset."""

    held = peak = 0

    def add(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)


statistics = Statistics()


def _replaces(access: Access, other: Access) -> bool:
    """Whether who comes after one access comes after the other one too."""
    same_stream = access.stream is other.stream and access.writes >= other.writes
    return access.covers(other) and (access.writes or same_stream)


def allocated(operation: Operation, tensor: Tensor) -> Memory:
    """New memory of the device, for a tensor."""
    for access in _freed.pop(operation.stream.number, []):
        if not access.is_before(operation.stream):
            raise Race(
                f"{operation.name} on {operation.stream} may get memory that {access} still"
                f" {'writes' if access.writes else 'reads'}: it was freed, and no record_stream told of that stream"
            )
    nbytes = tensor.untyped_storage().nbytes()
    memory = Memory(operation.stream, nbytes)
    statistics.add(nbytes)
    memory.touch(operation.access(tensor, writes=True))
    return memory


# Pinned memory of the host, and copies that go on while the host does.


_pinned: dict[int, tuple[Any, Memory]] = {}  # with the storage, kept for ever so that no other gets its address


def pin(tensor: Tensor) -> Tensor:
    """Makes the memory of a new tensor on the host pinned."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        _pinned[storage.data_ptr()] = storage, Memory(None)
    return tensor


def pinned(tensor: Tensor) -> Memory | None:
    """The pinned memory in which a tensor lies."""
    found = _pinned.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None
    return found and found[1]


class _Copy(NamedTuple):
    """A copy between pinned memory and the device that the host does not know to be over."""

    access: Access
    memory: Memory
    host: Tensor
    true: Tensor

    def end(self) -> None:
        """The host may know: what was copied is there, and what the host must have left alone is as it was."""
        here = _bytes(self.host)
        if self.access.writes:
            if not bool((here == 0xFF).all()):
                raise Race(f"the host wrote to pinned memory into which {self.access} copied")
            here.copy_(self.true)
        elif not torch.equal(here, self.true):
            raise Race(f"the host changed pinned memory from which {self.access} copied, before that was over")


_under_way: list[_Copy] = []


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _end(over: list[_Copy]) -> None:
    ids = set(map(id, over))
    _under_way[:] = [copy for copy in _under_way if id(copy) not in ids]
    for copy in over:
        copy.end()


# Copies of which the host knows that they are over end when it has waited.
on_learning.append(lambda: _end([c for c in _under_way if covers(known, c.access.stream.number, c.access.tick)]))


def copy_between(operation: Operation, host: Tensor, held: Tensor, to_host: bool, non_blocking: bool) -> None:
    """Copies between a tensor on the host and what the device holds, which is really there too.

    From or to pinned memory the host may go on; what is not there yet it sees as 0xFF bytes.
    """
    memory, access = pinned(host), operation.access(host, writes=to_host)
    if memory is not None:
        memory.touch(access)
        # For an access of the device, what came before on the device is over.
        _end(
            [
                c
                for c in _under_way
                if c.memory is memory and c.access.first < access.last and access.first < c.access.last
            ]
        )
    into, source = (host, held) if to_host else (held, host)
    into.copy_(source)
    as_it_is = to_host or (source.dtype == into.dtype and source.shape == into.shape)
    if memory is None or not non_blocking or not host.is_contiguous() or not host.numel() or not as_it_is:
        learn(operation.stream.clock, f"copy to the {'host' if to_host else 'device'}")
        return
    _under_way.append(_Copy(access, memory, host.detach(), _bytes(host).clone()))
    if to_host:
        _bytes(host).fill_(0xFF)
