"""Several machines: torchrun with restarts and Lightning's launcher in network namespaces, and a
real SLURM.
"""

import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.keys import add_keys
from tests.chaos.checks import Told, examined
from tests.chaos.faults import Fault
from tests.chaos.notes import Note
from tests.chaos.play import Play
from tests.chaos.processes import BATCH
from tests.chaos.world import World
from tests.federation.hubs import require_extra, until
from tests.fits import assert_same
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
        may_kill = os.environ.get("NODE_RANK", "0") != "0" or trainer.strategy.engine.site is None
        if os.environ.get("KILL") and may_kill and last and trainer.global_step == 113 and not Path("killed").exists():
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
    examples = ROOT / "examples"
    shutil.copy(examples / "launching" / "train.py", folder)
    for script in (examples / "slurm").glob("*.sbatch"):
        shutil.copy(script, folder)
    (folder / "watched.py").write_text(SCRIPT)
    return folder


def assert_alike(count: int, *folders: Path) -> None:
    """Asserts that this number of ranks ended with the same bits."""
    models: list[dict[str, torch.Tensor]] = []
    for folder in folders:
        models += [torch.load(path) for path in folder.glob("trained-*.pt")]
    assert len(models) == count
    for model in models:
        assert_same({name: model[name] for name in models[0]}, models[0])


# Without a scheduler


@contextmanager
def machines(count: int) -> Iterator[list[str]]:
    """The network namespaces of two machines, or an empty name for this one."""
    if count == 1:
        yield [""]
    else:
        with two_sites() as sites:
            yield sites


def enter_if_named(site: str) -> None:
    if site:
        enter(site)


def launched(
    folder: Path, python_arguments: list[list[str]], script: list[str], **environment: str
) -> str:
    """Runs the script on each machine with its arguments of Python; returns the output of all when
    all end well.
    """
    fresh(folder)
    nodes = len(python_arguments)
    log = folder / "all.log"
    # Otherwise processes that are restarted read from torchrun's store where those before them
    # listened.
    variables = {**unlaunched(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment}
    if nodes > 1:
        variables["GLOO_SOCKET_IFNAME"] = "wire"
    watched = ["watched.py", f"--num-nodes={nodes}", "--devices=2", *script]
    processes: list[subprocess.Popen[bytes]] = []
    with machines(nodes) as sites, log.open("a") as output:
        for node, site in enumerate(sites):
            process = subprocess.Popen(
                [sys.executable, *python_arguments[node], *watched],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**variables, "NODE_RANK": str(node)},
                preexec_fn=partial(enter_if_named, site),
            )
            processes.append(process)
        try:
            codes = [process.wait(250) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert codes == [0] * nodes, log.read_text()
    return log.read_text()


def torchrun(nodes: int, *rendezvous: str) -> list[str]:
    options = [f"--nnodes={nodes}", "--nproc-per-node=2", "--max-restarts=3"]
    return ["-m", "torch.distributed.run", *options, *rendezvous]


def torchrun_on_two_machines(address: str, is_host: int) -> list[str]:
    # The host names of these machines do not tell their addresses.
    return torchrun(
        2,
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.79.0.1:29400",
        f"--local-addr={address}",
        f"--rdzv-conf=is_host={is_host}",
    )


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.network)])
def test_a_run_restarted_by_torchrun_is_bit_identical_to_one_without_a_killed_rank(
    nodes: int, tmp_path: Path
) -> None:
    arguments = [torchrun(1, "--standalone")]
    if nodes == 2:
        arguments = [
            torchrun_on_two_machines("10.79.0.1", is_host=1),
            torchrun_on_two_machines("10.79.0.2", is_host=0),
        ]
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


# The machines of these tests have one host name, but sites are named by it.
NAMED = "import socket; socket.gethostname = lambda: 'n' + os.environ['NODE_RANK']\n"


def as_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    script = SCRIPT.replace("import train\n", f"import train\n{NAMED}")
    monkeypatch.setitem(globals(), "SCRIPT", script)


