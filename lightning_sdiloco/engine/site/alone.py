"""A site whose run has no settings yet: it trains its first steps alone, then joins as if it had from the start.

[Note: alone at first] Where settings are left open, inner steps have to be measured before the run can be founded. No
launch is due in them, so nobody misses this site. What it trains in them is held, and counts with its first launch: in
round 0 all sites begin with the outer parameters of the founder, and where a site began with others, it takes those,
and what it trained on the others is dropped.
"""

from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import override

from lightning_sdiloco.engine.site.federation import Federation
from lightning_sdiloco.engine.world import FixedWorld


@dataclass(frozen=True)
class Undecided:
    """Stands for a federation whose settings are not known yet: the engine trains alone until `enter` is called."""

    federation: Federation

    @property
    def site(self) -> str:
        """The name of this site."""
        return self.federation.site


class Alone(FixedWorld):
    """The world of one group that nobody else knows of, which counts what it trains by samples, as a site does."""

    @override
    def trained(self, micro_batches: int, samples: int) -> None:
        """Counts an inner step by its samples."""
        super().trained(samples, samples)


class Trained(NamedTuple):
    """What a site has trained before it joined."""

    steps: int = 0
    samples: int = 0


NOTHING = Trained()
"""Of a site that joins before it trains."""
