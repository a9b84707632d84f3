"""A real SLURM on this machine: one controller and several nodes with different host names."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
        self.configuration = folder / "slurm.conf"
        # Lightning in this process may have left variables with the address where ranks met.
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "MASTER_"))
        }
        self.environment["SLURM_CONF"] = str(self.configuration)
        self.environment["OMP_NUM_THREADS"] = "1"
        self.environment["GLOO_SOCKET_IFNAME"] = "lo"
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir()
        folder.chmod(0o755)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        nodes_text = "\n".join(_node_line(name, cores) for name in self.nodes)
        text = CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            port=_free_port(),
            folder=folder,
            first_job=1 + os.getpid() % 900 * 10,
            nodes=nodes_text,
        )
        self.configuration.write_text(text)
        hosts = "".join(f"127.0.0.1 {name}\n" for name in self.nodes)
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)

    def run(
        self, *command: str, seconds: float = 250, cwd: Path | None = None, **environment: str
    ) -> str:
        """Runs a command of SLURM, and returns both streams, because srun passes on those of the
        tasks.
        """
        process = subprocess.run(
            command,
            env={**self.environment, **environment},
            cwd=cwd,
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        output = process.stdout
        assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{output}"
        return output

    def start(self) -> None:
        folder = self.folder
        self._start_daemon(
            "munged",
            f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
            "--force",
        )
        self._start_daemon("slurmctld", "-c", "-f", str(self.configuration))
        for name in self.nodes:
            # Each node has a host name, and an /etc/hosts in which it finds the others.
            script = (
                f"mount --bind {folder}/hosts /etc/hosts && hostname {name}"
                f" && exec slurmd -N {name} -f {self.configuration}"
            )
            self._start_daemon("unshare", "-m", "-u", "sh", "-c", script)
        deadline = time.monotonic() + SECONDS
        idle_nodes = 0
        while idle_nodes < len(self.nodes):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{idle_nodes} of {len(self.nodes)} nodes are idle")
            time.sleep(0.2)
            states = subprocess.run(
                ["sinfo", "-h", "-N", "-o", "%T"], env=self.environment, stdout=subprocess.PIPE
            )
            idle_nodes = states.stdout.split().count(b"idle")

    def _start_daemon(self, *command: str) -> None:
        # Daemons leave this process; a pipe that they inherited would never end.
        with (self.folder / "start.log").open("a") as log:
            subprocess.run(
                command, env=self.environment, stdout=log, stderr=log, timeout=SECONDS, check=True
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
        of_nodes = self.folder.glob("slurmd-*.pid")
        for path in [*of_nodes, self.folder / "slurmctld.pid", self.folder / "munged.pid"]:
            with suppress(FileNotFoundError, ValueError, ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


def _node_line(name: str, cores: int) -> str:
    """The line of a node in the configuration."""
    return (
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={_free_port()}"
        f" CPUs={cores} Boards=1 SocketsPerBoard=1 CoresPerSocket={cores} ThreadsPerCore=1"
        " RealMemory=1024 State=UNKNOWN"
    )


@contextmanager
def slurm(folder: Path, nodes: int, cores: int) -> Iterator[Slurm]:
    """Starts a SLURM whose nodes are called n0, n1, ...; skips the test where that is not possible.

    The path of the folder has to be short, as that of a socket is limited; processors of a node
    need not be real.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        names = ", ".join(missing) or "root"
        pytest.skip(f"SLURM needs root, slurm-wlm and munge; not found: {names}")
    running = Slurm(folder, nodes, cores)
    try:
        try:
            running.start()
        except (subprocess.SubprocessError, TimeoutError) as error:
            log = (folder / "start.log").read_text()
            pytest.skip(f"SLURM does not start here: {error} {log[-500:]}")
        yield running
    finally:
        running.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
