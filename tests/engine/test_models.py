"""Models of any kind: their values are sharded as torch does it; wrapped ones are unwrapped or
refused.
"""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco import StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.engine.shards import (
    OuterParameter,
    ShardedLayout,
    WholeLayout,
    divided,
    part_of,
    shard_specs,
    to_parameters,
)
from tests.fits import refusal
from tests.ranks import run_ranks
from tests.training import mlp

SHAPES = [(1,), (3,), (7,), (8,), (5, 3), (2, 9), (1, 1), (3, 2, 5)]
PLACEMENTS = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))


def fits_shape(placements: Any, shape: tuple[int, ...]) -> bool:
    sharded = [placement for placement in placements if isinstance(placement, Shard)]
    return all(placement.dim < len(shape) for placement in sharded)


CASES = [case for case in itertools.product(SHAPES, PLACEMENTS) if fits_shape(case[1], case[0])]
RANKS = range(4)


def two_by_two() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def specs_of(parameter: Any, group: Any, ranks: range = RANKS) -> list[Any]:
    """The shard of each rank of a parameter."""
    return list(shard_specs({"it": parameter}, group, ranks)["it"])


def test_shards_of_tensors_are_those_of_torch_and_hold_every_value_once() -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = two_by_two()
        group = WorkerGroups(1).topology.in_group
        for shape, placements in CASES:
            flat = torch.arange(float(torch.Size(shape).numel()))
            full = flat.view(shape)
            tensor = distribute_tensor(full, mesh, placements)
            local = tensor.to_local()
            assert torch.equal(part_of(tensor, full), local)
            specs = specs_of(tensor, group)
            spec = specs[rank]
            values = local.reshape(-1)[spec.first : spec.first + spec.length]
            assert torch.equal(spec.extract(flat), values)
            joined = torch.cat([spec.extract(flat) for spec in specs])
            assert sorted(joined.tolist()) == flat.tolist(), "every value once"

    run_ranks(check, 4)


def test_shards_of_fsdp_on_top_of_tensor_parallelism_are_those_of_torch() -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = two_by_two()
        group = WorkerGroups(1).topology.in_group
        for size in range(2, 14):
            torch.manual_seed(0)
            model = nn.Linear(3, size, bias=False)
            full = model.weight.detach().clone()
            model.weight = nn.Parameter(distribute_tensor(full, mesh["tensor"], [Shard(0)]))
            fully_shard(model, mesh=mesh["data"])
            assert torch.equal(part_of(model.weight, full), model.weight.to_local())
            assert sum(spec.length for spec in specs_of(model.weight, group)) == 3 * size

    run_ranks(check, 4)


def test_tensors_that_no_group_holds_whole_are_refused_on_all_ranks() -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = two_by_two()["data"]
        group = WorkerGroups(1).topology.in_group
        partial_sums = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        error = "'it' cannot be exchanged.*"
        with pytest.raises(ValueError, match=f"{error}no rank has complete values"):
            specs_of(partial_sums, group)
        # The ranks of one row only hold one half each, those of the other row nothing that fits it.
        missing = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        words = r"over multiple worker groups, because ranks \[0\] belong to other groups"
        with pytest.raises(ValueError, match=f"{error}{words}"):
            specs_of(missing, group, range(1, 4))
        model = nn.Linear(4, 4)
        model.register_buffer("mean", missing)
        with pytest.raises(ValueError, match="The buffer 'mean' is sharded"):
            StreamingDiLoCo(model, worker_groups=1, untrained={"mean": "mean"})

    run_ranks(check, 4)


