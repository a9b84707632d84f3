"""The terms of a run are amended while it goes on, and stay so, for those who come later too."""

import pytest

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.tools.cli import main
from tests.federation.hubs import World
from tests.federation.sites import Site, agree, founded, train

CHOICES = {"sync_every": 8, "overlap_steps": 2, "fragments": [["*"]]}


def test_a_run_of_three_rounds_becomes_one_of_five_and_every_step_counts() -> None:
    sites = founded(2, **CHOICES, rounds=3)
    hub = sites[0].hub
    train(sites, 23)
    # One has launched for what was to be the last round.
    sites[0].train()
    assert sites[0].fragments[0].flight.own.exact
    hub.coordinator.amend({"rounds": 5, "grace": 2.5})
    sites[1].train()
    assert not sites[1].fragments[0].flight.own.exact
    train(sites, 2)
    assert [record.final for record in hub.records()] == [False] * 3
    hub.restart()
    for site in sites:
        site.mended()
    # With the terms that the run was founded on, or those of now.
    for rounds in (3, 5):
        sites[1].die()
        sites[1] = Site(hub, 1, **CHOICES, rounds=rounds)
        sites[1].engine.join()
        assert (sites[1].world.follower.terms.rounds, sites[1].world.follower.terms.grace) == (5, 2.5)
    with pytest.raises(ValueError, match="terms.rounds is 4 here and 3 there"):
        Site(hub, 1, **CHOICES, rounds=4)
    train(sites, 40)
    assert [record.final for record in hub.records()] == [False] * 4 + [True]
    assert agree(sites)
    with pytest.raises(Refused, match="the run has ended"):
        hub.coordinator.amend({"rounds": 9})


def test_an_operator_amends_and_a_hub_that_starts_again_keeps_it(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.start(2)
    world.join("a", "b")
    world.rounds(2)
    who = ["--hub", f"127.0.0.1:{world.port}", "--keys"]
    main(["hub", "amend", "--grace", "0.5", "--guard=0", *who, str(world.keys / "boss.bundle")])
    assert "grace=0.5, lease=2.0, quorum=1, guard=None" in capsys.readouterr().out
    world.run(lambda: all(site.follower.terms.grace == 0.5 for site in world.sites.values()))
    world.more(2)
    world.service.close()
    world.start()
    world.more(2)
    terms = world.status()["run_config"]["terms"]
    assert (terms["grace"], terms["guard"], terms["rounds"]) == (0.5, None, None)
    assert world.join("c").follower.terms.sync_every == 8
    world.more(2)
    assert world.sites["c"].follower.terms.grace == 0.5
    for arguments, words in (
        (["--lease=-1"], "lease is no finite number"),
        (["--quorum=0"], "quorum=0 is out of range"),
        ([], "Say what"),
    ):
        with pytest.raises(SystemExit):
            main(["hub", "amend", *arguments, *who, str(world.keys / "boss.bundle")])
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["hub", "amend", "--grace=1", *who, str(world.keys / "viewer.bundle")])
    assert "may not call amend" in capsys.readouterr().err
