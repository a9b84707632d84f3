"""Ranks of sites as processes of their own: they train a small model, and write down what they know after each step."""

import hashlib
import json
import os
import pickle
import sys
import time
from dataclasses import dataclass, replace
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
    folder: Path
    port: int
    rank: int = 0
    ranks: int = 1
    late: Literal["carry", "drop"] = "carry"

    @property
    def name(self) -> str:
        return f"{self.site}{self.rank or ''}"

    def settle(self) -> None:
        own = {"LOCAL_RANK": self.rank, "RANK": self.rank, "NODE_RANK": 0, "WORLD_SIZE": self.ranks}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port, "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {key: str(value) for key, value in own.items()}
        log = os.open(self.folder / f"{self.name}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        pl.seed_everything(0)


class Net(pl.LightningModule):
    def __init__(self, seconds: float, is_sharded: bool, is_jittery: bool) -> None:
        super().__init__()
        self.seconds, self.is_sharded, self.is_jittery = seconds, is_sharded, is_jittery
        self.net = wide()

    def configure_model(self) -> None:
        if self.is_sharded and not any(hasattr(parameter, "placements") for parameter in self.parameters()):
            mesh = self.device_mesh["data_parallel"]
            for layer in (*self.net, self.net):
                fully_shard(layer, mesh=mesh)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        # Where ranks leave out micro-batches, the last one takes longer for each in every second inner step.
        is_last = self.trainer.local_rank == self.trainer.num_devices - 1
        if not self.is_jittery or (is_last and self.trainer.global_step % 2):
            time.sleep(self.seconds)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if not self.is_jittery:
            self.log("trained", loss, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("seen", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Notes(Callback):
    """Writes a line at once for every step."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        engine = trainer.strategy.engine
        self.write(step=engine.inner_steps, rounds=[own.applied.round for own in engine.loop.follower.fragments])

    def write(self, **what: object) -> None:
        self.file.write(json.dumps(what) + "\n")
        self.file.flush()


def train(
    place: Place, steps: int, seconds: float, is_sharded: bool = False, validates: int = 0, budget: Any = None
) -> None:
    """Trains a site until it has made so many inner steps, each of which takes some seconds at least.

    It validates after so many steps and saves the best model, or saves every 25 steps. With a budget, ranks leave out
    micro-batches, of two samples each and four in an inner step.
    """
    place.settle()
    folder = place.folder / place.site
    last = folder / "last.ckpt"
    keys = place.folder / "keys"
    federation = Federation(hub=place.hub, run="run", site=place.site, keys=keys, late=place.late, lease=2.0)
    if is_sharded:
        sizes = {"data_parallel_size": place.ranks}
        strategy = StreamingDiLoCoModelParallelStrategy(federation=federation, **sizes, **CHOICES)
    else:
        strategy = StreamingDiLoCoStrategy(federation=federation, **CHOICES)
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
        accumulate_grad_batches=4 if budget else 1,
        val_check_interval=validates or None,
        limit_val_batches=2 if validates else 0,
        callbacks=[
            notes,
            StreamingDiLoCoMonitor(folder=f"{folder}.records", diagnostics=False),
            ModelCheckpoint(dirpath=folder, save_last=True, **saves),
        ],
    )
    # The data of each site are its own.
    generator = torch.Generator().manual_seed(sum(map(ord, place.site)))
    data = TensorDataset(*(torch.randn(512, width, generator=generator) for width in (FEATURES, TARGETS)))
    loader: Any = DataLoader(data, batch_size=2 if budget else BATCH)
    ends: dict[str, Any] = {"ended": True}
    if budget:
        loader = DropCompute(4, budget, most_dropped=0.3)(loader)
    net = Net(seconds, is_sharded, bool(budget))
    try:
        trainer.fit(net, loader, loader if validates else None, ckpt_path=str(last) if last.exists() else None)
    except SIGTERMException:
        ends["terminated"] = True
    if budget:
        ends |= {"dropped": loader.dropped, "samples": 2 * (steps * 4 - loader.dropped), "budget": loader.budget}
        ends["same"] = [float(parameter.detach().double().sum()) for parameter in net.parameters()]
    ends["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    digest = hashlib.sha256()
    for values in ({} if "terminated" in ends else strategy.outer_state_dict()).values():
        digest.update(values.numpy().tobytes())
    applied = [list(own.applied) for own in strategy.engine.loop.follower.fragments]
    notes.write(**ends, report=strategy.report(), digest=digest.hexdigest(), applied=applied)


def train_under_torchrun(place: Place, ranks: int, *arguments: float) -> None:
    """Launches a site as a user does on its machine: torchrun starts the ranks, and starts them again when one dies."""
    place.settle()
    # Its own port and names are for one rank.
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE"):
        del os.environ[name]
    # Otherwise ranks that are started again read where those before them listened.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    meets = ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{place.port}"]
    told = place.folder / f"{place.site}.told"
    told.write_bytes(pickle.dumps((place, arguments)))
    torch.distributed.run.main([*meets, "--local-addr=127.0.0.1", "--max-restarts=1", "-m", __name__, str(told)])


if __name__ == "__main__":
    here, arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
    port, rank, ranks = (int(os.environ[name]) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
    train(replace(here, port=port, rank=rank, ranks=ranks), *arguments)
