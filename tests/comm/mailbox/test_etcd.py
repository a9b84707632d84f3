"""The ledger in etcd: one hub writes, and who is not the active one any more writes nothing."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_sdiloco.comm import EtcdLedger, EtcdSeat, LedgerError, MailboxError, NotActive
from lightning_sdiloco.comm.mailbox.etcd import put, transaction
from lightning_sdiloco.errors import Refused
from tests.etcd import EtcdProcess, etcd_at

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    with etcd_at(tmp_path_factory.mktemp("etcd")) as process:
        yield process


@pytest.fixture
def seats(etcd: EtcdProcess, request: pytest.FixtureRequest) -> list[EtcdSeat]:
    """Those of two hubs, for a run of this test."""
    return [EtcdSeat(etcd.url(request.node.name, ttl=2), name) for name in ("one", "two")]


def taken(seat: EtcdSeat) -> EtcdLedger:
    ledger = seat.take()
    assert ledger is not None
    return ledger


def waited_for(seat: EtcdSeat) -> EtcdLedger:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if (ledger := seat.take()) is not None:
            return ledger
        time.sleep(0.05)
    raise AssertionError("the place was not free")


def test_records_and_notes_are_there_for_the_next_hub(seats: list[EtcdSeat]) -> None:
    first = taken(seats[0])
    assert seats[1].take() is None
    assert seats[1].holder == "one"
    for seq in range(300):
        assert first.append(seq, b"record %d" % seq, {"open/a": b"%d" % seq, "open/b": None})
    assert first.append(7, b"record 7")
    assert not first.append(7, b"another")
    with pytest.raises(Refused, match="does not follow"):
        first.append(301, b"a gap")
    with pytest.raises(Refused, match="too large"):
        first.note({"charter": bytes(2 << 20)})
    first.note({"open/a": None, "charter": b"\0\xff"})
    first.close()
    second = taken(seats[1])
    assert [text for _, text in second.read(297)] == [b"record 298", b"record 299"]
    assert len(list(second.read())) == 300
    assert second.notes() == {"charter": b"\0\xff"}
    second.cut(2, {"ending": b"1"})
    assert second.append(2, b"another history")
    assert [seq for seq, _ in second.read()] == [0, 1, 2]
    second.close()


def test_a_hub_that_was_held_up_writes_nothing_when_another_has_taken_over(
    seats: list[EtcdSeat],
) -> None:
    first = taken(seats[0])
    first.append(0, b"before")
    # As if its process had been stopped: it does not renew, and has not looked at its clock since.
    first._closed.set()
    second = waited_for(seats[1])
    first._until = time.monotonic() + 100
    for write in (
        lambda: first.append(1, b"too late"),
        lambda: first.note({"open/a": b"too late"}),
        lambda: first.cut(0, {}),
    ):
        with pytest.raises(NotActive):
            write()
    assert not first.held
    assert second.append(1, b"after")
    assert [text for _, text in second.read()] == [b"before", b"after"]
    assert second.notes() == {}
    second.close()


def test_a_write_whose_answer_was_lost_is_made_once(seats: list[EtcdSeat], monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = taken(seats[0])
    ask, asked = ledger._etcd.ask, []

    def twice(call: str, body: dict, patience: float) -> dict:
        if body.get("compare"):
            asked.append(body)
            assert ask(call, body, patience)["succeeded"]
        return ask(call, body, patience)

    monkeypatch.setattr(ledger._etcd, "ask", twice)
    assert ledger.append(0, b"record")
    ledger.note({"a": b"1"})
    ledger.note({"a": b"2"})
    # A request that was on its way for long changes nothing.
    assert not ask("kv/txn", asked[1], 1.0).get("succeeded")
    monkeypatch.undo()
    ledger.close()
    second = taken(seats[1])
    assert (list(second.read()), second.notes()) == ([(0, b"record")], {"a": b"2"})
    second.close()


def test_a_hub_whose_etcd_is_gone_is_no_longer_the_active_one(tmp_path: Path) -> None:
    with etcd_at(tmp_path) as etcd:
        ledger = taken(EtcdSeat(etcd.url(ttl=2), "one"))
        ledger.append(0, b"record")
        etcd.stop()
        with pytest.raises(NotActive, match="does not answer"):
            ledger.append(1, b"nobody knows")
        assert not ledger.held
        etcd.go_on()
        second = waited_for(EtcdSeat(etcd.url(ttl=2), "two"))
        # It was written or not, but not later than now.
        before = list(second.read())
        assert before[0] == (0, b"record")
        with pytest.raises(NotActive):
            ledger.append(1, b"nobody knows")
        assert list(second.read()) == before
        second.close()


def test_a_record_that_was_altered_is_told_and_the_place_is_given_back(seats: list[EtcdSeat]) -> None:
    ledger = taken(seats[0])
    ledger.append(0, b"record")
    ledger.append(1, b"record")
    ledger.close()
    key = f"{seats[0].url.prefix}records/{1:012d}"
    seats[0].etcd.ask("kv/txn", transaction([], [put(key, bytes(32) + b"record")]), 1.0)
    for seat in seats:
        with pytest.raises(LedgerError, match="record 1 has been altered"):
            seat.take()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("etcd://127.0.0.1:2379", "PREFIX"),
        ("etcd:///run", "PREFIX"),
        ("etcd://10.0.0.1:2379/run", "whoever is on the way"),
        ("etcd://localhost/run?timeout=3", "has no use for timeout"),
        ("etcd://localhost/run?ttl=soon", "whole number"),
        ("etcd://localhost/run?ca=ca.pem", "belong together"),
        ("etcd://localhost/run?ca=no&cert=no&key=no", "cannot be used"),
    ],
)
def test_what_cannot_be_used_is_refused(url: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EtcdSeat(url, "one")


def test_etcd_with_certificates_is_spoken_to_with_tls(tmp_path: Path) -> None:
    for name, subject in (("ca", "/CN=ca"), ("pair", "/CN=127.0.0.1")):
        signed = [] if name == "ca" else ["-CA", f"{tmp_path}/ca.pem", "-CAkey", f"{tmp_path}/ca.key"]
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *signed]
        words += ["-subj", subject, "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
        subprocess.run(
            [*words, "-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem"],
            check=True,
            capture_output=True,
        )
    options = ["--client-cert-auth", f"--trusted-ca-file={tmp_path}/ca.pem"]
    options += [f"--cert-file={tmp_path}/pair.pem", f"--key-file={tmp_path}/pair.key"]
    with etcd_at(tmp_path, options, "https") as etcd:
        files = {"ca": tmp_path / "ca.pem", "cert": tmp_path / "pair.pem", "key": tmp_path / "pair.key"}
        ledger = taken(EtcdSeat(etcd.url(ttl=2, **files), "one"))
        assert ledger.append(0, b"record")
        ledger.close()
        with pytest.raises(MailboxError):
            EtcdSeat(etcd.url(ttl=2), "a stranger").take()
