"""Which outer rate, momentum and mixing a run should have if nobody says, by the number of groups and by H.

    python -m benchmarks.defaults [--stage STAGE] [--workers N] [--quick] [--json FILE] [--picture FILE]

Three stages, each with the runs that it needs and the table that it gives:

- ``rates``: the inner learning rate, for DDP and for worker groups, each on its own.
- ``screen``: two seeds, one factor at a time around two groups and H=50.
- ``finalists``: five seeds for 2, 4 and 8 groups and for H of 20, 50 and 100, each paired with DDP on data and start.

With --json every run is kept at once, and runs that the file has are not made again: the benchmark may be stopped and
started as one likes. What has fewer than 15 rounds is left out.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import report
from benchmarks.models import TINY, Size
from benchmarks.picture import BLUE, RED, figure, save
from benchmarks.training import Runs, Training, parameters

SMALL = Size(layers=3, width=48, heads=3, context=128)
"""0.11 million parameters."""

BASE: dict[str, Any] = {
    "sync_every": 50,
    "overlap_steps": 5,
    "outer_lr": 0.7,
    "mixing": 0.2,
    "outer_momentum": 0.9,
    "compression": "fp4",
}
FEWEST_ROUNDS = 15

# Half the width of a 95 % interval of the mean, in standard errors, by the number of seeds (Student's t).
_HALF_WIDTH = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}

BATCH = 2
"""Windows that a group sees in a step. With two DDP does better than with four, at either learning rate."""

LR, DDP_LR = 3e-3, 6e-3
"""The inner learning rates at which each does best with AdamW, of those that stage ``rates`` tries."""


def ours(groups: int = 2, seed: int = 0, **changes: Any) -> Training:
    """Worker groups, with changes to the base."""
    return Training(SMALL, {**BASE, **changes}, groups, batch=BATCH, lr=LR, seed=seed)


def ddp_of(training: Training) -> Training:
    """DDP on the same batches, from the same weights, at its own learning rate."""
    return replace(training, choices=None, lr=DDP_LR)


def differences(runs: Runs, trainings: list[Training]) -> list[float]:
    """Returns how much worse than DDP each is, in nats; of those that were made, with their DDP."""
    pairs = [(runs.get(one), runs.get(ddp_of(one))) for one in trainings]
    return [one["loss"] - ddp["loss"] for one, ddp in pairs if one is not None and ddp is not None]


def interval(values: list[float]) -> str:
    """Returns the mean with half the width of its 95 % interval.

    >>> interval([0.01, 0.02, 0.03])
    '+0.020 ± 0.025'
    """
    half = f"{_HALF_WIDTH[len(values)] * stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else "?"
    return f"{mean(values):+.3f} ± {half}"


def rates() -> Iterator[Training]:
    """Trainings that show the best inner learning rate of each method."""
    for seed in range(2):
        for lr in (3e-3, 6e-3):
            one = replace(ours(seed=seed), lr=lr)
            yield from (one, replace(one, choices=None))


def screen() -> Iterator[Training]:
    """Trainings that differ from the base in one factor."""
    factors: dict[str, tuple[Any, ...]] = {
        "outer_lr": (0.4, 0.9),
        "mixing": (0.0, 0.5),
        "outer_momentum": (0.8, 0.95),
        "overlap_steps": (1, 10),
        "sync_every": (20, 100),
        "compression": ("fp32",),
    }
    changes = [{}, *({name: value} for name, values in factors.items() for value in values)]
    for seed in range(2):
        yield ddp_of(ours(seed=seed))
        yield from (ours(seed=seed, **change) for change in changes)


def finalists() -> Iterator[Training]:
    """Trainings with what the screen left, for each number of groups and each H, over five seeds."""
    for seed, groups, sync_every in product(range(5), (2, 4, 8), (20, 50, 100)):
        for outer_lr, mixing in product((0.5, 0.7, 0.9), (0.0, 0.2)):
            one = ours(groups, seed, sync_every=sync_every, outer_lr=outer_lr, mixing=mixing)
            if one.rounds >= FEWEST_ROUNDS:
                yield from (ddp_of(one), one)


STAGES: dict[str, Callable[[], Iterator[Training]]] = {"rates": rates, "screen": screen, "finalists": finalists}


def quick_trainings() -> Iterator[Training]:
    """Trainings that show that the benchmark runs."""
    one = Training(TINY, {**BASE, "sync_every": 10}, batch=2, budget=0.05)
    yield from (ddp_of(one), one)


def show(runs: Runs, stage: str, trainings: list[Training]) -> dict[str, float]:
    """Prints a row for each setting of a stage.

    Returns:
        The mean difference from DDP, in nats, by setting.
    """
    settings: dict[str, list[Training]] = {}
    for one in trainings:
        if one.choices is not None:
            settings.setdefault(name(one), []).append(one)
    rows, headline = [], {}
    for setting, seeds in settings.items():
        worse = differences(runs, seeds)
        if not worse:
            continue
        headline[setting] = mean(worse)
        ours_loss = mean(run["loss"] for one in seeds if (run := runs.get(one)) is not None)
        rows.append([setting, str(seeds[0].rounds), str(len(worse)), f"{ours_loss:.3f}", interval(worse)])
    size, budget = trainings[0].size, trainings[0].budget
    title = f"{stage}: {parameters(size):,} parameters, {budget:g} tokens per parameter"
    columns = ["setting", "rounds", "seeds", "loss", "minus DDP, with its 95 % interval"]
    report.show(title, columns, rows, f"Loss in nats per byte. DDP has an inner learning rate of {DDP_LR:g}.")
    return headline


def name(training: Training) -> str:
    """Names a setting by what it changes of the base."""
    choices = dict(training.choices or {})
    changed = [f"{key}={value}" for key, value in choices.items() if key == "sync_every" or BASE.get(key) != value]
    return ", ".join([f"M={training.groups}", f"lr={training.lr:g}", *changed])


def draw(headline: dict[str, float], path: Path | None) -> None:
    """Draws how much worse than DDP each setting is."""
    if path is None:
        return
    picture, (axes,) = figure(height=1.2 + 0.25 * len(headline))
    ordered = sorted(headline, key=lambda setting: -headline[setting])
    values = [headline[setting] for setting in ordered]
    axes.barh(range(len(ordered)), values, color=[RED if value > 0 else BLUE for value in values])
    axes.set_yticks(range(len(ordered)), ordered, fontsize=8)
    axes.set_xlabel("validation loss minus that of DDP, nats per byte")
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--stage", choices=STAGES, default="screen", help="what to run (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="trainings at a time (default: all cores)")
    options = parser.parse_args(arguments)
    stage, trainings = ("quick", quick_trainings) if options.quick else (options.stage, STAGES[options.stage])
    wanted = list(trainings())
    runs = Runs("defaults", options.json)
    runs.make(wanted, 1 if options.quick else options.workers)
    headline = show(runs, stage, wanted)
    runs.write(headline, options.quick)
    draw(headline, options.picture)


if __name__ == "__main__":
    main()
