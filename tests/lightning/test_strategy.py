"""The strategy in a real Trainer: both distributions, what users read, what is counted, what is shown and saved."""

import gc
import importlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdiloco import StreamingDiLoCo
from tests import fits
from tests.fits import LIGHTNING, fit
from tests.ranks import run_processes
from tests.training import mlp

DISTRIBUTIONS = [LIGHTNING, "pytorch_lightning"]
SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": "strided:1"}
REPORT = {
    "inner_steps",
    "launches",
    "landings",
    "flights_dropped",
    "bytes_sent",
    "bytes_received",
    "exposed_wait_s",
    "in_flight_s",
    "outer_lr",
    "outer_momentum",
    "mixing",
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_name_is_enough(distribution: str) -> None:
    def run(rank: int, world_size: int) -> tuple[str, int, int]:
        trainer = fits.trainer(distribution, strategy="streaming_diloco", devices=2, max_steps=3)
        trainer.fit(fits.module(distribution), DataLoader(fits.Batches(rank, 0, 1), batch_size=None))
        strategy = trainer.strategy
        return type(strategy).__module__, strategy.topology.num_groups, strategy.report()["inner_steps"]

    module = "lightning_pytorch" if distribution == LIGHTNING else distribution
    assert run_processes(run, 2) == [(f"lightning_sdiloco.{module}", 2, 3)] * 2


@pytest.mark.parametrize(("ranks_per_node", "worker_groups", "groups"), [(2, "auto", 2), (4, "auto", 4)])
def test_worker_groups_are_nodes_if_there_are_several_and_devices_otherwise(
    ranks_per_node: int, worker_groups: str, groups: int
) -> None:
    def run(rank: int, world_size: int) -> tuple[int, int]:
        strategy = fits.strategy(worker_groups=worker_groups)
        nodes = world_size // ranks_per_node
        trainer = fits.trainer(strategy=strategy, devices=ranks_per_node, num_nodes=nodes, max_steps=1)
        trainer.fit(fits.module(), DataLoader(fits.Batches(rank, 0, 1), batch_size=None))
        return strategy.topology.num_groups, strategy.topology.group_index

    size = 4 // groups
    assert run_processes(run, 4, ranks_per_node=ranks_per_node) == [(groups, rank // size) for rank in range(4)]


def test_all_that_users_read_is_there_after_the_fit_and_in_on_fit_end(distribution: str) -> None:
    def run(rank: int, world_size: int) -> Any:
        read: dict[str, Any] = {}

        class Reader(importlib.import_module(distribution).Callback):  # type: ignore[misc]
            def on_fit_end(self, trainer: Any, module: Any) -> None:
                read["in_on_fit_end"] = everything(trainer.strategy)

        def everything(strategy: Any) -> tuple[str, list[tuple[str, ...]], list[int], dict[str, Tensor], set[str]]:
            fragments = list(strategy.fragments)
            names, sizes = [f.names for f in fragments], [f.nbytes for f in fragments]
            return str(strategy.schedule), names, sizes, strategy.outer_state_dict(), set(strategy.report())

        trained = fit(
            rank,
            world_size,
            2,
            9,
            SHORT,
            distribution,
            inspect=lambda trainer, module: (everything(trainer.strategy), [n for n, _ in module.named_parameters()]),
            trainer_choices={"callbacks": [Reader()]},
        )
        return read["in_on_fit_end"], *trained["inspected"]

    for in_on_fit_end, after, parameter_names in run_processes(run, 4):
        table, names, sizes, outer, report = after
        assert table.splitlines()[0].split() == ["step", "launches", "lands"]
        assert names == [(f"net.{i}.weight", f"net.{i}.bias") for i in (0, 2, 4, 6)]
        assert sizes == [4 * (5 * 11 + 11), 4 * (11 * 7 + 7), 4 * (7 * 9 + 9), 4 * (9 * 3 + 3)]
        assert list(outer) == parameter_names
        assert all(values.dtype == torch.float32 for values in outer.values())
        assert outer["net.2.weight"].shape == (7, 11)
        assert report == REPORT
        assert in_on_fit_end[:3] == after[:3]
        assert all(torch.equal(values, outer[name]) for name, values in in_on_fit_end[3].items())


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_the_main_process_can_read_a_fit_that_ran_in_others(start_method: str) -> None:
    model = LaunchedModel()
    strategy = fits.strategy(start_method=start_method, **SHORT)
    trainer = fits.trainer(strategy=strategy, devices=2, max_steps=9)
    trainer.fit(model)
    assert strategy.report()["inner_steps"] == 9
    assert len(strategy.fragments) == strategy.schedule.fragments == 4
    for name, values in strategy.outer_state_dict().items():
        assert torch.equal(model.get_parameter(name), values)


class LaunchedModel(importlib.import_module(LIGHTNING).LightningModule):  # type: ignore[misc]
    """At module level, so that a spawned process can unpickle it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.randn(80, 5, generator=generator), torch.zeros(80, 3)), batch_size=4)

    def training_step(self, parts: list[Tensor], index: int) -> Tensor:
        return nn.functional.mse_loss(self.net(parts[0]), parts[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_reading_before_a_fit_says_when_to() -> None:
    with pytest.raises(
        RuntimeError,
        match="nothing to read before training: the fragments and the schedule are known from on_fit_start on",
    ):
        fits.strategy().fragments  # noqa: B018


def test_evaluation_after_a_fit_uses_the_outer_model_and_overwrites_nothing(distribution: str) -> None:
    def run(rank: int, world_size: int) -> list[bool]:
        base = type(fits.module(distribution))

        class Evaluated(base):  # type: ignore[misc, valid-type]
            def validation_step(self, parts: Any, index: int) -> None:
                self.seen.append({name: p.detach().clone() for name, p in self.named_parameters()})
                self.log("rank", float(self.global_rank), sync_dist=True)

            test_step = validation_step

            def predict_step(self, parts: Any, index: int) -> None:
                self.seen.append({name: p.detach().clone() for name, p in self.named_parameters()})

        model = Evaluated()
        model.seen = []
        strategy = fits.strategy(distribution, **SHORT)
        trainer = fits.trainer(distribution, strategy=strategy, devices=2, max_steps=9, num_sanity_val_steps=1)
        loader = DataLoader(fits.Batches(rank, 0, 1), batch_size=None)
        trainer.fit_loop.epoch_loop.val_loop._max_batches = [1]
        trainer.limit_val_batches = trainer.limit_test_batches = trainer.limit_predict_batches = 1
        trainer.fit(model, loader, loader)
        model.seen.clear()
        outer = strategy.outer_state_dict()
        results = [trainer.validate(model, loader, verbose=False), trainer.test(model, loader, verbose=False)]
        trainer.predict(model, loader, return_predictions=False)
        same = [torch.equal(values, outer[name]) for shown in model.seen for name, values in shown.items()]
        same += [torch.equal(p, outer[name]) for name, p in model.named_parameters()]
        return [len(model.seen) == 3, all(same), all(result[0]["rank"] == 0.5 for result in results)]

    assert run_processes(run, 2) == [[True, True, True]] * 2


def test_validation_inside_a_fit_sees_the_outer_model_and_changes_nothing() -> None:
    def run(rank: int, world_size: int, validate: bool) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        base = type(fits.module(inner="adamw"))

        class Validated(base):  # type: ignore[misc, valid-type]
            def validation_step(self, parts: Any, index: int) -> None:
                seen.append({name: p.detach().clone() for name, p in self.named_parameters()})

        seen: list[dict[str, Tensor]] = []
        loader = DataLoader(fits.Batches(rank, 0, 1), batch_size=None)
        choices = {"val_check_interval": 3, "limit_val_batches": 1} if validate else {"limit_val_batches": 0}
        strategy = fits.strategy(**{**SHORT, "overlap_steps": 3})
        trainer = fits.trainer(strategy=strategy, devices=2, max_steps=14, num_sanity_val_steps=0, **choices)
        trainer.fit(Validated(), loader, loader)
        return strategy.outer_state_dict(), seen

    plain, validated = run_processes(run, 2, False), run_processes(run, 2, True)
    for (outer, _), (expected, _) in zip(validated, plain, strict=True):
        assert all(torch.equal(values, expected[name]) for name, values in outer.items())
    (_, one), (_, other) = validated
    assert len(one) == 4
    for first, second in zip(one, other, strict=True):
        assert all(torch.equal(values, second[name]) for name, values in first.items()), "the same in all groups"


def test_a_landing_is_logged_and_the_progress_bar_shows_what_is_in_flight(distribution: str, tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> tuple[list[dict[str, str]], int]:
        pl = importlib.import_module(distribution)
        shown: list[dict[str, str]] = []

        class Bar(pl.callbacks.TQDMProgressBar):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                shown.append(self.get_metrics(trainer, module))

        logger = importlib.import_module(f"{distribution}.loggers").CSVLogger(tmp_path, name="", version="")
        choices = {"callbacks": [Bar()], "enable_progress_bar": True, "logger": logger}
        trained = fit(rank, world_size, 2, 9, {**SHORT, "outer_lr": 0.75}, distribution, trainer_choices=choices)
        return shown, trained["report"]["landings"]

    (shown, landings), _ = run_processes(run, 2)
    at = {step: (metrics["outer_step"], metrics["in_flight"]) for step, metrics in enumerate(shown, start=1)}
    assert at == {
        1: ("0", "-"),
        2: ("0", "-"),
        3: ("0", "-"),
        4: ("0", "0"),
        5: ("0", "0, 1"),
        6: ("1", "1, 2"),
        7: ("1", "2, 3"),
        8: ("1", "3, 0"),
        9: ("2", "-"),
    }
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    logged = {"bytes_sent", "exposed_wait_ms", "outer_grad_norm", "outer_lr", "groups_left_out", "groups_outlying"}
    assert {f"sdiloco/{name}" for name in logged} < set(header.split(","))
    assert len(rows) == landings == 6
    values = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    assert all(float(row["sdiloco/bytes_sent"]) > 40 for row in values)
    assert all(float(row["sdiloco/outer_grad_norm"]) > 0 for row in values)
    assert {(row["sdiloco/outer_lr"], row["sdiloco/groups_outlying"]) for row in values} == {("0.75", "0")}


def test_every_rank_sees_its_own_share_of_the_data() -> None:
    def run(rank: int, world_size: int) -> list[int]:
        seen: list[int] = []
        base = type(fits.module())

        class Noting(base):  # type: ignore[misc, valid-type]
            def training_step(self, parts: list[Tensor], index: int) -> Tensor:
                seen.extend(parts[2].tolist())
                return super().training_step(parts[:2], index)

        data = TensorDataset(torch.randn(48, 5), torch.randn(48, 3), torch.arange(48))
        trainer = fits.trainer(strategy=fits.strategy(worker_groups=2, **SHORT), devices=4, max_epochs=1)
        trainer.fit(Noting(), DataLoader(data, batch_size=4, shuffle=True))
        return seen

    ranks = run_processes(run, 4)
    assert sorted(sum(ranks, [])) == list(range(48))


def test_a_step_that_a_scaler_skips_counts() -> None:
    def run(rank: int, world_size: int) -> dict[str, float]:
        def overflowing(distribution: str, inner: str, seed: int) -> Any:
            base = type(fits.module(distribution, inner, seed))

            class Overflowing(base):  # type: ignore[misc, valid-type]
                def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
                    loss = super().training_step(parts, index)
                    return loss * float("inf") if rank == 0 and index in (2, 5) else loss

            return Overflowing()

        plugins = importlib.import_module(f"{LIGHTNING}.plugins")
        scaler = torch.amp.GradScaler("cpu")
        precision = plugins.MixedPrecision("16-mixed", "cpu", scaler)
        return dict(
            fit(rank, world_size, 2, 9, SHORT, trainer_choices={"plugins": [precision]}, make=overflowing)["report"]
        )

    assert [report["inner_steps"] for report in run_processes(run, 2)] == [9, 9]


def normalised(distribution: str, inner: str, seed: int) -> Any:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.BatchNorm1d(3, affine=False))
    net.register_buffer("constant", torch.full((4,), float(seed)))
    net.register_buffer("own", torch.full((4,), float(seed)), persistent=False)
    return fits.module(distribution, inner, seed, net)


@pytest.mark.parametrize(("steps", "world_size"), [(3, 2), (14, 4)])
def test_buffers_are_the_same_in_all_groups_after_the_fit(steps: int, world_size: int) -> None:
    def run(rank: int, world_size: int) -> dict[str, Tensor]:
        def buffers(trainer: Any, module: Any) -> dict[str, Tensor]:
            return {name: buffer.clone() for name, buffer in module.net.named_buffers()}

        return dict(fit(rank, world_size, 2, steps, SHORT, inspect=buffers, make=normalised)["inspected"])

    first, *others = run_processes(run, world_size)
    assert not torch.equal(first["1.running_mean"], torch.zeros(8))
    for other in others:
        for name in ("1.running_mean", "1.running_var", "3.running_mean", "3.running_var", "constant"):
            assert torch.equal(first[name], other[name]), name


def test_a_buffer_that_never_changes_travels_at_the_first_launch_and_in_the_final_exchange() -> None:
    def run(rank: int, world_size: int) -> float:
        def constant(distribution: str, inner: str, seed: int) -> Any:
            net = mlp(seed)
            net.register_buffer("table", torch.arange(10_000.0))
            return fits.module(distribution, inner, seed, net)

        choices = {"sync_every": 2, "overlap_steps": 0, "fragments": [["*"]]}
        return float(fit(rank, world_size, 2, 20, choices, make=constant)["report"]["bytes_sent"])

    for sent in run_processes(run, 2):
        assert 2 * 40_000 < sent < 2 * 40_000 + 10_000


def test_a_checkpoint_holds_the_outer_model_and_loads_without_the_package(distribution: str, tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> Any:
        saved: list[dict[str, Tensor]] = []

        class Saving(importlib.import_module(distribution).Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                if trainer.global_step == 11:  # all fragments have landed, and two are in flight again
                    local = {name: p.detach().clone() for name, p in module.named_parameters()}
                    trainer.save_checkpoint(tmp_path / "in_flight.ckpt")
                    assert all(torch.equal(p, local[name]) for name, p in module.named_parameters())
                    saved.append(trainer.strategy.outer_state_dict())

        fit(rank, world_size, 2, 13, SHORT, distribution, trainer_choices={"callbacks": [Saving()]})
        return saved[0]

    outer, _ = run_processes(run, 2)
    checkpoint = torch.load(tmp_path / "in_flight.ckpt", weights_only=True)
    assert sorted(checkpoint["state_dict"]) == sorted(outer)
    assert all(torch.equal(checkpoint["state_dict"][name], values) for name, values in outer.items())


def test_a_second_fit_starts_where_the_first_ended_and_counts_anew() -> None:
    def run(rank: int, world_size: int) -> Any:
        model = fits.module(seed=rank)
        loader = DataLoader(fits.Batches(rank, 0, 1), batch_size=None)
        strategy = fits.strategy(**SHORT)
        trainer = fits.trainer(strategy=strategy, devices=2, max_steps=9)
        trainer.fit(model, loader)
        first = strategy.report()
        trainer.fit_loop.epoch_loop.max_steps = 14
        trainer.fit(model, loader)
        return first["inner_steps"], strategy.report()["inner_steps"], strategy.outer_state_dict()

    (first, second, outer), (_, _, other) = run_processes(run, 2)
    assert (first, second) == (9, 5)
    assert all(torch.equal(values, other[name]) for name, values in outer.items())


def test_fragments_and_schedule_are_known_when_training_starts() -> None:
    def run(rank: int, world_size: int) -> Any:
        read: list[tuple[int, int]] = []

        class Reader(importlib.import_module(LIGHTNING).Callback):  # type: ignore[misc]
            def on_fit_start(self, trainer: Any, module: Any) -> None:
                read.append((len(trainer.strategy.fragments), trainer.strategy.schedule.sync_every))

            on_train_start = on_fit_start

        fit(rank, world_size, 2, 2, SHORT, trainer_choices={"callbacks": [Reader()]})
        return read

    assert run_processes(run, 2) == [[(4, 4), (4, 4)]] * 2


def test_a_callback_that_leaves_another_model_in_every_rank_is_an_error() -> None:
    def run(rank: int, world_size: int) -> None:
        class Spoil(importlib.import_module(LIGHTNING).Callback):  # type: ignore[misc]
            def on_train_end(self, trainer: Any, module: Any) -> None:
                with torch.no_grad():
                    module.net[0].weight += rank

        fit(rank, world_size, 2, 4, SHORT, trainer_choices={"callbacks": [Spoil()]})

    errors = run_processes(run, 2, expect_failure=True)
    assert all("AgreementError: After training the model differs between ranks" in error for error in errors.values())


def test_another_model_is_aligned_before_it_is_evaluated() -> None:
    def run(rank: int, world_size: int) -> list[float]:
        loader = DataLoader(fits.Batches(rank, 0, 1), batch_size=None)
        base = type(fits.module())

        class Evaluated(base):  # type: ignore[misc, valid-type]
            def validation_step(self, parts: Any, index: int) -> None:
                pass

        trainer = fits.trainer(strategy=fits.strategy(**SHORT), devices=2, max_steps=5, limit_val_batches=0)
        trainer.fit(fits.module(), loader)
        torch.manual_seed(rank)
        other = Evaluated()
        torch.nn.init.normal_(other.net[0].weight)
        trainer.limit_val_batches = 1
        trainer.validate(other, loader, verbose=False)
        return other.net[0].weight.flatten().tolist()

    first, second = run_processes(run, 2)
    assert first == second


def test_a_checkpoint_chosen_by_what_is_logged_per_batch_is_the_same_on_every_rank(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> tuple[str, float]:
        base = type(fits.module())

        class Logging(base):  # type: ignore[misc, valid-type]
            def training_step(self, parts: Any, index: int) -> Tensor:
                self.log("train_loss", float(rank + index), sync_dist=True)
                return super().training_step(parts, index)

        callbacks = importlib.import_module(LIGHTNING).callbacks
        best = callbacks.ModelCheckpoint(
            tmp_path, monitor="train_loss", every_n_train_steps=3, filename="{step}-{train_loss:.1f}"
        )
        loader = DataLoader(fits.Batches(rank, 0, 1), batch_size=None)
        trainer = fits.trainer(
            strategy=fits.strategy(**SHORT), devices=2, max_steps=10, callbacks=[best], enable_checkpointing=True
        )
        trainer.fit(Logging(), loader)
        return Path(best.best_model_path).name, float(best.best_model_score)

    assert run_processes(run, 2) == [("step=3-train_loss=2.5.ckpt", 2.5)] * 2
    assert (tmp_path / "step=3-train_loss=2.5.ckpt").exists()


def test_several_trainers_use_the_same_process_groups() -> None:
    def run(rank: int, world_size: int) -> list[int]:
        threads = []
        for _ in range(4):
            loader = DataLoader(fits.Batches(rank, 0, 1), batch_size=None)
            fits.trainer(strategy=fits.strategy(**SHORT), devices=2, max_steps=5).fit(fits.module(), loader)
            time.sleep(0.2)
            threads.append(len(list(Path("/proc/self/task").iterdir())))
        return threads

    for threads in run_processes(run, 2):
        assert threads[1:] == [threads[1]] * 3


def test_an_engine_that_is_dropped_takes_its_threads_along() -> None:
    def lanes() -> int:
        return sum(thread.name == "sdiloco-background" for thread in threading.enumerate())

    gc.collect()
    time.sleep(1)  # those of earlier engines look for their end twice a second
    before = lanes()
    engine = StreamingDiLoCo(mlp(), sync_every=2, overlap_steps=1, fragments=[["*"]])
    for _ in range(6):
        engine.step()
    assert lanes() == before + 3, "one for each stage"
    del engine
    gc.collect()
    deadline = time.monotonic() + 5
    while lanes() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lanes() == before
