"""Compares pages with the registry."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.verify import gaps
from benchmarks.verify.claims import Claim, Missing, Source
from benchmarks.verify.pages import Number, Page


@dataclass
class Checked:
    """What was judged_number on a page.

    Attributes:
        page: The page.
        errors: Sentences about missing anchors, numbers that differ, and gaps without seeds.
        derived: Numbers that are in the files of results.
        sourced: Numbers whose source is in the registry.
        open: Numbers without a source.
    """

    page: Page
    errors: list[str] = field(default_factory=list)
    derived: list[Number] = field(default_factory=list)
    sourced: list[Number] = field(default_factory=list)
    open: list[Number] = field(default_factory=list)

    def add_error(self, offset: int, message: str) -> None:
        self.errors.append(f"{self.page.name}:{self.page.line(offset)}: {message}")

    def where(self, number: Number) -> str:
        """Returns the line of a number and the words around it."""
        around = self.page.text[max(0, number.start - 40) : number.end + 30]
        return (
            f"{self.page.name}:{self.page.line(number.start)}: ... {' '.join(around.split())} ..."
        )


def checked(
    names: Iterable[str],
    claims: Iterable[tuple[str, Claim]],
    sources: Iterable[Source],
) -> list[Checked]:
    """Checks pages against claims, each with the names of its files of results, and against
    sources.
    """
    claims_of = defaultdict[str, list[tuple[str, Claim]]](list)
    for files, claim in claims:
        claims_of[claim.page].append((files, claim))
    sources_of = defaultdict[str, list[Source]](list)
    for source in sources:
        sources_of[source.page].append(source)
    return [_checked_page(Page.read(name), claims_of[name], sources_of[name]) for name in names]


def _checked_page(
    page: Page, claims: Sequence[tuple[str, Claim]], sources: Sequence[Source]
) -> Checked:
    checked_page = Checked(page)
    judged = set[int]()
    for files, claim in claims:
        judged |= _note(checked_page, files, claim)
    sourced = _spans(checked_page, [source for source in sources if source.source is not None])
    unknown = _spans(checked_page, [source for source in sources if source.source is None])

    def is_sourced(offset: int) -> bool:
        return _is_in(sourced, offset) and not _is_in(unknown, offset)

    for number in page.numbers:
        if number.start in judged:
            checked_page.derived.append(number)
        elif is_sourced(number.start):
            checked_page.sourced.append(number)
        else:
            checked_page.open.append(number)
    for offset, text in gaps.unmarked(page):
        if not is_sourced(offset):
            checked_page.add_error(
                offset, f"{text} has no interval, and nothing says how many seeds"
            )
    return checked_page


def _note(checked_page: Checked, files: str, claim: Claim) -> set[int]:
    """Returns the offsets of the numbers of a claim, and notes those that differ."""
    starts = set[int]()
    try:
        for judged_number in claim.judge(checked_page.page):
            starts.add(judged_number.start)
            if judged_number.error:
                checked_page.add_error(judged_number.start, f"{judged_number.error} by {files}")
    except Missing as missing:
        checked_page.errors.append(f"{checked_page.page.name}: {missing} (numbers of {files})")
    return starts


def _spans(checked_page: Checked, sources: Sequence[Source]) -> list[tuple[int, int]]:
    spans = []
    for source in sources:
        try:
            spans += source.spans(checked_page.page)
        except Missing as missing:
            checked_page.errors.append(f"{checked_page.page.name}: {missing}")
    return spans


def _is_in(spans: Sequence[tuple[int, int]], offset: int) -> bool:
    return any(start <= offset < end for start, end in spans)
