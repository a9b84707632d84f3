"""A pretended accelerator: a device type for torch that is computed on the CPU and finds races
between streams.

Operations are computed at once, so that values are right. The order of operations is that of a
device where every stream may be arbitrarily slow. An operation is a tick of its stream. A stream
knows, of each other stream, the tick up to which everything is finished before its next operation
begins. The host learns by waiting only, and all threads know as soon as one does: how threads tell
each other cannot be seen from here. Two operations on the same bytes in an unknown order raise a
`Race`, and the bytes of a copy to pinned memory are there once the host knows that it is over.

torch cannot forget a device type, and much in it changes where there is one. So tests use this in a
process of their own: `alone` makes one.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial, wraps
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration

from tests.ranks import run_processes

aten = torch.ops.aten

# Streams and events

Clock = Counter[int]
"""Stream to the tick of its last operation that is known to be finished; ``|=`` adds the knowledge
of another clock."""

lock = threading.RLock()
"""Held by all who change anything in this module, and while an operation is computed."""

known: Clock = Counter()
"""The operations that the host knows to be finished."""

_logs: list[list["Synchronisation"]] = []
_streams: list["Stream"] = []
_current = threading.local()


class Race(RuntimeError):
    """Two operations touch the same memory, and nothing says which comes first."""


class Synchronisation(NamedTuple):
    """A host thread waited for the device."""

    thread: str
    kind: str
    waited: bool


def wait(clock: Clock, kind: str) -> None:
    """The host waits until everything that a clock knows is finished."""
    with lock:
        entry = Synchronisation(threading.current_thread().name, kind, not clock <= known)
        for log in _logs:
            log.append(entry)
        _learn(clock)


def _learn(clock: Clock) -> None:
    global known
    known |= clock
    _end(lambda copy: known[copy.access.operation.stream.number] >= copy.access.operation.tick)


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
            _logs[:] = [active for active in _logs if active is not log]


class Stream:
    """Operations on it run one after the other, and beside those of other streams."""

    def __init__(self, device: Any = None) -> None:
        self.clock: Clock = Counter()
        with lock:
            self.number = len(_streams)
            _streams.append(self)

    def __repr__(self) -> str:
        return f"stream {self.number}" if self.number else "the default stream"

    def synchronize(self) -> None:
        wait(self.clock, "stream.synchronize")

    def wait_event(self, event: "Event | Stream") -> None:
        with lock:
            self.clock |= event.clock

    wait_stream = wait_event

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event


class Event:
    """A point of a stream. One that was never recorded is over."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = Counter()
        self._was_queried = False

    def record(self, stream: Stream | None = None) -> None:
        with lock:
            self.clock = (stream or current_stream()).clock.copy()
            self._was_queried = False

    def synchronize(self) -> None:
        wait(self.clock, "event.synchronize")

    def query(self) -> bool:
        """Tells whether the event is over. The first query says no, unless the host knows better;
        the next one says yes.
        """
        with lock:
            if self._was_queried:
                _learn(self.clock)
            self._was_queried = True
            return self.clock <= known


default = Stream()

# Memory


class Operation(NamedTuple):
    """Enqueued work: it begins after all operations that the host knows to be finished."""

    name: str
    stream: Stream
    tick: int
    thread: str

    @staticmethod
    def begun(name: str) -> "Operation":
        """On the stream of this thread."""
        stream = current_stream()
        stream.clock |= known
        stream.clock[stream.number] += 1
        return Operation(name, stream, stream.clock[stream.number], threading.current_thread().name)

    def __str__(self) -> str:
        return f"{self.name} on {self.stream} (thread {self.thread})"

    def is_before(self, operation: "Operation") -> bool:
        return operation.stream.clock[self.stream.number] >= self.tick


