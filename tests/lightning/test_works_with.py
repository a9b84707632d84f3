"""What works in a Lightning project with DDP works here: arguments of the Trainer, callbacks,
loggers, tuners, names.

A fit replaces parts of users' objects. Neither pickle nor deepcopy sees the replacements, and they
are gone after the fit.
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
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection

from lightning_sdiloco.lightning.model_format import SingleRankDDP
from tests import fits
from tests.bits import same
from tests.fits import LIGHTNING, OTHER, SHORT, batches, callbacks_of, on, refusal, since
from tests.ranks import agreed, in_ranks, run_processes
from tests.training import batch, mlp

pl = importlib.import_module(LIGHTNING)
Batch = tuple[Tensor, Tensor]
PER_EPOCH = {"on_step": False, "on_epoch": True}
# A loss never gets better by as much.
UNREACHABLE = 100.0


def shared_loader(batches: int) -> DataLoader[Any]:
    """A loader for all ranks, of which each of two sees a share: as many batches of 8."""
    parts = [batch(0, step) for step in range(2 * batches)]
    inputs = torch.cat([x for x, _ in parts])
    targets = torch.cat([y for _, y in parts])
    return DataLoader(TensorDataset(inputs, targets), batch_size=8)


def loss_and_log(self: Any, parts: Batch, index: int) -> Tensor:
    loss: Tensor = self.loss(parts)
    self.log("train_loss", loss, on_step=True, on_epoch=True)
    return loss


def validate_and_log(self: Any, parts: Batch, index: int) -> None:
    self.steps["val"] += 1
    self.log("val_loss", self.loss(parts), sync_dist=True)


def sgd_of(self: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def evaluated(distribution: str = LIGHTNING, seed: int = 0, **members: Any) -> Any:
    """A module that counts its steps and logs the loss of its group and that of all."""
    defaults = {
        "training_step": loss_and_log,
        "validation_step": validate_and_log,
        "test_step": lambda self, parts, index: self.steps.update(["test"]),
        "predict_step": lambda self, parts, index: self.steps.update(["predict"]),
        "configure_optimizers": sgd_of,
        "learning_rate": 0.05,
        "steps": Counter[str](),
    }
    return fits.module(distribution, seed=seed, **{**defaults, **members})


def rate_of(trainer: Any) -> float:
    return float(trainer.optimizers[0].param_groups[0]["lr"])


class Fitted(NamedTuple):
    """A fit of two groups in this rank."""

    trainer: Any
    module: Any

    @property
    def inner_steps(self) -> int:
        return int(self.trainer.strategy.report()["inner_steps"])

    @property
    def outer(self) -> dict[str, Tensor]:
        return dict(self.trainer.strategy.outer_state_dict())

    @property
    def holds_outer_parameters(self) -> bool:
        return same(dict(self.module.named_parameters()), self.outer)


def run_fit(
    rank: int,
    distribution: str = LIGHTNING,
    make: Any = evaluated,
    batches: int = 10,
    **choices: Any,
) -> Fitted:
    module = make(distribution, seed=rank)
    strategy = fits.strategy(distribution, **SHORT)
    arguments = {"strategy": strategy, "devices": 2, "max_epochs": 2, **choices}
    trainer = fits.trainer(distribution, **arguments)
    trainer.fit(module, shared_loader(batches), shared_loader(3))
    return Fitted(trainer, module)


# Arguments of the Trainer


class Stop(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        trainer.should_stop |= trainer.global_step == 3


STOPPING = {"callbacks": [Stop()], "max_epochs": 5, "limit_val_batches": 0}
UNCHECKED = {"num_sanity_val_steps": 0}
# Arguments, inner steps, and batches of validation. Each rank has 10 batches to train on and 3 to
# validate on.
FLAGS = [
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
    for choices, inner_steps, validations in FLAGS:
        fitted = run_fit(rank, **choices)
        assert fitted.inner_steps == inner_steps, choices
        assert fitted.module.steps["val"] == validations, choices
        assert fitted.holds_outer_parameters, choices
        assert agreed(fitted.outer), choices
    module = evaluated()
    limits = {"limit_test_batches": 2, "limit_predict_batches": 0.5}
    trainer = fits.trainer(strategy=fits.strategy(**SHORT), devices=2, **limits)
    trainer.test(module, shared_loader(6), verbose=False)
    trainer.predict(module, shared_loader(6))
    assert module.steps == {"test": 2, "predict": 3}


# Monitors


@in_ranks(2)
def test_early_stopping_stops_all_groups_at_the_same_epoch(rank: int) -> None:
    """The monitored number may differ between groups."""

    def log_until_epoch_3_in_group_0(self: Any) -> None:
        last_epoch = 20 if rank else 3
        self.log("own", -float(min(self.current_epoch, last_epoch)))

    make = partial(evaluated, on_validation_epoch_end=log_until_epoch_3_in_group_0)
    # The number, the distribution, what counts as better, and the epochs until the end.
    cases = [
        ("val_loss", LIGHTNING, UNREACHABLE, 3),
        ("train_loss", LIGHTNING, UNREACHABLE, 3),
        ("train_loss_epoch", LIGHTNING, UNREACHABLE, 3),
        ("own", LIGHTNING, 0.5, 6),
        ("own", OTHER, 0.5, 6),
    ]
    for monitor, distribution, min_delta, epochs in cases:
        stopping = callbacks_of(distribution).EarlyStopping(
            monitor, min_delta=min_delta, patience=2
        )
        fitted = run_fit(rank, distribution, make=make, max_epochs=20, callbacks=[stopping])
        assert fitted.trainer.current_epoch == epochs
        assert fitted.inner_steps == 10 * epochs
        assert fitted.holds_outer_parameters


def log_distance(self: Any) -> None:
    self.log("own", float(self.current_epoch - 1 - 2 * self.global_rank) ** 2)


def log_index(self: Any, parts: Any, index: int) -> Tensor:
    self.log("of_batch", float(self.global_rank + index), sync_dist=True)
    return self.loss(parts)


@in_ranks(2)
def test_all_ranks_choose_the_same_best_checkpoint(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    """By a number that is the same in all groups, by one that differs, and by one of batches."""

    saving = callbacks_of(distribution).ModelCheckpoint
    weights = {"save_top_k": 2, "save_weights_only": True}
    by_epoch = [
        saving(tmp_path / monitor, "{epoch}-{own:.1f}", monitor=monitor, **weights)
        for monitor in ("val_loss", "own")
    ]
    by_batch = saving(
        tmp_path / "of_batch", "{step}-{of_batch:.1f}", monitor="of_batch", every_n_train_steps=3
    )
    saves = [*by_epoch, by_batch]
    make = partial(evaluated, training_step=log_index, on_validation_epoch_end=log_distance)
    run_fit(rank, distribution, make=make, max_epochs=5, callbacks=saves, enable_checkpointing=True)
    for saved in saves:
        score = float(saved.best_model_score)
        assert agreed((saved.best_model_path, score, sorted(saved.best_k_models)))
        files = {str(path) for path in Path(saved.dirpath).glob("*.ckpt")}
        assert files == saved.best_k_models.keys()
    # The mean of (epoch - 1)^2 and (epoch - 3)^2 is lowest at 2.
    assert Path(by_epoch[1].best_model_path).name == "epoch=2-own=1.0.ckpt"
    assert Path(by_batch.best_model_path).name == "step=21-of_batch=0.5.ckpt"


def log_better_in_group_0(self: Any, parts: Batch, index: int) -> Any:
    number = 0.0 if self.global_rank else -1000.0 * self.global_step
    self.log("of_batch", number, sync_dist=True)
    return self.loss(parts)


def log_worse_in_group_0(self: Any) -> None:
    slope = -10 if self.global_rank else 1
    self.log("own", float(slope * self.current_epoch))


def note_rate(self: Any, *_: Any) -> None:
    self.rates.append(rate_of(self.trainer))


def plateau(distribution: str, seed: int, monitor: str, interval: str) -> Any:
    """A module whose scheduler cuts the rate with every step after the first in which a number does
    not get much better.
    """

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        threshold = 0.5 if monitor == "own" else UNREACHABLE
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=threshold, threshold_mode="abs"
        )
        frequency = 1 if interval == "epoch" else 5
        times = {"monitor": monitor, "interval": interval, "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **times}}

    return evaluated(
        distribution,
        seed,
        rates=[],
        training_step=log_better_in_group_0,
        on_train_batch_end=note_rate,
        on_train_epoch_end=log_worse_in_group_0,
        configure_optimizers=configure_optimizers,
    )


class Plateau(NamedTuple):
    """A number that is monitored, and how often each group cuts its rate."""

    monitor: str
    interval: str
    distribution: str
    cuts: tuple[int, int]


@in_ranks(2)
def test_a_rate_reduced_on_a_plateau_is_equal_in_all_groups_except_by_batch_metrics(
    rank: int,
) -> None:
    """At the end of an epoch a number that differs becomes the mean of all; per batch it is that
    of the group.
    """
    plateaus = [
        Plateau("val_loss", "epoch", LIGHTNING, (2, 2)),
        Plateau("val_loss", "step", OTHER, (5, 5)),
        Plateau("own", "epoch", LIGHTNING, (0, 0)),
        Plateau("own", "epoch", OTHER, (0, 0)),
        Plateau("of_batch", "step", LIGHTNING, (0, 5)),
    ]
    for case in plateaus:
        make = partial(plateau, monitor=case.monitor, interval=case.interval)
        fitted = run_fit(rank, case.distribution, make=make, max_epochs=3, val_check_interval=5)
        assert agreed(fitted.module.rates) == (case.cuts[0] == case.cuts[1])
        assert rate_of(fitted.trainer) == pytest.approx(0.05 * 0.1 ** case.cuts[rank])
        assert fitted.holds_outer_parameters


# Tuners


@pytest.mark.parametrize("how", ["tuner", pytest.param("callback", marks=since("2.5.3"))])
@in_ranks(2)
def test_a_learning_rate_finder_gives_all_ranks_one_rate_and_leaves_no_trace(
    rank: int, how: str, distribution: str, tmp_path: Path
) -> None:
    first_inner_steps: list[int] = []

    def look(trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 0 and not first_inner_steps:
            first_inner_steps.append(trainer.strategy.report()["inner_steps"])
            initial = evaluated(distribution)
            assert same(dict(module.named_parameters()), dict(initial.named_parameters()))

    callbacks = [on(distribution, on_train_batch_start=look)]
    if how == "callback":
        finder = callbacks_of(distribution).LearningRateFinder(num_training_steps=30)
        callbacks.insert(0, finder)
    trainer = fits.trainer(
        distribution,
        callbacks=callbacks,
        strategy=fits.strategy(distribution, **SHORT),
        devices=2,
        max_steps=9,
        accumulate_grad_batches=2,
        default_root_dir=tmp_path,
    )
    module = evaluated(distribution, seed=rank)
    if how == "tuner":
        tuner = importlib.import_module(f"{distribution}.tuner").Tuner(trainer)
        tuner.lr_find(module, shared_loader(20), num_training=30)
    trainer.fit(module, shared_loader(20))
    fitted = Fitted(trainer, module)
    assert first_inner_steps == [0]
    assert fitted.inner_steps == 9
    assert agreed(rate_of(trainer))
    assert rate_of(trainer) != 0.05
    assert agreed(fitted.outer)
    assert fitted.holds_outer_parameters
    assert list(tmp_path.iterdir()) == []


@since("2.5.3")
@in_ranks(2)
def test_a_batch_size_finder_is_refused_by_lightning_as_for_ddp(
    rank: int, distribution: str
) -> None:
    tuner = importlib.import_module(f"{distribution}.tuner")

    def refusals(strategy: str) -> list[str]:
        make = partial(fits.trainer, distribution, strategy=strategy, devices=2, max_steps=5)
        scale = tuner.Tuner(make()).scale_batch_size
        fit = make(callbacks=[callbacks_of(distribution).BatchSizeFinder()]).fit
        arguments = (evaluated(distribution), shared_loader(4))
        return [refusal(find, *arguments, kind=Exception) for find in (scale, fit)]

    messages = refusals("streaming_diloco")
    assert messages == refusals("ddp")
    for message in messages:
        assert "not supported with distributed strategies" in message


# Loggers and other callbacks


def fit_with_loggers(rank: int, world_size: int, distribution: str, folder: Path) -> None:
    loggers = importlib.import_module(f"{distribution}.loggers")
    place = {"name": "", "version": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both = [loggers.CSVLogger(folder, **place), loggers.TensorBoardLogger(folder, **place)]
    rates = callbacks_of(distribution).LearningRateMonitor("step")
    run_fit(rank, distribution, logger=both, log_every_n_steps=2, callbacks=[rates])


def test_loggers_write_on_rank_0(distribution: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_processes(fit_with_loggers, 2, distribution, tmp_path)
    folder = tmp_path / "version_0"
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    cells = Counter[str]()
    for row in rows:
        cells.update(name for name, cell in row.items() if cell)
    assert {"val_loss", "train_loss_epoch", "lr-SGD"} <= cells.keys()
    for name in (
        "bytes_sent",
        "exposed_wait_ms",
        "outer_grad_norm",
        "outer_lr",
        "groups_left_out",
        "groups_outlying",
    ):
        assert f"sdiloco/{name}" in cells
    assert cells["train_loss_step"] == 10
    assert cells["sdiloco/bytes_sent"] == 8
    # A row counts everything that has landed since the row before.
    assert sum(float(row["sdiloco/landings"] or 0) for row in rows) == 17
    assert {row["lr-SGD"] for row in rows} == {"", "0.05"}
    assert list(folder.glob("events*"))


def pretend_psutil() -> None:
    """DeviceStatsMonitor asks psutil on a CPU."""
    usage = SimpleNamespace(percent=1.0)
    stand_in = SimpleNamespace(
        virtual_memory=lambda: usage, swap_memory=lambda: usage, cpu_percent=lambda: 1.0
    )
    sys.modules["psutil"] = stand_in
    for name in ("accelerators.cpu", "callbacks.device_stats_monitor"):
        vars(importlib.import_module(f"{LIGHTNING}.{name}"))["_PSUTIL_AVAILABLE"] = True


class Watching(NamedTuple):
    callbacks: list[Any]
    shows_progress: bool = False


@in_ranks(2)
def test_a_callback_that_watches(rank: int, tmp_path: Path) -> None:
    """Training is the same with each of them as without."""
    pretend_psutil()
    callbacks = pl.callbacks
    loggers = importlib.import_module(f"{LIGHTNING}.loggers")
    monitors = importlib.import_module(f"{LIGHTNING}.callbacks.throughput_monitor")
    plain = [
        callbacks.TQDMProgressBar(),
        callbacks.ModelSummary(),
        callbacks.DeviceStatsMonitor(cpu_stats=True),
    ]
    rich = [
        callbacks.RichProgressBar(),
        callbacks.RichModelSummary(),
        callbacks.Timer(),
        callbacks.LearningRateMonitor(),
    ]
    silent = [
        monitors.ThroughputMonitor(lambda parts: len(parts[0]), window_size=2),
        callbacks.LambdaCallback(on_fit_start=print),
    ]
    cases = [Watching([]), Watching(plain, True), Watching(rich, True), Watching(silent)]
    trained: list[dict[str, Tensor]] = []
    for number, case in enumerate(cases):
        fitted = run_fit(
            rank,
            callbacks=case.callbacks,
            logger=loggers.CSVLogger(tmp_path / str(number), version=0),
            log_every_n_steps=2,
            max_epochs=1,
            enable_progress_bar=case.shows_progress,
            enable_model_summary=case.shows_progress,
        )
        trained.append(fitted.outer)
        assert fitted.holds_outer_parameters
        assert same(trained[number], trained[0]), case


# Models and their wrapper outside a fit


@in_ranks(2)
def test_a_model_without_a_trainer_is_connected_saved_and_trained(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    """As darts does it, which writes a checkpoint of a model that it has just made or read."""

    def saved_with(strategy: str) -> dict[str, Any]:
        trainer = fits.trainer(distribution, strategy=strategy, devices=2, max_steps=3)
        module = fits.module(distribution, seed=rank)
        path = tmp_path / f"{strategy}.ckpt"
        trainer.strategy.connect(module)
        trainer.save_checkpoint(path, weights_only=True)
        assert trainer.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank}
        trainer.fit(module, batches(rank))
        trainer.strategy.connect(fits.module(distribution))
        assert trainer.global_step == 3
        assert agreed(dict(module.state_dict()))
        return dict(torch.load(path, weights_only=False))

    with_ddp = saved_with("ddp")
    with_us = saved_with("streaming_diloco")
    assert with_us.keys() == with_ddp.keys()
    assert same(with_us["state_dict"], with_ddp["state_dict"])


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
        is_fitting = function == functions.FITTING
        assert isinstance(trainer.model, DistributedDataParallel) == is_fitting
        attached = [type(callback).__name__ for callback in trainer.callbacks]
        assert attached.count("StreamingDiLoCoCallback") == is_fitting


def gradients_in(wrapper: Any, inputs: Tensor, **kwargs: Any) -> list[Tensor | None]:
    """The gradients after three backward passes through a wrapper, which is used as a whole."""
    net = mlp()
    called: list[Any] = []
    model = wrapper(net, **kwargs)
    assert model.module == net
    assert model.static_graph == ("static_graph" in kwargs)
    assert list(model.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    model.register_forward_hook(lambda wrapped, *_: called.append(wrapped))
    with model.join():
        model(inputs).square().sum().backward()
    with model.no_sync():
        model(inputs[:4]).square().sum().backward()
    model(inputs[4:]).square().sum().backward()
    assert called == [model] * 3
    # Lightning does so in manual optimization.
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([])
    assert isinstance(model._get_ddp_logging_data(), dict)
    return [parameter.grad for parameter in net.parameters()]


def all_reduce_noting_sizes(
    sizes: list[int], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    sizes.append(bucket.buffer().numel())
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@in_ranks(1)
def test_the_wrapper_of_a_single_rank_has_no_buckets_and_all_that_one_may_ask_of_it(
    rank: int,
) -> None:
    dist.init_process_group("gloo")
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    for kwargs in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        gradients = gradients_in(SingleRankDDP, inputs, **kwargs)
        expected = gradients_in(DistributedDataParallel, inputs, **kwargs)
        assert all(map(torch.equal, gradients, expected))
        sizes: list[int] = []
        single = SingleRankDDP(mlp(), **kwargs).eval()
        single.register_comm_hook(sizes, all_reduce_noting_sizes)
        assert not single.training
        single(inputs).sum().backward()
        assert sizes == [sum(parameter.numel() for parameter in single.parameters())]


# Names, and what Lightning refuses by itself


def assert_counterpart(strategy: Any, ddp: Any) -> None:
    assert strategy.strategy_name == "streaming_diloco"
    assert isinstance(strategy.launcher, type(ddp.launcher))
    is_interactive = strategy.launcher.is_interactive_compatible
    assert is_interactive == ddp.launcher.is_interactive_compatible
    assert strategy._ddp_kwargs == ddp._ddp_kwargs
    assert strategy._start_method == ddp._start_method


def test_every_name_of_ddp_has_its_counterparts(distribution: str) -> None:
    registry = importlib.import_module(f"{LIGHTNING}.strategies").StrategyRegistry
    names = []
    for name, entry in registry.items():
        if getattr(entry["strategy"], "__name__", "") == "DDPStrategy":
            names.append(name)
    assert len(names) >= 12

    def strategy_called(name: str) -> Any:
        return fits.trainer(distribution, strategy=name, devices=2).strategy

    for name in names:
        ddp = strategy_called(name)
        for our_name in (
            name.replace("ddp", "streaming_diloco", 1),
            f"streaming_diloco_{name}",
        ):
            strategy = strategy_called(our_name)
            assert type(strategy) is type(fits.strategy(distribution))
            assert_counterpart(strategy, ddp)


def test_unused_parameters_are_reported_with_the_argument_that_allows_them(
    distribution: str,
) -> None:
    name = "streaming_diloco_find_unused_parameters_true"

    def fit(rank: int, world_size: int, strategy: Any) -> None:
        trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, max_steps=3)
        module = fits.module(distribution)
        module.unused = nn.Parameter(torch.zeros(3))
        trainer.fit(module, batches(rank))
        assert trainer.global_step == 3

    # A group of one rank has nothing to average, and needs no gradient of every parameter.
    for strategy in ("streaming_diloco", name):
        run_processes(fit, 1, strategy)
    one_group = fits.strategy(distribution, worker_groups=1)
    message, _ = run_processes(lambda *place: refusal(fit, *place, one_group, kind=RuntimeError), 2)
    assert f"strategy='{name}'" in message
    assert "'ddp_" not in message
    assert "DDPStrategy" not in message


def test_the_docs_explain_the_message_of_lightning(
    distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = importlib.import_module(distribution)
    # Not `delitem`: what it puts back is what the registry's `get` returns, which is an object and
    # no entry.
    registry = importlib.import_module(f"{distribution}.strategies").StrategyRegistry
    monkeypatch.setattr(registry, "available_strategies", list)
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    message = refusal(host.Trainer, accelerator="cpu", strategy="streaming_diloco", devices=2)
    assert "invalid strategy name" in message
    assert message.partition(".")[0] in page


def test_a_strategy_object_is_refused_by_a_second_trainer(distribution: str) -> None:
    strategy = fits.strategy(distribution)
    trainer = fits.trainer(distribution, strategy=strategy, devices=2)
    assert trainer.accelerator is strategy.accelerator
    host = importlib.import_module(distribution)
    for accelerator in ("cpu", "auto"):
        choices = {"accelerator": accelerator, "strategy": strategy, "devices": 2}
        message = refusal(host.Trainer, **choices)
        assert "belongs to another Trainer. Create a strategy for each Trainer" in message


# Users' objects


def log_unequally(self: Any, parts: Batch, index: int) -> Any:
    self.log("all", float(self.global_rank), **PER_EPOCH, sync_dist=True)
    if self.global_rank == 0:
        self.log("rare", float(index), **PER_EPOCH)
        first = {"on_step": True, "on_epoch": True, "rank_zero_only": True, "sync_dist": True}
        self.log("first", float(index), **first)
        self.local.update(float(index))
        self.log("metric", self.local, **PER_EPOCH)
        if hasattr(self.trainer.strategy, "outer_state_dict"):
            self.log("reduced", 1.0, **PER_EPOCH, sync_dist=True)  # with DDP this waits for ever
    return self.loss(parts)


@in_ranks(2)
def test_a_value_that_one_rank_logs_and_nobody_reduces_stays_with_that_rank(
    rank: int, distribution: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {"all": 0.5}
    if rank == 0:
        expected |= {"rare": 1.5, "metric": 1.5}
        expected |= {"first": 1.5, "first_step": 3.0, "first_epoch": 1.5}
    for strategy in ("ddp", "streaming_diloco"):
        trainer = fits.trainer(distribution, strategy=strategy, devices=2, max_epochs=2)
        module = fits.module(distribution, training_step=log_unequally)
        module.local = MeanMetric(sync_on_compute=False)
        trainer.fit(module, fits.SomeBatches(rank, 4))
        assert trainer.callback_metrics == expected
    if rank == 0:
        warned = [text for text in caplog.messages if "Not every rank logged" in text]
        assert [text.partition(",")[0] for text in warned] == [
            "Not every rank logged training_step.reduced in epoch 0",
            "Not every rank logged training_step.reduced in epoch 1",
        ]


def measuring(distribution: str, rank: int) -> Any:
    """A module with a metric that is an argument, a hyperparameter, and in a list."""

    class Measuring(type(fits.module(distribution))):
        def __init__(self, metrics: MetricCollection) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.metrics = metrics
            self.hidden = [MeanMetric()]

        def training_step(self, parts: Batch, index: int) -> Any:
            self.metrics.update(float(rank))
            mean = self.metrics["mean"]
            new = MeanMetric()
            new.update(float(rank))
            self.hidden[0].update(float(rank))
            for metric in (
                mean.clone(),
                copy.deepcopy(self).metrics["mean"],
                self.metrics.clone()["mean"],
                pickle.loads(pickle.dumps(mean)),
                self.hidden[0],
                new,
            ):
                # In a batch every group computes its own value.
                assert float(metric.compute()) == float(rank)
            self.log_dict(self.metrics, **PER_EPOCH)
            return self.loss(parts)

    return Measuring(MetricCollection({"mean": MeanMetric(), "most": MaxMetric()}))


def attributes_of_metrics(module: Any) -> dict[str, set[str]]:
    metrics = module.metrics.items(copy_state=False)
    return {name: set(vars(metric)) for name, metric in metrics}


@in_ranks(2)
def test_a_metric_in_the_hyperparameters_is_saved_copied_and_computed_in_the_group(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    gather = vars(torchmetrics.metric)["gather_all_tensors"]
    module = measuring(distribution, rank)
    attributes = attributes_of_metrics(module)
    saving = callbacks_of(distribution).ModelCheckpoint(tmp_path, every_n_train_steps=2)
    strategy = fits.strategy(distribution, worker_groups=2, sync_every=2, overlap_steps=1)
    trainer = fits.trainer(
        distribution,
        strategy=strategy,
        devices=2,
        max_steps=3,
        enable_checkpointing=True,
        callbacks=[saving],
    )
    trainer.fit(module, batches(rank))
    assert vars(torchmetrics.metric)["gather_all_tensors"] is gather
    for name, names in attributes_of_metrics(module).items():
        assert names <= attributes[name]
    checkpoint = torch.load(saving.best_model_path, weights_only=False)
    mean = checkpoint["hyper_parameters"]["metrics"]["mean"]
    assert mean.dist_sync_fn is None
    assert mean.process_group is None
    assert trainer.callback_metrics["mean"] == 0.5


@in_ranks(2)
def test_callbacks_are_copied_and_pickled_within_a_fit_as_with_ddp(
    rank: int, tmp_path: Path
) -> None:
    timed = pl.callbacks.ModelCheckpoint(tmp_path, train_time_interval=timedelta(days=1))
    replaced = [timed, pl.callbacks.Timer(timedelta(days=1))]
    are_bound_to_copies: list[bool] = []

    def copy_all(*args: Any) -> None:
        for callback in replaced:
            for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
                assert "lightning_sdiloco" not in str(vars(copied))
                are_bound_to_copies.append(copied.on_train_batch_end.__self__ is copied)

    callbacks = [*replaced, on(on_train_batch_end=copy_all)]
    trainer = fits.trainer(
        strategy=fits.strategy(worker_groups=2),
        devices=2,
        max_steps=2,
        enable_checkpointing=True,
        callbacks=callbacks,
    )
    trainer.fit(BoringModel())
    assert are_bound_to_copies == [True] * 8
    assert [name for name in vars(timed) if name.startswith("on_")] == []


@in_ranks(4)
def test_synchronised_batch_norm_stays_in_the_group_and_is_copied_without_it(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses it on the CPU, so the test looks only at the process group with which it would
    be called.
    """
    process_groups: list[Any] = []

    def forward(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        process_groups.append(layer.process_group)
        return x

    def training_step(self: Any, parts: Batch, index: int) -> Any:
        for copied in (copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))):
            assert [layer.process_group for layer in copied[1:3]] == [None, None]
            copied(parts[0])
        return self.loss(parts)

    monkeypatch.setattr(nn.SyncBatchNorm, "forward", forward)
    monkeypatch.setattr(
        DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *args: None
    )
    # Lightning makes the second layer of norms synchronise, too.
    net = nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    strategy = fits.strategy(worker_groups=2)
    trainer = fits.trainer(strategy=strategy, devices=4, max_steps=1, sync_batchnorm=True)
    trainer.fit(fits.module(net=net, training_step=training_step), batches(rank // 2, rank % 2, 2))
    in_group = strategy.topology.in_group.process_group
    assert [group is in_group for group in process_groups] == [True] * 6
    assert nn.SyncBatchNorm.forward is forward
