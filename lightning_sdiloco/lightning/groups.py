"""What the strategies have in common: how worker groups start, whatever their ranks do among themselves."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sdiloco.comm.exchange import DeviceBackend
from lightning_sdiloco.comm.exchange.on_device import nccl_on
from lightning_sdiloco.comm.layout import GroupLayout, checked_worker_groups
from lightning_sdiloco.comm.topology import Topology, store, world
from lightning_sdiloco.engine.agreement import align_model, require_same_model, require_same_settings
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.start import cut
from lightning_sdiloco.launch.environment import warn_of_shared_store
from lightning_sdiloco.launch.failures import Failures
from lightning_sdiloco.launch.interfaces import exchange_address, for_exchange, group_address
from lightning_sdiloco.launch.reachability import require_reachable
from lightning_sdiloco.launch.rendezvous import rendezvous
from lightning_sdiloco.lightning.callback import StreamingDiLoCoCallbackMixin
from lightning_sdiloco.lightning.choosing import Choosing
from lightning_sdiloco.lightning.host.batch_hooks import silence, silence_without_fit
from lightning_sdiloco.lightning.host.refusals import refuse_what_cannot_work
from lightning_sdiloco.lightning.host.resumed_epochs import begin_epochs_alike
from lightning_sdiloco.lightning.host.uneven_data import end_epochs_together
from lightning_sdiloco.lightning.monitor.monitor import asks_for_diagnostics
from lightning_sdiloco.lightning.requests import Requests
from lightning_sdiloco.lightning.signals import Signals
from lightning_sdiloco.lightning.steps import StepsMixin
from lightning_sdiloco.lightning.weight_averaging import Averaging

_log = logging.getLogger(__name__)


class GroupsMixin(StepsMixin):
    """A strategy over worker groups, but for what the ranks of a group do among themselves."""

    strategy_name: str
    description: str
    callback_type: type[StreamingDiLoCoCallbackMixin]
    num_nodes: int
    num_processes: int
    set_world_ranks: Callable[[], None]

    def _keep(self, worker_groups: Any, exchange_backend: Any, on_resume: Any, evaluate: Any, **settings: Any) -> None:
        """Checks and keeps the arguments that all strategies have. Nothing is started: strategies are pickled."""
        self._choosing, self._settings = Choosing.of(**settings)
        self._worker_groups = checked_worker_groups(worker_groups)
        self._exchange_backend = _checked_backend(exchange_backend)
        self._on_resume = _checked_on_resume(on_resume)
        self._evaluate = _checked_model_to_evaluate(evaluate)
        self._topology: Topology | None = None
        self._engine = None
        self._summary = None
        self._requests = None
        self._signals = None
        self._failures = None
        self._promptness = None
        self._fragments = ()
        self._averaging = None
        self._early = []
        self._epoch_begins = False
        self.landed = False
        self._stepped = False
        self._optimizer_steps = self._steps_per_batch = 0
        self._failed = False
        self._deciding = None
        self._agreed = 0
        self._noise = ExitStack()

    # Start

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the name, unless it is registered already."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.description)

    @override
    def connect(self, model: Any) -> None:
        super().connect(model)
        self._forget_loaded()
        self._failed = False
        callbacks = model._trainer.callbacks
        if not any(isinstance(callback, StreamingDiLoCoCallbackMixin) for callback in callbacks):
            # First, so that every other callback sees the model after the landing of its step.
            callbacks.insert(0, self.callback_type(self))

    def _layout(self) -> GroupLayout:
        world_size = self.num_nodes * self.num_processes
        automatic = self.num_nodes if self.num_nodes > 1 else world_size
        return GroupLayout(world_size, automatic if isinstance(self._worker_groups, str) else self._worker_groups)

    def _device_backend(self) -> DeviceBackend | None:
        """What carries outer gradients from device to device, if anything does."""
        return nccl_on(self.root_device) if self._exchange_backend == "nccl" else None

    @contextmanager
    def _reached_groups(self) -> Iterator[None]:
        """Refuses to start where ranks cannot reach each other. Within it all processes are to be connected."""
        layout = self._layout()
        # Kept until then: the default process group takes over the store of the rendezvous.
        met = None
        if self.num_nodes > 1:
            self.set_world_ranks()
            met = rendezvous(self.cluster_environment, layout.world_size, self._settings.timeout)
        if met is not None:
            require_reachable(met, layout.group_of(self.global_rank), exchange_address, group_address)
        with for_exchange():
            yield

    def _join_groups(self) -> None:
        """Makes the ways between the ranks of a group and between groups, as soon as all processes are connected."""
        layout = self._layout()
        warn_of_shared_store(self.global_rank)
        self._failures = Failures(store(), self.global_rank, layout.group_of(self.global_rank), layout.world_size)
        # A second fit in this process finds the process groups of the first.
        if self._topology is None or self._topology.is_stale():
            require_same_settings(self._described(), world())
            self._topology = Topology.of_world(layout, self._settings.timeout, for_exchange, self._device_backend())

    def _described(self) -> dict[str, str]:
        """All that must be the same on all ranks, as text."""
        choices = {
            "worker_groups": str(self._worker_groups),
            "evaluate": self._evaluate,
            "on_resume": self._on_resume,
            "exchange_backend": self._exchange_backend,
        }
        return {**self._choosing.described(self._settings.described()), **choices}

    @override
    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            self._begin_fit(trainer)
            super().setup(trainer)
            self._averaging = Averaging(trainer, self, self._noise)
        else:
            self._noise.close()
            self._noise = silence_without_fit(trainer)
            self._setup_without_fit(trainer)

    def _begin_fit(self, trainer: Any) -> None:
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

    def _setup_without_fit(self, trainer: Any) -> None:
        super().setup(trainer)

    def _prepare(self, model: nn.Module) -> None:
        """Refuses models that cannot be trained, and lets all ranks start from the same."""
        self._take_up_what_was_trainable(model)
        require_same_model(model, self.topology.world)
        self._fragments = cut(model, self._settings).fragments
        align_model(model, self.topology)

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
        self._engine.diagnose(asks_for_diagnostics(self.lightning_module.trainer))
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

    # Evaluation and checkpoints show the outer model

    @property
    def _shows_outer(self) -> bool:
        return self._engine is not None and self._evaluate == "outer"

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._engine is not None and self._shows_outer:
            self._engine.show_outer()

    @override
    def on_validation_end(self) -> None:
        if self._engine is not None and self._shows_outer:
            self._engine.show_local()
        super().on_validation_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is None or self._engine.is_finished:
            return super().lightning_module_state_dict()
        if self._failed and self.topology.group_size > 1:
            _log.warning(
                "A state_dict is taken after an exception. It holds the local parameters of this rank: gathering the"
                " outer ones would wait for ranks that may be gone. Resume from an earlier checkpoint."
            )
            return super().lightning_module_state_dict()
        with self._engine.evaluate():
            state = super().lightning_module_state_dict()
            return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _checked_backend(exchange_backend: Any) -> str:
    if exchange_backend not in (None, "gloo", "nccl"):
        raise ValueError(
            f"exchange_backend={exchange_backend!r} is not available: worker groups exchange over 'gloo', on every"
            " device, or over 'nccl' between CUDA devices. Leave exchange_backend out for gloo."
        )
    return exchange_backend or "gloo"


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
