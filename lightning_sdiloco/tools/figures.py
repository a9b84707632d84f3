"""Checks whether a picture can be drawn, and writes it to a file; for the commands that have ``--picture``."""

from pathlib import Path
from typing import Any


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
