"""Checkpoints of real fits: resume to the same bits, what is written where and when, and what is
refused.
"""

import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection

from lightning_sdiloco import DenseBeginning, OuterOptimizer
from lightning_sdiloco.algorithm.config import recommended
from lightning_sdiloco.engine import checkpoint as files
from tests import fits
from tests.fits import (
    LIGHTNING,
    OTHER,
    Act,
    Announced,
    Trained,
    assert_same,
    at,
    refusal,
    save,
    saving,
    since,
    unequal,
)
from tests.ranks import agreed, in_ranks, run_processes
from tests.training import inner_optimizer, mlp

STEPS = 26
CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 5, "fragments": "strided:1"}
# They depend on how long a fit is, unless they are given.
MOMENTUM = {"outer_momentum": 0.9, "outer_optimizer": OuterOptimizer(direction="equalised")}
NEWEST: dict[str, Any] = {"save_top_k": 1, "monitor": "step", "mode": "max"}
pl = importlib.import_module(LIGHTNING)
AsyncCheckpointIO = pl.plugins.AsyncCheckpointIO
TorchCheckpointIO = pl.plugins.TorchCheckpointIO
# The oldest Lightning has neither `save_on_exception` nor `fit(weights_only=...)`.
not_in_the_oldest = since("2.6")


def held_by(module: Any) -> dict[str, Tensor]:
    """Copies of the local values that a module and its optimizer hold, and of the outer ones."""
    trainer = module.trainer
    stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
    held = {**module.state_dict(), "batches that stepped": torch.tensor(stepped)}
    for index, state in enumerate(trainer.optimizers[0].state.values()):
        held |= {f"{index} {key}": values for key, values in state.items()}
    copies = {name: local_part(values) for name, values in held.items()}
    for name, values in trainer.strategy.outer_state_dict().items():
        copies[f"outer {name}"] = values
    return copies


def local_part(values: Any) -> Tensor:
    """A copy of the values that this rank holds."""
    local = values.to_local() if hasattr(values, "to_local") else values
    return local.detach().clone()  # type: ignore[no-any-return]


def note_held(module: Any, *args: Any) -> None:
    """Keeps what a module holds before each step, so after all that happens at the end of the
    step before.
    """
    module.trace[module.trainer.global_step] = held_by(module)


def traced(
    distribution: str = LIGHTNING,
    seed: int = 0,
    inner: str = "adamw",
    net: Any = None,
    **members: Any,
) -> Any:
    """A module that keeps what it holds after every step, with dropout and BatchNorm unless
    another is given.
    """
    torch.manual_seed(seed)
    layers = nn.Sequential(*mlp(seed), nn.Dropout(0.2), nn.BatchNorm1d(3)) if net is None else net()
    members = {"on_train_batch_start": note_held, "trace": {}, **members}
    return fits.module(distribution, inner, seed, layers, **members)


def hooks_of(kind: type) -> dict[str, Any]:
    """The hooks that a class defines, as members for another."""
    return {name: hook for name, hook in vars(kind).items() if not name.startswith("__")}


