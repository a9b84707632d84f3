"""The strategy for worker groups that train with DistributedDataParallel, but for its base class.

Both distributions of Lightning have it in common.
"""

import gc
import logging
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_sdiloco.algorithm.settings import DEFAULT_TIMEOUT
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine.agreement import align_model
from lightning_sdiloco.lightning.groups import GroupsMixin
from lightning_sdiloco.lightning.host.ddp_buckets import fix_bucket_order

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

_log = logging.getLogger(__name__)


class StreamingDiLoCoMixin(GroupsMixin, _Base):
    """Trains one model on several worker groups joined by slow links, with Streaming DiLoCo (arXiv 2501.18512).

    Each worker group trains on its own, with DistributedDataParallel among its ranks. The model is cut into fragments,
    which the groups average one after the other, a few bits per value, while training goes on.

    Args:
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
        start_method: How processes are started on one node: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        ddp_kwargs: Arguments for DistributedDataParallel inside a worker group.
        accelerator: As for every Lightning strategy.
        parallel_devices: As for every Lightning strategy.
        cluster_environment: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy.
        precision_plugin: As for every Lightning strategy.

    Raises:
        ValueError: If an argument is out of its range. The message names the argument.
    """

    strategy_name = "streaming_diloco"
    description = "Streaming DiLoCo over worker groups"

    def __init__(
        self,
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
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ddp_kwargs: dict[str, Any] | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
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
        self._buffers_are_due = False
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            timeout=timeout,
            start_method=start_method,
            **_checked_ddp_kwargs(ddp_kwargs or {}),
        )

    @override
    def _configure_launcher(self) -> None:
        # Here a world that cannot be split, or devices that NCCL does not join, are refused: inside Trainer(), before
        # any process starts.
        self._layout()
        self._device_backend()
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = self._make_launcher(self._start_method)

    def _make_launcher(self, start_method: Any) -> Any:
        raise NotImplementedError

    @override
    def setup_distributed(self) -> None:
        with self._reached_groups():
            super().setup_distributed()
        self._join_groups()

    @override
    def _setup_without_fit(self, trainer: Any) -> None:
        """As DDPStrategy does it, but for overwriting the weights of all ranks with those of rank 0 after a fit."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self._engine is None or not self._engine.is_training(self.model):
            align_model(self.model, self.topology)
        self.setup_precision_plugin()

    @override
    def _setup_model(self, model: nn.Module) -> Any:
        # First, so that our own refusals come before those of DistributedDataParallel.
        self._prepare(model)
        self._ddp_kwargs["process_group"] = self.topology.in_group.process_group
        self._keep_hook_in_group()
        for part in model.modules():
            if isinstance(part, nn.SyncBatchNorm):
                # Lightning converts for the whole world, which would couple the groups at every step.
                part.process_group = self.topology.in_group.process_group
        return self._wrapped(model)

    def _wrapped(self, model: nn.Module) -> Any:
        wrapped = super()._setup_model(model)
        if self.topology.group_size > 2 and not (wrapped.static_graph or wrapped.find_unused_parameters):
            fix_bucket_order(wrapped)
        elif (
            self.topology.group_size > 2 and wrapped.static_graph and self._resumed is not None and self.is_global_zero
        ):
            _log.warning(
                "With static_graph=True DistributedDataParallel adds the gradients of the first step in another order"
                " than those of later steps. In a worker group of %d ranks the resumed run may round differently from"
                " one that was not interrupted; without static_graph it gives the same bits.",
                self.topology.group_size,
            )
        return wrapped

    def _keep_hook_in_group(self) -> None:
        """Gives a communication hook of DDP the group: without one it reduces gradients over all groups."""
        group, state = self.topology.in_group.process_group, cast(Any, self._ddp_comm_state)
        if self._ddp_comm_hook is not None and state is None:
            self._ddp_comm_state = group
        elif state is not None and getattr(state, "process_group", group) is None:
            state.process_group = group

    @override
    def _wrap_anew(self) -> None:
        """DistributedDataParallel only knows the parameters that were trainable when it was made."""
        assert self.lightning_module is not None
        # Its hooks on the parameters go with it, and it is part of a reference cycle.
        self.model = None
        gc.collect()
        self.model = self._wrapped(self.lightning_module)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        # The forward of validation would let DistributedDataParallel believe that the buffers of the next training
        # step, which are put back, have been synchronised already.
        if self._shows_outer and isinstance(self.model, DistributedDataParallel):
            self._buffers_are_due = self.model.require_forward_param_sync

    @override
    def on_validation_end(self) -> None:
        if self._shows_outer and isinstance(self.model, DistributedDataParallel):
            self.model.require_forward_param_sync = self._buffers_are_due
        super().on_validation_end()


def _checked_ddp_kwargs(ddp_kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in ddp_kwargs:
        if name in _NOT_FOR_DDP:
            raise ValueError(
                f"ddp_kwargs contains {name!r}, which the strategy itself sets: DistributedDataParallel runs among the"
                " ranks of a worker group. Take it out; choose the groups with worker_groups, and the rest with the"
                " strategy's own arguments."
            )
    return ddp_kwargs


# What DistributedDataParallel gets from us, and arguments of DDPStrategy that are no arguments of it.
_NOT_FOR_DDP = frozenset(
    {
        "module",
        "device_ids",
        "process_group",
        "device_mesh",
        "process_group_backend",
        "timeout",
        "start_method",
        # Would average parameters over all ranks in between.
        "model_averaging_period",
    }
)
