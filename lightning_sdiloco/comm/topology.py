"""The layout of ranks in worker groups, with the communicators within groups and the exchanges
between them.
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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_sdiloco.comm.communicator import SHARED, Communicator
from lightning_sdiloco.comm.exchange import (
    AnyExchange,
    DeviceBackend,
    DeviceExchange,
    DirectExchange,
    InProcessExchange,
)
from lightning_sdiloco.comm.pacing import Connection, Pacing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, _DistributedBackendOptions

STAGES = 3
"""The number of stages in a flight. Each stage has its own communicator among the ranks of the
group."""


@dataclass(frozen=True)
class GroupLayout:
    """An assignment of the ranks of a world to worker groups of consecutive ranks.

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
                f" groups of equal size. With {self.world_size} processes, it can be one of"
                f" {fitting}. Change worker_groups or the number of devices or nodes."
            )

    @property
    def group_size(self) -> int:
        """The number of ranks in a group (G), which equals the number of shards per fragment."""
        return self.world_size // self.worker_groups

    def group_of(self, rank: int) -> int:
        return rank // self.group_size

    def group_rank_of(self, rank: int) -> int:
        """Returns the index of a rank in its group, which equals the index of the shard that the
        rank exchanges.
        """
        return rank % self.group_size

    def worker_group_ranks(self) -> list[list[int]]:
        return [
            list(range(g * self.group_size, (g + 1) * self.group_size))
            for g in range(self.worker_groups)
        ]

    def shard_groups(self) -> list[list[int]]:
        """Lists the ranks that exchange each shard, in group order."""
        return [
            list(range(shard, self.world_size, self.group_size)) for shard in range(self.group_size)
        ]


def checked_worker_groups(worker_groups: object) -> int | Literal["auto"]:
    """Validates and returns a number of worker groups or ``"auto"``."""
    if isinstance(worker_groups, str) and worker_groups == "auto":
        return "auto"
    fault = "out of range"
    if isinstance(worker_groups, float):
        fault = "of type float, not a whole number"
    elif isinstance(worker_groups, bool) or not isinstance(worker_groups, Integral):
        fault = f"of type {type(worker_groups).__name__}, not a number"
    elif int(worker_groups) >= 1:
        return int(worker_groups)
    raise ValueError(
        f"worker_groups={worker_groups!r} is {fault}: it must be a whole number of at least 1, or"
        " 'auto' for one group per node (per device on a single node). Choose one of these."
    )


def require_backend(backend: str | None) -> None:
    """Raises ValueError if torch has no process group backend of the given name."""
    if backend is None:
        return
    # A string such as "cpu:gloo,cuda:nccl" names a backend for each device type.
    for part in str(backend).split(","):
        name = part.rpartition(":")[2].lower()
        if name not in dist.Backend.backend_list:
            hidden = (dist.Backend.UNDEFINED, "fake")
            backends = [name for name in dist.Backend.backend_list if name not in hidden]
            raise ValueError(
                f"process_group_backend={backend!r} names the backend {name!r}, which torch does"
                f" not know. Choose one of {', '.join(backends)}, or one per device type, as in"
                " 'cpu:gloo,cuda:nccl'. Leave the option out to use the default backend of the"
                " device. To use a third-party backend, import its package first."
            )


# Process groups of gloo that share one thread


