"""Fits of large models: exact resume with flights in the air, restart with other groups, and
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
from tests.large.models import Batches, Large, batch, made, sharded
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
    found = dict[str, Any]()

    def look(trainer: Any, *_: Any) -> None:
        if trainer.global_step == SAVED:
            found.update(
                seen=trainer.strategy.outer_state_dict(),
                in_flight=trainer.strategy.engine.in_flight,
            )

    def inspect(trainer: Any, module: Any) -> dict[str, Tensor]:
        return {name: values.clone() for name, values in module.named_buffers()}

    model: Any = Large(kind, seed=rank // size)
    if "data_parallel_size" in choices:
        model.configure_model = lambda: sharded(model)
    callbacks = [pl.callbacks.LambdaCallback(on_train_batch_start=look)]
    callbacks += [] if resume else saving(LIGHTNING, folder, every_n_train_steps=SAVED)
    own: dict[str, Any] = {
        "make": lambda *_, seed: model,
        "loader": Batches(rank, size),
        "inspect": inspect,
    }
    own |= {"trainer_choices": {"callbacks": callbacks, "enable_checkpointing": not resume}}
    own |= {"resume": folder / f"step={SAVED}.ckpt" if resume else None}
    choices = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:100", **choices}
    found |= fits.fit(rank, 4, groups, STEPS, choices, **own)
    assert sum(values.numel() for values in found["outer"].values()) >= 100_000
    assert same(found["model"], found["outer"])
    assert agreed(found["outer"])
    return found


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
    through, resumed = (
        fit(rank, kind, groups, tmp_path, again, **choices) for again in (False, True)
    )
    assert resumed["in_flight"] == through["in_flight"] != ()
    assert [
        name
        for name in ("seen", "outer", "model", "inspected")
        if not same(resumed[name], through[name])
    ] == []
    for name in ("inner_steps", "launches", "landings", "bytes_sent"):
        assert resumed["report"][name] == through["report"][name]
    if choices.keys() >= SHARDED.keys():
        return
    saved = torch.load(tmp_path / f"step={SAVED}.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], values) for name, values in through["seen"].items())
    others = fit(rank, kind, 6 - groups, tmp_path, True, **choices)
    assert (others["report"]["inner_steps"], others["report"]["flights_dropped"]) == (STEPS, 0)
    assert agreed(others["seen"])


def contrastive(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
    """A loss that compares the embeddings of all ranks."""
    views = self.net(parts[0]), self.net(parts[0] + 0.1 * parts[0].roll(1, dims=-1))
    one, other = (nn.functional.normalize(view, dim=-1) for view in views)
    ones, others = self.all_gather({"one": one, "other": other}, sync_grads=True).values()
    logits = ones.flatten(0, 1) @ others.flatten(0, 1).T / 0.1
    return nn.functional.cross_entropy(logits, torch.arange(len(logits)))


def keep_gradients(self: Any, optimizer: torch.optim.Optimizer) -> None:
    self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])


def test_gradients_of_a_contrastive_loss_match_ddps_over_the_ranks_of_the_group() -> None:
    def gradients(rank: int, world_size: int, strategy: Any, group: int) -> list[list[Tensor]]:
        hooks = {
            "training_step": contrastive,
            "on_before_optimizer_step": keep_gradients,
            "gradients": [],
        }
        module = fits.module(inner="adamw", net=made("wide"), **hooks)
        steps = [tuple(part.chunk(2)[rank % 2] for part in batch(group, n)) for n in (1, 2)]
        trainer = fits.trainer(strategy=strategy, devices=world_size, max_steps=2)
        trainer.fit(module, torch.utils.data.DataLoader(steps, batch_size=None))  # type: ignore[arg-type]
        return list(module.gradients)

    def ours(rank: int, world_size: int) -> None:
        said = said_by("lightning_sdiloco")
        steps = gradients(rank, world_size, fits.strategy(worker_groups=2), rank // 2)
        for step, its in zip(steps, expected[rank // 2][rank % 2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(step, its, strict=True))
            assert sum(gradient.abs().sum() for gradient in step) > 0
        told = [
            "over the ranks of the worker group (here 2)" in text
            for text in said
            if "all_gather" in text
        ]
        assert told == [True] * (rank == 0)

    expected = [run_processes(gradients, 2, "ddp", group) for group in (0, 1)]
    assert not torch.equal(expected[0][0][0][0], expected[1][0][0][0])
    run_processes(ours, 4)
