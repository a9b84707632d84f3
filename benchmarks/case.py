"""The model and data that all methods train over slow links. This module needs only torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.models import Size, random_batches
from benchmarks.stamps import Stamps


@dataclass(frozen=True)
class Case:
    """A model, a virtual accelerator, and what all methods that exchange now and then have in
    common.

    Attributes:
        size: The model.
        fragments: Number of fragments, of equally many blocks; what stands outside goes with the
            first and the last.
        batch: Windows of each group in a step.
        step_seconds: How long forward and backward take.
        sync_every: H.
        overlap_steps: tau.
        mixing: alpha.
        compression: That of ours.
        outer_lr: Learning rate of the outer optimizer of torchft.
    """

    size: Size
    fragments: int
    batch: int = 1
    step_seconds: float = 0.2
    sync_every: int = 20
    overlap_steps: int = 4
    mixing: float = 0.5
    compression: str = "fp4"

    # No field, and so the same in all cases of a class.
    outer_lr: ClassVar[float] = 0.4

    def net(self) -> nn.Module:
        """The model; all ranks start alike."""
        return self.size.make()

    def inner(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """The inner optimizer: a cheap one, since it has no part in what is compared."""
        return torch.optim.SGD(parameters, lr=1e-3)

    def batches(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        return random_batches(self.size, self.batch, seed=rank)

    def stamps(self, net: nn.Module, rank: int) -> Stamps:
        """Takes the times of a rank, which trains this network."""
        return Stamps(self.step_seconds)

    def blocks(self, fragment: int) -> list[int]:
        """The blocks of a fragment, strided as in the paper."""
        return list(range(fragment, self.size.layers, self.fragments))

    def patterns(self, prefix: str) -> list[list[str]]:
        cut = [
            [f"{prefix}blocks.{block}.*" for block in self.blocks(p)] for p in range(self.fragments)
        ]
        cut[0] += [f"{prefix}byte_embedding.*", f"{prefix}position_embedding.*"]
        cut[-1] += [f"{prefix}norm.*", f"{prefix}head.*"]
        return cut

    def modules(self, net: Any) -> list[list[nn.Module]]:
        cut = [[net.blocks[block] for block in self.blocks(p)] for p in range(self.fragments)]
        cut[0] += [net.byte_embedding, net.position_embedding]
        cut[-1] += [net.norm, net.head]
        return cut
