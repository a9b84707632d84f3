"""A real etcd on this machine: one member, on ports of its own."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest


def require_etcd() -> None:
    """Skips where it is not installed."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: the package etcd-server of Debian brings it")


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


class EtcdProcess:
    """A member that is started, and can be stopped and go on."""

    def __init__(self, folder: Path, options: Sequence[str] = (), scheme: str = "http") -> None:
        self.port, peer = free_port(), free_port()
        client, peers = f"{scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{peer}"
        words = ["etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls"]
        words += [client, "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        words += ["--initial-cluster", f"default={peers}", "--unsafe-no-fsync", *options]
        self.log = (folder / "etcd.log").open("wb")
        self.process = subprocess.Popen(words, stdout=self.log, stderr=subprocess.STDOUT)
        end = time.monotonic() + 30
        while b"ready to serve client requests" not in (folder / "etcd.log").read_bytes():
            assert time.monotonic() < end, (folder / "etcd.log").read_text()[-2000:]
            assert self.process.poll() is None, (folder / "etcd.log").read_text()[-2000:]
            time.sleep(0.05)

    def url(self, prefix: str = "run", **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"etcd://127.0.0.1:{self.port}/{prefix}?{query}"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        self.process.kill()
        self.process.wait()
        self.log.close()


@contextmanager
def etcd_at(folder: Path, options: Sequence[str] = (), scheme: str = "http") -> Iterator[EtcdProcess]:
    require_etcd()
    process = EtcdProcess(folder, options, scheme)
    try:
        yield process
    finally:
        process.close()
