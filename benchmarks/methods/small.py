"""Claims about loss that small models can show: many groups, sampled clients, tables, and time on
a link.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad
from typing_extensions import override

from benchmarks.methods.computed import Numbers
from benchmarks.models import SMALL, TINY, Size
from benchmarks.training import CUT, Loop, Text, Training
from lightning_sdiloco import Ring, Selective, SimulatedGroups
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import ErrorFeedback, Int2, Int8, RandomK, Threshold
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import DataParallel, Streaming, play
from lightning_sdiloco.planning.workload import Groups, Model

from fedglomo import SETTINGS as FEDGLOMO  # isort: skip  (on the path since benchmarks.models)
from local_momentum import LocalMomentum  # isort: skip
from saps_psgd import FastestPairs  # isort: skip

MEAN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}
AT_ONCE: dict[str, Any] = {
    "overlap_steps": 0,
    "mixing": 0.0,
    "fragments": [["*"]],
    "compression": "fp32",
}

CLASSES = 10
FEATURES = 32

# -------------------------------------------------------------------------------------------------
# Classes of points that each group or client sees in shares of its own
# -------------------------------------------------------------------------------------------------


class Points:
    """Points around a centre for each class; who sees which classes follows a Dirichlet
    distribution.
    """

    def __init__(self, holders: int, seed: int, concentration: float = 0.3) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._centres = torch.randn(
            CLASSES, 3, FEATURES, generator=self._random
        )  # three for each class
        torch.manual_seed(seed)
        self.shares = torch.distributions.Dirichlet(torch.full((CLASSES,), concentration)).sample(
            (holders,)
        )
        self.validation = self.draw(torch.full((CLASSES,), 0.1), 2000)

    def draw(self, shares: Tensor, count: int) -> tuple[Tensor, Tensor]:
        labels = torch.multinomial(shares, count, replacement=True, generator=self._random)
        which = torch.randint(3, (count,), generator=self._random)
        noise = 2.0 * torch.randn(count, FEATURES, generator=self._random)
        return self._centres[labels, which] + noise, labels

    def loss(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(cross_entropy(model, *self.validation))


HIDDEN = 64


class Net(nn.Module):
    """A net of 2,762 parameters, not convex. Those of several are parts of the same tensors, to be
    trained at once.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(part) for part in parts])

    @override
    def forward(self, x: Tensor) -> Tensor:
        return forward(x, *self.parts)


def forward(x: Tensor, into: Tensor, bias: Tensor, out: Tensor, end: Tensor) -> Tensor:
    return torch.tanh(x @ into + bias) @ out + end


def nets(count: int, seed: int) -> tuple[list[Tensor], list[Net]]:
    random = torch.Generator().manual_seed(seed)
    shapes = (FEATURES, HIDDEN), (1, HIDDEN), (HIDDEN, CLASSES), (1, CLASSES)
    first = [
        torch.randn(shape, generator=random) * (shape[0] > 1) / shape[0] ** 0.5 for shape in shapes
    ]
    together = [part.repeat(count, 1, 1) for part in first]
    return together, [Net([part[number] for part in together]) for number in range(count)]


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


ROUTES: dict[str, dict[str, Any]] = {
    "all with all": MEAN,
    "Ring()": {"route": Ring()},
    "Ring(accelerated=False)": {"route": Ring(accelerated=False), **MEAN},
    "FastestPairs": {"route": FastestPairs(), **MEAN},
    "FastestPairs, 1/100": {"route": FastestPairs(), **MEAN, "compression": RandomK(100, Int8())},
}


