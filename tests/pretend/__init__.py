"""A pretended accelerator: a device type for torch that is computed on the CPU and finds races
between streams.

Operations are computed at once, so that values are right. What happens before what is followed as
on a device where every stream is as slow as it likes. An operation is a tick of its stream; of
another stream it knows the tick up to which everything is finished before its own next operation
begins. The host learns by waiting only, and what one thread has learned all know: how threads tell
each other cannot be seen from here. Two operations on the same bytes in an unknown order raise a
`Race`, and what a copy to pinned memory brings is there once the host knows that it is over.

torch cannot forget a device type, and much in it changes where there is one. So tests use this in a
process of their own: `alone` makes one.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, wraps
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
"""Stream to the tick of its last operation that is known to be finished; ``|=`` learns what another
one knows."""

lock = threading.RLock()
"""Held by whoever changes anything here, and while an operation is computed."""

known: Clock = Counter()
"""What the host knows to be finished."""

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
    _end(lambda copy: known[copy.access.by.stream.number] >= copy.access.by.tick)


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
        self._asked = False

    def record(self, stream: Stream | None = None) -> None:
        with lock:
            self.clock = (stream or current_stream()).clock.copy()
            self._asked = False

    def synchronize(self) -> None:
        wait(self.clock, "event.synchronize")

    def query(self) -> bool:
        """Whether the event is over. It is not when first asked, unless the host knows better, and
        then it is.
        """
        with lock:
            asked = self._asked
            self._asked = True
            if asked:
                _learn(self.clock)
            return self.clock <= known


default = Stream()

# Memory


class Operation(NamedTuple):
    """What has been enqueued: it begins after all that the host knows to be finished."""

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

    def is_before(self, other: "Operation") -> bool:
        return other.stream.clock[self.stream.number] >= self.tick


class Access(NamedTuple):
    """An operation that touches the bytes from `first` to before `last` of some memory."""

    by: Operation
    writes: bool
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.by} {'writes' if self.writes else 'reads'}"

    def overlaps(self, other: "Access") -> bool:
        return self.first < other.last and other.first < self.last

    def replaces(self, other: "Access") -> bool:
        """Whether who comes after this one comes after the other one too."""
        covers = self.first <= other.first and other.last <= self.last
        return covers and (self.writes or (self.by.stream is other.by.stream and not other.writes))


_freed: dict[Stream, list[Access]] = {}  # what may still use memory that a stream gets anew


class Memory:
    """A stretch of memory of the device, or of pinned memory of the host."""

    held = peak = 0  # bytes on the device now, and at most since the last reset

    def __init__(self, owner: Stream | None, nbytes: int = 0) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self._accesses: list[Access] = []
        self.recorded: set[Stream] = (
            set()
        )  # what they have been given when it is freed is over before it is reused
        Memory.held += nbytes
        Memory.peak = max(Memory.peak, Memory.held)

    def touch(self, by: Operation, tensor: Tensor, writes: bool) -> Access:
        """Notes an access to what lies on the host really; raises a `Race` where another one may
        be under way.
        """
        first = int(tensor.storage_offset()) * tensor.element_size()
        reach = (
            sum(
                (size - 1) * stride
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            + 1
        )
        access = Access(
            by, writes, first, first + (reach * tensor.element_size() if tensor.numel() else 0)
        )
        if access.first == access.last:
            return access
        for other in self._accesses:
            if access.overlaps(other) and (writes or other.writes) and not other.by.is_before(by):
                does = "overwrites" if writes else "reads"
                raise Race(f"{by} {does} what {other}, and nothing says that this is over by then")
        self._accesses = [other for other in self._accesses if not access.replaces(other)] + [
            access
        ]
        return access

    def __del__(self) -> None:
        with suppress(Exception), lock:  # the interpreter may be ending
            Memory.held -= self.nbytes
            if self.owner is not None:
                others = [
                    one
                    for one in self._accesses
                    if one.by.stream not in (self.owner, *self.recorded)
                ]
                _freed.setdefault(self.owner, []).extend(others)


def allocated(by: Operation, tensor: Tensor) -> Memory:
    """New memory of the device, for a tensor."""
    for access in _freed.pop(by.stream, []):
        if not access.by.is_before(by):
            raise Race(
                f"{by} may get freed memory that {access}, perhaps still: no record_stream told of"
                " it"
            )
    memory = Memory(by.stream, tensor.untyped_storage().nbytes())
    memory.touch(by, tensor, writes=True)
    return memory


# Pinned memory of the host, and copies that go on while the host does

_pinned: dict[
    int, tuple[Any, Memory]
] = {}  # with the storage, kept for ever so that no other gets its address


def pin(tensor: Tensor) -> Tensor:
    """Makes the memory of a new tensor on the host pinned."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        _pinned[storage.data_ptr()] = storage, Memory(None)
    return tensor


