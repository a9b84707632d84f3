"""Callbacks that average weights average outer parameters at landings, and resume to the same bits, or are refused."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import fits
from tests.fits import LIGHTNING, SomeBatches, play
from tests.lightning.test_checkpoint import (
    CHOICES,
    STEPS,
    Trained,
    assert_resumed,
    assert_same,
    at,
    outer_of,
    run_fit,
    save,
    saving,
    unequal,
)
from tests.lightning.test_strategy import LaunchedModel
from tests.ranks import run_processes

DECAY = 0.6
HOOKS = {"should_update", "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_train_epoch_start"}


def averaging(distribution: str = LIGHTNING, **choices: Any) -> Any:
    return importlib.import_module(distribution).callbacks.EMAWeightAveraging(decay=DECAY, **choices)


def stochastic(distribution: str = LIGHTNING, start: int = 3) -> Any:
    """With a learning rate that changes the steps, from the third epoch on."""
    return importlib.import_module(distribution).callbacks.StochasticWeightAveraging(0.2, swa_epoch_start=start)


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


def among(values: dict[str, Tensor], names: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values[name] for name in names}


def test_an_average_is_of_the_outer_parameters_at_landings_changes_nothing_in_training_and_resumes(
    distribution: str, tmp_path: Path
) -> None:
    def fit(rank: int, world_size: int, every: int = 3, callbacks: tuple[Any, ...] = (), **choices: Any) -> Trained:
        average = averaging(distribution, update_every_n_steps=every)
        recorded = recorder(distribution, average)
        trained = run_fit(rank, world_size, distribution, callbacks=[recorded, average, *callbacks], **choices)
        assert not set(vars(average)) & HOOKS, "hooks are put back"
        return {**trained, "averages": recorded.averages, "landed": recorded.outer}

    def stop(trainer: Any) -> None:
        trainer.should_stop = True

    every_landing = partial(fit, every=1, steps=18, overlap_steps=0)
    cases: dict[str, Any] = {
        "plain": partial(run_fit, distribution=distribution),
        "saved": partial(fit, callbacks=[at({n: save(tmp_path / str(n)) for n in (16, STEPS)}, distribution)]),
        "16 of 26": partial(fit, path=tmp_path / "16"),
        "stopped": partial(fit, every=1, steps=1000, callbacks=[at({16: stop}, distribution)]),
        "whole": partial(every_landing, callbacks=[at({16: save(tmp_path / "whole")}, distribution)]),
    }
    # 15: something landed and no update was wanted; 16: one was wanted and nothing landed; 13: both.
    for end in (13, 15, 16):
        saves = at({end: save(tmp_path / f"finished {end}")}, distribution)
        cases[f"finished {end}"] = partial(fit, steps=end, callbacks=[saves])
        cases[f"{end}"] = partial(fit, path=tmp_path / f"finished {end}")
    ranks = play(2, cases)
    for rank, saved in enumerate(ranks["saved"]):
        assert_same(saved["outer"], ranks["plain"][rank]["outer"])
        assert_resumed(saved, ranks["plain"][rank], 0)
        landed, outer = saved["landed"], saved["outer"]
        assert sorted(landed) == [13, 15, 17, 19, 21, 23, 25, 26]
        # Updates are wanted after steps 1, 4, 7, ...: each is made with the next landing.
        expected = expected_average([landed[step] for step in (13, 17, 19, 23, 25)])
        assert_same(among(saved["model"], expected), expected)
        stopped = ranks["stopped"][rank]
        assert sorted(stopped["landed"]) == [13, 15]  # step 16 wanted an update too, and the end is a landing
        expected = expected_average([*stopped["landed"].values(), stopped["outer"]])
        assert_same(among(stopped["model"], expected), expected)
        assert set(unequal(among(saved["model"], outer), outer)) == outer.keys()
        assert_same(saved["model"], ranks["saved"][0]["model"])
        file = torch.load(tmp_path / str(STEPS), weights_only=True)
        assert_same(among(file["state_dict"], outer), among(saved["model"], outer))
        assert_same(among(file["current_model_state"], outer), outer)
        for case, step in (("16 of 26", 16), ("13", 13), ("15", 15), ("16", 16)):
            resumed = ranks[case][rank]
            assert_resumed(resumed, saved, step)
            assert_same(resumed["model"], saved["model"])
            assert [n for n, values in resumed["averages"].items() if unequal(values, saved["averages"][n])] == []
    # Another number of groups starts from the outer parameters.
    outer = torch.load(tmp_path / "whole", weights_only=True)["current_model_state"]
    for trained in run_processes(partial(every_landing, groups=3, path=tmp_path / "whole"), 3):
        assert_same(outer_of(trained, 16), among(outer, trained["outer"]))


def test_averages_of_epochs_are_of_outer_parameters_and_resume(distribution: str, tmp_path: Path) -> None:
    def fit(rank: int, world_size: int, kind: str, epochs: int, resume: Path | None = None) -> dict[str, Any]:
        ends: list[dict[str, Tensor]] = []

        class AtEpochs(importlib.import_module(distribution).Callback):  # type: ignore[misc]
            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                outer = trainer.strategy.outer_state_dict().items()
                ends.append({name.removeprefix("net."): values for name, values in outer})

        of_epochs = {"update_every_n_steps": 0, "update_starting_at_epoch": 0}
        average = stochastic(distribution) if kind == "stochastic" else averaging(distribution, **of_epochs)
        saves = [] if resume else saving(distribution, tmp_path / f"{kind} {epochs}", filename="{epoch}")
        more = {"max_epochs": epochs, "callbacks": [AtEpochs(), average, *saves], "enable_checkpointing": not resume}
        given: dict[str, Any] = {"trainer_choices": more, "loader": SomeBatches(rank, 9), "resume": resume}
        trained = fits.fit(rank, 2, 2, 40 if epochs < 0 else -1, CHOICES, distribution, inspect=rate, **given)
        assert not set(vars(average)) & HOOKS, "hooks are put back"
        return {**trained, "ends": ends}

    def rate(trainer: Any, module: Any) -> float:
        return float(trainer.optimizers[0].param_groups[0]["lr"])

    ema, swa = partial(fit, kind="moving"), partial(fit, kind="stochastic")
    cases: dict[str, Any] = {
        "moving": partial(ema, epochs=4),
        "moving, resumed": partial(ema, epochs=4, resume=tmp_path / "moving 4" / "epoch=1.ckpt"),
        "finished": partial(ema, epochs=2),
        "moving, continued": partial(ema, epochs=4, resume=tmp_path / "moving 2" / "epoch=1.ckpt"),
        "stochastic": partial(swa, epochs=5),
        "stochastic, resumed": partial(swa, epochs=5, resume=tmp_path / "stochastic 5" / "epoch=3.ckpt"),
        "endless": partial(swa, epochs=-1),
    }
    ranks = play(2, cases)
    for rank in range(2):
        for case in ("moving, resumed", "moving, continued", "stochastic, resumed"):
            plain = ranks[case.partition(",")[0]][rank]
            assert_same(ranks[case][rank]["model"], plain["model"])
            assert_same(ranks[case][rank]["outer"], plain["outer"])
        moving, swa_end, endless = (ranks[case][rank] for case in ("moving", "stochastic", "endless"))
        for case in ("moving", "stochastic", "endless"):
            assert_same(ranks[case][rank]["model"], ranks[case][0]["model"])
        assert_same(moving["model"], expected_average(moving["ends"]))
        assert swa_end["inspected"] != 0.05, "the callback's own schedule"
        for name, values in swa_end["model"].items():
            mean = sum(swa_end["ends"][epoch][name] for epoch in (1, 2, 3)) / 3
            assert torch.allclose(values, mean, atol=1e-6)
            assert not torch.allclose(values, swa_end["outer"][name], atol=1e-4)
        assert set(unequal(endless["model"], endless["outer"])) == endless["outer"].keys()


class Counting(nn.Linear):
    """Counts in every rank at another pace, as the counter of BatchNorm does where groups have other batches."""

    def __init__(self, rank: int) -> None:
        super().__init__(5, 3)
        self.rank = rank
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.rank + 1
        return super().forward(x)


def test_an_average_in_another_precision_in_a_second_fit_and_with_buffers_of_the_rank(tmp_path: Path) -> None:
    def twice(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The average of the second of two fits, and what it should be."""
        average, model = averaging(), fits.module(seed=rank)
        trainer = fits.trainer(strategy=fits.strategy(**CHOICES), devices=2, max_steps=15, callbacks=[average])
        trainer.fit(model, SomeBatches(rank, 30))
        trainer.fit_loop.epoch_loop.max_steps = 40
        recorded = recorder(LIGHTNING, average)
        trainer.callbacks.append(recorded)
        trainer.fit(model, SomeBatches(rank, 30))
        return dict(model.state_dict()), expected_average(list(recorded.outer.values()))

    def counted(rank: int, world_size: int, callbacks: tuple[Any, ...] = (), path: Path | None = None) -> int:
        torch.manual_seed(0)
        # The only update is wanted before the checkpoint.
        average = averaging(update_every_n_steps=100, update_starting_at_step=5)
        average.should_update = lambda step_idx=None, epoch_idx=None: step_idx == 5
        given: dict[str, Any] = {"trainer_choices": {"callbacks": [average, *callbacks]}, "resume": path}
        given |= {"make": lambda *args, **kwargs: fits.module(net=Counting(rank)), "loader": SomeBatches(rank, 30)}
        trained = fits.fit(rank, 2, 2, 20, CHOICES, inspect=lambda trainer, module: int(module.net.count), **given)
        return int(trained["inspected"])

    precisions = ("64-true", "bf16-true", "bf16-mixed")
    cases: dict[str, Any] = {
        p: partial(run_fit, steps=15, callbacks=[averaging()], trainer_choices={"precision": p}) for p in precisions
    }
    cases["twice"] = twice
    cases["counted"] = partial(counted, callbacks=[at({18: save(tmp_path / "18")})])
    cases["counted, resumed"] = partial(counted, path=tmp_path / "18")
    ranks = play(2, cases)
    for precision in precisions:
        assert_same(*(rank["model"] for rank in ranks[precision]))
    for second, expected in ranks["twice"]:
        assert_same(second, expected)
    assert ranks["counted"][0] != ranks["counted"][1]
    assert ranks["counted, resumed"] == ranks["counted"]


