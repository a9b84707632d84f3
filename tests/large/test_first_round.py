"""Until every fragment has landed once, with the defaults 100 steps and more: what is saved then has been trained."""

import importlib
import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_sdiloco import StreamingDiLoCo, StreamingDiLoCoFabricStrategy
from lightning_sdiloco.engine import files
from lightning_sdiloco.lightning import fabric as fabric_room
from tests import fits
from tests.fits import LIGHTNING, since
from tests.large.models import FEATURES, TARGETS, made, same
from tests.large.test_fits import Batches
from tests.ranks import run_processes, run_ranks

pytestmark = [pytest.mark.large, pytest.mark.timeout(180)]

OTHER = "pytorch_lightning"


def task(group: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch of a task that can be learnt; group -1 has those that nobody trains on."""
    x = torch.randn(64, FEATURES, generator=torch.Generator().manual_seed(10_000 * (group + 1) + step))
    return x, x[:, :TARGETS] + x[:, TARGETS : 2 * TARGETS]


class Stream(Batches):
    """Batches of the task, without end."""

    def __len__(self) -> int:
        return 1_000

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return task(self.place[0], step)


def error_of(state: dict[str, Tensor]) -> float:
    """The mean squared error of what a checkpoint holds, on data that nobody has trained on."""
    net = made("wide")
    net.load_state_dict({name.removeprefix("net."): values for name, values in state.items()})
    x, y = task(-1, 0)
    with torch.no_grad():
        return nn.functional.mse_loss(net(x), y).item()


def warnings_of(logger: str) -> list[str]:
    """A list to which this process adds what it warns of."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    return said


def module(distribution: str = LIGHTNING, seed: int = 0) -> Any:
    made_module = fits.module(distribution, net=made("wide", seed))
    made_module.configure_optimizers = lambda: torch.optim.AdamW(made_module.parameters(), lr=2e-3)
    return made_module


def fitted(
    rank: int,
    size: int,
    folder: Path,
    steps: int,
    distribution: str = LIGHTNING,
    ddp: bool = False,
    callbacks: tuple[Any, ...] = (),
    resume: str | None = None,
    devices: int = 2,
    **choices: Any,
) -> tuple[dict[str, Tensor], list[str]]:
    """Fits in this rank, saving after every 20 steps; returns the model at the end, and the warnings that were said."""
    said = warnings_of("lightning_sdiloco")
    save = importlib.import_module(distribution).callbacks.ModelCheckpoint
    trainer = fits.trainer(
        distribution,
        strategy="ddp" if ddp else fits.strategy(distribution, **choices),
        devices=devices,
        max_steps=steps,
        callbacks=[save(folder, filename="{step}", every_n_train_steps=20, save_top_k=-1, save_last=True), *callbacks],
        enable_checkpointing=True,
    )
    model = module(distribution, seed=rank)
    trainer.fit(model, Stream(rank // size, rank % size, size), ckpt_path=resume)
    return {name: values.detach().clone() for name, values in model.state_dict().items()}, said


def saved(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.ckpt"))}


@pytest.mark.parametrize(("distribution", "size"), [(LIGHTNING, 1), (LIGHTNING, 2), (OTHER, 1)])
def test_all_files_and_the_end_of_a_short_fit_are_as_good_as_ddps(distribution: str, size: int, tmp_path: Path) -> None:
    """With the defaults nothing launches for 100 steps: every file held the initial model, without a word."""

    def run(rank: int, world_size: int, ddp: bool) -> Any:
        groups = {} if ddp else {"worker_groups": 2}
        return fitted(rank, size, tmp_path / str(ddp), 70, distribution, ddp, devices=world_size, **groups)

    ours, ddp = run_processes(run, 2 * size, False), run_processes(run, 2 * size, True)
    assert error_of(ours[0][0]) <= 1.1 * error_of(ddp[0][0]) + 1e-3
    assert all(same(ours[0][0], model) for model, _ in ours)
    mine, theirs = saved(tmp_path / "False"), saved(tmp_path / "True")
    assert list(mine) == list(theirs) == ["last.ckpt", "step=20.ckpt", "step=40.ckpt", "step=60.ckpt"]
    for name, checkpoint in mine.items():
        assert error_of(checkpoint["state_dict"]) <= 1.1 * error_of(theirs[name]["state_dict"]) + 1e-3, name
    told = [line for line in ours[0][1] if "validation and checkpoints hold the mean" in line]
    assert len(told) == 1
    assert "Up to inner step" in told[0]


def test_what_a_short_run_trained_goes_on_with_other_groups(tmp_path: Path) -> None:
    """A restart took the outer parameters that nobody had trained."""

    def run(rank: int, world_size: int, resume: str | None, steps: int) -> Any:
        return fitted(rank, 1, tmp_path / str(resume is None), steps, resume=resume, devices=world_size)

    run_processes(run, 2, None, 50)
    (trained,) = (saved(tmp_path / "True")[name]["state_dict"] for name in ["step=40.ckpt"])
    (model, _), *_ = run_processes(run, 3, str(tmp_path / "True" / "step=40.ckpt"), 41)
    assert error_of(model) < 1.1 * error_of(trained) < 0.5 * error_of(made("wide").state_dict())


@pytest.mark.parametrize("average", [pytest.param("EMAWeightAveraging", marks=since("2.6.0"))])
def test_an_average_that_has_not_begun_is_no_checkpoint(average: str, tmp_path: Path) -> None:
    """It is one of outer parameters, of which there are none before the first landing."""

    def run(rank: int, world_size: int, resume: str | None = None) -> Any:
        kind = getattr(importlib.import_module(LIGHTNING).callbacks, average)
        folder = tmp_path / str(resume is None)
        return fitted(rank, 1, folder, 130, callbacks=(kind(decay=0.5),), fragments=[["*"]], resume=resume)

    through = run_processes(run, 2)
    files = saved(tmp_path / "True")
    initial = error_of(made("wide").state_dict())
    for name in ("step=20.ckpt", "step=100.ckpt", "step=120.ckpt", "last.ckpt"):
        assert error_of(files[name]["state_dict"]) < 0.6 * initial, name
    resumed = run_processes(run, 2, str(tmp_path / "True" / "step=40.ckpt"))
    assert same(through[0][0], resumed[0][0])


@pytest.mark.parametrize("distribution", [LIGHTNING, OTHER])
def test_a_signal_leaves_no_time_for_an_exchange(distribution: str, tmp_path: Path) -> None:
    """The file holds what the group that saves it has trained, and a warning says so; it resumes exactly."""
    package = importlib.import_module(distribution)

    class Signalled(package.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 3 and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    choices: dict[str, Any] = {"sync_every": 8, "overlap_steps": 5, "fragments": "strided:1"}

    def run(rank: int, world_size: int, resume: str | None = None) -> Any:
        local: list[dict[str, Tensor]] = []
        said = warnings_of("lightning_sdiloco")

        class Kept(package.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                local.append({name: values.detach().clone() for name, values in module.state_dict().items()})

        callbacks = (Kept(),) if resume else (Kept(), Signalled())
        try:
            fitted(rank, 1, tmp_path, 15, distribution, callbacks=callbacks, resume=resume, **choices)
        except BaseException as error:
            if "SIGTERM" not in type(error).__name__:
                raise
        return local, said

    (local, said), _ = run_processes(run, 2)
    assert len([line for line in said if "local values of this group" in line]) == 1
    assert not [line for line in said if "these exchange all fragments" in line]
    path = tmp_path / f"terminated-step={len(local)}.ckpt"
    held = torch.load(path, weights_only=True)
    assert same(held["state_dict"], local[-1])
    assert held[files.KEY]
    (resumed, _), _ = run_processes(run, 2, str(path))
    assert len(resumed) == 15 - len(local)


def test_one_rank_alone_gets_its_own_values_and_waits_for_nobody(tmp_path: Path) -> None:
    package = importlib.import_module(LIGHTNING)
    held: list[dict[str, Tensor]] = []

    class Alone(package.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 5 and trainer.global_rank == 1:
                held.append({name: values.clone() for name, values in module.state_dict().items()})
                held.append(trainer.strategy.lightning_module_state_dict())
                held[-1] = {name: values.clone() for name, values in held[-1].items()}

    def run(rank: int, world_size: int) -> Any:
        return held, fitted(rank, 1, tmp_path, 15, callbacks=(Alone(),))[1]

    _, ((local, state), said) = run_processes(run, 2)
    assert same(local, state)
    assert [line for line in said if "local values of this group" in line]


def test_an_exception_saves_what_the_rank_holds_and_says_so(tmp_path: Path) -> None:
    package = importlib.import_module(LIGHTNING)

    class Fails(package.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 5:
                torch.save(module.state_dict(), tmp_path / f"local-{trainer.global_rank}.pt")
                if trainer.global_rank == 1:
                    raise ArithmeticError

    def run(rank: int, world_size: int) -> Any:
        on_exception = package.callbacks.OnExceptionCheckpoint(tmp_path)
        return fitted(rank, 1, tmp_path, 15, callbacks=(on_exception, Fails()))

    errors = run_processes(run, 2, expect_failure=True, timeout=60)
    assert "ArithmeticError" in errors[1]
    state = torch.load(tmp_path / "on_exception.ckpt.sdiloco/exception/rank_00001.pt", weights_only=True)
    local = torch.load(tmp_path / "local-1.pt", weights_only=True)
    names = [name for fragment in state["engine"]["fragments"] for name in fragment["names"]]
    assert all(torch.equal(local[name], values) for name, values in zip(names, state["engine"]["local"], strict=False))


def trained_alone(rank: int, steps: int) -> tuple[nn.Module, StreamingDiLoCo]:
    """A loop of one's own that ends before anything has launched."""
    model = made("wide", rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    engine = StreamingDiLoCo(model, inner_optimizers=[optimizer])
    for step in range(1, steps + 1):
        x, y = task(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        engine.step()
    return model, engine


def test_a_loop_of_ones_own_saves_the_mean_and_what_is_frozen_keeps_the_mean_of_what_it_learnt(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        _, engine = trained_alone(rank, 40)
        engine.save(tmp_path / "a.pt")
        engine.close()
        model, engine = trained_alone(rank, 30)
        layer = model[1][0]  # type: ignore[index]
        local = layer.weight.detach().clone()
        layer.requires_grad_(False)
        engine.recut()
        engine.close()
        return local, layer.weight.detach().clone()

    (mine, one), (theirs, other) = run_ranks(run, 2)
    held, initial = torch.load(tmp_path / "a.pt", weights_only=True)["state_dict"], error_of(made("wide").state_dict())
    assert error_of(held) < 0.5 * initial
    assert torch.equal(one, other)
    torch.testing.assert_close(one, (mine + theirs) / 2)


class Looped:
    """A loop of Fabric in this rank, which nobody finishes."""

    def __init__(self, rank: int, world_size: int, folder: Path, **choices: Any) -> None:
        self.folder = folder
        strategy = StreamingDiLoCoFabricStrategy(worker_groups=2, **choices)
        self.fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        self.fabric.launch()
        net = made("wide", rank)
        self.model, self.optimizer = self.fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=2e-3))
        self.group, self.step = rank // (world_size // 2), 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            x, y = task(self.group, self.step)
            self.fabric.backward(nn.functional.mse_loss(self.model(x), y))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, name: str, with_optimizer: bool = True) -> None:
        state = {"model": self.model, **({"optimizer": self.optimizer} if with_optimizer else {})}
        self.fabric.save(self.folder / name, state)

    @property
    def local(self) -> dict[str, Tensor]:
        return {name: values.detach().clone() for name, values in self.model.module.state_dict().items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_loop_of_fabric_that_never_finishes_saves_what_it_has_trained(world_size: int, tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        told: list[str] = []
        fabric_room.rank_zero_info = told.append
        loop = Looped(rank, world_size, tmp_path, sync_every=50, fragments=[["*"]])
        loop.train(40)
        loop.save("first.pt")
        loop.save("model.pt", with_optimizer=False)
        before = loop.local
        loop.train(20)
        loop.save("landed.pt")
        return before, told, loop.fabric.strategy.outer_state_dict()

    ranks = run_processes(run, world_size)
    first, alone, landed = (torch.load(tmp_path / f"{name}.pt")["model"] for name in ("first", "model", "landed"))
    assert same(first, alone)
    mine, theirs = ranks[0][0], ranks[-1][0]
    torch.testing.assert_close(first, {name: (mine[name] + theirs[name]) / 2 for name in mine})
    assert error_of(first) < 0.5 * error_of(made("wide").state_dict())
    assert same(landed, ranks[0][2])
    told = ranks[0][1]
    assert ["holds the mean of the worker groups" in line for line in told] == [True, True, False]
    assert "Before you save the last one call fabric.strategy.finish()" in told[2]


def test_a_loop_of_fabric_that_saves_on_an_exception_waits_for_nobody(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        loop = Looped(rank, world_size, tmp_path, timeout=timedelta(seconds=30))
        loop.train(5)
        try:
            if rank == 0:
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            began = time.monotonic()
            loop.save("interrupted.pt")
            assert time.monotonic() - began < 10
        return loop.local

    local, _ = run_processes(run, 2)
    assert same(torch.load(tmp_path / "interrupted.pt")["model"], local)
