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
from tests.lightning.test_checkpoint import assert_same, traced
from tests.ranks import run_processes

SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:1"}


def held(model: nn.Module) -> dict[str, Tensor]:
    return {name: values.clone() for name, values in model.state_dict().items()}


def evaluated(distribution: str = LIGHTNING, seed: int = 0, make: Any = fits.module) -> Any:
    """A module that keeps what it holds in each step of an evaluation, and logs in three ways."""
    base = type(make(distribution, seed=seed))

    class Evaluated(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()
            self.seen: list[dict[str, Tensor]] = []

        def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.seen.append({name: v for name, v in held(self).items() if name.startswith("net.")})
            loss = nn.functional.mse_loss(self.net(parts[0]), parts[1])
            self.metric.update(float(self.global_rank))
            self.log("loss", loss, sync_dist=True)
            self.log("rank", float(self.global_rank), sync_dist=True)
            self.log("metric", self.metric)
            return loss

        test_step = validation_step

        def predict_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.seen.append({name: v for name, v in held(self).items() if name.startswith("net.")})
            return torch.as_tensor(self.net(parts[0]))

    return Evaluated()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(values, other[name]) for name, values in one.items())


def net_of(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: v for name, v in values.items() if name.startswith("net.")}


# Inside a fit


def test_validation_with_fragments_in_flight_leaves_everything_as_it_was() -> None:
    """Local parameters, statistics of BatchNorm and inner optimizer state, before every step."""

    def run(rank: int, world_size: int, choices: dict[str, Any]) -> Any:
        in_flight: list[int] = []
        base = type(evaluated(make=lambda distribution, seed: traced(distribution, seed)))

        class Validated(base):  # type: ignore[misc, valid-type]
            def on_validation_start(self) -> None:
                in_flight.append(len(self.trainer.strategy.engine.in_flight) if self.trainer.strategy.engine else 0)

        model = Validated()
        model.trace = {}
        strategy = fits.strategy(worker_groups=2, **SHORT)
        trainer = fits.trainer(strategy=strategy, devices=world_size, max_steps=14, **choices)
        trainer.fit(model, SomeBatches(rank, 20), SomeBatches(rank, 2))
        return model.trace, model.seen, in_flight

    plain = run_processes(run, 4, {"limit_val_batches": 0})
    validated = run_processes(run, 4, {"val_check_interval": 1})
    for (trace, seen, in_flight), (expected, _, _) in zip(validated, plain, strict=True):
        assert max(in_flight) > 1
        assert len(seen) == 2 * len(in_flight)
        for step, values in trace.items():
            assert_same(net_of(values), net_of(expected[step]))
            assert {name for name in values if name.startswith("outer ")}
            assert same(
                {name: v for name, v in values.items() if name[0].isdigit()},
                {name: v for name, v in expected[step].items() if name[0].isdigit()},
            )
        for one, other in zip(seen, validated[0][1], strict=True):
            assert_same(one, other)


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
                local.append(net_of(held(module)))
                outer.append(trainer.strategy.outer_state_dict())

        model = evaluated(distribution, seed=rank)
        callbacks = importlib.import_module(distribution).callbacks
        save = callbacks.ModelCheckpoint(tmp_path, monitor="loss", filename="{step}", save_top_k=-1)
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
        seen_and_local = [same(values, local[step - 1]) for values, step in zip(model.seen, (3, 6, 9, 12), strict=True)]
        return seen_and_local, model.seen, outer[8], save.best_model_path

    (right, seen, outer, best), (other_right, other_seen, _, other_best) = run_processes(run, 2)
    assert right == other_right == [True] * 4
    assert best == other_best
    assert [same(one, other) for one, other in zip(seen, other_seen, strict=True)] == [False, False, False, True]
    saved = {
        step: net_of(torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]) for step in (3, 6, 9)
    }
    # The first landing follows inner step 7; until then it is the mean of the groups.
    for step, mine, theirs in zip((3, 6), seen, other_seen, strict=False):
        torch.testing.assert_close(saved[step], {name: (mine[name] + theirs[name]) / 2 for name in mine})
    assert_same(saved[9], outer)


def test_metrics_of_validation_agree_on_all_ranks(distribution: str) -> None:
    def run(rank: int, world_size: int) -> Any:
        numbers: list[dict[str, float]] = []

        class Reader(importlib.import_module(distribution).Callback):  # type: ignore[misc]
            def on_validation_end(self, trainer: Any, module: Any) -> None:
                numbers.append({name: float(value) for name, value in trainer.callback_metrics.items()})

        strategy = fits.strategy(distribution, worker_groups=2, **SHORT)
        trainer = fits.trainer(
            distribution, strategy=strategy, devices=4, max_steps=9, val_check_interval=3, callbacks=[Reader()]
        )
        model, loader = evaluated(distribution, seed=rank), SomeBatches(rank, 2)
        trainer.fit(model, SomeBatches(rank, 20), loader)
        return [*numbers, trainer.validate(model, loader, verbose=False)[0]]

    ranks = run_processes(run, 4)
    assert len(ranks[0]) == 5
    assert all(other == ranks[0] for other in ranks[1:])
    assert all(numbers["rank"] == numbers["metric"] == 1.5 for numbers in ranks[0])
    assert ranks[0][-1]["loss"] == ranks[0][-2]["loss"], "after the last step, and after the fit"


