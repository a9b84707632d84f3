"""What routes in pairs cost in loss and save in time, beside rounds in which all groups exchange with all others.

    python -m benchmarks.gossip [--workers N] [--minutes M] [--quick] [--json FILE] [--picture FILE]

A small language model is trained by 4, 8, 16 and 32 worker groups, simulated in one process with the bits of as many
processes. All train as many inner steps on as many windows, from one start. Pairs send 8 bits a value to one partner,
rounds of all send 4 bits in two shots: as many bytes, but for 4 groups, where the latter send a quarter less.

Time is computed, not measured. The clock of the planner plays a model of 100 million parameters on links of 1 Gbit/s, a
quarter of which have 0.1. And where groups stand in sites of four (of two, if they are four), with a link of 0.1 Gbit/s
out of each site and nothing to wait for inside, it is the seconds for which a round keeps the busiest of these links.

With --json every run is kept at once, and runs that the file has are not made again.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

from typing_extensions import override

from benchmarks import report, runs
from benchmarks.models import TINY
from benchmarks.picture import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, figure, save
from benchmarks.runs import Runs
from benchmarks.training import NamedTraining, parameters
from lightning_sdiloco import FastestPairs, RandomPairs, Ring
from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.planning import Groups, Link, Model, Streaming, play

ALL, ALL_HEAVY, ALL_MEAN = "all with all", "all, rate 0.7", "all, mean"
RANDOM, FASTEST, RING = "RandomPairs", "FastestPairs", "Ring"

SEEDS: Mapping[int, int] = {4: 5, 8: 3, 16: 2, 32: 1}
"""How many seeds are trained, by the number of groups."""

STEPS, SYNC_EVERY, OVERLAP_STEPS, BATCH = 400, 20, 5, 8

LIKE = {RANDOM: ALL_HEAVY, FASTEST: ALL_MEAN, RING: ALL_MEAN}
"""What a route is compared with: rounds in which all exchange with all, with the same outer step."""

COLORS = {ALL: PURPLE, ALL_HEAVY: GREY, ALL_MEAN: RED, RANDOM: BLUE, FASTEST: GREEN, RING: ORANGE}


def choices(method: str, groups: int, gbit_s: Sequence[Any] = ()) -> dict[str, Any]:
    """Returns what a method sets.

    Args:
        method: One of `COLORS`.
        groups: Number of worker groups.
        gbit_s: The speeds of links that `FastestPairs` is given, if they differ.
    """
    # NoLoCo's own numbers, and the mean itself.
    heavy, mean_itself = {"outer_lr": 0.7, "outer_momentum": 0.5}, {"outer_lr": 1.0, "outer_momentum": 0.0}
    if method in (ALL, ALL_HEAVY, ALL_MEAN):
        return {ALL: {}, ALL_HEAVY: heavy, ALL_MEAN: mean_itself}[method]
    routes = {RANDOM: RandomPairs(), FASTEST: FastestPairs(speeds=tuple(gbit_s)), RING: Ring()}
    outer: dict[str, dict[str, float]] = {RANDOM: heavy, FASTEST: mean_itself, RING: {}}
    return {"route": routes[method], "compression": "int8", **outer[method]}


@dataclass(frozen=True)
class GossipTraining(NamedTraining):
    """A training with one of `COLORS`."""

    @override
    def given(self) -> dict[str, Any]:
        return choices(self.method, self.groups)


def training(method: str, groups: int, seed: int, steps: int = STEPS) -> GossipTraining:
    """Makes a training of so many steps."""
    budget = steps * groups * BATCH * TINY.context / parameters(TINY)
    kept = {"sync_every": SYNC_EVERY, "overlap_steps": OVERLAP_STEPS}
    return GossipTraining(TINY, kept, groups, budget, BATCH, 3e-3, seed=seed, method=method)


def wanted() -> Iterator[GossipTraining]:
    """Yields all trainings, seed by seed."""
    for seed in range(max(SEEDS.values())):
        for groups in (groups for groups, seeds in SEEDS.items() if seed < seeds):
            yield from (training(method, groups, seed) for method in COLORS)


def quick() -> Iterator[GossipTraining]:
    """Yields trainings that show that the benchmark runs."""
    for method in COLORS:
        yield replace(training(method, 4, 0, steps=21), validation_windows=32)


def slow_quarter(groups: int) -> list[float]:
    """Returns the Gbit/s of each group where every fourth has a tenth."""
    return [0.1 if group % 4 == 3 else 1.0 for group in range(groups)]


def seconds(method: str, groups: int) -> float:
    """Returns the virtual seconds of an inner step of one second, of 100 million parameters, on unequal links."""
    gbit_s = slow_quarter(groups)
    settings = Settings(sync_every=SYNC_EVERY, overlap_steps=1, **choices(method, groups, gbit_s))
    method_of = Streaming(Model.of_size(10**8, layers=12), settings, Groups(groups=groups, step_time=1.0))
    links = [Link(gbit_s=speed, round_trip=0.03) for speed in gbit_s]
    steps = play(method_of, links[0], STEPS, [1.0] * groups, links=links)[0].steps
    return (steps[-1] - steps[STEPS // 2 - 1]) / (STEPS // 2)


def site_seconds(method: str, groups: int) -> float:
    """Returns for how long a round keeps the busiest link out of a site busy, over the rounds of some windows."""
    size = 2 if groups == 4 else 4
    inside = [[10.0 if one // size == other // size else 0.1 for other in range(groups)] for one in range(groups)]
    settings = Settings(sync_every=SYNC_EVERY, **choices(method, groups, inside))
    sent, rounds = bytes_of(method, groups) * 1e8, range(24)
    took = 0.0
    for number in rounds:
        out = [0.0] * (groups // size)
        for leg in settings.routing.legs(number, groups):
            for group in leg:
                away = sum(other // size != group // size for other in leg)
                out[group // size] += sent * away / (len(leg) - 1)
        took += max(out) * 8 / 1e8
    return took / len(rounds)


def bytes_of(method: str, groups: int) -> float:
    """Returns the bytes that a group sends in a round, for each parameter."""
    settings = Settings(sync_every=SYNC_EVERY, **choices(method, groups))
    return (
        Streaming(Model.of_size(10**8, layers=12), settings, Groups(groups=groups, step_time=1.0)).bytes_per_step
        * SYNC_EVERY
        / 1e8
    )


def rows(kept: Runs, trainings: Sequence[GossipTraining]) -> list[dict[str, Any]]:
    """Returns what was found of each method and number of groups: losses seed by seed, bytes and time."""
    found: dict[tuple[int, str], list[float]] = {}
    for one in trainings:
        if (run := kept.get(one)) is not None:
            found.setdefault((one.groups, one.method), []).append(run["loss"])
    made = []
    for (groups, method), losses in found.items():
        both = zip(losses, found.get((groups, LIKE.get(method, method)), []), strict=False)
        made.append(
            {
                "groups": groups,
                "method": method,
                "losses": losses,
                "percent": [100 * (loss / of_all - 1) for loss, of_all in both],
                "bytes": bytes_of(method, groups),
                "step_seconds": seconds(method, groups),
                "site_seconds": site_seconds(method, groups),
            }
        )
    return made


COLUMNS = [
    *(
        "groups",
        "route",
        "seeds",
        "loss",
        "above all with all by the same outer step, %",
        "bytes a parameter and round",
    ),
    *("seconds a step", "seconds a round out of a site"),
]


def cells(row: Mapping[str, Any]) -> list[str]:
    """Returns a row of the table."""
    percent, seeds = row["percent"], len(row["losses"])
    spread = f" (seeds differ by {stdev(percent):.1f})" if seeds > 1 else ""
    return [
        f"{row['groups']}",
        row["method"],
        f"{seeds}",
        f"{mean(row['losses']):.3f}",
        "" if row["method"] not in LIKE or not percent else f"{mean(percent):+.1f}{spread}",
        f"{row['bytes']:.2f}",
        f"{row['step_seconds']:.2f}",
        f"{row['site_seconds']:.0f}",
    ]


def draw(found: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Draws loss and time beside each other, by the number of groups."""
    if options.picture is None:
        return
    picture, (loss, time) = figure(columns=2, height=3.4)
    for method, color in COLORS.items():
        if method not in (ALL_HEAVY, ALL_MEAN):
            times = [site_seconds(method, groups) for groups in SEEDS]
            time.plot(list(SEEDS), times, "o-", color=color, label=method)
        if method in LIKE:
            own = [row for row in found if row["method"] == method and row["percent"]]
            loss.plot([row["groups"] for row in own], [mean(row["percent"]) for row in own], "o-", color=color)
            for row in own:
                loss.plot([row["groups"]] * len(row["percent"]), row["percent"], ".", color=color, alpha=0.4)
    loss.axhline(0, color=GREY, linewidth=1)
    loss.set_ylabel("loss above that of all with all,\nby the same outer step, %")
    time.set_ylim(bottom=0)
    time.set_ylabel("seconds a round, out of a site")
    for axes in (loss, time):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(SEEDS), [str(groups) for groups in SEEDS])
        axes.set_xlabel("worker groups")
    time.legend(frameon=False, fontsize=8)
    save(picture, options.picture)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    options = runs.parsed(runs.parser(__doc__), arguments)
    trainings = list(quick() if options.quick else wanted())
    kept = Runs("gossip", options.json)
    kept.make(trainings, options.workers, options.minutes)
    found = rows(kept, trainings)
    title = f"gossip: 31,000 parameters, {STEPS} steps, H={SYNC_EVERY}"
    caption = f"Processor time: {sum(run['cpu_seconds'] for run in map(kept.get, trainings) if run) / 60:.0f} minutes."
    report.show(title, COLUMNS, [cells(row) for row in found], caption)
    headline = {f"M={row['groups']}, {row['method']}, %": mean(row["percent"]) for row in found if row["percent"]}
    headline |= {f"M={row['groups']}, {row['method']}, seconds a step": row["step_seconds"] for row in found}
    headline |= {f"M={row['groups']}, {row['method']}, seconds of a site": row["site_seconds"] for row in found}
    kept.write(headline, options.quick)
    draw(found, options)


if __name__ == "__main__":
    main()
