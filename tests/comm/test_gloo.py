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
    return sum((task / "comm").read_text().strip() == "gloo_tcp_loop" for task in Path("/proc/self/task").iterdir())


def exchanged(exchange: Any, group: int, numel: int) -> list[Tensor]:
    message = torch.full((numel,), group + 1, dtype=torch.uint8)
    posted = exchange.post([message] * exchange.num_groups)
    return list(exchange.collect(posted, time.monotonic() + 20))


def met(rank: int, world_size: int, groups: int) -> tuple[int, int]:
    before = loops() if sys.platform == "linux" else 0
    topology = Topology.of_world(GroupLayout(world_size, groups), TIMEOUT)
    for numel in (3, 300_001):
        for exchange in (topology.control, topology.progress, topology.exchange, topology.second_hop):
            for group, message in enumerate(exchanged(exchange, topology.group_index, numel)):
                assert torch.equal(message, torch.full((numel,), group + 1, dtype=torch.uint8))
    for stage in (*topology.stages, topology.in_group):
        gathered = stage.all_gather(torch.tensor([rank]))
        assert torch.cat(gathered).tolist() == list(topology.ranks)
        assert stage.all_gather_object({"rank": rank}) == [{"rank": other} for other in topology.ranks]
    value = torch.tensor([float(rank)])
    topology.peers.broadcast(value)
    assert value.item() == topology.group_rank
    return before, loops() if sys.platform == "linux" else 0


@pytest.mark.parametrize(("world_size", "groups", "own"), [(3, 3, 0), (4, 2, 1)])
def test_all_process_groups_need_no_thread_but_that_of_the_world(world_size: int, groups: int, own: int) -> None:
    for before, after in run_ranks(met, world_size, groups):
        # The ranks of a group of several use gloo as torch makes it.
        assert after - before <= own


def met_elsewhere(rank: int, world_size: int) -> tuple[int, int]:
    before = loops()
    with pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def elsewhere() -> Iterator[None]:
            chosen = os.environ["GLOO_SOCKET_IFNAME"]
            patch.delenv("GLOO_SOCKET_IFNAME")
            yield
            patch.setenv("GLOO_SOCKET_IFNAME", chosen)

        topology = Topology.of_world(GroupLayout(world_size, world_size), TIMEOUT, elsewhere)
    for group, message in enumerate(exchanged(topology.exchange, rank, 1000)):
        assert torch.equal(message, torch.full((1000,), group + 1, dtype=torch.uint8))
    return before, loops()


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces can be chosen on Linux only")
def test_what_listens_on_another_interface_has_a_thread_of_its_own() -> None:
    assert run_ranks(met_elsewhere, 2) == [(1, 2), (1, 2)]


def used(rank: int, world_size: int) -> None:
    group = Topology.of_world(GroupLayout(world_size, world_size), TIMEOUT).in_group.process_group
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


def test_the_process_group_of_a_single_rank_does_all_that_one_of_gloo_does() -> None:
    run_ranks(used, 2)


def test_where_torch_does_not_tell_its_devices_each_group_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sdiloco.comm.topology.devices_of", lambda backend: [])
    run_ranks(met, 2, 2)
