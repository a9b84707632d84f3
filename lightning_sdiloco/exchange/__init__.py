"""How encoded outer gradients reach the other worker groups: one topology per file."""

from lightning_sdiloco.exchange.base import Exchange, Unanswered
from lightning_sdiloco.exchange.gather import GatherExchange
from lightning_sdiloco.exchange.in_process import InProcessExchange

__all__ = ["Exchange", "GatherExchange", "InProcessExchange", "Unanswered"]
