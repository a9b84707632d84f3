"""Signals end all ranks after the same inner step, with a checkpoint that goes on as if nothing had happened."""

import importlib
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_sdiloco.lightning import monitor
from lightning_sdiloco.lightning.fit_state import Signals
from tests import fits
from tests.fits import LIGHTNING, Announced, said_by
from tests.lightning.test_checkpoint import CHOICES, assert_same, traced, unequal
from tests.ranks import in_ranks

STEPS = 30
# With CHOICES fragment p launches after 8 + 2p, 16 + 2p, ... and lands five steps later.
SIGNALLED, ENDED = 14, 19


Signalled = dict[tuple[int, str, int], list[int]]
"""Rank, hook, and step that runs or has just been made -> signals that the process gets there."""


def listening(rank: int, signalled: Signalled, distribution: str = LIGHTNING) -> Any:
    """A traced module that sends its own process signals, and says what happens between steps."""

    def signal(self: Any, hook: str, step: int, said_of_it: str = "") -> None:
        if said_of_it:
            self.said.append(f"{said_of_it} after step {step}")
        for number in signalled.get((rank, hook, step), ()):
            os.kill(os.getpid(), number)

    def training_step(self: Any, parts: Any, index: int) -> Any:
        signal(self, "training_step", self.trainer.global_step + 1)
        return self.loss(parts)

    def telling(hook: str, what: str) -> Any:
        return lambda self, *args: signal(self, hook, self.trainer.global_step, what.format(*args))

    told = {"validation_step": "validation batch {1}", "on_train_epoch_end": "epoch end", "on_train_end": ""}
    hooks = {hook: telling(hook, what) for hook, what in {**told, "on_save_checkpoint": "save"}.items()}
    return traced(distribution, rank, training_step=training_step, said=[], **hooks)


