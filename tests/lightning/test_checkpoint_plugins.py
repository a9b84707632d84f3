"""Checkpoints through Lightning's plugins and callbacks: exceptions, late writers, remote paths, links, and kills."""

import importlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from torch import Tensor, nn

from lightning_sdiloco.engine import files
from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.test_checkpoint import CHOICES, STEPS, StatefulBatches, assert_same, traced
from tests.ranks import run_processes

pl = importlib.import_module(LIGHTNING)
TorchCheckpointIO = pl.plugins.TorchCheckpointIO
AsyncCheckpointIO = pl.plugins.AsyncCheckpointIO


def run_fit(
    rank: int,
    world_size: int,
    steps: int,
    callbacks: list[Any],
    resume: str | None = None,
    groups: int = 2,
    make: Any = traced,
    choices: dict[str, Any] = CHOICES,
    weights_only: bool | None = None,
    **trainer_choices: Any,
) -> dict[str, Any]:
    size = world_size // groups
    model = make(LIGHTNING, rank)
    strategy = fits.strategy(**{"worker_groups": groups, **choices})
    trainer = fits.trainer(
        strategy=strategy,
        devices=world_size,
        max_steps=steps,
        callbacks=callbacks,
        **{"enable_checkpointing": any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks), **trainer_choices},
    )
    torch.manual_seed(100 + rank)
    loader = StatefulBatches(rank // size, rank % size, size, length=100)
    trainer.fit(model, loader, ckpt_path=resume, weights_only=weights_only)
    return {"trace": model.trace, "outer": strategy.outer_state_dict()}


def saving(folder: Any, **choices: Any) -> Any:
    return pl.callbacks.ModelCheckpoint(folder, **{"filename": "{step}", "save_top_k": -1, **choices})


def saves_of(path: Path) -> list[str]:
    return sorted(save.name for save in Path(f"{path}.sdiloco").iterdir())


def assert_whole(path: Any, ranks: int = 2) -> None:
    """The file that stands there can be resumed."""
    header = torch.load(path, weights_only=True)[files.KEY]
    for rank in range(ranks):
        files.read_rank(str(path), header, rank)


def assert_continues(path: Any, expected: list[dict[str, Any]], **choices: Any) -> None:
    """A fit resumed from there gives the bits of the one that never stopped."""

    def run(rank: int, world_size: int) -> Any:
        return run_fit(rank, world_size, STEPS, [], str(path), **choices)

    for one, other in zip(run_processes(run, len(expected)), expected, strict=True):
        assert one["trace"]
        for at, values in one["trace"].items():
            assert_same(values, other["trace"][at])
        assert_same(one["outer"], other["outer"])


@pytest.fixture(scope="module")
def uninterrupted() -> list[dict[str, Any]]:
    return list(run_processes(run_fit, 2, STEPS, []))


# Exceptions


class Fail(pl.Callback):  # type: ignore[misc, name-defined]
    """Raises in one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 14 and trainer.global_rank == self.rank:
            raise ArithmeticError("the user's own")


@pytest.mark.parametrize(("world_size", "failing", "save_last"), [(2, 1, "link"), (4, 3, True)])
def test_after_an_exception_ranks_keep_their_own_state_and_no_rank_waits(
    world_size: int, failing: int, save_last: Any, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> None:
        handler = logging.FileHandler(tmp_path / f"{rank}.log")
        logging.getLogger("lightning_sdiloco").addHandler(handler)
        keep = saving(tmp_path, every_n_train_steps=6, save_on_exception=True, save_last=save_last, save_top_k=1)
        run_fit(rank, world_size, STEPS, [Fail(failing), keep])

    errors = run_processes(run, world_size, expect_failure=True, timeout=30)
    assert sorted(errors) == list(range(world_size))
    assert "ArithmeticError" in errors[failing]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last.ckpt", "step=12.ckpt"]
    kept = Path(f"{tmp_path}/step=14.ckpt.sdiloco/exception/rank_{failing:05d}.pt")
    assert torch.load(kept, weights_only=True)["engine"]["counts"]["inner_steps"] == 14
    assert not (kept.parent / "manifest.json").exists()
    told = (tmp_path / f"{failing}.log").read_text()
    named = "step=12.ckpt" if save_last == "link" else "last.ckpt"
    assert "which cannot be resumed" in told
    assert f"Resume from {tmp_path / named}." in told
    for name in ("last.ckpt", "step=12.ckpt"):
        assert_whole(tmp_path / name, world_size)


def test_what_is_named_after_an_exception_still_stands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int, world_size: int, resume: str | None = None) -> None:
        def save(name: str) -> Any:
            return lambda trainer: trainer.save_checkpoint(f"{tmp_path}/{name}.ckpt")

        def remove(trainer: Any) -> None:
            trainer.strategy.remove_checkpoint(f"{tmp_path}/b.ckpt")

        scenes = Scenes(after_5=save("a"), after_6=save("b"), after_7=remove)
        caplog.clear()
        try:
            run_fit(rank, world_size, STEPS, [scenes, pl.callbacks.OnExceptionCheckpoint(tmp_path), Fail(rank)], resume)
        except ArithmeticError:
            (tmp_path / f"{rank}.log").write_text(caplog.text)
            raise

    # A run that has saved one that stands, and a run that was resumed and has saved none.
    for resume in (None, f"{tmp_path}/a.ckpt"):
        run_processes(run, 2, resume, expect_failure=True)
        assert all(f"Resume from {tmp_path}/a.ckpt." in (tmp_path / f"{rank}.log").read_text() for rank in range(2))


def test_a_callback_that_saves_on_exceptions_only_does_not_wait_either(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> None:
        run_fit(rank, world_size, STEPS, [pl.callbacks.OnExceptionCheckpoint(tmp_path), Fail(1)])

    errors = run_processes(run, 2, expect_failure=True, timeout=30)
    assert sorted(errors) == [0, 1]
    assert (tmp_path / "on_exception.ckpt.sdiloco/exception/rank_00001.pt").exists()
    assert not (tmp_path / "on_exception.ckpt").exists()


def test_a_single_rank_saves_a_whole_checkpoint_on_an_exception(tmp_path: Path) -> None:
    def run(rank: int, world_size: int, resume: str | None = None) -> Any:
        callbacks = [Fail(0), saving(tmp_path, save_on_exception=True, save_last="link")]
        return run_fit(rank, world_size, STEPS, callbacks if resume is None else [], resume, groups=1)

    (error,) = run_processes(run, 1, expect_failure=True).values()
    assert "ArithmeticError" in error
    (expected,) = run_processes(run_fit, 1, STEPS, [], None, 1)
    (resumed,) = run_processes(run, 1, str(tmp_path / "last.ckpt"))
    # Only what the rank holds: the loader had given out the batch that failed.
    assert_same(resumed["trace"][14], expected["trace"][14])


def test_a_strategy_can_be_used_again_after_an_exception() -> None:
    def run(rank: int, world_size: int) -> Any:
        strategy = fits.strategy(**CHOICES)
        trainer = fits.trainer(strategy=strategy, devices=2, max_steps=STEPS, callbacks=[Fail(0), Fail(1)])
        with pytest.raises(ArithmeticError):
            trainer.fit(traced(LIGHTNING, rank), StatefulBatches(rank, 0, 1, length=100))
        trainer.callbacks = []
        trainer.fit(traced(LIGHTNING, rank), StatefulBatches(rank, 0, 1, length=100))
        return strategy.outer_state_dict()

    one, other = run_processes(run, 2)
    assert_same(one, other)


# Late writers


class Gated(TorchCheckpointIO):  # type: ignore[misc, valid-type]
    """Writes when it is let."""

    def __init__(self) -> None:
        self.gate, self.written = threading.Event(), 0
        self.gate.set()

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        assert self.gate.wait(20)
        super().save_checkpoint(checkpoint, path, storage_options)
        self.written += 1


class Scenes(pl.Callback):  # type: ignore[misc, name-defined]
    """Does something after some of the steps."""

    def __init__(self, **scenes: Any) -> None:
        self.scenes = {int(name.removeprefix("after_")): scene for name, scene in scenes.items()}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.scenes.get(trainer.global_step, lambda trainer: None)(trainer)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_file_that_is_written_late_can_be_resumed(tmp_path: Path, uninterrupted: Any) -> None:
    def run(rank: int, world_size: int) -> Any:
        keep = saving(tmp_path, every_n_train_steps=1, save_last=True)
        return run_fit(rank, world_size, STEPS, [keep], plugins=[AsyncCheckpointIO()])

    for one, other in zip(run_processes(run, 2), uninterrupted, strict=True):
        assert_same(one["outer"], other["outer"])
    names = {f"step={step}.ckpt" for step in range(1, STEPS + 1)} | {"last.ckpt"}
    assert {path.name for path in tmp_path.glob("*.ckpt")} == names
    for name in names:
        assert_whole(tmp_path / name)
        assert len(saves_of(tmp_path / name)) == 1
    assert_continues(tmp_path / "step=13.ckpt", uninterrupted)


def test_an_older_folder_stays_until_the_file_of_a_later_save_stands(tmp_path: Path, uninterrupted: Any) -> None:
    path = tmp_path / "only.ckpt"

    def run(rank: int, world_size: int, killed: bool) -> Any:
        io = Gated()

        def save(trainer: Any) -> None:
            trainer.save_checkpoint(path)

        def settled(trainer: Any, written: int) -> None:
            if rank == 0:
                wait_until(lambda: io.written == written)
                wait_until(lambda: len(saves_of(path)) == 1)
                assert_whole(path)
            trainer.strategy.barrier()

        def held_back(trainer: Any) -> None:
            io.gate.clear()
            save(trainer)
            save(trainer)
            if rank == 0:
                assert torch.load(path, weights_only=True)["global_step"] == 10
                assert_whole(path)
                assert len(saves_of(path)) == 3
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)
            io.gate.set()
            settled(trainer, 4)

        def twice(trainer: Any) -> None:
            save(trainer)
            settled(trainer, 2)

        return run_fit(
            rank,
            world_size,
            STEPS,
            [Scenes(after_9=save, after_10=twice, after_12=held_back)],
            plugins=[AsyncCheckpointIO(io)],
        )

    for one, other in zip(run_processes(run, 2, False), uninterrupted, strict=True):
        assert_same(one["outer"], other["outer"])
    assert torch.load(path, weights_only=True)["global_step"] == 12
    # Killed with two saves waiting: the file that stands there still has its folder, and the next save tidies up.
    run_processes(run, 2, True, expect_failure=True)
    assert torch.load(path, weights_only=True)["global_step"] == 10
    assert_continues(path, uninterrupted)

    def save_again(rank: int, world_size: int) -> Any:
        scenes = Scenes(after_13=lambda trainer: trainer.save_checkpoint(path))
        return run_fit(rank, world_size, 14, [scenes], str(path), plugins=[AsyncCheckpointIO()])

    run_processes(save_again, 2)
    assert len(saves_of(path)) == 1
    assert_continues(path, uninterrupted)


def test_a_checkpoint_that_is_removed_before_its_turn_is_not_written(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> bool:
        io = Gated()
        keep = saving(tmp_path, every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
        scenes = Scenes(after_2=lambda trainer: io.gate.clear(), after_6=lambda trainer: io.gate.set())
        run_fit(rank, world_size, 8, [scenes, keep], plugins=[AsyncCheckpointIO(io)])
        return "save_checkpoint" not in vars(io) and (io.written > 0) == (rank == 0)

    assert run_processes(run, 2) == [True, True], "the plugin is given back as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=8.ckpt", "step=8.ckpt.sdiloco"]
    assert_whole(tmp_path / "step=8.ckpt")


def test_writing_does_not_disturb_a_thread_that_is_in_a_transaction(tmp_path: Path) -> None:
    shared = LocalFileSystem()
    with shared.transaction, shared.open(str(tmp_path / "theirs"), "wb") as file:
        file.write(b"theirs")
        files.write_rank(str(tmp_path / "a.ckpt"), "save", 0, {"ours": 1})
        assert (tmp_path / "a.ckpt.sdiloco/save/rank_00000.pt").exists()
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


# Other writers


class Boxed(pl.plugins.CheckpointIO):  # type: ignore[misc, name-defined]
    """A user's own format."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        torch.save({"box": checkpoint}, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        return torch.load(path, weights_only=weights_only)["box"]

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink()


def test_a_checkpoint_io_of_the_user(tmp_path: Path, uninterrupted: Any) -> None:
    """Given to the Trainer, and to the strategy."""

    def run(rank: int, world_size: int) -> Any:
        keep = saving(tmp_path, every_n_train_steps=11, save_top_k=1, monitor="step", mode="max")
        return run_fit(rank, world_size, STEPS, [keep], plugins=[Boxed()])

    run_processes(run, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=22.ckpt", "step=22.ckpt.sdiloco"]
    assert_continues(tmp_path / "step=22.ckpt", uninterrupted, choices={**CHOICES, "checkpoint_io": Boxed()})


class Elsewhere(LocalFileSystem):
    """A protocol of its own whose files lie in a folder that all ranks see. Like an object store it keeps listings."""

    protocol = "elsewhere"
    root = ""
    cachable = True

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        path = str(path).removeprefix("elsewhere://").rstrip("/")
        return path if path.startswith(cls.root) else f"{cls.root}/{path.lstrip('/')}"

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        key = self._strip_protocol(path)
        if key not in self.dircache:
            self.dircache[key] = super().ls(path, detail=True)
        return self.dircache[key] if detail else [entry["name"] for entry in self.dircache[key]]


@pytest.mark.parametrize("late", [False, True])
def test_checkpoints_on_another_file_system(late: bool, tmp_path: Path, uninterrupted: Any) -> None:
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    Elsewhere.root = str(tmp_path)

    def run(rank: int, world_size: int) -> Any:
        def save(trainer: Any) -> None:
            trainer.save_checkpoint("elsewhere://b/only.ckpt")

        again = Scenes(after_7=save, after_9=save)
        keep = saving("elsewhere://a", every_n_train_steps=6, save_top_k=2, monitor="step", mode="max", save_last=True)
        plugins = [AsyncCheckpointIO()] if late else []
        return run_fit(rank, world_size, STEPS, [again, keep], plugins=plugins)

    for one, other in zip(run_processes(run, 2), uninterrupted, strict=True):
        assert_same(one["outer"], other["outer"])
    stands = ["last.ckpt", "step=18.ckpt", "step=24.ckpt"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(stands + [f"{n}.sdiloco" for n in stands])
    for name in ("a/last.ckpt", "a/step=24.ckpt", "b/only.ckpt"):
        assert len(saves_of(tmp_path / name)) == 1
    assert_continues("elsewhere://a/last.ckpt" if late else "elsewhere://b/only.ckpt", uninterrupted)


def test_a_file_takes_its_place_in_one_step_wherever_temporary_files_lie(tmp_path: Path) -> None:
    """Lightning writes to the temporary folder and moves, which is a copy if that is another file system."""

    def run(rank: int, world_size: int) -> list[str]:
        moved: list[str] = []
        original = LocalFileOpener.commit

        def commit(self: Any) -> None:
            moved.append(self.path)
            original(self)

        LocalFileOpener.commit = commit

        def save(trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

        run_fit(rank, world_size, 5, [Scenes(after_3=save, after_4=save)])
        return moved

    moved, none = run_processes(run, 2)
    assert len(moved) == 2
    assert none == []
    assert all(path.startswith(f"{tmp_path}/a.ckpt.sdiloco/") for path in moved)
    assert_whole(tmp_path / "a.ckpt")
    (save,) = saves_of(tmp_path / "a.ckpt")
    assert sorted(os.listdir(tmp_path / "a.ckpt.sdiloco" / save)) == ["manifest.json", "rank_00000.pt", "rank_00001.pt"]


# What is kept and removed


def test_a_copy_as_the_last_checkpoint_has_a_folder_of_its_own(tmp_path: Path, uninterrupted: Any) -> None:
    def run(rank: int, world_size: int, save_last: Any) -> Any:
        keep = saving(
            tmp_path,
            every_n_train_steps=8,
            save_top_k=2,
            monitor="step",
            mode="max",
            save_last=save_last,
            enable_version_counter=False,
        )
        return run_fit(rank, world_size, STEPS, [keep])

    stands = ["last.ckpt", "step=16.ckpt", "step=24.ckpt"]
    # A link first, which the copy then replaces, and not what it points to.
    for save_last in ("link", True):
        for one, other in zip(run_processes(run, 2, save_last), uninterrupted, strict=True):
            assert_same(one["outer"], other["outer"])
        assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")
        folders = [f"{name}.sdiloco" for name in stands if save_last is True or name != "last.ckpt"]
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stands + folders)
        assert_continues(tmp_path / "last.ckpt", uninterrupted)


def test_saving_over_a_link_leaves_the_checkpoint_that_it_pointed_to(tmp_path: Path, uninterrupted: Any) -> None:
    link = tmp_path / "last.ckpt"

    def run(rank: int, world_size: int) -> Any:
        def over(trainer: Any) -> None:
            if rank == 0:
                link.symlink_to("step=9.ckpt")
            trainer.strategy.barrier()
            trainer.save_checkpoint(link)

        scenes = Scenes(after_9=lambda trainer: trainer.save_checkpoint(tmp_path / "step=9.ckpt"), after_12=over)
        return run_fit(rank, world_size, STEPS, [scenes])

    run_processes(run, 2)
    assert not link.is_symlink()
    for path in (link, tmp_path / "step=9.ckpt"):
        assert_continues(path, uninterrupted)


def test_a_folder_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        return run_fit(rank, world_size, 12, [saving(tmp_path, every_n_train_steps=5)])

    run_processes(run, 2)
    one, other = (Path(f"{tmp_path}/step={step}.ckpt.sdiloco") for step in (5, 10))
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)

    def resume(rank: int, world_size: int) -> None:
        run_fit(rank, world_size, STEPS, [], str(tmp_path / "step=5.ckpt"))

    errors = run_processes(resume, 2, expect_failure=True)
    assert all("which is not there. The folder" in error for error in errors.values())


# What is read


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """What another script would define again."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        self.trace: dict[int, Any] = {}

    def training_step(self, parts: Any, index: int) -> Tensor:
        return nn.functional.mse_loss(self.net(parts[0]), parts[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


ELSEWHERE = """
import sys

sys.modules["lightning_sdiloco"] = None  # importing it fails

import lightning.pytorch
import pytorch_lightning
import torch
from torch import nn

checkpoint = torch.load({path!r}, weights_only=True)
for distribution in (lightning.pytorch, pytorch_lightning):

    class Net(distribution.LightningModule):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 3))

    net = Net.load_from_checkpoint({path!r}, map_location="cpu")
    assert net.hparams.width == 6
    for name, values in net.state_dict().items():
        assert torch.equal(values, checkpoint["state_dict"][name]), name
    print("loaded", len(net.state_dict()))
