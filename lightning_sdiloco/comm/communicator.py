"""Collectives among the ranks of one process group, for tensors and plain values on any backend.

Plain values are None, booleans, numbers, strings, bytes, tensors, and lists, tuples, sets and
dictionaries of these. Values are sent as JSON, followed by the raw bytes of their tensors. Received
data is never executed. A named tuple arrives as a plain tuple, which the caller converts back.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from typing_extensions import override

from lightning_sdiloco.memory import new_vector

SHARED = "sdiloco_gloo"
"""The name under which `topology.SharedGloo` registers its backend with torch."""


PlainValue = Any
"""A value that can be sent between ranks."""

Value = TypeVar("Value")


class Outcome(NamedTuple):
    value: PlainValue
    failure: tuple[str, ...] = ()
    text: str = ""
    raised: Exception | None = None


class Communicator:
    """Runs collectives among a set of ranks. A single rank needs no process group."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.size = 1
        self.rank = 0
        # Tensors on another device are copied to the host before they are sent.
        self.is_on_host = False
        if process_group is not None:
            self.size = dist.get_world_size(process_group)
            self.rank = dist.get_rank(process_group)
            self.is_on_host = dist.get_backend(process_group) in ("gloo", SHARED)

    def begun(self) -> int:
        """Returns how many collectives this rank has started in its gloo and NCCL backends,
        including those issued by other code.
        """
        group = self.process_group
        if group is None:
            return 0
        # If each device has its own backend, the counts of all backends are added up.
        backends: set[Any] = {group._get_backend(device) for device in group._device_types}
        with suppress(RuntimeError):
            return sum(backend._get_sequence_number_for_group() for backend in backends)
        return 0

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gathers the tensors of all ranks in rank order. All tensors must have the same shape and
        dtype.
        """
        if self.size == 1:
            return [tensor]
        sent = self._staged(tensor).contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=self.process_group)
        return [to_device(part, tensor.device) for part in received]

    def all_gather_with_gradients(self, tensor: Tensor) -> Tensor:
        """Gathers and stacks the tensors of all ranks. Gradients flow back to the ranks that the
        tensors came from.
        """
        gathered: Tensor = _AllGather.apply(tensor, self)
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Sends row i of the tensor to rank i and returns a stack of the rows received from all
        ranks.
        """
        if self.size == 1:
            return tensor
        sent = self._staged(tensor).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.process_group)
        return to_device(received, tensor.device)

    def all_to_all_vectors(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Sends one part to each rank and returns the parts received from all ranks. Parts are flat
        tensors of the same dtype, and `sizes` contains the sizes of the received parts.
        """
        if self.size == 1:
            return list(parts)
        sent = [self._staged(part).contiguous() for part in parts]
        lengths = [part.numel() for part in sent]
        received = sent[self.rank].new_empty(sum(sizes))
        dist.all_to_all_single(
            received, torch.cat(sent), list(sizes), lengths, group=self.process_group
        )
        return [to_device(part, parts[0].device) for part in received.split(list(sizes))]

    def all_gather_object(self, value: Value) -> list[Value]:
        """Gathers plain values from all ranks in rank order."""
        if self.size == 1:
            return [value]
        # The backend may be "cpu:gloo,cuda:nccl": any device that it supports will do.
        device = torch.device(dist.get_backend_config(self.process_group).partition(":")[0])
        sent = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self.all_gather(torch.tensor(sent.numel(), device=device))]
        padded = nn.functional.pad(sent, (0, max(sizes) - sent.numel())).to(device)
        received = zip(self.all_gather(padded), sizes, strict=True)
        return [decode(part[:size].cpu().numpy().tobytes()) for part, size in received]

    def attempt(self, act: Callable[[], PlainValue]) -> list[Outcome]:
        """Calls a function on all ranks and returns the outcomes in rank order. The function must
        return a plain value.

        If the call fails on one rank, all other ranks see the failure here instead of waiting for
        that rank later.
        """
        try:
            outcome = Outcome(act())
        except Exception as error:  # callers raise it on all ranks
            names = tuple(kind.__name__ for kind in type(error).__mro__)
            outcome = Outcome(None, names, str(error), error)
        outcomes = [Outcome(*parts) for parts in self.all_gather_object(outcome[:3])]
        outcomes[self.rank] = outcomes[self.rank]._replace(raised=outcome.raised)
        return outcomes

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites a tensor with the values from the source rank."""
        if self.size == 1:
            return
        staged = self._staged(tensor).contiguous()
        dist.broadcast(staged, group=self.process_group, group_src=source)
        if staged is not tensor:
            tensor.copy_(staged)

    def channel(self, engine: int) -> "Communicator":
        """Returns a communicator among the same ranks. On gloo, the communicator is reserved for
        one engine. On other backends, engines share the communicator.
        """
        if self.process_group is not None and self.is_on_host and self.size > 1:
            return MessageCommunicator(self.process_group, engine)
        return self

    def _staged(self, tensor: Tensor) -> Tensor:
        if self.is_on_host:
            return to_host(tensor)
        return tensor


# Users may send messages over the same process groups, with lower tags.
_FIRST_TAG = 1 << 30


class MessageCommunicator(Communicator):
    """A communicator that sends tagged messages so that multiple threads can share a gloo process
    group.

    Tags are needed because gloo matches collectives by the order in which a rank starts them, and
    two threads have no common order. Gathering takes half as long as gloo's own all-gather, which
    passes values around a ring and copies the result.
    """

    def __init__(self, process_group: dist.ProcessGroup, engine: int) -> None:
        super().__init__(process_group)
        self._process_group = process_group
        self._tag = _FIRST_TAG + engine
        self._peers = [rank for rank in range(self.size) if rank != self.rank]

    @override
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        sent = self._staged(tensor).contiguous()
        received = [
            sent if rank == self.rank else torch.empty_like(sent) for rank in range(self.size)
        ]
        works = [self._receive(received[rank], rank) for rank in self._peers]
        works += [self._send(sent, rank) for rank in self._peers]
        for work in works:
            work.wait()
        return [to_device(part, tensor.device) for part in received]

    @override
    def all_to_all_vectors(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        sent = [self._staged(part).contiguous() for part in parts]
        received = [sent[self.rank].new_empty(size) for size in sizes]
        received[self.rank] = sent[self.rank]
        works = [self._receive(received[rank], rank) for rank in self._peers if sizes[rank]]
        works += [self._send(sent[rank], rank) for rank in self._peers if sent[rank].numel()]
        for work in works:
            work.wait()
        return [to_device(part, parts[0].device) for part in received]

    @override
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        staged = self._staged(tensor).contiguous()
        # In a tree: in each turn, every rank that has the values sends them to one that does not.
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

    def _send(self, tensor: Tensor, rank: int) -> dist.Work:
        return self._process_group.send([tensor], rank, self._tag)

    def _receive(self, tensor: Tensor, rank: int) -> dist.Work:
        return self._process_group.recv([tensor], rank, self._tag)


class _Context(FunctionCtx):
    communicator: Communicator


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return torch.stack(communicator.all_gather(tensor))

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:
        parts: Tensor = _AllToAll.apply(gradient, ctx.communicator)
        return parts.sum(dim=0), None


class _AllToAll(torch.autograd.Function):
    """A differentiable version of `Communicator.all_to_all` that also supports second
    derivatives.
    """

    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return communicator.all_to_all(tensor)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:
        parts: Tensor = _AllToAll.apply(gradient, ctx.communicator)
        return parts, None


# Plain values as bytes

_HEAD = 8  # bytes that store the length of the JSON
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def encode(value: PlainValue) -> bytes:
    """Encodes a plain value as bytes.

    Raises:
        TypeError: If any part of the value is not plain. The message names that part.

    Examples:
        >>> decode(encode({"loss": (0.5, None), 3: torch.ones(2)}))
        {'loss': (0.5, None), 3: tensor([1., 1.])}
    """
    buffers: list[bytes] = []
    text = json.dumps(_described(value, buffers)).encode()
    return b"".join((len(text).to_bytes(_HEAD, "little"), text, *buffers))


def decode(encoded: bytes) -> PlainValue:
    """Decodes the output of `encode`. Tensors are returned on the host."""
    end = _HEAD + int.from_bytes(encoded[:_HEAD], "little")
    try:
        described = json.loads(bytes(encoded[_HEAD:end]))
        return _Buffers(memoryview(encoded)[end:]).value(described)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, RuntimeError) as error:
        raise ValueError(
            f"Another rank sent data that cannot be decoded as a plain value: {error!r}."
        ) from error


def _described(value: object, buffers: list[bytes]) -> object:
    """Converts a value to JSON, in which each list starts with its kind, and appends raw bytes to
    `buffers`.
    """
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
            keys_and_values = list(chain.from_iterable(value.items()))
            return ["dict", *(_described(part, buffers) for part in keys_and_values)]
        case list() | tuple() | set():
            kind = next(name for name, kind in _COLLECTIONS.items() if isinstance(value, kind))
            return [kind, *(_described(part, buffers) for part in value)]
    raise TypeError(
        f"{value!r} is of type {type(value)}, but only plain values can be sent between ranks."
    )


_COLLECTIONS: dict[str, type] = {"list": list, "tuple": tuple, "set": set}


class _Buffers:
    """The raw bytes that follow the JSON, in the order in which the JSON describes them."""

    def __init__(self, remaining: memoryview) -> None:
        self._remaining = remaining

    def _take(self, size: int) -> bytearray:
        if not 0 <= size <= len(self._remaining):
            raise ValueError(f"{size} bytes were announced, but only {len(self._remaining)} follow")
        taken = bytearray(self._remaining[:size])
        self._remaining = self._remaining[size:]
        return taken

    def value(self, described: object) -> object:
        """Rebuilds a value from the output of `_described`."""
        if isinstance(described, dict):
            raise ValueError("an object was found in place of a value")
        if not isinstance(described, list):
            return described
        kind, *parts = described
        if kind == "bytes":
            return bytes(self._take(parts[0]))
        if kind == "tensor":
            return self._tensor(*parts)
        values = list(map(self.value, parts))
        if kind == "dict":
            return dict(zip(values[::2], values[1::2], strict=True))
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](values)
        raise ValueError(f"{kind!r} is not a kind of value")

    def _tensor(self, size: int, dtype: str, *shape: int) -> Tensor:
        taken = self._take(size)
        flat = torch.empty(0, dtype=_DTYPES[dtype])
        if size:
            flat = torch.frombuffer(taken, dtype=_DTYPES[dtype])
        return flat.reshape(shape)


# Copies between an accelerator and its host, through page-locked memory


def page_locked(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialised host tensor that a device can access directly."""
    if device.type == "cpu":
        return new_vector(prod(shape), device, dtype).view(tuple(shape))
    # torch keeps freed pages for the next tensor of the same size, because locking pages takes
    # longer than a copy.
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def to_host(values: Tensor) -> Tensor:
    """Copies a tensor to the host. The calling thread waits for the copy, but the accelerator keeps
    running.
    """
    if values.device.type == "cpu":
        return values
    copied = page_locked(values.shape, values.dtype, values.device).copy_(values, non_blocking=True)
    torch.get_device_module(values.device).current_stream(values.device).synchronize()
    return copied


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device without waiting. The copy may be used only by work that this
    thread issues to the device afterwards.
    """
    return values.to(device, non_blocking=True)
