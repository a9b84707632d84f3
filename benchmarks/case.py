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
    """A model, a virtual accelerator, and the settings that all methods with periodic exchanges
    share.

    Attributes:
        size: The model.
        fragments: The number of fragments, which have equally many blocks; parameters outside the
            blocks belong to the first and the last.
        batch: Windows of each group in a step.
        step_seconds: The duration of forward and backward.
        sync_every: H.
        overlap_steps: tau.
        mixing: alpha.
        compression: The compression of Streaming DiLoCo.
        outer_lr: The learning rate of torchft's outer optimizer.
    """

    size: Size
    fragments: int
    batch: int = 1
    step_seconds: float = 0.2
    sync_every: int = 20
    overlap_steps: int = 4
    mixing: float = 0.5
    compression: str = "fp4"

    # This is not a field, so it is the same in all cases of a class.
    outer_lr: ClassVar[float] = 0.4

    def net(self) -> nn.Module:
        """Returns the model, with the same initial weights on all ranks."""
        return self.size.make()

    def inner(self, parameters: Iterable[Any], updates: int | None = None) -> torch.optim.Optimizer:
        """Returns the inner optimizer, a cheap one, because it does not affect the comparison.

        Args:
            parameters: The parameters to train.
            updates: The steps over which a learning rate schedule extends. None: all of the run.
        """
        return torch.optim.SGD(parameters, lr=1e-3)

    def batches(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        return random_batches(self.size, self.batch, seed=rank)

    def stamps(self, net: nn.Module, rank: int) -> Stamps:
        """Returns the time stamps for a rank that trains this network."""
        return Stamps(self.step_seconds)

    def blocks(self, fragment: int) -> list[int]:
        """Returns the blocks of a fragment, strided as in the paper."""
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
