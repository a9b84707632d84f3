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
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
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
    StreamingDiLoCoStrategy,
    WorkerGroups,
)
from lightning_sdiloco.comm.exchange import DirectExchange, Unanswered
from lightning_sdiloco.launch.failures import Failures
from lightning_sdiloco.lightning_pytorch import _Launcher
from tests import fits
from tests.engine.groups import Groups, message, unlike
from tests.fits import LIGHTNING
from tests.ranks import run_processes, run_ranks
from tests.training import LAYERS, mlp

NAN = float("nan")
ONE: dict[str, Any] = {"sync_every": 4, "overlap_steps": 0, "fragments": [["*"]]}


def poisoned(run: Groups, *groups: int, everywhere: bool = False) -> list[Landing]:
    """An inner step in which groups get a value, or all, that are not finite."""

    def poison(models: list[Any]) -> None:
        for group in groups:
            models[group][0].weight[3, 4] = NAN
            for parameter in models[group].parameters() if everywhere else ():
                parameter.fill_(NAN)

    return run.step(then=poison)


def is_finite(run: Groups) -> bool:
    return all(bool(values.isfinite().all()) for values in run.seen().values())


# Codes of four bits are finite whatever they encode, so the values themselves must tell whether a
# group counted.
@pytest.mark.parametrize("compression", ["fp32", "fp4"])
def test_a_group_that_is_not_finite_is_left_out_by_all_and_recovers(compression: str) -> None:
    for mixing in (0.0, 0.5):
        run = Groups(
            3,
            sync_every=6,
            overlap_steps=2,
            fragments=LAYERS,
            mixing=mixing,
            compression=compression,
        )
        run.until(5)
        landings = poisoned(run, 1) + run.until(8)
        assert [landing.left_out for landing in landings] == [(1,)]
        assert is_finite(run), "the group took the outer values wherever its own were not finite"
        assert all(landing.left_out == () for landing in run.until(30)[1:])
        run.groups.finish()
        assert is_finite(run)
    # The mean is that of the groups that count, and a group that recovers keeps what was finite.
    choices = {**ONE, "mixing": 0.0, "exchange": "gather", "compression": compression}
    runs = [Groups(3, **choices), Groups(2, **choices)]
    runs += [Groups(sync_every=4, overlap_steps=0, fragments=LAYERS, mixing=0.5) for _ in range(2)]
    for run, groups in zip(runs, ((2,), (), (1,), ()), strict=True):
        run.until(3)
        poisoned(run, *groups)
    assert unlike(*(run.groups.outer_state_dict() for run in runs[:2])) == []
    assert unlike(*(run.models[1].state_dict() for run in runs[2:])) == ["0.weight", "0.bias"]


def test_a_run_ends_when_a_group_is_not_finite_three_times_in_a_row_or_all_are_once() -> None:
    for resumed_after in ((), (5,), (4, 8)):
        run = Groups(**ONE)
        for step in range(1, 12):
            poisoned(run, 1)
            run = run.resumed() if step in resumed_after else run
        with pytest.raises(AgreementError, match=r"worker group 1 was not finite 3 times in a row"):
            poisoned(run, 1)
    run = Groups(**ONE)
    run.until(3)
    with pytest.raises(
        AgreementError, match=r"fragment 0, .* not finite in any worker group \(group 0, group 1\)"
    ):
        poisoned(run, 0, 1)
    # What several fragments tell of is no error, and nor is twice with a recovery. In the second
    # case they tell of each event twice: a fragment is launched just before the group recovers.
    every_layer = {"fragments": LAYERS, "compression": "fp32"}
    for every, overlap_steps, often, choices in (
        (4, 0, True, ONE),
        (8, 4, True, {"fragments": [["[02].*"], ["[46].*"]]}),
        *((every, every - 1, False, every_layer) for every in (8, 4, 1)),
    ):
        run = Groups(**{**choices, "sync_every": every, "overlap_steps": overlap_steps})
        for step in range(1, 6 * every + 1):
            is_poisoned = step % (3 * every) in (every, 2 * every) if often else step == 2 * every
            poisoned(run, *([1] if is_poisoned else []), everywhere=True)
            run = run.resumed() if every == 4 and not often else run
        assert is_finite(run)
    # Nor is an overflown norm.
    run = Groups(**ONE, compression="fp32", mixing=0.0)
    run.until(3)
    (landing,) = run.step(
        then=lambda models: [parameter.fill_(1e38) for parameter in models[1].parameters()]
    )
    assert landing.left_out == ()
    assert (
        min(float(values.abs().max()) for values in run.groups.outer_state_dict().values()) > 1e37
    )


def with_buffers(groups: int, **choices: Any) -> Groups:
    def net(seed: int = 0) -> nn.Module:
        model = nn.Sequential(*mlp(), nn.BatchNorm1d(3))
        model.register_buffer(
            "mask", torch.tensor([float("-inf"), 0.0])
        )  # never changes, and is never finite
        return model

    return Groups(groups, "sgd", net, **{**ONE, "compression": "fp32", **choices})


