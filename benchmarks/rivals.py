"""One training by every method that a user could pick: which loss it reaches, in how many seconds
on a slow link, with how many bytes.

    python -m benchmarks.rivals [--stage STAGE ...] [--quick] [--json FILE] [--picture FILE]

- ``rates``: three inner learning rates of each method, four sites, no slow link.
- ``whole``: each method at its best rate, to the end of its tokens, two and four sites, 100 Mbit/s
  and 50 ms round trip. Real processes.
- ``steps``: a hundred steps of each method on 30, 100 and 1000 Mbit/s. They tell what a whole run
  would take there; those on 100 Mbit/s are checked against the whole runs.

All methods start from the same weights and see the same windows of text in the same order, 16
tokens for each parameter. One site without the others sees its own windows alone, in as many steps.
A run is over after an hour. Losses are those of snapshots, validated after the run: no validation
is in the times.

Every site is a network namespace with one rank that really computes, so ``whole`` and ``steps``
need root and an idle machine; four ranks share two cores. Methods that exchange in every step
hardly compute, so their runs share the machine, over links of their own. With --json every row is
kept at once, and rows that the file has are not measured again, unless they failed. A whole run
whose row says ``loaded`` had to share the machine, and its times are those of its short run.

The peers need Pythons of their own: benchmarks/peers/install.sh. One that is not there is left out,
with the reason.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from benchmarks.picture import (
    ACCELERATE,
    ACCUMULATED,
    DDP_HALF,
    HIERARCHICAL,
    NO_EXCHANGE,
    ONE_GROUP,
    POST_LOCAL_SGD,
    POWER_SGD,
    counted,
    figure,
    save,
)
from benchmarks.sites import Found, Job, run_apart
from benchmarks.training import Text, parameters
from lightning_sdiloco.tools.output import DDP, DILOCO, STREAMING

DEMONSTRATED = Size(layers=3, width=64, heads=4, context=128)
"""189,312 parameters."""

TOKENS_PER_PARAMETER = 16
SITES = (2, 4)
BATCH = 4
"""Windows that a site sees in a step."""

SEED = 0
VALIDATION_WINDOWS = 512
MBIT_S = 100.0
LINKS = (30.0, 100.0, 1000.0)
"""Mbit/s of the stage ``steps``."""

ROUND_TRIP = 0.05
LIMIT = 3600.0
"""Seconds after which a run is over."""

COUNTED = 100
"""Steps of the stage ``steps`` whose time counts."""

STAGES = ("rates", "whole", "steps")
RATES = (3e-3, 4.5e-3, 7e-3)
"""Inner learning rates that each method tries."""

RATES_OF_LARGE_BATCHES = (4.5e-3, 9e-3, 1.8e-2)
"""Those of DDP with accumulation, whose batches are H times as large."""


@dataclass(frozen=True)
class Method:
    """A method of the table.

    Attributes:
        label: Its name on the page.
        color: Its color in pictures.
        waits: Whether it waits for the link in every step.
        sites: The numbers of sites with which it runs.
        dashed: Whether its line is dashed, because another method has its color.
        ddp_share: The share of its steps that it spends as plain DDP, at the beginning.
    """

    label: str
    color: str
    waits: bool = False
    sites: Sequence[int] = SITES
    dashed: bool = False
    ddp_share: float = 0.0


METHODS = {
    "bare_name": Method("Streaming DiLoCo, bare name", STREAMING),
    "streaming_defaults": Method("Streaming DiLoCo, sync_every=20", STREAMING, dashed=True),
    "ddp": Method("DDP", DDP, waits=True),
    "ddp_fp16": Method("DDP, fp16", DDP_HALF, waits=True),
    "ddp_powersgd_rank_4": Method("DDP, PowerSGD rank 4", POWER_SGD, waits=True, ddp_share=0.1),
    "ddp_accumulated": Method("DDP, an update for 20 batches", ACCUMULATED),
    "post_local_sgd_after_ddp": Method("post-local SGD", POST_LOCAL_SGD, ddp_share=0.1),
    "hierarchical_averager": Method(
        "hierarchical averaging", HIERARCHICAL, sites=(4,), ddp_share=0.1
    ),
    "accelerate": Method("accelerate LocalSGD", ACCELERATE),
    "torchft": Method("torchft DiLoCo, fp32", DILOCO),
    "one_group": Method("DDP with our outer step", ONE_GROUP, waits=True),
    "alone": Method("one site without the others", NO_EXCHANGE),
}

SAME_RATE = {"ddp_fp16": "ddp", "hierarchical_averager": "post_local_sgd_after_ddp"}
"""The methods that have the rate of another, which is almost the same."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A run of a method.

    Attributes:
        stage: What it is for.
        method: Its name.
        sites: Number of sites.
        steps: Steps to train; fewer than the schedule has where the loss does not matter.
        mbit_s: Bandwidth of the links; None: this machine's loopback.
        beside: How many other runs share the machine.
        case: The training; only its folder is open.
    """

    stage: str
    method: str
    sites: int
    steps: int
    mbit_s: float | None
    beside: int
    case: LearningCase

    @property
    def ranks(self) -> int:
        return 1 if self.method == "alone" else self.sites

    @property
    def learns(self) -> bool:
        return self.steps == self.case.steps

    def key(self) -> Row:
        case = asdict(self.case)
        del case["folder"]
        return {
            "stage": self.stage,
            "method": self.method,
            "sites": self.sites,
            "steps": self.steps,
            "mbit_s": self.mbit_s,
            "beside": self.beside,
            "case": case,
        }


def case(quick: bool, sites: int, lr: float) -> LearningCase:
    """Makes the training. The cut and the mixing are chosen here, because torchft has no suitable
    defaults for them.
    """
    size = TINY if quick else DEMONSTRATED
    sync_every = 10 if quick else 20
    tokens = TOKENS_PER_PARAMETER * parameters(size)
    rounds = round(tokens / (sites * BATCH * size.context) / sync_every)
    return LearningCase(
        size,
        fragments=2,
        batch=BATCH,
        step_seconds=0.0,
        sync_every=sync_every,
        overlap_steps=4 if quick else 5,
        mixing=0.2,
        steps=20 if quick else rounds * sync_every,
        points=4 if quick else 16,
        lr=lr,
    )


# -------------------------------------------------------------------------------------------------
# The plans of the stages
# -------------------------------------------------------------------------------------------------


def plans_of_rates(quick: bool, rows: list[Row]) -> Iterator[list[Plan]]:
    """Yields the trainings that choose the rates: loads of the machine do not matter."""
    sites = SITES[0] if quick else SITES[-1]
    for method in methods(quick):
        if method in SAME_RATE:
            continue
        for rate in rates_of(method, quick):
            training = replace(case(quick, sites, rate), points=1)
            yield [Plan("rates", method, sites, training.steps, None, 0, training)]


def methods(quick: bool) -> Sequence[str]:
    return ("ddp", "streaming_defaults") if quick else tuple(METHODS)


def rates_of(method: str, quick: bool) -> Sequence[float]:
    rates = RATES_OF_LARGE_BATCHES if method == "ddp_accumulated" else RATES
    return rates[1:2] if quick else rates


def plans_of_whole_runs(quick: bool, rows: list[Row]) -> Iterator[list[Plan]]:
    """Yields the runs that are made at the same time, first those that have the machine to
    themselves.
    """
    numbers_of_sites = SITES[:1] if quick else SITES
    waiting = [method for method in methods(quick) if METHODS[method].waits]
    for sites, method in product(numbers_of_sites, methods(quick)):
        if sites in METHODS[method].sites and method not in waiting:
            yield [whole_run(quick, method, sites, rows, beside=0)]
    for sites in numbers_of_sites:
        yield [whole_run(quick, method, sites, rows, beside=len(waiting) - 1) for method in waiting]


def whole_run(quick: bool, method: str, sites: int, rows: list[Row], beside: int) -> Plan:
    training = case(quick, sites, best_rate(rows, method))
    mbit_s = None if method == "alone" else MBIT_S
    return Plan("whole", method, sites, training.steps, mbit_s, beside, training)


def best_rate(rows: list[Row], method: str) -> float:
    """Returns the rate with the lowest loss, by the stage ``rates``."""
    wanted = SAME_RATE.get(method, method)
    tried = [row for row in rows if row["stage"] == "rates" and row["method"] == wanted]
    if not tried:
        raise ValueError(f"There is no rate for {method} yet: run --stage rates first.")
    return float(min(tried, key=final)["case"]["lr"])


def plans_of_steps(quick: bool, rows: list[Row]) -> Iterator[list[Plan]]:
    """Yields short runs, which tell how long a step takes on each link; H is that of the whole
    run.
    """
    if quick:
        return
    for sites, mbit_s, method in product(SITES, LINKS, METHODS):
        whole_row = row_of(rows, "whole", method, sites)
        if not whole_row or sites not in METHODS[method].sites or method == "alone":
            continue
        training = case(quick, sites, whole_row["case"]["lr"])
        if "told" in whole_row and "sync_every" in whole_row["told"]:
            training = replace(training, sync_every=whole_row["told"]["sync_every"])
        yield [Plan("steps", method, sites, COUNTED + training.sync_every, mbit_s, 0, training)]


PLANS = {"rates": plans_of_rates, "whole": plans_of_whole_runs, "steps": plans_of_steps}


# -------------------------------------------------------------------------------------------------
# Measuring
# -------------------------------------------------------------------------------------------------


class Validation:
    """The text: the windows that all runs train on, and the loss of what they learned."""

    def __init__(self, size: Size) -> None:
        self._text = Text(size, VALIDATION_WINDOWS)
        self._net = size.make()

    def write_windows(self, path: Path, steps: int, sites: int) -> None:
        """Writes the windows of all groups, and some more for loops that begin a step that does
        not count.
        """
        batches = self._text.batches(SEED, sites * BATCH)
        windows = []
        for _ in range(steps + 4):
            tokens, targets = next(batches)
            windows.append(torch.cat([tokens, targets[:, -1:]], dim=1).to(torch.uint8))
        torch.save(torch.stack(windows), path)

    def loss(self, model: dict[str, torch.Tensor]) -> float:
        """Returns the validation loss of a model, in nats per byte."""
        self._net.load_state_dict(model)
        return self._text.loss(self._net)


def measure(stages: Sequence[str], quick: bool, path: Path | None) -> list[Row]:
    if "whole" in stages or "steps" in stages:
        require()
    rows = [row for row in report.kept_rows(path) if "reason" not in row]
    validation = Validation(case(quick, SITES[0], RATES[0]).size)
    for stage in stages:
        for together in PLANS[stage](quick, rows):
            wanted = [plan for plan in together if not is_known(rows, plan)]
            for row in measured(wanted, validation):
                rows.append(row)
                about = report.measured("rivals", quick)
                report.write(path, headline(rows), about, rows=rows)
                title = f"{stage}: {row['method']}, {row['sites']} sites, {row['case']['lr']:g}"
                report.said(f"{title}: {outcome(row)}")
    return rows


def is_known(rows: list[Row], plan: Plan) -> bool:
    return any(row.items() >= plan.key().items() for row in rows)


def measured(together: list[Plan], validation: Validation) -> Iterator[Row]:
    """Runs all at the same time, and yields a row for each."""
    with TemporaryDirectory() as folder:
        jobs = [_job(plan, Path(folder, str(n)), validation) for n, plan in enumerate(together)]
        with ThreadPoolExecutor(max(1, len(jobs))) as pool:
            # Every run has a process of its own: a peer's Python, or one for several at a time.
            outcomes = list(pool.map(run_apart, jobs))
        for plan, job, numbers in zip(together, jobs, outcomes, strict=True):
            yield {**plan.key(), **judged(plan, job, numbers, validation)}


def _job(plan: Plan, folder: Path, validation: Validation) -> Job:
    """Makes the job of a run, with its windows in a folder."""
    folder.mkdir()
    validation.write_windows(folder / WINDOWS, plan.steps, plan.sites)
    placed = replace(plan.case, folder=str(folder))
    first = 0 if plan.learns else plan.case.sync_every
    return Job(
        plan.method,
        placed,
        plan.ranks,
        plan.mbit_s,
        first,
        plan.steps - first,
        ROUND_TRIP / 2,
        seconds=LIMIT + 60,
    )


def judged(plan: Plan, job: Job, numbers: Found, validation: Validation) -> Row:
    """Returns what is written down of a run: its points if it is one that learns, else how long a
    step took.
    """
    if "seconds" not in numbers and "did not finish" not in numbers.get("reason", ""):
        return {"reason": numbers["reason"]}
    if not plan.learns:
        return {"step_seconds": numbers["seconds"], "bytes_per_step": numbers["bytes"]}
    assert isinstance(job.case, LearningCase)
    points = [
        {**spent, "loss": validation.loss(model)}
        for spent, model in snapshots(job.case, plan.ranks)
        if spent["seconds"] <= LIMIT
    ]
    row = {"finished": points[-1]["step"] == plan.steps, "points": points}
    return {**row, "told": numbers["told"]} if "told" in numbers else row


def outcome(row: Row) -> str:
    if "reason" in row:
        return str(row["reason"])
    if "points" not in row:
        return f"{1000 * row['step_seconds']:.1f} ms a step"
    last = row["points"][-1]
    return f"loss {last['loss']:.4f} in {last['seconds']:.0f} s"


# -------------------------------------------------------------------------------------------------
# The results
# -------------------------------------------------------------------------------------------------


def row_of(rows: list[Row], stage: str, method: str, sites: int) -> Row:
    """Returns the first row of a method that did not fail; empty if there is none."""
    for row in rows:
        is_wanted = (row["stage"], row["method"], row["sites"]) == (stage, method, sites)
        if is_wanted and "reason" not in row:
            return row
    return {}


def whole_runs(rows: list[Row], sites: int) -> Mapping[str, Row]:
    """Returns the whole runs with so many sites, by method."""
    runs = {}
    for method in METHODS:
        row = row_of(rows, "whole", method, sites)
        if row.get("loaded"):
            row = timed_by_steps(rows, row)
        if row:
            runs[method] = row
    return runs


def timed_by_steps(rows: list[Row], row: Row) -> Row:
    """Returns a run whose machine had other work to do, with the times that its short run gives."""
    steps = [point["step"] for point in row["points"]]
    times = [
        computed_seconds(rows, row["method"], row["sites"], row["mbit_s"], step) for step in steps
    ]
    points = [
        {**point, "seconds": seconds} for point, seconds in zip(row["points"], times, strict=True)
    ]
    return {**row, "points": points}


def final(row: Row) -> float:
    return float(row["points"][-1]["loss"])


def seconds_to(row: Row, loss: float) -> float | None:
    """Returns when the first snapshot was as good; None if none was."""
    return next((point["seconds"] for point in row["points"] if point["loss"] <= loss), None)


def computed_seconds(
    rows: list[Row], method: str, sites: int, mbit_s: float, done: int | None = None
) -> float | None:
    """Returns how long a run takes on a link to do some steps, all of them by default, by its short
    runs; None where they are missing.
    """
    steps = case(False, sites, RATES[0]).steps
    with_ddp = min(done or steps, METHODS[method].ddp_share * steps)
    step = _step_seconds(rows, method, sites, mbit_s)
    ddp_step = _step_seconds(rows, "ddp", sites, mbit_s) if with_ddp else 0.0
    if step is None or ddp_step is None:
        return None
    return with_ddp * ddp_step + ((done or steps) - with_ddp) * step


def _step_seconds(rows: list[Row], method: str, sites: int, mbit_s: float) -> float | None:
    for row in rows:
        is_wanted = (row["method"], row["sites"], row["mbit_s"]) == (method, sites, mbit_s)
        if is_wanted and "step_seconds" in row:
            return float(row["step_seconds"])
    return None


def headline(rows: list[Row]) -> dict[str, float]:
    """The three numbers of each whole run, and when it was as good as DDP at its end."""
    numbers = {}
    for sites in SITES:
        runs = whole_runs(rows, sites)
        for method, row in runs.items():
            last = row["points"][-1]
            name = f"{METHODS[method].label}, {sites} sites"
            numbers[f"{name}: loss"] = last["loss"]
            numbers[f"{name}: seconds"] = last["seconds"]
            numbers[f"{name}: MB"] = last["bytes"] / 1e6
            if "ddp" in runs:
                seconds = seconds_to(row, final(runs["ddp"]))
                if seconds is not None:
                    numbers[f"{name}: seconds to DDP's loss"] = seconds
    return numbers


def show(rows: list[Row]) -> None:
    """Prints the table, the rates that were tried, and the links on which only steps were timed."""
    table = []
    for name, method in METHODS.items():
        cells = [method.label]
        for sites in SITES:
            runs = whole_runs(rows, sites)
            cells += _cells(runs[name], runs.get("ddp", {})) if name in runs else ["-"] * 4
        table.append(cells)
    columns = ["method"]
    for sites in SITES:
        columns += [f"M={sites}: loss", "seconds", "MB", "seconds to DDP's loss"]
    numel = parameters(DEMONSTRATED)
    report.show(f"{numel:,} parameters, {MBIT_S:g} Mbit/s", columns, table, "MB: sent per rank.")
    show_rates(rows)
    show_steps(rows)
    report.show_left_out(
        f"{METHODS[row['method']].label}: {row['reason']}" for row in rows if "reason" in row
    )


def _cells(row: Row, ddp: Row) -> list[str]:
    last = row["points"][-1]
    stopped = "" if row["finished"] else f" (stopped at step {last['step']:,})"
    reached = seconds_to(row, final(ddp)) if ddp else None
    return [
        f"{last['loss']:.3f}",
        f"{last['seconds']:.0f}{stopped}",
        f"{last['bytes'] / 1e6:,.1f}",
        "-" if reached is None else f"{reached:.0f}",
    ]


def show_rates(rows: list[Row]) -> None:
    table = []
    for name, method in METHODS.items():
        tried = [row for row in rows if row["stage"] == "rates" and row["method"] == name]
        losses = [f"{row['case']['lr']:g}: {final(row):.3f}" for row in tried if "points" in row]
        if losses:
            table.append([method.label, ", ".join(losses)])
    report.show(f"{SITES[-1]} sites, no slow link", ["method", "rate: loss"], table)


def show_steps(rows: list[Row]) -> None:
    table = []
    for sites, (name, method) in product(SITES, METHODS.items()):
        computed = [computed_seconds(rows, name, sites, mbit_s) for mbit_s in LINKS]
        if any(computed):
            whole_row = row_of(rows, "whole", name, sites)
            cells = ["-" if seconds is None else f"{seconds:.0f}" for seconds in computed]
            measured_seconds = f"{whole_row['points'][-1]['seconds']:.0f}"
            table.append([f"{method.label}, M={sites}", *cells, measured_seconds])
    columns = ["seconds by a hundred steps", *(f"{mbit_s:g} Mbit/s" for mbit_s in LINKS)]
    report.show("Seconds of a whole run", [*columns, f"measured on {MBIT_S:g}"], table)


def draw(rows: list[Row], path: Path | None) -> None:
    """Draws the loss of each whole run over the time."""
    if path is not None:
        link = f"{MBIT_S:g} Mbit/s, {1000 * ROUND_TRIP:g} ms"
        _draw_over(rows, path, "seconds", f"seconds ({link})", 1.0)


def draw_over_bytes(rows: list[Row], path: Path) -> None:
    """Draws the loss of each whole run over the bytes that a rank has sent."""
    _draw_over(rows, path, "bytes", "MB sent per rank", 1e6)


def _draw_over(rows: list[Row], path: Path, quantity: str, label: str, unit: float) -> None:
    drawn_sites = [sites for sites in SITES if whole_runs(rows, sites)]
    picture, panels = figure(columns=len(drawn_sites), height=4.6)
    for sites, axes in zip(drawn_sites, panels, strict=True):
        for name, row in whole_runs(rows, sites).items():
            method = METHODS[name]
            points = [point for point in row["points"] if point[quantity] > 0]
            axes.plot(
                [point[quantity] / unit for point in points],
                [point["loss"] for point in points],
                "--" if method.dashed else "-",
                color=method.color,
                label=method.label,
                linewidth=2.5 if method.color == STREAMING else 1.4,
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(counted)
        # DDP with few updates is far above all others.
        axes.set_ylim(top=3.0)
        axes.set_title(f"{sites} sites")
        axes.set_xlabel(label)
    panels[0].set_ylabel("validation loss, nats per byte")
    # The panel with most sites has all methods.
    handles, labels = panels[-1].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(picture, path)


def main(arguments: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--stage", action="append", choices=STAGES, help="default: all of them")
    options = parser.parse_args(arguments)
    rows = measure(options.stage or STAGES, options.quick, options.json)
    show(rows)
    draw(rows, options.picture)
    if options.picture is not None:
        picture = options.picture
        draw_over_bytes(rows, picture.with_stem(f"{picture.stem}-bytes"))


if __name__ == "__main__":
    main()
