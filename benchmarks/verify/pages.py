"""Pages as readers see them, and the numbers on them that look like measurements.

Markup is removed so that patterns only have to match words: bold, the targets of links, and the
marks of code. Code blocks are blanked. Line breaks are kept, so that an offset identifies a line.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"

_UNIT = r"times|s|ms|ns|seconds|hours|MB|GB|TB|kB|MiB|KiB|bytes|nats"

_BESIDE = re.compile(rf"\s(?:%|±|(?:{_UNIT})\b)")
_NUMBERS = re.compile(rf"[-+\d.,/ ±%]*(?:{_UNIT})?\s*")
"""Patterns of text next to a measured number, and of a cell that contains only numbers."""

_IS_SETTING = re.compile(r"(?:Python|torch|Lightning|CUDA|NCCL|arXiv|Linux|SLURM)\s*$")


class Number(NamedTuple):
    """A number on a page, from an offset to another."""

    start: int
    end: int
    text: str


class Row(NamedTuple):
    """A row of a table: its cells, each with the offset of its text."""

    cells: list[tuple[int, str]]


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        name: Its path in the repository.
        source: What lies there.
    """

    name: str
    source: str

    @classmethod
    def read(cls, name: str) -> "Page":
        return cls(name, (ROOT / name).read_text(encoding="utf-8"))

    @cached_property
    def _plain(self) -> tuple[str, str]:
        """Returns the text without markup, and the same without the digits of code."""
        text = re.sub(r"^( *)(```|~~~).*?^\1\2[ ]*$", _blank, self.source, flags=re.S | re.M)
        text = re.sub(r"<!--.*?-->|<[a-z/][^>]*>", _blank, text, flags=re.S)
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)\S*", _blank, text)
        text = re.sub(r"\]\([^)\s]*\)|\[|\*\*", "", text)
        masked = re.sub(r"`[^`\n]*`", lambda code: re.sub(r"\d", "_", code[0]), text)
        marks = {place for place, letter in enumerate(text) if letter == "`"}
        letters = [place for place in range(len(text)) if place not in marks]
        return "".join(text[place] for place in letters), "".join(
            masked[place] for place in letters
        )

    @property
    def text(self) -> str:
        return self._plain[0]

    @cached_property
    def _ends(self) -> list[int]:
        return [place for place, letter in enumerate(self.text) if letter == "\n"]

    def line(self, offset: int) -> int:
        """Returns the number of a line, from 1."""
        return bisect_right(self._ends, offset - 1) + 1

    @cached_property
    def numbers(self) -> list[Number]:
        """The numbers that look measured: those with a sign, a fraction, a unit, a percent sign or
        an interval, and those of cells that hold nothing else.
        """
        text = self._plain[1]
        numbers = []
        for match in re.finditer(rf"(?<![\w.,=^/+-])(1/)?({NUMBER})(?![\d.,]*\d|\w)", text):
            before = text[max(0, match.start() - 12) : match.start()]
            if not _IS_SETTING.search(before) and _looks_measured(text, match):
                numbers.append(Number(match.start(2), match.end(2), match[2]))
        return numbers

    def section(self, heading: str) -> tuple[int, int] | None:
        """Returns where a section with its subsections begins and ends."""
        pattern = rf"^(#+) {re.escape(heading)}$"
        match = re.search(pattern, self.text, re.M)
        if match is None:
            return None
        after = re.compile(rf"^#{{1,{len(match[1])}}} ", re.M).search(self.text, match.end())
        return match.start(), len(self.text) if after is None else after.start()

    @cached_property
    def tables(self) -> list[list[Row]]:
        """The tables, each with its header as the first row."""
        tables: list[list[Row]] = []
        end = -1
        for match in re.finditer(r"^ *\|(.*)\|[ ]*$", self.text, re.M):
            if match.start() != end + 1:
                tables.append([])
            end = match.end()
            if not re.fullmatch(r"[-:| ]+", match[1]):
                tables[-1].append(_row(match[1], match.start(1)))
        return tables


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "", match[0])


def _row(inside: str, start: int) -> Row:
    cells = []
    for cell in inside.split("|"):
        cells.append((start + len(cell) - len(cell.lstrip()), cell.strip()))
        start += len(cell) + 1
    return Row(cells)


def _looks_measured(text: str, match: re.Match[str]) -> bool:
    number = match[2]
    after = text[match.end() : match.end() + 12]
    if re.match(r"\s%\s+interval", after):
        return False
    if match[1] or number[0] in "+-" or "." in number or _BESIDE.match(after):
        return True
    start = max(text.rfind(mark, 0, match.start()) for mark in "|\n") + 1
    cell = re.compile(r"[^|\n]*").match(text, start)
    is_in_row = text[text.rfind("\n", 0, start) + 1 : start].count("|") > 1
    is_header = re.match(r"[^\n]*\n *\|-", text[match.end() :]) is not None
    return is_in_row and not is_header and cell is not None and bool(_NUMBERS.fullmatch(cell[0]))
