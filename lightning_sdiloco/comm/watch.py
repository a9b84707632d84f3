"""Detects collectives over all ranks that user code issues during training."""

import logging

from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology

_log = logging.getLogger(__name__)

# Fewer batches in a row may come from a model that looks at all data before it starts.
_IN_A_ROW = 3


def is_watched(topology: Topology) -> bool:
    """Returns whether this rank watches. Only rank 0 does, and only if there are worker groups in
    other processes.
    """
    return topology.world.size > 1 and topology.num_groups > 1 and topology.rank == 0


class WorldWatch:
    """A watch that warns once if user code issues collectives over all ranks in several batches in
    a row. The collectives are not replaced.

    [Note: what waits in every batch] A call to ``torch.distributed.all_gather`` without a group,
    for example in a contrastive loss, makes every worker group wait for the slowest group in every
    batch. Process groups count the collectives that start in them. Callers run `begin` and `end`
    around code in which neither the engine nor Lightning issues collectives over all ranks.
    Only user collectives are therefore counted. Such code runs from the last hook before a training
    step to the first hook after it, or from one inner step to the next. Only rank 0 watches.

    Args:
        advice: The last part of the warning, with advice for the user.
        unit: The plural name that the warning uses for the intervals between `begin` and `end`.
    """

    def __init__(self, advice: str, unit: str = "training batches") -> None:
        self._advice = advice
        self._unit = unit
        self._world = Communicator()
        # The number of collectives over all ranks when `begin` ran, or None while nothing is
        # watched.
        self._before: int | None = None
        self._in_a_row = 0
        self._is_over = False

    def stop(self) -> None:
        """Ends the watch permanently."""
        self._is_over = True
        self._before = None

    def begin(self, topology: Topology) -> None:
        self._world = topology.world
        self._before = None
        if is_watched(topology) and not self._is_over:
            self._before = self._world.begun()

    def end(self) -> None:
        before = self._before
        self._before = None
        if before is None:
            return
        if self._world.begun() <= before:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row == _IN_A_ROW:
            self.stop()
            _log.warning(
                "User code ran torch.distributed collectives over all ranks in %d %s in a row, so"
                " every worker group waits for the slowest group in every batch. %s This warning"
                " is shown once.",
                _IN_A_ROW,
                self._unit,
                self._advice,
            )
