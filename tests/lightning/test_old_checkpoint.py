"""A checkpoint of an earlier version, saved in the midst of flights: every tensor is found again, and training goes on.

``old_checkpoint/`` was written by ``python -m tests.lightning.test_old_checkpoint``, in the version before the package
was divided into rooms. All its arithmetic is exact: values are small multiples of powers of two, so that every
processor gets the same bits.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_sdiloco.compression import FP4, ErrorFeedback
from tests import fits
from tests.ranks import run_processes

FOLDER = Path(__file__).with_name("old_checkpoint")
SAVED, LAST = 13, 30
CHOICES: dict[str, Any] = {
    "worker_groups": 2,
    "sync_every": 6,
    "overlap_steps": 4,
    "fragments": [["first.*"], ["second.*"], ["third.*"]],
    "compression": ErrorFeedback(FP4()),
    "exchange": "two_shot",
    "outer_lr": 0.5,
    "outer_momentum": 0.5,
    "mixing": 0.5,
    "outlier_guard": 64.0,
}


class Exact(LightningModule):
    """Gradients are the whole numbers of the batch, whatever the parameters are, and the learning rate is 1/16."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("first", (3, 5)), ("second", (4, 33)), ("third", (7,))):
            part = nn.Module()
            part.weight = nn.Parameter(torch.randint(-64, 64, shape, generator=generator) / 64)
            self.add_module(name, part)
        self.third.register_buffer("seen", torch.zeros(2))

    def training_step(self, numbers: Tensor, index: int) -> Tensor:
        self.third.seen += numbers[:2]
        flat = torch.cat([parameter.view(-1) for parameter in self.parameters()])
        return (flat * numbers).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1 / 16, momentum=0.5)


class Numbers:
    """Whole numbers for every step of a group; it can be taken up again in the middle."""

    def __init__(self, group: int) -> None:
        self.group, self.step = group, 0

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Any:
        while self.step < len(self):
            self.step += 1
            generator = torch.Generator().manual_seed(1000 * self.group + self.step)
            yield torch.randint(-4, 5, (154,), generator=generator).float()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Look(Callback):
    """Keeps the state of the engine before the first step after the one of the checkpoint."""

    state: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == SAVED and self.state is None:
            self.state = trainer.strategy.engine.state_dict()


def fit(
    rank: int, world_size: int, folder: Path, resume: str | None, choices: dict[str, Any] = CHOICES
) -> dict[str, Any]:
    """What a rank holds at the checkpoint, and at the end."""
    look, model = Look(), Exact()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = fits.trainer(
        strategy=fits.strategy(**choices),
        devices=world_size,
        max_steps=LAST,
        callbacks=[look, *([saving] if resume is None else [])],
        enable_checkpointing=resume is None,
    )
    trainer.fit(model, Numbers(rank), ckpt_path=resume)
    end = {name: values.clone() for name, values in model.state_dict().items()}
    return {"at the checkpoint": look.state, "end": end, "outer": trainer.strategy.outer_state_dict()}


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nested states differ, by a bit or in structure; seconds are not compared."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [where]
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{where}: {set(one) ^ set(other)}"]
        return [d for key in one if key not in SECONDS for d in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)}"]
        pairs = zip(one, other, strict=True)
        return [d for index, (a, b) in enumerate(pairs) for d in differences(a, b, f"{where}/{index}")]
    return [] if one == other else [f"{where}: {one} and {other}"]


SECONDS = ("exposed_wait_s", "in_flight_s")


@pytest.mark.parametrize("left_open", [(), ("outer_lr", "outer_momentum", "mixing")], ids=["numbers", "auto"])
def test_a_checkpoint_of_an_earlier_version_is_taken_up_bit_for_bit(left_open: tuple[str, ...], tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "old")
    expected = torch.load(tmp_path / "old" / "expected.pt", weights_only=True)
    assert all(rank["at the checkpoint"]["flights"] for rank in expected), "nothing is in flight there"
    assert all(f["memory"] is not None for f in expected[0]["at the checkpoint"]["fragments"][:2])
    path = str(tmp_path / "old" / f"step={SAVED}.ckpt")
    choices = {name: value for name, value in CHOICES.items() if name not in left_open}
    resumed = run_processes(lambda rank, world_size: fit(rank, world_size, tmp_path, path, choices), 2)
    # States of that version did not say whose they are, with which settings and warm-up, and when fragments launch.
    assert [rank["at the checkpoint"].pop("rank")["group_index"] for rank in resumed] == [0, 1]
    assert {rank["at the checkpoint"].pop("settings")["outer_lr"] for rank in resumed} == {"0.5"}
    assert [rank["at the checkpoint"].pop("pace")["sync_every"] for rank in resumed] == [CHOICES["sync_every"]] * 2
    assert [rank["at the checkpoint"].pop("warmup_steps") for rank in resumed] == [0, 0]
    for rank, then in zip(resumed, expected, strict=True):
        # Not at the end: the last mean was sent in four bits per value then, and is in float32 now.
        assert differences(rank["at the checkpoint"], then["at the checkpoint"]) == []


def test_differences_are_seen() -> None:
    expected = torch.load(FOLDER / "expected.pt", weights_only=True)
    other = torch.load(FOLDER / "expected.pt", weights_only=True)
    other[1]["at the checkpoint"]["flights"][0]["gradient"][0] += 2**-20
    assert differences(other, expected) == ["/1/at the checkpoint/flights/0/gradient"]


if __name__ == "__main__":
    ranks = run_processes(lambda rank, world_size: fit(rank, world_size, FOLDER, None), 2)
    for left in FOLDER.glob("*"):
        if f"step={SAVED}.ckpt" not in left.name:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    torch.save(ranks, FOLDER / "expected.pt")
