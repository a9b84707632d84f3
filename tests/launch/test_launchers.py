"""Several machines: torchrun with restarts and Lightning's launcher in network namespaces, and a
real SLURM.
"""

import math
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.chaos.checks import Told, examined
from tests.chaos.faults import Fault
from tests.chaos.play import Play
from tests.chaos.processes import BATCH
from tests.chaos.world import World
from tests.federation.hubs import require_extra
from tests.namespaces import enter, two_sites
from tests.scripts import ROOT, unlaunched
from tests.slurm import Slurm, slurm

# Together they take minutes, most of which is waiting for processes to start.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Every rank keeps the model that it ends with. Once, between two checkpoints, the last rank is
# killed; under SLURM it is slow enough for a signal to come in the midst of it.
SCRIPT = """
import os
import signal
import time
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
        if trainer.is_global_zero and trainer.global_step == 60:
            print("signal now", flush=True)
        time.sleep(float(os.environ.get("PACE", "0")))


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = train.main([Watch()])
    torch.save(trainer.strategy.outer_state_dict(), f"trained-{trainer.global_rank}.pt")
"""


def fresh(folder: Path) -> Path:
    """A folder with the scripts of the examples, and the one that is watched."""
    folder.mkdir()
    for script in (
        ROOT / "examples" / "launching" / "train.py",
        *(ROOT / "examples" / "slurm").glob("*.sbatch"),
    ):
        shutil.copy(script, folder)
    (folder / "watched.py").write_text(SCRIPT)
    return folder


def assert_alike(count: int, *folders: Path) -> None:
    """Asserts that so many ranks ended with the same bits."""
    models = [torch.load(path) for folder in folders for path in folder.glob("trained-*.pt")]
    assert len(models) == count
    assert all(
        torch.equal(values, model[name]) for model in models for name, values in models[0].items()
    )


# Without a scheduler


def launched(
    folder: Path, arguments: list[list[str]], script: list[str], **environment: str
) -> str:
    """Runs the script on each machine with its arguments of Python; returns what all print when
    all end well.
    """
    fresh(folder)
    nodes = len(arguments)
    log = folder / "all.log"
    # Otherwise processes that are restarted read in torchrun's store where those before them
    # listened.
    known = {**unlaunched(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment}
    if nodes > 1:
        known["GLOO_SOCKET_IFNAME"] = "wire"
    processes = []
    with two_sites() if nodes > 1 else nullcontext([""]) as sites, log.open("a") as printed:
        for node, (site, own) in enumerate(zip(sites, arguments, strict=True)):
            command = [
                sys.executable,
                *own,
                "watched.py",
                f"--num-nodes={nodes}",
                "--devices=2",
                *script,
            ]
            place: dict[str, Any] = {"cwd": folder, "env": {**known, "NODE_RANK": str(node)}}
            place["preexec_fn"] = (lambda site=site: enter(site)) if site else None
            processes.append(
                subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, **place)
            )
        try:
            codes = [process.wait(250) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert codes == [0] * nodes, log.read_text()
    return log.read_text()


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.network)])
def test_a_run_restarted_by_torchrun_is_bit_identical_to_one_without_a_killed_rank(
    nodes: int, tmp_path: Path
) -> None:
    torchrun = [
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes}",
        "--nproc-per-node=2",
        "--max-restarts=3",
    ]
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.79.0.1:29400"]
    # The host names of these machines do not tell their addresses.
    own = [
        [*meet, f"--local-addr=10.79.0.{n}", f"--rdzv-conf=is_host={int(n == 1)}"] for n in (1, 2)
    ]
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


# Under SLURM


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    # Not below pytest's folder, whose path is too long for a socket.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        slurm(Path(folder), nodes=4, cores=4) as running,
    ):
        path = f"{Path(sys.executable).parent}:{running.environment['PATH']}"
        running.environment.update(
            PATH=path, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore", PACE="0.03"
        )
        yield running


def submitted(cluster: Slurm, folder: Path, *arguments: str) -> str:
    """The number of a job."""
    return cluster.run("sbatch", "--parsable", *arguments, cwd=folder).strip()


def said(words: str, log: Path) -> str:
    """Waits until a log says something; returns all that it says."""
    deadline = time.monotonic() + 250.0
    text = ""
    while words not in text:
        assert time.monotonic() < deadline, text[-3000:]
        time.sleep(0.1)
        text = log.read_text() if log.exists() else ""
    return text


