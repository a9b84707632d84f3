"""A hub whose disk is lost: a copy was made while the run went on, and the run goes on from it."""

import shutil
from pathlib import Path

import pytest

from lightning_sdiloco.federation.server import HubService
from lightning_sdiloco.federation.store import LedgerError, NoSpace
from lightning_sdiloco.tools.cli import main
from tests.federation.hubs import World, require_agreement, until
from tests.federation.scripted import RUN


def test_a_run_goes_on_from_a_copy_of_its_hub(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, who = tmp_path / "copy", ["--hub", "", "--keys", str(world.keys / "boss.bundle")]

    def start(folder: Path, sites: int | None = None, every: float = 3600.0) -> None:
        more = {"keys": world.keys, "heartbeat": 0.2, "backups": copy, "backups_every": every}
        world.service = HubService(RUN, folder / "hub.sqlite", sites, f"127.0.0.1:{world.port}", **more)
        world.port = world.service.port
        world.service.start()
        who[1] = f"127.0.0.1:{world.port}"

    (tmp_path / "first").mkdir()
    start(tmp_path / "first", 3)
    world.join("a", "b", "c")
    world.rounds(3)
    main(["hub", "backup", *who])
    assert f"records are in {copy}, at the hub" in capsys.readouterr().out
    world.more(1)
    # Later ones take the place of earlier ones, and hold nothing that is of no use.
    main(["hub", "backup", *who])
    stored = [{path.name for path in (folder / "hub.store/blobs").iterdir()} for folder in (tmp_path / "first", copy)]
    assert stored[1] <= stored[0]
    assert sorted(path.name for path in copy.iterdir()) == ["hub.sqlite", "hub.store"]
    assert copy.stat().st_mode & 0o077 == 0
    # All is lost but the copy.
    for name in ("a", "b", "c"):
        world.kill(name)
    world.service.close()
    shutil.rmtree(tmp_path / "first")
    start(copy, every=0.2)
    records = world.status()["records"]
    assert records >= 6
    world.join("a", "b", seed=7)
    world.run(lambda: world.status()["records"] > records + 4)
    require_agreement(world.sites.values())


def test_a_hub_copies_by_itself_and_says_when_it_cannot(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    world.service = HubService(
        RUN, world.folder / "hub.sqlite", 1, keys=world.keys, heartbeat=0.2, backups=copy, backups_every=0.3
    )
    world.port = world.service.port
    world.service.start()
    world.join("a")
    world.rounds(2)
    until(lambda: (copy / "hub.sqlite").exists())
    before = (copy / "hub.sqlite").read_bytes()

    def full(*_: object) -> None:
        raise NoSpace("there is no space left on the disk for copies")

    with monkeypatch.context() as patch:
        patch.setattr(world.service.ledger, "back_up", full)
        until(lambda: "could not be copied: there is no space left" in caplog.text)
    world.more(1)
    assert (copy / "hub.sqlite").read_bytes()[:16] == before[:16] == b"SQLite format 3\0"


def test_a_run_whose_ledger_is_lost_is_founded_again_from_what_its_sites_hold(world: World, tmp_path: Path) -> None:
    world.start(3)
    world.join("a", "b", "c")
    world.rounds(4)
    # One has landed a round of which the others know nothing any more.
    world.sites["c"].step()
    before = {name: list(site.rounds) for name, site in world.sites.items()}
    world.service.close()
    (tmp_path / "hub.sqlite").unlink()
    shutil.rmtree(tmp_path / "hub.store")
    with pytest.raises(LedgerError, match="There is no ledger"):
        world.start()
    world.service = HubService(
        RUN, tmp_path / "again.sqlite", 3, f"127.0.0.1:{world.port}", keys=world.keys, heartbeat=0.2, refound=True
    )
    world.service.start()
    world.run(lambda: world.status()["founded"])
    world.more(3)
    require_agreement(world.sites.values())
    assert all(
        now > then for name, site in world.sites.items() for now, then in zip(site.rounds, before[name], strict=True)
    )
    # It goes on after a restart too, gives a joiner a state, and is not founded once more.
    world.service.close()
    with pytest.raises(ValueError, match="start the hub without --refound"):
        HubService(RUN, tmp_path / "again.sqlite", 3, keys=world.keys, refound=True)
    world.service = HubService(
        RUN, tmp_path / "again.sqlite", None, f"127.0.0.1:{world.port}", keys=world.keys, heartbeat=0.2
    )
    world.service.start()
    world.join("site-a", seed=5)
    world.more(2)
    require_agreement(world.sites.values())
