"""Validation of large models inside a fit: weights that users swap, and the mean of the groups in the first round."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import fits
from tests.engine.test_group_mean import same as same_states
from tests.fits import LIGHTNING
from tests.large.models import Large, batch, made, same
from tests.large.test_fits import Batches, Sharded
from tests.ranks import run_processes
from tests.sharded import whole

pytestmark = [pytest.mark.large, pytest.mark.timeout(180)]

OTHER = "pytorch_lightning"
SETTINGS: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:1"}
STEPS = 11


def held(module: nn.Module) -> dict[str, Tensor]:
    return {name: values.detach().clone() for name, values in module.named_parameters()}


def put(module: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])


class Average:
    """A moving average as people write it: it takes the place of the weights for a validation."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay, self.values, self.before = decay, dict[str, Tensor](), dict[str, Tensor]()

    def update(self, module: nn.Module) -> None:
        for name, values in held(module).items():
            self.values[name] = torch.lerp(values, self.values.get(name, values), self.decay)

    def swap_in(self, module: nn.Module) -> None:
        if self.values:
            self.before = held(module)
            put(module, self.values)

    def swap_out(self, module: nn.Module) -> None:
        if self.before:
            put(module, self.before)
            self.before = {}


def callback(distribution: str, average: Average, begin: str, end: str) -> Any:
    """The average as a callback that swaps in two of its hooks."""

    class Swapping(importlib.import_module(distribution).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            average.update(module)

    setattr(Swapping, begin, lambda self, trainer, module: average.swap_in(module))
    setattr(Swapping, end, lambda self, trainer, module: average.swap_out(module))
    return Swapping()


def module(distribution: str, average: Average | None = None, begin: str = "", end: str = "", seed: int = 0) -> Any:
    """A module of 220,000 parameters that keeps what it trains from and what it validates."""

    class Seen(importlib.import_module(distribution).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = made("wide", seed)
            self.trained, self.seen, self.expected = [], [], []

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.trained.append(held(self))
            return nn.functional.mse_loss(self.net(parts[0]), parts[1])

        def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
            self.seen.append(held(self))
            self.expected.append({} if average is None else {n: v.clone() for n, v in average.values.items()})
            self.log("val_loss", nn.functional.mse_loss(self.net(parts[0]), parts[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    if begin and average is not None:

        def update(self: Any, *args: Any) -> None:
            average.update(self)

        Seen.on_train_batch_end = update
        setattr(Seen, begin, lambda self: average.swap_in(self))
        setattr(Seen, end, lambda self: average.swap_out(self))
    return Seen()


class Loader(Batches):
    """The same few batches for every validation."""

    def __init__(self, group: int, length: int = 2) -> None:
        super().__init__(group, 0, 1)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter([batch(self.place[0], 1_000 + step) for step in range(self.length)])


def fit(distribution: str, rank: int, model: Any, loader: Any = None, **choices: Any) -> Any:
    """Fits in two groups of one rank, and validates every second step."""
    strategy = fits.strategy(distribution, **{**SETTINGS, **choices.pop("settings", {})})
    validating = {"val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer = fits.trainer(distribution, strategy=strategy, devices=2, **{"max_steps": STEPS, **validating, **choices})
    trainer.fit(model, Batches(rank, 0, 1), Loader(9) if loader is None else loader)
    return trainer


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
        def fitted(owner: str = "", hooks: tuple[str, str] = ("", "")) -> Any:
            average, callbacks = Average(), []
            if owner.startswith("callback"):
                callbacks = [callback(distribution, average, *hooks)]
            if owner == "callbacks":
                # They put back in the order in which they swapped in: the second puts back what the first had put in.
                callbacks = [callback(distribution, Average(0.5), *hooks), *callbacks]
            model = module(distribution, average, *(hooks if owner == "module" else ("", "")))
            fit(distribution, rank, model, callbacks=callbacks, **({} if owner else {"limit_val_batches": 0}))
            return model, held(model)

        plain, left = fitted()
        for owner in owners:
            model, now = fitted(*owner)
            assert len(model.trained) == STEPS
            assert all(same(one, other) for one, other in zip(model.trained, plain.trained, strict=True)), owner
            assert same(now, left), owner
            # The sanity check comes before there is an average.
            assert len(model.seen) == 11
            assert all(same(one, other) for one, other in zip(model.seen[1:], model.expected[1:], strict=True)), owner

    run_processes(run, 2)


def test_after_an_exception_in_validation_the_module_holds_the_local_values() -> None:
    def run(rank: int, world_size: int) -> bool:
        average = Average()
        model = module(LIGHTNING, average, *SWAPS[0])

        class Failing(importlib.import_module(LIGHTNING).Callback):  # type: ignore[misc]
            def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                if trainer.global_step == 6:
                    raise ArithmeticError("a metric that fails")

            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                local[:] = [held(module)]

        local: list[dict[str, Tensor]] = []
        with pytest.raises(ArithmeticError):
            fit(LIGHTNING, rank, model, callbacks=[Failing()])
        return same(held(model), local[0])

    assert run_processes(run, 2) == [True, True]


# The mean of the groups


def files_of(path: Path) -> dict[str, Any]:
    """What every rank has beside a checkpoint, without the metrics of validations."""
    states = {file.name: torch.load(file, weights_only=True) for file in Path(f"{path}.sdiloco").rglob("rank_*.pt")}
    assert states
    for state in states.values():
        del state["metrics"]
    return states


@pytest.mark.parametrize(
    ("size", "is_sharded", "compression"), [(1, False, "sparse"), (2, False, "fp4"), (2, True, "fp4")]
)
def test_means_of_the_first_round_change_no_bit_of_training_and_are_in_the_best_checkpoint(
    size: int, is_sharded: bool, compression: str, tmp_path: Path
) -> None:
    """Checkpoints during the first round, at the end of validations and between them; they resume exactly."""
    steps = 13

    def run(rank: int, world_size: int, name: str, resume: str | None = None) -> Any:
        group, validates = rank // size, name != "plain"
        base = Sharded if is_sharded else Large
        seen: list[dict[str, Tensor]] = []

        class Seen(base):  # type: ignore[misc, valid-type]
            def on_validation_epoch_end(self) -> None:
                if not self.trainer.sanity_checking:
                    seen.append({n: whole(values).clone() for n, values in self.named_parameters()})

        save = importlib.import_module(LIGHTNING).callbacks.ModelCheckpoint
        folder = tmp_path / name
        by_step = save(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        by_loss = save(
            folder / "best", monitor="val_loss", filename="{step}", save_top_k=-1, save_on_train_epoch_end=False
        )
        sizes = {"data_parallel_size": size, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
        package = importlib.import_module("lightning_sdiloco")
        kind = package.StreamingDiLoCoModelParallelStrategy if is_sharded else package.StreamingDiLoCoStrategy
        strategy = kind(worker_groups=2, compression=compression, **SETTINGS, **(sizes if is_sharded else {}))
        trainer = fits.trainer(
            strategy=strategy,
            devices=world_size,
            max_steps=steps,
            callbacks=[by_step, by_loss] if validates else [by_step],
            enable_checkpointing=True,
            **({"val_check_interval": 1} if validates else {"limit_val_batches": 0}),
        )
        model = Seen("wide", seed=group)
        importlib.import_module(LIGHTNING).seed_everything(rank, verbose=False)
        trainer.fit(model, Batches(group, rank % size, size), Loader(9), ckpt_path=resume)
        return seen, strategy.outer_state_dict(), strategy.schedule.first_round

    plain, validated = run_processes(run, 2 * size, "plain"), run_processes(run, 2 * size, "validated")
    first_round = plain[0][2]
    assert first_round < steps - 1
    for (_, outer, _), (seen, other, _) in zip(plain, validated, strict=True):
        assert same(outer, other)
        assert len(seen) == steps
        assert all(same(one, expected) for one, expected in zip(seen, validated[0][0], strict=True))
    seen = validated[0][0]
    for step in range(1, steps):
        own, theirs = (tmp_path / name / f"step={step}.ckpt" for name in ("plain", "validated"))
        best = tmp_path / "validated" / "best" / f"step={step}.ckpt"
        assert same_states(files_of(own), files_of(theirs))
        assert same_states(files_of(own), files_of(best))
        one, other, shown = (torch.load(path, weights_only=True)["state_dict"] for path in (own, theirs, best))
        assert same(one, other)
        assert same(shown, seen[step - 1])
        assert same(one, shown)
    for step in (2, 5):
        path = str(tmp_path / "validated" / "best" / f"step={step}.ckpt")
        for resumed, through in zip(run_processes(run, 2 * size, f"from {step}", path), validated, strict=True):
            assert same(resumed[1], through[1])
            assert all(same(one, two) for one, two in zip(resumed[0][::-1], through[0][::-1], strict=False))


def test_early_stopping_and_the_best_checkpoint_go_beside_ddp_from_the_first_steps_on(tmp_path: Path) -> None:
    """The defaults, which launch nothing for 100 steps, and a validation after every 25."""

    def run(rank: int, world_size: int, strategy: str) -> Any:
        callbacks = importlib.import_module(LIGHTNING).callbacks
        losses: list[float] = []

        class Keep(importlib.import_module(LIGHTNING).Callback):  # type: ignore[misc]
            def on_validation_end(self, trainer: Any, module: Any) -> None:
                losses.append(float(trainer.callback_metrics["val_loss"]))

        stop = callbacks.EarlyStopping("val_loss", patience=2)
        best = callbacks.ModelCheckpoint(tmp_path / strategy, monitor="val_loss", filename="{step}")
        model = module(LIGHTNING)
        model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.02)
        trainer = fits.trainer(
            strategy="ddp" if strategy == "ddp" else fits.strategy(),
            devices=2,
            max_steps=150,
            val_check_interval=25,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            callbacks=[Keep(), stop, best],
            enable_checkpointing=True,
        )
        trainer.fit(model, Epochs(rank), Epochs(rank))
        return trainer.global_step, losses, best.best_model_path

    ours, ddp = run_processes(run, 2, "streaming"), run_processes(run, 2, "ddp")
    assert ours[0] == ours[1]
    (steps, losses, best), (_, expected, _) = ours[0], ddp[0]
    assert steps == ddp[0][0] == 150
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert losses == pytest.approx(expected, rel=0.2)
    assert Path(best).name == "step=150.ckpt"


class Epochs:
    """Sixty batches of one task, those of a group in every epoch."""

    def __init__(self, group: int) -> None:
        self.group = group

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Any:
        for step in range(len(self)):
            x, _ = batch(self.group, step)
            yield x, x[:, :4]


def test_groups_that_do_not_all_validate_see_the_outer_model_and_wait_for_nobody() -> None:
    """One group has nothing to validate with, and one validates by itself in a callback."""

    def run(rank: int, world_size: int, is_alone: bool) -> Any:
        alone: list[int] = []

        class Alone(importlib.import_module(LIGHTNING).Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                if is_alone and rank == 1 and trainer.global_step in (3, 5):
                    alone.append(trainer.global_step)
                    first = trainer._logger_connector._first_loop_iter
                    trainer.validating = True
                    trainer.fit_loop.epoch_loop.val_loop.run()
                    trainer.training = True
                    trainer._logger_connector._first_loop_iter = first

        model = module(LIGHTNING, seed=rank)
        model.log = lambda *args, **kwargs: None
        model.allow_zero_length_dataloader_with_multiple_devices = True
        loader = Loader(9, 2 if is_alone else 2 * rank)
        trainer = fit(LIGHTNING, rank, model, loader, callbacks=[Alone()], num_sanity_val_steps=0)
        first = held(module(LIGHTNING, seed=0))
        return [same(values, first) for values in model.seen], trainer.global_step

    (of_first, steps), (of_second, _) = run_processes(run, 2, False)
    assert (of_first, steps) == ([], STEPS)
    # The outer model is the first one until fragments land.
    assert of_second[:6] == [True] * 6
    assert not of_second[-1]
    (together, steps), (with_own, _) = run_processes(run, 2, True)
    assert steps == STEPS
    assert together[:6] == [False] * 6
    # After steps 2, 3 by itself, 4, 5 by itself and 6, with two batches each.
    assert with_own[:10] == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2


@pytest.mark.parametrize("evaluate", ["outer", "mean"])
def test_what_is_validated_at_the_end_of_an_epoch_is_in_the_checkpoint_that_follows(
    evaluate: str, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> Any:
        model, means = module(LIGHTNING, seed=rank), []

        class Look(importlib.import_module(LIGHTNING).Callback):  # type: ignore[misc]
            def on_validation_start(self, trainer: Any, module: Any) -> None:
                engine = trainer.strategy.engine
                if engine is not None and not engine.is_finished:
                    # Inside a validation, what is shown stays.
                    means.append(engine.steps_in_rounds < engine.schedule.first_round)

        save = importlib.import_module(LIGHTNING).callbacks.ModelCheckpoint
        best = save(tmp_path, monitor="val_loss", filename="{epoch}", save_top_k=-1)
        fit(
            LIGHTNING,
            rank,
            model,
            callbacks=[Look(), best],
            enable_checkpointing=True,
            settings={"evaluate": evaluate},
            max_steps=-1,
            max_epochs=5,
            limit_train_batches=3,
            val_check_interval=1.0,
            num_sanity_val_steps=0,
        )
        return model.seen[::2], means

    (seen, in_first_round), (other, _) = run_processes(run, 2)
    assert in_first_round == [True] * 3 + [False]
    assert all(same(one, two) for one, two in zip(seen, other, strict=True))
    for epoch in range(5):
        saved = torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)
        assert same(saved["state_dict"], seen[epoch])


@pytest.mark.parametrize("which", ["test", "predict"])
def test_testing_and_prediction_in_the_midst_of_a_fit_see_the_outer_model(which: str) -> None:
    """Lightning cannot train on after that, with any strategy."""

    def run(rank: int, world_size: int) -> Any:
        model, seen = module(LIGHTNING, seed=rank), []

        class Evaluating(importlib.import_module(LIGHTNING).Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                if trainer.global_step == 8:
                    outer, local = trainer.strategy.outer_state_dict(), held(module)
                    getattr(trainer, which)(module, Loader(9))
                    seen.extend([same(model.seen[-1], outer), same(held(module), local), same(outer, local)])
                    raise ArithmeticError("enough")

        model.log = lambda *args, **kwargs: None
        type(model).test_step = type(model).predict_step = type(model).validation_step
        with pytest.raises(ArithmeticError, match="enough"):
            fit(LIGHTNING, rank, model, callbacks=[Evaluating()], limit_val_batches=0)
        return seen

    assert run_processes(run, 2) == [[True, True, False]] * 2
