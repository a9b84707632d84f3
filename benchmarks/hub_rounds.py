"""Measures how long a round takes from its launch until it can land: over a hub with gRPC, and over a folder.

Two sites in one process launch at the same time, again and again, and wait for each other. What is measured is the time
from the launch until the record of the round and the payloads of both are there. ``python -m benchmarks.hub_rounds``.
"""

import argparse
import logging
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from lightning_sdiloco.comm import key_of
from lightning_sdiloco.federation import Charter, Follower, Payload, Position, StateHeader, Terms
from lightning_sdiloco.hub import (
    Called,
    Connection,
    FolderConnection,
    HubConnection,
    HubService,
    Recorded,
    StateWanted,
    Welcomed,
)

RUN = "rounds"
TERMS = Terms(fragments=1, sync_every=2, overlap_steps=1, grace=10.0, lease=10.0)
CHARTER = Charter(RUN, TERMS, {}, ((("weight", "(1,)"),),), ((),), {}, "")


class Site:
    """Trains nothing: launches a payload, and lands what comes."""

    def __init__(self, connection: Connection, payload: bytes) -> None:
        self.connection, self.payload = connection, payload
        self.follower = Follower(TERMS, connection.agree(CHARTER).key, connection.site, connection.life)
        self.step = 0
        connection.hello(self.follower)

    def hear(self) -> bool:
        """Takes what was told; tells whether a round has landed."""
        landed = False
        for event in self.connection.events():
            if isinstance(event, Welcomed):
                self.follower.welcome(event.welcome)
                if self.follower.wants_state:
                    self.follower.found([0])
            elif isinstance(event, Called):
                self.follower.hear(event.call)
            elif isinstance(event, StateWanted) and event.founding:
                header = StateHeader((Position(0, CHARTER.key),), (0,))
                self.connection.give(event.request, header, [b"nothing"])
            elif isinstance(event, Recorded) and event.blobs is not None:
                self.follower.learn(event.record)
                self.follower.land(event.record, 0, 0)
                landed = True
        self.connection.beat(self.follower)
        return landed

    def until(self, holds: Callable[[], bool]) -> None:
        """Listens until something is true."""
        while not holds():
            self.connection.wait(0.2)

    def round(self, number: int) -> float:
        """Launches, and waits until that can land; returns how many seconds it took."""
        payload = number.to_bytes(8, "big") + self.connection.life.encode() + self.payload
        named = (Payload(key_of(payload), len(payload)),)
        for _ in range(TERMS.sync_every):
            self.step += 1
            self.follower.trained(1)
        began = time.perf_counter()
        own = self.follower.launch(0, self.step, 0, named)
        assert own is not None, "it has payloads"
        self.connection.contribute(own, {named[0].key: payload})
        self.step += TERMS.overlap_steps
        self.until(self.hear)
        return time.perf_counter() - began


def measure(connections: list[Connection], rounds: int, size: int) -> list[float]:
    """Returns the seconds of each round of one of the sites."""
    barrier = threading.Barrier(len(connections))
    took: dict[str, list[float]] = {}

    def run(connection: Connection) -> None:
        site = Site(connection, bytes(size))
        site.until(lambda: site.hear() or site.follower.follows)
        barrier.wait()
        time.sleep(2.5)  # until each has been heard to follow, and is waited for
        own = took[connection.site] = []
        for number in range(rounds):
            barrier.wait()
            own.append(site.round(number))
        connection.leave()

    threads = [threading.Thread(target=run, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for connection in connections:
        connection.close()
    return took["a"]


def over_hub(folder: Path, rounds: int, size: int) -> list[float]:
    """Measures rounds over gRPC, on this machine and without TLS."""
    service = HubService(RUN, folder / "hub.sqlite", 2, insecure=True)
    service.start()
    hub = f"127.0.0.1:{service.port}"
    took = measure([HubConnection(hub, RUN, name, insecure=True) for name in "ab"], rounds, size)
    service.close()
    return took


def over_folder(folder: Path, rounds: int, size: int) -> list[float]:
    """Measures rounds over a folder."""
    return measure([FolderConnection(str(folder / "meeting"), RUN, name, 2) for name in "ab"], rounds, size)


def main() -> None:
    """Prints the median and the quarters of both, in turn and several times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes of a payload")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", help="where to work; by default a temporary folder")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning_sdiloco").setLevel(logging.ERROR)
    took: dict[str, list[float]] = {"hub": [], "folder": []}
    for _ in range(options.times):
        for name, one in (("hub", over_hub), ("folder", over_folder)):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                took[name] += one(Path(folder), options.rounds, options.size)
    for name, seconds in took.items():
        low, middle, high = (1000 * value for value in statistics.quantiles(seconds, n=4))
        spread = f"quarters {low:.0f} to {high:.0f} ms, {len(seconds)} rounds"
        print(f"{name:>7}: {middle:.0f} ms from launch to landing ({spread})")


if __name__ == "__main__":
    main()
