"""Methods where ranks of a group share one model (FSDP2), and in loops of Fabric: they do what the simulation does."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_sdiloco import (
    Carry,
    FastestPairs,
    RandomPairs,
    Ring,
    Selective,
    SimulatedGroups,
    StreamingDiLoCo,
    StreamingDiLoCoFabricStrategy,
)
from tests import sharded
from tests.methods import ByMedian, ByNorm, ZScore
from tests.ranks import run_processes, run_ranks
from tests.sharded import whole
from tests.training import batch, inner_optimizer, mlp, train_step

GROUPS, STEPS = 4, 13
CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 1,
    "mixing": 0.25,
    "fragments": [["0.*", "2.*"], ["4.*", "6.*"]],
    "compression": "fp32",
}
PAIRS: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5}
ROUTES: dict[str, dict[str, Any]] = {
    "random": {"route": RandomPairs(), **PAIRS},
    "fastest": {"route": FastestPairs(speeds=(1.0, 3.0, 1.0, 2.0)), **PAIRS},
    "ring": {"route": Ring()},
}
POLICIES: dict[str, dict[str, Any]] = {
    "selective, z-score, carry": {"schedule": Selective(0.4), "weighing": ZScore(warmup=1), "mixing": Carry()},
    "by norm": {"weighing": ByNorm(0.5)},
    "by median": {"weighing": ByMedian()},
}
METHODS = ROUTES | POLICIES

Held = dict[str, list[Tensor]]


def in_simulation(make: Any) -> list[Held]:
    """What each group holds before the end and after it, by method."""
    held: list[Held] = [{} for _ in range(GROUPS)]
    for name, choices in METHODS.items():
        models = [make(0) for _ in range(GROUPS)]
        optimizers = [inner_optimizer("sgd", model) for model in models]
        groups = SimulatedGroups(models, **{**CHOICES, **choices})
        for step in range(1, STEPS + 1):
            for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                train_step(model, optimizer, group, step)
            groups.step()
        for own, model in zip(held, models, strict=True):
            own[name] = [parameter.detach().clone() for parameter in model.parameters()]
        groups.finish()
        for own, model in zip(held, models, strict=True):
            own[name] += [parameter.detach().clone() for parameter in model.parameters()]
    return held


def alike(one: Held, other: Held) -> bool:
    """Whether both hold the same but for the order in which the ranks of a group add up."""
    return all(torch.allclose(a, b, atol=1e-6) for name in METHODS for a, b in zip(one[name], other[name], strict=True))


def in_shards(rank: int, world_size: int) -> Held:
    held: Held = {}
    size = world_size // GROUPS
    for name, choices in METHODS.items():
        model = sharded.even(0)
        mesh = init_device_mesh("cpu", (GROUPS, size), mesh_dim_names=("group", "data"))["data"]
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        engine = StreamingDiLoCo(model, worker_groups=GROUPS, **{**CHOICES, **choices})
        for step in range(1, STEPS + 1):
            x, y = (part.chunk(size)[rank % size] for part in batch(rank // size, step))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            engine.step()
        held[name] = [whole(parameter) for parameter in model.parameters()]
        engine.finish()
        held[name] += [whole(parameter) for parameter in model.parameters()]
    return held


@pytest.mark.timeout(240)
def test_groups_that_share_a_sharded_model_do_what_the_simulation_does() -> None:
    expected = in_simulation(sharded.even)
    for rank, held in enumerate(run_ranks(in_shards, 2 * GROUPS, timeout=200)):
        assert alike(held, expected[rank // 2])


@pytest.mark.timeout(400)
def test_a_sharded_fit_on_a_route_saves_the_mean_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    callbacks = sharded.callbacks_of()
    chosen = {**CHOICES, "fragments": [["*"]], **ROUTES["random"], "compression": "int8"}
    chosen |= {"save_distributed_checkpoint": False}
    fit = partial(sharded.fit, **chosen)
    saving = [callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=6)]
    arguments = (GROUPS, (2, 1), STEPS, sharded.LIGHTNING, "adamw")
    plain = run_processes(fit, 2 * GROUPS, *arguments, saving, timeout=180)
    saved = torch.load(tmp_path / "step=6.ckpt", weights_only=True)["state_dict"]
    shown = {name.removeprefix("outer "): v for name, v in plain[0]["trace"][6].items() if name.startswith("outer ")}
    assert all(torch.equal(saved[name], shown[name]) for name in shown)
    for index, name in enumerate(name for name in saved if name.startswith("net.")):
        # The ranks of a group hold it in parts, the first of them by rows.
        parts = [[plain[2 * group + rank]["trace"][6][name] for rank in range(2)] for group in range(GROUPS)]
        mean = torch.stack([torch.cat(of_group) for of_group in parts]).mean(0)
        assert torch.allclose(saved[name], mean, atol=1e-6), (index, name)
    resumed = run_processes(fit, 2 * GROUPS, *arguments, None, str(tmp_path / "step=6.ckpt"), timeout=180)
    for one, other in zip(resumed, plain, strict=True):
        for step in range(7, STEPS):
            assert all(torch.equal(values, other["trace"][step][name]) for name, values in one["trace"][step].items())
        assert all(torch.equal(values, other["model"][name]) for name, values in one["model"].items())


def in_fabric(rank: int, world_size: int, folder: str) -> tuple[Held, list[bool]]:
    held: Held = {}
    means = []
    for name, choices in METHODS.items():
        strategy = StreamingDiLoCoFabricStrategy(worker_groups=GROUPS, **{**CHOICES, **choices})
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        model, optimizer = fabric.setup(net := mlp(0), inner_optimizer("sgd", net))
        for step in range(1, STEPS + 1):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
        held[name] = [parameter.detach().clone() for parameter in net.parameters()]
        if name in ROUTES:
            path = Path(folder) / f"{name}.ckpt"
            fabric.save(path, {"model": model, "optimizer": optimizer})
            saved = torch.load(path, weights_only=True)["model"]
            with strategy.evaluate():
                means.append(all(torch.equal(saved[key], values) for key, values in net.state_dict().items()))
            means += [torch.equal(a, b) for a, b in zip(held[name], net.parameters(), strict=True)]
        strategy.finish()
        held[name] += [parameter.detach().clone() for parameter in net.parameters()]
    return held, means


@pytest.mark.timeout(240)
def test_loops_of_fabric_do_what_the_simulation_does(tmp_path: Path) -> None:
    expected = in_simulation(mlp)
    for rank, (held, means) in enumerate(run_processes(in_fabric, GROUPS, str(tmp_path), timeout=200)):
        for name in METHODS:
            assert all(map(torch.equal, held[name], expected[rank][name])), name
        # A checkpoint holds what evaluation shows, and neither moves anything.
        assert all(means)
        assert len(means) == 9 * len(ROUTES)
