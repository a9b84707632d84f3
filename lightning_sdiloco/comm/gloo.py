"""Process groups of gloo that share one thread.

[Note: one thread for all connections] gloo gives each process group a thread for its connections, which wakes up a
hundred times a second whether or not anything travels: with eight of them that is as much processor time as all flights
of a large model. So the groups share a *device*, as gloo calls the thread and its address: that of the default process
group, unless they listen on another interface. A connection is still that of one process group, so no message waits
behind one of another group.

[Note: seldom woken] That one thread still wakes up a hundred times a second. Linux lets a thread say by how much its
sleeps may be longer than it asked for, and threads take that over from the one that starts them. What arrives wakes it
as before.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SHARED = "sdiloco_gloo"
"""How torch names these process groups."""

# Of `prctl`: a thread's slack, in nanoseconds.
_SET_SLACK, _GET_SLACK = 29, 30
_LONGEST_NS = 90_000_000


class SharedGloo:
    """Makes process groups that share a device."""

    def __init__(self, like: dist.ProcessGroup | None = None) -> None:
        self._devices = devices_of(_gloo_of(like))
        if not hasattr(dist.Backend, SHARED.upper()):
            # The devices that gloo itself knows.
            dist.Backend.register_backend(SHARED, _make, extended_api=True, devices=["cpu", "cuda"])

    def process_group(self, ranks: Sequence[int], timeout: timedelta) -> Any:
        """Makes a process group, as all ranks of the world must at the same time; see ``dist.new_group``."""
        return dist.new_group(list(ranks), timeout=timeout, backend=SHARED, pg_options=self)

    def backend(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """Returns gloo for a process group."""
        gloo: Any = dist.ProcessGroupGloo
        if not self._devices:
            with seldom_woken():
                made = gloo(store, rank, size, timeout=timeout)
            self._devices = devices_of(made)
            return made
        options = gloo._Options()
        options._devices, options._timeout = self._devices, timeout
        return gloo(store, rank, size, options)


@contextmanager
def seldom_woken() -> Iterator[None]:
    """Lets the threads that start inside a ``with`` block sleep longer than they ask for, where it is Linux."""
    if sys.platform != "linux":
        yield
        return
    control = ctypes.CDLL(None).prctl
    before = control(_GET_SLACK, 0, 0, 0, 0)
    control(_SET_SLACK, ctypes.c_ulong(max(before, _LONGEST_NS)), 0, 0, 0)
    try:
        yield
    finally:
        control(_SET_SLACK, ctypes.c_ulong(max(before, 0)), 0, 0, 0)


def devices_of(backend: Any) -> list[Any]:
    """Returns the devices of a process group; none of a torch that does not tell: then each group has its own."""
    return list(getattr(getattr(backend, "options", None), "_devices", ()))


def _gloo_of(process_group: dist.ProcessGroup | None) -> Any:
    """Returns gloo as a process group has it for the host; None if it has another backend there."""
    try:
        return None if process_group is None else process_group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None


def _make(about: Any, shared: SharedGloo) -> Any:
    """Does what torch asks of a backend that is none of its own."""
    return shared.backend(about.store, about.group_rank, about.group_size, about.timeout)
