"""The files of results in the repository, and the pages that quote them."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from benchmarks.runs import Runs
from benchmarks.verify.pages import ROOT

README = "README.md"
INDEX = "docs/index.md"
BENCHMARKS = "docs/benchmarks.md"
CHOOSING = "docs/choosing.md"
COMPRESSION = "docs/compression.md"
CRITICAL_PATH = "docs/decisions/critical-path.md"
FEDERATION = "docs/federation.md"
HOW_IT_WORKS = "docs/how-it-works.md"
MATRICES = "docs/decisions/whole-matrices.md"
METHODS = "docs/methods.md"
PAPER = "docs/paper.md"
PLANNER = "docs/planner.md"


@cache
def results(name: str, folder: str = "docs/benchmarks") -> dict[str, Any]:
    """Returns what a file of results holds; see `benchmarks.report`."""
    content = json.loads((ROOT / folder / f"{name}.json").read_text(encoding="utf-8"))
    return dict(content)


def headline(name: str) -> Mapping[str, float]:
    numbers: Mapping[str, float] = results(name)["headline"]
    return numbers


@cache
def runs(name: str) -> Runs:
    """Returns the trainings of a file of results."""
    return Runs(name, ROOT / "docs" / "benchmarks" / f"{name}.json")
