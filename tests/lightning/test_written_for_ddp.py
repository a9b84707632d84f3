"""Projects that were written for DDP do with a strategy of ours what they do with ``"ddp"``.

What a fit replaces in users' objects is seen neither by pickle nor by deepcopy, and is gone after the fit.
"""

import copy
import importlib
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection

from lightning_sdiloco.lightning.model_format import SingleRankDDP
from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.uneven_fits import same
from tests.ranks import run_processes
from tests.training import mlp


def batches(group: int, shard: int = 0, shards: int = 1) -> Any:
    return DataLoader(fits.Batches(group, shard, shards), batch_size=None)


# A model that knows no trainer


def test_a_model_without_a_trainer_is_connected_saved_and_trained(distribution: str, tmp_path: Path) -> None:
    """As darts does it, which writes a checkpoint of a model that it has just made or read."""

    def run(rank: int, world_size: int) -> Any:
        found = []
        for strategy in ("ddp", "streaming_diloco"):
            trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, max_steps=3)
            made = fits.module(distribution, seed=rank)
            trainer.strategy.connect(made)
            trainer.save_checkpoint(tmp_path / f"{strategy}.ckpt", weights_only=True)
            sampled = trainer.distributed_sampler_kwargs
            trainer.fit(made, batches(rank))
            trainer.strategy.connect(fits.module(distribution))
            found.append((sampled, trainer.global_step, made.net[0].bias.tolist()))
        return found

    for rank, found in enumerate(ranks := run_processes(run, 2)):
        assert [told[:2] for told in found] == [({"num_replicas": 2, "rank": rank}, 3)] * 2
        assert [told[2] for told in found] == [told[2] for told in ranks[0]]
    ddp, ours = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("ddp", "streaming_diloco"))
    assert ddp.keys() == ours.keys()
    assert same(ddp["state_dict"], ours["state_dict"])


def test_a_trainer_that_is_given_after_connecting_is_in_time_for_the_setup(distribution: str) -> None:
    """As Lightning's own tests set a strategy up by hand."""

    def run(rank: int, world_size: int) -> Any:
        functions = importlib.import_module(f"{distribution}.trainer.states").TrainerFn
        wrapped = []
        for function in (functions.FITTING, functions.VALIDATING, functions.FITTING):
            strategy = fits.strategy(distribution, process_group_backend="cpu:gloo")
            trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, max_steps=1)
            trainer.state.fn = function
            strategy.connect(fits.module(distribution))
            trainer.lightning_module.trainer = trainer
            strategy.setup_environment()
            strategy.setup(trainer)
            assert str(dist.get_backend_config()) == "cpu:gloo"
            wrapped.append(isinstance(trainer.model, DistributedDataParallel))
            attached = [type(callback).__name__ for callback in trainer.callbacks]
            assert attached.count("StreamingDiLoCoCallback") == wrapped[-1]
        return wrapped

    assert run_processes(run, 1) == [[True, False, True]]


