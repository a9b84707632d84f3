"""Who writes to the ledger of a run: the one hub that has its file, or the active one of several."""

from pathlib import Path
from typing import Protocol

from lightning_sdiloco.comm import EtcdSeat, SQLiteLedger
from lightning_sdiloco.hub.history import Journal


class Kept(Journal, Protocol):
    """A journal that was taken, and is given back."""

    def close(self) -> None:
        """Gives it back."""


class Seat(Protocol):
    """The place of the hub that serves a run, such as `EtcdSeat`."""

    holder: str

    def take(self) -> Kept | None:
        """Takes it, unless another hub has it; returns the journal, as it is then."""


class OnlySeat:
    """That of a hub whose ledger is a file, which belongs to one process."""

    def __init__(self, path: str | Path, must_exist: bool) -> None:
        self.holder = ""
        self._path, self._must_exist = path, must_exist

    def take(self) -> Kept | None:
        return SQLiteLedger(self._path, self._must_exist)


def seat_at(ledger: str | Path, name: str, must_exist: bool, insecure: bool) -> Seat:
    """Returns the place that goes with a ledger."""
    if str(ledger).startswith("etcd://"):
        return EtcdSeat(str(ledger), name, insecure)
    return OnlySeat(ledger, must_exist)


def checked_store(ledger: str | Path, store: str | Path | None) -> str | Path:
    """Returns where blobs are kept: by default beside a ledger that is a file."""
    if store is not None:
        return store
    if str(ledger).startswith("etcd://"):
        raise ValueError(
            "Hubs that share a ledger in etcd share their store too: give a folder that all of them see, or a URL such"
            " as s3://bucket/run (store)."
        )
    return Path(ledger).with_suffix(".store")
