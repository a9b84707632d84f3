"""Between an accelerator and its host: copies through page-locked memory, which neither of them has to wait for."""

import torch
from torch import Tensor


def page_locked(values: Tensor, device: torch.device) -> Tensor:
    """Memory of the host for what a tensor holds, which a device reaches by itself; any content.

    Args:
        values: A tensor on any device.
        device: The device that is to reach it.
    """
    # What is freed is kept for the next of its size: locking pages takes longer than a copy.
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=device.type != "cpu")


def to_host(values: Tensor) -> Tensor:
    """What a tensor holds, in the memory of the host. The calling thread waits for it, the accelerator does not.

    Args:
        values: A tensor on any device. One that is on the host is returned as it is.
    """
    if values.device.type == "cpu":
        return values
    copied = page_locked(values, values.device).copy_(values, non_blocking=True)
    torch.get_device_module(values.device).current_stream(values.device).synchronize()
    return copied


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """What a tensor holds, on a device, for what the calling thread gives the device from here on. Waits for nothing.

    Args:
        values: A tensor on any device. One that is there is returned as it is.
        device: The device.
    """
    return values.to(device, non_blocking=True)
