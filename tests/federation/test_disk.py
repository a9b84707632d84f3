"""What a hub keeps: ledger, store and keys. What they said is there after kill -9, and damage is an error."""

import errno
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_sdiloco
from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.journal import LedgerError, SQLiteLedger
from lightning_sdiloco.federation.keys import UNBOUND, Identity, add_keys, fingerprint, init_keys, load, revoke_keys
from lightning_sdiloco.federation.server import Hub
from lightning_sdiloco.federation.store import BlobStore
from lightning_sdiloco.federation.wire import CHUNK, EVERYTHING, Altered, Missing, NoSpace
from lightning_sdiloco.tools.cli import main
from tests.federation.hubs import RUN, require_extra
from tests.s3 import s3_at

# The packages around it bring torch, which a ledger does not need.
WRITER = """
import sys, types
for name, folder in (("lightning_sdiloco", ""), ("lightning_sdiloco.federation", "/federation")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[3] + folder]
from lightning_sdiloco.federation.journal import SQLiteLedger
from lightning_sdiloco.federation.store import BlobStore
ledger, store = SQLiteLedger(sys.argv[1]), BlobStore(sys.argv[2])
print("ready", flush=True)
for seq in range(ledger.last + 1, 100_000):
    key = store.put(b"%d" % seq * 1000)
    ledger.append(seq, key.encode(), {f"open/{seq % 3}": b"%d" % seq})
    print(seq, flush=True)
"""


def test_what_was_said_is_there_after_kill_9(tmp_path: Path) -> None:
    path, folder = tmp_path / "hub.sqlite", tmp_path / "store"
    last = EVERYTHING
    for attempt in range(3):
        command = [sys.executable, "-c", WRITER, path, folder, Path(lightning_sdiloco.__file__).parent]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            for _ in range(random.Random(attempt).randrange(5, 25)):
                last = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
        ledger, store = SQLiteLedger(path), BlobStore(folder)
        assert ledger.last >= last
        # The blob is there before the record that names it.
        assert all(store.get(record.decode()) == b"%d" % seq * 1000 for seq, record in ledger.read())
        last = ledger.last
        assert max(map(int, ledger.notes("open/").values())) == last
        ledger.close()


def filled(path: Path, records: int) -> SQLiteLedger:
    ledger = SQLiteLedger(path)
    for seq in range(records):
        ledger.append(seq, b"record %d" % seq * 50)
    return ledger


def test_a_ledger_that_is_cut_altered_or_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hub.sqlite"
    filled(path, 60).close()
    whole = path.read_bytes()
    for left in (0, 1, 100, 4096, 3 * 4096, len(whole) - 4096, len(whole) - 1):
        path.write_bytes(whole[:left])
        with pytest.raises(LedgerError, match=r"hub\.sqlite cannot be used"):
            SQLiteLedger(path)
        assert path.read_bytes() == whole[:left]
    for change in ("update records set record = 'another' where seq = 3", "delete from records where seq = 3"):
        path.write_bytes(whole)
        database = sqlite3.connect(path)
        database.execute(change)
        database.commit()
        database.close()
        with pytest.raises(LedgerError, match="record 3 has been altered, or is missing"):
            SQLiteLedger(path)
    text, other, none = tmp_path / "text", tmp_path / "other", tmp_path / "none"
    text.write_text("Dear diary, " * 500)
    with sqlite3.connect(other) as database:
        database.execute("create table records (seq integer primary key, record blob, chain blob)")
    for path in (text, other):
        with pytest.raises(LedgerError, match="cannot be used"):
            SQLiteLedger(path)
    with pytest.raises(LedgerError, match="There is no ledger"):
        SQLiteLedger(none, must_exist=True)
    assert not none.exists()


def test_one_process_has_the_ledger_to_itself_and_notes_change_with_the_record_or_not_at_all(tmp_path: Path) -> None:
    one, same = filled(tmp_path / "one", 1), filled(tmp_path / "same", 1)
    with pytest.raises(LedgerError, match="another process has it open"):
        SQLiteLedger(tmp_path / "one")
    assert one.chain == same.chain
    same.append(1, b"that")
    one.note({"open/a": b"1", "open/b": b"2", "charter": b"3"})
    assert not one.append(0, b"somebody else was first", {"open/a": None})
    assert one.notes("open/") == {"open/a": b"1", "open/b": b"2"}
    with pytest.raises(Refused):
        one.append(7, b"a gap", {"open/a": None})
    chain = one.chain
    one._database.execute("pragma max_page_count = 1").fetchall()  # never below what it has
    with pytest.raises(NoSpace, match="no space left"):
        one.append(1, bytes(100_000), {"open/a": None})
    assert (one.last, one.chain, set(one.notes())) == (0, chain, {"open/a", "open/b", "charter"})
    one._database.execute("pragma max_page_count = 100000").fetchall()
    assert one.append(1, b"this", {"open/a": None, "closed": b"4"})
    assert one.notes() == {"open/b": b"2", "charter": b"3", "closed": b"4"}
    chain = one.chain
    assert chain != same.chain, "it tells other records from the same"
    one.close()
    again = SQLiteLedger(tmp_path / "one")
    assert (again.chain, again.last) == (chain, 1)


