"""What fine-tuning in worker groups costs against DDP, with LoRA and of all parameters.

    python -m benchmarks.finetuning [--stage STAGE] [--workers N] [--quick] [--json FILE] [--picture FILE]

A model is trained on the sources of Python's standard library first, and kept in the folder for temporary files. Then
it is fine-tuned on English, the texts that ``help()`` shows, for 500 steps. Four stages, the first three with one seed:

- ``rates``: the inner learning rate, for DDP and for worker groups, each on its own.
- ``windows``: how many windows a group sees in a step.
- ``screen``: H, tau and the outer step, one change at a time.
- ``verdict``: three other seeds, with what the stages before have chosen, each paired with DDP on data and start.

With --json every run is kept at once, and runs that the file has are not made again.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks import report
from benchmarks.defaults import SMALL, interval
from benchmarks.models import TINY, Size
from benchmarks.picture import BLUE, RED, figure, save
from benchmarks.training import Runs, Text, Training, parameters, trained

from text_data import Windows, standard_library_sources  # isort: skip  (on the path since benchmarks.models)

STEPS = 500
BATCH = 8
"""Windows that a group sees in a step."""

VALIDATION_WINDOWS = 256
PRETRAINED_BATCH, PRETRAINED_LR = 2, 6e-3
"""With which DDP does best from scratch; see `benchmarks.defaults`."""

METHODS = {"all parameters": 0, "LoRA": 8}
"""The rank of the adapters, 0 without."""

TUNING_SEED, SEEDS = 0, (1, 2, 3)

RECOMMENDED: dict[str, Any] = {
    "sync_every": 20,
    "overlap_steps": 5,
    "outer_lr": 0.7,
    "mixing": 0.2,
    "outer_momentum": 0.9,
    "compression": "fp4",
}
"""What docs/choosing.md recommends for 500 steps in two groups, as the numbers that ``"auto"`` stands for."""

SCREEN_BATCH = 4

RATES = {"all parameters": (3e-3, 6e-3), "LoRA": (1e-2, 2e-2)}
LR = {"all parameters": 3e-3, "LoRA": 2e-2}
DDP_LR = {"all parameters": 6e-3, "LoRA": 2e-2}
"""The inner learning rates at which each does best, of those that stage ``rates`` tries."""


class Adapted(nn.Module):
    """A linear layer whose weight stays, plus a trainable product of two thin matrices that starts at zero."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    @override
    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.linear(x) + x @ self.down.T @ self.up.T
        return adapted


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freezes a model, and gives all linear layers of its blocks an adapter."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.startswith("blocks.") and isinstance(module, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Adapted(module, rank))


class Sources(Text):
    """The sources of the standard library without the texts of `Topics`; to train on, not to judge by."""

    def __init__(self, size: Size) -> None:
        sources = [path.read_bytes() for path in standard_library_sources() if path.parent.name != "pydoc_data"]
        self.training = Windows(as_tensor(b"\0".join(sources)), size.context)


class Topics(Text):
    """The texts of ``help()``, in English: each paragraph once, a tenth of them to judge by."""

    def __init__(self, size: Size, validation_windows: int) -> None:
        from pydoc_data.topics import topics

        unique = {" ".join(part.split()): part for name in sorted(topics) for part in topics[name].split("\n\n")}
        judged_by = list(unique.values())[::10]
        trained_on = [part for index, part in enumerate(unique.values()) if index % 10]
        self.training = Windows(as_tensor("\n\n".join(trained_on).encode()), size.context)
        self.validation = Windows(as_tensor("\n\n".join(judged_by).encode()), size.context, validation_windows)


