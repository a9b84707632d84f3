"""Measures the effect of each method on loss and bytes with a language model, compared with the
defaults.

    python -m benchmarks.methods [--workers N] [--minutes M] [--rates] [--quick] [--json FILE]
    [--picture FILE]

Four worker groups train one model, simulated in one process, bit-identical to four processes.
`Selective` uses two groups, because launching less often costs four groups more, and methods for
one group use one. Data and start depend only on the seed, so each method is compared pair by pair.
Everything that a method does not set has its default, including the inner learning rate, except for
optimizers with their own rate, which --rates chooses.

With --json, every run is saved as soon as it ends, and runs that are already in the file are
skipped.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from benchmarks import comparison, report, runs
from benchmarks.comparison import Comparison, interval
from benchmarks.methods.named import METHODS, quick, rates, training, wanted
from benchmarks.picture import SERIES, figure, save
from benchmarks.runs import Runs
from benchmarks.training import NamedTraining


def cells(row: Comparison) -> list[str]:
    losses = [run["loss"] for run in row.ours]
    sent = mean(run.get("bytes_sent", 0) for run in row.ours)
    launches = mean(run.get("launches", 0) for run in row.ours)
    share = bytes_sent(row)
    return [
        row.name,
        f"{len(losses)}",
        f"{mean(losses):.3f}",
        "" if is_plain(row) else interval(row.percent, digits=1),
        f"{sent / 1e6:.2f}",
        f"{100 * share:.0f} %" if share else "",
        f"{launches:.0f}",
        "" if is_plain(row) else row.verdict,
    ]


def bytes_sent(row: Comparison) -> float:
    """Returns the bytes of a method relative to its reference's; 0 if nothing was sent."""
    return mean(
        ours.get("bytes_sent", 0) / max(1, plain.get("bytes_sent", 0))
        for ours, plain in zip(row.ours, row.plain, strict=True)
    )


def is_plain(row: Comparison) -> bool:
    """Returns whether a method is only a reference for others."""
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


def compared(finished: Runs, trainings: Sequence[NamedTraining]) -> list[Comparison]:
    """Returns the methods that have runs together with their references, those of two groups
    first.
    """
    settings: dict[str, list[tuple[NamedTraining, NamedTraining]]] = {}
    for method in trainings:
        name = f"M={method.groups}, {method.method}"
        settings.setdefault(name, []).append((method, _plain(method)))
    return comparison.compared(finished, settings)


def _plain(method: NamedTraining) -> NamedTraining:
    """Returns the training with which a method is compared."""
    name = METHODS[method.method].beside or method.method
    plain = training(name, method.groups, method.seed)
    return replace(
        plain,
        size=method.size,
        budget=method.budget,
        validation_windows=method.validation_windows,
    )


def draw(rows: Sequence[Comparison], options: argparse.Namespace) -> None:
    """Draws the increase of the loss with its interval, next to the bytes."""
    drawn = [row for row in rows if not is_plain(row)]
    if options.picture is None or not drawn:
        return
    picture, (axes, bytes_axes) = figure(columns=2, height=1.2 + 0.28 * len(drawn), widths=(3, 2))
    comparison.plot_all(axes, drawn, SERIES[0])
    for number, row in enumerate(drawn):
        bytes_axes.barh(-number, 100 * bytes_sent(row), height=0.6, color=SERIES[0])
    axes.set_xlabel("loss above that of its baseline, %")
    bytes_axes.set_yticks([])
    bytes_axes.set_xlabel("bytes, % of its baseline's")
    for panel in (axes, bytes_axes):
        panel.set_ylim(0.6 - len(drawn), 0.6)
    save(picture, options.picture)


def main(arguments: list[str] | None = None) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument(
        "--rates", action="store_true", help="inner learning rates of what has its own"
    )
    options = runs.parsed(parser, arguments)
    planned = rates() if options.rates else wanted()
    trainings = list(quick() if options.quick else planned)
    finished = Runs("methods", options.json)
    finished.make(trainings, options.workers, options.minutes)
    if options.rates:
        _tell_rates(finished, trainings)
        return
    rows = compared(finished, trainings)
    title = "methods: 110,832 parameters, 16 tokens per parameter, H=20"
    caption = (
        "Loss in nats per byte; the difference is the mean over the seeds, with its 95 % interval."
    )
    report.show(title, COLUMNS, [cells(row) for row in rows], caption)
    headline = {f"{row.name}, %": mean(row.percent) for row in rows if not is_plain(row)}
    finished.write(headline, options.quick)
    draw(rows, options)


def _tell_rates(finished: Runs, trainings: Sequence[NamedTraining]) -> None:
    rows = []
    for method in trainings:
        run = finished.get(method)
        if run is not None:
            rows.append([method.method, f"{method.lr:g}", f"{run['loss']:.3f}"])
    report.show("inner learning rates, 4 tokens per parameter", ["method", "rate", "loss"], rows)


if __name__ == "__main__":
    main()
