"""Groups whose values are not finite, that do not answer, or that go away."""

import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdiloco import AgreementError, ExchangeError, Landing, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.comm.exchange import Unanswered
from lightning_sdiloco.comm.exchange.direct import DirectExchange, _Transfer
from lightning_sdiloco.comm.layout import GroupLayout
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.launch.failures import Failures
from tests import fits
from tests.fits import LIGHTNING
from tests.ranks import run_processes, run_ranks
from tests.training import LAYERS, backward, batch, inner_optimizer, mlp, train_step


@torch.no_grad()
def poison(model: nn.Module, everywhere: bool = False) -> None:
    model[0].weight[3, 4] = float("nan")
    for parameter in model.parameters() if everywhere else ():
        parameter.fill_(float("nan"))


class Run:
    """Simulated groups of which one can be poisoned."""

    def __init__(self, groups: int, **choices: Any) -> None:
        self.models = [mlp() for _ in range(groups)]
        self.optimizers = [inner_optimizer("adamw", model) for model in self.models]
        self.choices, self.steps = choices, 0
        self.engine = self._groups()

    def _groups(self) -> SimulatedGroups:
        return SimulatedGroups(self.models, [[optimizer] for optimizer in self.optimizers], **self.choices)

    def resume(self) -> None:
        """Goes on in new engines, from what a checkpoint holds."""
        states = [engine.state_dict() for engine in self.engine.engines]
        held = [{name: values.clone() for name, values in model.state_dict().items()} for model in self.models]
        self.engine = self._groups()
        for engine, state, model, values in zip(self.engine.engines, states, self.models, held, strict=True):
            model.load_state_dict(values)
            engine.load_state_dict(state)

    def step(self, poisoned: tuple[int, ...] = (), everywhere: bool = False) -> list[Landing]:
        self.steps += 1
        for group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train_step(model, optimizer, group, self.steps)
            if group in poisoned:
                poison(model, everywhere)
        landings = self.engine.step()
        return landings[0]

    def until(self, step: int) -> list[Landing]:
        return [landing for _ in range(self.steps, step) for landing in self.step()]

    def finite(self) -> bool:
        state = [v for o in self.optimizers for s in o.state.values() for v in s.values()]
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        return all(bool(values.isfinite().all()) for values in state + parameters)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
@pytest.mark.parametrize("compression", ["fp32", "bf16", "fp4"])
def test_a_group_that_is_not_finite_is_left_out_by_all_and_recovers(mixing: float, compression: str) -> None:
    run = Run(3, sync_every=6, overlap_steps=2, fragments=LAYERS, mixing=mixing, compression=compression)
    run.until(5)
    landings = run.step(poisoned=(1,)) + run.until(8)
    assert [landing.left_out for landing in landings] == [(1,)]
    assert run.finite(), "the group took the outer values wherever its own were not finite"
    assert all(landing.left_out == () for landing in run.until(40)[1:])
    run.engine.finish()
    assert run.finite()


def test_a_group_that_recovers_keeps_what_was_finite() -> None:
    runs = [Run(2, sync_every=4, overlap_steps=0, fragments=LAYERS, mixing=0.5) for _ in range(2)]
    for run, poisoned in zip(runs, ((1,), ()), strict=True):
        run.until(3)
        run.step(poisoned)
    values, expected = (run.models[1].state_dict() for run in runs)
    assert [name for name in values if not torch.equal(values[name], expected[name])] == ["0.weight", "0.bias"]


# Codes of four bits are finite whatever they encode, so the values themselves must tell whether a group counted.
@pytest.mark.parametrize("compression", ["fp32", "bf16", "fp4"])
def test_the_mean_is_that_of_the_groups_that_count(compression: str) -> None:
    plain = {"sync_every": 2, "overlap_steps": 0, "fragments": [["*"]], "mixing": 0.0, "exchange": "gather"}
    three, two = (Run(groups, compression=compression, **plain) for groups in (3, 2))
    for run, poisoned in ((three, (2,)), (two, ())):
        run.step()
        run.step(poisoned)
    for name, values in two.engine.outer_state_dict().items():
        assert torch.equal(three.engine.outer_state_dict()[name], values)