def run(
    rank: int,
    world_size: int,
    folder: Path,
    signalled: Signalled | None = None,
    resume: Path | None = None,
    distribution: str = LIGHTNING,
    length: int = 100,
    validates: bool = False,
    saves: dict[str, Any] | None = None,
    **choices: Any,
) -> dict[str, Any]:
    """Fits in this rank of two groups, and returns what happened."""
    model, size = listening(rank, signalled or {}, distribution), world_size // 2
    given = {"max_steps": STEPS, "num_sanity_val_steps": 0, "enable_checkpointing": True, **choices}
    if given["enable_checkpointing"]:
        how = {"dirpath": folder / "checkpoints", "save_top_k": 0} if saves is None else {"dirpath": folder, **saves}
        given["callbacks"] = [importlib.import_module(distribution).callbacks.ModelCheckpoint(**how)]
    strategy = fits.strategy(distribution, worker_groups=2, **CHOICES)
    trainer = fits.trainer(distribution, strategy=strategy, devices=world_size, default_root_dir=folder, **given)
    loader, ended = Announced((rank // size, rank % size, size), length), ""
    torch.manual_seed(100 + rank)
    try:
        trainer.fit(model, loader, Announced((0, 0, 1), 3) if validates else None, ckpt_path=resume)
    except BaseException as error:
        ended = type(error).__name__
    outer = strategy.outer_state_dict() if model.trace and not ended else {}
    return {"trace": model.trace, "said": model.said, "ended": (ended, trainer.global_step), "outer": outer}


TERMINATED: Signalled = {(1, "training_step", SIGNALLED): [signal.SIGTERM]}
SAVED = f"checkpoints/terminated-step={ENDED}.ckpt"
TERMINATION = "SIGTERMException"


def assert_same_from(one: dict[str, Any], other: dict[str, Any]) -> None:
    """A fit that goes on after the signal has the bits of one that had none."""
    assert one["trace"].keys() == {at for at in other["trace"] if at >= ENDED}
    assert {at: wrong for at in one["trace"] if (wrong := unequal(one["trace"][at], other["trace"][at]))} == {}


def assert_goes_on(rank: int, world_size: int, folder: Path, **of: Any) -> None:
    """A fit that one rank was told to terminate goes on where it was, and what is due there is done once."""
    plain = run(rank, world_size, folder, **of)
    ended = run(rank, world_size, folder, TERMINATED, **of)
    assert ended["ended"] == (TERMINATION, ENDED)
    assert list(folder.rglob("*.ckpt")) == [folder / SAVED]
    resumed = run(rank, world_size, folder, resume=folder / SAVED, **of)
    assert_same_from(resumed, plain)
    assert_same(resumed["outer"], plain["outer"])
    assert resumed["ended"] == plain["ended"]
    before = len(ended["said"]) - 1
    told = [*plain["said"][:before], f"save after step {ENDED}", *plain["said"][before:]]
    assert [*ended["said"], *resumed["said"]] == told


@in_ranks(4)
def test_a_fit_that_one_rank_was_told_to_terminate_goes_on_as_if_nothing_had_happened(
    rank: int, tmp_path: Path
) -> None:
    assert_goes_on(rank, 4, tmp_path, distribution="pytorch_lightning")


@in_ranks(2, timeout=150.0)
def test_what_is_due_where_a_fit_ends_is_done_once(rank: int, tmp_path: Path) -> None:
    by_epochs, by_steps = {"max_epochs": 4, "max_steps": -1}, {"max_steps": 32}
    in_the_middle = {"val_check_interval": 19, "check_val_every_n_epoch": None}
    cases: dict[str, dict[str, Any]] = {
        "the end of an epoch with its validation": {"length": 19, **by_epochs},
        "the end of an epoch without validation": {"length": 19, **by_steps, "limit_val_batches": 0},
        "a validation in the middle": {"length": 8, **by_epochs, **in_the_middle},
        "in the middle of an epoch": {"length": 8, **by_steps, "check_val_every_n_epoch": 2},
    }
    for name, due in cases.items():
        assert_goes_on(rank, 2, tmp_path / name, validates=True, **due)


MANY = [signal.SIGTERM, signal.SIGTERM]
WHENEVER: list[tuple[Signalled, int]] = [
    ({**TERMINATED, **{(0, "training_step", SIGNALLED + later): MANY for later in (1, 3)}}, ENDED),
    ({(1, "validation_step", 0): MANY}, 13),  # the sanity check
    ({(1, "validation_step", 12): MANY}, 19),
    ({**TERMINATED, (0, "on_save_checkpoint", ENDED): MANY}, ENDED),
    ({(1, "training_step", STEPS): MANY}, STEPS),
    ({(rank, "on_train_end", STEPS): MANY for rank in range(2)}, STEPS),
]


@in_ranks(2, timeout=150.0)
def test_whenever_signals_come_all_ranks_end_together_with_one_save(rank: int, tmp_path: Path) -> None:
    """None where the Trainer saves no checkpoints."""
    of = {"validates": True, "num_sanity_val_steps": 1, "val_check_interval": 12, "check_val_every_n_epoch": None}
    for number, (signalled, step) in enumerate(WHENEVER):
        ended = run(rank, 2, tmp_path / str(number), signalled, **of)
        assert ended["ended"] == (TERMINATION, step), number
        assert sum("save" in words for words in ended["said"]) == 1, number
        saved = tmp_path / str(number) / "checkpoints" / f"terminated-step={step}.ckpt"
        assert list((tmp_path / str(number)).rglob("*.ckpt")) == [saved], number
    unsaved: dict[str, Any] = {"enable_checkpointing": False}
    for how in (unsaved, {"fast_dev_run": 30}, {"barebones": True, **unsaved}):
        ended = run(rank, 2, tmp_path / "quiet", TERMINATED, **how)
        assert (ended["ended"], ended["said"]) == ((TERMINATION, ENDED), []), how
    assert list((tmp_path / "quiet").rglob("*.ckpt*")) == []


@in_ranks(2)
def test_other_checkpoints_of_a_terminated_fit_do_not_end_the_one_that_resumes_from_them(
    rank: int, tmp_path: Path
) -> None:
    """One that was saved while the signal waited, and one that a callback saved on the exception, on all ranks."""
    for step, saves in ((16, {"every_n_train_steps": 16}), (ENDED, {"save_on_exception": True})):
        ended = run(rank, 2, tmp_path, TERMINATED, saves={"filename": "{step}", **saves})
        resumed = run(rank, 2, tmp_path, resume=tmp_path / f"step={step}.ckpt")
        assert (ended["ended"], resumed["ended"]) == ((TERMINATION, ENDED), ("", STEPS))
        assert min(resumed["trace"]) == step


def test_a_signal_may_come_while_those_before_it_are_read() -> None:
    alone: Any = SimpleNamespace(topology=SimpleNamespace(world=SimpleNamespace(all_gather_object=lambda own: [0])))
    signals, came = Signals(SimpleNamespace(trainer=None, groups=alone)), itertools.count()

    def interrupt(frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        signals._note(1 << next(came), signal.SIGTERM, None)
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        signals.end_if_any_received()
    finally:
        sys.settrace(before)
    assert next(came) > 10


# SLURM


def as_job(rank: int, world_size: int, folder: Path, function: Callable[[], Any]) -> Any:
    """Calls a function in a job of SLURM, whose `scontrol` notes what it is told and signals its caller in turn."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir(exist_ok=True)
    scratch = scontrol.with_suffix(f".{rank}")
    scratch.write_text(f'#!/bin/sh\necho "$@" >> {folder}/told\nkill -TERM $PPID\n')
    scratch.chmod(0o755)
    scratch.rename(scontrol)
    tasks = {name: str(world_size) for name in ("NTASKS", "NTASKS_PER_NODE")}
    job = {"JOB_ID": "123", "JOB_NAME": "test", **tasks, "NNODES": "1", "NODEID": "0"}
    own = {f"SLURM_{name}": value for name, value in {**job, "PROCID": str(rank), "LOCALID": str(rank)}.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**own, "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}.items():
            patch.setenv(name, value)
        return function()


@in_ranks(2, timeout=110.0)
def test_a_job_that_slurm_requeues_goes_on_as_if_nothing_had_happened(rank: int, tmp_path: Path) -> None:
    requeued: Signalled = {(1, "training_step", SIGNALLED + later): [signal.SIGUSR1] for later in (0, 3)}
    # Launched after 28, landed after 33 it would be: the fit ends before, and with it the request.
    after: Signalled = {(rank, "training_step", ENDED + 6): [signal.SIGUSR1] for rank in range(2)}
    newest = tmp_path / "run" / "hpc_ckpt_2.ckpt"

    def fit(signalled: Signalled) -> dict[str, Any]:
        return dict(as_job(rank, 2, tmp_path, partial(run, rank, 2, tmp_path / "run", signalled)))

    plain, (first, second, third) = run(rank, 2, tmp_path / "plain"), map(fit, (requeued, after, {}))
    assert [first["ended"], second["ended"]] == [(TERMINATION, ENDED), (TERMINATION, STEPS)]
    assert third["ended"] == ("", STEPS)
    assert_same_from(second, plain)
    saved = torch.load(newest, weights_only=True)["state_dict"]
    assert_same({name: saved[name] for name in plain["outer"]}, plain["outer"])
    # A crash before the file took its place: the folder alone is no checkpoint.
    torch.distributed.barrier()
    newest.unlink(missing_ok=True)
    again = fit({})
    assert again["ended"] == ("", STEPS)
    assert sorted(again["trace"]) == list(range(ENDED, STEPS))
    assert (tmp_path / "told").read_text() == "requeue 123\n" * 2
    assert [path.name for path in (tmp_path / "run").glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]


# How long a signal waits


@in_ranks(2)
def test_the_start_warns_on_rank_0_if_a_signal_would_wait_long(rank: int, tmp_path: Path) -> None:
    # Launches are two steps apart, and land five steps later. Only the first steps are measured.
    told = r"up to 7 inner steps, which take about 70 s \(10 s each\)"
    said = said_by("lightning_sdiloco.lightning.monitor")
    for step_seconds, in_slurm, enough in (
        (0.1, True, ""),
        (8.5, False, ""),
        (10.0, False, f"{told}. Allow 130 s from SIGTERM to SIGKILL"),
        (10.0, True, f"{told}. Use sbatch --signal=USR1@130"),
    ):
        clock, said[:] = itertools.count(step=step_seconds), []
        monitor.time = SimpleNamespace(monotonic=partial(next, clock), perf_counter=perf_counter)
        fit = partial(run, rank, 2, tmp_path, max_steps=15)
        as_job(rank, 2, tmp_path, fit) if in_slurm else fit()
        warned = [words for words in said if "termination signal" in words]
        assert [re.search(enough, words) is not None for words in warned] == [True] * bool(enough and rank == 0)
        assert round(next(clock) / step_seconds) == (10 if rank == 0 else 0)


@in_ranks(2)
def test_outside_a_fit_signals_hang_no_rank(rank: int, tmp_path: Path) -> None:
    def validate(number: int) -> str:
        strategy = fits.strategy(worker_groups=2, timeout=timedelta(seconds=20), **CHOICES)
        trainer = fits.trainer(strategy=strategy, devices=2, default_root_dir=tmp_path)
        try:
            trainer.validate(listening(rank, {(1, "validation_step", 0): [number]}), Announced((rank, 0, 1), 3))
        except BaseException as error:
            return type(error).__name__
        return "validated"

    assert as_job(rank, 2, tmp_path, partial(validate, signal.SIGUSR1)) == "validated"
    assert as_job(rank, 2, tmp_path, partial(validate, signal.SIGTERM)) == TERMINATION or rank == 0
    assert not (tmp_path / "told").exists()
    assert list(tmp_path.glob("*.ckpt")) == []
