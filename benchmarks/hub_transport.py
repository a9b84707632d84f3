"""Measures the speed of payloads to a hub over a slow link, compared with iperf3 over the same
link. It needs Linux, root and iperf3.

    python -m benchmarks.hub_transport [--quick] [--json FILE]

A site sends a payload to its hub, with TLS and certificates, and waits until the hub confirms that
it is on disk. Both run in network namespaces that are 50 ms apart, with CUBIC as the congestion
control of TCP. In alternation, iperf3 sends the same number of bytes over the same number of
connections, so both see the same machine. Numbers are medians.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.links import Links, require

ROUND_TRIP = 0.05
RUN = "transport"


class Line(NamedTuple):
    """A link and how it is used."""

    mbit: int
    loss: float
    connections: int
    sizes: tuple[int, ...]


LINES = (
    Line(100, 0.0, 8, (10_000_000, 100_000_000)),
    Line(1000, 0.0, 8, (10_000_000, 100_000_000)),
    Line(100, 0.001, 1, (10_000_000,)),
    Line(100, 0.001, 8, (10_000_000,)),
)


def iperf3(links: Links, size: int, connections: int) -> float:
    """Measures with iperf3 how fast site 1 can send to site 0, in Mbit/s."""
    server = links.start(0, ["iperf3", "--server", "--one-off"], stdout=subprocess.DEVNULL)
    time.sleep(1.0)
    words = ["iperf3", "--client", links.address(0), "--bytes", str(size)]
    words += ["--parallel", str(connections), "--json"]
    client = subprocess.run(links.command(1, words), check=True, capture_output=True, text=True)
    server.wait()
    totals = json.loads(client.stdout)["end"]["sum_received"]
    return float(totals["bits_per_second"]) / 1e6


def serve(folder: str) -> None:
    """Runs the hub, in site 0."""
    from lightning_sdiloco.federation.server import Hub
    from lightning_sdiloco.federation.store import BlobStore
    from tests.federation.hubs import Noting

    hub = Hub(
        Noting(),  # type: ignore[arg-type]  # it answers as a Coordinator does
        BlobStore(Path(folder, "store")),
        RUN,
        "0.0.0.0:7100",
        keys=Path(folder, "keys"),
    )
    hub.start()
    print("ready", flush=True)
    sys.stdin.read()
    hub.close()


def send(folder: str, address: str, connections: str) -> None:
    """Runs the site, in site 1: sends the requested number of bytes, and reports the rate."""
    from lightning_sdiloco.federation.client import HubClient
    from lightning_sdiloco.federation.codec import key_of

    keys = Path(folder, "keys", "site.bundle")
    mailbox = HubClient(f"{address}:7100", RUN, "site", keys, channels=int(connections))
    mailbox.send(os.urandom(int(connections) << 20))
    print("ready", flush=True)
    for line in sys.stdin:
        blob = os.urandom(int(line))
        # A site knows the digest of a launch, because the contribution contains it.
        key = key_of(blob)
        began = time.monotonic()
        mailbox.send(blob, key=key)
        print(len(blob) * 8e-6 / (time.monotonic() - began), flush=True)
    mailbox.close()


def measure(line: Line, repeats: int) -> list[dict[str, Any]]:
    from lightning_sdiloco.federation.keys import add_keys, init_keys

    rows = []
    rate = line.mbit * 1e6
    with (
        tempfile.TemporaryDirectory() as folder,
        Links(2, rate, ROUND_TRIP / 2, loss=line.loss, congestion_control="cubic") as links,
    ):
        init_keys(Path(folder, "keys"), RUN)
        add_keys(Path(folder, "keys"), "site", "site")
        hub = inside(links, 0, "serve", folder)
        site = inside(links, 1, "send", folder, links.address(0), str(line.connections))
        for size in line.sizes:
            ours = []
            plain = []
            for _ in range(repeats):
                plain.append(iperf3(links, size, line.connections))
                site.stdin.write(f"{size}\n")
                site.stdin.flush()
                ours.append(float(site.stdout.readline()))
            rows.append(line._asdict() | {"size": size, "ours": ours, "iperf3": plain})
            rates = f"{median(ours):.0f} of {median(plain):.0f} Mbit/s"
            report.said(f"{line.mbit} Mbit/s, {size // 10**6} MB: {rates}")
        for process in (site, hub):
            process.communicate(timeout=30)
    return rows


def inside(links: Links, site: int, part: str, *arguments: str) -> Any:
    """Starts one of the two ends in its site, and waits until it is ready."""
    words = [sys.executable, "-m", "benchmarks.hub_transport", "--inside", part, *arguments]
    pipe = subprocess.PIPE
    process = links.start(site, words, {"OMP_NUM_THREADS": "1"}, stdin=pipe, stdout=pipe, text=True)
    if process.stdout is None or process.stdout.readline() != "ready\n":
        raise RuntimeError(f"The part {part!r} did not start in site {site}; its error is above.")
    return process


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--inside"]:
        part = serve if words[1] == "serve" else send
        part(*words[2:])
        return
    options = report.options(__doc__, words)
    require()
    if shutil.which("iperf3") is None:
        raise SystemExit("iperf3 is not installed: apt-get install iperf3")
    lines = [LINES[0]._replace(sizes=(2_000_000,))] if options.quick else LINES
    rows = []
    for line in lines:
        rows += measure(line, 1 if options.quick else 5)
    headline = {
        f"{name_of(row)}: of iperf3": median(row["ours"]) / median(row["iperf3"]) for row in rows
    }
    headline |= {f"{name_of(row)}: of the link": median(row["ours"]) / row["mbit"] for row in rows}
    table = [[name_of(row), *cells_of(row)] for row in rows]
    report.show("A payload to the hub", ["link and payload", "Mbit/s", "iperf3", "of it"], table)
    report.write(options.json, headline, report.measured("hub_transport", options.quick), rows=rows)


def cells_of(row: dict[str, Any]) -> list[str]:
    """Returns the row of the table: our rate, that of iperf3, and their ratio."""
    ours = median(row["ours"])
    plain = median(row["iperf3"])
    return [f"{ours:.1f}", f"{plain:.1f}", f"{ours / plain:.2f}"]


def name_of(row: dict[str, Any]) -> str:
    loss = f", {row['loss']:.1%} lost, {row['connections']} connections" if row["loss"] else ""
    return f"{row['mbit']} Mbit/s{loss}, {row['size'] // 10**6} MB"


if __name__ == "__main__":
    main()
