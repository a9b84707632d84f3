"""Measures the cost of worker groups in loss compared with DDP, at equal tokens and with the
settings that a user gets.

    python -m benchmarks.quality [--stage STAGE] [--size SIZE ...] [--budget X] [--device cuda]
                                 [--workers N] [--minutes M] [--quick] [--json FILE] [--picture
                                 FILE]

- ``rates``: the inner learning rate, for DDP and for worker groups, on the tuning seeds.
- ``verdict``: three sizes and 2, 4 and 8 groups, on five other seeds, each method at its own best
  rate.
- ``alone``: 2, 4 and 8 groups with H=20 and H=100, where the strategy chooses everything else; the
  bare name, where it also chooses H; and one group on the batches of all groups.
- ``screen``: one factor at a time, starting from two groups and H=50, on the tuning seeds.
- ``shares``: 4 and 8 groups with other lengths of the dense beginning, on one seed.
- ``links``: the bare name on links on which float32 gradients take 10, 30 and 100 inner steps.
- ``bands``: 4 groups by the bare name with other values of H, and both methods with other inner
  learning rates, on one seed.
- ``muon``: Muon for the matrices in both methods: its rates, and the settings that the strategy
  chooses, on the seeds of the verdict.
- ``unequal``: 4 groups with the settings that the strategy chooses, each with its own files.
- ``sparse``: 1/64 of the values, compared with fp4 under equal conditions.
- ``large``: 5 and 10 million parameters at two rates, and a pair of runs with 50 million; for
  ``--device cuda``.

The worker groups are simulated in one process (`SimulatedGroups`), bit-identical to separate
processes, so that the load of the machine does not matter. DDP trains on the batches of all groups
together. Open settings are chosen by the library and saved as numbers, so that a run is identified
by its numbers even if the library later chooses differently. Combinations with fewer than 14 rounds
are left out.

With --json, every run is saved as soon as it ends, and runs that are already in the file are
skipped. If --minutes is also given, a training that is out of time continues with the next call,
bit for bit.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

import torch

from benchmarks import comparison, runs
from benchmarks.comparison import FEWEST_ROUNDS, Comparison
from benchmarks.models import SMALL, TEN_MILLION, TINY, Size
from benchmarks.runs import Runs
from benchmarks.training import CUT, Training
from lightning_sdiloco import OuterOptimizer
from lightning_sdiloco.algorithm.config import (
    Settings,
    dense_for,
    overlap_in_round,
    round_lengths,
)
from lightning_sdiloco.algorithm.schedule import DenseBeginning
from lightning_sdiloco.lightning.options import DENSE_EVERY, dense_rounds_alone, is_hidden
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming
from lightning_sdiloco.planning.workload import FLOAT32, Groups
from lightning_sdiloco.planning.workload import Model as Workload

Pair = tuple[Training, Training]
"""A training in worker groups and one with DDP."""

BATCH = 2
"""The windows that a group sees in a step. DDP does better with two than with four, at either
learning rate."""

TWO_GROUPS = {
    "overlap_steps": 5, "outer_lr": 0.7, "mixing": 0.2, "outer_momentum": 0.9, "compression": "fp4", "fragments": CUT,
}  # fmt: skip
"""The defaults of two groups except for H, as the numbers that ``"auto"`` means."""

TUNING = range(2)
HELD_OUT = range(10, 15)
"""The seeds with which the rates were chosen, and those that no choice has used."""


class Rates(NamedTuple):
    """The best inner learning rates."""

    ddp: float
    ours: float


@dataclass(frozen=True)
class Model:
    """A model and its training.

    Attributes:
        size: Its shape.
        rates: The best inner learning rates with AdamW, by the number of groups.
        batch: Windows that a group sees in a step.
        budget: Tokens per parameter.
        every: The values of H for the verdict, by the number of groups; the first is that of all
            other stages.
        alone: The best inner learning rates of groups for which only H is set, by the number of
            groups.
        tried: The rates that both methods try in that stage, by the number of groups.
        alone_every: The values of H in that stage, by the number of groups; the default is 20.
        seeds: The seeds of that stage.
    """

    size: Size
    rates: Mapping[int, Rates]
    batch: int = BATCH
    budget: float = 16.0
    every: Mapping[int, Sequence[int]] = field(default_factory=lambda: {2: (50,)})
    alone: Mapping[int, Rates] = field(default_factory=dict)
    tried: Mapping[int, Sequence[float]] = field(default_factory=dict)
    alone_every: Mapping[int, Sequence[int]] = field(default_factory=dict)
    seeds: Sequence[int] = HELD_OUT


# More groups need larger rates, because each steps on a smaller batch; larger models need smaller
# rates.
MODELS = {
    "tiny": Model(TINY, {2: Rates(3e-3, 3e-3)}, budget=0.05),
    "0.1M": Model(
        SMALL,
        {2: Rates(6e-3, 3e-3), 4: Rates(6e-3, 6e-3), 8: Rates(9e-3, 6e-3)},
        batch=1,
        every={2: (50, 20, 100), 4: (50, 20, 100), 8: (20, 100)},
        alone={2: Rates(6e-3, 3e-3), 4: Rates(6e-3, 6e-3), 8: Rates(9e-3, 6e-3)},
        tried={4: (6e-3, 8e-3), 8: (6e-3, 9e-3)},
        alone_every={2: (20, 39, 100), 4: (20, 100), 8: (20, 100)},
    ),
    "0.2M": Model(Size(3, 64, 4, 128), {2: Rates(4.5e-3, 2e-3)}, batch=1),
    "0.5M": Model(
        Size(4, 96, 3, 128),
        {2: Rates(3e-3, 3e-3)},
        alone={4: Rates(4.5e-3, 3e-3), 8: Rates(4.5e-3, 4.5e-3)},
        tried={4: (3e-3, 4.5e-3), 8: (3e-3, 4.5e-3)},
    ),
    "2M": Model(
        Size(6, 160, 5, 128),
        {2: Rates(2e-3, 2e-3)},
        batch=8,
        alone={2: Rates(2e-3, 2e-3), 4: Rates(2e-3, 2e-3), 8: Rates(2e-3, 2e-3)},
        seeds=HELD_OUT[:2],
    ),
    "5M": Model(Size(6, 256, 4, 128), {2: Rates(1.5e-3, 1.5e-3)}, batch=32),
    "10M": Model(TEN_MILLION, {2: Rates(1.5e-3, 1.5e-3)}, batch=32),
    "50M": Model(Size(16, 512, 8, 128), {2: Rates(1e-3, 1e-3)}, batch=32, budget=2.0),
}
"""The models by name, with the rates that stage ``rates`` chooses; 0.2M is the demo's model."""

