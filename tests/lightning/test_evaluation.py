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
    on,
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

SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:1"}


def net_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: values.clone()
        for name, values in model.state_dict().items()
        if name.startswith("net.")
    }


def evaluated(distribution: str = LIGHTNING, seed: int = 0) -> Any:
    """A traced module that keeps what it holds in each step of an evaluation, and logs in three
    ways.
    """

    def validation_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.seen.append(net_of(self))
        self.metric.update(float(self.global_rank))
        self.log("loss", self.loss(parts), sync_dist=True)
        self.log("rank", float(self.global_rank), sync_dist=True)
        self.log("metric", self.metric)

    def predict_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        self.seen.append(net_of(self))
        return torch.as_tensor(self.net(parts[0]))

    steps = {
        "validation_step": validation_step,
        "test_step": validation_step,
        "predict_step": predict_step,
    }
    model = traced(distribution, seed, seen=[], **steps)
    model.metric = MeanMetric()
    return model


@in_ranks(4)
def test_validation_changes_nothing_and_agrees_everywhere(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    """Local parameters, statistics of BatchNorm and inner optimizer state, before every step; so
    does an average.
    """
    callbacks = importlib.import_module(distribution).callbacks
    loader = SomeBatches(rank, 2)
    average = callbacks.EMAWeightAveraging(decay=0.6)

    class Reader(callbacks.Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            in_flight.append(
                len(trainer.strategy.engine.in_flight) if trainer.strategy.engine else 0
            )
            averaged = (
                average in trainer.callbacks
                and trainer.state.fn == "fit"
                and not trainer.sanity_checking
            )
            averages.extend([net_of(average._average_model.module)] if averaged else [])

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            numbers.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def trainer(**choices: Any) -> Any:
        strategy = fits.strategy(distribution, worker_groups=2, **SHORT)
        return fits.trainer(distribution, strategy=strategy, devices=4, **choices)

    def fit(**choices: Any) -> tuple[Any, Any]:
        model = evaluated(distribution, seed=rank)
        fitted = trainer(max_steps=14, **choices)
        torch.manual_seed(rank)
        fitted.fit(model, SomeBatches(rank, 20), loader)
        return fitted, model

    plain = fit(limit_val_batches=0)[1].trace
    assert any(name.startswith("outer ") for name in plain[13])
    for more in ([], [average]):
        in_flight = list[int]()
        numbers = list[dict[str, float]]()
        averages = list[dict[str, Tensor]]()
        folder = tmp_path / str(len(more))
        save = saving(distribution, folder, every_n_train_steps=7, save_last=True)
        fitted, model = fit(
            val_check_interval=1, callbacks=[Reader(), *save, *more], enable_checkpointing=True
        )
        assert {
            at: wrong for at, its in plain.items() if (wrong := unequal(model.trace[at], its))
        } == {}
        assert max(in_flight) > 1
        assert len(model.seen) == 30
        assert all(map(agreed, model.seen))
        assert [unequal(*both) for both in zip(averages, model.seen[2::2], strict=False)] == [
            []
        ] * 14 * len(more)
        # In the fit after the last step, after the fit, and from its last checkpoint, elsewhere
        # too.
        last = str(folder / "last.ckpt")
        elsewhere = trainer(), evaluated(distribution, seed=7), last
        for one, its, path in ((fitted, model, None), (fitted, model, last), elsewhere):
            numbers += one.validate(its, loader, ckpt_path=path, verbose=False)
        assert len({told["loss"] for told in numbers[14:]}) == 1
        assert all(told["rank"] == told["metric"] == 1.5 for told in numbers)
        assert agreed(numbers)


@in_ranks(2)
def test_evaluate_local_validates_groups_and_saves_outer_models(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"evaluate='inner' is unknown: .*Choose one of them"):
        fits.strategy(distribution, evaluate="inner")
    local: list[dict[str, Tensor]] = []
    outer: list[dict[str, Tensor]] = []

    def note(trainer: Any, module: Any, *args: Any) -> None:
        local.append(net_of(module))
        outer.append(trainer.strategy.outer_state_dict())

    (save,) = saving(distribution, tmp_path, monitor="loss")
    model = evaluated(distribution, seed=rank)
    often: dict[str, Any] = {
        "val_check_interval": 3,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
    }
    often |= {"callbacks": [on(distribution, on_train_batch_end=note), save]}
    strategy = fits.strategy(distribution, evaluate="local", **{**SHORT, "fragments": [["*"]]})
    trainer = fits.trainer(distribution, strategy=strategy, devices=2, max_steps=12, **often)
    trainer.fit(model, SomeBatches(rank, 20), SomeBatches(rank, 1))
    assert [
        unequal(seen, local[step]) for seen, step in zip(model.seen, (2, 5, 8, 11), strict=True)
    ] == [[]] * 4
    assert [agreed(seen) for seen in model.seen] == [False, False, False, True]
    assert agreed(save.best_model_path)
    saved = [
        torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        for step in (3, 6, 9)
    ]
    # The first landing follows inner step 7; until then files hold the mean of the groups.
    for values, mine in zip(saved[:2], model.seen, strict=False):
        for name in outer[8]:
            mean = mine[name].clone()
            torch.distributed.all_reduce(mean)
            torch.testing.assert_close(values[name], mean / 2)
    assert_same({name: saved[2][name] for name in outer[8]}, outer[8])


@in_ranks(2)
def test_evaluating_around_fits_overwrites_nothing_and_predicts(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    written: dict[str, list[Tensor]] = {"batches": [], "epoch": []}

    class Writer(importlib.import_module(distribution).callbacks.BasePredictionWriter):
        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, *args: Any
        ) -> None:
            written["batches"].append(prediction)

        def write_on_epoch_end(
            self, trainer: Any, module: Any, predictions: Any, indices: Any
        ) -> None:
            written["epoch"] = predictions

    model = evaluated(distribution)
    loader = SomeBatches(rank, 2)
    strategy = fits.strategy(distribution, **SHORT)
    quiet = {
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "callbacks": [Writer("batch_and_epoch")],
    }
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
        told = [
            evaluate(model, loader, verbose=False)[0]["loss"]
            for evaluate in (trainer.validate, trainer.test)
        ]
        assert told[0] == told[1]
        assert len(trainer.predict(model, loader)) == 2
        trainer.limit_val_batches = 0
        assert [unequal(before, seen) for seen in (*model.seen, net_of(model))] == [[]] * 7
        losses.append(told[0])
    # Lightning evaluates in inference mode, whose tensors could not be trained again.
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    assert strategy.report()["inner_steps"] == 7
    assert losses[0] > max(losses[1:])
    assert agreed(losses)
    outer = strategy.outer_state_dict()
    assert_same({name: net_of(model)[name] for name in outer}, outer)
    assert agreed(outer)
    model.eval()
    with torch.no_grad():
        expected = [model.net(parts[0]) for parts in loader]
    assert [list(map(torch.equal, expected, predictions)) for predictions in written.values()] == [
        [True] * 2
    ] * 2


DECAY = 0.6
HOOKS = {
    "should_update",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_train_epoch_start",
}


def averaging(distribution: str = LIGHTNING, **choices: Any) -> Any:
    return importlib.import_module(distribution).callbacks.EMAWeightAveraging(
        decay=DECAY, **choices
    )


def stochastic(distribution: str = LIGHTNING) -> Any:
    """With a learning rate that changes the steps, from the third epoch on."""
    return importlib.import_module(distribution).callbacks.StochasticWeightAveraging(
        0.2, swa_epoch_start=3
    )


def landed(fitted: Trained) -> dict[int, dict[str, Tensor]]:
    """The outer parameters at each landing, the last of which is the end."""
    steps = sorted(fitted["trace"])
    outer = {step: outer_of(fitted, step) for step in steps} | {steps[-1] + 1: fitted["outer"]}
    return {
        step: outer[step]
        for step in [*steps[1:], steps[-1] + 1]
        if unequal(outer[step - 1], outer[step])
    }


def expected_average(outer: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    average = dict(outer[0])
    for values in outer[1:]:
        average = {name: DECAY * average[name] + (1 - DECAY) * values[name] for name in average}
    return average


def among(values: dict[str, Tensor], names: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values[name] for name in names}


def fit(
    place: tuple[int, int],
    distribution: str = LIGHTNING,
    every: int = 3,
    then: Any = (),
    **choices: Any,
) -> Trained:
    average = averaging(distribution, update_every_n_steps=every)
    averages: dict[int, dict[str, Tensor]] = {}

    def note(trainer: Any, *args: Any) -> None:
        state = average._average_model.state_dict()
        averages[trainer.global_step] = {name: values.clone() for name, values in state.items()}

    callbacks = [on(distribution, on_train_batch_start=note), average, at(dict(then), distribution)]
    trained = run_fit(*place, distribution=distribution, callbacks=callbacks, **choices)
    assert not set(vars(average)) & HOOKS, "hooks are put back"
    return {**trained, "averages": averages}


@in_ranks(2)
def test_averages_by_step_are_of_outer_parameters_and_resume(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    place = rank, 2
    plain = run_fit(*place, distribution=distribution)
    saved = fit(
        place, distribution, then={step: save(tmp_path / str(step)) for step in (16, STEPS)}
    )
    landings = landed(saved)
    outer = saved["outer"]
    assert_same(outer, plain["outer"])
    assert_resumed(saved, plain, 0)
    assert sorted(landings) == [13, 15, 17, 19, 21, 23, 25, 26]
    # Updates are wanted after steps 1, 4, 7, ...: each is made with the next landing.
    expected = expected_average([landings[step] for step in (13, 17, 19, 23, 25)])
    assert_same(among(saved["model"], expected), expected)
    assert set(unequal(among(saved["model"], outer), outer)) == outer.keys()
    assert agreed(saved["model"])
    file = torch.load(tmp_path / str(STEPS), weights_only=True)
    assert_same(among(file["state_dict"], outer), expected)
    assert_same(among(file["current_model_state"], outer), outer)
    # 15: something landed and no update was wanted; 16: one was wanted and nothing landed; 13:
    # both.
    for end in (13, 15, 16):
        fit(place, distribution, steps=end, then={end: save(tmp_path / f"finished {end}")})
    for name, step in (("16", 16), ("finished 13", 13), ("finished 15", 15), ("finished 16", 16)):
        resumed = fit(place, distribution, path=tmp_path / name)
        assert_resumed(resumed, saved, step)
        assert_same(resumed["model"], saved["model"])
        assert [
            n for n, values in resumed["averages"].items() if unequal(values, saved["averages"][n])
        ] == []
    stop = {16: lambda trainer: setattr(trainer, "should_stop", True)}
    stopped = fit(place, distribution, every=1, steps=1000, then=stop)
    assert sorted(landed(stopped)) == [
        13,
        15,
        16,
    ]  # step 16 wanted an update too, and the end is a landing
    expected = expected_average([*landed(stopped).values()])
    assert_same(among(stopped["model"], expected), expected)


@in_ranks(3)
def test_with_another_number_of_groups_all_start_from_the_outer_parameters(
    rank: int, tmp_path: Path
) -> None:
    of = partial(fit, (rank, 3), every=1, steps=18, overlap_steps=0)
    of(groups=1, then={16: save(tmp_path / "of one")})
    outer = torch.load(tmp_path / "of one", weights_only=True)["current_model_state"]
    resumed = of(groups=3, path=tmp_path / "of one")
    assert_same(outer_of(resumed, 16), among(outer, resumed["outer"]))
    assert agreed(resumed["model"])


@in_ranks(2)
def test_averages_of_epochs_are_of_outer_parameters_and_resume(
    rank: int, distribution: str, tmp_path: Path
) -> None:
    def at_end(trainer: Any, module: Any) -> None:
        outer = trainer.strategy.outer_state_dict().items()
        ends.append({name.removeprefix("net."): values for name, values in outer})

    def fit(average: Any, epochs: int, folder: str = "", resume: str = "") -> Trained:
        saves = [] if resume else saving(distribution, tmp_path / folder, filename="{epoch}")
        saves += [on(distribution, on_train_epoch_end=at_end)]
        more = {
            "max_epochs": epochs,
            "callbacks": [average, *saves],
            "enable_checkpointing": not resume,
        }
        given: dict[str, Any] = {"trainer_choices": more, "loader": SomeBatches(rank, 9)}
        given["resume"] = tmp_path / resume if resume else None
        ends.clear()
        own = {**CHOICES, **MOMENTUM}
        trained = fits.fit(
            rank, 2, 2, 40 if epochs < 0 else -1, own, distribution, inspect=rate, **given
        )
        assert not set(vars(average)) & HOOKS, "hooks are put back"
        assert agreed(trained["model"])
        return trained

    def rate(trainer: Any, module: Any) -> float:
        return float(trainer.optimizers[0].param_groups[0]["lr"])

    ends: list[dict[str, Tensor]] = []
    moving = partial(averaging, distribution, update_every_n_steps=0, update_starting_at_epoch=0)
    plain = fit(moving(), 4, "moving")
    assert_same(plain["model"], expected_average(ends))
    fit(moving(), 2, "shorter")
    for resume in ("moving/epoch=1.ckpt", "shorter/epoch=1.ckpt"):
        resumed = fit(moving(), 4, resume=resume)
        assert_same(resumed["model"], plain["model"])
        assert_same(resumed["outer"], plain["outer"])
    plain = fit(stochastic(distribution), 5, "stochastic")
    assert plain["inspected"] != 0.05, "the callback's own schedule"
    for name, values in plain["model"].items():
        assert torch.allclose(values, sum(ends[epoch][name] for epoch in (1, 2, 3)) / 3, atol=1e-6)
        assert not torch.allclose(values, plain["outer"][name], atol=1e-4)
    resumed = fit(stochastic(distribution), 5, resume="stochastic/epoch=3.ckpt")
    assert_same(resumed["model"], plain["model"])
    assert_same(resumed["outer"], plain["outer"])
    endless = fit(stochastic(distribution), -1, "endless")
    assert set(unequal(endless["model"], endless["outer"])) == endless["outer"].keys()


@in_ranks(2)
def test_an_average_in_another_precision_in_a_second_fit_and_with_own_buffers(
    rank: int, tmp_path: Path
) -> None:
    for precision in ("64-true", "bf16-true", "bf16-mixed"):
        choices = {"callbacks": [averaging()], "trainer_choices": {"precision": precision}}
        assert agreed(run_fit(rank, 2, steps=15, **choices)["model"]), precision

    # The average of the second of two fits.
    model = traced(LIGHTNING, rank, "sgd", mlp)
    strategy = fits.strategy(**CHOICES)
    trainer = fits.trainer(strategy=strategy, devices=2, max_steps=15, callbacks=[averaging()])
    trainer.fit(model, SomeBatches(rank, 30))
    trainer.fit_loop.epoch_loop.max_steps = 40
    model.trace.clear()
    trainer.fit(model, SomeBatches(rank, 30))
    second = {"trace": model.trace, "outer": strategy.outer_state_dict()}
    assert_same(dict(model.state_dict()), expected_average(list(landed(second).values())))

    def count_on(net: Any, inputs: Any) -> None:
        """In every rank at another pace, as the counter of BatchNorm does where groups have other
        batches.
        """
        net.count += rank + 1

    def made(*_: Any, **__: Any) -> Any:
        net = nn.Linear(5, 3)
        net.register_buffer("count", torch.tensor(0), persistent=False)
        net.register_forward_pre_hook(count_on)
        return fits.module(net=net)

    def counted(path: Path | None = None) -> int:
        # The only update is wanted before the checkpoint.
        average = averaging(update_every_n_steps=100, update_starting_at_step=5)
        average.should_update = lambda step_idx=None, epoch_idx=None: step_idx == 5
        saves = [] if path else [at({18: save(tmp_path / "18")})]
        given: dict[str, Any] = {
            "trainer_choices": {"callbacks": [average, *saves]},
            "resume": path,
        }
        given |= {"make": made, "loader": SomeBatches(rank, 30)}
        torch.manual_seed(0)
        trained = fits.fit(
            rank, 2, 2, 20, CHOICES, inspect=lambda trainer, module: int(module.net.count), **given
        )
        return int(trained["inspected"])

    count = counted()
    assert not agreed(count)
    assert counted(tmp_path / "18") == count


def test_the_main_process_gets_the_average_of_a_fit_that_ran_in_others() -> None:
    model = BoringModel()
    strategy = fits.strategy(start_method="fork", **CHOICES)
    fits.trainer(strategy=strategy, devices=2, max_steps=20, callbacks=[averaging()]).fit(model)
    outer = strategy.outer_state_dict()
    assert set(unequal(among(dict(model.named_parameters()), outer), outer)) == outer.keys()


@in_ranks(2)
def test_callbacks_that_cannot_work_are_refused(rank: int) -> None:
    callbacks = importlib.import_module(LIGHTNING).callbacks
    spikes = importlib.import_module(f"{LIGHTNING}.callbacks.spike").SpikeDetection
    refused: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("Several callbacks average weights", [averaging(), callbacks.WeightAveraging()], {}),
        ("StochasticWeightAveraging, EMAWeightAveraging", [stochastic(), averaging()], {}),
        (
            "StochasticWeightAveraging does not work with a model that has BatchNorm",
            [stochastic()],
            {},
        ),
        ("ModelPruning prunes by the local", [callbacks.ModelPruning("l1_unstructured")], {}),
        ("SpikeDetection asks all ranks after every batch", [spikes()], {}),
        ("val_check_interval is a time, 600 s: ", [], {"val_check_interval": "00:00:10:00"}),
    ]
    for words, chosen, choices in refused:
        model = fits.module(net=nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
        trainer = fits.trainer(
            strategy=fits.strategy(**CHOICES), devices=2, max_epochs=2, callbacks=chosen, **choices
        )
        assert words in refusal(trainer.fit, model, SomeBatches(rank, 4))
