"""Losses that pages quote from the benchmarks that train.

There is one function for each file of results. A gap is a mean over seeds with half the width of
its 95 % interval, as in `Comparison`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import product
from statistics import mean
from typing import Any

from benchmarks import comparison, curve, experts, federated, paper, quality, scaling
from benchmarks.comparison import Comparison
from benchmarks.runs import by_setting
from benchmarks.training import Run, parameters
from benchmarks.verify.claims import Claim, Sentence, Table
from benchmarks.verify.results import BENCHMARKS, CHOOSING, README, results, runs
from lightning_sdiloco.planning.methods import DataParallel
from lightning_sdiloco.planning.units import half_width
from lightning_sdiloco.planning.workload import Groups, Model

GROUPS = (2, 4, 8)
VERDICT_HEADER = ("", "M=2", "M=4", "M=8")

_EARLIER_WARMUP = {2: 0, 4: 357, 8: 357}
"""Steps in which an earlier version averaged gradients: 10 and 20 % of all."""


def gap(compared: Comparison | Sequence[float]) -> list[float]:
    """Returns the mean in percent, and half the width of its interval if there are more seeds than
    setting.
    """
    percent = compared.percent if isinstance(compared, Comparison) else compared
    half = half_width(percent)
    return [mean(percent)] if half is None else [mean(percent), half]


def gaps(*compared: Comparison) -> list[float]:
    """Returns the gaps of the cells of a row."""
    return [number for setting in compared for number in gap(setting)]


def means(*compared: Comparison) -> list[float]:
    return [mean(setting.percent) for setting in compared]


@cache
def in_stage(stage: str, size: str = "0.1M") -> Mapping[str, Comparison]:
    """Returns what a stage of `benchmarks.quality` has of a model, without the model's name."""
    settings = quality.planned(quality.STAGES[stage], [size], None, "cpu")
    compared = comparison.compared(runs("quality"), settings)
    return {setting.name.removeprefix(f"{size}, "): setting for setting in compared}


def bare(groups: int) -> Comparison:
    return in_stage("alone")[f"M={groups}, bare name, other seeds"]


def small_model() -> paper.Model:
    """The trainings of the paper's ablations with 44,000 parameters."""
    pair = partial(paper.small_pair, paper.ONE)
    return paper.Model("44,000 parameters", runs("paper"), paper.SEEDS, pair)


def by_itself(groups: int, sync_every: int = 20) -> Comparison:
    return in_stage("alone")[f"M={groups}, H={sync_every}, by itself, other seeds"]


def single(groups: int) -> Comparison:
    """One group on the batches of several, with the outer step that they have."""
    return in_stage("alone")[f"M=1 on the batches of {groups}, H=20, by itself, other seeds"]


def elementwise(groups: int, sync_every: int) -> Comparison:
    return in_stage("verdict")[f"M={groups}, H={sync_every}"]


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
        same = [run for run in runs("quality").all() if _is_earlier(run, key, sync_every)]
        assert len(same) == 1, (groups, sync_every, inner, changes, seed)
        ours += same
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


def ratio_of_bytes(compared: Comparison, model: str = "0.1M") -> float:
    """Returns how many times as much as ours DDP sends: all gradients in float32, in a ring."""
    run = compared.ours[0]
    size = quality.MODELS[model].size
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


def of_bare_name() -> Iterator[Claim]:
    """The bare name beside DDP, as the README shows it: quality.json."""
    names = [bare(groups) for groups in GROUPS]
    twenties = [by_itself(groups) for groups in GROUPS]
    fractions = [ratio_of_bytes(setting) for setting in names]
    lengths = lengths_of_bare_names()
    size = parameters(quality.MODELS["0.1M"].size)
    yield Sentence(README, "at equal token counts (# parameters, AdamW in both, five seeds", [size])
    rows = {
        "loss": gaps(*names),
        "bytes": fractions,
        "sync_every, chosen for these fits": lengths,
        "loss with sync_every=20": gaps(*twenties),
        "bytes with sync_every=20": [ratio_of_bytes(setting) for setting in twenties],
    }
    yield Table(README, ["worker groups", "2", "4", "8"], rows)
    yield Sentence(README, "Why 1/#?", fractions[:1])
    yield Sentence(README, "instead of 32 gives 1/#", [lengths[0] * 32 / 4])
    numbers = [*fractions[:1], names[0].ours[0]["steps"]]
    yield Sentence(README, "1/# over the # steps of these fits", numbers)


