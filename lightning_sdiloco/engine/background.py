"""Processes flights in the background while training continues.

A piece of work is a generator, and the code between two ``yield`` statements is a stage. Each stage
processes work in the order in which it was started. One fragment can therefore be encoded while a
second is in transit and a third takes its outer step.
"""

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar, cast

import torch

from lightning_sdiloco.comm.topology import STAGES

Result = TypeVar("Result")
Work = Generator[None, None, Result]

# A thread that ends while the interpreter is shutting down may crash the process.
_LONGEST_WAIT_S = 0.5


class Pending(Generic[Result]):
    """Work in progress and its eventual result.

    Attributes:
        ready: The accelerator event that the work must wait for, or None on a CPU.
    """

    def __init__(self, work: Work[Result], ready: Any = None) -> None:
        self.ready = ready
        self._work: Work[Result] | None = work
        self._result: Any = None
        self._failure: BaseException | None = None
        self._is_running = threading.Lock()
        self._is_running.acquire()
        self._started = time.perf_counter()
        self._ended = self._started

    def advance(self, settle: Callable[[], None] | None = None) -> bool:
        """Runs the next stage and returns whether another stage follows.

        The caller must disable gradient recording. After the last stage, ``settle`` waits for the
        device.
        """
        assert self._work is not None, "work that has ended cannot advance"
        try:
            next(self._work)
            return True
        except StopIteration as ended:
            self._result = ended.value
        except BaseException as error:  # it is re-raised when the result is requested
            self._failure = error
        # This frees the frame of the work and everything in it. Once the result is available, the
        # interpreter may shut down, and a thread that frees a tensor during shutdown crashes the
        # process.
        self._work = None
        try:
            if settle is not None and self._failure is None:
                settle()
        except BaseException as error:
            self._failure = error
        self._ended = time.perf_counter()
        self._is_running.release()
        return False

    def result(self) -> Result:
        """Waits for the result and returns it, or raises the exception that ended the work."""
        with self._is_running:
            pass
        if self._failure is not None:
            raise self._failure
        return cast(Result, self._result)

    @property
    def is_ready(self) -> bool:
        return not self._is_running.locked()

    @property
    def seconds(self) -> float:
        return self._ended - self._started


class Background(ABC):
    @abstractmethod
    def start(self, work: Work[Result]) -> Pending[Result]:
        """Starts work. Each stage processes items in the order in which they were started."""

    @abstractmethod
    def close(self) -> None: ...


_Queue = queue.SimpleQueue["Pending[Any] | None"]


class ThreadBackground(Background):
    """Runs each stage in a separate worker thread, using a side stream on an accelerator."""

    def __init__(self, device: torch.device) -> None:
        queues = [_Queue() for _ in range(STAGES)]
        following_queues = [*queues[1:], None]
        self._first = queues[0]
        self._streams = _Streams(device) if device.type != "cpu" else None
        self._threads: list[threading.Thread] = []
        for incoming, following in zip(queues, following_queues, strict=True):
            # The threads refer to the queues rather than to this object, so they end even if it is
            # never closed.
            thread = threading.Thread(
                target=_serve,
                args=(incoming, following, self._streams),
                name="sdiloco-background",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        weakref.finalize(self, self._first.put, None)

    def start(self, work: Work[Result]) -> Pending[Result]:
        pending = Pending(work, self._streams and self._streams.mark())
        self._first.put(pending)
        return pending

    def close(self) -> None:
        """Stops the worker threads once their queues are empty, and waits briefly for them."""
        self._first.put(None)
        deadline = time.monotonic() + _LONGEST_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _serve(incoming: _Queue, following: _Queue | None, streams: "_Streams | None") -> None:
    torch.set_grad_enabled(False)
    while (pending := incoming.get()) is not None:
        has_next_stage = pending.advance() if streams is None else streams.advance(pending)
        if has_next_stage and following is not None:
            following.put(pending)
        del pending
    if following is not None:
        following.put(None)


class _Streams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._side = self._module.Stream(device=device)

    def mark(self) -> Any:
        """Records an event after all work queued so far on the training stream."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def advance(self, pending: Pending[Any]) -> bool:
        with self._module.device(self._device), self._module.stream(self._side):
            self._side.wait_event(pending.ready)
            # The worker thread waits for the side stream here so that the training thread can use
            # the result without an event.
            return pending.advance(settle=self._side.synchronize)


class InlineBackground(Background):
    """Runs the work of multiple groups in one process without threads.

    The first stage runs when the work starts. The remaining stages run when the result is
    requested.
    """

    def __init__(self, started: "dict[int, list[_InlinePending[Any]]]", groups: int) -> None:
        self._started = started
        self._groups = groups
        self._count = 0

    @staticmethod
    def connect(groups: int) -> "list[Callable[[torch.device], InlineBackground]]":
        """Returns a constructor for each group's background, in the order of the groups."""
        started: dict[int, list[_InlinePending[Any]]] = defaultdict(list)
        return [lambda device: InlineBackground(started, groups) for _ in range(groups)]

    def start(self, work: Work[Result]) -> Pending[Result]:
        of_all_groups = self._started[self._count]
        pending = _InlinePending(work, of_all_groups)
        of_all_groups.append(pending)
        if len(of_all_groups) == self._groups:
            del self._started[self._count]
        self._count += 1
        return pending

    def close(self) -> None: ...


class _InlinePending(Pending[Result]):
    is_ready = True
    seconds = 0.0

    def __init__(self, work: Work[Result], of_all_groups: "list[_InlinePending[Any]]") -> None:
        super().__init__(work)
        self._of_all_groups = of_all_groups
        with torch.no_grad():
            self._has_second_stage = self.advance()

    @torch.no_grad()
    def result(self) -> Result:
        # Other groups need the part of the mean that this group computes.
        for pending in self._of_all_groups:
            if pending._has_second_stage:
                pending._has_second_stage = False
                pending.advance()
        while self._work is not None:
            self.advance()
        return super().result()
