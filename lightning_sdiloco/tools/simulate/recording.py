"""Records a simulated group: its losses, those of the outer model, and validations."""

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sdiloco.engine import StepClock, StreamingDiLoCo, random_state, set_random_state
from lightning_sdiloco.lightning import replace

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object

LAST = 10
"""How many batches at the end a mean loss is taken over; on the same batches the outer model is evaluated."""


class Validation(NamedTuple):
    """What a validation logged."""

    step: int
    metrics: dict[str, float]

    @property
    def loss(self) -> float | None:
        """The first loss among the metrics."""
        return next((value for name, value in self.metrics.items() if "loss" in name), None)


class RecorderMixin(_Base):
    """Records what happens in a simulated group.

    Args:
        clock: A clock that stands still while other groups run.
        stepped: Called after every inner step.
        begins: Called before every inner step.
        step_time: Seconds that the group says an inner step takes; 0 for those that it takes here.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        stepped: Callable[[], None],
        begins: Callable[[], None],
        step_time: float = 0.0,
    ) -> None:
        self._clock, self._step_time = clock, step_time
        self._stepped = stepped
        self._begins = begins
        self._begun = 0
        self._batches: deque[tuple[Any, int]] = deque(maxlen=LAST)
        self._times: list[float] = []
        self._steps = 0
        self.idle: list[int] = []
        self.launches: dict[int, tuple[int, ...]] = {}
        self.losses: list[float] = []
        self.outer_loss: float | None = None
        self.validations: list[Validation] = []

    @property
    def step_seconds(self) -> float | None:
        """Returns the median time of an inner step in seconds; None if there were not two."""
        steps = [later - earlier for earlier, later in zip(self._times, self._times[1:], strict=False)]
        return median(steps) if steps else None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes the group as fast as it is where the run would take place."""
        if self._step_time:
            trainer.strategy.engine.step_clock = StepClock(self._step_time)
        self._note_launches(trainer.strategy.engine)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Notes that an inner step begins."""
        if self._begun <= self._steps:
            self._begun = self._steps + 1
            self._begins()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Records the loss."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.losses.append(float(loss))
            self._batches.append((batch, batch_idx))
        if trainer.strategy.engine.inner_steps > self._steps:
            self._steps = trainer.strategy.engine.inner_steps
            if batch is None:
                self.idle.append(self._steps)
            self._times.append(self._clock())
            self._note_launches(trainer.strategy.engine)
            self._stepped()

    def _note_launches(self, engine: StreamingDiLoCo) -> None:
        """Notes what is launched after the next inner step, which a pace decides as the run goes on."""
        if engine.launches_next:
            self.launches[engine.inner_steps + 1] = engine.launches_next

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Records what a validation inside the fit logged."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            metrics = trainer._results.metrics(on_step=False)["callback"]
            numbers = {name: float(value) for name, value in metrics.items()}
            self.validations.append(Validation(trainer.strategy.engine.inner_steps, numbers))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Evaluates the outer model, which the module holds by now, on the last batches of the group."""
        if pl_module.automatic_optimization and self._batches and _takes_batches(pl_module):
            self.outer_loss = self._evaluated(trainer, pl_module)
        self._batches.clear()

    def _evaluated(self, trainer: Any, module: Any) -> float:
        losses = []
        with _quietly(module), trainer.precision_plugin.train_step_context():
            for batch, index in self._batches:
                outputs = module.training_step(*(batch, index)[: len(_parameters(module))])
                losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))
        return sum(losses) / len(losses)


def _parameters(module: Any) -> list[str]:
    return list(inspect.signature(module.training_step).parameters)


def _takes_batches(module: Any) -> bool:
    return "dataloader_iter" not in _parameters(module)


@contextmanager
def _quietly(module: nn.Module) -> Iterator[None]:
    """Puts a module into evaluation mode without logging; random numbers and the mode of every part come back."""
    modes = [(part, part.training) for part in module.modules()]
    state = random_state()
    module.eval()
    try:
        with torch.no_grad(), ExitStack() as undo:
            replace(undo, module, "log", lambda *args, **kwargs: None)
            replace(undo, module, "log_dict", lambda *args, **kwargs: None)
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        set_random_state(state)
