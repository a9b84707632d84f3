"""A fit on a route on which groups hold outer parameters of their own: what is shown and saved, and how it resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sdiloco import RandomPairs
from tests import fits
from tests.fits import LIGHTNING, SomeBatches
from tests.lightning.test_checkpoint import StatefulBatches, assert_same, saving, traced
from tests.lightning.test_evaluation import evaluated, net_of
from tests.ranks import run_processes

CHOICES: dict[str, Any] = {
    "worker_groups": 4,
    "sync_every": 4,
    "overlap_steps": 1,
    "mixing": 0.25,
    "fragments": [["*"]],
    "compression": "int8",
    "route": RandomPairs(),
    "outer_lr": 0.7,
    "outer_momentum": 0.5,
}


def run(rank: int, world_size: int, folder: Path, resume: str | None) -> dict[str, Any]:
    model = evaluated(make=lambda distribution, seed: traced(distribution, seed))
    model.trace = {}
    callbacks = [] if resume else saving(LIGHTNING, folder, every_n_train_steps=5)
    trainer = fits.trainer(
        strategy=fits.strategy(**CHOICES),
        devices=world_size,
        max_steps=14,
        callbacks=callbacks,
        enable_checkpointing=not resume,
        val_check_interval=7,
        num_sanity_val_steps=0,
    )
    torch.manual_seed(100 + rank)
    trainer.fit(model, StatefulBatches(rank, 0, 1, length=100), SomeBatches(rank, 1), ckpt_path=resume)
    held = {name: values.clone() for name, values in model.state_dict().items()}
    return {"trace": model.trace, "seen": model.seen, "model": held}


@pytest.mark.timeout(180)
def test_a_fit_shows_and_saves_the_mean_and_resumes(tmp_path: Path) -> None:
    whole = run_processes(run, 4, tmp_path, None, timeout=80)
    for one in whole:
        assert_same(net_of(one["model"]), net_of(whole[0]["model"]))
        for seen, of_first in zip(one["seen"], whole[0]["seen"], strict=True):
            assert_same(seen, of_first)
    saved = torch.load(tmp_path / "step=10.ckpt", weights_only=True)["state_dict"]
    held = [net_of(one["trace"][10]) for one in whole]
    assert any(not torch.equal(held[0][name], held[1][name]) for name in saved if name.startswith("net."))
    for name in (name for name in held[0] if held[0][name].is_floating_point()):
        mean = torch.stack([own[name] for own in held]).mean(0)
        assert torch.allclose(saved[name], mean, atol=1e-6), name
    resumed = run_processes(run, 4, tmp_path, str(tmp_path / "step=10.ckpt"), timeout=80)
    for one, other in zip(whole, resumed, strict=True):
        for step in (11, 12, 13):
            assert_same(other["trace"][step], one["trace"][step])
        assert_same(other["model"], one["model"])
