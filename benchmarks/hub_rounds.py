"""Measures the cost of a round at the hub: the processor time of only its process, with 2 to 64
sites.

    python -m benchmarks.hub_rounds [--quick] [--json FILE]

Sites without a model contribute random values in fp4, with TLS and certificates, and fetch those of
the others, or the mean. All sites run in another process. The numbers include heartbeats, one per
second from each site.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from benchmarks import report
from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.keys import add_keys, init_keys
from lightning_sdiloco.federation.mean import encoded
from lightning_sdiloco.federation.messages import Record
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.run_config import Terms
from tests.federation.scripted import RUN, ScriptedSite, Values, first_values, run_config

ROUNDS = 5
SITES = (2, 8, 16, 32, 64)
BYTES = (16 << 10, 1 << 20)
# All sites are in one process, which stores all payloads once for each site.
MOST = 1 << 30
TERMS = Terms(fragments=1, sync_every=4, overlap_steps=2, grace=60.0, lease=60.0, guard=None)


class LightSite(ScriptedSite):
    """Contributes random values; its own values depend only on the number of the round."""

    payload = b""

    @override
    def encoded(self, gradient: np.ndarray, exact: bool) -> bytes:
        # The scale of the first block makes payloads distinct.
        scale = np.random.default_rng().integers(100, 16000, 1, np.uint16)
        return scale.tobytes() + self.payload[2:]

    @override
    def stepped(self, record: Record, old: Values, payloads: Sequence[Any]) -> Values:
        return Values(old.outer + 1, old.momentum, record.key)


def processor_time(process: "subprocess.Popen[str]") -> float:
    """Returns the processor time of a process in seconds."""
    user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(sites: int, size: int, at_hub: bool) -> dict[str, Any]:
    """Returns the hub's seconds per round, as processor time and as wall time."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        names = [f"site-{number:02d}" for number in range(sites)]
        init_keys(keys, RUN)
        for name in names:
            add_keys(keys, name, "site")
        command = [sys.executable, "-m", "benchmarks.hub_rounds", "--serve", folder, str(sites)]
        hub = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert hub.stdout is not None
        port = int(hub.stdout.readline())
        terms = replace(TERMS, hub_mean="fp4" if at_hub else None)
        joins = partial(join, size, terms, f"127.0.0.1:{port}", keys)
        with ThreadPoolExecutor(8) as pool:
            joined = list(pool.map(joins, names))
        play(joined, until=1)
        processor_before = processor_time(hub)
        began = time.monotonic()
        play(joined, until=1 + ROUNDS)
        processor = processor_time(hub) - processor_before
        seconds = time.monotonic() - began
        for site in joined:
            site.connection.close(0)
        hub.communicate(timeout=60)
    case = {"bytes": size, "mean": "hub" if at_hub else "sites", "sites": sites}
    return case | {"processor": processor / ROUNDS, "seconds": seconds / ROUNDS}


def join(size: int, terms: Terms, address: str, keys: Path, name: str) -> LightSite:
    """Makes a site that contributes payloads of a given size, and lets it join the run."""
    values = size * 128 // 66 // 128 * 128
    config = replace(run_config(terms), fragments=((("weight", f"({values},)"),),))
    client = HubClient(address, RUN, name, keys=keys, channels=1)
    connection = HubConnection(client)
    site = LightSite(connection, connection.agree(config), [first_values(0)])
    gradient = np.random.default_rng(0).standard_normal(values).astype(np.float32)
    site.payload = encoded(gradient, "fp4")
    connection.hello(site.follower)
    return site


def play(sites: Sequence[LightSite], until: int) -> None:
    """Lets sites step until all have completed a number of rounds."""
    while min(site.rounds[0] for site in sites) < until:
        for site in sites:
            site.step()
        time.sleep(0.01)


def serve(folder: str, sites: str) -> None:
    """Runs the hub until its input ends."""
    from lightning_sdiloco.federation.server import HubService

    hub = HubService(
        RUN, Path(folder, "hub.sqlite"), int(sites), "127.0.0.1:0", keys=Path(folder, "keys")
    )
    hub.start()
    print(hub.port, flush=True)
    sys.stdin.read()
    hub.close()


def cases() -> Iterator[tuple[int, int, bool]]:
    """Yields numbers of sites, bytes of a payload, and whether the hub averages, as far as the
    payloads fit into one process.
    """
    for size, at_hub, sites in product(BYTES, (False, True), SITES):
        if at_hub or sites**2 * size <= MOST:
            yield sites, size, at_hub


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--serve"]:
        serve(*words[1:])
        return
    options = report.options(__doc__, words)
    rows = [measure(*case) for case in islice(cases(), 1 if options.quick else None)]
    table = []
    headline = {}
    for row in rows:
        name = f"{row['bytes'] >> 10} KiB, mean at {row['mean']}"
        sites = f"{row['sites']}"
        table.append([name, sites, f"{row['processor']:.3f}", f"{row['seconds']:.2f}"])
        headline[f"{name}, {sites} sites: s of the hub's processor"] = row["processor"]
    columns = ["payloads", "sites", "its processor, s", "a round takes, s"]
    report.show("A round at the hub", columns, table)
    report.write(options.json, headline, report.measured("hub_rounds", options.quick), rows=rows)


if __name__ == "__main__":
    main()
