"""Measures how much of a slow link the exchange uses, beside plain TCP on the same link. Linux, and root.

The outline: yardsticks (iperf3 or a plain stream, TCP from an idle link), ours (in a process per site), report.
Run it with ``python -m benchmarks.link [--quick] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import socket
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.links import Links, missing

ROUND_TRIP = 0.05
FLIGHT = 10_000_000
"""Bytes of a flight: what a fragment of 20 million values takes at four bits."""
IDLE = 1.0
"""Seconds after which TCP takes a connection for idle, and more."""
GONE = timedelta(seconds=60)

Rates = dict[str, float]
"""Mbit/s by the name of what was measured."""

# ---------------------------------------------------------------------------------------------------------------------
# Yardsticks: what TCP reaches by itself
# ---------------------------------------------------------------------------------------------------------------------

_SERVE = """
import socket, sys
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    expected = int.from_bytes(connection.recv(8), "big")
    while expected:
        while expected > 0:
            expected -= len(connection.recv(1 << 20))
        connection.sendall(b"x")
        expected = int.from_bytes(connection.recv(8), "big")
"""


class Stream:
    """A plain TCP connection to site 0, from the site in which this process is."""

    def __init__(self, address: str) -> None:
        self._connection = socket.create_connection((address, 7000))

    def mbit_s(self, nbytes: int) -> float:
        """Sends so many bytes and waits until the other side has them; half a round trip is not the transfer's."""
        started = time.monotonic()
        self._connection.sendall(nbytes.to_bytes(8, "big"))
        self._connection.sendall(memoryview(bytes(nbytes)))
        self._connection.recv(1)
        return nbytes * 8 / (time.monotonic() - started - ROUND_TRIP / 2) / 1e6

    def close(self) -> None:
        self._connection.close()


def plain(address: str, repeats: int, large: int) -> Rates:
    """What a plain TCP connection reaches. Runs in site 1."""
    stream = Stream(address)
    stream.mbit_s(FLIGHT)
    long = stream.mbit_s(3 * large)
    idle = []
    for _ in range(repeats):
        time.sleep(IDLE)
        idle.append(stream.mbit_s(FLIGHT))
    stream.close()
    return {"plain TCP": long, "plain TCP, 10 MB from idle": median(idle)}


