"""Time stamps of inner steps with the resources used by then, and a virtual accelerator. This
module has no dependencies.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Sent(NamedTuple):
    """The total traffic that an interface has sent."""

    bytes: int
    packets: int


def sent_so_far() -> Sent:
    """Reads the counters of the interface that gloo uses; zero if the system has none."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return Sent(0, 0)
    for line in lines:
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return Sent(*map(int, counters.split()[8:10]))
    return Sent(0, 0)


def forget_peak_memory() -> int:
    """Resets the peak. Returns the resident memory of this process in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return peak_memory()


def peak_memory() -> int:
    """Returns the peak of this process's resident memory in bytes; 0 if the system does not report
    it.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


class Stamps:
    """The times at which inner steps began, and the resources used by then: processor time, and
    bytes on the wire.

    Args:
        step_seconds: The step time of a virtual accelerator: forward and backward take at least
            this long, by sleeping for the rest. The step time is then steady even if the processor
            also has other work. Work of a strategy after backward is added; DDP's work during
            backward is hidden.

    Attributes:
        model: The model for a validation, for loops that record one.
        stopped: The seconds for which the clock was stopped.
        memory: The peak resident bytes when the last inner step began.
    """

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.model: Callable[[], Mapping[str, Any]] = dict
        self.stopped = 0.0
        self.memory = 0
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.sent: list[int] = []
        self.packets: list[int] = []

    def begin(self) -> None:
        self.wall.append(time.perf_counter() - self.stopped)
        self.cpu.append(time.process_time())
        sent = sent_so_far()
        self.sent.append(sent.bytes)
        self.packets.append(sent.packets)
        self.memory = peak_memory()

    def pad(self) -> None:
        left = self.wall[-1] + self.stopped + self.step_seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
