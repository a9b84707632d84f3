"""Process groups between the same ranks share a thread of gloo, and carry their messages as they would alone.

What travels arrives as it was: plain values, gradients, and what one of the ranks raises.
"""

import os
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco.comm.communicator import Communicator, decode, encode
from lightning_sdiloco.comm.topology import GroupLayout, Topology
from tests.ranks import run_ranks

TIMEOUT = timedelta(seconds=20)


def loops() -> int:
    """The threads of gloo that wait for connections, in this process."""
    tasks = Path("/proc/self/task").iterdir() if sys.platform == "linux" else ()
    return sum((task / "comm").read_text().strip() == "gloo_tcp_loop" for task in tasks)


def exchanged(exchange: Any, group: int, numel: int) -> None:
    """Sends a message to every group, and sees what each of them has sent."""
    message = torch.full((numel,), group + 1, dtype=torch.uint8)
    posted = exchange.post([message] * exchange.num_groups)
    for sender, received in enumerate(exchange.collect(posted, time.monotonic() + 20)):
        assert torch.equal(received, torch.full((numel,), sender + 1, dtype=torch.uint8))


def unequal(exchange: Any, rank: int, device: str = "cpu") -> None:
    """Messages of different sizes, of which several are on their way, reach their groups."""
    groups, sent, received = range(exchange.num_groups), exchange.bytes_sent, exchange.bytes_received

    def message(sender: int, to: int, turn: int) -> Tensor:
        return torch.full((to,), 10 * sender + to + 50 * turn, dtype=torch.uint8, device=device)

    posted = [exchange.post([message(rank, to, turn) for to in groups]) for turn in range(2)]
    for turn, one in enumerate(posted):
        for sender, values in enumerate(exchange.collect(one, time.monotonic() + 30)):
            assert values.tolist() == message(sender, rank, turn).tolist()
    assert exchange.bytes_sent - sent == 2 * sum(to for to in groups if to != rank)
    assert exchange.bytes_received - received == 2 * (len(groups) - 1) * rank


def met(rank: int, world_size: int, groups: int) -> int:
    before = loops()
    topology = Topology.of_world(GroupLayout(world_size, groups), TIMEOUT)
    for numel in (3, 300_001):
        for exchange in (topology.control, topology.progress, topology.exchange, topology.second_hop):
            exchanged(exchange, topology.group_index, numel)
    for stage in (*topology.stages, topology.in_group):
        assert torch.cat(stage.all_gather(torch.tensor([rank]))).tolist() == list(topology.ranks)
        assert stage.all_gather_object({"rank": rank}) == [{"rank": other} for other in topology.ranks]
    value = torch.tensor([float(rank)])
    topology.peers.broadcast(value)
    assert value.item() == topology.group_rank
    if groups == world_size:
        unequal(topology.exchange, rank)
        words_wait_for_no_payload(topology)
        used(rank, topology.in_group.process_group)
    return loops() - before


def words_wait_for_no_payload(topology: Topology) -> None:
    """The payload of the others is held back; what their hosts say arrives."""
    payload = [torch.zeros(1 << 20, dtype=torch.uint8)] * topology.num_groups
    posted = topology.exchange.post(payload) if topology.group_index == 0 else None
    exchanged(topology.control, topology.group_index, 3)
    dist.barrier()
    topology.exchange.collect(posted or topology.exchange.post(payload), time.monotonic() + 5)


def used(rank: int, group: Any) -> None:
    """The process group of a single rank does all that one of gloo does."""
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=group)
    dist.barrier(group=group)
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert (value.item(), objects) == (rank, [{"rank": rank}])
    layer = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=group)
    layer(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert layer.module.weight.grad.tolist() == [[rank + 1.0] * 2]
    metric = torchmetrics.MeanMetric(process_group=group)
    metric.update(float(rank))
    assert metric.compute() == rank


def met_elsewhere(rank: int, world_size: int) -> int:
    before = loops()
    with pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def elsewhere() -> Iterator[None]:
            chosen = os.environ["GLOO_SOCKET_IFNAME"]
            patch.delenv("GLOO_SOCKET_IFNAME")
            yield
            patch.setenv("GLOO_SOCKET_IFNAME", chosen)

        topology = Topology.of_world(GroupLayout(world_size, world_size), TIMEOUT, elsewhere)
    exchanged(topology.exchange, rank, 1000)
    return loops() - before


def test_process_groups_carry_their_messages_and_need_no_thread_but_that_of_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert max(run_ranks(met, 3, 3)) == 0
    # The ranks of a group of several use gloo as torch makes it.
    assert max(run_ranks(met, 4, 2)) <= 1
    if sys.platform == "linux":
        assert run_ranks(met_elsewhere, 2) == [1, 1], "what listens on another interface has a thread of its own"
    # Where torch does not tell its devices, each group has its own.
    monkeypatch.setattr("lightning_sdiloco.comm.topology.devices_of", lambda backend: [])
    run_ranks(met, 2, 2)


# What travels


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