class FitOptions(NamedTuple):
    """The options of `run_fit` that are not settings of the strategy."""

    groups: int = 2
    make: Callable[[str, int], Any] = traced
    place: tuple[int, int, int] | None = None
    """In the data: the group, the rank's number in it, and how many ranks share a batch."""
    fit_choices: Mapping[str, Any] = {}
    trainer_choices: Mapping[str, Any] = {}
    inspect: Callable[[Any], Any] = lambda trainer: None

    @classmethod
    def taken_from(cls, choices: dict[str, Any]) -> "FitOptions":
        """Removes the options from the choices."""
        return cls(**{name: choices.pop(name) for name in cls._fields if name in choices})

    def loader(self, rank: int, world_size: int) -> Announced:
        size = world_size // self.groups
        return Announced(self.place or (rank // size, rank % size, size), 100)


def run_fit(
    rank: int,
    world_size: int,
    distribution: str = LIGHTNING,
    steps: int = STEPS,
    callbacks: Sequence[Any] = (),
    path: Any = None,
    **choices: Any,
) -> Trained:
    """Fits in this rank. The choices are those of `FitOptions` and the settings of the strategy."""
    options = FitOptions.taken_from(choices)
    model = options.make(distribution, rank)
    settings = {"worker_groups": options.groups, **default_settings(choices), **choices}
    strategy = fits.strategy(distribution, **settings)
    trainer_choices: dict[str, Any] = {
        "max_steps": steps,
        "callbacks": list(callbacks),
        "enable_checkpointing": "Checkpoint" in str(callbacks),
        "devices": world_size,
        "limit_val_batches": 0,
        **options.trainer_choices,
    }
    trainer = fits.trainer(distribution, strategy=strategy, **trainer_choices)
    torch.manual_seed(100 + rank)
    loader = options.loader(rank, world_size)
    trainer.fit(model, loader, ckpt_path=path and str(path), **options.fit_choices)
    return {
        "trace": model.trace,
        "outer": strategy.outer_state_dict(),
        "report": strategy.report(),
        "model": {name: fits.whole(values) for name, values in model.state_dict().items()},
        "inspected": options.inspect(trainer),
    }


def default_settings(choices: Mapping[str, Any]) -> dict[str, Any]:
    if {"outer_optimizer", "route", "sync_every"} & choices.keys():
        return CHOICES
    return {**CHOICES, **MOMENTUM}


def state_dict_in(path: Any) -> dict[str, Tensor]:
    """The model in a checkpoint file."""
    return torch.load(path, weights_only=True)["state_dict"]  # type: ignore[no-any-return]


def saves_at(paths: Mapping[int, Path]) -> Any:
    """A callback that saves after each of these steps."""
    return at({step: save(path) for step, path in paths.items()})


def save_folder(checkpoint: Path) -> Path:
    (folder,) = Path(f"{checkpoint}.sdiloco").iterdir()
    return folder


def names_in(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def outer_of(fitted: Trained, step: int) -> dict[str, Tensor]:
    """The outer parameters after a step."""
    prefix = "outer "
    trace = fitted["trace"][step]
    outer_names = [name for name in trace if name.startswith(prefix)]
    return {name.removeprefix(prefix): trace[name] for name in outer_names}


def assert_resumed(
    resumed: Trained, uninterrupted: Trained, step: int, end: int | None = None
) -> None:
    """A fit that was resumed after a step holds, until its end, the bits of one never stopped."""
    actual = resumed["trace"]
    expected = uninterrupted["trace"]
    assert sorted(actual) == list(range(step, end or max(expected) + 1))
    unequal_names = {at_step: unequal(actual[at_step], expected[at_step]) for at_step in actual}
    assert {at_step: names for at_step, names in unequal_names.items() if names} == {}
    if end is None:
        assert_same(resumed["outer"], uninterrupted["outer"])
        for key in ("inner_steps", "launches", "landings"):
            assert resumed["report"][key] == uninterrupted["report"][key], key


def assert_whole(path: Any, ranks: int = 2) -> None:
    header = torch.load(path, weights_only=True)[files.KEY]
    for rank in range(ranks):
        files.read_rank(str(path), header, rank)


@pytest.fixture(scope="module")
def uninterrupted() -> list[Trained]:
    return list(run_processes(run_fit, 2))


def note_moved_files(moved: list[str]) -> None:
    """Notes the paths of the files that fsspec moves to their place.

    Lightning writes to the temporary folder and moves, which is a copy if that is another file
    system.
    """
    original = LocalFileOpener.commit

    def commit(self: Any) -> None:
        moved.append(self.path)
        original(self)

    LocalFileOpener.commit = commit


@in_ranks(2)
def test_a_fit_resumed_at_any_step_has_the_same_bits(
    rank: int, tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    """Also with the other distribution. A file takes its place in one step, wherever temporary
    files lie.
    """
    plain = uninterrupted[rank]
    fit = partial(run_fit, rank, 2)
    moved: list[str] = []
    note_moved_files(moved)
    # 5: before any flight; 11: two fragments in flight; 13: just landed; 16: launched again.
    paths = {step: tmp_path / f"{step}.ckpt" for step in (5, 11, 13, 16)}
    saved = fit(callbacks=[saves_at(paths)])
    assert_resumed(saved, plain, 0)
    folders = [f"{path}.sdiloco/" for path in paths.values()] if rank == 0 else []
    assert len(moved) == len(folders)
    assert all(map(str.startswith, moved, folders))
    fitted = [fit(path=path) for path in paths.values()]
    for step, run in zip(paths, fitted, strict=True):
        assert_resumed(run, plain, step)
    assert_resumed(fit(distribution=OTHER, path=paths[11]), plain, 11)
    # Until all have landed, after inner step 19, each file holds the mean of the groups, which they
    # exchange.
    mean_bytes = [bytes_sent(run) - bytes_sent(plain) for run in (*fitted, saved)]
    assert mean_bytes == [mean_bytes[0] * files_before for files_before in (1, 2, 3, 4, 4)]
    assert mean_bytes[0] > 0


def bytes_sent(fitted: Trained) -> int:
    return fitted["report"]["bytes_sent"]  # type: ignore[no-any-return]


@in_ranks(2)
def test_only_the_newest_checkpoint_may_be_resumable(
    rank: int, tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    fit = partial(run_fit, rank, 2)
    callbacks = saving(LIGHTNING, tmp_path, every_n_train_steps=7, save_last="link")
    shorter = fit(steps=14, callbacks=callbacks, resume="exact:newest")
    assert_resumed(shorter, uninterrupted[rank], 0, end=14)
    longer = fit(path=tmp_path / "last.ckpt", resume="exact:newest")
    assert_same(longer["outer"], uninterrupted[rank]["outer"])
    message = refusal(fit, path=tmp_path / "step=7.ckpt")
    assert "step=7" in message
    assert "resume='exact:newest'" in message
    assert names_in(tmp_path, "*.sdiloco") == ["step=14.ckpt.sdiloco"]
    older = state_dict_in(tmp_path / "step=7.ckpt")
    newest = state_dict_in(tmp_path / "step=14.ckpt")
    assert older.keys() == newest.keys(), "an ordinary file"
    outer = shorter["outer"]
    assert_same({name: newest[name] for name in outer}, outer)


class Tokens(nn.Module):
    """Lightning's small transformer, on numbers that it takes for tokens."""

    def __init__(self) -> None:
        super().__init__()
        demo = importlib.import_module(f"{OTHER}.demos.transformer")
        self.transformer = demo.Transformer(vocab_size=16, ninp=8, nhead=2, nhid=8, nlayers=1)

    def forward(self, values: Tensor) -> Tensor:
        tokens = (4 * values).long() % 16
        logits = self.transformer(tokens, tokens)
        return logits.view(len(values), -1, 16).mean(1)[:, :3]  # type: ignore[no-any-return]


def fit_tokens(rank: int, rounds: int = 5, **choices: Any) -> Trained:
    """Fits a bfloat16 transformer with Muon."""
    schedule = partial(CosineAnnealingLR, T_max=rounds)
    defaults: dict[str, Any] = {
        "sync_every": 4,
        "overlap_steps": 2,
        "fragments": "strided:2",
        "dense_beginning": DenseBeginning(2, 2),
        "outer_optimizer": OuterOptimizer(lr_schedule=schedule, clip_norm=0.05, outlier_guard=1.02),
        "make": partial(traced, inner="muon", net=Tokens),
        "trainer_choices": {"precision": "bf16-true"},
    }
    return run_fit(rank, 4, OTHER, 14, **{**defaults, **choices})


@in_ranks(4)
def test_a_bfloat16_transformer_with_muon_resumes_through_a_link_to_the_newest_file(
    rank: int, tmp_path: Path
) -> None:
    fit = partial(fit_tokens, rank)
    callbacks = saving(OTHER, tmp_path, every_n_train_steps=6, **{**NEWEST, "save_last": "link"})
    callbacks += saving(OTHER, tmp_path / "weights", every_n_train_steps=10, save_weights_only=True)
    callbacks.append(at({9: save(tmp_path / "9")}, OTHER))
    plain = fit()
    last = tmp_path / "last.ckpt"
    assert plain["report"]["landings"] > 2
    assert_resumed(fit(callbacks=callbacks), plain, 0)
    # It keeps the dense beginning that it had.
    assert_resumed(fit(path=tmp_path / "9", dense_beginning="auto"), plain, 9)
    message = refusal(fit, path=last, dense_beginning=None)
    assert "dense_beginning was DenseBeginning(rounds=2" in message
    assert_resumed(fit(path=last), plain, 12)
    message = refusal(fit, 6, path=last)
    assert "different outer_optimizer.lr_schedule. It was CosineAnnealingLR" in message
    assert_rounded(last, outer_of(plain, 12))
    # There is a file for every rank, and removing a checkpoint removes its folder.
    newest = ["last.ckpt", "step=12.ckpt", "step=12.ckpt.sdiloco"]
    assert names_in(tmp_path) == ["9", "9.sdiloco", *newest, "weights"]
    assert names_in(tmp_path / "weights") == ["step=10.ckpt"]
    folder = save_folder(tmp_path / "step=12.ckpt")
    rank_files = [f"rank_{i:05d}.pt" for i in range(4)]
    assert names_in(folder) == ["manifest.json", *rank_files]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["layout"] == {"worker_groups": 2, "group_size": 2}
    assert manifest["settings"]["sync_every"] == 4


def assert_rounded(path: Path, outer: dict[str, Tensor]) -> None:
    """A file holds the outer model in the dtypes of its parameters, and the folder the float32
    values.
    """
    assert {values.dtype for values in outer.values()} == {torch.float32}
    state_dict = state_dict_in(path)
    stored = {name: state_dict[name] for name in outer}
    assert_same(stored, {name: values.bfloat16() for name, values in outer.items()})
    stored_in_float32 = {name: values.float() for name, values in stored.items()}
    assert unequal(stored_in_float32, outer), "something is rounded"


@in_ranks(3)
def test_a_resumed_group_of_three_adds_gradients_in_the_same_order_or_says_so(
    rank: int, tmp_path: Path
) -> None:
    messages = fits.said_by("lightning_sdiloco")

    def warnings() -> int:
        return sum("may therefore round differently" in message for message in messages)

    ways: list[dict[str, Any]] = [
        {},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.0005},
        {"static_graph": True},
    ]
    for number, ddp_kwargs in enumerate(ways):
        fit = partial(run_fit, rank, 3, steps=12, groups=1, ddp_kwargs=ddp_kwargs)
        path = tmp_path / str(number)
        plain = fit(callbacks=[at({9: save(path)})])
        assert warnings() == 0
        resumed = fit(path=path)
        is_static = "static_graph" in ddp_kwargs
        assert warnings() == (is_static and rank == 0)
        if not is_static:
            assert_resumed(resumed, plain, 9)


@in_ranks(2)
def test_a_checkpoint_of_plain_ddp_is_where_all_groups_start(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "ddp.ckpt"
    trainer = fits.trainer(strategy="ddp", devices=2, max_steps=4)
    trainer.fit(fits.module(inner="adamw", net=mlp()), Announced((rank, 0, 1), 100))
    trainer.save_checkpoint(path)
    fitted = run_fit(rank, 2, steps=5, path=path, make=partial(traced, net=mlp))
    assert_same(outer_of(fitted, 4), state_dict_in(path))


class EveryEpoch(Announced):
    """The same batches in every epoch. Lightning does not restore a loader after the end of one."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.step %= self.batches
        if not (self.resumed and self.step):
            torch.rand(())  # a loader of torch takes a random number for every iterator
        yield from super().__iter__()


ONES = [(torch.ones(1, 5), torch.ones(1, 3))]
AT_EPOCH_END = {"on_step": False, "on_epoch": True}


class Logging:
    """Hooks that log in all ways, and a learning rate that depends on the logged values."""

    def training_step(self: Any, parts: Any, index: int) -> Any:
        loss = self.loss(parts)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        maxima = {"most": loss, "all": loss, "here": loss}
        self.log_dict(maxima, reduce_fx="max", **AT_EPOCH_END)
        self.log("sum", loss, reduce_fx=sum, sync_dist=True, **AT_EPOCH_END)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, **AT_EPOCH_END)
        self.many.update(loss.detach())
        self.log_dict(self.many, **AT_EPOCH_END)
        return loss

    def validation_step(self: Any, parts: Any, index: int) -> None:
        self.log("val", self.loss(parts) + torch.rand(()), sync_dist=True)

    def on_train_epoch_end(self: Any) -> None:
        metrics = self.trainer.callback_metrics
        copies = {name: value.clone() for name, value in metrics.items()}
        self.epoch_metrics[self.trainer.current_epoch] = copies

    def configure_optimizers(self: Any) -> Any:
        optimizer = inner_optimizer("adamw", self.net)
        # Nothing is good enough for them.
        plateau = partial(ReduceLROnPlateau, optimizer, patience=0, threshold=10.0, factor=0.9)
        return [optimizer], [
            {"scheduler": plateau(), "monitor": "loss_epoch"},
            {"scheduler": plateau(), "monitor": "loss", "interval": "step"},
            {"scheduler": plateau(), "monitor": "val"},
        ]


def logging_module(distribution: str, seed: int) -> Any:
    model = traced(distribution, seed, epoch_metrics={}, **hooks_of(Logging))
    model.mean = MeanMetric()
    model.many = MetricCollection([MeanMetric(), MaxMetric()])
    return model


def fit_and_log(
    rank: int, distribution: str, folder: Path, bound: dict[str, int], resume: str | None = None
) -> Trained:
    """Fits with callbacks that watch the logged values; saves unless it resumes."""
    callbacks = importlib.import_module(distribution).callbacks
    stopping = callbacks.EarlyStopping("loss_epoch", patience=9)
    best = callbacks.ModelCheckpoint(folder / "best", monitor="loss", mode="max")
    watching = [stopping, best]
    if resume is None:
        watching += saving(distribution, folder, every_n_train_steps=1)
        watching += saving(distribution, folder, filename="{epoch}", save_on_train_epoch_end=True)
    strategy = fits.strategy(distribution, sync_every=4, overlap_steps=1, fragments="strided:1")
    trainer = fits.trainer(
        distribution,
        strategy=strategy,
        callbacks=watching,
        devices=2,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        **bound,
    )
    model = logging_module(distribution, rank)
    loader = EveryEpoch((rank, 0, 1), 4)
    torch.manual_seed(100 + rank)
    validation = DataLoader(ONES, batch_size=None)  # type: ignore[arg-type]
    path = resume and str(folder / f"{resume}.ckpt")
    trainer.fit(model, loader, validation, ckpt_path=path)
    return {
        "trace": model.trace,
        "epoch_metrics": model.epoch_metrics,
        "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
        "stopping": stopping.state_dict(),
        "best_score": best.best_model_score,
    }


@in_ranks(2)
def test_metrics_of_a_resumed_epoch_are_those_of_all_its_batches(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    # Within an epoch; after its last batch, before validation and end; then after the end; in the
    # last epoch.
    checkpoints = (("step=2", 2, 0), ("step=4", 4, 0), ("epoch=0", 4, 1), ("step=9", 9, 2))
    for bound in ({"max_epochs": 3}, {"max_steps": 12}):
        run = partial(fit_and_log, rank, distribution, tmp_path / str(bound), bound)
        plain = run()
        assert plain["learning_rate"] < 0.01
        for name, step, epoch in checkpoints:
            resumed = run(name)
            assert_resumed(resumed, plain, step, end=12)
            metrics = resumed["epoch_metrics"]
            assert list(metrics) == list(range(epoch, 3)), name
            for ended_epoch, values in metrics.items():
                assert_same(values, plain["epoch_metrics"][ended_epoch])
            for key in ("learning_rate", "stopping", "best_score"):
                assert resumed[key] == plain[key], key


@in_ranks(4)
def test_lightnings_models_work_and_are_read_without_the_package(
    rank: int, tmp_path: Path, distribution: str
) -> None:
    classes = importlib.import_module(f"{distribution}.demos.boring_classes")
    path = tmp_path / "boring.ckpt"
    bounds = {"max_epochs": 2, "limit_train_batches": 6, "limit_val_batches": 3}
    for module, groups in ((classes.BoringDataModule(), 4), (classes.BoringDataModuleNoLen(), 2)):
        settings = {**CHOICES, "worker_groups": groups, "sync_every": 6}
        strategy = fits.strategy(distribution, **settings)
        trainer = fits.trainer(distribution, strategy=strategy, devices=4, **bounds)
        model = classes.BoringModel()
        trainer.fit(model, module)
        trainer.save_checkpoint(path)
        assert strategy.report()["inner_steps"] == 12
        weights = {name: values.clone() for name, values in model.state_dict().items()}
        assert agreed(weights)
        trainer.validate(model, module)
        trainer.test(model, module)
        assert len(trainer.predict(model, module)) > 0
        assert_same(dict(model.state_dict()), weights)
    # From here on, importing the package fails.
    for name in list(sys.modules):
        if name.startswith("lightning_sdiloco"):
            sys.modules[name] = None  # type: ignore[assignment]
    assert_same(state_dict_in(path), weights)
    assert_same(classes.BoringModel.load_from_checkpoint(path).state_dict(), weights)


def flip_a_bit(checkpoint: Path) -> None:
    file = save_folder(checkpoint) / "rank_00001.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def take_folder_of_step_5(checkpoint: Path) -> None:
    remove_folder(checkpoint)
    checkpoint.with_name("step=5.ckpt.sdiloco").rename(f"{checkpoint}.sdiloco")


def remove_folder(checkpoint: Path) -> None:
    shutil.rmtree(f"{checkpoint}.sdiloco")


def remove_file(name: str, checkpoint: Path) -> None:
    (save_folder(checkpoint) / name).unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "rank_00001.pt, which is missing": partial(remove_file, "rank_00001.pt"),
    "manifest.json, which is missing": partial(remove_file, "manifest.json"),
    "move or copy both": remove_folder,
    "differs from the file that was saved": flip_a_bit,
    "which is missing. The folder": take_folder_of_step_5,
}
OTHER_SETTINGS: dict[str, Any] = {
    "sync_every": 9,
    "outer_lr": 0.375,
    "outer_momentum": 0.75,
    "outer_optimizer": OuterOptimizer(outlier_guard=5.0, clip_norm=2.0),
}
CHANGED_SETTINGS = (
    "sync_every was 8, now it is 9; "
    f"outer_lr was {recommended().outer_lr}, now it is 0.375; "
    f"outer_momentum was {MOMENTUM['outer_momentum']}, now it is 0.75; "
    "outer_optimizer.clip_norm was None, now it is 2.0; outer_optimizer.outlier_guard was "
)


def test_damaged_folders_and_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    name = "step=9.ckpt"
    saves = saves_at({5: saved / "step=5.ckpt", 9: saved / name})
    run_processes(partial(run_fit, steps=10, callbacks=[saves]), 2)
    cases: dict[str, dict[str, Any]] = {CHANGED_SETTINGS: {"path": saved / name, **OTHER_SETTINGS}}
    for index, (words, damage) in enumerate(DAMAGES.items()):
        path = tmp_path / str(index) / name
        shutil.copytree(saved, path.parent)
        damage(path)
        cases[words] = {"path": path}
    for words, case in cases.items():
        errors = run_processes(partial(run_fit, **case), 2, expect_failure=True)
        assert words in errors[1].splitlines()[-1]


def test_ranks_that_do_not_resume_from_one_checkpoint_are_refused_before_they_train(
    tmp_path: Path,
) -> None:
    """As where each machine has a disk of its own, with an older copy on it, or none."""
    paths = {step: tmp_path / f"step={step}.ckpt" for step in (8, 12)}

    def resumed(rank: int, world_size: int, steps: Sequence[int | None]) -> str:
        return refusal(run_fit, rank, world_size, path=paths.get(steps[rank]))  # type: ignore[arg-type]

    run_processes(partial(run_fit, steps=12, callbacks=[saves_at(paths)]), 2)
    both = r"inner step 8 \(save .*\) on rank 0, inner step 12 \(save .*\) on rank 1"
    for steps, words in (((8, 12), both), ((8, None), "a new run on rank 1")):
        for message in run_processes(resumed, 2, steps, timeout=60):
            assert re.search(words, message)


def failing(rank: int) -> Any:
    """A callback that fails in a rank after step 14."""

    def fail(trainer: Any) -> None:
        if trainer.global_rank == rank:
            raise ArithmeticError("the user's own")

    return at({14: fail})


@not_in_the_oldest
@in_ranks(4, timeout=30)
def test_after_an_exception_ranks_keep_their_own_state_and_no_rank_waits(
    rank: int, tmp_path: Path
) -> None:
    messages = fits.said_by("lightning_sdiloco")
    saves = {"save_on_exception": True, "save_last": True, "save_top_k": 1}
    callbacks = saving(LIGHTNING, tmp_path, every_n_train_steps=6, **saves)
    callbacks += [failing(3), pl.callbacks.OnExceptionCheckpoint(tmp_path / "alone")]
    error = refusal(run_fit, rank, 4, callbacks=callbacks, kind=Exception)
    assert (error == "the user's own") == (rank == 3)
    assert names_in(tmp_path, "**/*.ckpt") == ["last.ckpt", "step=12.ckpt"]
    assert_whole(tmp_path / "last.ckpt", 4)
    assert_whole(tmp_path / "step=12.ckpt", 4)
    if rank == 3:
        for name in ("step=14", "alone/on_exception"):
            folder = tmp_path / f"{name}.ckpt.sdiloco" / "exception"
            state = torch.load(folder / "rank_00003.pt", weights_only=True)
            assert state["engine"]["counts"]["inner_steps"] == 14
            assert not (folder / "manifest.json").exists()
        text = "".join(messages)
        assert "Training cannot resume from this state" in text
        assert f"Resume from {tmp_path}/last.ckpt." in text


@in_ranks(2)
def test_after_an_exception_a_standing_checkpoint_is_named_and_the_strategy_works(
    rank: int, tmp_path: Path
) -> None:
    first = tmp_path / "a.ckpt"
    second = tmp_path / "b.ckpt"

    def remove_second(trainer: Any) -> None:
        trainer.strategy.remove_checkpoint(str(second))

    removing = at({5: save(first), 6: save(second), 7: remove_second})
    linked = {"every_n_train_steps": 6, "save_last": "link", "save_top_k": 1}
    linking = saving(LIGHTNING, tmp_path / "kept", **linked)
    messages = fits.said_by("lightning_sdiloco")
    # A run that has saved one that stands, one that was resumed and has saved none, and one that
    # links to the last.
    for name, resume, callbacks in (
        ("a.ckpt", None, [removing]),
        ("a.ckpt", first, [removing]),
        ("kept/step=12.ckpt", None, linking),
    ):
        messages.clear()
        callbacks = [*callbacks, pl.callbacks.OnExceptionCheckpoint(tmp_path), failing(rank)]
        refusal(run_fit, rank, 2, callbacks=callbacks, path=resume, kind=ArithmeticError)
        assert f"Resume from {tmp_path}/{name}." in "".join(messages)
    strategy = fits.strategy(**CHOICES)
    choices = {"devices": 2, "max_steps": 16, "callbacks": [failing(rank)]}
    trainer = fits.trainer(strategy=strategy, **choices)
    fit = partial(trainer.fit, train_dataloaders=Announced((rank, 0, 1), 100))
    refusal(fit, traced(LIGHTNING, rank), kind=ArithmeticError)
    trainer.callbacks = []
    fit(traced(LIGHTNING, rank))
    assert agreed(strategy.outer_state_dict())


@not_in_the_oldest
@in_ranks(1)
def test_a_single_rank_saves_a_whole_checkpoint_on_an_exception(rank: int, tmp_path: Path) -> None:
    callbacks = [failing(0), *saving(LIGHTNING, tmp_path, save_on_exception=True, save_last="link")]
    fit = partial(run_fit, 0, 1, groups=1)
    refusal(fit, callbacks=callbacks, kind=ArithmeticError)
    plain = fit(steps=16)
    resumed = fit(steps=16, path=tmp_path / "last.ckpt")
    # Only what the rank holds: the step of the batch that failed was not counted.
    assert_same(resumed["trace"][14], plain["trace"][14])


UNLIMITED = resource.getrlimit(resource.RLIMIT_FSIZE)


def limit_files(trainer: Any = None) -> None:
    """From now on this process can write no file of more than 1000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, UNLIMITED[1]))


def limit_checkpoint_file(trainer: Any) -> None:
    io = trainer.strategy.checkpoint_io
    save_checkpoint = io.save_checkpoint

    def save_limited(*args: Any, **kwargs: Any) -> None:
        limit_files()
        save_checkpoint(*args, **kwargs)

    io.save_checkpoint = save_limited


@in_ranks(2)
def test_a_full_disk_ends_all_ranks_with_one_error_and_leaves_nothing(
    rank: int, tmp_path: Path
) -> None:
    """One rank cannot write a file of more than some bytes: its own, or the checkpoint file, which
    is rank 0's.
    """
    for limited_rank, limit in ((1, limit_files), (0, limit_checkpoint_file)):
        folder = tmp_path / str(limited_rank)
        acts: dict[int, Act] = {12: limit} if rank == limited_rank else {}
        callbacks = [at(acts), *saving(LIGHTNING, folder, every_n_train_steps=6)]
        message = refusal(run_fit, rank, 2, callbacks=callbacks, kind=OSError)
        resource.setrlimit(resource.RLIMIT_FSIZE, UNLIMITED)
        path = folder / "step=12.ckpt"
        fault = f"The checkpoint {path} could not be saved: rank {limited_rank}: OSError"
        assert fault in message
        assert f"Its partial files were removed. Resume from {folder}/step=6.ckpt" in message
        assert names_in(folder) == ["step=6.ckpt", "step=6.ckpt.sdiloco"]
        assert not list(folder.rglob("*.part"))
        assert_whole(folder / "step=6.ckpt")


def kill_rank_0_after(seconds: float, trainer: Any) -> None:
    pid = os.getpid()
    if trainer.global_rank == 0 and os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)


def test_a_kill_at_any_moment_leaves_a_checkpoint_that_can_be_resumed(tmp_path: Path) -> None:
    seconds = random.uniform(0.0, 0.15)
    path = tmp_path / "only.ckpt"
    acts = dict.fromkeys(range(1, 1000), save(path))
    acts[9] = partial(kill_rank_0_after, seconds)
    newest = {**NEWEST, "save_last": "link"}
    callbacks = [at(acts), *saving(LIGHTNING, tmp_path, every_n_train_steps=1, **newest)]
    # Once in a while gloo does not notice that a peer is gone; then the timeout ends the other
    # rank.
    killed = partial(run_fit, steps=1000, callbacks=callbacks, timeout=timedelta(seconds=20))
    run_processes(killed, 2, expect_failure=True)
    step = torch.load(path, weights_only=True)["global_step"]
    assert step >= 7
    standing = [file for file in tmp_path.glob("*.ckpt") if file.exists()]
    assert len(standing) >= 2, seconds
    for file in standing:
        assert_whole(file)
    resumed = partial(run_fit, steps=step + 3, path=path)
    for fitted in run_processes(resumed, 2):
        assert sorted(fitted["trace"]) == [step, step + 1, step + 2]


class Gated(TorchCheckpointIO):  # type: ignore[misc, valid-type]
    """Writes checkpoint files while its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.stands = threading.Event()
        self.written = 0
        self.gate.set()

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        assert self.gate.wait(20)
        super().save_checkpoint(checkpoint, path, storage_options)
        self.written += 1
        self.stands.set()


def background(io: Any = None) -> dict[str, Any]:
    """The choices of a Trainer that writes checkpoint files in a thread."""
    return {"trainer_choices": {"plugins": [AsyncCheckpointIO(io)]}}


@in_ranks(2)
def test_a_checkpoint_removed_early_is_not_written_late(
    rank: int, tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    io = Gated()
    gates = at({2: lambda trainer: io.gate.clear(), 6: lambda trainer: io.gate.set()})
    callbacks = [gates, *saving(LIGHTNING, tmp_path, every_n_train_steps=1, **NEWEST)]
    fitted = run_fit(rank, 2, steps=8, callbacks=callbacks, **background(io))
    assert_resumed(fitted, uninterrupted[rank], 0, end=8)
    assert "save_checkpoint" not in vars(io)
    if rank == 0:
        assert 0 < io.written < 8
        assert names_in(tmp_path) == ["step=8.ckpt", "step=8.ckpt.sdiloco"]
        assert_whole(tmp_path / "step=8.ckpt")


def test_an_older_folder_stays_until_a_later_file_stands(
    tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    path = tmp_path / "only.ckpt"

    def stands_with(saves: int) -> bool:
        assert_whole(path)
        return len(names_in(Path(f"{path}.sdiloco"))) == saves

    def killed(rank: int, world_size: int) -> None:
        io = Gated()

        def hold_back(trainer: Any) -> None:
            assert rank == 1 or io.stands.wait(20)
            io.gate.clear()
            save(path)(trainer)
            save(path)(trainer)
            if rank == 0 and stands_with(3):
                os.kill(os.getpid(), signal.SIGKILL)

        acts = at({10: save(path), 12: hold_back})
        run_fit(rank, world_size, steps=14, callbacks=[acts], **background(io))

    def resumed(rank: int, world_size: int) -> None:
        saves = at({13: save(path)})
        fitted = run_fit(rank, world_size, path=path, callbacks=[saves], **background())
        assert_resumed(fitted, uninterrupted[rank], 10)

    # Killed with two saves waiting: the file that stands there still has its folder, and the next
    # save tidies up.
    errors = run_processes(killed, 2, expect_failure=True)
    assert "exit code -9" in errors[0]
    assert torch.load(path, weights_only=True)["global_step"] == 10
    run_processes(resumed, 2)
    assert stands_with(1)


def test_writing_does_not_disturb_a_thread_that_is_in_a_transaction(tmp_path: Path) -> None:
    shared = LocalFileSystem()
    theirs = tmp_path / "theirs"
    with shared.transaction, shared.open(str(theirs), "wb") as file:
        file.write(b"theirs")
        files.write_rank(str(tmp_path / "a.ckpt"), "save", 0, {"ours": 1})
        assert (tmp_path / "a.ckpt.sdiloco/save/rank_00000.pt").exists()
    assert theirs.read_bytes() == b"theirs"


class Boxed(pl.plugins.CheckpointIO):  # type: ignore[misc, name-defined]
    """Writes checkpoint files in a format of its own."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        torch.save({"box": checkpoint}, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        return torch.load(path, weights_only=weights_only)["box"]

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink()


class Thing(pl.Callback):  # type: ignore[misc, name-defined]
    """Its state needs ``weights_only=False``."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("a")}


class Elsewhere(LocalFileSystem):
    """A protocol of its own, on a folder that all ranks see. Like an object store it keeps
    listings.
    """

    protocol = "elsewhere"
    cachable = True

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("elsewhere://"))  # type: ignore[no-any-return]

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        key = self._strip_protocol(path)
        if key not in self.dircache:
            self.dircache[key] = super().ls(path, detail=True)
        return self.dircache[key] if detail else [entry["name"] for entry in self.dircache[key]]


@pytest.fixture
def elsewhere(tmp_path: Path) -> str:
    """The URL of a folder in another file system."""
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    return f"elsewhere://{tmp_path}/elsewhere"


def save_over(link: Path, trainer: Any) -> None:
    """Saves over a link to 9.ckpt."""
    if trainer.global_rank == 0:
        link.symlink_to("9.ckpt")
    trainer.strategy.barrier()
    save(link)(trainer)


KEEP_TWO: dict[str, Any] = {**NEWEST, "save_top_k": 2, "enable_version_counter": False}


@not_in_the_oldest
@in_ranks(2)
def test_a_copy_or_a_file_saved_over_a_link_replaces_the_link_only(
    rank: int, tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    def fit(step: int, **choices: Any) -> None:
        assert_resumed(run_fit(rank, 2, **choices), uninterrupted[rank], step)

    copies = tmp_path / "copies"
    for last in ("link", True):
        every_8 = {"every_n_train_steps": 8, "save_last": last, **KEEP_TWO}
        fit(0, callbacks=saving(LIGHTNING, copies, **every_8))
    fit(24, path=copies / "last.ckpt")
    assert_two_newest_in(copies, 16)

    link = tmp_path / "link.ckpt"
    acts = {9: save(tmp_path / "9.ckpt"), 12: partial(save_over, link)}
    fit(0, callbacks=[at(acts)])
    fit(12, path=link)
    assert_whole(tmp_path / "9.ckpt")
    assert not link.is_symlink()


@not_in_the_oldest
@in_ranks(2)
def test_files_of_any_format_and_place_can_be_resumed(
    rank: int, tmp_path: Path, elsewhere: str, uninterrupted: list[Trained]
) -> None:
    def fit(step: int, **choices: Any) -> None:
        assert_resumed(run_fit(rank, 2, **choices), uninterrupted[rank], step)

    boxed = tmp_path / "boxed"
    callbacks = [*saving(LIGHTNING, boxed, every_n_train_steps=11, **NEWEST), Thing()]
    fit(0, callbacks=callbacks, trainer_choices={"plugins": [Boxed()]})
    trusting = {"fit_choices": {"weights_only": False}, "checkpoint_io": Boxed()}
    fit(22, path=boxed / "step=22.ckpt", **trusting)
    assert names_in(boxed) == ["step=22.ckpt", "step=22.ckpt.sdiloco"]

    every_6 = {"every_n_train_steps": 6, "save_last": True, **KEEP_TWO}
    for name, choices in (("now", {}), ("late", background())):
        url = f"{elsewhere}/{name}"
        only = f"{url}/only.ckpt"
        saves = at({7: save(only), 9: save(only)})
        fit(0, callbacks=[saves, *saving(LIGHTNING, url, **every_6)], **choices)
        fit(9, path=only)
        fit(24, path=f"{url}/last.ckpt")
        folder = tmp_path / "elsewhere" / name
        assert_two_newest_in(folder, 18)
        assert save_folder(folder / "only.ckpt")


def assert_two_newest_in(folder: Path, step: int) -> None:
    """A folder holds the checkpoints of a step and of step 24, and the last, each with its own
    folder.
    """
    checkpoints = ["last.ckpt", f"step={step}.ckpt", "step=24.ckpt"]
    folders = [f"{name}.sdiloco" for name in checkpoints]
    assert names_in(folder, "[ls]*") == sorted(checkpoints + folders)
    for name in checkpoints:
        assert save_folder(folder / name)
