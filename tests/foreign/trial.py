"""One fit of a foreign project on every rank, and what is written down of it.

Started as ``python -m tests.foreign.trial PROJECT FOLDER``. The project is imported once, which may take long; the
ranks of each fit are forked, with the environment that ``torchrun`` would give them.
"""

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytorch_lightning as pl
import torch

from lightning_sdiloco import lightning_pytorch, pytorch_lightning
from tests.ranks import run_processes

RANKS = 2
SECONDS = 200.0
HALF = "half.ckpt"
# Several rounds in the fit, and a fragment in flight where the checkpoint is saved.
ROUNDS = {"sync_every": 10, "overlap_steps": 3}
# The same by name, for projects that give one strategy to several Trainers, which Lightning takes only by name.
NAME = "streaming_diloco_ddp_of_short_rounds"


@dataclass
class Trial:
    """What one fit is told, and what it finds."""

    strategy: str | None  # the name in the one line; None: a strategy with rounds that suit so short a fit
    folder: Path  # for checkpoints and logs of this fit
    resume: Path | None = None  # a checkpoint to go on from
    found: dict[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Trial":
        return self  # some projects copy their callbacks, and what those find is wanted here

    def probe(self, callback: type[Any], monitor: str, half: int) -> Any:
        """A callback of the project's distribution that writes down the fit, and the losses of its validations by name;
        it saves a checkpoint at the end of one of these, counted from 1."""
        return type("Probe", (_Probe, callback), {})(self, monitor, half)

    def trainer(self, probe: Any) -> dict[str, Any]:
        """The arguments that every Trainer gets."""
        old = any(base.__module__.startswith("pytorch_lightning") for base in type(probe).__mro__)
        edition = pytorch_lightning if old else lightning_pytorch
        return {
            "accelerator": "cpu",
            "devices": RANKS,
            "strategy": self.strategy or edition.StreamingDiLoCoStrategy(**ROUNDS),
            "callbacks": [probe],
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(self.folder),
        }

    def run(self, trainer: Any, model: Any, train: Any, held_out: Any) -> None:
        """Fits, validates and predicts with Lightning's own calls."""
        # Projects keep objects of their own in checkpoints.
        trainer.fit(model, train, held_out, ckpt_path=self.resume, weights_only=False)
        self.found["validated"] = sorted(trainer.validate(model, held_out)[0])
        self.found["predictions"] = sum(map(count, trainer.predict(model, held_out)))


@contextmanager
def resuming(trainer: type[Any], path: Path | None) -> Iterator[None]:
    """Lets a Trainer go on from a checkpoint, for projects whose own calls do not take one."""
    original = trainer.fit
    trainer.fit = partialmethod(original, ckpt_path=path, weights_only=False)
    try:
        yield
    finally:
        trainer.fit = original


def count(batch: Any) -> int:
    """How many samples a batch of predictions has."""
    return len(batch) if isinstance(batch, torch.Tensor) else len(batch[0])


class _Probe:
    def __init__(self, trial: Trial, monitor: str, half: int) -> None:
        self.trial, self.monitor, self.half = trial, monitor, half
        self.losses: list[float] = []
        self.validations = 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.monitor in trainer.callback_metrics:
            self.losses.append(float(trainer.callback_metrics[self.monitor]))
        # Where ModelCheckpoint saves. Elsewhere Lightning itself may go on with another epoch's data, with DDP too.
        self.validations += not trainer.sanity_checking
        if self.validations == self.half and self.trial.resume is None:
            trainer.save_checkpoint(self.trial.folder / HALF)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        digest = hashlib.sha256()
        for name, values in module.state_dict().items():
            if isinstance(values, torch.Tensor):
                digest.update(name.encode() + bytes(values.detach().cpu().contiguous().flatten().view(torch.uint8)))
        self.trial.found |= {
            "global_step": trainer.global_step,
            "keys": sorted(trainer.callback_metrics),
            "losses": self.losses,
            "parameters": sum(p.numel() for p in module.parameters()),
            "digest": digest.hexdigest(),
            "strategy": type(trainer.strategy).__name__,
        }


def main() -> None:
    # As users register names of their own.
    for edition, registry in (
        (lightning_pytorch, lightning.pytorch.strategies.StrategyRegistry),
        (pytorch_lightning, pl.strategies.StrategyRegistry),
    ):
        registry.register(NAME, edition.StreamingDiLoCoStrategy, **ROUNDS)
    name, folder = sys.argv[1], Path(sys.argv[2])
    project = importlib.import_module(f"tests.foreign.projects.{name}")
    ddp, ours = getattr(project, "DDP", "ddp"), getattr(project, "STRATEGY", None)
    for kind, trial in {
        "ddp": Trial(ddp, folder / "ddp"),
        "unbroken": Trial(ours, folder / "unbroken"),
        "resumed": Trial(ours, folder / "resumed", resume=folder / "unbroken" / HALF),
    }.items():
        trial.folder.mkdir(parents=True)

        def rank(index: int, count: int, trial: Trial) -> dict[str, Any]:
            torch.set_num_threads(1)
            project.fit(trial)
            return trial.found

        found = run_processes(rank, RANKS, trial, timeout=SECONDS, torchelastic=True)
        (folder / f"{kind}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
