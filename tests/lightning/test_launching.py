"""How processes start and end, by signals too, and what follows in the same ones: further fits,
other groups.
"""

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco.lightning import monitor
from lightning_sdiloco.lightning.fit_state import Signals
from tests import fits, sharded
from tests.bits import same
from tests.fits import LIGHTNING, OTHER, SHORT, Announced, assert_same, on, refusal, said_by, saving
from tests.lightning.test_checkpoint import CHOICES, assert_resumed, state_dict_in, traced
from tests.ranks import PATIENCE, agreed, in_ranks, run_processes, run_ranks
from tests.scripts import start_script, unlaunched
from tests.strangers import listening

MODEL = """
import multiprocessing, sys, time
import torch
from {distribution} import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdiloco.{file} import StreamingDiLoCoStrategy


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(*torch.randn(80, 8, generator=generator).split([5, 3], 1)), batch_size=4)

    def training_step(self, batch, index):
        if ENDS:
            if self.global_step == 3:
                open(f"{self.global_rank}.trains", "w").close()
            if self.global_step == 6 and ENDS == f"exception in rank {self.global_rank}":
                raise ArithmeticError("boom")
            time.sleep(0.02)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(net, start_method, **choices):
    short = dict(sync_every=4, overlap_steps=2, fragments=[["*"]])
    strategy = StreamingDiLoCoStrategy(start_method=start_method, **short)
    quiet = dict(logger=False, enable_progress_bar=False, enable_checkpointing=bool(ENDS))
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, **quiet, **choices)
    trainer.fit(net)
    outer = strategy.outer_state_dict()
    assert len(strategy.fragments) == strategy.schedule.fragments == 1
    same = all(torch.equal(net.get_parameter(name), values) for name, values in outer.items())
    if trainer.is_global_zero:
        total = sum(float(values.double().sum()) for values in net.state_dict().values())
        report = strategy.report()
        logged = "loss" in trainer.callback_metrics
        print("fitted", same, report["inner_steps"], report["launches"], f"{total:.17g}", logged)


START, ENDS = (*sys.argv[1:3], "", "")[:2]
if __name__ == "__main__" and START:
    # Both processes of the fork server have then imported it.
    multiprocessing.set_forkserver_preload(["lightning_sdiloco.{file}"])
    fit(Net(), START, max_steps=5000 if ENDS else 9)
"""


def written(folder: Path, distribution: str = LIGHTNING) -> Path:
    """The script that trains, in a folder."""
    path = folder / "train.py"
    file = distribution.replace(".", "_")
    path.write_text(MODEL.replace("{distribution}", distribution).replace("{file}", file))
    return path


def printed_fits(output: str) -> list[str]:
    return re.findall("fitted (.*)", output)


def test_a_script_gets_back_the_same_bits_however_processes_are_started(tmp_path: Path) -> None:
    fitted = {}
    for start_method in ("fork", "popen", "spawn", "forkserver"):
        script = written(tmp_path, distribution=OTHER if start_method == "spawn" else LIGHTNING)
        # The kernel may give away one of its ports while the processes import: this one is none of
        # those.
        port = str(random.randrange(10_000, 30_000))
        with main_process(script, start_method, MASTER_PORT=port) as main:
            main.join(timeout=250)
        assert main.exitcode == 0, (tmp_path / "stderr").read_text()
        (fitted[start_method],) = printed_fits((tmp_path / "stdout").read_text())
    assert re.fullmatch(r"True 9 2 \S+ True", fitted["fork"]), "the last: callback_metrics are back"
    assert len(set(fitted.values())) == 1, fitted


CELLS = """
net = Net()
net.net(torch.randn(4, 5)).sum().backward()
fit(net, 'fork', max_steps=9)
fit(net, 'fork', max_steps=9)
try: Trainer(strategy='streaming_diloco', accelerator='cpu', devices=2)
except Exception as error: print('refused', error)

trainer = Trainer(strategy='streaming_diloco_notebook', accelerator='cpu', devices=2)
print('taken', trainer.strategy.launcher.is_interactive_compatible)
"""


