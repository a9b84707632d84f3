"""Validation loss of DDP, DiLoCo and Streaming DiLoCo at equal tokens and equal seeds, over H, tau, M and compression.

    python -m benchmarks.quality [--quick] [--json FILE] [--picture FILE]

The worker groups are simulated in one process (`SimulatedGroups`): the bits are those of as many processes, and one
core is enough. With --json every run is kept at once, and runs that the file has are not made again: the benchmark may
be stopped and started as one likes.

Every setting trains the same model with the same inner optimizer, learning rate and schedule, on the same windows of
text in the same order. DDP takes the mean gradient of what the groups of the others see.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.models import DEMO, TEN_MILLION, TINY, Size, next_byte_loss
from benchmarks.picture import BLUE, GREEN, RED, figure, save
from benchmarks.training import Text
from lightning_sdiloco import SimulatedGroups


@dataclass(frozen=True)
class Training:
    """What all settings share."""

    size: Size
    steps: int
    batch: int = 8
    """Windows that all groups together see in a step."""
    lr: float = 3e-3
    warmup_steps: int = 40
    weight_decay: float = 0.1
    validation_windows: int = 256

    def lr_factor(self, step: int) -> float:
        """As in examples/pretrain_text.py: warm-up, then a cosine down to a tenth."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass(frozen=True)
class Setting:
    """One way to train: DDP where there are no choices, else the engine with these."""

    groups: int = 2
    choices: dict[str, Any] = field(default_factory=dict)


# Short runs like this one need a small H. Everything below changes one thing of it.
OUTER: dict[str, Any] = {"outer_lr": 0.4, "outer_momentum": 0.9}
STREAMING: dict[str, Any] = {
    **OUTER,
    "sync_every": 20,
    "overlap_steps": 4,
    "mixing": 0.5,
    "layers_per_fragment": 1,
    "compression": "fp4",
}
DILOCO: dict[str, Any] = {
    **OUTER,
    "sync_every": 20,
    "overlap_steps": 0,
    "mixing": 0.0,
    "fragments": [["*"]],
    "compression": "fp32",
}


def streaming(groups: int = 2, **changes: Any) -> Setting:
    """Streaming DiLoCo with some choices of its own."""
    return Setting(groups, {**STREAMING, **changes})


SETTINGS: dict[str, Setting] = {
    "DDP": Setting(),
    "DiLoCo": Setting(choices=DILOCO),
    "Streaming": streaming(),
    "Streaming, sparse": streaming(compression="sparse"),
    "Streaming, fp32": streaming(compression="fp32"),
    "Streaming, int2": streaming(compression="int2"),
    "Streaming, H=10": streaming(sync_every=10),
    "Streaming, H=40": streaming(sync_every=40),
    "Streaming, tau=0": streaming(overlap_steps=0, mixing=0.0),
    "Streaming, tau=1": streaming(overlap_steps=1),
    "Streaming, tau=10": streaming(overlap_steps=10),
    "DiLoCo, M=4": Setting(4, DILOCO),
    "Streaming, M=4": streaming(4),
    "Streaming, M=8": streaming(8),
    "DiLoCo, H=40": Setting(choices={**DILOCO, "sync_every": 40}),
}

Run = dict[str, Any]


class Group:
    """A model with its inner optimizer, and the part of every batch that it sees."""

    def __init__(self, training: Training, seed: int) -> None:
        self.model = training.size.make(seed)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        parts = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(parts, lr=training.lr, betas=(0.9, 0.95))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, training.lr_factor)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """One inner step."""
        self.optimizer.zero_grad()
        next_byte_loss(self.model, tokens, targets).backward()
        self.optimizer.step()
        self._schedule.step()


def trained(training: Training, setting: Setting, text: Text, seed: int) -> nn.Module:
    """Trains with a setting; returns the model that one would keep."""
    count = setting.groups if setting.choices else 1
    groups = [Group(training, seed) for _ in range(count)]
    streaming = (
        SimulatedGroups([group.model for group in groups], [[group.optimizer] for group in groups], **setting.choices)
        if setting.choices
        else None
    )
    batches = text.batches(seed, training.batch)
    for _ in range(training.steps):
        tokens, targets = next(batches)
        for group, *part in zip(groups, tokens.chunk(count), targets.chunk(count), strict=True):
            group.step(*part)
        if streaming is not None:
            streaming.step()
    if streaming is not None:
        streaming.finish()
    return groups[0].model