def of_wrong_lengths() -> Iterator[Claim]:
    """What a wrong H costs four groups: quality.json."""
    settings = in_stage("bands")
    wrong = means(*(settings[f"M=4, H={sync_every}"] for sync_every in quality.OTHER_LENGTHS))
    right = bare(4).percent[0]
    lengths = [10, *quality.OTHER_LENGTHS]
    pattern = "With H = #, #, #, # and #, four groups ended at #, #, #, # and # % relative to DDP"
    yield Sentence(CHOOSING, pattern, [*lengths, right, *wrong])
    quarter, half, best, twice, four_times = (
        settings[f"M=4, bare name, rate {rate:g}"] for rate in quality.OTHER_RATES
    )
    pattern = "four groups ended at #, # and # % relative to DDP with the same rate"
    yield Sentence(CHOOSING, pattern, means(quarter, half, twice))
    pattern = "At four times the best rate, they ended at # %"
    yield Sentence(CHOOSING, pattern, means(four_times))
    at_other_rates = (quarter, half, twice, four_times)
    assert quality.loss(best.ours) < min(quality.loss(compared.ours) for compared in at_other_rates)
    assert quality.loss(best.plain) < min(
        quality.loss(compared.plain) for compared in at_other_rates
    )


def of_links() -> Iterator[Claim]:
    """The bare name on links that are scaled to the model: quality.json."""
    settings = in_stage("links")
    rows = {}
    for step_times in quality.LINKS:
        on_link = [
            settings[f"M={groups}, on a link of {step_times} inner steps"] for groups in GROUPS
        ]
        choices = [compared.ours[0]["choices"] for compared in on_link]
        lengths = [chosen["sync_every"] for chosen in choices]
        assert lengths == ([20, 20, 20] if step_times == quality.LINKS[-1] else [20, 10, 10])
        have_dense = ["dense_beginning" in chosen for chosen in choices]
        assert have_dense == [False, False, step_times == quality.LINKS[0]]
        rows[f"{step_times} inner steps"] = gaps(*on_link)
    yield Table(CHOOSING, ["DDP's float32 gradients take", "M=2", "M=4", "M=8"], rows)


def of_federated() -> Iterator[Claim]:
    """Sites instead of fixed groups: federated.json."""
    content = results("federated")["rows"]
    rows = {}
    for label, sites in zip(("four", "eight"), federated.SITES, strict=True):
        seeds = [row for row in content if row["sites"] == sites]
        assert len(seeds) == len(quality.HELD_OUT)
        assert not any(row["late"] or row["missed"] for row in seeds), "the page says: none"
        percentages = [federated.percent_of(row, runs("quality")) for row in seeds]
        above_groups, above_ddp = zip(*percentages, strict=True)
        rows[label] = [*gap(above_groups), *gap(above_ddp)]
    yield Table(BENCHMARKS, ["sites", "% above the groups", "% above DDP"], rows)


def fragments_of_experts() -> Sequence[Comparison]:
    """The default, a fragment for the experts of each block, and a fragment for each expert."""
    return comparison.compared(runs("experts"), by_setting(experts.verdict()))


