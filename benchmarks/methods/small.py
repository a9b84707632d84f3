"""Claims about loss that can be tested with small models: many groups, sampled clients, tables, and
time on a link.
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
from benchmarks.quality import DILOCO
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

CLASSES = 10
FEATURES = 32

# -------------------------------------------------------------------------------------------------
# Classes of points, of which each group or client sees different shares
# -------------------------------------------------------------------------------------------------


class Points:
    """Points around a centre for each class. A Dirichlet distribution decides which classes each
    group sees.
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
    """A non-convex network with 2,762 parameters. Parameters of several networks share tensors, so
    that they are trained at once.
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
    parts = []
    for height, width in ((FEATURES, HIDDEN), (1, HIDDEN), (HIDDEN, CLASSES), (1, CLASSES)):
        part = torch.randn((height, width), generator=random) * (height > 1) / height**0.5
        parts.append(part.repeat(count, 1, 1))
    return parts, [Net([part[number] for part in parts]) for number in range(count)]


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
    """Trains groups that see different classes; evaluates each group's model and the mean of all on
    all classes.
    """
    points = Points(groups, seed)
    x, y = _stacked([points.draw(shares, 2000) for shares in points.shares])
    parts, models = nets(groups, seed)
    simulated = SimulatedGroups(models, **{**DILOCO, **ROUTES[method]}, sync_every=sync_every)
    random = torch.Generator().manual_seed(seed)
    for _ in range(sync_every * rounds):
        picked = torch.randint(x.shape[1], (16,), generator=random)
        _train_at_once(parts, x[:, picked], y[:, picked], lr)
        simulated.step()
    sent = simulated.engines[0].report()["bytes_sent"]
    loss = sum(points.loss(model) for model in models) / groups
    simulated.finish()
    return {"loss": loss, "loss_of_mean": points.loss(models[0]), "bytes": sent / rounds}


def _stacked(points: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in points]), torch.stack([y for _, y in points])


def _train_at_once(parts: Sequence[Tensor], x: Tensor, y: Tensor, lr: float) -> None:
    """Takes a step of SGD with the networks of all groups, each on its own batch."""
    leaves = [part.detach().requires_grad_() for part in parts]
    logits = forward(x, *leaves).flatten(0, 1)
    loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / y.shape[1]
    with torch.no_grad():
        for part, gradient in zip(parts, torch.autograd.grad(loss, leaves), strict=True):
            part.sub_(gradient, alpha=lr)


class Client:
    """Trains a model on a client's points in one round with SGD, as in FedAvg."""

    def __init__(self, points: tuple[Tensor, Tensor], model: Net) -> None:
        self.points = points
        self.model = model

    def batch(self, picked: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.points
        return x[picked], y[picked]

    def step(self, picked: Tensor, is_first: bool, lr: float) -> None:
        _sgd(self.model, *self.batch(picked), lr)

    def end_round(self) -> None:
        """FedAvg adds nothing."""


class GlomoClient(Client):
    """Trains as in FedGLOMO: on the same batches also from the model of the previous round."""

    def __init__(
        self, points: tuple[Tensor, Tensor], model: Net, previous: Net | None, beta: float
    ) -> None:
        super().__init__(points, model)
        self.now = LocalMomentum(model, cross_entropy)
        self.before = None if previous is None else LocalMomentum(previous, cross_entropy)
        self.beta = beta

    @override
    def step(self, picked: Tensor, is_first: bool, lr: float) -> None:
        batch = self.points if is_first else self.batch(picked)
        self.now.step(*batch, lr)
        if self.before is not None:
            self.before.step(*batch, lr)

    @override
    def end_round(self) -> None:
        if self.before is not None:
            self.before.add_to(self.model, 1 - self.beta)


def glomo(
    method: str, lr: float, seed: int, clients: int = 50, rounds: int = 40, steps: int = 5
) -> Numbers:
    """Trains on 5 of many clients in each round, which have different classes and between 20 and
    about 1000 points.

    With FedGLOMO, the first gradient of a client in a round is that of all its points, as in the
    paper.
    """
    points = _points_of_clients(clients, seed)
    random = torch.Generator().manual_seed(seed)
    _, models = nets(5, seed)
    beta = float(method.partition("=")[2] or 1)
    outer = partial(SGD, lr=1.0, momentum=1 - beta)
    simulated = SimulatedGroups(models, **FEDGLOMO, sync_every=steps, outer_optimizer=outer)
    previous: list[Net | None] = [None] * len(models)
    for _ in range(rounds):
        starts: list[Net | None] = [deepcopy(model) for model in models]
        numbers = torch.randperm(clients, generator=random)[:5].tolist()
        sampled = [
            Client(points[number], model)
            if method == "FedAvg"
            else GlomoClient(points[number], model, before, beta)
            for number, model, before in zip(numbers, models, previous, strict=True)
        ]
        for step in range(steps):
            for client in sampled:
                count = len(client.points[1])
                client.step(torch.randint(count, (16,), generator=random), step == 0, lr)
                if step == steps - 1:
                    client.end_round()
            simulated.step()
        previous = starts
    simulated.finish()
    x = torch.cat([x for x, _ in points])
    y = torch.cat([y for _, y in points])
    return {"loss": float(cross_entropy(models[0], x, y).detach())}


def _points_of_clients(clients: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Returns the points of each client with their classes."""
    points = Points(clients, seed)
    normal = torch.randn(clients, generator=torch.Generator().manual_seed(seed))
    sizes = (80 * torch.exp(normal)).clamp(20, 1000)
    return [points.draw(shares, int(n)) for shares, n in zip(points.shares, sizes, strict=True)]


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
    """Predicts a byte from the three bytes before it with tables of two sizes; most of the 0.3
    million parameters are rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Embedding(256, 16)
        self.all = nn.Embedding(ROWS, 16)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 256))

    @override
    def forward(self, context: Tensor) -> Tensor:
        embedded = [self.last(context[:, -1]), self.all(hashed(context))]
        logits: Tensor = self.head(torch.cat(embedded, dim=1))
        return logits


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
    """Trains a model of tables with AdaGrad, like recommender systems; most rows have no gradient
    in a round.
    """
    text = _text().training.text
    random = torch.Generator().manual_seed(seed)
    split = int(0.95 * len(text))
    held_out = _contexts(text[split:], 20_000, random)
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
            context, target = _contexts(text[:split], 256, random)
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


