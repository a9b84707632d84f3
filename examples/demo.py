"""Trains the example once per setting on two CPU processes, and says what each costs in loss, bytes and time.

    python examples/demo.py

All settings share model, seed, data and tokens (``configs/base.yaml``). Each is a run of ``pretrain_text.py`` that
anyone can start by hand; this script prints the commands. Numbers and a picture of the loss over the time on a slow
link are written to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import slow_link
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

# Relative, so that the commands printed can be read, and typed, in the folder where the demo was started.
EXAMPLES = Path(os.path.relpath(Path(__file__).parent))
SETTINGS = {
    "ddp": "DDP",
    "diloco": "DiLoCo fp32",
    "streaming_fp4": "Streaming DiLoCo fp4",
}
OURS = "Streaming DiLoCo"
POINTS = 10


def configuration(name: str) -> Path:
    """Returns the file of a setting."""
    return EXAMPLES / "configs" / f"{name}.yaml"


def training_command(setting: str, steps: int, result: Path) -> list[str]:
    """Returns the command that trains one setting and writes its numbers to ``result``."""
    command = [sys.executable, str(EXAMPLES / "pretrain_text.py"), "fit"]
    for name in ("base", setting):
        command += ["--config", str(configuration(name))]
    command += [f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={-(-steps // POINTS)}"]
    command += ["--trainer.enable_checkpointing=false", "--trainer.enable_model_summary=false"]
    # Drawn in every step, the bar would take a good part of a step as short as these.
    command += ["--trainer.callbacks=RichProgressBar", "--trainer.callbacks.refresh_rate=20"]
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
    """Returns a number of bytes with three digits and a decimal unit."""
    units = iter(["B", "kB", "MB", "GB"])
    unit = next(units)
    while size >= 1000 and unit != "GB":
        size, unit = size / 1000, next(units)
    return f"{size:.3g} {unit}"


def add_times(results: dict[str, dict[str, Any]]) -> None:
    """Adds to each run when it would have made its validations on the slow link: ``link_seconds``, by step."""
    # The least of them, because the steps of DDP hold an exchange over this machine.
    step_seconds = min(result["step_seconds"] for result in results.values())
    for setting, result in results.items():
        result["link_step_seconds"] = step_seconds
        result["link_seconds"] = slow_link.seconds_on_link(result, configuration(setting))


def results_table(results: dict[str, dict[str, Any]]) -> Table:
    """Builds the table, one row per setting, its bytes compared with those of DDP where that was trained too."""
    first = next(iter(results.values()))
    table = Table(
        title=f"{first['parameters']:,} parameters, {first['ranks']} worker groups, {first['steps']:,} steps; "
        f"{first['tokens']:,} tokens, {first['tokens'] / first['parameters']:.3g} per parameter, "
        f"{first['passes']:.2g} passes over the text",
        caption="Loss in nats per byte, on text not trained on. Bytes are those one rank sent to the other: counted by "
        "Streaming DiLoCo, for DDP the arithmetic of a ring all-reduce of the gradients. Training here is measured, "
        f"with nothing slow; the last column is computed for a link of {slow_link.LINK_NAME}.",
        box=SIMPLE_HEAD,
    )
    table.add_column("setting")
    for heading in ("loss", "perplexity", "bytes/rank", "vs. DDP", "here", "slow link"):
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
        time_on_link(row),
    ]


def time_on_link(row: dict[str, Any]) -> str:
    """Returns how long a run takes on the slow link."""
    return slow_link.short(row["link_seconds"][str(row["steps"])])


def sentences(ddp: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Says what Streaming DiLoCo cost in loss, and how long both runs take on the slow link."""
    nats = ours["val_loss"] - ddp["val_loss"]
    loss, perplexity = 100 * abs(nats) / ddp["val_loss"], 100 * abs(math.expm1(nats))
    above, more = ("above", "more") if nats > 0 else ("below", "less")
    return [
        f"What it cost: after the same tokens the loss of {OURS} is {abs(nats):.3f} nats per byte {above} that of DDP: "
        f"{loss:.1f} % {more} loss, {perplexity:.1f} % {more} perplexity; one seed each.",
        f"What it saved: on a link of {slow_link.LINK_NAME} the same run takes DDP {time_on_link(ddp)} and {OURS} "
        f"{time_on_link(ours)}; computed from the {1000 * ours['link_step_seconds']:.3g} ms that a step took here, not "
        "measured on a link.",
    ]


def main() -> None:
    """Trains all settings that were asked for, one after the other, and prints table, sentences and paths."""
    parser = argparse.ArgumentParser(description="Compare Streaming DiLoCo with DDP on two CPU processes.")
    parser.add_argument("--steps", type=int, default=2186, help="inner steps per setting (default: %(default)s)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all of them")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for numbers and pictures")
    arguments = parser.parse_args()
    console = Console()
    if find_spec("matplotlib") is None:
        console.print("There will be no picture: matplotlib is not installed. Install it with pip install matplotlib.")
    results = {setting: train(setting, arguments.steps, console) for setting in arguments.settings}
    tell(results, arguments.out, console)


def tell(results: dict[str, dict[str, Any]], folder: Path, console: Console) -> None:
    """Prints what was found, and writes numbers and pictures into a folder."""
    add_times(results)
    console.print(results_table(results))
    if {"ddp", "streaming_fp4"} <= results.keys():
        for sentence in sentences(results["ddp"], results["streaming_fp4"]):
            console.print(sentence, highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = folder / "demo.json"
    kept = {setting: {key: row[key] for key in row if key != "shapes"} for setting, row in results.items()}
    numbers.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    pictures = slow_link.draw(folder, results, SETTINGS) if find_spec("matplotlib") else []
    console.print("Saved:", *map(str, (numbers, *pictures)), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
