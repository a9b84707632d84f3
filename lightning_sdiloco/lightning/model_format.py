"""How the ranks of a worker group hold the model: each the whole of it, or each a part.

All that depends on this stands here: the arguments of Lightning's strategy, the shape of a group, the wrapped model,
and how model and inner optimizers go into checkpoints and come back.

[Note: sharded folders] Only the first worker group writes: all groups hold the same outer model, and its inner
optimizers are those of rank 0. The folder is written beside its final place, and moved there when it is complete.
"""

import inspect
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from math import gcd
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_folder
from torch.distributed.checkpoint.state_dict_saver import save as save_folder
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import GroupLayout, Topology, mesh_of
from lightning_sdiloco.engine import checkpoint as files
from lightning_sdiloco.engine.checkpoint import own_state, take_up_state
from lightning_sdiloco.engine.shards import local, part_of, ranks_of, reshard
from lightning_sdiloco.lightning.host.ddp import SingleRankDDP, fix_bucket_order, has_nothing_to_average
from lightning_sdiloco.lightning.host.refusals import refuse_what_cannot_work_sharded

_log = logging.getLogger(__name__)

Checkpoint = dict[str, Any]
Save = Callable[[Checkpoint, Any, Any], None]
Load = Callable[..., Checkpoint]

# What the strategy passes to DistributedDataParallel, and arguments of DDPStrategy that do not go to it.
_NOT_FOR_DDP = frozenset(
    ("module", "device_ids", "process_group", "device_mesh", "process_group_backend", "timeout", "start_method")
    # It would average parameters over all ranks every so many steps.
    + ("model_averaging_period",)
)

# Where Lightning keeps what is not a tensor, in a sharded folder.
_METADATA = "meta.pt"