def of_experts() -> Iterator[Claim]:
    """A mixture of experts: experts.json."""
    default, by_block, by_expert = fragments_of_experts()
    model = experts.parameters(experts.SIZE)
    steps = default.ours[0]["steps"]
    sent_by_ddp = ring(experts.GROUPS, model) * steps
    below, half = gap(default)
    pattern = "Four groups end # ± # % below DDP, ... (three seeds, 1/# of DDP's bytes)"
    yield Sentence(BENCHMARKS, pattern, [-below, half, sent_by_ddp / mean_bytes(default)])
    rows: dict[str, Sequence[float]] = {"DDP": [quality.loss(default.plain), sent_by_ddp / 1e6]}
    labels = {
        "default: one fragment per block, and one for the rest": default,
        "one fragment for the experts of each block": by_block,
        "one fragment per expert": by_expert,
    }
    for label, setting in labels.items():
        rows[label] = [quality.loss(setting.ours), *gap(setting), mean_bytes(setting) / 1e6]
    yield Table(BENCHMARKS, ["mixture of experts"], rows)
    pattern = "(# parameters, two blocks of eight experts, ... trains from scratch in # steps"
    yield Sentence(BENCHMARKS, pattern, [model, steps])
    yield Sentence(BENCHMARKS, "These runs see # tokens per parameter", [default.ours[0]["budget"]])


def of_separate_experts() -> Iterator[Claim]:
    """Separate fragments for experts, compared with the default: experts.json."""
    default, *separate = fragments_of_experts()
    for setting in separate:
        pairs = zip(setting.ours, default.ours, strict=True)
        change, half = gap([100 * (run["loss"] / usual["loss"] - 1) for run, usual in pairs])
        assert abs(change) < half, "the page says: no significant difference"
    yield Sentence(BENCHMARKS, "separate fragments for the experts make no significant", [])


def of_half_a_million() -> Iterator[Claim]:
    """The bare name with 0.5 million parameters: quality.json."""
    settings = in_stage("alone", "0.5M")
    four, eight = (settings[f"M={groups}, bare name, other seeds"] for groups in (4, 8))
    size = parameters(quality.MODELS["0.5M"].size)
    ahead, half = gap(eight)
    pattern = (
        "With half a million parameters (#) and the bare name, four groups were # ± # % behind DDP,"
        " and eight groups were # ± # % ahead"
    )
    yield Sentence(CHOOSING, pattern, [size, *gap(four), -ahead, half])
    fractions = [ratio_of_bytes(setting, "0.5M") for setting in (four, eight)]
    yield Sentence(CHOOSING, "They sent 1/# and 1/# of DDP's bytes", fractions)


def lengths_of_bare_names() -> list[float]:
    """Returns H as the strategy chose it, by groups."""
    return [bare(groups).ours[0]["choices"]["sync_every"] for groups in GROUPS]


def of_verdict() -> Iterator[Claim]:
    """How groups compare with DDP: quality.json."""
    names = [bare(groups) for groups in GROUPS]
    yield Sentence(BENCHMARKS, "and eight groups lose to it by # %", means(names[2]))
    size = parameters(quality.MODELS["0.1M"].size)
    yield Sentence(BENCHMARKS, "from DDP's loss in percent, with # parameters", [size])
    yield Table(BENCHMARKS, VERDICT_HEADER, _rows_of_verdict())
    small, medium = (in_stage("verdict", name)["M=2, H=50"] for name in ("0.2M", "0.5M"))
    sizes = [parameters(quality.MODELS[name].size) for name in ("0.2M", "0.5M")]
    numbers = [*gap(small), sizes[0], *gap(medium), sizes[1]]
    yield Sentence(
        BENCHMARKS,
        "the difference is # ± # % with # parameters, and # ± # % with # parameters",
        numbers,
    )
    apart = max(_apart(small.ours), _apart(small.plain))
    yield Sentence(BENCHMARKS, "seeds differ by up to # %", [apart])


def _apart(same: Sequence[Run]) -> float:
    """Returns by how many percent the largest loss of several seeds is above the smallest."""
    losses = [run["loss"] for run in same]
    return 100 * (max(losses) / min(losses) - 1)


def of_bytes() -> Iterator[Claim]:
    """Bytes of simulated groups beside DDP's: quality.json."""
    fractions = [ratio_of_bytes(bare(groups)) for groups in GROUPS]
    fractions += [ratio_of_bytes(by_itself(groups)) for groups in GROUPS]
    pattern = "Two, four and eight groups send 1/#, 1/# and 1/# of DDP's bytes (1/#, 1/# and 1/# with H=20)"
    yield Sentence(BENCHMARKS, pattern, fractions)


