"""What one rank asks for and all ranks do after the same inner step; it travels in the control vector of a launch."""

from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Any

from lightning_sdiloco.engine import Landing, StreamingDiLoCo


class Request(IntFlag):
    """What can be asked for. From ``CHECKPOINT`` on, each bit stands for one periodic checkpoint."""

    TERMINATE = 1
    TIME_LIMIT = 2
    REQUEUE = 4
    END_EPOCH = 8
    CHECKPOINT = 16


SIGNALLED = (Request.TERMINATE, Request.REQUEUE)
"""What signals ask for."""

_BITS = 16  # of the control vector

# As many bits are left.
MOST_CHECKPOINTS = _BITS - int(Request.CHECKPOINT).bit_length() + 1


class Requests:
    """Keeps what this rank asks for until all groups do it."""

    def __init__(self, engine: StreamingDiLoCo | None = None) -> None:
        self._engine = engine
        self._done_at: dict[int, int] = {}
        self._agreed = 0
        self._deciding: int | None = None

    def connect(self, engine: StreamingDiLoCo) -> None:
        """Connects the requests with the engine whose launches carry them."""
        self._engine = engine
        self._done_at = {}
        self._agreed = 0

    @property
    def are_open(self) -> bool:
        """Whether there are launches to come that could carry a request."""
        return self._engine is not None and not self._engine.is_finished

    def ask(self, bit: int) -> None:
        """Asks all groups for something. Asking again before it is done changes nothing."""
        if self._engine is not None:
            # A plain number: it is saved with the engine.
            self._engine.request(int(bit))

    def settle(self, bit: int) -> None:
        """Marks what was asked for up to now as done. All ranks do so after the same inner step."""
        if self._engine is not None:
            self._done_at[int(bit)] = self._engine.inner_steps
            self._engine.withdraw(int(bit))

    def begin_batch(self) -> None:
        """Forgets what was agreed on after the last inner step: it has been done."""
        self._agreed = 0

    def land(self, landings: Iterable[Landing], own: int = 0) -> int:
        """Takes in the requests that came with landings: all ranks now agree on them, after the same inner step."""
        self._agreed = own
        for landing in landings:
            for bit in _bits_in(landing.requests):
                if landing.launched_at > self._done_at.get(bit, 0):
                    self._agreed |= bit
        for bit in _bits_in(self._agreed):
            self.settle(bit)
        return self._agreed

    def agreed(self, bit: int) -> bool:
        """Returns whether all ranks do what a bit stands for after this inner step."""
        return bool(self._agreed & int(bit))

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

    # Checkpoints of requests

    def state_dict(self) -> dict[int, int]:
        """Returns, for each request, after which inner step it was last done."""
        return dict(self._done_at)

    def load_state_dict(self, state: dict[int, int]) -> None:
        """Restores what `state_dict` returned."""
        self._done_at = dict(state)
        for bit in SIGNALLED:
            self.settle(bit)


def _bits_in(requests: int) -> list[int]:
    """Returns the bits that are set, each by itself. There are seldom any, and this is asked after every step."""
    return [1 << index for index in range(_BITS) if requests >> index & 1] if requests else []
