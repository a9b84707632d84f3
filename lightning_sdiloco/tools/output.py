"""Formats tables of a fixed width and draws pictures for light and dark pages."""

import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = dict[str, Any]
"""The values that a command measures or plans, by their names in the JSON output."""

StyleValue = Any
"""The value of a matplotlib setting or keyword argument."""

# Tables


def table(
    columns: Mapping[str, Iterable[object]], left: int = 1, width: int = 80, section: int = 0
) -> str:
    """Formats columns, keyed by header, as a plain-text table.

    Args:
        columns: The cells of each column.
        left: The number of leading columns to align to the left.
        width: The maximum number of characters in a line.
        section: The number of rows between blank lines, or 0 for no blank lines.
    """
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, header in enumerate(columns):
        grid.add_column(
            header, justify="left" if index < left else "right", vertical="bottom", no_wrap=True
        )
    for number, row in enumerate(zip(*columns.values(), strict=True), start=1):
        grid.add_row(*map(str, row), end_section=section > 0 and number % section == 0)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def percent(share: float) -> str:
    # Truncated rather than rounded so that 100 % appears only if nothing waits.
    return f"{math.floor(share * 1000 + 1e-9) / 10:g} %"


def plain(value: object) -> object:
    """Converts dataclasses and named tuples to JSON values recursively."""
    if is_dataclass(value):
        return plain(vars(value))
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    return value


# Pictures


@dataclass(frozen=True)
class Theme:
    """The colors of a light or dark page."""

    ink: str
    quiet: str
    grid: str
    paper: str
    lines: tuple[str, ...]

    def line(self, number: int) -> str:
        return self.lines[number % len(self.lines)]

    @property
    def style(self) -> dict[StyleValue, StyleValue]:
        tick = {"color": self.ink, "major.size": 0, "minor.size": 0, "major.pad": 6, "minor.pad": 6}
        ticks = {f"{axis}tick.{name}": value for axis in "xy" for name, value in tick.items()}
        spines = {f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")}
        papers = {f"{part}.facecolor": self.paper for part in ("figure", "axes", "savefig")}
        inks = dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.titlecolor", "legend.labelcolor"), self.ink
        )
        return {
            "font.family": "DejaVu Sans",
            "svg.hashsalt": "sdiloco",  # identical pictures give identical files
            "figure.constrained_layout.w_pad": 0.15,
            "figure.constrained_layout.h_pad": 0.1,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.titlesize": 11,
            "grid.color": self.grid,
            "grid.linewidth": 0.7,
            "lines.linewidth": 2,
            "legend.frameon": False,
            "legend.fontsize": 9,
            **ticks,
            **spines,
            **papers,
            **inks,
        }


LIGHT = Theme(
    ink="#263238",
    quiet="#607d8b",
    grid="#cfd8dc",
    paper="#ffffff",
    lines=(
        *("#1e88e5", "#e53935", "#2e9e50", "#8e24aa", "#fb8c00"),
        *("#00897b", "#6d4c41", "#d81b60", "#3949ab", "#757575"),
    ),
)
DARK = Theme(
    ink="#e6ebf0",
    quiet="#9fb0c0",
    grid="#34404c",
    paper="#171c22",
    lines=(
        *("#6fb1ff", "#ff8a80", "#7ddc97", "#d69be8", "#ffb866"),
        *("#5fd0c3", "#bcaaa4", "#ff8ab5", "#9fa8da", "#b0bec5"),
    ),
)

# Each method has the same color in all pictures, including those of the benchmarks.
STREAMING = "C1"
DILOCO = "C3"
DDP = "C9"


def require_drawable(path: str) -> None:
    """Refuses files other than SVG and PNG, and any file if matplotlib is missing."""
    if Path(path).suffix not in (".svg", ".png"):
        raise ValueError(
            f"picture={path!r} does not end with .svg or .png. Choose a file name with one of these"
            " suffixes."
        )
    require_matplotlib("A picture", ", or omit --picture")


def require_matplotlib(product: str, instead: str = "") -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{product} requires matplotlib, which is not installed. Install matplotlib (pip"
            f" install matplotlib){instead}."
        ) from error


def drawn(
    draw: Callable[["Figure"], None],
    format: str,
    theme: Theme = LIGHT,
    size: tuple[float, float] = (8.4, 4.3),
    dpi: int = 190,
) -> bytes:
    """Draws a figure with matplotlib and returns the file. Identical pictures have identical bytes.

    The colors C0 to C9 are the line colors of the theme.
    """
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    file = io.BytesIO()
    with mpl.rc_context({**theme.style, "axes.prop_cycle": cycler(color=theme.lines)}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        without_date = {"Date": None} if format == "svg" else {"Software": None}
        figure.savefig(file, format=format, dpi=dpi, metadata=without_date)
    return file.getvalue()


def save_picture(
    path: str, draw: Callable[["Figure"], None], size: tuple[float, float] = (8.4, 4.3)
) -> list[Path]:
    """Draws a picture for light pages and a picture with -dark in its name for dark pages.

    Returns both files.
    """
    require_drawable(path)
    light = Path(path)
    files = {light: LIGHT, light.with_stem(f"{light.stem}-dark"): DARK}
    try:
        for file, theme in files.items():
            file.write_bytes(drawn(draw, light.suffix[1:], theme, size))
    except OSError as error:
        raise ValueError(
            f"picture={path!r} cannot be written ({error}). Choose a different file."
        ) from error
    return list(files)
