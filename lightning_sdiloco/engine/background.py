"""The background: where encoding, transfer, decoding and the outer step run, in the order of the launches.

A flight passes through the same stages as every other one. Each stage takes flights in the order of the launches, so
one flight is encoded while another one is on its way and a third one makes its outer step.
"""

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from lightning_sdiloco.comm import STAGES

First = TypeVar("First")
Second = TypeVar("Second")
Result = TypeVar("Result")

# A thread that ends at the same time as the interpreter may end the process.
_MOMENT = 0.5


class Pending(ABC, Generic[Result]):
    """Stands for work that was started and has its result later."""

    @abstractmethod
    def result(self) -> Result:
        """Waits for the result and returns it, or raises the exception with which the work ended."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether `result` waits for nobody."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """How long the work took, from its start to its end, once it has a result."""


@dataclass(frozen=True)
class Stages(Generic[First, Second, Result]):
    """Holds what is done in each stage, with what the one before it returned."""

    first: Callable[[], First]
    second: Callable[[First], Second]
    third: Callable[[Second], Result]


class Background(ABC):
    """Runs the stages of flights."""

    @abstractmethod
    def start(self, stages: Stages[First, Second, Result]) -> Pending[Result]:
        """Starts a flight. Every stage takes flights one after the other, in the order of their start."""

    @abstractmethod
    def close(self) -> None:
        """Ends the background. What is in it may be lost."""


class ThreadBackground(Background):
    """Runs every stage in a worker thread of its own, beside the training thread."""

    def __init__(self, device: torch.device) -> None:
        work = [_Queue() for _ in range(STAGES)]
        self._work = work[0]
        self._streams = _Streams(device) if device.type != "cpu" else None
        # The threads know the queues and not this object, so that they end with one that nobody closes.
        self._threads = [
            threading.Thread(
                target=_work_off, args=(own, following, self._streams), name="sdiloco-background", daemon=True
            )
            for own, following in zip(work, [*work[1:], None], strict=True)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, self._work.put, None)

    def start(self, stages: Stages[First, Second, Result]) -> Pending[Result]:
        """Hands a flight to the worker threads; see `Background.start`."""
        flight = _Flight(stages, self._streams and self._streams.mark())
        self._work.put(flight)
        return flight

    def close(self) -> None:
        """Lets the worker threads end after what is in their queues, and waits a moment for them to do so."""
        self._work.put(None)
        deadline = time.monotonic() + _MOMENT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Flight(Pending[Result], Generic[First, Second, Result]):
    def __init__(self, stages: Stages[First, Second, Result], ready: Any) -> None:
        self._left: list[Callable[..., Any]] = [stages.first, stages.second, stages.third]
        self._given: tuple[Any, ...] = ()
        self.ready = ready
        self._future: Future[Result] = Future()
        self._started = time.perf_counter()
        self._ended = self._started

    def run(self, settle: Callable[[], None] = lambda: None) -> bool:
        """Runs the next stage, and tells whether there is another one."""
        try:
            result = self._advanced()
            if self._left:
                self._given = (result,)
                return True
            settle()
        except BaseException as error:  # it is raised again where the result is asked for
            self._ended = time.perf_counter()
            self._future.set_exception(error)
        else:
            self._ended = time.perf_counter()
            self._future.set_result(result)
        return False

    def _advanced(self) -> Any:
        # Nothing is kept longer than by the stage that needs it, and nothing when the result is told: the interpreter
        # may end then, and a thread that frees a tensor meanwhile ends the process.
        stage, given, self._given = self._left.pop(0), self._given, ()
        return stage(*given)

    def result(self) -> Result:
        return self._future.result()

    @property
    def is_ready(self) -> bool:
        return self._future.done()

    @property
    def seconds(self) -> float:
        return self._ended - self._started


_Queue = queue.SimpleQueue["_Flight[Any, Any, Any] | None"]


class _Streams:
    """Knows the side stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._side = self._module.Stream(device=device)

    def mark(self) -> Any:
        """Records an event behind everything that the training stream has been given so far."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def run(self, flight: _Flight[Any, Any, Any]) -> bool:
        with self._module.device(self._device), self._module.stream(self._side):
            self._side.wait_event(flight.ready)
            # Waiting here, in a worker thread, lets the training thread use the result without an event.
            return flight.run(settle=self._side.synchronize)


def _work_off(work: _Queue, following: _Queue | None, streams: _Streams | None) -> None:
    while (flight := work.get()) is not None:
        with torch.no_grad():
            goes_on = flight.run() if streams is None else streams.run(flight)
        if goes_on and following is not None:
            following.put(flight)
        del flight
    if following is not None:
        following.put(None)


class InlineBackground(Background):
    """Runs without threads: the first stage when a flight starts, the others when its result is asked for."""

    def __init__(self, flights: "dict[int, list[_Inline[Any]]]", groups: int) -> None:
        self._flights = flights
        self._groups = groups
        self._started = 0

    @staticmethod
    def connect(groups: int) -> "list[Callable[[torch.device], InlineBackground]]":
        """Returns what makes the backgrounds of several groups in this process, in their order."""
        flights: dict[int, list[_Inline[Any]]] = defaultdict(list)
        return [lambda device: InlineBackground(flights, groups) for _ in range(groups)]

    def start(self, stages: Stages[First, Second, Result]) -> Pending[Result]:
        """Runs the first stage at once; see `Background.start`."""
        together = self._flights[self._started]
        flight: _Inline[Result] = _Inline(stages, together)
        together.append(flight)
        if len(together) == self._groups:
            del self._flights[self._started]
        self._started += 1
        return flight

    def close(self) -> None:
        """Does nothing."""


class _Inline(Pending[Result], Generic[Result]):
    def __init__(self, stages: "Stages[Any, Any, Result]", together: "list[_Inline[Any]]") -> None:
        self._first = stages.first()
        self._stages = stages
        self._together = together
        self._second: Future[Any] | None = None

    def result(self) -> Result:
        for flight in self._together:
            flight.run_second()
        assert self._second is not None
        return self._stages.third(self._second.result())

    def run_second(self) -> None:
        if self._second is None:
            self._second = Future()
            try:
                self._second.set_result(self._stages.second(self._first))
            except Exception as error:  # told where the result of this flight is asked for
                self._second.set_exception(error)
            self._first = None

    @property
    def is_ready(self) -> bool:
        return True

    @property
    def seconds(self) -> float:
        return 0.0