class WholeModel:
    """Every rank of a group holds the whole model, and DistributedDataParallel averages their gradients.

    `ShardedModel` overrides what differs where ranks share it.
    """

    summary: ClassVar[str] = """Trains one model on several worker groups joined by slow links, with Streaming DiLoCo.

    Each worker group trains on its own, with DistributedDataParallel among its ranks. The model is cut into fragments,
    which the groups average one after the other, a few bits per value, while training goes on (arXiv 2501.18512)."""

    in_folders = False
    """Whether checkpoints are sharded folders, which no CheckpointIO writes."""

    mesh: Mapping[str, int] = MappingProxyType({})
    """The sizes of a group's dimensions for data and tensor parallelism, where its ranks share the model."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Takes what `base_arguments` returned."""
        self.described: dict[str, str] = {}  # What must be the same on all ranks.

    @staticmethod
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
        """Checks the arguments that only this format has, and returns those of Lightning's strategy.

        Args:
            start_method: How processes are started on one node: ``"popen"``, ``"spawn"``, ``"fork"`` or
                ``"forkserver"``.
            ddp_kwargs: Arguments for DistributedDataParallel inside a worker group.
            process_group_backend: Backend of the process groups that Lightning and a worker group use, such as
                ``"gloo"``. None: what suits the device.
            accelerator: As for every Lightning strategy.
            parallel_devices: As for every Lightning strategy.
            cluster_environment: As for every Lightning strategy.
            checkpoint_io: As for every Lightning strategy.
            precision_plugin: As for every Lightning strategy.
        """
        arguments = dict(locals())
        if start_method not in ("popen", "spawn", "fork", "forkserver"):
            raise ValueError(
                f"start_method={start_method!r} is unknown: it must be 'popen', which runs the script again and is the"
                " default, 'spawn', 'fork' or 'forkserver'. Choose one of them."
            )
        check_ddp_kwargs(ddp_kwargs, "ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper")
        del arguments["ddp_kwargs"]
        return {**arguments, **(ddp_kwargs or {})}

    # The shape of a group

    def layout(self, worker_groups: int | Literal["auto"], num_nodes: int, num_processes: int) -> GroupLayout:
        """``"auto"`` is a group per node, or per device of a single node."""
        world_size = num_nodes * num_processes
        automatic = num_nodes if num_nodes > 1 else world_size
        return GroupLayout(world_size, automatic if isinstance(worker_groups, str) else worker_groups)

    def saved_layout(self, topology: Topology) -> dict[str, int]:
        """Returns what must be the same if ranks are to read their own files of a checkpoint."""
        return {"worker_groups": topology.num_groups, "group_size": topology.group_size, **self.mesh}

    def connect_processes(self, host: Any, set_up: Callable[[], None]) -> None:
        set_up()

    def join(self, host: Any, topology: Topology, layout: GroupLayout, timeout: timedelta) -> None:
        """Prepares the ranks of a group for the model, as soon as all processes are connected."""

    def sampler_kwargs(self, topology: Topology) -> dict[str, Any]:
        # Every group and every data-parallel rank has data of its own; tensor-parallel ranks have the same.
        tensor = self.mesh.get("tensor_parallel", 1)
        data = topology.group_size // tensor
        rank = topology.group_index * data + topology.group_rank // tensor
        return {"num_replicas": topology.num_groups * data, "rank": rank}

    # The model

    @staticmethod
    def refuse(trainer: Any, precision: Any) -> None:
        """Raises a `ValueError` if a trainer has something that cannot work with this format."""

    def set_up_without_fit(self, host: Any, set_up: Callable[[Any], None], trainer: Any) -> None:
        """Sets up as DDPStrategy does, but overwrites no weights with those of rank 0."""
        host.accelerator.setup(trainer)
        host.model = host.precision_plugin.convert_module(host.model)
        host.model_to_device()
        host.setup_precision_plugin()

    def before_optimizers(self, module: nn.Module, topology: Topology) -> bool:
        """Checks a model that is about to get its optimizers, if no wrapper has; returns whether it did."""
        return False

    def wrap(self, host: Any, module: nn.Module, topology: Topology, wrap: Callable[[nn.Module], Any]) -> Any:
        group = topology.in_group.process_group
        host._ddp_kwargs["process_group"] = group
        # Without the process group a communication hook of DDP reduces gradients over all groups.
        state = host._ddp_comm_state
        if host._ddp_comm_hook is not None and state is None:
            host._ddp_comm_state = group
        elif state is not None and getattr(state, "process_group", group) is None:
            state.process_group = group
        # A simulated group has no process group, and wraps in its own way.
        if topology.group_size == 1 and group is not None and has_nothing_to_average(module, host._ddp_kwargs):
            return SingleRankDDP(module, device_ids=host.determine_ddp_device_ids(), **host._ddp_kwargs)
        wrapped = wrap(module)
        if topology.group_size > 2 and not (wrapped.static_graph or wrapped.find_unused_parameters):
            fix_bucket_order(wrapped)
            return wrapped
        resumes = topology.group_size > 2 and host.fit.checkpointer.resumes_exactly
        if resumes and wrapped.static_graph and topology.world.rank == 0:
            _log.warning(
                "With static_graph=True DistributedDataParallel adds the gradients of the first step in another"
                " order than those of later steps. In a worker group of %d ranks the resumed run may round"
                " differently from one that was not interrupted; without static_graph it gives the same bits.",
                topology.group_size,
            )
        return wrapped

    # Checkpoints

    def optimizer_state(self, optimizer: Optimizer, state_of: Callable[[Optimizer], Any], is_alone: bool) -> Any:
        """Returns the state of an inner optimizer for the part of a checkpoint that all groups share."""
        return state_of(optimizer)

    def optimizer_states(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer]) -> list[Any]:
        return list(checkpoint["optimizer_states"])

    def write(
        self, host: Any, topology: Topology, checkpoint: Checkpoint, path: Any, storage_options: Any, save: Save
    ) -> None:
        """Writes what all groups have in common. All ranks must call it."""
        save(checkpoint, path, storage_options)

    def read(self, host: Any, path: Any, load: Load, *args: Any, **kwargs: Any) -> Checkpoint:
        """Reads what all groups have in common. All ranks must call it."""
        return dict(load(path, *args, **kwargs))

    def take_up_optimizers(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer], states: list[Any]) -> None:
        """Puts what this rank saved of its inner optimizers in place of what rank 0 saved."""
        checkpoint["optimizer_states"] = states


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


