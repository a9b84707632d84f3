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
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

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
LATE: dict[str, Any] = {"plugins": [AsyncCheckpointIO()]}
# The oldest Lightning has neither `save_on_exception` nor `fit(weights_only=...)`.
not_in_the_oldest = since("2.6")


def held_by(module: Any) -> dict[str, Tensor]:
    stepped = module.trainer.fit_loop.epoch_loop._batches_that_stepped
    held = {**module.state_dict(), "batches that stepped": torch.tensor(stepped)}
    for index, state in enumerate(module.trainer.optimizers[0].state.values()):
        held |= {f"{index} {key}": values for key, values in state.items()}
    local = {
        name: values.to_local() if hasattr(values, "to_local") else values
        for name, values in held.items()
    }
    outer = {
        f"outer {name}": values
        for name, values in module.trainer.strategy.outer_state_dict().items()
    }
    return {name: values.detach().clone() for name, values in local.items()} | outer


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

    def on_train_batch_start(self: Any, *args: Any) -> None:
        # Before the next step, so after all that happens at the end of the one before.
        self.trace[self.trainer.global_step] = held_by(self)

    torch.manual_seed(seed)
    made = nn.Sequential(*mlp(seed), nn.Dropout(0.2), nn.BatchNorm1d(3)) if net is None else net()
    return fits.module(
        distribution,
        inner,
        seed,
        made,
        on_train_batch_start=on_train_batch_start,
        trace={},
        **members,
    )


