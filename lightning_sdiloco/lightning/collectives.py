"""Over which ranks the collectives of Lightning and of user code go: a worker group inside a batch, all otherwise."""

from typing import Any

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


def in_batch(module: Any) -> bool:
    """Returns whether a hook runs that runs for every training batch.

    Args:
        module: The LightningModule; None if there is none yet.
    """
    return (
        module is not None
        and module._trainer is not None
        and module.trainer.training
        and module._current_fx_name in _PER_BATCH_HOOKS
    )
