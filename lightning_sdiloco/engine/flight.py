"""A fragment on its way: what is taken along at the launch, and what comes back for the landing."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from torch import Tensor

from lightning_sdiloco.algorithm import Control, Count, LandingRule
from lightning_sdiloco.engine.background import Pending
from lightning_sdiloco.engine.measurements import Diagnostics, Span
from lightning_sdiloco.engine.outer.optimizer import OuterState


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

    @property
    def is_exact(self) -> bool:
        """Whether it travels in float32, and as a difference to nothing."""
        return self is not Purpose.ROUND


class LaunchSnapshot(NamedTuple):
    """Holds what a launch reads: from here on the training thread may change the model."""

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
    def of(state: dict[str, Any], outer: Tensor, deadline: float) -> "LaunchSnapshot":
        """Restores what `state_dict` returned of a flight for a round; copies the tensors."""
        tensors = {
            "outer": outer,
            "gradient": state["gradient"].to(outer.device, copy=True),
            "buffers": [buffer.to(outer.device, copy=True) for buffer in state["buffers"]],
        }
        return LaunchSnapshot(**{**state, **tensors}, deadline=deadline)


class SyncResult(NamedTuple):
    """Holds what a flight brings, for its landing; see [Note: fragment tensors]."""

    outer: OuterState
    memory: Tensor | None
    residual: Tensor | None
    rule: LandingRule
    gathered: Sequence[Tensor]
    buffers: dict[int, Tensor]
    weighing: Any
    controls: list[Control]
    left_out: tuple[int, ...]
    changed: int
    counted: Count
    gradient_norm: float
    bytes_sent: int
    bytes_received: int
    on_link_s: float
    spans: Mapping[str, Span]
    diagnostics: Diagnostics | None
    tuning: Tensor | None = None
    sends_bytes_per_s: float = 0.0
    twin: Tensor | None = None


class GroupMean(NamedTuple):
    """Holds the plain mean, over the groups, of what each group holds; see `StreamingDiLoCo.group_mean`."""

    gathered: list[Tensor]
    buffers: list[dict[int, Tensor]]


@dataclass(frozen=True)
class Flight:
    """Holds a fragment in flight."""

    snapshot: LaunchSnapshot
    pending: Pending[SyncResult]
    launch: Span


@dataclass
class Counts:
    """Counts what happened so far; see `StreamingDiLoCo.report`."""

    inner_steps: int = 0
    launches: int = 0
    landings: int = 0
    flights_dropped: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    exposed_wait_s: float = 0.0
    in_flight_s: float = 0.0

    def add(self, landing: "Landing") -> None:
        """Adds what a flight that has landed sent and received, and how long training waited for it."""
        self.exposed_wait_s += landing.exposed_wait_s
        self.in_flight_s += landing.in_flight_s
        self.bytes_sent += landing.bytes_sent
        self.bytes_received += landing.bytes_received


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

    @staticmethod
    def of(
        fragment: int,
        launched_at: int,
        launch: Span,
        result: SyncResult,
        landed_at: int,
        wait: Span,
        seconds: float,
    ) -> "Landing":
        """Tells what happened at the landing of a flight that has just landed.

        Args:
            fragment: The fragment.
            launched_at: The inner step of the launch.
            launch: When it was launched.
            result: What the flight brought.
            landed_at: The inner step of the landing.
            wait: When the training thread began to wait for it, and when its result was there.
            seconds: How long it was in flight.
        """
        launched, (began, arrived) = launch[1], wait
        ended = max([launched + seconds, *(ended for _, ended in result.spans.values())])
        return Landing(
            fragment=fragment,
            launched_at=launched_at,
            requests=reduce(or_, (control.requests for control in result.controls)),
            left_out=result.left_out,
            outlying=result.counted.outlying,
            outer_lr=result.outer.lr,
            outer_grad_norm=result.gradient_norm,
            bytes_sent=result.bytes_sent,
            exposed_wait_s=arrived - began,
            in_flight_s=seconds,
            landed_at=landed_at,
            bytes_received=result.bytes_received,
            counted=tuple(result.counted.factors),
            group_norms=tuple(control.norm for control in result.controls),
            spans={
                "launch": launch,
                "flight": (launched, min(ended, arrived)),
                **result.spans,
                "wait": wait,
                "land": (arrived, time.perf_counter()),
            },
            diagnostics=result.diagnostics,
            on_link_s=result.on_link_s,
            step_times=tuple(control.step_time for control in result.controls),
        )

    @property
    def link_gbit_s(self) -> float:
        """The effective link rate: what went in one direction over the time for which it was on the link.

        NaN where that time cannot be told; 0 if nothing was sent.
        """
        bits = 8 * max(self.bytes_sent, self.bytes_received)
        if not bits:
            return 0.0
        return bits / self.on_link_s / 1e9 if self.on_link_s > 0 else math.nan
