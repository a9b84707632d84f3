"""A backend of torch.distributed for the pretended accelerator, which keeps time as NCCL does.

Messages go on a stream of the backend, which waits for the operations of the current stream at the
call. The call does not wait, and received bytes are there when the work is over. ``wait()`` lets
the current stream wait, and no host. In truth gloo carries the bytes.

It is stricter than NCCL: a stream goes on after the messages only if it calls ``wait()``, even where
the host has seen that they are over. And it is an error to let a stream wait for another rank, see
`StreamWaits`.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.pretend import Event, Operation, Stream, current_stream, lock, stream

NAME = "pretend_ccl"


class StreamWaits(Exception):
    """A stream would wait for another rank, and without a bound for everybody who waits for the
    stream.
    """


class Work:
    """Messages that are on their way."""

    def __init__(
        self, carried: Any, over: Callable[[], Any], event: Event, before: "Work | None"
    ) -> None:
        self._carried = carried
        self._over = over
        self._event = event
        self._before = before
        self._arrived = threading.Event()
        self._settled = False
        self._was_over = False
        self._error: RuntimeError | None = None
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        try:
            self._carried.wait()
        except RuntimeError as error:
            self._error = error
        self._arrived.set()

    def _is_over(self) -> bool:
        if self._settled or not self._arrived.is_set():
            return self._settled
        if self._before is None or self._before._is_over():
            if self._error is None:
                self._over()
            self._settled = True
            self._before = None
        return self._settled

    def is_completed(self) -> bool:
        """Tells whether the messages are over; the first query after their end still says no."""
        with lock:
            was_over = self._was_over
            self._was_over = self._is_over()
            return was_over and self._was_over

    def wait(self, timeout: timedelta | None = None) -> bool:
        with lock:
            if not self._is_over():
                raise StreamWaits("a stream would wait for another rank")
            if self._error is not None:
                raise self._error
            current_stream().wait_event(self._event)
            return True


class Communicator(dist.ProcessGroup):
    """The ranks of a process group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._carrier = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = Stream()
        self._last: Work | None = None
        self.aborted = threading.Event()

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        held, event = self._begun("send", tensors, writes=False)
        return self._noted(self._carrier.send([held.clone()], dst, tag), lambda: None, event)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        held, event = self._begun("recv", tensors, writes=True)
        arriving = torch.empty_like(held)
        carried = self._carrier.recv([arriving], src, tag)
        return self._noted(carried, lambda: held.copy_(arriving), event)

    def abort(self) -> None:
        self.aborted.set()

    def _get_backend(self, device: Any) -> "Communicator":
        """Returns itself: since torch 2.14 messages in a batch get their backend from the group."""
        return self

    def _begun(self, name: str, tensors: list[Any], writes: bool) -> tuple[Tensor, Event]:
        (tensor,) = tensors
        assert tensor.device.type == "pretend", "such a backend takes tensors of the device alone"
        assert tensor.is_contiguous(), "such a backend takes contiguous tensors alone"
        assert tensor.numel(), "nothing is sent for nothing"
        with lock:
            self._stream.wait_stream(current_stream())
            with stream(self._stream):
                tensor.memory.touch(Operation.begun(f"{NAME}::{name}"), tensor.held, writes)
            return tensor.held, self._stream.record_event()

    def _noted(self, carried: Any, over: Callable[[], Any], event: Event) -> Work:
        self._last = Work(carried, over, event, self._last)
        return self._last

    def getBackendName(self) -> str:
        return NAME


@cache
def register() -> None:
    """Makes the backend known to torch.distributed in this process, for good. The device must be
    known.
    """
    dist.Backend.register_backend(NAME, Communicator, devices=["pretend"])
