"""Losses that pages quote, from the runs of the benchmarks that train.

One function for each file of results. A gap is a mean over seeds with half the width of its 95 %
interval, as `Comparison` has it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import mean
from typing import Any

from benchmarks import comparison, curve, paper, quality, scaling
from benchmarks.comparison import Comparison
from benchmarks.runs import Runs
from benchmarks.training import Run, Training, parameters
from benchmarks.verify.claims import Claim, Sentence, Table
from benchmarks.verify.results import BENCHMARKS, CHOOSING, README, runs
from lightning_sdiloco.planning.methods import DataParallel
from lightning_sdiloco.planning.units import half_width
from lightning_sdiloco.planning.workload import Groups, Model

GROUPS = (2, 4, 8)
VERDICT_HEADER = ("", "M=2", "M=4", "M=8")

_EARLIER_WARMUP = {2: 0, 4: 357, 8: 357}
"""Steps in which an earlier version averaged gradients: 10 and 20 % of all."""


def gap(compared: Comparison | Sequence[float]) -> list[float]:
    """Returns the mean in percent, and half the width of its interval if there are more seeds than
    one.
    """
    percent = compared.percent if isinstance(compared, Comparison) else compared
    half = half_width(percent)
    return [mean(percent)] if half is None else [mean(percent), half]


def gaps(*compared: Comparison) -> list[float]:
    """Returns the gaps of the cells of a row."""
    return [number for one in compared for number in gap(one)]


def means(*compared: Comparison) -> list[float]:
    return [mean(one.percent) for one in compared]


@cache
def of_stage(stage: str, size: str = "0.1M") -> Mapping[str, Comparison]:
    """Returns what a stage of `benchmarks.quality` has of a model, without the model's name."""
    settings = quality.planned(quality.STAGES[stage], [size], None, "cpu")
    compared = comparison.compared(runs("quality"), settings)
    return {one.name.removeprefix(f"{size}, "): one for one in compared}


def bare(groups: int) -> Comparison:
    return of_stage("alone")[f"M={groups}, bare name, other seeds"]


def small_model() -> paper.Model:
    """The trainings of the paper's ablations with 44,000 parameters."""
    pair = partial(paper.small_pair, paper.ONE)
    return paper.Model("44,000 parameters", runs("paper"), paper.SEEDS, pair)


def by_itself(groups: int, sync_every: int = 20) -> Comparison:
    return of_stage("alone")[f"M={groups}, H={sync_every}, by itself, other seeds"]


def single(groups: int) -> Comparison:
    """One group on the batches of several, with the outer step that they have."""
    return of_stage("alone")[f"M=1 on the batches of {groups}, H=20, by itself, other seeds"]


def elementwise(groups: int, sync_every: int) -> Comparison:
    return of_stage("verdict")[f"M={groups}, H={sync_every}"]


def earlier(groups: int, sync_every: int = 20, inner: str = "adamw", **changes: Any) -> Comparison:
    """Returns groups by themselves in an earlier version, whose choices nobody can give any more:
    they are found by what they are.
    """
    rates = quality.MUON_RATES if inner == "muon" else quality.MODELS["0.1M"].alone
    ours = []
    plain = []
    for seed in quality.HELD_OUT:
        training, ddp = quality.alone("0.1M", groups, seed, rates[groups], inner)
        key = replace(training, choices=None, **changes).key()
        del key["choices"]
        found = [run for run in runs("quality").all() if _is_earlier(run, key, sync_every)]
        assert len(found) == 1, (groups, sync_every, inner, changes, seed)
        ours += found
        plain.append(runs("quality")[replace(ddp, **changes)])
    return Comparison("earlier", ours, plain)


def _is_earlier(run: Run, key: Mapping[str, Any], sync_every: int) -> bool:
    choices = run["choices"] or {}
    return (
        run.items() >= key.items()
        and choices.get("sync_every") == sync_every
        and choices.get("outer_lr") == 0.7
        and choices.get("fragments") == "strided"
        and choices.get("warmup_steps", 0) == _EARLIER_WARMUP[run["groups"]]
    )


