"""Worker groups that share one sharded model: the same training as without, and each value is sent once."""

import inspect
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import lightning_sdiloco
from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES
from lightning_sdiloco.lightning import options as auto_settings
from lightning_sdiloco.lightning.model_format import ShardedModel
from lightning_sdiloco.planning.link import Link
from tests import fits, sharded
from tests.fits import LIGHTNING
from tests.ranks import run_processes, run_ranks
from tests.training import batch

# One layer each, so that a fragment may lie on a part of the ranks only.
CHOICES: dict[str, Any] = {"sync_every": 5, "overlap_steps": 2, "fragments": "strided:1", "compression": "fp32"}
# Up to eight ranks may share few cores.
PATIENCE = 180.0


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


def fit_plain(rank: int, world_size: int, groups: int, steps: int, inner: str = "sgd", **choices: Any) -> fits.Trained:
    return fits.fit(rank, world_size, groups, steps, {**CHOICES, **choices}, inner=inner, make=sharded.plain)


def fit_sharded(*args: Any, **choices: Any) -> list[dict[str, Any]]:
    (groups, sizes, steps), chosen = args, {**CHOICES, **choices}
    fit = partial(sharded.fit, **chosen)
    return list(run_processes(fit, groups * sizes[0] * sizes[1], groups, sizes, steps, timeout=PATIENCE))


def test_with_one_rank_per_group_the_outer_parameters_are_those_of_the_first_strategy_to_the_bit(
    distribution: str,
) -> None:
    for inner, compression in (("sgd", "fp32"), ("adamw", "fp4")):
        expected = run_processes(partial(fit_plain, inner=inner, compression=compression), 2, 2, 24)
        actual = fit_sharded(2, (1, 1), 24, distribution=distribution, inner=inner, compression=compression)
        for one, other in zip(actual, expected, strict=True):
            assert all(torch.equal(one["outer"][name], other["outer"][name]) for name in other["outer"])
            assert one["report"]["bytes_sent"] == other["report"]["bytes_sent"]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (3, 1)])
def test_what_happens_inside_a_group_does_not_change_the_outer_parameters(sizes: tuple[int, int]) -> None:
    # Three data-parallel ranks do not divide a batch of eight, and so weigh its examples unequally.
    steps = 24
    alone = run_processes(fit_plain, 2, 2, steps)[0]
    ranks = fit_sharded(2, sizes, steps)
    expected = alone if sizes[0] != 3 else run_processes(fit_plain, 6, 2, steps)[0]
    for rank in ranks:
        assert distance(rank["outer"], expected["outer"]) < 1e-5
        # The model is left with the outer parameters, the same bits on all ranks of all groups.
        assert all(torch.equal(rank["model"][name], values) for name, values in rank["outer"].items())
        assert all(torch.equal(values, ranks[0]["outer"][name]) for name, values in rank["outer"].items())
    assert distance(expected["outer"], sharded.plain(seed=0).net.state_dict()) > 0.1
    assert_sent_once([rank["report"] for rank in ranks], alone["report"])


def assert_sent_once(ranks: list[dict[str, float]], alone: dict[str, float]) -> None:
    """The ranks of a group send together what one rank sends alone."""
    size = len(ranks) // 2
    flights = len(sharded.even(0)) // 2 + 1 + alone["launches"]
    # A rank without a value of a fragment sends a zero, and each has a control vector of its own.
    padding = 4 * flights * (size - 1)
    expected = alone["bytes_sent"] + CONTROL_BYTES * flights * (size - 1)
    for group in (ranks[:size], ranks[size:]):
        assert expected <= sum(rank["bytes_sent"] for rank in group) <= expected + padding
        assert all(rank[key] == alone[key] for rank in group for key in ("inner_steps", "launches", "landings"))