TRIED = (2e-3, 3e-3, 4.5e-3, 6e-3, 1.2e-2)
TRIED_LARGE = (1.5e-3, 3e-3)
TRIED_MUON = (3e-3, 6e-3, 1.2e-2, 2.4e-2)
"""Inner learning rates."""

OTHER_LENGTHS = (20, 40, 70, 100)
OTHER_RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)
"""H and inner learning rates of the bands; with four groups at 0.1M the bare name means H=10."""

LINKS = (10, 30, 100)
"""The inner steps that DDP's float32 gradients take on a link."""

ROUND_TRIP = 0.05
"""The round trip of such a link, in inner steps."""

ELEMENTWISE = OuterOptimizer(direction="elementwise")
"""The outer step of runs that do not set a direction."""

EQUALISED = OuterOptimizer(direction="equalised")
"""The outer step that is chosen by default."""

MUON_RATES = {2: Rates(6e-3, 3e-3), 4: Rates(1.2e-2, 6e-3), 8: Rates(2.4e-2, 1.2e-2)}

DILOCO: dict[str, Any] = {
    "overlap_steps": 0,
    "mixing": 0.0,
    "fragments": [["*"]],
    "compression": "fp32",
}
"""DiLoCo without streaming: one fragment, float32, and no overlap of flights with training."""


