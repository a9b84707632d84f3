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
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco.lightning import monitor
from lightning_sdiloco.lightning.fit_state import Signals
from tests import fits, sharded
from tests.bits import same
from tests.fits import LIGHTNING, OTHER, SHORT, Announced, assert_same, on, refusal, said_by, saving
from tests.lightning.test_checkpoint import CHOICES, assert_resumed, traced
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
    path = folder / "train.py"
    file = distribution.replace(".", "_")
    path.write_text(MODEL.replace("{distribution}", distribution).replace("{file}", file))
    return path


def test_a_script_gets_back_the_same_bits_however_processes_are_started(tmp_path: Path) -> None:
    fitted = {}
    for start_method in ("fork", "popen", "spawn", "forkserver"):
        script = written(tmp_path, distribution=OTHER if start_method == "spawn" else LIGHTNING)
        # While they import, a port that the kernel gave away before may be another's: this one is
        # none of those.
        with main_process(
            script, start_method, MASTER_PORT=str(random.randrange(10_000, 30_000))
        ) as main:
            main.join(timeout=250)
        assert main.exitcode == 0, (tmp_path / "stderr").read_text()
        (fitted[start_method],) = re.findall("fitted (.*)", (tmp_path / "stdout").read_text())
    assert re.fullmatch(r"True 9 2 \S+ True", fitted["fork"]), (
        "the last: callback_metrics came back"
    )
    assert len({*fitted.values()}) == 1, fitted


def test_a_notebook_trains_in_forked_processes(tmp_path: Path) -> None:
    """An interactive interpreter, one cell after the other, in which the classes are in
    ``__main__``.
    """
    cells = [
        f"exec(open({str(written(tmp_path))!r}).read())",
        "net = Net()",
        "net.net(torch.randn(4, 5)).sum().backward()",
        "fit(net, 'fork', max_steps=9)",
        "fit(net, 'fork', max_steps=9)",
        "try: Trainer(strategy='streaming_diloco', accelerator='cpu', devices=2)",
        "except Exception as error: print('refused', error)",
        "",
        "strategy = Trainer(strategy='streaming_diloco_notebook', accelerator='cpu',"
        " devices=2).strategy",
        "print('taken', strategy.launcher.is_interactive_compatible)",
    ]
    about: dict[str, Any] = {
        "cwd": tmp_path,
        "env": unlaunched(),
        "capture_output": True,
        "text": True,
    }
    typed = "".join(f"{cell}\n" for cell in cells)
    done = subprocess.run([sys.executable, "-i", "-q"], input=typed, timeout=PATIENCE, **about)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = re.findall("fitted (.*)", done.stdout)
    assert first.startswith("True")
    assert first != second, "the second fit starts with the weights of the first"
    (refused,) = re.findall("refused (.*)", done.stdout)
    assert (
        "Write strategy='streaming_diloco_notebook', or give the strategy start_method='fork'."
        in refused
    )
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
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, own = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            found += [process.name] if int(own) == session and state != "Z" else []
    return found


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
    with main_process(written(tmp_path), start_method, end) as main:
        assert until(lambda: len(list(tmp_path.glob("*.trains"))) == 2, 90), (
            tmp_path / "stderr"
        ).read_text()
        if "exception" not in end:
            number = signal.SIGTERM if end == "SIGTERM" else signal.SIGINT
            (os.killpg if end == "Ctrl-C" else os.kill)(main.pid, number)
    told = (tmp_path / "stderr").read_text()
    saved = [str(path) for path in tmp_path.rglob("terminated-step=*.ckpt")]
    ways_on = re.findall(r"To continue from there: trainer.fit\(..., ckpt_path='(.*)'\)", told)
    assert (len(saved), ways_on) == (end == "SIGTERM", saved)
    assert end == "SIGTERM" or main.exitcode != 0
    if "exception" in end:
        assert "ArithmeticError: boom" in told
        # By us, by Lightning, which watches the processes that it started, or by multiprocessing.
        named = r"Rank 1 .*failed first|rank: 1\]|Process 1 terminated|Rank 0, which records"
        assert re.search(named, told)


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
        f"127.0.0.1:{port} is taken by another",
        "Choose another MASTER_PORT",
    ):
        assert re.search(text, output), output


