"""Which weights are evaluated, averaged and saved: all ranks agree on them, and training goes on
as it was.
"""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests import fits
from tests.fits import (
    LIGHTNING,
    SomeBatches,
    Trained,
    assert_same,
    at,
    callbacks_of,
    on,
    outer_of_net,
    refusal,
    save,
    saving,
    unequal,
)
from tests.lightning.test_checkpoint import (
    CHOICES,
    MOMENTUM,
    STEPS,
    assert_resumed,
    outer_of,
    run_fit,
    traced,
)
from tests.ranks import agreed, in_ranks
from tests.training import mlp

SHORT = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:1"}
Batch = tuple[Tensor, Tensor]
Weights = dict[str, Tensor]


def net_of(module: nn.Module) -> Weights:
    state = module.state_dict()
    return {name: state[name].clone() for name in state if name.startswith("net.")}


def among(values: Weights, names: Weights) -> Weights:
    return {name: values[name] for name in names}


def evaluated(distribution: str = LIGHTNING, seed: int = 0) -> Any:
    """A traced module that keeps its weights in each step of an evaluation, and logs in three
    ways.
    """

    def validation_step(self: Any, parts: Batch, index: int) -> None:
        self.seen.append(net_of(self))
        self.metric.update(float(self.global_rank))
        self.log("loss", self.loss(parts), sync_dist=True)
        self.log("rank", float(self.global_rank), sync_dist=True)
        self.log("metric", self.metric)

    def predict_step(self: Any, parts: Batch, index: int) -> Tensor:
        self.seen.append(net_of(self))
        return torch.as_tensor(self.net(parts[0]))

    module = traced(
        distribution,
        seed,
        seen=[],
        validation_step=validation_step,
        test_step=validation_step,
        predict_step=predict_step,
    )
    module.metric = MeanMetric()
    return module


# Evaluation


def reader_of(distribution: str, average: Any) -> Any:
    """A callback that notes, in every validation, the number of flights, the logged numbers, and
    the average in a fit that makes it.
    """

    class Reader(callbacks_of(distribution).Callback):
        def __init__(self) -> None:
            super().__init__()
            self.in_flight: list[int] = []
            self.numbers: list[dict[str, float]] = []
            self.averages: list[Weights] = []

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if trainer.strategy.engine:
                self.in_flight.append(len(trainer.strategy.engine.rounds.in_flight))
            is_in_fit = trainer.state.fn == "fit" and not trainer.sanity_checking
            if average in trainer.callbacks and is_in_fit:
                self.averages.append(net_of(average._average_model.module))

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            metrics = trainer.callback_metrics
            self.numbers.append({name: float(number) for name, number in metrics.items()})

    return Reader()


def trainer_of_four(distribution: str, **choices: Any) -> Any:
    strategy = fits.strategy(distribution, worker_groups=2, **SHORT)
    return fits.trainer(distribution, strategy=strategy, devices=4, max_steps=14, **choices)


def fit_14(rank: int, distribution: str, trainer: Any) -> Any:
    """Fits 14 steps, and returns the module."""
    module = evaluated(distribution, seed=rank)
    torch.manual_seed(rank)
    trainer.fit(module, SomeBatches(rank, 20), SomeBatches(rank, 2))
    return module


def validate(rank: int, trainer: Any, module: Any, path: Path | None = None) -> Any:
    start = str(path) if path else None
    return trainer.validate(module, SomeBatches(rank, 2), ckpt_path=start, verbose=False)


def assert_same_trace(actual: dict[int, Weights], expected: dict[int, Weights]) -> None:
    for step, state in expected.items():
        assert unequal(actual[step], state) == [], step


