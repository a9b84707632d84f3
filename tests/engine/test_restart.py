"""Rounds that start anew: with other groups, other shards or other settings, and after parameters were unfrozen."""

import importlib
import logging
import shutil
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from lightning_sdiloco import OuterOptimizer, SimulatedGroups, StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import COMPRESSIONS
from lightning_sdiloco.engine.checkpoint import restart_from
from lightning_sdiloco.errors import AgreementError
from tests import fits
from tests.engine.groups import Groups, Rank, Values, copied, outer_state, through_a_file, unlike, with_statistics
from tests.fits import LIGHTNING
from tests.lightning.test_checkpoint import CHOICES, StatefulBatches, run_fit, save_folder, saving
from tests.ranks import run_processes, run_ranks
from tests.training import LAYERS, batch, mlp

# After 20 steps fragments 1, 2 and 3 are in flight, with statistics, and all have momentum.
ENGINE: dict[str, Any] = {"sync_every": 8, "overlap_steps": 5}
WITH_STATISTICS: dict[str, Any] = {**ENGINE, "fragments": [*LAYERS[:2], ["4.*", "7.*"], ["6.*"]]}


@cache
def states(**choices: Any) -> list[list[Any]]:
    run = Groups(net=with_statistics, **WITH_STATISTICS, **choices)
    run.until(20)
    return [[through_a_file(engine.state_dict())] for engine in run.engines]


