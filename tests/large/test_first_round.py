"""Files and validations show trained values before every fragment has landed once, which takes 100
steps and more with the defaults.
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
from tests.large.models import Batches, batch, copied_parameters, model_of, sharded
from tests.lightning.test_fabric import fabric_of, train
from tests.ranks import agreed, in_ranks, run_processes, run_ranks

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
    """The mean squared error of the state of a checkpoint, on held-out data."""
    net = model_of("wide")
    net.load_state_dict({name.removeprefix("net."): values for name, values in state.items()})
    with torch.no_grad():
        return loss_of(net, -1, 0).item()


def loaded(path: Path) -> dict[str, Tensor]:
    """The model in a checkpoint."""
    return dict(torch.load(path, weights_only=True)["state_dict"])


INITIAL = error_of(model_of("wide").state_dict())


class Seen(pl.LightningModule):
    """220,000 parameters; keeps those from which each step trains and those that are validated."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = model_of("wide", seed)
        self.trained = list[Any]()
        self.seen = list[Any]()

    def loss(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        x, y = parts
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        self.trained.append(copied_parameters(self))
        return self.loss(parts)

    def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.seen.append(copied_parameters(self))
        if self.trainer.validating:
            self.log("val_loss", self.loss(parts), sync_dist=True)

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def fit(
    rank: int, model: Any, strategy: Any, resume: Any = None, size: int = 1, **choices: Any
) -> Any:
    """Fits in this rank, one of those of two groups."""
    loader = choices.pop("loader", Batches(rank, size))
    validation = choices.pop("validation", None)
    kinds_of_callbacks = map(type, choices.get("callbacks", ()))
    arguments = {
        "strategy": strategy,
        "devices": 2 * size,
        "limit_val_batches": 1.0 if validation else 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": any("Checkpoint" in kind.__name__ for kind in kinds_of_callbacks),
    }
    trainer = fits.trainer(**{**arguments, **choices})
    trainer.fit(model, loader, validation, ckpt_path=resume)
    return trainer


def saved(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: loaded(path) for path in sorted(folder.glob("*.ckpt"))}


# Checkpoints


@in_ranks(4)
def test_files_and_end_of_a_short_fit_are_as_good_as_ddps_and_other_groups_resume_it(
    rank: int, tmp_path: Path
) -> None:
    """With rounds of 100 steps nothing launches before: every file held the initial model, without
    a warning.
    """

    def run(
        name: str, strategy: Any, resume: Path | None = None, steps: int = 70
    ) -> dict[str, Tensor]:
        model = Seen(rank)
        save = saving(tmp_path / name, every_n_train_steps=20, save_last=True)
        fit(rank, model, strategy, resume, 2, max_steps=steps, callbacks=[save])
        return copied_parameters(model)

    def is_as_good(state: dict[str, Tensor], state_of_ddp: dict[str, Tensor]) -> bool:
        return error_of(state) <= 1.1 * error_of(state_of_ddp) + 1e-3

    ddp = run("ddp", "ddp")
    messages = said_by("lightning_sdiloco")
    end = run("diloco", fits.strategy(worker_groups=2, sync_every=100))
    assert agreed(end)
    assert is_as_good(end, ddp)
    states = saved(tmp_path / "diloco")
    states_of_ddp = saved(tmp_path / "ddp")
    names = ["last.ckpt", "step=20.ckpt", "step=40.ckpt", "step=60.ckpt"]
    assert list(states) == list(states_of_ddp) == names
    for name in names:
        assert is_as_good(states[name], states_of_ddp[name]), name
    notices = [text for text in messages if "checkpoints use the mean of the worker groups" in text]
    assert len(notices) == (1 if rank == 0 else 0)
    for notice in notices:
        assert "until every fragment has landed once" in notice
    # A restart took the outer parameters that nobody had trained.
    four_groups = fits.strategy(worker_groups=4, sync_every=100)
    restarted = run("four", four_groups, tmp_path / "diloco" / "step=40.ckpt", steps=41)
    assert error_of(restarted) < 1.1 * error_of(states["step=40.ckpt"]) < 0.5 * INITIAL


@since("2.6.0")
@in_ranks(2)
def test_an_average_that_has_not_begun_is_no_checkpoint(rank: int, tmp_path: Path) -> None:
    """It averages outer parameters, of which there are none before the first landing."""

    def run(resume: Path | None = None) -> dict[str, Tensor]:
        average = pl.callbacks.EMAWeightAveraging(decay=0.5)
        folder = tmp_path / ("resumed" if resume else "through")
        save = saving(folder, every_n_train_steps=20, save_last=True)
        model = Seen(rank)
        strategy = fits.strategy(fragments=[["*"]], sync_every=100)
        fit(rank, model, strategy, resume, max_steps=130, callbacks=[save, average])
        return copied_parameters(model)

    through = run()
    states = saved(tmp_path / "through")
    for name in ("step=20.ckpt", "step=100.ckpt", "step=120.ckpt", "last.ckpt"):
        assert error_of(states[name]) < 0.6 * INITIAL, name
    assert same(through, run(resume=tmp_path / "through" / "step=40.ckpt"))


@in_ranks(2)
def test_a_signal_leaves_no_time_for_an_exchange(rank: int, tmp_path: Path) -> None:
    """The file holds the values of the group that saves it, and a warning says so; it resumes
    exactly.
    """

    def run(resume: Path | None = None) -> list[dict[str, Tensor]]:
        """The parameters after each step."""
        local: list[dict[str, Tensor]] = []

        def look(trainer: Any, module: Any, *_: Any) -> None:
            local.append(copied_parameters(module))
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

    messages = said_by("lightning_sdiloco")
    local = run()
    if rank == 0:
        assert len([text for text in messages if "this group's local values" in text]) == 1
        assert not [text for text in messages if "exchanged in float32" in text]
    path = tmp_path / f"terminated-step={len(local)}.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert same(checkpoint["state_dict"], local[-1]) == (rank == 0)
    assert checkpoint[files.KEY]
    assert len(run(path)) == 15 - len(local)


@in_ranks(2)
def test_a_lone_or_failing_rank_saves_its_own_values_says_so_and_waits_for_nobody(
    rank: int, tmp_path: Path
) -> None:
    messages = said_by("lightning_sdiloco")
    local = dict[int, dict[str, Tensor]]()
    shown_alone = dict[str, Tensor]()

    def look(trainer: Any, module: Any, *_: Any) -> None:
        step = trainer.global_step
        local[step] = copied_parameters(module)
        if step == 5 and rank == 1:
            state = trainer.strategy.lightning_module_state_dict()
            shown_alone.update({name: values.clone() for name, values in state.items()})
        if step == 8 - 2 * rank:
            raise ArithmeticError("enough")

    callbacks = [pl.callbacks.OnExceptionCheckpoint(tmp_path), callback(on_train_batch_end=look)]
    failing = {"max_steps": 15, "callbacks": callbacks, "kind": ArithmeticError}
    assert refusal(fit, rank, Seen(rank), fits.strategy(), **failing) == "enough"
    if rank == 0:
        return
    assert same(local[5], shown_alone)
    assert [text for text in messages if "this group's local values" in text]
    file = tmp_path / "on_exception.ckpt.sdiloco" / "exception" / "rank_00001.pt"
    engine = torch.load(file, weights_only=True)["engine"]
    names = [name for fragment in engine["fragments"] for name in fragment["names"]]
    assert same(dict(zip(names, engine["local"]["parameters"], strict=True)), local[6])


# Loops of users


def mean_over_ranks(values: Tensor) -> Tensor:
    mean = values.detach().clone()
    torch.distributed.all_reduce(mean)
    return mean / torch.distributed.get_world_size()


def test_a_custom_loop_saves_the_mean_and_frozen_layers_keep_the_mean_they_learnt(
    tmp_path: Path,
) -> None:
    def run(rank: int, world_size: int) -> None:
        net = partial(model_of, "wide")
        groups = Groups(joined=WorkerGroups("auto"), net=net, loss=loss_of)
        groups.until(40)
        (engine,) = groups.engines
        layer = groups.models[0][0][0]
        engine.save(tmp_path / "a.pt")
        expected = mean_over_ranks(layer.weight)
        layer.requires_grad_(False)
        engine.recut()
        engine.close()
        torch.testing.assert_close(layer.weight, expected, check_stride=False)
        assert agreed(layer.state_dict())

    run_ranks(run, 2)
    assert error_of(loaded(tmp_path / "a.pt")) < 0.5 * INITIAL


@in_ranks(4)
def test_a_loop_of_fabric_that_never_finishes_saves_its_trained_values(
    rank: int, tmp_path: Path
) -> None:
    messages: list[str] = []
    fabric_room.rank_zero_info = messages.append
    fabric = fabric_of(4, sync_every=50, overlap_steps=5, fragments=[["*"]])
    net = model_of("wide", rank)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=2e-3))
    state = {"model": model, "optimizer": optimizer}
    expected = dict[str, Tensor]()
    for step in range(1, 61):
        train(fabric, optimizer, loss_of(model, rank // 2, step))
        if step == 5 and rank == 0:
            save_in_exception(fabric, tmp_path / "interrupted.pt", state, net)
            messages.clear()
        if step == 40:
            fabric.save(tmp_path / "first.pt", state)
            fabric.save(tmp_path / "model.pt", {"model": model})
            for name, values in net.named_parameters():
                expected[name] = mean_over_ranks(values)
    fabric.save(tmp_path / "landed.pt", state)
    models = {path.stem: torch.load(path)["model"] for path in tmp_path.glob("*.pt")}
    assert same(models["first"], models["model"])
    torch.testing.assert_close(models["first"], expected)
    assert error_of(models["first"]) < 0.5 * INITIAL
    assert same(models["landed"], fabric.strategy.outer_state_dict())
    if rank == 0:
        of_first, of_model, of_landed = messages
        assert "contains the mean of the worker groups" in of_first
        assert "contains the mean of the worker groups" in of_model
        assert "contains the mean of the worker groups" not in of_landed
        assert "Before you save the last checkpoint, call fabric.strategy.finish()" in of_landed


def save_in_exception(fabric: Any, path: Path, state: dict[str, Any], net: nn.Module) -> None:
    """On an exception a rank saves its own values, and waits for nobody."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        began = time.monotonic()
        fabric.save(path, state)
        assert time.monotonic() - began < 10
    assert same(torch.load(path)["model"], copied_parameters(net))


# Validation


class Average:
    """A moving average as people write it, which replaces the weights for a validation."""

    def __init__(self, module: nn.Module, decay: float = 0.9) -> None:
        self.module = module
        self.decay = decay
        self.expected = list[dict[str, Tensor]]()  # at each batch of a validation
        self.averages = dict[str, Tensor]()
        self.backup = dict[str, Tensor]()

    def update(self, *_: Any) -> None:
        for name, values in copied_parameters(self.module).items():
            average = self.averages.get(name, values)
            self.averages[name] = torch.lerp(values, average, self.decay)

    def swap_in(self, *_: Any) -> None:
        if self.averages:
            self.backup = copied_parameters(self.module)
            self.module.load_state_dict(self.averages)
            self.expected += [dict(self.averages)] * 2

    def swap_out(self, *_: Any) -> None:
        if self.backup:
            self.module.load_state_dict(self.backup)
            self.backup = {}

    def hooks(self, begin: str, end: str) -> dict[str, Any]:
        return {"on_train_batch_end": self.update, begin: self.swap_in, end: self.swap_out}


START = ("on_validation_start", "on_validation_end")
EPOCH = ("on_validation_epoch_start", "on_validation_epoch_end")
MODEL = ("on_validation_model_eval", "on_validation_model_train")
OWNERS = [
    ("callback", START),
    ("callback", EPOCH),
    ("callbacks", START),
    ("module", START),
    ("module", EPOCH),
    ("module", MODEL),
]


@in_ranks(2)
def test_validation_sees_swapped_in_weights_and_training_continues_from_local_ones(
    rank: int,
) -> None:
    def fitted(owner: str, swap: tuple[str, ...] = (), validation: Any = None) -> Any:
        model = Seen()
        average = Average(model)
        callbacks = []
        if owner == "callbacks":
            # They put back in the order in which they swapped in: the second puts back the values
            # that the first had put in.
            callbacks.append(callback(**Average(model, 0.5).hooks(*swap)))
        if owner.startswith("callback"):
            callbacks.append(callback(**average.hooks(*swap)))
        if owner == "module":
            vars(model).update(average.hooks(*swap))
        fit(
            rank,
            model,
            fits.strategy(**SHORT),
            callbacks=callbacks,
            max_steps=11,
            val_check_interval=2,
            num_sanity_val_steps=1,
            validation=validation,
        )
        return model, average.expected

    plain, _ = fitted("nobody")
    for owner, swap in OWNERS:
        model, expected = fitted(owner, swap, validation=Again())
        assert len(model.trained) == len(plain.trained) == 11
        assert all(map(same, model.trained, plain.trained)), owner
        assert same(copied_parameters(model), copied_parameters(plain)), owner
        # The sanity check comes before there is an average.
        _, *validated = model.seen
        assert len(validated) == len(expected) == 10
        assert all(map(same, validated, expected)), owner


@in_ranks(2)
def test_tests_predictions_and_failures_in_a_fit_see_the_outer_and_keep_local_values(
    rank: int,
) -> None:
    """Lightning cannot train on after that, with any strategy."""

    def fit_until_failure(stage: str, model: Seen, **choices: Any) -> dict[str, Tensor]:
        """Evaluates in a hook after step 8; returns the local parameters of the last step."""
        local = dict[str, Tensor]()

        def evaluate(trainer: Any, module: Any, *_: Any) -> None:
            local.update(copied_parameters(module))
            if trainer.global_step == 8:
                outer = trainer.strategy.outer_state_dict()
                getattr(trainer, stage)(module, Again())
                assert same(module.seen[-1], outer)
                assert same(copied_parameters(module), local)
                assert not same(outer, local)
                raise ArithmeticError("enough")

        callbacks = [callback(on_train_batch_end=evaluate), *choices.pop("callbacks", ())]
        failing = {"max_steps": 11, "callbacks": callbacks, "kind": ArithmeticError, **choices}
        assert refusal(fit, rank, model, fits.strategy(**SHORT), **failing) == "enough"
        return local

    def fail(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            raise ArithmeticError("enough")

    fit_until_failure("test", Seen(rank))
    fit_until_failure("predict", Seen(rank))
    model = Seen(rank)
    vars(model).update(Average(model).hooks(*START))
    failing_validation = {
        "callbacks": [callback(on_validation_batch_end=fail)],
        "val_check_interval": 6,
        "num_sanity_val_steps": 2,
        "validation": Again(),
    }
    local = fit_until_failure("validate", model, **failing_validation)
    assert same(copied_parameters(model), local)
    assert len(model.trained) == 6


STEPS = 13


def fit_in_first_round(
    rank: int, size: int, compression: str, folder: Path, resume: Path | None = None
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Fits with a checkpoint of every step, and a validation after it unless the folder is called
    plain.

    Returns:
        The parameters at each validation, and the outer ones of the end.
    """
    model = Seen(rank // size)
    callbacks = [saving(folder, every_n_train_steps=1)]
    validation = None
    if folder.name != "plain":
        validation = Again(length=1)
        best = saving(folder / "best", monitor="val_loss", save_on_train_epoch_end=False)
        callbacks.append(best)
    choices = {"worker_groups": 2, "compression": compression, **SHORT}
    if size > 1:
        model.configure_model = lambda: sharded(model)
        choices |= {"data_parallel_size": size, "tensor_parallel_size": 1}
        choices["save_distributed_checkpoint"] = False
    strategy = fits.strategy(**choices)
    pl.seed_everything(rank, verbose=False)
    fit(
        rank,
        model,
        strategy,
        resume,
        size,
        validation=validation,
        max_steps=STEPS,
        val_check_interval=1,
        callbacks=callbacks,
    )
    assert strategy.schedule.first_round < STEPS - 1
    assert all(map(agreed, model.seen))
    return model.seen, strategy.outer_state_dict()


def states_of_ranks(checkpoint: Path, ranks: int) -> dict[str, Any]:
    """The files of all ranks beside a checkpoint, without the metrics of validations."""
    states = {}
    for file in Path(f"{checkpoint}.sdiloco").rglob("rank_*.pt"):
        states[file.name] = torch.load(file, weights_only=True)
        states[file.name].pop("metrics", None)
    assert len(states) == ranks
    return states


def require_same_checkpoints(paths: list[Path], mean: dict[str, Tensor], ranks: int) -> None:
    expected = states_of_ranks(paths[0], ranks)
    for path in paths:
        assert same_states(expected, states_of_ranks(path, ranks))
        assert same(loaded(path), mean)


@pytest.mark.parametrize(("size", "compression"), [(1, "sparse"), (2, "fp4")])
def test_first_round_means_change_no_bit_of_training_and_are_in_the_best_checkpoint(
    size: int, compression: str, tmp_path: Path
) -> None:
    """Checkpoints during the first round, at the end of validations and between them; they resume
    exactly.
    """
    run = partial(fit_in_first_round, size=size, compression=compression)
    folders = [tmp_path / name for name in ("plain", "validated", "validated/best")]

    def play(rank: int, ranks: int) -> None:
        _, plain_outer = run(rank, folder=tmp_path / "plain")
        means, outer = run(rank, folder=tmp_path / "validated")
        assert same(plain_outer, outer)
        assert len(means) == STEPS
        for step in range(1, STEPS):
            paths = [folder / f"step={step}.ckpt" for folder in folders]
            require_same_checkpoints(paths, means[step - 1], ranks)
        for step in (2, 5):
            checkpoint = tmp_path / "validated" / "best" / f"step={step}.ckpt"
            resumed = run(rank, folder=tmp_path / f"from {step}", resume=checkpoint)
            resumed_means, resumed_outer = resumed
            assert same(resumed_outer, outer)
            assert len(resumed_means) == STEPS - step
            assert all(map(same, resumed_means, means[step:]))

    run_processes(play, 2 * size)


@in_ranks(2)
def test_early_stopping_and_the_best_checkpoint_follow_ddp_from_the_first_steps(
    rank: int, tmp_path: Path
) -> None:
    """Rounds of 100 steps, which launch nothing before, and a validation after every 25."""

    def run(name: str, strategy: Any) -> list[float]:
        losses: list[float] = []

        def keep_loss(trainer: Any, module: Any) -> None:
            losses.append(float(trainer.callback_metrics["val_loss"]))

        best = saving(tmp_path / name, monitor="val_loss", save_top_k=1)
        stop = pl.callbacks.EarlyStopping("val_loss", patience=2)
        model = Seen()
        model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.02)
        trainer = fit(
            rank,
            model,
            strategy,
            callbacks=[callback(on_validation_end=keep_loss), stop, best],
            max_steps=150,
            val_check_interval=25,
            check_val_every_n_epoch=None,
            loader=Again(rank, 60),
            validation=Again(rank, 60),
        )
        assert trainer.global_step == 150
        assert Path(best.best_model_path).name == "step=150.ckpt"
        return losses

    losses = run("streaming", fits.strategy(sync_every=100))
    losses_of_ddp = run("ddp", "ddp")
    assert agreed(losses)
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert losses == pytest.approx(losses_of_ddp, rel=0.2)


@in_ranks(2)
def test_groups_that_do_not_all_validate_see_the_outer_model_and_wait_for_nobody(rank: int) -> None:
    """One group has nothing to validate with, and one validates by itself in a callback."""

    def run(length: int, steps_of_own_validations: tuple[int, ...] = ()) -> list[bool]:
        """Tells for each batch of a validation whether it saw the initial model."""

        def validate(trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step in steps_of_own_validations:
                first = trainer._logger_connector._first_loop_iter
                trainer.validating = True
                trainer.fit_loop.epoch_loop.val_loop.run()
                trainer.training = True
                trainer._logger_connector._first_loop_iter = first

        model = Seen(rank)
        model.log = lambda *args, **kwargs: None
        model.allow_zero_length_dataloader_with_multiple_devices = True
        trainer = fit(
            rank,
            model,
            fits.strategy(**SHORT),
            callbacks=[callback(on_train_batch_end=validate)],
            max_steps=11,
            val_check_interval=2,
            limit_val_batches=1.0,
            validation=Again(length=length),
        )
        assert trainer.global_step == 11
        initial = copied_parameters(Seen())
        return [same(values, initial) for values in model.seen]

    # The outer model is the first one until fragments land.
    saw_initial = run(length=2 * rank)
    assert saw_initial[:6] == [True] * 6 * rank
    assert saw_initial[-1:] == [False] * rank
    # After steps 2, 3 by itself, 4, 5 by itself and 6, with two batches each.
    saw_initial = run(2, steps_of_own_validations=(3, 5) if rank == 1 else ())
    of_all = [False] * 2
    by_itself = [True] * 2 * rank
    expected = [*of_all, *by_itself, *of_all, *by_itself, *of_all]
    assert saw_initial[: len(expected)] == expected


@pytest.mark.parametrize("evaluate", ["outer", "mean"])
@in_ranks(2)
def test_the_model_validated_at_an_epochs_end_is_in_the_checkpoint_that_follows(
    rank: int, evaluate: str, tmp_path: Path
) -> None:
    sees_mean: list[bool] = []

    def look(trainer: Any, module: Any, *_: Any) -> None:
        engine = trainer.strategy.engine
        if engine is not None and not engine.is_finished:
            sees_mean.append(engine.inner_steps < engine.rounds.timetable.schedule.first_round)

    model = Seen(rank)
    fit(
        rank,
        model,
        fits.strategy(evaluate=evaluate, **SHORT),
        callbacks=[
            callback(on_validation_start=look),
            saving(tmp_path, monitor="val_loss", filename="{epoch}"),
        ],
        max_epochs=5,
        limit_train_batches=3,
        validation=Again(),
    )
    assert sees_mean == [True] * 3 + [False]
    assert all(map(agreed, model.seen))
    states = saved(tmp_path)
    for epoch in range(5):
        assert same(states[f"epoch={epoch}.ckpt"], model.seen[2 * epoch])
