"""Claims, each of which connects numbers on a page with the numbers in the files of results.

Pages may round: a number agrees if the expected one is within half of its last digit.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.verify.pages import NUMBER, Page, Row


class AtLeast(NamedTuple):
    """A lower bound on a page: nothing was measured below it."""

    least: float


class AtMost(NamedTuple):
    """An upper bound on a page: nothing was measured above it."""

    most: float


class About(NamedTuple):
    """A number of which a page gives the first digits; the zeros at its end are not significant."""

    value: float


Judged = float | AtLeast | AtMost | About
Expected = Judged | None
"""The expected value of a number. None: it is not in the file of results, but a `Source` may have
it."""


class Found(NamedTuple):
    """A number that a claim covers, and its error, if any."""

    start: int
    end: int
    error: str


class Missing(Exception):
    """An anchor is not on its page."""


@dataclass(frozen=True)
class Sentence:
    """Numbers in a text, in their order.

    Attributes:
        page: The path of the page.
        pattern: The words around the numbers: ``#`` is a number, ``...`` any words of the
            paragraph. Markup and line breaks do not matter.
        expected: The expected numbers.
    """

    page: str
    pattern: str
    expected: Sequence[Expected]

    def judge(self, page: Page) -> Iterator[Found]:
        matches = list(_regex(self.pattern).finditer(page.text))
        if not matches:
            raise Missing(f"no text like {self.pattern!r}")
        for match in matches:
            assert len(match.groups()) == len(self.expected), self.pattern
            yield from self._judged(match)

    def _judged(self, match: re.Match[str]) -> Iterator[Found]:
        places = {match.start(index) for index in range(1, len(self.expected) + 1)}
        if "..." not in self.pattern:
            # The other numbers are words of the pattern.
            for word in re.finditer(NUMBER, match[0]):
                if match.start() + word.start() not in places:
                    yield Found(match.start() + word.start(), match.start() + word.end(), "")
        for index, expected in enumerate(self.expected, start=1):
            if expected is not None:
                yield _judged(match.start(index), match[index], expected)


@dataclass(frozen=True)
class Table:
    """The rows of a table.

    Attributes:
        page: The path of the page.
        header: The cells of its header, from the first.
        rows: The numbers in a row, by its label. Other rows are not covered.
        labels: The number of cells that form the label, joined by `` | ``. An empty first cell
            means the same as the one above it.
        columns: The number of cells after the label that contain numbers; all by default.
        occurrence: The index, from 0, among several tables with this header.
    """

    page: str
    header: Sequence[str]
    rows: Mapping[str, Sequence[Expected]]
    labels: int = 1
    columns: int | None = None
    occurrence: int = 0

    def judge(self, page: Page) -> Iterator[Found]:
        tables = [table for table in page.tables if self._is_header(table[0])]
        if len(tables) <= self.occurrence:
            raise Missing(f"no table whose header begins with {' | '.join(self.header)!r}")
        rows = self._labelled(tables[self.occurrence][1:])
        unknown = [label for label in self.rows if label not in rows]
        if unknown:
            raise Missing(f"no row {unknown[0]!r}; there are {', '.join(map(repr, rows))}")
        for label, expected in self.rows.items():
            yield from self._row(rows[label], label, expected)

    def _is_header(self, row: Row) -> bool:
        return [text for _, text in row.cells][: len(self.header)] == list(self.header)

    def _labelled(self, rows: Sequence[Row]) -> dict[str, Row]:
        labelled = {}
        first = ""
        for row in rows:
            texts = [text for _, text in row.cells[: self.labels]]
            first = texts[0] or first
            labelled[" | ".join([first, *texts[1:]])] = row
        return labelled

    def _row(self, row: Row, label: str, expected: Sequence[Expected]) -> Iterator[Found]:
        for start, text in _numbers(row.cells[: self.labels]):
            yield Found(start, start + len(text), "")
        end = None if self.columns is None else self.labels + self.columns
        numbers = _numbers(row.cells[self.labels : end])
        if len(numbers) != len(expected):
            message = f"row {label!r} has {len(numbers)} numbers, and {len(expected)} are known"
            raise Missing(message)
        for (start, text), value in zip(numbers, expected, strict=True):
            if value is not None:
                yield _judged(start, text, value)


def _numbers(cells: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Returns the numbers in cells, each with its offset; for 1/N, the number is N."""
    numbers = []
    for start, cell in cells:
        for match in re.finditer(rf"(?<![\w.=]){NUMBER}", cell.replace("1/", "  ")):
            numbers.append((start + match.start(), match[0]))
    return numbers


@dataclass(frozen=True)
class Source:
    """Numbers that are in no file of results, and their source.

    Attributes:
        page: The path of the page.
        where: A heading, for all numbers of its section that no claim covers; or a pattern as in
            `Sentence`, without ``#``; empty for the whole page.
        source: The source of the numbers. None: it was not recorded, and they count as numbers of
            unknown origin, regardless of other sources for the section.
    """

    page: str
    where: str
    source: str | None

    def spans(self, page: Page) -> list[tuple[int, int]]:
        if not self.where:
            return [(0, len(page.text))]
        section = page.section(self.where)
        if section is not None:
            return [section]
        spans = [match.span() for match in _regex(self.where).finditer(page.text)]
        if not spans:
            raise Missing(f"no section and no text like {self.where!r}")
        return spans


Claim = Sentence | Table


def _regex(pattern: str) -> re.Pattern[str]:
    parts = []
    for part in re.split(r"(\s*\.\.\.\s*|#|\s+)", pattern):
        if part.strip() == "...":
            parts.append(r"(?:(?!\n\n).)*?")
        elif part == "#":
            parts.append(rf"({NUMBER})")
        elif part.isspace():
            parts.append(r"\s+")
        else:
            parts.append(re.escape(part))
    return re.compile(r"(?<!\w)" + "".join(parts), re.S)


def _judged(start: int, text: str, expected: Judged) -> Found:
    read = float(text.replace(",", ""))
    decimals = len(text.partition(".")[2])
    half = 0.5 * 10.0**-decimals * (1 + 1e-9)
    if isinstance(expected, AtLeast):
        agrees = read <= expected.least + half
    elif isinstance(expected, AtMost):
        agrees = read >= expected.most - half
    elif isinstance(expected, About):
        agrees = abs(read - expected.value) <= 10.0 ** _zeros(text) / 2
    else:
        agrees = abs(read - expected) <= half
    return Found(start, start + len(text), "" if agrees else _explained(text, expected))


def _zeros(text: str) -> int:
    digits = text.replace(",", "")
    return len(digits) - len(digits.rstrip("0"))


def _explained(text: str, expected: Judged) -> str:
    if isinstance(expected, AtLeast):
        return f"reads at least {text}, but the least is {expected.least:.6g}"
    if isinstance(expected, AtMost):
        return f"reads at most {text}, but the most is {expected.most:.6g}"
    value = expected.value if isinstance(expected, About) else expected
    return f"reads {text}, but it is {value:.6g}"
