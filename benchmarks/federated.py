"""Measures whether the sites of a federation learn as well as fixed worker groups.

    python -m benchmarks.federated [--quick] [--json FILE]

Four and eight sites train the model of ``python -m benchmarks.quality --stage alone`` with the same
settings, windows of text and seeds as the worker groups there. Each site has a Trainer, and all
sites share a hub, in virtual time and in this process. With --json, runs that the file has are not
repeated.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from benchmarks import quality, report
from benchmarks.comparison import interval
from benchmarks.models import next_byte_loss
from benchmarks.runs import Runs
from benchmarks.training import Training, inner_optimizer
from lightning_sdiloco import OuterOptimizer
from lightning_sdiloco.tools.simulate.groups import Configuration
from lightning_sdiloco.tools.simulate.sites import Places, play_sites

SIZE = "0.1M"
SITES = (4, 8)
STEP_SECONDS = 0.05
QUICK_BUDGET = 0.1
GROUPS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "quality.json"
"""The runs of fixed worker groups and of DDP."""

Row = dict[str, Any]


def training_of(sites: int, seed: int, budget: float) -> Training:
    """Returns the training of fixed worker groups that the sites repeat."""
    ours, _ = quality.alone(SIZE, sites, seed, sync_every=None)
    return replace(ours, budget=budget)


class Windows(IterableDataset[tuple[Tensor, Tensor]]):
    """A site's windows of every batch of a training."""

    def __init__(self, training: Training, site: int) -> None:
        self._training = training
        self._site = site

    @override
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        training = self._training
        first = self._site * training.batch
        of_site = slice(first, first + training.batch)
        batches = training.text().batches(training.seed, training.groups * training.batch)
        for tokens, targets in islice(batches, training.steps):
            yield tokens[of_site], targets[of_site]


class Member(pl.LightningModule):
    """The model of a training, trained in one site."""

    def __init__(self, sites: int, seed: int, budget: float) -> None:
        super().__init__()
        self._training_run = training_of(sites, seed, budget)
        self.net = self._training_run.model()

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        windows = Windows(self._training_run, self.trainer.global_rank)
        return DataLoader(windows, batch_size=None)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return next_byte_loss(self.net, *batch)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = inner_optimizer(self._training_run, self.net)
        schedule = LambdaLR(optimizer, self._training_run.lr_factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def strategy_of(training: Training) -> Row:
    """Returns the strategy of a site as the YAML of a LightningCLI."""
    arguments = dict(training.choices or {})
    outer = arguments.pop("outer_optimizer", OuterOptimizer())
    arguments["outer_optimizer"] = {
        "class_path": "lightning_sdiloco.OuterOptimizer",
        "init_args": {"direction": outer.direction, "offload": False},
    }
    dense = arguments.pop("dense_beginning", None)
    if dense is not None:
        arguments["dense_beginning"] = {
            "class_path": "lightning_sdiloco.DenseBeginning",
            "init_args": vars(dense),
        }
    return {"class_path": "lightning_sdiloco.StreamingDiLoCoStrategy", "init_args": arguments}


def trained(sites: int, seed: int, budget: float) -> Row:
    """Trains sites, and evaluates the outer model on which they end."""
    training = training_of(sites, seed, budget)
    trainer = {
        "accelerator": "cpu",
        "strategy": strategy_of(training),
        "max_steps": training.steps,
        "max_epochs": -1,
        "gradient_clip_val": training.clip,
        "logger": False,
        "enable_checkpointing": False,
    }
    member = {
        "class_path": "benchmarks.federated.Member",
        "init_args": {"sites": sites, "seed": seed, "budget": budget},
    }
    began = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "config.yaml"
        file.write_text(yaml.safe_dump({"trainer": trainer, "model": member}))
        places = Places(step_time=STEP_SECONDS)
        run = play_sites(Configuration((str(file),)), sites, places, {"federation": {}})
    model = training.model()
    model.load_state_dict({name.removeprefix("net."): p for name, p in run.first.outer.items()})
    return {
        "sites": sites,
        "seed": seed,
        "steps": training.steps,
        "loss": training.text().loss(model),
        "records": len(run.records),
        "late": sum(site.late for site in run.sites),
        "missed": sum(site.missed for site in run.sites),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def percent_of(row: Row, groups: Runs) -> tuple[float, float]:
    """Returns the percentage by which a row's loss is above that of fixed groups and of DDP."""
    ours, ddp = quality.alone(SIZE, row["sites"], row["seed"], sync_every=None)
    losses = [groups[training]["loss"] for training in (ours, ddp)]
    above_groups, above_ddp = (100 * (row["loss"] / loss - 1) for loss in losses)
    return above_groups, above_ddp


def shown(rows: list[Row], groups: Runs) -> list[list[str]]:
    """Returns the lines of the table."""
    lines = []
    for sites in SITES:
        percentages = [percent_of(row, groups) for row in rows if row["sites"] == sites]
        if percentages:
            above_groups, above_ddp = zip(*percentages, strict=True)
            numbers = [interval(above_groups, digits=1), interval(above_ddp, digits=1)]
            lines.append([f"{sites} sites", str(len(percentages)), *numbers])
    return lines


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    if options.quick:
        row = trained(SITES[0], quality.HELD_OUT[0], QUICK_BUDGET)
        report.write(options.json, {}, report.measured("federated", True), rows=[row])
        report.show("Does it run", ["sites", "loss"], [[str(SITES[0]), f"{row['loss']:.3f}"]])
        return
    rows = report.kept_rows(options.json)
    finished = {(row["sites"], row["seed"]) for row in rows}
    for seed in quality.HELD_OUT:
        for sites in SITES:
            if (sites, seed) in finished:
                continue
            rows.append(trained(sites, seed, quality.MODELS[SIZE].budget))
            report.said(f"{sites} sites, seed {seed}: {rows[-1]['loss']:.4f}")
            report.write(options.json, {}, report.measured("federated", False), rows=rows)
    columns = ["federation", "seeds", "% above groups", "% above DDP"]
    report.show("Sites instead of fixed groups", columns, shown(rows, Runs("quality", GROUPS)))


if __name__ == "__main__":
    main()
