"""What an exchange is: a message goes out to all worker groups, and those of all groups come back."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

Posted = TypeVar("Posted")


class Unanswered(Exception):
    """A worker group did not answer.

    Attributes:
        group: The group.
        reason: What happened, as the end of a sentence that starts with the group.
    """

    def __init__(self, group: int, reason: str) -> None:
        super().__init__(f"worker group {group} {reason}")
        self.group = group
        self.reason = reason


class Exchange(ABC, Generic[Posted]):
    """Carries messages between the worker groups.

    All groups post messages of the same size in the same order. An exchange belongs to one thread.

    Attributes:
        groups: Number of worker groups.
        bytes_sent: Bytes that this rank has sent to other groups so far.
        bytes_received: Bytes that this rank has received from other groups so far.
    """

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.bytes_sent = 0
        self.bytes_received = 0

    @abstractmethod
    def post(self, message: Tensor) -> Posted:
        """Starts to send a uint8 message to all groups, without waiting for them."""

    @abstractmethod
    def collect(self, posted: Posted, deadline: float) -> list[Tensor]:
        """Waits for the messages of all groups.

        Args:
            posted: What `post` returned. Messages are collected in the order in which they were posted.
            deadline: When to give up, on the clock of ``time.monotonic()``.

        Returns:
            The messages of all groups, in the order of the groups, that of this group included.

        Raises:
            Unanswered: If a group does not answer by then, or went away.
        """

    def _count(self, message: Tensor) -> None:
        others = (self.groups - 1) * message.numel()
        self.bytes_sent += others
        self.bytes_received += others
