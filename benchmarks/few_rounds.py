"""Measures the cost of few rounds, and of short rounds, compared with DDP: with an outer momentum
of 0.9, and with the chosen one.

    python -m benchmarks.few_rounds [--workers N] [--minutes M] [--quick] [--json FILE]

Two groups train in 5, 10, 20 and 40 rounds. The tasks are a mean-variance regression of 32, 128 and
512 steps, which has 2,752 parameters and takes seconds; fine-tuning for 500 steps, with LoRA and of
all parameters, as in `benchmarks.finetuning`; and training from scratch, with 16 tokens per
parameter, where rounds of 5 and 10 steps are also measured. With --json, every run is saved as soon
as it ends, and runs that are already in the file are skipped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from benchmarks import comparison, finetuning, report, runs
from benchmarks.comparison import interval
from benchmarks.finetuning import METHODS, SEEDS, ddp, ours, paired, pretrained_weights
from benchmarks.models import SMALL
from benchmarks.quality import ELEMENTWISE, TWO_GROUPS
from benchmarks.runs import Runs
from benchmarks.training import Training
from lightning_sdiloco import SimulatedGroups
from lightning_sdiloco.algorithm.config import Settings

ROUNDS = (5, 10, 20, 40)
REGRESSIONS = (32, 128, 512)
REGRESSION_SEEDS = range(10)
SHORT = {5: 1, 10: 2}
"""Rounds of few steps: H, and the steps for which a fragment is in flight."""

FROM_SCRATCH = Training(SMALL, groups=2, batch=2, lr=6e-3)
LR = 3e-3
"""With which groups do best from the start, where DDP does with twice as much; see
`benchmarks.quality`."""


def momenta(sync_every: int, rounds: int) -> list[float]:
    """The outer momentum of long runs, and the chosen one if it differs."""
    settings = Settings(sync_every=sync_every, overlap_steps=0, outer_optimizer=ELEMENTWISE)
    chosen = settings.chosen_for(2, rounds)
    return sorted({0.9, chosen.numbers["outer_momentum"]}, reverse=True)


def points(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    x = 8 * torch.rand(count, 1, generator=random) - 4
    noise = (0.1 + 0.025 * x.abs()) * torch.randn(count, 1, generator=random)
    return x, torch.sin(x) * x / 2 + noise


def likelihood(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    predicted, spread = model(x).chunk(2, dim=1)
    return F.gaussian_nll_loss(predicted, y, F.softplus(spread) + 1e-4)


def regression(seed: int, steps: int, choices: dict[str, float] | None, batch: int = 32) -> float:
    """Trains two groups, or DDP if there are no choices; returns the root mean squared error."""
    random = torch.Generator().manual_seed(seed)
    x, y = points(2048, random)
    held_out_x, held_out_y = points(1000, random)
    models = []
    for _ in range(1 if choices is None else 2):
        torch.manual_seed(seed)
        layers = [nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 2)]
        models.append(nn.Sequential(*layers))
    optimizers = [Adam(model.parameters(), lr=1e-2) for model in models]
    simulated = None
    if choices is not None:
        inner = [[optimizer] for optimizer in optimizers]
        simulated = SimulatedGroups(models, inner, **choices)
    for _ in range(steps):
        picked = torch.randint(len(x), (2 * batch,), generator=random).chunk(len(models))
        for model, optimizer, indices in zip(models, optimizers, picked, strict=True):
            optimizer.zero_grad()
            likelihood(model, x[indices], y[indices]).backward()
            optimizer.step()
        if simulated is not None:
            simulated.step()
    if simulated is not None:
        simulated.finish()
    with torch.no_grad():
        predicted = models[0](held_out_x)[:, :1]
    return float((predicted - held_out_y).square().mean().sqrt())


def regressions(seeds: range) -> dict[str, list[float]]:
    """The percentage by which the error is above DDP's, by setting and seed."""
    percent_above = {}
    for steps in REGRESSIONS:
        plain = [regression(seed, steps, None) for seed in seeds]
        for rounds in ROUNDS:
            sync_every = steps // rounds
            if sync_every < 3:
                continue
            for momentum in momenta(sync_every, rounds):
                choices = {
                    "sync_every": sync_every,
                    "overlap_steps": min(5, sync_every // 20),
                    "outer_momentum": momentum,
                }
                losses = [regression(seed, steps, choices) for seed in seeds]
                name = f"regression of {steps} steps, {rounds} rounds, H={sync_every}, outer_momentum={momentum:g}"
                pairs = zip(losses, plain, strict=True)
                percent_above[name] = [100 * (loss / ddp_loss - 1) for loss, ddp_loss in pairs]
    return percent_above


def fine_tuned(seed: int) -> Iterator[finetuning.FineTuning]:
    for method in METHODS:
        yield ddp(method, seed)
        for sync_every in (finetuning.STEPS // rounds for rounds in ROUNDS):
            for momentum in momenta(sync_every, finetuning.STEPS // sync_every):
                yield ours(
                    method,
                    seed,
                    sync_every=sync_every,
                    overlap_steps=min(5, sync_every // 4),
                    outer_momentum=momentum,
                )


def from_scratch(seed: int) -> Iterator[Training]:
    base = replace(FROM_SCRATCH, seed=seed)
    yield base
    for sync_every in [base.steps // rounds for rounds in ROUNDS] + list(SHORT):
        for momentum in momenta(sync_every, base.steps // sync_every):
            changes = {
                "sync_every": sync_every,
                "overlap_steps": SHORT.get(sync_every, 5),
                "outer_momentum": momentum,
            }
            yield replace(base, lr=LR, choices={**TWO_GROUPS, **changes})


def pairs_of(seeds: Sequence[int]) -> dict[str, list[tuple[Training, Training]]]:
    """The trainings on text and their DDP runs, by setting."""
    tuned = paired(training for seed in seeds for training in fine_tuned(seed))
    settings: dict[str, list[tuple[Training, Training]]] = {
        name: [*pairs] for name, pairs in tuned.items()
    }
    for seed in seeds[:2]:  # a minute and more each
        plain, *streaming = from_scratch(seed)
        for training in streaming:
            assert training.choices is not None
            choices = training.choices
            momentum = f"outer_momentum={choices['outer_momentum']:g}"
            lengths = f"H={choices['sync_every']}, tau={choices['overlap_steps']}"
            name = f"from scratch, {lengths}, {momentum}"
            settings.setdefault(name, []).append((training, plain))
    return settings


def main(arguments: list[str] | None = None) -> None:
    options = runs.parsed(runs.parser(__doc__), arguments)
    settings = {} if options.quick else pairs_of(SEEDS)
    finished = Runs("few_rounds", options.json)
    if settings:
        # Once, before several processes need it.
        pretrained_weights(SMALL, 16.0)
        finished.make(runs.of_pairs(settings), options.workers, options.minutes)
    above = regressions(range(2) if options.quick else REGRESSION_SEEDS)
    rows = [[name, str(len(values)), interval(values, digits=1)] for name, values in above.items()]
    report.show("regression: % of the error above DDP's", ["setting", "seeds", "in %"], rows)
    finished.write({name: mean(values) for name, values in above.items()})
    comparison.tell(
        "few rounds: two groups", comparison.compared(finished, settings), finished, options
    )


if __name__ == "__main__":
    main()
