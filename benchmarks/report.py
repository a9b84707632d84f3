"""Code that all benchmarks share: the command line and the file of results.

A file of results is JSON with ``headline`` (names to numbers), ``measured`` (where and when), and
entries of the benchmark.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def parser(description: str | None) -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command_line.add_argument(
        "--quick", action="store_true", help="as little as shows that it runs"
    )
    command_line.add_argument("--json", type=Path, help="write the numbers to this file")
    command_line.add_argument("--picture", type=Path, help="draw them into this .svg or .png file")
    torch.set_num_threads(1)
    return command_line


def options(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line of a benchmark without additional options."""
    return parser(description).parse_args(arguments)


def measured(module: str, quick: bool) -> dict[str, Any]:
    flag = " --quick" if quick else ""
    return {
        "command": f"python -m benchmarks.{module}{flag}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        **versions("torch", "lightning"),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions(*names: str) -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in names}


def write(
    path: Path | None, headline: Mapping[str, float], about: Mapping[str, Any], **details: Any
) -> None:
    if path is not None:
        rounded = {name: float(f"{value:.6g}") for name, value in headline.items()}
        content = {"headline": rounded, "measured": dict(about), **details}
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)


def show(title: str, columns: list[str], rows: list[list[str]], caption: str = "") -> None:
    """Prints a table whose first column is text and whose other columns are numbers, as Markdown if
    the output is not a terminal.
    """
    if not sys.stdout.isatty():
        print(f"\n{title}\n")
        print("| " + " | ".join(columns) + " |")
        print("|---|" + "---:|" * (len(columns) - 1))
        for row in rows:
            print("| " + " | ".join(row) + " |")
        if caption:
            print(f"\n{caption}")
        sys.stdout.flush()
        return
    # Imported here, because a machine that only measures may not have it.
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=caption or None)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def said(message: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {message}", file=sys.stderr, flush=True)


def kept_rows(path: Path | None) -> list[dict[str, Any]]:
    """Reads the rows of a file of results; there are none if the file does not exist yet."""
    if path is None or not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def show_left_out(reasons: Iterable[str]) -> None:
    """Prints the reason why something was left out, once for each reason."""
    for reason in dict.fromkeys(reasons):
        print(f"\nLeft out: {reason}")
