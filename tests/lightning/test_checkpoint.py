"""Checkpoints of real fits: resume to the same bits, what is written where and when, and what is refused."""

import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, MinMaxMetric

from lightning_sdiloco import OuterOptimizer
from lightning_sdiloco.algorithm.config import recommended
from lightning_sdiloco.engine import checkpoint as files
from lightning_sdiloco.lightning.model_format import fix_bucket_order
from tests import fits
from tests.fits import LIGHTNING, play
from tests.ranks import run_processes
from tests.training import batch, mlp

OTHER = "pytorch_lightning"
STEPS = 26
CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 5, "fragments": "strided:1"}
pl = importlib.import_module(LIGHTNING)
AsyncCheckpointIO, TorchCheckpointIO = pl.plugins.AsyncCheckpointIO, pl.plugins.TorchCheckpointIO
Trained = dict[str, Any]
Act = Callable[[Any], None]
# The oldest Lightning has neither `save_on_exception` nor `fit(weights_only=...)`.
NOT_IN_THE_OLDEST = pytest.mark.skipif(pl.__version__.startswith("2.5."), reason="Lightning has it from 2.6 on")


class StatefulBatches:
    """A loader of known length that can be taken up again in the middle."""

    def __init__(self, group: int, shard: int, shards: int, length: int) -> None:
        self.place, self.length, self.step = (group, shard, shards), length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        group, shard, shards = self.place
        while self.step < self.length:
            self.step += 1
            x, y = batch(group, self.step)
            yield x.chunk(shards)[shard], y.chunk(shards)[shard]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def local(values: Any) -> Tensor:
    """What this rank holds of a tensor."""
    return (values.to_local() if hasattr(values, "to_local") else values).detach().clone()  # type: ignore[no-any-return]


def held_by(module: Any) -> dict[str, Tensor]:
    """What a module that is trained, its optimizer and its strategy hold."""
    held = {name: local(values) for name, values in module.state_dict().items()}
    for index, state in enumerate(module.trainer.optimizers[0].state.values()):
        held |= {f"{index} {key}": local(values) for key, values in state.items()}
    return held | {f"outer {name}": values for name, values in module.trainer.strategy.outer_state_dict().items()}


def traced(
    distribution: str = LIGHTNING, seed: int = 0, inner: str = "adamw", net: Callable[[], nn.Module] | None = None
) -> Any:
    """A module that keeps what it holds after every step, with dropout and BatchNorm unless another is given."""
    torch.manual_seed(seed)
    made = nn.Sequential(*mlp(seed), nn.Dropout(0.2), nn.BatchNorm1d(3)) if net is None else net()
    base = type(fits.module(distribution, inner, seed, made))

    class Traced(base):  # type: ignore[misc, valid-type]
        def on_train_batch_start(self, *args: Any) -> None:
            # Before the next step, so after all that happens at the end of the one before.
            self.trace[self.trainer.global_step] = held_by(self)

    model = Traced()
    model.trace = {}
    return model


