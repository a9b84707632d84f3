"""Ranks of sites as processes of their own, for tests: they train a small model and write down when they stepped."""

import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed.run
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdiloco import (
    DropCompute,
    Federation,
    StreamingDiLoCoModelParallelStrategy,
    StreamingDiLoCoMonitor,
    StreamingDiLoCoStrategy,
)
from tests.large.models import FEATURES, TARGETS, wide

BATCH = 8
CHOICES: dict[str, Any] = {"sync_every": 20, "overlap_steps": 2, "fragments": "strided:2"}


@dataclass(frozen=True)
class Place:
    """A rank of a site: where it meets its hub and the other ranks, and where it writes."""

    site: str
    hub: str
    keys: Path
    folder: Path
    port: int
    rank: int = 0
    ranks: int = 1
    late: Literal["carry", "drop"] = "drop"

    @property
    def name(self) -> str:
        return f"{self.site}{self.rank or ''}"

    @cached_property
    def federation(self) -> Federation:
        return Federation(hub=self.hub, run="run", site=self.site, keys=self.keys, late=self.late, lease=2.0)

    def settle(self) -> None:
        """Prepares this process."""
        own = {"LOCAL_RANK": self.rank, "RANK": self.rank, "NODE_RANK": 0, "WORLD_SIZE": self.ranks}
        os.environ |= {key: str(value) for key, value in own.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "GLOO_SOCKET_IFNAME": "lo"}
        log = os.open(self.folder / f"{self.name}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        pl.seed_everything(0)

    def data(self) -> TensorDataset:
        """The data of this site."""
        generator = torch.Generator().manual_seed(sum(map(ord, self.site)))
        return TensorDataset(
            torch.randn(512, FEATURES, generator=generator), torch.randn(512, TARGETS, generator=generator)
        )


class Net(pl.LightningModule):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.net = wide()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        time.sleep(self.seconds)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("trained", loss, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("seen", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ShardedNet(Net):
    def configure_model(self) -> None:
        if not any(hasattr(parameter, "placements") for parameter in self.parameters()):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)


class Notes(Callback):
    """Writes a line at once for every step: how long it took, and what the site knows of the run."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")
        self.began = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        now = time.monotonic()
        engine = trainer.strategy.engine
        follower = engine.loop.follower
        rounds = [own.applied.round for own in follower.fragments]
        digests = [own.digest for own in follower.fragments]
        began, ended = engine.step_span
        took, stalled = now - self.began, ended - began
        step = engine.inner_steps
        self.write(step=step, took=took, stalled=stalled, at=now, rounds=rounds, digests=digests, lag=follower.lag)
        self.began = time.monotonic()

    def write(self, **what: object) -> None:
        self.file.write(json.dumps(what) + "\n")
        self.file.flush()


def train(
    place: Place,
    steps: int,
    seconds: float,
    sharded: bool = False,
    validates: int = 0,
) -> None:
    """Trains a site until it has made so many inner steps, each of which takes some seconds at least.

    Args:
        place: Which rank this is.
        steps: How many.
        seconds: How long a step takes.
        sharded: Whether its ranks share one model.
        validates: After how many steps it validates, and saves the best model; 0: it saves every 25 steps.
    """
    place.settle()
    folder = place.folder / place.site
    last = folder / "last.ckpt"
    if sharded:
        sizes = {"data_parallel_size": place.ranks}
        strategy = StreamingDiLoCoModelParallelStrategy(federation=place.federation, **sizes, **CHOICES)
    else:
        strategy = StreamingDiLoCoStrategy(federation=place.federation, **CHOICES)
    saves: dict[str, Any] = {"monitor": "seen"} if validates else {"every_n_train_steps": 25, "save_top_k": 0}
    notes = Notes(place.folder / f"{place.name}.jsonl")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=place.ranks,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=validates or None,
        limit_val_batches=2 if validates else 0,
        callbacks=[
            notes,
            StreamingDiLoCoMonitor(folder=f"{folder}.records", diagnostics=False),
            ModelCheckpoint(dirpath=folder, save_last=True, **saves),
        ],
    )
    loader = DataLoader(place.data(), batch_size=BATCH)
    net = (ShardedNet if sharded else Net)(seconds)
    try:
        trainer.fit(net, loader, loader, ckpt_path=str(last) if last.exists() else None)
        ended: dict[str, Any] = {"ended": True}
    except SIGTERMException:
        ended = {"ended": True, "terminated": True}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    state = {} if "terminated" in ended else strategy.outer_state_dict()
    outer, digest = {name: float(values.sum()) for name, values in state.items()}, hashlib.sha256()
    for values in state.values():
        digest.update(values.numpy().tobytes())
    applied = [list(own.applied) for own in strategy.engine.loop.follower.fragments]
    about = {"report": strategy.report(), "metrics": metrics}
    notes.write(**ended, **about, outer=outer, digest=digest.hexdigest(), applied=applied)


def train_under_torchrun(place: Place, ranks: int, *arguments: float) -> None:
    """Launches a site as a user does on its machine: torchrun starts the ranks, and starts them again when one dies."""
    place.settle()
    # Its own port and names are for one rank.
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE"):
        del os.environ[name]
    # Otherwise ranks that are started again read where those before them listened.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    meets = ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{place.port}"]
    about = [place.site, place.hub, place.keys, place.folder, place.late, *arguments]
    torch.distributed.run.main([*meets, "--local-addr=127.0.0.1", "--max-restarts=1", "-m", __name__, *map(str, about)])


def rank_of_torchrun(site: str, hub: str, keys: str, folder: str, late: Any, steps: str, seconds: str) -> None:
    """Trains a rank that torchrun has started."""
    port, rank, ranks = (int(os.environ[name]) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
    train(Place(site, hub, Path(keys), Path(folder), port, rank, ranks, late), int(steps), float(seconds))


class Jittery(Net):
    """The last rank of a site takes longer for a micro-batch in every second inner step."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        if self.trainer.local_rank == self.trainer.num_devices - 1 and self.trainer.global_step % 2:
            time.sleep(self.seconds)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


def train_dropping(place: Place, steps: int, seconds: float, budget: Any) -> None:
    """Trains a site whose ranks leave out micro-batches, of two samples each and four in an inner step."""
    place.settle()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=place.ranks,
        strategy=StreamingDiLoCoStrategy(federation=place.federation, **CHOICES),
        accumulate_grad_batches=4,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    net = Jittery(seconds)
    loader = DropCompute(4, budget, most_dropped=0.3)(DataLoader(place.data(), batch_size=2))
    trainer.fit(net, loader)
    trained = steps * 4 - loader.dropped
    same = [float(parameter.detach().double().sum()) for parameter in net.parameters()]
    Notes(place.folder / f"{place.name}.jsonl").write(
        ended=True, trained=2 * trained, dropped=loader.dropped, budget=loader.budget, same=same
    )


if __name__ == "__main__":
    rank_of_torchrun(*sys.argv[1:])
