"""State that no optimizer trains: buffers of every kind, and frozen parameters that code moves."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import RandomPairs, Ring, SimulatedGroups, StreamingDiLoCo, WorkerGroups
from tests.engine.groups import copied, through_a_file, unlike
from tests.ranks import run_ranks
from tests.training import batch

CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "compression": "fp32",
    "fragments": 2,
}
INFINITE = float("inf")


class Attention(nn.Module):
    """One head with a causal mask of minus infinity, as many a GPT has."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("mask", torch.full((length, length), -INFINITE).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5 + self.mask
        return x + scores.softmax(-1) @ value


class Stateful(nn.Module):
    """A network with state of every kind beside its parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.teacher = deepcopy(self.net).requires_grad_(False)
        self.codebook = nn.Module()
        self.codebook.register_buffer("codes", torch.randn(4, 3))
        self.counts = nn.Module()
        self.counts.register_buffer("steps", torch.zeros(()))
        self.counts.register_buffer("whole", torch.zeros((), dtype=torch.int64))
        self.counts.register_buffer("best", torch.tensor(INFINITE))
        self.constants = nn.Module()
        self.constants.register_buffer("mask", torch.tensor([[0.0, -INFINITE], [0.0, 0.0]]))
        self.constants.register_buffer(
            "exact", torch.tensor([0.1, 16777217.0, 3e38], dtype=torch.float64)
        )
        self.constants.register_buffer("thirds", torch.rand(4096))
        self.constants.register_buffer("places", torch.arange(7))
        self.constants.register_buffer("allowed", torch.tensor([True, False]))
        self.moving = nn.Module()
        self.moving.register_buffer("average", torch.zeros(3))
        self.queue = nn.Module()
        self.queue.register_buffer(
            "features", nn.functional.normalize(torch.randn(70_000, 3), dim=1)
        )
        self.queue.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        if self.training:
            self._move(y.detach())
        return y

    @torch.no_grad()
    def _move(self, y: Tensor) -> None:
        pairs = zip(self.teacher.parameters(), self.net.parameters(), strict=True)
        for teacher, student in pairs:
            teacher.data.mul_(0.9).add_(0.1 * student.data)
        nearest = torch.cdist(y, self.codebook.codes).argmin(dim=1)
        for code in nearest.unique():
            mean = y[nearest == code].mean(dim=0)
            self.codebook.codes[code] = 0.9 * self.codebook.codes[code] + 0.1 * mean
        self.counts.steps += 1
        self.counts.whole += 1
        self.counts.best = torch.minimum(self.counts.best, y.square().mean())
        # As code does that binds a buffer anew.
        self.moving.average = 0.9 * self.moving.average + 0.1 * y.mean(dim=0)
        places = (int(self.queue.place) + torch.arange(len(y))) % len(self.queue.features)
        self.queue.features[places] = nn.functional.normalize(y, dim=1)
        self.queue.place += len(y)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, group: int, step: int) -> None:
    x, y = batch(group, step)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


class Run:
    """Simulated groups of a model, and what trains it."""

    def __init__(
        self, make: Callable[[], nn.Module] = Stateful, groups: int = 2, **choices: Any
    ) -> None:
        self.models: list[Any] = [make() for _ in range(groups)]
        self.groups = SimulatedGroups(self.models, **{**CHOICES, **choices})
        self.optimizers = [
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
            for model in self.models
        ]
        self.steps = 0

    def until(self, step: int) -> "Run":
        while self.steps < step:
            self.steps += 1
            for group, model in enumerate(self.models):
                trained(model, self.optimizers[group], group, self.steps)
            self.groups.step()
        return self

    def shown(self, group: int, mean: Any = None) -> dict[str, Tensor]:
        with self.groups.engines[group].evaluate(mean):
            return copied(self.models[group].state_dict())


def values(run: Run, name: str) -> list[Tensor]:
    return [model.state_dict()[name].clone() for model in run.models]


@pytest.mark.parametrize("mixing", [0.0, 0.2, 1.0])
def test_an_infinite_mask_leaves_a_model_finite_and_keeps_its_bits(mixing: float) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), Attention(8, 8), nn.Linear(8, 3))

    run = Run(make, mixing=mixing).until(11)
    run.groups.finish()
    expected = torch.full((8, 8), -INFINITE).triu(1)
    for model in run.models:
        assert torch.equal(model[1].mask, expected)
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_values_that_are_infinite_in_a_mean_are_exchanged_elementwise() -> None:
    def make() -> nn.Module:
        model = nn.Linear(5, 3)
        model.register_buffer("lowest", torch.tensor([INFINITE, -INFINITE, 0.0]))
        return model

    for mixing in (0.0, 0.5, 1.0):
        run = Run(make, mixing=mixing, fragments=1, untrained={"lowest": "mean"})
        for group, model in enumerate(run.models):
            model.lowest[2] = 2.0 + 2 * group
        run.until(9)
        run.groups.finish()
        assert [model.lowest.tolist() for model in run.models] == [[INFINITE, -INFINITE, 3.0]] * 2


def test_constants_of_any_dtype_keep_their_bits_and_never_travel() -> None:
    run = Run(groups=3).until(13)
    constants = copied(Stateful().constants.state_dict())
    shown = [run.shown(group) for group in range(3)]
    run.groups.finish()
    for group, model in enumerate(run.models):
        assert unlike(copied(model.constants.state_dict()), constants) == []
        assert all(
            torch.equal(shown[group][f"constants.{name}"], kept) for name, kept in constants.items()
        )

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))

    def with_constants() -> nn.Module:
        model = plain()
        model.register_buffer("table", torch.rand(1000, dtype=torch.float64))
        return model

    runs = [Run(make).until(28) for make in (plain, with_constants)]
    for run in runs:
        run.groups.finish()
    without, with_table = (run.groups.engines[0].report()["bytes_sent"] for run in runs)
    assert without == with_table > 0


def test_counters_count_every_step_in_training_in_validation_and_at_the_end() -> None:
    run = Run().until(24)
    for group, model in enumerate(run.models):
        shown = run.shown(group)
        for name in ("counts.steps", "counts.whole", "net.1.num_batches_tracked"):
            assert model.state_dict()[name] == shown[name] == 24
    run.groups.finish()
    assert [int(model.counts.steps) for model in run.models] == [24, 24]


@pytest.mark.parametrize(
    ("name", "landed"),
    [
        ("constants.exact", 12),
        ("constants.thirds", 12),
        ("constants.places", 12),
        ("counts.best", 8),
    ],
)
def test_state_that_groups_once_held_alike_is_shown_alike_after_it_diverges(
    name: str, landed: int
) -> None:
    """As by chance, or after a warm-up, what follows from the weights alone."""
    run = Run(overlap_steps=0, mixing=0.0, fragments=1).until(7)
    for group, model in enumerate(run.models):
        held = model.state_dict()[name].view(-1)
        held[:2] = held[:2] / 512 + 1
        held[3:] += group
    # A constant that has changed by the launch after step 8 travels with that after step 12.
    run.until(landed)
    agreed = run.shown(0)[name]
    run.models[1].state_dict()[name].view(-1)[:2] = 0
    shown = [run.shown(group)[name] for group in range(2)]
    assert torch.equal(*shown)
    assert torch.equal(shown[0], agreed)


def test_unit_vectors_stay_unit_in_training_and_in_validation() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        old = nn.utils.spectral_norm(nn.Linear(6, 4))
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), old, nn.Linear(4, 3)
        )

    run = Run(make, sync_every=6).until(15)
    for group, model in enumerate(run.models):
        with run.groups.engines[group].evaluate():
            model.eval()
            vectors = [buffer for _, buffer in model.named_buffers()]
            assert len(vectors) == 4
            torch.testing.assert_close(
                [vector.norm() for vector in vectors], [torch.tensor(1.0)] * 4
            )
            largest = [
                torch.linalg.matrix_norm(layer.weight.detach(), 2) for layer in (model[0], model[1])
            ]
            assert all(0.9 < float(value) < 1.1 for value in largest)
            model.train()


def test_a_large_queue_is_each_groups_own_and_ends_as_that_of_the_first() -> None:
    run = Run().until(15)
    queues = values(run, "queue.features")
    assert not torch.equal(*queues)
    assert all(torch.allclose(queue.norm(dim=1), torch.ones(len(queue))) for queue in queues)
    assert run.groups.engines[0].report()["bytes_sent"] < queues[0].numel()
    run.groups.finish()
    assert torch.equal(*values(run, "queue.features"))
    assert torch.equal(values(run, "queue.features")[1], queues[0])
    assert torch.equal(*values(run, "queue.place"))


def test_a_small_queue_keeps_its_lengths_and_is_that_of_the_first_group() -> None:
    def make() -> nn.Module:
        model = Stateful()
        model.queue.features = nn.functional.normalize(torch.randn(6, 3), dim=1)
        return model

    run = Run(make, overlap_steps=0, fragments=1).until(12)
    queues = values(run, "queue.features")
    assert torch.equal(*queues)
    torch.testing.assert_close(queues[1].norm(dim=1), torch.ones(6))


def test_codes_and_statistics_of_own_layers_agree_after_a_landing() -> None:
    run = Run(overlap_steps=0, mixing=0.0, fragments=1).until(12)
    for name in ("codebook.codes", "moving.average", "counts.best", "net.1.running_mean"):
        assert torch.equal(*values(run, name)), name
        assert torch.equal(run.shown(0)[name], run.shown(1)[name])
    run.until(15)
    assert not torch.equal(*values(run, "codebook.codes"))
    assert torch.equal(run.shown(0)["codebook.codes"], run.shown(1)["codebook.codes"])
    run.groups.finish()
    assert unlike(copied(run.models[0].state_dict()), copied(run.models[1].state_dict())) == []


def test_a_rebound_buffer_is_exchanged_shown_and_restored() -> None:
    run = Run().until(15)
    local = values(run, "moving.average")
    shown = [run.shown(group)["moving.average"] for group in range(2)]
    assert torch.equal(*shown)
    assert not torch.equal(shown[1], local[1])
    assert [
        torch.equal(*pair) for pair in zip(values(run, "moving.average"), local, strict=True)
    ] == [True, True]


def test_a_buffer_that_changes_its_shape_stays_each_groups_own_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run().until(3)
    for group, model in enumerate(run.models):
        model.codebook.register_buffer("codes", torch.full((5 + group, 3), float(group)))
    run.until(12)
    run.groups.finish()
    assert [len(model.codebook.codes) for model in run.models] == [5, 6]
    assert (
        "'codebook.codes' had the shape (4, 3) and outer values of torch.float32 when"
        in caplog.text
    )


class Rebound(nn.Module):
    """Binds its buffer to a value of another dtype than it had at first."""

    def __init__(self, first: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.dtype = dtype
        self.register_buffer("seen", first)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.seen = y.detach().abs().mean().to(self.dtype).expand(self.seen.shape).clone()
        return y


@pytest.mark.parametrize(
    ("first", "dtype", "is_exchanged"),
    [
        (torch.zeros(()), torch.bfloat16, True),
        (torch.zeros(2), torch.bfloat16, True),
        (torch.zeros(2), torch.float64, False),
        (torch.tensor(0), torch.float32, False),
    ],
    ids=str,
)
def test_a_buffer_that_changes_its_dtype_is_exchanged_where_outer_values_can_hold_it(
    first: Tensor, dtype: torch.dtype, is_exchanged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(lambda: Rebound(first.clone(), dtype)).until(12)
    run.groups.finish()
    one, other = values(run, "seen")
    assert one.dtype == other.dtype == dtype
    assert torch.equal(one, other) == is_exchanged
    assert ("'seen' had the shape" in caplog.text) != is_exchanged


def test_a_frozen_teacher_is_each_groups_own_and_that_of_the_first_is_shown_and_left() -> None:
    run = Run().until(14)
    teachers = values(run, "teacher.0.weight")
    assert not torch.equal(*teachers)
    assert all(engine.view.own_moved for engine in run.groups.engines)
    mean = run.groups.group_mean()
    assert [
        torch.equal(run.shown(group, mean)["teacher.0.weight"], teachers[0]) for group in range(2)
    ] == [True, True]
    assert torch.equal(values(run, "teacher.0.weight")[1], teachers[1])
    run.groups.finish()
    assert torch.equal(values(run, "teacher.0.weight")[1], teachers[0])


def test_a_constant_that_is_not_finite_is_not_said_to_be_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make() -> nn.Module:
        model = nn.Linear(5, 3)
        for number in range(64):  # more than have a bit of their own
            model.register_buffer(f"changes{number}", torch.zeros(2))
        model.register_buffer("unset", torch.full((2,), float("nan")))
        model.register_buffer("one", torch.tensor(float("nan")))
        return model

    for choices in ({}, {"route": RandomPairs()}):
        run = Run(make, groups=4, **{**choices, "fragments": 1})
        for step in range(1, 11):
            for model in run.models:
                model.changes63.add_(1)
            run.until(step)
        run.groups.finish()
        assert all(model.unset.isnan().all() and model.one.isnan() for model in run.models)
    assert "not finite" not in caplog.text


@pytest.mark.parametrize(
    "choices", [{}, {"route": RandomPairs(), "outer_lr": 0.7}, {"route": Ring(accelerated=False)}]
)
def test_all_groups_know_alike_that_one_of_them_has_moved_its_teacher(
    choices: dict[str, Any],
) -> None:
    run = Run(groups=5, outer_momentum=0.5, **choices)
    for group, model in enumerate(run.models):
        # Only the first group's follows its student.
        model._move = model._move if group == 0 else lambda y: None
    known = [
        {engine.view.own_moved for engine in run.until(step).groups.engines}
        for step in range(1, 15)
    ]
    assert known[0] == {False}
    assert known[-1] == {True}
    assert all(len(of_step) == 1 for of_step in known)


def test_a_teacher_that_is_named_a_mean_is_averaged_with_its_fragment() -> None:
    run = Run(
        overlap_steps=0, mixing=0.0, fragments=1, untrained={"teacher.*weight": "mean"}
    ).until(12)
    assert torch.equal(*values(run, "teacher.0.weight"))
    assert not torch.equal(*values(run, "teacher.2.bias"))


@pytest.mark.parametrize("kind", ["mean", "first"])
def test_a_travelling_teacher_is_its_groups_own_again_after_validation_and_resume(
    kind: str,
) -> None:
    run, resumed = (Run(untrained={"teacher.*weight": kind}) for _ in range(2))
    teachers = values(run.until(15), "teacher.0.weight")
    assert not torch.equal(*teachers)
    shown = [run.shown(group)["teacher.0.weight"] for group in range(2)]
    assert torch.equal(*shown)
    states = [engine.state_dict() for engine in run.groups.engines]
    for engine, state in zip(resumed.groups.engines, states, strict=True):
        engine.load_state_dict(through_a_file(state))
    for one in (run, resumed):
        held = values(one, "teacher.0.weight")
        assert [torch.equal(*pair) for pair in zip(held, teachers, strict=True)] == [True, True]
    run.groups.finish()
    ended = Run(untrained={"teacher.*weight": kind})
    for engine, finished in zip(ended.groups.engines, run.groups.engines, strict=True):
        engine.load_state_dict(through_a_file(finished.state_dict()))
    held = values(ended, "teacher.0.weight")
    assert [torch.equal(*pair) for pair in zip(held, teachers, strict=True)] == [True, True]


def test_a_group_whose_values_are_not_a_number_is_not_the_first() -> None:
    run = Run(overlap_steps=0, mixing=0.0, fragments=1).until(10)
    run.models[0].codebook.codes.fill_(float("nan"))
    sent = run.models[1].codebook.codes.clone()
    run.groups.step()
    run.groups.step()
    assert torch.equal(run.models[1].codebook.codes, sent)
    assert torch.equal(run.models[0].codebook.codes, sent)


@pytest.mark.parametrize(
    ("untrained", "told"),
    [
        ({"nothing.*": "own"}, "matches no buffer and no frozen parameter"),
        ({"net.0.*": "own"}, "names the trainable parameter 'net.0.weight'"),
        ({"counts.whole": "mean"}, r"its values are torch\.int64, which have no mean"),
        ({"counts.*": "median"}, "it must map patterns of names to 'mean', 'first' or 'own'"),
        ("own", "of type str: it must map patterns"),
    ],
)
def test_kinds_that_cannot_be_are_refused_before_training(untrained: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        StreamingDiLoCo(Stateful(), untrained=untrained)


def test_groups_resume_bit_for_bit_with_state_of_every_kind() -> None:
    run = Run().until(9)
    saved = through_a_file([engine.state_dict() for engine in run.groups.engines])
    inner = deepcopy([optimizer.state_dict() for optimizer in run.optimizers])
    resumed = Run()
    for engine, state in zip(resumed.groups.engines, saved, strict=True):
        engine.load_state_dict(state)
    for optimizer, state in zip(resumed.optimizers, inner, strict=True):
        optimizer.load_state_dict(state)
    resumed.steps = 9
    for step in (10, 15):
        run.until(step)
        resumed.until(step)
        for model, other in zip(run.models, resumed.models, strict=True):
            assert unlike(copied(model.state_dict()), copied(other.state_dict())) == []
    run.groups.finish()
    resumed.groups.finish()
    for model, other in zip(run.models, resumed.models, strict=True):
        assert unlike(copied(model.state_dict()), copied(other.state_dict())) == []


class Bank(nn.Module):
    """Begins with zeros, of which there is a mean, and is filled with vectors of length one, of
    which there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)
        self.register_buffer("features", torch.zeros(3, 4, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        with torch.no_grad():
            self.features.copy_(nn.functional.normalize(y[:4].T, dim=1))
        return y


def test_a_kind_that_followed_from_the_first_values_stays_in_a_resumed_run() -> None:
    """The Trainer makes the engine when the model holds those of the checkpoint already."""
    run = Run(Bank).until(9)
    saved = through_a_file([engine.state_dict() for engine in run.groups.engines])
    inner = deepcopy([optimizer.state_dict() for optimizer in run.optimizers])

    def filled() -> nn.Module:
        model = Bank()
        model.features.copy_(nn.functional.normalize(torch.ones(3, 4), dim=1))
        return model

    resumed = Run(filled)
    for engine, state in zip(resumed.groups.engines, saved, strict=True):
        engine.load_state_dict(state)
    for optimizer, state in zip(resumed.optimizers, inner, strict=True):
        optimizer.load_state_dict(state)
    resumed.steps = 9
    for one in (run, resumed):
        one.until(15).groups.finish()
    for model, other in zip(run.models, resumed.models, strict=True):
        assert unlike(copied(model.state_dict()), copied(other.state_dict())) == []
    named = Run(filled, untrained={"features": "first"})
    with pytest.raises(
        ValueError, match="was saved as untrained state of the kind 'mean', and is 'first' now"
    ):
        named.groups.engines[0].load_state_dict(saved[0])


def train_as_ranks(
    rank: int, world_size: int, groups: int, path: str
) -> Sequence[dict[str, Tensor]]:
    """Trains, shows the model, saves and finishes, and does so again from the file; returns all
    that was seen.
    """
    seen = list[dict[str, Tensor]]()
    joined = WorkerGroups(groups)
    for resumes in (False, True):
        model = Stateful()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        engine = StreamingDiLoCo(
            model, worker_groups=joined, inner_optimizers=[optimizer], **CHOICES
        )
        if resumes:
            engine.load(path)
        for step in range(10 if resumes else 1, 16):
            trained(model, optimizer, joined.group_index, step)
            engine.step()
            if step == 9:
                engine.save(path)
        with engine.evaluate(own=engine.first_own()):
            seen.append(copied(model.state_dict()))
        seen.append(copied(model.state_dict()))
        engine.finish()
        seen.append(copied(model.state_dict()))
    return seen


@pytest.mark.parametrize(("ranks", "groups"), [(2, 2), (4, 2), (4, 4)])
def test_real_ranks_show_end_and_resume_alike_with_state_of_every_kind(
    ranks: int, groups: int, tmp_path: Any
) -> None:
    seen = run_ranks(train_as_ranks, ranks, groups, str(tmp_path / "saved.ckpt"), timeout=120)
    for shown, local, final, *again in seen:
        for before, after in zip((shown, local, final), again, strict=True):
            assert unlike(before, after) == []
        assert unlike(shown, seen[0][0]) == []
        assert unlike(final, seen[0][2]) == []
    assert not torch.equal(seen[0][1]["teacher.0.weight"], seen[-1][1]["teacher.0.weight"])


def test_a_group_keeps_a_buffer_that_it_rebinds_in_another_shape_or_dtype_to_the_end() -> None:
    def play(rank: int, world_size: int) -> list[list[Any]]:
        kept = []
        for bound in (
            torch.full((3,), 9.0),
            torch.full((2,), 9.0, dtype=torch.float64),
            torch.full((2,), 9),
        ):
            model: Any = nn.Linear(5, 3)
            model.register_buffer("queue", torch.zeros(2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            choices: dict[str, Any] = {**CHOICES, "untrained": {"queue": "own"}, "worker_groups": 2}
            engine = StreamingDiLoCo(model, **choices)
            for step in range(1, 8):
                trained(model, optimizer, rank, step)
                model.queue = bound.clone() if rank else torch.full((2,), 1.0)
                engine.step()
            with engine.evaluate(own=engine.first_own()):
                pass
            engine.finish()
            kept.append([model.queue.tolist(), str(model.queue.dtype)])
        return kept

    ours, theirs = run_ranks(play, 2)
    assert ours == [[[1.0, 1.0], "torch.float32"]] * 3
    assert theirs == [
        [[9.0] * 3, "torch.float32"],
        [[9.0] * 2, "torch.float64"],
        [[9, 9], "torch.int64"],
    ]
