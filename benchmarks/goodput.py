"""Measures how much of a federation's training counts while its sites are killed.

    python -m benchmarks.goodput [--stage {processes,simulated}] [--quick] [--json FILE]

- ``processes``: four sites and a hub as processes. Sites are killed at random times, and started
  again from their newest checkpoints.
- ``simulated``: 4, 16 and 32 sites in virtual time, with the same rules. A site that is killed is
  away for as long as the real sites were.

Rates of faults are given per hour of inner steps that take one second: a window has `STEPS` steps,
however long they take here. ``processes`` needs an idle machine. With --json, rows that the file
has are not measured again.
"""

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks import report
from lightning_sdiloco.planning.methods import Absence
from lightning_sdiloco.tools.simulate.groups import Configuration
from lightning_sdiloco.tools.simulate.sites import FederatedRun, Places, play_sites
from tests.chaos.faults import HUB, Fault
from tests.chaos.notes import Note
from tests.chaos.play import Play
from tests.chaos.processes import BATCH, SYNC_EVERY
from tests.chaos.world import World

STEPS = 3600
STEP_SECONDS = 0.05
DOWN_SECONDS = 1.0
FRAGMENTS = 2
SITES = ("a", "b", "c", "d")
FAULTS = (0, 2, 8, 30)
SIMULATED = {4: FAULTS, 16: (0, 30, 125), 32: (0, 30, 125)}
SEED = 0

Row = dict[str, Any]


def drawn(faults: int, sites: int, seconds: float) -> list[tuple[float, int]]:
    """Draws the times of faults within a window, and the site that each of them hits."""
    chance = random.Random(f"{SEED} {sites} {faults}")
    times = sorted(chance.uniform(0.0, seconds) for _ in range(faults))
    return [(moment, chance.randrange(sites)) for moment in times]


# Real processes


def played(faults: int, seconds: float) -> Row:
    """Lets faults happen within a window, and returns what counted in it."""
    with (
        tempfile.TemporaryDirectory() as name,
        World(Path(name), SITES, STEP_SECONDS) as world,
    ):
        play = Play(world)
        play.begin()
        began = time.monotonic()
        happened = let_happen(play, drawn(faults, len(SITES), seconds), began)
        play.wait(began + seconds - time.monotonic())
        ended = time.monotonic()
        play.until_back()
        play.finish()
        records = [note for note in world.notes(HUB) if note["what"] == "append"]
        in_window = [record for record in records if began <= record["at"] < ended]
        return {
            "sites": len(SITES),
            "faults": happened,
            "seconds": ended - began,
            "steps": sum(map(weight_of, in_window)) / BATCH / FRAGMENTS,
            "records": len(in_window),
            "share": mean(len(record["counted"]) for record in in_window) / len(SITES),
            **returns_of(world, records, ended),
        }


def let_happen(play: Play, faults: Sequence[tuple[float, int]], began: float) -> int:
    """Kills sites at the given times; returns how many were running."""
    happened = 0
    for moment, number in faults:
        play.wait(began + moment - time.monotonic())
        fault = Fault("kill", SITES[number], DOWN_SECONDS)
        if all(current.victim != fault.victim for _, current in play.going_on):
            play.let(fault)
            happened += 1
    return happened


def returns_of(world: World, records: Sequence[Note], ended: float) -> Row:
    """Returns the seconds from each restart until the site trained, and until it counted."""
    trains_after = []
    counts_after = []
    for note in world.notes("faults"):
        if note["what"] == "end" and note["at"] < ended:
            site = note["victim"]
            training = [step["at"] for step in world.notes(site) if step["what"] == "training"]
            counted_at = [record["at"] for record in records if site in sites_of(record)]
            trains_after.append(next_after(training, note["at"]))
            counts_after.append(next_after(counted_at, note["at"]))
    return {"trains_after": trains_after, "counts_after": counts_after}


def weight_of(record: Note) -> int:
    return sum(weight for _, _, weight in record["counted"])


def sites_of(record: Note) -> list[str]:
    return [site for site, _, _ in record["counted"]]


def next_after(times: Sequence[float], moment: float) -> float | None:
    """Returns the seconds from a moment to the next of these times; None if there is none."""
    return next((later - moment for later in times if later > moment), None)


# Sites in virtual time


