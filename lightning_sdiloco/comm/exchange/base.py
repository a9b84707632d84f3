"""What an exchange is: a message goes out to each worker group, and one comes in from each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

Posted = TypeVar("Posted")


class Unanswered(Exception):
    """A worker group did not answer."""

    def __init__(self, group: int | None, reason: str) -> None:
        super().__init__(f"{'one of the other worker groups' if group is None else f'worker group {group}'} {reason}")
        self.group = group
        self.reason = reason


class Exchange(ABC, Generic[Posted]):
    """Carries messages between the worker groups."""

    learns_sizes = True

    def __init__(self, groups: int) -> None:
        self.num_groups = groups
        self.device = torch.device("cpu")
        self.bytes_sent = 0
        self.bytes_received = 0
        self.arrived: Sequence[float] = ()
        self.sends_bytes_per_s = 0.0

    @abstractmethod
    def post(self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None) -> Posted:
        """Starts to send messages, without waiting for anyone."""

    def post_unexpected(self, messages: Sequence[Tensor]) -> Posted:
        """Starts to send messages, of any sizes, to groups that learn later how long they are."""
        return self.post(messages)

    def expect(self, posted: Posted, sizes: Sequence[int]) -> Posted:
        """Starts to receive what goes with what `post_unexpected` returned, in the thread that collects."""
        return posted

    @abstractmethod
    def collect(self, posted: Posted, deadline: float) -> list[Tensor]:
        """Waits for the messages of all groups."""

    def _count(self, own: int, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        self.bytes_sent += sum(message.numel() for group, message in enumerate(sent) if group != own)
        self.bytes_received += sum(message.numel() for group, message in enumerate(received) if group != own)
