"""Gaps in loss, each of which needs an interval or a remark about its seeds."""

import re
from collections.abc import Iterator

from benchmarks.verify.pages import Page

_COMPARED = r"above|below|behind|ahead|better|worse|higher|lower|(?:more|less) loss|to DDP"

_GAP = re.compile(
    r"(?<![\w.,=/^-])(?<!± )[+-]\d+(?:\.\d+)?(?! ±)(?![\d.]*\d)(?= %|(?<=\.\d)| [|,]| and)"
    rf"|(?<![\w.,+-])(?<!± )\d+(?:\.\d+)? %(?= (?:{_COMPARED})\b)"
    r"|(?:(?<=lost )|(?<=cost )|(?<=gained ))\d+(?:\.\d+)? %"
)

_EXPLAINED = re.compile(r"\bseeds?\b|arXiv|\bpaper\b")


def unmarked(page: Page) -> Iterator[tuple[int, str]]:
    """Yields gaps that have no interval, are not from a paper, and whose seeds are not mentioned in
    their paragraph or list, or in one next to their table.
    """
    blocks = list(re.finditer(r"(?:(?!\n\n).)+", page.text, re.S))
    for index, block in enumerate(blocks):
        is_table = block[0].lstrip().startswith("|")
        beside = blocks[max(0, index - 1) : index + 2] if is_table else [block]
        if not any(_EXPLAINED.search(text[0]) for text in beside):
            for match in _GAP.finditer(block[0]):
                yield block.start() + match.start(), match[0]
