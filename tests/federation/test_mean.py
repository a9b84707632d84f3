"""The hub averages: all sites fetch the same mean, encoded once, and fetch as much however many
there are.
"""

from collections.abc import Sequence
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
    ranks_of,
    restarted,
    train,
    train_ranked,
    untrained_of,
)
from tests.federation.test_site import normed, step_with_teacher, teacher, with_teacher

CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 2, "mean": "hub"}


@settings(deadline=None)
@given(st.integers(1, 700), st.integers(0, 99), st.sampled_from([1e-38, 1e-3, 1.0, 1e30]))
def test_the_hub_reads_and_writes_the_bytes_of_fp4(numel: int, seed: int, scale: float) -> None:
    mantissas, exponents = torch.randn(2, numel, generator=torch.Generator().manual_seed(seed))
    values = mantissas * exponents.mul(4).exp() * scale
    values[::7] = 0.0
    values[1::9] = -0.0
    payload = FP4().encode(values)
    expected = torch.empty(numel)
    FP4().decode(payload, expected)
    assert encoded(values.numpy(), "fp4") == payload.numpy().tobytes()
    assert same_bytes(decoded(payload.numpy().tobytes(), numel, "fp4"), expected)
    assert same_bytes(decoded(encoded(values.numpy(), "fp32"), numel, "fp32"), values)


def same_bytes(array: np.ndarray, tensor: torch.Tensor) -> bool:
    return array.tobytes() == tensor.numpy().tobytes()


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
    for record in at_hub[0].hub.records():
        assert record.mean
        assert len(record.counted) == 3
    assert equal(at_hub[0].outer(), at_sites[0].outer())


def record_of(number: int, blobs: Sequence[bytes]) -> Record:
    """A record of the contributions of as many sites, which weigh 1, 2, ..."""
    counted = []
    for index, blob in enumerate(blobs):
        payload = Payload(key_of(blob), len(blob))
        contribution = Contribution(
            0, number, f"s{index}", "1", "", index + 1, 0, (payload,), exact=True
        )
        counted.append(contribution)
    return Record(number - 1, 0, number, "", tuple(counted), (), False)


def test_rounding_errors_of_means_are_remembered_to_the_last_bit() -> None:
    random = np.random.default_rng(0)
    numel = 300
    sizes = Sizes(numel)
    sum_of_means = np.zeros(numel)
    sum_of_payloads = np.zeros(numel)
    residual = None
    for number in range(1, 13):
        values = random.standard_normal((3, numel)).astype(np.float32)
        blobs = [of_site.tobytes() for of_site in values]
        store = {key_of(blob): blob for blob in blobs}
        record = record_of(number, blobs)
        payload, residual = averaged(record, store.__getitem__, sizes, "fp4", residual)
        sum_of_payloads += decoded(payload, numel, "fp4")
        sum_of_means += np.average(values, axis=0, weights=[1, 2, 3])
        assert residual is not None
        error = np.frombuffer(residual, np.float32)
        assert 0.01 < np.abs(error).max() < 1.0
        np.testing.assert_allclose(sum_of_payloads + error, sum_of_means, atol=1e-5)
    # Nothing is rounded of a last mean, and nothing is left.
    record = replace(record, final=True)
    payload, residual = averaged(record, store.__getitem__, sizes, "fp4", residual)
    assert residual is None
    np.testing.assert_allclose(decoded(payload, numel, "fp32"), values.mean(0), atol=1e-6)


def train_with_mixing(compression: str, restarts: bool) -> list[Site]:
    # The equalised direction would map both, by which rounding grows.
    outer = OuterOptimizer(direction="elementwise")
    sites = founded(2, **CHOICES, compression=compression, mixing=0.0, outer_optimizer=outer)
    for _ in range(6):
        train(sites, 8)
        if restarts:
            restarted(sites)
    assert agree(sites)
    return sites


def residual_keys(site: Site) -> list[str]:
    notes = site.hub.journal.notes("residual/")
    return [text.decode() for _, text in sorted(notes.items())]