@pytest.mark.network
def test_a_torchrun_for_each_machine_restarts_its_site_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_extra()
    as_sites(monkeypatch)
    folder = tmp_path / "run"
    place = ["--run=llm", "--hub=10.79.0.1:29400", "--sites=2"]
    script = [*place, "--steps=1500", "--resume=last"]
    text = launched(folder, [torchrun(1, "--standalone", "--")] * 2, script, KILL="1", PACE="0.04")
    assert text.count("1 worker groups of 2, from step 0") == 2
    assert text.count("from step 100") == 1
    first, second = re.findall(r"outer norm (\S+)", text)
    assert first == second
    assert "its sites have left" in (folder / "checkpoints" / "hub-llm" / "hub.log").read_text()


@pytest.mark.network
def test_a_script_on_each_machine_makes_sites_of_them_by_the_name_of_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_extra()
    as_sites(monkeypatch)
    meeting = {"MASTER_ADDR": "10.79.0.1", "MASTER_PORT": "29500"}
    text = launched(tmp_path / "run", [[], []], ["--run=llm", "--steps=100"], **meeting)
    assert text.count("1 worker groups of 2, from step 0") == 2
    first, second = re.findall(r"outer norm (\S+)", text)
    assert first == second
    checkpoints = (tmp_path / "run" / "checkpoints").glob("n*/last.ckpt")
    assert sorted(path.parent.name for path in checkpoints) == ["n0", "n1"]


# Under SLURM


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    # Not below pytest's folder, whose path is too long for a socket.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        slurm(Path(folder), nodes=4, cores=4) as running,
    ):
        variables = running.environment
        variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
        variables["PYTHONPATH"] = str(ROOT)
        variables["PYTHONWARNINGS"] = "ignore"
        variables["PACE"] = "0.03"
        yield running


def submitted(cluster: Slurm, folder: Path, *arguments: str) -> str:
    """The number of a job."""
    return cluster.run("sbatch", "--parsable", *arguments, cwd=folder).strip()


def awaited(words: str, log: Path) -> str:
    """Waits until a log contains some words; returns the log."""
    deadline = time.monotonic() + 250.0
    text = ""
    while words not in text:
        assert time.monotonic() < deadline, text[-3000:]
        time.sleep(0.1)
        if log.exists():
            text = log.read_text()
    return text


ON_ONE_NODE = ["--nodes=1", "--ntasks-per-node=1", "--requeue"]
ON_TWO_NODES = ["--nodes=2", "--ntasks-per-node=1", "--requeue"]


@pytest.mark.slurm
def test_example_job_scripts_train_the_groups_they_promise_and_the_doctor_runs_there(
    cluster: Slurm, tmp_path: Path
) -> None:
    groups_of_scripts = {
        "one_group_per_node": "2 worker groups of 2",
        "one_group_of_several_nodes": "2 worker groups of 2",
        "several_groups_per_node": "4 worker groups of 1",
    }
    for script, groups in groups_of_scripts.items():
        folder = fresh(tmp_path / script)
        job = submitted(cluster, folder, f"{script}.sbatch")
        log = awaited("trained 400 steps", folder / f"sdiloco-{job}.log")
        assert f"{groups}, from step 0" in log
    doctor = [sys.executable, "-m", "lightning_sdiloco.tools.cli", "doctor", "--seconds=0.2"]
    # Each node writes a file. srun kills a step if the connection that carries its output is reset
    # while the step ends, which happens.
    streams = ["--output=doctor-%t.log", "--error=doctor-%t.log"]
    cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *streams, *doctor, cwd=tmp_path)
    table = (tmp_path / "doctor-0.log").read_text()
    assert "2 on 2 hosts (n0, n1), in 2 worker groups of 1" in table
    assert "bandwidth 1 -> 0" in table