@in_ranks(4)
def test_validation_changes_nothing_and_agrees_everywhere(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    """Local parameters, statistics of BatchNorm and inner optimizer state stay the same before
    every step, and so does an average.
    """
    unvalidated = trainer_of_four(distribution, limit_val_batches=0)
    plain = fit_14(rank, distribution, unvalidated).trace
    assert outer_of({"trace": plain}, 13)
    average = callbacks_of(distribution).EMAWeightAveraging(decay=0.6)
    for averages in ([], [average]):
        reader = reader_of(distribution, average)
        folder = tmp_path / str(len(averages))
        saves = saving(distribution, folder, every_n_train_steps=7, save_last=True)
        trainer = trainer_of_four(
            distribution,
            val_check_interval=1,
            callbacks=[reader, *saves, *averages],
            enable_checkpointing=True,
        )
        module = fit_14(rank, distribution, trainer)
        assert_same_trace(module.trace, plain)
        assert max(reader.in_flight) > 1
        assert len(module.seen) == 30
        assert all(map(agreed, module.seen))
        assert len(reader.averages) == 14 * len(averages)
        for averaged, shown in zip(reader.averages, module.seen[2::2], strict=False):
            assert_same(averaged, shown)
        # In the fit after the last step, after the fit, and from its last checkpoint, also
        # elsewhere.
        last = folder / "last.ckpt"
        numbers = reader.numbers
        numbers += validate(rank, trainer, module)
        numbers += validate(rank, trainer, module, last)
        new_module = evaluated(distribution, seed=7)
        numbers += validate(rank, trainer_of_four(distribution), new_module, last)
        assert len({logged["loss"] for logged in numbers[14:]}) == 1
        assert all(logged["rank"] == logged["metric"] == 1.5 for logged in numbers)
        assert agreed(numbers)


@in_ranks(2)
def test_evaluate_local_validates_groups_and_saves_outer_models(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"evaluate='inner' is unknown. Choose 'outer'"):
        fits.strategy(distribution, evaluate="inner")
    local: list[Weights] = []
    outer: list[Weights] = []

    def note(trainer: Any, module: Any, *args: Any) -> None:
        local.append(net_of(module))
        outer.append(trainer.strategy.outer_state_dict())

    (checkpoint,) = saving(distribution, tmp_path, monitor="loss")
    module = evaluated(distribution, seed=rank)
    strategy = fits.strategy(distribution, evaluate="local", **{**SHORT, "fragments": [["*"]]})
    trainer = fits.trainer(
        distribution,
        strategy=strategy,
        devices=2,
        max_steps=12,
        val_check_interval=3,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[on(distribution, on_train_batch_end=note), checkpoint],
    )
    trainer.fit(module, SomeBatches(rank, 20), SomeBatches(rank, 1))
    for shown, step in zip(module.seen, (2, 5, 8, 11), strict=True):
        assert_same(shown, local[step])
    assert [agreed(shown) for shown in module.seen] == [False, False, False, True]
    assert agreed(checkpoint.best_model_path)

    def saved_at(step: int) -> Weights:
        state: Weights = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        return among(state, outer[8])

    # The first landing follows inner step 7; until then files hold the mean of the groups.
    for step, shown in ((3, module.seen[0]), (6, module.seen[1])):
        for name, saved in saved_at(step).items():
            total = shown[name].clone()
            torch.distributed.all_reduce(total)
            torch.testing.assert_close(saved, total / 2)
    assert_same(saved_at(9), outer[8])


def writer_of(distribution: str) -> Any:
    """A callback that keeps predictions as they are written by batch and by epoch."""

    class Writer(callbacks_of(distribution).BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.by_batch: list[Tensor] = []
            self.by_epoch: list[Tensor] = []

        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, *args: Any
        ) -> None:
            self.by_batch.append(prediction)

        def write_on_epoch_end(
            self, trainer: Any, module: Any, predictions: Any, indices: Any
        ) -> None:
            self.by_epoch = predictions

    return Writer()


def evaluated_loss(trainer: Any, module: Any, loader: Any) -> float:
    """Validates, tests and predicts, and asserts that the weights stay the same."""
    weights = net_of(module)
    module.seen.clear()
    (validated,) = trainer.validate(module, loader, verbose=False)
    (tested,) = trainer.test(module, loader, verbose=False)
    assert validated["loss"] == tested["loss"]
    assert len(trainer.predict(module, loader)) == 2
    assert len(module.seen) == 6
    for shown in (*module.seen, net_of(module)):
        assert_same(shown, weights)
    return float(validated["loss"])


@in_ranks(2)
def test_evaluating_around_fits_overwrites_nothing_and_predicts(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    module = evaluated(distribution)
    loader = SomeBatches(rank, 2)
    strategy = fits.strategy(distribution, **SHORT)
    writer = writer_of(distribution)
    trainer = fits.trainer(
        distribution,
        strategy=strategy,
        devices=2,
        max_steps=6,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[writer],
    )
    losses = []
    for steps in (0, 6, 13):
        if steps:
            trainer.fit_loop.epoch_loop.max_steps = steps
            trainer.fit(module, SomeBatches(rank, 20))
        writer.by_batch.clear()
        trainer.limit_val_batches = 1.0
        losses.append(evaluated_loss(trainer, module, loader))
        trainer.limit_val_batches = 0
    # Lightning evaluates in inference mode, whose tensors could not be trained again.
    assert not any(tensor.is_inference() for tensor in (*module.parameters(), *module.buffers()))
    assert strategy.report()["inner_steps"] == 7
    assert losses[0] > max(losses[1:])
    assert agreed(losses)
    outer = strategy.outer_state_dict()
    assert_same(among(net_of(module), outer), outer)
    assert agreed(outer)
    module.eval()
    with torch.no_grad():
        expected = [module.net(parts[0]) for parts in loader]
    for predictions in (writer.by_batch, writer.by_epoch):
        assert list(map(torch.equal, expected, predictions)) == [True] * 2


# Averages of weights


DECAY = 0.6
HOOKS = {
    "should_update",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_train_epoch_start",
}


def averaging(distribution: str = LIGHTNING, **choices: Any) -> Any:
    return callbacks_of(distribution).EMAWeightAveraging(decay=DECAY, **choices)


def stochastic(distribution: str = LIGHTNING) -> Any:
    """With a learning rate that changes the steps, from the third epoch on."""
    return callbacks_of(distribution).StochasticWeightAveraging(0.2, swa_epoch_start=3)


def assert_hooks_are_back(average: Any) -> None:
    assert not set(vars(average)) & HOOKS


def landed(fitted: Trained) -> dict[int, Weights]:
    """The outer parameters at each landing, the last of which is the end."""
    steps = sorted(fitted["trace"])
    outer = {step: outer_of(fitted, step) for step in steps}
    end = steps[-1] + 1
    outer[end] = fitted["outer"]
    landings = {}
    for step in (*steps[1:], end):
        if unequal(outer[step - 1], outer[step]):
            landings[step] = outer[step]
    return landings


def expected_average(outer: list[Weights]) -> Weights:
    average = dict(outer[0])
    for values in outer[1:]:
        average = {name: DECAY * average[name] + (1 - DECAY) * values[name] for name in average}
    return average


def assert_averaged(fitted: Trained) -> None:
    """Every parameter of the model has a value that differs from the outer one."""
    outer = fitted["outer"]
    assert set(unequal(among(fitted["model"], outer), outer)) == outer.keys()


def fit(
    place: tuple[int, int],
    distribution: str = LIGHTNING,
    interval: int = 3,
    then: Any = (),
    **choices: Any,
) -> Trained:
    """Fits with an average that is updated every so many steps; keeps its states."""
    average = averaging(distribution, update_every_n_steps=interval)
    averages: dict[int, Weights] = {}

    def note(trainer: Any, *args: Any) -> None:
        state = average._average_model.state_dict()
        averages[trainer.global_step] = {name: values.clone() for name, values in state.items()}

    callbacks = [on(distribution, on_train_batch_start=note), average, at(dict(then), distribution)]
    trained = run_fit(*place, distribution=distribution, callbacks=callbacks, **choices)
    assert_hooks_are_back(average)
    return {**trained, "averages": averages}


@in_ranks(2)
def test_averages_by_step_are_of_outer_parameters_and_resume(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    place = (rank, 2)
    plain = run_fit(*place, distribution=distribution)
    saves = {step: save(tmp_path / str(step)) for step in (16, STEPS)}
    saved = fit(place, distribution, then=saves)
    landings = landed(saved)
    outer = saved["outer"]
    assert_same(outer, plain["outer"])
    assert_resumed(saved, plain, 0)
    assert sorted(landings) == [13, 15, 17, 19, 21, 23, 25, 26]
    # Updates are wanted after steps 1, 4, 7, ...: each is made with the next landing.
    expected = expected_average([landings[step] for step in (13, 17, 19, 23, 25)])
    assert_same(among(saved["model"], expected), expected)
    assert_averaged(saved)
    assert agreed(saved["model"])
    checkpoint = torch.load(tmp_path / str(STEPS), weights_only=True)
    assert_same(among(checkpoint["state_dict"], outer), expected)
    assert_same(among(checkpoint["current_model_state"], outer), outer)
    # 15: something landed and no update was wanted; 16: one was wanted and nothing landed; 13:
    # both.
    for end in (13, 15, 16):
        fit(place, distribution, steps=end, then={end: save(tmp_path / f"finished {end}")})
    starts = {"16": 16, "finished 13": 13, "finished 15": 15, "finished 16": 16}
    for name, step in starts.items():
        resumed = fit(place, distribution, path=tmp_path / name)
        assert_resumed(resumed, saved, step)
        assert_same(resumed["model"], saved["model"])
        expected_averages = {number: saved["averages"][number] for number in resumed["averages"]}
        assert_same_trace(resumed["averages"], expected_averages)


@in_ranks(2)
def test_an_average_of_a_fit_that_stops_early_takes_the_end_as_a_landing(
    rank: int, distribution: str
) -> None:
    stop = {16: lambda trainer: setattr(trainer, "should_stop", True)}
    stopped = fit((rank, 2), distribution, interval=1, steps=1000, then=stop)
    landings = landed(stopped)
    # Step 16 wanted an update, too, and the end is a landing.
    assert sorted(landings) == [13, 15, 16]
    expected = expected_average([*landings.values()])
    assert_same(among(stopped["model"], expected), expected)


@in_ranks(3)
def test_with_another_number_of_groups_all_start_from_the_outer_parameters(
    rank: int, tmp_path: Path
) -> None:
    path = tmp_path / "of one"
    fit_groups = partial(fit, (rank, 3), interval=1, steps=18, overlap_steps=0)
    fit_groups(groups=1, then={16: save(path)})
    outer = torch.load(path, weights_only=True)["current_model_state"]
    resumed = fit_groups(groups=3, path=path)
    assert_same(outer_of(resumed, 16), among(outer, resumed["outer"]))
    assert agreed(resumed["model"])


def fit_epochs(
    rank: int,
    average: Any,
    distribution: str,
    epochs: int,
    saves: Path | None = None,
    resume: Path | None = None,
) -> Trained:
    """Fits some epochs of nine batches, or 40 steps if their number is -1; returns the outer
    parameters at the ends of epochs, too.
    """
    ends: list[Weights] = []

    def at_end(trainer: Any, module: Any) -> None:
        ends.append(outer_of_net(trainer.strategy))

    def rate(trainer: Any, module: Any) -> float:
        return float(trainer.optimizers[0].param_groups[0]["lr"])

    callbacks = [average]
    if saves:
        callbacks += saving(distribution, saves, filename="{epoch}")
    callbacks.append(on(distribution, on_train_epoch_end=at_end))
    steps = 40 if epochs < 0 else -1
    arguments = {"max_epochs": epochs, "callbacks": callbacks, "enable_checkpointing": bool(saves)}
    trained = fits.fit(
        rank,
        2,
        2,
        steps,
        {**CHOICES, **MOMENTUM},
        distribution,
        inspect=rate,
        trainer_choices=arguments,
        loader=SomeBatches(rank, 9),
        resume=resume,
    )
    assert_hooks_are_back(average)
    assert agreed(trained["model"])
    return {**trained, "ends": ends}


@in_ranks(2)
def test_averages_of_epochs_are_of_outer_parameters_and_resume(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    by_epoch = {"update_every_n_steps": 0, "update_starting_at_epoch": 0}

    def fit_moving(epochs: int, **files: Path) -> Trained:
        average = averaging(distribution, **by_epoch)
        return fit_epochs(rank, average, distribution, epochs, **files)

    def fit_stochastic(epochs: int, **files: Path) -> Trained:
        return fit_epochs(rank, stochastic(distribution), distribution, epochs, **files)

    moving = fit_moving(4, saves=tmp_path / "moving")
    assert_same(moving["model"], expected_average(moving["ends"]))
    fit_moving(2, saves=tmp_path / "shorter")
    for folder in ("moving", "shorter"):
        resumed = fit_moving(4, resume=tmp_path / folder / "epoch=1.ckpt")
        assert_same(resumed["model"], moving["model"])
        assert_same(resumed["outer"], moving["outer"])

    plain = fit_stochastic(5, saves=tmp_path / "stochastic")
    assert plain["inspected"] != 0.05, "the callback's own schedule"
    for name, values in plain["model"].items():
        mean = sum(plain["ends"][epoch][name] for epoch in (1, 2, 3)) / 3
        assert torch.allclose(values, mean, atol=1e-6)
        assert not torch.allclose(values, plain["outer"][name], atol=1e-4)
    resumed = fit_stochastic(5, resume=tmp_path / "stochastic" / "epoch=3.ckpt")
    assert_same(resumed["model"], plain["model"])
    assert_same(resumed["outer"], plain["outer"])
    assert_averaged(fit_stochastic(-1, saves=tmp_path / "endless"))


def assert_second_fit_averages_only_itself(rank: int) -> None:
    module = traced(LIGHTNING, rank, "sgd", mlp)
    strategy = fits.strategy(**CHOICES)
    trainer = fits.trainer(strategy=strategy, devices=2, max_steps=15, callbacks=[averaging()])
    trainer.fit(module, SomeBatches(rank, 30))
    trainer.fit_loop.epoch_loop.max_steps = 40
    module.trace.clear()
    trainer.fit(module, SomeBatches(rank, 30))
    second = {"trace": module.trace, "outer": strategy.outer_state_dict()}
    assert_same(dict(module.state_dict()), expected_average(list(landed(second).values())))


def counting_module(rank: int) -> Any:
    """A module with a buffer that counts at another pace in every rank, as the counter of BatchNorm
    does where groups have other batches.
    """

    def count_on(net: Any, inputs: Any) -> None:
        net.count += rank + 1

    net = nn.Linear(5, 3)
    net.register_buffer("count", torch.tensor(0), persistent=False)
    net.register_forward_pre_hook(count_on)
    return fits.module(net=net)


def count_after_average(rank: int, saves: Path | None = None, resume: Path | None = None) -> int:
    """The count after a fit of 20 steps whose only update is wanted before the checkpoint."""
    average = averaging(update_every_n_steps=100, update_starting_at_step=5)
    average.should_update = lambda step_idx=None, epoch_idx=None: step_idx == 5
    callbacks = [average]
    if saves:
        callbacks.append(at({18: save(saves)}))
    torch.manual_seed(0)
    trained = fits.fit(
        rank,
        2,
        2,
        20,
        CHOICES,
        inspect=lambda trainer, module: int(module.net.count),
        trainer_choices={"callbacks": callbacks},
        make=lambda *_, **__: counting_module(rank),
        loader=SomeBatches(rank, 30),
        resume=resume,
    )
    return int(trained["inspected"])


@in_ranks(2)
def test_an_average_in_another_precision_in_a_second_fit_and_with_own_buffers(
    rank: int, tmp_path: Path
) -> None:
    for precision in ("64-true", "bf16-true", "bf16-mixed"):
        arguments = {"precision": precision}
        trained = run_fit(rank, 2, steps=15, callbacks=[averaging()], trainer_choices=arguments)
        assert agreed(trained["model"]), precision
    assert_second_fit_averages_only_itself(rank)
    count = count_after_average(rank, saves=tmp_path / "18")
    assert not agreed(count)
    assert count_after_average(rank, resume=tmp_path / "18") == count


def test_the_main_process_gets_the_average_of_a_fit_that_ran_in_others() -> None:
    module = BoringModel()
    strategy = fits.strategy(start_method="fork", **CHOICES)
    trainer = fits.trainer(strategy=strategy, devices=2, max_steps=20, callbacks=[averaging()])
    trainer.fit(module)
    model = dict(module.named_parameters())
    assert_averaged({"model": model, "outer": strategy.outer_state_dict()})


@in_ranks(2)
def test_callbacks_that_cannot_work_are_refused(rank: int) -> None:
    callbacks = callbacks_of(LIGHTNING)
    spikes = importlib.import_module(f"{LIGHTNING}.callbacks.spike").SpikeDetection
    refusals = {
        "Several callbacks average weights": [averaging(), callbacks.WeightAveraging()],
        "StochasticWeightAveraging, EMAWeightAveraging": [stochastic(), averaging()],
        "StochasticWeightAveraging does not work with a model that has BatchNorm": [stochastic()],
        "ModelPruning prunes weights based on each worker group's local values": [
            callbacks.ModelPruning("l1_unstructured")
        ],
        "SpikeDetection checks for spikes on all ranks after every batch": [spikes()],
    }

    def refusal_with(**choices: Any) -> str:
        module = fits.module(net=nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
        strategy = fits.strategy(**CHOICES)
        trainer = fits.trainer(strategy=strategy, devices=2, max_epochs=2, **choices)
        return refusal(trainer.fit, module, SomeBatches(rank, 4))

    for words, chosen in refusals.items():
        assert words in refusal_with(callbacks=chosen)
    message = refusal_with(val_check_interval="00:00:10:00")
    assert "val_check_interval is a time (600 s)" in message
