"""Rounds that start anew: with other groups, other shards or other settings, and after parameters were unfrozen."""

import importlib
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo, TwoShot
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import COMPRESSIONS, ByLink
from lightning_sdiloco.engine.checkpoint import restart_from
from lightning_sdiloco.engine.outer.optimizer import OuterState
from lightning_sdiloco.engine.recut import named_outer
from lightning_sdiloco.engine.shards import OuterParameter, WholeLayout, to_parameters
from lightning_sdiloco.errors import AgreementError
from tests import fits
from tests.engine.test_by_link import MENU, with_links
from tests.engine.test_resume import through_a_file
from tests.fits import LIGHTNING
from tests.lightning.test_checkpoint import CHOICES, StatefulBatches, assert_same, run_fit, save_folder, saving
from tests.ranks import run_processes, run_ranks
from tests.training import LAYERS, backward, batch, inner_optimizer, mlp, train_step

ENGINE: dict[str, Any] = {"sync_every": 8, "overlap_steps": 5, "fragments": LAYERS}
IN_FLIGHT_AFTER = 20  # fragments 1, 2 and 3 are in flight, and all have momentum


# Outer state by name


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    stepped=st.booleans(),
)
def test_shards_taken_apart_and_put_together_are_the_same_values(
    sizes: list[int], before: int, after: int, stepped: bool
) -> None:
    numel = sum(sizes)
    whole, momentum = torch.randn(numel), torch.randn(numel)

    def cut(values: Tensor, shards: int) -> list[Tensor]:
        length = -(-numel // shards)
        padded = torch.cat([values, torch.zeros(length * shards - numel)])
        return list(padded.split(length))

    def state(part: Tensor) -> dict[str, Any]:
        return {"momentum_buffer": part, "step": torch.tensor(3.0)} if stepped else {}

    shards = [OuterState(v, state(m), 3) for v, m in zip(cut(whole, before), cut(momentum, before), strict=True)]
    names, tensors = [f"p{index}" for index in range(len(sizes))], [torch.empty(size) for size in sizes]
    parameters = list(to_parameters({"names": names, "sizes": sizes}, shards).values())
    joined = [WholeLayout(names, tensors, index, after).to_shard(parameters) for index in range(after)]
    assert all(torch.equal(a.values, b) for a, b in zip(joined, cut(whole, after), strict=True))
    if stepped:
        assert all(
            torch.equal(a.state["momentum_buffer"], b) for a, b in zip(joined, cut(momentum, after), strict=True)
        )
        assert {float(a.state["step"]) for a in joined} == {a.rounds for a in joined} == {3}
    else:
        assert all(a.state == {} for a in joined)


def test_a_parameter_without_momentum_gets_zeros_and_the_count_of_the_others() -> None:
    old = OuterParameter(torch.ones(2), {"momentum_buffer": torch.full((2,), 5.0), "step": torch.tensor(4.0)}, 7)
    new = OuterParameter(torch.full((3,), 2.0), {}, 0)
    layout = WholeLayout(["new", "old"], [new.values, torch.ones(3)], 0, 1)
    joined = layout.to_shard([new, old])
    assert joined.values.tolist() == [2, 2, 2, 1, 1, 0]
    assert joined.state["momentum_buffer"].tolist() == [0, 0, 0, 5, 5, 0]
    assert joined.state["step"] == 4
    assert joined.rounds == 7


# Flights of an earlier run


def outer_parameters(engine: StreamingDiLoCo) -> Mapping[str, OuterParameter]:
    return named_outer(engine.rounds.fragments, engine.topology.in_group).parameters


class Run:
    """Two simulated groups after some inner steps."""

    def __init__(self, steps: int, rates: Sequence[float] = (), **choices: Any) -> None:
        self.models = [nn.Sequential(*mlp(), nn.BatchNorm1d(3)) for _ in range(2)]
        optimizers = [inner_optimizer("adamw", model) for model in self.models]
        self.groups = SimulatedGroups(self.models, **choices)
        with_links(self.groups.engines, rates or [0.0] * 2)
        for step in range(1, steps + 1):
            for group, (model, optimizer) in enumerate(zip(self.models, optimizers, strict=True)):
                train_step(model, optimizer, group, step)
            self.groups.step()

    def states(self) -> list[list[dict[str, Any] | None]]:
        return [[through_a_file(engine.state_dict())] for engine in self.groups.engines]

    def landed(self) -> dict[str, Tensor]:
        """The outer parameters and buffers once all flights have landed."""
        for engine in self.groups.engines:
            engine.land_all()
        buffers = {
            name: v for part in self.groups.engines[0].rounds.fragments for name, v in part.buffers.named().items()
        }
        return {**self.groups.outer_state_dict(), **buffers}


# The statistics are in flight, too.
WITH_STATISTICS: dict[str, Any] = {**ENGINE, "fragments": [*LAYERS[:2], ["4.*", "7.*"], ["6.*"]]}


@pytest.mark.parametrize("compression", sorted(COMPRESSIONS.keys() - {"top_k", "random_block"}))
@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("exchange", ["gather", "two_shot"])
def test_flights_land_as_their_groups_would_have_landed_them(compression: str, poisoned: bool, exchange: str) -> None:
    if exchange == "two_shot" and COMPRESSIONS[compression].varies():
        exchange = "auto"  # which is the other one
    choices = {**WITH_STATISTICS, "compression": compression, "exchange": exchange, "outer_momentum": 0.9}
    run = Run(IN_FLIGHT_AFTER, **choices)
    if poisoned:
        run.models[1][4].weight.data[0, 0] = float("nan")
        for _ in range(8):  # the next launch of its fragment, which is then in flight
            run.groups.step()
    states = run.states()
    assert len(states[0][0]["flights"]) == 3  # type: ignore[index]
    one, other = (flight["buffers"] for of in states for flight in of[0]["flights"] if flight["travelling"])  # type: ignore[index]
    assert not torch.equal(one[0], other[0]), "groups have statistics of their own"
    restart = restart_from(states, Settings(**choices))
    expected = run.landed()
    actual = {name: p.values.view_as(expected[name]) for name, p in restart.parameters.items()} | restart.buffers
    assert_same(actual, expected)
    counts = run.groups.engines[0].report()
    assert restart.counts["landings"] == counts["landings"]
    assert restart.counts["flights_dropped"] == 0
    for index, fragment in enumerate(run.groups.engines[0].fragments):
        momentum = run.groups.engines[0].rounds.fragments[index].outer.state["momentum_buffer"]
        assert torch.equal(
            torch.cat([restart.parameters[n].state["momentum_buffer"] for n in fragment.names]), momentum
        )


def test_flights_land_in_the_code_that_each_was_sent_in() -> None:
    choices = {**WITH_STATISTICS, "compression": ByLink(MENU)}
    run = Run(IN_FLIGHT_AFTER, rates=[1e9, 1.0], **choices)
    states = run.states()
    assert [{flight.get("choice", 0) for flight in of["flights"]} for (of,) in states] == [{0}, {2}]
    restart = restart_from(states, Settings(**choices))
    expected = run.landed()
    assert_same(
        {name: p.values.view_as(expected[name]) for name, p in restart.parameters.items()},
        {name: values for name, values in expected.items() if name in restart.parameters},
    )


def test_flights_land_without_buffers_that_are_not_finite() -> None:
    choices = {**WITH_STATISTICS, "overlap_steps": 1}
    run = Run(11, **choices)
    run.models[1][7].running_var[1] = float("nan")
    run.groups.step()
    states = run.states()
    assert [bool(flight["buffers"]) for flight in states[0][0]["flights"]] == [True]
    restart = restart_from(states, Settings(**choices))
    assert restart.buffers["7.running_var"].isfinite().all()
    assert_same(restart.buffers, {name: run.landed()[name] for name in restart.buffers})


def test_a_flight_lands_with_the_guard_and_the_parts_that_its_groups_had() -> None:
    models = [nn.Linear(200, 1, bias=False) for _ in range(2)]
    choices = {"sync_every": 2, "overlap_steps": 1, "outlier_guard": 2.0, "compression": "int4"}
    groups = SimulatedGroups(models, exchange=TwoShot((0.8, 0.2)), **choices)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 11):
        for group, model in enumerate(models):
            # What the second group sends last is far longer than what it sent before.
            length = 100.0 if group and step > 8 else 1.0
            model.weight.data += length * torch.randn(1, 200, generator=generator)
        groups.step()
    restart = restart_from([[engine.state_dict()] for engine in groups.engines], Settings(**choices))
    (landing,) = [landing for engine in groups.engines[:1] for landing in engine.land_all()]
    groups.engines[1].land_all()
    assert landing.outlying == (1,)
    assert torch.equal(restart.parameters["weight"].values, groups.outer_state_dict()["weight"].flatten())


