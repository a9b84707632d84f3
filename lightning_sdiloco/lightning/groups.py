"""Connects the ranks of worker groups and determines which ranks a collective spans.

Inside a batch, the collectives of Lightning and user code stay within the worker group. Everywhere
else, they span all ranks.
"""

import inspect
import logging
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch

from lightning_sdiloco.algorithm.reduce import kind_and_backend
from lightning_sdiloco.comm.exchange import DeviceBackend, nccl_on
from lightning_sdiloco.comm.topology import (
    GroupLayout,
    Topology,
    is_connected,
    mesh_of,
    store,
    world,
)
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.start import require_same_settings
from lightning_sdiloco.errors import ExchangeError
from lightning_sdiloco.launch.failures import Failures
from lightning_sdiloco.launch.reachability import (
    exchange_address,
    for_exchange,
    group_address,
    has_exchange_interface,
    require_reachable,
)
from lightning_sdiloco.launch.rendezvous import (
    Rendezvous,
    rendezvous_at,
    say_node_rank,
    warn_of_shared_store,
)
from lightning_sdiloco.lightning.host import (
    Function,
    Host,
    LightningModule,
    class_names,
    is_of_lightning,
)
from lightning_sdiloco.lightning.model_format import WholeModel
from lightning_sdiloco.lightning.options import Options

_log = logging.getLogger(__name__)

# How long processes may take to exit on their own if the first one fails before they meet.
_SECONDS_TO_END = 3.0

# Hooks that run for every batch. A collective that starts in one of them stays inside the worker
# group: if it spanned all ranks, every group would wait for the slowest one at every step.
_PER_BATCH_HOOKS = frozenset(
    {
        "training_step",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_batch_transfer",
        "transfer_batch_to_device",
        "on_after_batch_transfer",
        "backward",
        "optimizer_step",
        "optimizer_zero_grad",
        "configure_gradient_clipping",
        "lr_scheduler_step",
    }
)


# The threads of the trainers running in this process, by the trainers' groups.
_running: "weakref.WeakKeyDictionary[ConnectedGroups, threading.Thread]" = (
    weakref.WeakKeyDictionary()
)

# Only one thread at a time creates the default process group and its subgroups.
_connecting = threading.Lock()