@pytest.mark.parametrize("resumed_after", [(), (5,), (9,), (4, 8)])
def test_a_group_that_stays_not_finite_ends_the_run_at_the_third_time_in_a_row(resumed_after: tuple[int, ...]) -> None:
    run = Run(2, sync_every=4, overlap_steps=0, fragments=[["*"]])
    for step in range(1, 12):
        run.step(poisoned=(1,))
        if step in resumed_after:
            run.resume()
    with pytest.raises(AgreementError, match=r"worker group 1 was not finite 3 times in a row"):
        run.step(poisoned=(1,))


# In the second case each event is told of twice: a fragment is launched just before the group recovers.
@pytest.mark.parametrize(
    ("sync_every", "overlap_steps", "fragments"), [(4, 0, [["*"]]), (8, 4, [["[02].*"], ["[46].*"]])]
)
def test_being_left_out_twice_and_then_recovering_is_no_error(
    sync_every: int, overlap_steps: int, fragments: list[list[str]]
) -> None:
    run = Run(2, sync_every=sync_every, overlap_steps=overlap_steps, fragments=fragments, compression="fp32")
    for step in range(1, 12 * sync_every + 1):
        run.step((1,) if step % (3 * sync_every) in (sync_every, 2 * sync_every) else (), everywhere=True)
    assert run.finite()


def test_all_groups_not_finite_is_an_error_that_names_them() -> None:
    run = Run(2, sync_every=4, overlap_steps=0, fragments=[["*"]])
    run.until(3)
    with pytest.raises(AgreementError, match=r"fragment 0, .* not finite in any worker group \(group 0, group 1\)"):
        run.step(poisoned=(0, 1))


