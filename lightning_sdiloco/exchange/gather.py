"""Every group sends its message to every other group, point to point, over a gloo process group."""

import math
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdiloco.exchange.base import Exchange, Unanswered


class _Transfer(NamedTuple):
    """Both directions between this group and another one."""

    group: int
    receiving: dist.Work
    sending: dist.Work


class _Posted(NamedTuple):
    message: Tensor
    received: list[Tensor]
    transfers: list[_Transfer]
    failure: Unanswered | None


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
        self._ranks = dist.get_process_group_ranks(process_group)

    def post(self, message: Tensor) -> _Posted:
        """Starts to send; see `Exchange.post`. A message on another device is copied to the host first."""
        sent = message.cpu()
        received = [sent if group == self._group else torch.empty_like(sent) for group in range(self.groups)]
        transfers, failure = [], None
        for group in [group for group in range(self.groups) if group != self._group]:
            try:
                transfers.append(self._transfer(group, sent, received[group]))
            except RuntimeError as error:
                # Told when the message is collected, so that all ranks of this group hear of it at the same point.
                failure = failure or self._gone(group, error)
        return _Posted(message, received, transfers, failure)

    def collect(self, posted: _Posted, deadline: float) -> list[Tensor]:
        """Waits for all groups; see `Exchange.collect`."""
        if posted.failure is not None:
            raise posted.failure
        for transfer in posted.transfers:
            self._wait(transfer.receiving, transfer.group, deadline)
        for transfer in posted.transfers:
            self._wait(transfer.sending, transfer.group, deadline)
        self._count(posted.message)
        return [part.to(posted.message.device) for part in posted.received]

    def _transfer(self, group: int, sent: Tensor, into: Tensor) -> _Transfer:
        # The receive comes first: a gloo send starts when the other side is known to be ready.
        receiving = dist.irecv(into, group=self._process_group, group_src=group)
        sending = dist.isend(sent, group=self._process_group, group_dst=group)
        assert receiving is not None, "this rank belongs to the process group"
        assert sending is not None, "this rank belongs to the process group"
        return _Transfer(group, receiving, sending)

    def _wait(self, work: dist.Work, group: int, deadline: float) -> None:
        # gloo counts whole milliseconds and zero as no timeout. Rounded down, it would end before the deadline, and a
        # group that is late would look like one that went away.
        left = math.ceil(max(deadline - time.monotonic(), 0) * 1000) + 1
        try:
            work.wait(timedelta(milliseconds=left))
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise Unanswered(group, f"did not answer in time (rank {self._ranks[group]})") from error
            raise self._gone(group, error) from error

    def _gone(self, group: int, error: RuntimeError) -> Unanswered:
        return Unanswered(group, f"went away (rank {self._ranks[group]}: {str(error).splitlines()[0]})")
