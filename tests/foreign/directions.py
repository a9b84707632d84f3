"""The losses of foreign projects with DDP, and with each direction of the outer step.

``python -m tests.foreign.directions [PROJECT ...]``, with the interpreter of ``make foreign``, fits
each project for four times its steps in two ranks, and prints its last validation loss.
"""

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytorch_lightning as pl
import torch

from lightning_sdiloco import OuterOptimizer, lightning_pytorch, pytorch_lightning
from tests.foreign.projects import PROJECTS, Trial
from tests.ranks import run_processes

LONGER = 4
NAME = "streaming_diloco_of_one_direction"


def lengthen(distribution: Any) -> None:
    """Makes every Trainer of a distribution fit longer."""
    construct = distribution.Trainer.__init__

    def constructed(self: Any, *args: Any, **choices: Any) -> None:
        for limit in ("max_epochs", "max_steps"):
            if (choices.get(limit) or 0) > 0:
                choices[limit] *= LONGER
        construct(self, *args, **choices)

    distribution.Trainer.__init__ = constructed


def losses(rank: int, world_size: int, project: str, way: str, folder: Path) -> list[float]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    choices: dict[str, Any] = {"sync_every": 10, "overlap_steps": 3}
    if way != "ddp":
        choices["outer_optimizer"] = OuterOptimizer(direction=way)  # type: ignore[arg-type]
    for face, distribution in ((lightning_pytorch, lightning.pytorch), (pytorch_lightning, pl)):
        strategy = face.StreamingDiLoCoStrategy
        distribution.strategies.StrategyRegistry.register(NAME, strategy, **choices)
        lengthen(distribution)
    trial = Trial("ddp" if way == "ddp" else NAME, folder)
    PROJECTS[project](trial)
    return list(trial.results["losses"])


if __name__ == "__main__":
    for name in sys.argv[1:] or PROJECTS:
        for way in ("ddp", "elementwise", "equalised"):
            with tempfile.TemporaryDirectory() as folder:
                arguments = (name, way, Path(folder))
                of_ranks = run_processes(losses, 2, *arguments, timeout=900, torchelastic=True)
            print(f"{name}, {way}: {of_ranks[0][-1]:.4f}", flush=True)
