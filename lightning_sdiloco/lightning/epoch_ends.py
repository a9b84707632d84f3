"""What worker groups tell each other of their place in an epoch, so that it ends where the data of all has ended.

[Note: the end of an epoch] Nobody knows the length of some loaders before they end. A group without data waits; it
cannot know how far the others get, and must not stop them. So every group says where it is at each meeting: before a
launch, and before whatever else makes all ranks wait for each other, such as a validation or a checkpoint. It sends the
number of the batch and goes on; others read it when they need it. A group without data says at once, in place of the
next meeting, that its data has ended, and waits for what the others say. If the data of all has ended, the epoch ends
after the last batch that any of them has. If not, the others are at a meeting: the group follows them to that batch,
takes part, and waits again. So between two launches a group that has data says nothing and waits for nobody, and every
batch that a group follows through is one in which another one trains.
"""

import time
from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.comm import Topology, Unanswered
from lightning_sdiloco.errors import ExchangeError


class Place(NamedTuple):
    """Where a group is in its epoch."""

    batch: int
    is_end: bool

    def packed(self) -> Tensor:
        """Returns the place as a uint8 tensor."""
        return torch.tensor(self, dtype=torch.int64).view(torch.uint8)

    @staticmethod
    def unpacked(data: Tensor) -> "Place":
        """Reads a place back from its bytes."""
        batch, is_end = data.clone().view(torch.int64).tolist()
        return Place(batch, bool(is_end))


class _Said(NamedTuple):
    posted: Any
    step: int


class EpochEnds:
    """Agrees with the other groups where an epoch ends; see [Note: the end of an epoch]."""

    def __init__(self, topology: Topology, timeout: timedelta) -> None:
        self._topology = topology
        self._timeout = timeout
        self._said: deque[_Said] = deque()
        self._is_open = False
        self._last = 0

    def open(self, batch: int) -> None:
        """Begins an epoch, or goes on with one. From now on places are told."""
        self._is_open = self._topology.num_groups > 1
        self._last = batch

    def reach(self, batch: int, step: int) -> None:
        """Tells the others, once for each batch, that this group is about to wait for all of them."""
        if self._is_open and batch > self._last:
            self._say(Place(batch, is_end=False), step)

    def end(self, batch: int, step: int) -> Place:
        """Tells the others that the data of this group has ended, and waits until they are at their next meeting."""
        self._say(Place(batch, is_end=True), step)
        places = [Place(batch, is_end=True)]
        while self._said:
            places = self._take()
        going_on = [place for place in places if not place.is_end]
        self._is_open = bool(going_on)
        self._last = max(place.batch for place in going_on or places)
        return Place(self._last, is_end=not going_on)

    def collect(self, until: float = float("inf")) -> None:
        """Takes what the others have said in meetings up to an inner step, which they have all made, off the wire."""
        while self._said and self._said[0].step <= until:
            self._take()

    def _say(self, place: Place, step: int) -> None:
        self._last = place.batch
        exchange = self._topology.progress
        self._said.append(_Said(exchange.post([place.packed()] * exchange.num_groups), step))

    def _take(self) -> list[Place]:
        """Returns where all groups were in the meeting that was posted first."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            words = self._topology.progress.collect(self._said.popleft().posted, deadline)
        except Unanswered as error:
            raise ExchangeError(
                f"{error} while worker group {self._topology.group_index}, after batch {self._last} of the epoch,"
                " waited to hear where the others are. The run cannot go on without it. See why that group stopped or"
                " is unreachable; if it was only slow, raise timeout."
            ) from error
        return list(map(Place.unpacked, words))
