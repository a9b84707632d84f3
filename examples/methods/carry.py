"""Three ways to land: mixing, keeping all training since the launch, and a rule of your own.

    python examples/methods/carry.py

With a Trainer, use `StreamingDiLoCoStrategy(mixing=Carry())`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from side_by_side import compare
from torch import Tensor

from lightning_sdiloco import Carry, LandingRule


@dataclass(frozen=True)
class CarryHalf(LandingRule):
    kept: float = 0.0

    def gathered(self, gradient: Tensor, before: Tensor, after: Tensor) -> Sequence[Tensor]:
        """Returns the local values at the launch and the new outer values."""
        return before - gradient, after

    def merge(self, local: Tensor, gathered: Sequence[Tensor], steps: int) -> None:
        """Moves from the outer values by half of the group's progress during the flight."""
        sent, after = gathered
        local.copy_(after + 0.5 * (local - sent))


if __name__ == "__main__":
    compare(
        {
            "mixing=0.2": {"mixing": 0.2},
            "mixing=Carry()": {"mixing": Carry()},
            "mixing=CarryHalf()": {"mixing": CarryHalf()},
            "mixing=0": {"mixing": 0.0},
        },
        sync_every=20,
        overlap_steps=10,
    )
