"""Ranks of sites as processes of their own: they train a small model, and write down what they
know after each step.
"""

import hashlib
import os
import pickle
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed.run
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import lightning_sdiloco
from tests.chaos.processes import (
    BATCH,
    SETTINGS,
    Net,
    Notes,
    Place,
    federation_of,
    samples_of,
    trainer_of,
)


@dataclass(frozen=True)
class Rank(Place):
    """A rank of a site, and what its site does."""

    site: str = ""
    rank: int = 0
    ranks: int = 1
    is_sharded: bool = False
    validates: int = 0  # after so many steps, and saves the best model; 0: it saves every 25 steps
    # of seconds, beyond which it leaves out micro-batches, of two samples each and four in a step
    budget: Any = None

    @property
    def name(self) -> str:
        return f"{self.site}{self.rank or ''}"


class RankNet(Net):
    def __init__(self, place: Rank) -> None:
        super().__init__(place.seconds)
        self.place = place

    def configure_model(self) -> None:
        if self.place.is_sharded and not any(
            hasattr(parameter, "placements") for parameter in self.parameters()
        ):
            mesh = self.device_mesh["data_parallel"]
            for layer in (*self.net, self.net):
                fully_shard(layer, mesh=mesh)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        if self.place.budget:
            # The last rank takes longer for each micro-batch in every second inner step.
            is_slow = self.place.rank == self.place.ranks - 1 and self.trainer.global_step % 2
            time.sleep(self.seconds if is_slow else 0.0)
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])
        loss = super().training_step(batch, _)
        self.log("trained", loss, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("seen", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)


def train(place: Rank) -> None:
    """Trains a site until it has made so many inner steps, or the run ends."""
    own = {"LOCAL_RANK": place.rank, "RANK": place.rank, "NODE_RANK": 0, "WORLD_SIZE": place.ranks}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {key: str(value) for key, value in own.items()}
    pl.seed_everything(0)
    notebook = place.enter(place.name)
    folder = place.folder / place.site
    last = folder / "last.ckpt"
    given = {"federation": federation_of(place.site, place), **SETTINGS}
    sharded = partial(
        lightning_sdiloco.StreamingDiLoCoModelParallelStrategy, data_parallel_size=place.ranks
    )
    strategy = (sharded if place.is_sharded else lightning_sdiloco.StreamingDiLoCoStrategy)(**given)
    saves: dict[str, Any] = (
        {"monitor": "seen"} if place.validates else {"every_n_train_steps": 25, "save_top_k": 0}
    )
    monitor = lightning_sdiloco.StreamingDiLoCoMonitor(
        folder=f"{folder}.records", diagnostics=False
    )
    callbacks = [Notes(notebook), monitor, ModelCheckpoint(dirpath=folder, save_last=True, **saves)]
    choices = {"devices": place.ranks, "accumulate_grad_batches": 4 if place.budget else 1}
    choices |= {
        "val_check_interval": place.validates or None,
        "limit_val_batches": 2 if place.validates else 0,
    }
    trainer = trainer_of(place, folder, strategy, callbacks, **choices)
    loader: Any = samples_of(place.site, 2 if place.budget else BATCH)
    if place.budget:
        loader = lightning_sdiloco.DropCompute(4, place.budget, most_dropped=0.3)(loader)
    net = RankNet(place)
    ends = dict[str, Any]()
    try:
        trainer.fit(
            net,
            loader,
            loader if place.validates else None,
            ckpt_path=str(last) if last.exists() else None,
        )
    except SIGTERMException:
        ends["terminated"] = True
    if place.budget:
        ends |= {
            "dropped": loader.dropped,
            "samples": 2 * (place.steps * 4 - loader.dropped),
            "budget": loader.budget,
        }
        ends["same"] = [float(parameter.detach().double().sum()) for parameter in net.parameters()]
    ends["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    digest = hashlib.sha256()
    made = trainer.strategy
    for values in ({} if "terminated" in ends else made.outer_state_dict()).values():
        digest.update(values.numpy().tobytes())
    applied = [list(own.applied) for own in made.engine.loop.follower.fragments]
    notebook.write(
        "ended", **ends, report=made.report(), digest=digest.hexdigest(), applied=applied
    )


def train_under_torchrun(place: Rank) -> None:
    """Launches a site as a user does on its machine: torchrun starts the ranks, and starts them
    again when one dies.
    """
    place.enter(place.name)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Otherwise ranks that are started again read where those before them listened.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    meets = ["--nproc-per-node", str(place.ranks), "--rdzv-backend", "c10d"]
    meets += [
        "--rdzv-endpoint",
        f"127.0.0.1:{place.port}",
        "--local-addr=127.0.0.1",
        "--max-restarts=1",
    ]
    told = place.folder / f"{place.site}.told"
    told.write_bytes(pickle.dumps(place))
    torch.distributed.run.main([*meets, "-m", __name__, str(told)])


if __name__ == "__main__":
    port, rank = (int(os.environ[name]) for name in ("MASTER_PORT", "RANK"))
    train(replace(pickle.loads(Path(sys.argv[1]).read_bytes()), port=port, rank=rank))
