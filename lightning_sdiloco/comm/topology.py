"""The process groups of a rank, as communicators and exchanges: the only door to the network."""

import atexit
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.connections import Connection
from lightning_sdiloco.comm.exchange import DeviceBackend, DeviceExchange, DirectExchange, Exchange, InProcessExchange
from lightning_sdiloco.comm.gloo import SharedGloo
from lightning_sdiloco.comm.layout import GroupLayout
from lightning_sdiloco.comm.pacing import Pacing

STAGES = 3
"""Stages of a flight. Each has a communicator of its own among the ranks of the group."""


@dataclass(frozen=True)
class Topology:
    """All that a rank knows about the others: the only door to the network."""

    num_groups: int = 1
    group_index: int = 0
    group_size: int = 1
    group_rank: int = 0
    world: Communicator = field(default_factory=Communicator)
    peers: Communicator = field(default_factory=Communicator)
    in_group: Communicator = field(default_factory=Communicator)
    in_site: Communicator = field(default_factory=Communicator)
    stages: tuple[Communicator, ...] = field(default_factory=lambda: (Communicator(),) * STAGES)
    control: Exchange[Any] = field(default_factory=lambda: InProcessExchange.connect(1)[0])
    progress: Exchange[Any] = field(default_factory=lambda: InProcessExchange.connect(1)[0])
    exchange: Exchange[Any] = field(default_factory=lambda: InProcessExchange.connect(1)[0])
    second_hop: Exchange[Any] = field(default_factory=lambda: InProcessExchange.connect(1)[0])
    background: Callable[[torch.device], Any] | None = None

    @staticmethod
    def simulated(groups: int) -> list["Topology"]:
        """Returns the topologies of several worker groups of one rank each, all in this process."""
        control, progress, exchanges, second_hop = (InProcessExchange.connect(groups) for _ in range(4))
        return [
            Topology(
                num_groups=groups,
                group_index=group,
                control=control[group],
                progress=progress[group],
                exchange=exchanges[group],
                second_hop=second_hop[group],
            )
            for group in range(groups)
        ]

    @property
    def ranks(self) -> range:
        """The ranks of this group, numbered as in the world."""
        return range(self.group_index * self.group_size, (self.group_index + 1) * self.group_size)

    @property
    def rank(self) -> int:
        """The number of this rank in the world."""
        return self.ranks[self.group_rank]

    def is_stale(self) -> bool:
        """Returns whether the default process group is no longer the one for which this was made."""
        return self.world.process_group is not dist.group.WORLD

    @staticmethod
    def of_world(
        layout: GroupLayout,
        timeout: timedelta,
        joining: Callable[[], AbstractContextManager[None]] | None = None,
        on_device: DeviceBackend | None = None,
    ) -> "Topology":
        """Makes the process groups of this rank, once for each layout. All ranks must call it."""
        key = (layout, timeout, on_device)
        if key not in _made or _made[key].is_stale():
            _made[key] = Topology._make(layout, timeout, joining, on_device)
            _settle_at_exit()
        return _made[key]

    @staticmethod
    def _make(
        layout: GroupLayout,
        timeout: timedelta,
        joining: Callable[[], AbstractContextManager[None]] | None,
        on_device: DeviceBackend | None,
    ) -> "Topology":
        assert layout.world_size == dist.get_world_size(), "a layout is one of all ranks that are connected"
        rank = dist.get_rank()
        gloo = SharedGloo(dist.group.WORLD)
        shared = gloo if world().is_on_host else None
        # A rank that is a group by itself has a process group for those who ask for one, and sends nothing in it.
        in_group_backend = shared if layout.group_size == 1 else None
        in_group = in_site = Communicator(_own(rank, layout.worker_group_ranks(), in_group_backend, timeout))
        if layout.worker_groups == 1 and not in_group.is_on_host:
            in_site = Communicator(_own(rank, layout.worker_group_ranks(), "gloo", timeout))
        # A single rank needs no process group, and peers that are all ranks need none of their own.
        stages, peers = (Communicator(),) * STAGES, world()
        if layout.group_size > 1:
            ranks = layout.worker_group_ranks()
            # Twice the bound of a flight: a rank whose own exchange went well waits for one of its group whose did not.
            stages = tuple(Communicator(_own(rank, ranks, gloo, 2 * timeout)) for _ in range(STAGES))
        with joining() if joining else nullcontext():
            between = SharedGloo() if joining else gloo
            control, progress, exchange, second_hop = _exchanges(rank, layout, between, timeout, on_device)
            if layout.group_size > 1:
                peers = Communicator(_own(rank, layout.shard_groups(), between if shared else None, timeout))
        return Topology(
            num_groups=layout.worker_groups,
            group_index=layout.group_of(rank),
            group_size=layout.group_size,
            group_rank=layout.group_rank_of(rank),
            world=world(),
            peers=peers,
            in_group=in_group,
            in_site=in_site,
            stages=stages,
            control=control,
            progress=progress,
            exchange=exchange,
            second_hop=second_hop,
        )


