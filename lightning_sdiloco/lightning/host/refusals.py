"""Refuses what would leave every worker group with another model, or make them wait for each other in vain."""

from collections.abc import Iterable
from typing import Any

_AVERAGING = {"WeightAveraging", "StochasticWeightAveraging"}


def refuse_what_cannot_work(trainer: Any) -> None:
    """Refuses what cannot work, before training.

    Args:
        trainer: The trainer that is about to fit.

    Raises:
        ValueError: If there is a callback that prunes or looks for spikes, several that average weights, or one whose
            average needs an epoch of its own for the statistics of BatchNorm; or if validation goes by the clock.
    """
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise ValueError(
            f"val_check_interval={trainer.val_check_interval!r} is a time: each rank would go by its own clock and"
            " validate after another batch, where it waits for the others. Give it as a number of batches, or as a"
            " share of the epoch."
        )
    averaging = [callback for callback in trainer.callbacks if _kinds(callback) & _AVERAGING]
    if len(averaging) > 1:
        raise ValueError(
            f"There are several callbacks that average weights: {', '.join(_name(each) for each in averaging)}. A"
            " checkpoint has room for one average, and the module for one at the end. Keep one of them."
        )
    for callback in trainer.callbacks:
        if "StochasticWeightAveraging" in _kinds(callback):
            _refuse_epoch_for_statistics(trainer, callback)
        if "ModelPruning" in _kinds(callback):
            raise ValueError(
                f"{_name(callback)} chooses what to prune from the local weights of each worker group, so that every"
                " group would prune something else. Prune the outer model after training, with torch.nn.utils.prune."
            )
        if "SpikeDetection" in _kinds(callback):
            raise ValueError(
                f"{_name(callback)} asks all ranks after every batch whether there was a spike, so that every worker"
                " group would wait for the slowest at every step. Leave it out; a group whose values are not finite is"
                " left out of the mean anyway."
            )


_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")


def refuse_what_cannot_work_sharded(trainer: Any, precision: Any) -> None:
    """Refuses what cannot work where the ranks of a group hold parts of the model.

    Args:
        trainer: The trainer that is about to fit.
        precision: Its precision.

    Raises:
        ValueError: If there is a callback that averages weights or unfreezes layers, or the precision needs a scaler of
            the loss.
    """
    if precision not in _PRECISIONS:
        raise ValueError(
            f"precision={precision!r} does not work with sharded models in Lightning. Choose one of"
            f" {', '.join(map(repr, _PRECISIONS))}."
        )
    for callback in trainer.callbacks:
        if _kinds(callback) & _AVERAGING:
            raise ValueError(
                f"{_name(callback)} copies the whole model, of which every rank has only a part. Leave it out: the"
                " outer model, which validation and checkpoints show, is an average already."
            )
        if "BaseFinetuning" in _kinds(callback):
            raise ValueError(
                f"{_name(callback)} unfreezes layers between epochs, which sharded parameters do not follow. Freeze"
                " what is to stay in configure_model, and train in several fits."
            )


def refuse_divided(optimizers: Iterable[Any]) -> None:
    """Refuses optimizers that divide their state over all processes.

    Args:
        optimizers: The optimizers of a fit.

    Raises:
        ValueError: If there is such a one.
    """
    for optimizer in optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError(
                f"{type(optimizer).__name__} divides its state over all processes and sends parameters between them,"
                " also between worker groups, which train apart. Return the optimizer that it divides from"
                " configure_optimizers instead."
            )


def _refuse_epoch_for_statistics(trainer: Any, callback: Any) -> None:
    if trainer.max_epochs != -1 and callback.pl_module_contains_batch_norm(trainer.lightning_module):
        raise ValueError(
            f"{_name(callback)} is used with a model that has BatchNorm: it adds an epoch that recomputes the"
            " statistics, in every worker group from its own data and without an exchange, so that every group would"
            " end with another model. Use WeightAveraging or EMAWeightAveraging, which average the statistics too."
        )


def _kinds(callback: Any) -> set[str]:
    return {kind.__name__ for kind in type(callback).__mro__}


def _name(callback: Any) -> str:
    return type(callback).__name__