def pair(
    size: str,
    groups: int = 2,
    seed: int = 0,
    rates: Rates | None = None,
    inner: str = "adamw",
    **choices: Any,
) -> Pair:
    """Returns worker groups and DDP on the same batches, from the same weights, each with its own
    rate.
    """
    model = MODELS[size]
    rates = rates or model.rates[groups]
    ddp = Training(model.size, None, groups, model.budget, model.batch, rates.ddp, inner, seed)
    return replace(ddp, choices=chosen({"sync_every": 50, **choices}, groups), lr=rates.ours), ddp


def chosen(choices: Mapping[str, Any], groups: int) -> dict[str, Any]:
    """Returns choices, completed with the numbers that the library chooses."""
    settings = Settings(**{"outer_optimizer": ELEMENTWISE, **choices}).chosen_for(groups)
    defaults = {
        "overlap_steps": settings.overlap_steps,
        "compression": settings.compression,
        "fragments": CUT,
    }
    return {**defaults, **settings.numbers, **choices}


def verdict(size: str) -> Iterator[tuple[str, Pair]]:
    """Yields the pairs that decide whether worker groups learn as well as DDP."""
    for groups in MODELS[size].rates:
        for sync_every, seed in product(MODELS[size].every[groups], HELD_OUT):
            name = f"{size}, M={groups}, H={sync_every}"
            yield name, pair(size, groups, seed, sync_every=sync_every)


def alone(
    size: str,
    groups: int,
    seed: int,
    rates: Rates | None = None,
    inner: str = "adamw",
    sync_every: int | None = 20,
) -> Pair:
    """Returns groups for which only H is set, or not even that (None): the strategy chooses
    fragments, H and a dense beginning, for a link that hides them.
    """
    rates = rates or MODELS[size].alone[groups]
    steps = pair(size, groups, rates=rates)[0].steps
    return pair(size, groups, seed, rates, inner, **of_strategy(groups, steps, sync_every))


def of_strategy(groups: int, steps: int, sync_every: int | None = None) -> dict[str, Any]:
    """Returns what the strategy chooses for a language model if only H is set, or nothing (None)."""
    choices: dict[str, Any] = {"fragments": "strided", "outer_optimizer": EQUALISED}
    if sync_every is None:
        sync_every = round_lengths(steps)[0]
        choices["overlap_steps"] = overlap_in_round(sync_every)
    dense = dense_for(groups, steps, Settings(sync_every=sync_every))
    choices |= {"dense_beginning": dense} if dense else {}
    return {**choices, "sync_every": sync_every}


def single(size: str, groups: int, seed: int) -> Pair:
    """Returns one group on the batches of several, with the outer step that the strategy chooses,
    which shows the effect of that step without drift and without a link.
    """
    ours, ddp = alone(size, groups, seed)
    choices = {**(ours.choices or {}), "compression": "fp32"}
    choices.pop("dense_beginning", None)
    batch = groups * ours.batch
    return replace(ours, choices=choices, groups=1, batch=batch, lr=ddp.lr), ddp


def by_itself(size: str) -> Iterator[tuple[str, Pair]]:
    """Yields pairs with the strategy's choices, at the rates that both methods try and over the
    other seeds.
    """
    model = MODELS[size]
    for groups, tried in model.tried.items():
        for rate, seed in product(tried, TUNING):
            name = at_rate(f"{size}, M={groups}, H=20, by itself", rate)
            yield name, alone(size, groups, seed, Rates(rate, rate))
    for groups in model.alone:
        for sync_every, seed in product(model.alone_every.get(groups, (20,)), model.seeds):
            name = f"{size}, M={groups}, H={sync_every}, by itself, other seeds"
            yield name, alone(size, groups, seed, sync_every=sync_every)
    for groups, seed in product(model.alone, model.seeds):
        name = f"{size}, M=1 on the batches of {groups}, H=20, by itself, other seeds"
        yield name, single(size, groups, seed)
        name = f"{size}, M={groups}, bare name, other seeds"
        yield name, alone(size, groups, seed, sync_every=None)


