"""What differs between ranks beside the model: each rank of a resumed run gets its own back."""

import importlib
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo, WorkerGroups
from tests import fits
from tests.fits import LIGHTNING, OTHER, Announced, at, play, save, saving, since, unequal
from tests.lightning.test_fabric import fabric_of
from tests.ranks import in_ranks, run_processes, run_ranks
from tests.training import batch, inner_optimizer, mlp, train_step

CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "fragments": "strided:1",
    "outer_momentum": 0.9,
}
BATCHES = 6
pl = importlib.import_module(LIGHTNING)
not_in_the_oldest = since("2.6")


class Gauge(nn.Module):
    """Scales by what it has seen so far, which it keeps as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0.0

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + float(values.detach().abs().mean())
        return values * (1 + 0.1 * self.seen)

    def get_extra_state(self) -> dict[str, float]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.seen = state["seen"]


def gauged(seed: int) -> nn.Sequential:
    return nn.Sequential(*mlp(seed), Gauge())


class Average:
    """An average of local weights."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def update(self, model: nn.Module) -> None:
        for name, values in model.named_parameters():
            here = values.detach().to_local() if isinstance(values, DTensor) else values.detach()
            self.values[name] = 0.5 * self.values.get(name, here) + 0.5 * here

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, patience=1, factor=0.9)


# Fits


def module(distribution: str, seed: int) -> Any:
    """A module whose rate depends on the loss of its group, and which saves what it has seen in a
    hook.
    """

    def training_step(self: Any, parts: Any, index: int) -> Tensor:
        loss = self.loss(parts)
        self.log("loss", loss)
        self.losses = [*self.losses[-2:], float(loss)]
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self: Any) -> Any:
        optimizer = inner_optimizer("adamw", self.net)
        return [optimizer], [
            {"scheduler": plateau(optimizer), "monitor": "loss", "interval": "step"}
        ]

    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = self.losses

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        self.losses = checkpoint["losses"]

    def configure_model(self: Any) -> None:
        if self.device_mesh is not None and not self.losses:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    hooks = (
        training_step,
        configure_optimizers,
        configure_model,
        on_save_checkpoint,
        on_load_checkpoint,
    )
    return fits.module(
        distribution,
        "adamw",
        seed,
        gauged(seed),
        losses=[],
        **{hook.__name__: hook for hook in hooks},
    )


def averaging(distribution: str, by_hook: bool = False) -> Any:
    """A callback with an average of its own: its state, or put into the checkpoint in a hook in
    place of the model.
    """
    average = Average()

    def on_save_checkpoint(
        self: Any, trainer: Any, module: Any, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["outer"] = {name: checkpoint["state_dict"][name] for name in average.values}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **average.values}

    def on_load_checkpoint(
        self: Any, trainer: Any, module: Any, checkpoint: dict[str, Any]
    ) -> None:
        average.values = {
            name: checkpoint["state_dict"][name] for name, _ in module.named_parameters()
        }
        checkpoint["state_dict"] |= checkpoint["outer"]

    hooks: dict[str, Any] = {
        "on_save_checkpoint": on_save_checkpoint,
        "on_load_checkpoint": on_load_checkpoint,
    }
    if not by_hook:
        hooks = {
            "state_dict": lambda self: average.state_dict(),
            "load_state_dict": lambda self, state: average.load_state_dict(state),
        }
    hooks["on_train_batch_end"] = lambda self, trainer, module, *_: average.update(module)
    base = importlib.import_module(distribution).Callback
    return type(
        "Averaging", (base,), {**hooks, "average": average, "state_key": f"averaging {by_hook}"}
    )()


