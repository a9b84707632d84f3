"""A hub that refuses, or that knows less than its sites: they ask ever more seldom, and train on for their patience."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sdiloco.errors import AgreementError, ExchangeError, Refused
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.store import MEMORY, SQLiteLedger
from lightning_sdiloco.federation.wire import backoff
from tests.federation.hubs import Noting, Served, until
from tests.federation.sites import Site, VirtualHub, agree, founded, train
from tests.federation.test_known_answers import own

CHOICES = {"sync_every": 8, "overlap_steps": 2}


def restarted(sites: list[Site], ledger: SQLiteLedger | None = None) -> None:
    """The hub starts again, perhaps with another ledger, and the sites find it."""
    hub = sites[0].hub
    hub.journal = ledger or hub.journal
    hub.restart()
    for site in sites:
        site.mended()


def earlier(hub: VirtualHub, records: int) -> SQLiteLedger:
    """The ledger as it was after so many records."""
    ledger = SQLiteLedger(MEMORY)
    ledger.note(hub.journal.notes())
    for seq, record in list(hub.journal.read())[:records]:
        ledger.append(seq, record)
    return ledger


def test_sites_train_on_beside_a_hub_that_knows_less_and_count_it_all_when_its_ledger_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sites = founded(2, **CHOICES)
    hub = sites[0].hub
    train(sites, 40)
    whole, before = hub.journal, sites[0].local().clone()
    restarted(sites, earlier(hub, 6))
    train(sites, 20)
    assert not torch.equal(sites[0].local(), before)
    said = [text for text in caplog.messages if "The site trains on without that hub" in text]
    assert len(said) == 2, said
    restarted(sites, whole)
    train(sites, 30)
    assert agree(sites)
    weights = [sum(one.weight for record in hub.records(0) if (one := record.of(f"s{i}"))) for i in (0, 1)]
    held = [
        site.fragments[0].samples + (site.fragments[0].flight.own.weight if site.fragments[0].flight else 0)
        for site in sites
    ]
    assert [a + b for a, b in zip(weights, held, strict=True)] == [90, 90]

    sites[0].world.follower._patience = 1.0
    restarted(sites, earlier(hub, 6))
    train(sites, 1)
    hub.passes(1.5)
    sites[0].mended()
    with pytest.raises(ExchangeError, match=r"patience=1 s.*The hub knows 2 rounds"):
        train(sites, 1)


def test_sites_that_have_more_than_a_run_that_was_rolled_back_end_at_once() -> None:
    sites = founded(2, **CHOICES)
    train(sites, 40)
    sites[0].hub.coordinator._roll_back(0)
    restarted(sites)
    with pytest.raises(AgreementError, match="After `sdiloco hub rollback`"):
        train(sites, 1)


class Refusing(Noting):
    def call(self, peer: Any, name: str, about: dict[str, Any], body: bytes) -> Any:
        self.seen.append(name)
        if name == "contribute":
            raise Refused("round 3 rests on another history than that of this hub")
        return {}, b""


def test_a_refusal_is_not_answered_by_calls_without_end(
    tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.federation.hubs.Noting", Refusing)
    with Served(tmp_path, keys) as served:
        connection = HubConnection(served.client("site-a"))
        connection._let_in = True
        began = time.monotonic()
        connection.contribute(own("site-a"), {})
        until(lambda: served.handler.seen.count("contribute") >= 3)
        assert time.monotonic() - began > 1.4, "a second and two, or half of that"
        connection.close(1.0)
        assert served.handler.seen.count("contribute") <= 4
        assert len([text for text in caplog.messages if "was not taken" in text]) == 1, "one line"
    pauses = [[backoff(tries) for _ in range(200)] for tries in (0, 1, 5, 500)]
    assert all(most / 2 <= min(own) < max(own) <= most for own, most in zip(pauses, (1, 2, 30, 30), strict=True))
