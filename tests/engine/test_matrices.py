"""Outer steps of whole matrices: against loops, in shards of every kind, and what is refused."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_sdiloco import (
    OuterOptimizer,
    RandomPairs,
    SimulatedGroups,
    StreamingDiLoCo,
    WorkerGroups,
)
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.direction import equalised
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.engine.matrices import DirectionCost, MappedOnce, Matrices, stacks_of
from lightning_sdiloco.engine.shards import layouts_of, local
from tests.algorithm.test_direction import by_decomposition
from tests.bits import same_bits
from tests.engine.groups import Groups, copied, grouped
from tests.engine.test_reference import by_loops
from tests.fits import refusal
from tests.ranks import run_ranks
from tests.training import mlp

EQUALISED = OuterOptimizer(direction="equalised")
CHOICES = {
    "sync_every": 4,
    "overlap_steps": 2,
    "mixing": 0.5,
    "outer_lr": 0.8,
    "outer_momentum": 0.6,
}


def by_decomposition_of_matrices(gradient: Tensor) -> Tensor:
    return by_decomposition(gradient).float() if gradient.ndim == 2 else gradient


def test_the_engine_follows_loops_that_decompose() -> None:
    """Vectors step elementwise, and matrices in the direction of their mean outer gradient."""
    start = copied(mlp().named_parameters())
    fragments = grouped(2)
    direction = by_decomposition_of_matrices
    loops = by_loops("adamw", 2, 18, fragments, **CHOICES, direction=direction)
    choices = {**CHOICES, "compression": "fp32", "outer_optimizer": EQUALISED}
    groups = Groups(2, fragments=fragments, **choices)
    for _ in loops.outers:
        groups.step()
    engine = groups.engines[0]
    for name, actual in engine.outer_state_dict().items():
        expected = loops.outers[-1][name]
        progress = torch.linalg.norm(expected - start[name])
        assert torch.linalg.norm(actual - expected) < 0.02 * progress, name
    landing = engine.history.last_landing
    assert landing is not None
    # Equal singular values with the same sum have a smaller norm.
    assert 0 < landing.direction_norm < landing.outer_grad_norm


class Parts(nn.Module):
    """Has a parameter of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 7, bias=False))
        self.convolution = nn.Conv1d(4, 6, 3, groups=2)
        self.depthwise = nn.Conv2d(5, 5, 3, groups=5)
        self.raised = nn.ConvTranspose2d(4, 3, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
        self.experts = nn.Parameter(torch.zeros(3, 6, 5))
        self.attention = nn.MultiheadAttention(6, 2)
        self.scale = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def test_stacks_of_matrices_are_recognised_in_every_kind_of_layer() -> None:
    stacks = stacks_of(Parts(), {"*.in_proj_weight": 3, "body.1.*": 0})
    assert {name: tuple(stack) for name, stack in stacks.items()} == {
        "embedding.weight": (1, 11, 6),
        "body.0.weight": (1, 8, 6),
        "convolution.weight": (2, 3, 6),
        "raised.weight": (1, 4, 12),
        "normed.parametrizations.weight.original1": (1, 4, 27),
        "experts": (3, 6, 5),
        "attention.in_proj_weight": (3, 6, 6),
        "attention.out_proj.weight": (1, 6, 6),
    }
    compiled = torch.compile(Parts())
    assert list(stacks_of(compiled, {})) == list(stacks_of(Parts(), {}))


def test_a_tied_matrix_is_recognised_once() -> None:
    tied = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    tied[1].weight = tied[0].weight
    assert list(stacks_of(tied, {})) == ["0.weight"]


def test_a_tensor_of_many_modules_is_found_at_once() -> None:
    """A thousand tensors take less than a second."""
    model = nn.Sequential(*(nn.Conv1d(2, 2, 2) for _ in range(1000)))
    assert len(stacks_of(model, {})) == 1000


SHAPES = {
    "a": (9, 4),
    "b": (5,),
    "c": (3, 7),
    "d": (2, 6, 5),
    "e": (13, 13),
    "f": (2, 2),
    "g": (30, 4),
}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(values))


def by_rows(model: Named) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


