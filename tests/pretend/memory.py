"""Who touches which bytes, and when what was copied is really there."""

import threading
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.pretend import clocks
from tests.pretend.clocks import Race, Stream, covers, current_stream, known, learn, lock


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
    """A stretch of memory of the device, or of pinned memory of the host.

    Where an accelerator frees memory, it gives it to what the same stream allocates next. So what other streams do with
    it must be over by then, unless `record_stream` told of it.

    Attributes:
        owner: The stream that allocated it; None for pinned memory.
        nbytes: Its size on the device.
    """

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
            overlap = access.first < other.last and other.first < access.last
            if overlap and (access.writes or other.writes) and not other.is_before(access.stream):
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
    """What is held on the device, in bytes.

    Attributes:
        held: Now.
        peak: At most, since the last reset.
    """

    def __init__(self) -> None:
        self.held = self.peak = 0

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


class _Pinned(NamedTuple):
    """Pinned memory, kept for ever so that no other gets its address."""

    storage: Any
    memory: Memory


_pinned: dict[int, _Pinned] = {}


def pin(tensor: Tensor) -> Tensor:
    """Makes the memory of a new tensor on the host pinned."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        _pinned[storage.data_ptr()] = _Pinned(storage, Memory(None))
    return tensor


def pinned(tensor: Tensor) -> Memory | None:
    """The pinned memory in which a tensor lies."""
    found = _pinned.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None
    return found and found.memory


class _Copy(NamedTuple):
    """A copy between pinned memory and the device that the host does not know to be over.

    Attributes:
        access: What it does to the pinned memory.
        memory: The pinned memory.
        host: The tensor in it.
        true: Its bytes when the copy is over.
    """

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


def _settle() -> None:
    """Ends the copies of which the host knows that they are over."""
    _end([copy for copy in _under_way if covers(known, copy.access.stream.number, copy.access.tick)])


def _end(over: list[_Copy]) -> None:
    ids = set(map(id, over))
    _under_way[:] = [copy for copy in _under_way if id(copy) not in ids]
    for copy in over:
        copy.end()


clocks.on_learning.append(_settle)


def _touch_pinned(memory: Memory, access: Access) -> None:
    """An access of the device to pinned memory, for which what came before on the device is over."""
    memory.touch(access)
    _end(
        [
            copy
            for copy in _under_way
            if copy.memory is memory and copy.access.first < access.last and access.first < copy.access.last
        ]
    )


def to_host(operation: Operation, true: Tensor, into: Tensor, non_blocking: bool) -> None:
    """Copies what the device holds to the host: at once, or with what is not there yet shown as 0xFF bytes.

    Args:
        operation: The copy.
        true: What the device holds, really on the host.
        into: A tensor on the host.
        non_blocking: Whether not to wait, if the memory is pinned.
    """
    memory = pinned(into)
    access = operation.access(into, writes=True)
    if memory is not None:
        _touch_pinned(memory, access)
    into.copy_(true)
    if memory is None or not non_blocking or not into.is_contiguous() or not into.numel():
        learn(operation.stream.clock, "copy to the host")
        return
    copy = _Copy(access, memory, into.detach(), _bytes(into).clone())
    _bytes(into).fill_(0xFF)
    _under_way.append(copy)


def to_device(operation: Operation, source: Tensor, into: Tensor, non_blocking: bool) -> None:
    """Copies what the host holds to the device: from pinned memory perhaps without waiting.

    Args:
        operation: The copy.
        source: A tensor on the host.
        into: What the device holds, really on the host.
        non_blocking: Whether not to wait, if the memory is pinned.
    """
    memory = pinned(source)
    access = operation.access(source, writes=False)
    if memory is not None:
        _touch_pinned(memory, access)
    into.copy_(source)
    as_it_is = source.is_contiguous() and source.dtype == into.dtype and source.shape == into.shape
    if memory is None or not non_blocking or not as_it_is or not source.numel():
        learn(operation.stream.clock, "copy to the device")
    else:
        _under_way.append(_Copy(access, memory, source.detach(), _bytes(source).clone()))
