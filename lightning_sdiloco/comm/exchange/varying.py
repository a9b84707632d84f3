"""Messages of any size, over an exchange of messages and another one that tells how long they are."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.comm.exchange.base import Exchange

LENGTH_BYTES = 8
"""Bytes that tell a group how long a message to it is."""


class _Posted(NamedTuple):
    lengths: Any
    messages: Any


class VaryingExchange(Exchange[_Posted]):
    """Carries messages whose sizes differ between groups.

    The lengths travel first, over another exchange: who waits for a message knows how long it is when it begins to
    receive. That other exchange counts their bytes.

    Args:
        lengths: Carries the lengths, among other things in the same order in all groups.
        messages: Carries the messages, and nothing else.

    Raises:
        ValueError: If it cannot carry messages of unknown sizes.
    """

    def __init__(self, lengths: Exchange[Any], messages: Exchange[Any]) -> None:
        super().__init__(messages.num_groups)
        if not messages.learns_sizes:
            raise ValueError(
                "The payloads of compression=Threshold(every=...) differ in length, and exchange_backend='nccl' can"
                " only receive what has a size that all ranks know. Leave exchange_backend out for gloo, or choose a"
                " compression whose payloads have one size, such as 'sparse'."
            )
        self.device = messages.device
        self.bytes_sent, self.bytes_received = messages.bytes_sent, messages.bytes_received
        self._lengths, self._messages = lengths, messages

    @override
    def post(self, messages: Sequence[Tensor]) -> _Posted:
        lengths = [torch.tensor([message.numel()], dtype=torch.int64).view(torch.uint8) for message in messages]
        return _Posted(self._lengths.post(lengths), self._messages.post_unexpected(messages))

    @override
    def collect(self, posted: _Posted, deadline: float) -> list[Tensor]:
        sizes = [int(length.view(torch.int64)) for length in self._lengths.collect(posted.lengths, deadline)]
        received = self._messages.collect(self._messages.expect(posted.messages, sizes), deadline)
        self.bytes_sent, self.bytes_received = self._messages.bytes_sent, self._messages.bytes_received
        return received
