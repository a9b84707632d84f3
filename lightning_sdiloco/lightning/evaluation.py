"""Which model validation sees inside a fit, and which one the checkpoints hold that are saved with it.

[Note: the model that validation sees] It is in the module before any hook of a validation runs, and the local one is
back after all of them: callbacks and modules that swap weights for the time of a validation, such as averages, put back
what they found. Lightning's own hooks of a strategy run after those of callbacks and modules, also at the end.

[Note: the first round] Until every fragment has landed once, the outer model holds values that nobody has trained.
Validation and checkpoints then show the mean of the groups, which takes an exchange. Training stays as it is, bit for
bit. A group that validates alone must not wait for others, so there is no exchange unless Lightning's loop has decided
to validate, which it does after the same batch in all groups, and all ranks have something to validate with. All ranks
call ``trainer.save_checkpoint``, but a rank that ends with an exception waits for nobody, and a signal leaves no time:
then, and where somebody asks for a ``state_dict`` alone, it is that of the group, and a warning says so. The mean
serves until the next inner step, so that the best model is the one that was validated. What a fit resumes from lies
beside it, and is the same as ever. On a route on which groups hold outer parameters of their own, every validation and
every checkpoint shows the mean of the groups.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from lightning_sdiloco.engine import GroupMean, StreamingDiLoCo
from lightning_sdiloco.lightning.fit_state import FitState
from lightning_sdiloco.lightning.groups import ConnectedGroups
from lightning_sdiloco.lightning.host.patching import replace

_log = logging.getLogger(__name__)


class ShownModel:
    """The model that validation and files show instead of the local one, in a fit or a loop of Fabric.

    All ranks save a checkpoint by calling ``save``, as messages say. Fabric says itself what a file holds.
    """

    def __init__(self, groups: ConnectedGroups, save: str, warns: bool = True) -> None:
        self._groups, self._save, self._warns = groups, save, warns
        self.mean: GroupMean | None = None
        """The mean of the groups, if it was exchanged since the last inner step."""

    @staticmethod
    def is_outer(engine: StreamingDiLoCo) -> bool:
        """Whether the outer model is one that all groups have trained; see [Note: the first round]."""
        return engine.has_landed and engine.settings.shares

    def exchange(self, engine: StreamingDiLoCo) -> None:
        """Takes the mean of the groups, which then is what is shown. All ranks must call it."""
        self._groups.meet()
        if self._warns and not engine.has_landed and self._groups.topology.rank == 0:
            _log.warning(
                "Up to inner step %d, when every fragment has landed once, validation and checkpoints hold the mean of"
                " the worker groups, for which these exchange all fragments in float32: the outer model holds values"
                " until then that nobody has trained. This is said once.",
                engine.inner_steps - engine.steps_in_rounds + engine.schedule.first_round,
            )
        self._warns = False
        self.mean = engine.group_mean()

    def state_dict(
        self, engine: StreamingDiLoCo, with_all: bool, local: Callable[[], dict[str, Any]], is_shown: bool = False
    ) -> dict[str, Any]:
        """Returns what a file holds; if all ranks save together, the groups may exchange."""
        if self.mean is None and with_all and not is_shown and not self.is_outer(engine):
            self.exchange(engine)
        if self.mean is None and not is_shown and not engine.has_landed:
            _log.warning(
                "A state_dict of worker group %d is taken after inner step %d, before every fragment has landed"
                " once. It holds the local values of this group: after an exception or a signal, or for one rank"
                " alone, the groups do not exchange. %s, called on all ranks, saves the mean of the groups.",
                self._groups.topology.group_index,
                engine.inner_steps,
                self._save,
            )
            shows: AbstractContextManager[None] = nullcontext()
        else:
            shows = engine.evaluate(self.mean)
        with shows:
            return {key: value.clone() if isinstance(value, Tensor) else value for key, value in local().items()}


class Evaluation:
    """Shows the chosen model to the validations of a fit; see [Note: the model that validation sees]."""

    def __init__(self, fit: FitState) -> None:
        self._fit, self._groups, self._shows = fit, fit.groups, fit.options.evaluate
        self.shown = ShownModel(fit.groups, "trainer.save_checkpoint")
        self._saves_with_all = self._is_due = self._is_showing = False
        self._buffers_are_due: bool | None = None

    def begin(self, undo: ExitStack) -> None:
        trainer, epoch_loop = self._fit.trainer, self._fit.trainer.fit_loop.epoch_loop
        replace(undo, trainer, "save_checkpoint", partial(self._save, trainer.save_checkpoint))
        if self._shows == "local":
            return
        decide = epoch_loop._should_check_val_fx

        def should_validate(fetcher: Any) -> bool:
            self._is_due = decide(fetcher)
            return self._is_due

        replace(undo, epoch_loop, "_should_check_val_fx", should_validate)
        # A callback may test or predict inside a fit.
        for loop in (epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            replace(undo, loop, "on_run_start", partial(self._start, loop.on_run_start))
            replace(undo, loop, "run", partial(self._run, loop, loop.run))

    def state_dict(self, engine: StreamingDiLoCo, local: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the model that a checkpoint holds: what is shown, was shown last, or the outer one."""
        if self._groups.failed and self._groups.topology.group_size > 1:
            _log.warning(
                "A state_dict is taken after an exception. It holds the local parameters of this rank: gathering the"
                " outer ones would wait for ranks that may be gone. Resume from an earlier checkpoint."
            )
            return local()
        return self.shown.state_dict(engine, self._saves_with_all, local, self._is_showing)

    def _save(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._saves_with_all = not self._groups.failed and not self._fit.is_ending
        try:
            original(*args, **kwargs)
        finally:
            self._saves_with_all = False

    def _run(self, loop: Any, original: Callable[[], Any]) -> Any:
        is_due, self._is_due = self._is_due, False
        engine = self._fit.engine
        # Before training, after it, and where one loop runs in another, everything is shown already.
        if engine is None or engine.is_finished or self._is_showing:
            return original()
        self.shown.mean = None
        if is_due and (self._shows == "mean" or not self.shown.is_outer(engine)):
            # See [Note: the first round].
            loop.setup_data()
            if self._groups.decide(not loop.skip, all=True, device=self._fit.trainer.strategy.root_device):
                self.shown.exchange(engine)
        try:
            return original()
        finally:
            if self._is_showing:
                if self._buffers_are_due is not None:
                    self._fit.trainer.strategy.model.require_forward_param_sync = self._buffers_are_due
                engine.show_local()
                self._is_showing = False

    def _start(self, original: Callable[[], None]) -> None:
        engine = self._fit.engine
        if engine is not None and not engine.is_finished and not self._is_showing:
            self._is_showing = True
            engine.show_outer(self.shown.mean)
            # After the forward pass of validation, DistributedDataParallel would believe that the buffers of the next
            # training step, which are put back then, have been synchronised already.
            self._buffers_are_due = getattr(self._fit.trainer.strategy.model, "require_forward_param_sync", None)
        original()
