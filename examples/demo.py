"""Trains the example once per setting on two CPU processes and prints one table: quality against bytes exchanged.

    python examples/demo.py --steps 400

All settings share model, seed, data and tokens (``configs/base.yaml``). Each is a run of ``pretrain_text.py`` that
anyone can start by hand; this script prints the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# Relative, so that the commands printed can be read, and typed, in the folder where the demo was started.
EXAMPLES = Path(os.path.relpath(Path(__file__).parent))
SETTINGS = {
    "ddp": "DDP",
    "diloco": "DiLoCo fp32",
    "streaming_fp4": "Streaming DiLoCo fp4",
}


def training_command(setting: str, steps: int, result: Path) -> list[str]:
    """Returns the command that trains one setting and writes its numbers to ``result``."""
    command = [sys.executable, str(EXAMPLES / "pretrain_text.py"), "fit"]
    for name in ("base", setting):
        command += ["--config", str(EXAMPLES / "configs" / f"{name}.yaml")]
    # Seconds are to be those of training: no validation on the way and no checkpoints.
    command += [f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={steps + 1}"]
    command += ["--trainer.enable_checkpointing=false", "--trainer.enable_model_summary=false"]
    return [*command, f"--result={result}"]


def train(setting: str, steps: int, console: Console) -> dict[str, Any]:
    """Trains one setting with its progress bar on the terminal, and returns what it wrote down."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / f"{setting}.json"
        command = training_command(setting, steps, result)
        console.rule(SETTINGS[setting])
        console.print(
            f"$ {shlex.join(['python', *command[1:]])}", style="dim", soft_wrap=True, highlight=False, markup=False
        )
        process = subprocess.run(command, check=False)
        if process.returncode != 0:
            raise SystemExit(f"The setting {setting!r} ended with exit code {process.returncode}; its error is above.")
        return json.loads(result.read_text(encoding="utf-8"))


def readable(size: float) -> str:
    """Returns a number of bytes with three digits and a decimal unit.

    >>> readable(0), readable(1393049600)
    ('0 B', '1.39 GB')
    """
    units = iter(["B", "kB", "MB", "GB"])
    unit = next(units)
    while size >= 1000 and unit != "GB":
        size, unit = size / 1000, next(units)
    return f"{size:.3g} {unit}"


def results_table(results: dict[str, dict[str, Any]]) -> Table:
    """Builds the table, one row per setting, its bytes compared with those of DDP where that was trained too."""
    first = next(iter(results.values()))
    table = Table(
        title=f"{first['parameters']:,} parameters, {first['ranks']} worker groups, "
        f"{first['steps']} steps, {first['tokens']:,} tokens",
        caption="Loss in nats per byte, on text not trained on. Bytes are those one rank sent to the other: counted by "
        "Streaming DiLoCo, for DDP the arithmetic of a ring all-reduce of the gradients.",
    )
    table.add_column("setting")
    for heading in ("loss", "perplexity", "bytes/rank", "vs. DDP", "training"):
        table.add_column(heading, justify="right")
    baseline = results.get("ddp", first)["bytes_sent"]
    for setting, row in results.items():
        table.add_row(SETTINGS[setting], *cells(row, baseline))
    return table


def cells(row: dict[str, Any], baseline: int) -> list[str]:
    """Returns one row of the table as text."""
    return [
        f"{row['val_loss']:.3f}",
        f"{row['val_perplexity']:.2f}",
        readable(row["bytes_sent"]),
        f"1/{baseline / row['bytes_sent']:.0f}" if row["bytes_sent"] else "-",
        f"{row['train_seconds']:.0f} s",
    ]


def main() -> None:
    """Trains all settings that were asked for, one after the other, and prints the table."""
    parser = argparse.ArgumentParser(description="Compare Streaming DiLoCo with DDP on two CPU processes.")
    parser.add_argument("--steps", type=int, default=400, help="inner steps per setting (default: %(default)s)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all of them")
    arguments = parser.parse_args()
    console = Console()
    results = {setting: train(setting, arguments.steps, console) for setting in arguments.settings}
    console.print(results_table(results))


if __name__ == "__main__":
    main()
