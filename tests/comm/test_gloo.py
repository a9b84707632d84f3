"""Process groups between the same ranks share a thread of gloo, and carry their messages as they would alone."""

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sdiloco.comm import GroupLayout, Topology, gloo
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


@pytest.mark.parametrize(("world_size", "groups"), [(2, 2), (3, 3), (4, 2), (2, 1)])
def test_all_that_goes_between_groups_needs_one_thread(world_size: int, groups: int) -> None:
    for before, after in run_ranks(met, world_size, groups):
        # One for the ranks of the group, one for its stages and its peers where it has several, one between groups.
        assert after - before <= (2 if world_size == groups else 4)


def test_where_torch_does_not_tell_its_devices_each_group_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "devices_of", lambda backend: [])
    run_ranks(met, 2, 2)
