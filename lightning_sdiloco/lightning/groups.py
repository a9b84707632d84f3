"""The worker groups from the perspective of a process: how ranks find each other, and which ranks a
collective spans.

Inside a batch, the collectives of Lightning and of user code stay within the worker group;
elsewhere they span all ranks.
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
# group: if it spanned all ranks, every group would wait for the slowest at every step.
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


# The trainers running in this process, by their groups, each with its thread.
_running: "weakref.WeakKeyDictionary[ConnectedGroups, threading.Thread]" = (
    weakref.WeakKeyDictionary()
)

# Only one thread at a time creates the default process group and its subgroups.
_connecting = threading.Lock()


class ConnectedGroups:
    """The ranks of all worker groups. It lives as long as the strategy, across several fits."""

    def __init__(self) -> None:
        self.failed = False
        self.announce: Function | None = None
        """Called when this rank is about to wait for all others."""
        self._topology: Topology | None = None
        self._failures: Failures | None = None

    @property
    def topology(self) -> Topology:
        """The worker groups and the connections between them; available once processes are
        connected.
        """
        assert self._topology is not None, "the process groups are made in setup_environment"
        return self._topology

    @property
    def is_connected(self) -> bool:
        return self._topology is not None

    @property
    def is_alone(self) -> bool:
        """Returns whether this rank is ending with an exception, and so must not wait for ranks
        that may be gone.
        """
        return self.failed and self._topology is not None and self._topology.world.size > 1

    def enter(self) -> None:
        """Records that a trainer runs in this thread, until `leave`."""
        _running[self] = threading.current_thread()

    def leave(self) -> None:
        _running.pop(self, None)

    def check(self, host: Host, options: Options, model_format: WholeModel) -> None:
        """Refuses ranks that do not divide into worker groups, and devices that NCCL cannot
        connect.
        """
        _layout(host, options, model_format)
        self._device_backend(options, host)

    def connect(
        self, host: Host, options: Options, model_format: WholeModel, set_up: Function
    ) -> None:
        with _connecting:
            self._refuse_another_thread()
            self._connect(host, options, model_format, set_up)

    def _refuse_another_thread(self) -> None:
        """Refuses to run alongside another thread's trainer if there are other processes.

        Engines have their own channels, but trainers meet in the default process group, before
        validations and at the end, and ranks would confuse one trainer's meeting with another's.
        """
        thread = threading.current_thread()
        busy = [
            running.name
            for running in _running.values()
            if running is not thread and running.is_alive()
        ]
        if self in _running and busy and is_connected() and world().size > 1:
            raise ValueError(
                f"A trainer already runs in the thread {busy[0]!r} of this process, and this one"
                f" was started in {thread.name!r}: with {world().size} processes their collectives"
                " would be mistaken for each other's. Run one after the other, or each in its own"
                " processes."
            )

    def _connect(
        self, host: Host, options: Options, model_format: WholeModel, set_up: Function
    ) -> None:
        timeout = options.settings.timeout
        layout = _layout(host, options, model_format)
        try:
            # Fabric has the second.
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
        """Tells the other ranks that this one ends with an exception. From now on, it must not wait
        for them.
        """
        self.failed = True
        failures = self._failures
        self._failures = None
        if failures is not None:
            with suppress(Exception):
                failures.leave(exception)

    def meet(self) -> None:
        """Announces that this rank is about to wait for all others, some of which may be waiting
        for its epoch to end.
        """
        if self.announce is not None and not self.failed:
            self.announce()

    def decide(self, decision: bool, all: bool, device: torch.device) -> bool:
        """Returns the joint decision of all ranks, or this rank's own decision before they connect
        or after an exception.
        """
        if self.is_alone or not self.is_connected:
            return decision
        self.meet()
        vote = torch.tensor([int(decision)], device=device)
        votes = [int(vote) for vote in self.topology.world.all_gather(vote)]
        return min(votes) == 1 if all else max(votes) == 1

    def mean_over_all(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Returns the means over all ranks of the numbers that all of them have; empty after an
        exception.
        """
        if self.is_alone:
            return {}
        self.meet()
        ranks = self.topology.world.all_gather_object(dict(numbers))
        common = [name for name in numbers if all(name in rank for rank in ranks)]
        return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in common}

    @contextmanager
    def waiting(self, names: Sequence[object], engine: StreamingDiLoCo | None) -> Iterator[None]:
        """Explains possible causes if the others do not reach a barrier where this rank waits."""
        self.meet()
        try:
            yield
        except RuntimeError as error:
            if not self.is_connected:
                raise
            in_flight = list(engine.rounds.in_flight) if engine is not None else []
            raise ExchangeError(
                f"This rank, of worker group {self.topology.group_index}, waited for all others at"
                f" {names or 'a barrier'} and they did not arrive; fragments in flight:"
                f" {in_flight or 'none'}. Other groups have stopped, or are still training because"
                " they have more data or because trainer.should_stop was set here only."
            ) from error


def _meet(host: Host, world_size: int, timeout: timedelta) -> Rendezvous:
    """Meets all processes at the main address, before the default process group is created."""
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
    """Ends the processes that rerun the script and would wait for this one."""
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
    """Refuses process groups that other code has created with a different number of ranks."""
    if world().size != world_size:
        raise ValueError(
            f"{world().size} processes are connected by code outside Lightning, but the worker"
            f" groups expect {world_size}. Set devices and num_nodes to that number, or give"
            " plugins a cluster environment whose world_size() returns it."
        )


def _layout(host: Host, options: Options, model_format: WholeModel) -> GroupLayout:
    """Returns the layout of worker groups, given the environment's number of ranks."""
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
            f" equally among num_nodes={nodes} nodes. Start the same number on every node, or leave"
            " num_nodes at 1 and set worker_groups."
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
    """Returns whether a collective stays inside the worker group, and announces one that does not."""
    stays = in_batch(module)
    if not stays:
        groups.meet()
    return stays


class ScaleWatch:
    """Warns once about a loss that may be scaled by the total number of ranks, as for DDP.

    DistributedDataParallel averages gradients over the ranks of a group, so a loss multiplied by
    ``trainer.world_size`` to get their sum is too large by a factor of the number of groups. Rank 0
    looks for code outside Lightning that reads this number in a training batch, and for a module
    that stores it.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def look_at(self, module: LightningModule, topology: Topology) -> None:
        """Checks whether a module has the number as an attribute."""
        if vars(module).get("world_size") == topology.world.size:
            self._warn("The module keeps world_size", topology)

    def read(self, module: LightningModule | None, topology: Topology) -> None:
        """Checks which code reads the number: the caller's caller, or the code that asks the
        trainer for it.
        """
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
                "%s: %d, the ranks of all worker groups, but gradients are averaged over the %d"
                " ranks of a group. A loss multiplied by it, as for DDP, has gradients %d times"
                " too large: use trainer.strategy.topology.group_size there. Shown once.",
                place,
                topology.world.size,
                topology.group_size,
                topology.num_groups,
            )