class SharedGloo:
    """A factory for gloo process groups that share one gloo device, which consists of a thread and
    a listening address.

    gloo gives each process group a thread that wakes up a hundred times a second, even if nothing
    is sent. Eight such threads use as much processor time as all flights of a large model. Process
    groups therefore share the thread of the default group, unless they listen on a different
    interface. Without sharing, flights of eight groups on two cores take 1.07 times as long. For
    two and four groups, sharing makes no difference. Each connection still belongs to a single
    process group, so messages of different process groups never wait for each other.
    """

    def __init__(self, like: dist.ProcessGroup | None = None) -> None:
        self._devices: list[object] = []
        if like is not None:
            with suppress(RuntimeError):  # it has no gloo backend
                self._devices = devices_of(like._get_backend(torch.device("cpu")))
        if not hasattr(dist.Backend, SHARED.upper()):
            # gloo's own list of devices.
            dist.Backend.register_backend(
                SHARED, SharedGloo._make, extended_api=True, devices=["cpu", "cuda"]
            )

    def process_group(self, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
        """Creates a process group. All ranks of the world must call this method at the same time,
        as with ``dist.new_group``.
        """
        return dist.new_group(list(ranks), timeout=timeout, backend=SHARED, pg_options=self)

    @staticmethod
    def _make(place: "_DistributedBackendOptions", shared: "SharedGloo") -> "dist.ProcessGroupGloo":
        """Creates the gloo backend of one process group. torch calls this function as the
        registered factory.
        """
        gloo: Any = dist.ProcessGroupGloo
        if not shared._devices:
            backend = gloo(place.store, place.group_rank, place.group_size, timeout=place.timeout)
            shared._devices = devices_of(backend)
            return backend
        options = gloo._Options()
        options._devices = shared._devices
        options._timeout = place.timeout
        return gloo(place.store, place.group_rank, place.group_size, options)


def devices_of(backend: object) -> list[object]:
    """Returns the gloo devices of a backend. If torch does not report the devices, the list is
    empty and each process group has its own device.
    """
    return list(getattr(getattr(backend, "options", None), "_devices", ()))


# The place of a rank among the others


def _alone() -> AnyExchange:
    """Returns the exchange for a single group."""
    return InProcessExchange.connect(1)[0]


@dataclass(frozen=True)
class Topology:
    """The position of a rank in its group and in the world, with all of the rank's connections.

    Attributes:
        num_groups: The number of worker groups.
        group_index: The index of this rank's group.
        group_size: The number of ranks in a group.
        group_rank: The index of this rank in its group.
        world: All ranks.
        peers: The ranks that exchange the same shard, one in each group.
        in_group: The ranks of this group.
        in_site: The ranks of this group. In a federation, these ranks are connected over gloo.
        stages: One communicator among the ranks of this group for each stage of a flight.
        control: The exchange of control vectors between groups.
        progress: The exchange of progress reports between groups.
        exchange: The exchange of outer gradients between groups.
        second_hop: The exchange of means between groups in two-shot exchanges.
        background: A function that creates the background in which flights run. None selects the
            default background.
        engine: The number of the engine that owns these channels, or 0 if no engine owns them.
        numbers: An iterator over the numbers of engines that share these ranks, in order of
            creation.
        starts: The digests, by rank, of models that started with different values. Engines that
            share these ranks add to this list.
    """

    num_groups: int = 1
    group_index: int = 0
    group_size: int = 1
    group_rank: int = 0
    world: Communicator = field(default_factory=Communicator)
    peers: Communicator = field(default_factory=Communicator)
    in_group: Communicator = field(default_factory=Communicator)
    in_site: Communicator = field(default_factory=Communicator)
    stages: tuple[Communicator, ...] = field(default_factory=lambda: (Communicator(),) * STAGES)
    control: AnyExchange = field(default_factory=_alone)
    progress: AnyExchange = field(default_factory=_alone)
    exchange: AnyExchange = field(default_factory=_alone)
    second_hop: AnyExchange = field(default_factory=_alone)
    background: Callable[[torch.device], Any] | None = None
    engine: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    starts: list[list[int]] = field(default_factory=list)

    def for_engine(self) -> "Topology":
        """Returns a topology of the same ranks with channels for a new engine. All ranks must call
        this method.

        Engines share process groups and tag their messages differently, so no new process group is
        created.
        """
        if self.exchange.open_channels is not None:
            is_in_use = self.world.all_gather_object(bool(self.exchange.open_channels))
            if any(is_in_use):
                raise ValueError(
                    "exchange='...:nccl' was given, but another engine in this process also"
                    f" exchanges over NCCL (on {sum(is_in_use)} of {self.world.size} ranks). The"
                    " messages of the two engines would block each other. Call finish() or close()"
                    " on the other engine first, or remove ':nccl' to use gloo, where engines are"
                    " independent."
                )
        engine = next(self.numbers)
        exchange = self.exchange.channel(engine)
        second_hop = exchange
        if self.second_hop is not self.exchange:
            second_hop = self.second_hop.channel(engine)
        return replace(
            self,
            engine=engine,
            world=self.world.channel(engine),
            peers=self.peers.channel(engine),
            in_group=self.in_group.channel(engine),
            in_site=self.in_site.channel(engine),
            control=self.control.channel(engine),
            exchange=exchange,
            second_hop=second_hop,
            stages=tuple(stage.channel(engine) for stage in self.stages),
        )

    def close(self) -> None:
        """Releases the channels of a finished engine."""
        self.exchange.close()

    @staticmethod
    def simulated(groups: int) -> list["Topology"]:
        """Returns the topologies of simulated worker groups in this process, with one rank per
        group.
        """
        control = InProcessExchange.connect(groups)
        progress = InProcessExchange.connect(groups)
        exchanges = InProcessExchange.connect(groups)
        second_hop = InProcessExchange.connect(groups)
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
        """The world ranks of this group."""
        return range(self.group_index * self.group_size, (self.group_index + 1) * self.group_size)

    @property
    def rank(self) -> int:
        return self.ranks[self.group_rank]

    def is_stale(self) -> bool:
        """Returns whether the default process group has changed since this object was created."""
        return self.world.process_group is not dist.group.WORLD

    @staticmethod
    def of_world(
        layout: GroupLayout,
        timeout: timedelta,
        joining: Callable[[], AbstractContextManager[None]] | None = None,
        on_device: DeviceBackend | None = None,
    ) -> "Topology":
        """Creates this rank's topology and process groups, or returns the topology that is cached
        for this layout. All ranks must call this method.
        """
        key = (layout, timeout, on_device)
        if key not in _topologies or _topologies[key].is_stale():
            _topologies[key] = Topology._make(layout, timeout, joining, on_device)
            _settle_at_exit()
        return _topologies[key]

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
        inside = _Inside.make(layout, gloo, timeout)
        between = _Between.make(layout, gloo, timeout, joining, on_device)
        return Topology(
            num_groups=layout.worker_groups,
            group_index=layout.group_of(rank),
            group_size=layout.group_size,
            group_rank=layout.group_rank_of(rank),
            world=world(),
            **inside._asdict(),
            **between._asdict(),
        )


class _Inside(NamedTuple):
    """The communicators among the ranks of a group, as described in `Topology`."""

    in_group: Communicator
    in_site: Communicator
    stages: tuple[Communicator, ...]

    @staticmethod
    def make(layout: GroupLayout, gloo: SharedGloo, timeout: timedelta) -> "_Inside":
        ranks = layout.worker_group_ranks()
        backend = None
        if layout.group_size == 1 and world().is_on_host:
            # A rank that forms a group on its own has a process group for callers that request one,
            # but sends nothing over it.
            backend = gloo
        in_group = Communicator(_process_group(ranks, backend, timeout))
        in_site = in_group
        if layout.worker_groups == 1 and not in_group.is_on_host:
            in_site = Communicator(_process_group(ranks, "gloo", timeout))
        # A single rank needs no process group.
        stages = [Communicator() for _ in range(STAGES)]
        if layout.group_size > 1:
            # Twice the time limit of a flight: a rank whose exchange succeeded waits for a rank in
            # its group whose exchange failed.
            stages = [Communicator(_process_group(ranks, gloo, 2 * timeout)) for _ in stages]
        return _Inside(in_group, in_site, tuple(stages))


class _Between(NamedTuple):
    """The communicator and the exchanges between groups, as described in `Topology`."""

    peers: Communicator
    control: AnyExchange
    progress: AnyExchange
    exchange: AnyExchange
    second_hop: AnyExchange

    @staticmethod
    def make(
        layout: GroupLayout,
        gloo: SharedGloo,
        timeout: timedelta,
        joining: Callable[[], AbstractContextManager[None]] | None,
        on_device: DeviceBackend | None,
    ) -> "_Between":
        entered: AbstractContextManager[None] = nullcontext()
        if joining:
            # These process groups listen on a different interface from the earlier ones.
            entered = joining()
            gloo = SharedGloo()
        with entered:
            exchanges = _exchanges(layout, gloo, timeout, on_device)
            # If the peers are all ranks, the default process group is enough.
            peers = world()
            if layout.group_size > 1:
                backend = gloo if peers.is_on_host else None
                peers = Communicator(_process_group(layout.shard_groups(), backend, timeout))
            return _Between(peers, *exchanges)


# Process groups have threads and sockets, and torch keeps them until the default group is
# destroyed.
_topologies: dict[tuple[GroupLayout, timedelta, DeviceBackend | None], Topology] = {}


@functools.cache
def _settle_at_exit() -> None:
    """Gives gloo's threads time to finish when the interpreter exits."""
    atexit.register(time.sleep, 0.2)


def mesh_of(
    layout: GroupLayout, device: str, data_parallel: int, tensor_parallel: int, timeout: timedelta
) -> DeviceMesh:
    """Creates a device mesh of this group's ranks, or returns the cached mesh of this shape. All
    ranks must call this function.
    """
    shape = (layout.worker_groups, data_parallel, tensor_parallel)
    if (shape, device, timeout) in _meshes:
        world_of_mesh, mesh = _meshes[shape, device, timeout]
        if world_of_mesh is dist.group.WORLD:
            return mesh
    names = ("worker_group", "data_parallel", "tensor_parallel")
    with _unbound(world().is_on_host):
        mesh_of_world = init_device_mesh(device, shape, mesh_dim_names=names)
    for name in names[1:]:
        dist.distributed_c10d._set_pg_timeout(timeout, mesh_of_world.get_group(name))
    mesh = mesh_of_world["data_parallel", "tensor_parallel"]
    _meshes[shape, device, timeout] = (dist.group.WORLD, mesh)
    return mesh


_meshes: dict[
    tuple[tuple[int, int, int], str, timedelta], tuple[dist.ProcessGroup | None, DeviceMesh]
] = {}


def is_connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def world() -> Communicator:
    return Communicator(dist.group.WORLD)


def ranks_in(process_group: dist.ProcessGroup) -> list[int]:
    """Returns the world ranks of a process group."""
    return list(dist.get_process_group_ranks(process_group))


def store() -> "Store | None":
    """Returns the store of the default process group, or None if there is no process group. A
    failing rank leaves a message in the store.
    """
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def _exchanges(
    layout: GroupLayout,
    gloo: SharedGloo,
    timeout: timedelta,
    on_device: DeviceBackend | None,
) -> list[AnyExchange]:
    """Creates the exchanges for control vectors, progress reports, the first hop, and the second
    hop.
    """
    if layout.worker_groups == 1:
        return [_alone() for _ in range(4)]

    def process_group(backend: str | SharedGloo) -> dist.ProcessGroup:
        return _process_group(layout.shard_groups(), backend, 2 * timeout)

    both_ways = process_group(gloo)
    control = DirectExchange(both_ways, both_ways)
    progress = DirectExchange(both_ways, both_ways, tag=1)
    if on_device is not None:
        both_hops = DeviceExchange(process_group(on_device.name), on_device.device)
        both_hops.meet(time.monotonic() + timeout.total_seconds())
        return [control, progress, both_hops, both_hops]
    before = Connection.of_process()
    up = process_group(gloo)
    down = process_group(gloo)
    opened = Connection.of_process() - before
    if len(opened) != 2 * (layout.worker_groups - 1):
        # Other libraries have also opened connections, or gloo connects later. Messages are then
        # not paced.
        opened = set()
    pacing = Pacing(opened)
    # The second hop uses the connections of the first hop, because a connection is fastest just
    # after a message.
    hops = [DirectExchange(up, down, tag, pacing) for tag in range(2)]
    return [control, progress, *hops]


def _process_group(
    all_ranks: list[list[int]], backend: str | SharedGloo | None, timeout: timedelta
) -> dist.ProcessGroup:
    """Creates a process group for each list of ranks and returns the group that contains this rank.
    All ranks must call this function.
    """
    is_gloo = backend == "gloo" or isinstance(backend, SharedGloo)
    if backend is None:
        is_gloo = world().is_on_host
    group_of_rank: dist.ProcessGroup | None = None
    with _unbound(is_gloo):
        for ranks in all_ranks:
            if isinstance(backend, SharedGloo):
                group = backend.process_group(ranks, timeout)
            else:
                group = dist.new_group(ranks, timeout=timeout, backend=backend)
            if dist.get_rank() in ranks:
                group_of_rank = group
    assert group_of_rank is not None, "every rank is in one of the lists"
    return group_of_rank


@contextmanager
def _unbound(is_gloo: bool) -> Iterator[None]:
    """Unbinds the default process group from its device while gloo groups are created. Otherwise,
    torch would split the gloo groups off the default group, which gloo does not support.
    """
    if not is_gloo:
        yield
        return
    default: Any = dist.group.WORLD
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
