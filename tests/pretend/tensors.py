"""Tensors of the pretended device: every operation is computed on the host, and its accesses are noted."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretend.clocks import Stream, learn, lock
from tests.pretend.memory import Memory, Operation, allocated, pin, to_device, to_host

aten = torch.ops.aten

# What makes a tensor like another one, and does not read that.
_LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_READ_NOTHING = {f"{name}_like" for name in _LIKE} | {f"new_{name}" for name in _LIKE} | {"new_empty_strided"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# What has a result on the host, or one whose shape the host must know.
_WAITING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class PretendTensor(Tensor):
    """A tensor whose device is the pretended one.

    Attributes:
        held: The tensor on the host that holds its values.
        memory: Who touches them.
    """

    held: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, real: Tensor, memory: Memory) -> "PretendTensor":
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=torch.device("pretend", 0),
        )
        made.held, made.memory = real, memory
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


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if func is aten.copy_.default and not all(isinstance(tensor, PretendTensor) for tensor in args[:2]):
        return copy_across(*args, **kwargs)
    reads, writes = _accessed(func, args, kwargs)
    _check_devices(func, args, kwargs)
    operation = Operation.begun(func._schema.name)
    for tensor in reads:
        tensor.memory.touch(operation.access(tensor.held, writes=False))
    for tensor in writes:
        tensor.memory.touch(operation.access(tensor.held, writes=True))
    shapes = [(tensor.held.shape, tensor.held.stride()) for tensor in writes]
    elsewhere = "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"
    result = func(*tree_map(_held, args), **tree_map(_held, _on_host(kwargs)))
    if shapes != [(tensor.held.shape, tensor.held.stride()) for tensor in writes]:
        raise NotImplementedError(f"{operation.name} changed the shape of what it was given")
    if _waits(func, args):
        learn(operation.stream.clock, operation.name)
    if elsewhere:
        return pin(result) if kwargs.get("pin_memory") else result
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PretendTensor)]
    return tree_map(lambda leaf: _pretended(leaf, given, operation) if isinstance(leaf, Tensor) else leaf, result)


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, PretendTensor) else leaf


def _on_host(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    cpu = {"device": torch.device("cpu")} if "device" in kwargs else {}
    return {**{key: value for key, value in kwargs.items() if key != "pin_memory"}, **cpu}


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[bool, Any]]:
    """Every tensor among the arguments, with whether it is written to."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield writes, leaf


def _accessed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensors that are read and those that are written to: none where an operation makes views."""
    arguments = list(_arguments(func, args, kwargs))
    name = func._schema.name.removeprefix("aten::")
    is_view = not any(writes for writes, _ in arguments) and any(r.alias_info for r in func._schema.returns)
    if is_view or name in _READ_NOTHING:
        return [], []
    own = [(writes, tensor) for writes, tensor in arguments if isinstance(tensor, PretendTensor)]
    # What is written in place may be read too: a write that waits for all accesses before it covers both.
    return [tensor for writes, tensor in own if not writes], [tensor for writes, tensor in own if writes]


def _check_devices(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for index, (writes, tensor) in enumerate(_arguments(func, args, kwargs)):
        is_index = index > 0 and func._schema.name.removeprefix("aten::") in _INDEXING and not tensor.dtype.is_complex
        if tensor.device.type == "cpu" and (writes or tensor.dim() > 0) and not is_index:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, pretend:0 and cpu!"
                f" (in {func._schema.name})"
            )


def _waits(func: Any, args: Sequence[Any]) -> bool:
    if func._schema.name.removeprefix("aten::") in _INDEXING:
        indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
        return any(leaf.dtype in (torch.bool, torch.uint8) or leaf.device.type == "cpu" for leaf in indices)
    return any(tag in func.tags for tag in _WAITING)


def _pretended(real: Tensor, given: Sequence[PretendTensor], operation: Operation) -> PretendTensor:
    """What is returned for a tensor on the host: one that was given, a view of one, or a new one."""
    for tensor in given:
        if tensor.held is real:
            return tensor
    place = real.untyped_storage()._cdata
    for tensor in given:
        if tensor.held.untyped_storage()._cdata == place:
            return PretendTensor(real, tensor.memory)
    return PretendTensor(real, allocated(operation, real))


def _new(real: Tensor, name: str) -> PretendTensor:
    with lock:
        return PretendTensor(real, allocated(Operation.begun(name), real))


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
    real = _held(source)
    into = torch.empty_like(real, dtype=dtype, memory_format=memory_format or torch.preserve_format)
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
            to_host(operation, source.held, into, non_blocking)
        elif isinstance(into, PretendTensor):
            operation = Operation.begun("copy to the device")
            into.memory.touch(operation.access(into.held, writes=True))
            to_device(operation, source, into.held, non_blocking)
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
