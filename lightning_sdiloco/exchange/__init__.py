"""How messages reach the other worker groups: one topology per file."""

from lightning_sdiloco.exchange.base import Exchange, Unanswered
from lightning_sdiloco.exchange.direct import DirectExchange
from lightning_sdiloco.exchange.in_process import InProcessExchange

__all__ = ["DirectExchange", "Exchange", "InProcessExchange", "Unanswered"]
