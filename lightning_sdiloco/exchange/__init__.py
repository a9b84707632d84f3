"""How messages reach the other worker groups: one topology per file."""

from lightning_sdiloco.exchange.base import Exchange, Unanswered
from lightning_sdiloco.exchange.direct import DirectExchange
from lightning_sdiloco.exchange.in_process import InProcessExchange
from lightning_sdiloco.exchange.on_device import DeviceBackend, DeviceExchange

__all__ = ["DeviceBackend", "DeviceExchange", "DirectExchange", "Exchange", "InProcessExchange", "Unanswered"]
