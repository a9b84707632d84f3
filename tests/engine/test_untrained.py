"""State that no optimizer trains: buffers of every kind, and frozen parameters that code moves."""

from collections.abc import Callable
from copy import deepcopy
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.optim import SGD, Optimizer

from lightning_sdiloco import RandomPairs, Ring, SimulatedGroups, StreamingDiLoCo, WorkerGroups
from tests.bits import same_bits
from tests.engine.groups import Values, copied, through_a_file, unlike
from tests.ranks import run_ranks
from tests.training import train_step

CHOICES = {
    "sync_every": 4,
    "overlap_steps": 2,
    "compression": "fp32",
    "fragments": 2,
}


class Attention(nn.Module):
    """One head with a causal mask of minus infinity, as many a GPT has."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("mask", torch.full((length, length), -inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5 + self.mask
        return x + scores.softmax(-1) @ value


def holder(**buffers: Tensor) -> nn.Module:
    """A module of some buffers."""
    module = nn.Module()
    for name, values in buffers.items():
        module.register_buffer(name, values)
    return module


class Stateful(nn.Module):
    """A network with state of every kind beside its parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.teacher = deepcopy(self.net).requires_grad_(False)
        self.codebook = holder(codes=torch.randn(4, 3))
        self.counts = holder(
            steps=torch.zeros(()),
            whole=torch.zeros((), dtype=torch.int64),
            best=torch.tensor(inf),
        )
        self.constants = holder(
            mask=torch.tensor([[0.0, -inf], [0.0, 0.0]]),
            exact=torch.tensor([0.1, 16777217.0, 3e38], dtype=torch.float64),
            thirds=torch.rand(4096),
            places=torch.arange(7),
            allowed=torch.tensor([True, False]),
        )
        self.moving = holder(average=torch.zeros(3))
        self.queue = holder(
            features=normalize(torch.randn(22_000, 3), dim=1),
            place=torch.zeros((), dtype=torch.int64),
        )

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
        codes = self.codebook.codes
        nearest = torch.cdist(y, codes).argmin(dim=1)
        for code in nearest.unique():
            mean = y[nearest == code].mean(dim=0)
            codes[code] = 0.9 * codes[code] + 0.1 * mean
        self.counts.steps += 1
        self.counts.whole += 1
        self.counts.best = torch.minimum(self.counts.best, y.square().mean())
        # As code does that binds a buffer anew.
        self.moving.average = 0.9 * self.moving.average + 0.1 * y.mean(dim=0)
        places = (int(self.queue.place) + torch.arange(len(y))) % len(self.queue.features)
        self.queue.features[places] = normalize(y, dim=1)
        self.queue.place += len(y)


def sgd(model: nn.Module, lr: float = 0.05) -> Optimizer:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


