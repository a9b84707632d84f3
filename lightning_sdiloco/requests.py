"""What one rank asks and all ranks do at the same inner step: it travels in the control vector of a launch."""

from collections.abc import Iterable
from enum import IntFlag

from lightning_sdiloco.engine import StreamingDiLoCo
from lightning_sdiloco.flight import Landing


class Request(IntFlag):
    """What can be asked. Further bits, from ``CHECKPOINT`` on, stand for one periodic checkpoint each."""

    TERMINATE = 1
    TIME_LIMIT = 2
    END_EPOCH = 4
    CHECKPOINT = 8


# The control vector has 16 bits; three are taken.
MOST_CHECKPOINTS = 13


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
        """Takes back what `state_dict` returned."""
        self._done_at = dict(state)

    def agreed(self, landings: Iterable[Landing]) -> int:
        """What all groups do now: the bits that came with these landings, on every rank the same.

        A request that was launched before the same thing was last done has been met already, and so has one of the same
        inner step, in which launches come before landings.
        """
        agreed = 0
        for landing in landings:
            for bit in (1 << index for index in range(16)):
                if landing.requests & bit and landing.launched_at > self._done_at.get(bit, 0):
                    agreed |= bit
        for bit in (1 << index for index in range(16)):
            if agreed & bit:
                self.settle(bit)
        return agreed