# The store

LARGEST = 8 * CHUNK


@pytest.fixture(params=["folder", "bucket", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    """A store in a folder, and under URLs of fsspec."""
    if request.param == "s3":
        with s3_at(tmp_path) as bucket:
            yield BlobStore(bucket, LARGEST)
    else:
        yield BlobStore(tmp_path if request.param == "folder" else f"memory://{uuid.uuid4().hex}", LARGEST)


def test_a_blob_comes_back_under_its_digest_until_it_is_dropped(store: BlobStore) -> None:
    keys = []
    for size in (0, 1, CHUNK, 3 * CHUNK + 7):
        blob = (bytes(range(251)) * (size // 251 + 1))[:size]
        keys.append(store.put(memoryview(blob)))
        assert keys[-1] == key_of(blob) == store.put(blob)
        assert (store.get(keys[-1]), store.size(keys[-1])) == (blob, size)
    assert store.read(keys[-1], CHUNK - 1, CHUNK + 1) == blob[CHUNK - 1 : CHUNK + 1]
    with pytest.raises(Refused, match="too large"):
        store.put(bytes(LARGEST + 1))
    for key in ("../../etc/passwd", "A" * 64, "", "0" * 65):
        with pytest.raises(Malformed, match="no key"):
            store.get(key)
    # What is named, or new, is retained.
    assert store.retain(keys[:1]) == 0
    assert store.retain(keys[2:], age=0) == 2
    assert store.get(keys[2])
    for key in (*keys[:2], key_of(b"nobody put this")):
        with pytest.raises(Missing):
            store.get(key)


def test_nobody_sees_a_blob_before_it_is_whole_and_right(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    blob = os.urandom(40 * CHUNK + 11)
    upload = store.begin(key_of(blob), len(blob))
    for start in (2 * CHUNK, 0):
        assert not upload.take(start, blob[start : start + CHUNK])
    assert os.listdir(tmp_path) == ["incomplete"]
    assert upload.missing == [[CHUNK, 2 * CHUNK], [3 * CHUNK, len(blob)]]

    def send(seed: int) -> None:
        order = list(range(0, len(blob), CHUNK))
        random.Random(seed).shuffle(order)
        for start in order:
            upload.take(start, blob[start : start + CHUNK])

    # In any order, from several threads, and more than once.
    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # What comes again changes nothing.
    assert upload.take(0, bytes(CHUNK))
    assert upload.missing == []
    upload.commit()
    assert store.get(upload.key) == blob
    # Other bytes than announced leave nothing behind.
    upload = store.begin(key_of(b"announced"), 9)
    upload.take(0, b"delivered")
    with pytest.raises(Altered):
        upload.commit()
    assert os.listdir(tmp_path / "incomplete") == []
    # Nor are parts taken that are none of the blob.
    upload = store.begin(key_of(b"announced"), 1000)
    for start, data in ((0, b""), (1000, b"x"), (995, b"too much")):
        with pytest.raises(Malformed, match="are none of a blob of 1,000 bytes"):
            upload.take(start, data)
    for start in range(0, 512, 2):
        upload.take(start, b"x")
    with pytest.raises(Malformed, match="each without a gap"):
        upload.take(514, b"x")
    # A bit that flips on the disk later is seen.
    key = store.put(bytes(1000))
    path = tmp_path / "blobs" / key
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    with pytest.raises(Altered, match=key):
        store.get(key)


def test_a_full_disk_refuses_the_blob_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path)
    key = store.put(b"here before")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for function in ("posix_fallocate", "pwrite", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, full)
            with pytest.raises(NoSpace):
                store.put(bytes(3 * CHUNK))
        assert (os.listdir(tmp_path / "incomplete"), os.listdir(tmp_path / "blobs")) == ([], [key])
    assert store.get(store.put(bytes(3 * CHUNK))) == bytes(3 * CHUNK)


# Keys


def test_a_bundle_says_who_its_holder_is_and_only_its_owner_can_read_it(keys: Path, tmp_path: Path) -> None:
    authority = (keys / "ca.key").read_bytes()
    for name, role in (("hub", "hub"), ("site-a", "site"), ("boss", "operator"), ("viewer", "reader")):
        assert load(keys / f"{name}.bundle").identity == Identity(RUN, role, name)
        content = (keys / f"{name}.bundle").read_bytes()
        assert content.count(b"PRIVATE KEY-----") == 2
        assert authority.split(b"\n")[1] not in content, "the key of the authority"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()} == {0o600}
    copy = tmp_path / "copy.bundle"
    copy.write_bytes((keys / "site-a.bundle").read_bytes())
    copy.chmod(0o644)
    with pytest.warns(UserWarning, match=f"chmod 600 {copy}"):
        load(copy)


def test_the_commands_make_keys_and_refuse(keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, empty = str(tmp_path / "keys"), str(tmp_path / "empty")
    main(["keys", "init", folder])
    main(["keys", "add", folder, "site-a", "site-b"])
    main(["keys", "add", folder, "boss", "--role", "operator"])
    assert "site-b.bundle: for site site-b" in capsys.readouterr().out
    # The run is that of the first hub. Sites may have got their bundles before.
    assert load(folder, "site-b").identity.run == UNBOUND
    assert load(folder).bound("llm-7b").identity == Identity("llm-7b", "hub", "hub")
    load(folder, "site-b").bound("llm-7b")
    with pytest.raises(ValueError, match="for run 'llm-7b', and not for run='other'"):
        load(folder).bound("other")
    main(["keys", "add", folder, "site-c"])
    assert load(folder, "site-c").identity.run == "llm-7b"
    main(["keys", "revoke", folder, "site-c"])
    assert len(load(folder).revoked()) == 1
    for arguments, told in (
        (["init", str(keys)], "has keys already"),
        (["init", empty, "--run", "a/b"], "run='a/b' cannot be a name"),
        (["add", empty, "site"], "has no keys yet"),
        (["add", str(keys), "../site"], "cannot be a name"),
        (["add", str(keys), "site", "--days", "0"], "days=0 is out of range"),
        (["add", str(keys), "site", "--role", "king"], "role"),
        (["add", str(keys)], "names"),
        (["revoke", str(keys), "nobody"], "has made no keys for 'nobody'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["keys", *arguments])
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


def test_keys_that_do_not_fit_are_refused_before_a_connection_is_made(keys: Path, tmp_path: Path) -> None:
    other = init_keys(tmp_path / "other", "other-run")
    expired = add_keys(keys, "late", days=-1)
    half = tmp_path / "half.bundle"
    half.write_bytes((keys / "site-a.bundle").read_bytes()[:700])
    half.chmod(0o600)
    for name, options, told in (
        ("site-a", {}, "either keys or insecure=True"),
        ("site-a", {"keys": keys, "insecure": True}, "either keys or insecure=True"),
        ("site-a", {"keys": keys / "site-b.bundle"}, "those of site 'site-b', and not of 'site-a'"),
        ("hub", {"keys": other}, "for run 'other-run', and not for run='run-1'"),
        ("late", {"keys": expired}, "expired on"),
        ("site-a", {"keys": half}, "is no bundle"),
        ("site-a", {"keys": tmp_path / "nothing.bundle"}, "There are no keys at"),
    ):
        with pytest.raises(ValueError, match=told):
            HubClient("127.0.0.1:1", RUN, name, **options)
    for options, told in (
        ({}, "either keys or insecure=True"),
        ({"keys": keys / "site-a.bundle"}, "those of site 'site-a', and a hub needs its own"),
    ):
        with pytest.raises(ValueError, match=told):
            Hub(None, None, RUN, **options)
    # A hub that has its bundle alone cannot bind the others to a run.
    with pytest.raises(ValueError, match="Start the hub with the folder of keys"):
        load(init_keys(tmp_path / "keys")).bound(RUN)


def test_a_holder_may_get_new_keys_before_the_old_ones_are_taken_back(tmp_path: Path) -> None:
    require_extra()
    init_keys(tmp_path, RUN)
    old, new = (load(add_keys(tmp_path, "site-a")).certificate for _ in range(2))
    add_keys(tmp_path, "site-b")
    # An old one that leaked goes too.
    assert sorted(revoke_keys(tmp_path, "site-a")) == sorted(map(fingerprint, (old, new)))
    assert load(tmp_path).revoked() == {fingerprint(old), fingerprint(new)}
    assert not (tmp_path / "site-a.bundle").exists()
    with pytest.raises(ValueError, match="could be revoked"):
        revoke_keys(tmp_path, "site-a")
    newest = load(add_keys(tmp_path, "site-a")).certificate
    assert revoke_keys(tmp_path, "site-a") == [fingerprint(newest)]


WITHOUT = """
import sys
for name in ("grpc", "cryptography"):
    sys.modules[name] = None
import lightning_sdiloco
from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.keys import init_keys
from lightning_sdiloco.federation.server import Hub
from lightning_sdiloco.federation.store import BlobStore
store = BlobStore(sys.argv[1] + "/store")
assert store.get(store.put(b"blob")) == b"blob"
for wanted, make in (
    ("grpcio", lambda: HubClient("127.0.0.1:1", "run", "site", insecure=True)),
    ("grpcio", lambda: Hub(None, None, "run", insecure=True)),
    ("cryptography", lambda: init_keys(sys.argv[1] + "/keys")),
):
    try:
        make()
    except ValueError as error:
        assert f"needs {wanted}, which is not installed" in str(error), error
        assert "pip install 'lightning-sdiloco[federated]'" in str(error), error
    else:
        raise AssertionError(wanted)
"""


def test_without_the_extra_all_can_be_imported_and_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, tmp_path], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
