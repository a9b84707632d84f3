"""Process groups of gloo that share one thread.

[Note: one thread for all connections] gloo gives each process group a thread for its connections, which wakes up a
hundred times a second whether or not anything travels: with eight of them that is as much processor time as all flights
of a large model. So the groups share a *device*, as gloo calls the thread and its address: that of the default process
group, unless they listen on another interface. A connection is still that of one process group, so no message waits
behind one of another group.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SHARED = "sdiloco_gloo"
"""How torch names these process groups."""


class SharedGloo:
    """Makes process groups that share a device.

    Args:
        like: A process group whose device they share; None to share that of the first one.
    """

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
            made = gloo(store, rank, size, timeout=timeout)
            self._devices = devices_of(made)
            return made
        options = gloo._Options()
        options._devices, options._timeout = self._devices, timeout
        return gloo(store, rank, size, options)


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
