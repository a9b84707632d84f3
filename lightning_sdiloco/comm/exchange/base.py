"""What an exchange is: a message goes out to each worker group, and one comes in from each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

Posted = TypeVar("Posted")


class Unanswered(Exception):
    """A worker group did not answer.

    Attributes:
        group: The group; None if it is unknown which of the others it is.
        reason: What happened, as the end of a sentence that starts with the group.
    """

    def __init__(self, group: int | None, reason: str) -> None:
        super().__init__(f"{'one of the other worker groups' if group is None else f'worker group {group}'} {reason}")
        self.group = group
        self.reason = reason


class Exchange(ABC, Generic[Posted]):
    """Carries messages between the worker groups.

    All groups post in the same order, and all messages to one group have the same size, or one that it names when it
    posts. Nothing is sent for an empty one. One thread posts, and one thread collects. `VaryingExchange` carries
    messages of other sizes.

    Attributes:
        learns_sizes: Whether it can send messages whose sizes the receivers learn later.
        num_groups: Number of worker groups.
        device: The device whose messages it carries with the least effort.
        bytes_sent: Bytes that this rank has sent to other groups so far.
        bytes_received: Bytes that this rank has received from other groups so far.
        arrived: When the last messages that were collected came, by group, on the clock of ``time.perf_counter()``; 0
            for one that did not travel, and empty where that is not known.
        sends_bytes_per_s: What this group's own way to each other one carries, as those have told; 0 if not known.
    """

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
        """Starts to send messages, without waiting for anyone.

        Args:
            messages: One uint8 tensor for each group, in their order; the one for this group comes back as it is.
            sizes: The bytes of the message from each group, if they are not those of the message to this one.
        """

    def post_unexpected(self, messages: Sequence[Tensor]) -> Posted:
        """Starts to send messages, of any sizes, to groups that learn later how long they are.

        Whoever posts a message like this posts all of them so: they are received in the order of `expect`.

        Args:
            messages: As for `post`.
        """
        return self.post(messages)

    def expect(self, posted: Posted, sizes: Sequence[int]) -> Posted:
        """Starts to receive what goes with what `post_unexpected` returned, in the thread that collects.

        Args:
            posted: What it returned.
            sizes: The bytes of the message from each group.

        Returns:
            What `collect` takes.
        """
        return posted

    @abstractmethod
    def collect(self, posted: Posted, deadline: float) -> list[Tensor]:
        """Waits for the messages of all groups.

        Args:
            posted: What `post` returned. What was posted first is collected first.
            deadline: When to give up, on the clock of ``time.monotonic()``.

        Returns:
            What all groups, this one included, sent to this group, in the order of the groups.

        Raises:
            Unanswered: If a group went away, or does not answer by the deadline.
        """

    def _count(self, own: int, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        self.bytes_sent += sum(message.numel() for group, message in enumerate(sent) if group != own)
        self.bytes_received += sum(message.numel() for group, message in enumerate(received) if group != own)