def test_the_wrapper_of_a_single_rank_has_no_buckets_and_all_that_one_may_ask_of_it() -> None:
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))

    def play(**kwargs: Any) -> None:
        seen, gradients, buckets = [], [], []
        for wrapper in (SingleRankDDP, DistributedDataParallel):
            net = mlp()
            model = wrapper(net, **kwargs)
            assert (model.module, model.static_graph) == (net, bool(kwargs.get("static_graph")))
            assert list(model.state_dict()) == [f"module.{name}" for name in net.state_dict()]
            model.register_forward_hook(lambda wrapped, *_: seen.append(type(wrapped)))
            for _ in range(3):
                with model.no_sync():
                    assert not model.require_backward_grad_sync
                    # torch itself cannot begin with it where the graph is static.
                    if not model.static_graph:
                        model(batch[:4]).square().sum().backward()
                model(batch[4:]).square().sum().backward()
            gradients.append([parameter.grad for parameter in net.parameters()])
            assert isinstance(model._get_ddp_logging_data(), dict)
        assert all(map(torch.equal, *gradients))
        assert seen.count(SingleRankDDP) == seen.count(DistributedDataParallel) >= 3

        single = SingleRankDDP(mlp(), **kwargs)
        with single.join():
            single(batch).sum().backward()
        # Lightning does so in manual optimization.
        single.reducer._rebuild_buckets()
        single.reducer.prepare_for_backward([])

        def hook(state: str, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            buckets.append((state, bucket.buffer().numel()))
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

        single.eval().register_comm_hook("told", hook)
        assert not single.training
        single(batch).sum().backward()
        assert buckets == [("told", sum(parameter.numel() for parameter in single.parameters()))]

    def run(rank: int, world_size: int) -> None:
        dist.init_process_group("gloo")
        for kwargs in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            play(**kwargs)

    run_processes(run, 1)


def test_what_one_rank_logs_and_nobody_reduces_stays_with_that_rank(
    distribution: str, caplog: pytest.LogCaptureFixture
) -> None:
    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
        each = {"on_step": False, "on_epoch": True}
        self.log("all", float(self.global_rank), **each, sync_dist=True)
        if self.global_rank == 0:
            self.log("rare", float(index), **each)
            self.log("told", float(index), on_step=True, on_epoch=True, rank_zero_only=True, sync_dist=True)
            self.local.update(float(index))
            self.log("metric", self.local, **each)
            if hasattr(self.trainer.strategy, "outer_state_dict"):
                self.log("reduced", 1.0, **each, sync_dist=True)  # with DDP this waits for ever
        return self.loss(parts)

    def run(rank: int, world_size: int) -> Any:
        found = []
        for strategy in ("ddp", "streaming_diloco"):
            trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, max_epochs=2)
            model = fits.module(distribution, training_step=training_step)
            model.local = MeanMetric(sync_on_compute=False)
            trainer.fit(model, fits.SomeBatches(rank, 4))
            found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        said = [record.getMessage() for record in caplog.records if "Not every rank logged" in record.getMessage()]
        return found, [text.partition(",")[0] for text in said]

    ((ddp, ours), said), ((other_ddp, other), _) = run_processes(run, 2)
    assert (ours, other) == (ddp, other_ddp)
    assert ours == {"all": 0.5, "rare": 1.5, "metric": 1.5, "told": 1.5, "told_step": 3.0, "told_epoch": 1.5}
    assert said == [f"Not every rank logged training_step.reduced in epoch {epoch}" for epoch in (0, 1)]


# Names, and what Lightning refuses by itself


def test_every_name_of_ddp_has_its_counterparts(distribution: str) -> None:
    registry = importlib.import_module(f"{LIGHTNING}.strategies").StrategyRegistry
    names = [name for name, data in registry.items() if getattr(data["strategy"], "__name__", "") == "DDPStrategy"]
    assert len(names) >= 12
    for name in names:
        expected = fits.trainer(distribution, strategy=name, devices=2).strategy
        for ours in (name.replace("ddp", "streaming_diloco", 1), f"streaming_diloco_{name}"):
            strategy = fits.trainer(distribution, strategy=ours, devices=2).strategy
            assert type(strategy) is type(fits.strategy(distribution))
            assert strategy.strategy_name == "streaming_diloco"
            assert isinstance(strategy.launcher, type(expected.launcher))
            same_in_both = [
                (one._ddp_kwargs, one._start_method, one.launcher.is_interactive_compatible)
                for one in (strategy, expected)
            ]
            assert same_in_both[0] == same_in_both[1]


def test_parameters_that_are_not_used_are_told_with_the_name_that_takes_them(distribution: str) -> None:
    name = "streaming_diloco_find_unused_parameters_true"

    def run(rank: int, world_size: int) -> Any:
        found = []
        # A group of one rank has nothing to average, and needs no gradient of every parameter.
        for strategy in (
            ("streaming_diloco", name) if world_size == 1 else (fits.strategy(distribution, worker_groups=1),)
        ):
            trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, max_steps=3)
            model = fits.module(distribution)
            model.unused = nn.Parameter(torch.zeros(3))
            try:
                trainer.fit(model, batches(rank))
                found.append(trainer.global_step)
            except RuntimeError as error:
                found.append(str(error))
        return found

    assert run_processes(run, 1) == [[3, 3]]
    (message,), _ = run_processes(run, 2)
    assert f"strategy='{name}'" in message
    assert not any(other in message for other in ("'ddp_", "DDPStrategy"))


