"""The warm-up: the first inner steps, in which all groups take the mean of their gradients."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_sdiloco.engine.flight import Landing
from lightning_sdiloco.engine.requests import Mailbox
from lightning_sdiloco.engine.rounds import Rounds

_log = logging.getLogger(__name__)


class Warmup:
    """Averages the gradients of the groups in the first inner steps; see [Note: warm-up]."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        # The last inner step in which gradients were launched, and how often.
        self._step = self._times = 0

    def is_due(self, step: int) -> bool:
        """Tells whether the groups take the mean of their gradients in an inner step."""
        return self._rounds.schedule.is_warmup(step - self._rounds.began_at)

    def launch(self, step: int, mailbox: Mailbox, trains: bool) -> int:
        """Launches the gradients of all fragments in an inner step of the warm-up, and else nothing."""
        if not self.is_due(step):
            return 0
        if step != self._step:
            self._step, self._times = step, 0
        self._times += 1
        self._rounds.require_coverage()
        self._rounds.launch_gradients(step, mailbox, trains)
        return len(self._rounds.fragments)

    def land(self, step: int) -> Iterator[Landing]:
        """Waits for the means, and puts them in the place of the gradients."""
        if self.is_due(step):
            for _ in range(len(self._rounds.flights)):
                yield self._rounds.land(step)

    def missing(self, step: int, idle: bool) -> int:
        """Returns how often a group that was idle in an inner step has still to take part: as often as in the last."""
        if not self.is_due(step) or step == self._step:
            return 0
        if not idle:
            raise RuntimeError(
                f"Inner step {step} belongs to the warm-up, and its gradients were not averaged. Call"
                " average_gradients() after backward(), before gradients are clipped and the optimizer steps; or leave"
                " out warmup_steps."
            )
        return self._times or 1


def warmup_steps_of(state: Mapping[str, Any], given: int, *, says: bool) -> int:
    """Returns how many inner steps the warm-up of a resumed run has."""
    steps = state["counts"]["inner_steps"]
    # Earlier versions did not say what it was.
    was = int(state.get("warmup_steps", given))
    if steps == 0 or given == was:
        return given
    if steps < was:
        return max(given, steps + 1)
    if was == 0:
        raise ValueError(
            f"warmup_steps={given} was given, and this run began with no warm-up: until inner step {steps} its groups"
            " have trained alone, so there is no model that all of them could warm up. Leave warmup_steps out to go on"
            " with this run, or start a new one."
        )
    if says:
        _log.warning(
            "warmup_steps=%d is ignored: the warm-up of this run ended after inner step %d, and its rounds are counted"
            " from there. Give warmup_steps=%d to say so.",
            given,
            was,
            was,
        )
    return was
