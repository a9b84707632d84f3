"""Ctrl-C and signals to the main process of a script: no process is left behind, and none hangs."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.scripts import start_script

ROOT = Path(__file__).parents[2]
SECONDS = 20.0

SCRIPT = """
import os, sys, time
from pathlib import Path
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from lightning_sdiloco import StreamingDiLoCoStrategy

folder, start_method, failing = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


class Slow(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

    def training_step(self, x, index):
        if index == 3:
            (folder / f"{self.global_rank}.pid").write_text(f"{os.getpid()} ")
        if index == 20 and failing == str(self.global_rank):
            raise ArithmeticError("boom")
        time.sleep(0.02)
        return self.net(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    strategy = StreamingDiLoCoStrategy(
        sync_every=10, overlap_steps=3, fragments=[["*"]], start_method=start_method
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=5000, logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Slow(), DataLoader(torch.randn(100_000, 4), batch_size=2))
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: object, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def started(folder: Path, start_method: str, failing: str) -> tuple[int, Callable[[], int | None]]:
    """Starts the script in a session of its own; its process, and what tells how that ended.

    Where processes are forked, the main one is a fork too, and has what takes long to import.
    """
    script, environment = folder / "train.py", {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script.write_text(SCRIPT)
    command = [str(script), str(folder), start_method, failing]
    if start_method != "fork":
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        errors = (folder / "stderr").open("w")
        main = subprocess.Popen([sys.executable, *command], env=environment, stderr=errors, start_new_session=True)
        return main.pid, main.poll

    process = start_script(script, *command[1:], environment=environment)
    assert process.pid is not None
    return process.pid, lambda: process.exitcode


@contextmanager
def training(
    folder: Path, start_method: str, failing: str = ""
) -> Iterator[tuple[int, list[int], Callable[[], int | None]]]:
    """A script that trains two ranks: its main process, all of its processes, and how it ended."""
    main, ended = started(folder, start_method, failing)
    pids = [folder / f"{rank}.pid" for rank in range(2)]
    try:
        trains = wait_until(lambda: all(path.exists() and path.read_text().endswith(" ") for path in pids), 90)
        assert trains, (folder / "stderr").read_text()
        yield main, [main, *(int(path.read_text()) for path in pids)], ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(main, signal.SIGKILL)
        wait_until(lambda: ended() is not None, 5)


def assert_all_end(folder: Path, pids: list[int], ended: Callable[[], int | None]) -> str:
    """Waits until no process is left, and returns what they said."""
    gone = wait_until(lambda: ended() is not None and not any(map(is_alive, pids)), SECONDS)
    told = (folder / "stderr").read_text()
    assert gone, ([pid for pid in pids if is_alive(pid)], told)
    return told


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("to", "start_method"), [("all", "popen"), ("main", "fork")])
def test_ctrl_c_leaves_no_process_behind(to: str, start_method: str, tmp_path: Path) -> None:
    with training(tmp_path, start_method) as (main, pids, ended):
        (os.killpg if to == "all" else os.kill)(main, signal.SIGINT)
        assert_all_end(tmp_path, pids, ended)
        assert ended() != 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_a_termination_signal_to_the_main_process_saves_and_leaves_no_process_behind(
    start_method: str, tmp_path: Path
) -> None:
    with training(tmp_path, start_method) as (main, pids, ended):
        os.kill(main, signal.SIGTERM)
        told = assert_all_end(tmp_path, pids, ended)
    (saved,) = tmp_path.rglob("terminated-step=*.ckpt")
    assert f"To go on from there: trainer.fit(..., ckpt_path={str(saved)!r})" in told
    assert told.count("To go on from there") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("start_method", "failing"), [("popen", "0"), ("fork", "1")])
def test_an_exception_in_one_process_ends_all_and_names_it(start_method: str, failing: str, tmp_path: Path) -> None:
    with training(tmp_path, start_method, failing) as (_, pids, ended):
        told = assert_all_end(tmp_path, pids, ended)
        assert ended() != 0
    assert "ArithmeticError: boom" in told
    # By us, by Lightning, which watches the processes that it started, or by multiprocessing.
    named = rf"Rank {failing} .*failed first|rank: {failing}\]|Process {failing} terminated|Rank 0, which keeps word"
    assert re.search(named, told)
