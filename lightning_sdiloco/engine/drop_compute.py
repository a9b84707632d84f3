"""DropCompute: drops the remaining micro-batches of a rank that falls behind in an inner step."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.shards import is_sharded

# The number of inner steps that ``budget="auto"`` measures.
_WARMUP = 50

# The number of thresholds that are tried.
_THRESHOLDS = 200


class DropCompute:
    """A limit on how long a rank may compute in an inner step of multiple micro-batches (arXiv
    2306.10598).

    The ranks of a worker group wait for each other in every inner step. A rank that exceeds the
    budget drops its remaining micro-batches, except for the last, which synchronises gradients. As
    in the authors' code, losses are divided by the total number of micro-batches, so a dropped
    micro-batch counts as a zero gradient. The mean weights each group by the number of
    micro-batches that its ranks trained.

    Call a `DropCompute` with a loader to get a loader that yields None for dropped micro-batches. A
    Trainer skips these None values.

    Args:
        micro_batches: The number of micro-batches in an inner step, which a Trainer calls
            ``accumulate_grad_batches``.
        budget: The number of seconds that a rank may compute in an inner step. With ``"auto"``,
            nothing is dropped for the first 50 inner steps. The ranks of a group then share their
            measured times and choose the budget that maximises throughput.
        most_dropped: The largest share of micro-batches that ``"auto"`` may drop.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> drop = DropCompute(4, budget=0.0)
        >>> list(drop(range(6)))
        [0, None, None, 3, 4, 5]
    """

    def __init__(
        self,
        micro_batches: int,
        budget: float | Literal["auto"] = "auto",
        most_dropped: float = 0.1,
    ) -> None:
        if not isinstance(micro_batches, int) or micro_batches < 2:
            raise ValueError(
                f"micro_batches={micro_batches!r} leaves nothing to drop, because the last"
                " micro-batch always runs. Accumulate gradients over at least 2 micro-batches,"
                " or remove DropCompute."
            )
        if budget != "auto" and not (isinstance(budget, (int, float)) and budget >= 0):
            raise ValueError(
                f"budget={budget!r} is out of range. It must be 'auto' or at least 0 seconds."
            )
        if not 0 < most_dropped < 1:
            raise ValueError(
                f"most_dropped={most_dropped!r} is out of range. It must be between 0 and 1,"
                " for example 0.1."
            )
        self.micro_batches = micro_batches
        self.budget = budget
        self.most_dropped = most_dropped

    def __call__(self, loader: Any) -> "DroppingLoader":
        """Wraps a loader so that it yields None for dropped micro-batches."""
        return DroppingLoader(self, loader)


class DroppingLoader:
    """A loader that yields None for each dropped micro-batch; see `DropCompute`.

    Attributes:
        drop: The settings of DropCompute.
        loader: The wrapped loader.
        length: The number of micro-batches in an epoch.
        budget: The number of seconds that a rank may compute in an inner step.
        trained: The number of micro-batches trained so far in this inner step.
        dropped: The total number of micro-batches dropped so far.
    """

    def __init__(
        self, drop: DropCompute, loader: Any, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if not hasattr(loader, "__len__"):
            raise ValueError(
                "DropCompute needs a loader with a length, because the last micro-batch of an epoch"
                " synchronises the gradients and must not be dropped. Define __len__ on the loader."
            )
        self.drop = drop
        self.loader = loader
        self.length = len(loader)
        self._clock = clock
        self.budget = inf if drop.budget == "auto" else float(drop.budget)
        self.trained = self.dropped = 0
        self._measures = drop.budget == "auto"
        # Gathers objects from the ranks of the group, or only from this rank until `follow` is
        # called.
        self._all_gather: Callable[[Any], list[Any]] = lambda table: [table]
        # For each measured step, the time in seconds from its start to the end of each micro-batch.
        self._table: list[list[float]] = []
        self._position = 0
        self._resumed = False
        # Device events recorded after micro-batches that may still be running.
        self._events: list[Any] = []

    def follow(self, engine: StreamingDiLoCo) -> "DroppingLoader":
        """Connects the loader to an engine's worker group and returns the loader."""
        if engine.topology.group_size > 1:
            _refuse_what_meets(engine.model)
        self._all_gather = engine.topology.in_group.all_gather_object
        return self

    def __len__(self) -> int:
        return self.length

    @property
    def sampler(self) -> Any:
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        return getattr(self.loader, "batch_sampler", None)

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch is the one that synchronises gradients."""
        return self._position % self.drop.micro_batches == 0 or self._position >= self.length

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self._position = 0
        self._resumed = False
        began = 0.0
        row = list[float]()
        for batch in self.loader:
            if self._position >= self.length:
                return
            now = self._now()
            if self._position % self.drop.micro_batches == 0 or not began:
                if row:
                    self._note([*row, now - began])
                # The clock is read again, because choosing a budget and waiting for ranks take
                # time.
                began = self._clock()
                row = []
                self.trained = 0
            else:
                row.append(now - began)
            self._position += 1
            if row and now - began > self.budget and not self.is_last:
                self.dropped += 1
                yield None
            else:
                self.trained += batch is not None
                yield batch

    def _now(self) -> float:
        """Returns the time. On a GPU, first waits until at most one micro-batch is running."""
        if torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
            self._events.append(event)
            if len(self._events) > 1:
                self._events.pop(0).synchronize()
        return self._clock()

    def _note(self, row: list[float]) -> None:
        """Adds a step to the table, and chooses the budget once enough steps have been measured."""
        if not self._measures:
            return
        if len(row) == self.drop.micro_batches and self.trained:
            self._table.append(row)
        if len(self._table) == _WARMUP:
            times, overhead = _computed(self._all_gather(self._table))
            self.budget = best_drop(times, overhead, self.drop.most_dropped).budget
            self._measures = False
            self._table = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self._position,
            "trained": self.trained,
            "dropped": self.dropped,
            "measures": self._measures,
            "budget": self.budget,
            "table": [list(row) for row in self._table],
            "loader": self.loader.state_dict() if hasattr(self.loader, "state_dict") else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from the point at which `state_dict` was called, and restarts the inner step's
        clock.
        """
        self._position = state["position"]
        self.trained = state["trained"]
        self.dropped = state["dropped"]
        self._resumed = True
        if self.drop.budget == "auto":
            self._measures = state["measures"]
            self.budget = state["budget"]
            self._table = [list(row) for row in state["table"]]
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])


