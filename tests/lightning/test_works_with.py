"""What works in a Lightning project with DDP works here: arguments of the Trainer, callbacks, loggers, tuners."""

import csv
import importlib
import itertools
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests import fits
from tests.fits import LIGHTNING, since
from tests.lightning.uneven_fits import same
from tests.ranks import run_processes
from tests.training import batch

OTHER = "pytorch_lightning"
SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": "strided:1"}


def data(batches: int) -> DataLoader[Any]:
    """A loader for all ranks, of which each sees its share: some batches of 8 for each of two."""
    parts = [batch(0, step) for step in range(2 * batches)]
    return DataLoader(TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])), batch_size=8)


def evaluated(distribution: str = LIGHTNING, seed: int = 0, **members: Any) -> Any:
    """A module that counts its steps and logs losses: its own, that of its group, and that of all."""

    def counting(name: str, step: Any = lambda self, parts: self.loss(parts)) -> Any:
        def counted(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
            self.steps[name] += 1
            return step(self, parts)

        return counted

    def train(self: Any, parts: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.loss(parts)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss  # type: ignore[no-any-return]

    own = {
        "training_step": counting("train", train),
        "validation_step": counting("val", lambda self, parts: self.log("val_loss", self.loss(parts), sync_dist=True)),
        "test_step": counting("test"),
        "predict_step": counting("predict"),
        "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=self.learning_rate),
    }
    model = fits.module(distribution, seed=seed, **{**own, **members})
    model.learning_rate, model.steps = 0.05, dict.fromkeys(("train", "val", "test", "predict"), 0)
    return model


def finished(trainer: Any, model: Any) -> bool:
    """Whether the module holds the outer parameters."""
    return same(dict(model.named_parameters()), trainer.strategy.outer_state_dict())


def run_fit(rank: int, distribution: str = LIGHTNING, make: Any = evaluated, batches: int = 10, **choices: Any) -> Any:
    """Fits with two groups; returns trainer and module."""
    model = make(distribution, seed=rank)
    strategy = choices.pop("strategy", None) or fits.strategy(distribution, **SHORT)
    trainer = fits.trainer(distribution, **{"strategy": strategy, "devices": 2, "max_epochs": 2, **choices})
    trainer.fit(model, data(batches), data(3))
    return trainer, model


# Arguments of the Trainer


# Of 10 batches a rank to train on, and 3 to validate on: inner steps, and batches of validation.
FLAGS: list[tuple[dict[str, Any], int, int]] = [
    ({"fast_dev_run": True}, 1, 1),
    ({"overfit_batches": 4}, 8, 8),
    ({"overfit_batches": 0.5}, 10, 3),
    ({"limit_train_batches": 0.3, "max_epochs": 3}, 9, 11),
    ({"limit_val_batches": 0}, 20, 0),
    ({"limit_val_batches": 0.7, "num_sanity_val_steps": 0}, 20, 4),
    ({"num_sanity_val_steps": -1}, 20, 9),
    ({"num_sanity_val_steps": 0, "val_check_interval": 4}, 20, 12),
    ({"num_sanity_val_steps": 0, "val_check_interval": 7, "check_val_every_n_epoch": None}, 20, 6),
    ({"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2, "max_epochs": 4}, 40, 6),
    ({"max_epochs": None, "max_steps": 13, "num_sanity_val_steps": 0}, 13, 3),
    ({"min_epochs": 2, "max_epochs": 3, "num_sanity_val_steps": 0}, 30, 9),
    ({"barebones": True, "logger": None, "enable_checkpointing": None}, 20, 6),
    ({"accumulate_grad_batches": 4, "num_sanity_val_steps": 0}, 6, 6),
    ({"reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 0}, 20, 6),
    ({"profiler": "simple", "num_sanity_val_steps": 0}, 20, 6),
    ({"deterministic": True, "benchmark": False, "detect_anomaly": True, "num_sanity_val_steps": 0}, 20, 6),
]


def test_an_argument_of_the_trainer() -> None:
    def run(rank: int, world_size: int) -> list[Any]:
        ends = []
        for choices, _, _ in FLAGS:
            trainer, model = run_fit(rank, **choices)
            counted = [trainer.strategy.report()["inner_steps"], model.steps["val"], finished(trainer, model)]
            ends.append((counted, trainer.strategy.outer_state_dict()))
        return ends

    ranks = run_processes(run, 2, timeout=180.0)
    for (choices, *expected), (one, outer), (other, other_outer) in zip(FLAGS, *ranks, strict=True):
        assert one == other == [*expected, True], choices
        assert same(outer, other_outer), choices


def test_limits_of_testing_and_prediction() -> None:
    def run(rank: int, world_size: int) -> Any:
        model = evaluated()
        trainer = fits.trainer(
            strategy=fits.strategy(**SHORT), devices=2, limit_test_batches=2, limit_predict_batches=0.5
        )
        trainer.test(model, data(6), verbose=False)
        trainer.predict(model, data(6))
        return model.steps

    assert run_processes(run, 2) == [{"train": 0, "val": 0, "test": 2, "predict": 3}] * 2


def test_a_fit_is_not_stopped_before_its_minimum() -> None:
    class Stop(importlib.import_module(LIGHTNING).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            trainer.should_stop |= trainer.global_step == 3

    def run(rank: int, world_size: int) -> Any:
        ends = []
        for choices in ({"min_steps": 15}, {"min_epochs": 2}, {}):
            trainer, model = run_fit(rank, max_epochs=5, callbacks=[Stop()], **choices)
            ends.append((trainer.strategy.report()["inner_steps"], finished(trainer, model)))
        return ends

    assert run_processes(run, 2) == [[(15, True), (20, True), (3, True)]] * 2


def logging_its_own(of: Any) -> Any:
    """Makes modules that log, as "own", a number that depends on epoch and rank."""

    def on_validation_epoch_end(self: Any) -> None:
        self.log("own", float(of(self.current_epoch, self.global_rank)))

    return partial(evaluated, on_validation_epoch_end=on_validation_epoch_end)


# Monitors


def test_early_stopping_stops_all_groups_at_the_same_epoch() -> None:
    """Whether the monitored number is the same in all groups or not."""
    monitors = [("val_loss", LIGHTNING), ("train_loss", LIGHTNING), ("train_loss_epoch", LIGHTNING)]
    monitors += [("own", name) for name in (LIGHTNING, OTHER)]

    def run(rank: int, world_size: int) -> Any:
        ends = []
        for monitor, distribution in monitors:
            callbacks = importlib.import_module(distribution).callbacks
            # A loss never gets better by so much.
            delta = 0.5 if monitor == "own" else 100.0
            stop = callbacks.EarlyStopping(monitor, min_delta=delta, patience=2)
            # Stops getting better in epoch 3 of group 0 and never in group 1.
            make = logging_its_own(lambda epoch, rank: -(min(epoch, 3) if rank == 0 else epoch))
            trainer, model = run_fit(rank, distribution, make=make, max_epochs=20, callbacks=[stop])
            steps = trainer.strategy.report()["inner_steps"]
            ends.append((trainer.current_epoch, steps, finished(trainer, model)))
        return ends

    epochs = [6 if monitor == "own" else 3 for monitor, _ in monitors]
    assert run_processes(run, 2) == [[(many, 10 * many, True) for many in epochs]] * 2


def test_all_ranks_choose_the_same_best_checkpoint(distribution: str, tmp_path: Path) -> None:
    """By a number that is the same in all groups, and by one that each rank has for itself."""

    def run(rank: int, world_size: int) -> Any:
        callbacks = importlib.import_module(distribution).callbacks
        saves = [
            callbacks.ModelCheckpoint(
                tmp_path / monitor, monitor=monitor, filename="{epoch}-{own:.1f}", save_top_k=2, save_weights_only=True
            )
            for monitor in ("val_loss", "own")
        ]
        make = logging_its_own(lambda epoch, rank: (epoch - 1 - 2 * rank) ** 2)
        run_fit(rank, distribution, make=make, max_epochs=5, callbacks=saves, enable_checkpointing=True)
        return [(b.best_model_path, float(b.best_model_score), sorted(b.best_k_models)) for b in saves]

    one, other = run_processes(run, 2)
    assert one == other
    for monitor, (_, _, kept) in zip(("val_loss", "own"), one, strict=True):
        assert sorted(path.name for path in (tmp_path / monitor).glob("*.ckpt")) == [Path(p).name for p in kept]
    # The mean of (epoch - 1)^2 and (epoch - 3)^2 is lowest at 2.
    assert Path(one[1][0]).name == "epoch=2-own=1.0.ckpt"


def plateau(distribution: str, seed: int, monitor: str, interval: str, **members: Any) -> Any:
    def on_train_epoch_end(self: Any) -> None:
        # Gets worse in group 0 only.
        self.log("own", float(self.current_epoch if self.global_rank == 0 else -10 * self.current_epoch))

    def on_train_batch_end(self: Any, *args: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        # A loss never gets better by so much, so that every step of the scheduler after the first cuts the rate.
        limits = {"patience": 0, "threshold": 0.5 if monitor == "own" else 100.0, "threshold_mode": "abs"}
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **limits)
        frequency = 1 if interval == "epoch" else 5
        config = {"scheduler": scheduler, "monitor": monitor, "interval": interval, "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}

    own = (on_train_epoch_end, on_train_batch_end, configure_optimizers)
    return evaluated(distribution, seed, rates=[], **{hook.__name__: hook for hook in own}, **members)


def test_a_rate_that_is_reduced_on_a_plateau_is_the_same_in_all_groups() -> None:
    """Also where the monitored number is not: at the end of an epoch it becomes the mean of all."""
    plateaus = [("val_loss", "epoch", 2, LIGHTNING), ("val_loss", "step", 5, OTHER)]
    plateaus += [("own", "epoch", 0, distribution) for distribution in (LIGHTNING, OTHER)]

    def run(rank: int, world_size: int) -> Any:
        ends = []
        for monitor, interval, _, distribution in plateaus:
            make = partial(plateau, monitor=monitor, interval=interval)
            trainer, model = run_fit(rank, distribution, make=make, max_epochs=3, val_check_interval=5)
            ends.append((list(model.rates), trainer.optimizers[0].param_groups[0]["lr"]))
        return ends

    one, other = run_processes(run, 2)
    assert one == other
    assert [rate for _, rate in one] == [pytest.approx(0.05 * 0.1**cuts) for _, _, cuts, _ in plateaus]


def test_a_plateau_of_what_is_logged_per_batch_is_that_of_the_group() -> None:
    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
        self.log("loss_of_group", 0.0 if self.global_rank else -1000.0 * self.global_step, sync_dist=True)
        return self.loss(parts)

    def run(rank: int, world_size: int) -> Any:
        make = partial(plateau, monitor="loss_of_group", interval="step", training_step=training_step)
        trainer, model = run_fit(rank, make=make, max_epochs=1)
        return trainer.optimizers[0].param_groups[0]["lr"], trainer.strategy.outer_state_dict()

    (rate, outer), (other_rate, other_outer) = run_processes(run, 2)
    assert (rate, other_rate) == (pytest.approx(0.05), pytest.approx(0.005))
    assert same(outer, other_outer)


# Tuners


@pytest.mark.parametrize("how", ["tuner", pytest.param("callback", marks=since("2.5.3"))])
def test_a_learning_rate_finder_gives_all_ranks_one_rate_and_leaves_no_trace(
    how: str, distribution: str, tmp_path: Path
) -> None:
    pl = importlib.import_module(distribution)

    class Started(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, parts: Any, index: int) -> None:
            if "weights" not in vars(self):
                self.weights = {name: p.detach().clone() for name, p in module.named_parameters()}
                self.counted = [trainer.strategy.report()["inner_steps"], trainer.global_step]

    def run(rank: int, world_size: int) -> Any:
        callbacks = [pl.callbacks.LearningRateFinder(num_training_steps=30)] if how == "callback" else []
        model, started = evaluated(distribution, seed=rank), Started()
        choices = {"strategy": fits.strategy(distribution, **SHORT), "devices": 2, "max_steps": 9}
        more = {"accumulate_grad_batches": 2, "callbacks": [*callbacks, started], "default_root_dir": tmp_path}
        trainer = fits.trainer(distribution, **choices, **more)
        if how == "tuner":
            tuner = importlib.import_module(f"{distribution}.tuner").Tuner(trainer)
            tuner.lr_find(model, data(20), num_training=30)
        trainer.fit(model, data(20))
        counted = [*started.counted, trainer.strategy.report()["inner_steps"], finished(trainer, model)]
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        return (rate, counted), started.weights, trainer.strategy.outer_state_dict()

    (told, weights, outer), (other_told, other_weights, other_outer) = run_processes(run, 2)
    assert list(tmp_path.iterdir()) == []
    assert told == other_told
    assert told[0] != 0.05
    assert told[1] == [0, 0, 9, True]
    assert same(weights, other_weights)
    assert same(weights, dict(evaluated(distribution).named_parameters()))
    assert same(outer, other_outer)


@since("2.5.3")
def test_a_batch_size_finder_is_refused_by_lightning_as_for_ddp(distribution: str) -> None:
    def run(rank: int, world_size: int) -> list[str]:
        pl = importlib.import_module(distribution)
        told = []
        for strategy, finder in itertools.product(("streaming_diloco", "ddp"), ([], [pl.callbacks.BatchSizeFinder()])):
            trainer = fits.trainer(distribution, strategy=strategy, devices=2, max_steps=5, callbacks=finder)
            tuner = importlib.import_module(f"{distribution}.tuner").Tuner(trainer)
            find = trainer.fit if finder else tuner.scale_batch_size
            with pytest.raises(Exception, match="not supported with distributed strategies") as caught:
                find(evaluated(distribution), data(4))
            told.append(f"{caught.type.__name__}: {caught.value}")
        return told

    for ours, ours_in_fit, of_ddp, of_ddp_in_fit in run_processes(run, 2):
        assert (ours, ours_in_fit) == (of_ddp, of_ddp_in_fit)


# Loggers and other callbacks


def test_loggers_write_on_rank_0(distribution: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    def run(rank: int, world_size: int) -> None:
        loggers = importlib.import_module(f"{distribution}.loggers")
        both = [loggers.CSVLogger(tmp_path, name="csv", version=0)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            both.append(loggers.TensorBoardLogger(tmp_path, name="tensorboard", version=0))
        rates = importlib.import_module(distribution).callbacks.LearningRateMonitor("step")
        run_fit(rank, distribution, logger=both, log_every_n_steps=2, callbacks=[rates])

    run_processes(run, 2)
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = {name for row in rows for name, value in row.items() if value}
    assert {"val_loss", "train_loss_step", "train_loss_epoch", "lr-SGD", "sdiloco/bytes_sent"} <= columns
    assert len([row for row in rows if row["train_loss_step"]]) == 10
    assert len([row for row in rows if row["sdiloco/bytes_sent"]]) == 17
    assert {row["lr-SGD"] for row in rows} == {"", "0.05"}
    assert list((tmp_path / "tensorboard" / "version_0").glob("events*"))


def pretend_psutil(distribution: str) -> None:
    """DeviceStatsMonitor asks it on a CPU."""
    used = SimpleNamespace(percent=1.0)
    stand_in: Any = SimpleNamespace(virtual_memory=lambda: used, swap_memory=lambda: used, cpu_percent=lambda: 1.0)
    sys.modules["psutil"] = stand_in
    for name in ("accelerators.cpu", "callbacks.device_stats_monitor"):
        vars(importlib.import_module(f"{distribution}.{name}"))["_PSUTIL_AVAILABLE"] = True


def watchers() -> list[Any]:
    callbacks = importlib.import_module(LIGHTNING).callbacks
    throughput = importlib.import_module(f"{LIGHTNING}.callbacks.throughput_monitor").ThroughputMonitor
    return [
        callbacks.RichProgressBar(),
        callbacks.TQDMProgressBar(),
        callbacks.RichModelSummary(),
        callbacks.ModelSummary(),
        callbacks.DeviceStatsMonitor(cpu_stats=True),
        callbacks.Timer(),
        throughput(batch_size_fn=lambda parts: len(parts[0]), window_size=2),
        callbacks.LearningRateMonitor(),
        callbacks.LambdaCallback(on_train_start=lambda trainer, module: None),
    ]


def test_a_callback_that_watches(tmp_path: Path) -> None:
    """Training is the same with each of them as without."""

    def run(rank: int, world_size: int) -> list[Any]:
        pretend_psutil(LIGHTNING)
        ends = []
        for callback in (None, *watchers()):
            name = type(callback).__name__
            logger = importlib.import_module(f"{LIGHTNING}.loggers").CSVLogger(tmp_path / name, name="", version=0)
            bar = {"enable_progress_bar": "ProgressBar" in name, "enable_model_summary": "Summary" in name}
            chosen = [callback] if callback else []
            trainer, model = run_fit(rank, callbacks=chosen, logger=logger, log_every_n_steps=2, max_epochs=1, **bar)
            assert finished(trainer, model)
            ends.append(trainer.strategy.outer_state_dict())
        return ends

    for unwatched, *ends in run_processes(run, 2):
        for outer in ends:
            assert same(outer, unwatched)