def ratio_of_bytes(compared: Comparison) -> float:
    """Returns how many times as much as ours DDP sends: all gradients in float32, in a ring."""
    run = compared.ours[0]
    size = quality.MODELS["0.1M"].size
    return ring(run["groups"], parameters(size)) * run["steps"] / mean_bytes(compared)


def ring(groups: int, numel: int) -> float:
    """Returns the bytes that a rank of DDP sends in a step."""
    plan = DataParallel(Model.of_size(numel, layers=1), Groups(step_time=1.0, groups=groups))
    return plan.bytes_per_step


def mean_bytes(compared: Comparison) -> float:
    return mean(run["bytes_sent"] for run in compared.ours)


# -------------------------------------------------------------------------------------------------
# By file of results
# -------------------------------------------------------------------------------------------------


def of_verdict() -> Iterator[Claim]:
    """The bare name beside DDP, and what decides it: quality.json."""
    size = parameters(quality.MODELS["0.1M"].size)
    names = [bare(groups) for groups in GROUPS]
    twenties = [by_itself(groups) for groups in GROUPS]
    fractions = [ratio_of_bytes(one) for one in names]
    fractions_of_twenties = [ratio_of_bytes(one) for one in twenties]
    lengths = [one.ours[0]["choices"]["sync_every"] for one in names]
    yield Sentence(README, "at equal tokens (# parameters, AdamW in both, five seeds", [size])
    rows = {
        "loss": gaps(*names),
        "bytes": fractions,
        "sync_every, chosen for these fits": lengths,
        "loss with sync_every=20": gaps(*twenties),
        "bytes with sync_every=20": fractions_of_twenties,
    }
    yield Table(README, ["worker groups", "2", "4", "8"], rows)
    yield Sentence(README, "Why 1/#?", fractions[:1])
    yield Sentence(README, "gives 1/# for two groups", [lengths[0] * 32 / 4])
    yield Sentence(BENCHMARKS, "and eight lose # %", means(names[2]))
    yield Sentence(BENCHMARKS, "Percent above DDP with # parameters", [size])
    yield Table(BENCHMARKS, VERDICT_HEADER, _rows_of_verdict(names, twenties, lengths))
    small, medium = (of_stage("verdict", name)["M=2, H=50"] for name in ("0.2M", "0.5M"))
    sizes = [parameters(quality.MODELS[name].size) for name in ("0.2M", "0.5M")]
    numbers = [sizes[0], *gap(small), sizes[1], *gap(medium)]
    yield Sentence(BENCHMARKS, "# parameters reach # ± # %, # reach # ± # %", numbers)
    pattern = "Groups send 1/#, 1/# and 1/# of DDP's bytes (1/#, 1/# and 1/# with H=20)"
    yield Sentence(BENCHMARKS, pattern, [*fractions, *fractions_of_twenties])
    before = [ratio_of_bytes(earlier(groups)) for groups in (4, 8)]
    shares = [100 * _EARLIER_WARMUP[groups] / bare(groups).ours[0]["steps"] for groups in (4, 8)]
    apart = []
    for losses in ([run["loss"] for run in small.ours], [run["loss"] for run in small.plain]):
        apart.append(100 * (max(losses) / min(losses) - 1))
    yield Sentence(BENCHMARKS, "Seeds differ by up to # %", [max(apart)])
    pattern = "in the first # and # % of the steps ... which sent 1/# and 1/# of DDP's bytes"
    yield Sentence(BENCHMARKS, pattern, [*shares, *before])


def _rows_of_verdict(
    names: Sequence[Comparison], twenties: Sequence[Comparison], lengths: Sequence[int]
) -> dict[str, list[float]]:
    label = ", ".join(map(str, lengths))
    return {
        f"the bare name: H = {label}": gaps(*names),
        "H=20, all else by default": gaps(*twenties),
        "H=20, gradients averaged at first, earlier version": gaps(*map(earlier, GROUPS)),
        "H=100, gradients averaged at first, earlier version": gaps(
            *(earlier(groups, 100) for groups in GROUPS)
        ),
        "H=20, no dense beginning": gaps(*(elementwise(groups, 20) for groups in GROUPS)),
        "H=50, no dense beginning": gaps(*(elementwise(groups, 50) for groups in (2, 4))),
        "H=100, no dense beginning": gaps(*(elementwise(groups, 100) for groups in GROUPS)),
    }


