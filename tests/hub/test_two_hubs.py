"""Two hubs with a ledger in etcd and a store that both see: one serves, and the other takes over."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_sdiloco.comm import EtcdLedger, EtcdSeat, HubMailbox, HubUnreachable, NotActive
from lightning_sdiloco.federation import Record
from lightning_sdiloco.hub import HubConnection, HubService
from tests.comm.mailbox.hubs import until
from tests.etcd import EtcdProcess, etcd_at
from tests.hub.scripted import RUN, ScriptedSite, charter
from tests.hub.test_commands import HubProcess, train

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with etcd_at(tmp_path) as process:
        yield process


@pytest.fixture
def hubs(keys: Path, tmp_path: Path) -> Iterator[list[HubProcess]]:
    hubs = [HubProcess(tmp_path / name, keys) for name in ("one", "two")]
    yield hubs
    for hub in hubs:
        hub.process.send_signal(signal.SIGCONT)
        hub.end(signal.SIGKILL)


def states(hubs: list[HubProcess], number: int) -> str:
    """Asks one hub how the run stands; returns why it does not say."""
    mailbox = HubMailbox(f"127.0.0.1:{hubs[number].port}", RUN, "viewer", hubs[number].keys, timeout=3.0)
    try:
        return mailbox.call("status")[1].decode()
    except HubUnreachable as error:
        return str(error)
    finally:
        mailbox.close()


def wait_for(hubs: list[HubProcess], number: int, told: str, sites: list[ScriptedSite]) -> None:
    end = time.monotonic() + 60
    while told not in states(hubs, number):
        assert time.monotonic() < end, states(hubs, number)
        for site in sites:
            site.step()
        time.sleep(0.1)


@pytest.mark.slow
def test_a_hub_process_that_stops_or_dies_is_followed_by_the_other_and_nothing_is_lost(
    etcd: EtcdProcess, hubs: list[HubProcess], tmp_path: Path
) -> None:
    options = ["--sites", "2", "--ledger", etcd.url(ttl=2), "--store", str(tmp_path / "common")]
    assert "it waits for 2 sites" in hubs[0].start(*options)
    assert "is the active one" in hubs[1].start(*options)
    both = ",".join(f"127.0.0.1:{hub.port}" for hub in hubs)
    connections = [HubConnection(both, RUN, name, hubs[0].keys, channels=2, beat=0.2) for name in "ab"]
    sites = [ScriptedSite(connection, charter()) for connection in connections]
    train(sites, 2)
    hubs[0].process.send_signal(signal.SIGSTOP)
    wait_for(hubs, 1, '"founded": true', sites)
    train(sites, max(sites[0].rounds) + 2)
    # What was held up finds that it is not the active one, and says so; then its turn comes again.
    hubs[0].process.send_signal(signal.SIGCONT)
    wait_for(hubs, 0, "is the active one", sites)
    hubs[1].end(signal.SIGKILL)
    wait_for(hubs, 0, '"founded": true', sites)
    train(sites, max(sites[0].rounds) + 2)
    assert sites[0].digests() == sites[1].digests()
    # Every payload that is retained is served, whoever has received it.
    hubs[0].end(signal.SIGKILL)
    hubs[1].start(*options)
    wait_for(hubs, 1, '"founded": true', [])
    reader = HubMailbox(f"127.0.0.1:{hubs[1].port}", RUN, "a", hubs[1].keys, life=connections[0].life)
    require_all_payloads(etcd, reader)
    for closed in (reader, *connections):
        closed.close()


def require_all_payloads(etcd: EtcdProcess, reader: HubMailbox) -> None:
    records = etcd_records(etcd)
    assert len(records) >= 8
    payloads = {payload for record in records for own in record.counted for payload in own.payloads}
    assert all(len(reader.get(payload.key)) == payload.size for payload in payloads)


def test_a_hub_that_is_lost_is_followed_by_the_other_which_serves_every_payload(
    etcd: EtcdProcess, keys: Path, tmp_path: Path
) -> None:
    def started() -> HubService:
        url, store = etcd.url(ttl=2), tmp_path / "common"
        hub = HubService(RUN, url, sites=2, store=store, keys=keys, beat=0.2)
        hub.start()
        return hub

    one, two = started(), started()
    connections = [
        HubConnection(f"127.0.0.1:{two.port},127.0.0.1:{one.port}", RUN, name, keys, channels=2, beat=0.2)
        for name in "ab"
    ]
    sites = [ScriptedSite(connection, charter()) for connection in connections]
    train(sites, 2)
    assert one.status()["records"]
    with pytest.raises(NotActive, match="is the active one"):
        two.status()
    # It is held up for so long that the other takes over, and has not looked at its clock since.
    held_up = one._journal
    assert isinstance(held_up, EtcdLedger)
    held_up._closed.set()
    end = time.monotonic() + 60
    while two._coordinator is None:
        held_up._until = time.monotonic() + 60
        assert time.monotonic() < end
        time.sleep(0.05)
    with pytest.raises(NotActive):
        one.coordinator.end()
    train(sites, max(sites[0].rounds) + 2)
    until(lambda: one._coordinator is None)
    assert sites[0].digests() == sites[1].digests()
    one.close()
    reader = HubMailbox(f"127.0.0.1:{two.port}", RUN, "a", keys, life=connections[0].life)
    require_all_payloads(etcd, reader)
    for closed in (reader, *connections, two):
        closed.close()


def etcd_records(etcd: EtcdProcess) -> list[Record]:
    """All records, read beside the hub that has them."""
    from lightning_sdiloco.comm.mailbox.etcd import after, found, read, transaction

    seat = EtcdSeat(etcd.url(), "reader")
    folder = f"{seat.url.prefix}records/"
    answer = seat.etcd.ask("kv/txn", transaction([], [read(folder, after(folder))]), 5.0)
    return [Record.from_bytes(value[32:]) for _, value in found(answer)]


def test_hubs_that_share_a_ledger_share_a_store(etcd: EtcdProcess) -> None:
    with pytest.raises(ValueError, match="share their store"):
        HubService(RUN, etcd.url(), sites=1, insecure=True)