@pytest.mark.parametrize("case", ["a group is missing", "another outer optimizer"])
def test_flights_that_cannot_be_landed_are_dropped_and_counted(case: str) -> None:
    run = Run(IN_FLIGHT_AFTER, **WITH_STATISTICS)
    states = run.states()
    chosen = Settings() if case == "a group is missing" else None
    if case == "a group is missing":
        states[0] = [None]
    expected = run.groups.outer_state_dict()
    restart = restart_from(states, chosen)
    assert_same({name: p.values.view_as(expected[name]) for name, p in restart.parameters.items()}, expected)
    assert restart.counts["flights_dropped"] == 3
    assert all(bool(p.state) == (chosen is not None) for p in restart.parameters.values())


def test_files_of_which_no_group_has_all_are_refused() -> None:
    (one,), (other,) = Run(3, **WITH_STATISTICS).states()
    with pytest.raises(ValueError, match="No worker group has the files of all its ranks"):
        restart_from([[one, None], [None, other]], Settings())


@settings(max_examples=15, deadline=None)
@given(
    fragments=st.sampled_from(["balanced", "strided", [["*"]], LAYERS]),
    groups=st.integers(1, 3),
    compression=st.sampled_from(sorted(COMPRESSIONS)),
)
def test_any_groups_and_fragments_go_on_from_the_same_outer_parameters_and_agree(
    fragments: Any, groups: int, compression: str
) -> None:
    before = Run(IN_FLIGHT_AFTER, **WITH_STATISTICS)
    restart = restart_from(before.states(), Settings())
    models = [mlp() for _ in range(groups)]
    if fragments == LAYERS:
        fragments = LAYERS[::-1]
    after = SimulatedGroups(
        models,
        sync_every=3,
        overlap_steps=1,
        layers_per_fragment=1,
        fragments=fragments,
        compression=compression,
    )
    for engine in after.engines:
        engine.restart(restart)
        assert engine.inner_steps == IN_FLIGHT_AFTER
        assert engine.steps_in_rounds == 0
    for name, values in after.outer_state_dict().items():
        assert torch.equal(values.flatten(), restart.parameters[name].values)
        assert all(torch.equal(dict(model.named_parameters())[name].detach(), values) for model in models)
    for step in range(1, 8):
        for group, model in enumerate(models):
            train_step(model, inner_optimizer("sgd", model), group, step)
        landed = after.step()
        assert (
            all(bool(group) == (step % 3 == 1 and step > 3) for group in landed) or len(after.engines[0].fragments) > 1
        )
    assert all(
        torch.equal(a.outer.values, b.outer.values)
        for e in after.engines
        for a, b in zip(e.rounds.fragments, after.engines[0].rounds.fragments, strict=True)
    )


