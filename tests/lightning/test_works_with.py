"""What works in a Lightning project with DDP works here: arguments of the Trainer, callbacks,
loggers, tuners, names.

What a fit replaces in users' objects is seen neither by pickle nor by deepcopy, and is gone after
the fit.
"""

import copy
import csv
import importlib
import pickle
import sys
import warnings
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection

from lightning_sdiloco.lightning.model_format import SingleRankDDP
from tests import fits
from tests.bits import same
from tests.fits import LIGHTNING, OTHER, SHORT, batches, refusal, since
from tests.ranks import agreed, in_ranks, run_processes
from tests.training import batch, mlp

pl = importlib.import_module(LIGHTNING)


def data(batches: int) -> DataLoader[Any]:
    """A loader for all ranks, of which each sees its share: some batches of 8 for each of two."""
    parts = [batch(0, step) for step in range(2 * batches)]
    return DataLoader(
        TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])),
        batch_size=8,
    )


def evaluated(distribution: str = LIGHTNING, seed: int = 0, **members: Any) -> Any:
    """A module that counts its steps and logs losses: that of its group, and that of all."""

    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self.loss(parts)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss  # type: ignore[no-any-return]

    def validation_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.steps["val"] += 1
        self.log("val_loss", self.loss(parts), sync_dist=True)

    own = {
        "training_step": training_step,
        "validation_step": validation_step,
        "test_step": lambda self, parts, index: self.steps.update(["test"]),
        "predict_step": lambda self, parts, index: self.steps.update(["predict"]),
        "configure_optimizers": lambda self: torch.optim.SGD(
            self.parameters(), lr=self.learning_rate
        ),
        "learning_rate": 0.05,
        "steps": Counter[str](),
    }
    return fits.module(distribution, seed=seed, **{**own, **members})


def run_fit(
    rank: int,
    distribution: str = LIGHTNING,
    make: Any = evaluated,
    batches: int = 10,
    **choices: Any,
) -> Any:
    """Fits with two groups; returns trainer, module, and whether it holds the outer parameters."""
    model = make(distribution, seed=rank)
    strategy = fits.strategy(distribution, **SHORT)
    trainer = fits.trainer(
        distribution, **{"strategy": strategy, "devices": 2, "max_epochs": 2, **choices}
    )
    trainer.fit(model, data(batches), data(3))
    return trainer, model, same(dict(model.named_parameters()), strategy.outer_state_dict())


# Arguments of the Trainer


class Stop(pl.Callback):  # type: ignore[misc, name-defined]
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        trainer.should_stop |= trainer.global_step == 3


STOPPING: dict[str, Any] = {"callbacks": [Stop()], "max_epochs": 5, "limit_val_batches": 0}
UNCHECKED: dict[str, Any] = {"num_sanity_val_steps": 0}
# Of 10 batches a rank to train on, and 3 to validate on: inner steps, and batches of validation.
FLAGS: list[tuple[dict[str, Any], int, int]] = [
    ({"fast_dev_run": True}, 1, 1),
    ({"overfit_batches": 4}, 8, 8),
    ({"overfit_batches": 0.5}, 10, 3),
    ({"limit_train_batches": 0.3, "max_epochs": 3}, 9, 11),
    ({"limit_val_batches": 0}, 20, 0),
    ({"limit_val_batches": 0.7, **UNCHECKED}, 20, 4),
    ({"num_sanity_val_steps": -1}, 20, 9),
    ({"val_check_interval": 4, **UNCHECKED}, 20, 12),
    ({"val_check_interval": 7, "check_val_every_n_epoch": None, **UNCHECKED}, 20, 6),
    ({"check_val_every_n_epoch": 2, "max_epochs": 4, **UNCHECKED}, 40, 6),
    ({"max_epochs": None, "max_steps": 13, **UNCHECKED}, 13, 3),
    ({"barebones": True, "logger": None, "enable_checkpointing": None}, 20, 6),
    ({"accumulate_grad_batches": 4, **UNCHECKED}, 6, 6),
    ({"reload_dataloaders_every_n_epochs": 1, **UNCHECKED}, 20, 6),
    ({"profiler": "simple", **UNCHECKED}, 20, 6),
    ({"deterministic": True, "benchmark": False, "detect_anomaly": True, **UNCHECKED}, 20, 6),
    ({"min_steps": 15, **STOPPING}, 15, 0),
    ({"min_epochs": 2, **STOPPING}, 20, 0),
    (STOPPING, 3, 0),
]


