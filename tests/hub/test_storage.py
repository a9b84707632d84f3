"""Ledger and store: what they said is there after kill -9, and what is damaged or full is an error that says so."""

import errno
import os
import random
import signal
import sqlite3
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
from lightning_sdiloco.federation import (
    EVERYTHING,
    Altered,
    BlobStore,
    LedgerError,
    Missing,
    NoSpace,
    SQLiteLedger,
    key_of,
)
from lightning_sdiloco.federation.wire import CHUNK
from tests.s3 import s3_at

PACKAGE = Path(lightning_sdiloco.__file__).parent
FEDERATION = PACKAGE / "federation"
# The packages around it bring torch, which a ledger does not need.
WRITER = f"""
import sys, types
for name, folder in (("lightning_sdiloco", {str(PACKAGE)!r}), ("lightning_sdiloco.federation", {str(FEDERATION)!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from lightning_sdiloco.federation.journal import SQLiteLedger
from lightning_sdiloco.federation.store import BlobStore
ledger, store = SQLiteLedger(sys.argv[1]), BlobStore(sys.argv[2])
print("ready", flush=True)
for seq in range(ledger.last + 1, 100_000):
    key = store.put(b"%d" % seq * 1000)
    ledger.append(seq, key.encode(), {{f"open/{{seq % 3}}": b"%d" % seq}})
    print(seq, flush=True)
"""


def test_what_was_said_is_there_after_kill_9(tmp_path: Path) -> None:
    path, folder = tmp_path / "hub.sqlite", tmp_path / "store"
    last = EVERYTHING
    for attempt in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, path, folder], stdout=subprocess.PIPE, text=True
        ) as writer:
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


def test_one_process_has_the_ledger_to_itself_and_its_chain_tells_other_records_from_the_same(tmp_path: Path) -> None:
    one, same = filled(tmp_path / "one", 5), filled(tmp_path / "same", 5)
    with pytest.raises(LedgerError, match="another process has it open"):
        SQLiteLedger(tmp_path / "one")
    assert one.chain == same.chain
    one.append(5, b"this")
    same.append(5, b"that")
    assert one.chain != same.chain
    chain = one.chain
    one.close()
    again = SQLiteLedger(tmp_path / "one")
    assert (again.chain, again.last) == (chain, 5)


def test_notes_change_with_the_record_or_not_at_all_and_not_on_a_full_disk(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "hub.sqlite", 1)
    ledger.note({"open/a": b"1", "open/b": b"2", "charter": b"3"})
    assert not ledger.append(0, b"somebody else was first", {"open/a": None})
    assert ledger.notes("open/") == {"open/a": b"1", "open/b": b"2"}
    with pytest.raises(Refused):
        ledger.append(7, b"a gap", {"open/a": None})
    chain = ledger.chain
    ledger._database.execute("pragma max_page_count = 1").fetchall()  # never below what it has
    with pytest.raises(NoSpace, match="no space left"):
        ledger.append(1, bytes(100_000), {"open/a": None})
    assert (ledger.last, ledger.chain, set(ledger.notes())) == (0, chain, {"open/a", "open/b", "charter"})
    ledger._database.execute("pragma max_page_count = 100000").fetchall()
    assert ledger.append(1, b"there is space again", {"open/a": None, "closed": b"4"})
    assert ledger.notes() == {"open/b": b"2", "charter": b"3", "closed": b"4"}


# The store

LARGEST = 8 * CHUNK


@pytest.fixture(params=["folder", "bucket", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    """A store in a folder, and under URLs of fsspec."""
    if request.param == "s3":
        with s3_at(tmp_path) as server:
            yield BlobStore(server.bucket(), LARGEST)
    else:
        yield BlobStore(tmp_path if request.param == "folder" else f"memory://{uuid.uuid4().hex}", LARGEST)


def test_a_blob_comes_back_under_its_digest_until_it_is_dropped(store: BlobStore) -> None:
    keys = []
    for size in (0, 1, CHUNK, 3 * CHUNK + 7):
        blob = bytes(range(251)) * (size // 251 + 1)
        keys.append(store.put(memoryview(blob)[:size]))
        assert keys[-1] == key_of(blob[:size])
        assert store.get(keys[-1]) == blob[:size]
        assert store.size(keys[-1]) == size
        assert store.put(blob[:size]) == keys[-1]
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
    blob = os.urandom(2 * CHUNK + 1)
    upload = store.begin(key_of(blob), len(blob))
    for start in (2 * CHUNK, 0):
        assert not upload.take(start, blob[start : start + CHUNK])
    assert os.listdir(tmp_path) == ["incomplete"]
    assert upload.missing == [[CHUNK, 2 * CHUNK]]
    assert upload.take(CHUNK, blob[CHUNK : 2 * CHUNK])
    # What comes again changes nothing.
    assert upload.take(0, bytes(CHUNK))
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
        assert os.listdir(tmp_path / "incomplete") == []
        assert os.listdir(tmp_path / "blobs") == [key]
    assert store.get(store.put(bytes(3 * CHUNK))) == bytes(3 * CHUNK)


def test_parts_arrive_in_any_order_from_several_threads_and_more_than_once(tmp_path: Path) -> None:
    blob = os.urandom(40 * CHUNK + 11)
    store = BlobStore(tmp_path)
    upload = store.begin(key_of(blob), len(blob))

    def send(seed: int) -> None:
        order = list(range(0, len(blob), CHUNK))
        random.Random(seed).shuffle(order)
        for start in order:
            upload.take(start, blob[start : start + CHUNK])

    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert upload.missing == []
    upload.commit()
    assert store.get(upload.key) == blob
