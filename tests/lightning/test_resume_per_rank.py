"""State that differs between ranks, beside the model: each rank of a resumed run gets it back."""

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
from tests.lightning.test_checkpoint import hooks_of
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
            local = values.detach()
            if isinstance(local, DTensor):
                local = local.to_local()
            self.values[name] = 0.5 * self.values.get(name, local) + 0.5 * local

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def copies_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: fits.whole(values) for name, values in model.named_parameters()}


def share_of_batch(rank: int, size: int, step: int) -> list[Tensor]:
    """A rank's share of the batch of its group."""
    return [part.chunk(size)[rank % size] for part in batch(rank // size, step)]


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, patience=1, factor=0.9)


# Fits


class Hooks:
    """Of a module whose rate depends on the loss of its group, and which saves its last losses."""

    losses: list[float]

    def training_step(self: Any, parts: Any, index: int) -> Tensor:
        loss = self.loss(parts)
        self.log("loss", loss)
        self.losses = [*self.losses[-2:], float(loss)]
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self: Any) -> Any:
        optimizer = inner_optimizer("adamw", self.net)
        scheduler = {"scheduler": plateau(optimizer), "monitor": "loss", "interval": "step"}
        return [optimizer], [scheduler]

    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = self.losses

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        self.losses = checkpoint["losses"]

    def configure_model(self: Any) -> None:
        if self.device_mesh is not None and not self.losses:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def module(distribution: str, seed: int) -> Any:
    hooks = hooks_of(Hooks)
    return fits.module(distribution, "adamw", seed, gauged(seed), losses=[], **hooks)


class Averaging:
    """A callback whose state is an average of local weights."""

    def __init__(self) -> None:
        self.average = Average()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.average.update(module)

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)


class AveragingByHook(Averaging):
    """Puts the average into the checkpoint in place of the model."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        state_dict = checkpoint["state_dict"]
        average = self.average.values
        checkpoint["outer"] = {name: state_dict[name] for name in average}
        checkpoint["state_dict"] = {**state_dict, **average}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        state_dict = checkpoint["state_dict"]
        self.average.values = {name: state_dict[name] for name, _ in module.named_parameters()}
        state_dict |= checkpoint["outer"]


def averaging(distribution: str, kind: type[Averaging]) -> Any:
    callback = importlib.import_module(distribution).Callback
    return type(kind.__name__, (kind, callback), {})()


def counting(distribution: str, place: fits.Place) -> Any:
    """A data module that counts the batches that its rank has drawn."""

    class Counting(importlib.import_module(distribution).LightningDataModule):  # type: ignore[misc]
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

    return Counting()


def fit(
    rank: int,
    world_size: int,
    callbacks: Sequence[Any] = (),
    path: Any = None,
    groups: int = 2,
    distribution: str = LIGHTNING,
    **choices: Any,
) -> dict[str, Any]:
    """Fits in this rank, and returns what it holds at the end.

    The choices are settings of the strategy, and ``weights_only``.
    """
    resuming: dict[str, Any] = {"ckpt_path": path and str(path)}
    if "weights_only" in choices:
        resuming["weights_only"] = choices.pop("weights_only")
    averages = [averaging(distribution, Averaging)]
    if "data_parallel_size" not in choices:
        averages.append(averaging(distribution, AveragingByHook))
    trainer = fits.trainer(
        distribution,
        strategy=fits.strategy(distribution, worker_groups=groups, **{**CHOICES, **choices}),
        devices=world_size,
        max_epochs=3,
        limit_val_batches=0,
        callbacks=[*averages, *callbacks],
        enable_checkpointing="Checkpoint" in str(callbacks),
        log_every_n_steps=1,
    )
    size = world_size // groups
    batches = counting(distribution, (rank // size, rank % size, size))
    model = module(distribution, rank)
    trainer.fit(model, batches, **resuming)
    return {**state_of(trainer), "losses": model.losses, "drawn": batches.drawn}


def state_of(trainer: Any) -> dict[str, Any]:
    """The state of a fit that differs between ranks."""
    net = trainer.lightning_module.net
    averages = [callback for callback in trainer.callbacks if isinstance(callback, Averaging)]
    average_values: dict[str, Tensor] = {}
    for callback in averages:
        for name, values in callback.average.values.items():
            average_values[f"{type(callback).__name__} {name}"] = values
    moments = [state["exp_avg"] for state in trainer.optimizers[0].state.values()]
    scheduler = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    plain = (int, float, list)
    return {
        "model": copies_of(net),
        "averages": average_values,
        "optimizer": {str(i): fits.whole(values) for i, values in enumerate(moments)},
        "scheduler": {key: value for key, value in scheduler.items() if isinstance(value, plain)},
        "seen": net[-1].seen,
    }


def different(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of states that are not the same, to the bit."""
    names = []
    for name, value in expected.items():
        if isinstance(value, dict) and name != "scheduler":
            names += [f"{name}: {key}" for key in unequal(actual[name], value)]
        elif actual[name] != value:
            names.append(name)
    return names


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
    checkpoints = {name: tmp_path / f"{name}.ckpt" for name in ("9", "epoch=0")}
    callbacks = [
        at({9: save(checkpoints["9"])}, distribution),
        *saving(distribution, tmp_path, filename="{epoch}", save_on_train_epoch_end=True),
    ]
    cases = {"plain": run, "saved": partial(run, callbacks=callbacks)}
    for name, path in checkpoints.items():
        cases[name] = partial(run, path=path)
    played = play(ranks, cases)
    plain = played.pop("plain")
    for rank in range(1, ranks):
        assert different(plain[rank], plain[0]), "ranks differ"
    for name, fitted in played.items():
        for rank in range(ranks):
            assert different(fitted[rank], plain[rank]) == [], name


