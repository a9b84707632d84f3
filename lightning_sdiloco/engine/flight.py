"""A fragment in flight as plain values: what a launch takes along, what comes back, and what a landing tells."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor

from lightning_sdiloco.algorithm import LandingRule
from lightning_sdiloco.engine.background import Pending
from lightning_sdiloco.engine.measurements import Diagnostics, Span


class Purpose(Enum):
    """What a flight is for."""

    ROUND = auto()
    """An outer step."""
    MEAN = auto()
    """The plain mean of the local values, at the end, for an evaluation or for a checkpoint."""
    START = auto()
    """The same, where groups may hold unlike outer values: after a warm-up, and on a route that does not share."""
    GRADIENT = auto()
    """The mean of the gradients of an inner step, in float32."""


class Launch(NamedTuple):
    """What a launch reads: from here on the training thread may change the model."""

    fragment: int
    step: int
    outer: Tensor
    gradient: Tensor
    buffers: list[Tensor]
    travelling: list[int]
    requests: int
    weight: int
    deadline: float
    purpose: Purpose = Purpose.ROUND
    step_time: float = 0.0
    choice: int = 0
    leg: tuple[int, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values and tensors on the host, without outer parameters and what the process decides."""
        return {
            "fragment": self.fragment,
            "step": self.step,
            "gradient": self.gradient.to("cpu"),
            "buffers": [buffer.to("cpu") for buffer in self.buffers],
            "travelling": self.travelling,
            "requests": self.requests,
            "weight": self.weight,
            **({"choice": self.choice} if self.choice else {}),
            **({"leg": self.leg} if self.leg else {}),
        }

    @staticmethod
    def of(state: dict[str, Any], outer: Tensor, deadline: float) -> "Launch":
        """Restores what `state_dict` returned of a flight for a round; copies the tensors."""
        tensors = {
            "outer": outer,
            "gradient": state["gradient"].to(outer.device, copy=True),
            "buffers": [buffer.to(outer.device, copy=True) for buffer in state["buffers"]],
        }
        return Launch(**{**state, **tensors}, deadline=deadline)


class Landing(NamedTuple):
    """Tells what happened at a landing.

    Attributes:
        fragment: The fragment that landed.
        launched_at: Inner step after which it was launched.
        requests: What the groups asked of all groups at the launch, one bit each.
        left_out: The groups whose outer gradient was not finite, and that were left out of the mean.
        outlying: The groups that ``outlier_guard`` left out of the mean.
        outer_lr: Learning rate of the outer step; 0 if there was none, because no group had trained.
        outer_grad_norm: Norm of the mean outer gradient of the whole fragment.
        bytes_sent: Bytes that this rank sent to other groups for this flight.
        exposed_wait_s: Seconds for which the training thread waited for the flight.
        in_flight_s: Seconds from the launch until the result was there.
        landed_at: Inner step after which it landed.
        bytes_received: Bytes that this rank received from other groups for this flight.
        counted: The groups that counted in the mean.
        group_norms: Norm of the outer gradient of each group, before any compression, by group; NaN for a group with
            which this one did not exchange.
        spans: From when to when what happened, on the clock of ``time.perf_counter()``: ``launch``, ``wait`` and
            ``land`` in the training thread, ``flight`` and its parts ``encode``, ``transfer``, ``decode``,
            ``relay`` if there is a second hop, and ``outer_step`` in the background.
        diagnostics: How far the groups agree, if `StreamingDiLoCo.diagnose` asked for it.
        on_link_s: Seconds for which the messages of the other groups were on the link; NaN if that cannot be told,
            because they were there already when this rank began to wait for them.
        sites: Of a site of a federation: the names of the sites that counted in the round, this one's among them unless
            it came too late.
        step_times: Seconds of an inner step of each group at the launch, by group, to three digits; 0 where that was
            not known.
    """

    fragment: int
    launched_at: int
    requests: int
    left_out: tuple[int, ...]
    outlying: tuple[int, ...]
    outer_lr: float
    outer_grad_norm: float
    bytes_sent: int
    exposed_wait_s: float
    in_flight_s: float
    landed_at: int
    bytes_received: int
    counted: tuple[int, ...]
    group_norms: tuple[float, ...]
    spans: Mapping[str, Span]
    diagnostics: Diagnostics | None
    on_link_s: float = math.nan
    sites: tuple[str, ...] = ()
    step_times: tuple[float, ...] = ()

    def seconds(self, name: str) -> float:
        """Returns how long one of the `spans` was; 0 if there was none."""
        began, ended = self.spans.get(name, (0.0, 0.0))
        return ended - began

    @property
    def link_gbit_s(self) -> float:
        """The effective link rate: what went in one direction over the time for which it was on the link.

        NaN where that time cannot be told; 0 if nothing was sent.
        """
        bits = 8 * max(self.bytes_sent, self.bytes_received)
        if not bits:
            return 0.0
        return bits / self.on_link_s / 1e9 if self.on_link_s > 0 else math.nan


class Arrival(NamedTuple):
    """What a flight brings: the values that its landing commits, and what it tells but for the times of the landing."""

    changes: Mapping[str, Any]
    rule: LandingRule
    gathered: Sequence[Tensor]
    buffers: Mapping[int, Tensor]
    changed: int
    trained: Sequence[int]
    landing: Landing
    sends_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Flight:
    """A fragment in flight."""

    launch: Launch
    pending: Pending[Arrival]
    launched: Span


def completed(told: Landing, launch: Span, wait: Span, seconds: float, step: int) -> Landing:
    """Completes what a flight tells, in the training thread, once it has landed after an inner step.

    Args:
        told: What the flight told.
        launch: When it was launched.
        wait: When the training thread began to wait for it, and when its result was there.
        seconds: How long it was in flight.
        step: The inner step of the landing.
    """
    launched, (began, arrived) = launch[1], wait
    ended = max([launched + seconds, *(ended for _, ended in told.spans.values())])
    spans = {"launch": launch, "flight": (launched, min(ended, arrived)), **told.spans, "wait": wait}
    return told._replace(
        exposed_wait_s=arrived - began,
        in_flight_s=seconds,
        landed_at=step,
        spans={**spans, "land": (arrived, time.perf_counter())},
    )
