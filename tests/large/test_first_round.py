"""Until every fragment has landed once, with the defaults 100 steps and more: files and validations are trained."""

import importlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

import lightning_sdiloco
from lightning_sdiloco import StreamingDiLoCo, StreamingDiLoCoFabricStrategy
from lightning_sdiloco.engine import checkpoint as files
from lightning_sdiloco.lightning import fabric as fabric_room
from tests import fits
from tests.engine.test_agreement import same as same_states
from tests.fits import LIGHTNING, SomeBatches, since, whole
from tests.large.models import FEATURES, TARGETS, made, same
from tests.large.test_fits import Batches, Sharded
from tests.ranks import run_processes, run_ranks

pytestmark = [pytest.mark.large, pytest.mark.timeout(180)]

OTHER = "pytorch_lightning"
SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:1"}


def task(group: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch of a task that can be learnt; group -1 has those that nobody trains on."""
    x = torch.randn(64, FEATURES, generator=torch.Generator().manual_seed(10_000 * (group + 1) + step))
    return x, x[:, :TARGETS] + x[:, TARGETS : 2 * TARGETS]


class Stream(Batches):
    def __len__(self) -> int:
        return 1_000

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return task(self.place[0], step)


class Again(SomeBatches):
    """The same batches of the task in every epoch."""

    def __init__(self, group: int = -1, length: int = 2) -> None:
        self.batches = [task(group, step) for step in range(length)]


def held(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(values) for name, values in module.named_parameters()}


def error_of(state: dict[str, Tensor]) -> float:
    """The mean squared error of what a checkpoint holds, on data that nobody has trained on."""
    net = made("wide")
    net.load_state_dict({name.removeprefix("net."): values for name, values in state.items()})
    x, y = task(-1, 0)
    with torch.no_grad():
        return nn.functional.mse_loss(net(x), y).item()


INITIAL = error_of(made("wide").state_dict())


def module(distribution: str = LIGHTNING, seed: int = 0, is_sharded: bool = False) -> Any:
    """A module of 220,000 parameters that keeps what it trains from and what it validates."""

    class Seen(importlib.import_module(distribution).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.trained, self.seen = made("wide", seed), [], []

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.trained.append(held(self))
            return nn.functional.mse_loss(self.net(parts[0]), parts[1])

        def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
            self.seen.append(held(self))
            self.log("val_loss", nn.functional.mse_loss(self.net(parts[0]), parts[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=2e-3)

    if is_sharded:
        Seen.configure_model = Sharded.configure_model
    return Seen()


def callback(distribution: str = LIGHTNING, **hooks: Any) -> Any:
    """A callback with these hooks, each of which takes trainer and module."""
    made = {
        name: staticmethod(lambda trainer, module, *_, hook=hook: hook(trainer, module)) for name, hook in hooks.items()
    }
    return type("Hooks", (importlib.import_module(distribution).Callback,), made)()


def saving(folder: Path, distribution: str = LIGHTNING, **choices: Any) -> Any:
    save = importlib.import_module(distribution).callbacks.ModelCheckpoint
    return save(folder, **{"filename": "{step}", "save_top_k": -1, **choices})


def fit(rank: int, model: Any, size: int = 1, strategy: Any = None, resume: Any = None, **choices: Any) -> Any:
    """Fits in this rank, with the defaults of the strategy or with another one."""
    distribution = LIGHTNING if isinstance(model, importlib.import_module(LIGHTNING).LightningModule) else OTHER
    loader, validation = choices.pop("loader", Stream(rank // size, rank % size, size)), choices.pop("validation", None)
    choices = {"strategy": strategy or fits.strategy(distribution, worker_groups=2), "devices": 2 * size, **choices}
    choices["enable_checkpointing"] = any("Checkpoint" in type(c).__name__ for c in choices.get("callbacks", ()))
    trainer = fits.trainer(distribution, **{"limit_val_batches": 1.0 if validation else 0, **choices})
    trainer.fit(model, loader, validation, ckpt_path=resume)
    return trainer


def warnings_of() -> list[str]:
    """A list to which this process adds what it warns of."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_sdiloco").addHandler(handler)
    return said


def saved(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: torch.load(path, weights_only=True)["state_dict"] for path in sorted(folder.glob("*.ckpt"))}


