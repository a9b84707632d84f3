"""Worker groups simulated in one process: messages wait in a table until all groups have taken them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from lightning_sdiloco.comm.exchange.base import Exchange, Unanswered


@dataclass
class _Slot:
    messages: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    collected: int = 0


class _Posted(NamedTuple):
    number: int
    messages: Sequence[Tensor]


class InProcessExchange(Exchange[_Posted]):
    """Carries messages between worker groups that all live in one process; there is one such exchange for each.

    Collecting before all groups have posted is an error rather than a wait: there is nobody to wait for.

    Examples:
        >>> import torch
        >>> one, other = InProcessExchange.connect(2)
        >>> posted = [group.post([torch.tensor([i], dtype=torch.uint8)] * 2) for i, group in enumerate((one, other))]
        >>> [message.tolist() for message in one.collect(posted[0], deadline=0.0)]
        [[0], [1]]
    """

    def __init__(self, group: int, groups: int, table: dict[int, _Slot]) -> None:
        super().__init__(groups)
        self._group = group
        self._table = table
        self._posted = 0

    @staticmethod
    def connect(groups: int) -> list["InProcessExchange"]:
        """Makes the exchanges of all groups, in their order."""
        table: dict[int, _Slot] = defaultdict(_Slot)
        return [InProcessExchange(group, groups, table) for group in range(groups)]

    def post(self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None) -> _Posted:
        """Puts the messages on the table; see `Exchange.post`."""
        posted = _Posted(self._posted, messages)
        self._table[posted.number].messages[self._group] = messages
        self._posted += 1
        return posted

    def collect(self, posted: _Posted, deadline: float) -> list[Tensor]:
        """Takes the messages of all groups from the table; see `Exchange.collect`."""
        slot = self._table[posted.number]
        for group in range(self.num_groups):
            if group not in slot.messages:
                raise Unanswered(group, "has not launched yet: all groups must launch before one of them lands")
        slot.collected += 1
        if slot.collected == self.num_groups:
            del self._table[posted.number]
        received = [slot.messages[group][self._group] for group in range(self.num_groups)]
        self._count(self._group, posted.messages, received)
        return received
