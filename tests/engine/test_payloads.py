"""Messages of a sender's own code or length: by the speed of its link, few values at a time, or more than is known."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm.reduce import all_reduce_for
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES, Count
from lightning_sdiloco.comm.exchange import LENGTH_BYTES, _carried, _packed, _unpacked
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.compression import (
    ByLink,
    Compression,
    ErrorFeedback,
    Float32,
    Int2,
    Int8,
    RandomK,
    Threshold,
    TopK,
    resolve,
)
from tests.engine.groups import Groups, outer_state, with_links
from tests.engine.test_every_way import LINKS, MENU
from tests.federation.sites import agree, equal, founded, train
from tests.training import LAYERS, mlp


def mean_of(gradients: list[Tensor], factors: dict[int, float], codes: list[Any]) -> Tensor:
    reductions = [all_reduce_for("gather", len(gradients), code, 0.0) for code in codes]
    payloads = [way.encode(gradient, None).payloads[0] for way, gradient in zip(reductions, gradients, strict=True)]
    return reductions[0].mean(payloads, Count(factors), like=gradients[0])


# By link


def test_the_first_code_that_arrives_in_time_is_chosen() -> None:
    by_overlap, by_seconds = resolve(ByLink(MENU)), resolve(ByLink(MENU, within=2.0))
    sizes = [8 + resolve(name).wire_bytes(9000) for name in MENU]
    for number, size in enumerate(sizes):
        assert by_overlap.choice(9000, bytes_per_s=size / 4, overlap_s=4.0) == number
        assert by_overlap.choice(9000, size / 4 * 0.99, 4.0) == min(number + 1, 2)
        assert by_seconds.choice(9000, size / 2, 0.0) == number
    assert by_overlap.choice(9000, 0.0, 4.0) == by_overlap.choice(9000, 1.0, float("nan")) == 0


def test_the_mean_is_that_of_plain_loops_whatever_each_sends_in() -> None:
    rows = [torch.randn(9001, generator=torch.Generator().manual_seed(group)) for group in range(3)]
    by_link, factors, total = resolve(ByLink(MENU)), {0: 0.5, 1: 1.25, 2: 1.25}, torch.zeros(9001)
    for group, (row, name) in enumerate(zip(rows, MENU, strict=True)):
        code, decoded = resolve(name), torch.empty(9001)
        code.decode(code.encode(row), decoded)
        total += decoded * factors[group]
        payload = all_reduce_for("gather", 3, by_link.chosen(group), 0.0).encode(row, None).payloads[0]
        assert len(payload) == 8 + code.wire_bytes(9001)
    assert torch.equal(mean_of(rows, factors, [by_link.chosen(group) for group in range(3)]), total / 3)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_what_was_not_sent_waits_whatever_is_sent_in_next(mixing: float) -> None:
    codes: list[Compression] = [Int8(), ErrorFeedback(Int2()), ErrorFeedback(TopK(1 / 16, Float32()))]
    by_link, generator = resolve(ByLink(codes)), torch.Generator().manual_seed(0)
    outer, local, sent, moved = (torch.zeros(5000, dtype=torch.float32) for _ in range(4))
    memory: Tensor | None = None
    for choice in (2, 0, 1, 1, 0, 2, 0, 0):
        move = torch.randn(5000, generator=generator)
        local, moved = local - move, moved + move
        encoded = all_reduce_for("gather", 1, by_link.chosen(choice), mixing).encode(outer - local, memory)
        decoded, memory = torch.empty(5000), encoded.memory
        codes[choice].decode(encoded.payloads[0][8:], decoded)
        sent, outer = sent + decoded, outer - decoded
        local = mixing * local + (1 - mixing) * outer
        assert memory is not None
        torch.testing.assert_close(sent + (outer - local) + memory, moved, atol=2e-5, rtol=0)
    # Who never sends in a code with a memory has none.
    assert all_reduce_for("gather", 1, by_link.chosen(0), mixing).encode(local, None).memory is None


def numels() -> list[int]:
    return [sum(p.numel() for p in layer.parameters()) for layer in mlp() if isinstance(layer, nn.Linear)]


def test_a_slow_link_changes_the_bytes_of_its_own_group_alone() -> None:
    sent = []
    for links in ([1e9] * 3, [1e9, 1e9, 1.0]):
        run = Groups(3, links=links, sync_every=8, overlap_steps=3, fragments=LAYERS, compression=ByLink(MENU))
        run.until(24)
        run.groups.finish()
        sent.append([engine.report()["bytes_sent"] for engine in run.engines])
    assert sent[0][:2] == sent[1][:2]
    # Of 24 inner steps; the final exchange of all four layers is in float32, in two shots.
    launches = [numels()[p] for p in range(4) for step in range(8 + 2 * p, 25, 8)]
    parts = [4 * -(-numel // 3) for numel in numels()]
    exact = sum(2 * (CONTROL_BYTES + LENGTH_BYTES + part) + 2 * part for part in parts)
    short = sum(2 * (CONTROL_BYTES + LENGTH_BYTES + 8 + resolve("sparse").wire_bytes(numel)) for numel in launches)
    assert sent[1][2] == short + exact < sent[0][2]


def test_each_site_sends_in_its_own_code_through_the_hub() -> None:
    choices: dict[str, Any] = {"sync_every": 8, "overlap_steps": 2, "compression": ByLink(MENU, within=3.0)}
    sites = founded(3, **choices)
    with_links([site.engine for site in sites], LINKS)
    train(sites, 21)
    assert agree(sites)
    run = Groups(3, links=LINKS, fragments="strided:1", **choices)
    run.until(21)
    assert equal(sites[0].outer(), [own["outer"] for own in outer_state(run.engines[0])])
    record = next(record for record in sites[0].hub.records() if record.fragment == 0)
    assert [own.payloads[0].size for own in record.counted] == [8 + resolve(n).wire_bytes(numels()[0]) for n in MENU]


def test_what_receivers_tell_is_the_rate_of_the_senders_own_link() -> None:
    assert _unpacked(_packed(123_456_789_012, 5.0)) == (123_456_789_012, 1000.0)
    assert _unpacked(_packed(7, 0.0)) == (7, 0.0)
    # All receivers share the link of the sender, and one of them has a slow one itself.
    assert _carried([0.0, 4e6, 4e6, 4e6]) == 4e6
    assert _carried([0.0, 6e6, 6e6, 1e3]) == 4e6
    assert _carried([0.0, 0.0]) == 0.0


# Few values


@given(
    st.integers(1, 5),
    st.integers(1, 60),
    st.sampled_from([0.05, 0.3, 1.0]),
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=5, max_size=5),
    st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_the_mean_over_senders_is_that_of_plain_loops(
    groups: int, numel: int, share: float, weights: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Small whole numbers, of which every sum is exact, and of a group no two of one magnitude.
    rows = [torch.randperm(numel, generator=generator) + 1.0 for _ in range(groups)]
    rows = [row * (torch.randint(0, 2, (numel,), generator=generator) * 2 - 1) for row in rows]
    factors = {group: weights[group] for group in range(groups) if weights[group]}
    kept = math.ceil(Fraction(str(share)) * numel)
    kept = min(kept + kept % 2, numel)
    expected = []
    for place in range(numel):
        total, count = 0.0, 0
        for group, factor in factors.items():
            if abs(rows[group][place]) > numel - kept:
                total, count = total + factor * float(rows[group][place]), count + 1
        expected.append(total / max(count, 1))
    actual = mean_of(rows, factors, [TopK(share, Float32(), over="senders")] * groups)
    assert torch.equal(actual, torch.tensor(expected))


def test_where_all_send_all_both_means_have_the_same_bits() -> None:
    rows, factors = list(torch.randn(3, 5001)), {0: 0.7, 1: 1.1, 2: 1.2}
    for wrap in (lambda one: one, lambda one: RandomK(4, one)):
        means = [mean_of(rows, factors, [wrap(TopK(1.0, Float32(), over=o))] * 3) for o in ("groups", "senders")]
        assert torch.equal(*means)


def test_bytes_fall_while_groups_move_little_and_those_told_are_those_sent() -> None:
    kept = Threshold(1 / 8, Float32(), every=4)
    models = [nn.Linear(100, 90, bias=False) for _ in range(2)]
    run = SimulatedGroups(models, sync_every=1, overlap_steps=0, fragments=[["*"]], compression=kept, outer_lr=0.0)
    moves = torch.randn(90, 100, generator=torch.Generator().manual_seed(0))
    told, expected, tuning = [], [], None
    for scale in (1.0, 1.0, 0.5, 0.1, 0.1):
        before = models[0].weight.detach().clone()
        for model in models:
            model.weight.data += scale * moves
        gradient = (before - models[0].weight.data).flatten()
        told += [landing.bytes_sent for landing in run.step()[0]]
        for model in models:
            model.load_state_dict(run.outer_state_dict())
        tuning = kept.tuning(gradient, tuning)
        # Of each message, eight bytes that tell how long it is.
        expected.append(CONTROL_BYTES + 8 + len(kept.tuned(tuning).encode(gradient)))
    assert told == expected
    assert told[0] == told[1] == told[4] == CONTROL_BYTES + 8 + kept.wire_bytes(9000)
    assert told[3] == CONTROL_BYTES + 8 + 2 * 3 < told[2] < told[1] / 4
    run.finish()


def test_what_cannot_be_is_refused_by_name() -> None:
    topology = Topology()
    topology.exchange.learns_sizes = False
    kept = ErrorFeedback(Threshold(1 / 16, Int2(), every=3))
    for words, refused in (
        (r"exchange='two_shot' was given with compression=ByLink.*differ in length", {"exchange": "two_shot"}),
        (r"compression='fp5' is not known", {"compression": ByLink(["fp5"])}),
        ("lengths that are not known beforehand", {"compression": ByLink(["fp4", "threshold"])}),
        (r"exchange='two_shot' was given with compression=ErrorFeedback", {"compression": kept}),
        (
            r"exchange='two_shot' was given with compression=ErrorFeedback",
            {"compression": ErrorFeedback(TopK(1 / 16, Int2(), over="senders"))},
        ),
    ):
        two_shot = {"exchange": "two_shot"} if "two_shot" in words else {}
        with pytest.raises(ValueError, match=words):
            SimulatedGroups([mlp()] * 4, **{"compression": ByLink(), **two_shot, **refused})
    for one in (ByLink(), "threshold+memory"):
        with pytest.raises(ValueError, match=r"exchange='\.\.\.:nccl'"):
            StreamingDiLoCo(mlp(), topology=replace(topology), compression=one)
    for given_ in ({"menu": ()}, {"menu": "fp4"}, {"within": 0.0}, {"within": "launch"}):
        with pytest.raises(ValueError, match=rf"{next(iter(given_))}="):
            ByLink(**given_)
    with pytest.raises(ValueError, match="lengths that are not known beforehand"):
        ByLink([Threshold(1 / 16, Int2(), every=3)])
