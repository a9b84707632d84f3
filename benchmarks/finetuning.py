"""Measures the cost of fine-tuning in worker groups compared with DDP, with LoRA and of all
parameters.

    python -m benchmarks.finetuning [--stage STAGE] [--workers N] [--minutes M] [--quick] [--json
    FILE] [--picture FILE]

A model is first trained on the sources of Python's standard library, and kept in the folder for
temporary files. Then it is fine-tuned for 500 steps on English, the texts that ``help()`` shows.
There are two stages:

- ``rates``: the inner learning rate, separately for DDP and for worker groups, with one seed.
- ``verdict``: three other seeds, with the rates of the previous stage, each paired with a DDP run
  with the same data and start.

With --json, every run is saved as soon as it ends, and runs that are already in the file are
skipped.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks import comparison, report, runs
from benchmarks.models import SMALL, TINY, Size
from benchmarks.quality import TWO_GROUPS
from benchmarks.runs import Runs
from benchmarks.training import Text, Training, parameters, trained

# The folder of text_data is on the path since the import of benchmarks.models.
from text_data import Windows, standard_library_sources  # isort: skip

STEPS = 500
BATCH = 4
"""Windows that a group sees in a step."""

VALIDATION_WINDOWS = 256
PRETRAINED_BATCH = 2
PRETRAINED_LR = 6e-3
"""With which DDP does best from scratch; see `benchmarks.quality --stage rates`."""

METHODS = {"all parameters": 0, "LoRA": 8}
"""The rank of the adapters; 0 without adapters."""

TUNING_SEED = 0
SEEDS = (6, 7, 8)

BASE: dict[str, Any] = {"sync_every": 20, **TWO_GROUPS}

RECOMMENDED: dict[str, dict[str, Any]] = {
    "all parameters": {"overlap_steps": 1},
    "LoRA": {"overlap_steps": 1},
}
"""The changes to it that docs/choosing.md recommends for 500 steps."""

RATES = {"all parameters": (2e-3, 3e-3, 4e-3), "LoRA": (1e-2, 1.5e-2, 2e-2)}
DDP_RATES = {"all parameters": (3e-3, 4e-3, 6e-3), "LoRA": (1e-2, 2e-2, 4e-2)}
LR = {"all parameters": 3e-3, "LoRA": 1.5e-2}
DDP_LR = {"all parameters": 6e-3, "LoRA": 2e-2}
"""The best inner learning rate of each method, of those that stage ``rates`` tries."""


class Adapted(nn.Module):
    """A linear layer with a frozen weight, plus a trainable product of two thin matrices that
    starts at zero.
    """

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
    """Freezes a model, and adds an adapter to all linear layers of its blocks."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.startswith("blocks.") and isinstance(module, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Adapted(module, rank))


class Sources(Text):
    """The sources of the standard library without the texts of `Topics`, for training only."""

    def __init__(self, size: Size) -> None:
        sources = [
            path.read_bytes()
            for path in standard_library_sources()
            if path.parent.name != "pydoc_data"
        ]
        self.training = Windows(as_tensor(b"\0".join(sources)), size.context)


class Topics(Text):
    """The texts of ``help()``, in English, without duplicate paragraphs; a tenth of them is for
    validation.
    """

    def __init__(self, size: Size, validation_windows: int) -> None:
        from pydoc_data.topics import topics

        unique = {
            " ".join(part.split()): part
            for name in sorted(topics)
            for part in topics[name].split("\n\n")
        }
        judged_by = list(unique.values())[::10]
        trained_on = [part for index, part in enumerate(unique.values()) if index % 10]
        self.training = Windows(as_tensor("\n\n".join(trained_on).encode()), size.context)
        self.validation = Windows(
            as_tensor("\n\n".join(judged_by).encode()), size.context, validation_windows
        )


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


_topics = cache(Topics)


@dataclass(frozen=True)
class FineTuning(Training):
    """A fine-tuning of a pretrained model that is the same for all runs."""

    lora_rank: int = field(default=0, kw_only=True)
    pretrained: float = field(default=16.0, kw_only=True)

    @override
    def model(self) -> nn.Module:
        model = self.size.make()
        model.load_state_dict(
            torch.load(pretrained_weights(self.size, self.pretrained), weights_only=True)
        )
        torch.manual_seed(self.seed)
        if self.lora_rank:
            add_adapters(model, self.lora_rank)
        return model

    @override
    def text(self) -> Text:
        return _topics(self.size, self.validation_windows)