@in_ranks(2)
def test_an_argument_of_the_trainer(rank: int) -> None:
    for choices, *expected in FLAGS:
        trainer, model, holds = run_fit(rank, **choices)
        assert [trainer.strategy.report()["inner_steps"], model.steps["val"], holds] == [
            *expected,
            True,
        ], choices
        assert agreed(trainer.strategy.outer_state_dict()), choices
    model = evaluated()
    limits = {"limit_test_batches": 2, "limit_predict_batches": 0.5}
    trainer = fits.trainer(strategy=fits.strategy(**SHORT), devices=2, **limits)
    trainer.test(model, data(6), verbose=False)
    trainer.predict(model, data(6))
    assert model.steps == {"test": 2, "predict": 3}


# Monitors


@in_ranks(2)
def test_early_stopping_stops_all_groups_at_the_same_epoch(rank: int) -> None:
    """Whether the monitored number is the same in all groups or not."""
    # A loss never gets better by so much.
    monitors = [
        (name, LIGHTNING, 100.0, 3) for name in ("val_loss", "train_loss", "train_loss_epoch")
    ]
    monitors += [("own", name, 0.5, 6) for name in (LIGHTNING, OTHER)]

    def log_own(self: Any) -> None:
        # Stops getting better in epoch 3 of group 0 and never in group 1.
        self.log("own", -float(min(self.current_epoch, 20 if rank else 3)))

    make = partial(evaluated, on_validation_epoch_end=log_own)
    for monitor, name, delta, epochs in monitors:
        stop = importlib.import_module(name).callbacks.EarlyStopping(
            monitor, min_delta=delta, patience=2
        )
        trainer, _, holds = run_fit(rank, name, make=make, max_epochs=20, callbacks=[stop])
        assert (trainer.current_epoch, trainer.strategy.report()["inner_steps"]) == (
            epochs,
            10 * epochs,
        )
        assert holds


@in_ranks(2)
def test_all_ranks_choose_the_same_best_checkpoint(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    """By a number that is the same in all groups, by one that each rank has for itself, and by one
    of batches.
    """

    def log_own(self: Any) -> None:
        self.log("own", float(self.current_epoch - 1 - 2 * rank) ** 2)

    def training_step(self: Any, parts: Any, index: int) -> Tensor:
        self.log("of_batch", float(self.global_rank + index), sync_dist=True)
        return self.loss(parts)  # type: ignore[no-any-return]

    saving = importlib.import_module(distribution).callbacks.ModelCheckpoint
    saves = [
        saving(
            tmp_path / monitor,
            "{epoch}-{own:.1f}",
            monitor=monitor,
            save_top_k=2,
            save_weights_only=True,
        )
        for monitor in ("val_loss", "own")
    ]
    saves.append(
        saving(
            tmp_path / "of_batch",
            "{step}-{of_batch:.1f}",
            monitor="of_batch",
            every_n_train_steps=3,
        )
    )
    make = partial(evaluated, training_step=training_step, on_validation_epoch_end=log_own)
    run_fit(rank, distribution, make=make, max_epochs=5, callbacks=saves, enable_checkpointing=True)
    assert agreed(
        [
            (saved.best_model_path, float(saved.best_model_score), sorted(saved.best_k_models))
            for saved in saves
        ]
    )
    for saved in saves:
        assert {
            str(path) for path in Path(saved.dirpath).glob("*.ckpt")
        } == saved.best_k_models.keys()
    # The mean of (epoch - 1)^2 and (epoch - 3)^2 is lowest at 2.
    best = [Path(saved.best_model_path).name for saved in saves[1:]]
    assert best == ["epoch=2-own=1.0.ckpt", "step=21-of_batch=0.5.ckpt"]


def plateau(distribution: str, seed: int, monitor: str, interval: str) -> Any:
    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
        self.log(
            "of_batch", 0.0 if self.global_rank else -1000.0 * self.global_step, sync_dist=True
        )
        return self.loss(parts)

    def on_train_epoch_end(self: Any) -> None:
        # Gets worse in group 0 only.
        self.log(
            "own", float(self.current_epoch if self.global_rank == 0 else -10 * self.current_epoch)
        )

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        # A loss never gets better by so much, so that every step of the scheduler after the first
        # cuts the rate.
        limits = {
            "patience": 0,
            "threshold": 0.5 if monitor == "own" else 100.0,
            "threshold_mode": "abs",
        }
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **limits)
        config = {
            "monitor": monitor,
            "interval": interval,
            "frequency": 1 if interval == "epoch" else 5,
        }
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **config}}

    own = {
        hook.__name__: hook for hook in (training_step, on_train_epoch_end, configure_optimizers)
    }
    own["on_train_batch_end"] = lambda self, *_: self.rates.append(
        self.trainer.optimizers[0].param_groups[0]["lr"]
    )
    return evaluated(distribution, seed, rates=[], **own)


