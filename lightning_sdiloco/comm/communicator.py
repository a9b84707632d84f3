"""What travels among the ranks of one process group: tensors by collectives, whatever its backend,
and plain values.

Plain are None, truth values, numbers, texts, bytes, tensors, and lists, tuples, sets and
dictionaries of these. They travel as JSON, with the bytes of tensors behind it, and nothing that
comes is executed. A named tuple arrives as a tuple; the sender of one makes one of it again.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_sdiloco.memory import new_vector

SHARED = "sdiloco_gloo"
"""How torch names the process groups of gloo that share a thread; see `topology.SharedGloo`."""


class Outcome(NamedTuple):
    value: Any
    failure: tuple[str, ...] = ()
    text: str = ""
    raised: Exception | None = None


class Communicator:
    """Gathers and broadcasts among some ranks. A single rank needs no process group."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.is_on_host = process_group is not None and dist.get_backend(process_group) in (
            "gloo",
            SHARED,
        )

    def begun(self) -> int:
        """Returns how many collectives anybody has begun in the process group on this rank, with
        gloo and NCCL.
        """
        group = self.process_group
        if group is None:
            return 0
        # If each device has its own backend, each of them counts.
        backends: set[Any] = {group._get_backend(device) for device in group._device_types}
        with suppress(RuntimeError):
            return sum(backend._get_sequence_number_for_group() for backend in backends)
        return 0

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, in the order of the ranks. All must have the same
        shape and dtype.
        """
        if self.size == 1:
            return [tensor]
        sent = self._staged(tensor).contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=self.process_group)
        return [to_device(part, tensor.device) for part in received]

    def all_gather_with_gradients(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, stacked; gradients flow back to the rank that each is
        from.
        """
        gathered: Tensor = _AllGather.apply(tensor, self)
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Returns what the ranks hold for this one: their parts of that number along the first
        dimension, stacked.
        """
        if self.size == 1:
            return tensor
        sent = self._staged(tensor).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.process_group)
        return to_device(received, tensor.device)

    def all_to_all_vectors(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Sends every rank its part; returns what came from each, of these sizes: flat tensors of
        one dtype.
        """
        if self.size == 1:
            return list(parts)
        sent = [self._staged(part).contiguous() for part in parts]
        lengths = [part.numel() for part in sent]
        whole = sent[self.rank].new_empty(sum(sizes))
        dist.all_to_all_single(
            whole, torch.cat(sent), list(sizes), lengths, group=self.process_group
        )
        return [to_device(part, parts[0].device) for part in whole.split(list(sizes))]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the plain values of all ranks, in the order of the ranks; see `encode`."""
        if self.size == 1:
            return [value]
        # Such as "cpu:gloo,cuda:nccl": any device that the group carries will do.
        device = torch.device(dist.get_backend_config(self.process_group).partition(":")[0])
        own = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self.all_gather(torch.tensor(own.numel(), device=device))]
        padded = nn.functional.pad(own, (0, max(sizes) - own.numel())).to(device)
        parts = zip(self.all_gather(padded), sizes, strict=True)
        return [decode(part[:size].cpu().numpy().tobytes()) for part, size in parts]

    def attempt(self, act: Callable[[], Any]) -> list[Outcome]:
        """Does something on all ranks that returns a plain value; returns what came of it on each,
        in order.

        So no rank goes on, and waits for the others, where one of them has failed.
        """
        try:
            own = Outcome(act())
        except Exception as error:  # raised below, on all ranks
            own = Outcome(
                None, tuple(kind.__name__ for kind in type(error).__mro__), str(error), error
            )
        every = [Outcome(*told) for told in self.all_gather_object(own[:3])]
        every[self.rank] = every[self.rank]._replace(raised=own.raised)
        return every

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites a tensor with that of one rank of the process group."""
        if self.size == 1:
            return
        staged = self._staged(tensor).contiguous()
        dist.broadcast(staged, group=self.process_group, group_src=source)
        if staged is not tensor:
            tensor.copy_(staged)

    def channel(self, engine: int) -> "Communicator":
        """Returns a communicator among the same ranks that only the engine with that number uses,
        if they have gloo.
        """
        has_messages = self.process_group is not None and self.is_on_host and self.size > 1
        return MessageCommunicator(self.process_group, engine) if has_messages else self

    def _staged(self, tensor: Tensor) -> Tensor:
        return to_host(tensor) if self.is_on_host else tensor


# Users may send messages over the same process groups, with lower tags.
_FIRST_TAG = 1 << 30


