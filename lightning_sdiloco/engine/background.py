"""The background: where fragments are compressed, exchanged, averaged and stepped while training goes on.

Work is a generator: what lies between two ``yield`` is a stage. Each stage takes work in the order in which it was
started, so one fragment is encoded while another one is on its way and a third one makes its outer step.
"""

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from lightning_sdiloco.comm import STAGES

Result = TypeVar("Result")
Work = Generator[None, None, Result]

# A thread that ends at the same time as the interpreter may end the process.
_MOMENT = 0.5


class Pending(Generic[Result]):
    """Work that was started and has its result later."""

    def __init__(self, work: Work[Result], ready: Any = None) -> None:
        self._work: Work[Result] | None = work
        self._future: Future[Result] = Future()
        self._started = self._ended = time.perf_counter()
        self.ready = ready

    def advance(self, settle: Callable[[], None] = lambda: None) -> bool:
        """Runs the next stage, and tells whether there is another one."""
        assert self._work is not None, "work that has ended does not go on"
        try:
            with torch.no_grad():
                next(self._work)
        except StopIteration as ended:
            return self._end(ended.value, settle)
        except BaseException as error:  # it is raised again where the result is asked for
            self._work, self._ended = None, time.perf_counter()
            self._future.set_exception(error)
            return False
        return True

    def _end(self, result: Result, settle: Callable[[], None]) -> bool:
        # The frame of the work is gone, and with it all that it held: when the result is told the interpreter may end,
        # and a thread that frees a tensor meanwhile ends the process.
        self._work = None
        try:
            settle()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._ended = time.perf_counter()
            self._future.set_result(result)
        return False

    def result(self) -> Result:
        """Waits for the result and returns it, or raises the exception with which the work ended."""
        return self._future.result()

    @property
    def is_ready(self) -> bool:
        """Whether `result` waits for nobody."""
        return self._future.done()

    @property
    def seconds(self) -> float:
        """How long the work took, from its start to its end, once it has a result."""
        return self._ended - self._started


class Background(ABC):
    """Runs work in stages."""

    @abstractmethod
    def start(self, work: Work[Result]) -> Pending[Result]:
        """Starts work. Every stage takes work in the order of its start."""

    @abstractmethod
    def close(self) -> None:
        """Ends the background. What is in it may be lost."""


class ThreadBackground(Background):
    """Runs every stage in a worker thread of its own, on an accelerator in a side stream."""

    def __init__(self, device: torch.device) -> None:
        queues = [_Queue() for _ in range(STAGES)]
        self._first, self._streams = queues[0], _Streams(device) if device.type != "cpu" else None
        # The threads know the queues and not this object, so that they end with one that nobody closes.
        self._threads = [
            threading.Thread(target=_serve, args=(own, after, self._streams), name="sdiloco-background", daemon=True)
            for own, after in zip(queues, [*queues[1:], None], strict=True)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, self._first.put, None)

    def start(self, work: Work[Result]) -> Pending[Result]:
        """Hands work to the worker threads."""
        pending = Pending(work, self._streams and self._streams.mark())
        self._first.put(pending)
        return pending

    def close(self) -> None:
        """Lets the worker threads end after what is in their queues, and waits a moment for them to do so."""
        self._first.put(None)
        deadline = time.monotonic() + _MOMENT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


_Queue = queue.SimpleQueue["Pending[Any] | None"]


def _serve(own: _Queue, following: _Queue | None, streams: "_Streams | None") -> None:
    """Runs one stage of whatever comes."""
    while (pending := own.get()) is not None:
        goes_on = pending.advance() if streams is None else streams.advance(pending)
        if goes_on and following is not None:
            following.put(pending)
        del pending
    if following is not None:
        following.put(None)


class _Streams:
    """Knows the side stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._side = self._module.Stream(device=device)

    def mark(self) -> Any:
        """Records an event behind everything that the training stream has been given so far."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def advance(self, pending: Pending[Any]) -> bool:
        with self._module.device(self._device), self._module.stream(self._side):
            self._side.wait_event(pending.ready)
            # Waiting here, in a worker thread, lets the training thread use the result without an event.
            return pending.advance(settle=self._side.synchronize)


class InlineBackground(Background):
    """Runs without threads: the first stage when work starts, the others when its result is asked for."""

    def __init__(self, started: "dict[int, list[_Inline[Any]]]", groups: int) -> None:
        self._all, self._groups, self._count = started, groups, 0

    @staticmethod
    def connect(groups: int) -> "list[Callable[[torch.device], InlineBackground]]":
        """Returns what makes the backgrounds of several groups in this process, in their order."""
        started: dict[int, list[_Inline[Any]]] = defaultdict(list)
        return [lambda device: InlineBackground(started, groups) for _ in range(groups)]

    def start(self, work: Work[Result]) -> Pending[Result]:
        """Runs the first stage at once."""
        together = self._all[self._count]
        pending = _Inline(work, together)
        together.append(pending)
        if len(together) == self._groups:
            del self._all[self._count]
        self._count += 1
        return pending

    def close(self) -> None:
        """Does nothing."""


class _Inline(Pending[Result]):
    is_ready, seconds = True, 0.0

    def __init__(self, work: Work[Result], together: "list[_Inline[Any]]") -> None:
        super().__init__(work)
        self._together, self._is_first = together, self.advance()

    def result(self) -> Result:
        # What a group averages others need before they go on.
        for pending in self._together:
            if pending._is_first:
                pending._is_first = False
                pending.advance()
        while not self._future.done():
            self.advance()
        return self._future.result()
