"""The strategy, but for its base class: what both distributions of Lightning have in common."""

import gc
import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_sdiloco.agreement import align_model, is_aligned, require_same_model, require_same_settings
from lightning_sdiloco.averaging import Averaging
from lightning_sdiloco.buckets import fix_bucket_order
from lightning_sdiloco.callback import StreamingDiLoCoCallbackMixin
from lightning_sdiloco.choosing import Choosing, Measured, tell
from lightning_sdiloco.collectives import CollectivesMixin
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.engine import StreamingDiLoCo
from lightning_sdiloco.epochs import begin_epochs_alike
from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.failures import Failures
from lightning_sdiloco.flight import Landing
from lightning_sdiloco.partition import Fragment
from lightning_sdiloco.promptness import Promptness
from lightning_sdiloco.refused import refuse_what_cannot_work
from lightning_sdiloco.requests import Request, Requests
from lightning_sdiloco.schedule import Schedule
from lightning_sdiloco.settings import DEFAULT_TIMEOUT
from lightning_sdiloco.signals import Signals
from lightning_sdiloco.silence import silence, silence_without_fit
from lightning_sdiloco.start import cut
from lightning_sdiloco.summary import Summary
from lightning_sdiloco.topology import GroupLayout, Topology, checked_worker_groups, store, world
from lightning_sdiloco.uneven import end_epochs_together

_log = logging.getLogger(__name__)