def run_fit(
    rank: int,
    world_size: int,
    distribution: str = LIGHTNING,
    steps: int = STEPS,
    callbacks: Sequence[Any] = (),
    path: Any = None,
    groups: int = 2,
    make: Callable[[str, int], Any] = traced,
    weights_only: bool | None = None,
    trainer_choices: dict[str, Any] | None = None,
    **choices: Any,
) -> Trained:
    size = world_size // groups
    model = make(distribution, rank)
    strategy = fits.strategy(distribution, **{"worker_groups": groups, **CHOICES, **choices})
    saves = any("Checkpoint" in type(callback).__name__ for callback in callbacks)
    common: dict[str, Any] = {"max_steps": steps, "callbacks": list(callbacks), "enable_checkpointing": saves}
    chosen = {**common, **(trainer_choices or {})}
    trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, **chosen)
    torch.manual_seed(100 + rank)
    loader = StatefulBatches(rank // size, rank % size, size, length=100)
    more = {} if weights_only is None else {"weights_only": weights_only}
    trainer.fit(model, loader, ckpt_path=path and str(path), **more)
    held = {name: values.clone() for name, values in model.state_dict().items()}
    return {"trace": model.trace, "outer": strategy.outer_state_dict(), "report": strategy.report(), "model": held}


def saving(distribution: str, folder: Any, **choices: Any) -> list[Any]:
    callbacks = importlib.import_module(distribution).callbacks
    return [callbacks.ModelCheckpoint(folder, **{"filename": "{step}", "save_top_k": -1, **choices})]


NEWEST: dict[str, Any] = {"save_top_k": 1, "monitor": "step", "mode": "max"}


def at(acts: dict[int, Act], distribution: str = LIGHTNING) -> Any:
    """A callback that acts on the trainer after some of the steps."""

    class At(importlib.import_module(distribution).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            acts.get(trainer.global_step, lambda trainer: None)(trainer)

    return At()


def save(path: Any) -> Act:
    return lambda trainer: trainer.save_checkpoint(path)


def save_folder(checkpoint: Path) -> Path:
    (folder,) = Path(f"{checkpoint}.sdiloco").iterdir()
    return folder


def names_in(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def unequal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of what is not the same, to the bit."""
    both = actual.keys() & expected.keys()
    return [
        name for name in {**actual, **expected} if name not in both or not torch.equal(actual[name], expected[name])
    ]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert unequal(actual, expected) == []


def outer_of(rank: Trained, step: int) -> dict[str, Tensor]:
    """The outer parameters before a step."""
    trace = rank["trace"][step].items()
    return {name.removeprefix("outer "): values for name, values in trace if name.startswith("outer ")}


def assert_resumed(one: Trained, other: Trained, step: int, end: int | None = None) -> None:
    """A rank goes on from a step with the bits of the one that never stopped."""
    assert sorted(one["trace"]) == list(range(step, end or max(other["trace"]) + 1))
    assert {at: wrong for at in one["trace"] if (wrong := unequal(one["trace"][at], other["trace"][at]))} == {}
    if end is None:
        assert_same(one["outer"], other["outer"])
        counted = ("inner_steps", "launches", "landings")
        assert [key for key in counted if one["report"][key] != other["report"][key]] == []


def assert_whole(path: Any, ranks: int = 2) -> None:
    """The file that stands there can be resumed."""
    header = torch.load(path, weights_only=True)[files.KEY]
    for rank in range(ranks):
        files.read_rank(str(path), header, rank)


@pytest.fixture(scope="module")
def uninterrupted() -> list[Trained]:
    return list(run_processes(run_fit, 2))


# Resuming


def test_a_fit_resumed_from_any_step_gives_the_same_bits(tmp_path: Path, uninterrupted: list[Trained]) -> None:
    """Also with the other distribution, and where a shorter fit had finished."""
    # 5: before any flight; 11: two fragments in flight; 13: just landed; 16: launched again.
    steps, finished = (5, 11, 13, 16), tmp_path / "finished" / "step=14.ckpt"
    ranks = play(
        2,
        {
            "saved": partial(run_fit, callbacks=[at({step: save(tmp_path / f"{step}.ckpt") for step in steps})]),
            **{str(step): partial(run_fit, path=tmp_path / f"{step}.ckpt") for step in steps},
            "other": partial(run_fit, distribution=OTHER, path=tmp_path / "11.ckpt"),
            "shorter": partial(run_fit, steps=14, callbacks=saving(LIGHTNING, finished.parent, every_n_train_steps=14)),
            "longer": partial(run_fit, path=finished),
        },
    )
    for rank, plain in enumerate(uninterrupted):
        saved, sent = ranks["saved"][rank], plain["report"]["bytes_sent"]
        assert_resumed(saved, plain, 0)
        # Until all have landed, after inner step 19, each file holds the mean of the groups, which they exchange.
        of_mean = (saved["report"]["bytes_sent"] - sent) / len(steps)
        assert of_mean > 0
        for files_before, step in enumerate(steps, 1):
            resumed = ranks[str(step)][rank]
            assert_resumed(resumed, plain, step)
            assert resumed["report"]["bytes_sent"] == sent + files_before * of_mean
        assert_resumed(ranks["other"][rank], plain, 11)
        assert_same(ranks["longer"][rank]["outer"], plain["outer"])
    state = torch.load(finished, weights_only=True)["state_dict"]
    outer = ranks["shorter"][0]["outer"]
    assert_same({name: state[name] for name in outer}, outer)


class Tokens(nn.Module):
    """Lightning's small transformer, on numbers that it takes for tokens."""

    def __init__(self) -> None:
        super().__init__()
        made = importlib.import_module(f"{OTHER}.demos.transformer").Transformer
        self.transformer = made(vocab_size=16, ninp=8, nhead=2, nhid=8, nlayers=1)

    def forward(self, values: Tensor) -> Tensor:
        tokens = (4 * values).long() % 16
        return self.transformer(tokens, tokens).view(len(values), -1, 16).mean(1)[:, :3]  # type: ignore[no-any-return]


def test_a_transformer_with_muon_a_schedule_a_guard_and_clipping_resumes_through_a_link_to_the_newest_file(
    tmp_path: Path,
) -> None:
    def made(rounds: int) -> Any:
        schedule = partial(CosineAnnealingLR, T_max=rounds)
        outer = OuterOptimizer(lr_schedule=schedule, clip_norm=0.05, outlier_guard=1.02)
        choices: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": "strided:2"}
        make = partial(traced, inner="muon", net=Tokens)
        return partial(run_fit, distribution=OTHER, steps=14, make=make, outer_optimizer=outer, **choices)

    def refused(rank: int, world_size: int) -> str:
        with pytest.raises(ValueError, match="outer_optimizer") as caught:
            made(6)(rank, world_size, path=tmp_path / "last.ckpt")
        return str(caught.value)

    keep = saving(OTHER, tmp_path, every_n_train_steps=6, **{**NEWEST, "save_last": "link"})
    weights = saving(OTHER, tmp_path / "weights", every_n_train_steps=10, save_weights_only=True)
    cases = {
        "plain": made(5),
        "saved": partial(made(5), callbacks=[*keep, *weights, at({9: save(tmp_path / "9")}, OTHER)]),
        "9": partial(made(5), path=tmp_path / "9"),
        "12": partial(made(5), path=tmp_path / "last.ckpt"),
        "refused": refused,
    }
    ranks = play(4, cases)
    for rank, plain in enumerate(ranks["plain"]):
        assert plain["report"]["landings"] > 4
        for case, step in (("saved", 0), ("9", 9), ("12", 12)):
            assert_resumed(ranks[case][rank], plain, step)
        assert "another outer_optimizer.lr_schedule: it was CosineAnnealingLR" in ranks["refused"][rank]
    # There is a file for every rank, and removing a checkpoint removes its folder.
    beside = ["9", "9.sdiloco", "last.ckpt", "step=12.ckpt", "step=12.ckpt.sdiloco", "weights"]
    assert names_in(tmp_path) == beside
    assert names_in(tmp_path / "weights") == ["step=10.ckpt"]
    folder = save_folder(tmp_path / "step=12.ckpt")
    assert names_in(folder) == ["manifest.json", *(f"rank_{i:05d}.pt" for i in range(4))]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["layout"] == {"worker_groups": 2, "group_size": 2}
    assert manifest["settings"]["sync_every"] == "4"


def test_a_group_of_three_adds_gradients_in_the_same_order_whatever_ddp_does_or_says_that_it_may_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def untouched(rank: int, world_size: int) -> list[bool]:
        """What fixes the order of buckets leaves the module as it was."""
        found = []
        torch.manual_seed(0)
        for instance_forward in (False, True):
            module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            if instance_forward:
                module.forward = torch.sin
            before = {name: values.clone() for name, values in module.state_dict().items()}
            fix_bucket_order(DistributedDataParallel(module))
            kept = module.forward is torch.sin if instance_forward else "forward" not in vars(module)
            found.append(kept and unequal(module.state_dict(), before) == [])
            found.append(all(p.grad is None for p in module.parameters()))
        return found

    several = {"find_unused_parameters": True, "bucket_cap_mb": 0.0005}
    ways: dict[str, dict[str, Any]] = {"one bucket": {}, "several": several, "static": {"static_graph": True}}
    cases: dict[str, Any] = {}
    for way, ddp_kwargs in ways.items():

        def fit(
            rank: int, world_size: int, ddp_kwargs: dict[str, Any] = ddp_kwargs, **chosen: Any
        ) -> tuple[Trained, int]:
            caplog.clear()
            trained = run_fit(rank, world_size, steps=12, groups=1, ddp_kwargs=ddp_kwargs, **chosen)
            return trained, sum("may round differently" in record.getMessage() for record in caplog.records)

        cases[way] = partial(fit, callbacks=[at({9: save(tmp_path / way)})])
        cases[f"{way}, resumed"] = partial(fit, path=tmp_path / way)
    ranks = play(3, cases | {"untouched": untouched})
    assert ranks["untouched"] == [[True] * 4] * 3
    for way in ways:
        for rank, ((plain, told), (resumed, told_again)) in enumerate(
            zip(ranks[way], ranks[f"{way}, resumed"], strict=True)
        ):
            assert (told, told_again) == (0, int(way == "static" and rank == 0))
            if way != "static":
                assert_resumed(resumed, plain, 9)


def test_the_newest_checkpoint_alone_can_be_resumed_where_that_is_asked_for(tmp_path: Path) -> None:
    newest = partial(run_fit, steps=14, resume="exact:newest")

    def older(rank: int, world_size: int) -> str:
        with pytest.raises(ValueError, match="step=8") as caught:
            run_fit(rank, world_size, path=tmp_path / "step=8.ckpt")
        return str(caught.value)

    keep = saving(LIGHTNING, tmp_path, every_n_train_steps=4, save_last="link")
    cases = {"plain": partial(newest, callbacks=keep), "last": partial(newest, path=tmp_path / "last.ckpt")}
    ranks = play(2, cases | {"older": older})
    for plain, resumed, told in zip(*ranks.values(), strict=True):
        assert_resumed(resumed, plain, 12)
        assert "resume='exact:newest'" in told
    assert names_in(tmp_path, "*.sdiloco") == ["step=12.ckpt.sdiloco"]
    for step in (4, 8):
        assert torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"], "an ordinary file"


def test_a_loader_of_torch_begins_the_next_epoch_with_the_same_random_numbers(tmp_path: Path) -> None:
    """It takes one for every iterator, and the module has dropout. The run is bound by epochs, or by steps."""

    def fit(rank: int, world_size: int, when: str, bound: str, resume: bool) -> Any:
        path = tmp_path / f"{when} {bound}" / "step=5.ckpt"
        module, every = traced(LIGHTNING, rank), 5 if "steps" in when else 1
        trainer = fits.trainer(
            strategy=fits.strategy(worker_groups=1 + ("steps" in when), **CHOICES),
            devices=2,
            callbacks=[] if resume else saving(LIGHTNING, path.parent, **{when: every}),
            enable_checkpointing=not resume,
            **{bound: {"max_epochs": 3, "max_steps": 15}[bound]},
        )
        torch.manual_seed(100 + rank)
        loader = DataLoader([batch(0, step) for step in range(10)], batch_size=None, shuffle=True)
        trainer.fit(module, loader, ckpt_path=str(path) if resume else None)
        return {"trace": module.trace}

    cases = list(product(("every_n_train_steps", "every_n_epochs"), ("max_epochs", "max_steps"), (0, 1)))
    ranks = play(
        2, {f"{case}": partial(fit, **dict(zip(("when", "bound", "resume"), case, strict=True))) for case in cases}
    )
    for case, resumed in zip(cases[::2], cases[1::2], strict=True):
        for one, other in zip(ranks[f"{resumed}"], ranks[f"{case}"], strict=True):
            assert_resumed(one, other, 5, end=15)


def test_a_checkpoint_of_plain_ddp_is_where_all_groups_start(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> dict[str, Tensor]:
        trainer = fits.trainer(strategy="ddp", devices=2, max_steps=4)
        trainer.fit(fits.module(), StatefulBatches(rank, 0, 1, 100))
        trainer.save_checkpoint(tmp_path / "ddp.ckpt")
        strategy = fits.strategy(**CHOICES)
        trainer = fits.trainer(strategy=strategy, devices=2, max_steps=5)
        trainer.fit(fits.module(seed=rank), StatefulBatches(rank, 0, 1, 100), ckpt_path=str(tmp_path / "ddp.ckpt"))
        return strategy.outer_state_dict()

    assert_same(*run_processes(run, 2))


class EveryEpoch(StatefulBatches):
    """The same batches in every epoch. Lightning does not restore a loader after the end of one."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.step %= self.length
        yield from super().__iter__()


def logging_module(distribution: str, seed: int) -> Any:
    """A module that logs in all ways, and whose learning rate depends on what it logged."""
    base = type(traced(distribution, seed))

    class Logging(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.range = MeanMetric(), MinMaxMetric(MeanMetric())
            self.many = MetricCollection([MeanMetric(), MaxMetric()])

        def training_step(self, parts: Any, index: int) -> Any:
            loss = super().training_step(parts, index)
            of_epoch = {"on_step": False, "on_epoch": True}
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log_dict({"most": loss, "all": loss, "here": loss}, reduce_fx="max", **of_epoch)
            self.log("sum", loss, reduce_fx=sum, sync_dist=True, **of_epoch)
            self.mean.update(loss.detach())
            self.log("mean", self.mean, **of_epoch)
            self.many.update(loss.detach())
            self.log_dict(self.many, **of_epoch)
            return loss

        def validation_step(self, parts: Any, index: int) -> None:
            loss = nn.functional.mse_loss(self.net(parts[0]), parts[1])
            self.log("val", loss + torch.rand(()), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            self.ended[self.trainer.current_epoch] = {k: v.clone() for k, v in self.trainer.callback_metrics.items()}

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            # Nothing is good enough for them.
            none_is = {"patience": 0, "threshold": 10.0, "factor": 0.9}
            watched = ({"monitor": "loss_epoch"}, {"monitor": "loss", "interval": "step"}, {"monitor": "val"})
            return [optimizer], [{"scheduler": ReduceLROnPlateau(optimizer, **none_is), **by} for by in watched]

    model = Logging()
    model.trace, model.ended = {}, {}
    return model


def test_metrics_of_a_resumed_epoch_are_those_of_all_its_batches_and_what_rests_on_them_goes_on(
    distribution: str, tmp_path: Path
) -> None:
    callbacks = importlib.import_module(distribution).callbacks

    def run(rank: int, world_size: int, resume: str | None = None) -> Trained:
        model = logging_module(distribution, rank)
        stopping = callbacks.EarlyStopping("loss_epoch", patience=9)
        best = callbacks.ModelCheckpoint(tmp_path / "best", monitor="loss", mode="max")
        saves = saving(distribution, tmp_path, every_n_train_steps=1)
        saves += saving(distribution, tmp_path, filename="{epoch}", save_on_train_epoch_end=True)
        trainer = fits.trainer(
            distribution,
            strategy=fits.strategy(distribution, worker_groups=2, sync_every=4, overlap_steps=1, fragments="strided:1"),
            devices=world_size,
            max_epochs=3,
            num_sanity_val_steps=0,
            enable_checkpointing=True,
            callbacks=[stopping, best, *([] if resume else saves)],
        )
        torch.manual_seed(100 + rank)
        seen = DataLoader([(torch.ones(1, 5), torch.ones(1, 3))], batch_size=None)  # type: ignore[arg-type]
        trainer.fit(model, EveryEpoch(rank, 0, 1, 4), seen, ckpt_path=resume and str(tmp_path / f"{resume}.ckpt"))
        stopped, rate = stopping.state_dict(), trainer.optimizers[0].param_groups[0]["lr"]
        rests = (rate, stopped["wait_count"], stopped["best_score"], best.best_model_score)
        return {"trace": model.trace, "ended": model.ended, "rests": rests}

    # Within an epoch; after its last batch, before validation and end; then after the end; in the last epoch.
    saves = {"step=2": (2, 0), "step=4": (4, 0), "epoch=0": (4, 1), "step=9": (9, 2)}
    ranks = play(2, {"plain": run} | {name: partial(run, resume=name) for name in saves})
    for rank, plain in enumerate(ranks["plain"]):
        assert plain["rests"][0] < 0.01
        for name, (step, epoch) in saves.items():
            resumed = ranks[name][rank]
            assert_resumed(resumed, plain, step, end=12)
            assert list(resumed["ended"]) == list(range(epoch, 3)), name
            assert [unequal(values, plain["ended"][at]) for at, values in resumed["ended"].items()] == [[]] * (
                3 - epoch
            )
            assert resumed["rests"] == plain["rests"]


ELSEWHERE = """
import sys

sys.modules["lightning_sdiloco"] = None  # importing it fails

import torch
from lightning.pytorch.demos import boring_classes as one
from pytorch_lightning.demos import boring_classes as other

state = torch.load({path!r}, weights_only=True)["state_dict"]
for classes in (one, other):
    model = classes.BoringModel.load_from_checkpoint({path!r}, map_location="cpu")
    print(all(torch.equal(values, state[name]) for name, values in model.state_dict().items()), len(state))
assert not [name for name in sys.modules if name.startswith("lightning_sdiloco.")]
"""


def test_lightnings_own_test_models_are_fitted_validated_tested_used_and_read_where_the_package_is_not(
    tmp_path: Path,
) -> None:
    def run(rank: int, world_size: int, distribution: str, data: str, groups: int) -> dict[str, Tensor]:
        classes = importlib.import_module(f"{distribution}.demos.boring_classes")
        model, module = classes.BoringModel(), getattr(classes, data)()
        strategy = fits.strategy(distribution, **{"worker_groups": groups, **CHOICES, "sync_every": 6})
        chosen: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 6, "limit_val_batches": 3}
        trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, **chosen)
        trainer.fit(model, module)
        trainer.save_checkpoint(tmp_path / "boring.ckpt")
        assert strategy.report()["inner_steps"] == 12
        weights = {name: values.clone() for name, values in model.state_dict().items()}
        trainer.validate(model, module)
        trainer.test(model, module)
        assert len(trainer.predict(model, module)) > 0
        assert_same(dict(model.state_dict()), weights)
        return weights

    length = partial(run, distribution=OTHER, data="BoringDataModule", groups=4)
    no_length = partial(run, distribution=LIGHTNING, data="BoringDataModuleNoLen", groups=2)
    for ranks in play(4, {"length": length, "no length": no_length}).values():
        assert [unequal(weights, ranks[0]) for weights in ranks] == [[]] * 4
    script = ELSEWHERE.format(path=str(tmp_path / "boring.ckpt"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "True 2\n" * 2, done.stderr


# What is refused


def alter(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def of_another_version(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["streaming_diloco"] |= {"format": 99, "version": "7.0"}
    torch.save(content, path)


def of_another_checkpoint(path: Path) -> None:
    shutil.rmtree(f"{path}.sdiloco")
    path.with_name("step=5.ckpt.sdiloco").rename(f"{path}.sdiloco")


def test_damaged_folders_and_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run_processes(partial(run_fit, steps=10, callbacks=[at({n: save(saved / f"step={n}.ckpt") for n in (5, 9)})]), 2)
    lr, momentum = recommended().outer_lr, recommended().outer_momentum
    damages: list[tuple[Callable[[Path], Any], str]] = [
        (lambda path: (save_folder(path) / "rank_00001.pt").unlink(), "rank_00001.pt, which is not there"),
        (lambda path: (save_folder(path) / "manifest.json").unlink(), "manifest.json, which is not there"),
        (lambda path: shutil.rmtree(f"{path}.sdiloco"), "move or copy both"),
        (lambda path: alter(save_folder(path) / "rank_00001.pt"), "is not what was saved"),
        (of_another_version, "was written in format 99 by lightning_sdiloco 7.0"),
        (of_another_checkpoint, "which is not there. The folder"),
    ]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"sync_every": 9}, "sync_every was 8, now it is 9"),
        (
            {"outer_lr": 0.375, "outer_momentum": 0.75},
            f"outer_lr was {lr}, now it is 0.375; outer_momentum was {momentum}, now it",
        ),
        (
            {"outer_optimizer": OuterOptimizer(outlier_guard=5.0, clip_norm=2.0)},
            "outer_optimizer.clip_norm was None, now it is 2.0; outer_optimizer.outlier_guard was",
        ),
    ]
    wrong = {}
    for index, (damage, told) in enumerate(damages):
        path = Path(shutil.copytree(saved, tmp_path / str(index))) / "step=9.ckpt"
        damage(path)
        error = run_processes(partial(run_fit, path=path), 2, expect_failure=True)[1].splitlines()[-1]
        wrong |= {} if told in error else {told: error}

    def run(rank: int, world_size: int) -> list[str]:
        texts = []
        for changed, _ in changes:
            with pytest.raises(ValueError, match="now it is") as caught:
                run_fit(rank, world_size, path=saved / "step=9.ckpt", **changed)
            texts.append(str(caught.value))
        return texts

    for texts in run_processes(run, 2):
        wrong |= {told: text for text, (_, told) in zip(texts, changes, strict=True) if told not in text}
    assert wrong == {}


# Faults


def failing(rank: int) -> Any:
    """A callback that raises in one rank."""

    def fail(trainer: Any) -> None:
        if trainer.global_rank == rank:
            raise ArithmeticError("the user's own")

    return at({14: fail})


@NOT_IN_THE_OLDEST
@pytest.mark.parametrize(("world_size", "save_last"), [(2, "link"), (4, True)])
def test_after_an_exception_ranks_keep_their_own_state_and_no_rank_waits(
    world_size: int, save_last: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed = world_size - 1

    def run(rank: int, world_size: int) -> None:
        alone = pl.callbacks.OnExceptionCheckpoint(tmp_path / "alone")
        keep = {"every_n_train_steps": 6, "save_on_exception": True, "save_last": save_last, "save_top_k": 1}
        caplog.clear()
        try:
            run_fit(rank, world_size, callbacks=[failing(failed), alone, *saving(LIGHTNING, tmp_path, **keep)])
        finally:
            (tmp_path / f"{rank}.log").write_text(caplog.text)

    errors = run_processes(run, world_size, expect_failure=True, timeout=30)
    assert sorted(errors) == list(range(world_size))
    assert "ArithmeticError: the user's own" in errors[failed]
    assert names_in(tmp_path, "*.ckpt") == ["last.ckpt", "step=12.ckpt"]
    for name in ("step=14", "alone/on_exception"):
        kept = tmp_path / f"{name}.ckpt.sdiloco" / "exception" / f"rank_{failed:05d}.pt"
        assert torch.load(kept, weights_only=True)["engine"]["counts"]["inner_steps"] == 14
        assert not (kept.parent / "manifest.json").exists()
        assert not (tmp_path / f"{name}.ckpt").exists()
    told = (tmp_path / f"{failed}.log").read_text()
    assert "which cannot be resumed" in told
    assert f"Resume from {tmp_path / ('step=12.ckpt' if save_last == 'link' else 'last.ckpt')}." in told
    for name in ("last.ckpt", "step=12.ckpt"):
        assert_whole(tmp_path / name, world_size)


def test_what_is_named_after_an_exception_still_stands_and_the_strategy_can_be_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(rank: int, world_size: int) -> tuple[list[str], dict[str, Tensor]]:
        acts = {5: save(tmp_path / "a.ckpt"), 6: save(tmp_path / "b.ckpt")}
        acts[7] = lambda trainer: trainer.strategy.remove_checkpoint(f"{tmp_path}/b.ckpt")
        told = []
        # A run that has saved one that stands, and a run that was resumed and has saved none.
        for resume in (None, tmp_path / "a.ckpt"):
            caplog.clear()
            callbacks = [at(acts), pl.callbacks.OnExceptionCheckpoint(tmp_path), failing(rank)]
            with pytest.raises(ArithmeticError):
                run_fit(rank, world_size, callbacks=callbacks, path=resume)
            told.append(caplog.text)
        strategy = fits.strategy(**CHOICES)
        trainer = fits.trainer(strategy=strategy, devices=2, max_steps=16, callbacks=[failing(rank)])
        with pytest.raises(ArithmeticError):
            trainer.fit(traced(LIGHTNING, rank), StatefulBatches(rank, 0, 1, length=100))
        trainer.callbacks = []
        trainer.fit(traced(LIGHTNING, rank), StatefulBatches(rank, 0, 1, length=100))
        return told, strategy.outer_state_dict()

    ranks = run_processes(run, 2)
    for told, outer in ranks:
        assert [f"Resume from {tmp_path}/a.ckpt." in text for text in told] == [True, True]
        assert_same(outer, ranks[0][1])


@NOT_IN_THE_OLDEST
def test_a_single_rank_saves_a_whole_checkpoint_on_an_exception(tmp_path: Path) -> None:
    def failed(rank: int, world_size: int) -> None:
        keep = saving(LIGHTNING, tmp_path, save_on_exception=True, save_last="link")
        with pytest.raises(ArithmeticError):
            run_fit(rank, world_size, callbacks=[failing(0), *keep], groups=1)

    alone = partial(run_fit, steps=16, groups=1)
    ranks = play(1, {"failed": failed, "plain": alone, "resumed": partial(alone, path=tmp_path / "last.ckpt")})
    # Only what the rank holds: the step of the batch that failed was not counted.
    assert_same(ranks["resumed"][0]["trace"][14], ranks["plain"][0]["trace"][14])


def test_a_disk_that_is_full_ends_all_ranks_with_one_error_and_leaves_nothing_of_the_checkpoint(tmp_path: Path) -> None:
    """One rank cannot write a file of more than some bytes: its own, or the checkpoint file, which is rank 0's."""

    def run(rank: int, world_size: int, limited: str) -> str:
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))

        def fill(trainer: Any) -> None:
            if limited == "rank" and rank == 1:
                limit()
            if limited == "file" and rank == 0:
                io = trainer.strategy.checkpoint_io
                before = io.save_checkpoint
                io.save_checkpoint = lambda *args, **kwargs: (limit(), before(*args, **kwargs))

        keep = saving(LIGHTNING, tmp_path / limited, every_n_train_steps=6)
        try:
            with pytest.raises(OSError, match="could not be saved") as caught:
                run_fit(rank, world_size, callbacks=[at({12: fill}), *keep])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        return str(caught.value)

    ranks = play(2, {limited: partial(run, limited=limited) for limited in ("rank", "file")})
    for limited, errors in ranks.items():
        folder = tmp_path / limited
        for error in errors:
            assert (
                f"The checkpoint {folder}/step=12.ckpt could not be saved: rank {int(limited == 'rank')}: OSError"
                in error
            )
            assert f"Nothing is left of it. Resume from {folder}/step=6.ckpt" in error
        assert names_in(folder) == ["step=6.ckpt", "step=6.ckpt.sdiloco"]
        assert not list(folder.rglob("*.part"))
        assert_whole(folder / "step=6.ckpt")


@pytest.mark.parametrize("late", [False, True])
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_can_be_resumed(late: bool, tmp_path: Path) -> None:
    """One file is overwritten and others are saved and removed at every step, until a rank gets SIGKILL."""
    after = random.uniform(0.0, 0.15)

    def arm(trainer: Any) -> None:
        pid = os.getpid()
        if trainer.global_rank == int(late) and os.fork() == 0:
            time.sleep(after)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)

    overwriting = at({**dict.fromkeys(range(1, 1000), save(tmp_path / "only.ckpt")), 9: arm})
    keep = saving(LIGHTNING, tmp_path, every_n_train_steps=1, **{**NEWEST, "save_last": "link"})
    plugins = [AsyncCheckpointIO()] if late else []
    run = partial(run_fit, steps=1000, callbacks=[overwriting, *keep], trainer_choices={"plugins": plugins})
    # Once in a while gloo does not notice that a peer is gone; then the timeout ends the other rank.
    run_processes(partial(run, timeout=timedelta(seconds=20)), 2, expect_failure=True)
    step = torch.load(tmp_path / "only.ckpt", weights_only=True)["global_step"]
    assert step >= 7
    standing = [path for path in tmp_path.glob("*.ckpt") if path.exists()]
    assert len(standing) >= (1 if late else 2), after
    for path in standing:
        assert_whole(path)
    for trained in run_processes(partial(run_fit, steps=step + 3, path=tmp_path / "only.ckpt"), 2):
        assert sorted(trained["trace"]) == [step, step + 1, step + 2]


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


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_file_that_is_written_late_can_be_resumed_and_what_is_removed_before_its_turn_is_not_written(
    tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    every, newest = tmp_path / "every", tmp_path / "newest"

    def removed(rank: int, world_size: int) -> bool:
        io = Gated()
        keep = saving(LIGHTNING, newest, every_n_train_steps=1, **NEWEST)
        gates = at({2: lambda trainer: io.gate.clear(), 6: lambda trainer: io.gate.set()})
        late = {"plugins": [AsyncCheckpointIO(io)]}
        run_fit(rank, world_size, steps=8, callbacks=[gates, *keep], trainer_choices=late)
        return "save_checkpoint" not in vars(io) and (io.written > 0) == (rank == 0)

    keep = saving(LIGHTNING, every, every_n_train_steps=1, save_last=True)
    cases = {
        "late": partial(run_fit, callbacks=keep, trainer_choices={"plugins": [AsyncCheckpointIO()]}),
        "resumed": partial(run_fit, path=every / "step=13.ckpt"),
        "removed": removed,
    }
    ranks = play(2, cases)
    for rank, plain in enumerate(uninterrupted):
        assert_resumed(ranks["late"][rank], plain, 0)
        assert_resumed(ranks["resumed"][rank], plain, 13)
    assert ranks["removed"] == [True, True], "the plugin is given back as it was"
    assert names_in(newest) == ["step=8.ckpt", "step=8.ckpt.sdiloco"]
    names = [*(f"step={step}.ckpt" for step in range(1, STEPS + 1)), "last.ckpt"]
    assert names_in(every, "*.ckpt") == sorted(names)
    for path in (newest / "step=8.ckpt", *(every / name for name in names)):
        assert_whole(path)
        assert save_folder(path)


def test_an_older_folder_stays_until_the_file_of_a_later_save_stands(
    tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    path = tmp_path / "only.ckpt"

    def saves() -> int:
        return len(names_in(Path(f"{path}.sdiloco")))

    def run(rank: int, world_size: int, killed: bool) -> Any:
        io = Gated()

        def settled(trainer: Any, written: int) -> None:
            if rank == 0:
                wait_until(lambda: io.written == written and saves() == 1)
                assert_whole(path)
            trainer.strategy.barrier()

        def twice(trainer: Any) -> None:
            save(path)(trainer)
            settled(trainer, 2)

        def held_back(trainer: Any) -> None:
            io.gate.clear()
            save(path)(trainer)
            save(path)(trainer)
            if rank == 0:
                assert torch.load(path, weights_only=True)["global_step"] == 10
                assert_whole(path)
                assert saves() == 3
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)
            io.gate.set()
            settled(trainer, 4)

        acts = at({9: save(path), 10: twice, 12: held_back})
        late = {"plugins": [AsyncCheckpointIO(io)]}
        return run_fit(rank, world_size, steps=14, callbacks=[acts], trainer_choices=late)

    run_processes(run, 2, False)
    assert torch.load(path, weights_only=True)["global_step"] == 12
    # Killed with two saves waiting: the file that stands there still has its folder, and the next save tidies up.
    run_processes(run, 2, True, expect_failure=True)
    assert torch.load(path, weights_only=True)["global_step"] == 10
    late = {"plugins": [AsyncCheckpointIO()]}
    again = partial(run_fit, path=path)
    ranks = play(2, {"10": partial(again, callbacks=[at({13: save(path)})], trainer_choices=late), "13": again})
    assert saves() == 1
    for rank, plain in enumerate(uninterrupted):
        assert_resumed(ranks["10"][rank], plain, 10)
        assert_resumed(ranks["13"][rank], plain, 13)


def test_writing_does_not_disturb_a_thread_that_is_in_a_transaction(tmp_path: Path) -> None:
    shared = LocalFileSystem()
    with shared.transaction, shared.open(str(tmp_path / "theirs"), "wb") as file:
        file.write(b"theirs")
        files.write_rank(str(tmp_path / "a.ckpt"), "save", 0, {"ours": 1})
        assert (tmp_path / "a.ckpt.sdiloco/save/rank_00000.pt").exists()
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


# Where and how files are written, and read


class Boxed(pl.plugins.CheckpointIO):  # type: ignore[misc, name-defined]
    """A user's own format."""

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


@NOT_IN_THE_OLDEST
def test_files_of_your_own_format_on_other_file_systems_and_copies_and_links_can_be_resumed(
    tmp_path: Path, uninterrupted: list[Trained]
) -> None:
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    Elsewhere.root = str(tmp_path / "elsewhere")
    link, copies, boxed = tmp_path / "link.ckpt", tmp_path / "copies", tmp_path / "boxed"

    def over(trainer: Any) -> None:
        """Saves over a link, which is replaced, and not what it points to."""
        if trainer.global_rank == 0:
            link.symlink_to("9.ckpt")
        trainer.strategy.barrier()
        save(link)(trainer)

    newest: dict[str, Any] = {**NEWEST, "save_top_k": 2, "enable_version_counter": False}
    copying = partial(saving, LIGHTNING, copies, every_n_train_steps=8, **newest)

    def far(name: str) -> list[Any]:
        again = at({step: save(f"elsewhere://{name}/only.ckpt") for step in (7, 9)})
        return [again, *saving(LIGHTNING, f"elsewhere://{name}", every_n_train_steps=6, save_last=True, **newest)]

    box = saving(LIGHTNING, boxed, every_n_train_steps=11, **NEWEST)
    cases: dict[str, tuple[Any, int]] = {
        # A copy replaces a link, and not what it points to.
        "linked": (partial(run_fit, callbacks=copying(save_last="link")), 0),
        "copied": (partial(run_fit, callbacks=copying(save_last=True)), 0),
        "from the copy": (partial(run_fit, path=copies / "last.ckpt"), 24),
        "over": (partial(run_fit, callbacks=[at({9: save(tmp_path / "9.ckpt"), 12: over})]), 0),
        "from over the link": (partial(run_fit, path=link), 12),
        "boxed": (partial(run_fit, callbacks=[*box, Thing()], trainer_choices={"plugins": [Boxed()]}), 0),
        "from the box": (
            partial(run_fit, path=boxed / "step=22.ckpt", checkpoint_io=Boxed(), weights_only=False),
            22,
        ),
        "far": (partial(run_fit, callbacks=far("a")), 0),
        "from afar": (partial(run_fit, path="elsewhere://a/only.ckpt"), 9),
        "late": (partial(run_fit, callbacks=far("b"), trainer_choices={"plugins": [AsyncCheckpointIO()]}), 0),
        "from the late": (partial(run_fit, path="elsewhere://b/last.ckpt"), 24),
    }
    ranks = play(2, {name: case for name, (case, _) in cases.items()})
    for rank, plain in enumerate(uninterrupted):
        for name, (_, step) in cases.items():
            assert_resumed(ranks[name][rank], plain, step)
    assert_whole(tmp_path / "9.ckpt")
    assert not link.is_symlink()
    assert names_in(boxed) == ["step=22.ckpt", "step=22.ckpt.sdiloco"]
    for folder, own in ((copies, 16), (tmp_path / "elsewhere/a", 18), (tmp_path / "elsewhere/b", 18)):
        stands = ["last.ckpt", f"step={own}.ckpt", "step=24.ckpt"]
        assert names_in(folder, "[ls]*") == sorted(stands + [f"{name}.sdiloco" for name in stands])
        for name in stands if folder == copies else [*stands, "only.ckpt"]:
            assert save_folder(folder / name)


def test_a_file_takes_its_place_in_one_step_wherever_temporary_files_lie(tmp_path: Path) -> None:
    """Lightning writes to the temporary folder and moves, which is a copy if that is another file system."""
    path = tmp_path / "a.ckpt"

    def run(rank: int, world_size: int) -> list[str]:
        moved: list[str] = []
        original = LocalFileOpener.commit

        def commit(self: Any) -> None:
            moved.append(self.path)
            original(self)

        LocalFileOpener.commit = commit
        run_fit(rank, world_size, steps=5, callbacks=[at({3: save(path), 4: save(path)})])
        return moved

    moved, none = run_processes(run, 2)
    assert [name.startswith(f"{path}.sdiloco/") for name in moved] == [True, True]
    assert none == []
    assert_whole(path)
    assert names_in(save_folder(path)) == ["manifest.json", "rank_00000.pt", "rank_00001.pt"]


def half(distribution: str, seed: int) -> Any:
    """Parameters in bfloat16."""
    model = traced(distribution, seed)

    class Half(type(model)):  # type: ignore[misc]
        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            return super().training_step(tuple(part.bfloat16() for part in parts), index)

    model.__class__ = Half
    return model


def test_files_hold_the_outer_model_in_the_dtypes_of_its_parameters_and_folders_the_float32_values(
    tmp_path: Path,
) -> None:
    path = tmp_path / "21.ckpt"
    halved = partial(run_fit, make=half, trainer_choices={"precision": "bf16-true"})
    ranks = play(2, {"saved": partial(halved, callbacks=[at({21: save(path)})]), "resumed": partial(halved, path=path)})
    state, outer = torch.load(path, weights_only=True)["state_dict"], outer_of(ranks["saved"][0], 21)
    assert {values.dtype for values in outer.values()} == {torch.float32}
    assert_same({name: state[name] for name in outer}, {name: values.bfloat16() for name, values in outer.items()})
    assert unequal({name: state[name].float() for name in outer}, outer), "something is rounded"
    for resumed, expected in zip(ranks["resumed"], ranks["saved"], strict=True):
        assert_resumed(resumed, expected, 21)
