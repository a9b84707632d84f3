"""Several machines, as network namespaces: torchrun, with restarts, and Lightning's own launcher."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.namespaces import enter, two_sites
from tests.ranks import LAUNCHERS

ROOT = Path(__file__).parents[2]
STEPS = 160
SECONDS = 250.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Every rank keeps the model that it ends with. Once, between two checkpoints, the last rank is killed.
SCRIPT = """
import os
import signal
from pathlib import Path

import lightning as L
import torch

import train

KILLED = Path("killed")


class Watch(L.Callback):
    def on_train_batch_end(self, trainer, module, *args):
        last = trainer.global_rank == trainer.world_size - 1
        if os.environ.get("KILL") and last and trainer.global_step == 113 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = train.main([Watch()])
    torch.save(trainer.strategy.outer_state_dict(), f"trained-{trainer.global_rank}.pt")
"""

TORCHRUN = ["-m", "torch.distributed.run"]
# Otherwise processes that are restarted read in torchrun's store where those before them listened.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SINGLE = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"]


def fresh(folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(ROOT / "examples" / "launching" / "train.py", folder)
    (folder / "watched.py").write_text(SCRIPT)
    return folder


def start(folder: Path, arguments: list[str], site: str | None = None, **environment: str) -> "subprocess.Popen[str]":
    known = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    known.pop("LOCAL_RANK", None)
    known |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", **OWN_STORE}
    inside: Callable[[], None] | None = None
    if site is not None:
        # Before Python starts anything else.
        def inside() -> None:
            enter(site)

    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=known | {"GLOO_SOCKET_IFNAME": "lo" if site is None else "wire"} | environment,
        preexec_fn=inside,
        stdout=(folder / f"{site}.log").open("w"),
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(folder: Path, *processes: "subprocess.Popen[str]") -> str:
    """What all print, when all have ended well."""
    deadline = time.monotonic() + SECONDS
    try:
        for process in processes:
            process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired as error:
        raise AssertionError(_printed(folder)) from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), _printed(folder)
    return _printed(folder)


def _printed(folder: Path) -> str:
    return "".join(log.read_text() for log in sorted(folder.glob("*.log")))


def models(*folders: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path) for folder in folders for path in sorted(folder.glob("trained-*.pt"))]


def assert_alike(models: list[dict[str, torch.Tensor]], count: int) -> None:
    assert len(models) == count
    for model in models[1:]:
        assert all(torch.equal(values, model[name]) for name, values in models[0].items())


def test_a_run_that_torchrun_restarts_ends_with_the_bits_of_one_in_which_no_rank_was_killed(tmp_path: Path) -> None:
    through, killed = fresh(tmp_path / "through"), fresh(tmp_path / "killed")
    script = ["watched.py", "--devices=2", f"--steps={STEPS}", "--resume=last"]
    ended(through, start(through, [*SINGLE, *script]))
    text = ended(killed, start(killed, [*SINGLE, *script], KILL="1"))
    assert "2 worker groups of 1, from step 0" in text
    assert "2 worker groups of 1, from step 100" in text
    assert_alike(models(through, killed), 4)


@pytest.mark.network
def test_torchrun_restarts_a_run_on_two_machines(tmp_path: Path) -> None:
    through, killed = fresh(tmp_path / "through"), fresh(tmp_path / "killed")
    script = ["watched.py", "--num-nodes=2", "--devices=2", f"--steps={STEPS}", "--resume=last"]

    def node(number: int) -> list[str]:
        # The host names of these machines do not tell their addresses.
        return [f"--local-addr=10.79.0.{number}", f"--rdzv-conf=is_host={int(number == 1)}"]

    def run(folder: Path, **environment: str) -> str:
        with two_sites() as sites:
            common = ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=3"]
            common += ["--rdzv-backend=c10d", "--rdzv-endpoint=10.79.0.1:29400"]
            nodes = [
                start(folder, [*TORCHRUN, *common, *node(n), *script], site, **environment)
                for n, site in enumerate(sites, start=1)
            ]
            return ended(folder, *nodes)

    run(through)
    text = run(killed, KILL="1")
    assert "2 worker groups of 2, from step 0" in text
    assert "2 worker groups of 2, from step 100" in text
    assert_alike(models(through, killed), 8)


@pytest.mark.network
def test_lightning_launches_a_run_on_two_machines(tmp_path: Path) -> None:
    folder = fresh(tmp_path / "run")
    script = ["watched.py", "--num-nodes=2", "--devices=2", "--steps=60"]
    with two_sites() as sites:
        meeting = {"MASTER_ADDR": "10.79.0.1", "MASTER_PORT": "29500"}
        nodes = [start(folder, script, site, NODE_RANK=str(n), **meeting) for n, site in enumerate(sites)]
        text = ended(folder, *nodes)
    assert "2 worker groups of 2, from step 0" in text
    assert_alike(models(folder), 4)
