"""Worker groups whose ranks share one sharded model, with FSDP2, tensor parallelism or both."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from math import gcd
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sdiloco.comm import GroupLayout, Topology, mesh_of
from lightning_sdiloco.engine import align_model, files, local, own_state, ranks_of, reshard, take_up_state
from lightning_sdiloco.lightning.checkpoint import sharded_model
from lightning_sdiloco.lightning.checkpoint.placement import Placing
from lightning_sdiloco.lightning.host.refusals import refuse_what_cannot_work_sharded
from lightning_sdiloco.lightning.model_format.base import Checkpoint, Load, ModelFormat, Save, by_node_or_device


class ShardedModel(ModelFormat):
    """Every rank of a group holds a part of the model, as ``configure_model`` says."""

    summary = """Trains one model, too large for one device, on several worker groups joined by slow links.

    Each worker group trains one sharded copy of the model, with FSDP2, tensor parallelism or both among its ranks, as
    ``configure_model`` says. The groups do as in `StreamingDiLoCoStrategy`: they average fragments one after the other,
    a few bits per value, while training goes on (arXiv 2501.18512). Each rank exchanges what it holds."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self._data: int | Literal["auto"] = arguments["data_parallel_size"]
        self._tensor: int | Literal["auto"] = arguments["tensor_parallel_size"]
        self._in_folders: bool = arguments["save_distributed_checkpoint"]
        self.mesh_shape = (1, 1)

    @staticmethod
    @override
    def base_arguments(
        *,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
    ) -> dict[str, Any]:
        """Checks the arguments of groups that share a sharded model."""
        for name, size in (("data_parallel_size", data_parallel_size), ("tensor_parallel_size", tensor_parallel_size)):
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(
                    f"{name}={size!r} is out of range: it must be a whole number of at least 1, or 'auto'. Choose one"
                    " of them."
                )
        return {
            "data_parallel_size": data_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "save_distributed_checkpoint": save_distributed_checkpoint,
            "process_group_backend": process_group_backend,
        }

    # The mesh of a group

    @override
    def layout(self, worker_groups: int | Literal["auto"], num_nodes: int, num_processes: int) -> GroupLayout:
        if isinstance(worker_groups, str) and isinstance(self._data, int) and isinstance(self._tensor, int):
            world_size = num_nodes * num_processes
            layout = GroupLayout(world_size, max(1, world_size // (self._data * self._tensor)))
        else:
            layout = by_node_or_device(worker_groups, num_nodes, num_processes)
        self.mesh_shape = self._shape_of(layout.group_size, num_processes)
        return layout

    def _shape_of(self, size: int, num_processes: int) -> tuple[int, int]:
        """Returns the mesh sizes of a group with this number of ranks."""
        data, tensor = self._data, self._tensor
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
        return data, tensor

    @override
    def described(self) -> dict[str, str]:
        return {name: str(value) for name, value in self._arguments.items()}

    @override
    def saved_layout(self, topology: Topology) -> dict[str, int]:
        data, tensor = self.mesh_shape
        return {
            "worker_groups": topology.num_groups,
            "group_size": topology.group_size,
            "data_parallel": data,
            "tensor_parallel": tensor,
        }

    @override
    def connect_processes(self, host: Any, set_up: Callable[[], None]) -> None:
        # As ModelParallelStrategy does it, but without its mesh, which spans all ranks.
        host._setup_distributed()

    @override
    def join(self, host: Any, topology: Topology, layout: GroupLayout, timeout: timedelta) -> None:
        host._device_mesh = mesh_of(layout, host.root_device.type, *self.mesh_shape, timeout)
        host.lightning_module._device_mesh = host._device_mesh

    @override
    def sampler_kwargs(self, topology: Topology) -> dict[str, Any]:
        # Every group and every data-parallel rank has data of its own; tensor-parallel ranks have the same.
        data, tensor = self.mesh_shape
        rank = topology.group_index * data + topology.group_rank // tensor
        return {"num_replicas": topology.num_groups * data, "rank": rank}

    # The model

    @override
    def refuse(self, trainer: Any, precision: Any) -> None:
        refuse_what_cannot_work_sharded(trainer, precision)

    @override
    def set_up_without_fit(self, host: Any, set_up: Callable[[Any], None], trainer: Any, align: bool) -> None:
        set_up(trainer)
        if align:
            align_model(host.model, host.topology)

    @override
    def before_optimizers(self, module: nn.Module, topology: Topology) -> bool:
        reshard(module)
        self._require_averaged_gradients(module, topology)
        return True

    def _require_averaged_gradients(self, model: nn.Module, topology: Topology) -> None:
        """Refuses parameters whose gradients are not averaged over the data-parallel ranks of the group."""
        data, tensor = self.mesh_shape
        rank = topology.group_index * topology.group_size + topology.group_rank
        first = rank - rank % tensor
        row = set(range(first, first + tensor))
        alone = [name for name, p in model.named_parameters() if p.requires_grad and set(ranks_of(p)) <= row]
        if data > 1 and alone:
            raise ValueError(
                f"{len(alone)} trainable parameters, such as {alone[0]!r}, are not sharded over the mesh's"
                f" data_parallel dimension, which has {data} ranks: their gradients would not be averaged, and the"
                " ranks of a group would train different models. Call fully_shard on the module that holds them in"
                " configure_model, with mesh=self.device_mesh['data_parallel']."
            )

    @override
    def wrap_anew(self, host: Any, topology: Topology, wrap: Callable[[nn.Module], Any]) -> None:
        pass

    @override
    def begin_validation(self, model: Any) -> None:
        pass

    @override
    def end_validation(self, model: Any) -> None:
        pass

    # Checkpoints

    @override
    def local_state_dict(self, module: nn.Module, state_dict: Callable[[], Checkpoint]) -> Checkpoint:
        # Gathering would wait for ranks that may be gone. What this returns is not written.
        state = module.state_dict()
        return {name: local(value) if isinstance(value, Tensor) else value for name, value in state.items()}

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
    def holds_the_same(self, saved: Mapping[str, int], own: Mapping[str, int]) -> bool:
        return {**saved, "worker_groups": 0} == {**own, "worker_groups": 0}

    @override
    def write(
        self, host: Any, topology: Topology, checkpoint: Checkpoint, path: Any, storage_options: Any, save: Save
    ) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(host).__name__} does not take storage_options for checkpoints.")
        path = Path(path)
        if files.KEY in checkpoint:
            groups = [own_state(optimizer)["param_groups"] for optimizer in host.optimizers]
            checkpoint = {**checkpoint, files.KEY: {**checkpoint[files.KEY], "param_groups": groups}}
        if not self._in_folders:
            if host.is_global_zero:
                sharded_model.make_room_for_file(path)
                host.checkpoint_io.save_checkpoint(checkpoint, str(path))
        elif topology.group_index == 0:
            sharded_model.write_folder(checkpoint, path, topology.in_group)

    @override
    def after_write(self, checkpoint: Checkpoint, path: Any, topology: Topology, placing: Placing | None) -> None:
        if self._in_folders and topology.group_index == 0 and placing is not None:
            placing.is_placed(checkpoint[files.KEY]["save"], str(path))

    @override
    def read(self, host: Any, path: Any, load: Load, *args: Any, **kwargs: Any) -> Checkpoint:
        path = Path(path if host.is_alone else host.topology.world.all_gather_object(str(path))[0])
        weights_only = kwargs.get("weights_only", args[0] if args else None)
        checkpoint = sharded_model.read_metadata(path, weights_only)
        if files.KEY not in checkpoint:
            return dict(load(path, *args, **kwargs))
        sharded_model.read_model(host.model, path, checkpoint, host.lightning_module.strict_loading)
        return checkpoint

    @override
    def take_up_optimizers(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer], states: list[Any]) -> None:
        checkpoint["optimizer_states"] = states
        for optimizer, state in zip(optimizers, states, strict=True):
            take_up_state(optimizer, state)

    @override
    def start_optimizers_afresh(self, checkpoint: Checkpoint, optimizers: Sequence[Optimizer]) -> None:
        saved = checkpoint.get("optimizer_states", [])
        groups = checkpoint[files.KEY].get("param_groups") or [state["param_groups"] for state in saved]
        for optimizer, own in zip(optimizers, groups, strict=True):
            optimizer.load_state_dict({"state": {}, "param_groups": own})
