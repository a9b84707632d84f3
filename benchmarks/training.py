"""Trains a small GPT on text with DDP's arithmetic or with worker groups, in one process and one thread.

The worker groups are simulated (`SimulatedGroups`): the bits are those of as many processes. Every way to train sees
the same windows of text in the same order, so two runs with one seed differ by the method alone.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks import report
from benchmarks.models import Size, next_byte_loss
from lightning_sdiloco import SimulatedGroups

from muon import muon_and_adamw  # isort: skip  (on the path since benchmarks.models)
from text_data import VALIDATION_SHARE, Windows, build_corpus  # isort: skip

Run = dict[str, Any]
"""What was trained, how, and how it ended; see `Training.key` and `made`."""


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        size: The shape of the model.
        choices: The arguments of the engine; None trains as DDP does, on the mean gradient of all groups.
        groups: Worker groups. With DDP as many batches make a step.
        budget: Tokens to train on, per parameter.
        batch: Windows that one group sees in a step.
        lr: Learning rate of the inner optimizer after its warm-up.
        inner: The inner optimizer: ``"adamw"``, or ``"muon"`` for the matrices of the blocks.
        seed: Of the initial weights and of the order of the windows.
        warmup: Share of the steps in which the learning rate rises.
        clip: The largest norm of a gradient.
    """

    size: Size
    choices: Mapping[str, Any] | None = None
    groups: int = 2
    budget: float = 16.0
    batch: int = 4
    lr: float = 3e-3
    inner: str = "adamw"
    seed: int = 0
    warmup: float = field(default=0.05, kw_only=True)
    clip: float = field(default=1.0, kw_only=True)
    weight_decay: float = field(default=0.1, kw_only=True)
    validation_windows: int = field(default=512, kw_only=True)

    @property
    def tokens(self) -> int:
        """Tokens of the whole training."""
        return self.steps * self.groups * self.batch * self.size.context

    @property
    def steps(self) -> int:
        """Inner steps."""
        return round(self.budget * parameters(self.size) / (self.groups * self.batch * self.size.context))

    @property
    def rounds(self) -> int:
        """How often each fragment travels before the final exchange; 0 with DDP."""
        return 0 if self.choices is None else self.steps // int(self.choices["sync_every"])

    def key(self) -> Run:
        """Returns what tells this training from all others, as it is read back from a file."""
        return dict(json.loads(json.dumps(asdict(self))))

    def model(self) -> nn.Module:
        """Makes the model as it is before the first step."""
        return self.size.make(self.seed)

    def text(self) -> "Text":
        """Returns what to train on and to judge by."""
        return _text(self.size, self.validation_windows)

    def lr_factor(self, step: int) -> float:
        """As in examples/pretrain_text.py: warm-up, then a cosine down to a tenth."""
        warmup = round(self.warmup * self.steps)
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


@cache
def parameters(size: Size) -> int:
    """Counts the parameters of a model."""
    return sum(parameter.numel() for parameter in size.make().parameters())


