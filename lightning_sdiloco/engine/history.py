"""Counts steps, launches and landings, and warns about excluded groups."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_sdiloco.algorithm.guard import REMEMBERED
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.fragments import Landing, Span
from lightning_sdiloco.engine.matrices import DirectionCost
from lightning_sdiloco.engine.rounds import Rounds
from lightning_sdiloco.errors import AgreementError

_log = logging.getLogger(__name__)

# A group that is left out this many times in a row will not recover.
_MOST_LEFT_OUT = 3


@dataclass
class Counts:
    inner_steps: int = 0
    launches: int = 0
    landings: int = 0
    flights_dropped: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    exposed_wait_s: float = 0.0
    in_flight_s: float = 0.0


class History:
    """Counts training events, and warns about groups that are excluded from a mean.

    Args:
        rounds: The rounds, which provide the current settings.
        topology: The worker groups.
        is_site: Whether these ranks form a site of a federation. In a federation, the hub reports
            excluded sites.
        maps_on_device: Whether the outer step applies a map to matrices on an accelerator.

    Attributes:
        counts: The counters that a checkpoint stores.
        absences: How many times in a row each group has been excluded from a mean.
        step_span: When the launches and landings of the last inner step began and ended.
        last_landing: The last landing of a round or of the final exchange.
        final_landings: The landings of the final exchange.
    """

    def __init__(
        self, rounds: Rounds, topology: Topology, *, is_site: bool, maps_on_device: bool
    ) -> None:
        self._rounds = rounds
        self.counts = Counts()
        self.absences = Absences(topology.num_groups)
        self.step_span: Span = (0.0, 0.0)
        self.last_landing: Landing | None = None
        self.final_landings = list[Landing]()
        self._is_first_rank = topology.rank == 0
        self._is_site = is_site
        self._direction_cost = DirectionCost() if maps_on_device else None
        self._exclusions = Exclusions()
        self._buffer_exclusions = Exclusions()

    def land(self, landings: Iterable[Landing]) -> list[Landing]:
        """Records landings and returns them as a list."""
        landed = []
        for landing in landings:
            self.note(landing)
            landed.append(landing)
        self.counts.landings += len(landed)
        return landed

    def note(self, landing: Landing) -> None:
        """Adds the costs of a landing to the counters, and warns about groups that it excluded."""
        self.count_bytes(landing)
        self.counts.exposed_wait_s += landing.exposed_wait_s
        self.counts.in_flight_s += landing.in_flight_s
        if self._is_first_rank and not self._is_site:
            self._say_who_is_left_out(landing)
            self._say_whose_buffers_are_wrong(landing)
        if self._is_first_rank and self._direction_cost is not None:
            mapping_s = landing.seconds("outer_step")
            self._direction_cost.note(landing.fragment, time.perf_counter(), mapping_s)
        self.absences.count(landing.launched_at, landing.landed_at, landing.left_out)
        self.last_landing = landing

    def count_bytes(self, landing: Landing) -> None:
        self.counts.bytes_sent += landing.bytes_sent
        self.counts.bytes_received += landing.bytes_received

    def _say_who_is_left_out(self, landing: Landing) -> None:
        settings = self._rounds.settings
        guard = "outlier_guard"
        if settings.weighing is not None:
            guard = f"weighing={settings.weighing!r}"
        norms = ", ".join(f"{norm:.3g}" for norm in landing.group_norms)
        too_long = f"is too long for {guard} (norms by group: {norms})"
        left_out = dict.fromkeys(landing.left_out, "is not finite") | dict.fromkeys(
            landing.outlying, too_long
        )
        for group, reason in left_out.items():
            if self._exclusions.begins(group, landing.launched_at, settings.sync_every):
                _log.warning(
                    "The outer gradient of worker group %d %s. The mean of fragment %d, launched"
                    " after inner step %d, excludes that group, and the group takes the outer"
                    " parameters. Check the group's data, loss and learning rate. Until the group"
                    " has been included for %d rounds, further exclusions are reported only in"
                    " Landing and in the metrics sdiloco/groups_left_out and"
                    " sdiloco/groups_outlying.",
                    group,
                    reason,
                    landing.fragment,
                    landing.launched_at,
                    REMEMBERED,
                )

    def _say_whose_buffers_are_wrong(self, landing: Landing) -> None:
        exclusions = self._buffer_exclusions
        sync_every = self._rounds.settings.sync_every
        for group in landing.wrong_buffers:
            if exclusions.begins(group, landing.launched_at, sync_every):
                _log.warning(
                    "The buffers of worker group %d are too large for outlier_guard. The mean of"
                    " the buffers of fragment %d, launched after inner step %d, excludes that"
                    " group, and the group takes the outer buffers. Check the group's data. Until"
                    " its buffers have been included for %d rounds, further exclusions are"
                    " reported only in Landing and in the metric sdiloco/groups_wrong_buffers.",
                    group,
                    landing.fragment,
                    landing.launched_at,
                    REMEMBERED,
                )


# How often a group is left out


class Exclusions:
    """Detects when a group starts to be left out, so that this is logged only once.

    An exclusion ends once no launch has left the group out for `REMEMBERED` rounds. Until then,
    every launch that leaves it out belongs to the same exclusion.

    Examples:
        >>> exclusions = Exclusions()
        >>> [exclusions.begins(group=1, step=step, sync_every=10) for step in (20, 25, 30, 90, 200)]
        [True, False, False, False, True]
    """

    def __init__(self) -> None:
        # Maps each group to the inner step of the last launch that left it out.
        self._last_left_out: dict[int, int] = {}

    def begins(self, group: int, step: int, sync_every: int) -> bool:
        """Records that a launch left out a group. Returns True if this starts a new exclusion."""
        last = self._last_left_out.get(group)
        self._last_left_out[group] = step
        return last is None or step - last > REMEMBERED * sync_every


class Absences:
    """Counts how many times in a row each group was left out because its values were not finite."""

    def __init__(self, groups: int) -> None:
        self._in_a_row = [0] * groups
        self._recovered_at = [0] * groups

    def count(self, launched_at: int, landed_at: int, left_out: Sequence[int]) -> None:
        for group in range(len(self._in_a_row)):
            if group not in left_out:
                self._in_a_row[group] = 0
            elif launched_at > self._recovered_at[group]:
                # A fragment that was launched before the group recovered reports the same event
                # again. Within an inner step, launches precede landings, so launches in the step of
                # the recovery also report it again.
                self._in_a_row[group] += 1
                self._recovered_at[group] = landed_at
        lost = [group for group, count in enumerate(self._in_a_row) if count >= _MOST_LEFT_OUT]
        if lost:
            raise AgreementError(
                f"The outer gradient of worker group {', '.join(map(str, lost))} was not finite"
                f" {_MOST_LEFT_OUT} times in a row, so the other groups train without it. Check"
                " this group's data and learning rate, and resume from a checkpoint, for example"
                " with gradient clipping."
            )

    def state_dict(self) -> dict[str, list[int]]:
        return {"left_out_in_a_row": list(self._in_a_row), "recovered_at": list(self._recovered_at)}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        self._in_a_row = list(state["left_out_in_a_row"])
        self._recovered_at = list(state["recovered_at"])
