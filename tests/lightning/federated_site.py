"""A site as a process of its own, for tests: trains a small model with the Trainer and writes down when it stepped."""

import json
import os
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdiloco import Federation, StreamingDiLoCoMonitor, StreamingDiLoCoStrategy
from tests.large.models import FEATURES, TARGETS, wide


class Net(pl.LightningModule):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.net = wide()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        time.sleep(self.seconds)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


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
        follower = engine._pace.follower
        rounds = [own.applied.round for own in follower.fragments]
        began, ended = engine.step_span
        took, stalled = now - self.began, ended - began
        self.write(step=engine.inner_steps, took=took, stalled=stalled, at=now, rounds=rounds, lag=follower.lag)
        self.began = time.monotonic()

    def write(self, **what: object) -> None:
        self.file.write(json.dumps(what) + "\n")
        self.file.flush()


def train(site: str, hub: str, keys: Path, folder: Path, steps: int, seconds: float, port: int) -> None:
    """Trains a site until it has made so many inner steps, each of which takes some seconds at least."""
    os.environ["MASTER_PORT"] = str(port)
    log = os.open(folder / f"{site}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    pl.seed_everything(0)
    generator = torch.Generator().manual_seed(sum(map(ord, site)))
    x, y = torch.randn(512, FEATURES, generator=generator), torch.randn(512, TARGETS, generator=generator)
    last = folder / site / "last.ckpt"
    notes = Notes(folder / f"{site}.jsonl")
    strategy = StreamingDiLoCoStrategy(
        sync_every=20,
        overlap_steps=2,
        layers_per_fragment=2,
        federation=Federation(hub=hub, run="run", site=site, keys=keys, lease=2.0),
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            notes,
            StreamingDiLoCoMonitor(folder=str(folder / f"{site}.records"), diagnostics=False),
            ModelCheckpoint(dirpath=folder / site, save_last=True, every_n_train_steps=25, save_top_k=0),
        ],
    )
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    trainer.fit(Net(seconds), loader, ckpt_path=str(last) if last.exists() else None)
    notes.write(ended=True, report=strategy.report())