class Text:
    """The text of the examples: windows to train on, in an order of the seed alone, and windows to judge by."""

    def __init__(self, size: Size, validation_windows: int) -> None:
        import platform

        corpus = Path(gettempdir()) / f"sdiloco-python-{platform.python_version()}.bin"
        if not corpus.exists():
            build_corpus(corpus)
        length = corpus.stat().st_size
        text = torch.from_file(str(corpus), size=length, dtype=torch.uint8)
        split = int(length * (1 - VALIDATION_SHARE))
        self.training = Windows(text[:split], size.context)
        self.validation = Windows(text[split:], size.context, validation_windows)

    def batches(self, seed: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields batches for all groups together, pass after pass over the text, each pass in an order of its own."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in torch.randperm(len(self.training), generator=generator).split(batch):
                if len(chosen) == batch:
                    yield self._stacked(self.training, chosen.tolist())

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Returns the loss on what was not trained on, in nats per byte."""
        losses = []
        for first in range(0, len(self.validation), 16):
            indices = range(first, min(first + 16, len(self.validation)))
            losses += [float(next_byte_loss(model, *self._stacked(self.validation, indices)))] * len(indices)
        return mean(losses)

    @staticmethod
    def _stacked(windows: Windows, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        tokens, targets = zip(*(windows[index] for index in indices), strict=True)
        return torch.stack(tokens), torch.stack(targets)


class Group:
    """A model with its inner optimizer."""

    def __init__(self, training: Training) -> None:
        self.model = training.model()
        self.optimizer = inner_optimizer(training, self.model)
        self._schedule = LambdaLR(self.optimizer, training.lr_factor)
        self._clip = training.clip

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Trains one inner step."""
        self.optimizer.zero_grad()
        next_byte_loss(self.model, tokens, targets).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()
        self._schedule.step()


def inner_optimizer(training: Training, model: nn.Module) -> Optimizer:
    """Makes the inner optimizer; norms have no weight decay."""
    if training.inner == "muon":
        return muon_and_adamw(model, training.lr, weight_decay=training.weight_decay)
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.dim() > 1]
    vectors = [p for p in trainable if p.dim() <= 1]
    parts = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(parts, lr=training.lr, betas=(0.9, 0.95), fused=True)


def trained(training: Training, text: Text) -> nn.Module:
    """Trains; returns the model that one would keep."""
    groups = [Group(training) for _ in range(1 if training.choices is None else training.groups)]
    streaming = (
        None
        if training.choices is None
        else SimulatedGroups([group.model for group in groups], [[g.optimizer] for g in groups], **training.choices)
    )
    batches = text.batches(training.seed, training.groups * training.batch)
    for _ in range(training.steps):
        tokens, targets = next(batches)
        for group, *part in zip(groups, tokens.chunk(len(groups)), targets.chunk(len(groups)), strict=True):
            group.step(*part)
        if streaming is not None:
            streaming.step()
    if streaming is not None:
        streaming.finish()
    return groups[0].model


@cache
def _text(size: Size, validation_windows: int) -> Text:
    return Text(size, validation_windows)


def made(training: Training) -> Run:
    """Trains, and returns what to write down."""
    torch.set_num_threads(1)
    text = training.text()
    started = time.process_time()
    loss = text.loss(trained(training, text))
    return {
        **training.key(),
        "loss": loss,
        "steps": training.steps,
        "rounds": training.rounds,
        "tokens": training.tokens,
        "passes": round(training.tokens / (len(text.training) * training.size.context), 3),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


class Runs:
    """The runs of a file. Each is kept as soon as it is made, and none is made twice.

    Args:
        module: The benchmark, as it is named on the command line.
        path: The file; None keeps the runs in memory alone.
    """

    def __init__(self, module: str, path: Path | None) -> None:
        self._module, self._path = module, path
        self._done: list[Run] = json.loads(path.read_text())["runs"] if path is not None and path.exists() else []

    def __getitem__(self, training: Training) -> Run:
        found = self.get(training)
        if found is None:
            raise KeyError(training)
        return found

    def get(self, training: Training) -> Run | None:
        """Returns a run, or None if it was not made."""
        key = training.key()
        return next((run for run in self._done if run.items() >= key.items()), None)

    def make(self, trainings: Iterable[Training], workers: int) -> None:
        """Makes the runs that the file lacks, as many at a time as there are workers."""
        wanted = {json.dumps(training.key(), sort_keys=True): training for training in trainings}
        missing = [training for training in wanted.values() if self.get(training) is None]
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for count, finished in enumerate(as_completed([pool.submit(made, one) for one in missing]), start=1):
                run = finished.result()
                self._done.append(run)
                self.write({})
                report.said(f"{count} of {len(missing)}: {run['loss']:.4f} {run['choices']} seed {run['seed']}")

    def write(self, headline: Mapping[str, float], quick: bool = False) -> None:
        """Writes all runs."""
        report.write(self._path, headline, report.measured(self._module, quick), runs=self._done)