def screen(size: str) -> Iterator[tuple[str, Pair]]:
    """Yields variations of one factor at a time from the defaults of two groups, with `BATCH`
    windows for each in a step.
    """
    factors: dict[str, tuple[Any, ...]] = {
        "outer_lr": (0.4, 0.9),
        "mixing": (0.0, 0.5),
        "outer_momentum": (0.8, 0.95),
        "overlap_steps": (1, 10),
        "sync_every": (20, 100),
        "compression": ("fp32",),
    }
    changes = [{}, *({name: value} for name, values in factors.items() for value in values)]
    for seed, change in product(TUNING, changes):
        name = ", ".join([f"{size}, M=2", *(f"{key}={value}" for key, value in change.items())])
        ours, ddp = pair(size, 2, seed, **{**TWO_GROUPS, **change})
        yield name, (replace(ours, batch=BATCH), replace(ddp, batch=BATCH))


def shares(size: str) -> Iterator[tuple[str, Pair]]:
    """Yields groups that exchange every four inner steps in a share of the steps."""
    for (groups, sync_every), share in product(((4, 50), (8, 20)), (0, 0.05, 0.1, 0.2, 0.4)):
        rounds = round(share * pair(size, groups)[0].steps) // 4
        choices: dict[str, Any] = {"dense_beginning": DenseBeginning(rounds)} if rounds else {}
        name = f"{size}, M={groups}, H={sync_every}, {share:g} of the steps as dense_beginning"
        yield name, pair(size, groups, TUNING[0], sync_every=sync_every, **choices)


def bands(size: str) -> Iterator[tuple[str, Pair]]:
    """Yields four groups by the bare name with a different H, and with a different inner learning
    rate, also for DDP, to show how wrong each may be.
    """
    for sync_every in OTHER_LENGTHS:
        yield f"{size}, M=4, H={sync_every}", alone(size, 4, HELD_OUT[0], sync_every=sync_every)
    for rate in OTHER_RATES:
        pair_at_rate = alone(size, 4, HELD_OUT[0], Rates(rate, rate), sync_every=None)
        yield at_rate(f"{size}, M=4, bare name", rate), pair_at_rate


class OnLink(NamedTuple):
    """What the bare name chooses on a link.

    Attributes:
        sync_every: H.
        overlap_steps: The inner steps of a flight.
        dense: The dense beginning, if there is one.
        waits: The share of the time for which training waits for the link.
    """

    sync_every: int
    overlap_steps: int
    dense: DenseBeginning | None
    waits: float


class ScaledLink(NamedTuple):
    """A link and the groups that exchange a model over it, in time units of an inner step."""

    workload: Workload
    groups: Groups
    link: Link

    def method(self, settings: Settings) -> Streaming:
        return Streaming(self.workload, settings, self.groups)

    def hides(self, settings: Settings) -> bool:
        """Returns whether training does not wait for the link with these settings."""
        return is_hidden(self.method(settings), self.link)


def scaled_link(size: str, groups: int, step_times: float) -> ScaledLink:
    """Returns a link on which DDP's float32 gradients take this many inner steps."""
    model = MODELS[size].size.make()
    workload = Workload.of_parameters(dict(model.named_parameters()))
    ring = 2 * (groups - 1) / groups * FLOAT32 * workload.numel
    link = Link(8 * ring / step_times / 1e9, round_trip=ROUND_TRIP)
    return ScaledLink(workload, Groups(step_time=1.0, groups=groups), link)


def chosen_for_link(size: str, groups: int, step_times: float) -> OnLink:
    """Returns the choice on a link on which DDP's float32 gradients take this many inner steps."""
    steps = pair(size, groups, rates=MODELS[size].alone[groups])[0].steps
    link = scaled_link(size, groups, step_times)
    candidates = [
        Settings(
            sync_every=sync_every, overlap_steps=overlap_in_round(sync_every), fragments="strided"
        )
        for sync_every in round_lengths(steps)
    ]
    settings = next(filter(link.hides, candidates), candidates[-1])
    hidden_dense = None
    for sync_every in DENSE_EVERY:
        dense = dense_for(groups, steps, settings, sync_every)
        if dense is not None and link.hides(dense_rounds_alone(settings, dense)):
            hidden_dense = dense
            break
    waits = 1 - link.method(settings).utilisation(link.link)
    return OnLink(settings.sync_every, settings.overlap_steps, hidden_dense, waits)