def run_fit(
    rank: int,
    world_size: int,
    distribution: str = LIGHTNING,
    steps: int = STEPS,
    callbacks: Sequence[Any] = (),
    path: Any = None,
    groups: int = 2,
    make: Callable[[str, int], Any] = traced,
    place: tuple[int, int, int] | None = None,
    weights_only: bool | None = None,
    trainer_choices: dict[str, Any] | None = None,
    inspect: Callable[[Any], Any] = lambda trainer: None,
    **choices: Any,
) -> Trained:
    """Fits in this rank, at a place in the data: its group, its number in the group, and how many
    share a batch.
    """
    size = world_size // groups
    model = make(distribution, rank)
    own = (
        CHOICES
        if {"outer_optimizer", "route", "sync_every"} & choices.keys()
        else {**CHOICES, **MOMENTUM}
    )
    strategy = fits.strategy(distribution, **{"worker_groups": groups, **own, **choices})
    saves = any("Checkpoint" in type(callback).__name__ for callback in callbacks)
    common: dict[str, Any] = {
        "max_steps": steps,
        "callbacks": list(callbacks),
        "enable_checkpointing": saves,
    }
    common |= {"devices": world_size, "limit_val_batches": 0}
    trainer = fits.trainer(distribution, strategy=strategy, **common | (trainer_choices or {}))
    torch.manual_seed(100 + rank)
    loader = Announced(place or (rank // size, rank % size, size), 100)
    more = {} if weights_only is None else {"weights_only": weights_only}
    trainer.fit(model, loader, ckpt_path=path and str(path), **more)
    held = {
        name: getattr(values, "full_tensor", values.clone)()
        for name, values in model.state_dict().items()
    }
    kept = {
        "trace": model.trace,
        "outer": strategy.outer_state_dict(),
        "report": strategy.report(),
        "model": held,
    }
    return {**kept, "inspected": inspect(trainer)}


def save_folder(checkpoint: Path) -> Path:
    (folder,) = Path(f"{checkpoint}.sdiloco").iterdir()
    return folder


def names_in(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def outer_of(rank: Trained, step: int) -> dict[str, Tensor]:
    trace = rank["trace"][step].items()
    return {
        name.removeprefix("outer "): values for name, values in trace if name.startswith("outer ")
    }


def assert_resumed(one: Trained, other: Trained, step: int, end: int | None = None) -> None:
    assert sorted(one["trace"]) == list(range(step, end or max(other["trace"]) + 1))
    assert {
        at: wrong for at in one["trace"] if (wrong := unequal(one["trace"][at], other["trace"][at]))
    } == {}
    if end is None:
        assert_same(one["outer"], other["outer"])
        counted = ("inner_steps", "launches", "landings")
        assert [key for key in counted if one["report"][key] != other["report"][key]] == []


def assert_whole(path: Any, ranks: int = 2) -> None:
    header = torch.load(path, weights_only=True)[files.KEY]
    for rank in range(ranks):
        files.read_rank(str(path), header, rank)


@pytest.fixture(scope="module")
def uninterrupted() -> list[Trained]:
    return list(run_processes(run_fit, 2))


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

    def commit(self: Any) -> None:
        moved.append(self.path)
        original(self)

    # Lightning writes to the temporary folder and moves, which is a copy if that is another file
    # system.
    original = LocalFileOpener.commit
    LocalFileOpener.commit = commit
    # 5: before any flight; 11: two fragments in flight; 13: just landed; 16: launched again.
    steps = (5, 11, 13, 16)
    saved = fit(callbacks=[at({step: save(tmp_path / f"{step}.ckpt") for step in steps})])
    assert_resumed(saved, plain, 0)
    written = [f"{tmp_path}/{step}.ckpt.sdiloco/" for step in steps] if rank == 0 else []
    assert [path.startswith(folder) for path, folder in zip(moved, written, strict=True)] == [
        True
    ] * len(written)
    resumed = [fit(path=tmp_path / f"{step}.ckpt") for step in steps]
    for step, one in zip(steps, resumed, strict=True):
        assert_resumed(one, plain, step)
    assert_resumed(fit(distribution=OTHER, path=tmp_path / "11.ckpt"), plain, 11)
    # Until all have landed, after inner step 19, each file holds the mean of the groups, which they
    # exchange.
    of_means = [
        one["report"]["bytes_sent"] - plain["report"]["bytes_sent"] for one in (*resumed, saved)
    ]
    assert of_means == [of_means[0] * files_before for files_before in (1, 2, 3, 4, 4)]
    assert of_means[0] > 0


@in_ranks(2)
def test_only_the_newest_checkpoint_may_be_resumable(
    rank: int, tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    fit = partial(run_fit, rank, 2)
    keep = saving(LIGHTNING, tmp_path, every_n_train_steps=7, save_last="link")
    shorter = fit(steps=14, callbacks=keep, resume="exact:newest")
    assert_resumed(shorter, uninterrupted[rank], 0, end=14)
    longer = fit(path=tmp_path / "last.ckpt", resume="exact:newest")
    assert_same(longer["outer"], uninterrupted[rank]["outer"])
    older = refusal(fit, path=tmp_path / "step=7.ckpt")
    assert "step=7" in older
    assert "resume='exact:newest'" in older
    assert names_in(tmp_path, "*.sdiloco") == ["step=14.ckpt.sdiloco"]
    states = [
        torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        for step in (7, 14)
    ]
    assert states[0].keys() == states[1].keys(), "an ordinary file"
    assert_same({name: states[1][name] for name in shorter["outer"]}, shorter["outer"])


class Tokens(nn.Module):
    """Lightning's small transformer, on numbers that it takes for tokens."""

    def __init__(self) -> None:
        super().__init__()
        made = importlib.import_module(f"{OTHER}.demos.transformer").Transformer
        self.transformer = made(vocab_size=16, ninp=8, nhead=2, nhid=8, nlayers=1)

    def forward(self, values: Tensor) -> Tensor:
        tokens = (4 * values).long() % 16
        return self.transformer(tokens, tokens).view(len(values), -1, 16).mean(1)[:, :3]  # type: ignore[no-any-return]


@in_ranks(4)
def test_a_bfloat16_transformer_with_muon_resumes_through_a_link_to_the_newest_file(
    rank: int, tmp_path: Path
) -> None:
    def fit(rounds: int = 5, **more: Any) -> Trained:
        schedule = partial(CosineAnnealingLR, T_max=rounds)
        outer = OuterOptimizer(lr_schedule=schedule, clip_norm=0.05, outlier_guard=1.02)
        choices: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": "strided:2"}
        choices["dense_beginning"] = DenseBeginning(2, 2)
        make = partial(traced, inner="muon", net=Tokens)
        choices["trainer_choices"] = {"precision": "bf16-true"}
        return run_fit(rank, 4, OTHER, 14, make=make, outer_optimizer=outer, **{**choices, **more})

    keep = saving(OTHER, tmp_path, every_n_train_steps=6, **{**NEWEST, "save_last": "link"})
    keep += saving(OTHER, tmp_path / "weights", every_n_train_steps=10, save_weights_only=True)
    plain = fit()
    last = tmp_path / "last.ckpt"
    assert plain["report"]["landings"] > 2
    assert_resumed(fit(callbacks=[*keep, at({9: save(tmp_path / "9")}, OTHER)]), plain, 0)
    # It keeps the dense beginning that it had.
    assert_resumed(fit(path=tmp_path / "9", dense_beginning="auto"), plain, 9)
    assert "dense_beginning was DenseBeginning(rounds=2" in refusal(
        fit, path=last, dense_beginning=None
    )
    assert_resumed(fit(path=last), plain, 12)
    assert "another outer_optimizer.lr_schedule: it was CosineAnnealingLR" in refusal(
        fit, 6, path=last
    )
    # The file holds the outer model in the dtypes of its parameters, and the folder the float32
    # values.
    state = torch.load(last, weights_only=True)["state_dict"]
    outer = outer_of(plain, 12)
    assert {values.dtype for values in outer.values()} == {torch.float32}
    assert_same(
        {name: state[name] for name in outer},
        {name: values.bfloat16() for name, values in outer.items()},
    )
    assert unequal({name: state[name].float() for name in outer}, outer), "something is rounded"
    # There is a file for every rank, and removing a checkpoint removes its folder.
    beside = ["9", "9.sdiloco", "last.ckpt", "step=12.ckpt", "step=12.ckpt.sdiloco", "weights"]
    assert names_in(tmp_path) == beside
    assert names_in(tmp_path / "weights") == ["step=10.ckpt"]
    folder = save_folder(tmp_path / "step=12.ckpt")
    assert names_in(folder) == ["manifest.json", *(f"rank_{i:05d}.pt" for i in range(4))]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["layout"] == {"worker_groups": 2, "group_size": 2}
    assert manifest["settings"]["sync_every"] == 4


@in_ranks(3)
def test_a_resumed_group_of_three_adds_gradients_in_the_same_order_or_says_so(
    rank: int, tmp_path: Path
) -> None:
    said = fits.said_by("lightning_sdiloco")
    ways: list[dict[str, Any]] = [
        {},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.0005},
        {"static_graph": True},
    ]
    for way, ddp_kwargs in enumerate(ways):
        fit = partial(run_fit, rank, 3, steps=12, groups=1, ddp_kwargs=ddp_kwargs)
        path = tmp_path / str(way)
        plain = fit(callbacks=[at({9: save(path)})])
        assert not any("may round differently" in text for text in said)
        resumed = fit(path=path)
        told = sum("may round differently" in text for text in said)
        assert told == ("static_graph" in ddp_kwargs and rank == 0)
        if "static_graph" not in ddp_kwargs:
            assert_resumed(resumed, plain, 9)


@in_ranks(2)
def test_a_checkpoint_of_plain_ddp_is_where_all_groups_start(rank: int, tmp_path: Path) -> None:
    trainer = fits.trainer(strategy="ddp", devices=2, max_steps=4)
    trainer.fit(fits.module(inner="adamw", net=mlp()), Announced((rank, 0, 1), 100))
    trainer.save_checkpoint(path := tmp_path / "ddp.ckpt")
    fitted = run_fit(rank, 2, steps=5, path=path, make=partial(traced, net=mlp))
    assert_same(outer_of(fitted, 4), torch.load(path, weights_only=True)["state_dict"])


class EveryEpoch(Announced):
    """The same batches in every epoch. Lightning does not restore a loader after the end of one."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.step %= self.batches
        if not (self.resumed and self.step):
            torch.rand(())  # a loader of torch takes a random number for every iterator
        yield from super().__iter__()


def logging_module(distribution: str, seed: int) -> Any:
    """A module that logs in all ways, and whose learning rate depends on what it logged."""

    def training_step(self: Any, parts: Any, index: int) -> Any:
        loss = self.loss(parts)
        of_epoch = {"on_step": False, "on_epoch": True}
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"most": loss, "all": loss, "here": loss}, reduce_fx="max", **of_epoch)
        self.log("sum", loss, reduce_fx=sum, sync_dist=True, **of_epoch)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, **of_epoch)
        self.many.update(loss.detach())
        self.log_dict(self.many, **of_epoch)
        return loss

    def validation_step(self: Any, parts: Any, index: int) -> None:
        self.log("val", self.loss(parts) + torch.rand(()), sync_dist=True)

    def on_train_epoch_end(self: Any) -> None:
        self.ended[self.trainer.current_epoch] = {
            k: v.clone() for k, v in self.trainer.callback_metrics.items()
        }

    def configure_optimizers(self: Any) -> Any:
        optimizer = inner_optimizer("adamw", self.net)
        # Nothing is good enough for them.
        none_is = {"patience": 0, "threshold": 10.0, "factor": 0.9}
        watched = (
            {"monitor": "loss_epoch"},
            {"monitor": "loss", "interval": "step"},
            {"monitor": "val"},
        )
        return [optimizer], [
            {"scheduler": ReduceLROnPlateau(optimizer, **none_is), **by} for by in watched
        ]

    hooks = (training_step, validation_step, on_train_epoch_end, configure_optimizers)
    model = traced(distribution, seed, ended={}, **{hook.__name__: hook for hook in hooks})
    model.mean = MeanMetric()
    model.many = MetricCollection([MeanMetric(), MaxMetric()])
    return model


@in_ranks(2)
def test_metrics_of_a_resumed_epoch_are_those_of_all_its_batches(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    callbacks = importlib.import_module(distribution).callbacks

    def run(bound: dict[str, int], resume: str | None = None) -> Trained:
        model = logging_module(distribution, rank)
        folder = tmp_path / str(bound)
        stopping = callbacks.EarlyStopping("loss_epoch", patience=9)
        best = callbacks.ModelCheckpoint(folder / "best", monitor="loss", mode="max")
        saves = saving(distribution, folder, every_n_train_steps=1)
        saves += saving(distribution, folder, filename="{epoch}", save_on_train_epoch_end=True)
        strategy = fits.strategy(distribution, sync_every=4, overlap_steps=1, fragments="strided:1")
        given = {"devices": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True, **bound}
        watching = [stopping, best, *([] if resume else saves)]
        trainer = fits.trainer(distribution, strategy=strategy, callbacks=watching, **given)
        torch.manual_seed(100 + rank)
        seen = DataLoader([(torch.ones(1, 5), torch.ones(1, 3))], batch_size=None)  # type: ignore[arg-type]
        trainer.fit(
            model,
            EveryEpoch((rank, 0, 1), 4),
            seen,
            ckpt_path=resume and str(folder / f"{resume}.ckpt"),
        )
        stopped = stopping.state_dict()
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        rests = (rate, stopped["wait_count"], stopped["best_score"], best.best_model_score)
        return {"trace": model.trace, "ended": model.ended, "rests": rests}

    for bound in ({"max_epochs": 3}, {"max_steps": 12}):
        plain = run(bound)
        assert plain["rests"][0] < 0.01
        # Within an epoch; after its last batch, before validation and end; then after the end; in
        # the last epoch.
        for name, step, epoch in (
            ("step=2", 2, 0),
            ("step=4", 4, 0),
            ("epoch=0", 4, 1),
            ("step=9", 9, 2),
        ):
            resumed = run(bound, name)
            assert_resumed(resumed, plain, step, end=12)
            assert list(resumed["ended"]) == list(range(epoch, 3)), name
            assert {
                at for at, values in resumed["ended"].items() if unequal(values, plain["ended"][at])
            } == set()
            assert resumed["rests"] == plain["rests"]


@in_ranks(4)
def test_lightnings_models_work_and_are_read_without_the_package(
    rank: int, tmp_path: Path, distribution: str
) -> None:
    classes = importlib.import_module(f"{distribution}.demos.boring_classes")
    for module, groups in ((classes.BoringDataModule(), 4), (classes.BoringDataModuleNoLen(), 2)):
        strategy = fits.strategy(
            distribution, **{"worker_groups": groups, **CHOICES, "sync_every": 6}
        )
        chosen: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 6, "limit_val_batches": 3}
        trainer = fits.trainer(distribution, strategy=strategy, devices=4, **chosen)
        trainer.fit(model := classes.BoringModel(), module)
        trainer.save_checkpoint(tmp_path / "boring.ckpt")
        assert strategy.report()["inner_steps"] == 12
        weights = {name: values.clone() for name, values in model.state_dict().items()}
        assert agreed(weights)
        trainer.validate(model, module)
        trainer.test(model, module)
        assert len(trainer.predict(model, module)) > 0
        assert_same(dict(model.state_dict()), weights)
    # From here on whatever imports the package fails.
    sys.modules.update(
        dict.fromkeys([name for name in sys.modules if name.startswith("lightning_sdiloco")])
    )
    assert_same(torch.load(tmp_path / "boring.ckpt", weights_only=True)["state_dict"], weights)
    assert_same(
        classes.BoringModel.load_from_checkpoint(tmp_path / "boring.ckpt").state_dict(), weights
    )


def test_damaged_folders_and_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    def alter(path: Path) -> None:
        file = save_folder(path) / "rank_00001.pt"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    def of_another_checkpoint(path: Path) -> None:
        shutil.rmtree(f"{path}.sdiloco")
        path.with_name("step=5.ckpt.sdiloco").rename(f"{path}.sdiloco")

    saved = tmp_path / "saved"
    run_processes(
        partial(
            run_fit, steps=10, callbacks=[at({n: save(saved / f"step={n}.ckpt") for n in (5, 9)})]
        ),
        2,
    )
    damages: list[tuple[str, Callable[[Path], Any]]] = [
        (
            "rank_00001.pt, which is missing",
            lambda path: (save_folder(path) / "rank_00001.pt").unlink(),
        ),
        (
            "manifest.json, which is missing",
            lambda path: (save_folder(path) / "manifest.json").unlink(),
        ),
        ("move or copy both", lambda path: shutil.rmtree(f"{path}.sdiloco")),
        ("is not what was saved", alter),
        ("which is missing. The folder", of_another_checkpoint),
    ]
    lr = recommended().outer_lr
    momentum = MOMENTUM["outer_momentum"]
    outer = OuterOptimizer(outlier_guard=5.0, clip_norm=2.0)
    changed = f"sync_every was 8, now it is 9; outer_lr was {lr}, now it is 0.375; outer_momentum was {momentum}, now "
    changed += "it is 0.75; outer_optimizer.clip_norm was None, now it is 2.0; outer_optimizer.outlier_guard was "
    given = {"sync_every": 9, "outer_lr": 0.375, "outer_momentum": 0.75, "outer_optimizer": outer}
    cases: dict[str, dict[str, Any]] = {changed: {"path": saved / "step=9.ckpt", **given}}
    for index, (words, damage) in enumerate(damages):
        cases[words] = {"path": Path(shutil.copytree(saved, tmp_path / str(index))) / "step=9.ckpt"}
        damage(cases[words]["path"])
    refused = {
        words: run_processes(partial(run_fit, **case), 2, expect_failure=True)
        for words, case in cases.items()
    }
    told = {words: errors[1].splitlines()[-1] for words, errors in refused.items()}
    assert {words: text for words, text in told.items() if words not in text} == {}


def test_ranks_that_do_not_resume_from_one_checkpoint_are_refused_before_they_train(
    tmp_path: Path,
) -> None:
    """As where each machine has a disk of its own, with an older copy on it, or none."""

    def resumed(rank: int, world_size: int, steps: Sequence[int | None]) -> str:
        path = steps[rank] and tmp_path / f"step={steps[rank]}.ckpt"
        return refusal(run_fit, rank, world_size, path=path)

    run_processes(
        partial(
            run_fit,
            steps=12,
            callbacks=[at({n: save(tmp_path / f"step={n}.ckpt") for n in (8, 12)})],
        ),
        2,
    )
    for steps, words in (
        ((8, 12), r"inner step 8 \(save .*\) on rank 0, inner step 12 \(save .*\) on rank 1"),
        ((8, None), "a new run on rank 1"),
    ):
        assert [
            told
            for told in run_processes(resumed, 2, steps, timeout=60)
            if not re.search(words, told)
        ] == []


def fail(rank: int, trainer: Any) -> None:
    if trainer.global_rank == rank:
        raise ArithmeticError("the user's own")


@not_in_the_oldest
@in_ranks(4, timeout=30)
def test_after_an_exception_ranks_keep_their_own_state_and_no_rank_waits(
    rank: int, tmp_path: Path
) -> None:
    said = fits.said_by("lightning_sdiloco")
    keep = saving(
        LIGHTNING,
        tmp_path,
        every_n_train_steps=6,
        save_on_exception=True,
        save_last=True,
        save_top_k=1,
    )
    keep += [at({14: partial(fail, 3)}), pl.callbacks.OnExceptionCheckpoint(tmp_path / "alone")]
    error = refusal(run_fit, rank, 4, callbacks=keep, kind=Exception)
    assert (error == "the user's own") == (rank == 3)
    assert names_in(tmp_path, "**/*.ckpt") == ["last.ckpt", "step=12.ckpt"]
    for name in ("last.ckpt", "step=12.ckpt"):
        assert_whole(tmp_path / name, 4)
    for name in ("step=14", "alone/on_exception") if rank == 3 else ():
        kept = tmp_path / f"{name}.ckpt.sdiloco" / "exception" / "rank_00003.pt"
        assert torch.load(kept, weights_only=True)["engine"]["counts"]["inner_steps"] == 14
        assert not (kept.parent / "manifest.json").exists()
        assert "It cannot be resumed" in "".join(said)
        assert f"Resume from {tmp_path}/last.ckpt." in "".join(said)


@in_ranks(2)
def test_after_an_exception_a_standing_checkpoint_is_named_and_the_strategy_works(
    rank: int, tmp_path: Path
) -> None:
    acts = {5: save(tmp_path / "a.ckpt"), 6: save(tmp_path / "b.ckpt")}
    acts[7] = lambda trainer: trainer.strategy.remove_checkpoint(f"{tmp_path}/b.ckpt")
    linked = saving(
        LIGHTNING, tmp_path / "kept", every_n_train_steps=6, save_last="link", save_top_k=1
    )
    said = fits.said_by("lightning_sdiloco")
    # A run that has saved one that stands, one that was resumed and has saved none, and one that
    # links to the last.
    for named, resume, callbacks in (
        ("a.ckpt", None, [at(acts)]),
        ("a.ckpt", tmp_path / "a.ckpt", [at(acts)]),
        ("kept/step=12.ckpt", None, linked),
    ):
        said.clear()
        keep = [
            *callbacks,
            pl.callbacks.OnExceptionCheckpoint(tmp_path),
            at({14: partial(fail, rank)}),
        ]
        refusal(run_fit, rank, 2, callbacks=keep, path=resume, kind=ArithmeticError)
        assert f"Resume from {tmp_path}/{named}." in "".join(said)
    strategy = fits.strategy(**CHOICES)
    trainer = fits.trainer(
        strategy=strategy, devices=2, max_steps=16, callbacks=[at({14: partial(fail, rank)})]
    )
    fit = partial(trainer.fit, train_dataloaders=Announced((rank, 0, 1), 100))
    refusal(fit, traced(LIGHTNING, rank), kind=ArithmeticError)
    trainer.callbacks = []
    fit(traced(LIGHTNING, rank))
    assert agreed(strategy.outer_state_dict())


@not_in_the_oldest
@in_ranks(1)
def test_a_single_rank_saves_a_whole_checkpoint_on_an_exception(rank: int, tmp_path: Path) -> None:
    keep = saving(LIGHTNING, tmp_path, save_on_exception=True, save_last="link")
    alone = partial(run_fit, 0, 1, groups=1)
    refusal(alone, callbacks=[at({14: partial(fail, 0)}), *keep], kind=ArithmeticError)
    plain = alone(steps=16)
    resumed = alone(steps=16, path=tmp_path / "last.ckpt")
    # Only what the rank holds: the step of the batch that failed was not counted.
    assert_same(resumed["trace"][14], plain["trace"][14])


@in_ranks(2)
def test_a_full_disk_ends_all_ranks_with_one_error_and_leaves_nothing(
    rank: int, tmp_path: Path
) -> None:
    """One rank cannot write a file of more than some bytes: its own, or the checkpoint file, which
    is rank 0's.
    """
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))

    def limit_file(trainer: Any) -> None:
        io = trainer.strategy.checkpoint_io
        before = io.save_checkpoint
        io.save_checkpoint = lambda *args, **kwargs: (limit(), before(*args, **kwargs))

    for limited, fill in ((1, lambda trainer: limit()), (0, limit_file)):
        folder = tmp_path / str(limited)
        keep = saving(LIGHTNING, folder, every_n_train_steps=6)
        acts: dict[int, Act] = {12: fill} if rank == limited else {}
        told = refusal(run_fit, rank, 2, callbacks=[at(acts), *keep], kind=OSError)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert (
            f"The checkpoint {folder}/step=12.ckpt could not be saved: rank {limited}: OSError"
            in told
        )
        assert f"Nothing is left of it. Resume from {folder}/step=6.ckpt" in told
        assert names_in(folder) == ["step=6.ckpt", "step=6.ckpt.sdiloco"]
        assert not list(folder.rglob("*.part"))
        assert_whole(folder / "step=6.ckpt")


def test_a_kill_at_any_moment_leaves_a_checkpoint_that_can_be_resumed(tmp_path: Path) -> None:
    after = random.uniform(0.0, 0.15)

    def arm(trainer: Any) -> None:
        pid = os.getpid()
        if trainer.global_rank == 0 and os.fork() == 0:
            time.sleep(after)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)

    overwriting = at({**dict.fromkeys(range(1, 1000), save(tmp_path / "only.ckpt")), 9: arm})
    keep = saving(LIGHTNING, tmp_path, every_n_train_steps=1, **{**NEWEST, "save_last": "link"})
    # Once in a while gloo does not notice that a peer is gone; then the timeout ends the other
    # rank.
    run = partial(
        run_fit, steps=1000, callbacks=[overwriting, *keep], timeout=timedelta(seconds=20)
    )
    run_processes(run, 2, expect_failure=True)
    step = torch.load(tmp_path / "only.ckpt", weights_only=True)["global_step"]
    assert step >= 7
    standing = [path for path in tmp_path.glob("*.ckpt") if path.exists()]
    assert len(standing) >= 2, after
    for path in standing:
        assert_whole(path)
    for trained in run_processes(partial(run_fit, steps=step + 3, path=tmp_path / "only.ckpt"), 2):
        assert sorted(trained["trace"]) == [step, step + 1, step + 2]


class Gated(TorchCheckpointIO):  # type: ignore[misc, valid-type]
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


@in_ranks(2)
def test_a_checkpoint_removed_early_is_not_written_late(
    rank: int, tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    io = Gated()
    gates = at({2: lambda trainer: io.gate.clear(), 6: lambda trainer: io.gate.set()})
    keep = [gates, *saving(LIGHTNING, tmp_path, every_n_train_steps=1, **NEWEST)]
    late = run_fit(
        rank, 2, steps=8, callbacks=keep, trainer_choices={"plugins": [AsyncCheckpointIO(io)]}
    )
    assert_resumed(late, uninterrupted[rank], 0, end=8)
    assert "save_checkpoint" not in vars(io)
    if rank == 0:
        assert 0 < io.written < 8
        assert names_in(tmp_path) == ["step=8.ckpt", "step=8.ckpt.sdiloco"]
        assert_whole(tmp_path / "step=8.ckpt")


def test_an_older_folder_stays_until_a_later_file_stands(
    tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    path = tmp_path / "only.ckpt"

    def stands(saves: int) -> bool:
        assert_whole(path)
        return len(names_in(Path(f"{path}.sdiloco"))) == saves

    def killed(rank: int, world_size: int) -> None:
        io = Gated()

        def hold_back(trainer: Any) -> None:
            assert rank == 1 or io.stands.wait(20)
            io.gate.clear()
            save(path)(trainer)
            save(path)(trainer)
            if rank == 0 and stands(3):
                os.kill(os.getpid(), signal.SIGKILL)

        acts = at({10: save(path), 12: hold_back})
        run_fit(
            rank,
            world_size,
            steps=14,
            callbacks=[acts],
            trainer_choices={"plugins": [AsyncCheckpointIO(io)]},
        )

    def resumed(rank: int, world_size: int) -> None:
        late: dict[str, Any] = {"callbacks": [at({13: save(path)})], "trainer_choices": LATE}
        assert_resumed(run_fit(rank, world_size, path=path, **late), uninterrupted[rank], 10)

    # Killed with two saves waiting: the file that stands there still has its folder, and the next
    # save tidies up.
    assert "exit code -9" in run_processes(killed, 2, expect_failure=True)[0]
    assert torch.load(path, weights_only=True)["global_step"] == 10
    run_processes(resumed, 2)
    assert stands(1)


def test_writing_does_not_disturb_a_thread_that_is_in_a_transaction(tmp_path: Path) -> None:
    shared = LocalFileSystem()
    with shared.transaction, shared.open(str(tmp_path / "theirs"), "wb") as file:
        file.write(b"theirs")
        files.write_rank(str(tmp_path / "a.ckpt"), "save", 0, {"ours": 1})
        assert (tmp_path / "a.ckpt.sdiloco/save/rank_00000.pt").exists()
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


class Boxed(pl.plugins.CheckpointIO):  # type: ignore[misc, name-defined]
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


@not_in_the_oldest
@in_ranks(2)
def test_files_of_any_format_and_place_can_be_resumed(
    rank: int, tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    link = tmp_path / "link.ckpt"
    copies = tmp_path / "copies"
    boxed = tmp_path / "boxed"

    def fit(step: int, **more: Any) -> None:
        assert_resumed(run_fit(rank, 2, **more), uninterrupted[rank], step)

    def over(trainer: Any) -> None:
        """Saves over a link, which is replaced, and not what it points to."""
        if rank == 0:
            link.symlink_to("9.ckpt")
        trainer.strategy.barrier()
        save(link)(trainer)

    newest: dict[str, Any] = {**NEWEST, "save_top_k": 2, "enable_version_counter": False}
    # A copy replaces a link, and not what it points to.
    for last in ("link", True):
        fit(0, callbacks=saving(LIGHTNING, copies, every_n_train_steps=8, save_last=last, **newest))
    fit(24, path=copies / "last.ckpt")
    fit(0, callbacks=[at({9: save(tmp_path / "9.ckpt"), 12: over})])
    fit(12, path=link)
    assert_whole(tmp_path / "9.ckpt")
    assert not link.is_symlink()

    box = [*saving(LIGHTNING, boxed, every_n_train_steps=11, **NEWEST), Thing()]
    fit(0, callbacks=box, trainer_choices={"plugins": [Boxed()]})
    fit(22, path=boxed / "step=22.ckpt", checkpoint_io=Boxed(), weights_only=False)
    assert names_in(boxed) == ["step=22.ckpt", "step=22.ckpt.sdiloco"]

    for name, more in (("now", {}), ("late", {"trainer_choices": LATE})):
        url = f"elsewhere://{tmp_path}/elsewhere/{name}"
        keep = saving(LIGHTNING, url, every_n_train_steps=6, save_last=True, **newest)
        fit(0, callbacks=[at({step: save(f"{url}/only.ckpt") for step in (7, 9)}), *keep], **more)
        fit(9, path=f"{url}/only.ckpt")
        fit(24, path=f"{url}/last.ckpt")
    for folder, own in (
        (copies, 16),
        (tmp_path / "elsewhere/now", 18),
        (tmp_path / "elsewhere/late", 18),
    ):
        stands = ["last.ckpt", f"step={own}.ckpt", "step=24.ckpt"]
        assert names_in(folder, "[ls]*") == sorted(stands + [f"{name}.sdiloco" for name in stands])
        for name in stands if folder == copies else [*stands, "only.ckpt"]:
            assert save_folder(folder / name)
