"""Under a real SLURM: worker groups by node and by number, the doctor, requeued jobs, and one that is a site."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from lightning_sdiloco.federation import Record
from lightning_sdiloco.hub import SQLiteLedger, add_keys, init_keys
from lightning_sdiloco.tools.cli import main
from tests.chaos.cast import free_ports
from tests.chaos.notes import read
from tests.hub.hubs import require_extra
from tests.hub.scripted import RUN
from tests.hub.test_commands import HubProcess
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

# ``resume`` is "last", or "signal" for a job that resumes by itself from what it saved on a signal.
SITE = """
import hashlib
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.chaos.net import samples
from tests.chaos.notes import Notebook
from tests.chaos.site import Net, Notes
from lightning_sdiloco import Federation, StreamingDiLoCoStrategy

if __name__ == "__main__":
    hub, run, site, resume = sys.argv[1:]
    torch.set_num_threads(1)
    pl.seed_everything(0)
    notebook = Notebook(f"{site}.jsonl")
    federation = Federation(hub=hub, run=run, site=site, keys="keys")
    strategy = StreamingDiLoCoStrategy(sync_every=20, overlap_steps=2, layers_per_fragment=2, federation=federation)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=site,
        callbacks=[Notes(notebook), ModelCheckpoint(site, save_last=True, every_n_train_steps=25, save_top_k=0)],
    )
    loader = DataLoader(TensorDataset(*samples(site)), batch_size=8)
    trainer.fit(Net(0.05), loader, ckpt_path="last" if resume == "last" else None)
    outer = hashlib.sha256()
    for values in strategy.outer_state_dict().values():
        outer.update(values.numpy().tobytes())
    notebook.write("ended", outer=outer.hexdigest())
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


@pytest.mark.parametrize("resume", ["last", "signal"])
def test_a_job_that_is_a_site_returns_from_its_checkpoint_and_the_other_site_does_not_wait(
    resume: str, cluster: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_extra()
    init_keys(tmp_path / "keys", RUN)
    add_keys(tmp_path / "keys", "a")
    add_keys(tmp_path / "keys", "b")
    add_keys(tmp_path / "keys", "boss", "operator")
    (tmp_path / "site.py").write_text(SITE)
    hub = HubProcess(tmp_path, tmp_path / "keys")
    hub.start("--sites", "2")
    address = f"127.0.0.1:{hub.port}"
    choices = ["--nodes=1", "--ntasks-per-node=1", "--requeue", "--open-mode=append", "--signal=USR1@120"]
    command = f"--wrap=srun python site.py {address} {RUN} a {resume}"
    job = submitted(cluster, tmp_path, *choices, "--output=job.log", command)
    logs = [tmp_path / "job.log", tmp_path / "b.log"]
    with logs[1].open("w") as log:
        environment = {**cluster.environment, "MASTER_PORT": str(free_ports(1)[0])}
        words = [sys.executable, "site.py", address, RUN, "b", "last"]
        process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=log, stderr=log)

    def notes(site: str, what: str = "step") -> list[dict[str, Any]]:
        return [note for note in read(tmp_path / f"{site}.jsonl") if note["what"] == what]

    def round(site: str) -> int:
        """The last round that has landed in every fragment."""
        return min(steps[-1]["rounds"]) if (steps := notes(site)) else 0

    try:
        until(lambda: min(round("a"), round("b")) >= 2, *logs)
        requeued, there = time.monotonic(), round("b")
        # As SLURM does after a failed node or a preemption; or before the time is up.
        cluster.run(*(["scontrol", "requeue"] if resume == "last" else ["scancel", "--signal=USR1"]), job)
        until(lambda: len(notes("a", "training")) == 2, *logs)
        joined = round("b")
        assert joined >= there + 2
        until(lambda: round("a") >= joined + 3, *logs)
        operator = ["--hub", address, "--keys", str(tmp_path / "keys" / "boss.bundle")]
        main(["status", "--json", *operator])
        status = json.loads(capsys.readouterr().out)
        main(["hub", "end", *operator])
        until(lambda: all(notes(site, "ended") for site in "ab"), *logs)
    finally:
        cluster.run("scancel", "--signal=KILL", "--full", job)
        process.kill()
        process.wait()
        hub.end(signal.SIGKILL)
    assert {site: own["lives"] for site, own in status["sites"].items()} == {"a": 2, "b": 1}
    ledger = SQLiteLedger(tmp_path / "hub.sqlite")
    records = [Record.from_bytes(text) for _, text in ledger.read()]
    ledger.close()
    assert len({own.life for record in records if (own := record.of("a"))}) == 2
    # It went on from what it had saved.
    (_, again), steps = notes("a", "training"), notes("a")
    before = max(note["step"] for note in steps if note["at"] < again["at"])
    assert again["step"] == (before // 25 * 25 if resume == "last" else before)
    (first,), (second,) = notes("a", "ended"), notes("b", "ended")
    assert first["outer"] == second["outer"]
    # Without the time for which the machine did not let it run.
    own = notes("b")
    stalls = [note["stalled"] - note["delayed"] - note["stolen"] for note in own if note["at"] > requeued]
    assert max(stalls) < 0.1 + median(note["took"] for note in own)
