"""Reads numbers from a device once they have arrived on the host, so that nobody waits for them."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from lightning_sdiloco.comm import page_locked


class Deferred:
    """Scalars on their way from the device to the host, in the order in which they were taken.

    Examples:
        >>> losses = Deferred()
        >>> losses.take(1, torch.tensor(0.5))
        >>> losses.ready()
        [(1, 0.5)]
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Tensor, Any]] = deque()

    def take(self, step: int, value: Tensor) -> None:
        """Starts to copy a scalar to the host."""
        scalar = value.detach().reshape(())
        copied = page_locked(scalar, value.device).copy_(scalar, non_blocking=True)
        event = None
        if value.device.type != "cpu":
            event = torch.get_device_module(value.device).Event()
            event.record()
        self._waiting.append((step, copied, event))

    def ready(self, wait: bool = False) -> list[tuple[int, float]]:
        """Takes out the scalars that have arrived, each with its step."""
        arrived = []
        while self._waiting:
            step, copied, event = self._waiting[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._waiting.popleft()
            arrived.append((step, float(copied)))
        return arrived