def _computed(tables: list[list[list[float]]]) -> tuple[list[list[list[float]]], float]:
    """Returns the duration of each micro-batch, by rank and step, and the overhead of a step, both
    in seconds.

    Args:
        tables: The time in seconds from the start of each step to the end of each of its
            micro-batches, by rank and step.
    """
    times = []
    for table in tables:
        rank_times = []
        for row in table:
            seconds = [end - start for start, end in pairwise([0.0, *row[:-1]])]
            # The last micro-batch also synchronises gradients, so the mean replaces its measured
            # time.
            rank_times.append([*seconds, sum(seconds) / len(seconds)])
        times.append(rank_times)
    overhead = 0.0
    steps = len(tables[0])
    for step in range(steps):
        overhead += min(
            table[step][-1] - sum(rank_times[step])
            for table, rank_times in zip(tables, times, strict=True)
        )
    return times, max(0.0, overhead / steps)


def _refuse_what_meets(model: nn.Module) -> None:
    kinds = [type(part).__name__ for part in model.modules() if isinstance(part, nn.SyncBatchNorm)]
    if any(is_sharded(parameter) for parameter in model.parameters()):
        kinds.append("a sharded parameter")
    if kinds:
        raise ValueError(
            f"DropCompute does not work with {kinds[0]}, because the ranks of a worker group"
            " would communicate in every micro-batch and wait for any rank that drops one. Use"
            " worker groups whose ranks each hold the whole model, or remove DropCompute."
        )


class Drop(NamedTuple):
    budget: float
    dropped: float = 0.0
    gain: float = 0.0


def best_drop(
    times: Sequence[Sequence[Sequence[float]]], overhead: float, most_dropped: float
) -> Drop:
    """Finds the budget that maximises throughput; see [Note: the rule of DropCompute].

    [Note: the rule of DropCompute] A step takes as long as its slowest rank computes, plus an
    overhead that no rank can shorten. A rank that exceeds the budget drops all its remaining
    micro-batches except for the last, which synchronises gradients. The first micro-batch always
    runs. If dropping shortens the step by the share ``s`` and drops the share ``d`` of the
    micro-batches, the gain is ``(1 - d) / (1 - s) - 1`` (arXiv 2306.10598 and the authors' code).
    If there are only a few ranks and their times vary widely, the optimum is flat and noisy, and
    would drop most micro-batches. For this reason, ``d`` is limited.

    Args:
        times: The duration of each micro-batch in seconds, as ``times[rank][step][micro-batch]``.
        overhead: The duration, in seconds, of a step without any computation.
        most_dropped: The largest share of micro-batches that may be dropped.

    Examples:
        >>> steady, slow = [1.0, 1.0, 1.0, 1.0], [1.0, 4.0, 1.0, 1.0]
        >>> times = [[steady] * 10, [slow] + [steady] * 9]
        >>> best_drop(times, overhead=0.0, most_dropped=0.1).dropped
        0.0125
        >>> best_drop([[steady] * 10] * 2, overhead=0.0, most_dropped=0.1)
        Drop(budget=inf, dropped=0.0, gain=0.0)
    """
    seconds = torch.tensor(times, dtype=torch.float64)
    ends = seconds.cumsum(dim=-1)
    step_seconds = float(ends[..., -1].amax(dim=0).mean()) + overhead
    budgets = torch.linspace(
        float(ends[..., 0].min()), float(ends[..., -1].max()), _THRESHOLDS, dtype=torch.float64
    )
    best = Drop(inf)
    for budget in budgets.tolist():
        # The first and last micro-batches always run, as do all that begin within the budget.
        is_computed = torch.ones_like(ends)
        is_computed[..., 1:-1] = (ends[..., :-2] <= budget).to(ends.dtype)
        dropped = 1 - float(is_computed.mean(dtype=torch.float64))
        shorter = float((seconds * is_computed).sum(dim=-1).amax(dim=0).mean()) + overhead
        gain = (1 - dropped) * step_seconds / shorter - 1
        if dropped <= most_dropped and gain > best.gain + 1e-9:
            best = Drop(budget, round(dropped, 12), gain)
    return best
