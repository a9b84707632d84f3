"""Models of any kind: how their values are sharded, against what torch does; wrapped ones are
unwrapped or refused.
"""

import itertools
import re
from functools import partial

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


def test_shards_are_those_of_torch_and_hold_every_value_once() -> None:
    """Of DTensors in all ways, and of FSDP on top of tensor parallelism; other ways are refused on
    all ranks.
    """

    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        group = WorkerGroups(1).topology.in_group
        for shape, placements in itertools.product(SHAPES, PLACEMENTS):
            if any(isinstance(p, Shard) and p.dim >= len(shape) for p in placements):
                continue
            whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
            tensor = distribute_tensor(whole, mesh, placements)
            assert torch.equal(part_of(tensor, whole), tensor.to_local())
            ranks = shard_specs({"it": tensor}, group, range(world_size))["it"]
            own = ranks[rank]
            values = tensor.to_local().reshape(-1)[own.first : own.first + own.length]
            assert torch.equal(own.extract(whole.reshape(-1)), values)
            taken = torch.cat([spec.extract(whole.reshape(-1)) for spec in ranks])
            assert sorted(taken.tolist()) == whole.flatten().tolist(), "every value once"
        for size in range(2, 14):
            torch.manual_seed(0)
            model = nn.Linear(3, size, bias=False)
            whole = model.weight.detach().clone()
            model.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(0)]))
            fully_shard(model, mesh=mesh["data"])
            assert torch.equal(part_of(model.weight, whole), model.weight.to_local())
            specs = shard_specs({"weight": model.weight}, group, range(world_size))["weight"]
            assert sum(spec.length for spec in specs) == 3 * size
        partial = DTensor.from_local(torch.ones(4), mesh["data"], [Partial()])
        # The ranks of one row only hold one half each, those of the other row nothing that fits it.
        missing = distribute_tensor(torch.ones(4), mesh["data"], [Shard(0)])
        for tensor, members, told in (
            (partial, range(4), "no whole values on any rank"),
            (missing, range(1, 4), r"ranks of several worker groups: ranks \[0\] belong to others"),
        ):
            with pytest.raises(ValueError, match=f"'it' cannot be exchanged.*{told}"):
                shard_specs({"it": tensor}, group, members)
        model = nn.Linear(4, 4)
        model.register_buffer("mean", missing)
        with pytest.raises(ValueError, match="The buffer 'mean' is sharded"):
            StreamingDiLoCo(model, worker_groups=1, untrained={"mean": "mean"})

    run_ranks(check, 4)


def test_a_launch_looks_at_every_parameter_once() -> None:
    """However many there are: it runs in the training thread."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(1000)]
    layout = WholeLayout([str(index) for index in range(1000)], parameters)
    looked_at = list[int]()

    def look(parameter: torch.Tensor) -> torch.Tensor:
        looked_at.append(id(parameter))
        return parameter.detach()

    layout._held = look
    assert not layout.outer_gradient(torch.ones(3000)).any()
    assert looked_at == [id(parameter) for parameter in parameters]


def test_outer_state_survives_being_sharded_and_joined() -> None:
    specs = {
        "a": divided([5, 2], [[[(0, 3)], [(0, 2)]], [[(3, 5)], [(0, 2)]]]),
        "b": divided([3], [[[(0, 3)]]] * 2),
    }
    parameters = {
        name: OuterParameter(
            torch.randn(size), {"momentum_buffer": torch.randn(size), "step": torch.tensor(4.0)}, 7
        )
        for name, size in (("a", 10), ("b", 3))
    }
    layouts = [ShardedLayout(["a", "b"], [], list(specs.values()), rank) for rank in range(2)]
    shards = [layout.to_shard(list(parameters.values())) for layout in layouts]
    assert [shard.values.numel() for shard in shards] == [8, 5]
    for name, parameter in to_parameters(layouts[0].state_dict(), shards).items():
        assert torch.equal(parameter.values, parameters[name].values)
        assert torch.equal(
            parameter.state["momentum_buffer"], parameters[name].state["momentum_buffer"]
        )
        assert (parameter.rounds, float(parameter.state["step"])) == (7, 4.0)


NAMES = sorted(dict(mlp().named_parameters()))


def names_of(engine: StreamingDiLoCo) -> list[str]:
    return sorted(name for fragment in engine.fragments for name in fragment.names)


def test_gradients_that_are_averaged_over_all_groups_are_refused_on_every_rank() -> None:
    """A wrapper over the ranks of the group is taken off, and one over fewer is refused."""

    def construct(rank: int, world_size: int) -> None:
        groups = WorkerGroups(2)
        part = nn.Sequential(DistributedDataParallel(mlp()), nn.Linear(3, 3))
        own = "2 and 3" if rank > 1 else "0 and 1"
        whole = DistributedDataParallel(mlp())
        told = refusal(StreamingDiLoCo, whole, worker_groups=2)
        assert f"over ranks 0, 1, 2 and 3, but this rank's worker group is ranks {own}" in told
        assert "process_group=WorkerGroups(2).process_group" in told
        assert refusal(StreamingDiLoCo, torch.compile(whole), worker_groups=2) == told
        assert refusal(StreamingDiLoCo, part, worker_groups=2).startswith(
            "The module '0' of the model"
        )
        assert groups.topology.ranks == range(2 * groups.group_index, 2 * groups.group_index + 2)
        model = DistributedDataParallel(mlp(rank), process_group=groups.process_group)
        told = f"over ranks {own}, but this rank's worker group is ranks 0, 1,"
        assert told in refusal(StreamingDiLoCo, model, worker_groups=1)
        engine = StreamingDiLoCo(model, worker_groups=groups)
        assert engine.topology.ranks == groups.topology.ranks
        ddp = partial(DistributedDataParallel, process_group=groups.process_group)
        wrapped = torch.compile(mlp()), ddp(torch.compile(mlp())), torch.compile(ddp(mlp()))
        names = [
            names_of(one)
            for one in (engine, *(StreamingDiLoCo(own, worker_groups=groups) for own in wrapped))
        ]
        assert names == [NAMES] * 4

    run_ranks(construct, 4)


def test_models_wrapped_by_fabric_keep_the_names_that_the_user_gave() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    plain = fabric.setup(mlp())
    compiled = fabric.setup(torch.compile(mlp()))
    assert next(iter(dict(plain.named_parameters()))).startswith("_forward_module.")
    assert names_of(StreamingDiLoCo(plain)) == names_of(StreamingDiLoCo(compiled)) == NAMES
    model = nn.Module()
    model.module = mlp()
    assert names_of(StreamingDiLoCo(model)) == [f"module.{name}" for name in NAMES], (
        "it is the user's name"
    )


def test_parameters_that_are_sharded_over_all_groups_or_lie_flat_are_refused() -> None:
    def construct(rank: int, world_size: int) -> None:
        sharded = fully_shard(mlp(), mesh=init_device_mesh("cpu", (2,)))
        told = f"'0.weight' is sharded over ranks of several .* a mesh of rank {rank}"
        assert re.search(told, refusal(StreamingDiLoCo, sharded, worker_groups=2))
        flat = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
        assert re.search(
            "FullyShardedDataParallel.*fully_shard", refusal(StreamingDiLoCo, flat, worker_groups=1)
        )

    run_ranks(construct, 2)
