"""Equations of the pages: what is written between dollars in TeX becomes MathML, which browsers
show by themselves.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

# Fenced code and code in a line are left as they are.
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
INLINE = re.compile(r"(?<![\\\w])\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\w)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces the equations of a page before it is rendered."""
    parts = CODE.split(markdown)
    return "".join(part if index % 2 else with_equations(part) for index, part in enumerate(parts))


def with_equations(text: str) -> str:
    """Replaces the equations of a text without code."""
    text = BLOCK.sub(
        lambda found: f"<div>{convert(' '.join(found[1].split()), display='block')}</div>", text
    )
    return INLINE.sub(lambda found: convert(found[1]), text)