def iperf3(links: Links, seconds: int) -> Rates:
    """What iperf3 reaches in one direction, and in each of both at the same time; nothing if it is not installed."""
    if shutil.which("iperf3") is None:
        return {}
    rates = {}
    for name, both in (("iperf3", []), ("iperf3, both ways", ["--bidir"])):
        server = links.start(0, ["iperf3", "--server", "--one-off"], stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        words = ["iperf3", "--client", links.address(0), "--time", str(seconds), "--json", *both]
        told = subprocess.run(links.command(1, words), check=True, capture_output=True, text=True).stdout
        server.wait()
        received = [value for key, value in json.loads(told)["end"].items() if key.startswith("sum_received")]
        rates[name] = min(one["bits_per_second"] for one in received) / 1e6
    return rates


# ---------------------------------------------------------------------------------------------------------------------
# Ours, in a process of each site
# ---------------------------------------------------------------------------------------------------------------------


class Groups:
    """The groups of this world, one in each process, between which something is sent."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        from lightning_sdiloco.comm.layout import GroupLayout
        from lightning_sdiloco.comm.topology import Topology

        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=GONE)
        self._torch, self._dist = torch, dist
        self._topology = Topology.of_world(GroupLayout(dist.get_world_size(), dist.get_world_size()), GONE)

    def seconds(self, *sizes: int) -> float:
        """From the moment when all groups start until this one has all messages and all groups have its own."""
        exchange, messages = self._topology.exchange, [self._zeros(size) for size in sizes]
        self._be_idle()
        started = time.monotonic()
        posted = [exchange.post([message] * self._topology.num_groups) for message in messages]
        for one in posted:
            exchange.collect(one, time.monotonic() + 60)
        return time.monotonic() - started

    def word(self, size: int) -> float:
        """Seconds that the host's part of a control vector takes while a payload is on its way."""
        control, exchange = self._topology.control, self._topology.exchange
        self._dist.barrier()
        payload = exchange.post([self._zeros(size)] * self._topology.num_groups)
        time.sleep(3 * ROUND_TRIP)
        started = time.monotonic()
        words = control.post([self._zeros(16)] * self._topology.num_groups)
        control.collect(words, time.monotonic() + 60)
        took = time.monotonic() - started
        exchange.collect(payload, time.monotonic() + 60)
        return took

    def all_reduced(self, size: int) -> float:
        """One all-reduce of gloo, which sends as many bytes between two groups."""
        values = self._torch.zeros(size // 4)
        self._be_idle()
        started = time.monotonic()
        self._dist.all_reduce(values)
        return time.monotonic() - started

    def close(self) -> None:
        """Ends together with the others."""
        self._dist.barrier()
        self._dist.destroy_process_group()

    def _zeros(self, size: int) -> Any:
        return self._torch.zeros(size, dtype=self._torch.uint8)

    def _be_idle(self) -> None:
        self._dist.barrier()
        time.sleep(IDLE)
        self._dist.barrier()


def ours(repeats: int, large: int, flights: int) -> Rates:
    """What the exchange reaches between the groups of this world, each of which sends and receives."""
    groups = Groups()
    groups.seconds(FLIGHT)  # connections that have never sent are slower than those that were idle
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, mbit in (
            ("ours, 10 MB from idle", FLIGHT * 8e-6 / groups.seconds(FLIGHT)),
            (f"ours, {large // 10**6} MB at once", large * 8e-6 / groups.seconds(large)),
            (f"ours, {flights} flights of 10 MB", flights * FLIGHT * 8e-6 / groups.seconds(*[FLIGHT] * flights)),
            ("one all-reduce of gloo, 10 MB from idle", FLIGHT * 8e-6 / groups.all_reduced(FLIGHT)),
        ):
            found.setdefault(name, []).append(mbit)
    rates = {name: median(values) for name, values in found.items()}
    rates["a word beside a payload, ms"] = 1000 * median(groups.word(large) for _ in range(repeats))
    groups.close()
    return rates


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------


def measure(mbit: int, control: str, quick: bool) -> Rates:
    """All rates on one link, in one run."""
    large, repeats = (100_000_000, 3) if mbit >= 1000 else (40_000_000, 3)
    if quick:
        large, repeats = large // 2, 1
    flights = large // FLIGHT
    with Links(2, mbit * 1e6, ROUND_TRIP / 2, congestion_control=control) as links:
        rates = iperf3(links, 3 if quick else 6)
        server = links.start(0, [sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        server.stdout.readline()
        rates |= in_site(links, 1, "plain", links.address(0), str(repeats), str(large))()
        server.wait()
        ranks = [in_site(links, site, "ours", str(repeats), str(large), str(flights)) for site in range(2)]
        told = [rank() for rank in ranks]
    return rates | {name: min(one[name] for one in told) for name in told[0]}


def in_site(links: Links, site: int, what: str, *arguments: str) -> Any:
    """Starts a part of this benchmark in a site; what is returned waits for its rates."""
    words = [sys.executable, "-m", "benchmarks.link", "--inside", what, *arguments]
    environment = {**links.environment(site), "OMP_NUM_THREADS": "1"}
    process = links.start(site, words, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def rates() -> Rates:
        told, complaints = process.communicate(timeout=600)
        if process.returncode:
            raise RuntimeError(f"The part {what!r} failed in site {site}:\n{complaints}")
        found: Rates = json.loads(told.splitlines()[-1])
        return found

    return rates


def inside(what: str, arguments: list[str]) -> Rates:
    if what == "plain":
        return plain(arguments[0], int(arguments[1]), int(arguments[2]))
    return ours(*map(int, arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how much of a slow link the exchange uses.")
    parser.add_argument("--quick", action="store_true", help="half the bytes, once, with one congestion control")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all numbers")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(inside(asked.inside[0], asked.inside[1:])))
        return
    if (lacks := missing()) is not None:
        sys.exit(lacks)
    headline: Rates = {}
    for mbit in (100, 1000):
        for control in ("bbr",) if asked.quick else ("bbr", "cubic"):
            rates = measure(mbit, control, asked.quick)
            yardstick = rates.get("iperf3", rates["plain TCP"])
            print(f"\n{mbit} Mbit/s, {1000 * ROUND_TRIP:.0f} ms round trip, {control}\n")
            print(
                "| what | Mbit/s | of iperf3 |\n|---|---|---|"
                if "iperf3" in rates
                else "| what | Mbit/s | |\n|---|---|---|"
            )
            for name, rate in rates.items():
                share = "" if "ms" in name.split() else f"{rate / yardstick:.2f}"
                print(f"| {name} | {rate:.0f} | {share} |", flush=True)
                headline[f"{mbit} Mbit/s, {control}: {name}"] = round(rate, 1)
            if asked.json:
                asked.json.write_text(json.dumps({"headline": headline, **described()}, indent=1) + "\n")


def described() -> dict[str, str]:
    """The machine, the versions and the date."""
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


if __name__ == "__main__":
    main()