def on_links(size: str) -> Iterator[tuple[str, Pair]]:
    """Yields the bare name on links of different speeds."""
    model = MODELS[size]
    for seed, groups, step_times in product(model.seeds, model.alone, LINKS):
        choice = chosen_for_link(size, groups, step_times)
        choices: dict[str, Any] = {
            "sync_every": choice.sync_every,
            "overlap_steps": choice.overlap_steps,
            "fragments": "strided",
            "outer_optimizer": EQUALISED,
        }
        if choice.dense is not None:
            choices["dense_beginning"] = choice.dense
        name = f"{size}, M={groups}, on a link of {step_times} inner steps"
        yield name, pair(size, groups, seed, model.alone[groups], **choices)


def rates(size: str) -> Iterator[tuple[str, Pair]]:
    """Yields each rate for each number of groups, for both methods."""
    for groups in MODELS[size].rates:
        sync_every = MODELS[size].every[groups][0]
        for rate, seed in product(TRIED, TUNING):
            name = at_rate(f"{size}, M={groups}, H={sync_every}", rate)
            yield name, pair(size, groups, seed, Rates(rate, rate), sync_every=sync_every)


def muon(size: str) -> Iterator[tuple[str, Pair]]:
    """Yields Muon in both methods: each rate on the tuning seeds, and the best ones on the other
    seeds.
    """
    for rate, seed in product(TRIED_MUON, TUNING):
        rates = Rates(rate, rate)
        if rate < TRIED_MUON[-1]:  # two groups are already worse at the second-last rate
            yield at_rate(f"{size}, M=2, H=50, Muon", rate), pair(size, 2, seed, rates, "muon")
        for groups in (4, 8):
            name = at_rate(f"{size}, M={groups}, H=20, by itself, Muon", rate)
            yield name, alone(size, groups, seed, rates, "muon")
    for (groups, best), seed in product(MUON_RATES.items(), HELD_OUT):
        name = f"{size}, M={groups}, H=20, by itself, Muon, other seeds"
        yield name, alone(size, groups, seed, best, "muon")


def unequal(size: str) -> Iterator[tuple[str, Pair]]:
    """Yields four groups with the strategy's choices, each with its own files, and DDP on the same
    batches.
    """
    for seed in HELD_OUT:
        ours, ddp = alone(size, 4, seed)
        pair_by_file = (replace(ours, split="by_file"), replace(ddp, split="by_file"))
        yield f"{size}, M=4, H=20, by itself, files of its own for each group", pair_by_file


def sparse(size: str) -> Iterator[tuple[str, Pair]]:
    """Yields 1/64 of the values and fp4 under equal conditions, by H."""
    for sync_every, compression, seed in product((50, 10, 5), ("fp4", "sparse"), TUNING):
        choices: dict[str, Any] = {
            "sync_every": sync_every,
            "overlap_steps": 5 if sync_every == 50 else 1,
            "compression": compression,
        }
        yield f"{size}, M=2, H={sync_every}, {compression}", pair(size, 2, seed, **choices)


def large(size: str) -> Iterator[tuple[str, Pair]]:
    """Yields one seed with two rates for both methods, or only the known rate if more would take
    too long.
    """
    name = f"{size}, M=2, H=50"
    if size == "50M":
        yield name, pair(size, 2, HELD_OUT[0])
        return
    for rate in TRIED_LARGE:
        yield at_rate(name, rate), pair(size, 2, HELD_OUT[0], Rates(rate, rate))


def quick(size: str) -> Iterator[tuple[str, Pair]]:
    yield size, pair(size, sync_every=10)


class Stage(NamedTuple):
    """A question.

    Attributes:
        about: The subject.
        sizes: The models that it uses by default.
        pairs: A function from a model to its pairs, each with the name of the setting.
    """

    about: str
    sizes: Sequence[str]
    pairs: Callable[[str], Iterator[tuple[str, Pair]]]