def test_a_notebook_trains_in_forked_processes(tmp_path: Path) -> None:
    """An interactive interpreter, one cell after the other, in which the classes are in
    ``__main__``.
    """
    script = str(written(tmp_path))
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=f"exec(open({script!r}).read()){CELLS}",
        timeout=PATIENCE,
        cwd=tmp_path,
        env=unlaunched(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = printed_fits(done.stdout)
    assert first.startswith("True")
    assert first != second, "the second fit starts with the weights of the first"
    (message,) = re.findall("refused (.*)", done.stdout)
    assert "Set strategy='streaming_diloco_notebook', or pass" in message
    assert "pass start_method='fork' to the strategy." in message
    assert "taken True" in done.stdout


@contextlib.contextmanager
def main_process(script: Path, *arguments: str, **environment: str) -> Iterator[ForkProcess]:
    """A script in a session of its own, which has no process left in the end."""
    main = start_script(script, *arguments, environment=unlaunched() | environment)
    assert main.pid is not None
    try:
        yield main
        main.join(timeout=60)
        is_over = until(lambda: main.exitcode is not None and not in_session(main.pid), 20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(main.pid, signal.SIGKILL)
        main.join(timeout=5)
    assert is_over, (script.parent / "stderr").read_text()


def until(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def in_session(session: int | None) -> list[str]:
    """The processes of a session that still run."""
    running = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            after_name = (process / "stat").read_text().rpartition(")")[2]
            state, _, _, session_of_process = after_name.split()[:4]
            if int(session_of_process) == session and state != "Z":
                running.append(process.name)
    return running


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("start_method", "end"),
    [("popen", "Ctrl-C"), ("fork", "SIGINT"), ("fork", "SIGTERM"), ("fork", "exception in rank 1")],
)
def test_however_a_training_ends_no_process_is_left(
    start_method: str, end: str, tmp_path: Path
) -> None:
    """Ctrl-C goes to all processes, other signals to the main one, which saves what a termination
    ends.
    """
    error_output = tmp_path / "stderr"
    with main_process(written(tmp_path), start_method, end) as main:
        both_train = until(lambda: len(list(tmp_path.glob("*.trains"))) == 2, 90)
        assert both_train, error_output.read_text()
        if end == "Ctrl-C":
            os.killpg(main.pid, signal.SIGINT)
        elif "exception" not in end:
            os.kill(main.pid, getattr(signal, end))
    output = error_output.read_text()
    saved = [str(path) for path in tmp_path.rglob("terminated-step=*.ckpt")]
    advised = re.findall(
        r"To continue from this checkpoint, call trainer.fit\(..., ckpt_path='(.*)'\)", output
    )
    assert len(saved) == (end == "SIGTERM")
    assert advised == saved
    assert end == "SIGTERM" or main.exitcode != 0
    if "exception" in end:
        assert "ArithmeticError: boom" in output
        # By us, by Lightning, which watches the processes that it started, or by multiprocessing.
        named = r"Rank 1 .*failed first|rank: 1\]|Process 1 terminated|Rank 0, which records"
        assert re.search(named, output)


def test_a_port_that_is_taken_is_named_and_ends_all_processes(tmp_path: Path) -> None:
    with (
        listening("store") as port,
        main_process(written(tmp_path), "fork", MASTER_PORT=str(port)) as main,
    ):
        main.join(timeout=PATIENCE)
    output = (tmp_path / "stderr").read_text()
    assert main.exitcode == 1
    # Each rank sees a stranger, whichever looks first.
    for text in (
        r"ValueError: Rank [01] on",
        f"127.0.0.1:{port} is used by another",
        "Choose a different MASTER_PORT",
    ):
        assert re.search(text, output), output


STEPS = 30
# With CHOICES fragment p launches after 8 + 2p, 16 + 2p, ... and lands five steps later.
SIGNALLED = 14
ENDED = 19
Signalled = dict[tuple[int, str, int], list[int]]
"""Rank, hook, and step that runs or was just made -> signals that the process gets there."""
# Hooks that may send a signal, and the event that each notes.
EVENTS = {
    "training_step": "",
    "on_train_end": "",
    "on_train_epoch_end": "epoch end",
    "on_save_checkpoint": "save",
    "validation_step": "validation batch {1}",
}


def signalling(rank: int, signalled: Signalled, distribution: str = LIGHTNING) -> Any:
    """A traced module that sends its own process signals, and notes what happens between steps."""

    def hook(name: str, event: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            step = self.trainer.global_step + (name == "training_step")
            if event:
                self.events.append(f"{event.format(*args)} after step {step}")
            for number in signalled.get((rank, name, step), ()):
                os.kill(os.getpid(), number)
            return self.loss(args[0]) if name == "training_step" else None

        return call

    hooks = {name: hook(name, event) for name, event in EVENTS.items()}
    return traced(distribution, rank, events=[], **hooks)


class Batches(NamedTuple):
    """The batches of a fit, and the distribution that reads them."""

    length: int = 100
    """The batches of an epoch."""
    validates: bool = False
    distribution: str = LIGHTNING


ONE_EPOCH = Batches()


def run(
    rank: int,
    world_size: int,
    folder: Path,
    signalled: Signalled | None = None,
    resume: Path | None = None,
    batches: Batches = ONE_EPOCH,
    **choices: Any,
) -> dict[str, Any]:
    """Fits until a signal ends the fit, or the last step does."""
    model = signalling(rank, signalled or {}, batches.distribution)
    trainer_choices = {
        "devices": world_size,
        "default_root_dir": folder,
        "max_steps": STEPS,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
        "callbacks": saving(batches.distribution, folder / "checkpoints", save_top_k=0),
        **choices,
    }
    strategy = fits.strategy(batches.distribution, worker_groups=2, **CHOICES)
    trainer = fits.trainer(batches.distribution, strategy=strategy, **trainer_choices)
    size = world_size // 2
    loader = Announced((rank // size, rank % size, size), batches.length)
    validation = Announced((0, 0, 1), 3) if batches.validates else None
    torch.manual_seed(100 + rank)
    outcome = {"trace": model.trace, "events": model.events}
    try:
        trainer.fit(model, loader, validation, ckpt_path=resume)
    except BaseException as error:
        outcome["ended"] = (type(error).__name__, trainer.global_step)
        return outcome
    outcome["ended"] = ("", trainer.global_step)
    if model.trace:
        outcome["outer"] = strategy.outer_state_dict()
        outcome["report"] = strategy.report()
    return outcome


TERMINATED: Signalled = {(1, "training_step", SIGNALLED): [signal.SIGTERM]}
SAVED = f"checkpoints/terminated-step={ENDED}.ckpt"
TERMINATION = "SIGTERMException"


def assert_goes_on(fit: Callable[..., Any], folder: Path) -> None:
    """A fit that was terminated and resumed is as one that was never stopped."""
    plain = fit()
    ended = fit(TERMINATED)
    assert ended["ended"] == (TERMINATION, ENDED)
    assert list(folder.rglob("*.ckpt")) == [folder / SAVED]
    resumed = fit(resume=folder / SAVED)
    assert_resumed(resumed, plain, ENDED)
    assert resumed["ended"] == plain["ended"]
    before = len(ended["events"]) - 1
    events = list(plain["events"])
    events.insert(before, f"save after step {ENDED}")
    assert ended["events"] + resumed["events"] == events


@in_ranks(4)
def test_a_terminated_fit_goes_on_as_if_nothing_had_happened(rank: int, tmp_path: Path) -> None:
    fit = partial(run, rank, 4, tmp_path, batches=Batches(distribution=OTHER))
    assert_goes_on(fit, tmp_path)


FOUR_EPOCHS = {"max_epochs": 4, "max_steps": -1}
ENDS: dict[str, tuple[int, dict[str, Any]]] = {
    "the end of an epoch with its validation": (19, FOUR_EPOCHS),
    "the end of an epoch without validation": (19, {"max_steps": 32, "limit_val_batches": 0}),
    "a validation in the middle": (
        8,
        {**FOUR_EPOCHS, "val_check_interval": 19, "check_val_every_n_epoch": None},
    ),
    "in the middle of an epoch": (8, {"max_steps": 32, "check_val_every_n_epoch": 2}),
}
"""Places where a fit ends, with the batches of an epoch, and choices of the Trainer."""


@in_ranks(2)
def test_validations_and_saves_due_where_a_fit_ends_happen_once(rank: int, tmp_path: Path) -> None:
    for name, (length, choices) in ENDS.items():
        folder = tmp_path / name
        batches = Batches(length, validates=True)
        assert_goes_on(partial(run, rank, 2, folder, batches=batches, **choices), folder)


TWICE = [signal.SIGTERM, signal.SIGTERM]
SIGNALS_AND_ENDS: list[tuple[Signalled, int]] = [
    (
        {
            **TERMINATED,
            (0, "training_step", SIGNALLED + 1): TWICE,
            (0, "training_step", SIGNALLED + 3): TWICE,
        },
        ENDED,
    ),
    ({(1, "validation_step", 0): TWICE}, 13),  # the sanity check
    ({(1, "validation_step", 12): TWICE}, 19),
    ({**TERMINATED, (0, "on_save_checkpoint", ENDED): TWICE}, ENDED),
    ({(1, "training_step", STEPS): TWICE}, STEPS),
    ({(0, "on_train_end", STEPS): TWICE, (1, "on_train_end", STEPS): TWICE}, STEPS),
]
"""Signals, and the step after which the fit ends."""


@in_ranks(2)
def test_whenever_signals_come_all_ranks_end_together_with_one_save(
    rank: int, tmp_path: Path
) -> None:
    """None where the Trainer saves no checkpoints."""
    fit = partial(run, rank, 2)
    validating = {
        "batches": Batches(validates=True),
        "num_sanity_val_steps": 1,
        "val_check_interval": 12,
        "check_val_every_n_epoch": None,
    }
    for number, (signalled, step) in enumerate(SIGNALS_AND_ENDS):
        folder = tmp_path / str(number)
        ended = fit(folder, signalled, **validating)
        assert ended["ended"] == (TERMINATION, step), number
        assert sum("save" in event for event in ended["events"]) == 1, number
        saved = folder / "checkpoints" / f"terminated-step={step}.ckpt"
        assert list(folder.rglob("*.ckpt")) == [saved], number
    unsaved: dict[str, Any] = {"enable_checkpointing": False, "callbacks": []}
    quiet = tmp_path / "quiet"
    for choices in (unsaved, {"fast_dev_run": 30}, {"barebones": True, **unsaved}):
        ended = fit(quiet, TERMINATED, **choices)
        assert ended["ended"] == (TERMINATION, ENDED), choices
        assert ended["events"] == [], choices
    assert list(quiet.rglob("*.ckpt*")) == []


@in_ranks(2)
def test_other_checkpoints_of_a_terminated_fit_do_not_end_the_resumed_one(
    rank: int, tmp_path: Path
) -> None:
    """One that was saved while the signal waited, and one that a callback saved on the exception,
    on all ranks.
    """
    fit = partial(run, rank, 2, tmp_path)
    for step, saves in ((16, {"every_n_train_steps": 16}), (ENDED, {"save_on_exception": True})):
        ended = fit(TERMINATED, callbacks=saving(LIGHTNING, tmp_path, save_top_k=1, **saves))
        resumed = fit(resume=tmp_path / f"step={step}.ckpt")
        assert ended["ended"] == (TERMINATION, ENDED)
        assert resumed["ended"] == ("", STEPS)
        assert min(resumed["trace"]) == step


def test_a_signal_may_come_while_those_before_it_are_read() -> None:
    world = SimpleNamespace(all_gather_object=lambda received: [0])
    alone: Any = SimpleNamespace(topology=SimpleNamespace(world=world))
    signals = Signals(SimpleNamespace(trainer=None, groups=alone))
    numbers = itertools.count()

    def interrupt(frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        signals._note(1 << next(numbers), signal.SIGTERM, None)
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        signals.end_if_any_received()
    finally:
        sys.settrace(before)
    assert next(numbers) > 10


def of_job(rank: int, world_size: int) -> dict[str, str]:
    """The environment of a rank in a job of SLURM."""
    job = {
        "JOB_ID": 123,
        "JOB_NAME": "test",
        "NNODES": 1,
        "NODEID": 0,
        "PROCID": rank,
        "LOCALID": rank,
        "NTASKS": world_size,
        "NTASKS_PER_NODE": world_size,
    }
    return {f"SLURM_{name}": str(value) for name, value in job.items()}


def as_job(rank: int, world_size: int, folder: Path, function: Callable[[], Any]) -> Any:
    """Calls a function in a job of SLURM, whose `scontrol` notes its arguments and signals its
    caller in turn.
    """
    scontrol = folder / f"bin.{rank}" / "scontrol"
    scontrol.parent.mkdir(exist_ok=True)
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/told\nkill -TERM $PPID\n')
    scontrol.chmod(0o755)
    job = {**of_job(rank, world_size), "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    with mock.patch.dict(os.environ, job):
        return function()


REQUEUED: Signalled = {
    (1, "training_step", SIGNALLED): [signal.SIGUSR1],
    (1, "training_step", SIGNALLED + 3): [signal.SIGUSR1],
}
# It would launch after step 28 and land after 33: the fit ends before, and with it the request.
REQUEUED_LATE: Signalled = {
    (0, "training_step", ENDED + 6): [signal.SIGUSR1],
    (1, "training_step", ENDED + 6): [signal.SIGUSR1],
}


@in_ranks(2)
def test_a_job_that_slurm_requeues_goes_on_as_if_nothing_had_happened(
    rank: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def fit(signalled: Signalled) -> Any:
        return as_job(rank, 2, tmp_path, partial(run, rank, 2, folder, signalled))

    plain = run(rank, 2, tmp_path / "plain")
    first = fit(REQUEUED)
    second = fit(REQUEUED_LATE)
    third = fit({})
    assert first["ended"] == (TERMINATION, ENDED)
    assert second["ended"] == (TERMINATION, STEPS)
    assert third["ended"] == ("", STEPS)
    assert_resumed(second, plain, ENDED, end=STEPS)
    newest = folder / "hpc_ckpt_2.ckpt"
    state_dict = state_dict_in(newest)
    assert_same({name: state_dict[name] for name in plain["outer"]}, plain["outer"])
    # A crash before the file took its place: the folder alone is no checkpoint.
    torch.distributed.barrier()
    newest.unlink(missing_ok=True)
    again = fit({})
    assert again["ended"] == ("", STEPS)
    assert sorted(again["trace"]) == list(range(ENDED, STEPS))
    assert (tmp_path / "told").read_text() == "requeue 123\n" * 2
    assert [path.name for path in folder.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]


# Launches are two steps apart, and land five steps later. Only the first steps are measured.
LONG_WAIT = r"up to 7 inner steps or about 70 s \(10 s each\)"
# The seconds of a step, whether SLURM runs it, and the advice.
WAITS = (
    (0.1, True, ""),
    (8.5, False, ""),
    (10.0, False, f"{LONG_WAIT}. Allow 130 s from SIGTERM to SIGKILL"),
    (10.0, True, f"{LONG_WAIT}. Use sbatch --signal=USR1@130"),
)


@in_ranks(2)
def test_a_signal_that_would_wait_long_is_warned_of_and_outside_a_fit_hangs_no_rank(
    rank: int, tmp_path: Path
) -> None:
    messages = said_by("lightning_sdiloco.lightning.monitor")
    job = partial(as_job, rank, 2, tmp_path)
    fit = partial(run, rank, 2, tmp_path, max_steps=15)
    for step_seconds, in_slurm, advice in WAITS:
        messages.clear()
        clock = itertools.count(step=step_seconds)
        clock_functions = {"monotonic": partial(next, clock), "perf_counter": time.perf_counter}
        monitor.time = SimpleNamespace(**clock_functions)
        if in_slurm:
            job(fit)
        else:
            fit()
        warnings = [message for message in messages if "termination signal" in message]
        assert len(warnings) == bool(advice and rank == 0)
        assert all(re.search(advice, warning) for warning in warnings)
        assert round(next(clock) / step_seconds) == (10 if rank == 0 else 0)

    assert job(partial(validated, rank, tmp_path, signal.SIGUSR1)) == "validated"
    outcome = job(partial(validated, rank, tmp_path, signal.SIGTERM))
    assert outcome == TERMINATION or rank == 0
    assert not (tmp_path / "told").exists()
    assert list(tmp_path.glob("*.ckpt")) == []


def validated(rank: int, folder: Path, number: int) -> str:
    """Validates in this rank, of which rank 1 gets a signal; returns how that ended."""
    strategy = fits.strategy(worker_groups=2, timeout=timedelta(seconds=20), **CHOICES)
    trainer = fits.trainer(strategy=strategy, devices=2, default_root_dir=folder)
    model = signalling(rank, {(1, "validation_step", 0): [number]})
    try:
        trainer.validate(model, Announced((rank, 0, 1), 3))
    except BaseException as error:
        return type(error).__name__
    return "validated"


def place_in_the_world(trainer: Any, module: Any) -> dict[str, Any]:
    return {
        "world": (trainer.world_size, trainer.global_rank, trainer.strategy.topology.num_groups),
        "sampler": trainer.strategy.distributed_sampler_kwargs,
        "started": getattr(trainer.strategy.launcher, "procs", []),
    }


@pytest.mark.parametrize(("distribution", "size"), [(OTHER, 1), (LIGHTNING, 2)])
def test_groups_are_made_of_the_processes_that_an_environment_knows(
    distribution: str, size: int
) -> None:
    """Of one rank each, on as many nodes, and of sharded models."""
    choices: dict[str, Any] = {**SHORT, "worker_groups": "auto"}
    if size == 2:
        choices = {**SHORT, "data_parallel_size": 2, "tensor_parallel_size": 1}

    def make(kind: str, inner: str, seed: int) -> Any:
        return sharded.sharded(kind, seed) if size == 2 else fits.module(kind, seed=seed)

    def fit(rank: int, world_size: int) -> Any:
        environment = fits.environment_that_knows(distribution)
        trainer_choices = {"devices": "auto", "plugins": [environment]}
        making: dict[str, Any] = {"make": make, "inspect": place_in_the_world}
        return fits.fit(
            rank, world_size, 2, 6, choices, distribution, trainer_choices=trainer_choices, **making
        )

    world_size = 2 * size
    fitted = run_processes(fit, world_size, ranks_per_node=size**2)
    for rank in range(world_size):
        assert fitted[rank]["inspected"] == {
            "world": (world_size, rank, 2),
            "sampler": {"num_replicas": world_size, "rank": rank},
            "started": [],
        }
        assert same(fitted[rank]["outer"], fitted[0]["outer"])


THREE_PROCESSES = {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}
TORCHRUN = {**THREE_PROCESSES, "TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": "4"}
NODES = "Knows reports 3 processes, which cannot be divided equally among num_nodes=2 nodes"


def test_numbers_that_an_environment_refuses_are_refused() -> None:
    loader = fits.SomeBatches(0, 2)
    knowing: dict[str, Any] = {"devices": "auto", "plugins": [fits.environment_that_knows()]}
    on_two_nodes = {**knowing, "num_nodes": 2}
    two: dict[str, Any] = {"devices": 2}

    def fit(groups: Any, choices: dict[str, Any]) -> None:
        trainer = fits.trainer(strategy=fits.strategy(worker_groups=groups), **choices)
        trainer.fit(fits.module(), loader)

    for environment, groups, choices, words in (
        (THREE_PROCESSES, 2, knowing, "worker_groups=2 cannot split 3 processes"),
        (THREE_PROCESSES, "auto", on_two_nodes, NODES),
        (TORCHRUN, 4, two, "worker_groups=4 cannot split 2 processes"),
        (TORCHRUN, 2, two, "does not match the world size (4)"),
        (of_job(0, 4), 2, two, "Set `devices=4`"),
    ):
        with mock.patch.dict(os.environ, environment):
            assert words in refusal(fit, groups, choices)

    def fit_alone(rank: int, world_size: int) -> str:
        trainer = fits.trainer(strategy=fits.strategy(), devices=1)
        return refusal(trainer.fit, fits.module(), loader)

    for message in run_ranks(fit_alone, 2):
        words = "has connected 2 processes, but the worker groups expect 1"
        assert re.search(words, message)


# The groups of each of several fits.
GROUPS = (2, 4, 1, 2)


def model_of_fit(number: int) -> Any:
    """The model of a fit: another one in the third. It notes what it holds when it starts."""

    def on_train_start(self: Any) -> None:
        self.started = held_by(self)

    torch.manual_seed(7)
    net = nn.Linear(5, 3) if number == 2 else None
    return fits.module(inner="adamw", net=net, on_train_start=on_train_start)


def held_by(model: Any) -> dict[str, Tensor]:
    return {name: values.clone() for name, values in model.net.state_dict().items()}


def fit_in_groups(rank: int, model: Any, groups: int) -> tuple[Any, dict[str, Tensor]]:
    """Fits a model; returns its Trainer and the outer parameters."""
    fitted = fits.fit(
        rank,
        4,
        groups,
        -1,
        SHORT,
        trainer_choices={"max_epochs": 1, "limit_train_batches": 7},
        make=lambda *_, **__: model,
        inspect=lambda trainer, _: trainer,
    )
    return fitted["inspected"], fitted["outer"]


def several_fits(rank: int, world_size: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The values that each fit began with, and the outer parameters that it ended with."""
    models = [model_of_fit(number) for number in range(3)]
    models.append(models[0])
    fitted = []
    threads = []
    for groups, model in zip(GROUPS, models, strict=True):
        held = held_by(model)
        trainer, outer = fit_in_groups(rank, model, groups)
        fitted.append((held, outer))
        assert trainer.strategy.topology.num_groups == groups
        time.sleep(0.2)
        threads.append(len(list(Path("/proc/self/task").iterdir())))
    assert threads[3] == threads[2], "the process groups of the first fit were used again"
    assert_goes_on_with_the_outer_model(rank, trainer, models[0], outer)
    return fitted


def assert_goes_on_with_the_outer_model(
    rank: int, trainer: Any, model: Any, outer: dict[str, Tensor]
) -> None:
    def spoil(trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.net[0].weight += trainer.global_rank

    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, fits.batches(rank // 2, rank % 2, 2))
    report = trainer.strategy.report()
    assert same(model.started, outer)
    assert report["inner_steps"] == 2 * 7
    assert trainer.current_epoch == 3
    assert report["launches"] == report["landings"] > 0
    assert agreed(trainer.strategy.outer_state_dict())
    trainer.fit_loop.max_epochs = 4
    trainer.callbacks.append(on(on_train_end=spoil))
    trainer.fit(model, fits.batches(rank // 2, rank % 2, 2))
    assert agreed(held_by(model))


def test_each_of_several_fits_in_the_same_processes_is_as_in_processes_of_its_own() -> None:
    """Of other groups, another model, and one that was trained before; what a callback changes is
    then rank 0's.
    """

    def alone(rank: int, world_size: int, number: int, held: list[dict[str, Tensor]]) -> Any:
        model = model_of_fit(number)
        model.net.load_state_dict(held[rank])
        _, outer = fit_in_groups(rank, model, GROUPS[number])
        return outer

    ranks = run_processes(several_fits, 4)
    for number in range(len(GROUPS)):
        held = [fitted[number][0] for fitted in ranks]
        expected = run_processes(alone, 4, number, held)
        for rank in range(4):
            _, outer = ranks[rank][number]
            assert same(expected[rank], expected[0]), number
            assert same(outer, expected[0]), number
