"""Signals end all ranks after the same inner step, with a checkpoint that goes on as if nothing had happened."""

import importlib
import itertools
import os
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
from tests.fits import LIGHTNING, said_by
from tests.lightning.test_checkpoint import CHOICES, assert_same, traced, unequal
from tests.lightning.uneven_fits import Announced
from tests.ranks import run_processes

STEPS = 30
# With CHOICES fragment p launches after 8 + 2p, 16 + 2p, ... and lands five steps later.
SIGNALLED, ENDED = 14, 19


Signalled = dict[tuple[int, str, int], list[int]]
"""Rank, hook, and step that runs or has just been made -> signals that the process gets there."""


def listening(distribution: str, rank: int, signalled: Signalled) -> Any:
    """A traced module that sends its own process signals, and notes what happens between steps."""
    base = type(traced(distribution, rank))

    class Listening(base):  # type: ignore[misc, valid-type]
        def signal(self, hook: str, step: int, said_of_it: str = "") -> None:
            self.said.extend([f"{said_of_it} after step {step}"] if said_of_it else [])
            for number in signalled.get((rank, hook, step), ()):
                os.kill(os.getpid(), number)

        def on_train_batch_start(self, *args: Any) -> None:
            super().on_train_batch_start(*args)
            stepped = self.trainer.fit_loop.epoch_loop._batches_that_stepped
            self.trace[self.trainer.global_step]["batches that stepped"] = torch.tensor(stepped)

        def training_step(self, parts: Any, index: int) -> Any:
            self.signal("training_step", self.trainer.global_step + 1)
            return super().training_step(parts, index)

        def validation_step(self, parts: Any, index: int) -> None:
            self.signal("validation_step", self.trainer.global_step, f"validation batch {index}")

        def on_train_epoch_end(self) -> None:
            self.signal("on_train_epoch_end", self.trainer.global_step, "epoch end")

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.signal("on_save_checkpoint", self.trainer.global_step, "save")

        def on_train_end(self) -> None:
            self.signal("on_train_end", self.trainer.global_step)

    model = Listening()
    model.trace, model.said = {}, []
    return model