class Access(NamedTuple):
    """An operation that touches the bytes from `first` to before `last` of some memory."""

    operation: Operation
    writes: bool
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.operation} {'writes' if self.writes else 'reads'}"

    def overlaps(self, access: "Access") -> bool:
        return self.first < access.last and access.first < self.last

    def replaces(self, earlier: "Access") -> bool:
        """Tells whether an operation that comes after this access comes after an earlier one
        too.
        """
        covers = self.first <= earlier.first and earlier.last <= self.last
        are_reads_in_order = (
            self.operation.stream is earlier.operation.stream and not earlier.writes
        )
        return covers and (self.writes or are_reads_in_order)


_freed: dict[Stream, list[Access]] = {}  # may still use memory that a stream gets anew


class Memory:
    """A stretch of memory of the device, or of pinned memory of the host."""

    held = peak = 0  # bytes on the device now, and at most since the last reset

    def __init__(self, owner: Stream | None, nbytes: int = 0) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self._accesses: list[Access] = []
        # Their operations so far, when the memory is freed, are over before it is reused.
        self.recorded: set[Stream] = set()
        Memory.held += nbytes
        Memory.peak = max(Memory.peak, Memory.held)

    def touch(self, operation: Operation, tensor: Tensor, writes: bool) -> Access:
        """Notes an access to a tensor, which really lies on the host; raises a `Race` where a
        conflicting access may be under way.
        """
        first, last = _byte_range(tensor)
        access = Access(operation, writes, first, last)
        if first == last:
            return access
        for earlier in self._accesses:
            conflicts = access.overlaps(earlier) and (writes or earlier.writes)
            if conflicts and not earlier.operation.is_before(operation):
                does = "overwrites" if writes else "reads"
                raise Race(
                    f"{operation} {does} what {earlier}, and nothing says that this is over by then"
                )
        self._accesses = [earlier for earlier in self._accesses if not access.replaces(earlier)]
        self._accesses.append(access)
        return access

    def __del__(self) -> None:
        with suppress(Exception), lock:  # the interpreter may be ending
            Memory.held -= self.nbytes
            if self.owner is not None:
                known_streams = (self.owner, *self.recorded)
                unknown = [a for a in self._accesses if a.operation.stream not in known_streams]
                _freed.setdefault(self.owner, []).extend(unknown)


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches: the first one, and the one after the last."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return first, first
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in steps)
    return first, first + reach * tensor.element_size()


def allocated(operation: Operation, tensor: Tensor) -> Memory:
    """New memory of the device, for a tensor."""
    for access in _freed.pop(operation.stream, []):
        if not access.operation.is_before(operation):
            raise Race(
                f"{operation} may get freed memory that {access}, perhaps still: no record_stream told of"
                " it"
            )
    memory = Memory(operation.stream, tensor.untyped_storage().nbytes())
    memory.touch(operation, tensor, writes=True)
    return memory


# Pinned memory of the host, and copies that go on while the host does

# With the storages, which are kept for ever so that no other one gets the address.
_pinned: dict[int, tuple[Any, Memory]] = {}


def pin(tensor: Tensor) -> Tensor:
    """Makes the memory of a new tensor on the host pinned."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        _pinned[storage.data_ptr()] = storage, Memory(None)
    return tensor


def pinned(tensor: Tensor) -> Memory | None:
    """The pinned memory in which a tensor lies."""
    if tensor.device.type != "cpu":
        return None
    _, memory = _pinned.get(tensor.untyped_storage().data_ptr(), (None, None))
    return memory


class _Copy(NamedTuple):
    """A copy between pinned memory and the device that the host does not know to be over."""

    access: Access
    memory: Memory
    host_bytes: Tensor
    true_bytes: Tensor


_under_way: list[_Copy] = []


def _end(is_over: Callable[[_Copy], bool]) -> None:
    """The host may know that copies are over: the copied bytes are there, and bytes that the host
    must have left alone are unchanged.
    """
    over = [copy for copy in _under_way if is_over(copy)]
    _under_way[:] = [copy for copy in _under_way if not is_over(copy)]
    for access, _, host_bytes, true_bytes in over:
        if access.writes:
            if not bool((host_bytes == 0xFF).all()):
                raise Race(f"the host wrote to pinned memory into which {access.operation} copied")
            host_bytes.copy_(true_bytes)
        elif not torch.equal(host_bytes, true_bytes):
            raise Race(
                f"the host changed pinned memory from which {access.operation} copied, before that was"
                " over"
            )


def copy_across(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``into.copy_(source)`` between host and device, which is really on the host too.

    From or to pinned memory the host need not wait; it sees bytes that have not arrived as 0xFF.
    """
    with lock, torch.no_grad():
        if isinstance(source, PretendTensor):
            _to_host(into, source, non_blocking)
        else:
            assert isinstance(into, PretendTensor)
            _to_device(into, source, non_blocking)
    return into


