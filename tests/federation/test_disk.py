"""What a hub keeps: ledger, store and keys. Damage is an error, and what does not fit is refused
by name.
"""

import errno
import os
import random
import re
import shutil
import sqlite3
import stat
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.keys import (
    UNBOUND,
    Identity,
    add_keys,
    fingerprint,
    init_keys,
    load,
    revoke_keys,
)
from lightning_sdiloco.federation.server import Hub
from lightning_sdiloco.federation.store import BlobStore, LedgerError, SQLiteLedger
from lightning_sdiloco.federation.wire import CHUNK, Altered, Missing, NoSpace
from tests.federation.s3 import s3_at
from tests.federation.scripted import RUN
from tests.scripts import run_python
from tests.tools.command import not_refused_with, told


def filled(path: Path, records: int) -> SQLiteLedger:
    ledger = SQLiteLedger(path)
    for seq in range(records):
        ledger.append(seq, b"record %d" % seq * 50)
    return ledger


def test_a_ledger_that_is_cut_altered_or_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hub.sqlite"
    other = tmp_path / "other"
    filled(path, 60).close()
    whole = path.read_bytes()
    with sqlite3.connect(other) as database:
        database.execute("create table records (seq integer primary key, record blob, chain blob)")
    lengths = (0, 1, 100, 4096, 3 * 4096, len(whole) - 4096, len(whole) - 1)
    for content in (*(whole[:left] for left in lengths), b"Dear diary, " * 500, other.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(LedgerError, match=r"hub\.sqlite cannot be used"):
            SQLiteLedger(path)
        assert path.read_bytes() == content
    for change in (
        "update records set record = 'another' where seq = 3",
        "delete from records where seq = 3",
    ):
        path.write_bytes(whole)
        database = sqlite3.connect(path)
        database.execute(change)
        database.commit()
        database.close()
        with pytest.raises(LedgerError, match="record 3 has been altered, or is missing"):
            SQLiteLedger(path)
    with pytest.raises(LedgerError, match="There is no ledger"):
        SQLiteLedger(tmp_path / "none", must_exist=True)
    assert not (tmp_path / "none").exists()


def test_a_ledger_has_one_process_and_notes_change_with_the_record_or_not_at_all(
    tmp_path: Path,
) -> None:
    one = filled(tmp_path / "one", 1)
    same = filled(tmp_path / "same", 1)
    with pytest.raises(LedgerError, match="another process has it open"):
        SQLiteLedger(tmp_path / "one")
    assert one.chain == same.chain
    same.append(1, b"that")
    one.note({"open/a": b"1", "open/b": b"2", "run_config": b"3"})
    assert one.notes("open/") == {"open/a": b"1", "open/b": b"2"}
    for number in (0, 7):
        with pytest.raises(Refused, match="does not follow"):
            one.append(number, b"it was written, or leaves a gap", {"open/a": None})
    chain = one.chain
    one._database.execute("pragma max_page_count = 1").fetchall()  # never below what it has
    with pytest.raises(NoSpace, match="no space left"):
        one.append(1, bytes(100_000), {"open/a": None})
    assert (one.last, one.chain, set(one.notes())) == (0, chain, {"open/a", "open/b", "run_config"})
    one._database.execute("pragma max_page_count = 100000").fetchall()
    one.append(1, b"this", {"open/a": None, "closed": b"4"})
    assert one.notes() == {"open/b": b"2", "run_config": b"3", "closed": b"4"}
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
        yield BlobStore(
            tmp_path if request.param == "folder" else f"memory://{uuid.uuid4().hex}", LARGEST
        )


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
        with pytest.raises(Malformed, match="not a key"):
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
        starts = range(0, len(blob), CHUNK)
        for start in random.Random(seed).sample(starts, len(starts)):
            upload.take(start, blob[start : start + CHUNK])

    # In any order, from several threads, and more than once.
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, range(4)))
    assert upload.take(0, bytes(CHUNK)), "what comes again changes nothing"
    assert upload.missing == []
    upload.commit()
    assert store.get(upload.key) == blob
    # Other bytes than announced leave nothing behind; nor are parts taken that are none of the
    # blob.
    upload = store.begin(key_of(b"announced"), 9)
    upload.take(0, b"delivered")
    with pytest.raises(Altered):
        upload.commit()
    assert os.listdir(tmp_path / "incomplete") == []
    upload = store.begin(key_of(b"announced"), 1000)
    for start, data in ((0, b""), (1000, b"x"), (995, b"too much")):
        with pytest.raises(Malformed, match="are outside a blob of 1,000 bytes"):
            upload.take(start, data)
    for start in range(0, 512, 2):
        upload.take(start, b"x")
    with pytest.raises(Malformed, match="parts without gaps"):
        upload.take(514, b"x")
    upload.discard()
    # A full disk refuses a blob, and keeps the others.
    blobs = os.listdir(tmp_path / "blobs")
    full = OSError(errno.ENOSPC, "No space left")
    left = SimpleNamespace(free=3 * CHUNK - 1)
    for module, function, answer in (
        (os, "pwrite", full),
        (os, "fsync", full),
        (shutil, "disk_usage", left),
    ):
        with patch.object(module, function, Mock(side_effect=[answer])), pytest.raises(NoSpace):
            store.put(bytes(3 * CHUNK))
        assert (os.listdir(tmp_path / "incomplete"), os.listdir(tmp_path / "blobs")) == ([], blobs)
    # A bit that flips on the disk later is seen.
    key = store.put(bytes(3 * CHUNK))
    with (tmp_path / "blobs" / key).open("rb+") as file:
        file.write(b"\x01")
    with pytest.raises(Altered, match=key):
        store.get(key)


