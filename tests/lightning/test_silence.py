"""Between launches no group waits for another, and decisions on time are made by all at the same inner step."""

import importlib
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_sdiloco import StreamingDiLoCoFabricStrategy
from tests import fits
from tests.fits import LIGHTNING, fit
from tests.ranks import run_processes
from tests.training import batch, inner_optimizer, mlp

STALLED_AT, STALL_SECONDS = 30, 3.0
DISTRIBUTIONS = [LIGHTNING, "pytorch_lightning"]


def clocked(distribution: str, inner: str, seed: int) -> Any:
    """A module that notes when it starts each step, logs over its group, and stalls in the last group."""
    base = type(fits.module(distribution, inner, seed))

    class Clocked(base):  # type: ignore[misc, valid-type]
        def on_train_start(self) -> None:
            self.started: dict[int, float] = {}

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            step = index + 1
            if step == STALLED_AT and self.trainer.strategy.topology.group_index == 1:
                time.sleep(STALL_SECONDS)
            self.started[step] = time.monotonic()
            loss = super().training_step(parts, index)
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            self.log("rank", float(self.global_rank), sync_dist=True)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            self.log("after", 1.0, sync_dist=True)

    return Clocked()


@pytest.mark.parametrize(("world_size", "distribution"), [(2, "pytorch_lightning"), (4, LIGHTNING)])
def test_a_group_that_stalls_between_launches_keeps_no_other_waiting(
    world_size: int, distribution: str, tmp_path: Path
) -> None:
    """With everything on that Lightning would broadcast at every batch."""

    def run(rank: int, world_size: int) -> Any:
        pl = importlib.import_module(distribution)
        checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, train_time_interval=timedelta(hours=1))
        choices = {"sync_every": 20, "overlap_steps": 5, "fragments": [["*"]]}
        return fit(
            rank,
            world_size,
            2,
            45,
            choices,
            distribution,
            inspect=lambda trainer, module: module.started,
            trainer_choices={"max_time": "00:01:00:00", "callbacks": [checkpoint], "enable_checkpointing": True},
            make=clocked,
        )["inspected"]

    ranks = run_processes(run, world_size)
    first_of_fast, first_of_stalled = ranks[0], ranks[-1]
    # One launch landed at 25, the next is at 40: in between group 0 must not wait.
    assert first_of_fast[39] < first_of_stalled[STALLED_AT]
    # And it does wait, at the landing after inner step 45 at the latest, or the test would show nothing.
    assert len(first_of_fast) == len(first_of_stalled) == 45


def test_what_is_logged_per_batch_is_a_mean_over_the_group_and_per_epoch_over_the_world() -> None:
    def run(rank: int, world_size: int) -> Any:
        seen: list[float] = []

        def noting(distribution: str, inner: str, seed: int) -> Any:
            base = type(clocked(distribution, inner, seed))

            class Noting(base):  # type: ignore[misc, valid-type]
                def on_train_batch_end(self, *args: Any) -> None:
                    seen.append(float(self.trainer.callback_metrics["rank"]))

            return Noting()

        trained = fit(
            rank,
            world_size,
            2,
            6,
            {"sync_every": 20, "fragments": [["*"]]},
            inspect=lambda trainer, module: float(trainer.callback_metrics["loss_epoch"]),
            make=noting,
        )
        return seen[-1], trained["inspected"]

    ranks = run_processes(run, 4)
    assert [per_batch for per_batch, _ in ranks] == [0.5, 0.5, 2.5, 2.5]
    assert len({epoch for _, epoch in ranks}) == 1, "what a monitor reads is the same on every rank"


def slow(distribution: str, inner: str, seed: int) -> Any:
    """A module whose steps take at least 20 ms."""
    base = type(fits.module(distribution, inner, seed))

    class Slow(base):  # type: ignore[misc, valid-type]
        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            time.sleep(0.02)
            return super().training_step(parts, index)

    return Slow()


def test_a_time_limit_stops_all_ranks_after_the_same_inner_step(distribution: str) -> None:
    def run(rank: int, world_size: int) -> int:
        trained = fit(
            rank,
            world_size,
            2,
            10_000,
            {"sync_every": 10, "overlap_steps": 3, "fragments": [["*"]]},
            distribution,
            trainer_choices={"max_time": {"seconds": 1}},
            make=slow,
        )
        return int(trained["report"]["inner_steps"])

    steps = run_processes(run, 2)
    assert steps[0] == steps[1]
    assert steps[0] < 10_000
    assert steps[0] % 10 == 3, "the decision was read at a landing"


