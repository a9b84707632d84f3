"""Makes callbacks that average weights average the outer parameters, for the time of a fit.

[Note: averages of outer parameters] Lightning's callbacks read the module when a batch or an epoch ends. There it holds
local parameters, and every worker group would end with an average of its own. So here they read the outer parameters,
which change only at landings: an update that is wanted between two landings happens at the second. All groups land
after the same inner steps, so all have the same average, bit for bit. The end of a fit is a landing too.

A longer fit resumes from before this end. So the average is kept as it was then, with the number of updates that a fit
without an end would have made since. A resumed fit makes these itself, from the outer parameters that it restores.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_sdiloco.engine import is_aligned
from lightning_sdiloco.lightning.fit_state import FitState
from lightning_sdiloco.lightning.host.patching import replace

State = dict[str, Any]


class Averaging:
    """Makes callbacks that average weights do so at landings; see [Note: averages of outer parameters]."""

    def __init__(self, fit: FitState, undo: ExitStack) -> None:
        self._fit, self._module = fit, fit.trainer.lightning_module
        self._callback: Any = None  # The WeightAveraging, of which there is at most one.
        self._wanted = False
        self._unfinished: State | None = None
        for callback in fit.trainer.callbacks:
            kinds = {kind.__name__ for kind in type(callback).__mro__}
            if kinds & {"WeightAveraging", "StochasticWeightAveraging"}:
                # The average was made before all ranks shared one model.
                average = callback._average_model
                if not is_aligned(average, fit.groups.topology):
                    inner = average.module if hasattr(average, "n_averaged") else average
                    inner.load_state_dict(self._module.state_dict())
            if "StochasticWeightAveraging" in kinds:
                replace(undo, callback, "on_train_epoch_start", partial(self._in_outer, callback.on_train_epoch_start))
            elif "WeightAveraging" in kinds:
                self._callback, self._should_update = callback, callback.should_update
                self._update = callback.on_train_batch_end
                replace(undo, callback, "should_update", self._answer)
                replace(undo, callback, "on_train_batch_end", self._end_batch)
                replace(undo, callback, "on_train_epoch_end", partial(self._end_epoch, callback.on_train_epoch_end))
                replace(undo, callback, "on_train_end", partial(self._end_fit, callback.on_train_end))
                replace(undo, callback, "on_save_checkpoint", partial(self._save, callback.on_save_checkpoint))

    def _in_outer(self, function: Callable[..., None], *args: Any) -> None:
        assert self._fit.engine is not None, "averages are updated in training"
        with self._fit.engine.evaluate():
            function(*args)

    def _answer(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return self._wanted if step_idx is not None else bool(self._should_update(epoch_idx=epoch_idx))

    def _end_batch(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step > self._callback._latest_update_step:
            self._wanted = bool(self._should_update(step_idx=trainer.global_step - 1)) or self._wanted
        if not self._fit.is_training:
            self._keep_unfinished(landed=self._fit.landed)
        if self._wanted and (self._fit.landed or not self._fit.is_training):
            self._in_outer(self._update, trainer, module, *args)
            self._wanted = False

    def _end_epoch(self, original: Callable[..., None], trainer: Any, module: Any) -> None:
        before = self._updates
        self._in_outer(original, trainer, module)
        # Where max_steps ends the fit inside an epoch, a fit that goes on has not reached the end of the epoch yet.
        if self._unfinished is not None and trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self._unfinished["updates"] += self._updates - before

    def _end_fit(self, original: Callable[..., None], trainer: Any, module: Any) -> None:
        # A fit that was stopped early has just been finished.
        self._keep_unfinished(landed=False)
        if self._wanted:
            self._update(trainer, module, None, None, 0)
            self._wanted = False
        original(trainer, module)

    def _save(self, original: Callable[..., None], trainer: Any, module: Any, checkpoint: State) -> None:
        original(trainer, module, checkpoint)
        if self._callback._average_model is not None and not self._updates:
            # Before the first landing nothing is averaged, and the first update copies the model.
            checkpoint["state_dict"] = dict(checkpoint["current_model_state"])

    @property
    def _updates(self) -> int:
        return int(self._callback._average_model.n_averaged)

    def _keep_unfinished(self, landed: bool) -> None:
        if self._unfinished is None:
            average = self._callback._average_model.state_dict()
            self._unfinished = {
                "average": {key: value.to("cpu", copy=True) for key, value in average.items()},
                "wanted": self._wanted and not landed,
                "updates": int(self._wanted and landed),
            }

    def state_dict(self) -> State | None:
        """Returns what a checkpoint needs beside what the callbacks themselves save; None if there is nothing."""
        if self._callback is None:
            return None
        # The checkpoint has the average of rank 0. Those of other ranks differ from it only in their buffers.
        buffers = [buffer.to("cpu", copy=True) for buffer in self._callback._average_model.buffers()]
        return {"wanted": self._wanted, "unfinished": self._unfinished, "buffers": buffers}

    def load_state_dict(self, state: State | None) -> None:
        """Restores what `state_dict` returned. Call it when the engine holds what was saved with it."""
        if self._callback is None or state is None:
            return
        average, self._wanted = self._callback._average_model, state["wanted"]
        for buffer, own in zip(average.buffers(), state["buffers"], strict=True):
            buffer.copy_(own)
        unfinished = state["unfinished"]
        if unfinished is not None:
            self._wanted = unfinished["wanted"]
            average.load_state_dict(unfinished["average"])
            for _ in range(unfinished["updates"]):
                self._in_outer(average.update_parameters, self._module)
