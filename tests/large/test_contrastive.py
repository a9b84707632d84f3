"""A contrastive encoder gathers its negatives over the worker group, with the gradients of DDP over the same ranks."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests import fits
from tests.large.models import batch, wide
from tests.large.test_first_round import warnings_of
from tests.ranks import run_processes

pytestmark = [pytest.mark.large, pytest.mark.timeout(180)]

STEPS = 2


class Contrastive(pl.LightningModule):
    """An encoder of 220,000 parameters whose loss compares the embeddings of all ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder, self.gradients = wide(), list[list[Tensor]]()

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        views = self.encoder(parts[0]), self.encoder(parts[0] + 0.1 * parts[0].roll(1, dims=-1))
        one, other = (nn.functional.normalize(view, dim=-1) for view in views)
        ones, others = self.all_gather({"one": one, "other": other}, sync_grads=True).values()
        logits = ones.flatten(0, 1) @ others.flatten(0, 1).T / 0.1
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def gradients(rank: int, world_size: int, strategy: Any, group: int, size: int) -> Any:
    """The gradients of every step on one rank, and what was said of gathering."""
    said, module = warnings_of(), Contrastive(seed=0)
    steps = [tuple(part.chunk(size)[rank % size] for part in batch(group, step)) for step in range(STEPS)]
    trainer = fits.trainer(strategy=strategy, devices=world_size, max_steps=STEPS)
    trainer.fit(module, torch.utils.data.DataLoader(steps, batch_size=None))  # type: ignore[arg-type]
    return module.gradients, [text for text in said if "all_gather" in text]


def test_the_gradients_of_a_contrastive_loss_are_those_of_ddp_over_the_ranks_of_the_group() -> None:
    def ours(rank: int, world_size: int) -> Any:
        return gradients(rank, world_size, fits.strategy(worker_groups=2), group=rank // 2, size=2)

    ranks = run_processes(ours, 4)
    for group in (0, 1):
        alone = run_processes(gradients, 2, "ddp", group, 2)
        for one, other in zip(ranks[2 * group : 2 * group + 2], alone, strict=True):
            assert len(one[0]) == STEPS
            for step, expected in zip(one[0], other[0], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(step, expected, strict=True))
                assert sum(gradient.abs().sum() for gradient in step) > 0
    assert not torch.equal(ranks[0][0][0][0], ranks[2][0][0][0])
    assert ["over the ranks of the worker group (here 2)" in text for text in ranks[0][1]] == [True]
    assert [said for _, said in ranks[1:]] == [[], [], []]
