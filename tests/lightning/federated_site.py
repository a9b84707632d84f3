"""Ranks of sites as processes of their own: they train a small model, and write notes after each
step.
"""

import hashlib
import os
import pickle
import sys
import time
from dataclasses import dataclass, replace
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
    validates: int = 0
    """Validates after so many steps, and saves the best model; 0: it saves every 25 steps."""
    budget: Any = None
    """Seconds, beyond which it leaves out micro-batches, of two samples each and four in a step."""

    @property
    def name(self) -> str:
        return f"{self.site}{self.rank or ''}"


class RankNet(Net):
    def __init__(self, place: Rank) -> None:
        super().__init__(place.seconds)
        self.place = place

    def configure_model(self) -> None:
        is_done = any(hasattr(parameter, "placements") for parameter in self.parameters())
        if self.place.is_sharded and not is_done:
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
    set_environment(place)
    pl.seed_everything(0)
    notebook = place.enter(place.name)
    folder = place.folder / place.site
    last = folder / "last.ckpt"
    trainer = trainer_of_rank(place, folder, Notes(notebook))
    loader = loader_of(place)
    validation = loader if place.validates else None
    net = RankNet(place)
    end: dict[str, Any] = {}
    try:
        trainer.fit(net, loader, validation, ckpt_path=str(last) if last.exists() else None)
    except SIGTERMException:
        end["terminated"] = True
    if place.budget:
        end["dropped"] = loader.dropped
        end["samples"] = 2 * (place.steps * 4 - loader.dropped)
        end["budget"] = loader.budget
        end["same"] = [float(parameter.detach().double().sum()) for parameter in net.parameters()]
    strategy = trainer.strategy
    outer = {} if "terminated" in end else strategy.outer_state_dict()
    fragments = strategy.engine.loop.follower.fragments
    end["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    end["report"] = strategy.report()
    end["digest"] = digest_of(outer)
    end["applied"] = [list(fragment.applied) for fragment in fragments]
    notebook.write("ended", **end)


def set_environment(place: Rank) -> None:
    """Sets the environment variables of a launcher."""
    os.environ |= {
        "LOCAL_RANK": str(place.rank),
        "RANK": str(place.rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(place.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def trainer_of_rank(place: Rank, folder: Path, notes: Notes) -> Any:
    choices: dict[str, Any] = {"federation": federation_of(place.site, place), **SETTINGS}
    kind: Any = lightning_sdiloco.StreamingDiLoCoStrategy
    if place.is_sharded:
        kind = lightning_sdiloco.StreamingDiLoCoModelParallelStrategy
        choices["data_parallel_size"] = place.ranks
    saves: dict[str, Any] = {"every_n_train_steps": 25, "save_top_k": 0}
    validates: dict[str, Any] = {"val_check_interval": None, "limit_val_batches": 0}
    if place.validates:
        saves = {"monitor": "seen"}
        validates = {"val_check_interval": place.validates, "limit_val_batches": 2}
    checkpoint = ModelCheckpoint(dirpath=folder, save_last=True, **saves)
    records = lightning_sdiloco.StreamingDiLoCoMonitor(
        folder=f"{folder}.records", diagnostics=False
    )
    return trainer_of(
        place,
        folder,
        kind(**choices),
        [notes, records, checkpoint],
        devices=place.ranks,
        accumulate_grad_batches=4 if place.budget else 1,
        **validates,
    )


def loader_of(place: Rank) -> Any:
    if not place.budget:
        return samples_of(place.site, BATCH)
    micro_batches = samples_of(place.site, 2)
    return lightning_sdiloco.DropCompute(4, place.budget, most_dropped=0.3)(micro_batches)


def digest_of(state_dict: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for values in state_dict.values():
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def train_under_torchrun(place: Rank) -> None:
    """Launches a site as a user does on its machine: torchrun starts the ranks, and starts them
    again when one dies.
    """
    place.enter(place.name)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Otherwise ranks that are started again read where those before them listened.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    arguments = [
        f"--nproc-per-node={place.ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{place.port}",
        "--local-addr=127.0.0.1",
        "--max-restarts=1",
    ]
    pickled = place.folder / f"{place.site}.place"
    pickled.write_bytes(pickle.dumps(place))
    torch.distributed.run.main([*arguments, "-m", __name__, str(pickled)])


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    place_of_site = pickle.loads(Path(sys.argv[1]).read_bytes())
    train(replace(place_of_site, port=port, rank=rank))
