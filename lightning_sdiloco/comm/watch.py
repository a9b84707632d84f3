"""Watches for collectives over all ranks that code outside this package issues during training."""

import logging

from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology

_log = logging.getLogger(__name__)

# Fewer may come from a model that looks at all data before it starts.
_IN_A_ROW = 3


def is_watched(topology: Topology) -> bool:
    """Returns whether this rank watches: the first one, if there are worker groups in other
    processes.
    """
    return topology.world.size > 1 and topology.num_groups > 1 and topology.rank == 0


class WorldWatch:
    """Warns once if user code issues collectives over all ranks in batch after batch. The
    collectives are not replaced.

    [Note: what waits in every batch] ``torch.distributed.all_gather`` without a group, as in the
    loss of a contrastive model, makes every worker group wait for the slowest one in every batch.
    Process groups count the collectives that begin in them. The owner of a watch begins and ends it
    around code in which neither the engine nor Lightning issues collectives over all ranks, so only
    the user's are counted: from the last hook before a training step to the first one after it, or
    from one inner step to the next. Only rank 0 watches.

    Args:
        advice: The end of the warning, which says what the user should do.
        unit: The unit that the warning counts: the code between `begin` and `end`.
    """

    def __init__(self, advice: str, unit: str = "training batches") -> None:
        self._advice = advice
        self._unit = unit
        self._world = Communicator()
        # The number of collectives over all ranks when the watch began; None while it is not
        # watching.
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
                "torch.distributed was called over all ranks in %d %s in a row: every worker group"
                " waits for the slowest one in every batch. %s Shown once.",
                _IN_A_ROW,
                self._unit,
                self._advice,
            )
