"""Validation, testing and prediction: which model they see, that they leave it alone, and that all ranks agree."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests import fits
from tests.fits import LIGHTNING, SomeBatches, play
from tests.lightning.test_checkpoint import assert_same, saving, traced, unequal
from tests.ranks import run_processes

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


def test_validation_in_a_fit_leaves_all_as_it_was_agrees_on_all_ranks_and_with_the_last_checkpoint(
    distribution: str, tmp_path: Path
) -> None:
    """Local parameters, statistics of BatchNorm and inner optimizer state, before every step; so does an average."""
    callbacks = importlib.import_module(distribution).callbacks

    def run(rank: int, world_size: int, folder: Path, averages: bool = False) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"in flight": [], "numbers": [], "averages": []}
        average = callbacks.EMAWeightAveraging(decay=0.6)

        class Reader(callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_validation_start(self, trainer: Any, module: Any) -> None:
                found["in flight"].append(len(trainer.strategy.engine.in_flight) if trainer.strategy.engine else 0)
                if averages and trainer.state.fn == "fit" and not trainer.sanity_checking:
                    found["averages"].append(net_of(average._average_model.module))

            def on_validation_end(self, trainer: Any, module: Any) -> None:
                found["numbers"].append({name: float(value) for name, value in trainer.callback_metrics.items()})

        def trainer(**choices: Any) -> Any:
            strategy = fits.strategy(distribution, worker_groups=2, **SHORT)
            return fits.trainer(distribution, strategy=strategy, devices=world_size, **choices)

        model, loader, last = evaluated(distribution, seed=rank), SomeBatches(rank, 2), str(folder / "last.ckpt")
        chosen: dict[str, Any] = {"limit_val_batches": 0}
        if folder.name != "plain":
            watching = [Reader(), *saving(distribution, folder, every_n_train_steps=7, save_last=True)]
            watching += [average] if averages else []
            chosen = {"val_check_interval": 1, "callbacks": watching, "enable_checkpointing": True}
        fitted = trainer(max_steps=14, **chosen)
        torch.manual_seed(rank)
        fitted.fit(model, SomeBatches(rank, 20), loader)
        seen = list(model.seen)
        if folder.name != "plain":
            elsewhere = trainer(), evaluated(distribution, seed=7), last
            for one, its, path in ((fitted, model, None), (fitted, model, last), elsewhere):
                found["numbers"] += one.validate(its, loader, ckpt_path=path, verbose=False)
        return {**found, "trace": model.trace, "seen": seen}

    cases = {
        "plain": partial(run, folder=tmp_path / "plain"),
        "validated": partial(run, folder=tmp_path / "validated"),
        "averaged": partial(run, folder=tmp_path / "averaged", averages=True),
    }
    ranks = play(4, cases)
    for name in ("validated", "averaged"):
        first = ranks[name][0]
        for one, plain in zip(ranks[name], ranks["plain"], strict=True):
            assert any(name.startswith("outer ") for name in plain["trace"][13])
            assert {at: wrong for at, its in plain["trace"].items() if (wrong := unequal(one["trace"][at], its))} == {}
            assert max(one["in flight"]) > 1
            assert [unequal(seen, other) for seen, other in zip(one["seen"], first["seen"], strict=True)] == [[]] * 30
            assert [unequal(*both) for both in zip(one["averages"], one["seen"][2::2], strict=False)] == [[]] * (
                14 if name == "averaged" else 0
            )
            assert one["numbers"] == first["numbers"]
            assert all(numbers["rank"] == numbers["metric"] == 1.5 for numbers in one["numbers"])
            # In the fit after the last step, after the fit, and from its last checkpoint, elsewhere too.
            assert len({numbers["loss"] for numbers in one["numbers"][14:]}) == 1
    assert unequal(first["averages"][-1], ranks["validated"][0]["seen"][-1]) != []


def test_with_evaluate_local_validation_sees_the_model_of_the_group_and_checkpoints_hold_the_outer_one(
    distribution: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"evaluate='inner' is not known: .*Choose one of them"):
        fits.strategy(distribution, evaluate="inner")

    def run(rank: int, world_size: int) -> Any:
        local: list[dict[str, Tensor]] = []
        outer: list[dict[str, Tensor]] = []

        class Reader(importlib.import_module(distribution).Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                local.append(net_of(module))
                outer.append(trainer.strategy.outer_state_dict())

        (save,) = saving(distribution, tmp_path, monitor="loss")
        model, one_fragment = evaluated(distribution, seed=rank), {**SHORT, "fragments": [["*"]]}
        often = {"val_check_interval": 3, "num_sanity_val_steps": 0, "enable_checkpointing": True}
        strategy = fits.strategy(distribution, evaluate="local", **one_fragment)
        trainer = fits.trainer(
            distribution, strategy=strategy, devices=2, max_steps=12, callbacks=[Reader(), save], **often
        )
        trainer.fit(model, SomeBatches(rank, 20), SomeBatches(rank, 1))
        assert [unequal(seen, local[step]) for seen, step in zip(model.seen, (2, 5, 8, 11), strict=True)] == [[]] * 4
        return model.seen, outer[8], save.best_model_path

    (seen, outer, best), (other_seen, _, other_best) = run_processes(run, 2)
    assert best == other_best
    assert [unequal(*both) == [] for both in zip(seen, other_seen, strict=True)] == [False, False, False, True]
    saved = [torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"] for step in (3, 6, 9)]
    # The first landing follows inner step 7; until then files hold the mean of the groups.
    for values, mine, theirs in zip(saved[:2], seen, other_seen, strict=False):
        for name in outer:
            torch.testing.assert_close(values[name], (mine[name] + theirs[name]) / 2)
    assert_same({name: saved[2][name] for name in outer}, outer)


def test_evaluating_before_between_and_after_fits_overwrites_nothing_and_every_rank_writes_its_predictions(
    distribution: str, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> Any:
        class Writer(importlib.import_module(distribution).callbacks.BasePredictionWriter):  # type: ignore[misc]
            def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
                torch.save([prediction], tmp_path / f"{rank}-{args[-2]}.pt")

            def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
                torch.save(predictions, tmp_path / f"{rank}-all.pt")

        model, loader = evaluated(distribution), SomeBatches(rank, 2)
        strategy = fits.strategy(distribution, **SHORT)
        quiet = {"num_sanity_val_steps": 0, "limit_val_batches": 0, "callbacks": [Writer("batch_and_epoch")]}
        trainer = fits.trainer(distribution, strategy=strategy, devices=2, max_steps=6, **quiet)
        results = []
        for steps in (0, 6, 13):
            if steps:
                trainer.fit_loop.epoch_loop.max_steps = steps
                trainer.fit(model, SomeBatches(rank, 20))
            before = net_of(model)
            model.seen.clear()
            trainer.limit_val_batches = 1.0
            told = [evaluate(model, loader, verbose=False)[0]["loss"] for evaluate in (trainer.validate, trainer.test)]
            assert told[0] == told[1]
            assert len(trainer.predict(model, loader)) == 2
            trainer.limit_val_batches = 0
            assert [unequal(before, seen) for seen in (*model.seen, net_of(model))] == [[]] * 7
            results.append(told[0])
        # Lightning evaluates in inference mode, whose tensors could not be trained again.
        assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
        assert strategy.report()["inner_steps"] == 7
        outer = strategy.outer_state_dict()
        assert_same({name: net_of(model)[name] for name in outer}, outer)
        model.eval()
        with torch.no_grad():
            return results, outer, [model.net(parts[0]) for parts in loader]

    ranks = run_processes(run, 2)
    for rank, (results, outer, expected) in enumerate(ranks):
        assert results == ranks[0][0] == sorted(results, reverse=True)
        assert_same(outer, ranks[0][1])
        for names in ([f"{rank}-all.pt"], [f"{rank}-{index}.pt" for index in range(2)]):
            written = sum((torch.load(tmp_path / name) for name in names), [])
            assert [torch.equal(*both) for both in zip(written, expected, strict=True)] == [True, True]
