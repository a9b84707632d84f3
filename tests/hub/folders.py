"""Sites that meet in a folder, for tests: real keepers and connections in this process, and files that fail as told."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.comm import FolderHubMailbox, HubUnreachable, SharedFiles, shared_files
from lightning_sdiloco.comm.mailbox.folder_log import read_log
from lightning_sdiloco.federation import Record
from lightning_sdiloco.hub import FolderConnection
from tests.hub.scripted import RUN, TERMS, ScriptedSite, charter

LEASE = 2.0


class Faulty(SharedFiles):
    """Files of one process: it is killed after so many operations, or stopped before the next one."""

    def __init__(self, files: SharedFiles, left: float = float("inf")) -> None:
        super().__init__(files, files.url)
        self.left = left
        self.operations = 0
        self.runs = threading.Event()
        self.runs.set()
        self._counting = threading.Lock()

    def kill(self) -> None:
        self.left = 0

    def _operate(self, name: str, *arguments: Any) -> Any:
        self.runs.wait()
        with self._counting:
            if self.left <= 0:
                raise HubUnreachable("this process was killed")
            self.left -= 1
            self.operations += 1
        return getattr(self._files, name)(*arguments)

    def size(self, name: str) -> int:
        return self._operate("size", name)

    def read(self, name: str, start: int, end: int) -> bytes:
        return self._operate("read", name, start, end)

    def names(self, folder: str) -> list[str]:
        return self._operate("names", folder)

    def move_in(self, spooled: Path, name: str) -> None:
        self._operate("move_in", spooled, name)

    def create(self, name: str, data: Any) -> bool:
        return self._operate("create", name, data)

    def delete(self, name: str) -> None:
        self._operate("delete", name)


class Folder:
    """Sites in this thread that meet in a folder, each with a keeper; with another lease all takes so much longer."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch, lease: float = LEASE) -> None:
        self.url, self.lease = url, lease
        self.files: dict[str, Faulty] = {}
        self.sites: dict[str, ScriptedSite] = {}
        self.connections: dict[str, FolderConnection] = {}
        self.open: list[Any] = []
        self.gaps: dict[str, float] = {}
        self._next = ""

        def opened(url: str) -> Faulty:
            self.files[self._next] = Faulty(shared_files(url))
            return self.files[self._next]

        monkeypatch.setattr("lightning_sdiloco.hub.kept.shared_files", opened)

    def connect(self, name: str, sites: int = 2, run: str = RUN, **choices: Any) -> FolderConnection:
        self._next = name
        self.connections[name] = FolderConnection(self.url, run, name, sites, self.lease, **choices)
        self.open.append(self.connections[name])
        return self.connections[name]

    def join(self, *names: str, seed: int = 0, sites: int = 2) -> None:
        for name in names:
            own = charter(replace(TERMS, lease=self.lease))
            self.sites[name] = ScriptedSite(self.connect(name, sites), own, seed)

    def keeper(self) -> str:
        """Who keeps the run, once somebody does."""
        found: list[str] = []
        self.run(
            lambda: found.extend(name for name in self.sites if self.connections[name].keeper.coordinator) or found
        )
        return found[0]

    def asker(self, role: Any) -> FolderHubMailbox:
        mailbox = FolderHubMailbox(shared_files(self.url), RUN, str(role), role)
        self.open.append(mailbox)
        return mailbox

    def run(self, true: Callable[[], object], seconds: float = 40.0) -> None:
        """Trains until something is true, and notes the longest time that a step took."""
        end = time.monotonic() + seconds * self.lease / LEASE
        while not true():
            assert time.monotonic() < end, {name: (site.rounds, site.told[-3:]) for name, site in self.sites.items()}
            for name, site in self.sites.items():
                began = time.monotonic()
                site.step()
                self.gaps[name] = max(self.gaps.get(name, 0.0), time.monotonic() - began)
            time.sleep(0.005)

    def rounds(self, least: int) -> Callable[[], bool]:
        return lambda: all(min(site.rounds) >= least for site in self.sites.values())

    def more(self, rounds: int) -> Callable[[], bool]:
        return self.rounds(max(max(site.rounds) for site in self.sites.values()) + rounds)

    def kill(self, name: str) -> ScriptedSite:
        """Ends a site with its keeper as kill -9 does: no file is touched any more."""
        self.files[name].kill()
        return self.sites.pop(name)

    def agree(self) -> None:
        entries = {(p, site.rounds[p], site.digest(p)) for site in self.sites.values() for p in (0, 1)}
        assert len({entry[:2] for entry in entries}) == len(entries)

    def records(self) -> list[Record]:
        """The records in the folder, each of which follows on the one before it."""
        texts = all_records(shared_files(self.url))
        records = [Record.from_bytes(text) for text in texts]
        for p in (0, 1):
            own = [record for record in records if record.fragment == p]
            assert [record.round for record in own] == list(range(1, len(own) + 1))
            assert all(after.previous == before.key for before, after in zip(own, own[1:], strict=False))
        return records

    def close(self) -> None:
        for files in self.files.values():
            files.runs.set()
        for one in self.open:
            one.close()


def all_records(files: SharedFiles) -> list[bytes]:
    """All records of a log, as somebody reads them who looks from outside."""
    from lightning_sdiloco.comm.mailbox.folder_log import MAX_ENTRY, page_name
    from lightning_sdiloco.comm.mailbox.sealed import unseal

    log = read_log(files)
    paged = [
        record
        for span in log.spans
        for record in unseal(files.read(page_name(span.page), 0, MAX_ENTRY), "a page")[1][: span.length]
    ]
    return paged + log.recent
