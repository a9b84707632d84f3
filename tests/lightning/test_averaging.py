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

    cases: dict[str, Any] = {
        "plain": partial(run_fit, distribution=distribution),
        "saved": partial(fit, callbacks=[at({n: save(tmp_path / str(n)) for n in (16, STEPS)}, distribution)]),
        "16 of 26": partial(fit, path=tmp_path / "16"),
        "stopped": partial(fit, every=1, steps=1000, callbacks=[at({16: stop}, distribution)]),
        "whole": partial(
            fit, every=1, steps=18, overlap_steps=0, callbacks=[at({16: save(tmp_path / "whole")}, distribution)]
        ),
    }
    # 15: something landed and no update was wanted; 16: one was wanted and nothing landed; 13: both.
    for end in (13, 15, 16):
        path = tmp_path / f"finished {end}"
        cases[f"finished {end}"] = partial(fit, steps=end, callbacks=[at({end: save(path)}, distribution)])
        cases[f"{end}"] = partial(fit, path=path)
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
        assert_same(saved["model"], {**ranks["saved"][0]["model"], **_statistics(saved["model"])})
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
    resumed = partial(fit, steps=18, groups=3, overlap_steps=0, path=tmp_path / "whole")
    for trained in play(3, {"three": resumed})["three"]:
        assert_same(outer_of(trained, 16), among(outer, trained["outer"]))