def test_the_main_process_gets_the_average_of_a_fit_that_ran_in_others() -> None:
    model = LaunchedModel()
    strategy = fits.strategy(start_method="fork", **CHOICES)
    fits.trainer(strategy=strategy, devices=2, max_steps=20, callbacks=[averaging()]).fit(model)
    outer = strategy.outer_state_dict()
    assert set(unequal(among(dict(model.named_parameters()), outer), outer)) == outer.keys()


def test_callbacks_that_cannot_work_are_refused() -> None:
    callbacks = importlib.import_module(LIGHTNING).callbacks
    spikes = importlib.import_module(f"{LIGHTNING}.callbacks.spike").SpikeDetection
    refused: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("several callbacks that average weights", [averaging(), callbacks.WeightAveraging()], {}),
        ("StochasticWeightAveraging, EMAWeightAveraging", [stochastic(), averaging()], {}),
        ("StochasticWeightAveraging is used with a model that has BatchNorm", [stochastic()], {}),
        ("ModelPruning chooses what to prune from the local", [callbacks.ModelPruning("l1_unstructured")], {}),
        ("SpikeDetection asks all ranks after every batch", [spikes()], {}),
        ("val_check_interval is a time, 600 s: ", [], {"val_check_interval": "00:00:10:00"}),
    ]

    def run(rank: int, world_size: int) -> list[str]:
        told = []
        for _, chosen, choices in refused:
            model = fits.module(net=nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
            strategy = fits.strategy(**CHOICES)
            trainer = fits.trainer(strategy=strategy, devices=2, max_epochs=2, callbacks=chosen, **choices)
            with pytest.raises(ValueError, match=" ") as caught:
                trainer.fit(model, SomeBatches(rank, 4))
            told.append(str(caught.value))
        return told

    for texts in run_processes(run, 2):
        assert [words for text, (words, _, _) in zip(texts, refused, strict=True) if words not in text] == []
