"""Over which ranks the collectives of Lightning and of user code go: a worker group inside a batch, all otherwise."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.errors import ExchangeError
from lightning_sdiloco.lightning.saving import SavingMixin

# Hooks that run for every batch. A collective that starts in one of them stays inside the worker group: over the world
# it would make every group wait for the slowest, at every step.
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


class CollectivesMixin(SavingMixin):
    """The collectives of a strategy."""

    @property
    def in_batch(self) -> bool:
        """Whether a hook runs that runs for every training batch."""
        module = self.lightning_module
        return (
            module is not None
            and module._trainer is not None
            and module.trainer.training
            and module._current_fx_name in _PER_BATCH_HOOKS
        )

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the worker group for what is logged per batch, and over all ranks otherwise."""
        if group is None and self.in_batch:
            if self.topology.in_group.size == 1:
                return tensor
            group = self.topology.in_group.process_group
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers over the worker group inside a training batch, and over all ranks otherwise."""
        # LightningModule.all_gather passes the world where the user gave no group.
        if group in (None, self.topology.world.process_group) and self.in_batch:
            group = self.topology.in_group.process_group
        return super().all_gather(tensor, group, sync_grads)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks, and says what may be wrong if they do not come. Not after an exception."""
        if self.is_alone:
            return
        try:
            super().barrier(*args, **kwargs)
        except RuntimeError as error:
            in_flight = self._engine.in_flight if self._engine is not None else ()
            raise ExchangeError(
                f"This rank, of worker group {self.topology.group_index}, waited for all others at"
                f" {args or 'a barrier'} and they did not come; fragments in flight: {list(in_flight) or 'none'}. Other"
                " groups have stopped, or are still training because their data is longer or trainer.should_stop was"
                " set here alone."
            ) from error

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decides over all ranks, whatever hook asks: who stops or saves must do so everywhere."""
        if self.is_alone:
            return decision
        votes = self.topology.world.all_gather(torch.tensor([int(decision)], device=self.root_device))
        count = sum(int(vote) for vote in votes)
        return count == len(votes) if all else count > 0

    def mean_over_all(self, numbers: dict[str, float]) -> dict[str, float]:
        """The mean over all ranks of every number that all ranks have; none after an exception."""
        if self.is_alone:
            return {}
        ranks = self.topology.world.all_gather_object(numbers)
        common = [name for name in numbers if all(name in rank for rank in ranks)]
        return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in common}
