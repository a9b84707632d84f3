"""Fits and loops of Fabric with optimizers that keep their own copy of the weights: the copies are
the same in all groups.
"""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.fabric
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_sdiloco import StreamingDiLoCo, StreamingDiLoCoFabricStrategy
from tests import sharded
from tests.engine.groups import MEAN, regression
from tests.fits import Announced, at, batches, fit, module, on, play, save, unequal
from tests.optimizers import keeper
from tests.ranks import run_ranks
from tests.training import batch, mlp

CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "fragments": 2,
    "compression": "fp32",
    "mixing": 0.5,
}
HOOKS: dict[str, tuple[str, ...]] = {
    "in validation": ("on_validation_start", "on_validation_end", "on_train_start"),
    "at epochs": ("on_validation_epoch_start", "on_train_epoch_start"),
    "around epochs": ("on_train_epoch_end", "on_train_epoch_start"),
}


def flat(net: nn.Module) -> Tensor:
    """A copy of all parameters, as one vector."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in net.parameters()])


def switching(kind: str, where: str, shown: list[Tensor]) -> dict[str, Any]:
    """Members of a module that notes the parameters of validation. Its hooks switch a schedule-free
    optimizer: the first to the values that it shows, the others to training.
    """
    first, *later = HOOKS[where]

    def to_eval(self: Any) -> None:
        self.optimizers().eval()

    def to_train(self: Any) -> None:
        self.optimizers().train()

    def validation_step(self: Any, parts: Any, index: int) -> None:
        shown.append(flat(self.net))
        self.log("loss", self.loss(parts), sync_dist=True)

    members = {
        "configure_optimizers": lambda self: keeper(kind, self.net),
        "validation_step": validation_step,
    }
    if kind == "z":
        members |= {first: to_eval, **dict.fromkeys(later, to_train)}
    return members


def trained(
    rank: int,
    world_size: int,
    kind: str,
    where: str,
    *,
    validates: bool = True,
    groups: int = 2,
    **choices: Any,
) -> dict[str, Any]:
    size = world_size // groups
    shown: list[Tensor] = []
    members = switching(kind, where, shown)
    trainer_choices = {
        "limit_train_batches": 5,
        "limit_val_batches": 1 if validates else 0,
        "num_sanity_val_steps": 0,
        "max_epochs": 3,
        "max_steps": -1,
        **choices.pop("trainer_choices", {}),
    }
    fitted = fit(
        rank,
        world_size,
        groups,
        -1,
        CHOICES,
        make=lambda distribution, inner, seed: module(distribution, inner, seed, **members),
        loader=Announced((rank // size, rank % size, size), 5),
        trainer_choices=trainer_choices,
        validation=batches(7) if validates else None,
        **choices,
    )
    return {**fitted, "shown": shown}


def assert_resumed(ranks: dict[str, list[dict[str, Any]]]) -> None:
    for plain, resumed in zip(ranks["plain"], ranks["resumed"], strict=True):
        assert unequal(resumed["outer"], plain["outer"]) == []
        assert unequal(resumed["model"], ranks["plain"][0]["model"]) == []


@pytest.mark.parametrize("where", HOOKS)
def test_a_schedule_free_fit_shows_the_outer_model_and_ends_alike(where: str) -> None:
    play_case = partial(trained, kind="z", where=where)
    ranks = play(4, {"validated": play_case, "plain": partial(play_case, validates=False)})
    first = ranks["validated"][0]
    for fitted in ranks["validated"]:
        assert unequal(fitted["model"], first["model"]) == []
        assert unequal(fitted["model"], fitted["outer"]) == []
        assert len(fitted["shown"]) == 3
        assert all(map(torch.equal, fitted["shown"], first["shown"]))
    if where != "around epochs":
        # Validation does not change a bit of training, whichever hooks switch.
        assert unequal(first["outer"], ranks["plain"][0]["outer"]) == []


@pytest.mark.parametrize("kind", ["z", "slow", "master"])
def test_a_fit_with_copies_resumes_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    case = partial(trained, kind=kind, where="in validation")
    in_short = {"precision": "bf16-true"} if kind == "master" else {}
    saving = partial(case, trainer_choices={**in_short, "callbacks": [at({7: save(path)})]})
    resumed = partial(case, trainer_choices=in_short, resume=path)
    assert_resumed(play(2, {"plain": saving, "resumed": resumed}))


def in_fabric(rank: int, world_size: int, kind: str) -> tuple[Tensor, Tensor]:
    """The parameters after the first step, and at the end."""
    choices = {**CHOICES, **MEAN, "overlap_steps": 0}
    strategy = StreamingDiLoCoFabricStrategy(worker_groups=2, **choices)
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    # The optimizer copies the weights of this rank, before it takes those of rank 0.
    net = mlp(rank)
    model, optimizer = fabric.setup(net, keeper(kind, net))
    for step in range(1, 7):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        if step == 1:
            after_first = flat(net)
        if kind == "z":
            optimizer.eval()
            with strategy.evaluate():
                pass
            optimizer.train()
    strategy.finish()
    if kind == "z":
        optimizer.eval()
    return after_first, flat(net)


@pytest.mark.parametrize("kind", ["z", "master"])
def test_a_loop_of_fabric_starts_and_ends_with_copies_of_one_model(kind: str) -> None:
    ranks = play(2, {"fabric": partial(in_fabric, kind=kind)})["fabric"]
    (first_of_0, end_of_0), (first_of_1, end_of_1) = ranks
    # One step from the same values, and not from each rank's own.
    assert 0 < float((first_of_0 - first_of_1).abs().max()) < 0.2
    assert torch.equal(end_of_0, end_of_1)


def trained_in_shards(rank: int, world_size: int, kind: str, size: int) -> dict[str, Tensor]:
    """The outer parameters of two groups of this size."""
    model = sharded.even(0)
    group, shard = divmod(rank, size)
    if size > 1:
        mesh = init_device_mesh("cpu", (2, size), mesh_dim_names=("group", "data"))["data"]
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = keeper(kind, model)
    engine = StreamingDiLoCo(model, worker_groups=2, inner_optimizers=[optimizer], **CHOICES)
    for step in range(1, 11):
        optimizer.zero_grad()
        regression(model, group, step, shard, size).backward()
        optimizer.step()
        engine.step()
    with engine.evaluate():
        if kind == "z":
            optimizer.eval()
            optimizer.train()
    engine.finish()
    return engine.outer_state_dict()


def test_copies_of_shards_follow_landings_as_whole_ones_do() -> None:
    for kind in ("z", "slow", "master"):
        expected = run_ranks(trained_in_shards, 2, kind, 1, timeout=60)[0]
        shards = run_ranks(trained_in_shards, 4, kind, 2, timeout=60)
        for outer in shards:
            for name, values in outer.items():
                assert torch.allclose(values, expected[name], atol=1e-5)


@pytest.mark.parametrize("where", ["in validation", "at epochs"])
def test_a_checkpoint_saved_while_the_optimizer_shows_its_average_resumes_exactly(
    where: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"

    def save_once(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(path)

    case = partial(trained, kind="z", where=where)
    saving = partial(case, trainer_choices={"callbacks": [on(on_validation_end=save_once)]})
    resumed = partial(case, resume=path)
    assert_resumed(play(2, {"plain": saving, "resumed": resumed}))


@pytest.mark.parametrize("kind", ["z", "master"])
def test_copies_begin_as_the_outer_model_where_rounds_restart(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    distances: dict[int, float] = {}

    def note_distance(trainer: Any, module: Any, *args: Any) -> None:
        """Notes once for each step how far the copies are from the parameters."""
        distance = distance_of_copies(module.net, trainer.optimizers[0].state, kind)
        distances.setdefault(trainer.global_step, distance)

    case = partial(trained, kind=kind, where="in validation")
    play(2, {"saved": partial(case, trainer_choices={"callbacks": [at({7: save(path)})]})})
    restarted = partial(
        case,
        trainer_choices={"callbacks": [on(on_train_batch_start=note_distance)]},
        resume=path,
        inspect=lambda *_: distances,
        groups=4,
    )
    ranks = play(4, {"restarted": restarted})["restarted"]
    for fitted in ranks:
        assert fitted["inspected"][7] == 0.0
        assert unequal(fitted["model"], ranks[0]["model"]) == []


def distance_of_copies(net: nn.Module, state: Any, kind: str) -> float:
    """The largest distance between a parameter and its copy.

    Groups that had no file have no z yet.
    """
    key = "z" if kind == "z" else "master"
    distances = [0.0]
    for parameter in net.parameters():
        if key in state[parameter]:
            distances.append(float((parameter - state[parameter][key]).abs().max()))
    return max(distances)
