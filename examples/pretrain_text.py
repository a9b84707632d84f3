"""Trains a byte-level GPT on the source of Python's standard library; the strategy is one line in
the configuration.

    python examples/pretrain_text.py fit --config examples/configs/base.yaml --config
    examples/configs/ddp.yaml

From top to bottom, this file has the training module, the results that are written at the end, and
the command line. Nothing here depends on the strategy.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from gpt import GPT
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from muon import muon_and_adamw, require_muon
from text_data import StandardLibraryText
from torch import Tensor
from torchmetrics.text import Perplexity
from typing_extensions import override


class ByteGPT(LightningModule):
    """A byte-level GPT trained with AdamW, or with Muon for the matrices of its blocks.

    Args:
        layers: Blocks of the transformer.
        width: Size of the residual stream.
        heads: Attention heads per block; they share ``width``.
        context: Bytes that the model sees at once.
        lr: Learning rate after the warm-up.
        warmup_steps: Steps over which the learning rate rises from zero.
        schedule: The learning rate after the warm-up: a cosine decay to a tenth of ``lr``, or
            constant.
        weight_decay: Weight decay of matrices and embeddings; norms have none.
        optimizer: AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for
            the rest; see ``muon.py``.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        lr: float = 3e-3,
        warmup_steps: int = 40,
        schedule: Literal["cosine", "constant"] = "cosine",
        weight_decay: float = 0.1,
        optimizer: Literal["adamw", "muon"] = "adamw",
    ) -> None:
        super().__init__()
        if optimizer == "muon":
            require_muon()
        self.save_hyperparameters()
        self.optimizer = optimizer
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.schedule = schedule
        self.weight_decay = weight_decay
        self.net = GPT(layers, width, heads, context)
        self.perplexity = Perplexity()
        self.clock = Clock()
        self.val_losses: dict[int, float] = {}

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)[0]
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, logits = self.loss(batch)
        self.perplexity.update(logits, batch[1])
        # Both are means over all ranks, so every rank reads the same number.
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_perplexity", self.perplexity)

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the mean cross-entropy in nats per byte, and the logits."""
        tokens, targets = batch
        logits = self.net(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = (
            muon_and_adamw(self, self.lr, weight_decay=self.weight_decay)
            if self.optimizer == "muon"
            else self.adamw()
        )
        total_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.lr_factor(step, total_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def adamw(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def lr_factor(self, step: int, total_steps: int) -> float:
        """Returns the share of ``lr`` that is used at a step."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    @override
    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.clock.tick()

    @override
    def on_train_end(self) -> None:
        self.clock.tick()

    @override
    def on_validation_start(self) -> None:
        self.clock.pause()

    @override
    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.val_losses[self.trainer.global_step] = float(
                self.trainer.callback_metrics["val_loss"]
            )
        self.clock.resume()


class Clock:
    """Measures training time without validations. `tick` is called at the start of every step and
    at the end.
    """

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.paused_at = self.paused = 0.0

    def tick(self) -> None:
        self.ticks.append(time.perf_counter() - self.paused)

    def pause(self) -> None:
        self.paused_at = time.perf_counter()

    def resume(self) -> None:
        self.paused += time.perf_counter() - self.paused_at

    @property
    def seconds(self) -> float:
        return self.ticks[-1] - self.ticks[0]

    @property
    def step_seconds(self) -> float:
        """The median step time, so that steps with startup work or waits do not matter."""
        return median(after - before for before, after in pairwise(self.ticks))


def bytes_sent(trainer: Trainer, model: LightningModule) -> int:
    """Returns how many bytes this rank sent to the other ranks during the fit.

    Streaming DiLoCo counts them. DDP does not, so its bytes are computed for a ring all-reduce:
    each of n ranks sends 2 (n - 1) / n times the gradients in every step.
    """
    report = getattr(trainer.strategy, "report", None)
    if report is not None:
        return int(report()["bytes_sent"])
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return 2 * (trainer.world_size - 1) * gradients * trainer.global_step // trainer.world_size


def fingerprint(model: LightningModule) -> str:
    """Returns a digest of all parameters, which is equal for equal bits."""
    return hashlib.sha256(
        b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    ).hexdigest()


class StepCount(Callback):
    """Prints the inner steps during training, for programs that draw their own progress bar."""

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero and (
            trainer.global_step % 20 == 0 or trainer.global_step == trainer.max_steps
        ):
            print(f"step {trainer.global_step}", flush=True)


class PretrainCLI(LightningCLI):
    """The command line, with one ``context`` for data and model, and a file of results on
    request.
    """

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.context", "model.context")
        parser.add_argument(
            "--result",
            type=str | None,
            default=None,
            help="JSON file to write results to after fit.",
        )

    def after_fit(self) -> None:
        """Validates the trained module, and writes the results if ``--result`` names a file."""
        path = self.config.fit.result
        if path is None:
            return
        metrics = self.trainer.validate(self.model, self.datamodule, verbose=False)[0]
        if self.trainer.is_global_zero:
            Path(path).write_text(
                json.dumps(self.summary(metrics), indent=2) + "\n", encoding="utf-8"
            )

    def summary(self, metrics: Any) -> dict[str, Any]:
        """Returns the trained model's description, the duration, and the loss by step."""
        steps = self.trainer.global_step
        data = self.datamodule
        tokens = steps * self.trainer.world_size * data.batch_size * data.context
        return {
            **metrics,
            "val_losses": {**self.model.val_losses, steps: metrics["val_loss"]},
            "steps": steps,
            "ranks": self.trainer.world_size,
            "tokens": tokens,
            "passes": tokens / (len(data.training) * data.context),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "shapes": {name: list(p.shape) for name, p in self.model.named_parameters()},
            "bytes_sent": bytes_sent(self.trainer, self.model),
            "sha256": fingerprint(self.model),
            "train_seconds": self.model.clock.seconds,
            "step_seconds": self.model.clock.step_seconds,
        }


def prepare_process() -> None:
    """Gives each rank one thread on machines without a GPU, and suppresses warnings that do not
    apply to this example.
    """
    if not torch.cuda.is_available():
        # Ranks share the cores of one machine; more threads would wait for each other and take many
        # times longer.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated.*")
    # The validation set divides evenly between the ranks, so no window is counted twice.
    warnings.filterwarnings("ignore", message=".*it is recommended to use.*devices=1.*")


def main() -> None:
    prepare_process()
    PretrainCLI(ByteGPT, StandardLibraryText, auto_configure_optimizers=False)
    # gloo's threads release the tensors of the last collective a little later, for which they need
    # the interpreter.
    time.sleep(0.2)


if __name__ == "__main__":
    main()
