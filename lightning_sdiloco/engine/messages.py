"""What travels between groups: the device's part of the control vector, the payload, and the buffers behind it.

The host's part, the words, goes ahead of that over a group of its own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm import CONTROL_BYTES, HOST_BYTES, Control
from lightning_sdiloco.memory import new_vector

_HEAD_BYTES = CONTROL_BYTES - HOST_BYTES

# What stands for the device's part of a control vector of a group that is no partner.
_UNKNOWN = Control(0, 0, 0, 0, 0, norm_squared=math.nan, changed=0, finite=True).packed()[HOST_BYTES:]


class Received(NamedTuple):
    """Holds what came of all groups, in their order."""

    controls: list[Control]
    payloads: list[Tensor]
    tails: list[Tensor]


def put_together(head: Tensor, payloads: Sequence[Tensor], tail: Sequence[Tensor]) -> list[Tensor]:
    """Makes the messages to all groups, one for those that follow each other with the same payload."""
    messages: list[Tensor] = []
    for group, payload in enumerate(payloads):
        # A payload that goes to all groups becomes one message.
        is_new = group == 0 or payload is not payloads[group - 1]
        messages.append(_joined([head, payload, *tail]) if is_new else messages[-1])
    return messages


def take_apart(words: Sequence[Tensor], messages: Sequence[Tensor], tail_bytes: int) -> Received:
    """Takes apart what came of all groups."""
    heads = [
        message[:_HEAD_BYTES].to(word.device) if message.numel() else _UNKNOWN
        for word, message in zip(words, messages, strict=True)
    ]
    ends = [message.numel() - tail_bytes for message in messages]
    return Received(
        controls=[Control.unpacked(torch.cat(parts)) for parts in zip(words, heads, strict=True)],
        payloads=[message[_HEAD_BYTES:end] for message, end in zip(messages, ends, strict=True)],
        tails=[message[end:] for message, end in zip(messages, ends, strict=True)],
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Joins bytes, in memory that goes back to the system with the flight."""
    whole = new_vector(sum(part.numel() for part in parts), parts[0].device, torch.uint8)
    return torch.cat(list(parts), out=whole)