def runs(quick: bool) -> Iterator[tuple[str, Training, str, int]]:
    """All runs, in the order in which they are worth most: model, training, setting, seed."""
    if quick:
        for name in ("DDP", "DiLoCo", "Streaming", "Streaming, M=4"):
            yield "tiny", Training(TINY, steps=45, warmup_steps=5, validation_windows=32), name, 0
        return
    demo = Training(DEMO, steps=400)
    for seed in range(3):
        for name in SETTINGS:
            yield "demo", demo, name, seed
    large = Training(TEN_MILLION, steps=200, lr=1e-3)
    for seed in range(3):
        for name in ("DDP", "DiLoCo", "Streaming", "Streaming, sparse"):
            yield "10M", large, name, seed


def measure(quick: bool, path: Path | None) -> list[Run]:
    """Makes the runs that the file does not have, and keeps each as soon as it is there."""
    done: list[Run] = json.loads(path.read_text())["runs"] if path is not None and path.exists() else []
    texts: dict[Size, Text] = {}
    for model, training, name, seed in runs(quick):
        key = {"model": model, "setting": name, "seed": seed, "training": asdict(training)}
        if any(run.items() >= key.items() for run in done):
            continue
        text = texts.setdefault(training.size, Text(training.size, training.validation_windows))
        started = time.process_time()
        loss = text.loss(trained(training, SETTINGS[name], text, seed))
        done.append({**key, "loss": loss, "cpu_seconds": round(time.process_time() - started, 1)})
        report.said(f"{model}, {name}, seed {seed}: {loss:.4f}")
        report.write(path, headline(done), report.measured("quality", quick), runs=done)
    return done


def losses(done: list[Run], model: str) -> dict[str, dict[int, float]]:
    """Setting to seed to loss."""
    found: dict[str, dict[int, float]] = {}
    for run in done:
        if run["model"] == model:
            found.setdefault(run["setting"], {})[run["seed"]] = run["loss"]
    return found


def headline(done: list[Run]) -> dict[str, float]:
    """Mean losses over the seeds."""
    models = dict.fromkeys(run["model"] for run in done)
    return {
        f"{model}: {name}: loss": mean(by_seed.values())
        for model in models
        for name, by_seed in losses(done, model).items()
    }


def differences(by_seed: dict[int, float], ddp: dict[int, float]) -> list[float]:
    """How much worse than DDP, seed by seed."""
    return [loss - ddp[seed] for seed, loss in by_seed.items() if seed in ddp]


def spread(values: list[float]) -> str:
    """The standard deviation over the seeds."""
    return f"{stdev(values):.3f}" if len(values) > 1 else "-"


def show(done: list[Run]) -> None:
    """Prints a table for each model."""
    for model in dict.fromkeys(run["model"] for run in done):
        found = losses(done, model)
        training = next(run["training"] for run in done if run["model"] == model)
        tokens = training["steps"] * training["batch"] * training["size"]["context"]
        rows = []
        for name, by_seed in found.items():
            worse = differences(by_seed, found.get("DDP", {}))
            values = list(by_seed.values())
            difference = f"{mean(worse):+.3f}" if worse else "-"
            row = [name, str(len(values)), f"{mean(values):.3f}", spread(values), difference, spread(worse)]
            rows.append(row)
        columns = ["setting", "seeds", "loss", "± over seeds", "- DDP", "± over seeds"]
        report.show(f"{model}: {training['steps']} steps, {tokens:,} tokens", columns, rows, "Loss in nats per byte.")


def draw(done: list[Run], path: Path | None) -> None:
    """Draws the loss of every setting, a dot for each seed."""
    if path is None:
        return
    models = list(dict.fromkeys(run["model"] for run in done))
    picture, panels = figure(columns=len(models), height=4.2, widths=[len(losses(done, model)) for model in models])
    for model, axes in zip(models, panels, strict=True):
        found = losses(done, model)
        for position, (name, by_seed) in enumerate(found.items()):
            color = BLUE if name == "DDP" else GREEN if name.startswith("DiLoCo") else RED
            axes.plot([position] * len(by_seed), list(by_seed.values()), "o", color=color, alpha=0.6)
            axes.plot([position - 0.3, position + 0.3], [mean(by_seed.values())] * 2, color=color, linewidth=2)
        axes.set_xticks(range(len(found)), list(found), rotation=60, ha="right", fontsize=8)
        axes.set_title(model)
    panels[0].set_ylabel("validation loss, nats per byte")
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    options = report.options(__doc__, arguments)
    done = measure(options.quick, options.json)
    show(done)
    draw(done, options.picture)


if __name__ == "__main__":
    main()
