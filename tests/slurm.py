"""A real SLURM on this machine: one controller and several nodes, each with a host name of its own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "unshare")
SECONDS = 60.0

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its credentials have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SlurmctldTimeout=60
SlurmdTimeout=60
KillWait=10
JobRequeue=1
# Lightning makes the port at which ranks meet from the number of the job: each SLURM of this machine has its own.
FirstJobId={first_job}
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class Slurm:
    """A running SLURM, whose files are in a folder."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            # Lightning in this process may have left there where ranks met.
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def run(self, *command: str, seconds: float = 250, cwd: Path | None = None, **environment: str) -> str:
        """What a command of SLURM prints; both streams, because srun passes on those of the tasks."""
        output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        own = {**self.environment, **environment}
        done = subprocess.run(command, env=own, cwd=cwd, timeout=seconds, check=False, **output)
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout


@contextmanager
def slurm(folder: Path, nodes: int, cores: int) -> Iterator[Slurm]:
    """Starts a SLURM whose nodes are called n0, n1, ...; skips the test where that is not possible.

    The path of the folder has to be short, as that of a socket is limited; processors of a node need not be real.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons need root here")
    running = Slurm(folder)
    try:
        _configure(folder, nodes, cores)
        try:
            _start(running, folder, nodes)
        except (subprocess.SubprocessError, TimeoutError) as error:
            pytest.skip(f"SLURM does not start here: {error} {getattr(error, 'stderr', '') or ''}")
        yield running
    finally:
        _stop(running, folder)


def _configure(folder: Path, nodes: int, cores: int) -> None:
    names = [f"n{index}" for index in range(nodes)]
    (folder / "state").mkdir()
    for name in names:
        (folder / f"spool-{name}").mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    described = [
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={_free_port()} CPUs={cores} Boards=1"
        f" SocketsPerBoard=1 CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=1024 State=UNKNOWN"
        for name in names
    ]
    host, first_job = socket.gethostname().partition(".")[0], 1 + os.getpid() % 900 * 10
    told = {"host": host, "port": _free_port(), "folder": folder, "first_job": first_job, "nodes": "\n".join(described)}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**told))
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {name}\n" for name in names))


def _start(running: Slurm, folder: Path, nodes: int) -> None:
    def start(*command: str) -> None:
        # Daemons leave this process; a pipe that they inherited would never end.
        with (folder / "start.log").open("a") as log:
            subprocess.run(command, env=running.environment, stdout=log, stderr=log, timeout=SECONDS, check=True)

    munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
    munge |= {"log-file": "munged.log", "seed-file": "munged.seed"}
    start("munged", *(f"--{name}={folder}/{file}" for name, file in munge.items()), "--force")
    start("slurmctld", "-c", "-f", f"{folder}/slurm.conf")
    for index in range(nodes):
        # A host name of its own, and an /etc/hosts in which the others are found.
        own = f"mount --bind {folder}/hosts /etc/hosts && hostname n{index} && exec slurmd -N n{index}"
        start("unshare", "-m", "-u", "sh", "-c", f"{own} -f {folder}/slurm.conf")
    deadline, idle = time.monotonic() + SECONDS, 0
    while idle < nodes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{idle} of {nodes} nodes are idle")
        time.sleep(0.2)
        told = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"], env=running.environment, capture_output=True, check=False
        )
        idle = told.stdout.split().count(b"idle")


def _stop(running: Slurm, folder: Path) -> None:
    """Ends all jobs, and then the daemons, with nothing left for them to do."""
    for command in (["scancel", "--signal=KILL", "--full", "--state=RUNNING"], ["scancel", "--user=root"]):
        subprocess.run(command, env=running.environment, capture_output=True, timeout=SECONDS, check=False)
    for path in [*folder.glob("slurmd-*.pid"), folder / "slurmctld.pid", folder / "munged.pid"]:
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
