"""Validation, testing and prediction: which model they see, that they leave it alone, and that all ranks agree."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests import fits
from tests.fits import LIGHTNING, SomeBatches
from tests.lightning.test_checkpoint import assert_same, saving, traced, unequal
from tests.ranks import agreed, in_ranks

SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:1"}


def net_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: values.clone() for name, values in model.state_dict().items() if name.startswith("net.")}


def evaluated(distribution: str = LIGHTNING, seed: int = 0) -> Any:
    """A traced module that keeps what it holds in each step of an evaluation, and logs in three ways."""
    base = type(traced(distribution, seed))

    class Evaluated(base):  # type: ignore[misc, valid-type]
        def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
            self.seen.append(net_of(self))
            self.metric.update(float(self.global_rank))
            self.log("loss", self.loss(parts), sync_dist=True)
            self.log("rank", float(self.global_rank), sync_dist=True)
            self.log("metric", self.metric)

        test_step = validation_step

        def predict_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.seen.append(net_of(self))
            return torch.as_tensor(self.net(parts[0]))

    model = Evaluated()
    model.metric, model.seen, model.trace = MeanMetric(), [], {}
    return model


@in_ranks(4, timeout=110.0)
def test_validation_in_a_fit_leaves_all_as_it_was_agrees_on_all_ranks_and_with_the_last_checkpoint(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    """Local parameters, statistics of BatchNorm and inner optimizer state, before every step; so does an average."""
    callbacks = importlib.import_module(distribution).callbacks
    loader, average = SomeBatches(rank, 2), callbacks.EMAWeightAveraging(decay=0.6)

    class Reader(callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            in_flight.append(len(trainer.strategy.engine.in_flight) if trainer.strategy.engine else 0)
            averaged = average in trainer.callbacks and trainer.state.fn == "fit" and not trainer.sanity_checking
            averages.extend([net_of(average._average_model.module)] if averaged else [])

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            numbers.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def trainer(**choices: Any) -> Any:
        strategy = fits.strategy(distribution, worker_groups=2, **SHORT)
        return fits.trainer(distribution, strategy=strategy, devices=4, **choices)

    def fit(**choices: Any) -> tuple[Any, Any]:
        model, fitted = evaluated(distribution, seed=rank), trainer(max_steps=14, **choices)
        torch.manual_seed(rank)
        fitted.fit(model, SomeBatches(rank, 20), loader)
        return fitted, model

    plain = fit(limit_val_batches=0)[1].trace
    assert any(name.startswith("outer ") for name in plain[13])
    for more in ([], [average]):
        in_flight, numbers, averages = list[int](), list[dict[str, float]](), list[dict[str, Tensor]]()
        folder = tmp_path / str(len(more))
        save = saving(distribution, folder, every_n_train_steps=7, save_last=True)
        fitted, model = fit(val_check_interval=1, callbacks=[Reader(), *save, *more], enable_checkpointing=True)
        assert {at: wrong for at, its in plain.items() if (wrong := unequal(model.trace[at], its))} == {}
        assert max(in_flight) > 1
        assert len(model.seen) == 30
        assert all(map(agreed, model.seen))
        assert [unequal(*both) for both in zip(averages, model.seen[2::2], strict=False)] == [[]] * 14 * len(more)
        # In the fit after the last step, after the fit, and from its last checkpoint, elsewhere too.
        last = str(folder / "last.ckpt")
        elsewhere = trainer(), evaluated(distribution, seed=7), last
        for one, its, path in ((fitted, model, None), (fitted, model, last), elsewhere):
            numbers += one.validate(its, loader, ckpt_path=path, verbose=False)
        assert len({told["loss"] for told in numbers[14:]}) == 1
        assert all(told["rank"] == told["metric"] == 1.5 for told in numbers)
        assert agreed(numbers)


@in_ranks(2)
def test_with_evaluate_local_validation_sees_the_model_of_the_group_and_checkpoints_hold_the_outer_one(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"evaluate='inner' is not known: .*Choose one of them"):
        fits.strategy(distribution, evaluate="inner")
    local: list[dict[str, Tensor]] = []
    outer: list[dict[str, Tensor]] = []

    class Reader(importlib.import_module(distribution).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            local.append(net_of(module))
            outer.append(trainer.strategy.outer_state_dict())

    (save,) = saving(distribution, tmp_path, monitor="loss")
    model = evaluated(distribution, seed=rank)
    often = {"val_check_interval": 3, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    strategy = fits.strategy(distribution, evaluate="local", **{**SHORT, "fragments": [["*"]]})
    trainer = fits.trainer(
        distribution, strategy=strategy, devices=2, max_steps=12, callbacks=[Reader(), save], **often
    )
    trainer.fit(model, SomeBatches(rank, 20), SomeBatches(rank, 1))
    assert [unequal(seen, local[step]) for seen, step in zip(model.seen, (2, 5, 8, 11), strict=True)] == [[]] * 4
    assert [agreed(seen) for seen in model.seen] == [False, False, False, True]
    assert agreed(save.best_model_path)
    saved = [torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"] for step in (3, 6, 9)]
    # The first landing follows inner step 7; until then files hold the mean of the groups.
    for values, mine in zip(saved[:2], model.seen, strict=False):
        for name in outer[8]:
            mean = mine[name].clone()
            torch.distributed.all_reduce(mean)
            torch.testing.assert_close(values[name], mean / 2)
    assert_same({name: saved[2][name] for name in outer[8]}, outer[8])


@in_ranks(2)
def test_evaluating_before_between_and_after_fits_overwrites_nothing_and_every_rank_writes_its_predictions(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    written: dict[str, list[Tensor]] = {"batches": [], "epoch": []}

    class Writer(importlib.import_module(distribution).callbacks.BasePredictionWriter):  # type: ignore[misc]
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
            written["batches"].append(prediction)

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            written["epoch"] = predictions

    model, loader = evaluated(distribution), SomeBatches(rank, 2)
    strategy = fits.strategy(distribution, **SHORT)
    quiet = {"num_sanity_val_steps": 0, "limit_val_batches": 0, "callbacks": [Writer("batch_and_epoch")]}
    trainer = fits.trainer(distribution, strategy=strategy, devices=2, max_steps=6, **quiet)
    losses = []
    for steps in (0, 6, 13):
        if steps:
            trainer.fit_loop.epoch_loop.max_steps = steps
            trainer.fit(model, SomeBatches(rank, 20))
        before = net_of(model)
        model.seen.clear()
        written["batches"].clear()
        trainer.limit_val_batches = 1.0
        told = [evaluate(model, loader, verbose=False)[0]["loss"] for evaluate in (trainer.validate, trainer.test)]
        assert told[0] == told[1]
        assert len(trainer.predict(model, loader)) == 2
        trainer.limit_val_batches = 0
        assert [unequal(before, seen) for seen in (*model.seen, net_of(model))] == [[]] * 7
        losses.append(told[0])
    # Lightning evaluates in inference mode, whose tensors could not be trained again.
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    assert strategy.report()["inner_steps"] == 7
    assert losses == sorted(losses, reverse=True)
    assert agreed(losses)
    outer = strategy.outer_state_dict()
    assert_same({name: net_of(model)[name] for name in outer}, outer)
    assert agreed(outer)
    model.eval()
    with torch.no_grad():
        for predictions in written.values():
            assert [torch.equal(model.net(parts[0]), its) for parts, its in zip(loader, predictions, strict=True)] == [
                True
            ] * 2