STAGES = {
    "rates": Stage("each inner learning rate for both methods", ["0.1M", "0.2M", "0.5M"], rates),
    "verdict": Stage("worker groups with the defaults, and DDP", ["0.1M", "0.2M", "0.5M"], verdict),
    "alone": Stage("what the strategy does by itself", ["0.1M"], by_itself),
    "screen": Stage("one factor at a time around the defaults", ["0.1M"], screen),
    "shares": Stage("shares of the steps as dense beginning", ["0.1M"], shares),
    "links": Stage("the bare name on links of different speeds", ["0.1M"], on_links),
    "bands": Stage("other H and other inner learning rates", ["0.1M"], bands),
    "muon": Stage("Muon for the matrices inside both", ["0.1M"], muon),
    "unequal": Stage("files of its own for each group", ["0.1M"], unequal),
    "sparse": Stage("1/64 of the values, beside fp4", ["0.1M"], sparse),
    "large": Stage("larger models", ["5M", "10M", "50M"], large),
}
QUICK = Stage("does it run", ["tiny"], quick)

_AT = ", rate "


def at_rate(name: str, rate: float) -> str:
    """Names a setting at one of several inner learning rates."""
    return f"{name}{_AT}{rate:g}"


def planned(
    stage: Stage, sizes: Sequence[str], budget: float | None, device: str
) -> dict[str, list[Pair]]:
    """Returns the pairs of a stage by their setting, the most informative first."""
    settings: dict[str, list[Pair]] = {}
    for size in sizes:
        usual = MODELS[size].budget
        tokens = usual if budget is None else budget
        suffix = "" if tokens == usual else f", {tokens:g} tokens per parameter"
        for name, (ours, ddp) in stage.pairs(size):
            pairs = settings.setdefault(f"{name}{suffix}", [])
            ours = replace(ours, budget=tokens, device=device)
            pairs.append((ours, replace(ddp, budget=tokens, device=device)))
    return settings


def has_enough_rounds(pairs: Sequence[Pair]) -> bool:
    """Returns whether a setting has enough rounds to be informative."""
    return all(ours.rounds >= FEWEST_ROUNDS for ours, _ in pairs)


def each_at_its_best(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Returns, for settings at several rates, the better runs of each method, if all rates have the
    same seeds.
    """
    by_setting: dict[str, list[Comparison]] = {}
    for compared in comparisons:
        name, separator, _ = compared.name.partition(_AT)
        if separator:
            by_setting.setdefault(name, []).append(compared)
    best = []
    for name, rates in by_setting.items():
        seeds = {tuple(run["seed"] for run in compared.ours) for compared in rates}
        if len(seeds) == 1:
            ours = min((compared.ours for compared in rates), key=loss)
            ddp = min((compared.plain for compared in rates), key=loss)
            best.append(Comparison(f"{name}, each at its best", ours, ddp))
    return best


def loss(runs: Sequence[Mapping[str, Any]]) -> float:
    return mean(run["loss"] for run in runs)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line, and refuses a GPU that does not exist."""
    parser = runs.parser(__doc__)
    parser.add_argument(
        "--stage", choices=STAGES, default="verdict", help="what to run (default: %(default)s)"
    )
    parser.add_argument("--size", choices=MODELS, nargs="+", help="models (default: the stage's)")
    parser.add_argument("--budget", type=float, help="tokens per parameter (default: the stage's)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s"
    )
    options = runs.parsed(parser, arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda needs a GPU that torch sees: torch.cuda.is_available() is False here."
        )
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    if options.quick:
        command = "quality"
        stage = QUICK
        sizes = stage.sizes
    else:
        command = f"quality --stage {options.stage}"
        stage = STAGES[options.stage]
        sizes = options.size or stage.sizes
    settings = planned(stage, sizes, options.budget, options.device)
    short = [] if options.quick else [n for n, p in settings.items() if not has_enough_rounds(p)]
    wanted = {name: pairs for name, pairs in settings.items() if name not in short}
    finished = Runs(command, options.json)
    finished.make(runs.of_pairs(wanted), options.workers, options.minutes)
    comparisons = comparison.compared(finished, wanted)
    comparisons += each_at_its_best(comparisons)
    left_out = ""
    if short:
        left_out = f"Left out, with fewer than {FEWEST_ROUNDS} rounds: {'; '.join(short)}."
    title = f"{options.stage}: {stage.about}"
    comparison.tell(title, comparisons, finished, options, left_out)


if __name__ == "__main__":
    main()
