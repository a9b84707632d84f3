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
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()
            self.seen: list[dict[str, Tensor]] = []
            self.trace: dict[int, Any] = {}

        def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.seen.append(net_of(self))
            loss = nn.functional.mse_loss(self.net(parts[0]), parts[1])
            self.metric.update(float(self.global_rank))
            self.log("loss", loss, sync_dist=True)
            self.log("rank", float(self.global_rank), sync_dist=True)
            self.log("metric", self.metric)
            return loss

        test_step = validation_step

        def predict_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.seen.append(net_of(self))
            return torch.as_tensor(self.net(parts[0]))

    return Evaluated()


def test_validation_in_a_fit_leaves_all_as_it_was_agrees_on_all_ranks_and_with_the_last_checkpoint(
    distribution: str, tmp_path: Path
) -> None:
    """Local parameters, statistics of BatchNorm and inner optimizer state, before every step."""
    last = str(tmp_path / "last.ckpt")

    def run(rank: int, world_size: int, validates: bool) -> dict[str, Any]:
        in_flight: list[int] = []
        numbers: list[dict[str, float]] = []

        class Reader(importlib.import_module(distribution).Callback):  # type: ignore[misc]
            def on_validation_start(self, trainer: Any, module: Any) -> None:
                in_flight.append(len(trainer.strategy.engine.in_flight) if trainer.strategy.engine else 0)

            def on_validation_end(self, trainer: Any, module: Any) -> None:
                numbers.append({name: float(value) for name, value in trainer.callback_metrics.items()})

        def trainer(**choices: Any) -> Any:
            strategy = fits.strategy(distribution, worker_groups=2, **SHORT)
            return fits.trainer(distribution, strategy=strategy, devices=world_size, **choices)

        model, loader = evaluated(distribution, seed=rank), SomeBatches(rank, 2)
        chosen: dict[str, Any] = {"limit_val_batches": 0}
        if validates:
            save = saving(distribution, tmp_path, every_n_train_steps=7, save_last=True)
            chosen = {"val_check_interval": 1, "callbacks": [Reader(), *save], "enable_checkpointing": True}
        fitted = trainer(max_steps=14, **chosen)
        torch.manual_seed(rank)
        fitted.fit(model, SomeBatches(rank, 20), loader)
        seen = list(model.seen)
        if validates:
            for one, its, path in (
                (fitted, model, None),
                (fitted, model, last),
                (trainer(), evaluated(distribution, seed=7), last),
            ):
                (told,) = one.validate(its, loader, ckpt_path=path, verbose=False)
                numbers.append(told)
        return {"trace": model.trace, "seen": seen, "in_flight": in_flight, "numbers": numbers}

    ranks = play(4, {"plain": partial(run, validates=False), "validated": partial(run, validates=True)})
    first = ranks["validated"][0]
    for one, plain in zip(ranks["validated"], ranks["plain"], strict=True):
        for step, values in plain["trace"].items():
            assert {name for name in values if name.startswith("outer ")}
            assert [
                n for n in unequal(one["trace"][step], values) if n.startswith(("net.", "outer ")) or n[0].isdigit()
            ] == []
        assert max(one["in_flight"]) > 1
        assert [unequal(seen, other) for seen, other in zip(one["seen"], first["seen"], strict=True)] == [[]] * 30
        assert one["numbers"] == first["numbers"]
        assert all(numbers["rank"] == numbers["metric"] == 1.5 for numbers in one["numbers"])
        # In the fit after the last step, after the fit, and from its last checkpoint, elsewhere too.
        assert len({numbers["loss"] for numbers in one["numbers"][14:]}) == 1


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
        model = evaluated(distribution, seed=rank)
        trainer = fits.trainer(
            distribution,
            strategy=fits.strategy(distribution, evaluate="local", **{**SHORT, "fragments": [["*"]]}),
            devices=2,
            max_steps=12,
            num_sanity_val_steps=0,
            val_check_interval=3,
            callbacks=[Reader(), save],
            enable_checkpointing=True,
        )
        trainer.fit(model, SomeBatches(rank, 20), SomeBatches(rank, 1))
        wrong = [unequal(values, local[step - 1]) for values, step in zip(model.seen, (3, 6, 9, 12), strict=True)]
        return wrong, model.seen, outer[8], save.best_model_path

    (wrong, seen, outer, best), (other_wrong, other_seen, _, other_best) = run_processes(run, 2)
    assert wrong == other_wrong == [[]] * 4
    assert best == other_best
    assert [unequal(*both) == [] for both in zip(seen, other_seen, strict=True)] == [False, False, False, True]
    # The first landing follows inner step 7; until then files hold the mean of the groups.
    for step, mine, theirs in zip((3, 6), seen, other_seen, strict=False):
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        for name in outer:
            torch.testing.assert_close(saved[name], (mine[name] + theirs[name]) / 2)
    saved = torch.load(tmp_path / "step=9.ckpt", weights_only=True)["state_dict"]
    assert_same({name: saved[name] for name in outer}, outer)


def test_evaluating_before_between_and_after_fits_overwrites_nothing_and_every_rank_writes_its_predictions(
    distribution: str, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> Any:
        class Writer(importlib.import_module(distribution).callbacks.BasePredictionWriter):  # type: ignore[misc]
            def write_on_batch_end(
                self, trainer: Any, module: Any, prediction: Any, indices: Any, parts: Any, index: int, loader: int
            ) -> None:
                torch.save([prediction], tmp_path / f"{rank}-{index}.pt")

            def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
                torch.save(predictions, tmp_path / f"{rank}-all.pt")

        model = evaluated(distribution)
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
            losses = [trainer.validate(model, SomeBatches(rank, 2), verbose=False)[0]["loss"]]
            losses.append(trainer.test(model, SomeBatches(rank, 2), verbose=False)[0]["loss"])
            predictions = trainer.predict(model, SomeBatches(rank, 2))
            trainer.limit_val_batches = 0
            assert len(set(losses)) == 1
            assert len(predictions) == 2
            assert [unequal(before, seen) for seen in (*model.seen, net_of(model))] == [[]] * 7
            results.append(losses[0])
        # Lightning evaluates in inference mode, whose tensors could not be trained again.
        assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
        assert strategy.report()["inner_steps"] == 7
        outer = strategy.outer_state_dict()
        assert unequal({name: net_of(model)[name] for name in outer}, outer) == []
        model.eval()
        with torch.no_grad():
            return results, outer, [model.net(parts[0]) for parts in SomeBatches(rank, 2)]

    ranks = run_processes(run, 2)
    for rank, (results, outer, expected) in enumerate(ranks):
        assert results == ranks[0][0] == sorted(results, reverse=True)
        assert_same(outer, ranks[0][1])
        for names in ([f"{rank}-all.pt"], [f"{rank}-{index}.pt" for index in range(2)]):
            written = sum((torch.load(tmp_path / name) for name in names), [])
            assert [torch.equal(*both) for both in zip(written, expected, strict=True)] == [True, True]