def _to_host(into: Tensor, source: "PretendTensor", non_blocking: bool) -> None:
    operation = Operation.begun("copy to the host")
    source.memory.touch(operation, source.held, writes=False)
    access = _touch_pinned(operation, into, writes=True)
    into.copy_(source.held)
    if _goes_on(operation, access, into, non_blocking):
        into.detach().view(-1).view(torch.uint8).fill_(0xFF)


def _to_device(into: "PretendTensor", source: Tensor, non_blocking: bool) -> None:
    operation = Operation.begun("copy to the device")
    into.memory.touch(operation, into.held, writes=True)
    access = _touch_pinned(operation, source, writes=False)
    into.held.copy_(source)
    is_converted = source.dtype != into.dtype or source.shape != into.shape
    _goes_on(operation, access, source, non_blocking and not is_converted)


def _touch_pinned(operation: Operation, host: Tensor, writes: bool) -> Access | None:
    memory = pinned(host)
    if memory is None:
        return None
    access = memory.touch(operation, host, writes)
    # For an access of the device, everything before it on the device is over.
    _end(lambda copy: copy.memory is memory and copy.access.overlaps(access))
    return access


def _goes_on(operation: Operation, access: Access | None, host: Tensor, non_blocking: bool) -> bool:
    """Tells whether the host goes on while a copy is under way, which is then noted; else waits."""
    memory = pinned(host)
    can_go_on = non_blocking and host.is_contiguous() and host.numel() > 0
    if memory is None or access is None or not can_go_on:
        wait(operation.stream.clock, operation.name)
        return False
    host_bytes = host.detach().view(-1).view(torch.uint8)
    _under_way.append(_Copy(access, memory, host_bytes, host_bytes.clone()))
    return True


# Tensors: every operation is computed on the host, and its accesses are noted


class PretendTensor(Tensor):
    """A tensor whose device is the pretended one."""

    held: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, held: Tensor, memory: Memory) -> "PretendTensor":
        pretended: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("pretend", 0),
        )
        pretended.held = held
        pretended.memory = memory
        return pretended

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with lock:
            return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"pretended {self.held!r}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.memory.recorded.add(stream)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter  # type: ignore[override]
    def data(self, values: "PretendTensor") -> None:
        torch._C.TensorBase.data.__set__(self, values)  # type: ignore[attr-defined]
        self.held = values.held
        self.memory = values.memory