def pretrained_weights(size: Size, budget: float) -> Path:
    """Returns the file of a pretrained model, which is trained if there is none."""
    shape = f"{size.layers}-{size.width}-{size.heads}-{size.context}"
    path = (
        Path(gettempdir()) / f"sdiloco-pretrained-{shape}-{budget:g}-torch-{torch.__version__}.pt"
    )
    if not path.exists():
        report.said(f"pretraining {parameters(size):,} parameters")
        training = Training(
            size, None, groups=2, budget=budget, batch=PRETRAINED_BATCH, lr=PRETRAINED_LR
        )
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        torch.save(trained(training, Sources(size)).state_dict(), unfinished)
        unfinished.replace(path)
    return path


def tuned(method: str, seed: int, lr: float, **choices: Any) -> FineTuning:
    """Fine-tuning in two worker groups with choices for the engine, or with DDP if there are
    none.
    """
    return FineTuning(
        SMALL,
        choices or None,
        budget=STEPS * 2 * BATCH * SMALL.context / parameters(SMALL),
        batch=BATCH,
        lr=lr,
        seed=seed,
        validation_windows=VALIDATION_WINDOWS,
        lora_rank=METHODS[method],
    )


def ours(
    method: str, seed: int = TUNING_SEED, lr: float | None = None, **changes: Any
) -> FineTuning:
    return tuned(method, seed, LR[method] if lr is None else lr, **{**BASE, **changes})


def ddp(method: str, seed: int = TUNING_SEED, lr: float | None = None) -> FineTuning:
    return tuned(method, seed, DDP_LR[method] if lr is None else lr)


def rates() -> Iterator[FineTuning]:
    """Fine-tunings that show the best inner learning rate of each method."""
    for method in METHODS:
        yield from (ddp(method, lr=lr) for lr in DDP_RATES[method])
        yield from (ours(method, lr=lr) for lr in RATES[method])


def verdict() -> Iterator[FineTuning]:
    """Fine-tunings with the recommended settings, over seeds that other stages did not use."""
    for seed, method in product(SEEDS, METHODS):
        yield from (ddp(method, seed), ours(method, seed, **RECOMMENDED[method]))


STAGES: dict[str, Callable[[], Iterator[FineTuning]]] = {
    "rates": rates,
    "verdict": verdict,
}


def quick_trainings() -> Iterator[FineTuning]:
    for method in METHODS:
        for training in (ddp(method), ours(method, sync_every=10)):
            yield replace(training, size=TINY, budget=0.05, validation_windows=32, pretrained=0.05)


def paired(trainings: Iterable[FineTuning]) -> dict[str, list[tuple[FineTuning, FineTuning]]]:
    """Pairs each training with DDP at DDP's best rate, by setting."""
    pairs: dict[str, list[tuple[FineTuning, FineTuning]]] = {}
    for training in trainings:
        best = replace(training, choices=None, lr=DDP_LR[method_of(training)])
        if training != best:
            pairs.setdefault(name(training), []).append((training, best))
    return pairs


def method_of(training: FineTuning) -> str:
    return next(method for method, rank in METHODS.items() if rank == training.lora_rank)


def name(training: FineTuning) -> str:
    """Names a setting by the trained parameters and by its changes to the base."""
    parts = [method_of(training), f"lr={training.lr:g}"]
    if training.choices is None:
        return ", ".join([*parts, "DDP"])
    shown = [
        key
        for key, value in training.choices.items()
        if key == "sync_every" or BASE.get(key) != value
    ]
    return ", ".join([*parts, *(f"{key}={training.choices[key]}" for key in shown)])


def main(arguments: list[str] | None = None) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument(
        "--stage", choices=STAGES, default="verdict", help="what to run (default: %(default)s)"
    )
    options = runs.parsed(parser, arguments)
    stage, trainings = (
        ("quick", quick_trainings) if options.quick else (options.stage, STAGES[options.stage])
    )
    wanted = list(trainings())
    # Once, before several processes need it.
    pretrained_weights(wanted[0].size, wanted[0].pretrained)
    finished = Runs("finetuning", options.json)
    finished.make(wanted, options.workers, options.minutes)
    title = f"{stage}: {wanted[0].steps} steps, {parameters(wanted[0].size):,} parameters"
    comparison.tell(title, comparison.compared(finished, paired(wanted)), finished, options)


if __name__ == "__main__":
    main()
