"""Fits of large models: exact resume with flights in the air, restart with other groups, and sharded groups."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import lightning_sdiloco
from tests import fits
from tests.fits import whole
from tests.large.models import Large, batch, same
from tests.ranks import run_processes
from tests.small_disk import small_disk

pytestmark = [pytest.mark.large, pytest.mark.timeout(180)]

SETTINGS: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:100"}
# All fragments have landed once when the fit is saved, and some are in flight again.
STEPS, SAVED = 15, 10


class Batches:
    """Batches of a group that can be taken up again in the middle; a rank sees its part of each."""

    def __init__(self, group: int, shard: int, shards: int) -> None:
        self.place, self.step = (group, shard, shards), 0

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        _, shard, shards = self.place
        while self.step < len(self):
            self.step += 1
            x, y = self.batch(self.step)
            yield x.chunk(shards)[shard], y.chunk(shards)[shard]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return batch(self.place[0], step)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Sharded(Large):
    """The model with its parameters sharded over the ranks of a group."""

    def configure_model(self) -> None:
        if not any(hasattr(p, "placements") for p in self.parameters()):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)


def fit(
    rank: int, world_size: int, kind: str, groups: int, folder: Path, resume: bool = False, **choices: Any
) -> dict[str, Any]:
    """Fits in this rank, saving in the midst of it or resuming from there, and returns what is worth comparing."""
    size, is_sharded = world_size // groups, choices.pop("is_sharded", False)
    seen: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == SAVED:
                seen.extend([trainer.strategy.outer_state_dict(), trainer.strategy.engine.in_flight])

    saving = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    sizes = {"data_parallel_size": size, "tensor_parallel_size": 1} if is_sharded else {}
    made = lightning_sdiloco.StreamingDiLoCoModelParallelStrategy if is_sharded else fits.strategy
    strategy = made(worker_groups=groups, **sizes, **{**SETTINGS, **choices})
    trainer = fits.trainer(
        strategy=strategy,
        devices=world_size,
        max_steps=STEPS,
        callbacks=[Look()] if resume else [Look(), saving],
        enable_checkpointing=not resume,
    )
    module = (Sharded if is_sharded else Large)(kind, seed=rank // size)
    path = str(folder / f"step={SAVED}.ckpt") if resume else None
    trainer.fit(module, Batches(rank // size, rank % size, size), ckpt_path=path)
    return {
        "outer": strategy.outer_state_dict(),
        "model": {name: whole(p) for name, p in module.named_parameters()},
        "buffers": {name: values.clone() for name, values in module.named_buffers()},
        "report": strategy.report(),
        "seen": seen[0],
        "in_flight": seen[1],
    }


def run(*args: Any, groups: int, size: int = 1, **choices: Any) -> list[dict[str, Any]]:
    """Fits in all ranks, and asserts that a model of real size was trained in which they agree."""

    def function(rank: int, world_size: int, kind: str, folder: Path, resume: bool = False) -> dict[str, Any]:
        return fit(rank, world_size, kind, groups, folder, resume, **choices)

    ranks = list(run_processes(function, groups * size, *args, timeout=150.0))
    assert sum(values.numel() for values in ranks[0]["outer"].values()) >= 100_000
    assert all(same(rank["outer"], ranks[0]["outer"]) and same(rank["model"], rank["outer"]) for rank in ranks)
    return ranks


def assert_resumed(resumed: list[dict[str, Any]], through: list[dict[str, Any]]) -> None:
    for one, other in zip(resumed, through, strict=True):
        assert one["in_flight"] == other["in_flight"] != ()
        for kind in ("seen", "outer", "model", "buffers"):
            assert same(one[kind], other[kind])
        for key in ("inner_steps", "launches", "landings", "bytes_sent"):
            assert one["report"][key] == other["report"][key]


@pytest.mark.parametrize(
    ("kind", "groups", "size", "choices"),
    [
        ("wide", 2, 2, {"compression": "sparse", "fragments": "strided:1"}),
        ("deep", 3, 1, {"exchange": "two_shot"}),
        ("normed", 2, 1, {"fragments": "strided:20"}),
    ],
)
def test_a_fit_resumed_in_flight_gives_the_same_bits_and_other_groups_go_on_from_there(
    kind: str, groups: int, size: int, choices: dict[str, Any], tmp_path: Path
) -> None:
    through = run(kind, tmp_path, groups=groups, size=size, **choices)
    assert_resumed(run(kind, tmp_path, True, groups=groups, size=size, **choices), through)
    saved = torch.load(tmp_path / f"step={SAVED}.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], values) for name, values in through[0]["seen"].items())
    others = run(kind, tmp_path, True, groups=5 - groups, **choices)
    assert others[0]["report"]["inner_steps"] == STEPS
    assert others[0]["report"]["flights_dropped"] == 0
    assert all(same(rank["seen"], others[0]["seen"]) for rank in others)


@pytest.mark.parametrize(("kind", "layers"), [("wide", 1), ("deep", 100)])
def test_sharded_groups_resume_in_flight_to_the_same_bits(kind: str, layers: int, tmp_path: Path) -> None:
    choices = {"is_sharded": True, "fragments": f"strided:{layers}"}
    through = run(kind, tmp_path, groups=2, size=2, **choices)
    assert_resumed(run(kind, tmp_path, True, groups=2, size=2, **choices), through)


def test_a_file_system_without_room_ends_all_ranks_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path, 20):
        saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)

        def function(rank: int, world_size: int) -> None:
            strategy = fits.strategy(worker_groups=2, **SETTINGS)
            choices: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True, "max_steps": STEPS}
            fits.trainer(strategy=strategy, devices=2, **choices).fit(Large("wide"), Batches(rank, 0, 1))

        errors = run_processes(function, 2, expect_failure=True)
        assert sorted(errors) == [0, 1]
        told = f"Nothing is left of it. Resume from {tmp_path}/step=3.ckpt"
        assert all(told in error and "No space left on device" in error for error in errors.values())
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step=3.ckpt", "step=3.ckpt.sdiloco"]
        assert not list(tmp_path.rglob("*.part"))
