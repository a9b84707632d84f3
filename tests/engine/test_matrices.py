"""Outer steps of whole matrices: against loops, in shards of every kind, and what is refused."""

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_sdiloco import OuterOptimizer, RandomPairs, StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.direction import equalised
from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.engine.matrices import Matrices, stacks_of
from lightning_sdiloco.engine.shards import layouts_of, local
from tests.algorithm.test_direction import by_decomposition
from tests.bits import same_bits
from tests.engine.groups import Groups, copied, grouped
from tests.engine.test_reference import by_loops
from tests.fits import refusal
from tests.ranks import run_ranks
from tests.training import mlp

EQUALISED = OuterOptimizer(direction="equalised")
CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "mixing": 0.5,
    "outer_lr": 0.8,
    "outer_momentum": 0.6,
}


def test_the_engine_follows_loops_that_decompose() -> None:
    """Vectors step elementwise, and matrices in the direction of their mean outer gradient."""

    def direction(gradient: Tensor) -> Tensor:
        return by_decomposition(gradient).float() if gradient.ndim == 2 else gradient

    start = copied(mlp().named_parameters())
    loops = by_loops("adamw", 2, 18, grouped(2), **CHOICES, direction=direction)
    groups = Groups(
        2, compression="fp32", fragments=grouped(2), outer_optimizer=EQUALISED, **CHOICES
    )
    for _ in loops.outers:
        groups.step()
    engine = groups.engines[0]
    for name, actual in engine.outer_state_dict().items():
        expected = loops.outers[-1][name]
        moved = torch.linalg.norm(expected - start[name])
        assert torch.linalg.norm(actual - expected) < 0.02 * moved, name
    assert engine.last_landing is not None
    # Equal singular values with the same sum have a smaller norm.
    assert 0 < engine.last_landing.direction_norm < engine.last_landing.outer_grad_norm


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
    stacks = {
        name: tuple(stack)
        for name, stack in stacks_of(Parts(), {"*.in_proj_weight": 3, "body.1.*": 0}).items()
    }
    assert stacks == {
        "embedding.weight": (1, 11, 6),
        "body.0.weight": (1, 8, 6),
        "convolution.weight": (2, 3, 6),
        "raised.weight": (1, 4, 12),
        "normed.parametrizations.weight.original1": (1, 4, 27),
        "experts": (3, 6, 5),
        "attention.in_proj_weight": (3, 6, 6),
        "attention.out_proj.weight": (1, 6, 6),
    }
    tied = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    tied[1].weight = tied[0].weight
    assert list(stacks_of(tied, {})) == ["0.weight"], "a tied one once"
    wrapped = torch.compile(Parts())
    assert list(stacks_of(wrapped, {})) == list(stacks_of(Parts(), {}))


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
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def by_rows(model: Named) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


