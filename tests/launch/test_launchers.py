"""Several machines, as network namespaces: torchrun, with restarts, and Lightning's own launcher."""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.namespaces import enter, two_sites
from tests.ranks import LAUNCHERS

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Every rank keeps the model that it ends with. Once, between two checkpoints, the last rank is killed.
SCRIPT = """
import os
import signal
from pathlib import Path

import lightning as L
import torch

import train


class Watch(L.Callback):
    def on_train_batch_end(self, trainer, module, *args):
        last = trainer.global_rank == trainer.world_size - 1
        if os.environ.get("KILL") and last and trainer.global_step == 113 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = train.main([Watch()])
    torch.save(trainer.strategy.outer_state_dict(), f"trained-{trainer.global_rank}.pt")
"""


def launched(folder: Path, arguments: list[list[str]], script: list[str], **environment: str) -> str:
    """Runs the script of the examples, on each machine with its arguments of Python; returns what all print."""
    folder.mkdir()
    shutil.copy(ROOT / "examples" / "launching" / "train.py", folder)
    (folder / "watched.py").write_text(SCRIPT)
    nodes, log = len(arguments), folder / "all.log"
    known = {name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHERS, "LOCAL_RANK"))}
    known |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    # Otherwise processes that are restarted read in torchrun's store where those before them listened.
    known |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "wire" if nodes > 1 else "lo"}
    known |= environment
    processes = []
    with two_sites() if nodes > 1 else nullcontext([""]) as sites, log.open("a") as printed:
        for node, (site, own) in enumerate(zip(sites, arguments, strict=True)):
            command = [sys.executable, *own, "watched.py", f"--num-nodes={nodes}", "--devices=2", *script]
            entered = (lambda site=site: enter(site)) if site else None  # type: ignore[misc]
            place = {**known, "NODE_RANK": str(node)}
            processes.append(
                subprocess.Popen(
                    command, cwd=folder, env=place, preexec_fn=entered, stdout=printed, stderr=subprocess.STDOUT
                )
            )
        try:
            codes = [process.wait(250) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert codes == [0] * nodes, log.read_text()
    return log.read_text()


def assert_alike(count: int, *folders: Path) -> None:
    """Asserts that so many ranks ended with the same bits."""
    first, *others = [torch.load(path) for folder in folders for path in folder.glob("trained-*.pt")]
    assert len(others) == count - 1
    for model in others:
        assert all(torch.equal(values, model[name]) for name, values in first.items())


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.network)])
def test_a_run_that_torchrun_restarts_ends_with_the_bits_of_one_in_which_no_rank_was_killed(
    nodes: int, tmp_path: Path
) -> None:
    torchrun = ["-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=2", "--max-restarts=3"]
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.79.0.1:29400"]
    # The host names of these machines do not tell their addresses.
    own = [[*meet, f"--local-addr=10.79.0.{n}", f"--rdzv-conf=is_host={int(n == 1)}"] for n in (1, 2)]
    arguments = [[*torchrun, *of_node] for of_node in (own if nodes > 1 else [["--standalone"]])]
    steps = ["--steps=160", "--resume=last"]
    launched(tmp_path / "through", arguments, steps)
    text = launched(tmp_path / "killed", arguments, steps, KILL="1")
    assert (tmp_path / "killed" / "killed").exists()
    for step in (0, 100):
        assert f"2 worker groups of {nodes}, from step {step}" in text
    assert_alike(4 * nodes, tmp_path / "through", tmp_path / "killed")


@pytest.mark.network
def test_lightning_launches_a_run_on_two_machines(tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "10.79.0.1", "MASTER_PORT": "29500"}
    text = launched(tmp_path / "run", [[], []], ["--steps=60"], **meeting)
    assert "2 worker groups of 2, from step 0" in text
    assert_alike(4, tmp_path / "run")
