"""Which rank is in which worker group, and the process groups between them, as communicators and
exchanges.
"""

import atexit
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from numbers import Integral
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_sdiloco.comm.communicator import SHARED, Communicator
from lightning_sdiloco.comm.exchange import (
    DeviceBackend,
    DeviceExchange,
    DirectExchange,
    Exchange,
    InProcessExchange,
)
from lightning_sdiloco.comm.pacing import Connection, Pacing

STAGES = 3
"""Stages of a flight. Each has its own communicator among the ranks of the group."""


@dataclass(frozen=True)
class GroupLayout:
    """Assigns the ranks of a world to worker groups: consecutive ranks form a group.

    Examples:
        >>> layout = GroupLayout(world_size=4, worker_groups=2)
        >>> layout.group_size, layout.group_of(3), layout.group_rank_of(3)
        (2, 1, 1)
        >>> layout.worker_group_ranks(), layout.shard_groups()
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """

    world_size: int
    worker_groups: int

    def __post_init__(self) -> None:
        if self.world_size % self.worker_groups:
            fitting = [m for m in range(1, self.world_size + 1) if self.world_size % m == 0]
            raise ValueError(
                f"worker_groups={self.worker_groups} cannot split {self.world_size} processes into"
                f" groups of equal size. With {self.world_size} processes it can be one of"
                f" {fitting}. Change worker_groups, or the number of devices or nodes."
            )

    @property
    def group_size(self) -> int:
        """Number of ranks in a group (G), which is also the number of shards of a fragment."""
        return self.world_size // self.worker_groups

    def group_of(self, rank: int) -> int:
        return rank // self.group_size

    def group_rank_of(self, rank: int) -> int:
        """Returns the number of a rank in its group, which is also the number of the shard that it
        exchanges.
        """
        return rank % self.group_size

    def worker_group_ranks(self) -> list[list[int]]:
        return [
            list(range(g * self.group_size, (g + 1) * self.group_size))
            for g in range(self.worker_groups)
        ]

    def shard_groups(self) -> list[list[int]]:
        """Returns, for every shard, the ranks that exchange it, in the order of their groups."""
        return [
            list(range(shard, self.world_size, self.group_size)) for shard in range(self.group_size)
        ]


def checked_worker_groups(worker_groups: Any) -> int | Literal["auto"]:
    """Returns its argument, if it is a possible number of worker groups or ``"auto"``."""
    if isinstance(worker_groups, str) and worker_groups == "auto":
        return "auto"
    is_whole = isinstance(worker_groups, Integral) and not isinstance(worker_groups, bool)
    if not is_whole or worker_groups < 1:
        kind = "a whole number" if isinstance(worker_groups, float) else "a number"
        fault = (
            "out of range" if is_whole else f"of type {type(worker_groups).__name__}, not {kind}"
        )
        raise ValueError(
            f"worker_groups={worker_groups!r} is {fault}: it must be a whole number of at least 1,"
            " or 'auto' for one group per node (per device on a single node). Choose one of them."
        )
    return int(worker_groups)


def require_backend(backend: str | None) -> None:
    """Refuses a backend of process groups that torch does not know, such as a misspelt one."""
    known = [
        name for name in dist.Backend.backend_list if name not in (dist.Backend.UNDEFINED, "fake")
    ]
    # "cpu:gloo,cuda:nccl" names one for each kind of device.
    named = (
        []
        if backend is None
        else [part.rpartition(":")[2].lower() for part in str(backend).split(",")]
    )
    unknown = [name for name in named if name not in dist.Backend.backend_list]
    if unknown:
        raise ValueError(
            f"process_group_backend={backend!r} names the backend {unknown[0]!r}, which torch does"
            f" not know. It knows {', '.join(known)}, also as in 'cpu:gloo,cuda:nccl'. Choose one"
            " of them, leave it out for that of the device, or import the package that brings"
            " another one first."
        )


# Process groups of gloo that share one thread


