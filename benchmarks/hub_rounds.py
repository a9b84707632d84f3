"""What a round costs the hub: the processor time of its process alone, with 2 to 64 sites.

    python -m benchmarks.hub_rounds [--quick] [--json FILE]

Sites without a model contribute random values in fp4, with TLS and certificates, and fetch those of
the others, or the mean. All of them stand in another process. Heartbeats are in the numbers: one a
second of each site.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
# All sites stand in one process, which holds the payloads of all of them for each of them.
MOST = 1 << 30
TERMS = Terms(fragments=1, sync_every=4, overlap_steps=2, grace=60.0, lease=60.0, guard=None)


class LightSite(ScriptedSite):
    """Contributes random values, and holds what the number of the round says."""

    payload = b""

    @override
    def encoded(self, gradient: np.ndarray, exact: bool) -> bytes:
        # The scale of the first block tells one payload from another.
        return (
            np.random.default_rng().integers(100, 16000, 1, np.uint16).tobytes() + self.payload[2:]
        )

    @override
    def stepped(self, record: Record, old: Values, payloads: Sequence[Any]) -> Values:
        return Values(old.outer + 1, old.momentum, record.key)


def processor_time(process: "subprocess.Popen[str]") -> float:
    """Returns the seconds for which a process has had a processor."""
    user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(sites: int, size: int, at_hub: bool) -> dict[str, Any]:
    """Returns the hub's seconds a round, of its processor and by the clock."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        names = [f"site-{number:02d}" for number in range(sites)]
        init_keys(keys, RUN)
        for name in names:
            add_keys(keys, name, "site")
        command = [sys.executable, "-m", "benchmarks.hub_rounds", "--serve", folder, str(sites)]
        hub = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert hub.stdout is not None
        terms = replace(TERMS, hub_mean="fp4" if at_hub else None)
        values = size * 128 // 66 // 128 * 128
        payload = encoded(
            np.random.default_rng(0).standard_normal(values).astype(np.float32), "fp4"
        )
        own = replace(run_config(terms), fragments=((("weight", f"({values},)"),),))
        port = int(hub.stdout.readline())

        def joins(name: str) -> LightSite:
            client = HubClient(f"127.0.0.1:{port}", RUN, name, keys=keys, channels=1)
            connection = HubConnection(client)
            site = LightSite(connection, connection.agree(own), [first_values(0)])
            site.payload = payload
            connection.hello(site.follower)
            return site

        with ThreadPoolExecutor(8) as pool:
            joined = list(pool.map(joins, names))
        began: tuple[float, float] = (0.0, 0.0)
        for number in (1, 1 + ROUNDS):
            began = processor_time(hub), time.monotonic()
            while min(site.rounds[0] for site in joined) < number:
                for site in joined:
                    site.step()
                time.sleep(0.01)
        spent = processor_time(hub) - began[0]
        seconds = time.monotonic() - began[1]
        for site in joined:
            site.connection.close(0)
        hub.communicate(timeout=60)
    about = {"bytes": size, "mean": "hub" if at_hub else "sites", "sites": sites}
    return about | {"processor": spent / ROUNDS, "seconds": seconds / ROUNDS}


def serve(folder: str, sites: str) -> None:
    """Is the hub, until its input ends."""
    from lightning_sdiloco.federation.server import HubService

    hub = HubService(
        RUN, Path(folder, "hub.sqlite"), int(sites), "127.0.0.1:0", keys=Path(folder, "keys")
    )
    hub.start()
    print(hub.port, flush=True)
    sys.stdin.read()
    hub.close()


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--serve"]:
        serve(*words[1:])
        return
    options = report.options(__doc__, words)
    places = [
        (sites, size, at_hub) for size in BYTES for at_hub in (False, True) for sites in SITES
    ]
    places = [place for place in places if place[0] ** 2 * place[1] <= MOST or place[2]]
    rows = [measure(*place) for place in (places[:1] if options.quick else places)]
    named = [(f"{row['bytes'] >> 10} KiB, mean at {row['mean']}", row) for row in rows]
    table = [
        [name, f"{row['sites']}", f"{row['processor']:.3f}", f"{row['seconds']:.2f}"]
        for name, row in named
    ]
    report.show(
        "A round at the hub", ["payloads", "sites", "its processor, s", "a round takes, s"], table
    )
    headline = {
        f"{name}, {row['sites']} sites: s of the hub's processor": row["processor"]
        for name, row in named
    }
    report.write(options.json, headline, report.measured("hub_rounds", options.quick), rows=rows)


if __name__ == "__main__":
    main()
