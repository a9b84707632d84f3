"""Gathering with gradients inside a group gives the bits of ``torch.distributed.nn`` over a world of the same ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from lightning_sdiloco.comm import Communicator
from tests.ranks import run_ranks


def derivatives(gather: Any, rank: int) -> list[Tensor]:
    """Values, gradients and gradients of gradients of a function of what all ranks hold."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 5, generator=generator, requires_grad=True)
    gathered = gather(x)
    loss = (gathered.sin() * (1 + rank + torch.arange(len(gathered)))[:, None, None]).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None
    return [gathered.detach(), gradient.detach(), x.grad]


def test_values_and_gradients_are_those_of_torch_over_the_ranks_of_the_group() -> None:
    """Also of a group of one, and of a process that has joined no other."""

    def grouped(rank: int, world_size: int, size: int) -> list[Tensor]:
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
        return derivatives(Communicator(groups[rank // size]).all_gather_with_gradients, rank)

    def alone(rank: int, world_size: int, first: int) -> list[Tensor]:
        return derivatives(lambda x: torch.stack(all_gather(x)), first + rank)

    for size, groups in ((1, 2), (3, 1), (2, 2)):
        expected = [own for group in range(groups) for own in run_ranks(alone, size, size * group)]
        for one, other in zip(run_ranks(grouped, size * groups, size), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    gathered, gradient, _ = derivatives(Communicator().all_gather_with_gradients, 0)
    assert gathered.shape == (1, 3, 5)
    assert gradient.abs().sum() > 0


def tried(rank: int, world_size: int) -> list[Any]:
    def act() -> int:
        if rank == 1:
            raise FileNotFoundError(2, "No such file", "model")
        return 10 * rank

    every = Communicator(dist.group.WORLD).attempt(act)
    assert [type(one.raised) for one in every] == [
        FileNotFoundError if rank == of == 1 else type(None) for of in range(3)
    ]
    return [one[:3] for one in every]


def test_what_one_rank_raises_all_ranks_hear() -> None:
    failure = ("FileNotFoundError", "OSError", "Exception", "BaseException", "object")
    expected = [(0, (), ""), (None, failure, "[Errno 2] No such file: 'model'"), (20, (), "")]
    assert run_ranks(tried, 3) == [expected] * 3
