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
    """A wrapper over the ranks of the group is taken off, and one over fewer is refused."""

    def construct(rank: int, world_size: int) -> tuple[list[str], list[str]]:
        part = nn.Sequential(DistributedDataParallel(mlp()), nn.Linear(3, 3))
        texts = []
        for model in (DistributedDataParallel(mlp()), torch.compile(DistributedDataParallel(mlp())), part):
            with pytest.raises(ValueError, match="DistributedDataParallel") as caught:
                StreamingDiLoCo(model, worker_groups=2)
            texts.append(str(caught.value))
        groups = WorkerGroups(2)
        assert groups.topology.ranks == range(2 * groups.group_index, 2 * groups.group_index + 2)
        model = DistributedDataParallel(mlp(rank), process_group=groups.process_group)
        with pytest.raises(ValueError, match="over ranks . and ., and the worker group of this rank is ranks 0, 1,"):
            StreamingDiLoCo(model, worker_groups=1)
        engine = StreamingDiLoCo(model, worker_groups=groups)
        assert engine.topology is groups.topology
        return texts, names_of(engine)

    for rank, (texts, names) in enumerate(run_ranks(construct, 4)):
        whole, compiled, part = texts
        own = "2 and 3" if rank > 1 else "0 and 1"
        assert f"over ranks 0, 1, 2 and 3, and the worker group of this rank is ranks {own}" in whole
        assert "process_group=WorkerGroups(2).process_group" in whole
        assert compiled == whole
        assert part.startswith("The module '0' of the model")
        assert names == NAMES


def test_what_fabric_wraps_has_the_names_that_the_user_gave() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    plain, compiled = fabric.setup(mlp()), fabric.setup(torch.compile(mlp()))
    assert next(iter(dict(plain.named_parameters()))).startswith("_forward_module.")
    assert names_of(StreamingDiLoCo(plain)) == names_of(StreamingDiLoCo(compiled)) == NAMES
    model = nn.Module()
    model.module = mlp()
    assert names_of(StreamingDiLoCo(model)) == [f"module.{name}" for name in NAMES], "it is the user's name"


def test_parameters_that_are_sharded_over_all_groups_or_lie_flat_are_refused() -> None:
    def construct(rank: int, world_size: int) -> None:
        with pytest.raises(ValueError, match=f"'0.weight' is sharded over ranks of several .* a mesh of rank {rank}"):
            StreamingDiLoCo(fully_shard(mlp(), mesh=init_device_mesh("cpu", (2,))), worker_groups=2)
        with pytest.raises(ValueError, match="FullyShardedDataParallel.*fully_shard"):
            StreamingDiLoCo(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")), worker_groups=1)

    run_ranks(construct, 2)
