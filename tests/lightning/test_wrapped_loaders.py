"""Loaders that yield None on purpose in a Trainer: a paced group, and micro-batches that are left out."""

from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sdiloco import DropCompute
from tests import fits
from tests.lightning.uneven_fits import Announced, Place, Stateful, fit, gan, noting, run_fit
from tests.methods import Paced
from tests.ranks import RankError, run_processes


class Sized(Stateful):
    """Has a length, and can be taken up again in the middle."""

    def __len__(self) -> int:
        return 14


def half_for_the_second(place: Place) -> Any:
    return Paced(Sized(place, 14), speed=0.5) if place[0] else Sized(place, 14)


def test_a_paced_group_is_idle_in_its_share_of_the_steps_and_weighs_less() -> None:
    first, second = fit(2, half_for_the_second, max_epochs=1)
    assert first["common"] == {**second["common"], "metrics": first["common"]["metrics"]}
    assert first["common"]["inner_steps"] == first["common"]["global_step"] == 14
    assert (first["idle"], second["idle"]) == ([], [1, 3, 5, 7, 9, 11, 13])
    assert all(torch.equal(values, second["outer"][name]) for name, values in first["outer"].items())
    assert first["warned"] == second["warned"] == []


def test_a_paced_group_resumes_where_it_was(tmp_path: Path) -> None:
    whole = fit(2, half_for_the_second, max_epochs=-1, max_steps=9)

    def stopped(rank: int, world_size: int) -> dict[str, Any]:
        path = str(tmp_path / "stopped.ckpt")
        saved = ModelCheckpoint(dirpath=tmp_path, filename="stopped", every_n_train_steps=6)
        more = {"callbacks": [saved], "enable_checkpointing": True}
        run_fit(rank, world_size, half_for_the_second, max_epochs=-1, max_steps=6, **more)
        return run_fit(rank, world_size, half_for_the_second, resume=path, max_epochs=-1, max_steps=9)

    for one, other in zip(whole, run_processes(stopped, 2), strict=True):
        assert all(torch.equal(values, other["outer"][name]) for name, values in one["outer"].items())
        assert one["idle"][-2:] == other["idle"][-2:]


# DropCompute


def dropping(place: Place) -> Any:
    """All that may be left out is, of every other step on one rank of the second group."""
    return DropCompute(3, budget=0.0 if place[:2] == (1, 1) else inf)(Announced(place, 14))


def plain(place: Place) -> Any:
    return Announced(place, 14)


def test_a_rank_leaves_micro_batches_out_and_its_group_weighs_less() -> None:
    def weights(trainer: Any, module: Any) -> list[int]:
        return list(module.weights)

    def noting_weights(distribution: str, inner: str = "sgd", seed: int = 0) -> Any:
        base = type(fits.module(distribution, inner, seed))

        class Weighing(base):  # type: ignore[misc, valid-type]
            weights: list[int] = []
            batches: list[Any] = []
            validated: list[Any] = []
            idle: list[int] = []

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                self.weights.append(self.trainer.strategy.engine.rounds.fragments[0].weight)
                self.idle += [batch_idx] if batch is None else []

        return Weighing()

    choices = {"max_epochs": 1, "accumulate_grad_batches": 3, "make": noting_weights, "inspect": weights}
    ranks = fit(4, dropping, **choices)
    assert [rank["common"]["inner_steps"] for rank in ranks] == [5] * 4
    # Four inner steps of three micro-batches, and one of two; the first launch is after the fourth.
    assert [rank["idle"] for rank in ranks] == [[], [], [], [1, 4, 7, 10]]
    assert [rank["inspected"][8] for rank in ranks] == [9, 9, 9, 6]
    assert all(torch.equal(values, rank["outer"][name]) for rank in ranks for name, values in ranks[0]["outer"].items())
    # Where nothing is late, the last bit is that of the run without it.
    never = fit(2, lambda place: DropCompute(3, budget="auto")(plain(place)), max_epochs=1, accumulate_grad_batches=3)
    without = fit(2, plain, max_epochs=1, accumulate_grad_batches=3)
    assert all(torch.equal(values, never[0]["outer"][name]) for name, values in without[0]["outer"].items())


@pytest.mark.parametrize(
    ("micro_batches", "make", "words"),
    [(2, "noting", "accumulate_grad_batches=3 differ"), (3, "gan", "does not go with manual optimization")],
)
def test_what_cannot_be_dropped_is_refused(micro_batches: int, make: str, words: str) -> None:
    def run(rank: int, world_size: int) -> None:
        making = noting if make == "noting" else lambda distribution, seed: gan(distribution, seed)
        more = {"accumulate_grad_batches": 3} if make == "noting" else {}
        run_fit(rank, world_size, lambda place: DropCompute(micro_batches)(plain(place)), make=making, **more)

    with pytest.raises(RankError, match=words):
        run_processes(run, 2)