# Keys


def test_a_bundle_names_its_holder_and_only_its_owner_can_read_it(
    keys: Path, tmp_path: Path
) -> None:
    authority = (keys / "ca.key").read_bytes()
    for name, role in (
        ("hub", "hub"),
        ("site-a", "site"),
        ("boss", "operator"),
        ("viewer", "reader"),
    ):
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


def test_the_commands_make_keys_and_refuse(keys: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")
    empty = str(tmp_path / "empty")
    told("keys", "init", folder)
    assert "site-b.bundle: for site site-b" in told("keys", "add", folder, "site-a", "site-b")
    told("keys", "add", folder, "boss", "--role", "operator")
    # A hub that has its bundle alone cannot bind the others to a run.
    with pytest.raises(ValueError, match="Start the hub with the folder of keys"):
        load(Path(folder) / "hub.bundle").bound(RUN)
    # The run is that of the first hub. Sites may have got their bundles before.
    assert load(folder, "site-b").identity.run == UNBOUND
    assert load(folder, "hub").bound("llm-7b").identity == Identity("llm-7b", "hub", "hub")
    load(folder, "site-b").bound("llm-7b")
    with pytest.raises(ValueError, match="for run 'llm-7b', not for run='other'"):
        load(folder, "hub").bound("other")
    told("keys", "add", folder, "site-c")
    assert load(folder, "site-c").identity.run == "llm-7b"
    told("keys", "revoke", folder, "site-c")
    assert len(load(folder, "hub").revoked()) == 1
    # A holder may get new keys before the old ones are taken back; an old one that leaked goes too.
    old = load(folder, "site-a").certificate
    new = load(add_keys(folder, "site-a")).certificate
    assert sorted(revoke_keys(folder, "site-a")) == sorted(map(fingerprint, (old, new)))
    assert {fingerprint(old), fingerprint(new)} < load(folder, "hub").revoked()
    assert not (Path(folder) / "site-a.bundle").exists()
    newest = load(add_keys(folder, "site-a")).certificate
    assert revoke_keys(folder, "site-a") == [fingerprint(newest)]
    cases = [
        (["init", str(keys)], "has keys already"),
        (["init", empty, "--run", "a/b"], "run='a/b' cannot be a name"),
        (["add", empty, "site"], "has no keys yet"),
        (["add", str(keys), "../site"], "cannot be a name"),
        (["add", str(keys), "site", "--days", "0"], "days=0 is out of range"),
        (["add", str(keys), "site", "--role", "king"], "role"),
        (["add", str(keys)], "names"),
        (["revoke", str(keys), "nobody"], "has no keys for 'nobody'"),
        (["revoke", folder, "site-a"], "to revoke"),
    ]
    assert not_refused_with("keys", cases) == {}


def test_keys_that_do_not_fit_are_refused_before_a_connection_is_made(
    keys: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half.bundle"
    half.write_bytes((keys / "site-a.bundle").read_bytes()[:700])
    half.chmod(0o600)
    others = init_keys(tmp_path / "other", "other-run")
    neither = "either keys or insecure=True"
    refused: tuple[tuple[Any, str, dict[str, Any], str], ...] = (
        (HubClient, "site-a", {}, neither),
        (HubClient, "site-a", {"keys": keys, "insecure": True}, neither),
        (
            HubClient,
            "site-a",
            {"keys": keys / "site-b.bundle"},
            "belong to site 'site-b', not to 'site-a'",
        ),
        (HubClient, "hub", {"keys": others}, "for run 'other-run', not for run="),
        (HubClient, "late", {"keys": add_keys(keys, "late", days=-1)}, "expired on"),
        (HubClient, "site-a", {"keys": half}, "is not a bundle"),
        (HubClient, "site-a", {"keys": tmp_path / "nothing.bundle"}, "There are no keys at"),
        (Hub, "", {}, neither),
        (
            Hub,
            "",
            {"keys": keys / "site-a.bundle"},
            "belong to site 'site-a', but a hub needs its own",
        ),
    )
    for kind, name, options, words in refused:
        with pytest.raises(ValueError, match=words):
            kind(
                *(("127.0.0.1:1", RUN, name) if kind is HubClient else (None, None, RUN)), **options
            )


WITHOUT = """
import sys
sys.modules |= dict.fromkeys(("grpc", "cryptography"))
from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.keys import init_keys
from lightning_sdiloco.federation.server import Hub
for make, arguments, insecure in (
    (HubClient, ("127.0.0.1:1", "run", "site"), {"insecure": True}),
    (Hub, (None, None, "run"), {"insecure": True}),
    (init_keys, ("keys",), {}),
):
    try:
        make(*arguments, **insecure)
    except ValueError as error:
        print(error)
"""


def test_without_the_extra_everything_imports_and_names_the_package_to_install(
    tmp_path: Path,
) -> None:
    said = run_python("-c", WITHOUT, folder=tmp_path, seconds=100)
    words = r"needs (\w+), which is not installed.* pip install 'lightning-sdiloco\[federated\]'"
    assert re.findall(words, said) == ["grpcio", "grpcio", "cryptography"], said