@pytest.mark.slurm
def test_a_requeued_job_ends_with_the_bits_of_one_that_was_never_stopped(
    cluster: Slurm, tmp_path: Path
) -> None:
    command = "srun python watched.py --num-nodes 2 --devices 1 --steps 400 && echo all ranks ended"
    options = [*ON_TWO_NODES, "--open-mode=append", "--output=job.log", f"--wrap={command}"]
    through = fresh(tmp_path / "through")
    stopped = fresh(tmp_path / "stopped")
    job = submitted(cluster, stopped, *options)
    awaited("signal now", stopped / "job.log")
    cluster.run("scancel", "--signal=USR1", job)
    submitted(cluster, through, *options)
    log = awaited("all ranks ended", stopped / "job.log")
    assert log.count("from step") == 2, log
    last_start = int(log.rpartition("from step ")[2].split()[0])
    assert 60 < last_start < 400, log
    uninterrupted_log = awaited("all ranks ended", through / "job.log")
    assert uninterrupted_log.count("from step 0") == uninterrupted_log.count("from step") == 1
    assert_alike(4, through, stopped)


class Jobs(World):
    """A hub and a site as processes, and site a as a job."""

    cluster: Slurm
    job: str

    def started(self, name: str) -> Any:
        if name != "a":
            return super().started(name)
        script = self.folder / "a.pickle"
        script.write_bytes(pickle.dumps(self.told(name)))
        options = [*ON_ONE_NODE, "--signal=USR1@120", "--output=/dev/null"]
        command = f"--wrap=srun python -m tests.chaos.processes {script}"
        self.job = submitted(self.cluster, self.folder, *options, command)
        kill = partial(self.cluster.run, "scancel", "--signal=KILL", "--full", self.job)
        return SimpleNamespace(pid=None, exitcode=None, kill=kill, join=lambda timeout=None: None)


def starts_of(world: World, site: str) -> list[Note]:
    return [note for note in world.notes(site) if note["what"] == "training"]


def hellos_of(notes: Told, site: str) -> set[Any]:
    """The incarnations of a site that have said hello to the hub."""
    hellos = [note for note in notes.hub if note["what"] == "hello"]
    return {note["incarnation"] for note in hellos if note["site"] == site}


def counted_of(notes: Told, site: str) -> set[Any]:
    """The incarnations of a site whose records the hub has counted."""
    incarnations = set()
    for record in notes.records():
        for counted_site, incarnation, _ in record["counted"]:
            if counted_site == site:
                incarnations.add(incarnation)
    return incarnations


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
        left_round = play.seen["b"].round
        if resume == "last":
            # As SLURM does after a failed node or a preemption.
            cluster.run("scontrol", "requeue", world.job)
        else:
            # As SLURM does before the time is up.
            cluster.run("scancel", "--signal=USR1", world.job)
        # The site may take as long as one that is killed.
        play.going_on.append((math.inf, Fault("kill", "a", 0.0)))
        world.faults.write("begin", kind="kill", victim="a")
        play.until("the job to begin again", lambda: len(starts_of(world, "a")) == 2, 240.0)
        play.going_on.clear()
        world.faults.write("end", kind="kill", victim="a")
        joined_round = play.seen["b"].round
        assert joined_round >= left_round + 2
        play.until("it to count again", lambda: play.seen["a"].round >= joined_round + 3, 60.0)
        play.finish()
    notes = Told.of(tmp_path, "ab")
    assert examined(notes, BATCH)["problems"] == []
    # If more rounds closed meanwhile than are kept, the site says hello once more with the state
    # that it fetched.
    assert len(hellos_of(notes, "a")) == 2
    assert len(counted_of(notes, "a")) == 2
    # It continues from its checkpoint.
    _, restart = starts_of(world, "a")
    steps = notes.steps("a")
    last_step = max(note["step"] for note in steps if note["at"] < restart["at"])
    if resume == "last":
        assert restart["step"] == last_step // 25 * 25
    else:
        assert restart["step"] == last_step


# Every node a site of a federation whose hub starts itself

OF_NODES = """
import os
from pathlib import Path

import lightning as L

import train


class Pids(L.Callback):
    def on_train_start(self, trainer, module):
        Path(f"{os.environ['SLURMD_NODENAME']}-{os.environ['SLURM_LOCALID']}.pid").write_text(str(os.getpid()))


if __name__ == "__main__":
    train.main([Watch(), Pids()])
"""


