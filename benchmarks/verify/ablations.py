"""Losses that pages quote from runs that vary one factor: the paper's ablations, fine-tuning, few
rounds, and the defaults.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import comparison, few_rounds, finetuning, paper, quality, shipped, vision
from benchmarks.runs import by_setting
from benchmarks.training import Run, Training
from benchmarks.verify.claims import Claim, Expected, Sentence, Table
from benchmarks.verify.learning import gap, gaps, mean_bytes, means, ring, small_model
from benchmarks.verify.results import BENCHMARKS, CHOOSING, PAPER, headline, results, runs


def of_paper() -> Iterator[Claim]:
    """The claims of the paper: paper.json, with quality.json and defaults.json."""
    small = small_model()
    five_seeds, two_seeds = paper.made_before()
    rows: dict[str, list[float]] = {}
    for label, (factor, values) in _CLAIMS.items():
        numbers = []
        claims = [claim for claim in paper.ABLATIONS[factor].claims if _names(claim) in values]
        for model in (small, five_seeds, two_seeds):
            for claim in claims:
                numbers += _cell(factor, claim, model, model is not small)
        rows[label] = numbers
    yield Table(PAPER, ["claim", "44,000, 3 seeds"], rows)
    tokens = {setting.name: setting for setting in paper.above_ddp(small)[_TOKENS]}
    numbers = [*gap(tokens["16.0"]), *gap(tokens["64.0"])]
    yield Sentence(PAPER, "M=2: # ± # % with 16 tokens, # ± # % with 64", numbers)
    verdicts = {setting.name: setting for setting in paper.above_ddp(five_seeds)["H"]}
    numbers = gaps(verdicts["20"], verdicts["100"])
    yield Sentence(PAPER, "# ± # % with H=20, # ± # % with H=100", numbers)
    bits = next(claim for claim in paper.ABLATIONS["bits"].claims if claim.first == "fp4")
    yield Sentence(PAPER, "zeroing values does | # ± # %, open", _cell("bits", bits, small, False))


_TOKENS = "tokens for each parameter, beside DDP"

_CLAIMS: Mapping[str, tuple[str, Sequence[str]]] = {
    "M=4 is worse than M=2": ("groups", ["4/2"]),
    "M=8 is worse than M=4": ("groups", ["8/4"]),
    "H=500 is worse than 50": ("H", ["500/50"]),
    "H=200 is worse than 50": ("H", ["200/50"]),
    "H=100 is worse than 50": ("H", ["100/50"]),
    "H=100 is worse than 20": ("H", ["100/20"]),
    "H=10 is as good as 50": ("H", ["10/50"]),
    "fp4 is as good as fp32": ("bits", ["fp4/fp32"]),
    "fp8, bf16 are as good as fp32": ("bits", ["fp8/fp32", "bf16/fp32"]),
    "tau 5, 10 are as good as 1": ("tau", ["5/1", "10/1"]),
    "tau 10 is as good as 5": ("tau", ["10/5"]),
    "tau 40 is worse than 1": ("tau", ["40/1"]),
    "alpha 0.5 is as good as 0": ("alpha", ["0.5/0.0"]),
    "alpha 0.9 is worse than 0": ("alpha", ["0.9/0.0"]),
    "sequential:2 is worse than strided:2": ("cut", ["sequential:2/strided:2"]),
}
"""The claims of the table by their labels: the factor and both values."""


def _names(claim: paper.Claim) -> str:
    return f"{claim.first}/{claim.second}"


def _cell(factor: str, claim: paper.Claim, model: paper.Model, with_seeds: bool) -> list[float]:
    """Returns the numbers of a cell: the gap, followed by the seeds if it is another model's."""
    compared = paper.difference(factor, claim, model)
    # Two seeds are shown if there are not five.
    is_shown_before = model.seeds == quality.TUNING and factor in ("H", "groups")
    if compared is None or is_shown_before:
        return []
    return [*gap(compared), len(compared.ours)] if with_seeds else gap(compared)


def of_few_rounds() -> Iterator[Claim]:
    """Few rounds: few_rounds.json (of the regressions only means)."""
    tuned = comparison.compared(runs("few_rounds"), few_rounds.pairs_of(finetuning.SEEDS))
    by_name = {setting.name: setting for setting in tuned}
    rows: dict[str, Sequence[Expected]] = {}
    for method, lengths in _ROUNDS.items():
        for rounds, sync_every in lengths.items():
            name = f"{method}, lr={finetuning.LR[method]:g}, sync_every={sync_every}"
            name += ", overlap_steps=3" if sync_every == 12 else ""
            pair = [setting for key, setting in by_name.items() if key.startswith(name)]
            rows[f"fine-tuning, {method}, 3 | {rounds}, {sync_every}"] = gaps(*pair)
    for rounds, sync_every in ((5, 25), (40, 3)):
        name = f"regression of 128 steps, {rounds} rounds, H={sync_every},"
        both = [more for key, more in headline("few_rounds").items() if key.startswith(name)]
        label = f"regression of 128 steps, 10 | {rounds}, {sync_every}"
        rows[label] = [both[0], None, both[1], None]
    for rounds, sync_every in ((5, 714), (714, 5)):
        name = f"from scratch, H={sync_every},"
        pair = [setting for key, setting in by_name.items() if key.startswith(name)]
        rows[f"from scratch, 2 | {rounds}, {sync_every}"] = gaps(*pair)
    yield Table(CHOOSING, ["task, seeds", "rounds, H"], rows, labels=2)


_ROUNDS = {"all parameters": {5: 100, 10: 50, 20: 25, 41: 12}, "LoRA": {5: 100, 41: 12}}
"""The rows of fine-tuning: H by rounds."""