assert not [name for name in sys.modules if name.startswith("lightning_sdiloco.")]
"""


def test_a_checkpoint_is_read_where_the_package_is_not_installed(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        return run_fit(
            rank, world_size, 12, [saving(tmp_path, every_n_train_steps=11)], make=lambda *args: Net(width=6)
        )

    run_processes(run, 2)
    script = ELSEWHERE.format(path=str(tmp_path / "step=11.ckpt"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "loaded 9\n" * 2, done.stderr


def half(distribution: str, seed: int) -> Any:
    """Parameters in bfloat16."""
    base = type(traced(distribution, seed))

    class Half(base):  # type: ignore[misc, valid-type]
        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            return super().training_step(tuple(part.bfloat16() for part in parts), index)

    model = Half()
    model.trace = {}
    return model


def test_state_dict_has_the_dtypes_of_the_parameters_and_resuming_the_float32_values(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        keep = saving(tmp_path, every_n_train_steps=21)
        return run_fit(rank, world_size, STEPS, [keep], make=half, precision="bf16-true")

    expected = run_processes(run, 2)
    path = tmp_path / "step=21.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    trace = expected[0]["trace"][21].items()
    outer = {name.removeprefix("outer "): values for name, values in trace if name.startswith("outer ")}
    for name, values in outer.items():
        assert values.dtype == torch.float32
        assert checkpoint["state_dict"][name].dtype == torch.bfloat16
        assert torch.equal(checkpoint["state_dict"][name], values.bfloat16())
    assert any(not torch.equal(checkpoint["state_dict"][name].float(), values) for name, values in outer.items())
    assert_continues(path, expected, make=half, precision="bf16-true")


def test_a_group_of_three_ranks_resumes_to_the_same_bits_whatever_ddp_does(tmp_path: Path) -> None:
    choices = {**CHOICES, "ddp_kwargs": {"find_unused_parameters": True, "bucket_cap_mb": 0.0005}}

    def run(rank: int, world_size: int) -> Any:
        return run_fit(rank, world_size, STEPS, [saving(tmp_path, every_n_train_steps=11)], groups=1, choices=choices)

    expected = run_processes(run, 3)
    assert_continues(tmp_path / "step=11.ckpt", expected, groups=1, choices=choices)


def test_a_static_graph_in_a_group_of_three_is_said_on_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    choices = {**CHOICES, "ddp_kwargs": {"static_graph": True}}

    def run(rank: int, world_size: int, resume: str | None = None) -> int:
        caplog.clear()
        callbacks = [saving(tmp_path, every_n_train_steps=11)] if resume is None else []
        run_fit(rank, world_size, STEPS, callbacks, resume, groups=1, choices=choices)
        return sum("may round differently" in record.getMessage() for record in caplog.records)

    assert run_processes(run, 3) == [0, 0, 0]
    assert run_processes(run, 3, str(tmp_path / "step=11.ckpt")) == [1, 0, 0]


def test_resuming_without_the_restriction_to_weights(tmp_path: Path, uninterrupted: Any) -> None:
    """With ``weights_only=False``, which checkpoints with objects of the user need."""

    class Thing(pl.Callback):  # type: ignore[misc, name-defined]
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path("a")}

    def run(rank: int, world_size: int) -> Any:
        return run_fit(rank, world_size, STEPS, [saving(tmp_path, every_n_train_steps=11), Thing()])

    run_processes(run, 2)
    assert_continues(tmp_path / "step=11.ckpt", uninterrupted, weights_only=False)


# Kills


@pytest.mark.parametrize("late", [False, True])
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_can_be_resumed(late: bool, tmp_path: Path) -> None:
    """One file is overwritten and others are saved and removed at every step, until a rank gets SIGKILL."""

    def run(rank: int, world_size: int, victim: int, after: float) -> None:
        def kill(pid: int) -> None:
            time.sleep(after)
            os.kill(pid, signal.SIGKILL)

        def arm(trainer: Any) -> None:
            if rank == victim:
                pid = os.getpid()
                if os.fork() == 0:
                    kill(pid)
                    os._exit(0)

        class Overwrite(pl.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                trainer.save_checkpoint(tmp_path / "only.ckpt")

        keep = saving(tmp_path, every_n_train_steps=1, save_top_k=1, monitor="step", mode="max", save_last="link")
        plugins = [AsyncCheckpointIO()] if late else []
        # Once in a while gloo does not notice that a peer is gone; then the timeout ends the other rank.
        choices = {**CHOICES, "timeout": timedelta(seconds=20)}
        run_fit(rank, world_size, 1000, [Scenes(after_9=arm), Overwrite(), keep], choices=choices, plugins=plugins)

    moments = random.Random(0)
    for attempt in range(2):
        run_processes(run, 2, attempt % 2, moments.uniform(0.0, 0.15), expect_failure=True)
        step = torch.load(tmp_path / "only.ckpt", weights_only=True)["global_step"]
        assert step >= 7
        standing = [path for path in tmp_path.glob("*.ckpt") if path.exists()]
        assert len(standing) >= (1 if late else 2)
        for path in standing:
            assert_whole(path)

        for trained in run_processes(run_fit, 2, step + 3, [], str(tmp_path / "only.ckpt")):
            assert sorted(trained["trace"]) == [step, step + 1, step + 2]
        for path in tmp_path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