def joined(ranks: list[Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Outer values and momentum of whole parameters: what the ranks of one group hold, without their flights."""
    found = restart_from([ranks, [None] * len(ranks)], Settings()).parameters
    return {name: (own.values, own.state.get("momentum_buffer", torch.zeros(1))) for name, own in found.items()}


def test_flights_that_cannot_be_landed_are_dropped_and_counted_and_too_few_files_refused() -> None:
    one, other = states()
    # A group is missing, or the outer optimizer is another one.
    for saved, chosen in (([[None], other], Settings()), ([one, other], None)):
        restart = restart_from(saved, chosen)
        assert restart.counts["flights_dropped"] == 3
        assert all(bool(own.state) == (chosen is not None) for own in restart.parameters.values())
    with pytest.raises(ValueError, match="No worker group has the files of all its ranks"):
        restart_from([[one[0], None], [None, other[0]]], Settings())


@settings(max_examples=8, deadline=None)
@given(
    fragments=st.sampled_from(["balanced", 4, "strided:1", [["*"]], LAYERS[::-1]]),
    groups=st.integers(1, 3),
    compression=st.sampled_from(sorted(COMPRESSIONS)),
)
def test_any_groups_and_fragments_go_on_from_the_same_outer_parameters_and_agree(
    fragments: Any, groups: int, compression: str
) -> None:
    restart = restart_from(states(compression="sparse"), Settings(compression="sparse"))
    after = Groups(groups, "sgd", fragments=fragments, compression=compression, sync_every=3, overlap_steps=1)
    for engine in after.engines:
        engine.restart(restart)
        assert (engine.inner_steps, engine.steps_in_rounds) == (20, 0)
        assert all(own["memory"] is None for own in outer_state(engine)), "what waited is forgotten"
    for name, values in after.groups.outer_state_dict().items():
        assert torch.equal(values.flatten(), restart.parameters[name].values)
        assert all(torch.equal(dict(model.named_parameters())[name].detach(), values) for model in after.models)
    for step in range(1, 8):
        assert bool(after.step()) == (step % 3 == 1 and step > 3) or len(after.engines[0].fragments) > 1
    first, *others = ([own["outer"] for own in outer_state(engine)] for engine in after.engines)
    assert all(all(map(torch.equal, first, other)) for other in others)


def test_rounds_that_start_anew_have_what_is_left_of_the_warmup_and_resume_bit_for_bit() -> None:
    restart = restart_from(states(), Settings())
    for warmup_steps, left in ((0, 0), (19, 0), (23, 3)):
        whole = Groups(inner="sgd", sync_every=3, overlap_steps=1, warmup_steps=warmup_steps)
        for engine in whole.engines:
            engine.restart(restart)
        warm = []
        for _ in range(7):
            warm.append(whole.engines[0].is_warming_up)
            whole.step()
        assert warm == [True] * left + [False] * (7 - left)
        resumed = whole.resumed()
        for run in (whole, resumed):
            run.until(14)
        assert unlike(resumed.seen(), whole.seen()) == []


def test_all_buffers_travel_with_the_first_launch_after_a_restart() -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    groups = SimulatedGroups(models, sync_every=2, overlap_steps=0, mixing=0.0)
    restart = restart_from([[engine.state_dict()] for engine in groups.engines], Settings())
    for group, (engine, model) in enumerate(zip(groups.engines, models, strict=True)):
        engine.restart(restart)
        model[1].running_mean.fill_(float(group))
    groups.step()
    groups.step()
    assert [model[1].running_mean.tolist() for model in models] == [[0.5, 0.5]] * 2


def test_another_number_of_ranks_in_a_group_takes_the_shards_apart_and_puts_them_together() -> None:
    def save(rank: int, world_size: int) -> Any:
        here, saved = Rank(rank, WorkerGroups(1), "sgd", **ENGINE, fragments=LAYERS), []
        for step in range(1, 26):
            here.step(step)
            saved += [through_a_file(here.engine.state_dict())] if step in (20, 25) else []
        return saved

    def resume(rank: int, world_size: int, restart: Any) -> Any:
        engine = StreamingDiLoCo(mlp(), worker_groups=1, **ENGINE, fragments=LAYERS)
        engine.restart(restart)
        return through_a_file(engine.state_dict())

    three = run_ranks(save, 3)
    restart = restart_from([[state for state, _ in three]], Settings(**ENGINE, fragments=LAYERS))
    for ranks in ([state for _, state in three], run_ranks(resume, 2, restart), run_ranks(resume, 4, restart)):
        for name, (values, momentum) in joined(ranks).items():
            assert torch.equal(values, restart.parameters[name].values)
            assert torch.equal(momentum, restart.parameters[name].state["momentum_buffer"])


# Checkpoints of fits

CHECKPOINT_AT = 19  # fragments have landed before, and two are in flight
END = CHECKPOINT_AT + 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two groups with flights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    run_processes(
        run_fit, 2, LIGHTNING, CHECKPOINT_AT + 2, saving(LIGHTNING, folder, every_n_train_steps=CHECKPOINT_AT)
    )
    return folder / f"step={CHECKPOINT_AT}.ckpt"


def files_of(checkpoint: Path) -> list[dict[str, Any]]:
    return [torch.load(file, weights_only=True) for file in sorted(save_folder(checkpoint).glob("rank_*.pt"))]


def logged(rank: int, world_size: int, path: Path, steps: int, choices: dict[str, Any]) -> Any:
    """A fit resumed from a checkpoint, and what our loggers warned of."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_sdiloco").addHandler(handler)
    return run_fit(rank, world_size, LIGHTNING, steps, [], str(path), **choices), "".join(messages)


def message(error: str) -> str:
    """Without the traceback, which holds the words of the code that raises."""
    return error.rsplit("Error: ", 1)[-1]


@pytest.mark.parametrize(("world_size", "groups"), [(3, 3), (4, 2)])
def test_other_groups_start_from_the_outer_parameters_and_momentum_with_the_flights_landed(
    world_size: int, groups: int, checkpoint: Path
) -> None:
    files = files_of(checkpoint)
    assert len(files[0]["engine"]["flights"]) == 2
    restart = restart_from([[file["engine"]] for file in files], Settings())
    ranks = run_processes(logged, world_size, checkpoint, END, {"groups": groups})
    for rank, (fitted, told) in enumerate(ranks):
        first = fitted["trace"][CHECKPOINT_AT]
        for name, parameter in restart.parameters.items():
            assert torch.equal(first[f"outer {name}"].flatten(), parameter.values)
            assert torch.equal(first[name].flatten(), parameter.values), "the local model starts there too"
        assert all(torch.equal(first[name], values) for name, values in restart.buffers.items())
        assert unlike(fitted["outer"], ranks[0][0]["outer"]) == []
        group = rank * groups // world_size
        inner = {name: v for name, v in first.items() if name.split()[0].isdigit()}
        own = files[group]["optimizer_states"][0]["state"] if group < 2 else {}  # or a fresh inner optimizer
        assert unlike(inner, {f"{i} {key}": value for i, state in own.items() for key, value in state.items()}) == []
        assert told.count("not resumed exactly") == (rank == 0), "said once"
        if rank == 0:
            assert "Flights lost so far: 0" in told
            assert f"fresh inner optimizer: {'2' if groups == 3 else 'none'}" in told
    assert ranks[0][0]["report"]["inner_steps"] == END
    assert ranks[0][0]["report"]["flights_dropped"] == 0


def test_a_file_that_is_gone_costs_its_flights_and_optimizer_state_and_an_altered_one_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    copied_to = tmp_path / "copy" / checkpoint.name
    shutil.copytree(checkpoint.parent, copied_to.parent)
    file = save_folder(copied_to) / "rank_00001.pt"
    file.write_bytes(file.read_bytes()[:-1])
    errors = run_processes(logged, 3, copied_to, 30, {"groups": 3}, expect_failure=True)
    assert sorted(errors) == [0, 1, 2]
    for error in map(message, errors.values()):
        assert "rank_00001.pt" in error
        assert "is not what was saved" in error
    file.unlink()
    ranks = run_processes(logged, 3, copied_to, CHECKPOINT_AT + 2, {"groups": 3})
    assert "Flights lost so far: 2" in ranks[0][1]
    assert "fresh inner optimizer: 1, 2" in ranks[0][1]
    assert [fitted["report"]["flights_dropped"] for fitted, _ in ranks] == [2, 2, 2]


def test_other_settings_start_the_rounds_anew_if_asked_and_are_refused_otherwise(checkpoint: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sync_every": 9, "compression": "fp32"}, "sync_every was 8, now it is 9; compression was 'fp4', now it is"),
        ({"fragments": "balanced"}, "fragments was 'strided:1', now it is 'balanced'"),
        ({"outer_optimizer": torch.optim.AdamW}, "outer_optimizer was None, now it is AdamW"),
    ]

    def fits(rank: int, world_size: int) -> list[Any]:
        return [logged(rank, 2, checkpoint, END, {**changed, "resume": "restart"}) for changed, _ in cases]

    for (changed, told), (one, said), (other, _) in zip(cases, *run_processes(fits, 2), strict=True):
        assert told in said
        assert unlike(one["outer"], other["outer"]) == []
        assert one["report"]["flights_dropped"] == (2 if "outer_optimizer" in changed else 0)
        assert any(key.split()[0].isdigit() for key in other["trace"][CHECKPOINT_AT]), "the inner optimizer goes on"
    errors = run_processes(logged, 3, checkpoint, 30, {"groups": 3, "sync_every": 9}, expect_failure=True)
    for error in map(message, errors.values()):
        assert "sync_every was 8, now it is 9" in error
        assert "resume='restart'" in error


# Parameters that are frozen and unfrozen


def trained(model: nn.Module, engine: StreamingDiLoCo, group: int, steps: int) -> None:
    for _ in range(steps):
        x, y = batch(group, engine.inner_steps)
        nn.functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter in (own for own in model.parameters() if own.grad is not None):
                parameter -= 0.05 * parameter.grad  # type: ignore[operator]
                parameter.grad = None
        engine.step()


def test_a_recut_lands_flights_keeps_momentum_and_gives_frozen_parameters_their_outer_value() -> None:
    def run(rank: int, world_size: int) -> Values:
        model = mlp()
        model[0].requires_grad_(False)
        choices = {"fragments": "strided:1", "compression": "sparse", "outer_momentum": 0.9}
        engine = StreamingDiLoCo(model, sync_every=8, overlap_steps=5, **choices)
        assert not engine.has_other_parameters()
        trained(model, engine, rank, 20)
        landed_before, in_flight = engine.report()["landings"], len(engine.in_flight)
        assert in_flight
        model[0].requires_grad_(True)
        model[6].requires_grad_(False)
        model.append(nn.BatchNorm1d(3))
        model[7].running_mean.fill_(float(rank))
        assert engine.has_other_parameters()
        assert len(engine.recut()) == in_flight
        assert engine.report()["landings"] == landed_before + in_flight
        assert {name for fragment in engine.fragments for name in fragment.names} == {
            f"{layer}.{kind}" for layer in (0, 2, 4, 7) for kind in ("weight", "bias")
        }
        assert engine.steps_in_rounds == 0
        assert all(own["memory"] is None for own in outer_state(engine)), "what waited is forgotten"
        held = joined([engine.state_dict()])
        assert held["2.weight"][1].any()
        assert not held["0.weight"][1].any(), "it starts without momentum"
        trained(model, engine, rank, 7)
        assert engine.in_flight == (), "a round begins anew"
        trained(model, engine, rank, 1)
        assert engine.in_flight == (0,)
        engine.finish()
        return copied(model.state_dict())

    one, other = run_ranks(run, 2)
    assert unlike(one, other) == []


def test_after_a_recut_new_fragments_have_the_learning_rate_of_the_others() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    schedule = partial(LinearLR, start_factor=0.1, total_iters=100)
    engine = StreamingDiLoCo(
        model,
        sync_every=4,
        overlap_steps=0,
        fragments="strided:1",
        outer_lr=1.0,
        outer_optimizer=OuterOptimizer(lr_schedule=schedule),
    )
    before = [landing for _ in range(15) for landing in engine.step()]
    model[0].requires_grad_(True)
    engine.recut()
    after = [landing for _ in range(7) for landing in engine.step()]
    assert {landing.fragment for landing in after} == set(range(4))
    (rate,) = {landing.outer_lr for landing in after}
    assert rate > max(landing.outer_lr for landing in before)


def test_a_recut_that_only_one_rank_wants_is_refused_everywhere() -> None:
    def run(rank: int, world_size: int) -> None:
        model = mlp()
        engine = StreamingDiLoCo(model, **ENGINE, fragments="balanced")
        model[0].requires_grad_(rank == 0)
        engine.recut()

    errors = run_ranks(run, 2, expect_failure=True)
    assert len(errors) == 2
    assert all("The model differs between ranks: 0.weight" in error for error in errors.values())


def test_what_becomes_trainable_is_an_error_at_the_next_launch_of_any_fragment() -> None:
    for name in ("0.weight", "7.0.weight"):
        model = mlp()
        model[0].requires_grad_(False)
        engine = StreamingDiLoCo(model, sync_every=9, overlap_steps=0, fragments=LAYERS[1:])
        for _ in range(9):
            engine.step()
        assert engine.report()["launches"] == 1
        if name == "0.weight":
            model[0].requires_grad_(True)
        else:
            model.append(nn.Sequential(nn.Linear(3, 3)))
        for _ in range(2):
            engine.step()
        told = rf"2 parameters .* such as '{name}'.*change what is trainable between epochs"
        with pytest.raises(AgreementError, match=told):
            engine.step()


def finetuning(distribution: str) -> Any:
    """Unfreezes the first layer at epoch 1, and freezes the last at epoch 2."""

    class Finetuning(importlib.import_module(distribution).callbacks.BaseFinetuning):  # type: ignore[misc]
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.01)
            if epoch == 2:
                self.freeze(module.net[6])

    return Finetuning()


