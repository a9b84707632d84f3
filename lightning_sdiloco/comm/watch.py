"""Watches for collectives over all ranks that code outside of this package issues while it
trains.
"""

import logging

from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology

_log = logging.getLogger(__name__)

# Fewer may be a model that looks at all data before it starts.
_IN_A_ROW = 3


class WorldWatch:
    """Warns once if user code issues collectives over all ranks in batch after batch, where they
    are not replaced.

    [Note: what waits in every batch] ``torch.distributed.all_gather`` without a group, as in the
    loss of a contrastive model, lets every worker group wait for the slowest one in every batch.
    Process groups count what is begun in them. Whoever owns a watch begins and ends it where
    neither the engine nor Lightning issues anything over all ranks, so whatever is counted is the
    user's: from the last hook before a training step to the first one after it, or from one inner
    step to the next. Rank 0 watches.

    Args:
        advice: What the warning tells the user to do.
        unit: What lies between the beginning and the end.
    """

    def __init__(self, advice: str, unit: str = "training batches") -> None:
        self._advice = advice
        self._unit = unit
        self._world = Communicator()
        self._before: int | None = (
            None  # What was begun over all ranks when the watch began; None while it rests.
        )
        self._in_a_row = 0
        self._is_over = False

    def stop(self) -> None:
        """Ends the watch for good."""
        self._is_over = True
        self._before = None

    def begin(self, topology: Topology) -> None:
        watches = topology.num_groups > 1 and topology.rank == 0 and not self._is_over
        self._world = topology.world
        self._before = self._world.begun() if watches else None

    def end(self) -> None:
        before = self._before
        self._before = None
        if before is None:
            return
        self._in_a_row = self._in_a_row + 1 if self._world.begun() > before else 0
        if self._in_a_row == _IN_A_ROW:
            self.stop()
            _log.warning(
                "torch.distributed was called over all ranks in %d %s in a row: every worker group"
                " waits for the slowest one in every batch. %s Shown once.",
                _IN_A_ROW,
                self._unit,
                self._advice,
            )