class InDouble(nn.Linear):
    """A layer whose parameters are float64 among others that are float32."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values.double()).to(values.dtype)


def of_two_dtypes(seed: int, make: Callable[[int], nn.Sequential] = sharded.even) -> nn.Sequential:
    net = make(seed)
    net[2] = InDouble(12, 7).double()
    return net


def test_parameters_of_several_dtypes_are_trained_as_without_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "even", of_two_dtypes)
    alone = run_processes(fit_plain, 2, 2, 24)[0]
    for rank in fit_sharded(2, (2, 1), 24):
        assert {values.dtype for values in rank["model"].values()} == {torch.float32, torch.float64}
        assert distance(rank["outer"], alone["outer"]) < 1e-5
        assert all(torch.equal(rank["model"][name].float(), values) for name, values in rank["outer"].items())


def losses(rank: int, world_size: int, inner: str, sizes: tuple[int, int] | None, seed: int) -> list[float]:
    """The losses of a group on its own data, over the last steps."""
    seen: list[float] = []
    base = sharded.plain if sizes is None else sharded.sharded
    model = base(LIGHTNING, inner, seed)
    step = type(model).training_step

    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss: Tensor = step(self, parts, index)
        seen.append(float(loss))
        return loss

    type(model).training_step = training_step
    choices = {**CHOICES, "worker_groups": 2, "compression": "fp4"}
    if sizes is None:
        chosen, data, place = fits.strategy(**choices), 1, (rank, 0)
    else:
        chosen = sharded.strategy(data_parallel_size=sizes[0], tensor_parallel_size=sizes[1], **choices)
        size, data = sizes[0] * sizes[1], sizes[0]
        place = (rank // size, rank % size // sizes[1])
    loader = DataLoader(fits.Batches(*place, data), batch_size=None)
    fits.trainer(strategy=chosen, devices=world_size, max_steps=60).fit(model, loader)
    return seen[-20:]


def test_with_fp4_the_losses_agree_within_the_spread_of_seeds() -> None:
    def mean(sizes: tuple[int, int] | None, seed: int) -> float:
        world_size = 2 if sizes is None else 2 * sizes[0] * sizes[1]
        ranks = run_processes(losses, world_size, "adamw", sizes, seed, timeout=PATIENCE)
        return float(torch.tensor(ranks).mean())

    seeds = torch.tensor([mean(None, seed) for seed in range(4)])
    for sizes in ((2, 1), (1, 2)):
        assert abs(mean(sizes, 0) - float(seeds[0])) < float(seeds.std())


@pytest.mark.parametrize("sizes", [(2, 1)])
def test_validation_sees_the_outer_model_and_changes_nothing(sizes: tuple[int, int]) -> None:
    # FSDP2 keeps the parameters of the outermost module whole after a validation, as long as nobody tells it not to.
    without = fit_sharded(2, sizes, 9, inner="adamw")
    validated = fit_sharded(2, sizes, 9, inner="adamw", validation=1)
    for one, other in zip(validated, without, strict=True):
        for step, values in other["trace"].items():
            assert all(torch.equal(one["trace"][step][name], values[name]) for name in values), step
        assert all(torch.equal(one["outer"][name], other["outer"][name]) for name in other["outer"])
    model = sharded.plain(seed=0)
    model.net.load_state_dict(validated[0]["outer"])
    # Nine validations have each taken the first batch of their loader.
    x, y = batch(9, 1)
    expected = float(nn.functional.mse_loss(model.net(x), y))
    assert all(abs(rank["logged"]["seen"] - expected) < 1e-6 for rank in validated)


def test_validating_before_between_and_after_fits_sees_the_outer_model() -> None:
    def fit(rank: int, world_size: int) -> dict[str, Any]:
        model = sharded.sharded(seed=rank // 2)
        data = DataLoader(fits.Batches(9, 0, 1), batch_size=None)

        def seen() -> float:
            metrics = trainer.validate(model, data, verbose=False)
            return float(metrics[0]["seen"])

        chosen = sharded.strategy(worker_groups=2, data_parallel_size=2, tensor_parallel_size=1, **CHOICES)
        trainer = fits.trainer(strategy=chosen, devices=world_size, max_steps=7, limit_val_batches=1)
        before = seen()
        trainer.fit(model, sharded.StatefulBatches(rank // 2, rank % 2, 2, 100))
        after_first = seen()
        trainer.fit_loop.epoch_loop.max_steps = 12
        trainer.fit(model, sharded.StatefulBatches(rank // 2, rank % 2, 2, 100))
        return {"seen": (before, after_first, seen()), "outer": chosen.outer_state_dict()}

    ranks = run_processes(fit, 4)
    assert all(rank["seen"] == ranks[0]["seen"] for rank in ranks)
    model, (x, y) = sharded.plain(seed=0), batch(9, 1)
    assert abs(ranks[0]["seen"][0] - float(nn.functional.mse_loss(model.net(x), y).detach())) < 1e-6
    model.load_state_dict(ranks[0]["outer"])
    assert abs(ranks[0]["seen"][2] - float(nn.functional.mse_loss(model.net(x), y).detach())) < 1e-6
    assert len(set(ranks[0]["seen"])) == 3


def test_a_loop_of_your_own_trains_a_sharded_model() -> None:
    def train(rank: int, world_size: int) -> dict[str, Any]:
        model, mesh = sharded.even(0), init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "data"))["data"]
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        engine = StreamingDiLoCo(model, worker_groups=2, inner_optimizers=[optimizer], **CHOICES)
        for step in range(1, 21):
            x, y = (part.chunk(2)[rank % 2] for part in batch(rank // 2, step))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            engine.step()
        engine.finish()
        return engine.outer_state_dict()

    expected = run_processes(fit_plain, 2, 2, 20)[0]["outer"]
    for outer in run_ranks(train, 4):
        assert distance(outer, expected) < 1e-5


def test_saving_before_the_first_step_and_within_an_accumulation_changes_nothing(tmp_path: Path) -> None:
    callback = sharded.callbacks_of().Callback

    class Saver(callback):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step % 3 != 1:
                trainer.save_checkpoint(tmp_path / "some.ckpt")

        def on_train_start(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / "some.ckpt")

    for inner in ("sgd", "adamw"):
        chosen = {"trainer_choices": {"accumulate_grad_batches": 3}, "inner": inner}
        without = fit_sharded(2, (2, 1), 6, **chosen)
        saved = fit_sharded(2, (2, 1), 6, callbacks=[Saver()], **chosen)
        for one, other in zip(saved, without, strict=True):
            assert all(torch.equal(one["outer"][name], other["outer"][name]) for name in other["outer"])
            assert one["report"]["inner_steps"] == other["report"]["inner_steps"] == 6


def test_a_part_that_is_not_finite_in_one_rank_leaves_its_group_out_on_all_its_ranks() -> None:
    def fit(rank: int, world_size: int) -> dict[str, Any]:
        model, taken = sharded.sharded(inner="adamw", seed=rank // 2), []

        class Spoiler(sharded.callbacks_of().Callback):  # type: ignore[misc, name-defined]
            def on_train_start(self, trainer: Any, module: Any) -> None:
                trainer.optimizers[0].register_step_post_hook(self.spoil)

            def spoil(self, *args: Any) -> None:
                taken.append(1)
                if len(taken) == 5 and rank == 3:
                    # The first lands at once. Of the second the other rank of the group has only finite values.
                    for layer in (model.net[0], model.net[2]):
                        layer.weight.detach().to_local().fill_(float("nan"))

        choices = {**CHOICES, "overlap_steps": 0, "timeout": timedelta(seconds=10)}
        chosen = sharded.strategy(worker_groups=2, data_parallel_size=1, tensor_parallel_size=2, **choices)
        trainer = fits.trainer(strategy=chosen, devices=world_size, max_steps=14, callbacks=[Spoiler()])
        trainer.fit(model, DataLoader(fits.Batches(rank // 2, 0, 1), batch_size=None))
        return chosen.outer_state_dict()

    ranks = run_processes(fit, 4, timeout=PATIENCE)
    for outer in ranks:
        assert all(bool(values.isfinite().all()) for values in outer.values())
        assert all(torch.equal(values, ranks[0][name]) for name, values in outer.items())


@pytest.mark.parametrize(("precision", "sizes"), [("bf16-mixed", (2, 1)), ("bf16-true", (1, 2))])
def test_sharded_models_train_in_lower_precision_with_float32_outer_values(
    precision: str, sizes: tuple[int, int]
) -> None:
    ranks = fit_sharded(2, sizes, 9, trainer_choices={"precision": precision})
    for rank in ranks:
        assert all(values.dtype == torch.float32 for values in rank["outer"].values())
        dtypes = {values.dtype for values in rank["model"].values()}
        assert dtypes == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
        assert all(torch.equal(values, ranks[0]["outer"][name]) for name, values in rank["outer"].items())


def test_data_are_divided_among_groups_and_data_parallel_ranks_and_tensor_parallel_ranks_share_them() -> None:
    def fit(rank: int, world_size: int) -> list[int]:
        model = sharded.sharded(seed=rank // 4)
        seen: list[int] = []
        model.on_train_batch_start = lambda parts, index: seen.extend(parts[2].tolist())
        data = TensorDataset(*batch(0, 1), torch.arange(8))
        chosen = sharded.strategy(worker_groups=2, data_parallel_size=2, tensor_parallel_size=2, **CHOICES)
        trainer = fits.trainer(strategy=chosen, devices=world_size, max_epochs=1)
        trainer.fit(model, DataLoader(data, batch_size=1))
        return seen

    seen = run_processes(fit, 8, timeout=PATIENCE)
    assert seen[::2] == seen[1::2]
    assert sorted(example for examples in seen[::2] for example in examples) == list(range(8))


def test_a_group_that_stalls_between_launches_keeps_no_other_waiting() -> None:
    def fit(rank: int, world_size: int) -> list[float]:
        started: list[float] = []

        class Stalling(sharded.callbacks_of().Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
                if index == 10 and rank // 4 == 1:
                    time.sleep(2)
                started.append(time.monotonic())
                module.log("rank", float(rank), sync_dist=True)

        chosen = sharded.strategy(
            worker_groups=2,
            data_parallel_size=2,
            tensor_parallel_size=2,
            **{**CHOICES, "fragments": [["*"]], "sync_every": 20},
        )
        trainer = fits.trainer(
            strategy=chosen, devices=world_size, max_steps=25, callbacks=[Stalling()], max_time="00:01:00:00"
        )
        data = DataLoader(fits.Batches(rank // 4, rank % 4 // 2, 2), batch_size=None)
        trainer.fit(sharded.sharded(seed=rank // 4), data)
        return started

    ranks = run_processes(fit, 8, timeout=PATIENCE)
    # Nothing has been launched when the other group stalls, before inner step 11.
    assert ranks[0][18] < ranks[7][10]
    assert ranks[0][24] > ranks[7][10], "and a landing waits, or the test would show nothing"


def test_a_rank_that_is_told_to_terminate_ends_all_with_a_checkpoint_that_resumes_exactly(tmp_path: Path) -> None:
    callbacks = sharded.callbacks_of()

    def fit(rank: int, world_size: int, told: int | None, resume: str | None) -> dict[str, Any]:
        class Terminated(callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if rank == 2 and trainer.global_step == told:
                    os.kill(os.getpid(), signal.SIGTERM)

        checkpoint = callbacks.ModelCheckpoint(tmp_path, save_on_exception=False)
        chosen = [Terminated(), checkpoint]
        try:
            return sharded.fit(rank, world_size, 2, (2, 1), 20, LIGHTNING, "adamw", chosen, resume, **CHOICES)
        except SIGTERMException:
            return {}

    plain = run_processes(fit, 4, None, None)
    assert run_processes(fit, 4, 8, None) == [{}] * 4
    (path,) = tmp_path.glob("terminated-*.ckpt")
    for one, other in zip(run_processes(fit, 4, None, str(path)), plain, strict=True):
        assert all(torch.equal(one["outer"][name], other["outer"][name]) for name in other["outer"])


def test_an_exception_in_one_rank_ends_all_and_nobody_waits_to_save(tmp_path: Path) -> None:
    callbacks = sharded.callbacks_of()

    def fit(rank: int, world_size: int) -> None:
        class Failing(callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if rank == 1 and trainer.global_step == 6:
                    raise RuntimeError("this rank fails")

        chosen = [Failing(), callbacks.ModelCheckpoint(tmp_path, save_on_exception=True)]
        timeout = timedelta(seconds=10)
        sharded.fit(rank, world_size, 2, (2, 1), 20, LIGHTNING, "adamw", chosen, timeout=timeout, **CHOICES)

    errors = run_processes(fit, 4, expect_failure=True)
    assert sorted(errors) == [0, 1, 2, 3]
    assert "this rank fails" in errors[1]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".ckpt"]
    assert list(tmp_path.glob("*.sdiloco/exception/rank_00001.pt"))


# The mesh


def test_automatic_sizes_are_those_of_a_group() -> None:
    def shape(devices: int, nodes: int, worker_groups: Any = "auto", **sizes: Any) -> tuple[int, int, int]:
        chosen = ShardedModel(ShardedModel.base_arguments(**sizes))
        layout = chosen.layout(worker_groups, nodes, devices)
        return (layout.worker_groups, *chosen.mesh.values())

    assert shape(4, 2) == (2, 1, 4)
    assert shape(4, 4, worker_groups=2) == (2, 2, 4)
    assert shape(8, 1, worker_groups=2) == (2, 1, 4)
    assert shape(8, 1, worker_groups=2, data_parallel_size=4) == (2, 4, 1)
    assert shape(8, 1, worker_groups=2, tensor_parallel_size=2) == (2, 2, 2)
    assert shape(8, 1, data_parallel_size=2, tensor_parallel_size=2) == (2, 2, 2)
    assert shape(3, 1) == (3, 1, 1)
    with pytest.raises(ValueError, match="do not fill a worker group, which has 4 ranks"):
        shape(8, 1, worker_groups=2, data_parallel_size=3)
    with pytest.raises(ValueError, match="tensor_parallel_size=0 is out of range"):
        shape(8, 1, tensor_parallel_size=0)


def test_sizes_that_do_not_fill_a_group_are_refused_inside_the_trainer() -> None:
    with pytest.raises(ValueError, match="do not fill a worker group"):
        fits.trainer(strategy=sharded.strategy(worker_groups=2, data_parallel_size=3), devices=4)


def test_both_strategies_have_the_same_arguments_with_the_same_words() -> None:
    for package in (lightning_sdiloco, lightning_sdiloco.pytorch_lightning):
        first, second = package.StreamingDiLoCoStrategy, package.StreamingDiLoCoModelParallelStrategy
        arguments = [dict(inspect.signature(kind).parameters) for kind in (first, second)]
        common = list(arguments[0])[: list(arguments[0]).index("start_method")]
        own = ["data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint"]
        own.append("process_group_backend")
        assert list(arguments[1]) == [*common, *own]
        for name in common:
            assert str(arguments[0][name]) == str(arguments[1][name])
            assert described(first, name) == described(second, name)


def described(kind: type, argument: str) -> str:
    found = re.search(rf"\n    {argument}: (.*?)(?=\n    \w+: |\n\n)", inspect.getdoc(kind) or "", re.DOTALL)
    assert found
    return found.group(1)


@pytest.mark.parametrize("distribution", [LIGHTNING, "pytorch_lightning"])
def test_the_name_chooses_the_strategy(distribution: str) -> None:
    trainer = fits.trainer(distribution, strategy="streaming_diloco_model_parallel", devices=1)
    assert type(trainer.strategy) is type(sharded.strategy(distribution))


# What is refused


def refused(change: Callable[[Any], None] = lambda module: None, **trainer_choices: Any) -> str:
    def fit(rank: int, world_size: int) -> str:
        model = sharded.sharded(seed=0)
        configure_model = model.configure_model

        def configure() -> None:
            configure_model()
            change(model)

        type(model).configure_model = lambda self: configure()
        chosen = sharded.strategy(worker_groups=1, data_parallel_size=2, tensor_parallel_size=1, **CHOICES)
        trainer = fits.trainer(strategy=chosen, devices=world_size, max_steps=1, **trainer_choices)
        with pytest.raises(ValueError, match="\\.$") as caught:
            trainer.fit(model, DataLoader(fits.Batches(0, rank, 2), batch_size=None))
        return str(caught.value)

    texts = run_processes(fit, 2)
    assert len(set(texts)) == 1
    return str(texts[0])


def test_parameters_whose_gradients_nobody_averages_are_refused() -> None:
    def change(model: Any) -> None:
        model.extra = nn.Linear(2, 2)

    assert "2 trainable parameters, such as 'extra.weight', are not sharded" in refused(change)


def test_callbacks_and_precisions_that_cannot_work_with_sharded_models_are_refused() -> None:
    callbacks = sharded.callbacks_of()
    assert "copies the whole model" in refused(callbacks=[callbacks.EMAWeightAveraging()])
    assert "unfreezes layers between epochs" in refused(callbacks=[callbacks.BackboneFinetuning()])
    # Lightning itself looks at the precision only where the strategy is an object.
    trainer = fits.trainer(strategy="streaming_diloco_model_parallel", devices=1, precision="64-true")
    with pytest.raises(ValueError, match="precision='64-true' does not work with sharded models"):
        trainer.fit(sharded.sharded(), DataLoader(fits.Batches(0, 0, 1), batch_size=None))


def test_what_becomes_trainable_within_a_fit_is_refused() -> None:
    def fit(rank: int, world_size: int) -> str:
        model = sharded.sharded(seed=0)
        model.on_train_epoch_start = lambda: model.net[0].requires_grad_(model.current_epoch == 0)
        chosen = sharded.strategy(worker_groups=1, data_parallel_size=2, tensor_parallel_size=1, **CHOICES)
        trainer = fits.trainer(strategy=chosen, devices=world_size, max_epochs=2, limit_train_batches=2)
        with pytest.raises(ValueError, match="\\.$") as caught:
            trainer.fit(model, DataLoader(fits.Batches(0, rank, 2), batch_size=None))
        return str(caught.value)

    for text in run_processes(fit, 2):
        assert "Parameters were frozen or became trainable" in text


def test_settings_that_are_chosen_give_the_bits_of_a_run_that_had_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto_settings, "measure_link", lambda topology, timeout: Link(gbit_s=5e-6, round_trip=0.05))
    monkeypatch.setattr(auto_settings.Options, "step_time", lambda self: 0.05)
    names = ("sync_every", "overlap_steps", "fragments")
    auto = run_processes(partial(sharded.fit, **dict.fromkeys(names, "auto")), 4, 2, (2, 1), 100)
    chosen = {name: getattr(auto[0]["settings"], name) for name in names}
    explicit = run_processes(partial(sharded.fit, **chosen), 4, 2, (2, 1), 100)
    assert auto[0]["report"]["landings"] > 0
    for one, other in zip(auto, explicit, strict=True):
        assert all(torch.equal(one["outer"][name], values) for name, values in other["outer"].items())
        assert all(torch.equal(one["model"][name], values) for name, values in other["model"].items())