def file_of(checkpoint: Path, rank: int) -> Path:
    return next(Path(f"{checkpoint}.sdiloco").glob(f"*/rank_{rank:05d}.pt"))


def places(checkpoint: Path, rank: int) -> list[tuple[Any, ...]]:
    """The places in the file of a rank that have entries of this rank."""
    entries = torch.load(file_of(checkpoint, rank), weights_only=True)["entries"]
    stored = [*entries["plain"], *entries["packed"]]
    return [*(place for place, _ in stored), *entries["missing"]]


def keeping(**state: Any) -> Any:
    """A callback with such a state."""
    members: dict[str, Any] = {
        "state": state,
        "state_dict": lambda self: state,
        "load_state_dict": lambda self, loaded: state.update(loaded),
    }
    return type("Keeping", (pl.Callback,), members)()


@in_ranks(2)
def test_a_file_of_a_rank_holds_only_the_entries_in_which_it_differs(
    rank: int, tmp_path: Path
) -> None:
    path = tmp_path / "9.ckpt"
    numbers = torch.arange(100_000.0)
    state = {"numbers": numbers, "names": {"a": [1, None], "b": float("nan")}, "rank": rank}
    if rank == 0:
        state["first"] = True
    fit(rank, 2, [keeping(**state), at({9: save(path)})])
    keeper = ("callbacks", "Keeping")
    keys = sorted(place[2:] for place in places(path, rank) if place[:2] == keeper)
    assert keys == ([("first",), ("rank",)] if rank else [])
    assert places(path, 0) == []
    assert file_of(path, 1).stat().st_size < numbers.nbytes


@in_ranks(2)
def test_callbacks_that_choose_by_a_metric_decide_as_in_a_run_never_stopped(
    rank: int, tmp_path: Path
) -> None:
    """A metric that is reduced over all ranks leaves them the same state everywhere: no rank has
    one of its own in its file.
    """
    path = tmp_path / "9.ckpt"
    run = partial(fit_with_choices, rank, tmp_path)
    plain = run([at({9: save(path)})])
    # Within the second epoch, when the first has chosen.
    differing = {place[1] for place in places(path, rank) if place[0] == "callbacks"}
    assert [name for name in differing if "Checkpoint" in name] == []
    stopping = [name for name in differing if "Stopping" in name]
    assert stopping == ["EarlyStopping{'monitor': 'own', 'mode': 'min'}"] * rank
    assert run(path=path) == plain


