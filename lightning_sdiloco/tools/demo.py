"""Runs ``sdiloco demo``, which trains the example with different settings and compares the costs.

All runs use two CPU processes and the same model, seed, data and number of tokens
(``examples/configs/base.yaml``). Each run starts ``pretrain_text.py`` with a command that is saved
with the results and can also be run by hand. Losses are measured, whereas the planner computes the
times on a slow link from the measured step time, the bytes that each method sends, and the link's
properties.

Each setting's results are kept in a separate file until all settings have been trained. After an
interruption, the demo therefore trains only the remaining settings.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Literal

import torch
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.planning.link import Link, require
from lightning_sdiloco.planning.methods import DataParallel, Streaming, play
from lightning_sdiloco.planning.units import readable
from lightning_sdiloco.planning.workload import Groups, Model
from lightning_sdiloco.tools.output import DDP, DILOCO, STREAMING, Numbers, save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGE = Path(__file__).parents[1]
# In the wheel, the examples are inside the package. In a clone, they are next to it. The path is
# relative so that the printed commands are easy to read and can be typed in the folder where the
# demo was started.
EXAMPLES = Path(
    os.path.relpath(next(filter(Path.exists, (PACKAGE / "examples", PACKAGE.parent / "examples"))))
)
CONFIGURATIONS = EXAMPLES / "configs"
SETTINGS = {
    "ddp": "DDP",
    "diloco": "DiLoCo fp32",
    "streaming_fp4": "Streaming DiLoCo fp4",
}
OURS = "Streaming DiLoCo"
POINTS = 10
"""The number of validations in a run."""

LINK = Link(gbit_s=0.1, round_trip=0.05)
LINK_NAME = "100 Mbit/s with a round trip of 50 ms"
MEMORY_RATE = 10e9
"""The memory bandwidth of a CPU core in bytes per second."""

COLORS = {"ddp": DDP, "diloco": DILOCO, "streaming_fp4": STREAMING}


def demo(
    steps: int = 2186,
    settings: list[Literal["ddp", "diloco", "streaming_fp4"]] = [],  # noqa: B006
    out: str = "runs/demo",
) -> str:
    """Compare Streaming DiLoCo with DDP by training a small model on two CPU processes.

    Args:
        steps: Number of inner steps for each setting.
        settings: Setting to train: ddp, diloco or streaming_fp4. Repeat the option to train
            multiple settings. By default, all settings are trained.
        out: Folder for results and pictures. After an interruption, run the same command again to
            train the remaining settings.

    Examples:
        $ sdiloco demo
        $ sdiloco demo --steps 200 --settings ddp --settings streaming_fp4
    """
    require(steps >= 1, "steps", steps, "at least 1")
    for setting in settings:
        if setting not in SETTINGS:
            raise ValueError(
                f"settings={setting!r} is unknown. Choose one of {', '.join(SETTINGS)}."
            )
    console = Console()
    if find_spec("matplotlib") is None:
        console.print(
            "No picture will be drawn, because matplotlib is not installed. To install it, run pip"
            " install matplotlib."
        )
    folder = writable_folder(out)
    wanted: Iterable[str] = dict.fromkeys(settings or SETTINGS)
    results: dict[str, Numbers] = {}
    try:
        for name in wanted:
            results[name] = trained(name, steps, folder, console)
    except KeyboardInterrupt:
        raise SystemExit(
            f"Interrupted. The results in {folder} were kept: {', '.join(results) or 'none yet'}."
            " To train the remaining settings, run the same command again."
        ) from None
    text = tell(results, folder, console)
    for name in results:
        numbers_of(name, folder).unlink()
    return text


def writable_folder(out: str) -> Path:
    """Creates the folder, or refuses it before training starts if it is not writable."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ValueError(
            f"The results cannot be written to out={out!r} ({error}). Choose a different folder."
        ) from error


def numbers_of(setting: str, folder: Path) -> Path:
    return folder / f"{setting}.json"


