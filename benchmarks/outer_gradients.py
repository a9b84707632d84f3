"""Makes outer gradients to measure with: of a small language model in training, and synthetic ones that are harder."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Replicas = list[Tensor]
"""One flat float32 vector per replica."""


@dataclass(frozen=True)
class Training:
    """How the real outer gradients are made: DiLoCo on two replicas, SGD with Nesterov momentum outside."""

    width: int = 128
    layers: int = 4
    context: int = 128
    batch: int = 4
    rounds: int = 24
    sync_every: int = 20
    learning_rate: float = 1e-3
    outer_learning_rate: float = 0.4
    outer_momentum: float = 0.9


QUICK = Training(width=32, layers=2, context=32, rounds=3, sync_every=5)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(part) for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class ByteGPT(nn.Module):
    """A byte-level language model of fewer than a million parameters."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def loss(self, text: Tensor) -> Tensor:
        hidden = self.tokens(text[:, :-1]) + self.positions.weight
        logits = self.head(self.norm(self.blocks(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def corpus(limit: int = 8 << 20) -> Tensor:
    """The source of the standard library as bytes: real text that every machine has."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def batches(text: Tensor, training: Training, seed: int) -> Iterator[Tensor]:
    """Endless random windows of the text, shape ``(batch, context + 1)``."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - training.context - 1, (training.batch, 1), generator=generator)
        yield text[starts + torch.arange(training.context + 1)]


class Replica:
    """A model with its own data and its own inner optimizer."""

    def __init__(self, training: Training, text: Tensor, seed: int) -> None:
        torch.manual_seed(0)
        self.model = ByteGPT(training.width, training.layers, training.context)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.learning_rate)
        self.data = batches(text, training, seed)

    def read(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def run(self, outer: Tensor, steps: int) -> Tensor:
        """Starts from the outer parameters and returns the outer gradient after some inner steps."""
        nn.utils.vector_to_parameters(outer.clone(), self.model.parameters())
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model.loss(next(self.data)).backward()
            self.optimizer.step()
        return outer - self.read()


def outer_gradients(training: Training, groups: int = 2) -> list[Replicas]:
    """Trains so many replicas, with DiLoCo, and returns their outer gradients of every round."""
    text = corpus()
    replicas = [Replica(training, text, seed) for seed in range(1, groups + 1)]
    outer = nn.Parameter(replicas[0].read())
    optimizer = torch.optim.SGD(
        [outer], lr=training.outer_learning_rate, momentum=training.outer_momentum, nesterov=True
    )
    rounds = []
    for _ in range(training.rounds):
        gradients = [replica.run(outer.detach(), training.sync_every) for replica in replicas]
        outer.grad = torch.stack(gradients).mean(0)
        optimizer.step()
        rounds.append(gradients)
    return rounds


def heavy_tails(numel: int) -> dict[str, Replicas]:
    """Vectors with heavy tails, a pair of replicas each."""
    generator = torch.Generator().manual_seed(0)
    normal = [torch.randn(2, numel, generator=generator) for _ in range(5)]
    student = normal[0] / (torch.stack(normal[1:4]).square().mean(0)).sqrt()
    return {"student-t, 3 d.o.f.": list(student), "normal * exp(normal)": list(normal[0] * normal[4].exp())}
