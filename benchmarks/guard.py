"""Whom the guard leaves out: honest groups never, faulty ones always or as often as is said.

    python -m benchmarks.guard [--quick] [--json FILE]

First, two and four groups train a small GPT from the first round on, each on files of its own, with
two lengths of a round and two learning rates: how much longer than usual is each contribution? Then
groups train noisy bowls, with everything that happens to honest groups, and with faults.
"""

from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.lengths import FAULTS, HONEST, Fault, Scenario, World, honest
from benchmarks.models import TINY
from benchmarks.training import Loop, Training
from lightning_sdiloco import Landing
from lightning_sdiloco.algorithm.guard import GUARD, Length, Past, outlying, remembered

CASES = [
    (groups, sync_every, lr)
    for groups in (2, 4)
    for sync_every, lr in ((10, 3e-3), (10, 1e-2), (30, 3e-3), (30, 1e-2))
]
ROUNDS = 150
GROUPS = (2, 3, 4, 5)


def landings(groups: int, sync_every: int, lr: float, budget: float) -> list[Landing]:
    """Trains, and returns all landings of the first group."""
    choices = {
        "sync_every": sync_every,
        "overlap_steps": 2,
        "fragments": "strided:1",
        "compression": "fp4",
    }
    training = Training(TINY, choices, groups=groups, budget=budget, lr=lr, split="by_file")
    loop = Loop(training, training.text())
    streaming: Any = loop._streaming
    step = streaming.step
    landed: list[Landing] = []
    streaming.step = lambda **how: landed.extend(step(**how)[0])
    loop.run()
    return landed


def longest(landed: list[Landing], sync_every: int) -> float:
    """Returns how many times as long as usual the longest contribution was."""
    pasts: dict[int, Past] = {}
    most = 1.0
    for landing in landed:
        lengths = {
            group: Length(norm, sync_every) for group, norm in enumerate(landing.group_norms)
        }
        for too_long in outlying(lengths, pasts, guard=1.0).values():
            most = max(most, too_long.times)
        pasts = remembered(lengths, (), pasts)
    return most


def honest_rows(seeds: int) -> tuple[list[list[str]], int, int]:
    """Returns a row for each scenario, all contributions, and those that were left out."""
    rows = []
    contributions = 0
    alarms = 0
    for name, scenarios in HONEST.items():
        worlds = [
            World(scenario, seed).run(ROUNDS) for scenario in scenarios for seed in range(seeds)
        ]
        judged = sum(world.contributions for world in worlds)
        left_out = sum(len(world.alarms) for world in worlds)
        rows.append([name, str(judged), str(left_out)])
        report.said(" ".join(rows[-1]))
        contributions += judged
        alarms += left_out
    return rows, contributions, alarms


def losses(scenario: Scenario, faults: Mapping[int, Fault], seeds: int) -> tuple[list[float], int]:
    """Returns the loss of the honest groups in runs with faults, and how often the guard acted."""
    values = []
    alarms = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for seed in range(seeds):
            world = World(scenario, seed, faults=faults).run(ROUNDS)
            values.append(world.loss)
            alarms += len(world.alarms)
    return values, alarms


def fault_row(name: str, fault: Fault, groups: int, seeds: int) -> list[str]:
    """Returns what a fault of the last group, or of the last two of five, costs the others."""
    scenario = Scenario(groups)
    faulty = range(groups - (2 if name.startswith("two") else 1), groups)
    sound, _ = losses(scenario, dict.fromkeys(faulty, honest), seeds)
    spoilt, alarms = losses(scenario, dict.fromkeys(faulty, fault), seeds)
    ratios = [loss / best for loss, best in zip(spoilt, sound, strict=True)]
    spread = stdev(sound) / fmean(sound) if seeds > 1 else 0.0
    left_out = alarms / seeds / len(faulty)
    return [name, str(groups), f"{left_out:.0f}", f"{max(ratios):.3g}", f"{spread:.2f}"]


def fault_rows(seeds: int) -> list[list[str]]:
    rows = []
    for name, fault in FAULTS.items():
        for groups in (5,) if name.startswith("two") else GROUPS:
            rows.append(fault_row(name, fault, groups, seeds))
            report.said(" ".join(rows[-1]))
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    budget = 0.5 if options.quick else 24.0
    seeds = 1 if options.quick else 2
    rows = []
    most = 0.0
    for groups, sync_every, lr in CASES[:1] if options.quick else CASES:
        landed = landings(groups, sync_every, lr, budget)
        times = longest(landed, sync_every)
        most = max(most, times)
        row = [str(groups), str(sync_every), f"{lr:g}", str(groups * len(landed)), f"{times:.2f}"]
        rows.append(row)
        report.said(" ".join(row))
    columns = ["groups", "sync_every", "learning rate", "contributions", "longest, times usual"]
    caption = f"The guard leaves out what is {GUARD:g} times as long as usual."
    report.show("A small GPT", columns, rows, caption)
    bowls, contributions, alarms = honest_rows(seeds)
    report.show("Honest groups", ["groups", "contributions", "left out"], bowls, "")
    columns = ["fault", "groups", "left out in a run", "loss, times without it", "spread of losses"]
    report.show("Faults", columns, fault_rows(3 * seeds), "")
    headline = {"longest, times usual": most, "honest": contributions, "left out": alarms}
    report.write(options.json, headline, report.measured("guard", options.quick))


if __name__ == "__main__":
    main()
