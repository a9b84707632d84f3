"""The hub averages: all sites fetch the same mean, encoded once, and fetch as much however many there are."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdiloco.compression import FP4
from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.mean import decoded, encoded
from lightning_sdiloco.federation.messages import Payload
from tests.federation.sites import Site, VirtualHub, agree, equal, founded, train, train_ranked, whole
from tests.federation.test_site import normed

CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 2, "mean": "hub"}


@given(st.integers(1, 700), st.integers(0, 99), st.sampled_from([1e-38, 1e-3, 1.0, 1e30]))
def test_the_hub_reads_and_writes_the_bytes_of_fp4(numel: int, seed: int, scale: float) -> None:
    one, other = torch.randn(2, numel, generator=torch.Generator().manual_seed(seed))
    values = one * other.mul(4).exp() * scale
    values[::7], values[1::9] = 0.0, -0.0
    payload, expected = FP4().encode(values), torch.empty(numel)
    FP4().decode(payload, expected)
    assert encoded(values.numpy(), "fp4") == payload.numpy().tobytes()
    assert decoded(payload.numpy().tobytes(), numel, "fp4").tobytes() == expected.numpy().tobytes()
    assert decoded(encoded(values.numpy(), "fp32"), numel, "fp32").tobytes() == values.numpy().tobytes()


def test_in_float32_the_mean_of_the_hub_is_that_of_the_sites_also_the_last_one_and_after_a_restart() -> None:
    choices = {**CHOICES, "compression": "fp32", "rounds": 6}
    at_hub, at_sites = founded(3, **choices), founded(3, **{**choices, "mean": "sites"})
    for sites in (at_hub, at_sites):
        train(sites, 20)
        sites[0].hub.restart()
        for site in sites:
            site.mended()
        train(sites, 40)
        assert agree(sites)
        assert all(site.world.is_over for site in sites)
    assert all(record.mean and len(record.counted) == 3 for record in at_hub[0].hub.records())
    assert equal(at_hub[0].outer(), at_sites[0].outer())


def test_what_rounding_leaves_out_is_in_a_later_mean_and_lasts_through_restarts() -> None:
    outers = []
    for compression, restarts in (("fp32", False), ("fp4", False), ("fp4", True)):
        sites = founded(2, **CHOICES, compression=compression, mixing=0.0)
        for _ in range(6):
            train(sites, 8)
            if restarts:
                sites[0].hub.restart()
                for site in sites:
                    site.mended()
        assert agree(sites)
        outers.append(torch.cat(sites[0].outer()))
    exact, rounded, restarted = outers
    assert torch.equal(rounded, restarted)
    first = torch.cat(founded(2, **CHOICES)[0].outer())
    assert 0 < (rounded - exact).norm() < 0.25 * (exact - first).norm()


@pytest.mark.parametrize("compression", ["fp4", "fp4+memory"])
def test_sites_of_several_ranks_take_the_mean_of_the_hub_and_fetch_no_more_where_there_are_more(
    compression: str,
) -> None:
    fetched = list[int]()
    for ranks in ((1, 2), (1, 2, 4, 1)):
        sites = train_ranked(ranks, 20, normed, [4] * len(ranks), **CHOICES, compression=compression)
        held = [whole(site) for site in sites]
        assert all(own.keys() == held[0].keys() for own in held)
        assert all(torch.equal(own[name], held[0][name]) for own in held for name in held[0])
        assert held[0]
        buffers = [rank.engine.rounds.fragments[0].buffers.outer for site in sites for rank in site]
        assert all(equal(own, buffers[0]) for own in buffers)
        assert bool(buffers[0][0].any())
        records = sites[0][0].hub.records()
        assert all(len(record.counted) == len(ranks) for record in records)
        fetched.append(sum(payload.size for record in records for source in record.sources for payload in source))
    assert fetched[0] == fetched[1] > 0


def test_what_a_hub_cannot_read_or_do_is_refused() -> None:
    for choices, told in (
        ({"compression": "int8"}, "a hub reads 'fp4' and 'fp32'"),
        ({"mean": "others"}, "it must be 'sites' or 'hub'"),
    ):
        with pytest.raises(ValueError, match=told):
            Site(VirtualHub(1), 0, **{**CHOICES, **choices})
    sites = founded(2, **CHOICES)
    train(sites, 8)
    own = sites[0].fragments[0].flight.own
    blob = np.zeros(7, np.uint8).tobytes()
    sites[0].hub.store.put(blob)
    with pytest.raises(Refused, match="payloads of other sizes"):
        sites[0].hub.coordinator._require_size(replace(own, payloads=(Payload(key_of(blob), 7),)))