def test_a_launch_looks_at_every_parameter_once() -> None:
    """However many there are: it runs in the training thread."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(1000)]
    layout = WholeLayout([str(index) for index in range(1000)], parameters)
    looked_at = []

    def look(parameter: torch.Tensor) -> torch.Tensor:
        looked_at.append(id(parameter))
        return parameter.detach()

    layout._held = look
    assert not layout.outer_gradient(torch.ones(3000)).any()
    assert looked_at == [id(parameter) for parameter in parameters]


def outer_parameter(size: int) -> OuterParameter:
    state = {"momentum_buffer": torch.randn(size), "step": torch.tensor(4.0)}
    return OuterParameter(torch.randn(size), state, 7)


def test_outer_state_survives_being_sharded_and_joined() -> None:
    specs = [
        divided([5, 2], [[[(0, 3)], [(0, 2)]], [[(3, 5)], [(0, 2)]]]),
        divided([3], [[[(0, 3)]]] * 2),
    ]
    parameters = {"a": outer_parameter(10), "b": outer_parameter(3)}
    layouts = [ShardedLayout(["a", "b"], [], specs, rank) for rank in range(2)]
    shards = [layout.to_shard(list(parameters.values())) for layout in layouts]
    assert [shard.values.numel() for shard in shards] == [8, 5]
    for name, joined in to_parameters(layouts[0].state_dict(), shards).items():
        expected = parameters[name]
        momentum = joined.state["momentum_buffer"]
        assert torch.equal(joined.values, expected.values)
        assert torch.equal(momentum, expected.state["momentum_buffer"])
        assert (joined.rounds, float(joined.state["step"])) == (7, 4.0)


NAMES = sorted(dict(mlp().named_parameters()))


def names_of(engine: StreamingDiLoCo) -> list[str]:
    return sorted(name for fragment in engine.fragments for name in fragment.names)


def refusal_of(model: nn.Module, worker_groups: int) -> str:
    return refusal(StreamingDiLoCo, model, worker_groups=worker_groups)


def ranks_of_group(rank: int) -> str:
    return "2 and 3" if rank > 1 else "0 and 1"


def test_gradients_that_are_averaged_over_all_groups_are_refused_on_every_rank() -> None:
    def construct(rank: int, world_size: int) -> None:
        averaged = DistributedDataParallel(mlp())
        message = refusal_of(averaged, 2)
        words = f"over ranks 0, 1, 2 and 3, but this rank's worker group is ranks {ranks_of_group(rank)}"
        assert words in message
        assert "process_group=WorkerGroups(2).process_group" in message
        assert refusal_of(torch.compile(averaged), 2) == message
        partly_averaged = nn.Sequential(DistributedDataParallel(mlp()), nn.Linear(3, 3))
        assert refusal_of(partly_averaged, 2).startswith("The module '0' of the model")

    run_ranks(construct, 4)


def test_a_wrapper_over_a_groups_ranks_is_taken_off_and_one_over_fewer_is_refused() -> None:
    def construct(rank: int, world_size: int) -> None:
        groups = WorkerGroups(2)
        first = 2 * groups.group_index
        assert groups.topology.ranks == range(first, first + 2)
        ddp = partial(DistributedDataParallel, process_group=groups.process_group)
        model = ddp(mlp(rank))
        words = f"over ranks {ranks_of_group(rank)}, but this rank's worker group is ranks 0, 1,"
        assert words in refusal_of(model, 1)
        engine = StreamingDiLoCo(model, worker_groups=groups)
        assert engine.topology.ranks == groups.topology.ranks
        assert names_of(engine) == NAMES
        for wrapped in (torch.compile(mlp()), ddp(torch.compile(mlp())), torch.compile(ddp(mlp()))):
            assert names_of(StreamingDiLoCo(wrapped, worker_groups=groups)) == NAMES

    run_ranks(construct, 4)


def test_models_wrapped_by_fabric_keep_the_names_that_the_user_gave() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    plain = fabric.setup(mlp())
    compiled = fabric.setup(torch.compile(mlp()))
    first_name, _ = next(plain.named_parameters())
    assert first_name.startswith("_forward_module.")
    assert names_of(StreamingDiLoCo(plain)) == names_of(StreamingDiLoCo(compiled)) == NAMES
    model = nn.Module()
    model.module = mlp()
    users_names = [f"module.{name}" for name in NAMES]
    assert names_of(StreamingDiLoCo(model)) == users_names


def test_parameters_that_are_sharded_over_all_groups_or_lie_flat_are_refused() -> None:
    def construct(rank: int, world_size: int) -> None:
        sharded = fully_shard(mlp(), mesh=init_device_mesh("cpu", (2,)))
        words = f"'0.weight' is sharded over multiple .* a mesh of rank {rank}"
        with pytest.raises(ValueError, match=words):
            StreamingDiLoCo(sharded, worker_groups=2)
        flat = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match="FullyShardedDataParallel.*fully_shard"):
            StreamingDiLoCo(flat, worker_groups=1)

    run_ranks(construct, 2)