def of_muon() -> Iterator[Claim]:
    """Muon inside both, and beside DDP with AdamW: quality.json."""
    beside_muon = [earlier(groups, inner="muon") for groups in GROUPS]
    beside_adamw = []
    for groups, compared in zip(GROUPS, beside_muon, strict=True):
        beside_adamw.append(Comparison("AdamW", compared.ours, earlier(groups).plain))
    rows = {
        "% above DDP with Muon": gaps(*beside_muon),
        "% above DDP with AdamW": gaps(*beside_adamw),
    }
    yield Table(BENCHMARKS, VERDICT_HEADER, rows, occurrence=1)


def of_rounds() -> Iterator[Claim]:
    """How long a round should be: quality.json and paper.json."""
    short = quality.alone("0.1M", 2, 10, sync_every=None)
    choices = {**(short[0].choices or {}), "sync_every": 10}
    pairs = {"H=10": [(replace(short[0], choices={**choices, "overlap_steps": 2}), short[1])]}
    (ten,) = comparison.compared(runs("quality"), pairs)
    steps = [by_itself(groups).ours[0]["steps"] for groups in GROUPS]
    small = {one.name: one for one in paper.above_ddp(small_model())["H"]}
    rows = {
        f"M=2, {steps[0]:,} steps, step of matrices": [*means(ten, by_itself(2), by_itself(2, 39))],
        f"M=4, {steps[1]:,} steps, step of matrices": means(
            bare(4), by_itself(4), by_itself(4, 100)
        ),
        f"M=8, {steps[2]:,} steps, step of matrices, dense beginning": means(
            bare(8), by_itself(8), by_itself(8, 100)
        ),
        f"M=2, {steps[0]:,} steps, elementwise": means(
            *(elementwise(2, length) for length in (20, 50, 100))
        ),
        f"M=2, {small['10'].ours[0]['steps']:,} steps, elementwise": means(
            *(small[length] for length in ("10", "20", "50", "100", "200"))
        ),
        f"M=4, {steps[1]:,} steps, elementwise": means(
            *(elementwise(4, length) for length in (20, 50, 100))
        ),
        f"M=8, {steps[2]:,} steps, elementwise": means(
            *(elementwise(8, length) for length in (20, 100))
        ),
    }
    chosen = [bare(groups).ours[0]["choices"]["sync_every"] for groups in GROUPS]
    for row, length in zip(rows.values(), [*chosen, 20, 10, 10, 10], strict=True):
        row.append(length)
    yield Table(CHOOSING, ["fit", "H=10", "H=20"], rows)
    first = Comparison("H=10", ten.ours, [by_itself(2).ours[0]])
    yield Sentence(CHOOSING, "H=10 gained # % over H=20", [-mean(first.percent)])
    numbers = means(*(elementwise(4, length) for length in (20, 50, 100)))
    yield Sentence(CHOOSING, "four groups were #, # and # % behind DDP with an H of", numbers)