def pinned(tensor: Tensor) -> Memory | None:
    """The pinned memory in which a tensor lies."""
    found = (
        _pinned.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None
    )
    return found and found[1]


class _Copy(NamedTuple):
    """A copy between pinned memory and the device that the host does not know to be over."""

    access: Access
    memory: Memory
    here: Tensor  # bytes of the host
    true: Tensor


_under_way: list[_Copy] = []


def _end(is_over: Callable[[_Copy], bool]) -> None:
    """The host may know: what was copied is there, and what the host must have left alone is as it
    was.
    """
    over = [copy for copy in _under_way if is_over(copy)]
    _under_way[:] = [copy for copy in _under_way if not is_over(copy)]
    for access, _, here, true in over:
        if access.writes:
            if not bool((here == 0xFF).all()):
                raise Race(f"the host wrote to pinned memory into which {access.by} copied")
            here.copy_(true)
        elif not torch.equal(here, true):
            raise Race(
                f"the host changed pinned memory from which {access.by} copied, before that was"
                " over"
            )


def copy_across(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``into.copy_(source)`` between host and device, which is really there too.

    From or to pinned memory the host may go on; what is not there yet it sees as 0xFF bytes.
    """
    with lock, torch.no_grad():
        to_host = isinstance(source, PretendTensor)
        own, host = (source, into) if to_host else (into, source)
        assert isinstance(own, PretendTensor)
        by = Operation.begun(f"copy to the {'host' if to_host else 'device'}")
        own.memory.touch(by, own.held, not to_host)
        memory = pinned(host)
        if memory is not None:
            access = memory.touch(by, host, to_host)
            # For an access of the device, what came before on the device is over.
            _end(lambda copy: copy.memory is memory and copy.access.overlaps(access))
        as_it_is = to_host or (host.dtype == own.dtype and host.shape == own.shape)
        _held(into).copy_(_held(source))
        if (
            memory is None
            or not non_blocking
            or not host.is_contiguous()
            or not host.numel()
            or not as_it_is
        ):
            wait(by.stream.clock, by.name)
            return into
        here = host.detach().view(-1).view(torch.uint8)
        _under_way.append(_Copy(access, memory, here, here.clone()))
        if to_host:
            here.fill_(0xFF)
    return into


# Tensors: every operation is computed on the host, and its accesses are noted


class PretendTensor(Tensor):
    """A tensor whose device is the pretended one."""

    held: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, held: Tensor, memory: Memory) -> "PretendTensor":
        where = {
            "strides": held.stride(),
            "storage_offset": held.storage_offset(),
            "dtype": held.dtype,
        }
        device = torch.device("pretend", 0)
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls, held.size(), **where, device=device
        )
        made.held = held
        made.memory = memory
        return made

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


# What makes a tensor like another one, and does not read that.
_LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_READ_NOTHING = (
    {f"{name}_like" for name in _LIKE} | {f"new_{name}" for name in _LIKE} | {"new_empty_strided"}
)
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# What has a result on the host, or one whose shape the host must know.
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@cache
def _kind(func: Any) -> tuple[list[str], set[str], bool, bool, bool]:
    """What the schema of an operation says: arguments, which it writes, whether it accesses,
    waits, and indexes.
    """
    schema = func._schema
    name = func._schema.name.removeprefix("aten::")
    written = {
        one.name
        for one in schema.arguments
        if one.alias_info is not None and one.alias_info.is_write
    }
    is_view = not written and any(returned.alias_info for returned in schema.returns)
    accesses = not is_view and name not in _READ_NOTHING
    indexes = name in _INDEXING
    return (
        [one.name for one in schema.arguments],
        written,
        accesses,
        bool(_WAITING & {*func.tags}) > indexes,
        indexes,
    )


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if func is aten.copy_.default and not all(
        isinstance(tensor, PretendTensor) for tensor in args[:2]
    ):
        return copy_across(*args, **kwargs)
    (arguments, written, accesses, waits, indexes), name = _kind(func), func._schema.name
    named = chain(zip(arguments, args, strict=False), kwargs.items())
    tensors = [(argument in written, leaf) for argument, value in named for leaf in _tensors(value)]
    for place, (writes, tensor) in enumerate(tensors):
        if tensor.device.type == "cpu" and (writes or tensor.dim() > 0) and not (place and indexes):
            raise RuntimeError(
                f"{name} expected all tensors to be on the same device, and found pretend:0 and cpu"
            )
    by = Operation.begun(name)
    given = [(writes, tensor) for writes, tensor in tensors if isinstance(tensor, PretendTensor)]
    # Reads first. What is written in place may be read too: who writes waits for all accesses
    # before it anyway.
    for writes, tensor in sorted(given, key=lambda pair: pair[0]) if accesses else ():
        tensor.memory.touch(by, tensor.held, writes)
    shapes = [(tensor.held.shape, tensor.held.stride()) for writes, tensor in given if writes]
    result = func(
        *_mapped(_held, args),
        **{key: _mapped(_held, value) for key, value in _on_host(kwargs).items()},
    )
    if shapes != [(tensor.held.shape, tensor.held.stride()) for writes, tensor in given if writes]:
        raise NotImplementedError(f"{name} changed the shape of what it was given")
    # Masks must be read, and so must indices on the host.
    indices = _tensors(args[1]) if indexes else ()
    if waits or any(
        one.dtype in (torch.bool, torch.uint8) or one.device.type == "cpu" for one in indices
    ):
        wait(by.stream.clock, name)
    if "device" in kwargs and torch.device(kwargs["device"]).type == "cpu":
        return pin(result) if kwargs.get("pin_memory") else result

    def returned(held: Tensor) -> PretendTensor:
        """One that was given, a view of one, or a new one."""
        for _, tensor in given:
            if tensor.held is held:
                return tensor
        place = held.untyped_storage()._cdata
        memories = (
            tensor.memory for _, tensor in given if tensor.held.untyped_storage()._cdata == place
        )
        return PretendTensor(held, next(memories, None) or allocated(by, held))

    return _mapped(returned, result)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_tensors, value))


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """As torch's own trees do it, in a tenth of the time."""
    if isinstance(value, Tensor):
        return function(value)
    return (
        type(value)(_mapped(function, part) for part in value)
        if type(value) in (list, tuple)
        else value
    )


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, PretendTensor) else tensor


