"""Projects that were written for DDP do with a strategy of ours what they do with ``"ddp"``."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_sdiloco.lightning.host.ddp import SingleRankDDP
from tests import fits
from tests.fits import LIGHTNING
from tests.ranks import run_processes
from tests.training import mlp

# A model that knows no trainer


def test_a_model_without_a_trainer_is_connected_saved_and_trained(distribution: str, tmp_path: Path) -> None:
    """As darts does it, which writes a checkpoint of a model that it has just made or read."""

    def run(rank: int, world_size: int, strategy: str) -> Any:
        path = tmp_path / f"{strategy}.ckpt"
        trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, max_steps=3)
        made = fits.module(distribution, seed=rank)
        trainer.strategy.connect(made)
        trainer.save_checkpoint(path, weights_only=True)
        sampled = trainer.distributed_sampler_kwargs
        trainer.fit(made, DataLoader(fits.Batches(rank, 0, 1), batch_size=None))
        trainer.strategy.connect(fits.module(distribution))
        return sampled, trainer.global_step, made.net[0].bias.detach()

    saved = {}
    for strategy in ("ddp", "streaming_diloco"):
        one, other = run_processes(run, 2, strategy)
        assert (one[0], other[0]) == ({"num_replicas": 2, "rank": 0}, {"num_replicas": 2, "rank": 1})
        assert one[1] == other[1] == 3
        assert torch.equal(one[2], other[2])
        saved[strategy] = torch.load(tmp_path / f"{strategy}.ckpt", weights_only=False)
    assert saved["ddp"].keys() == saved["streaming_diloco"].keys()
    for name, values in saved["ddp"]["state_dict"].items():
        assert torch.equal(saved["streaming_diloco"]["state_dict"][name], values)


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


@pytest.mark.parametrize("kwargs", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_the_wrapper_of_a_single_rank_has_no_buckets_and_all_that_one_may_ask_of_it(kwargs: dict[str, Any]) -> None:
    def run(rank: int, world_size: int) -> None:
        dist.init_process_group("gloo")
        batch, seen = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), []
        gradients = []
        for wrapper in (SingleRankDDP, DistributedDataParallel):
            net = mlp()
            model = wrapper(net, **kwargs)
            assert model.module is net
            assert model.static_graph == bool(kwargs.get("static_graph"))
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
        buckets = []

        def hook(state: str, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            buckets.append((state, bucket.buffer().numel()))
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

        single.eval().register_comm_hook("told", hook)
        assert not single.training
        single(batch).sum().backward()
        assert buckets == [("told", sum(parameter.numel() for parameter in single.parameters()))]

    run_processes(run, 1)


# Metrics that not every rank logs


def logging_rarely(distribution: str) -> Any:
    """A module of which rank 0 logs more than the others."""
    base = type(fits.module(distribution))

    class Rare(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.local = MeanMetric(sync_on_compute=False)

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.log("all", float(self.global_rank), on_step=False, on_epoch=True, sync_dist=True)
            if self.global_rank == 0:
                self.log("rare", float(index), on_step=False, on_epoch=True)
                self.log("told", float(index), on_step=True, on_epoch=True, rank_zero_only=True, sync_dist=True)
                self.local.update(float(index))
                self.log("metric", self.local, on_step=False, on_epoch=True)
                if hasattr(self.trainer.strategy, "outer_state_dict"):
                    # With DDP this waits for ever.
                    self.log("reduced", 1.0, on_step=False, on_epoch=True, sync_dist=True)
            return super().training_step(parts, index)

    return Rare()


def test_what_one_rank_logs_and_nobody_reduces_stays_with_that_rank(
    distribution: str, caplog: pytest.LogCaptureFixture
) -> None:
    def run(rank: int, world_size: int, strategy: str) -> Any:
        trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, max_epochs=2)
        trainer.fit(logging_rarely(distribution), fits.SomeBatches(rank, 4))
        warned = [record.getMessage() for record in caplog.records if "Not every rank logged" in record.getMessage()]
        return {name: float(value) for name, value in trainer.callback_metrics.items()}, warned

    ours, expected = run_processes(run, 2, "streaming_diloco"), run_processes(run, 2, "ddp")
    assert [metrics for metrics, _ in ours] == [metrics for metrics, _ in expected]
    assert ours[0][0] == {"all": 0.5, "rare": 1.5, "metric": 1.5, "told": 1.5, "told_step": 3.0, "told_epoch": 1.5}
    assert [text.partition(",")[0] for text in ours[0][1]] == [
        f"Not every rank logged training_step.reduced in epoch {epoch}" for epoch in (0, 1)
    ]


# Names

DDP_NAMES = sorted(
    name
    for name, data in importlib.import_module(f"{LIGHTNING}.strategies").StrategyRegistry.items()
    if getattr(data["strategy"], "__name__", "") == "DDPStrategy"
)


def test_every_name_of_ddp_has_its_counterparts(distribution: str) -> None:
    assert len(DDP_NAMES) >= 12
    for name in DDP_NAMES:
        expected = fits.trainer(distribution, strategy=name, devices=2).strategy
        for ours in (name.replace("ddp", "streaming_diloco", 1), f"streaming_diloco_{name}"):
            strategy = fits.trainer(distribution, strategy=ours, devices=2).strategy
            assert type(strategy) is type(fits.strategy(distribution))
            assert strategy.strategy_name == "streaming_diloco"
            assert strategy._ddp_kwargs == expected._ddp_kwargs
            assert strategy._start_method == expected._start_method
            assert isinstance(strategy.launcher, type(expected.launcher))
            assert strategy.launcher.is_interactive_compatible == expected.launcher.is_interactive_compatible


def partly_unused(distribution: str) -> Any:
    """A module with a parameter that its loss does not use."""
    module = fits.module(distribution)
    module.unused = torch.nn.Parameter(torch.zeros(3))
    return module


def test_parameters_that_are_not_used_are_told_with_the_name_that_takes_them(distribution: str) -> None:
    def run(rank: int, world_size: int, strategy: Any) -> Any:
        trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, max_steps=3)
        try:
            trainer.fit(partly_unused(distribution), DataLoader(fits.Batches(rank, 0, 1), batch_size=None))
        except RuntimeError as error:
            return str(error)
        return trainer.global_step

    # A group of one rank has nothing to average, and needs no gradient of every parameter.
    assert run_processes(run, 1, "streaming_diloco") == [3]
    message, _ = run_processes(run, 2, fits.strategy(distribution, worker_groups=1))
    name = "streaming_diloco_find_unused_parameters_true"
    assert f"strategy='{name}'" in message
    assert "'ddp_" not in message
    assert "DDPStrategy" not in message
    assert run_processes(run, 1, name) == [3]


# What Lightning refuses by itself

QUICKSTART = Path(__file__).parents[2] / "docs" / "quickstart.md"


def test_the_quickstart_explains_what_lightning_says(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = importlib.import_module(distribution)
    used = fits.strategy(distribution)
    fits.trainer(distribution, strategy=used, devices=2)
    # Not `delitem`: what it puts back is what the registry's `get` returns, which is an object and no entry.
    registry = importlib.import_module(f"{distribution}.strategies").StrategyRegistry
    monkeypatch.setattr(registry, "available_strategies", list)
    quickstart = QUICKSTART.read_text()
    for choices, end in (
        ({"strategy": "streaming_diloco"}, "."),
        ({"strategy": used}, ","),
        ({"strategy": used, "accelerator": "auto"}, ","),
    ):
        with pytest.raises(Exception, match="set through|invalid strategy name") as refused:
            host.Trainer(**{"accelerator": "cpu", "devices": 2, **choices})
        assert str(refused.value).partition(end)[0] in quickstart
