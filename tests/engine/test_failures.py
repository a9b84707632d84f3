"""Groups whose values are not finite, that do not answer in time, or that go away; and ranks that
fail.
"""

import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor, nn

from lightning_sdiloco import (
    AgreementError,
    ExchangeError,
    Landing,
    OuterOptimizer,
    StreamingDiLoCoStrategy,
    WorkerGroups,
)
from lightning_sdiloco.comm.exchange import DirectExchange, Unanswered
from lightning_sdiloco.launch.failures import Failures
from lightning_sdiloco.lightning_pytorch import _Launcher
from tests import fits
from tests.engine.groups import Groups, message, unlike
from tests.fits import LIGHTNING, OTHER
from tests.ranks import run_processes, run_ranks
from tests.training import LAYERS, mlp

NAN = float("nan")
ONE = {"sync_every": 4, "overlap_steps": 0, "fragments": [["*"]]}


def poisoned(run: Groups, *groups: int, everywhere: bool = False) -> list[Landing]:
    """An inner step in which some groups get one value that is not finite, or only such values."""

    def poison(models: list[Any]) -> None:
        for group in groups:
            models[group][0].weight[3, 4] = NAN
            for parameter in models[group].parameters() if everywhere else ():
                parameter.fill_(NAN)

    return run.step(then=poison)


def is_finite(run: Groups) -> bool:
    return all(values.isfinite().all() for values in run.seen().values())


def left_out(landings: list[Landing]) -> list[tuple[int, ...]]:
    return [landing.left_out for landing in landings]


# Codes of four bits are finite whatever they encode, so the values themselves must tell whether a
# group counted.
@pytest.mark.parametrize("mixing", [0.0, 0.5])
@pytest.mark.parametrize("compression", ["fp32", "fp4"])
def test_a_group_that_is_not_finite_is_left_out_by_all_and_recovers(
    compression: str, mixing: float
) -> None:
    choices = {"mixing": mixing, "compression": compression}
    run = Groups(3, sync_every=6, overlap_steps=2, fragments=LAYERS, **choices)
    run.until(5)
    landings = poisoned(run, 1)
    landings += run.until(8)
    assert left_out(landings) == [(1,)]
    assert is_finite(run), "the group took the outer values wherever its own were not finite"
    assert not any(left_out(run.until(30)[1:]))
    run.groups.finish()
    assert is_finite(run)


def with_poison(*groups: int, number: int = 2, **choices: Any) -> Groups:
    """Groups after their first landing, before which some of them were poisoned."""
    run = Groups(number, **{**ONE, **choices})
    run.until(3)
    poisoned(run, *groups)
    return run


@pytest.mark.parametrize("compression", ["fp32", "fp4"])
def test_the_mean_is_that_of_the_finite_groups(compression: str) -> None:
    choices = {"mixing": 0.0, "exchange": "gather", "compression": compression}
    of_three = with_poison(2, number=3, **choices)
    of_two = with_poison(**choices)
    assert unlike(of_three.groups.outer_state_dict(), of_two.groups.outer_state_dict()) == []


