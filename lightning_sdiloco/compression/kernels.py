"""How the two long passes over a shard are run: by operations of torch, one after the other."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sdiloco.compression.base import Compression
from lightning_sdiloco.memory import new_vector


class Kernels:
    """Encodes shards and takes their means."""

    name = "eager"

    def encode(self, values: Tensor, compression: Compression) -> Tensor:
        """Encodes as `Compression.encode` does."""
        return compression.encode(values)

    def mean(
        self, payloads: Sequence[Tensor], factors: Mapping[int, float], compression: Compression, like: Tensor
    ) -> Tensor:
        """Returns the float32 mean of the groups that count, those of ``factors``, as `Compression.mean` takes it."""
        mean = new_vector(like.numel(), like.device)
        compression.mean([(payloads[group], factor) for group, factor in factors.items()], mean)
        return mean


EAGER = Kernels()
"""The only kind."""


def kernels_for(device: torch.device) -> Kernels:
    """Returns the kernels for a device."""
    return EAGER


def missing_for(device: torch.device) -> str:
    """Returns what this installation lacks for a device: nothing."""
    return ""
