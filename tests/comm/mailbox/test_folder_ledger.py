"""The ledger in a folder: what was said is there, whoever is killed when; and nobody writes whose turn is over."""

import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.comm import (
    Altered,
    FolderLedger,
    FolderSeat,
    HubUnreachable,
    MailboxError,
    NotActive,
    Pulses,
    SharedFiles,
    Sweeper,
    read_log,
    shared_files,
)
from lightning_sdiloco.comm.mailbox import folder_ledger
from tests.hub.folders import Faulty, all_records

TTL = 10.0


class Now:
    """A clock that stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture(params=["folder", "bucket", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow])])
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedFiles:
    monkeypatch.setattr(folder_ledger, "PAGE", 6)
    # In the thread that writes, so that every operation has its place in the order of all.
    monkeypatch.setattr(Sweeper, "delete", delete_at_once)
    if request.param == "s3":
        return shared_files(request.getfixturevalue("s3").bucket())
    return shared_files(str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


def delete_at_once(self: Sweeper, names: Any) -> None:
    for name in names:
        try:
            self._files.delete(name)
        except MailboxError:
            return


def after(files: SharedFiles, name: str = "next", wait: float = TTL) -> FolderLedger:
    """Takes the place of whoever had it and is silent."""
    now = Now()
    seat = FolderSeat(files, name, TTL, now)
    ledger = seat.take()
    if ledger is None:
        now.time += wait
        ledger = seat.take()
    assert ledger is not None
    return ledger


class Written:
    """Writes to a ledger, and remembers what was said to be written, and what may have been."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.notes: dict[str, bytes] = {}
        self.maybe: Callable[[], None] = lambda: None

    def write(self, ledger: FolderLedger, seed: int) -> None:
        """Makes forty writes of every kind: twenty records, some of which are cut again."""
        for number in range(20):
            record, note = b"record %d of %d" % (number, seed) * 20, b"%d" % number
            self._do(
                lambda record=record: ledger.append(len(self.records), record, {"open": None}),
                lambda record=record: (self.records.append(record), self.notes.pop("open", None)),
            )
            name = f"note{number % 3}"
            self._do(
                lambda name=name, note=note: ledger.note({name: note, "open": note}),
                lambda name=name, note=note: self.notes.update({name: note, "open": note}),
            )
            if number % 7 == 6:
                self._do(
                    lambda: ledger.cut(len(self.records) - 2, {"ending": b"1"}),
                    lambda: (self.records.__delitem__(slice(-2, None)), self.notes.update(ending=b"1")),
                )

    def _do(self, write: Callable[[], object], then: Callable[[], object]) -> None:
        self.maybe = lambda: (then(), None)[1]
        write()
        then()
        self.maybe = lambda: None

    def same(self, ledger: FolderLedger) -> bool:
        return [record for _, record in ledger.read()] == self.records and ledger.notes() == self.notes


def test_what_was_said_is_there_wherever_the_keeper_is_killed(files: SharedFiles) -> None:
    said = Written()
    killed = 0
    every = {"memory": 1, "s3": 37}.get(files.url.partition(":")[0], 11)  # a disk takes its time, a service more
    for operations in range(0, 400, every):
        mine = Faulty(files)
        ledger = after(mine)
        assert said.same(ledger)
        # It began with some operations; it makes so many more.
        mine.left = operations
        try:
            said.write(ledger, operations)
        except (NotActive, HubUnreachable):
            killed += 1
        if mine.left > 0:
            break
        there = after(files)
        if not said.same(there):
            # The write during which it was killed may have been done; nothing else.
            said.maybe()
        assert said.same(there), operations
        assert all_records(files) == said.records
    assert killed >= 100 // every
    assert mine.left > 0


def test_of_several_that_take_the_place_at_the_same_time_one_has_it(files: SharedFiles) -> None:
    for turn in range(20):
        now, seats = Now(), []
        for name in "abcd":
            seat = FolderSeat(files, name, TTL, now)
            seats.append(seat)
            if turn:
                assert seat.take() is None
        now.time += TTL
        barrier, taken = threading.Barrier(len(seats)), list[FolderLedger]()

        def take(seat: FolderSeat, barrier: threading.Barrier = barrier, taken: list[FolderLedger] = taken) -> None:
            barrier.wait()
            ledger = seat.take()
            if ledger:
                taken.append(ledger)

        threads = [threading.Thread(target=take, args=(seat,)) for seat in seats]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # One who reads what another has just written may follow it at once: then the first has written its last.
        last = max(taken, key=lambda ledger: ledger.turn)
        last.note({"turn": b"%d" % turn})
        for other in taken:
            if other is not last:
                with pytest.raises(NotActive, match="another site keeps the run now"):
                    other.note({"turn": b"wrong"})
        assert read_log(files).notes["turn"] == b"%d" % turn


