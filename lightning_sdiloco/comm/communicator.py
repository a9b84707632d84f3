"""Collectives among the ranks of one process group, whatever its backend."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdiloco.comm.gloo import SHARED
from lightning_sdiloco.comm.plain_values import decode, encode
from lightning_sdiloco.comm.staging import to_device, to_host


class Outcome(NamedTuple):
    """What came of something that all ranks tried."""

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
        self.is_on_host = process_group is not None and dist.get_backend(process_group) in ("gloo", SHARED)

    def begun(self) -> int:
        """Returns how many collectives anybody has begun in the process group on this rank, with gloo and NCCL."""
        if (group := self.process_group) is None:
            return 0
        # Where each device has a backend of its own, each of them counts.
        backends: set[Any] = {group._get_backend(device) for device in group._device_types}
        with suppress(RuntimeError):
            return sum(backend._get_sequence_number_for_group() for backend in backends)
        return 0

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, in the order of the ranks. All must have the same shape and dtype."""
        if self.size == 1:
            return [tensor]
        sent = self._staged(tensor).contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=self.process_group)
        return [to_device(part, tensor.device) for part in received]

    def all_gather_with_gradients(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, stacked; gradients flow back to the rank that each is from."""
        gathered: Tensor = _AllGather.apply(tensor, self)
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Returns what the ranks hold for this one: their parts of that number along the first dimension, stacked."""
        if self.size == 1:
            return tensor
        sent = self._staged(tensor).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.process_group)
        return to_device(received, tensor.device)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the plain values of all ranks, in the order of the ranks; see `plain_values`."""
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
        """Does something on all ranks, and returns what came of it on each, in the order of the ranks.

        So no rank goes on, and waits for the others, where one of them has failed.

        Args:
            act: Returns a plain value; see `plain_values`.

        Examples:
            >>> [outcome] = Communicator().attempt(lambda: int("one"))
            >>> outcome.failure[0], outcome.text
            ('ValueError', "invalid literal for int() with base 10: 'one'")
        """
        try:
            own = Outcome(act())
        except Exception as error:  # told below, on all ranks
            own = Outcome(None, tuple(kind.__name__ for kind in type(error).__mro__), str(error), error)
        every = [Outcome(*told) for told in self.all_gather_object(own[:3])]
        every[self.rank] = every[self.rank]._replace(raised=own.raised)
        return every

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrites a tensor with that of the first rank."""
        if self.size == 1:
            return
        staged = self._staged(tensor).contiguous()
        dist.broadcast(staged, group=self.process_group, group_src=0)
        if staged is not tensor:
            tensor.copy_(staged)

    def _staged(self, tensor: Tensor) -> Tensor:
        return to_host(tensor) if self.is_on_host else tensor


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
