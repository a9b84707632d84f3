"""Trains a small GPT on text with DDP's arithmetic or in worker groups, in one process and one
thread.

The worker groups are simulated (`SimulatedGroups`), bit-identical to separate processes. Every
method sees the same windows of text in the same order, so two runs with the same seed differ only
in the method. A training that is out of time saves its state, from which another process continues
bit for bit.
"""

import json
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import mean
from tempfile import gettempdir
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.corpus import VALIDATION_BYTES, read
from benchmarks.models import Size, adamw, lr_factor, next_byte_loss
from benchmarks.stacked import StackedGroups
from lightning_sdiloco import OuterOptimizer, SimulatedGroups, StreamingDiLoCo

from gpa import GPA  # isort: skip  (on the path since benchmarks.models)
from muon import muon_and_adamw  # isort: skip
from text_data import VALIDATION_SHARE, Windows, build_corpus  # isort: skip

CUT = "strided:3"
"""The default of fragments when most runs in ``docs/benchmarks`` were made; it is part of a run's
key."""

Run = dict[str, Any]
"""A finished training: its settings and numbers; see `Training.key` and `made`."""


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        size: The shape of the model.
        choices: The arguments of the engine. None trains like DDP, with the mean gradient of all
            groups.
        groups: The number of worker groups. With DDP, the number of batches in a step.
        budget: The tokens per parameter to train on.
        batch: The windows that one group sees in a step.
        lr: The learning rate of the inner optimizer after its warm-up.
        inner: The inner optimizer: ``"adamw"``, ``"gpa"``, ``"sgd"``, or ``"muon"`` for the
            matrices of the blocks.
        seed: The seed of the initial weights and of the order of the windows.
        warmup: The share of the steps in which the learning rate rises.
        clip: The maximum norm of a gradient.
        device: The device of models and text.
        split: How the text is divided: ``"shuffled"``, or ``"by_file"``, with different files for
            each group.
        precision: ``"32-true"``, or ``"bf16-mixed"`` as in Lightning.
        corpus: The text: ``"python"``, or the path of a corpus from `benchmarks.corpus`.
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
    device: str = field(default="cpu", kw_only=True)
    split: Literal["shuffled", "by_file"] = field(default="shuffled", kw_only=True)
    precision: Literal["32-true", "bf16-mixed"] = field(default="32-true", kw_only=True)
    corpus: str = field(default="python", kw_only=True)

    @property
    def tokens(self) -> int:
        return self.steps * self.groups * self.batch * self.size.context

    @property
    def steps(self) -> int:
        windows = self.groups * self.batch
        return round(self.budget * self.numel / (windows * self.size.context))

    @property
    def numel(self) -> int:
        """The number of parameters of the model."""
        return parameters(self.size)

    @property
    def rounds(self) -> int:
        """The number of exchanges of each fragment after the dense beginning and before the final
        exchange; 0 with DDP.
        """
        if self.choices is None:
            return 0
        dense = self.choices.get("dense_beginning")
        dense_steps = dense.steps if dense else 0
        return (self.steps - dense_steps) // int(self.choices["sync_every"])

    def key(self) -> Run:
        """Returns the values that identify this training, in the form in which they are read back
        from a file.
        """
        return dict(json.loads(json.dumps(asdict(self))))

    @property
    def can_go_on(self) -> bool:
        """True if another process can continue from the state of this training."""
        return True

    @property
    def is_stacked(self) -> bool:
        """True if all groups train at once, as `StackedGroups` do on a GPU with AdamW."""
        return self.device == "cuda" and self.inner == "adamw"

    def model(self) -> nn.Module:
        return self.size.make(self.seed)

    def method_choices(self) -> Mapping[str, Any]:
        """Returns arguments of the engine that are not part of the key, such as objects of a
        method.
        """
        return {}

    def engine_choices(self) -> dict[str, Any]:
        """Returns all arguments of the engine. Memory is sufficient, so nothing is offloaded."""
        return all_on_device({**(self.choices or {}), **self.method_choices()})

    def simulated(
        self, models: Sequence[nn.Module], optimizers: Sequence[Sequence[Optimizer]]
    ) -> "Simulated":
        """Makes the object that connects the worker groups."""
        return SimulatedGroups(models, optimizers, **self.engine_choices())

    def group(self) -> "Group":
        """Makes a group of the training."""
        return Group(self)

    def trained(self, group: int, step: int) -> int:
        """Returns the number of windows of its batch that a group trains in an inner step, counted
        from 0; with 0 windows, the group is idle.
        """
        del group, step
        return self.batch

    def text(self) -> "Text":
        return _text(self.size, self.validation_windows, self.device, self.corpus)

    def lr_factor(self, step: int) -> float:
        return lr_factor(step, self.steps, warmup=round(self.warmup * self.steps))