def fit_with_choices(
    rank: int, folder: Path, callbacks: Sequence[Any] = (), path: Path | None = None
) -> list[dict[str, Any]]:
    """Fits with callbacks that choose by a metric of all ranks and by one of this rank; returns
    their states.
    """

    def log(trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        module.log("all", outputs["loss"], on_step=False, on_epoch=True, sync_dist=True)
        module.log("own", outputs["loss"], on_step=False, on_epoch=True)

    early_stopping = partial(pl.callbacks.EarlyStopping, patience=9, check_on_train_epoch_end=True)
    keep_two = {"save_top_k": 2, "enable_version_counter": False}
    choosing = [
        early_stopping("all"),
        early_stopping("own"),
        pl.callbacks.ModelCheckpoint(folder / "all", monitor="all", **keep_two),
        pl.callbacks.ModelCheckpoint(folder / "own", monitor="own", **keep_two),
    ]
    fit(rank, 2, [fits.on(on_train_batch_end=log), *choosing, *callbacks], path)
    return [callback.state_dict() for callback in choosing]


@not_in_the_oldest
def test_objects_need_weights_only_false_and_are_named_without_it(tmp_path: Path) -> None:
    """The file of rank 0 can be read; that of rank 1 has an object, and lacks one that cannot be
    saved.
    """
    path = tmp_path / "9.ckpt"

    def saved(rank: int, world_size: int) -> list[str]:
        messages = fits.said_by("lightning_sdiloco")
        state = {"last": Path("a"), "call": lambda: None} if rank else {"last": None, "call": None}
        fit(rank, world_size, [keeping(**state), at({9: save(path)})])
        return [message for message in messages if "could not save" in message]

    def resumed(rank: int, world_size: int, **choices: Any) -> Any:
        keeper = keeping(last=None, call=None)
        fit(rank, world_size, [keeper], path, **choices)
        return keeper.state["last"]

    warnings, (warning,) = run_processes(saved, 2)
    assert warnings == []
    assert "Rank 1" in warning
    assert "callbacks.Keeping.call" in warning
    assert run_processes(partial(resumed, weights_only=False), 2) == [None, Path("a")]
    errors = run_processes(resumed, 2, expect_failure=True)
    first_error = next(iter(errors.values()))
    assert "callbacks.Keeping.last" in first_error
    assert "weights_only=False" in first_error


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
    keeper = keeping(last=None)
    fit(rank, 2, [keeper], path, checkpoint_io=TrustingIO())
    assert keeper.state["last"].rank == rank


@in_ranks(3)
def test_a_rank_of_a_restart_gets_the_state_of_a_rank_in_its_place(
    rank: int, tmp_path: Path
) -> None:
    """Groups that there were not before get what rank 0 held; loops and model are those of all."""
    path = tmp_path / "9.ckpt"
    keeper = keeping(rank=rank)
    at_start = list[Any]()

    def note(trainer: Any, module: Any) -> None:
        at_start.append((keeper.state["rank"], module.net[-1].seen))

    saved = fit(rank, 3, [keeper, at({9: save(path)})], groups=3)
    state_dict = torch.load(path, weights_only=False)["state_dict"]
    seen = state_dict["net.7._extra_state"]["seen"]
    keeper.state["rank"] = None
    callbacks = [keeper, fits.on(on_train_start=note)]
    fit(rank, 3, callbacks, path, groups=3, resume="restart", sync_every=5)
    assert at_start == [(rank, seen)]
    assert saved["seen"] != seen


# Loops without a Trainer


END = 12


def in_fabric(
    rank: int, world_size: int, path: Path, begin: int = 0, end: int = END
) -> dict[str, Any]:
    """A loop that begins with a checkpoint unless it begins at 0, and leaves one unless it ends at
    `END`.
    """
    fabric = fabric_of(world_size, **CHOICES)
    size = world_size // 2
    net = gauged(rank)
    model, optimizer = fabric.setup(net, inner_optimizer("adamw", net))
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": plateau(optimizer),
        "average": Average(),
        "teacher": mlp(rank),
        "losses": [],
        "step": 0,
        "place": {"rank": None},
    }
    if begin:
        fabric.load(path, state)
        assert state["step"] == begin
        assert state["place"] == {"rank": rank}
    for step in range(begin, end):
        step_in_fabric(fabric, state, net, share_of_batch(rank, size, step))
    if end < END:
        state |= {"step": end, "place": {"rank": rank}}
        fabric.save(path, state, filter={"average": lambda name, _: True})
    fabric.strategy.finish()
    scheduler = state["scheduler"]
    return {
        "model": copies_of(net),
        "teacher": copies_of(state["teacher"]),
        "average": state["average"].values,
        "seen": net[-1].seen,
        "scheduler": [scheduler.best, scheduler.num_bad_epochs, optimizer.param_groups[0]["lr"]],
        "losses": state["losses"],
    }


