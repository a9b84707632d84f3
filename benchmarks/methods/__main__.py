"""What each method does to loss and bytes, beside the defaults, on a language model.

    python -m benchmarks.methods [--workers N] [--minutes M] [--rates] [--quick] [--json FILE]
    [--picture FILE]

Four worker groups train one model, simulated in one process with the bits of as many processes; two
where it is about `Selective`, as launching less often costs four groups more; one for what is for
one. Data and start depend on the seed alone, so that each method is compared pair by pair. What a
method does not set is as by default, also the inner learning rate, but for the optimizers that have
their own, which --rates chooses.

With --json every run is kept at once, and runs that the file has are not made again.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from benchmarks import comparison, report, runs
from benchmarks.comparison import Comparison, interval
from benchmarks.methods.named import METHODS, quick, rates, training, wanted
from benchmarks.picture import BLUE, GREY, figure, save
from benchmarks.runs import Runs
from benchmarks.training import NamedTraining, Run


def cells(row: Comparison) -> list[str]:
    return [
        row.name,
        f"{len(row.ours)}",
        f"{mean(run['loss'] for run in row.ours):.3f}",
        "" if is_plain(row) else interval(row.percent, digits=1),
        f"{mean(run.get('bytes_sent', 0) for run in row.ours) / 1e6:.2f}",
        f"{100 * bytes_sent(row):.0f} %" if bytes_sent(row) else "",
        f"{mean(run.get('launches', 0) for run in row.ours):.0f}",
        "" if is_plain(row) else row.verdict,
    ]


def bytes_sent(row: Comparison) -> float:
    """Returns the bytes that a method sent over those of the other; 0 if nobody sent any."""
    both = zip(row.ours, row.plain, strict=True)
    return mean(
        one.get("bytes_sent", 0) / max(1, plain.get("bytes_sent", 0)) for one, plain in both
    )


def is_plain(row: Comparison) -> bool:
    """Tells whether others are compared with a method, and it with none."""
    return METHODS[row.ours[0]["method"]].beside is None


COLUMNS = [
    "method",
    "seeds",
    "loss",
    "minus the other's, %",
    "MB sent",
    "of the other's",
    "launches",
    "",
]


def compared(kept: Runs, trainings: Sequence[NamedTraining]) -> list[Comparison]:
    """Returns the methods of which something was made beside what they are compared with, those of
    two groups first.
    """
    found: dict[str, tuple[list[Run], list[Run]]] = {}
    for one in trainings:
        own = kept.get(one)
        plain = kept.get(_plain(one))
        if own is not None and plain is not None:
            for runs_of, run in zip(
                found.setdefault(f"M={one.groups}, {one.method}", ([], [])),
                (own, plain),
                strict=True,
            ):
                runs_of.append(run)
    return [Comparison(name, *both) for name, both in found.items()]


def _plain(one: NamedTraining) -> NamedTraining:
    like = training(METHODS[one.method].beside or one.method, one.groups, one.seed)
    return replace(
        like, size=one.size, budget=one.budget, validation_windows=one.validation_windows
    )


def draw(rows: Sequence[Comparison], options: argparse.Namespace) -> None:
    """Draws by how much the loss is higher, with its interval, and the bytes beside it."""
    drawn = [row for row in rows if not is_plain(row)]
    if options.picture is None or not drawn:
        return
    picture, (axes, bytes_axes) = figure(columns=2, height=1.2 + 0.28 * len(drawn), widths=(3, 2))
    for position, one in enumerate(drawn):
        comparison.plot(axes, position, one)
        bytes_axes.barh(-position, 100 * bytes_sent(one), height=0.6, color=BLUE)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks(
        [-position for position in range(len(drawn))], [one.name for one in drawn], fontsize=8
    )
    axes.set_xlabel("loss minus that of what it is compared with, %")
    bytes_axes.set_yticks([])
    bytes_axes.set_xlabel("bytes, % of the other's")
    for one in (axes, bytes_axes):
        one.set_ylim(0.6 - len(drawn), 0.6)
    save(picture, options.picture)


def main(arguments: list[str] | None = None) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument(
        "--rates", action="store_true", help="inner learning rates of what has its own"
    )
    options = runs.parsed(parser, arguments)
    trainings = list(quick() if options.quick else rates() if options.rates else wanted())
    kept = Runs("methods", options.json)
    kept.make(trainings, options.workers, options.minutes)
    if options.rates:
        _tell_rates(kept, trainings)
        return
    rows = compared(kept, trainings)
    caption = (
        "Loss in nats per byte; the difference is the mean over the seeds, with its 95 % interval."
    )
    report.show(
        "methods: 110,832 parameters, 16 tokens per parameter, H=20",
        COLUMNS,
        [cells(row) for row in rows],
        caption,
    )
    kept.write(
        {f"{row.name}, %": mean(row.percent) for row in rows if not is_plain(row)}, options.quick
    )
    draw(rows, options)


def _tell_rates(kept: Runs, trainings: Sequence[NamedTraining]) -> None:
    found = [(one, run["loss"]) for one in trainings if (run := kept.get(one)) is not None]
    rows = [[one.method, f"{one.lr:g}", f"{loss:.3f}"] for one, loss in found]
    report.show("inner learning rates, 4 tokens per parameter", ["method", "rate", "loss"], rows)


if __name__ == "__main__":
    main()
