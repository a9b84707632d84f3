"""A pretended accelerator: a device type for torch that is computed on the CPU and finds races between streams.

Operations are computed at once, so that values are right. What happens before what is followed all the same, as on a
device where every stream is as slow as it likes: see `clocks`. Two operations on the same memory in an unknown order
raise a `Race`, and what a copy to pinned memory brings is there only once the host knows that it is over.

torch cannot forget a device type, and much in it changes where there is one. So tests use this in a process of their
own: `alone` makes one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration

from tests.pretend import tensors
from tests.pretend.clocks import (
    Event,
    Race,
    Stream,
    Synchronisation,
    current_stream,
    default,
    pin,
    pinned,
    statistics,
    stream,
    synchronisations,
    synchronize,
)
from tests.ranks import run_processes

__all__ = [
    "IS_POSSIBLE",
    "Event",
    "Race",
    "Stream",
    "Synchronisation",
    "alone",
    "current_stream",
    "device",
    "install",
    "stream",
    "synchronisations",
    "synchronize",
]

# What torch and the engine ask the module of a device.


@contextmanager
def device(device: Any) -> Iterator[None]:
    """Makes a device the current one; there is only one."""
    yield


def default_stream(device: Any = None) -> Stream:
    """The stream on which every thread begins."""
    return default


is_available = is_initialized = lambda: True
device_count = lambda: 1  # noqa: E731
current_device = lambda: 0  # noqa: E731
set_device = manual_seed_all = lambda given: None  # random numbers come from the generator of the CPU
_is_in_bad_fork = lambda: False  # noqa: E731


def memory_allocated(device: Any = None) -> int:
    return statistics.held


def max_memory_allocated(device: Any = None) -> int:
    return statistics.peak


def reset_peak_memory_stats(device: Any = None) -> None:
    statistics.peak = statistics.held


@cache
def install() -> None:
    """Makes the device known to torch in this process, for good."""
    backend_registration._setup_privateuseone_for_python_backend(rename="pretend", backend_module=sys.modules[__name__])
    _library.impl("empty.memory_format", tensors.empty, "PrivateUse1")
    _library.impl("empty_strided", tensors.empty_strided, "PrivateUse1")
    for kernel in ("arange", "arange.start", "arange.start_step"):
        _library.impl(kernel, tensors.arange, "PrivateUse1")
    # Where torch leaves out __torch_dispatch__, as in torch.tensor.
    _library.impl("_copy_from", _copied, "PrivateUse1")
    for name in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided"):
        setattr(torch, name, _pinning(getattr(torch, name)))
    for name in ("new_empty", "new_zeros", "new_full"):
        setattr(torch.Tensor, name, _pinning(getattr(torch.Tensor, name)))
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = _is_pinned  # type: ignore[method-assign, assignment]


IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")

_library = torch.library.Library("aten", "IMPL")


def _copied(source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
    return tensors.copy_across(into, source, non_blocking)


def _pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function, with pinned memory that torch has for accelerators in C++ alone."""

    @wraps(make)
    def making(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        if pin_memory and made.device.type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return pin(made) if pin_memory else made

    return making


def _pin_memory(self: Tensor, device: Any = None) -> Tensor:
    return self if pinned(self) is not None else torch.empty_like(self, pin_memory=True).copy_(self)


def _is_pinned(self: Tensor, device: Any = None) -> bool:
    return pinned(self) is not None


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in a process of its own, which has the device. Skips it where torch is too old to make one."""

    @pytest.mark.skipif(not IS_POSSIBLE, reason="this torch has no device types in pure Python")
    @wraps(test)
    def running(*args: Any, **kwargs: Any) -> None:
        def run(rank: int, world_size: int) -> None:
            install()
            test(*args, **kwargs)

        run_processes(run, 1, timeout=60)

    return running