STEPS = 30
# With CHOICES fragment p launches after 8 + 2p, 16 + 2p, ... and lands five steps later.
SIGNALLED = 14
ENDED = 19
Signalled = dict[tuple[int, str, int], list[int]]
"""Rank, hook, and step that runs or has just been made -> signals that the process gets there."""


def signalling(rank: int, signalled: Signalled, distribution: str = LIGHTNING) -> Any:
    """A traced module that sends its own process signals, and says what happens between steps."""

    def hook(name: str, what: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            step = self.trainer.global_step + (name == "training_step")
            self.said += [f"{what.format(*args)} after step {step}"] if what else []
            for number in signalled.get((rank, name, step), ()):
                os.kill(os.getpid(), number)
            return self.loss(args[0]) if name == "training_step" else None

        return call

    told = {
        "training_step": "",
        "on_train_end": "",
        "on_train_epoch_end": "epoch end",
        "on_save_checkpoint": "save",
    }
    told["validation_step"] = "validation batch {1}"
    return traced(
        distribution, rank, said=[], **{name: hook(name, what) for name, what in told.items()}
    )


def run(
    rank: int,
    world_size: int,
    folder: Path,
    signalled: Signalled | None = None,
    resume: Path | None = None,
    distribution: str = LIGHTNING,
    length: int = 100,
    validates: bool = False,
    **choices: Any,
) -> dict[str, Any]:
    model = signalling(rank, signalled or {}, distribution)
    size = world_size // 2
    given = {"max_steps": STEPS, "num_sanity_val_steps": 0, "enable_checkpointing": True, **choices}
    given = {"callbacks": saving(distribution, folder / "checkpoints", save_top_k=0), **given}
    strategy = fits.strategy(distribution, worker_groups=2, **CHOICES)
    trainer = fits.trainer(
        distribution, strategy=strategy, devices=world_size, default_root_dir=folder, **given
    )
    loader = Announced((rank // size, rank % size, size), length)
    ended = ""
    torch.manual_seed(100 + rank)
    try:
        trainer.fit(model, loader, Announced((0, 0, 1), 3) if validates else None, ckpt_path=resume)
    except BaseException as error:
        ended = type(error).__name__
    told = {"trace": model.trace, "said": model.said, "ended": (ended, trainer.global_step)}
    if model.trace and not ended:
        told |= {"outer": strategy.outer_state_dict(), "report": strategy.report()}
    return told


TERMINATED: Signalled = {(1, "training_step", SIGNALLED): [signal.SIGTERM]}
SAVED = f"checkpoints/terminated-step={ENDED}.ckpt"
TERMINATION = "SIGTERMException"


def assert_goes_on(rank: int, world_size: int, folder: Path, **of: Any) -> None:
    plain = run(rank, world_size, folder, **of)
    ended = run(rank, world_size, folder, TERMINATED, **of)
    assert ended["ended"] == (TERMINATION, ENDED)
    assert list(folder.rglob("*.ckpt")) == [folder / SAVED]
    resumed = run(rank, world_size, folder, resume=folder / SAVED, **of)
    assert_resumed(resumed, plain, ENDED)
    assert resumed["ended"] == plain["ended"]
    before = len(ended["said"]) - 1
    told = [*plain["said"][:before], f"save after step {ENDED}", *plain["said"][before:]]
    assert [*ended["said"], *resumed["said"]] == told


@in_ranks(4)
def test_a_terminated_fit_goes_on_as_if_nothing_had_happened(rank: int, tmp_path: Path) -> None:
    assert_goes_on(rank, 4, tmp_path, distribution="pytorch_lightning")


@in_ranks(2)
def test_validations_and_saves_due_where_a_fit_ends_happen_once(rank: int, tmp_path: Path) -> None:
    by_epochs = {"max_epochs": 4, "max_steps": -1}
    by_steps = {"max_steps": 32}
    in_the_middle = {"val_check_interval": 19, "check_val_every_n_epoch": None}
    cases: dict[str, dict[str, Any]] = {
        "the end of an epoch with its validation": {"length": 19, **by_epochs},
        "the end of an epoch without validation": {
            "length": 19,
            **by_steps,
            "limit_val_batches": 0,
        },
        "a validation in the middle": {"length": 8, **by_epochs, **in_the_middle},
        "in the middle of an epoch": {"length": 8, **by_steps, "check_val_every_n_epoch": 2},
    }
    for name, due in cases.items():
        assert_goes_on(rank, 2, tmp_path / name, validates=True, **due)


@in_ranks(2)
def test_whenever_signals_come_all_ranks_end_together_with_one_save(
    rank: int, tmp_path: Path
) -> None:
    """None where the Trainer saves no checkpoints."""
    many = [signal.SIGTERM, signal.SIGTERM]
    whenever: list[tuple[Signalled, int]] = [
        (
            {**TERMINATED, **{(0, "training_step", SIGNALLED + later): many for later in (1, 3)}},
            ENDED,
        ),
        ({(1, "validation_step", 0): many}, 13),  # the sanity check
        ({(1, "validation_step", 12): many}, 19),
        ({**TERMINATED, (0, "on_save_checkpoint", ENDED): many}, ENDED),
        ({(1, "training_step", STEPS): many}, STEPS),
        ({(of_rank, "on_train_end", STEPS): many for of_rank in range(2)}, STEPS),
    ]
    of = {
        "validates": True,
        "num_sanity_val_steps": 1,
        "val_check_interval": 12,
        "check_val_every_n_epoch": None,
    }
    for number, (signalled, step) in enumerate(whenever):
        ended = run(rank, 2, tmp_path / str(number), signalled, **of)
        assert ended["ended"] == (TERMINATION, step), number
        assert sum("save" in words for words in ended["said"]) == 1, number
        saved = tmp_path / str(number) / "checkpoints" / f"terminated-step={step}.ckpt"
        assert list((tmp_path / str(number)).rglob("*.ckpt")) == [saved], number
    unsaved: dict[str, Any] = {"enable_checkpointing": False, "callbacks": []}
    for how in (unsaved, {"fast_dev_run": 30}, {"barebones": True, **unsaved}):
        ended = run(rank, 2, tmp_path / "quiet", TERMINATED, **how)
        assert (ended["ended"], ended["said"]) == ((TERMINATION, ENDED), []), how
    assert list((tmp_path / "quiet").rglob("*.ckpt*")) == []


@in_ranks(2)
def test_other_checkpoints_of_a_terminated_fit_do_not_end_the_resumed_one(
    rank: int, tmp_path: Path
) -> None:
    """One that was saved while the signal waited, and one that a callback saved on the exception,
    on all ranks.
    """
    for step, saves in ((16, {"every_n_train_steps": 16}), (ENDED, {"save_on_exception": True})):
        ended = run(
            rank,
            2,
            tmp_path,
            TERMINATED,
            callbacks=saving(LIGHTNING, tmp_path, save_top_k=1, **saves),
        )
        resumed = run(rank, 2, tmp_path, resume=tmp_path / f"step={step}.ckpt")
        assert (ended["ended"], resumed["ended"]) == ((TERMINATION, ENDED), ("", STEPS))
        assert min(resumed["trace"]) == step


def test_a_signal_may_come_while_those_before_it_are_read() -> None:
    alone: Any = SimpleNamespace(
        topology=SimpleNamespace(world=SimpleNamespace(all_gather_object=lambda own: [0]))
    )
    signals = Signals(SimpleNamespace(trainer=None, groups=alone))
    came = itertools.count()

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


def of_job(rank: int, world_size: int) -> dict[str, str]:
    job = {
        "JOB_ID": 123,
        "JOB_NAME": "test",
        "NNODES": 1,
        "NODEID": 0,
        "PROCID": rank,
        "LOCALID": rank,
    }
    job |= dict.fromkeys(("NTASKS", "NTASKS_PER_NODE"), world_size)
    return {f"SLURM_{name}": str(value) for name, value in job.items()}


def as_job(rank: int, world_size: int, folder: Path, function: Callable[[], Any]) -> Any:
    """Calls a function in a job of SLURM, whose `scontrol` notes what it is told and signals its
    caller in turn.
    """
    scontrol = folder / f"bin.{rank}" / "scontrol"
    scontrol.parent.mkdir(exist_ok=True)
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/told\nkill -TERM $PPID\n')
    scontrol.chmod(0o755)
    job = {**of_job(rank, world_size), "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    with mock.patch.dict(os.environ, job):
        return function()


@in_ranks(2)
def test_a_job_that_slurm_requeues_goes_on_as_if_nothing_had_happened(
    rank: int, tmp_path: Path
) -> None:
    requeued: Signalled = {
        (1, "training_step", SIGNALLED + later): [signal.SIGUSR1] for later in (0, 3)
    }
    # Launched after 28, landed after 33 it would be: the fit ends before, and with it the request.
    after: Signalled = {(rank, "training_step", ENDED + 6): [signal.SIGUSR1] for rank in range(2)}
    newest = tmp_path / "run" / "hpc_ckpt_2.ckpt"

    def fit(signalled: Signalled) -> dict[str, Any]:
        return dict(as_job(rank, 2, tmp_path, partial(run, rank, 2, tmp_path / "run", signalled)))

    plain, (first, second, third) = (
        run(rank, 2, tmp_path / "plain"),
        map(fit, (requeued, after, {})),
    )
    assert [first["ended"], second["ended"]] == [(TERMINATION, ENDED), (TERMINATION, STEPS)]
    assert third["ended"] == ("", STEPS)
    assert_resumed(second, plain, ENDED, end=STEPS)
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


@in_ranks(2)
def test_a_signal_that_would_wait_long_is_warned_of_and_outside_a_fit_hangs_no_rank(
    rank: int, tmp_path: Path
) -> None:
    # Launches are two steps apart, and land five steps later. Only the first steps are measured.
    told = r"up to 7 inner steps, about 70 s \(10 s each\)"
    said = said_by("lightning_sdiloco.lightning.monitor")
    for step_seconds, in_slurm, enough in (
        (0.1, True, ""),
        (8.5, False, ""),
        (10.0, False, f"{told}. Allow 130 s from SIGTERM to SIGKILL"),
        (10.0, True, f"{told}. Use sbatch --signal=USR1@130"),
    ):
        clock, said[:] = itertools.count(step=step_seconds), []
        monitor.time = SimpleNamespace(
            monotonic=partial(next, clock), perf_counter=time.perf_counter
        )
        fit = partial(run, rank, 2, tmp_path, max_steps=15)
        as_job(rank, 2, tmp_path, fit) if in_slurm else fit()
        warned = [words for words in said if "termination signal" in words]
        assert [re.search(enough, words) is not None for words in warned] == [True] * bool(
            enough and rank == 0
        )
        assert round(next(clock) / step_seconds) == (10 if rank == 0 else 0)

    def validate(number: int) -> str:
        strategy = fits.strategy(worker_groups=2, timeout=timedelta(seconds=20), **CHOICES)
        trainer = fits.trainer(strategy=strategy, devices=2, default_root_dir=tmp_path)
        try:
            trainer.validate(
                signalling(rank, {(1, "validation_step", 0): [number]}), Announced((rank, 0, 1), 3)
            )
        except BaseException as error:
            return type(error).__name__
        return "validated"

    assert as_job(rank, 2, tmp_path, partial(validate, signal.SIGUSR1)) == "validated"
    assert as_job(rank, 2, tmp_path, partial(validate, signal.SIGTERM)) == TERMINATION or rank == 0
    assert not (tmp_path / "told").exists()
    assert list(tmp_path.glob("*.ckpt")) == []


@pytest.mark.parametrize(("distribution", "size"), [(OTHER, 1), (LIGHTNING, 2)])
def test_groups_are_made_of_the_processes_that_an_environment_knows(
    distribution: str, size: int
) -> None:
    """Of one rank each, on as many nodes, and of sharded models."""
    sizes = (
        {"data_parallel_size": 2, "tensor_parallel_size": 1}
        if size == 2
        else {"worker_groups": "auto"}
    )

    def make(kind: str, inner: str, seed: int) -> Any:
        return sharded.sharded(kind, seed) if size == 2 else fits.module(kind, seed=seed)

    def inspect(trainer: Any, module: Any) -> Any:
        numbers = trainer.world_size, trainer.global_rank, trainer.strategy.topology.num_groups
        return (
            numbers,
            trainer.strategy.distributed_sampler_kwargs,
            getattr(trainer.strategy.launcher, "procs", []),
        )

    def run(rank: int, world_size: int) -> Any:
        known = {"devices": "auto", "plugins": [fits.environment_that_knows(distribution)]}
        more: dict[str, Any] = {"trainer_choices": known, "make": make, "inspect": inspect}
        return fits.fit(rank, world_size, 2, 6, {**SHORT, **sizes}, distribution, **more)

    ranks = run_processes(run, 2 * size, ranks_per_node=size**2)
    expected = [
        ((2 * size, rank, 2), {"num_replicas": 2 * size, "rank": rank}, [])
        for rank in range(2 * size)
    ]
    assert [own["inspected"] for own in ranks] == expected
    assert all(same(own["outer"], ranks[0]["outer"]) for own in ranks)


def test_numbers_that_an_environment_refuses_are_refused() -> None:
    of_three = {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}
    of_torchrun = {**of_three, "TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": "4"}
    batches = fits.SomeBatches(0, 2)
    three: dict[str, Any] = {"devices": "auto", "plugins": [fits.environment_that_knows()]}
    nodes = "Knows says that there are 3 processes, which do not fill num_nodes=2 nodes equally"
    for known, groups, given, message in (
        (of_three, 2, three, "worker_groups=2 cannot split 3 processes"),
        (of_three, "auto", {**three, "num_nodes": 2}, nodes),
        (of_torchrun, 4, {"devices": 2}, "worker_groups=4 cannot split 2 processes"),
        (of_torchrun, 2, {"devices": 2}, "does not match the world size (4)"),
        (of_job(0, 4), 2, {"devices": 2}, "Set `devices=4`"),
    ):
        with mock.patch.dict(os.environ, known):
            make = partial(fits.trainer, strategy=fits.strategy(worker_groups=groups), **given)
            assert message in refusal(lambda: make().fit(fits.module(), batches))  # noqa: B023  it is called here

    def run(rank: int, world_size: int) -> str:
        return refusal(
            fits.trainer(strategy=fits.strategy(), devices=1).fit, fits.module(), batches
        )

    for told in run_ranks(run, 2):
        assert re.search("2 processes are connected .* but the worker groups are made for 1", told)


def test_each_of_several_fits_in_the_same_processes_is_as_in_processes_of_its_own() -> None:
    """Of other groups, another model, and one that was trained before; what a callback changes is
    then rank 0's.
    """
    numbers = (2, 4, 1, 2)
    started = []

    def made(number: int) -> Any:
        torch.manual_seed(7)
        net = nn.Linear(5, 3) if number == 2 else None
        return fits.module(
            inner="adamw", net=net, on_train_start=lambda self: started.append(held_by(self))
        )

    def held_by(model: Any) -> dict[str, Tensor]:
        return {name: values.clone() for name, values in model.net.state_dict().items()}

    def fit(rank: int, model: Any, groups: int) -> Any:
        more = {"max_epochs": 1, "limit_train_batches": 7}
        own = {"make": lambda *_, **__: model}
        return fits.fit(
            rank,
            4,
            groups,
            -1,
            SHORT,
            trainer_choices=more,
            **own,
            inspect=lambda trainer, _: trainer,
        )

    def run(rank: int, world_size: int) -> Any:
        models = [made(0), made(1), made(2)]
        fitted = []
        threads = []
        for groups, model in zip(numbers, [*models, models[0]], strict=True):
            held = held_by(model)
            trained = fit(rank, model, groups)
            fitted.append((held, trained["outer"]))
            assert trained["inspected"].strategy.topology.num_groups == groups
            time.sleep(0.2)
            threads.append(len(list(Path("/proc/self/task").iterdir())))
        assert threads[3] == threads[2], "the process groups of the first fit were used again"
        trainer = trained["inspected"]
        trainer.fit_loop.max_epochs = 3
        trainer.fit(models[0], fits.batches(rank // 2, rank % 2, 2))
        report = trainer.strategy.report()
        assert same(started[-1], fitted[-1][1])
        assert (report["inner_steps"], trainer.current_epoch) == (2 * 7, 3)
        assert report["launches"] == report["landings"] > 0
        assert agreed(trainer.strategy.outer_state_dict())
        trainer.fit_loop.max_epochs = 4
        trainer.callbacks.append(on(on_train_end=spoil))
        trainer.fit(models[0], fits.batches(rank // 2, rank % 2, 2))
        assert agreed(held_by(models[0]))
        return fitted

    def spoil(trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.net[0].weight += trainer.global_rank

    def alone(rank: int, world_size: int, number: int, held: list[dict[str, Tensor]]) -> Any:
        model = made(number)
        model.net.load_state_dict(held[rank])
        return fit(rank, model, numbers[number])["outer"]

    for number, ranks in enumerate(zip(*run_processes(run, 4), strict=True)):
        expected = run_processes(alone, 4, number, [held for held, _ in ranks])
        assert all(
            same(outer, expected[0]) for outer in (*expected, *(outer for _, outer in ranks))
        ), number
