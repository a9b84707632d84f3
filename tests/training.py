"""Small models that several test files train, and batches that depend on the group and the step."""

from itertools import pairwise

import torch
from torch import Tensor, nn


def tanh_network(*widths: int) -> nn.Sequential:
    """Linear layers between these widths, with a tanh after each but the last."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def mlp(seed: int = 0) -> nn.Sequential:
    """Four layers of 61 and more parameters, so that no shard has a round size."""
    torch.manual_seed(seed)
    return tanh_network(5, 11, 7, 9, 3)


LAYERS = [["0.*"], ["2.*"], ["4.*"], ["6.*"]]
"""The layers of `mlp`, each a fragment."""


def batch(group: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch of a group, the same in every process."""
    generator = torch.Generator().manual_seed(1_000 * group + step)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)


def inner_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An inner optimizer by name; Muon for the matrices and AdamW for the vectors, as one, where
    torch has Muon.
    """
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    if name == "whole":
        return torch.optim.SGD(model.parameters(), lr=1.0)
    if name == "muon" and hasattr(torch.optim, "Muon"):
        import benchmarks.models  # noqa: F401  (puts the examples on the path)
        from muon import MuonAndAdamW  # isort: skip

        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() != 2]
        muon = torch.optim.Muon(matrices, lr=0.01)
        return MuonAndAdamW(muon, torch.optim.AdamW(vectors, lr=0.01))
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, group: int, step: int) -> None:
    """The gradients of one inner step."""
    x, y = batch(group, step)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, group: int, step: int) -> None:
    """One inner step."""
    backward(model, optimizer, group, step)
    optimizer.step()