@pytest.mark.parametrize(("warmup_steps", "left"), [(0, 0), (IN_FLIGHT_AFTER - 1, 0), (IN_FLIGHT_AFTER + 3, 3)])
def test_rounds_that_start_anew_have_what_is_left_of_the_warmup_and_resume_bit_for_bit(
    warmup_steps: int, left: int
) -> None:
    choices: dict[str, Any] = {"sync_every": 3, "overlap_steps": 1, "warmup_steps": warmup_steps}
    restart = restart_from(Run(IN_FLIGHT_AFTER, **WITH_STATISTICS).states(), Settings())
    models, others = ([mlp() for _ in range(2)] for _ in range(2))
    whole, resumed = SimulatedGroups(models, **choices), SimulatedGroups(others, **choices)
    for engine in whole.engines:
        engine.restart(restart)
    assert trained_further(whole, models, 7) == [True] * left + [False] * (7 - left)
    for engine, stopped in zip(resumed.engines, whole.engines, strict=True):
        engine.load_state_dict(through_a_file(stopped.state_dict()))
    trained_further(whole, models, 7)
    trained_further(resumed, others, 7)
    assert_same(resumed.outer_state_dict(), whole.outer_state_dict())
    for model, other in zip(models, others, strict=True):
        assert_same(other.state_dict(), model.state_dict())


