"""Callbacks that average weights average outer parameters at landings, and resume to the same bits, or are refused."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import fits
from tests.fits import LIGHTNING, SomeBatches
from tests.lightning.test_checkpoint import STEPS, StatefulBatches, assert_same, run_fit, saving
from tests.lightning.test_strategy import LaunchedModel
from tests.ranks import run_processes

DECAY = 0.6
CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 5, "fragments": "strided:1"}


def averaging(distribution: str, **choices: Any) -> Any:
    return importlib.import_module(distribution).callbacks.EMAWeightAveraging(decay=DECAY, **choices)


def recorder(distribution: str, average: Any) -> Any:
    """A callback that notes the outer parameters at each landing, and the average before every step."""

    class Recorder(importlib.import_module(distribution).Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.landings = 0.0
            self.outer: dict[int, dict[str, Tensor]] = {}
            self.averages: dict[int, dict[str, Tensor]] = {}

        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            state = average._average_model.state_dict()
            self.averages[trainer.global_step] = {name: values.clone() for name, values in state.items()}

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            landings = trainer.strategy.report()["landings"]
            if landings > self.landings or trainer.strategy.engine.is_finished:
                self.outer[trainer.global_step] = trainer.strategy.outer_state_dict()
            self.landings = landings

    return Recorder()


def expected_average(outer: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    average = dict(outer[0])
    for values in outer[1:]:
        average = {name: DECAY * average[name] + (1 - DECAY) * values[name] for name in average}
    return average


@pytest.mark.parametrize(
    ("distribution", "world_size", "choices"),
    [
        (LIGHTNING, 4, {}),
        ("pytorch_lightning", 2, {"update_every_n_steps": 3, "update_starting_at_step": 13}),
    ],
)
def test_the_average_is_that_of_the_outer_parameters_at_landings(
    choices: dict[str, Any], distribution: str, world_size: int, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> Any:
        average = averaging(distribution, **choices)
        recorded = recorder(distribution, average)
        save = saving(distribution, tmp_path, every_n_train_steps=STEPS)
        trained = run_fit(rank, world_size, distribution, STEPS, [recorded, average, *save])
        return trained["model"], recorded.outer, trained["outer"]

    ranks = run_processes(run, world_size)
    model, at_landings, outer = ranks[0]
    assert sorted(at_landings) == [13, 15, 17, 19, 21, 23, 25, 26]
    # Indices of steps count from 0: the updates are wanted after steps 16, 19, 22 and 25.
    due = [17, 19, 23, 25] if choices else sorted(at_landings)
    for name, values in expected_average([at_landings[at] for at in due]).items():
        assert torch.equal(model[name], values), name
        assert not torch.equal(model[name], outer[name])
    for other, _, other_outer in ranks[1:]:
        assert_same(other, model)
        assert_same(other_outer, outer)
    checkpoint = torch.load(tmp_path / f"step={STEPS}.ckpt", weights_only=True)
    assert_same(checkpoint["state_dict"], model)
    for name, values in outer.items():
        assert torch.equal(checkpoint["current_model_state"][name], values)


def test_a_fit_that_averages_resumes_to_the_same_bits(distribution: str, tmp_path: Path) -> None:
    """Model, outer parameters and average; also from the checkpoint of a fit that was finished at that step."""

    def fit(rank: int, steps: int, save_at: int | None = None, resume: Path | None = None) -> Any:
        average = averaging(distribution, update_every_n_steps=3)
        recorded = recorder(distribution, average)
        folder = tmp_path / str(steps)
        save = saving(distribution, folder, every_n_train_steps=save_at) if save_at else []
        path = resume and str(resume)
        return run_fit(rank, 2, distribution, steps, [recorded, average, *save], path), recorded.averages

    def run(rank: int, world_size: int) -> Any:
        plain = fit(rank, STEPS, 16)
        resumed = {0: fit(rank, STEPS, resume=tmp_path / str(STEPS) / "step=16.ckpt")}
        # 15: something landed and no update was wanted; 16: one was wanted and nothing landed; 13: both.
        for finished in (13, 15, 16):
            fit(rank, finished, finished)
            resumed[finished] = fit(rank, STEPS, resume=tmp_path / str(finished) / f"step={finished}.ckpt")
        return plain, resumed

    for (other, expected), all_resumed in run_processes(run, 2, timeout=180.0):
        for step, (one, averages) in all_resumed.items():
            assert sorted(averages) == list(range(step or 16, STEPS))
            for at, values in averages.items():
                assert_same(values, expected[at])
                assert_same(one["trace"][at], other["trace"][at])
            assert_same(one["model"], other["model"])
            assert_same(one["outer"], other["outer"])


def test_an_average_of_epochs_is_of_outer_parameters_and_resumes(distribution: str, tmp_path: Path) -> None:
    def run(rank: int, world_size: int, epochs: int, resume: str | None) -> Any:
        callbacks = importlib.import_module(distribution).callbacks
        average = averaging(distribution, update_every_n_steps=0, update_starting_at_epoch=0)
        seen: list[dict[str, Tensor]] = []

        class AtEpochs(importlib.import_module(distribution).Callback):  # type: ignore[misc]
            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                seen.append(trainer.strategy.outer_state_dict())

        model = fits.module(distribution, "adamw", seed=rank)
        strategy = fits.strategy(distribution, **CHOICES)
        save = callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        trainer = fits.trainer(
            distribution,
            strategy=strategy,
            devices=2,
            max_epochs=epochs,
            callbacks=[AtEpochs(), average, save],
            enable_checkpointing=True,
        )
        trainer.fit(model, SomeBatches(rank, 11), ckpt_path=resume)
        return {name: values.clone() for name, values in model.state_dict().items()}, seen, strategy.outer_state_dict()

    plain = run_processes(run, 2, 4, None)
    for model, seen, _ in plain:
        assert_same(model, expected_average(seen))
        assert_same(model, plain[0][0])
    # Once from the middle of a longer fit, once from the end of a shorter one.
    for finished in (False, True):
        if finished:
            for path in tmp_path.glob("*.ckpt"):
                path.unlink()
            run_processes(run, 2, 2, None)
        for (model, _, outer), (expected, _, expected_outer) in zip(
            run_processes(run, 2, 4, str(tmp_path / "epoch=1.ckpt")), plain, strict=True
        ):
            assert_same(outer, expected_outer)
            assert_same(model, expected)


def test_validation_sees_the_average_and_agrees_with_the_checkpoint(distribution: str, tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        base = type(fits.module(distribution))

        class Validated(base):  # type: ignore[misc, valid-type]
            def validation_step(self, parts: Any, index: int) -> None:
                loss = nn.functional.mse_loss(self.net(parts[0]), parts[1])
                seen.append({name: values.clone() for name, values in self.state_dict().items()})
                self.log("val_loss", loss, sync_dist=True)

        seen: list[dict[str, Tensor]] = []
        torch.manual_seed(rank)
        model = Validated()
        average = averaging(distribution)
        recorded = recorder(distribution, average)
        callbacks = importlib.import_module(distribution).callbacks
        save = callbacks.ModelCheckpoint(tmp_path, filename="{step}", monitor="val_loss", save_top_k=-1)
        trainer = fits.trainer(
            distribution,
            strategy=fits.strategy(distribution, **CHOICES),
            devices=2,
            max_steps=20,
            val_check_interval=5,
            callbacks=[recorded, average, save],
            enable_checkpointing=True,
        )
        loader = StatefulBatches(rank, 0, 1, 1000)
        trainer.fit(model, loader, SomeBatches(rank, 1))
        last = float(trainer.callback_metrics["val_loss"])
        in_fit = list(seen)
        after = trainer.validate(model, SomeBatches(rank, 1), verbose=False)[0]["val_loss"]
        from_file = Validated()
        from_file.load_state_dict(torch.load(save.best_model_path, weights_only=True)["state_dict"])
        return in_fit, last, after, save.best_model_path, recorded.averages[15], seen[-1]

    (shown, last, after, best, at_15, held), (other_shown, other_last, other_after, other_best, _, _) = run_processes(
        run, 2
    )
    assert last == other_last == after == other_after
    assert best == other_best
    assert len(shown) == len(other_shown) == 5
    for one, other in zip(shown, other_shown, strict=True):
        assert_same(one, other)
    assert_same(shown[3], {name.removeprefix("module."): v for name, v in at_15.items() if name[0] == "m"})
    assert_same(torch.load(tmp_path / "step=20.ckpt", weights_only=True)["state_dict"], held)


def test_averaging_and_validating_change_nothing_in_training() -> None:
    def run(rank: int, world_size: int) -> None:
        one, other = (run_fit(rank, 2, LIGHTNING, STEPS, chosen) for chosen in ([averaging(LIGHTNING)], []))
        assert_same(one["outer"], other["outer"])
        for at, values in other["trace"].items():
            assert_same(one["trace"][at], values)

    run_processes(run, 2)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(values, other[name]) for name, values in one.items())


def test_a_fit_that_is_stopped_early_ends_with_the_average() -> None:
    def run(rank: int, world_size: int) -> Any:
        class Stop(importlib.import_module(LIGHTNING).Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                trainer.should_stop = trainer.global_step == 16

        average = averaging(LIGHTNING)
        recorded = recorder(LIGHTNING, average)
        trained = run_fit(rank, world_size, LIGHTNING, 1000, [recorded, average, Stop()])
        return trained["model"], [*recorded.outer.values(), trained["outer"]], list(recorded.outer)

    ranks = run_processes(run, 2)
    for model, outer, at in ranks:
        assert at == [13, 15]  # step 16 wanted an update too, and the end is a landing
        for name, values in expected_average(outer).items():
            assert torch.equal(model[name], values)


def plain_fit(rank: int, callbacks: list[Any], dtype: torch.dtype = torch.float32, **choices: Any) -> Any:
    """A fit of two groups with validation; what the module then holds, the outer parameters, and the trainer."""
    base = type(fits.module())

    class Validated(base):  # type: ignore[misc, valid-type]
        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            return super().training_step(tuple(part.to(dtype) for part in parts), index)

        def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
            self.net(parts[0].to(dtype))

    torch.manual_seed(rank)
    model = Validated()
    strategy = fits.strategy(**CHOICES)
    trainer = fits.trainer(
        strategy=strategy, devices=2, callbacks=callbacks, **{"max_steps": 20, "val_check_interval": 5, **choices}
    )
    trainer.fit(model, SomeBatches(rank, 30), SomeBatches(rank, 1))
    return model, strategy.outer_state_dict(), trainer


def test_an_average_in_another_precision_is_equal_in_all_groups() -> None:
    precisions = [("64-true", torch.float64), ("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)]

    def run(rank: int, world_size: int) -> Any:
        ends = []
        for precision, dtype in precisions:
            _, without, _ = plain_fit(rank, [], dtype, precision=precision)
            model, outer, _ = plain_fit(rank, [averaging(LIGHTNING)], dtype, precision=precision)
            assert_same(outer, without)
            ends.append({name: values.clone() for name, values in model.state_dict().items()})
        return ends

    for one, other in zip(*run_processes(run, 2), strict=True):
        assert_same(one, other)


def test_a_second_fit_averages_anew() -> None:
    def run(rank: int, world_size: int) -> Any:
        average = averaging(LIGHTNING)
        model, _, trainer = plain_fit(rank, [average])
        first = {name: values.clone() for name, values in model.state_dict().items()}
        trainer.fit_loop.epoch_loop.max_steps = 40
        recorded = recorder(LIGHTNING, average)
        trainer.callbacks.append(recorded)
        trainer.fit(model, SomeBatches(rank, 30), SomeBatches(rank, 1))
        return first, model.state_dict(), list(recorded.outer.values())

    for first, second, outer in run_processes(run, 2):
        assert_same(second, expected_average(outer))
        assert not same(first, second)


def test_the_main_process_gets_the_average_of_a_fit_that_ran_in_others() -> None:
    model = LaunchedModel()
    strategy = fits.strategy(start_method="fork", **CHOICES)
    trainer = fits.trainer(strategy=strategy, devices=2, max_steps=20, callbacks=[averaging(LIGHTNING)])
    trainer.fit(model)
    outer = strategy.outer_state_dict()
    assert not any(torch.equal(model.get_parameter(name), values) for name, values in outer.items())


def test_stochastic_weight_averaging_without_a_last_epoch_ends_with_the_average() -> None:
    def run(rank: int, world_size: int) -> Any:
        callback = importlib.import_module(LIGHTNING).callbacks.StochasticWeightAveraging(0.2, swa_epoch_start=2)
        model, outer, _ = plain_fit(rank, [callback], max_epochs=-1, max_steps=100)
        return model.state_dict(), outer

    (model, outer), (other, _) = run_processes(run, 2)
    assert_same(model, other)
    assert not same(model, outer)


def test_groups_that_are_resumed_in_another_number_start_from_the_outer_parameters(tmp_path: Path) -> None:
    def run(rank: int, world_size: int, steps: int, resume: str | None) -> Any:
        callbacks = [averaging(LIGHTNING), *saving(LIGHTNING, tmp_path, every_n_train_steps=16)]
        return run_fit(rank, world_size, LIGHTNING, steps, callbacks, resume, groups=world_size, overlap_steps=0)

    run_processes(run, 2, 18, None)
    path = tmp_path / "step=16.ckpt"
    outer = torch.load(path, weights_only=True)["current_model_state"]
    for trained in run_processes(run, 3, 20, str(path)):
        for name, values in trained["trace"][16].items():
            if name.startswith("outer "):
                assert torch.equal(values, outer[name.removeprefix("outer ")])


def stochastic(distribution: str) -> Any:
    # A learning rate that changes the steps, from the third of five epochs on.
    return importlib.import_module(distribution).callbacks.StochasticWeightAveraging(0.2, swa_epoch_start=3)


def test_stochastic_weight_averaging_averages_outer_parameters_and_resumes(distribution: str, tmp_path: Path) -> None:
    def run(rank: int, world_size: int, resume: str | None) -> Any:
        seen: dict[int, dict[str, Tensor]] = {}

        class AtEpochs(importlib.import_module(distribution).Callback):  # type: ignore[misc]
            def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
                seen[trainer.current_epoch] = trainer.strategy.outer_state_dict()

        callbacks = importlib.import_module(distribution).callbacks
        save = callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        model = fits.module(distribution, "sgd", seed=rank)
        strategy = fits.strategy(distribution, **CHOICES)
        trainer = fits.trainer(
            distribution,
            strategy=strategy,
            devices=2,
            max_epochs=5,
            callbacks=[AtEpochs(), stochastic(distribution), save],
            enable_checkpointing=True,
        )
        trainer.fit(model, SomeBatches(rank, 9), ckpt_path=resume)
        held = {name: values.clone() for name, values in model.state_dict().items()}
        return held, seen, strategy.outer_state_dict(), trainer.optimizers[0].param_groups[0]["lr"]

    plain = run_processes(run, 2, None)
    for model, seen, outer, rate in plain:
        assert rate != 0.05, "the callback's own schedule"
        for name, values in model.items():
            mean = (seen[2][name] + seen[3][name] + seen[4][name]) / 3
            assert torch.allclose(values, mean, atol=1e-6)
            assert not torch.allclose(values, outer[name], atol=1e-4)
    assert_same(plain[0][0], plain[1][0])
    path = str(tmp_path / "epoch=3.ckpt")
    for (model, _, outer, _), (expected, _, expected_outer, _) in zip(run_processes(run, 2, path), plain, strict=True):
        assert_same(outer, expected_outer)
        assert_same(model, expected)


def test_hooks_are_put_back_after_the_fit() -> None:
    def run(rank: int, world_size: int) -> bool:
        average, other = averaging(LIGHTNING), stochastic(LIGHTNING)
        for callback in (average, other):
            fits.fit(rank, world_size, 2, 3, CHOICES, trainer_choices={"callbacks": [callback]})
        hooks = {"should_update", "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_train_epoch_start"}
        return not (set(vars(average)) | set(vars(other))) & hooks

    assert run_processes(run, 2) == [True, True]


def test_buffers_of_an_average_that_do_not_travel_are_those_of_the_rank_after_a_resume(tmp_path: Path) -> None:
    class Aggregation(nn.Linear):
        """Counts in every rank at another pace, as the counter of BatchNorm does where groups have other batches."""

        def __init__(self, rank: int) -> None:
            super().__init__(5, 3)
            self.rank = rank
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.count += self.rank + 1
            return super().forward(x)

    def run(rank: int, world_size: int, callbacks: list[Any], resume: str | None) -> int:
        torch.manual_seed(0)
        model = fits.module(net=Aggregation(rank))
        # The only update is wanted before the checkpoint.
        average = averaging(LIGHTNING, update_every_n_steps=100, update_starting_at_step=5)
        average.should_update = lambda step_idx=None, epoch_idx=None: step_idx == 5
        saves = {"callbacks": [average, *callbacks], "enable_checkpointing": bool(callbacks)}
        trainer = fits.trainer(strategy=fits.strategy(**CHOICES), devices=2, max_steps=20, **saves)
        trainer.fit(model, StatefulBatches(rank, 0, 1, 100), ckpt_path=resume)
        return int(model.net.count)

    plain = run_processes(run, 2, saving(LIGHTNING, tmp_path, every_n_train_steps=18), None)
    assert plain[0] != plain[1]
    assert run_processes(run, 2, [], str(tmp_path / "step=18.ckpt")) == plain


def test_callbacks_that_cannot_work_are_refused() -> None:
    callbacks = importlib.import_module(LIGHTNING).callbacks
    spikes = importlib.import_module(f"{LIGHTNING}.callbacks.spike").SpikeDetection
    refused: list[tuple[list[Any], dict[str, Any], tuple[str, ...]]] = [
        ([averaging(LIGHTNING), callbacks.WeightAveraging()], {}, ("several callbacks that average weights",)),
        ([stochastic(LIGHTNING), averaging(LIGHTNING)], {}, ("StochasticWeightAveraging, EMAWeightAveraging",)),
        ([stochastic(LIGHTNING)], {}, ("StochasticWeightAveraging is used with a model that has BatchNorm",)),
        (
            [callbacks.ModelPruning("l1_unstructured")],
            {},
            ("ModelPruning chooses what to prune from the local weights",),
        ),
        ([spikes()], {}, ("SpikeDetection asks all ranks after every batch",)),
        ([], {"val_check_interval": "00:00:10:00"}, ("val_check_interval is a time, 600 s: ",)),
    ]

    def run(rank: int, world_size: int) -> list[str]:
        told = []
        for chosen, choices, _ in refused:
            model = fits.module(net=nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
            strategy = fits.strategy(**CHOICES)
            trainer = fits.trainer(strategy=strategy, devices=2, max_epochs=2, callbacks=chosen, **choices)
            with pytest.raises(ValueError, match=" ") as caught:
                trainer.fit(model, StatefulBatches(rank, 0, 1, 4))
            told.append(str(caught.value))
        return told

    for messages in run_processes(run, 2):
        for message, (_, _, parts) in zip(messages, refused, strict=True):
            assert [part for part in parts if part not in message] == [], message