def statistics(model: Any) -> Tensor:
    return torch.stack([model[7].running_mean, model[7].running_var])


def shown(run: Groups, group: int, mean: Any = None) -> Tensor:
    with run.engines[group].evaluate(mean):
        return statistics(run.models[group]).clone()


def test_buffers_that_are_not_finite_reach_no_other_group_and_not_the_outer_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for mixing in (0.0, 1.0):
        caplog.clear()
        run = with_buffers(3, overlap_steps=1, mixing=mixing)
        run.until(3)
        run.step(then=lambda models: models[1][7].running_var[1].fill_(NAN))
        sent = [statistics(model).clone() for model in run.models]
        assert [landing.left_out for landing in run.step()] == [()], "what was trained counts"
        means = shown(run, 0)
        torch.testing.assert_close(means[0], sum(sent[1:], sent[0])[0] / 3)
        torch.testing.assert_close(means[1], (sent[0] + sent[2])[1] / 2)
        assert all(torch.equal(shown(run, group), means) for group in (1, 2))
        assert torch.equal(run.models[1][7].running_var[1], means[1][1])
        assert all(bool(statistics(model).isfinite().all()) for model in run.models)
        run.until(12)
        run.groups.finish()
        assert all(model.mask.tolist() == [float("-inf"), 0.0] for model in run.models)
        assert all(
            torch.equal(statistics(model), statistics(run.models[0])) for model in run.models
        )
        (told,) = (
            record.message for record in caplog.records if "left out of the mean" in record.message
        )
        assert "'7.running_var' of worker group 1." in told
    # Where no group has a finite value the outer one stays; the means of an evaluation and of the
    # end leave it out too.
    run = with_buffers(2)
    run.until(7)
    before = shown(run, 0)
    run.step(then=lambda models: [model[7].running_var[1].fill_(NAN) for model in models])
    assert torch.equal(shown(run, 1)[1, 1], before[1, 1])
    assert all(bool(statistics(model).isfinite().all()) for model in run.models)
    for finishes in (False, True):
        run = with_buffers(2, overlap_steps=1)
        run.until(2)
        run.models[0][7].running_var.fill_(NAN)
        expected = run.models[1][7].running_var.clone()
        if finishes:
            run.groups.finish()
        found = (
            run.models[0][7].running_var if finishes else shown(run, 1, run.groups.group_mean())[1]
        )
        assert torch.equal(found, expected)


def stopping(rank: int, world_size: int, groups: int, stalls: bool) -> None:
    """A training in which the ranks of the last group stop after a launch."""
    # Only a flight has little time: on a busy machine everything else, DDP's gradients too, may
    # take longer.
    joined = WorkerGroups(groups, timeout=timedelta(seconds=30))
    choices: dict[str, Any] = {
        "sync_every": 8,
        "overlap_steps": 3,
        "fragments": [["0.*"], ["[246].*"]],
    }
    here = Groups(inner="sgd", joined=joined, **choices, timeout=timedelta(seconds=1.5))
    for step in range(1, 40):
        if step == 9 and joined.group_index == groups - 1:
            if not stalls:
                os._exit(3)
            time.sleep(3.5)
        here.step()


def test_a_group_that_does_not_answer_or_dies_ends_the_run_everywhere_and_is_named() -> None:
    errors = run_ranks(stopping, 4, 2, True, expect_failure=True)
    assert sorted(errors) == [0, 1, 2, 3]
    for rank in range(2):
        for words in (
            "worker group 1 did not answer",
            "fragment 1, launched after inner step 12",
            "raise timeout",
        ):
            assert words in message(errors[rank])
    errors = run_ranks(stopping, 3, 3, False, expect_failure=True)
    told = r"worker group (\d) went away \(rank \1: .* while fragment [01], launched after inner step (8|12), was in"
    named = [re.search(told, message(errors[rank])) for rank in range(2)]
    # A rank that learns of it late may find another one gone for the same reason first.
    assert "2" in [match and match[1] for match in named]
    assert None not in named


class CountsWholeMilliseconds:
    """Work that nobody completes. It waits as gloo does: for the whole milliseconds of the
    timeout.
    """

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout // timedelta(milliseconds=1) / 1000)
        raise RuntimeError("Timed out waiting for recv operation to complete")


