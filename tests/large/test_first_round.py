"""Until every fragment has landed once, with the defaults 100 steps and more: files and
validations are trained.
"""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import WorkerGroups
from lightning_sdiloco.engine import checkpoint as files
from lightning_sdiloco.lightning import fabric as fabric_room
from tests import fits
from tests.bits import same
from tests.engine.groups import Groups
from tests.engine.test_agreement import same as same_states
from tests.fits import SomeBatches, refusal, said_by, since
from tests.large.models import Batches, batch, held, made, sharded
from tests.lightning.test_fabric import fabric_of, train
from tests.ranks import agreed, in_ranks, run_ranks

pytestmark = pytest.mark.large

SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:1"}
saving = partial(pl.callbacks.ModelCheckpoint, filename="{step}", save_top_k=-1)
callback = pl.callbacks.LambdaCallback


class Again(SomeBatches):
    """The same batches of the task in every epoch."""

    def __init__(self, group: int = -1, length: int = 2) -> None:
        self.batches = [batch(group, step) for step in range(length)]


def loss_of(model: nn.Module, group: int, step: int, *_: int) -> Tensor:
    x, y = batch(group, step)
    return nn.functional.mse_loss(model(x), y)


def error_of(state: dict[str, Tensor]) -> float:
    """The mean squared error of what a checkpoint holds, on data that nobody has trained on."""
    net = made("wide")
    net.load_state_dict({name.removeprefix("net."): values for name, values in state.items()})
    with torch.no_grad():
        return loss_of(net, -1, 0).item()


INITIAL = error_of(made("wide").state_dict())


