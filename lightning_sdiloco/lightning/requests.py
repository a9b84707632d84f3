"""What one rank asks and all ranks do at the same inner step: it travels in the control vector of a launch."""

from collections.abc import Iterable
from enum import IntFlag

from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.flight import Landing


class Request(IntFlag):
    """What can be asked. Further bits, from ``CHECKPOINT`` on, stand for one periodic checkpoint each."""

    TERMINATE = 1
    TIME_LIMIT = 2
    REQUEUE = 4
    END_EPOCH = 8
    CHECKPOINT = 16


SIGNALLED = (Request.TERMINATE, Request.REQUEUE)
"""What signals ask."""

_BITS = 16  # of the control vector

# Those that are left.
MOST_CHECKPOINTS = _BITS - int(Request.CHECKPOINT).bit_length() + 1


class Requests:
    """Keeps what this rank asks until all groups do it.

    Args:
        engine: The engine whose launches carry the requests.
    """

    def __init__(self, engine: StreamingDiLoCo) -> None:
        self._engine = engine
        self._done_at: dict[int, int] = {}

    def ask(self, bit: int) -> None:
        """Asks all groups for something. Asking again before it is done changes nothing."""
        # A plain number: it is saved with the engine.
        self._engine.request(int(bit))

    def settle(self, bit: int) -> None:
        """Takes what was asked up to now as done. All ranks do so after the same inner step."""
        self._done_at[int(bit)] = self._engine.inner_steps
        self._engine.withdraw(int(bit))

    def state_dict(self) -> dict[int, int]:
        """After which inner step each request was done last."""
        return dict(self._done_at)

    def load_state_dict(self, state: dict[int, int]) -> None:
        """Takes back what `state_dict` returned.

        A signal was meant for the process that got it: what it asked, and what is on its way for it, is void.
        """
        self._done_at = dict(state)
        for bit in SIGNALLED:
            self._done_at[int(bit)] = self._engine.inner_steps
            self._engine.withdraw(bit)

    def agreed(self, landings: Iterable[Landing]) -> int:
        """What all groups do now: the bits that came with these landings, on every rank the same.

        A request that was launched before the same thing was last done, or just then, has been met already:
        launches come before landings.
        """
        agreed = 0
        for landing in landings:
            for bit in (1 << index for index in range(_BITS)):
                if landing.requests & bit and landing.launched_at > self._done_at.get(bit, 0):
                    agreed |= bit
        for bit in (1 << index for index in range(_BITS)):
            if agreed & bit:
                self.settle(bit)
        return agreed
