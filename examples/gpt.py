"""A byte-level GPT, the network of the examples and of the benchmarks, without training code."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

BYTE_VALUES = 256


class Block(nn.Module):
    """One layer of the transformer: causal attention, then a two-layer perceptron, each with a
    residual connection.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self.attention(self.attention_norm(x)))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def attention(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = (
            self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)


class GPT(nn.Module):
    """Maps bytes of shape ``(batch, time)`` to logits of shape ``(batch, time, 256)`` for the next
    byte at each position.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(BYTE_VALUES, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTE_VALUES, bias=False)
        self.initialize(layers)

    @torch.no_grad()
    def initialize(self, layers: int) -> None:
        """Draws weights as GPT-2 does: the deeper the network, the smaller the initial additions to
        the residual stream.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                writes_to_stream = name.endswith(("attention_out.weight", "mlp_out.weight"))
                parameter.normal_(std=0.02 / math.sqrt(2 * layers) if writes_to_stream else 0.02)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
