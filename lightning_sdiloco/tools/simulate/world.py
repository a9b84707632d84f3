"""Lets groups in one process reach each other: collectives and an exchange that give others their turns."""

import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lightning_sdiloco.comm import Communicator, Exchange, Topology
from lightning_sdiloco.engine import InlineBackground

Until = Callable[[Callable[[], bool]], None]


def simulated_topologies(groups: int, until: Until) -> list[Topology]:
    """Makes the topologies of worker groups of one rank each, whose threads take turns."""
    tables: dict[int, _Meeting] = defaultdict(_Meeting)
    words, places, sent, sent_on = ([0] * groups for _ in range(4))
    return [
        replace(
            topology,
            world=SimulatedWorld(topology.group_index, groups, tables, until),
            control=TurnTakingExchange(topology.control, topology.group_index, words, until),
            progress=TurnTakingExchange(topology.progress, topology.group_index, places, until),
            exchange=TurnTakingExchange(topology.exchange, topology.group_index, sent, until),
            second_hop=TurnTakingExchange(topology.second_hop, topology.group_index, sent_on, until),
            # Each alone: what another group has to do first, it does when it has its turn.
            background=InlineBackground.connect(1)[0],
        )
        for topology in Topology.simulated(groups)
    ]


@dataclass
class _Meeting:
    """One collective: what each rank brought to it."""

    brought: dict[int, tuple[str, Any]] = field(default_factory=dict)
    left: int = 0


class SimulatedWorld(Communicator):
    """All ranks, which are threads of this process."""

    def __init__(self, rank: int, size: int, meetings: dict[int, _Meeting], until: Until) -> None:
        super().__init__()
        self.size = size
        self._rank = rank
        self._meetings = meetings
        self._until = until
        self._number = 0

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [part.clone() for part in self._meet("gather tensors", tensor.detach().clone())]

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `Communicator.all_gather_object`. As between processes, everyone gets a copy."""
        return [pickle.loads(data) for data in self._meet("gather objects", pickle.dumps(value))]

    def broadcast(self, tensor: Tensor) -> None:
        parts = self._meet("broadcast", tensor.detach().clone() if self._rank == 0 else None)
        tensor.copy_(parts[0])

    def _meet(self, what: str, value: Any) -> list[Any]:
        meeting = self._meetings[self._number]
        meeting.brought[self._rank] = what, value
        self._until(lambda: len(meeting.brought) == self.size)
        _require_the_same([meeting.brought[rank][0] for rank in range(self.size)])
        meeting.left += 1
        if meeting.left == self.size:
            del self._meetings[self._number]
        self._number += 1
        return [meeting.brought[rank][1] for rank in range(self.size)]


def _require_the_same(asked: list[str]) -> None:
    if len(set(asked)) > 1:
        told = ", ".join(f"group {rank}: {what}" for rank, what in enumerate(asked))
        raise RuntimeError(
            f"The worker groups are at different points of the program ({told}). Real processes would wait for each"
            " other until the timeout."
        )


class TurnTakingExchange(Exchange[tuple[int, Any]]):
    """An exchange that lets the other groups have their turns until all have posted."""

    def __init__(self, exchange: Exchange[Any], group: int, sent: list[int], until: Until) -> None:
        super().__init__(exchange.num_groups)
        self._exchange = exchange
        self._group = group
        self._sent = sent
        self._until = until

    def post(self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None) -> tuple[int, Any]:
        self._sent[self._group] += 1
        return self._sent[self._group], self._exchange.post(messages, sizes)

    def collect(self, posted: tuple[int, Any], deadline: float) -> list[Tensor]:
        number, sent = posted
        self._until(lambda: min(self._sent) >= number)
        messages = self._exchange.collect(sent, deadline)
        self.bytes_sent, self.bytes_received = self._exchange.bytes_sent, self._exchange.bytes_received
        return messages