class Seen(pl.LightningModule):
    """220,000 parameters; keeps what it trains from and what it validates."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = made("wide", seed)
        self.trained = list[Any]()
        self.seen = list[Any]()

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        self.trained.append(held(self))
        return nn.functional.mse_loss(self.net(parts[0]), parts[1])

    def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.seen.append(held(self))
        if self.trainer.validating:
            self.log(
                "val_loss", nn.functional.mse_loss(self.net(parts[0]), parts[1]), sync_dist=True
            )

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def fit(
    rank: int, model: Any, strategy: Any, resume: Any = None, size: int = 1, **choices: Any
) -> Any:
    """Fits in this rank, one of those of two groups."""
    loader = choices.pop("loader", Batches(rank, size))
    validation = choices.pop("validation", None)
    choices["enable_checkpointing"] = any(
        "Checkpoint" in type(c).__name__ for c in choices.get("callbacks", ())
    )
    places = {
        "strategy": strategy,
        "devices": 2 * size,
        "limit_val_batches": 1.0 if validation else 0,
    }
    trainer = fits.trainer(**{**places, **choices})
    trainer.fit(model, loader, validation, ckpt_path=resume)
    return trainer


def saved(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {
        path.name: torch.load(path, weights_only=True)["state_dict"]
        for path in sorted(folder.glob("*.ckpt"))
    }


# Checkpoints


@in_ranks(4)
def test_files_and_end_of_a_short_fit_are_as_good_as_ddps_and_other_groups_resume_it(
    rank: int, tmp_path: Path
) -> None:
    """With the defaults nothing launches for 100 steps: every file held the initial model, without
    a word.
    """

    def run(
        name: str, strategy: Any, resume: Path | None = None, steps: int = 70
    ) -> dict[str, Tensor]:
        model = Seen(rank)
        save = saving(tmp_path / name, every_n_train_steps=20, save_last=True)
        fit(rank, model, strategy, resume, 2, max_steps=steps, callbacks=[save])
        return held(model)

    ddp = run("ddp", "ddp")
    said = said_by("lightning_sdiloco")
    ours = run("ours", fits.strategy(worker_groups=2))
    assert agreed(ours)
    assert error_of(ours) <= 1.1 * error_of(ddp) + 1e-3
    mine = saved(tmp_path / "ours")
    theirs = saved(tmp_path / "ddp")
    assert (
        list(mine) == list(theirs) == ["last.ckpt", "step=20.ckpt", "step=40.ckpt", "step=60.ckpt"]
    )
    assert {
        name
        for name, state in mine.items()
        if error_of(state) > 1.1 * error_of(theirs[name]) + 1e-3
    } == set()
    told = [
        "Until every fragment" in line
        for line in said
        if "validation and checkpoints use the mean" in line
    ]
    assert told == [True] * (rank == 0)
    # A restart took the outer parameters that nobody had trained.
    four = fits.strategy(worker_groups=4)
    again = run("four", four, tmp_path / "ours" / "step=40.ckpt", steps=41)
    assert error_of(again) < 1.1 * error_of(mine["step=40.ckpt"]) < 0.5 * INITIAL


@since("2.6.0")
@in_ranks(2)
def test_an_average_that_has_not_begun_is_no_checkpoint(rank: int, tmp_path: Path) -> None:
    """It is one of outer parameters, of which there are none before the first landing."""

    def run(resume: Path | None = None) -> dict[str, Tensor]:
        average = pl.callbacks.EMAWeightAveraging(decay=0.5)
        save = saving(tmp_path / str(resume is None), every_n_train_steps=20, save_last=True)
        model = Seen(rank)
        strategy = fits.strategy(fragments=[["*"]])
        fit(rank, model, strategy, resume, max_steps=130, callbacks=[save, average])
        return held(model)

    through = run()
    states = saved(tmp_path / "True")
    for name in ("step=20.ckpt", "step=100.ckpt", "step=120.ckpt", "last.ckpt"):
        assert error_of(states[name]) < 0.6 * INITIAL, name
    assert same(through, run(tmp_path / "True" / "step=40.ckpt"))


@in_ranks(2)
def test_a_signal_leaves_no_time_for_an_exchange(rank: int, tmp_path: Path) -> None:
    """The file holds what the group that saves it has trained, and a warning says so; it resumes
    exactly.
    """

    def run(resume: Path | None = None) -> list[dict[str, Tensor]]:
        local: list[dict[str, Tensor]] = []

        def look(trainer: Any, module: Any, *_: Any) -> None:
            local.append(held(module))
            if not resume and trainer.global_step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        callbacks = [saving(tmp_path, every_n_train_steps=20), callback(on_train_batch_end=look)]
        strategy = fits.strategy(sync_every=8, overlap_steps=5, fragments="strided:1")
        try:
            fit(rank, Seen(rank), strategy, resume, max_steps=15, callbacks=callbacks)
        except BaseException as error:
            if "SIGTERM" not in type(error).__name__:
                raise
        return local

    said = said_by("lightning_sdiloco")
    local = run()
    if rank == 0:
        assert len([line for line in said if "this group's local values" in line]) == 1
        assert not [line for line in said if "which they exchange in float32" in line]
    path = tmp_path / f"terminated-step={len(local)}.ckpt"
    file = torch.load(path, weights_only=True)
    assert same(file["state_dict"], local[-1]) == (rank == 0)
    assert file[files.KEY]
    assert len(run(path)) == 15 - len(local)


@in_ranks(2)
def test_a_lone_or_failing_rank_saves_its_own_values_says_so_and_waits_for_nobody(
    rank: int, tmp_path: Path
) -> None:
    said = said_by("lightning_sdiloco")
    seen = list[dict[str, Tensor]]()

    def look(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 5 and rank == 1:
            told = trainer.strategy.lightning_module_state_dict()
            seen.extend([held(module), {name: values.clone() for name, values in told.items()}])
        if trainer.global_step == 8 - 2 * rank:
            seen.append(held(module))
            raise ArithmeticError("enough")

    callbacks = [pl.callbacks.OnExceptionCheckpoint(tmp_path), callback(on_train_batch_end=look)]
    failing = {"max_steps": 15, "callbacks": callbacks, "kind": ArithmeticError}
    assert refusal(fit, rank, Seen(rank), fits.strategy(), **failing) == "enough"
    if rank == 0:
        return
    alone, told, failed = seen
    assert same(alone, told)
    assert [line for line in said if "this group's local values" in line]
    engine = torch.load(
        tmp_path / "on_exception.ckpt.sdiloco/exception/rank_00001.pt", weights_only=True
    )["engine"]
    names = [name for fragment in engine["fragments"] for name in fragment["names"]]
    assert same(dict(zip(names, engine["local"]["parameters"], strict=True)), failed)


# Loops of one's own


def mean_over_ranks(values: Tensor) -> Tensor:
    mean = values.detach().clone()
    torch.distributed.all_reduce(mean)
    return mean / torch.distributed.get_world_size()


def test_a_custom_loop_saves_the_mean_and_frozen_layers_keep_the_mean_they_learnt(
    tmp_path: Path,
) -> None:
    def run(rank: int, world_size: int) -> None:
        here = Groups(joined=WorkerGroups("auto"), net=partial(made, "wide"), loss=loss_of)
        here.until(40)
        (engine,), layer = here.engines, here.models[0][0][0]
        engine.save(tmp_path / "a.pt")
        expected = mean_over_ranks(layer.weight)
        layer.requires_grad_(False)
        engine.recut()
        engine.close()
        torch.testing.assert_close(layer.weight, expected, check_stride=False)
        assert agreed(layer.state_dict())

    run_ranks(run, 2)
    assert error_of(torch.load(tmp_path / "a.pt", weights_only=True)["state_dict"]) < 0.5 * INITIAL


@in_ranks(4)
def test_a_loop_of_fabric_that_never_finishes_saves_its_trained_values(
    rank: int, tmp_path: Path
) -> None:
    """On an exception a rank saves its own values, and waits for nobody."""
    told: list[str] = []
    fabric_room.rank_zero_info = told.append
    fabric = fabric_of(4, sync_every=50, overlap_steps=5, fragments=[["*"]])
    net = made("wide", rank)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=2e-3))
    whole = {"model": model, "optimizer": optimizer}
    model_alone = {"model": model}
    for step in range(1, 61):
        train(fabric, optimizer, loss_of(model, rank // 2, step))
        if step == 5 and rank == 0:
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                began = time.monotonic()
                fabric.save(tmp_path / "interrupted.pt", whole)
                assert time.monotonic() - began < 10
            assert same(torch.load(tmp_path / "interrupted.pt")["model"], held(net))
            told.clear()
        if step == 40:
            fabric.save(tmp_path / "first.pt", whole)
            fabric.save(tmp_path / "model.pt", model_alone)
            expected = {name: mean_over_ranks(values) for name, values in net.named_parameters()}
    fabric.save(tmp_path / "landed.pt", whole)
    file = {path.stem: torch.load(path)["model"] for path in tmp_path.glob("*.pt")}
    assert same(file["first"], file["model"])
    torch.testing.assert_close(file["first"], expected)
    assert error_of(file["first"]) < 0.5 * INITIAL
    assert same(file["landed"], fabric.strategy.outer_state_dict())
    if rank == 0:
        assert ["holds the mean of the worker groups" in line for line in told] == [
            True,
            True,
            False,
        ]
        assert "Before you save the last checkpoint, call fabric.strategy.finish()" in told[2]


# Validation


class Average:
    """A moving average as people write it: it takes the place of the weights for a validation."""

    def __init__(self, module: nn.Module, decay: float = 0.9) -> None:
        self.module = module
        self.decay = decay
        self.expected = list[dict[str, Tensor]]()
        self.values = dict[str, Tensor]()
        self.before = dict[str, Tensor]()

    def update(self, *_: Any) -> None:
        for name, values in held(self.module).items():
            self.values[name] = torch.lerp(values, self.values.get(name, values), self.decay)

    def swap_in(self, *_: Any) -> None:
        if self.values:
            self.before = held(self.module)
            self.module.load_state_dict(self.values)
            self.expected += [dict(self.values)] * 2  # batches of a validation

    def swap_out(self, *_: Any) -> None:
        if self.before:
            self.module.load_state_dict(self.before)
            self.before = {}

    def hooks(self, begin: str, end: str) -> dict[str, Any]:
        return {"on_train_batch_end": self.update, begin: self.swap_in, end: self.swap_out}


SWAPS = [
    ("on_validation_start", "on_validation_end"),
    ("on_validation_epoch_start", "on_validation_epoch_end"),
    ("on_validation_model_eval", "on_validation_model_train"),
]
OWNERS = [("callback", SWAPS[0]), ("callback", SWAPS[1]), ("callbacks", SWAPS[0])] + [
    ("module", own) for own in SWAPS
]


@in_ranks(2)
def test_validation_sees_swapped_in_weights_and_training_continues_from_local_ones(
    rank: int,
) -> None:
    def fitted(owner: str, swap: tuple[str, ...] = (), validation: Any = None) -> Any:
        model = Seen()
        average = Average(model)
        # They put back in the order in which they swapped in: the second puts back what the first
        # had put in.
        before = [callback(**Average(model, 0.5).hooks(*swap))] if owner == "callbacks" else []
        own = [callback(**average.hooks(*swap))] if owner.startswith("callback") else []
        if owner == "module":
            vars(model).update(average.hooks(*swap))
        choices = {
            "max_steps": 11,
            "val_check_interval": 2,
            "num_sanity_val_steps": 1,
            "validation": validation,
        }
        fit(rank, model, fits.strategy(**SHORT), callbacks=before + own, **choices)
        return model, average.expected

    plain, _ = fitted("nobody")
    for owner in OWNERS:
        model, expected = fitted(*owner, validation=Again())
        assert len(model.trained) == 11
        assert all(
            same(one, other) for one, other in zip(model.trained, plain.trained, strict=True)
        ), owner
        assert same(held(model), held(plain)), owner
        # The sanity check comes before there is an average.
        assert len(model.seen) == 11
        assert all(same(one, other) for one, other in zip(model.seen[1:], expected, strict=True)), (
            owner
        )


@in_ranks(2)
def test_tests_predictions_and_failures_in_a_fit_see_the_outer_and_keep_local_values(
    rank: int,
) -> None:
    """Lightning cannot train on after that, with any strategy."""

    def evaluate(trainer: Any, module: Any, *_: Any) -> None:
        local[:] = [held(module)]
        if trainer.global_step == 8:
            outer = trainer.strategy.outer_state_dict()
            getattr(trainer, which)(module, Again())
            assert same(module.seen[-1], outer)
            assert same(held(module), local[0])
            assert not same(outer, local[0])
            raise ArithmeticError("enough")

    def fail(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            raise ArithmeticError("enough")

    for which in ("test", "predict", "validate"):
        model = Seen(rank)
        local = list[dict[str, Tensor]]()
        choices: dict[str, Any] = {
            "max_steps": 11,
            "callbacks": [callback(on_train_batch_end=evaluate)],
        }
        if which == "validate":
            vars(model).update(Average(model).hooks(*SWAPS[0]))
            choices["callbacks"].append(callback(on_validation_batch_end=fail))
            choices |= {"val_check_interval": 6, "validation": Again()}
        assert (
            refusal(fit, rank, model, fits.strategy(**SHORT), kind=ArithmeticError, **choices)
            == "enough"
        )
    assert same(held(model), local[0])
    assert len(model.trained) == 6


@pytest.mark.parametrize(("size", "compression"), [(1, "sparse"), (2, "fp4")])
def test_first_round_means_change_no_bit_of_training_and_are_in_the_best_checkpoint(
    size: int, compression: str, tmp_path: Path
) -> None:
    """Checkpoints during the first round, at the end of validations and between them; they resume
    exactly.
    """
    steps = 13
    sizes = {
        "data_parallel_size": size,
        "tensor_parallel_size": 1,
        "save_distributed_checkpoint": False,
    }

    def run(
        rank: int, name: str, resume: Path | None = None
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        validates = name != "plain"
        folder = tmp_path / name
        by_loss = {"monitor": "val_loss", "save_on_train_epoch_end": False}
        callbacks = [saving(folder, every_n_train_steps=1)] + validates * [
            saving(folder / "best", **by_loss)
        ]
        model = Seen(rank // size)
        groups = {"worker_groups": 2, "compression": compression}
        strategy = fits.strategy(**groups, **SHORT, **(sizes if size > 1 else {}))
        if size > 1:
            model.configure_model = lambda: sharded(model)
        pl.seed_everything(rank, verbose=False)
        choices = {
            "max_steps": steps,
            "val_check_interval": 1,
            "num_sanity_val_steps": 0,
            "callbacks": callbacks,
        }
        fit(
            rank,
            model,
            strategy,
            resume,
            size,
            validation=Again(length=1) if validates else None,
            **choices,
        )
        assert strategy.schedule.first_round < steps - 1
        assert all(map(agreed, model.seen))
        return model.seen, strategy.outer_state_dict()

    def files_of(path: Path) -> dict[str, Any]:
        """What every rank has beside a checkpoint, without the metrics of validations."""
        states = {
            file.name: torch.load(file, weights_only=True)
            for file in Path(f"{path}.sdiloco").rglob("rank_*.pt")
        }
        assert len(states) == 2 * size
        return {
            name: {key: state[key] for key in state.keys() - {"metrics"}}
            for name, state in states.items()
        }

    @in_ranks(2 * size)
    def play(rank: int) -> None:
        (_, outer), (seen, other) = run(rank, "plain"), run(rank, "validated")
        assert same(outer, other)
        assert len(seen) == steps
        for step in range(1, steps):
            paths = [
                tmp_path / name / f"step={step}.ckpt"
                for name in ("plain", "validated", "validated/best")
            ]
            own, theirs, best = map(files_of, paths)
            assert same_states(own, theirs)
            assert same_states(own, best)
            assert all(
                same(torch.load(path, weights_only=True)["state_dict"], seen[step - 1])
                for path in paths
            )
        for step in (2, 5):
            then, ended = run(
                rank, f"from {step}", tmp_path / "validated" / "best" / f"step={step}.ckpt"
            )
            assert same(ended, other)
            assert all(same(one, two) for one, two in zip(then, seen[step:], strict=True))

    play()


@in_ranks(2)
def test_early_stopping_and_the_best_checkpoint_follow_ddp_from_the_first_steps(
    rank: int, tmp_path: Path
) -> None:
    """The defaults, which launch nothing for 100 steps, and a validation after every 25."""

    def run(name: str, strategy: Any) -> list[float]:
        losses: list[float] = []
        keep = callback(
            on_validation_end=lambda trainer, _: losses.append(
                float(trainer.callback_metrics["val_loss"])
            )
        )
        stop = pl.callbacks.EarlyStopping("val_loss", patience=2)
        best = saving(tmp_path / name, monitor="val_loss", save_top_k=1)
        model = Seen()
        model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.02)
        choices = {"max_steps": 150, "val_check_interval": 25, "check_val_every_n_epoch": None}
        loaders = {
            "loader": Again(rank, 60),
            "validation": Again(rank, 60),
            "num_sanity_val_steps": 0,
        }
        trainer = fit(rank, model, strategy, callbacks=[keep, stop, best], **choices, **loaders)
        assert trainer.global_step == 150
        assert Path(best.best_model_path).name == "step=150.ckpt"
        return losses

    losses = run("streaming", fits.strategy())
    expected = run("ddp", "ddp")
    assert agreed(losses)
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert losses == pytest.approx(expected, rel=0.2)


@in_ranks(2)
def test_groups_that_do_not_all_validate_see_the_outer_model_and_wait_for_nobody(rank: int) -> None:
    """One group has nothing to validate with, and one validates by itself in a callback."""

    def run(length: int, own: tuple[int, ...]) -> list[bool]:
        def validate(trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step in own:
                first = trainer._logger_connector._first_loop_iter
                trainer.validating = True
                trainer.fit_loop.epoch_loop.val_loop.run()
                trainer.training = True
                trainer._logger_connector._first_loop_iter = first

        model = Seen(rank)
        model.log = lambda *args, **kwargs: None
        model.allow_zero_length_dataloader_with_multiple_devices = True
        choices = {
            "max_steps": 11,
            "val_check_interval": 2,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 1.0,
        }
        callbacks = [callback(on_train_batch_end=validate)]
        loaders = {"validation": Again(length=length)}
        trainer = fit(
            rank, model, fits.strategy(**SHORT), callbacks=callbacks, **choices, **loaders
        )
        assert trainer.global_step == 11
        return [same(values, held(Seen())) for values in model.seen]

    # The outer model is the first one until fragments land.
    of_one = run(2 * rank, ())
    assert of_one[:6] == [True] * 6 * rank
    assert of_one[-1:] == [False] * rank
    # After steps 2, 3 by itself, 4, 5 by itself and 6, with two batches each.
    of_both = run(2, (3, 5) if rank == 1 else ())
    by_itself = [True] * 2 * rank
    assert (
        of_both[: 6 + 4 * rank] == [False] * 2 + by_itself + [False] * 2 + by_itself + [False] * 2
    )


@pytest.mark.parametrize("evaluate", ["outer", "mean"])
@in_ranks(2)
def test_the_model_validated_at_an_epochs_end_is_in_the_checkpoint_that_follows(
    rank: int, evaluate: str, tmp_path: Path
) -> None:
    means: list[bool] = []

    def look(trainer: Any, module: Any, *_: Any) -> None:
        engine = trainer.strategy.engine
        if engine is not None and not engine.is_finished:
            means.append(engine.steps_in_rounds < engine.schedule.first_round)

    model = Seen(rank)
    callbacks = [
        callback(on_validation_start=look),
        saving(tmp_path, monitor="val_loss", filename="{epoch}"),
    ]
    choices = {
        "max_epochs": 5,
        "limit_train_batches": 3,
        "num_sanity_val_steps": 0,
        "validation": Again(),
    }
    fit(rank, model, fits.strategy(evaluate=evaluate, **SHORT), callbacks=callbacks, **choices)
    assert means == [True] * 3 + [False]
    assert all(map(agreed, model.seen))
    files = saved(tmp_path)
    assert [same(files[f"epoch={epoch}.ckpt"], model.seen[2 * epoch]) for epoch in range(5)] == [
        True
    ] * 5