def finetune(
    rank: int, world_size: int, groups: int, distribution: str, callbacks: list[Any], resume: str | None = None
) -> Any:
    size = world_size // groups
    base = type(fits.module(distribution, "adamw"))

    class Traced(base):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=0.01)

        def on_train_batch_start(self, *args: Any) -> None:
            values = {name: value.clone() for name, value in self.state_dict().items()}
            state = self.trainer.optimizers[0].state
            values |= {f"{i} {key}": v.clone() for i, s in enumerate(state.values()) for key, v in s.items()}
            outer = self.trainer.strategy.outer_state_dict()
            self.trace[self.trainer.global_step] = values | {f"outer {name}": value for name, value in outer.items()}

    model = Traced()
    model.trace = {}
    strategy = fits.strategy(distribution, worker_groups=groups, **{**CHOICES, "sync_every": 6})
    trainer = fits.trainer(
        distribution,
        strategy=strategy,
        devices=world_size,
        max_epochs=3,
        callbacks=[finetuning(distribution), *callbacks],
        enable_checkpointing=bool(callbacks),
        reload_dataloaders_every_n_epochs=1,
    )

    class Module(Traced):
        def train_dataloader(self) -> StatefulBatches:
            return StatefulBatches(rank // size, rank % size, size, length=10)

    model.__class__ = Module
    trainer.fit(model, ckpt_path=resume)
    return {
        "trace": model.trace,
        "outer": strategy.outer_state_dict(),
        "net": {name: p.detach().clone() for name, p in model.net.named_parameters()},
        "fragments": sorted(name for fragment in strategy.fragments for name in fragment.names),
    }


def test_a_finetuning_callback_cuts_the_model_anew_between_epochs_in_all_groups_alike() -> None:
    ranks = run_processes(finetune, 4, 2, "pytorch_lightning", [])
    for fitted in ranks:
        assert {name.split(".")[1] for name in fitted["fragments"]} == {"0", "2", "4"}
        assert unlike(fitted["net"], ranks[0]["net"]) == []
        starts = fitted["trace"]
        assert torch.equal(starts[0]["net.0.weight"], starts[9]["net.0.weight"]), "frozen in the first epoch"
        assert not torch.equal(starts[11]["net.0.weight"], starts[19]["net.0.weight"]), "trained in the second"
    # The unfrozen layer is in DistributedDataParallel too: the ranks of a group hold the same local values.
    for step in range(30):
        one, other = ({n: v for n, v in of["trace"][step].items() if n.startswith("net.")} for of in ranks[:2])
        assert unlike(one, other) == []


def test_a_fit_resumes_to_the_same_bits_after_layers_were_unfrozen_and_frozen(tmp_path: Path) -> None:
    """From the end of epochs and from their middle; and with a further group, which trains the layer too."""
    saved = run_processes(finetune, 2, 2, LIGHTNING, saving(LIGHTNING, tmp_path, every_n_train_steps=1))
    steps = (10, 13)

    def resume(rank: int, world_size: int) -> list[Any]:
        return [finetune(rank, 2, 2, LIGHTNING, [], str(tmp_path / f"step={step}.ckpt")) for step in steps]

    for resumed, other in zip(run_processes(resume, 2), saved, strict=True):
        for step, one in zip(steps, resumed, strict=True):
            assert sorted(one["trace"]) == list(range(step, 30))
            assert [at for at, values in one["trace"].items() if unlike(values, other["trace"][at])] == []
            assert unlike(one["net"], other["net"]) == []
    ranks = run_processes(finetune, 3, 3, LIGHTNING, [], str(tmp_path / "step=13.ckpt"))
    for fitted in ranks:
        starts = fitted["trace"]
        assert not torch.equal(starts[14]["net.0.weight"], starts[19]["net.0.weight"])
        assert unlike(fitted["outer"], ranks[0]["outer"]) == []


def test_a_group_that_begins_an_epoch_without_data_cuts_the_model_anew_with_the_others() -> None:
    class Once(StatefulBatches):
        def __len__(self) -> int:
            raise TypeError("unknown")

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield from super().__iter__()
            self.length = 0

    def fit(rank: int, world_size: int) -> Any:
        module = fits.module(seed=rank)
        strategy = fits.strategy(worker_groups=2, **{**CHOICES, "sync_every": 6})
        trainer = fits.trainer(strategy=strategy, devices=2, max_epochs=2, callbacks=[finetuning(LIGHTNING)])
        loader = Once(rank, 0, 1, length=10) if rank else StatefulBatches(rank, 0, 1, length=100)
        trainer.fit(module, loader)
        return strategy.outer_state_dict(), strategy.report()["inner_steps"]

    (outer, steps), (other, other_steps) = run_processes(fit, 2)
    assert unlike(other, outer) == []
    assert steps == other_steps
    assert "net.0.weight" in outer
