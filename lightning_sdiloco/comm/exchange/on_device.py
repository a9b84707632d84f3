"""Every group sends directly to every other one, from device to device."""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdiloco.comm.exchange.base import Exchange, Unanswered

# In seconds: short beside the time of a message, long beside the time of a look.
_BETWEEN_LOOKS = 0.001


class DeviceBackend(NamedTuple):
    """A backend of torch.distributed that takes tensors of a device."""

    name: str
    device: torch.device


def nccl_on(device: torch.device) -> DeviceBackend:
    """Returns NCCL as the backend for a device.

    Raises:
        ValueError: If NCCL does not take tensors of the device, or this torch has no NCCL.

    Examples:
        >>> nccl_on(torch.device("cpu"))
        Traceback (most recent call last):
        ...
        ValueError: exchange_backend='nccl' was given, and this rank trains on cpu: NCCL joins CUDA devices only. ...
    """
    if device.type != "cuda":
        raise ValueError(
            f"exchange_backend='nccl' was given, and this rank trains on {device.type}: NCCL joins CUDA devices only."
            " Train on CUDA devices, or leave exchange_backend out for gloo, which works on every device."
        )
    if not dist.is_nccl_available():
        raise ValueError(
            f"exchange_backend='nccl' was given, and torch {torch.__version__} was built without NCCL. Install a torch"
            " that has it, or leave exchange_backend out for gloo."
        )
    return DeviceBackend("nccl", device)


class _Posted(NamedTuple):
    messages: Sequence[Tensor]
    received: list[Tensor]
    works: list[dist.Work]
    failure: Unanswered | None


class DeviceExchange(Exchange[_Posted]):
    """Sends from the device of each group to that of each other group; the host only looks whether it is done.

    All messages of a flight are one group call of the backend, in which no order of sends and receives can deadlock.

    [Note: the stream never waits for another rank] ``wait()`` of such a backend makes the stream wait, not the host. So
    it is called only when everything has arrived. The stream also encodes the next flight and decodes the last one:
    whoever waits for it would otherwise wait for the slowest group, without a bound.

    Args:
        process_group: One rank of each worker group, in the order of the groups, over a backend that takes tensors of
            the device. Nobody else uses it: the backend matches messages by the order in which ranks post them.
        device: The device of this rank.
    """

    learns_sizes = False

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(dist.get_world_size(process_group))
        self.device = device
        self._process_group = process_group
        self._group = dist.get_rank(process_group)
        self._ranks = dist.get_process_group_ranks(process_group)
        self._others = [group for group in range(self.num_groups) if group != self._group]
        self._given_up: list[_Posted] = []

    def meet(self, deadline: float) -> None:
        """Makes the connections, which a backend does with its first messages. All groups must call it."""
        posted = self.post([torch.zeros(1, dtype=torch.uint8, device=self.device)] * self.num_groups)
        try:
            self._wait(posted, deadline)
        except Unanswered as error:
            raise ValueError(
                f"The ranks {self._ranks} of the worker groups cannot exchange over {self._backend}: {error}."
                " NCCL_DEBUG=INFO tells how they try, NCCL_SOCKET_IFNAME names the interface. Correct that on every"
                " machine, or leave exchange_backend out for gloo."
            ) from error

    def post(self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None) -> _Posted:
        """Starts to send what the current stream has been given to compute; see `Exchange.post`."""
        sent = [message.contiguous() for message in messages]
        own = sent[self._group]
        known = [own.numel()] * self.num_groups if sizes is None else sizes
        received = [own if group == self._group else own.new_empty(size) for group, size in enumerate(known)]
        calls = [call for group in self._others for call in self._calls(group, sent[group], received[group])]
        try:
            works = dist.batch_isend_irecv(calls) if calls else []
        except RuntimeError as error:
            # It is raised when the messages are collected, so that all ranks of this group learn of it together.
            return _Posted(sent, received, [], self._gone(error))
        return _Posted(sent, received, works, None)

    def collect(self, posted: _Posted, deadline: float) -> list[Tensor]:
        """Waits for all groups; see `Exchange.collect`. The current stream may use the result."""
        self._wait(posted, deadline)
        self._count(self._group, posted.messages, posted.received)
        return posted.received

    def _calls(self, group: int, sent: Tensor, received: Tensor) -> list[dist.P2POp]:
        # Empty messages are not posted. All groups agree on that: they know the sizes.
        pairs = ((dist.irecv, received), (dist.isend, sent))
        return [
            dist.P2POp(call, tensor, group=self._process_group, group_peer=group)
            for call, tensor in pairs
            if tensor.numel()
        ]

    def _wait(self, posted: _Posted, deadline: float) -> None:
        if posted.failure is not None:
            raise posted.failure
        for work in posted.works:
            while not work.is_completed():
                if time.monotonic() >= deadline:
                    self._give_up(posted)
                    raise self._unanswered("did not answer in time")
                time.sleep(_BETWEEN_LOOKS)
        for work in posted.works:
            try:
                # See [Note: the stream never waits for another rank]. A failed transfer is over too; it raises here.
                work.wait()
            except RuntimeError as error:
                raise self._gone(error) from error

    def _give_up(self, posted: _Posted) -> None:
        # The device may still read and write these: their memory must not become that of other tensors.
        self._given_up.append(posted)
        # Otherwise the device is busy with them until torch ends the process. Aborting may take long, so nobody waits.
        abort = getattr(self._process_group, "abort", None)
        if abort is not None:
            threading.Thread(target=abort, name="sdiloco-abort", daemon=True).start()

    @property
    def _backend(self) -> str:
        return str(dist.get_backend(self._process_group))

    def _gone(self, error: RuntimeError) -> Unanswered:
        return self._unanswered(f"went away, or {self._backend} failed: {str(error).splitlines()[0]}")

    def _unanswered(self, reason: str) -> Unanswered:
        if len(self._others) == 1:
            group = self._others[0]
            return Unanswered(group, f"{reason} (rank {self._ranks[group]})")
        # One call carries the messages of all groups, and it is over only when all of them are.
        return Unanswered(None, f"{reason} (of ranks {', '.join(str(self._ranks[group]) for group in self._others)})")
