"""Messages of any size, over an exchange of messages and another one that tells how long they are."""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.comm.exchange.base import Exchange

LENGTH_BYTES = 8
"""Bytes that tell a group how long a message to it is, and how fast its own last message came."""

# Of their bits, those of the length. The others tell the rate, in kB/s.
_LENGTH_BITS, _RATE_BITS = 40, 23
_UNIT = 1000.0


class _Posted(NamedTuple):
    lengths: Any
    messages: Any


class VaryingExchange(Exchange[_Posted]):
    """Carries messages whose sizes differ between groups."""

    def __init__(self, lengths: Exchange[Any], messages: Exchange[Any]) -> None:
        super().__init__(messages.num_groups)
        if not messages.learns_sizes:
            raise ValueError(
                "The payloads of compression=Threshold(every=...) or ByLink(...) differ in length, and"
                " exchange_backend='nccl' can only receive what has a size that all ranks know. Leave exchange_backend"
                " out for gloo, or choose a compression whose payloads have one size, such as 'sparse'."
            )
        self.device = messages.device
        self.bytes_sent, self.bytes_received = messages.bytes_sent, messages.bytes_received
        self._lengths, self._messages = lengths, messages
        # By group, in bytes per second; 0 where that is not known.
        self._received = [0.0] * messages.num_groups

    @override
    def post(self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None) -> _Posted:
        heads = [_packed(message.numel(), rate) for message, rate in zip(messages, self._received, strict=True)]
        return _Posted(self._lengths.post(heads), self._messages.post_unexpected(messages))

    @override
    def collect(self, posted: _Posted, deadline: float) -> list[Tensor]:
        sizes, told = zip(*map(_unpacked, self._lengths.collect(posted.lengths, deadline)), strict=True)
        began = time.perf_counter()
        received = self._messages.collect(self._messages.expect(posted.messages, sizes), deadline)
        self.bytes_sent, self.bytes_received = self._messages.bytes_sent, self._messages.bytes_received
        self.sends_bytes_per_s = _carried(told)
        if self._messages.arrived:
            seconds = [max(at - began, 1e-6) if at else math.inf for at in self._messages.arrived]
            self._received = [size / own for size, own in zip(sizes, seconds, strict=True)]
        return received


def _carried(told: Sequence[float]) -> float:
    """Returns what a link carries to each receiver, given how fast the same message came to each of them."""
    rates = sorted((rate for rate in told if rate), reverse=True)
    return max((number * rate for number, rate in enumerate(rates, 1)), default=0.0) / max(1, len(told) - 1)


def _packed(length: int, rate: float) -> Tensor:
    """Returns length and rate as bytes. A rate that is known is not rounded to 0."""
    assert length < 1 << _LENGTH_BITS, "a message is shorter than a terabyte"
    in_units = min(math.ceil(rate / _UNIT), (1 << _RATE_BITS) - 1)
    return torch.tensor([in_units << _LENGTH_BITS | length], dtype=torch.int64).view(torch.uint8)


def _unpacked(head: Tensor) -> tuple[int, float]:
    word = int(head.view(torch.int64))
    return word & (1 << _LENGTH_BITS) - 1, (word >> _LENGTH_BITS) * _UNIT