def of_sparse() -> Iterator[Claim]:
    """Sparse compression: quality.json, whose runs are of an earlier `chosen`."""
    fifty = _by_compression(50)
    ten = _by_compression(10)
    dense_fifty = Comparison("fp4, H=50", ten.ours, fifty.plain)
    pattern = "After # rounds of H=50 the loss was # % above fp4's."
    steps = by_itself(2).ours[0]["steps"]
    yield Sentence(CHOOSING, pattern, [steps // 50, *means(fifty)])
    pattern = "After # rounds of H=10 it was # % below fp4's at the same H, and # % above"
    numbers = [steps // 10, -mean(ten.percent), *means(dense_fifty)]
    yield Sentence(CHOOSING, pattern, numbers)


def _by_compression(sync_every: int) -> Comparison:
    """Compares sparse with fp4 on two seeds, with two groups and all else by default."""
    key = {"groups": 2, "batch": 1, "lr": 3e-3, "inner": "adamw", "budget": 16.0}
    found: dict[str, list[Run]] = {"sparse": [], "fp4": []}
    for run in runs("quality").all():
        choices = run["choices"] or {}
        is_one = run.items() >= key.items() and choices.get("sync_every") == sync_every
        usual = choices.get("fragments") == "strided:3" and choices["mixing"] == 0.2
        if is_one and usual and run["seed"] in quality.TUNING and run["size"]["width"] == 48:
            found[choices["compression"]].append(run)
    for same in found.values():
        same.sort(key=lambda run: run["seed"])
    return Comparison("sparse", found["sparse"], found["fp4"])


def of_unequal() -> Iterator[Claim]:
    """Files of its own for each group: quality.json."""
    numbers = gaps(earlier(4, split="by_file"), earlier(4))
    yield Sentence(CHOOSING, "with shuffled data: # ± # against # ± # %", numbers)


def of_curve() -> Iterator[Claim]:
    """Ten million parameters: curve.json."""
    point = curve.POINTS["10M"]
    of_point = curve.Curve(point, "data/linux.xz", "cuda")
    finished = runs("curve")
    rows = curve.rows_of(of_point, finished)
    four, better = rows["M=4"][0]
    single, _ = rows["M=1, with the outer step"][0]
    losses = [four["loss"], *(finished[ddp]["loss"] for ddp in of_point.tried(curve.SEEDS[0]))]
    pattern = "four groups reached # nats per byte, and DDP # and # at inner rates"
    yield Sentence(CHOOSING, pattern, losses)
    behind = curve.percents(rows["M=4"])
    yield Sentence(CHOOSING, "So four groups are # % behind", behind)
    own_rate = 100 * (losses[0] / losses[1] - 1)
    yield Sentence(CHOOSING, "they are # % behind DDP with their own rate", [own_rate])
    numel = parameters(point.size)
    sent = ring(4, numel) * four["steps"]
    numbers = [four["bytes_sent"] / 1e9, sent / four["bytes_sent"], sent / 1e9]
    pattern = "Each group sent # GB, a #th of the # GB of DDP's float32 gradients"
    yield Sentence(CHOOSING, pattern, numbers)
    ahead = 100 * (1 - single["loss"] / better["loss"])
    pattern = "DDP with the same outer step (M=1) reached #, # % ahead of DDP"
    yield Sentence(CHOOSING, pattern, [single["loss"], ahead])
    yield Sentence(CHOOSING, "in bf16-mixed, with # parameters, on C code", [numel])
    pattern = "four groups with equal singular values lost # % to DDP, and one group gained # %"
    yield Sentence(CHOOSING, pattern, [*behind, ahead])


def of_others() -> Iterator[Claim]:
    """What others measured: arXiv 2503.09799, as `benchmarks.scaling` draws it."""
    shown = [scaling.SIZES.index(size) for size in (35e6, 180e6, 550e6, 1.3e9, 2.4e9)]
    rows = {}
    for groups, published in scaling.GAPS.items():
        rows[f"M={groups}"] = [published[place] for place in shown]
    yield Table(CHOOSING, ["groups", "35M", "180M"], rows)


def of_matrices() -> Iterator[Claim]:
    """What the step of matrices gains: quality.json."""
    rows = {
        "equal singular values": gaps(by_itself(2), by_itself(4)),
        "equal singular values and a dense beginning": gap(by_itself(8)),
        "elementwise, outer_lr=0.7, outer_momentum=0.9": gaps(
            *(elementwise(groups, 20) for groups in GROUPS)
        ),
    }
    yield Table(CHOOSING, VERDICT_HEADER, rows)
    words = {2: "two groups", 4: "four groups", 8: "eight groups"}
    beside_one: dict[str, list[float]] = {}
    for groups, label in words.items():
        one = single(groups)
        twenty = _behind(by_itself(groups), one)
        name = [] if groups == 2 else means(_behind(bare(groups), one))
        of_one = gap(one) if groups == 8 else means(one)
        beside_one[label] = [*of_one, *means(twenty), *name, len(one.ours)]
    yield Table(CHOOSING, ["batches of", "one group, above DDP"], beside_one)


def _behind(groups: Comparison, one: Comparison) -> Comparison:
    """Compares groups with one group on the same batches."""
    return Comparison("one", groups.ours[: len(one.ours)], one.ours)
