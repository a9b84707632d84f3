"""Every group sends its message to every other group, point to point, over a gloo process group."""

import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdiloco.exchange.base import Exchange, Unanswered


class _Posted(NamedTuple):
    message: Tensor
    received: list[Tensor]
    receiving: dict[int, dist.Work]
    sending: list[dist.Work]


class GatherExchange(Exchange[_Posted]):
    """Gathers the messages of all groups in each of them.

    Point-to-point transfers rather than one collective, so that an error names the group that is missing.

    Args:
        process_group: A gloo process group with one rank of each worker group, in the order of the groups. Nothing
            else may use it.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_world_size(process_group))
        self._process_group = process_group
        self._group = dist.get_rank(process_group)

    def post(self, message: Tensor) -> _Posted:
        """Starts to send; see `Exchange.post`. A message on another device is copied to the host first."""
        sent = message.cpu()
        others = [group for group in range(self.groups) if group != self._group]
        received = [sent if group == self._group else torch.empty_like(sent) for group in range(self.groups)]
        # The receives come first: a gloo send starts when the other side is known to be ready.
        receiving = {group: self._receive(received[group], group) for group in others}
        sending = [self._send(sent, group) for group in others]
        return _Posted(message, received, receiving, sending)

    def collect(self, posted: _Posted, deadline: float) -> list[Tensor]:
        """Waits for all groups; see `Exchange.collect`."""
        for group, work in posted.receiving.items():
            _wait(work, group, deadline)
        for group, work in zip(posted.receiving, posted.sending, strict=True):
            _wait(work, group, deadline)
        self._count(posted.message)
        return [part.to(posted.message.device) for part in posted.received]

    def _receive(self, into: Tensor, group: int) -> dist.Work:
        try:
            return _started(dist.irecv(into, group=self._process_group, group_src=group))
        except RuntimeError as error:
            raise _gone(group, error) from error

    def _send(self, message: Tensor, group: int) -> dist.Work:
        try:
            return _started(dist.isend(message, group=self._process_group, group_dst=group))
        except RuntimeError as error:
            raise _gone(group, error) from error


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank belongs to the process group"
    return work


def _wait(work: dist.Work, group: int, deadline: float) -> None:
    # A timeout of zero means no timeout to gloo.
    left = max(deadline - time.monotonic(), 0.001)
    try:
        work.wait(timedelta(seconds=left))
    except RuntimeError as error:
        if time.monotonic() >= deadline:
            raise Unanswered(group, "did not answer in time") from error
        raise _gone(group, error) from error


def _gone(group: int, error: RuntimeError) -> Unanswered:
    return Unanswered(group, f"went away ({str(error).splitlines()[0]})")