def test_the_quickstart_explains_what_lightning_says(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host, used = importlib.import_module(distribution), fits.strategy(distribution)
    fits.trainer(distribution, strategy=used, devices=2)
    # Not `delitem`: what it puts back is what the registry's `get` returns, which is an object and no entry.
    registry = importlib.import_module(f"{distribution}.strategies").StrategyRegistry
    monkeypatch.setattr(registry, "available_strategies", list)
    quickstart = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
    for choices, end in (
        ({"strategy": "streaming_diloco"}, "."),
        ({"strategy": used}, ","),
        ({"strategy": used, "accelerator": "auto"}, ","),
    ):
        with pytest.raises(Exception, match="set through|invalid strategy name") as refused:
            host.Trainer(**{"accelerator": "cpu", "devices": 2, **choices})
        assert str(refused.value).partition(end)[0] in quickstart


# Users' objects


def test_a_metric_among_the_hyperparameters_is_saved_copied_and_computed_in_the_group(
    distribution: str, tmp_path: Path
) -> None:
    """It is an argument of the module, a hyperparameter, and in a list."""

    class Measuring(type(fits.module(distribution))):  # type: ignore[misc]
        def __init__(self, metrics: MetricCollection) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.metrics, self.hidden, self.seen = metrics, [MeanMetric()], []

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Any:
            rank = float(self.global_rank)
            self.metrics.update(rank)
            copies = [self.metrics["mean"].clone(), copy.deepcopy(self).metrics["mean"]]
            copies += [self.metrics.clone()["mean"], pickle.loads(pickle.dumps(self.metrics["mean"]))]
            copies += [*self.hidden, MeanMetric()]
            for metric in copies[-2:]:
                metric.update(rank)
            self.seen = [float(metric.compute()) for metric in copies]
            self.log_dict(self.metrics, on_step=False, on_epoch=True)
            return self.loss(parts)

    def run(rank: int, world_size: int) -> Any:
        def held() -> dict[str, set[str]]:
            return {name: set(vars(metric)) for name, metric in model.metrics.items(copy_state=False)}

        gather = vars(torchmetrics.metric)["gather_all_tensors"]
        model = Measuring(MetricCollection({"mean": MeanMetric(), "most": torchmetrics.MaxMetric()}))
        before = held()
        saving = importlib.import_module(distribution).callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
        strategy = fits.strategy(distribution, worker_groups=2, sync_every=2, overlap_steps=1)
        more = {"devices": 2, "max_steps": 3, "enable_checkpointing": True, "callbacks": [saving]}
        trainer = fits.trainer(distribution, strategy=strategy, **more)
        trainer.fit(model, batches(rank))
        assert vars(torchmetrics.metric)["gather_all_tensors"] is gather
        assert all(names <= before[name] for name, names in held().items())
        saved = torch.load(saving.best_model_path, weights_only=False)["hyper_parameters"]["metrics"]["mean"]
        return model.seen, (saved.dist_sync_fn, saved.process_group), float(trainer.callback_metrics["mean"])

    for rank, (seen, saved, logged) in enumerate(run_processes(run, 2)):
        assert seen == [float(rank)] * 6, "every group computes in a batch what is its own"
        assert (saved, logged) == ((None, None), 0.5)


def test_callbacks_are_copied_and_pickled_within_a_fit_as_with_ddp(tmp_path: Path) -> None:
    host = importlib.import_module(LIGHTNING)

    class Copying(host.Callback):  # type: ignore[misc, name-defined]
        copied = 0

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            for callback in trainer.callbacks:
                if type(callback).__name__ in ("ModelCheckpoint", "Timer"):
                    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
                        assert "lightning_sdiloco" not in str(vars(copied))
                        assert copied.on_train_batch_end.__self__ is copied
                        self.copied += 1

    def run(rank: int, world_size: int) -> Any:
        saving = host.callbacks.ModelCheckpoint(tmp_path, train_time_interval=timedelta(days=1))
        callbacks = [saving, host.callbacks.Timer(timedelta(days=1)), Copying()]
        more = {"devices": 2, "max_steps": 2, "enable_checkpointing": True, "callbacks": callbacks}
        fits.trainer(strategy=fits.strategy(worker_groups=2), **more).fit(BoringModel())
        return callbacks[-1].copied, [name for name in vars(saving) if name.startswith("on_")]

    assert run_processes(run, 2) == [(2 * 2 * 2, [])] * 2


def test_synchronised_batch_norm_stays_in_the_group_and_is_copied_and_pickled_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch refuses it on the CPU, so the test looks only at the process group with which it would be called."""
    groups: list[Any] = []

    def forward(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        groups.append(layer.process_group)
        return x

    monkeypatch.setattr(nn.SyncBatchNorm, "forward", forward)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *args: None)

    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
        for copied in (copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))):
            assert [layer.process_group for layer in copied[1:3]] == [None, None]
            copied(parts[0])
        return self.loss(parts)

    def run(rank: int, world_size: int) -> Any:
        # Lightning makes the second one synchronise too.
        net = nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        strategy = fits.strategy(worker_groups=2)
        trainer = fits.trainer(strategy=strategy, devices=world_size, max_steps=1, sync_batchnorm=True)
        trainer.fit(fits.module(net=net, training_step=training_step), batches(rank // 2, rank % 2, 2))
        inside = [group is strategy.topology.in_group.process_group for group in groups]
        return inside, nn.SyncBatchNorm.forward is forward

    assert run_processes(run, 4) == [([True] * 6, True)] * 4
