"""The strategy for worker groups that share one sharded model, but for its base class.

Both distributions of Lightning have it in common.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_sdiloco.algorithm.settings import DEFAULT_TIMEOUT
from lightning_sdiloco.comm.layout import GroupLayout
from lightning_sdiloco.comm.topology import mesh_of
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine.agreement import align_model
from lightning_sdiloco.engine.parameters.sharding import local, ranks_of, reshard
from lightning_sdiloco.lightning.checkpoint import files
from lightning_sdiloco.lightning.checkpoint import sharded_model as sharded_files
from lightning_sdiloco.lightning.checkpoint.optimizer_state import own_state, take_up_state
from lightning_sdiloco.lightning.groups import GroupsMixin
from lightning_sdiloco.lightning.host.refusals import refuse_what_cannot_work_sharded

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
else:
    _Base = object


class StreamingDiLoCoModelParallelMixin(GroupsMixin, _Base):
    """Trains one model, too large for one device, on several worker groups joined by slow links.

    Each worker group trains one sharded copy of the model, with FSDP2, tensor parallelism or both among its ranks, as
    ``configure_model`` says. The groups do as in `StreamingDiLoCoStrategy`: they average fragments one after the other,
    a few bits per value, while training goes on (arXiv 2501.18512). Each rank exchanges what it holds.

    Args:
        data_parallel_size: Size of the mesh's dimension ``"data_parallel"``. ``"auto"``: the nodes of a group, or what
            ``tensor_parallel_size`` leaves.
        tensor_parallel_size: Size of its dimension ``"tensor_parallel"``. ``"auto"``: the devices of a group on one
            node, or what ``data_parallel_size`` leaves.
        save_distributed_checkpoint: Whether a checkpoint is a folder to which the ranks of a group write their parts,
            or a single file.
        worker_groups: Number of worker groups (M in the paper), of consecutive ranks. ``"auto"``: one per node when
            there are several nodes, otherwise one per device.
        sync_every: Inner steps between two launches of the same fragment (H in the paper). Here and in the next,
            ``"auto"`` leaves it to the planner, which measures the first inner steps and the link between groups.
        overlap_steps: Inner steps between the launch of a fragment and its landing (tau in the paper), below
            ``sync_every``; or ``"auto"``.
        mixing: Share of the local parameters that is kept on landing (alpha in the paper), from 0 to 1.
        fragments: How the model is cut: ``"strided"``, ``"sequential"``, ``"balanced"``, or a list of lists of
            shell-style patterns matched against parameter names, one list for each fragment; or ``"auto"``, which
            chooses ``layers_per_fragment`` too.
        layers_per_fragment: Repeated blocks in a fragment, for strided and sequential fragments.
        compression: How outer gradients are encoded: a name from ``lightning_sdiloco.compression.COMPRESSIONS``, such
            as ``"fp4"``, or an object that is a ``lightning_sdiloco.compression.Compression``.
        exchange: How encoded outer gradients become their mean in every group: ``"gather"``, ``"two_shot"``, or
            ``"auto"`` for what suits the number of groups and the compression.
        outer_lr: Learning rate of the outer Nesterov SGD.
        outer_momentum: Momentum of the outer Nesterov SGD, as torch defines it.
        outer_optimizer: From the flat float32 shards, one per fragment, to a torch optimizer that works elementwise;
            replaces the Nesterov SGD.
        outer_lr_schedule: From the outer optimizer to a torch scheduler, which counts the rounds of each fragment:
            its own outer steps. None keeps the rate.
        outer_clip_norm: The outer gradient of a group that is longer is scaled down to this norm. None clips nothing.
        outlier_guard: A group whose outer gradient is more than so many times as long as the median of its last ones
            is left out of the mean. None leaves out none.
        final_sync: Whether a finished fit ends with a plain mean of the groups' local parameters.
        offload: Whether outer parameters and outer momentum rest in page-locked memory of the host. ``"auto"``: where
            the device is CUDA.
        evaluate: Which model validation inside a fit sees: ``"outer"``, the same in all groups, or ``"local"``, that of
            each group. Checkpoints hold the outer one.
        exchange_backend: What carries outer gradients between worker groups: ``"gloo"``, the default, or ``"nccl"``
            from CUDA device to CUDA device.
        timeout: How long a fragment may be in flight, and the timeout of Lightning's own process groups.
        on_resume: ``"exact"`` refuses a checkpoint of other settings; ``"restart"`` starts the rounds anew from the
            outer parameters and outer momentum of any checkpoint.

    Raises:
        ValueError: If an argument is out of its range. The message names the argument.
    """

    strategy_name = "streaming_diloco_model_parallel"
    description = "Streaming DiLoCo over worker groups that share one sharded model"

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        worker_groups: int | Literal["auto"] = "auto",
        sync_every: int | Literal["auto"] = 100,
        overlap_steps: int | Literal["auto"] = 5,
        mixing: float = 0.5,
        fragments: str | list[list[str]] = "strided",
        layers_per_fragment: int = 3,
        compression: str | Compression = "fp4",
        exchange: Literal["auto", "gather", "two_shot"] = "auto",
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        outer_optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        outer_lr_schedule: Callable[[Optimizer], LRScheduler] | None = None,
        outer_clip_norm: float | None = None,
        outlier_guard: float | None = None,
        final_sync: bool = True,
        offload: bool | str = "auto",
        evaluate: Literal["outer", "local"] = "outer",
        exchange_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        on_resume: Literal["exact", "restart"] = "exact",
    ) -> None:
        self._keep(
            worker_groups=worker_groups,
            exchange_backend=exchange_backend,
            on_resume=on_resume,
            evaluate=evaluate,
            sync_every=sync_every,
            overlap_steps=overlap_steps,
            mixing=mixing,
            fragments=fragments,
            layers_per_fragment=layers_per_fragment,
            compression=compression,
            exchange=exchange,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer_optimizer=outer_optimizer,
            outer_lr_schedule=outer_lr_schedule,
            outer_clip_norm=outer_clip_norm,
            outlier_guard=outlier_guard,
            final_sync=final_sync,
            offload=offload,
            timeout=timeout,
        )
        _require_size("data_parallel_size", data_parallel_size)
        _require_size("tensor_parallel_size", tensor_parallel_size)
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            timeout=timeout,
        )

    # The mesh of a group

    @override
    def _layout(self) -> GroupLayout:
        data, tensor = self._data_parallel_size, self._tensor_parallel_size
        if isinstance(self._worker_groups, str) and isinstance(data, int) and isinstance(tensor, int):
            world_size = self.num_nodes * self.num_processes
            return GroupLayout(world_size, max(1, world_size // (data * tensor)))
        return super()._layout()

    @property
    def _mesh_shape(self) -> tuple[int, int]:
        """Sizes of the mesh of a group."""
        size, data, tensor = self._layout().group_size, self._data_parallel_size, self._tensor_parallel_size
        if isinstance(tensor, str):
            tensor = size // data if isinstance(data, int) else gcd(size, self.num_processes)
        if isinstance(data, str):
            data = size // tensor
        if data * tensor != size:
            raise ValueError(
                f"data_parallel_size={self._data_parallel_size!r} and"
                f" tensor_parallel_size={self._tensor_parallel_size!r} do not fill a worker group, which has {size}"
                " ranks: their product must be that number. Change one of them, or worker_groups."
            )
        return data, tensor

    @override
    def _configure_launcher(self) -> None:
        # A world that cannot be split is refused here: inside Trainer(), before any process starts.
        _ = self._mesh_shape
        self._device_backend()
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        # As ModelParallelStrategy does it, but with a mesh over the ranks of the group.
        with self._reached_groups():
            self._setup_distributed()
        self._join_groups()
        device = self.root_device.type
        self._device_mesh = mesh_of(self._layout(), device, *self._mesh_shape, self._settings.timeout)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @override
    def _described(self) -> dict[str, str]:
        names = ("data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint")
        return {**super()._described(), **{name: str(getattr(self, f"_{name}")) for name in names}}

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every group and every data-parallel rank has data of its own; tensor-parallel ranks have the same."""
        data, tensor = self._mesh_shape
        topology = self.topology
        return {
            "num_replicas": topology.num_groups * data,
            "rank": topology.group_index * data + topology.group_rank // tensor,
        }

    # Start

    @override
    def connect(self, model: Any) -> None:
        if model._trainer.state.fn == "fit":
            # Before callbacks are set up: some copy the model then.
            refuse_what_cannot_work_sharded(model._trainer, self.precision_plugin.precision)
        super().connect(model)

    @override
    def _setup_without_fit(self, trainer: Any) -> None:
        super()._setup_without_fit(trainer)
        assert self.model is not None
        if self._engine is None or not self._engine.is_training(self.model):
            align_model(self.model, self.topology)

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        assert self.lightning_module is not None
        reshard(self.lightning_module)
        self._require_averaged_gradients(self.lightning_module)
        self._prepare(self.lightning_module)
        super().setup_optimizers(trainer)

    def _require_averaged_gradients(self, model: nn.Module) -> None:
        """Refuses parameters whose gradients nobody averages over the data-parallel ranks of the group."""
        data, tensor = self._mesh_shape
        first = self.global_rank - self.global_rank % tensor
        row = set(range(first, first + tensor))
        alone = [name for name, p in model.named_parameters() if p.requires_grad and set(ranks_of(p)) <= row]
        if data > 1 and alone:
            raise ValueError(
                f"{len(alone)} trainable parameters, such as {alone[0]!r}, are not sharded over the mesh's"
                f" data_parallel dimension, which has {data} ranks: their gradients would not be averaged, and the"
                " ranks of a group would train different models. Call fully_shard on the module that holds them in"
                " configure_model, with mesh=self.device_mesh['data_parallel']."
            )

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._failed:
            # Gathering would wait for ranks that may be gone. What is returned here is not written.
            assert self.lightning_module is not None
            state = self.lightning_module.state_dict()
            return {name: local(value) if isinstance(value, Tensor) else value for name, value in state.items()}
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self.is_alone:
            return own_state(optimizer)
        # torch steps an optimizer without a state to get one: that is neither an inner step, nor is it to be kept.
        had_state, stepped = bool(optimizer.state), self._stepped
        try:
            return super().optimizer_state(optimizer)
        finally:
            self._stepped = stepped
            if not had_state:
                optimizer.state.clear()

    @override
    def _own_optimizer_states(self, checkpoint: dict[str, Any]) -> list[Any]:
        return [own_state(optimizer) for optimizer in self.optimizers]

    @override
    def _ranks_as_saved(self) -> dict[str, int]:
        data, tensor = self._mesh_shape
        return {**super()._ranks_as_saved(), "data_parallel": data, "tensor_parallel": tensor}

    @override
    def _holds_the_same_as(self, layout: dict[str, int]) -> bool:
        own = self._ranks_as_saved()
        return {**layout, "worker_groups": 0} == {**own, "worker_groups": 0}

    @override
    def _write_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} does not take storage_options for checkpoints.")
        path = Path(path)
        if files.KEY in checkpoint:
            groups = [own_state(optimizer)["param_groups"] for optimizer in self.optimizers]
            checkpoint = {**checkpoint, files.KEY: {**checkpoint[files.KEY], "param_groups": groups}}
        if not self._save_distributed_checkpoint:
            if self.is_global_zero:
                sharded_files.make_room_for_file(path)
                self.checkpoint_io.save_checkpoint(checkpoint, str(path))
        elif self.topology.group_index == 0:
            sharded_files.write_folder(checkpoint, path, self.topology.in_group)
            if self._placing is not None and files.KEY in checkpoint:
                files.remove_saves(str(path), self._placing.older_than(checkpoint[files.KEY]["save"]))

    @override
    def _read_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        path = Path(self.broadcast(str(path)))
        weights_only = kwargs.get("weights_only", args[0] if args else None)
        checkpoint = sharded_files.read_metadata(path, weights_only)
        if files.KEY not in checkpoint:
            return dict(super()._read_checkpoint(path, *args, **kwargs))
        assert self.model is not None
        assert self.lightning_module is not None
        sharded_files.read_model(self.model, path, checkpoint, self.lightning_module.strict_loading)
        return checkpoint

    @override
    def _take_up(self, checkpoint: dict[str, Any], own: dict[str, Any]) -> None:
        super()._take_up(checkpoint, own)
        for optimizer, state in zip(self.optimizers, own["optimizer_states"], strict=True):
            take_up_state(optimizer, state)

    @override
    def _start_optimizers_afresh(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("optimizer_states", [])
        groups = checkpoint[files.KEY].get("param_groups") or [state["param_groups"] for state in saved]
        for optimizer, own in zip(self.optimizers, groups, strict=True):
            optimizer.load_state_dict({"state": {}, "param_groups": own})


def _require_size(name: str, size: Any) -> None:
    if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(
            f"{name}={size!r} is out of range: it must be a whole number of at least 1, or 'auto'. Choose one of them."
        )
