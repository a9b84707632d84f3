"""Which outer rate, momentum and mixing a run should have if nobody says, by the number of groups and by H.

    python -m benchmarks.defaults [--stage STAGE] [--workers N] [--minutes M] [--quick] [--json FILE] [--picture FILE]

Four stages, each with the runs that it needs and the table that it gives:

- ``rates``: the inner learning rate, for DDP and for worker groups, each on its own.
- ``screen``: two seeds, one factor at a time around two groups and H=50.
- ``warmups``: four and eight groups with some `warmup_steps`.
- ``finalists``: five seeds for 2, 4 and 8 groups and for H of 20, 50 and 100, each paired with DDP on data and start.

With --json every run is kept at once, and runs that the file has are not made again: the benchmark may be stopped and
started as one likes. What has fewer than 15 rounds is left out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks import comparison, runs
from benchmarks.comparison import BATCH, FEWEST_ROUNDS
from benchmarks.models import SMALL, TINY
from benchmarks.runs import Runs
from benchmarks.training import Training

BASE: dict[str, Any] = {
    "sync_every": 50,
    "overlap_steps": 5,
    "outer_lr": 0.7,
    "mixing": 0.2,
    "outer_momentum": 0.9,
    "compression": "fp4",
}

LR, DDP_LR = 3e-3, 6e-3
"""The inner learning rates at which each does best with AdamW, of those that stage ``rates`` tries."""


def ours(groups: int = 2, seed: int = 0, **changes: Any) -> Training:
    return Training(SMALL, {**BASE, **changes}, groups, batch=BATCH, lr=LR, seed=seed)


def ddp_of(training: Training) -> Training:
    """DDP on the same batches, from the same weights, at its own learning rate."""
    return replace(training, choices=None, lr=DDP_LR)


def rates() -> Iterator[Training]:
    """Trainings that show the best inner learning rate of each method."""
    for seed in range(2):
        for lr in (3e-3, 6e-3):
            one = replace(ours(seed=seed), lr=lr)
            yield from (one, replace(one, choices=None))


def screen() -> Iterator[Training]:
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


def warmups() -> Iterator[Training]:
    """Trainings in which groups take the mean of their gradients in some steps."""
    for groups, sync_every in ((4, 50), (8, 20)):
        alone = replace(ours(groups, sync_every=sync_every), batch=1, lr=2 * LR)
        yield from (ddp_of(alone), alone)
        for share in (0.1, 0.2, 0.5):
            yield replace(alone, choices={**(alone.choices or {}), "warmup_steps": round(share * alone.steps)})


def finalists() -> Iterator[Training]:
    """Trainings with what the screen left, for each number of groups and each H, over five seeds."""
    for seed, groups, sync_every in product(range(5), (2, 4, 8), (20, 50, 100)):
        for outer_lr, mixing in product((0.5, 0.7, 0.9), (0.0, 0.2)):
            one = ours(groups, seed, sync_every=sync_every, outer_lr=outer_lr, mixing=mixing)
            if one.rounds >= FEWEST_ROUNDS:
                yield from (ddp_of(one), one)


STAGES: dict[str, Callable[[], Iterator[Training]]] = {
    "rates": rates,
    "screen": screen,
    "warmups": warmups,
    "finalists": finalists,
}


def quick_trainings() -> Iterator[Training]:
    one = Training(TINY, {**BASE, "sync_every": 10}, batch=2, budget=0.05)
    yield from (ddp_of(one), one)


def paired(trainings: Iterable[Training]) -> Mapping[str, comparison.Pairs]:
    """Returns the trainings with worker groups, each with DDP, by their setting."""
    settings: dict[str, list[tuple[Training, Training]]] = {}
    for one in trainings:
        if one.choices is not None:
            settings.setdefault(name(one), []).append((one, ddp_of(one)))
    return settings


def name(training: Training) -> str:
    choices = dict(training.choices or {})
    changed = [f"{key}={value}" for key, value in choices.items() if key == "sync_every" or BASE.get(key) != value]
    return ", ".join([f"M={training.groups}", f"lr={training.lr:g}", *changed])


def main(arguments: list[str] | None = None) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--stage", choices=STAGES, default="screen", help="what to run (default: %(default)s)")
    options = runs.parsed(parser, arguments)
    stage, trainings = ("quick", quick_trainings) if options.quick else (options.stage, STAGES[options.stage])
    wanted = list(trainings())
    kept = Runs("defaults", options.json)
    kept.make(wanted, options.workers, options.minutes)
    title = f"{stage}: {comparison.described(wanted[0])}"
    comparison.tell(title, comparison.compared(kept, paired(wanted)), kept, options)


if __name__ == "__main__":
    main()
