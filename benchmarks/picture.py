"""The style of the benchmarks' pictures, which is that of the documentation, each for light and
dark pages.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

from lightning_sdiloco.tools.output import DARK, LIGHT

INK = LIGHT.ink
QUIET = LIGHT.quiet

# Each method has one color in all pictures. The colors of DiLoCo and Streaming DiLoCo are from the
# package.
DDP_HALF = "C2"
POWER_SGD = "C0"
ACCELERATE = "C4"
POST_LOCAL_SGD = "C5"
ACCUMULATED = "C6"
HIERARCHICAL = "C7"
ONE_GROUP = "C8"
NO_EXCHANGE = LIGHT.ink

_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))

SERIES = ("C8", "C6", "C7")
"""The colors of curves that are not methods, in pictures of their own."""

ON_DARK = dict(zip(LIGHT.lines, DARK.lines, strict=True)) | {
    getattr(LIGHT, part): getattr(DARK, part) for part in ("ink", "quiet", "grid", "paper")
}
"""The colors of a picture for dark pages, by those for light pages."""


def figure(
    columns: int = 1, height: float = 3.6, widths: Sequence[float] | None = None
) -> tuple[Figure, list[Any]]:
    """Returns an empty picture of page width with several panels in a row, given their relative
    widths.
    """
    mpl.rcParams.update(LIGHT.style)
    mpl.rcParams["axes.prop_cycle"] = cycler(color=LIGHT.lines)
    drawn = Figure(figsize=(8.4, height), layout="constrained")
    panels = drawn.subplots(
        1, columns, squeeze=False, gridspec_kw={"width_ratios": widths or [1] * columns}
    )[0]
    return drawn, list(panels)


def counted(number: float, place: int = 0) -> str:
    """Formats the number at a tick of an axis in everyday units.

    Examples:
        >>> counted(0.1), counted(1000), counted(1e5), counted(3e6), counted(1e9)
        ('0.1', '1000', '100k', '3M', '1B')
    """
    if number < 1e4:
        return f"{number:g}"
    size, suffix = next(unit for unit in _UNITS if number >= unit[0])
    return f"{number / size:g}{suffix}"


def save(drawn: Figure, path: Path) -> None:
    """Writes a picture in the format of its suffix, with equal bytes for equal numbers; for an SVG,
    also a dark version.
    """
    is_svg = path.suffix == ".svg"
    drawn.savefig(path, dpi=150, metadata={"Date": None} if is_svg else {"Software": None})
    if is_svg:
        for_dark_pages(path)


def for_dark_pages(path: Path) -> Path:
    """Writes the dark version of an SVG next to it, and returns its path."""
    dark = path.with_stem(f"{path.stem}-dark")
    drawn = re.sub("#[0-9a-f]{6}", lambda color: ON_DARK.get(color[0], color[0]), path.read_text())
    # Elements without a color, such as the text of a legend, are black.
    dark.write_text(drawn.replace("<svg ", f'<svg fill="{DARK.ink}" ', 1))
    return dark
