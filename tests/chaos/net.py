"""What is trained under faults, by whoever it is: the network, the batches of a site, and H."""

import torch
from torch import Tensor, nn

BATCH = 8
SYNC_EVERY = 20
OVERLAP_STEPS = 2
FEATURES, TARGETS = 16, 4


def network() -> nn.Sequential:
    """Returns 220,000 parameters in four layers, from the generator of torch."""
    widths = (FEATURES, 256, 512, 160, TARGETS)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.Sequential(*layers)


def samples(site: str) -> tuple[Tensor, Tensor]:
    """Returns the inputs and targets of a site, which differ from those of the others."""
    generator = torch.Generator().manual_seed(sum(map(ord, site)))
    return torch.randn(512, FEATURES, generator=generator), torch.randn(512, TARGETS, generator=generator)
