"""Measures how well groups learn with each kind of untrained state: a codebook of moving averages
of the encoded values.

``python -m benchmarks.untrained`` trains an autoencoder with a codebook on data with 16 clusters,
and prints the error on all clusters for each kind, and for one group. Groups see either all
clusters or different ones.
"""

import argparse
from collections.abc import Sequence
from statistics import mean, stdev

import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups

WIDTH = 16
CLUSTERS = 16
CODES = 32
STEPS = 600


class Codebook(nn.Module):
    """Moving averages of how often each code was chosen, and of the sum of the values for which it
    was chosen.
    """

    counts: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.ones(CODES))
        self.register_buffer("sums", torch.randn(CODES, 8))


class Autoencoder(nn.Module):
    """Encodes, takes the nearest code, and decodes. Codes are moving averages of encoded values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.BatchNorm1d(WIDTH)
        self.encode = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.codebook = Codebook()

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encode(self.scale(x))
        codes = self.codebook.sums / self.codebook.counts[:, None]
        nearest = torch.cdist(encoded.detach(), codes).argmin(dim=1)
        if self.training:
            chosen = nn.functional.one_hot(nearest, CODES).float()
            self.codebook.counts.lerp_(chosen.sum(dim=0) + 1e-3, 0.02)
            self.codebook.sums.lerp_(chosen.T @ encoded.detach() + 1e-3 * codes, 0.02)
        quantised = codes[nearest]
        self.commitment = nn.functional.mse_loss(encoded, quantised)
        return self.decode(encoded + (quantised - encoded).detach())


def batch(
    centres: Tensor, clusters: Sequence[int], generator: torch.Generator, size: int = 64
) -> Tensor:
    picked = torch.randint(len(clusters), (size,), generator=generator)
    return centres[torch.tensor(clusters)[picked]] + 0.3 * torch.randn(
        size, WIDTH, generator=generator
    )


def error(groups: int, seed: int, kind: str | None, *, divided: bool) -> float:
    """Trains groups, and returns the error of the outer model on data of all clusters."""
    torch.manual_seed(seed)
    centres = 2 * torch.randn(CLUSTERS, WIDTH)
    models = [Autoencoder() for _ in range(groups)]
    untrained = {"codebook.*": kind} if kind else None
    together = SimulatedGroups(models, sync_every=20, overlap_steps=4, untrained=untrained)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in models]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            clusters = range(group, CLUSTERS, groups) if divided else range(CLUSTERS)
            x = batch(centres, clusters, generator)
            loss = nn.functional.mse_loss(model(x), x) + 0.25 * model.commitment
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        together.step()
    together.finish()
    model = models[0].eval()
    with torch.no_grad():
        x = batch(centres, range(CLUSTERS), generator, size=2048)
        return float(nn.functional.mse_loss(model(x), x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    choices = [
        (1, None),
        *((groups, kind) for groups in (2, 4) for kind in ("mean", "first", "own")),
    ]
    print(f"{'clusters':>10} {'groups':>8} {'kind':>8}   error")
    for divided in (False, True):
        for groups, kind in choices:
            errors = [error(groups, seed, kind, divided=divided) for seed in seeds]
            shown = f"{mean(errors):.3f} ± {stdev(errors) / len(errors) ** 0.5:.3f}"
            print(
                f"{'divided' if divided else 'all':>10} {groups:>8} {kind or '':>8}   {shown}",
                flush=True,
            )


if __name__ == "__main__":
    main()
