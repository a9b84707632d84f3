"""Copies between an accelerator and its host, through page-locked memory."""

import torch
from torch import Tensor

from lightning_sdiloco.memory import new_vector


def page_locked(values: Tensor, device: torch.device) -> Tensor:
    """Returns uninitialised host memory for what a tensor holds, which a device can reach by itself."""
    if device.type == "cpu":
        return new_vector(values.numel(), device, values.dtype).view(values.shape)
    # torch keeps what is freed for the next tensor of that size: locking pages takes longer than a copy.
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)


def to_host(values: Tensor) -> Tensor:
    """Copies a tensor to the host. The calling thread waits for the copy, the accelerator does not."""
    if values.device.type == "cpu":
        return values
    copied = page_locked(values, values.device).copy_(values, non_blocking=True)
    torch.get_device_module(values.device).current_stream(values.device).synchronize()
    return copied


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device without waiting; only what this thread gives the device from now on may use it."""
    return values.to(device, non_blocking=True)