# Checkpoints


@pytest.mark.parametrize(("distribution", "size"), [(LIGHTNING, 2), (OTHER, 1)])
def test_all_files_and_the_end_of_a_short_fit_are_as_good_as_ddps_and_go_on_with_other_groups(
    distribution: str, size: int, tmp_path: Path
) -> None:
    """With the defaults nothing launches for 100 steps: every file held the initial model, without a word."""

    def run(rank: int, world_size: int, name: str, resume: Path | None = None, steps: int = 70) -> Any:
        said, model = warnings_of(), module(distribution, seed=rank)
        strategy = "ddp" if name == "ddp" else fits.strategy(distribution, worker_groups=world_size // size)
        save = saving(tmp_path / name, distribution, every_n_train_steps=20, save_last=True)
        choices = {"devices": world_size, "max_steps": steps, "callbacks": [save]}
        fit(rank, model, size, strategy, resume, **choices)
        return held(model), [line for line in said if "validation and checkpoints hold the mean" in line]

    ours, ddp = run_processes(run, 2 * size, "ours"), run_processes(run, 2 * size, "ddp")
    assert error_of(ours[0][0]) <= 1.1 * error_of(ddp[0][0]) + 1e-3
    assert all(same(ours[0][0], model) for model, _ in ours)
    mine, theirs = saved(tmp_path / "ours"), saved(tmp_path / "ddp")
    assert list(mine) == list(theirs) == ["last.ckpt", "step=20.ckpt", "step=40.ckpt", "step=60.ckpt"]
    for name, state in mine.items():
        assert error_of(state) <= 1.1 * error_of(theirs[name]) + 1e-3, name
    assert ["Up to inner step" in line for line in ours[0][1]] == [True]
    # A restart took the outer parameters that nobody had trained.
    (model, _), *_ = run_processes(run, 3 * size, "three", tmp_path / "ours" / "step=40.ckpt", 41)
    assert error_of(model) < 1.1 * error_of(mine["step=40.ckpt"]) < 0.5 * INITIAL


@pytest.mark.parametrize("average", [pytest.param("EMAWeightAveraging", marks=since("2.6.0"))])
def test_an_average_that_has_not_begun_is_no_checkpoint(average: str, tmp_path: Path) -> None:
    """It is one of outer parameters, of which there are none before the first landing."""

    def run(rank: int, world_size: int, resume: Path | None = None) -> Any:
        kind, model = getattr(importlib.import_module(LIGHTNING).callbacks, average), module(seed=rank)
        save = saving(tmp_path / str(resume is None), every_n_train_steps=20, save_last=True)
        strategy = fits.strategy(fragments=[["*"]])
        fit(rank, model, 1, strategy, resume, max_steps=130, callbacks=[save, kind(decay=0.5)])
        return held(model)

    through, states = run_processes(run, 2), saved(tmp_path / "True")
    for name in ("step=20.ckpt", "step=100.ckpt", "step=120.ckpt", "last.ckpt"):
        assert error_of(states[name]) < 0.6 * INITIAL, name
    assert same(through[0], run_processes(run, 2, tmp_path / "True" / "step=40.ckpt")[0])


def test_a_signal_leaves_no_time_for_an_exchange(tmp_path: Path) -> None:
    """The file holds what the group that saves it has trained, and a warning says so; it resumes exactly."""

    def run(rank: int, world_size: int, resume: Path | None = None) -> Any:
        local: list[dict[str, Tensor]] = []
        said, settings = warnings_of(), {**SHORT, "sync_every": 8, "overlap_steps": 5}

        def look(trainer: Any, module: Any) -> None:
            local.append(held(module))
            if not resume and trainer.global_step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        callbacks = [saving(tmp_path, every_n_train_steps=20), callback(on_train_batch_end=look)]
        try:
            fit(rank, module(seed=rank), 1, fits.strategy(**settings), resume, max_steps=15, callbacks=callbacks)
        except BaseException as error:
            if "SIGTERM" not in type(error).__name__:
                raise
        return local, said

    (local, said), _ = run_processes(run, 2)
    assert len([line for line in said if "local values of this group" in line]) == 1
    assert not [line for line in said if "these exchange all fragments" in line]
    path = tmp_path / f"terminated-step={len(local)}.ckpt"
    file = torch.load(path, weights_only=True)
    assert same(file["state_dict"], local[-1])
    assert file[files.KEY]
    (resumed, _), _ = run_processes(run, 2, path)
    assert len(resumed) == 15 - len(local)


def test_one_rank_alone_and_one_that_fails_save_their_own_values_say_so_and_wait_for_nobody(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        said, seen = warnings_of(), []

        def look(trainer: Any, module: Any) -> None:
            if trainer.global_step == 5 and rank == 1:
                seen.extend([held(module), trainer.strategy.lightning_module_state_dict()])
                seen[-1] = {name: values.clone() for name, values in seen[-1].items()}
            if trainer.global_step == 8 - 2 * rank:
                seen.append(held(module))
                raise ArithmeticError("enough")

        on_exception = importlib.import_module(LIGHTNING).callbacks.OnExceptionCheckpoint(tmp_path)
        with pytest.raises(ArithmeticError, match="enough"):
            fit(rank, module(seed=rank), max_steps=15, callbacks=[on_exception, callback(on_train_batch_end=look)])
        return said, seen

    _, (said, (alone, told, failed)) = run_processes(run, 2)
    assert same(alone, told)
    assert [line for line in said if "local values of this group" in line]
    engine = torch.load(tmp_path / "on_exception.ckpt.sdiloco/exception/rank_00001.pt", weights_only=True)["engine"]
    names = [name for fragment in engine["fragments"] for name in fragment["names"]]
    assert same(dict(zip(names, engine["local"], strict=True)), failed)


# Loops of one's own


def test_a_loop_of_ones_own_saves_the_mean_and_what_is_frozen_keeps_the_mean_of_what_it_learnt(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        model = made("wide", rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        engine = StreamingDiLoCo(model, inner_optimizers=[optimizer])
        for step in range(1, 41):
            x, y = task(rank, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            engine.step()
        engine.save(tmp_path / "a.pt")
        layer = model[0][0]  # type: ignore[index]
        local = layer.weight.detach().clone()
        layer.requires_grad_(False)
        engine.recut()
        engine.close()
        return local, layer.weight.detach().clone()

    (mine, one), (theirs, other) = run_ranks(run, 2)
    assert error_of(torch.load(tmp_path / "a.pt", weights_only=True)["state_dict"]) < 0.5 * INITIAL
    assert torch.equal(one, other)
    torch.testing.assert_close(one, (mine + theirs) / 2)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_loop_of_fabric_that_never_finishes_saves_what_it_has_trained(world_size: int, tmp_path: Path) -> None:
    """On an exception a rank saves its own values, and waits for nobody."""

    def run(rank: int, world_size: int) -> Any:
        told: list[str] = []
        fabric_room.rank_zero_info = told.append
        strategy: Any = StreamingDiLoCoFabricStrategy(worker_groups=2, sync_every=50, fragments=[["*"]])
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        net = made("wide", rank)
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=2e-3))
        seen: dict[str, dict[str, Tensor]] = {}
        for step in range(1, 61):
            x, y = task(rank // (world_size // 2), step)
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if step == 5 and rank == 0:
                try:
                    raise KeyboardInterrupt
                except KeyboardInterrupt:
                    began = time.monotonic()
                    fabric.save(tmp_path / "interrupted.pt", {"model": model, "optimizer": optimizer})
                    assert time.monotonic() - began < 10
                seen["interrupted"] = held(net)
            if step == 40:
                told.clear()
                fabric.save(tmp_path / "first.pt", {"model": model, "optimizer": optimizer})
                fabric.save(tmp_path / "model.pt", {"model": model})
                seen["local"] = held(net)
        fabric.save(tmp_path / "landed.pt", {"model": model, "optimizer": optimizer})
        return {**seen, "outer": strategy.outer_state_dict()}, told

    ranks = run_processes(run, world_size)
    file = {path.stem: torch.load(path)["model"] for path in tmp_path.glob("*.pt")}
    (mine, told), (theirs, _) = ranks[0], ranks[-1]
    assert same(file["interrupted"], mine["interrupted"])
    assert same(file["first"], file["model"])
    mean = {name: (values + theirs["local"][name]) / 2 for name, values in mine["local"].items()}
    torch.testing.assert_close(file["first"], mean)
    assert error_of(file["first"]) < 0.5 * INITIAL
    assert same(file["landed"], mine["outer"])
    assert ["holds the mean of the worker groups" in line for line in told] == [True, True, False]
    assert "Before you save the last one call fabric.strategy.finish()" in told[2]


# Validation


class Average:
    """A moving average as people write it: it takes the place of the weights for a validation."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay, self.values, self.before = decay, dict[str, Tensor](), dict[str, Tensor]()
        self.expected: list[dict[str, Tensor]] = []

    def update(self, module: nn.Module) -> None:
        for name, values in held(module).items():
            self.values[name] = torch.lerp(values, self.values.get(name, values), self.decay)

    def swap_in(self, module: nn.Module) -> None:
        if self.values:
            self.before = held(module)
            module.load_state_dict(self.values)
            self.expected += [dict(self.values)] * 2  # batches of a validation

    def swap_out(self, module: nn.Module) -> None:
        if self.before:
            module.load_state_dict(self.before)
            self.before = {}

    def callback(self, distribution: str, begin: str, end: str) -> Any:
        hooks = {"on_train_batch_end": self.update, begin: self.swap_in, end: self.swap_out}
        return callback(distribution, **{name: lambda _, module, do=do: do(module) for name, do in hooks.items()})

    def hook(self, module: Any, begin: str, end: str) -> None:
        """Lets the module itself swap."""
        module.on_train_batch_end = lambda *_: self.update(module)
        setattr(module, begin, lambda: self.swap_in(module))
        setattr(module, end, lambda: self.swap_out(module))


SWAPS = [
    ("on_validation_start", "on_validation_end"),
    ("on_validation_epoch_start", "on_validation_epoch_end"),
    ("on_validation_model_eval", "on_validation_model_train"),
]
OWNERS = [("callback", SWAPS[0]), ("callback", SWAPS[1]), ("callbacks", SWAPS[0])] + [("module", own) for own in SWAPS]


@pytest.mark.parametrize(("distribution", "owners"), [(LIGHTNING, OWNERS), (OTHER, OWNERS[2:4])])
def test_validation_sees_weights_that_are_swapped_in_and_training_goes_on_from_the_local_ones(
    distribution: str, owners: list[tuple[str, tuple[str, str]]]
) -> None:
    def run(rank: int, world_size: int) -> Any:
        def fitted(owner: str, hooks: tuple[str, str] = ("", ""), validation: Any = None) -> Any:
            average, model = Average(), module(distribution)
            # They put back in the order in which they swapped in: the second puts back what the first had put in.
            before = [Average(0.5).callback(distribution, *hooks)] if owner == "callbacks" else []
            own = [average.callback(distribution, *hooks)] if owner.startswith("callback") else []
            if owner == "module":
                average.hook(model, *hooks)
            strategy = fits.strategy(distribution, **SHORT)
            choices = {"max_steps": 11, "val_check_interval": 2, "num_sanity_val_steps": 1, "validation": validation}
            fit(rank, model, 1, strategy, callbacks=before + own, **choices)
            return model, average.expected

        plain, _ = fitted("nobody")
        for owner in owners:
            model, expected = fitted(*owner, validation=Again())
            assert len(model.trained) == 11
            assert all(same(one, other) for one, other in zip(model.trained, plain.trained, strict=True)), owner
            assert same(held(model), held(plain)), owner
            # The sanity check comes before there is an average.
            assert len(model.seen) == 11
            assert all(same(one, other) for one, other in zip(model.seen[1:], expected, strict=True)), owner

    run_processes(run, 2)


def test_testing_prediction_and_an_exception_in_the_midst_of_a_fit_see_the_outer_model_and_leave_the_local_one() -> (
    None
):
    """Lightning cannot train on after that, with any strategy."""

    def run(rank: int, world_size: int) -> Any:
        found: list[bool] = []

        def evaluate(trainer: Any, module: Any) -> None:
            local[:] = [held(module)]
            if trainer.global_step == 8:
                outer = trainer.strategy.outer_state_dict()
                getattr(trainer, which)(module, Again())
                found.extend([same(module.seen[-1], outer), same(held(module), local[0]), same(outer, local[0])])
                raise ArithmeticError("enough")

        def fail(trainer: Any, module: Any) -> None:
            if trainer.global_step == 6:
                raise ArithmeticError("enough")

        for which in ("test", "predict", "validate"):
            model, local = module(seed=rank), list[Any]()
            model.log = lambda *args, **kwargs: None
            model.test_step = model.predict_step = model.validation_step
            choices: dict[str, Any] = {"max_steps": 11, "callbacks": [callback(on_train_batch_end=evaluate)]}
            if which == "validate":
                Average().hook(model, *SWAPS[0])
                choices["callbacks"].append(callback(on_validation_batch_end=fail))
                choices |= {"val_check_interval": 6, "validation": Again()}
            with pytest.raises(ArithmeticError, match="enough"):
                fit(rank, model, 1, fits.strategy(**SHORT), **choices)
        return [*found, same(held(model), local[0]), len(model.trained)]

    assert run_processes(run, 2) == [[True, True, False] * 2 + [True, 6]] * 2


def files_of(path: Path) -> dict[str, Any]:
    """What every rank has beside a checkpoint, without the metrics of validations."""
    states = {file.name: torch.load(file, weights_only=True) for file in Path(f"{path}.sdiloco").rglob("rank_*.pt")}
    assert states
    for state in states.values():
        del state["metrics"]
    return states


@pytest.mark.parametrize(("size", "is_sharded", "compression"), [(1, False, "sparse"), (2, True, "fp4")])
def test_means_of_the_first_round_change_no_bit_of_training_and_are_in_the_best_checkpoint(
    size: int, is_sharded: bool, compression: str, tmp_path: Path
) -> None:
    """Checkpoints during the first round, at the end of validations and between them; they resume exactly."""
    steps = 13

    def run(rank: int, world_size: int, name: str, resume: Path | None = None) -> Any:
        validates, folder = name != "plain", tmp_path / name
        by_loss = {"monitor": "val_loss", "save_on_train_epoch_end": False}
        callbacks = [saving(folder, every_n_train_steps=1)] + validates * [saving(folder / "best", **by_loss)]
        settings = {"worker_groups": 2, "compression": compression, **SHORT}
        kind = lightning_sdiloco.StreamingDiLoCoStrategy
        if is_sharded:
            kind = lightning_sdiloco.StreamingDiLoCoModelParallelStrategy
            settings |= {"data_parallel_size": size, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
        strategy, model = kind(**settings), module(seed=rank // size, is_sharded=is_sharded)
        importlib.import_module(LIGHTNING).seed_everything(rank, verbose=False)
        choices = {"max_steps": steps, "val_check_interval": 1, "num_sanity_val_steps": 0, "callbacks": callbacks}
        fit(rank, model, size, strategy, resume, validation=Again(length=1) if validates else None, **choices)
        return model.seen, strategy.outer_state_dict(), strategy.schedule.first_round

    plain, validated = run_processes(run, 2 * size, "plain"), run_processes(run, 2 * size, "validated")
    assert plain[0][2] < steps - 1
    seen = validated[0][0]
    for (_, outer, _), (own, other, _) in zip(plain, validated, strict=True):
        assert same(outer, other)
        assert len(own) == steps
        assert all(same(one, expected) for one, expected in zip(own, seen, strict=True))
    for step in range(1, steps):
        paths = [tmp_path / name / f"step={step}.ckpt" for name in ("plain", "validated", "validated/best")]
        own, theirs, best = map(files_of, paths)
        assert same_states(own, theirs)
        assert same_states(own, best)
        for path in paths:
            assert same(torch.load(path, weights_only=True)["state_dict"], seen[step - 1])
    for step in (2, 5):
        path = tmp_path / "validated" / "best" / f"step={step}.ckpt"
        for resumed, through in zip(run_processes(run, 2 * size, f"from {step}", path), validated, strict=True):
            assert same(resumed[1], through[1])
            assert all(same(one, two) for one, two in zip(resumed[0], through[0][step:], strict=True))


def test_early_stopping_and_the_best_checkpoint_go_beside_ddp_from_the_first_steps_on(tmp_path: Path) -> None:
    """The defaults, which launch nothing for 100 steps, and a validation after every 25."""

    def run(rank: int, world_size: int, strategy: str) -> Any:
        losses: list[float] = []
        keep = callback(on_validation_end=lambda trainer, _: losses.append(float(trainer.callback_metrics["val_loss"])))
        stop = importlib.import_module(LIGHTNING).callbacks.EarlyStopping("val_loss", patience=2)
        best = saving(tmp_path / strategy, monitor="val_loss", save_top_k=1)
        model = module()
        model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.02)
        choices = {"max_steps": 150, "val_check_interval": 25, "check_val_every_n_epoch": None}
        loaders = {"loader": Again(rank, 60), "validation": Again(rank, 60), "num_sanity_val_steps": 0}
        own = "ddp" if strategy == "ddp" else fits.strategy()
        trainer = fit(rank, model, 1, own, callbacks=[keep, stop, best], **choices, **loaders)
        return trainer.global_step, losses, best.best_model_path

    ours, ddp = run_processes(run, 2, "streaming"), run_processes(run, 2, "ddp")
    assert ours[0] == ours[1]
    (steps, losses, best), (_, expected, _) = ours[0], ddp[0]
    assert steps == ddp[0][0] == 150
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert losses == pytest.approx(expected, rel=0.2)
    assert Path(best).name == "step=150.ckpt"


def test_groups_that_do_not_all_validate_see_the_outer_model_and_wait_for_nobody() -> None:
    """One group has nothing to validate with, and one validates by itself in a callback."""

    def run(rank: int, world_size: int, is_alone: bool) -> Any:
        def validate(trainer: Any, module: Any) -> None:
            if is_alone and rank == 1 and trainer.global_step in (3, 5):
                first = trainer._logger_connector._first_loop_iter
                trainer.validating = True
                trainer.fit_loop.epoch_loop.val_loop.run()
                trainer.training = True
                trainer._logger_connector._first_loop_iter = first

        model = module(seed=rank)
        model.log = lambda *args, **kwargs: None
        model.allow_zero_length_dataloader_with_multiple_devices = True
        choices = {"max_steps": 11, "val_check_interval": 2, "num_sanity_val_steps": 0, "limit_val_batches": 1.0}
        validation = Again(length=2 if is_alone else 2 * rank)
        callbacks = [callback(on_train_batch_end=validate)]
        trainer = fit(rank, model, 1, fits.strategy(**SHORT), validation=validation, callbacks=callbacks, **choices)
        return [same(values, held(module(seed=0))) for values in model.seen], trainer.global_step

    (of_first, steps), (of_second, _) = run_processes(run, 2, False)
    assert (of_first, steps) == ([], 11)
    # The outer model is the first one until fragments land.
    assert of_second[:6] == [True] * 6
    assert not of_second[-1]
    (together, steps), (with_own, _) = run_processes(run, 2, True)
    assert steps == 11
    assert together[:6] == [False] * 6
    # After steps 2, 3 by itself, 4, 5 by itself and 6, with two batches each.
    assert with_own[:10] == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2


@pytest.mark.parametrize("evaluate", ["outer", "mean"])
def test_what_is_validated_at_the_end_of_an_epoch_is_in_the_checkpoint_that_follows(
    evaluate: str, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> Any:
        means: list[bool] = []

        def look(trainer: Any, module: Any) -> None:
            engine = trainer.strategy.engine
            if engine is not None and not engine.is_finished:
                means.append(engine.steps_in_rounds < engine.schedule.first_round)

        model = module(seed=rank)
        callbacks = [callback(on_validation_start=look), saving(tmp_path, monitor="val_loss", filename="{epoch}")]
        choices = {"max_epochs": 5, "limit_train_batches": 3, "num_sanity_val_steps": 0, "validation": Again()}
        fit(rank, model, 1, fits.strategy(evaluate=evaluate, **SHORT), callbacks=callbacks, **choices)
        return model.seen[::2], means

    (seen, in_first_round), (other, _) = run_processes(run, 2)
    assert in_first_round == [True] * 3 + [False]
    assert all(same(one, two) for one, two in zip(seen, other, strict=True))
    for epoch in range(5):
        assert same(saved(tmp_path)[f"epoch={epoch}.ckpt"], seen[epoch])
