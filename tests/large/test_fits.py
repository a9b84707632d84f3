"""Fits of large models: exact resume with fragments in flight, restart with other groups, and
contrastive losses.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests import fits
from tests.bits import same
from tests.fits import LIGHTNING, said_by
from tests.large.models import Batches, Large, batch, model_of, sharded
from tests.lightning.test_checkpoint import saving
from tests.ranks import agreed, in_ranks, run_processes

pytestmark = pytest.mark.large

# All fragments have landed once when the fit is saved, and some are in flight again.
STEPS = 15
SAVED = 10
SHARDED = {"data_parallel_size": 2, "tensor_parallel_size": 1}


def fit(
    rank: int, kind: str, groups: int, folder: Path, resume: bool = False, **choices: Any
) -> dict[str, Any]:
    """Fits, saving in the midst of it or resuming from there."""
    size = 4 // groups
    at_save = dict[str, Any]()

    def look(trainer: Any, *_: Any) -> None:
        if trainer.global_step == SAVED:
            at_save["seen"] = trainer.strategy.outer_state_dict()
            at_save["in_flight"] = trainer.strategy.engine.rounds.in_flight

    def inspect(trainer: Any, module: Any) -> dict[str, Tensor]:
        return {name: values.clone() for name, values in module.named_buffers()}

    model: Any = Large(kind, seed=rank // size)
    if "data_parallel_size" in choices:
        model.configure_model = lambda: sharded(model)
    callbacks = [pl.callbacks.LambdaCallback(on_train_batch_start=look)]
    if not resume:
        callbacks += saving(LIGHTNING, folder, every_n_train_steps=SAVED)
    trained = fits.fit(
        rank,
        4,
        groups,
        STEPS,
        {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:100", **choices},
        make=lambda *_, seed: model,
        loader=Batches(rank, size),
        inspect=inspect,
        trainer_choices={"callbacks": callbacks, "enable_checkpointing": not resume},
        resume=folder / f"step={SAVED}.ckpt" if resume else None,
    )
    assert sum(values.numel() for values in trained["outer"].values()) >= 100_000
    assert same(trained["model"], trained["outer"])
    assert agreed(trained["outer"])
    return {**at_save, **trained}


@pytest.mark.parametrize(
    ("kind", "groups", "choices"),
    [
        ("wide", 2, {"compression": "sparse", "fragments": "strided:1"}),
        ("deep", 4, {"exchange": "two_shot"}),
        ("normed", 4, {"fragments": "strided:20"}),
        ("wide", 2, {"fragments": "strided:1", **SHARDED}),
        ("deep", 2, SHARDED),
    ],
)
@in_ranks(4)
def test_a_fit_resumed_in_flight_is_bit_identical_and_other_groups_can_continue_it(
    rank: int, kind: str, groups: int, choices: dict[str, Any], tmp_path: Path
) -> None:
    through = fit(rank, kind, groups, tmp_path, **choices)
    resumed = fit(rank, kind, groups, tmp_path, resume=True, **choices)
    assert resumed["in_flight"] == through["in_flight"] != ()
    for name in ("seen", "outer", "model", "inspected"):
        assert same(resumed[name], through[name]), name
    for name in ("inner_steps", "launches", "landings", "bytes_sent"):
        assert resumed["report"][name] == through["report"][name]
    if choices.keys() >= SHARDED.keys():
        return
    saved = torch.load(tmp_path / f"step={SAVED}.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], values) for name, values in through["seen"].items())
    in_other_groups = fit(rank, kind, 6 - groups, tmp_path, resume=True, **choices)
    report = in_other_groups["report"]
    assert report["inner_steps"] == STEPS
    assert report["flights_dropped"] == 0
    assert agreed(in_other_groups["seen"])


def contrastive(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
    """A loss that compares the embeddings of all ranks."""
    inputs = parts[0]
    shifted = inputs + 0.1 * inputs.roll(1, dims=-1)
    views = [nn.functional.normalize(self.net(x), dim=-1) for x in (inputs, shifted)]
    first, second = self.all_gather(views, sync_grads=True)
    logits = first.flatten(0, 1) @ second.flatten(0, 1).T / 0.1
    return nn.functional.cross_entropy(logits, torch.arange(len(logits)))


def keep_gradients(self: Any, optimizer: torch.optim.Optimizer) -> None:
    self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])


def gradients(
    rank: int, world_size: int, strategy: Any, group: int | None = None
) -> list[list[Tensor]]:
    """The gradients of two steps in a group; by default ranks 0 and 1 are group 0."""
    group = rank // 2 if group is None else group
    hooks = {
        "training_step": contrastive,
        "on_before_optimizer_step": keep_gradients,
        "gradients": [],
    }
    module = fits.module(inner="adamw", net=model_of("wide"), **hooks)
    batches = [[part.chunk(2)[rank % 2] for part in batch(group, step)] for step in (1, 2)]
    trainer = fits.trainer(strategy=strategy, devices=world_size, max_steps=2)
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    return list(module.gradients)


def test_gradients_of_a_contrastive_loss_match_ddps_over_the_ranks_of_the_group() -> None:
    expected = [run_processes(gradients, 2, "ddp", group) for group in (0, 1)]
    assert not torch.equal(expected[0][0][0][0], expected[1][0][0][0])

    def require_gradients_of_ddp(rank: int, world_size: int) -> None:
        messages = said_by("lightning_sdiloco")
        steps = gradients(rank, world_size, fits.strategy(worker_groups=2))
        for step, step_of_ddp in zip(steps, expected[rank // 2][rank % 2], strict=True):
            assert all(map(torch.equal, step, step_of_ddp))
            assert len(step) == len(step_of_ddp)
            assert sum(gradient.abs().sum() for gradient in step) > 0
        warnings = [text for text in messages if "all_gather" in text]
        assert len(warnings) == (1 if rank == 0 else 0)
        for warning in warnings:
            assert "over the 2 ranks of the worker group" in warning

    run_processes(require_gradients_of_ddp, 4)
