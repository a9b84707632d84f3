"""The guard of a federation: a site whose values are finite and wrong does not ruin the others, and is told so."""

from dataclasses import replace
from functools import partial
from statistics import fmean, stdev

import pytest
import torch
from torch import nn

from lightning_sdiloco import OuterOptimizer
from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.federation.ledger import Ledger
from lightning_sdiloco.federation.messages import LeftOut
from tests.federation.sites import Site, agree, founded, train
from tests.federation.test_known_answers import RUN_CONFIG, TERMS, close, come, ledger, offer, own
from tests.training import batch

CHOICES = {"sync_every": 8, "overlap_steps": 2, "fragments": [["0.*", "2.*"], ["4.*", "6.*"]]}


def long(site: str, norm: float, **changes: object) -> object:
    return replace(own(site), norm_squared=norm**2, steps=8, **changes)


def test_who_is_too_long_beside_the_others_or_its_own_past_is_left_out_also_by_a_hub_that_starts_again() -> None:
    made = ledger("abc")
    # In a first round by the others alone.
    offer(made, long("a", 1.0), long("b", 50.0), long("c", 2.0))
    (record,) = made.due(1.0)
    assert record.left_out == (LeftOut("b", "too long", 25.0),)
    records = [record]
    made.append(record)
    for _ in range(4):
        offer(made, *(replace(long(site, 1.0), round=made.closed[0].round + 1) for site in "ac"))
        records += made.due(9.0)
        made.append(records[-1])
    again = Ledger(TERMS, RUN_CONFIG, 0.0, records)
    for one in (made, again):
        come(one, "ac")
        # Of two by their own past; of one alone nothing is known.
        offer(one, *(replace(long(site, norm), round=6) for site, norm in (("a", 1.0), ("c", 11.0))))
        assert close(one, 9.0) == ["a"]
        offer(one, replace(long("c", 11.0), round=7))
        assert close(one, 9.0) == ["c"]


def test_who_trained_longer_may_be_longer_and_where_all_are_or_the_guard_is_off_nobody_is_left_out() -> None:
    for guard, norms, steps, counted in (
        (10.0, (1.0, 40.0, 1.0), 80, "abc"),
        (10.0, (1.0, 40.0, 1.0), 8, "ac"),
        (None, (1.0, 40.0, 1.0), 8, "abc"),
        (10.0, (1.0, 0.0, 0.0), 8, "abc"),
    ):
        made = ledger("abc", guard=guard)
        offer(made, *(replace(long(s, n), steps=steps if s == "b" else 8) for s, n in zip("abc", norms, strict=True)))
        assert close(made) == [counted]


@torch.no_grad()
def fault(site: Site) -> None:
    for parameter in site.model.parameters():
        parameter.fill_(30.0)


@pytest.mark.parametrize("count", [2, 3])
def test_a_site_whose_parameters_become_one_constant_costs_the_others_nothing(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(seed: int, faulty: bool) -> float:
        sites = founded(count, **CHOICES)
        for site in sites:
            site.index += 10 * seed
        train(sites, 100)
        if faulty:
            fault(sites[-1])
        train(sites, 100)
        assert agree(sites)
        out = [own for record in sites[0].hub.records() for own in record.left_out]
        assert {own.site for own in out} == ({f"s{count - 1}"} if faulty else set())
        return fmean(float(nn.functional.mse_loss(sites[0].model(x), y)) for x, y in map(partial(batch, 9), range(50)))

    sound = [loss(seed, faulty=False) for seed in range(5)]
    assert "was left out" not in caplog.text
    assert loss(0, faulty=True) == pytest.approx(fmean(sound), abs=3 * stdev(sound))
    assert f"What this site contributed to round {100 // 8 + 1} of fragment 0 was left out" in caplog.text


def test_a_site_that_is_left_out_again_and_again_is_asked_to_leave() -> None:
    sites = founded(3, **CHOICES)
    train(sites, 20)

    def goes_on() -> None:
        for _ in range(40):
            fault(sites[2])
            train(sites, 1)

    with pytest.raises(AgreementError, match="was left out 3 times in a row"):
        goes_on()
    others = sites[:2]
    sites[2].die()
    train(others, 20)
    assert agree(others)
    assert torch.cat(others[0].outer()).abs().max() < 5


def test_a_federation_without_the_guard_has_the_bits_of_one_that_leaves_out_nobody() -> None:
    one, other = (
        founded(2, **CHOICES, outer_optimizer=OuterOptimizer(outlier_guard=guard)) for guard in (None, "auto")
    )
    for sites in (one, other):
        train(sites, 40)
    assert all(torch.equal(a, b) for a, b in zip(one[0].outer(), other[0].outer(), strict=True))
