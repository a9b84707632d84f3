"""Redraws the pictures of the pages from the numbers in docs/benchmarks, without measuring.

python -m benchmarks.pictures [NAME ...]
"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import (
    bands,
    comparison,
    flights,
    memory,
    overhead,
    paper,
    quality,
    rivals,
    scaling,
    slow_links,
    wire_bytes,
)
from benchmarks.gpu import overlap
from benchmarks.methods import __main__ as methods
from benchmarks.methods import claims
from benchmarks.runs import Runs

DOCS = Path(__file__).resolve().parent.parent / "docs"
SHOWN_OF_GPU = (408, 462)
"""The range of the profile that the picture shows, in milliseconds."""


def numbers_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())
    return content


def draw_rows(benchmark: Any, name: str, picture: Path) -> None:
    benchmark.draw(numbers_of(name)["rows"], picture)


def draw_runs(main: Callable[[list[str]], None], name: str, picture: Path) -> None:
    """Draws with the benchmark's command, which finds all runs in a copy of the file and writes the
    copy.
    """
    with TemporaryDirectory() as folder:
        copy = shutil.copy(DOCS / "benchmarks" / f"{name}.json", folder)
        main(["--minutes", "0", "--json", str(copy), "--picture", str(picture)])


def draw_overhead(picture: Path) -> None:
    overhead.draw(numbers_of("overhead")["results"], picture)


def draw_memory(picture: Path) -> None:
    numbers = numbers_of("memory")
    memory.draw(numbers["memory"], numbers["flights"], picture)


def draw_flights(picture: Path) -> None:
    cases = {}
    outcomes = {}
    for name, row in numbers_of("flights")["found"].items():
        cases[name] = flights.Case(**row["case"])
        outcomes[name] = flights.Found(**{field: row[field] for field in flights.Found._fields})
    flights.draw(cases, outcomes, picture)


def draw_gpu(picture: Path) -> None:
    spans = numbers_of("gpu")["numbers"]["overlap"]["spans"]
    overlap.draw([overlap.Span(*span) for span in spans], picture, *SHOWN_OF_GPU)


def draw_rivals_over_bytes(picture: Path) -> None:
    rivals.draw_over_bytes(numbers_of("rivals")["rows"], picture)


def draw_quality(picture: Path) -> None:
    """Draws the bare name first, and then elementwise steps with different values of H."""
    finished = Runs("quality", DOCS / "benchmarks" / "quality.json")
    shown = []
    for stage, sizes in (("alone", ["0.1M", "0.5M"]), ("verdict", quality.STAGES["verdict"].sizes)):
        settings = quality.planned(quality.STAGES[stage], sizes, None, "cpu")
        for compared in comparison.compared(finished, settings):
            if stage == "verdict":
                shown.append(replace(compared, name=f"{compared.name}, elementwise"))
            elif "bare name" in compared.name:
                shown.append(replace(compared, name=compared.name.removesuffix(", other seeds")))
    comparison.draw(shown, picture)


def draw_bands(picture: Path) -> None:
    bands.main(["--picture", str(picture)])


def draw_scaling(picture: Path) -> None:
    scaling.main(["--picture", str(picture)])


PICTURES: Mapping[str, Callable[[Path], None]] = {
    "bands": draw_bands,
    "claims": partial(draw_rows, claims, "claims"),
    "flights": draw_flights,
    "gpu": draw_gpu,
    "memory": draw_memory,
    "methods": partial(draw_runs, methods.main, "methods"),
    "overhead": draw_overhead,
    "paper": partial(draw_runs, paper.main, "paper"),
    "quality": draw_quality,
    "rivals": partial(draw_rows, rivals, "rivals"),
    "rivals-bytes": draw_rivals_over_bytes,
    "scaling": draw_scaling,
    "slow-links": partial(draw_rows, slow_links, "slow_links"),
    "wire-bytes": partial(draw_rows, wire_bytes, "wire_bytes"),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all pictures")
    names = parser.parse_args(arguments).names or list(PICTURES)
    unknown = sorted(set(names) - PICTURES.keys())
    if unknown:
        parser.error(f"{unknown[0]!r} is no picture. Choose among {', '.join(PICTURES)}.")
    for name in names:
        PICTURES[name](DOCS / "images" / f"benchmark-{name}.svg")


if __name__ == "__main__":
    main()
