"""Checks that pages quote measured numbers.

    python -m benchmarks.verify [--open]

- Every number in README.md and docs/ that has a file of results is equal to the number there,
  rounded as on the page.
- Every gap in loss has an interval, or a remark about its seeds.
- The plan of a benchmark is older than its first result in git.

It prints how many numbers of each page are from a file of results, how many have another source,
and how many have neither, a count that must not grow; --open lists these. If anything is wrong, it
prints the page, the line and both numbers, and exits with 1.
"""

import argparse
import sys

from benchmarks import report
from benchmarks.verify import plans, registry
from benchmarks.verify.check import Checked, checked
from benchmarks.verify.pages import ROOT


def checked_pages() -> list[Checked]:
    return checked(registry.pages(), registry.claims(), registry.sources())


def problems(pages: list[Checked]) -> list[str]:
    """Returns the errors, one sentence each."""
    sentences = []
    for page in pages:
        sentences += page.errors
        limit = registry.most_open(page.page.name)
        if len(page.open) > limit:
            more = f"{len(page.open)} numbers have no source, and {limit} may have none"
            sentences.append(f"{page.page.name}: {more}: `python -m benchmarks.verify --open`")
    return sentences


def plan_problems() -> list[str]:
    """Returns the errors of the plans, or prints why they cannot be checked."""
    try:
        return list(plans.wrong(ROOT))
    except plans.Skipped as reason:
        print(f"\nPlans were not checked: {reason}.")
        return []


def show(pages: list[Checked]) -> None:
    rows = []
    for page in pages:
        counts = [len(page.derived), len(page.sourced), len(page.open)]
        if sum(counts):
            limit = registry.most_open(page.page.name)
            rows.append([page.page.name, str(sum(counts)), *map(str, counts), str(limit)])
    columns = ["page", "numbers", "from results", "from a source", "neither", "at most"]
    report.show("Numbers that look measured", columns, rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--open", action="store_true", help="name the numbers that have neither")
    options = parser.parse_args(arguments)
    pages = checked_pages()
    show(pages)
    if options.open:
        for page in pages:
            for number in page.open:
                print(page.where(number))
    sentences = [*problems(pages), *plan_problems()]
    for sentence in sentences:
        print(sentence)
    if sentences:
        sys.exit(1)


if __name__ == "__main__":
    main()
