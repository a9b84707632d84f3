"""Under a real SLURM: worker groups by node and by number, and a job that is requeued."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.slurm import Slurm, slurm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
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
    shutil.copy(EXAMPLES / "launching" / "train.py", folder)
    for script in (EXAMPLES / "slurm").glob("*.sbatch"):
        shutil.copy(script, folder)
    (folder / "watched.py").write_text(SCRIPT)
    return folder


def submitted(cluster: Slurm, folder: Path, *arguments: str) -> str:
    """The number of a job."""
    return cluster.run("sbatch", "--parsable", *arguments, cwd=folder).strip()


def wait_for(condition: str, log: Path, seconds: float = 250) -> str:
    """Waits until a log says something."""
    deadline = time.monotonic() + seconds
    while True:
        text = log.read_text() if log.exists() else ""
        if condition in text:
            return text
        assert time.monotonic() < deadline, f"{condition!r} did not come:\n{text}"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("one_group_per_node", "2 worker groups of 2, from step 0"),
        ("one_group_of_several_nodes", "2 worker groups of 2, from step 0"),
        ("several_groups_per_node", "4 worker groups of 1, from step 0"),
    ],
)
def test_a_job_script_of_the_examples_trains_the_groups_that_it_says(
    script: str, said: str, cluster: Slurm, tmp_path: Path
) -> None:
    folder = fresh(tmp_path / "job")
    job = submitted(cluster, folder, f"{script}.sbatch")
    assert said in wait_for(f"trained {STEPS} steps", folder / f"sdiloco-{job}.log")


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
    wait_for("signal now", stopped / "job.log")
    cluster.run("scancel", "--signal=USR1", job)
    submitted(cluster, through, *choices, f"--wrap={command}")
    text, uninterrupted = (wait_for("all ranks ended", folder / "job.log") for folder in (stopped, through))

    assert text.count("from step") == 2, text
    assert 60 < int(text.rpartition("from step ")[2].split()[0]) < STEPS, text
    assert uninterrupted.count("from step 0") == uninterrupted.count("from step") == 1
    models = [torch.load(folder / f"trained-{rank}.pt") for folder in (through, stopped) for rank in range(2)]
    for model in models[1:]:
        assert all(torch.equal(values, model[name]) for name, values in models[0].items())