# Process groups have threads and sockets, and torch keeps them until the default group is destroyed.
_made: dict[tuple[GroupLayout, timedelta, DeviceBackend | None], Topology] = {}


@functools.cache
def _settle_at_exit() -> None:
    """Gives gloo's threads a moment when the interpreter ends."""
    atexit.register(time.sleep, 0.2)


def mesh_of(layout: GroupLayout, device: str, data_parallel: int, tensor_parallel: int, timeout: timedelta) -> Any:
    """Makes a mesh of the ranks of this group, once for each shape. All ranks must call it."""
    shape = (layout.worker_groups, data_parallel, tensor_parallel)
    world, mesh = _meshes.get((shape, device, timeout), (None, None))
    if world is not dist.group.WORLD:
        names = ("worker_group", "data_parallel", "tensor_parallel")
        whole = init_device_mesh(device, shape, mesh_dim_names=names)
        for name in names[1:]:
            dist.distributed_c10d._set_pg_timeout(timeout, whole.get_group(name))
        mesh = whole["data_parallel", "tensor_parallel"]
        _meshes[shape, device, timeout] = (dist.group.WORLD, mesh)
    return mesh


_meshes: dict[Any, tuple[Any, Any]] = {}


def is_connected() -> bool:
    """Returns whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def world() -> Communicator:
    """Returns a communicator of all ranks of the default process group."""
    return Communicator(dist.group.WORLD)


def ranks_in(process_group: dist.ProcessGroup) -> list[int]:
    """Returns the ranks of a process group that somebody else has made, numbered as in the world."""
    return list(dist.get_process_group_ranks(process_group))


def store() -> Any:
    """Returns the store of the default process group, where a rank that fails leaves word; None if there is none."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _exchanges(
    rank: int, layout: GroupLayout, gloo: SharedGloo, timeout: timedelta, on_device: DeviceBackend | None
) -> tuple[Exchange[Any], Exchange[Any], Exchange[Any], Exchange[Any]]:
    """Makes the exchanges for control vectors, progress, outer gradients, and the means of the second hop."""

    def process_group(backend: str | SharedGloo) -> dist.ProcessGroup:
        return _own(rank, layout.shard_groups(), backend, 2 * timeout)

    if layout.worker_groups == 1:
        alone, *others = (InProcessExchange.connect(1)[0] for _ in range(4))
        return alone, others[0], others[1], others[2]
    both = process_group(gloo)
    control, progress = DirectExchange(both, both), DirectExchange(both, both, tag=1)
    if on_device is None:
        there = Connection.of_process()
        up, down = process_group(gloo), process_group(gloo)
        opened = Connection.of_process() - there
        # More or fewer are not those of gloo alone, or gloo connects later: TCP then sends as it does.
        pacing = Pacing(opened if len(opened) == 2 * (layout.worker_groups - 1) else set())
        # The second hop uses the connections of the first: a connection is fastest just after it has carried something.
        first, second = (DirectExchange(up, down, tag, pacing) for tag in range(2))
        return control, progress, first, second
    # One for each hop: two threads post outer gradients and means, in an order that may differ between ranks.
    on_devices = [DeviceExchange(process_group(on_device.name), on_device.device) for _ in range(2)]
    for one in on_devices:
        one.meet(time.monotonic() + timeout.total_seconds())
    return control, progress, on_devices[0], on_devices[1]


def _own(
    rank: int, all_ranks: list[list[int]], backend: str | SharedGloo | None, timeout: timedelta
) -> dist.ProcessGroup:
    """Makes a process group of every list of ranks, as all ranks must, and returns the one of this rank."""

    def made(ranks: list[int]) -> Any:
        if isinstance(backend, SharedGloo):
            return backend.process_group(ranks, timeout)
        return dist.new_group(ranks, timeout=timeout, backend=backend)

    return next(group for group, ranks in zip(list(map(made, all_ranks)), all_ranks, strict=True) if rank in ranks)