def data_module(distribution: str, place: fits.Place) -> Any:
    """A data module that counts what its rank has drawn."""

    class Data(importlib.import_module(distribution).LightningDataModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.drawn = 100 * place[0] + place[1]

        def train_dataloader(self) -> Any:
            return Announced(place, BATCHES)

        def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
            self.drawn += 1
            return batch

        def state_dict(self) -> dict[str, int]:
            return {"drawn": self.drawn}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.drawn = state["drawn"]

    return Data()


def fit(
    rank: int,
    world_size: int,
    callbacks: Sequence[Any] = (),
    path: Any = None,
    groups: int = 2,
    distribution: str = LIGHTNING,
    weights_only: bool | None = None,
    **choices: Any,
) -> dict[str, Any]:
    """Fits in this rank, and returns what it holds at the end."""
    size = world_size // groups
    model = module(distribution, rank)
    is_sharded = "data_parallel_size" in choices
    averages = [
        averaging(distribution, by_hook) for by_hook in (False, True)[: 1 if is_sharded else 2]
    ]
    data = data_module(distribution, (rank // size, rank % size, size))
    trainer = fits.trainer(
        distribution,
        strategy=fits.strategy(distribution, worker_groups=groups, **{**CHOICES, **choices}),
        devices=world_size,
        max_epochs=3,
        limit_val_batches=0,
        callbacks=[*averages, *callbacks],
        enable_checkpointing=any("Checkpoint" in type(callback).__name__ for callback in callbacks),
        log_every_n_steps=1,
    )
    trainer.fit(
        model,
        data,
        ckpt_path=path and str(path),
        **({} if weights_only is None else {"weights_only": False}),
    )
    scheduler = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    return {
        "model": {name: fits.whole(values) for name, values in model.net.named_parameters()},
        "averages": {
            f"{i} {name}": v for i, a in enumerate(averages) for name, v in a.average.values.items()
        },
        "optimizer": {
            str(i): fits.whole(of["exp_avg"])
            for i, of in enumerate(trainer.optimizers[0].state.values())
        },
        "scheduler": {
            key: value for key, value in scheduler.items() if isinstance(value, (int, float, list))
        },
        "seen": model.net[-1].seen,
        "losses": model.losses,
        "drawn": data.drawn,
    }


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same, to the bit."""
    tensors = {
        name for name, value in other.items() if isinstance(value, dict) and name != "scheduler"
    }
    wrong = [f"{name}: {at}" for name in tensors for at in unequal(one[name], other[name])]
    return wrong + [name for name in other.keys() - tensors if one[name] != other[name]]


SHARDED = {"data_parallel_size": 2, "tensor_parallel_size": 1}


@pytest.mark.parametrize(
    ("ranks", "distribution", "sizes"),
    [(2, LIGHTNING, {}), (4, OTHER, {}), (4, LIGHTNING, SHARDED)],
)
def test_each_rank_of_a_fit_gets_back_its_state(
    ranks: int, distribution: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """Within an epoch, and at its end: schedulers, extra state, and what callbacks, data modules
    and hooks keep.
    """
    run = partial(fit, distribution=distribution, **sizes)

    def saved(rank: int, world_size: int) -> dict[str, Any]:
        at_end = saving(distribution, tmp_path, filename="{epoch}", save_on_train_epoch_end=True)
        return run(rank, world_size, [at({9: save(tmp_path / "9.ckpt")}, distribution), *at_end])

    cases = {"plain": run, "saved": saved}
    cases |= {name: partial(run, path=tmp_path / f"{name}.ckpt") for name in ("9", "epoch=0")}
    played = play(ranks, cases)
    for rank in range(1, ranks):
        assert different(played["plain"][rank], played["plain"][0]), "ranks differ"
    for name in ("saved", "9", "epoch=0"):
        for one, plain in zip(played[name], played["plain"], strict=True):
            assert different(one, plain) == [], name


def file_of(checkpoint: Path, rank: int) -> Path:
    return next(Path(f"{checkpoint}.sdiloco").glob(f"*/rank_{rank:05d}.pt"))


def places(checkpoint: Path, rank: int) -> list[tuple[Any, ...]]:
    """Where the file of a rank has entries of its own."""
    entries = torch.load(file_of(checkpoint, rank), weights_only=True)["entries"]
    return [
        *(place for kind in ("plain", "packed") for place, _ in entries[kind]),
        *entries["missing"],
    ]


def keeping(**state: Any) -> Any:
    """A callback with such a state."""
    keeper: dict[str, Any] = {
        "state_dict": lambda self: state,
        "load_state_dict": lambda self, own: state.update(own),
    }
    return type("Keeping", (pl.Callback,), {**keeper, "state": state})()


@in_ranks(2)
def test_a_file_of_a_rank_holds_only_the_entries_in_which_it_differs(
    rank: int, tmp_path: Path
) -> None:
    same = {"numbers": torch.arange(100_000.0), "names": {"a": [1, None], "b": float("nan")}}
    own = {"rank": rank, **({} if rank else {"first": True})}
    fit(rank, 2, [keeping(**same, **own), at({9: save(tmp_path / "9.ckpt")})])
    kept = [
        place[2:]
        for place in places(tmp_path / "9.ckpt", rank)
        if place[:2] == ("callbacks", "Keeping")
    ]
    assert sorted(kept) == ([("first",), ("rank",)] if rank else [])
    assert places(tmp_path / "9.ckpt", 0) == []
    assert file_of(tmp_path / "9.ckpt", 1).stat().st_size < same["numbers"].nbytes  # type: ignore[attr-defined]


@in_ranks(2)
def test_callbacks_that_choose_by_a_metric_decide_as_in_a_run_never_stopped(
    rank: int, tmp_path: Path
) -> None:
    """By one that is reduced over all ranks they hold the same everywhere, and no rank has its own
    in its file.
    """

    def run(path: Any = None) -> list[dict[str, Any]]:
        by_all, by_own = (
            pl.callbacks.EarlyStopping(name, patience=9, check_on_train_epoch_end=True)
            for name in ("all", "own")
        )
        best = [
            pl.callbacks.ModelCheckpoint(
                tmp_path / name, monitor=name, save_top_k=2, enable_version_counter=False
            )
            for name in ("all", "own")
        ]

        def log(trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            module.log("all", outputs["loss"], on_step=False, on_epoch=True, sync_dist=True)
            module.log("own", outputs["loss"], on_step=False, on_epoch=True)

        watching = [fits.on(on_train_batch_end=log), by_all, by_own, *best]
        fit(rank, 2, [*watching, *([] if path else [at({9: save(tmp_path / "9.ckpt")})])], path)
        return [callback.state_dict() for callback in watching[1:]]

    plain = run()
    # Within the second epoch, when the first has chosen.
    differing = {place[1] for place in places(tmp_path / "9.ckpt", rank) if place[0] == "callbacks"}
    assert [name for name in differing if "Checkpoint" in name] == []
    assert [name for name in differing if "Stopping" in name] == (
        ["EarlyStopping{'monitor': 'own', 'mode': 'min'}"] * rank
    )
    assert run(tmp_path / "9.ckpt") == plain


@not_in_the_oldest
def test_objects_need_weights_only_false_and_are_named_without_it(tmp_path: Path) -> None:
    """The file of rank 0 can be read; that of rank 1 has an object, and lacks one that cannot be
    saved.
    """
    path = tmp_path / "9.ckpt"

    def saved(rank: int, world_size: int) -> list[str]:
        said = fits.said_by("lightning_sdiloco")
        state = {"last": Path("a"), "call": lambda: None} if rank else {"last": None, "call": None}
        fit(rank, world_size, [keeping(**state), at({9: save(path)})])
        return [text for text in said if "could not save" in text]

    def resumed(rank: int, world_size: int, **choices: Any) -> dict[str, Any]:
        kept = keeping(last=None, call=None)
        fit(rank, world_size, [kept], path, **choices)
        return kept.state  # type: ignore[no-any-return]

    said, (warned,) = run_processes(saved, 2)
    assert said == []
    assert "Rank 1" in warned
    assert "callbacks.Keeping.call" in warned
    last = [state["last"] for state in run_processes(partial(resumed, weights_only=False), 2)]
    assert last == [None, Path("a")]
    told = next(iter(run_processes(resumed, 2, expect_failure=True).values()))
    assert "callbacks.Keeping.last" in told
    assert "weights_only=False" in told


class TrustingIO(pl.plugins.TorchCheckpointIO):  # type: ignore[misc, name-defined]
    """Knows which objects its project puts into checkpoints, and trusts these."""

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> Any:
        with torch.serialization.safe_globals([type(Path()), Keepsake]):
            return torch.load(path, map_location=map_location, weights_only=True)


class Keepsake:
    def __init__(self, rank: int) -> None:
        self.rank = rank


@not_in_the_oldest
@in_ranks(2)
def test_objects_that_a_checkpoint_io_trusts_come_back_in_every_rank(
    rank: int, tmp_path: Path
) -> None:
    path = tmp_path / "9.ckpt"
    fit(rank, 2, [keeping(last=Keepsake(rank)), at({9: save(path)})], checkpoint_io=TrustingIO())
    kept = keeping(last=None)
    fit(rank, 2, [kept], path, checkpoint_io=TrustingIO())
    assert kept.state["last"].rank == rank


@in_ranks(3)
def test_a_rank_of_a_restart_gets_the_state_of_a_rank_in_its_place(
    rank: int, tmp_path: Path
) -> None:
    """Groups that there were not before get what rank 0 held; loops and model are those of all."""
    kept = keeping(rank=rank)
    held = list[Any]()
    begin = fits.on(
        on_train_start=lambda trainer, module: held.append(
            (kept.state["rank"], module.net[-1].seen)
        )
    )
    saved = fit(rank, 3, [kept, at({9: save(tmp_path / "9.ckpt")})], groups=3)
    seen = torch.load(tmp_path / "9.ckpt", weights_only=False)["state_dict"]["net.7._extra_state"][
        "seen"
    ]
    kept.state["rank"] = None
    fit(rank, 3, [kept, begin], tmp_path / "9.ckpt", groups=3, resume="restart", sync_every=5)
    assert held == [(rank, seen)]
    assert saved["seen"] != seen


# Loops without a Trainer


def in_fabric(
    rank: int, world_size: int, path: Path, begin: int = 0, end: int = 12
) -> dict[str, Any]:
    """A loop that begins with a checkpoint unless it begins at 0, and leaves one unless it ends at
    12.
    """
    fabric = fabric_of(world_size, **CHOICES)
    size = world_size // 2
    model, optimizer = fabric.setup(net := gauged(rank), inner_optimizer("adamw", net))
    scheduler = plateau(optimizer)
    average = Average()
    teacher = mlp(rank)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "average": average,
        "teacher": teacher,
    }
    state |= {"losses": [], "step": 0, "at": {"rank": None}}
    if begin:
        fabric.load(path, state)
        assert (state["step"], state["at"]) == (begin, {"rank": rank})
    for step in range(begin, end):
        x, y = (part.chunk(size)[rank % size] for part in batch(rank // size, step))
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(float(loss))
        average.update(net)
        state["losses"] = [*state["losses"][-3:], float(loss)]
        with torch.no_grad():
            for of_teacher, values in zip(teacher.parameters(), net.parameters(), strict=True):
                of_teacher.lerp_(values, 0.1)
    if end < 12:
        fabric.save(
            path,
            {**state, "step": end, "at": {"rank": rank}},
            filter={"average": lambda name, _: True},
        )
    fabric.strategy.finish()
    return {
        "model": {name: values.clone() for name, values in net.named_parameters()},
        "teacher": {name: values.clone() for name, values in teacher.named_parameters()},
        "average": average.values,
        "seen": net[-1].seen,
        "scheduler": [scheduler.best, scheduler.num_bad_epochs, optimizer.param_groups[0]["lr"]],
        "losses": state["losses"],
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_of_a_loop_of_fabric_gets_back_the_state_it_saved(
    ranks: int, tmp_path: Path
) -> None:
    """Schedulers, plain values, objects with a state, and a module that the optimizer does not
    train.
    """
    loop = partial(in_fabric, path=tmp_path / "5.ckpt")
    played = play(
        ranks, {"plain": loop, "saved": partial(loop, end=5), "resumed": partial(loop, begin=5)}
    )
    for rank, plain in enumerate(played["plain"]):
        assert rank == 0 or different(plain, played["plain"][0])
        assert different(played["resumed"][rank], plain) == []
    assert ("step",) not in places(tmp_path / "5.ckpt", 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_engine_saves_extra_state_of_every_rank(ranks: int, tmp_path: Path) -> None:
    def loop(rank: int, world_size: int, begin: int, end: int) -> tuple[dict[str, Tensor], float]:
        groups = WorkerGroups(2)
        size = world_size // 2
        net = gauged(rank)
        model = (
            DistributedDataParallel(net, process_group=groups.process_group) if size > 1 else net
        )
        optimizer = inner_optimizer("adamw", net)
        engine = StreamingDiLoCo(
            model, worker_groups=groups, inner_optimizers=[optimizer], **CHOICES
        )
        if begin:
            engine.load(tmp_path / "5.ckpt")
        for step in range(begin, end):
            x, y = (part.chunk(size)[rank % size] for part in batch(rank // size, step))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            engine.step()
        if end < 12:
            engine.save(tmp_path / "5.ckpt")
        engine.finish()
        return {name: values.clone() for name, values in net.named_parameters()}, net[-1].seen

    plain, _, resumed = (run_ranks(loop, ranks, *span) for span in ((0, 12), (0, 5), (5, 12)))
    assert len({seen for _, seen in plain}) == ranks
    for (expected, seen), (actual, resumed_seen) in zip(plain, resumed, strict=True):
        assert unequal(actual, expected) == []
        assert resumed_seen == seen


def test_states_of_simulated_groups_have_the_extra_state_of_each() -> None:
    def groups_of() -> tuple[SimulatedGroups, list[nn.Sequential], list[torch.optim.Optimizer]]:
        nets = [gauged(0), gauged(0)]
        optimizers = [inner_optimizer("sgd", net) for net in nets]
        return (
            SimulatedGroups(nets, inner_optimizers=[[one] for one in optimizers], **CHOICES),
            nets,
            optimizers,
        )

    groups, nets, optimizers = groups_of()
    for step in range(5):
        for group in (0, 1):
            train_step(nets[group], optimizers[group], group, step)
        groups.step()
    others, resumed, _ = groups_of()
    for engine, other in zip(groups.engines, others.engines, strict=True):
        other.load_state_dict(engine.state_dict())
    assert [net[-1].seen for net in resumed] == [net[-1].seen for net in nets]
    assert resumed[0][-1].seen != resumed[1][-1].seen


class Recent(Gauge):
    """Its extra state is an object that ``weights_only=True`` does not read."""

    def get_extra_state(self) -> Any:
        return deque([self.seen])

    def set_extra_state(self, state: Any) -> None:
        (self.seen,) = state


def test_an_engine_names_extra_state_that_it_cannot_read_and_resumes(tmp_path: Path) -> None:
    def engine_of() -> tuple[StreamingDiLoCo, nn.Sequential]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 3), Gauge(), Recent())
        return StreamingDiLoCo(net, worker_groups=1, **CHOICES), net

    def loop(rank: int, world_size: int) -> None:
        said = fits.said_by("lightning_sdiloco")
        engine, net = engine_of()
        net(torch.ones(5))
        engine.save(tmp_path / "0.ckpt")
        other, resumed = engine_of()
        other.load(tmp_path / "0.ckpt")
        (told,) = [text for text in said if "weights_only=True" in text]
        assert "2._extra_state" in told
        assert resumed[1].seen == net[1].seen
        assert resumed[2].seen == 0 < net[2].seen

    run_ranks(loop, 1)