def run(
    rank: int,
    world_size: int,
    folder: Path,
    signalled: Signalled,
    resume: str | None = None,
    distribution: str = LIGHTNING,
    length: int = 100,
    validates: bool = False,
    saves: dict[str, Any] | None = None,
    enable_checkpointing: bool = True,
    **choices: Any,
) -> dict[str, Any]:
    """Fits in this rank of two groups, and returns what happened."""
    size, model = world_size // 2, listening(distribution, rank, signalled)
    saver = importlib.import_module(distribution).callbacks.ModelCheckpoint
    how = {"dirpath": folder / "checkpoints", "save_top_k": 0} if saves is None else {"dirpath": folder, **saves}
    given = {"callbacks": [saver(**how)] if enable_checkpointing else [], "max_steps": STEPS, "num_sanity_val_steps": 0}
    trainer = fits.trainer(
        distribution,
        strategy=fits.strategy(distribution, worker_groups=2, **CHOICES),
        devices=world_size,
        default_root_dir=folder,
        enable_checkpointing=enable_checkpointing,
        **{**given, **choices},
    )
    torch.manual_seed(100 + rank)
    ended = ""
    try:
        loader = Announced((rank // size, rank % size, size), length)
        trainer.fit(model, loader, Announced((0, 0, 1), 3) if validates else None, ckpt_path=resume)
    except BaseException as error:
        ended = type(error).__name__
    outer = trainer.strategy.outer_state_dict() if model.trace and not ended else {}
    return {"trace": model.trace, "said": model.said, "ended": (ended, trainer.global_step), "outer": outer}


def played(world_size: int, folder: Path, *cases: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What each rank did in each of several fits, one after the other; each has its own folder if it names none."""

    def play(rank: int, world_size: int) -> list[dict[str, Any]]:
        named = ({"signalled": {}, "folder": number, **case} for number, case in enumerate(cases))
        return [run(rank, world_size, **{**case, "folder": folder / str(case["folder"])}) for case in named]

    return [list(ranks) for ranks in zip(*run_processes(play, world_size, timeout=150.0), strict=True)]


def assert_goes_on(
    resumed: list[dict[str, Any]], plain: list[dict[str, Any]], end: tuple[str, int] | None = None
) -> None:
    """From the step after which a signal ended it, a fit has the bits of one that had none."""
    for one, other in zip(resumed, plain, strict=True):
        assert one["ended"] == (end or other["ended"])
        assert one["trace"].keys() == {at for at in other["trace"] if at >= ENDED}
        assert {at: wrong for at in one["trace"] if (wrong := unequal(one["trace"][at], other["trace"][at]))} == {}
        assert end or unequal(one["outer"], other["outer"]) == []


def all_ended(ranks: list[dict[str, Any]], step: int = ENDED, ended: str = "SIGTERMException") -> bool:
    return [rank["ended"] for rank in ranks] == [(ended, step)] * len(ranks)


TERMINATED: Signalled = {(1, "training_step", SIGNALLED): [signal.SIGTERM]}
SAVED = f"checkpoints/terminated-step={ENDED}.ckpt"


BY_EPOCHS, BY_STEPS = {"validates": True, "max_epochs": 4, "max_steps": -1}, {"validates": True, "max_steps": 32}
DUE: list[dict[str, Any]] = [
    {"length": 19, **BY_EPOCHS},  # the end of an epoch with its validation
    {"length": 19, **BY_STEPS, "limit_val_batches": 0},  # the end of an epoch without validation
    {"length": 8, **BY_EPOCHS, "val_check_interval": 19, "check_val_every_n_epoch": None},  # a validation in the middle
    {"length": 8, **BY_STEPS, "check_val_every_n_epoch": 2},  # in the middle of an epoch
]


@pytest.mark.parametrize(("world_size", "due"), [(2, DUE), (4, [{"distribution": "pytorch_lightning"}])])
def test_a_fit_that_one_rank_was_told_to_terminate_goes_on_as_if_nothing_had_happened(
    world_size: int, due: list[dict[str, Any]], tmp_path: Path
) -> None:
    """And what is due where it ends is done once."""
    files = [tmp_path / str(number) / SAVED for number in range(len(due))]
    cases: list[dict[str, Any]] = []
    for number, (of, file) in enumerate(zip(due, files, strict=True)):
        how = ({}, {"signalled": TERMINATED}, {"resume": str(file)})
        cases += [{**of, "folder": number, **choices} for choices in how]
    found = played(world_size, tmp_path, *cases)
    for plain, ended, resumed in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert all_ended(ended)
        assert_goes_on(resumed, plain)
        for one, first, other in zip(resumed, ended, plain, strict=True):
            before = len(first["said"]) - 1
            told = [*other["said"][:before], f"save after step {ENDED}", *other["said"][before:]]
            assert [*first["said"], *one["said"]] == told
    assert sorted(tmp_path.rglob("*.ckpt")) == files


MANY = [signal.SIGTERM, signal.SIGTERM]
WHENEVER: list[tuple[Signalled, int]] = [
    ({**TERMINATED, **{(0, "training_step", SIGNALLED + later): MANY for later in (1, 3)}}, ENDED),
    ({(1, "validation_step", 0): MANY}, 13),  # the sanity check
    ({(1, "validation_step", 12): MANY}, 19),
    ({**TERMINATED, (0, "on_save_checkpoint", ENDED): MANY}, ENDED),
    ({(1, "training_step", STEPS): MANY}, STEPS),
    ({(rank, "on_train_end", STEPS): MANY for rank in range(2)}, STEPS),
]


def test_whenever_signals_come_all_ranks_end_together_with_one_save(tmp_path: Path) -> None:
    """None where the Trainer saves no checkpoints."""
    of = {"validates": True, "num_sanity_val_steps": 1, "val_check_interval": 12, "check_val_every_n_epoch": None}
    quiet = [{"enable_checkpointing": False}, {"fast_dev_run": 30}, {"barebones": True, "enable_checkpointing": False}]
    cases = [{"signalled": signalled, **of} for signalled, _ in WHENEVER]
    found = played(2, tmp_path, *cases, *({"signalled": TERMINATED, **how} for how in quiet))
    for number, ended in enumerate(found):
        step = WHENEVER[number][1] if number < len(WHENEVER) else ENDED
        assert all_ended(ended, step), number
        saved = [tmp_path / str(number) / "checkpoints" / f"terminated-step={step}.ckpt"] * (number < len(WHENEVER))
        assert list((tmp_path / str(number)).rglob("*.ckpt" if saved else "*.ckpt*")) == saved, number
        assert [sum("save" in words for words in rank["said"]) for rank in ended] == [len(saved)] * 2, number


def test_other_checkpoints_of_a_terminated_fit_do_not_end_the_one_that_resumes_from_them(tmp_path: Path) -> None:
    """One that was saved while the signal waited, and one that a callback saved on the exception, on all ranks."""
    of: dict[str, Any] = {"folder": "it", "signalled": TERMINATED}
    *ended, first, second = played(
        2,
        tmp_path,
        {**of, "saves": {"filename": "{step}", "every_n_train_steps": 16}},
        {**of, "saves": {"filename": "{step}", "save_on_exception": True}},
        {"resume": str(tmp_path / "it" / "step=16.ckpt")},
        {"resume": str(tmp_path / "it" / f"step={ENDED}.ckpt")},
    )
    assert all(map(all_ended, ended))
    assert all_ended([*first, *second], STEPS, "")
    assert [min(rank["trace"]) for rank in (*first, *second)] == [16, 16, ENDED, ENDED]


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


def test_a_job_that_slurm_requeues_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    requeued: Signalled = {(1, "training_step", SIGNALLED + later): [signal.SIGUSR1] for later in (0, 3)}
    # Launched after 28, landed after 33 it would be: the fit ends before, and with it the request.
    after: Signalled = {(rank, "training_step", ENDED + 6): [signal.SIGUSR1] for rank in range(2)}
    newest = tmp_path / "run" / "hpc_ckpt_2.ckpt"

    def job(rank: int, world_size: int) -> list[dict[str, Any]]:
        def fit(signalled: Signalled) -> dict[str, Any]:
            return dict(as_job(rank, world_size, tmp_path, partial(run, rank, world_size, tmp_path / "run", signalled)))

        found = [run(rank, world_size, tmp_path / "plain", {})]
        found += [fit(signalled) for signalled in (requeued, after, {})]
        # A crash before the file took its place: the folder alone is no checkpoint.
        found[-1]["saved"] = torch.load(newest, weights_only=True)["state_dict"]
        torch.distributed.barrier()
        newest.unlink(missing_ok=True)
        return [*found, fit({})]

    plain, first, second, third, again = zip(*run_processes(job, 2, timeout=150.0), strict=True)
    ends = ((first, ENDED), (second, STEPS)), ((third, STEPS), (again, STEPS))
    assert [all_ended(list(ranks), step) for ranks, step in ends[0]] == [True] * 2
    assert [all_ended(list(ranks), step, "") for ranks, step in ends[1]] == [True] * 2
    assert (tmp_path / "told").read_text() == "requeue 123\n" * 2
    assert [path.name for path in (tmp_path / "run").glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    assert_goes_on(list(second), list(plain), ("SIGTERMException", STEPS))
    for other, saved in zip(plain, third, strict=True):
        assert_same({name: saved["saved"][name] for name in other["outer"]}, other["outer"])
    assert [sorted(rank["trace"]) for rank in again] == [list(range(ENDED, STEPS))] * 2


# How long a signal waits


def test_the_start_warns_on_rank_0_if_a_signal_would_wait_long(tmp_path: Path) -> None:
    cases = [
        (0.1, True, ""),
        (8.5, False, ""),
        (10.0, False, "Allow 130 s from SIGTERM to SIGKILL"),
        (10.0, True, "sbatch --signal=USR1@130"),
    ]

    def slow(rank: int, world_size: int) -> list[tuple[list[str], float]]:
        found, said = [], said_by("lightning_sdiloco.lightning.monitor")
        for step_seconds, in_slurm, _ in cases:
            clock, said[:] = itertools.count(step=step_seconds), []
            monitor.time = SimpleNamespace(monotonic=partial(next, clock), perf_counter=perf_counter)  # type: ignore[assignment]
            fit = partial(run, rank, world_size, tmp_path, {}, max_steps=15)
            as_job(rank, world_size, tmp_path, fit) if in_slurm else fit()
            found.append(([words for words in said if "termination signal" in words], next(clock) / step_seconds))
        return found

    own, others = run_processes(slow, 2)
    # Launches are two steps apart, and land five steps later. Only the first steps are measured.
    told = "up to 7 inner steps, which take about 70 s (10 s each)"
    for (_, _, enough), (warned, looks) in zip(cases, own, strict=True):
        assert [told in words and enough in words for words in warned] == [True] * bool(enough)
        assert round(looks) == 10
    assert others == [([], 0)] * len(cases)


def test_outside_a_fit_signals_hang_no_rank(tmp_path: Path) -> None:
    def validate(rank: int, world_size: int) -> list[str]:
        ended = []
        for number in (signal.SIGUSR1, signal.SIGTERM):
            strategy = fits.strategy(worker_groups=2, timeout=timedelta(seconds=20), **CHOICES)
            trainer = fits.trainer(strategy=strategy, devices=world_size, default_root_dir=tmp_path)
            model = listening(LIGHTNING, rank, {(1, "validation_step", 0): [number]})
            try:
                trainer.validate(model, Announced((rank, 0, 1), 3))
                ended.append("validated")
            except BaseException as error:
                ended.append(type(error).__name__)
        return ended

    first, second = run_processes(lambda rank, size: as_job(rank, size, tmp_path, partial(validate, rank, size)), 2)
    assert (first[0], second) == ("validated", ["validated", "SIGTERMException"])
    assert not (tmp_path / "told").exists()
    assert list(tmp_path.glob("*.ckpt")) == []