class ConnectedGroups:
    """The connected ranks of all worker groups.

    The object exists for as long as the strategy, which may run multiple fits.
    """

    def __init__(self) -> None:
        self.failed = False
        self.announce: Function | None = None
        """A function to call when this rank is about to wait for all other ranks."""
        self._topology: Topology | None = None
        self._failures: Failures | None = None

    @property
    def topology(self) -> Topology:
        """The worker groups and their connections, available once processes are connected."""
        assert self._topology is not None, "the process groups are made in setup_environment"
        return self._topology

    @property
    def is_connected(self) -> bool:
        return self._topology is not None

    @property
    def is_alone(self) -> bool:
        """Whether this rank is ending with an exception and must not wait for other ranks."""
        return self.failed and self._topology is not None and self._topology.world.size > 1

    def enter(self) -> None:
        """Records that a trainer is running in this thread until `leave` is called."""
        _running[self] = threading.current_thread()

    def leave(self) -> None:
        _running.pop(self, None)

    def check(self, host: Host, options: Options, model_format: WholeModel) -> None:
        """Refuses ranks that cannot form equal groups, and devices that NCCL does not support."""
        _layout(host, options, model_format)
        self._device_backend(options, host)

    def connect(
        self, host: Host, options: Options, model_format: WholeModel, set_up: Function
    ) -> None:
        with _connecting:
            self._refuse_another_thread()
            self._connect(host, options, model_format, set_up)

    def _refuse_another_thread(self) -> None:
        """Refuses to run in parallel with another thread's trainer if there are multiple processes.

        Each engine has its own process groups, but all trainers use the default process group
        before validations and at the end of a fit. Ranks would mix up the collectives of different
        trainers.
        """
        thread = threading.current_thread()
        busy = [
            running.name
            for running in _running.values()
            if running is not thread and running.is_alive()
        ]
        if self in _running and busy and is_connected() and world().size > 1:
            raise ValueError(
                f"A trainer is already running in the thread {busy[0]!r} of this process, and"
                f" another trainer was started in {thread.name!r}. With {world().size} processes,"
                " the collectives of the two trainers would be mixed up. Run the trainers one after"
                " the other, or in separate processes."
            )

    def _connect(
        self, host: Host, options: Options, model_format: WholeModel, set_up: Function
    ) -> None:
        timeout = options.settings.timeout
        layout = _layout(host, options, model_format)
        try:
            # Fabric's strategies have the second method.
            set_world_ranks = getattr(host, "set_world_ranks", None) or host._set_world_ranks
            set_world_ranks()
            # Kept until the ranks are connected: the default process group takes over its store.
            rendezvous = None if is_connected() else _meet(host, layout.world_size, timeout)
            if rendezvous is not None and host.num_nodes > 1:
                group = layout.group_of(host.global_rank)
                require_reachable(rendezvous, group, exchange_address, group_address)
            with for_exchange():
                if model_format.is_sharded:
                    # The same as in ModelParallelStrategy, but without its mesh, which spans all
                    # ranks.
                    host._setup_distributed()
                else:
                    set_up()
        except Exception:
            _end_processes_of(host)
            raise
        rank = host.global_rank
        warn_of_shared_store(rank)
        self._failures = Failures(store(), rank, layout.group_of(rank), layout.world_size)
        # A second fit in this process finds the first fit's process groups.
        if self._topology is None or self._topology.is_stale():
            _refuse_other_size(layout.world_size)
            require_same_settings({**options.described(), **model_format.described}, world())
            joining = for_exchange if has_exchange_interface() else None
            device_backend = self._device_backend(options, host)
            self._topology = Topology.of_world(layout, timeout, joining, device_backend)
        if model_format.is_sharded:
            data_parallel, tensor_parallel = model_format.mesh.values()
            mesh = mesh_of(layout, host.root_device.type, data_parallel, tensor_parallel, timeout)
            host._device_mesh = mesh
            host.lightning_module._device_mesh = mesh

    @staticmethod
    def _device_backend(options: Options, host: Host) -> DeviceBackend | None:
        if kind_and_backend(options.settings.exchange)[1] == "nccl":
            return nccl_on(host.root_device)
        return None

    def use(self, topology: Topology) -> None:
        self._topology = topology

    def fail(self, exception: BaseException) -> None:
        """Notifies the other ranks that this rank is ending with an exception.

        After this call, this rank must not wait for other ranks.
        """
        self.failed = True
        failures = self._failures
        self._failures = None
        if failures is not None:
            with suppress(Exception):
                failures.leave(exception)

    def meet(self) -> None:
        """Announces that this rank is about to wait for all other ranks."""
        if self.announce is not None and not self.failed:
            self.announce()

    def decide(self, decision: bool, all: bool, device: torch.device) -> bool:
        """Returns the joint decision of all ranks.

        Before the ranks are connected and after an exception, the result is this rank's own
        decision.
        """
        if self.is_alone or not self.is_connected:
            return decision
        self.meet()
        vote = torch.tensor([int(decision)], device=device)
        votes = [int(vote) for vote in self.topology.world.all_gather(vote)]
        return min(votes) == 1 if all else max(votes) == 1

    def mean_over_all(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Returns the means, over all ranks, of the numbers that every rank has."""
        if self.is_alone:
            return {}
        self.meet()
        ranks = self.topology.world.all_gather_object(dict(numbers))
        common = [name for name in numbers if all(name in rank for rank in ranks)]
        return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in common}

    @contextmanager
    def waiting(self, names: Sequence[object], engine: StreamingDiLoCo | None) -> Iterator[None]:
        """Explains possible causes if other ranks do not reach a barrier."""
        self.meet()
        try:
            yield
        except RuntimeError as error:
            if not self.is_connected:
                raise
            in_flight = list(engine.rounds.in_flight) if engine is not None else []
            raise ExchangeError(
                f"This rank, which belongs to worker group {self.topology.group_index}, waited for"
                f" all other ranks at {names or 'a barrier'}, but they did not arrive. Fragments in"
                f" flight: {in_flight or 'none'}. Either other groups have stopped, or they are"
                " still training because they have more data or because trainer.should_stop was set"
                " only in this group."
            ) from error


def _meet(host: Host, world_size: int, timeout: timedelta) -> Rendezvous:
    """Connects all processes at the main address before the default process group is created."""
    environment = host.cluster_environment
    is_by_hand = "LightningEnvironment" in class_names(type(environment))
    advice = ""
    if host.num_nodes > 1 and is_by_hand:
        advice = say_node_rank(environment.node_rank())
    return rendezvous_at(
        environment.main_address,
        environment.main_port,
        environment.global_rank(),
        world_size,
        timeout,
        advice,
    )


def _end_processes_of(host: Host) -> None:
    """Ends the processes that rerun the script and would wait for this process."""
    # Lightning watches the list of these processes, and would end this one before it reports the
    # reason.
    processes = getattr(host.launcher, "procs", [])
    started = [process for process in processes if isinstance(process, subprocess.Popen)]
    if started:
        processes.clear()
    deadline = time.monotonic() + _SECONDS_TO_END
    for process in started:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0))
        process.kill()


def _refuse_other_size(world_size: int) -> None:
    """Refuses existing process groups that have a different number of ranks."""
    if world().size != world_size:
        raise ValueError(
            f"Code outside Lightning has connected {world().size} processes, but the worker groups"
            f" expect {world_size}. Set devices and num_nodes to match the connected processes, or"
            " set plugins to a cluster environment whose world_size() returns the number of"
            " connected processes."
        )


def _layout(host: Host, options: Options, model_format: WholeModel) -> GroupLayout:
    """Returns the layout of worker groups for the number of ranks in the environment."""
    nodes = host.num_nodes
    processes = host.num_processes
    environment = host.cluster_environment
    world_size = nodes * processes
    # If an environment refuses these numbers, it does so at launch, with its own message.
    with suppress(ValueError):
        environment.validate_settings(num_devices=processes, num_nodes=nodes)
        world_size = host.world_size
    if world_size % nodes:
        raise ValueError(
            f"{type(environment).__name__} reports {world_size} processes, which cannot be divided"
            f" equally among num_nodes={nodes} nodes. Start the same number of processes on every"
            " node, or leave num_nodes at 1 and set worker_groups."
        )
    return model_format.layout(options.worker_groups, nodes, world_size // nodes)


# Collectives


def in_batch(module: LightningModule | None) -> bool:
    return (
        module is not None
        and module._trainer is not None
        and module.trainer.training
        and module._current_fx_name in _PER_BATCH_HOOKS
    )


def stays_in_group(module: LightningModule | None, groups: ConnectedGroups) -> bool:
    """Returns whether a collective stays inside the worker group, and announces it if not."""
    stays = in_batch(module)
    if not stays:
        groups.meet()
    return stays


class ScaleWatch:
    """Warns once about a loss that may be scaled by the total number of ranks, as is usual for DDP.

    DistributedDataParallel averages gradients over a group's ranks. A loss that is multiplied by
    ``trainer.world_size`` to turn the average into a sum is therefore too large by a factor equal
    to the number of groups. Rank 0 checks whether code outside Lightning reads
    ``trainer.world_size`` in a training batch, and whether a module stores the number.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def look_at(self, module: LightningModule, topology: Topology) -> None:
        """Checks whether a module stores the number of ranks as an attribute."""
        if vars(module).get("world_size") == topology.world.size:
            self._warn("The module stores world_size", topology)

    def read(self, module: LightningModule | None, topology: Topology) -> None:
        """Checks whether code outside Lightning reads the number of ranks in a training batch."""
        if self._has_warned or torch.compiler.is_compiling() or not in_batch(module):
            return
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name in ("read", "world_size"):
            frame = frame.f_back
        if frame is not None and not is_of_lightning(frame.f_globals.get("__name__", "")):
            self._warn("A training batch reads trainer.world_size", topology)

    def _warn(self, place: str, topology: Topology) -> None:
        self._has_warned = True
        if topology.num_groups > 1 and topology.rank == 0:
            _log.warning(
                "%s, which is %d, the number of ranks in all worker groups. However, gradients are"
                " averaged only over the %d ranks of a group. If the loss is multiplied by the"
                " number of all ranks, as for DDP, the gradients are %d times too large. Use"
                " trainer.strategy.topology.group_size instead. Shown once.",
                place,
                topology.world.size,
                topology.group_size,
                topology.num_groups,
            )
