"""The disk of a hub: ledger, store and keys. Damage is an error, and things that do not fit are
refused by name.
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
from functools import partial
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
    foreign = tmp_path / "foreign"
    filled(path, 60).close()
    sound = path.read_bytes()
    change_database(
        foreign, "create table records (seq integer primary key, record blob, chain blob)"
    )
    lengths = (0, 1, 100, 4096, 3 * 4096, len(sound) - 4096, len(sound) - 1)
    cut = [sound[:length] for length in lengths]
    for content in (*cut, b"Dear diary, " * 500, foreign.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(LedgerError, match=r"hub\.sqlite cannot be used"):
            SQLiteLedger(path)
        assert path.read_bytes() == content
    for change in (
        "update records set record = 'another' where seq = 3",
        "delete from records where seq = 3",
    ):
        path.write_bytes(sound)
        change_database(path, change)
        with pytest.raises(LedgerError, match="record 3 was altered or is missing"):
            SQLiteLedger(path)
    with pytest.raises(LedgerError, match="none does not exist"):
        SQLiteLedger(tmp_path / "none", must_exist=True)
    assert not (tmp_path / "none").exists()


def change_database(path: Path, statement: str) -> None:
    database = sqlite3.connect(path)
    database.execute(statement)
    database.commit()
    database.close()


def limit_pages(ledger: SQLiteLedger, pages: int) -> None:
    """Limits the size of the database; never below the present one."""
    ledger._database.execute(f"pragma max_page_count = {pages}").fetchall()


def test_a_ledger_has_one_process_and_notes_change_with_the_record_or_not_at_all(
    tmp_path: Path,
) -> None:
    ledger = filled(tmp_path / "ledger", 1)
    twin = filled(tmp_path / "twin", 1)
    with pytest.raises(LedgerError, match="another process has the ledger open"):
        SQLiteLedger(tmp_path / "ledger")
    assert ledger.chain == twin.chain
    twin.append(1, b"that")
    ledger.note({"open/a": b"1", "open/b": b"2", "run_config": b"3"})
    assert ledger.notes("open/") == {"open/a": b"1", "open/b": b"2"}
    for number in (0, 7):
        with pytest.raises(Refused, match="is not the next one"):
            ledger.append(number, b"it was written, or leaves a gap", {"open/a": None})
    chain = ledger.chain
    limit_pages(ledger, 1)
    with pytest.raises(NoSpace, match="no space left"):
        ledger.append(1, bytes(100_000), {"open/a": None})
    assert (ledger.last, ledger.chain) == (0, chain)
    assert set(ledger.notes()) == {"open/a", "open/b", "run_config"}
    limit_pages(ledger, 100_000)
    ledger.append(1, b"this", {"open/a": None, "closed": b"4"})
    assert ledger.notes() == {"open/b": b"2", "run_config": b"3", "closed": b"4"}
    chain = ledger.chain
    assert chain != twin.chain, "the chain differs where records differ"
    ledger.close()
    reopened = SQLiteLedger(tmp_path / "ledger")
    assert (reopened.chain, reopened.last) == (chain, 1)


# The store

LARGEST = 8 * CHUNK


@pytest.fixture(params=["folder", "bucket", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    """A store in a folder, and under URLs of fsspec."""
    if request.param == "s3":
        with s3_at(tmp_path) as bucket:
            yield BlobStore(bucket, LARGEST)
    elif request.param == "bucket":
        yield BlobStore(f"memory://{uuid.uuid4().hex}", LARGEST)
    else:
        yield BlobStore(tmp_path, LARGEST)


def test_a_blob_comes_back_under_its_digest_until_it_is_dropped(store: BlobStore) -> None:
    keys = []
    for size in (0, 1, CHUNK, 3 * CHUNK + 7):
        blob = (bytes(range(251)) * (size // 251 + 1))[:size]
        key = store.put(memoryview(blob))
        assert key == key_of(blob) == store.put(blob)
        assert store.get(key) == blob
        assert store.size(key) == size
        keys.append(key)
    assert store.read(key, CHUNK - 1, CHUNK + 1) == blob[CHUNK - 1 : CHUNK + 1]
    with pytest.raises(Refused, match="too large"):
        store.put(bytes(LARGEST + 1))
    for malformed in ("../../etc/passwd", "A" * 64, "", "0" * 65):
        with pytest.raises(Malformed, match="not a key"):
            store.get(malformed)
    assert store.retain(keys) == 0
    assert store.retain(keys[2:]) == 2
    assert store.get(keys[2])
    for gone in (*keys[:2], key_of(b"nobody put this")):
        with pytest.raises(Missing):
            store.get(gone)


def take_chunk(upload: Any, blob: bytes, start: int) -> bool:
    return upload.take(start, blob[start : start + CHUNK])


def take_shuffled(upload: Any, blob: bytes, seed: int) -> None:
    starts = range(0, len(blob), CHUNK)
    for start in random.Random(seed).sample(starts, len(starts)):
        take_chunk(upload, blob, start)


def test_nobody_sees_a_blob_before_it_is_whole_and_right(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    blob = os.urandom(40 * CHUNK + 11)
    upload = store.begin(key_of(blob), len(blob))
    for start in (2 * CHUNK, 0):
        assert not take_chunk(upload, blob, start)
    assert os.listdir(tmp_path) == ["incomplete"]
    assert upload.missing == [[CHUNK, 2 * CHUNK], [3 * CHUNK, len(blob)]]
    # In any order, from several threads, and more than once.
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(take_shuffled, upload, blob), range(4)))
    assert upload.take(0, bytes(CHUNK)), "a chunk that comes again changes nothing"
    assert upload.missing == []
    upload.commit()
    assert store.get(upload.key) == blob


def test_an_upload_of_other_bytes_than_announced_leaves_nothing_behind(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    upload = store.begin(key_of(b"announced"), 9)
    upload.take(0, b"delivered")
    with pytest.raises(Altered):
        upload.commit()
    assert os.listdir(tmp_path / "incomplete") == []
    upload = store.begin(key_of(b"announced"), 1000)
    for start, part in ((0, b""), (1000, b"x"), (995, b"too much")):
        with pytest.raises(Malformed, match="are outside the blob of 1,000 bytes"):
            upload.take(start, part)
    for start in range(0, 512, 2):
        upload.take(start, b"x")
    with pytest.raises(Malformed, match="too many gaps between its parts"):
        upload.take(514, b"x")
    upload.discard()


def test_a_full_disk_refuses_a_blob_and_keeps_the_others(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.put(os.urandom(40 * CHUNK + 11))
    stored = os.listdir(tmp_path / "blobs")
    no_space = OSError(errno.ENOSPC, "No space left")
    too_little = SimpleNamespace(free=3 * CHUNK - 1)
    for module, function, answer in (
        (os, "pwrite", no_space),
        (os, "fsync", no_space),
        (shutil, "disk_usage", too_little),
    ):
        with patch.object(module, function, Mock(side_effect=[answer])), pytest.raises(NoSpace):
            store.put(bytes(3 * CHUNK))
        assert os.listdir(tmp_path / "incomplete") == []
        assert os.listdir(tmp_path / "blobs") == stored


def test_a_bit_that_flips_on_the_disk_is_seen(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    key = store.put(bytes(3 * CHUNK))
    with (tmp_path / "blobs" / key).open("rb+") as file:
        file.write(b"\x01")
    with pytest.raises(Altered, match=key):
        store.get(key)


# Keys


def test_a_bundle_names_its_holder_and_only_its_owner_can_read_it(
    keys: Path, tmp_path: Path
) -> None:
    key_of_authority = (keys / "ca.key").read_bytes().split(b"\n")[1]
    roles = {"hub": "hub", "site-a": "site", "boss": "operator", "viewer": "reader"}
    for name, role in roles.items():
        bundle = keys / f"{name}.bundle"
        content = bundle.read_bytes()
        assert load(bundle).identity == Identity(RUN, role, name)
        assert content.count(b"PRIVATE KEY-----") == 2
        assert key_of_authority not in content
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
    # A hub that has only its bundle cannot bind the others to a run.
    with pytest.raises(ValueError, match="Start the hub with the key folder"):
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
        (["init", str(keys)], "already contains keys"),
        (["init", empty, "--run", "a/b"], "run='a/b' is not a valid name"),
        (["add", empty, "site"], "does not contain keys yet"),
        (["add", str(keys), "../site"], "is not a valid name"),
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
    foreign = init_keys(tmp_path / "other", "other-run")
    neither = "either keys or insecure=True"
    expired = add_keys(keys, "late", days=-1)
    bundle_a = keys / "site-a.bundle"
    bundle_b = keys / "site-b.bundle"
    missing = tmp_path / "nothing.bundle"
    for name, options, message in (
        ("site-a", {}, neither),
        ("site-a", {"keys": keys, "insecure": True}, neither),
        ("site-a", {"keys": bundle_b}, "belong to site 'site-b', not to 'site-a'"),
        ("hub", {"keys": foreign}, "for run 'other-run', not for run="),
        ("late", {"keys": expired}, "expired on"),
        ("site-a", {"keys": half}, "is not a bundle"),
        ("site-a", {"keys": missing}, "There are no keys at"),
    ):
        with pytest.raises(ValueError, match=message):
            HubClient("127.0.0.1:1", RUN, name, **options)
    no_handler: Any = None
    with pytest.raises(ValueError, match=neither):
        Hub(no_handler, no_handler, RUN)
    with pytest.raises(ValueError, match="belong to site 'site-a', but a hub needs its own"):
        Hub(no_handler, no_handler, RUN, keys=bundle_a)


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
    output = run_python("-c", WITHOUT, folder=tmp_path, seconds=100)
    refusal = r"needs (\w+), which is not installed.* pip install 'lightning-sdiloco\[federated\]'"
    assert re.findall(refusal, output) == ["grpcio", "grpcio", "cryptography"], output
