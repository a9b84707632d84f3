"""What can still be read of an engine that has finished in another process."""

from typing import NamedTuple

from torch import Tensor

from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.engine.engine import StreamingDiLoCo


class Summary(NamedTuple):
    """The readable side of a finished engine.

    Attributes:
        fragments: See `StreamingDiLoCo`.
        schedule: When they launched and landed.
        outer: What ``outer_state_dict()`` returns.
        counts: What ``report()`` returns.
    """

    fragments: tuple[Fragment, ...]
    schedule: Schedule
    outer: dict[str, Tensor]
    counts: dict[str, float]

    @staticmethod
    def of(engine: StreamingDiLoCo) -> "Summary":
        """Reads a finished engine."""
        return Summary(engine.fragments, engine.schedule, engine.outer_state_dict(), engine.report())

    def outer_state_dict(self) -> dict[str, Tensor]:
        """See `StreamingDiLoCo.outer_state_dict`."""
        return {name: values.clone() for name, values in self.outer.items()}

    def report(self) -> dict[str, float]:
        """See `StreamingDiLoCo.report`."""
        return dict(self.counts)