class SharedGloo:
    """Makes process groups that share a device, as gloo calls the thread and the address of its
    connections.

    gloo gives each process group a thread, which wakes up a hundred times a second whether or not
    anything travels: with eight of them that is as much processor time as all flights of a large
    model. So they share the default group's
    thread, unless they listen on another interface: without that, flights of eight groups on two
    cores take 1.07 times as long, of two and four just as long. A connection still belongs to one
    process group, so no message waits behind one of another group.
    """

    def __init__(self, like: dist.ProcessGroup | None = None) -> None:
        self._devices: list[Any] = []
        with suppress(RuntimeError):  # there is no gloo in it
            self._devices = (
                [] if like is None else devices_of(like._get_backend(torch.device("cpu")))
            )
        if not hasattr(dist.Backend, SHARED.upper()):
            # The devices that gloo itself knows.
            dist.Backend.register_backend(
                SHARED, SharedGloo._made, extended_api=True, devices=["cpu", "cuda"]
            )

    def process_group(self, ranks: Sequence[int], timeout: timedelta) -> Any:
        """Makes a process group, as all ranks of the world must at the same time; see
        ``dist.new_group``.
        """
        return dist.new_group(list(ranks), timeout=timeout, backend=SHARED, pg_options=self)

    @staticmethod
    def _made(about: Any, shared: "SharedGloo") -> Any:
        """Does what torch asks of a backend that is none of its own."""
        gloo: Any = dist.ProcessGroupGloo
        if not shared._devices:
            made = gloo(about.store, about.group_rank, about.group_size, timeout=about.timeout)
            shared._devices = devices_of(made)
            return made
        options = gloo._Options()
        options._devices = shared._devices
        options._timeout = about.timeout
        return gloo(about.store, about.group_rank, about.group_size, options)


def devices_of(backend: Any) -> list[Any]:
    """Returns the devices of a process group; none if torch does not report them: then each group
    has its own.
    """
    return list(getattr(getattr(backend, "options", None), "_devices", ()))


# What a rank knows about the others


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
    engine: int = 0
    """The number of the engine whose channels these are; 0 for those of no engine."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers the engines of this process that share these ranks, in the order in which they are
    made."""
    starts: list[list[int]] = field(default_factory=list)
    """By rank, digests of models whose ranks began with unlike values; engines that share these
    ranks add to it."""

    def for_engine(self) -> "Topology":
        """Returns the same ranks with channels that no other engine uses. All ranks must call it.

        No process group is made: engines share them, and their messages have different tags.
        """
        channels = self.exchange.open_channels
        if channels is not None and (ranks := _ranks_with(self.world, bool(channels))):
            raise ValueError(
                "exchange='...:nccl' was given, but another engine of this process exchanges over"
                f" NCCL, too (on {len(ranks)} of {self.world.size} ranks), and their messages"
                " would wait for each other. Call finish() or close() of the other engine first,"
                " or leave ':nccl' out for gloo, where engines are independent."
            )
        engine = next(self.numbers)
        exchange = self.exchange.channel(engine)
        has_one_exchange = self.second_hop is self.exchange
        return replace(
            self,
            engine=engine,
            world=self.world.channel(engine),
            peers=self.peers.channel(engine),
            in_group=self.in_group.channel(engine),
            in_site=self.in_site.channel(engine),
            control=self.control.channel(engine),
            exchange=exchange,
            second_hop=exchange if has_one_exchange else self.second_hop.channel(engine),
            stages=tuple(stage.channel(engine) for stage in self.stages),
        )

    def close(self) -> None:
        """Releases the channels of an engine that has ended."""
        self.exchange.close()

    @staticmethod
    def simulated(groups: int) -> list["Topology"]:
        """Returns the topologies of several worker groups of one rank each, all in this process."""
        control, progress, exchanges, second_hop = (
            InProcessExchange.connect(groups) for _ in range(4)
        )
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
        return self.ranks[self.group_rank]

    def is_stale(self) -> bool:
        """Returns whether the default process group is no longer the one for which this was
        made.
        """
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
        assert layout.world_size == dist.get_world_size(), (
            "a layout is one of all ranks that are connected"
        )
        rank = dist.get_rank()
        gloo = SharedGloo(dist.group.WORLD)
        shared = gloo if world().is_on_host else None
        # A rank that is a group by itself has a process group for callers that ask for one, and
        # sends nothing in it.
        in_group_backend = shared if layout.group_size == 1 else None
        in_group = in_site = Communicator(
            _own(rank, layout.worker_group_ranks(), in_group_backend, timeout)
        )
        if layout.worker_groups == 1 and not in_group.is_on_host:
            in_site = Communicator(_own(rank, layout.worker_group_ranks(), "gloo", timeout))
        # A single rank needs no process group, and peers that are all ranks need none of their own.
        stages = (Communicator(),) * STAGES
        peers = world()
        if layout.group_size > 1:
            ranks = layout.worker_group_ranks()
            # Twice the bound of a flight: a rank whose own exchange went well waits for one of its
            # group whose did not.
            stages = tuple(
                Communicator(_own(rank, ranks, gloo, 2 * timeout)) for _ in range(STAGES)
            )
        with joining() if joining else nullcontext():
            between = SharedGloo() if joining else gloo
            control, progress, exchange, second_hop = _exchanges(
                rank, layout, between, timeout, on_device
            )
            if layout.group_size > 1:
                peers = Communicator(
                    _own(rank, layout.shard_groups(), between if shared else None, timeout)
                )
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


