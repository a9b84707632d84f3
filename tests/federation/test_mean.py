"""The hub averages: all sites fetch the same mean, encoded once, and fetch as much however many
there are.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdiloco import OuterOptimizer
from lightning_sdiloco.compression import FP4
from lightning_sdiloco.engine.shards import WholeLayout
from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation import config
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.mean import averaged, decoded, encoded
from lightning_sdiloco.federation.messages import Contribution, Payload, Record
from lightning_sdiloco.federation.untrained import Sizes
from tests.bits import same
from tests.federation.sites import (
    Site,
    VirtualHub,
    agree,
    at_once,
    equal,
    founded,
    outer_parameters,
    restarted,
    train,
    train_ranked,
)
from tests.federation.test_site import normed, step_with_teacher, with_teacher

CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 2, "mean": "hub"}


@settings(deadline=None)
@given(st.integers(1, 700), st.integers(0, 99), st.sampled_from([1e-38, 1e-3, 1.0, 1e30]))
def test_the_hub_reads_and_writes_the_bytes_of_fp4(numel: int, seed: int, scale: float) -> None:
    one, other = torch.randn(2, numel, generator=torch.Generator().manual_seed(seed))
    values = one * other.mul(4).exp() * scale
    values[::7], values[1::9] = 0.0, -0.0
    payload = FP4().encode(values)
    expected = torch.empty(numel)
    FP4().decode(payload, expected)
    assert encoded(values.numpy(), "fp4") == payload.numpy().tobytes()
    assert decoded(payload.numpy().tobytes(), numel, "fp4").tobytes() == expected.numpy().tobytes()
    assert (
        decoded(encoded(values.numpy(), "fp32"), numel, "fp32").tobytes()
        == values.numpy().tobytes()
    )


def test_the_hubs_float32_mean_is_that_of_the_sites_at_the_end_and_after_a_restart() -> None:
    choices = {**CHOICES, "compression": "fp32", "rounds": 6}
    at_hub = founded(3, **choices)
    at_sites = founded(3, **{**choices, "mean": "sites"})
    for sites in (at_hub, at_sites):
        train(sites, 20)
        restarted(sites)
        train(sites, 40)
        assert agree(sites)
        assert all(site.world.is_over for site in sites)
    assert all(record.mean and len(record.counted) == 3 for record in at_hub[0].hub.records())
    assert equal(at_hub[0].outer(), at_sites[0].outer())


def test_rounding_errors_of_means_are_remembered_to_the_last_bit() -> None:
    random = np.random.default_rng(0)
    numel = 300
    told = np.zeros(numel)
    sent = np.zeros(numel)
    residual = None
    sizes = Sizes(numel)
    for number in range(12):
        blobs = random.standard_normal((3, numel)).astype(np.float32)
        store = {key_of(blob.tobytes()): blob.tobytes() for blob in blobs}
        counted = tuple(
            Contribution(
                0, number + 1, f"s{i}", "1", "", i + 1, 0, (Payload(key, len(blob)),), exact=True
            )
            for i, (key, blob) in enumerate(store.items())
        )
        record = Record(number, 0, number + 1, "", counted, (), False)
        payload, residual = averaged(record, store.__getitem__, sizes, "fp4", residual)
        told += decoded(payload, numel, "fp4")
        sent += np.average(blobs, axis=0, weights=[1, 2, 3])
        assert residual is not None
        rest = np.frombuffer(residual, np.float32)
        assert 0.01 < np.abs(rest).max() < 1.0
        np.testing.assert_allclose(told + rest, sent, atol=1e-5)
    # Nothing is rounded of a last mean, and nothing is left.
    payload, residual = averaged(
        replace(record, final=True), store.__getitem__, sizes, "fp4", residual
    )
    assert residual is None
    np.testing.assert_allclose(decoded(payload, numel, "fp32"), blobs.mean(0), atol=1e-6)


def test_rounding_errors_join_a_later_mean_and_survive_restarts() -> None:
    outers = []
    for compression, restarts in (("fp32", False), ("fp4", False), ("fp4", True)):
        outer = OuterOptimizer(
            direction="elementwise"
        )  # or both would be mapped, by which rounding grows
        sites = founded(2, **CHOICES, compression=compression, mixing=0.0, outer_optimizer=outer)
        for _ in range(6):
            train(sites, 8)
            if restarts:
                restarted(sites)
        assert agree(sites)
        outers.append(torch.cat(sites[0].outer()))
        # One for each fragment is kept, where something is rounded.
        kept = [
            text.decode() for _, text in sorted(sites[0].hub.journal.notes("residual/").items())
        ]
        assert len(kept) == (len(sites[0].fragments) if compression == "fp4" else 0)
        numels = [outer.numel() for outer in sites[0].outer()]
        largest = numels.index(max(numels))
        like_it = {
            key
            for key, blob in sites[0].hub.store._blobs.items()
            if len(blob) == 4 * numels[largest]
        }
        assert compression == "fp32" or like_it == {kept[largest]}
    exact, rounded, interrupted = outers
    assert torch.equal(rounded, interrupted)
    first = torch.cat(founded(2, **CHOICES)[0].outer())
    assert 0 < (rounded - exact).norm() < 0.25 * (exact - first).norm()


@pytest.mark.parametrize("compression", ["fp4", "fp4+memory"])
def test_sites_of_several_ranks_take_the_hubs_mean_and_fetch_alike_however_many(
    compression: str,
) -> None:
    fetched = list[int]()
    for ranks in ((1, 2), (1, 2, 4, 1)):
        sites = train_ranked(
            ranks, 20, normed, [4] * len(ranks), **CHOICES, compression=compression
        )
        held = [outer_parameters(site) for site in sites]
        assert held[0]
        assert all(same(own, held[0]) for own in held)
        buffers = [
            rank.engine.rounds.fragments[0].untrained.outer for site in sites for rank in site
        ]
        assert all(equal(own, buffers[0]) for own in buffers)
        assert bool(buffers[0][0].any())
        records = sites[0][0].hub.records()
        assert all(len(record.counted) == len(ranks) for record in records)
        fetched.append(
            sum(
                payload.size
                for record in records
                for source in record.sources
                for payload in source
            )
        )
    assert fetched[0] == fetched[1] > 0


@pytest.mark.parametrize("mean", ["sites", "hub"])
def test_a_teacher_that_is_not_finite_at_the_first_site_reaches_no_other(mean: str) -> None:
    def at(rank: Site, step: int) -> None:
        if rank.index == 0:
            rank.model[0].teacher.weight.data[0, 0] = float("nan")

    choices = {**CHOICES, "mean": mean, "rounds": 2}
    sites = train_ranked((1, 1, 1), 40, with_teacher, (4, 4, 4), at, step_with_teacher, **choices)
    ranks = [rank for (rank,) in sites]
    at_once(lambda rank: rank.engine.finish(), ranks)
    teachers = [rank.model[0].teacher.weight for rank in ranks]
    assert bool(teachers[1].isfinite().all())
    assert equal(teachers, [teachers[1]] * 3)


def test_payloads_and_terms_that_a_hub_cannot_average_are_refused() -> None:
    for choices, told in (
        ({"compression": "int8"}, "a hub reads 'fp4' and 'fp32'"),
        ({"mean": "others"}, "it must be 'sites' or 'hub'"),
        (
            {"outer_optimizer": OuterOptimizer(clip_norm=1.0)},
            "clip_norm=1 does not work with mean='hub'",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            Site(VirtualHub(1), 0, **{**CHOICES, **choices})
    sites = founded(2, steps=8, **CHOICES)
    own = sites[0].fragments[0].flight.own
    blob = np.zeros(7, np.uint8).tobytes()
    sites[0].hub.store.put(blob)
    with pytest.raises(Refused, match="do not have the sizes"):
        sites[0].hub.coordinator._require_size(replace(own, payloads=(Payload(key_of(blob), 7),)))
    sharded = patch.object(config, "ShardedLayout", WholeLayout)
    with sharded, pytest.raises(ValueError, match="sharded over the ranks"):
        Site(VirtualHub(1), 0, **CHOICES)
