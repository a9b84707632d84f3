"""Where outer state rests between a landing and the next launch: on the device, or offloaded to the host."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.comm import page_locked, to_device, to_host


class Prefetched(ABC):
    """Stands for a tensor on its way to the device."""

    @abstractmethod
    def result(self) -> Tensor:
        """Returns the tensor, for the current stream of the calling thread. It must not be written to."""


class OuterStorage(ABC):
    """Stores tensors of a device. A stored tensor is never written to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def store(self, values: Tensor) -> Tensor:
        """Stores a tensor to which nobody writes from here on. May wait for the device."""

    @abstractmethod
    def store_copy(self, values: Tensor) -> Tensor:
        """Stores a copy of a tensor. May wait for the device."""

    @abstractmethod
    def load(self, stored: Tensor) -> Tensor:
        """Returns a stored tensor on the device, perhaps the same tensor. It must not be written to."""

    @abstractmethod
    def prefetch(self, stored: Tensor) -> Prefetched:
        """Starts to load a stored tensor, beside what the calling thread has given the device so far."""


class _Here(Prefetched):
    def __init__(self, values: Tensor) -> None:
        self._values = values

    @override
    def result(self) -> Tensor:
        return self._values


class OnDevice(OuterStorage):
    """Stores on the device itself."""

    @override
    def store(self, values: Tensor) -> Tensor:
        return values

    @override
    def store_copy(self, values: Tensor) -> Tensor:
        return values.detach().to(self.device, copy=True)

    @override
    def load(self, stored: Tensor) -> Tensor:
        return stored

    @override
    def prefetch(self, stored: Tensor) -> Prefetched:
        return _Here(stored)


class OnHost(OuterStorage):
    """Stores in page-locked memory of the host: the device holds what is in flight or about to be launched."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copies = torch.get_device_module(device).Stream(device=device)

    @override
    def store(self, values: Tensor) -> Tensor:
        return to_host(values)

    @override
    def store_copy(self, values: Tensor) -> Tensor:
        values = values.detach()
        if values.device.type != "cpu":
            return to_host(values)
        return page_locked(values.shape, values.dtype, self.device).copy_(values)

    @override
    def load(self, stored: Tensor) -> Tensor:
        return to_device(stored, self.device)

    @override
    def prefetch(self, stored: Tensor) -> Prefetched:
        return _OnItsWay(stored, self.device, self._copies)


class _OnItsWay(Prefetched):
    """Copies on a stream of its own, into memory of the stream that asked for it."""

    def __init__(self, stored: Tensor, device: torch.device, copies: Any) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._values = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        # What had this memory before may still be at work in the stream that asks.
        copies.wait_stream(self._module.current_stream(device))
        with self._module.stream(copies):
            self._values.copy_(stored, non_blocking=True)
            self._done = self._module.Event()
            self._done.record(copies)
        # If nobody takes it, its memory must not go to another tensor before the copy is done.
        self._values.record_stream(copies)

    @override
    def result(self) -> Tensor:
        self._module.current_stream(self._device).wait_event(self._done)
        return self._values


def storage_for(device: torch.device, offload: bool | str) -> OuterStorage:
    """Chooses where outer state rests. On a CPU, device and host are the same memory."""
    on_host = device.type == "cuda" if offload == "auto" else offload
    return OnHost(device) if on_host and device.type != "cpu" else OnDevice(device)
