"""Under a real SLURM: worker groups by node and by number, the doctor, requeued jobs, and one that is a site."""

import math
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.checks import Told, examined
from tests.chaos.faults import Fault
from tests.chaos.play import Play
from tests.chaos.processes import BATCH
from tests.chaos.world import Process, World
from tests.federation.hubs import require_extra
from tests.slurm import Slurm, slurm

ROOT = Path(__file__).parents[2]
STEPS = 400

# Together they take more than a minute, most of which is waiting for jobs.
pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]

# Slow enough for a signal to come in the midst of it. Every rank keeps the model that it ends with.
SCRIPT = """
import time

import lightning as L
import torch

import train


class Watch(L.Callback):
    def on_train_batch_end(self, trainer, module, *args):
        if trainer.is_global_zero and trainer.global_step == 60:
            print("signal now", flush=True)
        time.sleep(0.03)


if __name__ == "__main__":
    trainer = train.main([Watch()])
    torch.save(trainer.strategy.outer_state_dict(), f"trained-{trainer.global_rank}.pt")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    # Not below pytest's folder, whose path is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(Path(folder), nodes=4, cores=4) as running:
        path = f"{Path(sys.executable).parent}:{running.environment['PATH']}"
        running.environment.update(PATH=path, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore")
        yield running


def fresh(folder: Path) -> Path:
    folder.mkdir()
    for script in ((ROOT / "examples" / "launching" / "train.py"), *(ROOT / "examples" / "slurm").glob("*.sbatch")):
        shutil.copy(script, folder)
    (folder / "watched.py").write_text(SCRIPT)
    return folder


def submitted(cluster: Slurm, folder: Path, *arguments: str) -> str:
    """The number of a job."""
    return cluster.run("sbatch", "--parsable", *arguments, cwd=folder).strip()


def until(holds: Callable[[], Any], *logs: Path, seconds: float = 250.0) -> None:
    """Waits until something holds, and shows logs if it does not come to that."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, [log.read_text()[-3000:] for log in logs if log.exists()]
        time.sleep(0.1)


def said(words: str, log: Path) -> str:
    """Waits until a log says something; returns all that it says."""
    until(lambda: log.exists() and words in log.read_text(), log)
    return log.read_text()


def test_job_scripts_of_the_examples_train_the_groups_that_they_say(cluster: Slurm, tmp_path: Path) -> None:
    for script, groups in (
        ("one_group_per_node", "2 worker groups of 2"),
        ("one_group_of_several_nodes", "2 worker groups of 2"),
        ("several_groups_per_node", "4 worker groups of 1"),
    ):
        folder = fresh(tmp_path / script)
        job = submitted(cluster, folder, f"{script}.sbatch")
        assert f"{groups}, from step 0" in said(f"trained {STEPS} steps", folder / f"sdiloco-{job}.log")


def test_the_doctor_runs_where_the_training_would(cluster: Slurm) -> None:
    doctor = [sys.executable, "-m", "lightning_sdiloco.tools.cli", "doctor", "--seconds=0.2"]
    table = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *doctor)
    assert "2 on 2 hosts (n0, n1), in 2 worker groups of 1" in table
    assert "bandwidth 1 -> 0" in table


def test_a_requeued_job_ends_with_the_bits_of_one_that_was_never_stopped(cluster: Slurm, tmp_path: Path) -> None:
    command = f"srun python watched.py --num-nodes 2 --devices 1 --steps {STEPS} && echo all ranks ended"
    choices = ["--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append", "--output=job.log"]
    through, stopped = fresh(tmp_path / "through"), fresh(tmp_path / "stopped")
    job = submitted(cluster, stopped, *choices, f"--wrap={command}")
    said("signal now", stopped / "job.log")
    cluster.run("scancel", "--signal=USR1", job)
    submitted(cluster, through, *choices, f"--wrap={command}")
    text, uninterrupted = (said("all ranks ended", folder / "job.log") for folder in (stopped, through))
    assert text.count("from step") == 2, text
    assert 60 < int(text.rpartition("from step ")[2].split()[0]) < STEPS, text
    assert uninterrupted.count("from step 0") == uninterrupted.count("from step") == 1
    first, *models = [torch.load(folder / f"trained-{rank}.pt") for folder in (through, stopped) for rank in range(2)]
    for model in models:
        assert all(torch.equal(values, model[name]) for name, values in first.items())


class Job:
    """A job, with the names that `multiprocessing` has."""

    pid = exitcode = None

    def __init__(self, cluster: Slurm, folder: Path, script: Path) -> None:
        choices = ["--nodes=1", "--ntasks-per-node=1", "--requeue", "--signal=USR1@120", "--output=/dev/null"]
        self.cluster = cluster
        self.number = submitted(cluster, folder, *choices, f"--wrap=srun python -m tests.chaos.processes {script}")

    def kill(self) -> None:
        self.cluster.run("scancel", "--signal=KILL", "--full", self.number)

    def join(self, timeout: float | None = None) -> None:
        pass


class Jobs(World):
    """A hub and a site as processes, and site a as a job."""

    cluster: Slurm

    def started(self, name: str) -> Process:
        if name != "a":
            return super().started(name)
        (self.folder / "a.pickle").write_bytes(pickle.dumps(self.told(name)))
        return Job(self.cluster, self.folder, self.folder / "a.pickle")


@pytest.mark.parametrize("resume", ["last", "signal"])
def test_a_job_that_is_a_site_returns_from_its_checkpoint_and_the_other_site_does_not_wait(
    resume: str, cluster: Slurm, tmp_path: Path
) -> None:
    require_extra()
    with Jobs(tmp_path, "ab", 0.05, lease=10.0) as world:
        world.cluster = cluster
        play = Play(world)
        play.begin()
        job, there = world.processes["a"], play.seen["b"].round
        assert isinstance(job, Job)
        # As SLURM does after a failed node or a preemption; or before the time is up.
        cluster.run(*(["scontrol", "requeue"] if resume == "last" else ["scancel", "--signal=USR1"]), job.number)
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
    assert [note["site"] for note in told.hub if note["what"] == "hello"].count("a") == 2
    assert len({life for note in told.records() for site, life, _ in note["counted"] if site == "a"}) == 2
    # It went on from what it had saved.
    (_, again), steps = training(), told.steps("a")
    before = max(note["step"] for note in steps if note["at"] < again["at"])
    assert again["step"] == (before // 25 * 25 if resume == "last" else before)
