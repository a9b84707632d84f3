"""The ranks of a site over gRPC: each moves its own payload, and a contribution is whole or not there."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_sdiloco.errors import ExchangeError
from lightning_sdiloco.federation import Payload, Record
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.hub import HubConnection, HubService, HubShards, payloads_of
from tests.hub.scripted import RUN, ScriptedSite, charter

pytestmark = pytest.mark.timeout(120)


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_contribution_counts_when_the_payload_of_every_rank_is_there(keys: Path, tmp_path: Path) -> None:
    service = HubService(RUN, tmp_path / "hub.sqlite", 1, keys=keys, beat=0.2)
    service.start()
    hub = f"127.0.0.1:{service.port}"
    first = HubConnection(hub, RUN, "a", keys=keys, beat=0.2, channels=2, wanted=payloads_of(0, 2))
    others = [HubShards(hub, RUN, "a", first.life, keys=keys, wanted=payloads_of(1, 2), channels=2) for _ in range(2)]
    try:
        site = ScriptedSite(first, charter())
        until(lambda: site.hear() or site.follower.follows)
        first.beat(site.follower)
        for shards in others:
            shards.reach()
        for _ in range(8):
            site.follower.trained(4)
        halves = b"one half of it", b"the other half"
        payloads = tuple(Payload(key_of(half), len(half)) for half in halves)
        assert site.follower.launches(8) == [0]
        own = site.follower.launch(0, 8, site.digest(0), payloads)
        assert own is not None
        first.contribute(own, {payloads[0].key: halves[0]})
        until(lambda: service.coordinator.history.holds(payloads[:1]))
        time.sleep(0.3)
        assert service.coordinator.ledger.members["a"].connected
        assert not list(service.coordinator.history.journal.read())
        others[0].contribute(own, {payloads[1].key: halves[1]})
        until(lambda: site.hear() or site.blobs)
        (record,) = [Record.from_bytes(text) for _, text in service.coordinator.history.journal.read()]
        assert [one.payloads for one in record.counted] == [payloads]
        # The first rank has fetched nothing of the other one, and the other one, started anew, its own half alone.
        assert site.blobs == {record.key: {payloads[0].key: halves[0]}}
        others[1].fetch(record)
        fetched = dict[str, object]()
        until(lambda: fetched.update(others[1].fetched()) or fetched)
        assert fetched == {record.key: {payloads[1].key: halves[1]}}
        # Each rank knows what its own link carried; what was there already tells nothing.
        rates = [one.sends_bytes_per_s for one in (first, *others)]
        assert min(rates[:2]) > 0 == rates[2]
    finally:
        first.close()
        for shards in others:
            shards.close()
        service.close()


def test_a_rank_that_cannot_reach_the_hub_says_so(keys: Path) -> None:
    shards = HubShards("127.0.0.1:1", RUN, "a", "0" * 16, keys=keys)
    with pytest.raises(ExchangeError, match="Every rank of a site speaks with the hub itself"):
        shards.reach(timeout=0.0)
    shards.close()
