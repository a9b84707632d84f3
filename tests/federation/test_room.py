"""The room that a hub needs: a disk near the formula of the page holds a run, and a full one is
noticed and left behind.
"""

from dataclasses import replace
from typing import Any

import pytest

from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.memory import InProcessHub
from lightning_sdiloco.federation.messages import Payload
from lightning_sdiloco.federation.run_config import RETENTION, SNAPSHOT_EVERY
from lightning_sdiloco.federation.store import InMemoryStore
from lightning_sdiloco.federation.wire import Missing, NoSpace
from tests.federation.hubs import TERMS, joined
from tests.federation.scripted import RUN, ScriptedSite, run_config
from tests.federation.test_known_answers import (
    RECORDS,
    append,
    heartbeat,
    ledger_of,
    snapshot,
)

PAYLOAD = 16  # bytes
ROUND = 0.5  # seconds


class Disk(InMemoryStore):
    """A disk of so many bytes, which counts what it refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.size_of_disk = 1 << 30
        self.refused = 0

    @property
    def free(self) -> int:  # type: ignore[override]
        return self.size_of_disk - sum(map(len, self._blobs.values()))

    def put(self, blob: Any) -> str:
        if memoryview(blob).nbytes > self.free:
            self.refused += 1
            raise NoSpace("there is no space left on this disk: nothing was stored.")
        return super().put(blob)


class Run:
    """A run in virtual time, with rounds of half a second."""

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.hub = InProcessHub(RUN, len(names), lambda: self.now)
        self.disk = Disk()
        self.hub.store = self.disk
        self.start_hub(len(names))
        self.sites: dict[str, ScriptedSite] = {}
        for name in names:
            self.join(name)

    def start_hub(self, sites: int | None = None) -> None:
        hub = self.hub
        hub.coordinator = Coordinator(RUN, hub.journal, self.disk, sites, lambda: self.now)
        hub.coordinator.start(hub.notify)

    def join(self, name: str, seed: int = 0) -> ScriptedSite:
        self.sites[name] = joined(self.hub.connect(name), TERMS, seed)
        return self.sites[name]

    def step(self, *names: str) -> None:
        """Makes an inner step at these sites, or at all."""
        self.now += ROUND / TERMS.sync_every
        for name in names or tuple(self.sites):
            self.sites[name].step()

    def rounds(self, count: int, *names: str) -> None:
        """Trains for so many rounds, or, if none close, for half as long again."""
        last = self.closed + count
        end = self.now + 1.5 * count * ROUND
        while self.closed < last and self.now < end:
            self.step(*names)

    @property
    def closed(self) -> int:
        ledger = self.hub.coordinator._ledger
        return min(closed.round for closed in ledger.closed) if ledger else 0

    @property
    def state_bytes(self) -> int:
        return self.hub.coordinator._states.snapshot_bytes

    def formula(self, rounds: int) -> int:
        """The bytes of the payloads of so many rounds, of two states, and of a run config."""
        payloads = rounds * len(self.sites) * TERMS.fragments * PAYLOAD
        return payloads + 2 * self.state_bytes + len(run_config(TERMS).to_bytes())


def test_a_disk_of_the_size_of_the_formula_holds_a_run_with_short_rounds() -> None:
    run = Run("a", "b")
    run.rounds(2)
    run.disk.size_of_disk = run.formula(SNAPSHOT_EVERY + 4)
    run.rounds(5 * SNAPSHOT_EVERY)
    assert run.disk.refused == 0
    assert run.closed >= 5 * SNAPSHOT_EVERY


def test_a_smaller_disk_gets_snapshots_sooner_and_holds_the_run_as_well() -> None:
    run = Run("a", "b")
    run.rounds(2)
    run.disk.size_of_disk = run.formula(2 * RETENTION + 4)
    run.rounds(2 * SNAPSHOT_EVERY)
    assert run.disk.refused == 0
    assert run.closed >= 2 * SNAPSHOT_EVERY


def test_a_payload_that_counts_nowhere_goes_while_its_sender_stays() -> None:
    run = Run("a", "b")
    run.rounds(2)
    client: Any = run.sites["a"].connection._client
    blob = b"of a round that has closed"
    key = key_of(blob)
    client.send(blob, {"kind": "payload"})
    run.rounds(2 * RETENTION)
    assert run.disk.size(key), "a contribution may still name it"
    sent = run.hub.coordinator.ledger.history[0][0].counted[0]
    late = replace(sent, payloads=(Payload(key, len(blob)),))
    assert client.call("contribute", {}, late.to_bytes())[0] == {"answer": "late"}
    run.rounds(RETENTION + 1)
    with pytest.raises(Missing):
        run.disk.size(key)


def test_a_payload_that_nobody_names_goes_after_the_lease_of_its_sender() -> None:
    run = Run("a", "b")
    run.rounds(2)
    connection: Any = run.sites["b"].connection
    blob = b"of a site that dies"
    connection._client.send(blob, {"kind": "payload"})
    lose = run.sites.pop("b").connection._client.leave
    lose()
    run.rounds(2)
    assert run.disk.size(key_of(blob)), "it may be back"
    run.rounds(2 * RETENTION)
    with pytest.raises(Missing):
        run.disk.size(key_of(blob))


def test_payloads_stay_for_a_site_that_follows_a_little_behind_and_goes_on_fetching() -> None:
    ledger = ledger_of("ab")
    append(ledger, RECORDS[:20])
    ledger.snapshots.add(snapshot(*RECORDS[:19]))
    append(ledger, RECORDS[20:])
    heartbeat(ledger, "a", 1.0)
    heartbeat(ledger, "b", 1.0, applied=18)
    assert ledger.kept_from == (20,)
    assert ledger.fetched_from(2.0) == (19,)
    heartbeat(ledger, "b", 1.0, applied=3)
    assert ledger.fetched_from(2.0) == (30 - 2 * RETENTION + 1,)
    assert ledger.fetched_from(100.0) == (20,), "it is not there any more"


def test_a_snapshot_without_room_is_asked_for_again_within_a_minute() -> None:
    run = Run("a", "b")
    run.rounds(SNAPSHOT_EVERY - 2)
    coordinator = run.hub.coordinator
    client: Any = run.sites["a"].connection._client
    # The donor announces a part, and the store has no room for it.
    coordinator._states.ask_donor("a", for_snapshot=True)
    for site in run.sites.values():
        site.connection.give = lambda *state: None
    coordinator.admit(client._peer, {"kind": "state"}, key_of(b"part"), 4)
    error = NoSpace("there is no space left on this disk")
    coordinator.lacks_room(client._peer, {"kind": "state"}, error)
    run.step()
    assert coordinator.status()["trouble"] == str(error)
    for site in run.sites.values():
        del site.connection.give
    run.rounds(round(60 / ROUND))
    assert coordinator.ledger.snapshots.headers[-1].applied[0].round > SNAPSHOT_EVERY
    assert coordinator.status()["trouble"] is None


def test_a_state_is_kept_while_a_site_that_is_there_fetches_it() -> None:
    run = Run("a", "b")
    run.rounds(2)
    states = run.hub.coordinator._states
    ledger = run.hub.coordinator.ledger
    joiner = run.join("c", seed=3)
    part = Payload(key_of(b"a part of a state"), 17)
    states._hand([part], ["c"], TERMS.lease)
    del run.sites["c"]
    assert part.key in states.keys(ledger)
    for _ in range(100):
        joiner.connection.heartbeat(joiner.follower)
        run.step()
    assert not ledger.members["c"].follows
    assert part.key in states.keys(ledger)
    joiner.connection._client.leave()
    assert part.key not in states.keys(ledger)
