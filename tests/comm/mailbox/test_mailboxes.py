"""What every mailbox does: in memory, in a folder, in a bucket (in memory and of S3), and behind a hub with TLS."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.comm import (
    EVERYTHING,
    MAX_RECORD,
    Altered,
    BlobStore,
    FolderMailbox,
    InProcessMailbox,
    Malformed,
    Missing,
    Refused,
    key_of,
)
from lightning_sdiloco.comm.mailbox.frames import CHUNK
from tests.comm.mailbox.hubs import make_keys, require_extra, serving

LARGEST = 8 * CHUNK


@contextmanager
def behind_a_hub(folder: Path) -> Iterator[Any]:
    require_extra()
    with serving(folder, make_keys(folder / "keys")) as served:
        served.store.max_blob = LARGEST
        yield served.mailbox("second", max_blob=LARGEST)


@pytest.fixture(params=["in_process", "folder", "bucket", "hub", pytest.param("s3", marks=pytest.mark.s3)])
def mailbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "hub":
        with behind_a_hub(tmp_path) as mailbox:
            yield mailbox
        return
    if request.param == "in_process":
        mailbox = InProcessMailbox(LARGEST)
    else:
        url: Any = tmp_path if request.param == "folder" else f"memory://{uuid.uuid4().hex}"
        if request.param == "s3":
            url = request.getfixturevalue("s3").bucket()
        mailbox = FolderMailbox(url, LARGEST, poll=0.02)
    yield mailbox
    mailbox.close()


def test_a_blob_comes_back_under_its_digest(mailbox: Any) -> None:
    for size in (0, 1, CHUNK, 3 * CHUNK + 7):
        blob = bytes(range(251)) * (size // 251 + 1)
        key = mailbox.put(memoryview(blob)[:size])
        assert key == key_of(blob[:size])
        assert mailbox.get(key) == blob[:size]
        assert mailbox.put(blob[:size]) == key


def test_what_is_not_there_is_missing_and_what_is_no_key_is_refused(mailbox: Any) -> None:
    with pytest.raises(Missing):
        mailbox.get(key_of(b"nobody put this"))
    for key in ("../../etc/passwd", "A" * 64, "", "0" * 65):
        with pytest.raises(Malformed, match="no key"):
            mailbox.get(key)


def test_what_is_too_large_is_refused(mailbox: Any) -> None:
    with pytest.raises(Refused, match="too large"):
        mailbox.put(bytes(LARGEST + 1))
    with pytest.raises(Refused, match="too large"):
        mailbox.append(0, bytes(MAX_RECORD + 1))
    assert mailbox.append(0, bytes(MAX_RECORD))


def test_a_number_is_given_once(mailbox: Any) -> None:
    assert mailbox.append(0, b"first")
    assert mailbox.append(0, b"first"), "asked again, as after a lost answer"
    assert not mailbox.append(0, b"too late")
    with pytest.raises(Refused, match="does not follow"):
        mailbox.append(2, b"a gap")
    with pytest.raises(Refused, match="does not follow"):
        mailbox.append(-1, b"before all")
    records = mailbox.watch(EVERYTHING)
    assert next(records) == (0, b"first")


def test_of_many_at_the_same_time_one_is_first(mailbox: Any) -> None:
    given: list[tuple[bool, bytes]] = []

    def append(record: bytes) -> None:
        given.append((mailbox.append(0, record), record))

    threads = [threading.Thread(target=append, args=(b"%d" % number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ((_, winner),) = [entry for entry in given if entry[0]]
    assert next(mailbox.watch(EVERYTHING)) == (0, winner)


def test_watching_sees_what_is_there_and_what_comes_until_the_end(mailbox: Any) -> None:
    for seq in range(3):
        assert mailbox.append(seq, b"record %d" % seq)
    seen: list[tuple[int, bytes]] = []
    enough = threading.Event()

    def watch() -> None:
        for record in mailbox.watch(0):
            seen.append(record)
            if len(seen) == 4:
                enough.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert mailbox.append(3, b"record 3")
    assert mailbox.append(4, b"record 4")
    assert enough.wait(20)
    mailbox.close()
    watcher.join(20)
    assert not watcher.is_alive()
    assert seen == [(seq, b"record %d" % seq) for seq in range(1, 5)]


# A flip is refused


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flip_in_a_file_is_refused(tmp_path: Path) -> None:
    mailbox = FolderMailbox(tmp_path)
    key = mailbox.put(bytes(1000))
    mailbox.append(0, b"record")
    flip(tmp_path / "blobs" / key)
    flip(tmp_path / "records" / f"{0:012d}")
    with pytest.raises(Altered, match=key):
        mailbox.get(key)
    with pytest.raises(Altered, match="record 0"):
        next(mailbox.watch(EVERYTHING))
    with pytest.raises(Altered):
        FolderMailbox(tmp_path).append(1, b"on top of it")


def test_a_flip_at_the_hub_is_refused_by_the_site(tmp_path: Path) -> None:
    with behind_a_hub(tmp_path) as mailbox:
        key = mailbox.put(bytes(3 * CHUNK))
        flip(tmp_path / "store" / "blobs" / key)
        with pytest.raises(Altered, match=key):
            mailbox.get(key)


def test_two_stores_may_share_a_folder(tmp_path: Path) -> None:
    one, other = BlobStore(tmp_path), BlobStore(tmp_path)
    assert one.put(b"the same") == other.put(b"the same")
    assert other.get(one.put(b"another")) == b"another"
