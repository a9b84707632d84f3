"""What starts a lighthouse and replica groups of torchft, in its own Python, with settings of its own examples."""

import json
import os
import select
import signal
import subprocess
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import PIPE

from benchmarks.chaos.cast import Process, free_ports
from benchmarks.chaos.faults import HUB
from benchmarks.chaos.replica import Settings
from benchmarks.sites import PEERS, ROOT

BIN = PEERS / "torchft" / "bin"

SETTINGS = {
    # README.md: torchft_lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000; the manager, gloo and
    # the transport as train_diloco.py makes them. What neither names is the default.
    "readme": Settings(
        min_replicas=1,
        join_timeout=10.0,
        heartbeat_timeout=5.0,
        quorum_tick=0.1,
        timeout=30.0,
        quorum_timeout=60.0,
        connect_timeout=60.0,
        quorum_retries=0,
        collectives=10.0,
    ),
    # As its documentation advises: a majority as the least, against a split brain, and a quorum that waits long. The
    # timeouts of its tests (_test/diloco_trainer.py) where these are shorter. And for its sake beyond that: retries,
    # without which "all replicas will crash" with the lighthouse (manager.py), and a heartbeat as short as our lease.
    "careful": Settings(
        min_replicas=3,
        join_timeout=10.0,
        heartbeat_timeout=2.0,
        quorum_tick=0.1,
        timeout=10.0,
        quorum_timeout=60.0,
        connect_timeout=10.0,
        quorum_retries=60,
        collectives=10.0,
    ),
}


class Child:
    """A process that need not be a child of this one.

    Args:
        pid: Of it.
    """

    def __init__(self, pid: int) -> None:
        self.pid: int | None = pid
        self._file = os.pidfd_open(pid)

    @property
    def exitcode(self) -> int | None:
        """Returns 1 if it has ended: how, only its parent hears."""
        return 1 if self._has_ended(0.0) else None

    def _has_ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._file], [], [], timeout)[0])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        self._has_ended(timeout)


class Replicas:
    """Starts a lighthouse, and groups of torchft.

    All are forked from a process that has imported what they need, as the hub and the sites of a federation are here:
    how long that takes is not compared. The command ``torchft_lighthouse`` would import torch for each lighthouse.

    Args:
        folder: Where they write.
        seconds: That an inner step takes at least.
        settings: Those of torchft.
    """

    def __init__(self, folder: Path, seconds: float, settings: Settings) -> None:
        self._folder, self._seconds, self._settings = folder, seconds, settings
        [port] = free_ports(1)
        self._lighthouse = f"127.0.0.1:{port}"
        about = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        words = [str(BIN / "python"), "-m", "benchmarks.chaos.replica"]
        self._forks = subprocess.Popen(words, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT, env={**os.environ, **about})

    def start(self, name: str) -> Process:
        """Starts the lighthouse or a group."""
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        told = {"name": name, "folder": str(self._folder), "lighthouse": self._lighthouse, "seconds": self._seconds}
        about = {**told, "is_lighthouse": name == HUB, "settings": asdict(self._settings)}
        print(json.dumps(about), file=self._forks.stdin, flush=True)
        return Child(int(self._forks.stdout.readline()))

    def move(self) -> None:
        """Leaves it where it is: a manager of torchft knows one address for all its life."""

    def close(self) -> None:
        """Ends what they are forked from."""
        self._forks.communicate()