def test_a_group_late_by_under_a_millisecond_is_not_gone_and_landings_wait_longer() -> None:
    """A landing waits twice as long as a flight."""

    def wait_in_vain(rank: int, world_size: int) -> tuple[list[str], float]:
        exchange = DirectExchange(dist.new_group(), dist.new_group())
        told = []
        posted = exchange.post([torch.zeros(1, dtype=torch.uint8)] * 2)
        posted.receiving = {1: CountsWholeMilliseconds()}
        for seconds in (0.0199, 0.0109, 0.0):
            with pytest.raises(Unanswered) as late:
                exchange.collect(posted, time.monotonic() + seconds)
            told.append(str(late.value))
        topology = WorkerGroups(1, timeout=timedelta(seconds=0.6)).topology
        start = time.monotonic()
        if rank == 1:
            time.sleep(2)
        else:
            with pytest.raises(RuntimeError, match="Timed out waiting 1200ms"):
                topology.stages[-1].all_gather(torch.zeros(1))
        return told, time.monotonic() - start

    told, waited = run_ranks(wait_in_vain, 2)[0]
    assert told == ["worker group 1 did not answer in time (rank 1)"] * 3
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


# In real trainers: what the other ranks say of one that fails, or that keeps them waiting

TIMEOUT = 2.0  # ranks that start later than this would fail before
GONE = "Rank 0, which records which rank failed first, has ended. Its output names the cause."


interrupt = partial(signal.raise_signal, signal.SIGINT)
pause = partial(time.sleep, 2 * TIMEOUT)


def boom() -> None:
    raise ArithmeticError("boom")


def fitted(
    ranks: int,
    failing: int,
    act: Any,
    distribution: str = LIGHTNING,
    place: str = "training_step",
    groups: int = 2,
) -> Any:
    """By rank, the error with which a fit ends in which one rank does something, and what was
    said.
    """

    def run(rank: int, world_size: int) -> tuple[str, str]:
        def hook(self: Any, *given: Any) -> Any:
            if rank == failing and (not given or given[1] == 5):
                act()
            return self.loss(given[0]) if given else self.trainer.strategy.barrier("here")

        said = fits.said_by("lightning_sdiloco")
        timeout = timedelta(seconds=TIMEOUT if act is pause else 20)
        strategy = fits.strategy(
            distribution, worker_groups=groups, **{**ONE, "sync_every": 8}, timeout=timeout
        )
        trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, max_steps=40)
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            trainer.fit(
                fits.module(distribution, **{place: hook}), fits.batches(rank // (world_size // 2))
            )
        error = caught.value
        return "".join([*traceback.format_exception_only(error), str(error.__cause__)]), "\n".join(
            said
        )

    return run_processes(run, ranks, timeout=40)


@pytest.mark.parametrize(
    ("ranks", "failing", "act", "distribution"),
    [(4, 3, boom, "pytorch_lightning"), (2, 0, boom, LIGHTNING), (2, 1, interrupt, LIGHTNING)],
)
def test_an_exception_in_one_rank_ends_all_and_its_rank_is_named(
    ranks: int, failing: int, act: Any, distribution: str
) -> None:
    found = fitted(ranks, failing, act, distribution)
    error, said = found.pop(failing)
    ends, first = (
        ("SystemExit: 1", "KeyboardInterrupt")
        if act is interrupt
        else ("boom", "ArithmeticError: boom")
    )
    assert ends in error
    assert "failed first" not in said
    told = f"Rank {failing} (worker group {failing // (ranks // 2)}) failed first: {first}"
    for number, (error, said) in enumerate(found):
        # Some notice only when rank 0 has ended, and with it what it keeps.
        assert told in said or ((number or not failing) and GONE in said)
        assert sys.version_info < (3, 11) or (told if told in said else GONE) in error


def test_a_rank_waits_for_those_of_its_group_and_for_all_others_for_the_timeout() -> None:
    (error, _), _ = fitted(2, 1, pause, groups=1)
    assert "Timed out waiting 2000ms" in error
    (error, _), _ = fitted(2, 1, pause, place="on_train_epoch_start")
    assert "Timed out waiting 2000ms" in error
    assert "This rank, of worker group 0, waited for all others at ('here',)" in error


def test_failures_of_an_earlier_run_are_ignored_and_a_silent_store_delays_no_end() -> None:
    silent: Any = SimpleNamespace(compare_set=lambda *args: time.sleep(60))
    store = torch.distributed.HashStore()
    earlier, later = ([Failures(store, rank, rank, 2) for rank in range(2)] for _ in range(2))
    earlier[1].leave(ValueError("boom"))
    # The ranks count their runs, each for itself; here they share one count.
    later[0]._key = later[1]._key = "later"
    error = ExchangeError("worker group 1 went away")
    later[0].leave(error)
    told = "Rank 0 (worker group 0) has lost contact with another rank, but none has reported a failure: a process"
    assert sys.version_info < (3, 11) or error.__notes__[0].startswith(told)

    error = ExchangeError("worker group 0 went away")
    started = time.monotonic()
    Failures(silent, 1, 1, 2).leave(error)
    assert time.monotonic() - started < 10
    assert sys.version_info < (3, 11) or error.__notes__ == [GONE]
