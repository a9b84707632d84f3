"""Every group sends directly to every other one, over gloo process groups."""

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lightning_sdiloco.comm.exchange.base import Exchange, Unanswered
from lightning_sdiloco.comm.pacing import Pacing
from lightning_sdiloco.comm.staging import page_locked, to_device, to_host


class _Transfer(NamedTuple):
    """Both directions between this group and another one; None for one in which nothing goes."""

    group: int
    receiving: dist.Work | None
    sending: dist.Work | None


class _Posted(NamedTuple):
    messages: Sequence[Tensor]
    received: list[Tensor]
    transfers: list[_Transfer]
    failure: Unanswered | None


class DirectExchange(Exchange[_Posted]):
    """Sends from each group to each other one."""

    def __init__(
        self, up: dist.ProcessGroup, down: dist.ProcessGroup, tag: int = 0, pacing: Pacing | None = None
    ) -> None:
        super().__init__(dist.get_world_size(up))
        self._up = up
        self._down = down
        self._tag = tag
        self._pacing = pacing or Pacing()
        self._group = dist.get_rank(up)
        self._ranks = dist.get_process_group_ranks(up)
        self._latest = -1

    def post(self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None) -> _Posted:
        """Starts to send; see `Exchange.post`. Messages on another device are copied to the host first."""
        # The same message for all groups is copied once.
        on_host = {id(message): to_host(message) for message in messages}
        sent = [on_host[id(message)] for message in messages]
        own, device = sent[self._group], messages[self._group].device
        others = self._others()
        self._pacing.prepare([sent[group].numel() for group in others])
        like = [own] * self.num_groups if sizes is None else [own.new_empty(size) for size in sizes]
        received = [own if group == self._group else page_locked(one, device) for group, one in enumerate(like)]
        transfers, failure = [], None
        for group in others:
            try:
                transfers.append(self._transfer(group, sent[group], received[group]))
            except RuntimeError as error:
                # It is raised when the messages are collected, so that all ranks of this group learn of it together.
                failure = failure or self._gone(group, error)
        return _Posted(messages, received, transfers, failure)

    def post_unexpected(self, messages: Sequence[Tensor]) -> _Posted:
        """Starts to send alone; see `Exchange.post_unexpected`. gloo holds a message until it is expected."""
        on_host = {id(message): to_host(message) for message in messages}
        sent = [on_host[id(message)] for message in messages]
        self._pacing.prepare([sent[group].numel() for group in self._others()])
        transfers, failure = [], None
        for group in self._others():
            try:
                transfers.append(_Transfer(group, None, self._sending(group, sent[group])))
            except RuntimeError as error:
                failure = failure or self._gone(group, error)
        return _Posted(messages, sent, transfers, failure)

    def expect(self, posted: _Posted, sizes: Sequence[int]) -> _Posted:
        """Starts to receive; see `Exchange.expect`."""
        own, device = posted.received[self._group], posted.messages[self._group].device
        received = [
            own if group == self._group else page_locked(own.new_empty(size), device)
            for group, size in enumerate(sizes)
        ]
        transfers, failure = [], posted.failure
        # When a message came is seen where it is waited for, so what came last the time before keeps no other waiting.
        for group, _, sending in sorted(posted.transfers, key=lambda transfer: transfer.group == self._latest):
            try:
                transfers.append(_Transfer(group, self._receiving(group, received[group]), sending))
            except RuntimeError as error:
                failure = failure or self._gone(group, error)
        return _Posted(posted.messages, received, transfers, failure)

    def collect(self, posted: _Posted, deadline: float) -> list[Tensor]:
        """Waits for all groups; see `Exchange.collect`."""
        if posted.failure is not None:
            raise posted.failure
        arrived, waited, began = [0.0] * self.num_groups, -1.0, time.perf_counter()
        for group, receiving, _ in posted.transfers:
            if receiving is not None:
                self._wait(receiving, group, deadline)
                before, arrived[group] = max(began, *arrived), time.perf_counter()
                if arrived[group] - before > waited:
                    self._latest, waited = group, arrived[group] - before
        self.arrived = arrived
        for group, _, sending in posted.transfers:
            if sending is not None:
                self._wait(sending, group, deadline)
        self._count(self._group, posted.messages, posted.received)
        own = posted.messages[self._group]
        return [
            own if group == self._group else to_device(part, own.device) for group, part in enumerate(posted.received)
        ]

    def _others(self) -> list[int]:
        return [group for group in range(self.num_groups) if group != self._group]

    def _transfer(self, group: int, sent: Tensor, into: Tensor) -> _Transfer:
        # The receive comes first, so that the other side knows early that this one is ready.
        receiving = self._receiving(group, into) if into.numel() else None
        return _Transfer(group, receiving, self._sending(group, sent) if sent.numel() else None)

    def _receiving(self, group: int, into: Tensor) -> dist.Work:
        back = self._down if group > self._group else self._up
        receiving = dist.irecv(into, group=back, group_src=group, tag=self._tag)
        assert receiving is not None, "this rank belongs to the process group"
        return receiving

    def _sending(self, group: int, sent: Tensor) -> dist.Work:
        to = self._up if group > self._group else self._down
        sending = dist.isend(sent, group=to, group_dst=group, tag=self._tag)
        assert sending is not None, "this rank belongs to the process group"
        return sending

    def _wait(self, work: dist.Work, group: int, deadline: float) -> None:
        # gloo counts whole milliseconds and takes zero for no timeout. Rounded down, the wait would end before the
        # deadline, and a group that is late would look like one that went away.
        left = math.ceil(max(deadline - time.monotonic(), 0) * 1000) + 1
        try:
            work.wait(timedelta(milliseconds=left))
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise Unanswered(group, f"did not answer in time (rank {self._ranks[group]})") from error
            raise self._gone(group, error) from error

    def _gone(self, group: int, error: RuntimeError) -> Unanswered:
        return Unanswered(group, f"went away (rank {self._ranks[group]}: {str(error).splitlines()[0]})")
