"""Fits and loops of Fabric with optimizers that keep their own copy of the weights, in all groups
alike.
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
from tests.engine.groups import MEAN
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


def switching(kind: str, where: str, shown: dict[str, list[Tensor]]) -> Any:
    """A module whose hooks switch a schedule-free optimizer: the first to what it shows, the
    others to training.
    """
    first, *others = HOOKS[where]

    def configure_optimizers(self: Any) -> Any:
        return keeper(kind, self.net)

    def to_eval(self: Any) -> None:
        self.optimizers().eval()

    def to_train(self: Any) -> None:
        self.optimizers().train()

    def validation_step(self: Any, parts: Any, index: int) -> None:
        shown["values"].append(
            torch.cat([p.detach().flatten().clone() for p in self.net.parameters()])
        )
        self.log("loss", self.loss(parts), sync_dist=True)

    hooks = {first: to_eval, **dict.fromkeys(others, to_train)} if kind == "z" else {}
    return {
        "configure_optimizers": configure_optimizers,
        "validation_step": validation_step,
        **hooks,
    }


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
    shown: dict[str, list[Tensor]] = {"values": []}
    make = partial(module, **switching(kind, where, shown))
    of_trainer = {
        "limit_train_batches": 5,
        "limit_val_batches": 1 if validates else 0,
        "num_sanity_val_steps": 0,
    }
    of_trainer |= {"max_epochs": 3, "max_steps": -1, **choices.pop("trainer_choices", {})}
    fitted = fit(
        rank,
        world_size,
        groups,
        -1,
        CHOICES,
        make=lambda distribution, inner, seed: make(distribution, inner, seed),
        loader=Announced((rank // size, rank % size, size), 5),
        trainer_choices=of_trainer,
        validation=batches(7) if validates else None,
        **choices,
    )
    fitted["shown"] = shown["values"]
    return fitted


@pytest.mark.parametrize("where", HOOKS)
def test_a_schedule_free_fit_shows_the_outer_model_and_ends_alike(where: str) -> None:
    play_case = partial(trained, kind="z", where=where)
    ranks = play(4, {"validated": play_case, "plain": partial(play_case, validates=False)})
    for fitted in ranks["validated"]:
        assert unequal(fitted["model"], ranks["validated"][0]["model"]) == []
        assert unequal(fitted["model"], fitted["outer"]) == []
        assert len(fitted["shown"]) == 3
        assert all(map(torch.equal, fitted["shown"], ranks["validated"][0]["shown"]))
    if where != "around epochs":
        # Validation does not change a bit of training, whichever hooks switch.
        assert unequal(ranks["validated"][0]["outer"], ranks["plain"][0]["outer"]) == []


@pytest.mark.parametrize("kind", ["z", "slow", "master"])
def test_a_fit_with_copies_resumes_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    case = partial(trained, kind=kind, where="in validation")
    in_short = {"precision": "bf16-true"} if kind == "master" else {}
    saving = partial(
        case, trainer_choices={**in_short, "callbacks": [at({7: save(tmp_path / "a.ckpt")})]}
    )
    resumed = partial(case, trainer_choices=in_short, resume=tmp_path / "a.ckpt")
    ranks = play(2, {"whole": saving, "resumed": resumed})
    for rank in range(2):
        assert unequal(ranks["resumed"][rank]["outer"], ranks["whole"][rank]["outer"]) == []
        assert unequal(ranks["resumed"][rank]["model"], ranks["whole"][0]["model"]) == []


def in_fabric(rank: int, world_size: int, kind: str) -> list[Tensor]:
    strategy = StreamingDiLoCoFabricStrategy(
        worker_groups=2, **{**CHOICES, **MEAN, "overlap_steps": 0}
    )
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    # The optimizer copies the weights of this rank, before it takes those of rank 0.
    net = mlp(rank)
    model, optimizer = fabric.setup(net, keeper(kind, net))
    held = []
    for step in range(1, 7):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        held.append(torch.cat([p.detach().flatten().clone() for p in net.parameters()]))
        if kind == "z":
            optimizer.eval()
            with strategy.evaluate():
                held.append(torch.cat([p.detach().flatten().clone() for p in net.parameters()]))
            optimizer.train()
    strategy.finish()
    if kind == "z":
        optimizer.eval()
    return [held[0], torch.cat([p.detach().flatten().clone() for p in net.parameters()])]


@pytest.mark.parametrize("kind", ["z", "master"])
def test_a_loop_of_fabric_starts_and_ends_with_copies_of_one_model(kind: str) -> None:
    ranks = play(2, {"fabric": partial(in_fabric, kind=kind)})["fabric"]
    # One step from the same values, and not from each rank's own.
    assert 0 < float((ranks[0][0] - ranks[1][0]).abs().max()) < 0.2
    assert torch.equal(ranks[0][1], ranks[1][1])


def test_copies_of_shards_follow_landings_as_whole_ones_do() -> None:
    def train(rank: int, world_size: int, kind: str, size: int) -> dict[str, Tensor]:
        model = sharded.even(0)
        group = rank // size
        steps = 10
        if size > 1:
            mesh = init_device_mesh("cpu", (2, size), mesh_dim_names=("group", "data"))["data"]
            fully_shard(model[2], mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = keeper(kind, model)
        engine = StreamingDiLoCo(model, worker_groups=2, inner_optimizers=[optimizer], **CHOICES)
        for step in range(1, steps + 1):
            x, y = (part.chunk(size)[rank % size] for part in batch(group, step))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            engine.step()
        with engine.evaluate():
            if kind == "z":
                optimizer.eval()
                optimizer.train()
        engine.finish()
        return engine.outer_state_dict()

    for kind in ("z", "slow", "master"):
        whole = run_ranks(train, 2, kind, 1, timeout=60)
        shards = run_ranks(train, 4, kind, 2, timeout=60)
        for outer in shards:
            assert all(torch.allclose(outer[name], whole[0][name], atol=1e-5) for name in outer)


@pytest.mark.parametrize("where", ["in validation", "at epochs"])
def test_a_checkpoint_saved_while_the_optimizer_shows_its_average_resumes_exactly(
    where: str, tmp_path: Path
) -> None:
    def save_once(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    case = partial(trained, kind="z", where=where)
    saving = partial(case, trainer_choices={"callbacks": [on(on_validation_end=save_once)]})
    resumed = partial(case, resume=tmp_path / "a.ckpt")
    ranks = play(2, {"whole": saving, "resumed": resumed})
    for rank in range(2):
        assert unequal(ranks["resumed"][rank]["outer"], ranks["whole"][rank]["outer"]) == []
        assert unequal(ranks["resumed"][rank]["model"], ranks["whole"][0]["model"]) == []


@pytest.mark.parametrize("kind", ["z", "master"])
def test_copies_begin_as_the_outer_model_where_rounds_restart(kind: str, tmp_path: Path) -> None:
    seen: dict[int, float] = {}

    def compare(trainer: Any, module: Any, *args: Any) -> None:
        state = trainer.optimizers[0].state
        key = "z" if kind == "z" else "master"
        kept = [(p, state[p][key]) for p in module.net.parameters() if key in state[p]]
        # Groups without a file of their own have no z yet.
        seen.setdefault(
            trainer.global_step,
            max([float((p - copy).abs().max()) for p, copy in kept], default=0.0),
        )

    case = partial(trained, kind=kind, where="in validation")
    play(
        2,
        {
            "saved": partial(
                case, trainer_choices={"callbacks": [at({7: save(tmp_path / "a.ckpt")})]}
            )
        },
    )
    callbacks = {"callbacks": [on(on_train_batch_start=compare)]}
    restarted = partial(
        case,
        trainer_choices=callbacks,
        resume=tmp_path / "a.ckpt",
        inspect=lambda *_: seen,
        groups=4,
    )
    ranks = play(4, {"restarted": restarted})["restarted"]
    for fitted in ranks:
        assert fitted["inspected"][7] == 0.0
        assert unequal(fitted["model"], ranks[0]["model"]) == []