class Run:
    """Simulated groups of a model, and what trains it."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Stateful,
        groups: int = 2,
        lr: float = 0.05,
        **choices: Any,
    ) -> None:
        self.models = [make() for _ in range(groups)]
        self.groups = SimulatedGroups(self.models, **{**CHOICES, **choices})
        self.optimizers = [sgd(model, lr) for model in self.models]
        self.steps = 0

    def until(self, step: int) -> "Run":
        while self.steps < step:
            self.steps += 1
            for group, model in enumerate(self.models):
                train_step(model, self.optimizers[group], group, self.steps)
            self.groups.step()
        return self

    def finish(self) -> "Run":
        self.groups.finish()
        return self

    def shown(self, group: int, mean: Any = None) -> Values:
        with self.groups.engines[group].evaluate(mean):
            return copied(self.models[group].state_dict())

    def local(self) -> list[Values]:
        return [copied(model.state_dict()) for model in self.models]

    def bytes_sent(self) -> int:
        return self.groups.engines[0].report()["bytes_sent"]

    def saved(self) -> list[Any]:
        return through_a_file([engine.state_dict() for engine in self.groups.engines])

    def load(self, run: "Run") -> "Run":
        """Takes up another run from its checkpoint."""
        for engine, state in zip(self.groups.engines, run.saved(), strict=True):
            engine.load_state_dict(state)
        for optimizer, trained in zip(self.optimizers, run.optimizers, strict=True):
            optimizer.load_state_dict(deepcopy(trained.state_dict()))
        self.steps = run.steps
        return self


def values(run: Run, name: str) -> list[Tensor]:
    return [state[name] for state in run.local()]


def shown_values(run: Run, name: str, mean: Any = None) -> list[Tensor]:
    return [run.shown(group, mean)[name] for group in range(len(run.models))]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def assert_same_states(run: Run, expected: Run) -> None:
    for state, expected_state in zip(run.local(), expected.local(), strict=True):
        assert unlike(state, expected_state) == []


@pytest.mark.parametrize("mixing", [0.0, 0.2, 1.0])
def test_an_infinite_mask_leaves_a_model_finite_and_keeps_its_bits(mixing: float) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), Attention(8, 8), nn.Linear(8, 3))

    run = Run(make, mixing=mixing).until(11).finish()
    expected = torch.full((8, 8), -inf).triu(1)
    for model in run.models:
        assert torch.equal(model[1].mask, expected)
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_values_that_are_infinite_in_a_mean_are_exchanged_elementwise() -> None:
    def make() -> nn.Module:
        model = nn.Linear(5, 3)
        model.register_buffer("lowest", torch.tensor([inf, -inf, 0.0]))
        return model

    for mixing in (0.0, 0.5, 1.0):
        run = Run(make, mixing=mixing, fragments=1, untrained={"lowest": "mean"})
        for group, model in enumerate(run.models):
            model.lowest[2] = 2.0 + 2 * group
        run.until(9).finish()
        assert [model.lowest.tolist() for model in run.models] == [[inf, -inf, 3.0]] * 2


def test_constants_of_any_dtype_keep_their_bits_and_never_travel() -> None:
    run = Run(groups=3).until(13)
    constants = copied(Stateful().constants.state_dict())
    shown = [run.shown(group) for group in range(3)]
    run.finish()
    for model, values in zip(run.models, shown, strict=True):
        assert unlike(copied(model.constants.state_dict()), constants) == []
        for name, expected in constants.items():
            assert torch.equal(values[f"constants.{name}"], expected)

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))

    def with_constants() -> nn.Module:
        model = plain()
        model.register_buffer("table", torch.rand(1000, dtype=torch.float64))
        return model

    without, with_table = (Run(make).until(28).finish() for make in (plain, with_constants))
    assert without.bytes_sent() == with_table.bytes_sent() > 0


def test_counters_count_every_step_in_training_in_validation_and_at_the_end() -> None:
    run = Run().until(24)
    for group, model in enumerate(run.models):
        shown = run.shown(group)
        for name in ("counts.steps", "counts.whole", "net.1.num_batches_tracked"):
            assert model.state_dict()[name] == shown[name] == 24
    run.finish()
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
    """Groups may hold alike by chance, or after a warm-up, what follows from the weights alone."""
    run = Run(overlap_steps=0, mixing=0.0, fragments=1).until(7)
    for group, model in enumerate(run.models):
        buffer = model.state_dict()[name].view(-1)
        buffer[:2] = buffer[:2] / 512 + 1
        buffer[3:] += group
    # A constant that has changed by the launch after step 8 travels with that after step 12.
    run.until(landed)
    agreed = run.shown(0)[name]
    run.models[1].state_dict()[name].view(-1)[:2] = 0
    assert_equal(shown_values(run, name), [agreed, agreed])


def test_unit_vectors_stay_unit_in_training_and_in_validation() -> None:
    normed = nn.utils.parametrizations.spectral_norm

    def make() -> nn.Module:
        torch.manual_seed(0)
        old = nn.utils.spectral_norm(nn.Linear(6, 4))
        return nn.Sequential(normed(nn.Linear(5, 6)), old, nn.Linear(4, 3))

    run = Run(make, sync_every=6).until(15)
    for engine, model in zip(run.groups.engines, run.models, strict=True):
        with engine.evaluate():
            model.eval()
            lengths = [vector.norm() for vector in model.buffers()]
            torch.testing.assert_close(lengths, [torch.tensor(1.0)] * 4)
            for layer in (model[0], model[1]):
                largest = torch.linalg.matrix_norm(layer.weight.detach(), 2)
                assert 0.9 < float(largest) < 1.1
            model.train()


def test_a_large_queue_is_each_groups_own_and_ends_as_that_of_the_first() -> None:
    run = Run().until(15)
    queues = values(run, "queue.features")
    assert not torch.equal(*queues)
    for queue in queues:
        assert torch.allclose(queue.norm(dim=1), torch.ones(len(queue)))
    assert run.bytes_sent() < queues[0].numel()
    run.finish()
    assert_equal(values(run, "queue.features"), [queues[0], queues[0]])
    assert torch.equal(*values(run, "queue.place"))


def test_a_small_queue_keeps_its_lengths_and_is_that_of_the_first_group() -> None:
    def make() -> nn.Module:
        model = Stateful()
        model.queue.features = normalize(torch.randn(6, 3), dim=1)
        return model

    run = Run(make, overlap_steps=0, fragments=1).until(12)
    queues = values(run, "queue.features")
    assert torch.equal(*queues)
    torch.testing.assert_close(queues[1].norm(dim=1), torch.ones(6))


def test_codes_and_statistics_of_own_layers_agree_after_a_landing() -> None:
    run = Run(overlap_steps=0, mixing=0.0, fragments=1).until(12)
    for name in ("codebook.codes", "moving.average", "counts.best", "net.1.running_mean"):
        assert torch.equal(*values(run, name)), name
        assert torch.equal(*shown_values(run, name))
    run.until(15)
    assert not torch.equal(*values(run, "codebook.codes"))
    assert torch.equal(*shown_values(run, "codebook.codes"))
    run.finish()
    assert unlike(*run.local()) == []


def test_a_rebound_buffer_is_exchanged_shown_and_restored() -> None:
    run = Run().until(15)
    local = values(run, "moving.average")
    shown = shown_values(run, "moving.average")
    assert torch.equal(*shown)
    assert not torch.equal(shown[1], local[1])
    assert_equal(values(run, "moving.average"), local)


def test_a_buffer_that_changes_its_shape_stays_each_groups_own_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run().until(3)
    for group, model in enumerate(run.models):
        model.codebook.register_buffer("codes", torch.full((5 + group, 3), float(group)))
    run.until(12).finish()
    assert [len(model.codebook.codes) for model in run.models] == [5, 6]
    assert (
        "'codebook.codes' had the shape (4, 3) and outer values of torch.float32 when"
        in caplog.text
    )


class Rebound(nn.Module):
    """Binds its buffer to a value of another dtype than it had at first."""

    seen: Tensor

    def __init__(self, first: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.dtype = dtype
        self.register_buffer("seen", first)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
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
    run = Run(lambda: Rebound(first.clone(), dtype)).until(12).finish()
    seen, seen_by_group_1 = values(run, "seen")
    assert seen.dtype == seen_by_group_1.dtype == dtype
    assert torch.equal(seen, seen_by_group_1) == is_exchanged
    assert ("'seen' had the shape" in caplog.text) != is_exchanged


def test_a_frozen_teacher_is_each_groups_own_and_that_of_the_first_is_shown_and_left() -> None:
    run = Run().until(14)
    teachers = values(run, "teacher.0.weight")
    assert not torch.equal(*teachers)
    assert all(engine.fragmented_model.view.own_moved for engine in run.groups.engines)
    mean = run.groups.group_mean()
    assert_equal(shown_values(run, "teacher.0.weight", mean), [teachers[0], teachers[0]])
    assert torch.equal(values(run, "teacher.0.weight")[1], teachers[1])
    run.finish()
    assert torch.equal(values(run, "teacher.0.weight")[1], teachers[0])


class Unset(nn.Linear):
    """Has constants that are not finite, and more buffers that change than have a bit each."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        for number in range(64):
            self.register_buffer(f"changes{number}", torch.zeros(2))
        self.register_buffer("unset", torch.full((2,), nan))
        self.register_buffer("one", torch.tensor(nan))