def _ranks_with(world: Communicator, fact: bool) -> list[int]:
    return [rank for rank, holds in enumerate(world.all_gather_object(fact)) if holds]


# Process groups have threads and sockets, and torch keeps them until the default group is
# destroyed.
_made: dict[tuple[GroupLayout, timedelta, DeviceBackend | None], Topology] = {}


@functools.cache
def _settle_at_exit() -> None:
    """Gives gloo's threads a moment when the interpreter ends."""
    atexit.register(time.sleep, 0.2)


def mesh_of(
    layout: GroupLayout, device: str, data_parallel: int, tensor_parallel: int, timeout: timedelta
) -> Any:
    """Makes a mesh of the ranks of this group, once for each shape. All ranks must call it."""
    shape = (layout.worker_groups, data_parallel, tensor_parallel)
    world, mesh = _meshes.get((shape, device, timeout), (None, None))
    if world is not dist.group.WORLD:
        names = ("worker_group", "data_parallel", "tensor_parallel")
        with _unbound() if Communicator(dist.group.WORLD).is_on_host else nullcontext():
            whole = init_device_mesh(device, shape, mesh_dim_names=names)
        for name in names[1:]:
            dist.distributed_c10d._set_pg_timeout(timeout, whole.get_group(name))
        mesh = whole["data_parallel", "tensor_parallel"]
        _meshes[shape, device, timeout] = (dist.group.WORLD, mesh)
    return mesh


_meshes: dict[Any, tuple[Any, Any]] = {}


def is_connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def world() -> Communicator:
    return Communicator(dist.group.WORLD)


def ranks_in(process_group: dist.ProcessGroup) -> list[int]:
    """Returns the ranks of a foreign process group, numbered as in the world."""
    return list(dist.get_process_group_ranks(process_group))


def store() -> Any:
    """Returns the store of the default process group, where a rank that fails leaves word; None if
    there is none.
    """
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _exchanges(
    rank: int,
    layout: GroupLayout,
    gloo: SharedGloo,
    timeout: timedelta,
    on_device: DeviceBackend | None,
) -> tuple[Exchange[Any], Exchange[Any], Exchange[Any], Exchange[Any]]:
    def process_group(backend: str | SharedGloo) -> dist.ProcessGroup:
        return _own(rank, layout.shard_groups(), backend, 2 * timeout)

    if layout.worker_groups == 1:
        alone, *others = (InProcessExchange.connect(1)[0] for _ in range(4))
        return alone, others[0], others[1], others[2]
    both = process_group(gloo)
    control = DirectExchange(both, both)
    progress = DirectExchange(both, both, tag=1)
    if on_device is None:
        there = Connection.of_process()
        up = process_group(gloo)
        down = process_group(gloo)
        opened = Connection.of_process() - there
        # More or fewer are not gloo's alone, or gloo connects later: TCP then sends at its own
        # pace.
        pacing = Pacing(opened if len(opened) == 2 * (layout.worker_groups - 1) else set())
        # The second hop uses the connections of the first: a connection is fastest just after it
        # has carried something.
        first, second = (DirectExchange(up, down, tag, pacing) for tag in range(2))
        return control, progress, first, second
    both_hops = DeviceExchange(process_group(on_device.name), on_device.device)
    both_hops.meet(time.monotonic() + timeout.total_seconds())
    return control, progress, both_hops, both_hops


def _own(
    rank: int, all_ranks: list[list[int]], backend: str | SharedGloo | None, timeout: timedelta
) -> dist.ProcessGroup:
    """Makes a process group of every list of ranks, as all ranks must, and returns the one of this
    rank.
    """

    def made(ranks: list[int]) -> Any:
        if isinstance(backend, SharedGloo):
            return backend.process_group(ranks, timeout)
        return dist.new_group(ranks, timeout=timeout, backend=backend)

    is_gloo = (
        backend == "gloo"
        or isinstance(backend, SharedGloo)
        or (backend is None and world().is_on_host)
    )
    with _unbound() if is_gloo else nullcontext():
        groups = list(map(made, all_ranks))
    return next(group for group, ranks in zip(groups, all_ranks, strict=True) if rank in ranks)


@contextmanager
def _unbound() -> Iterator[None]:
    """Keeps torch from splitting process groups off a default one that is bound to a device: gloo
    cannot do that.
    """
    default: Any = dist.group.WORLD
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
