"""What all parts of a fit see of it: whom it is for, its engine, its inner steps, and what its ranks ask of each other.

A request travels in the control vector of a launch, and counts when that lands.
"""

from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Any

from lightning_sdiloco.engine import Landing, StreamingDiLoCo
from lightning_sdiloco.lightning.groups import ConnectedGroups
from lightning_sdiloco.lightning.model_format import WholeModel
from lightning_sdiloco.lightning.options import Options


class Request(IntFlag):
    """What can be asked for. From ``CHECKPOINT`` on, each bit stands for one periodic checkpoint."""

    TERMINATE = 1
    TIME_LIMIT = 2
    REQUEUE = 4
    END_EPOCH = 8
    CHECKPOINT = 16


SIGNALLED = (Request.TERMINATE, Request.REQUEUE)

_BITS = [1 << index for index in range(16)]  # of the control vector

MOST_CHECKPOINTS = sum(bit >= Request.CHECKPOINT for bit in _BITS)


class Requests:
    def __init__(self, engine: StreamingDiLoCo | None = None) -> None:
        self._engine = engine  # Its launches carry the requests.
        self.done_at: dict[int, int] = {}  # After which inner step each request was last done.
        self.agreed_now = 0
        self._deciding: int | None = None

    def ask(self, bit: int) -> None:
        """Asks all groups for something. Asking again before it is done changes nothing."""
        if self._engine is not None:
            # A plain number: it is saved with the engine.
            self._engine.request(int(bit))

    def settle(self, bit: int) -> None:
        """Marks what was asked for up to now as done. All ranks do so after the same inner step."""
        if self._engine is not None:
            self.done_at[int(bit)] = self._engine.inner_steps
            self._engine.withdraw(int(bit))

    def land(self, landings: Iterable[Landing], own: int = 0) -> int:
        """Takes in the requests that came with landings: all ranks now agree on them, after the same inner step."""
        self.agreed_now = own
        for landing in landings:
            for bit in _BITS:
                if landing.requests & bit and landing.launched_at > self.done_at.get(bit, 0):
                    self.agreed_now |= bit
        for bit in _BITS if self.agreed_now else ():
            if self.agreed(bit):
                self.settle(bit)
        return self.agreed_now

    def agreed(self, bit: int) -> bool:
        return bool(self.agreed_now & int(bit))

    # Checkpoints by the clock

    def decide_checkpoint(self, index: int, hook: Callable[..., None], *args: Any) -> None:
        """Runs the hook of a checkpoint callback whose time interval all ranks decide together."""
        self._deciding = index
        try:
            hook(*args)
        finally:
            self._deciding = None

    def vote(self, skip: Any) -> bool | None:
        """Answers whether all ranks skip the save that the hook of `decide_checkpoint` asks for."""
        if self._deciding is None or not isinstance(skip, bool):
            return None
        bit = int(Request.CHECKPOINT) << self._deciding
        self._deciding = None
        if not skip:
            self.ask(bit)
        return not self.agreed(bit)


class FitState:
    """A fit as its parts see it. Every fit has an object of its own, so nothing is reset."""

    def __init__(
        self,
        trainer: Any,
        options: Options,
        groups: ConnectedGroups,
        model_format: WholeModel,
        termination: type[BaseException],
    ) -> None:
        self.trainer, self.options, self.groups, self.format = trainer, options, groups, model_format
        self.termination = termination
        self.engine: StreamingDiLoCo | None = None
        self.requests = Requests()
        self.landed = False  # Whether anything did with the last inner step.
        self.is_ending = self.ended = False  # By a signal, together with all ranks.

    @property
    def is_training(self) -> bool:
        return self.engine is not None and not self.engine.is_finished
