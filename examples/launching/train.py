"""Trains on several machines, launched by SLURM, torchrun, Lightning or by hand: as worker groups,
as hosts of a federation (--run), or as one of several sites with a hub (--run and --hub).

The checkpoints must be in a folder that all machines share, because each rank reads and writes its
own file there.
"""

import argparse
from collections.abc import Iterator
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_sdiloco import Federation, StreamingDiLoCoStrategy


class Batches:
    """The batches of one rank. Lightning saves the loader's state in checkpoints, so that a resumed
    run continues exactly.
    """

    def __init__(self, rank: int, length: int) -> None:
        self.rank = rank
        self.length = length
        self.step = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.step < self.length:
            self.step += 1
            generator = torch.Generator().manual_seed(1_000_000 * self.rank + self.step)
            x = torch.randn(16, 16, generator=generator)
            yield x, x.sum(dim=1, keepdim=True)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Regression(L.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(64, 1))

    def train_dataloader(self) -> Batches:
        return Batches(self.global_rank, self.steps)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_start(self) -> None:
        strategy = cast(Any, self.trainer.strategy)
        if self.trainer.is_global_zero:
            topology = strategy.topology
            step = self.trainer.global_step
            print(
                f"{topology.num_groups} worker groups of {topology.group_size}, from step {step}",
                flush=True,
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-nodes", type=int, default=1, help="machines")
    parser.add_argument("--devices", type=int, default=2, help="processes on each of them")
    parser.add_argument(
        "--worker-groups", default="auto", help="a number; 'auto' is one per machine"
    )
    parser.add_argument("--accelerator", default="cpu", help="'gpu', or 'auto'")
    parser.add_argument(
        "--run", help="a federation: each machine is a site, and the hub starts itself"
    )
    parser.add_argument("--hub", help="address and port of the hub; it is yours without --sites")
    parser.add_argument("--sites", type=int, help="the machines, if the launcher does not tell")
    parser.add_argument("--site", help="the name of this site of a hub of yours")
    parser.add_argument("--keys", help="the bundle of this site; without one there is no TLS")
    parser.add_argument(
        "--steps", type=int, default=400, help="inner steps; of a federation, 20 times its rounds"
    )
    parser.add_argument(
        "--resume", help="a checkpoint, or 'last' for the newest one if there is any"
    )
    return parser.parse_args()


def main(callbacks: list[Any] | None = None) -> L.Trainer:
    options = parse()
    torch.manual_seed(0)
    steps = 10 * options.steps if options.run else options.steps
    if options.run:
        # The run ends for all sites in the same round; until then, a faster site takes more steps.
        federation = Federation(
            options.run,
            hub=options.hub,
            site=options.site,
            keys=options.keys,
            insecure=bool(options.site) and not options.keys,
            rounds=options.steps // 20,
            sites=options.sites,
        )
        strategy = StreamingDiLoCoStrategy(federation=federation, sync_every=20, overlap_steps=5)
    else:
        groups = (
            options.worker_groups if options.worker_groups == "auto" else int(options.worker_groups)
        )
        strategy = StreamingDiLoCoStrategy(worker_groups=groups, sync_every=20, overlap_steps=5)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_steps=steps,
        callbacks=[
            ModelCheckpoint("checkpoints", every_n_train_steps=50, save_last=True),
            *(callbacks or []),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(steps), ckpt_path=options.resume)
    if trainer.is_global_zero:
        norm = (
            sum(float(values.norm()) ** 2 for values in strategy.outer_state_dict().values()) ** 0.5
        )
        print(f"trained {trainer.global_step} steps, outer norm {norm}")
    return trainer


if __name__ == "__main__":
    main()