def _on_host(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    cpu = {"device": torch.device("cpu")} if "device" in kwargs else {}
    return {**{key: value for key, value in kwargs.items() if key != "pin_memory"}, **cpu}


def _to_copy(source: Tensor, *, device: Any = None, non_blocking: bool = False, **like: Any) -> Any:
    like = {
        "dtype": like.get("dtype"),
        "memory_format": like.get("memory_format") or torch.preserve_format,
    }
    into = torch.empty_like(_held(source), **like)
    if (source.device if device is None else torch.device(device)).type == "cpu":
        # As an accelerator does it, which surprises many: without waiting the copy lies in pinned
        # memory.
        return copy_across(pin(into) if non_blocking else into, source, non_blocking)
    return _new(into, "aten::_to_copy").copy_(source, non_blocking)


def _new(held: Tensor, name: str) -> PretendTensor:
    with lock:
        return PretendTensor(held, allocated(Operation.begun(name), held))


def _kernel(make: Callable[..., Tensor], fills: bool = False) -> Callable[..., PretendTensor]:
    """What makes a tensor on the device. New memory holds anything: values that whoever reads them
    will notice.
    """

    def making(*given: Any, dtype: Any = None, **_: Any) -> PretendTensor:
        held = make(*given, dtype=dtype)
        if fills:
            held.untyped_storage().fill_(0xA5)  # type: ignore[attr-defined]
        return _new(held, f"aten::{make.__name__}")

    return making


# What torch and the engine ask the module of a device


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
        for each in _streams:
            everything |= each.clock
        wait(everything, "synchronize")


device = nullcontext
is_available = is_initialized = lambda: True
device_count = lambda: 1  # noqa: E731
current_device = lambda: 0  # noqa: E731
set_device = manual_seed_all = lambda given: (
    None
)  # random numbers come from the generator of the CPU
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
    # Where torch leaves out __torch_dispatch__, as in torch.tensor.
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
        made = make(*args, **kwargs)
        if pin_memory and made.device.type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return pin(made) if pin_memory else made

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
