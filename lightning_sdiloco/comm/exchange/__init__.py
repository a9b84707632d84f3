"""How messages reach the other worker groups: one topology per file."""

from lightning_sdiloco.comm.exchange.base import Exchange, Unanswered
from lightning_sdiloco.comm.exchange.direct import DirectExchange
from lightning_sdiloco.comm.exchange.in_process import InProcessExchange
from lightning_sdiloco.comm.exchange.on_device import DeviceBackend, DeviceExchange
from lightning_sdiloco.comm.exchange.varying import VaryingExchange

__all__ = [
    "DeviceBackend",
    "DeviceExchange",
    "DirectExchange",
    "Exchange",
    "InProcessExchange",
    "Unanswered",
    "VaryingExchange",
]