def trained(setting: str, steps: int, folder: Path, console: Console) -> Numbers:
    """Returns a setting's results from an interrupted demo or from a new run."""
    path = numbers_of(setting, folder)
    command = training_command(setting, steps, path)
    if path.exists():
        numbers: Numbers = json.loads(path.read_text(encoding="utf-8"))
        if numbers.get("command") == shlex.join(command):
            console.print(f"{SETTINGS[setting]}: trained before the interruption, {path}")
            return numbers
    train(setting, command, steps, console)
    numbers = json.loads(path.read_text(encoding="utf-8"))
    numbers["command"] = shlex.join(command)
    path.write_text(json.dumps(numbers), encoding="utf-8")
    return numbers


def training_command(setting: str, steps: int, output: Path) -> list[str]:
    """Returns the command that trains a setting and writes the results to a file."""
    command = ["python", str(EXAMPLES / "pretrain_text.py"), "fit"]
    for name in ("base", setting):
        command += ["--config", str(CONFIGURATIONS / f"{name}.yaml")]
    command += [
        f"--trainer.max_steps={steps}",
        f"--trainer.val_check_interval={-(-steps // POINTS)}",
    ]
    command += ["--trainer.enable_checkpointing=false", "--trainer.enable_model_summary=false"]
    command += ["--trainer.enable_progress_bar=false", "--trainer.callbacks=__main__.StepCount"]
    return [*command, f"--result={output}"]


