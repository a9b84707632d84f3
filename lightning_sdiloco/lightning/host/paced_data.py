"""What a Trainer does with loaders that yield None on purpose.

Such a loader has another one as `loader`, and `follow(engine)`: `DropCompute` makes them, and so may users, as in
``examples/methods/dylu.py``.
"""

from collections.abc import Iterator
from typing import Any

from lightning_sdiloco.engine import DroppingLoader, StreamingDiLoCo
from lightning_sdiloco.lightning.host.epochs import YIELDED_NONE
from lightning_sdiloco.lightning.inner_steps import InnerSteps


def process_wrapped(trainer: Any, dataloader: Any) -> Any:
    """Divides the data of a loader that is wrapped among all ranks, as Lightning does where it is not."""
    stage = trainer.state.stage
    for wrapper in _wrappers(dataloader):
        wrapper.loader = trainer._data_connector._prepare_dataloader(wrapper.loader, shuffle=True, mode=stage)
        if isinstance(wrapper, DroppingLoader):
            wrapper.length = len(wrapper.loader)
    return dataloader


def _wrappers(loader: Any) -> Iterator[Any]:
    """Yields a wrapper and those in it, the innermost first."""
    if hasattr(loader, "loader") and hasattr(loader, "follow"):
        yield from _wrappers(loader.loader)
        yield loader


def follow_engine(trainer: Any, steps: InnerSteps) -> None:
    """Makes the loaders of an epoch know the engine, and lets micro-batches count where some may be left out."""
    engine = steps.engine
    if engine is None:
        return
    for loader in trainer.fit_loop._combined_loader.flattened:
        for wrapper in _wrappers(loader):
            # Lightning would warn of a batch that is None.
            trainer.fit_loop.epoch_loop._warning_cache.add(YIELDED_NONE)
            if isinstance(wrapper, DroppingLoader):
                _follow_dropping(trainer, wrapper, engine)
                steps.counts_micro_batches = True
            else:
                wrapper.follow(engine)


def _follow_dropping(trainer: Any, loader: DroppingLoader, engine: StreamingDiLoCo) -> None:
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            "DropCompute does not go with manual optimization: only the module knows when gradients are synchronised."
            " Optimize automatically, or skip the batches that are None in a loop of your own."
        )
    if trainer.accumulate_grad_batches != loader.drop.micro_batches:
        raise ValueError(
            f"DropCompute(micro_batches={loader.drop.micro_batches}) and"
            f" accumulate_grad_batches={trainer.accumulate_grad_batches} differ. Give both the same number."
        )
    # Lightning steps after its last batch, which limits of the trainer or of other groups may put earlier.
    loader.length = min(loader.length, int(trainer.num_training_batches))
    loader.follow(engine)