def by_columns_and_rows(model: Named) -> None:
    """Tensor parallelism along the last dimension of some parameters, and FSDP2 along the first of
    all.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for name in ("a", "d", "e"):
        values = model.get_parameter(name).detach()
        last_dimension = [Shard(values.ndim - 1)]
        sharded = distribute_tensor(values, mesh["tensor"], last_dimension)
        model.register_parameter(name, nn.Parameter(sharded))
    fully_shard(model, mesh=mesh["data"])


def whole(model: nn.Module) -> None:
    """Every rank holds all."""


def full(parameter: Any) -> Tensor:
    values = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return values.detach()


def directed(model: nn.Module) -> None:
    """Replaces matrices by their direction; every rank computes the directions of some of them."""
    topology = WorkerGroups(1).topology
    parameters = dict(model.named_parameters())
    stacks = stacks_of(model, {})
    stack_of_each = tuple(stacks.get(name) for name in SHAPES)
    fragment = Fragment(tuple(SHAPES), (4,) * len(SHAPES), stack_of_each)
    (layout,) = layouts_of([fragment], parameters, topology)
    matrices = Matrices(fragment, layout, EQUALISED.map, topology)
    owners = {matrix.owner for matrix in matrices._dealt}
    assert owners == {0, 1, 2, 3}, "all ranks have something to do"
    gradient = layout.read()
    matrices.direct(gradient, topology.stages[0])
    layout.write(layout.all_gather(gradient, topology.in_group))


@pytest.mark.parametrize("divide", [whole, by_rows, by_columns_and_rows])
def test_the_bits_do_not_depend_on_how_matrices_are_held_and_dealt(
    divide: Callable[[Named], None],
) -> None:
    """Ranks hold unequal parts, some of them nothing of a parameter."""

    def check(rank: int, world_size: int) -> None:
        model = Named()
        divide(model)
        directed(model)
        parameters = dict(model.named_parameters())
        for name, values in Named().named_parameters():
            expected = equalised(values.detach()) if values.ndim > 1 else values.detach()
            assert same_bits(full(parameters[name]), expected), name
            assert local(parameters[name]).numel() <= values.numel()

    run_ranks(check, 4)


# Refusals before training


def halved(name: str, matrices: Tensor) -> Tensor:
    return matrices[:, : matrices.shape[1] // 2]


def rank_dependent(name: str, matrices: Tensor) -> Tensor:
    return matrices * (1 + torch.distributed.get_rank())


def assert_direction_refused(pattern: str, **choices: Any) -> None:
    with pytest.raises(ValueError, match=pattern):
        StreamingDiLoCo(mlp(), outer_optimizer=OuterOptimizer(**choices))


def test_invalid_directions_are_refused() -> None:
    shape = r"\(1, \d+, \d+\)"
    words = rf"returned values of shape {shape} and dtype torch.float32 for float32 matrices"
    assert_direction_refused(words, direction=halved)
    assert_direction_refused("direction='polar' is out of range", direction="polar")
    words = "which does not use matrices. Leave out one of them"
    assert_direction_refused(words, direction="elementwise", matrices={"0.weight": 1})


def test_invalid_matrices_are_refused() -> None:
    def assert_matrices_refused(pattern: str, matrices: Any) -> None:
        assert_direction_refused(pattern, direction="equalised", matrices=matrices)

    words = "'nothing.*', which matches no trainable parameter"
    assert_matrices_refused(words, {"nothing.*": 2})
    assert_matrices_refused("does not fit the parameter '0.weight'", {"0.weight": 3})
    assert_matrices_refused("it must map name patterns", {"0.weight": -1})
    assert_matrices_refused("is of type int", 3)


def test_directions_that_differ_between_ranks_are_refused() -> None:
    def check(rank: int, world_size: int) -> None:
        outer_optimizer = OuterOptimizer(direction=rank_dependent)
        choices = {"worker_groups": 2, "outer_optimizer": outer_optimizer}
        message = refusal(StreamingDiLoCo, mlp(), **choices)
        assert "the direction of" in message
        assert "differ between ranks" in message

    run_ranks(check, 2)


def test_a_direction_of_matrices_is_refused_with_a_route() -> None:
    message = refusal(Settings, route=RandomPairs(), outer_optimizer=EQUALISED)
    assert "direction='equalised' does not work with route" in message


def test_a_run_goes_on_with_the_direction_that_it_began_with() -> None:
    saved = Settings(outer_optimizer=EQUALISED).chosen_for(2).saved()
    assert Settings().taken_from(saved).outer.direction == "equalised"


def test_a_run_that_was_saved_before_there_were_directions_goes_on_elementwise() -> None:
    elementwise = OuterOptimizer(direction="elementwise")
    saved = Settings(outer_optimizer=elementwise).chosen_for(2).saved()
    del saved["outer_optimizer.direction"]
    resumed = Settings().taken_from(saved)
    assert resumed.outer.direction == "elementwise"
    assert resumed.differences(saved) == []
    differing = Settings(outer_optimizer=EQUALISED).taken_from(saved)
    change = "outer_optimizer.direction was elementwise, now it is equalised"
    assert differing.differences(saved) == [change]


def direction_of(model: nn.Module, **choices: Any) -> str:
    return StreamingDiLoCo(model, **choices).rounds.settings.outer.direction


def test_matrices_of_language_models_are_mapped_by_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not with LoRA, and not in models that are large for their device, unless a user asks."""
    language_model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))

    def warnings() -> list[str]:
        return [text for text in caplog.messages if "The outer step is elementwise" in text]

    assert direction_of(language_model) == "equalised"
    adapted = nn.Sequential(deepcopy(language_model).requires_grad_(False), nn.Linear(3, 3))
    regression = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 1))
    for model in (mlp(), regression, adapted):
        settings = StreamingDiLoCo(model).rounds.settings
        assert (settings.outer.direction, settings.outer_lr) == ("elementwise", 0.7)
    assert warnings() == []
    monkeypatch.setattr("lightning_sdiloco.engine.matrices.MOST_VALUES", 50)
    assert direction_of(language_model) == "elementwise"
    (warning,) = warnings()
    assert "more than 50 values" in warning
    assert direction_of(mlp(), outer_optimizer=EQUALISED) == "equalised"
    assert len(warnings()) == 1


