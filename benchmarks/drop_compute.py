"""Measures the gain of DropCompute if the micro-batches of a group's ranks take unequal times,
simulated by sleeps.

Run it with ``python -m benchmarks.drop_compute [--quick] [--json FILE]``. The ranks of a group
train with gloo, and each micro-batch takes a lognormal time. The same steps are taken with and
without a budget that the ranks choose.
"""

import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import report
from lightning_sdiloco import DropCompute, StreamingDiLoCo
from lightning_sdiloco import WorkerGroups as Groups
from lightning_sdiloco.engine.drop_compute import Drop, best_drop
from tests.ranks import run_ranks


class Case(NamedTuple):
    """A group, the times of its micro-batches, and the steps of a measurement.

    Attributes:
        ranks: Ranks of the group.
        micro_batches: Micro-batches of an inner step.
        sigma: Standard deviation of the logarithm of their times.
        seconds: Their mean time.
        steps: Inner steps that are compared, after 50 in which the ranks measure.
    """

    ranks: int = 8
    micro_batches: int = 12
    sigma: float = 0.2
    seconds: float = 0.04
    steps: int = 100


class Timed(NamedTuple):
    """The numbers of a rank: micro-batches that it trained, seconds, and the budget."""

    trained: int
    seconds: float
    budget: float


def times(case: Case, steps: int, seed: int) -> torch.Tensor:
    """Draws the times of micro-batches, of mean 1: shape ``(ranks, steps, micro_batches)``."""
    shape = (case.ranks, steps, case.micro_batches)
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (case.sigma * normal - case.sigma**2 / 2).exp()


def closed_form(case: Case, steps: int = 4000) -> Drop:
    """Applies the rule to steps that consist only of micro-batches."""
    return best_drop(times(case, steps, seed=1).tolist(), overhead=0.0, most_dropped=0.1)


def _rank(rank: int, world_size: int, case: Case) -> list[Timed]:
    groups = Groups(1)
    model = nn.Linear(64, 64)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=groups.process_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = StreamingDiLoCo(wrapped, worker_groups=groups, compression="fp32", fragments=[["*"]])
    warmup = 51  # the ranks choose when the 51st inner step begins
    table = case.seconds * times(case, warmup + case.steps, seed=0)[rank]
    timed = []
    for budget, first in ((float("inf"), warmup), ("auto", 0)):
        sleeps = table[first:].reshape(-1).tolist()
        loader = DropCompute(case.micro_batches, budget)(sleeps).follow(engine)  # type: ignore[arg-type]
        trained = []
        ends = [time.perf_counter()]
        for seconds in loader:
            if seconds is not None:
                with nullcontext() if loader.is_last else wrapped.no_sync():
                    time.sleep(seconds)
                    (wrapped(torch.ones(1, 64)).square().mean() / case.micro_batches).backward()
            if loader.is_last:
                optimizer.step()
                optimizer.zero_grad()
                engine.step(trained=loader.trained)
                ends.append(time.perf_counter())
                trained.append(loader.trained)
        # The ranks measure during the steps before these.
        seconds_in_all = ends[-1] - ends[-1 - case.steps]
        timed.append(Timed(sum(trained[-case.steps :]), seconds_in_all, loader.budget))
    engine.finish()
    return timed


def measure(case: Case) -> dict[str, Any]:
    """Takes the same steps with and without dropping, and returns the gain."""
    ranks = run_ranks(_rank, case.ranks, case, timeout=600)
    trained = [sum(rank[run].trained for rank in ranks) for run in (0, 1)]
    seconds = [max(rank[run].seconds for rank in ranks) for run in (0, 1)]
    speeds = [trained[run] / seconds[run] for run in (0, 1)]
    return {
        "gain": speeds[1] / speeds[0] - 1,
        "dropped": 1 - trained[1] / trained[0],
        "seconds_without": seconds[0] / case.steps,
        "seconds_with": seconds[1] / case.steps,
        "budget": ranks[0][1].budget,
    }


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    case = Case(ranks=4, seconds=0.004, steps=20) if options.quick else Case()
    expected = closed_form(case)
    measured = measure(case)
    gain = measured["gain"]
    dropped = measured["dropped"]
    steps = [f"{measured[name]:.3f} s" for name in ("seconds_without", "seconds_with")]
    rows = [
        ["closed form", f"{expected.gain:.1%}", f"{expected.dropped:.1%}", "", ""],
        ["measured", f"{gain:.1%}", f"{dropped:.1%}", *steps],
    ]
    columns = ["", "gain", "dropped", "step without", "step with"]
    title = f"{case.ranks} ranks, {case.micro_batches} micro-batches, sigma {case.sigma}"
    report.show(title, columns, rows)
    headline = {
        "measured gain": gain,
        "gain of the closed form": expected.gain,
        "dropped": dropped,
    }
    report.write(
        options.json,
        headline,
        report.measured("drop_compute", options.quick),
        case=case._asdict(),
        closed_form=expected._asdict(),
        found=measured,
    )


if __name__ == "__main__":
    main()
