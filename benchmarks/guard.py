"""Measures which groups the guard leaves out, honest ones never and faulty ones as often as
documented, and which groups are named because they point against the others.

    python -m benchmarks.guard [--quick] [--json FILE]

Groups train on noisy quadratic bowls, with the events of honest groups and with faults. The guard's
large test does the same with a GPT.
"""

from collections.abc import Mapping
from functools import cache
from statistics import fmean, stdev

import numpy as np

from benchmarks import report
from benchmarks.lengths import BEGINS, FAULTS, HONEST, Fault, Scenario, World, honest

ROUNDS = 150
GROUPS = (2, 3, 4, 5)


def honest_rows(seeds: int) -> tuple[list[list[str]], int, int]:
    """Returns a row for each scenario, the number of contributions, and those that were left
    out.
    """
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


@cache
def sound_losses(scenario: Scenario, faulty: tuple[int, ...], seeds: int) -> list[float]:
    """Returns the losses without the fault, of the groups that are not faulty."""
    values, _ = losses(scenario, dict.fromkeys(faulty, honest), seeds)
    return values


def fault_row(name: str, fault: Fault, groups: int, seeds: int) -> list[str]:
    """Returns the cost to the others of a fault in the last group, or in the last two of five."""
    scenario = Scenario(groups)
    faulty = range(groups - (2 if name.startswith("two") else 1), groups)
    sound = sound_losses(scenario, tuple(faulty), seeds)
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


def direction_rows() -> list[list[str]]:
    """Returns how many groups are named among four, five and eight groups, honest or flipped."""
    rows = []
    for name, scenarios in HONEST.items():
        worlds = list[World]()
        for scenario in scenarios:
            if scenario.groups > 3:
                worlds.append(World(scenario, 0, guard=None).run(ROUNDS))
        groups = sum(world.scenario.groups for world in worlds)
        rows.append([name, str(groups), str(sum(len(world.named) for world in worlds)), "-"])
        report.said(" ".join(rows[-1]))
    for unlike in (0.0, 0.3, 3.0):
        rows.append(flipped_row(unlike, seeds=5))
        report.said(" ".join(rows[-1]))
    return rows


def flipped_row(unlike: float, seeds: int) -> list[str]:
    """Returns how often a flipped group of four, and of five, is named, and after how many
    rounds.
    """
    delays = list[int]()
    for groups in (4, 5):
        for seed in range(seeds):
            flipped = {groups - 1: FAULTS["the sign flipped"]}
            world = World(Scenario(groups, unlike=unlike), seed, guard=None, faults=flipped)
            named = world.run(ROUNDS).named
            if groups - 1 in named:
                delays.append(named[groups - 1] - BEGINS + 1)
    name = f"the sign flipped, data unlike by {unlike:g}"
    return [name, str(2 * seeds), str(len(delays)), str(max(delays, default="-"))]


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    seeds = 1 if options.quick else 2
    bowls, contributions, alarms = honest_rows(seeds)
    report.show("Honest groups", ["groups", "contributions", "left out"], bowls, "")
    columns = ["fault", "groups", "left out in a run", "loss, times without it", "spread of losses"]
    faults = fault_rows(3 * seeds)
    report.show("Faults", columns, faults, "")
    columns = ["groups", "of these", "named", "after rounds, at most"]
    directions = direction_rows()
    report.show("Groups that point against the others", columns, directions, "")
    headline = {"honest": contributions, "left out": alarms}
    about = report.measured("guard", options.quick)
    tables = {"honest": bowls, "faults": faults, "directions": directions}
    report.write(options.json, headline, about, **tables)


if __name__ == "__main__":
    main()