# They make a tensor like another one, and do not read that.
_LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_READ_NOTHING = {f"{name}_like" for name in _LIKE} | {f"new_{name}" for name in _LIKE}
_READ_NOTHING |= {"new_empty_strided"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Their result is on the host, or has a shape that the host must know.
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Kind(NamedTuple):
    """An operation, by its schema.

    Attributes:
        arguments: The names of its arguments.
        written: Those that it writes.
        accesses: True if it reads or writes memory.
        waits: True if the host waits for it.
        indexes: True if its second argument are indices.
    """

    arguments: list[str]
    written: set[str]
    accesses: bool
    waits: bool
    indexes: bool


@cache
def _kind(func: Any) -> _Kind:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    written = set[str]()
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.add(argument.name)
    is_view = not written and any(returned.alias_info for returned in schema.returns)
    indexes = name in _INDEXING
    return _Kind(
        [argument.name for argument in schema.arguments],
        written,
        accesses=not is_view and name not in _READ_NOTHING,
        waits=bool(_WAITING & {*func.tags}) and not indexes,
        indexes=indexes,
    )


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if func is aten.copy_.default and not all(map(_is_pretended, args[:2])):
        return copy_across(*args, **kwargs)
    name = func._schema.name
    kind = _kind(func)
    reads, writes = _tensor_arguments(name, kind, args, kwargs)
    operation = Operation.begun(name)
    if kind.accesses:
        _touch(operation, reads, writes)
    layouts = [(tensor.held.shape, tensor.held.stride()) for tensor in writes]
    host_kwargs = {key: _mapped(_held, value) for key, value in _on_host(kwargs).items()}
    output = func(*_mapped(_held, args), **host_kwargs)
    if layouts != [(tensor.held.shape, tensor.held.stride()) for tensor in writes]:
        raise NotImplementedError(f"{name} changed the shape of its arguments")
    if kind.waits or (kind.indexes and any(map(_is_read_by_the_host, _tensors(args[1])))):
        wait(operation.stream.clock, name)
    if "device" in kwargs and torch.device(kwargs["device"]).type == "cpu":
        return pin(output) if kwargs.get("pin_memory") else output
    return _mapped(partial(_returned, operation, [*writes, *reads]), output)


def _tensor_arguments(
    name: str, kind: _Kind, args: Any, kwargs: dict[str, Any]
) -> tuple[list["PretendTensor"], list["PretendTensor"]]:
    """The tensors that an operation reads, and those that it writes. On the host only scalars and
    indices may lie.
    """
    reads: list[PretendTensor] = []
    writes: list[PretendTensor] = []
    is_first = True
    for argument, value in chain(zip(kind.arguments, args, strict=False), kwargs.items()):
        is_written = argument in kind.written
        for tensor in _tensors(value):
            may_be_on_host = tensor.dim() == 0 and not is_written
            may_be_on_host |= kind.indexes and not is_first
            is_first = False
            if isinstance(tensor, PretendTensor):
                (writes if is_written else reads).append(tensor)
            elif tensor.device.type == "cpu" and not may_be_on_host:
                raise RuntimeError(
                    f"{name} expected all tensors to be on the same device, and found pretend:0"
                    " and cpu"
                )
    return reads, writes


def _touch(
    operation: Operation, reads: list["PretendTensor"], writes: list["PretendTensor"]
) -> None:
    """Reads first. A tensor written in place may be read too: a write waits for all accesses before
    it anyway.
    """
    for tensor in reads:
        tensor.memory.touch(operation, tensor.held, writes=False)
    for tensor in writes:
        tensor.memory.touch(operation, tensor.held, writes=True)


def _is_pretended(tensor: Any) -> bool:
    return isinstance(tensor, PretendTensor)


def _is_read_by_the_host(index: Tensor) -> bool:
    """Masks must be read, and so must indices on the host."""
    return index.dtype in (torch.bool, torch.uint8) or index.device.type == "cpu"


def _returned(
    operation: Operation, arguments: list["PretendTensor"], held: Tensor
) -> "PretendTensor":
    """One of the arguments, a view of one, or a new tensor."""
    storage = held.untyped_storage()._cdata
    for tensor in arguments:
        if tensor.held is held:
            return tensor
    for tensor in arguments:
        if tensor.held.untyped_storage()._cdata == storage:
            return PretendTensor(held, tensor.memory)
    return PretendTensor(held, allocated(operation, held))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_tensors, value))


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """As torch's own trees do it, in a tenth of the time."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(function, part) for part in value)
    return value


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, PretendTensor) else tensor


def _on_host(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    host_kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if "device" in kwargs:
        host_kwargs["device"] = torch.device("cpu")
    return host_kwargs


def _to_copy(source: Tensor, *, device: Any = None, non_blocking: bool = False, **like: Any) -> Any:
    memory_format = like.get("memory_format") or torch.preserve_format
    held = torch.empty_like(_held(source), dtype=like.get("dtype"), memory_format=memory_format)
    target = source.device if device is None else torch.device(device)
    if target.type == "cpu":
        # As an accelerator does it, which surprises many: without waiting the copy lies in pinned
        # memory.
        return copy_across(pin(held) if non_blocking else held, source, non_blocking)
    return _new(held, "aten::_to_copy").copy_(source, non_blocking)


def _new(held: Tensor, name: str) -> PretendTensor:
    with lock:
        return PretendTensor(held, allocated(Operation.begun(name), held))


def _kernel(make: Callable[..., Tensor], fills: bool = False) -> Callable[..., PretendTensor]:
    """Makes tensors on the device. New memory holds values that every reader will notice."""

    def making(*shape: Any, dtype: Any = None, **_: Any) -> PretendTensor:
        held = make(*shape, dtype=dtype)
        if fills:
            held.untyped_storage().fill_(0xA5)  # type: ignore[attr-defined]
        return _new(held, f"aten::{make.__name__}")

    return making


# The module of a device, as torch and the engine use it


def current_stream(device: Any = None) -> Stream:
    return getattr(_current, "stream", default)


def default_stream(device: Any = None) -> Stream:
    return default


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    before = current_stream()
    _current.stream = stream or before
    try:
        yield
    finally:
        _current.stream = before


def synchronize(device: Any = None) -> None:
    everything: Clock = Counter()
    with lock:
        for any_stream in _streams:
            everything |= any_stream.clock
        wait(everything, "synchronize")


device = nullcontext
is_available = is_initialized = lambda: True
device_count = lambda: 1  # noqa: E731
current_device = lambda: 0  # noqa: E731
# Random numbers come from the generator of the CPU.
set_device = manual_seed_all = lambda argument: None
_is_in_bad_fork = lambda: False  # noqa: E731
memory_allocated = lambda device=None: Memory.held  # noqa: E731
max_memory_allocated = lambda device=None: Memory.peak  # noqa: E731


def reset_peak_memory_stats(device: Any = None) -> None:
    Memory.peak = Memory.held


IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")

_library = torch.library.Library("aten", "IMPL")


@cache
def install() -> None:
    """Makes the device known to torch in this process, for good."""
    backend_registration._setup_privateuseone_for_python_backend(
        rename="pretend", backend_module=sys.modules[__name__]
    )
    kernels: dict[str, Any] = {"empty.memory_format": _kernel(torch.empty, fills=True)}
    kernels |= {"empty_strided": _kernel(torch.empty_strided, fills=True)}
    kernels |= dict.fromkeys(("arange", "arange.start", "arange.start_step"), _kernel(torch.arange))
    # Some calls leave out __torch_dispatch__, such as torch.tensor.
    kernels["_copy_from"] = lambda source, into, non_blocking=False: copy_across(
        into, source, non_blocking
    )
    for name, kernel in kernels.items():
        _library.impl(name, kernel, "PrivateUse1")
    for name in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided"):
        setattr(torch, name, _pinning(getattr(torch, name)))
    for name in ("new_empty", "new_zeros", "new_full"):
        setattr(Tensor, name, _pinning(getattr(Tensor, name)))
    pins = lambda self, device=None: (  # noqa: E731
        self if self.is_pinned() else torch.empty_like(self, pin_memory=True).copy_(self)
    )
    Tensor.pin_memory = pins  # type: ignore[method-assign]
    Tensor.is_pinned = lambda self, device=None: pinned(self) is not None  # type: ignore[method-assign]


def _pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function, with pinned memory that torch has for accelerators in C++ alone."""

    @wraps(make)
    def making(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if pin_memory and tensor.device.type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return pin(tensor) if pin_memory else tensor

    return making


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in a process of its own, which has the device. Skips it where torch is too old
    to make one.
    """

    @pytest.mark.skipif(not IS_POSSIBLE, reason="this torch has no device types in pure Python")
    @wraps(test)
    def running(*args: Any, **kwargs: Any) -> None:
        def run(rank: int, world_size: int) -> None:
            install()
            test(*args, **kwargs)

        run_processes(run, 1)

    return running