class MessageCommunicator(Communicator):
    """Gathers and broadcasts by messages with a tag, over a process group of gloo that several
    threads may share.

    Collectives of gloo are matched by the order in which a rank begins them, and two threads have
    no common order. Gathering takes half as long as gloo's own, which goes round the ranks and
    copies the result.
    """

    def __init__(self, process_group: Any, engine: int) -> None:
        super().__init__(process_group)
        self._process_group = process_group
        self._tag = _FIRST_TAG + engine
        self._others = [rank for rank in range(self.size) if rank != self.rank]

    @override
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        sent = self._staged(tensor).contiguous()
        received = [
            sent if rank == self.rank else torch.empty_like(sent) for rank in range(self.size)
        ]
        works = [self._receive(received[rank], rank) for rank in self._others]
        works += [self._send(sent, rank) for rank in self._others]
        for work in works:
            work.wait()
        return [to_device(part, tensor.device) for part in received]

    @override
    def all_to_all_vectors(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        sent = [self._staged(part).contiguous() for part in parts]
        received = [sent[self.rank].new_empty(size) for size in sizes]
        received[self.rank] = sent[self.rank]
        works = [self._receive(received[rank], rank) for rank in self._others if sizes[rank]]
        works += [self._send(sent[rank], rank) for rank in self._others if sent[rank].numel()]
        for work in works:
            work.wait()
        return [to_device(part, parts[0].device) for part in received]

    @override
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        staged = self._staged(tensor).contiguous()
        # In a tree: in every turn each rank that has the values sends them to one that does not.
        place = (self.rank - source) % self.size
        holders = 1
        works = []
        while holders < self.size:
            if holders <= place < 2 * holders:
                self._receive(staged, (place - holders + source) % self.size).wait()
            elif place < holders and place + holders < self.size:
                works.append(self._send(staged, (place + holders + source) % self.size))
            holders *= 2
        for work in works:
            work.wait()
        if staged is not tensor:
            tensor.copy_(staged)

    def _send(self, tensor: Tensor, rank: int) -> Any:
        return self._process_group.send([tensor], rank, self._tag)

    def _receive(self, tensor: Tensor, rank: int) -> Any:
        return self._process_group.recv([tensor], rank, self._tag)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return torch.stack(communicator.all_gather(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ours: Tensor = _AllToAll.apply(gradient, ctx.communicator)
        return ours.sum(dim=0), None


class _AllToAll(torch.autograd.Function):
    """`Communicator.all_to_all` with a gradient, for gradients of gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return communicator.all_to_all(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ours: Tensor = _AllToAll.apply(gradient, ctx.communicator)
        return ours, None


# Plain values as bytes

_HEAD = 8  # bytes that say how long the JSON is
_DTYPES = {str(own): own for own in vars(torch).values() if isinstance(own, torch.dtype)}


def encode(value: Any) -> bytes:
    """Returns a plain value as bytes.

    Raises:
        TypeError: If it is none, with the part that is not.

    Examples:
        >>> decode(encode({"loss": (0.5, None), 3: torch.ones(2)}))
        {'loss': (0.5, None), 3: tensor([1., 1.])}
    """
    buffers: list[bytes] = []
    text = json.dumps(_described(value, buffers)).encode()
    return b"".join((len(text).to_bytes(_HEAD, "little"), text, *buffers))


def decode(data: bytes) -> Any:
    """Returns the value that `encode` turned into bytes; tensors are on the host."""
    end = _HEAD + int.from_bytes(data[:_HEAD], "little")
    try:
        return _Buffers(memoryview(data)[end:]).value(json.loads(bytes(data[_HEAD:end])))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, RuntimeError) as error:
        raise ValueError(f"What came from another rank is not a plain value: {error!r}.") from error


def _described(value: Any, buffers: list[bytes]) -> Any:
    """Returns a value as JSON, in which a list begins with its kind."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case bytes() | bytearray() | memoryview():
            buffers.append(bytes(value))
            return ["bytes", len(buffers[-1])]
        case Tensor():
            flat = value.detach().cpu().contiguous().reshape(-1)
            buffers.append(flat.view(torch.uint8).numpy().tobytes())
            return ["tensor", len(buffers[-1]), str(value.dtype), *value.shape]
        case dict():
            pairs = [_described(one, buffers) for pair in value.items() for one in pair]
            return ["dict", *pairs]
        case list() | tuple() | set():
            kind = next(own.__name__ for own in (list, tuple, set) if isinstance(value, own))
            return [kind, *(_described(one, buffers) for one in value)]
    raise TypeError(f"{value!r} is of {type(value)}, but only plain values travel between ranks.")


class _Buffers:
    def __init__(self, data: memoryview) -> None:
        self._data = data

    def _take(self, size: int) -> bytearray:
        if not 0 <= size <= len(self._data):
            raise ValueError(f"{size} bytes are said to follow, and {len(self._data)} do")
        taken = bytearray(self._data[:size])
        self._data = self._data[size:]
        return taken

    def value(self, told: Any) -> Any:
        if not isinstance(told, list):
            if isinstance(told, dict):
                raise ValueError("an object stands where a value belongs")
            return told
        kind, *parts = told
        match kind:
            case "bytes":
                return bytes(self._take(parts[0]))
            case "tensor":
                size, dtype, *shape = parts
                taken = self._take(size)
                flat = (
                    torch.frombuffer(taken, dtype=_DTYPES[dtype])
                    if size
                    else torch.empty(0, dtype=_DTYPES[dtype])
                )
                return flat.reshape(shape)
            case "list" | "tuple" | "set":
                return {"list": list, "tuple": tuple, "set": set}[kind](map(self.value, parts))
            case "dict":
                keys_and_values = list(map(self.value, parts))
                return dict(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))
        raise ValueError(f"{kind!r} is not a kind of value")


# Copies between an accelerator and its host, through page-locked memory


def page_locked(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialised tensor on the host, which a device can reach by itself."""
    if device.type == "cpu":
        return new_vector(prod(shape), device, dtype).view(tuple(shape))
    # torch keeps what is freed for the next tensor of that size: locking pages takes longer than a
    # copy.
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def to_host(values: Tensor) -> Tensor:
    """Copies a tensor to the host. The calling thread waits for the copy, the accelerator does
    not.
    """
    if values.device.type == "cpu":
        return values
    copied = page_locked(values.shape, values.dtype, values.device).copy_(values, non_blocking=True)
    torch.get_device_module(values.device).current_stream(values.device).synchronize()
    return copied


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device without waiting; only what this thread gives the device from now
    on may use it.
    """
    return values.to(device, non_blocking=True)
