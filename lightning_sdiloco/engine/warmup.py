"""The warm-up: the first inner steps, in which all groups take the mean of their gradients."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_sdiloco.engine.flight import Landing
from lightning_sdiloco.engine.requests import Mailbox
from lightning_sdiloco.engine.rounds import Rounds

_log = logging.getLogger(__name__)


class Warmup:
    """Averages the gradients of the groups in the first inner steps; see [Note: warm-up].

    [Note: warm-up] Groups that train alone from the start lose much of what they do, the more of them there are: each
    takes large steps on the gradients of a small batch. With ``warmup_steps`` they take the mean of their gradients in
    each of the first inner steps, as data parallelism does, in float32. Then all make the same step, so the local model
    is the outer one. After the last of these steps the groups take the mean of their local parameters in float32, which
    changes nothing but what unlike hardware rounded in unlike ways, and the mean of their buffers. Rounds begin as
    they would have after inner step 0.

    Training waits for gradients, which go through the background like all flights, and take requests along.

    Args:
        rounds: What launches and lands.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        # The last inner step in which gradients were launched, and how often.
        self._step = self._times = 0

    def is_due(self, step: int) -> bool:
        """Tells whether the groups take the mean of their gradients in an inner step."""
        return self._rounds.schedule.is_warmup(step - self._rounds.began_at)

    def launch(self, step: int, mailbox: Mailbox, trains: bool) -> int:
        """Launches the gradients of all fragments in an inner step of the warm-up, and else nothing.

        Args:
            step: The inner step that they belong to.
            mailbox: Whose requests they take along.
            trains: Whether this group has any.

        Returns:
            How many fragments were launched.
        """
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
        """Returns how often a group that was idle in an inner step has still to take part: as often as in the last.

        Args:
            step: The inner step, which ends.
            idle: Whether this group did not train in it.

        Raises:
            RuntimeError: If a group that trained did not take the mean of its gradients.
        """
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
    """Returns how many inner steps the warm-up of a resumed run has.

    Rounds are counted from its end, so once it has ended it stays as it was. Until then it may change; a number that is
    already past ends it with the next inner step.

    Args:
        state: The state of the run.
        given: The number that is given now.
        says: Whether to warn where it is ignored.

    Raises:
        ValueError: If the run has trained without a warm-up.
    """
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
