"""The background lane: where encoding, transfer, decoding and the outer step run, in the order of the launches."""

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

Sent = TypeVar("Sent")
Result = TypeVar("Result")


class Pending(ABC, Generic[Result]):
    """Work that was started and has a result later."""

    @abstractmethod
    def result(self) -> Result:
        """Waits for the result, or raises the exception with which the work ended."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """How long the work took, from its start to its end, once it has a result."""


class Lane(ABC):
    """Runs the two halves of a flight: sending, then receiving."""

    @abstractmethod
    def start(self, send: Callable[[], Sent], receive: Callable[[Sent], Result]) -> Pending[Result]:
        """Starts a flight. Flights run one after the other, in the order of their start."""

    @abstractmethod
    def close(self) -> None:
        """Ends the lane without waiting for what is in it."""


class ThreadLane(Lane):
    """One worker thread beside the training thread.

    The thread is a daemon: a peer that never answers must not keep the process from ending.

    Args:
        device: The device of the tensors. On an accelerator the thread works on a stream of its own, which first waits
            for what the training stream had enqueued when the flight started.
    """

    def __init__(self, device: torch.device) -> None:
        self._work: queue.SimpleQueue[_Flight[Any, Any] | None] = queue.SimpleQueue()
        self._streams = _Streams(device) if device.type != "cpu" else None
        # The thread knows the queue and not the lane, so that it ends with a lane that nobody closes.
        threading.Thread(target=_work_off, args=(self._work, self._streams), name="sdiloco-lane", daemon=True).start()
        weakref.finalize(self, self._work.put, None)

    def start(self, send: Callable[[], Sent], receive: Callable[[Sent], Result]) -> Pending[Result]:
        """Hands a flight to the worker thread; see `Lane.start`."""
        flight = _Flight(send, receive, self._streams and self._streams.mark())
        self._work.put(flight)
        return flight

    def close(self) -> None:
        """Lets the worker thread end after what is in its queue."""
        self._work.put(None)


class _Flight(Pending[Result], Generic[Sent, Result]):
    def __init__(self, send: Callable[[], Sent], receive: Callable[[Sent], Result], ready: Any) -> None:
        self._send = send
        self._receive = receive
        self.ready = ready
        self._future: Future[Result] = Future()
        self._started = time.perf_counter()
        self._ended = self._started

    def run(self, settle: Callable[[], None] = lambda: None) -> None:
        try:
            result = self._receive(self._send())
            settle()
        except BaseException as error:  # it is raised again where the result is asked for
            self._ended = time.perf_counter()
            self._future.set_exception(error)
        else:
            self._ended = time.perf_counter()
            self._future.set_result(result)

    def result(self) -> Result:
        return self._future.result()

    @property
    def seconds(self) -> float:
        return self._ended - self._started


class _Streams:
    """The side stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._side = self._module.Stream(device=device)

    def mark(self) -> Any:
        """An event after everything that the training stream has been given so far."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def run(self, flight: _Flight[Any, Any]) -> None:
        with self._module.device(self._device), self._module.stream(self._side):
            self._side.wait_event(flight.ready)
            # Waiting here, in the worker thread, lets the training thread use the result without an event.
            flight.run(settle=self._side.synchronize)


def _work_off(work: "queue.SimpleQueue[_Flight[Any, Any] | None]", streams: _Streams | None) -> None:
    while (flight := work.get()) is not None:
        with torch.no_grad():
            if streams is None:
                flight.run()
            else:
                streams.run(flight)
        del flight


class InlineLane(Lane):
    """No thread: a flight is sent when it starts and received when its result is asked for.

    Args:
        device: Of no effect; there for `ThreadLane`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, send: Callable[[], Sent], receive: Callable[[Sent], Result]) -> Pending[Result]:
        """Sends at once; see `Lane.start`."""
        return _Inline(send(), receive)

    def close(self) -> None:
        """Does nothing."""


class _Inline(Pending[Result], Generic[Sent, Result]):
    def __init__(self, sent: Sent, receive: Callable[[Sent], Result]) -> None:
        self._sent = sent
        self._receive = receive

    def result(self) -> Result:
        return self._receive(self._sent)

    @property
    def seconds(self) -> float:
        return 0.0
