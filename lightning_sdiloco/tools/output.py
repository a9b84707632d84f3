"""What several commands print and draw: tables of a fixed width, and pictures."""

import io
import math
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH = 80


def require_drawable(path: str) -> None:
    """Refuses a picture that cannot be drawn."""
    if Path(path).suffix not in (".svg", ".png"):
        raise ValueError(f"picture={path!r} does not end with .svg or .png. Give a file with one of these suffixes.")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ValueError(
            "A picture needs matplotlib, which is not installed. Install it (pip install matplotlib), or leave out"
            " --picture."
        ) from error
    # With a salt of its own the same picture is the same file.
    mpl.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "sdiloco"})


def save(figure: Any, path: str) -> None:
    """Writes a figure of matplotlib to a file, without a date, so that the same picture is the same file."""
    try:
        figure.savefig(path, dpi=190, metadata={"Date": None} if path.endswith(".svg") else {"Software": None})
    except OSError as error:
        raise ValueError(f"picture={path!r} cannot be written ({error}). Give another file.") from error


def new_table(columns: list[str], left: int) -> Table:
    """Returns an empty table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", vertical="bottom", no_wrap=True)
    return table


def rendered(table: Table, width: int = _WIDTH) -> str:
    """Formats a table as text."""
    # As plain text of a fixed width: the same in a terminal, a file and a test.
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(lines).strip("\n")


def percent(share: float) -> str:
    """Formats a share in percent, to a tenth."""
    # Cut rather than rounded: 100 % is said only where nothing waits.
    return f"{math.floor(share * 1000 + 1e-9) / 10:g} %"
