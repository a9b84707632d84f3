"""Worker groups in which every rank holds the whole model, with DistributedDataParallel among them."""

import gc
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sdiloco.comm import GroupLayout, Topology
from lightning_sdiloco.engine import align_model
from lightning_sdiloco.lightning.checkpoint.placement import Placing
from lightning_sdiloco.lightning.host.ddp import SingleRankDDP, fix_bucket_order, has_nothing_to_average
from lightning_sdiloco.lightning.model_format.base import Checkpoint, Load, ModelFormat, Save, by_node_or_device

_log = logging.getLogger(__name__)


class WholeModel(ModelFormat):
    """Every rank of a group holds the whole model, and DistributedDataParallel averages their gradients."""

    summary = """Trains one model on several worker groups joined by slow links, with Streaming DiLoCo.

    Each worker group trains on its own, with DistributedDataParallel among its ranks. The model is cut into fragments,
    which the groups average one after the other, a few bits per value, while training goes on (arXiv 2501.18512)."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._buffers_are_due = False

    @staticmethod
    @override
    def base_arguments(
        *,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ddp_kwargs: dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> dict[str, Any]:
        """Checks the arguments of groups that hold the model whole."""
        if start_method not in ("popen", "spawn", "fork", "forkserver"):
            raise ValueError(
                f"start_method={start_method!r} is unknown: it must be 'popen', which runs the script again and is the"
                " default, 'spawn', 'fork' or 'forkserver'. Choose one of them."
            )
        check_ddp_kwargs(ddp_kwargs, "ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper")
        return {
            "start_method": start_method,
            "process_group_backend": process_group_backend,
            "accelerator": accelerator,
            "parallel_devices": parallel_devices,
            "cluster_environment": cluster_environment,
            "checkpoint_io": checkpoint_io,
            "precision_plugin": precision_plugin,
            **(ddp_kwargs or {}),
        }

    @override
    def layout(self, worker_groups: int | Literal["auto"], num_nodes: int, num_processes: int) -> GroupLayout:
        return by_node_or_device(worker_groups, num_nodes, num_processes)

    @override
    def described(self) -> dict[str, str]:
        return {}

    @override
    def saved_layout(self, topology: Topology) -> dict[str, int]:
        return {"worker_groups": topology.num_groups, "group_size": topology.group_size}

    @override
    def connect_processes(self, host: Any, set_up: Callable[[], None]) -> None:
        set_up()

    @override
    def join(self, host: Any, topology: Topology, layout: GroupLayout, timeout: timedelta) -> None:
        pass

    @override
    def sampler_kwargs(self, topology: Topology) -> dict[str, Any]:
        ranks = topology.num_groups * topology.group_size
        return {"num_replicas": ranks, "rank": topology.group_index * topology.group_size + topology.group_rank}

    @override
    def refuse(self, trainer: Any, precision: Any) -> None:
        pass

    @override
    def set_up_without_fit(self, host: Any, set_up: Callable[[Any], None], trainer: Any, align: bool) -> None:
        """Sets up as DDPStrategy does, but overwrites no weights with those of rank 0 unless asked to."""
        host.accelerator.setup(trainer)
        host.model = host.precision_plugin.convert_module(host.model)
        host.model_to_device()
        if align:
            align_model(host.model, host.topology)
        host.setup_precision_plugin()

    @override
    def wrap(self, host: Any, module: nn.Module, topology: Topology, wrap: Callable[[nn.Module], Any]) -> Any:
        group = topology.in_group.process_group
        host._ddp_kwargs["process_group"] = group
        _keep_hook_in_group(host, group)
        # A simulated group has no process group, and wraps in its own way.
        if topology.group_size == 1 and group is not None and has_nothing_to_average(module, host._ddp_kwargs):
            return SingleRankDDP(module, device_ids=host.determine_ddp_device_ids(), **host._ddp_kwargs)
        wrapped = wrap(module)
        if topology.group_size > 2 and not (wrapped.static_graph or wrapped.find_unused_parameters):
            fix_bucket_order(wrapped)
        elif topology.group_size > 2 and wrapped.static_graph and host.fit.checkpointer.resumes_exactly:
            _warn_of_static_graph(topology)
        return wrapped

    @override
    def wrap_anew(self, host: Any, topology: Topology, wrap: Callable[[nn.Module], Any]) -> None:
        if isinstance(host.model, DistributedDataParallel):
            # The old wrapper only knows the parameters that were trainable when it was made. Its hooks on parameters
            # last as long as it does, and it is part of a reference cycle, so the garbage collector must run.
            host.model = None
            gc.collect()
            host.model = self.wrap(host, host.lightning_module, topology, wrap)

    @override
    def begin_validation(self, model: Any) -> None:
        # After the forward pass of validation, DistributedDataParallel would believe that the buffers of the next
        # training step, which are put back then, have been synchronised already.
        if isinstance(model, DistributedDataParallel):
            self._buffers_are_due = model.require_forward_param_sync

    @override
    def end_validation(self, model: Any) -> None:
        if isinstance(model, DistributedDataParallel):
            model.require_forward_param_sync = self._buffers_are_due

    @override
    def local_state_dict(self, module: nn.Module, state_dict: Callable[[], Checkpoint]) -> Checkpoint:
        return state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer, state_of: Callable[[Optimizer], Any], is_alone: bool) -> Any:
        return state_of(optimizer)

    @override
    def optimizer_states(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer]) -> list[Any]:
        return list(checkpoint["optimizer_states"])

    @override
    def holds_the_same(self, saved: Mapping[str, int], own: Mapping[str, int]) -> bool:
        # Every rank holds the whole state; in a sharded group none does, and its layout has other keys.
        return saved.keys() == own.keys()

    @override
    def write(
        self, host: Any, topology: Topology, checkpoint: Checkpoint, path: Any, storage_options: Any, save: Save
    ) -> None:
        save(checkpoint, path, storage_options)

    @override
    def after_write(self, checkpoint: Checkpoint, path: Any, topology: Topology, placing: Placing | None) -> None:
        # The CheckpointIO does it once it has written the file.
        pass

    @override
    def read(self, host: Any, path: Any, load: Load, *args: Any, **kwargs: Any) -> Checkpoint:
        return dict(load(path, *args, **kwargs))

    @override
    def take_up_optimizers(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer], states: list[Any]) -> None:
        checkpoint["optimizer_states"] = states

    @override
    def start_optimizers_afresh(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer]) -> None:
        # An optimizer without its state keeps the learning rate from which the schedulers go on.
        checkpoint["optimizer_states"] = [{**state, "state": {}} for state in checkpoint["optimizer_states"]]


# Ends of names, with the arguments for which they stand.
# What the strategy passes to DistributedDataParallel, and arguments of DDPStrategy that do not go to it.
_NOT_FOR_DDP = frozenset(
    {
        "module",
        "device_ids",
        "process_group",
        "device_mesh",
        "process_group_backend",
        "timeout",
        "start_method",
        # It would average parameters over all ranks every so many steps.
        "model_averaging_period",
    }
)


def _keep_hook_in_group(host: Any, group: Any) -> None:
    """Gives a communication hook of DDP the process group: without one it reduces gradients over all groups."""
    state = host._ddp_comm_state
    if host._ddp_comm_hook is not None and state is None:
        host._ddp_comm_state = group
    elif state is not None and getattr(state, "process_group", group) is None:
        state.process_group = group


def _warn_of_static_graph(topology: Topology) -> None:
    if topology.world.rank == 0:
        _log.warning(
            "With static_graph=True DistributedDataParallel adds the gradients of the first step in another order than"
            " those of later steps. In a worker group of %d ranks the resumed run may round differently from one that"
            " was not interrupted; without static_graph it gives the same bits.",
            topology.group_size,
        )


def check_ddp_kwargs(ddp_kwargs: Any, *of_lightning: str) -> None:
    """Refuses what is not for DistributedDataParallel, or for Lightning's strategy around it."""
    if ddp_kwargs is not None and not isinstance(ddp_kwargs, Mapping):
        raise ValueError(
            f"ddp_kwargs={ddp_kwargs!r} is of type {type(ddp_kwargs).__name__}: it must be a dictionary, with"
            " arguments of DistributedDataParallel. Write ddp_kwargs={'find_unused_parameters': True}, for example."
        )
    known = {*inspect.signature(DistributedDataParallel).parameters, *of_lightning} - _NOT_FOR_DDP
    for name in ddp_kwargs or {}:
        if name in _NOT_FOR_DDP:
            raise ValueError(
                f"ddp_kwargs contains {name!r}, which the strategy itself sets: DistributedDataParallel runs among"
                " the ranks of a worker group. Take it out; choose the groups with worker_groups, and the rest with"
                " the strategy's own arguments."
            )
        if name not in known:
            near = get_close_matches(str(name), known)
            advice = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"It has {', '.join(sorted(known))}."
            raise ValueError(f"ddp_kwargs contains {name!r}, which DistributedDataParallel does not have. {advice}")
