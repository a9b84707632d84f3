"""A job of a real SLURM as a site of a federation: it is requeued, comes back from its checkpoint, and nobody waits."""

import json
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

from lightning_sdiloco.federation import Record
from lightning_sdiloco.hub import SQLiteLedger, add_keys, init_keys
from lightning_sdiloco.tools.cli import main
from tests.chaos.cast import free_ports
from tests.chaos.notes import read
from tests.hub.hubs import require_extra
from tests.hub.scripted import RUN
from tests.hub.test_commands import HubProcess
from tests.launch.test_slurm import ROOT
from tests.slurm import Slurm, slurm

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]

# ``resume`` is "last", or "signal" for a job that resumes by itself from what it saved on a signal.
SCRIPT = """
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

JOB = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --output=job.log
srun python site.py {}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    # Not below pytest's folder, whose path is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(Path(folder), nodes=1, cores=2) as running:
        path = f"{Path(sys.executable).parent}:{running.environment['PATH']}"
        running.environment.update(PATH=path, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore")
        yield running


class Sites:
    """A hub and a site as processes, and another site as a job."""

    def __init__(self, folder: Path, cluster: Slurm, resume: str) -> None:
        self.folder, self.cluster = folder, cluster
        init_keys(folder / "keys", RUN)
        for name, role in (("a", "site"), ("b", "site"), ("boss", "operator")):
            add_keys(folder / "keys", name, role)  # type: ignore[arg-type]
        (folder / "site.py").write_text(SCRIPT)
        self.hub = HubProcess(folder, folder / "keys")
        self.hub.start("--sites", "2")
        self.address = f"127.0.0.1:{self.hub.port}"
        (folder / "job.sbatch").write_text(JOB.format(f"{self.address} {RUN} a {resume}"))
        self.job = cluster.run("sbatch", "--parsable", "job.sbatch", cwd=folder).strip()
        command = [sys.executable, "site.py", self.address, RUN, "b", "last"]
        environment = {**cluster.environment, "MASTER_PORT": str(free_ports(1)[0])}
        with (folder / "b.log").open("w") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    def notes(self, site: str, what: str = "step") -> list[dict[str, Any]]:
        return [note for note in read(self.folder / f"{site}.jsonl") if note["what"] == what]

    def round(self, site: str) -> int:
        """The last round that has landed in every fragment."""
        return min(steps[-1]["rounds"]) if (steps := self.notes(site)) else 0

    def until(self, what: str, holds: Callable[[], bool], seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            logs = [path.read_text()[-3000:] for name in ("job", "b") if (path := self.folder / f"{name}.log").exists()]
            assert not self.process.poll(), logs
            assert time.monotonic() < deadline, f"{what} did not happen: {logs}"
            time.sleep(0.1)

    def close(self) -> None:
        self.cluster.run("scancel", "--signal=KILL", "--full", self.job)
        self.process.kill()
        self.process.wait()
        self.hub.end(signal.SIGKILL)


@pytest.mark.parametrize("resume", ["last", "signal"])
def test_a_job_that_is_requeued_returns_from_its_checkpoint_and_the_other_site_does_not_wait(
    resume: str, cluster: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_extra()
    sites = Sites(tmp_path, cluster, resume)
    try:
        sites.until("both have landed two rounds", lambda: min(sites.round("a"), sites.round("b")) >= 2)
        requeued = time.monotonic()
        # As SLURM does after a failed node or a preemption; or before the time is up.
        requeue = ["scontrol", "requeue"] if resume == "last" else ["scancel", "--signal=USR1"]
        cluster.run(*requeue, sites.job)
        there = sites.round("b")
        sites.until("the job has begun again", lambda: len(sites.notes("a", "training")) == 2)
        assert sites.round("b") >= there + 2
        joined = sites.round("b")
        sites.until("it counts again", lambda: sites.round("a") >= joined + 3)
        address = ["--hub", sites.address, "--keys", str(tmp_path / "keys" / "boss.bundle")]
        main(["status", "--json", *address])
        status = json.loads(capsys.readouterr().out)
        main(["hub", "end", *address])
        sites.until("both have ended", lambda: all(sites.notes(site, "ended") for site in "ab"))
    finally:
        sites.close()
    assert {site: own["lives"] for site, own in status["sites"].items()} == {"a": 2, "b": 1}
    ledger = SQLiteLedger(tmp_path / "hub.sqlite")
    records = [Record.from_bytes(text) for _, text in ledger.read()]
    ledger.close()
    assert len({own.life for record in records if (own := record.of("a"))}) == 2
    # It went on from what it had saved.
    (_, again), steps = sites.notes("a", "training"), sites.notes("a")
    before = max(note["step"] for note in steps if note["at"] < again["at"])
    assert again["step"] == (before // 25 * 25 if resume == "last" else before)
    (first,), (second,) = sites.notes("a", "ended"), sites.notes("b", "ended")
    assert first["outer"] == second["outer"]
    own = sites.notes("b")
    # Without the time for which the machine did not let it run.
    stalls = [note["stalled"] - note["delayed"] - note["stolen"] for note in own if note["at"] > requeued]
    assert max(stalls) < 0.1 + median(note["took"] for note in own)
