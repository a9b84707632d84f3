"""A real SLURM on this machine: one controller and several nodes, each with a host name of its
own.
"""

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

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "srun",
    "sbatch",
    "scancel",
    "scontrol",
    "sinfo",
    "unshare",
)
SECONDS = 60.0

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
# A requeued job waits until its credentials have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
SlurmctldTimeout=60
SlurmdTimeout=60
KillWait=10
# Lightning makes the port at which ranks meet from the number of the job: each SLURM of this machine has its own.
FirstJobId={first_job}
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class Slurm:
    """A SLURM whose files are in a folder."""

    def __init__(self, folder: Path, nodes: int, cores: int) -> None:
        self.folder = folder
        self.nodes = [f"n{index}" for index in range(nodes)]
        self.environment = {
            # Lightning in this process may have left there where ranks met.
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SLURM_", "MASTER_"))
            },
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir()
        folder.chmod(0o755)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        described = [
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={_free_port()}"
            f" CPUs={cores} Boards=1 SocketsPerBoard=1 CoresPerSocket={cores} ThreadsPerCore=1"
            " RealMemory=1024 State=UNKNOWN"
            for name in self.nodes
        ]
        places = {
            "host": socket.gethostname().partition(".")[0],
            "port": _free_port(),
            "folder": folder,
        }
        numbers = {"first_job": 1 + os.getpid() % 900 * 10, "nodes": "\n".join(described)}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**places, **numbers))
        hosts = "".join(f"127.0.0.1 {name}\n" for name in self.nodes)
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)

    def run(
        self, *command: str, seconds: float = 250, cwd: Path | None = None, **environment: str
    ) -> str:
        """What a command of SLURM prints; both streams, because srun passes on those of the
        tasks.
        """
        output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        own = {**self.environment, **environment}
        done = subprocess.run(command, env=own, cwd=cwd, timeout=seconds, check=False, **output)
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def start(self) -> None:
        def start(*command: str) -> None:
            # Daemons leave this process; a pipe that they inherited would never end.
            with (self.folder / "start.log").open("a") as log:
                subprocess.run(
                    command,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                    timeout=SECONDS,
                    check=True,
                )

        munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        munge |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        start(
            "munged", *(f"--{name}={self.folder}/{file}" for name, file in munge.items()), "--force"
        )
        start("slurmctld", "-c", "-f", f"{self.folder}/slurm.conf")
        for name in self.nodes:
            # A host name of its own, and an /etc/hosts in which the others are found.
            own = f"mount --bind {self.folder}/hosts /etc/hosts && hostname {name} && exec slurmd -N {name}"
            start("unshare", "-m", "-u", "sh", "-c", f"{own} -f {self.folder}/slurm.conf")
        deadline = time.monotonic() + SECONDS
        told = ["sinfo", "-h", "-N", "-o", "%T"]
        idle = 0
        while idle < len(self.nodes):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{idle} of {len(self.nodes)} nodes are idle")
            time.sleep(0.2)
            idle = (
                subprocess.run(told, env=self.environment, stdout=subprocess.PIPE)
                .stdout.split()
                .count(b"idle")
            )

    def stop(self) -> None:
        """Ends all jobs, and then the daemons, with nothing left for them to do."""
        for command in (
            ["scancel", "--signal=KILL", "--full", "--state=RUNNING"],
            ["scancel", "--user=root"],
        ):
            subprocess.run(
                command, env=self.environment, capture_output=True, timeout=SECONDS, check=False
            )
        for path in [
            *self.folder.glob("slurmd-*.pid"),
            self.folder / "slurmctld.pid",
            self.folder / "munged.pid",
        ]:
            with suppress(FileNotFoundError, ValueError, ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


@contextmanager
def slurm(folder: Path, nodes: int, cores: int) -> Iterator[Slurm]:
    """Starts a SLURM whose nodes are called n0, n1, ...; skips the test where that is not possible.

    The path of the folder has to be short, as that of a socket is limited; processors of a node
    need not be real.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"SLURM needs root, slurm-wlm and munge; not found: {', '.join(missing) or 'root'}"
        )
    running = Slurm(folder, nodes, cores)
    try:
        try:
            running.start()
        except (subprocess.SubprocessError, TimeoutError) as error:
            pytest.skip(
                f"SLURM does not start here: {error} {(folder / 'start.log').read_text()[-500:]}"
            )
        yield running
    finally:
        running.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