def test_a_group_that_recovers_keeps_its_finite_values() -> None:
    choices = {"fragments": LAYERS, "mixing": 0.5}
    recovered = with_poison(1, **choices).models[1]
    expected = with_poison(**choices).models[1]
    assert unlike(recovered.state_dict(), expected.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("resumed_after", [(), (5,), (4, 8)])
def test_a_run_ends_when_a_group_is_not_finite_three_times_in_a_row(
    resumed_after: tuple[int, ...],
) -> None:
    run = Groups(**ONE)
    for step in range(1, 12):
        poisoned(run, 1)
        if step in resumed_after:
            run = run.resumed()
    with pytest.raises(AgreementError, match=r"worker group 1 was not finite 3 times in a row"):
        poisoned(run, 1)


def test_a_run_ends_when_no_group_is_finite() -> None:
    run = Groups(**ONE)
    run.until(3)
    words = r"fragment 0, .* not finite in any worker group \(group 0, group 1\)"
    with pytest.raises(AgreementError, match=words):
        poisoned(run, 0, 1)


def assert_survives(
    poisoned_at: Sequence[int],
    sync_every: int,
    overlap_steps: int,
    resumes: bool = False,
    **choices: Any,
) -> None:
    """A run in which the second group is poisoned before some steps ends with finite values."""
    run = Groups(sync_every=sync_every, overlap_steps=overlap_steps, **choices)
    for step in range(1, 6 * sync_every + 1):
        groups = [1] if step in poisoned_at else []
        poisoned(run, *groups, everywhere=True)
        if resumes:
            run = run.resumed()
    assert is_finite(run)


def test_twice_with_a_recovery_is_no_error() -> None:
    assert_survives((4, 8, 16, 20), 4, 0, fragments=[["*"]])
    # Both fragments tell of each event: one is launched just before the group recovers.
    assert_survives((8, 16, 32, 40), 8, 4, fragments=[["[02].*"], ["[46].*"]])


@pytest.mark.parametrize(("sync_every", "resumes"), [(8, False), (4, True), (1, False)])
def test_one_event_of_which_several_fragments_tell_is_no_error(
    sync_every: int, resumes: bool
) -> None:
    choices = {"fragments": LAYERS, "compression": "fp32"}
    assert_survives([2 * sync_every], sync_every, sync_every - 1, resumes, **choices)


@pytest.mark.parametrize(("guard", "outlying"), [(None, ()), ("auto", (1,))])
def test_an_overflown_norm_is_no_error(guard: Any, outlying: tuple[int, ...]) -> None:
    def enlarge(models: list[Any]) -> None:
        for parameter in models[1].parameters():
            parameter.fill_(1e38)

    outer = OuterOptimizer(outlier_guard=guard)
    run = Groups(**ONE, compression="fp32", mixing=0.0, outer_optimizer=outer)
    run.until(3)
    (landing,) = run.step(then=enlarge)
    assert landing.left_out == ()
    assert landing.outlying == outlying
    largest = [float(values.abs().max()) for values in run.groups.outer_state_dict().values()]
    assert (min(largest) > 1e37) == (guard is None)


MASK = torch.tensor([float("-inf"), 0.0])


def net_with_buffers(seed: int = 0) -> nn.Module:
    model = nn.Sequential(*mlp(), nn.BatchNorm1d(3))
    model.register_buffer("mask", MASK.clone())  # never changes, and is never finite
    return model


def with_buffers(groups: int, **choices: Any) -> Groups:
    return Groups(groups, "sgd", net_with_buffers, **{**ONE, "compression": "fp32", **choices})


def poison_variance(*models: Any) -> None:
    for model in models:
        model[7].running_var[1].fill_(NAN)


def statistics(model: Any) -> Tensor:
    return torch.stack([model[7].running_mean, model[7].running_var])


def shown(run: Groups, group: int, mean: Any = None) -> Tensor:
    with run.engines[group].evaluate(mean):
        return statistics(run.models[group])


def have_finite_statistics(run: Groups) -> bool:
    return all(statistics(model).isfinite().all() for model in run.models)


@pytest.mark.parametrize("mixing", [0.0, 1.0])
def test_buffers_that_are_not_finite_reach_no_other_group_and_not_the_outer_model(
    mixing: float, caplog: pytest.LogCaptureFixture
) -> None:
    run = with_buffers(3, overlap_steps=1, mixing=mixing)
    run.until(3)
    run.step(then=lambda models: poison_variance(models[1]))
    sent = [statistics(model) for model in run.models]
    assert left_out(run.step()) == [()], "the trained parameters count"
    running_mean, running_var = shown(run, 0)
    torch.testing.assert_close(running_mean, (sent[0] + sent[1] + sent[2])[0] / 3)
    torch.testing.assert_close(running_var, (sent[0] + sent[2])[1] / 2)
    for group in (1, 2):
        assert torch.equal(shown(run, group), torch.stack([running_mean, running_var]))
    assert torch.equal(run.models[1][7].running_var[1], running_var[1])
    assert have_finite_statistics(run)
    run.until(12)
    run.groups.finish()
    for model in run.models:
        assert torch.equal(model.mask, MASK)
        assert torch.equal(statistics(model), statistics(run.models[0]))
    (warning,) = (text for text in caplog.messages if "excluded from the mean" in text)
    assert "'7.running_var' of worker group 1." in warning


@pytest.mark.parametrize("spoilt_after", [3, 23])
def test_buffers_far_too_large_are_left_out_and_named_while_the_group_counts(
    spoilt_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = with_buffers(3, overlap_steps=1)
    run.until(spoilt_after)

    def spoil(models: list[Any]) -> None:
        models[1][7].running_var[1] = 1e20

    run.step(then=spoil)
    (landing,) = run.step()
    assert landing.counted == (0, 1, 2)
    assert landing.wrong_buffers == (1,)
    for group in range(3):
        assert shown(run, group).abs().max() < 100
    assert torch.equal(run.models[1][7].running_var, shown(run, 0)[1])
    run.until(spoilt_after + 20)
    assert all(statistics(model).abs().max() < 100 for model in run.models)
    (warning,) = caplog.messages
    assert "The buffers of worker group 1 are too large for outlier_guard" in warning


def test_the_outer_buffer_is_kept_where_no_group_has_a_finite_value() -> None:
    run = with_buffers(2)
    run.until(7)
    before = shown(run, 0)
    run.step(then=lambda models: poison_variance(*models))
    assert torch.equal(shown(run, 1)[1, 1], before[1, 1])
    assert have_finite_statistics(run)


@pytest.mark.parametrize("finishes", [False, True])
def test_means_of_an_evaluation_and_of_the_end_leave_out_buffers_that_are_not_finite(
    finishes: bool,
) -> None:
    run = with_buffers(2, overlap_steps=1)
    run.until(2)
    run.models[0][7].running_var.fill_(NAN)
    expected = run.models[1][7].running_var.clone()
    if finishes:
        run.groups.finish()
        mean = run.models[0][7].running_var
    else:
        mean = shown(run, 1, run.groups.group_mean())[1]
    assert torch.equal(mean, expected)


def stopping(rank: int, world_size: int, groups: int, stalls: bool) -> None:
    """A training in which the ranks of the last group stop after a launch."""
    # Only a flight has little time: on a busy machine everything else, such as DDP's gradients, may
    # take longer.
    joined = WorkerGroups(groups, timeout=timedelta(seconds=30))
    run = Groups(
        inner="sgd",
        joined=joined,
        sync_every=8,
        overlap_steps=3,
        fragments=[["0.*"], ["[246].*"]],
        timeout=timedelta(seconds=1.5),
    )
    for step in range(1, 40):
        if step == 9 and joined.group_index == groups - 1:
            if not stalls:
                os._exit(3)
            time.sleep(3.5)
        run.step()


def test_a_group_that_does_not_answer_ends_the_run_everywhere_and_is_named() -> None:
    errors = run_ranks(stopping, 4, 2, True, expect_failure=True)
    assert sorted(errors) == [0, 1, 2, 3]
    for rank in range(2):
        error = message(errors[rank])
        assert "worker group 1 did not answer" in error
        assert "fragment 1, launched after inner step 12" in error
        assert "increase timeout" in error


def test_a_group_that_dies_ends_the_run_everywhere_and_is_named() -> None:
    errors = run_ranks(stopping, 3, 3, False, expect_failure=True)
    words = (
        r"worker group (\d) went away \(rank \1: .* while fragment [01],"
        r" launched after inner step (8|12), was in"
    )
    named = []
    for rank in range(2):
        match = re.search(words, message(errors[rank]))
        assert match
        named.append(match[1])
    # A rank that learns of it late may find another one gone for the same reason first.
    assert "2" in named


class CountsWholeMilliseconds:
    """Work that nobody completes. Like gloo, it waits for the whole milliseconds of the timeout."""

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout // timedelta(milliseconds=1) / 1000)
        raise RuntimeError("Timed out waiting for recv operation to complete")


def wait_in_vain(rank: int, world_size: int) -> float:
    """Waits for flights and for a landing; returns the seconds that the landing waits."""
    exchange = DirectExchange(dist.new_group(), dist.new_group())
    posted = exchange.post([torch.zeros(1, dtype=torch.uint8)] * 2)
    posted.receiving = {1: CountsWholeMilliseconds()}
    for seconds in (0.0199, 0.0109, 0.0):
        with pytest.raises(Unanswered) as late:
            exchange.collect(posted, time.monotonic() + seconds)
        if rank == 0:
            assert str(late.value) == "worker group 1 did not answer in time (rank 1)"
    topology = WorkerGroups(1, timeout=timedelta(seconds=0.6)).topology
    start = time.monotonic()
    if rank == 1:
        time.sleep(2)
    else:
        with pytest.raises(RuntimeError, match="Timed out waiting 1200ms"):
            topology.stages[-1].all_gather(torch.zeros(1))
    return time.monotonic() - start


def test_a_group_late_by_under_a_millisecond_is_not_gone_and_landings_wait_longer() -> None:
    """A landing waits twice as long as a flight."""
    waited = run_ranks(wait_in_vain, 2)[0]
    assert 1.2 <= waited < 9


def test_a_process_that_does_not_end_after_ctrl_c_is_killed_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = multiprocessing.Event()

    def stubborn() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        started.set()
        time.sleep(100)

    process = multiprocessing.get_context("fork").Process(target=stubborn)
    process.start()
    assert started.wait(30)
    launcher = _Launcher(StreamingDiLoCoStrategy(), start_method="fork")
    launcher.procs = [process]
    monkeypatch.setattr(_MultiProcessingLauncher, "launch", Mock(side_effect=KeyboardInterrupt))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(print)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert 3 <= time.monotonic() - start < 20


# In real trainers: the errors of the other ranks when one fails, or keeps them waiting

TIMEOUT = 2.0  # ranks that start later than this would fail before
GONE = "Rank 0, which records the first failure, has ended. See the output of rank 0 for the cause."
HAS_NOTES = sys.version_info >= (3, 11)  # of exceptions


interrupt = partial(signal.raise_signal, signal.SIGINT)
pause = partial(time.sleep, 2 * TIMEOUT)


def boom() -> None:
    raise ArithmeticError("boom")


def nothing() -> None:
    """The act of a rank that does not fail."""


ENDS = {
    boom: ("boom", "ArithmeticError: boom"),
    interrupt: ("SystemExit: 1", "KeyboardInterrupt"),
}


def module_that_acts(distribution: str, place: str, act: Any) -> Any:
    """A module that acts in a hook, or in training step 5."""

    def training_step(self: Any, parts: Any, index: int) -> Tensor:
        if index == 5:
            act()
        return self.loss(parts)

    def hook(self: Any) -> None:
        act()
        self.trainer.strategy.barrier("here")

    member = training_step if place == "training_step" else hook
    return fits.module(distribution, **{place: member})


class Ended(NamedTuple):
    """The error with which a rank ends, and its log."""

    error: str
    log: str


def text_of(error: BaseException) -> str:
    return "".join([*traceback.format_exception_only(error), str(error.__cause__)])


def fitted(
    ranks: int,
    failing: int,
    act: Any,
    distribution: str = LIGHTNING,
    place: str = "training_step",
    groups: int = 2,
) -> list[Ended]:
    """The ends, by rank, of a fit in which one rank acts."""
    timeout = timedelta(seconds=TIMEOUT if act is pause else 20)
    choices = {**ONE, "sync_every": 8, "worker_groups": groups, "timeout": timeout}

    def run(rank: int, world_size: int) -> Ended:
        log = fits.said_by("lightning_sdiloco")
        strategy = fits.strategy(distribution, **choices)
        trainer = fits.trainer(distribution, strategy=strategy, devices=ranks, max_steps=40)
        module = module_that_acts(distribution, place, act if rank == failing else nothing)
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            trainer.fit(module, fits.batches(rank // (ranks // 2)))
        return Ended(text_of(caught.value), "\n".join(log))

    return run_processes(run, ranks, timeout=40)


@pytest.mark.parametrize(
    ("ranks", "failing", "act", "distribution"),
    [(4, 3, boom, OTHER), (2, 0, boom, LIGHTNING), (2, 1, interrupt, LIGHTNING)],
)
def test_an_exception_in_one_rank_ends_all_and_its_rank_is_named(
    ranks: int, failing: int, act: Any, distribution: str
) -> None:
    ends = fitted(ranks, failing, act, distribution)
    first = ends.pop(failing)
    end_of_rank, error = ENDS[act]
    assert end_of_rank in first.error
    assert "failed first" not in first.log
    cause = f"Rank {failing} (worker group {failing // (ranks // 2)}) failed first: {error}"
    for number, end in enumerate(ends):
        is_told = cause in end.log
        # Some notice only when rank 0 has ended, and with it its records.
        may_miss_the_cause = number > 0 or failing == 0
        assert is_told or (may_miss_the_cause and GONE in end.log)
        assert not HAS_NOTES or (cause if is_told else GONE) in end.error


def test_a_rank_waits_for_those_of_its_group_and_for_all_others_for_the_timeout() -> None:
    in_group = fitted(2, 1, pause, groups=1)[0]
    assert "Timed out waiting 2000ms" in in_group.error
    between_groups = fitted(2, 1, pause, place="on_train_epoch_start")[0]
    assert "Timed out waiting 2000ms" in between_groups.error
    waited = "This rank, which belongs to worker group 0, waited for all other ranks at ('here',)"
    assert waited in between_groups.error


def test_failures_of_an_earlier_run_are_ignored() -> None:
    store = torch.distributed.HashStore()
    Failures(store, 1, 1, 2).leave(ValueError("boom"))
    error = ExchangeError("worker group 1 went away")
    Failures(store, 0, 0, 2).leave(error)
    note = "Rank 0 (worker group 0) has lost contact with another rank, but no rank has reported a"
    assert not HAS_NOTES or error.__notes__[0].startswith(f"{note} failure. Either a process")


def test_a_silent_store_delays_no_end() -> None:
    silent = SimpleNamespace(compare_set=lambda *arguments: time.sleep(60))
    error = ExchangeError("worker group 0 went away")
    start = time.monotonic()
    Failures(silent, 1, 1, 2).leave(error)
    assert time.monotonic() - start < 10
    assert not HAS_NOTES or error.__notes__ == [GONE]