class Small(pl.LightningModule):
    """A model whose steps take next to no time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        samples = TensorDataset(torch.randn(1024, 4), torch.randn(1024, 4))
        return DataLoader(samples, batch_size=1)


def configuration_in(folder: Path, steps: int) -> Configuration:
    strategy = {
        "class_path": "lightning_sdiloco.StreamingDiLoCoStrategy",
        "init_args": {"sync_every": SYNC_EVERY, "overlap_steps": 2, "fragments": FRAGMENTS},
    }
    trainer = {
        "accelerator": "cpu",
        "strategy": strategy,
        "max_steps": steps,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    file = folder / "config.yaml"
    model = {"class_path": "benchmarks.goodput.Small"}
    file.write_text(yaml.safe_dump({"trainer": trainer, "model": model}))
    return Configuration((str(file),))


def absences_of(
    faults: Sequence[tuple[float, int]], away: float, sites: int
) -> tuple[Absence, ...]:
    """Returns an absence for each fault, unless it hits a site that is still down."""
    down_until = [0.0] * sites
    absences = []
    for moment, site in faults:
        if moment >= down_until[site]:
            down_until[site] = moment + away
            absences.append(Absence(site, max(moment, 1e-9), moment + away))
    return tuple(absences)


def simulated(sites: int, faults: int, away: float, steps: int) -> Row:
    """Simulates a window; a fault takes a site away for ``away`` seconds."""
    seconds = steps * STEP_SECONDS
    absences = absences_of(drawn(faults, sites, seconds), away, sites)
    places = Places(step_time=STEP_SECONDS, absences=absences)
    choices = {"federation": {"lease": 2.0}}
    with tempfile.TemporaryDirectory() as name:
        configuration = configuration_in(Path(name), steps)
        run = play_sites(configuration, sites, places, choices)
    return {"sites": sites, "faults": len(absences), "seconds": seconds, **counted(run, seconds)}


def counted(run: FederatedRun, seconds: float) -> Row:
    """Returns the steps that counted in a window, and the share of the sites that took part."""
    trained = sum(len(site.times) for site in run.sites)
    in_window = sum(sum(moment < seconds for moment in site.times) for site in run.sites)
    counted_steps = sum(sum(map(sum, site.weights.values())) for site in run.sites) / FRAGMENTS
    rounds = seconds / STEP_SECONDS / SYNC_EVERY
    records = [record for record in run.records if record.round <= rounds]
    present = [len(record.counted) / len(run.sites) for record in records]
    return {
        "steps": in_window * counted_steps / trained,
        "records": len(records),
        "share": mean(present),
        "late": sum(site.late for site in run.sites),
    }


# The command


def is_row_of(row: Mapping[str, Any], stage: str, sites: int, faults: int) -> bool:
    return (row["stage"], row["sites"], row["planned"]) == (stage, sites, faults)


def seconds_away(rows: Sequence[Row]) -> float:
    """Returns for how long a killed site did not train: the median of the real ones."""
    restarts = list[float]()
    for row in rows:
        restarts += [after for after in row.get("trains_after", []) if after is not None]
    if not restarts:
        raise SystemExit("There is no row of processes with a fault. Run --stage processes first.")
    return DOWN_SECONDS + median(restarts)


def shown(rows: Sequence[Row]) -> list[list[str]]:
    """Returns the lines of the table, each relative to the window without faults."""
    lines = []
    for row in rows:
        faultless = next(past for past in rows if is_row_of(past, row["stage"], row["sites"], 0))
        rate = faultless["steps"] / faultless["seconds"]
        efficiency = row["steps"] / row["seconds"] / rate
        counts_after = [after for after in row.get("counts_after", []) if after is not None]
        back = f"{median(counts_after) / STEP_SECONDS:.0f}" if counts_after else "-"
        lines.append(
            [
                f"{row['sites']} sites, {row['stage']}",
                str(row["faults"]),
                f"{100 * efficiency:.1f} %",
                f"{100 * row['share']:.0f} %",
                back,
            ]
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--stage", choices=("processes", "simulated"), help="default: both, one after the other"
    )
    options = parser.parse_args(arguments)
    steps = 200 if options.quick else STEPS
    rows = report.kept_rows(options.json)

    def measure(stage: str, sites: int, faults: int) -> None:
        if any(is_row_of(row, stage, sites, faults) for row in rows):
            return
        report.said(f"{stage}: {sites} sites, {faults} faults")
        if stage == "processes":
            row = played(faults, steps * STEP_SECONDS)
        else:
            row = simulated(sites, faults, seconds_away(rows), steps)
        rows.append({"stage": stage, "planned": faults, **row})
        about = report.measured("goodput", options.quick)
        report.write(options.json, {}, about, step_seconds=STEP_SECONDS, rows=rows)

    if options.stage != "simulated":
        for faults in FAULTS[:2] if options.quick else FAULTS:
            measure("processes", len(SITES), faults)
    if options.stage != "processes":
        measured_sites = {4: FAULTS[:2]} if options.quick else SIMULATED
        for sites, rates in measured_sites.items():
            for faults in rates:
                measure("simulated", sites, faults)
    columns = ["federation", "faults", "steps that count", "sites in a round", "steps until back"]
    report.show(
        f"Faults per {steps:,} inner steps",
        columns,
        shown(rows),
        "The steps that count are relative to the window without faults.",
    )


if __name__ == "__main__":
    main()
