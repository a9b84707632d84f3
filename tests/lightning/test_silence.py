"""Between launches no group waits for another, and decisions on time are made by all at the same inner step."""

import importlib
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from tests import fits
from tests.fits import LIGHTNING, fit
from tests.ranks import run_processes

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


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
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


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
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
