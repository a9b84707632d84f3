"""Runs worker groups as alternating threads and connects them."""

import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_sdiloco.comm.communicator import Communicator, PlainValue, Value
from lightning_sdiloco.comm.exchange import AnyExchange, Exchange
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.background import InlineBackground
from lightning_sdiloco.engine.checkpoint import random_state, set_random_state
from lightning_sdiloco.engine.restart import State

Result = TypeVar("Result")


class Stopped(BaseException):
    """Stops a thread because another thread has failed or Ctrl-C was pressed."""


_State = tuple[State, int]
"""A thread's random state and rank. A process stores only one of each."""


def _restore(state: _State) -> None:
    set_random_state(state[0])
    rank_zero_only.rank = state[1]  # type: ignore[attr-defined]


class Turns(Generic[Result]):
    """Runs functions in alternating threads; see [Note: one thread at a time]."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        # The condition for which each thread waits; None if the thread has ended.
        self._waits: list[Callable[[], bool] | None] = [lambda: True] * count
        self._turn: int | None = None  # the thread that may run
        self._local = threading.local()  # `seat`: the number of this thread
        self._away = [0.0] * count  # seconds for which each thread was not running
        self._results: dict[int, Result] = {}
        self._failure: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], Result]]) -> list[Result]:
        """Runs one function per thread, each starting from the caller's random state."""
        state = random_state(), 0
        threads = [
            threading.Thread(
                target=self._live, args=(seat, function, state), name=f"group {seat}", daemon=True
            )
            for seat, function in enumerate(functions)
        ]
        try:
            self._turn = 0
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C
            self._fail(error)
            for thread in threads:
                thread.join()
            raise
        finally:
            _restore(state)
        if self._failure is not None:
            raise self._failure
        return [self._results[seat] for seat in range(len(functions))]

    def until(self, ready: Callable[[], bool]) -> None:
        """Passes the turn to other threads until a condition is true."""
        self._go_on()
        if ready():
            return
        seat = self._local.seat
        left = time.perf_counter()
        state = random_state(), seat
        self._waits[seat] = ready
        self._pass_on(seat)
        self._wait_for(seat)
        _restore(state)
        self._away[seat] += time.perf_counter() - left

    def seconds(self) -> float:
        """Returns the time on this thread's clock, which stops while other threads run."""
        return time.perf_counter() - self._away[self._local.seat]

    def _live(self, seat: int, function: Callable[[], Result], state: _State) -> None:
        """Runs a function in its thread from the first turn until the end."""
        self._local.seat = seat
        started = time.perf_counter()
        try:
            self._wait_for(seat)
            self._away[seat] = time.perf_counter() - started
            _restore((state[0], seat))
            self._results[seat] = function()
        except BaseException as error:
            self._fail(error)
        self._waits[seat] = None
        self._pass_on(seat)

    def _wait_for(self, seat: int) -> None:
        """Blocks this thread until its turn or until another thread has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == seat or self._failure is not None)
        self._go_on()

    def _pass_on(self, seat: int) -> None:
        """Passes the turn to the next thread that can continue. Fails if all threads wait."""
        waiting = {number: ready for number, ready in enumerate(self._waits) if ready is not None}
        order = sorted(waiting, key=lambda number: (number <= seat, number))
        chosen = next((number for number in order if waiting[number]()), None)
        if chosen is None and waiting:
            self._fail(
                RuntimeError(
                    "The following worker groups are waiting for groups that have ended or are"
                    f" waiting at a different point: {', '.join(map(str, waiting))}. The groups do"
                    " not take the same steps. Real processes would wait until the timeout."
                )
            )
        with self._changed:
            self._turn = chosen
            self._changed.notify_all()

    def _go_on(self) -> None:
        if self._failure is not None:
            raise Stopped

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


Until = Callable[[Callable[[], bool]], None]


def simulated_topologies(groups: int, until: Until) -> list[Topology]:
    """Creates the topologies of worker groups with one rank each, in alternating threads."""
    meetings: dict[int, _Meeting] = defaultdict(_Meeting)
    # The number of messages that each group has posted on each exchange, by engine.
    controls, progresses, payloads, second_hops = (
        defaultdict[int, list[int]](lambda: [0] * groups) for _ in range(4)
    )
    topologies = []
    for topology in Topology.simulated(groups):
        group = topology.group_index
        in_turns = replace(
            topology,
            world=SimulatedWorld(group, groups, meetings, until),
            control=TurnTakingExchange(topology.control, group, controls, until),
            progress=TurnTakingExchange(topology.progress, group, progresses, until),
            exchange=TurnTakingExchange(topology.exchange, group, payloads, until),
            second_hop=TurnTakingExchange(topology.second_hop, group, second_hops, until),
            # Flights run inline: another group does its part in its own turn.
            background=InlineBackground.connect(1)[0],
        )
        topologies.append(in_turns)
    return topologies


@dataclass
class _Meeting:
    brought: dict[int, tuple[str, PlainValue]] = field(default_factory=dict)
    left: int = 0


class SimulatedWorld(Communicator):
    """The communicator of all groups, in which each operation is a meeting of all threads."""

    def __init__(self, rank: int, size: int, meetings: dict[int, _Meeting], until: Until) -> None:
        super().__init__()
        self.size = size
        self._rank = rank
        self._meetings = meetings
        self._until = until
        self._number = 0

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [part.clone() for part in self._meet("gather tensors", tensor.detach().clone())]

    def all_gather_object(self, value: Value) -> list[Value]:
        pickles = self._meet("gather objects", pickle.dumps(value))
        return list(map(pickle.loads, pickles))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        parts: list[PlainValue] = self._meet(
            "broadcast", tensor.detach().clone() if self._rank == source else None
        )
        tensor.copy_(parts[source])

    def _meet(self, operation: str, value: Value) -> list[Value]:
        """Waits until all groups have provided a value and returns the values in rank order."""
        meeting = self._meetings[self._number]
        meeting.brought[self._rank] = operation, value
        self._until(lambda: len(meeting.brought) == self.size)
        operations = [meeting.brought[rank][0] for rank in range(self.size)]
        if len(set(operations)) > 1:
            points = ", ".join(f"group {rank}: {name}" for rank, name in enumerate(operations))
            raise RuntimeError(
                f"The worker groups are at different points in the program ({points}). Real"
                " processes would wait for each other until the timeout."
            )
        meeting.left += 1
        if meeting.left == self.size:
            del self._meetings[self._number]
        self._number += 1
        return [meeting.brought[rank][1] for rank in range(self.size)]


class TurnTakingExchange(Exchange[tuple[int, object]]):
    """An exchange in which each group passes the turn to other groups until all have posted."""

    bytes_sent: int
    bytes_received: int

    def __init__(
        self,
        exchange: AnyExchange,
        group: int,
        posted_by_engine: dict[int, list[int]],
        until: Until,
        engine: int = 0,
    ) -> None:
        super().__init__(exchange.num_groups)
        self._exchange = exchange
        self._group = group
        # The number of messages that each group has posted.
        self._posted_by_engine = posted_by_engine
        self._posted = posted_by_engine[engine]
        self._until = until

    def channel(self, engine: int) -> "TurnTakingExchange":
        exchange = self._exchange.channel(engine)
        return TurnTakingExchange(
            exchange, self._group, self._posted_by_engine, self._until, engine
        )

    def post(
        self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None
    ) -> tuple[int, object]:
        self._posted[self._group] += 1
        return self._posted[self._group], self._exchange.post(messages, sizes)

    def collect(
        self, posted: tuple[int, object], deadline: float, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        number, transfer = posted
        self._until(lambda: min(self._posted) >= number)
        messages = self._exchange.collect(transfer, deadline, sizes)
        self.bytes_sent = self._exchange.bytes_sent
        self.bytes_received = self._exchange.bytes_received
        return messages
