"""How processes are started and how they end, and what follows in the same ones: further fits, other groups."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import fits, sharded
from tests.bits import same
from tests.fits import LIGHTNING
from tests.ranks import LAUNCHERS, agreed, run_processes, run_ranks
from tests.scripts import start_script
from tests.strangers import listening

SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": "strided:1"}
OTHER = "pytorch_lightning"
# What a script starts again are fresh interpreters, whose current folder is that of the script.
HERE = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

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
    """A file with the program for one distribution."""
    path, file = folder / "train.py", distribution.replace(".", "_")
    path.write_text(MODEL.replace("{distribution}", distribution).replace("{file}", file))
    return path


@pytest.mark.timeout(300)  # Fresh interpreters import for seconds, and for far longer on a busy machine.
def test_a_script_gets_back_the_same_bits_however_processes_are_started(tmp_path: Path) -> None:
    fitted = {}
    for start_method in ("fork", "popen", "spawn", "forkserver"):
        script = written(tmp_path, distribution=OTHER if start_method == "spawn" else LIGHTNING)
        # While they import, a port that the kernel gave away before may be another's: this one is none of those.
        with main_process(script, start_method, MASTER_PORT=str(random.randrange(10_000, 30_000))) as main:
            main.join(timeout=250)
        assert main.exitcode == 0, (tmp_path / "stderr").read_text()
        (fitted[start_method],) = re.findall("fitted (.*)", (tmp_path / "stdout").read_text())
    assert re.fullmatch(r"True 9 2 \S+ True", fitted["fork"]), "the last: callback_metrics came back"
    assert len({*fitted.values()}) == 1, fitted


def test_a_notebook_trains_in_forked_processes(tmp_path: Path) -> None:
    """An interactive interpreter, one cell after the other, in which the classes are in ``__main__``."""
    cells = [
        f"exec(open({str(written(tmp_path))!r}).read())",
        "net = Net()",
        "net.net(torch.randn(4, 5)).sum().backward()",
        "fit(net, 'fork', max_steps=9)",
        "fit(net, 'fork', max_steps=9)",
        "try: Trainer(strategy='streaming_diloco', accelerator='cpu', devices=2)",
        "except Exception as error: print('refused', error)",
        "",
        "strategy = Trainer(strategy='streaming_diloco_notebook', accelerator='cpu', devices=2).strategy",
        "print('taken', strategy.launcher.is_interactive_compatible)",
    ]
    known = {name: v for name, v in os.environ.items() if not name.startswith(LAUNCHERS)}
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input="".join(f"{cell}\n" for cell in cells),
        cwd=tmp_path,
        env=known | HERE,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = re.findall("fitted (.*)", done.stdout)
    assert first.startswith("True")
    assert first != second, "the second fit starts with the weights of the first"
    (refused,) = re.findall("refused (.*)", done.stdout)
    assert "Write strategy='streaming_diloco_notebook', or give the strategy start_method='fork'." in refused
    assert "taken True" in done.stdout


# How they end


@contextlib.contextmanager
def main_process(script: Path, *arguments: str, **environment: str) -> Iterator[ForkProcess]:
    """A script in a session of its own, which has no process left in the end."""
    main = start_script(script, *arguments, environment=HERE | environment)
    assert main.pid is not None
    try:
        yield main
        main.join(timeout=60)
        until(lambda: not in_session(main.pid), 20)
        left = in_session(main.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(main.pid, signal.SIGKILL)
        main.join(timeout=5)
    assert (main.exitcode is None, left) == (False, []), (script.parent / "stderr").read_text()


def until(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def in_session(session: int | None) -> list[str]:
    """The processes of a session that have not ended."""
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
def test_however_a_training_ends_no_process_is_left(start_method: str, end: str, tmp_path: Path) -> None:
    """Ctrl-C goes to all processes, other signals to the main one, which saves what a termination ends."""
    with main_process(written(tmp_path), start_method, end) as main:
        assert until(lambda: len(list(tmp_path.glob("*.trains"))) == 2, 90), (tmp_path / "stderr").read_text()
        if "exception" not in end:
            number = signal.SIGTERM if end == "SIGTERM" else signal.SIGINT
            (os.killpg if end == "Ctrl-C" else os.kill)(main.pid, number)  # type: ignore[arg-type]
    told = (tmp_path / "stderr").read_text()
    saved = [str(path) for path in tmp_path.rglob("terminated-step=*.ckpt")]
    ways_on = re.findall(r"To go on from there: trainer.fit\(..., ckpt_path='(.*)'\)", told)
    assert (len(saved), ways_on) == (end == "SIGTERM", saved)
    assert end == "SIGTERM" or main.exitcode != 0
    if "exception" in end:
        assert "ArithmeticError: boom" in told
        # By us, by Lightning, which watches the processes that it started, or by multiprocessing.
        named = r"Rank 1 .*failed first|rank: 1\]|Process 1 terminated|Rank 0, which keeps word"
        assert re.search(named, told)


@pytest.mark.parametrize(
    ("start_method", "program", "told"),
    [
        ("popen", "store", "is taken by another training"),
        ("fork", "http", "answers, but is no torch TCPStore"),
    ],
)
def test_a_port_that_is_taken_is_named_and_ends_all_processes(
    start_method: str, program: str, told: str, tmp_path: Path
) -> None:
    with listening(program) as port, main_process(written(tmp_path), start_method, MASTER_PORT=str(port)) as main:
        main.join(timeout=100)
    output = (tmp_path / "stderr").read_text()
    assert main.exitcode == 1
    # Each rank sees a stranger, whichever looks first; only rank 0 that a store is another's.
    for text in (r"ValueError: Rank [01] on", f"127.0.0.1:{port} {told}", "Choose another MASTER_PORT"):
        assert re.search(text, output), output


# Environments that say how many processes there are


@pytest.mark.parametrize(
    ("distribution", "groups", "ranks_per_node"), [(OTHER, "auto", 1), (LIGHTNING, 1, 2), ("sharded", 2, 4)]
)
def test_groups_are_made_of_the_processes_that_an_environment_knows(
    distribution: str, groups: Any, ranks_per_node: int
) -> None:
    def run(rank: int, world_size: int, knows: bool) -> Any:
        known = {
            "devices": "auto",
            "plugins": [fits.environment_that_knows(distribution.replace("sharded", LIGHTNING))],
        }
        choices = known if knows else {}
        if distribution == "sharded":
            return sharded.fit(
                rank, world_size, groups, (2, 1), steps=6, trainer_choices=choices, fragments="strided:1"
            )

        def inspect(trainer: Any, module: Any) -> Any:
            numbers = trainer.world_size, trainer.global_rank, trainer.strategy.topology.num_groups
            return numbers, trainer.strategy.distributed_sampler_kwargs, getattr(trainer.strategy.launcher, "procs", [])

        given = {**SHORT, "worker_groups": groups}
        return fits.fit(rank, world_size, 2, 6, given, distribution, inspect=inspect, trainer_choices=choices)

    world_size = 4 if distribution == "sharded" else 2
    ranks = run_processes(run, world_size, True, ranks_per_node=ranks_per_node)
    assert all(same(own["outer"], ranks[0]["outer"]) for own in (*ranks, *run_processes(run, world_size, False)))
    if distribution != "sharded":
        expected = [((2, rank, 1 if groups == 1 else 2), {"num_replicas": 2, "rank": rank}, []) for rank in range(2)]
        assert [own["inspected"] for own in ranks] == expected


TORCHRUN = {"TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}
SLURM = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
SLURM |= {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "1", "SLURM_JOB_NAME": "tests"}
OF_THREE = {"WORLD_SIZE": "3", "RANK": "0"}


def test_numbers_that_an_environment_refuses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = fits.SomeBatches(0, 2)
    three: dict[str, Any] = {"devices": "auto", "plugins": [fits.environment_that_knows()]}
    nodes = "Knows says that there are 3 processes, which do not fill num_nodes=2 nodes equally"
    for known, groups, given, message in (
        (OF_THREE, 2, three, "worker_groups=2 cannot split 3 processes"),
        (OF_THREE, "auto", {**three, "num_nodes": 2}, nodes),
        (TORCHRUN, 4, {"devices": 2}, "worker_groups=4 cannot split 2 processes"),
        (TORCHRUN, 2, {"devices": 2}, r"does not match the world size \(4\)"),
        (SLURM, 2, {"devices": 2}, "Set `devices=4`"),
    ):
        with monkeypatch.context() as patch:
            for name, value in known.items():
                patch.setenv(name, value)
            with pytest.raises(ValueError, match=message):
                fits.trainer(strategy=fits.strategy(worker_groups=groups), **given).fit(fits.module(), batches)

    def run(rank: int, world_size: int) -> None:
        with pytest.raises(ValueError, match="2 processes are connected, .* and the worker groups are made for 1"):
            fits.trainer(strategy=fits.strategy(), devices=1).fit(fits.module(), batches)

    run_ranks(run, 2)


# Further fits in the same processes


def test_each_of_several_fits_in_the_same_processes_is_as_in_processes_of_its_own() -> None:
    """Other numbers of groups, another model, and a model that was trained before; the last Trainer fits longer."""
    numbers, started = (2, 4, 1, 2), []

    def made(number: int) -> Any:
        torch.manual_seed(7)
        net = nn.Linear(5, 3) if number == 2 else None
        return fits.module(inner="adamw", net=net, on_train_start=lambda self: started.append(held_by(self)))

    def held_by(model: Any) -> dict[str, Tensor]:
        return {name: values.clone() for name, values in model.net.state_dict().items()}

    def fit(rank: int, model: Any, groups: int) -> Any:
        more, own = {"max_epochs": 1, "limit_train_batches": 7}, {"make": lambda *_, **__: model}
        return fits.fit(rank, 4, groups, -1, SHORT, trainer_choices=more, **own, inspect=lambda trainer, _: trainer)

    def run(rank: int, world_size: int) -> Any:
        models, fitted = [made(0), made(1), made(2)], []
        for groups, model in zip(numbers, [*models, models[0]], strict=True):
            held, trained = held_by(model), fit(rank, model, groups)
            fitted.append((held, trained["outer"]))
            assert trained["inspected"].strategy.topology.num_groups == groups
        trainer = trained["inspected"]
        trainer.fit_loop.max_epochs = 3
        trainer.fit(models[0], fits.batches(rank // 2, rank % 2, 2))
        report = trainer.strategy.report()
        assert same(started[-1], fitted[-1][1])
        assert (report["inner_steps"], trainer.current_epoch) == (2 * 7, 3)
        assert report["launches"] == report["landings"] > 0
        assert agreed(trainer.strategy.outer_state_dict())
        return fitted

    def alone(rank: int, world_size: int, number: int, held: list[dict[str, Tensor]]) -> Any:
        model = made(number)
        model.net.load_state_dict(held[rank])
        return fit(rank, model, numbers[number])["outer"]

    for number, ranks in enumerate(zip(*run_processes(run, 4), strict=True)):
        expected = run_processes(alone, 4, number, [held for held, _ in ranks])
        assert all(same(outer, expected[0]) for outer in (*expected, *(outer for _, outer in ranks))), number
