"""Sites on this machine, connected by slow links: network namespaces and an emulator. This needs
Linux and root.

with Links(sites=2, rate=100e6, one_way_delay=0.025) as links:
    ranks = [links.start(site, [sys.executable, "train.py"]) for site in range(2)]
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_CLONE_NEWNET = 0x40000000
_CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def missing() -> str | None:
    """Returns a sentence about a requirement that this machine lacks for slow links, or None."""
    if sys.platform != "linux":
        return "Slow links are made of Linux network namespaces, and this is not Linux."
    if os.geteuid() != 0:
        return (
            "Slow links are made of network namespaces, which need root. Run the command as root."
        )
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "Slow links need the commands ip and unshare. Install the packages iproute2 and util-linux."
    if not Path("/dev/net/tun").exists():
        return "Slow links need TUN devices, and there is no /dev/net/tun here."
    return None


def require() -> None:
    """Ends the command with a message if this machine lacks something for slow links."""
    lacks = missing()
    if lacks is not None:
        raise SystemExit(lacks)


def enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", namespace).open() as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


class Links:
    """Sites connected by slow links, for the duration of a ``with`` block.

    Site ``i`` is a network namespace with the address ``10.77.0.(i + 1)`` on the interface ``wan0``
    and the host name ``site<i>``, which all sites resolve. Its link has a rate in each direction,
    and all packets from one site to another take the same time. Namespaces are named after this
    process, so several processes may have links at the same time; they then share the cores.

    Args:
        sites: The number of sites.
        rate: The bits per second of every site's link, in each direction; None means unlimited.
        one_way_delay: The seconds that a packet takes from one site to another, which is half a
            round trip.
        loss: The share of packets that are lost.
        queue: The maximum queue in front of a link, in seconds; more packets are dropped.
        congestion_control: TCP's congestion control in all sites, such as ``"bbr"`` or ``"cubic"``.
            None: the machine's.
        slow_start_after_idle: Whether TCP starts slowly again after being idle, which is Linux's
            default.
        buffers: The maximum bytes that a TCP connection buffers in each direction. None: the
            machine's default.

    Raises:
        RuntimeError: If this machine lacks something; see `missing`.
    """

    interface = "wan0"

    def __init__(
        self,
        sites: int,
        rate: float | None,
        one_way_delay: float = 0.025,
        *,
        loss: float = 0.0,
        queue: float = 0.1,
        congestion_control: str | None = None,
        slow_start_after_idle: bool = True,
        buffers: int | None = 32 << 20,
    ) -> None:
        self.names = [f"sdl{os.getpid()}x{site}" for site in range(sites)]
        self._link = {
            "rate": (rate or 0.0) / 8,
            "delay": one_way_delay,
            "loss": loss,
            "queue": queue,
        }
        self._sysctl = {
            "tcp_slow_start_after_idle": str(int(slow_start_after_idle)),
            "tcp_no_metrics_save": "1",
        }
        if congestion_control is not None:
            self._sysctl["tcp_congestion_control"] = congestion_control
        if buffers is not None:
            self._sysctl |= {
                "tcp_rmem": f"4096 131072 {buffers}",
                "tcp_wmem": f"4096 65536 {buffers}",
            }
        self._emulator: subprocess.Popen[str] | None = None

    def __enter__(self) -> Links:
        lacks = missing()
        if lacks is not None:
            raise RuntimeError(lacks)
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def address(self, site: int) -> str:
        return f"10.77.0.{site + 1}"

    def environment(self, site: int, port: int = 29500) -> dict[str, str]:
        """Returns the variables of a process group of one rank per site. Lightning treats such
        ranks as launched by hand.
        """
        return {
            "GLOO_SOCKET_IFNAME": self.interface,
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(self.names)),
            "RANK": str(site),
            "NODE_RANK": str(site),
            "LOCAL_RANK": "0",
        }

    def command(self, site: int, words: Sequence[str]) -> list[str]:
        """Returns the arguments of a command that runs another command in a site."""
        name_host = f'hostname site{site}; exec "$@"'
        return [
            "ip",
            "netns",
            "exec",
            self.names[site],
            "unshare",
            "--uts",
            "sh",
            "-c",
            name_host,
            "sh",
            *words,
        ]

    def start(
        self,
        site: int,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        return subprocess.Popen(
            self.command(site, words), env={**os.environ, **(environment or {})}, **popen
        )

    def enter(self, site: int) -> None:
        """Moves this process, which should be forked for this, into a site."""
        enter(self.names[site])

    def change(self, site: int, **link: Any) -> None:
        """Changes the link of a site, while packets are on their way."""
        assert self._emulator is not None, "the links are open"
        assert self._emulator.stdin is not None, "the emulator was started with a pipe"
        self._emulator.stdin.write(json.dumps({"site": site, **link}) + "\n")

    def _open(self) -> None:
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{self.address(s)} site{s}\n" for s in range(len(self.names))
        )
        for name in self.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            folder = Path("/etc/netns", name)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(hosts)
        self._allow(self._sysctl.get("tcp_congestion_control"))
        sites = [(name, self.address(site)) for site, name in enumerate(self.names)]
        words = [sys.executable, "-S", "-E", str(Path(__file__).with_name("emulator.py"))]
        choices = json.dumps({"link": self._link, "sites": sites})
        pipe = subprocess.PIPE
        self._emulator = subprocess.Popen(
            [*words, choices], stdin=pipe, stdout=pipe, text=True, bufsize=1
        )
        assert self._emulator.stdout is not None
        if self._emulator.stdout.readline() != "ready\n":
            raise RuntimeError("The emulator of the links did not start; its error is above.")
        for name in self.names:
            settings = [f"net.ipv4.{key}={value}" for key, value in self._sysctl.items()]
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", *settings], check=True)

    def _allow(self, congestion_control: str | None) -> None:
        """Allows a congestion control: in a namespace, only the default and those allowed for
        everyone can be chosen.
        """
        allowed = _CONGESTION_CONTROLS.read_text().split()
        if congestion_control is not None and congestion_control not in allowed:
            _CONGESTION_CONTROLS.write_text(" ".join([*allowed, congestion_control]))

    def _close(self) -> None:
        if self._emulator is not None:
            with self._emulator:
                self._emulator.terminate()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
