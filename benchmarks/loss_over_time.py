"""When which method has reached which loss on a slow link: two sites, 100 Mbit/s, 50 ms round trip,
real processes.

    python -m benchmarks.loss_over_time [--quick] [--json FILE] [--picture FILE]

Every site is a network namespace with one rank that really computes, so this needs root and an idle
machine of two cores. All methods start from the same weights and see the same windows of text in
the same order, 16 tokens for each parameter, with the same two learning rates of the inner
optimizer. A run ends when its tokens are used up or after 15 minutes. Losses are those of
snapshots, validated after the run: no validation is in the times.

Methods that exchange in every step hardly compute, so their runs share the machine, over links of
their own. With --json every row is kept at once, and rows that the file has are not measured again,
unless they failed.

The peers need Pythons of their own: benchmarks/peers/install.sh. One that is not there is left out,
with the reason.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import report
from benchmarks.learning import WINDOWS, LearningCase, snapshots
from benchmarks.links import require
from benchmarks.models import TINY, Size
from benchmarks.picture import NO_EXCHANGE, POWER_SGD, figure, save
from benchmarks.sites import Found, Job, run, run_apart
from benchmarks.training import Text, parameters
from lightning_sdiloco.tools.output import DDP, DILOCO, STREAMING

DEMONSTRATED = Size(layers=3, width=64, heads=4, context=128)
"""189,312 parameters: the model of examples/demo.py."""

TOKENS_PER_PARAMETER = 16
SITES = 2
BATCH = 4
SEED = 0
VALIDATION_WINDOWS = 512
MBIT_S = 100.0
ROUND_TRIP = 0.05
LIMIT = 900.0
"""Seconds after which a run is over."""

RATES = (3e-3, 4.5e-3)
"""Learning rates of the inner optimizer."""

METHODS = {
    "streaming_defaults": ("Streaming DiLoCo, defaults", STREAMING),
    "torchft": ("torchft DiLoCo, fp32", DILOCO),
    "ddp_powersgd": ("DDP, PowerSGD rank 2", POWER_SGD),
    "ddp": ("DDP", DDP),
    "alone": ("no exchange, plain loop", NO_EXCHANGE),
    "lightning_alone": ("no exchange, Trainer", NO_EXCHANGE),
}
"""Names and colors."""

IN_ROUNDS = ("streaming_defaults", "torchft")
"""The methods that exchange now and then."""

EVERY_STEP = ("ddp_powersgd", "ddp")
"""The methods that wait for the link in every step."""

ALONE = ("alone", "lightning_alone")
"""Without any exchange: the loop of the others, and that of ours."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A run of a method.

    Attributes:
        method: Its name.
        lr: Learning rate of the inner optimizer.
        steps: Steps to train; fewer than the schedule has where the loss does not matter.
        mbit_s: Bandwidth of the links; None: this machine's loopback.
        beside: How many other runs share the machine.
        case: The training; only its folder is open.
    """

    method: str
    lr: float
    steps: int
    mbit_s: float | None
    beside: int
    case: LearningCase

    def key(self) -> Row:
        case = asdict(self.case)
        del case["folder"]
        return {
            "method": self.method,
            "steps": self.steps,
            "mbit_s": self.mbit_s,
            "beside": self.beside,
            "case": case,
        }


def case(quick: bool, lr: float) -> LearningCase:
    """Makes the training. The cut and the mixing are chosen here, because torchft has no suitable
    defaults for them.
    """
    size = TINY if quick else DEMONSTRATED
    tokens = TOKENS_PER_PARAMETER * parameters(size)
    return LearningCase(
        size,
        fragments=2,
        batch=BATCH,
        step_seconds=0.0,
        sync_every=10 if quick else 20,
        overlap_steps=4 if quick else 5,
        mixing=0.2,
        steps=20 if quick else round(tokens / (SITES * BATCH * size.context)),
        points=4 if quick else 16,
        lr=lr,
    )


def plans(quick: bool) -> Iterator[list[Plan]]:
    """Yields the runs that are made at the same time."""
    rates = RATES[1:] if quick else RATES
    in_rounds = IN_ROUNDS[:1] if quick else IN_ROUNDS
    every_step = EVERY_STEP[1:] if quick else EVERY_STEP
    at_last_rate = case(quick, RATES[1])
    steps = at_last_rate.steps
    few = max(1, steps // 30)
    for method in ALONE[:1] if quick else ALONE:
        yield [Plan(method, RATES[1], 10 * few, None, 0, at_last_rate)]
    for method, rate in product(in_rounds, rates):
        yield [Plan(method, rate, steps, MBIT_S, 0, case(quick, rate))]
    if not quick:
        # How long a step takes where nothing else runs, to compare with the runs that share the
        # machine.
        for method in every_step:
            yield [Plan(method, RATES[1], few, MBIT_S, 0, at_last_rate)]
    beside = len(every_step) * len(rates) - 1
    yield [
        Plan(method, rate, steps, MBIT_S, beside, case(quick, rate))
        for method, rate in product(every_step, rates)
    ]


# -------------------------------------------------------------------------------------------------
# Measuring
# -------------------------------------------------------------------------------------------------


class Validation:
    """The text: the windows that all runs train on, and the loss of what they learned."""

    def __init__(self, size: Size) -> None:
        self._text = Text(size, VALIDATION_WINDOWS)
        self._net = size.make()

    def write_windows(self, path: Path, steps: int) -> None:
        """Writes the windows of all groups, and some more for loops that begin a step that does
        not count.
        """
        batches = self._text.batches(SEED, SITES * BATCH)
        windows = []
        for _ in range(steps + 4):
            tokens, targets = next(batches)
            windows.append(torch.cat([tokens, targets[:, -1:]], dim=1).to(torch.uint8))
        torch.save(torch.stack(windows), path)

    def loss(self, model: dict[str, torch.Tensor]) -> float:
        """Returns the validation loss of a model, in nats per byte."""
        self._net.load_state_dict(model)
        return self._text.loss(self._net)


def measure(quick: bool, path: Path | None) -> list[Row]:
    require()
    rows = [row for row in report.kept_rows(path) if "reason" not in row]
    validation = Validation(case(quick, RATES[0]).size)
    for together in plans(quick):
        wanted = [
            plan for plan in together if not any(row.items() >= plan.key().items() for row in rows)
        ]
        for row in measured(wanted, validation):
            rows.append(row)
            about = report.measured("loss_over_time", quick)
            report.write(path, headline(rows), about, rows=rows)
            report.said(f"{row['method']}, rate {row['case']['lr']:g}: {outcome(row)}")
    return rows


def measured(together: list[Plan], validation: Validation) -> Iterator[Row]:
    """Runs all at the same time, and yields a row for each."""
    with TemporaryDirectory() as folder:
        jobs = [_job(plan, Path(folder, str(n)), validation) for n, plan in enumerate(together)]
        with ThreadPoolExecutor(max(1, len(jobs))) as pool:
            # A peer's Python, and several at a time, are processes of their own.
            runs_here = len(jobs) == 1 and jobs[0].method != "torchft"
            outcomes = list(map(run, jobs) if runs_here else pool.map(run_apart, jobs))
        for plan, job, numbers in zip(together, jobs, outcomes, strict=True):
            yield {**plan.key(), **judged(plan, job, numbers, validation)}


def _job(plan: Plan, folder: Path, validation: Validation) -> Job:
    """Makes the job of a run, with its windows in a folder."""
    folder.mkdir()
    validation.write_windows(folder / WINDOWS, plan.case.steps)
    placed = replace(plan.case, folder=str(folder))
    return Job(
        plan.method, placed, SITES, plan.mbit_s, 0, plan.steps, ROUND_TRIP / 2, seconds=LIMIT + 60
    )


def judged(plan: Plan, job: Job, numbers: Found, validation: Validation) -> Row:
    """Returns what is written down of a run: its points if it is one that learns, else how long a
    step took.
    """
    if "seconds" not in numbers and "did not finish" not in numbers.get("reason", ""):
        return {"reason": numbers["reason"]}
    if plan.steps < plan.case.steps:
        row = {"step_seconds": numbers["seconds"]}
        return {**row, "bytes_per_step": numbers["bytes"]} if plan.mbit_s else row
    assert isinstance(job.case, LearningCase)
    points = [
        {**spent, "loss": validation.loss(model)}
        for spent, model in snapshots(job.case, SITES)
        if spent["seconds"] <= LIMIT
    ]
    last = points[-1]
    row = {
        "step_seconds": last["seconds"] / last["step"],
        "bytes_per_step": last["bytes"] / last["step"],
        "finished": last["step"] == plan.steps,
        "points": points,
    }
    return {**row, "told": numbers["told"]} if "told" in numbers else row


def outcome(row: Row) -> str:
    if "reason" in row:
        return str(row["reason"])
    step = f"{1000 * row['step_seconds']:.1f} ms a step"
    return f"{step}, loss {final(row):.4f}" if "points" in row else step


# -------------------------------------------------------------------------------------------------
# The results
# -------------------------------------------------------------------------------------------------


def curves(rows: list[Row]) -> list[Row]:
    """The rows of runs that learn, in the order of the methods."""
    return [
        row for method in METHODS for row in rows if row["method"] == method and "points" in row
    ]


def final(row: Row) -> float:
    return float(row["points"][-1]["loss"])


def best(rows: list[Row]) -> dict[str, Row]:
    """The run of each method at its better rate."""
    best_rows: dict[str, Row] = {}
    for row in curves(rows):
        method = row["method"]
        if method not in best_rows or final(row) < final(best_rows[method]):
            best_rows[method] = row
    return best_rows


def seconds_to(row: Row, loss: float) -> float | None:
    """When the first snapshot was as good; None if none was."""
    return next((point["seconds"] for point in row["points"] if point["loss"] <= loss), None)


def targets(rows: list[Row]) -> dict[str, float]:
    """The losses to reach: where DDP ends, what all whole runs reach, and what those reach too
    that were stopped.
    """
    best_rows = best(rows)
    finished = [final(row) for row in best_rows.values() if row["finished"]]
    losses: dict[str, float] = {}
    if "ddp" in best_rows:
        losses["DDP's last loss"] = final(best_rows["ddp"])
    if finished:
        losses["what all whole runs reach"] = max(finished)
    if best_rows:
        losses["what all reach"] = max(map(final, best_rows.values()))
    return losses


def without_exchange(rows: list[Row], method: str = "alone") -> float | None:
    for row in rows:
        if row["method"] == method and "step_seconds" in row:
            return float(row["step_seconds"])
    return None


def headline(rows: list[Row]) -> dict[str, float]:
    """The last loss of each method at its better rate, and the seconds that it took to a loss."""
    numbers = {}
    for method, row in best(rows).items():
        name = METHODS[method][0]
        numbers[f"{name}: last loss"] = final(row)
        for target, loss in targets(rows).items():
            seconds = seconds_to(row, loss)
            if seconds is not None:
                numbers[f"{name}: seconds to {target}"] = seconds
    for method in ALONE:
        bound = without_exchange(rows, method)
        if bound is not None:
            numbers[f"{METHODS[method][0]}: seconds of a step"] = bound
    return numbers


def show(rows: list[Row]) -> None:
    """Prints all runs, and how long steps take without any exchange."""
    goals = targets(rows)
    schedule = rows[0]["case"]
    table = [_cells(row, list(goals.values())) for row in curves(rows)]
    for method in ALONE:
        bound = without_exchange(rows, method)
        if bound is not None:
            step = f"{1000 * bound:.1f}"
            in_all = f"{bound * schedule['steps']:.0f}"
            table.append([METHODS[method][0], "", step, "0", in_all, *[""] * (1 + len(goals))])
    columns = [
        "method",
        "inner rate",
        "ms per step",
        "MB sent per rank",
        "seconds in all",
        "last loss",
        *(f"seconds to {loss:.3f}" for loss in goals.values()),
    ]
    meanings = "; ".join(f"{loss:.3f}: {name}" for name, loss in goals.items())
    numel = parameters(Size(**schedule["size"]))
    title = f"{numel:,} parameters, {schedule['steps']:,} steps, {MBIT_S:g} Mbit/s"
    report.show(title, columns, table, f"{meanings}. At the first snapshot as good.")
    report.show_left_out(
        f"{METHODS[row['method']][0]}: {row['reason']}" for row in rows if "reason" in row
    )


def _cells(row: Row, goals: Sequence[float]) -> list[str]:
    last = row["points"][-1]
    stopped = "" if row["finished"] else f" (stopped at step {last['step']:,})"
    reached = [seconds_to(row, loss) for loss in goals]
    return [
        METHODS[row["method"]][0],
        f"{row['case']['lr']:g}",
        f"{1000 * row['step_seconds']:.1f}",
        f"{last['bytes'] / 1e6:,.1f}",
        f"{last['seconds']:.0f}{stopped}",
        f"{last['loss']:.3f}",
        *("-" if seconds is None else f"{seconds:.0f}" for seconds in reached),
    ]


def draw(rows: list[Row], path: Path | None) -> None:
    """Draws the loss over the time of each method at its better rate."""
    if path is None:
        return
    picture, (axes,) = figure(height=4.2)
    for row in best(rows).values():
        _plot(axes, row)
    bound = without_exchange(rows)
    if bound is not None:
        shortest = bound * rows[0]["case"]["steps"]
        label = f"without any exchange: {shortest:.0f} s"
        axes.axvline(shortest, color=NO_EXCHANGE, linestyle=":", label=label)
    axes.set_xscale("log")
    marks = {5: "5 s", 10: "10 s", 30: "30 s", 60: "1 min", 120: "2 min", 300: "5 min"}
    marks[600] = "10 min"
    axes.set_xticks(list(marks), list(marks.values()))
    axes.minorticks_off()
    link = f"a link of {MBIT_S:g} Mbit/s with a round trip of {1000 * ROUND_TRIP:g} ms"
    axes.set_xlabel(f"time on {link}, measured")
    axes.set_ylabel("validation loss, nats per byte")
    picture.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save(picture, path)


def _plot(axes: Any, row: Row) -> None:
    name, color = METHODS[row["method"]]
    points = row["points"]
    seconds = [point["seconds"] for point in points]
    losses = [point["loss"] for point in points]
    stopped = "" if row["finished"] else ", stopped"
    label = f"{name}: {losses[-1]:.3f} after {seconds[-1]:.0f} s{stopped}"
    width = 2.5 if color == STREAMING else 1.5
    axes.plot(seconds, losses, "o-", color=color, label=label, markersize=4, linewidth=width)


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    rows = measure(options.quick, options.json)
    show(rows)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
