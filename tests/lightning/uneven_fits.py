"""Fits of worker groups whose loaders end at different steps."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests import fits
from tests.fits import LIGHTNING
from tests.ranks import run_processes
from tests.training import batch

CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": [["*"]]}
Place = tuple[int, int, int]


# Loaders


class Stream(IterableDataset):  # type: ignore[type-arg]
    """So many batches of a group, without a length; a rank of a group of several sees its part of each."""

    def __init__(self, place: Place, batches: int) -> None:
        self.place, self.batches = place, batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        group, shard, shards = self.place
        for step in range(1, self.batches + 1):
            x, y = batch(group, step)
            yield x.chunk(shards)[shard], y.chunk(shards)[shard]


class Announced:
    """A loader that announces a length, which may be wrong."""

    def __init__(self, place: Place, batches: int, announced: int | None = None) -> None:
        self.stream = Stream(place, batches)
        self.announced = batches if announced is None else announced

    def __len__(self) -> int:
        return self.announced

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.stream)


class Stateful:
    """A loader without a length that can be taken up again in the middle."""

    def __init__(self, place: Place, batches: int) -> None:
        self.stream, self.step, self.resumed = Stream(place, batches), 0, False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.step, self.resumed = self.step if self.resumed else 0, False
        for parts in list(self.stream)[self.step :]:
            self.step += 1
            yield parts

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.resumed = state["step"], True


def stream(place: Place, batches: int) -> Any:
    return DataLoader(Stream(place, batches), batch_size=None)


def uneven_streams(first: int, second: int, place: Place) -> Any:
    """For two groups."""
    return stream(place, (first, second)[place[0]])


# Fits


def noting(distribution: str, inner: str = "sgd", seed: int = 0) -> Any:
    """A module that logs over all ranks, and notes what happens to it."""
    base = type(fits.module(distribution, inner, seed))

    class Noting(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.batches: list[tuple[int, int, int]] = []
            self.idle: list[int] = []
            self.validated: list[tuple[int, int]] = []

        def training_step(self, parts: Any, index: int) -> Any:
            loss = super().training_step(parts, index)
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=8)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("ended", 1.0, sync_dist=True, batch_size=8)
            self.batches.append((self.trainer.current_epoch, batch_idx, self.trainer.global_step))
            if batch is None:
                self.idle.append(self.trainer.global_step)

        def validation_step(self, parts: Any, index: int) -> None:
            self.log("val", nn.functional.mse_loss(self.net(parts[0]), parts[1]), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.validated.append((self.trainer.current_epoch, self.trainer.fit_loop.batch_idx))

    return Noting()


class Warned(logging.Handler):
    """Keeps what the package says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("lightning_sdiloco.lightning.host").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def taken(self) -> list[str]:
        """What was said up to now, and no more."""
        logging.getLogger("lightning_sdiloco.lightning.host").removeHandler(self)
        return self.texts


def run_fit(
    rank: int,
    world_size: int,
    loader: Callable[[Place], Any],
    distribution: str = LIGHTNING,
    groups: int = 2,
    make: Callable[..., Any] = noting,
    resume: str | None = None,
    inspect: Callable[[Any, Any], Any] = lambda trainer, module: None,
    choices: dict[str, Any] = CHOICES,
    **trainer_choices: Any,
) -> dict[str, Any]:
    """Fits in this rank; what must be the same in all ranks is under ``"common"``."""
    warned = Warned()
    size = world_size // groups
    place = rank // size, rank % size, size
    model = make(distribution, seed=rank)
    strategy = fits.strategy(distribution, worker_groups=groups, **choices)
    trainer = fits.trainer(
        distribution,
        **{"strategy": strategy, "devices": world_size, "max_epochs": 2, "num_sanity_val_steps": 0, **trainer_choices},
    )
    trainer.fit(model, loader(place), stream((9, 0, 1), 2), ckpt_path=resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    report = strategy.report()
    return {
        "common": {
            "batches": model.batches,
            "validated": model.validated,
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "inner_steps": report["inner_steps"],
            "landings": report["landings"],
            "announced": trainer.num_training_batches,
            "metrics": {name: metrics[name] for name in ("loss_epoch", "ended", "val") if name in metrics},
        },
        "outer": strategy.outer_state_dict(),
        "model": {name: p.detach().clone() for name, p in model.named_parameters()},
        "idle": model.idle,
        "warned": warned.taken(),
        "inspected": inspect(trainer, model),
    }


def assert_together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks did the same and hold the same outer parameters. Returns what they did."""
    first = ranks[0]
    for other in ranks[1:]:
        assert other["common"] == first["common"]
        for name, values in first["outer"].items():
            assert torch.equal(other["outer"][name], values), name
            assert torch.equal(other["model"][name], first["model"][name]), name
    common: dict[str, Any] = first["common"]
    return common


def epochs(common: dict[str, Any]) -> list[int]:
    """How many batches each epoch had."""
    numbers = [epoch for epoch, _, _ in common["batches"]]
    return [numbers.count(epoch) for epoch in range(max(numbers) + 1)]


def fit(world_size: int, loader: Callable[[Place], Any], *args: Any, **choices: Any) -> list[dict[str, Any]]:
    """Fits in so many ranks."""
    return list(run_processes(lambda *place: run_fit(*place, loader, *args, **choices), world_size))


def gan(distribution: str, seed: int) -> Any:
    """Manual optimization with two optimizers."""
    base = type(noting(distribution, seed=seed))

    class Two(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, parts: Any, index: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(self.net(parts[0]), parts[1]))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net[:3], self.net[3:])]

    return Two()
