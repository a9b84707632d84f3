"""Over which ranks the collectives of Lightning and of user code go: a worker group inside a batch, all otherwise."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_sdiloco.engine import StreamingDiLoCo
from lightning_sdiloco.errors import ExchangeError
from lightning_sdiloco.lightning.worker_groups import ConnectedGroups

_log = logging.getLogger(__name__)

# Fewer may be a model that looks at all data before it starts.
_BATCHES_IN_A_ROW = 3

# Hooks that run for every batch. A collective that starts in one of them stays inside the worker group: over all ranks
# it would make every group wait for the slowest one at every step.
_PER_BATCH_HOOKS = frozenset(
    {
        "training_step",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_batch_transfer",
        "transfer_batch_to_device",
        "on_after_batch_transfer",
        "backward",
        "optimizer_step",
        "optimizer_zero_grad",
        "configure_gradient_clipping",
        "lr_scheduler_step",
    }
)


def in_batch(module: Any) -> bool:
    """Returns whether one of the hooks that run for every training batch is running."""
    return (
        module is not None
        and module._trainer is not None
        and module.trainer.training
        and module._current_fx_name in _PER_BATCH_HOOKS
    )


def stays_in_group(module: Any, groups: ConnectedGroups) -> bool:
    """Returns whether a collective stays inside the worker group, and announces one that does not."""
    stays = in_batch(module)
    if not stays:
        groups.meet()
    return stays


@contextmanager
def waiting_for_all(groups: ConnectedGroups, names: Sequence[Any], engine: StreamingDiLoCo | None) -> Iterator[None]:
    """Explains what may be wrong if the others do not reach a barrier at which this rank waits in a ``with`` block."""
    groups.meet()
    try:
        yield
    except RuntimeError as error:
        if not groups.is_connected:
            raise
        in_flight = list(engine.in_flight) if engine is not None else []
        raise ExchangeError(
            f"This rank, of worker group {groups.topology.group_index}, waited for all others at {names or 'a barrier'}"
            f" and they did not come; fragments in flight: {in_flight or 'none'}. Other groups have stopped, or are"
            " still training because their data is longer or trainer.should_stop was set here alone."
        ) from error


class BatchWatch:
    """Warns once if user code issues collectives over all ranks in batch after batch, where nobody replaces them.

    [Note: what waits in every batch] ``torch.distributed.all_gather`` without a group, as in the loss of a contrastive
    model, lets every worker group wait for the slowest one in every batch. Process groups count what is begun in them.
    From the last hook before a training step to the first one after it, neither Lightning nor the engine issues
    anything over all ranks, so whatever is counted there is the user's.

    Args:
        groups: The ranks. Rank 0 watches, which takes part in whatever goes over all of them.
        advice: What to do instead.
    """

    def __init__(self, groups: ConnectedGroups, advice: str) -> None:
        self._groups, self._advice = groups, advice
        self._before: int | None = None
        self._in_a_row = 0

    def begin(self) -> None:
        """Begins to watch a batch, unless there is one group, for which nobody waits, or all is said."""
        topology = self._groups.topology
        watches = topology.num_groups > 1 and topology.rank == 0 and self._in_a_row < _BATCHES_IN_A_ROW
        self._before = topology.world.begun() if watches else None

    def end(self) -> None:
        """Ends to watch a batch, if one has begun, and warns of the last of so many in a row."""
        before, self._before = self._before, None
        if before is None:
            return
        self._in_a_row = self._in_a_row + 1 if self._groups.topology.world.begun() > before else 0
        if self._in_a_row == _BATCHES_IN_A_ROW:
            _log.warning(
                "torch.distributed was called over all ranks in %d training batches in a row: every worker group waits"
                " for the slowest one in every batch. %s This is said once.",
                _BATCHES_IN_A_ROW,
                self._advice,
            )