def _statistics(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """What does not travel: the counter of BatchNorm."""
    return {name: values for name, values in held.items() if not values.is_floating_point()}


def test_averages_of_epochs_are_of_outer_parameters_and_resume(distribution: str, tmp_path: Path) -> None:
    def fit(rank: int, world_size: int, kind: str, epochs: int = 4, resume: Path | None = None) -> dict[str, Any]:
        ends: list[dict[str, Tensor]] = []

        class AtEpochs(importlib.import_module(distribution).Callback):  # type: ignore[misc]
            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                ends.append(trainer.strategy.outer_state_dict())

        of_epochs = {"update_every_n_steps": 0, "update_starting_at_epoch": 0}
        average = stochastic(distribution) if kind == "stochastic" else averaging(distribution, **of_epochs)
        folder = tmp_path / f"{kind} {epochs}"
        saves = [] if resume else saving(distribution, folder, filename="{epoch}")
        model = fits.module(distribution, "sgd", seed=rank)
        strategy = fits.strategy(distribution, **CHOICES)
        trainer = fits.trainer(
            distribution,
            strategy=strategy,
            devices=2,
            max_epochs=epochs,
            max_steps=40 if epochs < 0 else -1,
            callbacks=[AtEpochs(), average, *saves],
            enable_checkpointing=resume is None,
        )
        trainer.fit(model, SomeBatches(rank, 9), ckpt_path=resume and str(resume))
        assert not set(vars(average)) & HOOKS, "hooks are put back"
        held = {name: values.clone() for name, values in model.state_dict().items()}
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        return {"model": held, "ends": ends, "outer": strategy.outer_state_dict(), "rate": rate}

    ema, swa = partial(fit, kind="moving"), partial(fit, kind="stochastic")
    ranks = play(
        2,
        {
            "moving": ema,
            "moving, resumed": partial(ema, resume=tmp_path / "moving 4" / "epoch=1.ckpt"),
            "finished": partial(ema, epochs=2),
            "moving, continued": partial(ema, resume=tmp_path / "moving 2" / "epoch=1.ckpt"),
            "stochastic": partial(swa, epochs=5),
            "stochastic, resumed": partial(swa, epochs=5, resume=tmp_path / "stochastic 5" / "epoch=3.ckpt"),
            "endless": partial(swa, epochs=-1),
        },
    )
    for rank in range(2):
        for case in ("moving, resumed", "moving, continued", "stochastic, resumed"):
            plain = ranks[case.partition(",")[0]]
            assert_same(ranks[case][rank]["model"], plain[rank]["model"])
            assert_same(ranks[case][rank]["outer"], plain[rank]["outer"])
        for case in ("moving", "stochastic", "endless"):
            assert_same(ranks[case][rank]["model"], ranks[case][0]["model"])
        moving, swa_end = ranks["moving"][rank], ranks["stochastic"][rank]
        assert_same(moving["model"], expected_average(moving["ends"]))
        assert swa_end["rate"] != 0.05, "the callback's own schedule"
        for name, values in swa_end["model"].items():
            first, second, third = (swa_end["ends"][epoch][name] for epoch in (1, 2, 3))
            assert torch.allclose(values, (first + second + third) / 3, atol=1e-6)
            assert not torch.allclose(values, swa_end["outer"][name], atol=1e-4)
        endless = ranks["endless"][rank]
        assert set(unequal(endless["model"], endless["outer"])) == endless["outer"].keys()


def validated(distribution: str, rank: int, dtype: torch.dtype = torch.float32) -> Any:
    """A module that keeps what it holds in each validation."""
    torch.manual_seed(rank)
    model = fits.module(distribution, seed=rank)

    class Validated(type(model)):  # type: ignore[misc]
        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            return super().training_step(tuple(part.to(dtype) for part in parts), index)

        def validation_step(self, parts: Any, index: int) -> None:
            self.seen.append({name: values.clone() for name, values in self.state_dict().items()})
            self.log(
                "val_loss", nn.functional.mse_loss(self.net(parts[0].to(dtype)), parts[1].to(dtype)), sync_dist=True
            )

    model.__class__, model.seen = Validated, []
    return model


def test_validation_sees_the_average_and_agrees_with_the_checkpoint(distribution: str, tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        model, average = validated(distribution, rank), averaging(distribution)
        recorded = recorder(distribution, average)
        (save,) = saving(distribution, tmp_path, monitor="val_loss")
        trainer = fits.trainer(
            distribution,
            strategy=fits.strategy(distribution, **{**CHOICES, "worker_groups": 2}),
            devices=4,
            max_steps=20,
            val_check_interval=5,
            callbacks=[recorded, average, save],
            enable_checkpointing=True,
        )
        trainer.fit(model, SomeBatches(rank, 30), SomeBatches(rank, 1))
        shown, last = list(model.seen), float(trainer.callback_metrics["val_loss"])
        after = trainer.validate(model, SomeBatches(rank, 1), verbose=False)[0]["val_loss"]
        return shown, last, after, save.best_model_path, recorded.averages[15], model.seen[-1]

    ranks = run_processes(run, 4)
    shown, last, _, best, at_15, held = ranks[0]
    for its, *numbers, its_best, _, _ in ranks:
        assert numbers == [last, last]
        assert its_best == best
        assert [unequal(one, other) for one, other in zip(its, shown, strict=True)] == [[]] * 5
    assert_same(shown[3], {name.removeprefix("module."): v for name, v in at_15.items() if name[0] == "m"})
    assert_same(torch.load(tmp_path / "step=20.ckpt", weights_only=True)["state_dict"], held)


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
    def in_precision(rank: int, world_size: int, precision: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model = validated(LIGHTNING, rank, dtype)
        chosen: dict[str, Any] = {"max_steps": 15, "precision": precision, "callbacks": [averaging()]}
        trainer = fits.trainer(strategy=fits.strategy(**CHOICES), devices=2, val_check_interval=5, **chosen)
        trainer.fit(model, SomeBatches(rank, 30), SomeBatches(rank, 1))
        return dict(model.state_dict())

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
        model = fits.module(net=Counting(rank))
        # The only update is wanted before the checkpoint.
        average = averaging(update_every_n_steps=100, update_starting_at_step=5)
        average.should_update = lambda step_idx=None, epoch_idx=None: step_idx == 5
        strategy = fits.strategy(**CHOICES)
        trainer = fits.trainer(strategy=strategy, devices=2, max_steps=20, callbacks=[average, *callbacks])
        trainer.fit(model, SomeBatches(rank, 30), ckpt_path=path and str(path))
        return int(model.net.count)

    precisions = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}
    cases: dict[str, Any] = {p: partial(in_precision, precision=p, dtype=dtype) for p, dtype in precisions.items()}
    cases["twice"] = twice
    cases["counted"] = partial(counted, callbacks=[at({18: save(tmp_path / "18")})])
    cases["counted, resumed"] = partial(counted, path=tmp_path / "18")
    ranks = play(2, cases)
    for precision in precisions:
        assert_same(*ranks[precision])
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