class Nodes:
    """Two nodes in a job of SLURM, each a site of two tasks."""

    names = ("n0", "n1")

    def __init__(self, cluster: Slurm, folder: Path) -> None:
        self.cluster = cluster
        self.folder = fresh(folder)
        watched, _, _ = SCRIPT.partition("if __name__")
        (folder / "of_nodes.py").write_text(watched + OF_NODES)
        self.hub = folder / "checkpoints" / "hub-llm"

    def tasks(self, node: str) -> list[int]:
        return [int(path.read_text()) for path in self.folder.glob(f"{node}-*.pid")]

    def kill(self, node: str) -> None:
        """Kills all processes of a node."""
        pids = self.tasks(node)
        assert len(pids) == 2
        if node == "n0":
            pids += [int(pid) for pid in re.findall(r"process (\d+): the", self.log())][-1:]
        for path in self.folder.glob(f"{node}-*.pid"):
            path.unlink()
        for pid in pids:
            # SLURM may have ended the hub with the tasks of its node.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def log(self) -> str:
        return (self.hub / "hub.log").read_text()

    def joined(self, node: str) -> int:
        path = self.hub / "hub.log"
        return self.log().count(f"{node} has joined") if path.exists() else 0

    def await_joined(self, *times: int) -> None:
        """Waits until each node has joined so often, and all its tasks train."""
        deadline = time.monotonic() + 250.0
        while tuple(map(self.joined, self.names)) != times or not all(
            len(self.tasks(node)) == 2 for node in self.names
        ):
            assert time.monotonic() < deadline, f"{self.logs()}\n{self.log()}"
            time.sleep(0.1)

    def call(self, name: str, job: str, role: Any) -> Any:
        keys = add_keys(self.hub / "keys", role, role)
        address = f"127.0.0.1:{15_000 + int(job[-4:])}"
        client = HubClient(address, "llm", role, keys, role=role)
        try:
            return client.call(name)[1]
        finally:
            client.close()

    def round(self, job: str) -> int:
        status = json.loads(self.call("status", job, "reader"))
        return min(fragment["round"] for fragment in status["fragments"])

    def logs(self) -> str:
        return "".join(path.read_text()[-4000:] for path in self.folder.glob("*.log"))


@pytest.mark.slurm
def test_nodes_of_a_job_found_a_run_and_a_killed_one_comes_back_the_hubs_too(
    cluster: Slurm, tmp_path: Path
) -> None:
    require_extra()
    nodes = Nodes(cluster, tmp_path / "nodes")
    script = nodes.folder / "federation_of_nodes.sbatch"
    text = script.read_text().replace("train.py", "of_nodes.py --steps 100000")
    script.write_text(text.replace("sleep 10", "sleep 1"))
    job = submitted(cluster, nodes.folder, script.name)
    nodes.await_joined(1, 1)
    nodes.kill("n1")
    left_round = nodes.round(job)
    nodes.await_joined(1, 2)
    assert nodes.round(job) > left_round
    nodes.kill("n0")
    # The hub that was started again lets in both.
    nodes.await_joined(2, 3)
    nodes.call("end", job, "operator")
    log = nodes.folder / f"sdiloco-{job}.log"
    until(lambda: log.read_text().count("outer norm") == 2, 250.0)
    norms = re.findall(r"outer norm (\S+)", log.read_text())
    assert norms[0] == norms[1]


@pytest.mark.slurm
def test_a_step_over_all_nodes_outlives_the_tasks_of_one(cluster: Slurm, tmp_path: Path) -> None:
    require_extra()
    nodes = Nodes(cluster, tmp_path / "nodes")
    command = "srun --no-kill --kill-on-bad-exit=0 python of_nodes.py --run llm --num-nodes 2 --steps 100000"
    options = ["--nodes=2", "--ntasks-per-node=2", "--no-kill", "--output=job.log"]
    job = submitted(cluster, nodes.folder, *options, f"--wrap={command}")
    nodes.await_joined(1, 1)
    nodes.kill("n1")
    left_round = nodes.round(job)
    until(lambda: nodes.round(job) > left_round + 3, 250.0)
    nodes.call("end", job, "operator")
    log = awaited("outer norm", nodes.folder / "job.log")
    assert log.count("outer norm") == 1