def _contexts(text: Tensor, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws positions in a text, each with three bytes and the byte after them."""
    starts = torch.randint(len(text) - 4, (count, 1), generator=random)
    windows = text[starts + torch.arange(4)].long()
    return windows[:, :3], windows[:, 3]


SCHEDULES: dict[str, dict[str, Any] | None] = {
    "H=1, as DDP": None,
    "H=20": {"sync_every": 20},
    "Selective(0.3, most=4)": {"sync_every": 20, "schedule": Selective(0.3, 4)},
    "H=80": {"sync_every": 80},
}
STEP_SECONDS = 0.1
POINTS = 10


def over_time(method: str, seed: int, budget: float = 4.0, size: Size = SMALL) -> dict[str, Any]:
    """Trains two groups, and simulates the time of each step on a link with half the bandwidth that
    H=20 needs.
    """
    choices = SCHEDULES[method]
    if choices is not None:
        choices = {"overlap_steps": 5, "fragments": CUT, **choices}
    training = Training(size, choices, 2, budget, seed=seed, validation_windows=128)
    text = training.text()
    loop = Loop(training, text)
    losses = dict[int, float]()
    launches = dict[int, tuple[int, ...]]()
    batches = text.batches(seed, 2 * training.batch)
    for step, batch in enumerate(islice(batches, training.steps), 1):
        due = loop.engines[0].rounds.timetable.due(step) if loop.engines else ()
        if due:
            launches[step] = due
        loop.train(*batch)
        if step % (training.steps // POINTS) == 0:
            with loop.engines[0].evaluate() if loop.engines else nullcontext():
                losses[step] = text.loss(loop.model)
    step_ends = _step_ends(size, choices, training.steps, launches)
    points = [(step_ends[step - 1], loss) for step, loss in losses.items()]
    seconds, loss = points[-1]
    return {"loss": loss, "seconds": seconds, "points": points}


def _step_ends(
    size: Size, choices: dict[str, Any] | None, steps: int, launches: dict[int, tuple[int, ...]]
) -> list[float]:
    """Returns when each inner step ends on the link."""
    model = Model.of_parameters(trainable(size.make()))
    groups = Groups(STEP_SECONDS, groups=2)
    plain = Settings(sync_every=20, overlap_steps=5, fragments=CUT)
    gbit_s = Streaming(model, plain, groups).bytes_per_step * 8 / STEP_SECONDS / 1e9
    link = Link(gbit_s=gbit_s / 2, round_trip=0.05)
    if choices is None:
        seconds = STEP_SECONDS / DataParallel(model, groups).utilisation(link)
        return [seconds * step for step in range(1, steps + 1)]
    method = Streaming(model, Settings(**choices), groups)
    return play(method, link, steps, [1.0] * 2, launches=launches)[0].steps
