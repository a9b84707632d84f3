"""Process groups between the same ranks share a thread of gloo, and carry their messages as they would alone."""

import os
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
from torch.nn.parallel import DistributedDataParallel

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
    numbers = [torch.full((3,), topology.group_index + 1, dtype=torch.uint8)] * topology.num_groups
    payload = [torch.zeros(1 << 20, dtype=torch.uint8)] * topology.num_groups
    words = topology.control.post(numbers)
    posted = topology.exchange.post(payload) if topology.group_index == 0 else None
    said = topology.control.collect(words, time.monotonic() + 5)
    assert [int(one[0]) for one in said] == [group + 1 for group in range(topology.num_groups)]
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