def as_tensor(text: bytes) -> Tensor:
    """Returns the bytes of a text."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


_topics = cache(Topics)


@dataclass(frozen=True)
class FineTuning(Training):
    """One fine-tuning of a model that was pretrained alike for all.

    Attributes:
        lora_rank: That of the adapters; 0 trains all parameters.
        pretrained: Tokens per parameter before.
    """

    lora_rank: int = field(default=0, kw_only=True)
    pretrained: float = field(default=16.0, kw_only=True)

    @override
    def model(self) -> nn.Module:
        model = self.size.make()
        model.load_state_dict(torch.load(pretrained_weights(self.size, self.pretrained), weights_only=True))
        torch.manual_seed(self.seed)
        if self.lora_rank:
            add_adapters(model, self.lora_rank)
        return model

    @override
    def text(self) -> Text:
        return _topics(self.size, self.validation_windows)


def pretrained_weights(size: Size, budget: float) -> Path:
    """Returns the file of a pretrained model, and trains it if there is none."""
    shape = f"{size.layers}-{size.width}-{size.heads}-{size.context}"
    path = Path(gettempdir()) / f"sdiloco-pretrained-{shape}-{budget:g}-torch-{torch.__version__}.pt"
    if not path.exists():
        report.said(f"pretraining {parameters(size):,} parameters")
        one = Training(size, None, groups=2, budget=budget, batch=PRETRAINED_BATCH, lr=PRETRAINED_LR)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        torch.save(trained(one, Sources(size)).state_dict(), unfinished)
        unfinished.replace(path)
    return path


def tuned(method: str, seed: int, lr: float, batch: int = BATCH, **choices: Any) -> FineTuning:
    """Fine-tuning in two worker groups with choices of the engine, or as DDP does if there are none."""
    return FineTuning(
        SMALL,
        choices or None,
        budget=STEPS * 2 * batch * SMALL.context / parameters(SMALL),
        batch=batch,
        lr=lr,
        seed=seed,
        validation_windows=VALIDATION_WINDOWS,
        lora_rank=METHODS[method],
    )


def ours(method: str, seed: int = TUNING_SEED, lr: float | None = None, **changes: Any) -> FineTuning:
    """Worker groups with changes to what is recommended; ``batch`` may be one."""
    return tuned(method, seed, LR[method] if lr is None else lr, **{**RECOMMENDED, **changes})


def ddp(method: str, seed: int = TUNING_SEED, lr: float | None = None, batch: int = BATCH) -> FineTuning:
    """DDP on the same batches from the same weights."""
    return tuned(method, seed, DDP_LR[method] if lr is None else lr, batch)


def rates() -> Iterator[FineTuning]:
    """Fine-tunings that show the best inner learning rate of each method."""
    for method, lrs in RATES.items():
        for lr in lrs:
            yield ddp(method, lr=lr)
            yield ours(method, lr=lr)


def screen() -> Iterator[FineTuning]:
    """Fine-tunings that differ from what is recommended in one respect, with fewer windows in a step."""
    changes: list[dict[str, Any]] = [
        {},
        {"sync_every": 10},
        {"sync_every": 50},
        {"overlap_steps": 1},
        {"mixing": 0.5},
        {"outer_lr": 0.4},
        {"outer_momentum": 0.8},
        {"outer_lr": 1.0, "outer_momentum": 0.5, "mixing": 0.0},
        {"outer_lr": 1.0, "outer_momentum": 0.0, "mixing": 0.0},
    ]
    for method in METHODS:
        yield ddp(method, batch=SCREEN_BATCH)
        yield from (ours(method, batch=SCREEN_BATCH, **change) for change in changes)


def windows() -> Iterator[FineTuning]:
    """What the number of windows that a group sees in a step does."""
    for method, batch in product(METHODS, (2, 4, 8)):
        yield from (ddp(method, batch=batch), ours(method, batch=batch))


def verdict() -> Iterator[FineTuning]:
    """What is recommended, over seeds that the other stages did not see."""
    for method, seed in product(METHODS, SEEDS):
        yield from (ddp(method, seed), ours(method, seed))


STAGES: dict[str, Callable[[], Iterator[FineTuning]]] = {
    "rates": rates,
    "windows": windows,
    "screen": screen,
    "verdict": verdict,
}


def quick_trainings() -> Iterator[FineTuning]:
    """Fine-tunings that show that the benchmark runs."""
    for method in METHODS:
        for one in (ddp(method), ours(method, sync_every=10)):
            yield replace(one, size=TINY, budget=0.05, validation_windows=32, pretrained=0.05)


def excess(runs: Runs, one: FineTuning, other: FineTuning) -> float:
    """Returns by how many percent a loss is above another."""
    return 100 * (runs[one]["loss"] / runs[other]["loss"] - 1)


def show(runs: Runs, stage: str, trainings: list[FineTuning]) -> dict[str, float]:
    """Prints a row for each setting of a stage.

    Returns:
        How many percent above DDP each setting is in the mean, DDP at its best rate of the stage.
    """
    rows, headline = [], {}
    for setting, seeds in by_setting(trainings).items():
        losses = [runs[one]["loss"] for one in seeds]
        rounds = str(seeds[0].rounds) if seeds[0].choices else "-"
        above = [excess(runs, one, best_ddp(runs, trainings, one)) for one in seeds]
        if seeds[0].choices:
            headline[setting] = mean(above)
        rows.append([setting, rounds, str(len(seeds)), f"{mean(losses):.3f}", interval(above)])
    columns = ["setting", "rounds", "seeds", "loss", "% above DDP, with its 95 % interval"]
    size, steps = trainings[0].size, trainings[0].steps
    report.show(f"{stage}: {parameters(size):,} parameters, {steps} steps", columns, rows, "Loss in nats per byte.")
    return headline


def by_setting(trainings: list[FineTuning]) -> dict[str, list[FineTuning]]:
    """Returns the trainings of each setting, which differ in their seeds."""
    settings: dict[str, list[FineTuning]] = {}
    for one in trainings:
        seeds = settings.setdefault(name(one), [])
        if one not in seeds:
            seeds.append(one)
    return settings


def best_ddp(runs: Runs, trainings: list[FineTuning], one: FineTuning) -> FineTuning:
    """Returns the best DDP of a stage with the same seed and the same trainable parameters."""
    others = [other for other in trainings if other.choices is None]
    alike = [
        other for other in others if (other.seed, other.lora_rank, other.batch) == (one.seed, one.lora_rank, one.batch)
    ]
    return min(alike, key=lambda other: float(runs[other]["loss"]))


def name(one: FineTuning) -> str:
    """Names a setting by its trainable parameters, its inner rate, and what it changes of what is recommended."""
    method = next(method for method, rank in METHODS.items() if rank == one.lora_rank)
    if one.choices is None:
        return f"{method}: DDP, lr={one.lr:g}, {one.batch} windows"
    shown = [key for key, value in one.choices.items() if key == "sync_every" or RECOMMENDED[key] != value]
    changed = ", ".join(f"{key}={one.choices[key]}" for key in shown)
    return f"{method}: lr={one.lr:g}, {one.batch} windows, {changed}"


def draw(headline: dict[str, float], path: Path | None) -> None:
    """Draws how far above DDP each setting is."""
    if path is None:
        return
    picture, (axes,) = figure(height=1.2 + 0.25 * len(headline))
    settings = list(reversed(headline))
    values = [headline[setting] for setting in settings]
    axes.barh(range(len(settings)), values, color=[RED if value > 1 else BLUE for value in values])
    axes.set_yticks(range(len(settings)), settings, fontsize=8)
    axes.set_xlabel("validation loss above that of DDP, percent")
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--stage", choices=STAGES, default="verdict", help="what to run (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="trainings at a time (default: all cores)")
    options = parser.parse_args(arguments)
    stage, trainings = ("quick", quick_trainings) if options.quick else (options.stage, STAGES[options.stage])
    wanted = list(trainings())
    # Once, before several processes want it.
    pretrained_weights(wanted[0].size, wanted[0].pretrained)
    runs = Runs("finetuning", options.json)
    runs.make(wanted, 1 if options.quick else options.workers)
    headline = show(runs, stage, wanted)
    runs.write(headline, options.quick)
    draw(headline, options.picture)


if __name__ == "__main__":
    main()