def all_on_device(choices: Mapping[str, Any]) -> dict[str, Any]:
    outer = choices.get("outer_optimizer")
    if not isinstance(outer, OuterOptimizer):
        # A run is that of its numbers: those that say nothing of a direction are from before there
        # were any.
        outer = OuterOptimizer(outer, direction="elementwise")
    return {**choices, "outer_optimizer": replace(outer, offload=False)}


@dataclass(frozen=True)
class NamedTraining(Training):
    """A training with a named method; its runs are saved under this name."""

    method: str = field(kw_only=True)


class Simulated(Protocol):
    """Connects worker groups in this process: `SimulatedGroups`, or a replacement."""

    engines: list[StreamingDiLoCo]

    def step(self, *, trained: Sequence[int] = (), idle: Collection[int] = ()) -> object:
        """Counts an inner step of every group; see `SimulatedGroups.step`."""
        ...

    def finish(self) -> None: ...


@cache
def parameters(size: Size) -> int:
    return sum(parameter.numel() for parameter in size.make().parameters())


class Text:
    """Training windows of text, in an order that depends only on the seed, and validation windows.

    The text is that of the examples, or a corpus that `benchmarks.corpus` wrote.
    """

    def __init__(
        self, size: Size, validation_windows: int, device: str = "cpu", corpus: str = "python"
    ) -> None:
        if corpus == "python":
            text = _python_sources()
            split = int(len(text) * (1 - VALIDATION_SHARE))
        else:
            text = read(Path(corpus))
            split = len(text) - VALIDATION_BYTES
        text = text.to(device)
        self.training = Windows(text[:split], size.context)
        self.validation = Windows(text[split:], size.context, validation_windows)

    def batches(
        self, seed: int, batch: int, first: int = 0, parts: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields batches for all groups together, from any batch on: pass after pass, each in a
        different order.

        With several parts, each group has different files, and windows are in the order of the
        groups.
        """
        for indices in islice(self._order(seed, batch // parts, parts), first, None):
            yield _stacked(self.training, indices)

    def _order(self, seed: int, batch: int, parts: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        numel = len(self.training) // parts
        while True:
            orders = [
                torch.randperm(numel, generator=generator) + part * numel for part in range(parts)
            ]
            order = torch.stack(orders).to(self.training.text.device)
            # One after the other, because splitting all of them at once takes seconds.
            for start in range(0, numel // batch * batch, batch):
                yield order[:, start : start + batch].flatten()

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Returns the loss on the validation windows, in nats per byte."""
        losses = []
        windows = torch.arange(len(self.validation), device=self.validation.text.device)
        for indices in windows.split(16):
            loss = next_byte_loss(model, *_stacked(self.validation, indices))
            losses += [float(loss)] * len(indices)
        return mean(losses)


def _python_sources() -> Tensor:
    import platform

    corpus = Path(gettempdir()) / f"sdiloco-python-{platform.python_version()}.bin"
    if not corpus.exists():
        build_corpus(corpus)
    return torch.from_file(str(corpus), size=corpus.stat().st_size, dtype=torch.uint8)


def _stacked(windows: Windows, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns windows as a batch on the device of the text, all at once for an accelerator."""
    starts = (indices * (windows.stride * windows.context)).unsqueeze(1)
    bytes_ = windows.text[starts + torch.arange(windows.context + 1, device=starts.device)].long()
    return bytes_[:, :-1].contiguous(), bytes_[:, 1:].contiguous()


class Group:
    """A model and its inner optimizer."""

    def __init__(self, training: Training) -> None:
        self.model = training.model().to(training.device)
        self.optimizer = inner_optimizer(training, self.model)
        self.steps = 0
        self._training = training

    @property
    def lr(self) -> float:
        return self._training.lr * self._training.lr_factor(self.steps)

    def backward(self, tokens: Tensor, targets: Tensor, trained: int | None = None) -> None:
        """Computes the gradients of one inner step."""
        self.optimizer.zero_grad()
        loss = next_byte_loss(self.model, tokens[:trained], targets[:trained])
        if trained is not None and trained != len(tokens):
            loss = loss * (trained / len(tokens))
        loss.backward()

    def step(self) -> None:
        for options in self.optimizer.param_groups:
            options["lr"] = self.lr
        self.update()
        self.steps += 1

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self._training.clip)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


class OneByOne:
    """Trains groups one after the other, each on its part of a batch."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups

    @property
    def models(self) -> list[nn.Module]:
        return [group.model for group in self._groups]

    @property
    def optimizers(self) -> list[list[Optimizer]]:
        return [[group.optimizer] for group in self._groups]

    def step(self, batch: Sequence[Tensor], trained: Sequence[int]) -> None:
        """Takes an inner step in every group that trains a part of its windows."""
        tokens, targets = batch
        count = len(self._groups)
        parts = zip(tokens.chunk(count), targets.chunk(count), strict=True)
        for group, part, windows in zip(self._groups, parts, trained, strict=True):
            if windows:
                group.backward(*part, windows)
        for group, windows in zip(self._groups, trained, strict=True):
            if windows:
                group.step()

    def state_dict(self) -> list[dict[str, Any]]:
        return [group.state_dict() for group in self._groups]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        for group, saved in zip(self._groups, state, strict=True):
            group.load_state_dict(saved)


class AllAtOnce:
    """Trains all groups at once, as `StackedGroups` does."""

    def __init__(self, training: Training, groups: int) -> None:
        self._training = training
        self.models = [training.model().to(training.device) for _ in range(groups)]
        self.optimizers: list[list[Optimizer]] = []
        self._steps = 0
        self._stacked = StackedGroups(
            self.models,
            training.weight_decay,
            training.clip,
            is_mixed=training.precision == "bf16-mixed",
        )

    def step(self, batch: Sequence[Tensor], trained: Sequence[int]) -> None:
        assert all(trained), "all groups train in every step"
        lr = self._training.lr * self._training.lr_factor(self._steps)
        self._stacked.step(batch, lr)
        self._steps += 1

    def state_dict(self) -> list[dict[str, Any]]:
        return [{**self._stacked.state_dict(), "steps": self._steps}]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        (saved,) = state
        self._stacked.load_state_dict(saved)
        self._steps = saved["steps"]


def inner_optimizer(training: Training, model: nn.Module) -> Optimizer:
    if training.inner == "sgd":
        return SGD(model.parameters(), training.lr)
    if training.inner == "muon":
        return muon_and_adamw(model, training.lr, weight_decay=training.weight_decay)
    trainable = [p for p in model.parameters() if p.requires_grad]
    kind = GPA if training.inner == "gpa" else AdamW
    return adamw(trainable, training.lr, training.weight_decay, kind)


class Loop:
    """A training in progress: the groups, and the number of steps that they have taken."""

    def __init__(self, training: Training, text: Text) -> None:
        self._training = training
        self._text = text
        count = 1 if training.choices is None else training.groups
        self._groups: OneByOne | AllAtOnce
        if training.is_stacked:
            self._groups = AllAtOnce(training, count)
        else:
            self._groups = OneByOne([training.group() for _ in range(count)])
        self._streaming: Simulated | None = None
        self.step = 0
        if training.choices is not None:
            self._streaming = training.simulated(self._groups.models, self._groups.optimizers)

    def run(self, until: float = math.inf, steps: int | None = None) -> bool:
        """Trains to the end, or until a time of `time.time`; returns whether it reached the end."""
        training = self._training
        windows = training.groups * training.batch
        parts = training.groups if training.split == "by_file" else 1
        batches = self._text.batches(training.seed, windows, self.step, parts)
        last = training.steps if steps is None else steps
        while self.step < last:
            if time.time() >= until:
                return False
            self.train(*next(batches))
            self.step += 1
        return True

    def train(self, *batch: Tensor) -> None:
        trained = [len(batch[0])]
        if self._streaming is not None:
            numbers = range(len(self._groups.models))
            trained = [self._training.trained(number, self.step) for number in numbers]
        self._groups.step(batch, trained)
        if self._streaming is not None:
            idle = [number for number, windows in enumerate(trained) if not windows]
            self._streaming.step(trained=trained, idle=idle)

    def finish(self) -> nn.Module:
        """Ends the training; returns the resulting model."""
        if self._streaming is not None:
            self._streaming.finish()
        return self.model

    @property
    def model(self) -> nn.Module:
        return self._groups.models[0]

    @property
    def engines(self) -> Sequence[StreamingDiLoCo]:
        return [] if self._streaming is None else self._streaming.engines

    @property
    def traffic(self) -> Run:
        """Returns the bytes and launches of a group so far, averaged over all groups; empty with
        DDP.
        """
        counted = [engine.report() for engine in self.engines]
        names = ("bytes_sent", "launches") if counted else ()
        return {name: round(mean(report[name] for report in counted)) for name in names}

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "groups": self._groups.state_dict(),
            "engines": [engine.state_dict() for engine in self.engines],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self._groups.load_state_dict(state["groups"])
        for engine, saved in zip(self.engines, state["engines"], strict=True):
            engine.load_state_dict(saved)


class Clock:
    """The processor time and the seconds of a training, including earlier pieces."""

    def __init__(self) -> None:
        self._cpu_began = time.process_time()
        self._began = time.time()
        self.earlier = (0.0, 0.0)

    def spent(self) -> tuple[float, float]:
        cpu_earlier, earlier = self.earlier
        ended = time.time()
        cpu_seconds = cpu_earlier + time.process_time() - self._cpu_began
        return cpu_seconds, earlier + ended - self._began


def trained(training: Training, text: Text) -> nn.Module:
    loop = Loop(training, text)
    loop.run()
    return loop.finish()


@cache
def _text(size: Size, validation_windows: int, device: str, corpus: str) -> Text:
    return Text(size, validation_windows, device, corpus)


def made(training: Training, until: float = math.inf, state: Path | None = None) -> Run | None:
    """Trains and evaluates, from a saved state if there is one. If the time is up, it saves a state
    and returns None.
    """
    torch.set_num_threads(1)
    text = training.text()
    clock = Clock()
    loop = Loop(training, text)
    if state is not None and state.exists():
        saved = torch.load(state, weights_only=True)
        loop.load_state_dict(saved["loop"])
        clock.earlier = saved["spent"]
    if not loop.run(until):
        if state is not None and loop.step and training.can_go_on:
            _save({"loop": loop.state_dict(), "spent": clock.spent()}, state)
        return None
    loss = text.loss(loop.finish())
    cpu_seconds, seconds = clock.spent()
    run: Run = {
        **training.key(),
        "loss": loss,
        "steps": training.steps,
        "rounds": training.rounds,
        "tokens": training.tokens,
        **loop.traffic,
        "passes": round(training.tokens / (len(text.training) * training.size.context), 3),
        "cpu_seconds": round(cpu_seconds, 1),
        "seconds": round(seconds, 1),
    }
    if training.device == "cuda":
        run["gpu"] = torch.cuda.get_device_name()
    return run


def _save(state: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(state, unfinished)
    unfinished.replace(path)