def by_columns_and_rows(model: Named) -> None:
    """Tensor parallelism along the last dimension of some parameters, and FSDP2 along the first of
    all.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for name in ("a", "d", "e"):
        values = getattr(model, name).detach()
        setattr(
            model,
            name,
            nn.Parameter(distribute_tensor(values, mesh["tensor"], [Shard(values.ndim - 1)])),
        )
    fully_shard(model, mesh=mesh["data"])


def whole(model: nn.Module) -> None:
    """Every rank holds all."""


@pytest.mark.parametrize("divide", [whole, by_rows, by_columns_and_rows])
def test_the_bits_do_not_depend_on_how_matrices_are_held_and_dealt(
    divide: Callable[[Named], None],
) -> None:
    """Ranks hold unequal parts, some of them nothing of a parameter."""

    def check(rank: int, world_size: int) -> None:
        expected = {
            name: equalised(values) if values.ndim > 1 else values
            for name, values in copied(Named().named_parameters()).items()
        }
        model = Named()
        divide(model)
        topology = WorkerGroups(1).topology
        stacks = stacks_of(model, {})
        parameters = dict(model.named_parameters())
        fragment = Fragment(
            tuple(SHAPES), (4,) * len(SHAPES), tuple(stacks.get(name) for name in SHAPES)
        )
        (layout,) = layouts_of([fragment], parameters, topology)
        matrices = Matrices(fragment, layout, EQUALISED.map, topology)
        owners = {matrix.owner for matrix in matrices._dealt}
        assert owners == set(range(world_size)), "all ranks have something to do"
        gradient = layout.read()
        matrices.direct(gradient, topology.stages[0])
        layout.write(layout.all_gather(gradient, topology.in_group))
        for name, parameter in parameters.items():
            held: Any = parameter
            values = held.full_tensor() if hasattr(held, "full_tensor") else held
            assert same_bits(values.detach(), expected[name]), name
            assert local(parameter).shape.numel() <= values.numel()

    run_ranks(check, 4)


# What is refused, before training


def halved(name: str, matrices: Tensor) -> Tensor:
    return matrices[:, : matrices.shape[1] // 2]


def rank_dependent(name: str, matrices: Tensor) -> Tensor:
    return matrices * (1 + torch.distributed.get_rank())


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        (
            {"direction": halved},
            r"returned values of shape \(1, \d+, \d+\) and torch.float32 for float32 matrices",
        ),
        (
            {"direction": "equalised", "matrices": {"nothing.*": 2}},
            "'nothing.*', which names no trainable parameter",
        ),
        (
            {"direction": "equalised", "matrices": {"0.weight": 3}},
            "does not suit the parameter '0.weight'",
        ),
        (
            {"direction": "equalised", "matrices": {"0.weight": -1}},
            "is not possible: it must map patterns",
        ),
        ({"direction": "equalised", "matrices": 3}, "is of type int"),
        (
            {"direction": "elementwise", "matrices": {"0.weight": 1}},
            "which knows none. Leave one of them out",
        ),
        ({"direction": "polar"}, "direction='polar' is out of range"),
    ],
)
def test_invalid_directions_are_refused(outer: dict[str, Any], told: str) -> None:
    assert re.search(
        told, refusal(lambda: StreamingDiLoCo(mlp(), outer_optimizer=OuterOptimizer(**outer)))
    )


def test_routes_and_ranks_that_disagree_are_refused() -> None:
    def check(rank: int, world_size: int) -> None:
        told = refusal(
            StreamingDiLoCo,
            mlp(),
            worker_groups=2,
            outer_optimizer=OuterOptimizer(direction=rank_dependent),
        )
        assert "the direction of" in told
        assert "differ between ranks" in told

    run_ranks(check, 2)
    route = {"route": RandomPairs(), "outer_optimizer": EQUALISED}
    assert "direction='equalised' does not work with route" in refusal(Settings, **route)


def test_a_run_goes_on_with_the_direction_that_it_began_with() -> None:
    saved = Settings(outer_optimizer=EQUALISED).chosen_for(2).saved()
    assert Settings().taken_from(saved).outer.direction == "equalised"
    elementwise = OuterOptimizer(direction="elementwise")
    earlier = Settings(outer_optimizer=elementwise).chosen_for(2).saved()
    del earlier["outer_optimizer.direction"]
    taken = Settings().taken_from(earlier)
    assert taken.outer.direction == "elementwise", "it was saved before there were directions"
    assert taken.differences(earlier) == []
    asked = Settings(outer_optimizer=EQUALISED).taken_from(earlier)
    told = asked.differences(earlier)
    assert told == ["outer_optimizer.direction was elementwise, now it is equalised"]


def test_matrices_of_language_models_are_mapped_by_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not with LoRA, and not in models that are large for their device, unless somebody asks."""
    language_model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))

    def warnings() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if "treats every value by itself" in message]

    assert StreamingDiLoCo(language_model).settings.outer.direction == "equalised"
    adapted = nn.Sequential(deepcopy(language_model).requires_grad_(False), nn.Linear(3, 3))
    for model in (mlp(), nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 1)), adapted):
        settings = StreamingDiLoCo(model).settings
        assert (settings.outer.direction, settings.outer_lr) == ("elementwise", 0.7)
    assert not warnings()
    monkeypatch.setattr("lightning_sdiloco.engine.matrices.MOST_VALUES", 50)
    assert StreamingDiLoCo(language_model).settings.outer.direction == "elementwise"
    assert "more than 50 values" in warnings()[-1]
    assert StreamingDiLoCo(mlp(), outer_optimizer=EQUALISED).settings.outer.direction == "equalised"
    assert len(warnings()) == 1