def test_simulated_groups_map_a_mean_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[str] = []

    def doubled(name: str, matrices: Tensor) -> Tensor:
        mapped.append(name)
        return 2 * matrices

    def groups_of(count: int) -> SimulatedGroups:
        mapped.clear()
        torch.manual_seed(0)
        models = [nn.Linear(4, 3, bias=False) for _ in range(count)]
        outer = OuterOptimizer(direction=doubled)
        groups = SimulatedGroups(models, sync_every=2, overlap_steps=1, outer_optimizer=outer)
        mapped.clear()  # what agreement at the start mapped
        for step in range(7):
            for number, model in enumerate(models):
                model.weight.data += 0.01 * (1 + number + step)
            groups.step()
        return groups

    groups = groups_of(3)
    assert mapped == ["weight"] * 3
    once = groups.engines[0].outer_state_dict()["weight"]
    monkeypatch.setattr(MappedOnce, "replace", lambda *args: False)
    by_each = groups_of(3).engines[0].outer_state_dict()["weight"]
    assert mapped == ["weight"] * 9
    assert torch.equal(once, by_each)


def test_a_direction_that_is_kept_suits_its_own_mean_alone() -> None:
    once = MappedOnce(groups=3)
    mean = torch.tensor([1.0, 2.0])
    once.keep(mean.clone(), torch.tensor([3.0, 4.0]))
    unlike = torch.tensor([1.0, 2.5])
    assert not once.replace(unlike)
    assert unlike.tolist() == [1.0, 2.5]
    for _ in range(2):
        same = mean.clone()
        assert once.replace(same)
        assert same.tolist() == [3.0, 4.0]
    assert not once.replace(mean.clone()), "nothing is kept once all groups have it"


def test_the_cost_of_a_direction_is_said_once_where_it_is_large(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Outer steps of all fragments count from one landing of the first to the next."""
    cheap = DirectionCost()
    costly = DirectionCost()
    for number in range(6):
        landed = 100.0 + number
        cheap.note(number % 2, landed, mapping_s=0.09)
        costly.note(number % 2, landed, mapping_s=0.11)
    assert len(caplog.messages) == 1
    assert "spends 11 % of the time (0.22 s in each round of 2 s)" in caplog.messages[0]
