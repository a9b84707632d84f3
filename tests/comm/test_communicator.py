"""What travels between ranks arrives as it was: plain values, gradients, and what one of them raises."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from lightning_sdiloco.comm.communicator import Communicator, decode, encode
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


def test_values_and_gradients_are_those_of_torch_over_the_ranks_of_the_group_and_all_hear_what_one_raises() -> None:
    """Also of a group of one, and of a process that has joined no other."""

    def grouped(rank: int, world_size: int, size: int) -> Any:
        def act() -> int:
            if rank == 1:
                raise FileNotFoundError(2, "No such file", "model")
            return 10 * rank

        every = Communicator(dist.group.WORLD).attempt(act)
        assert [type(one.raised) for one in every if one.raised] == [FileNotFoundError] * (rank == 1)
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
        gather = Communicator(groups[rank // size]).all_gather_with_gradients
        return [one[:3] for one in every], derivatives(gather, rank)

    def alone(rank: int, world_size: int, first: int) -> list[Tensor]:
        return derivatives(lambda x: torch.stack(all_gather(x)), first + rank)

    failure = ("FileNotFoundError", "OSError", "Exception", "BaseException", "object")
    for size, groups in ((1, 2), (3, 1), (2, 2)):
        expected = [own for group in range(groups) for own in run_ranks(alone, size, size * group)]
        for (heard, one), other in zip(run_ranks(grouped, size * groups, size), expected, strict=True):
            assert all(map(torch.equal, one, other))
            assert heard[0] == (0, (), "")
            assert heard[1] == (None, failure, "[Errno 2] No such file: 'model'")
            assert heard[2:] == [(10 * of, (), "") for of in range(2, size * groups)]
    gathered, gradient, _ = derivatives(Communicator().all_gather_with_gradients, 0)
    assert gathered.shape == (1, 3, 5)
    assert gradient.abs().sum() > 0


def test_plain_values_arrive_as_they_were() -> None:
    value = {
        "none": [None, True, False, 3, -(1 << 80), 0.1, float("inf"), "ü\ud800"],
        (1, "key"): ({2, 3}, b"bytes", b"", [], ()),
        4: {"nested": {"deeper": [[]]}},
    }
    assert decode(encode(value)) == value
    assert [type(one) for one in decode(encode([True, 1, 1.0]))] == [bool, int, float]


def test_tensors_arrive_bit_for_bit_with_shape_and_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64):
        tensors = [torch.randn(3, 4).to(dtype).T, torch.zeros(0, 2, dtype=dtype), torch.ones((), dtype=dtype)]
        for sent, arrived in zip(tensors, decode(encode(tensors)), strict=True):
            assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
            assert torch.equal(arrived, sent)
            arrived.zero_()  # it may be written to
    sent = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    assert decode(encode(sent)).view(torch.int32).item() == 0x7FC12345, "a NaN keeps its bits"


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("it was executed",)


def test_what_is_no_plain_value_is_neither_sent_nor_read() -> None:
    for value in (object(), ValueError("text"), torch.float32, lambda: None, {1: [object()]}):
        with pytest.raises(TypeError, match="only plain values travel"):
            encode(value)
    framed = (
        "{}",
        '["call", "os.system"]',
        '["bytes", 99]',
        '["tensor", 0, "float32", 1000000]',
        '["tensor", -1, "torch.float32"]',
        '["dict", 1]',
        "[" * 100000,
    )
    for data in (b"", pickle.dumps(Bomb()), *(len(text).to_bytes(8, "little") + text.encode() for text in framed)):
        with pytest.raises(ValueError, match="no plain value"):
            decode(data)
