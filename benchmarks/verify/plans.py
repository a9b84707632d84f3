"""Checks that a plan was committed before the first result that it covers, and not changed
since.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

PLAN = "benchmarks/PLAN.md"

RESULTS = {
    "curve": "docs/benchmarks/curve.json",
    "rivals": "docs/benchmarks/rivals.json",
    "goodput": "docs/benchmarks/goodput.json",
    "federated": "docs/benchmarks/federated.json",
    "shipped": "docs/benchmarks/shipped.json",
    "experts": "docs/benchmarks/experts.json",
}
"""The file of results of each planned benchmark, by its module."""


class Skipped(Exception):
    """The history cannot tell, and why."""


def wrong(root: Path) -> Iterator[str]:
    """Yields a sentence for each plan that is not older than its first result, or was changed after
    it.
    """
    _require_history(root)
    plans = sections((root / PLAN).read_text(encoding="utf-8"))
    unknown = plans.keys() - RESULTS.keys()
    for module in unknown:
        yield f"{PLAN}: benchmarks.{module} has no file of results in benchmarks/verify/plans.py"
    for module, file in RESULTS.items():
        if module not in plans:
            yield f"{PLAN}: no section about benchmarks.{module}"
            continue
        added = _git(root, "log", "--diff-filter=A", "--format=%H", "--", file).split()
        if not added:
            continue
        first = added[-1]
        before = _before(root, first).get(module)
        if before is None:
            yield f"{PLAN}: the plan of {file} was not there before its first result, {first[:10]}"
        elif before != plans[module]:
            yield f"{PLAN}: the plan of {file} is not what it was before {first[:10]}, its result"


def _before(root: Path, commit: str) -> Mapping[str, str]:
    """Returns the sections of the plan in the commit before; none where there was no plan."""
    try:
        return sections(_git(root, "show", f"{commit}~1:{PLAN}"))
    except subprocess.CalledProcessError:
        return {}


def sections(text: str) -> Mapping[str, str]:
    """Returns the sections of the plan by the module that their headings name, as one line each."""
    parts = re.split(r"^## (.*\(`benchmarks\.(\w+)`\))$", text, flags=re.M)
    modules = parts[2::3]
    return {
        module: " ".join(body.split()) for module, body in zip(modules, parts[3::3], strict=True)
    }


def _require_history(root: Path) -> None:
    try:
        is_shallow = _git(root, "rev-parse", "--is-shallow-repository").strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise Skipped("there is no git repository here") from error
    if is_shallow == "true":
        raise Skipped("a shallow clone has no history")


def _git(root: Path, *arguments: str) -> str:
    process = subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    )
    return process.stdout
