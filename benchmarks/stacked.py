"""Combines the models of several groups into one for a GPU, because separate models would wait for
the launches of their small operations.

The parameters of all groups are in one tensor, and those of a group's model are views of it, so
values that an engine writes to its model are also in the tensor.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from typing_extensions import override


class StackedGPT(nn.Module):
    """The models of several groups, from bytes of shape ``(groups, batch, time)`` to logits of
    shape ``(groups, batch, time, 256)``.

    Args:
        models: The models, whose parameters become views of this model's.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.groups = len(models)
        model: Any = models[0]
        self.heads = int(model.blocks[0].heads)
        self.layers = len(model.blocks)
        named = [dict(model.named_parameters()) for model in models]
        for name, first in named[0].items():
            stacked = nn.Parameter(torch.stack([of_group[name].detach() for of_group in named]))
            for of_group, values in zip(named, stacked.detach(), strict=True):
                of_group[name].data = values
            kind = "matrices" if first.dim() > 1 else "vectors"
            self.register_parameter(f"{kind}_{name.replace('.', '_')}", stacked)

    @property
    def matrices(self) -> list[nn.Parameter]:
        return [values for name, values in self.named_parameters() if name.startswith("matrices")]

    @property
    def vectors(self) -> list[nn.Parameter]:
        return [values for name, values in self.named_parameters() if name.startswith("vectors")]

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        groups, batch, time = tokens.shape
        first_rows = torch.arange(groups, device=tokens.device) * 256
        table = self._matrices("byte_embedding").flatten(0, 1)
        x = F.embedding(tokens + first_rows[:, None, None], table)
        x = x + self._matrices("position_embedding")[:, None, :time]
        x = x.flatten(1, 2)
        for layer in range(self.layers):
            block = f"blocks_{layer}"
            normed = self._normed(x, f"{block}_attention_norm")
            x = x + self._linear(self._attention(normed, block, time), f"{block}_attention_out")
            inner = F.gelu(self._linear(self._normed(x, f"{block}_mlp_norm"), f"{block}_mlp_in"))
            x = x + self._linear(inner, f"{block}_mlp_out")
        logits = self._linear(self._normed(x, "norm"), "head")
        return logits.view(groups, batch, time, -1)

    def _matrices(self, name: str) -> Tensor:
        return self.get_parameter(f"matrices_{name}_weight")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return torch.bmm(x, self._matrices(name).mT)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self.get_parameter(f"vectors_{name}_weight")
        bias = self.get_parameter(f"vectors_{name}_bias")
        return F.layer_norm(x, x.shape[-1:]) * weight[:, None] + bias[:, None]

    def _attention(self, x: Tensor, block: str, time: int) -> Tensor:
        groups, tokens, width = x.shape
        qkv = self._linear(x, f"{block}_qkv")
        parts = qkv.view(groups * tokens // time, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(groups, tokens, width)


class StackedGroups:
    """Trains the models of several groups at once with AdamW, each on its part of a batch.

    On a GPU, the step is recorded and replayed.

    Args:
        models: The models of the groups.
        weight_decay: The weight decay of matrices.
        clip: The maximum norm of a group's gradient.
        is_mixed: Whether matrix products are in bfloat16, in which case the model is compiled on a
            GPU.
    """

    def __init__(
        self, models: Sequence[nn.Module], weight_decay: float, clip: float, *, is_mixed: bool
    ) -> None:
        self.net = StackedGPT(models)
        self._clip = clip
        self._is_mixed = is_mixed
        self._device = self.net.matrices[0].device
        self._is_recorded = self._device.type == "cuda"
        self._lr = torch.zeros((), device=self._device)
        decayed = {"params": self.net.matrices, "weight_decay": weight_decay}
        plain = {"params": self.net.vectors, "weight_decay": 0.0}
        self._optimizer = AdamW(
            [decayed, plain], lr=self._lr, betas=(0.9, 0.95), fused=True, capturable=True
        )
        self._loss: Any = self._summed_loss
        if self._is_recorded and is_mixed:
            self._loss = torch.compile(self._summed_loss, dynamic=False)
        self._windows: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def step(self, batch: Sequence[Tensor], lr: float) -> None:
        """Takes an inner step of all groups with windows of text and their next bytes."""
        self._lr.fill_(lr)
        parts = [windows.view(self.net.groups, -1, windows.shape[-1]) for windows in batch]
        if not self._is_recorded:
            self._train(parts)
            return
        if self._graph is None:
            self._record(parts)
            return
        for recorded, windows in zip(self._windows, parts, strict=True):
            recorded.copy_(windows)
        self._graph.replay()

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(state["optimizer"])
        for options in self._optimizer.param_groups:
            options["lr"] = self._lr

    def _record(self, parts: Sequence[Tensor]) -> None:
        """Takes an ordinary step, which allocates persistent memory, and then records the next
        one.
        """
        self._windows = [windows.clone() for windows in parts]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._train(self._windows)
        torch.cuda.current_stream().wait_stream(side)
        self._optimizer.zero_grad()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._train(self._windows)

    def _train(self, parts: Sequence[Tensor]) -> None:
        self._optimizer.zero_grad()
        mixed = torch.autocast(self._device.type, torch.bfloat16)
        with mixed if self._is_mixed else nullcontext():
            loss = self._loss(*parts)
        loss.backward()
        self._clip_each()
        self._optimizer.step()

    def _summed_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the sum over the groups, so that no group affects the gradient of another."""
        logits = self.net(tokens)
        mean = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        return mean * self.net.groups

    def _clip_each(self) -> None:
        gradients = [parameter.grad for parameter in self.net.parameters()]
        present = [gradient for gradient in gradients if gradient is not None]
        of_tensors = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in present]
        norms = torch.linalg.vector_norm(torch.stack(of_tensors), dim=0)
        factors = (self._clip / (norms + 1e-6)).clamp(max=1.0)
        for gradient in present:
            gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))
