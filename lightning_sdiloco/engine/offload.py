"""Where outer state rests between a landing and the next launch: on the device, or in the memory of the host."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.comm.staging import page_locked, to_device, to_host


class Coming(ABC):
    """A tensor on its way to the device."""

    @abstractmethod
    def arrived(self) -> Tensor:
        """The tensor, for the current stream of the calling thread. It must not be written to."""


class Home(ABC):
    """Keeps tensors of a device. What is kept is never written to.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def kept(self, values: Tensor) -> Tensor:
        """What is kept of a tensor, which nobody writes to from here on. May wait for the device.

        Args:
            values: A tensor on the device, or one that is kept already.
        """

    @abstractmethod
    def copied(self, values: Tensor) -> Tensor:
        """What is kept of a copy. May wait for the device.

        Args:
            values: A tensor on any device.
        """

    @abstractmethod
    def fetched(self, kept: Tensor) -> Tensor:
        """What is kept, on the device; it may be the same tensor."""

    @abstractmethod
    def working_copy(self, kept: Tensor) -> Tensor:
        """What is kept, in memory of the device that may be written to."""

    @abstractmethod
    def coming(self, kept: Tensor) -> Coming:
        """Starts to bring what is kept to the device, beside what the calling thread has given the device so far."""


class _There(Coming):
    def __init__(self, values: Tensor) -> None:
        self._values = values

    @override
    def arrived(self) -> Tensor:
        return self._values


class OnDevice(Home):
    """The device itself."""

    @override
    def kept(self, values: Tensor) -> Tensor:
        return values

    @override
    def copied(self, values: Tensor) -> Tensor:
        return values.detach().to(self.device, copy=True)

    @override
    def fetched(self, kept: Tensor) -> Tensor:
        return kept

    @override
    def working_copy(self, kept: Tensor) -> Tensor:
        return kept.clone()

    @override
    def coming(self, kept: Tensor) -> Coming:
        return _There(kept)


class OnHost(Home):
    """Page-locked memory of the host: the device holds what is in flight, and what is about to be launched.

    Args:
        device: An accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copies = torch.get_device_module(device).Stream(device=device)

    @override
    def kept(self, values: Tensor) -> Tensor:
        return to_host(values)

    @override
    def copied(self, values: Tensor) -> Tensor:
        values = values.detach()
        return page_locked(values, self.device).copy_(values) if values.device.type == "cpu" else to_host(values)

    @override
    def fetched(self, kept: Tensor) -> Tensor:
        return to_device(kept, self.device)

    @override
    def working_copy(self, kept: Tensor) -> Tensor:
        return to_device(kept, self.device)

    @override
    def coming(self, kept: Tensor) -> Coming:
        return _OnItsWay(kept, self.device, self._copies)


class _OnItsWay(Coming):
    """A copy on a stream of its own, in memory of the stream that asked for it."""

    def __init__(self, kept: Tensor, device: torch.device, copies: Any) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._values = torch.empty(kept.shape, dtype=kept.dtype, device=device)
        # What had this memory before may still be at work in the stream that asks.
        copies.wait_stream(self._module.current_stream(device))
        with self._module.stream(copies):
            self._values.copy_(kept, non_blocking=True)
            self._there = self._module.Event()
            self._there.record(copies)
        # If nobody takes it, its memory must not go to another before the copy is done.
        self._values.record_stream(copies)

    @override
    def arrived(self) -> Tensor:
        self._module.current_stream(self._device).wait_event(self._there)
        return self._values


def home_on(device: torch.device, offload: bool | str) -> Home:
    """Chooses the home of the outer state. On a CPU device and host are the same memory.

    Args:
        device: The device of the shards.
        offload: Whether it is the host; ``"auto"`` where the device is CUDA.
    """
    wanted = device.type == "cuda" if offload == "auto" else offload
    return OnHost(device) if wanted and device.type != "cpu" else OnDevice(device)