def test_who_was_held_up_writes_nothing_though_the_entries_of_its_time_are_gone(files: SharedFiles) -> None:
    old = after(files)
    old.append(0, b"first")
    new = after(files)
    for seq in range(1, 40):
        new.append(seq, b"record %d" % seq)
    assert read_log(files).pages > 3
    for write in (lambda: old.append(1, b"wrong"), lambda: old.note({"wrong": b"1"}), lambda: old.cut(0, {})):
        with pytest.raises(NotActive):
            write()
    assert not old.held
    assert len(all_records(files)) == 40
    assert new.append(40, b"record 40")


def test_who_was_held_up_while_it_took_the_place_has_not_taken_it(
    files: SharedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = after(files)
    first.append(0, b"first")
    now = Now()
    late = FolderSeat(files, "late", TTL, now)
    assert late.take() is None
    now.time += TTL
    create = files.create

    def held_up(name: str, data: Any) -> bool:
        monkeypatch.setattr(files, "create", create)
        # Meanwhile the first goes on for long, and the entry where the other saw the end is deleted.
        for seq in range(1, 40):
            first.append(seq, b"record %d" % seq)
        assert name.split("/")[1] not in files.names("log")
        return create(name, data)

    monkeypatch.setattr(files, "create", held_up)
    assert late.take() is None
    first.append(40, b"record 40")
    assert all_records(files)[1:] == [b"record %d" % seq for seq in range(1, 41)]


def test_the_place_is_free_when_its_holder_says_so_and_not_while_it_lives(files: SharedFiles) -> None:
    ledger = after(files)
    pulses = Pulses(files, Sweeper(files), ledger.turn, "first", "run")
    now = Now()
    seat = FolderSeat(files, "second", TTL, now)
    for _ in range(5):
        pulses.beat([])
        assert seat.take() is None
        assert seat.holder == "first"
        now.time += TTL - 1
    pulses.beat([], over=True)
    taken = seat.take()
    assert taken is not None
    # A third one sees that the place was taken, before its new holder has given a sign of life.
    assert FolderSeat(files, "third", TTL, now).take() is None
    with pytest.raises(NotActive):
        ledger.note({"late": b"1"})


@pytest.mark.parametrize("what", ["log", "page", "notes"])
def test_what_was_altered_or_is_missing_is_refused(files: SharedFiles, what: str) -> None:
    ledger = after(files)
    for seq in range(15):
        ledger.append(seq, b"record %d" % seq, {"note": b"%d" % seq})
    name = f"{what}/{max(files.names(what))}"
    data = files.read(name, 0, 1 << 20)
    files.delete(name)
    if what == "notes":
        with pytest.raises(MailboxError, match="is not there"):
            after(files)
    files.create(name, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Altered, match="was truncated or altered"):
        after(files)


def test_what_cannot_create_a_file_only_once_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def overwrites(self: Any, path: str, value: bytes, mode: str = "overwrite") -> None:
        with self.open(path, "wb") as file:
            file.write(value)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", overwrites)
    with pytest.raises(ValueError, match="the service wrote a file over one that was there"):
        shared_files(f"memory://{uuid.uuid4().hex}")
    with pytest.raises(ValueError, match="does not create a file only once|cannot be opened"):
        shared_files("http://example.invalid/run")
    with pytest.raises(ValueError, match="cannot be opened"):
        shared_files("nothing-known://run")
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(PermissionError("no hard links")))
    with pytest.raises(ValueError, match="A folder needs hard links"):
        shared_files(str(tmp_path))


def test_what_s3_says_of_an_object_that_is_there_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from fsspec.implementations.memory import MemoryFileSystem

    pipe_file = MemoryFileSystem.pipe_file

    def as_s3fs(self: Any, path: str, value: bytes, mode: str = "overwrite") -> None:
        try:
            pipe_file(self, path, value, mode=mode)
        except FileExistsError:
            cause = Exception("412")
            cause.response = {"Error": {"Code": "PreconditionFailed"}}  # type: ignore[attr-defined]
            error = OSError(errno.EINVAL, "At least one of the pre-conditions you specified did not hold")  # type: ignore[assignment]
            raise error from cause

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", as_s3fs)
    files = shared_files(f"memory://{uuid.uuid4().hex}")
    assert files.create("log/0", b"one")
    assert not files.create("log/0", b"two")
