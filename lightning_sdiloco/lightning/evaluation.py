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
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from lightning_sdiloco.engine import GroupMean, StreamingDiLoCo
from lightning_sdiloco.lightning.host.patching import replace
from lightning_sdiloco.lightning.inner_steps import InnerSteps
from lightning_sdiloco.lightning.model_format.base import ModelFormat
from lightning_sdiloco.lightning.worker_groups import ConnectedGroups

_log = logging.getLogger(__name__)


class Evaluation:
    """Shows the chosen model to the validations of a fit; see [Note: the model that validation sees]."""

    def __init__(
        self,
        trainer: Any,
        steps: InnerSteps,
        groups: ConnectedGroups,
        model_format: ModelFormat,
        shows: str,
        is_ending: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._steps = steps
        self._groups = groups
        self._format = model_format
        self._shows, self._is_ending = shows, is_ending
        self._saves_with_all = False
        self._is_due = False
        self._is_showing = False
        self._said = False
        self._mean: GroupMean | None = None

    def begin(self, undo: ExitStack) -> None:
        """Makes Lightning's loops show the chosen model."""
        trainer, epoch_loop = self._trainer, self._trainer.fit_loop.epoch_loop
        replace(undo, trainer, "save_checkpoint", partial(self._save, trainer.save_checkpoint))
        if self._shows == "local":
            return
        decide = partial(self._note_decision, epoch_loop._should_check_val_fx)
        replace(undo, epoch_loop, "_should_check_val_fx", decide)
        # A callback may test or predict inside a fit.
        for loop in (epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            replace(undo, loop, "on_run_start", partial(self._start, loop.on_run_start))
            replace(undo, loop, "run", partial(self._run, loop, loop.run))

    def state_dict(self, engine: StreamingDiLoCo, local: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the model that a checkpoint holds: what is shown, was shown last, or the outer one."""
        if self._groups.failed and self._groups.topology.group_size > 1:
            self._groups.warn_of_local_parameters()
            return local()
        if self._mean is None and not self._is_showing and not (engine.has_landed and engine.settings.shares):
            if self._saves_with_all:
                self._mean = self._exchanged(engine)
            elif not engine.has_landed:
                self._warn_of_local(engine)
                return local()
        with engine.evaluate(self._mean):
            return {key: value.clone() if isinstance(value, Tensor) else value for key, value in local().items()}

    def _save(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._saves_with_all = not self._groups.failed and not self._is_ending()
        try:
            original(*args, **kwargs)
        finally:
            self._saves_with_all = False

    def _exchanged(self, engine: StreamingDiLoCo) -> GroupMean:
        """Returns the mean of the groups, for which all ranks exchange."""
        self._groups.meet()
        if not engine.has_landed and not self._said and self._trainer.is_global_zero:
            _log.warning(
                "Up to inner step %d, when every fragment has landed once, validation and checkpoints hold the mean of"
                " the worker groups, for which these exchange all fragments in float32: the outer model holds values"
                " until then that nobody has trained. This is said once.",
                engine.inner_steps - engine.steps_in_rounds + engine.schedule.first_round,
            )
        self._said = True
        return engine.group_mean()

    def _warn_of_local(self, engine: StreamingDiLoCo) -> None:
        _log.warning(
            "A state_dict of worker group %d is taken after inner step %d, before every fragment has landed once. It"
            " holds the local values of this group: after an exception or a signal, or for one rank alone, the groups"
            " do not exchange. trainer.save_checkpoint, called on all ranks, saves the mean of the groups.",
            self._groups.topology.group_index,
            engine.inner_steps,
        )

    def forget(self) -> None:
        """Forgets the mean that was shown last: training goes on."""
        self._mean = None

    def _note_decision(self, original: Callable[[Any], bool], fetcher: Any) -> bool:
        self._is_due = original(fetcher)
        return self._is_due

    def _run(self, loop: Any, original: Callable[[], Any]) -> Any:
        is_due, self._is_due = self._is_due, False
        engine = self._steps.engine
        # Before training, after it, and where one loop runs in another, everything is shown already.
        if engine is None or engine.is_finished or self._is_showing:
            return original()
        self._mean = self._mean_of_groups(engine, loop) if is_due else None
        try:
            return original()
        finally:
            if self._is_showing:
                self._format.end_validation(self._trainer.strategy.model)
                engine.show_local()
                self._is_showing = False

    def _start(self, original: Callable[[], None]) -> None:
        engine = self._steps.engine
        if engine is not None and not engine.is_finished and not self._is_showing:
            self._is_showing = True
            engine.show_outer(self._mean)
            self._format.begin_validation(self._trainer.strategy.model)
        original()

    def _mean_of_groups(self, engine: StreamingDiLoCo, loop: Any) -> GroupMean | None:
        """Returns the mean where validation shows it; see [Note: the first round]."""
        if self._shows != "mean" and engine.has_landed and engine.settings.shares:
            return None
        loop.setup_data()
        if not self._groups.decide(not loop.skip, all=True, device=self._trainer.strategy.root_device):
            return None
        return self._exchanged(engine)