# Outside a fit


def test_evaluating_before_between_and_after_fits_overwrites_nothing(distribution: str) -> None:
    def run(rank: int, world_size: int) -> Any:
        model = evaluated(distribution)
        strategy = fits.strategy(distribution, **SHORT)
        trainer = fits.trainer(
            distribution,
            strategy=strategy,
            devices=2,
            max_steps=6,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        )

        def evaluate() -> list[Any]:
            before, training = held(model), model.training
            model.seen.clear()
            trainer.limit_val_batches = 1.0
            losses = [trainer.validate(model, SomeBatches(rank, 2), verbose=False)[0]["loss"]]
            losses.append(trainer.test(model, SomeBatches(rank, 2), verbose=False)[0]["loss"])
            predictions = trainer.predict(model, SomeBatches(rank, 2))
            trainer.limit_val_batches = 0
            untouched = same(held(model), before) and all(same(net_of(before), seen) for seen in model.seen)
            return [untouched, len(model.seen), losses[0] == losses[1], losses[0], len(predictions), training]

        results = [evaluate()]
        trainer.fit(model, SomeBatches(rank, 20))
        results.append(evaluate())
        trainer.fit_loop.epoch_loop.max_steps = 13
        trainer.fit(model, SomeBatches(rank, 20))
        results.append(evaluate())
        # Lightning evaluates in inference mode, whose tensors could not be trained again.
        assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
        outer = strategy.outer_state_dict()
        return results, strategy.report()["inner_steps"], same(net_of(held(model)), outer), outer

    (results, steps, finished, outer), (other_results, _, _, other_outer) = run_processes(run, 2)
    assert results == other_results
    assert steps == 7
    assert finished
    assert_same(outer, other_outer)
    losses = [result[3] for result in results]
    assert losses[0] > losses[1] > losses[2]
    assert [result[:3] + result[4:5] for result in results] == [[True, 6, True, 2]] * 3


def test_every_rank_writes_the_predictions_of_the_outer_model(distribution: str, tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        class Writer(importlib.import_module(distribution).callbacks.BasePredictionWriter):  # type: ignore[misc]
            def write_on_batch_end(
                self, trainer: Any, module: Any, prediction: Any, indices: Any, parts: Any, index: int, loader: int
            ) -> None:
                torch.save([prediction], tmp_path / f"{trainer.global_rank}-{index}.pt")

            def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
                torch.save(predictions, tmp_path / f"{trainer.global_rank}-all.pt")

        model = evaluated(distribution, seed=rank)
        trainer = fits.trainer(
            distribution,
            strategy=fits.strategy(distribution, **SHORT),
            devices=2,
            max_steps=7,
            limit_val_batches=0,
            callbacks=[Writer("batch_and_epoch")],
        )
        trainer.fit(model, SomeBatches(rank, 20))
        trainer.predict(model, SomeBatches(rank, 3), return_predictions=False)
        with torch.no_grad():
            return [model.net(parts[0]) for parts in SomeBatches(rank, 3)]

    for rank, expected in enumerate(run_processes(run, 2)):
        for names in ([f"{rank}-all.pt"], [f"{rank}-{index}.pt" for index in range(3)]):
            written = sum((torch.load(tmp_path / name) for name in names), [])
            assert len(written) == 3
            assert all(torch.equal(one, other) for one, other in zip(written, expected, strict=True))


def test_the_last_checkpoint_holds_the_finished_model_and_gives_what_validation_gives(
    distribution: str, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> Any:
        callbacks = importlib.import_module(distribution).callbacks
        save = callbacks.ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=5)
        model = evaluated(distribution, seed=rank)
        trainer = fits.trainer(
            distribution,
            strategy=fits.strategy(distribution, **SHORT),
            devices=2,
            callbacks=[save],
            enable_checkpointing=True,
            max_epochs=2,
        )
        loader = SomeBatches(rank, 2)
        trainer.fit(model, SomeBatches(rank, 5), loader)
        in_fit = float(trainer.callback_metrics["loss"])
        after = trainer.validate(model, loader, verbose=False)[0]["loss"]
        from_file = trainer.validate(model, loader, ckpt_path=str(tmp_path / "last.ckpt"), verbose=False)[0]["loss"]
        fresh = fits.trainer(distribution, strategy=fits.strategy(distribution, **SHORT), devices=2)
        path = str(tmp_path / "last.ckpt")
        elsewhere = fresh.validate(evaluated(distribution, seed=7), loader, ckpt_path=path, verbose=False)[0]["loss"]
        return in_fit, after, from_file, elsewhere

    numbers = run_processes(run, 2)
    assert len({number for rank in numbers for number in rank}) == 1