class ShardedModel(WholeModel):
    """Every rank of a group holds a part of the model, as ``configure_model`` says."""

    summary = """Trains one model, too large for one device, on several worker groups joined by slow links.

    Each worker group trains one sharded copy of the model, with FSDP2, tensor parallelism or both among its ranks, as
    ``configure_model`` says. The groups do as in `StreamingDiLoCoStrategy`: they average fragments one after the other,
    a few bits per value, while training goes on (arXiv 2501.18512). Each rank exchanges what it holds."""

    refuse = staticmethod(refuse_what_cannot_work_sharded)

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.described = {name: str(value) for name, value in arguments.items()}
        self._data: int | Literal["auto"] = arguments["data_parallel_size"]
        self._tensor: int | Literal["auto"] = arguments["tensor_parallel_size"]
        self.in_folders = arguments["save_distributed_checkpoint"]

    @staticmethod
    @override
    def base_arguments(  # type: ignore[override]
        *,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
    ) -> dict[str, Any]:
        """Checks the arguments that only this format has, and returns those of Lightning's strategy.

        Args:
            data_parallel_size: Size of the mesh's dimension ``"data_parallel"``. ``"auto"``: the nodes of a group, or
                what ``tensor_parallel_size`` leaves.
            tensor_parallel_size: Size of its dimension ``"tensor_parallel"``. ``"auto"``: the devices of a group on one
                node, or what ``data_parallel_size`` leaves.
            save_distributed_checkpoint: Whether a checkpoint is a folder to which the ranks of a group write their
                parts, or a single file.
            process_group_backend: Backend of the process groups that Lightning and a worker group use, such as
                ``"gloo"``. None: what suits the device.
        """
        arguments = dict(locals())
        for name in ("data_parallel_size", "tensor_parallel_size"):
            size = arguments[name]
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(
                    f"{name}={size!r} is out of range: it must be a whole number of at least 1, or 'auto'. Choose one"
                    " of them."
                )
        return arguments

    # The mesh of a group

    @override
    def layout(self, worker_groups: int | Literal["auto"], num_nodes: int, num_processes: int) -> GroupLayout:
        if isinstance(worker_groups, str) and isinstance(self._data, int) and isinstance(self._tensor, int):
            world_size = num_nodes * num_processes
            layout = GroupLayout(world_size, max(1, world_size // (self._data * self._tensor)))
        else:
            layout = super().layout(worker_groups, num_nodes, num_processes)
        data, tensor, size = self._data, self._tensor, layout.group_size
        if isinstance(tensor, str):
            tensor = size // data if isinstance(data, int) else gcd(size, num_processes)
        if isinstance(data, str):
            data = size // tensor
        if data * tensor != size:
            raise ValueError(
                f"data_parallel_size={self._data!r} and tensor_parallel_size={self._tensor!r} do not fill a worker"
                f" group, which has {size} ranks: their product must be that number. Change one of them, or"
                " worker_groups."
            )
        self.mesh = {"data_parallel": data, "tensor_parallel": tensor}
        return layout

    @override
    def connect_processes(self, host: Any, set_up: Callable[[], None]) -> None:
        # As ModelParallelStrategy does it, but without its mesh, which spans all ranks.
        host._setup_distributed()

    @override
    def join(self, host: Any, topology: Topology, layout: GroupLayout, timeout: timedelta) -> None:
        data, tensor = self.mesh.values()
        host._device_mesh = mesh_of(layout, host.root_device.type, data, tensor, timeout)
        host.lightning_module._device_mesh = host._device_mesh

    # The model

    @override
    def set_up_without_fit(self, host: Any, set_up: Callable[[Any], None], trainer: Any) -> None:
        set_up(trainer)

    @override
    def before_optimizers(self, module: nn.Module, topology: Topology) -> bool:
        reshard(module)
        data, tensor = self.mesh.values()
        rank = topology.group_index * topology.group_size + topology.group_rank
        row = set(range(rank - rank % tensor, rank - rank % tensor + tensor))
        alone = [name for name, p in module.named_parameters() if p.requires_grad and set(ranks_of(p)) <= row]
        if data > 1 and alone:
            raise ValueError(
                f"{len(alone)} trainable parameters, such as {alone[0]!r}, are not sharded over the mesh's"
                f" data_parallel dimension, which has {data} ranks: their gradients would not be averaged, and the"
                " ranks of a group would train different models. Call fully_shard on the module that holds them in"
                " configure_model, with mesh=self.device_mesh['data_parallel']."
            )
        return True

    # Checkpoints

    @override
    def optimizer_state(self, optimizer: Optimizer, state_of: Callable[[Optimizer], Any], is_alone: bool) -> Any:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if is_alone:
            return own_state(optimizer)
        had_state = bool(optimizer.state)
        try:
            return state_of(optimizer)
        finally:
            # torch steps an optimizer that has no state to get one, which must not be kept.
            if not had_state:
                optimizer.state.clear()

    @override
    def optimizer_states(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer]) -> list[Any]:
        return [own_state(optimizer) for optimizer in optimizers]

    @override
    def write(
        self, host: Any, topology: Topology, checkpoint: Checkpoint, path: Any, storage_options: Any, save: Save
    ) -> None:
        if files.KEY in checkpoint:
            groups = [own_state(optimizer)["param_groups"] for optimizer in host.optimizers]
            checkpoint = {**checkpoint, files.KEY: {**checkpoint[files.KEY], "param_groups": groups}}
        if not self.in_folders:
            save(checkpoint, path, storage_options)
        elif storage_options is not None:
            raise TypeError(f"{type(host).__name__} does not take storage_options for checkpoints.")
        elif topology.group_index == 0:
            write_folder(checkpoint, Path(path), topology.in_group)

    @override
    def read(self, host: Any, path: Any, load: Load, *args: Any, **kwargs: Any) -> Checkpoint:
        path = Path(path if host.is_alone else host.topology.world.all_gather_object(str(path))[0])
        weights_only = kwargs.get("weights_only", args[0] if args else None)
        # The tensors of a single file stay on disk.
        file, how = (path / _METADATA, {}) if is_folder(path) else (path, {"mmap": True})
        checkpoint = dict(torch.load(file, map_location="cpu", weights_only=weights_only, **how))
        if files.KEY not in checkpoint:
            return dict(load(path, *args, **kwargs))
        model, strict = host.model, host.lightning_module.strict_loading
        state: dict[str, Any] = get_model_state_dict(model)
        if is_folder(path):
            loaded = {"state_dict": state}
            load_folder(loaded, checkpoint_id=path)
            set_model_state_dict(model, loaded["state_dict"], options=StateDictOptions(strict=strict))
        else:
            whole = checkpoint.pop("state_dict")
            if strict and state.keys() != whole.keys():
                missing, unexpected = sorted(state.keys() - whole.keys()), sorted(whole.keys() - state.keys())
                raise RuntimeError(
                    f"The checkpoint is not of this model. Missing: {missing}. Unexpected: {unexpected}."
                )
            with torch.no_grad():
                for name in state.keys() & whole.keys():
                    if isinstance(state[name], Tensor):
                        local(state[name]).copy_(part_of(state[name], whole[name]))
        return checkpoint

    @override
    def take_up_optimizers(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer], states: list[Any]) -> None:
        checkpoint["optimizer_states"] = states
        for optimizer, state in zip(optimizers, states, strict=True):
            take_up_state(optimizer, state)


# Sharded folders


def is_folder(path: Path) -> bool:
    return path.is_dir() and (path / _METADATA).is_file()


def write_folder(checkpoint: Mapping[str, Any], path: Path, group: Communicator) -> None:
    """Writes a sharded folder; see [Note: sharded folders]. All ranks of one group must call it."""
    metadata = dict(checkpoint)
    tensors = {"state_dict": metadata.pop("state_dict")}
    for index, state in enumerate(metadata.pop("optimizer_states", [])):
        tensors[f"optimizer_{index}"] = state
    part, before = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.before")
    # What an earlier save has left goes before any rank writes; all ranks raise if it cannot.
    first = group.attempt(lambda: _remove(part) if group.rank == 0 else None)[0]
    if first.failure:
        raise first.raised or OSError(f"rank 0: {first.failure[0]}: {first.text}")
    try:
        save_folder(tensors, checkpoint_id=part, process_group=group.process_group)
        if group.rank == 0:
            torch.save(metadata, part / _METADATA)
            # What was there stays beside it until the new one is in its place.
            _remove(before)
            if path.exists():
                os.replace(path, before)
            os.replace(part, path)
            _remove(before)
    except Exception:
        if group.rank == 0:
            _remove(part)
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
