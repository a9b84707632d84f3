"""The model that the benchmarks train, which is the one of the examples in several sizes.

The examples are scripts, not a package, so their folder is added to the path. All benchmarks share
their model and text.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path += [str(EXAMPLES), str(EXAMPLES / "methods")]

from gpt import GPT  # noqa: E402


@dataclass(frozen=True)
class Size:
    """The shape of a model."""

    layers: int
    width: int
    heads: int
    context: int

    def make(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return GPT(self.layers, self.width, self.heads, self.context)


TINY = Size(layers=2, width=32, heads=2, context=16)
"""31,000 parameters, to test whether something runs at all."""

SMALL = Size(layers=3, width=48, heads=3, context=128)
"""0.11 million parameters."""

DEMO = Size(layers=4, width=128, heads=4, context=128)
"""0.87 million parameters, the default of examples/pretrain_text.py."""

TEN_MILLION = Size(layers=6, width=384, heads=6, context=128)
"""10.9 million parameters."""


def next_byte_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy in nats per byte."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def adamw(
    parameters: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float,
    kind: Callable[..., AdamW] = AdamW,
) -> AdamW:
    """Returns the inner optimizer of all trainings whose loss is compared, or a similar one; norms
    have no weight decay.
    """
    all_parameters = list(parameters)
    matrices = [p for p in all_parameters if p.dim() > 1]
    vectors = [p for p in all_parameters if p.dim() <= 1]
    parts = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return kind(parts, lr=lr, betas=(0.9, 0.95), fused=True)


def lr_factor(step: int, steps: int, warmup: int) -> float:
    """Returns the schedule of examples/pretrain_text.py: a warm-up, then a cosine decay to a
    tenth.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def random_batches(size: Size, batch: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the same few batches of random bytes repeatedly; the content does not affect time,
    bytes or memory.
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(256, (8, batch, size.context + 1), generator=generator)
    while True:
        for windows in text:
            yield windows[:, :-1], windows[:, 1:]