class StreamingDiLoCoMixin(CollectivesMixin):
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
        evaluate: Which model validation inside a fit sees: ``"outer"``, the same in all groups, or ``"local"``, that of
            each group. Checkpoints hold the outer one.
        exchange_backend: Backend of the process groups that join the worker groups. By default gloo.
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
    callback_type: type[StreamingDiLoCoCallbackMixin]
    termination: type[BaseException]

    def __init__(
        self,
        worker_groups: int | Literal["auto"] = "auto",
        sync_every: int | Literal["auto"] = 100,
        overlap_steps: int | Literal["auto"] = 5,
        mixing: float = 0.5,
        fragments: str | list[list[str]] = "strided",
        layers_per_fragment: int = 3,
        compression: str | Compression = "fp4",
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        outer_optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        outer_lr_schedule: Callable[[Optimizer], LRScheduler] | None = None,
        outer_clip_norm: float | None = None,
        outlier_guard: float | None = None,
        final_sync: bool = True,
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
        self._choosing, self._settings = Choosing.of(
            sync_every=sync_every,
            overlap_steps=overlap_steps,
            mixing=mixing,
            fragments=fragments,
            layers_per_fragment=layers_per_fragment,
            compression=compression,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer_optimizer=outer_optimizer,
            outer_lr_schedule=outer_lr_schedule,
            outer_clip_norm=outer_clip_norm,
            outlier_guard=outlier_guard,
            final_sync=final_sync,
            timeout=timeout,
        )
        self._worker_groups = checked_worker_groups(worker_groups)
        _require_backend(exchange_backend)
        self._on_resume = _checked_on_resume(on_resume)
        self._buffers_are_due = False
        self._evaluate = _checked_model_to_evaluate(evaluate)
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
        self._signals: Signals | None = None
        self._failures: Failures | None = None
        self._promptness: Promptness | None = None
        self._fragments: tuple[Fragment, ...] = ()
        self._averaging: Averaging | None = None
        self._early: list[Landing] = []
        self._epoch_begins = False
        self.landed = False
        self._stepped = False
        self._optimizer_steps = self._steps_per_batch = 0
        self._failed = False
        self._deciding: int | None = None
        self._agreed = 0
        self._noise = ExitStack()

    # What users read

    @property
    def schedule(self) -> Schedule:
        """When fragments launch and land; prints as a table. Known from ``on_fit_start`` on.

        Where settings are ``"auto"``, it is known when they are chosen, after the first inner steps.
        """
        if self._summary is not None:
            return self._summary.schedule
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
            ``inner_steps``, ``launches``, ``landings``: counts; ``flights_dropped``: flights that were lost when a run
            went on with other groups or settings; ``bytes_sent``, ``bytes_received``: between groups, by this rank;
            ``exposed_wait_s``: seconds for which training waited for fragments; ``in_flight_s``: seconds that fragments
            were in flight, added up.
        """
        return self._source.report()

    @property
    def measured(self) -> Measured | None:
        """What the planner chose ``"auto"`` settings from; None if it did not, or took them from a checkpoint."""
        return self._choosing.measured

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
                " on, the outer parameters and the report from on_train_batch_start on, and all after a fit in which"
                " anything was trained."
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
        self._forget_loaded()
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
        layout = self._layout()
        self._failures = Failures(store(), self.global_rank, layout.group_of(self.global_rank), layout.world_size)
        # A second fit in this process finds the process groups of the first.
        if self._topology is None or self._topology.is_stale():
            choices = {
                "worker_groups": str(self._worker_groups),
                "evaluate": self._evaluate,
                "on_resume": self._on_resume,
            }
            settings = {**self._choosing.described(self._settings.described()), **choices}
            require_same_settings(settings, world())
            self._topology = Topology.of_world(layout, self._settings.timeout)

    @override
    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            self._engine = self._summary = self._requests = None
            self._fragments = ()
            self._early = []
            self._agreed = 0
            self._signals = Signals(trainer, self)
            self._optimizer_steps = self._steps_per_batch = 0
            self._noise.close()
            refuse_what_cannot_work(trainer)
            self._noise = silence(trainer, self)
            self._noise.enter_context(end_epochs_together(trainer, self))
            begin_epochs_alike(trainer, self._noise)
            super().setup(trainer)
            self._averaging = Averaging(trainer, self, self._noise)
        else:
            self._noise.close()
            self._noise = silence_without_fit(trainer)
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
        self._take_up_what_was_trainable(model)
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
        return self._wrapped(model)

    def _wrapped(self, model: nn.Module) -> Any:
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
        elif state is not None and getattr(state, "process_group", group) is None:
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
        self._stepped = self.landed = False
        self._optimizer_steps = self._steps_per_batch = 0
        self._choosing.start()
        self._watch_signals()
        for optimizer in self.optimizers:
            if isinstance(optimizer, Optimizer):  # Lightning takes anything that has its methods.
                # In manual optimization they may be stepped without Lightning's wrapper.
                optimizer.register_step_post_hook(self._note_step)
        self._resume()

    def _watch_signals(self) -> None:
        assert self._engine is not None
        is_chosen = not self._choosing.names
        self._promptness = Promptness(self._engine.schedule) if self.is_global_zero and is_chosen else None

    # Training

    def begin_epoch(self) -> None:
        """Looks at the first batch of the epoch whether other parameters are trainable now."""
        self._epoch_begins = True

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._recut_where_an_epoch_begins()

    def _recut_where_an_epoch_begins(self) -> None:
        # With its first batch all hooks have run that may freeze or unfreeze something at the start of an epoch.
        if self._epoch_begins and self._engine is not None and self._engine.has_other_parameters():
            self._recut(self._engine)
        self._epoch_begins = False

    def _recut(self, engine: StreamingDiLoCo) -> None:
        before = {name for fragment in engine.fragments for name in fragment.names}
        # What other groups asked with these launches is decided, and logged, with the next inner step.
        self._early += engine.recut()
        self._fragments = engine.fragments
        now = {name for fragment in engine.fragments for name in fragment.names}
        if self.is_global_zero:
            _log.warning(
                "%d parameters became trainable and %d were frozen since the last epoch: the model is cut into %d"
                " fragments anew, and the rounds begin again.",
                len(now - before),
                len(before - now),
                len(engine.fragments),
            )
        self._wrap_anew()

    def _wrap_anew(self) -> None:
        """DistributedDataParallel only knows the parameters that were trainable when it was made."""
        assert self.lightning_module is not None
        # Its hooks on the parameters go with it, and it is part of a reference cycle.
        self.model = None
        gc.collect()
        self.model = self._wrapped(self.lightning_module)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if batch is None:
            # Lightning calls no on_train_batch_start for an idle batch, and the other groups may be there. The user's
            # hooks that move a batch need not know of idle ones.
            self._recut_where_an_epoch_begins()
            return None
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        # Inner steps are batches in which an optimizer stepped, however many there are; one that a GradScaler skipped
        # counts, because a skip happens in one group alone.
        self._optimizer_steps += 1
        self._note_step()
        return output

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    @property
    def optimizer_steps(self) -> int:
        """How often optimizers have stepped in this batch."""
        return self._optimizer_steps

    @property
    def optimizer_steps_per_batch(self) -> int:
        """How often they did in the last batch in which one did; before, once each."""
        return self._steps_per_batch or len(self.optimizers)

    def end_batch(self, idle: bool = False) -> list[Landing]:
        """Makes the inner step of a batch in which an optimizer stepped, or would have. Returns what landed.

        Args:
            idle: Whether the other groups make an inner step in this batch while this one has nothing to train on.
        """
        self._agreed = 0
        self.landed = False
        if not (self._stepped or idle) or self._engine is None or self._requests is None:
            return []
        if self._engine.is_finished:
            raise RuntimeError(
                "Training goes on after its last batch: max_epochs or max_steps was raised when the worker groups had"
                " joined already. Set them before trainer.fit, or fit again."
            )
        self._steps_per_batch = self._optimizer_steps or self._steps_per_batch
        self._optimizer_steps = 0
        self._stepped = False
        self._requests.ask(self.signals.received)
        landings = [*self._early, *self._engine.step(idle=idle)]
        self._early = []
        self.landed = bool(landings)
        self._agreed = self._requests.agreed(landings)
        if self._promptness is not None:
            self._promptness.step(self._engine.inner_steps)
        if self._choosing.step(self._settings.sync_every - self._engine.steps_in_rounds):
            self._choose(self._engine)
        return landings

    def _choose(self, engine: StreamingDiLoCo) -> None:
        """See [Note: what is chosen when]."""
        assert self.lightning_module is not None
        self._settings = self._choosing.choose(self._settings, self.lightning_module, self.topology)
        engine.choose(self._settings)
        self._fragments = engine.fragments
        self._watch_signals()
        if self.is_global_zero:
            trainer = self.lightning_module.trainer
            tell(self._settings, len(engine.fragments), self._choosing.measured, trainer.loggers, trainer.global_step)

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
                "After training the model differs between ranks: a hook or callback changed it in on_train_end. What it"
                " put there is no model that the worker groups agree on. The outer model is in"
                " strategy.outer_state_dict() and in the last checkpoint; take the callback out."
            )
        self.signals.end_if_any_received()

    @property
    def made_inner_steps(self) -> bool:
        """Whether any batch has counted as an inner step."""
        return self._engine is not None and self._engine.inner_steps > 0

    @property
    def is_training(self) -> bool:
        """Whether a fit has started and not finished."""
        return self._engine is not None and not self._engine.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether a fit has finished: the outer parameters change no more."""
        return self._engine is not None and self._engine.is_finished

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

    @property
    def signals(self) -> Signals:
        """The signals that this rank gets in the fit that runs."""
        assert self._signals is not None, "signals are listened to from setup on"
        return self._signals

    def agreed(self, request: int) -> bool:
        """Whether all ranks do what was asked after this inner step."""
        return bool(self._agreed & request)

    def settle(self, request: int) -> None:
        """Takes what was asked up to now as done. All ranks do so after the same inner step."""
        if self._requests is not None:
            self._requests.settle(request)

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
        if self._engine is not None and self._evaluate == "outer":
            self._engine.show_outer()
            # The forward of validation would let DistributedDataParallel believe that the buffers of the next training
            # step, which are put back, have been synchronised already.
            if isinstance(self.model, DistributedDataParallel):
                self._buffers_are_due = self.model.require_forward_param_sync

    @override
    def on_validation_end(self) -> None:
        if self._engine is not None and self._evaluate == "outer":
            self._engine.show_local()
            if isinstance(self.model, DistributedDataParallel):
                self.model.require_forward_param_sync = self._buffers_are_due
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

    def fail(self, exception: BaseException) -> None:
        """Tells that this rank ends with an exception: from now on it must not wait for others."""
        if isinstance(exception, self.termination) and self._signals is not None and self._signals.ended:
            # All ranks end with it, after the same inner step.
            return
        self._failed = True
        failures, self._failures = self._failures, None
        if failures is not None:
            with suppress(Exception):
                failures.leave(exception)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.fail(exception)
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


def _checked_on_resume(on_resume: Any) -> str:
    if on_resume not in ("exact", "restart"):
        raise ValueError(
            f"on_resume={on_resume!r} is unknown: it must be 'exact', which refuses a checkpoint of other settings, or"
            " 'restart', which starts the rounds anew from its outer parameters. Choose one of them."
        )
    return str(on_resume)


def _checked_model_to_evaluate(evaluate: str) -> str:
    if evaluate not in ("outer", "local"):
        raise ValueError(
            f"evaluate={evaluate!r} is not known: validation inside a fit sees the 'outer' model, which is the default,"
            " or the 'local' one of each worker group. Choose one of them."
        )
    return evaluate


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