class WithStatistics(nn.Sequential):
    """A model of 103,000 parameters with BatchNorm, and with a mask that is infinite by design."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 500), nn.BatchNorm1d(500), nn.Linear(500, 200), nn.Linear(200, 3))
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))


def statistics(model: nn.Module) -> Tensor:
    return torch.cat([model[1].running_mean, model[1].running_var])


class WithBuffers(Run):
    """The same, of models whose statistics can be poisoned."""

    def __init__(self, groups: int, **choices: Any) -> None:
        super().__init__(1)
        self.models = [WithStatistics() for _ in range(groups)]
        self.optimizers = [inner_optimizer("adamw", model) for model in self.models]
        self.engine = SimulatedGroups(self.models, sync_every=4, fragments=[["*"]], compression="fp32", **choices)

    def poisoned_step(self, values: dict[int, float]) -> list[Landing]:
        self.steps += 1
        for group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train_step(model, optimizer, group, self.steps)
            if group in values:
                model[1].running_var[7] = values[group]
        return self.engine.step()[0]

    def shown(self, group: int) -> Tensor:
        with self.engine.engines[group].evaluate():
            return statistics(self.models[group]).clone()


@pytest.mark.parametrize("mixing", [0.0, 0.5, 1.0])
def test_buffers_that_are_not_finite_reach_no_other_group_and_not_the_outer_model(
    mixing: float, caplog: pytest.LogCaptureFixture
) -> None:
    run = WithBuffers(3, overlap_steps=1, mixing=mixing)
    run.until(3)
    run.poisoned_step({1: float("nan")})
    sent = [statistics(model).clone() for model in run.models]
    landings = run.step()
    assert [landing.left_out for landing in landings] == [()], "what was trained counts"
    means = run.shown(0)
    torch.testing.assert_close(means[:500], sum(sent[1:], sent[0])[:500] / 3)
    torch.testing.assert_close(means[500:], (sent[0] + sent[2])[500:] / 2)
    assert all(torch.equal(run.shown(group), means) for group in (1, 2))
    assert torch.equal(run.models[1][1].running_var, means[500:])
    assert all(bool(statistics(model).isfinite().all()) for model in run.models)
    told = [record.message for record in caplog.records if "left out of the mean" in record.message]
    assert len(told) == 1
    assert "'1.running_var' of worker group 1." in told[0]
    run.until(12)
    run.engine.finish()
    assert all(torch.equal(model.mask, WithStatistics().mask) for model in run.models)
    assert all(torch.equal(statistics(model), statistics(run.models[0])) for model in run.models)
    assert len([record for record in caplog.records if "left out of the mean" in record.message]) == 1


def test_an_outer_buffer_stays_as_it_was_where_no_group_has_a_finite_one() -> None:
    run = WithBuffers(2, overlap_steps=0)
    run.until(7)
    before = run.shown(0)
    run.poisoned_step({0: float("nan"), 1: float("inf")})
    after = run.shown(1)
    assert torch.equal(after[500:], before[500:])
    assert not torch.equal(after[:500], before[:500])
    assert all(bool(statistics(model).isfinite().all()) for model in run.models)


@pytest.mark.parametrize("finishes", [False, True])
@pytest.mark.parametrize("warmup_steps", [0, 20])
def test_the_plain_mean_of_buffers_is_over_those_that_are_finite(warmup_steps: int, finishes: bool) -> None:
    run = WithBuffers(2, overlap_steps=1, warmup_steps=warmup_steps)
    for step in (1, 2):
        for group, (model, optimizer) in enumerate(zip(run.models, run.optimizers, strict=True)):
            backward(model, optimizer, group, step)
        run.engine.average_gradients()
        for optimizer in run.optimizers:
            optimizer.step()
        run.engine.step()
    run.models[0][1].running_var.fill_(float("nan"))
    expected = run.models[1][1].running_var.clone()
    if finishes:
        run.engine.finish()
        assert torch.equal(run.models[0][1].running_var, expected)
        return
    mean = run.engine.group_mean()
    with run.engine.engines[1].evaluate(mean):
        assert torch.equal(run.models[1][1].running_var, expected)


# fp4 would turn what is not finite into numbers.
@pytest.mark.parametrize("compression", ["fp32", "bf16"])
def test_momentum_and_outer_parameters_stay_finite_when_a_group_is_left_out(compression: str) -> None:
    run = Run(2, sync_every=4, overlap_steps=0, fragments=[["*"]], compression=compression)
    run.until(3)
    run.step(poisoned=(0,))
    outer = run.engine.engines[0].rounds.fragments[0].outer
    assert all(bool(values.isfinite().all()) for values in [outer.values, outer.state["momentum_buffer"]])


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize(("sync_every", "overlap_steps"), [(8, 7), (4, 3), (3, 2), (1, 0)])
def test_one_event_that_several_fragments_in_flight_tell_of_counts_once(
    sync_every: int, overlap_steps: int, resumes: bool
) -> None:
    choices = {"sync_every": sync_every, "overlap_steps": overlap_steps, "fragments": LAYERS}
    run = Run(2, **choices, compression="fp32")
    run.until(2 * sync_every - 1)
    landings = run.step(poisoned=(1,), everywhere=True)
    for step in range(run.steps + 1, 12 * sync_every + 1):
        if resumes:
            run.resume()
        landings += run.until(step)
    assert sum(landing.left_out == (1,) for landing in landings) >= 2
    assert run.finite()


def test_a_parameter_that_becomes_trainable_during_training_is_an_error_that_names_it() -> None:
    models = [mlp(), mlp()]
    for model in models:
        model[4].weight.requires_grad_(False)
    groups = SimulatedGroups(models, sync_every=3, overlap_steps=0, fragments=[["0.*", "2.*"], ["4.bias", "6.*"]])
    groups.step()
    for model in models:
        model[4].weight.requires_grad_(True)
    groups.step()
    with pytest.raises(AgreementError, match=r"1 parameters have become trainable, such as '4.weight'"):
        groups.step()


def train_with_timeout(rank: int, world_size: int, groups: int, at_step_9: str) -> None:
    size = world_size // groups
    # Only a flight has little time: on a busy machine everything else, DDP's gradients too, may take longer.
    topology = Topology.of_world(GroupLayout(world_size, groups), timedelta(seconds=30))
    model = mlp()
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=topology.in_group.process_group)
    engine = StreamingDiLoCo(
        model,
        topology=topology,
        sync_every=8,
        overlap_steps=3,
        fragments=[["0.*"], ["[246].*"]],
        timeout=timedelta(seconds=4),
    )
    optimizer = inner_optimizer("sgd", model)
    for step in range(1, 40):
        if step == 9 and rank // size == groups - 1:
            if at_step_9 == "stall":
                time.sleep(7)
            else:
                os._exit(3)
        train_step(wrapped, optimizer, rank // size, step)
        engine.step()


class CountsWholeMilliseconds:
    """Work that nobody completes. It waits as gloo does: for the whole milliseconds of the timeout."""

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout // timedelta(milliseconds=1) / 1000)
        raise RuntimeError("Timed out waiting for recv operation to complete")


def collect_in_vain(rank: int, world_size: int, seconds: float) -> str:
    exchange = DirectExchange(dist.group.WORLD, dist.group.WORLD)
    never = CountsWholeMilliseconds()
    posted = exchange.post([torch.zeros(1, dtype=torch.uint8)] * 2)
    with pytest.raises(Unanswered) as late:
        exchange.collect(posted._replace(transfers=[_Transfer(1, never, never)]), time.monotonic() + seconds)
    return str(late.value)


@pytest.mark.parametrize("seconds", [0.0199, 0.0109, 0.0])
def test_a_group_that_is_late_by_less_than_a_millisecond_has_not_gone_away(seconds: float) -> None:
    assert run_ranks(collect_in_vain, 2, seconds)[0] == "worker group 1 did not answer in time (rank 1)"


@pytest.mark.parametrize(("groups", "world_size"), [(3, 3), (2, 4)])
def test_a_group_that_does_not_answer_ends_the_run_everywhere_and_is_named(groups: int, world_size: int) -> None:
    errors = run_ranks(train_with_timeout, world_size, groups, "stall", expect_failure=True, timeout=60)
    assert sorted(errors) == list(range(world_size))
    size = world_size // groups
    for rank in range(world_size - size):
        assert f"worker group {groups - 1} did not answer" in errors[rank]
        assert "fragment 1, launched after inner step 12" in errors[rank]
        assert "raise timeout" in errors[rank]


@pytest.mark.parametrize(("groups", "world_size"), [(2, 2), (3, 3)])
def test_a_group_that_dies_ends_the_run_everywhere_and_is_named(groups: int, world_size: int) -> None:
    errors = run_ranks(train_with_timeout, world_size, groups, "die", expect_failure=True, timeout=40)
    told = r"worker group (\d) went away \(rank \1: .* while fragment [01], launched after inner step (8|12), was in"
    named = [re.search(told, errors[rank]) for rank in range(world_size - 1)]
    # A rank that learns of it late may find another one gone for the same reason first.
    assert str(groups - 1) in [match and match[1] for match in named]
    assert None not in named


# In real trainers: what the other ranks say of a rank whose code raised an exception


SIGNALS = {"a kill": signal.SIGKILL, "an interrupt": signal.SIGINT}


def raising(distribution: str, where: str, is_failing: bool) -> Any:
    """A module that fails in one place, in one rank."""
    base = type(fits.module(distribution))

    class Raising(base):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self._fail("configure_optimizers")
            return super().configure_optimizers()

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            if index == 5:
                self._fail("training_step")
            return super().training_step(parts, index)

        def validation_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
            if not self.trainer.sanity_checking:
                self._fail("validation_step")
            self.log("loss", super().training_step(parts, index), sync_dist=True)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self._fail("on_save_checkpoint")

        def _fail(self, place: str) -> None:
            if is_failing and place == where:
                raise ArithmeticError(f"boom in {where}")
            if is_failing and place == "training_step" and where in SIGNALS:
                os.kill(os.getpid(), SIGNALS[where])

    return Raising()


class RaisingData(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Batches of a group, of which one cannot be loaded."""

    def __init__(self, group: int, is_failing: bool) -> None:
        self.group, self.is_failing = group, is_failing

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(1000):
            if self.is_failing and step == 5:
                raise ArithmeticError("boom in the data")
            yield batch(self.group, step)


