"""Refuses trainers that would leave worker groups with different models, or waiting for each other in vain.

Where Lightning refuses or fails by itself and would advise DDP, what it says is replaced too.

Callbacks are recognised by the names of Lightning's classes, and not with `isinstance`: there are two distributions,
each with classes of its own; one of them may not be installed, and older versions lack some of these classes.
"""

import sys
from typing import Any

from lightning_sdiloco.lightning.host.patching import class_names
from lightning_sdiloco.registration import variants

_UNUSED = "Expected to have finished reduction in the prior iteration"
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")  # of Lightning's ModelParallelStrategy


_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
# Why a callback cannot work, by its class.
_WITH_GROUPS = {
    "ModelPruning": "chooses what to prune from the local weights of each worker group, so that every group would prune"
    " something else. Prune the outer model after training, with torch.nn.utils.prune.",
    "SpikeDetection": "asks all ranks after every batch whether there was a spike, so that every worker group would"
    " wait for the slowest at every step. Leave it out; a group whose values are not finite is left out of the mean"
    " anyway.",
}
_WITH_SHARDS = {
    **dict.fromkeys(
        _AVERAGING,
        "copies the whole model, of which every rank has only a part. Leave it out: the outer model, which validation"
        " and checkpoints show, is an average already.",
    ),
    "BaseFinetuning": "unfreezes layers between epochs, which sharded parameters do not follow. Freeze what is to stay"
    " in configure_model, and train in several fits.",
}
_ON_A_ROUTE = dict.fromkeys(
    _AVERAGING,
    "averages outer parameters over time, and on this route each worker group holds some of its own, so that every"
    " group would end with another average. Leave out the callback, or route.",
)


def _refuse_callbacks(trainer: Any, reasons: dict[str, str]) -> None:
    for callback in trainer.callbacks:
        for kind in class_names(type(callback)) & reasons.keys():
            raise ValueError(f"{type(callback).__name__} {reasons[kind]}")


def refuse_what_cannot_work(trainer: Any, shares: bool = True) -> None:
    # Lightning before 2.6 has no such validation.
    if (seconds := getattr(trainer, "_val_check_time_interval", None)) is not None:
        raise ValueError(
            f"val_check_interval is a time, {seconds:g} s: each rank would go by its own clock and validate after"
            " another batch, where it waits for the others. Give it as a number of batches, or as a share of the"
            " epoch."
        )
    averaging = [callback for callback in trainer.callbacks if class_names(type(callback)).intersection(_AVERAGING)]
    if len(averaging) > 1:
        raise ValueError(
            "There are several callbacks that average weights:"
            f" {', '.join(type(callback).__name__ for callback in averaging)}. A checkpoint has room for one average,"
            " and the module for one at the end. Keep one of them."
        )
    _refuse_callbacks(trainer, _WITH_GROUPS if shares else {**_WITH_GROUPS, **_ON_A_ROUTE})
    for callback in averaging if trainer.max_epochs != -1 else ():
        # Only StochasticWeightAveraging has it.
        contains_batch_norm = getattr(callback, "pl_module_contains_batch_norm", lambda module: False)
        if contains_batch_norm(trainer.lightning_module):
            raise ValueError(
                f"{type(callback).__name__} is used with a model that has BatchNorm: it adds an epoch that recomputes"
                " the statistics, in every worker group from its own data and without an exchange, so that every group"
                " would end with another model. Use WeightAveraging or EMAWeightAveraging, which average the"
                " statistics too."
            )


def refuse_what_cannot_work_sharded(trainer: Any, precision: Any) -> None:
    """Refuses what cannot work where each rank of a group holds a part of the model."""
    if precision not in _PRECISIONS:
        raise ValueError(
            f"precision={precision!r} does not work with sharded models in Lightning. Choose one of"
            f" {', '.join(map(repr, _PRECISIONS))}."
        )
    _refuse_callbacks(trainer, _WITH_SHARDS)


def refuse_in_notebook(host: Any) -> None:
    """Refuses to start processes in a notebook in a way that would run a script again. Lightning advises DDP there."""
    # Lightning decides alike.
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    launcher = host.launcher
    if is_interactive and launcher is not None and not launcher.is_interactive_compatible:
        name = "_".join((host.strategy_name, "notebook"))
        raise ValueError(
            f"strategy={host.strategy_name!r} cannot start its processes from a notebook or an interactive interpreter,"
            " which has no script that they could run. "
            + (
                f"Write strategy={name!r}, or give the strategy start_method='fork'."
                if name in variants(host.strategy_name)
                else "Run your code as a script."
            )
        )


def advise_on_unused(exception: BaseException, name: str) -> None:
    """Replaces what torch says of parameters without a gradient, before Lightning does so and advises DDP."""
    advice = (
        "It looks like your LightningModule has parameters that were not used in producing the loss returned by"
        " training_step. If this is intentional, DistributedDataParallel must look for them in every step: write"
        f" strategy='{name}_find_unused_parameters_true', or give the strategy"
        " ddp_kwargs={'find_unused_parameters': True}."
    )
    exception.args = tuple(advice if _UNUSED in str(part) else part for part in exception.args)