def gossip(
    method: str, groups: int, seed: int, sync_every: int = 5, rounds: int = 50, lr: float = 0.1
) -> Numbers:
    """Trains groups that see unlike classes; judges what each holds, and the mean of all, on all
    classes alike.
    """
    points = Points(groups, seed)
    x, y = (
        torch.stack(part)
        for part in zip(*(points.draw(own, 2000) for own in points.shares), strict=True)
    )
    together, models = nets(groups, seed)
    simulated = SimulatedGroups(models, **{**AT_ONCE, **ROUTES[method]}, sync_every=sync_every)
    random = torch.Generator().manual_seed(seed)
    for _ in range(sync_every * rounds):
        chosen = torch.randint(x.shape[1], (16,), generator=random)
        leaves = [part.detach().requires_grad_() for part in together]
        logits = forward(x[:, chosen], *leaves)
        loss = F.cross_entropy(logits.flatten(0, 1), y[:, chosen].flatten(), reduction="sum") / len(
            chosen
        )
        with torch.no_grad():
            for part, gradient in zip(together, torch.autograd.grad(loss, leaves), strict=True):
                part.sub_(gradient, alpha=lr)
        simulated.step()
    sent = simulated.engines[0].report()["bytes_sent"]
    own = sum(points.loss(model) for model in models) / groups
    simulated.finish()
    return {"loss": own, "loss_of_mean": points.loss(models[0]), "bytes": sent / rounds}


def glomo(
    method: str, lr: float, seed: int, clients: int = 50, rounds: int = 40, steps: int = 5
) -> Numbers:
    """Trains on 5 of many clients in each round, who have unlike classes and between 20 and some
    1000 points.

    With FedGLOMO the first gradient of a client in a round is that of all its points, as its
    authors have it.
    """
    points = Points(clients, seed)
    sizes = (
        80 * torch.exp(torch.randn(clients, generator=torch.Generator().manual_seed(seed)))
    ).clamp(20, 1000)
    data = [
        points.draw(shares, int(size)) for shares, size in zip(points.shares, sizes, strict=True)
    ]
    all_points = [torch.cat(part) for part in zip(*data, strict=True)]
    random = torch.Generator().manual_seed(seed)
    _, models = nets(5, seed)
    beta = float(method.partition("=")[2] or 1)
    outer = partial(SGD, lr=1.0, momentum=1 - beta)
    simulated = SimulatedGroups(models, **FEDGLOMO, sync_every=steps, outer_optimizer=outer)
    previous: list[Net] = []
    for _ in range(rounds):
        starts = [deepcopy(model) for model in models]
        sampled = torch.randperm(clients, generator=random)[:5].tolist()
        pairs = [(LocalMomentum(model, cross_entropy), None) for model in models]
        if previous:
            pairs = [
                (now, LocalMomentum(old, cross_entropy))  # type: ignore[misc]
                for (now, _), old in zip(pairs, previous, strict=True)
            ]
        for step in range(steps):
            for client, model, (now, before) in zip(sampled, models, pairs, strict=True):
                x, y = data[client]
                chosen = torch.randint(len(y), (16,), generator=random)
                if method == "FedAvg":
                    _sgd(model, x[chosen], y[chosen], lr)
                    continue
                batch = (x, y) if step == 0 else (x[chosen], y[chosen])
                now.step(*batch, lr)
                if before is not None:
                    before.step(*batch, lr)
                    if step == steps - 1:
                        before.add_to(model, 1 - beta)
            simulated.step()
        previous = starts
    simulated.finish()
    return {"loss": float(cross_entropy(models[0], *all_points).detach())}


def _sgd(model: nn.Module, x: Tensor, y: Tensor, lr: float) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(cross_entropy(model, x, y), parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient, alpha=lr)


# -------------------------------------------------------------------------------------------------
# Embedding tables, and loss over time
# -------------------------------------------------------------------------------------------------

ROWS = 1 << 14


