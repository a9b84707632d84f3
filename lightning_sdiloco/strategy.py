"""The strategy, but for its base class: what both distributions of Lightning have in common."""

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sdiloco.agreement import align_model, is_aligned, require_same_model, require_same_settings
from lightning_sdiloco.buckets import fix_bucket_order
from lightning_sdiloco.callback import StreamingDiLoCoCallbackMixin
from lightning_sdiloco.collectives import CollectivesMixin
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine import StreamingDiLoCo
from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.flight import Landing
from lightning_sdiloco.partition import Fragment
from lightning_sdiloco.requests import Request, Requests
from lightning_sdiloco.schedule import Schedule
from lightning_sdiloco.settings import DEFAULT_TIMEOUT, Settings
from lightning_sdiloco.silence import silence
from lightning_sdiloco.start import cut
from lightning_sdiloco.summary import Summary
from lightning_sdiloco.topology import GroupLayout, Topology, checked_worker_groups, world

_log = logging.getLogger(__name__)


class StreamingDiLoCoMixin(CollectivesMixin):
    """Trains one model on several worker groups joined by slow links, with Streaming DiLoCo (arXiv 2501.18512).

    Each worker group trains on its own, with DistributedDataParallel among its ranks. The model is cut into fragments,
    which the groups average one after the other, a few bits per value, while training goes on.

    Args:
        worker_groups: Number of worker groups (M in the paper), of consecutive ranks. ``"auto"``: one per node when
            there are several nodes, otherwise one per device.
        sync_every: Inner steps between two launches of the same fragment (H in the paper).
        overlap_steps: Inner steps between the launch of a fragment and its landing (tau in the paper), below
            ``sync_every``.
        mixing: Share of the local parameters that is kept on landing (alpha in the paper), from 0 to 1.
        fragments: How the model is cut: ``"strided"``, ``"sequential"``, ``"balanced"``, or a list of lists of
            shell-style patterns matched against parameter names, one list for each fragment.
        layers_per_fragment: Repeated blocks in a fragment, for strided and sequential fragments.
        compression: How outer gradients are encoded: ``"fp32"``, ``"bf16"``, ``"fp4"``, or an object that is a
            ``lightning_sdiloco.compression.Compression``.
        outer_lr: Learning rate of the outer Nesterov SGD.
        outer_momentum: Momentum of the outer Nesterov SGD, as torch defines it.
        outer_optimizer: From the flat float32 shards, one per fragment, to a torch optimizer that works elementwise;
            replaces the Nesterov SGD.
        final_sync: Whether a finished fit ends with a plain mean of the groups' local parameters.
        exchange_backend: Backend of the process groups that join the worker groups. By default gloo.
        timeout: How long a fragment may be in flight, and the timeout of Lightning's own process groups.
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
    callback_type: type[StreamingDiLoCoCallbackMixin]

    def __init__(
        self,
        worker_groups: int | Literal["auto"] = "auto",
        sync_every: int = 100,
        overlap_steps: int = 5,
        mixing: float = 0.5,
        fragments: str | list[list[str]] = "strided",
        layers_per_fragment: int = 3,
        compression: str | Compression = "fp4",
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        outer_optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        final_sync: bool = True,
        exchange_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ddp_kwargs: dict[str, Any] | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self._settings = Settings(
            sync_every=sync_every,
            overlap_steps=overlap_steps,
            mixing=mixing,
            fragments=fragments,
            layers_per_fragment=layers_per_fragment,
            compression=compression,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer_optimizer=outer_optimizer,
            final_sync=final_sync,
            timeout=timeout,
        )
        self._worker_groups = checked_worker_groups(worker_groups)
        _require_backend(exchange_backend)
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
        self._topology: Topology | None = None
        self._engine: StreamingDiLoCo | None = None
        self._summary: Summary | None = None
        self._requests: Requests | None = None
        self._fragments: tuple[Fragment, ...] = ()
        self._stepped = False
        self._failed = False
        self._deciding: int | None = None
        self._agreed = 0
        self._noise = ExitStack()

    # What users read

    @property
    def schedule(self) -> Schedule:
        """When fragments launch and land; prints as a table. Known from ``on_fit_start`` on."""
        return Schedule(self._settings.sync_every, self._settings.overlap_steps, len(self.fragments))

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments: names and sizes in bytes of their parameters. Known from ``on_fit_start`` on."""
        return self._fragments or self._source.fragments

    def outer_state_dict(self) -> dict[str, Tensor]:
        """The outer parameters: name -> whole float32 tensor on the host, the same on every rank.

        The names are those of ``LightningModule.named_parameters()``. During a fit it is collective within a worker
        group.
        """
        return self._source.outer_state_dict()

    def report(self) -> dict[str, float]:
        """What happened in the fit.

        Returns:
            ``inner_steps``, ``launches``, ``landings``: counts; ``bytes_sent``, ``bytes_received``: between groups, by
            this rank; ``exposed_wait_s``: seconds for which training waited for fragments; ``in_flight_s``: seconds
            that fragments were in flight, added up.
        """
        return self._source.report()

    @property
    def engine(self) -> StreamingDiLoCo | None:
        """The engine of the fit that runs, or of the last one; None before the first in this process."""
        return self._engine

    @property
    def _source(self) -> StreamingDiLoCo | Summary:
        source = self._engine or self._summary
        if source is None:
            raise RuntimeError(
                "There is nothing to read before training: the fragments and the schedule are known from on_fit_start"
                " on, the outer parameters and the report from on_train_batch_start on, and all after trainer.fit."
            )
        return source

    # Start

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the name, unless it is registered already."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description="Streaming DiLoCo over worker groups")

    @override
    def connect(self, model: Any) -> None:
        super().connect(model)
        self._resumed = None
        self._failed = False
        callbacks = model._trainer.callbacks
        if not any(isinstance(callback, StreamingDiLoCoCallbackMixin) for callback in callbacks):
            # First, so that every other callback sees the model after the landing of its step.
            callbacks.insert(0, self.callback_type(self))

    @override
    def _configure_launcher(self) -> None:
        # Here a world that cannot be split is refused inside Trainer(), before any process starts.
        self._layout()
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = self._make_launcher(self._start_method)

    def _make_launcher(self, start_method: Any) -> Any:
        raise NotImplementedError

    def _layout(self) -> GroupLayout:
        world_size = self.num_nodes * self.num_processes
        automatic = self.num_nodes if self.num_nodes > 1 else world_size
        return GroupLayout(world_size, automatic if isinstance(self._worker_groups, str) else self._worker_groups)

    @override
    def setup_distributed(self) -> None:
        super().setup_distributed()
        # A second fit in this process finds the process groups of the first.
        if self._topology is None or self._topology.is_stale():
            settings = {**self._settings.described(), "worker_groups": str(self._worker_groups)}
            require_same_settings(settings, world())
            self._topology = Topology.of_world(self._layout(), self._settings.timeout)

    @override
    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            self._engine = self._summary = self._requests = None
            self._fragments = ()
            self._stepped = False
            self._noise.close()
            self._noise = silence(trainer, self)
            super().setup(trainer)
        else:
            self._setup_without_fit(trainer)

    def _setup_without_fit(self, trainer: Any) -> None:
        """As DDPStrategy does it, but for overwriting the weights of all ranks with those of rank 0 after a fit."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self._engine is None or not self._engine.is_training(self.model):
            align_model(self.model, self.topology.world)
        self.setup_precision_plugin()

    @override
    def _setup_model(self, model: nn.Module) -> Any:
        require_same_model(model, self.topology.world)
        # Here already, so that our own refusals come before those of DistributedDataParallel.
        self._fragments = cut(model, self._settings).fragments
        align_model(model, self.topology.world)
        self._ddp_kwargs["process_group"] = self.topology.in_group.process_group
        self._keep_hook_in_group()
        for part in model.modules():
            if isinstance(part, nn.SyncBatchNorm):
                # Lightning converts for the whole world, which would couple the groups at every step.
                part.process_group = self.topology.in_group.process_group
        wrapped = super()._setup_model(model)
        if self.topology.shards > 2 and not (wrapped.static_graph or wrapped.find_unused_parameters):
            fix_bucket_order(wrapped)
        elif self.topology.shards > 2 and wrapped.static_graph and self._resumed is not None and self.is_global_zero:
            _log.warning(
                "With static_graph=True DistributedDataParallel adds the gradients of the first step in another order"
                " than those of later steps. In a worker group of %d ranks the resumed run may round differently from"
                " one that was not interrupted; without static_graph it gives the same bits.",
                self.topology.shards,
            )
        return wrapped

    def _keep_hook_in_group(self) -> None:
        """Gives a communication hook of DDP the group: without one it reduces gradients over all groups."""
        group, state = self.topology.in_group.process_group, cast(Any, self._ddp_comm_state)
        if self._ddp_comm_hook is not None and state is None:
            self._ddp_comm_state = group
        elif getattr(state, "process_group", group) is None:
            state.process_group = group

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if hasattr(optimizer, "consolidate_state_dict"):
                raise ValueError(
                    f"{type(optimizer).__name__} divides its state over all processes and sends parameters between"
                    " them, also between worker groups, which train apart. Return the optimizer that it divides from"
                    " configure_optimizers instead."
                )

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # Only now are the weights final: checkpoints are restored and user hooks have run.
        assert self.lightning_module is not None
        self._engine = StreamingDiLoCo(
            self.lightning_module,
            topology=self.topology,
            inner_optimizers=self.optimizers,
            **vars(self._settings),
        )
        self._requests = Requests(self._engine)
        for optimizer in self.optimizers:
            if isinstance(optimizer, Optimizer):  # Lightning takes anything that has its methods.
                # In manual optimization they may be stepped without Lightning's wrapper.
                optimizer.register_step_post_hook(self._note_step)
        self._resume()

    # Training

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        # Inner steps are batches in which an optimizer stepped, however many there are; one that a GradScaler skipped
        # counts, because a skip happens in one group alone.
        self._note_step()
        return output

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def end_batch(self) -> list[Landing]:
        """Makes the inner step of a batch in which an optimizer stepped. Returns what landed."""
        self._agreed = 0
        if not self._stepped or self._engine is None or self._requests is None:
            return []
        if self._engine.is_finished:
            raise RuntimeError(
                "Training goes on after its last batch: max_epochs or max_steps was raised when the worker groups had"
                " joined already. Set them before trainer.fit, or fit again."
            )
        self._stepped = False
        landings = self._engine.step()
        self._agreed = self._requests.agreed(landings)
        return landings

    def finish(self) -> list[Landing]:
        """Ends a fit that ran to its end: the module is left with the outer parameters. Returns what landed."""
        return self._engine.finish() if self._engine is not None and not self._failed else []

    @override
    def on_train_end(self) -> None:
        self.finish()
        super().on_train_end()
        # Callbacks have run: one that put another model in place did so in every rank for itself.
        if self.model is not None and not is_aligned(self.model, self.topology.world, with_buffers=False):
            raise AgreementError(
                "After training the model differs between ranks: a hook or callback changed it in on_train_end, as"
                " callbacks that average weights do. What it put there is no model that the worker groups agree on. The"
                " outer model is in strategy.outer_state_dict() and in the last checkpoint; take the callback out."
            )

    @property
    def made_inner_steps(self) -> bool:
        """Whether any batch has counted as an inner step."""
        return self._engine is not None and self._engine.inner_steps > 0

    @property
    def is_training(self) -> bool:
        """Whether a fit has started and not finished."""
        return self._engine is not None and not self._engine.is_finished

    def progress(self) -> dict[str, str]:
        """What a progress bar shows."""
        if self._engine is None:
            return {}
        in_flight = ", ".join(map(str, self._engine.in_flight)) or "-"
        return {"outer_step": str(self.schedule.round(self._engine.inner_steps)), "in_flight": in_flight}

    # What one rank asks and all do

    def ask(self, request: int) -> None:
        """Asks all ranks for something. They do it after the same inner step, when a launch has landed."""
        if self._requests is not None:
            self._requests.ask(request)

    def asked(self, request: int) -> bool:
        """Whether this rank has asked for something that no launch has carried yet."""
        return self._engine is not None and self._engine.is_requested(request)

    def agreed(self, request: int) -> bool:
        """Whether all ranks do what was asked after this inner step."""
        return bool(self._agreed & request)

    def decide_checkpoint(self, index: int, hook: Callable[..., None], *args: Any) -> None:
        """Runs a hook of a checkpoint callback whose time interval all ranks decide together."""
        self._deciding = index
        try:
            hook(*args)
        finally:
            self._deciding = None

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.is_alone:
            return obj
        if self._deciding is None or not isinstance(obj, bool):
            return super().broadcast(obj, src)
        # ModelCheckpoint asks at every batch whether to skip the save that its time interval may call for.
        bit = int(Request.CHECKPOINT) << self._deciding
        self._deciding = None
        if not obj:
            self.ask(bit)
        return not self.agreed(bit)

    # Evaluation and checkpoints show the outer model

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._engine is not None:
            self._engine.show_outer()

    @override
    def on_validation_end(self) -> None:
        if self._engine is not None:
            self._engine.show_local()
        super().on_validation_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is None or self._engine.is_finished:
            return super().lightning_module_state_dict()
        if self._failed and self.topology.shards > 1:
            _log.warning(
                "A state_dict is taken after an exception. It holds the local parameters of this rank: gathering the"
                " outer ones would wait for ranks that may be gone. Resume from an earlier checkpoint."
            )
            return super().lightning_module_state_dict()
        with self._engine.evaluate():
            state = super().lightning_module_state_dict()
            return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}

    # Ends

    def fail(self) -> None:
        """Tells that this rank ends with an exception: from now on it must not wait for others."""
        self._failed = True

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.fail()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._noise.close()
        if self._engine is not None:
            self._engine.close()
        super().teardown()

    def summary(self) -> Summary | None:
        """What stays readable where a fit ran in other processes; None if none ran here."""
        return Summary.of(self._engine) if self._engine is not None and self._engine.is_finished else None

    def read_summary(self, summary: Summary | None) -> None:
        """Takes over what a fit in other processes left."""
        self._summary = summary


def _require_backend(exchange_backend: str | None) -> None:
    if exchange_backend not in (None, "gloo"):
        raise ValueError(
            f"exchange_backend={exchange_backend!r} is not available: worker groups exchange over 'gloo', on every"
            " device. Leave exchange_backend out."
        )


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
