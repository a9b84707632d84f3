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

from torch import Tensor, nn

from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine import is_aligned
from lightning_sdiloco.lightning.host.patching import replace
from lightning_sdiloco.lightning.inner_steps import InnerSteps

State = dict[str, Any]


class Averaging:
    """The averages of a fit."""

    def __init__(self, trainer: Any, steps: InnerSteps, topology: Topology, undo: ExitStack) -> None:
        self._outer: _OuterAverage | None = None
        for callback in trainer.callbacks:
            kinds = {kind.__name__ for kind in type(callback).__mro__}
            if kinds & {"WeightAveraging", "StochasticWeightAveraging"}:
                _start_alike(callback._average_model, trainer.lightning_module, topology)
            if "WeightAveraging" in kinds:
                self._outer = _OuterAverage(callback, trainer.lightning_module, steps, undo)
            elif "StochasticWeightAveraging" in kinds:
                start = partial(_in_outer, steps, callback.on_train_epoch_start)
                replace(undo, callback, "on_train_epoch_start", start)

    def state_dict(self) -> State | None:
        """Returns what a checkpoint needs beside what the callbacks themselves save; None if there is nothing."""
        return None if self._outer is None else self._outer.state_dict()

    def load_state_dict(self, state: State | None) -> None:
        """Restores what `state_dict` returned. Call it when the engine holds what was saved with it."""
        if self._outer is not None and state is not None:
            self._outer.load_state_dict(state)


class _OuterAverage:
    """Makes a WeightAveraging callback average at landings; see [Note: averages of outer parameters]."""

    def __init__(self, callback: Any, module: Any, steps: InnerSteps, undo: ExitStack) -> None:
        self._callback = callback
        self._module = module
        self._steps = steps
        self._wanted = False
        self._unfinished: State | None = None
        self._should_update = callback.should_update
        self._on_train_batch_end = callback.on_train_batch_end
        self._on_train_epoch_end = callback.on_train_epoch_end
        self._on_train_end = callback.on_train_end
        replace(undo, callback, "should_update", self._answer)
        replace(undo, callback, "on_train_batch_end", self._end_batch)
        replace(undo, callback, "on_train_epoch_end", self._end_epoch)
        replace(undo, callback, "on_train_end", self._end_fit)
        replace(undo, callback, "on_save_checkpoint", partial(self._save, callback.on_save_checkpoint))

    @property
    def _average(self) -> nn.Module:
        average = self._callback._average_model
        assert isinstance(average, nn.Module)
        return average

    def _answer(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return self._wanted if step_idx is not None else bool(self._should_update(epoch_idx=epoch_idx))

    def _end_batch(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step > self._callback._latest_update_step:
            self._wanted = bool(self._should_update(step_idx=trainer.global_step - 1)) or self._wanted
        if self._steps.is_finished:
            self._keep_unfinished(landed=self._steps.landed)
        if self._wanted and (self._steps.landed or self._steps.is_finished):
            _in_outer(self._steps, self._on_train_batch_end, trainer, module, *args)
            self._wanted = False

    def _end_epoch(self, trainer: Any, module: Any) -> None:
        before = self._updates
        _in_outer(self._steps, self._on_train_epoch_end, trainer, module)
        # Where max_steps ends the fit inside an epoch, a fit that goes on has not reached the end of the epoch yet.
        if self._unfinished is not None and trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self._unfinished["updates"] += self._updates - before

    def _end_fit(self, trainer: Any, module: Any) -> None:
        # A fit that was stopped early has just been finished.
        self._keep_unfinished(landed=False)
        if self._wanted:
            self._on_train_batch_end(trainer, module, None, None, 0)
            self._wanted = False
        self._on_train_end(trainer, module)

    def _save(self, original: Callable[..., None], trainer: Any, module: Any, checkpoint: State) -> None:
        original(trainer, module, checkpoint)
        if self._callback._average_model is not None and not self._updates:
            # Before the first landing nothing is averaged, and the first update copies the model.
            checkpoint["state_dict"] = dict(checkpoint["current_model_state"])

    @property
    def _updates(self) -> int:
        count = self._average.n_averaged
        assert isinstance(count, Tensor)
        return int(count)

    def _keep_unfinished(self, landed: bool) -> None:
        if self._unfinished is None:
            self._unfinished = {
                "average": {key: value.to("cpu", copy=True) for key, value in self._average.state_dict().items()},
                "wanted": self._wanted and not landed,
                "updates": int(self._wanted and landed),
            }

    def state_dict(self) -> State:
        # The checkpoint has the average of rank 0. Those of other ranks differ from it only in their buffers.
        buffers = [buffer.to("cpu", copy=True) for buffer in self._average.buffers()]
        return {"wanted": self._wanted, "unfinished": self._unfinished, "buffers": buffers}

    def load_state_dict(self, state: State) -> None:
        self._wanted = state["wanted"]
        for buffer, own in zip(self._average.buffers(), state["buffers"], strict=True):
            buffer.copy_(own)
        unfinished = state["unfinished"]
        if unfinished is not None:
            self._wanted = unfinished["wanted"]
            self._average.load_state_dict(unfinished["average"])
            for _ in range(unfinished["updates"]):
                average = self._callback._average_model
                _in_outer(self._steps, average.update_parameters, self._module)


def _in_outer(steps: InnerSteps, function: Callable[..., None], *args: Any) -> None:
    assert steps.engine is not None
    with steps.engine.evaluate():
        function(*args)


def _start_alike(average: nn.Module, module: nn.Module, topology: Topology) -> None:
    """Makes an average start from the model that all ranks share: it was made before they shared one."""
    if not is_aligned(average, topology):
        inner = average.module if hasattr(average, "n_averaged") else average
        assert isinstance(inner, nn.Module)
        inner.load_state_dict(module.state_dict())