def of_finetuning() -> Iterator[Claim]:
    """Fine-tuning: finetuning.json."""
    seeds = {"all parameters": range(1, 6), "LoRA": finetuning.SEEDS}
    numbers = []
    for method in finetuning.METHODS:
        pairs = [
            (finetuning.ours(method, seed, overlap_steps=1), finetuning.ddp(method, seed))
            for seed in seeds[method]
        ]
        (compared,) = comparison.compared(runs("finetuning"), {method: pairs})
        assert len(compared.ours) == len(pairs)
        numbers += gap(compared)
    pattern = (
        "the loss is # ± # % above DDP's when all parameters ..., and # ± # % above it with LoRA"
    )
    yield Sentence(BENCHMARKS, pattern, numbers)
    late = finetuning.ours("all parameters", overlap_steps=5)
    early = finetuning.ours("all parameters", overlap_steps=1)
    cost = comparison.compared(runs("finetuning"), {"late": [(late, early)]})
    yield Sentence(
        CHOOSING,
        "A value of 5 instead of 1 raised the loss by # % with all parameters",
        means(*cost),
    )
    ten = finetuning.ours("all parameters", sync_every=50)
    (worse,) = comparison.compared(runs("finetuning"), {"ten": [(ten, late)]})
    pattern = "ten rounds were # % worse than 25 rounds, and fifty rounds were no better"
    yield Sentence(CHOOSING, pattern, means(worse))
    loss = worse.ours[0]["loss"]
    yield Sentence(CHOOSING, "# instead of # at 10 rounds, one seed", [None, loss])


def of_shipped() -> Iterator[Claim]:
    """LoRA of a model that a package ships: shipped.json."""
    groups, untrained = comparison.compared(runs("shipped"), by_setting(shipped.verdict()))
    before = quality.loss(untrained.ours)
    plain = quality.loss(groups.plain)
    groups_loss = quality.loss(groups.ours)
    sent = mean_bytes(groups)
    sent_by_ddp = ring(shipped.GROUPS, shipped.ADAPTERS) * shipped.STEPS
    kept_share = 100 * (before - groups_loss) / (before - plain)
    pattern = (
        "the loss of two groups is # ± # % above DDP's, and they send 1/# of its bytes (three"
        " seeds). The groups keep # % of what DDP gains"
    )
    yield Sentence(BENCHMARKS, pattern, [*gap(groups), sent_by_ddp / sent, kept_share])
    rows = {
        "before fine-tuning": [before],
        "DDP": [plain, sent_by_ddp / 1e6],
        "two groups, bare name": [groups_loss, *gap(groups), sent / 1e6],
    }
    yield Table(BENCHMARKS, ["LoRA of a shipped model"], rows)
    tuned = comparison.compared(runs("shipped"), by_setting(shipped.rates()))
    best = min(tuned, key=lambda setting: quality.loss(setting.ours))
    assert best is min(tuned, key=lambda setting: quality.loss(setting.plain)), (
        "the page says: both"
    )
    numbers = [best.ours[0]["lr"], *gap(best), shipped.TRIED[-1], shipped.TRIED[0], shipped.LR]
    pattern = (
        "did best at # of the three rates ... ended # % above DDP. With a rate of #, ... between #"
        " and # was tried"
    )
    yield Sentence(BENCHMARKS, pattern, numbers)


def of_defaults() -> Iterator[Claim]:
    """What chose the defaults: defaults.json."""
    rows: dict[str, list[float]] = {label: [] for label in _SETTINGS}
    for seed in quality.TUNING:
        for label, changes in _SETTINGS.items():
            for change in changes:
                rows[label].append(_default_run(seed, **change)["loss"])
    yield Table(CHOOSING, ["setting", "seed 0", "seed 1"], rows)
    apart = []
    for losses in rows.values():
        half = len(losses) // 2
        pairs = zip(losses[:half], losses[half:], strict=True)
        apart += [100 * (max(pair) / min(pair) - 1) for pair in pairs]
    yield Sentence(CHOOSING, "Two seeds with the same setting differ by up to # %", [max(apart)])


_SETTINGS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "outer_lr 0.7, outer_momentum 0.9, mixing 0.2": [{}],
    "outer_lr 0.9 / 0.4": [{"outer_lr": 0.9}, {"outer_lr": 0.4}],
    "outer_momentum 0.95 / 0.8": [{"outer_momentum": 0.95}, {"outer_momentum": 0.8}],
    "mixing 0.1 / 0 / 0.5": [{"mixing": 0.1}, {"mixing": 0.0}, {"mixing": 0.5}],
    "DDP at 3e-3 / 6e-3, its best": [{"ddp": 3e-3}, {"ddp": 6e-3}],
}


def _default_run(seed: int, ddp: float | None = None, **changes: Any) -> Run:
    """Returns a run of two groups with two windows each and default fragments."""
    choices = {**paper.BASE, **changes}
    del choices["fragments"]
    training = Training(quality.MODELS["0.1M"].size, choices, batch=quality.BATCH, seed=seed)
    if ddp is not None:
        training = replace(training, choices=None, lr=ddp)
    return runs("defaults")[training]


def of_vision() -> Iterator[Claim]:
    """A ResNet: vision.json."""
    losses = results("vision")["found"]
    pairs = zip(losses["worker groups"], losses["DDP"], strict=True)
    percent = [100 * (ours[0] / ddp[0] - 1) for ours, ddp in pairs]
    pattern = "as well with four groups as with DDP: # ± # % in loss (H=20, # parameters"
    numel = sum(parameter.numel() for parameter in vision.resnet8(0).parameters())
    yield Sentence(CHOOSING, pattern, [*gap(percent), numel])
