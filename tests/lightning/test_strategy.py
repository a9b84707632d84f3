"""The strategy in a real Trainer: both distributions, what users read, what is counted, what is shown and saved."""

import csv
import gc
import importlib
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdiloco import StreamingDiLoCo
from tests import fits
from tests.fits import LIGHTNING, fit
from tests.lightning.uneven_fits import same
from tests.ranks import run_processes
from tests.training import mlp

pl = importlib.import_module(LIGHTNING)
SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": "strided:1"}
REPORT = {"inner_steps", "launches", "landings", "flights_dropped", "bytes_sent", "bytes_received", "exposed_wait_s"}
REPORT |= {"in_flight_s", "outer_lr", "outer_momentum", "mixing"}


def held(module: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def batches(rank: int) -> Any:
    return DataLoader(fits.Batches(rank, 0, 1), batch_size=None)


def trainer_of(rank: int, steps: int, distribution: str = LIGHTNING, **choices: Any) -> Any:
    strategy = fits.strategy(distribution, **SHORT)
    return fits.trainer(distribution, **{"strategy": strategy, "devices": 2, "max_steps": steps, **choices})


def test_the_name_is_enough_and_worker_groups_are_nodes_if_there_are_several() -> None:
    def run(rank: int, world_size: int) -> Any:
        told = []
        for distribution in (LIGHTNING, "pytorch_lightning"):
            trainer = fits.trainer(distribution, strategy="streaming_diloco", devices=2, max_steps=3)
            trainer.fit(fits.module(distribution), batches(rank))
            home = type(trainer.strategy).__module__
            told.append((home, trainer.strategy.topology.num_groups, trainer.strategy.report()["inner_steps"]))
        return told

    def on_nodes(rank: int, world_size: int) -> Any:
        trainer = fits.trainer(strategy=fits.strategy(), devices=2, num_nodes=2, max_steps=1)
        trainer.fit(fits.module(), batches(rank))
        return trainer.strategy.topology.num_groups, trainer.strategy.topology.group_index

    homes = ("lightning_sdiloco.lightning_pytorch", "lightning_sdiloco.pytorch_lightning")
    assert run_processes(run, 2) == [[(home, 2, 3) for home in homes]] * 2
    assert run_processes(on_nodes, 4, ranks_per_node=2) == [(2, 0), (2, 0), (2, 1), (2, 1)]


def normalised(distribution: str, inner: str, seed: int, **members: Any) -> Any:
    """With buffers that change, that stay, and that are not saved."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.BatchNorm1d(3, affine=False))
    net.register_buffer("constant", torch.full((4,), float(seed)))
    net.register_buffer("own", torch.full((4,), float(seed)), persistent=False)
    return fits.module(distribution, inner, seed, net, **members)


def test_what_users_read_save_and_find_after_a_fit(distribution: str, tmp_path: Path) -> None:
    """Each rank sees its share of the data; a checkpoint of flights holds the outer model, as all groups do after."""
    data = TensorDataset(torch.randn(224, 5), torch.randn(224, 3), torch.arange(224))

    def run(rank: int, world_size: int) -> Any:
        read: dict[str, Any] = {"seen": []}

        def everything(strategy: Any) -> Any:
            fragments = list(strategy.fragments)
            about = str(strategy.schedule), [f.names for f in fragments], [f.nbytes for f in fragments]
            return about, strategy.outer_state_dict(), set(strategy.report())

        class Reader(importlib.import_module(distribution).Callback):  # type: ignore[misc]
            def on_fit_start(self, trainer: Any, module: Any) -> None:
                read["at_start"] = len(trainer.strategy.fragments), trainer.strategy.schedule.sync_every

            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                if trainer.global_step == 11:  # all fragments have landed, and one is in flight again
                    local = held(module)
                    trainer.save_checkpoint(tmp_path / "in_flight.ckpt")
                    assert same(held(module), local)
                    read["saved"] = trainer.strategy.outer_state_dict()

            def on_fit_end(self, trainer: Any, module: Any) -> None:
                read["at_end"] = everything(trainer.strategy)

        def training_step(self: Any, parts: list[Tensor], index: int) -> Tensor:
            read["seen"] += parts[2].tolist()
            return self.loss(parts)  # type: ignore[no-any-return]

        model = normalised(distribution, "sgd", rank, training_step=training_step)
        choices = {"devices": 4, "max_epochs": 1, "callbacks": [Reader()]}
        strategy = fits.strategy(distribution, **{**SHORT, "worker_groups": 2})
        trainer = fits.trainer(distribution, strategy=strategy, **choices)
        trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
        read["after"], read["model"] = everything(trainer.strategy), held(model)
        return read | {"buffers": dict(model.net.named_buffers())}

    ranks = run_processes(run, 4)
    assert sorted(sum((read["seen"] for read in ranks), [])) == list(range(224))
    for read in ranks:
        (table, names, sizes), outer, report = read["after"]
        assert table.splitlines()[0].split() == ["step", "launches", "lands"]
        assert names == [("net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"), ("net.2.weight", "net.2.bias")]
        assert sizes == [4 * (5 * 8 + 8 + 8 + 8), 4 * (8 * 3 + 3)]
        assert list(outer) == list(read["model"])
        assert {values.dtype for values in outer.values()} == {torch.float32}
        assert (report, read["at_start"]) == (REPORT, (2, 4))
        assert read["at_end"][0] == read["after"][0]
        assert same(read["at_end"][1], outer)
        assert same(read["model"], outer)
        own = read["buffers"].pop("own")
        assert same(read["buffers"], {name: v for name, v in ranks[0]["buffers"].items() if name != "own"}), own
    assert not torch.equal(ranks[0]["buffers"]["1.running_mean"], torch.zeros(8))
    checkpoint = torch.load(tmp_path / "in_flight.ckpt", weights_only=True)["state_dict"]
    assert same({name: checkpoint[name] for name in ranks[0]["saved"]}, ranks[0]["saved"])
    with pytest.raises(RuntimeError, match="nothing to read before training: the fragments and the schedule are known"):
        fits.strategy().fragments  # noqa: B018


def test_the_main_process_can_read_a_fit_that_ran_in_others() -> None:
    model = LaunchedModel()
    strategy = fits.strategy(start_method="fork", **SHORT)
    fits.trainer(strategy=strategy, devices=2, max_steps=9).fit(model)
    assert strategy.report()["inner_steps"] == 9
    assert len(strategy.fragments) == strategy.schedule.fragments == 4
    assert same(strategy.outer_state_dict(), held(model))


class LaunchedModel(pl.LightningModule):  # type: ignore[misc, name-defined]
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


def test_evaluation_in_and_after_a_fit_uses_the_outer_model_and_changes_nothing(distribution: str) -> None:
    """And another model is aligned before it is evaluated."""

    def look(self: Any, parts: Any, index: int) -> None:
        self.seen.append(held(self))
        if not self.trainer.predicting:
            self.log("rank", float(self.global_rank), sync_dist=True)

    looking = dict.fromkeys(("validation_step", "test_step", "predict_step"), look)

    def run(rank: int, world_size: int) -> Any:
        loader = batches(rank)
        one = dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), 1)
        outer, during = [], []
        for validates in ({"limit_val_batches": 0}, {**one, "val_check_interval": 3}):
            model = fits.module(distribution, "adamw", seen=[], **looking)
            trainer = trainer_of(rank, 13, distribution, num_sanity_val_steps=0, **validates)
            trainer.fit(model, loader, loader)
            outer.append(trainer.strategy.outer_state_dict())
            during.append(list(model.seen))
        model.seen.clear()
        results = [trainer.validate(model, loader, verbose=False), trainer.test(model, loader, verbose=False)]
        trainer.predict(model, loader, return_predictions=False)
        after = [len(model.seen) == 3, all(result[0]["rank"] == 0.5 for result in results)]
        after += [same(values, outer[1]) for values in (*model.seen, held(model))]
        torch.manual_seed(rank)
        other = fits.module(distribution, seed=7 + rank, seen=[], **looking)
        trainer.validate(other, loader, verbose=False)
        return same(*outer), all(after), during, held(other)

    (unchanged, right, (none, seen), aligned), (_, other_right, (_, other_seen), other_aligned) = run_processes(run, 2)
    assert (unchanged, right, other_right, none, len(seen)) == (True, True, True, [], 4)
    assert all(map(same, seen, other_seen)), "the same in all groups"
    assert same(aligned, other_aligned)


def test_a_landing_is_logged_and_the_progress_bar_shows_what_is_in_flight(distribution: str, tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> tuple[list[Any], int]:
        shown: list[Any] = []

        class Bar(importlib.import_module(distribution).callbacks.TQDMProgressBar):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                metrics = self.get_metrics(trainer, module)
                shown.append((metrics["outer_step"], metrics["in_flight"]))

        logger = importlib.import_module(f"{distribution}.loggers").CSVLogger(tmp_path, name="", version="")
        choices = {"callbacks": [Bar()], "enable_progress_bar": True, "logger": logger}
        trained = fit(rank, world_size, 2, 9, {**SHORT, "outer_lr": 0.75}, distribution, trainer_choices=choices)
        return shown, trained["report"]["landings"]

    (shown, landings), _ = run_processes(run, 2)
    at_first = [("0", "-")] * 3 + [("0", "0"), ("0", "0, 1")]
    assert shown == [*at_first, ("1", "1, 2"), ("1", "2, 3"), ("1", "3, 0"), ("2", "-")]
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    logged = {"bytes_sent", "exposed_wait_ms", "outer_grad_norm", "outer_lr", "groups_left_out", "groups_outlying"}
    assert {f"sdiloco/{name}" for name in logged} < rows[0].keys()
    assert len(rows) == landings == 6
    assert all(float(row["sdiloco/bytes_sent"]) > 40 and float(row["sdiloco/outer_grad_norm"]) > 0 for row in rows)
    assert {(row["sdiloco/outer_lr"], row["sdiloco/groups_outlying"]) for row in rows} == {("0.75", "0")}


def test_a_buffer_that_never_changes_travels_at_the_first_launch_and_in_the_final_exchange() -> None:
    def run(rank: int, world_size: int) -> list[int]:
        net = mlp(rank)
        net.register_buffer("table", torch.arange(10_000.0))
        choices = {"sync_every": 2, "overlap_steps": 0, "fragments": [["*"]]}
        # And where nothing has landed, the final exchange alone makes buffers equal.
        made: list[Any] = [(20, partial(fits.module, net=net), choices), (3, normalised, SHORT)]
        trained = [
            fit(rank, 2, 2, steps, chosen, make=make, inspect=lambda trainer, module: module.net.state_dict())
            for steps, make, chosen in made
        ]
        return [trained[0]["report"]["bytes_sent"], trained[1]["inspected"]]

    (sent, buffers), (other_sent, other_buffers) = run_processes(run, 2)
    assert 2 * 40_000 < sent == other_sent < 2 * 40_000 + 10_000
    assert same(buffers, other_buffers)


def test_a_callback_that_leaves_another_model_in_every_rank_is_an_error() -> None:
    class Spoil(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_end(self, trainer: Any, module: Any) -> None:
            with torch.no_grad():
                module.net[0].weight += trainer.global_rank

    def run(rank: int, world_size: int) -> str:
        with pytest.raises(RuntimeError, match="After training the model differs between ranks") as error:
            fit(rank, world_size, 2, 4, SHORT, trainer_choices={"callbacks": [Spoil()]})
        return type(error.value).__name__

    assert run_processes(run, 2) == ["AgreementError"] * 2


def test_a_checkpoint_chosen_by_what_is_logged_per_batch_is_the_same_on_every_rank(tmp_path: Path) -> None:
    def training_step(self: Any, parts: Any, index: int) -> Tensor:
        self.log("train_loss", float(self.global_rank + index), sync_dist=True)
        return self.loss(parts)  # type: ignore[no-any-return]

    def run(rank: int, world_size: int) -> tuple[str, float]:
        choices = {"monitor": "train_loss", "every_n_train_steps": 3, "filename": "{step}-{train_loss:.1f}"}
        best = pl.callbacks.ModelCheckpoint(tmp_path, **choices)
        trainer = trainer_of(rank, 10, callbacks=[best], enable_checkpointing=True)
        trainer.fit(fits.module(training_step=training_step), batches(rank))
        return Path(best.best_model_path).name, float(best.best_model_score)

    assert run_processes(run, 2) == [("step=3-train_loss=2.5.ckpt", 2.5)] * 2
    assert (tmp_path / "step=3-train_loss=2.5.ckpt").exists()


def test_several_trainers_use_the_same_process_groups() -> None:
    def run(rank: int, world_size: int) -> list[int]:
        threads = []
        for _ in range(4):
            trainer_of(rank, 5).fit(fits.module(), batches(rank))
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
