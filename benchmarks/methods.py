"""What each method does to loss and bytes, beside the defaults, on a language model.

    python -m benchmarks.methods [--workers N] [--minutes M] [--quick] [--json FILE] [--picture FILE]

Four worker groups train one model, simulated in one process with the bits of as many processes; two where it is about
`Selective`, as launching less often costs four groups more. Data and start depend on the seed alone, so that each
method is compared with the defaults pair by pair. What a method does not set is as by default, also the inner learning
rate, but for Muon, which has its own. Methods that change when groups wait, and not what is trained, have benchmarks of
their own.

With --json every run is kept at once, and runs that the file has are not made again.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

from typing_extensions import override

from benchmarks import report, runs
from benchmarks.comparison import interval
from benchmarks.models import TINY
from benchmarks.picture import BLUE, GREY, RED, figure, save
from benchmarks.quality import HELD_OUT, MUON_RATES, pair
from benchmarks.runs import Runs
from benchmarks.training import NamedTraining, Run
from lightning_sdiloco import ByMedian, ByNorm, Carry, DelayedNesterov, Eager, Selective, ZScore
from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.compression import ErrorFeedback, Int2, Threshold, TopK
from lightning_sdiloco.tools.simulate.seeds import half_width

DEFAULTS = "defaults"

METHODS: Mapping[str, Callable[[], dict[str, Any]]] = {
    DEFAULTS: dict,
    "Selective(0.3, most=4)": lambda: {"schedule": Selective(0.3, 4)},
    "Carry": lambda: {"mixing": Carry()},
    "defaults, tau=19": lambda: {"overlap_steps": 19},
    "Carry, tau=19": lambda: {"overlap_steps": 19, "mixing": Carry()},
    "Eager, tau=19": lambda: {"overlap_steps": 19, "mixing": Eager()},
    "ByNorm(1.0)": lambda: {"weighing": ByNorm(1.0)},
    "ZScore(warmup=20)": lambda: {"weighing": ZScore(warmup=20)},
    "ByMedian": lambda: {"weighing": ByMedian()},
    "DelayedNesterov(every=4)": lambda: {"outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=4)},
    "top_k+memory": lambda: {"compression": "top_k+memory"},
    "random_k+memory, outer_lr=1": lambda: {"compression": "random_k+memory", "outer_lr": 1.0, "outer_momentum": 0.0},
    "sparse, over senders": lambda: {"compression": ErrorFeedback(TopK(1 / 64, Int2(), over="senders"), decay=0.95)},
    "Threshold(every=10)": lambda: {"compression": ErrorFeedback(Threshold(1 / 64, Int2(), every=10), decay=0.95)},
    "Muon": dict,
}
"""What each method sets, by the name that its runs are kept under."""

SIZE, SYNC_EVERY, OVERLAP_STEPS = "0.1M", 20, 5

BY_GROUPS: Mapping[int, Sequence[str]] = {2: [DEFAULTS, "Selective(0.3, most=4)"], 4: list(METHODS)}
"""Which methods are compared, by the number of groups."""


@dataclass(frozen=True)
class MethodTraining(NamedTraining):
    """A training with one of `METHODS`."""

    @override
    def given(self) -> dict[str, Any]:
        return METHODS[self.method]()


def training(method: str, groups: int, seed: int) -> MethodTraining:
    """Makes a training with the rates and the settings of the verdict of `benchmarks.quality`."""
    given = METHODS[method]()
    settings = Settings(**{"sync_every": SYNC_EVERY, "overlap_steps": OVERLAP_STEPS, **given}).chosen_for(groups)
    numbers = {name: value for name, value in settings.numbers.items() if name not in given}
    inner, rates = ("muon", MUON_RATES) if method == "Muon" else ("adamw", None)
    like, _ = pair(SIZE, groups, seed, rates, inner)
    choices = {"sync_every": SYNC_EVERY, "overlap_steps": settings.overlap_steps, **numbers}
    return MethodTraining(**{**vars(like), "choices": choices, "method": method})


def wanted() -> Iterator[MethodTraining]:
    """Yields all trainings: seed by seed, so that what is made is paired."""
    for groups, names in BY_GROUPS.items():
        for seed in HELD_OUT:
            yield from (training(name, groups, seed) for name in names)


def quick() -> Iterator[MethodTraining]:
    """Yields trainings that show that the benchmark runs."""
    for name in METHODS:
        yield replace(training(name, 4, 0), size=TINY, budget=0.05, validation_windows=32)


@dataclass(frozen=True)
class Compared:
    """A method and the defaults, seed by seed, as far as both were made.

    Attributes:
        name: The method, and with how many groups.
        ours: Its runs.
        plain: Those of the defaults, in the same order.
    """

    name: str
    ours: Sequence[Run]
    plain: Sequence[Run]

    @property
    def percent(self) -> list[float]:
        """By how much its loss is higher, in percent."""
        return [100 * (one["loss"] / plain["loss"] - 1) for one, plain in zip(self.ours, self.plain, strict=True)]

    @property
    def bytes_sent(self) -> float:
        """Bytes that it sent over those of the defaults."""
        return mean(one["bytes_sent"] / plain["bytes_sent"] for one, plain in zip(self.ours, self.plain, strict=True))

    def cells(self) -> list[str]:
        """Returns a row of the table."""
        half, more = half_width(self.percent), mean(self.percent)
        verdict = "" if half is None else "no difference" if abs(more) <= half else "worse" if more > 0 else "better"
        return [
            self.name,
            f"{len(self.ours)}",
            f"{mean(run['loss'] for run in self.ours):.3f}",
            "" if self.is_plain else interval(self.percent, digits=1),
            f"{mean(run['bytes_sent'] for run in self.ours) / 1e6:.2f}",
            f"{100 * self.bytes_sent:.0f} %",
            f"{mean(run['launches'] for run in self.ours):.0f}",
            "" if self.is_plain else verdict,
        ]

    @property
    def is_plain(self) -> bool:
        """Whether it is the defaults themselves."""
        return self.ours[0]["method"] == DEFAULTS


COLUMNS = ["method", "seeds", "loss", "minus defaults, %", "MB sent", "of the defaults'", "launches", ""]


def compared(kept: Runs, trainings: Sequence[MethodTraining]) -> list[Compared]:
    """Returns the methods of which something was made beside the defaults, those of two groups first."""
    found: dict[str, tuple[list[Run], list[Run]]] = {}
    for one in trainings:
        own, plain = kept.get(one), kept.get(_plain(one))
        if own is not None and plain is not None:
            for runs_of, run in zip(
                found.setdefault(f"M={one.groups}, {one.method}", ([], [])), (own, plain), strict=True
            ):
                runs_of.append(run)
    return [Compared(name, *both) for name, both in found.items()]


def _plain(one: MethodTraining) -> MethodTraining:
    like = training(DEFAULTS, one.groups, one.seed)
    return replace(like, size=one.size, budget=one.budget, validation_windows=one.validation_windows)


def draw(rows: Sequence[Compared], options: argparse.Namespace) -> None:
    """Draws by how much the loss is higher, with its interval, and the bytes beside it."""
    drawn = [row for row in rows if not row.is_plain]
    if options.picture is None or not drawn:
        return
    picture, (axes, bytes_axes) = figure(columns=2, height=1.2 + 0.28 * len(drawn), widths=(3, 2))
    for position, one in enumerate(drawn):
        more, half = mean(one.percent), half_width(one.percent)
        color = GREY if half is None or abs(more) <= half else RED if more > 0 else BLUE
        axes.errorbar(more, -position, xerr=half, fmt="o", color=color, capsize=3)
        bytes_axes.barh(-position, 100 * one.bytes_sent, height=0.6, color=BLUE)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks([-position for position in range(len(drawn))], [one.name for one in drawn], fontsize=8)
    axes.set_xlabel("loss minus that of the defaults, %")
    bytes_axes.set_yticks([])
    bytes_axes.set_xlabel("bytes, % of the defaults'")
    for one in (axes, bytes_axes):
        one.set_ylim(0.6 - len(drawn), 0.6)
    save(picture, options.picture)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    options = runs.parsed(runs.parser(__doc__), arguments)
    trainings = list(quick() if options.quick else wanted())
    kept = Runs("methods", options.json)
    kept.make(trainings, options.workers, options.minutes)
    rows = compared(kept, trainings)
    caption = "Loss in nats per byte; the difference is the mean over the seeds, with its 95 % interval."
    report.show(
        "methods: 110,832 parameters, 16 tokens per parameter, H=20", COLUMNS, [row.cells() for row in rows], caption
    )
    kept.write({f"{row.name}, %": mean(row.percent) for row in rows if not row.is_plain}, options.quick)
    draw(rows, options)


if __name__ == "__main__":
    main()
