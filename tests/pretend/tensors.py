"""Tensors of the pretended device: every operation is computed on the host, and its accesses are noted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.pretend.clocks import (
    Memory,
    Operation,
    Stream,
    allocated,
    copy_between,
    learn,
    lock,
    pin,
)

aten = torch.ops.aten

# What makes a tensor like another one, and does not read that.
_LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_READ_NOTHING = {f"{name}_like" for name in _LIKE} | {f"new_{name}" for name in _LIKE} | {"new_empty_strided"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# What has a result on the host, or one whose shape the host must know.
_WAITING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class PretendTensor(Tensor):
    """A tensor whose device is the pretended one."""

    held: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, held: Tensor, memory: Memory) -> "PretendTensor":
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("pretend", 0),
        )
        made.held, made.memory = held, memory
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
        self.memory.record_stream(stream)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter  # type: ignore[override]
    def data(self, values: "PretendTensor") -> None:
        torch._C.TensorBase.data.__set__(self, values)  # type: ignore[attr-defined]
        self.held, self.memory = values.held, values.memory


class _Kind(NamedTuple):
    """What the schema of an operation says."""

    name: str
    arguments: list[str]
    written: set[str]
    accesses: bool
    waits: bool
    indexes: bool

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[bool, Tensor]]:
        """The tensors among some arguments, each with whether it is written to."""
        for name, value in chain(zip(self.arguments, args, strict=False), kwargs.items()):
            for leaf in _tensors(value):
                yield name in self.written, leaf


@cache
def _kind(func: Any) -> _Kind:
    schema, name = func._schema, func._schema.name.removeprefix("aten::")
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    is_view = not written and any(returned.alias_info for returned in schema.returns)
    return _Kind(
        name=schema.name,
        arguments=[argument.name for argument in schema.arguments],
        written=written,
        accesses=not is_view and name not in _READ_NOTHING,
        waits=any(tag in func.tags for tag in _WAITING) and name not in _INDEXING,
        indexes=name in _INDEXING,
    )


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if func is aten.copy_.default and not all(isinstance(tensor, PretendTensor) for tensor in args[:2]):
        return copy_across(*args, **kwargs)
    kind = _kind(func)
    tensors = list(kind.tensors(args, kwargs))
    _check_devices(kind, tensors)
    operation = Operation.begun(kind.name)
    given = [(writes, tensor) for writes, tensor in tensors if isinstance(tensor, PretendTensor)]
    if kind.accesses:
        # Reads first. What is written in place may be read too: who writes waits for all accesses before it anyway.
        for writes, tensor in sorted(given, key=lambda pair: pair[0]):
            tensor.memory.touch(operation.access(tensor.held, writes))
    shapes = [(tensor.held.shape, tensor.held.stride()) for writes, tensor in given if writes]
    result = func(*_mapped(_held, args), **{key: _mapped(_held, value) for key, value in _on_host(kwargs).items()})
    if shapes != [(tensor.held.shape, tensor.held.stride()) for writes, tensor in given if writes]:
        raise NotImplementedError(f"{kind.name} changed the shape of what it was given")
    if kind.waits or kind.indexes and _must_be_read(args[1]):
        learn(operation.stream.clock, kind.name)
    if "device" in kwargs and torch.device(kwargs["device"]).type == "cpu":
        return pin(result) if kwargs.get("pin_memory") else result
    own = [tensor for _, tensor in given]
    return _mapped(lambda leaf: _pretended(leaf, own, operation), result)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same lists and tuples with what a function makes of the tensors in them."""
    if isinstance(value, Tensor):
        return function(value)
    return type(value)(_mapped(function, part) for part in value) if type(value) in (list, tuple) else value


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, PretendTensor) else tensor


def _on_host(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    cpu = {"device": torch.device("cpu")} if "device" in kwargs else {}
    return {**{key: value for key, value in kwargs.items() if key != "pin_memory"}, **cpu}


def _check_devices(kind: _Kind, tensors: Sequence[tuple[bool, Tensor]]) -> None:
    for place, (writes, tensor) in enumerate(tensors):
        if tensor.device.type == "cpu" and (writes or tensor.dim() > 0) and not (place and kind.indexes):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, pretend:0 and cpu!"
                f" (in {kind.name})"
            )


def _must_be_read(indices: Any) -> bool:
    """Whether the host waits for the device where these are indices: masks, and what it holds itself."""
    return any(leaf.dtype in (torch.bool, torch.uint8) or leaf.device.type == "cpu" for leaf in _tensors(indices))


def _pretended(held: Tensor, given: Sequence[PretendTensor], operation: Operation) -> PretendTensor:
    """What is returned for a tensor on the host: one that was given, a view of one, or a new one."""
    for tensor in given:
        if tensor.held is held:
            return tensor
    place = held.untyped_storage()._cdata
    for tensor in given:
        if tensor.held.untyped_storage()._cdata == place:
            return PretendTensor(held, tensor.memory)
    return PretendTensor(held, allocated(operation, held))


def _new(held: Tensor, name: str) -> PretendTensor:
    with lock:
        return PretendTensor(held, allocated(Operation.begun(name), held))


# Copies between host and device


def _to_copy(
    source: Tensor,
    *,
    dtype: Any = None,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
    layout: Any = None,
    pin_memory: Any = None,
) -> Any:
    held = _held(source)
    into = torch.empty_like(held, dtype=dtype, memory_format=memory_format or torch.preserve_format)
    goes_to = source.device.type if device is None else torch.device(device).type
    if goes_to == "cpu":
        # As an accelerator does it, which surprises many: without waiting the copy lies in pinned memory.
        return copy_across(pin(into) if non_blocking else into, source, non_blocking)
    made = _new(into, "aten::_to_copy")
    return made.copy_(source, non_blocking)


def copy_across(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``into.copy_(source)`` between host and device."""
    with lock, torch.no_grad():
        if isinstance(source, PretendTensor):
            operation = Operation.begun("copy to the host")
            source.memory.touch(operation.access(source.held, writes=False))
            copy_between(operation, into, source.held, True, non_blocking)
        elif isinstance(into, PretendTensor):
            operation = Operation.begun("copy to the device")
            into.memory.touch(operation.access(into.held, writes=True))
            copy_between(operation, source, into.held, False, non_blocking)
    return into


# What makes tensors without being given one


def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> PretendTensor:
    """The kernel of ``aten::empty.memory_format``."""
    return _new(_filled(torch.empty(size, dtype=dtype)), "aten::empty")


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> PretendTensor:
    """The kernel of ``aten::empty_strided``."""
    return _new(_filled(torch.empty_strided(size, stride, dtype=dtype)), "aten::empty_strided")


def _filled(tensor: Tensor) -> Tensor:
    """New memory holds anything: values that whoever reads them will notice."""
    tensor.untyped_storage().fill_(0xA5)  # type: ignore[attr-defined]
    return tensor


def arange(*bounds: Any, dtype: Any = None, **_: Any) -> PretendTensor:
    """The kernel of ``aten::arange`` in all its forms."""
    return _new(torch.arange(*bounds, dtype=dtype), "aten::arange")
