"""All claims of the pages, the sources of numbers that are in no file of results, and how many
numbers may have neither.

A new number gets a claim next to those of its file of results, in a function ``of_...`` of a module
in `MODULES`, whose first line ends with the file. Alternatively, it gets a line in
``sources.yaml``.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.verify import ablations, hub, learning, methods, speed
from benchmarks.verify.claims import Claim, Source
from benchmarks.verify.pages import ROOT
from benchmarks.verify.results import CRITICAL_PATH, MATRICES, README

MODULES = (learning, ablations, methods, speed, hub)


def claims() -> Iterator[tuple[str, Claim]]:
    """Yields all claims, each with the names of its files of results."""
    for module in MODULES:
        for name, function in vars(module).items():
            if name.startswith("of_"):
                files = _files(function)
                for claim in function():
                    yield files, claim


def _files(function: Callable[[], Iterator[Claim]]) -> str:
    """Returns the end of the first line of a function's docstring."""
    assert function.__doc__ is not None
    about, colon, files = function.__doc__.strip().rpartition(": ")
    assert colon, f"{about} names no file"
    return files.removesuffix(".")


def sources() -> list[Source]:
    """Returns where numbers are from that no file of results has."""
    by_page = _kept()["sources"]
    return [
        Source(page, where, source)
        for page, entries in by_page.items()
        for where, source in entries.items()
    ]


def most_open(page: str) -> int:
    """Returns how many numbers of a page may have no source."""
    return int(_kept()["open"].get(page, 0))


@cache
def _kept() -> Mapping[str, Any]:
    file = Path(__file__).with_name("sources.yaml")
    content: Mapping[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content


def pages() -> list[str]:
    """Returns the paths of all pages, with the decisions that quote files of results."""
    names = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
    return [README, *names, CRITICAL_PATH, MATRICES]