def step_in_fabric(
    fabric: Any, state: dict[str, Any], net: nn.Module, share: Sequence[Tensor]
) -> None:
    x, y = share
    loss = nn.functional.mse_loss(state["model"](x), y)
    fabric.backward(loss)
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step(float(loss))
    state["average"].update(net)
    state["losses"] = [*state["losses"][-3:], float(loss)]
    with torch.no_grad():
        for slow, fast in zip(state["teacher"].parameters(), net.parameters(), strict=True):
            slow.lerp_(fast, 0.1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_of_a_loop_of_fabric_gets_back_the_state_it_saved(
    ranks: int, tmp_path: Path
) -> None:
    """Schedulers, plain values, objects with a state, and a module that the optimizer does not
    train.
    """
    path = tmp_path / "5.ckpt"
    loop = partial(in_fabric, path=path)
    cases = {"plain": loop, "saved": partial(loop, end=5), "resumed": partial(loop, begin=5)}
    played = play(ranks, cases)
    for rank, plain in enumerate(played["plain"]):
        assert rank == 0 or different(plain, played["plain"][0])
        assert different(played["resumed"][rank], plain) == []
    assert ("step",) not in places(path, 1)


def in_plain_loop(
    rank: int, world_size: int, path: Path, begin: int, end: int
) -> tuple[dict[str, Tensor], float]:
    """As `in_fabric`, with an engine; returns the model and its extra state."""
    groups = WorkerGroups(2)
    size = world_size // 2
    net = gauged(rank)
    model: nn.Module = net
    if size > 1:
        model = DistributedDataParallel(net, process_group=groups.process_group)
    optimizer = inner_optimizer("adamw", net)
    engine = StreamingDiLoCo(model, worker_groups=groups, inner_optimizers=[optimizer], **CHOICES)
    if begin:
        engine.load(path)
    for step in range(begin, end):
        x, y = share_of_batch(rank, size, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        engine.step()
    if end < END:
        engine.save(path)
    engine.finish()
    return copies_of(net), net[-1].seen


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_engine_saves_extra_state_of_every_rank(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "5.ckpt"
    plain = run_ranks(in_plain_loop, ranks, path, 0, END)
    run_ranks(in_plain_loop, ranks, path, 0, 5)
    resumed = run_ranks(in_plain_loop, ranks, path, 5, END)
    assert len({seen for _, seen in plain}) == ranks
    for (expected, seen), (actual, resumed_seen) in zip(plain, resumed, strict=True):
        assert unequal(actual, expected) == []
        assert resumed_seen == seen


def simulated(
    nets: list[nn.Sequential], optimizers: list[torch.optim.Optimizer]
) -> SimulatedGroups:
    inner_optimizers = [[optimizer] for optimizer in optimizers]
    return SimulatedGroups(nets, inner_optimizers=inner_optimizers, **CHOICES)


def test_states_of_simulated_groups_have_the_extra_state_of_each() -> None:
    nets = [gauged(0), gauged(0)]
    optimizers = [inner_optimizer("sgd", net) for net in nets]
    groups = simulated(nets, optimizers)
    for step in range(5):
        for group in (0, 1):
            train_step(nets[group], optimizers[group], group, step)
        groups.step()
    fresh_nets = [gauged(0), gauged(0)]
    fresh_groups = simulated(fresh_nets, [inner_optimizer("sgd", net) for net in fresh_nets])
    for saved, fresh in zip(groups.engines, fresh_groups.engines, strict=True):
        fresh.load_state_dict(saved.state_dict())
    loaded_seen = [net[-1].seen for net in fresh_nets]
    assert loaded_seen == [net[-1].seen for net in nets]
    assert loaded_seen[0] != loaded_seen[1]


class Recent(Gauge):
    """Its extra state is an object that ``weights_only=True`` does not read."""

    def get_extra_state(self) -> Any:
        return deque([self.seen])

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state({"seen": state[0]})


def engine_with_recent() -> StreamingDiLoCo:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 3), Gauge(), Recent())
    return StreamingDiLoCo(net, worker_groups=1, **CHOICES)


def test_an_engine_names_extra_state_that_it_cannot_read_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "0.ckpt"

    def loop(rank: int, world_size: int) -> None:
        messages = fits.said_by("lightning_sdiloco")
        saved = engine_with_recent()
        saved.model(torch.ones(5))
        saved.save(path)
        loaded = engine_with_recent()
        loaded.load(path)
        (warning,) = [message for message in messages if "weights_only=True" in message]
        assert "2._extra_state" in warning
        saved_seen = [layer.seen for layer in saved.model[1:]]
        assert saved_seen[1] > 0
        assert [layer.seen for layer in loaded.model[1:]] == [saved_seen[0], 0]

    run_ranks(loop, 1)