@pytest.mark.slurm
def test_example_job_scripts_train_the_groups_they_promise_and_the_doctor_runs_there(
    cluster: Slurm, tmp_path: Path
) -> None:
    for script, groups in (
        ("one_group_per_node", "2 worker groups of 2"),
        ("one_group_of_several_nodes", "2 worker groups of 2"),
        ("several_groups_per_node", "4 worker groups of 1"),
    ):
        folder = fresh(tmp_path / script)
        job = submitted(cluster, folder, f"{script}.sbatch")
        assert f"{groups}, from step 0" in said("trained 400 steps", folder / f"sdiloco-{job}.log")
    doctor = [sys.executable, "-m", "lightning_sdiloco.tools.cli", "doctor", "--seconds=0.2"]
    table = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *doctor)
    assert "2 on 2 hosts (n0, n1), in 2 worker groups of 1" in table
    assert "bandwidth 1 -> 0" in table


@pytest.mark.slurm
def test_a_requeued_job_ends_with_the_bits_of_one_that_was_never_stopped(
    cluster: Slurm, tmp_path: Path
) -> None:
    command = "srun python watched.py --num-nodes 2 --devices 1 --steps 400 && echo all ranks ended"
    choices = [
        "--nodes=2",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",
        "--output=job.log",
    ]
    through = fresh(tmp_path / "through")
    stopped = fresh(tmp_path / "stopped")
    job = submitted(cluster, stopped, *choices, f"--wrap={command}")
    said("signal now", stopped / "job.log")
    cluster.run("scancel", "--signal=USR1", job)
    submitted(cluster, through, *choices, f"--wrap={command}")
    text, uninterrupted = (
        said("all ranks ended", folder / "job.log") for folder in (stopped, through)
    )
    assert text.count("from step") == 2, text
    assert 60 < int(text.rpartition("from step ")[2].split()[0]) < 400, text
    assert uninterrupted.count("from step 0") == uninterrupted.count("from step") == 1
    assert_alike(4, through, stopped)


class Jobs(World):
    """A hub and a site as processes, and site a as a job."""

    cluster: Slurm
    number: str

    def started(self, name: str) -> Any:
        if name != "a":
            return super().started(name)
        script = self.folder / "a.pickle"
        script.write_bytes(pickle.dumps(self.told(name)))
        choices = [
            "--nodes=1",
            "--ntasks-per-node=1",
            "--requeue",
            "--signal=USR1@120",
            "--output=/dev/null",
        ]
        command = f"--wrap=srun python -m tests.chaos.processes {script}"
        self.number = submitted(self.cluster, self.folder, *choices, command)
        kill = partial(self.cluster.run, "scancel", "--signal=KILL", "--full", self.number)
        return SimpleNamespace(pid=None, exitcode=None, kill=kill, join=lambda timeout=None: None)


@pytest.mark.slurm
@pytest.mark.parametrize("resume", ["last", "signal"])
def test_a_site_job_returns_from_its_checkpoint_and_the_other_site_does_not_wait(
    resume: str, cluster: Slurm, tmp_path: Path
) -> None:
    require_extra()
    with Jobs(tmp_path, "ab", 0.05, lease=10.0) as world:
        world.cluster = cluster
        play = Play(world)
        play.begin()
        there = play.seen["b"].round
        # As SLURM does after a failed node or a preemption; or before the time is up.
        cluster.run(
            *(["scontrol", "requeue"] if resume == "last" else ["scancel", "--signal=USR1"]),
            world.number,
        )
        # As one that is killed: it may take its time.
        requeued = Fault("kill", "a", 0.0)
        play.going_on.append((math.inf, requeued))
        world.faults.write("begin", kind="kill", victim="a")
        training = lambda: [note for note in world.notes("a") if note["what"] == "training"]  # noqa: E731
        play.until("the job to begin again", lambda: len(training()) == 2, 240.0)
        play.going_on.clear()
        world.faults.write("end", kind="kill", victim="a")
        joined = play.seen["b"].round
        assert joined >= there + 2
        play.until("it to count again", lambda: play.seen["a"].round >= joined + 3, 60.0)
        play.finish()
    told = Told.of(tmp_path, "ab")
    assert examined(told, BATCH)["problems"] == []
    # Where more rounds closed meanwhile than are kept, it says hello once more with the state that
    # it fetched.
    assert (
        len(
            {
                note["incarnation"]
                for note in told.hub
                if note["what"] == "hello" and note["site"] == "a"
            }
        )
        == 2
    )
    assert (
        len(
            {
                incarnation
                for note in told.records()
                for site, incarnation, _ in note["counted"]
                if site == "a"
            }
        )
        == 2
    )
    # It went on from what it had saved.
    (_, again), steps = training(), told.steps("a")
    before = max(note["step"] for note in steps if note["at"] < again["at"])
    assert again["step"] == (before // 25 * 25 if resume == "last" else before)