def fit_that_fails(
    rank: int, world_size: int, folder: Path, where: str, failing: int, distribution: str
) -> tuple[str, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_sdiloco").addHandler(handler)
    strategy = fits.strategy(
        distribution,
        worker_groups=2,
        sync_every=8,
        overlap_steps=2,
        fragments=[["*"]],
        timeout=timedelta(seconds=20),
    )
    trainer = fits.trainer(
        distribution,
        strategy=strategy,
        devices=world_size,
        max_steps=40,
        enable_checkpointing=where == "on_save_checkpoint",
        val_check_interval=4,
        limit_val_batches=2,
        default_root_dir=folder,
    )
    group = rank // (world_size // 2)
    data = RaisingData(group, where == "the data" and rank == failing)
    loader = DataLoader(data, batch_size=None, num_workers=int(where == "the data"))
    error = ""
    try:
        trainer.fit(
            raising(distribution, where, rank == failing), loader, DataLoader(RaisingData(0, False), batch_size=None)
        )
    except BaseException as caught:
        error = "".join(traceback.format_exception_only(caught))
    return error, said


def failures(tmp_path: Path, world_size: int, where: str, failing: int, distribution: str) -> Any:
    def run(rank: int, world_size: int) -> tuple[str, list[str]]:
        return fit_that_fails(rank, world_size, tmp_path, where, failing, distribution)

    started = time.monotonic()
    ranks = run_processes(run, world_size)
    assert time.monotonic() - started < 30
    return ranks


GONE = "Rank 0, which keeps word of which rank failed first, has ended. Its output names the cause."


@pytest.mark.parametrize(
    ("world_size", "failing", "where", "distribution"),
    [
        (2, 1, "training_step", LIGHTNING),
        (2, 1, "training_step", "pytorch_lightning"),
        (4, 3, "training_step", LIGHTNING),
        (4, 1, "training_step", LIGHTNING),
        (4, 2, "validation_step", LIGHTNING),
        (2, 1, "on_save_checkpoint", LIGHTNING),
        (2, 1, "configure_optimizers", LIGHTNING),
        (2, 1, "the data", LIGHTNING),
    ],
)
def test_an_exception_in_one_rank_ends_all_and_its_rank_is_named(
    world_size: int, failing: int, where: str, distribution: str, tmp_path: Path
) -> None:
    ranks = failures(tmp_path, world_size, where, failing, distribution)
    error, said = ranks[failing]
    assert f"boom in {where}" in error
    assert said == []
    told = f"Rank {failing} (worker group {failing // (world_size // 2)}) failed first: ArithmeticError: "
    for rank, (error, said) in enumerate(ranks):
        if rank != failing:
            named = [words for words in said if words.startswith(told) and f"boom in {where}" in words]
            # Some notice only when rank 0 has ended, and with it what it keeps.
            assert named or (rank != 0 and GONE in said)
            assert sys.version_info < (3, 11) or (named + [GONE])[0] in error


def test_an_interrupt_of_one_rank_ends_all_and_its_rank_is_named(tmp_path: Path) -> None:
    (error, said), (interrupted, _) = failures(tmp_path, 2, "an interrupt", 1, LIGHTNING)
    assert interrupted.strip() == "SystemExit: 1"
    assert "ExchangeError" in error or "RuntimeError" in error
    assert "Rank 1 (worker group 1) failed first: KeyboardInterrupt" in said


def test_an_exception_in_rank_0_ends_all_and_they_are_sent_to_its_output(tmp_path: Path) -> None:
    ranks = failures(tmp_path, 4, "training_step", 0, LIGHTNING)
    told = "Rank 0 (worker group 0) failed first: ArithmeticError: boom in training_step"
    assert [{told, GONE} & set(said) for _, said in ranks[1:]].count(set()) == 0


@pytest.mark.parametrize(("world_size", "killed"), [(2, 1), (4, 3)])
def test_a_rank_that_was_killed_ends_all_and_nobody_is_blamed(world_size: int, killed: int, tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> None:
        error, said = fit_that_fails(rank, world_size, tmp_path, "a kill", killed, LIGHTNING)
        raise RuntimeError(f"{error}\n{said}")

    errors = run_processes(run, world_size, expect_failure=True)
    for rank in set(range(world_size)) - {killed}:
        assert "failed first:" not in errors[rank]
        assert re.search("lost contact|" + GONE, errors[rank])


def test_word_of_an_earlier_run_is_not_taken_for_that_of_a_later_one() -> None:
    store = torch.distributed.HashStore()
    earlier, later = ([Failures(store, rank, rank, 2) for rank in range(2)] for _ in range(2))
    earlier[1].leave(ValueError("boom"))
    # The ranks count their runs, each for itself; here they share one count.
    later[0]._key = later[1]._key = "later"
    error = ExchangeError("worker group 1 went away")
    later[0].leave(error)
    assert sys.version_info < (3, 11) or "none has left word of a failure" in error.__notes__[0]


class SilentStore:
    """A store whose host does not answer any more."""

    def compare_set(self, *args: Any) -> bytes:
        time.sleep(60)
        return b""


def test_a_store_that_does_not_answer_keeps_no_rank_from_ending() -> None:
    error, started = ExchangeError("worker group 0 went away"), time.monotonic()
    Failures(SilentStore(), 1, 1, 2).leave(error)
    assert time.monotonic() - started < 10
    assert sys.version_info < (3, 11) or error.__notes__ == [GONE]