@pytest.mark.parametrize("choices", [{}, {"route": RandomPairs()}])
def test_a_constant_that_is_not_finite_is_not_said_to_be_left_out(
    choices: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(Unset, groups=4, fragments=1, **choices)
    for step in range(1, 11):
        for model in run.models:
            model.changes63.add_(1)
        run.until(step)
    run.finish()
    for model in run.models:
        assert model.unset.isnan().all()
        assert model.one.isnan()
    assert "Non-finite" not in caplog.text


@pytest.mark.parametrize(
    "choices", [{}, {"route": RandomPairs(), "outer_lr": 0.7}, {"route": Ring(accelerated=False)}]
)
def test_all_groups_know_alike_that_one_of_them_has_moved_its_teacher(
    choices: dict[str, Any],
) -> None:
    run = Run(groups=5, outer_momentum=0.5, **choices)
    for model in run.models[1:]:
        model._move = lambda y: None  # only the first group's teacher follows its student
    moved_by_step = []
    for step in range(1, 15):
        run.until(step)
        moved = {engine.fragmented_model.view.own_moved for engine in run.groups.engines}
        assert len(moved) == 1
        moved_by_step += moved
    assert not moved_by_step[0]
    assert moved_by_step[-1]


def test_a_teacher_that_is_named_a_mean_is_averaged_with_its_fragment() -> None:
    untrained = {"teacher.*weight": "mean"}
    run = Run(overlap_steps=0, mixing=0.0, fragments=1, untrained=untrained).until(12)
    assert torch.equal(*values(run, "teacher.0.weight"))
    assert not torch.equal(*values(run, "teacher.2.bias"))


@pytest.mark.parametrize("kind", ["mean", "first"])
def test_a_travelling_teacher_is_its_groups_own_again_after_validation_and_resume(
    kind: str,
) -> None:
    untrained = {"teacher.*weight": kind}
    run = Run(untrained=untrained).until(15)
    teachers = values(run, "teacher.0.weight")
    assert not torch.equal(*teachers)
    assert torch.equal(*shown_values(run, "teacher.0.weight"))
    assert_equal(values(run, "teacher.0.weight"), teachers)
    resumed = Run(untrained=untrained).load(run)
    assert_equal(values(resumed, "teacher.0.weight"), teachers)
    ended = Run(untrained=untrained).load(run.finish())
    assert_equal(values(ended, "teacher.0.weight"), teachers)


def test_a_group_whose_values_are_not_a_number_is_not_the_first() -> None:
    run = Run(overlap_steps=0, mixing=0.0, fragments=1).until(10)
    codes = [model.codebook.codes for model in run.models]
    codes[0].fill_(nan)
    sent = codes[1].clone()
    run.groups.step()
    run.groups.step()
    assert_equal(values(run, "codebook.codes"), [sent, sent])


def assert_kinds_refused(pattern: str, untrained: Any) -> None:
    with pytest.raises(ValueError, match=pattern):
        StreamingDiLoCo(Stateful(), untrained=untrained)


def test_kinds_that_cannot_be_are_refused_before_training() -> None:
    assert_kinds_refused("matches no buffer or frozen parameter", {"nothing.*": "own"})
    assert_kinds_refused("matches the trainable parameter 'net.0.weight'", {"net.0.*": "own"})
    words = r"torch\.int64 values cannot be averaged"
    assert_kinds_refused(words, {"counts.whole": "mean"})
    words = "it must map name patterns to 'mean', 'first' or 'own'"
    assert_kinds_refused(words, {"counts.*": "median"})
    assert_kinds_refused("of type str: it must map name patterns", "own")


def test_groups_resume_bit_for_bit_with_state_of_every_kind() -> None:
    run = Run().until(9)
    resumed = Run().load(run)
    for step in (10, 15):
        assert_same_states(resumed.until(step), run.until(step))
    assert_same_states(resumed.finish(), run.finish())


class Bank(nn.Module):
    """Begins with zeros, which have a mean, and is filled with vectors of length one, which have
    none.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)
        self.register_buffer("features", torch.zeros(3, 4, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.features.copy_(normalize(y[:4].T, dim=1))
        return y


def filled_bank() -> nn.Module:
    model = Bank()
    model.features.copy_(normalize(torch.ones(3, 4), dim=1))
    return model


def test_a_kind_that_followed_from_the_first_values_stays_in_a_resumed_run() -> None:
    """The Trainer makes the engine when the model holds the values of the checkpoint already."""
    run = Run(Bank).until(9)
    state = run.saved()[0]
    resumed = Run(filled_bank).load(run)
    assert_same_states(resumed.until(15).finish(), run.until(15).finish())
    named = Run(filled_bank, untrained={"features": "first"})
    words = "was saved as untrained state of the kind 'mean', but its kind is now 'first'"
    with pytest.raises(ValueError, match=words):
        named.groups.engines[0].load_state_dict(state)


class Stages(NamedTuple):
    """The states of a model that a rank shows, trains and ends with."""

    shown: Values
    local: Values
    final: Values


def stages(joined: WorkerGroups, path: Path, resumes: bool) -> Stages:
    """Trains, saves after nine steps or resumes from there, shows the model and finishes."""
    model = Stateful()
    optimizer = sgd(model)
    engine = StreamingDiLoCo(model, worker_groups=joined, inner_optimizers=[optimizer], **CHOICES)
    if resumes:
        engine.load(path)
    for step in range(10 if resumes else 1, 16):
        train_step(model, optimizer, joined.group_index, step)
        engine.step()
        if step == 9:
            engine.save(path)
    view = engine.fragmented_model.view
    with view.shown(own=view.first_own()):
        shown = copied(model.state_dict())
    local = copied(model.state_dict())
    engine.finish()
    return Stages(shown, local, copied(model.state_dict()))


@pytest.mark.parametrize(("ranks", "groups"), [(2, 2), (4, 2), (4, 4)])
def test_real_ranks_show_end_and_resume_alike_with_state_of_every_kind(
    ranks: int, groups: int, tmp_path: Path
) -> None:
    def play(rank: int, world_size: int) -> Stages:
        joined = WorkerGroups(groups)
        uninterrupted = stages(joined, tmp_path / "saved.ckpt", resumes=False)
        resumed = stages(joined, tmp_path / "saved.ckpt", resumes=True)
        for state, expected in zip(resumed, uninterrupted, strict=True):
            assert unlike(state, expected) == []
        return uninterrupted

    of_ranks = run_ranks(play, ranks, timeout=120)
    first = of_ranks[0]
    for of_rank in of_ranks:
        assert unlike(of_rank.shown, first.shown) == []
        assert unlike(of_rank.final, first.final) == []
    teacher = "teacher.0.weight"
    assert not torch.equal(first.local[teacher], of_ranks[-1].local[teacher])


REBOUND = [
    torch.full((3,), 9.0),
    torch.full((2,), 9.0, dtype=torch.float64),
    torch.full((2,), 9),
]


def rebound_queue(rank: int, values: Tensor) -> Tensor:
    """The queue at the end of a training in which group 1 binds it to other values."""
    model = nn.Linear(5, 3)
    model.register_buffer("queue", torch.zeros(2))
    optimizer = sgd(model)
    engine = StreamingDiLoCo(model, worker_groups=2, untrained={"queue": "own"}, **CHOICES)
    for step in range(1, 8):
        train_step(model, optimizer, rank, step)
        model.queue = values.clone() if rank else torch.full((2,), 1.0)
        engine.step()
    view = engine.fragmented_model.view
    with view.shown(own=view.first_own()):
        pass
    engine.finish()
    return model.queue


def test_a_group_keeps_a_buffer_that_it_rebinds_in_another_shape_or_dtype_to_the_end() -> None:
    def play(rank: int, world_size: int) -> None:
        for values in REBOUND:
            expected = values if rank else torch.full((2,), 1.0)
            assert same_bits(rebound_queue(rank, values), expected)

    run_ranks(play, 2)