def steps_of(groups: int) -> int:
    """Returns the inner steps of the fits of the verdict."""
    return int(bare(groups).ours[0]["steps"])


def _rows_of_verdict() -> dict[str, list[float]]:
    """Returns the rows of the table, by label."""
    lengths = ", ".join(map(str, lengths_of_bare_names()))
    rows = {
        f"the bare name: H = {lengths}": gaps(*map(bare, GROUPS)),
        "H=20, all else by default": gaps(*map(by_itself, GROUPS)),
    }
    for sync_every, counts in ((20, GROUPS), (50, GROUPS[:2]), (100, GROUPS)):
        settings = [elementwise(groups, sync_every) for groups in counts]
        rows[f"H={sync_every}, no dense beginning"] = gaps(*settings)
    return rows


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
    ten = _ten_for_two()
    rows = {**_rows_of_matrices(ten), **_rows_elementwise()}
    chosen = [*lengths_of_bare_names(), 20, 10, 10, 10]
    for row, length in zip(rows.values(), chosen, strict=True):
        row.append(length)
    yield Table(CHOOSING, ["fit", "H=10", "H=20"], rows)


def _ten_for_two() -> Comparison:
    """Two groups with H=10 and the step of matrices, which nothing chooses for this fit."""
    ours, ddp = quality.alone("0.1M", 2, 10, sync_every=None)
    choices = {**(ours.choices or {}), "sync_every": 10, "overlap_steps": 2}
    pairs = {"H=10": [(replace(ours, choices=choices), ddp)]}
    (compared,) = comparison.compared(runs("quality"), pairs)
    return compared


def _rows_of_matrices(ten: Comparison) -> dict[str, list[float]]:
    two = means(ten, by_itself(2), by_itself(2, 39))
    rows = {f"M=2, {steps_of(2):,} steps, step of matrices": two}
    for groups, more in ((4, ""), (8, ", dense beginning")):
        settings = [bare(groups), by_itself(groups), by_itself(groups, 100)]
        label = f"M={groups}, {steps_of(groups):,} steps, step of matrices{more}"
        rows[label] = means(*settings)
    return rows


def _rows_elementwise() -> dict[str, list[float]]:
    rows = {}
    for groups, lengths in ((2, (20, 50, 100)), (4, (20, 50, 100)), (8, (20, 100))):
        settings = [elementwise(groups, length) for length in lengths]
        rows[f"M={groups}, {steps_of(groups):,} steps, elementwise"] = means(*settings)
        if groups == 2:
            small = {setting.name: setting for setting in paper.above_ddp(small_model())["H"]}
            settings = [small[length] for length in ("10", "20", "50", "100", "200")]
            steps = settings[0].ours[0]["steps"]
            rows[f"M=2, {steps:,} steps, elementwise"] = means(*settings)
    return rows