def trained_further(groups: SimulatedGroups, models: list[nn.Sequential], steps: int) -> list[bool]:
    """Whether each of some more inner steps is one of the warm-up."""
    warm = []
    for _ in range(steps):
        warm.append(groups.engines[0].is_warming_up)
        optimizers = [inner_optimizer("sgd", model) for model in models]
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, optimizer, group, groups.engines[0].inner_steps)
        groups.average_gradients()
        for optimizer in optimizers:
            optimizer.step()
        groups.step()
    return warm


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
        model = nn.parallel.DistributedDataParallel(mlp(), process_group=None)
        engine = StreamingDiLoCo(model, worker_groups=1, **ENGINE)
        for step in range(1, IN_FLIGHT_AFTER + 1):
            x, y = batch(0, step)
            nn.functional.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
            engine.step()
        state = through_a_file(engine.state_dict())
        engine.land_all()
        return state, outer_parameters(engine)

    def resume(rank: int, world_size: int, restart: Any) -> Any:
        engine = StreamingDiLoCo(mlp(), worker_groups=1, **ENGINE)
        engine.restart(restart)
        return outer_parameters(engine)

    three = run_ranks(save, 3)
    restart = restart_from([[state for state, _ in three]], Settings(**ENGINE))
    for outer in (three[0][1], *run_ranks(resume, 2, restart), *run_ranks(resume, 4, restart)):
        for name, parameter in outer.items():
            assert torch.equal(parameter.values, restart.parameters[name].values)
            momentum = restart.parameters[name].state["momentum_buffer"]
            assert torch.equal(parameter.state["momentum_buffer"], momentum)


# Checkpoints of fits

CHECKPOINT_AT = 19  # fragments have landed before, and two are in flight


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two groups with flights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    run_processes(
        run_fit, 2, LIGHTNING, CHECKPOINT_AT + 2, saving(LIGHTNING, folder, every_n_train_steps=CHECKPOINT_AT)
    )
    return folder / f"step={CHECKPOINT_AT}.ckpt"


def expected_restart(checkpoint: Path) -> Any:
    files = sorted(save_folder(checkpoint).glob("rank_*.pt"))
    states = [[torch.load(file, weights_only=True)["engine"]] for file in files]
    assert len(states[0][0]["flights"]) == 2
    return restart_from(states, Settings())  # type: ignore[arg-type]


