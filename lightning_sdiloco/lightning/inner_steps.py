"""The inner steps of a fit: which batches count as one, and what landed with them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_sdiloco.engine import Landing, StreamingDiLoCo


class InnerSteps:
    """Counts the inner steps of a fit and hands them to its engine."""

    def __init__(self) -> None:
        self.engine: StreamingDiLoCo | None = None
        self.landed = False
        self.optimizer_steps = 0
        self.samples = self._micro_batches = 0
        self.counts_micro_batches = False
        self.stepped = False
        self._per_batch = 0
        self._early: list[Landing] = []

    def start(self, engine: StreamingDiLoCo) -> None:
        """Begins to count for an engine."""
        self.engine = engine
        self.landed = self.stepped = self.counts_micro_batches = False
        self.optimizer_steps = self._per_batch = 0

    @property
    def is_training(self) -> bool:
        """Whether training has started and not finished."""
        return self.engine is not None and not self.engine.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether training has finished, so that the outer parameters no longer change."""
        return self.engine is not None and self.engine.is_finished

    @property
    def made_any(self) -> bool:
        """Whether any batch has counted as an inner step."""
        return self.engine is not None and self.engine.inner_steps > 0

    def optimizer_steps_per_batch(self, optimizers: int) -> int:
        """Returns how often optimizers stepped in the last batch in which any did."""
        return self._per_batch or optimizers

    def note_optimizer_step(self) -> None:
        """Notes that Lightning has stepped an optimizer."""
        self.optimizer_steps += 1
        self.stepped = True

    def note_step(self, *_: Any) -> None:
        """Notes that an optimizer has stepped, perhaps without Lightning's wrapper; a hook of optimizers."""
        self.stepped = True

    def note_batch(self, batch: Any) -> None:
        """Notes on how many samples this rank trains in a batch: the length of the first tensor in it."""
        if batch is not None:
            self.samples += samples_in(batch) or 1
            self._micro_batches += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignores the steps of optimizers inside a ``with`` block."""
        stepped = self.stepped
        try:
            yield
        finally:
            self.stepped = stepped

    def keep(self, landings: list[Landing]) -> None:
        """Keeps what landed between two inner steps; the next one reports it."""
        self._early += landings

    def is_due(self, idle: bool) -> bool:
        """Returns whether the batch that ends is an inner step, in which an optimizer stepped or would have stepped."""
        self.landed = False
        if not (self.stepped or idle) or self.engine is None:
            return False
        if self.engine.is_finished:
            raise RuntimeError(
                "Training goes on after its last batch: max_epochs or max_steps was raised when the worker groups had"
                " joined already. Set them before trainer.fit, or fit again."
            )
        return True

    def make(self, idle: bool) -> list[Landing]:
        """Makes an inner step, and returns what landed in it and since the last one."""
        assert self.engine is not None, "an inner step is made when it is due"
        self._per_batch = self.optimizer_steps or self._per_batch
        self.optimizer_steps = 0
        self.stepped = False
        trained = self._micro_batches if self.counts_micro_batches else 1
        landings = [*self._early, *self.engine.step(trained=trained, idle=idle, samples=max(1, self.samples))]
        self._early, self.samples, self._micro_batches = [], 0, 0
        self.landed = bool(landings)
        return landings


def samples_in(batch: Any) -> int:
    """Returns how many samples a batch has: the length of its first tensor; 0 if there is none."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((samples for samples in map(samples_in, parts) if samples), 0)
