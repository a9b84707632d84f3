"""A script that fits a large model, however its processes are started, and keeps what can be read of it and where."""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_sdiloco import StreamingDiLoCoStrategy
from tests.large.models import Data, Large

SETTINGS = {"sync_every": 4, "overlap_steps": 2, "fragments": "balanced"}


def readable(trainer: Any, module: Any) -> dict[str, Any]:
    """What users read of a fit, as plain containers and tensors."""
    strategy = trainer.strategy
    return {
        "outer": strategy.outer_state_dict(),
        "report": strategy.report(),
        "fragments": [[list(fragment.names), list(fragment.sizes)] for fragment in strategy.fragments],
        "launches": [list(strategy.schedule.launches(step)) for step in range(20)],
        "model": {name: p.detach().clone() for name, p in module.named_parameters()},
        "metrics": dict(trainer.callback_metrics),
    }


class Keep(pl.Callback):
    """Keeps what each rank reads in its own process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        torch.save(readable(trainer, module), self.folder / f"rank-{trainer.global_rank}.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--start-method", default="popen")
    parser.add_argument("--model", default="wide")
    parser.add_argument("--metrics", type=int, default=0)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(0)
    module = Large(args.model, args.metrics)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=StreamingDiLoCoStrategy(worker_groups=args.groups, start_method=args.start_method, **SETTINGS),
        max_steps=9,
        callbacks=[Keep(args.folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Data())
    torch.save(readable(trainer, module), args.folder / f"main-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