def logged(rank: int, world_size: int, path: str, steps: int, choices: dict[str, Any], **more: Any) -> Any:
    """A fit resumed from a checkpoint, and what our loggers warned of."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_sdiloco").addHandler(handler)
    return run_fit(rank, world_size, LIGHTNING, steps, [], path, **choices), messages


@pytest.mark.parametrize(("world_size", "groups"), [(3, 3), (4, 2), (1, 1), (2, 1)])
def test_other_groups_start_from_the_outer_parameters_and_momentum_with_the_flights_landed(
    world_size: int, groups: int, checkpoint: Path
) -> None:
    restart = expected_restart(checkpoint)
    ranks = run_processes(logged, world_size, str(checkpoint), CHECKPOINT_AT + 11, {"groups": groups})
    files = sorted(save_folder(checkpoint).glob("rank_*.pt"))
    for rank, (trained, messages) in enumerate(ranks):
        first = trained["trace"][CHECKPOINT_AT]
        for name, parameter in restart.parameters.items():
            assert torch.equal(first[f"outer {name}"].flatten(), parameter.values)
            assert torch.equal(first[name].flatten(), parameter.values), "the local model starts there too"
        assert all(torch.equal(first[name], values) for name, values in restart.buffers.items())
        assert_same(trained["outer"], ranks[0][0]["outer"])
        group = rank * groups // world_size
        inner = {name: v for name, v in first.items() if name.split()[0].isdigit()}
        if group < 2:
            own = torch.load(files[group], weights_only=True)["optimizer_states"][0]["state"]
            assert_same(inner, {f"{i} {key}": value for i, state in own.items() for key, value in state.items()})
        else:
            assert inner == {}, "a fresh inner optimizer"
        told = [message for message in messages if "not resumed exactly" in message]
        assert len(told) == (rank == 0), "said once"
        if rank == 0:
            assert "Flights lost so far: 0" in told[0]
            assert f"fresh inner optimizer: {'2' if groups == 3 else 'none'}" in told[0]
    report = ranks[0][0]["report"]
    assert report["inner_steps"] == CHECKPOINT_AT + 11
    assert report["flights_dropped"] == 0


def test_the_file_of_a_group_that_is_gone_costs_its_flights_and_its_optimizer_state(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint.parent, tmp_path / "copy")
    copied = tmp_path / "copy" / checkpoint.name
    (save_folder(copied) / "rank_00001.pt").unlink()
    ranks = run_processes(logged, 3, str(copied), CHECKPOINT_AT + 2, {"groups": 3})
    assert "Flights lost so far: 2" in "".join(ranks[0][1])
    assert "fresh inner optimizer: 1, 2" in "".join(ranks[0][1])
    assert [trained["report"]["flights_dropped"] for trained, _ in ranks] == [2, 2, 2]


def test_an_altered_file_is_refused_on_every_rank_also_for_other_groups(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint.parent, tmp_path / "copy")
    copied = tmp_path / "copy" / checkpoint.name
    file = save_folder(copied) / "rank_00001.pt"
    file.write_bytes(file.read_bytes()[:-1])
    errors = run_processes(logged, 3, str(copied), 30, {"groups": 3}, expect_failure=True)
    assert sorted(errors) == [0, 1, 2]
    assert all("rank_00001.pt" in error and "is not what was saved" in error for error in errors.values())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"sync_every": 9}, "sync_every was 8, now it is 9"),
        ({"compression": "fp32"}, "compression was 'fp4', now it is 'fp32'"),
        ({"fragments": "balanced"}, "fragments was 'strided', now it is 'balanced'"),
        ({"outer_optimizer": torch.optim.AdamW}, "outer_optimizer was None, now it is AdamW"),
        ({}, "not resumed exactly"),
    ],
)
def test_other_settings_start_the_rounds_anew_if_asked(changed: dict[str, Any], told: str, checkpoint: Path) -> None:
    ranks = run_processes(logged, 2, str(checkpoint), CHECKPOINT_AT + 11, {**changed, "on_resume": "restart"})
    assert told in "".join(ranks[0][1])
    assert_same(ranks[0][0]["outer"], ranks[1][0]["outer"])
    assert ranks[0][0]["report"]["flights_dropped"] == (2 if "outer_optimizer" in changed else 0)
    first_inner = {k: v for k, v in ranks[1][0]["trace"][CHECKPOINT_AT].items() if k.split()[0].isdigit()}
    assert first_inner, "the inner optimizer goes on"


def test_other_groups_with_other_settings_are_refused_unless_asked(checkpoint: Path) -> None:
    errors = run_processes(logged, 3, str(checkpoint), 30, {"groups": 3, "sync_every": 9}, expect_failure=True)
    assert all("sync_every was 8, now it is 9" in error and "on_resume='restart'" in error for error in errors.values())


# Parameters that are frozen and unfrozen


def test_a_recut_lands_flights_keeps_momentum_and_gives_frozen_parameters_their_outer_value() -> None:
    def run(rank: int, world_size: int) -> None:
        model = mlp()
        model[0].requires_grad_(False)
        engine = StreamingDiLoCo(model, sync_every=8, overlap_steps=5, layers_per_fragment=1)
        assert not engine.has_other_parameters()
        train(model, engine, rank, 20)
        landed_before = engine.report()["landings"]
        in_flight = len(engine.in_flight)
        assert in_flight
        model[0].requires_grad_(True)
        model[6].requires_grad_(False)
        assert engine.has_other_parameters()
        assert len(engine.recut()) == in_flight
        assert engine.report()["landings"] == landed_before + in_flight
        assert {name for fragment in engine.fragments for name in fragment.names} == {
            f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")
        }
        assert engine.steps_in_rounds == 0
        outer = outer_parameters(engine)
        assert outer["2.weight"].state["momentum_buffer"].any()
        assert not any(value.any() for value in outer["0.weight"].state.values())
        train(model, engine, rank, 7)
        assert engine.in_flight == (), "a round begins anew"
        train(model, engine, rank, 1)
        assert engine.in_flight == (0,)
        engine.finish()
        return {name: p.detach() for name, p in model.named_parameters()}

    one, other = run_ranks(run, 2)
    assert_same(one, other)


def train(model: nn.Module, engine: StreamingDiLoCo, group: int, steps: int) -> None:
    for step in range(1, steps + 1):
        x, y = batch(group, 100 * engine.inner_steps + step)
        nn.functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter -= 0.05 * parameter.grad
                parameter.grad = None
        engine.step()


def test_a_recut_gives_all_groups_the_new_buffers_of_the_first() -> None:
    def run(rank: int, world_size: int) -> Tensor:
        model = mlp()
        engine = StreamingDiLoCo(model, **{**ENGINE, "fragments": "balanced"})
        train(model, engine, rank, 3)
        model.append(nn.BatchNorm1d(3))
        model[7].running_mean.fill_(float(rank))
        engine.recut()
        train(model, engine, rank, 16)
        engine.finish()
        return model[7].running_mean.clone()

    one, other = run_ranks(run, 2)
    assert torch.equal(one, other)


def test_after_a_recut_new_fragments_have_the_learning_rate_of_the_others() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    schedule = partial(LinearLR, start_factor=0.1, total_iters=100)
    engine = StreamingDiLoCo(
        model, sync_every=4, overlap_steps=0, layers_per_fragment=1, outer_lr=1.0, outer_lr_schedule=schedule
    )
    before = [landing for _ in range(15) for landing in engine.step()]
    model[0].requires_grad_(True)
    engine.recut()
    after = [landing for _ in range(7) for landing in engine.step()]
    assert {landing.fragment for landing in after} == set(range(4))
    rates = {landing.outer_lr for landing in after}
    assert len(rates) == 1
    assert min(rates) > max(landing.outer_lr for landing in before)


def test_a_recut_that_only_one_rank_wants_is_refused_everywhere() -> None:
    def run(rank: int, world_size: int) -> None:
        model = mlp()
        engine = StreamingDiLoCo(model, **{**ENGINE, "fragments": "balanced"})
        if rank == 1:
            model[0].requires_grad_(False)
        engine.recut()

    errors = run_ranks(run, 2, expect_failure=True)
    assert len(errors) == 2
    assert all("The model differs between ranks: 0.weight" in error for error in errors.values())


def test_what_becomes_trainable_within_an_epoch_is_an_error() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    engine = StreamingDiLoCo(model, sync_every=2, overlap_steps=0, layers_per_fragment=1)
    engine.step()
    model[0].requires_grad_(True)
    with pytest.raises(AgreementError, match="change what is trainable between epochs"):
        engine.step()


@pytest.mark.parametrize("is_added", [False, True])
def test_what_becomes_trainable_within_a_round_is_an_error_at_the_next_launch_of_any_fragment(is_added: bool) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    engine = StreamingDiLoCo(model, sync_every=9, overlap_steps=0, fragments=LAYERS[1:])
    for _ in range(9):
        engine.step()
    assert engine.report()["launches"] == 1
    if is_added:
        model.append(nn.Sequential(nn.Linear(3, 3)))
    else:
        model[0].requires_grad_(True)
    for _ in range(2):
        engine.step()
    with pytest.raises(AgreementError, match=f"2 parameters .* such as '{'7.0' if is_added else '0'}.weight'"):
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


@pytest.mark.parametrize(("distribution", "world_size"), [(LIGHTNING, 2), (LIGHTNING, 4), ("pytorch_lightning", 2)])
def test_a_finetuning_callback_cuts_the_model_anew_between_epochs_in_all_groups_alike(
    distribution: str, world_size: int
) -> None:
    ranks = run_processes(finetune, world_size, 2, distribution, [])
    for trained in ranks:
        assert trained["fragments"] == sorted(
            f"net.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")
        )
        assert_same(trained["net"], ranks[0]["net"])
        starts = trained["trace"]
        assert torch.equal(starts[0]["net.0.weight"], starts[9]["net.0.weight"]), "frozen in the first epoch"
        assert not torch.equal(starts[11]["net.0.weight"], starts[19]["net.0.weight"]), "trained in the second"
    if world_size == 4:
        # The unfrozen layer is in DistributedDataParallel too: the ranks of a group hold the same local values.
        for step in range(30):
            assert_same(
                {name: v for name, v in ranks[0]["trace"][step].items() if name.startswith("net.")},
                {name: v for name, v in ranks[1]["trace"][step].items() if name.startswith("net.")},
            )


@pytest.mark.parametrize(
    ("step", "when"),
    [(10, "every_n_epochs"), (13, "every_n_train_steps"), (20, "every_n_epochs")],
)
def test_a_fit_resumes_to_the_same_bits_after_layers_were_unfrozen_and_frozen(
    step: int, when: str, tmp_path: Path
) -> None:
    saved = run_processes(finetune, 2, 2, LIGHTNING, saving(LIGHTNING, tmp_path, **{when: 1}))
    resumed = run_processes(finetune, 2, 2, LIGHTNING, [], str(tmp_path / f"step={step}.ckpt"))
    for one, other in zip(resumed, saved, strict=True):
        assert sorted(one["trace"]) == list(range(step, 30))
        for at, values in one["trace"].items():
            assert_same(values, other["trace"][at])
        assert_same(one["net"], other["net"])


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
    assert_same(other, outer)
    assert steps == other_steps
    assert "net.0.weight" in outer


def test_what_was_unfrozen_is_trained_on_by_other_groups_too(tmp_path: Path) -> None:
    run_processes(finetune, 2, 2, LIGHTNING, saving(LIGHTNING, tmp_path, every_n_train_steps=13))
    ranks = run_processes(finetune, 3, 3, LIGHTNING, [], str(tmp_path / "step=13.ckpt"))
    for trained in ranks:
        starts = trained["trace"]
        assert not torch.equal(starts[14]["net.0.weight"], starts[19]["net.0.weight"])
        assert_same(trained["outer"], ranks[0]["outer"])