class Tables(nn.Module):
    """Predicts a byte from the three before it, by tables of two sizes; 0.3 million parameters,
    most of them rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Embedding(256, 16)
        self.all = nn.Embedding(ROWS, 16)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 256))

    @override
    def forward(self, context: Tensor) -> Tensor:
        made: Tensor = self.head(
            torch.cat([self.last(context[:, -1]), self.all(hashed(context))], dim=1)
        )
        return made


def hashed(context: Tensor) -> Tensor:
    return (context * torch.tensor([31 * 31 * 257, 8191, 131])).sum(1) % ROWS


COMPRESSIONS: dict[str, Any] = {
    "fp4": "fp4",
    "sparse": "sparse",
    "Threshold(every=10)": ErrorFeedback(Threshold(1 / 64, Int2(), every=10), decay=0.95),
}


@cache
def _text() -> Text:
    return Text(TINY, 512)


def tables(method: str, groups: int, seed: int, sync_every: int = 10, rounds: int = 150) -> Numbers:
    """Trains a model of tables with AdaGrad, as recommenders are; most rows have no gradient in a
    round.
    """
    text = _text().training.text
    random = torch.Generator().manual_seed(seed)
    split = int(0.95 * len(text))

    def batch(count: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        at = torch.randint(first, last - 4, (count, 1), generator=random)
        windows = text[at + torch.arange(4)].long()
        return windows[:, :3], windows[:, 3]

    held_out = batch(20_000, split, len(text))
    torch.manual_seed(seed)
    models = [Tables() for _ in range(groups)]
    optimizers = [Adagrad(model.parameters(), lr=0.05) for model in models]
    simulated = SimulatedGroups(
        models, compression=COMPRESSIONS[method], sync_every=sync_every, overlap_steps=1
    )
    touched = torch.zeros(ROWS, dtype=torch.bool)
    for step in range(sync_every * rounds):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            context, target = batch(256, 0, split)
            cross_entropy(model, context, target).backward()
            optimizer.step()
            if step < sync_every and model is models[0]:
                touched[hashed(context)] = True
        simulated.step()
    sent = simulated.engines[0].report()["bytes_sent"]
    simulated.finish()
    with torch.no_grad():
        loss = float(cross_entropy(models[0], *held_out))
    return {
        "loss": loss,
        "bytes": sent / rounds,
        "rows_with_a_gradient": float(touched.float().mean()),
    }


SCHEDULES: dict[str, dict[str, Any] | None] = {
    "H=1, as DDP": None,
    "H=20": {"sync_every": 20},
    "Selective(0.3, most=4)": {"sync_every": 20, "schedule": Selective(0.3, 4)},
    "H=80": {"sync_every": 80},
}
STEP_SECONDS = 0.1
POINTS = 10


def over_time(method: str, seed: int, budget: float = 4.0, size: Size = SMALL) -> dict[str, Any]:
    """Trains two groups, and plays when they make each step on a link that carries half of what
    H=20 sends.
    """
    choices = SCHEDULES[method]
    given = None if choices is None else {"overlap_steps": 5, "fragments": CUT, **choices}
    training = Training(size, given, 2, budget, seed=seed, validation_windows=128)
    text = training.text()
    loop = Loop(training, text)
    found = list[tuple[int, float]]()
    launches = dict[int, tuple[int, ...]]()
    for step, batch in enumerate(islice(text.batches(seed, 2 * training.batch), training.steps), 1):
        if loop.engines and (due := loop.engines[0].launches_next):
            launches[step] = due
        loop.train(*batch)
        if step % (training.steps // POINTS) == 0:
            with loop.engines[0].evaluate() if loop.engines else nullcontext():
                found.append((step, text.loss(loop.model)))
    ends = _ends(size, given, training.steps, launches)
    return {
        "loss": found[-1][1],
        "seconds": ends[found[-1][0] - 1],
        "points": [(ends[step - 1], loss) for step, loss in found],
    }


def _ends(
    size: Size, given: dict[str, Any] | None, steps: int, launches: dict[int, tuple[int, ...]]
) -> list[float]:
    """Returns when each inner step ends on the link."""
    model = Model.of_parameters(trainable(size.make()))
    groups = Groups(STEP_SECONDS, groups=2)
    plain = Settings(sync_every=20, overlap_steps=5, fragments=CUT)
    needs = Streaming(model, plain, groups).bytes_per_step * 8 / STEP_SECONDS / 1e9
    link = Link(gbit_s=needs / 2, round_trip=0.05)
    if given is None:
        each = STEP_SECONDS / DataParallel(model, groups).utilisation(link)
        return [each * step for step in range(1, steps + 1)]
    method = Streaming(model, Settings(**given), groups)
    return play(method, link, steps, [1.0] * 2, launches=launches)[0].steps
