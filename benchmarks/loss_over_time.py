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

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import report
from benchmarks.learning import WINDOWS, LearningCase, snapshots
from benchmarks.links import missing
from benchmarks.models import TINY, Size
from benchmarks.picture import BLUE, GREY, PURPLE, RED, figure, save
from benchmarks.sites import Found, Job, run, run_apart
from benchmarks.training import Text, parameters

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
    "streaming_defaults": ("Streaming DiLoCo, defaults", RED),
    "torchft": ("torchft DiLoCo, fp32", PURPLE),
    "ddp_powersgd": ("DDP, PowerSGD rank 2", BLUE),
    "ddp": ("DDP", GREY),
    "alone": ("no exchange, plain loop", GREY),
    "lightning_alone": ("no exchange, Trainer", GREY),
}
"""Names and colors."""

EVERY_STEP = ("ddp", "ddp_powersgd")
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
        case: What is trained; only its folder is open.
    """

    method: str
    lr: float
    steps: int
    mbit_s: float | None
    beside: int
    case: LearningCase

    def key(self) -> Row:
        case = {name: value for name, value in asdict(self.case).items() if name != "folder"}
        return {
            "method": self.method,
            "steps": self.steps,
            "mbit_s": self.mbit_s,
            "beside": self.beside,
            "case": case,
        }


def case(quick: bool, lr: float) -> LearningCase:
    """What is trained. The cut and the mixing are those of torchft, which has no defaults for them
    that suit.
    """
    size = TINY if quick else DEMONSTRATED
    steps = (
        20
        if quick
        else round(TOKENS_PER_PARAMETER * parameters(size) / (SITES * BATCH * size.context))
    )
    return LearningCase(
        size,
        fragments=2,
        batch=BATCH,
        step_seconds=0.0,
        sync_every=10 if quick else 20,
        overlap_steps=4 if quick else 5,
        mixing=0.2,
        steps=steps,
        points=4 if quick else 16,
        lr=lr,
    )


def plans(quick: bool) -> Iterator[list[Plan]]:
    rates = RATES[1:] if quick else RATES
    methods = (
        ["streaming_defaults", "ddp"] if quick else [name for name in METHODS if name not in ALONE]
    )
    few = max(1, case(quick, RATES[1]).steps // 30)
    for method in ALONE[:1] if quick else ALONE:
        yield [Plan(method, RATES[1], 10 * few, None, 0, case(quick, RATES[1]))]
    for method in methods:
        if method in EVERY_STEP and quick:
            continue
        if method in EVERY_STEP:
            # How long a step takes where nothing else runs, to compare with the runs that share the
            # machine.
            yield [Plan(method, RATES[1], few, MBIT_S, 0, case(quick, RATES[1]))]
        else:
            for lr in rates:
                yield [Plan(method, lr, case(quick, lr).steps, MBIT_S, 0, case(quick, lr))]
    beside = [(method, lr) for method in methods if method in EVERY_STEP for lr in rates]
    yield [
        Plan(m, lr, case(quick, lr).steps, MBIT_S, len(beside) - 1, case(quick, lr))
        for m, lr in beside
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
    lacks = missing()
    if lacks is not None:
        raise SystemExit(lacks)
    kept = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    rows: list[Row] = [row for row in kept if "reason" not in row]
    validation = Validation(case(quick, RATES[0]).size)
    for together in plans(quick):
        wanted = [
            plan for plan in together if not any(row.items() >= plan.key().items() for row in rows)
        ]
        for row in measured(wanted, validation):
            rows.append(row)
            report.write(path, headline(rows), report.measured("loss_over_time", quick), rows=rows)
            report.said(
                f"{row['method']}, rate {row['case']['lr']:g}: {row.get('reason') or told(row)}"
            )
    return rows


def measured(together: list[Plan], validation: Validation) -> Iterator[Row]:
    """Runs all at the same time, and yields a row for each."""
    with TemporaryDirectory() as folder:
        jobs = []
        for index, plan in enumerate(together):
            own = Path(folder, str(index))
            own.mkdir()
            validation.write_windows(own / WINDOWS, plan.case.steps)
            placed = replace(plan.case, folder=str(own))
            limit = LIMIT + 60
            jobs.append(
                Job(plan.method, placed, SITES, plan.mbit_s, 0, plan.steps, ROUND_TRIP / 2, limit)
            )
        with ThreadPoolExecutor(max(1, len(jobs))) as pool:
            # A peer's Python, and several at a time, are processes of their own.
            alone = len(jobs) == 1 and jobs[0].method != "torchft"
            found = list(map(run, jobs) if alone else pool.map(run_apart, jobs))
        for plan, job, one in zip(together, jobs, found, strict=True):
            yield {**plan.key(), **judged(plan, job, one, validation)}


def judged(plan: Plan, job: Job, found: Found, validation: Validation) -> Row:
    """What is written down of a run: its points if it is one that learns, else how long a step
    took.
    """
    if "seconds" not in found and "did not finish" not in found.get("reason", ""):
        return {"reason": found["reason"]}
    if plan.steps < plan.case.steps:
        sent = {"bytes_per_step": found["bytes"]} if plan.mbit_s else {}
        return {"step_seconds": found["seconds"], **sent}
    assert isinstance(job.case, LearningCase)
    points = [
        {**took, "loss": validation.loss(model)}
        for took, model in snapshots(job.case, SITES)
        if took["seconds"] <= LIMIT
    ]
    last = points[-1]
    each = {
        "step_seconds": last["seconds"] / last["step"],
        "bytes_per_step": last["bytes"] / last["step"],
    }
    told = {"told": found["told"]} if "told" in found else {}
    return {**each, "finished": last["step"] == plan.steps, "points": points, **told}


# -------------------------------------------------------------------------------------------------
# What it means
# -------------------------------------------------------------------------------------------------


def told(row: Row) -> str:
    step = f"{1000 * row['step_seconds']:.1f} ms a step"
    return f"{step}, loss {row['points'][-1]['loss']:.4f}" if "points" in row else step


def curves(rows: list[Row]) -> list[Row]:
    """The rows of runs that learn, in the order of the methods."""
    return [
        row for method in METHODS for row in rows if row["method"] == method and "points" in row
    ]


def final(row: Row) -> float:
    return float(row["points"][-1]["loss"])


def best(rows: list[Row]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in curves(rows):
        if row["method"] not in found or final(row) < final(found[row["method"]]):
            found[row["method"]] = row
    return found


def seconds_to(row: Row, loss: float) -> float | None:
    """When the first snapshot was as good; None if none was."""
    return next((point["seconds"] for point in row["points"] if point["loss"] <= loss), None)


def targets(rows: list[Row]) -> dict[str, float]:
    """The losses to reach: where DDP ends, what all whole runs reach, and what those reach too
    that were stopped.
    """
    ends = {method: final(row) for method, row in best(rows).items()}
    whole = [final(row) for row in best(rows).values() if row["finished"]]
    found = {"DDP's last loss": ends["ddp"]} if "ddp" in ends else {}
    if whole:
        found["what all whole runs reach"] = max(whole)
    if ends:
        found["what all reach"] = max(ends.values())
    return found


def without_exchange(rows: list[Row], method: str = "alone") -> float | None:
    return next(
        (row["step_seconds"] for row in rows if row["method"] == method and "step_seconds" in row),
        None,
    )


def headline(rows: list[Row]) -> dict[str, float]:
    """The last loss of each method at its better rate, and the seconds that it took to a loss."""
    numbers = {}
    for method, row in best(rows).items():
        numbers[f"{METHODS[method][0]}: last loss"] = final(row)
        for name, loss in targets(rows).items():
            seconds = seconds_to(row, loss)
            if seconds is not None:
                numbers[f"{METHODS[method][0]}: seconds to {name}"] = seconds
    for method in ALONE:
        bound = without_exchange(rows, method)
        if bound is not None:
            numbers[f"{METHODS[method][0]}: seconds of a step"] = bound
    return numbers


def show(rows: list[Row]) -> None:
    """Prints all runs, how long steps take where nothing else runs, and the larger models."""
    goals = targets(rows)
    table = []
    for row in curves(rows):
        last = row["points"][-1]
        reached = [seconds_to(row, loss) for loss in goals.values()]
        table.append(
            [
                METHODS[row["method"]][0],
                f"{row['case']['lr']:g}",
                f"{1000 * row['step_seconds']:.1f}",
                f"{last['bytes'] / 1e6:,.1f}",
                f"{last['seconds']:.0f}"
                + ("" if row["finished"] else f" (stopped at step {last['step']:,})"),
                f"{last['loss']:.3f}",
                *("-" if seconds is None else f"{seconds:.0f}" for seconds in reached),
            ]
        )
    columns = [
        "method",
        "inner rate",
        "ms per step",
        "MB sent per rank",
        "seconds in all",
        "last loss",
    ]
    goal_columns = [f"seconds to {loss:.3f}" for loss in goals.values()]
    size = next(iter(rows))["case"]
    for method in ALONE:
        bound = without_exchange(rows, method)
        if bound is not None:
            each = f"{1000 * bound:.1f}"
            whole = f"{bound * size['steps']:.0f}"
            table.append([METHODS[method][0], "", each, "0", whole, *[""] * (1 + len(goals))])
    caption = (
        "; ".join(f"{loss:.3f}: {name}" for name, loss in goals.items())
        + ". At the first snapshot as good."
    )
    title = f"{parameters(Size(**size['size'])):,} parameters, {size['steps']:,} steps, {MBIT_S:g} Mbit/s"
    report.show(title, columns + goal_columns, table, caption)
    for reason in dict.fromkeys(
        f"{METHODS[r['method']][0]}: {r['reason']}" for r in rows if "reason" in r
    ):
        print(f"\nLeft out: {reason}")


def draw(rows: list[Row], path: Path | None) -> None:
    """Draws the loss over the time of each method at its better rate."""
    if path is None:
        return
    picture, (axes,) = figure(height=4.2)
    for method, row in best(rows).items():
        name, color = METHODS[method]
        last = row["points"][-1]
        label = f"{name}: {last['loss']:.3f} after {last['seconds']:.0f} s" + (
            "" if row["finished"] else ", stopped"
        )
        points = (
            [point["seconds"] for point in row["points"]],
            [point["loss"] for point in row["points"]],
        )
        axes.plot(
            *points,
            "o-",
            color=color,
            label=label,
            markersize=4,
            linewidth=2.5 if color == RED else 1.5,
        )
    bound = without_exchange(rows)
    steps = rows[0]["case"]["steps"]
    if bound is not None:
        label = f"without any exchange: {bound * steps:.0f} s"
        axes.axvline(bound * steps, color=GREY, linestyle=":", label=label)
    axes.set_xscale("log")
    axes.set_xticks(
        [5, 10, 30, 60, 120, 300, 600], ["5 s", "10 s", "30 s", "1 min", "2 min", "5 min", "10 min"]
    )
    axes.minorticks_off()
    axes.set_xlabel(
        f"time on a link of {MBIT_S:g} Mbit/s with a round trip of {1000 * ROUND_TRIP:g} ms,"
        " measured"
    )
    axes.set_ylabel("validation loss, nats per byte")
    picture.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    rows = measure(options.quick, options.json)
    show(rows)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