@in_ranks(2)
def test_a_rate_reduced_on_a_plateau_is_equal_in_all_groups_except_by_batch_metrics(
    rank: int,
) -> None:
    """At the end of an epoch a number that differs becomes the mean of all; per batch it is that
    of the group.
    """
    # How often each group cuts its rate.
    plateaus = [("val_loss", "epoch", LIGHTNING, 2, 2), ("val_loss", "step", OTHER, 5, 5)]
    plateaus += [("own", "epoch", distribution, 0, 0) for distribution in (LIGHTNING, OTHER)]
    plateaus += [("of_batch", "step", LIGHTNING, 0, 5)]
    for monitor, interval, distribution, *cuts in plateaus:
        make = partial(plateau, monitor=monitor, interval=interval)
        trainer, model, holds = run_fit(
            rank, distribution, make=make, max_epochs=3, val_check_interval=5
        )
        assert agreed(model.rates) == (cuts[0] == cuts[1])
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(
            0.05 * 0.1 ** cuts[rank]
        )
        assert holds


# Tuners


@pytest.mark.parametrize("how", ["tuner", pytest.param("callback", marks=since("2.5.3"))])
@in_ranks(2)
def test_a_learning_rate_finder_gives_all_ranks_one_rate_and_leaves_no_trace(
    rank: int, how: str, distribution: str, tmp_path: Path
) -> None:
    host = importlib.import_module(distribution)

    def look(trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 0 and not started:
            started.append(trainer.strategy.report()["inner_steps"])
            assert same(
                dict(module.named_parameters()), dict(evaluated(distribution).named_parameters())
            )

    started: list[int] = []
    callbacks = (
        [host.callbacks.LearningRateFinder(num_training_steps=30)] if how == "callback" else []
    )
    looking = host.callbacks.LambdaCallback(on_train_batch_start=look)
    choices = {"strategy": fits.strategy(distribution, **SHORT), "devices": 2, "max_steps": 9}
    more = {"accumulate_grad_batches": 2, "default_root_dir": tmp_path}
    trainer = fits.trainer(distribution, callbacks=[*callbacks, looking], **choices, **more)
    model = evaluated(distribution, seed=rank)
    if how == "tuner":
        tuner = importlib.import_module(f"{distribution}.tuner").Tuner(trainer)
        tuner.lr_find(model, data(20), num_training=30)
    trainer.fit(model, data(20))
    assert (started, trainer.strategy.report()["inner_steps"]) == ([0], 9)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    outer = trainer.strategy.outer_state_dict()
    assert agreed(rate)
    assert rate != 0.05
    assert agreed(outer)
    assert same(dict(model.named_parameters()), outer)
    assert list(tmp_path.iterdir()) == []


@since("2.5.3")
@in_ranks(2)
def test_a_batch_size_finder_is_refused_by_lightning_as_for_ddp(
    rank: int, distribution: str
) -> None:
    host, tuner = (
        importlib.import_module(name) for name in (distribution, f"{distribution}.tuner")
    )
    told = []
    for strategy in ("streaming_diloco", "ddp"):
        made = partial(fits.trainer, distribution, strategy=strategy, devices=2, max_steps=5)
        finds = (
            tuner.Tuner(made()).scale_batch_size,
            made(callbacks=[host.callbacks.BatchSizeFinder()]).fit,
        )
        told.append(
            [refusal(find, evaluated(distribution), data(4), kind=Exception) for find in finds]
        )
    assert told[0] == told[1]
    assert ["not supported with distributed strategies" in text for text in told[0]] == [True, True]


# Loggers and other callbacks


def test_loggers_write_on_rank_0(distribution: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    def run(rank: int, world_size: int) -> None:
        loggers = importlib.import_module(f"{distribution}.loggers")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            both = [
                kind(tmp_path, name="", version=0)
                for kind in (loggers.CSVLogger, loggers.TensorBoardLogger)
            ]
        rates = importlib.import_module(distribution).callbacks.LearningRateMonitor("step")
        run_fit(rank, distribution, logger=both, log_every_n_steps=2, callbacks=[rates])

    run_processes(run, 2)
    rows = list(csv.DictReader((tmp_path / "version_0" / "metrics.csv").read_text().splitlines()))
    told = Counter(name for row in rows for name, value in row.items() if value)
    of_landings = {
        "bytes_sent",
        "exposed_wait_ms",
        "outer_grad_norm",
        "outer_lr",
        "groups_left_out",
        "groups_outlying",
    }
    assert {
        "val_loss",
        "train_loss_epoch",
        "lr-SGD",
        *(f"sdiloco/{name}" for name in of_landings),
    } <= told.keys()
    # What landed between two rows is in the second one.
    landed = [float(row["sdiloco/landings"]) for row in rows if row["sdiloco/landings"]]
    assert (told["train_loss_step"], told["sdiloco/bytes_sent"], sum(landed)) == (10, 8, 17)
    assert {row["lr-SGD"] for row in rows} == {"", "0.05"}
    assert list((tmp_path / "version_0").glob("events*"))


@in_ranks(2)
def test_a_callback_that_watches(rank: int, tmp_path: Path) -> None:
    """Training is the same with each of them as without."""
    callbacks = pl.callbacks
    watched = []
    throughput = importlib.import_module(
        f"{LIGHTNING}.callbacks.throughput_monitor"
    ).ThroughputMonitor
    # DeviceStatsMonitor asks it on a CPU.
    used = SimpleNamespace(percent=1.0)
    stand_in: Any = SimpleNamespace(
        virtual_memory=lambda: used, swap_memory=lambda: used, cpu_percent=lambda: 1.0
    )
    sys.modules["psutil"] = stand_in
    for name in ("accelerators.cpu", "callbacks.device_stats_monitor"):
        vars(importlib.import_module(f"{LIGHTNING}.{name}"))["_PSUTIL_AVAILABLE"] = True
    for chosen in (
        [],
        [
            callbacks.TQDMProgressBar(),
            callbacks.ModelSummary(),
            callbacks.DeviceStatsMonitor(cpu_stats=True),
        ],
        [
            callbacks.RichProgressBar(),
            callbacks.RichModelSummary(),
            callbacks.Timer(),
            callbacks.LearningRateMonitor(),
        ],
        [
            throughput(lambda parts: len(parts[0]), window_size=2),
            callbacks.LambdaCallback(on_fit_start=print),
        ],
    ):
        logger = importlib.import_module(f"{LIGHTNING}.loggers").CSVLogger(
            tmp_path / str(len(watched)), version=0
        )
        shown = dict.fromkeys(("enable_progress_bar", "enable_model_summary"), 0 < len(watched) < 3)
        more = {"logger": logger, "log_every_n_steps": 2, "max_epochs": 1, **shown}
        trainer, _, holds = run_fit(rank, callbacks=chosen, **more)
        watched.append(trainer.strategy.outer_state_dict())
        assert holds
        assert same(watched[-1], watched[0]), chosen


# What a model and its wrapper are asked outside of a fit


@in_ranks(2)
def test_a_model_without_a_trainer_is_connected_saved_and_trained(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    """As darts does it, which writes a checkpoint of a model that it has just made or read."""
    saved = []
    for strategy in ("ddp", "streaming_diloco"):
        trainer = fits.trainer(distribution, strategy=strategy, devices=2, max_steps=3)
        made = fits.module(distribution, seed=rank)
        path = tmp_path / f"{strategy}.ckpt"
        trainer.strategy.connect(made)
        trainer.save_checkpoint(path, weights_only=True)
        assert trainer.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank}
        trainer.fit(made, batches(rank))
        trainer.strategy.connect(fits.module(distribution))
        assert trainer.global_step == 3
        assert agreed(dict(made.state_dict()))
        saved.append(torch.load(path, weights_only=False))
    assert saved[0].keys() == saved[1].keys()
    assert same(saved[0]["state_dict"], saved[1]["state_dict"])


@in_ranks(1)
def test_a_trainer_that_is_given_after_connecting_is_in_time_for_the_setup(
    rank: int, distribution: str
) -> None:
    """As Lightning's own tests set a strategy up by hand."""
    functions = importlib.import_module(f"{distribution}.trainer.states").TrainerFn
    for function in (functions.FITTING, functions.VALIDATING, functions.FITTING):
        strategy = fits.strategy(distribution, process_group_backend="cpu:gloo")
        trainer = fits.trainer(distribution, strategy=strategy, devices=1, max_steps=1)
        trainer.state.fn = function
        strategy.connect(fits.module(distribution))
        trainer.lightning_module.trainer = trainer
        strategy.setup_environment()
        strategy.setup(trainer)
        assert str(dist.get_backend_config()) == "cpu:gloo"
        assert isinstance(trainer.model, DistributedDataParallel) == (function == functions.FITTING)
        attached = [type(callback).__name__ for callback in trainer.callbacks]
        assert attached.count("StreamingDiLoCoCallback") == (function == functions.FITTING)


@in_ranks(1)
def test_the_wrapper_of_a_single_rank_has_no_buckets_and_all_that_one_may_ask_of_it(
    rank: int,
) -> None:
    def hook(told: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        told.append(bucket.buffer().numel())
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        )

    dist.init_process_group("gloo")
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    for kwargs in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        gradients = []
        seen = list[Any]()
        buckets = list[int]()
        for wrapper in (SingleRankDDP, DistributedDataParallel):
            model = wrapper(net := mlp(), **kwargs)
            assert (model.module, model.static_graph) == (net, "static_graph" in kwargs)
            assert list(model.state_dict()) == [f"module.{name}" for name in net.state_dict()]
            model.register_forward_hook(lambda wrapped, *_, seen=seen: seen.append(wrapped))
            with model.join():
                model(batch).square().sum().backward()
            with model.no_sync():
                model(batch[:4]).square().sum().backward()
            model(batch[4:]).square().sum().backward()
            assert seen[-3:] == [model] * 3
            gradients.append([parameter.grad for parameter in net.parameters()])
            # Lightning does so in manual optimization.
            model.reducer._rebuild_buckets()
            model.reducer.prepare_for_backward([])
            assert isinstance(model._get_ddp_logging_data(), dict)
        assert all(map(torch.equal, *gradients))
        single = SingleRankDDP(mlp(), **kwargs).eval()
        single.register_comm_hook(buckets, hook)
        assert not single.training
        single(batch).sum().backward()
        assert buckets == [sum(parameter.numel() for parameter in single.parameters())]


# Names, and what Lightning refuses by itself


def test_every_name_of_ddp_has_its_counterparts(distribution: str) -> None:
    registry = importlib.import_module(f"{LIGHTNING}.strategies").StrategyRegistry
    names = [
        name
        for name, data in registry.items()
        if getattr(data["strategy"], "__name__", "") == "DDPStrategy"
    ]
    assert len(names) >= 12
    for name in names:
        given = [name, name.replace("ddp", "streaming_diloco", 1), f"streaming_diloco_{name}"]
        of_ddp, *ours = (
            fits.trainer(distribution, strategy=one, devices=2).strategy for one in given
        )
        for strategy in ours:
            assert (type(strategy), strategy.strategy_name) == (
                type(fits.strategy(distribution)),
                "streaming_diloco",
            )
            assert isinstance(strategy.launcher, type(of_ddp.launcher))
            assert (
                strategy.launcher.is_interactive_compatible
                == of_ddp.launcher.is_interactive_compatible
            )
            assert (strategy._ddp_kwargs, strategy._start_method) == (
                of_ddp._ddp_kwargs,
                of_ddp._start_method,
            )


def test_unused_parameters_are_reported_with_the_argument_that_allows_them(
    distribution: str,
) -> None:
    name = "streaming_diloco_find_unused_parameters_true"

    def fit(rank: int, world_size: int, strategy: Any) -> None:
        trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, max_steps=3)
        model = fits.module(distribution)
        model.unused = nn.Parameter(torch.zeros(3))
        trainer.fit(model, batches(rank))
        assert trainer.global_step == 3

    # A group of one rank has nothing to average, and needs no gradient of every parameter.
    for strategy in ("streaming_diloco", name):
        run_processes(fit, 1, strategy)
    one_group = fits.strategy(distribution, worker_groups=1)
    message, _ = run_processes(lambda *place: refusal(fit, *place, one_group, kind=RuntimeError), 2)
    assert f"strategy='{name}'" in message
    assert not any(other in message for other in ("'ddp_", "DDPStrategy"))


def test_the_docs_explain_the_messages_of_lightning(
    distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = importlib.import_module(distribution)
    used = fits.strategy(distribution)
    fits.trainer(distribution, strategy=used, devices=2)
    # Not `delitem`: what it puts back is what the registry's `get` returns, which is an object and
    # no entry.
    registry = importlib.import_module(f"{distribution}.strategies").StrategyRegistry
    monkeypatch.setattr(registry, "available_strategies", list)
    explained = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    for end, accelerator, strategy in (
        (".", "cpu", "streaming_diloco"),
        (",", "cpu", used),
        (",", "auto", used),
    ):
        choices = {"accelerator": accelerator, "strategy": strategy, "devices": 2}
        told = refusal(host.Trainer, kind=Exception, **choices).partition(end)[0]
        assert "set through" in told or "invalid strategy name" in told
        assert told in explained


# Users' objects


@in_ranks(2)
def test_a_value_that_one_rank_logs_and_nobody_reduces_stays_with_that_rank(
    rank: int, distribution: str, caplog: pytest.LogCaptureFixture
) -> None:
    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
        each = {"on_step": False, "on_epoch": True}
        self.log("all", float(self.global_rank), **each, sync_dist=True)
        if self.global_rank == 0:
            self.log("rare", float(index), **each)
            self.log(
                "told",
                float(index),
                on_step=True,
                on_epoch=True,
                rank_zero_only=True,
                sync_dist=True,
            )
            self.local.update(float(index))
            self.log("metric", self.local, **each)
            if hasattr(self.trainer.strategy, "outer_state_dict"):
                self.log("reduced", 1.0, **each, sync_dist=True)  # with DDP this waits for ever
        return self.loss(parts)

    for strategy in ("ddp", "streaming_diloco"):
        trainer = fits.trainer(distribution, strategy=strategy, devices=2, max_epochs=2)
        model = fits.module(distribution, training_step=training_step)
        model.local = MeanMetric(sync_on_compute=False)
        trainer.fit(model, fits.SomeBatches(rank, 4))
        alone = (
            {"rare": 1.5, "metric": 1.5, "told": 1.5, "told_step": 3.0, "told_epoch": 1.5}
            if rank == 0
            else {}
        )
        assert trainer.callback_metrics == {"all": 0.5, **alone}
    said = [
        record.getMessage()
        for record in caplog.records
        if "Not every rank logged" in record.getMessage()
    ]
    expected = [f"Not every rank logged training_step.reduced in epoch {epoch}" for epoch in (0, 1)]
    assert rank == 1 or [text.partition(",")[0] for text in said] == expected


@in_ranks(2)
def test_a_metric_in_the_hyperparameters_is_saved_copied_and_computed_in_the_group(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    """It is an argument of the module, a hyperparameter, and in a list."""

    class Measuring(type(fits.module(distribution))):  # type: ignore[misc]
        def __init__(self, metrics: MetricCollection) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.metrics = metrics
            self.hidden = [MeanMetric()]

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Any:
            self.metrics.update(float(rank))
            copies = [self.metrics["mean"].clone(), copy.deepcopy(self).metrics["mean"]]
            copies += [
                self.metrics.clone()["mean"],
                pickle.loads(pickle.dumps(self.metrics["mean"])),
            ]
            copies += [*self.hidden, MeanMetric()]
            for metric in copies[-2:]:
                metric.update(float(rank))
            # Every group computes in a batch what is its own.
            assert [float(metric.compute()) for metric in copies] == [float(rank)] * 6
            self.log_dict(self.metrics, on_step=False, on_epoch=True)
            return self.loss(parts)

    def held() -> dict[str, set[str]]:
        return {name: set(vars(metric)) for name, metric in model.metrics.items(copy_state=False)}

    gather = vars(torchmetrics.metric)["gather_all_tensors"]
    model = Measuring(MetricCollection({"mean": MeanMetric(), "most": torchmetrics.MaxMetric()}))
    before = held()
    saving = importlib.import_module(distribution).callbacks.ModelCheckpoint(
        tmp_path, every_n_train_steps=2
    )
    strategy = fits.strategy(distribution, worker_groups=2, sync_every=2, overlap_steps=1)
    more = {"devices": 2, "max_steps": 3, "enable_checkpointing": True, "callbacks": [saving]}
    trainer = fits.trainer(distribution, strategy=strategy, **more)
    trainer.fit(model, batches(rank))
    assert vars(torchmetrics.metric)["gather_all_tensors"] is gather
    assert all(names <= before[name] for name, names in held().items())
    saved = torch.load(saving.best_model_path, weights_only=False)["hyper_parameters"]["metrics"][
        "mean"
    ]
    assert (saved.dist_sync_fn, saved.process_group, trainer.callback_metrics["mean"]) == (
        None,
        None,
        0.5,
    )


@in_ranks(2)
def test_callbacks_are_copied_and_pickled_within_a_fit_as_with_ddp(
    rank: int, tmp_path: Path
) -> None:
    def copy_all(*args: Any) -> None:
        for callback in replaced:
            for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
                assert "lightning_sdiloco" not in str(vars(copied))
                copies.append(copied.on_train_batch_end.__self__ is copied)

    copies: list[bool] = []
    timed = pl.callbacks.ModelCheckpoint(tmp_path, train_time_interval=timedelta(days=1))
    replaced = [timed, pl.callbacks.Timer(timedelta(days=1))]
    callbacks = [*replaced, pl.callbacks.LambdaCallback(on_train_batch_end=copy_all)]
    more = {"devices": 2, "max_steps": 2, "enable_checkpointing": True, "callbacks": callbacks}
    fits.trainer(strategy=fits.strategy(worker_groups=2), **more).fit(BoringModel())
    assert copies == [True] * 8
    assert [name for name in vars(timed) if name.startswith("on_")] == []


@in_ranks(4)
def test_synchronised_batch_norm_stays_in_the_group_and_is_copied_without_it(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses it on the CPU, so the test looks only at the process group with which it would
    be called.
    """
    groups: list[Any] = []

    def forward(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        groups.append(layer.process_group)
        return x

    monkeypatch.setattr(nn.SyncBatchNorm, "forward", forward)
    monkeypatch.setattr(
        nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *args: None
    )

    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
        for copied in (copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))):
            assert [layer.process_group for layer in copied[1:3]] == [None, None]
            copied(parts[0])
        return self.loss(parts)

    # Lightning makes the second one synchronise too.
    net = nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    strategy = fits.strategy(worker_groups=2)
    trainer = fits.trainer(strategy=strategy, devices=4, max_steps=1, sync_batchnorm=True)
    trainer.fit(fits.module(net=net, training_step=training_step), batches(rank // 2, rank % 2, 2))
    assert [group is strategy.topology.in_group.process_group for group in groups] == [True] * 6
    assert nn.SyncBatchNorm.forward is forward