def train(setting: str, command: list[str], steps: int, console: Console) -> None:
    """Trains a setting and shows a progress bar on the terminal."""
    output: list[str] = []
    with (
        Progress(*Progress.get_default_columns(), console=console) as progress,
        subprocess.Popen(
            [sys.executable, *command[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        bar = progress.add_task(description_of(setting), total=steps)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                step = re.fullmatch(r"step (\d+)\n", line)
                if step:
                    progress.update(bar, completed=int(step[1]))
                else:
                    output.append(line)
        except KeyboardInterrupt:
            # Ctrl-C also reaches the training process, but a signal to this process does not.
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        console.print("".join(output[-60:]), highlight=False, markup=False)
        raise SystemExit(
            f"Training with {setting!r} ended with exit code {process.returncode}. The error is"
            f" shown above. The command was: {shlex.join(command)}"
        )


def description_of(setting: str) -> str:
    """Returns a setting's name, padded so that the progress bars line up."""
    return SETTINGS[setting].ljust(max(map(len, SETTINGS.values())))


def add_times(results: dict[str, Numbers]) -> None:
    """Adds ``link_seconds`` to each run: the times of its validations on the slow link."""
    # The shortest step time is used, because DDP's steps include an exchange on this machine.
    step_seconds = min(run["step_seconds"] for run in results.values())
    for setting, run in results.items():
        run["link_step_seconds"] = step_seconds
        run["link_seconds"] = seconds_on_link(run, CONFIGURATIONS / f"{setting}.yaml")


def results_table(results: dict[str, Numbers]) -> Table:
    """Builds the table of results with one row per setting."""
    first = next(iter(results.values()))
    table = Table(
        title=f"{first['parameters']:,} parameters, {first['ranks']} worker groups, {first['steps']:,} steps; "
        f"{first['tokens']:,} tokens, {first['tokens'] / first['parameters']:.3g} per parameter,"
        f" {first['passes']:.2g} passes over the text\n",
        caption="\nThe loss is given in nats per byte, on text that was not used for training. The byte"
        " counts show the data that one rank sent to the other. These counts are measured for"
        " Streaming DiLoCo and calculated for DDP, assuming a ring all-reduce of the gradients."
        " The times in the column 'here' are measured without a slow link. The last column is"
        f" computed for a link of {LINK_NAME}.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    table.add_column("setting", no_wrap=True)
    for heading in ("loss", "perplexity", "bytes/rank", "vs. DDP", "here", "slow link"):
        table.add_column(heading, justify="right")
    baseline = results["ddp"]["bytes_sent"] if "ddp" in results else 0
    for setting, row in results.items():
        table.add_row(SETTINGS[setting], *cells(row, baseline))
    return table


def cells(row: Numbers, baseline: int) -> list[str]:
    """Formats one row of the table."""
    return [
        f"{row['val_loss']:.3f}",
        f"{row['val_perplexity']:.2f}",
        readable(row["bytes_sent"]),
        f"1/{baseline / row['bytes_sent']:.0f}" if baseline and row["bytes_sent"] else "-",
        f"{row['train_seconds']:.0f} s",
        time_on_link(row),
    ]


def time_on_link(row: Numbers) -> str:
    """Formats how long a run takes on the slow link."""
    return short(row["link_seconds"][str(row["steps"])])


def sentences(ddp: Numbers, ours: Numbers) -> list[str]:
    """Describes the difference in loss and how long both runs take on the slow link."""
    nats = ours["val_loss"] - ddp["val_loss"]
    loss = 100 * abs(nats) / ddp["val_loss"]
    perplexity = 100 * abs(math.expm1(nats))
    cost = "Cost: after"
    above = "higher"
    more = "higher"
    if nats <= 0:
        cost = "Cost: none. After"
        above = "lower"
        more = "lower"
    return [
        f"{cost} the same number of tokens, the loss of {OURS} is {abs(nats):.3f} nats per byte"
        f" {above} than with DDP ({loss:.1f} % {more} loss and {perplexity:.1f} % {more}"
        " perplexity). Each method was trained with one seed.",
        f"Savings: on a link of {LINK_NAME}, the same run takes {time_on_link(ddp)} with DDP and"
        f" {time_on_link(ours)} with {OURS}. These times are not measured on a link, but computed"
        f" from the {1000 * ours['link_step_seconds']:.3g} ms that a step took here.",
    ]


def tell(results: dict[str, Numbers], folder: Path, console: Console) -> str:
    """Prints and saves the results and pictures, and returns a line with their paths."""
    add_times(results)
    console.print("", results_table(results), sep="\n")
    if {"ddp", "streaming_fp4"} <= results.keys():
        for sentence in sentences(results["ddp"], results["streaming_fp4"]):
            console.print("", sentence, sep="\n", highlight=False)
    console.print()
    numbers = folder / "demo.json"
    rows = {setting: dict(row) for setting, row in results.items()}
    for row in rows.values():
        row.pop("shapes", None)
    numbers.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    files = [numbers]
    if find_spec("matplotlib"):
        files += draw(folder, results)
    return " ".join(["Saved:", *map(str, files)])


# The slow link


def seconds_on_link(run: Numbers, configuration: Path) -> dict[str, float]:
    """Computes the seconds that a run on the link would need to reach each validation.

    The run's results include ``link_step_seconds``, the duration of a step without an exchange.
    """
    strategy = yaml.safe_load(configuration.read_text(encoding="utf-8"))["trainer"]["strategy"]
    parameters = {name: torch.empty(shape, device="meta") for name, shape in run["shapes"].items()}
    model = Model.of_parameters(parameters)
    groups = Groups(run["link_step_seconds"], run["ranks"], memory_rate=MEMORY_RATE)
    if strategy == "ddp":
        step_seconds = groups.step_time / DataParallel(model, groups).utilisation(LINK)
        return {step: int(step) * step_seconds for step in run["val_losses"]}
    arguments = dict(strategy["init_args"])
    # The planner does not time the outer step, and YAML gives the class of its optimizer as text.
    arguments.pop("outer_optimizer", None)
    method = Streaming(model, Settings.among(arguments), groups)
    times = play(method, LINK, run["steps"], speeds=[1.0] * run["ranks"])[0]
    # The last validation comes after the final exchange.
    done = [*times.steps[:-1], times.end]
    return {step: done[int(step) - 1] for step in run["val_losses"]}


def short(seconds: float) -> str:
    """Formats a time in minutes, or in seconds if it is less than a minute."""
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def draw(folder: Path, results: dict[str, Numbers]) -> list[Path]:
    """Plots the loss against the time on the link and returns the files."""

    def drawn(figure: Figure) -> None:
        axes = figure.subplots()
        for setting, run in results.items():
            losses = list(run["val_losses"].values())
            minutes = [seconds / 60 for seconds in run["link_seconds"].values()]
            label = f"{SETTINGS[setting]}: loss {losses[-1]:.3f} after {short(60 * minutes[-1])}"
            axes.plot(minutes, losses, "o-", color=COLORS[setting], markersize=4, label=label)
        axes.set_xlabel(f"minutes on a link of {LINK_NAME}, computed")
        axes.set_ylabel("validation loss, measured")
        axes.set_xlim(left=0)
        axes.legend()

    return save_picture(str(folder / "demo.svg"), drawn, (8.4, 3.6))