def test_checkpoints_by_time_are_saved_by_all_ranks_after_the_same_inner_step(
    distribution: str, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> list[int]:
        pl = importlib.import_module(distribution)
        saved: list[int] = []

        class Noting(pl.callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
            def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
                saved.append(trainer.global_step)
                super()._save_checkpoint(trainer, filepath)

        # The ranks' own clocks would make them save after different steps.
        interval = timedelta(seconds=0.3 + 0.2 * rank)
        callback = Noting(tmp_path, train_time_interval=interval, save_top_k=-1)
        fit(
            rank,
            world_size,
            2,
            100,
            {"sync_every": 10, "overlap_steps": 3, "fragments": [["*"]]},
            distribution,
            trainer_choices={"callbacks": [callback], "enable_checkpointing": True},
            make=slow,
        )
        return saved

    first, second = run_processes(run, 2)
    assert first == second
    assert len(first) >= 2
    assert all(step % 10 == 3 for step in first), "each at a landing"
    assert len(set(first)) == len(first)
    assert len(list(tmp_path.glob("*.ckpt"))) == len(first)


def test_the_replacements_are_undone_after_the_fit() -> None:
    def run(rank: int, world_size: int) -> bool:
        def undone(trainer: Any, module: Any) -> bool:
            targets = [trainer.fit_loop.epoch_loop, trainer._signal_connector, *trainer.callbacks]
            targets.append(trainer.fit_loop)
            names = {"_broadcast_sigterm_tensor", "_sigterm_notifier_fn", "_check_time_remaining", "get_metrics"}
            names |= {"_slurm_sigusr_handler_fn", "on_advance_end"}
            return not any(names & set(vars(target)) for target in targets)

        choices = {"sync_every": 4, "overlap_steps": 1, "fragments": [["*"]]}
        return bool(
            fit(rank, world_size, 2, 6, choices, inspect=undone, trainer_choices={"max_time": "00:01:00:00"})[
                "inspected"
            ]
        )

    assert run_processes(run, 2) == [True, True]


def test_a_gather_in_a_training_step_stays_in_the_group() -> None:
    def run(rank: int, world_size: int) -> list[float]:
        seen: list[float] = []

        def gathering(distribution: str, inner: str, seed: int) -> Any:
            base = type(fits.module(distribution, inner, seed))

            class Gathering(base):  # type: ignore[misc, valid-type]
                def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
                    seen[:] = self.all_gather(torch.tensor(float(self.global_rank))).flatten().tolist()
                    return super().training_step(parts, index)

            return Gathering()

        fit(rank, world_size, 2, 2, {"fragments": [["*"]]}, make=gathering)
        return seen

    assert run_processes(run, 4) == [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [2.0, 3.0]]


def test_a_metric_of_torchmetrics_that_is_computed_in_a_training_step_stays_in_the_group() -> None:
    def run(rank: int, world_size: int) -> tuple[float, float, float]:
        seen: list[float] = []

        def measuring(distribution: str, inner: str, seed: int) -> Any:
            base = type(fits.module(distribution, inner, seed))

            class Measuring(base):  # type: ignore[misc, valid-type]
                def __init__(self) -> None:
                    super().__init__()
                    self.computed, self.logged = MeanMetric(), MeanMetric(dist_sync_on_step=True)

                def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
                    self.computed.update(float(rank))
                    seen[:] = [float(self.computed.compute()), float(self.logged(float(rank)))]
                    self.log("rank", self.logged, on_step=False, on_epoch=True)
                    return super().training_step(parts, index)

            return Measuring()

        trained = fit(
            rank,
            world_size,
            2,
            3,
            {"fragments": [["*"]]},
            inspect=lambda trainer, module: (
                float(trainer.callback_metrics["rank"]),
                module.computed.dist_sync_fn is None,
            ),
            make=measuring,
        )
        assert trained["inspected"][1], "undone after the fit"
        return seen[0], seen[1], trained["inspected"][0]

    assert run_processes(run, 4) == [(0.5, 0.5, 1.5), (0.5, 0.5, 1.5), (2.5, 2.5, 1.5), (2.5, 2.5, 1.5)]


# Collectives of users


class GatherLayer(torch.autograd.Function):
    """Gathers over all ranks, as that of lightly does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        every = torch.stack(gradients)
        dist.all_reduce(every)
        return every[dist.get_rank()]


def of_world(module: Any, tensor: Tensor, index: int) -> Tensor:
    return torch.stack(GatherLayer.apply(tensor))


def now_and_then(module: Any, tensor: Tensor, index: int) -> Tensor:
    return torch.stack(GatherLayer.apply(tensor)) if index % 3 else tensor


def of_group(module: Any, tensor: Tensor, index: int) -> Tensor:
    gathered: Tensor = module.all_gather(tensor, sync_grads=True)
    return gathered


def contrastive(distribution: str, gather: Callable[..., Tensor], manual: bool) -> Any:
    """A module that gathers, normalises, measures, logs over all ranks, and validates."""
    base = type(fits.module(distribution, net=nn.Linear(1, 1)))

    class Contrastive(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
            self.other, self.mean = nn.Linear(3, 3), MeanMetric()
            self.automatic_optimization = not manual

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = gather(self, self.other(self.net(parts[0])), index).square().mean()
            self.mean.update(loss)
            self.log("mean", self.mean)
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            if manual:
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
            self.log("score", self.other(self.net(parts[0])).mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            if not manual:
                return torch.optim.AdamW(self.parameters(), lr=0.01)
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net, self.other)]

    return Contrastive()


def noted() -> list[str]:
    """What the package will have said in this process."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_sdiloco").addHandler(handler)
    return said


def said_of_gathering(
    rank: int,
    world_size: int,
    distribution: str,
    groups: int,
    gather: Callable[..., Tensor],
    manual: bool,
    folder: Path,
) -> list[str]:
    """What a fit says of waiting in every batch that validates, saves and may stop after every second one."""
    said = noted()
    callbacks = importlib.import_module(distribution).callbacks
    chosen = [
        callbacks.ModelCheckpoint(folder, every_n_train_steps=1, monitor="loss"),
        callbacks.EarlyStopping("score", patience=100),
    ]
    batches = fits.SomeBatches(rank, 6)
    trainer = fits.trainer(
        distribution,
        strategy=fits.strategy(distribution, worker_groups=groups, sync_every=4, overlap_steps=1, warmup_steps=2),
        devices=world_size,
        max_epochs=2,
        max_time="00:01:00:00",
        val_check_interval=2,
        limit_val_batches=1,
        enable_checkpointing=True,
        callbacks=chosen,
    )
    trainer.fit(contrastive(distribution, gather, manual), batches, batches)
    assert trainer.global_step == (24 if manual else 12)
    return [text for text in said if "in a row" in text]


@pytest.mark.parametrize(("distribution", "manual"), [(LIGHTNING, False), ("pytorch_lightning", True)])
def test_a_gather_over_all_ranks_in_every_batch_is_said_once(distribution: str, manual: bool, tmp_path: Path) -> None:
    first, second = run_processes(said_of_gathering, 2, distribution, 2, of_world, manual, tmp_path)
    assert len(first) == 1
    assert "group=trainer.strategy.topology.in_group.process_group" in first[0]
    assert "self.all_gather" in first[0]
    assert second == []


@pytest.mark.parametrize(
    ("ranks", "groups", "gather", "manual"),
    [(2, 1, of_world, False), (4, 2, of_group, True), (2, 2, now_and_then, False)],
)
def test_nothing_is_said_where_batches_make_no_group_wait(
    ranks: int, groups: int, gather: Callable[..., Tensor], manual: bool, tmp_path: Path
) -> None:
    assert run_processes(said_of_gathering, ranks, LIGHTNING, groups, gather, manual, tmp_path) == [[]] * ranks


@pytest.mark.parametrize(("groups", "in_batches", "times"), [(2, True, 1), (2, False, 0), (1, True, 0)])
def test_a_loop_of_fabric_is_told_of_a_gather_over_all_ranks_between_forward_and_backward(
    groups: int, in_batches: bool, times: int
) -> None:
    def loop(rank: int, world_size: int) -> int:
        said = noted()
        strategy = StreamingDiLoCoFabricStrategy(groups, sync_every=4, overlap_steps=1, warmup_steps=2)
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        model, optimizer = fabric.setup(net := mlp(rank), inner_optimizer("adamw", net))
        for step in range(9):
            x, _ = batch(rank, step)
            seen = model(x)
            fabric.backward((torch.stack(GatherLayer.apply(seen)) if in_batches else seen).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            with fabric.strategy.evaluate(), torch.no_grad():
                fabric.all_reduce(model(x).mean())
            fabric.barrier()
        fabric.strategy.finish()
        told = [text for text in said if "in a row" in text]
        assert all("group=fabric.strategy.topology.in_group.process_group" in text for text in told)
        return len(told)

    assert run_processes(loop, 2) == [times, 0]
