"""Draws the cost of a wrong H or a wrong inner learning rate with four groups, from the runs of
``benchmarks.quality --stage bands``.

    python -m benchmarks.bands [--json docs/benchmarks/quality.json] [--picture FILE]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import comparison, quality, report
from benchmarks.comparison import Comparison
from benchmarks.picture import figure, save
from benchmarks.runs import Runs
from lightning_sdiloco.tools.output import DDP, STREAMING

SIZE = "0.1M"


class Bands(NamedTuple):
    """Four groups compared with DDP, by H and by the inner learning rate, smallest first."""

    by_length: Sequence[Comparison]
    by_rate: Sequence[Comparison]


def bands_of(finished: Runs) -> Bands:
    """Returns the bands for which runs exist."""
    settings = quality.planned(quality.STAGES["bands"], [SIZE], None, "cpu")
    bare = quality.alone(SIZE, 4, quality.HELD_OUT[0], sync_every=None)
    comparisons = comparison.compared(finished, {f"{SIZE}, M=4, bare name": [bare], **settings})
    by_rate = [compared for compared in comparisons if ", rate " in compared.name]
    by_length = [compared for compared in comparisons if ", rate " not in compared.name]
    return Bands(by_length, by_rate)


def rows_of(bands: Bands) -> list[list[str]]:
    rows = []
    for compared in (*bands.by_length, *bands.by_rate):
        run = compared.ours[0]
        length = f"{run['choices']['sync_every']}"
        losses = [f"{compared.plain[0]['loss']:.3f}", f"{run['loss']:.3f}"]
        rows.append([length, f"{run['lr']:g}", *losses, f"{compared.percent[0]:+.1f}"])
    return rows


def draw(bands: Bands, path: Path) -> None:
    picture, (lengths, rates) = figure(columns=2, height=3.2)
    ours = [compared.ours[0] for compared in bands.by_length]
    lengths.plot(
        [run["choices"]["sync_every"] for run in ours],
        [run["loss"] for run in ours],
        color=STREAMING,
        marker="o",
    )
    lengths.axhline(bands.by_length[0].plain[0]["loss"], color=DDP)
    ticks = [run["choices"]["sync_every"] for run in ours]
    _label(lengths, "H, sync_every", ticks)
    ours = [compared.ours[0] for compared in bands.by_rate]
    plain = [compared.plain[0] for compared in bands.by_rate]
    for runs, color, label in (
        (ours, STREAMING, "Streaming DiLoCo, four groups"),
        (plain, DDP, "DDP"),
    ):
        rates.plot(
            [run["lr"] for run in runs],
            [run["loss"] for run in runs],
            color=color,
            marker="o",
            label=label,
        )
    _label(rates, "inner learning rate", [run["lr"] for run in ours])
    lengths.set_ylabel("loss, nats per byte")
    picture.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save(picture, path)


def _label(axes: Any, text: str, ticks: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path("docs/benchmarks/quality.json")
    parser.add_argument("--json", type=Path, default=default, help="(default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="write a picture to this file")
    options = parser.parse_args(arguments)
    bands = bands_of(Runs("bands", options.json))
    columns = ["H", "inner learning rate", "loss of DDP", "loss of four groups", "%"]
    report.show("Four groups with other settings, one seed", columns, rows_of(bands), "")
    if options.picture:
        draw(bands, options.picture)


if __name__ == "__main__":
    main()
