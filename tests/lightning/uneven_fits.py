"""Fits of worker groups whose loaders end at different steps."""

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
Place = tuple[int, int, int]  # Of a rank: its group, its number in the group, and the ranks of the group.


class Stream(IterableDataset):  # type: ignore[type-arg]
    """So many batches of a group, perhaps others in later epochs. It can be taken up again in the middle."""

    def __init__(self, place: Place, batches: int, later: int | None = None) -> None:
        self.place, self.batches, self.later = place, batches, batches if later is None else later
        self.step, self.resumed = 0, False

    def __iter__(self) -> Iterator[Any]:
        start, self.resumed = self.step if self.resumed else 0, False
        return self.after(start)

    def after(self, start: int) -> Iterator[Any]:
        batches, self.batches = self.batches, self.later
        group, shard, shards = self.place
        for self.step in range(start + 1, batches + 1):
            x, y = batch(group, self.step)
            yield x.chunk(shards)[shard], y.chunk(shards)[shard]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.resumed = state["step"], True


class Announced(Stream):
    """Announces a length, which may be wrong."""

    def __init__(self, place: Place, batches: int, announced: int | None = None, later: int | None = None) -> None:
        super().__init__(place, batches, later)
        self.announced = batches if announced is None else announced

    def __len__(self) -> int:
        return self.announced


def stream(place: Place, batches: int, later: int | None = None) -> Any:
    return DataLoader(Stream(place, batches, later), batch_size=None)


def noting(distribution: str, inner: str = "sgd", seed: int = 0, **members: Callable[..., Any]) -> Any:
    """A module that logs over all ranks, draws random numbers, notes what happens, and has methods of its own."""
    base = type(fits.module(distribution, inner, seed))

    class Noting(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*self.net, nn.Dropout(0.2))
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
            noisy = parts[0] + torch.randn_like(parts[0])  # as a generative model may draw
            self.log("val", nn.functional.mse_loss(self.net(noisy), parts[1]), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.validated.append((self.trainer.current_epoch, self.trainer.fit_loop.batch_idx))

    return type("Own", (Noting,), members)()


def gan(distribution: str, seed: int, **members: Callable[..., Any]) -> Any:
    """Manual optimization with two optimizers."""

    def training_step(self: Any, parts: Any, index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.net(parts[0]), parts[1]))
            optimizer.step()

    def configure_optimizers(self: Any) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net[:3], self.net[3:])]

    own = {"training_step": training_step, "configure_optimizers": configure_optimizers}
    module = type("Gan", (type(noting(distribution, seed=seed, **own)),), members)()
    module.automatic_optimization = False
    return module


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
    warned, size = fits.said_by("lightning_sdiloco.lightning.epochs"), world_size // groups
    model = make(distribution, seed=rank)
    strategy = fits.strategy(distribution, worker_groups=groups, **choices)
    common = {"devices": world_size, "max_epochs": 2, "num_sanity_val_steps": 0}
    trainer = fits.trainer(distribution, strategy=strategy, **{**common, **trainer_choices})
    loops = trainer.fit_loop, trainer.fit_loop.epoch_loop
    before = [set(vars(loop)) for loop in loops]
    trainer.fit(model, loader((rank // size, rank % size, size)), stream((9, 0, 1), 2), ckpt_path=resume)
    assert [set(vars(loop)) for loop in loops] == before, "nothing is left behind"
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
        "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "warned": list(warned),
        "inspected": inspect(trainer, model),
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(values, other[name]) for name, values in one.items())


def assert_together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks did the same and hold the same outer parameters. Returns what they did."""
    common: dict[str, Any] = ranks[0]["common"]
    for other in ranks[1:]:
        assert other["common"] == common
        assert same(other["outer"], ranks[0]["outer"])
        assert same(other["model"], ranks[0]["model"])
    return common


def epochs(common: dict[str, Any]) -> list[int]:
    """How many batches each epoch had."""
    numbers = [epoch for epoch, _, _ in common["batches"]]
    return [numbers.count(epoch) for epoch in range(max(numbers) + 1)]


def fit(world_size: int, loader: Callable[[Place], Any], *args: Any, **choices: Any) -> list[dict[str, Any]]:
    """Fits in so many ranks."""
    return list(run_processes(lambda *place: run_fit(*place, loader, *args, **choices), world_size))