def test_rounding_errors_join_a_later_mean_and_survive_restarts() -> None:
    exact, rounded, interrupted = (
        train_with_mixing(compression, restarts)[0]
        for compression, restarts in (("fp32", False), ("fp4", False), ("fp4", True))
    )
    assert residual_keys(exact) == []
    for site in (rounded, interrupted):
        keys = residual_keys(site)
        assert len(keys) == len(site.fragments)
        check_kept_residual(site, keys)
    assert equal(rounded.outer(), interrupted.outer())
    first = torch.cat(founded(2, **CHOICES)[0].outer())
    exact_outer = torch.cat(exact.outer())
    error = (torch.cat(rounded.outer()) - exact_outer).norm()
    assert 0 < error < 0.25 * (exact_outer - first).norm()


def check_kept_residual(site: Site, keys: Sequence[str]) -> None:
    """Asserts that the store keeps one residual of the largest fragment."""
    numels = [outer.numel() for outer in site.outer()]
    largest = numels.index(max(numels))
    blobs = site.hub.store._blobs
    as_large = {key for key, blob in blobs.items() if len(blob) == 4 * numels[largest]}
    assert as_large == {keys[largest]}


@pytest.mark.parametrize("compression", ["fp4", "fp4+memory"])
def test_sites_of_several_ranks_take_the_hubs_mean_and_fetch_alike_however_many(
    compression: str,
) -> None:
    few = fetched_bytes((1, 2), compression)
    many = fetched_bytes((1, 2, 4, 1), compression)
    assert few == many > 0


def fetched_bytes(ranks: Sequence[int], compression: str) -> int:
    """The bytes that each site has fetched, after sites of so many ranks have agreed."""
    samples = [4] * len(ranks)
    sites = train_ranked(ranks, 20, normed, samples, **CHOICES, compression=compression)
    outer = [outer_parameters(site) for site in sites]
    assert outer[0]
    assert all(same(of_site, outer[0]) for of_site in outer)
    buffers = [untrained_of(rank) for rank in ranks_of(sites)]
    assert all(equal(of_rank, buffers[0]) for of_rank in buffers)
    assert bool(buffers[0][0].any())
    size = 0
    for record in sites[0][0].hub.records():
        assert len(record.counted) == len(ranks)
        size += sum(payload.size for source in record.sources for payload in source)
    return size


@pytest.mark.parametrize("mean", ["sites", "hub"])
def test_a_teacher_that_is_not_finite_at_the_first_site_reaches_no_other(mean: str) -> None:
    def poison(rank: Site, step: int) -> None:
        if rank.index == 0:
            teacher(rank).data[0, 0] = float("nan")

    choices = {**CHOICES, "mean": mean, "rounds": 2}
    sites = train_ranked(
        (1, 1, 1), 40, with_teacher, (4, 4, 4), poison, step_with_teacher, **choices
    )
    ranks = ranks_of(sites)
    at_once(lambda rank: rank.engine.finish(), ranks)
    teachers = [teacher(rank) for rank in ranks]
    assert bool(teachers[1].isfinite().all())
    assert equal(teachers, [teachers[1]] * 3)


def test_payloads_and_terms_that_a_hub_cannot_average_are_refused() -> None:
    clipped = OuterOptimizer(clip_norm=1.0)
    for choices, message in (
        ({"compression": "int8"}, "a hub can decode only 'fp4' and 'fp32'"),
        ({"mean": "others"}, "it must be 'sites' or 'hub'"),
        ({"outer_optimizer": clipped}, "clip_norm=1 does not work with mean='hub'"),
    ):
        with pytest.raises(ValueError, match=message):
            Site(VirtualHub(1), 0, **{**CHOICES, **choices})
    site = founded(2, steps=8, **CHOICES)[0]
    blob = bytes(7)
    site.hub.store.put(blob)
    launch = site.fragments[0].flight.own
    too_short = replace(launch, payloads=(Payload(key_of(blob), 7),))
    with pytest.raises(Refused, match="do not have the sizes"):
        site.hub.coordinator._require_size(too_short)
    sharded = patch.object(config, "ShardedLayout", WholeLayout)
    with sharded, pytest.raises(ValueError, match="sharded across ranks"):
        Site(VirtualHub(1), 0, **CHOICES)