def of_sparse() -> Iterator[Claim]:
    """Sparse compression, before numbers were chosen anew: quality.json."""
    fifty = _by_compression(50)
    ten = _by_compression(10)
    dense_fifty = Comparison("fp4, H=50", ten.ours, fifty.plain)
    pattern = "After # rounds with H=50, the loss was # % above fp4's."
    steps = by_itself(2).ours[0]["steps"]
    yield Sentence(CHOOSING, pattern, [steps // 50, *means(fifty)])
    pattern = "After # rounds with H=10, the loss was # % below fp4's at the same H, and # % above"
    numbers = [steps // 10, -mean(ten.percent), *means(dense_fifty)]
    yield Sentence(CHOOSING, pattern, numbers)


def _by_compression(sync_every: int) -> Comparison:
    """Compares sparse with fp4 on two seeds, with two groups and all else by default."""
    size = asdict(quality.MODELS["0.1M"].size)
    key = {"groups": 2, "batch": 1, "lr": 3e-3, "inner": "adamw", "budget": 16.0, "size": size}
    choices = {"sync_every": sync_every, "mixing": 0.2, "fragments": "strided:3"}
    compared: dict[str, list[Run]] = {"sparse": [], "fp4": []}
    for seed, compression in product(quality.TUNING, compared):
        wanted = {**choices, "compression": compression}.items()
        for run in runs("quality").all():
            is_same = run.items() >= {**key, "seed": seed}.items()
            if is_same and run["choices"] and run["choices"].items() >= wanted:
                compared[compression].append(run)
    return Comparison("sparse", compared["sparse"], compared["fp4"])


def of_unequal() -> Iterator[Claim]:
    """Files of its own for each group: quality.json."""
    numbers = gaps(earlier(4, split="by_file"), earlier(4))
    yield Sentence(CHOOSING, "with shuffled data: # ± # compared with # ± # %", numbers)


def of_curve() -> Iterator[Claim]:
    """Ten million parameters: curve.json."""
    of_point = curve.Curve(curve.POINTS["10M"], "data/linux.xz", "cuda")
    rows = curve.rows_of(of_point, runs("curve"))
    four, better = rows["M=4"][0]
    alone, _ = rows["M=1, with the outer step"][0]
    tried = [runs("curve")[ddp]["loss"] for ddp in of_point.tried(curve.SEEDS[0])]
    pattern = "four groups reached # nats per byte. DDP reached # and # at inner learning rates"
    yield Sentence(CHOOSING, pattern, [four["loss"], *tried])
    behind = curve.percents(rows["M=4"])
    yield Sentence(CHOOSING, "Four groups are # % behind", behind)
    ahead = 100 * (1 - alone["loss"] / better["loss"])
    pattern = "DDP with the same outer step (M=1) reached #, which is # % better than plain DDP"
    yield Sentence(CHOOSING, pattern, [alone["loss"], ahead])
    pattern = (
        "four groups with equal singular values were # % behind DDP, and one group was # % ahead"
    )
    yield Sentence(CHOOSING, pattern, [*behind, ahead])
    yield from _bytes_of_curve(four)


def _bytes_of_curve(four: Run) -> Iterator[Claim]:
    numel = parameters(curve.POINTS["10M"].size)
    yield Sentence(CHOOSING, "in bf16-mixed, and trained # parameters on C code", [numel])
    sent = ring(4, numel) * four["steps"]
    numbers = [four["bytes_sent"] / 1e9, sent / four["bytes_sent"], sent / 1e9]
    pattern = "Each group sent # GB, or 1/# of the # GB of float32 gradients that DDP sends"
    yield Sentence(CHOOSING, pattern, numbers)


def of_others() -> Iterator[Claim]:
    """Measurements of others, arXiv 2503.09799: benchmarks/scaling.py."""
    shown = [scaling.SIZES.index(size) for size in (35e6, 180e6, 550e6, 1.3e9, 2.4e9)]
    rows = {}
    for groups, published in scaling.GAPS.items():
        rows[f"M={groups}"] = [published[place] for place in shown]
    yield Table(CHOOSING, ["groups", "35M", "180M"], rows)


def of_matrices() -> Iterator[Claim]:
    """What the step of matrices gains: quality.json."""
    words = {2: "two groups", 4: "four groups", 8: "eight groups"}
    beside = {label: _beside_single(groups) for groups, label in words.items()}
    yield Table(CHOOSING, ["batches of", "one group, above DDP"], beside)


def _beside_single(groups: int) -> list[float]:
    """Returns the cells about one group on the batches of several: its gap, and those of these."""
    alone = single(groups)
    seeds = len(alone.ours)
    numbers = gap(alone) if groups == 8 else means(alone)
    # Two groups have H=20 by name.
    settings = [by_itself(groups)] if groups == 2 else [by_itself(groups), bare(groups)]
    for setting in settings:
        numbers += means(Comparison("one", setting.ours[:seeds], alone.ours))
    return [*numbers, seeds]
