"""Models that something else has wrapped: refused where worker groups would train together, unwrapped otherwise."""

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco import StreamingDiLoCo, WorkerGroups
from tests.ranks import run_ranks
from tests.training import mlp

NAMES = sorted(dict(mlp().named_parameters()))


def names_of(engine: StreamingDiLoCo) -> list[str]:
    return sorted(name for fragment in engine.fragments for name in fragment.names)


def test_gradients_that_are_averaged_over_all_groups_are_refused_on_every_rank() -> None:
    def construct(rank: int, world_size: int) -> list[str]:
        part = nn.Sequential(DistributedDataParallel(mlp()), nn.Linear(3, 3))
        texts = []
        for model in (DistributedDataParallel(mlp()), torch.compile(DistributedDataParallel(mlp())), part):
            with pytest.raises(ValueError, match="DistributedDataParallel") as caught:
                StreamingDiLoCo(model, worker_groups=2)
            texts.append(str(caught.value))
        return texts

    for rank, texts in enumerate(run_ranks(construct, 4)):
        whole, compiled, part = texts
        own = "2 and 3" if rank > 1 else "0 and 1"
        assert f"over ranks 0, 1, 2 and 3, and the worker group of this rank is ranks {own}" in whole
        assert "process_group=WorkerGroups(2).process_group" in whole
        assert compiled == whole
        assert part.startswith("The module '0' of the model")


def test_a_wrapper_over_the_ranks_of_the_group_is_taken_off() -> None:
    def construct(rank: int, world_size: int) -> list[str]:
        groups = WorkerGroups(2)
        assert groups.topology.ranks == range(2 * groups.group_index, 2 * groups.group_index + 2)
        model = DistributedDataParallel(mlp(rank), process_group=groups.process_group)
        engine = StreamingDiLoCo(model, worker_groups=groups)
        assert engine.topology is groups.topology
        return names_of(engine)

    assert run_ranks(construct, 4) == [NAMES] * 4


def test_a_wrapper_over_fewer_ranks_than_the_group_is_refused() -> None:
    def construct(rank: int, world_size: int) -> None:
        alone = WorkerGroups(2)
        with pytest.raises(ValueError, match=f"over rank {rank}, and the worker group of this rank is ranks 0 and 1"):
            StreamingDiLoCo(DistributedDataParallel(mlp(), process_group=alone.process_group), worker_groups=1)

    run_ranks(construct, 2)


def test_what_fabric_wraps_has_the_names_that_the_user_gave() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    plain, compiled = fabric.setup(mlp()), fabric.setup(torch.compile(mlp()))
    assert next(iter(dict(plain.named_parameters()))).startswith("_forward_module.")
    assert names_of(StreamingDiLoCo(plain)) == names_of(StreamingDiLoCo(compiled)) == NAMES


def test_what_a_user_calls_module_keeps_its_name() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = mlp()

    assert names_of(StreamingDiLoCo(Model())) == [f"module.{name}" for name in NAMES]


def test_parameters_that_are_sharded_over_all_groups_are_refused() -> None:
    def construct(rank: int, world_size: int) -> None:
        with pytest.raises(ValueError, match=f"'0.weight' is sharded over ranks of several .* a mesh of rank {rank}"):
            StreamingDiLoCo(fully_shard(mlp(), mesh=init_device_mesh("cpu", (2,))), worker_groups=2)

    run_ranks(construct, 2)


def test_parameters_that_lie_flat_are_refused() -> None:
    def construct(rank: int, world_size: int) -> None:
        model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match="FullyShardedDataParallel.*fully_shard"):
            StreamingDiLoCo(model, worker_groups=1)

    run_ranks(construct, 2)
